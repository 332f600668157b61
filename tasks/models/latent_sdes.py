"""A first-order latent SDE for irregular series, solved by torchsde, as a baseline of hbnode.nn.LatentSDE."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

import hbnode
from hbnode.nfe import NFE, Tally
from hbnode.nn.latent import Guide, LatentModel, make_control, quiet

TITLES = {"hbsde": "heavy-ball SDE", "sde": "first-order SDE, torchsde"}


class FirstOrder(LatentModel):
    """The latent SDE dz = f(z) dt + g(z) dW, where each feature's diffusion depends only on this feature (as in
    torchsde).

    The drift of the posterior is f + g u with the control u of :class:`hbnode.nn.LatentSDE`. All series have the same
    times.

    Arguments:
        channels: number of features of a sample.
        size: number of features of z.
        hidden: units of the two hidden layers of the drift and of the control.
        encoder: see :class:`hbnode.nn.LatentSDE`.
        dt: step size of the solver.
    """

    UNITS = 8  # hidden units of the network for a feature's diffusion

    def __init__(self, channels: int, size: int, hidden: int, *, encoder: nn.Module, dt: float) -> None:
        super().__init__(channels, size, hidden, size, encoder=encoder)
        self.dt = dt
        self.drift = hbnode.nn.MLP(size, [hidden] * 2, size, activation=nn.Softplus)
        self.control = make_control(size, self.summary_size, hidden)
        self.decoder = quiet(nn.Linear(size, channels))
        self.inner = nn.Parameter(torch.randn(2, size, self.UNITS))
        self.outer = nn.Parameter(torch.randn(size, self.UNITS) / self.UNITS**0.5)
        self.bias = nn.Parameter(torch.zeros(size))

    def diffusion(self, z: Tensor) -> Tensor:
        """Return the diffusion of each feature. It is between 0.01 and 1, because torchsde divides by it."""
        units = nn.functional.softplus(z.unsqueeze(-1) * self.inner[0] + self.inner[1])
        return 0.01 + 0.99 * torch.sigmoid((units * self.outer).sum(-1) + self.bias)

    @override
    def solve(self, z: Tensor, t: Tensor, guide: Guide | None) -> tuple[Tensor, Tensor]:
        import torchsde  # imported here because the import is slow

        assert guide is not None
        equation, times = _Equation(self, guide), t[0].to(z)
        motion = torchsde.BrownianInterval(
            t0=times[0],
            t1=times[-1],
            size=(len(z), self.latent_size + 1),  # one more for the KL divergence, which has no noise
            dtype=z.dtype,
            device=z.device,
            entropy=int(torch.randint(2**62, ())),  # otherwise torchsde takes the seed from numpy
            dt=self.dt,
        )
        z, kl = torchsde.sdeint(equation, z, times, bm=motion, dt=self.dt, method="euler", logqp=True)
        return z, kl.sum(0)


class _Equation:
    """The posterior's drift f, the prior's drift h and the diffusion g, under the names that torchsde expects."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, model: FirstOrder, guide: Guide) -> None:
        self.model, self.guide = model, guide
        self.tally = Tally(model, NFE())

    def f(self, t: Tensor, z: Tensor) -> Tensor:
        self.tally.add("evaluation")
        return self.model.drift(z) + self.g(t, z) * self.guide.control(self.model.control, t, z)

    def h(self, t: Tensor, z: Tensor) -> Tensor:
        return self.model.drift(z)

    def g(self, t: Tensor, z: Tensor) -> Tensor:
        return self.model.diffusion(z)
