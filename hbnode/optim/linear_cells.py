"""Recurrent cells linearized along a sequence: the products with their Jacobian and with its transpose.

The pre-activations of a step are linear in the weights and in the state before, and the new state is a function of each
number of them. With its derivatives kept in ``slope``, a product is a loop of one multiplication by U and a few
products number by number; all that depends on the weights and inputs is a product over all times at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Weights(NamedTuple):
    """Parameters of a layer in one direction, or what stands for them: a vector's parts, gradients.

    Attributes:
        w: W_ih.
        u: W_hh.
        b: b_ih, or None.
        bias: b_hh, or None.
    """

    w: Tensor | None
    u: Tensor | None
    b: Tensor | None
    bias: Tensor | None


class LinearCell(ABC):
    """A layer in one direction along a batch of sequences.

    Arguments:
        x: inputs (T, batch, n).
        h: the state before (batch, hidden_size).
        c: the cell state before, of an LSTM.
        w: the weights.
    """

    h: Tensor  # (1 + T, batch, hidden_size), the state before first

    def __init__(self, x: Tensor, h: Tensor, c: Tensor | None, w: Weights) -> None:
        assert w.w is not None
        assert w.u is not None
        self.x, self.w, self.u = x, w.w, w.u
        self.h = x.new_empty(len(x) + 1, *h.shape)
        self.h[0] = h
        self.last = self._run(c, w)

    @abstractmethod
    def _run(self, c: Tensor | None, w: Weights) -> Tensor | None:
        """Fill h, keep the slopes, return the last cell state."""

    @abstractmethod
    def push(self, v: Weights, rx: Tensor | None, rh: Tensor | None, rc: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The derivative of all h, and of the last c, in the direction of weights, inputs and first state."""

    @abstractmethod
    def pull(self, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The transpose: gradients of the pre-activations, of the first h, and of the first c or of W_n x of a GRU."""

    def _driven(self, v: Weights, rx: Tensor | None) -> Tensor:
        """The pre-activations' derivatives (T, batch, gates * hidden_size), without those through the states."""
        rows = self.h[:-1].flatten(0, 1)
        e = rows.new_zeros(len(rows), len(self.u)) if v.u is None else linear(rows, v.u, v.bias)
        if v.u is None and v.bias is not None:
            e += v.bias
        _add_inputs(e, self.x, self.w, v, rx)
        return e.view(*self.h[1:].shape[:2], -1)

    def weight_gradients(self, de: Tensor, rest: Tensor | None) -> Weights:
        """Gradients of the weights from those of the pre-activations."""
        rows = de.flatten(0, 1)
        total = rows.sum(0)
        return Weights(_outer(rows, self.x), _outer(rows, self.h[:-1]), total, total)

    def input_gradient(self, de: Tensor, rest: Tensor | None) -> Tensor:
        """The gradient of x from that of the pre-activations."""
        return de @ self.w


class Elman(LinearCell):
    """h' = f(W x + U h + b), f = tanh or relu."""

    def _run(self, c: Tensor | None, w: Weights) -> Tensor | None:
        t, u = linear(self.x, self.w, _sum(w.b, w.bias)), self.u.T
        for before, t_i, after in zip(self.h.unbind(), t.unbind(), self.h[1:].unbind(), strict=False):
            self._activate(torch.addmm(t_i, before, u, out=after))
        self.slope = self._slope(self.h[1:])
        # what the pre-activations are linear in, beside a place for the derivative of h: [Rh, h, x, 1]
        ones = self.x.new_ones(*self.x.shape[:2], 1)
        self.rows = torch.cat([torch.zeros_like(self.slope), self.h[:-1], self.x, ones], -1)
        return None

    @staticmethod
    def _activate(t: Tensor) -> None:
        t.tanh_()

    @staticmethod
    def _slope(h: Tensor) -> Tensor:
        return (1 + h) * (1 - h)

    def push(self, v: Weights, rx: Tensor | None, rh: Tensor | None, rc: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Algorithm 1 of the supplement to Martens and Sutskever (2011), lines 1 to 6, a product for each."""
        n, out = len(self.u), torch.empty_like(self.slope)
        bias = _sum(v.b, v.bias)
        parts = [
            self.u,
            torch.zeros_like(self.u) if v.u is None else v.u,
            torch.zeros_like(self.w) if v.w is None else v.w,
            (self.u.new_zeros(n) if bias is None else bias).unsqueeze(1),
        ]
        linear_in, a = torch.cat(parts, 1).T, torch.empty_like(out[0])
        for k, (rows, slope, out_k) in enumerate(
            zip(self.rows.unbind(), self.slope.unbind(), out.unbind(), strict=True)
        ):
            if rh is None:
                rows[:, :n] = 0
            else:
                rows[:, :n] = rh
            torch.mm(rows, linear_in, out=a)
            if rx is not None:
                a.addmm_(rx[k], self.w.T)
            rh = torch.mul(a, slope, out=out_k)
        return out, None

    def pull(self, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Lines 13 to 24, without those of the outputs."""
        de = torch.empty_like(self.slope).copy_(dh)
        later: Tensor | None = None
        for de_i, slope_i in zip(reversed(de.unbind()), reversed(self.slope.unbind()), strict=True):
            if later is not None:
                de_i.addmm_(later, self.u)
            later = de_i.mul_(slope_i)
        return de, de[0] @ self.u, None

    def weight_gradients(self, de: Tensor, rest: Tensor | None) -> Weights:
        """All in one product."""
        n = len(self.u)
        u, w, b = (self.rows.flatten(0, 1)[:, n:].T @ de.flatten(0, 1)).split([n, self.x.shape[-1], 1])
        return Weights(w.T, u.T, b[0], b[0])


class Relu(Elman):
    """h' = max(0, W x + U h + b)."""

    @staticmethod
    def _activate(t: Tensor) -> None:
        t.relu_()

    @staticmethod
    def _slope(h: Tensor) -> Tensor:
        return (h > 0).to(h.dtype)


class LSTM(LinearCell):
    """c' = f c + i g, h' = o tanh(c')."""

    def _run(self, c: Tensor | None, w: Weights) -> Tensor | None:
        assert c is not None
        n, u = self.h.shape[-1], self.u.T
        a = linear(self.x, self.w, _sum(w.b, w.bias))
        self.slope, self.of_c = torch.empty_like(a), torch.empty_like(self.h[1:])
        self.forget = torch.empty_like(self.of_c)
        for k, a_i in enumerate(a.unbind()):
            a_i.addmm_(self.h[k], u)
            i, f, o = (torch.sigmoid(a_i[:, j * n : (j + 1) * n]) for j in (0, 1, 3))
            g = torch.tanh(a_i[:, 2 * n : 3 * n])
            parts = [g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)]
            c = f * c + i * g
            tanh = torch.tanh(c)
            torch.cat([*parts, tanh * o * (1 - o)], 1, out=self.slope[k])
            torch.mul(o, 1 - tanh * tanh, out=self.of_c[k])
            torch.mul(o, tanh, out=self.h[k + 1])
            self.forget[k] = f
        return c

    def push(self, v: Weights, rx: Tensor | None, rh: Tensor | None, rc: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Through the cell state, which adds up, and the output gate."""
        e, u = self._driven(v, rx), self.u.T
        out = torch.empty_like(self.of_c)
        steps = zip(
            e.unbind(), self.slope.unbind(), self.forget.unbind(), self.of_c.unbind(), out.unbind(), strict=True
        )
        for e_i, slope_i, f, of_c, out_i in steps:
            if rh is not None:
                e_i.addmm_(rh, u)
            i, f_gate, g, o = e_i.mul_(slope_i).chunk(4, 1)
            i.add_(f_gate).add_(g)
            rc = i if rc is None else torch.addcmul(i, f, rc)
            rh = torch.addcmul(o, of_c, rc, out=out_i)
        return out, rc

    def pull(self, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same backwards."""
        de, n = torch.empty_like(self.slope), self.h.shape[-1]
        later: Tensor | None = None
        whole = torch.empty_like(self.of_c).copy_(dh)
        for k in reversed(range(len(de))):
            dh_i, slope = whole[k], self.slope[k].view(-1, 4, n)
            if later is not None:
                dh_i.addmm_(later, self.u)
            dc = self.of_c[k] * dh_i if dc is None else torch.addcmul(dc, self.of_c[k], dh_i)
            later = de[k]
            torch.mul(slope[:, :3], dc.unsqueeze(1), out=later.view(-1, 4, n)[:, :3])
            torch.mul(slope[:, 3], dh_i, out=later[:, 3 * n :])
            dc = self.forget[k] * dc
        return de, de[0] @ self.u, dc


class GRU(LinearCell):
    """h' = (1 - z) n + z h, n = tanh(W_n x + b + r q), q = U_n h + b'.

    The pre-activations in the loop are q, r, z in this order, beside those of W_n x, which no state enters.
    """

    def _run(self, c: Tensor | None, w: Weights) -> Tensor | None:
        n = self.h.shape[-1]
        self.u = _first_last(self.u, n)
        a, u = linear(self.x, self.w, w.b), self.u.T
        bias = None if w.bias is None else _first_last(w.bias, n)
        self.slope = a.new_empty(a.shape)
        self.of_n, self.update = torch.empty_like(self.h[1:]), torch.empty_like(self.h[1:])
        for k, a_i in enumerate(a.unbind()):
            before = self.h[k]
            q, of_r, of_z = (before @ u if bias is None else torch.addmm(bias, before, u)).chunk(3, 1)
            r, z = torch.sigmoid(a_i[:, :n] + of_r), torch.sigmoid(a_i[:, n : 2 * n] + of_z)
            new = torch.tanh(a_i[:, 2 * n :] + r * q)
            torch.mul(1 - z, 1 - new * new, out=self.of_n[k])
            slope_n = self.of_n[k]
            parts = [slope_n * r, slope_n * q * r * (1 - r), (before - new) * z * (1 - z)]
            torch.cat(parts, 1, out=self.slope[k])
            self.update[k] = z
            torch.lerp(new, before, z, out=self.h[k + 1])
        return None

    def push(self, v: Weights, rx: Tensor | None, rh: Tensor | None, rc: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Through q, r and z, and through h itself."""
        n, u = self.h.shape[-1], self.u.T
        rows = self.h[:-1].flatten(0, 1)
        e = rows.new_zeros(len(rows), 3 * n)
        if v.u is not None:
            torch.mm(rows, _first_last(v.u, n).T, out=e)
        if v.bias is not None:
            e += _first_last(v.bias, n)
        out = rows.new_zeros(rows.shape)
        of_gates, of_n = (
            Weights(*(None if z is None else z[part] for z in v)) for part in (slice(2 * n), slice(2 * n, None))
        )
        _add_inputs(e[:, n:], self.x, self.w[: 2 * n], of_gates, rx)
        _add_inputs(out, self.x, self.w[2 * n :], of_n, rx)
        out = out.view_as(self.of_n).mul_(self.of_n)
        steps = zip(
            e.view_as(self.slope).unbind(), self.slope.unbind(), self.update.unbind(), out.unbind(), strict=True
        )
        for e_i, slope_i, z, out_i in steps:
            if rh is not None:
                e_i.addmm_(rh, u)
                out_i.addcmul_(z, rh)
            q, r, of_z = e_i.mul_(slope_i).chunk(3, 1)
            rh = out_i.add_(q).add_(r).add_(of_z)
        return out, None

    def pull(self, dh: Tensor, dc: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same backwards."""
        n = self.h.shape[-1]
        de, whole = torch.empty_like(self.slope), torch.empty_like(self.of_n).copy_(dh)
        later: Tensor | None = None
        for k in reversed(range(len(de))):
            dh_i = whole[k]
            if later is not None:
                dh_i.addmm_(later, self.u).addcmul_(self.update[k + 1], whole[k + 1])
            later = de[k]
            torch.mul(self.slope[k].view(-1, 3, n), dh_i.unsqueeze(1), out=later.view(-1, 3, n))
        first = torch.addcmul(de[0] @ self.u, self.update[0], whole[0])
        return de, first, whole.mul_(self.of_n)

    def weight_gradients(self, de: Tensor, rest: Tensor | None) -> Weights:
        """In torch's order: r, z, n."""
        n = self.h.shape[-1]
        assert rest is not None
        rows, of_n = de.flatten(0, 1), rest.flatten(0, 1)
        total = rows.sum(0)
        w = torch.cat([_outer(rows[:, n:], self.x), _outer(of_n, self.x)])
        u, bias = (torch.cat([z[n:], z[:n]]) for z in (_outer(rows, self.h[:-1]), total))
        return Weights(w, u, torch.cat([total[n:], of_n.sum(0)]), bias)

    def input_gradient(self, de: Tensor, rest: Tensor | None) -> Tensor:
        """Through the gates and through n."""
        assert rest is not None
        n = self.h.shape[-1]
        return de[..., n:] @ self.w[: 2 * n] + rest @ self.w[2 * n :]


CELLS: dict[str, type[LinearCell]] = {"rnn_tanh": Elman, "rnn_relu": Relu, "lstm": LSTM, "gru": GRU}


def _add_inputs(e: Tensor, x: Tensor, w: Tensor, v: Weights, rx: Tensor | None) -> None:
    """Add what the inputs and their weights contribute to rows of pre-activations."""
    if v.w is not None:
        e.addmm_(x.flatten(0, 1), v.w.T)
    if rx is not None:
        e.addmm_(rx.flatten(0, 1), w.T)
    if v.b is not None:
        e += v.b


def _outer(rows: Tensor, x: Tensor) -> Tensor:
    """The sum of outer products; in this order the product is fast for few inputs too."""
    return (x.flatten(0, 1).T @ rows).T


def _sum(b: Tensor | None, bias: Tensor | None) -> Tensor | None:
    return b if bias is None else bias if b is None else b + bias


def _first_last(z: Tensor, n: int) -> Tensor:
    """Rows of r, z, n in the order n, r, z."""
    return torch.cat([z[2 * n :], z[: 2 * n]])
