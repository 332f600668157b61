"""Plane vibration: forecast the vibrations of an aircraft from irregular samples with ODE-RNNs.

Section 3.4.3 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), figure 12: the
data are force, voltage and three accelerations of a ground vibration test, recorded 400 times per second. A time step
(a row of the record, 0.0025 s) is the unit of time. 10 % of the time steps are removed at random. A model forecasts 8
time steps from the 64 samples before them. Without the data the run uses a simulated structure; a warning and the
summary say so. The trivial baseline repeats the last sample.

--protocol paper: as in the authors' code, the last 100 time steps are dropped, the record is split 50/25/25 in order,
and it is standardised with statistics of the whole record. The force repeats every 8192 time steps, so the test set
repeats the training set almost exactly. A second baseline is therefore printed: it forecasts by copying the training
values a whole number of periods earlier.

--protocol honest: the record is split by the phase in the period of 8192 time steps. In each of the nine periods
training has the phases 0 to 3975, validation 4056 to 6043, and test 6124 to 8111, targets included. Between these
ranges 80 time steps are unused, as long as a segment with its forecast. The record is standardised with statistics of
the training data.

The preset "paper" uses the paper's sizes, split, tolerance and epochs. From the authors' code it uses the batch size
64, gradient norms clipped to 1, and the full error norm of the adjoint. The learning rate falls from 1e-3 as a cosine;
in the code it drops from 1e-3 to 1e-4 after 50 epochs. The loss is the squared error of the forecast plus 0.1 times the
squared error of predicting each next sample, which is our interpretation of the paper's regulariser. The code's third
term, 0.1 times the squared error at the current sample, is left out. Momentum, damping and signs are the paper's; xi,
which it does not give, starts at 0.01. With torch's initial weights, the state of a residual linear cell diverges
within 64 samples. So the initial weights of the cell, the encoder and the last layer of f are multiplied by 0.001. (The
authors' code does this with all parameters, including the damping.)

--model oscillators is a layer of linear oscillators whose outputs are the forecasts. "oscillator_stack" has two blocks
of oscillators with gates between them. Like the other baselines, it forecasts by taking its own predictions as inputs.
"kalman" has a few noisy oscillators and maximises their likelihood. The initial frequencies are in the range in which
the record has power. The linear models allow a larger --lr: 1e-2 for "oscillators", 1e-1 for "kalman".

As in the authors' code, the encoder of the ODE-RNNs computes the initial state from all 64 samples. So only their
predictions after the window are forecasts. The baselines have no encoder. Compare only errors after the window.
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
from tasks.common.run import Run, command
from tasks.common.train import Samples, evaluate, fit
from tasks.data import f16
from tasks.models.baselines import BASELINES, IrregularSeriesConfig, make_baseline
from tasks.models.oscillating import TITLES, NoisyForecaster, NoisyOscillators, RowForecaster

COLUMNS = ("force", "voltage", "acceleration 1", "acceleration 2", "acceleration 3")
CHANNELS = len(COLUMNS)
WINDOW = 64  # number of samples in a segment
HORIZON = 8  # number of time steps to forecast after the samples
DROPPED = 100  # number of time steps dropped at the end in the paper's protocol
PERIOD = f16.PERIOD
# 80 unused phases lie between the ranges: 65 times span 72 time steps, and 8 time steps are forecast
PHASES = {"train": (0, 3976), "validation": (4056, 6044), "test": (6124, 8112)}
XI = 0.01  # initial value in 1/row^2: h oscillates at 400 sqrt(XI) / 2 pi = 6 Hz, as the record does; ln 2: 53 Hz
PARAMETERS = 16_000  # approximate number of parameters of a baseline, as many as the ODE-RNNs have
FREQUENCY = (0.004, 0.05)  # range of initial frequencies in cycles per time step, 1.6 to 20 Hz
OSCILLATORS = ("oscillators", "oscillator_stack", "kalman")
NOISY = 12  # number of oscillators of "kalman"
REMOVED_SEED = 1  # seed that selects the removed time steps
NEXT_WEIGHT = 0.1  # weight of the next-sample predictions in the loss

# sizes of h and of the hidden layers of f
SIZES = {
    "node": (21, (63, 84)),
    "anode": (27, (81, 108)),
    "sonode": (19, (38, 19)),
    "hbnode": (20, (20, 20)),
    "ghbnode": (20, (20, 20)),
}


@dataclasses.dataclass(frozen=True)
class PlaneVibrationConfig(IrregularSeriesConfig):
    """Command-line options of plane vibration."""

    models = tuple(dict.fromkeys((*MODELS, *BASELINES, *OSCILLATORS)))
    epochs: int = option(50, "passes over the training segments", may_change=True)
    schedule: str = option("cosine", "learning rate: constant, cosine or step", SCHEDULES)
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    tol: float = option(1e-5, "rtol = atol of the solver")
    protocol: str = option("honest", "how the data are split, see above", ("paper", "honest"))
    data: str = option("auto", "f16, generated (a simulated structure), or auto: f16 if it is there", f16.SOURCES)


PRESETS = {"paper": "--protocol paper --tol 1e-07 --solver torchdiffeq --adjoint-norm full --epochs 500"}


# Data


def split_rows(count: int, protocol: str) -> dict[str, Tensor]:
    """Return the row indices of non-overlapping segments of 65 times, (segments, 65), for training, validation and
    test.

    A tenth of the rows is removed at random. The 8 rows to forecast begin at the last time of a segment.

    Arguments:
        count: number of rows in the record.
        protocol: "paper" or "honest", see the module docstring.
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
    return {name: torch.cat([_cut(run) for run in parts]) for name, parts in runs.items()}


def _runs(kept: Tensor, count: int, start: int, stop: int) -> Iterator[Tensor]:
    """Yield, for each period, the remaining rows in a range of phases whose forecasts are in this range too."""
    for first in range(0, count, PERIOD):
        yield kept[(kept >= first + start) & (kept <= min(first + stop, count) - HORIZON)]


def _cut(run: Tensor) -> Tensor:
    length = WINDOW + 1
    return run[: len(run) // length * length].reshape(-1, length)


@dataclasses.dataclass(frozen=True)
class Splits:
    """The standardised training, validation and test data.

    Attributes:
        batches: for each data set, the samples (segments, 64, 5), the times in time steps since the first (segments,
            65), and the targets from the 65th time on (segments, 8, 5).
        rows: for each data set, the row indices of the times (segments, 65).
        record: the whole record, standardised, (N, 5).
        mean: mean of the columns, (5,).
        deviation: standard deviation of the columns, (5,).
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
        """Return the mean squared errors of the trivial baselines on the test set."""
        x, _, target = self.batches["test"]
        errors = {"persistence_forecast_mse": mse(x[:, -1:].expand_as(target), target)}
        rows = self.rows["test"][:, -1:] + torch.arange(HORIZON)
        unseen = self.rows["validation"].min()  # the first row after training in the paper's protocol
        earlier = rows - (rows - unseen).div(PERIOD, rounding_mode="floor").add(1) * PERIOD
        if bool((self.rows["train"].max() < unseen) & (earlier >= 0).all()):
            errors["periods_earlier_forecast_mse"] = mse(self.record[earlier], target)
        return {name: error.item() for name, error in errors.items()}


# Models


class Encoder(nn.Module):
    """The initial state of the ODE-RNN as a linear map of all samples in the window."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WINDOW * CHANNELS, size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the state (batch, size) for samples (batch, 65, 5), the last of which is padding."""
        return self.linear(x[:, :WINDOW].flatten(1))


class LinearCell(nn.Module):
    """A linear cell U x + W_h h for the state h, or U x + W_h h + W_m m for the state [h, m]. Each map has a bias."""

    def __init__(self, input_size: int, hidden_size: int, parts: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.input = nn.Linear(input_size, parts * hidden_size)
        self.parts = nn.ModuleList(nn.Linear(hidden_size, parts * hidden_size) for _ in range(parts))

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        """Return the new state (batch, parts * hidden_size) from x (batch, input_size) and s.

        There are 1 or 2 parts.
        """
        parts = s.split(self.hidden_size, dim=-1)
        return self.input(x) + sum(weight(part) for weight, part in zip(self.parts, parts, strict=True))


class Forecaster(nn.Module):
    """An ODE-RNN that takes a window of samples and forecasts what follows; a dense layer maps h to values."""

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
        """Return the forecast (batch, 8, 5), and the predictions at times 2 to 65, (batch, 64, 5).

        Arguments:
            x: samples (batch, 64, 5).
            t: times (batch, 65), in time steps.
        """
        x = nn.functional.pad(x, (0, 0, 0, 1))  # zeros at the 65th time, where there is no sample
        mask = torch.arange(WINDOW + 1, device=x.device).expand(len(x), -1) < WINDOW
        before, _, state = self.rnn.filter(x, t, mask=mask)
        h, _ = self.rnn.forecast(state, torch.arange(float(HORIZON), device=x.device))
        return self.head(h), self.head(before.h[:, 1:])


class Baseline(nn.Module):
    """A recurrent network that predicts the next sample, and forecasts by taking its predictions as inputs."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.rnn = make_baseline(model, CHANNELS, PARAMETERS, output_size=CHANNELS, predicts_ahead=True)
        self.head = nn.Linear(self.rnn.hidden_size, CHANNELS)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the forecast and the predictions at times 2 to 65; see :class:`Forecaster`."""
        gap = t.diff(dim=1)
        features, state = self.rnn(x, nn.functional.pad(gap[:, :-1], (1, 0)), gap_after=gap)
        following = self.head(features)
        forecast = [following[:, -1:]]  # the prediction at the 65th time
        gap, row = gap[:, -1:], torch.ones_like(gap[:, -1:])
        for _ in range(HORIZON - 1):
            features, state = self.rnn(forecast[-1], gap, state, gap_after=row)
            forecast.append(self.head(features))
            gap = row
        return torch.cat(forecast, dim=1), following


def make_model(config: PlaneVibrationConfig) -> nn.Module:
    """Return the model that the options describe."""
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
    """Return the mean squared error of the forecast, plus 0.1 times that of the next-sample predictions.

    If a model returns log-likelihoods, the loss is minus their mean.
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
    record, source = f16.read_plane_vibration(config.data)
    config = dataclasses.replace(config, data=source)  # a run cannot be resumed with other data
    splits = Splits.from_record(record, config.protocol)
    run = Run("plane_vibration", config, f"{config.preset}-{config.protocol}-{config.model}-seed{config.seed}")
    model = make_model(config)
    if isinstance(model, Forecaster) and config.time_unit == 0:
        model.rnn.fit_time_unit(splits.batches["train"][1])
    trivial_errors = splits.trivial_errors()
    sizes = "/".join(str(len(rows)) for rows in splits.rows.values())
    described = "simulated, not of an aircraft" if source == "generated" else source
    errors_without = ", ".join(f"{name} {value:.4g}" for name, value in trivial_errors.items())
    run.announce(model, config.model, f"data: {described}, {sizes} segments; {errors_without}")
    fit(run, model, splits.batches["train"], splits.batches["validation"], squared_errors, held_out="validation")
    errors: dict[str, object] = {}
    if not run.is_finished:
        test = run.workers.to_device(splits.batches["test"])
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
    """Draw the measured and forecast accelerations of four test segments in ``forecast.png``."""
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
