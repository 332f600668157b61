"""Walker2D: rollouts, windows, the models' sizes and what they see, walking on, generating, gradients through time."""

import itertools
import math

import numpy as np
import pytest
import torch

from tasks import walker2d
from tasks.common.config import parse
from tasks.common.run import count_parameters
from tasks.data.walker2d import read_walker2d
from tasks.models.baselines import BASELINES
from tasks.studies import walker2d_gradients
from tests.models import MODELS


def rollout(seed, frames):
    """17 channels of coupled oscillators, (frames, 17)."""
    generator = np.random.default_rng(seed)
    time = np.arange(frames)[:, None] * 0.008
    modes = np.sin(2 * math.pi * generator.uniform(0.5, 3, 4) * time + generator.uniform(0, 6, 4))
    mixed = modes @ np.random.default_rng(0).normal(size=(4, 17))
    return (mixed * np.linspace(0.2, 3, 17) + np.linspace(1, 0, 17)).astype(np.float32)


def numbered(frames, start=0):
    """A rollout whose channels tell the number of the frame."""
    return (start + torch.arange(float(frames)))[:, None].expand(-1, 17)


def write_rollouts(folder, lengths):
    folder.mkdir(parents=True, exist_ok=True)
    for i, frames in enumerate(lengths):
        np.save(folder / f"rollout_{i:03d}.npy", rollout(i, frames))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Eight rollouts in HBNODE_DATA."""
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path / "data"))
    write_rollouts(tmp_path / "data" / "walker", [140, 130, 150, 120, 135, 145, 125, 130])
    return tmp_path / "data" / "walker"


def make(model, **options):
    if model in BASELINES:
        return walker2d.Baseline(model).double()
    config = walker2d.WalkerConfig(model=model, **options)
    return walker2d.make_model(config, torch.zeros(17), torch.ones(17)).double()


def samples(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# Data


def test_rollouts_are_read_from_the_data_folder(data, monkeypatch):
    rollouts, source = read_walker2d()
    assert [len(r) for r in rollouts] == [140, 130, 150, 120, 135, 145, 125, 130]
    assert np.array_equal(rollouts[2].numpy(), rollout(2, 150))
    assert source == "8 rollouts of a trained policy"
    (data / "generated.json").write_text("{}")
    assert read_walker2d()[1] == "8 rollouts of the scripted gait"
    monkeypatch.delenv("HBNODE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"HBNODE_DATA=None. Fix: put the rollouts"):
        read_walker2d()


def test_windows_are_kept_frames_with_their_times_and_the_next_raw_frames():
    x, t, y = walker2d.windows([numbered(1000), numbered(300, 5000), numbered(40)], seed=3)
    assert x.shape == y.shape == (len(x), 64, 17)
    numbers = x[..., 0].round().long()
    assert torch.equal(y, x + 1)
    assert torch.equal(t, (numbers - numbers[:, :1]) / 64)
    gaps = numbers.diff()
    assert gaps.min() == 1
    assert (gaps > 1).float().mean() == pytest.approx(0.1, abs=0.03)  # a gap is longer if the next frame is missing
    starts = [row.tolist().index(following[0]) for row, following in itertools.pairwise(numbers) if following[0] in row]
    assert set(starts) == {16}
    assert set((numbers[:, 0] >= 5000).tolist()) == {True, False}
    x, _, future = walker2d.windows([numbered(200)], seed=0, after=20)
    assert torch.equal(future[..., 0], x[:, -1:, 0] + torch.arange(1.0, 21.0))
    with pytest.raises(ValueError, match=r"too few for a window of 64 and 1 after it\. Fix"):
        walker2d.windows([numbered(50), numbered(40)], seed=0)


def test_splits_share_no_rollout_and_statistics_are_of_training(data):
    rollouts = [numbered(5, 100 * i) for i in range(400)]
    parts = walker2d.split(rollouts)
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [300, 40, 60]
    assert sorted(int(r[0, 0]) for part in parts.values() for r in part) == list(range(0, 40_000, 100))
    assert [len(part) for part in walker2d.split(rollouts[:3]).values()] == [1, 1, 1]
    with pytest.raises(ValueError, match="at least 3 rollouts, got 2"):
        walker2d.split(rollouts[:2])
    splits = walker2d.Splits.from_options(walker2d.WalkerConfig(ahead=5, windows=7))
    frames = torch.cat(walker2d.split(read_walker2d()[0])["train"])
    torch.testing.assert_close(splits.mean, frames.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(splits.deviation, frames.std(0), atol=1e-5, rtol=1e-5)
    assert len(splits.train[0]) == 7
    assert walker2d.thin((torch.arange(100),), 4)[0].tolist() == [0, 25, 50, 75]


# Models


def test_the_papers_parameter_counts():
    """8,729, 8,815, 8,899 and 8,899 in the paper, which has no SONODE; the docstring has where the others come from."""
    config = parse(walker2d.WalkerConfig, walker2d.PRESETS, "", ["--preset", "paper"])
    assert (config.tol, config.epochs, config.batch_size, config.lr, config.clip) == (1e-7, 500, 256, 3e-3, 1.0)
    options = config.rnn_options()
    assert (options["method"], options["gradient"], options["per_sample"]) == ("dopri5", "adjoint", False)
    counts = [count_parameters(make(model)) for model in (*MODELS, "gru")]
    assert counts[:5] == [8_729, 8_819, 8_757, 8_898, 8_899]
    assert counts[5] == pytest.approx(8_800, rel=0.03)


@pytest.mark.parametrize("model", ["node", "ghbnode", "gru-d"])
def test_a_prediction_sees_its_own_frame_and_none_after_it(model):
    x = samples(2, 5, 17).requires_grad_()
    t = torch.tensor([[0.0, 1, 3, 4, 5], [0, 2, 3, 4, 7]], dtype=torch.float64) / 64
    predicted, _ = make(model, shrink=1.0)(x, t)
    for i in range(5):
        (gradient,) = torch.autograd.grad(predicted[:, i].sum(), x, retain_graph=True)
        seen = gradient.abs().amax(-1) > 0
        assert seen[:, : i + 1].all()
        assert not seen[:, i + 1 :].any()


def test_a_prediction_is_the_head_of_the_state_a_frame_later():
    """For a field that only turns h, h_{t + 1/64} is known."""
    net = make("node", shrink=1.0)
    with torch.no_grad():
        net.rnn.field.func.weight.copy_(torch.eye(24) * 3)
        net.rnn.field.func.bias.zero_()
    x, t = samples(2, 4, 17), torch.arange(4.0, dtype=torch.float64) / 64
    predicted, _ = net(x, t.expand(2, 4))
    h, _ = net.rnn(x, t)
    torch.testing.assert_close(predicted, net.head(h * math.exp(3 / 64)), atol=1e-4, rtol=1e-4)
    for shrink, low, high in ((0.01, 0.0, 0.1), (1.0, 0.1, 1.0)):  # a shrunk cell hardly moves
        cell = walker2d.Cell(24, (48,), shrink).double()
        assert low < cell(samples(3, 17), torch.zeros(3, 24, dtype=torch.float64)).abs().max() <= high


def test_walking_on_feeds_predictions_a_frame_apart():
    torch.manual_seed(2)
    net = make("hbnode", shrink=1.0)
    x, t = samples(2, 5, 17), torch.tensor([[0.0, 1, 2, 4, 5], [0, 2, 3, 4, 7]], dtype=torch.float64) / 64
    walk = walker2d.walk_on(net, x, t, 3)
    for _ in range(3):  # reading all again each time
        x = torch.cat([x, net(x, t)[0][:, -1:].detach()], dim=1)
        t = torch.cat([t, t[:, -1:] + 1 / 64], dim=1)
    torch.testing.assert_close(walk, x[:, 5:])


# The figure


# Generating rollouts


# Gradients through time


@pytest.mark.parametrize("model", ["hbnode", "still pair"])
def test_adjoint_norms_are_those_of_the_states_in_between(model):
    """Reading a frame at a time gives every state in hand."""
    net = walker2d_gradients.make(model, True, tol=1e-9).double()
    x, y = torch.randn(2, 3, 5, 17, dtype=torch.float64)
    t = torch.rand(3, 5, dtype=torch.float64).cumsum(1)
    norms = walker2d_gradients.adjoint_norms(net, (x, t, y))
    state, states = None, []
    for i in range(5):
        _, state = net(x[:, i : i + 1], t[:, i : i + 1], state)
        states.append(state)
    later, _ = net.rnn.forecast(state, [1 / 64])
    error = (net.read(later[:, 0]) - y[:, -1]).square().mean(-1).sum()
    parts = [part for s in states for part in (s.h, s.m) if part is not None]
    gradients = torch.autograd.grad(error, parts)
    squares = torch.stack([gradient.square().sum(-1) for gradient in gradients], 1)
    expected = squares.unflatten(1, (5, -1)).sum(-1).sqrt()
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
    halved = 0.5 ** torch.arange(5.0, -1.0, -1.0).expand(3, 6)
    assert walker2d_gradients.ratios(halved)[2].item() == pytest.approx(0.5**2)
