"""Associative recall: keys with values that are queried later, and sequences that repeat a word."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

FILLER = SEPARATOR = 0
IGNORED = -100  # no target, as in torch's cross-entropy
GAP_EXPONENT = -0.99  # of the probabilities of the places of queries


@dataclasses.dataclass(frozen=True)
class Bindings:
    """Sequences of bindings, each a key and its value, and then queries: each key once.

    The places of the queries follow a power law, the first places being the most likely, as in Zoology (Arora et al.,
    arXiv:2312.04927). Between the queries there is filler.

    Attributes:
        pairs: the number of bound keys.
        length: symbols of a sequence, at least 2 x pairs x times + pairs.
        keys: the number of keys to choose from; they are the symbols 1 to ``keys``.
        values: the number of values; they are the next symbols.
        times: how often each key is bound, in a random order of all bindings.
        changing: whether a key has another value each time; the answer is then the last one.
        noise: probability that a binding has a random value instead of its own.
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
        """Draw sequences, their answers, and the first values of the keys, which are wrong answers if values change.

        Arguments:
            count: the number of sequences.
            generator: of random numbers.

        Returns:
            Symbols (count, length); the value at each query, counted from 0, and -100 elsewhere (count, length); the
            first value of the key in the same form.
        """
        keys = distinct(count, self.pairs, self.keys, generator)
        if self.changing:
            values = distinct(count * self.pairs, self.times, self.values, generator).view(count, self.pairs, -1)
        else:
            values = torch.randint(self.values, (count, self.pairs, 1), generator=generator)
            values = values.expand(-1, -1, self.times)
        written = values
        if self.noise:
            wrong = torch.rand(values.shape, generator=generator) < self.noise
            written = torch.where(wrong, torch.randint(self.values, values.shape, generator=generator), values)
        order = self._order(count, generator)
        tokens = torch.full((count, self.length), FILLER)
        end = order.shape[1] * 2
        tokens[:, 0:end:2] = 1 + keys.gather(1, order // self.times)
        tokens[:, 1:end:2] = 1 + self.keys + written.flatten(1).gather(1, order)
        places = end + self._places(count, self.length - end, generator)
        tokens.scatter_(1, places, 1 + keys)
        targets, stale = torch.full((2, count, self.length), IGNORED)
        targets.scatter_(1, places, values[:, :, -1])
        stale.scatter_(1, places, values[:, :, 0])
        return tokens, targets, stale

    def _order(self, count: int, generator: torch.Generator) -> Tensor:
        """Return bindings, numbered pair by pair, in a random order that keeps those of a pair sorted (count, all)."""
        order = torch.rand(count, self.pairs * self.times, generator=generator).argsort(1)
        pairs = order // self.times
        turns = torch.nn.functional.one_hot(pairs, self.pairs).cumsum(1).gather(2, pairs.unsqueeze(2)) - 1
        return pairs * self.times + turns.squeeze(2)

    def _places(self, count: int, room: int, generator: torch.Generator) -> Tensor:
        """Return the places of the queries (count, pairs), different ones of ``room`` places."""
        chances = torch.arange(1, room + 1, dtype=torch.float64).pow(GAP_EXPONENT)
        return torch.multinomial(chances.expand(count, room), self.pairs, generator=generator)


def distinct(count: int, size: int, of: int, generator: torch.Generator) -> Tensor:
    """Return rows of different numbers below ``of`` (count, size)."""
    return torch.rand(count, of, generator=generator).topk(size, dim=1).indices


def unit_keys(spread: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random vectors of norm 1 (*shape, features): normals with these deviations, normalised."""
    x = spread * torch.randn(*shape, len(spread), generator=generator)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


# Copying


def doubled(count: int, length: int, symbols: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw sequences w 0 w 0 0 ..., with n symbols w of 1 to ``symbols``, n from length / 4 to below (length - 1) / 2.

    Arguments:
        count: the number of sequences.
        length: symbols of a sequence, at least 8, so that there are several n.
        symbols: the number of different symbols to copy.
        generator: of random numbers.

    Returns:
        The sequences (count, length), and n of each (count,).
    """
    sizes = torch.randint(length // 4, (length - 1) // 2, (count,), generator=generator)
    word = torch.randint(1, symbols + 1, (count, length), generator=generator)
    place, n = torch.arange(length), sizes[:, None]
    source = torch.where(place > n, place - n - 1, place).expand(count, length)
    tokens = word.gather(1, source)
    return tokens.masked_fill((place == n) | (place > 2 * n), SEPARATOR), sizes


def is_copied(sizes: Tensor, length: int) -> Tensor:
    """Return which symbols belong to the second w (count, length).

    Arguments:
        sizes: n of each sequence (count,).
        length: symbols of a sequence.
    """
    place, n = torch.arange(length, device=sizes.device), sizes[:, None]
    return (place > n) & (place <= 2 * n)
