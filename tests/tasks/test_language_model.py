"""Language model: the text, the regularisers, the model, training and resuming."""

import dataclasses
import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize

pytest.importorskip("tqdm")

from tasks import language_model
from tasks.common.train import Trainer
from tasks.data.text import Text, chain_transitions, read_text
from tasks.models import awd_lstm
from tasks.models.recurrent import RuleOptions
from tests.tasks.small_runs import read_metrics

# Text


def write_ptb(folder, train="a b a <unk>\n\n c a \n", valid="b d\n", test="c\n"):
    (folder / "ptb").mkdir(exist_ok=True)
    for name, content in (("train", train), ("valid", valid), ("test", test)):
        (folder / "ptb" / f"ptb.{name}.txt").write_text(content, encoding="utf-8")


def spelt(text):
    return {part: " ".join(text.words[number] for number in numbers) for part, numbers in text.parts.items()}


def test_words_and_ends_of_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    write_ptb(tmp_path)
    text = read_text()
    assert text.source == "ptb"
    assert set(text.words) == {"a", "b", "c", "<unk>", "<eos>"}
    assert spelt(text) == {
        "train": "a b a <unk> <eos> <eos> c a <eos>",
        "validation": "b <unk> <eos>",
        "test": "c <eos>",
    }
    counts = Counter(text.parts["train"].tolist())
    assert [counts[number] for number in range(5)] == sorted(counts.values(), reverse=True)


def test_few_words_of_a_short_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    write_ptb(tmp_path)
    text = read_text("ptb", vocabulary=3, train_size=7, test_size=2)
    assert spelt(text) == {
        "train": "a <unk> a <unk> <eos> <eos> <unk>",
        "validation": "<unk> <unk>",
        "test": "<unk> <eos>",
    }
    write_ptb(tmp_path, train="a b b\n")
    assert sorted(read_text("ptb").words) == ["<eos>", "<unk>", "a", "b"]  # for what is new later


def test_unigram_perplexity():
    parts = {"train": torch.tensor([0, 0, 1]), "validation": torch.tensor([0]), "test": torch.tensor([0, 2])}
    text = Text(parts, ("a", "b", "c"), "generated")
    assert text.unigram_perplexity() == pytest.approx((6 / 3 * 6 / 1) ** 0.5)


def test_texts_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"ptb is not in HBNODE_DATA=.*expected ptb/ptb\.train\.txt.*Fix: put"):
        read_text("ptb")
    with pytest.raises(
        ValueError, match="source must be one of auto, ptb, wikitext-2, tinyshakespeare, generated, got"
    ):
        read_text("novel")
    assert read_text().source == "generated"
    write_ptb(tmp_path, valid="")
    with pytest.raises(ValueError, match=r"ptb\.valid\.txt is empty; expected lines of words\. Fix:"):
        read_text()
    (tmp_path / "ptb" / "ptb.train.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"ptb\.train\.txt is no text in UTF-8"):
        read_text()


def test_wikitext_when_it_is_there():
    root = os.environ.get("HBNODE_DATA")
    if not root or not (Path(root) / "wikitext-2" / "test.txt").is_file():
        pytest.skip("WikiText-2 is not in HBNODE_DATA")
    text = read_text("wikitext-2", train_size=30_000, vocabulary=1000)
    assert (len(text.parts["train"]), len(text.words)) == (30_000, 1000)
    assert (len(text.parts["validation"]), len(text.parts["test"])) == (217_646, 245_569)  # as published


def test_the_chain():
    transitions = chain_transitions()
    torch.testing.assert_close(transitions.sum(1), torch.ones(40, dtype=torch.float64))
    entropy = -transitions[transitions > 0].log().mul(transitions[transitions > 0]).sum() / 40
    assert math.exp(entropy) == pytest.approx(3.3467, abs=1e-4)
    text = read_text("generated")
    assert [len(part) for part in text.parts.values()] == [20_000, 2000, 2000]
    pairs = Counter(zip(*(text.parts["train"][k : k - 1 or None].tolist() for k in (0, 1)), strict=True))
    firsts = Counter(text.parts["train"][:-1].tolist())
    common = text.words.index("word7")
    shares = sorted(count / firsts[common] for (first, _), count in pairs.items() if first == common)
    assert shares == pytest.approx([0.1, 0.15, 0.25, 0.5], abs=0.07)
    assert not torch.equal(text.parts["validation"], text.parts["test"])


def test_columns():
    found = language_model.in_columns(torch.arange(11), 3)
    assert found.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    with pytest.raises(SystemExit, match="a text of 5 words has no two for each of 3 streams"):
        language_model.in_columns(torch.arange(5), 3)


# Regularisers


def test_locked_dropout_has_one_mask_for_all_times():
    x = torch.ones(7, 3, 400)
    found = awd_lstm.locked_dropout(x, 0.25, training=True)
    assert torch.equal(found, found[:1].expand_as(found))
    assert sorted(found.unique().tolist()) == [0, pytest.approx(4 / 3)]
    assert (found == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    assert not torch.equal(found[0, 0], found[0, 1])
    assert awd_lstm.locked_dropout(x, 0.25, training=False) is x


def test_a_dropped_word_is_dropped_everywhere():
    embedding = torch.nn.Embedding(200, 4)
    words = torch.arange(200).repeat(2, 1)
    found = awd_lstm.embed(embedding, words, 0.3, training=True)
    assert torch.equal(found[0], found[1])
    kept = found[0].abs().sum(1) > 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.1)
    torch.testing.assert_close(found[0][kept], embedding.weight[kept] / 0.7)
    torch.testing.assert_close(awd_lstm.embed(embedding, words, 0.3, training=False), embedding(words))


def test_dropped_weights():
    layer = awd_lstm.drop_recurrent_weights(torch.nn.LSTM(3, 30), 0.4)
    original = layer.parametrizations.weight_hh_l0.original
    with parametrize.cached():
        one = layer.weight_hh_l0
        assert layer.weight_hh_l0 is one
    kept = one != 0
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.05)
    torch.testing.assert_close(one[kept], original[kept] / 0.6)
    assert not torch.equal(layer.weight_hh_l0 != 0, kept)
    assert torch.equal(layer.eval().weight_hh_l0, original)
    assert not parametrize.is_parametrized(awd_lstm.drop_recurrent_weights(torch.nn.LSTM(3, 4), 0.0))


def test_penalties():
    dropped, raw = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    expected = 2 * (dropped**2).mean() + 0.5 * ((raw[1:] - raw[:-1]) ** 2).mean()
    torch.testing.assert_close(awd_lstm.penalty(dropped, raw, 2.0, 0.5), expected)
    torch.testing.assert_close(awd_lstm.penalty(dropped[:1], raw[:1], 2.0, 0.5), 2 * (dropped[:1] ** 2).mean())


def test_lengths_of_pieces():
    lengths = awd_lstm.chunk_lengths(100_000, 70, 0, 3)
    assert sum(lengths) == 100_000
    assert lengths == awd_lstm.chunk_lengths(100_000, 70, 0, 3)
    assert lengths != awd_lstm.chunk_lengths(100_000, 70, 0, 4)
    whole = torch.tensor(lengths[:-1]).float()
    half = whole < 52
    assert half.float().mean().item() == pytest.approx(0.05, abs=0.02)
    assert whole[~half].mean().item() == pytest.approx(69.5, abs=0.6)  # rounded down
    assert whole[~half].std().item() == pytest.approx(5, abs=0.5)
    assert set(awd_lstm.chunk_lengths(21, 1, 0, 0)) <= {5, 1, 6, 7, 8, 9, 10, 11}


def test_averaging_begins_when_the_loss_ceases_to_fall():
    p = torch.nn.Parameter(torch.zeros(2))
    averaging = awd_lstm.Averaging([p], patience=2)
    for loss, is_on in ((5.0, False), (4.0, False), (4.5, False), (4.7, False), (4.8, True), (9.0, True)):
        averaging.note(loss)
        assert averaging.is_on == is_on  # 4.8 is above 4, the best but of the last two
    values = torch.randn(7, 2)
    for value in values:
        with torch.no_grad():
            p.copy_(value)
        averaging.step()
    other = torch.nn.Parameter(torch.zeros(2))
    restored = awd_lstm.Averaging([other], patience=2)
    restored.load_state_dict(averaging.state_dict())
    for means, weight, before in ((averaging, p, values[-1]), (restored, other, torch.zeros(2))):
        with means.used():
            torch.testing.assert_close(weight.detach(), values.mean(0))
        torch.testing.assert_close(weight.detach(), before)
    never = awd_lstm.Averaging([p], patience=0)
    for loss in (1.0, 2.0, 3.0):
        never.note(loss)
    assert not never.is_on


# The model


def config_of(**options):
    none = dict.fromkeys(("dropout", "dropout_between", "dropout_input", "dropout_words", "weight_drop"), 0.0)
    small = {"data": "generated", "embedding": 8, "hidden": 12, "bptt": 9, "device": "cpu"}
    return language_model.LanguageModelConfig(**none | small | options)


def test_the_papers_size_and_tables():
    preset = language_model.PRESETS["ptb"]
    config = language_model.LanguageModelConfig(preset="ptb", model="momentum", **preset)
    with torch.device("meta"):
        model = language_model.make_model(10_000, config)
    assert sum(p.numel() for p in model.parameters()) == 24_221_600
    assert config.rule_options(language_model.PTB_TABLE) == RuleOptions(momentum=0.0, step_size=0.6)
    restarted = dataclasses.replace(config, model="sr").rule_options(language_model.PTB_TABLE)
    assert restarted == RuleOptions(step_size=0.6, restart=2)
    wanted = {"batch_size": 20, "clip": 0.25, "weight_decay": 1.2e-6, "patience": 5, "lr": 30, "weight_drop": 0.5}
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.mark.parametrize("options", [{"model": "momentum"}, {"model": "sr"}, {"model": "adam", "cell": "gru"}])
def test_read_in_pieces_or_at_once(options):
    """The loss over a text is the same, however it is cut: all of the state goes on."""
    model = language_model.make_model(7, config_of(**options))
    text = torch.randint(7, (40, 3))
    with torch.no_grad():
        scores = model.eval()(text[:-1], model.fresh())[0]
    expected = torch.nn.functional.cross_entropy(scores.flatten(0, 1), text[1:].flatten()).item()
    for bptt in (40, 7, 1):
        assert language_model.evaluate(model, text, bptt) == pytest.approx(expected, rel=1e-5)
    assert model.training


def test_readout_and_embedding_share_a_weight():
    model = language_model.make_model(7, config_of())
    words = torch.randint(7, (5, 2))
    scores, dropped, raw, _ = model(words, model.fresh())
    assert dropped is raw  # no dropout
    torch.testing.assert_close(scores, raw @ model.embedding.weight.T + model.bias)


def test_dropout_is_for_training_only():
    config = config_of(dropout=0.5, dropout_between=0.5, dropout_input=0.5, dropout_words=0.3, weight_drop=0.5)
    model = language_model.make_model(7, config)
    words = torch.randint(7, (5, 2))
    with torch.no_grad():
        one, another = (model(words, model.fresh())[0] for _ in range(2))
        assert not torch.equal(one, another)
        model.eval()
        one, another = (model(words, model.fresh())[0] for _ in range(2))
        assert torch.equal(one, another)


# Runs

QUICK = (
    "--device cpu --data generated --train-size 300 --test-size 100 --embedding 6 --hidden 8 --bptt 12 --batch-size 5 "
    "--dropout 0.2 --weight-drop 0.3 --ar 0.1 --tar 0.1"
).split()


def test_training_goes_through_the_text_once_with_the_state_carried(tmp_path):
    """Next to untrained, an epoch's loss is that of evaluating the text."""
    options = {"lr": 1e-9, "train_size": 600, "test_size": 300, "epochs": 1, "batch_size": 4, "clip": 0.0}
    config = config_of(model="momentum", out=str(tmp_path / "run"), **options)
    language_model.train(config)
    row = read_metrics(tmp_path / "run")[0]
    torch.manual_seed(config.seed)
    text = read_text("generated", vocabulary=5000, train_size=600, test_size=300)
    model = language_model.make_model(len(text.words), config)
    for name, part, columns in (("train", "train", 4), ("validation", "validation", 10)):
        expected = language_model.evaluate(model, language_model.in_columns(text.parts[part], columns), 50)
        assert float(row[f"{name}_loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(row["validation_perplexity"]) == pytest.approx(math.exp(float(row["validation_loss"])))


def test_it_learns_the_chain(tmp_path, capsys):
    options = "--device cpu --data generated --train-size 12000 --embedding 32 --layers 1 --batch-size 10".split()
    language_model.main([*options, "--model", "momentum", "--epochs", "6", "--out", str(tmp_path / "run")])
    assert "text: generated, 12,000/2,000/2,000 words, 41 different; unigram perplexity 3" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 3.2 < summary["test_perplexity"] < 5 < summary["unigram_perplexity"]  # at best 3.35 on average


class Stopped(Exception):
    """In the place of a kill."""


@pytest.mark.parametrize("options", [["--model", "momentum"], ["--model", "sr", "--patience", "1", "--lr", "90"]])
def test_a_stopped_run_resumes_to_the_same_numbers(options, tmp_path, monkeypatch):
    options = [*options, *QUICK, "--epochs", "4"]
    language_model.main([*options, "--out", str(tmp_path / "whole")])
    step = Trainer.step
    for after in (3, 8, 5):  # pieces
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
    rows = read_metrics(tmp_path / "whole")
    assert rows == read_metrics(tmp_path / "parts")
    if "sr" in options:
        assert rows[-1]["is_averaged"] == "1"
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    for name in ("test_perplexity", "best_epoch", "best_validation_perplexity", "unigram_perplexity"):
        assert summaries[0][name] == summaries[1][name]
    best = min(float(row["validation_perplexity"]) for row in rows)
    assert summaries[0]["best_validation_perplexity"] == pytest.approx(best)
    before = (tmp_path / "parts" / "summary.json").read_bytes()
    language_model.main([*options, "--out", str(tmp_path / "parts")])
    assert (tmp_path / "parts" / "summary.json").read_bytes() == before  # finished already


def test_an_explosion_is_reported(tmp_path):
    options = [*QUICK, "--model", "plain", "--epochs", "2", "--lr", "1e30", "--clip", "0"]
    with pytest.raises(SystemExit, match=r"epoch 1, word \d+ of the streams: loss is nan\. Fix: a smaller --lr"):
        language_model.main([*options, "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weight-drop", "1"], "--weight-drop must be below 1, got 1.0"),
        (["--layers", "0"], "--layers must be positive, got 0"),
        (["--vocabulary", "1"], "--vocabulary must be 0, for all words, or at least 2, got 1"),
        (["--cell", "dtriv"], "invalid choice: 'dtriv'"),
        (["--schedule", "cosine"], "invalid choice: 'cosine'"),
    ],
)
def test_options_that_no_run_can_have(options, message, capsys):
    with pytest.raises(SystemExit):
        language_model.main(options)
    assert message in capsys.readouterr().err


def test_a_run_is_not_resumed_with_another_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    options = [*QUICK, "--data", "auto", "--model", "plain", "--epochs", "1", "--out", str(tmp_path / "run")]
    language_model.main(options)
    write_ptb(tmp_path)
    with pytest.raises(SystemExit, match="data: 'generated' there, 'ptb' wanted"):
        language_model.main(options)


def test_without_the_text_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"ptb is not in HBNODE_DATA=.*Fix: put the files there"):
        language_model.main(["--preset", "ptb", "--epochs", "1", "--out", str(tmp_path / "run")])
