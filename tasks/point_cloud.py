"""Point cloud separation: a disc inside an annulus, which a NODE in the plane cannot separate.

Section 3.4.1 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), figure 9: 40
points uniform in |r| < 0.5 and 80 in 0.85 < |r| < 1, an MLP for f, integration from 0 to 1, and a dense layer. The task
draws the evolution of the cloud through the ODE.

The preset "paper" has the paper's 120 points, sizes, learning rate and tolerance 1e-7. The authors' code trains on 50
points of an older file in one batch, and the paper gives this batch size; here a batch is the whole cloud. These
settings are from the code: 300 steps, outputs clipped to [-1, 1], the squared error, an initial momentum clipped to
[-5, 5], a constant xi = 2, and the full error norm of the adjoint. In the code the function sigma of GHBNODE is the
identity; here it is tanh, as in the paper.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import SECOND_ORDER, ODEConfig, make_field, option
from tasks.common.figures import panels
from tasks.common.run import Run, command
from tasks.common.train import Samples, fit

TIMES = 6  # number of times in the figure
HIDDEN = {"node": 20, "anode": 20, "sonode": 13, "hbnode": 14, "ghbnode": 14}


@dataclasses.dataclass(frozen=True)
class PointCloudConfig(ODEConfig):
    """Command-line options of point cloud separation. An epoch is one step on the whole cloud."""

    epochs: int = option(300, "steps, each on the whole cloud", may_change=True)
    batch_size: int = option(120, "samples in a step")
    lr: float = option(1e-2, "Adam's learning rate")
    tol: float = option(1e-5, "rtol = atol of the solver")


PRESETS = {"paper": "--tol 1e-07 --solver torchdiffeq --adjoint-norm full"}


def make_cloud(seed: int) -> tuple[Tensor, Tensor]:
    """Draw uniform points: 40 in the disc |r| < 0.5 (target -1), and 80 in the annulus 0.85 < |r| < 1 (target 1).

    Returns:
        Points (120, 2) and targets (120, 1).
    """
    generator = torch.Generator().manual_seed(seed)

    def ring(count: int, inner: float, outer: float) -> Tensor:
        radius = (inner**2 + (outer**2 - inner**2) * torch.rand(count, generator=generator)).sqrt()
        angle = 2 * math.pi * torch.rand(count, generator=generator)
        return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    points = torch.cat([ring(40, 0.0, 0.5), ring(80, 0.85, 1.0)])
    targets = torch.cat([-torch.ones(40, 1), torch.ones(80, 1)])
    return points, targets


class Separator(nn.Module):
    """An ODE block on the plane and a linear layer whose output is clipped to [-1, 1]."""

    def __init__(self, model: str, **solver: Any) -> None:
        super().__init__()
        hidden, size = [HIDDEN[model]] * 2, 3 if model == "anode" else 2
        func = hbnode.nn.MLP(4 if model == "sonode" else size, hidden, size)
        start = nn.Sequential(hbnode.nn.MLP(2, hidden, 2), nn.Hardtanh(-5.0, 5.0)) if model in SECOND_ORDER else None
        field = make_field(
            model,
            func,
            anode={"augment": 1},
            sonode={"initial_velocity": start},
            hbnode={"initial_momentum": start},
            ghbnode={"initial_momentum": start, "xi": 2.0, "learn_xi": False},
        )
        self.block = hbnode.ODEBlock(field, **solver)
        self.head = nn.Sequential(nn.Linear(size, 1), nn.Hardtanh())

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, 1) in [-1, 1] for points (batch, 2)."""
        return self.head(self.block(x))


def squared_error(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean squared error of the scores, and the share of scores with the right sign."""
    x, target = batch
    score = model(x)
    return nn.functional.mse_loss(score, target), {"accuracy": (score.sign() == target).float().mean().item()}


def draw_evolution(model: Separator, points: Tensor, targets: Tensor, folder: Path, title: str) -> None:
    """Draw the cloud at six times in ``evolution.png``. Each panel has its own scale."""
    times = torch.linspace(0, 1, TIMES)
    with torch.no_grad():
        path = model.block(points.to(next(model.parameters()).device), times).cpu()
    colors = ["C0" if target < 0 else "C3" for target in targets[:, 0].tolist()]
    space = {"projection": "3d"} if path.shape[-1] == 3 else {}
    size, marks = (15, 3), {"s": 9, "c": colors}
    with panels(folder / "evolution.png", 1, TIMES, size=size, title=title, legend=False, subplot_kw=space) as (
        _,
        axes,
    ):
        for ax, time, cloud in zip(axes[0], times.tolist(), path, strict=True):
            ax.scatter(*cloud.T.numpy(), **marks)
            ax.set_title(f"t = {time:.2f}", fontsize="medium")
            ax.tick_params(labelsize="x-small")


def train(config: PointCloudConfig) -> None:
    """Train one model on one cloud, and draw how the cloud evolves."""
    cloud, fresh = make_cloud(config.seed), make_cloud(config.seed + 1_000_000)
    run = Run("point_cloud", config, f"{config.preset}-{config.model}-seed{config.seed}")
    model = Separator(config.model, **config.ode_options())
    run.announce(model, config.model)
    fit(run, model, cloud, fresh, squared_error, every=50)
    if run.workers.rank == 0 and not run.is_finished:
        title = f"{config.model.upper()}: training loss {run.rows[-1]['train_loss']:.3f} after {len(run.rows)} steps"
        draw_evolution(model, *cloud, run.folder, title)
    run.finish(model, separates=run.rows[-1]["train_accuracy"] == 1)


main = command(PointCloudConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
