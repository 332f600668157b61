"""Walker2D kinematic simulation: the next frame of a walking figure, from frames of which one in ten is missing.

Section 3.4.4 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), figure 13. An
ODE-RNN reads 64 frames and at each predicts the frame that follows it, 0.008 s later: a state that a dense layer f
moves over the gap between frames, a cell that takes a frame in, and a dense layer that reads the prediction off the
state, moved on by one frame. The error is the mean square over the 17 channels, in their own units. Afterwards the
model walks on by itself, each prediction being its next frame, and the figure forecast.png shows how far that carries.
The rollouts are those of Lechner and Hasani (2020); files are split 75/10/15, a fixed draw drops frames, and windows of
64 frames start 16 apart. Time is measured in 64 frames, as in the authors' code.

The cells are those of the authors' code: three dense layers, each followed by tanh, of sizes 41-72-48-24 for NODE and
ANODE and 65-48-48-48 for HBNODE and GHBNODE, which have h and m to change. The parameters are 8,729 (NODE), 8,819
(ANODE), 8,757 (SONODE, not in the paper), 8,898 (HBNODE) and 8,899 (GHBNODE). The paper prints 8,815 for ANODE, whose
sizes by the code make 8,819, and 8,899 for HBNODE, which counts a xi that it does not have.

That code differs in what is compared: there only the second-order models had a cell with a residual path and were shown
the frame before the one to predict; SONODE disregarded the gaps, and the adjoint method took one gap for all. Here all
models have the residual path, every prediction sees all frames up to its own, and the state moves by each sample's own
gap. In the preset "paper" frames enter as they are and weights start as torch makes
them (the learning rate is 3e-3 for all, where the code has 1e-3 for the first 50 epochs of some); otherwise each
channel is standardised on its way in and restored on its way out, which changes no unit of an error, and what a
residual cell adds starts small. Solves are short, so gradients are taken directly through them and no evaluations are
counted backwards, but in the preset "paper", which has the adjoint method.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import hbnode
from tasks.common.config import make_field, option, parse
from tasks.common.figures import figure_at, legend_beside
from tasks.common.files import exit_on
from tasks.common.run import Run, sweep
from tasks.common.train import Samples, evaluate, fit
from tasks.data.walker2d import CHANNELS, FRAME_SECONDS, generate, read_walker2d
from tasks.models.baselines import BASELINES, IrregularSeriesConfig, make_baseline

LENGTH, STRIDE = 64, 16  # kept frames of a window, and between the starts of two
KEEP = 0.9  # probability of a frame
FRAME = 1 / LENGTH  # duration of a frame, 0.008 s, in the unit of time
DATA_SEED = 891  # of the split and of the frames that are dropped; the same for all runs
HIDDEN = {"node": 24, "anode": 24, "sonode": 23, "hbnode": 24, "ghbnode": 24}  # size of h
CELL = {"node": (72, 48), "anode": (72, 48), "sonode": (46, 46), "hbnode": (48, 48), "ghbnode": (48, 48)}
ANODE_START = 5  # features of an ANODE's initial state that are learned; the others are zeros
PARAMETERS = 8_800  # of a baseline
TORSO, THIGH, LEG, FOOT = 0.4, 0.45, 0.5, 0.2  # lengths in m, of walker2d.xml in gymnasium
DRAWN = {0: "height in m", 3: "right knee in rad", 8: "speed in m/s"}  # channels of the figure


@dataclasses.dataclass(frozen=True)
class WalkerConfig(IrregularSeriesConfig):
    """Options of the Walker2D task."""

    positive = "ahead"

    epochs: int = option(50, "passes over the training windows", may_change=True)
    batch_size: int = option(256, "windows in a step")
    lr: float = option(3e-3, "Adam's learning rate")
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    tol: float = option(1e-5, "rtol = atol of an adaptive method")
    shrink: float = option(0.01, "factor of the initial weights of a residual cell's last layer")
    standardize: bool = option(True, "standardise the channels inside of the model; errors keep their units")
    windows: int = option(0, "training windows, every k-th of all, and of validation likewise; 0 takes all")
    ahead: int = option(48, "frames that a trained model walks on by itself")
    generate: int = option(0, "make so many rollouts of a simple gait in HBNODE_DATA, and stop", may_change=True)


PRESETS = {"paper": "--tol 1e-07 --epochs 500 --solver torchdiffeq --adjoint-norm full --no-standardize --shrink 1"}


# Data


def stamps(frames: int, generator: torch.Generator, after: int = 1) -> Tensor:
    """Return numbers of the frames in each window of a rollout, (windows, LENGTH).

    Arguments:
        frames: length of the rollout.
        generator: decides which frames are kept.
        after: frames that must follow the last one of a window.
    """
    kept = (torch.rand(frames, generator=generator) < KEEP).nonzero()[:, 0]
    if len(kept) < LENGTH:
        return kept.new_zeros(0, LENGTH)
    numbers = kept.unfold(0, LENGTH, STRIDE)
    return numbers[numbers[:, -1] + after < frames]


def windows(rollouts: Sequence[Tensor], seed: int, after: int = 0) -> Samples:
    """Cut rollouts into windows with irregular gaps.

    Returns:
        Frames x (windows, LENGTH, 17), their times t (windows, LENGTH) from 0 on, and the frames that follow: the next
        one of each (windows, LENGTH, 17), or if ``after`` is positive so many after the last (windows, after, 17).
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for rollout in rollouts:
        numbers = stamps(len(rollout), generator, max(after, 1))
        following = numbers[:, -1:] + torch.arange(1, after + 1) if after else numbers + 1
        parts.append((rollout[numbers], (numbers - numbers[:, :1]) * FRAME, rollout[following]))
    x, t, y = (torch.cat(part) for part in zip(*parts, strict=True))
    if len(x) == 0:
        raise ValueError(
            f"the {len(rollouts)} rollouts of a split have at most {max(map(len, rollouts))} frames, too few for one "
            f"window of {LENGTH} kept ones and {max(after, 1)} after them. Fix: longer rollouts, or more of them."
        )
    return x, t, y


def split(rollouts: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Rollouts for training (75 %), validation (10 %) and testing, none in two of them."""
    if len(rollouts) < 3:
        raise ValueError(f"three splits need at least 3 rollouts, got {len(rollouts)}. Fix: more of them.")
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(DATA_SEED)).tolist()
    held = max(1, len(rollouts) // 10)
    train = min(int(0.75 * len(rollouts)), len(rollouts) - held - 1)
    chosen = {"train": order[:train], "validation": order[train : train + held], "test": order[train + held :]}
    return {name: [rollouts[i] for i in numbers] for name, numbers in chosen.items()}


def thin(batch: Samples, count: int) -> Samples:
    """Return so many windows, evenly spaced; all if there are no more."""
    total = len(batch[0])
    return batch if not 0 < count < total else tuple(x[torch.arange(count) * total // count] for x in batch)


@dataclasses.dataclass(frozen=True)
class Splits:
    """The windows of the task, and where each training channel lies."""

    train: Samples
    validation: Samples
    test: Samples
    futures: Samples  # windows of the test rollouts with what follows them
    mean: Tensor
    deviation: Tensor
    source: str

    @classmethod
    def from_options(cls, config: WalkerConfig) -> Splits:
        """Read, split and cut the rollouts; the statistics are those of the training rollouts."""
        rollouts, source = read_walker2d()
        parts = split(rollouts)
        cut = {name: windows(part, DATA_SEED + i) for i, (name, part) in enumerate(parts.items(), 1)}
        wanted = config.windows or len(cut["train"][0])
        frames = torch.cat(parts["train"]).double()
        return cls(
            train=thin(cut["train"], wanted),
            validation=thin(cut["validation"], math.ceil(wanted * len(cut["validation"][0]) / len(cut["train"][0]))),
            test=cut["test"],
            futures=thin(windows(parts["test"], DATA_SEED, config.ahead), 256),
            mean=frames.mean(0).float(),
            deviation=frames.std(0).clamp(min=1e-6).float(),
            source=source,
        )


# Models


class Cell(nn.Module):
    """s <- net(x, s): dense layers, each followed by tanh, of a frame and the state of an ODE-RNN.

    Arguments:
        state_size: size of s.
        hidden: sizes of the layers between.
        shrink: factor of the initial weights of the last layer. On a residual path, where a state sums up what all
            frames add to it, it must start small: else the first predictions are far out, and training is slower.
    """

    def __init__(self, state_size: int, hidden: Sequence[int], shrink: float = 1.0) -> None:
        super().__init__()
        net = hbnode.nn.MLP(CHANNELS + state_size, hidden, state_size, activation=nn.Tanh)
        with torch.no_grad():
            for p in net.layers[-1].parameters():
                p.mul_(shrink)
        self.net = nn.Sequential(net, nn.Tanh())

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        """(batch, 17), (batch, state_size) -> (batch, state_size)."""
        return self.net(torch.cat([x, s], dim=-1))


class FirstFrame(nn.Module):
    """The learned part of an ANODE's initial state: a dense layer of the first frame."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(CHANNELS, size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, T, 17) -> (batch, size)."""
        return self.dense(x[:, 0])


def dense_field(model: str, n: int) -> hbnode.Field:
    """Return a field on h of size n, whose f is one dense layer."""
    func = hbnode.nn.MLP(2 * n, [], n) if model == "sonode" else nn.Linear(n, n)
    return make_field(model, func, anode={"augment": n - ANODE_START})


class Predictor(nn.Module):
    """What all models share: the channels' scale, and a dense layer that reads the next frame off some features."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, features: int, mean: Tensor | None = None, deviation: Tensor | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(features, CHANNELS)
        self.register_buffer("mean", torch.zeros(CHANNELS) if mean is None else mean)
        self.register_buffer("deviation", torch.ones(CHANNELS) if deviation is None else deviation)

    def enter(self, x: Tensor) -> Tensor:
        """Return frames as the model sees them."""
        return (x - self.mean) / self.deviation

    def read(self, features: Tensor) -> Tensor:
        """Return frames in their own units, (..., features) -> (..., 17)."""
        return self.mean + self.deviation * self.head(features)


class Walker(Predictor):
    """An ODE-RNN: the prediction at a frame is the head of the state one frame later.

    Arguments:
        field: of the state, h of size n with a momentum or without.
        n: size of h.
        hidden: sizes of the cell's hidden layers.
        residual: whether the cell has a residual path.
        shrink: see :class:`Cell`; only of a residual one.
        mean: of the channels; None leaves them as they are.
        deviation: likewise.
        solver: arguments of the solves.
    """

    def __init__(
        self,
        field: Any,
        n: int,
        hidden: Sequence[int],
        *,
        residual: bool = True,
        shrink: float = 1.0,
        mean: Tensor | None = None,
        deviation: Tensor | None = None,
        **solver: Any,
    ) -> None:
        super().__init__(n, mean, deviation)
        learned = n - getattr(field, "augment", 0)
        parts = 2 if isinstance(field.initial_state(torch.zeros(1, learned)), tuple) else 1
        self.rnn = hbnode.ODERNN(
            CHANNELS,
            n,
            field=field,
            cell=Cell(parts * n, hidden, shrink if residual else 1.0),
            residual=residual,
            initial_state=FirstFrame(learned) if learned < n else "zeros",
            **solver,
        )

    def forward(self, x: Tensor, t: Tensor, state: hbnode.nn.ODERNNState | None = None) -> tuple[Tensor, Any]:
        """(batch, T, 17), (batch, T) -> the frame after each, (batch, T, 17), and the state to go on from."""
        _, after, state = self.rnn.filter(self.enter(x), t, state)
        later, _ = self.rnn.forecast(after, t.new_tensor([FRAME]))
        return self.read(later[:, :, 0]), state


class Baseline(Predictor):
    """A recurrent network on frames and the gaps between them, called like a Walker."""

    def __init__(self, model: str, *, mean: Tensor | None = None, deviation: Tensor | None = None) -> None:
        net = make_baseline(model, CHANNELS, PARAMETERS, output_size=CHANNELS)
        super().__init__(net.hidden_size, mean, deviation)
        self.net = net

    def forward(self, x: Tensor, t: Tensor, state: tuple[Any, Tensor] | None = None) -> tuple[Tensor, Any]:
        """(batch, T, 17), (batch, T) -> the frame after each, (batch, T, 17), and the state to go on from."""
        inner, last = (None, t[:, :1]) if state is None else state
        gaps = torch.diff(t, dim=1, prepend=last) / FRAME
        features, inner = self.net(self.enter(x), gaps, inner)
        return self.read(features), (inner, t[:, -1:])


def make_model(config: WalkerConfig, mean: Tensor, deviation: Tensor) -> Walker | Baseline:
    """Return the model that the options describe."""
    scale: dict[str, Any] = {"mean": mean, "deviation": deviation} if config.standardize else {}
    if config.model in BASELINES:
        return Baseline(config.model, **scale)
    n = HIDDEN[config.model]
    options = {"shrink": config.shrink, **scale, **config.rnn_options()}
    return Walker(dense_field(config.model, n), n, CELL[config.model], **options)


def squared_error(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return mean squared error of the next frame, over all channels and frames."""
    x, t, y = batch
    return nn.functional.mse_loss(model(x, t)[0], y), {}


def walk_on(model: nn.Module, x: Tensor, t: Tensor, frames: int) -> Tensor:
    """Return a forecast (batch, frames, 17), in which each prediction is the model's next input."""
    with torch.no_grad():
        predicted, state = model(x, t)
        walk = [predicted[:, -1:]]
        while len(walk) < frames:
            t = t[:, -1:] + FRAME
            predicted, state = model(walk[-1], t, state)
            walk.append(predicted)
    return torch.cat(walk, dim=1)


def report(run: Run, model: nn.Module, splits: Splits, config: WalkerConfig) -> dict[str, float]:
    """Return the errors on the test rollouts, of one frame and of walking on, and of standing still instead."""
    x, t, future = (x.to(run.workers.device) for x in splits.futures)
    test = tuple(x.to(run.workers.device) for x in splits.test)
    model.eval()
    walk = walk_on(model, x, t, config.ahead)
    error = nn.functional.mse_loss
    found = {  # in m, rad, m/s and rad/s, squared
        "test_mse": evaluate(run, model, test, squared_error, "test")["test_loss"],
        "test_standing_mse": error(test[0], test[2]).item(),
        "walk_mse": error(walk, future).item(),
        "walk_standing_mse": error(x[:, -1:].expand_as(future), future).item(),
    }
    if run.workers.rank == 0:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        print(f"{config.model}, seed {config.seed}: {listed}")
        one = len(x) // 2
        title = f"{config.model.upper()}: {config.ahead} frames by itself, mean squared error {found['walk_mse']:.3g}"
        future, walk, x, numbers = (part[one].cpu() for part in (future, walk, x, t / FRAME))
        draw_walks(future, walk, x, numbers, title, run.folder)
    return found


# The figure


def skeleton(frames: Tensor) -> dict[str, Tensor]:
    """Return where the limbs are in the plane of the walk: x forwards from the torso's centre, z upwards, in m.

    The torso's angle leans it forwards; the angles of the joints turn the other way, and each carries what hangs on it.

    Arguments:
        frames: observations (..., 17).

    Returns:
        "torso": hip and neck (..., 2, 2); "right" and "left": hip, knee, ankle and toe (..., 4, 2).
    """
    height, lean = frames[..., 0], frames[..., 1]

    def turned(x: float, z: float, angle: Tensor) -> Tensor:
        """Return a vector turned about the y axis, which takes z towards x."""
        return torch.stack([x * angle.cos() + z * angle.sin(), -x * angle.sin() + z * angle.cos()], dim=-1)

    centre = torch.stack([torch.zeros_like(height), height], dim=-1)
    hip, neck = centre + turned(0.0, -TORSO / 2, lean), centre + turned(0.0, TORSO / 2, lean)
    limbs = {"torso": torch.stack([hip, neck], dim=-2)}
    for side, first in (("right", 2), ("left", 5)):
        thigh, leg, foot = (lean - frames[..., first : first + 3].cumsum(-1).movedim(-1, 0)).unbind()
        knee = hip + turned(0.0, -THIGH, thigh)
        ankle = knee + turned(0.0, -LEG, leg)
        limbs[side] = torch.stack([hip, knee, ankle, ankle + turned(FOOT, 0.0, foot)], dim=-2)
    return limbs


def draw_figure(ax: Axes, frame: Tensor, pale: float = 1.0) -> None:
    """Draw the walker on its floor."""
    limbs = skeleton(frame)
    for name, color in (("left", "C4"), ("torso", "0.25"), ("right", "C1")):
        ax.plot(*limbs[name].T, color=color, lw=3.5, solid_capstyle="round", alpha=pale)
    ax.axhline(0.0, color="0.6", lw=1)
    ax.set(xlim=(-0.75, 0.75), ylim=(-0.1, 1.85), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def draw_walks(true: Tensor, walk: Tensor, seen: Tensor, numbers: Tensor, title: str, folder: Path) -> None:
    """Draw, in ``forecast.png``, the walker as it went on and as it was predicted, and three channels over time.

    Arguments:
        true: frames after those seen, (frames, 17).
        walk: the predicted ones.
        seen: frames that the model was shown, (T, 17).
        numbers: of the frames seen, from 0 on, (T,).
        title: of the figure.
        folder: where to put it.
    """
    moments = torch.linspace(0, len(true) - 1, 8).round().long().unique().tolist()
    before, later = (numbers - numbers[-1]) * FRAME_SECONDS, torch.arange(1, len(true) + 1) * FRAME_SECONDS
    with figure_at(folder / "forecast.png", (12, 7), title) as figure:
        above, below = figure.subfigures(2, 1, height_ratios=(1.5, 1), squeeze=False)[:, 0]
        axes = above.subplots(2, len(moments), squeeze=False)
        for row, frames, name in zip(axes, (true, walk), ("simulator", "forecast"), strict=True):
            for ax, moment in zip(row, moments, strict=True):
                draw_figure(ax, frames[moment])
            row[0].set_ylabel(name)
        for ax, moment in zip(axes[0], moments, strict=True):
            ax.set_title(f"+{(moment + 1) * FRAME_SECONDS:.2f} s", fontsize="medium")
        for ax, (channel, label) in zip(below.subplots(1, len(DRAWN)), DRAWN.items(), strict=True):
            ax.plot(before, seen[:, channel], ".", ms=3, color="0.6", label="frames seen")
            ax.plot(later, true[:, channel], color="k", label="simulator")
            ax.plot(later, walk[:, channel], color="C3", ls="--", label="forecast")
            ax.set(xlabel="time in s", ylabel=label)
            ax.axvline(0.0, color="0.8", lw=0.8)
        legend_beside(below)


# The run


def train(config: WalkerConfig) -> None:
    """Train one model with one seed, and let it walk on from the test rollouts."""
    with exit_on(FileNotFoundError, ImportError, ValueError):
        splits = Splits.from_options(config)
        torch.manual_seed(config.seed)
        model = make_model(config, splits.mean, splits.deviation)
        if isinstance(model, Walker) and config.time_unit == 0:
            model.rnn.fit_time_unit(splits.train[1])
    label = f"{config.preset}-{config.model}-seed{config.seed}" + f"-{config.windows}windows" * (config.windows > 0)
    run = Run("walker2d", config, label)
    run.announce(model, config.model, f"{len(splits.train[0])} training windows, {splits.source}")
    fit(run, model, splits.train, splits.validation, squared_error, held_out="validation")
    errors = {} if run.is_finished else report(run, model, splits, config)
    run.finish(model, **errors, training_windows=len(splits.train[0]), data=splits.source)


def main(argv: Sequence[str] | None = None) -> None:
    """Train what the command line says, or make rollouts."""
    config = parse(WalkerConfig, PRESETS, __doc__, argv)
    if config.generate:
        generate(config.generate, config.seed)
    else:
        sweep(config, train)


if __name__ == "__main__":
    main()
