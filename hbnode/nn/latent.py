"""Latent ODEs and SDEs: generative models of irregular series, trained by the evidence lower bound (ELBO)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
from torch import Tensor, nn
from torch.distributions import Normal, StudentT, kl_divergence
from torch.nn.functional import pad
from typing_extensions import Unpack, override

from hbnode._checks import ArrayLike, as_count, refuse_meta
from hbnode._times import as_times, check_digits
from hbnode._torch import untraced
from hbnode._tree import Record, State, record
from hbnode.fields import HBNODE, Field, HeavyBallSDE
from hbnode.nn import sequences as seq
from hbnode.nn._signatures import shares_arguments
from hbnode.nn.nets import MLP
from hbnode.nn.sequences import Inputs, Lengths, Sequences
from hbnode.solve.odeint import odeint
from hbnode.solve.sde import sdeint
from hbnode.solve.settings import Gradient, Method, Settings

__all__ = ["ELBO", "LatentModel", "LatentODE", "LatentPrediction", "LatentSDE"]

Likelihood = Literal["normal", "student"]
ROUNDING = 1e-4  # a step that starts at a sample may start this much before it by rounding, in units of time_unit


# Results


@record
class ELBO(Record):
    """The evidence lower bound of each series, and its terms; all have the shape (batch,).

    Attributes:
        value: log_likelihood - beta (kl_initial + kl_path). With beta = 1 its expectation is at most log p(x).
        log_likelihood: log density of the observed values given the latent paths, summed over a series.
        kl_initial: Kullback-Leibler divergence of the posterior of the initial state from its prior.
        kl_path: Kullback-Leibler divergence of the posterior of the paths from their prior, given the initial states; 0
            for a latent ODE.
    """

    value: Tensor
    log_likelihood: Tensor
    kl_initial: Tensor
    kl_path: Tensor


@record
class LatentPrediction(Record):
    """The predictive distribution of a latent model, a mixture with one component for each sampled path.

    Attributes:
        paths: decoded paths without observation noise, (samples, batch, K, input_size).
        scale: scale of the observation noise of each feature, (input_size,).
        freedom: degrees of freedom of Student's t noise, (input_size,); None if the noise is normal.
    """

    paths: Tensor
    scale: Tensor
    freedom: Tensor | None = None

    @property
    def components(self) -> Normal | StudentT:
        """The distribution of each value given a path, in the shape of ``paths``; the mixture is over the paths."""
        if self.freedom is None:
            return Normal(self.paths, self.scale, validate_args=False)
        return StudentT(self.freedom, self.paths, self.scale, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """The means of the predicted values, (batch, K, input_size)."""
        return self.paths.mean(0)

    @property
    def std(self) -> Tensor:
        """The standard deviations of the predicted values, with observation noise, (batch, K, input_size)."""
        return (self.paths.var(0, correction=0) + self.components.variance[0]).sqrt()

    def quantile(self, levels: float | Sequence[float]) -> Tensor:
        """Return quantiles of the predicted values, estimated by one draw of the observation noise for each path.

        Arguments:
            levels: probabilities between 0 and 1, such as ``[0.05, 0.5, 0.95]`` for the median and a 90 % interval.

        Returns:
            The quantiles, (levels, batch, K, input_size), or (batch, K, input_size) for a single level.
        """
        return torch.quantile(self.components.sample(), torch.as_tensor(levels).to(self.paths), dim=0)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log density of each of the values x (batch, K, input_size)."""
        return self.components.log_prob(x).logsumexp(0) - math.log(len(self.paths))


# Models


class Guide:
    """The control of the posterior paths of a latent SDE, which depends on the encoder's summaries of later samples.

    Arguments:
        summary: outputs of the encoder (batch, N, features). It reads the samples from the last to the first, so that
            ``summary[:, j]`` summarises the samples at ``times[:, j]`` and later.
        times: times of the samples in this order, decreasing, (batch, N); -inf after the first sample.
        grid: output times of the paths, (batch, T). They include the times of the samples.
    """

    def __init__(self, summary: Tensor, times: Tensor, grid: Tensor) -> None:
        self.start = grid[:, :1]  # origin of the control's time; large float32 times would lose digits
        times, grid = times - self.start, grid - self.start
        later = torch.searchsorted(-times, -(grid + ROUNDING))  # number of samples after each time
        following = (later - 1).clamp(min=0)
        # one tensor per interval, because the backward pass of an index would allocate the whole gradient in each step
        self.summaries = summary.take_along_dim(following.unsqueeze(-1), 1).unbind(1)
        self.active = (later > 0).T.unsqueeze(-1)
        self.next = torch.where(later > 0, times.gather(1, following), 0.0).T.unsqueeze(-1)
        self.grid = grid

    def control(self, net: nn.Module, t: Tensor, h: Tensor) -> Tensor:
        """Return the control ``net([h, summary, wait])``, or 0 after the last sample.

        ``summary`` is the encoder's summary of the samples after t, and ``wait`` is the time from t until the first of
        these samples. h has the shape (samples * batch, latent_size). t is a number or (samples * batch, 1), counted
        from ``start``.
        """
        batch = len(self.grid)
        t = t.to(self.grid).reshape(-1, 1)[:batch].expand(batch, 1)
        # if several next times are equal, the next sample is at the end of this interval or of a later one
        interval = int(torch.searchsorted(self.grid, t + ROUNDING, right=True).min()) - 1
        summary, active = self.summaries[interval], self.active[interval]
        wait = torch.where(active, self.next[interval] - t, 0.0).to(h)
        known = torch.cat([summary, wait], 1).repeat(len(h) // batch, 1)
        u: Tensor = net(torch.cat([h, known], 1))
        if u.shape != h.shape:
            raise ValueError(
                f"control returned shape {tuple(u.shape)}; expected that of h, {tuple(h.shape)}. "
                f"Fix: {h.shape[1]} outputs in its last layer."
            )
        return torch.where(active.repeat(len(h) // batch, 1), u, 0.0)


class LatentOptions(TypedDict, total=False):
    """The keyword arguments of every latent model."""

    encoder: nn.Module | None
    decoder: Callable[[Tensor], Tensor] | None
    likelihood: Likelihood
    static_size: int
    time_unit: float


class LatentModel(seq.TimedModule):
    r"""The abstract base class of :class:`LatentODE` and :class:`LatentSDE`.

    A subclass defines :meth:`solve`, which computes latent paths and the divergence of their posterior from their
    prior.

    Arguments:
        input_size: number of features of a sample.
        latent_size: number of latent features, the inputs of the decoder.
        hidden_size: units of the default encoder.
        state_size: size of the random initial state.
        encoder: module with the arguments, results and ``hidden_size`` of :class:`hbnode.ODERNN`. Its times are in
            units of ``time_unit``. Default: ``None``, a GRU whose inputs include masks and elapsed times.
        decoder: module or callable (..., latent_size) -> (..., input_size) for the mean of x. Default: ``None``, a
            linear layer.
        likelihood: ``"normal"``, or ``"student"`` for Student's t noise, which outliers affect less. The scale and the
            degrees of freedom of each feature are learned. Default: ``"normal"``.
        static_size: number of time-independent features that the default encoder takes. Default: ``0``.
        time_unit: length of one unit of the model's time, a number in the unit of t. f is called with t / time_unit. It
            is saved in the ``state_dict``; :meth:`fit_time_unit` sets it. Default: ``1.0``.

    Raises:
        ValueError, TypeError: if an argument is out of its range, or times decrease.
    """

    def __init__(
        self,
        input_size: int,
        latent_size: int,
        hidden_size: int,
        state_size: int,
        *,
        encoder: nn.Module | None = None,
        decoder: Callable[[Tensor], Tensor] | None = None,
        likelihood: Likelihood = "normal",
        static_size: int = 0,
        time_unit: float = 1.0,
    ) -> None:
        super().__init__()
        self.input_size, self.latent_size = as_count(input_size, "input_size"), as_count(latent_size, "latent_size")
        self.time_unit = time_unit
        seq.check_choice(likelihood, "likelihood", get_args(Likelihood))
        hidden_size = as_count(hidden_size, "hidden_size")
        self.encoder = GRUEncoder(self.input_size, hidden_size, static_size) if encoder is None else encoder
        summary_size = getattr(self.encoder, "hidden_size", None)
        if not isinstance(self.encoder, nn.Module) or not isinstance(summary_size, int):
            raise TypeError(
                f"encoder must be a module like ODERNN with an attribute hidden_size, got {type(encoder).__name__}. "
                f"Fix: encoder=hbnode.ODERNN({input_size}, {hidden_size})."
            )
        self.summary_size = summary_size
        self.posterior = nn.Linear(self.summary_size, 2 * state_size)  # mean and log standard deviation
        self.prior = nn.Parameter(torch.zeros(2, state_size))
        self.decoder = nn.Linear(self.latent_size, self.input_size) if decoder is None else decoder
        self.log_noise = nn.Parameter(torch.full((self.input_size,), -1.0))
        self.log_freedom = nn.Parameter(torch.ones(self.input_size)) if likelihood == "student" else None

    @abstractmethod
    def solve(self, z: Tensor, t: Tensor, guide: Guide | None) -> tuple[Tensor, Tensor]:
        """Return the values of latent paths at given times, and the divergence of their posterior from their prior.

        Arguments:
            z: initial states at the first times, (batch, state_size).
            t: times (batch, T) in units of ``time_unit``, in float64.
            guide: summaries of later samples, for paths of the posterior; None for paths of the prior.

        Returns:
            Values for the decoder, (T, batch, latent_size), and an estimate of the divergence for each path, (batch,).
        """

    def elbo(
        self, x: Tensor, t: ArrayLike, mask: Tensor | None = None, lengths: Lengths | None = None,
        static: Tensor | None = None, *, samples: int = 1, beta: float = 1.0,
    ) -> ELBO:  # fmt: skip
        """Return an estimate of the evidence lower bound of each series; training maximises its ``value``.

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) if all series share them. They must not decrease.
            mask: which values are observed, bool (batch, T) or (batch, T, input_size); other values may be NaN.
                Default: ``None``.
            lengths: length of each series, (batch,). Default: ``None``.
            static: time-independent features for the encoder, (batch, static_size). Default: ``None``.
            samples: number of latent paths per series; the estimate is their average. Default: ``1``.
            beta: weight of the divergences in ``value``; raise it from 0 to 1 early in training if the posterior
                collapses to the prior. Default: ``1.0``.

        Returns:
            An :class:`ELBO`, whose ``value`` and terms have the shape (batch,).
        """
        series = Sequences(self.input_size, x, t, mask, lengths, self.time_unit)
        prediction, kl_initial, kl_path = self._posterior_paths(series, series.t, static, samples)
        log_prob = prediction.components.log_prob(series.x)
        if series.observed is not None:
            log_prob = torch.where(series.observed, log_prob, 0.0)
        log_likelihood = log_prob.sum((-2, -1)).mean(0)
        return ELBO(log_likelihood - beta * (kl_initial + kl_path), log_likelihood, kl_initial, kl_path)

    def forward(self, *args: Any, **kwargs: Any) -> ELBO:
        """Call :meth:`elbo` with the same arguments, and return its :class:`ELBO`."""
        return self.elbo(*args, **kwargs)

    if TYPE_CHECKING:  # nn.Module's returns Any
        __call__ = forward

    @torch.no_grad()
    def predict(
        self, x: Tensor, t: ArrayLike, mask: Tensor | None = None, lengths: Lengths | None = None,
        static: Tensor | None = None, *, at: ArrayLike | None = None, samples: int = 100,
    ) -> LatentPrediction:  # fmt: skip
        """Return the distribution of values at any times, given the samples of a series: smoothing and forecasts.

        No gradients are recorded.

        Arguments:
            x: samples. This and the next four arguments are those of :meth:`elbo`.
            t: times of the samples.
            mask: which values are observed. Default: ``None``.
            lengths: length of each series. Default: ``None``.
            static: time-independent features. Default: ``None``.
            at: times (K,) or (batch, K) in any order, none before the first time of a series. None takes
                the times ``t``; paths are then 0 on padding. Default: ``None``.
            samples: number of latent paths per series. Default: ``100``.

        Raises:
            ValueError: if a time in ``at`` is before the first time of its series.
        """
        series = Sequences(self.input_size, x, t, mask, lengths, self.time_unit)
        if at is None:
            prediction, *_ = self._posterior_paths(series, series.t, static, samples)
            return LatentPrediction(series.padded(prediction.paths), prediction.scale, prediction.freedom)
        wanted = seq.checked_at(at, series.t, self.time_unit).to(torch.float64)
        if not bool((wanted >= series.t[:, :1]).all()):
            raise ValueError(
                "at has a time before the first of t, where a path starts. Fix: an unobserved sample at an earlier "
                "time, with mask=False there."
            )
        # steps must end at the samples, because the control changes there
        merged, order = torch.cat([series.t.to(wanted), wanted], 1).sort(dim=1, stable=True)
        places = order.argsort(dim=1)[:, series.t.shape[1] :]
        prediction, *_ = self._posterior_paths(series, merged, static, samples)
        paths = prediction.paths.take_along_dim(places[None, ..., None], 2)
        return LatentPrediction(paths, prediction.scale, prediction.freedom)

    @torch.no_grad()
    def sample(self, t: ArrayLike, samples: int = 100) -> LatentPrediction:
        """Sample paths from the prior at the times t (T,), where the initial state is at ``t[0]``.

        Return a :class:`LatentPrediction` whose ``paths`` have the shape (samples, 1, T, input_size).
        """
        given = as_times(t, "t")
        refuse_meta(self.prior, "the module")
        check_digits(given, given.diff(), "t", self.time_unit)
        times = given.to(self.prior.device, torch.float64).expand(1, -1) / self.time_unit
        mean, log_scale = self.prior
        z = mean + log_scale.exp() * torch.randn(samples, len(mean), dtype=mean.dtype, device=mean.device)
        return self._decoded(self._solve(z, times.expand(samples, -1), None)[0], samples)

    @untraced
    def _posterior_paths(
        self, series: Sequences, t: Tensor, static: Tensor | None, samples: int
    ) -> tuple[LatentPrediction, Tensor, Tensor]:
        """Sample paths from the posterior at the times t (batch, K), and decode them.

        Return the :class:`LatentPrediction`, and the divergences kl_initial and kl_path of :class:`ELBO`, each
        (batch,).
        """
        samples = as_count(samples, "samples")
        seq.check_parameters(series.x, self.parameters())
        t = t.to(torch.float64) / self.time_unit
        initial, guide = self.encode(series, static, t)
        prior_mean, prior_log_scale = self.prior.unsqueeze(1)
        prior = Normal(prior_mean, prior_log_scale.exp(), validate_args=False)
        z = initial.rsample(torch.Size([samples])).flatten(0, 1)
        values, kl_path = self._solve(z, t.repeat(samples, 1), guide)
        prediction = self._decoded(values, samples)
        return prediction, kl_divergence(initial, prior).sum(-1), kl_path.unflatten(0, (samples, -1)).mean(0)

    def encode(self, series: Sequences, static: Tensor | None, grid: Tensor) -> tuple[Normal, Guide]:
        """Return the posterior of the initial state, and the Guide of posterior paths at the times ``grid`` (batch, T).

        The encoder reads the observed samples from the last to the first, with times counted from the last sample. If
        the first sample is not observed, the encoder's last input is a sample without values at the first time, at
        which the path starts.
        """
        t = series.t.to(torch.float64) / self.time_unit
        observed = torch.ones_like(t, dtype=torch.bool) if series.any_observed is None else series.any_observed
        count = observed.sum(1, keepdim=True)
        rank = torch.where(observed, torch.arange(1, t.shape[1] + 1, device=t.device), 0)
        order = pad(rank.argsort(dim=1, descending=True, stable=True), (0, 1))[:, : int(count.max()) + 1]
        exists = torch.arange(order.shape[1], device=t.device) < count
        times = torch.where(exists, t.gather(1, order), t[:, :1])
        mask = exists.unsqueeze(-1).expand(-1, -1, self.input_size)
        if series.observed is not None:
            mask = mask & seq.reorder(series.observed.expand_as(series.x), order)
        x = torch.where(mask, seq.reorder(series.x, order), 0.0)
        given = {} if static is None else {"static": static}
        lengths = count + ~observed[:, :1]
        summary, _ = self.encoder(x, times[:, :1] - times, mask=mask, lengths=lengths[:, 0], **given)
        mean, log_scale = self.posterior(summary.take_along_dim(lengths.unsqueeze(-1) - 1, 1)[:, 0]).chunk(2, 1)
        guide = Guide(summary, torch.where(exists, times, -math.inf), grid)
        return Normal(mean, log_scale.exp(), validate_args=False), guide

    def _solve(self, z: Tensor, t: Tensor, guide: Guide | None) -> tuple[Tensor, Tensor]:
        with seq.in_user_units(self.time_unit):
            return self.solve(z, t, guide)

    def _decoded(self, values: Tensor, samples: int) -> LatentPrediction:
        """Decode latent paths ``values`` (K, samples * batch, latent_size).

        Return a :class:`LatentPrediction` whose ``paths`` have the shape (samples, batch, K, input_size).
        """
        decoded: Tensor = self.decoder(values.transpose(0, 1))
        expected = (*values.shape[1::-1], self.input_size)
        if decoded.shape != expected:
            raise ValueError(
                f"decoder returned shape {tuple(decoded.shape)} for (batch, K, latent_size); expected {expected}. "
                f"Fix: decoder=hbnode.nn.MLP({self.latent_size}, [64], {self.input_size})."
            )
        freedom = None if self.log_freedom is None else 2 + self.log_freedom.exp()  # > 2: finite variance
        return LatentPrediction(decoded.unflatten(0, (samples, -1)), self.log_noise.exp(), freedom)

    @override
    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.latent_size}, time_unit={self.time_unit:g}"


@shares_arguments
class LatentODE(LatentModel):
    r"""A latent ODE: an irregular series is a noisy observation of a latent path with a random initial state.

    .. math:: z(t_0) \sim \mathcal N(\mu, \sigma^2), \qquad z' = \mathrm{field}(t, z), \qquad
        x_i \sim p(x_i \mid \mathrm{decoder}(h(t_i)))

    The state z is (h, m) for an HBNODE and h for a NODE. The mean μ and the standard deviation σ of the prior are
    learned. An encoder reads the observed samples backwards and returns a normal posterior :math:`q(z(t_0))` with a
    diagonal covariance. Training maximises the evidence lower bound (ELBO) of log p(x),

    .. math:: \mathbb E_q \sum_i \log p(x_i \mid z(t_i)) - \mathrm{KL}(q(z(t_0)) \,\|\, p(z(t_0))).

    Each series has its own times. Missing values, samples without observed values and padding have no effect, except
    that a path starts at the first time of its series.

    References:
        Rubanova, Chen and Duvenaud, Latent ODEs for Irregularly-Sampled Time Series, arXiv:1907.03907.

    Arguments:
        latent_size: size of h.
        hidden_size: units of the default encoder and of the two hidden layers of the default f. Default: ``64``.
        field: the field of z. If it has the state (h, m) and no network for the initial m, the encoder infers both.
            Otherwise it infers the argument of ``field.initial_state``. Default: ``None``, an HBNODE with a tanh
            network.
        method: solver. This and the next arguments are those of :func:`hbnode.odeint`. Default: ``None``.
        rtol: relative tolerance. Default: ``0.001``.
        atol: absolute tolerance. Default: ``0.001``.
        gradient: gradient mode. Default: ``None``.
        steps: number of equal steps between two times. Default: ``None``, adaptive steps.

    Example:
        >>> import torch, hbnode
        >>> t = torch.rand(8, 20).cumsum(1)
        >>> x = torch.sin(t + 6 * torch.rand(8, 1)).unsqueeze(-1)
        >>> model = hbnode.nn.LatentODE(1, 2, 16).fit_time_unit(t)
        >>> elbo = model.elbo(x, t)
        >>> (-elbo.value.mean()).backward()
        >>> ahead = model.predict(x, t, at=t[:, -1:] + torch.tensor([1.0, 2.0]), samples=50)
        >>> ahead.mean.shape, ahead.quantile([0.05, 0.95]).shape
        (torch.Size([8, 2, 1]), torch.Size([2, 8, 2, 1]))
    """

    def __init__(
        self,
        input_size: int,
        latent_size: int,
        hidden_size: int = 64,
        *,
        field: Field | None = None,
        method: Method | None = None,
        rtol: float = 1e-3,
        atol: float = 1e-3,
        gradient: Gradient | None = None,
        steps: int | None = None,
        **options: Unpack[LatentOptions],
    ) -> None:
        latent_size = as_count(latent_size, "latent_size")
        net = MLP(latent_size, [hidden_size] * 2, latent_size, activation=nn.Tanh)
        field = HBNODE(net) if field is None else field
        if not isinstance(field, Field):
            raise TypeError(
                f"field must be a field, got {type(field).__name__}. Fix: field=hbnode.HBNODE(hbnode.nn.MLP("
                f"{latent_size}, [{hidden_size}], {latent_size}))."
            )
        sizes = latent_size - getattr(field, "augment", 0), 2 * latent_size
        with torch.no_grad():
            start = field.initial_state(next(field.parameters(), torch.zeros(())).new_zeros(1, sizes[0]))
        makes_momentum = any(getattr(field, f"initial_{part}", None) for part in ("momentum", "velocity"))
        infers_both = isinstance(start, tuple) and len(start) == 2 and not makes_momentum
        super().__init__(input_size, latent_size, hidden_size, sizes[infers_both], **options)
        self.field, self.infers_both = field, infers_both
        self.method, self.rtol, self.atol, self.gradient, self.steps = method, rtol, atol, gradient, steps
        Settings(**self._solver()).checked()  # raises for a wrong argument here, not in the first call

    def _solver(self) -> dict[str, Any]:
        names = "method", "rtol", "atol", "gradient", "steps"
        return {name: getattr(self, name) for name in names} | {"per_sample": True}

    @override
    def solve(self, z: Tensor, t: Tensor, guide: Guide | None) -> tuple[Tensor, Tensor]:
        start: State = tuple(z.chunk(2, 1)) if self.infers_both else self.field.initial_state(z)
        path = odeint(self.field, start, t, **self._solver())
        return self.field.readout(path), z.new_zeros(len(z))


@shares_arguments
class LatentSDE(LatentModel):
    r"""A latent SDE: an irregular series is a noisy observation of a latent heavy ball with noise in its velocity.

    .. math:: dh = m\,dt, \qquad dm = (-\gamma m + f(h, t))\,dt + s\,dW, \qquad s = \sqrt{2\gamma\eta}

    γ is the damping, η the temperature and W a Brownian motion. The posterior paths have the force f + s u with a
    learned control u. It is a function of h, of a summary of the later samples, and of the time until the next sample.
    By Girsanov's theorem the paths of the posterior q and the prior p have the divergence
    :math:`\mathbb E_q \int |u|^2/2\,dt`. The evidence lower bound (ELBO) of log p(x) is therefore

    .. math:: \mathbb E_q \Big[\sum_i \log p(x_i \mid h(t_i)) - \tfrac12 \int |u|^2 dt\Big]
        - \mathrm{KL}(q(h, m)(t_0) \,\|\, p(h, m)(t_0)).

    After the last sample u = 0, so that a path continues as a forecast by the prior. Initial state, encoder, decoder
    and missing values are those of :class:`LatentODE`.

    References:
        Li et al., Scalable Gradients for Stochastic Differential Equations, arXiv:2001.01328, for the bound.

    Arguments:
        latent_size: size of h.
        hidden_size: units of the default encoder and of the two hidden layers of f and of the control.
            Default: ``64``.
        sde: the SDE of the prior. Default: ``None``, a :class:`hbnode.HeavyBallSDE` with a softplus network, the
            temperature 1 and a learned damping between 0 and 10 that starts at 1.
        control: module (batch, latent_size + encoder.hidden_size + 1) -> (batch, latent_size) for u. Default: ``None``,
            a softplus network.
        dt: the largest step size, in units of ``time_unit``. Steps end on the samples, where u jumps. The method is
            ``"ubu"`` of :func:`hbnode.sdeint`, which evaluates forces only inside its steps. Default: ``0.1``.
        gradient: ``"direct"`` or ``"checkpoint"``. Default: ``"direct"``.

    Example:
        >>> import torch, hbnode
        >>> t = torch.rand(8, 20).cumsum(1)
        >>> x = torch.sin(t + 6 * torch.rand(8, 1)).unsqueeze(-1)
        >>> model = hbnode.nn.LatentSDE(1, 2, 16).fit_time_unit(t)
        >>> elbo = model.elbo(x, t)
        >>> (-elbo.value.mean()).backward()
        >>> model.predict(x, t, at=t[:, -1:] + torch.tensor([1.0, 2.0]), samples=50).std.shape
        torch.Size([8, 2, 1])
    """

    def __init__(
        self,
        input_size: int,
        latent_size: int,
        hidden_size: int = 64,
        *,
        sde: HeavyBallSDE | None = None,
        control: nn.Module | None = None,
        dt: float = 0.1,
        gradient: Literal["direct", "checkpoint"] = "direct",
        **options: Unpack[LatentOptions],
    ) -> None:
        latent_size = as_count(latent_size, "latent_size")
        super().__init__(input_size, latent_size, hidden_size, 2 * latent_size, **options)
        self.control = make_control(latent_size, self.summary_size, hidden_size) if control is None else control
        if options.get("decoder") is None:
            self.decoder = quiet(nn.Linear(latent_size, self.input_size))  # noise in h is small after decoding
        f = MLP(latent_size, [hidden_size] * 2, latent_size, activation=nn.Softplus)
        self.sde = HeavyBallSDE(f, damping=1.0, max_damping=10.0) if sde is None else sde
        if not isinstance(self.sde, HeavyBallSDE):
            raise TypeError(f"sde must be a HeavyBallSDE, got {type(sde).__name__}. Fix: hbnode.HeavyBallSDE(func).")
        self.dt, self.gradient = dt, gradient

    @override
    def solve(self, z: Tensor, t: Tensor, guide: Guide | None) -> tuple[Tensor, Tensor]:
        t = t if guide is None else t - t[:, :1]
        if bool((t == t[0]).all() & (t[0].diff() > 0).all()):
            t = t[0]  # all series share their times, so that a step has one size
        h, m = z.chunk(2, 1)
        options: Any = {"dt": self.dt, "gradient": self.gradient}
        if guide is None:
            return sdeint(self.sde, (h, m), t, **options)[0], z.new_zeros(len(z))
        posterior = ControlledSDE(self.sde, self.control, guide, self.sde.noise_scale(h[0]))
        h, m = sdeint(posterior, (pad(h, (0, 1)), pad(m, (0, 1))), t, **options)
        return h[..., :-1], m[-1, :, -1]


class ControlledSDE(HeavyBallSDE):
    """A heavy-ball SDE with the force f + s u, where f is the force of a prior, u a control and s the noise strength.

    The state has one more component, without damping and noise. Its momentum is the integral of |u|²/2.
    """

    def __init__(self, prior: HeavyBallSDE, control: nn.Module, guide: Guide, scale: Tensor) -> None:
        super().__init__(prior.func, damping=0.0, learn_damping=False, time_dependent=prior.time_dependent)
        self.time_dependent = True  # because the control depends on time
        self.prior, self.control, self.guide = prior, control, guide
        self.scale = scale
        self.counted_as = prior

    @override
    def solver_damping(self) -> Tensor:
        return _with_zero(self.prior.solver_damping(), self.scale)

    @override
    def solver_temperature(self) -> Tensor:
        return _with_zero(self.prior.solver_temperature(), self.scale)

    @override
    def force(self, t: Tensor, h: Tensor) -> Tensor:
        h = h[:, :-1]
        u = self.guide.control(self.control, t, h)
        start = self.guide.start.repeat(len(h) // len(self.guide.start), 1)
        drift = self.prior.force((t.to(start) + start).to(h), h) + self.scale * u
        return torch.cat([drift, u.square().sum(1, keepdim=True) / 2], 1)


class GRUEncoder(nn.Module):
    """The default encoder: a GRU over samples, masks and the time since each feature was observed.

    It is called with the same arguments as an ODERNN, and returns the same results.
    """

    def __init__(self, input_size: int, hidden_size: int, static_size: int = 0) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.inputs = Inputs(input_size, mask_features=True, elapsed_features=True, static_size=static_size)
        self.gru = nn.GRU(self.inputs.size, hidden_size, batch_first=True)

    @override
    def forward(
        self, x: Tensor, t: Tensor, *, mask: Tensor, lengths: Tensor, static: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        sequences = Sequences(self.inputs.input_size, x, t, mask, lengths)
        static = seq.checked_static(static, self.inputs.static_size, sequences.x, "LatentODE")
        inputs = self.inputs(sequences, static, None, 1.0)[0]
        start = inputs.new_zeros(1, len(inputs), self.hidden_size)  # under vmap it needs the dimensions of the inputs
        return self.gru(inputs, start)


def make_control(latent_size: int, summary_size: int, hidden_size: int) -> MLP:
    """Return the default network for the control u of a latent SDE.

    Its initial outputs are small, so that the posterior paths initially follow the force of the prior.
    """
    net = MLP(latent_size + summary_size + 1, [hidden_size] * 2, latent_size, activation=nn.Softplus)
    quiet(net.layers[-1])
    return net


def quiet(layer: nn.Module) -> nn.Module:
    """Divide the parameters of a layer by ten, in place, so that its initial outputs are small; return the layer."""
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(0.1)
    return layer


def _with_zero(value: Tensor | float, like: Tensor) -> Tensor:
    return pad(torch.as_tensor(value, dtype=torch.float64, device="cpu").expand(like.shape), (0, 1))
