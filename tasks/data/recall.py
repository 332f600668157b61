"""Data for associative recall (key-value pairs with later queries) and for copying (sequences that repeat a word)."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

FILLER = SEPARATOR = 0
IGNORED = -100  # marks positions without a target, as in torch's cross-entropy
GAP_EXPONENT = -0.99  # exponent of the power law for the positions of queries


@dataclasses.dataclass(frozen=True)
class Bindings:
    """Generates sequences of key-value pairs (bindings), followed by queries that contain each key once.

    The positions of the queries follow a power law in which early positions are most likely, as in Zoology (Arora et
    al., arXiv:2312.04927). Other positions after the bindings contain a filler symbol.

    Attributes:
        pairs: number of keys in a sequence.
        length: number of symbols in a sequence, at least 2 x pairs x times + pairs.
        keys: number of different keys, which are the symbols 1 to ``keys``.
        values: number of different values, which are the next symbols.
        times: how often each key is bound. All bindings are in random order.
        changing: whether a key gets a different value each time; the answer is then the last value.
        noise: probability that a binding has a random value instead of the key's value.
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
        """Draw sequences, their answers, and the first value of each queried key (a wrong answer if values change).

        Arguments:
            count: the number of sequences.
            generator: of random numbers.

        Returns:
            Three tensors (count, length): the symbols; the index of the value at each query, and -100 elsewhere; and
            the first value of the key in the same form.
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
        """Return a random order of all bindings (count, all), in which the bindings of one key keep their order."""
        order = torch.rand(count, self.pairs * self.times, generator=generator).argsort(1)
        pairs = order // self.times
        turns = torch.nn.functional.one_hot(pairs, self.pairs).cumsum(1).gather(2, pairs.unsqueeze(2)) - 1
        return pairs * self.times + turns.squeeze(2)

    def _places(self, count: int, room: int, generator: torch.Generator) -> Tensor:
        """Return the positions of the queries, (count, pairs), as different integers below ``room``."""
        chances = torch.arange(1, room + 1, dtype=torch.float64).pow(GAP_EXPONENT)
        return torch.multinomial(chances.expand(count, room), self.pairs, generator=generator)


def distinct(count: int, size: int, of: int, generator: torch.Generator) -> Tensor:
    """Return a tensor (count, size) whose rows contain different random integers below ``of``."""
    return torch.rand(count, of, generator=generator).topk(size, dim=1).indices


def unit_keys(spread: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return normalised Gaussian vectors (*shape, features); ``spread`` has the standard deviations before."""
    x = spread * torch.randn(*shape, len(spread), generator=generator)
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


# Copying


def doubled(count: int, length: int, symbols: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw sequences of a word w of n symbols, a 0, the word w again, and zeros to the end.

    The symbols are from 1 to ``symbols``, and n is at least length / 4 and below (length - 1) / 2.

    Arguments:
        count: the number of sequences.
        length: number of symbols in a sequence, at least 8, so that n can vary.
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
    """Return a mask (count, length) of the symbols that belong to the second w.

    Arguments:
        sizes: n of each sequence (count,).
        length: number of symbols in a sequence.
    """
    place, n = torch.arange(length, device=sizes.device), sizes[:, None]
    return (place > n) & (place <= 2 * n)
