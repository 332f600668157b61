"""torchsde's methods, with evaluations counted and failures named."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hbnode._checks import CHANGES_INPUT
from hbnode._recompute import solving
from hbnode._state import cast
from hbnode.errors import NonFiniteError, ReversalError
from hbnode.nfe import Tally
from hbnode.sde.field import HeavyBallSDE
from hbnode.sde.grid import check_number
from hbnode.signal import refuse_queries_outside

STRATONOVICH = ("midpoint", "heun", "euler_heun", "log_ode", "reversible_heun")
MOST_GROWTH = 10.0  # of γ dt e^{γT}, with which the gradient of torchsde's adjoint is of no use: about its own size off
LEVY_AREAS = {"srk": "space-time", "log_ode": "foster"}  # what a method needs of the Brownian motion


class _Flat(nn.Module):
    """The SDE as torchsde calls it, on (batch, 2d) and in the time since the first, with its evaluations counted."""

    noise_type = "additive"

    def __init__(self, sde: HeavyBallSDE, shape: torch.Size, start: float, method: str, tally: Tally) -> None:
        super().__init__()
        self.sde, self.shape, self.start, self.tally = sde, shape, start, tally
        self.sde_type = "stratonovich" if method in STRATONOVICH else "ito"

    def parts(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The state (h, m) of a row each."""
        half = y.shape[1] // 2
        return y[:, :half].reshape(self.shape), y[:, half:].reshape(self.shape)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        """The drift."""
        self.tally.add("evaluation")
        h, m = self.parts(y)
        version = None if h.is_inference() else h._version
        drift = self.sde((t + self.start).to(y.dtype), (h, m))
        if version is not None and h._version != version:
            raise ValueError(CHANGES_INPUT)
        return cast(torch.cat([x.reshape(len(y), y.shape[1] // 2) for x in drift], 1), y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """The diffusion as a matrix (batch, 2d, d), of which the first half is 0."""
        scale = torch.diag_embed(self._scale(y))
        return torch.cat([torch.zeros_like(scale), scale], 1)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The diffusion times a vector (batch, d)."""
        return torch.cat([torch.zeros_like(v), self._scale(y) * v], 1)

    def _scale(self, y: Tensor) -> Tensor:
        return self.sde.noise_scale(self.parts(y)[1]).reshape(len(y), y.shape[1] // 2)


def check_adjoint(damping: Tensor, t: Tensor, dt: float, method: str) -> None:
    """Refuse an adjoint that solves backwards what the damping has shrunk; errors of the steps grow by e^{γT}."""
    if method == "reversible_heun" or not damping.numel():  # whose steps are undone
        return
    strongest = float(damping.detach().max())
    longest = float(t.diff().max()) if len(t) > 1 else 0.0
    if strongest * dt > 0 and math.log(strongest * dt) + strongest * longest > math.log(MOST_GROWTH):
        raise ReversalError(
            f"torchsde's adjoint solves the state backwards, where the damping of {strongest:g} makes the errors of "
            f"steps of {dt:g} grow by e^{strongest * longest:.3g} between two output times, and the gradient is of no "
            "use. "
            "Fix: method='ubu' with gradient='checkpoint', which is exact, gradient='direct', or output times closer "
            "together",
            t=float(t[0]),
            step_size=dt,
            nfe=0,
        )


def solve(
    sde: HeavyBallSDE,
    state: tuple[Tensor, Tensor],
    t: Tensor,
    dt: float,
    method: str,
    gradient: str,
    seed: int,
    tally: Tally,
) -> tuple[Tensor, Tensor]:
    """The trajectories of h and m by one of torchsde's methods; the arguments are checked already."""
    import torchsde  # here, because it takes long to import

    h, m = state
    rows = h.shape[0] if h.dim() else 1
    y0 = torch.cat([x.reshape(rows, h.numel() // max(rows, 1)) for x in (h, m)], 1)
    flat = _Flat(sde, h.shape, float(t[0]), method, tally)
    check_number(float(t[-1] - t[0]), dt)
    # t + dt must differ from t, which in float32 it does not far from 0
    times = (t - t[0]).to(y0.device, torch.promote_types(y0.dtype, torch.float32))
    if not h.numel() and len(t) > 1:  # no solve, but a graph as of one
        y0 = y0 + 0 * (flat.f(times[0], y0) + flat.g_prod(times[0], y0, y0[:, : y0.shape[1] // 2]))
    if not h.numel() or len(t) == 1:
        return _trajectory(y0.unsqueeze(0).repeat(len(t), 1, 1), h.shape)
    motion = torchsde.BrownianInterval(
        t0=times[0],
        t1=times[-1],
        size=(rows, y0.shape[1] // 2),
        dtype=y0.dtype,
        device=y0.device,
        entropy=seed % 2**63,
        dt=dt,  # without it, a step can take twenty times as long
        levy_area_approximation=LEVY_AREAS.get(method, "none"),
    )
    integrate: Any = torchsde.sdeint_adjoint if gradient == "adjoint" else torchsde.sdeint
    with solving(sde):
        solution = integrate(flat, y0, times, bm=motion, method=method, dt=dt)
    finite = torch.isfinite(solution.detach()).flatten(1).all(1)
    if not bool(finite.all()):
        refuse_queries_outside()
        raise NonFiniteError(
            f"the solution is not finite (method {method!r}). Fix: a smaller dt, or method='ubu'",
            t=float(t[int(finite.int().argmin())]),
            step_size=dt,
            nfe=tally.nfe.total,
        )
    return _trajectory(solution, h.shape)


def _trajectory(solution: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The trajectories of h and m from those of rows, (T, rows, 2d)."""
    half = solution.shape[2] // 2
    h, m = solution[:, :, :half], solution[:, :, half:]
    return h.reshape(len(solution), *shape), m.reshape(len(solution), *shape)
