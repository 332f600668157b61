"""A batch of sequences in the form that recurrent layers need: time first, padded, the longest sequence first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from hbnode._checks import tensor_fix


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """A checked batch.

    Attributes:
        x: inputs (T, batch, input_size), zero on padding.
        packed: the input, if it was packed.
        is_single: whether the input was one sequence without a batch axis.
        batch_first: whether the batch axis of the input came first.
        valid: which samples are not padding (T, batch), of a packed batch.
    """

    x: Tensor
    packed: PackedSequence | None = None
    is_single: bool = False
    batch_first: bool = False
    valid: Tensor | None = None

    @classmethod
    def read(cls, x: Tensor | PackedSequence, input_size: int, batch_first: bool) -> SequenceBatch:
        """Check the inputs of a layer."""
        packed = x if isinstance(x, PackedSequence) else None
        values = x.data if isinstance(x, PackedSequence) else x
        if not isinstance(values, Tensor) or not values.is_floating_point():
            got, fix = (values.dtype, "x.float()") if isinstance(values, Tensor) else (type(x).__name__, tensor_fix(x))
            raise TypeError(f"x must be a floating-point tensor or a PackedSequence, got {got}. Fix: {fix}.")
        shape = tuple(values.shape)
        dims = (2,) if packed else (2, 3)
        time = 1 if batch_first and len(shape) == 3 else 0
        if values.dim() not in dims or shape[-1] != input_size or shape[time] == 0:
            axes = "(batch, T, input_size)" if batch_first else "(T, batch, input_size)"
            axes = "a PackedSequence of samples (input_size,)" if packed else f"{axes} or (T, input_size)"
            raise ValueError(
                f"x must be {axes} with input_size={input_size} and at least one sample, got {shape}. "
                "Fix: x.unsqueeze(-1) if a sample is one number, or another input_size."
            )
        if packed:
            padded, lengths = pad_packed_sequence(packed._replace(sorted_indices=None, unsorted_indices=None))
            valid = torch.arange(len(padded), device=lengths.device).unsqueeze(1) < lengths
            return cls(padded, packed, valid=valid.to(padded.device))
        if values.dim() == 2:
            return cls(values.unsqueeze(1), is_single=True)
        return cls(values.transpose(0, 1) if batch_first else values, batch_first=batch_first)

    @property
    def sizes(self) -> Tensor | None:
        """Number of sequences at each time, of a packed batch, on the CPU."""
        return self.packed.batch_sizes if self.packed else None

    @property
    def lengths(self) -> Tensor:
        """Number of samples of each sequence, (batch,)."""
        if self.valid is None:
            return torch.full(self.x.shape[1:2], self.x.shape[0], device=self.x.device)
        return self.valid.sum(0)

    def select(self, y: Tensor) -> Tensor:
        """The samples (T, batch, n) that are not padding, as a PackedSequence has them, (N, n)."""
        return y[self.valid]

    def pad(self, y: Tensor) -> Tensor:
        """The inverse of :meth:`select`."""
        assert self.valid is not None
        return y.new_zeros(*self.valid.shape, y.shape[-1]).index_put((self.valid,), y)

    def reverse(self, y: Tensor) -> Tensor:
        """Each sequence backwards, (T, batch, n); padding stays at the end."""
        if self.valid is None:
            return y.flip(0)
        steps = torch.arange(len(y), device=y.device).unsqueeze(1)
        at = torch.where(self.valid, self.lengths - 1 - steps, steps)
        return y.gather(0, at.unsqueeze(-1).expand_as(y))

    def last(self, y: Tensor) -> Tensor:
        """The last sample of each sequence, (T, batch, n) -> (batch, n)."""
        if self.valid is None:
            return y[-1]
        at = (self.lengths - 1).view(1, -1, 1)
        return y.gather(0, at.expand(1, -1, y.shape[-1])).squeeze(0)

    def segments(self) -> Iterator[tuple[slice, int]]:
        """Intervals of time in which no sequence ends, and the number of sequences in each."""
        if self.sizes is None:
            yield slice(0, len(self.x)), self.x.shape[1]
            return
        sizes, start = self.sizes.tolist(), 0
        for stop in range(1, len(sizes) + 1):
            if stop == len(sizes) or sizes[stop] != sizes[start]:
                yield slice(start, stop), sizes[start]
                start = stop

    def output(self, y: Tensor) -> Tensor | PackedSequence:
        """The output (T, batch, n) in the form of the input."""
        if self.packed:
            return self.packed._replace(data=self.select(y))
        if self.is_single:
            return y.squeeze(1)
        return y.transpose(0, 1) if self.batch_first else y

    def sort(self, z: Tensor, axis: int) -> Tensor:
        """Bring a state into the order of this batch."""
        z = z.unsqueeze(axis) if self.is_single else z
        order = self.packed.sorted_indices if self.packed else None
        return z if order is None else z.index_select(axis, order)

    def unsort(self, z: Tensor, axis: int) -> Tensor:
        """The inverse of :meth:`sort`."""
        order = self.packed.unsorted_indices if self.packed else None
        z = z if order is None else z.index_select(axis, order)
        return z.squeeze(axis) if self.is_single else z
