"""A transformer that is trained on whole sequences and generates token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from hbnode._checks import as_count, check_input
from hbnode.nn.attention.base import read_mask
from hbnode.nn.attention.softmax import SoftmaxAttention
from hbnode.nn.transformer.kinds import AttentionName, ConnectionName, MakeAttention, MakeConnection
from hbnode.nn.transformer.layers import Activation, MomentumTransformerLayer
from hbnode.nn.transformer.positions import next_positions, sinusoids


class TransformerState(NamedTuple):
    """What a :class:`MomentumTransformer` carries from token to token.

    Attributes:
        position: tokens so far of each sequence, padding excluded, (batch,), int64.
        layers: the state of each layer's attention.
    """

    position: Tensor
    layers: tuple[Any, ...]

    def detach(self) -> TransformerState:
        """The same without its history, for truncated backpropagation."""
        return TransformerState(self.position, tuple(layer.detach() for layer in self.layers))


class MomentumTransformer(nn.Module):
    r"""A stack of :class:`MomentumTransformerLayer` between an embedding and a linear readout, batch first.

    Called with whole sequences it is trained as any transformer. With ``causal=True`` the same module streams:
    :meth:`prefill` takes several tokens, :meth:`step` one, and :meth:`generate` draws new ones. With attention in
    linear time the state, and the time for a token, do not grow with the length.

    References:
        Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), section 4.

    Arguments:
        num_embeddings: tokens of the vocabulary, or None for inputs that are vectors (batch, length, d_model).
        d_model: features of the stream. Default: ``512``.
        nhead: heads; d_model is a multiple of it. Default: ``8``.
        num_layers: layers. Default: ``6``.
        dim_feedforward: hidden features of the feedforward blocks. Default: ``2048``.
        dropout: of the layers and of the embedding. Default: ``0.1``.
        activation: of the feedforward blocks. Default: ``"relu"``.
        norm_first: whether norms come before the blocks; the last layer is then followed by one. Default: ``False``.
        output_size: features of the output. Default: ``None``, num_embeddings, or d_model for vectors.
        attention: see :class:`MomentumTransformerLayer`. Default: ``"momentum"``.
        attention_options: further arguments of the attention modules. Default: ``None``, none.
        connection: see :class:`MomentumTransformerLayer`. Default: ``"residual"``.
        connection_momentum: β of the connections. Default: ``None``, the connection's own.
        positions: "sinusoidal" adds sines and cosines to the embedding, "rotary" turns queries and keys of softmax
            attention, None does neither. Default: ``"sinusoidal"``.
        causal: whether a token sees only itself and those before. Default: ``True``.
        device: of the parameters. Default: ``None``, torch's.
        dtype: of the parameters. Default: ``None``, torch's.

    Shape:
        tokens: (batch, length), int64, or with ``num_embeddings=None`` (batch, length, d_model).
        output: (batch, length, output_size).

    Raises:
        ValueError: a size, number or name is not valid.

    Example:
        >>> model = MomentumTransformer(10, d_model=32, nhead=4, num_layers=2, dim_feedforward=64)
        >>> tokens = torch.zeros(3, 7, dtype=torch.int64)
        >>> model(tokens).shape, model.generate(tokens, 5).shape
        (torch.Size([3, 7, 10]), torch.Size([3, 12]))
    """

    def __init__(
        self,
        num_embeddings: int | None,
        d_model: int = 512,
        nhead: int = 8,
        num_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        norm_first: bool = False,
        *,
        output_size: int | None = None,
        attention: AttentionName | MakeAttention = "momentum",
        attention_options: Mapping[str, Any] | None = None,
        connection: ConnectionName | MakeConnection = "residual",
        connection_momentum: float | None = None,
        positions: Literal["sinusoidal", "rotary"] | None = "sinusoidal",
        causal: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if positions not in ("sinusoidal", "rotary", None):
            raise ValueError(f"positions must be 'sinusoidal', 'rotary' or None, got {positions!r}. Fix: one of these.")
        is_softmax = attention in ("softmax", SoftmaxAttention)
        if positions == "rotary" and not is_softmax:
            raise ValueError("rotary positions go with softmax attention. Fix: positions='sinusoidal'.")
        of_attention = dict(attention_options or {})
        if is_softmax:
            of_attention = {"rotary": positions == "rotary", **of_attention}
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model, self.positions, self.causal = as_count(d_model, "d_model"), positions, causal
        self.num_embeddings = None if num_embeddings is None else as_count(num_embeddings, "num_embeddings")
        self.embedding = None if num_embeddings is None else nn.Embedding(num_embeddings, d_model, **options)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            MomentumTransformerLayer(
                d_model,
                nhead,
                dim_feedforward,
                dropout,
                activation,
                batch_first=True,
                norm_first=norm_first,
                attention=attention,
                attention_options=of_attention,
                connection=connection,
                connection_momentum=connection_momentum,
                causal=causal,
                **options,
            )
            for _ in range(as_count(num_layers, "num_layers"))
        )
        self.norm = nn.LayerNorm(d_model, **options) if norm_first else nn.Identity()
        features = (num_embeddings or d_model) if output_size is None else as_count(output_size, "output_size")
        self.readout = nn.Linear(d_model, features, **options)
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(d_model))

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """The outputs for whole sequences.

        Arguments:
            tokens: (batch, length), or vectors (batch, length, d_model).
            key_padding_mask: (batch, length), True = ignore. Default: ``None``.
        """
        self._check(tokens)
        key_padding_mask = read_mask(key_padding_mask, tokens.shape[:2])
        start = torch.zeros(tokens.shape[0], dtype=torch.int64, device=tokens.device)
        x, _ = self._embed(tokens, start, key_padding_mask)
        depth = None
        for layer in self.layers:
            x, depth = layer(x, depth, key_padding_mask)
        return self._read(x)

    def init_state(self, batch_size: int) -> TransformerState:
        """The state before the first token.

        Arguments:
            batch_size: how many sequences.
        """
        layers = tuple(layer.self_attn.init_state(batch_size) for layer in self._layers())
        device = next(self.parameters()).device
        return TransformerState(torch.zeros(batch_size, dtype=torch.int64, device=device), layers)

    def prefill(
        self, tokens: Tensor, state: TransformerState | None = None, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, TransformerState]:
        """The outputs for the next tokens of a stream, and the state after them.

        Arguments:
            tokens: (batch, length), or vectors (batch, length, d_model).
            state: after the tokens before. Default: ``None``, there are none.
            key_padding_mask: (batch, length), True = ignore: such a token leaves the state as it is. Default: ``None``.
        """
        self._check(tokens)
        key_padding_mask = read_mask(key_padding_mask, tokens.shape[:2])
        state = self.init_state(tokens.shape[0]) if state is None else state
        if not isinstance(state, TransformerState) or state.position.shape[0] != tokens.shape[0]:
            came = (
                f"of {len(state.position)} sequences" if isinstance(state, TransformerState) else type(state).__name__
            )
            raise ValueError(
                f"state must be a TransformerState of {tokens.shape[0]} sequences, got {came}. "
                f"Fix: init_state({tokens.shape[0]}), or the state that prefill or step returned."
            )
        if len(state.layers) != len(self.layers):
            raise ValueError(
                f"the state is of {len(state.layers)} layers, the model has {len(self.layers)}. Fix: the state of this "
                f"model, init_state({tokens.shape[0]})."
            )
        x, position = self._embed(tokens, state.position, key_padding_mask)
        depth, after = None, []
        for layer, before in zip(self._layers(), state.layers, strict=True):
            x, new, depth = layer.prefill(x, before, key_padding_mask, depth)
            after.append(new)
        return self._read(x), TransformerState(position, tuple(after))

    def step(self, token: Tensor, state: TransformerState | None = None) -> tuple[Tensor, TransformerState]:
        """The output for the next token (batch, output_size), and the state after it.

        Arguments:
            token: (batch,), or a vector (batch, d_model).
            state: after the tokens before. Default: ``None``, there are none.
        """
        check_input(token, "token")
        if token.dim() != (1 if self.embedding is not None else 2):
            wanted = "(batch,)" if self.embedding is not None else f"(batch, {self.d_model})"
            raise ValueError(
                f"step takes one token of each sequence, {wanted}, got shape {tuple(token.shape)}. "
                "Fix: tokens[:, i], or prefill for several."
            )
        output, state = self.prefill(token.unsqueeze(1), state)
        return output[:, 0], state

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        steps: int,
        *,
        key_padding_mask: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        sample: Callable[[Tensor], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Go on from a prompt, one token after another, in evaluation mode.

        Arguments:
            prompt: (batch, length), or vectors (batch, length, d_model), of at least one token.
            steps: how many tokens to add.
            key_padding_mask: of the prompt (batch, length), True = ignore, for prompts of different lengths; a sequence
                goes on after its last token that counts. Default: ``None``.
            temperature: divides the outputs before the softmax; 0 takes the largest. Default: ``1.0``.
            top_k: draw from the k largest outputs alone. Default: ``None``, from all.
            sample: maps outputs (batch, output_size) to the next input, in the place of drawing from a softmax.
                Default: ``None``.
            generator: of random numbers. Default: ``None``, torch's.

        Returns:
            The prompt and the new tokens, (batch, length + steps).
        """
        self._check(prompt)
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature must be a number >= 0, got {temperature!r}. Fix: leave it out.")
        top_k = None if top_k is None else as_count(top_k, "top_k")
        if prompt.shape[1] == 0:
            raise ValueError("prompt must have at least one token, got length 0. Fix: begin with a start token.")
        if sample is None:
            if self.embedding is None:
                raise ValueError(
                    "outputs of a model of vectors are no tokens. Fix: sample=, a function of the outputs."
                )

            def sample(output: Tensor) -> Tensor:
                return draw(output, temperature, top_k, generator)

        parts = [prompt]
        with _evaluating(self):
            outputs, state = self.prefill(prompt, key_padding_mask=key_padding_mask)
            output = outputs[:, -1] if key_padding_mask is None else _last(outputs, key_padding_mask)
            for index in range(as_count(steps, "steps", least=0)):
                token = sample(output)
                parts.append(token.unsqueeze(1))
                if index + 1 < steps:
                    output, state = self.step(token, state)
        return torch.cat(parts, 1)

    # Parts

    def _layers(self) -> Iterator[MomentumTransformerLayer]:
        for layer in self.layers:
            yield cast(MomentumTransformerLayer, layer)  # or what torch.compile makes of one

    def _embed(self, tokens: Tensor, start: Tensor, ignored: Tensor | None) -> tuple[Tensor, Tensor]:
        """Vectors with their positions, and the position of the next token."""
        if self.embedding is not None:
            x = self.embedding(tokens) * math.sqrt(self.d_model)
        else:  # 0 * NaN is NaN
            x = tokens if ignored is None else tokens.masked_fill(ignored.unsqueeze(-1) & ~tokens.isfinite(), 0.0)
        places, after = next_positions(start, tokens.shape[1], ignored)
        if self.positions == "sinusoidal":
            x = x + sinusoids(places, self.d_model).to(x.dtype)
        return self.dropout(x), after

    def _read(self, x: Tensor) -> Tensor:
        output: Tensor = self.readout(self.norm(x))
        return output

    def _check(self, tokens: Tensor) -> None:
        if self.embedding is not None and isinstance(tokens, (list, tuple)):
            raise TypeError(f"tokens must be a tensor, got {type(tokens).__name__}. Fix: torch.tensor(tokens).")
        check_input(tokens, "tokens")
        if self.embedding is None:
            if tokens.dim() != 3 or tokens.shape[-1] != self.d_model:
                raise ValueError(
                    f"inputs must be (batch, length, d_model = {self.d_model}), got {tuple(tokens.shape)}. Fix: that "
                    "shape, or num_embeddings= for tokens."
                )
        elif tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens must be whole numbers (batch, length), got {tokens.dtype} of shape {tuple(tokens.shape)}. "
                "Fix: tokens[None] for one sequence, tokens.long() for whole floats, num_embeddings=None for vectors."
            )


def _last(outputs: Tensor, key_padding_mask: Tensor) -> Tensor:
    """The output (batch, features) at the last token of each sequence that is not ignored."""
    ignored = read_mask(key_padding_mask, outputs.shape[:2])
    assert ignored is not None
    places = torch.arange(outputs.shape[1], device=outputs.device).masked_fill(ignored, 0).amax(1)
    return outputs.take_along_dim(places[:, None, None], 1).squeeze(1)


def draw(output: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw a token (batch,) from the softmax of outputs (batch, tokens)."""
    if temperature == 0:
        return output.argmax(-1)
    scores = output.float() / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        scores, places = scores.topk(top_k)
        return places.gather(1, torch.multinomial(scores.softmax(-1), 1, generator=generator)).squeeze(1)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(1)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards the mode that each part had."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
