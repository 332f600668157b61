"""Recurrent layers with Jacobian-vector products (JVPs, the R-operator) and vector-Jacobian products (VJPs).

These are 1.6 to 2.5 times as fast as double backpropagation (benchmarks.md, Hessian-free, all rows). The reference in
tests/reference_hessian_free.py is Algorithm 1 of the supplement to Martens and Sutskever (2011).

The pre-activations of a time step are linear in the weights, the inputs and the previous state. The new state is an
elementwise function of the pre-activations; its derivatives are stored. A JVP or VJP is then a loop over time with one
multiplication by W_hh and a few elementwise operations per time step. Terms with the weights and the inputs are
computed for all time steps at once.
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

UNPACKED = 9  # number of arguments of torch's layers; calls with a PackedSequence have the same number
OptTensor: TypeAlias = Tensor | None


class LinearizedLayer(ABC):
    """A recurrent layer in one direction, evaluated on a batch of sequences, with its JVP and VJP.

    Each time step maps pre-activations e and the previous state ``before`` to a new state h. In names, the prefix r
    marks a tangent (the derivative in a direction), and the prefix d marks a gradient: rh and dh are those of h.

    Arguments:
        x: inputs (T, batch, n).
        h: initial state (batch, hidden_size).
        c: initial cell state of an LSTM, or None.
        w: input weights W_ih.
        u: recurrent weights W_hh.
        b: input bias b_ih, or None.
        bias: recurrent bias b_hh, or None.
    """

    blocks: ClassVar[int]  # number of pre-activations per hidden unit, such as 4 in an LSTM; each forms one block
    inputs: ClassVar[tuple[int, int]]  # range of the blocks to which W_ih x is added
    states: ClassVar[tuple[int, int]]  # range of the blocks to which W_hh h is added
    shift: ClassVar[int] = 0  # torch's W_ih is rolled by this many blocks to get the order used here
    extras: ClassVar[int] = 0  # number of saved tensors per time step, not counting the derivatives of the new state

    def __init__(self, x: Tensor, h: Tensor, c: OptTensor, w: Tensor, u: Tensor, b: OptTensor, bias: OptTensor) -> None:
        n = self.size = h.shape[-1]
        self.x_columns = slice(self.inputs[0] * n, self.inputs[1] * n)
        self.h_columns = slice(self.states[0] * n, self.states[1] * n)
        self.x, self.w, self.u, self.u_t = x, self._shift_rows(w), u, u.T
        self.h = x.new_empty(len(x) + 1, *h.shape)  # initial state first
        self.h[0] = h
        e = self._pre_activations([(x, self.w, self.x_columns)], b, bias)
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
        """Compute a time step from the pre-activations e, the previous state ``before`` and the previous cell state c.

        Write the new state to ``h``, fill the tensors ``residuals`` for the JVP and VJP, and return the new cell state.
        """

    @abstractmethod
    def _jvp(self, re: Tensor, rh: OptTensor, rc: OptTensor, out: Tensor, *residuals: Tensor) -> OptTensor:
        """Compute the JVP of a time step from the tangents of the pre-activations and of the previous h and c.

        Write the tangent of the new h to ``out``, and return the tangent of the new cell state.
        """

    @abstractmethod
    def _vjp(self, dh: Tensor, dc: OptTensor, de: Tensor, *residuals: Tensor) -> tuple[OptTensor, OptTensor]:
        """Compute the VJP of a time step from the gradients ``dh`` and ``dc`` of the new state and cell state.

        The gradient of the pre-activations is written to ``de``. The gradients of the previous state and cell state are
        returned; the former does not include the path through W_hh.
        """

    def jvp(
        self, rx: OptTensor, rh: OptTensor, rc: OptTensor, w: OptTensor, u: OptTensor, b: OptTensor, bias: OptTensor
    ) -> tuple[Tensor, OptTensor]:
        """Compute the JVP of the layer from the tangents of the constructor's arguments, in the same order.

        Return the tangents of all states, and of the last cell state.
        """
        products = [(self.h[:-1], u, self.h_columns), (self.x, self._shift_rows(w), self.x_columns)]
        re = self._pre_activations([*products, (rx, self.w, self.x_columns)], b, bias)
        out = torch.empty_like(self.h[1:])
        for re_k, from_h, out_k, *residuals in self._steps(re, out):
            if rh is not None:
                from_h.addmm_(rh, self.u_t)
            rc = self._jvp(re_k, rh, rc, out_k, *residuals)
            rh = out_k
        return out, rc

    def vjp(self, dh: OptTensor, dc: OptTensor, needs: Sequence[bool]) -> tuple[OptTensor, ...]:
        """Compute the VJP of the layer; return the gradients of the constructor's arguments.

        ``dh`` and ``dc`` are the gradients of all states and of the last cell state. ``needs`` holds a bool
        for each argument; if it is False, the gradient may be None.
        """
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
        first = de[0, :, self.h_columns] @ self.u
        first = first if direct is None else first + direct
        dx = de[..., self.x_columns] @ self.w if needs[0] else None
        if not any(needs[3:]):
            return dx, first, dc, None, None, None, None
        rows = de.flatten(0, 1)
        w = (self.x.flatten(0, 1).T @ rows[:, self.x_columns]).T  # this order is also fast for few inputs
        u, b = (self.h[:-1].flatten(0, 1).T @ rows[:, self.h_columns]).T, rows.sum(0)
        bias = b[self.h_columns] if needs[6] else None
        db = self._shift_rows(b[self.x_columns], -1) if needs[5] else None
        return dx, first, dc, self._shift_rows(w, -1), u, db, bias

    def _steps(self, e: Tensor, *others: Tensor) -> Any:
        """Iterate over time steps; at each, yield the slices of several tensors.

        The tensors are e, the columns of e to which W_hh h is added, each of ``others``, and the residuals.
        """
        from_h = e if self.states == (0, self.blocks) else e[..., self.h_columns]
        return zip(*map(torch.unbind, (e, from_h, *others)), *self.residuals, strict=True)

    def _pre_activations(
        self, products: Sequence[tuple[OptTensor, OptTensor, slice]], b: OptTensor, bias: OptTensor
    ) -> Tensor:
        """Return the pre-activations (T, batch, blocks * hidden_size) of all time steps: biases plus products.

        For each (z, W, columns) in ``products``, z W^T is added to these columns.
        """
        row = self.x.new_zeros(self.blocks * self.size)
        row[self.x_columns] += 0.0 if b is None else self._shift_rows(b)
        row[self.h_columns] += 0.0 if bias is None else bias
        e = row.expand(*self.x.shape[:2], -1).clone()
        for z, weight, columns in products:
            if z is not None and weight is not None:
                e.flatten(0, 1)[:, columns].addmm_(z.flatten(0, 1), weight.T)
        return e

    def _shift_rows(self, z: OptTensor, sign: int = 1) -> Any:
        return z.roll(sign * self.shift * self.size, 0) if self.shift and z is not None else z


class LinearizedTanh(LinearizedLayer):
    """A tanh recurrent layer with JVP and VJP: h_t = tanh(e), with pre-activations e = W x_t + U h_{t-1} + b."""

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
    """A ReLU recurrent layer with JVP and VJP: h_t = max(0, e), with pre-activations e = W x_t + U h_{t-1} + b."""

    def _forward(self, e: Tensor, before: Tensor, c: OptTensor, h: Tensor, *residuals: Tensor) -> OptTensor:
        torch.clamp(e, min=0, out=h)
        residuals[0].copy_(h > 0)
        return c


class LinearizedLSTM(LinearizedLayer):
    """An LSTM layer with JVP and VJP: c_t = f c_{t-1} + i g, h_t = o tanh(c_t).

    The blocks of the pre-activations are those of i, f, g and o.
    """

    blocks, inputs, states, extras = 4, (0, 4), (0, 4), 2

    def _forward(self, e: Tensor, before: Tensor, c: OptTensor, h: Tensor, *residuals: Tensor) -> OptTensor:
        assert c is not None
        slope, forget, c_slope = residuals
        e_i, e_f, e_g, e_o = e.chunk(4, 1)
        i, f, g, o = e_i.sigmoid(), e_f.sigmoid(), e_g.tanh(), e_o.sigmoid()
        parts = [g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)]
        c = f * c + i * g
        tanh = c.tanh()
        torch.cat([*parts, tanh * o * (1 - o)], 1, out=slope)
        forget.copy_(f)
        torch.mul(o, 1 - tanh * tanh, out=c_slope)
        torch.mul(o, tanh, out=h)
        return c

    def _jvp(self, re: Tensor, rh: OptTensor, rc: OptTensor, out: Tensor, *residuals: Tensor) -> OptTensor:
        slope, forget, c_slope = residuals
        i, f, g, o = re.mul_(slope).chunk(4, 1)
        i.add_(f).add_(g)
        rc = i if rc is None else torch.addcmul(i, forget, rc)
        torch.addcmul(o, c_slope, rc, out=out)
        return rc

    def _vjp(self, dh: Tensor, dc: OptTensor, de: Tensor, *residuals: Tensor) -> tuple[OptTensor, OptTensor]:
        slope, forget, c_slope = residuals
        dc = c_slope * dh if dc is None else torch.addcmul(dc, c_slope, dh)
        gates, slopes = (z.view(-1, 4, self.size) for z in (de, slope))
        torch.mul(slopes[:, :3], dc.unsqueeze(1), out=gates[:, :3])
        torch.mul(slopes[:, 3], dh, out=gates[:, 3])
        return None, forget * dc


class LinearizedGRU(LinearizedLayer):
    """A GRU layer with JVP and VJP: h_t = (1 - z) n + z h_{t-1}, n = tanh(e_n + r q).

    The blocks of the pre-activations are e_n = W_n x_t + b, those of the gates r and z, and q = U_n h_{t-1} + b'.
    """

    blocks, inputs, states, extras = 4, (0, 3), (1, 4), 1
    shift = 1  # torch orders the rows of W_ih as r, z, n

    def _forward(self, e: Tensor, before: Tensor, c: OptTensor, h: Tensor, *residuals: Tensor) -> OptTensor:
        slope, update = residuals
        e_n, e_r, e_z, q = e.chunk(4, 1)
        r, z = e_r.sigmoid(), e_z.sigmoid()
        n = torch.addcmul(e_n, r, q).tanh()
        n_slope = (1 - z) * (1 - n * n)
        torch.cat([n_slope, n_slope * q * r * (1 - r), (before - n) * z * (1 - z), n_slope * r], 1, out=slope)
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
    """A torch function mode that runs torch's recurrent layers as :class:`LinearizedLayer`.

    It raises an error under autocast.

    Arguments:
        kind: the type of the device, such as "cuda".

    Attributes:
        is_on: whether the mode is active. It is active while the closure evaluates the model.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.is_on = kind, True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run calls of torch's recurrent layers on padded batches by :meth:`_run`, and all other calls unchanged."""
        if self.kind != "meta" and torch.is_autocast_enabled(self.kind):
            raise RuntimeError(
                f"the closure runs under autocast to {torch.get_autocast_dtype(self.kind)}, whose rounding "
                "exceeds the changes of the loss in a step. Fix: leave torch.autocast out."
            )
        name = getattr(func, "__name__", None)
        if name in LAYERS and len(args) == UNPACKED and isinstance(args[3], bool) and not kwargs:
            h = args[1][0] if name == "lstm" else args[1]
            if len(args[2]) == len(h) * (4 if args[3] else 2):  # otherwise it is an LSTM with proj_size
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
        """Run all layers in all directions, so that their VJP can be differentiated.

        Arguments and outputs are those of ``torch._VF.lstm`` or ``gru``.
        """
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
    """A recurrent layer in one direction, as an autograd function.

    Its VJP can be differentiated with respect to the incoming gradients only.
    """

    @staticmethod
    def forward(ctx: Any, mode: ROperator, kind: type[LinearizedLayer], *tensors: Any) -> tuple[Tensor, OptTensor]:
        layer = kind(*tensors)
        ctx.mode, ctx.layer = mode, layer
        ctx.set_materialize_grads(False)
        return layer.h[1:].clone(), layer.c

    @staticmethod
    def backward(ctx: Any, dh: OptTensor, dc: OptTensor) -> tuple[OptTensor, ...]:
        if ctx.mode.is_on and torch.is_grad_enabled():  # the user's closure calls autograd.grad
            raise RuntimeError(
                "the closure differentiates through torch's recurrent layer, whose R-operator supports first "
                "derivatives only. Fix: a loop over time with torch.nn.LSTMCell, GRUCell or RNNCell."
            )
        return (None, None, *_Transpose.apply(ctx.layer, ctx.needs_input_grad[2:], dh, dc))


class _Transpose(torch.autograd.Function):
    """The VJP of a recurrent layer, as an autograd function of the incoming gradients.

    The function is linear, so its own backward pass is the JVP of the layer.
    """

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
