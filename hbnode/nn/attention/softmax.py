"""Softmax attention with rotary positions and a key-value cache, under the interface of the linear-time modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._torch import is_tracing
from hbnode.nn.attention.base import MultiheadBase


class KeyValueCache:
    """Keys and values of the tokens so far, in buffers that double when they are full.

    A cache is not changed when tokens are added: :meth:`append` returns a longer one. The two share their buffers; if
    two continuations are made from one cache, the second copies them.

    Arguments:
        keys: (batch, heads, length, dim).
        values: (batch, heads, length, dim).
        ignored: (batch, length) where a token is padding. Default: ``None``, none is.
    """

    def __init__(self, keys: Tensor, values: Tensor, ignored: Tensor | None = None) -> None:
        self._keys, self._values, self._ignored = keys, values, ignored
        self.length = keys.shape[2]
        self._filled = [self.length]  # of the buffers, shared by all caches that use them

    def __len__(self) -> int:
        """The number of tokens."""
        return self.length

    @property
    def keys(self) -> Tensor:
        """The keys (batch, heads, length, dim)."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """The values (batch, heads, length, dim)."""
        return self._values[:, :, : self.length]

    @property
    def ignored(self) -> Tensor | None:
        """Where a token is padding (batch, length), or None if none is."""
        return None if self._ignored is None else self._ignored[:, : self.length]

    def positions(self, length: int, ignored: Tensor | None) -> Tensor:
        """Positions of the next tokens, (length,) or (batch, length): how many tokens that count come before."""
        device = self._keys.device
        if self._ignored is None and ignored is None:
            return torch.arange(self.length, self.length + length, device=device)
        before: Tensor | int = self.length if self.ignored is None else (~self.ignored).sum(1, keepdim=True)
        if ignored is None:
            return before + torch.arange(length, device=device)
        counted = (~ignored).long()
        return before + counted.cumsum(1) - counted

    def detach(self) -> KeyValueCache:
        """The same without its history, for truncated backpropagation."""
        return KeyValueCache(self.keys.detach(), self.values.detach(), self.ignored)

    def append(self, keys: Tensor, values: Tensor, ignored: Tensor | None = None) -> KeyValueCache:
        """A cache with further tokens.

        Arguments:
            keys: (batch, heads, more, dim).
            values: (batch, heads, more, dim).
            ignored: (batch, more). Default: ``None``, none is padding.
        """
        if torch.is_grad_enabled() and (keys.requires_grad or self._keys.requires_grad or values.requires_grad):
            joined = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
            return KeyValueCache(*joined, self._joined_mask(keys.shape[2], ignored))
        length = self.length + keys.shape[2]
        is_shared = self._filled[0] != self.length or _is_frozen(self._keys)
        if is_shared or length > self._keys.shape[2] or keys.dtype != self._keys.dtype:
            after = KeyValueCache(*(_grown(x, like, length) for x, like in ((self.keys, keys), (self.values, values))))
        else:
            after = KeyValueCache(self._keys, self._values)
            after._filled = self._filled
        after._keys[:, :, self.length : length] = keys
        after._values[:, :, self.length : length] = values
        after._ignored = self._joined_mask(keys.shape[2], ignored)
        after.length = after._filled[0] = length
        return after

    def _joined_mask(self, more: int, ignored: Tensor | None) -> Tensor | None:
        """The mask of all tokens, None if nothing is ignored."""
        if self._ignored is None and ignored is None:
            return None
        none = torch.zeros(len(self._keys), self.length + more, dtype=torch.bool, device=self._keys.device)
        before = none[:, : self.length] if self.ignored is None else self.ignored
        return torch.cat((before, none[:, self.length :] if ignored is None else ignored), 1)


def _is_frozen(buffer: Tensor) -> bool:
    """Whether a buffer was made in inference mode, and cannot be written to outside of it."""
    return not (is_tracing() or torch.is_inference_mode_enabled()) and buffer.is_inference()


def _grown(x: Tensor, like: Tensor, length: int) -> Tensor:
    """A buffer with room for at least twice as many tokens that holds ``x``."""
    room = like.new_empty(*x.shape[:2], max(2 * length, 64), x.shape[3])
    room[:, :, : x.shape[2]] = x
    return room


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary position embedding: turn each pair of features by an angle proportional to the position.

    Feature i and feature i + d / 2 are a point of the plane; at position p it turns by p base^(-2i / d).

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (arXiv:2104.09864), section 3.2.

    Arguments:
        x: (batch, heads, length, d), d even.
        positions: (length,) or (batch, length).
        base: of the angles. Default: ``10000.0``.
    """
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32).unsqueeze(-1) * rates
    angles = angles if positions.dim() == 1 else angles.unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class SoftmaxAttention(MultiheadBase[KeyValueCache]):
    """Multihead softmax attention by ``torch.nn.functional.scaled_dot_product_attention``.

    This is the baseline of the linear-time modules, with their interface: causal unless said otherwise, with rotary
    positions, and with a key-value cache as the state. With ``rotary=False`` it computes what
    ``torch.nn.MultiheadAttention`` does and loads its ``state_dict``.

    Arguments:
        embed_dim: features of the query and of the output.
        num_heads: heads; embed_dim is a multiple of it.
        dropout: probability of dropping an attention weight in training. Default: ``0.0``.
        bias: whether the projections have biases. Default: ``True``.
        kdim: features of the key. Default: ``None``, embed_dim.
        vdim: features of the value. Default: ``None``, embed_dim.
        batch_first: whether inputs and outputs are (batch, length, features). Default: ``False``.
        rotary: whether queries and keys are turned by their positions; head_dim must be even. Positions count the keys
            that are not ignored; a query has that of the key at its place if there are as many. False is for attention
            to another sequence. Default: ``True``.
        causal: whether a query sees only keys at and before its place. Default: ``True``.
        device: of the parameters. Default: ``None``, torch's.
        dtype: of the parameters. Default: ``None``, torch's.

    Raises:
        TypeError: a switch is not a bool.
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
        self.rotary = rotary
        if rotary and self.head_dim % 2:
            raise ValueError(
                f"rotary positions turn pairs of features, but embed_dim / num_heads is {self.head_dim}. "
                "Fix: an even head size, or rotary=False."
            )

    @override
    def _settings(self) -> dict[str, object]:
        return {"rotary": self.rotary}

    @override
    def init_state(self, batch_size: int) -> KeyValueCache:
        like = next(self.parameters())
        shape = batch_size, self.num_heads, 0, self.head_dim
        return KeyValueCache(like.new_empty(shape), like.new_empty(shape))

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
        state: KeyValueCache | None = None,
    ) -> tuple[Tensor, KeyValueCache | None]:
        before = KeyValueCache(k[:, :, :0], v[:, :, :0]) if state is None else _checked(state, k)
        if self.rotary:
            places = before.positions(k.shape[2], key_padding_mask)
            at_query = places if q.shape[2] == k.shape[2] else torch.arange(q.shape[2], device=q.device)
            q, k = rotate(q, at_query), rotate(k, places)
        if state is not None:
            state = state.append(k, v, key_padding_mask)
            k, v, key_padding_mask = state.keys, state.values, state.ignored
        dropout = self.dropout if self.training else 0.0
        attend = nn.functional.scaled_dot_product_attention
        if key_padding_mask is None and len(before) == 0:
            return attend(q, k, v, dropout_p=dropout, is_causal=causal), state
        if key_padding_mask is None and q.shape[2] == 1:
            return attend(q, k, v, dropout_p=dropout), state
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if causal:
            seen = seen.tril(len(before))
        if key_padding_mask is not None:
            seen = seen & ~key_padding_mask[:, None, None]
        sees_any = seen.any(-1, keepdim=True)  # a softmax over nothing would be NaN: such an output is zero
        return attend(q, k, v, seen | ~sees_any, dropout_p=dropout) * sees_any, state


def _checked(state: KeyValueCache, keys: Tensor) -> KeyValueCache:
    """The state, or an error if it is not that of such keys."""
    if not isinstance(state, KeyValueCache):
        raise TypeError(f"state must be a KeyValueCache, got {type(state).__name__}. Fix: init_state(batch_size).")
    came, wanted = ((x.shape[0], x.shape[1], x.shape[3]) for x in (state.keys, keys))
    if came != wanted:
        raise ValueError(
            f"the state must be of {wanted[0]} sequences and {wanted[1]} heads of {wanted[2]}, as the input, got "
            f"{came[0]}, {came[1]} and {came[2]}. Fix: init_state({wanted[0]}) of this module."
        )
    return state
