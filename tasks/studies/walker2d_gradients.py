"""Walker2D: how gradients decay through time, with an ODE between the frames and without one.

Section 3.3 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), figure 8, shows
the norm of the adjoint state, dL/dh_t or dL/d[h_t, m_t], against the number of frames between t and T. L is the error
of the last prediction of a window. In the paper this norm vanishes for the ODE-RNN but not for (G)HBNODE-RNN, and the
paper attributes the difference to momentum. But in the authors' code only the models with momentum had a cell with a
residual path, which also prevents vanishing gradients. The norm was computed over a whole batch, where the largest
sample dominates.

This study uses the same cell for all models, once with and once without a residual path. Besides the five ODE models
there are two controls whose state is constant between frames, so that only the cell changes it. The state has the size
of h in the control "still", and of h and m together in "still pair". The norm is computed for each window in float64.
The results are medians over windows and seeds, before and after training. As in the preset "paper" of tasks.walker2d,
frames are not standardised and weights have torch's default initialisation.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hbnode.diagnostics._shared import ticks_of_short_axis
from tasks.common.config import MODELS, Options, option, parse
from tasks.common.figures import panels
from tasks.common.files import exit_on
from tasks.common.run import write_study
from tasks.common.train import Samples
from tasks.walker2d import Splits, Walker, WalkerConfig, dense_field, squared_error, thin

N, HIDDEN = 24, (48, 48)  # size of h; sizes of the cell's hidden layers
CONTROLS = {"still": False, "still pair": True}
CELLS = ("residual", "plain")
STAGES = ("untrained", "trained")
BACK = 60  # the number of frames before T for which ratios are printed
Key = tuple[str, str, str]  # cell, stage, model
StillState = Tensor | tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class GradientOptions(Options):
    """Command-line options of the study."""

    positive = "windows epochs batch_size measured seeds lr tol"

    windows: int = option(1000, "training windows, evenly spaced among all")
    epochs: int = option(5, "passes over the training windows")
    batch_size: int = option(128, "windows in a batch")
    measured: int = option(64, "test windows for which gradients are computed")
    seeds: int = option(3, "number of seeds, counting up from --seed")
    seed: int = option(0, "the first seed")
    lr: float = option(3e-3, "Adam's learning rate")
    tol: float = option(1e-5, "rtol = atol of the solver")
    out: str = option("runs/walker2d_gradients", "folder for the table and the figure")


class StillField(nn.Module):
    """A field with derivative zero, so that the state of an ODE-RNN changes only by its cell."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def initial_state(self, x: Tensor) -> StillState:
        """Return h, or the pair of h and zeros."""
        return (x, torch.zeros_like(x)) if self.pair else x

    def forward(self, t: Tensor, state: StillState) -> StillState:
        """Return the derivative of the state, which is zero."""
        if isinstance(state, Tensor):
            return torch.zeros_like(state)
        return torch.zeros_like(state[0]), torch.zeros_like(state[1])

    def readout(self, state: StillState) -> Tensor:
        """Return the first tensor of the state."""
        return state if isinstance(state, Tensor) else state[0]


def make(model: str, residual: bool, tol: float) -> Walker:
    """Return an ODE-RNN or a control with the common cell."""
    field = StillField(CONTROLS[model]) if model in CONTROLS else dense_field(model, N)
    return Walker(field, N, HIDDEN, residual=residual, rtol=tol, atol=tol)


def adjoint_norms(model: Walker, batch: Samples) -> Tensor:
    """Return the norms |dL/ds_t|, (windows, T), where L is the error at the last frame of each window.

    s_t is the state after frame t: h, or h and m. It is the output of the cell at t, with or without a residual path.
    """
    x, t, y = batch
    outputs: list[Tensor] = []
    hook = model.rnn.cell.register_forward_hook(lambda cell, inputs, output: outputs.append(output))
    predicted, _ = model(x, t)
    hook.remove()
    error = (predicted[:, -1] - y[:, -1]).square().mean(-1).sum()  # windows are independent
    return torch.stack([gradient.norm(dim=-1) for gradient in torch.autograd.grad(error, outputs)], dim=1)


def train(model: Walker, data: Samples, options: GradientOptions, seed: int) -> float:
    """Train for a few epochs, and return the mean loss of the last epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(options.epochs):
        losses = []
        for chosen in torch.randperm(len(data[0]), generator=generator).split(options.batch_size):
            loss, _ = squared_error(model, tuple(x[chosen] for x in data))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def measure(splits: Splits, options: GradientOptions) -> tuple[dict[Key, Tensor], dict[str, float]]:
    """Return the norms of all models and cells, (seeds * windows, T), and the losses of the last training epoch."""
    exact = tuple(x.double() for x in thin(splits.test, options.measured))
    norms: dict[Key, list[Tensor]] = {}
    losses: dict[str, float] = {}
    for cell in CELLS:
        for model in (*MODELS, *CONTROLS):
            for seed in range(options.seed, options.seed + options.seeds):
                torch.manual_seed(seed)
                walker = make(model, cell == "residual", options.tol)
                for stage in STAGES:
                    if stage == "trained":
                        losses[f"{cell}, {model}, seed {seed}"] = train(walker, splits.train, options, seed)
                    found = adjoint_norms(copy.deepcopy(walker).double(), exact)
                    norms.setdefault((cell, stage, model), []).append(found)
            ratio = ratios(torch.cat(norms[cell, "trained", model]))
            back = min(BACK, len(ratio) - 1)
            print(f"{cell} cell, {model}, trained: {back} frames back {ratio[back]:.2g}")
    return {key: torch.cat(found) for key, found in norms.items()}, losses


def ratios(norms: Tensor) -> Tensor:
    """Return the median over the windows of |dL/ds_t| / |dL/ds_T|, (T,), beginning at t = T and going back in time."""
    return (norms / norms[:, -1:]).flip(1).median(0).values


def table(norms: Mapping[Key, Tensor]) -> list[dict[str, object]]:
    """Return the table rows: the median ratio of the norms against the number of frames before T."""
    return [
        {"cell": cell, "stage": stage, "model": model, "frames_back": back, "ratio": f"{ratio:.6g}"}
        for (cell, stage, model), found in norms.items()
        for back, ratio in enumerate(ratios(found).tolist())
    ]


def draw_norms(norms: Mapping[Key, Tensor], about: str, folder: Path) -> None:
    """Draw the median ratios against T - t in ``adjoint_norms.png``, with a panel for each cell and stage."""
    styles = {model: {"color": f"C{i}"} for i, model in enumerate(MODELS)}
    styles |= {"still": {"color": "k", "ls": "--"}, "still pair": {"color": "0.5", "ls": ":"}}
    path, size = folder / "adjoint_norms.png", (12.5, 7)
    with panels(path, len(CELLS), len(STAGES), size=size, title=f"Walker2D: {about}", sharex=True) as (_, axes):
        for ax, (cell, stage) in zip(axes.flat, itertools.product(CELLS, STAGES), strict=True):
            for model, style in styles.items():
                median = norms[cell, stage, model].flip(1).median(0).values
                label = f"{model}, no ODE" if model in CONTROLS else model.upper()
                ax.semilogy(median.clamp(min=1e-30), label=label, lw=1.5, **style)
            ax.set(title=f"{cell} cell, {stage}", ylim=(max(ax.get_ylim()[0], 1e-16), None))
            ticks_of_short_axis(ax.yaxis)
            ax.grid(alpha=0.3)
        for row, last in zip(axes, axes[-1], strict=True):
            row[0].set_ylabel("|dL/d[h, m]|, median")
            last.set_xlabel("T - t in frames seen")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all models, and write ``adjoint_norms.csv``, ``.json`` and ``.png``."""
    options = parse(GradientOptions, {}, __doc__, argv)
    with exit_on(FileNotFoundError, ValueError):
        splits = Splits.from_options(WalkerConfig(windows=options.windows))
    norms, losses = measure(splits, options)
    about = {"task": "walker2d_gradients", **dataclasses.asdict(options), "data": splits.source}
    about |= {"last_training_losses": losses}
    out = Path(options.out)
    write_study(out, "adjoint_norms", table(norms), **about)
    title = f"seeds: {options.seeds}, epochs: {options.epochs}, training windows: {len(splits.train[0])}"
    draw_norms(norms, title, out)
    print(f"figure: {out / 'adjoint_norms.png'}")


if __name__ == "__main__":
    main()
