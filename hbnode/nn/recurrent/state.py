"""The state that a momentum recurrent layer or cell carries from chunk to chunk, and how it is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hbnode._torch import is_autocast
from hbnode._tree import Record, record
from hbnode.nn.rules import Memory, Rule, memory_dtype

# What reads h, as a method of the state and as a function of torch
READS = {
    *("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad", "size", "dim", "numel", "tolist", "numpy"),
    *("squeeze", "unsqueeze", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim"),
    *("unbind", "chunk", "split", "select", "narrow", "cat", "concat", "stack", "hstack"),
    *("mean", "sum", "amax", "amin", "max", "min", "norm", "var", "std", "argmax", "softmax", "log_softmax"),
    *("linear", "matmul", "tanh", "relu", "sigmoid", "gelu", "silu", "dropout", "layer_norm", "batch_norm"),
}


@record
class RecurrentState(Record):
    """All that is needed to continue a sequence exactly; entries that a layer does not need are None.

    In the state of a layer the first axis is that of layers and directions, as in torch.nn; a cell's state has no such
    axis. ``n`` is the width of the filtered input: gates * hidden_size.

    An LSTM's state unpacks into h and c, ``output, (h, c) = lstm(x)``, and ``state[0]`` and ``state[1]`` are these.
    Any other state is read as h: ``state[-1]``, ``state.shape``, ``head(state)``, ``torch.cat([state[-2], state[-1]],
    -1)``. Operations that make a new hidden state from h alone, such as ``state * mask``, raise an error, because they
    would lose the momentum: use :meth:`map` or ``dataclasses.replace(state, h=...)``.

    Attributes:
        h: hidden state (..., batch, hidden_size).
        c: cell state of an LSTM (..., batch, hidden_size).
        v: momentum (..., batch, n), of all rules but RMSProp.
        m: running mean of squares of Adam and RMSProp (..., batch, n).
        g: the last W x + b, of adaptive momentum (..., batch, n).
        t: samples so far (batch,), int64, of NAG and scheduled restart.

    Example:
        >>> import hbnode
        >>> output, state = hbnode.nn.MomentumGRU(3, 5, num_layers=2)(torch.ones(7, 4, 3))
        >>> state, state[-1].shape
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

    def __post_init__(self) -> None:
        if hasattr(self.h, "__next__"):  # torch.nn.parallel.gather gives an iterator of what it unpacked
            raise TypeError(
                f"h must be a tensor, got {type(self.h).__name__}; torch.nn.DataParallel cannot join states. "
                "Fix: return the output alone from the module, or DistributedDataParallel."
            )

    @property
    def memory(self) -> Memory:
        """The memory of the rule."""
        return Memory(self.v, self.m, self.g, self.t)

    @staticmethod
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name == "t" else memory_dtype(new) if name in "vmg" else new

    # As torch.nn's: the pair (h, c) of an LSTM, or h

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.h if self.c is None else (self.h, self.c))

    def __len__(self) -> int:
        return len(self.h) if self.c is None else 2

    def __getitem__(self, index: Any) -> Tensor:
        if self.c is None:
            return self.h[index]
        if index not in (0, 1):  # torch.nn's pair takes -1, which is c where an h[-1] was meant
            raise IndexError(
                f"the state of an LSTM is the pair (h, c), whose entries are 0 and 1, got {index!r}. "
                "Fix: state.h[-1] for the last layer's h, state.c for c."
            )
        return (self.h, self.c)[index]

    def __setitem__(self, index: Any, value: object) -> None:
        raise TypeError(self._refusal("no assignment", "h"))

    def __getattr__(self, name: str) -> Any:
        if name in READS and self.c is None and hasattr(Tensor, name):
            return getattr(self.h, name)
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(self._refusal(f"no attribute {name!r}", f"h.{name}"))

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A function of torch that reads, of h in place of the state."""

        def read(value: Any) -> Any:
            if isinstance(value, RecurrentState):
                if value.c is not None or function.__name__ not in READS:
                    raise TypeError(value._refusal(f"{function.__name__} of torch does not take it", "h"))
                return value.h
            return type(value)(read(each) for each in value) if isinstance(value, (tuple, list)) else value

        kwargs = {name: read(value) for name, value in (kwargs or {}).items()}
        return function(*(read(value) for value in args), **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if self.c is not None:
            raise TypeError(self._refusal("no array", "h"))
        return self.h.__array__(*args, **kwargs)

    def _no_operator(self, other: object) -> None:
        raise TypeError(self._refusal("no arithmetic", "h"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = _no_operator

    def _refusal(self, what: str, instead: str) -> str:
        carried = " and ".join(name for name in self.as_dict() if name != "h")
        return (
            f"{what}: a RecurrentState carries {carried or 'nothing'} beside h. Fix: state.{instead} for the hidden "
            "state alone, or state.map(function) for all that it carries."
        )


InitialState = RecurrentState | tuple[Tensor, Tensor] | Tensor | None
"""States that a layer or cell takes: that of an earlier call; h, or (h, c) of an LSTM; None, which is zeros."""


def given_state(state: InitialState, hx: InitialState) -> InitialState:
    """The state that the caller passed, under our name or torch.nn's."""
    if state is not None and hx is not None:
        raise TypeError("state and hx are two names of one argument, and both were given. Fix: state alone.")
    return state if hx is None else hx


def read_state(
    state: InitialState,
    rule: Rule,
    has_cell_state: bool,
    widths: tuple[int, int],
    places: tuple[int, ...],
    batch: tuple[int, ...],
    like: Tensor,
) -> RecurrentState:
    """Check a state and complete it: h and c are there, and v is None at the start of a sequence.

    Arguments:
        state: the state that the caller passed.
        rule: has to find its memory in the state.
        has_cell_state: whether it is that of an LSTM, with c.
        widths: of h and of v.
        places: (layers * directions,) of a layer, () of a cell.
        batch: (batch,), or () for a single sequence.
        like: a tensor with the dtype and device of the zeros.
    """
    shape = (*places, *batch)
    if state is None:
        state = RecurrentState(like.new_zeros(*shape, widths[0]))
    elif not isinstance(state, RecurrentState):
        state = _from_plain(state, has_cell_state)
    if has_cell_state and state.c is None:
        state = dataclasses.replace(state, c=like.new_zeros(*shape, widths[0]))
    expected = {"h": widths[0]} | ({"c": widths[0]} if has_cell_state else {})
    if any(z is not None for z in state.memory):
        expected |= dict.fromkeys(rule.memory, widths[1])
    for name in (field.name for field in dataclasses.fields(state)):
        z = getattr(state, name)
        wanted = None if name not in expected else batch if name == "t" else (*shape, expected[name])
        found = None if z is None else tuple(z.shape)
        if found != wanted:
            raise ValueError(
                f"state.{name} must be {wanted}, got {found}. Fix: pass on the state of the same layer and batch, h "
                "alone, or None at the start of a sequence."
            )
        if z is not None:
            _check_values(name, z, like)
    return state


def _from_plain(state: object, has_cell_state: bool) -> RecurrentState:
    """Make a state from h, or from h and c, as torch.nn's layers take them."""
    if isinstance(state, Tensor):
        return RecurrentState(state)
    parts = tuple(state) if isinstance(state, (tuple, list)) else ()
    if has_cell_state and len(parts) == 2 and all(isinstance(z, Tensor) for z in parts):
        return RecurrentState(*parts)
    pair = ", a pair (h, c)" if has_cell_state else ""
    got = ", ".join(type(z).__name__ for z in parts)
    fix = "pass on the state that the call before returned, state.detach() where its history is to end."
    if any(isinstance(z, RecurrentState) for z in parts):
        fix = "output, state = cell(x, state), also of a cell, where torch.nn's returns the state alone."
    got = f"{type(state).__name__} of ({got})" if parts else type(state).__name__
    raise TypeError(f"state must be a RecurrentState, h{pair} or None, got a {got}. Fix: {fix}")


def _check_values(name: str, z: Tensor, like: Tensor) -> None:
    if name == "t" and (z.is_floating_point() or z.dtype == torch.bool):
        raise ValueError(f"state.t must be whole numbers of samples, got {z.dtype}. Fix: t.long().")
    wanted = like.dtype if name in ("h", "c") else memory_dtype(like.dtype)
    if name != "t" and z.dtype != wanted and not is_autocast(like):
        raise ValueError(f"state.{name} must be {wanted}, x being {like.dtype}, got {z.dtype}. Fix: .to({wanted}).")
