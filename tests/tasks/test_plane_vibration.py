"""Plane vibration: the record and its stand-in, both splits, what the models see, training and resuming."""

import json
import math
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import plane_vibration
from tasks.common.files import read_checkpoint
from tasks.common.run import count_parameters
from tasks.data import f16
from tests.models import MODELS
from tests.tasks.small_runs import names_in, read_metrics

COUNTS = {"node": 15_986, "anode": 16_730, "sonode": 16_649, "hbnode": 16_126, "ghbnode": 16_127}
NAME = "F16Data_FullMSine_Level1"


@pytest.fixture(scope="module")
def made_up():
    return f16.vibrating_structure()


# Data


def test_the_made_up_structure_repeats_but_for_its_noise(made_up):
    period = made_up.reshape(9, 8192, 5).mean(0)
    noise = (made_up.reshape(9, 8192, 5) - period).std((0, 1)) / made_up.std(0)
    torch.testing.assert_close(noise, torch.full((5,), 0.0094, dtype=torch.float64), atol=2e-4, rtol=0)
    assert made_up.shape == (73_728, 5)
    assert torch.equal(made_up, f16.vibrating_structure())
    spectrum = torch.fft.rfft(period, dim=0).abs()
    f = torch.fft.rfftfreq(8192, 1 / 400)
    assert spectrum[(f < 1.9) | (f > 15.1)].square().sum() < 1e-2 * spectrum.square().sum()


def test_modes_of_the_made_up_structure(made_up):
    """In the time domain, the response of the six modes to the force is the accelerations, but for three factors."""
    from scipy.signal import cont2discrete, lfilter

    fine = 8  # samples a row, of the periodic force, so that a line between two of them is the force
    force = made_up.reshape(9, 8192, 5).mean(0)[:, 0].numpy()
    spectrum = np.fft.rfft(force)
    spectrum[np.fft.rfftfreq(8192, 1 / 400) > 15.01] = 0  # the noise
    force = np.tile(np.fft.irfft(spectrum, 8192 * fine) * fine, 3)
    responses = []
    for f, zeta in zip((3.3, 4.7, 6.1, 7.9, 10.2, 13.1), (0.02, 0.015, 0.01, 0.012, 0.015, 0.02), strict=True):
        w = 2 * math.pi * f
        a, b = np.array([[0.0, 1.0], [-(w**2), -2 * zeta * w]]), np.array([[0.0], [1.0]])
        c, d = np.array([[-(w**2), -2 * zeta * w]]), np.array([[1.0]])  # q'' from q, q' and F
        discrete = cont2discrete((a, b, c, d), 1 / (400 * fine), method="foh")[:4]
        numerator, denominator = _transfer(discrete)
        responses.append(lfilter(numerator, denominator, force)[2 * 8192 * fine :: fine])
    basis = np.stack(responses, axis=1)
    measured = made_up.reshape(9, 8192, 5).mean(0)[:, 2:].numpy()
    _, residual, *_ = np.linalg.lstsq(basis, measured, rcond=None)
    assert np.sqrt(residual / 8192).max() < 0.005 * 0.3  # a third of the noise of a period


def _transfer(system):
    from scipy.signal import ss2tf

    numerator, denominator = ss2tf(*system)
    return numerator[0], denominator


def test_the_real_record_when_it_is_there():
    root = os.environ.get("HBNODE_DATA")
    if not root or not any((Path(root) / sub / f"{NAME}.csv").is_file() for sub in ("plane-vibration", ".")):
        pytest.skip("the F-16 is not in HBNODE_DATA")
    rows, source = f16.read_plane_vibration()
    assert source == "f16"
    assert rows.shape == (73_728, 5)
    assert rows[0].tolist() == [0.95714, -0.00045788, -0.018392, -0.049607, -0.046328]
    periods = rows.reshape(9, 8192, 5)
    assert ((periods - periods.mean(0)).std((0, 1)) / rows.std(0)).max() < 0.02  # it repeats
    paper = plane_vibration.Splits.of(rows, "paper", 1)
    assert {name: len(part) for name, part in paper.rows.items()} == {"train": 509, "validation": 254, "test": 254}
    assert paper.yardsticks()["periods_earlier_forecast_mse"] < 1e-3 < paper.yardsticks()["persistence_forecast_mse"]


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = '"Force","Voltage","Acceleration1","Acceleration2","Acceleration3","Fs",\n'
    path.write_text(header + "".join(",".join(map(repr, row)) + ",,\n" for row in rows))


@pytest.fixture
def record(made_up, tmp_path, monkeypatch):
    """A short record in HBNODE_DATA."""
    monkeypatch.setattr(f16, "ROWS", 100)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path / "data"))
    write_csv(tmp_path / "data" / "plane-vibration" / f"{NAME}.csv", made_up[:100].tolist())
    return made_up[:100]


def test_the_record_is_read_from_the_data_folder(record, tmp_path):
    rows, source = f16.read_plane_vibration()
    assert torch.equal(rows, record)
    assert source == "f16"
    (tmp_path / "data" / "plane-vibration" / f"{NAME}.csv").rename(tmp_path / "data" / f"{NAME}.csv")
    assert torch.equal(f16.read_plane_vibration("f16")[0], record)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2].rsplit("\n", 1)[0] + "\n", r"expected 100 rows .* got shape \(\d+, 5\)"),
        (lambda text: "<html>404</html>", "expected the header Force,"),
        (lambda text: "", r"expected the header Force,.*got \[\]"),
        (lambda text: text.split("\n", 1)[0] + "\n", "expected 100 rows"),
        (lambda text: text[: len(text) - 60], "expected 5 numbers"),
        (lambda text: text.replace(",,\n", ",x,\n", 1).replace("\n", "\nx", 1), r"line 2: expected 5 numbers"),
        (lambda text: text.rsplit("\n", 2)[0] + "\ninf,1,1,1,1,,\n", "100 rows of 5 finite numbers"),
        (lambda text: text.rsplit("\n", 2)[0] + "\nnan,1,1,1,1,,\n", r"line 101: expected 5 numbers, got \[nan"),
    ],
)
@pytest.mark.parametrize("source", ["auto", "f16"])
def test_a_damaged_csv_is_named(damage, message, source, record, tmp_path):
    path = tmp_path / "data" / "plane-vibration" / f"{NAME}.csv"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=rf"{NAME}\.csv.*{message}[\s\S]*Fix: get {NAME}\.csv anew"):
        f16.read_plane_vibration(source)


def test_without_the_csv_the_package_is_asked(record, tmp_path, monkeypatch):
    from scipy.io import savemat

    monkeypatch.setenv("HBNODE_DATA", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", None)
    with pytest.raises(FileNotFoundError, match=rf"nonlinear_benchmarks is not installed\. Fix: put {NAME}\.csv"):
        f16.read_plane_vibration("f16")
    path = tmp_path / f"{NAME}.mat"
    arrays = record.T.numpy()
    savemat(path, {"Force": arrays[:1], "Voltage": arrays[1:2], "Acceleration": arrays[2:], "Fs": 400.0})
    package = types.SimpleNamespace(F16=lambda data_file_locations: [str(tmp_path / "other.mat"), str(path)])
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", package)
    rows, source = f16.read_plane_vibration()
    assert torch.equal(rows, record)
    assert source == "f16"
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=rf"{NAME}\.mat cannot be read"):
        f16.read_plane_vibration()

    def fails(data_file_locations):
        raise OSError("no network")

    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", types.SimpleNamespace(F16=fails))
    with pytest.raises(FileNotFoundError, match=r"nonlinear_benchmarks failed \(OSError\('no network'\)\)\. Fix: put"):
        f16.read_plane_vibration("f16")
    with pytest.raises(ValueError, match="source must be one of auto, f16, generated, got 'f17'"):
        f16.read_plane_vibration("f17")


# Splits


def numbered():
    """A record that tells the numbers of its rows, as nine periods do not."""
    return torch.arange(73_728, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)


@pytest.mark.parametrize(("protocol", "sizes"), [("paper", (509, 254, 254)), ("honest", (491, 243, 243))])
def test_segments_and_their_targets_are_the_right_rows(protocol, sizes):
    record = numbered()
    splits = plane_vibration.Splits.of(record, protocol, 1)
    assert tuple(len(part) for part in splits.rows.values()) == sizes
    for name, rows in splits.rows.items():
        assert (rows.diff(dim=1) >= 1).all()
        assert (rows.flatten().diff() >= 1).all()  # no row twice
        x, t, target = splits.batches[name]
        number = (x[..., 0] * splits.deviation[0] + splits.mean[0]).round().long()
        assert torch.equal(number, rows[:, :64])
        assert torch.equal(t, (rows - rows[:, :1]).float())
        ahead = (target[..., 4] * splits.deviation[4] + splits.mean[4]).div(5).round().long()
        assert torch.equal(ahead, rows[:, 64:] + torch.arange(8))


def test_a_tenth_of_the_rows_is_missing():
    rows = torch.cat(list(plane_vibration.split_rows(73_728, "paper", 1).values()))
    gaps = rows.diff(dim=1).flatten().bincount().double()
    expected = 0.9 * 0.1 ** torch.arange(3, dtype=torch.float64)  # geometric
    torch.testing.assert_close(gaps[1:4] / gaps.sum(), expected, atol=2e-3, rtol=0)
    assert rows.max() < 73_728 - 100
    another = plane_vibration.split_rows(73_728, "paper", 2)["train"]
    assert not torch.equal(another, plane_vibration.split_rows(73_728, "paper", 1)["train"])


def test_the_papers_split_is_in_order():
    rows = plane_vibration.split_rows(73_728, "paper", 1)
    assert rows["train"].max() < rows["validation"].min()
    assert rows["validation"].max() < rows["test"].min()
    quarters = [rows[name].min().item() / 73_628 for name in ("validation", "test")]
    assert quarters == [pytest.approx(0.5, abs=5e-3), pytest.approx(0.75, abs=5e-3)]


def test_no_phase_of_the_honest_split_is_in_two_parts():
    rows = plane_vibration.split_rows(73_728, "honest", 1)
    used = {}
    for name, part in rows.items():
        every = torch.cat([part.flatten(), (part[:, -1:] + torch.arange(8)).flatten()])
        assert every.max() < 73_728
        used[name] = (every % 8192).unique()
    for one, another in (("train", "validation"), ("validation", "test"), ("train", "test")):
        distance = (used[one][:, None] - used[another]).abs()
        assert torch.minimum(distance, 8192 - distance).min() > 80  # around the period too
    spans = rows["train"][:, -1] - rows["train"][:, 0]
    assert spans.max() < 128  # no segment goes from one period to the next


def test_standardised_with_what_training_may_know(made_up):
    splits = plane_vibration.Splits.of(made_up, "honest", 1)
    phase = torch.arange(73_728) % 8192
    torch.testing.assert_close(splits.deviation, made_up[phase < 3976].std(0))
    other = made_up.clone()
    other[phase >= 3976] *= 7.0
    changed = plane_vibration.Splits.of(other, "honest", 1)
    assert torch.equal(changed.mean, splits.mean)
    assert torch.equal(changed.batches["train"][0], splits.batches["train"][0])
    assert torch.equal(changed.batches["train"][2], splits.batches["train"][2])
    assert not torch.equal(changed.batches["test"][0], splits.batches["test"][0])
    whole = plane_vibration.Splits.of(made_up, "paper", 1)
    torch.testing.assert_close(whole.deviation, made_up.std(0))  # as the authors' code


def test_yardsticks(made_up):
    splits = plane_vibration.Splits.of(made_up, "paper", 1)
    last, first = splits.rows["test"][:, 63], splits.rows["test"][:, 64]
    errors = [(splits.record[first + k] - splits.record[last]).square().mean() for k in range(8)]
    found = splits.yardsticks()
    assert found["persistence_forecast_mse"] == pytest.approx(torch.stack(errors).mean().item(), rel=1e-5)
    assert found["periods_earlier_forecast_mse"] == pytest.approx(2e-4, rel=0.1)  # two noises of 1 %
    assert list(plane_vibration.Splits.of(made_up, "honest", 1).yardsticks()) == ["persistence_forecast_mse"]


# Models


@pytest.mark.parametrize("model", MODELS)
def test_the_papers_numbers_of_parameters(model):
    forecaster = plane_vibration.Forecaster(model)
    assert count_parameters(forecaster) == COUNTS[model]


@pytest.mark.parametrize("model", plane_vibration.BASELINES)
def test_baselines_are_of_about_that_size(model):
    if model == "cfc":
        pytest.importorskip("ncps")
    assert abs(count_parameters(plane_vibration.Baseline(model)) - 16_000) < 500


@pytest.fixture
def short(monkeypatch):
    """Windows of 26 samples in place of 64; the figure shows the last 24."""
    monkeypatch.setattr(plane_vibration, "WINDOW", 26)


def window(batch=3, seed=0):
    """Samples and stamps in float64: the models that read them are, too."""
    generator = torch.Generator().manual_seed(seed)
    length = plane_vibration.WINDOW
    gaps = torch.randint(1, 4, (batch, length), generator=generator).double()
    t = torch.cat([torch.zeros(batch, 1), gaps.cumsum(1)], dim=1)
    return torch.randn(batch, length, 5, generator=generator, dtype=torch.float64), t


def test_the_cell_is_the_formula():
    cell = plane_vibration.LinearCell(5, 4, parts=2).double()
    x, h, m = (torch.randn(3, size, dtype=torch.float64) for size in (5, 4, 4))
    expected = x @ cell.input.weight.T + cell.input.bias
    for part, weight in ((h, cell.parts[0]), (m, cell.parts[1])):
        expected = expected + part @ weight.weight.T + weight.bias
    torch.testing.assert_close(cell(x, torch.cat([h, m], dim=1)), expected)


@pytest.mark.parametrize("model", ["anode", "hbnode"])
def test_a_prediction_has_seen_the_samples_before_it_only(model, short):
    """With an encoder that sees nothing: in the paper's model it sees the window."""
    torch.manual_seed(0)
    forecaster = plane_vibration.Forecaster(model, shrink=0.1).double()
    torch.nn.init.zeros_(forecaster.rnn.encoder.linear.weight)
    x, t = window()
    other = x.clone()
    other[:, 16:] += 1.0
    with torch.no_grad():
        one, another = forecaster(x, t), forecaster(other, t)
    torch.testing.assert_close(one[1][:, :15], another[1][:, :15])  # the last has seen 15 samples, of stamp 16
    torch.testing.assert_close(one[1][:, 15], another[1][:, 15])
    assert (one[1][:, 16] - another[1][:, 16]).abs().min() > 1e-6
    torch.testing.assert_close(one[2][:, :16], another[2][:, :16])
    assert (one[2][:, 16] - another[2][:, 16]).abs().min() > 1e-6
    assert (one[0] - another[0]).abs().max() > 1e-6


@pytest.mark.parametrize("model", ["node", "sonode", "ghbnode"])
def test_the_forecast_begins_with_the_prediction_at_the_last_stamp(model, short):
    torch.manual_seed(0)
    forecaster = plane_vibration.Forecaster(model, shrink=1e-2).double()
    x, t = window()
    with torch.no_grad():
        forecast, following, _ = forecaster(x, t)
        later = t.clone()
        later[:, -1] += 3
        shifted, moved, _ = forecaster(x, later)
    assert forecast.shape == (3, 8, 5)
    torch.testing.assert_close(forecast[:, 0], following[:, -1])
    torch.testing.assert_close(shifted[:, 0], forecast[:, 3], rtol=1e-3, atol=1e-4)  # 3 rows later
    torch.testing.assert_close(moved[:, -1], shifted[:, 0])


@pytest.mark.parametrize("model", ["lstm", "gru-d"])
def test_a_baseline_goes_on_with_its_own_predictions(model):
    torch.manual_seed(0)
    baseline = plane_vibration.Baseline(model).double()
    x, t = window()
    with torch.no_grad():
        forecast, following, current = baseline(x, t)
        longer = torch.cat([x, forecast[:, :7]], dim=1)  # its predictions, as if they had been measured
        gap = torch.cat([t.diff(dim=1), torch.ones(3, 7)], dim=1)
        features, _ = baseline.rnn(longer, torch.nn.functional.pad(gap[:, :-1], (1, 0)), gap_after=gap)
    assert current is None
    torch.testing.assert_close(following, baseline.head(features)[:, :64])
    torch.testing.assert_close(forecast, baseline.head(features)[:, 63:])


def test_the_loss():
    x, t = window()
    target = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    forecast, following, current = torch.zeros(3, 8, 5), torch.ones(3, 64, 5), 2 * torch.ones(3, 64, 5)

    def model(samples, stamps):
        assert samples is x
        assert stamps is t
        return forecast, following, current

    loss, means = plane_vibration.squared_errors(model, (x, t, target), ahead=0.5, seen=0.25)
    stamps = torch.cat([x[:, 1:], target[:, :1]], dim=1)
    parts = [target.square().mean(), (1 - stamps).square().mean(), (2 - x).square().mean()]
    torch.testing.assert_close(loss, parts[0] + 0.5 * parts[1] + 0.25 * parts[2])
    assert means["forecast_mse"] == pytest.approx(parts[0].item())
    assert means["next_mse"] == pytest.approx(parts[1].item())


@pytest.mark.parametrize("model", MODELS)
def test_it_starts_near_rest(model):
    """An explosion over the 64 samples would be in the loss."""
    torch.manual_seed(0)
    forecaster = plane_vibration.Forecaster(model, shrink=plane_vibration.PlaneVibrationConfig().shrink)
    x, t = (part.float() for part in window(8))
    with torch.no_grad():
        forecast, following, _ = forecaster(x, t)
    assert max(forecast.square().mean().item(), following.square().mean().item()) < 30


# Runs

QUICK = "--device cpu --data generated --schedule constant --tol 1e-1 --batch-size 2".split()


@pytest.fixture
def few(made_up, short, monkeypatch):
    """A few short segments of each part."""
    whole = plane_vibration.split_rows
    monkeypatch.setattr(f16, "vibrating_structure", lambda: made_up)
    monkeypatch.setattr(
        plane_vibration, "split_rows", lambda *args: {name: rows[:4:2] for name, rows in whole(*args).items()}
    )


@pytest.mark.parametrize("model", ["hbnode", "gru"])
def test_a_run_resumes_to_the_same_numbers_and_writes_its_files(model, few, tmp_path, capsys, monkeypatch):
    options = ["--model", model, *QUICK]
    plane_vibration.main([*options, "--epochs", "2", "--out", str(tmp_path / "whole")])
    assert "data: generated, 2/2/2 segments; persistence_forecast_mse" in capsys.readouterr().out
    monkeypatch.setattr(plane_vibration, "draw_forecasts", lambda *args: None)  # it takes longer than the training
    plane_vibration.main([*options, "--epochs", "1", "--out", str(tmp_path / "parts")])
    plane_vibration.main([*options, "--epochs", "2", "--out", str(tmp_path / "parts")])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    names = {"config.json", "metrics.csv", "summary.json", "checkpoint.pt", "forecast.png"}
    assert names_in(tmp_path / "whole") == names
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    assert summaries[0]["test_forecast_mse"] == summaries[1]["test_forecast_mse"]
    assert summaries[0]["source"] == "generated"
    by_row = summaries[0]["test_forecast_mse_by_row"]
    assert sum(by_row) / len(by_row) == pytest.approx(summaries[0]["test_forecast_mse"], rel=1e-4)
    assert {"train_forecast_mse", "validation_forecast_mse", "nfe_backward"} <= read_metrics(tmp_path / "whole")[
        0
    ].keys()
    before = (tmp_path / "parts" / "summary.json").read_bytes()
    plane_vibration.main([*options, "--epochs", "2", "--out", str(tmp_path / "parts")])
    assert (tmp_path / "parts" / "summary.json").read_bytes() == before  # finished already
    with pytest.raises(SystemExit, match=r"protocol: 'honest' there, 'paper' wanted"):
        plane_vibration.main([*options, "--protocol", "paper", "--epochs", "2", "--out", str(tmp_path / "parts")])


def test_the_papers_preset_runs_with_torchdiffeq(few, tmp_path, monkeypatch):
    monkeypatch.setattr(plane_vibration, "draw_forecasts", lambda *args: None)
    folder = tmp_path / "run"
    options = ["--preset", "paper", "--model", "node", "--epochs", "1", "--out", str(folder)]
    plane_vibration.main([*options, "--seen", "0.1", *QUICK])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["parameters"] == count_parameters(plane_vibration.Forecaster("node"))
    assert summary["nfe_backward"] > 0  # the adjoint's
    assert summary["periods_earlier_forecast_mse"] < summary["persistence_forecast_mse"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["protocol"], config["solver"], config["adjoint_norm"]) == ("paper", "torchdiffeq", "full")


def test_the_unit_of_time_is_fitted_on_request(few, tmp_path, monkeypatch):
    monkeypatch.setattr(plane_vibration, "draw_forecasts", lambda *args: None)
    options = [*QUICK, "--model", "hbnode", "--epochs", "1", "--time-unit", "0"]
    plane_vibration.main([*options, "--out", str(tmp_path)])
    checkpoint = read_checkpoint(tmp_path / "checkpoint.pt", "plane_vibration", "hbnode")
    assert float(checkpoint["model"]["rnn.time_unit"]) == 10.0  # rows


def test_a_run_is_not_resumed_with_other_data(few, made_up, tmp_path, monkeypatch):
    options = [*QUICK, "--model", "gru", "--data", "auto", "--epochs", "1", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(plane_vibration, "draw_forecasts", lambda *args: None)
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", None)
    plane_vibration.main(options)
    monkeypatch.setattr(f16, "read_plane_vibration", lambda source: (made_up, "f16"))
    with pytest.raises(SystemExit, match=r"data: 'generated' there, 'f16' wanted"):
        plane_vibration.main(options)


def test_without_the_data_the_structure_stands_in(made_up, tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", None)
    rows, source = f16.read_plane_vibration()
    assert torch.equal(rows, made_up)
    assert source == "generated"


def test_without_the_data_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    monkeypatch.setitem(sys.modules, "nonlinear_benchmarks", None)
    with pytest.raises(SystemExit, match=rf"{NAME}\.csv is not in HBNODE_DATA=.*Fix: put"):
        plane_vibration.main(["--data", "f16", "--epochs", "1", "--out", str(tmp_path / "run")])
