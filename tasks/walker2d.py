"""Walker2D: predict the next frame of a simulated walking figure, with one frame in ten missing.

Section 3.4.4 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), figure 13. An
ODE-RNN takes 64 frames as input and predicts the frame after each, 0.008 s later. Its f is a dense layer, and its cell
updates the state at each frame. A dense layer maps the state one frame later to the prediction. The error is the mean
square over the 17 channels, in their original units. After training, the model forecasts 48 frames, taking its own
predictions as inputs; forecast.png shows them. The rollouts are those of Lechner and Hasani (2020). The files are split
75/10/15 into training, validation and test. The dropped frames are the same for all runs. Windows of 64 frames start
every 16 frames. The time unit is 64 frames, as in the authors' code.

The cells are those of the authors' code: three dense layers, each followed by tanh, of sizes 41-72-48-24 for NODE and
ANODE and 65-48-48-48 for HBNODE and GHBNODE, whose state is h and m. The parameters are 8,729 (NODE), 8,819 (ANODE),
8,757 (SONODE, not in the paper), 8,898 (HBNODE) and 8,899 (GHBNODE). The paper reports 8,815 for ANODE, while the sizes
in the code give 8,819. It reports 8,899 for HBNODE, which counts a parameter xi that HBNODE does not have.

In the authors' code only the second-order models had a cell with a residual path, and only their inputs included the
last frame before the predicted one. SONODE ignored the time gaps, and the adjoint method used the same gap for all
samples. Here all models have the residual path, every prediction uses all earlier frames, and each sample has its own
gaps. In the preset "paper" frames are not standardised and weights have torch's initialisation (the learning rate is
3e-3 for all; the code has 1e-3 for the first 50 epochs of some). Without this preset the channels are standardised
inside the model, and the initial output of a residual cell is small. The solves are short, so gradients are computed by
backpropagation through the solver, without backward function evaluations. The preset "paper" uses the adjoint method.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import make_field, option
from tasks.common.figures import panels
from tasks.common.run import Run, command
from tasks.common.train import Samples, evaluate, fit
from tasks.data.walker2d import CHANNELS, FRAME_SECONDS, read_walker2d
from tasks.models.baselines import BASELINES, IrregularSeriesConfig, make_baseline

LENGTH, STRIDE = 64, 16  # number of frames in a window, and between the starts of two windows
KEEP = 0.9  # probability that a frame is not dropped
FRAME = 1 / LENGTH  # duration of a frame (0.008 s) in time units
DATA_SEED = 891  # seed of the split and of the dropped frames, the same for all runs
HIDDEN = {"node": 24, "anode": 24, "sonode": 23, "hbnode": 24, "ghbnode": 24}  # size of h
CELL = {"node": (72, 48), "anode": (72, 48), "sonode": (46, 46), "hbnode": (48, 48), "ghbnode": (48, 48)}
ANODE_START = 5  # number of learned features in an ANODE's initial state; the others are zeros
PARAMETERS = 8_800  # approximate number of parameters of a baseline
DRAWN = {0: "height in m", 3: "right knee in rad", 8: "speed in m/s"}  # channels in the figure


@dataclasses.dataclass(frozen=True)
class WalkerConfig(IrregularSeriesConfig):
    """Command-line options of the Walker2D task."""

    positive = "ahead"

    epochs: int = option(50, "passes over the training windows", may_change=True)
    batch_size: int = option(256, "windows in a batch")
    lr: float = option(3e-3, "Adam's learning rate")
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    tol: float = option(1e-5, "rtol = atol of an adaptive method")
    shrink: float = option(0.01, "factor of the initial weights of a residual cell's last layer")
    standardize: bool = option(True, "standardise the channels inside of the model; errors are in the original units")
    windows: int = option(0, "number of training windows, evenly spaced; validation is reduced in proportion; 0: all")
    ahead: int = option(48, "number of frames that the trained model forecasts")


PRESETS = {"paper": "--tol 1e-07 --epochs 500 --solver torchdiffeq --adjoint-norm full --no-standardize --shrink 1"}


# Data


def stamps(frames: int, generator: torch.Generator, after: int = 1) -> Tensor:
    """Return the frame indices of each window of a rollout, (windows, LENGTH).

    Arguments:
        frames: number of frames in the rollout.
        generator: random generator for the dropped frames.
        after: the number of frames that must follow a window.
    """
    kept = (torch.rand(frames, generator=generator) < KEEP).nonzero()[:, 0]
    if len(kept) < LENGTH:
        return kept.new_zeros(0, LENGTH)
    numbers = kept.unfold(0, LENGTH, STRIDE)
    return numbers[numbers[:, -1] + after < frames]


def windows(rollouts: Sequence[Tensor], seed: int, after: int = 0) -> Samples:
    """Cut rollouts into windows with irregular gaps.

    Returns:
        Frames (windows, LENGTH, 17), their times (windows, LENGTH) starting at 0, and targets. The targets are the
        frame after each, (windows, LENGTH, 17). If ``after`` is positive, they are this number of frames after the
        window, (windows, after, 17).
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
            f"the {len(rollouts)} rollouts of a split have at most {max(map(len, rollouts))} frames, too few for a "
            f"window of {LENGTH} and {max(after, 1)} after it. Fix: longer rollouts, or more of them."
        )
    return x, t, y


def split(rollouts: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Split the rollouts into training (75 %), validation (10 %) and test."""
    if len(rollouts) < 3:
        raise ValueError(f"three splits need at least 3 rollouts, got {len(rollouts)}. Fix: more of them.")
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(DATA_SEED)).tolist()
    held = max(1, len(rollouts) // 10)
    train = min(int(0.75 * len(rollouts)), len(rollouts) - held - 1)
    chosen = {"train": order[:train], "validation": order[train : train + held], "test": order[train + held :]}
    return {name: [rollouts[i] for i in numbers] for name, numbers in chosen.items()}


def thin(batch: Samples, count: int) -> Samples:
    """Return ``count`` evenly spaced windows; all if there are fewer or ``count`` is 0."""
    total = len(batch[0])
    return batch if not 0 < count < total else tuple(x[torch.arange(count) * total // count] for x in batch)


@dataclasses.dataclass(frozen=True)
class Splits:
    """The training, validation and test windows, and mean and standard deviation of the training channels."""

    train: Samples
    validation: Samples
    test: Samples
    futures: Samples  # test windows with the frames after each window
    mean: Tensor
    deviation: Tensor
    source: str

    @classmethod
    def from_options(cls, config: WalkerConfig) -> Splits:
        """Read the rollouts, split them, and cut them into windows."""
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
    """A recurrent cell s <- net(x, s), where net has dense layers, each followed by tanh. x is a frame, s the state.

    Arguments:
        state_size: size of s.
        hidden: sizes of the hidden layers.
        shrink: factor of the initial weights of the last layer. With a residual path the state is a sum over all
            frames. If its terms are large, the first predictions are bad, and training is slower.
    """

    def __init__(self, state_size: int, hidden: Sequence[int], shrink: float = 1.0) -> None:
        super().__init__()
        net = hbnode.nn.MLP(CHANNELS + state_size, hidden, state_size, activation=nn.Tanh)
        with torch.no_grad():
            for p in net.layers[-1].parameters():
                p.mul_(shrink)
        self.net = nn.Sequential(net, nn.Tanh())

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the new state (batch, state_size) from a frame (batch, 17) and the state."""
        return self.net(torch.cat([x, s], dim=-1))


class FirstFrame(nn.Module):
    """The learned part of an ANODE's initial state: a dense layer applied to the first frame."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(CHANNELS, size)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (batch, size) of the first of the frames (batch, T, 17)."""
        return self.dense(x[:, 0])


def dense_field(model: str, n: int) -> hbnode.Field:
    """Return a field for h of size n, whose f is one dense layer."""
    func = hbnode.nn.MLP(2 * n, [], n) if model == "sonode" else nn.Linear(n, n)
    return make_field(model, func, anode={"augment": n - ANODE_START})


class Predictor(nn.Module):
    """Base class of all models. It scales the channels, and maps features to the next frame by a dense layer."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, features: int, mean: Tensor | None = None, deviation: Tensor | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(features, CHANNELS)
        self.register_buffer("mean", torch.zeros(CHANNELS) if mean is None else mean)
        self.register_buffer("deviation", torch.ones(CHANNELS) if deviation is None else deviation)

    def enter(self, x: Tensor) -> Tensor:
        """Return the standardised frames."""
        return (x - self.mean) / self.deviation

    def read(self, features: Tensor) -> Tensor:
        """Map features (..., features) to frames (..., 17) in the original units."""
        return self.mean + self.deviation * self.head(features)


class Walker(Predictor):
    """An ODE-RNN. It predicts the next frame by a linear layer from the state one frame later.

    Arguments:
        field: field of the ODE between frames, whose state is h, or h and its momentum.
        n: size of h.
        hidden: sizes of the cell's hidden layers.
        residual: whether the cell has a residual path.
        shrink: see :class:`Cell`; only for a residual one.
        mean: mean of the channels; None: 0.
        deviation: standard deviation of the channels; None: 1.
        solver: keyword arguments of the ODE solver.
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
        """Return the frame after each (batch, T, 17), and the state, of frames (batch, T, 17) and times (batch, T)."""
        _, after, state = self.rnn.filter(self.enter(x), t, state)
        later, _ = self.rnn.forecast(after, t.new_tensor([FRAME]))
        return self.read(later[:, :, 0]), state


class Baseline(Predictor):
    """A recurrent network that takes frames and the time gaps between them, with the interface of Walker."""

    def __init__(self, model: str, *, mean: Tensor | None = None, deviation: Tensor | None = None) -> None:
        net = make_baseline(model, CHANNELS, PARAMETERS, output_size=CHANNELS)
        super().__init__(net.hidden_size, mean, deviation)
        self.net = net

    def forward(self, x: Tensor, t: Tensor, state: tuple[Any, Tensor] | None = None) -> tuple[Tensor, Any]:
        """Return the frame after each (batch, T, 17), and the state, of frames (batch, T, 17) and times (batch, T)."""
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
    """Return the mean squared error of the next frame, over all channels and frames."""
    x, t, y = batch
    return nn.functional.mse_loss(model(x, t)[0], y), {}


def walk_on(model: nn.Module, x: Tensor, t: Tensor, frames: int) -> Tensor:
    """Return a forecast (batch, frames, 17), for which each prediction is the model's next input."""
    with torch.no_grad():
        predicted, state = model(x, t)
        walk = [predicted[:, -1:]]
        while len(walk) < frames:
            t = t[:, -1:] + FRAME
            predicted, state = model(walk[-1], t, state)
            walk.append(predicted)
    return torch.cat(walk, dim=1)


def report(run: Run, model: nn.Module, splits: Splits, config: WalkerConfig) -> dict[str, float]:
    """Return the test errors of the next frame, of the forecast, and of repeating the last frame."""
    x, t, future = run.workers.to_device(splits.futures)
    test = splits.test
    model.eval()
    walk = walk_on(model, x, t, config.ahead)
    error = nn.functional.mse_loss
    found = {  # in squared units: m, rad, m/s and rad/s
        "test_mse": evaluate(run, model, test, squared_error, "test")["test_loss"],
        "test_standing_mse": error(test[0], test[2]).item(),
        "walk_mse": error(walk, future).item(),
        "walk_standing_mse": error(x[:, -1:].expand_as(future), future).item(),
    }
    if run.workers.rank == 0:
        listed = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        print(f"{config.model}, seed {config.seed}: {listed}")
        one = len(x) // 2
        title = f"{config.model.upper()}: {config.ahead} frames ahead, mean squared error {found['walk_mse']:.3g}"
        future, walk, x, numbers = (part[one].cpu() for part in (future, walk, x, t / FRAME))
        draw_forecast(future, walk, x, numbers, title, run.folder)
    return found


# The figure


def draw_forecast(true: Tensor, walk: Tensor, x: Tensor, numbers: Tensor, title: str, folder: Path) -> None:
    """Draw three channels over time, true and forecast, in ``forecast.png``.

    Arguments:
        true: true frames after the window, (frames, 17).
        walk: forecast frames, (frames, 17).
        x: frames of the window, (T, 17).
        numbers: indices of the frames of the window, starting at 0, (T,).
        title: title of the figure.
        folder: where to write it.
    """
    before, later = (numbers - numbers[-1]) * FRAME_SECONDS, torch.arange(1, len(true) + 1) * FRAME_SECONDS
    with panels(folder / "forecast.png", 1, len(DRAWN), size=(12, 3.2), title=title) as (_, axes):
        for ax, (channel, label) in zip(axes[0], DRAWN.items(), strict=True):
            ax.plot(before, x[:, channel], ".", ms=3, color="0.6", label="inputs")
            ax.plot(later, true[:, channel], color="k", label="simulator")
            ax.plot(later, walk[:, channel], color="C3", ls="--", label="forecast")
            ax.set(xlabel="time in s", ylabel=label)
            ax.axvline(0.0, color="0.8", lw=0.8)


# The run


def train(config: WalkerConfig) -> None:
    """Train one model with one seed, and forecast the test rollouts."""
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


main = command(WalkerConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
