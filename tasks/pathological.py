"""Synthetic problems that need a long memory, for any model and optimizer, with a limited training time.

Section 2 of the supplement of Martens and Sutskever, Learning Recurrent Neural Networks with Hessian-Free Optimization
(2011); ``tasks/data/pathological.py`` defines the problems. A run succeeds and ends when the model answers fewer than 1
% of the test sequences wrongly; a real-valued answer is wrong if its error exceeds 0.04. All runs have the same 10,000
test sequences. A test evaluates the first 1,000 sequences, and all 10,000 only if fewer than 2 % of the first 1,000 are
wrong. The problem "memorization_5" (five bits) has only 32 sequences; every batch and the test set consist of all of
them.

--seconds limits the training time: gradients, curvature products and optimizer steps, without tests and data
generation. A resumed run continues the count. The time is checked after each test, so a run may exceed the limit a
little. On a CPU it is processor time.

All models have 100 hidden units, as in the supplement; their numbers of parameters differ and are printed. The loss is
summed over the time steps and averaged over the sequences. :data:`SETTINGS` and :data:`RATES` contain the default batch
sizes, learning rates and numbers of steps between two tests. The learning rates of Adam and SOAP were chosen from 1e-3,
3e-3 and 1e-2 (for tanh, LSTM and GRU with Adam also 3e-4), by runs of 20 seconds with one seed on "addition" and
"memorization_5" at T = 20. The best rate solves the most problems; ties are broken by the time, then by the error.
Gradient norms are clipped to 1, except in Hessian-free optimization. The initial lambda of Hessian-free optimization is
0.01, with at most 60 iterations of conjugate gradients; with the supplement's lambda of 0.1 training leaves the first
plateau later. The problem "memorization_5" uses the supplement's values, lambda 0.1 and 300 iterations; with 0.01 and
60 training fails at T = 100. Without structural damping the initial lambda is three times as large, as in the
supplement.

    python -m tasks.pathological --problem addition --length 50 --model tanh --optimizer hf --seconds 300 --seeds 3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

import hbnode
from tasks.common import train as training
from tasks.common.config import option
from tasks.common.run import Run, command
from tasks.common.train import Batches, Objective, OptimizerConfig, Samples, Trainer, evaluate, fresh_data
from tasks.data.pathological import PROBLEMS, Problem
from tasks.models.sequence_models import LAYERS, SequenceModel

SUCCESS = 0.01  # a run succeeds below this share of wrong test sequences
TESTED_FIRST = 1_000
EVAL_BATCH_SIZE = 500

# Batch size, number of samples for the curvature, and number of steps between two tests, for each optimizer.
SETTINGS: dict[str, dict[str, int]] = {
    "adam": {"batch_size": 100, "iterations": 50},
    "soap": {"batch_size": 100, "iterations": 50},
    "hf": {"batch_size": 2_000, "curvature_size": 500, "iterations": 1},
}
# Learning rates by optimizer and model; "" stands for all other models. The module docstring says how they were chosen.
RATES: dict[str, dict[str, float]] = {
    "adam": {"": 3e-3, "tanh": 1e-3, "lstm": 1e-2, "lstm_chrono": 1e-2, "gru": 1e-2, "dtriv": 1e-2},
    "soap": {"": 3e-3, "gru": 1e-2},
    "hf": {"": 1.0},  # not used
}
# For Hessian-free optimization: the initial lambda and the largest number of conjugate-gradient iterations.
SUPPLEMENT = (0.1, 300)
HESSIAN_FREE = (0.01, 60)
ORTHOGONAL = 0.1  # learning rate of DTRIV's orthogonal weight, as a factor of the rate of its other weights


@dataclasses.dataclass(frozen=True)
class PathologicalConfig(OptimizerConfig):
    """Command-line options of the pathological problems. An epoch is the optimizer steps between two tests."""

    models = tuple(LAYERS)
    positive = "iterations seconds hidden test_size"

    problem: str = option("addition", "the problem", PROBLEMS)
    length: int = option(50, "T, the approximate number of steps")
    model: str = option("tanh", "one of {models}, several with commas between, or all")
    seconds: float = option(300.0, "seconds of training after which an unsuccessful run ends", may_change=True)
    epochs: int = option(
        1_000_000, "largest number of tests of a run, one after every --iterations steps", may_change=True
    )
    iterations: int = option(0, "steps between two tests; 0: 1 for hf, 50 for others")
    batch_size: int = option(0, "sequences in a batch; 0: the value in SETTINGS; memorization_5 always has 32")
    curvature_size: int = option(0, "hf: sequences for the curvature; 0: the value in SETTINGS, at most the batch size")
    lr: float = option(0.0, "learning rate; 0: the value in RATES for the optimizer and the model")
    clip: float = option(1.0, "largest norm of the gradient, not for hf; 0 does not clip")
    hidden: int = option(100, "size of the hidden state")
    damping: float = option(0.0, "hf: initial lambda; 0: the default of the problem, see above")
    max_cg: int = option(0, "hf: conjugate-gradient iterations per step; 0: the default of the problem, see above")
    test_size: int = option(10_000, "number of test sequences; memorization_5 always has 32")

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        Problem(self.problem, self.length)
        OptimizerConfig.check(self.filled())
        if self.schedule == "cosine" and self.epochs == PathologicalConfig.epochs:
            raise ValueError("--schedule cosine falls to 0 within --epochs. Fix: give --epochs.")

    def filled(self) -> PathologicalConfig:
        """Return the options, with each 0 replaced by the default for this optimizer and model."""
        settings, rates = SETTINGS[self.optimizer], RATES[self.optimizer]
        every = Problem(self.problem, self.length).every()
        size = len(every[0]) if every else self.batch_size or settings["batch_size"]
        damping, max_cg = self.hessian_free()
        return dataclasses.replace(
            self,
            batch_size=size,
            iterations=self.iterations or settings["iterations"],
            curvature_size=min(self.curvature_size or settings.get("curvature_size", 0), size),
            lr=self.lr or rates.get(self.model, rates[""]),
            damping=self.damping or damping,
            max_cg=self.max_cg or max_cg,
        )

    def hessian_free(self) -> tuple[float, int]:
        """Return the initial lambda and the largest number of conjugate-gradient iterations."""
        is_theirs = self.preset == "supplement" or self.problem == "memorization_5"
        damping, max_cg = SUPPLEMENT if is_theirs else HESSIAN_FREE
        return (damping if self.structural_damping else 3 * damping), max_cg


# The supplement's other settings of Hessian-free optimization; SUPPLEMENT has lambda and the number of iterations.
PRESETS = {"supplement": "--optimizer hf --batch-size 10000 --curvature-size 1000"}


class SequenceLoss(Objective):
    """The loss of a problem, which also reports the share of wrong answers."""

    def __init__(self, problem: Problem, curvature_size: int) -> None:
        super().__init__(curvature_size)
        self.problem, self.loss = problem, problem.loss

    def parts(self, batch: Samples) -> tuple[Samples, Tensor, None]:
        """Return the model's inputs (features and index of each sequence's last step), the targets, and no mask."""
        x, targets, last = batch
        return (self.problem.encode(x), last), targets, None

    def means(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the share of wrong answers in a dictionary."""
        return {"error": self.problem.is_wrong(outputs, targets).double().mean().item()}


def make_model(config: PathologicalConfig, problem: Problem) -> SequenceModel:
    """Return the model that the options name."""
    sizes = problem.input_size, config.hidden, problem.output_size
    return SequenceModel(config.model, *sizes, length=problem.length, reads_end=problem.reads_end)


def make_data(run: Run, config: PathologicalConfig, problem: Problem) -> tuple[Batches, Samples]:
    """Return training and test data. Each training step has new sequences, or all sequences if there are only 32."""
    every = problem.every()
    if every is not None:
        return Batches(run, every, config.iterations), every
    fresh, test = fresh_data(config, problem.draw)
    return Batches(run, fresh), test


def make_optimizer(config: PathologicalConfig, model: nn.Module, problem: Problem) -> torch.optim.Optimizer:
    """Return the optimizer that the options name. An orthogonal weight gets a smaller learning rate."""
    if config.model == "dtriv" and config.optimizer != "hf":
        groups = hbnode.nn.recurrent.parameter_groups(model, config.lr, ORTHOGONAL * config.lr)
        return config.make_optimizer(groups, problem.loss)
    return config.make_optimizer(model.parameters(), problem.loss)


def tested(run: Run, model: nn.Module, data: Samples, loss: SequenceLoss) -> dict[str, float]:
    """Return the loss and the share of wrong answers on the first test sequences, or on all if few are wrong."""
    for count in (min(TESTED_FIRST, len(data[0])), len(data[0])):
        found = evaluate(run, model, tuple(x[:count] for x in data), loss, "test", EVAL_BATCH_SIZE)
        found["test_sequences"] = count
        if found["test_error"] >= 2 * SUCCESS or count == len(data[0]):
            break
    return found


def is_solved(row: Mapping[str, float], sequences: int) -> bool:
    """Return whether a row of metrics was measured on all test sequences and counts as a success."""
    return row["test_error"] < SUCCESS and row["test_sequences"] == sequences


def train(config: PathologicalConfig) -> None:
    """Train one model with one seed until it succeeds or its time is used up."""
    config = config.filled()
    problem = Problem(config.problem, config.length)
    run = Run("pathological", config, folder_name(config))
    model = make_model(config, problem)
    objective = SequenceLoss(problem, config.curvature_size)
    run.announce(model, f"{config.problem}, T = {config.length}: {pair_name(config)}")
    data, test = make_data(run, config, problem)
    trainer = Trainer(run, model, data, objective, lambda model: make_optimizer(config, model, problem))

    def is_over(rows: Sequence[Mapping[str, float]]) -> bool:
        return is_solved(rows[-1], len(test[0])) or sum(row["seconds"] for row in rows) >= config.seconds

    every, diverged = 1 if config.optimizer == "hf" else 10, False
    try:
        trainer.fit(lambda: tested(run, model, test, objective), every=every, stop=is_over)
    except training.Diverged as error:
        if not run.rows:
            raise
        print(error)
        diverged = True
    steps = len(run.rows) * config.iterations
    run.finish(
        model,
        solved=is_solved(run.rows[-1], len(test[0])),
        diverged=diverged,
        seconds=sum(row["seconds"] for row in run.rows),
        iterations=steps,
        sequences=steps * config.batch_size,
    )


def pair_name(config: PathologicalConfig) -> str:
    """Return a label with the names of the model and the optimizer."""
    is_undamped = config.optimizer == "hf" and not config.structural_damping
    return f"{config.model}-{config.optimizer}" + ("-undamped" if is_undamped else "")


def folder_name(config: PathologicalConfig) -> str:
    """Return the name of the run folder."""
    preset = "" if config.preset == "default" else f"{config.preset}-"
    return f"{preset}{config.problem}-{config.length}-{pair_name(config)}-seed{config.seed}"


main = command(PathologicalConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
