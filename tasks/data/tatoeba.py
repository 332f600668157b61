"""Pairs of an English sentence and its German translation, from Tatoeba or simulated.

Tatoeba (tatoeba.org), as distributed by www.manythings.org/anki, is ``tatoeba-deu-eng/deu-eng.zip`` in ``HBNODE_DATA``
with a file ``deu.txt``, in which each line has an English sentence, a tab, and a German sentence. A sentence can have
several translations. Pairs that share a sentence in either language are put into the same split, so that no test
sentence occurs in training. Two sentences count as equal if they differ only in case and punctuation.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Sequence

import torch

from tasks.common.files import readable
from tasks.data.files import find, missing, read_or_simulate

SOURCES = ("auto", "tatoeba", "generated")
FILE = "tatoeba-deu-eng/deu-eng.zip"
PARTS = ("train", "validation", "test")
Pair = tuple[str, str]


def read_pairs(
    source: str = "auto", *, max_words: int = 0, train_size: int = 0, test_size: int = 0
) -> tuple[dict[str, list[Pair]], str]:
    """Return the training, validation and test pairs, and their source.

    "tatoeba" is Tatoeba, "generated" is :func:`simulated_pairs`. "auto" is "tatoeba" if its file exists, otherwise
    "generated" with a warning. Training, validation and test get 90, 5 and 5 % of the sentences, whatever the other
    arguments are. Validation and test contain each English sentence once.

    Arguments:
        source: one of SOURCES.
        max_words: largest number of words in a sentence of either language; longer pairs are left out. 0: no limit.
        train_size: number of training pairs; 0: all.
        test_size: number of validation pairs and of test pairs; 0: all.

    Raises:
        FileNotFoundError: if ``source`` is "tatoeba" and there is no file.
        ValueError: if the file is damaged, or no pair is left.
    """
    everything, source = read_or_simulate(source, "tatoeba", _read, lambda: simulated_pairs(GENERATED, seed=0))
    parts = split(everything)
    for name, pairs in parts.items():
        kept = [pair for pair in pairs if not max_words or max(map(_length, pair)) <= max_words]
        if name != "train":
            kept = list({words_of(english): (english, german) for english, german in reversed(kept)}.values())
        kept.sort(key=_shuffled)
        if not kept:
            raise ValueError(f"no pair of at most {max_words} words in the {name} data. Fix: allow longer ones.")
        parts[name] = kept[: (train_size if name == "train" else test_size) or None]
    return parts, source


def _read() -> list[Pair]:
    path = find((FILE,))
    if path is None:
        raise missing(FILE, "Fix: put it there, or --data auto, which needs none.")
    problem = "is no archive with a file deu.txt of English, tab, German"
    with readable(path, "Fix: get the file anew.", problem), zipfile.ZipFile(path) as archive:
        lines = archive.read("deu.txt").decode("utf-8").splitlines()
        pairs = [(fields[0], fields[1]) for fields in (line.split("\t") for line in lines)]  # there may be a third
    return list(dict.fromkeys((" ".join(english.split()), " ".join(german.split())) for english, german in pairs))


def words_of(sentence: str) -> str:
    """Return the words of a sentence in lower case, without punctuation."""
    return " ".join(re.findall(r"\w+", sentence.lower()))


def _length(sentence: str) -> int:
    return len(words_of(sentence).split())


def _shuffled(pair: Pair) -> tuple[int, Pair]:
    """Return a sort key that puts pairs into the same pseudorandom order on every machine."""
    return zlib.crc32("\t".join(pair).encode()), pair


def split(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Split pairs into training, validation and test data that share no sentence in either language."""
    group: dict[tuple[int, str], tuple[int, str]] = {}  # (language, sentence) -> another sentence in its group

    def root(sentence: tuple[int, str]) -> tuple[int, str]:
        while group.setdefault(sentence, sentence) != sentence:
            group[sentence] = group[group[sentence]]
            sentence = group[sentence]
        return sentence

    for english, german in pairs:
        first, second = sorted((root((0, words_of(english))), root((1, words_of(german)))))
        group[second] = first  # the smallest sentence identifies the group, so the order of pairs is irrelevant
    parts: dict[str, list[Pair]] = {name: [] for name in PARTS}
    for english, german in pairs:
        place = zlib.crc32(root((0, words_of(english)))[1].encode()) % 20
        parts[PARTS[max(0, place - 17)]].append((english, german))
    return parts


# Simulated

GENERATED = 4000
VERBS = ("sees", "hears", "finds", "likes")
NOUNS = ("dog", "cat", "tree", "house", "bird", "fish", "moon", "river")
ADJECTIVES = ("red", "old", "small", "kind")
ADVERBS = ("often", "never", "today")


def simulated_pairs(count: int, seed: int) -> list[Pair]:
    """Return sentences such as "old dog sees cat." and their translations into a language that ends with the verb.

    A word is translated by reversing its letters, and an adjective follows its noun.
    """
    generator = torch.Generator().manual_seed(seed)

    def choose(words: Sequence[str]) -> str:
        return words[int(torch.randint(len(words), (), generator=generator))]

    pairs: dict[Pair, None] = {}
    while len(pairs) < count:
        phrases = [[choose((*ADJECTIVES, "")), choose(NOUNS)] for _ in range(2)]
        verb, adverb = choose(VERBS), choose((*ADVERBS, ""))
        english = [*phrases[0], adverb, verb, *phrases[1]]
        theirs = [word for adjective, noun in phrases for word in (noun, adjective)]
        german = [word[::-1] for word in (*theirs, adverb, verb)]
        pairs[" ".join(filter(None, english)) + ".", " ".join(filter(None, german)) + "."] = None
    return list(pairs)
