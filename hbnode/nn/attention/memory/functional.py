"""Attention as an associative memory that is trained by gradient descent with momentum while it reads."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from hbnode import _torch
from hbnode._checks import as_count, check_input
from hbnode._torch import is_tracing, is_transformed, no_autocast
from hbnode.nn.attention.memory.fast import fast_chunkwise
from hbnode.nn.attention.memory.gates import Gate, Gates, read_gates
from hbnode.nn.attention.memory.plain import chunkwise, one_step
from hbnode.nn.attention.memory.stability import warn_unless_stable

Delta = Literal["decayed", "plain", False]


class HeavyBallMemoryState(NamedTuple):
    """What :func:`heavy_ball_memory` carries from one part of a sequence to the next.

    Attributes:
        s: the memory S (batch, heads, D, M), float32, or float64 if the inputs are.
        p: the velocity P, of the same shape; None without momentum.
    """

    s: Tensor
    p: Tensor | None = None

    def detach(self) -> HeavyBallMemoryState:
        """The same without its history, for truncated backpropagation."""
        return HeavyBallMemoryState(self.s.detach(), None if self.p is None else self.p.detach())


@overload
def heavy_ball_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_momentum: Gate | None,
    log_decay: Gate | None = None,
    step: Gate | None = None,
    write: Gate | None = None,
    delta: Delta = "decayed",
    key_padding_mask: Tensor | None = None,
    initial_state: HeavyBallMemoryState | None = None,
    return_state: Literal[False] = False,
    chunk_size: int = 64,
) -> Tensor: ...


@overload
def heavy_ball_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_momentum: Gate | None,
    log_decay: Gate | None = None,
    step: Gate | None = None,
    write: Gate | None = None,
    delta: Delta = "decayed",
    key_padding_mask: Tensor | None = None,
    initial_state: HeavyBallMemoryState | None = None,
    return_state: Literal[True],
    chunk_size: int = 64,
) -> tuple[Tensor, HeavyBallMemoryState]: ...


@overload
def heavy_ball_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_momentum: Gate | None,
    log_decay: Gate | None = None,
    step: Gate | None = None,
    write: Gate | None = None,
    delta: Delta = "decayed",
    key_padding_mask: Tensor | None = None,
    initial_state: HeavyBallMemoryState | None = None,
    return_state: bool,
    chunk_size: int = 64,
) -> Tensor | tuple[Tensor, HeavyBallMemoryState]: ...


def heavy_ball_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_momentum: Gate | None,
    log_decay: Gate | None = None,
    step: Gate | None = None,
    write: Gate | None = None,
    delta: Delta = "decayed",
    key_padding_mask: Tensor | None = None,
    initial_state: HeavyBallMemoryState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
) -> Tensor | tuple[Tensor, HeavyBallMemoryState]:
    r"""Causal linear attention whose memory is updated by the heavy-ball method, in time linear in the length.

    Each head has a memory :math:`S` and a velocity :math:`P`, both :math:`D \times M`. At each step

    .. math::
        e_t &= v_t - S_{t-1}^\top p_t \\
        P_t &= \mu_t P_{t-1} + \eta_t k_t e_t^\top \\
        S_t &= \alpha_t S_{t-1} + s_t P_t, \qquad o_t = S_t^\top q_t .

    With a delta rule, :math:`e_t` is the error of the memory at the key, and the memory takes steps of gradient descent
    with momentum on :math:`\tfrac12 \|v_t - S^\top k_t\|^2`. Special cases have names:

    ==================================  ====================================================================
    arguments                           model
    ==================================  ====================================================================
    ``delta=False``, no momentum        linear attention; RetNet with a constant decay for each head; gated
                                        linear attention with a decay for each step
    ``delta=False``                     the momentum attention of :func:`momentum_attention`, without feature
                                        map and normaliser
    ``delta="plain"``                   Titans with a linear memory and a block of one
    ``delta="decayed"``, no momentum    Gated DeltaNet; DeltaNet without decay
    ``delta="decayed"``                 Momentum DeltaNet
    ==================================  ====================================================================

    There is no feature map, no normaliser and no scale: q and k are used as given. NaN and infinities under the mask
    reach nothing. Elsewhere they reach all outputs of their head from the beginning of their chunk on.

    With a delta rule, keys should have norm 1 at most, and gates decide whether the memory is bounded. Without decay,
    constant gates with :math:`s \eta \le 3 (1 - \mu)^2` and :math:`s \eta < 2 (1 - \mu)` are safe, however keys are
    repeated. Numbers outside of that region give a warning. If :math:`\mu_t` depends on the input,
    :math:`s_t = 1 - \mu_t` with :math:`\eta_t \le 1 - \mu_t` is safe for any gates if keys are equal or orthogonal.

    The computation is chunkwise and exact, with a backward pass of its own that keeps the state of each chunk and
    recomputes the rest. It can be differentiated any number of times. Half precision is accumulated in float32, and the
    state is float32. Autocast does not change that.

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? A Few Case Studies,
        arXiv:2110.07034, equation 72. Behrouz, Zhong, Mirrokni, Titans: Learning to Memorize at Test Time,
        arXiv:2501.00663. Yang, Kautz, Hatamizadeh, Gated Delta Networks: Improving Mamba2 with Delta Rule,
        arXiv:2412.06464. Momentum DeltaNet, arXiv:2605.05838.

    Arguments:
        q: queries (batch, heads, length, D).
        k: keys (batch, heads, length, D).
        v: values (batch, heads, length, M).
        log_momentum: :math:`\log \mu \le 0`, as a tensor (batch, heads, length) or (heads,), or a number. ``-inf`` is
            :math:`\mu = 0`. None is a memory without velocity, which costs less. Values of tensors are not checked.
        log_decay: :math:`\log \alpha \le 0`, likewise; None is :math:`\alpha = 1`. Default: ``None``
        step: :math:`s`, likewise; None is :math:`1 - \mu`, and 1 without momentum. Default: ``None``
        write: :math:`\eta`, likewise; None is 1. Default: ``None``
        delta: the key :math:`p_t` at which the memory is read for the error. ``"decayed"`` is :math:`\alpha_t k_t`,
            ``"plain"`` is :math:`k_t`, ``False`` is no delta rule, :math:`e_t = v_t`. Default: ``"decayed"``
        key_padding_mask: (batch, length), True where a step is ignored: it freezes the state. Its output reads the
            frozen state. Default: ``None``
        initial_state: state to continue from; None is zeros. Default: ``None``
        return_state: whether to return the state too. Default: ``False``
        chunk_size: steps that are computed together, rounded up to a multiple of 8. It changes cost, not results.
            Default: ``64``

    Returns:
        Outputs (batch, heads, length, M), in the dtype of the inputs. With ``return_state`` the outputs and a
        :class:`HeavyBallMemoryState`, which continues the sequence exactly.

    Raises:
        ValueError: for shapes that do not fit, or a gate as a number that is out of its range.
        TypeError: for what is no tensor, or a tensor of the wrong kind.

    Example:
        >>> import torch, hbnode
        >>> k = torch.eye(4).view(1, 1, 4, 4)
        >>> v = torch.randn(1, 1, 4, 2)
        >>> out, state = hbnode.nn.functional.heavy_ball_memory(k, k, v, log_momentum=None, return_state=True)
        >>> torch.allclose(state.s[0, 0], v[0, 0])  # orthonormal keys: each value is stored at its key
        True
        >>> hbnode.nn.functional.heavy_ball_memory(k, k, v, log_momentum=-1.0, step=0.3).shape
        torch.Size([1, 1, 4, 2])
    """
    dtype = _check_shapes(q, k, v)
    size = as_count(chunk_size, "chunk_size")
    if delta not in ("decayed", "plain", False) or (delta == 0 and delta is not False):
        raise ValueError(f"delta must be 'decayed', 'plain' or False, got {delta!r}. Fix: 'decayed'.")
    ignored = _check_mask(key_padding_mask, q)
    with no_autocast(q):
        like = q.new_empty((), dtype=dtype).expand(q.shape[:3])
        gates = read_gates(log_momentum, log_decay, step, write, like, ignored)
        if delta and not is_tracing():
            warn_unless_stable(log_momentum, log_decay, step, write, decayed=delta == "decayed", stacklevel=2)
        s, p = _start(initial_state, q, v, gates.log_momentum is not None, dtype)
        if ignored is not None:  # zeros, because 0 * NaN is NaN
            k, v = (x.masked_fill(ignored.unsqueeze(-1), 0.0) for x in (k, v))
            q = q.masked_fill(ignored.unsqueeze(-1) & ~q.isfinite(), 0.0)
        out, s, p = _run(q, k, v, gates, delta, s, p, size)
    return (out, HeavyBallMemoryState(s, p)) if return_state else out


def _run(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, delta: Delta, s: Tensor, p: Tensor | None, size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The outputs, and S and P after the last step, in the way that suits the length and what runs around it."""
    needs_plain = is_tracing() or is_transformed() or _torch.double_backward_enabled()
    if q.shape[2] > 1 and not needs_plain and q.numel() and v.numel():
        return fast_chunkwise(q, k, v, gates, delta, s, p, size)
    dtype = torch.promote_types(q.dtype, v.dtype)
    q, k, v = (x.to(s.dtype).contiguous() for x in (q, k, v))  # which a program with dynamic shapes needs
    if q.shape[2] == 0:
        return v.to(dtype, copy=True), s, p
    if q.shape[2] == 1:
        out, s, p = one_step(q, k, v, gates, delta, s, p)
    else:
        out, s, p = chunkwise(q, k, v, gates, delta, s, p, size)
    return out.to(dtype), s, p


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Check queries, keys and values; the dtype of the state."""
    dtype = torch.float32
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        check_input(x, name)
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {x.dtype}. Fix: {name}.float().")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, heads, length, dim), got shape {tuple(x.shape)}. Fix: "
                f"{name}.unflatten(-1, (heads, -1)).transpose(1, 2) of a (batch, length, embed_dim) tensor."
            )
        dtype = torch.promote_types(dtype, x.dtype)
    if q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q and k must be (batch, heads, length, D) and v (batch, heads, length, M), got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}. Fix: a key and a value for each query, "
            "repeat_interleave where heads share keys."
        )
    return dtype


def _check_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as (batch, 1, length)."""
    if mask is None:
        return None
    check_input(mask, "key_padding_mask")
    wanted = (q.shape[0], q.shape[2])
    if tuple(mask.shape) != wanted:
        raise ValueError(
            f"key_padding_mask must be (batch, length) = {wanted}, got shape {tuple(mask.shape)}. Fix: one entry for "
            "each step, True where it is ignored."
        )
    if mask.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be bool, True where a step is ignored, got {mask.dtype}. Fix: mask.bool() if "
            "1 means ignored, mask == -inf for a mask of numbers to be added."
        )
    return mask.unsqueeze(1)


def _start(
    state: HeavyBallMemoryState | None, q: Tensor, v: Tensor, has_momentum: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """S and P before the first step."""
    shape = (*q.shape[:2], q.shape[-1], v.shape[-1])
    if state is None:
        s = torch.zeros(shape, dtype=dtype, device=q.device)
        return s, torch.zeros_like(s) if has_momentum else None
    if isinstance(state, Tensor) or not isinstance(state, (tuple, list)) or len(state) != 2:
        raise TypeError(
            f"initial_state must be a HeavyBallMemoryState or None, got {type(state).__name__}. Fix: pass the state "
            "that heavy_ball_memory(..., return_state=True) returned."
        )
    for x, name in zip(state, ("s", "p"), strict=True):
        if x is None and name == "p":
            continue
        check_input(x, f"initial_state.{name}")
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(
                f"initial_state.{name} must be (batch, heads, D, M) = {shape}, got {tuple(x.shape)}. Fix: pass the "
                "state of the same batch and heads."
            )
    s, p = state[0].to(dtype), state[1]
    if not has_momentum:
        return s, None
    return s, torch.zeros_like(s) if p is None else p.to(dtype)
