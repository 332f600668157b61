"""Bouncing balls: predict the next frame of a video of three balls in a box from the earlier frames.

Section 3.1 of the supplement of Martens and Sutskever, Learning Recurrent Neural Networks with Hessian-Free
Optimization (2011): the videos have 30 frames of 18 x 18 pixels with values in [0, 1]. A recurrent layer with a linear
output layer predicts frame t + 1 after frame t, so 29 frames of a video are predicted. The error of a video is the sum
over these frames and their pixels q of the Kullback-Leibler divergence from the prediction p, q log(q / p) + (1 - q)
log((1 - q) / (1 - p)). Training minimises the cross-entropy, which differs from this divergence by the entropy of q, a
constant. The metrics are "kl", the divergence per video, and "squared_error", the squared error per frame, summed over
its pixels.

The supplement does not give the size and the speed of the balls. Here the radius is 0.12 and the root mean square speed
is 0.05 per frame, in a box of side length 1 without gravity; see tasks/data/bouncing_balls.py. So results are not
comparable with those of the supplement. The trivial baselines are the mean frame, and repeating the last frame, whose
divergence is infinite.

Every video is newly drawn, and an epoch is --iterations batches. With --optimizer hf a batch has 500 videos, of which
100 are used for the curvature; otherwise a batch has 50 videos. The preset "supplement" has the supplement's sizes:
batches of 40,000 videos, 4,000 of them for the curvature, and 10^8 videos in total. The initial lambda 1 and mu 1 are
also from the supplement. The test videos are the same for all runs. The momentum rule uses the hyperparameters for
MNIST in table 7 of the MomentumRNN paper, without tuning. At the end a video is drawn with two kinds of predictions:
from the true frames, and in free running, where after 10 true frames the model takes its own predictions as inputs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from matplotlib.figure import Figure, SubFigure
from torch import Tensor, nn

from tasks.common.config import option
from tasks.common.figures import figure_at
from tasks.common.run import Run, command
from tasks.common.train import Objective, Samples, fit, fresh_data
from tasks.data.bouncing_balls import SIDE, videos
from tasks.models.next_step import NextStepConfig
from tasks.models.recurrent import LayerWithReadout, RuleOptions

PIXELS = SIDE * SIDE
TABLE = {"momentum": RuleOptions(momentum=0.6, step_size=0.6)}
EVAL_BATCH_SIZE = 250
GIVEN = 10  # number of true frames at the start of free running
SHOWN = 12  # number of frames in the picture
GAP = 2  # pixels between two frames in the picture


@dataclasses.dataclass(frozen=True)
class BouncingBallsConfig(NextStepConfig):
    """Command-line options of bouncing balls."""

    settings: ClassVar = {
        "hf": {"batch_size": 500, "curvature_size": 100, "iterations": 1},
        "": {"batch_size": 50, "iterations": 100},
    }
    positive = "test_size"

    epochs: int = option(30, "epochs, each of --iterations batches", may_change=True)
    iterations: int = option(0, "batches in an epoch; 0: 1 for hf, 100 for other optimizers")
    lr: float = option(1e-2, "learning rate, not for hf")
    hidden: int = option(100, "size of the hidden state")
    length: int = option(30, "frames of a video", least=GIVEN + 1)
    test_size: int = option(1000, "test videos")
    damping: float = option(1.0, "hf: initial lambda")
    structural_damping: float = option(1.0, "hf: mu, strength of structural damping relative to lambda; 0: none")


PRESETS = {"supplement": "--optimizer hf --batch-size 40000 --curvature-size 4000 --max-cg 300 --epochs 2500"}


# Loss


class Divergence(Objective):
    """The cross-entropy of all frames after the first, per video. It also reports divergence and squared error."""

    loss = "bce"

    def parts(self, batch: Samples) -> tuple[Samples, Tensor, None]:
        """Return the inputs (all frames except the last), the targets (all except the first), and no mask."""
        (x,) = batch
        return (x[:, :-1],), x[:, 1:], None

    def means(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the divergence per video and the squared error per frame."""
        return {
            "kl": divergence(outputs, targets).mean().item(),
            "squared_error": (outputs.sigmoid() - targets).square().sum(2).mean().item(),
        }


def divergence(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each video, (batch,), for logits (batch, frames, pixels)."""
    entropy = -torch.xlogy(targets, targets) - torch.xlogy(1 - targets, 1 - targets)
    crossed = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (crossed - entropy).sum((1, 2))


def trivial_errors(test: Tensor) -> dict[str, float]:
    """Return the errors of the trivial baselines on the test videos (N, frames, pixels)."""
    true = test[:, 1:]
    mean = true.mean((0, 1)).expand_as(true)
    return {
        "mean_kl": divergence(mean.logit(eps=1e-6), true).mean().item(),
        "mean_squared_error": (mean - true).square().sum(2).mean().item(),
        "repeat_squared_error": (test[:, :-1] - true).square().sum(2).mean().item(),
    }


# The picture


@torch.no_grad()
def free_running(model: nn.Module, video: Tensor, given: int = GIVEN) -> Tensor:
    """Predict all frames after the first. The inputs are ``given`` true frames, then the model's own predictions.

    Arguments:
        model: a model that returns logits.
        video: true frames (frames, pixels).
        given: the number of true frames.
    """
    inputs = video[None, :given]
    while inputs.shape[1] < len(video):
        inputs = torch.cat([inputs, model(inputs)[:, -1:].sigmoid()], dim=1)
    return model(inputs[:, :-1])[0].sigmoid()


@torch.no_grad()
def draw_video(model: nn.Module, video: Tensor, figure: Figure | SubFigure) -> None:
    """Draw frames of a video (frames, pixels) in three rows: true, predicted from true frames, and free running."""
    from matplotlib.patches import Rectangle

    model.eval()
    predicted = model(video[None, :-1])[0].sigmoid()
    rows = {"true": video[1:], "predicted from\ntrue frames": predicted, "free running": free_running(model, video)}
    chosen = torch.linspace(0, len(video) - 2, min(SHOWN, len(video) - 1)).round().long()
    centres = [(SIDE + GAP) * column + SIDE / 2 - 0.5 for column in range(len(chosen))]
    for ax, (name, frames) in zip(figure.subplots(len(rows), 1), rows.items(), strict=True):
        pictures = frames[chosen.to(frames.device)].reshape(-1, SIDE, SIDE).cpu()
        strip = nn.functional.pad(pictures, (0, GAP), value=torch.nan).permute(1, 0, 2).flatten(1)[:, :-GAP]
        ax.imshow(strip.numpy(), cmap="gray_r", vmin=0, vmax=1, interpolation="none")
        ax.set(yticks=[], xticks=centres, xticklabels=[f"{index + 2}" for index in chosen.tolist()])
        ax.tick_params(length=0, labelsize="small")
        ax.spines[:].set_visible(False)
        ax.set_ylabel(name, rotation=0, ha="right", va="center")
        for centre, index in zip(centres, chosen.tolist(), strict=True):
            made_itself = name == "free running" and index + 1 > GIVEN
            corner = (centre - SIDE / 2, -0.5)
            ax.add_patch(Rectangle(corner, SIDE, SIDE, fill=False, edgecolor="C3" if made_itself else "0.7", lw=0.8))


def train(config: BouncingBallsConfig) -> None:
    """Train one model with one seed."""
    config = config.filled()
    run = Run("bouncing_balls", config, f"{config.preset}-{config.name}")
    model = LayerWithReadout(config.make_layer(PIXELS, TABLE, batch_first=True), config.hidden, PIXELS)
    fresh, test = fresh_data(config, lambda count, generator: (videos(count, config.length, generator),))
    simple = trivial_errors(test[0])
    run.announce(model, config.title, ", ".join(f"{name} {value:.4g}" for name, value in simple.items()))
    objective = Divergence(config.curvature_size)
    options: Any = {"eval_batch_size": EVAL_BATCH_SIZE, "stop": config.is_over}
    fit(run, model, fresh, test, objective, optimizer=config.optimizer_of(objective.loss), **options)
    if run.workers.rank == 0 and not run.is_finished:
        title = f"{config.title}: frames of a test video; red: from the model's own predictions"
        with figure_at(run.folder / "frames.png", (11, 3.4), title) as figure:
            draw_video(model, test[0][0].to(run.workers.device), figure)
    run.finish(
        model, **simple, videos=len(run.rows) * fresh.samples, rule=dataclasses.asdict(config.rule_options(TABLE))
    )


main = command(BouncingBallsConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
