"""A cell over a whole sequence, from any drive: a loop over time with its transpose written out.

The sequence is worked through in blocks. Of each only the steps taken are kept; the drive, which would be the larger
part, is made anew in the backward pass, and differentiated there by autograd. With ``compile`` the steps of a block
are one compiled function.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear

from hbnode.recurrent.cell_steps import CellOutput, CellStep
from hbnode.recurrent.rules import Memory, Rule, once

BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Scan:
    """What is done at each sample.

    Arguments:
        step: the cell's.
        rule: turns g = W x + b into the drive; None if x is the drive.
        compile: whether to compile the steps of a block.
    """

    step: CellStep
    rule: Rule | None
    compile: bool = False

    def __call__(
        self,
        x: Tensor,
        weights: tuple[Tensor | None, Tensor | None],
        recurrent: tuple[Tensor, Tensor | None],
        start: CellOutput,
        memory: Memory | None,
    ) -> tuple[Tensor, CellOutput, Memory | None]:
        """Run over a sequence.

        Arguments:
            x: inputs (T, batch, n), or the drive itself.
            weights: W and b.
            recurrent: U, and b_hh or the bias of the activation.
            start: h_0 and c_0.
            memory: the rule's, before the first sample.

        Returns:
            h (T, batch, n), the last h and c, and the memory after the last sample.
        """
        memory = memory or Memory()
        h, c, v, m, g = _Scan.apply(
            self, torch.is_grad_enabled(), memory.t, x, *weights, *recurrent, start.h, start.c, *memory[:3]
        )
        t = None if memory.t is None else memory.t + len(x)
        return h, CellOutput(h[-1], c), None if self.rule is None else Memory(v, m, g, t)

    def filter(self, x: Tensor, w: Tensor | None, b: Tensor | None, memory: Memory) -> tuple[Tensor, Memory]:
        """The drive of a block."""
        return (x, memory) if self.rule is None else self.rule(linear(x, w, b), memory)

    def forward(
        self, drive: Tensor, u: Tensor, bias: Tensor | None, before: CellOutput, out: Tensor | None = None
    ) -> CellOutput:
        """The steps of a block, stacked; u is the transpose of U."""
        return self.step.run(*self.step.prepare(drive, bias), u, bias, before, out)

    def backward(
        self, grad: Tensor, dh: Tensor, dc: Tensor | None, u: Tensor, before: CellOutput, taken: CellOutput
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The transpose of a block.

        Arguments:
            grad: gradient of h at the samples of the block (T, batch, n).
            dh: gradient of the last h from after the block.
            dc: likewise of the last c.
            u: U.
            before: the steps before those of the block.
            taken: the steps of the block.

        Returns:
            Gradients of the drive and of a at each sample, and of h and c before the block.
        """
        factors = zip(*(factor.unbind() for factor in self.step.factors(before, taken)), strict=True)
        found = []
        for grad_t, of_t in zip(reversed(grad.unbind()), reversed(list(factors)), strict=True):
            found.append(self.step.backward(dh + grad_t, dc, *of_t))
            dh, dc = found[-1].a @ u, found[-1].c
            dh = dh if found[-1].h is None else dh + found[-1].h
        da = torch.stack([gradients.a for gradients in reversed(found)])
        drest = None if found[0].rest is None else torch.stack([gradients.rest for gradients in reversed(found)])
        return self.step.input_gradient(da, drest), da, dh, dc

    def of(self, x: Tensor, u: Tensor) -> tuple[Callable, Callable, Callable]:
        """drive, forward and backward, for a block of x; a shorter one at the end is not worth compiling."""
        if self.compile and len(x) == BLOCK:
            return _compiled(self, x.shape, u.shape, x.dtype, x.device)
        return self.filter, self.forward, self.backward


@functools.lru_cache(maxsize=256)
def _compiled(scan: Scan, *of: object) -> tuple[Callable, Callable, Callable]:
    """Programs of their own for each shape, dtype and device."""
    drive = scan.filter if scan.rule is None or scan.rule.is_linear else _program(scan.filter)
    return drive, _program(scan.forward), _program(scan.backward)


def _program(method: types.MethodType) -> Callable:
    """A compiled method; its code is a copy, because how often code is compiled anew for other shapes is limited."""
    function = method.__func__
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(types.MethodType(copied, method.__self__), dynamic=False)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        scan: Scan,
        keeps: bool,
        t: int | Tensor | None,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        u: Tensor,
        bias: Tensor | None,
        h: Tensor,
        c: Tensor | None,
        *kept: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        memory, last = Memory(*kept, t), CellOutput(h, c)
        blocks, memories = [], []
        out, u_t = h.new_empty(len(x), *h.shape), u.T.contiguous()
        for block, place in zip(x.split(BLOCK), out.split(BLOCK), strict=True):
            drive, forward, _ = scan.of(block, u)
            memories.append(memory)
            d, memory = drive(block, w, b, memory)
            memory = _apart(memory)
            if forward == scan.forward:
                taken = forward(d, u_t, bias, last, place)
            else:
                taken = forward(d, u_t, bias, last)
                place.copy_(taken.h)
            last = CellOutput(place[-1], None if c is None else taken.c[-1].clone())
            blocks += [taken] if keeps else []
        if not keeps:
            return out, last.c, *memory[:3]
        ctx.scan, ctx.times = scan, [memory.t for memory in memories]
        kept = [z for memory in memories for z in memory[:3]]
        kept += [z for taken in blocks for z in (taken.c, *taken.parts)]
        ctx.save_for_backward(x, w, b, u, bias, h, c, out, *kept)
        ctx.set_materialize_grads(False)
        return out, last.c, *memory[:3]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor | None, dc: Tensor | None, *dkept: Tensor | None) -> tuple:
        once("a scan over time")
        scan = ctx.scan
        x, w, b, u, bias, h, c, out, *kept = ctx.saved_tensors
        cut = 3 * len(ctx.times)
        memories = [Memory(*kept[3 * k : 3 * k + 3], t) for k, t in enumerate(ctx.times)]
        blocks = _pairs(CellOutput(h, c), out, kept[cut:], len(memories))
        grad = torch.zeros_like(out) if grad is None else grad
        dh, dc = torch.zeros_like(h), torch.zeros_like(c) if dc is None and c is not None else dc
        sums = _Sums(scan, u, bias)
        dx = torch.empty_like(x) if ctx.needs_input_grad[3] else None
        for k in reversed(range(len(memories))):
            at = slice(k * BLOCK, min((k + 1) * BLOCK, len(x)))
            before, taken = blocks[k]
            _, _, backward = scan.of(x[at], u)
            dd, da, dh, dc = backward(grad[at], dh, dc, u, before, taken)
            sums.add_recurrent(da, before.h, taken.h)
            dx_block, *dkept = sums.add_filter((x[at], w, b, *memories[k][:3]), memories[k].t, (dd, *dkept))
            if dx is not None:
                dx[at] = dx_block
        return None, None, None, dx, sums.w, sums.b, sums.u, sums.bias, dh, dc, *dkept


class _Sums:
    """Gradients of the parameters, block by block."""

    def __init__(self, scan: Scan, u: Tensor, bias: Tensor | None) -> None:
        self.scan = scan
        self.u = torch.zeros_like(u)
        self.bias = None if bias is None else torch.zeros_like(bias)
        self.w = self.b = None

    def add_recurrent(self, da: Tensor, before: Tensor, out: Tensor) -> None:
        """Add those of U and its bias, from h at the samples before and at those of the block."""
        self.u.addmm_(da.flatten(0, 1).T, before.flatten(0, 1))
        if self.bias is not None:
            self.bias += (da * out.sign() if self.scan.step.bias_is_inside else da).sum((0, 1))

    def add_filter(
        self, inputs: tuple[Tensor | None, ...], t: int | Tensor | None, grads: tuple[Tensor | None, ...]
    ) -> list[Tensor | None]:
        """Add those of W and b, and return those of x and of the memory before the block.

        Arguments:
            inputs: x of the block, W, b, and v, m, g before it.
            t: samples before it.
            grads: gradients of the drive, and of v, m, g after the block.
        """
        if self.scan.rule is None:
            return [grads[0], None, None, None]
        drive, _, _ = self.scan.of(inputs[0], self.u)
        with torch.enable_grad():
            inputs = [z if z is None else z.detach().requires_grad_() for z in inputs]
            d, memory = drive(*inputs[:3], Memory(*inputs[3:], t))
        made, grads = zip(
            *((z, dz) for z, dz in zip((d, *memory[:3]), grads, strict=True) if dz is not None), strict=True
        )
        asked = [z for z in inputs if z is not None]
        found = iter(torch.autograd.grad(made, asked, grads, allow_unused=True))
        dx, dw, db, *rest = (None if z is None else next(found) for z in inputs)
        self.w = dw if self.w is None else self.w.add_(dw)
        self.b = db if self.b is None or db is None else self.b.add_(db)
        return [dx, *rest]


def _apart(memory: Memory) -> Memory:
    """The memory without the block that it is a view of."""
    return Memory(*(z if z is None else z.clone() for z in memory[:3]), memory.t)


def _pairs(
    start: CellOutput, out: Tensor, kept: Sequence[Tensor | None], blocks: int
) -> list[tuple[CellOutput, CellOutput]]:
    """For each block, the steps before those of the block, and those."""
    width = len(kept) // blocks
    found, last = [], start
    for k, h in enumerate(out.split(BLOCK)):
        c, *parts = kept[k * width : (k + 1) * width]
        before = CellOutput(
            *(None if z is None else torch.cat([z.unsqueeze(0), y[:-1]]) for z, y in ((last.h, h), (last.c, c)))
        )
        found.append((before, CellOutput(h, c, tuple(parts))))
        last = CellOutput(h[-1], None if c is None else c[-1])
    return found
