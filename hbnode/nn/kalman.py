"""The exact Kalman filter and smoother of noisy oscillators at irregular times, and the distributions they return."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hbnode._torch import may_look
from hbnode._tree import Record, record
from hbnode.nn._oscillator_step import exact_step
from hbnode.nn.sequences import Sequences


@record
class Gaussian(Record):
    """A normal distribution for each element of a tensor, by means and standard deviations.

    Attributes:
        mean: means, a tensor of any shape.
        std: standard deviations, in the shape of ``mean``. If the values are observations, they include the
            observation noise.
    """

    mean: Tensor
    std: Tensor


@record
class OscillatorBelief(Record):
    """The joint normal distribution of the states (v, x) of all noisy oscillators of a layer at one time.

    Attributes:
        v: means of the velocities, (batch, num_oscillators), in float64.
        x: means of the displacements, (batch, num_oscillators).
        t: time of the states, (batch,).
        covariance: covariance matrix of the vector (v, √κ x), where κ is the stiffness of each oscillator,
            (batch, 2 num_oscillators, 2 num_oscillators).
    """

    v: Tensor
    x: Tensor
    t: Tensor
    covariance: Tensor


@record
class OscillatorFiltered(Record):
    """The result of :meth:`Oscillators.filter`, which unpacks into its four attributes.

    Attributes:
        before: the distribution of each sample given the earlier samples, (batch, T, input_size).
        after: the distribution of another observation at the time of each sample, given this sample and the earlier
            samples, (batch, T, input_size).
        log_likelihood: log density of each sample given the earlier samples, (batch, T); 0 for a sample without
            observed values.
        state: the distribution of the oscillators' states after the last sample.
    """

    before: Gaussian
    after: Gaussian
    log_likelihood: Tensor
    state: OscillatorBelief


_BLOCK_SIZE = 4096  # entries of an (n, n) block matrix above which arithmetic takes longer than calling the operations
_ROUNDING_ERRORS = 64  # relative rounding error in the covariance of a block, divided by the machine epsilon


class Blocks(NamedTuple):
    """The samples of each series, divided into blocks of consecutive samples, with the matrices of each block.

    Let h be the state of the P oscillators before a block. The signal at the samples of the block is M h + ε, and the
    state after the block is Φ h + η, where ε and η are normal and independent of h. A block has n values, one for each
    sample and channel, ordered by sample, then by channel. The filter can process S series of values with the same
    times at once. All attributes begin with the dimensions (blocks, batch).

    Attributes:
        m: M, (n, 2 P).
        phi: Φ, (2 P, 2 P).
        k: the stationary covariance matrix of the signal at the samples of the block, (n, n).
        g: the stationary covariance between the signal and the state after the block, (n, 2 P).
        x: the values of the samples, (n, S); 0 for missing values.
        seen: 1 for observed values and 0 for missing values, (n,).
        noise: variance of the observation noise of each value, (n,).
    """

    m: Tensor
    phi: Tensor
    k: Tensor
    g: Tensor
    x: Tensor
    seen: Tensor
    noise: Tensor


class Updates(NamedTuple):
    """The distributions of the states before the blocks, and the matrices with which each block updates them.

    :class:`Blocks` defines n, P and S.

    Attributes:
        mean: mean μ of the state before each block, (blocks, batch, 2 P, S).
        excess: D, the covariance of this state minus the stationary covariance I, (blocks, batch, 2 P, 2 P).
        factor: L, the Cholesky factor of the covariance of the observed values given earlier blocks,
            (blocks, batch, n, n).
        white: L⁻¹ times the prediction errors, which are the observed values minus their predictions from earlier
            blocks, (blocks, batch, n, S). Under the model, its entries are independent and standard normal.
        a: L⁻¹ times the covariance between the observed values and the state after the block, (blocks, batch, n, 2 P).
        last: pair of μ and D of the state after the last block.
    """

    mean: Tensor
    excess: Tensor
    factor: Tensor
    white: Tensor
    a: Tensor
    last: tuple[Tensor, Tensor]


class KalmanFilter:
    r"""The Kalman filter and smoother of P oscillators with the scaled states h = (v, √κ x)/σ.

    An oscillator has the velocity v, the displacement x and the stiffness κ. σ is the stationary standard deviation of
    v. The stationary covariance of h is the identity I. The filter processes the samples block by block. K, M, G and Φ
    are the matrices ``k``, ``m``, ``g`` and ``phi`` of :class:`Blocks`. Let the state before a block have the mean μ
    and the covariance I + D. The observed values y of the block then have the covariance S = K + M D Mᵀ + noise. The
    covariance between y and the state after the block is A = G + M D Φᵀ. The update is

    .. math:: \mu \leftarrow \Phi\mu + A^T S^{-1}(y - M\mu), \qquad D \leftarrow \Phi D\Phi^T - A^T S^{-1}A.

    K, M, G and Φ of all blocks are computed in parallel, so that only the update is sequential. With blocks of √T
    samples, a series of T samples takes √T steps to compute these matrices, and √T updates. Large batches have shorter
    blocks.

    The smoother processes the blocks from the last to the first. Consider the log density of the values of a block and
    all later blocks as a function of the mean of the state before this block. Let r be its gradient and N its negative
    Hessian. With B = Φ - Aᵀ S⁻¹ M,

    .. math:: r \leftarrow M^T S^{-1}(y - M\mu) + B^T r, \qquad N \leftarrow M^T S^{-1}M + B^T N B.

    References:
        de Jong, Smoothing and Interpolation with the State-Space Model, JASA 84 (1989); Durbin and Koopman, A Simple
        and Efficient Simulation Smoother, Biometrika 89 (2002).

    Arguments:
        rates: the damping γ and the stiffness κ of each oscillator, (2, P), in the dtype of the filter.
        c: the matrix C (channels, 2 P) that maps (v, √κ x) to the signal, which is an observation without noise.
        log_spread: log σ of each oscillator, (P,).
        log_observation_noise: logarithm of the standard deviation of the observation noise, (channels,), or
            (batch, T, channels).
    """

    def __init__(self, rates: Tensor, c: Tensor, log_spread: Tensor, log_observation_noise: Tensor) -> None:
        self.dtype = rates.dtype
        self.gamma, self.kappa = rates
        self.root, self.spread = self.kappa.sqrt(), log_spread.to(self.dtype).exp().repeat(2)
        self.c = c.to(self.dtype) * self.spread
        self.noise = (2 * log_observation_noise.to(self.dtype)).exp()
        if may_look():
            self._check_digits()

    def _check_digits(self) -> None:
        """Raise FloatingPointError if the noise variance is too small for the filter's dtype.

        Rounding then loses the noise variance when it is added to the signal variance.
        """
        signal = self.c.square().sum(-1)
        ratio = float((signal / self.noise).detach().amax().sqrt())
        most = (_ROUNDING_ERRORS * torch.finfo(self.dtype).eps) ** -0.5
        if ratio > most:
            least = math.log(float(signal.detach().amax().sqrt()) / most) + 1
            raise FloatingPointError(
                f"the standard deviation of the observed signal is {ratio:.3g} times that of the observation noise; "
                f"expected at most {most:.3g}. {self.dtype} rounds off a smaller noise variance. Fix: "
                f"layer.log_observation_noise.data.clamp_(min={least:.1f}) after each step of training."
            )

    def filter(self, sequences: Sequences, state: OscillatorBelief | None) -> OscillatorFiltered:
        """Filter the sequences, starting from ``state``, or from the stationary distribution if ``state`` is None."""
        t, x, seen = self._samples(sequences)
        blocks = self._blocks(t, x.unsqueeze(-1), seen, state)
        found = self._run(blocks, state)
        mean, variance, v = self._predicted(blocks, found)
        sample = torch.arange(v.shape[-1], device=v.device) // len(self.c)
        bands: list[Gaussian] = []
        for known in sample.unsqueeze(1) > sample, sample.unsqueeze(1) >= sample:
            weight = torch.where(known, v, 0.0)
            std = ((variance - weight.square().sum(-1)).clamp(min=0.0) + blocks.noise).sqrt()
            each = (mean + weight @ found.white).squeeze(-1), std
            bands.append(Gaussian(*(sequences.padded(self._unblocked(z, t)) for z in each)))
        log_density = self._unblocked(self._log_densities(blocks, found), t).sum(-1)
        log_density = pad(log_density, (0, sequences.total - t.shape[1]))
        before, after = bands
        return OscillatorFiltered(before, after, log_density, self._pack(*found.last, sequences.t[:, -1]))

    def log_likelihood(self, sequences: Sequences) -> Tensor:
        """Return the log density of the observed values of each series, (batch,)."""
        blocks, found = self.run(sequences)
        return self._log_densities(blocks, found).sum((0, 2))

    def run(self, sequences: Sequences) -> tuple[Blocks, Updates]:
        """Filter the sequences, starting from the stationary distribution of the oscillators.

        Return the samples divided into :class:`Blocks`, and the :class:`Updates` of the state by these blocks.
        """
        t, x, seen = self._samples(sequences)
        blocks = self._blocks(t, x.unsqueeze(-1), seen)
        return blocks, self._run(blocks)

    def forecast(self, state: OscillatorBelief, dt: Tensor) -> tuple[Gaussian, OscillatorBelief]:
        """Forecast the observations at times dt (batch, K), measured from the time of ``state``.

        Return their distributions, (batch, K, channels), and the state at the last of these times.
        """
        mean, excess = self._unpack(state)
        phi = self._transition(dt.to(self.dtype))
        m, last = self._read(phi), _block_diagonal(phi[..., -1])
        variance = self.c.square().sum(-1) + ((m @ excess.unsqueeze(1)) * m).sum(-1)
        bands = Gaussian((m @ mean.unsqueeze(1)).squeeze(-1), (variance.clamp(min=0.0) + self.noise).sqrt())
        time = state.t + dt[:, -1].to(state.t.dtype)
        return bands, self._pack(last @ mean, last @ excess @ last.mT, time)

    def smooth(self, sequences: Sequences, at: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the means and the variances of the signal given all samples, both (batch, K, channels).

        The K times are ``at`` (batch, K), or the times of the samples if ``at`` is None.
        """
        t, x, seen, index = self._with_queries(sequences, at)
        blocks = self._blocks(t, x.unsqueeze(-1), seen)
        mean, variance = self._smooth(blocks, self._run(blocks))
        return _at(self._unblocked(mean, t).squeeze(-1), index), _at(self._unblocked(variance, t), index)

    def sample_paths(
        self, sequences: Sequences, at: Tensor | None, paths: int, generator: torch.Generator | None
    ) -> Tensor:
        """Draw ``paths`` paths of the signal given all samples, at the times that :meth:`smooth` uses.

        A path and noisy observations of it are first drawn from the prior. Subtract them from the true observations and
        smooth the differences. The path plus the smoothed mean is a draw given all samples. The result has the shape
        (batch, K, channels, paths).
        """
        t, x, seen, index = self._with_queries(sequences, at)
        signal, data = self._draw(t, paths, generator)
        blocks = self._blocks(t, torch.where(seen.unsqueeze(-1), x.unsqueeze(-1) - data, 0.0), seen)
        return _at(signal + self._unblocked(self._smooth(blocks, self._run(blocks))[0], t), index)

    # States and transitions

    def _unpack(self, state: OscillatorBelief) -> tuple[Tensor, Tensor]:
        """Convert a state to the scaled oscillators of this class.

        Return their mean μ (batch, 2 P, 1), and their excess covariance D (batch, 2 P, 2 P), the covariance minus I.
        """
        mean = torch.cat([state.v.to(self.dtype), state.x.to(self.dtype) * self.root], -1) / self.spread
        covariance = state.covariance.to(self.dtype) / (self.spread * self.spread.unsqueeze(1))
        return mean.unsqueeze(-1), covariance - torch.eye(len(self.spread), dtype=self.dtype, device=mean.device)

    def _pack(self, mean: Tensor, excess: Tensor, t: Tensor) -> OscillatorBelief:
        v, x = (mean.squeeze(-1) * self.spread).chunk(2, -1)
        covariance = (excess + excess.mT) / 2 + torch.eye(len(self.spread), dtype=self.dtype, device=mean.device)
        return OscillatorBelief(v, x / self.root, t, covariance * (self.spread * self.spread.unsqueeze(1)))

    def _transition(self, gaps: Tensor) -> Tensor:
        """Return the 2 × 2 transition matrix of each scaled oscillator over each of the times ``gaps``.

        The result is (2, P, 2, *gaps.shape): row of the matrix, oscillator, column of the matrix, gap.
        """
        gamma, kappa, root = (z.view(-1, *[1] * gaps.dim()) for z in (self.gamma, self.kappa, self.root))
        step = exact_step(gamma, kappa, gaps)
        rows = torch.stack([step.vv, step.vx / root], 1), torch.stack([step.xv * root, step.xx], 1)
        return torch.stack(rows)

    def _read(self, phi: Tensor) -> Tensor:
        """Multiply transition matrices Φ by the matrix C that maps the scaled states to the signal.

        Φ is given as ``phi`` (2, P, 2, ...). Return C Φ, (..., channels, 2 P).
        """
        return torch.einsum("crp,rpk...->...ckp", self.c.unflatten(1, (2, -1)), phi).flatten(-2)

    # Blocks

    def _samples(self, sequences: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Return the times (batch, T), the samples (batch, T, channels), and the mask of observed values."""
        x, seen = sequences.x.to(self.dtype), sequences.observed
        seen = torch.ones_like(x, dtype=torch.bool) if seen is None else seen.expand_as(x)
        return sequences.t.to(self.dtype), x, seen

    def _with_queries(self, sequences: Sequences, at: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Add samples without observed values, at the times ``at`` (batch, K), to the samples of the sequences.

        Return the times, the samples and the mask of observed values, as :meth:`_samples` does, and the indices
        (batch, K) of the added samples. If ``at`` is None, nothing is added, and the indices are those of all samples.
        """
        t, x, seen = self._samples(sequences)
        if at is None:
            return t, x, seen, torch.arange(t.shape[1], device=t.device).expand(t.shape)
        t = torch.cat([t, at.to(t)], 1)
        order = t.argsort(dim=1, stable=True)
        x, seen = (_at(pad(z, (0, 0, 0, at.shape[1])), order) for z in (x, seen))
        return t.gather(1, order), x, seen, order.argsort(1)[:, -at.shape[1] :]

    def _blocked(self, z: Tensor) -> Tensor:
        """Divide z (batch, T, channels, ...) into blocks (blocks, batch, n, ...); pad the last block with zeros."""
        length = max(1, round((z.shape[1] / (1 + len(z) * z.shape[1] * len(self.c) ** 2 / _BLOCK_SIZE)) ** 0.5))
        z = pad(z, (0, 0) * (z.dim() - 2) + (0, -z.shape[1] % length))
        return z.unflatten(1, (-1, length)).flatten(2, 3).transpose(0, 1)

    def _unblocked(self, z: Tensor, t: Tensor) -> Tensor:
        """Join blocks z (blocks, batch, n, ...) to (batch, T, channels, ...), where T is the length of t (batch, T)."""
        return z.transpose(0, 1).unflatten(2, (-1, len(self.c))).flatten(1, 2)[:, : t.shape[1]]

    def _blocks(self, t: Tensor, x: Tensor, seen: Tensor, state: OscillatorBelief | None = None) -> Blocks:
        """Divide samples x (batch, T, channels, S) at times t (batch, T) into blocks, and compute their matrices.

        ``seen`` is the mask of observed values. ``state`` is the state before the first sample, if there is one.
        """
        start = t[:, :1] if state is None else state.t.to(t).unsqueeze(1)
        gaps = self._blocked(t.diff(prepend=start).unsqueeze(-1))
        shape, total, n = gaps.shape[:2], gaps[..., 0].numel(), gaps.shape[2] * len(self.c)
        # z is computed for one sample after the other, and has the shape (2, P, columns, blocks · batch). Two columns
        # are the transition from the start of the block to the sample. The other columns are the stationary covariances
        # between the state at the sample and the values of the block up to the sample.
        own = self.c.T.unflatten(0, (2, -1)).unsqueeze(-1)
        z = t.new_zeros(2, own.shape[1], 2 + n, total)
        z[0, :, 0] = z[1, :, 1] = 1.0
        starts, rows = [], []
        for i, phi in enumerate(self._transition(gaps.flatten(0, 1)).unbind(-1)):
            z = phi[:, :, :1] * z[0] + phi[:, :, 1:] * z[1]
            z[:, :, 2 + i * len(self.c) : 2 + (i + 1) * len(self.c)] = own
            starts.append(z[:, :, :2])
            rows.append(self.c @ z.flatten(2).flatten(0, 1))
        lower = torch.cat(rows).view(n, 2 + n, total)[:, 2:].permute(2, 0, 1).tril()
        m, g = self._read(torch.stack(starts, -1)), z[:, :, 2:].flatten(0, 1).permute(2, 1, 0)
        every = m.flatten(1, 2), _block_diagonal(starts[-1]), lower + lower.tril(-1).mT, g
        m, phi, k, g = (z.unflatten(0, shape) for z in every)
        x, seen, noise = (self._blocked(z) for z in (x, seen.to(t.dtype), self.noise.expand(seen.shape)))
        return Blocks(m, phi, k, g, x, seen, noise)

    def _run(self, blocks: Blocks, state: OscillatorBelief | None = None) -> Updates:
        n, size = blocks.m.shape[-2:]
        sets, seen = blocks.x.shape[-1], blocks.seen.unsqueeze(-1)
        own = seen * blocks.k * seen.mT + torch.where(blocks.seen > 0, blocks.noise, 1.0).diag_embed()
        own = pad(torch.cat([own, seen * blocks.g], -1), (0, 0, 0, size))
        m_phi = torch.cat([seen * blocks.m, blocks.phi], -2)
        if state is None:
            mean, excess = own.new_zeros(own.shape[1], size, sets), own.new_zeros(own.shape[1], size, size)
        else:
            mean, excess = self._unpack(state)
        steps = []
        for each_own, each_m_phi, x in zip(own, m_phi, blocks.x, strict=True):
            before = mean, excess
            ahead = each_m_phi @ mean  # (M μ, Φ μ)
            joint = torch.baddbmm(each_own, each_m_phi @ excess, each_m_phi.mT)  # ((S, A), (M D Φᵀ, Φ D Φᵀ))
            factor: Any = torch.linalg.cholesky(joint[:, :n, :n])
            known = torch.cat([x - ahead[:, :n], joint[:, :n, n:]], -1)
            white, a = torch.linalg.solve_triangular(factor, known, upper=False).split([sets, size], -1)
            mean = torch.baddbmm(ahead[:, n:], a.mT, white)
            excess = torch.baddbmm(joint[:, n:, n:], a.mT, a, alpha=-1)
            steps.append((*before, factor, white, a))
        means, excesses, factors, whites, gains = (torch.stack(each) for each in zip(*steps, strict=True))
        return Updates(means, excesses, factors, whites, gains, (mean, excess))

    def _log_densities(self, blocks: Blocks, found: Updates) -> Tensor:
        """Return the log density of each value given all values before it, (blocks, batch, n).

        It is 0 for missing values.
        """
        logs = found.factor.diagonal(dim1=-2, dim2=-1).log()
        return -0.5 * found.white.square().sum(-1) - logs - 0.5 * math.log(2 * math.pi) * blocks.seen

    def _predicted(self, blocks: Blocks, found: Updates) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean and the variance of the signal given earlier blocks, and the covariance of signal and L⁻¹ y.

        Here y denotes the observed values of the block, and L is ``found.factor``. The results have the shapes
        (blocks, batch, n, S), (blocks, batch, n) and (blocks, batch, n, n).
        """
        m_excess = blocks.m @ found.excess
        cross = blocks.seen.unsqueeze(-1) * (blocks.k + m_excess @ blocks.m.mT).mT
        variance = blocks.k.diagonal(dim1=-2, dim2=-1) + (m_excess * blocks.m).sum(-1)
        v: Any = torch.linalg.solve_triangular(found.factor, cross, upper=False)
        return blocks.m @ found.mean, variance, v.mT

    def _smooth(self, blocks: Blocks, found: Updates) -> tuple[Tensor, Tensor]:
        """Return the mean (blocks, batch, n, S) and the variance (blocks, batch, n) of the signal given all values."""
        mean, variance, v = self._predicted(blocks, found)
        mean, variance = mean + v @ found.white, variance - v.square().sum(-1)
        # the covariance between the signal and the state after the block, given all values up to the end of the block
        cross = blocks.g + blocks.m @ found.excess @ blocks.phi.mT - v @ found.a
        white_m = torch.linalg.solve_triangular(found.factor, blocks.seen.unsqueeze(-1) * blocks.m, upper=False)
        back = (blocks.phi - found.a.mT @ white_m).mT
        r, n = torch.zeros_like(found.mean[0]), torch.zeros_like(found.excess[0])
        rs, ns = [r], [n]
        own = back, white_m.mT @ found.white, white_m.mT @ white_m
        for b, own_r, own_n in zip(*(z[1:].flip(0) for z in own), strict=True):
            r, n = own_r + b @ r, own_n + b @ n @ b.mT
            rs.append(r)
            ns.append(n)
        r, n = torch.stack(rs[::-1]), torch.stack(ns[::-1])
        return mean + cross @ r, (variance - ((cross @ n) * cross).sum(-1)).clamp(min=0.0)

    def _draw(self, t: Tensor, paths: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Draw the signal at times t (batch, T) from the prior, and add observation noise to it.

        Return the signal and the noisy observations, both (batch, T, channels, paths).
        """
        phi = self._transition(t.diff(prepend=t[:, :1])).unsqueeze(-1)  # (2, P, 2, batch, T, 1)
        (vv, xv), (vx, xx) = ((phi[0, :, i], phi[1, :, i]) for i in range(2))
        # The Cholesky factor of I - Φ Φᵀ. For a short gap Δ, its relative rounding error grows as (√κ Δ)⁻³.
        a = safe_sqrt(1 - vv.square() - vx.square())
        b = -(vv * xv + vx * xx) / torch.where(a > 0, a, 1.0)
        d = safe_sqrt(1 - xv.square() - xx.square() - b.square())
        shape = (2, len(self.gamma), *t.shape, paths)
        normal = torch.randn(shape, dtype=t.dtype, device=t.device, generator=generator)
        kicks = torch.stack([a * normal[0], b * normal[0] + d * normal[1]])
        z = torch.randn((*shape[:3], paths), dtype=t.dtype, device=t.device, generator=generator)
        states = []
        for step, kick in zip(phi.unbind(-2), kicks.unbind(-2), strict=True):
            z = step[:, :, 0] * z[0] + step[:, :, 1] * z[1] + kick
            states.append(z)
        signal = torch.einsum("cp,pbst->bsct", self.c, torch.stack(states, 3).flatten(0, 1))
        errors = torch.randn(signal.shape, dtype=t.dtype, device=t.device, generator=generator)
        return signal, signal + self.noise.sqrt().unsqueeze(-1) * errors


def safe_sqrt(variance: Tensor) -> Tensor:
    """Return the square root of ``variance``; where rounding made it <= 0, the result and its gradient are 0."""
    is_lost = variance <= 0
    return torch.where(is_lost, 0.0, torch.where(is_lost, 1.0, variance).sqrt())


def _block_diagonal(phi: Tensor) -> Tensor:
    """Arrange the 2 × 2 transitions of P oscillators, (2, P, 2, ...), as matrices (..., 2 P, 2 P) for all of them."""
    matrix = torch.einsum("rpk...,pq->...rpkq", phi, torch.eye(phi.shape[1], dtype=phi.dtype, device=phi.device))
    return matrix.flatten(-2).flatten(-3, -2)


def _at(z: Tensor, index: Tensor) -> Tensor:
    """Select samples from z (batch, T, ...) by indices (batch, K) along time."""
    return z.gather(1, index.reshape(*index.shape, *[1] * (z.dim() - 2)).expand(-1, -1, *z.shape[2:]))
