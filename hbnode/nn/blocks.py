"""ODE blocks: layers that combine a field, its solver and an integration interval."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._checks import as_count
from hbnode._torch import checking_shapes
from hbnode._tree import State, Times, append_zeros, parts
from hbnode.fields import GHBNODE, HBNODE, Field
from hbnode.nfe import NFE
from hbnode.solve.integral import Integrand, WithIntegral, settings_of_integral
from hbnode.solve.odeint import checked_span, resolve, solve
from hbnode.solve.settings import Gradient, Method, Save, Settings, checked_jumps

_SETTINGS = {field.name: field.name for field in dataclasses.fields(Settings) if field.name != "common_steps"}
_SETTINGS["compile"] = "compile_steps"  # because nn.Module has a method ``compile``


class ODEBlock(nn.Module):
    """A layer that maps x to h(T), the solution at time T of an ODE with the initial value x.

    Arguments:
        field: the right-hand side of the ODE: one of hbnode's fields, or a module called ``(t, state)`` with the
            methods ``initial_state`` and ``readout``.
        t_span: start and end of the integration, ``(t0, T)``. The end may lie before the start. Default: (0.0, 1.0).
        method: solver, as in :func:`hbnode.odeint`; :func:`hbnode.methods` lists them. Default: None, the best native
            method for the field and the tolerance.
        rtol: relative tolerance of adaptive methods. Default: 1e-5.
        atol: absolute tolerance of adaptive methods, in the units of the state. Default: 1e-5.
        gradient: ``"checkpoint"``, ``"direct"``, ``"reversible"`` or ``"adjoint"``, as in :func:`hbnode.odeint`.
            Default: None, ``"checkpoint"`` for native methods and ``"direct"`` for torchdiffeq's.
        steps: number of equal steps between two output times, or from start to end for ``block(x)``. Default: None,
            adaptive steps.
        per_sample: whether each sample has its own step sizes (native methods only). Default: False, one step size for
            the whole batch.
        save: ``"interpolate"``: adaptive steps ignore output times, and outputs are interpolated within the tolerance.
            ``"exact"``: a step ends at each output time. Default: ``"interpolate"``.
        jump_times: times (K,) at which f or its derivative jumps; steps end on them. Default: None.
        max_steps: number of steps after which a solve raises an error. Default: 10000.
        options: further options of the method, such as ``{"max_step": 0.1}``. Default: None.
        adjoint_options: options of the backward solve of ``gradient="adjoint"`` with one of torchdiffeq's methods.
            Default: None, which is ``{"norm": "seminorm"}``.
        compile: compile the steps of a native method with torch.compile. Default: False.
        augment: number of zeros appended to x along dimension 1 before the solve (features, or channels of an image).
            Default: 0.
        initial_state: module or callable x -> state, used instead of ``augment`` and the field's own ``initial_state``.
            Default: None.

    Shape:
        - ``block(x)``: x (batch, d, ...) -> (batch, d + augment, ...), h at the end of ``t_span``.
        - ``block(x, t)``: x is the state at ``t[0]``, t (T,) -> (T, batch, d + augment, ...). Native methods also take
          t (batch, T), with times per sample. For h at one time, give two: ``block(x, [0.0, 2.0])[-1]``.

    Raises:
        TypeError: if ``field`` is not a field.
        ValueError: if an argument is out of its range.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.ODEBlock(hbnode.NODE(torch.nn.Linear(2, 2)))
        >>> block(torch.randn(8, 2)).shape, block(torch.randn(8, 2), [0.0, 0.5, 2.0]).shape
        (torch.Size([8, 2]), torch.Size([3, 8, 2]))
    """

    def __init__(
        self,
        field: nn.Module,
        t_span: Sequence[float] = (0.0, 1.0),
        *,
        method: Method | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-5,
        gradient: Gradient | None = None,
        steps: int | None = None,
        per_sample: bool = False,
        save: Save = "interpolate",
        jump_times: Times | None = None,
        max_steps: int = 10_000,
        options: dict[str, Any] | None = None,
        adjoint_options: dict[str, Any] | None = None,
        compile: bool = False,
        augment: int = 0,
        initial_state: Callable[[Tensor], State] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(field, type):
            name = field.__name__
            raise TypeError(f"ODEBlock expected a field, got the class {name}. Fix: ODEBlock(hbnode.{name}(net)).")
        if not (callable(field) and hasattr(field, "initial_state") and hasattr(field, "readout")):
            raise TypeError(
                f"ODEBlock expected a field, got {type(field).__name__}. "
                "Fix: wrap the network, ODEBlock(hbnode.NODE(net)), or use HeavyBallODEBlock(net)."
            )
        self.augment = as_count(augment, "augment", least=0)
        if augment and initial_state is not None:
            raise ValueError("augment and initial_state were both given. Fix: append the zeros in initial_state.")
        self.field = cast(Field, field)  # or another module with the methods of a Field
        self.t_span = checked_span(t_span)
        self.method, self.rtol, self.atol, self.gradient, self.steps = method, rtol, atol, gradient, steps
        self.per_sample, self.save, self.jump_times, self.max_steps = per_sample, save, jump_times, max_steps
        self.options, self.adjoint_options, self.compile_steps = options, adjoint_options, compile
        self.initial_state = initial_state
        self._nfe = NFE()
        settings = self.settings()  # a wrong argument raises an error here, not in the first call
        self._settings = settings if options is None and adjoint_options is None else None

    def __setattr__(self, name: str, value: Any) -> None:
        name = _SETTINGS.get(name, name)
        if name in ("jump_times", "t_span"):
            value = checked_jumps(value) if name == "jump_times" else checked_span(value)
        super().__setattr__(name, value)
        if name in _SETTINGS.values():
            self._settings = None  # the next call checks all settings

    @property
    def nfe(self) -> NFE:
        """Return the numbers of function evaluations in the last call and, once it has run, in its backward pass.

        Setting ``block.nfe = 0`` starts a new count that also includes the backward pass of the last call.
        """
        return self._nfe

    @nfe.setter
    def nfe(self, value: int) -> None:
        if value != 0:
            raise ValueError(f"block.nfe can be set to 0 only, got {value!r}. Fix: block.nfe = 0 starts a new count.")
        self._nfe.successor = NFE()
        self._nfe = self._nfe.successor

    def forward(self, x: Tensor, t: Times | None = None) -> Tensor:
        """Solve the ODE with the input x, and return h at the end of ``t_span``.

        If ``t`` is given, x is the input at ``t[0]``, and the result is h at the times ``t``, time first.
        """
        readout = self.field.readout
        if t is None and getattr(readout, "__func__", None) is Field.readout:  # the readout is for one time
            return readout(self._solve(self.field, self.start(x), None, end=True))
        h = readout(self.trajectory(x, t))
        return h[-1] if t is None else h

    if TYPE_CHECKING:  # __call__ of nn.Module returns Any
        __call__ = forward

    def trajectory(self, x: Tensor, t: Times | None = None) -> State:
        """Return the whole state at the times ``t``, time first, for the initial value x at ``t[0]``.

        ``block(x, t)`` returns only h. Function evaluations are counted, and gradients computed, as for
        ``block(x, t)``.

        Arguments:
            x: input (batch, d, ...), the state at ``t[0]``.
            t: at least two times, the first of which is the time of x: (T,), or (batch, T) with times per sample.
                Default: None, the two ends of ``t_span``.

        Returns:
            The same as :func:`hbnode.odeint` for the field. HBNODE and GHBNODE give the pair (h, m) and SONODE (h, v),
            each tensor (T, batch, d + augment, ...). NODE and ANODE give the tensor h. With ``initial_state``, the
            result has the structure that ``initial_state`` returns.

        Example:
            >>> import torch, hbnode
            >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(2, 2))
            >>> h, m = block.trajectory(torch.randn(8, 2), [0.0, 0.5, 2.0])
            >>> h.shape, m.shape, bool((m[0] == 0).all())
            (torch.Size([3, 8, 2]), torch.Size([3, 8, 2]), True)
        """
        return self._solve(self.field, self.start(x), t)

    def with_integral(self, x: Tensor, integrand: Integrand, t: Times | None = None) -> tuple[Tensor, Tensor]:
        r"""Return the output of the block and the integral q of a function g along its trajectory y.

        .. math:: q(t) = \int_{t_0}^{t} g(s, y(s), y'(s))\, ds

        The block solves q' = g, with q = 0 at the start, together with the ODE. The solver is ``"tsit5"`` or one of
        torchdiffeq's methods, because Nyström and splitting methods solve h'' + γh' = f only. A step is accepted if the
        error norms of the state and of q are both at most 1. The integral therefore never loosens the tolerance of h.
        Gradients flow to h, q and all parameters of f and g in every gradient mode except ``"reversible"``.
        ``block.nfe`` counts evaluations of the field, without the calls of a network inside g. ``compile=True`` has no
        effect here.

        Arguments:
            x: input (batch, d, ...), the state at the start.
            integrand: g, called ``(t, state, derivative)``, returns (batch,). The state is h or (h, m), and the
                derivative has the same structure. t is a scalar. With ``per_sample=True`` or times per sample its shape
                is (batch, 1, ...), or (1, 1, ...) at a time that all samples share. It then broadcasts with h, and
                ``t.reshape(-1)`` always broadcasts with (batch,). The forward pass calls g without an autograd graph;
                use ``torch.func`` for derivatives inside g.
            t: times (T,), or (batch, T) with times per sample. Default: None, the end of ``t_span``.

        Returns:
            h (batch, d + augment, ...) as from ``block(x)`` and q (batch,). With ``t``, h (T, batch, ...) as from
            ``block(x, t)`` and q (T, batch), which is 0 at ``t[0]``.

        Raises:
            ValueError: if the block's method or gradient mode cannot solve the integral, or g returns another shape.

        Example:
            The kinetic energy of a path is a penalty that favours straight paths (Finlay et al., arXiv:2002.02798). The
            change of a log-density is :math:`d \log p / dt = -\mathrm{tr}(\partial f / \partial h)` (Chen et al.,
            arXiv:1806.07366):

            >>> import torch, hbnode
            >>> net = torch.nn.Linear(2, 2)
            >>> block = hbnode.ODEBlock(hbnode.NODE(net))
            >>> energy = lambda t, h, dh: dh.square().sum(1)
            >>> trace = lambda h: torch.func.jacrev(net)(h).trace()
            >>> log_density = lambda t, h, dh: -torch.func.vmap(trace)(h)
            >>> h, change = block.with_integral(torch.randn(8, 2), log_density)
            >>> torch.allclose(change, -net.weight.trace().expand(8), atol=1e-4)
            True
        """
        state = self.start(x)
        equation = WithIntegral(self.field, integrand, state)
        rows = self._solve(equation, equation.start(state), t, settings_of_integral(self.settings()))
        states, q = equation.split(*parts(rows))
        h = self.field.readout(states)
        return (h[-1], q[-1]) if t is None else (h, q)

    def start(self, x: Tensor) -> State:
        """Return the initial state for an input x (batch, d, ...): h with appended zeros, and the initial momentum."""
        with _traced_shapes():
            if self.initial_state is not None:
                return self.initial_state(x)
            return self.field.initial_state(append_zeros(x, self.augment) if self.augment else x)

    def _solve(
        self, field: nn.Module, state: State, t: Times | None, settings: Settings | None = None, *, end: bool = False
    ) -> State:
        nfe = NFE()
        if not torch.compiler.is_exporting():  # an exported graph cannot set attributes
            self._nfe = nfe
        if settings is None:
            settings = self._settings or self.settings()
            if self.options is None and self.adjoint_options is None:  # dicts may be modified by the user
                self._settings = settings
        if getattr(t, "shape", (len(t) if isinstance(t, Sequence) else 0,))[-1:] == (1,):
            warnings.warn(
                "t holds a single time, at which the block returns x, because x is the state at the first time. Fix: "
                "start with the time t0 of x, block(x, [t0, t])[-1]; for a time t (batch, 1) of each sample, "
                "block(x, torch.cat([torch.full_like(t, t0), t], 1))[-1].",
                stacklevel=4,
            )
        try:
            with _traced_shapes():
                return solve(field, state, self.t_span if t is None else t, settings, nfe, end=end)
        except RuntimeError as error:
            if not any(words in str(error) for words in ("cannot be multiplied", " channels", "size of tensor")):
                raise
            h = parts(state)[0]
            raise ValueError(
                f"func does not take h of shape {tuple(h.shape)}, which has augment={self.augment}: {error}. "
                f"Fix: a first and a last layer of {h.shape[min(1, h.dim() - 1)]} features or channels, or another x."
            ) from error

    def settings(self) -> Settings:
        """Return the checked solver settings from the current values of the block's attributes."""
        return Settings(**{name: getattr(self, attribute) for name, attribute in _SETTINGS.items()}).checked()

    def extra_repr(self) -> str:
        settings = resolve(self.settings(), self.field, torch.tensor(self.t_span))
        augment = f", augment={self.augment}" if self.augment else ""
        return (
            f"t_span={self.t_span}, method={settings.method!r}, rtol={self.rtol:g}, atol={self.atol:g}, "
            f"gradient={settings.gradient!r}{augment}"
        )


def _traced_shapes() -> AbstractContextManager[None]:
    return checking_shapes() if torch.jit.is_tracing() else nullcontext()


class HeavyBallODEBlock(ODEBlock):
    r"""An ODE layer for the heavy-ball equation :math:`h'' + \gamma h' = f(h, t)` that maps h(t0) = x to h(T).

    The state is the pair of h and the momentum m = h', and γ is the damping. With ``generalized=True`` the equation is
    that of :class:`hbnode.GHBNODE`, :math:`h' = \sigma(m),\; m' = -\gamma m + f(h, t) - \xi h`, with an activation σ
    and a skip weight ξ.

    Arguments:
        func: f, a module or callable with the arguments ``(h)`` or ``(t, h)`` that returns the shape of h.
        generalized: use :class:`hbnode.GHBNODE` instead of :class:`hbnode.HBNODE`. Default: False.
        augment: number of zeros appended to x along dimension 1 (features, or channels of an image). Default: 0.
        initial_momentum: module or callable h -> m(t0) of the shape of h, including appended zeros. Default: None, zero
            initial momentum.
        damping: initial γ, in units of 1/time: a number, or a tensor that broadcasts with h, such as (d,) for one γ per
            feature. Default: None, ``max_damping * sigmoid(-3)``, about 0.047.
        learn_damping: whether γ is a parameter. A constant γ keeps its gradient, as in :class:`hbnode.HBNODE`.
            Default: True.
        max_damping: upper bound of a learned γ. Default: 1.0.
        xi: initial skip weight ξ of a generalized block, in units of 1/time. Default: None, ln 2.
        learn_xi: whether ξ of a generalized block is a parameter. Default: None, True.
        activation: σ of a generalized block, elementwise. Default: None, tanh.
        time_dependent: whether ``func`` takes the time. Default: None, inferred from the signature of ``func``.
        t_span: start and end of the integration, ``(t0, T)``. Default: (0.0, 1.0).
        method: solver. This and the next arguments are those of :class:`ODEBlock`. Default: None, the best native one.
        rtol: relative tolerance. Default: 1e-5.
        atol: absolute tolerance. Default: 1e-5.
        gradient: how gradients are computed. Default: None, ``"checkpoint"`` for native methods.
        steps: number of equal steps between two output times. Default: None, adaptive steps.
        per_sample: whether each sample has its own step sizes. Default: False.
        save: ``"interpolate"``, or ``"exact"``: a step ends at each output time. Default: ``"interpolate"``.
        jump_times: times (K,) at which f or its derivative jumps; steps end on them. Default: None.
        max_steps: number of steps after which a solve raises an error. Default: 10000.
        options: further options of the method. Default: None.
        adjoint_options: options of the backward solve of ``gradient="adjoint"``, torchdiffeq's methods. Default: None.
        compile: compile the steps of a native method with torch.compile. Default: False.
        initial_state: module or callable x -> (h, m), used instead of ``augment`` and ``initial_momentum``.
            Default: None.

    Raises:
        TypeError: if the signature of ``func`` does not show whether it takes the time.
        ValueError: if an argument is out of its range, or is only valid with ``generalized=True``.

    Example:
        >>> import torch, hbnode
        >>> func = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
        >>> block = hbnode.HeavyBallODEBlock(func, augment=1)
        >>> block(torch.randn(8, 4)).shape
        torch.Size([8, 5])
    """

    field: HBNODE | GHBNODE

    def __init__(
        self,
        func: Callable[..., Tensor],
        *,
        generalized: bool = False,
        augment: int = 0,
        initial_momentum: Callable[[Tensor], Tensor] | None = None,
        damping: float | Tensor | None = None,
        learn_damping: bool = True,
        max_damping: float = 1.0,
        xi: float | None = None,
        learn_xi: bool | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
        time_dependent: bool | None = None,
        t_span: Sequence[float] = (0.0, 1.0),
        method: Method | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-5,
        gradient: Gradient | None = None,
        steps: int | None = None,
        per_sample: bool = False,
        save: Save = "interpolate",
        jump_times: Times | None = None,
        max_steps: int = 10_000,
        options: dict[str, Any] | None = None,
        adjoint_options: dict[str, Any] | None = None,
        compile: bool = False,
        initial_state: Callable[[Tensor], State] | None = None,
    ) -> None:
        constants: dict[str, Any] = {"xi": xi, "learn_xi": learn_xi, "activation": activation}
        constants = {name: value for name, value in constants.items() if value is not None}
        if constants and not generalized:
            raise ValueError(
                f"{', '.join(constants)} belongs to the equation of generalized=True, h' = σ(m), m' = -γm + f - ξh. "
                "Fix: generalized=True, or leave it out."
            )
        field = (GHBNODE if generalized else HBNODE)(
            func, damping=damping, learn_damping=learn_damping, max_damping=max_damping,
            initial_momentum=initial_momentum, time_dependent=time_dependent, **constants,
        )  # fmt: skip
        super().__init__(
            field, t_span, method=method, rtol=rtol, atol=atol, gradient=gradient, steps=steps, per_sample=per_sample,
            save=save, jump_times=jump_times, max_steps=max_steps, options=options, adjoint_options=adjoint_options,
            compile=compile, augment=augment, initial_state=initial_state,
        )  # fmt: skip

    if TYPE_CHECKING:

        @override
        def trajectory(self, x: Tensor, t: Times | None = None) -> tuple[Tensor, Tensor]: ...
