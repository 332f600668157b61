"""The baselines: what they read and in which order, what gaps do, and their sizes; options of tasks that have them."""

import math

import pytest
import torch
from torch import nn

from tasks.common.run import count_parameters
from tasks.models.baselines import BASELINES, KINDS, Decaying, make_baseline

BATCH, LENGTH, INPUTS = 3, 7, 4


@pytest.fixture(params=BASELINES)
def name(request):
    if request.param == "cfc":
        pytest.importorskip("ncps")
    return request.param


def series(batch=BATCH, length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, INPUTS, generator=generator, dtype=torch.float64)
    gap = torch.randint(1, 4, (batch, length + 1), generator=generator).double()
    before = torch.cat([torch.zeros_like(gap[:, :1]), gap[:, 1:-1]], dim=1)
    return x, before, gap[:, 1:]


def double(name, **options):
    torch.manual_seed(0)
    model = make_baseline(name, INPUTS, 1000, **options).double()
    if isinstance(model, Decaying):  # from the start every unit decays, or half of them would not answer to a gap
        nn.init.uniform_(model.decay.weight, 0.1, 0.5)
        nn.init.uniform_(model.decay.bias, 0.0, 0.1)
    return model


def test_a_series_read_in_two_parts_gives_what_it_gives_as_a_whole(name):
    """And so features know no later samples; samples of a batch, each with its own gaps, do not meet."""
    model, (x, gap, _) = double(name), series()
    features, _ = model(x, gap)
    assert features.shape == (BATCH, LENGTH, model.hidden_size)
    first, state = model(x[:, :3], gap[:, :3])
    second, _ = model(x[:, 3:], gap[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), features)
    x, gap, _ = series(model.hidden_size, 4)  # a batch as large as the state has units, too
    alone = torch.cat([model(x[i : i + 1], gap[i : i + 1])[0] for i in range(len(x))])
    torch.testing.assert_close(model(x, gap)[0], alone)


def test_a_gap_changes_what_comes_after_it(name):
    """The gap before a sample, and the time ahead of it; every parameter has a part in the features."""
    model, (x, gap, after) = double(name, predicts_ahead=True), series()
    features, _ = model(x, gap, gap_after=after)
    features.square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
    step = torch.zeros_like(gap)
    step[:, 4] = 1
    for changed in (model(x, gap + step, gap_after=after), model(x, gap, gap_after=after + step)):
        difference = (features - changed[0]).abs().amax((0, 2))
        assert (difference[:4] == 0).all()
        assert (difference[4:] > 1e-5).all()


def test_the_size_is_the_nearest(name):
    """A head is counted."""
    for parameters, ahead, head in ((1000, False, 0), (1131, True, 17)):
        size = make_baseline(name, INPUTS, parameters, output_size=head, predicts_ahead=ahead).hidden_size
        errors = []
        for near in (size, size - 1, size + 1):
            count = count_parameters(KINDS[name](INPUTS, near, predicts_ahead=ahead)) + (near + 1) * head
            errors.append(abs(count - parameters))
        assert errors[0] == min(errors) < 0.1 * parameters


def test_the_decay_is_that_of_the_paper():
    """exp(-max(0, w gap + b)), by numbers; where that is 0 a gap does nothing."""
    model = Decaying(INPUTS, 2).double()
    with torch.no_grad():
        model.decay.weight.copy_(torch.tensor([[0.5], [-1.0]]))
        model.decay.bias.copy_(torch.tensor([0.1, 0.2]))
    x, _, _ = series(1, 2)
    state = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    features, _ = model(x[:, :1], torch.full((1, 1), 3.0, dtype=torch.float64), state)
    decayed = torch.tensor([[math.exp(-1.6), -2.0]], dtype=torch.float64)
    torch.testing.assert_close(features[:, 0], model.cell(x[:, 0], decayed))
