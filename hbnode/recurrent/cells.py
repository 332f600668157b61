"""Cells for one step, with any rule: for streaming, for loops of one's own, and for torch.export."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hbnode._checks import as_count, tensor_fix
from hbnode.recurrent import autocast
from hbnode.recurrent.cell_steps import GRUStep, LSTMStep, Step, Taken
from hbnode.recurrent.executor import Weights
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


class RecurrentCell(nn.Module):
    """One step of a cell.

    Arguments:
        step: the cell's step.
        others: see :class:`LSTMCell`.
    """

    def __init__(
        self,
        step: Step,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        rule: Rule,
        momentum_space: str = "gates",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.step = step
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.rule, self.momentum_space = check_rule(rule), check_space(momentum_space)
        self.has_bias = check_switch(bias, "bias")
        for name, shape in self._shapes().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self.step, self.input_size, self.hidden_size, self.momentum_space, self.has_bias)

    def _weights(self) -> Weights:
        biases = (self.bias_ih, self.bias_hh) if self.has_bias else (None, None)
        return Weights(self.weight_ih, self.weight_hh, *biases, self.momentum_space == "hidden")

    def reset_parameters(self) -> None:
        """Draw the initial weights, as those of the layer."""
        init_gates_(self, self._shapes())

    def forward(
        self,
        x: Tensor,
        state: RecurrentState | tuple[Tensor, Tensor] | Tensor | None = None,
        *,
        hx: RecurrentState | tuple[Tensor, Tensor] | Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Take a step.

        Arguments:
            x: (batch, input_size) or (input_size,).
            state: that of the step before; or h, or (h, c) of an LSTM, at the start of a sequence; None is zeros.
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
        n = drive_size(self.step, self.hidden_size, self.momentum_space)
        state = read_state(
            given_state(state, hx), self.rule, self.step, (self.hidden_size, n), (), tuple(x.shape[:-1]), x
        )
        if x.dim() == 1:
            h, state = self._step(x.unsqueeze(0), state.map(lambda z: z.unsqueeze(0)))
            return h.squeeze(0), state.map(lambda z: z.squeeze(0))
        return self._step(x, state)

    def _step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        check_weight_norm(self)
        weights = self._weights()
        g = linear(x, weights.w, weights.b)
        memory = state.memory
        if state.is_fresh:
            memory = self.rule.start(g)
            if memory.t is not None:
                memory = memory._replace(t=torch.zeros(len(x), dtype=torch.int64, device=x.device))
        d, memory = self.rule(g.unsqueeze(0), memory)
        d = linear(d[0], weights.u) if weights.is_hidden else d[0]
        a, rest = self.step.prepare(d, weights.bias)
        taken = self.step.forward(a + linear(state.h, weights.u), rest, Taken(state.h, state.c), weights.bias)
        return taken.h, RecurrentState(taken.h, taken.c, *memory)

    def extra_repr(self) -> str:
        """Sizes, rule, and what differs from the defaults."""
        space = "" if self.momentum_space == "gates" else f", momentum_space={self.momentum_space!r}"
        bias = "" if self.has_bias else ", bias=False"
        return f"{self.input_size}, {self.hidden_size}, rule={self.rule}{bias}{space}"


class RNNCell(RecurrentCell):
    """One step of :class:`hbnode.recurrent.RNN`.

    Arguments:
        nonlinearity: "tanh" or "relu".
        others: see :class:`LSTMCell`, which alone has ``forget_bias``.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        *,
        rule: Rule,
        **options: object,
    ) -> None:
        super().__init__(rnn_step(nonlinearity), input_size, hidden_size, bias, rule=rule, **options)


class LSTMCell(RecurrentCell):
    """One step of :class:`hbnode.recurrent.LSTM`, as in appendix F of the MomentumRNN paper.

    Arguments:
        input_size: features of a sample.
        hidden_size: size of h.
        bias: whether to have b_ih and b_hh.
        rule: one of :mod:`hbnode.recurrent.rules`. The named cells take its coefficients in place of it, by position
            before ``bias``: ``MomentumLSTMCell(3, 4, 0.9, 0.6)`` has μ = 0.9 and s = 0.6.
        momentum_space: "gates" or "hidden", see :class:`hbnode.recurrent.LSTM`.
        forget_bias: at first the bias of the forget gate in b_ih and in b_hh.
        device: of the parameters.
        dtype: of the parameters.

    Example:
        >>> from hbnode.recurrent.rules import Momentum
        >>> cell = LSTMCell(3, 5, rule=Momentum(momentum=0.6, step_size=0.6))
        >>> state = None
        >>> for x in torch.ones(7, 2, 3):
        ...     h, state = cell(x, state)
        >>> h.shape, state.v.shape
        (torch.Size([2, 5]), torch.Size([2, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        rule: Rule,
        forget_bias: float = 1.0,
        **options: object,
    ) -> None:
        self.forget_bias = forget_bias
        super().__init__(LSTMStep(), input_size, hidden_size, bias, rule=rule, **options)

    def reset_parameters(self) -> None:
        """Draw the initial weights, as those of the layer."""
        init_gates_(self, self._shapes(), forget_bias=self.forget_bias)


class GRUCell(RecurrentCell):
    """One step of :class:`hbnode.recurrent.GRU`.

    Arguments:
        others: see :class:`LSTMCell`, which alone has ``forget_bias``.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, *, rule: Rule, **options: object) -> None:
        super().__init__(GRUStep(), input_size, hidden_size, bias, rule=rule, **options)
