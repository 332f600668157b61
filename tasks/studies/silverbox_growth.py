"""Silverbox without training: growth of the solutions of the five models at initialisation.

Figure 7 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022): the norm of h(t)
over 63 samples of the Silverbox benchmark, where f is a dense layer of the state and the input V1(t). As in the
authors' code, both signals are centred and multiplied by 100, the sampling interval is one unit of time, and the
initial momentum of second-order models is a learned scalar. In that code V1 was extrapolated beyond t = 1; here it is
interpolated. The paper shows the mean over ten seeds, which is dominated by the worst seed. This study shows the
median, quantiles and mean over many seeds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import MODELS, Options, make_field, option, parse
from tasks.common.figures import panels
from tasks.common.files import exit_on
from tasks.common.run import write_study
from tasks.data.silverbox import read_silverbox

TOL = 1e-7  # tolerance of the paper


@dataclasses.dataclass(frozen=True)
class GrowthOptions(Options):
    """Command-line options of the study."""

    positive = "draws"

    draws: int = option(100, "number of random initialisations of each model")
    seed: int = option(0, "seed of the first initialisation")
    out: str = option("runs/silverbox_growth", "folder for the table and the figure")


class Draws:
    """Many random initialisations of a model of figure 7, solved as samples of one batch with different weights."""

    def __init__(self, model: str, seeds: Sequence[int], signal: Callable[[Tensor], Tensor]) -> None:
        self.model, self.signal = model, signal
        size, parts = (2, 1) if model == "anode" else (1, 2 if model == "sonode" else 1)
        weights, biases, starts = [], [], []
        for seed in seeds:
            torch.manual_seed(seed)
            dense = nn.Linear(parts * size + 1, size)
            weights.append(dense.weight.detach())
            biases.append(dense.bias.detach())
            starts.append(nn.Linear(1, 1, bias=False).weight.detach()[0])
        self.weight, self.bias, self.start = (torch.stack(x).double() for x in (weights, biases, starts))

    def take(self, index: slice) -> Draws:
        """Return a subset of the initialisations."""
        part = object.__new__(Draws)
        part.model, part.signal = self.model, self.signal
        part.weight, part.bias, part.start = self.weight[index], self.bias[index], self.start[index]
        return part

    def dense(self, t: Tensor, *state: Tensor) -> Tensor:
        """Return the dense layer f(t, h) or f(t, h, v), where each sample has its own weights."""
        u = self.signal(t)
        x = torch.cat([*state, u.expand(len(self.weight), 1)], dim=-1)
        return torch.einsum("bij,bj->bi", self.weight, x) + self.bias

    def field(self) -> hbnode.Field:
        """Return a field that evaluates the models of all initialisations as one batch."""
        timed = {"time_dependent": True}
        damped: dict[str, Any] = {**timed, "learn_damping": False, "initial_momentum": lambda x: self.start}
        xi = {"xi": math.log(2.0), "learn_xi": False}
        return make_field(
            self.model,
            self.dense,
            node=timed,
            anode={**timed, "augment": 1},
            sonode={**timed, "initial_velocity": lambda x: self.start},
            hbnode=damped,
            ghbnode={**damped, **xi, "activation": nn.Hardtanh(-5.0, 5.0)},
        )

    def norms(self, start: float, times: Tensor, tol: float) -> Tensor:
        """Return the norm of h(t), (times, initialisations). It is infinite after a divergence."""
        field = self.field()
        state = field.initial_state(torch.full((len(self.weight), 1), start, dtype=torch.float64))
        try:
            solved = hbnode.odeint(field, state, times, rtol=tol, atol=tol, per_sample=True, max_steps=100_000)
            return field.readout(solved).norm(dim=-1)
        except hbnode.SolverError as error:
            if len(self.weight) > 1:  # solve one at a time to find which of them diverge
                each = [self.take(slice(i, i + 1)).norms(start, times, tol) for i in range(len(self.weight))]
                return torch.cat(each, dim=1)
            reached = int((times < error.t).sum()) - 1
            whole = torch.full((len(times), 1), math.inf, dtype=torch.float64)
            whole[0] = abs(start)
            if reached > 1:
                whole[:reached] = self.norms(start, times[:reached], tol)
            return whole


def statistics(norms: Tensor) -> dict[str, Tensor]:
    """Return median, 10 % and 90 % quantile, mean and number of divergences over the last dimension of (times, draws).

    A quantile is the nearest value without interpolation, so that it is also defined if some values are infinite.
    """
    levels = {"median": 0.5, "q10": 0.1, "q90": 0.9}
    found = {name: torch.quantile(norms, q, dim=1, interpolation="nearest") for name, q in levels.items()}
    return {**found, "mean": norms.mean(1), "diverged": norms.isinf().sum(1)}


def table(times: Tensor, found: Mapping[str, Mapping[str, Tensor]]) -> list[dict[str, object]]:
    """Return the table rows: the statistics of every model at every time."""
    return [
        {"model": model, "t": f"{t:g}"} | {name: values[i].item() for name, values in columns.items()}
        for model, columns in found.items()
        for i, t in enumerate(times.tolist())
    ]


def draw_growth(times: Tensor, found: Mapping[str, Mapping[str, Tensor]], draws: int, folder: Path) -> None:
    """Draw quantiles and mean of each model over time, on one logarithmic axis, in ``growth.png``."""
    title = f"Silverbox, {draws} initialisations of each model"
    with panels(folder / "growth.png", 1, len(found), size=(15, 3.2), title=title, sharey=True) as (_, axes):
        for index, (ax, (model, columns)) in enumerate(zip(axes[0], found.items(), strict=True)):
            color, band = f"C{index}", (columns["q10"], columns["q90"])
            ax.fill_between(times, *band, color=color, alpha=0.25, lw=0, label="10 % to 90 %")
            ax.semilogy(times, columns["median"], color=color, label="median")
            ax.semilogy(times, columns["mean"], color=color, ls="--", lw=1, label="mean, as in the paper")
            ax.set(title=model.upper(), xlabel="t in samples")
        axes[0, 0].set_ylabel("|h(t)|")


def main(argv: Sequence[str] | None = None) -> None:
    """Solve every model with many initialisations, and write ``growth.csv``, ``growth.json`` and ``growth.png``."""
    options = parse(GrowthOptions, {}, __doc__, argv)
    with exit_on(FileNotFoundError, ValueError):
        record = read_silverbox()
    v1, v2 = (100 * (record - record.mean(0))).unbind(1)
    times = torch.arange(64, dtype=torch.float64)
    signal = hbnode.Signal(torch.arange(66, dtype=torch.float64), v1[:66], "cubic")
    seeds = range(options.seed, options.seed + options.draws)
    found, last = {}, {}
    for model in MODELS:
        found[model] = statistics(Draws(model, seeds, signal).norms(v2[0].item(), times, TOL))
        last[model] = {name: values[-1].item() for name, values in found[model].items()}
        print(f"{model}: |h(63)| " + ", ".join(f"{name} {value:.4g}" for name, value in last[model].items()))
    out = Path(options.out)
    about = {"task": "silverbox_growth", "draws": options.draws, "seed": options.seed, "tol": TOL, "at_63": last}
    write_study(out, "growth", table(times, found), **about)
    draw_growth(times, found, options.draws, out)
    print(f"figure: {out / 'growth.png'}")


if __name__ == "__main__":
    main()
