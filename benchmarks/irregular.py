"""Training steps of an ODERNN and of nn.GRU on sparse irregular series: ``python -m benchmarks.irregular``.

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
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

import hbnode
from benchmarks import harness
from benchmarks.harness import Options, Row, in_fresh_process, interleaved, milliseconds, program, ratio, training_step

BATCH, LENGTH, FEATURES, HIDDEN = 96, 64, 40, 32
BATCHES = 10  # batches in an epoch
EPOCHS = (0, 3)  # epochs of training before the measurement
UNIT = 10.0  # ten mean gaps; fit_time_unit would take ten median gaps, 6.9
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def make_batch(seed: int, length: int = LENGTH) -> Batch:
    """Return simulated values, times, the mask and the class."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.empty(BATCH, length).exponential_(generator=generator).add_(1e-3).cumsum(1)
    frequency, phase = torch.rand(2, BATCH, 1, FEATURES, generator=generator)
    frequency = 0.05 + 0.3 * frequency
    x = torch.sin(frequency * t.unsqueeze(-1) + 6.28 * phase)
    mask = torch.rand(x.shape, generator=generator) < 0.25
    return x, t, mask, (frequency[:, 0, 0] > 0.2).float()


class Gated(nn.Module):
    """A classifier with torch.nn.GRU, which ignores the times."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(2 * FEATURES, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.rnn(_with_mask(x, mask))[0][:, -1])[:, 0]


class Loop(nn.Module):
    """A heavy ball integrated from sample to sample in a Python loop, with 1 or 4 evaluations per gap."""

    def __init__(self, evaluations: int) -> None:
        super().__init__()
        self.step = self.leapfrog if evaluations == 1 else self.runge_kutta
        self.cell = nn.GRUCell(2 * FEATURES, 2 * HIDDEN)
        self.f = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.omega, self.start = nn.Parameter(torch.tensor(-3.0)), nn.Parameter(torch.zeros(2 * HIDDEN))
        self.head = nn.Linear(HIDDEN, 1)

    def leapfrog(self, s: Tensor, dt: Tensor, damping: Tensor) -> Tensor:
        """Take a leapfrog step: half a position update, a momentum update, half a position update."""
        h, m = s.chunk(2, 1)
        h, decay = h + dt / 2 * m, torch.exp(-damping * dt)
        m = decay * m + (1 - decay) / damping * self.f(h)
        return torch.cat([h + dt / 2 * m, m], 1)

    def runge_kutta(self, s: Tensor, dt: Tensor, damping: Tensor) -> Tensor:
        """Take a step of the classical Runge-Kutta method on the pair of h and m."""

        def slope(s: Tensor) -> Tensor:
            h, m = s.chunk(2, 1)
            return torch.cat([m, self.f(h) - damping * m], 1)

        first = slope(s)
        second = slope(s + dt / 2 * first)
        third = slope(s + dt / 2 * second)
        return s + dt / 6 * (first + 2 * second + 2 * third + slope(s + dt * third))

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        """Return the logits."""
        inputs, gaps = _with_mask(x, mask), t.diff().unsqueeze(-1) / UNIT
        s, damping = self.start.expand(len(x), -1), torch.sigmoid(self.omega)
        for i in range(x.shape[1]):
            s = self.cell(inputs[:, i], self.step(s, gaps[:, i - 1], damping) if i else s)
        return self.head(s[:, :HIDDEN])[:, 0]


class Hybrid(nn.Module):
    """A classifier with an ODERNN."""

    def __init__(self, time_unit: float = UNIT, **options: Any) -> None:
        super().__init__()
        options = {"rtol": 1e-3, "atol": 1e-3, "mask_features": True} | options
        self.rnn = hbnode.ODERNN(FEATURES, HIDDEN, time_unit=time_unit, **options)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        """Return the logits."""
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
    **{name: MODELS[name] for name in ("nn.GRU", "hbnode", "hbnode, leapfrog")},
    "hbnode, checkpoint": lambda: Hybrid(gradient="checkpoint"),
    "hbnode, leapfrog, checkpoint": lambda: Hybrid(**LEAPFROG, gradient="checkpoint"),
}


def _with_mask(x: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([torch.where(mask, x, 0.0), mask.to(x)], -1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of the logits."""
    *inputs, target = batch
    return nn.functional.binary_cross_entropy_with_logits(model(*inputs), target)


def trained(make: Callable[[], nn.Module], epochs: int) -> nn.Module:
    """Return a model after some epochs of training."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for seed in [*range(BATCHES)] * epochs:
        training_step(model, partial(loss, model, make_batch(seed)))()
        optimizer.step()
    return model


class Operations(TorchDispatchMode):
    """Count the operations that torch dispatches."""

    count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def profile(function: Callable[[], None]) -> dict[str, int]:
    """Return the numbers of torch operations and of Python calls in a step."""
    with Operations() as operations:
        function()
    calls = cProfile.Profile()
    calls.runcall(function)
    return {"operations": operations.count, "python_calls": pstats.Stats(calls).total_calls}


def compare(epochs: int, repeats: int) -> list[Row]:
    """Return a table row for each model."""
    models = {name: trained(make, epochs) for name, make in MODELS.items()}
    batch = make_batch(1000)
    steps = {name: training_step(model, partial(loss, model, batch)) for name, model in models.items()}
    times = interleaved(steps, repeats)
    rows = []
    for name, model in models.items():
        nfe = model.rnn.nfe.forward / (LENGTH - 1) if isinstance(model, Hybrid) else None
        over = ratio(times[name], times["nn.GRU"])
        row = {"model": name, "epochs": epochs, "ms": milliseconds(times[name]), "over_gru": over}
        rows.append(row | {"evaluations_per_gap": nfe} | profile(steps[name]))
    return rows


def memory(name: str, length: int = 1000) -> float:
    """Return the MiB by which a fresh process grows in one step."""
    model = trained(MEMORY[name], 0)
    training_step(model, partial(loss, model, make_batch(0, 3)))()
    step = training_step(model, partial(loss, model, make_batch(0, length)))
    return harness.added_memory({"step": step})["step_MiB"]


def measured(options: Options) -> Iterator[tuple[str, Any]]:
    """Yield the memory of each model, then the times."""
    warnings.filterwarnings("ignore", message="the gaps between samples take")  # a unit that was not fitted
    yield "memory_MiB", {name: in_fresh_process(memory, name) for name in MEMORY}
    for epochs in EPOCHS:
        yield "rows", compare(epochs, options.repeats)


main = program(__doc__, "irregular", measured, repeats=9)


if __name__ == "__main__":
    main()
