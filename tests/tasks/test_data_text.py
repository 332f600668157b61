"""Texts by words and characters, sentence pairs, subwords: small files read exactly, and the synthetic ones."""

import math
import zipfile
from collections import Counter

import pytest
import torch

from tasks.data import tatoeba
from tasks.data.subwords import PADDING, UNKNOWN, decode, learn_subwords
from tasks.data.text import FILES, chain_transitions, read_text


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HBNODE_DATA", str(tmp_path))
    return tmp_path


def write_ptb(folder, train="a b a <unk>\n\n c a \n", valid="b d\n", test="c\n"):
    (folder / "ptb").mkdir(exist_ok=True)
    for name, content in (("train", train), ("valid", valid), ("test", test)):
        (folder / "ptb" / f"ptb.{name}.txt").write_text(content, encoding="utf-8")


def write_shakespeare(folder, text):
    (folder / "tinyshakespeare").mkdir(exist_ok=True)
    (folder / "tinyshakespeare" / "input.txt").write_text(text, encoding="utf-8")


def write_pairs(folder, lines):
    (folder / "tatoeba-deu-eng").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tatoeba-deu-eng" / "deu-eng.zip", "w") as archive:
        archive.writestr("deu.txt", "\n".join(lines) + "\n")


def spelt(text, between=" "):
    return [between.join(text.words[number] for number in numbers) for numbers in text.parts.values()]


def test_words_end_of_lines_and_a_limited_vocabulary(folder):
    write_ptb(folder)
    text = read_text()
    assert text.source == "ptb"
    assert spelt(text) == ["a b a <unk> <eos> <eos> c a <eos>", "b <unk> <eos>", "c <eos>"]
    counts = Counter(text.parts["train"].tolist())
    assert [counts[number] for number in range(5)] == sorted(counts.values(), reverse=True)
    text = read_text("ptb", vocabulary=3, train_size=7, test_size=2)
    assert spelt(text) == ["a <unk> a <unk> <eos> <eos> <unk>", "<unk> <unk>", "<unk> <eos>"]
    write_ptb(folder, train="a b b\n")
    assert sorted(read_text("ptb").words) == ["<eos>", "<unk>", "a", "b"]  # always has <unk>


def test_texts_that_cannot_be_read(folder):
    for name in ("ptb", "tinyshakespeare"):
        with pytest.raises(FileNotFoundError, match=rf"{FILES[name][0]} is not in HBNODE_DATA=.*Fix:"):
            read_text(name)
    write_ptb(folder, valid="")
    with pytest.raises(ValueError, match="a part of the text ptb is empty"):
        read_text()
    (folder / "ptb" / "ptb.train.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"ptb\.train\.txt is no text in UTF-8"):
        read_text()
    write_shakespeare(folder, "short")
    with pytest.raises(ValueError, match="a part of the text tinyshakespeare is empty"):
        read_text("tinyshakespeare")


def test_the_chain():
    transitions = chain_transitions()
    torch.testing.assert_close(transitions.sum(1), torch.ones(40, dtype=torch.float64))
    entropy = -transitions[transitions > 0].log().mul(transitions[transitions > 0]).sum() / 40
    assert math.exp(entropy) == pytest.approx(3.3467, abs=1e-4)
    text = read_text("generated")
    assert [len(part) for part in text.parts.values()] == [20_000, 2000, 2000]
    train = text.parts["train"]
    following = train[1:][train[:-1] == text.words.index("word7")].unique(return_counts=True)[1]
    assert sorted((following / following.sum()).tolist()) == pytest.approx([0.1, 0.15, 0.25, 0.5], abs=0.07)
    assert not torch.equal(text.parts["validation"], text.parts["test"])


def assert_disjoint(parts):
    seen = [{(i, tatoeba.words_of(pair[i])) for pair in pairs for i in range(2)} for pairs in parts.values()]
    for index, one in enumerate(seen):
        assert not any(one & other for other in seen[index + 1 :])


def test_parts_share_no_sentence_in_either_language():
    """Sentences here have many translations each, and chains of these."""
    pairs = [(f"Sentence {i} {i // 7}!", f"Satz {i // 3}.") for i in range(3000)]
    pairs += [(english.lower().rstrip("!"), german + " So.") for english, german in pairs[::5]]
    parts = tatoeba.split(pairs)
    assert sorted(pair for part in parts.values() for pair in part) == sorted(pairs)
    assert_disjoint(parts)
    for name, share in (("train", 0.9), ("validation", 0.05), ("test", 0.05)):
        assert len(parts[name]) / len(pairs) == pytest.approx(share, abs=0.02)
    reversed_parts = tatoeba.split(pairs[::-1])
    assert all(set(parts[name]) == set(reversed_parts[name]) for name in parts)


def test_sentence_pairs_of_limited_length_and_number(folder):
    lines = [f"I see {i}.\tIch sehe {i}.\tCC-BY" for i in range(400)] + ["Go\u202fon!\tMach weiter, immer weiter."]
    lines += [f"I see {i}.\tDie {i} sehe ich." for i in range(400)]
    write_pairs(folder, lines)
    parts, source = tatoeba.read_pairs()
    assert source == "tatoeba"
    assert_disjoint(parts)
    assert ("Go on!", "Mach weiter, immer weiter.") in [pair for pairs in parts.values() for pair in pairs]
    for name in ("validation", "test"):  # each English sentence once
        assert len({english for english, _ in parts[name]}) == len(parts[name])
    few, _ = tatoeba.read_pairs(max_words=3, train_size=50, test_size=4)
    assert {name: len(pairs) for name, pairs in few.items()} == {"train": 50, "validation": 4, "test": 4}
    assert all(len(german.split()) == 3 for pairs in few.values() for _, german in pairs)
    assert few["train"] == [pair for pair in parts["train"] if len(pair[1].split()) == 3][:50]
    with pytest.raises(ValueError, match="no pair of at most 1 words in the train data"):
        tatoeba.read_pairs(max_words=1)


TEXTS = ("low low low lower", "newest newest widest!", "He said: „low, lower“ …", "", " a\u202f  b ")


@pytest.mark.parametrize("size", [0, 40, 1000])
def test_subwords_decode_to_their_text(size):
    tokenizer = learn_subwords(TEXTS, size)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert decode(tokenizer, ids) == " ".join(text.split())
        assert not {PADDING, UNKNOWN} & set(ids)
    padded = [text.ids for text in tokenizer.encode_batch(["lower newest", "low"])]
    assert [decode(tokenizer, ids) for ids in padded] == ["lower newest", "low"]
    assert (len(padded[0]), padded[1][-1]) == (len(padded[1]), PADDING)
    assert tokenizer.encode("lox").ids[-1] == UNKNOWN
    if size == 1000:
        assert tokenizer.encode("low lower!").tokens == ["▁low", "▁lower", "!"]
