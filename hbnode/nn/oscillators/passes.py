"""The passes of a scan over a piece, h_t = M_t h_{t-1} + b_t with 2x2 matrices M_t, and their transposes.

States are rows (batch, chunks * P). First every chunk is run from zero, side by side, then the states between chunks
one after another, then every chunk from the state before it. A piece of one chunk needs the last of the three alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hbnode.nn.oscillators.coefficients import Entries

Pair = tuple[Tensor, Tensor]


def starts(entries: Entries, carries: list[Tensor], b: tuple[Tensor, Tensor | None], before: Pair) -> Pair:
    """V and x before each chunk, (batch, chunks, P) each.

    Arguments:
        entries: M of the piece.
        carries: M over its chunks.
        b: inputs of v and x, (steps, batch, chunks * P); none of x is zeros.
        before: v and x before the piece, (batch, P) each.
    """
    batch, chunks = len(before[0]), carries[0].shape[1]
    v, x = before
    if chunks == 1:
        return v.unsqueeze(1), x.unsqueeze(1)
    ends = [end.view(batch, chunks, -1).unbind(1) for end in _ends(entries, b)]
    found = [(v, x)]
    for end_v, end_x, vv, vx, xv, xx in zip(*ends, *(carry.unbind(1) for carry in carries), strict=True):
        v, x = torch.addcmul(end_v, vv, v).addcmul_(vx, x), torch.addcmul(end_x, xv, v).addcmul_(xx, x)
        found.append((v, x))
    found.pop()
    return torch.stack([v for v, _ in found], 1), torch.stack([x for _, x in found], 1)


def _ends(entries: Entries, b: tuple[Tensor, Tensor | None]) -> Pair:
    """The ends of chunks that start from zero."""
    bv, bx = b
    v, spare = bv[0].clone(), torch.empty_like(bv[0])
    x = torch.zeros_like(v) if bx is None else bx[0].clone()
    rows = zip(*(entry.unbind()[1:] for entry in entries[:4]), strict=True)
    inputs = zip(bv.unbind()[1:], [None] * len(bv[1:]) if bx is None else bx.unbind()[1:], strict=True)
    for (vv, vx, xv, xx), (to_v, to_x) in zip(rows, inputs, strict=True):
        torch.addcmul(to_v, vv, v, out=spare).addcmul_(vx, x)
        x.mul_(xx).addcmul_(xv, v)
        if to_x is not None:
            x.add_(to_x)
        v, spare = spare, v
    return v, x


def run(entries: Entries, b: tuple[Tensor, Tensor | None], before: Pair) -> Pair:
    """V and x before the piece's chunks and after each of their samples, (steps + 1, batch, chunks * P) each."""
    bv, bx = b
    v, x = (bv.new_empty(len(bv) + 1, *bv.shape[1:]) for _ in range(2))
    v[0], x[0] = (part.flatten(1) for part in before)
    vs, xs = v.unbind(), x.unbind()
    rows = zip(*(entry.unbind() for entry in entries[:4]), strict=True)
    inputs = zip(bv.unbind(), [None] * len(bv) if bx is None else bx.unbind(), strict=True)
    for i, ((vv, vx, xv, xx), (to_v, to_x)) in enumerate(zip(rows, inputs, strict=True)):
        torch.addcmul(to_v, vv, vs[i], out=vs[i + 1]).addcmul_(vx, xs[i])
        if to_x is None:
            torch.mul(xx, xs[i], out=xs[i + 1]).addcmul_(xv, vs[i])
        else:
            torch.addcmul(to_x, xx, xs[i], out=xs[i + 1]).addcmul_(xv, vs[i])
    return v, x


def run_backward(entries: Entries, carries: list[Tensor], grads: Pair, after: Pair) -> Pair:
    """Turn gradients of outputs into those of states in place; returns the gradient of the state before the piece.

    Arguments:
        entries: M of the piece.
        carries: M over its chunks.
        grads: gradients of what is read off v and x, (steps, batch, chunks * P) each.
        after: gradients of v and x after the piece, (batch, P) each.
    """
    gv, gx = grads
    batch, chunks = len(after[0]), carries[0].shape[1]
    dv, dx = after
    if chunks > 1:
        ends = [end.view(batch, chunks, -1).unbind(1) for end in _starts_backward(entries, grads)]
        rows = list(zip(*ends, *(carry.unbind(1) for carry in carries), strict=True))
        found = [(dv, dx)]
        for of_v, of_x, vv, vx, xv, xx in reversed(rows):
            dv, dx = torch.addcmul(of_v, vv, dv).addcmul_(xv, dx), torch.addcmul(of_x, vx, dv).addcmul_(xx, dx)
            found.append((dv, dx))
        found.pop()
        gv[-1].add_(torch.stack([dv for dv, _ in reversed(found)], 1).flatten(1))
        gx[-1].add_(torch.stack([dx for _, dx in reversed(found)], 1).flatten(1))
    else:
        gv[-1].add_(dv)
        gx[-1].add_(dx)
    of_v, of_x = gv.unbind(), gx.unbind()
    for i, (vv, vx, xv, xx) in _backwards(entries):
        of_v[i - 1].addcmul_(vv, of_v[i]).addcmul_(xv, of_x[i])
        of_x[i - 1].addcmul_(vx, of_v[i]).addcmul_(xx, of_x[i])
    if chunks > 1:
        return dv, dx
    vv, vx, xv, xx = (entry[0] for entry in entries[:4])
    return (vv * of_v[0]).addcmul_(xv, of_x[0]), (vx * of_v[0]).addcmul_(xx, of_x[0])


def _starts_backward(entries: Entries, grads: Pair) -> Pair:
    """The gradients of the states before the chunks, if nothing comes after them."""
    of_v, of_x = (grad.unbind() for grad in grads)
    dv, dx = of_v[-1], of_x[-1]
    for i, (vv, vx, xv, xx) in _backwards(entries):
        dv, dx = (
            torch.addcmul(of_v[i - 1], vv, dv).addcmul_(xv, dx),
            torch.addcmul(of_x[i - 1], vx, dv).addcmul_(xx, dx),
        )
    vv, vx, xv, xx = (entry[0] for entry in entries[:4])
    return (vv * dv).addcmul_(xv, dx), (vx * dv).addcmul_(xx, dx)


def _backwards(entries: Entries) -> list[tuple[int, tuple[Tensor, ...]]]:
    """The index and M of every step of a chunk but the first, the last one first."""
    rows = zip(*(entry.unbind() for entry in entries[:4]), strict=True)
    return list(enumerate(rows))[:0:-1]
