"""Time and memory of a gradient at equal accuracy: ``python -m benchmarks.gradients``.

Four tables. Training steps of hbnode and other libraries in float32, each at the loosest tolerance at which the
relative error of its gradient is at most 1e-4. The tensors that a forward pass keeps for its backward pass. The time of
a solve over that of its evaluations of f alone. How well reversible methods come back to where they started.

Times are medians of runs that take turns in one process, on one thread. Writes JSON with the machine in it, and a
figure beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import hbnode
from benchmarks.contenders import (
    Maker,
    Solve,
    Step,
    TorchStep,
    native,
    of,
    with_diffrax,
    with_torchdiffeq,
    with_torchode,
)
from benchmarks.harness import Options, Row, interleaved, milliseconds, panels, program, ratio, relative
from benchmarks.problems import Problem, network
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.compiled import STABLE
from tasks.studies.exactness import Living

SETTINGS: dict[str, Callable[[], Problem]] = {
    "A": lambda: network(32, 3, 1.0, 0.5),
    "B": lambda: network(5, 3, 1.0, 0.05),
    "C": lambda: network(32, 3, 10.0, 0.5),
}
WANTED = 1e-4
TOLERANCES = [digit * 10.0**-exponent for exponent in range(1, 9) for digit in (1, 0.3)][:-1]
NYSTROM = ("nystrom4", "nystrom6", "nystrom8")
BASELINE = "odeint_adjoint dopri5, full norm"
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}


@dataclass
class Entry:
    """A contender's method, ready to be timed.

    Attributes:
        method: what it solves with.
        tol: the tolerance chosen.
        error: of its gradient, relative.
        step: the training step.
    """

    method: str
    tol: float
    error: float
    step: Step


def contenders() -> dict[str, dict[str, Maker]]:
    """Of each contender the methods of which the fastest is taken."""
    orders = ("dopri5", "tsit5")
    return {
        **{f"hbnode {how}": {name: of(native(name, how)) for name in NYSTROM} for how in ("checkpoint", "direct")},
        "torchdiffeq odeint": {"dopri5": of(with_torchdiffeq(None))},
        BASELINE: {"dopri5": of(with_torchdiffeq("full"))},
        "odeint_adjoint dopri5, seminorm": {"dopri5": of(with_torchdiffeq("seminorm"))},
        "torchode AutoDiffAdjoint": {name: of(with_torchode(name)) for name in orders},
        "diffrax checkpoint, jit": {name: with_diffrax(name, "RecursiveCheckpointAdjoint") for name in orders},
        "diffrax backsolve, jit": {name: with_diffrax(name, "BacksolveAdjoint") for name in orders},
    }


def reference(problem: Problem) -> Tensor:
    """The gradient in float64, by two solvers that must agree."""
    problem = problem.to(torch.float64)
    ours = TorchStep(problem, native("nystrom8", "direct"), 1e-12).gradient()

    theirs = TorchStep(problem, native("dopri8", "direct", save="exact"), 1e-12).gradient()
    if relative(theirs, ours) > 1e-7:
        raise SystemExit(f"{problem.name}: nystrom8 and dopri8 give other gradients ({relative(theirs, ours):.1e})")
    return ours


def tuned(method: str, make: Callable[[float], Step], exact: Tensor) -> Entry | None:
    """The step at the loosest tolerance whose gradient is exact enough; None if there is none."""
    for tol in TOLERANCES:
        step = make(tol)
        try:
            error = relative(step.gradient(), exact)
        except (RuntimeError, AssertionError):  # too many steps, or too small ones
            return None
        if error <= WANTED:
            return Entry(method, tol, error, step)
    return None


def fastest(entries: list[Entry]) -> Entry | None:
    """Return the entry with the smallest median time."""
    times = interleaved({entry.method: entry.step for entry in entries}, 15)
    return min(entries, key=lambda entry: statistics.median(times[entry.method]), default=None)


def chosen(problem: Problem, exact: Tensor, compiled: bool) -> dict[str, Entry | None]:
    """The best method of each contender at its tolerance; hbnode also compiled, as it was chosen without."""
    found = {}
    for name, methods in contenders().items():
        entries = [tuned(method, make(problem), exact) for method, make in methods.items()]
        entry = found[name] = fastest([entry for entry in entries if entry is not None])
        if entry and name == "hbnode checkpoint" and compiled:
            step = TorchStep(problem, native(entry.method, "checkpoint", compile=True), entry.tol)
            for _ in range(STABLE + 2):  # then a whole solve is one graph
                step()
            found[f"{name}, compiled"] = Entry(entry.method, entry.tol, relative(step.gradient(), exact), step)
    return found


def training(setting: str, repeats: int, compiled: bool) -> list[Row]:
    """Return the times of a training step of all libraries on one setting."""
    problem = SETTINGS[setting]()
    found = chosen(problem, reference(problem), compiled)
    times = interleaved({name: entry.step for name, entry in found.items() if entry}, repeats)
    rows = []
    for name, entry in found.items():
        row: Row = {"setting": setting, "problem": problem.name, "contender": name}
        if entry is not None:
            source = found[name.removesuffix(", compiled")]  # a hook would recompile
            forward, backward = source.step.evaluations()
            row |= {"method": entry.method, "tolerance": entry.tol, "gradient_error": entry.error}
            row |= {"forward": forward, "backward": backward, "ms": milliseconds(times[name])}
            row["ratio"] = ratio(times[name], times[BASELINE]) if BASELINE in times else None
        rows.append(row)
    return rows


def kept_bytes(problem: Problem, solve: Solve) -> int:
    """Bytes of the tensors made in a forward pass that are alive after it, the outputs included."""
    step = TorchStep(problem, solve, 1e-5)
    with Living([*step.leaves]) as living:
        loss = step.forward()
        size = living.size()
    loss.backward()
    return size


def on_grid(method: str, gradient: str, steps: int) -> Solve:
    """A solve to T = 1 by equal steps; with torchdiffeq where the method is its own."""
    if method == "rk4":
        return with_torchdiffeq(None, method, {"step_size": 1 / steps})
    return native(method, Checkpoint(keep_bytes=0) if gradient == RECOMPUTED else gradient, steps=steps)


RECOMPUTED = "checkpoint, keep_bytes=0"  # as beyond the 64 MiB of graph that it keeps
MEMORY = (
    *((method, gradient) for method in NYSTROM for gradient in (RECOMPUTED, "checkpoint", "direct")),
    *(("blanes_moan4", gradient) for gradient in ("reversible", RECOMPUTED, "checkpoint", "direct")),
    ("rk4", "torchdiffeq odeint"),
)


def memory() -> list[Row]:
    """Return what each gradient method stores between the passes for 16 and 64 steps, setting A in float32."""
    problem = SETTINGS["A"]()
    rows = []
    for method, gradient in MEMORY:
        few, many = (kept_bytes(problem, on_grid(method, gradient, steps)) / 2**20 for steps in (16, 64))
        rows.append({"method": method, "gradient": gradient, "MiB_16": few, "MiB_64": many, "growth": many / few})
    direct = {row["method"]: row["MiB_64"] for row in rows if row["gradient"] == "direct"}
    for row in rows:
        row["over_direct_64"] = row["MiB_64"] / direct[row["method"]] if row["method"] in direct else None
    return rows


@torch.no_grad()
def overhead(repeats: int) -> list[Row]:
    """Return the time of a solve relative to as many calls of f, setting A."""
    rows = []
    for dtype in (torch.float32, torch.float64):
        problem = SETTINGS["A"]().to(dtype)
        for method in NYSTROM:
            for grid, steps in (("16 steps", 16), ("rtol 1e-5", None)):
                solve = partial(
                    hbnode.odeint, problem.field, problem.state, [0.0, problem.end], method=method, steps=steps
                )
                with hbnode.count_nfe(problem.field) as nfe:
                    solve()
                bare = partial(call, problem.field.func, problem.x, nfe.forward)
                ours, theirs = interleaved({"solve": solve, "bare": bare}, repeats).values()
                row = {"method": method, "grid": grid, "dtype": str(dtype).removeprefix("torch.")}
                row |= {"evaluations": nfe.forward, "ms": milliseconds(ours), "ratio": ratio(ours, theirs)}
                rows.append(row)
    return rows


def call(func: Callable[[Tensor], Tensor], x: Tensor, times: int) -> None:
    """Call f ``times`` times."""
    for _ in range(times):
        func(x)


@torch.no_grad()
def round_trip() -> list[Row]:
    """How far from its start a solve to T = 1 and back with a symmetric method ends, relative, float64."""
    problem = SETTINGS["A"]().to(torch.float64)
    start = torch.stack(problem.state)
    rows = []
    for method in ("leapfrog", "blanes_moan4"):
        state = problem.state
        for times in ([0.0, problem.end], [problem.end, 0.0]):
            h, m = hbnode.odeint(problem.field, state, times, method=method, steps=64)
            state = h[-1], m[-1]
        rows.append({"method": method, "steps": 64, "relative_error": relative(torch.stack(state), start)})
    return rows


def draw(report: dict[str, list[Row]], machine: str) -> Any:
    """The times of a training step, a panel of bars for each setting, with their ratios to the baseline's."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    rows = report["training"]
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure, axes = panels((3.4 + 3.6 * len(settings), 4.4), columns=len(settings), sharey=True)
    for ax, setting in zip(axes, settings, strict=True):
        own = [row for row in rows if row["setting"] == setting]
        times = [row["ms"] for row in own if "ms" in row] or [1.0]
        left, right = min(times) / 2, 6 * max(times)
        for place, row in enumerate(own):
            if row["contender"] == BASELINE and "ms" in row:
                ax.axvline(row["ms"], color="0.3", linewidth=0.8, zorder=0)
            length, color = row.get("ms", left), "C0" if row["contender"].startswith("hbnode") else "0.6"
            ax.barh(place, length, color=color)
            over = f" (×{row['ratio']:.2f})" if row.get("ratio") else ""
            label = f"{length:.1f} ms{over}" if "ms" in row else "not reached"
            ax.text(length * 1.06, place, label, va="center", fontsize=8, bbox=WHITE)
        ax.set(xscale="log", xlim=(left, right), xlabel="milliseconds")
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_title(f"{setting}: {own[0]['problem']}", fontsize=9)
        ax.set_yticks(range(len(own)), [row["contender"] for row in own])
    axes[0].invert_yaxis()
    what = f"A training step whose gradient is exact to {WANTED:.0e}, float32\n×: over {BASELINE}"
    figure.suptitle(f"{what}\n1 thread, {machine}", fontsize=10)
    return figure


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield all tables."""
    for setting in "A" if options.quick else SETTINGS:
        yield "training", training(setting, options.repeats, compiled=not options.quick)
    yield "memory", memory()
    yield "overhead", overhead(options.repeats)
    yield "round trip", round_trip()


main = program(__doc__, "gradients", measured, draw=draw, repeats=31, quick="setting A only, without compile=True")


if __name__ == "__main__":
    main()
