"""Pairs of an English sentence and a German one, found in ``HBNODE_DATA`` or made up.

Tatoeba (tatoeba.org), as www.manythings.org/anki hands it out: ``tatoeba-deu-eng/deu-eng.zip`` with a file ``deu.txt``
of lines English, tab, German. A sentence has several translations there, and these have others. So that nothing of the
test was seen in training, pairs that share a sentence in either language, by its words without regard to case and
punctuation, are in the same part, and so are all that they share a sentence with.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.data.files import find, missing, readable

SOURCES = ("auto", "tatoeba", "generated")
FILE = "tatoeba-deu-eng/deu-eng.zip"
PARTS = ("train", "validation", "test")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Translations:
    """Training, validation and test.

    Attributes:
        parts: for each, its pairs of a sentence and its translation.
        source: where they come from.
    """

    parts: dict[str, list[Pair]]
    source: str


def read_pairs(source: str = "auto", *, max_words: int = 0, train_size: int = 0, test_size: int = 0) -> Translations:
    """The pairs that ``source`` names; "auto" is Tatoeba if it is there, else a made-up language.

    The parts have 90, 5 and 5 % of the sentences, which depend on no argument. Validation and test have each English
    sentence once.

    Arguments:
        source: one of SOURCES.
        max_words: the most words of a sentence in either language; longer pairs are left out of all parts; 0: any.
        train_size: pairs of the training data; 0: all.
        test_size: pairs of the validation data and of the test; 0: all.

    Raises:
        FileNotFoundError: if the pairs are asked for and are not there.
        ValueError: if the file is not as described, or nothing is left.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    path = find((FILE,)) if source != "generated" else None
    if source == "tatoeba" and path is None:
        raise missing(source, f"There is expected {FILE}. Fix: put it there, or --data auto, which needs none.")
    parts = split(_read(path) if path else made_up(GENERATED, seed=0))
    for name, pairs in parts.items():
        kept = [pair for pair in pairs if not max_words or max(map(_length, pair)) <= max_words]
        if name != "train":
            kept = list({words_of(english): (english, german) for english, german in reversed(kept)}.values())
        kept.sort(key=_shuffled)
        if not kept:
            raise ValueError(f"no pair of at most {max_words} words in the {name} data. Fix: allow longer ones.")
        parts[name] = kept[: (train_size if name == "train" else test_size) or None]
    return Translations(parts, "tatoeba" if path else "generated")


def _read(path: Path) -> list[Pair]:
    problem = "is no archive with a file deu.txt of English, tab, German"
    with readable(path, "Fix: get the file anew.", problem), zipfile.ZipFile(path) as archive:
        lines = archive.read("deu.txt").decode("utf-8").splitlines()
        pairs = [(fields[0], fields[1]) for fields in (line.split("\t") for line in lines)]  # newer files have a third
    return list(dict.fromkeys((" ".join(english.split()), " ".join(german.split())) for english, german in pairs))


def words_of(sentence: str) -> str:
    """What two sentences have in common that are the same but for case, punctuation and spaces."""
    return " ".join(re.findall(r"\w+", sentence.lower()))


def _length(sentence: str) -> int:
    return len(words_of(sentence).split())


def _shuffled(pair: Pair) -> tuple[int, Pair]:
    """A key that orders pairs as if by chance, and the same everywhere."""
    return zlib.crc32("\t".join(pair).encode()), pair


def split(pairs: Sequence[Pair]) -> dict[str, list[Pair]]:
    """Training, validation and test, which share no sentence in either language."""
    group: dict[tuple[int, str], tuple[int, str]] = {}  # a sentence of a language -> one that is in the same group

    def root(sentence: tuple[int, str]) -> tuple[int, str]:
        while group.setdefault(sentence, sentence) != sentence:
            group[sentence] = group[group[sentence]]
            sentence = group[sentence]
        return sentence

    for english, german in pairs:
        first, second = sorted((root((0, words_of(english))), root((1, words_of(german)))))
        group[second] = first  # the least sentence names the group, in whatever order pairs are read
    parts: dict[str, list[Pair]] = {name: [] for name in PARTS}
    for english, german in pairs:
        place = zlib.crc32(root((0, words_of(english)))[1].encode()) % 20
        parts[PARTS[max(0, place - 17)]].append((english, german))
    return parts


# Made up

GENERATED = 4000
VERBS = ("sees", "hears", "finds", "likes")
NOUNS = ("dog", "cat", "tree", "house", "bird", "fish", "moon", "river")
ADJECTIVES = ("red", "old", "small", "kind")
ADVERBS = ("often", "never", "today")


def made_up(count: int, seed: int) -> list[Pair]:
    """Sentences such as "old dog sees cat." and their translations into a language that ends with the verb.

    A word's translation is the word backwards, and an adjective follows its noun.
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
