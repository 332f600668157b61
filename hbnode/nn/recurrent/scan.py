"""A cell over a whole sequence, with any rule: a loop over time with its transpose written out.

The scan works in blocks. It keeps only the outputs of the steps of each block. The filtered input, which is larger, is
computed again in the backward pass and differentiated there by autograd. With ``compile`` the steps of a block are one
compiled function.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from hbnode.nn.recurrent.cells import CellOutput, CellStep, Gradients
from hbnode.nn.rules import LinearRule, Memory, Rule, needs_plain, refuse_second_derivative

BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Scan:
    """The work at each sample.

    Arguments:
        step: the cell's step.
        rule: filters g = W x + b; None if x is d, the filtered input.
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
        memory: Memory,
    ) -> tuple[Tensor, CellOutput, Memory]:
        """Run over a sequence.

        Arguments:
            x: inputs (T, batch, n), or d.
            weights: W and b.
            recurrent: U, and b_hh or the bias of the activation.
            start: h_0 and c_0.
            memory: memory of the rule before the first sample; empty without a rule.

        Returns:
            h (T, batch, n), the last h and c, and the memory after the last sample.
        """
        if needs_plain():
            return self._plain(x, weights, recurrent, start, memory)
        h, c, v, m, g = _Scan.apply(
            self, torch.is_grad_enabled(), memory.t, x, *weights, *recurrent, start.h, start.c, *memory[:3]
        )
        t = None if memory.t is None else memory.t + len(x)
        return h, CellOutput(h[-1], c), Memory(v, m, g, t)

    def _plain(
        self,
        x: Tensor,
        weights: tuple[Tensor | None, Tensor | None],
        recurrent: tuple[Tensor, Tensor | None],
        start: CellOutput,
        memory: Memory,
    ) -> tuple[Tensor, CellOutput, Memory]:
        """The same by operations that autograd knows."""
        (u, bias), t = recurrent, memory.t
        d, memory = self.filter(x, *weights, memory)
        after = self.step.run(*self.step.prepare(d, bias), u.T, bias, start)
        last = CellOutput(after.h[-1], None if after.c is None else after.c[-1])
        return after.h, last, memory._replace(t=None if t is None else t + len(x))

    def filter(self, x: Tensor, w: Tensor | None, b: Tensor | None, memory: Memory) -> tuple[Tensor, Memory]:
        """The filtered input of a block."""
        if self.rule is None or w is None:
            return x, memory
        return self.rule(linear(x, w, b), memory)

    def forward(
        self, d: Tensor, u: Tensor, bias: Tensor | None, before: CellOutput, out: Tensor | None = None
    ) -> CellOutput:
        """The steps of a block, stacked; u is the transpose of U."""
        return self.step.run(*self.step.prepare(d, bias), u, bias, before, out)

    def backward(
        self, grad: Tensor, dh: Tensor, dc: Tensor | None, u: Tensor, before: CellOutput, after: CellOutput
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The transpose of a block.

        Arguments:
            grad: gradient of h at the samples of the block (T, batch, n).
            dh: gradient of the last h from after the block.
            dc: likewise of the last c.
            u: U.
            before: the outputs of the steps before each step of the block.
            after: the outputs of the steps of the block.

        Returns:
            Gradients of d and of a at each sample, and of h and c before the block.
        """
        factors = zip(*(factor.unbind() for factor in self.step.factors(before, after)), strict=True)
        found: list[Gradients] = []
        for grad_t, of_t in zip(reversed(grad.unbind()), reversed(list(factors)), strict=True):
            found.append(self.step.backward(dh + grad_t, dc, *of_t))
            dh, dc = found[-1].a @ u, found[-1].c
            dh = dh if found[-1].h is None else dh + found[-1].h
        da = torch.stack([gradients.a for gradients in reversed(found)])
        rests = [gradients.rest for gradients in reversed(found) if gradients.rest is not None]
        return self.step.input_gradient(da, torch.stack(rests) if rests else None), da, dh, dc

    def functions(self, x: Tensor, u: Tensor) -> tuple[Callable, Callable, Callable]:
        """Return filter, forward and backward for a block of x; a shorter one at the end is not worth compiling."""
        if self.compile and len(x) == BLOCK:
            return _compiled(self, x.shape, u.shape, x.dtype, x.device)
        return self.filter, self.forward, self.backward


@functools.lru_cache(maxsize=256)
def _compiled(scan: Scan, *of: object) -> tuple[Callable, Callable, Callable]:
    """Separate programs for each shape, dtype and device."""
    is_light = scan.rule is None or isinstance(scan.rule, LinearRule)
    return scan.filter if is_light else _program(scan.filter), _program(scan.forward), _program(scan.backward)


def _program(method: Callable) -> Callable:
    """Compile a method; its code is a copy, because torch limits how often one code is compiled for other shapes."""
    assert isinstance(method, types.MethodType)
    function: Any = method.__func__
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(types.MethodType(copied, method.__self__), dynamic=False)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
        v: Tensor | None,
        m: Tensor | None,
        g: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        memory, last = Memory(v, m, g, t), CellOutput(h, c)
        blocks: list[CellOutput] = []
        memories: list[Memory] = []
        out, u_t = h.new_empty(len(x), *h.shape), u.T.contiguous()
        for block, place in zip(x.split(BLOCK), out.split(BLOCK), strict=True):
            filtered, forward, _ = scan.functions(block, u)
            memories.append(memory)
            d, memory = filtered(block, w, b, memory)
            memory = memory.map(torch.clone)  # else it would keep the block that it is a view of
            if forward == scan.forward:
                after = forward(d, u_t, bias, last, place)
            else:
                after = forward(d, u_t, bias, last)
                place.copy_(after.h)
            last = CellOutput(place[-1], None if c is None else after.c[-1].clone())
            blocks += [after] if keeps else []
        if not keeps:
            return out, last.c, *memory[:3]
        ctx.scan, ctx.times = scan, [memory.t for memory in memories]
        saved = [z for memory in memories for z in memory[:3]]
        saved += [z for after in blocks for z in (after.c, *after.parts)]
        ctx.save_for_backward(x, w, b, u, bias, h, c, out, *saved)
        ctx.set_materialize_grads(False)
        return out, last.c, *memory[:3]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, dc: Tensor | None, *dkept: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a scan over time")
        dmemory = list(dkept)
        scan = ctx.scan
        x, w, b, u, bias, h, c, out, *kept = ctx.saved_tensors
        cut = 3 * len(ctx.times)
        memories = [Memory(kept[3 * k], kept[3 * k + 1], kept[3 * k + 2], t) for k, t in enumerate(ctx.times)]
        blocks = _block_outputs(CellOutput(h, c), out, kept[cut:], len(memories))
        grad = torch.zeros_like(out) if grad is None else grad
        dh, dc = torch.zeros_like(h), torch.zeros_like(c) if dc is None and c is not None else dc
        sums = _Sums(scan, u, bias)
        dx = torch.empty_like(x) if ctx.needs_input_grad[3] else None
        for k in reversed(range(len(memories))):
            at = slice(k * BLOCK, min((k + 1) * BLOCK, len(x)))
            before, after = blocks[k]
            _, _, backward = scan.functions(x[at], u)
            dd, da, dh, dc = backward(grad[at], dh, dc, u, before, after)
            sums.add_recurrent(da, before.h, after.h)
            dx_block, *dmemory = sums.add_filter((x[at], w, b), memories[k], (dd, *dmemory))
            if dx is not None and dx_block is not None:
                dx[at] = dx_block
        return None, None, None, dx, sums.w, sums.b, sums.u, sums.bias, dh, dc, *dmemory


class _Sums:
    """Gradients of the parameters, block by block."""

    def __init__(self, scan: Scan, u: Tensor, bias: Tensor | None) -> None:
        self.scan = scan
        self.u = torch.zeros_like(u)
        self.bias = None if bias is None else torch.zeros_like(bias)
        self.w: Tensor | None = None
        self.b: Tensor | None = None

    def add_recurrent(self, da: Tensor, before: Tensor, out: Tensor) -> None:
        """Add the gradients of U and its bias, from h before and after each step of the block."""
        self.u.addmm_(da.flatten(0, 1).T, before.flatten(0, 1))
        if self.bias is not None:
            self.bias += (da * out.sign() if self.scan.step.bias_is_inside else da).sum((0, 1))

    def add_filter(
        self,
        inputs: tuple[Tensor, Tensor | None, Tensor | None],
        memory: Memory,
        grads: tuple[Tensor | None, ...],
    ) -> tuple[Tensor | None, ...]:
        """Add the gradients of W and b; return those of x, and of v, m, g before the block.

        Arguments:
            inputs: x of the block, W, b.
            memory: memory of the rule before it.
            grads: gradients of d, and of v, m, g after the block.
        """
        if self.scan.rule is None:
            return grads[0], None, None, None
        filtered, _, _ = self.scan.functions(inputs[0], self.u)
        with torch.enable_grad():
            leaves = [None if z is None else z.detach().requires_grad_() for z in (*inputs, *memory[:3])]
            x, w, b, v, m, g = leaves
            d, after = filtered(x, w, b, Memory(v, m, g, memory.t))
        made = [(z, dz) for z, dz in zip((d, *after[:3]), grads, strict=True) if dz is not None]
        asked = [z for z in leaves if z is not None]
        found = iter(torch.autograd.grad([z for z, _ in made], asked, [dz for _, dz in made], allow_unused=True))
        dx, dw, db, *rest = (None if z is None else next(found) for z in leaves)
        self.w = dw if self.w is None or dw is None else self.w.add_(dw)
        self.b = db if self.b is None or db is None else self.b.add_(db)
        return dx, *rest


def _block_outputs(
    start: CellOutput, out: Tensor, kept: Sequence[Any], blocks: int
) -> list[tuple[CellOutput, CellOutput]]:
    """For each block, the outputs of the steps before each of its steps, and of its steps.

    Arguments:
        start: h_0 and c_0.
        out: h of all samples.
        kept: of each block c, which is None without a cell state, and the intermediate values.
        blocks: how many.
    """
    width = len(kept) // blocks
    found, last = [], start
    for k, h in enumerate(out.split(BLOCK)):
        c, *parts = kept[k * width : (k + 1) * width]
        before = CellOutput(_shift(last.h, h), None if last.c is None else _shift(last.c, c))
        found.append((before, CellOutput(h, c, tuple(parts))))
        last = CellOutput(h[-1], None if c is None else c[-1])
    return found


def _shift(first: Tensor, y: Tensor) -> Tensor:
    """The sequence y one sample later, from a first value on."""
    return torch.cat([first.unsqueeze(0), y[:-1]])
