"""Recall: bindings of keys to values that are asked for later, and sequences that hold everything twice."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

FILLER = SEPARATOR = 0
IGNORED = -100  # a target that is none, as torch's cross-entropy has it
GAP_EXPONENT = -0.99  # of the chances of the places where keys are asked for


@dataclasses.dataclass(frozen=True)
class Bindings:
    """Sequences of bindings, a key and its value in turn, and of questions: the keys once more, each once.

    The questions follow at places that are likelier the sooner they come, by a power law as in Zoology (Arora et al.,
    arXiv:2312.04927). All between them is filler.

    Attributes:
        pairs: how many keys are bound.
        length: symbols of a sequence, 2 x pairs x times + pairs at least.
        keys: how many keys there are to choose from; they are the symbols 1 to ``keys``.
        values: how many values; they are the next symbols.
        times: how often each key is bound, in a random order of all bindings.
        changing: whether a key has another value each time, of which the last is asked for; otherwise it is the same.
        noise: chance that a binding shows a value drawn anew in the place of its own.
    """

    pairs: int
    length: int
    keys: int
    values: int
    times: int = 1
    changing: bool = False
    noise: float = 0.0

    def __post_init__(self) -> None:
        needed = 2 * self.pairs * self.times + self.pairs
        if self.length < needed:
            raise ValueError(
                f"{self.pairs} pairs bound {self.times} times take {needed} symbols, got a length of {self.length}. "
                "Fix: a longer sequence, or fewer pairs."
            )
        if self.pairs > self.keys:
            raise ValueError(f"{self.pairs} pairs need as many keys, got {self.keys}. Fix: a larger vocabulary.")
        if self.changing and self.times > self.values:
            raise ValueError(f"{self.times} different values need as many, got {self.values}. Fix: more values.")

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Sequences, what they ask for, and for changing keys what a question must not be answered with.

        Arguments:
            count: how many.
            generator: of random numbers.

        Returns:
            Symbols (count, length); the value at each question, counted from 0, and -100 elsewhere (count, length);
            likewise the value that the key had first, where it changes.
        """
        keys = distinct(count, self.pairs, self.keys, generator)
        if self.changing:
            values = distinct(count * self.pairs, self.times, self.values, generator).view(count, self.pairs, -1)
        else:
            values = torch.randint(self.values, (count, self.pairs, 1), generator=generator)
            values = values.expand(-1, -1, self.times)
        shown = values
        if self.noise:
            wrong = torch.rand(values.shape, generator=generator) < self.noise
            shown = torch.where(wrong, torch.randint(self.values, values.shape, generator=generator), values)
        order = self._order(count, generator)
        tokens = torch.full((count, self.length), FILLER)
        told = order.shape[1] * 2
        tokens[:, 0:told:2] = 1 + keys.gather(1, order // self.times)
        tokens[:, 1:told:2] = 1 + self.keys + shown.flatten(1).gather(1, order)
        places = told + self._places(count, self.length - told, generator)
        tokens.scatter_(1, places, 1 + keys)
        targets, stale = torch.full((2, count, self.length), IGNORED)
        targets.scatter_(1, places, values[:, :, -1])
        stale.scatter_(1, places, values[:, :, 0])
        return tokens, targets, stale

    def _order(self, count: int, generator: torch.Generator) -> Tensor:
        """Bindings, numbered pair by pair, in a random order in which those of a pair keep theirs (count, all)."""
        order = torch.rand(count, self.pairs * self.times, generator=generator).argsort(1)
        pairs = order // self.times
        turns = torch.nn.functional.one_hot(pairs, self.pairs).cumsum(1).gather(2, pairs.unsqueeze(2)) - 1
        return pairs * self.times + turns.squeeze(2)

    def _places(self, count: int, room: int, generator: torch.Generator) -> Tensor:
        """Where the pairs are asked for (count, pairs), different ones of ``room`` places."""
        chances = torch.arange(1, room + 1, dtype=torch.float64).pow(GAP_EXPONENT)
        return torch.multinomial(chances.expand(count, room), self.pairs, generator=generator)


def distinct(count: int, size: int, of: int, generator: torch.Generator) -> Tensor:
    """Rows of different numbers below ``of`` (count, size)."""
    return torch.rand(count, of, generator=generator).topk(size, dim=1).indices


def unit_keys(spread: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Vectors of norm 1 in random directions (*shape, features): normals with these deviations, normalised."""
    x = spread * torch.randn(*shape, len(spread), generator=generator)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


# Copying


def doubled(count: int, length: int, symbols: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences w 0 w 0 0 ..., with n symbols w of 1 to ``symbols``, and n from length / 4 to below (length - 1) / 2.

    Arguments:
        count: how many.
        length: symbols of a sequence; 8 or more, so that there are several n.
        symbols: how many symbols there are to copy.
        generator: of random numbers.

    Returns:
        The sequences (count, length), and n of each (count,).
    """
    if length < 8:
        raise ValueError(f"length must be 8 or more, got {length}. Fix: a longer sequence.")
    sizes = torch.randint(length // 4, (length - 1) // 2, (count,), generator=generator)
    word = torch.randint(1, symbols + 1, (count, length), generator=generator)
    place, n = torch.arange(length), sizes[:, None]
    source = torch.where(place > n, place - n - 1, place).expand(count, length)
    tokens = word.gather(1, source)
    return tokens.masked_fill((place == n) | (place > 2 * n), SEPARATOR), sizes


def is_copied(sizes: Tensor, length: int) -> Tensor:
    """Which of the symbols belong to the second w (count, length).

    Arguments:
        sizes: n of each sequence (count,).
        length: symbols of a sequence.
    """
    place, n = torch.arange(length, device=sizes.device), sizes[:, None]
    return (place > n) & (place <= 2 * n)
