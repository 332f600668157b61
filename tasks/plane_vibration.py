"""Plane vibration: forecasting the shaking of an aircraft from irregular samples with ODE-RNN hybrids.

Section 3.4.3 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), figure 12:
force, voltage and three accelerations of a ground vibration test, 400 rows a second, of which 10 % are removed. From
64 samples the 8 consecutive rows from the 65th stamp on are forecast. The unit of time is a row, 0.0025 s. Without the
data a made-up structure stands in for the aircraft; the summary names the source. Trivial baseline: the last sample.

--protocol paper: the last 100 rows dropped, the rest split 50/25/25 in order, standardised with all rows, as in the
authors' code. The force repeats every 8192 rows, so that the test set repeats the training set almost exactly: what the
rows a whole number of periods earlier say, all of the first half, is printed as a second one.

--protocol honest: the rows are folded into the 8192 phases of the period; training has the phases 0 to 3975, validation
4056 to 6043, test 6124 to 8111, targets included, in each of the nine periods. Nobody uses the 80 phases between two of
them, the length of a segment and its horizon. Standardised with the rows of training.

The preset "paper" has the paper's sizes, split, tolerance and epochs; from the code, where the paper is silent, are the
batch of 64, the gradient clipped to 1 and the adjoint's full error norm. The learning rate falls from 1e-3 as a cosine,
where the code goes from 1e-3 to 1e-4 after 50 epochs. The loss is the squared error of the forecast and 0.1 times that
of the prediction at each next stamp, which is how we read the paper's regulariser; the code's third term, 0.1 times
the squared error of the sample that the state has just seen, is left out. Momentum, damping and signs are the paper's;
xi, which it leaves open, starts at 0.01. A residual linear cell with torch's initial weights explodes within 64
samples: those of the cell, the encoder and the last layer of f are a thousandth of them at first. (The code shrinks
everything, the damping's parameter too.)

--model oscillators is a layer of linear oscillators whose outputs are the forecasts; "oscillator_stack" has two blocks
with gates between them and goes on with its own predictions, as the other baselines do. "kalman" has a few oscillators
in noise, and maximises their likelihood in place of that loss. Frequencies start about where the record has power;
these linear models bear a larger --lr, 1e-2 and 1e-1.

The encoder makes the state at the first stamp out of all 64 samples, as the authors' does: only what comes after the
window is a forecast. Of the baselines, which have no encoder, every prediction is one: compare the forecasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import MODELS, SCHEDULES, SECOND_ORDER, make_field, option
from tasks.common.figures import panels
from tasks.common.files import exit_on
from tasks.common.run import Run, command
from tasks.common.train import Samples, evaluate, fit
from tasks.data import f16
from tasks.models.baselines import BASELINES, IrregularSeriesConfig, make_baseline
from tasks.models.oscillating import TITLES, NoisyForecaster, NoisyOscillators, RowForecaster

COLUMNS = ("force", "voltage", "acceleration 1", "acceleration 2", "acceleration 3")
CHANNELS = len(COLUMNS)
WINDOW = 64  # samples that a model sees
HORIZON = 8  # rows that it forecasts, from the stamp after them on
DROPPED = 100  # rows at the end, in the paper's protocol
PERIOD = f16.PERIOD
# 80 phases between two of them: 65 stamps are 72 rows, and 8 are forecast
PHASES = {"train": (0, 3976), "validation": (4056, 6044), "test": (6124, 8112)}
XI = 0.01  # at first, in 1/row^2: h swings at 400 sqrt(XI) / 2 pi = 6 Hz, where the record has its power; ln 2: 53 Hz
PARAMETERS = 16_000  # of a baseline: about as many as the models have
FREQUENCY = (0.004, 0.05)  # of oscillators at first, in cycles a row: 1.6 to 20 Hz
OSCILLATORS = ("oscillators", "oscillator_stack", "kalman")
NOISY = 12  # oscillators of "kalman"
REMOVED_SEED = 1  # of the rows that are removed
NEXT_WEIGHT = 0.1  # of the predictions at the next stamps in the loss

# size of h, and of the hidden layers of f
SIZES = {
    "node": (21, (63, 84)),
    "anode": (27, (81, 108)),
    "sonode": (19, (38, 19)),
    "hbnode": (20, (20, 20)),
    "ghbnode": (20, (20, 20)),
}


@dataclasses.dataclass(frozen=True)
class PlaneVibrationConfig(IrregularSeriesConfig):
    """Options of plane vibration."""

    models = tuple(dict.fromkeys((*MODELS, *BASELINES, *OSCILLATORS)))
    epochs: int = option(50, "passes over the training segments", may_change=True)
    schedule: str = option("cosine", "learning rate, as for the other tasks", SCHEDULES)
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    tol: float = option(1e-5, "rtol = atol of the solver")
    protocol: str = option("honest", "how the data is split, see above", ("paper", "honest"))
    data: str = option("auto", "the F-16's, a generated structure's, or the first if it is there", f16.SOURCES)


PRESETS = {"paper": "--protocol paper --tol 1e-07 --solver torchdiffeq --adjoint-norm full --epochs 500"}


# Data


def split_rows(count: int, protocol: str) -> dict[str, Tensor]:
    """Return the row numbers of non-overlapping segments of 65 stamps, (segments, 65), for each part.

    A tenth of the rows is removed at random, whole rows. The 8 rows that are forecast begin at a segment's last stamp.

    Arguments:
        count: rows of the record.
        protocol: "paper" or "honest", see above.
    """
    count = count - DROPPED if protocol == "paper" else count
    generator = torch.Generator().manual_seed(REMOVED_SEED)
    kept = torch.randperm(count, generator=generator)[: count * 9 // 10].sort().values
    if protocol == "paper":
        half, quarter = len(kept) // 2, len(kept) // 4
        parts = kept.split([half, quarter, len(kept) - half - quarter])
        runs = {name: [part] for name, part in zip(PHASES, parts, strict=True)}
    else:
        runs = {name: list(_runs(kept, count, *phases)) for name, phases in PHASES.items()}
    return {name: torch.cat([_cut(run) for run in of_it]) for name, of_it in runs.items()}


def _runs(kept: Tensor, count: int, start: int, stop: int) -> Iterator[Tensor]:
    """For each period, the kept rows of some phases from which all that is forecast is of these phases too."""
    for first in range(0, count, PERIOD):
        yield kept[(kept >= first + start) & (kept <= min(first + stop, count) - HORIZON)]


def _cut(run: Tensor) -> Tensor:
    stamps = WINDOW + 1
    return run[: len(run) // stamps * stamps].reshape(-1, stamps)


@dataclasses.dataclass(frozen=True)
class Splits:
    """Training, validation and test, standardised.

    Attributes:
        batches: for each, the samples (segments, 64, 5), the stamps in rows since the first (segments, 65), and the
            rows from the 65th stamp on (segments, 8, 5).
        rows: for each, the numbers of the rows of the stamps (segments, 65).
        record: the whole record, standardised with the same numbers, (N, 5).
        mean: what was taken off, (5,).
        deviation: what the rest was divided by, (5,).
    """

    batches: dict[str, Samples]
    rows: dict[str, Tensor]
    record: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def from_record(cls, record: Tensor, protocol: str) -> Splits:
        """Split and standardise a record (N, 5)."""
        rows = split_rows(len(record), protocol)
        known = record
        if protocol == "honest":
            phase = torch.arange(len(record)) % PERIOD
            start, stop = PHASES["train"]
            known = record[(phase >= start) & (phase < stop)]
        mean, deviation = known.mean(0), known.std(0)
        record = ((record - mean) / deviation).float()
        horizon = torch.arange(HORIZON)
        batches: dict[str, Samples] = {
            name: (record[r[:, :-1]], (r - r[:, :1]).float(), record[r[:, -1:] + horizon]) for name, r in rows.items()
        }
        return cls(batches, rows, record, mean, deviation)

    def trivial_errors(self) -> dict[str, float]:
        """Return mean squared errors of forecasts of the test set without a model."""
        x, _, target = self.batches["test"]
        errors = {"persistence_forecast_mse": mse(x[:, -1:].expand_as(target), target)}
        rows = self.rows["test"][:, -1:] + torch.arange(HORIZON)
        unseen = self.rows["validation"].min()  # where the rows of training end, in the paper's protocol
        earlier = rows - (rows - unseen).div(PERIOD, rounding_mode="floor").add(1) * PERIOD
        if bool((self.rows["train"].max() < unseen) & (earlier >= 0).all()):
            errors["periods_earlier_forecast_mse"] = mse(self.record[earlier], target)
        return {name: error.item() for name, error in errors.items()}


# Models


class Encoder(nn.Module):
    """The state at the first stamp, a linear map of all samples of the window; the 65th stamp has none."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WINDOW * CHANNELS, size)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 65, 5) -> (batch, size)."""
        return self.linear(x[:, :WINDOW].flatten(1))


class LinearCell(nn.Module):
    """U x + W_h h, or U x + W_h h + W_m m, each with a bias; as large as the state s = h or s = [h, m]."""

    def __init__(self, input_size: int, hidden_size: int, parts: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input = nn.Linear(input_size, parts * hidden_size)
        self.parts = nn.ModuleList(nn.Linear(hidden_size, parts * hidden_size) for _ in range(parts))

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        """(batch, input_size), (batch, parts * hidden_size) -> (batch, parts * hidden_size)."""
        parts = s.split(self.hidden_size, dim=-1)
        return self.input(x) + sum(weight(part) for weight, part in zip(self.parts, parts, strict=True))


class Forecaster(nn.Module):
    """An ODE-RNN that filters a window to the stamp after it and forecasts from there; one dense layer reads h."""

    def __init__(self, model: str, *, shrink: float = 1e-3, **solver: Any) -> None:
        super().__init__()
        n, hidden = SIZES[model]
        parts = 2 if model in SECOND_ORDER else 1
        f = hbnode.nn.MLP(2 * n if model == "sonode" else n, hidden, n, activation=nn.ReLU)
        field = make_field(model, f, anode={"augment": n - CHANNELS}, ghbnode={"xi": XI})
        cell = LinearCell(CHANNELS, n, parts)
        encoder = Encoder(CHANNELS if model == "anode" else parts * n)
        with torch.no_grad():
            for p in (*f.layers[-1].parameters(), *encoder.parameters(), *cell.parameters()):
                p.mul_(shrink)
        self.rnn = hbnode.ODERNN(CHANNELS, n, field=field, cell=cell, residual=True, initial_state=encoder, **solver)
        self.head = nn.Linear(n, CHANNELS)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the forecast, and the predictions at stamps 2 to 65.

        Arguments:
            x: samples (batch, 64, 5).
            t: stamps (batch, 65), in rows.

        Returns:
            (batch, 8, 5), (batch, 64, 5).
        """
        x = nn.functional.pad(x, (0, 0, 0, 1))  # nothing is seen at the 65th stamp
        mask = torch.arange(WINDOW + 1, device=x.device).expand(len(x), -1) < WINDOW
        before, _, state = self.rnn.filter(x, t, mask=mask)
        h, _ = self.rnn.forecast(state, torch.arange(float(HORIZON), device=x.device))
        return self.head(h), self.head(before.h[:, 1:])


class Baseline(nn.Module):
    """A recurrent network that predicts the next stamp, and forecasts by going on with its own predictions."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.rnn = make_baseline(model, CHANNELS, PARAMETERS, output_size=CHANNELS, predicts_ahead=True)
        self.head = nn.Linear(self.rnn.hidden_size, CHANNELS)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the forecast and the predictions at stamps 2 to 65, for the arguments of :class:`Forecaster`."""
        gap = t.diff(dim=1)
        features, state = self.rnn(x, nn.functional.pad(gap[:, :-1], (1, 0)), gap_after=gap)
        following = self.head(features)
        forecast = [following[:, -1:]]  # at the 65th stamp
        gap, row = gap[:, -1:], torch.ones_like(gap[:, -1:])
        for _ in range(HORIZON - 1):
            features, state = self.rnn(forecast[-1], gap, state, gap_after=row)
            forecast.append(self.head(features))
            gap = row
        return torch.cat(forecast, dim=1), following


def make_model(config: PlaneVibrationConfig) -> nn.Module:
    """Return the model that the options name."""
    if config.model == "oscillators":
        return RowForecaster(CHANNELS, HORIZON, PARAMETERS, frequency=FREQUENCY, decay=(0.002, 0.05))
    if config.model == "kalman":
        noisy = NoisyOscillators(CHANNELS, NOISY, noise=0.05, frequency=FREQUENCY, decay=(0.001, 0.02))
        return NoisyForecaster(noisy, HORIZON)
    if config.model == "oscillator_stack":
        return Baseline("oscillators")
    if config.model in BASELINES:
        return Baseline(config.model)
    return Forecaster(config.model, **config.rnn_options())


mse = nn.functional.mse_loss


def squared_errors(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return mean squared error of the forecast, plus a tenth of that at the next stamps.

    A model that returns log-likelihoods is trained by these instead.
    """
    x, t, target = batch
    forecast, following, *log_likelihood = model(x, t)
    forecast_mse, next_mse = mse(forecast, target), mse(following, torch.cat([x[:, 1:], target[:, :1]], dim=1))
    loss = forecast_mse + NEXT_WEIGHT * next_mse
    if log_likelihood:
        loss = -log_likelihood[0].mean() / x[0].numel()
    return loss, {"forecast_mse": forecast_mse.item(), "next_mse": next_mse.item()}


# The run


def train(config: PlaneVibrationConfig) -> None:
    """Train one model with one seed, and forecast the test set once."""
    with exit_on(FileNotFoundError, ValueError):
        record, source = f16.read_plane_vibration(config.data)
    if source != config.data and source == "generated":
        print(
            "The F-16 record is not in HBNODE_DATA, so this run is on simulated data. "
            "--data f16 says how to get the record."
        )
    config = dataclasses.replace(config, data=source)  # a run is of one source, and is not resumed with another
    splits = Splits.from_record(record, config.protocol)
    run = Run("plane_vibration", config, f"{config.preset}-{config.protocol}-{config.model}-seed{config.seed}")
    model = make_model(config)
    if isinstance(model, Forecaster) and config.time_unit == 0:
        model.rnn.fit_time_unit(splits.batches["train"][1])
    trivial_errors = splits.trivial_errors()
    sizes = "/".join(str(len(rows)) for rows in splits.rows.values())
    errors_without = ", ".join(f"{name} {value:.4g}" for name, value in trivial_errors.items())
    run.announce(model, config.model, f"data: {source}, {sizes} segments; {errors_without}")
    fit(run, model, splits.batches["train"], splits.batches["validation"], squared_errors, held_out="validation")
    errors: dict[str, object] = {}
    if not run.is_finished:
        test = tuple(part.to(run.workers.device) for part in splits.batches["test"])
        errors |= evaluate(run, model, test, squared_errors, "test")
        model.eval()
        with torch.no_grad():
            forecast = model(*test[:2])[0].cpu()
        squares = (forecast - splits.batches["test"][2]).square()
        errors["test_acceleration_mse"] = squares[..., 2:].mean().item()
        errors["test_forecast_mse_by_row"] = squares.mean((0, 2)).tolist()
        if run.workers.rank == 0:
            print(f"{config.model}: test forecast MSE {errors['test_forecast_mse']:.4g}")
            name = TITLES.get(config.model, config.model.upper())
            draw_forecasts(forecast, splits, f"{name}, {source}, {config.protocol} split", run.folder)
    run.finish(model, source=source, **trivial_errors, **errors)


def draw_forecasts(forecast: Tensor, splits: Splits, title: str, folder: Path) -> None:
    """Draw the accelerations of four test segments, measured and forecast, in ``forecast.png``."""
    x, t, target = splits.batches["test"]
    scale, shift = splits.deviation.float(), splits.mean.float()
    title = f"{title}; accelerations in the unit of the data"
    with panels(folder / "forecast.png", 3, 4, size=(15, 7), title=title, sharex=True, sharey="row") as (_, axes):
        for column, segment in zip(axes.T, torch.linspace(0, len(x) - 1, 4).long().tolist(), strict=True):
            past = (t[segment, WINDOW - 24 : WINDOW] - t[segment, -1]) / f16.RATE
            ahead = torch.arange(HORIZON) / f16.RATE
            for ax, channel in zip(column, (2, 3, 4), strict=True):
                parts = (x[segment, -24:], target[segment], forecast[segment])
                seen, measured, guessed = (part[:, channel] * scale[channel] + shift[channel] for part in parts)
                ax.plot(past, seen, "o", color="0.6", ms=3, label="samples")
                ax.plot(ahead, measured, "o-", color="0.2", ms=3, lw=1, label="measured")
                ax.plot(ahead, guessed, "x--", color="C3", ms=4, lw=1, label="forecast")
            column[0].set_title(f"segment {segment}", fontsize="medium")
            column[-1].set_xlabel("time in s")
        for ax, channel in zip(axes[:, 0], (2, 3, 4), strict=True):
            ax.set_ylabel(COLUMNS[channel])


main = command(PlaneVibrationConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
