"""Multihead attention in linear time: the paper's momentum attention, and the heavy-ball memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._checks import as_count
from hbnode.nn.attention.base import MultiheadBase
from hbnode.nn.attention.memory import HeavyBallMemoryState, heavy_ball_memory
from hbnode.nn.attention.momentum import MomentumAttentionState, momentum_attention

Numbers = float | Sequence[float] | Tensor

LEAST_NORM = 1e-3  # of queries and keys of norm 1: the gradient of a division by a norm of 0 has no bound


class MomentumAttention(MultiheadBase[MomentumAttentionState]):
    r"""Multihead momentum attention, in time linear in the length: linear attention whose sum has momentum.

    Each head runs :func:`hbnode.nn.functional.momentum_attention`; with phi(x) = elu(x) + 1::

        p_i = β p_{i-1} + phi(k_i) v_i^T
        s_i = s_{i-1} + γ p_i,   z_i = z_{i-1} + phi(k_i)
        output_i = phi(q_i)^T s_i / (phi(q_i)^T z_i + eps)

    ``momentum=0`` is linear attention, and ``momentum=0`` with ``step_size=1 / (1 - β)`` is linear attention with the
    gain that momentum β has on keys long past.

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equations 72 to 74;
        Katharopoulos et al., Transformers are RNNs (arXiv:2006.16236).

    Arguments:
        embed_dim: features of the query and of the output.
        num_heads: heads; embed_dim is a multiple of it.
        dropout: must be 0, since there are no attention weights to drop. Default: ``0.0``.
        bias: whether the projections have biases. Default: ``True``.
        kdim: features of the key. Default: ``None``, embed_dim.
        vdim: features of the value. Default: ``None``, embed_dim.
        batch_first: whether inputs and outputs are (batch, length, features). Default: ``False``.
        momentum: β, in [0, 1), a number or one per head. Default: ``0.6``.
        step_size: γ, positive, a number or one per head. Default: ``1.0``.
        learn_momentum: whether to learn β, one per head, from the given start. Default: ``False``.
        learn_step_size: whether to learn γ, one per head, from the given start. Default: ``False``.
        causal: whether a query sees only keys at and before its place. Default: ``True``.
        eps: added to the denominator. Default: ``1e-6``.
        chunk_size: tokens that are handled at once; it has no influence on the result. Default: ``64``.
        device: of the parameters. Default: ``None``, torch's.
        dtype: of the parameters. Default: ``None``, torch's.

    Raises:
        TypeError: a switch is not a bool.
        ValueError: a size or number is not valid.

    Example:
        >>> attention = MomentumAttention(32, 4, momentum=0.9, batch_first=True)
        >>> x = torch.ones(2, 7, 32)
        >>> output, _ = attention(x, x, x)
        >>> y, state = attention.prefill(x[:, :6])
        >>> y, state = attention.step(x[:, 6], state)
        >>> torch.allclose(y, output[:, 6], atol=1e-5)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        momentum: Numbers = 0.6,
        step_size: Numbers = 1.0,
        learn_momentum: bool = False,
        learn_step_size: bool = False,
        causal: bool = True,
        eps: float = 1e-6,
        chunk_size: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _refuse_dropout(dropout)
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            causal=causal,
            device=device,
            dtype=dtype,
        )
        if not eps >= 0:
            raise ValueError(f"eps must be >= 0, got {eps!r}. Fix: 1e-6.")
        self.eps, self.chunk_size = float(eps), as_count(chunk_size, "chunk_size")
        beta, gamma = (
            _per_head(momentum, "momentum", self.num_heads),
            _per_head(step_size, "step_size", self.num_heads),
        )
        if not bool(((beta >= 0) & (beta < 1)).all()):
            raise ValueError(f"momentum must be in [0, 1), got {beta.tolist()}. Fix: 0.9, for instance.")
        if learn_momentum and not bool((beta > 0).all()):
            raise ValueError("a learned momentum must start above 0. Fix: momentum=0.01, or learn_momentum=False.")
        if not bool(((gamma > 0) & gamma.isfinite()).all()):
            raise ValueError(f"step_size must be positive, got {gamma.tolist()}. Fix: the paper's 1.0.")
        self.momentum_logit = _learned(torch.logit(beta), self) if learn_momentum else None
        self.log_step_size = _learned(gamma.log(), self) if learn_step_size else None
        if not learn_momentum:
            self.keep("_momentum", beta if beta.dim() else beta.item())
        if not learn_step_size:
            self.keep("_step_size", gamma if gamma.dim() else gamma.item())

    @property
    def momentum(self) -> Tensor | float:
        """The current β: a tensor (heads,) if learned or one per head, else a Python float."""
        logit = self.momentum_logit
        return self.kept("_momentum") if logit is None else torch.sigmoid(_wide(logit))

    @property
    def step_size(self) -> Tensor | float:
        """The current γ: a tensor (heads,) if learned or one per head, else a Python float."""
        return self.kept("_step_size") if self.log_step_size is None else _wide(self.log_step_size).exp()

    @override
    def constants(self) -> dict[str, str]:
        fixed = {} if self.momentum_logit is not None else {"momentum": "_momentum"}
        return fixed | ({} if self.log_step_size is not None else {"step_size": "_step_size"})

    @override
    def _settings(self) -> dict[str, object]:
        return {"momentum": _shown(self.momentum), "step_size": _shown(self.step_size)}

    @override
    def init_state(self, batch_size: int) -> MomentumAttentionState:
        like, (heads, dim) = _state_like(next(self.parameters())), (self.num_heads, self.head_dim)
        s, p = (like.new_zeros(batch_size, heads, dim, dim) for _ in range(2))
        return MomentumAttentionState(s, p, like.new_zeros(batch_size, heads, dim))

    @override
    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        *,
        causal: bool,
        state: MomentumAttentionState | None = None,
    ) -> tuple[Tensor, MomentumAttentionState | None]:
        return momentum_attention(
            q,
            k,
            v,
            momentum=self.momentum,
            step_size=self.step_size,
            causal=causal,
            key_padding_mask=key_padding_mask,
            eps=self.eps,
            initial_state=state,
            return_state=True,
            chunk_size=self.chunk_size,
        )


class _Gates(TypedDict):
    """The gates of :func:`hbnode.nn.functional.heavy_ball_memory`, (batch, heads, length)."""

    log_momentum: Tensor | None
    log_decay: Tensor | None
    step: Tensor | None
    write: Tensor


class HeavyBallMemory(MultiheadBase[HeavyBallMemoryState]):
    r"""Multihead memory that learns while it reads: a delta rule with momentum and decay, in linear time.

    Each head keeps a matrix S that maps keys to values and moves it like a heavy ball, see
    :func:`hbnode.nn.functional.heavy_ball_memory`; k_t and q_t are divided by their norm, or by 0.001 if it is smaller,
    and the gates come from the input::

        e_t = v_t - α_t S_{t-1}^T k_t
        P_t = μ_t P_{t-1} + (1 - μ_t) r_t k_t e_t^T
        S_t = α_t S_{t-1} + (1 - μ_t) P_t
        output_t = S_t^T q_t

    r_t, α_t and μ_t are in (0, 1). P is a moving average of the writes. In each direction of keys that are equal or
    orthogonal, such a memory stays bounded, whatever the gates are and however keys are repeated. One that puts all of
    (1 - μ_t) into the step does not, once the momentum depends on the key. ``momentum=False`` is Gated DeltaNet,
    ``delta=False`` without momentum is gated linear attention.

    References:
        Behrouz et al., Titans (arXiv:2501.00663); Yang et al., Gated Delta Networks (arXiv:2412.06464);
        Momentum DeltaNet (arXiv:2605.05838).

    Arguments:
        embed_dim: features of the input and of the output.
        num_heads: heads; embed_dim is a multiple of it.
        dropout: must be 0, since there are no attention weights to drop. Default: ``0.0``.
        bias: whether the projections have biases. Default: ``True``.
        batch_first: whether inputs and outputs are (batch, length, features). Default: ``False``.
        momentum: whether S has a velocity. Default: ``True``.
        decay: whether S decays, α_t < 1. Default: ``True``.
        delta: what is written: the error of the decayed memory, of the plain memory (v_t - S_{t-1}^T k_t), or, with
            False, v_t itself. With a decay the plain error has no bound for all gates: a warning says so.
            Default: ``"decayed"``.
        chunk_size: tokens that are handled at once; it has no influence on the result. Default: ``64``.
        device: of the parameters. Default: ``None``, torch's.
        dtype: of the parameters. Default: ``None``, torch's.

    Raises:
        TypeError: a switch is not a bool.
        ValueError: a size or number is not valid.

    Example:
        >>> memory = HeavyBallMemory(32, 4, batch_first=True)
        >>> x = torch.ones(2, 7, 32)
        >>> output, _ = memory(x, x, x)
        >>> y, state = memory.prefill(x[:, :6])
        >>> y, state = memory.step(x[:, 6], state)
        >>> torch.allclose(y, output[:, 6], atol=1e-5)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        batch_first: bool = False,
        momentum: bool = True,
        decay: bool = True,
        delta: Literal["decayed", "plain", False] = "decayed",
        chunk_size: int = 64,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _refuse_dropout(dropout)
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=None,
            vdim=None,
            batch_first=batch_first,
            causal=True,
            device=device,
            dtype=dtype,
        )
        for name, switch in (("momentum", momentum), ("decay", decay)):
            if not isinstance(switch, bool):
                raise TypeError(
                    f"{name} must be True or False, got {switch!r}. Fix: {name}=True; the gate comes from the input."
                )
        if delta is not False and delta not in ("decayed", "plain"):
            raise ValueError(f"delta must be 'decayed', 'plain' or False, got {delta!r}. Fix: 'decayed'.")
        self.has_momentum, self.has_decay, self.delta = momentum, decay, delta
        self.chunk_size = as_count(chunk_size, "chunk_size")
        if delta == "plain" and momentum and decay:
            warnings.warn(
                "HeavyBallMemory with delta='plain', momentum and decay is not bounded for all gates: where α is "
                "small, the error of the plain memory overshoots. Fix: delta='decayed', or decay=False.",
                stacklevel=2,
            )
        self.gates = nn.Linear(embed_dim, self.num_heads * (1 + momentum + decay), device=device, dtype=dtype)
        self._reset_gates()

    def _reset_gates(self) -> None:
        """Start with r = 1/2, half-lives of S between 10 and 1,000 tokens over the heads, and μ from 0.05 to 0.5.

        A single write reaches S with the weight (1 - μ) r in all, so a large momentum stores little of what comes once.
        """
        nn.init.normal_(self.gates.weight, std=0.02)
        spread = torch.linspace(0, 1, self.num_heads, dtype=torch.float64)
        rows = [torch.zeros(self.num_heads)]
        if self.has_decay:
            rows.append(torch.logit(0.5 ** (1 / (10 * 100**spread))))
        if self.has_momentum:
            rows.append(torch.logit(0.05 + 0.45 * spread))
        with torch.no_grad():
            self.gates.bias.copy_(torch.cat(rows))

    @override
    def _settings(self) -> dict[str, object]:
        return {"momentum": self.has_momentum, "decay": self.has_decay, "delta": repr(self.delta)}

    @override
    def init_state(self, batch_size: int) -> HeavyBallMemoryState:
        like = _state_like(next(self.parameters()))
        shape = batch_size, self.num_heads, self.head_dim, self.head_dim
        return HeavyBallMemoryState(like.new_zeros(shape), like.new_zeros(shape) if self.has_momentum else None)

    @override
    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        *,
        causal: bool,
        state: HeavyBallMemoryState | None = None,
    ) -> tuple[Tensor, HeavyBallMemoryState | None]:
        if not causal:
            raise ValueError(
                "a HeavyBallMemory reads its input in order, so it is causal. Fix: MomentumAttention or "
                "SoftmaxAttention with causal=False."
            )
        q, k = (nn.functional.normalize(x, dim=-1, eps=LEAST_NORM) for x in (q, k))
        return heavy_ball_memory(
            q,
            k,
            v,
            **self._gates(key),
            delta=self.delta,
            key_padding_mask=key_padding_mask,
            initial_state=state,
            return_state=True,
            chunk_size=self.chunk_size,
        )

    def _gates(self, x: Tensor) -> _Gates:
        """The gates (batch, heads, length) of an input (batch, length, embed_dim)."""
        rows = iter(self.gates(x).transpose(1, 2).unflatten(1, (-1, self.num_heads)).unbind(1))
        write, log_decay, log_momentum, step = torch.sigmoid(next(rows)), None, None, None
        if self.has_decay:
            log_decay = nn.functional.logsigmoid(next(rows))
        if self.has_momentum:
            logit = next(rows)
            log_momentum, step = nn.functional.logsigmoid(logit), torch.sigmoid(-logit)  # step: 1 - μ
            write = step * write
        return {"log_momentum": log_momentum, "log_decay": log_decay, "step": step, "write": write}


def _refuse_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"dropout must be 0, got {dropout!r}: it drops attention weights, which linear-time attention never forms. "
            "Fix: leave it out, and drop the output."
        )


def _per_head(value: Numbers, name: str, heads: int) -> Tensor:
    """A float64 tensor () or (heads,)."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number or {heads} numbers, got {value!r}. Fix: {name}=0.9.") from None
    if numbers.shape not in ((), (heads,)):
        raise ValueError(
            f"{name} must be a number or {heads} numbers, one per head, got shape {tuple(numbers.shape)}. "
            f"Fix: {name}=0.9, or a list of {heads}."
        )
    return numbers


def _learned(value: Tensor, module: MultiheadBase) -> nn.Parameter:
    """A parameter (heads,), on the module's device and in its dtype."""
    return nn.Parameter(value.expand(module.num_heads).to(module.out_proj.weight, copy=True))


def _wide(parameter: Tensor) -> Tensor:
    """A parameter in float32 at least: in bfloat16 a momentum of 0.999 would be 1."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


def _shown(value: Tensor | float) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "unknown" if value.is_meta else str([round(x, 4) for x in value.tolist()])


def _state_like(weight: Tensor) -> Tensor:
    """An empty tensor of the state's dtype: float32, or float64 with parameters in float64."""
    return weight.new_empty(0, dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32)
