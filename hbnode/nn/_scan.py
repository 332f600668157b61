"""The time loops of recurrent layers: the linear filter v_t = mu_t v_{t-1} + s x_t, and a cell over filtered inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32  # number of time steps that one matrix filters
LOOP_WIDTH = 2**11  # number of values per time step from which on, on a CPU, a time loop is faster than matrices


def linear_filter(x: Tensor, mu: float | Tensor, s: float, v: Tensor | None = None) -> Tensor:
    """Return v_t = mu_t v_{t-1} + s x_t for inputs x (T, batch, n); the initial v_0 is ``v`` (batch, n) or zero.

    The momentum coefficient mu is a number, (T,) in float64, or (T, batch). NaN or inf in x_t does not affect the
    outputs before time step t.
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
    """Filter x (T, batch, n) with mu (T, 1) or (T, batch) by matrix products, starting from v or zero.

    One matrix filters each block of time steps. The last values of the blocks are filtered in the same way. For inputs
    784 x 64 x 2 this takes 1.1 ms, and a loop over time 13 ms (``benchmarks.recurrent``, training, MomentumLSTM).
    Exported programs then take any length. A cumulative sum of x_t / (mu_1 ... mu_t) would be shorter but overflows.
    """
    steps = x.shape[0]
    given = x.flatten(1).unsqueeze(1) if mu.shape[1] == 1 else x
    if v is not None:  # v becomes an input before the first time step
        given, mu = torch.cat([v.view_as(given[0]).unsqueeze(0), given]), pad(mu, (0, 0, 1, 0))
    levels = 2 if takes_any_length else (steps >= BLOCK) + (steps >= BLOCK**2)
    finite = given.nan_to_num(0.0, 0.0, 0.0)  # because a zero of a matrix times NaN or inf is NaN
    found = _filter_levels(finite, mu.double(), levels, takes_any_length) + (given - finite).cumsum(0)
    return (found if v is None else found[1:]).view_as(x)


def _filter_levels(x: Tensor, mu: Tensor, levels: int, takes_any_length: bool) -> Tensor:
    """Filter x (T, groups, n) with mu (T, groups) from zero: at level 0 by one matrix, at higher levels by blocks."""
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
    """Return a matrix (..., T, T) with mu_{j+1} ... mu_t in row t and column j, from mu (..., T), which may be 0."""
    steps = torch.arange(mu.shape[-1], device=mu.device)
    is_later = steps.unsqueeze(1) > steps
    factors = torch.where(is_later, mu.unsqueeze(-1), 1.0).mT
    return cumprod(factors, -1).mT.tril()


def _cumprod(x: Tensor, dim: int) -> Tensor:
    """Return ``x.cumprod(dim)`` as products of shifted factors, for exported graphs: ONNX has no cumprod operator."""
    size = x.shape[dim]
    if not isinstance(size, int):
        return x.cumprod(dim)
    for k in range((size - 1).bit_length()):
        x = x * pad(x, (2**k, 0), value=1.0)[..., :size]
    return x


class Cell(NamedTuple):
    """The equations of a cell.

    Attributes:
        step: ``step(d, h, c, u, bias)`` returns the next h and c from the filtered input d; u is the transpose of W_hh.
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

    ``u`` is W_hh. ``bias`` is b_hh, or the bias of the activation.
    """
    if bias is not None and not cell.adds_bias:
        d, bias = d + bias, None
    found, u = [], u.T
    for d_t in d.unbind():
        h, c = cell.step(d_t, h, c, u, bias)
        found.append(h)
    return torch.stack(found), h, c
