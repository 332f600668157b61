"""A cell over a whole sequence, from any drive: a loop over time with its transpose written out.

The sequence is worked through in blocks. Of each only the steps taken are kept; the drive, which would be the larger
part, is made anew in the backward pass, and differentiated there by autograd. With ``compile`` the steps of a block
are one compiled function.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import linear

from hbnode.recurrent.rules import Memory, Rule
from hbnode.recurrent.steps import Step, Taken

BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Scan:
    """What is done at each sample.

    Arguments:
        step: the cell's.
        rule: turns g = W x + b into the drive; None if x is the drive.
        compile: whether to compile the steps of a block.
    """

    step: Step
    rule: Rule | None
    compile: bool = False

    def __call__(
        self,
        x: Tensor,
        weights: tuple[Tensor | None, Tensor | None],
        recurrent: tuple[Tensor, Tensor | None],
        start: Taken,
        memory: Memory | None,
    ) -> tuple[Tensor, Taken, Memory | None]:
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
        memory = memory or Memory(None)
        h, c, v, m, g = _Scan.apply(self, memory.t, x, *weights, *recurrent, start.h, start.c, *memory[:3])
        t = None if memory.t is None else memory.t + len(x)
        return h, Taken(h[-1], c), None if self.rule is None else Memory(v, m, g, t)

    def drive(self, x: Tensor, w: Tensor | None, b: Tensor | None, memory: Memory) -> tuple[Tensor, Memory]:
        """The drive of a block."""
        return (x, memory) if self.rule is None else self.rule.drive(linear(x, w, b), memory)

    def forward(self, drive: Tensor, u: Tensor, bias: Tensor | None, taken: Taken) -> list[Taken]:
        """The steps of a block."""
        inside, outside = (bias, None) if self.step.bias_is_inside else (None, bias)
        steps = []
        for d in drive.unbind():
            taken = self.step.forward(d, linear(taken.h, u, outside), taken, inside)
            steps.append(taken)
        return steps

    def backward(
        self, grad: Tensor, dh: Tensor, dc: Tensor | None, u: Tensor, steps: Sequence[Taken]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The transpose of a block.

        Arguments:
            grad: gradient of h at the samples of the block (T, batch, n).
            dh: gradient of the last h from after the block.
            dc: likewise of the last c.
            u: U.
            steps: the last step before the block, and those of the block.

        Returns:
            Gradients of the drive and of U h + b at each sample, and of h and c before the block.
        """
        dd, du = [], []
        for k in range(len(grad) - 1, -1, -1):
            gradients = self.step.backward(dh + grad[k], dc, steps[k], steps[k + 1])
            dd.append(gradients.d)
            du.append(gradients.u)
            dh, dc = gradients.u @ u, gradients.c
            dh = dh if gradients.h is None else dh + gradients.h
        du = dd if du[0] is dd[0] else du
        stacked = torch.stack(dd[::-1])
        return stacked, stacked if du is dd else torch.stack(du[::-1]), dh, dc

    @functools.cached_property
    def compiled(self) -> tuple[Callable, Callable, Callable]:
        """drive, forward and backward, for a block of full length."""
        if not self.compile:
            return self.drive, self.forward, self.backward
        drive = self.drive if self.rule is None or self.rule.is_linear else torch.compile(self.drive, dynamic=False)
        return drive, torch.compile(self.forward, dynamic=False), torch.compile(self.backward, dynamic=False)

    def of(self, length: int) -> tuple[Callable, Callable, Callable]:
        """drive, forward and backward, for a block of this length; a shorter one at the end is not worth compiling."""
        return self.compiled if length == BLOCK else (self.drive, self.forward, self.backward)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        scan: Scan,
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
        memory = Memory(*kept, t)
        steps, memories = [Taken(h, c)], []
        for block in x.split(BLOCK):
            drive, forward, _ = scan.of(len(block))
            memories.append(memory)
            d, memory = drive(block, w, b, memory)
            memory = _apart(memory)
            steps += forward(d, u, bias, steps[-1])
        out = torch.stack([taken.h for taken in steps[1:]])
        ctx.scan, ctx.times, ctx.parts = scan, [memory.t for memory in memories], len(steps[1].parts)
        kept = [z for memory in memories for z in memory[:3]]
        kept += [z for taken in steps[1:] for z in (taken.c, *taken.parts)]
        ctx.save_for_backward(x, w, b, u, bias, h, c, out, *kept)
        ctx.set_materialize_grads(False)
        return out, steps[-1].c, *memory[:3]

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor | None, dc: Tensor | None, *dkept: Tensor | None) -> tuple:
        scan = ctx.scan
        x, w, b, u, bias, h, c, out, *kept = ctx.saved_tensors
        cut = 3 * len(ctx.times)
        memories = [Memory(*kept[3 * k : 3 * k + 3], t) for k, t in enumerate(ctx.times)]
        steps = [Taken(h, c), *_taken(out, kept[cut:], ctx.parts)]
        before = torch.cat([h.unsqueeze(0), out[:-1]])
        grad = torch.zeros_like(out) if grad is None else grad
        dh, dc = torch.zeros_like(h), torch.zeros_like(c) if dc is None and c is not None else dc
        sums = _Sums(scan, u, bias)
        dx = torch.empty_like(x) if ctx.needs_input_grad[2] else None
        for k in reversed(range(len(memories))):
            at = slice(k * BLOCK, min((k + 1) * BLOCK, len(x)))
            _, _, backward = scan.of(at.stop - at.start)
            dd, du, dh, dc = backward(grad[at], dh, dc, u, steps[at.start : at.stop + 1])
            sums.add_recurrent(dd, du, before[at], out[at])
            dx_block, *dkept = sums.add_drive((x[at], w, b, *memories[k][:3]), memories[k].t, (dd, *dkept))
            if dx is not None:
                dx[at] = dx_block
        return None, None, dx, sums.w, sums.b, sums.u, sums.bias, dh, dc, *dkept


class _Sums:
    """Gradients of the parameters, block by block."""

    def __init__(self, scan: Scan, u: Tensor, bias: Tensor | None) -> None:
        self.scan = scan
        self.u = torch.zeros_like(u)
        self.bias = None if bias is None else torch.zeros_like(bias)
        self.w = self.b = None

    def add_recurrent(self, dd: Tensor, du: Tensor, before: Tensor, out: Tensor) -> None:
        """Add those of U and its bias, from h at the samples before and at those of the block."""
        self.u.addmm_(du.flatten(0, 1).T, before.flatten(0, 1))
        if self.bias is not None:
            self.bias += (dd * out.sign() if self.scan.step.bias_is_inside else du).sum((0, 1))

    def add_drive(
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
        drive, _, _ = self.scan.of(len(inputs[0]))
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


def _taken(out: Tensor, kept: Sequence[Tensor | None], parts: int) -> list[Taken]:
    width = parts + 1
    return [Taken(h, kept[k * width], tuple(kept[k * width + 1 : (k + 1) * width])) for k, h in enumerate(out.unbind())]
