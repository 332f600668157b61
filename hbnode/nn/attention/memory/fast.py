"""The chunkwise form of the heavy-ball memory with its backward pass written out.

Of each chunk the state before it is kept, and E with a delta rule. All else is computed again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hbnode._torch import is_batched, no_autocast
from hbnode.nn.attention.memory.chunks import ChunkGradients, Chunks, ProductGradients, Products
from hbnode.nn.attention.memory.gates import Gates
from hbnode.nn.attention.memory.layout import Layout, Span
from hbnode.nn.attention.memory.plain import chunkwise
from hbnode.nn.attention.memory.weights import BLOCK

Grads = tuple[Tensor | None, ...]

INPUTS = 9  # tensors: q, k, v, four gates, S and P


def fast_chunkwise(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, delta: str | bool, s: Tensor, p: Tensor | None, size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As :func:`chunkwise`, but q, k and v may be in half precision, and the outputs are in their dtype."""
    inputs = (q, k, v, *gates, s, p)
    keeps = torch.is_grad_enabled() and any(z is not None and z.requires_grad for z in inputs)
    out, s, p = _FastChunkwise.apply(delta, size, keeps, *inputs)
    return out, s, p


class _FastChunkwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, delta: str | bool, size: int, keeps: bool, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None
    ) -> Grads:
        gates, s, p = Gates(*rest[:4]), rest[4], rest[5]
        assert s is not None
        size = -(-min(size, q.shape[2]) // BLOCK) * BLOCK
        batch, heads, length = q.shape[:3]
        layout = Layout(batch, heads, length, size, s.dtype, is_local=q.device.type == "cpu")
        chunks = Chunks(layout, delta, q, k, gates)
        start = s if p is None else torch.cat([s, p], 2)
        out, last = torch.empty_like(v, dtype=torch.promote_types(q.dtype, v.dtype)), torch.empty_like(start)
        kept: list[Tensor] = []
        for spans in layout.spans():
            at = spans[0].batch
            state = start[at].flatten(0, 1)
            for span in spans:
                products = chunks.of(span)
                states, errors, state = _run(products, layout.load(v, span), state)
                found = torch.bmm(products.readers[:, :size], states).baddbmm_(products.scores, errors)
                layout.store(found.unflatten(0, (-1, len(state))), out, span)
                kept += ([states, errors] if delta else [states]) if keeps else []
            last[at] = state.view_as(last[at])
        ctx.layout, ctx.delta = layout, delta
        ctx.save_for_backward(q, k, v, *rest, *kept)
        ctx.set_materialize_grads(False)
        if p is None:
            return out, last, None
        return out, *(z.contiguous() for z in last.chunk(2, 2))

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, ds: Tensor | None, dp: Tensor | None) -> Grads:
        saved = ctx.saved_tensors
        inputs, kept = saved[:INPUTS], list(saved[INPUTS:])
        with no_autocast(inputs[0]):
            many = any(grad is not None and is_batched(grad) for grad in (dout, ds, dp))
            if torch.is_grad_enabled() or many:  # create_graph=True
                return None, None, None, *_differentiable(ctx, inputs, (dout, ds, dp))
            return None, None, None, *_backward(ctx, inputs, kept, (dout, ds, dp))


def _differentiable(ctx: Any, inputs: tuple[Any, ...], grads: Grads) -> Grads:
    """Gradients by autograd, which can be differentiated again if that is asked for."""
    wanted, again = ctx.needs_input_grad[3:], torch.is_grad_enabled()
    with torch.enable_grad():  # a tensor that is several of the inputs is a tensor of its own for each
        views: Any = [None if z is None else z.view_as(z) for z in inputs]
        q, k, v, *gates, s, p = views
        q, k, v = (z.to(s.dtype) for z in (q, k, v))
        outputs = chunkwise(q, k, v, Gates(*gates), ctx.delta, s, p, ctx.layout.size)
    pairs = ((y, dy) for y, dy in zip(outputs, grads, strict=True) if y is not None and dy is not None)
    made = [(y, dy.to(y.dtype)) for y, dy in pairs if y.requires_grad]  # the state does not depend on the queries
    leaves = [z for z, is_wanted in zip(views, wanted, strict=True) if is_wanted]
    found = iter(
        torch.autograd.grad([y for y, _ in made], leaves, [dy for _, dy in made], create_graph=again, allow_unused=True)
    )
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)


def _run(products: Products, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states before the chunks of a span and E of each (chunks * rows, ...), and the state after the last.

    Arguments:
        products: products of the span.
        v: values (chunks, rows, C, M).
        state: before the first chunk (rows, parts * D, M).
    """
    count, rows, size, _ = v.shape
    writers, carries = _writers_and_carries(products, count)
    states = v.new_empty(count, *state.shape)
    if products.overlaps is None:
        new = torch.bmm(products.writers.mT, v.flatten(0, 1)).unflatten(0, (count, rows))
        for i in range(count):
            states[i] = state
            state = _carried(carries[i], state, new[i])
        return states.flatten(0, 1), v.flatten(0, 1), state
    readers = products.readers[:, size:].unflatten(0, (count, rows))
    overlaps = products.overlaps.unflatten(0, (count, rows))
    errors = torch.empty_like(v)
    for i in range(count):
        states[i] = state
        found = torch.baddbmm(v[i], readers[i], state, alpha=-1)
        errors[i] = torch.linalg.solve_triangular(overlaps[i], found, upper=False, unitriangular=True)
        state = _carried(carries[i], state).baddbmm_(writers[i].mT, errors[i])
    return states.flatten(0, 1), errors.flatten(0, 1), state


def _writers_and_carries(products: Products, count: int) -> tuple[Tensor, list[Tensor | None]]:
    """``writers``, and the weights of the state before a chunk in that after it, chunk by chunk."""
    writers = products.writers.unflatten(0, (count, -1))
    if products.last is None:
        return writers, [None] * count
    carry = products.last[..., : products.last.shape[1]]
    return writers, list(carry.unflatten(0, (count, -1)).unbind())


def _carried(carry: Tensor | None, state: Tensor, new: Tensor | None = None) -> Tensor:
    """``carry @ state`` + new, part by part; always a new tensor."""
    if carry is None:
        return state.clone() if new is None else state + new
    shape = (*carry.shape[:2], -1)
    if new is None:
        return torch.bmm(carry, state.view(shape)).view_as(state)
    return torch.baddbmm(new.view(shape), carry, state.view(shape)).view_as(state)


def _backward(ctx: Any, inputs: tuple[Any, ...], kept: list[Tensor], grads: Grads) -> Grads:
    q, k, v, *gates, s, p = inputs
    layout = ctx.layout
    chunks = Chunks(layout, ctx.delta, q, k, Gates(*gates))
    dout = torch.zeros_like(v) if grads[0] is None else grads[0]
    ds, dp = (torch.zeros_like(s) if z is None else z for z in grads[1:])
    dend = ds if p is None else torch.cat([ds, dp], 2)
    dstart, dv = torch.empty_like(dend), torch.empty_like(v)
    collected = ChunkGradients(chunks, any(ctx.needs_input_grad[6:9]))
    for spans in reversed(layout.spans()):
        at = spans[0].batch
        dstate = dend[at].flatten(0, 1)
        for span in reversed(spans):
            errors = kept.pop() if ctx.delta else layout.load(v, span).flatten(0, 1)
            states = kept.pop()
            products = chunks.of(span)
            grad, dvalues, dstate = _run_backward(products, layout, span, dout, states, errors, dstate)
            layout.store(dvalues, dv, span)
            collected.add(span, products, grad)
        dstart[at] = dstate.view_as(dstart[at])
    dstates = (dstart, None) if p is None else dstart.chunk(2, 2)
    return collected.q, collected.k, dv, *collected.of_gates(Gates(*gates)), *dstates


def _run_backward(
    products: Products, layout: Layout, span: Span, dout: Tensor, states: Tensor, errors: Tensor, dstate: Tensor
) -> tuple[ProductGradients, Tensor, Tensor]:
    """Gradients of a span's products, values (chunks, rows, C, M), and of the state before it.

    Arguments:
        products: products of the span.
        layout: of the chunks.
        span: which chunks.
        dout: gradient of all outputs.
        states: what :func:`_run` gave.
        errors: likewise.
        dstate: gradient of the state after the span (rows, parts * D, M).
    """
    size, rows = layout.size, len(dstate)
    count = len(states) // rows
    # the gradients of the outputs, and below them those of E before the solve, with a minus
    both = errors.new_empty(count, rows, products.reading.shape[1], errors.shape[-1])
    dout = layout.load(dout, span, out=both[:, :, :size]).flatten(0, 1)
    derrors = torch.bmm(products.scores.mT, dout).unflatten(0, (count, rows))
    dstates = torch.bmm(products.readers[:, :size].mT, dout).unflatten(0, (count, rows))
    writers, carries = _writers_and_carries(products, count)
    dends = torch.empty_like(dstates)
    for i in reversed(range(count)):
        dends[i] = dstate
        derrors[i].baddbmm_(writers[i], dstate)
        carry = carries[i]
        dstate = _carried(None if carry is None else carry.mT, dstate, dstates[i])
        if products.overlaps is not None:
            overlaps = products.overlaps.unflatten(0, (count, rows))[i]
            readers = products.readers[:, size:].unflatten(0, (count, rows))[i]
            solved = torch.linalg.solve_triangular(
                overlaps, derrors[i].mT, upper=False, left=False, unitriangular=True
            ).mT
            torch.neg(solved, out=both[i, :, size:])
            dstate.baddbmm_(readers.mT, both[i, :, size:])
    dvalues = derrors if products.overlaps is None else both[:, :, size:].neg()
    both, dends = both.flatten(0, 1), dends.flatten(0, 1)
    parts = 1 if products.last is None else products.last.shape[1]
    grads = ProductGradients(
        torch.bmm(both, errors.mT),
        torch.bmm(both, states.mT),
        torch.bmm(errors, dends.mT),
        torch.bmm(dends.view(len(dends), parts, -1), states.view(len(dends), parts, -1).mT),
    )
    return grads, dvalues, dstate
