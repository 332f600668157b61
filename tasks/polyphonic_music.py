"""Polyphonic music: the next step of a piece, 88 notes, from the steps before it.

JSB Chorales, Nottingham and Piano-midi.de in the splits of Boulanger-Lewandowski, Bengio and Vincent, Modeling Temporal
Dependencies in High-Dimensional Sequences, ICML 2012. A recurrent layer with a linear readout returns a probability for
each note, independent of the others given the past. The result is "nll" in nats: the negative log-likelihood of a step,
summed over its 88 notes, and averaged over all steps of a set except the first step of each piece. So a long piece has
a larger weight than a short one. "nll_by_piece" is the mean over the pieces of the means over their steps. Results of
others can be either mean, with or without the first step.

Training cuts the pieces to parts of --length steps and one step of the part before. Every step except a piece's first
is predicted once per epoch, from the start of its part. Validation and test use whole pieces. Padding has no weight.
The weights of the epoch with the least validation nll are tested once, in the end.

The baselines are the frequency of each note in training, and that after a step with or without the note, with 1/2 added
to each count. With --optimizer hf a batch has up to
500 parts, 50 of them for the curvature; otherwise it has 16. The initial lambda 100 and mu 0.1 are those of the
supplement of Martens and Sutskever (2011) for other MIDI sequences, of 200 steps of 128 notes. The rule has the numbers
of MNIST in table 7 of the MomentumRNN paper, which are not tuned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from tasks.common.config import option
from tasks.common.run import Run, command
from tasks.common.train import Batches, Samples, Trainer, fit_and_test
from tasks.data.polyphonic import NAMES, NOTES, read_polyphonic
from tasks.models.next_step import NextStep, NextStepConfig, all_steps, as_batch
from tasks.models.recurrent import LayerWithReadout, RuleOptions

TABLE = {"momentum": RuleOptions(momentum=0.6, step_size=0.6)}
EVAL_BATCH_SIZE = 16  # small, because some pieces are long


@dataclasses.dataclass(frozen=True)
class PolyphonicConfig(NextStepConfig):
    """Options of polyphonic music."""

    settings: ClassVar = {"hf": {"batch_size": 500, "curvature_size": 50}, "": {"batch_size": 16}}

    epochs: int = option(100, "passes over the training pieces", may_change=True)
    lr: float = option(3e-3, "learning rate, not for hf")
    clip: float = option(0.0, "largest norm of the gradient, not for hf; 0 does not clip")
    hidden: int = option(100, "size of h")
    data: str = option("auto", "set of pieces; auto is jsb if it is there", NAMES)
    length: int = option(200, "predicted steps of a part of a piece in training; 0: whole pieces")
    damping: float = option(100.0, "hf: initial lambda")
    structural_damping: float = option(0.1, "hf: mu, the factor of lambda on hidden states; 0: none")


# Data


def parts_of(pieces: Sequence[Tensor], length: int) -> list[Tensor]:
    """Return pieces cut to ``length`` steps and the one before them, or fewer at the end; 0: whole."""
    if not length:
        return list(pieces)
    return [piece[begin : begin + length + 1] for piece in pieces for begin in range(0, len(piece) - 1, length)]


# Loss


class NextNotes(NextStep):
    """The negative log-likelihood per part of a piece, and its mean over the steps of the set."""

    loss = "bce"

    def __call__(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, and the means over steps and over pieces."""
        logits, targets, *_ = self.outputs(model, batch)
        with torch.no_grad():
            by_piece = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum((1, 2))
            _, lengths, share = batch
            means = {"nll": (by_piece * share).mean().item(), "nll_by_piece": (by_piece / lengths).mean().item()}
        return self.value(logits, targets), means


def trivial_errors(train: Samples, test: Samples) -> dict[str, float]:
    """Return the nll of the test set for the frequencies of the training set."""
    sounded, sounds = all_steps(train)
    frequency = (sounds.sum(0) + 0.5) / (len(sounds) + 1)
    follows = [(sounds * known).sum(0).add(0.5) / (known.sum(0) + 1) for known in (1 - sounded, sounded)]
    before, after = all_steps(test)
    guesses = {"frequency": frequency.expand_as(after), "markov": follows[0] + (follows[1] - follows[0]) * before}
    return {
        f"{name}_nll": nn.functional.binary_cross_entropy(p, after, reduction="sum").item() / len(after)
        for name, p in guesses.items()
    }


# The run


def train(config: PolyphonicConfig) -> None:
    """Train one model with one seed, and test the best epoch's weights once."""
    config = config.filled()
    pieces, source = read_polyphonic(config.data)
    config = dataclasses.replace(config, data=source)  # a run cannot be resumed with another source
    run = Run("polyphonic_music", config, f"{config.preset}-{source}-{config.name}")
    parts = as_batch(parts_of(pieces["train"], config.length))
    held_out = {part: as_batch(pieces[part]) for part in ("validation", "test")}
    model = LayerWithReadout(config.make_layer(NOTES, TABLE, batch_first=True), config.hidden, NOTES)
    simple = trivial_errors(parts, held_out["test"])
    sizes = "/".join(str(len(part)) for part in pieces.values())
    about = ", ".join(f"{name} {value:.4g}" for name, value in simple.items())
    run.announce(model, config.title, f"data: {source}, {sizes} pieces, {len(parts[0])} parts; {about}")
    objective = NextNotes(config.curvature_size)
    trainer = Trainer(run, model, Batches(run, parts), objective, config.optimizer_of(objective.loss))
    results = fit_and_test(trainer, held_out, config.title, "nll", EVAL_BATCH_SIZE, stop=config.is_over)
    rule = dataclasses.asdict(config.rule_options(TABLE))
    run.finish(model, source=source, rule=rule, **simple, **results)


main = command(PolyphonicConfig, {}, __doc__, train)


if __name__ == "__main__":
    main()
