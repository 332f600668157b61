"""The rules, such as momentum and Adam, that filter the input's pre-activations in a recurrent cell over time.

A recurrent cell computes the hidden state h_t = cell(h_{t-1}, g_t) from the pre-activation g_t = W x_t + b of its input
x_t at time step t. A rule replaces each g_t by a filtered value d_t, which depends on g_1, ..., g_t but not on h. A
layer therefore filters a whole sequence before its first cell step. Pass a rule to a layer as an object,
``rule=Adam(beta=0.99)``, or by name, ``rule="adam"``. The cells are in :mod:`hbnode.nn.recurrent`.

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


class RuleState(NamedTuple):
    """The values that a rule stores from one time step to the next; entries that the rule does not use are None.

    g denotes the input W x + b of the rule, and n is its number of features.

    Attributes:
        v: momentum (batch, n), used by all rules except RMSProp.
        m: running mean of g squared (batch, n), used by Adam and RMSProp.
        g: g at the last time step (batch, n), used by adaptive momentum.
        t: number of time steps so far, used by NAG and scheduled restart: one number, or (batch,) if it differs
            between sequences.
    """

    v: Tensor | None = None
    m: Tensor | None = None
    g: Tensor | None = None
    t: int | Tensor | None = None


class Rule:
    """The base class of the rules. A rule filters the pre-activations g = W x + b over time; the result is called d.

    A rule is a frozen dataclass whose fields are its coefficients. A subclass overrides :meth:`filter`, and sets
    ``memory`` to the names of the attributes of RuleState that it uses.
    """

    memory: ClassVar[tuple[str, ...]] = ("v",)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name not in _VALID:  # a coefficient of a user-defined rule, which is not checked
                continue
            value, (is_valid, expected) = getattr(self, field.name), _VALID[field.name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_valid(value):
                example = 40 if field.name == "restart" else 0.9
                default = example if field.default is dataclasses.MISSING else field.default
                raise ValueError(f"{field.name} must be {expected}, got {value!r}. Fix: {field.name}={default!r}.")

    def __call__(self, g: Tensor, memory: RuleState) -> tuple[Tensor, RuleState]:
        """Apply the rule to pre-activations g (T, batch, n); return the filtered ones d, and the memory after them.

        d has the dtype of g. :meth:`filter` computes d and the memory in float32 or float64, because eps and small
        updates of the memory would round to zero in half precision.
        """
        d, memory = self.filter(g.to(memory_dtype(g.dtype)), memory)
        return d.to(g.dtype), memory

    def start(self, like: Tensor) -> RuleState:
        """Return the memory before the first time step.

        ``like`` (batch, n) is a tensor with the shape and dtype of the pre-activations of one time step.
        """
        zero = torch.zeros_like(like, dtype=memory_dtype(like.dtype))
        return RuleState(**{name: zero for name in self.memory if name != "t"}, t=0 if "t" in self.memory else None)

    def filter(self, g: Tensor, memory: RuleState) -> tuple[Tensor, RuleState]:
        """Apply the recurrence of the rule to the pre-activations W x + b of T time steps.

        Arguments:
            g: the pre-activations W x + b (T, batch, n).
            memory: the memory before the first of these time steps.

        Returns:
            The filtered pre-activations d (T, batch, n), and the memory after the last time step.
        """
        raise NotImplementedError(f"{type(self).__name__} has no filter. Fix: define filter(self, g, memory).")


class LinearRule(Rule):
    """The base class of the rules d_t = v_t = mu_t v_{t-1} + s g_t, in which mu_t does not depend on g.

    mu_t is the momentum coefficient, and s is the ``step_size``. A subclass overrides :meth:`coefficients`, and
    sets ``memory = ("v", "t")`` if mu_t depends on t.
    """

    step_size: float

    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        """Return the momentum coefficients mu of the next time steps in float64.

        The shape is (steps,), or (steps, batch) if t is (batch,).

        Arguments:
            t: number of time steps so far, one number or (batch,); None if ``memory`` does not contain "t".
            steps: number of next time steps.
        """
        raise NotImplementedError(f"{type(self).__name__} has no coefficients. Fix: define coefficients(self, t, n).")

    @override
    def filter(self, g: Tensor, memory: RuleState) -> tuple[Tensor, RuleState]:
        v = linear_filter(g, self.coefficients(memory.t, g.shape[0]), self.step_size, memory.v)
        return v, RuleState(v[-1], t=None if memory.t is None else memory.t + g.shape[0])


@dataclasses.dataclass(frozen=True)
class Momentum(LinearRule):
    """The rule of heavy-ball momentum: v_t = mu v_{t-1} + s g_t, and d_t = v_t.

    ``Momentum(0.0, 1.0)`` leaves the inputs unchanged, and ``Momentum(0.0, s)`` scales them by s.
    References: equation 9 of Nguyen et al.

    Arguments:
        momentum: the momentum coefficient mu, in [0, 1]. Default: 0.6.
        step_size: s, the factor of g_t, positive. Default: 0.6.
    """

    momentum: float = 0.6
    step_size: float = 0.6

    @override
    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        return torch.full((steps,), self.momentum, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class NAG(LinearRule):
    """The rule of Nesterov's accelerated gradient: v_t = mu_t v_{t-1} + s g_t, d_t = v_t, mu_t = (t - 1)/(t + 2).

    The first time step is t = 1. References: section 2.4 of Nguyen et al.

    Arguments:
        step_size: s, the factor of g_t, positive. Default: 0.6.
    """

    step_size: float = 0.6

    memory: ClassVar[tuple[str, ...]] = ("v", "t")

    @override
    def coefficients(self, t: int | Tensor | None, steps: int) -> Tensor:
        t = _sample_numbers(t, steps)
        return (t - 1) / (t + 2)


@dataclasses.dataclass(frozen=True)
class ScheduledRestart(LinearRule):
    """The rule of NAG restarted every F time steps: :class:`NAG` with mu_t = (t mod F)/(t mod F + 3).

    The first time step is t = 1. References: section 2.4 of Nguyen et al.

    Arguments:
        restart: F, a positive number of time steps. Default: 40.
        step_size: s, the factor of g_t, positive. Default: 0.6.
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
    """The rule of Adam without bias correction: momentum v_t divided by the root of a running mean of squares m_t.

    v_t = mu v_{t-1} + s g_t, m_t = beta m_{t-1} + (1 - beta) g_t^2, d_t = v_t / sqrt(m_t + eps).
    References: equation 15 of Nguyen et al.

    Arguments:
        momentum: the momentum coefficient mu, in [0, 1]. Default: 0.6.
        step_size: s, the factor of g_t, positive. Default: 0.6.
        beta: decay of the running mean, in [0, 1). Default: 0.9.
        eps: positive. The slope of d at g = 0 is s / sqrt(eps); with 1e-16, as in the authors' code, it is 1e8 s.
            Default: 1e-08.
    """

    momentum: float = 0.6
    step_size: float = 0.6
    beta: float = 0.9
    eps: float = 1e-8

    memory: ClassVar[tuple[str, ...]] = ("v", "m")

    @override
    def filter(self, g: Tensor, memory: RuleState) -> tuple[Tensor, RuleState]:
        v = linear_filter(g, self.momentum, self.step_size, memory.v)
        m = linear_filter(g * g, self.beta, 1 - self.beta, memory.m)
        return v * (m + self.eps).rsqrt(), RuleState(v[-1], m[-1])


@dataclasses.dataclass(frozen=True)
class RMSProp(Rule):
    """The rule of RMSProp: d_t = s g_t / sqrt(m_t + eps) with m_t = beta m_{t-1} + (1 - beta) g_t^2.

    Arguments:
        step_size: s, the factor of g_t, positive. Default: 0.6.
        beta: decay of the running mean m_t, in [0, 1). Default: 0.9.
        eps: positive, see :class:`Adam`. Default: 1e-08.
    """

    step_size: float = 0.6
    beta: float = 0.9
    eps: float = 1e-8

    memory: ClassVar[tuple[str, ...]] = ("m",)

    @override
    def filter(self, g: Tensor, memory: RuleState) -> tuple[Tensor, RuleState]:
        m = linear_filter(g * g, self.beta, 1 - self.beta, memory.m)
        return self.step_size * g * (m + self.eps).rsqrt(), RuleState(m=m[-1])


@dataclasses.dataclass(frozen=True)
class AdaptiveMomentum(Rule):
    """The rule of adaptive momentum: the momentum coefficient mu_t depends on g_{t-1} and g_t of each sequence.

    v_t = mu_t v_{t-1} + s g_t, d_t = v_t, and mu_t = (1 - sqrt(norm(g_t - g_{t-1}) / norm(g_{t-1})))^2, clipped to
    [0, 1 - delta]. Each norm is over the features of a sequence. mu_t is 0 at the first time step and if g_{t-1} is 0.
    References: equation 77 and remark 8 of Wang et al.

    Arguments:
        step_size: s, the factor of g_t, positive. Default: 0.6.
        delta: 1 minus the upper bound of mu_t, in (0, 1). Default: 0.001.
    """

    step_size: float = 0.6
    delta: float = 1e-3

    memory: ClassVar[tuple[str, ...]] = ("v", "g")

    @override
    def filter(self, g: Tensor, memory: RuleState) -> tuple[Tensor, RuleState]:
        assert memory.g is not None
        before = torch.cat([memory.g.unsqueeze(0), g])[:-1]
        v = linear_filter(g, self._momentum(g, before), self.step_size, memory.v)
        return v, RuleState(v[-1], g=g[-1])

    def _momentum(self, g: Tensor, before: Tensor) -> Tensor:
        """Return the momentum coefficients mu (T, batch).

        The arguments, both (T, batch, n), are g_t (``g``) and g_{t-1} (``before``) for each time step t.
        """
        size = before.square().sum(-1)
        is_zero = size == 0
        ratio = (g - before).square().sum(-1) / torch.where(is_zero, 1.0, size)
        ratio = ratio.clamp(min=(self.delta / 2) ** 4)  # the slope of sqrt is infinite at 0; mu is clipped there
        mu = (1 - ratio.sqrt().sqrt()).square().clamp(max=1 - self.delta)
        return torch.where(is_zero, 0.0, mu)


RuleName: TypeAlias = Literal["momentum", "nag", "restart", "adam", "rmsprop", "adaptive"]
_KINDS: dict[str, type[Rule]] = dict(
    zip(get_args(RuleName), (Momentum, NAG, ScheduledRestart, Adam, RMSProp, AdaptiveMomentum), strict=True)
)


def make_rule(rule: RuleName | Rule, momentum: float | None = None, step_size: float | None = None) -> Rule:
    """Return the rule object for the arguments ``rule``, ``momentum`` and ``step_size`` of a layer or cell.

    See :class:`hbnode.nn.MomentumLSTM` for these arguments. An argument that the rule does not have raises ValueError.
    """
    numbers = {"momentum": momentum, "step_size": step_size}
    given = {name: value for name, value in numbers.items() if value is not None}
    if isinstance(rule, Rule):
        for name, value in given.items():
            fix = f"{type(rule).__name__}(..., {name}={value!r})" if hasattr(rule, name) else f"leave out {name}"
            raise ValueError(f"{name} must be an argument of the rule, got {name}={value!r} and {rule}. Fix: {fix}.")
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
                f"rule={rule!r} takes no {name} (only {', '.join(taken)}), got {name}={value!r}. Fix: leave out {name}."
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
    """Return the dtype in which a rule computes: float64 for pre-activations with ``dtype`` float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def _sample_numbers(t: int | Tensor | None, steps: int) -> Tensor:
    """Return the numbers t + 1, ..., t + steps of the next time steps, in float64.

    The argument t is the number of time steps so far. The shape is (steps,), or (steps, batch) if t is (batch,).
    """
    following = torch.arange(1, steps + 1, dtype=torch.float64)
    return following.to(t.device).unsqueeze(1) + t if isinstance(t, Tensor) else following + (t or 0)
