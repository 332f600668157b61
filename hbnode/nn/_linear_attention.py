"""Linear attention with momentum, causal or non-causal: equations 71 to 74 of Wang et al., arXiv:2110.07034."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hbnode._checks import as_count, check_bool
from hbnode._torch import exports_any, fast_form, is_tracing, keep_freed_memory, no_autocast, reference_vjp
from hbnode._tree import Record, record
from hbnode.nn.heavy_ball_memory import check_heads, check_mask, check_state

CHUNKS_AT_ONCE = 96  # number of chunks, over all heads, that a CPU computes together, so that they fit its cache
Rate = float | Tensor  # the momentum β or the step size γ: a number, or a tensor of shape () or (heads,)


@record
class MomentumAttentionState(Record):
    """The state of :func:`momentum_attention` after some keys k and values v, in float32 or wider.

    Attributes:
        s: weighted sum of φ(k) vᵀ over the keys, with φ(k) = elu(k) + 1 (batch, heads, dim, value_dim).
        p: momentum, a weighted sum of φ(k) vᵀ in which earlier keys weigh less (batch, heads, dim, value_dim).
        z: sum of φ(k) over the keys (batch, heads, dim).
    """

    s: Tensor
    p: Tensor
    z: Tensor


def momentum_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    momentum: float | Tensor,
    step_size: float | Tensor = 1.0,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    eps: float = 1e-6,
    initial_state: MomentumAttentionState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
) -> Any:
    r"""Compute linear attention whose state is updated with momentum, in time and memory linear in the length.

    With :math:`\phi(x) = \mathrm{elu}(x) + 1`, momentum :math:`\beta` and step size :math:`\gamma`, the i-th query, key
    and value give the output

    .. math:: p_i &= \beta p_{i-1} + \phi(k_i) v_i^\top, \qquad s_i = s_{i-1} + \gamma p_i, \qquad
        z_i = z_{i-1} + \phi(k_i), \\
        o_i &= \frac{\phi(q_i)^\top s_i}{\phi(q_i)^\top z_i + \epsilon}
        = \frac{\gamma \sum_{j \le i} \frac{1 - \beta^{i-j+1}}{1 - \beta}\, \phi(q_i)^\top \phi(k_j)\, v_j}
        {\phi(q_i)^\top z_i + \epsilon},

    where the weight of a key approaches :math:`\gamma / (1 - \beta)` as other keys follow it. With ``causal=False``
    every output is computed from the state after the last key. ``momentum=0`` and ``step_size=1`` is linear attention.

    If q, k and v are in half precision, the state and all sums are in float32, also under autocast. Masked positions
    may hold NaN or infinity. Unmasked NaN or infinity spreads to all later outputs of its head, and to some before it.
    All tensor arguments have gradients of any order.

    Long sequences are divided into segments of several chunks. To save memory, the backward pass recomputes the first
    half of the segments.

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), arXiv:2110.07034:
        equations 71 to 73, and 74 with ``causal=False``; p has the opposite sign in the paper. Linear attention:
        Katharopoulos et al., Transformers are RNNs, arXiv:2006.16236.

    Arguments:
        q: queries (batch, heads, queries, dim), before the feature map φ. They are not scaled.
        k: keys (batch, heads, length, dim), before the feature map φ. With ``causal``, length must equal queries.
        v: values (batch, heads, length, value_dim).
        momentum: β, 0 <= β < 1, as a number or a tensor () or (heads,), which may be learned. Values of tensors are
            not checked.
        step_size: γ >= 0, in the same form. Default: ``1.0``
        causal: whether the i-th query attends to the first i keys only, or to all keys. The weight of a key depends on
            the number of keys that follow it, not counting ignored keys. Default: ``True``
        key_padding_mask: (batch, length), True = ignore: the key does not change the state, and a query at its position
            uses the unchanged state. Default: ``None``
        eps: ε, added to the denominator. Outputs before the first key are 0, also with ε = 0. Default: ``1e-6``
        initial_state: state of an earlier call, to continue from; None is zeros. Default: ``None``
        return_state: whether to also return the state after the last key. Default: ``False``
        chunk_size: number of keys processed together. It changes only speed and rounding. Default: ``64``

    Returns:
        The outputs (batch, heads, queries, value_dim). With ``return_state``, the outputs and a
        :class:`MomentumAttentionState`.

    Raises:
        ValueError: if an argument is out of its range, or shapes or dtypes do not fit.
        TypeError: if an argument is not a tensor, or a tensor has the wrong dtype.

    Example:
        >>> import torch, hbnode
        >>> q, k, v = torch.randn(3, 2, 4, 100, 8).unbind()
        >>> whole = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9)
        >>> first, state = hbnode.nn.functional.momentum_attention(
        ...     q[:, :, :60], k[:, :, :60], v[:, :, :60], momentum=0.9, return_state=True
        ... )
        >>> rest = hbnode.nn.functional.momentum_attention(
        ...     q[:, :, 60:], k[:, :, 60:], v[:, :, 60:], momentum=0.9, initial_state=state
        ... )
        >>> torch.allclose(torch.cat([first, rest], 2), whole, atol=1e-5)
        True
    """
    check_bool(causal, "causal"), check_bool(return_state, "return_state")
    dtype = check_heads(q, k, v, causal)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}. Fix: q.to(v.dtype).")
    if key_padding_mask is not None:
        check_mask(key_padding_mask, k)
    beta = _check_rate(momentum, "momentum", k.shape[1], below=1.0)
    gamma = _check_rate(step_size, "step_size", k.shape[1])
    eps, size = check_number(eps, "eps"), as_count(chunk_size, "chunk_size")
    (batch, heads, length, dim), value_dim, ignored = k.shape, v.shape[3], key_padding_mask
    shapes = {"s": (batch, heads, dim, value_dim), "p": (batch, heads, dim, value_dim), "z": (batch, heads, dim)}
    with no_autocast(q):
        if initial_state is None:
            state = MomentumAttentionState(*(q.new_zeros(shape, dtype=dtype) for shape in shapes.values()))
        else:
            check_state(initial_state, MomentumAttentionState, shapes, q)
            state = initial_state.outside_inference_mode().map(lambda x: x.to(dtype))
        if length <= 1:
            out, state = _recurrence(_features(q, k, v, ignored, causal, dtype), (beta, gamma), ignored, state, eps)
            return (out.to(q.dtype), state) if return_state else out.to(q.dtype)
        out, state = _by_segments((q, k, v), (beta, gamma), ignored, state, causal, eps, size)
    return (out, state) if return_state else out


def _by_segments(
    qkv: tuple[Tensor, Tensor, Tensor],
    rates: tuple[Rate, Rate],
    ignored: Tensor | None,
    state: MomentumAttentionState,
    causal: bool,
    eps: float,
    size: int,
) -> tuple[Tensor, MomentumAttentionState]:
    """Compute :func:`momentum_attention` segment by segment, for sequences of more than one key.

    A segment has several chunks of ``size`` keys. ``qkv`` are queries, keys and values, and ``rates`` are β and γ.
    Return the outputs, and the state after the last key.
    """
    (_, k, v), (beta, gamma) = qkv, rates
    has_p, after = isinstance(beta, Tensor) or beta != 0, [state.s, state.p, state.z]
    size, spans = _divide(k, size, causal)
    tables = weights = _weight_tables(beta, gamma, spans[0], state.s)
    outputs: list[Tensor] = []
    parts = ([x] if len(spans) == 1 else x.split(spans, 2) for x in qkv)
    masks = [None] * len(spans) if ignored is None else ignored.split(spans, 1)
    for i, part in enumerate(zip(*parts, masks, strict=True)):
        size = spans[i] if spans[i] < size else size
        if ignored is None and (i == 0 or spans[i] != spans[i - 1]):
            rows = torch.arange(1, size + 1, device=k.device)
            weights = _weigh(tables, rows[None, None], spans[i] // size, causal)
        run = _recomputed if 2 * i + 2 < len(spans) else _chunkwise  # the first half is recomputed in backward
        out, *after = run((causal, has_p, eps, size), *part, *after, *weights)
        outputs.append(out)
    s, p, z = after
    if not has_p:  # with β = 0, P is φ(k) vᵀ of the last key; if all keys are ignored, P does not change
        present = torch.ones_like(k[:1, 0, :, 0], dtype=torch.bool) if ignored is None else ~ignored
        none, last = (x[:, None, None, None] for x in (~present.any(1), present.cumsum(1).argmax(1)))
        k, v = (torch.take_along_dim(x, last, 2).masked_fill(none, 0.0).to(p.dtype) for x in (k, v))
        p = torch.where(none, p, feature_map(k).mT @ v)
    return outputs[0] if len(spans) == 1 else torch.cat(outputs, 2), MomentumAttentionState(s, p, z)


def _divide(k: Tensor, size: int, causal: bool) -> tuple[int, list[int]]:
    """Divide keys k (batch, heads, length, dim) into chunks and segments.

    Return the number of keys in a chunk, and a list with the number of keys in each segment.
    """
    length = k.shape[2]
    # comparisons instead of min and %: torch.compile takes long to simplify symbolic expressions of these
    if not causal or exports_any(length) or length <= size:  # a variable number of chunks cannot be exported
        return length, [length]
    span = 64 * size
    if k.device.type == "cpu" and not is_tracing():
        keep_freed_memory(k.device)
        span = size * max(1, CHUNKS_AT_ONCE // max(1, k.shape[0] * k.shape[1]))
    spans = []
    while length >= span:
        spans.append(span)
        length -= span
    whole = length // size * size
    return size, spans + [x for x in (whole, length - whole) if x]


def feature_map(x: Tensor) -> Tensor:
    """Return φ(x) = elu(x) + 1, computed without the rounding error of adding 1 for negative x."""
    return _feature_map(None, x)[0]


def _feature_map_reference(_: None, x: Tensor) -> tuple[Tensor]:
    positive = x.relu()
    return ((x - positive).exp() + positive,)  # not clamp: its slope at 0 differs between versions of torch


_feature_map = fast_form(_feature_map_reference, lambda _, x, phi, grads, needed: (grads[0] * phi[0].clamp(max=1.0),))(
    lambda _, needs_grad, x: (_feature_map_reference(_, x),) * 2
)


def _features(
    q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, causal: bool, dtype: torch.dtype
) -> list[Tensor]:
    """Return a list of φ(q), φ(k) and v in the given dtype.

    φ(k) and v are 0 for the keys that the mask ``ignored`` marks with True, so that these keys have no effect.
    """
    if ignored is not None:  # 0 * NaN is NaN
        mask = ignored[:, None, :, None]
        k, v = k.masked_fill(mask, 0.0), v.masked_fill(mask, 0.0)
        q = q.masked_fill(mask & ~q.isfinite(), 0.0) if causal else q
    phi_q, phi_k = feature_map(q.to(dtype)), feature_map(k.to(dtype))
    return [phi_q, phi_k if ignored is None else phi_k.masked_fill(mask, 0.0), v.to(dtype)]


def _recurrence(
    qkv: list[Tensor], rates: tuple[Rate, Rate], ignored: Tensor | None, state: MomentumAttentionState, eps: float
) -> tuple[Tensor, MomentumAttentionState]:
    """Compute :func:`momentum_attention` for sequences of length 0 or 1, by one step of the recurrence.

    ``qkv`` are φ(q), φ(k) and v. ``rates`` are β and γ. Return the outputs, and the state after the key.
    """
    (q, k, v), s, p, z = qkv, state.s, state.p, state.z
    if k.shape[2]:
        beta, gamma = (x.to(k.dtype).reshape(-1, 1, 1) if isinstance(x, Tensor) else x for x in rates)
        new = torch.addcmul(beta * p, k.mT, v)
        p = new if ignored is None else torch.where(ignored[:, None, None], p, new)
        s = s + gamma * (p if ignored is None else p.masked_fill(ignored[:, None, None], 0.0))
        z = z + k.squeeze(2)
    return q @ s / _denominator(q @ z.unsqueeze(-1), eps), MomentumAttentionState(s, p, z)


def _chunkwise(options: tuple[bool, bool, float, int], *tensors: Any) -> tuple[Tensor, ...]:
    """Compute the recurrence of :func:`momentum_attention` chunk by chunk.

    A chunk has C rows. Q holds φ of the queries, K holds φ of the keys, and V holds the values. n_r is the number of
    keys in the rows up to r, not counting ignored keys, and n is their number in all rows. A key that is followed by
    j - 1 other keys has the weight g(j) = γ (1 + β + ... + β^{j-1}). S and P are the state before the chunk, and S' and
    P' are the state after it::

        W[r, c] = g(n_r - n_c + 1) for c <= r
        numerator = (Q Kᵀ ∘ W) V + Q S + β g(n_r) Q P
        S' = S + β g(n) P + Kᵀ diag(g(n - n_c + 1)) V
        P' = β^n P + Kᵀ diag(β^{n - n_c}) V

    All weights are positive, so nothing cancels if β is near 1. Without ``causal`` the sequence is one chunk. S and P
    before each chunk are also matrix products, with the weights g(j) and β^j for the numbers j of keys between chunks.

    ``tensors`` are queries, keys, values, the mask of ignored keys or None, S, P, z, and the weights. The weights are
    the result of :func:`_weigh`, or the tables of :func:`_weight_tables` if keys are ignored. ``options`` are
    ``causal``, whether P is used, ε and C.
    """
    (causal, has_p, eps, size), (q, k, v, ignored, s, p, z, *weights), dtype = options, tensors, tensors[0].dtype
    q, k, v = _features(q, k, v, ignored, causal, s.dtype)
    k, v = k.unflatten(2, (-1, size)), v.unflatten(2, (-1, size))
    chunks, shape = k.shape[2], s.shape[2:]
    if ignored is not None:
        weights = [*_weigh(weights, (~ignored).unflatten(1, (-1, size)).cumsum(2), chunks, causal)]
    gain, decay, p_to_out, p_to_s, p_to_p, *within = weights
    lower = torch.ones_like(p_to_s).tril()
    ss = lower @ torch.cat([s.unsqueeze(2), k.mT @ (gain * v)], 2).flatten(3)
    if has_p:
        ps = torch.cat([p.unsqueeze(2), k.mT @ (decay * v)], 2).flatten(3)
        ss, (ps, p) = ss + p_to_s @ ps, (p_to_p @ ps).unflatten(3, shape).split([chunks, 1], 2)
        p = p.squeeze(2)
    ss, s = ss.unflatten(3, shape).split([chunks, 1], 2)
    zs, z = (lower @ torch.cat([z.unsqueeze(2), k.sum(3)], 2)).split([chunks, 1], 2)
    s, z = s.squeeze(2), z.squeeze(2)
    if not causal:
        return (q @ s / _denominator(q @ z.unsqueeze(-1), eps)).to(dtype), s, p, z
    q = q.unflatten(2, (-1, size))
    scores, past = q @ k.mT, torch.addcmul(q @ ss, p_to_out, q @ ps) if has_p else q @ ss
    above = torch.baddbmm(*(x.flatten(0, 2) for x in (past, scores * within[0], v))).view_as(past)
    below = (scores * q.new_ones(size, size).tril()).sum(-1, keepdim=True) + (q * zs.unsqueeze(3)).sum(-1, keepdim=True)
    return (above * _denominator(below, eps).reciprocal()).flatten(2, 3).to(dtype), s, p, z


def _denominator(below: Tensor, eps: float) -> Tensor:
    """Return the denominator of the attention outputs, ``below`` + ε.

    ``below`` is the product of φ(q) and the sum of φ(k) over the keys. If ε = 0, return infinity where ``below`` is 0,
    so that outputs before the first key are 0.
    """
    return below + eps if eps else below.masked_fill(below == 0, math.inf)


# the same function as _chunkwise; its backward pass recomputes the segment
_recomputed = fast_form(
    _chunkwise, lambda options, tensors, _, grads, needed: reference_vjp(_chunkwise, options, tensors, grads, needed)
)(lambda options, _, *tensors: (_chunkwise(options, *tensors), ()))


def _weigh(tables: Sequence[Tensor], n: Tensor, chunks: int, causal: bool) -> tuple[Tensor, ...]:
    """Look up the weights that :func:`_chunkwise` uses in the tables of :func:`_weight_tables`.

    Return g(n - n_c + 1), β^{n - n_c}, β g(n_r), β g(m), β^m and, if causal, W, in the notation of :func:`_chunkwise`.
    The argument ``n`` holds n_r, (batch or 1, chunks or 1, C). m is the number of keys between two chunks.
    """
    g, decay, beta_g = tables
    last, row = n[..., -1:, None], n.unsqueeze(-1)
    before = pad(n[..., -1].expand(-1, chunks).cumsum(1), (1, 0)).unsqueeze(-1)
    m, within = (before - before.mT).clamp(min=0), (row - row.mT + 1).clamp(min=0)
    places = (g, last - row + 1), (decay, last - row), (beta_g, row), (beta_g, m), (decay, m), (g, within)
    gain, gone, to_out, *square = (_look_up(table, at) for table, at in places[: 6 if causal else 5])
    return gain, gone, to_out, *(x.tril() for x in square)


def _weight_tables(beta: Rate, gamma: Rate, size: int, like: Tensor) -> tuple[Tensor, ...]:
    """Return tables of the weights g(n) = γ (1 + β + ... + β^{n-1}), β^n and β g(n) for n = 0, ..., size.

    Each table is (heads or 1, size + 1). It is computed in float64 if the device supports it, and then converted to the
    dtype of ``like``.
    """
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    n = torch.arange(size + 1, device=like.device, dtype=wide)
    if isinstance(beta, Tensor):
        # adding a number far below the precision of β avoids 0 * 0^{-2} = NaN in derivatives at β = 0
        beta = beta.to(wide).reshape(-1, 1)
        decay = (beta + torch.finfo(wide).tiny ** 0.3) ** n
    else:
        decay = torch.pow(beta, n).unsqueeze(0)
    gamma = gamma.to(wide).reshape(-1, 1) if isinstance(gamma, Tensor) else gamma
    g = gamma * pad(decay.cumsum(1)[:, :-1], (1, 0))
    return g.to(like.dtype), decay.expand_as(g).to(like.dtype), (beta * g).to(like.dtype)


def _look_up(table: Tensor, n: Tensor) -> Tensor:
    """Return the entries of a table (heads, size + 1) at the indices n (batch, chunks, ...).

    The result is (batch, heads, chunks, ...).
    """
    return table[:, n].transpose(0, 1)


# Checks


def _check_rate(value: Rate, name: str, heads: int, below: float = math.inf) -> Rate:
    if not isinstance(value, Tensor):
        return check_number(value, name, below)
    if value.shape not in ((), (heads,)) or not value.is_floating_point():
        fix = f"{name}.expand({heads})" if value.numel() == 1 else f"one number for each of the {heads} heads"
        raise ValueError(
            f"{name} must be a number, or a floating-point tensor () or ({heads},), one per head, got "
            f"{value.dtype} {tuple(value.shape)}. Fix: {fix if value.is_floating_point() else f'{name}.float()'}."
        )
    return value


def check_number(value: float, name: str, below: float = math.inf) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not 0 <= value < below:
        wanted = f"0 <= {name} < {below:g}" if below < math.inf else f"{name} >= 0"
        fix = f"torch.tensor({value!r})" if isinstance(value, (list, tuple)) else "a number in that range"
        raise ValueError(f"{name} must be a number, {wanted}, got {value!r}. Fix: {fix}.")
    return float(value)
