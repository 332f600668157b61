"""Fields, the right-hand sides of the ODEs, such as NODE and HBNODE; they are called as ``field(t, state)``.

Throughout, ``h`` is the hidden state of shape (batch, ...), ``m`` (or ``v``) its momentum (or velocity) of the same
shape, and ``t`` a scalar tensor. The state is ``h`` for NODE and ANODE, the tuple ``(h, m, v)`` for AdamNODE, and the
tuple ``(h, m)`` for the other fields.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hbnode._checks import (
    as_count,
    as_numbers,
    as_positive,
    as_real,
    check_bool,
    check_callable,
    check_choice,
    check_input,
    conversion,
    refuse_gradient,
    takes_time,
)
from hbnode._torch import (
    ModuleWithConstants,
    is_autocast,
    is_differentiated,
    outside_inference_mode,
    refuse_export,
)
from hbnode._tree import State, append_zeros, describe


def with_momentum(x: Tensor, net: Callable[[Tensor], Tensor] | None, name: str) -> tuple[Tensor, Tensor]:
    """Return the initial state (h, m) for an input ``x``: ``(x, net(x))``, or ``(x, zeros)`` if ``net`` is None.

    ``name`` is the name of the argument ``net`` for error messages.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a tensor, got {type(x).__name__}. Fix: {conversion(x)}.")
    kinds = {p.dtype for p in net.parameters()} if isinstance(net, nn.Module) else set()
    if kinds and x.dtype not in kinds and not is_autocast(x):
        kind = " or ".join(sorted(map(str, kinds)))
        fix = f"x.to({min(kinds, key=str)})"
        raise TypeError(f"the input is {x.dtype}, {name} is {kind}; expected one dtype. Fix: {fix}.")
    m = torch.zeros_like(x) if net is None else net(x)
    if not isinstance(m, Tensor) or m.shape != x.shape:
        fix = "match its output size, or an initial_state= of the block that returns both tensors"
        wanted = f"the shape of the input, {tuple(x.shape)}"
        raise ValueError(f"{name} returned {describe(m)}; expected {wanted}. Fix: {fix}.")
    return x, m.to(x.dtype)  # autocast may have computed m in a lower precision


def _checked_start(net: Callable[[Tensor], Tensor] | None, name: str) -> Callable[[Tensor], Tensor] | None:
    """Return ``net``, the function of x for an initial momentum or velocity; raise an error if it is not callable."""
    if net is not None:
        check_callable(net, name, f"{name}=torch.nn.Linear(2, 2), or None for zeros")
    return net


class Field(nn.Module, ABC):
    """The abstract base class of right-hand sides, ``d state/dt = field(t, state)``, with a network ``func``.

    Arguments:
        func: module or callable that takes the tensors of the state, optionally after the time.
        parts: number of tensors of the state that ``func`` takes, not counting the time.
        time_dependent: whether ``func`` takes the time as its first argument. None uses the attribute
            ``func.time_dependent`` if it exists, else the number of required positional arguments.

    Raises:
        TypeError: if ``func`` is not callable, or it is unclear whether ``func`` takes the time.
    """

    _second: ClassVar = "v"  # the name of func's second tensor in error messages

    def __init__(self, func: Callable[..., Tensor], *, parts: int, time_dependent: bool | None) -> None:
        super().__init__()
        if isinstance(func, Field):
            fix = f"{type(self).__name__}(field.func) for another equation with its network, or hbnode.ODEBlock(field)"
            raise TypeError(f"func must be a network, got the field {type(func).__name__}. Fix: {fix}.")
        self.func = func
        self.compiled: dict[Any, Any] = {}  # compiled solves of compile=True
        self.time_dependent = takes_time(func, parts, self._second, time_dependent)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "nfe" and type(self).__module__ == __name__:  # a subclass may count evaluations in its forward
            raise AttributeError("a field has no count of its own. Fix: block.nfe = 0, or hbnode.count_nfe(field).")
        super().__setattr__(name, value)

    def initial_state(self, x: Tensor) -> State:
        """Return the initial state of a solve for an input ``x`` of shape (batch, ...); by default ``x``."""
        check_input(x, "the input")
        return x

    @abstractmethod
    def forward(self, t: Tensor, state: Any, /) -> State:
        """Return the derivative of the state, in the structure of the state."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "compiled": {}}  # compiled solves cannot be pickled

    def readout(self, state: State) -> Tensor:
        """Return the hidden state h of a state or of a trajectory of states."""
        return state if isinstance(state, Tensor) else state[0]

    def dynamics_parameters(self) -> list[Tensor]:
        """Return a list of all parameters except those of the networks for the initial momentum or velocity.

        The field itself does not depend on the latter.
        """
        return [p for name, p in self.named_parameters() if not name.startswith("initial_")]

    def evaluate(self, t: Tensor, h: Tensor, *others: Tensor) -> Tensor:
        """Return the value of ``func``; raise ValueError if it does not have the shape of ``h``."""
        if not isinstance(h, Tensor):
            got, fix = describe(h), "field.initial_state(x) makes it"
            raise TypeError(f"{type(self).__name__} is solved on a tensor, got {got}. Fix: {fix}.")
        f = self.func(t, h, *others) if self.time_dependent else self.func(h, *others)
        if not isinstance(f, Tensor) or f.shape != h.shape:
            got, fix = describe(f), "an output size of the last layer equal to that of h (augmentation included)"
            raise ValueError(f"func returned {got}; expected a tensor of the shape of h, {tuple(h.shape)}. Fix: {fix}.")
        return f

    def _pair(self, state: State) -> tuple[Tensor, Tensor]:
        if isinstance(state, Tensor) or len(state) != 2:
            fix = "field.initial_state(x) makes it; an initial_state= of a block must return two tensors"
            raise TypeError(f"{type(self).__name__} is solved on a pair of tensors, got {describe(state)}. Fix: {fix}.")
        return state

    def extra_repr(self) -> str:
        return f"time_dependent={self.time_dependent}"


# A new field needs a class below, its name in __all__ of hbnode/__init__.py, an entry in tests/models.py, a row in the
# README's table, and a name in FIELDS and FieldName of nn/ode_rnn.py. If the class Equation in nn/_fused_ode_rnn.py
# computes its equation, it also needs an entry in FIELDS there. CONTRIBUTING.md explains each of these steps.


class NODE(Field):
    r"""A neural ODE, :math:`h' = f(h, t)`.

    References:
        Chen et al., Neural Ordinary Differential Equations, arXiv:1806.07366; equation (18) of Wang et al., How Does
        Momentum Benefit Deep Neural Networks Architecture Design? (2022).

    Arguments:
        func: f, a module or callable that takes ``(h)`` or ``(t, h)`` and returns a tensor of the shape of h.
        time_dependent: whether ``func`` takes the time. None infers it as in :class:`Field`. Default: None.

    Example:
        >>> import math, torch, hbnode
        >>> field = hbnode.NODE(lambda h: -h)
        >>> h = hbnode.odeint(field, torch.ones(1, 1, dtype=torch.float64), [0.0, 1.0], rtol=1e-9, atol=1e-9)
        >>> abs(h[-1].item() - math.exp(-1)) < 1e-8
        True
    """

    def __init__(self, func: Callable[..., Tensor], *, time_dependent: bool | None = None) -> None:
        super().__init__(func, parts=1, time_dependent=time_dependent)

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        """Return the derivative f(h, t), where f is ``func``."""
        return self.evaluate(t, h)


class ANODE(Field):
    r"""An augmented neural ODE, :math:`h' = f(h, t)` with the initial state :math:`h(t_0) = [x, 0]` for an input x.

    The appended zeros let trajectories of different inputs pass each other, which is impossible in a NODE.

    References:
        Dupont et al., Augmented Neural ODEs, arXiv:1904.01681.

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)`` with h already augmented.
        augment: number of zeros (features, or channels of an image) appended along dimension 1.
        time_dependent: whether ``func`` takes the time. None infers it as in :class:`Field`. Default: None.
    """

    def __init__(self, func: Callable[..., Tensor], augment: int, *, time_dependent: bool | None = None) -> None:
        super().__init__(func, parts=1, time_dependent=time_dependent)
        self.augment = as_count(augment, "augment", least=0)

    def initial_state(self, x: Tensor) -> Tensor:
        """Return ``x`` with ``augment`` zeros appended along dimension 1."""
        return append_zeros(x, self.augment)

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        """Return the derivative f(h, t) of the augmented state, where f is ``func``."""
        return self.evaluate(t, h)

    def extra_repr(self) -> str:
        return f"augment={self.augment}, {super().extra_repr()}"


class SONODE(Field):
    r"""A second-order neural ODE, :math:`h'' = f(h, h', t)`, solved as :math:`h' = v,\; v' = f(h, v, t)`.

    References:
        Norcliffe et al., On Second Order Behaviour in Augmented Neural ODEs, arXiv:2006.07220.

    Arguments:
        func: f, taking ``(h, v)`` or ``(t, h, v)``, returning the shape of h.
        initial_velocity: module or callable x -> v(t0) of the shape of x; None gives zeros. Default: None.
        time_dependent: whether ``func`` takes the time. None infers it as in :class:`Field`. Default: None.
    """

    def __init__(
        self,
        func: Callable[..., Tensor],
        *,
        initial_velocity: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
    ) -> None:
        super().__init__(func, parts=2, time_dependent=time_dependent)
        self.initial_velocity = _checked_start(initial_velocity, "initial_velocity")

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(x, v0)`` with v0 = ``initial_velocity(x)``, or zeros if it is None."""
        return with_momentum(x, self.initial_velocity, "initial_velocity")

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the derivatives h' and v' of the state (h, v)."""
        h, v = self._pair(state)
        return v, self.evaluate(t, h, v)


class _Damped(ModuleWithConstants, Field):
    """The base class of HBNODE and GHBNODE, with the damping γ and the initial momentum."""

    _parts: ClassVar = 1  # number of tensors of the state that func takes

    def __init__(
        self,
        func: Callable[..., Tensor],
        damping: float | Tensor | None,
        learn_damping: bool,
        max_damping: float,
        initial_momentum: Callable[[Tensor], Tensor] | None,
        time_dependent: bool | None,
    ) -> None:
        super().__init__(func, parts=self._parts, time_dependent=time_dependent)
        self.max_damping: float
        self.set_constant("max_damping", as_positive(max_damping, "max_damping", "use the paper's 1.0"))
        check_bool(learn_damping, "learn_damping")
        gamma = self.max_damping * (1.0 / (1.0 + math.exp(3.0))) if damping is None else damping
        self.omega: nn.Parameter | None = None
        if not learn_damping:
            self.set_constant("_damping", _constant(gamma, "damping", "damping=0.1", "no damping"))
        else:
            refuse_gradient(gamma, "damping", ", or learn_damping=False, which keeps the gradient")
            gamma = as_numbers(gamma, "damping", "damping=0.1, or None for the default")
            if not bool(((gamma > 0) & (gamma < self.max_damping)).all()):
                larger = f"max_damping={2 * float(gamma.max()):g}" if bool((gamma > 0).all()) else "damping=0.01"
                fix = f"{larger}, for instance, or keep a damping >= 0 constant with learn_damping=False"
                wanted = f"strictly between 0 and max_damping={self.max_damping}"
                raise ValueError(f"a learned damping must start {wanted}, got {gamma.tolist()}. Fix: {fix}.")
            like = torch.empty(0)  # has the default dtype and device
            self.omega = nn.Parameter(torch.logit(gamma / self.max_damping).to(like))
        self.initial_momentum = _checked_start(initial_momentum, "initial_momentum")

    @property
    def damping(self) -> Tensor | float:
        """The current damping γ, a tensor if it is learned or differs between channels, else a Python float."""
        if self.omega is None:
            return self.get_constant("_damping")
        most = self._buffers["max_damping"]  # the tensor from functional_call, or None outside it
        return (self.max_damping if most is None else most) * torch.sigmoid(self.omega)

    def solver_damping(self) -> Tensor | float:
        """Return the damping γ for a solver; a constant γ is on the CPU, because reading a GPU is slow."""
        return self.damping if self.omega is not None else self.host_constant("_damping", self.damping)

    def constants(self) -> dict[str, str]:
        # ω determines a learned γ only together with max_damping
        return {"damping": "_damping"} if self.omega is None else {"max_damping": "max_damping"}

    def dynamics_parameters(self) -> list[Tensor]:
        """Return a list of all parameters except those of the initial momentum, and constants that need a gradient."""
        constants = [getattr(self, attribute) for attribute in self.constants().values()]
        return [*super().dynamics_parameters(), *filter(is_differentiated, constants)]

    def friction(self, m: Tensor) -> Tensor:
        """Return the damping γ times the momentum ``m``, in the dtype of ``m``."""
        gamma = self.damping
        return (gamma.to(m.dtype) if self.omega is None and isinstance(gamma, Tensor) else gamma) * m

    def force(self, t: Tensor, h: Tensor) -> Tensor:
        """Return the derivative of the momentum m without its damping term -γm."""
        return self.evaluate(t, h)

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(x, m0)`` with m0 = ``initial_momentum(x)``, or zeros if it is None."""
        return with_momentum(x, self.initial_momentum, "initial_momentum")

    def extra_repr(self) -> str:
        learned = "" if self.omega is None else f" (learned, max {self.max_damping:g})"
        return f"damping={_number(self.damping)}{learned}, {super().extra_repr()}"


class HBNODE(_Damped):
    r"""A heavy-ball neural ODE, :math:`h'' + \gamma h' = f(h, t)`.

    It is solved as :math:`h' = m,\; m' = -\gamma m + f(h, t)`. A learned damping is
    :math:`\gamma = \epsilon \cdot \mathrm{sigmoid}(\omega)` with :math:`\epsilon` = ``max_damping`` and the
    parameter :math:`\omega`, which by default starts at -3.

    References:
        Xia et al., Heavy Ball Neural Ordinary Differential Equations (NeurIPS 2021), arXiv:2110.04840; equations
        (24) and (25) of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022).

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)``, returning the shape of h. f does not take m.
        damping: initial γ, in units of 1/time. A number, or a tensor that broadcasts with h: (d,) for one γ per
            feature, (d, 1, 1) for one per channel, (batch, 1) for one per sample. None is
            ``max_damping * sigmoid(-3)``, about 0.047. Default: None.
        learn_damping: whether γ is learned. A constant γ is a Python float or a float64 tensor for any dtype of the
            module, and is part of the ``state_dict``. A tensor that requires a gradient, such as the output of another
            network, is used unchanged and is not part of the ``state_dict``. Default: True.
        max_damping: upper bound of a learned γ. Default: 1.0.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None gives zeros. Default: None.
        time_dependent: whether ``func`` takes the time. None infers it as in :class:`Field`. Default: None.

    Raises:
        ValueError: if the damping is out of its range.

    Example:
        The spring h'' = -h with h(0) = 1 and h'(0) = 0 has the solution h = cos(t):

        >>> import math, torch, hbnode
        >>> field = hbnode.HBNODE(lambda h: -h, damping=0.0, learn_damping=False)
        >>> state = field.initial_state(torch.ones(1, 1, dtype=torch.float64))
        >>> h, m = hbnode.odeint(field, state, [0.0, math.pi], rtol=1e-9, atol=1e-9)
        >>> abs(h[-1].item() + 1) < 1e-7
        True
    """

    def __init__(
        self,
        func: Callable[..., Tensor],
        *,
        damping: float | Tensor | None = None,
        learn_damping: bool = True,
        max_damping: float = 1.0,
        initial_momentum: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
    ) -> None:
        super().__init__(func, damping, learn_damping, max_damping, initial_momentum, time_dependent)

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the derivatives h' and m' of the state (h, m)."""
        h, m = self._pair(state)
        return m, self.force(t, h) - self.friction(m)


class NesterovNODE(Field):
    r"""A Nesterov neural ODE, :math:`h'' + \frac{3}{t + s} h' = f(h, t)` with a start s.

    This is the limit of Nesterov's accelerated gradient method for small steps. It is solved as :math:`h' = m,\;
    m' = -\frac{3}{t + s} m + f(h, t)`. The damping :math:`3/(t + s)` decreases with the time t.

    The paper starts the solve at time 1. With the default ``start=1.0``, this is the time t = 0 of the solver. With
    ``start=0.0`` the damping is infinite at t = 0. A solve from there needs a zero momentum, and begins with
    :math:`m' = f/4`, the limit of the equation for t to 0. Any other momentum gives NaN.

    For s = 0, let :math:`x = k^{-1} h` with :math:`k(t) = t^{-3/2} e^{t/2}`. The equation then is the paper's
    first-order system :math:`x' = p,\; p' = -p + g`, where
    :math:`g = k^{-1} f(h, t) - (\frac{1}{4} - \frac{3}{4 t^2}) x`. The authors' code integrates x and p, and calls f
    with x in place of h. This class calls f with h.

    References:
        Nguyen et al., Improving Neural Ordinary Differential Equations with Nesterov's Accelerated Gradient Method
        (NeurIPS 2022), with f in place of -f. The equation is from Su, Boyd and Candès, arXiv:1503.01243.

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)``, returning the shape of h. f does not take m.
        start: s, in units of time, a number >= 0. Default: ``1.0``.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None gives zeros. Default: None.
        time_dependent: whether ``func`` takes the time. None infers it as in :class:`Field`. Default: None.

    Raises:
        ValueError: if the start is negative.

    Example:
        For f = -h and s = 0, the solution with h(0) = 1 is :math:`2 J_1(t)/t` with the Bessel function :math:`J_1`:

        >>> import torch, hbnode
        >>> field = hbnode.NesterovNODE(lambda h: -h, start=0.0)
        >>> state = field.initial_state(torch.ones(1, 1, dtype=torch.float64))
        >>> h, m = hbnode.odeint(field, state, [0.0, 2.0], rtol=1e-9, atol=1e-9)
        >>> abs(h[-1] - torch.special.bessel_j1(torch.tensor(2.0, dtype=torch.float64))).item() < 1e-7
        True
    """

    def __init__(
        self,
        func: Callable[..., Tensor],
        *,
        start: float = 1.0,
        initial_momentum: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
    ) -> None:
        super().__init__(func, parts=1, time_dependent=time_dependent)
        self.start = as_positive(start, "start", "use the paper's 1.0", zero=True)
        self.initial_momentum = _checked_start(initial_momentum, "initial_momentum")

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(x, m0)`` with m0 = ``initial_momentum(x)``, or zeros if it is None."""
        return with_momentum(x, self.initial_momentum, "initial_momentum")

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the derivatives h' and m' of the state (h, m)."""
        h, m = self._pair(state)
        f, clock = self.evaluate(t, h), t + self.start
        begin = torch.where(m == 0, f / 4, math.nan)
        return m, torch.where(clock == 0, begin, f - 3 * m / torch.where(clock == 0, 1.0, clock))

    def extra_repr(self) -> str:
        return f"start={self.start:g}, {super().extra_repr()}"


class AdamNODE(Field):
    r"""A neural ODE with adaptive moments, the limit of Adam for small steps.

    .. math:: h' = \frac{m}{\sqrt{v + \epsilon}}, \qquad m' = a\,(f(h, t) - m), \qquad v' = b\,(f(h, t)^2 - v)

    The momentum m and the second moment v are moving averages of f and of its elementwise square, with the rates a and
    b. The state is the tuple ``(h, m, v)`` of tensors of one shape. By default v starts at 1, so that h' = m at first,
    as for a heavy ball. If v is near 0, h' and its gradient are large and need small steps. Learned rates are
    :math:`\mathrm{sigmoid}(\alpha)` with a parameter :math:`\alpha`, so that they stay between 0 and 1. The default of
    both is sigmoid(-3), about 0.047.

    References:
        Cho et al., AdamNODEs: When Neural ODE Meets Adaptive Moment Estimation, arXiv:2207.06066, with -m in place of
        m. The equations are from da Silva and Gazeau, A General System of Differential Equations to Model First-Order
        Adaptive Algorithms, Journal of Machine Learning Research 21 (2020). The code of Cho et al. starts with v = m²
        and takes the square root of a sigmoid or softplus of v. This class takes the square root of v + ε, as in the
        equation.

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)``, returning the shape of h.
        rates: initial (a, b), in units of 1/time, between 0 and 1. Default: None, ``(0.047, 0.047)``.
        learn_rates: whether the rates are learned. Default: True.
        eps: ε, in units of f². Default: ``1e-08``.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None gives zeros. Default: None.
        time_dependent: whether ``func`` takes the time. None infers it as in :class:`Field`. Default: None.

    Raises:
        ValueError: if a rate is not between 0 and 1, or ε is negative.

    Example:
        For a constant f = c and v(0) = c², m and h' approach c and c/√(c² + ε):

        >>> import torch, hbnode
        >>> field = hbnode.AdamNODE(lambda h: 2 + 0 * h, rates=(0.5, 0.5), learn_rates=False)
        >>> state = torch.zeros(1, 1), torch.zeros(1, 1), torch.full((1, 1), 4.0)
        >>> h, m, v = hbnode.odeint(field, state, [0.0, 40.0])
        >>> round(m[-1].item(), 3), round(h[-1].item(), 2)  # 40 - 1/0.5
        (2.0, 38.0)
    """

    def __init__(
        self,
        func: Callable[..., Tensor],
        *,
        rates: tuple[float, float] | Tensor | None = None,
        learn_rates: bool = True,
        eps: float = 1e-8,
        initial_momentum: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
    ) -> None:
        super().__init__(func, parts=1, time_dependent=time_dependent)
        default = 1.0 / (1.0 + math.exp(3.0))
        ab = as_numbers((default, default) if rates is None else rates, "rates", "rates=(0.1, 0.1)")
        if ab.shape != (2,) or not bool(((ab > 0) & (ab < 1)).all()):
            raise ValueError(f"rates must be two numbers between 0 and 1, got {ab.tolist()}. Fix: rates=(0.1, 0.1).")
        self.eps = as_positive(eps, "eps", "use the paper's 1e-8", zero=True)
        self.alpha = nn.Parameter(torch.logit(ab).to(torch.empty(0)), requires_grad=learn_rates)
        self.initial_momentum = _checked_start(initial_momentum, "initial_momentum")

    @property
    def rates(self) -> Tensor:
        """The current rates (a, b), of shape (2,)."""
        return torch.sigmoid(self.alpha)

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(x, m0, v0)`` with m0 = ``initial_momentum(x)``, or zeros if it is None, and ones for v0."""
        return *with_momentum(x, self.initial_momentum, "initial_momentum"), torch.ones_like(x)

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the derivatives h', m' and v' of the state (h, m, v).

        Raises:
            TypeError: if the state does not have three tensors.
        """
        if isinstance(state, Tensor) or len(state) != 3:
            fix = "field.initial_state(x) makes them; an initial_state= of a block must return all three"
            raise TypeError(f"AdamNODE is solved on three tensors (h, m, v), got {describe(state)}. Fix: {fix}.")
        h, m, v = state
        f, (a, b) = self.evaluate(t, h), self.rates.to(h.dtype)
        return m * torch.rsqrt(v.clamp(min=0) + self.eps), a * (f - m), b * (f * f - v)

    def extra_repr(self) -> str:
        a, b = self.rates.tolist()
        return f"rates=({a:.4g}, {b:.4g}), eps={self.eps:g}, {super().extra_repr()}"


class PortHamiltonian(HBNODE):
    r"""A damped mechanical system with a learned potential energy, :math:`h'' + \gamma h' = -\nabla V(h, t)`.

    The energy of the state (h, m) is :math:`H = \frac{1}{2} |m|^2 + V(h, t)`, and the equation is
    :math:`h' = \partial H/\partial m,\; m' = -\partial H/\partial h - \gamma\, \partial H/\partial m`. If V does not
    depend on t, the energy decreases at the rate :math:`\gamma |m|^2` and is constant for γ = 0. A term
    :math:`-u(t) \cdot h` in the potential adds an external force u(t), which enters through the port of the system.

    It is an :class:`HBNODE` with f = -∇V, so every method and gradient mode for HBNODE applies to it. For γ = 0, the
    splitting methods, such as ``method="leapfrog"``, keep the error of the energy bounded over long times.

    Torch cannot run ``torch.func.grad``, which computes ∇V, inside a checkpoint. Therefore ``gradient="checkpoint"``
    stores the whole graph, as ``"direct"`` does. To save memory, use ``gradient="reversible"`` with a splitting method.

    References:
        Greydanus et al., Hamiltonian Neural Networks, arXiv:1906.01563; with a separable energy and damping: Zhong,
        Dey and Chakraborty, Dissipative SymODEN, arXiv:2002.08860.

    Arguments:
        potential: V, a module or callable taking ``(h)`` or ``(t, h)`` with h (batch, ...), returning (batch,) or
            (batch, 1). The energy of a sample must depend on that sample only.
        damping: initial γ, as for :class:`HBNODE`. Default: None, which is 0.0 if γ is constant and about 0.047 if it
            is learned.
        learn_damping: whether γ is learned. Default: False.
        max_damping: upper bound of a learned γ. Default: 1.0.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None gives zeros. Default: None.
        time_dependent: whether ``potential`` takes the time. None infers it as in :class:`Field`. Default: None.

    Example:
        A pendulum with V = 1 - cos(h), started at an angle of 1, has the energy 1 - cos(1) at all times:

        >>> import torch, hbnode
        >>> pendulum = hbnode.PortHamiltonian(lambda h: (1 - h.cos()).sum(1))
        >>> state = pendulum.initial_state(torch.ones(1, 1, dtype=torch.float64))
        >>> end = hbnode.odeint(pendulum, state, [0.0, 700.0], method="leapfrog", steps=14000)
        >>> h, m = end[0][-1], end[1][-1]
        >>> abs(pendulum.energy((h, m)) - pendulum.energy(state)).item() < 1e-4
        True
    """

    supports_hooks = False  # torch.func.grad does not work inside torch.utils.checkpoint

    def __init__(
        self,
        potential: Callable[..., Tensor],
        *,
        damping: float | Tensor | None = None,
        learn_damping: bool = False,
        max_damping: float = 1.0,
        initial_momentum: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
    ) -> None:
        super().__init__(
            potential, damping=0.0 if damping is None and not learn_damping else damping, learn_damping=learn_damping,
            max_damping=max_damping, initial_momentum=initial_momentum, time_dependent=time_dependent,
        )  # fmt: skip

    def potential(self, t: Tensor, h: Tensor) -> Tensor:
        """Return the potential energy V(h, t) of each sample, (batch,).

        Raises:
            ValueError: if ``func`` does not return one number per sample.
        """
        value = self.func(t, h) if self.time_dependent else self.func(h)
        if not isinstance(value, Tensor) or value.shape not in (h.shape[:1], (*h.shape[:1], 1)):
            wanted = f"one number per sample, {tuple(h.shape[:1])}"
            fix = "end a network with torch.nn.Linear(n, 1), or sum over the dimensions after the first"
            raise ValueError(f"the potential returned {describe(value)}; expected {wanted}. Fix: {fix}.")
        return value.reshape(h.shape[:1])

    def energy(self, state: tuple[Tensor, Tensor], t: Tensor | float = 0.0) -> Tensor:
        """Return the energy H of the state (h, m) at the time ``t`` for each sample, (batch,)."""
        h, m = self._pair(state)
        return m.square().flatten(1).sum(1) / 2 + self.potential(torch.as_tensor(t).to(h), h)

    def force(self, t: Tensor, h: Tensor) -> Tensor:
        """Return the force -∇V(h, t), the negative gradient of the potential energy with respect to h."""
        refuse_export("the gradient of a potential", "torch.compile, or HBNODE(f) with f = -∇V as a module")
        with outside_inference_mode():
            slope, energy = torch.func.grad_and_value(lambda h: self.potential(t, h).sum())(h)
        if not energy.requires_grad:
            return -slope
        return 0.0 * energy.nan_to_num(0.0, 0.0, 0.0) - slope  # parameters that only shift V get the gradient 0


class GHBNODE(_Damped):
    r"""A generalized heavy-ball neural ODE, :math:`h' = \sigma(m),\; m' = -\gamma m + f(h, t) - \xi h`.

    With a bounded activation :math:`\sigma`, the term :math:`-\xi h` prevents the blow-up that an HBNODE can have. A
    learned skip weight is :math:`\xi = \mathrm{softplus}(\chi)` with the parameter :math:`\chi`. By default
    :math:`\chi` starts at 0, so that :math:`\xi` starts at :math:`\ln 2`.

    References:
        Xia et al., arXiv:2110.04840; equation (48) of Wang et al. (2022).

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)``, returning the shape of h.
        damping: initial γ, as for :class:`HBNODE`. Default: None.
        learn_damping: whether γ is learned. Default: True.
        max_damping: upper bound of a learned γ. Default: 1.0.
        xi: initial ξ, in units of 1/time. None is ln 2. Default: None.
        learn_xi: whether ξ is learned. A constant ξ is a Python float and part of the ``state_dict``. Default: True.
        activation: σ, elementwise. Default: ``torch.tanh``.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None gives zeros. Default: None.
        time_dependent: whether ``func`` takes the time. None infers it as in :class:`Field`. Default: None.

    Raises:
        ValueError: if the damping or ξ is out of its range.
    """

    def __init__(
        self,
        func: Callable[..., Tensor],
        *,
        damping: float | Tensor | None = None,
        learn_damping: bool = True,
        max_damping: float = 1.0,
        xi: float | None = None,
        learn_xi: bool = True,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        initial_momentum: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
    ) -> None:
        super().__init__(func, damping, learn_damping, max_damping, initial_momentum, time_dependent)
        check_callable(activation, "activation", "activation=torch.tanh")
        self.activation = activation
        self._xi: float
        xi = math.log(2.0) if xi is None else as_real(xi, "xi", "leave xi out")
        self.set_constant("_xi", xi if learn_xi else as_positive(xi, "xi", "xi=0.0 for no skip term", zero=True))
        self.chi: nn.Parameter | None = None
        if learn_xi:
            if not 0 < self._xi < math.inf:
                fix = "a positive xi, or keep it constant with learn_xi=False"
                raise ValueError(f"a learned xi must start above 0, got {self._xi}. Fix: {fix}.")
            self.chi = nn.Parameter(torch.tensor(_inverse_softplus(self._xi)))

    @property
    def xi(self) -> Tensor | float:
        """The current skip weight ξ, a scalar tensor if it is learned, else a Python float."""
        return self.get_constant("_xi") if self.chi is None else nn.functional.softplus(self.chi)

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the derivatives h' and m' of the state (h, m)."""
        h, m = self._pair(state)
        return self.activation(m), self.force(t, h) - self.friction(m)

    def constants(self) -> dict[str, str]:
        return super().constants() | ({"xi": "_xi"} if self.chi is None else {})

    def force(self, t: Tensor, h: Tensor) -> Tensor:
        """Return f(h, t) - ξh, where f is ``func`` and ξ is the skip weight ``xi``."""
        return self.evaluate(t, h) - self.xi * h

    def extra_repr(self) -> str:
        learned = "" if self.chi is None else " (learned)"
        return f"xi={_number(self.xi)}{learned}, {super().extra_repr()}"


class HeavyBallSDE(HBNODE):
    r"""A heavy-ball SDE, :math:`dh = m\,dt,\; dm = (-\gamma m + f(h, t))\,dt + \sqrt{2\gamma\eta}\,dW`.

    This is underdamped Langevin dynamics with the damping :math:`\gamma`, the temperature :math:`\eta` and a Wiener
    process W. For a force :math:`f = -\nabla F` with a potential F, the stationary density is proportional to
    :math:`e^{-F(h)/\eta}\, \mathcal{N}(m; 0, \eta)`. At temperature 0 the SDE is an :class:`HBNODE`.

    :func:`hbnode.sdeint` solves the SDE, and :func:`hbnode.odeint` solves it without noise. ``torchsde.sdeint`` and
    ``torchsde.sdeint_adjoint`` also solve it, on the state ``torch.cat([h, m], -1)`` of shape (batch, 2d).

    A learned temperature is :math:`\eta = e^{\theta}` with the parameter :math:`\theta`. A learned damping is as in
    :class:`HBNODE`.

    References:
        Equation (5) of Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks,
        arXiv:2006.06919, where the force is :math:`f = -\eta\nabla F`.

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)``, returning the shape of h. f does not take m.
        damping: initial γ, in units of 1/time. A number, or a tensor that broadcasts with h: (d,) for one γ per
            feature, (d, 1, 1) for one per channel. None is ``max_damping * sigmoid(-3)``, about 0.047. Default: None.
        temperature: initial η, in units of (h/time)²: a number >= 0, or a tensor that broadcasts with h.
            Default: ``1.0``.
        learn_damping: whether γ is learned. A constant γ is part of the ``state_dict``, unless it requires a gradient.
            Default: True.
        learn_temperature: whether η is learned. A constant η is stored like a constant γ. Default: False.
        max_damping: upper bound of a learned γ. Default: ``1.0``.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None gives zeros. Default: None.
        time_dependent: whether ``func`` takes the time. None infers it as in :class:`Field`. Default: None.
        sde_type: ``"ito"`` or ``"stratonovich"``, which decides which of torchsde's methods accept the SDE. The
            equation is the same, because the noise does not depend on the state. Default: ``"ito"``.

    Raises:
        ValueError: if the damping or the temperature is out of its range.

    Example:
        A spring with a Langevin thermostat of temperature 0.5, for which the stationary variance of h is 0.5:

        >>> import torch, hbnode
        >>> _ = torch.manual_seed(0)
        >>> sde = hbnode.HeavyBallSDE(lambda h: -h, damping=1.0, temperature=0.5, learn_damping=False)
        >>> h, m = hbnode.sdeint(sde, sde.initial_state(torch.zeros(20000, 1)), [0.0, 15.0], dt=0.1)
        >>> abs(h[-1].var().item() - 0.5) < 0.02
        True
    """

    noise_type = "additive"

    def __init__(
        self,
        func: Callable[..., Tensor],
        *,
        damping: float | Tensor | None = None,
        temperature: float | Tensor = 1.0,
        learn_damping: bool = True,
        learn_temperature: bool = False,
        max_damping: float = 1.0,
        initial_momentum: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
        sde_type: Literal["ito", "stratonovich"] = "ito",
    ) -> None:
        super().__init__(
            func, damping=damping, learn_damping=learn_damping, max_damping=max_damping,
            initial_momentum=initial_momentum, time_dependent=time_dependent,
        )  # fmt: skip
        self.sde_type = check_choice(sde_type, "sde_type", ("ito", "stratonovich"))
        self.log_temperature: nn.Parameter | None = None
        if not learn_temperature:
            self.set_constant("_temperature", _constant(temperature, "temperature", "temperature=1.0", "no noise"))
        else:
            refuse_gradient(temperature, "temperature", ", or learn_temperature=False, which keeps the gradient")
            eta = as_numbers(temperature, "temperature", "temperature=1.0, the default")
            if not bool((eta > 0).all()):
                fix = "a positive temperature, or keep it constant with learn_temperature=False"
                raise ValueError(f"a learned temperature must start above 0, got {eta.tolist()}. Fix: {fix}.")
            self.log_temperature = nn.Parameter(eta.log().to(torch.empty(0)))

    @property
    def temperature(self) -> Tensor | float:
        """The current temperature η, a tensor if it is learned or differs between channels, else a Python float."""
        return self.get_constant("_temperature") if self.log_temperature is None else self.log_temperature.exp()

    def solver_temperature(self) -> Tensor | float:
        """Return the temperature η for a solver; a constant η is on the CPU, because reading a GPU is slow."""
        return self.host_constant("_temperature", self.temperature)

    def constants(self) -> dict[str, str]:
        return super().constants() | ({"temperature": "_temperature"} if self.log_temperature is None else {})

    def noise_scale(self, m: Tensor) -> Tensor:
        """Return √(2γη), with the damping γ and temperature η, in the shape and dtype of the momentum ``m``."""
        gamma, eta = (
            torch.as_tensor(x, dtype=m.dtype, device=m.device) if isinstance(x, float) else x.to(m.dtype)
            for x in (self.damping, self.temperature)
        )
        return diffusion(gamma, eta).expand_as(m)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the drift (batch, 2d) at the state ``y`` (batch, 2d) for torchsde."""
        h, m = self._halves(y)
        return torch.cat(self(t, (h, m)), -1)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the diffusion matrix (batch, 2d, d) for torchsde; its first d matrix rows are 0: h has no noise."""
        _, m = self._halves(y)
        scale = torch.diag_embed(self.noise_scale(m))
        return torch.cat([torch.zeros_like(scale), scale], -2)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return the diffusion matrix times the vectors ``v`` (batch, d) for torchsde, of shape (batch, 2d)."""
        _, m = self._halves(y)
        return torch.cat([torch.zeros_like(v), self.noise_scale(m) * v], -1)

    def _halves(self, y: Tensor) -> tuple[Tensor, Tensor]:
        if y.shape[-1] % 2:
            fix = f"got shape {tuple(y.shape)}. Fix: torch.cat([h, m], -1)"
            raise ValueError(f"the state must be torch.cat([h, m], -1) with an even number of columns, {fix}.")
        h, m = y.chunk(2, -1)
        return h, m

    def extra_repr(self) -> str:
        learned = "" if self.log_temperature is None else " (learned)"
        return f"temperature={_number(self.temperature)}{learned}, {super().extra_repr()}"


def diffusion(gamma: Tensor, eta: Tensor) -> Tensor:
    """Return √(2γη) for the damping γ = ``gamma`` and the temperature η = ``eta``, with the gradient 0 at γη = 0."""
    product = 2 * gamma * eta
    return torch.where(product > 0, torch.where(product > 0, product, 1.0).sqrt(), 0.0)


def _constant(value: float | Tensor, name: str, fix: str, for_zero: str) -> float | Tensor:
    """Return a constant >= 0, such as the damping, as a float or a float64 tensor; raise ValueError if it is negative.

    A tensor that requires a gradient is returned unchanged.
    """
    keeps = is_differentiated(value)
    x = as_numbers(value.detach() if keeps else value, name, fix)  # type: ignore[union-attr]  # a tensor
    if not bool(((x >= 0) & torch.isfinite(x)).all()):
        raise ValueError(f"{name} must be a number >= 0, got {x.tolist()}. Fix: pass {name}=0.0 for {for_zero}.")
    return value if keeps else x if x.dim() else x.item()


def _number(x: Tensor | float) -> str:
    x = x.detach() if isinstance(x, Tensor) else x
    if isinstance(x, Tensor) and x.is_meta:
        return f"unknown of shape {tuple(x.shape)}"
    if isinstance(x, Tensor) and x.dim():
        return f"{float(x.min()):.4g}..{float(x.max()):.4g} of shape {tuple(x.shape)}"
    return f"{float(x):.4g}"


def _inverse_softplus(y: float) -> float:
    return y + math.log(-math.expm1(-y))
