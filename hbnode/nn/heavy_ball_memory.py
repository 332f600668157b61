"""The heavy-ball memory: linear attention whose associative memory is updated by gradient descent with momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hbnode._checks import as_count, as_real, check_input, is_one_of
from hbnode._torch import is_transformed, no_autocast
from hbnode._tree import Record, record
from hbnode.nn._delta_rule import chunkwise
from hbnode.nn._memory_op import by_group, compiled

Gate = Tensor | float
Delta = Literal["decayed", "plain", False]
PACK_HEADS = "q.transpose(0, 1).flatten(1, 2)[None], and the same for k, v and gates"


@record
class HeavyBallMemoryState(Record):
    """The state of :func:`heavy_ball_memory` after a segment of a sequence, from which the next segment continues.

    With packed sequences, the batch of the state is the number of sequences.

    Attributes:
        s: memory S (batch, heads, key features, value features), in float64 if an input is, otherwise in float32.
        p: velocity P, with the shape and dtype of s; None without momentum.
    """

    s: Tensor
    p: Tensor | None = None


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
    cu_seqlens: Tensor | None = None,
    initial_state: HeavyBallMemoryState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
) -> Any:
    r"""Compute causal linear attention with a memory updated by the heavy-ball method, in time linear in the length.

    Each head has a memory :math:`S` and a velocity :math:`P`, both :math:`D \times M`. Step t has the query
    :math:`q_t`, key :math:`k_t`, value :math:`v_t`, error :math:`e_t` and output :math:`o_t`:

    .. math::
        e_t &= v_t - S_{t-1}^\top p_t \\
        P_t &= \mu_t P_{t-1} + \eta_t k_t e_t^\top \\
        S_t &= \alpha_t S_{t-1} + s_t P_t, \qquad o_t = S_t^\top q_t .

    :math:`\mu_t`, :math:`\alpha_t`, :math:`s_t` and :math:`\eta_t` are the gates, and the argument ``delta`` defines
    :math:`p_t`. With a delta rule (``delta`` is not False) the update is a step of gradient descent with momentum on
    :math:`\tfrac12 \|v_t - S^\top k_t\|^2`. Special cases are known models:

    ==================================  ====================================================================
    arguments                           model
    ==================================  ====================================================================
    ``delta=False``, no momentum        linear attention; RetNet with a constant decay for each head; gated
                                        linear attention with a decay for each step
    ``delta=False``                     the momentum attention of :func:`momentum_attention`, without feature
                                        map and normaliser
    ``delta="plain"``                   Titans with a linear memory and blocks of one token
    ``delta="decayed"``, no momentum    Gated DeltaNet; DeltaNet without decay
    ``delta="decayed"``                 Momentum DeltaNet
    ==================================  ====================================================================

    Queries and keys are used as given, without feature map, normaliser or scale. Masked positions may hold NaN or
    infinity. Unmasked NaN or infinity spreads to all outputs of its head, from the beginning of its chunk.

    With a delta rule, keys should have norm 1 at most, and the memory is bounded only for suitable gates. Without
    decay, constant gates are safe for all repetitions of keys if :math:`0 \le s \eta \le 3 (1 - \mu)^2` and
    :math:`s \eta < 2 (1 - \mu)`. Input-dependent gates are safe with :math:`s_t = 1 - \mu_t` and
    :math:`\eta_t \le 1 - \mu_t`, if every two keys are equal or orthogonal.

    The sequence is processed in chunks, without approximation. The state before each chunk is saved for backward; the
    backward pass recomputes the rest. Derivatives of any order are available. Inputs in half precision are accumulated
    in float32, also under autocast. In graphs of ``torch.compile``, and of ``torch.export`` with a dynamic length, the
    memory is one operator. ``import hbnode`` defines the operator, so import hbnode before loading such a program.

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
            :math:`\mu = 0`. None is a memory without velocity, which is faster. Values of tensors are not checked.
        log_decay: :math:`\log \alpha \le 0`, in the same form; None is :math:`\alpha = 1`. Default: ``None``
        step: :math:`s`, in the same form; None is :math:`1 - \mu`, or 1 without momentum. Default: ``None``
        write: :math:`\eta`, in the same form; None is 1. Default: ``None``
        delta: the delta rule. ``"decayed"`` is :math:`p_t = \alpha_t k_t`, ``"plain"`` is :math:`p_t = k_t`, and
            ``False`` is no delta rule, :math:`e_t = v_t`. Default: ``"decayed"``
        key_padding_mask: (batch, length), True = ignore: the step does not change the state, and its output is computed
            from the unchanged state. Default: ``None``
        cu_seqlens: boundaries of N packed sequences, an integer tensor (N + 1,) that rises from 0 to the length. The
            batch is then 1: sequence i has the steps from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``, and the state
            has a batch of N. Outside of graphs, its values are read on the CPU. Default: ``None``
        initial_state: state to continue from; None is zeros. Default: ``None``
        return_state: whether to also return the state. Default: ``False``
        chunk_size: number of steps computed together, rounded up to a multiple of 8. It changes only speed and
            rounding. Default: ``64``

    Returns:
        The outputs (batch, heads, length, M), in the dtype of the inputs. With ``return_state``, the outputs and a
        :class:`HeavyBallMemoryState`, from which another call can continue the sequence.

    Raises:
        ValueError: if shapes do not fit, or a gate given as a number is out of its range.
        TypeError: if an argument is not a tensor, or a tensor has the wrong dtype.

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
    dtype = check_heads(q, k, v)
    if key_padding_mask is not None:
        check_mask(key_padding_mask, k)
    check_delta(delta)
    options = (delta, as_count(chunk_size, "chunk_size"))
    ignored = None if key_padding_mask is None else key_padding_mask.unsqueeze(1)
    batch = q.shape[0] if cu_seqlens is None else count_packed(cu_seqlens, q.shape[0], PACK_HEADS)
    with no_autocast(q):
        like = q.new_empty((), dtype=dtype).expand(q.shape[:3])
        gates = {"log_momentum": log_momentum, "log_decay": log_decay, "step": step, "write": write}
        mu, alpha, gamma, eta = (_read_gate(gate, name, like, ignored) for name, gate in gates.items())
        if gamma is None and mu is not None:
            gamma = -torch.expm1(mu)  # 1 − μ; 0 for an ignored step
        s, p = _read_state(initial_state, batch, q, v, mu is not None, dtype)
        if ignored is not None:  # 0 * NaN is NaN
            k, v = k.masked_fill(ignored.unsqueeze(-1), 0.0), v.masked_fill(ignored.unsqueeze(-1), 0.0)
            q = q.masked_fill(ignored.unsqueeze(-1) & ~q.isfinite(), 0.0)
        tensors = q, k, v, mu, alpha, gamma, eta, s, p
        if 0 in (*q.shape, v.shape[-1]):
            out = (q.to(dtype) @ s.sum(0, keepdim=True)).to(torch.promote_types(q.dtype, v.dtype))
        elif cu_seqlens is None and q.shape[2] == 1:
            out, s, p = _recurrence(options, *tensors)
        elif torch.compiler.is_compiling() and not is_transformed() and not (cu_seqlens is None and _has_one_length(q)):
            out, s, p = compiled(options, cu_seqlens, *tensors)
        elif cu_seqlens is None:
            out, s, p = chunkwise(options, *tensors)
        else:
            out, s, p = by_group(chunkwise, options, cu_seqlens, *tensors)
    return (out, HeavyBallMemoryState(s, p)) if return_state else out


def _has_one_length(q: Tensor) -> bool:
    """Return whether torch.export records the program for one fixed length of q (batch, heads, length, dim).

    The recorded program then needs no custom operator.
    """
    # during torch.compile this cannot be known: a length that looks fixed may be symbolic
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling() and isinstance(q.shape[2], int)


def _recurrence(
    options: tuple[Delta, int], q: Tensor, k: Tensor, v: Tensor, *gates_and_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute :func:`heavy_ball_memory` for sequences of length 1, by one step of the recurrence.

    The arguments and results are those of :func:`hbnode.nn._delta_rule.reference`.
    """
    log_momentum, log_decay, step, write, s, p = gates_and_state
    assert s is not None
    dtype = torch.promote_types(q.dtype, v.dtype)
    q, k, v = q.to(s.dtype), k.to(s.dtype), v.to(s.dtype)
    alpha = 1.0 if log_decay is None else log_decay.exp().unsqueeze(-1)
    if options[0]:
        v = v - (alpha * k if options[0] == "decayed" else k) @ s
    change = (k if write is None else write.unsqueeze(-1) * k).mT * v
    if p is not None and log_momentum is not None:
        p = change = log_momentum.exp().unsqueeze(-1) * p + change
    s = alpha * s + (change if step is None else step.unsqueeze(-1) * change)
    return (q @ s).to(dtype), s, p


# Checks


def check_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> torch.dtype:
    """Raise an error if queries, keys and values do not fit; return the dtype of the state."""
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
    length = q.shape[2] if causal else k.shape[2]
    if k.shape != (*q.shape[:2], length, q.shape[3]) or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q and k must be (batch, heads, length, D) and v (batch, heads, length, M), got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}. Fix: a key and a value for each query, or "
            "momentum_attention with causal=False; k.repeat_interleave(n, 1), and v likewise, if n heads share keys."
        )
    return dtype


def check_delta(delta: object) -> None:
    if delta is not False and not is_one_of(delta, ("decayed", "plain")):
        raise ValueError(f"delta must be 'decayed', 'plain' or False, got {delta!r}. Fix: 'decayed'.")


def check_mask(mask: Tensor, k: Tensor) -> None:
    check_input(mask, "key_padding_mask")
    wanted = (k.shape[0], k.shape[2])
    if mask.shape != wanted:
        raise ValueError(
            f"key_padding_mask must be (batch, length) = {wanted}, got shape {tuple(mask.shape)}. Fix: "
            "torch.arange(length) >= lengths[:, None]."
        )
    if mask.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be bool, True where a key is ignored, got {mask.dtype}. Fix: mask.bool() if 1 "
            "means ignored, mask == -torch.inf if it is 0 and -inf."
        )


def count_packed(cu_seqlens: Tensor, batch: int, fix: str) -> int:
    """Return the number of packed sequences; raise an error if their boundaries or the batch size are not valid."""
    is_tensor, integers = isinstance(cu_seqlens, Tensor), (torch.int32, torch.int64)
    if not is_tensor or cu_seqlens.dtype not in integers or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if is_tensor else type(cu_seqlens).__name__
        raise (ValueError if is_tensor else TypeError)(
            f"cu_seqlens must be an integer tensor (sequences + 1,), got {got}. "
            "Fix: torch.tensor([0, 3, 5]) for sequences of 3 and 2 steps."
        )
    if batch != 1:
        raise ValueError(f"with cu_seqlens the batch must be 1, got {batch}. Fix: {fix}, to pack them into one row.")
    return cu_seqlens.shape[0] - 1


def _read_gate(gate: Gate | None, name: str, like: Tensor, ignored: Tensor | None) -> Tensor | None:
    """Check a gate, a number or tensor; return it as a tensor (batch, heads, length), which is 0 for ignored steps.

    ``name`` is the name of the gate in error messages. ``like`` is a tensor of queries.
    """
    if gate is None:
        return None
    if not isinstance(gate, Tensor):
        gate = like.new_full((), _check_number(gate, name))
    shape, wanted = tuple(gate.shape), tuple(like.shape)
    # a comparison of batch with heads would add a condition to exported programs
    fits = gate.dim() == 0 or (gate.dim() == 1 and shape == (wanted[1],))
    if not fits and not (gate.dim() == 3 and all(n in (1, m) for n, m in zip(shape, wanted, strict=True))):
        fixes = {(wanted[0], wanted[2], wanted[1]): f"{name}.transpose(1, 2)", (*wanted, 1): f"{name}.squeeze(-1)"}
        raise ValueError(
            f"{name} must be (batch, heads, length) = {wanted}, (heads,) = {(wanted[1],)} or a number, got shape "
            f"{shape}. Fix: {fixes.get(shape, 'one gate per step, one per head, or one number')}."
        )
    if not gate.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {gate.dtype}. Fix: {name}.to({like.dtype}).")
    gate = gate.to(like.dtype)
    gate = (gate.unsqueeze(-1) if gate.dim() == 1 else gate).expand(like.shape)
    return gate if ignored is None else gate.masked_fill(ignored, 0.0)


def _check_number(gate: float, name: str) -> float:
    number, is_log = as_real(gate, name, f"{name}=None, or a tensor (batch, heads, length)"), name.startswith("log_")
    if math.isnan(number) or number == math.inf or (number == -math.inf and not is_log):
        raise ValueError(f"{name} must be finite{', or -inf' if is_log else ''}, got {number}. Fix: {name}=None.")
    if is_log and number > 0:
        raise ValueError(
            f"{name} must be the logarithm of a gate in [0, 1], so at most 0, got {number}. Fix: math.log({number})."
        )
    return number


def _read_state(
    state: HeavyBallMemoryState | None, batch: int, q: Tensor, v: Tensor, has_momentum: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Check the initial state and return S and P before the first step; P is None without momentum."""
    shape = (batch, q.shape[1], q.shape[-1], v.shape[-1])
    if state is None:
        state = HeavyBallMemoryState(torch.zeros(shape, dtype=dtype, device=q.device))
    else:
        has_p = getattr(state, "p", None) is not None
        check_state(state, HeavyBallMemoryState, {"s": shape, "p": shape if has_p else None}, q)
        state = state.outside_inference_mode()
    s = state.s.to(dtype)
    if not has_momentum:
        return s, None
    return s, torch.zeros_like(s) if state.p is None else state.p.to(dtype)


def check_state(state: object, kind: type[Record], shapes: Mapping[str, tuple[int, ...] | None], like: Tensor) -> None:
    """Raise an error unless a state has the type ``kind``, tensors of these shapes, and the device of ``like``.

    ``shapes`` maps names of attributes to shapes; None means that the attribute must be None.
    """
    if not isinstance(state, kind):
        raise TypeError(
            f"initial_state must be a {kind.__name__} or None, got {type(state).__name__}. Fix: pass the state that a "
            "call with return_state=True returned."
        )
    for name, shape in shapes.items():
        if shape is None:
            continue
        x = getattr(state, name)
        check_input(x, f"initial_state.{name}")
        if x.shape != shape:
            raise ValueError(
                f"initial_state.{name} must be {shape}, got {tuple(x.shape)}. Fix: pass the state of the same batch, "
                "heads and dims."
            )
        if not x.is_floating_point() or x.device != like.device:
            raise TypeError(
                f"initial_state.{name} must be floating point on {like.device}, got {x.dtype} on {x.device}. "
                f"Fix: state.to({str(like.device)!r}, torch.float32)."
            )
