"""Noisy oscillators against the joint normal distribution of all samples."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import hbnode
from tests.models import slow


def make(**options):
    layer = hbnode.nn.Oscillators(2, 2, 3, noise=True, frequency=(0.05, 0.4), **options).double()
    with torch.no_grad():
        layer.log_spread.normal_(std=0.3)
        layer.log_observation_noise.normal_(-1.0, 0.3)
        layer.log_damping[0] = 1.5  # overdamped
        layer.log_stiffness[0] = 0.1
    return layer


def joint_covariance(layer, t):
    """Of all samples at times t (T,): (T n, T n), from Cov(h(t), h(s)) = Φ(t - s) P for t >= s."""
    kappa, n = layer.stiffness, layer.input_size
    variance = layer.process_noise.square() / (2 * layer.damping)
    c_v, c_x = layer.weight_out.chunk(2, 1)
    c_x = c_x * kappa.sqrt()
    blocks = torch.zeros(len(t), n, len(t), n, dtype=torch.float64)
    order = sorted(range(len(t)), key=t.tolist().__getitem__)
    for count, i in enumerate(order):
        for j in order[: count + 1]:  # the earlier ones
            vv, vx, xv, xx = hbnode.nn.functional.oscillator_step(layer.damping, kappa, t[i] - t[j])
            row_v, row_x = c_v * vv + c_x * xv, c_v * vx + c_x * xx
            block = (row_v * variance) @ c_v.T + (row_x * variance / kappa) @ c_x.T
            blocks[i, :, j], blocks[j, :, i] = block, block.T
    return blocks.reshape(len(t) * n, -1) + layer.observation_noise.square().repeat(len(t)).diag()


def test_filter_against_the_joint_distribution():
    layer = make()
    gaps = torch.rand(9, dtype=torch.float64) + 0.05
    gaps[[2, 7, 8]] = 0.0
    t = gaps.cumsum(0)
    t[5:] += 20.0
    mask = torch.rand(1, 9, 2) < 0.7
    mask[0, 3] = False
    x = torch.randn(1, 9, 2, dtype=torch.float64)
    found = layer.filter(torch.where(mask, x, torch.nan), t, mask=mask)
    covariance, seen, values = joint_covariance(layer, t), mask.flatten(), x.flatten()
    zeros = torch.zeros(len(values), dtype=torch.float64)
    joint = MultivariateNormal(zeros[seen], covariance[seen][:, seen])
    right = joint.log_prob(values[seen])
    torch.testing.assert_close(layer.log_likelihood(x, t, mask=mask)[0], right, rtol=0, atol=1e-10)
    leaves = [layer.log_damping, layer.log_stiffness, layer.log_spread, layer.log_observation_noise, layer.weight_out]
    ours, theirs = (torch.autograd.grad(z, leaves) for z in (found.log_likelihood.sum(), right))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    for i in range(9):
        past = seen & (torch.arange(18) // 2 < i)
        mine = torch.arange(18) // 2 == i
        weights = torch.linalg.solve(covariance[past][:, past], covariance[past][:, mine]).T
        mean = weights @ values[past]
        variance = covariance[mine][:, mine] - weights @ covariance[past][:, mine]
        torch.testing.assert_close(found.before.mean[0, i], mean, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.before.std[0, i], variance.diagonal().sqrt(), rtol=0, atol=1e-10)
    assert (found.after.std[0][mask[0]] < found.before.std[0][mask[0]]).all()


@pytest.mark.parametrize("noise", [True, *slow(False)])
def test_smoother_against_the_joint_distribution(noise):
    layer = make()
    t = (torch.rand(2, 23, dtype=torch.float64) + 0.05).cumsum(1)
    t[:, 7] = t[:, 6]
    t[1, 17:] = torch.nan
    at = torch.cat([torch.tensor([-2.0, 40.0, 3.3, 3.3]), t[0, 5:9]]).double()
    mask = torch.rand(2, 23, 2) < 0.7
    x = torch.randn(2, 23, 2, dtype=torch.float64)
    found = layer.smooth(torch.where(mask, x, torch.nan), t, mask, [23, 17], at, noise=noise)
    at_samples = layer.smooth(x, t, mask, [23, 17], noise=noise)
    for row, length in ((0, 23), (1, 17)):
        times = torch.cat([t[row, :length], at])
        every = joint_covariance(layer, times) - layer.observation_noise.square().repeat(len(times)).diag()
        seen = torch.cat([mask[row, :length].flatten(), torch.zeros(2 * len(at), dtype=torch.bool)])
        variance = layer.observation_noise.square().repeat(len(times))
        weights = torch.linalg.solve(every[seen][:, seen] + variance[seen].diag(), every[seen]).T
        mean = (weights @ x[row, :length].flatten()[seen[: 2 * length]]).unflatten(0, (-1, 2))
        std = (every.diagonal() - (weights * every[:, seen]).sum(1) + noise * variance).sqrt().unflatten(0, (-1, 2))
        for part, band in ((slice(length, None), found), (slice(length), at_samples)):
            size = len(mean[part])
            torch.testing.assert_close(band.mean[row, :size], mean[part], rtol=0, atol=1e-9)
            torch.testing.assert_close(band.std[row, :size], std[part], rtol=0, atol=1e-9)
    assert not at_samples.mean[1, 17:].any()
    each = layer.smooth(x, t, mask, [23, 17], at.flip(0).expand(2, -1), noise=noise)
    torch.testing.assert_close(each.mean.flip(1), found.mean, rtol=0, atol=1e-12)


def test_sample_paths_have_the_moments_of_the_posterior():
    layer = make()
    t = torch.tensor([0.0, 0.1, 0.9, 2.0]).double()
    x, at = torch.randn(1, 4, 2, dtype=torch.float64), torch.tensor([0.5, 0.52, 3.0]).double()
    mask = torch.tensor([[[True, True], [False, True], [True, True], [True, False]]])
    paths = layer.sample_paths(x, t, mask, at=at, paths=5_000, generator=torch.Generator().manual_seed(0))[:, 0]
    every = joint_covariance(layer, torch.cat([t, at]))
    seen = torch.cat([mask.flatten(), torch.zeros(6, dtype=torch.bool)])
    weights = torch.linalg.solve(every[seen][:, seen], every[seen][:, 8:]).T
    signal = every[8:, 8:] - layer.observation_noise.square().repeat(3).diag() - weights @ every[seen][:, 8:]
    mean, scale = weights @ x.flatten()[mask.flatten()], signal.diagonal().sqrt()
    found = paths.flatten(1)
    assert ((found.mean(0) - mean).abs() < 5 * scale / 5_000**0.5).all()
    off = (found.T.cov() - signal).abs() / (scale * scale.unsqueeze(1))
    assert (off < 5 * (2 / 5_000) ** 0.5).all()


def test_forecasts_are_filtered_samples_that_nobody_saw():
    layer = make()
    x, t = torch.randn(2, 6, 2, dtype=torch.float64), torch.rand(2, 6).double().cumsum(1)
    state = layer.filter(x, t).state
    bands, later = layer.forecast(state, [0.0, 0.5, 2.0])
    times = t[:, -1:] + torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
    unseen = layer.filter(torch.zeros(2, 3, 2).double(), times, state, torch.zeros(2, 3, dtype=torch.bool))
    found = bands.mean, bands.std, later.covariance
    expected = unseen.before.mean, unseen.before.std, unseen.state.covariance
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not unseen.log_likelihood.any()


@pytest.mark.parametrize("is_even", [True, False])
def test_parts_lengths_and_half_precision(is_even):
    layer, x = make(), torch.randn(2, 80, 2, dtype=torch.float64)
    t = torch.arange(80.0).double().expand(2, -1) if is_even else torch.rand(2, 80).double().cumsum(1)
    whole, first = layer.filter(x, None if is_even else t), layer.filter(x[:, :3], t[:, :3])
    second = layer.filter(x[:, 3:], None if is_even else t[:, 3:], first.state)
    torch.testing.assert_close(second.state.covariance, whole.state.covariance, rtol=0, atol=1e-12)
    joined = torch.cat([first.log_likelihood, second.log_likelihood], 1)
    torch.testing.assert_close(joined, whole.log_likelihood, rtol=0, atol=1e-12)
    short = layer.log_likelihood(x, t, lengths=[80, 3])
    torch.testing.assert_close(short[0], layer.log_likelihood(x[:1], t[0])[0])
    torch.testing.assert_close(short[1], layer.log_likelihood(x[1:, :3], t[1, :3])[0])
    assert make().float().log_likelihood(x.float(), t).dtype == torch.float64


def test_gradients_are_finite_where_a_variance_is_zero():
    layer, t = make(), torch.tensor([0.0, 1.0, 1.0, 4.0]).double()
    layer.sample_paths(torch.randn(1, 4, 2).double(), t, at=[1.0, 1.0, 2.0]).sum().backward()  # gaps of length 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    variance = torch.tensor([-1e-20, 0.0, 4.0, math.nan], dtype=torch.float64, requires_grad=True)
    std = hbnode.nn.kalman.safe_sqrt(variance)
    std.sum().backward()
    torch.testing.assert_close(std.detach(), torch.tensor([0.0, 0.0, 2.0, math.nan]).double(), equal_nan=True)
    torch.testing.assert_close(variance.grad, torch.tensor([0.0, 0.0, 0.25, math.nan]).double(), equal_nan=True)


def test_noise_that_is_lost_in_rounding_is_named():
    layer, x = hbnode.nn.Oscillators(2, 2, 4, noise=True), torch.randn(1, 5, 2)
    nn.init.constant_(layer.log_observation_noise, -25.0)
    with pytest.raises(FloatingPointError, match="times that of the observation noise") as raised:
        layer.filter(x)
    least = float(str(raised.value).split("clamp_(min=")[1].split(")")[0])
    layer.log_observation_noise.data.clamp_(min=least)  # as the message says
    assert layer.filter(x).after.std.isfinite().all()
    nn.init.constant_(layer.log_spread, math.nan)
    with pytest.raises(FloatingPointError, match="log_spread is NaN"):
        layer.log_likelihood(x)


def test_wrong_uses():
    layer, x, static = make(), torch.zeros(2, 1, 2).double(), r"static must be None.*Fix: dataclasses.replace\(series, "
    state = layer.filter(x).state
    for message, use in (
        ("has no noise", lambda: hbnode.nn.Oscillators(2, 2).filter(x)),
        ("the state's time lies after", lambda: layer.filter(x, [-0.5], state)),
        (r"at must be \(K,\) or \(batch, K\)", lambda: layer.smooth(x, at=torch.zeros(3, 5))),
        *((static, lambda use=use: use(x, static=x[:, 0])) for use in (layer.log_likelihood, layer.filter)),
        *((static, lambda use=use: use(x, static=x[:, 0])) for use in (layer.smooth, layer.sample_paths)),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            use()
