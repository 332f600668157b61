"""Adding: return the sum of the two marked numbers in a long sequence.

Appendix A.4 of Nguyen et al., MomentumRNN (2020), figure 4, after Hochreiter and Schmidhuber (1997). A sequence has T
uniform numbers in [0, 1) and T markers, which are 1 at one position in each half and otherwise 0. The target at the
last step is the sum of the two marked numbers. Always predicting the mean, 1, has a squared error of 1/6, the trivial
loss. In the paper, LSTM and MomentumLSTM end near the trivial loss for T = 750 (0.162).

The preset "750" has the sizes of table 6, Adam, and the hyperparameters of tables 7 to 10. NAG and adaptive momentum
are not in the tables; they use the step size of momentum. In the paper the two halves share the number in the middle;
here they do not overlap. Every batch is newly drawn, and an epoch is --iterations batches; the paper does not give this
number. The test set is the same for all runs. The default T is small enough for two cores.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from tasks.common.config import option
from tasks.common.run import Run, command
from tasks.common.train import Samples, fit, fresh_data
from tasks.models.recurrent import OSCILLATORS, VARIANTS, LayerWithReadout, RecurrentConfig, RuleOptions, title

TRIVIAL_LOSS = 1 / 6

TABLE = {
    "momentum": RuleOptions(momentum=0.9, step_size=2.0),
    "adam": RuleOptions(momentum=0.6, step_size=2.0, beta=0.999),
    "rmsprop": RuleOptions(step_size=2.0, beta=0.999),
    "sr": RuleOptions(step_size=0.9, restart=100),
}


@dataclasses.dataclass(frozen=True)
class AddingConfig(RecurrentConfig):
    """Command-line options of the adding task."""

    models = (*VARIANTS, OSCILLATORS)
    positive = "iterations test_size"

    epochs: int = option(30, "epochs, each of --iterations batches", may_change=True)
    iterations: int = option(100, "batches in an epoch")
    batch_size: int = option(50, "sequences in a batch")
    hidden: int = option(64, "size of the hidden state")
    length: int = option(200, "numbers in a sequence, T", least=2)
    test_size: int = option(1000, "test sequences")

    @property
    def memory(self) -> int:
        """The length of the sequences, which is the number of steps to remember."""
        return self.length


PRESETS = {"750": "--length 750 --hidden 128 --lr 0.0002 --epochs 1200"}


def problems(count: int, length: int, generator: torch.Generator) -> Samples:
    """Draw numbers (count, length), and the indices (count, 2) of the two marked numbers."""
    numbers = torch.rand(count, length, generator=generator)
    half = length // 2
    first = torch.randint(half, (count,), generator=generator)
    second = torch.randint(half, length, (count,), generator=generator)
    return numbers, torch.stack([first, second], dim=1)


def squared_error(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean squared error of the predicted sums."""
    numbers, marked = batch
    marks = torch.zeros_like(numbers).scatter(1, marked, 1.0)
    total = numbers.gather(1, marked).sum(1, keepdim=True)
    return nn.functional.mse_loss(model(torch.stack([numbers, marks], dim=2)), total), {}


def train(config: AddingConfig) -> None:
    """Train one model with one seed."""
    run = Run("adding", config, f"{config.preset}-{config.length}-{config.cell}-{config.model}-seed{config.seed}")
    model = LayerWithReadout(config.make_layer(2, TABLE, batch_first=True), config.hidden, 1, last=True)
    run.announce(model, title(config.model, config.cell), f"trivial loss {TRIVIAL_LOSS:.4g}")
    fresh, test = fresh_data(config, lambda count, generator: problems(count, config.length, generator))
    fit(run, model, fresh, test, squared_error, eval_batch_size=config.batch_size)
    run.finish(model, trivial_loss=TRIVIAL_LOSS, rule=dataclasses.asdict(config.rule_options(TABLE)))


main = command(AddingConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
