"""Pathological problems: long sequences of which little matters, a long time ago.

Hochreiter and Schmidhuber, Long Short-Term Memory (1997), in the form of section 2 of the supplement of Martens and
Sutskever, Learning Recurrent Neural Networks with Hessian-Free Optimization (2011). i[a, b] is a random integer from a
to b, both included. Where a bound is no integer, as T/10 of T = 55, the integers between the bounds are meant.

Four things the supplement leaves open or has wrong are settled here:

- In the addition problem the sum is that of the numbers u at the marked places; the formula there has v, the markers.
- The marked places I and J are different: J is drawn from those of its range that are not I.
- The input that fills a memorization sequence is a symbol of its own, 3 of the five bits, as its targets are.
- The trigger of memorization is at T + 5, from the formula, one step before the first output, where the text before it
  has the fifth last step.

"Analogous", as multiplication and XOR are said to be, is taken to mean: the target is the product u_I u_J; and of bits
u_t, drawn from {0, 1}, it is u_I xor u_J.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from tasks.common.train import Samples

TOLERANCE = 0.04  # a number that is further off is wrong
SHORTEST = 10  # so that each range of places has some
MEMORIZED = {"memorization_5": (5, 2), "memorization_10": (10, 5)}  # symbols to remember, and how many there are
ORDERED = {"temporal_order": ((1, 2), (5, 6)), "temporal_order_3": ((1, 2), (3, 4), (6, 7))}  # places in T/10
PAIRS = ("addition", "multiplication", "xor")  # what is asked of two marked numbers
PROBLEMS = (*PAIRS, *ORDERED, "permutation", *MEMORIZED)
VOCABULARY = 100  # symbols of the random permutation


@dataclasses.dataclass(frozen=True)
class Problem:
    """One of the problems at one length.

    Attributes:
        name: one of :data:`PROBLEMS`.
        length: T.
    """

    name: str
    length: int

    def __post_init__(self) -> None:
        if self.name not in PROBLEMS:
            raise ValueError(f"unknown problem {self.name!r}; expected one of {', '.join(PROBLEMS)}")
        if self.length < SHORTEST:
            raise ValueError(f"length must be {SHORTEST} or more, got {self.length}. Fix: a longer sequence.")

    @property
    def input_size(self) -> int:
        """Features of a step: a number and its marker, or a symbol in its 1-of-N encoding."""
        if self.name in MEMORIZED:
            return MEMORIZED[self.name][1] + 2  # and the filler and the trigger
        return 2 if self.name in PAIRS else 6 if self.name in ORDERED else VOCABULARY

    @property
    def output_size(self) -> int:
        """Numbers of an output: one, or a score for each symbol."""
        if self.name in MEMORIZED:
            return MEMORIZED[self.name][1] + 1
        return 1 if self.name in PAIRS else 2 ** len(ORDERED[self.name]) if self.name in ORDERED else VOCABULARY

    @property
    def loss(self) -> Literal["mse", "bce", "cross_entropy"]:
        """The loss that matches the outputs, as :class:`hbnode.optim.HessianFree` names it."""
        if self.name == "xor":
            return "bce"
        return "mse" if self.name in PAIRS else "cross_entropy"

    @property
    def reads_end(self) -> bool:
        """Whether there is one output, after the last step, and not one for each."""
        return self.name in (*PAIRS, *ORDERED)

    @property
    def longest(self) -> int:
        """Steps of the longest sequence."""
        if self.name in MEMORIZED:
            return self.length + 2 * MEMORIZED[self.name][0]
        return 11 * self.length // 10 if self.name in PAIRS else self.length - (self.name == "permutation")

    def every(self) -> Samples | None:
        """All sequences there are, of five bits, of which there are 32; None of other problems."""
        if self.name != "memorization_5":
            return None
        bits = torch.cartesian_prod(*[torch.arange(2)] * 5)
        return self._memorization(bits)

    def draw(self, count: int, generator: torch.Generator) -> Samples:
        """Draw sequences.

        Arguments:
            count: how many.
            generator: of random numbers.

        Returns:
            Inputs: numbers and markers (count, steps, 2), zero after the last step, or symbols (count, steps), counted
            from 0. Targets: (count, 1) numbers or bits; (count,) symbols; or (count, steps) symbols where each step has
            one. The index of the last step (count,).
        """
        if self.name in PAIRS:
            return self._marked(count, generator)
        if self.name in ORDERED:
            return self._ordered(count, generator)
        if self.name == "permutation":
            ends = torch.randint(2, (count, 1), generator=generator)
            middle = torch.randint(2, VOCABULARY, (count, self.length - 2), generator=generator)
            symbols = torch.cat([ends, middle, ends], dim=1)
            return symbols[:, :-1], symbols[:, 1:], torch.full((count,), self.length - 2)
        recalled, symbols_known = MEMORIZED[self.name]
        return self._memorization(torch.randint(symbols_known, (count, recalled), generator=generator))

    def _marked(self, count: int, generator: torch.Generator) -> Samples:
        """Two marked numbers among many: I from i[1, T'/10], J from i[T'/10, T'/2], T' from i[T, 11T/10]."""
        steps = between(self.length, 11 * self.length // 10, count, generator)
        first = between(1, steps // 10, count, generator)
        lowest = -(-steps // 10)
        lowest = lowest + (first == lowest)  # J is not I, which reaches its range at one end only
        second = between(lowest, steps // 2, count, generator)
        shape = count, self.longest
        is_bit = self.name == "xor"
        u = torch.randint(2, shape, generator=generator).float() if is_bit else torch.rand(shape, generator=generator)
        u = u.masked_fill(torch.arange(self.longest) >= steps[:, None], 0.0)
        places = torch.stack([first, second], dim=1) - 1
        v = torch.zeros(shape).scatter(1, places, 1.0)
        a, b = u.gather(1, places).unbind(1)
        target = {"addition": (a + b) / 2, "multiplication": a * b, "xor": (a - b).abs()}[self.name]
        return torch.stack([u, v], dim=2), target[:, None], steps - 1

    def _ordered(self, count: int, generator: torch.Generator) -> Samples:
        """Special symbols 1 and 2 among others, 3 to 6; the target is their order, the first as the highest bit."""
        symbols = torch.randint(2, 6, (count, self.length), generator=generator)
        order = torch.zeros(count, dtype=torch.long)
        for low, high in ORDERED[self.name]:
            place = between(-(-low * self.length // 10), high * self.length // 10, count, generator) - 1
            special = torch.randint(2, (count,), generator=generator)
            symbols[torch.arange(count), place] = special
            order = 2 * order + special
        return symbols, order, torch.full((count,), self.length - 1)

    def _memorization(self, remembered: Tensor) -> Samples:
        """Symbols to remember, T steps of filler, one of them the trigger at the end, and what is recalled."""
        recalled, known = MEMORIZED[self.name]
        filler = remembered.new_full((len(remembered), self.length + recalled), known)
        x = torch.cat([remembered, filler], dim=1)
        x[:, self.length + recalled - 1] = known + 1
        return x, torch.cat([filler, remembered], dim=1), torch.full((len(x),), self.longest - 1)

    def encode(self, x: Tensor) -> Tensor:
        """Inputs as features (count, steps, input_size): symbols become their 1-of-N encoding."""
        return x if x.is_floating_point() else torch.nn.functional.one_hot(x, self.input_size).float()

    def is_wrong(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Which sequences are answered wrongly (count,).

        A number is wrong if it is off by more than .04, a bit if its logit has the wrong sign; of memorization a
        sequence is wrong if one of the recalled symbols is, of the random permutation if the last symbol is.

        Arguments:
            outputs: what a model makes of the inputs, (count, output_size), or (count, steps, output_size).
            targets: as :meth:`draw` returns them.
        """
        if self.loss == "mse":
            return ~((outputs - targets).abs() <= TOLERANCE)[:, 0]  # NaN is wrong
        if self.loss == "bce":
            return ((outputs > 0) != (targets > 0.5))[:, 0]
        if self.reads_end:
            return outputs.argmax(1) != targets
        asked = MEMORIZED.get(self.name, (1,))[0]
        return (outputs[:, -asked:].argmax(2) != targets[:, -asked:]).any(1)


def between(low: int | Tensor, high: int | Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Integers (count,) drawn from low to high, both included; each may have bounds of its own."""
    low, high = (torch.as_tensor(bound).expand(count) for bound in (low, high))
    share = torch.rand(count, generator=generator, dtype=torch.float64)  # below 1, and so is its product below the span
    return low + (share * (high - low + 1)).long()


TITLES = {
    "addition": "addition",
    "multiplication": "multiplication",
    "xor": "XOR",
    "temporal_order": "temporal order",
    "temporal_order_3": "3-bit temporal order",
    "permutation": "random permutation",
    "memorization_5": "5-bit memorization",
    "memorization_10": "10-symbol memorization",
}
