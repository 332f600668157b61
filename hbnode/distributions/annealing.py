"""Annealed underdamped Langevin dynamics: samples, log weights and normalising constants of unnormalised densities."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.utils.checkpoint import checkpoint as recomputed
from typing_extensions import override

from hbnode import _torch
from hbnode._checks import as_count, as_numbers, as_seed, check_bool, takes_time
from hbnode.errors import NonFiniteError

_NORMAL = "torch.distributions.Independent(torch.distributions.Normal(torch.zeros(d), torch.ones(d)), 1)"


class LogZ(NamedTuple):
    """An estimate of log Z, where Z is the integral of an unnormalised density.

    Attributes:
        estimate: the estimate, a scalar.
        standard_error: its standard error, a scalar.
    """

    estimate: Tensor
    standard_error: Tensor


class _Paths(NamedTuple):
    """The state of n paths after a leapfrog step. The first dimension of each tensor is n."""

    x: Tensor
    m: Tensor
    force: Tensor  # force f_k at x, which HeavyBallAnnealing defines
    log_density: Tensor  # log of the annealed density at x
    kinetic: Tensor  # sum of log N(m'; 0, 1) - log N(m; 0, 1) over the steps
    steps: Tensor  # number of steps with finite values
    is_force: Tensor  # whether the first value that was not finite was a force


class HeavyBallAnnealing(nn.Module):
    r"""A sampler and estimator of log Z for unnormalised densities, by annealed underdamped Langevin dynamics.

    Z is the integral of the density :math:`\tilde\pi(x) = e^{\text{log\_prob}(x)}`. A path starts at
    :math:`x_0 \sim q`, where q is the prior, with a momentum :math:`m'_0 \sim \mathcal{N}(0, I)`. It moves through
    the densities :math:`\pi_k \propto q^{1-\beta_k}\, \tilde\pi^{\beta_k}` with
    :math:`0 = \beta_0 \le \dots \le \beta_K = 1`. Step k refreshes the momentum and makes a leapfrog step of size H:

    .. math::
        m_k &= b\, m'_{k-1} + \sqrt{1 - b^2}\, \xi_k, \qquad b = e^{-\gamma H}, \quad \xi_k \sim \mathcal{N}(0, I) \\
        x_k &= x_{k-1} + H\, (m_k + \tfrac{H}{2} f_{k-1}(x_{k-1})) \\
        m'_k &= m_k + \tfrac{H}{2} f_{k-1}(x_{k-1}) + \tfrac{H}{2} f_k(x_k), \qquad
        f_k(x) = \nabla \log \pi_k(x) + u(k/K, x)

    γ is the damping and u an optional network. Each refreshment combines two half refreshments of consecutive OBABO
    steps. The log weight

    .. math::
        \log w = \text{log\_prob}(x_K) - \log q(x_0)
        + \sum_k [\log \mathcal{N}(m'_k; 0, I) - \log \mathcal{N}(m_k; 0, I)]

    satisfies :math:`E[w] = Z` for any force, step size and damping. Hence :math:`E[\log w] \le \log Z`. Training
    maximises :meth:`bound` over the step size, the damping, the schedule and u. Its gradient is exact and needs second
    derivatives of ``log_prob``.

    A path evaluates ``log_prob`` and its gradient ``steps`` times. An infinite damping gives annealed overdamped
    (unadjusted) Langevin dynamics with step :math:`H^2/2`. There is no temperature, because it would only rescale
    H and γ: momenta of variance η with H and γ give the same paths as momenta of variance 1 with
    :math:`\sqrt\eta H` and :math:`\gamma/\sqrt\eta`.

    ``annealing.parameters()``, ``.to(device)`` and ``state_dict`` exclude ``log_prob`` and ``prior``. The samples have
    the dtype and device of the prior.

    References:
        Neal, Annealed Importance Sampling, arXiv:physics/9803008. Geffner and Domke, MCMC Variational Inference via
        Uncorrected Hamiltonian Annealing, arXiv:2107.04150. Zhang et al., Differentiable Annealed Importance Sampling
        and the Perils of Gradient Noise, arXiv:2107.10211.

    Arguments:
        log_prob: function of points (n, d) that returns the log density up to a constant, (n,). It must be
            differentiable by autograd. A path whose log density is ``-inf`` at its end has the weight 0.
        prior: distribution q on all of R^d, with batch shape () and event shape (d,).
        steps: number of steps K.
        step_size: initial H, a positive number or a tensor (d,). Default: ``0.1``.
        damping: initial γ, in inverse units of H: a positive number, ``math.inf``, or a tensor (d,). An infinite
            damping is not learned. Default: ``1.0``.
        schedule: initial β, ``steps + 1`` numbers that increase from 0 to 1. None is equally spaced. Default: None.
        force: the network u, a module or a function of ``(x)`` or ``(t, x)`` with t = k/K, which returns the shape of
            x. A last layer of zeros makes the initial u zero. Default: None.
        learn_step_size: whether H requires a gradient. Default: True.
        learn_damping: whether γ requires a gradient. Default: True.
        learn_schedule: whether β requires a gradient. Default: True.
        checkpoint: whether to save only the state of the paths at each step, and recompute ``log_prob`` and the force
            in the backward pass. This saves memory, at the cost of three evaluations per step. Default: False.

    Raises:
        ValueError: if an argument is out of its range, or the prior or ``log_prob`` has a wrong shape.
        NonFiniteError: if a path overflows, its force is not finite, or its log weight is NaN or inf. ``bound`` also
            raises it if a log weight is -inf, and ``log_z`` if all log weights are -inf.

    Example:
        The integral of exp(-(a² + b²)/8) over the plane (a, b) is 8π.

        >>> import math, torch, hbnode
        >>> from torch.distributions import Independent, Normal
        >>> prior = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
        >>> log_density = lambda x: -x.square().sum(-1) / 8
        >>> annealing = hbnode.distributions.HeavyBallAnnealing(log_density, prior, steps=32, step_size=0.3)
        >>> x, log_weight = annealing.sample(1000, seed=0)
        >>> x.shape, log_weight.shape
        (torch.Size([1000, 2]), torch.Size([1000]))
        >>> estimate, error = annealing.log_z(1000, seed=0)
        >>> bool(abs(estimate - math.log(8 * math.pi)) < 3 * error)
        True
        >>> optimizer = torch.optim.Adam(annealing.parameters(), lr=0.05)
        >>> for _ in range(10):
        ...     optimizer.zero_grad()
        ...     (-annealing.bound(64)).backward()
        ...     optimizer.step()
    """

    log_prob: Callable[[Tensor], Tensor]
    prior: Distribution

    def __init__(
        self,
        log_prob: Callable[[Tensor], Tensor],
        prior: Distribution,
        steps: int,
        *,
        step_size: float | Tensor = 0.1,
        damping: float | Tensor = 1.0,
        schedule: Tensor | Sequence[float] | None = None,
        force: Callable[..., Tensor] | None = None,
        learn_step_size: bool = True,
        learn_damping: bool = True,
        learn_schedule: bool = True,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        if not callable(log_prob):
            fix = "target.log_prob" if hasattr(log_prob, "log_prob") else "a function of points (n, d)"
            raise TypeError(f"log_prob must be a function, got {type(log_prob).__name__}. Fix: pass {fix}.")
        if force is not None and not callable(force):
            raise TypeError(f"force must be a module or a function, got {type(force).__name__}. Fix: hbnode.nn.MLP.")
        self.dim = _event_size(prior)
        steps = as_count(steps, "steps")
        flags = {"learn_step_size": learn_step_size, "learn_damping": learn_damping, "learn_schedule": learn_schedule}
        for name, flag in (flags | {"checkpoint": checkpoint}).items():
            check_bool(flag, name)
        self.checkpoint = checkpoint
        # a normal assignment would register modules, so that their parameters would be trained
        self.__dict__.update(log_prob=log_prob, prior=prior)
        log_step_size = _as_log(step_size, self.dim, "step_size", 0.1)
        log_damping = _as_log(damping, self.dim, "damping", 1.0)
        if not log_step_size.isfinite().all():
            raise ValueError("step_size must be finite. Fix: step_size=0.1.")
        self.log_step_size = nn.Parameter(log_step_size, requires_grad=learn_step_size)
        is_finite = bool(log_damping.isfinite().all())
        self.log_damping = nn.Parameter(log_damping, requires_grad=learn_damping and is_finite)
        self.log_increments = nn.Parameter(_as_log_increments(schedule, steps, learn_schedule), learn_schedule)
        self.force = force
        self._takes_time = force is not None and takes_time(force, 1)

    @property
    def steps(self) -> int:
        """The number of steps K."""
        return len(self.log_increments)

    @property
    def step_size(self) -> Tensor:
        """The current step size H, of shape () or (d,)."""
        return self.log_step_size.exp()

    @property
    def damping(self) -> Tensor:
        """The current damping γ, of shape () or (d,)."""
        return self.log_damping.exp()

    @property
    def schedule(self) -> Tensor:
        """The current schedule β, of shape (steps + 1,)."""
        inner = self.log_increments.softmax(0).cumsum(0)[:-1]
        return torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])

    def sample(self, n: int, *, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Draw weighted samples without an autograd graph.

        Arguments:
            n: number of paths.
            seed: integer seed of the paths, which leaves the state of torch's generators unchanged. None draws from
                torch's generators. Default: None.

        Returns:
            The final points x (n, d) and their log weights (n,). A mean over x with the self-normalised weights
            ``log_weight.softmax(0)`` estimates an expectation under the target density.
        """
        with torch.no_grad():
            return self.rsample(n, seed=seed)

    def rsample(self, n: int, *, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Draw weighted samples that are differentiable with respect to the parameters.

        Arguments:
            n: number of paths.
            seed: as in :meth:`sample`. Default: None.

        Returns:
            The final points x (n, d) and their log weights (n,).

        Raises:
            ValueError: in transforms of torch.func, or if the prior's samples are on another device.
        """
        n = as_count(n, "n", least=0)
        if _torch.is_transformed():
            raise ValueError(
                "annealing computes gradients of log_prob by autograd, which does not work in transforms of "
                "torch.func (grad, vmap, jvp, ...) or in forward mode. Fix: rsample(n) or bound(n) outside of them, "
                "and .backward()."
            )
        is_differentiated = torch.is_grad_enabled()
        # the force is a gradient, which cannot be computed in inference mode
        device = self.log_step_size.device
        fork = torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=seed is not None)
        with fork, torch.inference_mode(False), torch.set_grad_enabled(is_differentiated):
            if seed is not None:
                torch.manual_seed(as_seed(seed))
            draw = self.prior.rsample if is_differentiated and self.prior.has_rsample else self.prior.sample
            x = draw(torch.Size([n]))
            if x.device != device:
                raise ValueError(
                    f"the prior draws on {x.device}, but the step size is on {device}. "
                    f"Fix: annealing.to({str(x.device)!r}), or a prior whose tensors are on {device}."
                )
            return self._run(x) if n else (x, x.new_zeros(0))

    def bound(self, n: int, *, seed: int | None = None) -> Tensor:
        """Return the mean log weight of n paths, whose expectation is a lower bound of log Z. Training maximises it.

        Arguments:
            n: number of paths.
            seed: as in :meth:`sample`. Default: None.

        Returns:
            The mean, a scalar.

        Raises:
            ValueError: if a log weight is minus infinity.
        """
        _, log_weight = self.rsample(as_count(n, "n"), seed=seed)
        mean = log_weight.mean()
        if mean.detach() == -math.inf:
            raise self._error(
                f"{int((log_weight == -math.inf).sum())} of {n} log weights are -inf, so the bound is -inf and has no "
                "gradient. Fix: a log_prob that is finite on all of R^d, or log_z, which accepts weights of 0.",
                self.steps,
            )
        return mean

    def log_z(self, n: int, *, seed: int | None = None) -> LogZ:
        r"""Estimate log Z by the log of the mean weight of n paths.

        The standard error is :math:`s / (\bar w \sqrt n)` by the delta method, with the mean :math:`\bar w` and the
        standard deviation s of the weights. The bias of the estimate is about minus half the square of this error.
        An error near 1 means that few paths dominate the mean; both numbers are then unreliable.

        Arguments:
            n: number of paths, at least 2.
            seed: as in :meth:`sample`. Default: None.

        Returns:
            ``LogZ(estimate, standard_error)``, two scalars.

        Raises:
            ValueError: if all weights are 0.
        """
        _, log_weight = self.sample(as_count(n, "n", least=2), seed=seed)
        largest = log_weight.max()
        if largest == -math.inf:
            raise self._error(
                f"all {n} weights are 0, because log_prob is -inf at all final points. Fix: a prior that covers the "
                "support of log_prob, or more paths.",
                self.steps,
            )
        w = (log_weight - largest).exp()
        return LogZ(largest + w.mean().log(), w.std() / (w.mean() * math.sqrt(n)))

    @override
    def forward(self, n: int, *, seed: int | None = None) -> Tensor:
        """Call :meth:`bound` with the same arguments; wrappers such as DistributedDataParallel call ``forward``."""
        return self.bound(n, seed=seed)

    def _run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run all annealing steps, with the paths starting at the points x (n, d).

        Return the final points (n, d), and the log weights (n,) of the paths.
        """
        schedule, step_size = self.schedule.to(x.dtype), self.step_size.to(x.dtype)
        gamma = self.damping.to(x.dtype)
        # for γ = inf, the backward pass would multiply inf by the gradient 0 of the exponential, which is NaN
        decay = torch.where(gamma.isinf(), math.inf, torch.where(gamma.isinf(), 1, gamma) * step_size)
        coefficients = step_size, (-decay).exp(), (-torch.expm1(-2 * decay)).sqrt()
        force, log_q = self._force(x, 0, schedule)
        count = torch.zeros(len(x), dtype=torch.long, device=x.device)
        state = _Paths(x, torch.randn_like(x), force, log_q, torch.zeros_like(log_q), count, count > 0)
        step: Callable[..., _Paths] = self._step
        # one checkpoint per step: in a checkpoint over several steps, the force of each would recompute all of them
        if self.checkpoint and torch.is_grad_enabled():
            step = functools.partial(recomputed, self._step, use_reentrant=False)
        for k in range(1, self.steps + 1):
            state = step(state, k, schedule, *coefficients)
        log_weight = state.log_density - log_q + state.kinetic
        self._check_end(state, log_weight)
        return state.x, log_weight

    def _step(self, state: _Paths, k: int, schedule: Tensor, size: Tensor, decay: Tensor, noise: Tensor) -> _Paths:
        """Partially refresh the momentum of the paths, then make leapfrog step k; return their new state.

        ``decay`` is the factor of the old momentum in the refreshment, and ``noise`` is the factor of the noise ξ_k.
        """
        m = decay * state.m + noise * torch.randn_like(state.m)
        x = state.x + size * (m + size / 2 * state.force)
        is_finite = x.isfinite().all(-1)
        x = torch.where(is_finite[:, None], x, 0)  # distributions raise errors for inf; _check_end counts this path
        force, log_density = self._force(x, k, schedule)
        kick = size / 2 * (state.force + force)
        kinetic = state.kinetic - (kick * (m + kick / 2)).sum(-1)
        was_finite = state.steps == k - 1
        has_force = force.isfinite().all(-1)
        steps = state.steps + (was_finite & is_finite & has_force & kinetic.isfinite())
        is_force = state.is_force | (was_finite & is_finite & ~has_force)
        return _Paths(x, m + kick, force, log_density, kinetic, steps, is_force)

    def _force(self, x: Tensor, k: int, schedule: Tensor) -> tuple[Tensor, Tensor]:
        """Return the force f_k (n, d) at the points x (n, d), and the log of the annealed density at x, (n,).

        k is the number of the step, and ``schedule`` is β.
        """
        is_differentiated = torch.is_grad_enabled()
        with torch.enable_grad():
            at = x if is_differentiated and x.requires_grad else x.detach().requires_grad_()
            parts = []
            if k < self.steps:
                parts.append((1 - schedule[k]) * self.prior.log_prob(at))
            if k > 0:
                parts.append(schedule[k] * self._target(at))
            log_density = sum(parts[1:], parts[0])
            (force,) = torch.autograd.grad(log_density.sum(), at, create_graph=is_differentiated)
        if self.force is not None:
            force = force + self._learned_force(at, k)
        return (force, log_density) if is_differentiated else (force.detach(), log_density.detach())

    def _target(self, x: Tensor) -> Tensor:
        try:
            value = self.log_prob(x)
        except ValueError as error:
            if "within the support" not in str(error):  # the message of torch.distributions
                raise
            raise ValueError(
                "log_prob must be defined on all of R^d, got a point outside of its support. Fix: unbounded "
                "coordinates, with the log-determinant of their transform in log_prob, or -inf outside of the support."
            ) from error
        if not isinstance(value, Tensor):
            raise TypeError(f"log_prob must return a tensor, got {type(value).__name__}. Fix: write it in torch.")
        if value.shape != x.shape[:1]:
            fix = {(len(x), 1): "log_prob(x).squeeze(-1)", tuple(x.shape): "log_prob(x).sum(-1)"}
            raise ValueError(
                f"log_prob must map ({len(x)}, {x.shape[1]}) to ({len(x)},), got {tuple(value.shape)}. "
                f"Fix: {fix.get(tuple(value.shape), 'sum over the last dimension only, with .sum(-1)')}."
            )
        if not value.requires_grad:
            raise ValueError(
                "log_prob must return a tensor with a graph to x. Fix: remove .detach(), torch.no_grad() and numpy "
                "from log_prob; if it is constant, add 0 * x.sum(-1)."
            )
        return value

    def _learned_force(self, x: Tensor, k: int) -> Tensor:
        force: Any = self.force
        dtypes = {p.dtype for p in force.parameters()} if isinstance(force, nn.Module) else {x.dtype}
        if dtypes and x.dtype not in dtypes:
            raise TypeError(
                f"the prior draws {x.dtype}, but the force has parameters of {dtypes.pop()}. "
                f"Fix: annealing.to({x.dtype})."
            )
        u = force(x.new_full((), k / self.steps), x) if self._takes_time else force(x)
        if not isinstance(u, Tensor) or u.shape != x.shape:
            got = tuple(u.shape) if isinstance(u, Tensor) else type(u).__name__
            raise ValueError(
                f"force must return the shape of x, {tuple(x.shape)}, got {got}. Fix: {x.shape[1]} outputs."
            )
        return u

    def _check_end(self, state: _Paths, log_weight: Tensor) -> None:
        """Raise NonFiniteError if paths or log weights are not finite; the message gives how many, and the cause."""
        is_lost = (state.steps < self.steps) | log_weight.isnan() | (log_weight == math.inf)
        if not bool(is_lost.any()):
            return
        first = int(state.steps[is_lost].min()) + 1
        who = f"{int(is_lost.sum())} of {len(is_lost)} paths"
        if first > self.steps:
            what = f"the log weights of {who} are nan or inf. Fix: a log_prob that returns finite numbers or -inf."
        elif bool((state.is_force & (state.steps == first - 1)).any()):
            what = (
                f"the force is not finite on {who}, first in step {first} of {self.steps}. Fix: a log_prob whose "
                "gradient is finite, or a smaller step_size if x grows."
            )
        else:
            what = f"{who} overflow, first in step {first} of {self.steps}. Fix: a smaller step_size."
        raise self._error(what, first)

    def _error(self, what: str, step: int) -> NonFiniteError:
        size = float(self.step_size.detach().mean())
        return NonFiniteError(what, t=min(step / self.steps, 1.0), step_size=size, nfe=min(step, self.steps))

    @override
    def extra_repr(self) -> str:
        entries = []
        for name in ("step_size", "damping"):
            value = getattr(self, name).detach()
            number = f"{value.mean().item():.4g}" if not value.is_meta else "unknown"
            entries.append(f"{name}={number}" + (f" of shape {tuple(value.shape)}" if value.dim() else ""))
        return f"dim={self.dim}, steps={self.steps}, " + ", ".join(entries)


def _event_size(prior: object) -> int:
    """Return the dimension d of the prior; raise an error unless ``prior`` is a distribution on R^d."""
    if not isinstance(prior, Distribution):
        raise TypeError(f"prior must be a torch.distributions object, got {type(prior).__name__}. Fix: {_NORMAL}.")
    batch, event = tuple(prior.batch_shape), tuple(prior.event_shape)
    if batch or len(event) != 1:
        wraps = len(batch) == 1 and not event
        raise ValueError(
            f"prior must have batch shape () and event shape (d,), got {batch} and {event}. "
            f"Fix: {'torch.distributions.Independent(prior, 1)' if wraps else _NORMAL}."
        )
    support: Any = None
    with suppress(NotImplementedError):
        support = prior.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    if support is not None and not isinstance(support, type(constraints.real)):
        raise ValueError(
            f"prior must be a distribution on all of R^d, got the support {support}. Fix: sample "
            f"unbounded coordinates and transform them in log_prob, with {_NORMAL}."
        )
    return event[0]


def _as_log(value: float | Tensor, dim: int, name: str, usual: float) -> Tensor:
    given = as_numbers(value, name, f"{name}={usual}", torch.get_default_dtype(), device=None)
    if given.shape not in (torch.Size([]), torch.Size([dim])):
        raise ValueError(
            f"{name} must be a number or a tensor ({dim},), got shape {tuple(given.shape)}. Fix: {name}={usual}."
        )
    if not bool((given > 0).all()):
        raise ValueError(f"{name} must be positive, got {given.tolist()}. Fix: {name}={usual}.")
    return given.log()


def _as_log_increments(schedule: Tensor | Sequence[float] | None, steps: int, is_learned: bool) -> Tensor:
    """Check a schedule β, or make the default one; return log(β_k - β_{k-1}) for its steps k, (steps,).

    The logarithms are correct up to an additive constant.
    """
    if schedule is None:
        return torch.zeros(steps)
    fix = f"Fix: torch.linspace(0, 1, {steps + 1}), or leave it out."
    given = as_numbers(schedule, "schedule", f"torch.linspace(0, 1, {steps + 1})", device=None)
    if given.shape != (steps + 1,):
        raise ValueError(f"schedule must be ({steps + 1},), steps + 1, got shape {tuple(given.shape)}. {fix}")
    increments = given.diff()
    if given[0] != 0 or given[-1] != 1 or not bool((increments >= 0).all()):
        raise ValueError(f"schedule must increase from 0 to 1, got {given.tolist()}. {fix}")
    if is_learned and bool((increments == 0).any()):
        raise ValueError("a learned schedule must increase in every step. Fix: learn_schedule=False.")
    return increments.log().to(torch.get_default_dtype())
