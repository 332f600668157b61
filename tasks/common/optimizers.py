"""The optimizers of tasks that compare them, by name, and what a Hessian-free one asks of a loss.

- "adam": torch's.
- "sgd": torch's, with momentum 0.9.
- "soap": SOAP, Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al., arXiv:2409.11321), of the package
  pytorch_optimizer, without weight decay. Of the second-order methods of kept libraries it is the one whose rate and
  moments are Adam's, so that a comparison tells what curvature gains; it takes any weight, where Muon, in torch itself,
  takes matrices only and leaves the rest to Adam.
- "hf": :class:`hbnode.optim.HessianFree`, with structural damping where the loss names hidden states.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import time
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.batches import Samples
from tasks.common.config import TaskConfig, option

TITLES = {"adam": "Adam", "sgd": "SGD with momentum", "soap": "SOAP", "hf": "HF"}
OPTIMIZERS = tuple(TITLES)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SGD_MOMENTUM = 0.9
LossName = Literal["mse", "bce", "cross_entropy"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(TaskConfig):
    """Options of the tasks that compare optimizers."""

    positive: ClassVar[tuple[str, ...]] = (*TaskConfig.positive, "damping", "max_cg")

    optimizer: str = option("adam", "adam, sgd with momentum 0.9, soap of pytorch_optimizer, or hf", OPTIMIZERS)
    curvature_size: int = option(0, "hf: samples of a batch that show the curvature; 0: all")
    damping: float = option(0.1, "hf: lambda at first")
    min_damping: float = option(2e-4, "hf: the least lambda, which keeps structural damping on a plateau")
    structural_damping: float = option(1 / 30, "hf: mu, the factor of lambda on hidden states; 0: none")
    clock: str = option("wall", "what seconds are: of the wall's clock, or of the processor's", tuple(CLOCKS))
    max_cg: int = option(300, "hf: steps of conjugate gradients in an iteration")

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], loss: LossName
    ) -> torch.optim.Optimizer:
        """Return the optimizer that the options describe.

        Arguments:
            parameters: those to train, or groups of them.
            loss: what a Hessian-free optimizer minimises.

        Raises:
            ImportError: if "soap" is asked for and pytorch_optimizer is not installed.
        """
        if self.optimizer == "hf":
            return hbnode.optim.HessianFree(
                parameters,
                loss=loss,
                damping=self.damping,
                min_damping=self.min_damping,
                structural_damping=self.structural_damping,
                max_cg=self.max_cg,
            )
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.lr, momentum=SGD_MOMENTUM)
        if self.optimizer == "soap":
            return _soap(parameters, self.lr)
        return torch.optim.Adam(parameters, lr=self.lr)

    def check(self) -> None:
        """Refuse what no run can have, and what needs a package that is not there."""
        super().check()
        if self.optimizer == "hf" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("--optimizer hf trains in one process. Fix: no torchrun.")
        if self.optimizer == "hf" and self.schedule != "constant":
            raise ValueError(
                f"--schedule {self.schedule} changes a learning rate, and hf has none. Fix: leave it out, or another "
                "--optimizer."
            )
        if self.optimizer == "hf" and self.damping < self.min_damping:
            raise ValueError(
                f"--damping must be at least --min-damping={self.min_damping:g}, got {self.damping:g}. Fix: a smaller "
                "--min-damping."
            )
        if self.optimizer == "soap":
            _soap([nn.Parameter(torch.zeros(1))], 1.0)


def _soap(parameters: Iterable[Any], lr: float) -> torch.optim.Optimizer:
    """SOAP, which is imported here alone."""
    try:
        from pytorch_optimizer import SOAP
    except ImportError as error:
        raise ImportError(
            f"soap needs the package pytorch_optimizer ({error}). Fix: pip install -e '.[peers]', or choose another "
            "--optimizer."
        ) from error
    return SOAP(parameters, lr=lr, weight_decay=0.0)


class Objective(abc.ABC):
    """A loss of outputs and targets, summed over features and steps and averaged over the samples.

    Attributes:
        loss: half the squared error, "mse"; "bce" of logits; or "cross_entropy" of scores, classes last.
        curvature_size: of a Hessian-free optimizer, how many samples of a batch, from its start, show the curvature;
            0: all.
    """

    loss: LossName

    def __init__(self, curvature_size: int = 0) -> None:
        self.curvature_size = curvature_size

    @abc.abstractmethod
    def outputs(
        self, model: nn.Module, batch: Samples, *, with_hidden: bool = False
    ) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Any]:
        """Outputs of a batch and their targets.

        Arguments:
            model: the model.
            batch: samples, the first dimension of each tensor.
            with_hidden: whether hidden states come third, as :meth:`hbnode.optim.HessianFree.step` takes them.
        """

    def means(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Further means to report over a batch."""
        return {}

    def __call__(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a batch, and further means."""
        outputs, targets, *_ = self.outputs(model, batch)
        return self.value(outputs, targets), self.means(outputs.detach(), targets)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of outputs."""
        if self.loss == "mse":
            total = (outputs - targets).square().sum() / 2
        elif self.loss == "bce":
            total = nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")
        else:
            total = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")
        return total / len(outputs)


def hessian_free_step(
    optimizer: hbnode.optim.HessianFree, model: nn.Module, batch: Samples, objective: Objective
) -> tuple[Tensor, dict[str, float]]:
    """One iteration; the loss before it, and its progress.

    Arguments:
        optimizer: takes the step.
        model: is changed.
        batch: shows the loss and its gradient.
        objective: the loss.
    """
    with_hidden = any(group["structural_damping"] > 0 for group in optimizer.param_groups)
    part = tuple(x[: objective.curvature_size] for x in batch)
    loss = optimizer.step(
        lambda: objective.outputs(model, batch, with_hidden=with_hidden),
        (lambda: objective.outputs(model, part, with_hidden=with_hidden)) if 0 < len(part[0]) < len(batch[0]) else None,
    )
    return loss, {name: float(getattr(optimizer.progress, name)) for name in PROGRESS}


PROGRESS = ("damping", "ratio", "cg_iterations", "step_length", "reduction")
