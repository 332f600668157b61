"""Walker2D: windows, the models' sizes and what they see, walking on, gradients through time."""

import itertools

import pytest
import torch

from tasks import walker2d
from tasks.common.run import count_parameters
from tasks.studies import walker2d_gradients
from tests.models import MODELS


def numbered(frames, start=0):
    """A rollout whose channels tell the number of the frame."""
    return (start + torch.arange(float(frames)))[:, None].expand(-1, 17)


def make(model, **options):
    config = walker2d.WalkerConfig(model=model, **options)
    return walker2d.make_model(config, torch.zeros(17), torch.ones(17)).double()


def samples(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# Data


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
    x, _, future = walker2d.windows([numbered(200)], seed=0, after=20)
    assert torch.equal(future[..., 0], x[:, -1:, 0] + torch.arange(1.0, 21.0))


def test_splits_share_no_rollout():
    rollouts = [numbered(5, 100 * i) for i in range(400)]
    parts = walker2d.split(rollouts)
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [300, 40, 60]
    assert sorted(int(r[0, 0]) for part in parts.values() for r in part) == list(range(0, 40_000, 100))


# Models


def test_the_papers_parameter_counts():
    """8,729, 8,815, 8,899 and 8,899 in the paper, which has no SONODE; the docstring has where the others come from."""
    assert [count_parameters(make(model)) for model in MODELS] == [8_729, 8_819, 8_757, 8_898, 8_899]
    assert count_parameters(make("gru")) == pytest.approx(8_800, rel=0.03)


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


def test_walking_on_feeds_predictions_a_frame_apart():
    torch.manual_seed(2)
    net = make("hbnode", shrink=1.0)
    x, t = samples(2, 5, 17), torch.tensor([[0.0, 1, 2, 4, 5], [0, 2, 3, 4, 7]], dtype=torch.float64) / 64
    walk = walker2d.walk_on(net, x, t, 3)
    for _ in range(3):  # reading all again each time
        x = torch.cat([x, net(x, t)[0][:, -1:].detach()], dim=1)
        t = torch.cat([t, t[:, -1:] + 1 / 64], dim=1)
    torch.testing.assert_close(walk, x[:, 5:])


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
