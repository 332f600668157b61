"""The field of the heavy-ball SDE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._checks import as_numbers
from hbnode.fields import HBNODE


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
            func,
            damping=damping,
            learn_damping=learn_damping,
            max_damping=max_damping,
            initial_momentum=initial_momentum,
            time_dependent=time_dependent,
        )
        if sde_type not in ("ito", "stratonovich"):
            raise ValueError(f"sde_type must be 'ito' or 'stratonovich', got {sde_type!r}. Fix: leave it out.")
        self.sde_type = sde_type
        eta = as_numbers(temperature, "temperature", "temperature=1.0, the default")
        if not bool(((eta >= 0) & torch.isfinite(eta)).all()):
            raise ValueError(
                f"temperature must be a number >= 0, got {eta.tolist()}. Fix: pass temperature=0.0 for no noise."
            )
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
        """The temperature for a solver, which takes a constant from the host."""
        return self.on_host("_temperature", self.temperature)

    @override
    def constants(self) -> dict[str, str]:
        return super().constants() | ({"temperature": "_temperature"} if self.log_temperature is None else {})

    def noise_scale(self, m: Tensor) -> Tensor:
        """The diffusion √(2γη), in the shape and dtype of m."""
        gamma, eta = (
            torch.as_tensor(x, dtype=m.dtype, device=m.device) if isinstance(x, float) else x.to(m.dtype)
            for x in (self.damping, self.temperature)
        )
        product = 2 * gamma * eta
        # at 0 the slope of the root is infinite, and 0 times it is NaN
        scale = torch.where(product > 0, product, torch.ones_like(product)).sqrt()
        return torch.where(product > 0, scale, torch.zeros_like(scale)).expand_as(m)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        """The drift, for torchsde: (batch, 2d) to (batch, 2d)."""
        h, m = self._halves(y)
        return torch.cat(self(t, (h, m)), -1)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """The diffusion, for torchsde: (batch, 2d, d). The noise acts on m alone."""
        _, m = self._halves(y)
        scale = torch.diag_embed(self.noise_scale(m))
        return torch.cat([torch.zeros_like(scale), scale], -2)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """The diffusion times a vector (batch, d), for torchsde, without the matrix: (batch, 2d)."""
        _, m = self._halves(y)
        return torch.cat([torch.zeros_like(v), self.noise_scale(m) * v], -1)

    def _halves(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The parts h and m of torchsde's state."""
        if y.shape[-1] % 2:
            raise ValueError(
                f"the state must be h and m side by side, an even number of columns, got shape {tuple(y.shape)}. "
                "Fix: torch.cat([h, m], -1)."
            )
        h, m = y.chunk(2, -1)
        return h, m

    @override
    def extra_repr(self) -> str:
        eta = torch.as_tensor(self.temperature).detach()
        learned = "" if self.log_temperature is None else " (learned)"
        if eta.is_meta:
            shown = f"unknown of shape {tuple(eta.shape)}"
        elif eta.dim():
            shown = f"{float(eta.min()):.4g}..{float(eta.max()):.4g} of shape {tuple(eta.shape)}"
        else:
            shown = f"{float(eta):.4g}"
        return f"temperature={shown}{learned}, {super().extra_repr()}"
