"""What keys, values and the state before a chunk weigh in linear attention with momentum.

Row r of a chunk of C keys sees its c-th key with the weight W[r, c], and what came before the chunk through the state
(S, P, z). With φ applied to Q and K, g(n) = γ (1 + β + ... + β^{n-1}) and n_r the number of keys up to row r of the
chunk that are not ignored, which is r + 1 without a mask,

    W[r, c] = g(n_r - n_c + 1) for c <= r
    numerator = (Q Kᵀ ∘ W) V + Q S + β g(n_r) Q P
    denominator = rows of the lower triangle of Q Kᵀ, summed, + Q z + ε
    S' = S + β g(n) P + Kᵀ diag(g(n - n_c + 1)) V
    P' = β^n P + Kᵀ diag(β^{n - n_c}) V
    z' = z + the sum of K,    n = n_{C-1}.

All weights are positive, so nothing cancels where β is near 1.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST_KEPT = 256  # size of chunks whose weights are kept from call to call


class MomentumAttentionState(NamedTuple):
    """All that is needed to continue a sequence exactly, in float32 or wider.

    Attributes:
        s: sum of the writes with their weights (batch, heads, dim, value_dim).
        p: momentum, the last write and the earlier ones decayed (batch, heads, dim, value_dim).
        z: sum of φ(k) (batch, heads, dim).
    """

    s: Tensor
    p: Tensor
    z: Tensor

    def detach(self) -> MomentumAttentionState:
        """The same without its history, for truncated backpropagation."""
        return MomentumAttentionState(self.s.detach(), self.p.detach(), self.z.detach())


Rate = float | Tensor
"""β or γ: a number, or a tensor () or (heads,)."""


class Tables(NamedTuple):
    """Weights by the number of keys n = 0, ..., C, each (heads, C + 1), or (1, C + 1) for rates that are numbers."""

    gain: Tensor  # g(n)
    carry: Tensor  # β g(n)
    decay: Tensor  # β^n


class Weights(NamedTuple):
    """Weights of chunks, with the axes of heads, or of the batch and heads, in front."""

    within: Tensor  # W (..., C, C)
    read: Tensor  # β g(n_r) (..., C, 1)
    gain: Tensor  # g(n - n_c + 1) (..., C, 1)
    decay: Tensor  # β^{n - n_c} (..., C, 1)
    carry: Tensor  # β g(n) (..., 1, 1)
    rest: Tensor  # β^n (..., 1, 1)
    seen: Tensor  # 1 for c <= r, else 0 (1, C, C)


def feature_map(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1, to full relative precision where x is negative."""
    return torch.where(x > 0, 0.0, x).exp() + x.relu()  # torch's versions differ in the slope of clamp at 0


def has_momentum(momentum: Rate) -> bool:
    """Whether P is needed: it is not where β is the number 0."""
    return isinstance(momentum, Tensor) or momentum != 0


def powers(momentum: Rate, exponents: Tensor) -> Tensor:
    """β^n, (heads, ...) or (1, ...) of whole n >= 0 (...), in float64 where the device has it.

    What is added to a β that may be learned is far below its precision. It keeps 0 * 0^{-2} out of derivatives at 0.
    """
    n = exponents.to(torch.float32 if exponents.device.type == "mps" else torch.float64)
    if not isinstance(momentum, Tensor):
        return torch.pow(momentum, n).unsqueeze(0)
    beta = momentum.to(n.dtype).reshape(-1, *[1] * n.dim())
    return (beta + torch.finfo(n.dtype).tiny ** 0.3) ** n


def make_tables(momentum: Rate, step_size: Rate, size: int, device: torch.device, dtype: torch.dtype) -> Tables:
    """Tables for up to ``size`` keys, as sums of positive terms, which are exact for any β."""
    decay = powers(momentum, torch.arange(size + 1, device=device))
    beta, gamma = (r.to(decay.dtype).reshape(-1, 1) if isinstance(r, Tensor) else r for r in (momentum, step_size))
    gain = gamma * pad(decay.cumsum(1)[:, :-1], (1, 0))
    gain, carry, decay = (table.to(dtype) for table in (gain, beta * gain, decay.expand_as(gain)))
    return Tables(gain, carry, decay)


def weigh(tables: Tables, counts: Tensor, has_batch: bool) -> Weights:
    """The weights of chunks.

    Arguments:
        tables: of the rates.
        counts: n_r (..., C).
        has_batch: whether the first axis of ``counts`` is that of the batch.
    """
    later = counts.unsqueeze(-1) - counts.unsqueeze(-2) + 1
    return Weights(
        look_up(tables.gain, later.clamp(min=0), has_batch).tril(),
        look_up(tables.carry, counts, has_batch).unsqueeze(-1),
        *weigh_writes(tables, counts, has_batch),
        tables.gain.new_ones(1, counts.shape[-1], counts.shape[-1]).tril(),
    )


def weigh_writes(tables: Tables, counts: Tensor, has_batch: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of these the weights of keys and of S and P: g(n - n_c + 1), β^{n - n_c}, β g(n) and β^n."""
    last = counts[..., -1:]
    pairs = (
        (tables.gain, last - counts + 1),
        (tables.decay, last - counts),
        (tables.carry, last),
        (tables.decay, last),
    )
    gain, decay, carry, rest = (look_up(table, n, has_batch).unsqueeze(-1) for table, n in pairs)
    return gain, decay, carry, rest


def look_up(table: Tensor, index: Tensor, has_batch: bool) -> Tensor:
    """The entries of a table (heads, n) at (...), (heads, ...), or at (batch, ...), (batch, heads, ...)."""
    found = table[:, index]
    return found.movedim(1, 0) if has_batch else found


@dataclasses.dataclass(eq=False)
class Block:
    """Weights of the chunks of a block of :mod:`hbnode.nn.attention.momentum_loop`."""

    weights: Weights  # (batch * heads * chunks, ., .), or (1, ., .) if all are the same
    reads: Tensor | None  # of Q in Q̃ (., C, 2 dim); None without P
    writes: Tensor  # of K in K̃ (., C, 2 dim), or (., C, 1)
    carries: Sequence[Tensor]  # T of each chunk (batch * heads, 2, 2)
    gradients: list[Tensor | None] = dataclasses.field(default_factory=list)  # of the weights

    @classmethod
    def of(cls, weights: Weights, shape: tuple[int, int, int], has_p: bool) -> Block:
        """From the weights, and the numbers of heads of all sequences, of chunks and of features of a key."""
        rows, chunks, dim = shape
        if not has_p:
            return cls(weights, None, weights.gain, [weights.carry] * chunks)
        pairs = (torch.ones_like(weights.read), weights.read), (weights.gain, weights.decay)
        reads, writes = (torch.cat([x.expand(-1, -1, dim) for x in pair], -1) for pair in pairs)
        one, zero = torch.ones_like(weights.rest), torch.zeros_like(weights.rest)
        carry = torch.cat([torch.cat([one, weights.carry], -1), torch.cat([zero, weights.rest], -1)], -2)
        return cls(weights, reads, writes, carry.expand(rows * chunks, 2, 2).unflatten(0, (rows, chunks)).unbind(1))

    def to_read(self, rows: Tensor) -> Tensor:
        """Q̃."""
        return rows if self.reads is None else torch.cat([rows, rows], -1).mul_(self.reads)

    def to_write(self, keys: Tensor) -> Tensor:
        """K̃."""
        return keys * self.writes if self.reads is None else torch.cat([keys, keys], -1).mul_(self.writes)

    def from_reads(self, gradient: Tensor) -> Tensor:
        """The gradient of Q from that of Q̃."""
        if self.reads is None:
            return gradient.clone()
        own, carried = gradient.chunk(2, -1)
        return torch.addcmul(own, carried, self.weights.read)

    def from_writes(self, gradient: Tensor) -> Tensor:
        """The gradient of K from that of K̃."""
        if self.reads is None:
            return gradient * self.writes
        own, carried = gradient.chunk(2, -1)
        return (own * self.weights.gain).addcmul_(carried, self.weights.decay)

    def add(self, *gradients: Tensor | None) -> None:
        """Add to the gradients of the weights."""
        new = (g if g is None else g.sum_to_size(w.shape) for w, g in zip(self.weights, gradients, strict=False))
        self.gradients = [g if s is None or g is None else g + s for s, g in zip_longest(self.gradients, new)]

    def pass_on(self) -> None:
        """The gradients of the weights become those of the rates."""
        pairs = [
            (w, g) for w, g in zip(self.weights, self.gradients, strict=False) if g is not None and w.requires_grad
        ]
        torch.autograd.backward([w for w, _ in pairs], [g for _, g in pairs], retain_graph=True)
        self.gradients = []


class BlockWeights:
    """The weights of blocks, and the gradients of β and γ where these are learned.

    Arguments:
        rates: β and γ.
        size: C.
        dtype: of the weights.
        learned: whether to find the gradient of β and that of γ.
    """

    def __init__(
        self, rates: tuple[Rate, Rate], size: int, dtype: torch.dtype, learned: tuple[bool, ...] = (False, False)
    ) -> None:
        self.size, self.dtype, self.learned = size, dtype, learned
        self.rates = [
            rate.detach().requires_grad_(is_learned) if isinstance(rate, Tensor) else rate
            for rate, is_learned in zip(rates, learned, strict=True)
        ]
        self.shared: dict[tuple[int, ...], Block] = {}

    @functools.cached_property
    def tables(self) -> Tables:
        """The tables of the rates, in the graph if these are learned."""
        with torch.set_grad_enabled(any(self.learned)):
            return make_tables(self.rates[0], self.rates[1], self.size, torch.device("cpu"), self.dtype)

    def __call__(self, part: Tensor, ignored: Tensor | None) -> Block:
        """For the queries of a block and its ignored keys (batch, length), or None: blocks of a shape share theirs."""
        shape = tuple(part.shape)
        if ignored is not None:
            return self.make(shape, (~ignored).unflatten(1, (-1, min(self.size, shape[2]))).cumsum(-1))
        if self.size <= LARGEST_KEPT and not any(isinstance(rate, Tensor) for rate in self.rates):
            return _constant((self.rates[0], self.rates[1]), self.size, self.dtype, shape)
        if shape not in self.shared:
            self.shared[shape] = self.make(shape)
        return self.shared[shape]

    def make(self, shape: tuple[int, ...], counts: Tensor | None = None) -> Block:
        """For queries (batch, heads, length, dim) and n_r (batch, chunks, C), None if no key is ignored."""
        (batch, heads, length, dim), size = shape, min(self.size, shape[2])
        of_all = torch.arange(1, size + 1, device="cpu") if counts is None else counts
        with torch.set_grad_enabled(any(self.learned)):
            weights = weigh(self.tables, of_all, has_batch=counts is not None)
            weights = Weights(*(_of_rows(x, (batch, heads, length // size)) for x in weights))
        return Block.of(weights, (batch * heads, length // size, dim), has_momentum(self.rates[0]))

    def learn(self, block: Block, *gradients: Tensor | None) -> None:
        """Add gradients of the weights of a block."""
        block.add(*gradients)
        if block not in self.shared.values():  # it is not called again
            block.pass_on()

    def gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of β and γ; None where they are not learned."""
        if any(self.learned):
            for block in self.shared.values():
                block.pass_on()
        return tuple(rate.grad if isinstance(rate, Tensor) else None for rate in self.rates)


@functools.lru_cache(maxsize=64)
def _constant(rates: tuple[Rate, Rate], size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Block:
    """For rates that are numbers; kept for other calls."""
    with torch.inference_mode(False), torch.no_grad():
        return BlockWeights(rates, size, dtype).make(shape)


def _of_rows(weights: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """From (heads, ., .) or (batch, heads, chunks, ., .) to (batch * heads * chunks, ., .); one matrix remains one."""
    if weights.shape[:-2].numel() > 1:
        weights = (weights.unsqueeze(1) if weights.dim() == 3 else weights).expand(*shape, -1, -1)
    return weights.flatten(0, -3)
