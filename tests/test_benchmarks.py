"""That benchmarks run and write what they measured, and compare what computes the same."""

import functools
import json

import numpy as np
import pytest
import torch

import hbnode
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
from tests.models import slow

IRREGULAR = ["nn.GRU", "loop, 1 evaluation", "hbnode, leapfrog", "hbnode, unit not fitted"]
RUNS = {  # a benchmark with its options, and smaller sizes
    recurrent: (
        ["--quick", "--repeats", "2", "--sections", "training", "cells", "orthogonal", "inference"], {},
    ),
    attention: (
        ["--repeats", "1", "--sections", "time", "generation"], {"LENGTHS": (64, 128), "TOKENS": (2, 6)},
    ),
    hessian_free: (["--quick", "--repeats", "1"], {}),
    strong_damping: (
        ["--quick"],
        {"TOLERANCES": (1e-2, 1e-4), "STARTS": strong_damping.STARTS[:1], "MAX_STEPS": 50},
    ),
    oscillators: (["--quick", "--repeats", "1"], {}),
    irregular: (
        ["--repeats", "1"],
        {
            "BATCHES": 1, "EPOCHS": (1,), "MEMORY": {"nn.GRU": None},
            "MODELS": {name: irregular.MODELS[name] for name in IRREGULAR},
            "make_batch": functools.partial(irregular.make_batch, length=5),
            "in_fresh_process": lambda function, name: 2.0,
        },
    ),
    dense: (["--quick", "--repeats", "1"], {}),
    events: (["--quick"], {}),
    sde: (["--quick", "--repeats", "1"], {"DIFFRAX": {}}),  # JAX takes seconds to compile
}  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs a benchmark's ``main`` and returns what it wrote."""

    def run(benchmark, arguments, sizes):
        for name, value in sizes.items():
            monkeypatch.setattr(benchmark, name, value)
        out = tmp_path / "report.json"
        benchmark.main([*arguments, "--out", str(out)])
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize("benchmark", [recurrent, attention, *slow(*list(RUNS)[2:])])
def test_a_benchmark_writes_and_prints_a_report(run, benchmark, capsys):
    machine, *sections = run(benchmark, *RUNS[benchmark]).values()
    assert machine["threads"] == 1
    assert all(sections)
    assert capsys.readouterr().out


@pytest.mark.slow
def test_memory_of_a_process_of_its_own(run):
    """Training keeps the gates too."""
    torch.ones(2**27)  # a peak that the processes must not inherit
    sizes = {"RULES": {"Momentum": "momentum"}, "PAPER": recurrent.Setting(1024, 64, 32, 1)}
    outputs = 1024 * 64 * 32 * 4 / 2**20
    for row in run(recurrent, ["--sections", "memory"], sizes)["memory"]:
        assert row["training_MiB"] > max(row["evaluation_MiB"], 5 * outputs)


# What is compared computes the same


@pytest.mark.parametrize(
    ("rule", "constants", "options"),
    [(None, {"momentum": 0.0, "step_size": 1.0}, {}), ("momentum", {}, {}), ("adam", {}, {"beta": 0.9})],
)
def test_the_loops_are_the_papers_equations(rule, constants, options):
    constants = constants or {"momentum": 0.5, "step_size": 0.5}
    layer = hbnode.nn.MomentumLSTM(3, 4, rule=rule, **constants) if rule else torch.nn.LSTM(3, 4)
    x, loop = torch.randn(5, 2, 3), recurrent.PaperLSTM(3, 4, 0.0, 1.0)
    own = loop.x2h.weight, loop.h2h.weight, loop.x2h.bias, loop.h2h.bias
    layer.load_state_dict(dict(zip(dict(layer.named_parameters()), own, strict=True)))
    for name, value in (constants | options).items():
        setattr(loop, name, value)
    torch.testing.assert_close(loop(x)[0], layer(x)[0])


def test_the_orthogonal_loop_is_the_papers_equation():
    x, loop = torch.randn(5, 2, 3), recurrent.LoopDTRIV(3, 4, 0.5, 0.5)
    layer = hbnode.nn.MomentumDTRIV(3, 4, momentum=0.5, step_size=0.5)
    with torch.no_grad():
        layer.weight_ih_l0.copy_(loop.encoder.weight)
        layer.bias_l0.copy_(loop.bias)
    layer.weight_hh_l0 = loop.recurrent.weight.detach()
    torch.testing.assert_close(loop(x)[0], layer(x)[0])


def test_the_forms_of_the_memory_agree():
    """Where gates are near 1, so that the published algorithm keeps its digits too."""
    inputs = [x.double() for x in attention.gated_inputs(128, 2, 0.8)]
    wanted = attention.loop(*inputs)
    for form in attention.FORMS.values():
        assert (form(*inputs) - wanted).abs().max() < 1e-11 * wanted.abs().max()


@pytest.mark.parametrize("name", attention.CONTENDERS)
def test_every_attention_is_causal(name):
    contender = attention.Contender.of(name, 20)
    whole = contender.attend(*contender.inputs)
    torch.testing.assert_close(contender.attend(*(x[:, :, :9] for x in contender.inputs)), whole[:, :, :9])


@pytest.mark.parametrize("cell", hessian_free.CELLS)
def test_the_products_are_one(cell):
    ways = hessian_free.products(cell, hessian_free.TINY)
    expected = ways["HessianFree"]()
    for name in ways.keys() - {"gradient", "HessianFree", "HessianFree, structural"}:
        torch.testing.assert_close(ways[name](), expected, rtol=1e-4, atol=1e-5)


def test_the_loops_of_oscillators_are_the_layer():
    x, t = torch.randn(2, 9, 3, dtype=torch.float64), torch.rand(2, 9, dtype=torch.float64).cumsum(1)
    layer = hbnode.nn.Oscillators(3, 4, 5).double()
    torch.testing.assert_close(oscillators.Loop(layer)(x, t)[0], layer(x, t)[0])
    layer = hbnode.nn.Oscillators(1, 1, 3, noise=True).double()
    found = oscillators.one_by_one(layer, x[..., 0], t)
    torch.testing.assert_close(found, layer.log_likelihood(x[..., :1], t).sum(), rtol=0, atol=1e-10)


def test_the_loop_of_one_evaluation_is_leapfrog():
    batch = irregular.make_batch(0, 6)
    loop, model = irregular.Loop(1), irregular.MODELS["hbnode, leapfrog"]()
    theirs = {"cell": model.rnn.cell, "f": model.rnn.field.func.layers, "head": model.head}
    for name, module in theirs.items():
        module.load_state_dict(getattr(loop, name).state_dict())
    torch.testing.assert_close(loop(*batch[:3]), model(*batch[:3]))


@pytest.mark.slow
def test_the_solvers_of_diffrax_have_their_orders_on_our_paths(monkeypatch):
    pytest.importorskip("diffrax")
    monkeypatch.setattr(sde, "DIFFRAX", {"ALIGN": 1, "QUICSORT": 2})
    errors = {(row["method"], row["steps"]): row["rms"] for row in sde.strong(sde.NETWORK, 64, 512)}
    for name, order in (("diffrax ALIGN", 2), ("diffrax QUICSORT", 3)):
        assert errors[name, 32] / errors[name, 64] > 2 ** (order - 0.3)


@pytest.mark.slow
def test_series_tools(run):
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
    smaller = {
        "data": lambda package, name: frames[name],
        "SeriesForecaster": functools.partial(series_tools.SeriesForecaster, "last"),
        "OscillatorSmoother": functools.partial(series_tools.OscillatorSmoother, 1),
    }
    report = run(series_tools, ["--cases", "UKgas", "pbcseq", "Nile, blocks"], smaller)
    cells = report["forecasts"]["UKgas"]
    assert cells["seasonal naive"]["error"] == pytest.approx(1.5)  # 4 in four quarters, 8 in the next four, over 4
    assert report["forecasts"]["pbcseq"]["seasonal naive"]["error"] == pytest.approx(2)
    assert max(cells[kind]["error"] for kind in ("AutoETS", "AutoARIMA", "boosted lags")) < 0.1
    assert max(cell["error"] for cell in report["gaps"]["Nile, blocks"].values()) < 0.2


def test_short_functions_are_called_more_often():
    calls = []
    times = harness.interleaved({"one": lambda: sum(range(2000)), "two": lambda: calls.append(0)}, 2, at_least=0.001)
    assert [len(found) for found in times.values()] == [2, 2]
    assert len(calls) > 100
