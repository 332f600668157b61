"""Pathological problems of long memory: any model with any optimizer, within a budget of seconds.

Section 2 of the supplement of Martens and Sutskever, Learning Recurrent Neural Networks with Hessian-Free Optimization
(2011); ``tasks/data/pathological.py`` has the problems. A run is a success, and ends, when fewer than 1 % of the test
sequences are answered wrongly; a number is wrong if it is off by more than .04. There are 10,000 test sequences, the
same for all runs; the first 1,000 are tested first, and the others where fewer than 2 % of these are wrong. Of five
bits there are 32 sequences, which are every batch and the test.

--seconds are those of training: of gradients, products and steps, without the test and without drawing the data. They
are kept in the checkpoint, and the last batches before a test may go beyond them. On a CPU they are processor seconds,
which other processes on the machine take nothing away from.

All models have 100 units, as the supplement's; their numbers of parameters differ and are printed. The loss is summed
over the steps and averaged over the sequences. Batch size, learning rate and steps between two tests are those of
:data:`SETTINGS` and :data:`RATES` unless they are given. The rates of Adam and SOAP are the best of 1e-3, 3e-3 and 1e-2
(of tanh, LSTM and GRU under Adam 3e-4 too), those of SGD of 0.01 and 0.1, on addition and the memorization of five bits
at T = 20: what is solved in 20 seconds, then how soon, then the share that is wrong; one seed, the models of the table
and, under SGD, tanh and GRU. Gradients are clipped to 1, but not those of Hessian-free optimization. Its lambda begins
at 0.01, with at most 60 steps of conjugate gradients: from the supplement's 0.1 it leaves the first plateau later. The
memorization of five bits, of which every batch is all there are, has the supplement's settings, 0.1 and 300: with the
others it fails at T = 100. As in the supplement, lambda begins at T times as much for the random permutation, whose
loss is that much larger, and else at three times as much without structural damping.

    python -m tasks.pathological --problem addition --length 50 --model tanh --optimizer hf --seconds 300 --seeds 3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

import hbnode
from tasks.common import train as training
from tasks.common.config import option
from tasks.common.figures import draw_maps
from tasks.common.run import Run, command
from tasks.common.train import Batches, Objective, OptimizerConfig, Outputs, Samples, Trainer, evaluate
from tasks.data.pathological import MEMORIZED, PROBLEMS, Problem
from tasks.data.pathological import TITLES as PROBLEM_TITLES
from tasks.models.sequence_models import LAYERS, TITLES, SequenceModel

TEST_SEED = 2**62  # which no training data has
SUCCESS = 0.01  # of the test sequences may be wrong
TESTED_FIRST = 1_000
EVAL_BATCH_SIZE = 500

# Batch size, how many of a batch show the curvature, and steps between two tests.
SETTINGS: dict[str, dict[str, int]] = {
    "adam": {"batch_size": 100, "iterations": 50},
    "sgd": {"batch_size": 100, "iterations": 50},
    "soap": {"batch_size": 100, "iterations": 50},
    "hf": {"batch_size": 2_000, "curvature_size": 500, "iterations": 1},
}
# Learning rates by optimizer and model; see the top of the file. "" is any other model.
RATES: dict[str, dict[str, float]] = {
    "adam": {"": 3e-3, "tanh": 1e-3, "lstm": 1e-2, "lstm_chrono": 1e-2, "gru": 1e-2, "dtriv": 1e-2},
    "sgd": {"": 0.1},
    "soap": {"": 3e-3, "gru": 1e-2},
    "hf": {"": 1.0},  # which has none
}
# Lambda of Hessian-free optimization at first, and its limit of conjugate gradients. "" is any other problem.
SUPPLEMENT = (0.1, 300)
HESSIAN_FREE: dict[str, tuple[float, int]] = {"": (0.01, 60), "memorization_5": SUPPLEMENT}
ORTHOGONAL = 0.1  # the rate of DTRIV's orthogonal weight, in that of its other weights


@dataclasses.dataclass(frozen=True)
class PathologicalConfig(OptimizerConfig):
    """Options of the pathological problems; an epoch is the steps between two tests."""

    models = tuple(LAYERS)
    positive = "iterations seconds hidden test_size"

    problem: str = option("addition", "the problem", PROBLEMS)
    length: int = option(50, "T, about the steps of a sequence")
    model: str = option("tanh", "one of {models}, several with commas between, or all")
    seconds: float = option(300.0, "seconds of training after which a run ends without success", may_change=True)
    epochs: int = option(1_000_000, "the most tests of a run, one after every --iterations steps", may_change=True)
    iterations: int = option(0, "steps between two tests; 0: 1 of hf, 50 of others")
    batch_size: int = option(0, "sequences in a step; 0: those of SETTINGS, or all 32 of memorization_5")
    curvature_size: int = option(0, "hf: sequences that show the curvature; 0: those of SETTINGS, at most the batch")
    lr: float = option(0.0, "learning rate; 0: that of RATES for the optimizer and the model")
    clip: float = option(1.0, "largest norm of the gradient, but of hf; 0 does not clip")
    hidden: int = option(100, "size of h")
    damping: float = option(0.0, "hf: lambda at first; 0: that of the problem, see above")
    max_cg: int = option(0, "hf: steps of conjugate gradients in an iteration; 0: that of the problem, see above")
    test_size: int = option(10_000, "test sequences; memorization_5 has its 32")

    def check(self) -> None:
        """Refuse what no run can have."""
        Problem(self.problem, self.length)
        OptimizerConfig.check(self.filled())
        if self.schedule == "cosine" and self.epochs == PathologicalConfig.epochs:
            raise ValueError("--schedule cosine falls to 0 within --epochs. Fix: say how many these are at most.")

    def filled(self) -> PathologicalConfig:
        """The options with the settings and the rate of this optimizer and model in place of 0."""
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
        """Lambda at first and the limit of conjugate gradients; see the top of the file."""
        damping, max_cg = HESSIAN_FREE.get(self.problem, HESSIAN_FREE[""])
        if self.preset == "supplement":
            damping, max_cg = SUPPLEMENT
        if self.problem == "permutation":
            return self.length * damping, max_cg
        return (damping if self.structural_damping else 3 * damping), max_cg


# The supplement's own settings of Hessian-free optimization; those of SUPPLEMENT too.
PRESETS = {"supplement": "--optimizer hf --batch-size 10000 --curvature-size 1000"}


class SequenceLoss(Objective):
    """The loss of a problem, and the share of the sequences that are answered wrongly."""

    def __init__(self, problem: Problem, curvature_size: int) -> None:
        super().__init__(curvature_size)
        self.problem, self.loss = problem, problem.loss

    def outputs(self, model: nn.Module, batch: Samples, *, with_hidden: bool = False) -> Outputs:
        """Outputs and targets, and what structural damping acts on, which padding does not."""
        x, targets, last = batch
        x = self.problem.encode(x)
        if not with_hidden:
            return model(x, last), targets
        outputs, hidden = cast(SequenceModel, model).with_hidden(x, last)
        return outputs, targets, hidden

    def means(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The share that is wrong."""
        return {"error": self.problem.is_wrong(outputs, targets).double().mean().item()}


def make_model(config: PathologicalConfig, problem: Problem) -> SequenceModel:
    """The model that the options describe."""
    sizes = problem.input_size, config.hidden, problem.output_size
    return SequenceModel(config.model, *sizes, length=problem.length, reads_end=problem.reads_end)


def make_data(run: Run, config: PathologicalConfig, problem: Problem) -> Batches | Batches:
    """Fresh sequences for every step, or all there are."""
    every = problem.every()
    if every is not None:
        return Batches(run, every, config.iterations, lambda step: 1.0)
    count = config.iterations * config.batch_size
    return Batches(
        run, training.FreshData(count, lambda epoch: problem.draw(count, training.epoch_generator(config.seed, epoch)))
    )


def make_optimizer(config: PathologicalConfig, model: nn.Module, problem: Problem) -> torch.optim.Optimizer:
    """The optimizer that the options describe, with a smaller rate for an orthogonal weight."""
    if config.model == "dtriv" and config.optimizer != "hf":
        groups = hbnode.nn.recurrent.parameter_groups(model, config.lr, ORTHOGONAL * config.lr)
        return config.make_optimizer(groups, problem.loss)
    return config.make_optimizer(model.parameters(), problem.loss)


def tested(run: Run, model: nn.Module, data: Samples, loss: SequenceLoss) -> dict[str, float]:
    """Loss and share of wrong answers, of all test sequences where the first ones let success hope, or of those."""
    for count in (min(TESTED_FIRST, len(data[0])), len(data[0])):
        found = evaluate(run, model, tuple(x[:count] for x in data), loss, "test", EVAL_BATCH_SIZE)
        found["test_sequences"] = count
        if found["test_error"] >= 2 * SUCCESS or count == len(data[0]):
            break
    return found


def is_solved(row: Mapping[str, float], sequences: int) -> bool:
    """Whether a row of the metrics is that of a success: all test sequences were tested."""
    return row["test_error"] < SUCCESS and row["test_sequences"] == sequences


def train(config: PathologicalConfig) -> None:
    """Train one model with one seed until it succeeds or its seconds are spent."""
    config = config.filled()
    problem = Problem(config.problem, config.length)
    run = Run("pathological", config, folder_name(config))
    model = make_model(config, problem)
    objective = SequenceLoss(problem, config.curvature_size)
    asked = f"{PROBLEM_TITLES[config.problem]}, T = {config.length}"
    run.announce(model, f"{asked}: {pair_title(pair_name(vars(config)))}")
    generator = torch.Generator().manual_seed(TEST_SEED)
    drawn = problem.every() or problem.draw(config.test_size, generator)
    held_out = tuple(x.to(run.workers.device) for x in drawn)
    data = make_data(run, config, problem)
    trainer = Trainer(run, model, data, objective, lambda model: make_optimizer(config, model, problem))

    def is_over(rows: Sequence[Mapping[str, float]]) -> bool:
        return is_solved(rows[-1], len(drawn[0])) or sum(row["seconds"] for row in rows) >= config.seconds

    every, diverged = 1 if config.optimizer == "hf" else 10, False
    try:
        trainer.fit(lambda: tested(run, model, held_out, objective), every=every, stop=is_over)
    except training.Diverged as error:
        if not run.rows:
            raise
        print(error)
        diverged = True
    steps = len(run.rows) * config.iterations
    if run.workers.rank == 0 and not run.is_finished and config.problem in MEMORIZED:
        draw_memorization(model, problem, drawn, run)
    run.finish(
        model,
        solved=is_solved(run.rows[-1], len(drawn[0])),
        diverged=diverged,
        seconds=sum(row["seconds"] for row in run.rows),
        iterations=steps,
        sequences=steps * config.batch_size,
    )


def pair_name(options: Mapping[str, Any]) -> str:
    """A model with its optimizer, as folders are called, from the options of a run."""
    is_undamped = options["optimizer"] == "hf" and not options["structural_damping"]
    return f"{options['model']}-{options['optimizer']}" + ("-undamped" if is_undamped else "")


def pair_title(pair: str) -> str:
    """What a model with its optimizer is called in tables and figures, from :func:`pair_name`."""
    model, optimizer, *_ = pair.split("-")
    undamped = ", undamped" if pair.endswith("-undamped") else ""
    return f"{TITLES[model]}, {training.OPTIMIZER_TITLES[optimizer]}{undamped}"


def folder_name(config: PathologicalConfig) -> str:
    """A run's folder in that of the task."""
    preset = "" if config.preset == "default" else f"{config.preset}-"
    return f"{preset}{config.problem}-{config.length}-{pair_name(vars(config))}-seed{config.seed}"


@torch.no_grad()
def draw_memorization(model: nn.Module, problem: Problem, test: Samples, run: Run) -> None:
    """Draw a test sequence over time: inputs, targets, and the probabilities of the model; in ``memorization.png``."""
    x, targets, last = (part[len(part) // 3 :][:1] for part in test)  # of five bits 0 1 0 1 0
    device = run.workers.device
    model.eval()
    probabilities = model(problem.encode(x.to(device)), last.to(device))[0].softmax(1).cpu()
    wanted = nn.functional.one_hot(targets[0], problem.output_size).float()
    panels = {"input": problem.encode(x)[0], "target": wanted, "probability of each symbol": probabilities}
    who = f"{pair_title(pair_name(vars(run.config)))}, seed {run.config.seed}"
    title = f"{PROBLEM_TITLES[problem.name]}, T = {problem.length}: {who}"
    labels = {"xlabel": f"step; the last {MEMORIZED[problem.name][0]} are recalled", "ylabel": "symbol"}
    draw_maps(panels, None, title, run.folder / "memorization.png", **labels, cmap="Greys", vmin=0, vmax=1)


main = command(PathologicalConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
