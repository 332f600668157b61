"""Training steps of an ODERNN on sparse irregular series beside nn.GRU: ``python -m benchmarks.irregular``.

A made-up set: sines of 40 frequencies, of which three quarters of the values are missing, at times of a Poisson
process; the class is whether the first frequency is high. Batches of 96, 64 samples, all models with a hidden size of
32 and the mask among the inputs, at rtol 1e-3, as they are initialised and after some epochs of training. Loops as one
would write them by hand take one step of leapfrog (1 evaluation) or of the classical Runge-Kutta method (4) in each
gap.

Processor time of one thread; the median of the ratios of steps that take turns. "operations" are those that torch
dispatches in a step, "Python calls" the calls of functions. Memory is the growth of a fresh process in one step at
1,000 samples. Writes JSON with the machine in it.
"""

from __future__ import annotations

import cProfile
import pstats
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

import hbnode
from benchmarks.harness import command, interleaved, milliseconds, peak_bytes, ratio, reset_peak, write

BATCH, LENGTH, FEATURES, HIDDEN = 96, 64, 40, 32
BATCHES = 10  # of an epoch
UNIT = 10.0  # ten mean gaps; fit_time_unit would take ten median gaps, 6.9
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def make_batch(seed: int, length: int = LENGTH) -> Batch:
    """Values, times, the mask and the class."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.empty(BATCH, length).exponential_(generator=generator).add_(1e-3).cumsum(1)
    frequency, phase = torch.rand(2, BATCH, 1, FEATURES, generator=generator)
    frequency = 0.05 + 0.3 * frequency
    x = torch.sin(frequency * t.unsqueeze(-1) + 6.28 * phase)
    mask = torch.rand(x.shape, generator=generator) < 0.25
    return x, t, mask, (frequency[:, 0, 0] > 0.2).float()


class Gated(nn.Module):
    """torch.nn.GRU, which does not see the times."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2 * FEATURES, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.rnn(_with_mask(x, mask))[0][:, -1])[:, 0]


class Loop(nn.Module):
    """The heavy ball from sample to sample by so many evaluations, 1 or 4, as a loop."""

    def __init__(self, evaluations: int) -> None:
        super().__init__()
        self.step = self.leapfrog if evaluations == 1 else self.runge_kutta
        self.cell = nn.GRUCell(2 * FEATURES, 2 * HIDDEN)
        self.f = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.omega, self.start = nn.Parameter(torch.tensor(-3.0)), nn.Parameter(torch.zeros(2 * HIDDEN))
        self.head = nn.Linear(HIDDEN, 1)

    def leapfrog(self, s: Tensor, dt: Tensor, damping: Tensor) -> Tensor:
        """Half a drift, a kick, half a drift."""
        h, m = s.chunk(2, 1)
        h, decay = h + dt / 2 * m, torch.exp(-damping * dt)
        m = decay * m + (1 - decay) / damping * self.f(h)
        return torch.cat([h + dt / 2 * m, m], 1)

    def runge_kutta(self, s: Tensor, dt: Tensor, damping: Tensor) -> Tensor:
        """The classical method on h and m side by side."""

        def slope(s: Tensor) -> Tensor:
            h, m = s.chunk(2, 1)
            return torch.cat([m, self.f(h) - damping * m], 1)

        first = slope(s)
        second = slope(s + dt / 2 * first)
        third = slope(s + dt / 2 * second)
        return s + dt / 6 * (first + 2 * second + 2 * third + slope(s + dt * third))

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        """The logits."""
        inputs, gaps = _with_mask(x, mask), t.diff().unsqueeze(-1) / UNIT
        s, damping = self.start.expand(len(x), -1), torch.sigmoid(self.omega)
        for i in range(x.shape[1]):
            s = self.cell(inputs[:, i], self.step(s, gaps[:, i - 1], damping) if i else s)
        return self.head(s[:, :HIDDEN])[:, 0]


class Hybrid(nn.Module):
    """An ODERNN."""

    def __init__(self, time_unit: float = UNIT, **options: Any) -> None:
        super().__init__()
        options = {"rtol": 1e-3, "atol": 1e-3, "mask_features": True} | options
        self.rnn = hbnode.ODERNN(FEATURES, HIDDEN, time_unit=time_unit, **options)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.rnn(x, t, mask=mask)[1].h)[:, 0]


LEAPFROG: dict[str, Any] = {"method": "leapfrog", "steps": 1}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "nn.GRU": Gated,
    "loop, 1 evaluation": lambda: Loop(1),
    "loop, 4 evaluations": lambda: Loop(4),
    "hbnode": Hybrid,
    "hbnode, compiled": lambda: Hybrid(compile=True),
    "hbnode, unit not fitted": lambda: Hybrid(time_unit=1.0),
    "hbnode, leapfrog": lambda: Hybrid(**LEAPFROG),
    "hbnode, leapfrog in steps of .25": lambda: Hybrid(method="leapfrog", options={"step_size": 0.25}),
    "hbnode, nystrom6": lambda: Hybrid(method="nystrom6"),
    "hbnode, nystrom8": lambda: Hybrid(method="nystrom8"),
    "hbnode, a common step": lambda: Hybrid(per_sample=False),
    "ghbnode": lambda: Hybrid(field="ghbnode"),
    "node": lambda: Hybrid(field="node"),
}
MEMORY: dict[str, Callable[[], nn.Module]] = {
    "nn.GRU": Gated,
    "hbnode": Hybrid,
    "hbnode, checkpoint": lambda: Hybrid(gradient="checkpoint"),
    "hbnode, leapfrog": lambda: Hybrid(**LEAPFROG),
    "hbnode, leapfrog, checkpoint": lambda: Hybrid(**LEAPFROG, gradient="checkpoint"),
}


def _with_mask(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([torch.where(mask, x, 0.0), mask.to(x)], -1)


def step(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """A training step without the optimizer's part."""
    *inputs, target = batch

    def run() -> None:
        model.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(*inputs), target).backward()

    return run


def trained(make: Callable[[], nn.Module], epochs: int) -> nn.Module:
    """A model after some epochs."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for seed in range(BATCHES):
            step(model, make_batch(seed))()
            optimizer.step()
    return model


class Operations(TorchDispatchMode):
    """Counts what torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def profile(function: Callable[[], None]) -> dict[str, int]:
    """Operations of torch and calls of Python in a step."""
    with Operations() as operations:
        function()
    calls = cProfile.Profile()
    calls.runcall(function)
    return {"operations": operations.count, "python_calls": pstats.Stats(calls).total_calls}


def compare(names: list[str], epochs: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each model."""
    models = {name: trained(MODELS[name], epochs) for name in names}
    steps = {name: step(model, make_batch(1000)) for name, model in models.items()}
    times = interleaved(steps, repeats)
    rows = []
    for name, model in models.items():
        nfe = model.rnn.nfe.forward / (LENGTH - 1) if isinstance(model, Hybrid) else None
        over = ratio(times[name], times["nn.GRU"])
        row = {"model": name, "epochs": epochs, "ms": milliseconds(times[name]), "over_gru": over}
        rows.append(row | {"evaluations_per_gap": nfe} | profile(steps[name]))
    return rows


def memory(name: str, length: int) -> float:
    """MiB by which the process grows in a step."""
    model = trained(MEMORY[name], 0)
    step(model, make_batch(0, 3))()
    batch = make_batch(0, length)
    cpu = torch.device("cpu")
    before = reset_peak(cpu)
    step(model, batch)()
    return (peak_bytes(cpu) - before) / 2**20


def main() -> None:
    """Time, print a row for each model, write JSON."""
    parser = command(__doc__, "irregular")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--training", type=int, nargs="+", default=(0, 3), help="epochs of training before [0 3]")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds [9]")
    parser.add_argument("--length", type=int, default=1000, help="samples where memory is measured, 0 for none [1000]")
    parser.add_argument("--memory-of", choices=list(MEMORY), help="print the memory of one model, and no more")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="the gaps between samples take")  # a unit that was not fitted
    if options.memory_of:
        print(memory(options.memory_of, options.length))
        return
    names = list(dict.fromkeys(["nn.GRU", *options.models]))
    grown = {}
    for name in MEMORY if options.length else ():
        arguments = [sys.executable, "-m", "benchmarks.irregular", "--memory-of", name, "--length", str(options.length)]
        grown[name] = float(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
        print(f"{name:>34}  {grown[name]:6.0f} MiB  {grown[name] / max(grown['nn.GRU'], 1.0):.2f}")
    print(f"{'model':>34}  epochs      ms  over nn.GRU  evaluations  operations  Python calls")
    rows = []
    for epochs in options.training:
        for row in compare(names, epochs, options.repeats):
            rows.append(row)
            nfe = "" if row["evaluations_per_gap"] is None else f"{row['evaluations_per_gap']:.1f}"
            counts = f"{row['operations']:10d}  {row['python_calls']:12d}"
            times = f"{row['ms']:6.1f}  {row['over_gru']:11.2f}"
            print(f"{row['model']:>34}  {epochs:6d}  {times}  {nfe:>11}  {counts}", flush=True)
    write(options.out, {"rows": rows, "memory_MiB": grown})


if __name__ == "__main__":
    main()
