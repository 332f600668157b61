"""Density estimation in the plane by a heavy-ball flow and by a continuous normalizing flow (CNF) with the exact trace.

Section 3.5 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), leaves
normalizing flows by HBNODEs as an open problem. hbnode.distributions.HeavyBallFlow has an exact density on the phase
space of positions and momenta, without computing a trace. But data have no momentum, so only a lower bound (ELBO) of
their log-likelihood is available. The CNF (Chen et al., arXiv:1806.07366) is a NODE that integrates the log-density
along its trajectory; it has the same number of parameters. The CNF reaches the better likelihood; a training step of
the heavy-ball flow costs less.

Every batch is newly drawn; the test set is the same for all runs. The test loss is a negative log-likelihood in nats.
It is exact for the CNF. For heavy-ball flows it is an upper bound, computed from --eval-samples sampled momenta per
point, and in the summary from --final-samples. --dataset ring has a known energy instead of data. Its loss is the
reverse Kullback-Leibler divergence. For heavy-ball flows it is the divergence of the joint distribution of h and m,
which is at least as large. Training can end with a model that covers only one of the two crescents, at a divergence of
about log 2. density.png shows the model's density on a grid (by importance sampling over the momenta), samples of the
model, and the data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from typing_extensions import override

from tasks.common.config import TaskConfig, option
from tasks.common.figures import figure_at
from tasks.common.run import Run, command, count_parameters
from tasks.common.train import Samples, fit, fresh_data
from tasks.data.planar import DATASETS, EXTENT, grid, log_normalizer, ring
from tasks.models.densities import CNF, TITLES, Flow

PICTURE = 100  # grid points along each side of the density's picture
ROWS = 50_000  # points in a batch when a density is estimated
SPAN = 2.0  # integration time of a heavy-ball flow; a CNF integrates over [0, 1]


@dataclasses.dataclass(frozen=True)
class DensityConfig(TaskConfig):
    """Command-line options of density estimation."""

    models = tuple(TITLES)
    positive = "iterations test_size hidden steps eval_samples final_samples"

    epochs: int = option(10, "epochs, each of --iterations batches", may_change=True)
    iterations: int = option(200, "batches in an epoch")
    batch_size: int = option(256, "points in a batch")
    lr: float = option(5e-3, "Adam's learning rate")
    schedule: str = option("cosine", "learning-rate schedule: constant, or cosine to 0", ("constant", "cosine"))
    clip: float = option(10.0, "largest norm of the gradient; 0 does not clip")
    dataset: str = option("pinwheel", "the density to learn; ring is given by an energy", (*DATASETS, "ring"))
    hidden: int = option(64, "units of the two hidden layers of f; wider in a CNF, for equal numbers of parameters")
    steps: int = option(16, "leapfrog steps of a heavy-ball flow")
    test_size: int = option(2000, "test points")
    eval_samples: int = option(20, "momenta for each test point after each epoch")
    final_samples: int = option(200, "momenta for each test point in the summary")


class Objective(nn.Module):
    """The training loss as a module, because DistributedDataParallel calls only ``forward``."""

    def __init__(self, model: Flow | CNF, energy: bool, eval_samples: int) -> None:
        super().__init__()
        self.model, self.energy, self.eval_samples = model, energy, eval_samples
        self.log_z = log_normalizer(ring) if energy else 0.0

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the negative log-likelihood of x, or the reverse divergence estimated from len(x) model samples."""
        if self.energy:
            drawn, log_prob = self.model.draw(len(x))
            return (log_prob + ring(drawn)).mean() + self.log_z
        return -self.model.log_prob(x, 1 if self.training else self.eval_samples).mean()


def loss_of(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a batch, and no further metrics."""
    return model(batch[0]), {}


def make_flow(config: DensityConfig, generalized: bool = False) -> Flow:
    """Return the heavy-ball flow that the options describe."""
    return Flow(config.hidden, t_span=(0.0, SPAN), generalized=generalized, steps=config.steps)


def make_model(config: DensityConfig) -> Flow | CNF:
    """Return the model. The width of a CNF is chosen so that it has as many parameters as a heavy-ball flow."""
    if config.model != "cnf":
        return make_flow(config, config.model == "generalized")
    with torch.random.fork_rng(devices=[]):
        wanted = count_parameters(make_flow(config))
    width = round((math.sqrt(41 + 4 * wanted) - 7) / 2)  # a CNF of width w has w² + 7w + 2 parameters
    return CNF(width)


@torch.no_grad()
def log_density(model: Flow | CNF, x: Tensor, samples: int) -> Tensor:
    """Return the log-density at many points, computed in batches."""
    return torch.cat([model.log_prob(part, samples) for part in x.split(max(1, ROWS // samples))])


@torch.no_grad()
def effective_sample_size(model: Flow | CNF, n: int) -> dict[str, float]:
    """Return the relative effective sample size and the estimate of log Z for the ring, from n importance samples."""
    x, log_prob = model.draw(n)
    weight = -ring(x) - log_prob
    share = (2 * weight.logsumexp(0) - (2 * weight).logsumexp(0)).exp() / n
    return {"effective_share": share.item(), "log_z": weight.logsumexp(0).item() - math.log(n)}


def picture_of(model: Flow | CNF, wanted: Tensor, samples: int) -> dict[str, Tensor]:
    """Return the density on a grid, samples of the model, and the target (data points, or the density on the grid)."""
    density = log_density(model, grid(PICTURE).to(wanted.device), samples).exp()
    with torch.no_grad():
        drawn = model.draw(2000)[0]
    return {"density": density.view(PICTURE, PICTURE).cpu(), "samples": drawn.cpu(), "wanted": wanted.cpu()}


def draw_density(figure: Figure, parts: Mapping[str, Tensor], name: str) -> None:
    """Draw the density of a model, its samples, and the data or the target density."""
    axes = figure.subplots(1, 3)
    image: dict[str, Any] = {"extent": (-EXTENT, EXTENT) * 2, "origin": "lower", "cmap": "viridis"}
    is_energy = parts["wanted"].shape == (PICTURE, PICTURE)
    titles = {"density": "density", "samples": "samples", "wanted": "target density" if is_energy else "data"}
    for ax, (part, title), color in zip(axes, titles.items(), ("", "C0", "C3"), strict=True):
        if parts[part].shape == (PICTURE, PICTURE):
            brightest = parts[part].flatten().quantile(0.999)  # estimates from few samples have outliers
            ax.imshow(parts[part].numpy(), vmin=0, vmax=brightest.item(), **image)
        else:
            ax.scatter(*parts[part].T.numpy(), s=1, linewidths=0, color=color)
        ticks = (-4, 0, 4)
        ax.set(xlim=(-EXTENT, EXTENT), ylim=(-EXTENT, EXTENT), aspect="equal", xticks=ticks, yticks=ticks)
        ax.set_title(title, fontsize="medium")
    axes[0].set_ylabel(name, fontsize="small")


def train(config: DensityConfig) -> None:
    """Train one model with one seed and draw its density."""
    run = Run("density", config, f"{config.preset}-{config.dataset}-{config.model}-seed{config.seed}")
    energy = config.dataset == "ring"
    objective = Objective(make_model(config), energy, config.eval_samples)
    model = objective.model
    run.announce(objective, TITLES[config.model], "exact likelihood" if config.model == "cnf" else "bound")

    def points(count: int, generator: torch.Generator) -> Samples:
        return (torch.zeros(count, 2) if energy else DATASETS[config.dataset](count, generator),)

    fresh, test = fresh_data(config, points)
    fit(run, objective, fresh, test, loss_of)
    extra: dict[str, object] = {"milliseconds_per_step": 1e3 * run.rows[-1]["seconds"] / config.iterations}
    if run.workers.rank == 0 and not run.is_finished:
        x = test[0].to(run.workers.device)
        if energy:
            extra |= {**effective_sample_size(model, 20_000), "true_log_z": objective.log_z}
            value, name = run.rows[-1]["test_loss"], "reverse divergence"
        else:
            value, name = -log_density(model, x, config.final_samples).mean().item(), "negative log-likelihood"
            extra |= {"test_nll": value, "is_bound": config.model != "cnf"}
        bound = "" if config.model == "cnf" else " at most"
        title = f"{TITLES[config.model]}: {name}{bound} {value:.3f} nats"
        wanted = (-ring(grid(PICTURE)) - objective.log_z).exp().view(PICTURE, PICTURE) if energy else x
        with figure_at(run.folder / "density.png", (7.5, 3), title) as figure:
            draw_density(figure, picture_of(model, wanted, 100), TITLES[config.model])
    run.finish(objective, **extra)


main = command(DensityConfig, {}, __doc__, train)


if __name__ == "__main__":
    main()
