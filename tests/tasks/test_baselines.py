"""The baselines: what they read and in which order, what gaps do, their sizes, and runs of them side by side."""

import csv
import dataclasses
import json
import math
import re
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

import hbnode
from tasks import plot
from tasks.common import sweep
from tasks.common.config import MODELS, ODEConfig, parse
from tasks.common.run import Run, count_parameters
from tasks.common.train import fit
from tasks.models.baselines import BASELINES, Decaying, Gated, IrregularSeriesConfig, Recurrent, make_baseline

BATCH, LENGTH, INPUTS = 3, 7, 4


@pytest.fixture(params=BASELINES)
def name(request):
    if request.param == "cfc":
        pytest.importorskip("ncps")
    return request.param


def series(batch=BATCH, length=LENGTH, *, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, INPUTS, generator=generator, dtype=dtype)
    gap = torch.randint(1, 4, (batch, length + 1), generator=generator).to(dtype)
    before = torch.cat([torch.zeros_like(gap[:, :1]), gap[:, 1:-1]], dim=1)
    return x, before, gap[:, 1:]


def double(name, parameters=1000, **options):
    torch.manual_seed(0)
    model = make_baseline(name, INPUTS, parameters, **options).double()
    if isinstance(model, Decaying):  # from the start every unit decays, or half of them would not answer to a gap
        nn.init.uniform_(model.decay.weight, 0.1, 0.5)
        nn.init.uniform_(model.decay.bias, 0.0, 0.1)
    return model


def test_features_have_the_shape_and_the_state_goes_on(name):
    """Read in two parts, a series gives what it gives as a whole."""
    model, (x, gap, _) = double(name), series()
    features, _ = model(x, gap)
    assert isinstance(model, Recurrent)
    assert features.shape == (BATCH, LENGTH, model.hidden_size)
    first, state = model(x[:, :3], gap[:, :3])
    second, _ = model(x[:, 3:], gap[:, 3:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), features)


def test_features_know_the_samples_so_far_and_no_later_ones(name):
    model, (x, gap, _) = double(name), series()
    x.requires_grad_()
    features, _ = model(x, gap)
    k = 3
    (gradient,) = torch.autograd.grad(features[:, k].sum(), x)
    assert (gradient[:, : k + 1].abs().sum((0, 2)) > 0).all()
    assert (gradient[:, k + 1 :] == 0).all()


def test_samples_of_a_batch_do_not_meet(name):
    """Each its own gaps: what a batch gives, its samples give alone; a batch as large as the state has units too."""
    model = double(name)
    x, gap, _ = series(model.hidden_size, 4)
    together, _ = model(x, gap)
    alone = torch.cat([model(x[i : i + 1], gap[i : i + 1])[0] for i in range(len(x))])
    torch.testing.assert_close(together, alone)


def test_a_gap_changes_what_comes_after_it(name):
    model, (x, gap, _) = double(name), series()
    other = gap.clone()
    other[:, 4] += 1
    difference = (model(x, gap)[0] - model(x, other)[0]).abs().amax((0, 2))
    assert (difference[:4] == 0).all()
    assert (difference[4:] > 1e-4).all()


def test_every_parameter_has_a_gradient(name):
    model, (x, gap, after) = double(name, predicts_ahead=True), series()
    model(x, gap, gap_after=after)[0].square().sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.abs().max() > 0


def test_predicting_ahead_reads_the_time_ahead(name):
    model, (x, gap, after) = double(name, predicts_ahead=True), series()
    other = after.clone()
    other[:, 2] += 1
    difference = (model(x, gap, gap_after=after)[0] - model(x, gap, gap_after=other)[0]).abs().amax((0, 2))
    assert (difference[:2] == 0).all()
    assert difference[2] > 1e-4
    with pytest.raises(ValueError, match="predicts_ahead=True needs gap_after"):
        model(x, gap)
    with pytest.raises(ValueError, match=r"Fix: predicts_ahead=True"):
        double(name)(x, gap, gap_after=after)


@pytest.mark.parametrize(("parameters", "inputs"), [(16_000, 5), (8_800, 17), (1_000, 3)])
def test_sizes(name, parameters, inputs):
    for head in (0, inputs):
        for ahead in (False, True):
            model = make_baseline(name, inputs, parameters, output_size=head, predicts_ahead=ahead)
            whole = nn.Sequential(model, nn.Linear(model.hidden_size, head)) if head else model
            assert count_parameters(whole) == pytest.approx(parameters, rel=0.03 if parameters > 1_000 else 0.1)


def of_size(model, hidden_size):
    kind = (type(model.net),) if isinstance(model, Gated) else ()
    return type(model)(*kind, model.input_size, hidden_size)


def test_the_size_is_the_nearest(name):
    for parameters in range(1000, 1200, 23):
        model = make_baseline(name, INPUTS, parameters)
        error = abs(count_parameters(model) - parameters)
        for other in (model.hidden_size - 1, model.hidden_size + 1):
            assert error <= abs(count_parameters(of_size(model, other)) - parameters)


def test_weights_are_those_of_the_seed(name):
    """Trying sizes draws no random numbers."""
    torch.manual_seed(3)
    chosen = make_baseline(name, INPUTS, 1000)
    torch.manual_seed(3)
    made = of_size(chosen, chosen.hidden_size)
    for a, b in zip(chosen.parameters(), made.parameters(), strict=True):
        assert torch.equal(a, b)


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


def test_wrong_input_is_named(name):
    model, (x, gap, _) = double(name), series()
    with pytest.raises(ValueError, match=r"x must be of shape \(batch, T, 4\), T > 0, got \(3, 7, 3\)"):
        model(x[..., :3], gap)
    with pytest.raises(ValueError, match=r"gap_before must be of shape \(3, 7\), one gap a sample, got \(3, 6\)"):
        model(x, gap[:, 1:])
    with pytest.raises(ValueError, match=r"size 1 has \d+ parameters, more than parameters=5"):
        make_baseline(name, INPUTS, 5)


def test_an_unknown_baseline():
    with pytest.raises(ValueError, match="unknown baseline 'rnn'; expected one of lstm, gru, gru-d, cfc"):
        make_baseline("rnn", INPUTS, 1000)


def test_without_ncps_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ncps.torch", None)
    with pytest.raises(ImportError, match=r"cfc needs the package ncps .*Fix: pip install -e '\.\[peers\]'"):
        make_baseline("cfc", INPUTS, 1000)
    with pytest.raises(SystemExit):
        parse_echo("--model", "all")


# Runs: a task that has baselines beside the five models


@dataclasses.dataclass(frozen=True)
class EchoConfig(IrregularSeriesConfig):
    """A task on series: say what the sample before was."""


class Echo(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.net = make_baseline(name, 1, 200) if name in BASELINES else None
        self.block = None if self.net else hbnode.ODEBlock(hbnode.NODE(nn.Linear(1, 1)), rtol=0.1, atol=0.1)
        self.head = nn.Linear(self.net.hidden_size if self.net else 1, 1)

    def forward(self, x):
        return self.head(self.net(x, torch.ones_like(x[..., 0]))[0] if self.net else self.block(x))


def mse(model, batch):
    (x,) = batch
    error = nn.functional.mse_loss(model(x)[:, 1:], x[:, :-1])
    return error, {"forecast_mse": error.item()}


def train(config):
    run = Run("plane_vibration", config, config.model)
    x = torch.randn(40, 5, 1, generator=torch.Generator().manual_seed(0))
    model = Echo(config.model)
    fit(run, model, (x[:30],), (x[30:],), mse, held_out="validation")
    run.finish(model, test_forecast_mse=run.rows[-1]["validation_loss"])


def parse_echo(*argv):
    return parse(EchoConfig, {}, "", ["--device", "cpu", *argv])


def test_models_of_a_task():
    assert EchoConfig(model="all").chosen() == (*MODELS, *BASELINES)
    assert parse_echo("--model", "gru,hbnode,gru").chosen() == ("gru", "hbnode")
    assert ODEConfig(model="all").chosen() == MODELS


@pytest.mark.parametrize(
    ("kind", "argv", "message"),
    [
        (ODEConfig, ["--model", "gru"], "argument --model: invalid choice: 'gru' (choose from node, "),
        (EchoConfig, ["--model", "gru,,node"], "invalid choice: ''"),
        (EchoConfig, ["--model", "gru,all"], "invalid choice: 'all'"),
        (EchoConfig, ["--model", "gru,ghbnode", "--method", "nystrom4"], "nystrom4"),
        (EchoConfig, ["--gradient", "adjoint"], "gradient='adjoint' of native methods does not know"),
    ],
)
def test_bad_models(kind, argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(kind, {}, "", argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_options_of_a_solver_are_not_tried_for_baselines():
    assert parse_echo("--model", "gru", "--gradient", "adjoint").model == "gru"


def test_steps_of_an_ode_rnn():
    assert "per_sample" not in EchoConfig().ode_options()
    assert EchoConfig().rnn_options() == EchoConfig().ode_options() | {"per_sample": True, "time_unit": 1.0}
    assert EchoConfig(time_unit=2.0).rnn_options()["time_unit"] == 2.0
    assert EchoConfig(solver="torchdiffeq").rnn_options()["per_sample"] is False


def test_the_help_names_the_models(capsys):
    with pytest.raises(SystemExit):
        parse_echo("--help")
    assert "gru-d" in capsys.readouterr().out


def test_one_model_named_twice_is_one_run(tmp_path):
    sweep.sweep(parse_echo("--model", "gru,gru", "--epochs", "1", "--out", str(tmp_path)), train)
    assert json.loads((tmp_path / "config.json").read_text())["model"] == "gru"


def test_runs_of_baselines_and_models_are_drawn_together(tmp_path, capsys):
    for seed in (0, 1):
        for model in ("node", "gru", "lstm"):
            train(
                parse_echo(
                    "--model", model, "--epochs", "2", "--seed", str(seed), "--out", str(tmp_path / f"{model}{seed}")
                )
            )
    with (tmp_path / "gru0" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row[n]) for row in rows for n in ("nfe_forward", "nfe_backward", "nfe_ratio")] == [0.0] * 6
    capsys.readouterr()
    plot.main([str(tmp_path)])
    columns, lines = read_table(capsys.readouterr().out)
    assert [line["model"] for line in lines] == ["NODE", "LSTM", "GRU"]
    assert columns[2:5] == ["validation forecast mse", "train forecast mse", "test forecast mse"]
    errors = [json.loads((tmp_path / f"gru{s}/summary.json").read_text())["test_forecast_mse"] for s in (0, 1)]
    low, high = sorted(errors)
    assert lines[2]["test forecast mse"] == f"{(low + high) / 2:.3g} [{low:.3g}, {high:.3g}]"
    for name in ("NFE forward", "backward", "ratio", "validation NFE"):
        assert [line[name] for line in lines[1:]] == ["-", "-"]
    assert float(lines[0]["NFE forward"]) > 0
    assert (tmp_path / "plane_vibration-default.png").read_bytes()[:4] == b"\x89PNG"


def read_table(text):
    """The columns and the lines of the first table."""
    _, header, _, *rest = text.splitlines()
    split = [re.split(r"  +", line.strip()) for line in (header, *rest)]
    return split[0], [dict(zip(split[0], cells, strict=True)) for cells in split[1:] if len(cells) == len(split[0])]


def test_a_run_that_diverged_is_said_to(tmp_path, capsys):
    train(parse_echo("--model", "gru", "--epochs", "1", "--out", str(tmp_path / "run")))
    path = tmp_path / "run" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"test_forecast_mse": None}))
    capsys.readouterr()
    plot.main([str(tmp_path)])
    _, lines = read_table(capsys.readouterr().out)
    assert lines[0]["test forecast mse"] == "diverged"


def test_evaluations_are_drawn_of_models_that_make_some(tmp_path):
    for model in ("node", "gru"):
        train(parse_echo("--model", model, "--epochs", "2", "--out", str(tmp_path / model)))
    groups = plot.collect(tmp_path)
    figure = plot.draw(groups, "")
    lines = {ax.get_ylabel(): [line.get_label() for line in ax.get_lines()] for ax in figure.axes}
    assert lines == {
        "train forecast mse": ["NODE", "GRU"],
        "validation forecast mse": ["NODE", "GRU"],
        "forward evaluations per batch": ["NODE"],
        "seconds per epoch": ["NODE", "GRU"],
    }
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log", "linear", "linear"]
    baselines = plot.draw([group for group in groups if not group.is_ode], "")
    assert len(baselines.axes) == 3
    plot.plt.close("all")


def test_protocols_have_figures_of_their_own(tmp_path):
    for protocol in ("paper", "honest"):
        train(parse_echo("--model", "gru", "--epochs", "1", "--out", str(tmp_path / protocol)))
        path = tmp_path / protocol / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"protocol": protocol}))
    names = [group.experiment for group in plot.collect(tmp_path)]
    assert names == ["plane_vibration-default-honest", "plane_vibration-default-paper"]
