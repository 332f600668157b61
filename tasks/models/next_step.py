"""Options and data of tasks in which a recurrent layer predicts the next step of a sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from tasks.common.config import option
from tasks.common.train import OPTIMIZER_TITLES, Objective, OptimizerConfig, Samples
from tasks.models.recurrent import RecurrentConfig, title

C = TypeVar("C", bound="NextStepConfig")


@dataclasses.dataclass(frozen=True)
class NextStepConfig(RecurrentConfig, OptimizerConfig):
    """Options of recurrent layers and of optimizers, and a budget of seconds."""

    # The values of options that are 0, by optimizer; "" are those of all others.
    settings: ClassVar[Mapping[str, Mapping[str, int]]] = {}

    batch_size: int = option(0, "sequences in a step; 0: by the optimizer, see above")
    max_cg: int = option(60, "hf: steps of conjugate gradients in an iteration")
    seconds: float = option(
        0.0, "seconds of training after which a run ends with its epoch; 0: no limit", may_change=True
    )

    def check(self) -> None:
        """Check the options with the optimizer's settings."""
        super(NextStepConfig, self.filled()).check()

    def filled(self: C) -> C:
        """Return the options with the optimizer's settings instead of 0."""
        settings = self.settings.get(self.optimizer, self.settings[""])
        values: dict[str, Any] = {name: getattr(self, name) or value for name, value in settings.items()}
        return dataclasses.replace(self, **values)

    def is_over(self, rows: Sequence[Mapping[str, float]]) -> bool:
        """Return whether the seconds of training in these rows of the metrics reach the budget."""
        return 0 < self.seconds <= sum(row["seconds"] for row in rows)

    @property
    def name(self) -> str:
        """Layer, optimizer and seed, in the name of a run's folder."""
        return f"{self.cell}-{self.model}-{self.optimizer}-seed{self.seed}"

    @property
    def title(self) -> str:
        """Layer and optimizer in titles."""
        return f"{title(self.model, self.cell)}, {OPTIMIZER_TITLES[self.optimizer]}"


def as_batch(series: Sequence[Tensor]) -> Samples:
    """Return series as tensors of equal length.

    Arguments:
        series: the steps of each, (steps, features).

    Returns:
        Steps (N, longest, features), padded with zeros; the number of predicted steps, all except the first, (N,); and
        N divided by the total of these numbers, (N,). The mean over the series of this factor times a sum over steps is
        the mean over all steps.
    """
    lengths = torch.tensor([len(x) - 1 for x in series])
    share = torch.full((len(series),), len(series) / lengths.sum().item())
    return nn.utils.rnn.pad_sequence(list(series), batch_first=True), lengths, share


def is_predicted(lengths: Tensor, steps: int) -> Tensor:
    """Return which of the steps after the first are no padding, (N, steps), from the numbers of predicted steps."""
    return torch.arange(steps, device=lengths.device) < lengths[:, None]


def trimmed(batch: Samples) -> tuple[Tensor, Tensor]:
    """Return the steps before and after each, (N, T, features) floats, without common padding."""
    x, lengths, _ = batch
    x = x[:, : int(lengths.max()) + 1].float()
    return x[:, :-1], x[:, 1:]


def all_steps(batch: Samples) -> tuple[Tensor, Tensor]:
    """Return the steps before and after each that are no padding, (steps, features)."""
    before, after = trimmed(batch)
    valid = is_predicted(batch[1], before.shape[1])
    return before[valid], after[valid]


class NextStep(Objective):
    """A loss of the steps after the first."""

    def parts(self, batch: Samples) -> tuple[Samples, Tensor, Tensor]:
        """Return steps, the steps after each, and the mask of these."""
        x, targets = trimmed(batch)
        return (x,), targets, is_predicted(batch[1], x.shape[1])[..., None]
