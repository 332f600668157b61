"""Latent SDEs of irregular series: a heavy ball with a Langevin thermostat, and a first-order SDE by torchsde.

--model kalman is a linear baseline: twelve noisy oscillators with a Kalman filter, which maximise the likelihood
without a bound. Their predictions use no later samples; the encoder of the others reads all samples, also for rows that
are held out.

Training maximises the evidence lower bound (ELBO) after Li et al., arXiv:2001.01328: the Gaussian log-likelihood of the
samples, minus the divergence of the initial state and that of the paths. The latter is the integral of |u|² / 2, where
u is the posterior's control in units of the noise. A GRU reads the samples backwards. After the last sample there is no
control, so that the posterior's path is a forecast by the prior.

--dataset lorenz: windows of 50 rows, one unit of time of the stochastic Lorenz equations, standardised, with noise of
0.01. They begin at any of the first 41 rows of a path. A tenth of the first 40 rows is held out, and the last 10 are
forecast. The unit of time of the models is 10 rows. If all windows began with the path, training would contain few of
the states in a forecast, and the intervals would be far too narrow.

--dataset vibration: the segments of tasks.plane_vibration with its split "honest". The rows removed there are held out,
and the 8 rows after 64 samples are forecast. The unit of time is 16 rows.

Test results are from --paths paths per series, in the summary from --eval-samples: the log-likelihood per number, the
squared error of the mean, and the coverage of the 90 % interval with observation noise. bands.png is drawn in the end.
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

SPACING = {"lorenz": 0.1, "vibration": 1 / 16}  # time between two rows; in these units a period is about 1 to 6
ROWS, LORENZ_WINDOW, NOISE = 50, 40, 0.01
TOGETHER = 4096  # paths in a batch
KALMAN = "kalman"
ALL_TITLES = {**TITLES, KALMAN: OSCILLATING[KALMAN]}
# Initial ranges of the oscillators' frequencies and decays; the period of lorenz is about a unit of time.
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "lorenz": {"frequency": (0.05, 1.0), "decay": (0.05, 1.0)},
    "vibration": {"frequency": (0.064, 0.8), "decay": (0.016, 0.32)},
}
OSCILLATORS = 12


@dataclasses.dataclass(frozen=True)
class LatentSDEConfig(TaskConfig):
    """Options of latent SDEs."""

    models = (*TITLES, KALMAN)
    positive = "size hidden context train_size test_size eval_samples paths"

    epochs: int = option(40, "passes over the training series", may_change=True)
    batch_size: int = option(128, "series in a step")
    lr: float = option(2e-2, "Adam's learning rate")
    schedule: str = option("cosine", "learning rate: constant, cosine or step", SCHEDULES)
    clip: float = option(10.0, "largest norm of the gradient; 0 does not clip")
    dataset: str = option("lorenz", "the set of series", tuple(SPACING))
    data: str = option("auto", "source of vibration, as in tasks.plane_vibration", f16.SOURCES)
    size: int = option(4, "size of h, and of the state of a first-order SDE")
    hidden: int = option(64, "units of the hidden layers of drift and control; a first-order SDE has more")
    context: int = option(32, "units of the encoder")
    train_size: int = option(4096, "series of training; all segments if there are fewer")
    test_size: int = option(256, "series of the test")
    paths: int = option(8, "paths per series in the test after every epoch")
    eval_samples: int = option(100, "paths per series in the picture and in the summary")


# Data


def lorenz(count: int, seed: int, like: Tensor | None = None) -> tuple[Samples, Tensor]:
    """Return rows and masks of the observed, held out and forecast ones; and the mean and deviation of the rows."""
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
    """Return segments, evenly spaced among all, as rows and three masks."""
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
    """Return training and test data, and their source."""
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
    """Return the model. The width of a first-order SDE gives it the number of parameters of a heavy ball."""
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
    """Return the times of rows (batch, rows, channels)."""
    return torch.arange(x.shape[1], dtype=torch.float64, device=x.device) * spacing


def loss_of(model: torch.nn.Module, batch: Samples, spacing: float, paths: int) -> tuple[Tensor, dict[str, float]]:
    """Return minus the ELBO per observed number, and its parts; in the test also results from several paths."""
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
    """Return the distribution of the rows given each of several paths, (paths, batch, rows, channels)."""
    counts = [len(part) for part in torch.arange(paths).split(max(1, TOGETHER // len(x)))]
    drawn = [model.predict(x, times(x, spacing), seen > 0, samples=count) for count in counts]
    return Normal(torch.cat([each.paths for each in drawn]), drawn[0].scale)


def noisy_loss(
    model: torch.nn.Module, batch: Samples, spacing: float, paths: int = 1
) -> tuple[Tensor, dict[str, float]]:
    """Return minus the log-likelihood of noisy oscillators per observed number; in the test also other results."""
    x, seen, *masks = batch
    before, log_likelihood = model(x, times(x, spacing), seen > 0)
    value = log_likelihood.sum() / (seen.sum() * x.shape[-1])
    means = {"log_likelihood": value.item()}
    if not model.training:
        means |= test_results(Normal(before.mean.unsqueeze(0), before.std), x, masks)
    return -value, means


def test_results(normal: Normal, x: Tensor, masks: Sequence[Tensor]) -> dict[str, float]:
    """Return results for rows held out and for forecasts: log-likelihood, squared error of the mean, and coverage.

    Arguments:
        normal: components of a mixture with equal weights, (paths, batch, rows, channels).
        x: rows (batch, rows, channels).
        masks: of rows held out and of forecasts.
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
    """Return the 5 %, 50 % and 95 % quantiles of samples, (3, batch, rows, channels)."""
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
    """Draw the median and the 90 % interval of three series, with observed, held out and forecast rows."""
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
