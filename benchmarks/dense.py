"""Many output times: a training step of ours over one of torchdiffeq's, at equal tolerance.

The fields are those of torchdiffeq's own examples: the network of ``examples/latent_ode.py`` (4 -> 20 -> 20 -> 4, ELU),
as a NODE and as the force of a heavy ball, from 1,000 starts to 100 times; and the cubic system of
``examples/ode_demo.py``, y' = y^3 A, from one start to 1,000 times in [0, 25]. A training step is forward, mean square
of all outputs, backward. The contenders take turns; a ratio is the median of the rounds' ratios, in time of the
processor, which other processes disturb less than that of the wall. Writes JSON with the machine in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torchdiffeq
from torch import Tensor, nn

import hbnode
from benchmarks.harness import command, interleaved, milliseconds, ratio, write
from benchmarks.overhead import Stacked

TOLERANCE = 1e-5
Step = Callable[[], Tensor]


class Cubic(nn.Module):
    """The system that torchdiffeq's demo fits: y' = y^3 A."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        """The derivative."""
        return y**3 @ self.a


class Latent(nn.Module):
    """The field of torchdiffeq's latent ODE."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 20), nn.ELU(), nn.Linear(20, 20), nn.ELU(), nn.Linear(20, 4))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        """The derivative."""
        return self.layers(y)


def contenders(field: nn.Module, y0: Tensor | tuple[Tensor, ...], t: Tensor) -> dict[str, Step]:
    """A training step with torchdiffeq and with each of our ways to the output times; each returns its gradient."""

    def ours(save: hbnode.solve.Save, gradient: hbnode.solve.Gradient) -> Tensor:
        y = hbnode.odeint(field, y0, t, rtol=TOLERANCE, atol=TOLERANCE, gradient=gradient, save=save)
        return y if isinstance(y, Tensor) else torch.stack(y, 1)

    def theirs() -> Tensor:
        if isinstance(y0, Tensor):
            return torchdiffeq.odeint(field, y0, t, rtol=TOLERANCE, atol=TOLERANCE)
        return torchdiffeq.odeint(Stacked(field), torch.stack(y0), t, rtol=TOLERANCE, atol=TOLERANCE)

    def step(solve: Callable[[], Tensor]) -> Step:
        def train() -> Tensor:
            field.zero_grad()
            solve().square().mean().backward()
            return torch.cat([p.grad.flatten() for p in field.parameters()])

        return train

    return {
        "torchdiffeq odeint, dopri5": step(theirs),
        "hbnode": step(lambda: ours("interpolate", "checkpoint")),
        "hbnode direct": step(lambda: ours("interpolate", "direct")),
        "hbnode onto the times": step(lambda: ours("exact", "checkpoint")),
    }


def problems(batch: int, outputs: int, many: int) -> dict[str, dict[str, Step]]:
    """The contenders of each problem."""
    torch.manual_seed(0)
    x, t = torch.randn(batch, 4), torch.linspace(0.0, 5.0, outputs)
    ball = hbnode.HBNODE(Latent(), damping=0.5)
    return {
        f"NODE, {batch} x 4, {outputs} times": contenders(Latent(), x, t),
        f"heavy ball, {batch} x 4, {outputs} times": contenders(ball, (x, torch.zeros_like(x)), t),
        f"cubic system, {many} times": contenders(Cubic(), torch.tensor([[2.0, 0.0]]), torch.linspace(0.0, 25.0, many)),
    }


def measured(steps: dict[str, Step], repeats: int) -> list[dict]:
    """A row for each contender."""
    gradients = {name: step() for name, step in steps.items()}
    times = interleaved(steps, repeats, warm=0)
    baseline, *_ = steps
    reference = gradients[baseline]
    return [
        {
            "contender": name,
            "ms": milliseconds(times[name]),
            "ratio": ratio(times[name], times[baseline]),
            "gradient_difference": float((gradients[name] - reference).norm() / reference.norm()),
        }
        for name in steps
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Time, print a table for each problem, write JSON."""
    parser = command(__doc__, "dense")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = (4, 10, 20) if options.quick else (1000, 100, 1000)
    report: dict = {}
    for problem, steps in problems(*sizes).items():
        report[problem] = measured(steps, options.repeats)
        print(f"{problem}\n{'contender':<28} {'ms':>8} {'ratio':>7} {'gradient difference':>20}")
        for row in report[problem]:
            print(f"{row['contender']:<28} {row['ms']:8.1f} {row['ratio']:7.3f} {row['gradient_difference']:20.1e}")
    write(options.out, report)


if __name__ == "__main__":
    main()
