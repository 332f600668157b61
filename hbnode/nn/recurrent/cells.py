"""Cells for one step, with any rule: their equations, their weights, and the modules for streaming, for your own loops,
and for torch.export.

A cell's step comes with its transpose written out; a scan over time calls both. The input d_t and the recurrent bias
make up all of a_t but U h_{t-1}: that part is computed for many samples at once. Likewise the transpose of a step
multiplies with factors that are computed for many samples at once. Apart from U, the transpose is diagonal.
"""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from typing_extensions import override

from hbnode._checks import as_count, check_bool, tensor_fix
from hbnode._torch import is_autocast, is_tracing
from hbnode.nn.recurrent.state import InitialState, RecurrentState, given_state, read_state
from hbnode.nn.rules import Rule, RuleName, make_rule


class CellOutput(NamedTuple):
    """The output of one step, or of several steps stacked on a first axis.

    Attributes:
        h: h_t (batch, n).
        c: c_t (batch, n) of an LSTM.
        parts: intermediate values that the transpose needs.
    """

    h: Tensor
    c: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


class Gradients(NamedTuple):
    """Gradients that the transpose of a step returns.

    Attributes:
        a: gradient of a_t (batch, gates * n).
        rest: gradient of the rest of d_t.
        h: gradient of h_{t-1} on paths other than through a_t; None if there are none.
        c: gradient of c_{t-1} of an LSTM.
    """

    a: Tensor
    rest: Tensor | None = None
    h: Tensor | None = None
    c: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class CellStep:
    """A cell's step. The caller passes its parameters: U, and b_hh or the bias of the activation."""

    gates: ClassVar[int] = 1
    has_cell_state: ClassVar[bool] = False
    bias_is_inside: ClassVar[bool] = False  # of the activation; else it is b_hh

    def prepare(self, d: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return all of a but U h, and the rest: the part of d that a step needs beside a.

        Arguments:
            d: filtered input (..., batch, gates * n).
            bias: b_hh, or that of the activation.
        """
        return (d if bias is None or self.bias_is_inside else d + bias), None

    def input_gradient(self, da: Tensor, drest: Tensor | None) -> Tensor:
        """Gradient of d from the gradients of what :meth:`prepare` returned."""
        return da

    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        """Take a step.

        Arguments:
            a: (batch, gates * n).
            rest: the rest of d.
            before: the output of the step before.
            bias: as for :meth:`prepare`.
        """
        raise NotImplementedError

    def run(
        self,
        a: Tensor,
        rest: Tensor | None,
        u: Tensor,
        bias: Tensor | None,
        before: CellOutput,
        out: Tensor | None = None,
    ) -> CellOutput:
        """Take several steps, with the samples on the first axis.

        Arguments:
            a: all of a but U h (T, batch, gates * n).
            rest: the rest of d.
            u: the transpose of U.
            bias: as for :meth:`prepare`.
            before: the output of the step before.
            out: memory for h; without it all results are new tensors, which torch.compile needs.
        """
        rests = [None] * len(a) if rest is None else rest.unbind()
        steps = [before]
        for a_t, rest_t in zip(a.unbind(), rests, strict=True):
            steps.append(self.forward(torch.addmm(a_t, steps[-1].h, u), rest_t, steps[-1], bias))
        h = torch.stack([step.h for step in steps[1:]], out=out)
        c = None if steps[-1].c is None else torch.stack([step.c for step in steps[1:] if step.c is not None])
        parts = zip(*(step.parts for step in steps[1:]), strict=True)
        return CellOutput(h, c, tuple(torch.stack(part) for part in parts))

    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        """Factors of the transposes of several steps; all tensors have the samples on their first axis.

        Arguments:
            before: the outputs of the steps before each step.
            after: the outputs of the steps.
        """
        raise NotImplementedError

    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        """Transpose a step: from the gradients of h_t and c_t, with its factors."""
        raise NotImplementedError


class _ElmanStep(CellStep):
    @override
    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        (slope,) = factors
        return Gradients(dh * slope)


class TanhStep(_ElmanStep):
    """h_t = tanh(a_t)."""

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        return CellOutput(torch.tanh(a))

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        return (1 - after.h * after.h,)


class ReLUStep(_ElmanStep):
    """h_t = relu(a_t)."""

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        return CellOutput(torch.relu(a))

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        return ((after.h > 0).to(after.h),)


class ModReLUStep(_ElmanStep):
    """h_t = modrelu(a_t), modrelu(a) = sign(a) relu(|a| + b); the gradient of b is that of a times the sign of h."""

    bias_is_inside: ClassVar[bool] = True

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        assert bias is not None
        return CellOutput(a.sign() * torch.relu(a.abs() + bias))

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        return ((after.h != 0).to(after.h),)


class LSTMStep(CellStep):
    """The gates i, f, g, o are those of torch.nn.LSTM."""

    gates: ClassVar[int] = 4
    has_cell_state: ClassVar[bool] = True

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        i, f, g, o = a.chunk(4, dim=-1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        assert before.c is not None
        c = torch.addcmul(f * before.c, i, g)
        return CellOutput(o * c.tanh(), c, (i, f, g, o))

    @override
    def run(
        self,
        a: Tensor,
        rest: Tensor | None,
        u: Tensor,
        bias: Tensor | None,
        before: CellOutput,
        out: Tensor | None = None,
    ) -> CellOutput:
        if out is None:
            return super().run(a, rest, u, bias, before)
        assert before.c is not None  # what follows is few calls on memory that is there already
        gates, cells, tanh_c = torch.empty_like(a), torch.empty_like(out), torch.empty_like(before.c)
        parts = gates.chunk(4, dim=-1)
        i_and_f = gates[..., : gates.shape[-1] // 2]
        h, c = before.h, before.c
        places = (z.unbind() for z in (a, gates, i_and_f, *parts, cells, out))
        for a_t, gates_t, i_and_f_t, i, f, g, o, c_t, h_t in zip(*places, strict=True):
            torch.addmm(a_t, h, u, out=gates_t)
            i_and_f_t.sigmoid_(), g.tanh_(), o.sigmoid_()
            c = torch.mul(f, c, out=c_t).addcmul_(i, g)
            h = torch.mul(o, torch.tanh(c, out=tanh_c), out=h_t)
        return CellOutput(out, cells, parts)

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        i, f, g, o = after.parts
        assert before.c is not None
        assert after.c is not None
        tanh_c = after.c.tanh()
        through_c = torch.stack([g * i * (1 - i), before.c * f * (1 - f), i * (1 - g * g)], dim=-2)
        return o * (1 - tanh_c * tanh_c), through_c, tanh_c * o * (1 - o), f

    @override
    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        h_to_c, through_c, to_o, f = factors
        assert dc is not None
        dc = torch.addcmul(dc, dh, h_to_c)
        return Gradients(torch.cat([(through_c * dc.unsqueeze(-2)).flatten(-2), dh * to_o], dim=-1), c=dc * f)


class GRUStep(CellStep):
    """The gates r, z, n are those of torch.nn.GRU; r multiplies U h + b_hh of n, but not d of n, which is the rest."""

    gates: ClassVar[int] = 3

    @override
    def prepare(self, d: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        r, z, n = d.chunk(3, dim=-1)
        a = torch.cat([r, z, torch.zeros_like(n)], dim=-1)
        return (a if bias is None else a + bias), n

    @override
    def input_gradient(self, da: Tensor, drest: Tensor | None) -> Tensor:
        assert drest is not None
        return torch.cat([da[..., : 2 * drest.shape[-1]], drest], dim=-1)

    @override
    def forward(self, a: Tensor, rest: Tensor | None, before: CellOutput, bias: Tensor | None) -> CellOutput:
        r, z, un = a.chunk(3, dim=-1)
        r, z = r.sigmoid(), z.sigmoid()
        assert rest is not None
        n = torch.addcmul(rest, r, un).tanh()
        return CellOutput(n + z * (before.h - n), None, (r, z, n, un))

    @override
    def run(
        self,
        a: Tensor,
        rest: Tensor | None,
        u: Tensor,
        bias: Tensor | None,
        before: CellOutput,
        out: Tensor | None = None,
    ) -> CellOutput:
        if out is None:
            return super().run(a, rest, u, bias, before)
        assert rest is not None  # what follows is few calls on memory that is there already
        gates, new, h = torch.empty_like(a), torch.empty_like(out), before.h
        r, z, un = gates.chunk(3, dim=-1)
        r_and_z = gates[..., : 2 * out.shape[-1]]
        places = (z.unbind() for z in (a, rest, gates, r_and_z, r, z, un, new, out))
        for a_t, rest_t, gates_t, r_and_z_t, r_t, z_t, un_t, n_t, h_t in zip(*places, strict=True):
            torch.addmm(a_t, h, u, out=gates_t)
            r_and_z_t.sigmoid_()
            torch.addcmul(rest_t, r_t, un_t, out=n_t).tanh_()
            h = torch.lerp(n_t, h, z_t, out=h_t)
        return CellOutput(out, None, (r, z, new, un))

    @override
    def factors(self, before: CellOutput, after: CellOutput) -> tuple[Tensor, ...]:
        r, z, n, un = after.parts
        to_n = (1 - z) * (1 - n * n)
        to_a = torch.stack([to_n * un * r * (1 - r), (before.h - n) * z * (1 - z), to_n * r], dim=-2)
        return to_a, to_n, z

    @override
    def backward(self, dh: Tensor, dc: Tensor | None, *factors: Tensor) -> Gradients:
        to_a, to_n, z = factors
        return Gradients((to_a * dh.unsqueeze(-2)).flatten(-2), rest=dh * to_n, h=dh * z)


def elman_step(nonlinearity: str) -> CellStep:
    """The step of an Elman network, "tanh" or "relu"."""
    steps = {"tanh": TanhStep(), "relu": ReLUStep()}
    if nonlinearity not in steps:
        raise ValueError(f"nonlinearity must be one of {tuple(steps)}, got {nonlinearity!r}. Fix: 'tanh'.")
    return steps[nonlinearity]


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


def parameter_shapes(step: CellStep, input_size: int, hidden_size: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a cell, by their names."""
    n = step.gates * hidden_size
    shapes: dict[str, tuple[int, ...]] = {"weight_ih": (n, input_size), "weight_hh": (n, hidden_size)}
    return shapes | ({"bias_ih": (n,), "bias_hh": (n,)} if bias else {})


@torch.no_grad()
def init_gates_(module: nn.Module, names: Iterable[str], n: int, forget_bias: float = 0.0) -> None:
    """Initialise as in appendices A and F: W_ih orthogonal, W_hh with ones on its diagonal, biases 0.

    Arguments:
        module: a layer or cell.
        names: of its parameters, parametrized or not.
        n: hidden_size.
        forget_bias: the forget gate's part of each bias of an LSTM.
    """
    for name in names:
        old = getattr(module, name)
        new = torch.zeros_like(old, dtype=torch.promote_types(old.dtype, torch.float32))
        if name.startswith("weight_ih"):
            nn.init.orthogonal_(new)
        elif name.startswith("weight_hh"):
            nn.init.eye_(new)
        elif len(new) == 4 * n:
            new[n : 2 * n] = forget_bias
        if name in module._parameters:
            old.copy_(new)
        else:
            setattr(module, name, new.to(old.dtype))


def check_weight_norm(module: nn.Module) -> None:
    """Refuse the NaN that weight_norm makes of rows of zeros; initially W_hh has such rows."""
    for name, made in getattr(module, "parametrizations", {}).items():
        if type(made[0]).__name__ != "_WeightNorm" or is_tracing():
            continue
        if getattr(module, name).isnan().any() and made.original0.isfinite().all() and made.original1.isfinite().all():
            raise ValueError(
                f"weight_norm makes NaN of {name}: it divides by norms that are 0, and at first most rows of W_hh are "
                f"zero. Fix: torch.nn.init.orthogonal_(layer.{name}) before weight_norm(layer, {name!r})."
            )


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


def non_defaults(module: nn.Module, names: Iterable[str] = tuple(_USUAL)) -> list[str]:
    """What differs from the defaults, of the arguments that a layer or cell has, for its repr."""
    values = {name: getattr(module, name, _USUAL[name]) for name in names}
    return [f"{name}={value!r}" for name, value in values.items() if value != _USUAL[name]]


class RecurrentCell(nn.Module):
    """Base of the cells: takes one step.

    Arguments:
        step: the cell's step.
        input_size: see :class:`hbnode.nn.MomentumLSTMCell`, likewise all that follow.
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
        self.has_bias = check_bool(bias, "bias")
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
        if x.dtype != self.weight_ih.dtype and not is_autocast(x):
            raise ValueError(
                f"x must be {self.weight_ih.dtype} as the parameters are, got {x.dtype}. "
                f"Fix: x.to({self.weight_ih.dtype})."
            )
        widths, batch = (self.hidden_size, self.step.gates * self.hidden_size), tuple(x.shape[:-1])
        state = read_state(given_state(state, hx), self.rule, self.step.has_cell_state, widths, (), batch, x)
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
        return ", ".join(parts + non_defaults(self, ("nonlinearity", "forget_bias", "init")))


class MomentumRNNCell(RecurrentCell):
    """One step of :class:`hbnode.nn.MomentumRNN`, whose state it takes and returns.

    With g_t = W x_t + b_ih and the rule's next output d_t: h_t = tanh(U h_{t-1} + b_hh + d_t).

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        nonlinearity: "tanh", or "relu" in its place. Default: ``"tanh"``.
        rule: the filter by its name, see :class:`hbnode.nn.MomentumLSTM`, or as an object of
            :mod:`hbnode.nn.rules`. Default: ``"momentum"``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and what the rule remembers, each (batch, hidden_size).

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float | None = None,
        step_size: float | None = None,
        bias: bool = True,
        *,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        rule: RuleName | Rule = "momentum",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.nonlinearity = nonlinearity
        step, rule = elman_step(nonlinearity), make_rule(rule, momentum, step_size)
        super().__init__(step, input_size, hidden_size, bias, rule, device, dtype)


class MomentumLSTMCell(RecurrentCell):
    """One step of :class:`hbnode.nn.MomentumLSTM`, whose state it takes and returns, as in appendix F of the paper.

    With g_t = W x_t + b_ih and the rule's next output d_t::

        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        forget_bias: initial bias of the forget gate in b_ih and in b_hh. Default: ``1.0``.
        rule: the filter by its name, see :class:`hbnode.nn.MomentumLSTM`, or as an object of
            :mod:`hbnode.nn.rules`. Default: ``"momentum"``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h and c (batch, hidden_size), what the rule remembers 4 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.

    Example:
        >>> cell, state = MomentumLSTMCell(3, 5, momentum=0.9), None
        >>> for x in torch.ones(7, 2, 3):
        ...     h, state = cell(x, state)
        >>> h.shape, state.v.shape
        (torch.Size([2, 5]), torch.Size([2, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float | None = None,
        step_size: float | None = None,
        bias: bool = True,
        *,
        forget_bias: float = 1.0,
        rule: RuleName | Rule = "momentum",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.forget_bias = forget_bias
        rule = make_rule(rule, momentum, step_size)
        super().__init__(LSTMStep(), input_size, hidden_size, bias, rule, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the initial weights in the same way as the layer."""
        init_gates_(self, self._shapes(), self.hidden_size, forget_bias=self.forget_bias)


class MomentumGRUCell(RecurrentCell):
    """One step of :class:`hbnode.nn.MomentumGRU`, whose state it takes and returns.

    With g_t = W x_t + b_ih and the rule's next output d_t::

        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        momentum: μ of a rule given by name, in [0, 1]. Default: ``None``, 0.6.
        step_size: s of a rule given by name, positive. Default: ``None``, 0.6.
        bias: whether to have b_ih, which is filtered, and b_hh, which is not. Default: ``True``.
        rule: the filter by its name, see :class:`hbnode.nn.MomentumLSTM`, or as an object of
            :mod:`hbnode.nn.rules`. Default: ``"momentum"``.
        device: device of the parameters. Default: ``None``, torch's.
        dtype: dtype of the parameters. Default: ``None``, torch's.

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h (batch, hidden_size), what the rule remembers 3 times as wide.

    Raises:
        TypeError: the rule is not a rule, or bias is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not take the number.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float | None = None,
        step_size: float | None = None,
        bias: bool = True,
        *,
        rule: RuleName | Rule = "momentum",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rule = make_rule(rule, momentum, step_size)
        super().__init__(GRUStep(), input_size, hidden_size, bias, rule, device, dtype)
