"""Exogenous inputs: a sampled signal as a function of time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from hbnode._checks import check_input
from hbnode._torch import is_tracing


class _Queries(threading.local):
    """What the solves that run in this thread ask signals for.

    Inside of a solve a query outside of a signal gives NaN, which the solver does not accept; it is checked later.

    Attributes:
        solves: how many solves run, one inside of the other.
        signals: the signals that were asked, while somebody wants to know.
        unchecked: signals and times that were asked, to be looked at if a solve fails.
    """

    def __init__(self) -> None:
        self.solves = 0
        self.signals: list[Signal] | None = None
        self.unchecked: deque[tuple[Signal, Tensor]] = deque(maxlen=256)


queries = _Queries()


class Signal(nn.Module):
    r"""A sampled input u(t), for use inside ``func``.

    ``"linear"`` joins the samples by straight lines. ``"cubic"`` joins them by cubic Hermite polynomials whose slopes
    are second-order finite differences: once continuously differentiable, and exact for quadratics.

    Differentiable with respect to the query times and the samples u (not the sample times).

    Adaptive native methods know the sample times inside a solve: their steps end on them, or pass only a few.

    The samples take a dtype that the module is moved to. The sample times do not take a narrower one, which would
    round them together.

    On a GPU a query does not wait for the device: inside a solve a query outside of the samples gives NaN, and the
    solver, which does not accept NaN, raises the error. In a graph of torch.compile or torch.export it gives NaN too.

    Arguments:
        t: sample times (T,), strictly increasing, floating point.
        u: samples (T, ...), floating point; the trailing shape is that of u(t), a batch for instance.
        kind: ``"linear"`` or ``"cubic"``. Default: ``"linear"``.
        outside: what a query outside of [t[0], t[-1]] does: ``"raise"``, or ``"hold"`` the nearest sample. The
            adaptive methods of torchdiffeq look a little past the last output time, and their adjoint before the
            first: let the signal reach further than the solve at both ends, solve with ``save="exact"``, or
            hold it. Default: ``"raise"``.

    Shape:
        - ``signal(t)``: t of any shape -> that shape, followed by the trailing shape of u.

    Raises:
        ValueError: times not increasing, too few samples, or a query outside.

    Example:
        >>> import torch, hbnode
        >>> u = hbnode.Signal(torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, 0.0]))
        >>> u(torch.tensor([0.5, 2.0]))
        tensor([1., 1.])
    """

    t: Tensor
    u: Tensor

    def __init__(self, t: Tensor, u: Tensor, kind: str = "linear", *, outside: str = "raise") -> None:
        super().__init__()
        needed = {"linear": 2, "cubic": 3}
        if kind not in needed:
            raise ValueError(f"unknown kind {kind!r} of signal; expected 'linear' or 'cubic'. Fix: kind='linear'.")
        if outside not in ("raise", "hold"):
            raise ValueError(f"unknown outside={outside!r}; expected 'raise' or 'hold'. Fix: outside='raise'.")
        check_input(t, "t")
        check_input(u, "u")
        if not (t.is_floating_point() and u.is_floating_point()):
            raise TypeError(f"a signal is floating point; got t {t.dtype} and u {u.dtype}. Fix: t.float(), u.float().")
        if t.dim() != 1 or len(t) < needed[kind] or u.dim() == 0 or len(u) != len(t):
            raise ValueError(
                f"a {kind} signal needs t of shape (T,) and u of shape (T, ...) with T >= {needed[kind]}; got "
                f"{tuple(t.shape)} and {tuple(u.shape)}. Fix: put time first in u."
            )
        on_host = t.detach().cpu()
        if not bool((on_host.diff() > 0).all()):
            raise ValueError("the sample times must be strictly increasing. Fix: sort them and drop repeated ones.")
        self.kind = kind
        self.outside = outside
        self.knots = tuple(on_host.tolist())  # where steps are chosen
        self.time_dtype = t.dtype
        self.register_buffer("t", t.detach(), persistent=False)
        self.register_buffer("u", u, persistent=False)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if torch.finfo(self.t.dtype).eps > torch.finfo(self.time_dtype).eps:
            self.t = torch.tensor(self.knots, dtype=self.time_dtype, device=self.t.device)
        return self

    def forward(self, t: Tensor) -> Tensor:
        """Return the signal at the times ``t``."""
        traced = is_tracing()
        if not traced and queries.signals is not None:
            queries.signals.append(self)
        if self.outside == "hold":
            first, last = self.t[0], self.t[-1]
            t = torch.where(t < first, first, torch.where(t > last, last, t))  # of slope 1 at the ends too
        elif not traced and (t.is_cpu or not queries.solves):
            self.refuse_outside(t)
        elif not traced:
            queries.unchecked.append((self, t.detach()))
        shape = t.shape + self.u.shape[1:]
        t = t.reshape(-1)  # an index of no dimension would be read by the host
        left = (torch.searchsorted(self.t, t.detach().to(self.t.dtype).contiguous(), right=True) - 1).clamp(
            0, len(self.t) - 2
        )
        start = self.t[left]
        width = self.t[left + 1] - start
        s = (t - start) / width
        if traced or not t.is_cpu:
            s = torch.where(self._is_outside(t), torch.nan, s)
        return self._between(left, width, _align(s, self.u)).reshape(shape)

    def _between(self, left: Tensor, width: Tensor, s: Tensor) -> Tensor:
        """Return the signal at the fractions ``s`` of the intervals that begin with the samples ``left``."""
        u0, u1 = self.u[left], self.u[left + 1]
        if self.kind == "linear":
            return u0 + s * (u1 - u0)
        (slopes,) = torch.gradient(self.u, spacing=(self.t,), dim=0, edge_order=2)
        slopes = slopes.to(self.u.dtype)
        width = _align(width, self.u)
        d0, d1 = width * slopes[left], width * slopes[left + 1]
        return u0 + s * (d0 + s * (3 * (u1 - u0) - 2 * d0 - d1 + s * (2 * (u0 - u1) + d0 + d1)))

    def _is_outside(self, t: Tensor) -> Tensor:
        """Return whether times lie outside of the samples, by more than the rounding of either."""
        dtypes = (t.dtype if t.is_floating_point() else self.t.dtype, self.t.dtype)
        slack = max(torch.finfo(dtype).eps for dtype in dtypes) * max(abs(self.knots[0]), abs(self.knots[-1]))
        return (t < self.t[0] - slack) | (t > self.t[-1] + slack)

    def refuse_outside(self, t: Tensor) -> None:
        """Raise if one of the times lies outside of the samples."""
        if not bool(self._is_outside(t).any()):
            return
        worst = t.detach().reshape(-1)[(t.detach().reshape(-1) - self.t.mean()).abs().argmax()]
        raise ValueError(
            f"the signal was asked for t={float(worst):g}, outside of its samples "
            f"[{float(self.t[0]):g}, {float(self.t[-1]):g}]. Fix: give it samples that reach further, or "
            "Signal(..., outside='hold'). (Adaptive methods of torchdiffeq look past the ends of a solve, "
            "but for save='exact'.)"
        )

    def extra_repr(self) -> str:
        return f"samples={len(self.t)}, kind={self.kind!r}, outside={self.outside!r}"


def _align(x: Tensor, u: Tensor) -> Tensor:
    """``x`` of the shape of the query, with a dimension of 1 for each trailing one of ``u``."""
    return x.reshape(x.shape + (1,) * (u.dim() - 1)).to(u.dtype)


def refuse_queries_outside() -> None:
    """Where a solve has failed: raise if it was a signal that was asked for a time outside of its samples."""
    for signal, t in list(queries.unchecked):
        signal.refuse_outside(t)
