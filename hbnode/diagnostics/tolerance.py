"""The cost and the error of a model as functions of its solver's tolerance."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hbnode._progress import progress_bar
from hbnode._tree import State, parts
from hbnode.diagnostics._shared import Result, axes, legend, style, ticks_of_short_axis, twin_axes
from hbnode.errors import MaxStepsError, SolverError, StepSizeUnderflowError
from hbnode.nfe import NFE, count_nfe
from hbnode.nn.blocks import ODEBlock
from hbnode.solve.methods import ALL_METHODS, Rosenbrock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BYTES, STATES_PER_STEP = 2**29, 4  # maximum bytes for the states of the reference; states stored per step
LOWEST_SINGLE = 1e-6  # smallest tolerance of a reference that is solved in float32


@dataclass(frozen=True)
class NFEToleranceCurve(Result):
    """The cost and the error of a model for several tolerances of its solver. Each list has one entry per tolerance.

    Attributes:
        tolerance: tolerances, rtol = atol.
        forward: numbers of function evaluations in the forward pass.
        backward: numbers of function evaluations in the backward pass.
        error: root mean square difference of the output from the reference output.
        gradient_error: norm of the difference of the gradient from the reference gradient, divided by the norm of the
            reference gradient. The gradient is with respect to all parameters and the input.
        reference: the tolerance and the estimated errors of the reference.
    """

    tolerance: list[float]
    forward: list[int]
    backward: list[int]
    error: list[float]
    gradient_error: list[float]
    reference: Reference

    def columns(self) -> dict[str, Sequence[Any]]:
        """Return a dict from the names of columns to lists with one entry per tolerance. The reference is omitted."""
        return {name: column for name, column in super().columns().items() if name != "reference"}

    def plot(self, ax: Axes | None = None, **kwargs: Any) -> Axes:
        """Draw function evaluations (left axis) and errors (right axis) against the tolerance.

        If the reference has a remark, a horizontal line shows its gradient error; smaller errors are meaningless.
        :func:`hbnode.diagnostics.plot.tolerance_curve` draws several curves into the same axes.

        Arguments:
            ax: matplotlib axes; None creates a figure. Default: None.
            kwargs: passed to ``Axes.plot``.

        Returns:
            The axes on the left.
        """
        return draw_curves({"": self}, ax, **kwargs)


@dataclass(frozen=True)
class Reference:
    """The accurate solve with which :func:`nfe_vs_tolerance` compares other solves.

    Attributes:
        tolerance: rtol = atol of the reference.
        error: estimated error of the reference output: the root mean square difference from the output of a solve with
            ten times the tolerance; NaN if this solve failed.
        gradient_error: estimated error of the reference gradient: the norm of the difference from the gradient of the
            same solve, divided by the norm of the gradient.
        remark: why the reference is less accurate than requested; empty if it is not.
    """

    tolerance: float
    error: float
    gradient_error: float
    remark: str = ""


def nfe_vs_tolerance(
    block: nn.Module,
    x: Tensor,
    tolerances: Iterable[float],
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    reference_tolerance: float | None = None,
    max_nfe: int = 4000,
    progress: bool | None = None,
) -> NFEToleranceCurve:
    r"""Measure function evaluations, error and gradient error of a model for several tolerances.

    The reference is a float64 copy of the model, solved with a tight tolerance by the default method, or by
    ``"rodas5p"`` if the block uses it. Its gradient is exact (``gradient="checkpoint"``). If f has kinks (ReLU), a
    tight tolerance needs very many steps. If the reference exceeds ``max_nfe`` evaluations, or 32 steps and 512 MiB of
    states, it is solved again with ten times the tolerance, and ``curve.reference.remark`` reports this. The errors of
    the reference are estimated by a second solve with ten times its tolerance.

    The model does not change; its copies run in evaluation mode. With ``gradient="adjoint"``, the number of evaluations
    in the backward pass depends on the scale of the loss, because atol is absolute.

    Arguments:
        block: an :class:`hbnode.ODEBlock`, or a module that contains blocks, with their gradient methods.
        x: input batch (batch, ...); integers for a model that starts with an embedding.
        tolerances: iterable of values for rtol = atol.
        loss: function of the output that returns a scalar; None is the mean of the squared elements. Default: None.
        reference_tolerance: rtol = atol of the reference. None is a hundredth of the smallest tolerance, but at least
            1e-13. Default: None.
        max_nfe: maximum number of function evaluations of each block in the forward pass of the reference. It is
            increased to four times the evaluations of the other solves if they need more. Default: 4000.
        progress: whether to show a progress bar; None shows it on a terminal. Default: None.

    Returns:
        The curve, with ``.plot()`` and ``.to_csv(path)``.

    Raises:
        ValueError: if the model contains no block, ``tolerances`` is empty, or a tolerance is at most
            ``reference_tolerance``.
        SolverError: if a solve fails, or the reference exceeds its limits even with ten times the largest tolerance.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(3, 3), gradient="adjoint")
        >>> curve = hbnode.diagnostics.nfe_vs_tolerance(block, torch.randn(4, 3), [1e-2, 1e-5])
        >>> curve.forward[0] <= curve.forward[1] and curve.error[0] >= curve.error[1]
        True
        >>> curve.reference.error < curve.error[-1]
        True
    """
    if not isinstance(block, nn.Module) or not _blocks(block):
        raise ValueError(f"{type(block).__name__} contains no ODEBlock. Fix: pass a block, or a model with a block.")
    tolerances = list(map(float, tolerances))
    if not tolerances:
        raise ValueError("tolerances is empty. Fix: tolerances=[1e-2, 1e-3, 1e-4, 1e-5].")
    if reference_tolerance is None:
        reference_tolerance = max(min(tolerances) / 100, 1e-13)
    if not reference_tolerance < min(tolerances):
        least, got = min(tolerances), f"reference_tolerance={reference_tolerance:g}"
        raise ValueError(f"{got} must be below all tolerances, got {least:g}. Fix: reference_tolerance={least / 10:g}.")
    loss = (lambda output: output.pow(2).mean()) if loss is None else loss
    solved: list[_Solved] = []
    for tolerance in progress_bar(tolerances, progress, "tolerances"):
        model = copy.deepcopy(block).eval()
        for each in _blocks(model):
            each.rtol = each.atol = tolerance
        solved.append(_solve(model, x, loss))
        max_nfe = max(max_nfe, 4 * solved[-1].nfe.forward)
    reference, exact = _reference(block, x, loss, reference_tolerance, max(tolerances), max_nfe)
    errors, gradient_errors = map(list, zip(*(one.errors(exact) for one in solved), strict=True))
    forward, backward = [one.nfe.forward for one in solved], [one.nfe.backward for one in solved]
    return NFEToleranceCurve(tolerances, forward, backward, errors, gradient_errors, reference)


@dataclass(frozen=True)
class _Solved:
    """The result of one forward and backward pass: the output, the gradient, and the number of function evaluations.

    The gradients of the input and of all parameters are joined to one vector. Tensors are converted to float64.
    """

    output: Tensor
    gradient: Tensor
    nfe: NFE

    def errors(self, exact: _Solved) -> tuple[float, float]:
        error = (self.output - exact.output).pow(2).mean().sqrt()
        return float(error), float((self.gradient - exact.gradient).norm() / exact.gradient.norm())


def _reference(
    block: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], wanted: float, loosest: float, max_nfe: int
) -> tuple[Reference, _Solved]:
    """Solve a float64 copy of the block by :func:`_tightest`, or the block itself if it cannot run in float64.

    Return the reached tolerance with the estimated errors, and the result of the solve.
    """
    model = copy.deepcopy(block).double()
    try:
        return _tightest(model, x.double() if x.is_floating_point() else x, loss, wanted, loosest, max_nfe)
    except SolverError:
        raise
    except RuntimeError as error:  # func closes over tensors that .double() does not convert
        reference, exact = _tightest(block, x, loss, max(wanted, LOWEST_SINGLE), loosest, max_nfe)
        return replace(reference, remark=f"it is not in float64, because {error}. {reference.remark}".strip()), exact


def _tightest(
    block: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], wanted: float, loosest: float, max_nfe: int
) -> tuple[Reference, _Solved]:
    """Solve a model with the smallest tolerance that respects the limits on evaluations and memory.

    The first solve has the tolerance ``wanted``. After each failure the tolerance is ten times as large. A further
    solve, with ten times the final tolerance, serves to estimate the errors.

    Arguments:
        block: the model.
        x: the input of the model.
        loss: function of the output.
        wanted: the first tolerance.
        loosest: the largest tolerance at which the user compares solves. Failures above it are raised.
        max_nfe: maximum number of function evaluations in the forward pass.

    Returns:
        The reached tolerance with the estimated errors, and the result of the solve.
    """
    found: list[tuple[float, _Solved]] = []
    tolerance, limit = wanted, None
    while len(found) < 2 and (tolerance <= loosest or not found):
        model = copy.deepcopy(block).eval()
        steps = 12 if found else 16  # so that steps of both solves differ even if the tolerance does not limit them
        for each in _blocks(model):
            _tighten(each, tolerance, max_nfe, steps)
        try:
            found.append((tolerance, _solve(model, x, loss)))
        except (MaxStepsError, StepSizeUnderflowError) as error:
            limit = error
            if tolerance > loosest:
                raise
        tolerance *= 10
    reached, exact = found[0]
    errors = found[1][1].errors(exact) if len(found) > 1 else (float("nan"), float("nan"))
    reason = str(limit).partition(" Fix:")[0]
    remark = "" if reached == wanted else f"the tolerance is {reached:.0e} instead of {wanted:.0e}, because {reason}"
    return Reference(reached, *errors, remark), exact


def _tighten(block: ODEBlock, tolerance: float, max_nfe: int, steps: int) -> None:
    """Change a block so that it computes a reference solution.

    It takes ``steps`` steps or more, and raises an error if it exceeds ``max_nfe`` evaluations or ``MOST_BYTES``.
    """
    block.rtol = block.atol = tolerance
    block.method = block.method if block.method and isinstance(ALL_METHODS[block.method], Rosenbrock) else None
    block.gradient, block.save, block.max_steps = "checkpoint", "exact", 10**6
    block.steps = block.adjoint_options = None
    block.per_sample = block.compile_steps = False
    block.options = {"max_nfe": max_nfe}
    solve = block._solve

    def limited(field: nn.Module, state: State, t: Any, *rest: Any, **end: Any) -> State:
        times = torch.as_tensor(block.t_span if t is None else t)
        step_bytes = STATES_PER_STEP * sum(part.numel() * part.element_size() for part in parts(state))
        block.options = {
            "max_nfe": min(max_nfe, 6 * max(MOST_BYTES // max(step_bytes, 1), 32)),  # a step takes 6 or more
            "max_step": float(times.max() - times.min()) / steps or 1.0,
        }
        return solve(field, state, t, *rest, **end)

    block.__dict__["_solve"] = limited


def _blocks(model: nn.Module) -> list[ODEBlock]:
    return [module for module in model.modules() if isinstance(module, ODEBlock)]


def _solve(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> _Solved:
    x = x.detach().requires_grad_(x.is_floating_point())
    model.zero_grad(set_to_none=True)
    with count_nfe(model) as nfe, torch.enable_grad():
        output = model(x)
        value = loss(output)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss must return a tensor, got {type(value).__name__}. Fix: loss=lambda y: y.sum().")
        value.backward()
    tensors = [p for p in (x, *model.parameters()) if p.requires_grad]
    gradient = torch.cat([torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in tensors])
    return _Solved(output.detach().double(), gradient.double(), nfe)


STYLES: dict[str, tuple[str, dict[str, Any]]] = {  # the first two use the left axis, the others the right axis
    "forward": ("forward NFE", {"marker": "o", "linestyle": "-"}),
    "backward": ("backward NFE", {"marker": "s", "linestyle": "-", "markerfacecolor": "none"}),
    "error": ("error", {"marker": "o", "linestyle": ":"}),
    "gradient_error": ("gradient error", {"marker": "s", "linestyle": ":", "markerfacecolor": "none"}),
}


def draw_curves(curves: Mapping[str, NFEToleranceCurve], ax: Axes | None, **kwargs: Any) -> Axes:
    """Draw one or several curves, given with their names, into the axes; None creates a figure. Return the axes.

    Several curves have different colours. A single curve has one colour for the forward and one for the backward pass.
    """
    from matplotlib.lines import Line2D

    ax = axes(ax)
    right = twin_axes(ax) or ax.twinx()
    several = len(curves) > 1
    handles: list[Line2D] = []
    for index, (name, curve) in enumerate(curves.items()):
        for kind, (label, look) in STYLES.items():
            values = getattr(curve, kind)
            if not any(values):  # no evaluations in the backward pass, or no errors
                continue
            color = f"C{index}" if several else "C0" if kind in ("forward", "error") else "C1"
            on = right if "error" in kind else ax
            properties = style({**look, "color": color, "label": label}, kwargs)
            (line,) = on.plot(curve.tolerance, values, **properties)
            if not several:
                handles.append(line)
        if curve.reference.remark:
            error = curve.reference.gradient_error
            line = right.axhline(
                error, color=f"C{index}" if several else "0.6", label="reference's gradient error", lw=0.8
            )
            handles += [] if several else [line]
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
