"""Copying a sequence of symbols with transformers: how fast momentum attention learns.

Section 4.4.1 and figure 14 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022):
sequences w 0 w 0 0 ... with 10 different symbols, and a causal transformer that predicts the next one. Loss and
accuracy are those of the second w. Every batch is new; the test set is the same for all runs.

The preset "paper" has the paper's sizes: length 128, 4 layers with 8 heads of 32, batch 64, RAdam at 1e-3, and a tenth
of that after 3,000 steps. The default length, batch and model are small enough for one core.

In addition to softmax, linear and the paper's attention there are linear attention times 1 / (1 - beta), the weight
that momentum gives to all except the last keys, and newer baselines of linear time. Each run prints its number of
parameters and the size of its state. The numbers of parameters are equal except for a few gates. With --equal state the
states are equal too: models with one matrix per head then have half the heads, of twice the size.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from tasks.common.config import option
from tasks.common.run import Run, command
from tasks.common.train import Batches, Samples, Trainer, accuracy, evaluate, fresh_data, made_by
from tasks.data.recall import doubled, is_copied
from tasks.models.contenders import TITLES, ContenderConfig


@dataclasses.dataclass(frozen=True)
class CopyConfig(ContenderConfig):
    """Options of the copy task."""

    positive = "iterations test_size symbols"

    epochs: int = option(20, "epochs, each of --iterations batches", may_change=True)
    iterations: int = option(150, "batches in an epoch")
    batch_size: int = option(32, "sequences in a step")
    drop_after: int = option(2500, "steps after which the learning rate is a tenth; 0: never")
    layers: int = option(2, "layers")
    length: int = option(48, "symbols of a sequence", least=8)
    symbols: int = option(10, "different symbols without the separator")
    test_size: int = option(500, "test sequences")


PRESETS = {
    "paper": "--length 128 --d-model 256 --heads 8 --layers 4 --feedforward 1024 --dropout 0.1 --batch-size 64 "
    "--drop-after 3000 --iterations 200 --epochs 30"
}


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean cross-entropy of the symbols of the second w, and the accuracy."""
    tokens, sizes = batch
    wanted = is_copied(sizes, tokens.shape[1])[:, 1:]
    scores, targets = model(tokens[:, :-1])[wanted], tokens[:, 1:][wanted]
    return nn.functional.cross_entropy(scores, targets), accuracy(scores, targets)


def rate(step: int, drop_after: int) -> float:
    """Return the factor of the learning rate: a tenth after ``drop_after`` steps; 0: never."""
    return 0.1 if 0 < drop_after <= step else 1.0


def train(config: CopyConfig) -> None:
    """Train one model with one seed."""
    run = Run("transformer_copy", config, f"{config.preset}-{config.length}-{config.model}-seed{config.seed}")
    model = config.make_transformer(1 + config.symbols)
    state = config.state_size(config.length)
    run.announce(model, TITLES[config.model], f"state of {state} numbers after {config.length} symbols")
    fresh, test = fresh_data(config, lambda count, generator: doubled(count, config.length, config.symbols, generator))
    batches = Batches(run, fresh, rate=lambda step: rate(step, config.drop_after))
    trainer = Trainer(run, model, batches, cross_entropy, made_by(torch.optim.RAdam, lr=config.lr))
    trainer.fit(lambda: evaluate(run, model, test, cross_entropy, "test"))
    run.finish(model, state=state)


main = command(CopyConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
