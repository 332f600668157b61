"""What the tasks of recurrent layers share that predict the next step of a sequence: options, data, model, training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from hbnode.optim import tanh_hidden
from tasks.common import train as training
from tasks.common.config import option
from tasks.common.run import Run
from tasks.common.train import Batches, FreshData, MakeOptimizer, Objective, OptimizerConfig, Samples, Trainer
from tasks.models.recurrent import RecurrentConfig, RuleOptions, title

C = TypeVar("C", bound="NextStepConfig")


@dataclasses.dataclass(frozen=True)
class NextStepConfig(RecurrentConfig, OptimizerConfig):
    """Options of these tasks: those of recurrent layers and of optimizers, and a budget."""

    # Of each optimizer, the values of options that are 0; those of "" are every other's.
    settings: ClassVar[Mapping[str, Mapping[str, int]]] = {}

    batch_size: int = option(0, "sequences in a step; 0: by the optimizer, see above")
    max_cg: int = option(60, "hf: steps of conjugate gradients in an iteration")
    seconds: float = option(0.0, "seconds of training after which a run ends with its epoch; 0: none", may_change=True)

    def check(self) -> None:
        """Refuse what no run can have, with the optimizer's settings."""
        super(NextStepConfig, self.filled()).check()

    def filled(self: C) -> C:
        """The options with the optimizer's settings in place of 0."""
        settings = self.settings.get(self.optimizer, self.settings[""])
        values: dict[str, Any] = {name: getattr(self, name) or value for name, value in settings.items()}
        return dataclasses.replace(self, **values)

    def make_trainer(
        self,
        run: Run,
        model: nn.Module,
        train: Samples | FreshData,
        objective: Objective,
        optimizer: MakeOptimizer | None = None,
    ) -> Trainer:
        """What trains a model on shuffled batches.

        Arguments:
            run: where to write.
            model: trained in place.
            train: the training data, or how to make those of an epoch.
            objective: the loss.
            optimizer: makes the optimizer of the model; :meth:`make_optimizer` if not given.
        """
        make = optimizer or (lambda model: self.make_optimizer(model.parameters(), objective.loss))
        return Trainer(run, model, Batches(run, train), objective, make)

    def is_over(self, rows: Sequence[Mapping[str, float]]) -> bool:
        """Whether the seconds of training in these rows of the metrics are spent."""
        return 0 < self.seconds <= sum(row["seconds"] for row in rows)

    @property
    def name(self) -> str:
        """Of a run's folder: layer, optimizer, seed."""
        return f"{self.cell}-{self.model}-{self.optimizer}-seed{self.seed}"

    @property
    def title(self) -> str:
        """Layer and optimizer, for people."""
        return f"{title(self.model, self.cell)}, {training.OPTIMIZER_TITLES[self.optimizer]}"


def as_batch(series: Sequence[Tensor]) -> Samples:
    """Series as tensors of equal length.

    Arguments:
        series: the steps of each, (steps, features).

    Returns:
        Steps (N, longest, features), zero after the last one; how many are predicted, (N,): all but the first; and N
        divided by all these steps, (N,), so that a mean over the series of its product with sums is a mean over steps.
    """
    lengths = torch.tensor([len(x) - 1 for x in series])
    share = torch.full((len(series),), len(series) / lengths.sum().item())
    return nn.utils.rnn.pad_sequence(list(series), batch_first=True), lengths, share


def is_predicted(lengths: Tensor, steps: int) -> Tensor:
    """Whether each of so many steps after the first counts, (N, steps), from how many are predicted."""
    return torch.arange(steps, device=lengths.device) < lengths[:, None]


class NextStep(nn.Module):
    """A recurrent layer and a linear readout of its h.

    Arguments:
        config: the options.
        features: of a step.
        table: values of the rules, see :meth:`RecurrentConfig.rule_options`.
        options: further ones of the layer.
    """

    def __init__(
        self, config: RecurrentConfig, features: int, table: Mapping[str, RuleOptions], **options: Any
    ) -> None:
        super().__init__()
        self.layer = config.make_layer(features, table, batch_first=True, **options)
        self.readout = nn.Linear(config.hidden, features)
        self.is_tanh = config.cell == "rnn"

    def forward(self, x: Tensor) -> Tensor:
        """Steps (batch, T, features) -> what follows each, (batch, T, features)."""
        return self.readout(self.layer(x)[0])

    def with_hidden(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs, and what structural damping acts on: h, and the weights of its squared changes.

        Of a tanh RNN these weights are 1 / (1 - h²), see :func:`hbnode.optim.tanh_hidden`, of other layers 1.
        """
        h, _ = self.layer(x)
        return self.readout(h), tanh_hidden(h) if self.is_tanh else (h, torch.ones_like(h))
