"""Texts as sequences of word or character indices, published or simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.common.files import readable
from tasks.data.files import find, missing, read_or_simulate

SOURCES = ("auto", "ptb", "wikitext-2", "tinyshakespeare", "generated")
PARTS = ("train", "validation", "test")
FILES = {
    "ptb": ("ptb/ptb.train.txt", "ptb/ptb.valid.txt", "ptb/ptb.test.txt"),
    "wikitext-2": ("wikitext-2/train.txt", "wikitext-2/valid.txt", "wikitext-2/test.txt"),
    "tinyshakespeare": ("tinyshakespeare/input.txt",),  # one file, of which the first 90 % are for training
}
WORD_LEVEL = ("ptb", "wikitext-2")
UNKNOWN, END = "<unk>", "<eos>"
NEWLINE = "\n"


@dataclass(frozen=True)
class Text:
    """A training, a validation and a test text with a common vocabulary.

    Attributes:
        parts: word indices (N,) int64 of the training, validation and test texts.
        words: the vocabulary of words or characters, sorted by frequency in training.
        source: name of the source of the text.
    """

    parts: dict[str, Tensor]
    words: tuple[str, ...]
    source: str

    def unigram_perplexity(self) -> float:
        """Return the test perplexity of the word frequencies in training, with 1 added to each count."""
        counts = torch.bincount(self.parts["train"], minlength=len(self.words)).double() + 1
        return (counts / counts.sum()).log()[self.parts["test"]].mean().neg().exp().item()


def read_text(
    source: str = "auto",
    *,
    vocabulary: int = 0,
    train_size: int = 0,
    test_size: int = 0,
    order: Sequence[str] = WORD_LEVEL,
) -> Text:
    """Return a text. "auto" is the first text of ``order`` whose files exist, otherwise "generated" with a warning.

    Every line ends with the word ``<eos>``. The vocabulary contains the words of the training text; other words become
    ``<unk>``. Tiny Shakespeare is split into characters, including line ends. Its first 90 % are for training, the next
    and the last 5 % for validation and test. "generated" is :func:`chain_text`.

    Arguments:
        source: one of SOURCES.
        vocabulary: the number of words, the most frequent ones and ``<unk>``; 0: all.
        train_size: number of words to use from the start of the training text; 0: all.
        test_size: number of words to use from the validation and from the test text; 0: all.
        order: the texts that "auto" looks for.

    Raises:
        FileNotFoundError: if there is no such text and ``source`` is not "auto".
        ValueError: if it is empty or not UTF-8.
    """
    there = (name for name in order if all(find((file,)) for file in FILES[name]))
    known = next(there, order[0]) if source == "auto" else source
    whole, found = read_or_simulate(
        source, known, lambda: _read(known), lambda: [chain_text(count, seed) for count, seed in CHAIN_PARTS]
    )
    texts = [text[: limit or None] for text, limit in zip(whole, (train_size, test_size, test_size), strict=True)]
    counts = Counter(texts[0])
    common = [word for word, _ in counts.most_common() if word != UNKNOWN][: vocabulary - 1 if vocabulary else None]
    ranked = sorted([*common, UNKNOWN], key=lambda word: -counts[word])
    numbers = {word: number for number, word in enumerate(ranked)}
    parts = {
        name: torch.tensor([numbers.get(word, numbers[UNKNOWN]) for word in text])
        for name, text in zip(PARTS, texts, strict=True)
    }
    return Text(parts, tuple(ranked), found)


def _read(name: str) -> list[list[str]]:
    """Return the words or characters of the training, validation and test texts."""
    parts = []
    for file in FILES[name]:
        path = find((file,))
        if path is None:
            raise missing(file, "Fix: put it there, or --data auto, which needs none.")
        with readable(path, "Fix: get the file anew.", "is no text in UTF-8"):
            parts.append(path.read_text(encoding="utf-8"))
    if name in WORD_LEVEL:
        words = [f"{text.removesuffix(NEWLINE)}{NEWLINE}".replace(NEWLINE, f" {END} ").split() for text in parts]
    else:
        first, second = len(parts[0]) * 90 // 100, len(parts[0]) * 95 // 100
        words = [list(parts[0][:first]), list(parts[0][first:second]), list(parts[0][second:])]
    if not all(parts) or not all(words):
        raise ValueError(f"a part of the text {name} is empty. Fix: get its files anew.")
    return words


def in_windows(text: Tensor, length: int, start: int = 0) -> Tensor:
    """Cut a text (N,), from index ``start`` on, into windows (count, length + 1). The remainder is dropped.

    Each window begins with the last word of the previous window.
    """
    count = (len(text) - start - 1) // length
    if count < 1:
        raise ValueError(
            f"a text of {len(text)} words has no window of {length} words and one more. Fix: a longer text, or a "
            "smaller --context."
        )
    return text[start : start + count * length + 1].unfold(0, length + 1, length)


# Simulated

CHAIN_WORDS = 40
# Number of words and seed of the training, the validation and the test text
CHAIN_PARTS = ((20_000, 1), (2_000, 2), (2_000, 3))


def chain_transitions() -> Tensor:
    """Return the transition probabilities (40, 40). Four words can follow each word: 0.5, 0.25, 0.15, 0.1."""
    generator = torch.Generator().manual_seed(0)
    transitions = torch.zeros(CHAIN_WORDS, CHAIN_WORDS, dtype=torch.float64)
    for row in transitions:
        following = torch.randperm(CHAIN_WORDS, generator=generator)[:4]
        row[following] = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    return transitions


def chain_text(count: int, seed: int) -> list[str]:
    """Return a simulated text, a Markov chain over 40 words. The best expected perplexity is exp(1.208) = 3.35."""
    generator = torch.Generator().manual_seed(seed)
    cumulative = chain_transitions().cumsum(1)
    chances = torch.rand(count, generator=generator, dtype=torch.float64)
    word, words = 0, []
    for chance in chances:
        words.append(f"word{word}")
        word = int((cumulative[word] > chance).nonzero()[0])
    return words
