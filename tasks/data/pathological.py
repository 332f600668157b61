"""Synthetic long-memory problems: long sequences whose targets depend on a few early steps.

Hochreiter and Schmidhuber, Long Short-Term Memory (1997), in the form of section 2 of the supplement of Martens and
Sutskever, Learning Recurrent Neural Networks with Hessian-Free Optimization (2011). i[a, b] denotes a random integer
between a and b, both included. The bounds need not be integers, as in T/10 with T = 55.

The supplement is unclear or wrong in four places. In this file:

- The target of the addition problem is half the sum of the numbers u at the marked positions. The supplement's formula
  has the markers v instead.
- The marked positions I and J are always different: J is drawn from the other positions of its range.
- The filler in the inputs of a memorization problem is a separate symbol, as in the targets.
- The trigger of memorization is at T + 5, as in the formula, one step before the first output. The supplement's text
  says the fifth-last step.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from tasks.common.train import Samples

TOLERANCE = 0.04  # largest error of a correct real-valued answer
SHORTEST = 10  # smallest T for which no range of positions is empty
BITS = 5  # number of bits to remember
SIZES = {"addition": (2, 1), "temporal_order": (6, 4), "memorization_5": (4, 3)}  # numbers of input and output features
PROBLEMS = tuple(SIZES)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem with a given length.

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
        """The number of input features: a number and its marker, or a one-hot encoded symbol."""
        return SIZES[self.name][0]

    @property
    def output_size(self) -> int:
        """The number of output features: a number, or a logit for each symbol."""
        return SIZES[self.name][1]

    @property
    def loss(self) -> Literal["mse", "cross_entropy"]:
        """The name of the loss, as in :class:`hbnode.optim.HessianFree`."""
        return "mse" if self.name == "addition" else "cross_entropy"

    @property
    def reads_end(self) -> bool:
        """Whether there is one output after the last step instead of one for each step."""
        return self.name != "memorization_5"

    @property
    def longest(self) -> int:
        """The number of steps of the longest sequence."""
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
            generator: random generator.

        Returns:
            Inputs, targets and the index of each last step (count,). Inputs are numbers and markers (count, steps, 2),
            zero after the last step, or symbol indices (count, steps). Targets are numbers (count, 1), symbols
            (count,), or a symbol for each step (count, steps).
        """
        if self.name == "addition":
            return self._addition(count, generator)
        if self.name == "temporal_order":
            return self._order(count, generator)
        return self._memorization(torch.randint(2, (count, BITS), generator=generator))

    def _addition(self, count: int, generator: torch.Generator) -> Samples:
        """Draw T' numbers with T' = i[T, 11T/10], and mark two of them: I = i[1, T'/10] and J = i[T'/10, T'/2]."""
        steps = between(self.length, 11 * self.length // 10, count, generator)
        first = between(1, steps // 10, count, generator)
        lowest = -(-steps // 10)
        lowest = lowest + (first == lowest)  # so that J differs from I
        second = between(lowest, steps // 2, count, generator)
        u = torch.rand(count, self.longest, generator=generator)
        u = u.masked_fill(torch.arange(self.longest) >= steps[:, None], 0.0)
        places = torch.stack([first, second], dim=1) - 1
        v = torch.zeros(u.shape).scatter(1, places, 1.0)
        return torch.stack([u, v], dim=2), u.gather(1, places).sum(1, keepdim=True) / 2, steps - 1

    def _order(self, count: int, generator: torch.Generator) -> Samples:
        """Draw symbols 2 to 5 with special symbols a and b, each 0 or 1, at two positions; the target is 2 a + b."""
        symbols = torch.randint(2, 6, (count, self.length), generator=generator)
        order = torch.zeros(count, dtype=torch.long)
        for low, high in ((1, 2), (5, 6)):  # ranges of positions, in units of T/10
            place = between(-(-low * self.length // 10), high * self.length // 10, count, generator) - 1
            special = torch.randint(2, (count,), generator=generator)
            symbols[torch.arange(count), place] = special
            order = 2 * order + special
        return symbols, order, torch.full((count,), self.length - 1)

    def _memorization(self, bits: Tensor) -> Samples:
        """Return sequences of bits, then T filler symbols with a trigger. The last targets are the bits."""
        filler = bits.new_full((len(bits), self.length + BITS), 2)
        x = torch.cat([bits, filler], dim=1)
        x[:, self.length + BITS - 1] = 3
        return x, torch.cat([filler, bits], dim=1), torch.full((len(x),), self.longest - 1)

    def encode(self, x: Tensor) -> Tensor:
        """Return the inputs as features (count, steps, input_size); symbols are one-hot encoded."""
        return x if x.is_floating_point() else torch.nn.functional.one_hot(x, self.input_size).float()

    def is_wrong(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return a mask (count,) of the sequences with wrong answers.

        A real-valued answer is wrong if its error exceeds 0.04. A memorization sequence is wrong if any remembered bit
        is wrong.

        Arguments:
            outputs: outputs of a model, (count, output_size), or (count, steps, output_size).
            targets: as :meth:`draw` returns them.
        """
        if self.loss == "mse":
            return ~((outputs - targets).abs() <= TOLERANCE)[:, 0]  # so that NaN counts as wrong
        if self.reads_end:
            return outputs.argmax(1) != targets
        return (outputs[:, -BITS:].argmax(2) != targets[:, -BITS:]).any(1)


def between(low: int | Tensor, high: int | Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw integers (count,) from low to high, both included. The bounds can be tensors (count,)."""
    low, high = (torch.as_tensor(bound).expand(count) for bound in (low, high))
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    return low + (share * (high - low + 1)).long()
