"""Recurrent layers whose input is driven by momentum: RNN, LSTM and GRU with any rule."""

from __future__ import annotations

import inspect
import itertools

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hbnode._checks import as_count
from hbnode._tracing import untraced
from hbnode.recurrent import autocast
from hbnode.recurrent.batch import Batch
from hbnode.recurrent.cell_steps import GRUStep, LSTMStep, Step
from hbnode.recurrent.executor import Runner, Weights
from hbnode.recurrent.export import StockLayers, plain_layer
from hbnode.recurrent.parameters import (
    check_rule,
    check_space,
    check_switch,
    check_weight_norm,
    drive_size,
    given_state,
    init_gates_,
    parameter_shapes,
    read_state,
    rnn_step,
)
from hbnode.recurrent.rules import Rule
from hbnode.recurrent.state import RecurrentState


class RecurrentLayer(nn.Module):
    """One or several layers of a cell over sequences.

    Arguments:
        step: the cell's step.
        stock: name of torch's layer of this cell in ``torch._VF``, or None.
        others: see :class:`LSTM`.
    """

    def __init__(
        self,
        step: Step,
        stock: str | None,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        rule: Rule,
        momentum_space: str = "gates",
        compile: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.step, self.stock = step, stock
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.num_layers = as_count(num_layers, "num_layers")
        self.rule = check_rule(rule)
        self.bias, self.batch_first = check_switch(bias, "bias"), check_switch(batch_first, "batch_first")
        self.bidirectional, self.compile = check_switch(bidirectional, "bidirectional"), compile
        if proj_size:
            raise ValueError(
                f"proj_size must be 0, as no layer here projects h, got {proj_size!r}. Fix: a smaller hidden_size, "
                "or torch.nn.Linear(hidden_size, proj_size) over the output."
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout!r}. Fix: the share of outputs to be dropped.")
        if dropout and num_layers == 1:
            raise ValueError("dropout is applied between layers, and there is one. Fix: num_layers=2, or nn.Dropout.")
        self.dropout = dropout
        self.momentum_space = check_space(momentum_space)
        directions = 2 if bidirectional else 1
        for layer, suffix in self._places():
            size = self.input_size if layer == 0 else directions * self.hidden_size
            for name, shape in self._shapes(size).items():
                self.register_parameter(
                    f"{name}_l{layer}{suffix}", nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                )
        self.reset_parameters()

    def _places(self) -> itertools.product:
        """The layers and directions, in the order of the state's first axis."""
        return itertools.product(range(self.num_layers), ("", "_reverse") if self.bidirectional else ("",))

    def _shapes(self, input_size: int) -> dict[str, tuple[int, ...]]:
        """The parameters of a layer in one direction."""
        return parameter_shapes(self.step, input_size, self.hidden_size, self.momentum_space, self.bias)

    def _names(self) -> list[str]:
        """All parameters."""
        return [f"{name}_l{layer}{suffix}" for layer, suffix in self._places() for name in self._shapes(1)]

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        raise NotImplementedError

    @untraced  # a loop over time is no graph; torch.compile passes over torch.nn's layers likewise
    def forward(
        self,
        x: Tensor | PackedSequence,
        state: RecurrentState | tuple[Tensor, Tensor] | Tensor | None = None,
        *,
        hx: RecurrentState | tuple[Tensor, Tensor] | Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, RecurrentState]:
        """Run over sequences, from their start or from where an earlier chunk ended.

        Arguments:
            x: (T, batch, input_size), with ``batch_first`` (batch, T, input_size), or one sequence (T, input_size),
                or a PackedSequence.
            state: that of an earlier call; or h, or (h, c) of an LSTM, at the start of a sequence; None is zeros.
            hx: the same under torch.nn's name.

        Returns:
            h at every sample, in the form of x and directions * hidden_size wide, and the state after the last.

        Raises:
            TypeError: x is not floating point.
            ValueError: x or the state has another shape than expected.
        """
        check_weight_norm(self)
        batch = Batch.of(x, self.input_size, self.batch_first)
        states, t = self._read(given_state(state, hx), batch)
        run = Runner(self.step, self.rule, self.stock, self.compile, autocast.is_on(batch.x))
        with autocast.switched(batch.x, on=False):
            out, ended = self._run(run, batch, states)
        return batch.output(out), self._written(ended, t, batch)

    def _run(self, run: Runner, batch: Batch, states: list[RecurrentState]) -> tuple[Tensor, list[RecurrentState]]:
        """All layers, from the states of each: the last one's output (T, batch, n), and the states in the end."""
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
        is_hidden = self.momentum_space == "hidden"
        return Weights(
            values["weight_ih"], values["weight_hh"], values.get("bias_ih"), values.get("bias_hh"), is_hidden
        )

    def _read(
        self, state: RecurrentState | tuple[Tensor, Tensor] | Tensor | None, batch: Batch
    ) -> tuple[list[RecurrentState], int | Tensor | None]:
        """States of the layers and directions, and the samples before the first."""
        places = self.num_layers * (2 if self.bidirectional else 1)
        shape = () if batch.is_single else tuple(batch.x.shape[1:2])
        widths = self.hidden_size, drive_size(self.step, self.hidden_size, self.momentum_space)
        state = read_state(state, self.rule, self.step, widths, (places,), shape, batch.x)
        t = state.t
        if t is not None:
            t = batch.sort(t, axis=0)
            t = int(t[0]) if len(t) and not t.is_meta and bool((t == t[0]).all()) else t
        elif "t" in self.rule.memory:
            t = 0
        entries = [None if z is None else batch.sort(z, axis=1).unbind() for z in (state.h, state.c, *state.memory[:3])]
        return [RecurrentState(*(None if z is None else z[k] for z in entries), t) for k in range(places)], t

    def _written(self, states: list[RecurrentState], t: int | Tensor | None, batch: Batch) -> RecurrentState:
        """The state of all layers and directions."""
        entries = zip(*((state.h, state.c, *state.memory[:3]) for state in states), strict=True)
        entries = [None if z[0] is None else batch.unsort(torch.stack(z), axis=1) for z in entries]
        if t is not None:
            t = batch.unsort(t + batch.lengths, axis=0)
        return RecurrentState(*entries, t)

    def flatten_parameters(self) -> None:
        """Do nothing: torch.nn's layers lay out their weights for cuDNN here, ours at each call."""

    def to_stock(self) -> StockLayers:
        """A copy for inference and deployment: plain layers of torch.nn, each with a filter before it.

        Its call is ``output, state = stock(x)`` for sequences that start, where the state is that of torch.nn. With a
        linear rule the filter runs over the inputs; with others over W x + b, and the plain layer's own W is the
        identity. Dropout is left out.

        Raises:
            ValueError: torch.nn has no layer of this cell.
        """
        if self.stock is None:
            raise ValueError(f"torch.nn has no layer of the cell of {type(self).__name__}. Fix: export its cell.")
        pairs = [plain_layer(self.stock, self.rule, self._weights(f"_l{k}{suffix}")) for k, suffix in self._places()]
        return StockLayers(*map(list, zip(*pairs, strict=True)), 2 if self.bidirectional else 1, self.batch_first)

    def extra_repr(self) -> str:
        """Sizes, rule, and what differs from the defaults."""
        parts = [f"{self.input_size}, {self.hidden_size}", f"rule={self.rule}"]
        for name in ("num_layers", "bias", "batch_first", "dropout", "bidirectional", "momentum_space", "compile"):
            value = getattr(self, name)
            if value != inspect.signature(RecurrentLayer).parameters[name].default:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)


class RNN(RecurrentLayer):
    """An Elman network driven by a rule: h_t = tanh(U h_{t-1} + b_hh + d_t), or relu.

    Arguments:
        nonlinearity: "tanh" or "relu"; by position it follows ``num_layers``, as in torch.nn.RNN.
        others: see :class:`LSTM`, which alone has ``forget_bias``.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *others: float,
        rule: Rule,
        **options: object,
    ) -> None:
        step, stock = rnn_step(nonlinearity), f"rnn_{nonlinearity}"
        super().__init__(step, stock, input_size, hidden_size, num_layers, *others, rule=rule, **options)

    def reset_parameters(self) -> None:
        """Appendix A: W_ih orthogonal, W_hh the identity, the biases 0."""
        init_gates_(self, self._names())


class LSTM(RecurrentLayer):
    r"""An LSTM driven by a rule (equations 9, 14, 15 of the MomentumRNN paper).

    .. math::

        g_t = W x_t + b_{ih}, \quad d_t = \text{rule}(g_1, \dots, g_t), \quad
        (i, f, \tilde c, o) = U h_{t-1} + b_{hh} + d_t

    and c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~), h_t = sigmoid(o) tanh(c_t), as in torch.nn.LSTM. With a linear
    rule the momentum is W applied to filtered inputs, and torch's own layer does the rest. With others, and while the
    momentum of an earlier chunk decays, the cell runs over ready drives: on the CPU in a scan of our own.

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919).

    Arguments:
        input_size: features of a sample. By position the arguments up to ``proj_size`` are those of torch.nn.LSTM.
        hidden_size: size of h.
        num_layers: how many are stacked.
        bias: whether to have b_ih, which the rule sees as a part of its input, and b_hh, which it does not.
        batch_first: whether x is (batch, T, input_size).
        dropout: share of the outputs between layers that is dropped in training.
        bidirectional: whether a second cell runs backwards in time.
        proj_size: 0; no layer here projects its h.
        rule: one of :mod:`hbnode.recurrent.rules`. ``Momentum(0.0, 1.0)`` makes a torch.nn.LSTM; either loads the
            other's weights.
        momentum_space: "gates" as above, or "hidden": W and b_ih make a drive of the size of h, which U multiplies as
            it does h (remarks 1 and 4): U (h_{t-1} + d_t) + b_hh.
        compile: whether the scan compiles its steps with torch.compile, which takes half a minute at the first call.
        forget_bias: at first the bias of the forget gate in b_ih and in b_hh; with "hidden" in b_hh alone.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        TypeError: the rule is not one.
        ValueError: a size, share or name is not valid.

    Example:
        >>> from hbnode.recurrent.rules import Momentum
        >>> layer = LSTM(3, 5, rule=Momentum(momentum=0.6, step_size=0.6))
        >>> output, state = layer(torch.ones(7, 2, 3))
        >>> output.shape, state.c.shape, state.v.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]), torch.Size([1, 2, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *others: float,
        rule: Rule,
        forget_bias: float = 1.0,
        **options: object,
    ) -> None:
        self.forget_bias = forget_bias
        super().__init__(LSTMStep(), "lstm", input_size, hidden_size, num_layers, *others, rule=rule, **options)

    def reset_parameters(self) -> None:
        """Appendices A and F: W_ih orthogonal, W_hh with ones on its diagonal, the biases 0 but at the forget gate."""
        init_gates_(self, self._names(), forget_bias=self.forget_bias)


class GRU(RecurrentLayer):
    """A GRU driven by a rule, with the gates of torch.nn.GRU; r_t multiplies U h_{t-1} + b_hh alone.

    Arguments:
        others: see :class:`LSTM`, which alone has ``forget_bias``.
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, *others: float, rule: Rule, **options: object
    ) -> None:
        super().__init__(GRUStep(), "gru", input_size, hidden_size, num_layers, *others, rule=rule, **options)

    def reset_parameters(self) -> None:
        """As an LSTM's, without a forget gate."""
        init_gates_(self, self._names())
