"""Speech: the next frame of a spectrogram from those before it, with momentum LSTMs and DTRIVs.

Section 3.2 and table 2 of Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (2020), whose
recipe is that of Wisdom et al. (2016) and Helfrich et al. (2018): speech at 8 kHz, a Hann window of 256 samples that
moves by 128, 129 log-magnitudes a frame, their mean squared error over all frames and bins of a set. An LSTM with a
linear readout predicts, from its h after frame t, frame t + 1.

The inputs are decibels as they are, -50 to about 40: not standardised. They drive the gates far into saturation, which
is why a step size s well below 1 does so much here: in the authors' own grid the error is 9.33 without any rule, 6.00
with s = 0.1 and no momentum, and 5.86 with s = 0.1 and momentum 0.1. The models "gain" and "forget" are there to see
it. Yardsticks: the last frame, repeated, and the mean frame of training.

--features mfcc: 13 mel-frequency cepstral coefficients with their slopes and the slopes of these, 39 features, as in
section 3.3 of the supplement to Martens and Sutskever, Learning Recurrent Neural Networks with Hessian-Free
Optimization (2011), which says no more of them than their number; see tasks/data/speech.py. Each is standardised by its
mean and deviation over the training frames, so that the mean frame has an error of about 1. The slopes of a frame are
computed from up to four frames after it, so a part of the next frame is known: no error here compares with one of
spectra.

--data digits: the Free Spoken Digit Dataset, 3,000 recordings of half a second by six speakers, who are in all parts;
no recording is in two. --data timit: the paper's, from a folder of the user's. As in the paper, validation is the core
test set (192 utterances) and test the development set (400), the reverse of what is usual; training has all 3,696
utterances that are no SA sentence, where the paper has 3,640, as if a filter for "sa" in the path had removed seven
speakers too. Theirs counts one frame more an utterance, silence predicted from silence. Without data, tones stand in.

The presets "timit-84", "timit-120" and "timit-158" have the LSTMs of tables 2 and 12, "timit-dtriv-224" and
"timit-dtriv-322" the DTRIVs, all with tables 6 to 10; what these leave out, rules of a DTRIV but momentum, has the
LSTM's values. The orthogonal weight of a DTRIV is trained with a rate of its own and by Adam with beta1 = 0, which is
the paper's RMSprop but for the first steps: it divides by an unbiased mean square. The default preset is for two cores.

By --optimizer hf a batch has up to 600 recordings, of which 150 show the curvature, and the loss is half the squared
error of a recording; lambda 50 at first and mu 0.1 are those of the supplement, whose sequences have 100 frames.

The epoch with the least validation error gives the weights that are tested, once, in the end.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import option
from tasks.common.figures import draw_maps
from tasks.common.files import exit_on
from tasks.common.run import Run, command
from tasks.common.train import Objective, Outputs, Samples, fit_and_test
from tasks.data.speech import BINS, FEATURES, HOP, RATE, SOURCES, log_spectra, mfcc, read_speech
from tasks.models.next_step import NextStep, NextStepConfig, as_batch, is_predicted
from tasks.models.recurrent import OSCILLATORS, VARIANTS, RuleOptions

# tables 7 to 10
TABLE = {
    "momentum": RuleOptions(momentum=0.3, step_size=0.1),
    "nag": RuleOptions(step_size=0.1),
    "sr": RuleOptions(step_size=0.1, restart=2),
    "adam": RuleOptions(momentum=0.3, step_size=0.1, beta=0.999),
    "rmsprop": RuleOptions(step_size=0.1, beta=0.999),
    "adaptive": RuleOptions(step_size=0.1),
}
COMPUTE = {"spectra": log_spectra, "mfcc": mfcc}
COUNT = {"spectra": BINS, "mfcc": FEATURES}
RMSPROP_ALPHA = 0.99  # torch's default, which the authors' DTRIVs are trained with


@dataclasses.dataclass(frozen=True)
class SpeechConfig(NextStepConfig):
    """Options of speech."""

    models = (*VARIANTS, OSCILLATORS)
    settings: ClassVar = {"hf": {"batch_size": 600, "curvature_size": 150}, "": {"batch_size": 32}}

    epochs: int = option(50, "passes over the training recordings", may_change=True)
    lr: float = option(3e-3, "learning rate, but of hf; the paper's 1e-4 is for 700 epochs of a larger set")
    hidden: int = option(84, "size of h")
    forget_bias: float = option(-4.0, "bias of an LSTM's forget gate at first, each of the two", least=None)
    data: str = option("auto", "recordings; auto is the digits if they are there", SOURCES)
    features: str = option("spectra", "log-magnitudes, or cepstra and their slopes", tuple(COMPUTE))
    timit: str = option("", "folder of TIMIT; empty is HBNODE_DATA/timit", may_change=True)
    train_size: int = option(0, "training recordings; 0: all")
    orthogonal_lr: float = option(2e-4, "learning rate of a DTRIV's orthogonal weight")
    damping: float = option(50.0, "hf: lambda at first")
    structural_damping: float = option(0.1, "hf: mu, the factor of lambda on hidden states; 0: none")
    init: str = option("henaff", "how a DTRIV's orthogonal weight starts", ("cayley", "henaff"))


_TIMIT = "--data timit --epochs 700"
PRESETS = {f"timit-{hidden}": f"{_TIMIT} --hidden {hidden} --lr 1e-4" for hidden in (84, 120, 158)} | {
    f"timit-dtriv-{hidden}": f"{_TIMIT} --cell dtriv --hidden {hidden} --lr 1e-3 --batch-size 128 --clip 1"
    for hidden in (224, 322)
}


# Data


def read_batches(config: SpeechConfig) -> tuple[dict[str, Samples], str]:
    """Training, validation and test, and where they come from."""
    waves, source = read_speech(config.data, config.timit)
    known = waves["train"]
    count = min(config.train_size or len(known), len(known))
    waves["train"] = [known[k * len(known) // count] for k in range(count)]  # of all speakers and digits
    recordings = {part: [COMPUTE[config.features](x) for x in of_it] for part, of_it in waves.items()}
    if config.features == "mfcc":
        frames = torch.cat(recordings["train"])
        mean, deviation = frames.mean(0), frames.std(0, correction=0)
        recordings = {part: [(x - mean) / deviation for x in of_it] for part, of_it in recordings.items()}
    return {part: as_batch(of_it) for part, of_it in recordings.items()}, source


# Models


def make_model(config: SpeechConfig) -> NextStep:
    """The model that the options describe."""
    return NextStep(config, COUNT[config.features], TABLE, init=config.init)


def make_optimizer(config: SpeechConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; see above for what Adam does to the orthogonal weight of a DTRIV."""
    if config.cell != "dtriv" or config.optimizer != "adam":
        return config.make_optimizer(model.parameters(), "mse")
    others, orthogonal = hbnode.nn.recurrent.parameter_groups(model, config.lr, config.orthogonal_lr)
    return torch.optim.Adam([others, orthogonal | {"betas": (0.0, RMSPROP_ALPHA)}])


def squared_error(predicted: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    """The sum over each recording, (N,), of the squared errors of the frames after the first."""
    error = (predicted[:, :-1] - x[:, 1:]).square().sum(-1)
    return error.masked_fill(~is_predicted(lengths, error.shape[1]), 0.0).sum(1)


def frame_loss(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Mean squared error of the batch's frames, and what adds up to that of the set's."""
    x, lengths, share = batch
    x = x[:, : int(lengths.max()) + 1]
    errors = squared_error(model(x), x, lengths)
    return errors.sum() / (lengths.sum() * x.shape[2]), {"mse": (errors * share).mean().item() / x.shape[2]}


class FrameError(Objective):
    """The mean squared error of a batch's frames; of a Hessian-free optimizer half its sum over a recording."""

    loss = "mse"

    def __call__(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """See :func:`frame_loss`."""
        return frame_loss(model, batch)

    def outputs(self, model: nn.Module, batch: Samples, *, with_hidden: bool = False) -> Outputs:
        """Predictions, the frames, and what structural damping acts on; padding is predicted without an error."""
        x, lengths, _ = batch
        x = x[:, : int(lengths.max()) + 1]
        before, after = x[:, :-1], x[:, 1:]
        valid = is_predicted(lengths, after.shape[1])[..., None]
        if not with_hidden:
            return model(before).where(valid, after), after
        predicted, (hidden, weight) = cast(NextStep, model).with_hidden(before)
        return predicted.where(valid, after), after, (hidden, weight * valid)


def yardsticks(train: Samples, test: Samples) -> dict[str, float]:
    """Mean squared errors of the test set without a model."""
    x, lengths, _ = train
    frames = torch.cat([rows[1 : length + 1] for rows, length in zip(x, lengths.tolist(), strict=True)])
    x, lengths, share = test
    guesses = {"repeat": x, "mean": frames.mean(0).expand_as(x)}
    errors = {name: squared_error(y, x, lengths) / x.shape[2] for name, y in guesses.items()}
    return {f"{name}_mse": (error * share).mean().item() for name, error in errors.items()}


# The run


def train(config: SpeechConfig) -> None:
    """Train one model with one seed, and test the best epoch's weights once."""
    with exit_on(FileNotFoundError, ValueError):
        batches, source = read_batches(config)
    # a run is of one source, and is not resumed with another
    config = dataclasses.replace(config.filled(), data=source)
    features = "" if config.features == "spectra" else f"-{config.features}"
    run = Run("speech", config, f"{config.preset}-{source}{features}-{config.name}")
    model = make_model(config)
    simple = yardsticks(batches["train"], batches["test"])
    sizes = "/".join(str(len(x)) for x, _, _ in batches.values())
    errors_without = ", ".join(f"{name} {value:.4g}" for name, value in simple.items())
    run.announce(model, config.title, f"data: {source}, {sizes} recordings; {errors_without}")
    objective = FrameError(config.curvature_size)
    make = functools.partial(make_optimizer, config)
    trainer = config.make_trainer(run, model, batches["train"], objective, make)
    results = fit_and_test(trainer, batches, config.title, "mse", stop=config.is_over)
    if not run.is_finished and run.workers.rank == 0:
        draw_prediction(model, batches["test"], f"{config.title}, {source}", run)
    run.finish(model, source=source, rule=dataclasses.asdict(config.rule_options(TABLE)), **simple, **results)


@torch.no_grad()
def draw_prediction(model: nn.Module, test: Samples, name: str, run: Run) -> None:
    """Draw the longest recording of the test set and its prediction, in ``prediction.png``."""
    x, lengths, _ = test
    chosen = x[lengths.argmax()]
    model.eval()
    predicted = model(chosen[None].to(run.workers.device))[0].cpu()
    panels = {"measured": chosen[1:], "predicted from the frames before": predicted[:-1]}
    seconds, path = (len(chosen) - 1) * HOP / RATE, run.folder / "prediction.png"
    colors: dict[str, Any] = {"xlabel": "time in s", "cmap": "magma"}
    if x.shape[2] == BINS:
        colors |= {"ylabel": "frequency in kHz", "unit": "dB", "vmin": -50, "vmax": 20}
        draw_maps(panels, (0, seconds, 0, RATE / 2000), name, path, **colors)
    else:
        colors |= {"ylabel": "cepstra, slopes, slopes of slopes", "unit": "standard deviations", "vmin": -3, "vmax": 3}
        draw_maps(panels, (0, seconds, 0, FEATURES), name, path, **colors)


main = command(SpeechConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
