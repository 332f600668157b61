"""Evaluations of f that a solver needs for a given error: ``python -m benchmarks.solvers``.

Each method solves each problem in float64 at tolerances from loose to tight. Its error is the root mean square over the
batch, over h and m together, at the end of the solve; its cost is the number of evaluations of f. The evaluations for
an error of 1e-3, 1e-5 and 1e-7 are interpolated between the runs that no cheaper run beats, on logarithmic scales.
The reference is a solve with nystrom8 which one with torchdiffeq's dopri8 must confirm.

Writes JSON with the machine in it, and a figure beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp

import hbnode
from benchmarks.harness import command, write
from benchmarks.problems import PROBLEMS, QUICK, Problem, geometric_mean
from tasks.common.files import write_figure

TARGETS = (1e-3, 1e-5, 1e-7)
ENOUGH = 1e-8  # a sweep ends at this error,
TOO_MANY = 4_000  # or at this many evaluations
TOLERANCES = [10 ** (-exponent / 2) for exponent in range(2, 25)]
STEPS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
NATIVE = ("nystrom4", "nystrom6", "nystrom8", "tsit5")
BASELINES = ("dopri5", "dopri5+land", "DOP853")
Run = dict[str, float]
Outcome = tuple[torch.Tensor, int]


def with_hbnode(problem: Problem, method: str, tol: float = 1e-5, steps: int | None = None) -> Outcome:
    """The end of a solve, (2, batch, ...), and its evaluations; ``+land`` behind a method's name asks for that."""
    name, _, land = method.partition("+")
    save: hbnode.solve.Save = "exact" if land else "interpolate"
    with torch.no_grad(), hbnode.count_nfe(problem.field) as nfe:
        h, m = hbnode.odeint(
            problem.field, problem.state, [0.0, problem.end], method=name, rtol=tol, atol=tol, steps=steps, save=save
        )
    return torch.stack([h[-1], m[-1]]), nfe.forward


def with_scipy(problem: Problem, method: str, tol: float) -> Outcome:
    """The same with SciPy, on the first-order system as one vector."""
    y0 = torch.stack(problem.state)

    @torch.no_grad()
    def derivative(t: float, y: np.ndarray) -> np.ndarray:
        h, m = torch.from_numpy(y).view_as(y0)
        return torch.stack(problem.field(torch.tensor(t, dtype=y0.dtype), (h, m))).flatten().numpy()

    solution = solve_ivp(derivative, (0.0, problem.end), y0.flatten().numpy(), method=method, rtol=tol, atol=tol)
    return torch.from_numpy(solution.y[:, -1].copy()).view_as(y0), solution.nfev


def reference(problem: Problem) -> torch.Tensor:
    """The solution at T, by two solvers that must agree."""
    ours, _ = with_hbnode(problem, "nystrom8", 1e-13)
    theirs, _ = with_hbnode(problem, "dopri8+land", 1e-12)
    difference = rms(ours - theirs)
    if difference > 1e-9:
        raise SystemExit(f"{problem.name}: nystrom8 and dopri8 differ by {difference:.1e}, so there is no reference")
    return ours


def rms(x: torch.Tensor) -> float:
    """Root mean square of all elements."""
    return x.square().mean().sqrt().item()


def sweep(solve: Callable[[Any], Outcome], settings: Iterable[Any], exact: torch.Tensor) -> list[Run]:
    """Runs with ever finer settings, until one is exact or expensive enough."""
    runs: list[Run] = []
    for setting in settings:
        try:
            end, evaluations = solve(setting)
        except hbnode.SolverError:  # a grid too coarse to stay finite, or a tolerance too tight
            continue
        runs.append({"setting": setting, "evaluations": evaluations, "error": rms(end - exact)})
        if runs[-1]["error"] < ENOUGH or evaluations > TOO_MANY:
            break
    return runs


def sweeps(problem: Problem, exact: torch.Tensor) -> tuple[dict[str, list[Run]], dict[str, list[Run]]]:
    """All methods on one problem: those that choose their steps, and those on fixed grids."""
    adaptive = {
        name: sweep(lambda tol, name=name: with_hbnode(problem, name, tol), TOLERANCES, exact)
        for name in (*NATIVE, "dopri5", "dopri5+land", "dopri8+land", "bosh3")
    }
    adaptive["DOP853"] = sweep(lambda tol: with_scipy(problem, "DOP853", tol), TOLERANCES, exact)
    fixed = {
        name: sweep(lambda n, name=name: with_hbnode(problem, name, steps=n), STEPS, exact)
        for name in ("nystrom4", "nystrom6", "nystrom8", "blanes_moan4", "leapfrog")
    }
    return adaptive, fixed


def front(runs: list[Run]) -> list[tuple[float, float]]:
    """(evaluations, error) of the runs that are more exact than every run as cheap."""
    kept: list[tuple[float, float]] = []
    for evaluations, error in sorted((run["evaluations"], run["error"]) for run in runs):
        if not kept or error < kept[-1][1]:
            kept.append((evaluations, error))
    return kept


def needed(runs: list[Run], target: float) -> float | None:
    """Evaluations for an error: interpolated, never extrapolated; None where the error was not reached."""
    points = front(runs)
    if not points or points[-1][1] > target:
        return None
    if points[0][1] <= target:
        return float(points[0][0])
    evaluations, errors = (np.log([point[i] for point in reversed(points)]) for i in (0, 1))
    return float(np.exp(np.interp(math.log(target), errors, evaluations)))


def row(name: str, target: float, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """What each adaptive method needs for an error, and the ratios of our best to the baselines."""
    counts = {method: needed(found, target) for method, found in runs.items()}
    best = min((counts[method] for method in NATIVE if counts[method] is not None), default=None)
    ratios = {other: best / counts[other] if best and counts[other] else None for other in BASELINES}
    return {"problem": name, "error": target, "evaluations": counts, "ratios": ratios}


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geometric means of the ratios over the problems, for each error and for all."""
    found = []
    for target in (*TARGETS, None):
        chosen = [row["ratios"] for row in rows if target in (None, row["error"])]
        values = {other: [ratios[other] for ratios in chosen if ratios[other]] for other in BASELINES}
        ratios = {other: geometric_mean(values[other]) for other in BASELINES}
        found.append({"error": target, "ratios": ratios, "cells": {other: len(values[other]) for other in BASELINES}})
    return found


def show(value: float | None, digits: str = ".0f") -> str:
    """A number, or that there is none."""
    return "n/a" if value is None else format(value, digits)


def table(problem: str, rows: list[dict[str, Any]], fixed: dict[str, list[Run]]) -> str:
    """Evaluations of all methods on one problem."""
    names = [*rows[0]["evaluations"], *(f"best/{other}" for other in BASELINES)]
    lines = [f"\n{problem}", "  error" + "".join(f"{name:>{len(name) + 2}}" for name in names)]
    for found in rows:
        cells = [show(count) for count in found["evaluations"].values()]
        cells += [show(ratio, ".2f") for ratio in found["ratios"].values()]
        padded = "".join(f"{cell:>{len(name) + 2}}" for name, cell in zip(names, cells, strict=True))
        lines.append(f"  {found['error']:.0e}{padded}")
    lines.append("  fixed" + "".join(f"{name:>{len(name) + 2}}" for name in fixed))
    for target in TARGETS:
        counts = "".join(f"{show(needed(runs, target)):>{len(name) + 2}}" for name, runs in fixed.items())
        lines.append(f"  {target:.0e}{counts}")
    return "\n".join(lines)


def summary(found: list[dict[str, Any]], problems: int) -> str:
    """The geometric means as a table, each with how many of its cells had a ratio."""
    lines = ["\nevaluations of our best adaptive method over those of others, geometric mean (cells)"]
    lines.append("  error" + "".join(f"{name:>18}" for name in BASELINES))
    for entry in found:
        label = "all" if entry["error"] is None else f"{entry['error']:.0e}"
        all_cells = problems * (len(TARGETS) if entry["error"] is None else 1)
        cells = (f"{show(entry['ratios'][name], '.3f')} ({entry['cells'][name]}/{all_cells})" for name in BASELINES)
        lines.append(f"  {label:<5}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


STYLES = {
    "nystrom4": ("C0", "o-"),
    "nystrom6": ("C2", "o-"),
    "nystrom8": ("C4", "o-"),
    "tsit5": ("C9", "o-"),
    "dopri5": ("C3", "x:"),
    "dopri5+land": ("C1", "x--"),
    "dopri8+land": ("C5", "x--"),
    "bosh3": ("0.6", "x:"),
    "DOP853": ("k", "+--"),
}


def draw(path: Path, problems: list[dict[str, Any]], machine: str) -> None:
    """Error against evaluations, one pair of axes for each problem."""
    from matplotlib.figure import Figure

    columns = min(3, len(problems))
    lines = math.ceil(len(problems) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.7 * lines + 0.9), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for ax, problem in zip(axes, problems, strict=False):
        for name, (color, style) in STYLES.items():
            points = [(run["evaluations"], run["error"]) for run in problem["adaptive"][name]]
            ax.loglog(*zip(*points, strict=True), style, color=color, label=name, markersize=4, linewidth=1.2)
        for target in TARGETS:
            ax.axhline(target, color="0.85", linewidth=0.8, zorder=0)
        ax.set(title=problem["name"], ylim=(1e-10, 10), xlim=(3, TOO_MANY), xlabel="evaluations of f")
        ax.title.set_fontsize(10)
    for ax in axes[len(problems) :]:
        ax.set_visible(False)
    figure.supylabel("RMS error of (h, m) at T")
    figure.suptitle(f"Error against evaluations at falling tolerances, float64, {machine}", fontsize=12)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(STYLES))
    write_figure(figure, path)


def main() -> None:
    """Solve, print a table per problem and the means, write JSON and the figure."""
    parser = command(__doc__, "solvers")
    parser.add_argument("--quick", action="store_true", help="three of the problems only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    problems, rows = [], []
    for make in QUICK if options.quick else PROBLEMS:
        problem = make().to(torch.float64)
        adaptive, fixed = sweeps(problem, reference(problem))
        found = [row(problem.name, target, adaptive) for target in TARGETS]
        problems.append({"name": problem.name, "adaptive": adaptive, "fixed": fixed})
        rows += found
        print(table(problem.name, found, fixed), flush=True)
    overall = means(rows)
    print(summary(overall, len(problems)))
    machine = write(options.out, {"means": overall, "rows": rows, "problems": problems})
    draw(options.out.with_suffix(".png"), problems, machine)


if __name__ == "__main__":
    main()
