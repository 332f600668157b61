"""Silverbox: simulate the output V2 of an electronic oscillator from its input V1, on the official test sets.

The Silverbox is a circuit that resembles a Duffing oscillator. Data and split are those of nonlinearbenchmark.org (T.
Wigren and J. Schoukens, ECC 2013). The momentum-architectures paper shows only the growth of untrained models on it,
as in tasks.studies.silverbox_growth; here the models are trained.

f is a small network that takes the state and V1(t). An encoder computes the initial state from earlier samples, because
a window does not start at rest. It also sets the components that are zero in a usual ANODE. Training uses windows of
the multisine signals, and validation uses their end. Each of the three test sets is simulated as a whole. Its initial
state is computed from the first 50 samples, which the benchmark excludes from the error. Errors are root mean squares
in millivolts. The function sigma of GHBNODE is hardtanh, as in figure 7 of the paper.

--model oscillators has no ODE and no encoder: it is three blocks of linear oscillators with gates between them. Their
inputs are V1, and V2 at the given first samples. Their windows must be much longer than the given samples, so that they
learn to simulate V2: --window 500 --stride 50 --batch-size 32.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import GRADIENTS, MODELS, SCHEDULES, SECOND_ORDER, ODEConfig, make_field, option
from tasks.common.figures import panels
from tasks.common.run import Run, command, count_parameters
from tasks.common.train import Samples, fit
from tasks.data.silverbox import SETS, START, read_silverbox

FINE = 8  # points per sample of the interpolated input
OSCILLATORS = "oscillators"
HIDDEN = {"node": 20, "anode": 13, "sonode": 16, "hbnode": 20, "ghbnode": 20}


@dataclasses.dataclass(frozen=True)
class SilverboxConfig(ODEConfig):
    """Command-line options of the Silverbox."""

    models = (*MODELS, OSCILLATORS)
    positive = "window past stride validation"

    epochs: int = option(60, "passes over the training windows", may_change=True)
    batch_size: int = option(256, "windows in a batch")
    lr: float = option(2e-2, "Adam's learning rate")
    schedule: str = option("cosine", "learning rate: constant, cosine or step", SCHEDULES)
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    gradient: str = option("direct", "gradient method; direct, because the graph of a window is small", GRADIENTS)
    steps: int = option(1, "steps per sample; 0: by the tolerance")
    window: int = option(50, "simulated samples of a training window")
    past: int = option(20, "number of samples from which the encoder computes the state, at most 50")
    stride: int = option(10, "samples between the starts of two training windows")
    validation: int = option(8192, "number of samples at the end of the training set for validation")

    def __post_init__(self) -> None:
        if self.validation < START + self.window:
            raise ValueError(f"--validation must be at least {START + self.window}, got {self.validation}")
        if self.past > START:
            raise ValueError(f"--past must be at most {START}, the samples that the benchmark gives; got {self.past}")

    def try_out(self, model: str) -> None:
        """Solve a small model with these options, unless the model has no ODE."""
        if model != OSCILLATORS:
            super().try_out(model)


def refine(u: Tensor) -> Tensor:
    """Interpolate a signal of N samples to :data:`FINE` points per sample, (N - 1) * FINE + 1 points.

    This is band-limited interpolation with a Kaiser window of 48 samples, because the input has power up to a third of
    the sampling rate, which linear interpolation would reduce. The signal is extended by constants at both ends.
    """
    half = 24
    taps = torch.arange(-half, half + 1, dtype=torch.float64)
    distance = taps - torch.arange(FINE)[:, None] / FINE  # (points between two samples, taps)
    window = torch.special.i0(8.0 * (1 - (distance / (half + 1)) ** 2).clamp(min=0).sqrt())
    kernel = torch.sinc(distance) * window / torch.special.i0(torch.tensor(8.0, dtype=torch.float64))
    kernel = (kernel / kernel.sum(1, keepdim=True)).to(u.dtype)  # so that constants are interpolated exactly
    padded = nn.functional.pad(u[None, None], (half, half), mode="replicate")
    return nn.functional.conv1d(padded, kernel[:, None])[0].T.reshape(-1)[: (len(u) - 1) * FINE + 1]


def windows(samples: Tensor, fine: Tensor, past: int, length: int, stride: int) -> Samples:
    """Cut a record into windows. Each has samples for the initial state, then samples to simulate.

    Arguments:
        samples: V1 and V2, (N, 2).
        fine: V1 after :func:`refine`.
        past: number of samples from which the encoder computes the state at the last of them.
        length: number of samples to simulate.
        stride: samples between the starts of two windows.

    Returns:
        The encoder's samples (windows, past, 2); V1 from the last of these on, (windows, length * FINE + 1); and V2
        after it, (windows, length).
    """
    before = samples[: len(samples) - length].unfold(0, past, stride).mT
    drive = fine[(past - 1) * FINE :].unfold(0, length * FINE + 1, stride * FINE)
    return before.contiguous(), drive.contiguous(), samples[past:, 1].unfold(0, length, stride).contiguous()


class Force(nn.Module):
    """f(t, h) or f(t, h, v) as the sum of a linear map and a small tanh network of the state and the input."""

    time_dependent = True

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs + 1, outputs, bias=False)
        self.net = hbnode.nn.MLP(inputs + 1, [hidden], outputs, activation=nn.Tanh)
        for p in (self.linear.weight, *self.net.layers[-1].parameters()):
            nn.init.zeros_(p)  # zero, because a random initial f would make h diverge
        self.input: Callable[[Tensor], Tensor]  # set before each solve

    def forward(self, t: Tensor, *state: Tensor) -> Tensor:
        """Return f, (batch, outputs)."""
        x = torch.cat([*state, self.input(t)], dim=-1)
        return self.linear(x) + self.net(x)


class Encoder(nn.Module):
    """The initial state from the given samples: V2 at the last of them plus a learned linear term."""

    def __init__(self, past: int, size: int, pair: bool) -> None:
        super().__init__()
        self.pair = pair
        self.linear = nn.Linear(2 * past, size)
        self.net = hbnode.nn.MLP(2 * past, [32], size, activation=nn.Tanh)

    def forward(self, past: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return h, or h and its momentum, together (batch, size), from samples (batch, past, 2)."""
        x = past.flatten(1)
        state = self.linear(x) + self.net(x)
        state = torch.cat([state[:, :1] + past[:, -1, 1:], state[:, 1:]], dim=1)
        return (state[:, :1], state[:, 1:]) if self.pair else state


class Simulator(nn.Module):
    """Simulate V2 from V1 and a few earlier samples, all standardised. V2 is the first component of h."""

    def __init__(self, model: str, past: int, **solver: Any) -> None:
        super().__init__()
        force = Force(2 if model in ("anode", "sonode") else 1, HIDDEN[model], 2 if model == "anode" else 1)
        sigma = nn.Hardtanh(-5.0, 5.0)
        field = make_field(model, force, anode={"augment": 1}, ghbnode={"activation": sigma})
        encoder = Encoder(past, 1 if model == "node" else 2, pair=model in SECOND_ORDER)
        self.block = hbnode.ODEBlock(field, initial_state=encoder, **solver)

    def forward(self, past: Tensor, drive: Tensor) -> Tensor:
        """Return V2 (batch, T) from samples (batch, past, 2) and V1 ``drive`` (batch, T * FINE + 1)."""
        length = (drive.shape[1] - 1) // FINE
        # float64, because times up to 40,000 have errors of 0.01 in float32
        times = torch.arange(drive.shape[1], dtype=torch.float64, device=drive.device) / FINE
        signal = hbnode.Signal(times, drive.T[..., None], outside="hold")
        cast(
            Force, self.block.field.func
        ).input = signal.forward  # a method, because a module would be registered as a submodule
        return self.block(past, times[::FINE])[1:, :, 0].T if length else drive[:, :0]


class Swinging(nn.Module):
    """Simulate V2 by three blocks of oscillators with as many parameters as GHBNODE."""

    def __init__(self, past: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            parameters = count_parameters(Simulator("ghbnode", past))

        def stack(width: int) -> hbnode.nn.OscillatorStack:
            frequency, decay = (0.01, 0.25), (0.01, 0.1)
            return hbnode.nn.OscillatorStack(3, width, 3, output_size=1, norm=False, frequency=frequency, decay=decay)

        self.stack = hbnode.nn.match_parameters(stack, parameters)

    def forward(self, past: Tensor, drive: Tensor) -> Tensor:
        """Return V2; see :meth:`Simulator.forward`. The inputs are V1, V2 if known, and whether V2 is known."""
        v1 = torch.cat([past[..., 0], drive[:, FINE::FINE]], 1)
        known = torch.arange(v1.shape[1], device=v1.device).expand(v1.shape) < past.shape[1]
        v2 = nn.functional.pad(past[..., 1], (0, v1.shape[1] - past.shape[1]))
        return self.stack(torch.stack([v1, v2, known.to(v1)], 2))[0][:, past.shape[1] :, 0]


def make_model(config: SilverboxConfig) -> nn.Module:
    """Return the model that the options describe."""
    if config.model == OSCILLATORS:
        return Swinging(config.past)
    return Simulator(config.model, config.past, **config.ode_options())


def squared_error(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean squared error of the standardised V2."""
    past, drive, target = batch
    return nn.functional.mse_loss(model(past, drive), target), {}


def split(record: Tensor, validation: int) -> tuple[dict[str, Tensor], float]:
    """Return the standardised official training and test sets, and the standard deviation of V2 in volts.

    The last samples of the training set are for validation.
    """
    records = {name: record[part] for name, part in SETS.items()}
    whole = records["train"]
    if len(whole) < 2 * validation:
        raise ValueError(f"--validation {validation} leaves too few of {len(whole)} training samples")
    records |= {"train": whole[:-validation], "validation": whole[-validation:]}
    mean, deviation = records["train"].mean(0), records["train"].std(0)
    return {k: ((v - mean) / deviation).float() for k, v in records.items()}, deviation[1].item()


def simulate(model: nn.Module, samples: Tensor, config: SilverboxConfig) -> Tensor:
    """Simulate V2 of a whole record from V1 and its first 50 samples. V2 is infinite after a divergence."""
    device = next(model.parameters()).device
    samples = samples[START - config.past :]
    fine = refine(samples[:, 0])
    length = len(samples) - config.past
    past, drive, _ = (x.to(device) for x in windows(samples, fine, config.past, length, 1))
    with torch.no_grad():
        try:
            return model(past, drive)[0].cpu()
        except hbnode.SolverError as error:
            whole = torch.full((length,), math.inf)
            until = max(math.ceil(error.t) - 1, 0)  # the last sample that a solve reaches before the failure
            whole[:until] = model(past, drive[:, : until * FINE + 1])[0].cpu()
            return whole


def rmse(simulated: Tensor, measured: Tensor) -> float:
    """Return the root mean squared difference, computed in float64."""
    return (simulated.double() - measured.double()).square().mean().sqrt().item()


def identify(config: SilverboxConfig) -> None:
    """Train one model with one seed, simulate the test sets, and draw the test set "arrow"."""
    records, scale = split(read_silverbox(), config.validation)
    train, validation = records["train"], records["validation"]
    cut = functools.partial(windows, past=config.past, length=config.window)
    run = Run("silverbox", config, f"{config.preset}-{config.model}-seed{config.seed}")
    model = make_model(config)
    run.announce(model, config.model)
    fit(
        run,
        model,
        cut(train, refine(train[:, 0]), stride=config.stride),
        cut(validation, refine(validation[:, 0]), stride=config.window),
        squared_error,
        held_out="validation",
    )
    errors: dict[str, float] = {}
    if run.workers.rank == 0 and not run.is_finished:
        model.eval()
        simulated = {k: simulate(model, records[k], config) for k in ("validation", "multisine", "arrow_full")}
        # "arrow_no_extrapolation" is the start of the whole arrow
        part = len(records["arrow_no_extrapolation"]) - START
        simulated["arrow_no_extrapolation"] = simulated["arrow_full"][:part]
        for name, values in simulated.items():
            deviation = 1000 * scale * rmse(values, records[name][START:, 1])
            errors[f"{name}_rmse_mV"] = deviation  # infinite if the simulation diverged
            print(f"{config.model}: {name} RMSE {deviation:.3f} mV")
        measured = records["arrow_full"][START:, 1]
        draw_simulation(simulated["arrow_full"] * scale, measured * scale, part, config.model, errors, run.folder)
    run.finish(model, **errors)


def draw_simulation(
    simulated: Tensor, measured: Tensor, part: int, name: str, errors: Mapping[str, float], folder: Path
) -> None:
    """Draw V2 of the test set "arrow" and the error of its simulation in ``simulation.png``."""
    seconds = torch.arange(START, START + len(measured)) / 610.35
    texts = {"arrow_no_extrapolation": "up to the dotted line", "arrow_full": "all of it", "multisine": "multisine"}
    values = {text: errors[f"{record}_rmse_mV"] for record, text in texts.items()}
    said = ", ".join(f"{text} {f'{x:.2f}' if math.isfinite(x) else 'diverged'}" for text, x in values.items())
    title = f"{name.upper() if name in MODELS else name} on the arrow. RMSE in mV: {said}"
    with panels(folder / "simulation.png", size=(11.5, 3.6), title=title) as (_, axes):
        ax = axes[0, 0]
        ax.plot(seconds, 1000 * measured, color="0.7", lw=0.4, label="V2 measured")
        error = (1000 * (simulated - measured)).clamp(-400, 400)
        ax.plot(seconds, error, color="C3", lw=0.4, label="simulated - measured")
        ax.axvline(seconds[part - 1].item(), color="0.3", lw=0.8, ls=":")
        ax.set(xlabel="time in s", ylabel="mV", xlim=(0, seconds[-1].item()))


main = command(SilverboxConfig, {}, __doc__, identify)


if __name__ == "__main__":
    main()
