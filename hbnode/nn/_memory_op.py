"""The chunked delta rule of packed sequences, and as an operator for torch.compile and torch.export.

Packed sequences lie one after another in one row. They are divided into groups of similar lengths, and each group is
padded to a batch: no sequence is shorter than half of the longest of its group, so padding at most doubles the steps.
A padded step has zeros in all tensors (log α = log μ = 0, s = η = 0), and changes nothing.

For graphs, the forward and the backward pass are custom operators, which are not traced. Tracing would unroll the loop
over chunks, and the graph would hold for one number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hbnode._torch import no_autocast, plain, reference_vjp
from hbnode.nn._delta_rule import Outputs, forward, reference, residual_shapes, vjp

Tensors = Sequence[Tensor | None]
Run = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]  # maps tensors of steps and of states to such tensors

_STEP_TENSORS = 7  # tensors of steps: q, k, v, log μ, log α, s, η
_TENSOR_COUNT = 9  # these, and S and P


class _Group(NamedTuple):
    """Sequences of similar lengths, as a padded batch of g sequences with L steps."""

    sequences: Tensor  # (g,)
    steps: Tensor  # places of the steps in the row (g, L)
    is_padding: Tensor  # (g, L)

    def pad(self, x: Tensor) -> Tensor:
        """Select the sequences of a row (1, heads, length, ...), giving (g, heads, L, ...) padded with zeros."""
        x = x.squeeze(0).index_select(1, self.steps.flatten()).unflatten(1, self.steps.shape).transpose(0, 1)
        is_padding = self.is_padding.unsqueeze(1)
        return x.masked_fill(is_padding.unsqueeze(-1) if x.dim() == 4 else is_padding, 0.0)


class _Packing:
    """The groups of packed sequences, with the indices that map groups back to the row."""

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
        with torch.device("cpu"):  # whatever the default is
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
        """Join the groups (g, heads, L, ...) to the row (1, heads, length, ...)."""
        if parts[0] is None:
            return None
        return torch.cat([x.transpose(0, 1).flatten(1, 2) for x in parts], 1).index_select(1, self.places).unsqueeze(0)

    def join_states(self, parts: Sequence[Any]) -> Tensor | None:
        return None if parts[0] is None else torch.cat(list(parts)).index_select(0, self.order)


def over_sequences(run: Run, cu_seqlens: Tensor | None, steps: Tensors, states: Tensors) -> tuple[Tensors, Tensors]:
    """Call ``run`` with tensors of steps and of states, or with those of each group of packed sequences."""
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


def packed(run: Callable[..., Outputs], options: Any, cu_seqlens: Tensor | None, *tensors: Tensor | None) -> Outputs:
    """Return outputs, S and P of ``run(options, *tensors)`` for each of the packed sequences."""

    def run_group(steps: Tensors, states: Tensors) -> tuple[Tensors, Tensors]:
        out, *after = run(options, *steps, *states)
        return [out], after

    (out,), (s, p) = over_sequences(run_group, cu_seqlens, tensors[:_STEP_TENSORS], tensors[_STEP_TENSORS:])
    assert out is not None
    assert s is not None
    return out, s, p


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_momentum, Tensor? log_decay, Tensor? step, Tensor? write, Tensor s, "
    "Tensor? p, Tensor? cu_seqlens"
)


@torch.library.custom_op(
    "hbnode::heavy_ball_memory",
    mutates_args=(),
    schema=f"(str delta, int chunk_size, bool keep, {_TENSORS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward_op(delta: str, chunk_size: int, keep: bool, *rest: Any) -> tuple[Tensor, ...]:
    *tensors, cu_seqlens = rest
    options = (delta, chunk_size)
    residuals: list[Tensor] = []
    with no_autocast(tensors[0]):
        if cu_seqlens is None:
            (out, s, p), residuals = forward(options, keep, *tensors)
        else:
            out, s, p = packed(lambda options, *x: forward(options, False, *x)[0], options, cu_seqlens, *tensors)
    residuals += [s.new_empty(0) for _ in range(2 - len(residuals))]
    return out, s, s.new_empty(0) if p is None else p.clone(), *residuals  # S and P may share memory


@_forward_op.register_fake
def _(delta: str, chunk_size: int, keep: bool, *rest: Any) -> tuple[Tensor, ...]:
    q, _, v, *_, s, p, cu_seqlens = rest
    shapes: list[Any] = []
    if keep and cu_seqlens is None:
        shapes += residual_shapes((delta, chunk_size), q, v, p is not None)
    shapes += [0] * (2 - len(shapes))
    dtype = torch.promote_types(q.dtype, v.dtype)
    out = torch.empty_like(v, dtype=dtype) if cu_seqlens is None else v.new_empty(v.shape, dtype=dtype)
    return out, *(s.new_empty(shape) for shape in (s.shape, 0 if p is None else p.shape, *shapes))


@torch.library.custom_op(
    "hbnode::heavy_ball_memory_backward",
    mutates_args=(),
    schema=f"(str delta, int chunk_size, {_TENSORS}, Tensor states, Tensor e, Tensor dout, Tensor ds, Tensor dp, "
    "bool[] needed) -> Tensor[]",
)
def _backward_op(delta: str, chunk_size: int, *rest: Any) -> list[Tensor]:
    *tensors, cu_seqlens, states, e, dout, ds, dp, needed = rest
    options = (delta, chunk_size)

    def run_group(steps: Tensors, grouped: Tensors) -> tuple[Tensors, Tensors]:
        *steps, dout = steps
        given, grads, residuals = [*steps, *grouped[:2]], [dout, *grouped[2:]], [states, e]
        if not states.numel():  # not kept
            residuals = forward(options, True, *given)[1]  # type: ignore[arg-type]
        found = vjp(options, given, residuals, grads, needed)
        return found[:_STEP_TENSORS], found[_STEP_TENSORS:]

    with no_autocast(tensors[0]):
        given = [*tensors[_STEP_TENSORS:], ds, None if tensors[-1] is None else dp]
        found = over_sequences(run_group, cu_seqlens, [*tensors[:_STEP_TENSORS], dout], given)
    every = [grad for part in found for grad in part]
    wanted = [grad for grad, is_needed in zip(every, needed, strict=True) if is_needed and grad is not None]
    return [grad.clone(memory_format=torch.contiguous_format) for grad in wanted]


@_backward_op.register_fake
def _(delta: str, chunk_size: int, *rest: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, is_needed in zip(rest[:_TENSOR_COUNT], rest[-1], strict=True) if is_needed]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.options = inputs[:2]
    ctx.save_for_backward(*inputs[3:], *output[3:])


def _backward(ctx: Any, dout: Tensor, ds: Tensor, dp: Tensor, *_: Any) -> tuple[Any, ...]:
    *tensors, states, e = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[3 : 3 + _TENSOR_COUNT])
    found: Any
    if torch.is_grad_enabled():  # with create_graph=True

        def run(options: Any, *x: Any) -> Outputs:
            return packed(reference, options, tensors[-1], *x)

        found = iter(reference_vjp(run, ctx.options, tensors[:-1], (dout, ds, dp), needed))
        return None, None, None, *found, None
    found = iter(_backward_op(*ctx.options, *tensors, states, e, dout, ds, dp, needed))
    return None, None, None, *(next(found) if is_needed else None for is_needed in needed), None


_forward_op.register_autograd(_backward, setup_context=_setup)


def compiled(options: tuple[Any, int], cu_seqlens: Tensor | None, *tensors: Any) -> Outputs:
    """Compute :func:`packed` with the chunked form, by the operator."""
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    # symbolic shapes of the residuals would constrain an exported program
    keep = needs_grad and not torch.compiler.is_exporting()
    out, s, p, *_ = _forward_op(options[0] or "", options[1], keep, *tensors, cu_seqlens)
    return out, s, None if tensors[-1] is None else p
