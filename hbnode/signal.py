"""Exogenous inputs of a differential equation: sampled signals as functions of time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from hbnode._checks import as_numbers, check_choice, check_input
from hbnode._torch import is_tracing, is_vmapped, plain


class _Queries(threading.local):
    """A record of the times at which the solves of this thread evaluate signals.

    Inside a solve on a GPU, a signal returns NaN outside its samples, to avoid a synchronisation. If the solve fails,
    :func:`refuse_queries_outside` checks the recorded times.

    Attributes:
        solves: number of running solves, which may be nested.
        recorded: pairs of an evaluated signal and its query times, if a solver records them; else None.
        unchecked: pairs of a signal and query times that were not checked and may lie outside the samples.
        is_trial: whether the field is evaluated at times that the solve may not reach. A signal then returns NaN
            outside its samples instead of raising an error.
    """

    def __init__(self) -> None:
        self.solves = 0
        self.recorded: list[tuple[Signal, Tensor]] | None = None
        self.unchecked: deque[tuple[Signal, Tensor]] = deque(maxlen=256)
        self.is_trial = False


queries = _Queries()


class Signal(nn.Module):
    r"""A sampled input u(t), interpolated in time, for use in the ``func`` of a field.

    ``kind="linear"`` interpolates linearly. ``kind="cubic"`` uses cubic Hermite polynomials whose slopes are
    second-order finite differences. The result is continuously differentiable, and exact for quadratic polynomials.

    The signal is differentiable with respect to the query times and the samples u, but not the sample times t.

    Adaptive native methods choose steps that end on sample times, and step over a few sample times at most. If u
    requires a gradient, they step over none. The query time may be any linear function of the time of the solve.

    ``signal.to(dtype)`` converts the samples. It does not convert the sample times to a less precise dtype, in which
    neighbouring times could become equal.

    Inside a solve on a GPU, a query does not synchronise the device. A query outside [t[0], t[-1]] then returns NaN,
    and the solver raises ValueError. In a graph of torch.compile or torch.export such a query returns NaN.

    Arguments:
        t: sample times (T,), strictly increasing, floating point. For a jump, put the samples before and after it at
            two slightly different times.
        u: samples (T, ...), floating point; the trailing shape is that of u(t), for example a batch.
        kind: ``"linear"`` or ``"cubic"``. Default: ``"linear"``.
        outside: result of a query outside [t[0], t[-1]]: ``"raise"`` an error, or ``"hold"`` the nearest sample.
            Adaptive methods of torchdiffeq evaluate ``func`` slightly after the last output time, and their adjoint
            before the first. Extend the signal at both ends, solve with ``save="exact"``, or use ``"hold"``.
            Default: ``"raise"``.

    Shape:
        - ``signal(t)``: t of any shape -> the shape of t, followed by the trailing shape of u.

    Raises:
        ValueError: if times do not increase, samples are not finite or too few, or a query is outside [t[0], t[-1]].

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
        check_choice(kind, "kind", tuple(needed))
        check_choice(outside, "outside", ("raise", "hold"))
        check_input(t, "t")
        check_input(u, "u")
        if not (t.is_floating_point() and u.is_floating_point()):
            raise TypeError(f"t and u must be floating point, got {t.dtype} and {u.dtype}. Fix: t.double(), u.float().")
        if t.dim() != 1 or len(t) < needed[kind] or u.dim() == 0 or len(u) != len(t):
            shapes = f"{tuple(t.shape)} and {tuple(u.shape)}"
            wanted = f"t of shape (T,) and u of shape (T, ...) with T >= {needed[kind]}"
            raise ValueError(f"a {kind} signal needs {wanted}; got {shapes}. Fix: put time first in u.")
        if is_vmapped(t):
            raise ValueError("t is mapped by torch.vmap. Fix: a Signal of one row of times for all samples.")
        on_host = plain(t).cpu()
        gaps = on_host.diff()
        if not bool((gaps > 0).all()):
            i = int((gaps > 0).int().argmin())
            raise ValueError(
                f"the sample times must be strictly increasing, but t[{i}]={float(on_host[i]):.9g} is "
                f"followed by {float(on_host[i + 1]):.9g}. Fix: to sort the samples and average those of equal time, "
                "t, index = t.unique(return_inverse=True); "
                "u = torch.stack([u[index == i].mean(0) for i in range(len(t))])."
            )
        if not bool(plain(u).isfinite().all()):
            fix = "keep = u.isfinite().reshape(len(u), -1).all(1); Signal(t[keep], u[keep])"
            raise ValueError(f"u must be finite, got NaN or infinite samples. Fix: leave them out, {fix}.")
        self.kind = kind
        self.outside = outside
        self.knots = tuple(on_host.tolist())  # Python numbers, because step sizes are chosen on the CPU
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
        """Return the interpolated values of the signal at the times ``t``, a tensor or numbers."""
        if not isinstance(t, Tensor):
            t = as_numbers(t, "t", "force(torch.tensor([0.5]))", self.t.dtype, device=None).to(self.t.device)
        elif t.is_complex() or t.dtype is torch.bool:
            raise TypeError(f"t must be real numbers, got {t.dtype}. Fix: t.real, or t.float().")
        traced = is_tracing()
        if not traced and queries.recorded is not None:
            queries.recorded.append((self, t))
        if self.outside == "hold":
            first, last = self.t[0], self.t[-1]
            t = torch.where(t < first, first, torch.where(t > last, last, t))  # the derivative at the ends is 1
        elif not traced and not queries.is_trial:
            if t.is_cpu or not queries.solves:
                self.refuse_outside(t)
            else:
                queries.unchecked.append((self, t.detach()))
        shape = t.shape + self.u.shape[1:]
        t = t.reshape(-1)  # indexing with a 0-dimensional tensor would synchronise
        left = (torch.searchsorted(self.t, t.detach().to(self.t.dtype).contiguous(), right=True) - 1).clamp(
            0, len(self.t) - 2
        )
        start = self.t[left]
        width = self.t[left + 1] - start
        s = (t - start) / width
        if traced or queries.is_trial or not t.is_cpu:
            s = torch.where(self._is_outside(t), torch.nan, s)
        return self._between(left, width, _align(s, self.u)).reshape(shape)

    def _between(self, left: Tensor, width: Tensor, s: Tensor) -> Tensor:
        """Return interpolated values between the samples ``left`` and ``left + 1``, at relative positions ``s``.

        Arguments:
            left: index of the sample before each query time, (queries,).
            width: time between the two samples, (queries,).
            s: position between the two samples, from 0 to 1, (queries, 1, ...).
        """
        u0, u1 = self.u[left], self.u[left + 1]
        if self.kind == "linear":
            return u0 + s * (u1 - u0)
        (slopes,) = torch.gradient(self.u, spacing=(self.t,), dim=0, edge_order=2)
        slopes = slopes.to(self.u.dtype)
        width = _align(width, self.u)
        d0, d1 = width * slopes[left], width * slopes[left + 1]
        return u0 + s * (d0 + s * (3 * (u1 - u0) - 2 * d0 - d1 + s * (2 * (u0 - u1) + d0 + d1)))

    def _is_outside(self, t: Tensor) -> Tensor:
        """Return a mask of the times that lie outside the sample times [t[0], t[-1]] by more than rounding error."""
        dtypes = (t.dtype if t.is_floating_point() else self.t.dtype, self.t.dtype)
        slack = max(torch.finfo(dtype).eps for dtype in dtypes) * max(abs(self.knots[0]), abs(self.knots[-1]))
        return (t < self.t[0] - slack) | (t > self.t[-1] + slack)

    def refuse_outside(self, t: Tensor) -> None:
        """Raise ValueError if one of the times lies outside the sample times [t[0], t[-1]]."""
        t = plain(t)
        if not bool(self._is_outside(t).any()):
            return
        worst = t.reshape(-1)[(t.reshape(-1) - self.t.mean()).abs().argmax()]
        raise ValueError(
            f"the signal was evaluated at t={float(worst):g}, outside its sample times "
            f"[{float(self.t[0]):g}, {float(self.t[-1]):g}]. Fix: add samples, or Signal(..., outside='hold'). "
            "(Adaptive methods of torchdiffeq evaluate f beyond the ends of a solve, except with save='exact'.)"
        )

    def extra_repr(self) -> str:
        return f"samples={len(self.t)}, kind={self.kind!r}, outside={self.outside!r}"


def _align(x: Tensor, u: Tensor) -> Tensor:
    """Reshape x (n,) to (n, 1, ..., 1) with as many dimensions as ``u``, and convert it to the dtype of u."""
    return x.reshape(x.shape + (1,) * (u.dim() - 1)).to(u.dtype)


def refuse_queries_outside() -> None:
    """Raise ValueError if a signal was evaluated outside its sample times; solvers call this when a solve fails."""
    for signal, t in list(queries.unchecked):
        signal.refuse_outside(t)
