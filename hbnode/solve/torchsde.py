"""torchsde's methods for :func:`hbnode.sdeint`, with NFE counting and hbnode's errors."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hbnode._checks import as_seed
from hbnode._tree import is_finite
from hbnode.errors import NonFiniteError, ReversalError
from hbnode.signal import refuse_queries_outside
from hbnode.solve.term import ODETerm, Snapshot, solving

TorchsdeMethod = Literal["euler", "milstein", "srk", "midpoint", "heun", "euler_heun", "log_ode", "reversible_heun"]
STRATONOVICH = ("midpoint", "heun", "euler_heun", "log_ode", "reversible_heun")
MOST_GROWTH = 10.0  # largest γ dt e^{γT}; beyond it the error of torchsde's adjoint gradient is about its own size
LEVY_AREAS = {"srk": "space-time", "log_ode": "foster"}  # Lévy area approximations that methods need


class _Flat(nn.Module):
    """The SDE as torchsde calls it: h and m are joined to (batch, 2d), and time counts from the first output time."""

    noise_type = "additive"

    def __init__(self, term: ODETerm, start: float, method: str) -> None:
        super().__init__()
        self.sde, self.term, self.start = term.inner, term, start
        self.sde_type = "stratonovich" if method in STRATONOVICH else "ito"

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        return self.term((t + self.start).to(y), y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the diffusion matrix (batch, 2d, d), whose upper half, for h, is 0."""
        scale = torch.diag_embed(self._scale(y))
        return torch.cat([torch.zeros_like(scale), scale], 1)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(v), self._scale(y) * v], 1)

    def _scale(self, y: Tensor) -> Tensor:
        return self.sde.noise_scale(self.term.unflatten((y,))[1]).reshape(len(y), y.shape[1] // 2)


def solve(
    equation: ODETerm, y0: tuple[Tensor, Tensor], t: Tensor, dt: float, method: str, gradient: str, seed: int | None
) -> tuple[Tensor, Tensor]:
    """Return the trajectories of h and m, (T, batch, ...), by one of torchsde's methods, from checked arguments."""
    with torch.inference_mode(False):  # else torchsde's constants are inference tensors and break later gradients
        import torchsde  # here, because the import is slow

    sde, counter, (h, m) = equation.field, equation.counter, y0
    equation.aligned(equation.inner.solver_temperature(), "temperature", "η")
    if gradient == "adjoint" and torch.is_grad_enabled() and method != "reversible_heun":  # it reverses its steps
        _check_growth(torch.as_tensor(equation.damping).detach(), t, dt)
    if not h.numel():  # nothing to solve, but the result needs a graph
        h = h + 0 * (equation(t[0].to(h), h) + equation.inner.noise_scale(m))
    if not h.numel() or len(t) == 1:
        return torch.stack([h] * len(t)), torch.stack([m] * len(t))
    counter.nfe.keeps_graph = gradient == "direct" and torch.is_grad_enabled()
    state = tuple([x.reshape(x.shape or (1,)) for x in y0])
    term = ODETerm(sde, state, counter, second_order=False, lanes=len(state[0]))
    flat, (row,) = _Flat(term, float(t[0]), method), term.flatten(state)
    # t + dt must differ from t, which float32 cannot guarantee far from 0
    times = (t - t[0]).to(row.device, torch.promote_types(row.dtype, torch.float32))
    motion = torchsde.BrownianInterval(
        t0=times[0], t1=times[-1], size=(len(row), row.shape[1] // 2), dtype=row.dtype, device=row.device,
        entropy=(int(torch.randint(2**62, ())) if seed is None else as_seed(seed)) % 2**63,
        levy_area_approximation=LEVY_AREAS.get(method, "none"),
        dt=dt,  # without dt, a step can take twenty times as long
    )  # fmt: skip
    integrate: Any = torchsde.sdeint_adjoint if gradient == "adjoint" else torchsde.sdeint
    with solving(Snapshot(sde), row.device.type):
        solution = integrate(flat, row, times, bm=motion, method=method, dt=dt)
    if not is_finite(solution):
        refuse_queries_outside()
        message = f"the solution is not finite (method {method!r}). Fix: a smaller dt, or method='ubu'"
        first = int(torch.isfinite(solution.detach()).flatten(1).all(1).int().argmin())
        raise NonFiniteError(message, t=float(t[first]), step_size=dt, nfe=counter.nfe.total)
    h, m = (x.reshape(len(t), *h.shape) for x in term.unflatten((solution,), (len(t),)))
    return h, m


def _check_growth(damping: Tensor, t: Tensor, dt: float) -> None:
    """Raise ReversalError if the step errors, about γ dt, grow too much in the adjoint's backward solve.

    They grow by e^{γT} over an interval T, because the forward solve shrinks m by that factor.
    """
    strongest, longest = (float(x.max()) if x.numel() else 0.0 for x in (damping, t.diff()))
    if strongest * dt > 0 and math.log(strongest * dt) + strongest * longest > math.log(MOST_GROWTH):
        raise ReversalError(
            f"the gradient of torchsde's adjoint would be wrong. In its backward solve, the damping of {strongest:g} "
            f"makes errors of steps of {dt:g} grow by e^{strongest * longest:.3g} between two output times. Fix: "
            "method='ubu' with gradient='checkpoint', which is exact, gradient='direct', or closer output times",
            t=float(t[0]), step_size=dt, nfe=0,
        )  # fmt: skip
