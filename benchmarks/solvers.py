"""Number of evaluations of f that a solver needs for a given error: ``python -m benchmarks.solvers``.

Each method solves each problem in float64 at tolerances from loose to tight. Its error is the root mean square of the
errors of h and m over the batch, at the end of the solve; its cost is the number of evaluations of f. The evaluations
for an error of 1e-3, 1e-5 and 1e-7 are interpolated on logarithmic scales. Runs that are less accurate than a cheaper
run are left out. The exact solution is computed by nystrom8 and checked with torchdiffeq's dopri8.

Writes a JSON file, which includes a description of the machine, and a figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp

import hbnode
from benchmarks.harness import Options, Row, panels, program
from benchmarks.problems import PROBLEMS, QUICK, Problem

TARGETS = (1e-3, 1e-5, 1e-7)
ENOUGH = 1e-8  # a sweep over tolerances ends at this error,
TOO_MANY = 4_000  # or at this many evaluations
TOLERANCES = [10 ** (-exponent / 2) for exponent in range(2, 25)]
STEPS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]
NATIVE = ("nystrom4", "nystrom6", "nystrom8", "tsit5")
ADAPTIVE = (*NATIVE, "dopri5", "dopri5+land", "dopri8+land", "bosh3")
FIXED = ("nystrom4", "nystrom6", "nystrom8", "blanes_moan4", "leapfrog")
BASELINES = ("dopri5", "dopri5+land", "DOP853")
Run = dict[str, float]
Outcome = tuple[torch.Tensor, int]


def with_hbnode(problem: Problem, method: str, tol: float = 1e-5, **options: Any) -> Outcome:
    """Return the end state of a solve, (2, batch, ...), and its evaluations.

    A method name that ends in ``+land`` makes steps end exactly at the output times.
    """
    name, _, land = method.partition("+")
    options |= {"method": name, "rtol": tol, "atol": tol, "save": "exact" if land else "interpolate"}
    with torch.no_grad(), hbnode.count_nfe(problem.field) as nfe:
        states = hbnode.odeint(problem.field, problem.state, [0.0, problem.end], **options)
    return torch.stack([part[-1] for part in states]), nfe.forward


def with_scipy(problem: Problem, method: str, tol: float) -> Outcome:
    """Return the end state and the evaluations of a solve with SciPy, as a first-order system of one vector."""
    y0 = torch.stack(problem.state)

    @torch.no_grad()
    def derivative(t: float, y: np.ndarray) -> np.ndarray:
        h, m = torch.from_numpy(y).view_as(y0)
        return torch.stack(problem.field(torch.tensor(t, dtype=y0.dtype), (h, m))).flatten().numpy()

    solution = solve_ivp(derivative, (0.0, problem.end), y0.flatten().numpy(), method=method, rtol=tol, atol=tol)
    return torch.from_numpy(solution.y[:, -1].copy()).view_as(y0), solution.nfev


def reference(problem: Problem) -> torch.Tensor:
    """Return the solution at T, computed by two solvers that must agree."""
    ours, _ = with_hbnode(problem, "nystrom8", 1e-13)
    theirs, _ = with_hbnode(problem, "dopri8+land", 1e-12)
    difference = rms(ours - theirs)
    if difference > 1e-9:
        raise SystemExit(f"{problem.name}: nystrom8 and dopri8 differ by {difference:.1e}, so there is no reference")
    return ours


def rms(x: torch.Tensor) -> float:
    """Return the root mean square of all elements."""
    return x.square().mean().sqrt().item()


def sweep(
    solve: Callable[[Any], Outcome],
    settings: Iterable[Any],
    exact: torch.Tensor,
    enough: float = ENOUGH,
    too_many: float = TOO_MANY,
) -> list[Run]:
    """Return runs with finer and finer settings, until one is accurate or expensive enough."""
    runs: list[Run] = []
    for setting in settings:
        try:
            end, evaluations = solve(setting)
        except hbnode.errors.MaxStepsError:  # tighter tolerances would fail too
            break
        except hbnode.SolverError:  # the steps are too large, or the tolerance is too small
            continue
        runs.append({"setting": setting, "evaluations": evaluations, "error": rms(end - exact)})
        if runs[-1]["error"] < enough or evaluations > too_many:
            break
    return runs


def sweeps(problem: Problem, exact: torch.Tensor) -> tuple[dict[str, list[Run]], dict[str, list[Run]]]:
    """Return the runs of all methods on one problem: adaptive methods, and methods with fixed steps."""
    adaptive = {name: partial(with_hbnode, problem, name) for name in ADAPTIVE}
    adaptive["DOP853"] = partial(with_scipy, problem, "DOP853")
    fixed = {name: lambda n, name=name: with_hbnode(problem, name, steps=n) for name in FIXED}
    return tuple(
        {name: sweep(solve, settings, exact) for name, solve in solves.items()}
        for solves, settings in ((adaptive, TOLERANCES), (fixed, STEPS))
    )


def front(runs: list[Run]) -> list[tuple[float, float]]:
    """Return (evaluations, error) of the runs that are more accurate than all runs with at most as many evaluations."""
    kept: list[tuple[float, float]] = []
    for evaluations, error in sorted((each["evaluations"], each["error"]) for each in runs):
        if not kept or error < kept[-1][1]:
            kept.append((evaluations, error))
    return kept


def needed(runs: list[Run], target: float) -> float | None:
    """Return the interpolated number of evaluations for an error, or None if no run reached it."""
    points = front(runs)
    if not points or points[-1][1] > target:
        return None
    evaluations, errors = (np.log([point[i] for point in reversed(points)]) for i in (0, 1))
    return float(np.exp(np.interp(math.log(target), errors, evaluations)))


def row(name: str, target: float, runs: dict[str, list[Run]]) -> Row:
    """Return what each adaptive method needs for an error, and the ratios of hbnode's best method to the baselines."""
    counts = {method: needed(found, target) for method, found in runs.items()}
    best = min((counts[method] for method in NATIVE if counts[method] is not None), default=None)
    ratios = {other: best / counts[other] if best and counts[other] else None for other in BASELINES}
    return {"problem": name, "error": target, "evaluations": counts, "ratios": ratios}


def means(rows: list[Row]) -> Iterator[Row]:
    """Yield geometric means of the ratios over the problems, for each error and for all errors."""
    for target in (*TARGETS, None):
        chosen = [row["ratios"] for row in rows if target in (None, row["error"])]
        values = {other: [ratios[other] for ratios in chosen if ratios[other]] for other in BASELINES}
        ratios = {other: float(np.exp(np.mean(np.log(found)))) if found else None for other, found in values.items()}
        yield {"error": target, "ratios": ratios, "cells": {other: len(found) for other, found in values.items()}}


def shown(row: Row) -> Row:
    """Return the columns of a row that tables show."""
    if "adaptive" in row:
        return {"problem": row["name"]}
    cells = {f"cells, {other}": count for other, count in row.get("cells", {}).items()}
    ratios = {f"best/{other}": ratio for other, ratio in row.get("ratios", {}).items()}
    return {"error": row["error"] or "all"} | row.get("evaluations", {}) | ratios | cells


def draw(report: dict[str, Any], machine: str) -> Any:
    """Draw error against evaluations, with a panel for each problem."""
    problems = report["problems"]
    columns = min(3, len(problems))
    lines = math.ceil(len(problems) / columns)
    figure, axes = panels((4.6 * columns, 3.7 * lines + 0.9), lines, columns)
    for ax, problem in zip(axes, problems, strict=False):
        for name, runs in problem["adaptive"].items():
            points = [(each["evaluations"], each["error"]) for each in runs]
            style = "o-" if name in NATIVE else "x--"
            ax.loglog(*zip(*points, strict=True), style, label=name, markersize=4, linewidth=1.2)
        for target in TARGETS:
            ax.axhline(target, color="0.85", linewidth=0.8, zorder=0)
        ax.set(ylim=(1e-10, 10), xlim=(3, TOO_MANY), xlabel="evaluations of f")
        ax.set_title(problem["name"], fontsize=10)
    for ax in axes[len(problems) :]:
        ax.set_visible(False)
    figure.supylabel("RMS error of (h, m) at T")
    figure.suptitle(f"Error against evaluations at falling tolerances, float64, {machine}", fontsize=12)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(ADAPTIVE) + 1)
    return figure


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield the evaluations on each problem with all runs, and then the means."""
    rows: list[Row] = []
    for make in QUICK if options.quick else PROBLEMS:
        problem = make().to(torch.float64)
        adaptive, fixed = sweeps(problem, reference(problem))
        found = [row(problem.name, target, adaptive) for target in TARGETS]
        rows += found
        yield "problems", [{"name": problem.name, "adaptive": adaptive, "fixed": fixed}]
        yield "rows", found
        counts = {target: {name: needed(runs, target) for name, runs in fixed.items()} for target in TARGETS}
        yield "fixed", [{"problem": problem.name, "error": t, "evaluations": found} for t, found in counts.items()]
    yield "means", list(means(rows))


main = program(__doc__, "solvers", measured, shown, draw, quick="three of the problems only")


if __name__ == "__main__":
    main()
