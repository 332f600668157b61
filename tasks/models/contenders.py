"""The transformers that tasks compare. Each has a kind of attention and a kind of connection between layers.

``linear_gain`` is linear attention multiplied by 1 / (1 - β), the weight that momentum gives to old keys. It shows the
effect of this scale without momentum. ``gated_delta`` (Gated DeltaNet) and ``gated_linear`` are newer baselines with
linear complexity.

All models have the same width. They have the same number of heads, or with ``--equal state`` recurrent states of the
same size: models that store one matrix per head then have half as many heads of twice the size.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from hbnode.nn import MomentumTransformer
from hbnode.nn.transformer import AttentionName, ConnectionName
from tasks.common.config import TaskConfig, option


@dataclasses.dataclass(frozen=True)
class Contender:
    """The title of a model, its kind of attention and its kind of connection."""

    title: str
    attention: AttentionName
    connection: ConnectionName = "residual"

    @property
    def causal_only(self) -> bool:
        """Whether the attention is recurrent, so that the model cannot be a bidirectional encoder."""
        return self.attention in MEMORIES


CONTENDERS: dict[str, Contender] = {
    "softmax": Contender("softmax", "softmax"),
    "linear": Contender("linear", "linear"),
    "linear_gain": Contender("linear × 1/(1 − β)", "linear"),
    "momentum": Contender("momentum", "momentum"),
    "momentum_connection": Contender("momentum + connection", "momentum", "momentum"),
    "adaptive": Contender("adaptive momentum", "momentum", "adaptive"),
    "gated_linear": Contender("gated linear", "gated_linear"),
    "gated_delta": Contender("Gated DeltaNet", "gated_delta"),
    "heavy_ball": Contender("heavy-ball memory", "heavy_ball"),
}
TITLES = {name: contender.title for name, contender in CONTENDERS.items()}
# Kinds of attention that store one matrix per head and no velocity
ONE_MATRIX = ("linear", "linear_gain", "gated_linear", "gated_delta")
MEMORIES = ("gated_linear", "gated_delta", "heavy_ball")  # recurrent memories, which have no normaliser


def attention_of(name: str, momentum: float = 0.6, step_size: float = 1.0) -> dict[str, Any]:
    """Return the keyword arguments of a transformer layer.

    Arguments:
        name: one of :data:`CONTENDERS`.
        momentum: β of momentum attention, and in the scale of ``linear_gain``. Default: 0.6
        step_size: γ of momentum attention. Default: 1.0
    """
    contender = CONTENDERS[name]
    options: dict[str, float] = {}
    if contender.attention == "momentum":
        options = {"momentum": momentum, "step_size": step_size}
    elif name == "linear_gain":
        options = {"step_size": step_size / (1 - momentum)}
    return {"attention": contender.attention, "attention_options": options, "connection": contender.connection}


@dataclasses.dataclass(frozen=True)
class ContenderConfig(TaskConfig):
    """Command-line options of tasks that compare transformers."""

    models = tuple(CONTENDERS)
    positive = "d_model heads layers feedforward step_size"

    model: str = option("momentum", "one of {models}, several with commas between, or all")
    d_model: int = option(64, "size of a token's embedding")
    heads: int = option(4, "number of attention heads")
    layers: int = option(3, "layers")
    feedforward: int = option(256, "hidden units of a layer's network")
    dropout: float = option(0.0, "probability of dropout", below=1)
    equal: str = option(
        "heads", "what the models have in common: the number of heads, or the state size", ("heads", "state")
    )
    momentum: float = option(0.6, "beta of momentum attention, and in the scale of linear_gain", below=1)
    step_size: float = option(1.0, "gamma of momentum attention")
    positions: str = option("auto", "auto: rotary in causal softmax, else sinusoidal", ("auto", "sinusoidal", "rotary"))

    def check(self) -> None:
        """Raise ValueError for options that cannot be combined."""
        super().check()
        if self.d_model % self.heads:
            raise ValueError(f"--d-model must be a multiple of --heads, got {self.d_model} and {self.heads}")
        if self.equal == "state" and self.heads % 2:
            raise ValueError(f"--equal state halves the heads of some, so --heads must be even, got {self.heads}")
        if self.positions == "rotary" and self.chosen() != ("softmax",):
            raise ValueError(
                f"--positions rotary needs --model softmax, got {self.model}: linear attention has none. "
                "Fix: --model softmax, or --positions auto."
            )

    def heads_used(self) -> int:
        """Return the number of heads of the selected model."""
        return self.heads // 2 if self.equal == "state" and self.model in ONE_MATRIX else self.heads

    def state_size(self, length: int) -> int:
        """Return the number of values in the model's recurrent state. A velocity that is always 0 is not counted.

        Arguments:
            length: number of tokens so far. Only the state of softmax attention depends on it.
        """
        if self.model == "softmax":
            return self.layers * 2 * self.d_model * length
        matrix = self.d_model**2 // self.heads_used()  # entries in the matrices of all heads
        normaliser = 0 if self.model in MEMORIES else self.d_model
        return self.layers * (matrix * (1 if self.model in ONE_MATRIX else 2) + normaliser)

    def make_transformer(self, num_embeddings: int | None, **options: Any) -> MomentumTransformer:
        """Return the transformer that the options describe.

        Arguments:
            num_embeddings: size of the vocabulary. With None the inputs are vectors.
            options: further arguments of the model, such as ``output_size`` and ``causal``.
        """
        positions = self.positions
        if positions == "auto":
            positions = "rotary" if self.model == "softmax" and options.get("causal", True) else "sinusoidal"
        return MomentumTransformer(
            num_embeddings,
            d_model=self.d_model,
            nhead=self.heads_used(),
            num_layers=self.layers,
            dim_feedforward=self.feedforward,
            dropout=self.dropout,
            positions=cast(Any, positions),
            **attention_of(self.model, self.momentum, self.step_size),
            **options,
        )
