"""Transformer language models with momentum over depth, and controls without it.

The text is Tiny Shakespeare by characters if ``HBNODE_DATA`` has tinyshakespeare/input.txt, otherwise a simulated text;
--data selects another text. AdamW trains the model on shuffled windows of the text, whose offset changes in every
epoch. The weights of the epoch with the smallest validation loss are tested once, at the end.

--connection selects how a layer's output is added to the residual stream:

- "residual", "momentum" (equation 75 of Wang et al., 2022), "momentum_state" (what their code runs), "adaptive"
  (equations 76 and 77), "heavy_ball" and "nesterov" (streams with learned scalars, arXiv:2601.23236 and 2605.24425).
- "scaled": "heavy_ball" without momentum, which is a residual connection with a learned step size for each sublayer.
- "wider" and "deeper": residual connections with one layer less or more. The width of the feedforward block is chosen
  so that the number of parameters is closest to that of "nesterov".

Momentum over depth adds at most five scalars per layer to "residual", less than one unit of a feedforward block. So
"residual" is the control with equal width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

import hbnode
from tasks.common.config import TaskConfig, option
from tasks.common.run import count_parameters
from tasks.data.text import SOURCES

CONNECTIONS = ("residual", "momentum", "momentum_state", "adaptive", "heavy_ball", "nesterov")
CONTROLS = ("scaled", "wider", "deeper")
LARGEST = "nesterov"  # the connection with the most additional scalars


@dataclasses.dataclass(frozen=True)
class DepthConfig(TaskConfig):
    """Command-line options of a transformer language model."""

    models = (*CONNECTIONS, *CONTROLS)
    swept = "connection"
    positive = "context d_model heads layers feedforward"

    model: str = option("transformer", "transformer; other models have other options", ("transformer",))
    connection: str = option("residual", "one of {models}, several with commas between, or all")
    epochs: int = option(2, "passes over the training text", may_change=True)
    batch_size: int = option(16, "windows of the text in a step")
    lr: float = option(2e-3, "AdamW's learning rate")
    schedule: str = option("cosine", "learning rate: constant, cosine or step", ("constant", "cosine", "step"))
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    data: str = option("auto", "the text; auto is Tiny Shakespeare if it is there", SOURCES)
    vocabulary: int = option(5000, "different words, or characters; 0: all")
    train_size: int = option(500_000, "words of the training text; 0: all")
    test_size: int = option(0, "words of the validation text and of the test; 0: all")
    context: int = option(64, "words of a window")
    d_model: int = option(64, "features of a word")
    heads: int = option(4, "heads")
    layers: int = option(6, "layers; wider has one less, deeper one more")
    feedforward: int = option(256, "hidden units of a layer's network; wider and deeper have their own")
    dropout: float = option(0.0, "dropout", below=1)
    weight_decay: float = option(0.01, "AdamW's weight decay")

    def check(self) -> None:
        """Raise ValueError for options that cannot be combined."""
        super().check()
        if self.d_model % (2 * self.heads):
            raise ValueError(f"--d-model must be a multiple of twice --heads, got {self.d_model} and {self.heads}")
        if self.layers == 1 and "wider" in self.chosen():
            raise ValueError("--connection wider has a layer less, and --layers is 1. Fix: --layers 2.")

    def make_model(self, words: int) -> nn.Module:
        """Return the transformer that the options describe.

        Arguments:
            words: the size of the vocabulary.
        """
        if self.connection not in ("wider", "deeper"):
            return self._make(words, self.connection, self.layers, self.feedforward)
        layers = self.layers + (1 if self.connection == "deeper" else -1)
        with torch.device("meta"):
            wanted = count_parameters(self._make(words, LARGEST, self.layers, self.feedforward))
            one, two = (count_parameters(self._make(words, "residual", layers, width)) for width in (1, 2))
        return self._make(words, "residual", layers, max(1, 1 + round((wanted - one) / (two - one))))

    def _make(self, words: int, connection: str, layers: int, feedforward: int) -> nn.Module:
        options: dict[str, Any] = {"connection": connection, "attention": "softmax"}
        if connection == "scaled":
            options |= {"connection": "heavy_ball", "connection_momentum": 0.0}
        return hbnode.nn.MomentumTransformer(
            words,
            self.d_model,
            self.heads,
            layers,
            feedforward,
            self.dropout,
            activation="gelu",
            positions="rotary",
            norm_first=True,
            **options,
        )
