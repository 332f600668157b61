"""Options of the tasks that compare transformers, and what the contenders are called."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, cast

from hbnode.nn import MomentumTransformer
from tasks.common.config import TaskConfig, option
from tasks.models.transformers import CONTENDERS, make_transformer

TITLES = {
    "softmax": "softmax",
    "linear": "linear",
    "linear_gain": "linear × 1/(1 − β)",
    "momentum": "momentum",
    "momentum_connection": "momentum + connection",
    "adaptive": "adaptive momentum",
    "gated_linear": "gated linear",
    "gated_delta": "Gated DeltaNet",
    "heavy_ball": "heavy-ball memory",
}

ONE_MATRIX = ("linear", "linear_gain", "gated_linear", "gated_delta")  # for each head; others have a velocity too
MEMORIES = ("gated_linear", "gated_delta", "heavy_ball")  # without a normaliser


@dataclasses.dataclass(frozen=True)
class ContenderConfig(TaskConfig):
    """Options of the tasks that compare transformers."""

    models: ClassVar[tuple[str, ...]] = tuple(CONTENDERS)
    positive: ClassVar[tuple[str, ...]] = (
        *TaskConfig.positive,
        *("d_model", "heads", "layers", "feedforward", "step_size"),
    )

    model: str = option("momentum", "one of {models}, several with commas between, or all")
    d_model: int = option(64, "features of a token")
    heads: int = option(4, "heads of the attention")
    layers: int = option(3, "layers")
    feedforward: int = option(256, "hidden units of a layer's network")
    dropout: float = option(0.0, "probability of dropout")
    equal: str = option(
        "heads",
        "what contenders share besides the width: heads, or the size of the state, for which those that keep one "
        "matrix for each head have half the heads, of twice the size",
        ("heads", "state"),
    )
    momentum: float = option(0.6, "beta of momentum attention, and of the gain of linear_gain")
    step_size: float = option(1.0, "gamma of momentum attention")
    connection_momentum: float = option(0.9, "beta of the momentum connection")
    positions: str = option(
        "auto", "of tokens; auto: rotary in causal softmax attention, else sinusoidal", ("auto", "sinusoidal")
    )

    def check(self) -> None:
        """Refuse what no run can have."""
        super().check()
        for name in ("momentum", "dropout", "connection_momentum"):
            if getattr(self, name) >= 1:
                raise ValueError(f"--{name.replace('_', '-')} must be below 1, got {getattr(self, name)}")
        if self.d_model % self.heads:
            raise ValueError(f"--d-model must be a multiple of --heads, got {self.d_model} and {self.heads}")
        if self.equal == "state" and self.heads % 2:
            raise ValueError(f"--equal state halves the heads of some, so --heads must be even, got {self.heads}")

    def heads_used(self) -> int:
        """How many heads the contender has."""
        return self.heads // 2 if self.equal == "state" and self.model in ONE_MATRIX else self.heads

    def state_size(self, length: int) -> int:
        """How many numbers the contender carries to the next token of a sequence, without a velocity that stays 0.

        Arguments:
            length: tokens so far, on which only softmax attention depends.
        """
        if self.model == "softmax":
            return self.layers * 2 * self.d_model * length
        matrix = self.d_model**2 // self.heads_used()  # of all heads
        normaliser = 0 if self.model in MEMORIES else self.d_model
        return self.layers * (matrix * (1 if self.model in ONE_MATRIX else 2) + normaliser)

    def make_transformer(self, num_embeddings: int | None, **options: Any) -> MomentumTransformer:
        """The transformer that the options describe.

        Arguments:
            num_embeddings: tokens of the vocabulary; None: inputs are vectors.
            options: further ones of the model, such as ``output_size`` and ``causal``.
        """
        return make_transformer(
            self.model,
            num_embeddings,
            momentum=self.momentum,
            step_size=self.step_size,
            connection_momentum=self.connection_momentum,
            d_model=self.d_model,
            nhead=self.heads_used(),
            num_layers=self.layers,
            dim_feedforward=self.feedforward,
            dropout=self.dropout,
            positions=cast(Literal["auto", "sinusoidal"], self.positions),
            **options,
        )
