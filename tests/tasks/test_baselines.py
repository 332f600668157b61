"""The baselines: what they read and in which order, what gaps do, and their sizes; options of tasks that have them."""

import dataclasses
import json
import math
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("tqdm")

from tasks.common import run
from tasks.common.config import MODELS, ODEConfig, parse
from tasks.common.run import count_parameters
from tasks.models.baselines import BASELINES, KINDS, Decaying, IrregularSeriesConfig, make_baseline

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
    model, (x, gap, _) = double(name), series()
    features, _ = model(x, gap)
    assert features.shape == (BATCH, LENGTH, model.hidden_size)
    first, state = model(x[:, :3], gap[:, :3])
    second, _ = model(x[:, 3:], gap[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), features)


def test_features_know_the_samples_so_far_and_no_later_ones(name):
    model, (x, gap, _) = double(name), series()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x, gap)[0][:, 3].sum(), x)
    assert (gradient[:, :4].abs().sum((0, 2)) > 0).all()
    assert (gradient[:, 4:] == 0).all()


def test_samples_of_a_batch_do_not_meet(name):
    """Each its own gaps: what a batch gives, its samples give alone; a batch as large as the state has units too."""
    model = double(name)
    x, gap, _ = series(model.hidden_size, 4)
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


def test_the_size_is_the_nearest_and_weights_are_those_of_the_seed(name):
    """Trying sizes draws no random numbers; a head is counted."""
    for parameters, ahead, head in ((1000, False, 0), (1060, True, 0), (1131, True, 17), (8800, False, 17)):
        torch.manual_seed(3)
        model = make_baseline(name, INPUTS, parameters, output_size=head, predicts_ahead=ahead)
        torch.manual_seed(3)
        same = KINDS[name](INPUTS, model.hidden_size, predicts_ahead=ahead)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))

        def error(size, parameters=parameters, ahead=ahead, head=head):
            found = count_parameters(KINDS[name](INPUTS, size, predicts_ahead=ahead))
            return abs(found + (size + 1) * head - parameters)

        assert error(model.hidden_size) <= min(error(model.hidden_size - 1), error(model.hidden_size + 1))
        assert error(model.hidden_size) < 0.1 * parameters


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


def test_the_cell_of_cfc_is_that_of_its_paper():
    """Equation 10 of arXiv:2106.13898, with the gap in the sigmoid, written out."""
    pytest.importorskip("ncps")
    model, (x, gap, _) = double("cfc"), series(2, 1)
    gap = gap + 1.7
    features, _ = model(x, gap)
    cell = model.cell
    shared = 1.7159 * torch.tanh(0.666 * cell.backbone[0](torch.cat([x[:, 0], x.new_zeros(2, model.hidden_size)], 1)))
    s = torch.sigmoid(cell.time_a(shared) * gap + cell.time_b(shared))
    expected = (1 - s) * cell.ff1(shared).tanh() + s * cell.ff2(shared).tanh()
    torch.testing.assert_close(features[:, 0], expected)


def test_too_few_parameters_and_no_ncps_are_said(monkeypatch):
    with pytest.raises(ValueError, match=r"size 1 has \d+ parameters, more than parameters=5"):
        make_baseline("gru", INPUTS, 5)
    monkeypatch.setitem(sys.modules, "ncps.torch", None)
    with pytest.raises(ImportError, match=r"cfc needs the package ncps .*Fix: pip install -e '\.\[peers\]'"):
        make_baseline("cfc", INPUTS, 1000)
    with pytest.raises(SystemExit):
        options_of("--model", "all")


# Options of tasks that have baselines beside the five models


def options_of(*argv, kind=IrregularSeriesConfig):
    return parse(kind, {}, "", ["--device", "cpu", *argv])


def test_models_of_a_task():
    assert IrregularSeriesConfig(model="all").chosen() == (*MODELS, *BASELINES)
    assert options_of("--model", "gru,hbnode,gru").chosen() == ("gru", "hbnode")
    assert ODEConfig(model="all").chosen() == MODELS
    assert options_of("--model", "gru", "--gradient", "adjoint").model == "gru"  # not tried for a baseline


@pytest.mark.parametrize(
    ("kind", "argv", "message"),
    [
        (ODEConfig, "--model gru", "argument --model: invalid choice: 'gru' (choose from node, "),
        (IrregularSeriesConfig, "--model gru,,node", "invalid choice: ''"),
        (IrregularSeriesConfig, "--model gru,all", "invalid choice: 'all'"),
        (IrregularSeriesConfig, "--model gru,ghbnode --method nystrom4", "nystrom4"),
        (IrregularSeriesConfig, "--gradient adjoint", "gradient='adjoint' of native methods does not know"),
    ],
)
def test_bad_models(kind, argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        options_of(*argv.split(), kind=kind)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_options_of_an_ode_rnn():
    config = IrregularSeriesConfig()
    assert config.rnn_options() == config.ode_options() | {"per_sample": True, "time_unit": 1.0}
    changed = dataclasses.replace(config, solver="torchdiffeq", time_unit=2.0).rnn_options()
    assert (changed["per_sample"], changed["time_unit"]) == (False, 2.0)


def test_the_help_names_the_models(capsys):
    with pytest.raises(SystemExit):
        options_of("--help")
    assert "gru-d" in capsys.readouterr().out


def test_one_model_named_twice_is_one_run(tmp_path):
    def train(config):
        (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))

    run.sweep(options_of("--model", "gru,gru"), train)
    assert json.loads((tmp_path / "config.json").read_text())["model"] == "gru"
