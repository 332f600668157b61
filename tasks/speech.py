"""Speech: predict the next frame of a spectrogram from earlier frames, with momentum LSTMs and DTRIVs.

Section 3.2 and table 2 of Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (2020), whose
recipe is that of Wisdom et al. (2016) and Helfrich et al. (2018): speech at 8 kHz, short-time Fourier transforms with a
Hann window of 256 samples and a hop of 128, and 129 log-magnitudes per frame. The error is the mean square over all
frames and frequency bins of a set. An LSTM with a linear output layer predicts frame t + 1 from its hidden state after
frame t.

The inputs are decibels from -50 to about 40 and are not standardised. They saturate the gates, so a step size s well
below 1 has a large effect even without momentum. In the paper's grid search the error is 9.33 without a momentum rule,
6.00 with s = 0.1 and no momentum, and 5.86 with s = 0.1 and momentum 0.1. The models "gain" and "forget" measure this
effect. The trivial baselines are repeating the last frame, and the mean frame of the training data.

--data digits is the Free Spoken Digit Dataset, with 3,000 recordings of half a second by six speakers. The training,
validation and test sets contain different recordings of the same speakers. The paper uses TIMIT. If no data are found,
the run uses simulated voices.

The momentum rules use the hyperparameters of tables 7 to 10. For a DTRIV the tables list only momentum; its other rules
use the hyperparameters of the LSTM. The orthogonal weight of a DTRIV has its own learning rate and is trained by Adam
with beta1 = 0. This equals the paper's RMSprop, except for Adam's bias correction in the first steps. The default sizes
are for two CPU cores.

With --optimizer hf a batch has up to 600 recordings, of which 150 are used for the curvature. The loss is half the
squared error of a recording. The initial lambda 50 and mu 0.1 are from section 3.3 of the supplement of Martens and
Sutskever, Learning Recurrent Neural Networks with Hessian-Free Optimization (2011).

The weights of the epoch with the smallest validation error are tested once, at the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import option
from tasks.common.run import Run, command
from tasks.common.train import Batches, Samples, Trainer, fit_and_test
from tasks.data.speech import BINS, SOURCES, log_spectra, read_speech
from tasks.models.next_step import NextStep, NextStepConfig, all_steps, as_batch
from tasks.models.recurrent import OSCILLATORS, VARIANTS, LayerWithReadout, RuleOptions

# hyperparameters of tables 7 to 10 of the paper
TABLE = {
    "momentum": RuleOptions(momentum=0.3, step_size=0.1),
    "nag": RuleOptions(step_size=0.1),
    "sr": RuleOptions(step_size=0.1, restart=2),
    "adam": RuleOptions(momentum=0.3, step_size=0.1, beta=0.999),
    "rmsprop": RuleOptions(step_size=0.1, beta=0.999),
    "adaptive": RuleOptions(step_size=0.1),
}
RMSPROP_ALPHA = 0.99  # torch's default, as in the authors' code for DTRIV


@dataclasses.dataclass(frozen=True)
class SpeechConfig(NextStepConfig):
    """Command-line options of the speech task."""

    models = (*VARIANTS, OSCILLATORS)
    settings: ClassVar = {"hf": {"batch_size": 600, "curvature_size": 150}, "": {"batch_size": 32}}

    epochs: int = option(50, "passes over the training recordings", may_change=True)
    lr: float = option(3e-3, "learning rate, not for hf; the paper's 1e-4 is for 700 epochs of a larger set")
    hidden: int = option(84, "size of the hidden state")
    forget_bias: float = option(-4.0, "initial value of both biases of an LSTM's forget gate", least=None)
    data: str = option("auto", "recordings; auto: digits if their files exist", SOURCES)
    train_size: int = option(0, "training recordings; 0: all")
    orthogonal_lr: float = option(2e-4, "learning rate of a DTRIV's orthogonal weight")
    damping: float = option(50.0, "hf: initial lambda")
    structural_damping: float = option(0.1, "hf: mu, strength of structural damping relative to lambda; 0: none")
    init: str = option("henaff", "initialisation of a DTRIV's orthogonal weight", ("cayley", "henaff"))


# Data


def read_batches(config: SpeechConfig) -> tuple[dict[str, Samples], str]:
    """Return the spectra for training, validation and test, and the name of the data."""
    waves, source = read_speech(config.data)
    known = waves["train"]
    count = min(config.train_size or len(known), len(known))
    waves["train"] = [known[k * len(known) // count] for k in range(count)]  # evenly spaced
    return {part: as_batch([log_spectra(x) for x in recordings]) for part, recordings in waves.items()}, source


# Models


def make_model(config: SpeechConfig) -> LayerWithReadout:
    """Return the model that the options name."""
    options: dict[str, Any] = {"init": config.init} if config.cell == "dtriv" else {}
    return LayerWithReadout(config.make_layer(BINS, TABLE, batch_first=True, **options), config.hidden, BINS)


def make_optimizer(config: SpeechConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer. Adam has beta1 = 0 for the orthogonal weight of a DTRIV; see the module docstring."""
    if config.cell != "dtriv" or config.optimizer != "adam":
        return config.make_optimizer(model.parameters(), "mse")
    others, orthogonal = hbnode.nn.recurrent.parameter_groups(model, config.lr, config.orthogonal_lr)
    return torch.optim.Adam([others, orthogonal | {"betas": (0.0, RMSPROP_ALPHA)}])


class FrameError(NextStep):
    """The mean squared error over the frames of a batch; for HessianFree half the squared error per recording."""

    loss = "mse"

    def __call__(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """Return the mean over the batch's frames, and a metric whose mean over recordings is that over all frames."""
        predicted, targets, *_ = self.outputs(model, batch)
        errors = (predicted - targets).square().sum((1, 2)) / targets.shape[2]
        _, lengths, share = batch
        return errors.sum() / lengths.sum(), {"mse": (errors * share).mean().item()}


def trivial_errors(train: Samples, test: Samples) -> dict[str, float]:
    """Return the test errors (mean squares) of the trivial baselines."""
    (before, after), (_, known) = all_steps(test), all_steps(train)
    guesses = {"repeat": before, "mean": known.mean(0)}
    return {f"{name}_mse": (y - after).square().mean().item() for name, y in guesses.items()}


# The run


def train(config: SpeechConfig) -> None:
    """Train one model with one seed, and test the weights of the best epoch once."""
    batches, source = read_batches(config)
    config = dataclasses.replace(config.filled(), data=source)  # a run cannot be resumed with other data
    run = Run("speech", config, f"{config.preset}-{source}-{config.name}")
    model = make_model(config)
    simple = trivial_errors(batches["train"], batches["test"])
    sizes = "/".join(str(len(x)) for x, _, _ in batches.values())
    errors_without = ", ".join(f"{name} {value:.4g}" for name, value in simple.items())
    run.announce(model, config.title, f"data: {source}, {sizes} recordings; {errors_without}")
    objective = FrameError(config.curvature_size)
    data = Batches(run, batches["train"])
    trainer = Trainer(run, model, data, objective, lambda model: make_optimizer(config, model))
    results = fit_and_test(trainer, batches, config.title, "mse", stop=config.is_over)
    run.finish(model, source=source, rule=dataclasses.asdict(config.rule_options(TABLE)), **simple, **results)


main = command(SpeechConfig, {}, __doc__, train)


if __name__ == "__main__":
    main()
