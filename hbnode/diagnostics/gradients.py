"""The norm of the adjoint state over time, which shows whether gradients vanish or explode during a solve."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hbnode._tree import State, apply, last_of, parts
from hbnode.diagnostics._shared import (
    Result,
    as_input,
    axes,
    check_block,
    evaluation_mode,
    legend,
    schedule,
    style,
    ticks_of_short_axis,
)
from hbnode.nfe import NFE
from hbnode.solve.odeint import solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class AdjointNorms(Result):
    r"""Norms of the adjoint state of a block over time, for a scalar loss L. Each list has one entry per time.

    Attributes:
        t: times, ending with T.
        h: :math:`\|\partial L / \partial h(t)\|_2` over all elements of the batch.
        m: :math:`\|\partial L / \partial m(t)\|_2`, with the momentum or velocity m; None for a first-order field. The
            norm is 0 at T, because L depends on h(T) only.
        total: :math:`\|[\partial L / \partial h(t), \partial L / \partial m(t)]\|_2`, the norm with respect to (h, m).
    """

    t: list[float]
    h: list[float]
    m: list[float] | None
    total: list[float]

    def plot(self, ax: Axes | None = None, **kwargs: Any) -> Axes:
        """Draw the norms over time on a logarithmic axis.

        Arguments:
            ax: matplotlib axes; None creates a figure. Default: None.
            kwargs: passed to ``Axes.plot``.

        Returns:
            The axes.
        """
        ax = axes(ax)
        lines = [(self.h, "C0", "-", r"$\Vert\partial L/\partial h(t)\Vert$")]
        if self.m is not None:
            lines += [
                (self.m, "C1", "-.", r"$\Vert\partial L/\partial m(t)\Vert$"),
                (self.total, "0.4", "--", "both together"),
            ]
        for norms, color, dashes, label in lines:
            positive = [norm if norm > 0 else float("nan") for norm in norms]
            ax.plot(self.t, positive, **style({"color": color, "linestyle": dashes, "label": label}, kwargs))
        ax.set(yscale="log", xlabel="time $t$", ylabel="norm of the adjoint state")
        ticks_of_short_axis(ax.yaxis)
        legend(ax)
        return ax


def adjoint_norms(
    block: nn.Module,
    x: Any,
    t: Tensor | Sequence[float] | None = None,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
) -> AdjointNorms:
    r"""Compute the norm of the adjoint state :math:`a(t) = \partial L / \partial h(t)` of a block over time.

    The function solves the block from each time to the next, and differentiates the loss with respect to the state at
    each time. The result is the exact gradient of the numerical solution with the method and tolerances of the block.
    Each interval is solved twice, so that only the graph of one interval is stored at a time.

    For an HBNODE with damping γ, the adjoint a of m solves :math:`a'' - \gamma a' = a\, \partial f/\partial h`
    backward in time. Wang et al. find that its gradients vanish more slowly than those of a NODE.

    The block is solved in evaluation mode. Its modes, gradients and ``block.nfe`` do not change. An open
    :class:`hbnode.count_nfe` or :class:`hbnode.diagnostics.record_steps` includes the evaluations and steps of this
    call.

    References:
        Propositions 1 to 3 and figure 8 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture
        Design? (2022); Xia et al., Heavy Ball Neural Ordinary Differential Equations, arXiv:2110.04840.

    Arguments:
        block: an :class:`hbnode.ODEBlock`.
        x: input batch (batch, ...), which defines the state at ``t[0]``.
        t: times (T,) of the norms; the solve ends at the last time. None takes the ends of all steps for a block with
            fixed steps, and 50 equally spaced times of ``t_span`` for other blocks. Default: None.
        loss: function of h(T) that returns the scalar L; None is the mean of the squared elements. Default: None.

    Returns:
        The norms, with ``.plot()`` and ``.to_csv(path)``.

    Raises:
        TypeError: if ``block`` is not an ODEBlock.
        ValueError: if ``t`` has fewer than two times, or the loss is not a scalar.

    Example:
        >>> import torch, hbnode
        >>> decay = hbnode.ODEBlock(hbnode.NODE(lambda h: -h), t_span=(0.0, 5.0)).double()
        >>> norms = hbnode.diagnostics.adjoint_norms(decay, torch.ones(1, 1, dtype=torch.float64), loss=torch.sum)
        >>> f"{norms.h[0]:.4f} {norms.h[-1]:.4f}"  # exp(-5) and 1: the gradient vanishes towards the input
        '0.0067 1.0000'
    """
    block = check_block(block, "adjoint_norms")
    times, settings = schedule(block, t, points=50)
    intervals = list(pairwise(times.tolist()))
    with torch.inference_mode(False), evaluation_mode(block):
        with torch.no_grad():
            states: list[State] = [apply(lambda part: part.detach().clone(), block.start(as_input(block, x).clone()))]
            for interval in intervals:
                states.append(last_of(solve(block.field, states[-1], interval, settings, NFE())))
        with torch.enable_grad():
            last = [part.requires_grad_() for part in parts(states[-1])]
            h = block.field.readout(states[-1])
            value = h.square().mean() if loss is None else loss(h)
            if not isinstance(value, Tensor) or value.numel() != 1:
                kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"loss must return a scalar tensor, got {kind}. Fix: end it with .mean() or .sum().")
            grads = torch.autograd.grad(value.reshape(()), last, allow_unused=True, materialize_grads=True)
            found = [grads]
            for state, interval in zip(states[-2::-1], intervals[::-1], strict=True):  # stores one graph at a time
                start = [part.requires_grad_() for part in parts(state)]
                end = parts(last_of(solve(block.field, state, interval, settings, NFE())))
                grads = torch.autograd.grad(end, start, grads, allow_unused=True, materialize_grads=True)
                found.append(grads)
    norms = [float(torch.linalg.vector_norm(g.double())) for grads in reversed(found) for g in grads]
    h_norms, *m_norms = (norms[k :: len(grads)] for k in range(len(grads)))
    total = [math.hypot(*pair) for pair in zip(h_norms, *m_norms, strict=True)]
    return AdjointNorms(times.tolist(), h_norms, m_norms[0] if m_norms else None, total)
