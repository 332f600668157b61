"""Translation: sentences and their split, subwords, corruption, the model, BLEU, training and resuming."""

import dataclasses
import itertools
import json
import os
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("sacrebleu")

from tasks import plot, translation
from tasks.common.config import parse
from tasks.common.train import Trainer
from tasks.data import subwords, tatoeba
from tasks.data.subwords import PADDING, SPECIAL, UNKNOWN, Subwords
from tests.tasks.small_runs import read_metrics

# Sentences


def write_pairs(folder, lines):
    (folder / "tatoeba-deu-eng").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tatoeba-deu-eng" / "deu-eng.zip", "w") as archive:
        archive.writestr("deu.txt", "\n".join(lines) + "\n")


def check_that_parts_share_no_sentence(parts):
    seen = [{(i, tatoeba.words_of(pair[i])) for pair in pairs for i in range(2)} for pairs in parts.values()]
    for index, one in enumerate(seen):
        assert not any(one & other for other in seen[index + 1 :])


def test_parts_share_no_sentence_in_either_language():
    """Sentences here have many translations each, and chains of these."""
    pairs = [(f"Sentence {i} {i // 7}!", f"Satz {i // 3}.") for i in range(3000)]
    pairs += [(english.lower().rstrip("!"), german + " So.") for english, german in pairs[::5]]
    parts = tatoeba.split(pairs)
    assert sorted(pair for of_it in parts.values() for pair in of_it) == sorted(pairs)
    check_that_parts_share_no_sentence(parts)
    for name, share in (("train", 0.9), ("validation", 0.05), ("test", 0.05)):
        assert len(parts[name]) / len(pairs) == pytest.approx(share, abs=0.02)
    again = tatoeba.split(pairs[::-1])
    assert all(set(parts[name]) == set(again[name]) for name in parts)


def test_sizes_and_lengths(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    lines = [f"I see {i}.\tIch sehe {i}.\tCC-BY" for i in range(400)] + ["Go\u202fon!\tMach weiter, immer weiter."]
    lines += [f"I see {i}.\tDie {i} sehe ich." for i in range(400)]
    write_pairs(tmp_path, lines)
    data = tatoeba.read_pairs()
    assert data.source == "tatoeba"
    check_that_parts_share_no_sentence(data.parts)
    assert ("Go on!", "Mach weiter, immer weiter.") in [pair for pairs in data.parts.values() for pair in pairs]
    for name in ("validation", "test"):
        assert max(Counter(english for english, _ in data.parts[name]).values()) == 1
    few = tatoeba.read_pairs(max_words=3, train_size=50, test_size=4)
    assert {name: len(pairs) for name, pairs in few.parts.items()} == {"train": 50, "validation": 4, "test": 4}
    assert all(len(german.split()) == 3 for pairs in few.parts.values() for _, german in pairs)
    in_order = [pair for pair in data.parts["train"] if len(pair[1].split()) == 3]
    assert few.parts["train"] == in_order[:50]  # a smaller size takes the first of the same order
    with pytest.raises(ValueError, match=r"no pair of at most 1 words in the train data\. Fix:"):
        tatoeba.read_pairs(max_words=1)


def test_sentences_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"tatoeba is not in HBNODE_DATA=.*expected tatoeba-deu-eng.*Fix: put"):
        tatoeba.read_pairs("tatoeba")
    with pytest.raises(ValueError, match="source must be one of auto, tatoeba, generated, got 'novel'"):
        tatoeba.read_pairs("novel")
    assert tatoeba.read_pairs().source == "generated"
    write_pairs(tmp_path, ["Hi.\tHallo.", "one language"])
    with pytest.raises(ValueError, match=r"deu-eng\.zip is no archive with a file deu\.txt .*Fix: get the file anew"):
        tatoeba.read_pairs()
    (tmp_path / "tatoeba-deu-eng" / "deu-eng.zip").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"deu-eng\.zip is no archive"):
        tatoeba.read_pairs()


def test_the_made_up_language():
    pairs = tatoeba.made_up(50, seed=0)
    assert pairs == tatoeba.made_up(50, seed=0)
    assert len(set(pairs)) == 50
    for english, german in pairs:
        words, theirs = (sentence.rstrip(".").split() for sentence in (english, german))
        assert sorted(word[::-1] for word in theirs) == sorted(words)
        assert theirs[-1][::-1] in tatoeba.VERBS
    check_that_parts_share_no_sentence(tatoeba.read_pairs("generated").parts)


@pytest.mark.slow
def test_tatoeba_when_it_is_there():
    root = os.environ.get("HBNODE_DATA")
    if not root or not (Path(root) / tatoeba.FILE).is_file():
        pytest.skip("Tatoeba is not in HBNODE_DATA")
    parts = tatoeba.read_pairs("tatoeba").parts
    check_that_parts_share_no_sentence(parts)
    assert len(parts["train"]) / sum(map(len, parts.values())) == pytest.approx(0.91, abs=0.02)


# Subwords

TEXTS = ("low low low lower", "newest newest widest!", "He said: „low, lower“ …", "")


def merge_plainly(counts, merges):
    """The pairs to merge, counted anew before each."""
    words, learned = {word: list(word) for word in counts}, []
    while len(learned) < merges:
        found = Counter()
        for word, symbols in words.items():
            for pair in itertools.pairwise(symbols):
                found[pair] += counts[word]
        pair, count = min(found.items(), key=lambda item: (-item[1], item[0]), default=(None, 0))
        if count < 2:
            break
        learned.append(pair)
        words = {word: subwords.merged(symbols, pair) for word, symbols in words.items()}
    return learned


@pytest.mark.parametrize("merges", [0, 1, 5, 17, 1000])
def test_merges_are_those_of_counting_anew(merges):
    texts = [*TEXTS, *(text for pair in tatoeba.made_up(60, seed=1) for text in pair), "aaaa aaaaaaa banana bananas"]
    counts = Counter(piece for text in texts for piece in subwords.pieces(text))
    assert subwords.learn_merges(counts, merges) == merge_plainly(counts, merges)


@pytest.mark.parametrize("size", [0, 40, 1000])
def test_texts_are_read_back(size):
    vocabulary = Subwords(TEXTS, size)
    for text in TEXTS:
        assert vocabulary.decode(vocabulary.encode(text)) == " ".join(text.split())
        assert PADDING not in vocabulary.encode(text)
    assert vocabulary.decode([*vocabulary.encode("lower newest"), PADDING]) == "lower newest"
    assert vocabulary.encode("lox")[-1] == UNKNOWN
    assert len(vocabulary) == len(set(vocabulary.symbols))
    if size == 1000:
        assert [vocabulary.symbols[n] for n in vocabulary.encode("low lower!")] == ["▁low", "▁lower", "!"]


# Samples

WORDS = 30


def lengths_of(tokens):
    return (tokens != PADDING).sum(1)


def padded(*lengths):
    rows = [torch.randint(len(SPECIAL), WORDS, (n,)) for n in lengths]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def test_samples_and_their_lengths():
    pairs = [("low", "lower lower newest"), ("newest widest!", "low")]
    vocabulary = Subwords(2 * [text for pair in pairs for text in pair], 1000)
    samples = translation.as_samples(pairs, vocabulary)
    assert [x.shape for x in samples] == [(2, 3), (2, 3)]
    assert [lengths_of(x).tolist() for x in samples] == [[1, 3], [3, 1]]
    assert [x.shape for x in translation.at_most(samples, 0)] == [(2, 3), (2, 3)]
    few = translation.at_most((padded(1, 2, 5), padded(2, 2, 1)), 2)
    assert [lengths_of(x).tolist() for x in few] == [[1, 2], [2, 2]]
    assert [x.shape for x in few] == [(2, 2), (2, 2)]
    with pytest.raises(SystemExit, match=r"no pair has at most 1 subwords. Fix: a larger --max-length, or 0 for all"):
        translation.at_most(samples, 1)


def test_corruption_changes_a_share_in_three_ways():
    tokens = padded(*[50] * 400, *[7] * 400)
    out = translation.corrupt(tokens, 0.3, WORDS)
    real = tokens != PADDING
    assert torch.equal(out != PADDING, real)
    left_alone = (out == tokens)[real].float().mean().item()
    assert 0.5 < left_alone < 0.75  # 10 % change themselves, 10 % the next, 10 % both; some to what they were
    torch.testing.assert_close(translation.corrupt(tokens, 1e-9, WORDS), tokens)
    distinct = torch.arange(len(SPECIAL), WORDS).expand(500, -1)
    out = translation.corrupt(distinct, 0.06, WORDS)
    is_next, is_swapped = out[:, 1:] == distinct[:, :-1], (out[:, :-1] == distinct[:, 1:])
    swaps = (is_next & is_swapped).float().mean().item()
    assert swaps == pytest.approx(0.02, abs=0.008)
    assert is_next.float().mean().item() == pytest.approx(0.04, abs=0.012)


def test_the_source_is_spread_over_the_target():
    source = torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0], [5, 6, 7, 8]])
    lengths = torch.tensor([6, 3, 2])
    padding = torch.arange(6) >= lengths[:, None]
    expected = [[5, 5, 6, 6, 7, 7], [5, 5, 5, 0, 0, 0], [5, 7, 0, 0, 0, 0]]
    assert translation.spread(source, padding).tolist() == expected


# The model


def config_of(**options):
    small = {"data": "generated", "d_model": 16, "heads": 2, "feedforward": 20, "vocabulary": 60, "dropout": 0.0}
    return translation.TranslationConfig(device="cpu", **{"model": "momentum", "iterations": 3} | small | options)


def make(**options):
    torch.manual_seed(0)
    return translation.Translator(WORDS, config_of(**options))


def test_the_papers_size():
    config = parse(translation.TranslationConfig, translation.PRESETS, "", ["--preset", "paper", "--device", "cpu"])
    sizes = {"d_model": 278, "feedforward": 507, "layers": 5, "heads": 2, "vocabulary": 40_000, "iterations": 8}
    assert {name: getattr(config, name) for name in sizes} == sizes
    with torch.device("meta"):
        counts = {
            name: sum(
                p.numel() for p in translation.Translator(100, dataclasses.replace(config, model=name)).parameters()
            )
            for name in translation.TranslationConfig.models
        }
    assert len(set(counts.values())) == 1  # "almost the same for all models", section 4.4.4
    assert {"softmax", "linear", "momentum", "momentum_connection", "adaptive"} <= counts.keys()
    assert not {"heavy_ball", "gated_delta", "gated_linear"} & counts.keys()  # read in an order


@pytest.mark.parametrize("model", translation.TranslationConfig.models)
def test_padding_and_batch_mates_change_nothing(model):
    translator = make(model=model).double().eval()
    source, target = padded(5, 3), padded(6, 2)
    with torch.no_grad():
        scores, offset = translator(source, target)
        passes = translator.translate(source)
        alone, offset_alone = translator(source[1:, :3], target[1:, :2])
        wide = translator.translate(torch.nn.functional.pad(source, (0, 4)))
    for one, two in zip(scores, alone, strict=True):
        torch.testing.assert_close(one[1:, :2], two, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(offset[1:], offset_alone, atol=1e-10, rtol=1e-9)
    assert all(torch.equal(*pair) for pair in zip(passes, wide, strict=True))


def test_a_word_depends_on_all_words():
    translator = make().eval()
    source, target = padded(5), padded(6)
    with torch.no_grad():
        scores, _ = translator(source, target)
        for index in range(5):
            other = source.clone()
            other[0, index] = len(SPECIAL) + (source[0, index] + 1 - len(SPECIAL)) % (WORDS - len(SPECIAL))
            assert ((translator(other, target)[0][0] - scores[0]).abs().amax(2) > 0).all()


def test_the_length_does_not_train_the_encoder():
    translator = make()
    source, target = padded(5, 3), padded(6, 2)
    translator(source, target)[1].square().sum().backward()
    assert {name for name, p in translator.named_parameters() if p.grad is not None} == {"length.weight", "length.bias"}


def test_passes_are_those_of_training_without_corruption():
    """With the true lengths, passes in translation are the passes of a call in evaluation mode."""
    translator = make(refinements=4, iterations=4).eval()
    source, target = padded(5, 3), padded(6, 2)
    with torch.no_grad():
        scores, _ = translator(source, target)
    passes = translator.translate(source, lengths_of(target))
    for tokens, score in zip(passes, scores, strict=True):
        assert torch.equal(tokens, score.argmax(-1).masked_fill(target == PADDING, PADDING))


def test_lengths_of_translations():
    translator = make(iterations=1)
    source = padded(5, 3)
    with torch.no_grad():
        translator.length.weight.zero_()
        translator.length.bias.zero_()
        for offset, expected in ((0, [5, 3]), (4, [9, 7]), (-4, [1, 1]), (-20, [1, 1])):
            translator.length.bias.zero_()[offset + translation.MAX_OFFSET] = 1
            assert lengths_of(translator.translate(source)[0]).tolist() == expected
    assert lengths_of(translator.translate(source, torch.tensor([2, 4]))[0]).tolist() == [2, 4]


def test_cross_entropy_is_the_mean_of_the_passes():
    translator = make(refinements=2).eval()
    source, target = padded(5, 3), torch.nn.functional.pad(padded(6, 2), (0, 3))
    loss, means = translation.cross_entropy(translator, (source, target))
    scores, offset = translator(source, target[:, :6])
    each = []
    for score in scores:
        chances = score.log_softmax(-1)
        each.append(
            -torch.cat([chances[0].gather(1, target[0, :6, None]), chances[1, :2].gather(1, target[1, :2, None])])
        )
    torch.testing.assert_close(means["last_pass"], each[1].mean().item())
    torch.testing.assert_close(means["loss"], torch.stack(each).mean().item())
    of_length = -offset.log_softmax(-1)[[0, 1], [translation.MAX_OFFSET + 1, translation.MAX_OFFSET - 1]].mean()
    torch.testing.assert_close(loss, torch.stack(each).mean() + of_length)


# Runs

QUICK = (
    "--device cpu --data generated --d-model 16 --heads 2 --feedforward 16 --layers 1 --vocabulary 80 --train-size 60 "
    "--test-size 12 --batch-size 20 --iterations 2 --max-words 0 --max-length 0"
).split()


def test_it_learns_the_made_up_language(tmp_path, capsys):
    options = "--device cpu --data generated --layers 1 --d-model 32 --heads 2 --feedforward 64 --vocabulary 200"
    options += " --max-words 0 --train-size 2000 --test-size 60 --batch-size 32 --lr 5e-3 --epochs 3 --refinements 2"
    options += " --iterations 3 --dropout 0 --max-length 0 --model momentum"
    translation.main([*options.split(), "--out", str(tmp_path / "run")])
    assert "sentences: generated, 2,000/60/60; " in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 60 < summary["test_bleu"] <= 100 + 1e-9
    assert 60 < summary["test_bleu_oracle"] <= 100 + 1e-9
    assert len(summary["test_bleu_of_passes"]) == 3
    assert summary["test_bleu_of_passes"][0] == summary["test_bleu_first_pass"]
    assert len(summary["examples"]) == translation.SHOWN
    plot.main([str(tmp_path)])
    assert "best validation bleu" in capsys.readouterr().out


def test_repeated_words_are_written_once():
    assert translation.without_repeats("a a b b. b. a") == "a b b. a"


def test_bleu_of_the_references_is_100():
    pairs = [("The dog sees a cat.", "Der Hund sieht eine Katze."), ("I go.", "Ich gehe jetzt nach Hause.")]
    judge = translation.Judge(pairs, Subwords(["The dog"], 100), 2, torch.device("cpu"))
    assert judge.bleu([german for _, german in pairs]) == pytest.approx(100)
    assert judge.bleu(["x"] * 2) < 10


class Stopped(Exception):
    """In the place of a kill."""


@pytest.mark.parametrize("model", ["softmax", "adaptive"])
def test_a_stopped_run_resumes_to_the_same_numbers(model, tmp_path, monkeypatch):
    options = [*QUICK, "--model", model, "--epochs", "3"]
    translation.main([*options, "--out", str(tmp_path / "whole")])
    step = Trainer.step
    for after in (2, 3):  # batches, of nine
        left = iter(range(after))

        def stopping(self, left=left):
            if next(left, None) is None:
                raise Stopped
            return step(self)

        monkeypatch.setattr(Trainer, "step", stopping)
        with pytest.raises(Stopped):
            translation.main([*options, "--checkpoint-seconds", "0", "--out", str(tmp_path / "parts")])
    monkeypatch.setattr(Trainer, "step", step)
    translation.main([*options, "--out", str(tmp_path / "parts")])
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "parts")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    for name in ("test_bleu_of_passes", "test_bleu_oracle", "best_epoch", "best_validation_bleu", "examples"):
        assert summaries[0][name] == summaries[1][name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dropout", "1"], "--dropout must be below 1, got 1.0"),
        (["--momentum", "1"], "--momentum must be below 1, got 1.0"),
        (["--d-model", "30", "--heads", "4"], "--d-model must be even and a multiple of --heads, got 30 and 4"),
        (["--model", "heavy_ball"], "invalid choice: 'heavy_ball'"),
        (["--refinements", "0"], "--refinements must be positive, got 0"),
    ],
)
def test_options_that_no_run_can_have(options, message, capsys):
    with pytest.raises(SystemExit):
        translation.main(options)
    assert message in capsys.readouterr().err


def test_without_the_sentences_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"tatoeba is not in HBNODE_DATA=.*Fix: put the file there"):
        translation.main(["--data", "tatoeba", "--model", "linear", "--out", str(tmp_path / "run")])
