"""Transformers as language models: characters, windows, momentum over depth and its controls, training, resuming."""

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")

from tasks import language_model, plot
from tasks.common import sweep
from tasks.common.run import count_parameters
from tasks.common.train import Trainer
from tasks.data.text import in_windows, read_text
from tasks.models.depth import CONNECTIONS, CONTROLS, DepthConfig
from tests.tasks.small_runs import read_metrics

# Text


def write_shakespeare(folder, text):
    (folder / "tinyshakespeare").mkdir()
    (folder / "tinyshakespeare" / "input.txt").write_text(text, encoding="utf-8")


def test_characters(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    write_shakespeare(tmp_path, 9 * "ab\nabc d.\n" + "ab\nx " + "é\nbad")
    assert read_text().source == "generated"  # the recurrent layers' texts are words
    text = read_text(order=("tinyshakespeare",))
    assert text.source == "tinyshakespeare"
    spelt = {name: "".join(text.words[n] for n in part) for name, part in text.parts.items()}
    assert spelt == {"train": 9 * "ab\nabc d.\n", "validation": "ab\n<unk> ", "test": "<unk>\nbad"}
    path = tmp_path / "tinyshakespeare" / "input.txt"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as Windows has it
    assert all(part.equal(text.parts[name]) for name, part in read_text("tinyshakespeare").parts.items())
    few = read_text("tinyshakespeare", train_size=6, test_size=2, vocabulary=3)
    assert [len(part) for part in few.parts.values()] == [6, 2, 2]
    assert len(few.words) == 3


def test_characters_that_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"tinyshakespeare is not in .*expected tinyshakespeare/input\.txt"):
        read_text("tinyshakespeare")
    write_shakespeare(tmp_path, "short")
    with pytest.raises(ValueError, match=r"input\.txt has 5 characters; expected a text\. Fix:"):
        read_text("tinyshakespeare")


def test_tiny_shakespeare_when_it_is_there():
    root = os.environ.get("HBNODE_DATA")
    if not root or not (Path(root) / "tinyshakespeare" / "input.txt").is_file():
        pytest.skip("Tiny Shakespeare is not in HBNODE_DATA")
    parts = read_text("tinyshakespeare").parts.values()
    assert [len(part) for part in parts] == [1_003_854, 55_770, 55_770]


def test_windows():
    text = torch.arange(11)
    assert in_windows(text, 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert in_windows(text, 3, start=2).tolist() == [[2, 3, 4, 5], [5, 6, 7, 8]]
    assert in_windows(text, 10).tolist() == [list(range(11))]
    with pytest.raises(ValueError, match="a text of 11 words has no window of 11 words and one more"):
        in_windows(text, 11)


# The models


def config_of(**options):
    small = {"data": "generated", "d_model": 16, "heads": 2, "feedforward": 20, "layers": 3, "context": 12}
    return DepthConfig(**{"model": "transformer", "device": "cpu"} | small | options)


def size(**options):
    return count_parameters(config_of(**options).make_model(41))


def test_controls_have_as_many_parameters():
    for options in ({}, {"layers": 6, "d_model": 64, "feedforward": 256}, {"attention": "heavy_ball"}):
        wanted, d_model = size(connection="nesterov", **options), options.get("d_model", 16)
        layers = options.get("layers", 3)
        for connection, others in (("wider", layers - 1), ("deeper", layers + 1)):
            unit = 2 * d_model + 1  # parameters of a hidden unit of one layer
            assert abs(size(connection=connection, **options) - wanted) <= unit * others / 2
            model = config_of(connection=connection, **options).make_model(41)
            assert len(model.layers) == others
        for connection in (*CONNECTIONS, "scaled"):
            assert 0 <= wanted - size(connection=connection, **options) <= 5 * layers


def test_all_but_the_learned_streams_have_the_parameters_of_residual():
    sizes = {connection: size(connection=connection) - size() for connection in (*CONNECTIONS, "scaled")}
    none = dict.fromkeys(("residual", "momentum", "momentum_state", "adaptive"), 0)
    assert sizes == none | {"heavy_ball": 3 * 4, "nesterov": 3 * 5, "scaled": 3 * 2}


def test_scaled_is_residual_at_first():
    tokens = torch.randint(41, (2, 12))
    outputs = []
    for connection in ("residual", "scaled"):
        torch.manual_seed(0)
        outputs.append(config_of(connection=connection).make_model(41).eval()(tokens))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("connection", [*CONNECTIONS, *CONTROLS])
def test_a_word_sees_none_after_it(connection):
    model = config_of(connection=connection, attention="momentum").make_model(41).double().eval()
    tokens = torch.randint(41, (1, 12))
    other = tokens.clone()
    other[0, 7:] = (tokens[0, 7:] + 1) % 41
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :7], model(other)[:, :7], atol=1e-12, rtol=0)


# Runs

QUICK = (
    "--model transformer --device cpu --data generated --train-size 600 --test-size 100 --d-model 16 --heads 2 "
    "--feedforward 16 --layers 2 --context 10 --batch-size 8"
).split()


def test_loss_is_that_of_every_next_word():
    model = config_of().make_model(41)
    windows = torch.randint(41, (3, 9))
    loss, _ = language_model.next_word_loss(model, (windows,))
    chances = model(windows[:, :-1]).log_softmax(-1)
    expected = -sum(chances[i, j, windows[i, j + 1]] for i, j in itertools.product(range(3), range(8))) / 24
    torch.testing.assert_close(loss, expected)


def test_it_learns_the_chain(tmp_path, capsys):
    options = "--model transformer --device cpu --data generated --d-model 32 --heads 2 --layers 1 --feedforward 32"
    options += " --train-size 0 --context 16 --epochs 3 --lr 0.01 --connection heavy_ball"
    language_model.main([*options.split(), "--out", str(tmp_path / "run")])
    assert "text: generated, 20,000/2,000/2,000 words, 41 different; unigram perplexity 3" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 3.2 < summary["test_perplexity"] < 5 < summary["unigram_perplexity"]  # at best 3.35 on average
    assert summary["test_perplexity"] == pytest.approx(math.exp(summary["test_loss"]))


def test_several_connections_in_one_command(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(sweep, "side_by_side", lambda configs, *rest, **options: ran.extend(configs) or [])
    language_model.main([*QUICK, "--connection", "residual,deeper", "--seeds", "2", "--out", str(tmp_path)])
    assert [(config.model, config.connection, config.seed, config.out) for config in ran] == [
        ("transformer", name, seed, str(tmp_path / f"{name}-seed{seed}"))
        for seed in (0, 1)
        for name in ("residual", "deeper")
    ]


def test_connections_are_told_apart_in_tables(tmp_path, capsys):
    for name in ("heavy_ball", "deeper"):
        language_model.main([*QUICK, "--epochs", "1", "--connection", name, "--out", str(tmp_path / name)])
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "language_model-default-generated" in out
    assert "\nheavy ball " in out
    assert "\ndeeper " in out


class Stopped(Exception):
    """In the place of a kill."""


def test_a_stopped_run_resumes_to_the_same_numbers(tmp_path, monkeypatch):
    options = [*QUICK, "--connection", "adaptive", "--dropout", "0.1", "--epochs", "3", "--attention", "momentum"]
    language_model.main([*options, "--out", str(tmp_path / "whole")])
    step = Trainer.step
    for after in (3, 9):
        left = iter(range(after))

        def stopping(self, left=left):
            if next(left, None) is None:
                raise Stopped
            return step(self)

        monkeypatch.setattr(Trainer, "step", stopping)
        with pytest.raises(Stopped):
            language_model.main([*options, "--checkpoint-seconds", "0", "--out", str(tmp_path / "parts")])
    monkeypatch.setattr(Trainer, "step", step)
    language_model.main([*options, "--out", str(tmp_path / "parts")])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    assert summaries[0]["test_perplexity"] == summaries[1]["test_perplexity"]


def test_windows_of_an_epoch_begin_anywhere(tmp_path):
    """Three epochs of as many windows, and none beyond the text."""
    options = {"lr": 1e-9, "train_size": 605, "test_size": 0, "context": 100, "d_model": 8, "layers": 1, "epochs": 3}
    config = dataclasses.replace(config_of(**options), out=str(tmp_path / "run"))
    language_model.train_transformer(config)
    losses = [float(row["train_loss"]) for row in read_metrics(tmp_path / "run")]
    assert len(set(losses)) == 3
    text = read_text("generated", train_size=605, vocabulary=5000).parts["train"]
    assert len(in_windows(text, 100, 99)) == 5 == len(in_windows(text, 100)) - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--connection", "heavyball"], "argument --connection: invalid choice: 'heavyball'"),
        (["--connection", "wider", "--layers", "1"], "--connection wider has a layer less, and --layers is 1"),
        (["--d-model", "20", "--heads", "4"], "--d-model must be a multiple of twice --heads, got 20 and 4"),
        (["--connection-momentum", "1"], "--connection-momentum must be below 1, got 1.0"),
        (["--cell", "gru"], "unrecognized arguments: --cell gru"),
    ],
)
def test_options_that_no_run_can_have(options, message, capsys):
    with pytest.raises(SystemExit):
        language_model.main(["--model", "transformer", *options])
    assert message in capsys.readouterr().err


def test_transformers_are_not_trained_with_others(capsys):
    with pytest.raises(SystemExit):
        language_model.main(["--model", "plain,transformer"])
    assert "invalid choice: 'transformer'" in capsys.readouterr().err


def test_a_text_too_short(tmp_path):
    options = [*QUICK, "--context", "100", "--test-size", "50", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match=r"a text of 50 words has no window of 100 words .*Fix: a longer text"):
        language_model.main(options)
