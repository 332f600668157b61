"""Text as numbers of words or characters, found in ``HBNODE_DATA`` or made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tasks.data.files import find, missing, readable

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
    """Training, validation and test.

    Attributes:
        parts: for each, the numbers of its words, (N,) int64.
        words: the word of each number, the commonest of training first; a character in a text of characters.
        source: where it comes from.
    """

    parts: dict[str, Tensor]
    words: tuple[str, ...]
    source: str

    def unigram_perplexity(self) -> float:
        """The test's by the words' shares in training, each counted once more than it is there."""
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
    """The text that ``source`` names; "auto" is the first of ``order`` that is there, else a made-up one.

    Every line ends with the word ``<eos>``. The vocabulary is that of the training text; another word is ``<unk>``.
    Tiny Shakespeare is read by characters, the end of a line among them: the first 90 % are for training, the next
    and the last 5 % for validation and test.

    Arguments:
        source: one of SOURCES.
        vocabulary: how many words to tell apart, the commonest, ``<unk>`` among them; 0: all.
        train_size: words of the training text, from its beginning; 0: all.
        test_size: words of the validation text and of the test likewise.
        order: which texts "auto" looks for.

    Raises:
        FileNotFoundError: if the text is asked for and is not there.
        ValueError: if it is empty or not UTF-8.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    wanted = order if source == "auto" else (source,)
    paths = {name: [find((file,)) for file in FILES[name]] for name in wanted if name in FILES}
    found = next((name for name, of_it in paths.items() if all(of_it)), "generated")
    if found == "generated" and source in FILES:
        fix = "Fix: put the files there, or --data auto, which takes what is there."
        raise missing(source, f"There are expected {', '.join(FILES[source])}. {fix}")
    if found == "generated":
        whole = [chain_text(count, seed) for count, seed in CHAIN_PARTS]
    elif found in WORD_LEVEL:
        whole = [_words(path) for path in paths[found] if path]
    else:
        whole = [list(part) for path in paths[found] if path for part in _characters(path)]
    texts = [text[: limit or None] for text, limit in zip(whole, (train_size, test_size, test_size), strict=True)]
    counts = Counter(texts[0])
    known = [word for word, _ in counts.most_common() if word != UNKNOWN][: vocabulary - 1 if vocabulary else None]
    ranked = sorted([*known, UNKNOWN], key=lambda word: -counts[word])
    numbers = {word: number for number, word in enumerate(ranked)}
    parts = {
        name: torch.tensor([numbers.get(word, numbers[UNKNOWN]) for word in text])
        for name, text in zip(PARTS, texts, strict=True)
    }
    return Text(parts, tuple(ranked), found)


def _read(path: Path) -> str:
    """The characters of a file; line ends, of Windows too, are one of them."""
    with readable(path, "Fix: get the file anew.", "is no text in UTF-8"):
        return path.read_text(encoding="utf-8")


def _words(path: Path) -> list[str]:
    """The words of a file, one line after another, each with ``<eos>`` at its end."""
    text = _read(path)
    if not text:
        raise ValueError(f"{path} is empty; expected lines of words. Fix: get the file anew.")
    return f"{text.removesuffix(NEWLINE)}{NEWLINE}".replace(NEWLINE, f" {END} ").split()


def _characters(path: Path) -> tuple[str, str, str]:
    """The characters of a file, 90, 5 and 5 % of them."""
    text = _read(path)
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    parts = text[:first], text[first:second], text[second:]
    if not all(parts):
        raise ValueError(f"{path} has {len(text)} characters; expected a text. Fix: get the file anew.")
    return parts


def in_windows(text: Tensor, length: int, start: int = 0) -> Tensor:
    """A text (N,) from ``start`` on as windows (count, length + 1); each begins with the last word of the one before.

    The remainder is left out.
    """
    count = (len(text) - start - 1) // length
    if count < 1:
        raise ValueError(
            f"a text of {len(text)} words has no window of {length} words and one more. Fix: a longer text, or a "
            "smaller --context."
        )
    return text[start : start + count * length + 1].unfold(0, length + 1, length)


# Made up

CHAIN_WORDS = 40
CHAIN_PARTS = ((20_000, 1), (2_000, 2), (2_000, 3))  # words and seed of each part


def chain_transitions() -> Tensor:
    """The chance of each word after each, (40, 40): four words can follow, with 0.5, 0.25, 0.15 and 0.1."""
    generator = torch.Generator().manual_seed(0)
    transitions = torch.zeros(CHAIN_WORDS, CHAIN_WORDS, dtype=torch.float64)
    for row in transitions:
        following = torch.randperm(CHAIN_WORDS, generator=generator)[:4]
        row[following] = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    return transitions


def chain_text(count: int, seed: int) -> list[str]:
    """A made-up text, a Markov chain over 40 words; no model's perplexity is below exp(1.208) = 3.35 for long."""
    generator = torch.Generator().manual_seed(seed)
    cumulative = chain_transitions().cumsum(1)
    chances = torch.rand(count, generator=generator, dtype=torch.float64)
    word, words = 0, []
    for chance in chances:
        words.append(f"word{word}")
        word = int((cumulative[word] > chance).nonzero()[0])
    return words
