"""The chunked delta rule for packed sequences, and its custom operators for torch.compile and torch.export.

Packed sequences are concatenated along the length, in a batch of 1. This tensor is called the packed row. To process
it, its sequences are divided into groups of similar lengths, and each group is padded to a batch. No sequence is
shorter than half of the longest sequence of its group, so padding at most doubles the number of steps. A padded step
has zeros in all tensors (log α = log μ = 0, s = η = 0) and leaves the state unchanged.

In graphs, the forward and the backward pass are custom operators, which are not traced. Tracing would unroll the loop
over chunks, and the graph would be valid for one number of chunks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hbnode._torch import operator_form, plain
from hbnode.nn._delta_rule import Outputs, forward, reference, residual_shapes, vjp

Tensors = Sequence[Tensor | None]
# a function of two lists, of tensors with an entry per step and of tensors with an entry per sequence (states). It
# returns two such lists.
Run = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]

_STEP_TENSORS = 7  # number of tensors with an entry per step: q, k, v, log μ, log α, s, η


class _Group(NamedTuple):
    """A group of g packed sequences of similar lengths, which is padded to a batch with L steps."""

    sequences: Tensor  # indices of the sequences (g,)
    steps: Tensor  # index of each step in the packed row (g, L)
    is_padding: Tensor  # whether a step is padding (g, L)

    def pad(self, x: Tensor) -> Tensor:
        """Take the g sequences of this group out of the packed row x (1, heads, length, ...).

        Return them as a tensor (g, heads, L, ...), in which each sequence is padded with zeros to length L.
        """
        x = x.squeeze(0).index_select(1, self.steps.flatten()).unflatten(1, self.steps.shape).transpose(0, 1)
        is_padding = self.is_padding.unsqueeze(1)
        return x.masked_fill(is_padding.unsqueeze(-1) if x.dim() == 4 else is_padding, 0.0)


class _Packing:
    """The groups of packed sequences, and the indices that put the results of all groups back into one row."""

    def __init__(self, cu_seqlens: Tensor, length: int, device: torch.device) -> None:
        ends = plain(cu_seqlens).tolist()
        lengths = [end - start for start, end in pairwise(ends)]
        if ends[0] != 0 or ends[-1] != length or min(lengths, default=0) < 0:
            raise ValueError(
                f"cu_seqlens must rise from 0 to the length {length}, got {str(ends)[:60]}. Fix: torch.nn.functional."
                "pad(lengths.cumsum(0), (1, 0)), where lengths are those of the sequences."
            )
        members: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if not members or 2 * max(lengths[i], 1) < lengths[members[-1][0]]:
                members.append([])
            members[-1].append(i)
        self.groups, start = [], 0
        with torch.device("cpu"):  # the user's default device may be another one
            places = torch.empty(length, dtype=torch.int64)
            for group in members:
                within = torch.arange(max(lengths[group[0]], 1))
                steps = torch.tensor([ends[i] for i in group])[:, None] + within
                is_padding = within >= torch.tensor([lengths[i] for i in group])[:, None]
                places[steps[~is_padding]] = (start + torch.arange(steps.numel())).view_as(steps)[~is_padding]
                start += steps.numel()
                found = torch.tensor(group), steps.clamp(max=length - 1), is_padding
                self.groups.append(_Group(*(x.to(device) for x in found)))
            order = torch.tensor([i for group in members for i in group])
        self.places, self.order = places.to(device), order.argsort().to(device)

    def join(self, parts: Sequence[Any]) -> Tensor | None:
        """Put the sequences of all groups back into one packed row (1, heads, length, ...), without their padding.

        ``parts`` holds a tensor (g, heads, L, ...) for each group.
        """
        if parts[0] is None:
            return None
        return torch.cat([x.transpose(0, 1).flatten(1, 2) for x in parts], 1).index_select(1, self.places).unsqueeze(0)

    def join_states(self, parts: Sequence[Any]) -> Tensor | None:
        return None if parts[0] is None else torch.cat(list(parts)).index_select(0, self.order)


def over_sequences(run: Run, cu_seqlens: Tensor | None, steps: Tensors, states: Tensors) -> tuple[Tensors, Tensors]:
    """Return ``run(steps, states)``; for packed sequences, call ``run`` on each padded group and join the results.

    ``steps`` is a list of tensors with an entry for each step, such as keys. ``states`` is a list of tensors with an
    entry for each sequence. Packed sequences are those with a ``cu_seqlens`` that is not None.
    """
    if cu_seqlens is None:
        return run(steps, states)
    assert steps[0] is not None
    packing = _Packing(cu_seqlens, steps[0].shape[2], steps[0].device)
    found = [
        run(
            [None if x is None else group.pad(x) for x in steps],
            [None if x is None else x.index_select(0, group.sequences) for x in states],
        )
        for group in packing.groups
    ]
    return (
        [packing.join(parts) for parts in zip(*(each[0] for each in found), strict=True)],
        [packing.join_states(parts) for parts in zip(*(each[1] for each in found), strict=True)],
    )


def by_group(run: Callable[..., Outputs], options: Any, cu_seqlens: Tensor | None, *tensors: Tensor | None) -> Outputs:
    """Call ``run(options, *tensors)`` on each padded group of the packed sequences, and join the results.

    ``tensors`` are those that :func:`hbnode.nn._delta_rule.reference` takes. Return the outputs of all steps as a
    packed row, and the final states S and P of each sequence.
    """

    def run_group(steps: Tensors, states: Tensors) -> tuple[Tensors, Tensors]:
        out, *after = run(options, *steps, *states)
        return [out], after

    (out,), (s, p) = over_sequences(run_group, cu_seqlens, tensors[:_STEP_TENSORS], tensors[_STEP_TENSORS:])
    assert out is not None
    assert s is not None
    return out, s, p


def _run(options: Any, keep: bool, *rest: Any) -> tuple[Any, list[Tensor]]:
    *tensors, cu_seqlens = rest
    residuals: list[Tensor] = []
    if cu_seqlens is None:
        (out, s, p), residuals = forward(options, keep, *tensors)
    else:
        out, s, p = by_group(lambda options, *x: forward(options, False, *x)[0], options, cu_seqlens, *tensors)
    residuals += [s.new_empty(0) for _ in range(2 - len(residuals))]
    return (out, s, s.new_empty(0) if p is None else p.clone()), residuals  # S and P may share memory


def _fake_run(options: Any, keep: bool, *rest: Any) -> tuple[Any, list[Tensor]]:
    q, _, v, *_, s, p, cu_seqlens = rest
    shapes: list[Any] = residual_shapes(options, q, v, p is not None) if keep and cu_seqlens is None else []
    shapes += [0] * (2 - len(shapes))
    dtype = torch.promote_types(q.dtype, v.dtype)
    out = torch.empty_like(v, dtype=dtype) if cu_seqlens is None else v.new_empty(v.shape, dtype=dtype)
    found = out, s.new_empty(s.shape), s.new_empty(0 if p is None else p.shape)
    return found, [s.new_empty(shape) for shape in shapes]


def _run_vjp(
    options: Any, rest: Sequence[Any], residuals: Sequence[Tensor], grads: Sequence[Any], needed: Sequence[bool]
) -> list[Tensor | None]:
    (*tensors, cu_seqlens), (dout, ds, dp) = rest, grads

    def run_group(steps: Tensors, grouped: Tensors) -> tuple[Tensors, Tensors]:
        *steps, dout = steps
        given, grads, kept = [*steps, *grouped[:2]], [dout, *grouped[2:]], residuals
        if not kept[0].numel():
            kept = forward(options, True, *given)[1]  # type: ignore[arg-type]
        found = vjp(options, given, kept, grads, needed)
        return found[:_STEP_TENSORS], found[_STEP_TENSORS:]

    given = [*tensors[_STEP_TENSORS:], ds, None if tensors[-1] is None else dp]
    found = over_sequences(run_group, cu_seqlens, [*tensors[:_STEP_TENSORS], dout], given)
    every = [grad for part in found for grad in part]
    return [None if x is None else x.clone(memory_format=torch.contiguous_format) for x in every] + [None]


_operator = operator_form(
    "heavy_ball_memory",
    "str delta, int chunk_size, ",
    "Tensor q, Tensor k, Tensor v, Tensor? log_momentum, Tensor? log_decay, Tensor? step, Tensor? write, Tensor s, "
    "Tensor? p, Tensor? cu_seqlens",
    (3, 2),
    _run,
    _fake_run,
    _run_vjp,
    lambda options, *rest: by_group(reference, options, rest[-1], *rest[:-1]),
)


def compiled(options: tuple[Any, int], cu_seqlens: Tensor | None, *tensors: Any) -> Outputs:
    """Compute the chunked delta rule by a custom operator, which torch.compile and torch.export record as one call.

    ``cu_seqlens`` is None if sequences are not packed. Return the outputs, and the final states S and P.
    """
    out, s, p = _operator((options[0] or "", options[1]), *tensors, cu_seqlens)
    return out, s, None if tensors[-1] is None else p
