"""The R-operator of torch's recurrent layers, in the place of the layers while the curvature is evaluated.

J^T w is their backward pass, and J v the derivative of J^T u in u. Both are loops of one matrix product a step; see
:mod:`hbnode.optim.linear_cells`. No other second derivative is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from hbnode._torch import no_autocast
from hbnode.optim.linear_cells import CELLS, LinearCell, Weights

WITHOUT_PACKING = 9  # arguments of a layer; for a PackedSequence there are as many, of other types


class ROperator(TorchFunctionMode):
    """A mode in which torch's recurrent layers run in a form that has fast products, and autocast is refused.

    Arguments:
        kind: of the device.

    Attributes:
        is_on: whether the model is being evaluated.
    """

    is_on = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @override
    def __enter__(self) -> ROperator:
        self.is_on = True
        super().__enter__()
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        self.is_on = False
        super().__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a layer of a padded batch, and leave all else alone."""
        if self.kind != "meta" and torch.is_autocast_enabled(self.kind):
            raise RuntimeError(
                f"the closure runs under autocast to {torch.get_autocast_dtype(self.kind)}, whose rounding is larger "
                "than what a step changes in the loss: it would be rejected. Fix: leave torch.autocast out."
            )
        name = getattr(func, "__name__", None)
        if name in CELLS and len(args) == WITHOUT_PACKING and isinstance(args[3], bool):
            h = args[1][0] if name == "lstm" else args[1]
            per_layer = 4 if args[3] else 2
            if len(args[2]) == len(h) * per_layer and not kwargs:  # else an LSTM with proj_size
                return _layers(self, CELLS[name], *args)
        return func(*args, **(kwargs or {}))


def _layers(
    mode: ROperator,
    kind: type[LinearCell],
    x: Tensor,
    start: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """What ``torch._VF`` does under these names."""
    out = x.transpose(0, 1) if batch_first else x
    h, c = (start, None) if isinstance(start, Tensor) else start
    of_each = 4 if has_biases else 2
    last: list[Tensor] = []
    last_c: list[Tensor] = []
    directions = 2 if bidirectional else 1
    with no_autocast(x):
        for layer in range(layers):
            if layer > 0 and dropout:
                out = drop(out, dropout, training)
            sides = []
            for k in range(directions * layer, directions * (layer + 1)):
                own = weights[of_each * k : of_each * (k + 1)]
                nothing = [None] * (4 - of_each)  # in place of biases
                given = out.flip(0) if k % directions else out
                found, end = _Recurrence.apply(
                    mode, kind, given.to(own[0].dtype), h[k], None if c is None else c[k], *own, *nothing
                )
                last.append(found[-1])
                last_c.append(end)
                sides.append(found.flip(0) if k % directions else found)
            out = torch.cat(sides, -1) if len(sides) > 1 else sides[0]
    out = out.transpose(0, 1) if batch_first else out
    return (out, torch.stack(last)) if c is None else (out, torch.stack(last), torch.stack(last_c))


class _Recurrence(torch.autograd.Function):
    """A layer in one direction. Its backward pass can be differentiated in its arguments alone."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: ROperator,
        kind: type[LinearCell],
        x: Tensor,
        h: Tensor,
        c: Tensor | None,
        *weights: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.mode = mode
        cell = ctx.cell = kind(x, h, c, Weights(*weights))
        ctx.set_materialize_grads(False)
        return cell.h[1:].clone(), cell.last

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dc: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.mode.is_on and torch.is_grad_enabled():  # a gradient that the outputs depend on
            raise RuntimeError(
                "the closure differentiates through torch's recurrent layer, whose products are those of a first "
                "derivative. Fix: a loop of torch.nn.LSTMCell, GRUCell or RNNCell in its place."
            )
        return (None, None, *_Transpose.apply(ctx.cell, ctx.needs_input_grad[2:], dh, dc))


class _Transpose(torch.autograd.Function):
    """J^T of a layer; its own backward pass is J."""

    @staticmethod
    def forward(
        ctx: Any, cell: LinearCell, needs: tuple[bool, ...], dh: Tensor | None, dc: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.cell, ctx.has_dh, ctx.has_dc = cell, dh is not None, dc is not None
        ctx.set_materialize_grads(False)
        de, first, rest = cell.pull(torch.zeros_like(cell.h[1:]) if dh is None else dh, dc)
        found = cell.weight_gradients(de, rest) if any(needs[3:]) else (None,) * 4
        values = (cell.input_gradient(de, rest) if needs[0] else None, first, rest, *found)
        return tuple(z if needed else None for z, needed in zip(values, needs, strict=True))

    @staticmethod
    def backward(
        ctx: Any, rx: Tensor | None, rh: Tensor | None, rc: Tensor | None, *vector: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        pushed, end = ctx.cell.push(Weights(*vector), rx, rh, rc)
        return None, None, pushed if ctx.has_dh else None, end if ctx.has_dc else None
