"""Walker2D, gradients through time: how fast they fade with an ODE between the frames, and without one.

Section 3.3 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), figure 8: the
norm of the adjoint state, dL/dh_t or dL/d[h_t, m_t], against the frames between t and T, L being the error of the last
prediction of a window. The paper sees it vanish for the ODE-RNN and not for (G)HBNODE-RNN, and says that this is the
momentum's doing. In the authors' code only the models with momentum had a cell with a residual path, which by itself
keeps gradients from vanishing, and the norm was taken over a whole batch, where the largest sample decides.

Here all models have the same cell, once with and once without its residual path, and beside the five fields stand two
controls in which the state does not move between frames: the cell alone, on a state of the size of h ("still") and of h
and m together ("still pair"). The norm is each window's own, in float64; shown are medians over windows and seeds,
before and after some training. Frames enter as they are and weights start as torch makes them, as in the preset "paper"
of tasks.walker2d.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from hbnode.diagnostics._shared import ticks_of_short_axis
from tasks.common.config import MODELS, SECOND_ORDER, Options, option, parse
from tasks.common.figures import panels
from tasks.common.files import exit_on
from tasks.common.run import write_study
from tasks.common.train import Samples
from tasks.walker2d import Splits, Walker, WalkerConfig, dense_field, squared_error, thin

N, HIDDEN = 24, (48, 48)  # size of h, of the cell's hidden layers
CONTROLS = {"still": False, "still pair": True}
CONTROL_OF = {model: "still pair" if model in SECOND_ORDER else "still" for model in MODELS}
CELLS = ("residual", "plain")
STAGES = ("untrained", "trained")
BACK = (10, 60)  # frames back from T of which the printed lines tell
Key = tuple[str, str, str]  # cell, stage, model
StillState = Tensor | tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class GradientOptions(Options):
    """Options of the study."""

    positive = "windows epochs batch_size measured seeds lr tol"

    windows: int = option(1000, "training windows, every k-th of all")
    epochs: int = option(5, "passes over them")
    batch_size: int = option(128, "windows in a step")
    measured: int = option(64, "test windows that gradients are taken of")
    seeds: int = option(3, "how many seeds, counting up from --seed")
    seed: int = option(0, "the first one")
    lr: float = option(3e-3, "Adam's learning rate")
    tol: float = option(1e-5, "rtol = atol of the solver")
    out: str = option("runs/walker2d_gradients", "folder for the table and the figure")


class StillField(nn.Module):
    """No ODE: a state that does not move between frames, so that an ODE-RNN is its cell alone."""

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def initial_state(self, x: Tensor) -> StillState:
        """h, or h and a second part of zeros."""
        return (x, torch.zeros_like(x)) if self.pair else x

    def forward(self, t: Tensor, state: StillState) -> StillState:
        """Zero."""
        if isinstance(state, Tensor):
            return torch.zeros_like(state)
        return torch.zeros_like(state[0]), torch.zeros_like(state[1])

    def readout(self, state: StillState) -> Tensor:
        """Return the first part."""
        return state if isinstance(state, Tensor) else state[0]


def make(model: str, residual: bool, tol: float) -> Walker:
    """One of the models, or a control, around the common cell."""
    field = StillField(CONTROLS[model]) if model in CONTROLS else dense_field(model, N)
    return Walker(field, N, HIDDEN, residual=residual, rtol=tol, atol=tol)


def adjoint_norms(model: Walker, batch: Samples) -> Tensor:
    """|dL/ds_t| of every window, (windows, T), L being its error at the last frame.

    s_t, h or h and m, is the state that frame t leaves. All that it does later it does through the cell's output at t,
    with or without a residual path, and so the gradients are the same.
    """
    x, t, y = batch
    outputs: list[Tensor] = []
    hook = model.rnn.cell.register_forward_hook(lambda cell, inputs, output: outputs.append(output))
    predicted, _ = model(x, t)
    hook.remove()
    error = (predicted[:, -1] - y[:, -1]).square().mean(-1).sum()  # the windows do not touch each other
    return torch.stack([gradient.norm(dim=-1) for gradient in torch.autograd.grad(error, outputs)], dim=1)


def train(model: Walker, data: Samples, options: GradientOptions, seed: int) -> float:
    """Return some epochs of the task; the mean loss of the last one."""
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
    """Return the norms of all models and cells, (seeds * windows, T), and the last training losses."""
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
            print(f"{cell} cell, {model}, trained: " + sentence(torch.cat(norms[cell, "trained", model])))
    return {key: torch.cat(found) for key, found in norms.items()}, losses


def ratios(norms: Tensor) -> Tensor:
    """Return median over the windows of |dL/ds_t| / |dL/ds_T|, (T,), by frames back from T."""
    return (norms / norms[:, -1:]).flip(1).median(0).values


def remaining(norms: Tensor) -> dict[int, float]:
    """Return what is left of the gradient 10 and 60 frames back from T, or as far back as the window goes."""
    ratio = ratios(norms)
    return {back: ratio[back].item() for back in sorted({min(back, len(ratio) - 1) for back in BACK})}


def sentence(norms: Tensor) -> str:
    """Return the same in words."""
    return ", ".join(f"{back} frames back {value:.2g}" for back, value in remaining(norms).items())


def comparison(norms: Mapping[Key, Tensor]) -> str:
    """Return a line for each cell, stage and model, and what the ODE and the residual path change."""
    lines = []
    logs: dict[Key, float] = {}
    for key, found in norms.items():
        back, value = list(remaining(found).items())[-1]
        logs[key] = math.log10(max(value, 1e-300))
    for cell, stage in itertools.product(CELLS, STAGES):
        lines.append(f"{cell} cell, {stage}; norm of the gradient, that at T being 1:")
        for model in MODELS:
            own, alone = (sentence(norms[cell, stage, name]) for name in (model, CONTROL_OF[model]))
            lines.append(f"  {model + ':':9}{own}; its cell without an ODE: {alone}")
    for stage in STAGES:
        for cell in CELLS:
            changes = [logs[cell, stage, model] - logs[cell, stage, CONTROL_OF[model]] for model in MODELS]
            least, most = (10**change for change in (min(changes), max(changes)))
            lines.append(
                f"{stage}, {cell} cell: {back} frames back the ODE changes it by a factor of {least:.2g} to {most:.2g}"
            )
        paths = [logs["residual", stage, model] - logs["plain", stage, model] for model in (*MODELS, *CONTROLS)]
        lines.append(f"{stage}: the residual path changes it by a factor of 1e{min(paths):.0f} to 1e{max(paths):.0f}")
    return "\n".join(lines)


def table(norms: Mapping[Key, Tensor]) -> list[dict[str, object]]:
    """Return rows of the quantiles of the norms, and the median ratio, by frames back from T."""
    levels = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    rows: list[dict[str, object]] = []
    for (cell, stage, model), found in norms.items():
        columns = [*torch.quantile(found.flip(1), levels, dim=0).tolist(), ratios(found).tolist()]
        for back, values in enumerate(zip(*columns, strict=True)):
            row = {"cell": cell, "stage": stage, "model": model, "frames_back": back}
            names = ("median", "q10", "q90", "ratio")
            rows.append(row | {name: f"{value:.6g}" for name, value in zip(names, values, strict=True)})
    return rows


def draw_norms(norms: Mapping[Key, Tensor], about: str, folder: Path) -> None:
    """Draw the medians against T - t, a panel for each cell and stage, in ``adjoint_norms.png``."""
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
    """Measure all models; write ``adjoint_norms.csv``, ``.json`` and ``.png``, and say what the ODE does."""
    options = parse(GradientOptions, {}, __doc__, argv)
    with exit_on(FileNotFoundError, ValueError):
        splits = Splits.from_options(WalkerConfig(windows=options.windows))
    norms, losses = measure(splits, options)
    said = comparison(norms)
    print(said)
    losses_of = {"last_training_losses": losses, "comparison": said.splitlines(), "data": splits.source}
    about = {"task": "walker2d_gradients", **dataclasses.asdict(options), **losses_of}
    out = Path(options.out)
    write_study(out, "adjoint_norms", table(norms), **about)
    title = f"seeds: {options.seeds}, epochs: {options.epochs}, training windows: {len(splits.train[0])}"
    draw_norms(norms, title, out)
    print(f"figure: {out / 'adjoint_norms.png'}")


if __name__ == "__main__":
    main()
