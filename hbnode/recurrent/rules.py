"""How the input drives a recurrent cell: heavy-ball momentum, NAG, scheduled restart, Adam, RMSProp, adaptive momentum.

A rule turns the sequence g_t = W x_t + b into the drive d_t, which takes its place in the cell: h_t = cell(h_{t-1},
d_t). Nothing in it depends on h, so the drive of a whole sequence is known before the cell takes its first step.

References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    equations 9,
14 and 15; Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equation 77.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """What a rule carries from sample to sample.

    Attributes:
        v: momentum (batch, n), n the width of g.
        m: running mean of g squared (batch, n), of Adam and RMSProp.
        g: the last g (batch, n), of adaptive momentum.
        t: samples so far, of NAG and scheduled restart: a number, or (batch,) where the sequences differ.
    """

    v: Tensor
    m: Tensor | None = None
    g: Tensor | None = None
    t: int | Tensor | None = None


class Rule:
    """A rule: a frozen dataclass of its coefficients, and the drive that it makes of g."""

    memory: ClassVar[tuple[str, ...]] = ("v",)  # what it carries, of the attributes of Memory
    is_linear: ClassVar[bool] = False  # whether the drive is a linear filter of g with coefficients that only know t

    def __post_init__(self) -> None:
        """Check every coefficient."""
        for field in dataclasses.fields(self):
            value, (is_valid, expected) = getattr(self, field.name), _VALID[field.name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_valid(value):
                raise ValueError(
                    f"{field.name} must be {expected}, got {value!r}. Fix: {field.name}={field.default!r} to begin."
                )

    def start(self, like: Tensor) -> Memory:
        """The memory before the first sample, for a drive like ``like``, (batch, n)."""
        zero = torch.zeros_like(like)
        return Memory(**{name: 0 if name == "t" else zero for name in self.memory})

    def drive(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The drive of the next samples, and the memory after them.

        Arguments:
            g: W x + b of the next samples (T, batch, n). T should be small: the work grows with its square.
            memory: that before them.

        Returns:
            (T, batch, n), and the memory.
        """
        raise NotImplementedError

    def drive_blocks(self, blocks: Iterable[Tensor], memory: Memory) -> tuple[Tensor, Memory]:
        """The drive of a long sequence, of which g is given block by block."""
        drives = []
        for g in blocks:
            d, memory = self.drive(g, memory)
            drives.append(d)
        return torch.cat(drives), memory


class LinearRule(Rule):
    """A rule whose drive is v_t = mu_t v_{t-1} + s g_t with mu_t that only knows t; it has a ``step_size`` s."""

    is_linear: ClassVar[bool] = True

    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        """Mu of the next samples in float64, (steps,), or (steps, batch) if t is (batch,)."""
        raise NotImplementedError

    def drive(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """As that of :class:`Rule`."""
        v = running_sum(self.coefficients(memory.t, len(g)), self.step_size, g, memory.v)
        return v, Memory(v[-1], t=None if memory.t is None else memory.t + len(g))


@dataclasses.dataclass(frozen=True)
class Momentum(LinearRule):
    """Heavy-ball momentum (equation 9): v_t = mu v_{t-1} + s g_t, and d_t = v_t.

    ``Momentum(0.0, 1.0)`` is the cell without momentum, ``Momentum(0.0, s)`` that with its input scaled by s.

    Arguments:
        momentum: mu, in [0, 1].
        step_size: s, positive.
    """

    momentum: float = 0.6
    step_size: float = 0.6

    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        """Mu, ever the same."""
        return torch.full((steps,), self.momentum, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class NAG(LinearRule):
    """Nesterov's accelerated gradient (section 2.4): as momentum, with mu_t = (t - 1)/(t + 2), t = 1, 2, ...

    Arguments:
        step_size: s, positive.
    """

    step_size: float = 0.6

    memory: ClassVar[tuple[str, ...]] = ("v", "t")

    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        """Mu, from 0 towards 1."""
        t = _next(t, steps)
        return (t - 1) / (t + 2)


@dataclasses.dataclass(frozen=True)
class ScheduledRestart(LinearRule):
    """NAG that starts anew every F samples (section 2.4): mu_t = (t mod F)/(t mod F + 3), t = 1, 2, ...

    Arguments:
        restart: F, positive.
        step_size: s, positive.
    """

    restart: int = 40
    step_size: float = 0.6

    memory: ClassVar[tuple[str, ...]] = ("v", "t")

    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        """Mu, 0 at every F-th sample."""
        t = _next(t, steps) % self.restart
        return t / (t + 3)


@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """Adam (equation 15): momentum over the root of a running mean of squares, without bias correction.

    v_t = mu v_{t-1} + s g_t, m_t = beta m_{t-1} + (1 - beta) g_t^2, d_t = v_t / sqrt(m_t + eps)

    Arguments:
        momentum: mu, in [0, 1].
        step_size: s, positive.
        beta: in [0, 1).
        eps: positive; at g = 0 the slope of d is s / sqrt(eps), with the 1e-16 of the authors' code 1e8 s.
    """

    momentum: float = 0.6
    step_size: float = 0.6
    beta: float = 0.9
    eps: float = 1e-8

    memory: ClassVar[tuple[str, ...]] = ("v", "m")

    def drive(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """As that of :class:`Rule`."""
        v = running_sum(float(self.momentum), self.step_size, g, memory.v)
        m = running_sum(float(self.beta), 1 - self.beta, g * g, memory.m)
        return v * torch.rsqrt(m + self.eps), Memory(v[-1], m[-1])


@dataclasses.dataclass(frozen=True)
class RMSProp(Adam):
    """RMSProp: :class:`Adam` without momentum.

    Arguments:
        step_size: s, positive.
        beta: in [0, 1).
        eps: positive, see :class:`Adam`.
    """

    momentum: float = dataclasses.field(default=0.0, init=False)


@dataclasses.dataclass(frozen=True)
class AdaptiveMomentum(Rule):
    """Momentum that the inputs set themselves (equation 77 and remark 8 of Wang et al.), one for each sequence.

    v_t = mu_t v_{t-1} + s g_t, mu_t = (1 - sqrt(|g_t - g_{t-1}| / |g_{t-1}|))^2, cut to [0, 1 - delta], and d_t =
    v_t. The norms are over all of g_t. mu_t is 0 where g_{t-1} is 0, and at the first sample.

    Arguments:
        step_size: s, positive.
        delta: of the upper bound, in (0, 1).
    """

    step_size: float = 0.6
    delta: float = 1e-3

    memory: ClassVar[tuple[str, ...]] = ("v", "g")

    def drive(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """As that of :class:`Rule`."""
        before = torch.cat([memory.g.unsqueeze(0), g[:-1]])
        v = running_sum(self._momentum(g, before), self.step_size, g, memory.v)
        return v, Memory(v[-1], g=g[-1])

    def _momentum(self, g: Tensor, before: Tensor) -> Tensor:
        """Mu (T, batch)."""
        size = before.square().sum(-1)
        is_silent = size == 0
        ratio = (g - before).square().sum(-1) / torch.where(is_silent, 1.0, size)
        ratio = ratio.clamp(min=(self.delta / 2) ** 4)  # below, mu is cut anyway, and the root's slope is infinite at 0
        mu = (1 - ratio.sqrt().sqrt()).square().clamp(max=1 - self.delta)
        return torch.where(is_silent, 0.0, mu)


_POSITIVE = (lambda x: 0 < x < math.inf, "a positive number")
_VALID = {
    "momentum": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "step_size": _POSITIVE,
    "beta": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "eps": _POSITIVE,
    "delta": (lambda x: 0 < x < 1, "in (0, 1)"),
    "restart": (lambda x: isinstance(x, int) and x > 0, "a positive whole number of samples"),
}


def running_sum(mu: float | Tensor, s: float, g: Tensor, v: Tensor) -> Tensor:
    """v_t = mu_t v_{t-1} + s g_t of a few samples.

    Arguments:
        mu: a number, or (T,) in float64 on the CPU, or (T, batch).
        s: a factor.
        g: (T, batch, n).
        v: v_0 (batch, n).

    Returns:
        v_1 to v_T, (T, batch, n).
    """
    if isinstance(mu, float) and mu == 0:
        return s * g
    each = isinstance(mu, Tensor) and mu.dim() == 2
    if each or len(g) == 1 or torch.compiler.is_compiling():  # a loop is what can be fused
        factors = [mu] * len(g) if isinstance(mu, float) else mu.to(g).reshape(len(g), -1, 1).unbind()
        out = []
        for factor, g_t in zip(factors, g.unbind(), strict=True):
            v = factor * v + s * g_t
            out.append(v)
        return torch.stack(out)
    made = _constant_weights(mu, len(g), s) if isinstance(mu, float) else weights(mu, s)
    kernel, decay = (matrix.to(g) for matrix in made)
    return torch.addmm(torch.outer(decay, v.flatten()), kernel, g.flatten(1)).view_as(g)


@functools.lru_cache(maxsize=64)
def _constant_weights(mu: float, steps: int, s: float) -> tuple[Tensor, Tensor]:
    return weights(torch.full((steps,), mu, dtype=torch.float64), s)


def weights(mu: Tensor, s: float) -> tuple[Tensor, Tensor]:
    """The running sum as a matrix: v_t = sum_j kernel[t, j] g_j + decay[t] v_0.

    Nothing is divided by, so that it is exact with any mu, 0 among them.

    Arguments:
        mu: (..., T).
        s: a factor of g.

    Returns:
        (..., T, T), lower triangular, and (..., T).
    """
    steps = mu.shape[-1]
    row, rows = mu.new_zeros(*mu.shape[:-1], steps), []
    for k in range(steps):
        row = mu[..., k, None] * row
        row[..., k] = s
        rows.append(row)
    return torch.stack(rows, dim=-2), mu.cumprod(-1)


def _next(t: int | Tensor | None, steps: int) -> Tensor:
    """The numbers of the next samples, the first of all is 1, in float64."""
    following = torch.arange(1, steps + 1, dtype=torch.float64)
    return following.to(t.device).unsqueeze(1) + t if isinstance(t, Tensor) else following + (t or 0)
