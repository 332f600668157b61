"""R-operator of recurrent layers, 1.6 to 2.5 times as fast as double backward (benchmarks.md, Hessian-free, all rows).

It gives products with the Jacobian of a layer (JVP) and with its transpose (VJP). The reference is Algorithm 1 of the
supplement to Martens and Sutskever (2011), in tests/reference_hessian_free.py.

The pre-activations of a step are linear in the weights, the inputs and the state before, and the new state is an
elementwise function of them. With its derivatives stored, a product is a loop of one multiplication by W_hh and a few
elementwise operations. All that depends on weights and inputs is computed for all times at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.overrides import TorchFunctionMode

from hbnode._torch import no_autocast

UNPACKED = 9  # arguments of a layer; for a PackedSequence there are as many, of other types
OptTensor: TypeAlias = Tensor | None


class LinearizedLayer(ABC):
    """A layer in one direction on a batch of sequences, and the derivative of its states.

    Arguments:
        x: inputs (T, batch, n).
        h: the state before, (batch, hidden_size).
        c: the cell state before, of an LSTM.
        w: W_ih.
        u: W_hh.
        b: b_ih, or None.
        bias: b_hh, or None.
    """

    blocks: ClassVar[int]  # of hidden_size pre-activations each
    inputs: ClassVar[tuple[int, int]]  # the blocks that W_ih x enters, first and end
    states: ClassVar[tuple[int, int]]  # the blocks that W_hh h enters
    shift: ClassVar[int] = 0  # rows of W_ih begin with this block of torch's, counted from the end
    extras: ClassVar[int] = 0  # residuals (T, batch, hidden_size), beside the derivatives by the pre-activations

    def __init__(self, x: Tensor, h: Tensor, c: OptTensor, w: Tensor, u: Tensor, b: OptTensor, bias: OptTensor) -> None:
        n = self.size = h.shape[-1]
        self.of_x = slice(self.inputs[0] * n, self.inputs[1] * n)
        self.of_h = slice(self.states[0] * n, self.states[1] * n)
        self.x, self.w, self.u, self.u_t = x, self._shift_rows(w), u, u.T
        self.h = x.new_empty(len(x) + 1, *h.shape)  # the state before first
        self.h[0] = h
        e = self._pre_activations([(x, self.w, self.of_x)], b, bias)
        self.residuals = [
            torch.empty_like(e).unbind(),
            *(z.unbind() for z in h.new_empty(self.extras, *x.shape[:1], *h.shape)),
        ]
        for e_k, from_h, before, after, *residuals in self._steps(e, self.h[:-1], self.h[1:]):
            from_h.addmm_(before, self.u_t)
            c = self._forward(e_k, before, c, after, *residuals)
        self.c = c

    @abstractmethod
    def _forward(self, e: Tensor, before: Tensor, c: OptTensor, h: Tensor, *residuals: Tensor) -> OptTensor:
        """Fill h and the residuals of a step from its pre-activations; return the cell state."""

    @abstractmethod
    def _jvp(self, re: Tensor, rh: OptTensor, rc: OptTensor, out: Tensor, *residuals: Tensor) -> OptTensor:
        """Fill the derivative of h of a step, from that of the pre-activations; return that of the cell state."""

    @abstractmethod
    def _vjp(self, dh: Tensor, dc: OptTensor, de: Tensor, *residuals: Tensor) -> tuple[OptTensor, OptTensor]:
        """Fill the gradient of the pre-activations; return that of h before, without that through W_hh, and of c."""

    def jvp(
        self, rx: OptTensor, rh: OptTensor, rc: OptTensor, w: OptTensor, u: OptTensor, b: OptTensor, bias: OptTensor
    ) -> tuple[Tensor, OptTensor]:
        """Return the derivative of all h, and of the last c, in the direction of inputs, first state and weights."""
        products = [(self.h[:-1], u, self.of_h), (self.x, self._shift_rows(w), self.of_x), (rx, self.w, self.of_x)]
        re, out = self._pre_activations(products, b, bias), torch.empty_like(self.h[1:])
        for re_k, from_h, out_k, *residuals in self._steps(re, out):
            if rh is not None:
                from_h.addmm_(rh, self.u_t)
            rc = self._jvp(re_k, rh, rc, out_k, *residuals)
            rh = out_k
        return out, rc

    def vjp(self, dh: OptTensor, dc: OptTensor, needs: Sequence[bool]) -> tuple[OptTensor, ...]:
        """Return the gradients of inputs, first state, first cell state and weights, those that are needed."""
        dh = torch.zeros_like(self.h[1:]) if dh is None else dh.clone()
        de = dh.new_empty(*dh.shape[:2], self.blocks * self.size)
        later: OptTensor = None
        direct: OptTensor = None
        for de_k, to_h, dh_k, *residuals in reversed(list(self._steps(de, dh))):
            if later is not None:
                dh_k.addmm_(later, self.u)
            if direct is not None:
                dh_k += direct
            direct, dc = self._vjp(dh_k, dc, de_k, *residuals)
            later = to_h
        first = de[0, :, self.of_h] @ self.u
        first = first if direct is None else first + direct
        dx = de[..., self.of_x] @ self.w if needs[0] else None
        if not any(needs[3:]):
            return dx, first, dc, None, None, None, None
        rows = de.flatten(0, 1)
        w = (self.x.flatten(0, 1).T @ rows[:, self.of_x]).T  # in this order it is fast for few inputs too
        u, b = (self.h[:-1].flatten(0, 1).T @ rows[:, self.of_h]).T, rows.sum(0)
        bias = b[self.of_h] if needs[6] else None
        return dx, first, dc, self._shift_rows(w, -1), u, self._shift_rows(b[self.of_x], -1) if needs[5] else None, bias

    def _steps(self, e: Tensor, *others: Tensor) -> Any:
        """Return for each time the pre-activations, those that W_hh h enters, others, and the residuals."""
        from_h = e if self.states == (0, self.blocks) else e[..., self.of_h]
        return zip(*map(torch.unbind, (e, from_h, *others)), *self.residuals, strict=True)

    def _pre_activations(
        self, products: Sequence[tuple[OptTensor, OptTensor, slice]], b: OptTensor, bias: OptTensor
    ) -> Tensor:
        """Return products of rows and weights plus biases, (T, batch, blocks), without those of later states."""
        row = self.x.new_zeros(self.blocks * self.size)
        row[self.of_x] += 0.0 if b is None else self._shift_rows(b)
        row[self.of_h] += 0.0 if bias is None else bias
        e = row.expand(*self.x.shape[:2], -1).clone()
        for z, weight, columns in products:
            if z is not None and weight is not None:
                e.flatten(0, 1)[:, columns].addmm_(z.flatten(0, 1), weight.T)
        return e

    def _shift_rows(self, z: OptTensor, sign: int = 1) -> Any:
        return z.roll(sign * self.shift * self.size, 0) if self.shift and z is not None else z


class LinearizedTanh(LinearizedLayer):
    """h' = tanh(e), e = W x + U h + b."""

    blocks, inputs, states = 1, (0, 1), (0, 1)

    def _forward(self, e: Tensor, before: Tensor, c: OptTensor, h: Tensor, *residuals: Tensor) -> OptTensor:
        torch.tanh(e, out=h)
        torch.mul(1 + h, 1 - h, out=residuals[0])
        return c

    def _jvp(self, re: Tensor, rh: OptTensor, rc: OptTensor, out: Tensor, *residuals: Tensor) -> OptTensor:
        torch.mul(re, residuals[0], out=out)
        return rc

    def _vjp(self, dh: Tensor, dc: OptTensor, de: Tensor, *residuals: Tensor) -> tuple[OptTensor, OptTensor]:
        torch.mul(dh, residuals[0], out=de)
        return None, dc


class LinearizedReLU(LinearizedTanh):
    """h' = max(0, e)."""

    def _forward(self, e: Tensor, before: Tensor, c: OptTensor, h: Tensor, *residuals: Tensor) -> OptTensor:
        torch.clamp(e, min=0, out=h)
        residuals[0].copy_(h > 0)
        return c


class LinearizedLSTM(LinearizedLayer):
    """c' = f c + i g, h' = o tanh(c'); the blocks are i, f, g, o."""

    blocks, inputs, states, extras = 4, (0, 4), (0, 4), 2

    def _forward(self, e: Tensor, before: Tensor, c: OptTensor, h: Tensor, *residuals: Tensor) -> OptTensor:
        assert c is not None
        slope, forget, of_c = residuals
        e_i, e_f, e_g, e_o = e.chunk(4, 1)
        i, f, g, o = e_i.sigmoid(), e_f.sigmoid(), e_g.tanh(), e_o.sigmoid()
        parts = [g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)]
        c = f * c + i * g
        tanh = c.tanh()
        torch.cat([*parts, tanh * o * (1 - o)], 1, out=slope)
        forget.copy_(f)
        torch.mul(o, 1 - tanh * tanh, out=of_c)
        torch.mul(o, tanh, out=h)
        return c

    def _jvp(self, re: Tensor, rh: OptTensor, rc: OptTensor, out: Tensor, *residuals: Tensor) -> OptTensor:
        slope, forget, of_c = residuals
        i, f, g, o = re.mul_(slope).chunk(4, 1)
        i.add_(f).add_(g)
        rc = i if rc is None else torch.addcmul(i, forget, rc)
        torch.addcmul(o, of_c, rc, out=out)
        return rc

    def _vjp(self, dh: Tensor, dc: OptTensor, de: Tensor, *residuals: Tensor) -> tuple[OptTensor, OptTensor]:
        slope, forget, of_c = residuals
        dc = of_c * dh if dc is None else torch.addcmul(dc, of_c, dh)
        gates, slopes = (z.view(-1, 4, self.size) for z in (de, slope))
        torch.mul(slopes[:, :3], dc.unsqueeze(1), out=gates[:, :3])
        torch.mul(slopes[:, 3], dh, out=gates[:, 3])
        return None, forget * dc


class LinearizedGRU(LinearizedLayer):
    """h' = (1 - z) n + z h, n = tanh(e_n + r q); the blocks are e_n = W_n x + b, r, z and q = U_n h + b'."""

    blocks, inputs, states, extras = 4, (0, 3), (1, 4), 1
    shift = 1  # torch's W_ih has r, z, n

    def _forward(self, e: Tensor, before: Tensor, c: OptTensor, h: Tensor, *residuals: Tensor) -> OptTensor:
        slope, update = residuals
        e_n, e_r, e_z, q = e.chunk(4, 1)
        r, z = e_r.sigmoid(), e_z.sigmoid()
        n = torch.addcmul(e_n, r, q).tanh()
        of_n = (1 - z) * (1 - n * n)
        torch.cat([of_n, of_n * q * r * (1 - r), (before - n) * z * (1 - z), of_n * r], 1, out=slope)
        update.copy_(z)
        torch.lerp(n, before, z, out=h)
        return c

    def _jvp(self, re: Tensor, rh: OptTensor, rc: OptTensor, out: Tensor, *residuals: Tensor) -> OptTensor:
        slope, update = residuals
        n, r, z, q = re.mul_(slope).chunk(4, 1)
        torch.add(n, r, out=out).add_(z).add_(q)
        if rh is not None:
            out.addcmul_(update, rh)
        return rc

    def _vjp(self, dh: Tensor, dc: OptTensor, de: Tensor, *residuals: Tensor) -> tuple[OptTensor, OptTensor]:
        slope, update = residuals
        gates, slopes = (z.view(-1, 4, self.size) for z in (de, slope))
        torch.mul(slopes, dh.unsqueeze(1), out=gates)
        return update * dh, dc


LAYERS: dict[str, type[LinearizedLayer]] = {
    "rnn_tanh": LinearizedTanh,
    "rnn_relu": LinearizedReLU,
    "lstm": LinearizedLSTM,
    "gru": LinearizedGRU,
}


class ROperator(TorchFunctionMode):
    """A mode in which torch's recurrent layers have fast products, and autocast is refused.

    Arguments:
        kind: of the device.

    Attributes:
        is_on: whether the model is being evaluated.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.is_on = kind, True

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
        if name in LAYERS and len(args) == UNPACKED and isinstance(args[3], bool) and not kwargs:
            h = args[1][0] if name == "lstm" else args[1]
            if len(args[2]) == len(h) * (4 if args[3] else 2):  # else an LSTM with proj_size
                return self._run(LAYERS[name], *args)
        return func(*args, **(kwargs or {}))

    def _run(
        self,
        kind: type[LinearizedLayer],
        x: Tensor,
        state: Tensor | Sequence[Tensor],
        weights: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        training: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        """Run all layers in all directions, as the function of ``torch._VF`` of this name."""
        out = x.transpose(0, 1) if batch_first else x
        h, c = (state, None) if isinstance(state, Tensor) else state
        count, directions = 4 if has_biases else 2, 2 if bidirectional else 1
        last: list[Tensor] = []
        last_c: list[Tensor] = []
        with no_autocast(x):
            for layer in range(layers):
                out = drop(out, dropout, training) if layer > 0 and dropout else out
                sides = []
                for k in range(directions * layer, directions * (layer + 1)):
                    is_reversed = k % directions == 1
                    own = [*weights[count * k : count * (k + 1)], *[None] * (4 - count)]
                    given = (out.flip(0) if is_reversed else out).to(weights[0].dtype)
                    side, end = _RecurrentLayer.apply(self, kind, given, h[k], None if c is None else c[k], *own)
                    last.append(side[-1])
                    last_c.append(end)
                    sides.append(side.flip(0) if is_reversed else side)
                out = torch.cat(sides, -1) if bidirectional else sides[0]
        out = out.transpose(0, 1) if batch_first else out
        return (out, torch.stack(last)) if c is None else (out, torch.stack(last), torch.stack(last_c))


class _RecurrentLayer(torch.autograd.Function):
    """A layer in one direction. Its backward pass can be differentiated only in the gradients that it gets."""

    @staticmethod
    def forward(ctx: Any, mode: ROperator, kind: type[LinearizedLayer], *tensors: Any) -> tuple[Tensor, OptTensor]:
        layer = kind(*tensors)
        ctx.mode, ctx.layer = mode, layer
        ctx.set_materialize_grads(False)
        return layer.h[1:].clone(), layer.c

    @staticmethod
    def backward(ctx: Any, dh: OptTensor, dc: OptTensor) -> tuple[OptTensor, ...]:
        if ctx.mode.is_on and torch.is_grad_enabled():  # a gradient that the outputs depend on
            raise RuntimeError(
                "the closure differentiates through torch's recurrent layer, whose products are those of a first "
                "derivative. Fix: a loop of torch.nn.LSTMCell, GRUCell or RNNCell in its place."
            )
        return (None, None, *_Transpose.apply(ctx.layer, ctx.needs_input_grad[2:], dh, dc))


class _Transpose(torch.autograd.Function):
    """J^T of a layer; its own backward pass is J."""

    @staticmethod
    def forward(
        ctx: Any, layer: LinearizedLayer, needs: Sequence[bool], dh: OptTensor, dc: OptTensor
    ) -> tuple[OptTensor, ...]:
        ctx.layer, ctx.has_dh, ctx.has_dc = layer, dh is not None, dc is not None
        ctx.set_materialize_grads(False)
        return layer.vjp(dh, dc, needs)

    @staticmethod
    def backward(ctx: Any, *directions: OptTensor) -> tuple[OptTensor, ...]:
        rh, rc = ctx.layer.jvp(*directions)
        return None, None, rh if ctx.has_dh else None, rc if ctx.has_dc else None
