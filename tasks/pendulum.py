"""Pendulum: learn its dynamics from noisy measurements, and compare how well models conserve energy over 100 periods.

The data are short swings of q'' = -sin q from random states: noisy measurements of the angle q and the velocity p. A
model solves its ODE from the first measurement of a swing, and the loss is the squared error at the other measurements.
The models are:

- "port_hamiltonian": q'' = -V'(q) with a learned potential energy V (:class:`hbnode.PortHamiltonian`).
- "sonode": q'' = f(q, q') with a network f.
- "node": (q, p)' = f(q, p) with a network f.

After training, the model is solved for 100 periods, starting at 1.5 radians with velocity 0. "port_hamiltonian" uses
leapfrog with 200 steps per period, which conserves an energy close to the learned one; the others use tsit5 at 1e-7.
The metrics are relative errors of the true energy p²/2 + 1 - cos q, compared with its initial value. "energy_error" is
the largest error, and "energy_error_last" is the largest error in the last period. The figure also shows the other runs
in the same folder.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import integrate, special
from torch import Tensor, nn

import hbnode
from tasks.common.config import TaskConfig, option
from tasks.common.figures import panels
from tasks.common.files import read_json, write_table
from tasks.common.run import Run, command
from tasks.common.train import TEST_SEED, Samples, fit

START = 1.5  # initial angle in radians, with velocity 0
PERIOD = 4 * float(special.ellipk(math.sin(START / 2) ** 2))  # period of the true pendulum that starts at START
PER_PERIOD = 20  # output times per period of the long swing
TITLES = {"node": "NODE", "sonode": "SONODE", "port_hamiltonian": "PortHamiltonian"}


@dataclasses.dataclass(frozen=True)
class PendulumConfig(TaskConfig):
    """Command-line options of the pendulum."""

    models = tuple(TITLES)
    positive = "swings times duration hidden tol"

    epochs: int = option(1000, "passes over the training data", may_change=True)
    batch_size: int = option(50, "swings in a batch")
    lr: float = option(3e-3, "Adam's learning rate")
    schedule: str = option("cosine", "learning rate: constant, cosine to 0", ("constant", "cosine"))
    swings: int = option(100, "swings to train on")
    times: int = option(15, "measurements per swing, without the first")
    duration: float = option(3.0, "duration of a swing; small oscillations have a period of 2 pi")
    noise: float = option(0.01, "standard deviation of the measurements' noise")
    hidden: int = option(32, "units in each of two hidden layers")
    tol: float = option(1e-4, "rtol = atol in training")
    periods: int = option(100, "periods of the long swing", may_change=True)


class Pendulum(nn.Module):
    """A model of the pendulum, which maps initial states (batch, 2) to later states."""

    def __init__(self, model: str, hidden: int, duration: float, times: int, tol: float) -> None:
        super().__init__()
        inputs, outputs = {"node": (2, 2), "sonode": (2, 1), "port_hamiltonian": (1, 1)}[model]
        net = hbnode.nn.MLP(inputs, [hidden, hidden], outputs, activation=nn.Tanh)
        kind = {"node": hbnode.NODE, "sonode": hbnode.SONODE, "port_hamiltonian": hbnode.PortHamiltonian}[model]
        start = split if model != "node" else None
        self.block = hbnode.ODEBlock(kind(net), rtol=tol, atol=tol, initial_state=start)
        self.t: Tensor
        self.register_buffer("t", torch.linspace(0, duration, times + 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the states (batch, times, 2) at the times of all measurements after the first."""
        return swing(self.block, x, self.t)[1:].transpose(0, 1)

    def long_swing(self, periods: int) -> tuple[Tensor, Tensor]:
        """Return the times in periods (T,) and the states (T, 2) of a swing from START with velocity 0, in float64."""
        fine: dict[str, Any] = {"method": "leapfrog", "steps": 200 // PER_PERIOD}
        fine = fine if isinstance(self.block.field, hbnode.PortHamiltonian) else {}
        field = copy.deepcopy(self.block.field).double().cpu()
        block = hbnode.ODEBlock(field, rtol=1e-7, atol=1e-7, initial_state=self.block.initial_state, **fine)
        t = torch.arange(periods * PER_PERIOD + 1, dtype=torch.float64) / PER_PERIOD
        with torch.no_grad():
            return t, swing(block, torch.tensor([[START, 0.0]], dtype=torch.float64), PERIOD * t)[:, 0]


def swing(block: hbnode.ODEBlock, x: Tensor, t: Tensor) -> Tensor:
    """Return the states (T, batch, 2) at the times ``t`` (T,) for the initial states (batch, 2)."""
    path = block.trajectory(x, t)
    return torch.cat(path, -1) if isinstance(path, tuple) else path


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split states (batch, 2) into q and p, each (batch, 1)."""
    q, p = x.split(1, -1)
    return q, p


def make_swings(config: PendulumConfig, seed: int) -> Samples:
    """Return noisy initial states (swings, 2) and later states (swings, times, 2) of the true pendulum."""
    random = np.random.default_rng(seed)
    start = random.uniform(-2.0, 2.0, (config.swings, 2)) * [1.0, 0.7]
    t = np.linspace(0, config.duration, config.times + 1)

    def rates(_: float, y: np.ndarray) -> np.ndarray:
        q, p = y.reshape(2, -1)
        return np.concatenate([p, -np.sin(q)])

    path = integrate.solve_ivp(rates, (0, config.duration), start.T.ravel(), t_eval=t, rtol=1e-9, atol=1e-9).y
    states = path.reshape(2, config.swings, -1).transpose(1, 2, 0)
    states = torch.tensor(states + config.noise * random.normal(size=states.shape), dtype=torch.float32)
    return states[:, 0], states[:, 1:]


def squared_error(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean squared error of the states after the first."""
    start, later = batch
    return nn.functional.mse_loss(model(start), later), {}


def energy(states: Tensor) -> Tensor:
    """Return the energy of the true pendulum in states (..., 2)."""
    q, p = states.unbind(-1)
    return p.square() / 2 + 1 - q.cos()


def draw(folder: Path) -> None:
    """Draw the long swings of all runs in the parent folder, and the errors of their energies."""
    titles = {
        path.parent: TITLES[read_json(path.parent / "config.json")["model"]]
        for path in folder.parent.glob("*/energy.csv")
    }
    order = sorted(titles, key=lambda path: (list(TITLES.values()).index(titles[path]), path))
    angle = np.linspace(-START, START, 400)
    speed = np.sqrt(np.maximum(0, 2 * (np.cos(angle) - math.cos(START))))
    size = (2.8 * len(order) + 5.5, 3.2)
    with panels(folder / "energy.png", 1, len(order) + 1, size=size) as (_, ((*portraits, errors),)):
        for index, (path, ax) in enumerate(zip(order, portraits, strict=True)):
            table = pd.read_csv(path / "energy.csv")
            ax.plot(table["q"], table["p"], f"C{index}", linewidth=0.4)
            ax.plot(np.r_[angle, angle[::-1]], np.r_[speed, -speed], "k--", linewidth=1)
            ax.set(xlabel="angle (rad)", ylabel="velocity" if not index else "", title=titles[path])
            largest = (
                table["error"].abs().groupby(table["period"].astype(int)).max()[:-1]
            )  # without the last time, which starts a new period
            errors.semilogy(largest.index + 0.5, 100 * largest, f"C{index}", label=titles[path])
        errors.set(xlabel="period", ylabel="error of the energy (%)", title="largest error in each period")
        errors.grid(alpha=0.3)


def train(config: PendulumConfig) -> None:
    """Train one model, and solve the long swing."""
    run = Run("pendulum", config, f"{config.preset}-{config.model}-seed{config.seed}")
    model = Pendulum(config.model, config.hidden, config.duration, config.times, config.tol)
    run.announce(model, TITLES[config.model])
    fit(run, model, make_swings(config, config.seed), make_swings(config, TEST_SEED), squared_error)
    found = {}
    if run.workers.rank == 0 and not run.is_finished:
        t, states = model.long_swing(config.periods)
        error = energy(states) / energy(states[0]) - 1
        columns = {"period": t, "q": states[:, 0], "p": states[:, 1], "error": error}
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        write_table(run.folder / "energy.csv", [dict(zip(columns, row, strict=True)) for row in rows])
        last = error[-PER_PERIOD:].abs().max().item()
        found = {"energy_error": error.abs().max().item(), "energy_error_last": last}
        draw(run.folder)
    run.finish(model, **found)


main = command(PendulumConfig, {}, __doc__, train)


if __name__ == "__main__":
    main()
