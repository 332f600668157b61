"""The R-operator of torch's recurrent layers: J v and J^T w as loops over time with all else in large products.

While the curvature of a batch is evaluated, :class:`ROperator` puts these loops in the place of torch's layers. They
give J^T w as any backward pass does, and J v as the derivative of J^T u in u (Algorithm 1 of the supplement to Martens
and Sutskever 2011, lines 1 to 6 forwards and 13 to 24 backwards). Nothing else of the second derivative is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


class ROperator(TorchFunctionMode):
    """A mode in which tanh layers of torch run in a form that has fast products."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a layer, and leave all else alone."""
        if getattr(func, "__name__", None) == "rnn_tanh" and len(args) == 9 and not isinstance(args[3], (list, tuple)):
            return _layers(*args)
        return func(*args, **(kwargs or {}))


def _layers(
    x: Tensor,
    start: Tensor,
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """``torch._VF.rnn_tanh`` on padded batches."""
    out = x.transpose(0, 1) if batch_first else x
    of_each = 4 if has_biases else 2
    places = iter(zip(start, *(weights[k::of_each] for k in range(of_each)), strict=True))
    last = []
    for layer in range(layers):
        if layer > 0 and dropout:
            out = drop(out, dropout, training)
        sides = []
        for backwards in (False, True) if bidirectional else (False,):
            h0, w, u, *biases = next(places)
            b = biases[0] + biases[1] if biases else None
            h = _Tanh.apply(out.flip(0) if backwards else out, h0, w, u, b)
            last.append(h[-1])
            sides.append(h.flip(0) if backwards else h)
        out = torch.cat(sides, -1) if len(sides) > 1 else sides[0]
    return out.transpose(0, 1) if batch_first else out, torch.stack(last)


class _Tanh(torch.autograd.Function):
    """h_i = tanh(W x_i + b + U h_{i-1}), of which the backward pass can be differentiated in its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h0: Tensor, w: Tensor, u: Tensor, b: Tensor | None) -> Tensor:
        t = linear(x, w, b)
        states, u_t = t.new_empty(len(t) + 1, *h0.shape), u.T
        states[0] = h0
        for before, t_i, after in zip(states.unbind(), t.unbind(), states[1:].unbind(), strict=False):
            torch.addmm(t_i, before, u_t, out=after)
            after.tanh_()
        ctx.save_for_backward(x, w, u)
        ctx.states, ctx.slope = states, 1 - states[1:].square()
        ctx.set_materialize_grads(False)
        return states[1:].clone()

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        if dh is None:
            return (None,) * 5
        x, w, u = ctx.saved_tensors
        return _Transpose.apply(dh, x.detach(), w.detach(), u.detach(), ctx.states, ctx.slope, ctx.needs_input_grad)


class _Transpose(torch.autograd.Function):
    """Algorithm 1, lines 13 to 24, without those of the outputs. Its own backward pass is lines 1 to 6."""

    @staticmethod
    def forward(
        ctx: Any, dh: Tensor, x: Tensor, w: Tensor, u: Tensor, states: Tensor, slope: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        dt = torch.empty_like(slope)
        later = dh[-1]
        for dh_i, slope_i, dt_i, k in zip(
            reversed(dh.unbind()), reversed(slope.unbind()), reversed(dt.unbind()), range(len(dh)), strict=True
        ):
            later = dh_i if k == 0 else torch.addmm(dh_i, later, u)
            torch.mul(later, slope_i, out=dt_i)
            later = dt_i
        ctx.save_for_backward(x, w, u)
        ctx.states, ctx.slope = states, slope
        ctx.set_materialize_grads(False)
        rows = dt.flatten(0, 1)
        return (
            dt @ w if needs[0] else None,
            dt[0] @ u if needs[1] else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if needs[2] else None,
            rows.T @ states[:-1].reshape(-1, u.shape[1]) if needs[3] else None,
            rows.sum(0) if needs[4] else None,
        )

    @staticmethod
    def backward(
        ctx: Any, rx: Tensor | None, rh0: Tensor | None, rw: Tensor | None, ru: Tensor | None, rb: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, w, u = ctx.saved_tensors
        rt = linear(ctx.states[:-1], ru) if ru is not None else torch.zeros_like(ctx.slope)
        if rw is not None:
            rt += linear(x, rw)
        if rx is not None:
            rt += linear(rx, w)
        if rb is not None:
            rt += rb
        if rh0 is not None:
            rt[0] += rh0 @ u.T
        rh, u_t = torch.empty_like(rt), u.T
        before: Tensor | None = None
        for rt_i, slope_i, rh_i in zip(rt.unbind(), ctx.slope.unbind(), rh.unbind(), strict=True):
            if before is not None:
                rt_i.addmm_(before, u_t)
            before = torch.mul(rt_i, slope_i, out=rh_i)
        return rh, None, None, None, None, None, None
