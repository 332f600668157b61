"""The recurrences over time in recurrent layers: a linear filter of the inputs, and a cell over filtered inputs.

The linear filter is v_t = mu_t v_{t-1} + s x_t, with momentum coefficients mu_t and a step size s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32  # number of time steps in a block, which is filtered by one matrix product
LOOP_WIDTH = 2**11  # with this many values per time step or more, a time loop on a CPU is faster than matrix products


def linear_filter(x: Tensor, mu: float | Tensor, s: float, v: Tensor | None = None) -> Tensor:
    """Return v_t = mu_t v_{t-1} + s x_t for all time steps t of the inputs x (T, batch, n), as a tensor (T, batch, n).

    The initial value v_0 is ``v`` (batch, n), or zero if ``v`` is None. The momentum coefficient mu is a number, (T,)
    in float64, or (T, batch). NaN or inf in x_t does not affect the outputs before time step t.
    """
    rates = mu if isinstance(mu, Tensor) else torch.full(x.shape[:1], mu, dtype=torch.float64)
    takes_any_length = x.shape[0] != 1 and (torch.jit.is_tracing() or torch.compiler.is_exporting())
    if takes_any_length or (  # conditions on a symbolic length cannot be evaluated
        x.shape[0] > 4 and rates.dim() == 1 and (x.device.type != "cpu" or x[0].numel() < LOOP_WIDTH)
    ):
        return _filter_blocks(s * x, rates.to(x.device).reshape(x.shape[0], -1), v, takes_any_length)
    v, found = torch.zeros_like(x[0]) if v is None else v, []
    for mu_t, x_t in zip(rates.to(x).reshape(len(x), -1, 1).unbind(), (s * x).unbind(), strict=True):
        v = torch.addcmul(x_t, mu_t, v)
        found.append(v)
    return torch.stack(found)


def _filter_blocks(x: Tensor, mu: Tensor, v: Tensor | None, takes_any_length: bool) -> Tensor:
    """Compute v_t = mu_t v_{t-1} + x_t by matrix products, for x (T, batch, n) and mu (T, 1) or (T, batch).

    The initial v_0 is ``v`` (batch, n), or zero if ``v`` is None. Time is divided into blocks, and one matrix product
    filters each block from zero. The values at the ends of the blocks are filtered in the same way, to get the value
    with which each block starts. For inputs 784 x 64 x 2 this takes 1.1 ms, and a loop over time takes 13 ms
    (``benchmarks.recurrent``, training, MomentumLSTM). With ``takes_any_length``, a program exported from this code
    works for all T. A cumulative sum of x_t / (mu_1 ... mu_t) would be shorter code but overflows.
    """
    steps = x.shape[0]
    given = x.flatten(1).unsqueeze(1) if mu.shape[1] == 1 else x
    if v is not None:  # v becomes the input of an additional first time step
        given, mu = torch.cat([v.view_as(given[0]).unsqueeze(0), given]), pad(mu, (0, 0, 1, 0))
    levels = 2 if takes_any_length else (steps >= BLOCK) + (steps >= BLOCK**2)
    finite = given.nan_to_num(0.0, 0.0, 0.0)  # because a zero of a matrix times NaN or inf is NaN
    found = _filter_levels(finite, mu.double(), levels, takes_any_length) + (given - finite).cumsum(0)
    return (found if v is None else found[1:]).view_as(x)


def _filter_levels(x: Tensor, mu: Tensor, levels: int, takes_any_length: bool) -> Tensor:
    """Compute v_t = mu_t v_{t-1} + x_t from v_0 = 0, for x (T, groups, n) and mu (T, groups), by recursion over blocks.

    With ``levels`` = 0, one matrix product filters all T time steps. Otherwise matrix products filter blocks of time
    steps, and a call with ``levels - 1`` filters the values at the ends of the blocks.
    """
    steps, cumprod = x.shape[0], _cumprod if takes_any_length else torch.cumprod
    if levels == 0:
        return (_filter_matrix(mu.T, cumprod).to(x) @ x.transpose(0, 1)).transpose(0, 1)
    missing = (steps // BLOCK + 2) * BLOCK - steps  # >= 2 blocks: exported programs broadcast axes of size 1
    x, mu = pad(x, (0, 0, 0, 0, 0, missing)), pad(mu, (0, 0, 0, missing)).unfold(0, BLOCK, BLOCK)
    # (blocks, groups, BLOCK, n); torch.export cannot prove that a view of a symbolic length is valid
    x = x.unfold(0, BLOCK, BLOCK).mT if takes_any_length else x.view(-1, BLOCK, *x.shape[1:]).transpose(1, 2)
    inside, decay = _filter_matrix(mu, cumprod).to(x) @ x, cumprod(mu, -1)
    ends = _filter_levels(inside[:, :, -1], decay[..., -1], levels - 1, takes_any_length)
    carried = pad(ends, (0, 0, 0, 0, 1, 0))[:-1]
    found = torch.addcmul(inside, decay.to(x).unsqueeze(-1), carried.unsqueeze(2)).transpose(1, 2).flatten(0, 1)
    return found.index_select(0, torch.arange(steps, device=x.device))  # torch.export cannot prove the bound of a slice


def _filter_matrix(mu: Tensor, cumprod: Callable[..., Tensor]) -> Tensor:
    """Return the lower triangular matrix (..., T, T) of the filter, from its coefficients mu (..., T), which may be 0.

    The entry in row t and column j <= t is the product mu_{j+1} ... mu_t, by which the input x_j contributes to v_t.
    """
    steps = torch.arange(mu.shape[-1], device=mu.device)
    is_later = steps.unsqueeze(1) > steps
    factors = torch.where(is_later, mu.unsqueeze(-1), 1.0).mT
    return cumprod(factors, -1).mT.tril()


def _cumprod(x: Tensor, dim: int) -> Tensor:
    """Return ``x.cumprod(dim)``, computed by multiplications with shifted copies, because ONNX has no cumprod."""
    size = x.shape[dim]
    if not isinstance(size, int):
        return x.cumprod(dim)
    for k in range((size - 1).bit_length()):
        x = x * pad(x, (2**k, 0), value=1.0)[..., :size]
    return x


class Cell(NamedTuple):
    """The equations of a cell.

    Attributes:
        step: ``step(d, h, c, u, bias)`` returns the next hidden state h and cell state c. d is the filtered W_ih x, and
            u is the transpose of W_hh.
        gates: number of gates, each with as many features as h.
        has_cell_state: whether the cell has a cell state c, as an LSTM has.
        adds_bias: whether ``step`` adds the bias; if not, d contains the bias.
        torch_layer: name of the function in ``torch._VF`` that runs torch's layer of this cell; None if there is none.
    """

    step: Callable[..., Any]
    gates: int = 1
    has_cell_state: bool = False
    adds_bias: bool = False
    torch_layer: str | None = None


def run_cell(
    cell: Cell, d: Tensor, h: Tensor, c: Tensor | None, u: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run a cell over its filtered inputs d (T, batch, gates * n); return all h (T, batch, n), and the last h and c.

    ``h`` and ``c`` are the initial hidden state and cell state. ``u`` is W_hh. ``bias`` is b_hh, or the bias of the
    activation.
    """
    if bias is not None and not cell.adds_bias:
        d, bias = d + bias, None
    found, u = [], u.T
    for d_t in d.unbind():
        h, c = cell.step(d_t, h, c, u, bias)
        found.append(h)
    return torch.stack(found), h, c
