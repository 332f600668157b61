"""Causal linear attention with momentum, block after block, with its gradient written out: the form for the CPU.

Between the passes it keeps its inputs, the output and the denominator. S and P of a head are one matrix X = [S; P] of
(2 dim, value_dim), or S alone where β is the number 0. With Q̃ = [Q, β g(n_r) Q] and
K̃ = [g(n - n_c + 1) K, β^{n - n_c} K] the equations of :mod:`hbnode.nn.attention.momentum_weights` are

    numerator = (Q Kᵀ ∘ W) V + Q̃ X,    X' = T X + K̃ᵀ V,

where T = [1, β g(n); 0, β^n] acts on S and P. A block is some chunks, so many that an operation has enough to do. All
but X' = T X + ... is done for its chunks at once, in matrices (batch * heads * chunks, ., .). The backward pass goes
through the blocks to find every X again, and then back from the last one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hbnode._torch import is_batched, no_autocast
from hbnode.nn.attention.momentum_plain import attend, last_write
from hbnode.nn.attention.momentum_weights import Block, BlockWeights, MomentumAttentionState, Rate, has_momentum

ROWS = 16  # chunks of heads of sequences in a block: what they need stays in the cache


def attend_in_order(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: tuple[Rate, Rate],
    state: MomentumAttentionState,
    ignored: Tensor | None,
    *,
    eps: float,
    chunk_size: int,
) -> tuple[Tensor, MomentumAttentionState]:
    """The outputs and the state after the last key; arguments are those of :func:`attend`."""
    has_p = has_momentum(rates[0])
    x = torch.cat([state.s, state.p], 2) if has_p else state.s
    out, x, z = _Loop.apply(q, k, v, x, state.z, *rates, ignored, eps, min(chunk_size, k.shape[2]))
    s, p = x.chunk(2, 2) if has_p else (x, last_write(k, v, ignored, state.p))
    return out, MomentumAttentionState(s, p, z)


class _Loop(torch.autograd.Function):
    """The outputs and the last X and z, from q, k, v, X and z, β, γ, ignored keys, ε and C; differentiable twice."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        z: Tensor,
        momentum: Rate,
        step_size: Rate,
        ignored: Tensor | None,
        eps: float,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.rates, ctx.options = (momentum, step_size), {"eps": eps, "chunk_size": chunk_size}
        if q.device.type == "cpu":
            out, scale = torch.empty_like(v), x.new_empty(*q.shape[:3], 1)
            last_x, last_z = torch.empty_like(x), torch.empty_like(z)
            weights = BlockWeights((momentum, step_size), chunk_size, x.dtype)
            with torch.inference_mode():  # less work for each operation
                for part in _parts(q, k, v, x, z, ignored, out, scale, last_x, last_z):
                    _forward(weights, eps, *part)
        else:
            scale, (out, last_x, last_z) = None, _attend(ignored, ctx.options, q, k, v, x, z, momentum, step_size)
        ctx.save_for_backward(q, k, v, x, z, ignored, out, scale, *(r for r in ctx.rates if isinstance(r, Tensor)))
        return out, last_x, last_z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, x, z, ignored, out, scale, *tensors = ctx.saved_tensors
        learned = iter(tensors)
        momentum, step_size = (next(learned) if isinstance(rate, Tensor) else rate for rate in ctx.rates)
        with no_autocast(x):
            many = any(grad is not None and is_batched(grad) for grad in grads)
            if torch.is_grad_enabled() or many or scale is None:
                return _differentiated(ctx, (q, k, v, x, z, momentum, step_size), ignored, grads)
            given = zip((out, x, z), grads, strict=True)
            dout, dx, dz = (torch.zeros_like(y) if grad is None else grad.contiguous() for y, grad in given)
            dq, dk, dv, dx, dz = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dx.clone(), dz.clone()
            weights = BlockWeights((momentum, step_size), ctx.options["chunk_size"], x.dtype, ctx.needs_input_grad[5:7])
            with contextlib.nullcontext() if any(weights.learned) else torch.inference_mode():
                for part in _parts(q, k, v, x, z, ignored, out, scale, dout, dq, dk, dv, dx, dz):
                    _backward(weights, *part)
            return dq, dk, dv, dx, dz, *weights.gradients(), None, None, None


def _forward(
    weights: BlockWeights,
    eps: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    z: Tensor,
    ignored: Tensor | None,
    out: Tensor,
    scale: Tensor,
    last_x: Tensor,
    last_z: Tensor,
) -> None:
    """The outputs, 1 / denominator and the last X and z go to ``out``, ``scale``, ``last_x`` and ``last_z``."""
    x, z = x.flatten(0, 1), z.flatten(0, 1).unsqueeze(1)
    for mask, q_b, k_b, v_b, out_b, scale_b in _blocks(weights.size, ignored, q, k, v, out, scale):
        w = weights(q_b, mask)
        rows, keys, values = _phi(q_b, None, w), _phi(k_b, mask, w), _rows(v_b, mask, w)
        xs, x = _carried(x, torch.bmm(w.to_write(keys).mT, values), w)
        zs, z = _summed(z, keys.sum(1))
        scores = torch.bmm(rows, keys.mT).mul_(w.weights.seen)
        below = scores.sum(-1, keepdim=True).add_(torch.bmm(rows, zs.mT)).add_(eps)
        above = torch.bmm(scores.mul_(w.weights.within), values).baddbmm_(w.to_read(rows), xs)
        torch.reciprocal(below.view(scale_b.shape), out=scale_b)
        torch.mul(above.view(out_b.shape), scale_b, out=out_b)
    last_x.copy_(x.view(last_x.shape))
    last_z.copy_(z.view(last_z.shape))


def _backward(
    weights: BlockWeights,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    z: Tensor,
    ignored: Tensor | None,
    out: Tensor,
    scale: Tensor,
    dout: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dx: Tensor,
    dz: Tensor,
) -> None:
    """The transpose of :func:`_forward`; in the place of gradients of the last X and z come those of the first."""
    x, z = x.flatten(0, 1), z.flatten(0, 1).unsqueeze(1)
    blocks = list(_blocks(weights.size, ignored, q, k, v, out, scale, dout, dq, dk, dv))
    states = []
    for mask, q_b, k_b, v_b, *_ in blocks:
        w = weights(q_b, mask)
        keys, values = _phi(k_b, mask, w), _rows(v_b, mask, w)
        xs, x = _carried(x, torch.bmm(w.to_write(keys).mT, values), w)
        zs, z = _summed(z, keys.sum(1))
        states.append((xs, zs))
    last_dx, last_dz = dx, dz
    dx, dz = dx.flatten(0, 1), dz.flatten(0, 1).unsqueeze(1)
    for mask, q_b, k_b, v_b, out_b, scale_b, dout_b, dq_b, dk_b, dv_b in reversed(blocks):
        w, (xs, zs) = weights(q_b, mask), states.pop()
        rows, keys, values = _phi(q_b, None, w), _phi(k_b, mask, w), _rows(v_b, mask, w)
        above = dout_b * scale_b
        below = _rows((above * out_b).sum(-1, keepdim=True).neg_(), None, w)
        above = _rows(above, None, w)
        dxs, dx = _carried(dx, torch.bmm(w.to_read(rows).mT, above), w, is_transposed=True)
        dzs, dz = _summed(dz, torch.bmm(below.mT, rows).squeeze(1), is_transposed=True)
        dvalues = torch.bmm(w.to_write(keys), dxs)
        dreads, dwrites = torch.bmm(above, xs.mT), torch.bmm(values, dxs.mT)
        drows, dkeys = w.from_reads(dreads).addcmul_(below, zs), w.from_writes(dwrites).add_(dzs)
        scores, dscores = torch.bmm(rows, keys.mT), torch.bmm(above, values.mT)
        if any(weights.learned):
            weights.learn(w, *_of_weights(scores * dscores, (rows, dreads), (keys, dwrites), (xs, dxs)))
        dvalues.baddbmm_(scores.mul_(w.weights.within).mT, above)
        dscores.mul_(w.weights.within).addcmul_(below, w.weights.seen)
        drows.baddbmm_(dscores, keys)
        dkeys.baddbmm_(dscores.mT, rows)
        torch.mul(drows.view(dq_b.shape), rows.clamp_(max=1.0).view(dq_b.shape), out=dq_b)  # φ' = min(φ, 1)
        torch.mul(dkeys.view(dk_b.shape), keys.clamp_(max=1.0).view(dk_b.shape), out=dk_b)
        dv_b.copy_(dvalues.view(dv_b.shape))
    last_dx.copy_(dx.view(last_dx.shape))
    last_dz.copy_(dz.view(last_dz.shape))


def _of_weights(
    within: Tensor, reads: tuple[Tensor, Tensor], writes: tuple[Tensor, Tensor], states: tuple[Tensor, Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of W, β g(n_r), g(n - n_c + 1), β^{n - n_c}, β g(n), β^n, from pairs of values and gradients."""
    (rows, dreads), (keys, dwrites), (xs, dxs) = reads, writes, states
    d = rows.shape[-1]
    gain = (keys * dwrites[..., :d]).sum(-1, keepdim=True)
    if xs.shape[1] == d:
        return within, None, gain, None, None, None
    read, decay = ((y * dy[..., d:]).sum(-1, keepdim=True) for y, dy in ((rows, dreads), (keys, dwrites)))
    carry, rest = ((part * xs[:, d:]).sum((-2, -1), keepdim=True) for part in dxs.chunk(2, 1))
    return within, read, gain, decay, carry, rest


def _phi(part: Tensor, mask: Tensor | None, w: Block) -> Tensor:
    """φ of queries or keys, as rows; 0 where they are ignored."""
    part = part.to(w.weights.within.dtype)
    phi = part.exp().clamp_(max=1.0)
    return _rows(torch.maximum(phi, part + 1.0, out=phi), mask, w)


def _rows(part: Tensor, mask: Tensor | None, w: Block) -> Tensor:
    """From (batch, heads, chunks * C, n) to (batch * heads * chunks, C, n); 0 where they are ignored."""
    part = part.to(w.weights.within.dtype)
    part = part if mask is None else part.masked_fill(mask[:, None, :, None], 0.0)
    return part.reshape(-1, w.weights.within.shape[-1], part.shape[-1])


def _carried(x: Tensor, added: Tensor, w: Block, is_transposed: bool = False) -> tuple[Tensor, Tensor]:
    """X before each chunk, and after the last, from what each adds; transposed, from the last to the first."""
    steps, states = list(zip(added.unflatten(0, (len(x), -1)).unbind(1), w.carries, strict=True)), [x]
    for new, carry in reversed(steps) if is_transposed else steps:
        if w.reads is None:
            x = x + new
        else:  # S and P of a head are two rows
            new, before = new.unflatten(1, (2, -1)).flatten(2), x.view(len(x), 2, -1)
            x = torch.baddbmm(new, carry.mT if is_transposed else carry, before).view_as(x)
        states.append(x)
    *befores, x = states
    return torch.stack(befores[::-1] if is_transposed else befores, 1).flatten(0, 1), x


def _summed(z: Tensor, added: Tensor, is_transposed: bool = False) -> tuple[Tensor, Tensor]:
    """The same for z (batch * heads, 1, dim), which is only summed."""
    added = added.unflatten(0, (len(z), -1))
    if is_transposed:
        sums = torch.cat([added, z], 1).flip(1).cumsum(1).flip(1)
        return sums[:, 1:].flatten(0, 1).unsqueeze(1), sums[:, :1]
    sums = torch.cat([z, added], 1).cumsum(1)
    return sums[:, :-1].flatten(0, 1).unsqueeze(1), sums[:, -1:]


def _parts(*tensors: Tensor | None) -> Iterator[list[Any]]:
    """Tensors (batch, heads, ...) and a mask for a few sequences at a time."""
    assert tensors[0] is not None
    batch, heads = tensors[0].shape[:2]
    size = max(1, ROWS // max(1, heads))
    for start in range(0, batch, size):
        yield [None if each is None else each[start : start + size] for each in tensors]


def _blocks(size: int, ignored: Tensor | None, *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """For each block its part of ``ignored`` (batch, length) or None, and those of (batch, heads, length, .)."""
    batch, heads, length = tensors[0].shape[:3]
    block = size * max(1, ROWS // max(1, batch * heads))
    lengths = [block] * (length // block) + [x for x in (length % block // size * size, length % size) if x]
    masks = [None] * len(lengths) if ignored is None else ignored.split(lengths, 1)
    return zip(masks, *(each.split(lengths, 2) for each in tensors), strict=True)


def _attend(
    ignored: Tensor | None, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, x: Tensor, z: Tensor, *rates: Rate
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the plain form."""
    d = q.shape[-1]
    s, p = (x[:, :, :d], x[:, :, d:]) if x.shape[2] > d else (x, torch.zeros_like(x))
    out, after = attend(q, k, v, (rates[0], rates[1]), MomentumAttentionState(s, p, z), ignored, **options)
    return out.to(v.dtype), torch.cat([after.s, after.p], 2) if x.shape[2] > d else after.s, after.z


def _differentiated(
    ctx: Any, inputs: tuple[Any, ...], ignored: Tensor | None, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients through the plain form, which themselves have gradients if these are asked for."""
    wanted = ctx.needs_input_grad[: len(inputs)]
    with torch.enable_grad():  # a tensor that is several of the inputs is a tensor of its own for each
        inputs = tuple(each.view_as(each) if isinstance(each, Tensor) else each for each in inputs)
        outputs = _attend(ignored, ctx.options, *inputs)
    pairs = [(y, grad) for y, grad in zip(outputs, grads, strict=True) if grad is not None and y.requires_grad]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs],
            [each for each, is_wanted in zip(inputs, wanted, strict=True) if is_wanted],
            [grad for _, grad in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    )
    return *(next(found) if is_wanted else None for is_wanted in wanted), None, None, None
