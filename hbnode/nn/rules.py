"""Rules that filter the input of a recurrent cell: heavy-ball momentum, NAG, scheduled restart, Adam, RMSProp, adaptive
momentum.

A rule turns the sequence g_t = W x_t + b into the filtered input d_t, which replaces g_t in the cell: h_t =
cell(h_{t-1}, d_t). It does not depend on h, so d of a whole sequence is computed before the cell takes its first step.
A layer takes a rule as an object, ``rule=Adam(beta=0.99)``, or by its name, ``rule="adam"``. The equations of the cells
are in :mod:`hbnode.nn.recurrent`.

References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
equations 9, 14 and 15; Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022),
equation 77.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from typing_extensions import override

from hbnode._checks import nearest
from hbnode.nn._scan import linear_filter

__all__ = ["Momentum", "NAG", "ScheduledRestart", "Adam", "RMSProp", "AdaptiveMomentum", "Rule", "LinearRule"]


class Memory(NamedTuple):
    """What a rule carries from sample to sample; entries that a rule does not need are None.

    Attributes:
        v: momentum (batch, n), where n is the width of g; RMSProp has none.
        m: running mean of g squared (batch, n), of Adam and RMSProp.
        g: the last g (batch, n), of adaptive momentum.
        t: samples so far, of NAG and scheduled restart: a number, or (batch,) if it differs between sequences.
    """

    v: Tensor | None = None
    m: Tensor | None = None
    g: Tensor | None = None
    t: int | Tensor | None = None


class Rule:
    """Base of the rules: a frozen dataclass of coefficients, with the filter that turns g into d.

    A rule of your own overrides :meth:`filter`, and ``memory``, which names the attributes of Memory that it carries.
    """

    memory: ClassVar[tuple[str, ...]] = ("v",)  # the attributes of Memory that it carries
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        """Check every coefficient."""
        for field in dataclasses.fields(self):
            if field.name not in _VALID:  # of a rule of the user's own
                continue
            value, (is_valid, expected) = getattr(self, field.name), _VALID[field.name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_valid(value):
                raise ValueError(
                    f"{field.name} must be {expected}, got {value!r}. Fix: {field.name}={field.default!r} to begin."
                )

    def __call__(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Call :meth:`filter` in float32 at least: in half precision a long memory stalls, and eps rounds to zero."""
        d, memory = self.filter(g.to(memory_dtype(g.dtype)), memory)
        return d.to(g.dtype), memory

    def start(self, like: Tensor) -> Memory:
        """Return the memory before the first sample, for d like ``like``, (batch, n)."""
        zero = torch.zeros_like(like, dtype=memory_dtype(like.dtype))
        return Memory(**{name: zero for name in self.memory if name != "t"}, t=0 if "t" in self.memory else None)

    def filter(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Filter the next samples.

        Arguments:
            g: W x + b of the next samples (T, batch, n).
            memory: the memory before them.

        Returns:
            d (T, batch, n), and the memory after the samples.
        """
        raise NotImplementedError


class LinearRule(Rule):
    """A rule d_t = v_t = mu_t v_{t-1} + s g_t, where mu_t depends on t alone and s is the ``step_size``.

    A rule of your own overrides :meth:`coefficients`, and has ``memory = ("v", "t")`` if mu_t depends on t.
    """

    step_size: float

    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        """Return mu of the next samples in float64, (steps,), or (steps, batch) if t is (batch,)."""
        raise NotImplementedError

    @override
    def filter(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        v = linear_filter(g, self.coefficients(memory.t, g.shape[0]), self.step_size, memory.v)
        return v, Memory(v[-1], t=None if memory.t is None else memory.t + g.shape[0])


@dataclasses.dataclass(frozen=True)
class Momentum(LinearRule):
    """Heavy-ball momentum (equation 9): v_t = mu v_{t-1} + s g_t, and d_t = v_t.

    ``Momentum(0.0, 1.0)`` is the cell without momentum, ``Momentum(0.0, s)`` that with its input scaled by s.

    Arguments:
        momentum: mu, in [0, 1]. Default: 0.6.
        step_size: s, positive. Default: 0.6.
    """

    momentum: float = 0.6
    step_size: float = 0.6

    @override
    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        return torch.full((steps,), self.momentum, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class NAG(LinearRule):
    """Nesterov's accelerated gradient (section 2.4): as momentum, with mu_t = (t - 1)/(t + 2), t = 1, 2, ...

    Arguments:
        step_size: s, positive. Default: 0.6.
    """

    step_size: float = 0.6

    memory: ClassVar[tuple[str, ...]] = ("v", "t")

    @override
    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        t = _sample_numbers(t, steps)
        return (t - 1) / (t + 2)


@dataclasses.dataclass(frozen=True)
class ScheduledRestart(LinearRule):
    """NAG that restarts every F samples (section 2.4): mu_t = (t mod F)/(t mod F + 3), t = 1, 2, ...

    Arguments:
        restart: F, positive. Default: 40.
        step_size: s, positive. Default: 0.6.
    """

    restart: int = 40
    step_size: float = 0.6

    memory: ClassVar[tuple[str, ...]] = ("v", "t")

    @override
    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        t = _sample_numbers(t, steps) % self.restart
        return t / (t + 3)


@dataclasses.dataclass(frozen=True)
class Adam(Rule):
    """Adam (equation 15): momentum over the root of a running mean of squares, without bias correction.

    v_t = mu v_{t-1} + s g_t, m_t = beta m_{t-1} + (1 - beta) g_t^2, d_t = v_t / sqrt(m_t + eps)

    Arguments:
        momentum: mu, in [0, 1]. Default: 0.6.
        step_size: s, positive. Default: 0.6.
        beta: in [0, 1). Default: 0.9.
        eps: positive; at g = 0 the slope of d is s / sqrt(eps), with the 1e-16 of the authors' code 1e8 s.
            Default: 1e-08.
    """

    momentum: float = 0.6
    step_size: float = 0.6
    beta: float = 0.9
    eps: float = 1e-8

    memory: ClassVar[tuple[str, ...]] = ("v", "m")

    @override
    def filter(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        v = linear_filter(g, self.momentum, self.step_size, memory.v)
        m = linear_filter(g * g, self.beta, 1 - self.beta, memory.m)
        return v * (m + self.eps).rsqrt(), Memory(v[-1], m[-1])


@dataclasses.dataclass(frozen=True)
class RMSProp(Rule):
    """RMSProp: :class:`Adam` without momentum, d_t = s g_t / sqrt(m_t + eps).

    Arguments:
        step_size: s, positive. Default: 0.6.
        beta: in [0, 1). Default: 0.9.
        eps: positive, see :class:`Adam`. Default: 1e-08.
    """

    step_size: float = 0.6
    beta: float = 0.9
    eps: float = 1e-8

    memory: ClassVar[tuple[str, ...]] = ("m",)

    @override
    def filter(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        m = linear_filter(g * g, self.beta, 1 - self.beta, memory.m)
        return self.step_size * g * (m + self.eps).rsqrt(), Memory(m=m[-1])


@dataclasses.dataclass(frozen=True)
class AdaptiveMomentum(Rule):
    """Momentum that adapts to the inputs (equation 77 and remark 8 of Wang et al.), separately for each sequence.

    v_t = mu_t v_{t-1} + s g_t, mu_t = (1 - sqrt(norm(g_t - g_{t-1}) / norm(g_{t-1})))^2, cut to [0, 1 - delta], and
    d_t = v_t. The norms are over all of g_t. mu_t is 0 where g_{t-1} is 0, and at the first sample.

    Arguments:
        step_size: s, positive. Default: 0.6.
        delta: of the upper bound, in (0, 1). Default: 0.001.
    """

    step_size: float = 0.6
    delta: float = 1e-3

    memory: ClassVar[tuple[str, ...]] = ("v", "g")

    @override
    def filter(self, g: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        assert memory.g is not None
        before = torch.cat([memory.g.unsqueeze(0), g])[:-1]
        v = linear_filter(g, self._momentum(g, before), self.step_size, memory.v)
        return v, Memory(v[-1], g=g[-1])

    def _momentum(self, g: Tensor, before: Tensor) -> Tensor:
        """Mu (T, batch)."""
        size = before.square().sum(-1)
        is_silent = size == 0
        ratio = (g - before).square().sum(-1) / torch.where(is_silent, 1.0, size)
        ratio = ratio.clamp(min=(self.delta / 2) ** 4)  # below, mu is cut anyway, and the root's slope is infinite at 0
        mu = (1 - ratio.sqrt().sqrt()).square().clamp(max=1 - self.delta)
        return torch.where(is_silent, 0.0, mu)


RuleName: TypeAlias = Literal["momentum", "nag", "restart", "adam", "rmsprop", "adaptive"]
_KINDS: dict[str, type[Rule]] = dict(
    zip(get_args(RuleName), (Momentum, NAG, ScheduledRestart, Adam, RMSProp, AdaptiveMomentum), strict=True)
)


def make_rule(rule: RuleName | Rule, momentum: float | None = None, step_size: float | None = None) -> Rule:
    """Return the rule of a layer or cell, from its arguments.

    Arguments:
        rule: its name, or the rule itself.
        momentum: μ of a rule given by name; None is the rule's default.
        step_size: s, likewise.
    """
    numbers = {"momentum": momentum, "step_size": step_size}
    given = {name: value for name, value in numbers.items() if value is not None}
    if isinstance(rule, Rule):
        for name, value in given.items():
            fix = f"{type(rule).__name__}(..., {name}={value!r})" if hasattr(rule, name) else f"leave out {name}"
            raise ValueError(f"{name} must be an argument of the rule, got {value!r} beside {rule}. Fix: {fix}.")
        return rule
    if not isinstance(rule, str):
        got = f"the class {rule.__name__}" if isinstance(rule, type) else type(rule).__name__
        is_kind = isinstance(rule, type) and issubclass(rule, Rule)
        fix = f"rule={rule.__name__}()" if is_kind else 'rule="momentum", or rule=Momentum(0.6, 0.6)'
        raise TypeError(f"rule must be a name or an object of hbnode.nn.rules, got {got}. Fix: {fix}.")
    if rule not in _KINDS:
        near = nearest(rule, tuple(_KINDS)) or "momentum"
        raise ValueError(f"rule must be one of {', '.join(map(repr, _KINDS))}, got {rule!r}. Fix: rule={near!r}.")
    kind = _KINDS[rule]
    taken = [field.name for field in dataclasses.fields(kind)]
    for name, value in given.items():
        if name not in taken:
            raise ValueError(
                f"rule={rule!r} must come without {name}, as {kind.__name__} takes {', '.join(taken)}; got {value!r}. "
                f"Fix: leave out {name}."
            )
    return kind(**given)


_POSITIVE = (lambda x: 0 < x < math.inf, "a positive number")
_VALID = {
    "momentum": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "step_size": _POSITIVE,
    "beta": (lambda x: 0 <= x < 1, "in [0, 1)"),
    "eps": _POSITIVE,
    "delta": (lambda x: 0 < x < 1, "in (0, 1)"),
    "restart": (lambda x: isinstance(x, int) and x > 0, "a positive whole number of samples"),
}


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a rule computes and keeps its memory, for inputs of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def _sample_numbers(t: int | Tensor | None, steps: int) -> Tensor:
    """Return the numbers of the next samples, the first of all is 1, in float64."""
    following = torch.arange(1, steps + 1, dtype=torch.float64)
    return following.to(t.device).unsqueeze(1) + t if isinstance(t, Tensor) else following + (t or 0)
