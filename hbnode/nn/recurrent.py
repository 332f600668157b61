"""The recurrent layers with momentum, and their cells for one time step: RNN, LSTM, GRU and orthogonal RNN.

A cell computes the pre-activation g_t = W x_t + b from its input x_t. A rule of :mod:`hbnode.nn.rules` filters these
pre-activations over time, independently of the hidden state: d_t = rule(g_1, ..., g_t). A layer is computed in one of
two ways:

* A linear rule computes d_t = v_t = mu_t v_{t-1} + s g_t. If v_0 = 0, filtering g_t gives the same result as filtering
  x_t first and then applying W. The layer therefore filters x and runs torch's layer over the filtered x.
* With a nonlinear rule, or if v_0 from an earlier chunk is not 0, the layer first computes d_t. Then torch's layer or a
  time loop runs the cell over d_t. The contribution of v_0 to v_t is the product mu_1 ... mu_t times v_0. When it falls
  below float precision, the layer switches to the first way.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, pad
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint
from typing_extensions import Unpack, override

from hbnode._checks import as_count, as_real, check_bool, check_input, tensor_fix
from hbnode._torch import (
    cpu_has_layer,
    fused_layer,
    is_autocast,
    may_look,
    needs_reference,
    no_autocast,
    untraced,
)
from hbnode._tree import Record, record
from hbnode.nn._scan import BLOCK, Cell, run_cell
from hbnode.nn._signatures import shares_arguments
from hbnode.nn.orthogonal import ANGLES, OrthogonalWeights, parameter_groups, rebase_every
from hbnode.nn.rules import LinearRule, Momentum, Rule, RuleName, RuleState, make_rule, memory_dtype
from hbnode.nn.sequences import Series, check_choice, checked_dropout, shown

__all__ = [
    "MomentumRNN",
    "MomentumLSTM",
    "MomentumGRU",
    "MomentumDTRIV",
    "MomentumRNNCell",
    "MomentumLSTMCell",
    "MomentumGRUCell",
    "MomentumDTRIVCell",
    "RecurrentState",
    "DTRIV",
    "DTRIVCell",
    "parameter_groups",
    "rebase_every",
    "TanhRNN",
    "sparse_",
]

SMALL_PRODUCT = 2**21  # up to this many multiplications per sample, torch's layer with W = I is faster than a time loop
SHOWN = (
    "num_layers",
    "rule",
    "has_bias",
    "batch_first",
    "bidirectional",
    "dropout",
    "nonlinearity",
    "forget_bias",
    "init",
)
CHUNK_SIZE = 2**19  # number of filtered values that are computed and stored at once


@record
class RecurrentState(Record):
    """The state from which a layer or cell continues a sequence; entries that the layer or cell does not use are None.

    It holds the hidden state and the memory of the rule that filters W x + b. The first axis of a layer's state is
    layers * directions, as in torch.nn. A cell's state has no such axis. ``n`` is the number of features of W x + b:
    4 hidden_size for an LSTM, 3 hidden_size for a GRU, and hidden_size otherwise.

    An LSTM's state unpacks into h and c: ``output, (h, c) = lstm(x)``. ``state[0]`` is h, and ``state[1]`` is c.

    Attributes:
        h: hidden state (..., batch, hidden_size).
        c: cell state of an LSTM (..., batch, hidden_size).
        v: momentum of the rule (..., batch, n), used by all rules except RMSProp.
        m: running mean of (W x + b)^2 (..., batch, n), used by Adam and RMSProp.
        g: W x + b at the last time step (..., batch, n), used by adaptive momentum.
        t: number of time steps so far (batch,), int64, used by NAG and scheduled restart.

    Example:
        >>> import hbnode
        >>> output, state = hbnode.nn.MomentumGRU(3, 5, num_layers=2)(torch.ones(7, 4, 3))
        >>> state, state.h[-1].shape
        (RecurrentState(h=(2, 4, 5), v=(2, 4, 15)), torch.Size([4, 5]))
        >>> output, (h, c) = hbnode.nn.MomentumLSTM(3, 5)(torch.ones(7, 4, 3))
        >>> h.shape
        torch.Size([1, 4, 5])
    """

    h: Tensor
    c: Tensor | None = None
    v: Tensor | None = None
    m: Tensor | None = None
    g: Tensor | None = None
    t: Tensor | None = None

    @staticmethod
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name == "t" else memory_dtype(new) if name in "vmg" else new

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self[0], self[1]))

    def __getitem__(self, index: int) -> Tensor:
        if self.c is None or index not in (0, 1):  # -1, allowed for torch.nn's pair, would be c if a user meant h[-1]
            raise TypeError(
                f"the entries of a RecurrentState are read by name, got state[{index!r}]. Fix: state.h[-1] for the "
                "last layer's h; only the state of an LSTM is also a pair, (h, c)."
            )
        return (self.h, self.c)[index]

    def __getattr__(self, name: str) -> Any:
        fix = f" Fix: state.h.{name}." if hasattr(Tensor, name) and not name.startswith("_") else ""
        raise AttributeError(f"a RecurrentState has no attribute {name!r}.{fix}")


@dataclasses.dataclass(frozen=True)
class SequenceBatch:
    """A checked batch of sequences, and the layout in which the user passed it.

    Attributes:
        x: inputs (T, batch, input_size), zero on padding.
        packed: the user's PackedSequence; None if the user passed a tensor.
        is_single: whether the user passed one sequence without a batch axis.
        batch_first: whether the batch axis comes first in the user's layout.
        valid: mask (T, batch) that is True at time steps that are not padding; None if the input was not packed.
    """

    x: Tensor
    packed: PackedSequence | None = None
    is_single: bool = False
    batch_first: bool = False
    valid: Tensor | None = None

    @classmethod
    def read(cls, x: Tensor | PackedSequence, input_size: int, batch_first: bool) -> "SequenceBatch":
        """Check the inputs x of a layer and return them as a SequenceBatch.

        Raise TypeError or ValueError if x is not valid.
        """
        packed = x if isinstance(x, PackedSequence) else None
        values = x.data if isinstance(x, PackedSequence) else x
        if not isinstance(values, Tensor) or not values.is_floating_point():
            got, fix = (values.dtype, "x.float()") if isinstance(values, Tensor) else (type(x).__name__, tensor_fix(x))
            raise TypeError(f"x must be a floating-point tensor or a PackedSequence, got {got}. Fix: {fix}.")
        shape = tuple(values.shape)
        dims = (2,) if packed else (2, 3)
        time = 1 if batch_first and len(shape) == 3 else 0
        if values.dim() not in dims or shape[-1] != input_size or shape[time] == 0:
            axes = "(batch, T, input_size)" if batch_first else "(T, batch, input_size)"
            axes = "a PackedSequence of samples (input_size,)" if packed else f"{axes} or (T, input_size)"
            raise ValueError(
                f"x must be {axes} with input_size={input_size} and at least one sample, got {shape}. "
                "Fix: x.unsqueeze(-1) if a sample is one number, or another input_size."
            )
        if packed:
            padded, lengths = pad_packed_sequence(packed._replace(sorted_indices=None, unsorted_indices=None))
            valid = torch.arange(len(padded), device=lengths.device).unsqueeze(1) < lengths
            return cls(padded, packed, valid=valid.to(padded.device))
        if values.dim() == 2:
            return cls(values.unsqueeze(1), is_single=True)
        return cls(values.transpose(0, 1) if batch_first else values, batch_first=batch_first)

    @property
    def lengths(self) -> Tensor:
        """The number of time steps of each sequence, (batch,)."""
        if self.valid is None:
            return torch.full(self.x.shape[1:2], self.x.shape[0], device=self.x.device)
        return self.valid.sum(0)

    def run(
        self, name: str, x: Tensor, state: Tensor | tuple[Tensor, Tensor], weights: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """Call torch's function ``name``, such as "lstm", on x (T, batch, n), with an initial state and weights.

        Return its output, and the states after the last time step. See :func:`hbnode._torch.fused_layer` for the
        arguments.
        """
        if self.packed is None or self.valid is None:
            return fused_layer(name, x, state, weights)
        h, *last = fused_layer(name, x[self.valid], state, weights, self.packed.batch_sizes)
        return h.new_zeros(*self.valid.shape, h.shape[-1]).index_put((self.valid,), h), *last

    def reverse(self, y: Tensor) -> Tensor:
        """Reverse each sequence of y (T, batch, n) in time; padding stays at the end."""
        if self.valid is None:
            return y.flip(0)
        steps = torch.arange(len(y), device=y.device).unsqueeze(1)
        at = torch.where(self.valid, self.lengths - 1 - steps, steps)
        return y.gather(0, at.unsqueeze(-1).expand_as(y))

    def last(self, y: Tensor) -> Tensor:
        """Select the values of y (T, batch, n) at the last time step of each sequence; return them, (batch, n)."""
        if self.valid is None:
            return y[-1]
        at = (self.lengths - 1).view(1, -1, 1)
        return y.gather(0, at.expand(1, -1, y.shape[-1])).squeeze(0)

    def segments(self) -> Iterator[tuple[slice, int]]:
        """Split time into intervals at the time steps where sequences end.

        Yield each interval as a slice of time steps, and the number of sequences that last through it.
        """
        if self.packed is None:
            yield slice(0, len(self.x)), self.x.shape[1]
            return
        sizes, start = self.packed.batch_sizes.tolist(), 0
        for stop in range(1, len(sizes) + 1):
            if stop == len(sizes) or sizes[stop] != sizes[start]:
                yield slice(start, stop), sizes[start]
                start = stop

    def output(self, y: Tensor) -> Any:
        """Convert y (T, batch, n) to the layout of the user's input: packed, batch first, or one sequence."""
        if self.packed:
            return self.packed._replace(data=y[self.valid])
        if self.is_single:
            return y.squeeze(1)
        return y.transpose(0, 1) if self.batch_first else y

    def sort(self, z: Tensor, axis: int) -> Tensor:
        """Reorder z along the batch dimension ``axis``, from the user's order of the sequences to that of ``x``.

        The orders differ if packing sorted the sequences by length.
        """
        z = z.unsqueeze(axis) if self.is_single else z
        order = self.packed.sorted_indices if self.packed else None
        return z if order is None else z.index_select(axis, order)

    def unsort(self, z: Tensor, axis: int) -> Tensor:
        """Reorder z along the batch dimension ``axis``, from the order of ``x`` to that of the user.

        This is the inverse of :meth:`sort`.
        """
        order = self.packed.unsorted_indices if self.packed else None
        z = z if order is None else z.index_select(axis, order)
        return z.squeeze(axis) if self.is_single else z


InitialState = RecurrentState | tuple[Tensor, Tensor] | Tensor | None
"""States that a layer or cell takes: that of an earlier call; h, or (h, c) of an LSTM; None, which is zeros."""

Entries = tuple[Any, ...]
"""The entries h, c, v, m and g of a state, in which those that a layer does not need are None."""


# The equations of the cells. A cell computes h_t, c_t = cell(d_t, h_{t-1}, c_{t-1}). A rule computes d_t from the
# pre-activations g_1, ..., g_t with g_t = W x_t + b. The momentum rule is d_t = v_t = mu v_{t-1} + s g_t.
# To add a cell, add a step function and a Cell here, and a layer class and a cell class below. To add a rule, add a
# class to rules.py.


def _tanh_step(d: Tensor, h: Tensor, c: None, u: Tensor, bias: None) -> tuple[Tensor, None]:
    return torch.tanh(torch.addmm(d, h, u)), None


def _relu_step(d: Tensor, h: Tensor, c: None, u: Tensor, bias: None) -> tuple[Tensor, None]:
    return torch.relu(torch.addmm(d, h, u)), None


def _lstm_step(d: Tensor, h: Tensor, c: Tensor, u: Tensor, bias: None) -> tuple[Tensor, Tensor]:
    i, f, g, o = torch.addmm(d, h, u).chunk(4, -1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def _gru_step(d: Tensor, h: Tensor, c: None, u: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
    uh = h @ u if bias is None else torch.addmm(bias, h, u)
    n = h.shape[-1]
    r, z = (uh[..., : 2 * n] + d[..., : 2 * n]).sigmoid().chunk(2, -1)
    new = torch.addcmul(d[..., 2 * n :], r, uh[..., 2 * n :]).tanh()
    return torch.lerp(new, h, z), None


def _modrelu_step(d: Tensor, h: Tensor, c: None, u: Tensor, bias: Tensor) -> tuple[Tensor, None]:
    z = torch.addmm(d, h, u)
    return z.sign() * torch.relu(z.abs() + bias), None


LSTM = Cell(_lstm_step, gates=4, has_cell_state=True, torch_layer="lstm")
GRU = Cell(_gru_step, gates=3, adds_bias=True, torch_layer="gru")
DTRIV_CELL = Cell(_modrelu_step, adds_bias=True)
ELMAN = {"tanh": Cell(_tanh_step, torch_layer="rnn_tanh"), "relu": Cell(_relu_step, torch_layer="rnn_relu")}
NO_MOMENTUM = Momentum(momentum=0.0, step_size=1.0)  # d_t = g_t


# The base class of layers and cells


class Weights(NamedTuple):
    """The parameters of a layer in one direction: W_ih, W_hh, b_ih, and b_hh or the bias of the activation."""

    w: Tensor
    u: Tensor
    b: Tensor | None
    bias: Tensor | None


class RecurrentBase(nn.Module):
    """The base class of layers and cells. It creates the parameters and checks states."""

    cell: Cell
    names: ClassVar[tuple[str, ...]] = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # in the order of Weights
    forget_bias: float

    def __init__(self, input_size: int, hidden_size: int, bias: bool, rule: Rule, factory: dict[str, Any]) -> None:
        super().__init__()
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.rule = rule
        self.has_bias = check_bool(bias, "bias")
        for suffix, width in self._suffixes():
            for name, shape in self._shapes(width).items():
                self.register_parameter(name + suffix, nn.Parameter(torch.empty(shape, **factory)))
        self.reset_parameters()

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("momentum", "step_size"):
            fix = f"layer.rule = dataclasses.replace(layer.rule, {name}={value!r})"
            raise AttributeError(f"{name} is that of layer.rule, {self.rule}. Fix: {fix}.")
        super().__setattr__(name, value)

    if TYPE_CHECKING:

        @override
        def __getattr__(self, name: str) -> Tensor:
            """Return the parameter with this name, such as ``weight_ih``."""

    def _suffixes(self) -> list[tuple[str, int]]:
        """Return a list of pairs (suffix, input size), with a pair for each layer and direction.

        The parameters' names end with the suffix. The suffixes are those of torch.nn, such as "_l0_reverse"; a cell has
        the suffix "".
        """
        return [("", self.input_size)]

    def _shapes(self, input_size: int) -> dict[str, tuple[int, ...]]:
        n = self.cell.gates * self.hidden_size
        weights = {"weight_ih": (n, input_size), "weight_hh": (n, self.hidden_size)}
        return weights | ({"bias_ih": (n,), "bias_hh": (n,)} if self.has_bias else {})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set W_ih to a random orthogonal matrix, W_hh to ones on its diagonal and 0 elsewhere, and biases to 0.

        In an LSTM or GRU, W_hh has the rows of several gates; its diagonal lies in the rows of the first gate. In an
        LSTM, the entries of b_ih and b_hh that belong to the forget gate are ``forget_bias`` instead of 0.
        References: appendices A and F of Nguyen et al.
        """
        n = self.hidden_size
        for name in (name + suffix for suffix, width in self._suffixes() for name in self._shapes(width)):
            old = getattr(self, name)
            new = torch.zeros_like(old, dtype=memory_dtype(old.dtype))
            if name.startswith("weight_ih"):
                nn.init.orthogonal_(new)
            elif name.startswith("weight_hh"):
                nn.init.eye_(new)
            elif self.cell.has_cell_state:
                new[n : 2 * n] = self.forget_bias
            if name in self._parameters:
                old.copy_(new)
            else:  # parametrized
                setattr(self, name, new.to(old.dtype))

    def _weights(self, suffix: str = "") -> Weights:
        w, u, b, bias = self.names
        biases = getattr(self, b + suffix, None), getattr(self, bias + suffix, None)
        return Weights(getattr(self, w + suffix), getattr(self, u + suffix), *biases)

    def _check_weight_norm(self) -> None:
        """Raise ValueError if weight_norm made a weight NaN.

        weight_norm divides by the norm of each row, and the initial W_hh has rows of zeros.
        """
        for name, made in getattr(self, "parametrizations", {}).items():
            if type(made[0]).__name__ != "_WeightNorm" or not may_look():
                continue
            given_is_finite = made.original0.isfinite().all() and made.original1.isfinite().all()
            if given_is_finite and getattr(self, name).isnan().any():
                raise ValueError(
                    f"weight_norm makes NaN of {name}: it divides by norms that are 0, and at first most rows of W_hh "
                    f"are zero. Fix: torch.nn.init.orthogonal_(layer.{name}) before weight_norm(layer, {name!r})."
                )

    def _read_state(
        self, state: InitialState, hx: InitialState, layers: tuple[int, ...], batch: tuple[int, ...], like: Tensor
    ) -> RecurrentState:
        """Check the user's initial state and return it as a RecurrentState.

        ``state`` and ``hx`` are two names of the same argument. A missing h or c becomes zeros, in the dtype and on the
        device of ``like``. A missing memory of the rule stays None. The shape of an entry begins with ``layers`` and
        ``batch``: ``layers`` is (layers * directions,), or () in a cell; ``batch`` is (batch,), or () without a batch
        axis.
        """
        if state is not None and hx is not None:
            raise TypeError("state and hx are two names of one argument, and both were given. Fix: pass only state.")
        state = hx if state is None else state
        shape = (*layers, *batch, self.hidden_size)
        if state is None:
            state = RecurrentState(like.new_zeros(shape))
        else:
            if not isinstance(state, RecurrentState):
                state = _from_tensors(state, self.cell.has_cell_state)
            state = state.outside_inference_mode()
        if self.cell.has_cell_state and state.c is None:
            state = dataclasses.replace(state, c=like.new_zeros(shape))
        expected = dict.fromkeys("hc" if self.cell.has_cell_state else "h", shape)
        if not (state.v is None and state.m is None and state.g is None and state.t is None):
            expected |= dict.fromkeys(self.rule.memory, (*shape[:-1], self.cell.gates * self.hidden_size))
            expected |= {"t": batch} if "t" in expected else {}
        for name in RecurrentState.__match_args__:
            _check_entry(name, getattr(state, name), expected.get(name), like)
        return state

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, " + shown(self, filter(vars(self).__contains__, SHOWN))


def _check_entry(name: str, z: Tensor | None, wanted: tuple[int, ...] | None, like: Tensor) -> None:
    """Raise ValueError unless the entry z of a state has the shape ``wanted`` and a dtype that fits ``like``.

    If ``wanted`` is None, z must be None. ``name`` is the name of the entry in the error message.
    """
    found = None if z is None else tuple(z.shape)
    if found != wanted:
        raise ValueError(
            f"state.{name} must be {wanted}, got {found}. Fix: pass on the state of the same layer and batch, "
            "h alone, or None at the start of a sequence."
        )
    if z is None:
        return
    if name == "t":
        if z.is_floating_point() or z.dtype == torch.bool:
            raise ValueError(f"state.t must be whole numbers of samples, got {z.dtype}. Fix: t.long().")
        return
    dtype = like.dtype if name in "hc" else memory_dtype(like.dtype)
    if z.dtype != dtype and not is_autocast(like):
        raise ValueError(f"state.{name} must be {dtype}, x being {like.dtype}, got {z.dtype}. Fix: .to({dtype}).")


def _from_tensors(state: object, has_cell_state: bool) -> RecurrentState:
    """Convert an initial state in the form of torch.nn, which is h or the pair (h, c) of an LSTM, to a RecurrentState.

    Raise TypeError for other types.
    """
    if isinstance(state, Tensor):
        return RecurrentState(state)
    parts = tuple(state) if isinstance(state, (tuple, list)) else ()
    if has_cell_state and len(parts) == 2 and all(isinstance(z, Tensor) for z in parts):
        return RecurrentState(*parts)
    pair = ", a pair (h, c)" if has_cell_state else ""
    got = ", ".join(type(z).__name__ for z in parts)
    fix = "pass the state that the previous call returned, or state.detach() to cut its graph."
    if any(isinstance(z, RecurrentState) for z in parts):
        fix = "output, state = cell(x, state); torch.nn's cells return only the state."
    got = f"{type(state).__name__} of ({got})" if parts else type(state).__name__
    raise TypeError(f"state must be a RecurrentState, h{pair} or None, got a {got}. Fix: {fix}")


def _check_dtype(x: Tensor, dtype: torch.dtype, fix: str = "") -> None:
    if x.dtype != dtype and not is_autocast(x):
        raise ValueError(f"x must be {dtype} as the parameters are, got {x.dtype}. Fix: x.to({dtype}){fix}.")


class LayerOptions(TypedDict, total=False):
    """The keyword arguments of every layer."""

    batch_first: bool
    dropout: float
    bidirectional: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class MomentumLayerOptions(LayerOptions, total=False):
    """The keyword arguments of every layer that filters W_ih x + b_ih by a rule."""

    rule: RuleName | Rule
    momentum: float | None
    step_size: float | None


class CellOptions(TypedDict, total=False):
    """The keyword arguments of every cell that filters W_ih x + b_ih by a rule."""

    rule: RuleName | Rule
    device: torch.device | str | None
    dtype: torch.dtype | None


class RecurrentCell(RecurrentBase):
    """The base class of the cells, which compute one time step per call.

    A cell first computes W_ih x + b_ih from the input x. This pre-activation passes through a filter over time, called
    the rule. The cell then computes the new hidden state from the filtered pre-activation and W_hh h + b_hh.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        momentum: the rule's decay μ, in [0, 1], if ``rule`` is "momentum" or "adam". The other rules have no μ to set.
            Default: ``None`` (0.6).
        step_size: the rule's factor s of its input, positive, if ``rule`` is a name. Default: ``None`` (0.6).
        bias: whether W_ih x has a bias b_ih (before the filter) and W_hh h has a bias b_hh (not filtered).
            Default: ``True``.
        rule: the filter of W_ih x + b_ih; see :class:`hbnode.nn.MomentumLSTM`. Default: ``"momentum"``.
        device: device of the parameters. Default: ``None`` (torch's default).
        dtype: dtype of the parameters. Default: ``None`` (torch's default).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h, and c of an LSTM, (batch, hidden_size).
        memory of the rule: (batch, gates * hidden_size).
        gates: 4 for an LSTM, 3 for a GRU, and 1 otherwise.

    Raises:
        TypeError: rule is neither a name nor a Rule, or bias is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not use a coefficient that is given.
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
        made, factory = make_rule(rule, momentum, step_size), {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, made, factory)

    def forward(
        self, x: Tensor, state: InitialState = None, *, hx: InitialState = None
    ) -> tuple[Tensor, RecurrentState]:
        """Compute one time step.

        Arguments:
            x: (batch, input_size) or (input_size,).
            state: the state after the previous time step, or the initial h, or (h, c) of an LSTM. None means zeros.
                Default: ``None``.
            hx: another name of ``state``, as in torch.nn. Default: ``None``.

        Returns:
            The new h (batch, hidden_size) or (hidden_size,), and the state for the next call, which contains h.

        Raises:
            ValueError: x or the state has another shape or dtype than expected.
        """
        check_input(x, "x")
        if x.dim() not in (1, 2) or x.shape[-1] != self.input_size:
            raise ValueError(
                f"x must be (batch, input_size) or (input_size,) with input_size={self.input_size}, got "
                f"{tuple(x.shape)}. Fix: one sample at a time; a layer takes sequences."
            )
        _check_dtype(x, self.weight_ih.dtype)
        state = self._read_state(state, hx, (), tuple(x.shape[:-1]), x)
        if x.dim() == 1:
            h, state = self._step(x.unsqueeze(0), state.map(lambda z: z.unsqueeze(0)))
            return h.squeeze(0), state.map(lambda z: z.squeeze(0))
        return self._step(x, state)

    if TYPE_CHECKING:  # nn.Module's returns Any
        __call__ = forward

    def _step(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        self._check_weight_norm()
        weights = self._weights()
        g = linear(x, weights.w, weights.b)
        memory = RuleState(state.v, state.m, state.g, state.t)
        if all(z is None for z in memory):
            memory = self.rule.start(g)
            if memory.t is not None:
                memory = memory._replace(t=torch.zeros(len(x), dtype=torch.int64, device=x.device))
        d, memory = self.rule(g.unsqueeze(0), memory)
        _, h, c = run_cell(self.cell, d, state.h, state.c, weights.u, weights.bias)
        return h, RecurrentState(h, c, *memory)  # type: ignore[arg-type]  # t of a cell's memory is a tensor


class RecurrentLayer(RecurrentBase):
    """The base class of the layers, which run cells over sequences.

    At each time step a cell first computes W_ih x + b_ih from the input x. This pre-activation passes through a filter
    over time, called the rule. The cell then computes the new hidden state from the filtered pre-activation and
    W_hh h + b_hh, where h is the previous hidden state.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        num_layers: number of stacked layers. Default: ``1``.
        bias: whether W_ih x has a bias b_ih (before the filter) and W_hh h has a bias b_hh (not filtered).
            Default: ``True``.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        dropout: probability of dropping an output between layers in training. Default: ``0.0``.
        bidirectional: whether each layer has a second cell, which runs backwards in time. Default: ``False``.
        rule: the filter of W_ih x + b_ih: "momentum", "nag" (Nesterov's accelerated gradient), "restart" (NAG with
            scheduled restart), "adam", "rmsprop" or "adaptive" (input-dependent momentum). A name selects a rule with
            default coefficients. To set other coefficients, pass an object of :mod:`hbnode.nn.rules`, such as
            ``rule=Adam(beta=0.99)``. With ``Momentum(0.0, 1.0)``, which does not change its input, the layer computes
            the same as the layer of torch.nn, and their state_dicts are interchangeable. Default: ``"momentum"``.
        momentum: the rule's decay μ, in [0, 1], if ``rule`` is "momentum" or "adam". The other rules have no μ to set.
            Default: ``None`` (0.6).
        step_size: the rule's factor s of its input, positive, if ``rule`` is a name. Default: ``None`` (0.6).
        device: device of the parameters. Default: ``None`` (torch's default).
        dtype: dtype of the parameters. Default: ``None`` (torch's default).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h, and c of an LSTM, (layers * directions, batch, hidden_size).
        memory of the rule: (layers * directions, batch, gates * hidden_size).
        gates: 4 for an LSTM, 3 for a GRU, and 1 otherwise.

    Raises:
        TypeError: rule is neither a name nor a Rule, or bias, batch_first or bidirectional is not a bool.
        ValueError: a size, number or name is not valid, or the rule does not use a coefficient that is given.
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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.num_layers = as_count(num_layers, "num_layers")
        self.bias, self.batch_first = check_bool(bias, "bias"), check_bool(batch_first, "batch_first")
        self.bidirectional = check_bool(bidirectional, "bidirectional")
        self.dropout = checked_dropout(dropout, num_layers)
        self.directions = ("", "_reverse") if bidirectional else ("",)
        made, factory = make_rule(rule, momentum, step_size), {"device": device, "dtype": dtype}
        super().__init__(input_size, hidden_size, bias, made, factory)

    @override
    def _suffixes(self) -> list[tuple[str, int]]:
        widths = [self.input_size] + [len(self.directions) * self.hidden_size] * (self.num_layers - 1)
        return [(f"_l{layer}{suffix}", width) for layer, width in enumerate(widths) for suffix in self.directions]

    @untraced  # torch.compile would unroll the time loop; it also skips torch.nn's layers
    def forward(
        self, x: Series, state: InitialState = None, *, hx: InitialState = None
    ) -> tuple[Series, RecurrentState]:
        """Run over sequences, or over the next chunk of sequences.

        Arguments:
            x: (T, batch, input_size), with ``batch_first`` (batch, T, input_size), or one sequence (T, input_size),
                or a PackedSequence.
            state: the state that an earlier call returned, or the initial h, or (h, c) of an LSTM. None means zeros.
                Default: ``None``.
            hx: another name of ``state``, as in torch.nn. Default: ``None``.

        Returns:
            h at every time step, in the layout of x with directions * hidden_size features, and the final state.

        Raises:
            TypeError: x is not floating point.
            ValueError: x or the state has another shape than expected.
        """
        self._check_weight_norm()
        batch = SequenceBatch.read(x, self.input_size, self.batch_first)
        shape = () if batch.is_single else tuple(batch.x.shape[1:2])
        given = self._read_state(state, hx, (self.num_layers * len(self.directions),), shape, batch.x)
        t: int | Tensor | None = 0 if "t" in self.rule.memory else None
        if given.t is not None:
            t = batch.sort(given.t, axis=0)
            t = int(t[0]) if len(t) and not t.is_meta and bool((t == t[0]).all()) else t
        starts = _map(functools.partial(batch.sort, axis=1), (given.h, given.c, given.v, given.m, given.g))
        ends: list[Entries] = []
        out, autocast = batch.x, is_autocast(batch.x)
        with no_autocast(batch.x):
            for layer in range(self.num_layers):
                if layer > 0 and self.dropout and self.training:
                    out = dropout(out, self.dropout)
                outputs = []
                for suffix in self.directions:
                    start = _map(operator.itemgetter(len(ends)), starts)
                    inputs = batch.reverse(out) if suffix else out
                    h, end = self._run(batch, inputs, self._weights(f"_l{layer}{suffix}"), start, t, autocast)
                    outputs.append(batch.reverse(h) if suffix else h)
                    ends.append(end)
                out = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
        h, c, v, m, g = _map(lambda *z: batch.unsort(torch.stack(z), axis=1), *ends)
        t = None if t is None else batch.unsort(t + batch.lengths, axis=0)
        return batch.output(out), RecurrentState(h, c, v, m, g, t)

    if TYPE_CHECKING:  # nn.Module's returns Any
        __call__ = forward

    def _run(
        self,
        batch: SequenceBatch,
        x: Tensor,
        weights: Weights,
        state: Entries,
        t: int | Tensor | None,
        autocast: bool,
    ) -> tuple[Tensor, Entries]:
        """Run one layer in one direction over x (T, batch, input_size).

        ``state`` is the state before the first time step of x, after ``t`` earlier time steps. ``autocast`` is whether
        autocast is enabled; torch's layer then runs in half precision, but the filter does not.

        Returns:
            h (T, batch, hidden_size), and the state after the last time step of each sequence.
        """
        if autocast:
            x = x.to(weights.w.dtype)
            wide = memory_dtype(x.dtype)
            state = *_map(lambda z: z.to(x.dtype), state[:2]), *_map(lambda z: z.to(wide), state[2:])
        _check_dtype(x, weights.w.dtype, f", or layer.to({x.dtype})")
        h, c, v, m, g = state
        if v is None and isinstance(self.rule, LinearRule):
            filtered, w = self._filter_inputs(x, weights, t)
            out, h, c = self._run_cell(batch, filtered, w, weights, h, c, autocast)
            return out, (h, c, linear(batch.last(filtered), w).to(memory_dtype(x.dtype)), None, None)
        if v is None and m is None and g is None:
            state = h, c, *self.rule.start(x.new_empty(x.shape[1], len(weights.w)))[:3]
        outputs: list[Tensor] = []
        ends: list[Entries] = []
        for time, count in batch.segments():
            ends.insert(0, _map(operator.itemgetter(slice(count, None)), state))
            state = _map(operator.itemgetter(slice(count)), state)
            since = None if t is None else (t[:count] if isinstance(t, Tensor) else t) + time.start
            h, state = self._run_from(state, since, x[time, :count], weights, autocast)
            outputs.append(pad(h, (0, 0, 0, x.shape[1] - count)))
        return torch.cat(outputs), _map(lambda *z: torch.cat(z), state, *ends)

    def _run_from(
        self, state: Entries, t: int | Tensor | None, x: Tensor, weights: Weights, autocast: bool
    ) -> tuple[Tensor, Entries]:
        """Run one layer in one direction over sequences of equal length, from any state.

        Arguments and results are those of :meth:`_run`. The initial momentum v_0 is ``state[2]``. At first, the cell
        runs over the filtered W x + b. If the rule is linear, torch's layer runs over the filtered x instead as soon as
        the contribution of v_0 is negligible.
        """
        h, c, v, m, g = state
        memory, outputs, steps = RuleState(v, m, g, t), [], len(x)
        if isinstance(self.rule, LinearRule) and not isinstance(t, Tensor):
            decay = self.rule.coefficients(t, len(x)).cumprod(0)  # factor of v_0; negligible below eps**2
            steps = int((decay.abs() >= torch.finfo(x.dtype).eps ** 2).sum())
        is_whole = x.is_cuda and torch.is_grad_enabled()  # then one call of cuDNN computes all time steps
        rows = len(x) if is_whole else max(BLOCK, CHUNK_SIZE // max(1, x.shape[1] * len(weights.w)))
        for part in x[:steps].split(rows) if steps else ():
            d, memory = self._filter(part, weights, memory)
            out, h, c = self._run_cell(SequenceBatch(d), d, None, weights, h, c, autocast)
            outputs.append(out)
        if steps < len(x):
            filtered, w = self._filter_inputs(x, weights, t)
            out, h, c = self._run_cell(SequenceBatch(x), filtered[steps:], w, weights, h, c, autocast)
            memory = RuleState(linear(filtered[-1], w).to(memory_dtype(x.dtype)))
            outputs.append(out)
        return torch.cat(outputs), (h, c, *memory[:3])

    def _filter_inputs(self, x: Tensor, weights: Weights, t: int | Tensor | None) -> tuple[Tensor, Tensor]:
        """Filter the inputs x by a linear rule, starting from v_0 = 0.

        This replaces the filter of W x + b, which usually has more features. Return the filtered inputs x', and a
        matrix W' with v = W' x'. If there is a bias b, x gets an additional feature that is 1, and W' has the
        additional column b.
        """
        w, b = weights.w, weights.b
        if b is not None:  # x gets an additional feature that is 1 before the filter, and W gets the column b
            x, w = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1), torch.cat([w, b.unsqueeze(1)], dim=1)
        return self.rule(x, RuleState(t=t))[0], w

    def _filter(self, x: Tensor, weights: Weights, memory: RuleState) -> tuple[Tensor, RuleState]:
        """Filter the pre-activations W x + b by the rule, starting from ``memory``.

        Return the result (T, batch, n), and the memory of the rule after the last time step. If the result is large,
        only x is saved for backward, and W x + b is recomputed.
        """

        def filtered(x: Tensor, w: Tensor, b: Tensor | None, memory: RuleState) -> tuple[Tensor, RuleState]:
            return self.rule(linear(x, w, b), memory)

        is_small = x.shape[0] * x.shape[1] * len(weights.w) < CHUNK_SIZE
        if is_small or not torch.is_grad_enabled() or needs_reference():
            return filtered(x, weights.w, weights.b, memory)
        return checkpoint(filtered, x, weights.w, weights.b, memory, use_reentrant=False, preserve_rng_state=False)

    def _run_cell(
        self,
        batch: SequenceBatch,
        x: Tensor,
        w: Tensor | None,
        weights: Weights,
        h: Tensor,
        c: Tensor | None,
        autocast: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the cell over filtered inputs, with torch's layer if that is faster, otherwise with a time loop.

        The filtered pre-activation is d = w x. If w is None, x is d itself. Return h at all time steps,
        (T, batch, hidden_size), and h and c after the last time step of each sequence. c is None for cells without a
        cell state.
        """
        name, u, bias = self.cell.torch_layer, weights.u, weights.bias
        if w is None and name is not None:
            is_small = x.shape[1] * len(u) ** 2 <= SMALL_PRODUCT
            if x.is_cuda or (is_small and (name == "lstm" or not torch.is_grad_enabled())):
                w, autocast = torch.eye(len(u), dtype=u.dtype, device=u.device), autocast and x.is_cuda
        if w is None or name is None:
            d = x if w is None else linear(x, w)
            out, _, c = run_cell(self.cell, d, h, c, u, bias)
            return out, batch.last(out), c
        flat = [w, u] if bias is None else [w, u, torch.zeros_like(bias), bias]
        kind = x.device.type
        in_half = autocast and (kind != "cpu" or cpu_has_layer(name, torch.get_autocast_dtype(kind)))
        with torch.autocast(kind) if in_half else nullcontext():
            state = h.unsqueeze(0) if c is None else (h.unsqueeze(0), c.unsqueeze(0))
            out, *last = batch.run(name, x, state, flat)
        return out, last[0].squeeze(0), None if c is None else last[1].squeeze(0)

    def flatten_parameters(self) -> None:
        """Do nothing. The method exists so that layers of torch.nn can be replaced by layers of hbnode.

        In layers of torch.nn it stores the weights in one block of memory for cuDNN. Here every call prepares that
        block.
        """

    def to_torch(self) -> "TorchLayers":
        """Return a copy for inference and deployment: layers of torch.nn, each with a filter before it.

        Call the copy as ``output, state = copy(x)``. It takes no initial state and has no dropout. The returned state
        is that of torch.nn: h, or (h, c) for an LSTM. If the rule is linear, the copy filters x. Otherwise it filters
        W x + b, and the input weight of torch's layer is the identity.

        Raises:
            ValueError: torch.nn has no layer of this cell.
        """
        if self.cell.torch_layer is None:
            raise ValueError(f"torch.nn has no layer of the cell of {type(self).__name__}. Fix: export its cell.")
        weights = [self._weights(suffix) for suffix, _ in self._suffixes()]
        return TorchLayers(self.cell.torch_layer, self.rule, weights, len(self.directions), self.batch_first)


def _map(function: Callable[..., Tensor], *states: Entries) -> Entries:
    """Call ``function(a, b, ...)`` on the corresponding entries of several states; return the tuple of the results.

    A state is a tuple. An entry that is None stays None.
    """
    found: list[Tensor | None] = []
    for entries in zip(*states, strict=True):
        found.append(None if entries[0] is None else function(*entries))
    return tuple(found)


@shares_arguments
class MomentumRNN(RecurrentLayer):
    """An Elman network in which momentum, or another rule, filters W x + b over time.

    With weights W and U, the cell computes from the input x_t at time step t::

        g_t = W x_t + b_ih
        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        h_t = tanh(U h_{t-1} + b_hh + d_t)

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2.

    Arguments:
        nonlinearity: "tanh" or "relu". Default: ``"tanh"``.

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
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        **options: Unpack[MomentumLayerOptions],
    ) -> None:
        self.nonlinearity = check_choice(nonlinearity, "nonlinearity", tuple(ELMAN))
        self.cell = ELMAN[nonlinearity]
        super().__init__(input_size, hidden_size, num_layers, bias=bias, **options)


@shares_arguments
class MomentumRNNCell(RecurrentCell):
    """A cell that computes one time step of :class:`hbnode.nn.MomentumRNN`.

    With weights W and U, the rule filters g_t = W x_t + b_ih over time; its result is d_t. The new hidden state is
    h_t = tanh(U h_{t-1} + b_hh + d_t).

    Arguments:
        nonlinearity: "tanh" or "relu". Default: ``"tanh"``.
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
        **options: Unpack[CellOptions],
    ) -> None:
        self.nonlinearity = check_choice(nonlinearity, "nonlinearity", tuple(ELMAN))
        self.cell = ELMAN[nonlinearity]
        super().__init__(input_size, hidden_size, momentum, step_size, bias, **options)


@shares_arguments
class MomentumLSTM(RecurrentLayer):
    """An LSTM in which a rule filters W x + b over time: MomentumLSTM, NAG-LSTM, SRLSTM, AdamLSTM or RMSPropLSTM.

    With weights W and U, the cell computes from the input x_t at time step t::

        g_t = W x_t + b_ih
        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    If the rule is linear, the layer filters x instead of W x + b, which gives the same d_t, and runs torch's layer over
    the filtered x. With other rules the layer first computes d_t, and then runs torch's layer or a time loop over d_t.
    It does so also for a linear rule until the momentum of an earlier chunk has decayed.

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    equations 9, 14, 15.

    Arguments:
        forget_bias: initial bias of the forget gate in b_ih and in b_hh. Default: ``1.0``.

    Example:
        >>> layer = MomentumLSTM(3, 5, momentum=0.9, batch_first=True)
        >>> output, state = layer(torch.ones(2, 7, 3))
        >>> output.shape, state.c.shape, state.v.shape
        (torch.Size([2, 7, 5]), torch.Size([1, 2, 5]), torch.Size([1, 2, 20]))
        >>> MomentumLSTM(3, 5, rule="adam", step_size=0.1).rule
        Adam(momentum=0.6, step_size=0.1, beta=0.9, eps=1e-08)
    """

    cell = LSTM

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        bias: bool = True,
        forget_bias: float = 1.0,
        **options: Unpack[MomentumLayerOptions],
    ) -> None:
        self.forget_bias = as_real(forget_bias, "forget_bias", "forget_bias=1.0")
        super().__init__(input_size, hidden_size, num_layers, bias=bias, **options)


@shares_arguments
class MomentumLSTMCell(RecurrentCell):
    """A cell that computes one time step of :class:`hbnode.nn.MomentumLSTM`, as in appendix F of its paper.

    With weights W and U, g_t = W x_t + b_ih, and d_t = rule(g_1, ..., g_t), by default v_t = μ v_{t-1} + s g_t::

        (i, f, c~, o) = U h_{t-1} + b_hh + d_t
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(c~)
        h_t = sigmoid(o) tanh(c_t)

    Arguments:
        forget_bias: initial bias of the forget gate in b_ih and in b_hh. Default: ``1.0``.

    Example:
        >>> cell, state = MomentumLSTMCell(3, 5, momentum=0.9), None
        >>> for x in torch.ones(7, 2, 3):
        ...     h, state = cell(x, state)
        >>> h.shape, state.v.shape
        (torch.Size([2, 5]), torch.Size([2, 20]))
    """

    cell = LSTM

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float | None = None,
        step_size: float | None = None,
        bias: bool = True,
        *,
        forget_bias: float = 1.0,
        **options: Unpack[CellOptions],
    ) -> None:
        self.forget_bias = as_real(forget_bias, "forget_bias", "forget_bias=1.0")
        super().__init__(input_size, hidden_size, momentum, step_size, bias, **options)


@shares_arguments
class MomentumGRU(RecurrentLayer):
    """A GRU with the gates of torch.nn.GRU, in which momentum, or another rule, filters W x + b over time.

    With weights W and U, the cell computes from the input x_t at time step t::

        g_t = W x_t + b_ih
        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 2, which adds momentum to any cell.

    Example:
        >>> output, state = MomentumGRU(3, 5, rule="rmsprop")(torch.ones(7, 2, 3))
        >>> output.shape, state.m.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 15]))
    """

    cell = GRU


@shares_arguments
class MomentumGRUCell(RecurrentCell):
    """A cell that computes one time step of :class:`hbnode.nn.MomentumGRU`.

    The rule filters g_t = W x_t + b_ih over time. Its result d_t consists of d_r, d_z and d_n, one for each gate. The
    recurrent weight U and the bias b_hh are divided among the gates in the same way::

        r = sigmoid(U_r h_{t-1} + b_hr + d_r),  z = sigmoid(U_z h_{t-1} + b_hz + d_z)
        n = tanh(r (U_n h_{t-1} + b_hn) + d_n)
        h_t = (1 - z) n + z h_{t-1}
    """

    cell = GRU


@shares_arguments
class MomentumDTRIV(OrthogonalWeights, RecurrentLayer):
    """A recurrent layer with an orthogonal recurrent weight B, in which momentum or another rule filters W x.

    With weights W and B, the cell computes from the input x_t at time step t::

        g_t = W x_t
        d_t = rule(g_1, ..., g_t),  by default v_t = μ v_{t-1} + s g_t
        h_t = modrelu(B h_{t-1} + d_t),  modrelu(z) = sign(z) relu(|z| + b)

    B is parametrized as the product of an orthogonal matrix, the base, and exp(A) with a skew-symmetric A ("dynamic
    trivialization"), as in ``torch.nn.utils.parametrizations.orthogonal``. :meth:`rebase` sets the base to B; see
    :func:`hbnode.nn.recurrent.rebase_every`. The only bias is b in modReLU.

    References: Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (arXiv:2006.06919),
    section 4; Lezcano-Casado, Trivializations for Gradient-Based Optimization on Manifolds (arXiv:1909.09501).

    Arguments:
        init: distribution of the initial B, a block-diagonal matrix of 2 × 2 rotations by random angles. "cayley" draws
            the angles from U(0, π/2) (Helfrich et al., arXiv:1707.09520), and "henaff" draws them from U(-π, π)
            (Henaff et al., arXiv:1602.06662).
            Default: ``"cayley"``.
    """

    cell = DTRIV_CELL

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        init: Literal["cayley", "henaff"] = "cayley",
        **options: Unpack[MomentumLayerOptions],
    ) -> None:
        self.init = check_choice(init, "init", tuple(ANGLES))
        super().__init__(input_size, hidden_size, num_layers, bias=True, **options)
        self._make_orthogonal()


@shares_arguments
class MomentumDTRIVCell(OrthogonalWeights, RecurrentCell):
    """A cell that computes one time step of :class:`hbnode.nn.MomentumDTRIV`.

    With the weight W, the rule filters g_t = W x_t over time; its result is d_t. The new hidden state is
    h_t = modrelu(B h_{t-1} + d_t), where B is orthogonal.

    Arguments:
        init: initial B, "cayley" or "henaff", see :class:`hbnode.nn.MomentumDTRIV`. Default: ``"cayley"``.
    """

    bias: Tensor

    cell = DTRIV_CELL

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        momentum: float | None = None,
        step_size: float | None = None,
        *,
        init: Literal["cayley", "henaff"] = "cayley",
        **options: Unpack[CellOptions],
    ) -> None:
        self.init = check_choice(init, "init", tuple(ANGLES))
        super().__init__(input_size, hidden_size, momentum, step_size, True, **options)
        self._make_orthogonal()


@shares_arguments
class DTRIV(MomentumDTRIV):
    """A recurrent layer with an orthogonal weight B: :class:`MomentumDTRIV` without momentum.

    With the input weight W and the bias b of modReLU::

        h_t = modrelu(B h_{t-1} + W x_t),  modrelu(z) = sign(z) relu(|z| + b)

    References: Lezcano-Casado, Trivializations for Gradient-Based Optimization on Manifolds (arXiv:1909.09501).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        output: (T, batch, directions * hidden_size).
        state: h, and v, which is W x_t at the last time step, each (layers * directions, batch, hidden_size).

    Raises:
        TypeError: batch_first or bidirectional is not a bool.
        ValueError: a size, probability or name is not valid.

    Example:
        >>> layer = DTRIV(3, 6)
        >>> B = layer.weight_hh_l0
        >>> bool((B @ B.T - torch.eye(6)).abs().max() < 1e-5)
        True
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        init: Literal["cayley", "henaff"] = "cayley",
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, init=init, rule=NO_MOMENTUM, **options)


class DTRIVCell(MomentumDTRIVCell):
    """A cell that computes one time step of :class:`hbnode.nn.DTRIV`, with an orthogonal weight B.

    With the weight W, the cell computes h_t = modrelu(B h_{t-1} + W x_t) from the input x_t at time step t.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        init: initial B, "cayley" or "henaff", see :class:`hbnode.nn.MomentumDTRIV`. Default: ``"cayley"``.
        device: device of the parameters. Default: ``None`` (torch's default).
        dtype: dtype of the parameters. Default: ``None`` (torch's default).

    Shape:
        x: (batch, input_size) or (input_size,).
        state: h, and v, which is W x at the last time step, each (batch, hidden_size).

    Raises:
        ValueError: a size or name is not valid.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        init: Literal["cayley", "henaff"] = "cayley",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, init=init, rule=NO_MOMENTUM, device=device, dtype=dtype)


class TanhRNN(nn.Module):
    """A tanh RNN with a learned initial input b_init.

    With the input x_i at time step i, weights W_hx and W_hh, and the bias b::

        t_1 = W_hx x_1 + b + b_init
        t_i = W_hx x_i + b + W_hh h_{i-1},  i > 1
        h_i = tanh(t_i)

    Call it like :class:`torch.nn.RNN`. :class:`~hbnode.optim.HessianFree` computes fast curvature products for TanhRNN
    and torch.nn.RNN. The outputs are the hidden states h_i; add a ``torch.nn.Linear`` for a readout.

    References: Martens and Sutskever, Learning Recurrent Neural Networks with Hessian-Free Optimization (ICML 2011),
    supplement, Algorithm 1 and section 2.

    Arguments:
        input_size: number of features of x.
        hidden_size: number of features of h.
        batch_first: whether x and the output are (batch, T, features). Default: ``False``.
        connections: number of nonzero initial weights in each row of W_hh (per unit) and in each column of W_hx (per
            input). Default: ``15``.
        input_std: standard deviation of the initial weights of W_hx that are not zero. Default: ``1.0``.
        device: device of the parameters. Default: ``None`` (torch's default).
        dtype: dtype of the parameters. Default: ``None`` (torch's default).

    Shape:
        x: (T, batch, input_size), or (T, input_size), or a PackedSequence.
        h0: (1, batch, hidden_size), or (1, hidden_size) for one sequence.
        output: h at every sample, (T, batch, hidden_size).
        h: the last h of each sequence, with the shape of h0.

    Raises:
        ValueError: a size is not valid.

    Example:
        >>> output, h = TanhRNN(3, 5)(torch.ones(7, 2, 3))
        >>> output.shape, h.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        batch_first: bool = False,
        *,
        connections: int = 15,
        input_std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.batch_first = check_bool(
            batch_first, "batch_first", "pass it by name; there is one layer, in one direction"
        )
        self.connections, self.input_std = as_count(connections, "connections"), input_std
        n = self.hidden_size
        sizes = {"weight_ih": (n, self.input_size), "weight_hh": (n, n), "bias": (n,), "bias_init": (n,)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        self.reset_parameters()

    if TYPE_CHECKING:
        weight_ih: Tensor
        weight_hh: Tensor
        bias: Tensor
        bias_init: Tensor

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw sparse weights by :func:`sparse_`, and draw the biases from the distribution of the weights of W_hh.

        Each row of W_hh (a unit) and each column of W_hx (an input) has ``connections`` nonzero weights. Few units
        receive inputs, so that the other units can store information.
        """
        sparse_(self.weight_ih.T, self.connections, self.input_std)
        sparse_(self.weight_hh, self.connections)
        for bias in (self.bias, self.bias_init):
            bias.normal_(std=self.connections**-0.5)

    def forward(self, x: Series, h0: Tensor | None = None) -> tuple[Series, Tensor]:
        """Run over sequences, or over the next chunk of sequences.

        Arguments:
            x: (T, batch, input_size), with ``batch_first`` (batch, T, input_size), or one sequence (T, input_size),
                or a PackedSequence.
            h0: the last h of an earlier call. None starts a new sequence: its first time step has b_init in place of
                W_hh h_0. Default: ``None``.

        Returns:
            h at every sample, in the layout of x, and the last h of each sequence (1, batch, hidden_size).

        Raises:
            TypeError: x is not floating point.
            ValueError: x or h0 has another shape than expected.
        """
        batch = SequenceBatch.read(x, self.input_size, self.batch_first)
        weight = self.weight_ih
        _check_dtype(batch.x, weight.dtype)
        inputs = batch.x.to(weight.dtype)
        shape = (1, inputs.shape[1], self.hidden_size)
        if h0 is None:  # x gets an additional feature, 1 at the first time step and 0 later, with the weight b_init
            start = inputs.new_zeros(*inputs.shape[:2], 1)
            start[0] = 1
            inputs, weight = torch.cat([inputs, start], -1), torch.cat([weight, self.bias_init.unsqueeze(1)], 1)
            before = inputs.new_zeros(shape)
        else:
            wanted = (1, self.hidden_size) if batch.is_single else shape
            check_input(h0, "h0")
            if tuple(h0.shape) != wanted:
                raise ValueError(
                    f"h0 must be {wanted}, got {tuple(h0.shape)}. Fix: the h that the call before returned."
                )
            before = batch.sort(h0.to(weight.dtype), axis=1)
        with no_autocast(inputs):
            weights = [weight, self.weight_hh, self.bias, torch.zeros_like(self.bias)]
            out, last = batch.run("rnn_tanh", inputs, before, weights)
        return batch.output(out), batch.unsort(last, axis=1)

    if TYPE_CHECKING:  # nn.Module's returns Any
        __call__ = forward

    def extra_repr(self) -> str:

        return f"{self.input_size}, {self.hidden_size}" + (", batch_first=True" if self.batch_first else "")


@torch.no_grad()
def sparse_(weight: Tensor, connections: int = 15, std: float | None = None) -> Tensor:
    """Fill a weight in place: ``connections`` entries per row from N(0, std^2), and zeros elsewhere.

    References: Martens, Deep learning via Hessian-free optimization (ICML 2010), section 5; variances as in section 2
    of the supplement to Martens and Sutskever (ICML 2011): 1 / connections for W_hh and for the readout, 1 for W_hx.

    Arguments:
        weight: (units, inputs).
        connections: number of nonzero weights per unit; if there are fewer inputs, all weights are nonzero.
            Default: ``15``.
        std: standard deviation. Default: ``None``, 1 / sqrt(connections).

    Returns:
        The weight.

    Raises:
        ValueError: the weight is not a matrix, or connections is not a positive whole number.

    Example:
        >>> (sparse_(torch.empty(4, 100)) != 0).sum(1)
        tensor([15, 15, 15, 15])
    """
    count = as_count(connections, "connections")
    if weight.dim() != 2:
        raise ValueError(f"weight must be (units, inputs), got {tuple(weight.shape)}. Fix: weight.flatten(1).")
    if std is not None and not 0 <= std < math.inf:
        raise ValueError(f"std must be a number >= 0, got {std!r}. Fix: std=1.0.")
    drawn = torch.randn_like(weight) * (count**-0.5 if std is None else std)
    order = torch.rand_like(weight, dtype=torch.float32).argsort(1)
    return weight.copy_(drawn.masked_fill_(order >= count, 0))


class InputFilter(nn.Module):
    """A module that filters W x + b over time by a rule whose memory is initially zero.

    W is ``weight`` and b is ``bias``. If ``weight`` is None, the module filters x. If only ``bias`` is given, the
    module filters x with an additional feature that is 1.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, rule: Rule, weight: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.rule = rule
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Filter x (T, batch, input_size) by the rule, starting from a memory of zeros.

        Return the input of the layer of torch.nn that follows, (T, batch, n).
        """
        if self.weight is not None:
            x = linear(x, self.weight, self.bias)
        elif self.bias is not None:
            x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=-1)
        return self.rule(x, self.rule.start(x[0]))[0]


class TorchLayers(nn.Module):
    """A stack of layers of torch.nn, each with a filter before it. The stack takes no initial state.

    Attributes:
        filters: an :class:`InputFilter` for each layer and direction.
        layers: a torch.nn.LSTM, GRU or RNN for each layer and direction.
    """

    def __init__(self, name: str, rule: Rule, weights: Sequence[Weights], directions: int, batch_first: bool) -> None:
        super().__init__()
        self.directions, self.batch_first = directions, batch_first
        kind: Any = {"lstm": nn.LSTM, "gru": nn.GRU}.get(name, nn.RNN)
        options = {"nonlinearity": name[4:]} if kind is nn.RNN else {}
        filters: list[nn.Module] = []
        layers: list[nn.Module] = []
        with torch.no_grad():
            for w, u, b, bias in weights:
                copied = None if b is None else b.clone()
                if isinstance(rule, LinearRule):
                    filters.append(InputFilter(rule, None, copied))
                    w = w if b is None else torch.cat([w, b.unsqueeze(1)], dim=1)
                else:
                    filters.append(InputFilter(rule, w.clone(), copied))
                    w = torch.eye(len(u), dtype=u.dtype, device=u.device)
                layer = kind(w.shape[1], u.shape[1], bias=bias is not None, device=u.device, dtype=u.dtype, **options)
                layer.weight_ih_l0.copy_(w)
                layer.weight_hh_l0.copy_(u)
                if bias is not None:
                    layer.bias_ih_l0.zero_()
                    layer.bias_hh_l0.copy_(bias)
                layers.append(layer)
        self.filters, self.layers = nn.ModuleList(filters), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | Tensor]:
        """Return the output of the last layer, and h or (h, c) of all layers after the last time step.

        x is (T, batch, input_size), or (batch, T, input_size) with ``batch_first``.
        """
        if not isinstance(x, Tensor) or x.dim() != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            axis = 0 if self.batch_first else 1
            raise ValueError(
                f"x must be sequences of one length, a tensor with 3 axes, got {got}. Fix: x.unsqueeze({axis}) of one "
                "sequence; a PackedSequence goes into the momentum layer itself."
            )
        x = x.transpose(0, 1) if self.batch_first else x
        ends: list[tuple[Tensor, ...]] = []
        outputs: list[Tensor] = []
        for k, (before, layer) in enumerate(zip(self.filters, self.layers, strict=True)):
            is_reverse = k % self.directions == 1
            out, state = layer(before(x.flip(0) if is_reverse else x))
            ends.append(state if isinstance(state, tuple) else (state,))
            outputs.append(out.flip(0) if is_reverse else out)
            if len(outputs) == self.directions:
                x, outputs = torch.cat(outputs, dim=-1), []
        h, *c = (torch.cat(parts) for parts in zip(*ends, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, (h, c[0]) if c else h
