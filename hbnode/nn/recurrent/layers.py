"""Recurrent layers that filter their input with a rule, over whole sequences: :class:`MomentumRNN`,
:class:`MomentumLSTM`, :class:`MomentumGRU`.

If the rule is linear, v_t = mu_t v_{t-1} + s (W x_t + b), and v_0 = 0, then v_t is W applied to filtered x, and torch's
layer runs over that. Momentum carried over from an earlier chunk, v_0, decays with mu_1 ... mu_t. Until it falls below
float precision, and with rules that are not linear, the cell needs d_t = rule(g_1, ..., g_t) sample by sample.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from hbnode._checks import as_count, check_bool
from hbnode._torch import cpu_has_layer, fused_layer, is_autocast, is_exporting, no_autocast, untraced
from hbnode.nn._filter import linear_filter
from hbnode.nn.recurrent.batch import SequenceBatch
from hbnode.nn.recurrent.cells import (
    CellOutput,
    CellStep,
    GRUStep,
    LSTMStep,
    Weights,
    check_weight_norm,
    elman_step,
    init_gates_,
    non_defaults,
    parameter_shapes,
)
from hbnode.nn.recurrent.export import StockLayers, plain_layer
from hbnode.nn.recurrent.scan import BLOCK, Scan
from hbnode.nn.recurrent.state import InitialState, RecurrentState, given_state, read_state
from hbnode.nn.rules import LinearRule, Memory, Rule, RuleName, make_rule, memory_dtype, needs_plain

SMALL_PRODUCT = 2**21  # this many multiplications a sample take no longer than the calls of a scan's step


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

    def map(self, function: Callable[[Tensor], Tensor]) -> "LayerState":
        """The same with a function applied to every tensor."""
        return LayerState(function(self.h), None if self.c is None else function(self.c), self.memory.map(function))

    @staticmethod
    def combine(states: Sequence["LayerState"], function: Callable[[list[Tensor]], Tensor]) -> "LayerState":
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
            return self._run_from_rest(self.rule, batch, x, weights, state)
        memory, since = state.memory, state.memory.t
        if memory.is_empty:
            memory = self.rule.start(x.new_empty(x.shape[1], len(weights.w)))
        state, out = LayerState(state.h, state.c, memory), []
        ended: list[LayerState] = []
        for time, count in batch.segments():
            ended.insert(0, state.map(operator.itemgetter(slice(count, None))))
            h, c, memory = state.map(operator.itemgetter(slice(count)))
            t = None if since is None else (since[:count] if isinstance(since, Tensor) else since) + time.start
            h, state = self._run_from_state(LayerState(h, c, memory._replace(t=t)), x[time, :count], weights)
            out.append(pad(h, (0, 0, 0, x.shape[1] - count)) if count < x.shape[1] else h)
        if len(out) == 1:
            return out[0], state
        return torch.cat(out), LayerState.combine([state, *ended], torch.cat)

    def _run_from_rest(
        self, rule: LinearRule, batch: SequenceBatch, x: Tensor, weights: Weights, state: LayerState
    ) -> tuple[Tensor, LayerState]:
        """From v_0 = 0 by a linear rule: the cell over filtered x."""
        x, w, b = _filter_x(rule, x, weights, state.memory.t)
        v = linear(batch.last(x), w, b).to(memory_dtype(x.dtype))
        h, last = self._cell(batch, x, w, b, weights, CellOutput(state.h, state.c))
        return h, LayerState(last.h, last.c, Memory(v))

    def _run_from_state(self, state: LayerState, x: Tensor, weights: Weights) -> tuple[Tensor, LayerState]:
        """From any state by any rule, over sequences of one length."""
        if not isinstance(self.rule, LinearRule):
            return self._run_over_d(x, weights, state)
        fading = _decay_steps(self.rule, len(x), state.memory.t, x.dtype)
        if len(x) - fading < BLOCK:
            return self._run_over_d(x, weights, state)
        filtered, w, b = _filter_x(self.rule, x, weights, state.memory.t)
        v, first = linear(filtered[-1], w, b).to(memory_dtype(x.dtype)), []
        if fading:
            h, state = self._run_over_d(x[:fading], weights, state)
            first = [h]
        start = CellOutput(state.h, state.c)
        rest, last = self._cell(SequenceBatch(x), filtered[fading:], w, b, weights, start)
        return torch.cat([*first, rest]), LayerState(last.h, last.c, Memory(v))

    def _run_over_d(self, x: Tensor, weights: Weights, state: LayerState) -> tuple[Tensor, LayerState]:
        """From any state by any rule: torch's layer over d_t, or a scan that filters as it goes."""
        start = CellOutput(state.h, state.c)
        if self._is_for_stock(x, weights):
            h, last, memory = self._run_stock_over_d(x, weights, start, state.memory)
        else:
            scan = Scan(self.step, self.rule, self.compile)
            h, last, memory = scan(x, (weights.w, weights.b), (weights.u, weights.bias), start, state.memory)
        return h, LayerState(last.h, last.c, memory)

    def _is_for_stock(self, x: Tensor, weights: Weights) -> bool:
        """Whether torch's layer over d_t, which multiplies with W = I, is faster than a scan of many calls."""
        product = x.shape[1] * len(weights.u) ** 2
        return self.stock is not None and (x.is_cuda or (product <= SMALL_PRODUCT and not self.compile))

    def _run_stock_over_d(
        self, x: Tensor, weights: Weights, start: CellOutput, memory: Memory
    ) -> tuple[Tensor, CellOutput, Memory]:
        """The cell over d_t of all samples, or, without gradient, of a part of them at a time."""
        run = self if x.is_cuda else dataclasses.replace(self, autocast=False)
        u, out = weights.u, []
        w = torch.eye(len(u), dtype=u.dtype, device=u.device)
        for part in [x] if torch.is_grad_enabled() else x.split(self._rows(x, weights)):
            d, memory = self._filter_input(part, weights, memory)
            h, start = run._cell(SequenceBatch(d), d, w, None, weights, start)
            out.append(h)
        return torch.cat(out) if len(out) > 1 else out[0], start, memory

    def _rows(self, x: Tensor, weights: Weights) -> int:
        """Number of samples that are filtered at once: few calls, and little memory."""
        return max(BLOCK, 2**19 // max(1, x.shape[1] * len(weights.w)))

    def _filter_input(self, x: Tensor, weights: Weights, memory: Memory) -> tuple[Tensor, Memory]:
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
        kind = x.device.type
        in_half = self.autocast and (kind != "cpu" or cpu_has_layer(self.stock, torch.get_autocast_dtype(kind)))
        with torch.autocast(kind) if in_half else nullcontext():
            return _stock(self.stock, batch, x, start, flat)


def _filter_x(
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


def _decay_steps(rule: LinearRule, steps: int, t: int | Tensor | None, dtype: torch.dtype) -> int:
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


class RecurrentLayer(nn.Module):
    """Base of the layers: runs a cell over sequences, in one or several layers.

    Arguments:
        step: the cell's step.
        stock: name of torch's layer of this cell in ``torch._VF``, or None.
        input_size: see :class:`MomentumLSTM`, likewise all that follow.
        hidden_size: number of features of h.
        num_layers: number of stacked layers.
        bias: whether there are biases.
        batch_first: whether the batch axis comes first.
        dropout: probability of dropping an output between layers.
        bidirectional: whether a second cell runs backwards in time.
        rule: filters the input.
        compile: whether a scan over time compiles its steps.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        step: CellStep,
        stock: str | None,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
        rule: Rule,
        compile: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.step, self.stock = step, stock
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.num_layers = as_count(num_layers, "num_layers")
        self.rule = rule
        self.bias, self.batch_first = check_bool(bias, "bias"), check_bool(batch_first, "batch_first")
        self.bidirectional, self.is_compiled = check_bool(bidirectional, "bidirectional"), compile
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout!r}. Fix: the share of outputs to be dropped.")
        if dropout and num_layers == 1:
            raise ValueError("dropout is applied between layers, and there is one. Fix: num_layers=2, or nn.Dropout.")
        self.dropout = dropout
        directions = 2 if bidirectional else 1
        for layer, suffix in self._places():
            size = self.input_size if layer == 0 else directions * self.hidden_size
            for name, shape in self._shapes(size).items():
                self.register_parameter(
                    f"{name}_l{layer}{suffix}", nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                )
        self.reset_parameters()

    if TYPE_CHECKING:

        @override
        def __getattr__(self, name: str) -> Tensor:
            """Parameters: weight_ih_l0 and the like."""

        @overload
        def __call__(
            self, x: Tensor, state: InitialState = None, *, hx: InitialState = None
        ) -> tuple[Tensor, RecurrentState]: ...
        @overload
        def __call__(
            self, x: PackedSequence, state: InitialState = None, *, hx: InitialState = None
        ) -> tuple[PackedSequence, RecurrentState]: ...
        @override
        def __call__(
            self, x: Tensor | PackedSequence, state: InitialState = None, *, hx: InitialState = None
        ) -> tuple[Tensor | PackedSequence, RecurrentState]:
            return self.forward(x, state, hx=hx)

    def _places(self) -> itertools.product:
        """Layers and directions, in the order of the state's first axis."""
        return itertools.product(range(self.num_layers), ("", "_reverse") if self.bidirectional else ("",))

    def _shapes(self, input_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of a layer in one direction."""
        return parameter_shapes(self.step, input_size, self.hidden_size, self.bias)

    def _names(self) -> list[str]:
        """Names of all parameters."""
        return [f"{name}_l{layer}{suffix}" for layer, suffix in self._places() for name in self._shapes(1)]

    def reset_parameters(self) -> None:
        """Appendix A: W_ih orthogonal, W_hh with ones on its diagonal, the biases 0."""
        init_gates_(self, self._names(), self.hidden_size)

    @untraced  # a loop over time is not a graph; torch.compile skips torch.nn's layers too
    def forward(
        self,
        x: Tensor | PackedSequence,
        state: InitialState = None,
        *,
        hx: InitialState = None,
    ) -> tuple[Tensor | PackedSequence, RecurrentState]:
        """Run over sequences, from their start or from where an earlier chunk ended.

        Arguments:
            x: (T, batch, input_size), with ``batch_first`` (batch, T, input_size), or one sequence (T, input_size),
                or a PackedSequence.
            state: the state that an earlier call returned; or h, or (h, c) of an LSTM, at the start of a sequence; None
                is zeros.
            hx: the same under torch.nn's name.

        Returns:
            h at every sample, in the form of x and directions * hidden_size wide, and the state after the last.

        Raises:
            TypeError: x is not floating point.
            ValueError: x or the state has another shape than expected.
        """
        check_weight_norm(self)
        batch = SequenceBatch.read(x, self.input_size, self.batch_first)
        states, t = self._read_state(given_state(state, hx), batch)
        run = LayerExecutor(self.step, self.rule, self.stock, self.is_compiled, is_autocast(batch.x))
        with no_autocast(batch.x):
            out, ended = self._run(run, batch, states)
        return batch.output(out), self._make_state(ended, t, batch)

    def _run(
        self, run: LayerExecutor, batch: SequenceBatch, states: list[LayerState]
    ) -> tuple[Tensor, list[LayerState]]:
        """Run all layers from their states; return the output of the last (T, batch, n), and the states afterwards."""
        out, ended = batch.x, []
        for layer, of_layer in itertools.groupby(zip(self._places(), states, strict=True), key=lambda z: z[0][0]):
            if layer > 0 and self.dropout and self.training:
                out = nn.functional.dropout(out, self.dropout)
            sides = []
            for (_, suffix), start in of_layer:
                given = batch.reverse(out) if suffix else out
                h, end = run(batch, given, self._weights(f"_l{layer}{suffix}"), start)
                sides.append(batch.reverse(h) if suffix else h)
                ended.append(end)
            out = torch.cat(sides, dim=-1) if len(sides) > 1 else sides[0]
        return out, ended

    def _weights(self, suffix: str) -> Weights:
        """The parameters of a layer in one direction."""
        values = {name: getattr(self, name + suffix) for name in self._shapes(1)}
        return Weights(values["weight_ih"], values["weight_hh"], values.get("bias_ih"), values.get("bias_hh"))

    def _read_state(self, state: InitialState, batch: SequenceBatch) -> tuple[list[LayerState], int | Tensor | None]:
        """States of the layers and directions, and the number of samples before the first."""
        places = self.num_layers * (2 if self.bidirectional else 1)
        shape = () if batch.is_single else tuple(batch.x.shape[1:2])
        widths = self.hidden_size, self.step.gates * self.hidden_size
        state = read_state(state, self.rule, self.step.has_cell_state, widths, (places,), shape, batch.x)
        t: int | Tensor | None = state.t
        if isinstance(t, Tensor):
            t = batch.sort(t, axis=0)
            t = int(t[0]) if len(t) and not t.is_meta and bool((t == t[0]).all()) else t
        elif "t" in self.rule.memory:
            t = 0
        whole = LayerState(state.h, state.c, Memory(state.v, state.m, state.g)).map(lambda z: batch.sort(z, axis=1))
        each = (whole.map(operator.itemgetter(k)) for k in range(places))
        return [LayerState(h, c, Memory(*memory[:3], t)) for h, c, memory in each], t

    def _make_state(self, states: list[LayerState], t: int | Tensor | None, batch: SequenceBatch) -> RecurrentState:
        """The state of all layers and directions."""
        h, c, memory = LayerState.combine(states, lambda entries: batch.unsort(torch.stack(entries), axis=1))
        end = None if t is None else batch.unsort(t + batch.lengths, axis=0)
        return RecurrentState(h, c, memory.v, memory.m, memory.g, end)

    def flatten_parameters(self) -> None:
        """Do nothing: torch.nn's layers lay out their weights for cuDNN here; these layers do so at each call."""

    def to_stock(self) -> StockLayers:
        """Return a copy for inference and deployment: layers of torch.nn, each with a filter before it.

        It is called as ``output, state = stock(x)`` for sequences from their start, with torch.nn's state. If the rule
        is linear, the filter runs over the inputs. With other rules it runs over W x + b, and W of the plain layer is
        the identity. Dropout is left out.

        Raises:
            ValueError: torch.nn has no layer of this cell.
        """
        if self.stock is None:
            raise ValueError(f"torch.nn has no layer of the cell of {type(self).__name__}. Fix: export its cell.")
        pairs = [plain_layer(self.stock, self.rule, self._weights(f"_l{k}{suffix}")) for k, suffix in self._places()]
        filters, layers = [before for before, _ in pairs], [layer for _, layer in pairs]
        return StockLayers(filters, layers, 2 if self.bidirectional else 1, self.batch_first)

    def extra_repr(self) -> str:
        """Sizes, rule, and what differs from the defaults."""
        parts = [f"{self.input_size}, {self.hidden_size}", f"rule={self.rule}", *non_defaults(self)]
        return ", ".join([*parts, "compile=True"] if self.is_compiled else parts)


class MomentumRNN(RecurrentLayer):
    """An Elman network that filters its input.

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        h_t = tanh(U h_{t-1} + b_hh + d_t)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers. Default: ``1``.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        dropout: probability of dropping an output between layers in training. Default: ``0.0``.
        bidirectional: whether a second cell runs backwards in time. Default: ``False``.
        nonlinearity: "tanh", or "relu" in its place. Default: ``"tanh"``.
        rule: the filter by its name, see :class:`MomentumLSTM`, or as an object of :mod:`hbnode.nn.rules`.
            Default: ``"momentum"``.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        compile: whether to compile the scan over time with torch.compile. Default: ``False``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h and what the rule remembers, each (layers * directions, batch, hidden_size).

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.

    Example:
        >>> output, state = MomentumRNN(3, 5, nonlinearity="relu", rule="nag")(torch.ones(7, 2, 3))
        >>> output.shape, state.v.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        rule: RuleName | Rule = "momentum",
        momentum: float | None = None,
        step_size: float | None = None,
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.nonlinearity = nonlinearity
        step, stock, rule = elman_step(nonlinearity), f"rnn_{nonlinearity}", make_rule(rule, momentum, step_size)
        options = bias, batch_first, dropout, bidirectional, rule, compile, device, dtype
        super().__init__(step, stock, input_size, hidden_size, num_layers, *options)


class MomentumLSTM(RecurrentLayer):
    """An LSTM that filters its input: MomentumLSTM, and by its rule NAG-LSTM, SRLSTM, AdamLSTM, RMSPropLSTM.

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    If the rule is linear, d_t is W applied to filtered inputs, and torch's own layer runs over these. With other rules,
    and while the momentum of an earlier chunk decays, the cell runs over d_t; large cells on the CPU run in a scan
    written for that purpose.

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    equations 9, 14, 15.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers. Default: ``1``.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        dropout: probability of dropping an output between layers in training. Default: ``0.0``.
        bidirectional: whether a second cell runs backwards in time. Default: ``False``.
        forget_bias: initial bias of the forget gate in b_ih and in b_hh. Default: ``1.0``.
        rule: the filter: "momentum", "nag" (Nesterov's accelerated gradient), "restart" (NAG with scheduled restart),
            "adam", "rmsprop" or "adaptive" (momentum that the inputs set), with its usual numbers; or an object of
            :mod:`hbnode.nn.rules`, which has numbers of its own: ``rule=Adam(beta=0.99)``.
            ``Momentum(0.0, 1.0)`` makes a torch.nn.LSTM; each loads the other's weights. Default: ``"momentum"``.
        momentum: μ of a rule given by name, in [0, 1]; "momentum" and "adam" have it. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive; all have it. Default: ``None``, 0.6.
        compile: whether to compile the scan over time with torch.compile; the first call then takes half a minute.
            Default: ``False``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h and c (layers * directions, batch, hidden_size), what the rule remembers 4 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.

    Example:
        >>> layer = MomentumLSTM(3, 5, momentum=0.9, batch_first=True)
        >>> output, state = layer(torch.ones(2, 7, 3))
        >>> output.shape, state.c.shape, state.v.shape
        (torch.Size([2, 7, 5]), torch.Size([1, 2, 5]), torch.Size([1, 2, 20]))
        >>> MomentumLSTM(3, 5, rule="adam", step_size=0.1)
        MomentumLSTM(3, 5, rule=Adam(momentum=0.6, step_size=0.1, beta=0.9, eps=1e-08))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        forget_bias: float = 1.0,
        rule: RuleName | Rule = "momentum",
        momentum: float | None = None,
        step_size: float | None = None,
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.forget_bias = forget_bias
        rule = make_rule(rule, momentum, step_size)
        options = bias, batch_first, dropout, bidirectional, rule, compile, device, dtype
        super().__init__(LSTMStep(), "lstm", input_size, hidden_size, num_layers, *options)

    def reset_parameters(self) -> None:
        """Appendices A and F: W_ih orthogonal, W_hh with ones on its diagonal, the biases 0 but at the forget gate."""
        init_gates_(self, self._names(), self.hidden_size, forget_bias=self.forget_bias)


class MomentumGRU(RecurrentLayer):
    """A GRU that filters its input; the gates are those of torch.nn.GRU.

    With g_t = W x_t + b_ih::

        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2, which puts momentum into any cell.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers. Default: ``1``.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        dropout: probability of dropping an output between layers in training. Default: ``0.0``.
        bidirectional: whether a second cell runs backwards in time. Default: ``False``.
        rule: the filter by its name, see :class:`MomentumLSTM`, or as an object of :mod:`hbnode.nn.rules`.
            Default: ``"momentum"``.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        compile: whether to compile the scan over time with torch.compile. Default: ``False``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h (layers * directions, batch, hidden_size), what the rule remembers 3 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.

    Example:
        >>> output, state = MomentumGRU(3, 5, rule="rmsprop")(torch.ones(7, 2, 3))
        >>> output.shape, state.m.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 15]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        rule: RuleName | Rule = "momentum",
        momentum: float | None = None,
        step_size: float | None = None,
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = make_rule(rule, momentum, step_size)
        options = bias, batch_first, dropout, bidirectional, rule, compile, device, dtype
        super().__init__(GRUStep(), "gru", input_size, hidden_size, num_layers, *options)
