"""torchsde's methods, with evaluations counted and failures named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hbnode._recompute import solving
from hbnode._state import cast
from hbnode.errors import NonFiniteError
from hbnode.nfe import Tally
from hbnode.sde.field import HeavyBallSDE
from hbnode.signal import refuse_queries_outside

STRATONOVICH = ("midpoint", "heun", "euler_heun", "log_ode", "reversible_heun")
LEVY_AREAS = {"srk": "space-time", "log_ode": "foster"}  # what a method needs of the Brownian motion


class _Flat(nn.Module):
    """The SDE as torchsde calls it, on (batch, 2d), with its evaluations counted."""

    noise_type = "additive"

    def __init__(self, sde: HeavyBallSDE, shape: torch.Size, method: str, tally: Tally) -> None:
        super().__init__()
        self.sde, self.shape, self.tally = sde, shape, tally
        self.sde_type = "stratonovich" if method in STRATONOVICH else "ito"

    def parts(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The state (h, m) of a row each."""
        h, m = y.reshape(len(y), 2, -1).unbind(1)
        return h.reshape(self.shape), m.reshape(self.shape)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        """The drift."""
        self.tally.add("evaluation")
        h, m = self.parts(y)
        drift = self.sde(t, (h, m))
        return cast(torch.stack([x.reshape(len(y), -1) for x in drift], 1).reshape(y.shape), y)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """The diffusion as a matrix (batch, 2d, d), of which the first half is 0."""
        scale = torch.diag_embed(self._scale(y))
        return torch.cat([torch.zeros_like(scale), scale], 1)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The diffusion times a vector (batch, d)."""
        return torch.cat([torch.zeros_like(v), self._scale(y) * v], 1)

    def _scale(self, y: Tensor) -> Tensor:
        return self.sde.noise_scale(self.parts(y)[1]).reshape(len(y), -1)


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
    if not h.numel() or len(t) == 1:
        return tuple(x.unsqueeze(0).repeat(len(t), *[1] * x.dim()) for x in state)  # type: ignore[return-value]  # two
    flat = _Flat(sde, h.shape, method, tally)
    times = t.to(y0.device, y0.dtype)
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
    trajectory = solution.reshape(len(t), rows, 2, -1)
    return trajectory[:, :, 0].reshape(len(t), *h.shape), trajectory[:, :, 1].reshape(len(t), *h.shape)
