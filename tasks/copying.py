"""Copying: recalling ten characters after a long pause.

Appendix A.4 of Nguyen et al., MomentumRNN (2020), figures 4 and 10. An input sequence is one-hot encoded: ten random
characters out of eight, L blanks, a start symbol and nine more blanks. The target sequence is L + 10 blanks, then the
ten characters. The loss is the mean cross-entropy over all L + 20 outputs. A network without memory can predict the
blanks and guess the characters. Its loss is the trivial loss 10 ln 8 / (L + 20), which every run prints. For the preset
"2k" the trivial loss is 0.0103. The paper reports 0.010 for its LSTM and 0.009 for its MomentumLSTM on this problem;
only a clearly lower loss shows that a network remembers.

The presets "1k" and "2k" use the sizes of table 6, RMSprop with alpha 0.9, and the hyperparameters of tables 7 to 10.
Lengths L below 2000 use the hyperparameters of 1K. NAG and adaptive momentum are not in the tables; they use the step
size of momentum. Every batch is newly drawn, and an epoch is --iterations batches. The paper's 7000 training iterations
are interpreted as batches, as in the code that the paper follows. The test set is the same for all runs. The default
network, batch size and L are small enough for two CPU cores.
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
from tasks.common.train import Samples, accuracy, fit, fresh_data, made_by
from tasks.models.recurrent import OSCILLATORS, VARIANTS, LayerWithReadout, RecurrentConfig, RuleOptions, title

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
    """Command-line options of the copying task."""

    models = (*VARIANTS, OSCILLATORS)
    positive = "iterations test_size"

    epochs: int = option(30, "epochs, each of --iterations batches", may_change=True)
    iterations: int = option(100, "batches in an epoch")
    batch_size: int = option(32, "sequences in a batch")
    hidden: int = option(64, "size of the hidden state")
    length: int = option(200, "L, the number of blanks between the characters and the start symbol")
    test_size: int = option(1000, "test sequences")

    @property
    def memory(self) -> int:
        """The number of time steps from a character to its recall."""
        return self.length + RECALLED

    def table(self) -> Mapping[str, RuleOptions]:
        """Return the hyperparameters of the paper for this length."""
        return TABLES["2k" if self.length >= 2000 else "1k"]

    @property
    def trivial_loss(self) -> float:
        """The loss of a network without memory, which predicts the blanks and guesses the characters."""
        return RECALLED * math.log(CHARACTERS) / (self.length + 2 * RECALLED)


_PAPER = "--hidden 190 --lr 0.0002 --batch-size 128 --epochs 70"
PRESETS = {"1k": f"--length 1000 {_PAPER}", "2k": f"--length 2000 {_PAPER}"}


def characters(count: int, generator: torch.Generator) -> Samples:
    """Draw the characters to remember, a tensor (count, 10)."""
    return (torch.randint(CHARACTERS, (count, RECALLED), generator=generator),)


def sequences(remembered: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as symbol indices, each a tensor (batch, length + 20).

    Arguments:
        remembered: characters (batch, 10).
        length: number of blanks after the characters.
    """
    blanks = remembered.new_full((len(remembered), length + RECALLED), BLANK)
    x = torch.cat([remembered, blanks], dim=1)
    x[:, length + RECALLED] = START
    return x, torch.cat([blanks, remembered], dim=1)


def cross_entropy(model: nn.Module, batch: Samples, length: int) -> tuple[Tensor, dict[str, float]]:
    """Return the mean cross-entropy of all outputs, and the fraction of characters that are recalled."""
    (remembered,) = batch
    x, target = sequences(remembered, length)
    scores = model(nn.functional.one_hot(x, START + 1).float())
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())
    return loss, accuracy(scores[:, -RECALLED:], remembered)


def train(config: CopyingConfig) -> None:
    """Train one model with one seed."""
    run = Run("copying", config, f"{config.preset}-{config.length}-{config.cell}-{config.model}-seed{config.seed}")
    layer = config.make_layer(START + 1, config.table(), batch_first=True)
    model = LayerWithReadout(layer, config.hidden, BLANK + 1)
    run.announce(model, title(config.model, config.cell), f"trivial loss {config.trivial_loss:.4g}")
    fresh, test = fresh_data(config, characters)
    loss = functools.partial(cross_entropy, length=config.length)
    rmsprop = made_by(torch.optim.RMSprop, lr=config.lr, alpha=0.9)
    fit(run, model, fresh, test, loss, optimizer=rmsprop, eval_batch_size=config.batch_size)
    run.finish(model, trivial_loss=config.trivial_loss, rule=dataclasses.asdict(config.rule_options(config.table())))


main = command(CopyingConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
