"""Many output times: the time of a training step with hbnode relative to torchdiffeq, at equal tolerance.

The fields are those of torchdiffeq's own examples: the network of ``examples/latent_ode.py`` (4 -> 20 -> 20 -> 4, ELU),
as a NODE and as the force of a heavy ball, from 1,000 starts to 100 times; and the cubic system of
``examples/ode_demo.py``, y' = y^3 A, from one start to 1,000 times in [0, 25]. A training step is forward, mean square
of all outputs, backward. The contenders take turns; a ratio is the median of the rounds' ratios, in time of the
processor, which other processes disturb less than that of the wall. Writes JSON with the machine in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torchdiffeq
from torch import Tensor, nn

import hbnode
from benchmarks.contenders import Stacked
from benchmarks.harness import (
    Options,
    Row,
    gradient,
    interleaved,
    milliseconds,
    program,
    ratio,
    relative,
    training_step,
)

SOLVER = {"rtol": 1e-5, "atol": 1e-5}
OURS = {
    "hbnode": {"gradient": "checkpoint"},
    "hbnode direct": {"gradient": "direct"},
    "hbnode onto the times": {"gradient": "checkpoint", "save": "exact"},
}
State = Tensor | tuple[Tensor, Tensor]


class Cubic(nn.Module):
    """The system that torchdiffeq's demo fits: y' = y^3 A."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the derivative."""
        return y**3 @ self.a


class Latent(nn.Module):
    """The field of torchdiffeq's latent ODE."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 20), nn.ELU(), nn.Linear(20, 20), nn.ELU(), nn.Linear(20, 4))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the derivative."""
        return self.layers(y)


def contenders(field: nn.Module, y0: State, t: Tensor) -> dict[str, Callable[[], None]]:
    """Return a training step with torchdiffeq, and one with each of hbnode's ways to compute output times."""

    def theirs() -> Tensor:
        if isinstance(y0, Tensor):
            return torchdiffeq.odeint(field, y0, t, **SOLVER)
        return torchdiffeq.odeint(Stacked(field), torch.stack(y0), t, **SOLVER)

    def ours(settings: Row) -> Tensor:
        y = hbnode.odeint(field, y0, t, **SOLVER, **settings)
        return y if isinstance(y, Tensor) else torch.stack(y, 1)

    steps = {"torchdiffeq odeint, dopri5": training_step(field, lambda: theirs().square().mean())}
    for name, settings in OURS.items():
        steps[name] = training_step(field, lambda settings=settings: ours(settings).square().mean())
    return steps


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield a table row for each solver on each problem."""
    batch, outputs, many = (4, 10, 20) if options.quick else (1000, 100, 1000)
    torch.manual_seed(0)
    x, t = torch.randn(batch, 4), torch.linspace(0.0, 5.0, outputs)
    ball = hbnode.HBNODE(Latent(), damping=0.5)
    problems: dict[str, tuple[nn.Module, State, Tensor]] = {
        f"NODE, {batch} x 4, {outputs} times": (Latent(), x, t),
        f"heavy ball, {batch} x 4, {outputs} times": (ball, (x, torch.zeros_like(x)), t),
        f"cubic system, {many} times": (Cubic(), torch.tensor([[2.0, 0.0]]), torch.linspace(0.0, 25.0, many)),
    }
    for problem, (field, y0, times_of_outputs) in problems.items():
        steps = contenders(field, y0, times_of_outputs)
        gradients = [gradient(step, field.parameters()) for step in steps.values()]
        times = interleaved(steps, options.repeats, warm=0)
        first = next(iter(times.values()))
        rows = [{"contender": name, "ms": milliseconds(x), "ratio": ratio(x, first)} for name, x in times.items()]
        differences = [{"gradient_difference": relative(found, gradients[0])} for found in gradients]
        yield problem, [row | difference for row, difference in zip(rows, differences, strict=True)]


main = program(__doc__, "dense", measured, repeats=7, quick="small sizes, to see that it runs")


if __name__ == "__main__":
    main()
