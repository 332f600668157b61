"""Latent SDEs of irregular series: a heavy ball in a heat bath, and a first-order SDE solved by torchsde."""

from __future__ import annotations

import abc
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

import hbnode

TITLES = {"hbsde": "heavy-ball SDE", "sde": "first-order SDE, torchsde"}


class Paths(NamedTuple):
    """Paths of the posterior and what they cost.

    Attributes:
        mean: what the decoder makes of them, (batch, rows, channels).
        scale: standard deviation of a sample around them, (channels,).
        kl_path: Kullback-Leibler divergence of the paths, given their start, (batch,): an estimate from one path.
        kl_start: that of the start, (batch,).
        evaluations: of the drift.
    """

    mean: Tensor
    scale: Tensor
    kl_path: Tensor
    kl_start: Tensor
    evaluations: int


class Context:
    """What a batch tells the control: the encoder's summary of the samples from the next row on."""

    def __init__(self, summary: Tensor, active: Tensor, spacing: float) -> None:
        self.summary, self.active, self.spacing = summary, active, spacing
        self.evaluations = 0

    def at(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the summary (batch, size), and whether a sample is left (batch, 1), at a time in an interval."""
        row = min(math.floor(float(t) / self.spacing + 1e-3) + 1, self.summary.shape[1] - 1)
        self.evaluations += 1
        return self.summary[:, row], self.active[:, row, None]


class LatentSDE(nn.Module, abc.ABC):
    """A prior SDE, a posterior that differs by a control u in the noise's place, an encoder and a decoder.

    With the prior's drift f and diffusion s, the posterior's drift is f + s u. By Girsanov's theorem the divergence of
    the paths is the mean of the integral of |u|² / 2. After the last sample u = 0: from there on a path is a forecast.

    Arguments:
        channels: of a sample.
        size: of h, or of the first-order state.
        hidden: units of the two hidden layers of the drift and of the control.
        context: units of the encoder.
        spacing: time between two rows, and the length of the solver's steps.
    """

    states = 1  # parts of the state, as large as h

    def __init__(self, channels: int, size: int, hidden: int, context: int, spacing: float) -> None:
        super().__init__()
        state = self.states * size
        self.size, self.spacing = size, spacing
        self.encoder = nn.GRU(channels + 1, context, batch_first=True)
        self.start = nn.Linear(context, 2 * state)
        self.prior_start = nn.Parameter(torch.zeros(2, state))
        self.drift = hbnode.nn.MLP(size, [hidden] * 2, size, activation=nn.Softplus)
        self.control = hbnode.nn.MLP(size + context, [hidden] * 2, size, activation=nn.Softplus)
        self.decoder = nn.Linear(size, channels)
        self.log_noise = nn.Parameter(torch.full((channels,), -1.0))
        with torch.no_grad():
            for p in (*self.control.layers[-1].parameters(), self.decoder.weight):
                p.mul_(0.1)  # little control, and paths whose noise is small beside the data

    @abc.abstractmethod
    def solve(self, start: Tensor, t: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Values that the decoder reads, (rows, batch, size), and the integral of |u|² / 2, (batch,)."""

    def controls(self, t: Tensor, h: Tensor, context: Context) -> Tensor:
        """Return the control, 0 after the last sample."""
        summary, active = context.at(t)
        return self.control(torch.cat([h, summary], 1)) * active

    @override
    def forward(self, x: Tensor, seen: Tensor) -> Paths:
        """Draw a path of the posterior for each series.

        Arguments:
            x: rows (batch, rows, channels), of which those not seen are ignored.
            seen: (batch, rows), 1 where a row is a sample.
        """
        mask = seen.unsqueeze(-1)
        rows = torch.cat([x * mask, mask], -1).flip(1)
        summary = self.encoder(rows)[0].flip(1)
        active = seen.flip(1).cummax(1).values.flip(1)
        start, log_scale = self.start(summary[:, 0]).chunk(2, 1)
        prior_mean, prior_log_scale = self.prior_start
        posterior = torch.distributions.Normal(start, log_scale.exp())
        prior = torch.distributions.Normal(prior_mean.expand_as(start), prior_log_scale.exp().expand_as(start))
        kl_start = torch.distributions.kl_divergence(posterior, prior).sum(1)
        context = Context(summary, active, self.spacing)
        t = torch.arange(x.shape[1], dtype=torch.float64) * self.spacing
        values, kl_path = self.solve(posterior.rsample(), t, context)
        mean = self.decoder(values).transpose(0, 1)
        return Paths(mean, self.log_noise.exp(), kl_path, kl_start, context.evaluations)


def no_force(t: Tensor, h: Tensor) -> Tensor:
    """Return the force where there is no series."""
    return torch.zeros_like(h)


class HeavyBall(LatentSDE):
    """dh = m dt, dm = (-γ m + f(h)) dt + √(2γ) dW; a start (h, m), and a control of h, not of m.

    The temperature is 1, because another would only rescale h. One more component of h, without noise, is pushed by
    |u|² / 2: then its m + γh grows by the integral, exactly in the free flights too.

    γ is 1 / time at first, and stays below ten times this.
    """

    states = 2

    def __init__(self, channels: int, size: int, **options: Any) -> None:
        super().__init__(channels, size, **options)
        temperature = torch.ones(size + 1)
        temperature[-1] = 0.0
        self.sde = hbnode.HeavyBallSDE(
            no_force, damping=1.0, max_damping=10.0, temperature=temperature, time_dependent=True
        )

    @override
    def solve(self, start: Tensor, t: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        gamma = torch.as_tensor(self.sde.damping)

        def force(t: Tensor, y: Tensor) -> Tensor:
            h = y[:, :-1]
            u = self.controls(t, h, context)
            return torch.cat([self.drift(h) + (2 * gamma).sqrt() * u, u.square().sum(1, keepdim=True) / 2], 1)

        h, m = (nn.functional.pad(part, (0, 1)) for part in start.chunk(2, 1))
        self.sde.func = force
        try:
            h, m = hbnode.sdeint(self.sde, (h, m), t, dt=self.spacing)
        finally:
            self.sde.func = no_force  # which a copy of the model can hold
        return h[..., :-1], m[-1, :, -1] + gamma * h[-1, :, -1]


class FirstOrder(LatentSDE):
    """dz = f(z) dt + g(z) dW with a diffusion of each feature alone, as in torchsde's example."""

    UNITS = 8  # of the hidden layer of a feature's diffusion

    def __init__(self, channels: int, size: int, **options: Any) -> None:
        super().__init__(channels, size, **options)
        self.inner = nn.Parameter(torch.randn(2, size, self.UNITS))
        self.outer = nn.Parameter(torch.randn(size, self.UNITS) / self.UNITS**0.5)
        self.bias = nn.Parameter(torch.zeros(size))

    def diffusion(self, z: Tensor) -> Tensor:
        """Return the diffusion of each feature, between a hundredth, because torchsde divides by it, and 1."""
        units = nn.functional.softplus(z.unsqueeze(-1) * self.inner[0] + self.inner[1])
        return 0.01 + 0.99 * torch.sigmoid((units * self.outer).sum(-1) + self.bias)

    @override
    def solve(self, start: Tensor, t: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        import torchsde  # here, because it takes long to import

        equation = _Equation(self, context)
        t = t.to(start)
        motion = torchsde.BrownianInterval(
            t0=t[0],
            t1=t[-1],
            size=(len(start), self.size + 1),  # one more for the divergence, which has no noise
            dtype=start.dtype,
            device=start.device,
            entropy=int(torch.randint(2**62, ())),  # without it, numpy's generator decides
            dt=self.spacing,
        )
        z, kl = torchsde.sdeint(equation, start, t, bm=motion, dt=self.spacing, method="euler", logqp=True)
        return z, kl.sum(0)


class _Equation:
    """The posterior f, the prior h and the diffusion g, as torchsde asks for them."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, model: FirstOrder, context: Context) -> None:
        self.model, self.context = model, context

    def f(self, t: Tensor, z: Tensor) -> Tensor:
        return self.model.drift(z) + self.g(t, z) * self.model.controls(t, z, self.context)

    def h(self, t: Tensor, z: Tensor) -> Tensor:
        return self.model.drift(z)

    def g(self, t: Tensor, z: Tensor) -> Tensor:
        return self.model.diffusion(z)
