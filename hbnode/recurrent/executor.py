"""Ways to run one layer in one direction: torch's own layer over filtered inputs or ready drives, or a scan.

With a linear rule v_t = mu_t v_{t-1} + s (W x_t + b) from v_0 = 0, the momentum is W applied to filtered inputs, and
torch's layer does the rest. A v_0 that is carried over from an earlier chunk decays with mu_1 ... mu_t: until nothing
of it is left, and with rules that are not linear, the cell needs its drive sample by sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from hbnode.recurrent import autocast
from hbnode.recurrent.batch import SequenceBatch
from hbnode.recurrent.cell_steps import CellOutput, CellStep
from hbnode.recurrent.filter import linear_filter
from hbnode.recurrent.rules import Memory, Rule, memory_dtype
from hbnode.recurrent.scan import BLOCK, Scan
from hbnode.recurrent.state import RecurrentState

SMALL_PRODUCT = 2**21  # multiplications a sample, which take no longer than the calls of a scan's step


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of one layer in one direction.

    Attributes:
        w: W_ih (n, input_size).
        u: W_hh (gates * hidden_size, hidden_size).
        b: b_ih (n,), or None.
        bias: b_hh (gates * hidden_size,), or that of the activation (hidden_size,), or None.
        is_hidden: whether momentum lives in the space of h, so that n is hidden_size, and U multiplies the drive too.
    """

    w: Tensor
    u: Tensor
    b: Tensor | None
    bias: Tensor | None
    is_hidden: bool


@dataclasses.dataclass(frozen=True)
class LayerExecutor:
    """A cell with a rule, over whole sequences.

    Arguments:
        step: the cell's step.
        rule: how inputs drive it.
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
        self, batch: SequenceBatch, x: Tensor, weights: Weights, state: RecurrentState
    ) -> tuple[Tensor, RecurrentState]:
        """Run over a batch.

        Arguments:
            batch: what is padding.
            x: inputs (T, batch, input_size).
            weights: the parameters.
            state: before the first sample; t is a number unless it differs.

        Returns:
            h (T, batch, hidden_size), and the state after the last sample of each sequence, but for t.
        """
        if self.autocast:
            x, state = x.to(weights.w), state.map(lambda z: z.to(weights.w) if z.is_floating_point() else z)
        elif x.dtype != weights.w.dtype:
            raise ValueError(
                f"x must be {weights.w.dtype} as the parameters are, got {x.dtype}. "
                f"Fix: x.to({weights.w.dtype}), or layer.to({x.dtype})."
            )
        if state.is_fresh and self.rule.is_linear:
            return self._from_rest(batch, x, weights, state)
        if state.is_fresh:
            memory = self.rule.start(x.new_empty(x.shape[1], len(weights.w)))
            state = dataclasses.replace(state, v=memory.v, m=memory.m, g=memory.g)
        out, ended, since = [], [], state.t
        for time, count in batch.segments():
            ended.insert(0, state.map(lambda z, count=count: z[count:]))
            state = state.map(lambda z, count=count: z[:count])
            t = None if since is None else (since[:count] if isinstance(since, Tensor) else since) + time.start
            h, state = self._from(dataclasses.replace(state, t=t), x[time, :count], weights)
            out.append(pad(h, (0, 0, 0, x.shape[1] - count)) if count < x.shape[1] else h)
        if len(out) == 1:
            return out[0], state
        return torch.cat(out), _joined([state, *ended])

    def _from_rest(
        self, batch: SequenceBatch, x: Tensor, weights: Weights, state: RecurrentState
    ) -> tuple[Tensor, RecurrentState]:
        """From v_0 = 0 by a linear rule: the cell over filtered inputs."""
        x, w, b = self._filtered_x(x, weights, state.t)
        v = linear(batch.last(x), w, b).to(memory_dtype(x.dtype))
        h, taken = self._cell(batch, x, w, b, weights, CellOutput(state.h, state.c))
        return h, RecurrentState(taken.h, taken.c, v)

    def _from(self, state: RecurrentState, x: Tensor, weights: Weights) -> tuple[Tensor, RecurrentState]:
        """From any state by any rule, over sequences of one length."""
        fading = self._fading(len(x), state, x.dtype) if self.rule.is_linear and not weights.is_hidden else len(x)
        if len(x) - fading < BLOCK:
            return self._sample_by_sample(x, weights, state)
        filtered, w, b = self._filtered_x(x, weights, state.t)
        v, first = linear(filtered[-1], w, b).to(memory_dtype(x.dtype)), []
        if fading:
            h, state = self._sample_by_sample(x[:fading], weights, state)
            first = [h]
        rest, taken = self._cell(SequenceBatch(x), filtered[fading:], w, b, weights, CellOutput(state.h, state.c))
        return torch.cat([*first, rest]), RecurrentState(taken.h, taken.c, v)

    def _sample_by_sample(self, x: Tensor, weights: Weights, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """From any state by any rule, sample by sample: the cell over ready drives, or a scan that makes them."""
        memory, start = state.memory, CellOutput(state.h, state.c)
        if weights.is_hidden or self._is_for_stock(x, weights):
            h, taken, memory = self._over_filtered_input(x, weights, start, memory)
        else:
            scan = Scan(self.step, self.rule, self.compile)
            h, taken, memory = scan(x, (weights.w, weights.b), (weights.u, weights.bias), start, memory)
        return h, RecurrentState(taken.h, taken.c, *memory)

    def _is_for_stock(self, x: Tensor, weights: Weights) -> bool:
        """Whether torch's layer over ready drives, with a product with W = I, is faster than a scan of many calls."""
        product = x.shape[1] * len(weights.u) ** 2
        return self.stock is not None and (x.is_cuda or (product <= SMALL_PRODUCT and not self.compile))

    def _over_filtered_input(
        self, x: Tensor, weights: Weights, start: CellOutput, memory: Memory
    ) -> tuple[Tensor, CellOutput, Memory]:
        """The cell over the drive of all samples; without gradient of a part of them at a time."""
        run = self if x.is_cuda else dataclasses.replace(self, autocast=False)
        u, out = weights.u, []
        w = u if weights.is_hidden else torch.eye(len(u), dtype=u.dtype, device=u.device)
        for part in [x] if torch.is_grad_enabled() else x.split(self._rows(x, weights)):
            d, memory = self._filtered_input(part, weights, memory)
            h, start = run._cell(SequenceBatch(d), d, w, None, weights, start)
            out.append(h)
        return torch.cat(out) if len(out) > 1 else out[0], start, memory

    def _rows(self, x: Tensor, weights: Weights) -> int:
        """How many samples of a drive are made at once; few calls, and little memory."""
        return max(BLOCK, 2**19 // max(1, x.shape[1] * len(weights.w)))

    def _filtered_x(self, x: Tensor, weights: Weights, t: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs filtered from v_0 = 0, and the W and b that make the momentum of them."""
        mu, s = self.rule.coefficients(t, len(x)), self.rule.step_size
        w, b = weights.w, weights.b
        if not mu.any() or not x.shape[1]:  # nothing to filter, and with s = 1 nothing to do
            return (x, w, b) if s == 1 else (s * x, w, None if b is None else s * b)
        if b is not None:  # b is the weight of an input that is 1 before it is filtered
            x, w = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1), torch.cat([w, b.unsqueeze(1)], dim=1)
        return linear_filter(x, mu, s), w, None

    def _fading(self, steps: int, state: RecurrentState, dtype: torch.dtype) -> int:
        """How many samples it takes until v_0, even if much larger than what follows, has decayed to nothing."""
        if isinstance(state.t, Tensor):
            return steps
        decay = self.rule.coefficients(state.t, steps).cumprod(0)
        return int((decay >= torch.finfo(dtype).eps ** 2).sum())

    def _filtered_input(self, x: Tensor, weights: Weights, memory: Memory) -> tuple[Tensor, Memory]:
        """The drive of a sequence, of which nothing but x is kept for the backward pass."""

        def drive(x: Tensor, w: Tensor, b: Tensor | None, memory: Memory) -> tuple[Tensor, Memory]:
            return self.rule.filter_blocks((linear(block, w, b) for block in x.split(rows)), memory)

        rows = self._rows(x, weights)
        if not torch.is_grad_enabled():
            return drive(x, weights.w, weights.b, memory)
        return checkpoint(drive, x, weights.w, weights.b, memory, use_reentrant=False, preserve_rng_state=False)

    def _cell(
        self, batch: SequenceBatch, x: Tensor, w: Tensor, b: Tensor | None, weights: Weights, start: CellOutput
    ) -> tuple[Tensor, CellOutput]:
        """The cell over a sequence, driven by w x + b, or by U (w x + b) where momentum lives in the space of h."""
        u, bias = weights.u, weights.bias
        if weights.is_hidden and w is not u:
            w, b = u @ w, None if b is None else u @ b
        if self.stock is None:
            return self._scan_filtered(batch, linear(x, w, b), u, bias, start)
        has_bias = b is not None or bias is not None
        zero = u.new_zeros(len(u))
        flat = [w, u, zero if b is None else b, zero if bias is None else bias] if has_bias else [w, u]
        with autocast.switched(x, on=self.autocast and autocast.runs(self.stock, x)):
            return _stock(self.stock, batch, x, start, flat)

    def _scan_filtered(
        self, batch: SequenceBatch, d: Tensor, u: Tensor, bias: Tensor | None, start: CellOutput
    ) -> tuple[Tensor, CellOutput]:
        """A cell that torch has no layer of, over ready drives."""
        scan = Scan(self.step, None, self.compile)
        h, _, _ = scan(d, (None, None), (u, bias), start, None)
        return h, CellOutput(batch.last(h))


def _stock(
    name: str, batch: SequenceBatch, x: Tensor, start: CellOutput, flat: list[Tensor]
) -> tuple[Tensor, CellOutput]:
    """Torch's own layer; the weights are made anew for each call, which cuDNN would warn of."""
    state = start.h.unsqueeze(0) if start.c is None else (start.h.unsqueeze(0), start.c.unsqueeze(0))
    rest = (flat, len(flat) == 4, 1, 0.0, torch.is_grad_enabled(), False)
    layer = getattr(torch._VF, name)
    with warnings.catch_warnings() if x.is_cuda else contextlib.nullcontext():
        if x.is_cuda:
            warnings.filterwarnings("ignore", message=".*single contiguous chunk.*")
        if batch.sizes is None:
            out, *last = layer(x, state, *rest, False)
        else:
            out, *last = layer(batch.select(x), batch.sizes, state, *rest)
            out = batch.pad(out)
    return out, CellOutput(*(z.squeeze(0) for z in last))


def _joined(states: list[RecurrentState]) -> RecurrentState:
    """The states of parts of a batch as one, but for t."""
    entries = zip(*(dataclasses.replace(state, t=None).as_dict().items() for state in states), strict=True)
    return RecurrentState(**{parts[0][0]: torch.cat([z for _, z in parts]) for parts in entries})
