"""Noisy oscillators against the joint normal distribution of all samples."""

import pytest
import torch
from torch.distributions import MultivariateNormal

import hbnode


def make(channels=2, size=3):
    torch.manual_seed(0)
    layer = hbnode.nn.Oscillators(channels, channels, size, noise=True, frequency=(0.05, 0.4)).double()
    with torch.no_grad():
        layer.log_spread.normal_(std=0.3)
        layer.log_observation_noise.normal_(-1.0, 0.3)
        layer.log_damping[0] = 1.5  # overdamped
        layer.log_stiffness[0] = 0.1
    return layer


def joint_covariance(layer, t):
    """Of all samples at times t (T,): ((T, n), (T, n)), from Cov(h(t), h(s)) = Φ(t - s) P for t >= s."""
    kappa, channels = layer.stiffness, layer.input_size
    variance = layer.process_noise.square() / (2 * layer.damping)
    c_v, c_x = layer.weight_out.chunk(2, 1)
    c_x = c_x * kappa.sqrt()
    blocks = torch.zeros(len(t), channels, len(t), channels, dtype=torch.float64)
    for i, later in enumerate(t):
        for j, earlier in enumerate(t[: i + 1]):
            vv, vx, xv, xx = hbnode.nn.functional.oscillator_step(layer.damping, kappa, later - earlier)
            row_v, row_x = c_v * vv + c_x * xv, c_v * vx + c_x * xx
            block = (row_v * variance) @ c_v.T + (row_x * variance / kappa) @ c_x.T
            blocks[i, :, j], blocks[j, :, i] = block, block.T
    noise = layer.observation_noise.square().repeat(len(t)).diag()
    return blocks.reshape(len(t) * channels, -1) + noise


def test_filter_against_the_joint_distribution():
    layer = make()
    t = (torch.rand(9, dtype=torch.float64) + 0.05).cumsum(0)
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


def test_forecasts_are_filtered_samples_that_nobody_saw():
    layer = make()
    x, t = torch.randn(2, 6, 2, dtype=torch.float64), torch.rand(2, 6).double().cumsum(1)
    state = layer.filter(x, t).state
    bands, later = layer.forecast(state, [0.0, 0.5, 2.0])
    times = t[:, -1:] + torch.tensor([0.5, 2.0], dtype=torch.float64)
    unseen = layer.filter(torch.zeros(2, 2, 2).double(), times, state, torch.zeros(2, 2, dtype=torch.bool))
    torch.testing.assert_close(bands.mean[:, 1:], unseen.before.mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(bands.std[:, 1:], unseen.before.std, rtol=0, atol=1e-12)
    torch.testing.assert_close(later.covariance, unseen.state.covariance, rtol=0, atol=1e-12)
    assert not unseen.log_likelihood.any()
    far, _ = layer.forecast(state, [1e6])
    spread = (layer.weight_out.square() * (2 * layer.log_spread).exp().repeat(2)).sum(1)
    torch.testing.assert_close(far.std[0, 0], (spread + layer.observation_noise.square()).sqrt())


def test_parts_lengths_and_half_precision():
    layer = make()
    x, t = torch.randn(2, 8, 2, dtype=torch.float64), torch.rand(2, 8).double().cumsum(1)
    for times in (t, None):
        whole = layer.filter(x, times)
        first = layer.filter(x[:, :3], None if times is None else t[:, :3])
        second = layer.filter(x[:, 3:], None if times is None else t[:, 3:], first.state)
        joined = torch.cat([first.log_likelihood, second.log_likelihood], 1)
        torch.testing.assert_close(joined, whole.log_likelihood, rtol=0, atol=1e-12)
    short = layer.log_likelihood(x, t, lengths=[8, 3])
    torch.testing.assert_close(short, torch.stack([whole_row(layer, x, t, 0, 8), whole_row(layer, x, t, 1, 3)]))
    low = make().float()
    assert low.log_likelihood(x.float(), t).dtype == torch.float64


def whole_row(layer, x, t, row, length):
    return layer.log_likelihood(x[row : row + 1, :length], t[row, :length])[0]


@pytest.mark.slow
def test_learning_finds_the_frequency_and_the_noise():
    torch.manual_seed(0)
    t = (0.5 + torch.rand(16, 40)).double().cumsum(1)
    truth = make(1, 1)
    with torch.no_grad():
        truth.log_damping.fill_(-3.0)
        truth.log_stiffness.fill_(0.2)
    samples = []
    for row in t:
        joint = MultivariateNormal(torch.zeros(40).double(), joint_covariance(truth, row).detach())
        samples.append(joint.sample())
    x = torch.stack(samples).unsqueeze(-1)
    layer = hbnode.nn.Oscillators(1, 1, 1, noise=True, frequency=(0.15, 0.25), decay=(0.05, 0.05)).double()
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(40):
        optimizer.zero_grad()
        loss = -layer.log_likelihood(x, t).mean()
        loss.backward()
        optimizer.step()
    assert loss < -truth.log_likelihood(x, t).mean() + 0.5
    assert abs(layer.frequency.item() / truth.frequency.item() - 1) < 0.03


def test_wrong_uses():
    layer = make()
    with pytest.raises(ValueError, match=r"has no noise.*Fix"):
        hbnode.nn.Oscillators(2, 2).filter(torch.zeros(1, 2, 2))
    with pytest.raises(ValueError, match=r"hidden_size=3 must be input_size=2.*Fix"):
        hbnode.nn.Oscillators(2, 3, noise=True)
    with pytest.raises(ValueError, match=r"exact steps alone.*Fix"):
        hbnode.nn.Oscillators(2, 2, noise=True, discretization="imex")
    _, state = layer(torch.zeros(1, 2, 2).double())
    with pytest.raises(TypeError, match=r"must be an OscillatorBelief.*Fix"):
        layer.filter(torch.zeros(1, 2, 2).double(), None, state)
    belief = layer.filter(torch.zeros(1, 2, 2).double()).state
    with pytest.raises(ValueError, match=r"the state's time lies after.*Fix"):
        layer.filter(torch.zeros(1, 1, 2).double(), [0.5], belief)
    with pytest.raises(ValueError, match=r"v must have shape \(2, 3\).*Fix"):
        layer.filter(torch.zeros(2, 1, 2).double(), [5.0], belief)
