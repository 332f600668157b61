"""torchsde's methods for :func:`hbnode.sdeint`, with NFE counting and hbnode's errors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from hbnode._checks import as_seed
from hbnode._torch import backward_pass
from hbnode._tree import is_finite
from hbnode.errors import NonFiniteError, ReversalError
from hbnode.signal import refuse_queries_outside
from hbnode.solve.adjoints import closed_over_leaves, evaluate_known, own_parameters, owned, owning
from hbnode.solve.term import ODETerm, Snapshot, solving

TorchsdeMethod = Literal["euler", "milstein", "srk", "midpoint", "heun", "euler_heun", "log_ode", "reversible_heun"]
STRATONOVICH = ("midpoint", "heun", "euler_heun", "log_ode", "reversible_heun")
MOST_GROWTH = 10.0  # largest γ dt e^{γT}; beyond it, torchsde's adjoint gradient has a relative error of about 1
LEVY_AREAS = {"srk": "space-time", "log_ode": "foster"}  # methods that need an approximation of the Lévy area


class _Flat(nn.Module):
    """The SDE in the form that torchsde needs.

    The position h and the momentum m are joined to one tensor (batch, 2d), and time is measured from the first output
    time. In the backward pass of the adjoint, f and g raise ValueError if they use leaf tensors that are not ``known``.
    """

    noise_type = "additive"

    def __init__(self, term: ODETerm, snapshot: Snapshot, start: float, method: str) -> None:
        super().__init__()
        self.term, self.snapshot, self.start = weakref.ref(term), weakref.ref(snapshot), start  # outputs own both
        self.sde_type = "stratonovich" if method in STRATONOVICH else "ito"
        self.known: frozenset[int] = frozenset()
        self.forward_pass = backward_pass()  # >= 0 if the backward pass of an outer adjoint runs this solve
        self.first: Tensor | None = None

    def leaves(self, t: Tensor, y: Tensor) -> list[Tensor]:
        """Return the leaf tensors for which the adjoint must compute gradients.

        They are found by an evaluation of f and g. The value of f is stored and returned by the next call of ``f``, in
        which torchsde only determines its shape.
        """
        y = y.detach().requires_grad_()
        found, (f, _) = closed_over_leaves(lambda: (self.f(t, y), self.g(t, y)), (y,), is_dense=True)
        self.first = f.detach()
        leaves = {id(x): x for x in (*own_parameters(owned(self.term).inner), *found) if x.requires_grad}
        self.known = frozenset(leaves)
        return list(leaves.values())

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        first, self.first = self.first, None
        return self._evaluate(lambda: owned(self.term)((t + self.start).to(y), y), t, y) if first is None else first

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the diffusion matrix (batch, 2d, d); its first d matrix rows are 0, because h has no noise."""
        scale = torch.diag_embed(self._scale(y))
        return torch.cat([torch.zeros_like(scale), scale], 1)

    def _evaluate(self, function: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
        if self.forward_pass == backward_pass() or not torch.is_grad_enabled():
            return function()
        with owned(self.snapshot):
            return evaluate_known(function, inputs, self.known)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(v), self._scale(y) * v], 1)

    def _scale(self, y: Tensor) -> Tensor:
        term = owned(self.term)
        scale = self._evaluate(lambda: term.inner.noise_scale(term.unflatten((y,))[1]), y)
        return scale.reshape(len(y), y.shape[1] // 2)


def solve(
    equation: ODETerm, y0: tuple[Tensor, Tensor], t: Tensor, dt: float, method: str, gradient: str, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Solve by a method of torchsde, given checked arguments; return position and momentum, each (T, batch, ...)."""
    with torch.inference_mode(False):  # otherwise torchsde's constants would be inference tensors without gradients
        import torchsde  # imported only here, because the import is slow

    sde, counter, (h, m) = equation.field, equation.counter, y0
    equation.aligned(equation.inner.solver_temperature(), "temperature", "η")
    if gradient == "adjoint" and torch.is_grad_enabled() and method != "reversible_heun":  # it can reverse its steps
        _check_growth(torch.as_tensor(equation.damping).detach(), t, dt)
    if not h.numel():  # nothing to solve, but the result needs a graph
        h = h + 0 * (equation(t[0].to(h), h) + equation.inner.noise_scale(m))
    if not h.numel() or len(t) == 1:
        return torch.stack([h] * len(t)), torch.stack([m] * len(t))
    counter.nfe.keeps_graph = gradient == "direct" and torch.is_grad_enabled()
    state = tuple([x.reshape(x.shape or (1,)) for x in y0])
    term = ODETerm(sde, state, counter, second_order=False, lanes=len(state[0]))
    snapshot, (row,) = Snapshot(sde), term.flatten(state)
    flat = _Flat(term, snapshot, float(t[0]), method)
    # t + dt must differ from t, which float32 cannot guarantee far from 0
    times = (t - t[0]).to(row.device, torch.promote_types(row.dtype, torch.float32))
    motion = torchsde.BrownianInterval(
        t0=times[0], t1=times[-1], size=(len(row), row.shape[1] // 2), dtype=row.dtype, device=row.device,
        entropy=(int(torch.randint(2**62, ())) if seed is None else as_seed(seed)) % 2**63,
        levy_area_approximation=LEVY_AREAS.get(method, "none"),
        dt=dt,  # without the step size dt, a step can take twenty times as long
    )  # fmt: skip
    is_adjoint = gradient == "adjoint" and torch.is_grad_enabled()
    with solving(snapshot, row.device.type):
        if is_adjoint:
            leaves = flat.leaves(times[0], row)
            solution = torchsde.sdeint_adjoint(flat, row, times, bm=motion, method=method, dt=dt, adjoint_params=leaves)
        else:
            solution = torchsde.sdeint(flat, row, times, bm=motion, method=method, dt=dt)
    if not is_finite(solution):
        refuse_queries_outside()
        message = f"the solution is not finite (method {method!r}). Fix: a smaller dt, or method='ubu'"
        first = int(torch.isfinite(solution.detach()).flatten(1).all(1).int().argmin())
        raise NonFiniteError(message, t=float(t[first]), step_size=dt, nfe=counter.nfe.total)
    h, m = (x.reshape(len(t), *h.shape) for x in term.unflatten((solution,), (len(t),)))
    return owning((h, m), [term, snapshot]) if is_adjoint else (h, m)


def _check_growth(damping: Tensor, t: Tensor, dt: float) -> None:
    """Raise ReversalError if the relative error of a step would grow too much in the adjoint's backward solve.

    The error is about γ dt, with the damping γ and the step size dt. Between output times that are T apart, the forward
    solve shrinks the momentum m by the factor e^{-γT}, so the backward solve enlarges errors by e^{γT}.
    """
    strongest, longest = (float(x.max()) if x.numel() else 0.0 for x in (damping, t.diff()))
    if strongest * dt > 0 and math.log(strongest * dt) + strongest * longest > math.log(MOST_GROWTH):
        raise ReversalError(
            f"the gradient of torchsde's adjoint would be wrong. In its backward solve, the damping of {strongest:g} "
            f"makes errors of steps of {dt:g} grow by e^{strongest * longest:.3g} between two output times. Fix: "
            "method='ubu' with gradient='checkpoint', which is exact, gradient='direct', or closer output times",
            t=float(t[0]), step_size=dt, nfe=0,
        )  # fmt: skip
