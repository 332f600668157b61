"""What the attention modules share: projections named as in ``torch.nn.MultiheadAttention``, checks, streaming."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._checks import as_count, check_input
from hbnode._torch import KeepsConstants, may_look

State = TypeVar("State")

MASK_FIX = (
    "Fix: is_causal=True or False alone for the order, key_padding_mask (batch, length), True = ignore, for padding, "
    "torch.nn.MultiheadAttention for other masks"
)


class MultiheadBase(KeepsConstants, Generic[State]):
    """Projections to heads and back around an attention function, which a subclass has in :meth:`_attend`.

    The parameters are those of ``torch.nn.MultiheadAttention``: ``in_proj_weight``, or ``q_proj_weight``,
    ``k_proj_weight`` and ``v_proj_weight`` where ``kdim`` or ``vdim`` differ from ``embed_dim``, ``in_proj_bias``, and
    ``out_proj``. They are initialised as there.
    """

    _qkv_same_embed_dim = False  # keeps torch.nn.TransformerEncoderLayer from its fused softmax attention in evaluation

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float,
        bias: bool,
        *,
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
                f"Fix: embed_dim={num_heads * (embed_dim // num_heads + 1)}."
            )
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must be a probability, got {dropout!r}. Fix: a number from 0 to 1.")
        for name, switch in (("bias", bias), ("batch_first", batch_first), ("causal", causal)):
            if not isinstance(switch, bool):
                raise TypeError(f"{name} must be True or False, got {switch!r}. Fix: pass options by name.")
        self.head_dim = self.embed_dim // self.num_heads
        self.dropout, self.batch_first, self.causal = float(dropout), batch_first, causal
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        if self.kdim == self.vdim == self.embed_dim:
            self.in_proj_weight: nn.Parameter | None = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **options))
            for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
                self.register_parameter(name, None)
        else:
            self.register_parameter("in_proj_weight", None)
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, **options))
            self.k_proj_weight = nn.Parameter(torch.empty(embed_dim, self.kdim, **options))
            self.v_proj_weight = nn.Parameter(torch.empty(embed_dim, self.vdim, **options))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **options)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **options)
        self._reset_projections()

    def _reset_projections(self) -> None:
        """Initialise as ``torch.nn.MultiheadAttention`` does: Xavier's uniform, and biases of zero."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            assert self.out_proj.bias is not None
            nn.init.zeros_(self.out_proj.bias)

    @override
    def extra_repr(self) -> str:
        shown = [f"{self.embed_dim}, {self.num_heads}", f"causal={self.causal}"]
        return ", ".join(shown + [f"{name}={value}" for name, value in self._settings().items()])

    def _settings(self) -> dict[str, object]:
        """What the representation shows of a subclass."""
        return {}

    # Calls

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Attend to all keys, or with ``causal`` to those at and before each query.

        Arguments:
            query: (length, batch, embed_dim), with ``batch_first`` (batch, length, embed_dim), or (length, embed_dim).
            key: like the query with kdim features, any length unless causal. Default: ``None``, the query.
            value: like the key with vdim features. Default: ``None``, the key.
            key_padding_mask: (batch, keys), or (keys,) of a query without a batch; True = ignore. Default: ``None``.
            need_weights: must be False, since the weights are never formed. Default: ``False``.
            attn_mask: must be None. Default: ``None``.
            average_attn_weights: has no effect without weights. Default: ``True``.
            is_causal: overrides the constructor's ``causal`` where it is not None. Default: ``None``.

        Returns:
            The output, shaped like the query, and None in the place of the weights.

        Raises:
            TypeError: an input is not a tensor.
            ValueError: a shape does not fit, or ``need_weights`` or ``attn_mask`` is given.
        """
        key = query if key is None else key
        value = key if value is None else value
        self._refuse(need_weights, attn_mask)
        has_batch = self._check_inputs(query, key, value)
        if not has_batch:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = key_padding_mask[None] if isinstance(key_padding_mask, Tensor) else key_padding_mask
        elif not self.batch_first:
            same = key is query, value is key
            query = query.transpose(0, 1)
            key = query if same[0] else key.transpose(0, 1)
            value = key if same[1] else value.transpose(0, 1)
        causal = self.causal if is_causal is None else is_causal
        ignored = read_mask(key_padding_mask, key.shape[:2])
        if causal and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"causal attention needs a key for each query, got {query.shape[1]} queries and {key.shape[1]} keys. "
                "Fix: causal=False to attend to another sequence."
            )
        query, key, value = _finite(query, key, value, ignored)
        heads, _ = self._attend(*self._project(query, key, value), key, ignored, causal=causal)
        output = self._join(heads)
        return (output[0] if not has_batch else output if self.batch_first else output.transpose(0, 1)), None

    def init_state(self, batch_size: int) -> State:
        """The state before the first token, for ``batch_size`` sequences.

        Arguments:
            batch_size: how many sequences.
        """
        raise NotImplementedError

    def prefill(
        self, x: Tensor, state: State | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Causal self-attention over several tokens, from a state that it goes on from.

        Arguments:
            x: (batch, length, embed_dim) with ``batch_first``, else (length, batch, embed_dim).
            state: of the tokens before. Default: ``None``, none.
            key_padding_mask: (batch, length), True = ignore: such a token leaves the state as it is. Default: ``None``.

        Returns:
            The output, shaped like x, and the state after its last token.
        """
        self._check_streaming()
        if not self._check_inputs(x, x, x):
            raise ValueError(f"x must have a batch axis to be streamed, got shape {tuple(x.shape)}. Fix: x[None].")
        x = x if self.batch_first else x.transpose(0, 1)
        ignored = read_mask(key_padding_mask, x.shape[:2])
        state = self.init_state(x.shape[0]) if state is None else state
        x, _, _ = _finite(x, x, x, ignored)
        heads, after = self._attend(*self._project(x, x, x), x, ignored, causal=True, state=state)
        output = self._join(heads)
        assert after is not None
        return (output if self.batch_first else output.transpose(0, 1)), after

    def step(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Causal self-attention for the next token.

        Arguments:
            x: (batch, embed_dim).
            state: of the tokens before. Default: ``None``, none.

        Returns:
            The output (batch, embed_dim), and the state after the token.
        """
        check_input(x, "x")
        if x.dim() != 2:
            raise ValueError(
                f"step takes one token, (batch, {self.embed_dim}), got shape {tuple(x.shape)}. "
                "Fix: prefill for several."
            )
        axis = 1 if self.batch_first else 0
        output, state = self.prefill(x.unsqueeze(axis), state)
        return output.squeeze(axis), state

    # What a subclass has

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        *,
        causal: bool,
        state: State | None = None,
    ) -> tuple[Tensor, State | None]:
        """Attention of heads (batch, heads, length, head_dim); ``key`` is the input that keys are projected from.

        The state that comes back is None if none was given.
        """
        raise NotImplementedError

    # Parts

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads, (batch, heads, length, head_dim)."""
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
        """The output (batch, length, embed_dim) of heads (batch, heads, length, head_dim)."""
        joined: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        return joined

    # Checks

    def _refuse(self, need_weights: bool, attn_mask: Tensor | None) -> None:
        if need_weights:
            raise ValueError("need_weights must be False: the attention weights are never formed. Fix: leave it out.")
        if attn_mask is not None:
            raise ValueError(f"attn_mask must be None: {type(self).__name__} has no weights to mask. {MASK_FIX}.")

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Check shapes; whether there is a batch axis."""
        inputs = ("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)
        for name, x, features in inputs:
            check_input(x, name)
            if x.dim() not in (2, 3) or x.shape[-1] != features or x.dim() != query.dim():
                order = "(batch, length" if self.batch_first else "(length, batch"
                raise ValueError(
                    f"{name} must be {order}, {features}), or (length, {features}), got shape {tuple(x.shape)}. "
                    f"Fix: embed_dim, kdim and vdim are the numbers of features."
                )
        batch = 0 if self.batch_first else 1
        if key.shape[:-1] != value.shape[:-1] or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(
                "query, key and value must have one batch size, key and value one length, got shapes "
                f"{shapes} with batch_first={self.batch_first}. Fix: batch_first=True if the batch comes first."
            )
        return query.dim() == 3

    def _check_streaming(self) -> None:
        if not self.causal:
            raise ValueError(
                f"a {type(self).__name__} with causal=False attends to later tokens, so it cannot take them one by "
                "one. Fix: causal=True."
            )
        if self.kdim != self.embed_dim or self.vdim != self.embed_dim:
            raise ValueError("streaming is self-attention. Fix: leave kdim and vdim out.")


def read_mask(mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Where a key is ignored (batch, keys), of a mask of bools or, as torch.nn's layers pass it, of 0 and -inf."""
    if mask is None:
        return None
    check_input(mask, "key_padding_mask")
    if mask.is_floating_point() and mask.shape == shape:
        ignored = mask == -torch.inf
        if not may_look() or bool((ignored | (mask == 0)).all()):
            return ignored
        raise ValueError(f"a key_padding_mask of numbers must be of 0 and -inf, got others. {MASK_FIX}.")
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            f"key_padding_mask must be bool, (batch, keys) = {tuple(shape)}, True = ignore, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}. Fix: torch.arange(length) >= lengths[:, None], or mask == 0 of a mask whose ones "
            "are to be seen."
        )
    return mask


def _finite(query: Tensor, key: Tensor, value: Tensor, ignored: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs with 0 for NaN and infinities that are ignored, since 0 * NaN is NaN; of self-attention all three."""
    if ignored is None:
        return query, key, value

    def finite(x: Tensor) -> Tensor:
        return x.masked_fill(ignored.unsqueeze(-1) & ~x.isfinite(), 0.0)

    own = finite(key)
    return (own if query is key else query), own, (own if value is key else finite(value))
