"""Latent SDEs for irregular series: underdamped Langevin dynamics (heavy ball), and a first-order SDE by torchsde.

--model kalman is a linear baseline: twelve noisy oscillators with a Kalman filter. It maximises the exact likelihood
instead of a lower bound. Its predictions use only earlier samples, while the encoder of the latent SDEs uses all
samples, also to reconstruct held-out values.

Training maximises the evidence lower bound (ELBO) after Li et al., arXiv:2001.01328: the Gaussian log-likelihood of the
samples, minus the Kullback-Leibler divergences of the initial state and of the paths. The divergence of the paths is
the integral of |u|² / 2, where u is the control of the posterior divided by the diffusion. The encoder is a GRU that
runs backwards through the samples. After the last sample the control is zero, so the paths are forecasts by the prior.

--dataset lorenz: windows of 50 time steps of the stochastic Lorenz equations, which is one unit of time. The values are
standardised, with observation noise of 0.01. A window begins at a random one of the first 41 time steps of a path. A
tenth of the first 40 time steps is held out, and the last 10 are forecast. The models' time unit is 10 time steps. If
all windows started at the beginning of a path, training would contain few of the states to forecast, and the prediction
intervals would be far too narrow.

--dataset vibration: the segments of tasks.plane_vibration with its split "honest". The time steps that this task
removes are held out, and the 8 time steps after 64 samples are forecast. The models' time unit is 16 time steps.

Test results are computed from --paths sampled paths per series, and in the summary from --eval-samples paths. They are
the log-likelihood per value, the squared error of the mean, and the coverage of the 90 % prediction interval. bands.png
shows the prediction intervals of three series.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Normal

import hbnode
from hbnode.nn.latent import GRUEncoder, LatentModel, LatentSDE
from tasks.common.config import SCHEDULES, TaskConfig, option
from tasks.common.figures import panels
from tasks.common.run import Run, command, count_parameters
from tasks.common.train import Batches, Samples, Trainer, evaluate
from tasks.data import f16
from tasks.data.lorenz import stochastic_lorenz
from tasks.models.latent_sdes import TITLES, FirstOrder
from tasks.models.oscillating import TITLES as OSCILLATING
from tasks.models.oscillating import NoisyOscillators
from tasks.plane_vibration import HORIZON, WINDOW, Splits

# The time step of each data set, in the models' time unit
SPACING = {"lorenz": 0.1, "vibration": 1 / 16}
ROWS, LORENZ_WINDOW, NOISE = 50, 40, 0.01
TOGETHER = 4096  # paths in a batch
KALMAN = "kalman"
ALL_TITLES = {**TITLES, KALMAN: OSCILLATING[KALMAN]}
# Initial ranges of the oscillators' frequencies and decay rates. One turn on the Lorenz attractor takes about one unit.
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "lorenz": {"frequency": (0.05, 1.0), "decay": (0.05, 1.0)},
    "vibration": {"frequency": (0.064, 0.8), "decay": (0.016, 0.32)},
}
OSCILLATORS = 12


@dataclasses.dataclass(frozen=True)
class LatentSDEConfig(TaskConfig):
    """Command-line options of latent SDEs."""

    models = (*TITLES, KALMAN)
    positive = "size hidden context train_size test_size eval_samples paths"

    epochs: int = option(40, "passes over the training series", may_change=True)
    batch_size: int = option(128, "series in a batch")
    lr: float = option(2e-2, "Adam's learning rate")
    schedule: str = option("cosine", "learning rate: constant, cosine or step", SCHEDULES)
    clip: float = option(10.0, "largest norm of the gradient; 0 does not clip")
    dataset: str = option("lorenz", "the data set", tuple(SPACING))
    data: str = option("auto", "source of the vibration data, as in tasks.plane_vibration", f16.SOURCES)
    size: int = option(4, "size of h, and of the state of a first-order SDE")
    hidden: int = option(64, "units of the hidden layers of drift and control; more for a first-order SDE")
    context: int = option(32, "units of the encoder")
    train_size: int = option(4096, "number of training series; all segments if there are fewer")
    test_size: int = option(256, "number of test series")
    paths: int = option(8, "paths per series in the test after every epoch")
    eval_samples: int = option(100, "paths per series in the picture and in the summary")


# Data


def lorenz(count: int, seed: int, like: Tensor | None = None) -> tuple[Samples, Tensor]:
    """Return the values, masks of observed, held-out and forecast time steps, and the values' mean and deviation."""
    generator = torch.Generator().manual_seed(seed)
    x = stochastic_lorenz(count, ROWS + LORENZ_WINDOW, 1 / (ROWS - 1), generator)
    first = torch.randint(LORENZ_WINDOW + 1, (count, 1), generator=generator)
    x = x[torch.arange(count)[:, None], first + torch.arange(ROWS)]
    moments = torch.stack([x.mean((0, 1)), x.std((0, 1))]) if like is None else like
    x = (x - moments[0]) / moments[1] + NOISE * torch.randn(x.shape, generator=generator)
    held = (torch.rand(count, ROWS, generator=generator) < 0.1).float()
    window = (torch.arange(ROWS) < LORENZ_WINDOW).float()
    return (x.float(), (1 - held) * window, held * window, (1 - window).expand(count, -1)), moments


def vibration(splits: Splits, name: str, length: int, count: int) -> Samples:
    """Return evenly spaced segments as values and three masks: observed, held-out and forecast time steps."""
    stamps = splits.rows[name]
    stamps = stamps[torch.linspace(0, len(stamps) - 1, min(count, len(stamps))).long()]
    first, last = stamps[:, :1], stamps[:, -1:]
    rows = first + torch.arange(length)
    seen = torch.zeros(len(stamps), length).scatter_(1, stamps[:, :WINDOW] - first, 1.0)
    held = (rows < last).float() * (1 - seen)
    ahead = ((rows >= last) & (rows < last + HORIZON)).float()
    x = splits.record[rows.clamp(max=len(splits.record) - 1)]
    return x * (seen + held + ahead).unsqueeze(-1), seen, held, ahead


def load(config: LatentSDEConfig) -> tuple[Samples, Samples, str]:
    """Return training data, test data, and the name of the data source."""
    if config.dataset == "lorenz":
        train, moments = lorenz(config.train_size, 0)
        return train, lorenz(config.test_size, 1, moments)[0], "generated"
    record, source = f16.read_plane_vibration(config.data)
    splits = Splits.from_record(record, "honest")
    length = max(int((rows[:, -1] - rows[:, 0]).max()) for rows in splits.rows.values()) + HORIZON
    train = vibration(splits, "train", length, config.train_size)
    return train, vibration(splits, "test", length, config.test_size), source


# Model and loss


def make_model(config: LatentSDEConfig, channels: int) -> torch.nn.Module:
    """Return the model. A first-order SDE gets the width with which it has as many parameters as the heavy-ball SDE."""
    if config.model == KALMAN:
        return NoisyOscillators(channels, OSCILLATORS, noise=0.1, **RANGES[config.dataset])

    def make(kind: type[LatentSDE | FirstOrder], hidden: int) -> LatentModel:
        encoder = GRUEncoder(channels, config.context)
        return kind(channels, config.size, hidden, encoder=encoder, dt=SPACING[config.dataset])

    if config.model == "hbsde":
        return make(LatentSDE, config.hidden)
    with torch.random.fork_rng(devices=[]):
        wanted = count_parameters(make(LatentSDE, config.hidden))
    return hbnode.nn.match_parameters(lambda width: make(FirstOrder, width), wanted)


def times(x: Tensor, spacing: float) -> Tensor:
    """Return the times of values (batch, rows, channels)."""
    return torch.arange(x.shape[1], dtype=torch.float64, device=x.device) * spacing


def loss_of(model: torch.nn.Module, batch: Samples, spacing: float, paths: int) -> tuple[Tensor, dict[str, float]]:
    """Return minus the ELBO per observed value, and its terms; in evaluation also test results from several paths."""
    x, seen, *masks = batch
    with hbnode.count_nfe(model) as nfe:
        elbo = model(x, times(x, spacing), seen > 0)
    parts = elbo.value, elbo.kl_path, elbo.kl_initial
    value, kl_path, kl_start = (part.sum() / (seen.sum() * x.shape[-1]) for part in parts)
    means = {"elbo": value.item(), "kl_path": kl_path.item(), "kl_start": kl_start.item(), "nfe": nfe.forward}
    if not model.training:
        means |= test_results(predicted(cast("LatentModel", model), x, seen, spacing, paths), x, masks)
    return -value, means


def predicted(model: LatentModel, x: Tensor, seen: Tensor, spacing: float, paths: int) -> Normal:
    """Return the normal distribution of the values given each of several paths, (paths, batch, rows, channels)."""
    counts = [len(part) for part in torch.arange(paths).split(max(1, TOGETHER // len(x)))]
    drawn = [model.predict(x, times(x, spacing), seen > 0, samples=count) for count in counts]
    return Normal(torch.cat([each.paths for each in drawn]), drawn[0].scale)


def noisy_loss(
    model: torch.nn.Module, batch: Samples, spacing: float, paths: int = 1
) -> tuple[Tensor, dict[str, float]]:
    """Return minus the oscillators' log-likelihood per observed value; in evaluation also test results."""
    x, seen, *masks = batch
    before, log_likelihood = model(x, times(x, spacing), seen > 0)
    value = log_likelihood.sum() / (seen.sum() * x.shape[-1])
    means = {"log_likelihood": value.item()}
    if not model.training:
        means |= test_results(Normal(before.mean.unsqueeze(0), before.std), x, masks)
    return -value, means


def test_results(normal: Normal, x: Tensor, masks: Sequence[Tensor]) -> dict[str, float]:
    """Return log-likelihood, squared error of the mean and coverage, for held-out and for forecast time steps.

    Arguments:
        normal: components of a mixture with equal weights, (paths, batch, rows, channels).
        x: true values (batch, rows, channels).
        masks: masks of the held-out and of the forecast time steps.
    """
    mean, paths = normal.mean, len(normal.mean)
    below = normal.cdf(x).mean(0)
    values = {
        "log_likelihood": normal.log_prob(x).logsumexp(0) - math.log(paths),
        "mse": (mean.mean(0) - x).square(),
        "coverage": ((below > 0.05) & (below < 0.95)).float(),
    }
    return {
        f"{name}_{figure}": (value.mean(-1) * mask).sum().item() / max(mask.sum().item(), 1.0)
        for name, mask in zip(("held", "forecast"), masks, strict=True)
        for figure, value in values.items()
    }


@torch.no_grad()
def quantiles(model: Any, x: Tensor, seen: Tensor, config: LatentSDEConfig) -> Tensor:
    """Return the 5 %, 50 % and 95 % quantiles of the predicted values, (3, batch, rows, channels)."""
    levels = torch.tensor([0.05, 0.5, 0.95], device=x.device)
    spacing = SPACING[config.dataset]
    if config.model == KALMAN:
        before, _ = model(x, times(x, spacing), seen > 0)
        return Normal(before.mean, before.std).icdf(levels.view(3, 1, 1, 1)).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = predicted(model, x, seen, spacing, config.eval_samples).sample()
    return torch.quantile(drawn, levels, dim=0).cpu()


def draw_bands(model: torch.nn.Module, batch: Samples, config: LatentSDEConfig, path: Path) -> None:
    """Draw the median and the 90 % interval for three series, with observed, held-out and true future values."""
    x, seen, held, ahead = (part[:3] for part in batch)
    low, median, high = quantiles(model, x, seen, config)
    t, x, channels = torch.arange(x.shape[1]) * SPACING[config.dataset], x.cpu(), (-3, -2, -1)
    title = f"{ALL_TITLES[config.model]}, {config.dataset}: test series, standardised"
    with panels(path, 3, 3, size=(10.5, 5.5), title=title, sharex=True) as (_, axes):
        for series, column in zip(range(len(x)), axes.T, strict=False):
            inside = (seen + held + ahead)[series].cpu() > 0
            masks = ((seen, "samples", "o", "0.3"), (held, "held out", "D", "C2"), (ahead, "to forecast", "x", "C3"))
            for ax, channel in zip(column, channels, strict=True):
                band = (part[series, inside, channel] for part in (low, high))
                ax.fill_between(t[inside], *band, color="C0", alpha=0.3, lw=0, label="90 %")
                ax.plot(t[inside], median[series, inside, channel], color="C0", lw=1, label="median")
                for mask, label, marker, color in masks:
                    shown = mask[series].cpu() > 0
                    ax.plot(t[shown], x[series, shown, channel], marker, color=color, ms=3, label=label)
                ax.axvline(float(t[seen[series].cpu().nonzero().max()]), color="0.6", lw=0.8, ls=":")
            column[-1].set_xlabel("time")
        for ax, channel in zip(axes[:, 0], channels, strict=True):
            ax.set_ylabel(f"channel {x.shape[-1] + channel + 1}")


def train(config: LatentSDEConfig) -> None:
    """Train one model with one seed."""
    data, test, source = load(config)
    if config.dataset == "vibration":
        config = dataclasses.replace(config, data=source)
    run = Run("latent_sde", config, f"{config.preset}-{config.dataset}-{config.model}-seed{config.seed}")
    model = make_model(config, data[0].shape[-1])
    run.announce(model, ALL_TITLES[config.model], f"{source} data, {len(data[0])}/{len(test[0])} series")
    test = run.workers.to_device(test)
    of_model = noisy_loss if config.model == KALMAN else loss_of
    loss, last_loss = (
        functools.partial(of_model, spacing=SPACING[config.dataset], paths=paths)
        for paths in (config.paths, config.eval_samples)
    )
    trainer = Trainer(run, model, Batches(run, data), loss)

    def validate() -> dict[str, float]:
        with torch.random.fork_rng():
            torch.manual_seed(1)  # the same paths after every epoch
            return evaluate(run, model, test, loss, "test")

    trainer.fit(validate)
    final: dict[str, float] = {}
    if not run.is_finished:
        draw_bands(model, test, config, run.folder / "bands.png")
        final = evaluate(run, model, test, last_loss, "final")
    run.finish(model, source=source, **final)


main = command(LatentSDEConfig, {}, __doc__, train)


if __name__ == "__main__":
    main()
