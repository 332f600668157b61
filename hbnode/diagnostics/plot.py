"""Plots of fields, solves and diagnostics with matplotlib, which ``pip install matplotlib`` installs.

Each function takes data or a block first, draws into ``ax`` or a new figure, and returns the axes. Other keyword
arguments are passed to matplotlib. No function shows or closes a figure. Data are tensors on any device, arrays or
lists. A block is solved in evaluation mode without gradients. Its modes and ``block.nfe`` do not change. An open
:class:`hbnode.count_nfe` or :class:`hbnode.diagnostics.record_steps` includes the evaluations and steps of the plot.

The figures of the experiments are drawn in ``tasks``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from hbnode._tree import State, parts
from hbnode.diagnostics import spectra
from hbnode.diagnostics._shared import (
    as_float64,
    axes,
    check_block,
    dtype_and_device,
    evaluation_mode,
    legend,
    states,
    style,
    ticks_of_short_axis,
)
from hbnode.diagnostics.tolerance import NFEToleranceCurve, draw_curves
from hbnode.fields import GHBNODE, HBNODE, NODE, SONODE
from hbnode.nfe import StepRecord, record_steps
from hbnode.nn.blocks import ODEBlock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["phase_portrait", "spectrum", "steps", "tolerance_curve", "trajectories", "vector_field"]

Values: TypeAlias = Any  # a tensor, a numpy array, or a list of numbers, tensors or arrays
Index: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | Tensor | None"  # or a numpy array
MOST_LABELS, MOST_LINES = 10, 1000


def trajectories(
    data: nn.Module | Values,
    x: Values | None = None,
    t: Values | None = None,
    *,
    features: Index = None,
    samples: Index = None,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw h over time: ``trajectories(block, x)`` or ``trajectories(h, t)``.

    With several features each feature has a colour. With a single feature each sample has a colour.

    Arguments:
        data: a block, or a trajectory h of shape (T, batch, ...), (T, batch) or (T,), such as ``block(x, t)``. For a
            pair (h, m), h is drawn.
        x: for a block, its input (batch, ...). For a trajectory, its times (T,), as an alternative to ``t``. Default:
            None.
        t: times (T,). For a block, None takes the ends of all steps if they are fixed, otherwise 200 equally spaced
            times of ``t_span``. For a trajectory, None takes the indices 0, ..., T - 1. Default: None.
        features: flattened features of h to draw: an index, a list of indices, a slice, or a boolean mask. None is
            all features. Default: None.
        samples: samples to draw, in the same forms as ``features``. None is all samples. Default: None.
        ax: matplotlib axes; None creates a figure. Default: None.
        kwargs: passed to ``Axes.plot``.

    Returns:
        The axes.

    Raises:
        ValueError: if the shapes of h and of the times do not fit.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(2, 2), t_span=(0.0, 10.0))
        >>> ax = hbnode.diagnostics.plot.trajectories(block, torch.randn(5, 2), features=0, alpha=0.7)
        >>> len(ax.get_lines())
        5
    """
    if isinstance(data, nn.Module):
        times, path = states(check_block(data, "trajectories"), x, t)
        h = as_float64(path[0])
    else:
        h = as_float64(data[0] if isinstance(data, tuple) else data)
        t = x if t is None else t
        times = as_float64(range(len(h)) if t is None else t)
        if h.dim() == 0 or times.shape != h.shape[:1]:
            got = f"{tuple(h.shape)} and {tuple(times.shape)}. Fix: trajectories(block(x, t), t), or (block, x)"
            raise ValueError(f"expected a trajectory (T, batch, ...) and times (T,), got shapes {got}.")
    h, numbered = _select(h, features, samples)
    ax = axes(ax)
    for i, feature in enumerate(numbered):
        several = {"color": f"C{i}"} if len(numbered) > 1 else {}
        lines = ax.plot(times, h[:, :, i], **style(several, kwargs))
        if lines and several:
            name = f"$h_{{{feature}}}$" if len(numbered) <= MOST_LABELS else None
            lines[0].set_label(_label(kwargs.get("label"), name, is_first=i == 0))
        for line in lines[1:]:
            line.set_label("_nolegend_")
    ax.set_xlabel("time $t$" if t is not None or isinstance(data, nn.Module) else "output")
    ax.set_ylabel("$h(t)$" if len(numbered) > 1 or not numbered else f"$h_{{{numbered[0]}}}(t)$")
    legend(ax)
    return ax


def phase_portrait(
    data: nn.Module | Values,
    x: Values | None = None,
    t: Values | None = None,
    *,
    features: Index = None,
    samples: Index = None,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw the momentum m against h, or one feature of h against another.

    Calls are ``phase_portrait(block, x)``, ``phase_portrait(h, m)`` and ``phase_portrait(h)``. A circle marks the start
    of each path.

    Arguments:
        data: a block, a trajectory h (T, batch, ...), or a pair ``(h, m)`` such as ``block.trajectory(x, t)``.
        x: for a block, its input (batch, ...). For a trajectory h, its momentum m, or None. Default: None.
        t: times (T,) of a block, as for :func:`trajectories`. Default: None.
        features: with a momentum, the features to draw, each against its momentum; None is all features. Without a
            momentum, the two features of h to draw against each other; None is (0, 1). Default: None.
        samples: samples to draw, as for :func:`trajectories`; None is all samples. Default: None.
        ax: matplotlib axes; None creates a figure. Default: None.
        kwargs: passed to ``Axes.plot`` for the paths.

    Returns:
        The axes.

    Example:
        >>> import torch, hbnode
        >>> spring = hbnode.HeavyBallODEBlock(lambda h: -h, damping=0.2, t_span=(0.0, 20.0))
        >>> ax = hbnode.diagnostics.plot.phase_portrait(spring, torch.ones(1, 1))
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('$h$', '$m$')
    """
    second = "m"
    if isinstance(data, nn.Module):
        block = check_block(data, "phase_portrait")
        _, path = states(block, x, t)
        second = _velocity_letter(block.field)
    else:
        pair = isinstance(data, tuple) or (isinstance(data, list) and all(hasattr(part, "shape") for part in data))
        path = tuple(data) if pair else (data,) if x is None else (data, x)
    names, labels, pairs = _planes(path, features, samples, second)
    ax = axes(ax)
    for index, ((across, up), label) in enumerate(zip(pairs, labels, strict=True)):
        for sample in range(across.shape[1]):
            color = {"color": f"C{index}"} if len(pairs) > 1 else {}
            name = _label(kwargs.get("label"), label, is_first=index == 0) if sample == 0 else "_nolegend_"
            (line,) = ax.plot(across[:, sample], up[:, sample], **style(color, kwargs | {"label": name}))
            ax.plot(*(x[:1, sample] for x in (across, up)), "o", color=line.get_color(), mfc="white", ms=5)
    ax.set(xlabel=f"${names[0]}$", ylabel=f"${names[1]}$")
    legend(ax)
    return ax


def vector_field(
    field: Callable[[Tensor, Any], State],
    t: float = 0.0,
    *,
    at: Values | None = None,
    features: int | Sequence[int] = (0, 1),
    xlim: tuple[float, float] | None = None,
    ylim: tuple[float, float] | None = None,
    points: int = 20,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw a field as arrows of equal length, coloured by speed, with a colour bar.

    The plane is (h, m) for second-order fields and (h_0, h_1) for first-order fields.

    Arguments:
        field: a field, a block, or a callable ``(t, state)``.
        t: time at which the field is evaluated. Default: 0.0.
        at: state of one sample, h or (h, m), which gives the values of the features outside the plane. None is a zero
            state. Its number of features is the input size of the first linear layer of f; without such a layer it is
            one for second-order fields and two for first-order fields. A tensor keeps its dtype; a list or an array is
            converted to the dtype of the field's parameters. Default: None.
        features: the features (i, j) of h that span the plane. For second-order fields the plane is (h_i, m_i), and a
            single index i is allowed. Default: (0, 1).
        xlim: range of the first axis. None is the current range of ``ax``, or (-2, 2) for empty axes. Default: None.
        ylim: range of the second axis. None is as for ``xlim``. Default: None.
        points: number of arrows per axis. Default: 20.
        ax: matplotlib axes; None creates a figure. Default: None.
        kwargs: passed to ``Axes.quiver``.

    Returns:
        The axes.

    Raises:
        ValueError: if ``features`` are not two features of h, or the field cannot be evaluated at the state ``at``.

    Example:
        >>> import torch, hbnode
        >>> spring = hbnode.HeavyBallODEBlock(lambda h: -h, damping=0.2, t_span=(0.0, 20.0))
        >>> ax = hbnode.diagnostics.plot.phase_portrait(spring, torch.ones(1, 1))
        >>> ax is hbnode.diagnostics.plot.vector_field(spring, ax=ax)
        True
    """
    field = field.field if isinstance(field, ODEBlock) else field
    ax = axes(ax)
    drawn = ax.has_data()
    xlim = xlim if xlim is not None else ax.get_xlim() if drawn else (-2.0, 2.0)
    ylim = ylim if ylim is not None else ax.get_ylim() if drawn else (-2.0, 2.0)
    centres = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    across, up = torch.meshgrid(*(low + (high - low) * centres for low, high in (xlim, ylim)), indexing="xy")
    base = _base_state(field, at)
    is_pair, given = len(base) == 2, [features] if isinstance(features, int) else list(features)
    if len(given) < 2 - is_pair:
        raise ValueError(f"features must be two of h, got {features!r}. Fix: features=(0, 1).")
    i, j = (given[0], given[0]) if is_pair else (given[0], given[1])
    if max(i, j) >= base[0].numel():
        fix = f"more than {base[0].numel()} features. Fix: at=torch.zeros(d) for d features, or features=(0, 1)"
        raise ValueError(f"the plane of features {(i, j)} needs a state of {fix}.")
    rows = [part.reshape(-1).repeat(across.numel(), 1) for part in base]
    rows[0][:, i], rows[-1][:, j] = across.reshape(-1).to(base[0]), up.reshape(-1).to(base[0])
    state = tuple(row.reshape(-1, *part.shape) for row, part in zip(rows, base, strict=True))
    try:
        with torch.no_grad(), evaluation_mode(field):
            value = field(torch.as_tensor(t).to(base[0]), state if is_pair else state[0])
    except (TypeError, RuntimeError) as error:
        sizes = f"{len(base)} tensor(s) of {base[0].numel()} feature(s)"
        fix = "at=torch.zeros(d), a state in its dtype; for a network, vector_field(hbnode.NODE(net))"
        raise ValueError(f"the field cannot be called (t, state) with {sizes}: {error}. Fix: {fix}.") from error
    slopes = [as_float64(part).reshape(across.numel(), -1) for part in parts(value)]
    du, dv = slopes[0][:, i].reshape(across.shape), slopes[-1][:, j].reshape(across.shape)
    speed = torch.hypot(du, dv)
    length = torch.where(speed > 0, speed, 1.0)
    options: dict[str, Any] = {"angles": "xy", "pivot": "mid", "cmap": "viridis", "zorder": 0.5} | kwargs
    arrows = ax.quiver(across, up, du / length, dv / length, speed, **options)
    names = ("h", _velocity_letter(field)) if is_pair else (f"h_{{{i}}}", f"h_{{{j}}}")
    ax.figure.colorbar(arrows, ax=ax, label=f"speed $|d({names[0]}, {names[1]})/dt|$")
    ax.set(xlim=xlim, ylim=ylim, xlabel=f"${names[0]}$", ylabel=f"${names[1]}$")
    return ax


def steps(
    data: StepRecord | nn.Module,
    x: Values | None = None,
    t: Tensor | Sequence[float] | None = None,
    *,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw the sizes of accepted and rejected steps over time: ``steps(block, x)`` or ``steps(record)``.

    Arguments:
        data: a block, or a record of :func:`hbnode.diagnostics.record_steps`.
        x: input (batch, ...) of a block. Default: None.
        t: output times (T,) of a block; None is the start and the end of ``t_span``. Default: None.
        ax: matplotlib axes; None creates a figure. Default: None.
        kwargs: passed to ``Axes.plot`` for all markers.

    Returns:
        The axes.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(lambda t, h: torch.sin(t * t) - h, t_span=(0.0, 9.0))
        >>> with hbnode.diagnostics.record_steps(block) as record:
        ...     h = block(torch.zeros(1, 1))
        >>> ax = hbnode.diagnostics.plot.steps(record)
        >>> len(ax.get_lines()[0].get_xdata()) == block.nfe.steps
        True
    """
    if not isinstance(data, StepRecord):
        block = check_block(data, "steps")
        with record_steps(block) as record:
            states(block, x, block.t_span if t is None else t)
        data = record
    ax = axes(ax)
    hollow = {"markerfacecolor": "none"}
    for is_accepted, is_backward, label, look in (
        (True, False, "accepted", {"marker": "o", "color": "C0"}),
        (False, False, "rejected", {"marker": "x", "color": "C3"}),
        (True, True, "adjoint, accepted", {"marker": "s", "color": "C1", **hollow}),
        (False, True, "adjoint, rejected", {"marker": "+", "color": "C3", "markersize": 7}),
    ):
        chosen = [i for i in range(len(data)) if (data.accepted[i], data.backward[i]) == (is_accepted, is_backward)]
        if chosen:
            properties = style({"linestyle": "none", "markersize": 5, "label": label, **look}, kwargs)
            ax.plot([data.t[i] for i in chosen], [data.size[i] for i in chosen], **properties)
    ax.set(yscale="log", xlabel="time $t$", ylabel="step size, in units of $t$")
    ticks_of_short_axis(ax.yaxis)
    legend(ax)
    return ax


def tolerance_curve(
    data: NFEToleranceCurve | Mapping[str, NFEToleranceCurve], *, ax: Axes | None = None, **kwargs: Any
) -> Axes:
    """Draw function evaluations (left axis) and errors (right axis) against the tolerance, for one or several curves.

    Arguments:
        data: a result of :func:`hbnode.diagnostics.nfe_vs_tolerance`, or a mapping from names to several results.
        ax: matplotlib axes; None creates a figure. Default: None.
        kwargs: passed to ``Axes.plot`` for all lines.

    Returns:
        The axes on the left.

    Raises:
        TypeError: if ``data`` has values that are not results of :func:`hbnode.diagnostics.nfe_vs_tolerance`.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(3, 3))
        >>> curve = hbnode.diagnostics.nfe_vs_tolerance(block, torch.randn(4, 3), [1e-2, 1e-4])
        >>> hbnode.diagnostics.plot.tolerance_curve({"HBNODE": curve}).get_xscale()
        'log'
    """
    curves = data if isinstance(data, Mapping) else {"": data}
    if not all(isinstance(curve, NFEToleranceCurve) for curve in curves.values()):
        fix = "tolerance_curve({'a': curve, 'b': other}), with results of nfe_vs_tolerance"
        raise TypeError(f"expected an NFEToleranceCurve or several by name, got {type(data).__name__}. Fix: {fix}.")
    return draw_curves(curves, ax, **kwargs)


def spectrum(
    data: spectra.Spectrum | nn.Module,
    x: Values | None = None,
    t: float | None = None,
    *,
    ax: Axes | None = None,
    **kwargs: Any,
) -> Axes:
    """Draw the eigenvalues of a field in the complex plane, and the effect of damping: ``spectrum(block, x)``.

    For fields with one damping γ, open circles show the eigenvalues for zero damping. Lines show their paths as the
    damping grows to γ, which moves the centre of every pair to -γ/2.

    Arguments:
        data: a block, or a result of :func:`hbnode.diagnostics.spectrum`.
        x: input (batch, ...) of a block. Default: None.
        t: time for a block, as in :func:`hbnode.diagnostics.spectrum`. Default: None.
        ax: matplotlib axes; None creates a figure. Default: None.
        kwargs: passed to ``Axes.plot`` for the eigenvalues.

    Returns:
        The axes.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(3, 3), damping=0.5)
        >>> hbnode.diagnostics.plot.spectrum(block, torch.randn(4, 3)).get_xlabel()
        'real part (1/time)'
    """
    return (data if isinstance(data, spectra.Spectrum) else spectra.spectrum(data, x, t)).plot(ax, **kwargs)


def _planes(
    path: tuple[Values, ...], features: Index, samples: Index, second: str
) -> tuple[tuple[str, str], list[str | None], list[tuple[Tensor, Tensor]]]:
    """Return what a phase portrait draws. It draws one pair of coordinates in each colour.

    Arguments:
        path: the trajectory as a tuple (h,) or (h, m), with tensors (T, batch, ...).
        features: the features to draw.
        samples: the samples to draw.
        second: the letter for m in the name of the second axis, "m" or "v".

    Returns:
        The names of the two axes; a list with the label of each colour, or None; a list with the pair of coordinates of
        each colour, (T, batch) each.
    """
    if len(path) > 2:
        raise ValueError(f"phase_portrait expected h or a pair (h, m), got {len(path)} tensors. Fix: (h, m).")
    if len(path) == 1:
        count = as_float64(path[0]).shape[2:].numel()
        if features is None and count < 2:
            fix = "trajectories(block, x), trajectories(h, t), or (h, m) for the plane of h and m"
            raise ValueError(f"h without m, as of a first-order field, needs two features, got {count}. Fix: {fix}.")
        h, numbered = _select(as_float64(path[0]), (0, 1) if features is None else features, samples)
        if len(numbered) != 2:
            raise ValueError(f"features must be two of h, got {numbered}. Fix: features=(0, 1), or pass (h, m).")
        return (f"h_{{{numbered[0]}}}", f"h_{{{numbered[1]}}}"), [None], [(h[:, :, 0], h[:, :, 1])]
    shapes = [tuple(as_float64(part).shape) for part in path]
    if shapes[0] != shapes[1]:
        raise ValueError(f"h and {second} must have one shape, got {shapes[0]} and {shapes[1]}. Fix: (h, {second}).")
    (h, numbered), (m, _) = (_select(as_float64(part), features, samples) for part in path)
    names = ("h", second) if numbered == [0] else ("h_i", f"{second}_i")
    are_few = 1 < len(numbered) <= MOST_LABELS
    labels = [f"$i = {i}$" if are_few else None for i in numbered]
    return names, labels, [(h[:, :, i], m[:, :, i]) for i in range(len(numbered))]


def _label(given: object, name: str | None, *, is_first: bool) -> str:
    """Return the legend entry of a line: the user's label ``given``, a comma, and the feature's name.

    If features have no names, only the first line gets the user's label, so that the legend shows it once.
    """
    both = [str(part) for part in (given if is_first or name else None, name) if part is not None]
    return ", ".join(both) or "_nolegend_"


def _velocity_letter(field: object) -> str:
    return "v" if isinstance(field, SONODE) else "m"


def _base_state(field: Callable[[Tensor, Any], State], at: Values | None) -> tuple[Tensor, ...]:
    """Convert the argument ``at`` of :func:`vector_field` to a tuple (h,) or (h, m) on the device of the field.

    If ``at`` is None, the state is zero, with the number of features that the first linear layer takes.
    """
    dtype, device = dtype_and_device(field)
    is_pair = isinstance(field, (HBNODE, GHBNODE, SONODE))
    layers = field.modules() if at is None and isinstance(field, (NODE, HBNODE, GHBNODE)) else ()
    size = next((layer.in_features for layer in layers if isinstance(layer, nn.Linear)), 1 if is_pair else 2)
    given = at if isinstance(at, tuple) else (torch.zeros(size) if at is None else at,)
    are_states = at is not None and all(isinstance(part, Tensor) and part.is_floating_point() for part in given)
    base = tuple(part.detach().to(device) if are_states else as_float64(part).to(device, dtype) for part in given)
    return (*base, torch.zeros_like(base[0])) if is_pair and len(base) == 1 else base


def _select(h: Tensor, features: Index, samples: Index) -> tuple[Tensor, list[int]]:
    """Select samples and features of a trajectory h (T, batch, ...), whose features are flattened first.

    Return the tensor (T, selected samples, selected features), and the list of indices of the selected features.
    """
    h = h.reshape(*h.shape, *[1] * (3 - h.dim())).flatten(2)
    numbered = _indices(features, h.shape[2], "features")
    h = h[:, _indices(samples, h.shape[1], "samples")][:, :, numbered]
    if h.shape[1] * h.shape[2] > MOST_LINES:
        fault = f"{h.shape[1]} samples of {h.shape[2]} features are more than {MOST_LINES} lines"
        raise ValueError(f"{fault}. Fix: features=slice(4), samples=slice(8).")
    return h, numbered


def _indices(which: Index, count: int, name: str) -> list[int]:
    """Convert an index, a list of indices, a slice, a bool mask or None (all) to a list of indices in [0, count)."""
    everything = list(range(count))
    if which is None or isinstance(which, slice):
        return everything[which or slice(None)]
    wanted = torch.as_tensor(which)
    if wanted.dtype == torch.bool:
        if wanted.shape != (count,):
            shape = tuple(wanted.shape)
            raise IndexError(f"{name} is a mask of shape {shape}, but h has {count} {name}. Fix: a mask ({count},).")
        return wanted.nonzero().flatten().tolist()
    try:
        return [everything[i] for i in wanted.reshape(-1).tolist()]
    except IndexError:
        raise IndexError(f"{name}={which!r} is out of range for {count} {name}. Fix: 0 to {count - 1}.") from None
