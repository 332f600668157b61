"""Linear attention with momentum, causal and not: sections 4.2 and 4.3 of the momentum-architectures paper."""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, overload

import torch
from torch import Tensor

from hbnode import _torch
from hbnode._checks import as_count, check_input
from hbnode._torch import is_tracing, is_transformed, no_autocast
from hbnode.nn.attention.momentum_loop import attend_in_order
from hbnode.nn.attention.momentum_plain import attend, attend_to_all, step
from hbnode.nn.attention.momentum_weights import MomentumAttentionState, Rate


@overload
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
    return_state: Literal[False] = False,
    chunk_size: int = 64,
) -> Tensor: ...


@overload
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
    return_state: Literal[True],
    chunk_size: int = 64,
) -> tuple[Tensor, MomentumAttentionState]: ...


@overload
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
    return_state: bool,
    chunk_size: int = 64,
) -> Tensor | tuple[Tensor, MomentumAttentionState]: ...


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
) -> Tensor | tuple[Tensor, MomentumAttentionState]:
    r"""Linear attention whose writes have momentum, in time and memory linear in the length.

    With :math:`\phi(x) = \mathrm{elu}(x) + 1`, momentum :math:`\beta` and step size :math:`\gamma`, the i-th output is

    .. math:: p_i &= \beta p_{i-1} + \phi(k_i) v_i^\top, \qquad s_i = s_{i-1} + \gamma p_i, \qquad
        z_i = z_{i-1} + \phi(k_i), \\
        o_i &= \frac{\phi(q_i)^\top s_i}{\phi(q_i)^\top z_i + \epsilon}
        = \frac{\gamma \sum_{j \le i} \frac{1 - \beta^{i-j+1}}{1 - \beta}\, \phi(q_i)^\top \phi(k_j)\, v_j}
        {\phi(q_i)^\top z_i + \epsilon},

    so that a key reaches its full weight :math:`\gamma / (1 - \beta)` some time after its write. With ``causal=False``
    every query reads the state after the last key. ``momentum=0`` and ``step_size=1`` is linear attention.

    The state and all sums are in float32 where q, k and v are in half precision, also under autocast.

    NaN and infinities under the mask reach nothing. Elsewhere they reach all outputs of their head from the beginning
    of their chunk on.

    Gradients are exact for all arguments that are tensors, and can be differentiated again. On the CPU the memory kept
    for the backward pass is that of the inputs and the output, and a number for each query.

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), arXiv:2110.07034:
        equations 71 to 73, and 74 with ``causal=False``. There p has the other sign. Linear attention: Katharopoulos et
        al., Transformers are RNNs, arXiv:2006.16236.

    Arguments:
        q: queries (batch, heads, queries, dim), as in :func:`torch.nn.functional.scaled_dot_product_attention`. The
            feature map φ is applied to them here, and no scale.
        k: keys (batch, heads, length, dim). With ``causal`` there are as many as queries.
        v: values (batch, heads, length, value_dim).
        momentum: β, 0 <= β < 1: a number, or a tensor (), or (heads,) with one for each head, which may be learned. The
            values of tensors are not checked, since that would wait for the device.
        step_size: γ: likewise. Default: ``1.0``
        causal: whether the i-th query sees the first i keys, or all of them. The weight of a key depends on how many
            follow it. Those that are ignored do not count. Default: ``True``
        key_padding_mask: (batch, length), True = ignore: the key leaves the state as it was. A query at its position
            reads that state. None ignores no key. Default: ``None``
        eps: ε, added to the denominator. Default: ``1e-6``
        initial_state: the state that an earlier call returned, for a sequence that is fed in parts. None is zeros.
            Default: ``None``
        return_state: whether to return the state after the last key too. Default: ``False``
        chunk_size: keys that are processed at once. It changes the speed and the rounding alone. Default: ``64``

    Returns:
        The outputs (batch, heads, queries, value_dim), or these and the :class:`MomentumAttentionState`.

    Raises:
        ValueError, TypeError: if an argument is out of its range, or shapes or dtypes do not agree.

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
    _check_inputs(q, k, v, key_padding_mask, causal)
    if causal and key_padding_mask is not None:  # 0 * NaN is NaN
        q = q.masked_fill(key_padding_mask[:, None, :, None] & ~q.isfinite(), 0.0)
    options = {"eps": _number(eps, "eps", "eps >= 0", 0.0), "chunk_size": as_count(chunk_size, "chunk_size")}
    rates = _rate(momentum, "momentum", k, below=1.0), _rate(step_size, "step_size", k)
    with no_autocast(q):
        state = _state(initial_state, k, v, torch.promote_types(q.dtype, torch.float32))
        out, state = _run(q, k, v, rates, state, key_padding_mask, causal, options)
        out = out.to(q.dtype)
    return (out, state) if return_state else out


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rates: tuple[Rate, Rate],
    state: MomentumAttentionState,
    ignored: Tensor | None,
    causal: bool,
    options: dict[str, Any],
) -> tuple[Tensor, MomentumAttentionState]:
    """The outputs and the state after the last key, in the way that suits the length."""
    if k.shape[2] <= 1:
        return step(q, k, v, rates, state, ignored, options["eps"])
    if not causal:
        return attend_to_all(q, k, v, rates, state, ignored, options["eps"])
    if is_tracing():  # with dynamic shapes a program views heads as if they were contiguous
        q, k, v = (x.contiguous() for x in (q, k, v))
    needs_plain = is_tracing() or is_transformed() or _torch.double_backward_enabled()
    form = attend if needs_plain else attend_in_order
    return form(q, k, v, rates, state, ignored, **options)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, ignored: Tensor | None, causal: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_input(x, name)
        if x.dim() != 4:
            fix = "x.unflatten(-1, (heads, -1)).transpose(1, 2) of (batch, length, features)"
            raise ValueError(f"{name} must be (batch, heads, length, dim), got {tuple(x.shape)}. Fix: {fix}.")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}. Fix: {name}.float().")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}. Fix: q.to(v.dtype).")
    batch, heads, queries, dim = q.shape
    length = queries if causal else k.shape[2]
    for name, x, wanted in (("k", k, (batch, heads, length, dim)), ("v", v, (batch, heads, length, v.shape[3]))):
        if x.shape != wanted:
            fix = "repeat_interleave where heads share keys" if x.shape[1] != heads else "check the order of axes"
            fix = "causal=False where queries and keys are of two sequences" if x.shape[2] != length else fix
            raise ValueError(f"{name} must be {wanted}, q being {tuple(q.shape)}, got {tuple(x.shape)}. Fix: {fix}.")
    if ignored is not None:
        check_input(ignored, "key_padding_mask")
        if ignored.dtype != torch.bool or ignored.shape != (batch, length):
            raise ValueError(
                f"key_padding_mask must be bool {(batch, length)}, True where a key is to be ignored, got "
                f"{ignored.dtype} {tuple(ignored.shape)}. Fix: torch.arange(length) >= lengths[:, None]."
            )


def _number(value: float, name: str, wanted: str, least: float, below: float = math.inf) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not least <= value < below:
        fix = f"torch.tensor({value!r})" if isinstance(value, (list, tuple)) else "a number in that range"
        raise ValueError(f"{name} must be a number, {wanted}, got {value!r}. Fix: {fix}.")
    return float(value)


def _rate(value: float | Tensor, name: str, k: Tensor, below: float = math.inf) -> float | Tensor:
    """A number, or a tensor for each head."""
    if not isinstance(value, Tensor):
        return _number(value, name, f"0 <= {name}" + (f" < {below:g}" if below < math.inf else ""), 0.0, below)
    heads = k.shape[1]
    if value.shape not in ((), (heads,)) or not value.is_floating_point():
        reshaped = f"{name}.expand({heads})" if value.numel() == 1 else f"one number for each of {heads} heads"
        raise ValueError(
            f"{name} must be a number, or a floating-point tensor () or ({heads},) with one for each head, got "
            f"{value.dtype} {tuple(value.shape)}. Fix: {reshaped if value.is_floating_point() else f'{name}.float()'}."
        )
    return value


def _state(state: MomentumAttentionState | None, k: Tensor, v: Tensor, dtype: torch.dtype) -> MomentumAttentionState:
    """The state before the first key, in the dtype of the sums."""
    batch, heads, _, dim = k.shape
    shapes = (batch, heads, dim, v.shape[3]), (batch, heads, dim, v.shape[3]), (batch, heads, dim)
    if state is None:
        return MomentumAttentionState(*(k.new_zeros(shape, dtype=dtype) for shape in shapes))
    if not isinstance(state, (tuple, list)) or len(state) != 3 or not all(isinstance(x, Tensor) for x in state):
        raise TypeError(
            f"initial_state must be a MomentumAttentionState (s, p, z), got {type(state).__name__}. Fix: pass on the "
            "state that a call with return_state=True returned."
        )
    for name, x, shape in zip("spz", state, shapes, strict=True):
        if x.shape != shape:
            raise ValueError(
                f"initial_state.{name} must be {shape}, got {tuple(x.shape)}. Fix: pass on the state of a sequence "
                "with the same batch, heads and dims, or None."
            )
    return MomentumAttentionState(*(x.to(dtype) for x in state))
