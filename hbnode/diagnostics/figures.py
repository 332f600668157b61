"""Drawing of data. matplotlib is imported when something is drawn, and needed for nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D


def axes(ax: Axes | None) -> Axes:
    """The axes to draw into; those of a new figure if there are none."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plotting needs matplotlib. Fix: pip install 'hbnode[plot]'.") from error
    if ax is None:
        return plt.subplots(layout="constrained")[1]
    if not hasattr(ax, "get_xlim"):
        raise TypeError(f"ax must be matplotlib Axes, got {type(ax).__name__}. Fix: one of them, such as axes[0].")
    return ax


def style(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of a line: those given, under any of their names, and the defaults for the rest."""
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.lines import Line2D

    return normalize_kwargs(dict(defaults), Line2D) | normalize_kwargs(dict(given), Line2D)


def legend(ax: Axes, handles: Sequence[Line2D] | None = None) -> None:
    """A legend beside the axes where the figure's layout makes room for it, else above them or off their curves."""
    from matplotlib.transforms import ScaledTranslation

    found = list(handles) if handles is not None else ax.get_legend_handles_labels()[0]
    right = twin(ax)
    figure = ax.figure
    if not found:
        return
    if figure.get_layout_engine() is None and right is None:
        ax.legend(handles=found, fontsize="small")
        return
    if figure.get_layout_engine() is None:  # matplotlib would look for the curves of one of the two axes alone
        above: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 4}
        ax.legend(handles=found, fontsize="small", frameon=False, columnspacing=1.0, **above)
        return
    gap = ScaledTranslation((5 if right is None else 55) / 72, 0.0, figure.dpi_scale_trans)  # room for tick labels
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1), "bbox_transform": ax.transAxes + gap}
    ax.legend(handles=found, fontsize="small", borderaxespad=0.0, handlelength=1.5, frameon=False, **place)


def ticks_of_short_axis(axis: Axis) -> None:
    """Number a logarithmic axis of less than two decades at 1, 2 and 5, where powers of ten would be too few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if low > 0 and high / low < 100:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low > 5 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def twin(ax: Axes) -> Axes | None:
    """The axes that share the x-axis and the place of these, if there are any."""
    shared = ax.get_shared_x_axes().get_siblings(ax)
    return next((a for a in shared if a is not ax and a.get_position().bounds == ax.get_position().bounds), None)


def numbers(values: object) -> Tensor:
    """Tensors of any device and dtype, arrays, numbers and lists of these as a float64 tensor without a graph."""
    if isinstance(values, (list, tuple)) and any(isinstance(value, Tensor) for value in values):
        return torch.stack([numbers(value) for value in values])
    return torch.as_tensor(values).detach().to("cpu", torch.float64)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # left axis, then right axis
    "forward": ("forward NFE", {"marker": "o", "linestyle": "-"}),
    "backward": ("backward NFE", {"marker": "s", "linestyle": "-", "markerfacecolor": "none"}),
    "error": ("error", {"marker": "o", "linestyle": ":"}),
    "gradient_error": ("gradient error", {"marker": "s", "linestyle": ":", "markerfacecolor": "none"}),
}


def draw_tolerance_curves(curves: Mapping[str, Mapping[str, Sequence[float]]], ax: Axes | None, **kwargs: Any) -> Axes:
    """Evaluations on the left axis, errors on the right; a colour for each curve, or for each pass of a single one.

    The columns of each curve are those of :class:`hbnode.diagnostics.NFEToleranceCurve`.
    """
    from matplotlib.lines import Line2D

    ax = axes(ax)
    right = twin(ax) or ax.twinx()
    several = len(curves) > 1
    handles: list[Line2D] = []
    for index, (name, curve) in enumerate(curves.items()):
        for kind, (label, look) in KINDS.items():
            values = curve[kind]
            if not any(values):  # no backward evaluations, or no error
                continue
            color = f"C{index}" if several else "C0" if kind in ("forward", "error") else "C1"
            on = right if "error" in kind else ax
            properties = style({**look, "color": color, "label": label}, kwargs)
            (line,) = on.plot(curve["tolerance"], values, **properties)
            if not several:
                handles.append(line)
        if several:
            handles.append(Line2D([], [], color=f"C{index}", linewidth=4, label=name))
    if several:
        handles += [Line2D([], [], color="0.4", label=label, **look) for label, look in KINDS.values()]
    ax.set(xscale="log", xlabel="tolerance (rtol = atol)", ylabel="function evaluations", ylim=(0, None))
    ax.xaxis.set_inverted(True)
    right.set(yscale="log", ylabel="error")
    ticks_of_short_axis(right.yaxis)
    legend(ax, handles)
    return ax


def draw_adjoint_norms(
    t: Sequence[float],
    h: Sequence[float],
    m: Sequence[float] | None,
    total: Sequence[float],
    ax: Axes | None,
    **kwargs: Any,
) -> Axes:
    """Norms over time, on a logarithmic axis; a norm of 0 is left out."""
    ax = axes(ax)
    lines = [(h, "C0", "-", r"$\Vert\partial L/\partial h(t)\Vert$")]
    if m is not None:
        lines += [(m, "C1", "-.", r"$\Vert\partial L/\partial m(t)\Vert$"), (total, "0.4", "--", "both together")]
    for norms, color, dashes, label in lines:
        positive = [norm if norm > 0 else float("nan") for norm in norms]
        ax.plot(t, positive, **style({"color": color, "linestyle": dashes, "label": label}, kwargs))
    ax.set(yscale="log", xlabel="time $t$", ylabel="norm of the adjoint state")
    ticks_of_short_axis(ax.yaxis)
    legend(ax)
    return ax


def draw_spectrum(eigenvalues: Tensor, damping: float | None, ax: Axes | None, **kwargs: Any) -> Axes:
    """Eigenvalues (batch, n), and where pairs come from that damping moves, in the complex plane."""
    ax = axes(ax)
    if damping is not None:
        product = eigenvalues.unflatten(1, (-1, 2)).prod(-1).reshape(-1)
        gammas = torch.linspace(0.0, damping, 101, dtype=torch.float64)[:, None]
        root = (gammas**2 / 4 - product).sqrt()  # λ² + γλ + product = 0
        paths = torch.cat([-gammas / 2 + root, -gammas / 2 - root], dim=1)
        if damping > 0:
            ax.plot(paths.real, paths.imag, color="0.7", linewidth=0.8, zorder=1)
            without: dict[str, Any] = {
                "linestyle": "none",
                "marker": "o",
                "markerfacecolor": "none",
                "color": "0.5",
                "markersize": 4,
            }
            ax.plot(paths[0].real, paths[0].imag, label="without damping", zorder=1.5, **without)
            ax.axvline(
                -damping / 2, color="C1", linestyle="--", linewidth=1, label=rf"$-\gamma/2 = {-damping / 2:.3g}$"
            )
    found: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 4, "color": "C0"}
    if damping:
        found["label"] = "eigenvalues"
    ax.plot(eigenvalues.real.reshape(-1), eigenvalues.imag.reshape(-1), **style(found, kwargs))
    ax.axvline(0.0, color="0.8", linewidth=0.8, zorder=0)
    ax.set(xlabel="real part (1/time)", ylabel="imaginary part (1/time)")
    legend(ax)
    return ax


def draw_steps(
    t: Sequence[float],
    size: Sequence[float],
    accepted: Sequence[bool],
    backward: Sequence[bool],
    ax: Axes | None,
    **kwargs: Any,
) -> Axes:
    """Step sizes over the times at which the steps start, those of an adjoint and the rejected ones marked."""
    ax = axes(ax)
    of_adjoint = {"markerfacecolor": "none"}
    for is_accepted, is_backward, label, look in (
        (True, False, "accepted", {"marker": "o", "color": "C0"}),
        (False, False, "rejected", {"marker": "x", "color": "C3"}),
        (True, True, "adjoint, accepted", {"marker": "s", "color": "C1", **of_adjoint}),
        (False, True, "adjoint, rejected", {"marker": "+", "color": "C3", "markersize": 7}),
    ):
        chosen = [i for i in range(len(t)) if (accepted[i], backward[i]) == (is_accepted, is_backward)]
        if chosen:
            properties = style({"linestyle": "none", "markersize": 5, "label": label, **look}, kwargs)
            ax.plot([t[i] for i in chosen], [size[i] for i in chosen], **properties)
    ax.set(yscale="log", xlabel="time $t$", ylabel="step size, in units of $t$")
    ticks_of_short_axis(ax.yaxis)
    legend(ax)
    return ax
