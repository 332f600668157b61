"""Copying: recalling ten characters after a long pause.

Appendix A.4 of Nguyen et al., MomentumRNN (2020), figures 4 and 10: ten of eight characters, L blanks, a start symbol
and nine more blanks go in, one-hot; L + 10 blanks and the ten characters are to come out. The loss is the mean
cross-entropy over all L + 20 outputs. A network without memory can say blanks and then guess: 10 ln 8 / (L + 20), the
trivial loss, printed and drawn with every run. It is 0.0103 for 2K, where the paper's LSTM ends at 0.010 and its
MomentumLSTM at 0.009; only what is well below it has learned to remember.

The presets "1k" and "2k" have the sizes of table 6, RMSprop with alpha 0.9, and the rules of tables 7 to 10, of 1K
below L = 2000. For NAG and adaptive momentum, which the tables do not have, the step size is that of momentum. Every
batch is new; an "epoch" is --iterations of them, and the paper's 7000 are taken as batches, as in the code that it
follows. The test set is the same for all runs. By default, network, batch and L are small enough for two cores.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tasks.common.config import option
from tasks.common.run import Run, command
from tasks.common.train import Samples, accuracy, fit, fresh_data
from tasks.models.recurrent import OSCILLATORS, VARIANTS, RecurrentConfig, RuleOptions, title

CHARACTERS = 8
RECALLED = 10
BLANK, START = CHARACTERS, CHARACTERS + 1

_OTHERS = {
    "adam": RuleOptions(momentum=0.6, step_size=2.0, beta=0.999),
    "rmsprop": RuleOptions(step_size=2.0, beta=0.999),
    "sr": RuleOptions(step_size=0.9, restart=100),
}
TABLES = {
    "1k": {"momentum": RuleOptions(momentum=0.6, step_size=0.9), **_OTHERS},
    "2k": {"momentum": RuleOptions(momentum=0.9, step_size=2.0), **_OTHERS},
}


@dataclasses.dataclass(frozen=True)
class CopyingConfig(RecurrentConfig):
    """Options of copying; an epoch is some fresh batches."""

    models = (*VARIANTS, OSCILLATORS)
    positive = "iterations test_size"

    epochs: int = option(30, "epochs, each of --iterations batches", may_change=True)
    iterations: int = option(100, "batches in an epoch")
    batch_size: int = option(32, "sequences in a step")
    hidden: int = option(64, "size of h")
    length: int = option(200, "blanks between the characters and the start symbol, L")
    test_size: int = option(1000, "test sequences")

    @property
    def memory(self) -> int:
        """Samples from a character to its recall."""
        return self.length + RECALLED

    def table(self) -> Mapping[str, RuleOptions]:
        """The rules of the length."""
        return TABLES["2k" if self.length >= 2000 else "1k"]

    @property
    def trivial_loss(self) -> float:
        """Of blanks and then a guess, which needs no memory."""
        return RECALLED * math.log(CHARACTERS) / (self.length + 2 * RECALLED)


_PAPER = {"hidden": 190, "lr": 2e-4, "batch_size": 128, "epochs": 70}
PRESETS = {
    "1k": "--length 1000 --hidden 190 --lr 0.0002 --batch-size 128 --epochs 70",
    "2k": "--length 2000 --hidden 190 --lr 0.0002 --batch-size 128 --epochs 70",
}


def characters(count: int, generator: torch.Generator) -> Samples:
    """Characters to remember, of one sequence each row, (count, 10)."""
    return (torch.randint(CHARACTERS, (count, RECALLED), generator=generator),)


def sequences(remembered: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """What goes in and what is to come out, as numbers of symbols, (batch, length + 20) both.

    Arguments:
        remembered: characters (batch, 10).
        length: blanks after them.
    """
    blanks = remembered.new_full((len(remembered), length + RECALLED), BLANK)
    x = torch.cat([remembered, blanks], dim=1)
    x[:, length + RECALLED] = START
    return x, torch.cat([blanks, remembered], dim=1)


class Copier(nn.Module):
    """A recurrent layer on one-hot symbols, and a linear readout of each h."""

    def __init__(self, config: CopyingConfig) -> None:
        super().__init__()
        self.layer = config.make_layer(START + 1, config.table(), batch_first=True)
        self.head = nn.Linear(config.hidden, BLANK + 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (batch, T, 9) of the characters and the blank, from symbols (batch, T)."""
        output, _ = self.layer(nn.functional.one_hot(x, START + 1).to(self.head.weight.dtype))
        return self.head(output)


def cross_entropy(model: nn.Module, batch: Samples, length: int) -> tuple[Tensor, dict[str, float]]:
    """Mean cross-entropy of all outputs, and the share of the characters that is recalled."""
    (remembered,) = batch
    x, target = sequences(remembered, length)
    scores = model(x)
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())
    return loss, accuracy(scores[:, -RECALLED:], remembered)


def rmsprop(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """RMSprop with the paper's alpha."""
    return torch.optim.RMSprop(model.parameters(), lr=lr, alpha=0.9)


def train(config: CopyingConfig) -> None:
    """Train one model with one seed."""
    run = Run("copying", config, f"{config.preset}-{config.length}-{config.cell}-{config.model}-seed{config.seed}")
    model = Copier(config)
    run.announce(model, title(config.model, config.cell), f"trivial loss {config.trivial_loss:.4g}")
    fresh, test = fresh_data(config, characters)
    loss = functools.partial(cross_entropy, length=config.length)
    optimizer = functools.partial(rmsprop, lr=config.lr)
    fit(run, model, fresh, test, loss, optimizer=optimizer, eval_batch_size=config.batch_size)
    run.finish(model, trivial_loss=config.trivial_loss, rule=dataclasses.asdict(config.rule_options(config.table())))


main = command(CopyingConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
