"""Pathological problems: long sequences in which a few early steps matter.

Hochreiter and Schmidhuber, Long Short-Term Memory (1997), in the form of section 2 of the supplement of Martens and
Sutskever, Learning Recurrent Neural Networks with Hessian-Free Optimization (2011). i[a, b] is a random integer from a
to b, both included. If a bound is no integer, as T/10 of T = 55, these are the integers between the bounds.

The supplement leaves four things open or has them wrong. Here:

- The sum of the addition problem is that of the numbers u at the marked places; the formula there has v, the markers.
- The marked places I and J are different: J is drawn from the places of its range other than I.
- The input that fills a memorization sequence is a symbol of its own, as in its targets.
- The trigger of memorization is at T + 5, as in the formula, one step before the first output. The text has the fifth
  last step.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from tasks.common.train import Samples

TOLERANCE = 0.04  # the largest error of a right number
SHORTEST = 10  # the least T, so that no range of places is empty
BITS = 5  # to remember
SIZES = {"addition": (2, 1), "temporal_order": (6, 4), "memorization_5": (4, 3)}  # features of inputs and outputs
PROBLEMS = tuple(SIZES)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem at one length.

    Attributes:
        name: one of :data:`PROBLEMS`.
        length: T.
    """

    name: str
    length: int

    def __post_init__(self) -> None:
        if self.length < SHORTEST:
            raise ValueError(f"length must be {SHORTEST} or more, got {self.length}. Fix: a longer sequence.")

    @property
    def input_size(self) -> int:
        """Features of a step: a number and its marker, or a symbol in its 1-of-N encoding."""
        return SIZES[self.name][0]

    @property
    def output_size(self) -> int:
        """Features of an output: a number, or a score for each symbol."""
        return SIZES[self.name][1]

    @property
    def loss(self) -> Literal["mse", "cross_entropy"]:
        """The loss of the outputs, as :class:`hbnode.optim.HessianFree` names it."""
        return "mse" if self.name == "addition" else "cross_entropy"

    @property
    def reads_end(self) -> bool:
        """Whether there is one output after the last step instead of one for each step."""
        return self.name != "memorization_5"

    @property
    def longest(self) -> int:
        """Steps of the longest sequence."""
        lengths = {"addition": 11 * self.length // 10, "memorization_5": self.length + 2 * BITS}
        return lengths.get(self.name, self.length)

    def every(self) -> Samples | None:
        """Return all 32 sequences of memorization; None for other problems."""
        bits = torch.cartesian_prod(*[torch.arange(2)] * BITS)
        return self._memorization(bits) if self.name == "memorization_5" else None

    def draw(self, count: int, generator: torch.Generator) -> Samples:
        """Draw sequences.

        Arguments:
            count: the number of sequences.
            generator: of random numbers.

        Returns:
            Inputs: numbers and markers (count, steps, 2), zero after the last step, or symbols (count, steps), counted
            from 0. Targets: numbers (count, 1), symbols (count,), or symbols of each step (count, steps). The index of
            the last step (count,).
        """
        if self.name == "addition":
            return self._addition(count, generator)
        if self.name == "temporal_order":
            return self._order(count, generator)
        return self._memorization(torch.randint(2, (count, BITS), generator=generator))

    def _addition(self, count: int, generator: torch.Generator) -> Samples:
        """Return T' numbers, T' from i[T, 11T/10]; marked are I from i[1, T'/10] and J from i[T'/10, T'/2]."""
        steps = between(self.length, 11 * self.length // 10, count, generator)
        first = between(1, steps // 10, count, generator)
        lowest = -(-steps // 10)
        lowest = lowest + (first == lowest)  # J is not I
        second = between(lowest, steps // 2, count, generator)
        u = torch.rand(count, self.longest, generator=generator)
        u = u.masked_fill(torch.arange(self.longest) >= steps[:, None], 0.0)
        places = torch.stack([first, second], dim=1) - 1
        v = torch.zeros(u.shape).scatter(1, places, 1.0)
        return torch.stack([u, v], dim=2), u.gather(1, places).sum(1, keepdim=True) / 2, steps - 1

    def _order(self, count: int, generator: torch.Generator) -> Samples:
        """Two special symbols, each 1 or 2, among others, 3 to 6; the target is their order, the first one times 2."""
        symbols = torch.randint(2, 6, (count, self.length), generator=generator)
        order = torch.zeros(count, dtype=torch.long)
        for low, high in ((1, 2), (5, 6)):  # places in T/10
            place = between(-(-low * self.length // 10), high * self.length // 10, count, generator) - 1
            special = torch.randint(2, (count,), generator=generator)
            symbols[torch.arange(count), place] = special
            order = 2 * order + special
        return symbols, order, torch.full((count,), self.length - 1)

    def _memorization(self, bits: Tensor) -> Samples:
        """Bits to remember, T steps of filler with a trigger, and the bits as the last targets."""
        filler = bits.new_full((len(bits), self.length + BITS), 2)
        x = torch.cat([bits, filler], dim=1)
        x[:, self.length + BITS - 1] = 3
        return x, torch.cat([filler, bits], dim=1), torch.full((len(x),), self.longest - 1)

    def encode(self, x: Tensor) -> Tensor:
        """Return inputs as features (count, steps, input_size); symbols in their 1-of-N encoding."""
        return x if x.is_floating_point() else torch.nn.functional.one_hot(x, self.input_size).float()

    def is_wrong(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return which sequences are answered wrongly (count,).

        A number is wrong if its error is more than .04. A memorization sequence is wrong if one of the remembered bits
        is.

        Arguments:
            outputs: outputs of a model, (count, output_size), or (count, steps, output_size).
            targets: as :meth:`draw` returns them.
        """
        if self.loss == "mse":
            return ~((outputs - targets).abs() <= TOLERANCE)[:, 0]  # NaN is wrong
        if self.reads_end:
            return outputs.argmax(1) != targets
        return (outputs[:, -BITS:].argmax(2) != targets[:, -BITS:]).any(1)


def between(low: int | Tensor, high: int | Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return integers (count,) drawn from low to high, both included; each can have its own bounds."""
    low, high = (torch.as_tensor(bound).expand(count) for bound in (low, high))
    share = torch.rand(count, generator=generator, dtype=torch.float64)  # below 1, and so is its product below the span
    return low + (share * (high - low + 1)).long()
