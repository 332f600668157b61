"""A layer of oscillators over whole sequences: which form runs, and how torch's autograd and compiler see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hbnode import _torch
from hbnode._torch import keep_freed_memory, no_autocast
from hbnode.nn.oscillators import fused, rotation
from hbnode.nn.oscillators.coefficients import coefficients_of, swings
from hbnode.nn.oscillators.layout import Piece, pieces
from hbnode.nn.oscillators.plain import ScanInput, plain_scan

Grads = tuple[Tensor | None, ...]
Output = tuple[Tensor, Tensor, Tensor, Tensor]

_COUNT = len(ScanInput._fields)


def scan(kind: str, is_held: bool, inputs: ScanInput) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs (batch, T, output_size), and v and x after the last sample.

    Arguments:
        kind: of the coefficients: "fixed", "exact" or "imex".
        is_held: whether the input is held over the gap before a sample, or is added to v.
        inputs: the tensors.
    """
    needs_plain = _torch.is_transformed() or torch.jit.is_tracing()
    if torch.compiler.is_compiling() and not needs_plain:
        y, v, x, _ = _forward_op(kind, is_held, *inputs)
        return y, v, x
    if needs_plain or _torch.double_backward_enabled():
        return plain_scan(kind, is_held, inputs)
    y, v, x = _Scan.apply(kind, is_held, *inputs)
    return y, v, x


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, is_held: bool, *tensors: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs = ScanInput(*tensors)
        y, v, x, kept = _forward(kind, is_held, inputs)
        ctx.kind = kind, is_held
        ctx.save_for_backward(*inputs, kept)
        return y, v, x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Grads:
        *tensors, kept = ctx.saved_tensors
        inputs, wanted, (kind, is_held) = ScanInput(*tensors), ctx.needs_input_grad[2:], ctx.kind
        if torch.is_grad_enabled():  # create_graph=True
            with no_autocast(inputs.x):
                return None, None, *_differentiable(kind, is_held, inputs, wanted, grads)
        return None, None, *_backward(kind, is_held, inputs, kept, wanted, grads)


def _differentiable(
    kind: str, is_held: bool, inputs: ScanInput, wanted: Sequence[bool], grads: tuple[Tensor, ...]
) -> Grads:
    """Gradients that can be differentiated again."""
    tensors: Any = [None if z is None else z.view_as(z) for z in inputs]
    views = ScanInput(*tensors)
    made = [(y, dy) for y, dy in zip(plain_scan(kind, is_held, views), grads, strict=True) if y.requires_grad]
    leaves = [z for z, is_wanted in zip(views, wanted, strict=True) if z is not None and is_wanted]
    found = iter(
        torch.autograd.grad([y for y, _ in made], leaves, [dy for _, dy in made], create_graph=True, allow_unused=True)
    )
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)


# Oscillators that swing, and those that do not, are scanned each for themselves: their outputs add up.


def _groups(kind: str, rates: Tensor) -> list[tuple[str, Tensor | None]]:
    """Kinds of coefficients, and the oscillators of each; None for all."""
    if kind != "exact":
        return [(kind, None)]
    swinging = swings(rates)
    index, rest = swinging.nonzero()[:, 0], (~swinging).nonzero()[:, 0]
    if len(index) in (0, len(swinging)):
        return [("rotating" if len(index) else kind, None)]
    return [("rotating", index), (kind, rest)]


def _part(inputs: ScanInput, index: Tensor | None, is_first: bool) -> ScanInput:
    """The inputs of some of the oscillators; the first part has D."""
    if index is None:
        return inputs
    return inputs._replace(
        v0=inputs.v0[:, index],
        x0=inputs.x0[:, index],
        w=inputs.w[index],
        c=inputs.c.unflatten(1, (2, -1))[:, :, index].flatten(1),
        d=inputs.d if is_first else None,
        rates=inputs.rates[:, index],
    )


def _cut(inputs: ScanInput) -> list[Piece]:
    batch, length, _ = inputs.x.shape
    return pieces(batch, length, inputs.v0.shape[1], is_local=inputs.x.device.type == "cpu")


def _forward(kind: str, is_held: bool, inputs: ScanInput) -> Output:
    """The outputs, the last v and x, and the states before all chunks and the last, (2, batch, chunks + 1, P)."""
    keep_freed_memory(inputs.x.device)
    cut, found = _cut(inputs), []
    groups = _groups(kind, inputs.rates)
    with no_autocast(inputs.x), torch.no_grad():
        for i, (name, index) in enumerate(groups):
            part = _part(inputs, index, i == 0)
            if name == "rotating":
                found.append(rotation.forward(is_held, part, cut))
            else:
                coefficients = coefficients_of(name, is_held, part.rates, part.v0.dtype)
                found.append(fused.forward(coefficients, part, cut))
    if len(found) == 1:
        return found[0]
    order = torch.cat([index for _, index in groups if index is not None]).argsort()
    v, x, kept = (torch.cat(parts, -1)[..., order] for parts in zip(*[each[1:] for each in found], strict=True))
    return found[0][0] + found[1][0], v, x, kept


def _backward(
    kind: str,
    is_held: bool,
    inputs: ScanInput,
    kept: Tensor,
    wanted: Sequence[bool],
    grads: tuple[Tensor, Tensor, Tensor],
) -> Grads:
    """The gradients of ``inputs``, those that are wanted."""
    dy, dv, dx = grads
    cut, found = _cut(inputs), []
    groups = _groups(kind, inputs.rates)
    with no_autocast(inputs.x), torch.no_grad():
        for i, (name, index) in enumerate(groups):
            part = _part(inputs, index, i == 0)
            of, states = grads, kept
            if index is not None:
                of, states = (dy, dv[:, index], dx[:, index]), kept[..., index]
            if name == "rotating":
                grads_of: Any = rotation.backward(is_held, part, cut, states, wanted, of)
            else:
                coefficients = coefficients_of(name, is_held, part.rates, part.v0.dtype)
                grads_of = fused.backward(coefficients, part, cut, states, wanted, of)
            if index is None:
                return tuple(grads_of)
            found.append(ScanInput(*grads_of))
    order = torch.cat([index for _, index in groups if index is not None]).argsort()
    one, other = found

    def joined(name: str, axis: int) -> Tensor | None:
        parts = [getattr(each, name) for each in found]
        return None if parts[0] is None else torch.cat(parts, axis).index_select(axis, order)

    def total(name: str) -> Tensor | None:
        first, second = getattr(one, name), getattr(other, name)
        return first if second is None else first + second

    dc = None if one.c is None else torch.cat([each.c.unflatten(1, (2, -1)) for each in found], 2)[:, :, order]
    return (
        *(total("x"), joined("v0", 1), joined("x0", 1), joined("w", 0)),
        *(None if dc is None else dc.flatten(1), one.d, joined("rates", 1), total("gaps"), None),
    )


# For torch.compile each pass is an operation, which it does not look into.

_INPUTS = "Tensor x, Tensor v0, Tensor x0, Tensor w, Tensor c, Tensor? d, Tensor rates, Tensor? gaps, Tensor? ends"
_SHORTEST = 8  # samples of a chunk


@torch.library.custom_op(
    "hbnode::oscillators",
    mutates_args=(),
    schema=f"(str kind, bool is_held, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _forward_op(kind: str, is_held: bool, *tensors: Tensor | None) -> Output:
    inputs = ScanInput(*tensors)  # type: ignore[arg-type]  # the schema has their types
    y, v, x, kept = _forward(kind, is_held, inputs)
    return y, v, x, functional.pad(kept, (0, 0, 0, inputs.x.shape[1] // _SHORTEST + 2 - kept.shape[2]))


@_forward_op.register_fake
def _(kind: str, is_held: bool, *tensors: Tensor | None) -> Output:
    inputs = ScanInput(*tensors)  # type: ignore[arg-type]  # the schema has their types
    (batch, length, _), size = inputs.x.shape, inputs.v0.shape[1]
    y = inputs.v0.new_empty(batch, length, inputs.c.shape[0], dtype=fused.output_dtype(inputs))
    kept = inputs.v0.new_empty(2, batch, length // _SHORTEST + 2, size)
    return y, inputs.v0.new_empty(batch, size), inputs.v0.new_empty(batch, size), kept


@torch.library.custom_op(
    "hbnode::oscillators_backward",
    mutates_args=(),
    schema=f"(str kind, bool is_held, {_INPUTS}, Tensor kept, Tensor dy, Tensor dv, Tensor dx, bool[] wanted)"
    " -> Tensor[]",
)
def _backward_op(kind: str, is_held: bool, *rest: Any) -> list[Tensor]:
    inputs, (kept, dy, dv, dx, wanted) = ScanInput(*rest[:_COUNT]), rest[_COUNT:]
    kept = kept[:, :, : sum(piece.chunks for piece in _cut(inputs)) + 1]
    return [grad for grad in _backward(kind, is_held, inputs, kept, wanted, (dy, dv, dx)) if grad is not None]


@_backward_op.register_fake
def _(kind: str, is_held: bool, *rest: Any) -> list[Tensor]:
    return [z.new_empty(z.shape) for z, is_wanted in zip(rest[:_COUNT], rest[-1], strict=True) if is_wanted]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Output) -> None:
    ctx.kind = inputs[:2]
    ctx.save_for_backward(*inputs[2:], output[3])


def _backward_of_op(ctx: Any, dy: Tensor, dv: Tensor, dx: Tensor, _: Tensor | None) -> Grads:
    *tensors, kept = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[2:])
    found = iter(_backward_op(*ctx.kind, *tensors, kept, dy, dv, dx, wanted))
    return None, None, *(next(found) if is_wanted else None for is_wanted in wanted)


_forward_op.register_autograd(_backward_of_op, setup_context=_setup)
