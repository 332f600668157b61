"""Transformers as language models, with momentum over depth and what it is to be compared with.

The text is Tiny Shakespeare by characters where ``HBNODE_DATA`` has tinyshakespeare/input.txt, else a made-up one, or
what --data says. It is read in windows, which begin elsewhere in every epoch; AdamW trains on them in any order. The
epoch with the least validation loss gives the weights that are tested, once, in the end.

The variants of --connection are how a layer joins the stream:

- "residual", "momentum" (equation 75 of Wang et al., 2022), "momentum_state" (what their code runs), "adaptive"
  (equations 76 and 77), "heavy_ball" and "nesterov" (streams with learned scalars, arXiv:2601.23236 and 2605.24425).
- "scaled": the heavy-ball stream without momentum: residual, with a learned step size of each sublayer.
- "wider" and "deeper": residual, with one layer less or more and a feedforward block whose width gives as many
  parameters as "nesterov" has, to the nearest unit.

Momentum over depth has at most five scalars a layer more than "residual", less than one unit of a feedforward block:
at the same depth "residual" is itself the control of equal width.
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
    vocabulary: int = option(5000, "words, or characters, to tell apart; 0: all")
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
        """Refuse what no run can have."""
        super().check()
        if self.d_model % (2 * self.heads):
            raise ValueError(f"--d-model must be a multiple of twice --heads, got {self.d_model} and {self.heads}")
        if self.layers == 1 and "wider" in self.chosen():
            raise ValueError("--connection wider has a layer less, and --layers is 1. Fix: --layers 2.")
        if self.vocabulary == 1:
            raise ValueError("--vocabulary must be 0, for all words, or at least 2, got 1")

    def make_model(self, words: int) -> nn.Module:
        """The transformer that the options describe.

        Arguments:
            words: how many there are.
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
