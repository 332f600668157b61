"""Transformers as language models with momentum over depth, and their controls.

The text is Tiny Shakespeare by characters if ``HBNODE_DATA`` has tinyshakespeare/input.txt, otherwise a simulated one,
or that of --data. It is read in shuffled windows, which begin at another place in every epoch, and AdamW trains the
model. The weights of the epoch with the least validation loss are tested once, in the end.

--connection is how a layer joins the residual stream:

- "residual", "momentum" (equation 75 of Wang et al., 2022), "momentum_state" (what their code runs), "adaptive"
  (equations 76 and 77), "heavy_ball" and "nesterov" (streams with learned scalars, arXiv:2601.23236 and 2605.24425).
- "scaled": the heavy-ball stream without momentum: residual, with a learned step size of each sublayer.
- "wider" and "deeper": residual, with one layer less or more and a feedforward block whose width gives the number of
  parameters of "nesterov", to the nearest unit.

Momentum over depth adds at most five scalars per layer to "residual", less than one unit of a feedforward block. So
"residual" is the control of equal width.
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
LARGEST = "nesterov"  # the connection with the most scalars


@dataclasses.dataclass(frozen=True)
class DepthConfig(TaskConfig):
    """Options of a transformer as a language model."""

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
        """Return the transformer of these options.

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
