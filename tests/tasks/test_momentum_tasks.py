"""What the tasks of recurrent layers share, copying and adding."""

import csv
import dataclasses
import json
import math

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

import hbnode
from tasks import adding, copying, plot
from tasks.common.batches import FreshData, epoch_generator
from tasks.common.config import parse
from tasks.common.run import Run, count_parameters
from tasks.common.train import fit, flushed_denormals
from tasks.models.recurrent import (
    CELLS,
    LAYERS,
    RULES,
    VARIANTS,
    RecurrentConfig,
    RuleOptions,
    make_layer,
    title,
)
from tests.tasks.small_runs import read_metrics

TABLE = {
    "momentum": RuleOptions(momentum=0.6, step_size=0.9),
    "adam": RuleOptions(momentum=0.5, step_size=2.0, beta=0.99),
    "sr": RuleOptions(step_size=0.7, restart=6),
}
TINY = "--device cpu --length 12 --hidden 5 --iterations 3 --batch-size 8 --test-size 10".split()
TASKS = {"copying": copying, "adding": adding}


def options_of(*argv, kind=RecurrentConfig):
    return parse(kind, {}, "", ["--device", "cpu", *argv])


# Rules and layers


def test_rules_come_from_the_table_and_the_options():
    assert options_of("--model", "plain").rule_options(TABLE) == RuleOptions()
    assert options_of("--model", "momentum").rule_options(TABLE) == TABLE["momentum"]
    assert options_of("--model", "adam").rule_options(TABLE) == TABLE["adam"]
    assert options_of("--model", "adam", "--beta", "0.1", "--eps", "1e-4").rule_options(TABLE) == RuleOptions(
        0.5, 2.0, 0.1, eps=1e-4
    )
    assert options_of("--model", "sr", "--restart", "2").rule_options(TABLE) == RuleOptions(step_size=0.7, restart=2)
    assert options_of("--model", "gain").rule_options(TABLE) == RuleOptions(step_size=0.9)
    for model in ("nag", "adaptive"):  # which the table leaves out
        assert options_of("--model", model).rule_options(TABLE) == RuleOptions(step_size=0.9)
    assert options_of("--model", "momentum", "--step-size", "0.2").rule_options(TABLE) == RuleOptions(0.6, 0.2)
    assert options_of("--model", "momentum", "--momentum", "0").rule_options(TABLE) == RuleOptions(0.0, 0.9)


def test_an_option_reaches_those_of_several_variants_that_have_a_use_for_it():
    config = options_of("--model", "all", "--momentum", "0.3")
    rules = {name: dataclasses.replace(config, model=name).rule_options(TABLE) for name in config.chosen()}
    assert {name for name, rule in rules.items() if rule.momentum == 0.3} == {"momentum", "adam"}
    assert rules["plain"] == RuleOptions()


def test_the_same_forget_bias_is_half_of_both_in_the_long_run():
    """b_ih inside the filter grows to b s / (1 - mu), b_hh stays b."""
    rule = options_of("--model", "forget").rule_options(TABLE)
    layer = make_layer("forget", "lstm", 2, 3, rule, forget_bias=-4.0)
    steady = 0.0
    for _ in range(200):
        steady = 0.6 * steady + 0.9 * -4.0
    total = layer.bias_ih_l0 + layer.bias_hh_l0
    torch.testing.assert_close(total[3:6], torch.full((3,), steady - 4.0))
    assert not total[:3].any()
    assert not total[6:].any()


@pytest.mark.parametrize("cell", CELLS)
def test_every_variant_of_every_cell_runs(cell):
    config = options_of("--model", "all", "--cell", cell)
    assert ("forget" in config.chosen()) == (cell == "lstm")
    for model in config.chosen():
        rule = dataclasses.replace(config, model=model).rule_options(TABLE)
        layer = make_layer(model, cell, 2, 3, rule, batch_first=True, num_layers=2)
        output, _ = layer(torch.randn(4, 5, 2))
        assert output.shape == (4, 5, 3)
        if model not in ("plain", "gain", "steady", "forget"):
            assert isinstance(layer, LAYERS[cell])
            assert type(layer.rule) is (RULES[model][0] if model in RULES else hbnode.nn.rules.Momentum)


@pytest.mark.parametrize(("cell", "stock"), [("lstm", torch.nn.LSTM), ("rnn", torch.nn.RNN), ("gru", torch.nn.GRU)])
def test_plain_is_the_stock_layer_and_gain_the_one_with_scaled_input(cell, stock):
    reference = stock(2, 3, batch_first=True).double()
    x = torch.randn(4, 6, 2, dtype=torch.float64)
    for model, scale in (("plain", 1.0), ("gain", 0.9), ("steady", 0.9 / (1 - 0.6))):
        layer = make_layer(
            model, cell, 2, 3, options_of("--model", model).rule_options(TABLE), batch_first=True
        ).double()
        state = dict(reference.state_dict())
        layer.load_state_dict(state)
        scaled = stock(2, 3, batch_first=True).double()
        scaled.load_state_dict({k: v * scale if k.endswith("ih_l0") else v for k, v in state.items()})
        torch.testing.assert_close(layer(x)[0], scaled(x)[0], rtol=1e-12, atol=1e-12)


def test_titles():
    assert title("plain", "lstm") == "LSTM"
    assert title("gain", "gru") == "GRU, same step size"
    assert title("momentum", "dtriv") == "MomentumDTRIV"
    assert len({title(model, "rnn") for model in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "forget", "--cell", "gru"], "--model forget is for --cell lstm"),
        (["--model", "plain", "--step-size", "2"], "--step-size says nothing to --model plain"),
        (["--model", "nag,sr", "--beta", "0.5"], "--beta says nothing to --model nag,sr"),
        (["--momentum", "1"], "--momentum must be below 1, got 1.0"),
        (["--momentum", "-0.1"], "--momentum must not be negative"),
        (["--step-size", "0"], "--step-size must be positive, got 0"),
        (["--step-size", "nan"], "--step-size is nan"),
        (["--model", "sr", "--restart", "2.5"], "invalid int value"),
        (["--hidden", "0"], "--hidden must be positive, got 0"),
        (["--model", "lstm"], "invalid choice: 'lstm'"),
        (["--tol", "0.1"], "unrecognized arguments: --tol"),
    ],
)
def test_bad_options(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        options_of(*argv)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_forget_bias_may_be_negative():
    assert options_of("--forget-bias", "-4").forget_bias == -4


# The problems


def test_copying_as_the_paper_draws_it():
    """Figure 8, with five characters of four."""
    x, target = copying.sequences(torch.tensor([[3, 1, 0, 2, 2, 5, 7, 4, 6, 1]]), 20)
    blank, start = copying.BLANK, copying.START
    assert x[0].tolist() == [3, 1, 0, 2, 2, 5, 7, 4, 6, 1, *[blank] * 20, start, *[blank] * 9]
    assert target[0].tolist() == [*[blank] * 30, 3, 1, 0, 2, 2, 5, 7, 4, 6, 1]


def test_the_trivial_loss_of_copying_is_that_of_blanks_and_a_guess():
    class Trivial(torch.nn.Module):
        def forward(self, x):
            """Certain of a blank as long as no start symbol was seen, and then of no blank."""
            is_late = (x == copying.START).cumsum(1).bool()
            scores = torch.zeros(*x.shape, 9, dtype=torch.float64)
            scores[..., copying.BLANK] = torch.where(is_late, -1e3, 1e3)
            return scores

    config = options_of("--length", "30", kind=copying.CopyingConfig)
    batch = copying.characters(50, torch.Generator().manual_seed(0))
    loss, _ = copying.cross_entropy(Trivial(), batch, 30)
    assert loss.item() == pytest.approx(config.trivial_loss, rel=1e-12)
    assert config.trivial_loss == pytest.approx(10 * math.log(8) / 50)


def test_a_copier_that_remembers_has_no_loss():
    class Perfect(torch.nn.Module):
        def forward(self, x):
            remembered = x[:, :10]
            target = torch.cat([torch.full_like(x[:, 10:], copying.BLANK), remembered], dim=1)
            return 1e3 * torch.nn.functional.one_hot(target, 9).double()

    loss, means = copying.cross_entropy(Perfect(), copying.characters(6, torch.Generator().manual_seed(0)), 30)
    assert loss.item() == 0
    assert means == {"accuracy": 1.0}


def test_adding_marks_one_number_in_each_half():
    numbers, marked = adding.problems(4000, 7, torch.Generator().manual_seed(0))
    assert set(marked[:, 0].tolist()) == {0, 1, 2}
    assert set(marked[:, 1].tolist()) == {3, 4, 5, 6}
    assert 0 <= numbers.min() < numbers.max() < 1


def test_the_trivial_loss_of_adding_is_that_of_the_mean():
    class One(torch.nn.Module):
        def forward(self, x):
            return torch.ones(len(x))

    batch = adding.problems(100_000, 10, torch.Generator().manual_seed(0))
    assert adding.squared_error(One(), batch)[0].item() == pytest.approx(adding.TRIVIAL_LOSS, rel=2e-2)


def test_an_adder_sees_numbers_and_marks():
    class Exact(torch.nn.Module):
        def forward(self, x):
            return (x[..., 0] * x[..., 1]).sum(1)

    batch = adding.problems(20, 9, torch.Generator().manual_seed(0))
    assert adding.squared_error(Exact(), batch)[0].item() < 1e-12


def test_presets_have_the_papers_sizes():
    """155,239 and 67,713 parameters: an LSTM with two biases and a readout of 9, or of one."""
    config = parse(copying.CopyingConfig, copying.PRESETS, "", ["--preset", "2k", "--device", "cpu"])
    assert (config.length, config.lr, config.batch_size, config.iterations * config.epochs) == (2000, 2e-4, 128, 7000)
    assert config.forget_bias == 1
    assert config.rule_options(config.table()) == RuleOptions(momentum=0.9, step_size=2.0)
    assert count_parameters(copying.Copier(config)) == 155_239
    config = parse(copying.CopyingConfig, copying.PRESETS, "", ["--preset", "1k", "--device", "cpu"])
    assert config.rule_options(config.table()) == RuleOptions(momentum=0.6, step_size=0.9)
    config = parse(adding.AddingConfig, adding.PRESETS, "", ["--preset", "750", "--device", "cpu"])
    assert (config.length, config.lr, config.batch_size, config.epochs) == (750, 2e-4, 50, 1200)
    assert count_parameters(adding.Adder(config)) == 67_713
    for task in (config, options_of(kind=copying.CopyingConfig)):
        table = task.table()
        assert table["adam"] == RuleOptions(momentum=0.6, step_size=2.0, beta=0.999)
        assert table["rmsprop"] == RuleOptions(momentum=0.0, step_size=2.0, beta=0.999)
        assert (table["sr"].step_size, table["sr"].restart) == (0.9, 100)


# Runs


@pytest.mark.parametrize(("task", "cell"), [("copying", "lstm"), ("adding", "lstm"), ("adding", "dtriv")])
def test_a_run_can_be_trained_longer_to_the_same_numbers(task, cell, tmp_path, capsys):
    options = [*TINY, "--model", "adam", "--cell", cell, "--schedule", "step", "--out"]
    TASKS[task].main([*options, str(tmp_path / "whole"), "--epochs", "3"])
    assert "trivial loss" in capsys.readouterr().out
    for epochs in ("1", "3"):
        TASKS[task].main([*options, str(tmp_path / "parts"), "--epochs", epochs])
    rows = read_metrics(tmp_path / "whole")
    assert read_metrics(tmp_path / "parts") == rows
    assert not any(name.endswith("nfe") or name.startswith("nfe") for name in rows[0])
    summary = json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert summary["trivial_loss"] > 0
    assert summary["rule"]["beta"] == 0.999
    assert summary["test_loss"] == float(rows[-1]["test_loss"])


@pytest.mark.parametrize("task", TASKS)
def test_every_epoch_and_seed_has_data_of_its_own_and_all_the_same_test(task, tmp_path, monkeypatch):
    seen = []

    def note(run, model, train, test, loss, **options):
        seen.append((train, test))
        raise SystemExit

    monkeypatch.setattr(TASKS[task], "fit", note)
    for seed in ("0", "1"):
        with pytest.raises(SystemExit):
            TASKS[task].main([*TINY, "--seed", seed, "--out", str(tmp_path)])
    made = [train.make(epoch) for train, _ in seen for epoch in (0, 1)]
    assert len({tuple(batch[0].flatten().tolist()) for batch in made}) == 4
    assert len(made[0][0]) == seen[0][0].samples == 24
    again = seen[0][0].make(0)
    assert all(torch.equal(x, y) for x, y in zip(again, made[0], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(seen[0][1], seen[1][1], strict=True))


def test_copying_is_learned_where_it_is_short(tmp_path):
    """Far below what can be had without memory."""
    options = "--device cpu --model plain --length 0 --hidden 40 --lr 1e-2 --batch-size 32 --test-size 50".split()
    copying.main([*options, "--epochs", "4", "--out", str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test_loss"] < 0.8 * summary["trivial_loss"]


def test_plot_draws_and_tabulates_recurrent_runs(tmp_path, capsys):
    for model in ("plain", "momentum"):
        copying.main([*TINY, "--model", model, "--epochs", "2", "--out", str(tmp_path / model)])
    capsys.readouterr()
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "copying-default-lstm-12" in out
    assert "trivial loss" in out
    assert "test accuracy %" in out
    assert "NFE" not in out
    assert {line.split("  ")[0] for line in out.splitlines()} >= {"LSTM", "MomentumLSTM"}
    assert (tmp_path / "copying-default-lstm-12.png").read_bytes()[:4] == b"\x89PNG"
    groups = plot.collect(tmp_path)
    figure = plot.draw(groups, "")
    assert [ax.get_ylabel() for ax in figure.axes] == ["train loss", "test loss", "seconds per epoch"]
    assert [ax.get_yscale() for ax in figure.axes] == ["log", "log", "linear"]
    trivial = [line for line in figure.axes[1].lines if line.get_label() == "no memory"]
    assert trivial[0].get_ydata()[0] == pytest.approx(10 * math.log(8) / 32)
    assert {line.get_label(): line.get_linestyle() for line in figure.axes[0].lines[:1]} == {"LSTM": "--"}


# The trainer


@dataclasses.dataclass(frozen=True)
class FitConfig(RecurrentConfig):
    """A line fitted in the task "adding", whose name only serves as one."""


def line_problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(24, 1, generator=generator)
    return (x[:16], 3 * x[:16]), (x[16:], 3 * x[16:])


def square(model, batch):
    x, y = batch
    error = torch.nn.functional.mse_loss(model(x), y)
    return error, {"accuracy": 1 / (1 + error.item())}


def fit_line(folder, epochs, **options):
    config = options_of(
        "--batch-size", "8", "--lr", "0.05", "--epochs", str(epochs), "--out", str(folder), kind=FitConfig
    )
    config = dataclasses.replace(config, **options.pop("config", {}))
    run = Run("adding", config, "")
    model = torch.nn.Linear(1, 1)
    train, test = line_problem()
    found = fit(run, model, options.pop("train", train), test, square, **options)
    run.finish(model, **found)
    return model, found


def two_rates(model):
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.02}]
    return torch.optim.SGD(groups, lr=1.0)


def test_groups_keep_their_rates_under_the_schedule(tmp_path):
    rates = []

    def make(model):
        optimizer = two_rates(model)
        optimizer.register_step_pre_hook(lambda o, *_: rates.append([group["lr"] for group in o.param_groups]))
        return optimizer

    fit_line(tmp_path / "whole", 2, optimizer=make, config={"schedule": "cosine"})
    factors = [(1 + math.cos(math.pi * n / 4)) / 2 for n in range(4)]
    assert rates == [pytest.approx([0.2 * f, 0.02 * f]) for f in factors]


def test_steps_are_counted_over_a_resumed_run(tmp_path):
    steps = []
    for epochs in (2, 3):
        fit_line(tmp_path, epochs, optimizer=two_rates, after_step=steps.append)
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("best", "sign"), [("test_loss", 1), ("test_accuracy", -1)])
def test_the_best_epochs_weights_are_restored(best, sign, tmp_path):
    """A rate that diverges in the end: the best epoch is not the last. In one go, and in parts."""
    shrinking = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.3), "best": best}
    whole, found = fit_line(tmp_path / "whole", 8, **shrinking)
    for epochs in (3, 6, 8, 8):
        parts, again = fit_line(tmp_path / "parts", epochs, **shrinking)
    assert again == found
    torch.testing.assert_close(dict(parts.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)
    rows = read_metrics(tmp_path / "whole")
    values = [sign * float(row[best]) for row in rows]
    index = values.index(min(values))
    assert index < len(rows) - 1
    assert found == {"best_epoch": index + 1, f"best_{best}": sign * values[index]}
    last = torch.load(tmp_path / "whole" / "checkpoint.pt", weights_only=True)["model"]
    assert not torch.equal(last["weight"], whole.weight)
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["best_epoch"] == index + 1


def test_fresh_data_is_made_once_an_epoch(tmp_path):
    made = []

    def make(epoch):
        made.append(epoch)
        x = torch.rand(16, 1, generator=epoch_generator(0, epoch))
        return x, 3 * x

    fresh = FreshData(16, make)
    parts = [fit_line(tmp_path / "parts", epochs, train=fresh)[0] for epochs in (1, 3)][-1]
    assert made == [0, 1, 2]
    whole, _ = fit_line(tmp_path / "whole", 3, train=fresh)
    assert torch.equal(parts.weight, whole.weight)


def test_a_loss_that_is_not_finite_is_named(tmp_path):
    explode = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e30)}
    with pytest.raises(SystemExit, match=r"epoch \d, batch \d: loss is (inf|nan)\. Fix: a smaller --lr"):
        fit_line(tmp_path / "train", 20, **explode)
    with pytest.raises(SystemExit, match=r"test data: test_loss is (inf|nan)\. Fix: a smaller --lr"):
        fit_line(tmp_path / "test", 1, config={"batch_size": 16}, **explode)
    assert not (tmp_path / "test" / "summary.json").exists()


def test_metrics_hold_no_evaluations(tmp_path):
    fit_line(tmp_path, 1)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        names = next(csv.reader(file))
    assert names == ["epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "seconds"]


def test_denormals_are_flushed_for_a_while_only():
    tiny = torch.tensor(1e-38)
    with flushed_denormals():
        if torch.set_flush_denormal(True):  # this processor can
            assert (tiny / 10).item() == 0
    assert (tiny / 10).item() > 0
