r"""A normalizing flow on phase space, whose log-determinant is known in closed form.

A point (h, m) with h and m in :math:`\mathbb{R}^D` follows :math:`h' = m,\; m' = -\gamma m + f(h, t)`. The divergence
is :math:`-\gamma D` for every f, because f does not depend on m. See :class:`HeavyBallFlow`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from typing_extensions import override

from hbnode._checks import as_count, check_input, is_one_of
from hbnode._tree import describe
from hbnode.fields import GHBNODE, HBNODE, Field
from hbnode.nfe import NFE
from hbnode.nn.nets import MLP
from hbnode.solve.methods import METHODS
from hbnode.solve.odeint import checked_span, solve
from hbnode.solve.settings import Settings

GRADIENTS = ("reversible", "checkpoint", "direct")


class _Conditioned(Field):
    """The base class of second-order fields with the state h = [position, condition], where the condition is constant.

    Because the condition is part of the state, every gradient mode of :func:`hbnode.odeint` computes its gradient.
    """

    _parts, _second = 2, "condition"

    def __init__(self, func: Callable[..., Tensor], dim: int, condition_dim: int, **options: Any) -> None:
        super().__init__(func, **options)
        self.dim, self.condition_dim = dim, condition_dim

    def force(self, t: Tensor, h: Tensor) -> Tensor:
        position, condition = h.tensor_split([self.dim], -1)
        force = self.evaluate(t, position, condition)
        force = force - self.xi * position if isinstance(self, GHBNODE) else force
        return nn.functional.pad(force, (0, self.condition_dim))

    def solver_damping(self) -> Tensor | float:
        damping = super().solver_damping()  # type: ignore[misc]
        is_vector = isinstance(damping, Tensor) and damping.dim() > 0
        return nn.functional.pad(damping, (0, self.condition_dim)) if is_vector else damping


class ConditionedHBNODE(_Conditioned, HBNODE):
    """An HBNODE whose state h = [position, condition] contains a condition that stays constant in time."""


class ConditionedGHBNODE(_Conditioned, GHBNODE):
    """A GHBNODE whose state h = [position, condition] contains a condition that stays constant in time."""

    def __init__(self, func: Callable[..., Tensor], dim: int, condition_dim: int, **options: Any) -> None:
        super().__init__(func, dim, condition_dim, **options)
        self.activation = _PositionActivation(self.activation, dim)


class _PositionActivation(nn.Module):
    """An elementwise activation of the first ``dim`` features. It returns the other features unchanged."""

    def __init__(self, activation: Callable[[Tensor], Tensor], dim: int) -> None:
        super().__init__()
        self.activation, self.dim = activation, dim

    def forward(self, m: Tensor) -> Tensor:
        return torch.cat([self.activation(m[..., : self.dim]), m[..., self.dim :]], -1)


class HeavyBallFlow(nn.Module):
    r"""A normalizing flow on phase space, defined by the heavy-ball equation, with an exact log-determinant.

    A point consists of a position h and a momentum m, both in :math:`\mathbb{R}^D`. It moves from the base density at
    :math:`t_0` to the data at T, with the damping γ and the force f:

    .. math:: h' = m, \qquad m' = -\gamma m + f(h, t)

    The divergence is :math:`-\gamma D` for every f, so no trace is computed:

    .. math:: \log p_T(h_T, m_T) = \log p_0(h_0, m_0) + \gamma D (T - t_0)

    The base density :math:`p_0` is a standard normal of (h, m). A splitting method solves the equation. Its steps have
    exactly this determinant and are exactly reversible. The density of the computed map is therefore exact for any
    number of steps.

    Data have no momentum. A network defines the posterior :math:`q(m \mid h)`, a normal distribution with independent
    components. The log-density of h then has the lower bound :math:`E_q[\log p_T(h, m) - \log q(m \mid h)]`. A
    continuous normalizing flow with the exact trace reaches a better likelihood of data, at a higher cost per step.

    Calling the module, ``flow(h, condition)``, returns :meth:`elbo`.

    References:
        Xia et al., Heavy Ball Neural Ordinary Differential Equations, arXiv:2110.04840, for the equation; Huang,
        Dinh and Courville, Augmented Normalizing Flows, arXiv:2002.07101, for the bound; Burda, Grosse and
        Salakhutdinov, Importance Weighted Autoencoders, arXiv:1509.00519, for the bound with several samples.

    Arguments:
        func: f, a module or callable of ``(h)`` or ``(t, h)``, followed by the condition if ``condition_dim`` is
            positive. h and the value of f are (batch, dim).
        dim: number D of features of h.
        t_span: start and end of the integration, ``(t0, T)``. Default: (0.0, 1.0).
        generalized: use the equation of :class:`hbnode.GHBNODE`, :math:`h' = \sigma(m)` and
            :math:`m' = -\gamma m + f(h, t) - \xi h`, which has the same divergence. Default: False.
        condition_dim: number of features of a condition, an additional argument of f and q. Default: 0, no condition.
        damping: initial γ, in units of 1/time: a number, or a tensor (dim,) with one γ per feature, whose sum then
            replaces γD. Default: None, ``max_damping * sigmoid(-3)``, about 0.047.
        learn_damping: whether γ is a parameter. Default: True.
        max_damping: upper bound of a learned γ. Default: 1.0.
        xi: initial skip weight ξ of a generalized flow, in units of 1/time. Default: None, ln 2.
        activation: σ of a generalized flow, elementwise. Default: None, tanh.
        posterior: q, a module or callable of ``(h)`` or ``(h, condition)`` that returns (..., 2 dim), the means and
            the logarithms of the standard deviations of m. Default: None, an :class:`hbnode.nn.MLP` with two hidden
            layers of 64 units, which initially returns the standard normal distribution.
        time_dependent: whether ``func`` takes the time. Default: None, which inspects the signature of ``func``.
        method: ``"leapfrog"``, with one evaluation of f per step, or ``"blanes_moan4"``, with six. Default:
            ``"leapfrog"``.
        steps: number of steps. Default: 16.
        gradient: ``"reversible"`` saves only the initial and the final state and reconstructs the others in the
            backward pass. ``"checkpoint"`` and ``"direct"`` are those of :func:`hbnode.odeint`. Second derivatives and
            torch.func need ``"direct"``. Default: ``"reversible"``.

    Shape:
        - h and m: (..., dim), with any batch shape. condition: (..., condition_dim), which broadcasts to that shape.
        - Log-densities and log-determinants: the batch shape.

    Raises:
        TypeError: if the signature of ``func`` does not match ``(h)`` or ``(t, h)``, with the condition.
        ValueError: if an argument is out of its range, or a shape does not fit.
        SolverError: if the solution is not finite, or the reconstruction of the initial state fails.

    Example:
        Fit data by :meth:`elbo`, and the density exp(-U) of an energy U by the reverse Kullback-Leibler divergence:

        >>> import torch, hbnode
        >>> flow = hbnode.distributions.HeavyBallFlow(hbnode.nn.MLP(2, [16], 2), 2)
        >>> data = torch.randn(32, 2)
        >>> (-flow.elbo(data).mean()).backward()
        >>> h, m, log_prob = flow.rsample_and_log_prob(32)
        >>> energy = h.square().sum(1)
        >>> (log_prob - flow.posterior(h).log_prob(m) + energy).mean().backward()
    """

    field: HBNODE | GHBNODE
    anchor: Tensor

    def __init__(
        self,
        func: Callable[..., Tensor],
        dim: int,
        *,
        t_span: Sequence[float] = (0.0, 1.0),
        generalized: bool = False,
        condition_dim: int = 0,
        damping: float | Tensor | None = None,
        learn_damping: bool = True,
        max_damping: float = 1.0,
        xi: float | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
        posterior: Callable[..., Tensor] | None = None,
        time_dependent: bool | None = None,
        method: Literal["leapfrog", "blanes_moan4"] = "leapfrog",
        steps: int = 16,
        gradient: Literal["reversible", "checkpoint", "direct"] = "reversible",
    ) -> None:
        super().__init__()
        self.dim = as_count(dim, "dim")
        self.condition_dim = as_count(condition_dim, "condition_dim", least=0)
        self.t_span, self.method, self.gradient, self.steps = t_span, method, gradient, steps
        if isinstance(damping, Tensor) and damping.shape not in ((), (self.dim,)):
            raise ValueError(
                f"damping must be a number or a tensor ({self.dim},), one γ for each feature; got "
                f"{describe(damping)}. Fix: damping=0.1."
            )
        ghbnode_options = {name: x for name, x in {"xi": xi, "activation": activation}.items() if x is not None}
        if ghbnode_options and not generalized:
            raise ValueError(
                f"{', '.join(ghbnode_options)} belongs to h' = σ(m), m' = -γm + f - ξh, but generalized is False. "
                "Fix: generalized=True, or leave it out."
            )
        kind: Callable[..., HBNODE | GHBNODE] = GHBNODE if generalized else HBNODE
        if self.condition_dim:
            conditioned = ConditionedGHBNODE if generalized else ConditionedHBNODE
            kind = functools.partial(conditioned, dim=self.dim, condition_dim=self.condition_dim)
        self.field = kind(
            func, damping=damping, learn_damping=learn_damping, max_damping=max_damping,
            time_dependent=time_dependent, **ghbnode_options,
        )  # fmt: skip
        if posterior is None:
            posterior = MLP(self.dim + self.condition_dim, [64, 64], 2 * self.dim)
            for p in posterior.layers[-1].parameters():
                nn.init.zeros_(p)
        self.posterior_net = posterior
        self.register_buffer("anchor", torch.zeros(()), persistent=False)  # its dtype and device are those of samples

    def __setattr__(self, name: str, value: Any) -> None:
        reversible = tuple(name for name, method in METHODS.items() if method.is_reversible)
        choices = {"method": reversible, "gradient": GRADIENTS}.get(name, ())
        if choices and not is_one_of(value, choices):
            raise ValueError(
                f"{name} must be one of {choices}, got {value!r}: a flow needs reversible steps. "
                f"Fix: {name}={choices[0]!r}."
            )
        if name in ("t_span", "steps"):
            value = checked_span(value) if name == "t_span" else as_count(value, name)
        super().__setattr__(name, value)

    if TYPE_CHECKING:  # __call__ of nn.Module returns Any

        @override
        def __call__(self, h: Tensor, condition: Tensor | None = None) -> Tensor: ...

    def forward(self, h: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return :meth:`elbo`; wrappers such as DistributedDataParallel call ``forward`` for training."""
        return self.elbo(h, condition)

    def push(self, h: Tensor, m: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        r"""Map points from the base distribution at :math:`t_0` to the data at T.

        Arguments:
            h: position (..., dim).
            m: momentum (..., dim).
            condition: (..., condition_dim). Default: None, for a flow without a condition.

        Returns:
            h and m at T, and the log-determinant of the map, :math:`-\gamma D (T - t_0)`, with the batch shape.
        """
        return self._move(h, m, condition, forwards=True)

    def pull(self, h: Tensor, m: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        r"""Map points from the data at T to the base distribution at :math:`t_0`, the inverse of :meth:`push`.

        Arguments:
            h: position (..., dim).
            m: momentum (..., dim).
            condition: (..., condition_dim). Default: None, for a flow without a condition.

        Returns:
            h and m at :math:`t_0`, and the log-determinant of the map, :math:`\gamma D (T - t_0)`.
        """
        return self._move(h, m, condition, forwards=False)

    def log_prob(self, h: Tensor, m: Tensor, condition: Tensor | None = None) -> Tensor:
        r"""Return the exact log-density :math:`\log p_T(h, m)` of points on phase space, with the batch shape.

        Arguments:
            h: position (..., dim).
            m: momentum (..., dim).
            condition: (..., condition_dim). Default: None, for a flow without a condition.
        """
        h, m, log_determinant = self.pull(h, m, condition)
        return _log_normal(h) + _log_normal(m) + log_determinant

    def posterior(self, h: Tensor, condition: Tensor | None = None) -> Independent:
        r"""Return the posterior distribution :math:`q(m \mid h)` of the momentum, with event shape (dim,).

        Arguments:
            h: position (..., dim).
            condition: (..., condition_dim). Default: None, for a flow without a condition.

        Raises:
            ValueError: if the module ``posterior`` does not return means and log standard deviations of m.
        """
        condition = self._check_inputs(h, condition)
        value = self.posterior_net(h) if condition is None else self.posterior_net(h, condition)
        wanted = (*h.shape[:-1], 2 * self.dim)
        if not isinstance(value, Tensor) or value.shape != wanted:
            raise ValueError(
                f"posterior returned {describe(value)}; expected means and log standard deviations of m, {wanted}. "
                f"Fix: make its last layer's output size {2 * self.dim}."
            )
        mean, log_std = value.to(h.dtype).chunk(2, -1)  # autocast may return half precision
        return Independent(Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)

    def elbo(self, h: Tensor, condition: Tensor | None = None) -> Tensor:
        r"""Estimate a lower bound of the log-density :math:`\log p_T(h)` by one sample of the momentum m.

        .. math:: \log p_T(h, m) - \log q(m \mid h), \qquad m \sim q(m \mid h)

        The expectation over m is at most :math:`\log p_T(h)`. torch's default generator draws m. The result has the
        batch shape of h.

        Arguments:
            h: position (..., dim).
            condition: (..., condition_dim). Default: None, for a flow without a condition.
        """
        q = self.posterior(h, condition)
        m = q.rsample()
        log_q = q.base_dist.log_prob(m).sum(-1)  # q.log_prob(m) raises an error for an empty batch
        return self.log_prob(h, m, condition) - log_q

    def log_prob_bound(self, h: Tensor, samples: int, condition: Tensor | None = None) -> Tensor:
        r"""Estimate a lower bound of the log-density :math:`\log p_T(h)` by importance weighting.

        .. math:: \log \frac{1}{K} \sum_{k=1}^{K} \frac{p_T(h, m_k)}{q(m_k \mid h)}, \qquad m_k \sim q(m \mid h)

        The expectation is at most :math:`\log p_T(h)`, and approaches it as K grows. One solve maps K points per h, so
        memory grows with K. The result has the batch shape of h.

        Arguments:
            h: position (..., dim).
            samples: number K of momenta for each h.
            condition: (..., condition_dim). Default: None, for a flow without a condition.
        """
        count = as_count(samples, "samples")
        check_input(h, "h")
        return self.elbo(h.expand(count, *h.shape), condition).logsumexp(0) - math.log(count)

    def sample(self, n: int | Sequence[int] = (), condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw points (h, m) from the density at T, without an autograd graph.

        Arguments:
            n: number or shape of the samples, as in torch.distributions. Default: (), one sample.
            condition: (..., condition_dim); ``n`` samples are drawn per condition. Default: None.

        Returns:
            h and m, both of shape ``(*n, *condition.shape[:-1], dim)``.
        """
        with torch.no_grad():
            return self.rsample(n, condition)

    def rsample(self, n: int | Sequence[int] = (), condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw points (h, m) from the density at T, differentiable with respect to the parameters.

        Arguments:
            n: number or shape of the samples. Default: (), one sample.
            condition: (..., condition_dim); ``n`` samples are drawn per condition. Default: None.

        Returns:
            h and m, both of shape ``(*n, *condition.shape[:-1], dim)``.
        """
        h, m, _ = self.rsample_and_log_prob(n, condition)
        return h, m

    def rsample_and_log_prob(
        self, n: int | Sequence[int] = (), condition: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw differentiable points (h, m) from the density at T, with their exact log-densities, in one solve.

        Arguments:
            n: number or shape of the samples. Default: (), one sample.
            condition: (..., condition_dim); ``n`` samples are drawn per condition. Default: None.

        Returns:
            h and m as from :meth:`rsample`, and ``log_prob(h, m, condition)``.
        """
        sizes = (n,) if not isinstance(n, Sequence) else n
        shape = tuple(as_count(size, "n", least=0) for size in sizes)
        if condition is not None:
            check_input(condition, "condition")
            shape += condition.shape[:-1]
        noise = torch.randn(2, *shape, self.dim, dtype=self.anchor.dtype, device=self.anchor.device)
        start = _log_normal(noise).sum(0)
        h, m, log_determinant = self.push(noise[0], noise[1], condition)
        return h, m, start - log_determinant

    def _move(self, h: Tensor, m: Tensor, condition: Tensor | None, *, forwards: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Move points from one end of ``t_span`` to the other; return h and m there, and the log-determinant."""
        condition = self._check_inputs(h, condition)
        check_input(m, "m")
        if m.shape != h.shape or m.dtype != h.dtype:
            raise ValueError(
                f"m must have the dtype and shape of h, {h.dtype} and {tuple(h.shape)}; got {m.dtype} and "
                f"{tuple(m.shape)}. Fix: m = torch.randn_like(h), for instance."
            )
        state = h.reshape(-1, self.dim), m.reshape(-1, self.dim)
        if condition is not None:  # part of the state, so that it gets a gradient in every mode
            rows = condition.reshape(-1, self.condition_dim)
            state = torch.cat([state[0], rows], 1), torch.cat([state[1], torch.zeros_like(rows)], 1)
        start, end = self.t_span if forwards else self.t_span[::-1]
        settings = Settings(method=self.method, gradient=self.gradient, steps=self.steps).checked()
        points = solve(self.field, state, [start, end], settings, NFE(), end=True)
        # the outputs are not reshaped if possible: a network that stores reshaped outputs could not be freed
        moved = points if points[0].shape == h.shape else [x[:, : self.dim].reshape(h.shape) for x in points]
        damping = self.field.damping
        total = damping.expand(self.dim).sum() if isinstance(damping, Tensor) else self.dim * damping
        log_determinant = moved[0].new_zeros(h.shape[:-1]) + (start - end) * total
        return moved[0], moved[1], log_determinant.to(moved[0].dtype)

    def _check_inputs(self, h: Tensor, condition: Tensor | None) -> Tensor | None:
        check_input(h, "h")
        if h.dim() == 0 or h.shape[-1] != self.dim:
            fix = "h.unsqueeze(-1)" if self.dim == 1 else f"HeavyBallFlow(func, {h.shape[-1] if h.dim() else 1})"
            raise ValueError(f"h must be (..., {self.dim}), got {describe(h)}. Fix: {fix}.")
        if h.dtype != self.anchor.dtype:
            raise TypeError(
                f"h is {h.dtype}, the flow is {self.anchor.dtype}; expected one dtype. "
                f"Fix: h.to({self.anchor.dtype}){f', or flow.to({h.dtype})' if h.is_floating_point() else ''}."
            )
        if (condition is None) != (self.condition_dim == 0):
            got, fix = "a condition", "HeavyBallFlow(condition_dim=n)"
            if condition is None:
                got, fix = "no condition", f"pass condition= (..., {self.condition_dim})"
            raise ValueError(f"the flow has condition_dim={self.condition_dim} and got {got}. Fix: {fix}.")
        if condition is None:
            return None
        check_input(condition, "condition")
        wanted_shape = (*h.shape[:-1], self.condition_dim)
        try:
            if condition.dim() == 0 or condition.shape[-1] != self.condition_dim:
                raise RuntimeError
            return condition.to(h.dtype).expand(wanted_shape)
        except RuntimeError:
            raise ValueError(
                f"condition must broadcast to {wanted_shape}, got {describe(condition)}. "
                f"Fix: a last dimension of {self.condition_dim}, preceded by the batch dimensions of h."
            ) from None

    def extra_repr(self) -> str:
        condition = f", condition_dim={self.condition_dim}" if self.condition_dim else ""
        return f"{self.dim}, t_span={self.t_span}, method={self.method!r}, steps={self.steps}{condition}"


def _log_normal(x: Tensor) -> Tensor:
    return -0.5 * (x.square() + math.log(2 * math.pi)).sum(-1)
