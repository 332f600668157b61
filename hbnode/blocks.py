"""Blocks: a field, its solver and a time span as one layer of a network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hbnode._checks import as_count
from hbnode._state import State, append_zeros
from hbnode._tracing import checking_shapes, is_exporting
from hbnode.fields import GHBNODE, HBNODE
from hbnode.nfe import NFE
from hbnode.solve import checked_settings, resolved, solve
from hbnode.solvers.settings import Settings

_SETTINGS = tuple(field.name for field in dataclasses.fields(Settings) if field.name != "compile")


class ODEBlock(nn.Module):
    r"""A layer that maps x to h(T), the solution of an ODE that starts from x.

    Arguments:
        field: one of hbnode's fields, or a module called ``(t, state)`` that has ``initial_state`` and ``readout``.
        t_span: start and end of the integration, ``(t0, T)``; the end may lie before the start.
        method: solver, as in :func:`hbnode.odeint`; so are the following arguments.
        rtol: relative tolerance.
        atol: absolute tolerance.
        gradient: gradient mode.
        options: options of the method.
        adjoint_options: options of the adjoint's solve.
        step_control: ``"batch"``: one step size for the whole batch.
        max_steps: steps after which a solve is given up.
        augment: zeros appended to x along dimension 1 before the solve (features, or channels of an image).
        initial_state: module x -> state in place of zeros and the field's own ``initial_state``.

    Shape:
        - ``block(x)``: x (batch, d, ...) -> (batch, d + augment, ...), h at the end of ``t_span``.
        - ``block(x, t)``: x is the state at ``t[0]``, t (T,) -> (T, batch, d + augment, ...).

    Raises:
        TypeError: if ``field`` is no field.
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
        method: str | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-5,
        gradient: str | None = None,
        options: dict[str, Any] | None = None,
        adjoint_options: dict[str, Any] | None = None,
        step_control: str = "batch",
        max_steps: int = 10_000,
        compile: bool = False,
        augment: int = 0,
        initial_state: Callable[[Tensor], State] | None = None,
    ) -> None:
        super().__init__()
        if not (callable(field) and hasattr(field, "initial_state") and hasattr(field, "readout")):
            raise TypeError(
                f"ODEBlock expected a field, got {type(field).__name__}. "
                "Fix: wrap the network, ODEBlock(hbnode.NODE(net)), or use HeavyBallODEBlock(net)."
            )
        if not isinstance(t_span, Sequence) or any(isinstance(t, Tensor) for t in t_span):
            raise TypeError(
                f"t_span must be two numbers (t0, T), got {t_span!r}. Fix: learned times go to block(x, t)."
            )
        t_span = tuple(float(t) for t in t_span)
        if len(t_span) != 2 or t_span[0] == t_span[1] or not all(map(math.isfinite, t_span)):
            raise ValueError(f"t_span must be two different times (t0, T), got {t_span}. Fix: (0.0, 1.0).")
        self.augment = as_count(augment, "augment", least=0)
        if augment and initial_state is not None:
            raise ValueError("augment and initial_state were both given. Fix: let initial_state do the augmenting.")
        self.field = field
        self.t_span = t_span
        self.method = method
        self.rtol = rtol
        self.atol = atol
        self.gradient = gradient
        self.options = options
        self.adjoint_options = adjoint_options
        self.step_control = step_control
        self.max_steps = max_steps
        self.compile_steps = compile  # nn.Module has a method of the shorter name
        self.initial_state = initial_state
        self._nfe = NFE()
        self.settings()  # a wrong argument is told here, not at the first call

    @property
    def nfe(self) -> NFE:
        """Evaluations of the last call; the backward pass fills in its part.

        ``block.nfe = 0`` starts a new count, in which the backward pass of the last call counts as well.
        """
        return self._nfe

    @nfe.setter
    def nfe(self, value: int) -> None:
        if value != 0:
            raise ValueError(f"block.nfe can be set to 0 only, got {value!r}. Fix: block.nfe = 0 starts a new count.")
        self._nfe.successor = NFE()
        self._nfe = self._nfe.successor

    def forward(self, x: Tensor, t: Tensor | Sequence[float] | None = None) -> Tensor:
        """h(T), or the trajectory of h at the times ``t``."""
        if torch.jit.is_tracing():
            with checking_shapes():
                return self._solve(x, t)
        return self._solve(x, t)

    def _solve(self, x: Tensor, t: Tensor | Sequence[float] | None) -> Tensor:
        if self.initial_state is not None:
            state = self.initial_state(x)
        else:
            state = self.field.initial_state(append_zeros(x, self.augment))
        nfe = NFE()
        if not is_exporting():  # a graph without Python has no attributes
            self._nfe = nfe
        trajectory = solve(self.field, state, self.t_span if t is None else t, self.settings(), nfe)
        h = self.field.readout(trajectory)
        return h[-1] if t is None else h

    def settings(self) -> Settings:
        """How the block solves, from its attributes, which may be changed at any time."""
        settings = Settings(**{name: getattr(self, name) for name in _SETTINGS}, compile=self.compile_steps)
        return checked_settings(settings)

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the submodules."""
        settings = resolved(self.settings(), self.field, span=abs(self.t_span[1] - self.t_span[0]))
        augment = f", augment={self.augment}" if self.augment else ""
        return (
            f"t_span={self.t_span}, method={settings.method!r}, rtol={self.rtol:g}, atol={self.atol:g}, "
            f"gradient={settings.gradient!r}{augment}"
        )


class HeavyBallODEBlock(ODEBlock):
    r"""A layer that lets a heavy ball roll: :math:`h'' + \gamma h' = f(h, t)` from h = x, returning h(T).

    Arguments:
        func: f, a module or callable taking ``(h)`` or ``(t, h)`` and returning the shape of h.
        generalized: use :class:`hbnode.GHBNODE` in place of :class:`hbnode.HBNODE`.
        augment: zeros appended to x along dimension 1 (features, or channels of an image).
        initial_momentum: module h -> m(t0) of the shape of h, augmentation included; None starts at rest.
        damping: initial γ, as for :class:`hbnode.HBNODE`; None is ``max_damping * sigmoid(-3)``, about 0.047.
        learn_damping: whether γ is a parameter.
        max_damping: upper bound of a learned γ.
        xi: initial ξ of a generalized block, as for :class:`hbnode.GHBNODE`; None is ln 2.
        learn_xi: whether ξ of a generalized block is a parameter; None is True.
        activation: σ of a generalized block; None is tanh.
        time_dependent: whether ``func`` takes the time; None reads it off ``func``.
        t_span: start and end of the integration.
        solver: further keyword arguments of :class:`ODEBlock`: ``method``, ``rtol``, ``atol``, ``gradient``, ...

    Example:
        >>> import torch, hbnode
        >>> func = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
        >>> block = hbnode.HeavyBallODEBlock(func, augment=1)
        >>> block(torch.randn(8, 4)).shape
        torch.Size([8, 5])
    """

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
        **solver: Any,
    ) -> None:
        kind = GHBNODE if generalized else HBNODE
        of_ghbnode = {"xi": xi, "learn_xi": learn_xi, "activation": activation}
        given = {name: value for name, value in of_ghbnode.items() if value is not None}
        if given and not generalized:
            raise ValueError(
                f"{', '.join(given)} belongs to h' = σ(m), m' = -γm + f - ξh, which is generalized=True. "
                "Fix: generalized=True, or leave it out."
            )
        field = kind(
            func,
            damping=damping,
            learn_damping=learn_damping,
            max_damping=max_damping,
            initial_momentum=initial_momentum,
            time_dependent=time_dependent,
            **given,
        )
        super().__init__(field, t_span, augment=augment, **solver)
