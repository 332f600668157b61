"""Runs one layer in one direction: torch's own layer over filtered input, or a scan over time.

If the rule is linear, v_t = mu_t v_{t-1} + s (W x_t + b), and v_0 = 0, then v_t is W applied to filtered x, and torch's
layer runs over that. Momentum carried over from an earlier chunk, v_0, decays with mu_1 ... mu_t. Until it falls below
float precision, and with rules that are not linear, the cell needs d_t = rule(g_1, ..., g_t) sample by sample.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from hbnode._torch import fused_layer, is_exporting
from hbnode.recurrent import autocast
from hbnode.recurrent.batch import SequenceBatch
from hbnode.recurrent.cell_steps import CellOutput, CellStep
from hbnode.recurrent.filter import linear_filter
from hbnode.recurrent.rules import LinearRule, Memory, Rule, memory_dtype, needs_plain
from hbnode.recurrent.scan import BLOCK, Scan

SMALL_PRODUCT = 2**21  # this many multiplications a sample take no longer than the calls of a scan's step


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of one layer in one direction.

    Attributes:
        w: W_ih (gates * hidden_size, input_size).
        u: W_hh (gates * hidden_size, hidden_size).
        b: b_ih (gates * hidden_size,), or None.
        bias: b_hh (gates * hidden_size,), or that of the activation (hidden_size,), or None.
    """

    w: Tensor
    u: Tensor
    b: Tensor | None
    bias: Tensor | None


class LayerState(NamedTuple):
    """The state of one layer in one direction.

    Attributes:
        h: (batch, hidden_size).
        c: (batch, hidden_size) of an LSTM.
        memory: of the rule; its t is a number unless it differs between sequences.
    """

    h: Tensor
    c: Tensor | None
    memory: Memory

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerState:
        """The same with a function applied to every tensor."""
        return LayerState(function(self.h), None if self.c is None else function(self.c), self.memory.map(function))

    @staticmethod
    def combine(states: Sequence[LayerState], function: Callable[[list[Tensor]], Tensor]) -> LayerState:
        """One state, whose entries are a function of the entries of several; without t."""
        entries = zip(*((state.h, state.c, *state.memory[:3]) for state in states), strict=True)
        h, c, v, m, g = (None if parts[0] is None else function(list(parts)) for parts in entries)
        assert h is not None
        return LayerState(h, c, Memory(v, m, g))


@dataclasses.dataclass(frozen=True)
class LayerExecutor:
    """Runs a cell with a rule over whole sequences.

    Arguments:
        step: the cell's step.
        rule: filters the input.
        stock: name of torch's layer in ``torch._VF``; None if there is none.
        compile: whether a scan compiles its steps.
        autocast: whether torch's layer runs under autocast; all else keeps the dtype of the parameters.
    """

    step: CellStep
    rule: Rule
    stock: str | None
    compile: bool
    autocast: bool

    def __call__(
        self, batch: SequenceBatch, x: Tensor, weights: Weights, state: LayerState
    ) -> tuple[Tensor, LayerState]:
        """Run over a batch.

        Arguments:
            batch: which samples are padding.
            x: inputs (T, batch, input_size).
            weights: the parameters.
            state: the state before the first sample.

        Returns:
            h (T, batch, hidden_size), and the state after the last sample of each sequence, but for t.
        """
        if self.autocast:
            x, kept = x.to(weights.w), memory_dtype(weights.w.dtype)
            h, c, memory = state.map(lambda z: z.to(kept) if z.is_floating_point() else z)
            state = LayerState(h.to(x.dtype), None if c is None else c.to(x.dtype), memory)
        elif x.dtype != weights.w.dtype:
            raise ValueError(
                f"x must be {weights.w.dtype} as the parameters are, got {x.dtype}. "
                f"Fix: x.to({weights.w.dtype}), or layer.to({x.dtype})."
            )
        if state.memory.is_empty and isinstance(self.rule, LinearRule):
            return self._from_rest(self.rule, batch, x, weights, state)
        memory, since = state.memory, state.memory.t
        if memory.is_empty:
            memory = self.rule.start(x.new_empty(x.shape[1], len(weights.w)))
        state, out = LayerState(state.h, state.c, memory), []
        ended: list[LayerState] = []
        for time, count in batch.segments():
            ended.insert(0, state.map(operator.itemgetter(slice(count, None))))
            h, c, memory = state.map(operator.itemgetter(slice(count)))
            t = None if since is None else (since[:count] if isinstance(since, Tensor) else since) + time.start
            h, state = self._from(LayerState(h, c, memory._replace(t=t)), x[time, :count], weights)
            out.append(pad(h, (0, 0, 0, x.shape[1] - count)) if count < x.shape[1] else h)
        if len(out) == 1:
            return out[0], state
        return torch.cat(out), LayerState.combine([state, *ended], torch.cat)

    def _from_rest(
        self, rule: LinearRule, batch: SequenceBatch, x: Tensor, weights: Weights, state: LayerState
    ) -> tuple[Tensor, LayerState]:
        """From v_0 = 0 by a linear rule: the cell over filtered x."""
        x, w, b = _filtered_x(rule, x, weights, state.memory.t)
        v = linear(batch.last(x), w, b).to(memory_dtype(x.dtype))
        h, last = self._cell(batch, x, w, b, weights, CellOutput(state.h, state.c))
        return h, LayerState(last.h, last.c, Memory(v))

    def _from(self, state: LayerState, x: Tensor, weights: Weights) -> tuple[Tensor, LayerState]:
        """From any state by any rule, over sequences of one length."""
        if not isinstance(self.rule, LinearRule):
            return self._sample_by_sample(x, weights, state)
        fading = _fading(self.rule, len(x), state.memory.t, x.dtype)
        if len(x) - fading < BLOCK:
            return self._sample_by_sample(x, weights, state)
        filtered, w, b = _filtered_x(self.rule, x, weights, state.memory.t)
        v, first = linear(filtered[-1], w, b).to(memory_dtype(x.dtype)), []
        if fading:
            h, state = self._sample_by_sample(x[:fading], weights, state)
            first = [h]
        start = CellOutput(state.h, state.c)
        rest, last = self._cell(SequenceBatch(x), filtered[fading:], w, b, weights, start)
        return torch.cat([*first, rest]), LayerState(last.h, last.c, Memory(v))

    def _sample_by_sample(self, x: Tensor, weights: Weights, state: LayerState) -> tuple[Tensor, LayerState]:
        """From any state by any rule: torch's layer over d_t, or a scan that filters as it goes."""
        start = CellOutput(state.h, state.c)
        if self._is_for_stock(x, weights):
            h, last, memory = self._over_filtered_input(x, weights, start, state.memory)
        else:
            scan = Scan(self.step, self.rule, self.compile)
            h, last, memory = scan(x, (weights.w, weights.b), (weights.u, weights.bias), start, state.memory)
        return h, LayerState(last.h, last.c, memory)

    def _is_for_stock(self, x: Tensor, weights: Weights) -> bool:
        """Whether torch's layer over d_t, which multiplies with W = I, is faster than a scan of many calls."""
        product = x.shape[1] * len(weights.u) ** 2
        return self.stock is not None and (x.is_cuda or (product <= SMALL_PRODUCT and not self.compile))

    def _over_filtered_input(
        self, x: Tensor, weights: Weights, start: CellOutput, memory: Memory
    ) -> tuple[Tensor, CellOutput, Memory]:
        """The cell over d_t of all samples, or, without gradient, of a part of them at a time."""
        run = self if x.is_cuda else dataclasses.replace(self, autocast=False)
        u, out = weights.u, []
        w = torch.eye(len(u), dtype=u.dtype, device=u.device)
        for part in [x] if torch.is_grad_enabled() else x.split(self._rows(x, weights)):
            d, memory = self._filtered_input(part, weights, memory)
            h, start = run._cell(SequenceBatch(d), d, w, None, weights, start)
            out.append(h)
        return torch.cat(out) if len(out) > 1 else out[0], start, memory

    def _rows(self, x: Tensor, weights: Weights) -> int:
        """Number of samples that are filtered at once: few calls, and little memory."""
        return max(BLOCK, 2**19 // max(1, x.shape[1] * len(weights.w)))

    def _filtered_input(self, x: Tensor, weights: Weights, memory: Memory) -> tuple[Tensor, Memory]:
        """Filter the input of a sequence, and keep nothing but x for the backward pass."""

        def filtered(x: Tensor, w: Tensor, b: Tensor | None, memory: Memory) -> tuple[Tensor, Memory]:
            return self.rule.filter_blocks((linear(block, w, b) for block in x.split(rows)), memory)

        rows = self._rows(x, weights)
        if not torch.is_grad_enabled() or needs_plain():
            return filtered(x, weights.w, weights.b, memory)
        return checkpoint(filtered, x, weights.w, weights.b, memory, use_reentrant=False, preserve_rng_state=False)

    def _cell(
        self, batch: SequenceBatch, x: Tensor, w: Tensor, b: Tensor | None, weights: Weights, start: CellOutput
    ) -> tuple[Tensor, CellOutput]:
        """The cell over a sequence whose input is w x + b."""
        u, bias = weights.u, weights.bias
        if self.stock is None:
            h, _, _ = Scan(self.step, None, self.compile)(linear(x, w, b), (None, None), (u, bias), start, Memory())
            return h, CellOutput(batch.last(h))
        has_bias = b is not None or bias is not None
        zero = u.new_zeros(len(u))
        flat = [w, u, zero if b is None else b, zero if bias is None else bias] if has_bias else [w, u]
        with autocast.switched(x, on=self.autocast and autocast.runs(self.stock, x)):
            return _stock(self.stock, batch, x, start, flat)


def _filtered_x(
    rule: LinearRule, x: Tensor, weights: Weights, t: int | Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Filter x from v_0 = 0; return it with the W and b that turn it into v."""
    mu, s = rule.coefficients(t, x.shape[0]), rule.step_size  # a trace of a shape, not of len(x), is for any length
    w, b = weights.w, weights.b
    if not x.shape[1] or not (is_exporting() or mu.any()):  # nothing to filter, and with s = 1 nothing to do
        return (x, w, b) if s == 1 else (s * x, w, None if b is None else s * b)
    if b is not None:  # b is the weight of an input that is 1 before it is filtered
        x, w = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1), torch.cat([w, b.unsqueeze(1)], dim=1)
    return linear_filter(x, mu, s), w, None


def _fading(rule: LinearRule, steps: int, t: int | Tensor | None, dtype: torch.dtype) -> int:
    """Number of samples until v_0, even if much larger than what follows, decays below float precision."""
    if isinstance(t, Tensor):
        return steps
    decay = rule.coefficients(t, steps).cumprod(0)
    return int((decay.abs() >= torch.finfo(dtype).eps ** 2).sum())


def _stock(
    name: str, batch: SequenceBatch, x: Tensor, start: CellOutput, flat: list[Tensor]
) -> tuple[Tensor, CellOutput]:
    """Torch's own layer."""
    state = start.h.unsqueeze(0) if start.c is None else (start.h.unsqueeze(0), start.c.unsqueeze(0))
    if batch.sizes is None:
        out, *last = fused_layer(name, x, state, flat)
    else:
        out, *last = fused_layer(name, batch.select(x), state, flat, batch.sizes)
        out = batch.pad(out)
    h, *c = (z.squeeze(0) for z in last)
    return out, CellOutput(h, c[0] if c else None)
