"""The cost and the error of a model as functions of its solver's tolerance."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hbnode.diagnostics._shared import Result, axes, legend, style, ticks_of_short_axis, twin_axes
from hbnode.nfe import NFE, count_nfe
from hbnode.nn.blocks import ODEBlock

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class NFEToleranceCurve(Result):
    """The cost and the error of a model for several tolerances of its solver. Each list has one entry per tolerance.

    Attributes:
        tolerance: tolerances, rtol = atol.
        forward: numbers of function evaluations in the forward pass.
        backward: numbers of function evaluations in the backward pass.
        error: root mean square difference of the output from the reference output.
        gradient_error: norm of the difference of the gradient from the reference gradient, divided by the norm of the
            reference gradient. The gradient is that of all parameters and the input.
    """

    tolerance: list[float]
    forward: list[int]
    backward: list[int]
    error: list[float]
    gradient_error: list[float]

    def plot(self, ax: Axes | None = None, **kwargs: Any) -> Axes:
        """Draw function evaluations (left axis) and errors (right axis) against the tolerance.

        :func:`hbnode.diagnostics.plot.tolerance_curve` draws several curves into the same axes.

        Arguments:
            ax: matplotlib axes; None creates a figure. Default: None.
            kwargs: passed to ``Axes.plot``.

        Returns:
            The axes on the left.
        """
        return draw_curves({"": self}, ax, **kwargs)


def nfe_vs_tolerance(
    block: nn.Module,
    x: Tensor,
    tolerances: Iterable[float],
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    reference_tolerance: float = 1e-12,
) -> NFEToleranceCurve:
    r"""Measure function evaluations, error and gradient error of a model for several tolerances.

    The reference is a float64 copy of the model, solved by dopri8 at a tight tolerance with ``gradient="direct"``. The
    model does not change; its copies run in evaluation mode. With ``gradient="adjoint"``, the evaluations of the
    backward pass depend on the scale of the loss, because atol is absolute.

    Arguments:
        block: an :class:`hbnode.ODEBlock`, or a module that contains blocks, with their gradient methods.
        x: input batch (batch, ...); integers for a model that starts with an embedding.
        tolerances: iterable of values for rtol = atol.
        loss: function of the output that returns a scalar; None is the mean of squares. Default: None.
        reference_tolerance: rtol = atol of the reference. If f has kinks (ReLU), the reference solver takes many small
            steps. A larger value, well below the tolerances, can then save hours. Default: 1e-12.

    Returns:
        The curve, with ``.plot()`` and ``.to_csv(path)``.

    Raises:
        ValueError: if the model contains no block, ``tolerances`` is empty, or a tolerance is at most
            ``reference_tolerance``.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(3, 3), gradient="adjoint")
        >>> curve = hbnode.diagnostics.nfe_vs_tolerance(block, torch.randn(4, 3), [1e-2, 1e-5])
        >>> curve.forward[0] <= curve.forward[1] and curve.error[0] >= curve.error[1]
        True
    """
    if not isinstance(block, nn.Module) or not any(isinstance(module, ODEBlock) for module in block.modules()):
        raise ValueError(f"{type(block).__name__} contains no ODEBlock. Fix: pass a block, or a model with a block.")
    tolerances = list(map(float, tolerances))
    if not tolerances:
        raise ValueError("tolerances is empty. Fix: tolerances=[1e-2, 1e-3, 1e-4, 1e-5].")
    if not reference_tolerance < min(tolerances):
        raise ValueError(
            f"reference_tolerance={reference_tolerance:g} must be below all tolerances, got {min(tolerances):g}. "
            f"Fix: reference_tolerance={min(tolerances) / 10:g}."
        )
    loss = (lambda output: output.pow(2).mean()) if loss is None else loss
    reference = _with_solver(copy.deepcopy(block).double().eval(), reference_tolerance, **_TIGHT)
    exact, exact_gradient, _ = _solve(reference, x.double() if x.is_floating_point() else x, loss)
    rows = []
    for tolerance in tolerances:
        output, gradient, nfe = _solve(_with_solver(copy.deepcopy(block).eval(), tolerance), x, loss)
        error = (output.double() - exact).pow(2).mean().sqrt()
        gradient_error = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        rows.append((tolerance, nfe.forward, nfe.backward, float(error), float(gradient_error)))
    return NFEToleranceCurve(*map(list, zip(*rows, strict=True)))


_TIGHT = {
    "method": "dopri8",
    "gradient": "direct",
    "steps": None,
    "per_sample": False,
    "save": "exact",
    "options": None,
    "adjoint_options": None,
    "compile_steps": False,
    "max_steps": 10**6,
}


def _with_solver(model: nn.Module, tolerance: float, **changes: object) -> nn.Module:
    for module in model.modules():
        if isinstance(module, ODEBlock):
            module.rtol = module.atol = tolerance
            for name, value in changes.items():
                setattr(module, name, value)
    return model


def _solve(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, NFE]:
    """Return the output, one vector of the gradients of input and parameters, and the function evaluations."""
    x = x.detach().requires_grad_(x.is_floating_point())
    model.zero_grad(set_to_none=True)
    with count_nfe(model) as nfe, torch.enable_grad():
        output = model(x)
        loss(output).backward()
    tensors = [p for p in (x, *model.parameters()) if p.requires_grad]
    gradient = torch.cat([torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in tensors])
    return output.detach(), gradient, nfe


STYLES: dict[str, tuple[str, dict[str, Any]]] = {  # left axis, then right axis
    "forward": ("forward NFE", {"marker": "o", "linestyle": "-"}),
    "backward": ("backward NFE", {"marker": "s", "linestyle": "-", "markerfacecolor": "none"}),
    "error": ("error", {"marker": "o", "linestyle": ":"}),
    "gradient_error": ("gradient error", {"marker": "s", "linestyle": ":", "markerfacecolor": "none"}),
}


def draw_curves(curves: Mapping[str, NFEToleranceCurve], ax: Axes | None, **kwargs: Any) -> Axes:
    """Draw named curves. Several curves have a colour each; for a single curve, colours distinguish the passes."""
    from matplotlib.lines import Line2D

    ax = axes(ax)
    right = twin_axes(ax) or ax.twinx()
    several = len(curves) > 1
    handles: list[Line2D] = []
    for index, (name, curve) in enumerate(curves.items()):
        for kind, (label, look) in STYLES.items():
            values = getattr(curve, kind)
            if not any(values):  # no backward evaluations, or no error
                continue
            color = f"C{index}" if several else "C0" if kind in ("forward", "error") else "C1"
            on = right if "error" in kind else ax
            properties = style({**look, "color": color, "label": label}, kwargs)
            (line,) = on.plot(curve.tolerance, values, **properties)
            if not several:
                handles.append(line)
        if several:
            handles.append(Line2D([], [], color=f"C{index}", linewidth=4, label=name))
    if several:
        handles += [Line2D([], [], color="0.4", label=label, **look) for label, look in STYLES.values()]
    ax.set(xscale="log", xlabel="tolerance (rtol = atol)", ylabel="function evaluations", ylim=(0, None))
    ax.xaxis.set_inverted(True)
    right.set(yscale="log", ylabel="error")
    ticks_of_short_axis(right.yaxis)
    legend(ax, handles)
    return ax
