"""Polyphonic music: which of 88 notes sound in the next step of a piece, from the steps before it.

JSB Chorales, Nottingham and Piano-midi.de in the splits of Boulanger-Lewandowski, Bengio and Vincent, Modeling Temporal
Dependencies in High-Dimensional Sequences, ICML 2012. A recurrent layer with a linear readout gives a probability for
each note, independent of the others given the past. Judged by "nll", in nats: the negative log-likelihood of a step,
the sum over its 88 notes, and of this the mean over all steps of all pieces of a set but the first step of each piece,
which nothing precedes. So a long piece counts more than a short one. "nll_by_piece" is the mean over the pieces of the
means over their steps. Figures of others may be of the one mean or the other, and have the first step or not.

Training cuts the pieces to parts of --length steps and a step that they share with the part before; every step but a
piece's first is predicted once an epoch, from the start of its part. Validation and test go through whole pieces.
Padding counts nowhere. The epoch with the least validation nll gives the weights that are tested, once, in the end.

Yardsticks: each note with its frequency in training, and with that after a step in which it sounds or not, counted with
one half more of each. Figures of other authors are printed beside; see :data:`PUBLISHED`. By --optimizer hf a batch has
up to 500 parts, of which 50 show the curvature, else 16. lambda 100 at first and mu 0.1 are those of the supplement of
Martens and Sutskever (2011) for its MIDI sequences of 200 steps of 128 notes, which are others. A rule's values are
those of MNIST in table 7 of the MomentumRNN paper, not tuned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from tasks.common.config import option
from tasks.common.figures import draw_maps
from tasks.common.files import exit_on
from tasks.common.run import Run, command
from tasks.common.train import Objective, Outputs, Samples, fit_and_test
from tasks.data.polyphonic import NAMES, NOTES, read_polyphonic
from tasks.models.next_step import NextStep, NextStepConfig, as_batch, is_predicted
from tasks.models.recurrent import RuleOptions

TABLE = {"momentum": RuleOptions(momentum=0.6, step_size=0.6)}
SILENT = -100.0  # the logit of padding: in float32 its loss and its derivatives are 0
EVAL_BATCH_SIZE = 16  # pieces, some of them long

# Test nll in table 2 of Chung, Gulcehre, Cho and Bengio, Empirical Evaluation of Gated Recurrent Neural Networks on
# Sequence Modeling (2014), arXiv:1412.3555. About 20,000 parameters: a tanh RNN of 100 units, a GRU of 46, an LSTM of
# 36, by RMSProp with clipped gradients and noise on the weights.
PUBLISHED = {
    "jsb": {"rnn": 9.10, "gru": 8.54, "lstm": 8.67},
    "nottingham": {"rnn": 3.13, "gru": 3.23, "lstm": 3.20},
    "piano": {"rnn": 9.03, "gru": 8.82, "lstm": 9.03},
}


@dataclasses.dataclass(frozen=True)
class PolyphonicConfig(NextStepConfig):
    """Options of polyphonic music."""

    settings: ClassVar = {"hf": {"batch_size": 500, "curvature_size": 50}, "": {"batch_size": 16}}

    epochs: int = option(100, "passes over the training pieces", may_change=True)
    lr: float = option(3e-3, "learning rate, but of hf")
    clip: float = option(0.0, "largest norm of the gradient, but of hf; 0 does not clip")
    hidden: int = option(100, "size of h")
    data: str = option("auto", "pieces; auto is jsb if they are there", NAMES)
    length: int = option(200, "steps of a part of a piece that are predicted in training; 0: whole pieces")
    damping: float = option(100.0, "hf: lambda at first")
    structural_damping: float = option(0.1, "hf: mu, the factor of lambda on hidden states; 0: none")


# Data


def parts_of(pieces: Sequence[Tensor], length: int) -> list[Tensor]:
    """Pieces cut to ``length`` steps and the one before them, or less at the end; 0: whole."""
    if not length:
        return list(pieces)
    return [piece[begin : begin + length + 1] for piece in pieces for begin in range(0, len(piece) - 1, length)]


def trimmed(batch: Samples) -> tuple[Tensor, Tensor]:
    """What precedes and what is predicted, (N, T, 88) floats, T no longer than needed."""
    rolls, lengths, _ = batch
    rolls = rolls[:, : int(lengths.max()) + 1].float()
    return rolls[:, :-1], rolls[:, 1:]


# Loss


class NextNotes(Objective):
    """The negative log-likelihood of a batch, a part of a piece; its mean over the steps of the set."""

    loss = "bce"

    def outputs(self, model: nn.Module, batch: Samples, *, with_hidden: bool = False) -> Outputs:
        """Logits, the notes, and what structural damping acts on; padding is sure of its silence."""
        x, targets = trimmed(batch)
        valid = is_predicted(batch[1], x.shape[1])[..., None]
        if not with_hidden:
            return model(x).masked_fill(~valid, SILENT), targets
        logits, (hidden, weight) = cast(NextStep, model).with_hidden(x)
        return logits.masked_fill(~valid, SILENT), targets, (hidden, weight * valid)

    def __call__(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """The loss, and the two means over steps and over pieces."""
        logits, targets, *_ = self.outputs(model, batch)
        with torch.no_grad():
            by_piece = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum((1, 2))
            _, lengths, share = batch
            means = {"nll": (by_piece * share).mean().item(), "nll_by_piece": (by_piece / lengths).mean().item()}
        return self.value(logits, targets), means


def yardsticks(train: Samples, test: Samples) -> dict[str, float]:
    """The nll of the test set by frequencies of the training set."""
    before, after = trimmed(train)
    valid = is_predicted(train[1], before.shape[1])
    sounded, sounds = before[valid], after[valid]
    frequency = (sounds.sum(0) + 0.5) / (len(sounds) + 1)
    follows = [(sounds * known).sum(0).add(0.5) / (known.sum(0) + 1) for known in (1 - sounded, sounded)]
    before, after = trimmed(test)
    valid = is_predicted(test[1], before.shape[1])
    before, after = before[valid], after[valid]
    guesses = {"frequency": frequency.expand_as(after), "markov": follows[0] + (follows[1] - follows[0]) * before}
    return {
        f"{name}_nll": nn.functional.binary_cross_entropy(p, after, reduction="sum").item() / len(after)
        for name, p in guesses.items()
    }


# The run


def train(config: PolyphonicConfig) -> None:
    """Train one model with one seed, and test the best epoch's weights once."""
    config = config.filled()
    with exit_on(FileNotFoundError, ValueError):
        pieces, source = read_polyphonic(config.data)
    config = dataclasses.replace(config, data=source)  # a run is of one source, and is not resumed with another
    run = Run("polyphonic_music", config, f"{config.preset}-{source}-{config.name}")
    parts = as_batch(parts_of(pieces["train"], config.length))
    held_out = {part: as_batch(pieces[part]) for part in ("validation", "test")}
    model = NextStep(config, NOTES, TABLE)
    simple = yardsticks(parts, held_out["test"])
    sizes = "/".join(str(len(of_it)) for of_it in pieces.values())
    published = PUBLISHED.get(source, {}).get(config.cell)
    about = ", ".join(f"{name} {value:.4g}" for name, value in simple.items())
    beside = f"; Chung et al. (2014), {config.cell.upper()}: {published}" if published else ""
    run.announce(model, config.title, f"data: {source}, {sizes} pieces, {len(parts[0])} parts; {about}{beside}")
    objective = NextNotes(config.curvature_size)
    trainer = config.make_trainer(run, model, parts, objective)
    results = fit_and_test(trainer, held_out, config.title, "nll", EVAL_BATCH_SIZE, config.is_over)
    if not run.is_finished and run.workers.rank == 0:
        draw_prediction(model, held_out["test"], f"{config.title}, {source}", run)
    rule = dataclasses.asdict(config.rule_options(TABLE))
    run.finish(model, source=source, rule=rule, published_nll=published, **simple, **results)


@torch.no_grad()
def draw_prediction(model: nn.Module, test: Samples, name: str, run: Run, steps: int = 100) -> None:
    """Draw the beginning of the first test piece and the probabilities of its notes, in ``prediction.png``."""
    model.eval()
    before, after = trimmed(tuple(x[:1] for x in test))
    probabilities = model(before[:, :steps].to(run.workers.device)).sigmoid()[0].cpu()
    panels = {"played": after[0, :steps], "probability, from the steps before": probabilities}
    extent, labels = (0.5, len(probabilities) + 0.5, 0.5, NOTES + 0.5), {"xlabel": "step", "ylabel": "note of 88"}
    draw_maps(panels, extent, name, run.folder / "prediction.png", **labels, cmap="Greys", vmin=0, vmax=1)


main = command(PolyphonicConfig, {}, __doc__, train)


if __name__ == "__main__":
    main()
