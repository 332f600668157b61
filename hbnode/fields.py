"""The fields: right-hand sides of NODE, ANODE, SONODE, HBNODE, GHBNODE and HeavyBallSDE, called ``(t, state)``.

Throughout, ``h`` is the hidden state of shape (batch, ...), ``m`` (or ``v``) its momentum (or velocity) of the same
shape, and ``t`` a scalar tensor. A state is ``h`` for the first-order fields and the tuple ``(h, m)`` for the others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hbnode._checks import as_count, as_numbers, check_input, check_order, conversion, takes_time
from hbnode._torch import KeepsConstants
from hbnode._tree import State, append_zeros, describe


def with_momentum(x: Tensor, net: Callable[[Tensor], Tensor] | None, name: str) -> tuple[Tensor, Tensor]:
    """``(x, net(x))``, or ``(x, 0)`` without a net."""
    if not isinstance(x, Tensor):
        raise TypeError(f"the input must be a tensor, got {type(x).__name__}. Fix: {conversion(x)}.")
    m = torch.zeros_like(x) if net is None else net(x)
    if not isinstance(m, Tensor) or m.shape != x.shape:
        raise ValueError(
            f"{name} returned {describe(m)}; expected the shape of the input, {tuple(x.shape)}. "
            "Fix: match its output size, or give the block an initial_state= that makes both parts."
        )
    return x, m.to(x.dtype)  # autocast may have made m smaller


class Field(nn.Module, ABC):
    """Abstract right-hand side of an ODE, ``d state/dt = field(t, state)``, around a network ``func``.

    Arguments:
        func: module or callable taking the state's parts, with or without the time in front.
        parts: how many tensors ``func`` takes besides the time.
        time_dependent: whether ``func`` takes the time first. None reads it off ``func``: its attribute
            ``time_dependent`` if it has one, else its number of required positional arguments.

    Raises:
        TypeError: if ``func`` is not callable, or how to call it cannot be told.
    """

    def __init__(self, func: Callable[..., Tensor], *, parts: int, time_dependent: bool | None) -> None:
        super().__init__()
        check_order(func)
        self.func = func
        self.compiled: dict[Any, Any] = {}  # steps of native methods that compile=True has compiled for this field
        self.time_dependent = takes_time(func, parts) if time_dependent is None else bool(time_dependent)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "nfe" and type(self).__module__ == __name__:  # a subclass may count in its forward
            raise AttributeError("a field has no count of its own. Fix: block.nfe = 0, or hbnode.count_nfe(field).")
        super().__setattr__(name, value)

    @abstractmethod
    def initial_state(self, x: Tensor) -> State:
        """Make the state at the start of a solve from an input ``x`` of shape (batch, ...)."""

    @abstractmethod
    def forward(self, t: Tensor, state: Any, /) -> State:
        """Return the derivative of the state, in the structure of the state."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what was compiled, which belongs to this object."""
        return {**self.__dict__, "compiled": {}}

    def readout(self, state: State) -> Tensor:
        """Return the hidden state h of a state, or of a whole trajectory of states."""
        return state if isinstance(state, Tensor) else state[0]

    def dynamics_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the right-hand side: all but those of the initial momentum or velocity."""
        return [p for name, p in self.named_parameters() if not name.startswith("initial_")]

    def evaluate(self, t: Tensor, h: Tensor, *others: Tensor) -> Tensor:
        """Return the value f(h, t) of ``func``, checked to have the shape of ``h``."""
        if not isinstance(h, Tensor):
            raise TypeError(
                f"{type(self).__name__} is solved on a tensor, got {describe(h)}. Fix: field.initial_state(x) makes it."
            )
        f = self.func(t, h, *others) if self.time_dependent else self.func(h, *others)
        if not isinstance(f, Tensor) or f.shape != h.shape:
            raise ValueError(
                f"func returned {describe(f)}; expected a tensor of the shape of h, {tuple(h.shape)}. "
                "Fix: make the last layer's output size equal to the size of h (augmentation included)."
            )
        return f

    def _pair(self, state: State) -> tuple[Tensor, Tensor]:
        if isinstance(state, Tensor) or len(state) != 2:
            raise TypeError(
                f"{type(self).__name__} is solved on a pair of tensors, got {describe(state)}. "
                "Fix: field.initial_state(x) makes it; an initial_state= of a block must return two tensors."
            )
        return state

    def extra_repr(self) -> str:
        """Return what ``repr`` shows beside the submodules."""
        return f"time_dependent={self.time_dependent}"


class NODE(Field):
    r"""Neural ODE, :math:`h' = f(h, t)`.

    References:
        Chen et al., Neural Ordinary Differential Equations, arXiv:1806.07366; equation (18) of Wang et al., How Does
        Momentum Benefit Deep Neural Networks Architecture Design? (2022).

    Arguments:
        func: f as a module or callable taking ``(h)`` or ``(t, h)``, returning the shape of h.
        time_dependent: whether ``func`` takes the time; None reads it off ``func``. Default: None.

    Example:
        >>> import math, torch, hbnode
        >>> field = hbnode.NODE(lambda h: -h)
        >>> h = hbnode.odeint(field, torch.ones(1, 1, dtype=torch.float64), [0.0, 1.0], rtol=1e-9, atol=1e-9)
        >>> abs(h[-1].item() - math.exp(-1)) < 1e-8
        True
    """

    def __init__(self, func: Callable[..., Tensor], *, time_dependent: bool | None = None) -> None:
        super().__init__(func, parts=1, time_dependent=time_dependent)

    def initial_state(self, x: Tensor) -> Tensor:
        """Return the input itself."""
        check_input(x, "the input")
        return x

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        """Equation (18)."""
        return self.evaluate(t, h)


class ANODE(Field):
    r"""Augmented neural ODE: :math:`h' = f(h, t)` from :math:`h(t_0) = [x, 0]`.

    The zeros give trajectories room to pass each other, which those of a NODE cannot.

    References:
        Dupont et al., Augmented Neural ODEs, arXiv:1904.01681.

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)`` with h already augmented.
        augment: how many zeros (features, or channels of an image) are appended along dimension 1.
        time_dependent: whether ``func`` takes the time; None reads it off ``func``. Default: None.
    """

    def __init__(self, func: Callable[..., Tensor], augment: int, *, time_dependent: bool | None = None) -> None:
        super().__init__(func, parts=1, time_dependent=time_dependent)
        self.augment = as_count(augment, "augment", least=0)

    def initial_state(self, x: Tensor) -> Tensor:
        """``x`` with zeros appended along dimension 1."""
        return append_zeros(x, self.augment)

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        """Equation (18) on the augmented state."""
        return self.evaluate(t, h)

    def extra_repr(self) -> str:
        """Return what ``repr`` shows beside the submodules."""
        return f"augment={self.augment}, {super().extra_repr()}"


class SONODE(Field):
    r"""Second-order neural ODE, :math:`h'' = f(h, h', t)`, as :math:`h' = v,\; v' = f(h, v, t)`.

    References:
        Norcliffe et al., On Second Order Behaviour in Augmented Neural ODEs, arXiv:2006.07220.

    Arguments:
        func: f, taking ``(h, v)`` or ``(t, h, v)``, returning the shape of h.
        initial_velocity: module or callable x -> v(t0) of the shape of x; None starts at rest. Default: None.
        time_dependent: whether ``func`` takes the time; None reads it off ``func``. Default: None.
    """

    def __init__(
        self,
        func: Callable[..., Tensor],
        *,
        initial_velocity: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
    ) -> None:
        super().__init__(func, parts=2, time_dependent=time_dependent)
        self.initial_velocity = initial_velocity

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(x, v0)`` with v0 zeros or ``initial_velocity(x)``."""
        return with_momentum(x, self.initial_velocity, "initial_velocity")

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the equation above."""
        h, v = self._pair(state)
        return v, self.evaluate(t, h, v)


class _Damped(KeepsConstants, Field):
    """What HBNODE and GHBNODE share: the damping γ and the initial momentum."""

    defaults: ClassVar = {"max_damping": 1.0}
    renamed: ClassVar = {"_dampings": "damping"}

    def __init__(
        self,
        func: Callable[..., Tensor],
        damping: float | Tensor | None,
        learn_damping: bool,
        max_damping: float,
        initial_momentum: Callable[[Tensor], Tensor] | None,
        time_dependent: bool | None,
    ) -> None:
        super().__init__(func, parts=1, time_dependent=time_dependent)
        if not 0 < max_damping < math.inf:
            raise ValueError(f"max_damping must be a positive number, got {max_damping}. Fix: use the paper's 1.0.")
        self.max_damping = float(max_damping)
        gamma = self.max_damping * (1.0 / (1.0 + math.exp(3.0))) if damping is None else damping
        gamma = as_numbers(gamma, "damping", "damping=0.1, or None for the default")
        self.omega: nn.Parameter | None = None
        if learn_damping:
            if not bool(((gamma > 0) & (gamma < self.max_damping)).all()):
                larger = f"max_damping={2 * float(gamma.max()):g}" if bool((gamma > 0).all()) else "damping=0.01"
                raise ValueError(
                    "a learned damping must start strictly between 0 and "
                    f"max_damping={self.max_damping}, got {gamma.tolist()}. "
                    f"Fix: {larger}, for instance, or keep a damping >= 0 constant with learn_damping=False."
                )
            like = torch.empty(0)  # of the default dtype and device
            self.omega = nn.Parameter(torch.logit(gamma / self.max_damping).to(like))
        else:
            _check_not_negative(gamma, "damping", "pass damping=0.0 for no damping")
            self.keep("_damping", gamma if gamma.dim() else gamma.item())
        self.initial_momentum = initial_momentum

    @property
    def damping(self) -> Tensor | float:
        """The current γ: a tensor if learned or one for each channel (float64 if constant), else a Python float."""
        return self.kept("_damping") if self.omega is None else self.max_damping * torch.sigmoid(self.omega)

    def solver_damping(self) -> Tensor | float:
        """γ for a solver, which takes a constant from the host."""
        return self.damping if self.omega is not None else self.on_host("_damping", self.damping)

    def constants(self) -> dict[str, str]:
        """Return a learned γ has one as well: the bound that its parameter is relative to."""
        return {"damping": "_damping"} if self.omega is None else {"max_damping": "max_damping"}

    def friction(self, m: Tensor) -> Tensor:
        """Return the product γm, in the dtype of m."""
        gamma = self.damping
        return (gamma.to(m.dtype) if self.omega is None and isinstance(gamma, Tensor) else gamma) * m

    def force(self, t: Tensor, h: Tensor) -> Tensor:
        """Return what acts on the ball apart from the damping."""
        return self.evaluate(t, h)

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(x, m0)`` with m0 zeros or ``initial_momentum(x)``."""
        return with_momentum(x, self.initial_momentum, "initial_momentum")

    def extra_repr(self) -> str:
        learned = "" if self.omega is None else f" (learned, max {self.max_damping:g})"
        return f"damping={_number(self.damping)}{learned}, {super().extra_repr()}"


class HBNODE(_Damped):
    r"""Heavy-ball neural ODE, :math:`h'' + \gamma h' = f(h, t)`, as :math:`h' = m,\; m' = -\gamma m + f(h, t)`.

    A learned damping is :math:`\gamma = \epsilon \cdot \mathrm{sigmoid}(\omega)` with :math:`\epsilon` the
    ``max_damping`` and :math:`\omega` starting at -3.

    References:
        Xia et al., Heavy Ball Neural Ordinary Differential Equations (NeurIPS 2021), arXiv:2110.04840; equations
        (24) and (25) of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022).

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)``, returning the shape of h. f does not see m.
        damping: initial γ, in units of 1/time: a number, or a tensor that broadcasts with h, (d,) for one γ a feature
            and (d, 1, 1) for one a channel. None is ``max_damping * sigmoid(-3)``, about 0.047. Default: None.
        learn_damping: whether γ is a parameter; a constant one is a Python float or a float64 tensor, whatever the
            dtype of the module, and is in its ``state_dict``. Default: True.
        max_damping: upper bound of a learned γ. Default: 1.0.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None starts at rest. Default: None.
        time_dependent: whether ``func`` takes the time; None reads it off ``func``. Default: None.

    Raises:
        ValueError: if the damping is out of its range.

    Example:
        A spring, h'' = -h, turns h into cos(t):

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
        """Equation (25)."""
        h, m = self._pair(state)
        return m, self.force(t, h) - self.friction(m)


class GHBNODE(_Damped):
    r"""Generalized heavy-ball neural ODE, :math:`h' = \sigma(m),\; m' = -\gamma m + f(h, t) - \xi h`.

    The bounded :math:`\sigma` and the pull :math:`-\xi h` keep h from growing where an HBNODE blows up. A learned
    skip weight is :math:`\xi = \mathrm{softplus}(\chi)` with :math:`\chi` starting at 0, so :math:`\xi = \ln 2`.

    References:
        Xia et al., arXiv:2110.04840; equation (48) of Wang et al. (2022).

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)``, returning the shape of h.
        damping: initial γ, as for :class:`HBNODE`. Default: None.
        learn_damping: whether γ is a parameter. Default: True.
        max_damping: upper bound of a learned γ. Default: 1.0.
        xi: initial ξ, in units of 1/time. None is ln 2. Default: None.
        learn_xi: whether ξ is a parameter; a constant ξ is a Python float, and in the ``state_dict``. Default: True.
        activation: σ, elementwise. Default: ``torch.tanh``.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None starts at rest. Default: None.
        time_dependent: whether ``func`` takes the time; None reads it off ``func``. Default: None.

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
        self.activation = activation
        self._xi = math.log(2.0) if xi is None else float(xi)
        self.chi: nn.Parameter | None = None
        if learn_xi:
            if not 0 < self._xi < math.inf:
                raise ValueError(
                    f"a learned xi must start above 0, got {self._xi}. "
                    "Fix: pass a positive xi, or keep it constant with learn_xi=False."
                )
            self.chi = nn.Parameter(torch.tensor(_inverse_softplus(self._xi)))
        elif not 0 <= self._xi < math.inf:
            raise ValueError(f"xi must be a number >= 0, got {self._xi}. Fix: pass xi=0.0 for no skip term.")

    @property
    def xi(self) -> Tensor | float:
        """The current ξ, a scalar tensor if learned, else a Python float."""
        return self._xi if self.chi is None else nn.functional.softplus(self.chi)

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Equation (48)."""
        h, m = self._pair(state)
        return self.activation(m), self.force(t, h) - self.friction(m)

    def constants(self) -> dict[str, str]:
        """That of the damping, and a ξ that is not learned."""
        return super().constants() | ({"xi": "_xi"} if self.chi is None else {})

    def force(self, t: Tensor, h: Tensor) -> Tensor:
        """Return the value of f(h, t) - ξh."""
        return self.evaluate(t, h) - self.xi * h

    def extra_repr(self) -> str:
        """Return what ``repr`` shows beside the submodules."""
        learned = "" if self.chi is None else " (learned)"
        return f"xi={_number(self.xi)}{learned}, {super().extra_repr()}"


class HeavyBallSDE(HBNODE):
    r"""Heavy-ball SDE, :math:`dh = m\,dt,\; dm = (-\gamma m + f(h, t))\,dt + \sqrt{2\gamma\eta}\,dW`.

    This is underdamped Langevin dynamics with the damping :math:`\gamma` and the temperature :math:`\eta`. If
    :math:`f = -\nabla F`, its stationary density is proportional to :math:`e^{-F(h)/\eta}\, \mathcal{N}(m; 0, \eta)`.
    At temperature 0 it is an :class:`HBNODE`.

    :func:`hbnode.sdeint` solves it. It is also an SDE of torchsde: ``torchsde.sdeint`` and ``torchsde.sdeint_adjoint``
    solve it on the state ``torch.cat([h, m], -1)`` of shape (batch, 2d). :func:`hbnode.odeint` solves it without its
    noise.

    A learned temperature is :math:`\eta = e^{\theta}`. The learned damping is that of :class:`HBNODE`.

    References:
        Equation (5) of Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks,
        arXiv:2006.06919, where the force is :math:`f = -\eta\nabla F`.

    Arguments:
        func: f, taking ``(h)`` or ``(t, h)``, returning the shape of h. f does not see m.
        damping: initial γ, in units of 1/time: a number, or a tensor that broadcasts with h, (d,) for one γ a feature
            and (d, 1, 1) for one a channel. None is ``max_damping * sigmoid(-3)``, about 0.047. Default: None.
        temperature: initial η, in units of (h/time)²: a number >= 0, or a tensor that broadcasts with h.
            Default: ``1.0``.
        learn_damping: whether γ is a parameter. A constant γ is in the ``state_dict``. Default: True.
        learn_temperature: whether η is a parameter. A constant η is in the ``state_dict``. Default: False.
        max_damping: upper bound of a learned γ. Default: ``1.0``.
        initial_momentum: module or callable x -> m(t0) of the shape of x; None starts at rest. Default: None.
        time_dependent: whether ``func`` takes the time; None reads it off ``func``. Default: None.
        sde_type: what torchsde is told, ``"ito"`` or ``"stratonovich"``. The noise does not depend on the state, so
            both are the same equation. The choice decides which of torchsde's methods accept it. Default: ``"ito"``.

    Raises:
        ValueError: if the damping or the temperature is out of its range.

    Example:
        A spring in a heat bath of temperature 0.5: the variance of h is 0.5 in the end.

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
        if sde_type not in ("ito", "stratonovich"):
            raise ValueError(f"sde_type must be 'ito' or 'stratonovich', got {sde_type!r}. Fix: leave it out.")
        self.sde_type = sde_type
        eta = as_numbers(temperature, "temperature", "temperature=1.0, the default")
        _check_not_negative(eta, "temperature", "pass temperature=0.0 for no noise")
        self.log_temperature: nn.Parameter | None = None
        if learn_temperature:
            if not bool((eta > 0).all()):
                raise ValueError(
                    f"a learned temperature must start above 0, got {eta.tolist()}. "
                    "Fix: pass a positive temperature, or keep it constant with learn_temperature=False."
                )
            self.log_temperature = nn.Parameter(eta.log().to(torch.empty(0)))
        else:
            self.keep("_temperature", eta if eta.dim() else eta.item())

    @property
    def temperature(self) -> Tensor | float:
        """The current η: a tensor if learned or one for each channel (float64 if constant), else a Python float."""
        return self.kept("_temperature") if self.log_temperature is None else self.log_temperature.exp()

    def solver_temperature(self) -> Tensor | float:
        """Return the temperature for a solver, which takes a constant from the host."""
        return self.on_host("_temperature", self.temperature)

    def constants(self) -> dict[str, str]:
        """Those of the damping, and a temperature that is not learned."""
        return super().constants() | ({"temperature": "_temperature"} if self.log_temperature is None else {})

    def noise_scale(self, m: Tensor) -> Tensor:
        """Return the diffusion √(2γη), in the shape and dtype of m."""
        gamma, eta = (
            torch.as_tensor(x, dtype=m.dtype, device=m.device) if isinstance(x, float) else x.to(m.dtype)
            for x in (self.damping, self.temperature)
        )
        return diffusion(gamma, eta).expand_as(m)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the drift, for torchsde: (batch, 2d) to (batch, 2d)."""
        h, m = self._halves(y)
        return torch.cat(self(t, (h, m)), -1)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the diffusion, for torchsde: (batch, 2d, d). The noise acts on m alone."""
        _, m = self._halves(y)
        scale = torch.diag_embed(self.noise_scale(m))
        return torch.cat([torch.zeros_like(scale), scale], -2)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return the diffusion times a vector (batch, d), for torchsde, without the matrix: (batch, 2d)."""
        _, m = self._halves(y)
        return torch.cat([torch.zeros_like(v), self.noise_scale(m) * v], -1)

    def _halves(self, y: Tensor) -> tuple[Tensor, Tensor]:
        if y.shape[-1] % 2:
            raise ValueError(
                f"the state must be h and m side by side, an even number of columns, got shape {tuple(y.shape)}. "
                "Fix: torch.cat([h, m], -1)."
            )
        h, m = y.chunk(2, -1)
        return h, m

    def extra_repr(self) -> str:
        """Return what ``repr`` shows beside the submodules."""
        learned = "" if self.log_temperature is None else " (learned)"
        return f"temperature={_number(self.temperature)}{learned}, {super().extra_repr()}"


def diffusion(gamma: Tensor, eta: Tensor) -> Tensor:
    """Return the factor √(2γη) of the noise. At 0, where the slope of the root is infinite, its gradient is 0."""
    product = 2 * gamma * eta
    return torch.where(product > 0, torch.where(product > 0, product, 1.0).sqrt(), 0.0)


def _check_not_negative(x: Tensor, name: str, fix: str) -> None:
    if not bool(((x >= 0) & torch.isfinite(x)).all()):
        raise ValueError(f"{name} must be a number >= 0, got {x.tolist()}. Fix: {fix}.")


def _number(x: Tensor | float) -> str:
    if isinstance(x, Tensor) and x.is_meta:
        return f"unknown of shape {tuple(x.shape)}"
    if isinstance(x, Tensor) and x.dim():
        return f"{float(x.min()):.4g}..{float(x.max()):.4g} of shape {tuple(x.shape)}"
    return f"{float(x.detach() if isinstance(x, Tensor) else x):.4g}"


def _inverse_softplus(y: float) -> float:
    return y + math.log(-math.expm1(-y))
