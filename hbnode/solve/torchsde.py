"""torchsde's methods, with evaluations counted and failures named."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hbnode._state import is_finite
from hbnode.errors import NonFiniteError, ReversalError
from hbnode.signal import refuse_queries_outside
from hbnode.solve.noise import check_number, drawn
from hbnode.solve.term import ODETerm, Snapshot, solving

TorchsdeMethod = Literal["euler", "milstein", "srk", "midpoint", "heun", "euler_heun", "log_ode", "reversible_heun"]
STRATONOVICH = ("midpoint", "heun", "euler_heun", "log_ode", "reversible_heun")
MOST_GROWTH = 10.0  # of γ dt e^{γT}, with which the gradient of torchsde's adjoint is of no use: about its own size off
LEVY_AREAS = {"srk": "space-time", "log_ode": "foster"}  # what a method needs of the Brownian motion


class _Flat(nn.Module):
    """The SDE as torchsde calls it, on (batch, 2d) and in the time since the first."""

    noise_type = "additive"

    def __init__(self, term: ODETerm, start: float, method: str) -> None:
        super().__init__()
        self.sde, self.term, self.start = term.inner, term, start
        self.sde_type = "stratonovich" if method in STRATONOVICH else "ito"

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        """The drift."""
        return self.term((t + self.start).to(y), y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """The diffusion as a matrix (batch, 2d, d), of which the first half is 0."""
        scale = torch.diag_embed(self._scale(y))
        return torch.cat([torch.zeros_like(scale), scale], 1)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The diffusion times a vector (batch, d)."""
        return torch.cat([torch.zeros_like(v), self._scale(y) * v], 1)

    def _scale(self, y: Tensor) -> Tensor:
        return self.sde.noise_scale(self.term.unflatten((y,))[1]).reshape(len(y), y.shape[1] // 2)


def solve(
    equation: ODETerm, y0: tuple[Tensor, Tensor], t: Tensor, dt: float, method: str, gradient: str, seed: int | None
) -> tuple[Tensor, Tensor]:
    """The trajectories of h and m by one of torchsde's methods; the arguments are checked already."""
    with torch.inference_mode(False):  # else its constants are made in there and spoil later gradients
        import torchsde  # here, because it takes long to import

    equation.aligned(equation.inner.solver_temperature(), "temperature", "η")
    if gradient == "adjoint" and torch.is_grad_enabled():
        _check_adjoint(torch.as_tensor(equation.damping), t, dt, method)
    sde, tally, nfe = equation.field, equation.tally, equation.tally.nfe
    nfe.keeps_graph = gradient == "direct" and torch.is_grad_enabled()
    shape, state = y0[0].shape, tuple([x.reshape(x.shape or (1,)) for x in y0])
    term = ODETerm(sde, state, tally, second_order=False, lanes=len(state[0]))
    flat, (row,) = _Flat(term, float(t[0]), method), term.flatten(state)
    # t + dt must differ from t, which in float32 it does not far from 0
    times = (t - t[0]).to(row.device, torch.promote_types(row.dtype, torch.float32))
    check_number(float(t[-1] - t[0]), dt)
    if not row.numel() and len(t) > 1:  # no solve, but a graph as of one
        row = row + 0 * (flat.f(times[0], row) + flat.g_prod(times[0], row, row[:, : row.shape[1] // 2]))
    if not row.numel() or len(t) == 1:
        solution = row.unsqueeze(0).repeat(len(t), 1, 1)
    else:
        motion = torchsde.BrownianInterval(
            t0=times[0], t1=times[-1], size=(len(row), row.shape[1] // 2), dtype=row.dtype, device=row.device,
            entropy=drawn(seed) % 2**63, levy_area_approximation=LEVY_AREAS.get(method, "none"),
            dt=dt,  # without it, a step can take twenty times as long
        )  # fmt: skip
        integrate: Any = torchsde.sdeint_adjoint if gradient == "adjoint" else torchsde.sdeint
        with solving(Snapshot(sde), row.device.type):
            solution = integrate(flat, row, times, bm=motion, method=method, dt=dt)
    if not is_finite(solution):
        refuse_queries_outside()
        finite = torch.isfinite(solution.detach()).flatten(1).all(1)
        raise NonFiniteError(
            f"the solution is not finite (method {method!r}). Fix: a smaller dt, or method='ubu'",
            t=float(t[int(finite.int().argmin())]), step_size=dt, nfe=nfe.total,
        )  # fmt: skip
    h, m = term.unflatten((solution,), (len(t),))
    return h.reshape(len(t), *shape), m.reshape(len(t), *shape)


def _check_adjoint(damping: Tensor, t: Tensor, dt: float, method: str) -> None:
    """Refuse an adjoint that solves backwards what the damping has shrunk; errors of the steps grow by e^{γT}."""
    if method == "reversible_heun" or not damping.numel():  # whose steps are undone
        return
    strongest = float(damping.detach().max())
    longest = float(t.diff().max()) if len(t) > 1 else 0.0
    if strongest * dt > 0 and math.log(strongest * dt) + strongest * longest > math.log(MOST_GROWTH):
        raise ReversalError(
            f"torchsde's adjoint solves the state backwards, where the damping of {strongest:g} makes the errors of "
            f"steps of {dt:g} grow by e^{strongest * longest:.3g} between two output times, and the gradient is of no "
            "use. Fix: method='ubu' with gradient='checkpoint', which is exact, gradient='direct', or output times "
            "closer together",
            t=float(t[0]), step_size=dt, nfe=0,
        )  # fmt: skip
