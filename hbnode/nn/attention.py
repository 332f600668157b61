"""Multihead attention modules with one interface: linear attention with momentum, heavy-ball memory, softmax."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._checks import as_count, as_real, check_bool, check_input, refuse_gradient
from hbnode._torch import ModuleWithConstants, may_look
from hbnode._tree import Record, register
from hbnode.nn._linear_attention import MomentumAttentionState, check_number, momentum_attention
from hbnode.nn.heavy_ball_memory import HeavyBallMemoryState, check_delta, count_packed, heavy_ball_memory
from hbnode.nn.sequences import check_dtype, shown

State = TypeVar("State")
Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values: (batch, heads, length, head_dim)
Numbers = float | Sequence[float] | Tensor

LEAST_NORM = 1e-3  # queries and keys are divided by their norm, or by this if it is larger, to bound the gradient
MASK_FIX = (
    "Fix: is_causal=True for causal attention, key_padding_mask (batch, length), True = ignore, for padding, "
    "torch.nn.MultiheadAttention for other masks"
)


class MultiheadBase(ModuleWithConstants, Generic[State]):
    """The base class of the multihead attention modules.

    It projects the inputs to queries, keys and values, calls ``_attend`` of the subclass, and projects the output.

    Parameters and their initialisation are those of ``torch.nn.MultiheadAttention``: ``in_proj_weight``,
    ``in_proj_bias`` and ``out_proj``. If ``kdim`` or ``vdim`` differs from ``embed_dim``, ``q_proj_weight``,
    ``k_proj_weight`` and ``v_proj_weight`` replace ``in_proj_weight``.
    """

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter
    k_proj_weight: nn.Parameter
    v_proj_weight: nn.Parameter
    _shown: ClassVar[tuple[str, ...]]  # names of the attributes that repr shows
    _qkv_same_embed_dim = False  # keeps torch.nn.TransformerEncoderLayer from fusing softmax attention

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        kdim: int | None,
        vdim: int | None,
        batch_first: bool,
        causal: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = as_count(embed_dim, "embed_dim"), as_count(num_heads, "num_heads")
        self.kdim = self.embed_dim if kdim is None else as_count(kdim, "kdim")
        self.vdim = self.embed_dim if vdim is None else as_count(vdim, "vdim")
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}. "
                f"Fix: num_heads={max(n for n in range(1, num_heads) if embed_dim % n == 0)}, "
                f"or embed_dim={num_heads * (embed_dim // num_heads + 1)}."
            )
        for name, switch in (("bias", bias), ("batch_first", batch_first), ("causal", causal)):
            check_bool(switch, name, "pass options by name")
        self.head_dim = self.embed_dim // self.num_heads
        self.dropout = as_real(dropout, "dropout", "dropout=0.1")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout must be a probability, got {dropout!r}. Fix: a number from 0 to 1.")
        self.batch_first, self.causal = batch_first, causal
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        is_packed = self.kdim == self.vdim == self.embed_dim
        shapes = {"in_proj_weight": (3 * embed_dim, embed_dim) if is_packed else None}
        for name, features in (("q", self.embed_dim), ("k", self.kdim), ("v", self.vdim)):
            shapes[f"{name}_proj_weight"] = None if is_packed else (embed_dim, features)
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **options)))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim, **options)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **options)
        if bias:
            nn.init.zeros_(self.out_proj.bias)
        for name, shape in shapes.items():  # drawn last, so that a seed gives the weights of nn.MultiheadAttention
            if shape is not None:
                nn.init.xavier_uniform_(getattr(self, name))

    @override
    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, {shown(self, self._shown)}"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend to all keys, or, if causal, to the keys at or before the position of each query.

        Arguments:
            query: (length, batch, embed_dim); (batch, length, embed_dim) if ``batch_first``; or (length, embed_dim).
            key: in the layout of the query, with kdim features. If causal, it must have the length of the query.
                Default: ``None``, the query.
            value: in the layout of the key and with its length, with vdim features. Default: ``None``, the key.
            key_padding_mask: (batch, keys), or (keys,) if the query has no batch; True = ignore. Default: ``None``.
            need_weights: must be False, because attention weights are not available. Default: ``False``.
            attn_mask: must be None. Default: ``None``.
            average_attn_weights: has no effect. Default: ``True``.
            is_causal: True makes this call of a module with ``causal=False`` causal. False has no effect: a module with
                ``causal=True`` is causal in every call, because ``torch.nn.TransformerEncoderLayer`` always passes
                ``is_causal=False``. Default: ``False``.
            cu_seqlens: boundaries of N packed sequences, an integer tensor (N + 1,) that rises from 0 to the length.
                The batch is then 1, and sequence i has the tokens from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``.
                Only :class:`HeavyBallMemory` takes packed sequences. Default: ``None``, one sequence per row.

        Returns:
            The output, shaped like the query, and None instead of attention weights.

        Raises:
            TypeError: an input is not a tensor, or not of the parameters' dtype.
            ValueError: a shape does not fit, ``need_weights`` is True, ``attn_mask`` is not None, or ``cu_seqlens`` is
                not supported or does not fit.
        """
        key = query if key is None else key
        value = key if value is None else value
        if need_weights is not False:
            raise ValueError("need_weights must be False: attention weights are not available. Fix: leave it out.")
        if attn_mask is not None:
            raise ValueError(f"attn_mask must be None: {type(self).__name__} does not support it. {MASK_FIX}.")
        has_batch = self._check_inputs(query, key, value)
        is_self, is_key = query is key, value is key
        if not has_batch:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = key_padding_mask[None] if isinstance(key_padding_mask, Tensor) else key_padding_mask
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        causal = self.causal or is_causal
        ignored = read_mask(key_padding_mask, key.shape[:2])
        packed = self._check_packed(cu_seqlens, key)[1]
        if causal and query.shape[1] != key.shape[1]:
            fix = "causal=False" if self.causal else "leave is_causal out"
            fix = (
                "MomentumAttention or SoftmaxAttention with causal=False" if isinstance(self, HeavyBallMemory) else fix
            )
            raise ValueError(
                f"causal attention needs a key for each query, got {query.shape[1]} queries and {key.shape[1]} keys. "
                f"Fix: {fix} to attend to another sequence."
            )
        if ignored is not None:  # 0 * NaN is NaN
            key, value = (x.masked_fill(ignored.unsqueeze(-1) & ~x.isfinite(), 0.0) for x in (key, value))
        query, value = key if is_self else query, key if is_key else value
        heads, _ = self._attend(self._project(query, key, value), key, ignored, causal, **packed)
        output = self._join(heads)
        return (output[0] if not has_batch else output if self.batch_first else output.transpose(0, 1)), None

    def init_state(self, batch_size: int) -> State:
        """Return the state of ``batch_size`` sequences before their first token."""
        return self._zero_state(as_count(batch_size, "batch_size", least=0))

    def _zero_state(self, batch_size: int) -> State:
        """Return the state of ``batch_size`` sequences before their first token.

        ``batch_size`` is not checked, because it is a symbolic integer while torch.compile records the program.
        """
        raise NotImplementedError

    def prefill(
        self,
        x: Tensor,
        state: State | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Compute causal self-attention for the next tokens, continuing from a state.

        Arguments:
            x: (length, batch, embed_dim), or (batch, length, embed_dim) with ``batch_first``.
            state: state after the previous tokens. Default: ``None``, no previous tokens.
            key_padding_mask: (batch, length), True = ignore: the token does not change the state. Default: ``None``.
            cu_seqlens: boundaries of N packed sequences, as in :meth:`forward`. The batch of the states is then N.
                Default: ``None``, one sequence per row.

        Returns:
            The output, shaped like x, and the state after the last token of x.
        """
        if not self.causal:
            raise ValueError(f"streaming needs a causal {type(self).__name__}, got causal=False. Fix: causal=True.")
        if self.kdim != self.embed_dim or self.vdim != self.embed_dim:
            raise ValueError(
                f"streaming needs kdim = vdim = embed_dim, got {self.kdim}, {self.vdim}. Fix: leave kdim and vdim out."
            )
        if not self._check_inputs(x, x, x):
            fix = "x[None]" if self.batch_first else "x[:, None]"
            raise ValueError(f"streaming needs x with a batch dimension, got shape {tuple(x.shape)}. Fix: {fix}.")
        x = x if self.batch_first else x.transpose(0, 1)
        ignored = read_mask(key_padding_mask, x.shape[:2])
        batch_size, packed = self._check_packed(cu_seqlens, x)
        state = self._zero_state(batch_size) if state is None else state
        if ignored is not None:  # 0 * NaN is NaN
            x = x.masked_fill(ignored.unsqueeze(-1) & ~x.isfinite(), 0.0)
        heads, after = self._attend(self._project(x, x, x), x, ignored, True, state, **packed)
        output = self._join(heads)
        assert after is not None
        return (output if self.batch_first else output.transpose(0, 1)), after

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Compute causal self-attention for the next token, continuing from a state.

        Arguments:
            x: (batch, embed_dim).
            state: state after the previous tokens. Default: ``None``, no previous tokens.

        Returns:
            The output (batch, embed_dim), and the state after the token.
        """
        check_input(x, "x")
        if x.dim() != 2:
            raise ValueError(
                f"step takes one token per sequence, (batch, {self.embed_dim}), got shape {tuple(x.shape)}. "
                "Fix: prefill for several tokens."
            )
        axis = 1 if self.batch_first else 0
        output, state = self.prefill(x.unsqueeze(axis), state)
        return output.squeeze(axis), state

    def _attend(
        self,
        heads: Heads,
        key: Tensor,
        ignored: Tensor | None,
        causal: bool,
        state: State | None = None,
    ) -> tuple[Tensor, State | None]:
        """Compute attention from ``heads``, the projected queries, keys and values of each head.

        ``key`` is the input of the key projection (batch, length, kdim), from which a subclass may compute gates.
        ``ignored`` is the padding mask, True = ignore. Return the outputs (batch, heads, length, head_dim), and the new
        state.
        """
        raise NotImplementedError

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Heads:
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and query is key is value:
            q, k, v = nn.functional.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        else:
            if self.in_proj_weight is not None:
                weights = self.in_proj_weight.chunk(3)
            else:
                weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            biases = (None, None, None) if bias is None else bias.chunk(3)
            q, k, v = map(nn.functional.linear, (query, key, value), weights, biases)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _join(self, heads: Tensor) -> Tensor:
        joined: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return joined

    def _check_packed(self, cu_seqlens: Tensor | None, x: Tensor) -> tuple[int, dict[str, Any]]:
        """Check the boundaries ``cu_seqlens`` of packed sequences in x (batch, length, features).

        Return the number of sequences in x, and a dict of keyword arguments for :meth:`_attend`: ``cu_seqlens``, or
        nothing if it is None.
        """
        if cu_seqlens is None:
            return x.shape[0], {}
        if not isinstance(self, HeavyBallMemory):
            raise ValueError(
                f"cu_seqlens must be None: {type(self).__name__} does not take packed sequences. "
                "Fix: a padded batch and key_padding_mask (batch, length), True = ignore, or HeavyBallMemory."
            )
        fix = "x.flatten(0, 1)[None]" if self.batch_first else "x.transpose(0, 1).flatten(0, 1)[:, None]"
        return count_packed(cu_seqlens, x.shape[0], f"{fix} of sequences x"), {"cu_seqlens": cu_seqlens}

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Raise an error if dtypes or shapes do not fit; return whether the inputs have a batch dimension."""
        inputs = ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)
        dtype = next(self.parameters()).dtype
        for name, x, features in inputs:
            check_input(x, name)
            if x.is_nested:
                fix = f"{name}.to_padded_tensor(0.0), with key_padding_mask, or cu_seqlens of HeavyBallMemory"
                raise TypeError(f"{name} must not be a nested tensor. Fix: {fix}.")
            if x.dim() not in (2, 3) or x.shape[-1] != features or x.dim() != query.dim():
                order = "(batch, length" if self.batch_first else "(length, batch"
                raise ValueError(
                    f"{name} must be {order}, {features}), or (length, {features}), got shape {tuple(x.shape)}. "
                    "Fix: that shape; embed_dim, kdim and vdim set the features of query, key and value."
                )
            check_dtype(x, [dtype], name)
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(
                "query, key and value must have the same batch size, key and value the same length, got shapes "
                f"{shapes} with batch_first={self.batch_first}. Fix: batch_first=True if the batch comes first."
            )
        return query.dim() == 3


class MomentumAttention(MultiheadBase[MomentumAttentionState]):
    r"""A multihead momentum attention: linear attention whose state is updated with momentum.

    Time and memory are linear in the length. Each head runs :func:`hbnode.nn.functional.momentum_attention`. With
    queries q, keys k, values v and phi(x) = elu(x) + 1, the i-th output is::

        p_i = β p_{i-1} + phi(k_i) v_i^T
        s_i = s_{i-1} + γ p_i,   z_i = z_{i-1} + phi(k_i)
        output_i = phi(q_i)^T s_i / (phi(q_i)^T z_i + eps)

    ``momentum=0`` is linear attention. With momentum β, the weight of a key in s_i grows from γ to γ / (1 - β) as more
    keys follow it. ``momentum=0`` with ``step_size`` = γ / (1 - β) gives every key this limit as its weight. It is the
    baseline without momentum.

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), equations 72 to 74;
        Katharopoulos et al., Transformers are RNNs (arXiv:2006.16236).

    Arguments:
        embed_dim: number of features of the query and of the output.
        num_heads: number of heads, a divisor of embed_dim.
        dropout: must be 0, because there are no attention weights to drop. Default: ``0.0``.
        bias: whether the projections have biases. Default: ``True``.
        kdim: number of features of the key. Default: ``None``, embed_dim.
        vdim: number of features of the value. Default: ``None``, embed_dim.
        batch_first: whether inputs and outputs are (batch, length, features). Default: ``False``.
        momentum: β in [0, 1), a number or one per head. Default: ``0.6``.
        step_size: γ > 0, a number or one per head. Default: ``1.0``.
        learn_momentum: whether to learn one β per head, initialised with ``momentum``. Default: ``False``.
        learn_step_size: whether to learn one γ per head, initialised with ``step_size``. Default: ``False``.
        causal: whether a query attends only to keys at or before its position. Default: ``True``.
        eps: constant added to the denominator. Default: ``1e-6``.
        chunk_size: number of tokens processed together; it changes only speed and rounding. Default: ``64``.
        device: device of the parameters. Default: ``None``, torch's default.
        dtype: dtype of the parameters. Default: ``None``, torch's default.

    Raises:
        TypeError: bias, batch_first or causal is not a bool.
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

    _shown = ("causal", "momentum", "step_size")

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
        super().__init__(embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, causal, device, dtype)
        check_bool(learn_momentum, "learn_momentum", "momentum=0.9, learn_momentum=True, for instance")
        check_bool(learn_step_size, "learn_step_size", "step_size=1.0, learn_step_size=True, for instance")
        self.eps, self.chunk_size = check_number(eps, "eps"), as_count(chunk_size, "chunk_size")
        beta = _per_head(momentum, "momentum", self.num_heads)
        gamma = _per_head(step_size, "step_size", self.num_heads)
        if not bool(((beta >= 0) & (beta < 1)).all()):
            raise ValueError(f"momentum must be in [0, 1), got {beta.tolist()}. Fix: 0.9, for instance.")
        if learn_momentum and not bool((beta > 0).all()):
            raise ValueError(f"a learned momentum must start above 0, got {beta.tolist()}. Fix: momentum=0.01.")
        if not bool(((gamma > 0) & gamma.isfinite()).all()):
            raise ValueError(f"step_size must be positive, got {gamma.tolist()}. Fix: the paper's 1.0.")
        self.momentum_logit = _learned(torch.logit(beta), self) if learn_momentum else None
        self.log_step_size = _learned(gamma.log(), self) if learn_step_size else None
        if not learn_momentum:
            self.set_constant("_momentum", beta if beta.dim() else beta.item())
        if not learn_step_size:
            self.set_constant("_step_size", gamma if gamma.dim() else gamma.item())

    @property
    def momentum(self) -> Tensor | float:
        """The current β, a tensor (heads,) if it is learned or given per head, otherwise a float."""
        logit = self.momentum_logit
        return self.get_constant("_momentum") if logit is None else torch.sigmoid(_wide(logit))

    @property
    def step_size(self) -> Tensor | float:
        """The current γ, a tensor (heads,) if it is learned or given per head, otherwise a float."""
        return self.get_constant("_step_size") if self.log_step_size is None else _wide(self.log_step_size).exp()

    @override
    def constants(self) -> dict[str, str]:
        fixed = {} if self.momentum_logit is not None else {"momentum": "_momentum"}
        return fixed | ({} if self.log_step_size is not None else {"step_size": "_step_size"})

    @override
    def _zero_state(self, batch_size: int) -> MomentumAttentionState:
        like, (heads, dim) = _empty_state(next(self.parameters())), (self.num_heads, self.head_dim)
        s, p = (like.new_zeros(batch_size, heads, dim, dim) for _ in range(2))
        return MomentumAttentionState(s, p, like.new_zeros(batch_size, heads, dim))

    @override
    def _attend(
        self,
        heads: Heads,
        key: Tensor,
        ignored: Tensor | None,
        causal: bool,
        state: MomentumAttentionState | None = None,
    ) -> tuple[Tensor, MomentumAttentionState | None]:
        return momentum_attention(
            *heads,
            momentum=self.momentum,
            step_size=self.step_size,
            causal=causal,
            key_padding_mask=ignored,
            eps=self.eps,
            initial_state=state,
            return_state=True,
            chunk_size=self.chunk_size,
        )


class HeavyBallMemory(MultiheadBase[HeavyBallMemoryState]):
    r"""A multihead fast-weight memory, updated by a delta rule with momentum and decay, in time linear in the length.

    Each head has a matrix S that maps keys to values, and its velocity P; see
    :func:`hbnode.nn.functional.heavy_ball_memory`. At token t, with key k_t, value v_t and query q_t::

        e_t = v_t - α_t S_{t-1}^T k_t
        P_t = μ_t P_{t-1} + (1 - μ_t) r_t k_t e_t^T
        S_t = α_t S_{t-1} + (1 - μ_t) P_t
        output_t = S_t^T q_t

    The gates r_t, α_t and μ_t are in (0, 1) and are computed from the input by a linear layer and a sigmoid. Keys and
    queries are divided by their norm, or by 0.001 if their norm is smaller. If every two keys are equal or orthogonal,
    S stays bounded for all gates and all repetitions of keys. The factor 1 - μ_t appears in both updates for this
    reason: with (1 - μ_t)^2 in the update of S and 1 in the update of P, S could grow without bound for a μ_t that
    depends on the key. ``momentum=False`` is Gated DeltaNet;
    ``momentum=False`` with ``delta=False`` is gated linear attention.

    References:
        Behrouz et al., Titans (arXiv:2501.00663); Yang et al., Gated Delta Networks (arXiv:2412.06464);
        Momentum DeltaNet (arXiv:2605.05838).

    Arguments:
        embed_dim: number of features of the input and of the output.
        num_heads: number of heads, a divisor of embed_dim.
        dropout: must be 0, because there are no attention weights to drop. Default: ``0.0``.
        bias: whether the projections have biases. Default: ``True``.
        batch_first: whether inputs and outputs are (batch, length, features). Default: ``False``.
        momentum: whether S has a velocity. Default: ``True``.
        decay: whether S decays, α_t < 1. Default: ``True``.
        delta: definition of e_t. ``"decayed"`` is the equation for e_t in this docstring, ``"plain"`` is
            v_t - S_{t-1}^T k_t, and ``False`` is v_t. With momentum and decay, ``"plain"`` is unbounded for some gates
            and gives a warning. Default: ``"decayed"``.
        chunk_size: number of tokens processed together; it changes only speed and rounding. Default: ``64``.
        device: device of the parameters. Default: ``None``, torch's default.
        dtype: dtype of the parameters. Default: ``None``, torch's default.

    Raises:
        TypeError: bias, batch_first, momentum or decay is not a bool.
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

    _shown = ("has_momentum", "has_decay", "delta")

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
        super().__init__(embed_dim, num_heads, dropout, bias, None, None, batch_first, True, device, dtype)
        check_bool(momentum, "momentum", "momentum=True; the gate comes from the input")
        check_bool(decay, "decay", "decay=True; the gate comes from the input")
        check_delta(delta)
        self.has_momentum, self.has_decay, self.delta = momentum, decay, delta
        self.chunk_size = as_count(chunk_size, "chunk_size")
        if delta == "plain" and momentum and decay:
            warnings.warn(
                "HeavyBallMemory with delta='plain', momentum and decay is not bounded for all gates: its updates "
                "overshoot if α is small. Fix: delta='decayed', or decay=False.",
                stacklevel=2,
            )
        self.gates = nn.Linear(embed_dim, self.num_heads * (1 + momentum + decay), device=device, dtype=dtype)
        # Initially r = 1/2. Over the heads, the half-life of S ranges from 10 to 1,000 tokens, and μ from 0.05 to 0.5.
        # μ is not larger, because a key that is written once enters S with the weight (1 - μ) r.
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
    def _zero_state(self, batch_size: int) -> HeavyBallMemoryState:
        like = _empty_state(next(self.parameters()))
        shape = batch_size, self.num_heads, self.head_dim, self.head_dim
        return HeavyBallMemoryState(like.new_zeros(shape), like.new_zeros(shape) if self.has_momentum else None)

    @override
    def _attend(
        self,
        heads: Heads,
        key: Tensor,
        ignored: Tensor | None,
        causal: bool,
        state: HeavyBallMemoryState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, HeavyBallMemoryState | None]:
        q, k = (nn.functional.normalize(x, dim=-1, eps=LEAST_NORM) for x in heads[:2])
        return heavy_ball_memory(
            q,
            k,
            heads[2],
            **self._gates(key),
            delta=self.delta,
            key_padding_mask=ignored,
            cu_seqlens=cu_seqlens,
            initial_state=state,
            return_state=True,
            chunk_size=self.chunk_size,
        )

    def _gates(self, x: Tensor) -> dict[str, Any]:
        """Compute the gates (batch, heads, length) from x (batch, length, embed_dim).

        Return a dict of keyword arguments for :func:`hbnode.nn.functional.heavy_ball_memory`.
        """
        rows = iter(self.gates(x).transpose(1, 2).unflatten(1, (-1, self.num_heads)).unbind(1))
        write, log_decay, log_momentum, step = torch.sigmoid(next(rows)), None, None, None
        if self.has_decay:
            log_decay = nn.functional.logsigmoid(next(rows))
        if self.has_momentum:
            logit = next(rows)
            log_momentum, step = nn.functional.logsigmoid(logit), torch.sigmoid(-logit)  # step: 1 - μ
            write = step * write
        return {"log_momentum": log_momentum, "log_decay": log_decay, "step": step, "write": write}


@register
class KeyValueCache(Record):
    """A key-value cache: keys and values of all previous tokens, in buffers that double in size when they are full.

    :meth:`append` returns a new, longer cache and leaves the old cache valid. Without gradients, both share
    their buffers while there is room, and a second ``append`` to the same cache copies the buffers.

    Arguments:
        keys: (batch, heads, length, dim).
        values: (batch, heads, length, dim).
        ignored: (batch, length), True = padding. Default: ``None``, no padding.
    """

    __match_args__ = ("keys", "values", "ignored")

    def __init__(self, keys: Tensor, values: Tensor, ignored: Tensor | None = None) -> None:
        self._keys, self._values, self._ignored = keys, values, ignored
        self.length = keys.shape[2]
        self._filled = [self.length]  # number of tokens in the buffers; caches with the same buffers share the list

    def __len__(self) -> int:
        return self.length

    @property
    def keys(self) -> Tensor:
        """The keys of all tokens (batch, heads, length, dim)."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """The values of all tokens (batch, heads, length, dim)."""
        return self._values[:, :, : self.length]

    @property
    def ignored(self) -> Tensor | None:
        """The padding mask (batch, length), True = padding, or None without padding."""
        return None if self._ignored is None else self._ignored[:, : self.length]

    def positions(self, length: int, ignored: Tensor | None) -> Tensor:
        """Return the positions of the next tokens, (length,), or (batch, length) if there is padding.

        Padding does not count as a position.

        Arguments:
            length: number of tokens.
            ignored: padding mask of the tokens (batch, length), or None.
        """
        start = self.length if self.ignored is None else (~self.ignored).sum(1, keepdim=True)
        return start + count_before(length, ignored, self._keys.device)

    @override
    def as_dict(self) -> dict[str, Any]:
        return {name: x for name in self.__match_args__ if (x := getattr(self, name)) is not None}

    @override
    @staticmethod
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name == "ignored" else new

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs to rebuild the cache: the stored tokens, without the unused part of the buffers."""
        return KeyValueCache, tuple(None if x is None else x.clone() for x in (self.keys, self.values, self.ignored))

    def append(self, keys: Tensor, values: Tensor, ignored: Tensor | None = None) -> KeyValueCache:
        """Return a new cache that also holds the next tokens.

        Arguments:
            keys: (batch, heads, new, dim).
            values: (batch, heads, new, dim).
            ignored: (batch, new), True = padding. Default: ``None``, no padding.
        """
        if torch.is_grad_enabled() and (keys.requires_grad or self._keys.requires_grad or values.requires_grad):
            pairs = ((self.keys, keys), (self.values, values))
            joined = [torch.cat((before.to(new.dtype), new), 2) for before, new in pairs]
            return KeyValueCache(joined[0], joined[1], self._joined_mask(keys.shape[2], ignored))
        length = self.length + keys.shape[2]
        # outside inference mode, tensors that were made in inference mode cannot be modified
        is_frozen = may_look() and self._keys.is_inference() and not torch.is_inference_mode_enabled()
        is_full = length > self._keys.shape[2] or keys.dtype != self._keys.dtype
        if is_full or is_frozen or self._filled[0] != self.length:
            room = (*keys.shape[:2], max(2 * length, 64), keys.shape[3])
            after = KeyValueCache(keys.new_empty(room), values.new_empty(room))
            after._keys[:, :, : self.length], after._values[:, :, : self.length] = self.keys, self.values
        else:
            after = KeyValueCache(self._keys, self._values)
            after._filled = self._filled
        after._keys[:, :, self.length : length] = keys
        after._values[:, :, self.length : length] = values
        after._ignored = self._joined_mask(keys.shape[2], ignored)
        after.length = after._filled[0] = length
        return after

    def _joined_mask(self, more: int, ignored: Tensor | None) -> Tensor | None:
        if self._ignored is None and ignored is None:
            return None
        none = torch.zeros(len(self._keys), self.length + more, dtype=torch.bool, device=self._keys.device)
        before = none[:, : self.length] if self.ignored is None else self.ignored
        return torch.cat((before, none[:, self.length :] if ignored is None else ignored), 1)


def count_before(length: int, ignored: Tensor | None, device: torch.device) -> Tensor:
    """Count, for each of ``length`` tokens, the tokens before it that are not padding.

    The result is (length,), or (batch, length) if ``ignored`` (batch, length) marks padding.
    """
    if ignored is None:
        return torch.arange(length, device=device)
    counted = (~ignored).long()
    return counted.cumsum(1) - counted


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Apply the rotary position embedding: rotate pairs of features by angles proportional to the position.

    At position p, the pair of features i and i + d / 2 is rotated by the angle p base^(-2i / d).

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (arXiv:2104.09864), section 3.2.

    Arguments:
        x: (batch, heads, length, d), with even d.
        positions: (length,) or (batch, length).
        base: base of the powers in the angles. Default: ``10000.0``.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates = base ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angles = positions.to(dtype).unsqueeze(-1) * rates
    angles = angles if positions.dim() == 1 else angles.unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class SoftmaxAttention(MultiheadBase[KeyValueCache]):
    """A multihead softmax attention, computed by ``torch.nn.functional.scaled_dot_product_attention``.

    It is the baseline for the linear-time modules and has their interface. It is causal by default, uses rotary
    positions, and its state is a key-value cache. With ``rotary=False`` its outputs equal those of
    ``torch.nn.MultiheadAttention``, whose ``state_dict`` it loads.

    Arguments:
        embed_dim: number of features of the query and of the output.
        num_heads: number of heads, a divisor of embed_dim.
        dropout: probability of dropping an attention weight in training. Default: ``0.0``.
        bias: whether the projections have biases. Default: ``True``.
        kdim: number of features of the key. Default: ``None``, embed_dim.
        vdim: number of features of the value. Default: ``None``, embed_dim.
        batch_first: whether inputs and outputs are (batch, length, features). Default: ``False``.
        rotary: whether to apply rotary position embedding to queries and keys; embed_dim / num_heads must be even.
            Ignored keys do not count as positions. If there are as many queries as keys, the i-th query has the
            position of the i-th key; otherwise its position is i. Use False for attention to another sequence.
            Default: ``True``.
        causal: whether a query attends only to keys at or before its position. Default: ``True``.
        device: device of the parameters. Default: ``None``, torch's default.
        dtype: dtype of the parameters. Default: ``None``, torch's default.

    Raises:
        TypeError: bias, batch_first or causal is not a bool.
        ValueError: a size or number is not valid.

    Example:
        >>> attention = SoftmaxAttention(32, 4, batch_first=True)
        >>> x = torch.ones(2, 7, 32)
        >>> output, _ = attention(x, x, x)
        >>> y, state = attention.prefill(x[:, :6])
        >>> y, state = attention.step(x[:, 6], state)
        >>> torch.allclose(y, output[:, 6], atol=1e-5), len(state)
        (True, 7)
    """

    _shown = ("causal", "rotary")

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
        rotary: bool = True,
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first, causal, device, dtype)
        self.rotary = check_bool(rotary, "rotary")
        if rotary and self.head_dim % 2:
            raise ValueError(
                f"rotary=True needs an even embed_dim / num_heads, got {self.head_dim}. "
                "Fix: an even head size, or rotary=False."
            )

    @override
    def _zero_state(self, batch_size: int) -> KeyValueCache:
        like = next(self.parameters())
        shape = batch_size, self.num_heads, 0, self.head_dim
        return KeyValueCache(like.new_empty(shape), like.new_empty(shape))

    @override
    def _attend(
        self, heads: Heads, key: Tensor, ignored: Tensor | None, causal: bool, state: KeyValueCache | None = None
    ) -> tuple[Tensor, KeyValueCache | None]:
        q, k, v = heads
        before = KeyValueCache(k[:, :, :0], v[:, :, :0]) if state is None else state
        _check_cache(before, k)
        if self.rotary:
            positions = before.positions(k.shape[2], ignored)
            at_query = positions if q.shape[2] == k.shape[2] else torch.arange(q.shape[2], device=q.device)
            q, k = rotate(q, at_query), rotate(k, positions)
        if state is not None:
            state = state.append(k, v, ignored)
            k, v, ignored = state.keys, state.values, state.ignored
        dropout = self.dropout if self.training else 0.0
        attend = nn.functional.scaled_dot_product_attention
        if ignored is None and len(before) == 0:
            return attend(q, k, v, dropout_p=dropout, is_causal=causal), state
        if ignored is None and q.shape[2] == 1:
            return attend(q, k, v, dropout_p=dropout), state
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        mask = mask.tril(len(before)) if causal else mask
        mask = mask if ignored is None else mask & ~ignored[:, None, None]
        has_any = mask.any(-1, keepdim=True)  # a query without keys has the output 0; its softmax would be NaN
        return attend(q, k, v, mask | ~has_any, dropout_p=dropout) * has_any, state


def _check_cache(state: KeyValueCache, keys: Tensor) -> None:
    if not isinstance(state, KeyValueCache):
        raise TypeError(f"state must be a KeyValueCache, got {type(state).__name__}. Fix: init_state(batch_size).")
    given, wanted = ((x.shape[0], x.shape[1], x.shape[3]) for x in (state.keys, keys))
    if given != wanted:
        raise ValueError(
            f"state must have {wanted[0]} sequences, {wanted[1]} heads and {wanted[2]} features per head, like the "
            f"input, got {given[0]}, {given[1]} and {given[2]}. Fix: init_state({wanted[0]}) of this module."
        )


def read_mask(mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Convert a padding mask to booleans, (batch, keys), in which True marks keys to ignore.

    As in torch.nn, the mask holds booleans, or floats with -inf for keys to ignore and 0 for others.
    """
    if mask is None:
        return None
    check_input(mask, "key_padding_mask")
    if mask.is_floating_point() and mask.shape == shape:
        ignored = mask == -torch.inf
        if not may_look() or bool((ignored | (mask == 0)).all()):
            return ignored
        raise ValueError(f"a floating-point key_padding_mask must hold only 0 and -inf, got other values. {MASK_FIX}.")
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            f"key_padding_mask must be bool, (batch, keys) = {tuple(shape)}, True = ignore, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}. Fix: torch.arange(length) >= lengths[:, None], or mask == 0 if ones in the mask are "
            "attended to."
        )
    return mask


def _refuse_dropout(dropout: float) -> None:
    if as_real(dropout, "dropout", "leave it out"):
        raise ValueError(
            f"dropout must be 0, got {dropout!r}: linear-time attention has no attention weights to drop. "
            "Fix: leave it out, and apply torch.nn.Dropout to the output."
        )


def _per_head(value: Numbers, name: str, heads: int) -> Tensor:
    refuse_gradient(value, name, ", or hbnode.nn.functional.momentum_attention, which keeps the gradient")
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
    return nn.Parameter(value.expand(module.num_heads).to(module.out_proj.weight, copy=True))


def _wide(parameter: Tensor) -> Tensor:
    """Convert a half-precision parameter to float32, because bfloat16 rounds a momentum of 0.999 to 1."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32))


def _empty_state(weight: Tensor) -> Tensor:
    return weight.new_empty(0, dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32)
