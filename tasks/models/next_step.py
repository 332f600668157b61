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
    """Options of recurrent layers, of optimizers, and of a limited training time."""

    # The values that replace options of 0, by optimizer; "" stands for all other optimizers.
    settings: ClassVar[Mapping[str, Mapping[str, int]]] = {}

    batch_size: int = option(0, "sequences in a batch; 0: depends on the optimizer, see above")
    max_cg: int = option(60, "hf: conjugate-gradient iterations per step")
    seconds: float = option(
        0.0, "training seconds after which a run ends, at the end of an epoch; 0: no limit", may_change=True
    )

    def check(self) -> None:
        """Check the options after replacing zeros by the optimizer's defaults."""
        super(NextStepConfig, self.filled()).check()

    def filled(self: C) -> C:
        """Return the options, with each 0 replaced by the optimizer's default."""
        settings = self.settings.get(self.optimizer, self.settings[""])
        values: dict[str, Any] = {name: getattr(self, name) or value for name, value in settings.items()}
        return dataclasses.replace(self, **values)

    def is_over(self, rows: Sequence[Mapping[str, float]]) -> bool:
        """Return whether the training time in these rows of metrics reaches the limit."""
        return 0 < self.seconds <= sum(row["seconds"] for row in rows)

    @property
    def name(self) -> str:
        """The layer, the optimizer and the seed, as the name of the run folder."""
        return f"{self.cell}-{self.model}-{self.optimizer}-seed{self.seed}"

    @property
    def title(self) -> str:
        """The layer and the optimizer, for titles."""
        return f"{title(self.model, self.cell)}, {OPTIMIZER_TITLES[self.optimizer]}"


def as_batch(series: Sequence[Tensor]) -> Samples:
    """Return series as tensors of equal length.

    Arguments:
        series: list of tensors (steps, features).

    Returns:
        Three tensors. The first contains the steps, (N, longest, features), padded with zeros. The second contains the
        number of predicted steps (all except the first) of each series, (N,). The third repeats a factor, N divided by
        the total number of predicted steps, (N,). It turns the sum over the steps of a series into a term whose mean
        over the series is the mean over all steps.
    """
    lengths = torch.tensor([len(x) - 1 for x in series])
    share = torch.full((len(series),), len(series) / lengths.sum().item())
    return nn.utils.rnn.pad_sequence(list(series), batch_first=True), lengths, share


def is_predicted(lengths: Tensor, steps: int) -> Tensor:
    """Return a mask (N, steps) that is True for predicted steps and False in padding."""
    return torch.arange(steps, device=lengths.device) < lengths[:, None]


def trimmed(batch: Samples) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, (N, T, features) floats: all steps except the last and all except the first."""
    x, lengths, _ = batch
    x = x[:, : int(lengths.max()) + 1].float()
    return x[:, :-1], x[:, 1:]


def all_steps(batch: Samples) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all series without padding, as tensors (steps, features)."""
    before, after = trimmed(batch)
    valid = is_predicted(batch[1], before.shape[1])
    return before[valid], after[valid]


class NextStep(Objective):
    """A loss of the predictions of all steps after the first."""

    def parts(self, batch: Samples) -> tuple[Samples, Tensor, Tensor]:
        """Return the inputs, the targets, and the mask of the targets."""
        x, targets = trimmed(batch)
        return (x,), targets, is_predicted(batch[1], x.shape[1])[..., None]
