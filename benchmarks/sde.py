"""The heavy-ball SDE with native methods and with torchsde's: ``python -m benchmarks.sde``.

Three tables. The strong error against the evaluations of f, all methods on the same Brownian paths, and the
evaluations to an error of 1e-3. The time of a step. The gradient against backpropagation through the same steps, with
the bytes that are kept for it.

torchsde's ``srk`` has two forms. With noise_type "additive", as HeavyBallSDE declares it, a step calls f three times;
with "diagonal", where the noise on h is 0, ten times.

Times are medians of processor time of runs that take turns in one process, on one thread. Writes JSON with the machine
in it, and a figure beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchsde
from torch import Tensor, nn

import hbnode
from benchmarks.gradients import Living, relative
from benchmarks.harness import command, interleaved, milliseconds, ratio, write
from hbnode.solve import BrownianIncrements
from hbnode.solve.sde import linear_part
from tasks.common.files import write_figure

SPAN, DAMPING, TEMPERATURE = 4.0, 1.0, 0.5
WANTED = 1e-3
AT_REST, RANDOM = "at rest in a well", "h, m ~ N(0, 1)"
STARTS = (AT_REST, RANDOM)
Row = dict[str, Any]


class Diagonal(nn.Module):
    """The same SDE as one with diagonal noise, which is 0 on h."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, sde: hbnode.HeavyBallSDE) -> None:
        super().__init__()
        self.sde, self.f = sde, sde.f

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """The diffusion of h and of m, side by side."""
        _, m = y.chunk(2, -1)
        return torch.cat([torch.zeros_like(m), self.sde.noise_scale(m)], -1)


class PathMotion(torchsde.BaseBrownian):
    """A Brownian motion for torchsde on the steps of a path, from the increments for "nystrom4".

    Arguments:
        noise: the increments.
        silent: columns of 0 in front, for the noise on h of :class:`Diagonal`.
    """

    def __init__(self, noise: BrownianIncrements, silent: int = 0) -> None:
        w, p = integrals(noise)[:2]
        self.w, self.p = (nn.functional.pad(x, (silent, 0)) for x in (w, p))
        self.size_of_step = float(noise.sizes[0])

    def __call__(self, ta: Tensor, tb: Tensor | None = None, return_U: bool = False, return_A: bool = False) -> Any:
        """The increment over a step, and its integral."""
        step = round(float(ta) / self.size_of_step)
        return (self.w[step], self.p[step]) if return_U else self.w[step]

    def __repr__(self) -> str:
        return f"PathMotion({len(self.w)} steps)"

    dtype = property(lambda self: self.w.dtype)
    device = property(lambda self: self.w.device)
    shape = property(lambda self: self.w.shape[1:])
    levy_area_approximation = "space-time"


def integrals(noise: BrownianIncrements) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each step of "nystrom4": W, its integral, and L and K of the Brownian bridge, (steps, ...)."""
    size = noise.sizes.view(-1, *[1] * (noise.normals.dim() - 2))
    variances = (1.0, 1 / 12, 1 / 720)
    w, bridge, skew = (
        x * (size * variance).sqrt() for x, variance in zip(noise.normals.unbind(1), variances, strict=True)
    )
    return w, size * (bridge + w / 2), bridge, skew


def with_flights(noise: BrownianIncrements, damping: float) -> dict[str, BrownianIncrements]:
    """The increments for "ubu" and "baoab", two steps in one, on the path of fine increments for "nystrom4".

    Between the ends of a step the path is taken for the polynomial that W, L and K determine. What that misses is far
    below the errors measured: the size of a step to the fourth power, times the noise.
    """
    size = noise.sizes.view(-1, *[1] * (noise.normals.dim() - 2))
    w, _, bridge, skew = integrals(noise)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    j = torch.zeros_like(w)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        path = node * w + 6 * node * (1 - node) * bridge + 120 * node * (1 - node) * (0.5 - node) * skew
        j += weight * size * torch.exp(-damping * size * (1 - node)) * path
    _, _, p, q, r = linear_part(torch.tensor(damping, dtype=torch.float64), size)
    first = (w - damping * j) / p
    second = (j - q * first) / r
    pairs = torch.stack([first, second], 1)
    sizes = 2 * noise.sizes[::2]
    ubu = BrownianIncrements("ubu", sizes, pairs.reshape(len(sizes), 4, *pairs.shape[2:]), damping)
    fine = BrownianIncrements("baoab", noise.sizes, first.unsqueeze(1), damping)
    return {"ubu": ubu, "baoab": fine.coarser()}


def double_well() -> hbnode.HeavyBallSDE:
    """The force of F = h⁴/4 - h²/2."""
    options = {"damping": DAMPING, "temperature": TEMPERATURE, "learn_damping": False}
    return hbnode.HeavyBallSDE(lambda h: h - h**3, **options)


def levels(noise: BrownianIncrements, most: int) -> Iterator[BrownianIncrements]:
    """The noise of ever longer steps, from at most ``most`` steps on, down to four."""
    while len(noise.sizes) >= 4:
        if len(noise.sizes) <= most:
            yield noise
        noise = noise.coarser()


def counted(sde: hbnode.HeavyBallSDE, solve: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """A solution and the number of calls of f that it took."""
    calls = 0
    func = sde.func

    def counting(h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return func(h)

    sde.func = counting
    try:
        return solve(), calls
    finally:
        sde.func = func


@torch.no_grad()
def strong(start: str, paths: int, fine: int) -> list[Row]:
    """Root mean square errors of h(T) on the same paths."""
    sde = double_well()
    generator = torch.Generator().manual_seed(0)
    h, m = torch.randn(2, paths, 1, dtype=torch.float64, generator=generator)
    if start == AT_REST:
        h, m = torch.ones_like(h), torch.zeros_like(m)
    t = torch.tensor([0.0, SPAN], dtype=torch.float64)
    path = BrownianIncrements.draw(sde, h, t, method="nystrom4", dt=SPAN / fine, seed=1)
    exact = hbnode.sdeint(sde, (h, m), t, method="nystrom4", dt=SPAN / fine, noise=path)[0][-1]
    rows: list[Row] = []

    def measure(name: str, steps: int, solve: Callable[[], Tensor]) -> None:
        end, calls = counted(sde, solve)
        error = (end - exact).square().mean().sqrt().item()
        rows.append({"start": start, "method": name, "steps": steps, "evaluations": calls, "rms": error})

    for name, finest in {"nystrom4": path, **with_flights(path, DAMPING)}.items():
        for noise in levels(finest, fine // 8):
            options = {"method": name, "dt": float(noise.sizes[0]), "noise": noise}
            measure(name, len(noise.sizes), lambda options=options: hbnode.sdeint(sde, (h, m), t, **options)[0][-1])
    y = torch.cat([h, m], -1)
    forms = {"torchsde euler": sde, "torchsde srk": sde, "torchsde srk, diagonal": Diagonal(sde)}
    for name, form in forms.items():
        for noise in levels(path, fine // 8):
            motion = PathMotion(noise, silent=int(isinstance(form, Diagonal)))
            options = {"method": name.split()[1].strip(","), "dt": float(noise.sizes[0]), "bm": motion}
            solve = partial(torchsde.sdeint, form, y, t, **options)
            measure(name, len(noise.sizes), lambda solve=solve: solve()[-1, :, :1])
    return rows


def to_reach(rows: list[Row]) -> list[Row]:
    """Evaluations to the wanted error, interpolated between steps, and the order seen there."""
    found: list[Row] = []
    starts = {row["start"] for row in rows}
    if len(starts) > 1:
        return [row for start in STARTS for row in to_reach([row for row in rows if row["start"] == start])]
    for name in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row for row in rows if row["method"] == name), key=lambda row: row["steps"])
        row: Row = {"start": own[0]["start"], "method": name}
        for coarse, fine in pairwise(own):
            if coarse["rms"] > WANTED >= fine["rms"]:
                order = math.log(coarse["rms"] / fine["rms"]) / math.log(fine["steps"] / coarse["steps"])
                share = math.log(coarse["rms"] / WANTED) / math.log(coarse["rms"] / fine["rms"])
                row["evaluations"] = coarse["evaluations"] * (fine["evaluations"] / coarse["evaluations"]) ** share
                row["order"] = order
        found.append(row)
    reached = {row["method"]: row.get("evaluations") for row in found}
    for row in found:
        for rival, column in (("torchsde srk", "srk_over_it"), ("torchsde srk, diagonal", "diagonal_srk_over_it")):
            if row.get("evaluations") and reached.get(rival):
                row[column] = reached[rival] / row["evaluations"]
    return found


def network(dim: int, hidden: int) -> hbnode.HeavyBallSDE:
    """A network of tanh as f, of two hidden layers; without hidden units, h - h³."""
    torch.manual_seed(0)
    func = hbnode.nn.MLP(dim, [hidden, hidden], dim, activation=nn.Tanh) if hidden else lambda h: h - h**3
    return hbnode.HeavyBallSDE(func, damping=0.5, temperature=TEMPERATURE)


def solve(sde: hbnode.HeavyBallSDE, h: Tensor, steps: int, training: bool, **options: Any) -> None:
    """A solve to T = 1, with its backward pass in training."""
    with torch.set_grad_enabled(training):
        end, _ = hbnode.sdeint(sde, (h, torch.zeros_like(h)), [0.0, 1.0], dt=1.0 / steps, **options)
    if training:
        end[-1].square().mean().backward()


EULER = "torchsde euler"
SOLVERS: dict[str, Row] = {
    EULER: {"method": "euler"},
    "torchsde srk": {"method": "srk"},
    "ubu": {"method": "ubu"},
    "baoab": {"method": "baoab"},
    "nystrom4": {"method": "nystrom4"},
}
TRAINING: dict[str, Row] = SOLVERS | {
    "ubu checkpoint": {"method": "ubu", "gradient": "checkpoint"},
    "ubu reversible": {"method": "ubu", "gradient": "reversible"},
    "torchsde euler adjoint": {"method": "euler", "gradient": "adjoint"},
}


def times(repeats: int, steps: int) -> list[Row]:
    """Milliseconds of a step, over those of torchsde's Euler, in evaluation and in training.

    torchsde's Brownian motion is told the step, as hbnode.sdeint does it; without, its steps take longer.
    """
    rows = []
    for batch, dim, hidden in ((128, 32, 0), (128, 32, 64), (1024, 2, 32)):
        sde, h = network(dim, hidden), torch.randn(batch, dim)
        for training in (False, True):
            solvers = TRAINING if training else SOLVERS
            solves = {name: partial(solve, sde, h, steps, training, **options) for name, options in solvers.items()}
            found = interleaved(solves, repeats)
            for name, mine in found.items():
                row = {
                    "f": "tanh" if hidden else "cubic",
                    "batch": batch,
                    "dim": dim,
                    "pass": "training" if training else "evaluation",
                    "method": name,
                }
                rows.append(row | {"ms": milliseconds(mine) / steps, "euler_over_it": ratio(found[EULER], mine)})
    return rows


def gradients() -> list[Row]:
    """Gradients in float32 against backpropagation through the same steps with the same noise, γT = 4."""
    torch.manual_seed(0)
    net = hbnode.nn.MLP(8, [32], 8, activation=nn.Tanh)
    sde = hbnode.HeavyBallSDE(net, damping=1.0, max_damping=2.0, temperature=TEMPERATURE, learn_temperature=True)
    state = tuple(torch.randn(64, 8).requires_grad_() for _ in range(2))
    leaves = [*state, *sde.parameters()]

    def gradient(steps: int, **options: Any) -> tuple[Tensor, int]:
        with Living(leaves) as living:
            h, m = hbnode.sdeint(sde, state, [0.0, SPAN], dt=SPAN / steps, seed=0, **options)
            loss = h[-1].square().mean() + m[-1].square().mean()
            kept = living.size()
        return torch.cat([x.reshape(-1) for x in torch.autograd.grad(loss, leaves)]), kept

    rows = []
    for steps in (50, 400):
        for method, others in (
            ("ubu", ("checkpoint", "reversible")),
            ("baoab", ("checkpoint", "reversible")),
            ("nystrom4", ("checkpoint",)),
            ("euler", ("adjoint",)),
            ("reversible_heun", ("adjoint",)),
        ):
            exact, kept = gradient(steps, method=method)
            base = {"steps": steps, "method": method}
            rows.append(base | {"gradient": "direct", "error": 0.0, "MiB": kept / 2**20})
            for other in others:
                found, kept = gradient(steps, method=method, gradient=other)
                rows.append(base | {"gradient": other, "error": relative(found, exact), "MiB": kept / 2**20})
    return rows


COLUMNS: dict[str, dict[str, str]] = {
    "strong error": {"start": "<17", "method": "<22", "steps": "d", "evaluations": "d", "rms": ".1e"},
    "evaluations to 1e-3": {
        "start": "<17",
        "method": "<22",
        "evaluations": ".0f",
        "order": ".1f",
        "srk_over_it": ".1f",
        "diagonal_srk_over_it": ".1f",
    },
    "time of a step": {
        "f": "<5",
        "batch": "d",
        "dim": "d",
        "pass": "<10",
        "method": "<22",
        "ms": ".3f",
        "euler_over_it": ".1f",
    },
    "gradients": {"steps": "d", "method": "<15", "gradient": "<10", "error": ".1e", "MiB": ".3f"},
}


def table(section: str, rows: list[Row]) -> str:
    """A section's rows under its column names."""
    columns = COLUMNS[section]
    cells = [
        list(columns),
        *([format(row[c], form) if c in row else "n/a" for c, form in columns.items()] for row in rows),
    ]
    widths = [max(len(cell.strip()) for cell in column) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell.strip():{'<' if form.startswith('<') else '>'}{width}}"
            for cell, form, width in zip(line, columns.values(), widths, strict=True)
        ).rstrip()
        for line in cells
    )


COLORS = {EULER: "0.7", "torchsde srk": "0.1", "torchsde srk, diagonal": "0.45"}
GREYS = dict.fromkeys(COLORS, "o--")


def draw(path: Path, rows: list[Row], machine: str) -> None:
    """The strong error against the evaluations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    ax = figure.subplots()
    for name in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row["evaluations"], row["rms"]) for row in rows if row["method"] == name)
        own = [pair for pair in own if pair[1] < 1]  # a step that is too long diverges
        ax.loglog(*zip(*own, strict=True), GREYS.get(name, "s-"), color=COLORS.get(name), label=name, markersize=4)
    ax.axhline(WANTED, color="0.8", linewidth=0.8, zorder=0)
    ax.set(xlabel="evaluations of f", ylabel="root mean square error of h(T)")
    ax.set_title(
        f"Double well from rest, γ = {DAMPING:g}, η = {TEMPERATURE:g}, T = {SPAN:g}, the same paths\n{machine}",
        fontsize=9,
    )
    ax.legend(fontsize=8)
    write_figure(figure, path)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, write JSON and the figure."""
    parser = command(__doc__, "sde")
    parser.add_argument("--quick", action="store_true", help="few paths and steps")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    paths, fine, steps = (50, 256, 4) if options.quick else (1000, 4096, 100)
    report["strong error"] = [row for start in STARTS for row in strong(start, paths, fine)]
    report["evaluations to 1e-3"] = to_reach(report["strong error"])
    report["time of a step"] = times(options.repeats, steps)
    report["gradients"] = gradients()
    for section in COLUMNS:
        print(f"{section}\n{table(section, report[section])}\n", flush=True)
    machine = write(options.out, report)
    shown = [row for row in report["strong error"] if row["start"] == AT_REST]
    draw(options.out.with_suffix(".png"), shown, machine)


if __name__ == "__main__":
    main()
