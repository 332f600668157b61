"""Compare selective and linear oscillators, a GRU and minGRU by error and CPU time on two problems of long memory.

Problem "adding": the series has --length uniform numbers in [0, 1) at irregular times. Two numbers are marked, one in
each half of the series. The target at the last sample is their sum. Always predicting 1 has a squared error of 1/6.
Problem "tone": the series is a noisy sine whose frequency changes twice, at the start and at the end of a marked
window. The window has a fifth of the samples. The target at the last sample is the frequency in the window, one of
eight. Guessing has an error rate of 7/8.

There are five models. "real" is selective oscillators with ``frequency=None``. "swinging" is selective oscillators with
half as many states, each of which has a frequency. "linear" is oscillators without selection. "gru" is a GRU, and
"mingru" is minGRU (Feng et al., arXiv:2410.01201) in the same residual blocks as the oscillators. "gru" and "mingru"
have the time since the previous sample as a further input. Adam's learning rate follows a cosine over --seconds of CPU
time in one thread. For each model the initial rate is chosen from --rates: the rate with the smallest median error
after --tuning-seconds, over --tuning-seeds other seeds. The result of a run is stored in --out, and the run is not
repeated if its file exists.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hbnode
from hbnode.nn._selective_scan import scan
from tasks.adding import problems
from tasks.common.config import Options, names_in, option, parse
from tasks.common.figures import panels
from tasks.common.files import read_json, write_json
from tasks.common.run import write_study
from tasks.common.train import Samples

MODELS = ("real", "swinging", "linear", "gru", "mingru")
TITLES = {"real": "selective, real", "swinging": "selective, half with a frequency", "linear": "linear oscillators"}
TITLES |= {"gru": "GRU", "mingru": "minGRU"}
TONES = 0.03 * torch.arange(1, 9)  # frequencies in cycles per unit of time
TRIVIAL = {"adding": 1 / 6, "tone": 7 / 8}
TUNING_SEED = 1_000_000
LAYERS, OUTPUTS, LENGTHS, BATCH = {"adding": 1, "tone": 2}, {"adding": 1, "tone": 8}, {"adding": 1000, "tone": 200}, 16


@dataclasses.dataclass(frozen=True)
class SelectiveOptions(Options):
    """Command-line options of the study."""

    positive = "size seconds tuning_seconds test_size"

    problem: str = option("adding", "the problem", tuple(TRIVIAL))
    model: str = option("all", f"one of {', '.join(MODELS)}, several with commas between, or all")
    length: int = option(0, "samples of a series; 0: 1,000 for adding, 200 for tone", least=0)
    size: int = option(32, "features of a block, or units of the GRU")
    seconds: float = option(60.0, "CPU seconds of training")
    seeds: int = option(1, "number of seeds", least=1)
    first_seed: int = option(0, "the first seed", least=0)
    rates: str = option("2e-3,5e-3,1.2e-2", "one learning rate, or several to choose from")
    tuning_seconds: float = option(40.0, "CPU seconds of a training run to choose the rate")
    tuning_seeds: int = option(3, "number of seeds to choose the rate", least=1)
    test_size: int = option(256, "test series")
    out: str = option("runs/selective", "folder for the table and the figure")


def adding(count: int, length: int, generator: torch.Generator) -> Samples:
    """Draw numbers with markers (count, length, 2), their times, and the sums of the marked numbers, (count, 1)."""
    numbers, places = problems(count, length, generator)
    marks = torch.zeros_like(numbers).scatter(1, places, 1.0)
    t = (2 * torch.rand(count, length, generator=generator)).cumsum(1)
    return torch.stack([numbers, marks], 2), t, numbers.gather(1, places).sum(1, keepdim=True)


def tone(count: int, length: int, generator: torch.Generator) -> Samples:
    """Draw a signal with markers (count, length, 2), its times, and the index of the tone in the window, (count,)."""
    window = length // 5
    t = (2 * torch.rand(count, length, generator=generator)).cumsum(1)
    start = torch.randint(length - window + 1, (count, 1), generator=generator)
    places = torch.arange(length)
    part = (places >= start).long() + (places >= start + window).long()  # 0 before the window, 1 within it, 2 after it
    kinds = torch.rand(count, len(TONES), generator=generator).argsort(1)[:, :3]
    phase = 2 * math.pi * torch.rand(count, 3, generator=generator)
    angle = 2 * math.pi * TONES[kinds].gather(1, part) * t + phase.gather(1, part)
    x = angle.sin() + 0.3 * torch.randn(count, length, generator=generator)
    return torch.stack([x, (part == 1).float()], 2), t, kinds[:, 1]


PROBLEMS = {"adding": adding, "tone": tone}


class GRU(nn.Module):
    """A GRU whose inputs are samples and time gaps, and a linear output layer."""

    def __init__(self, outputs: int, size: int, layers: int) -> None:
        super().__init__()
        self.layer = nn.GRU(3, size, layers, batch_first=True)
        self.head = nn.Linear(size, outputs)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, None]:
        """Return the output at every sample."""
        return self.head(self.layer(with_gaps(x, t))[0]), None


class MinGRU(nn.Module):
    """Residual blocks h + GLU(W gelu(s)), where s_i = (1 - z_i) s_{i-1} + z_i c_i with a gate z_i and a candidate c_i.

    The gates and candidates depend only on the input of the sample. The biases of z are initialised so that memory
    lengths are log-uniform, from 2 samples to the whole series.
    """

    def __init__(self, outputs: int, size: int, layers: int, length: int) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(3, size), nn.Linear(size, outputs)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(layers))
        gates = [nn.Linear(size, 2 * size) for _ in range(layers)]
        self.mixers = nn.ModuleList(nn.Linear(size, 2 * size) for _ in range(layers))
        for gate in gates:
            keep = torch.empty(size).uniform_(math.log(2), math.log(length)).exp()
            nn.init.constant_(gate.bias, 0.0)
            with torch.no_grad():
                gate.bias[:size] = -(keep - 1).log()
        self.gates = nn.ModuleList(gates)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, None]:
        """Return the output at every sample."""
        h = self.encoder(with_gaps(x, t)).transpose(0, 1)
        for norm, gate, mixer in zip(self.norms, self.gates, self.mixers, strict=True):
            z, candidate = gate(norm(h)).chunk(2, -1)
            s = scan(-functional.softplus(z), None, z.sigmoid() * candidate, torch.zeros_like(z[0]))
            h = h + functional.glu(mixer(functional.gelu(s)), -1)
        return self.head(h).transpose(0, 1), None


def with_gaps(x: Tensor, t: Tensor) -> Tensor:
    """Return the samples with log(1 + gap) as a further feature."""
    return torch.cat([x, t.diff(dim=1, prepend=t[:, :1]).log1p().unsqueeze(-1)], -1)


def make_model(name: str, problem: str, size: int, length: int, t: Tensor) -> nn.Module:
    """Return a model whose initial rates suit the times ``t``."""
    outputs, layers = OUTPUTS[problem], LAYERS[problem]
    if name == "gru":
        return GRU(outputs, size, layers)
    if name == "mingru":
        return MinGRU(outputs, size, layers, length)
    ranges: dict[str, Any] = {**hbnode.nn.oscillator_ranges(t, selective=name != "linear")}
    if name == "linear":
        return hbnode.nn.OscillatorStack(2, size, layers, output_size=outputs, **ranges)
    swings = name == "swinging"
    ranges |= {} if swings else {"frequency": None}
    states = (size + 1) // 2 if swings else size  # an oscillating state takes two numbers
    return hbnode.nn.OscillatorStack(
        2, size, layers, output_size=outputs, num_oscillators=states, selective=True, **ranges
    )


def loss_of(y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss at the last sample, and the error to report."""
    if target.dim() == 2:
        loss = functional.mse_loss(y, target)
        return loss, loss
    return functional.cross_entropy(y, target), (y.argmax(1) != target).float().mean()


def train(options: SelectiveOptions, name: str, seed: int, lr: float, seconds: float) -> dict[str, Any]:
    """Train a model, and return its test error as a function of the CPU seconds of training."""
    torch.manual_seed(seed)
    length = options.length or LENGTHS[options.problem]
    problem = PROBLEMS[options.problem]
    test = problem(options.test_size, length, torch.Generator().manual_seed(2**31 + seed))
    generator = torch.Generator().manual_seed(seed)
    model = make_model(name, options.problem, options.size, length, test[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    spent, steps, curve, reported = 0.0, 0, [], 0.0
    while spent < seconds:
        begun = time.process_time()
        *inputs, target = problem(BATCH if options.problem == "adding" else 2 * BATCH, length, generator)
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(math.pi * spent / seconds)) / 2
        optimizer.zero_grad()
        loss_of(model(*inputs)[0][:, -1], target)[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        spent, steps = spent + time.process_time() - begun, steps + 1
        if spent >= reported + seconds / 24 or spent >= seconds:
            reported = spent
            with torch.no_grad():
                parts = [model(*(part[i : i + 64] for part in test[:2]))[0][:, -1] for i in range(0, len(test[0]), 64)]
            curve.append((spent, float(loss_of(torch.cat(parts), test[2])[1])))
            shown = f"{spent:6.1f} s {steps:5} steps, {curve[-1][1]:.4f}"
            print(f"{options.problem} {name} lr {lr:g} seed {seed}: {shown}", flush=True)
    parameters = sum(p.numel() for p in model.parameters())
    first_under = next((s for s, error in curve if error < (0.01 if options.problem == "adding" else 0.05)), None)
    return {
        "problem": options.problem, "model": name, "seed": seed, "lr": lr, "seconds": seconds, "length": length,
        "steps": steps, "parameters": parameters, "test_error": curve[-1][1], "seconds_to_target": first_under,
        "curve": curve,
    }  # fmt: skip


def finished(options: SelectiveOptions, name: str, seed: int, lr: float, seconds: float) -> dict[str, Any]:
    """Return the result of a run, from its file or by training."""
    label = f"{options.problem}-{options.length or LENGTHS[options.problem]}-{name}-{lr:g}-{seconds:g}s-seed{seed}"
    path = Path(options.out) / "runs" / f"{label}.json"
    if not path.exists():
        write_json(path, train(options, name, seed, lr, seconds))
    return read_json(path)


def chosen_rate(options: SelectiveOptions, name: str) -> float:
    """Return the learning rate with the smallest median error in short training runs with other seeds."""
    rates = [float(rate) for rate in options.rates.split(",")]
    if len(rates) == 1:
        return rates[0]
    seeds = range(TUNING_SEED, TUNING_SEED + options.tuning_seeds)

    def error(lr: float) -> float:
        return median(finished(options, name, seed, lr, options.tuning_seconds)["test_error"] for seed in seeds)

    return min(rates, key=error)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the test error against CPU seconds: a panel for each problem, a line per run, a color for each model."""
    problems = [problem for problem in TRIVIAL if any(run["problem"] == problem for run in runs)]
    with panels(path, 1, len(problems), size=(5.5 * len(problems), 4)) as (_, axes):
        for ax, problem in zip(axes[0], problems, strict=True):
            for index, name in enumerate(MODELS):
                mine = [run for run in runs if run["problem"] == problem and run["model"] == name]
                for i, run in enumerate(mine):
                    label = TITLES[name] if i == 0 else None
                    ax.plot(*zip(*run["curve"], strict=True), color=f"C{index}", label=label, lw=1.3, alpha=0.8)
            ax.axhline(TRIVIAL[problem], color="black", lw=0.8, ls=":")
            what = "squared error" if problem == "adding" else "error rate"
            ax.set(title=f"{problem}, {LENGTHS[problem]:,} samples", xlabel="CPU seconds", ylabel=f"test {what}")
            ax.set(yscale="log" if problem == "adding" else "linear")


def main(argv: Sequence[str] | None = None) -> None:
    """Train all models, and write ``PROBLEM.csv``, ``PROBLEM.json`` and ``PROBLEM.png``."""
    options = parse(SelectiveOptions, {}, __doc__, argv)
    torch.set_num_threads(1)
    names = names_in(options.model, MODELS, "--model")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rates = {name: chosen_rate(options, name) for name in names}
    runs = [finished(options, name, seed, rates[name], options.seconds) for seed in seeds for name in names]
    table = [{key: value for key, value in run.items() if key != "curve"} for run in runs]
    if options.problem == "tone":
        table = [row | {"test_accuracy": 1 - row["test_error"]} for row in table]
    write_study(Path(options.out), options.problem, table, task="selective", runs=runs)
    draw(runs, Path(options.out) / f"{options.problem}.png")


if __name__ == "__main__":
    main()
