"""Recall: its data, its runs, and regression in context against a plain recurrence."""

import csv
import json
import math

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from tasks import recall
from tasks.common.config import parse
from tasks.data.recall import IGNORED, Bindings, unit_keys
from tasks.models.contenders import TITLES
from tasks.recall_table import best_rate, right_by_counting
from tasks.studies import recall_regression
from tests.tasks.small_runs import read_metrics

TINY = (
    "--device cpu --most 8 --keys 16 --values 16 --d-model 8 --heads 2 --feedforward 8 --iterations 2 --epochs 1 "
    "--batch-size 4 --test-size 4 --jobs 1"
).split()
SETTINGS = {
    "once": Bindings(5, 40, 9, 7),
    "again": Bindings(5, 60, 9, 7, times=3, changing=True),
    "noisy": Bindings(5, 60, 9, 7, times=4, noise=0.3),
}


def options_of(*argv):
    return parse(recall.RecallConfig, recall.PRESETS, "", ["--device", "cpu", *argv])


# Data


def told(row, setting):
    """Keys with what was shown for them, in order, and what follows."""
    end = 2 * setting.pairs * setting.times
    shown = {}
    for key, value in zip(row[:end:2], row[1:end:2], strict=True):
        assert 1 <= key <= setting.keys < value <= setting.keys + setting.values
        shown.setdefault(key, []).append(value - 1 - setting.keys)
    return shown, row[end:]


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_key_is_bound_and_asked_for_once(kind):
    setting = SETTINGS[kind]
    tokens, targets, first = setting.draw(300, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == first.shape == (300, setting.length)
    for row, wanted, stale in zip(tokens.tolist(), targets.tolist(), first.tolist(), strict=True):
        shown, asked = told(row, setting)
        assert len(shown) == setting.pairs
        assert {len(values) for values in shown.values()} == {setting.times}
        assert sorted(key for key in asked if key) == sorted(shown)
        assert [x != IGNORED for x in wanted] == [False] * (len(row) - len(asked)) + [key > 0 for key in asked]
        for key, answer, old in zip(asked, wanted[-len(asked) :], stale[-len(asked) :], strict=True):
            if not key:
                continue
            if kind == "once":
                assert shown[key] == [answer] == [old]
            if kind == "again":
                assert (shown[key][-1], shown[key][0]) == (answer, old)
                assert len(set(shown[key])) == setting.times
            if kind == "noisy":
                assert answer == old


def test_noise_shows_other_values_as_often_as_it_says():
    setting = SETTINGS["noisy"]
    tokens, targets, _ = setting.draw(2000, torch.Generator().manual_seed(0))
    right = total = 0
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        shown, asked = told(row, setting)
        answers = {key: answer for key, answer in zip(asked, wanted[-len(asked) :], strict=True) if key}
        right += sum(shown[key].count(answer) for key, answer in answers.items())
        total += setting.pairs * setting.times
    assert right / total == pytest.approx(1 - 0.3 * (1 - 1 / setting.values), abs=0.01)


def test_questions_come_sooner_rather_than_later():
    setting = Bindings(2, 68, 9, 7)
    tokens, _, _ = setting.draw(4000, torch.Generator().manual_seed(0))
    asked = (tokens[:, 4:] > 0).float().mean(0)
    exact = torch.arange(1, 65, dtype=torch.float64).pow(-0.99)
    assert asked[0] > 4 * asked[8] > 8 * asked[40] > 0
    assert asked[0].item() > (exact[0] / exact.sum()).item()  # the chance of the first draw alone


def test_drawing_repeats_itself():
    one, same = (SETTINGS["noisy"].draw(5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(one, same, strict=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"pairs": 5, "length": 14, "keys": 9, "values": 7},
            "5 pairs bound 1 times take 15 symbols, got a length of 14",
        ),
        ({"pairs": 5, "length": 50, "keys": 4, "values": 7}, "5 pairs need as many keys, got 4"),
        ({"pairs": 1, "length": 50, "keys": 4, "values": 2, "times": 3, "changing": True}, "need as many, got 2"),
    ],
)
def test_bindings_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"{message}.*Fix: "):
        Bindings(**arguments)


def test_counting_is_right_without_noise_and_guesses_with_nothing_else():
    assert right_by_counting(Bindings(3, 40, 9, 8, times=4)) == 1.0
    assert right_by_counting(Bindings(3, 40, 9, 8, times=4, noise=1.0), 4000) == pytest.approx(1 / 8, abs=0.02)
    once = right_by_counting(Bindings(3, 40, 9, 8, times=1, noise=0.4), 4000)
    assert once == pytest.approx(0.6 + 0.4 / 8, abs=0.02)


class Perfect(torch.nn.Module):
    """Answers each symbol with the value that last followed it, or that first did."""

    def __init__(self, setting, last):
        super().__init__()
        self.setting, self.last = setting, last

    def forward(self, tokens):
        scores = torch.zeros(*tokens.shape, self.setting.values, dtype=torch.float64)
        for row, scored in zip(tokens.tolist(), scores, strict=True):
            shown, _ = told(row, self.setting)
            for place, key in enumerate(row):
                if key in shown:
                    scored[place, shown[key][-1 if self.last else 0]] = 1e3
        return scores


def test_loss_and_shares():
    batch = SETTINGS["again"].draw(20, torch.Generator().manual_seed(0))
    loss, shares = recall.cross_entropy(Perfect(SETTINGS["again"], last=True), batch)
    assert (loss.item(), shares) == (0, {"accuracy": 1.0, "stale": 0.0})
    _, shares = recall.cross_entropy(Perfect(SETTINGS["again"], last=False), batch)
    assert shares == {"accuracy": 0.0, "stale": 1.0}


def test_a_model_does_not_see_what_comes_later():
    model = recall.Recaller(options_of("--model", "heavy_ball"))
    tokens = torch.randint(1, 60, (2, 12))
    before = model(tokens)
    tokens[:, 7:] = 1
    assert torch.equal(model(tokens)[:, :7], before[:, :7])
    assert before.shape == (2, 12, 32)


# Runs


def test_settings_of_the_presets():
    config = options_of("--preset", "zoology", "--model", "softmax")
    assert [setting.pairs for setting in config.trained()] == [8, 16, 32, 64]
    assert config.tested()[-1].pairs == 128
    assert (config.keys + config.values, config.trained()[-1].length) == (8192, 256)
    for kind in recall.KINDS:
        tested = options_of("--kind", kind).tested()
        assert len({(setting.pairs, setting.noise) for setting in tested}) == len(tested)
    rates = options_of("--preset", "table").learning_rates()
    assert [math.log10(rate) for rate in rates] == pytest.approx([-3, -2.5, -2, -1.5], abs=1e-3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kind", "twice"], "argument --kind: invalid choice: 'twice' (choose from once, again, noisy, all)"),
        (["--rates", "1e-3,0"], "--rates must be positive, got 1e-3,0"),
        (["--rates", "1e-3,nan"], "--rates must be positive, got 1e-3,nan"),
        (["--rates", "1e-3,x"], "--rates must be numbers with commas between, got '1e-3,x'"),
        (["--most", "4"], "--most must be 8 or more, got 4"),
        (["--keys", "8"], "16 pairs need as many keys, got 8"),
        (["--heads", "1"], "--heads must be even, got 1"),
    ],
)
def test_bad_options(argv, message, capsys):
    with pytest.raises(SystemExit):
        options_of(*argv)
    assert message in capsys.readouterr().err


def one_after_another(configs, train):
    for config in configs:
        train(config)
    return []


def test_one_command_makes_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall, "run_side_by_side", one_after_another)
    options = [*TINY, "--kind", "all", "--model", "linear,momentum", "--rates", "1e-3,1e-2", "--seeds", "2"]
    recall.main([*options, "--out", str(tmp_path)])
    out = capsys.readouterr().out
    for kind in recall.KINDS:
        assert f"{kind}, equal state" in out
    assert "counting" in out
    assert out.count(TITLES["linear"]) >= 3
    with open(tmp_path / "recall.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["seeds"] for row in rows} == {"2"}
    assert {row["model"] for row in rows} == {"linear", "momentum"}
    assert {(row["kind"], row["share"]) for row in rows} == {
        *((kind, "accuracy") for kind in recall.KINDS),
        ("again", "stale"),
    }
    again = [row for row in rows if row["kind"] == "again" and row["model"] == "linear"]
    assert {int(row["pairs"]) for row in again} == {1, 2, 4, 8}
    assert (tmp_path / "recall.png").read_bytes()[:4] == b"\x89PNG"
    folders = [path.parent for path in tmp_path.rglob("summary.json")]
    assert len(folders) == 2 * 3 * (2 + 1)
    for row in rows:
        candidates = [tmp_path / f"{row['kind']}-state-{row['model']}-lr{rate}-seed0" for rate in ("0.001", "0.01")]
        assert float(row["lr"]) == best_rate(candidates)


def test_no_run_no_rate(tmp_path, caplog):
    assert best_rate([tmp_path]) is None
    recall.report(tmp_path)
    assert "no finished run of recall" in caplog.text


def test_a_run_can_be_trained_longer_to_the_same_numbers(tmp_path):
    options = [*TINY, "--model", "gated_delta", "--kind", "noisy", "--schedule", "constant"]
    recall.main([*options, "--epochs", "3", "--out", str(tmp_path / "whole")])
    for epochs in ("1", "3"):
        recall.main([*options, "--epochs", epochs, "--out", str(tmp_path / "parts")])
    whole, parts = ([*(tmp_path / name).glob("noisy-*")] for name in ("whole", "parts"))
    assert read_metrics(whole[0]) == read_metrics(parts[0])
    summary = json.loads((parts[0] / "summary.json").read_text())
    assert {name for name in summary if name.startswith("test_")} == {
        f"test_{pairs}_{noise}_accuracy" for pairs in (2, 4) for noise in ("0", "0.2", "0.4", "0.6")
    }


def test_recall_is_learned_where_it_is_short(tmp_path):
    options = "--device cpu --most 8 --keys 16 --values 4 --d-model 16 --heads 2 --layers 1 --iterations 100".split()
    recall.main([*options, "--epochs", "1", "--model", "softmax", "--jobs", "1", "--out", str(tmp_path)])
    summary = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert summary["test_2_accuracy"] > 0.9


# Regression in context


def test_unit_keys_have_the_directions_they_should():
    spread = recall_regression.deviations(100.0)
    assert (spread[0].item(), spread[-1].item()) == pytest.approx((1, 0.1))
    assert recall_regression.deviations(1.0).eq(1).all()
    k = unit_keys(spread, (20_000,), torch.Generator().manual_seed(0))
    torch.testing.assert_close(k.norm(dim=1), torch.ones(len(k)))
    ratio = (k[:, 0] / k[:, -1]).abs().median()  # that of two normals is 1
    assert ratio.item() == pytest.approx(10, rel=0.05)


def test_errors_of_the_plain_recurrence(monkeypatch):
    """The delta rule with momentum, step by step in float64, on the same random numbers."""
    monkeypatch.setattr(recall_regression, "LENGTHS", (30, 70))
    monkeypatch.setattr(recall_regression, "FEATURES", 6)
    monkeypatch.setattr(recall_regression, "TARGETS", 4)
    spread, noise = recall_regression.deviations(12.0), 0.3
    found = recall_regression.errors(spread, noise, 3, seed=5)
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(3, 1, 6, 4, generator=generator)
    k = unit_keys(spread, (3, 1, 70), generator)
    q = torch.randn(k.shape, generator=generator)
    v = k @ w
    v = v + noise * torch.randn(v.shape, generator=generator)
    w, k, q, v = (x[:, 0].double() for x in (w, k, q, v))
    for row, momentum in enumerate(recall_regression.MOMENTA):
        for column, g in enumerate(recall_regression.STEPS):
            s, p = torch.zeros(2, 3, 6, 4, dtype=torch.float64)
            wrong = []
            for t in range(70):
                e = v[:, t] - torch.einsum("bdm,bd->bm", s, k[:, t])
                p = momentum * p + torch.einsum("bd,bm->bdm", k[:, t], e)
                s = s + (1 - momentum) * g * p
                wrong.append(torch.einsum("bdm,bd->bm", s - w, q[:, t]).square().mean().item())
            expected = sum(wrong[27:30]) / 3, sum(wrong[63:70]) / 7
            assert found[row, column].tolist() == pytest.approx(expected, rel=1e-3)


def test_the_best_settings_of_each_set():
    sets, steps = recall_regression.settings(), torch.tensor(recall_regression.STEPS)
    assert sets["any"].all()
    assert sets["safe"][0].all()
    for momentum, allowed in zip(recall_regression.MOMENTA[1:], sets["safe"][1:], strict=True):
        assert torch.equal(allowed, steps <= 3 * (1 - momentum))
    found = torch.ones(*sets["any"].shape, len(recall_regression.LENGTHS))
    found[3, 1, -1], found[0, 2, -1], found[-1, -1, -1] = 0.25, 0.5, 0.125
    *_, safe, every = recall_regression.rows(found, {"keys": "white"})
    assert (safe["delta"], safe["delta_step"]) == (0.5, recall_regression.STEPS[2])
    assert (safe["momentum_delta"], safe["momentum"], safe["momentum_step"]) == (0.25, 0.9, recall_regression.STEPS[1])
    assert (every["momentum_delta"], every["momentum"]) == (0.125, 0.99)
    assert (safe["settings"], every["settings"], every["length"]) == ("safe", "any", 1000)


def test_the_regression_leaves_table_and_figure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(recall_regression, "LENGTHS", (10, 20))
    recall_regression.main(["--sequences", "2", "--out", str(tmp_path)])
    assert "ill-conditioned  noise 0.3 after   20, safe" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"regression.csv", "regression.json", "regression.png"}
    assert len(json.loads((tmp_path / "regression.json").read_text())["table"]) == 2 * 2 * 2 * 2
    with pytest.raises(SystemExit):
        recall_regression.parse(["--sequences", "0"])


@pytest.mark.slow
def test_momentum_averages_noise_and_does_not_accelerate():
    """The design's table to 10 %; without noise nothing is left to tell the two apart."""
    published = {"white": (0.0149, 0.0107), "ill-conditioned": (0.0355, 0.0347)}
    with torch.no_grad():
        for keys, condition in recall_regression.KEYS.items():
            spread = recall_regression.deviations(condition)
            exact, noisy = (recall_regression.errors(spread, noise, 64, seed=0) for noise in (0.0, 0.3))
            *_, found, _ = recall_regression.rows(exact, {})
            assert max(found["delta"], found["momentum_delta"]) < 1e-12
            *_, found, _ = recall_regression.rows(noisy, {})
            assert (found["length"], found["settings"]) == (1000, "safe")
            assert (found["delta"], found["momentum_delta"]) == pytest.approx(published[keys], rel=0.1)
