"""What all recurrent layers and all cells share: parameters, checks of the input, and reading and writing states."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from hbnode._checks import as_count, tensor_fix
from hbnode._torch import untraced
from hbnode.recurrent import autocast
from hbnode.recurrent.arguments import check_switch, given_state, read_state
from hbnode.recurrent.batch import SequenceBatch
from hbnode.recurrent.cell_steps import CellOutput, CellStep
from hbnode.recurrent.executor import LayerExecutor, LayerState, Weights
from hbnode.recurrent.export import StockLayers, plain_layer
from hbnode.recurrent.initialization import check_weight_norm, init_gates_, parameter_shapes
from hbnode.recurrent.rules import Memory, Rule
from hbnode.recurrent.state import InitialState, RecurrentState


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
        self.bias, self.batch_first = check_switch(bias, "bias"), check_switch(batch_first, "batch_first")
        self.bidirectional, self.is_compiled = check_switch(bidirectional, "bidirectional"), compile
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
        """Draw the initial weights."""
        raise NotImplementedError

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
        batch = SequenceBatch.of(x, self.input_size, self.batch_first)
        states, t = self._read(given_state(state, hx), batch)
        run = LayerExecutor(self.step, self.rule, self.stock, self.is_compiled, autocast.is_on(batch.x))
        with autocast.switched(batch.x, on=False):
            out, ended = self._run(run, batch, states)
        return batch.output(out), self._written(ended, t, batch)

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

    def _read(self, state: InitialState, batch: SequenceBatch) -> tuple[list[LayerState], int | Tensor | None]:
        """States of the layers and directions, and the number of samples before the first."""
        places = self.num_layers * (2 if self.bidirectional else 1)
        shape = () if batch.is_single else tuple(batch.x.shape[1:2])
        widths = self.hidden_size, self.step.gates * self.hidden_size
        state = read_state(state, self.rule, self.step, widths, (places,), shape, batch.x)
        t: int | Tensor | None = state.t
        if isinstance(t, Tensor):
            t = batch.sort(t, axis=0)
            t = int(t[0]) if len(t) and not t.is_meta and bool((t == t[0]).all()) else t
        elif "t" in self.rule.memory:
            t = 0
        whole = LayerState(state.h, state.c, Memory(state.v, state.m, state.g)).map(lambda z: batch.sort(z, axis=1))
        each = (whole.map(operator.itemgetter(k)) for k in range(places))
        return [LayerState(h, c, Memory(*memory[:3], t)) for h, c, memory in each], t

    def _written(self, states: list[LayerState], t: int | Tensor | None, batch: SequenceBatch) -> RecurrentState:
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
        parts = [f"{self.input_size}, {self.hidden_size}", f"rule={self.rule}", *_unusual(self, _USUAL)]
        return ", ".join([*parts, "compile=True"] if self.is_compiled else parts)


_USUAL = {
    "num_layers": 1,
    "bias": True,
    "batch_first": False,
    "dropout": 0.0,
    "bidirectional": False,
    "nonlinearity": "tanh",
    "forget_bias": 1.0,
    "init": "cayley",
}


def _unusual(module: nn.Module, names: Iterable[str]) -> list[str]:
    """What differs from the defaults, of the arguments that a layer or cell has."""
    values = {name: getattr(module, name, _USUAL[name]) for name in names}
    return [f"{name}={value!r}" for name, value in values.items() if value != _USUAL[name]]


class RecurrentCell(nn.Module):
    """Base of the cells: takes one step.

    Arguments:
        step: the cell's step.
        input_size: see :class:`hbnode.MomentumLSTMCell`, likewise all that follow.
        hidden_size: number of features of h.
        bias: whether there are biases.
        rule: filters the input.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor
    bias_hh: Tensor

    def __init__(
        self,
        step: CellStep,
        input_size: int,
        hidden_size: int,
        bias: bool,
        rule: Rule,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.step = step
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.rule = rule
        self.has_bias = check_switch(bias, "bias")
        for name, shape in self._shapes().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    if TYPE_CHECKING:  # nn.Module's returns Any

        @override
        def __call__(
            self, x: Tensor, state: InitialState = None, *, hx: InitialState = None
        ) -> tuple[Tensor, RecurrentState]:
            return self.forward(x, state, hx=hx)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self.step, self.input_size, self.hidden_size, self.has_bias)

    def _weights(self) -> Weights:
        b, bias = (self.bias_ih, self.bias_hh) if self.has_bias else (None, None)
        return Weights(self.weight_ih, self.weight_hh, b, bias)

    def reset_parameters(self) -> None:
        """Draw the initial weights in the same way as the layer."""
        init_gates_(self, self._shapes(), self.hidden_size)

    def forward(
        self,
        x: Tensor,
        state: InitialState = None,
        *,
        hx: InitialState = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Take a step.

        Arguments:
            x: (batch, input_size) or (input_size,).
            state: the state after the step before; or h, or (h, c) of an LSTM, at the start of a sequence; None is
                zeros.
            hx: the same under torch.nn's name.

        Returns:
            h (batch, hidden_size) or (hidden_size,), and the state.

        Raises:
            ValueError: x or the state has another shape or dtype than expected.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, got {type(x).__name__}. Fix: {tensor_fix(x)}.")
        if x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(
                f"x must be (batch, input_size) or (input_size,) with input_size={self.input_size}, got "
                f"{tuple(x.shape)}. Fix: one sample at a time; a layer takes sequences."
            )
        is_autocast = autocast.is_on(x)
        if x.dtype != self.weight_ih.dtype and not is_autocast:
            raise ValueError(
                f"x must be {self.weight_ih.dtype} as the parameters are, got {x.dtype}. "
                f"Fix: x.to({self.weight_ih.dtype})."
            )
        widths = self.hidden_size, self.step.gates * self.hidden_size
        state = read_state(given_state(state, hx), self.rule, self.step, widths, (), tuple(x.shape[:-1]), x)
        if x.dim() == 1:
            h, state = self._step(x.unsqueeze(0), state.map(lambda z: z.unsqueeze(0)))
            return h.squeeze(0), state.map(lambda z: z.squeeze(0))
        return self._step(x, state)

    def _step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        check_weight_norm(self)
        weights = self._weights()
        g = linear(x, weights.w, weights.b)
        memory = state.memory
        if all(z is None for z in memory):
            memory = self.rule.start(g)
            if memory.t is not None:
                memory = memory._replace(t=torch.zeros(len(x), dtype=torch.int64, device=x.device))
        d, memory = self.rule(g.unsqueeze(0), memory)
        a, rest = self.step.prepare(d[0], weights.bias)
        before = CellOutput(state.h, state.c)
        assert not isinstance(memory.t, int)
        h, c, _ = self.step.forward(a + linear(state.h, weights.u), rest, before, weights.bias)
        return h, RecurrentState(h, c, memory.v, memory.m, memory.g, memory.t)

    def extra_repr(self) -> str:
        """Sizes, rule, and what differs from the defaults."""
        parts = [
            f"{self.input_size}, {self.hidden_size}",
            f"rule={self.rule}",
            *([] if self.has_bias else ["bias=False"]),
        ]
        return ", ".join(parts + _unusual(self, ("nonlinearity", "forget_bias", "init")))
