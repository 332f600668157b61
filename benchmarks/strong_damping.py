"""Strong damping: evaluations of f to reach an error, h'' + γh' = f(h) with a network f of 8 dimensions.

γ is 1 with T = 5, 30 and 300 with T = 2γ. The start is m = f/γ, where a strongly damped ball moves already, m = 0, or a
fast m of standard deviation 5. Tolerances are swept, in float64, and evaluations are interpolated along the sweep. The
reference is an implicit method of scipy's (Radau) where γ > 1, else nystrom8. A method that takes more than 5,000 steps
gives up. Prints a table and writes JSON with the machine in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import hbnode
from benchmarks.harness import Options, Row, program
from benchmarks.problems import Problem, tanh_network
from benchmarks.solvers import needed, sweep, with_hbnode

DIM = 8
METHODS = ("exponential", "nystrom4", "nystrom8", "tsit5", "dopri5")
LANDING = {"dopri5": "dopri5+land"}
TOLERANCES = tuple(10.0 ** (-k / 2) for k in range(4, 17))
TARGETS = (1e-3, 1e-4, 1e-5)
MAX_STEPS = 5_000
CASES = ((1.0, 5.0), (30.0, 60.0), (300.0, 600.0))
STARTS = SLOW, REST, FAST = ("m = f/γ", "m = 0", "m = 5 N(0, 1)")


def problem(gamma: float, end: float, start: str, samples: int) -> Problem:
    """Return a random tanh network of 8 dimensions with three times PyTorch's initial weights, and h(0) ~ N(0, 1)."""
    func = tanh_network(DIM, 3.0).double()
    h, noise = torch.randn(2, samples, DIM, dtype=torch.float64)
    with torch.no_grad():
        momenta = {SLOW: func(h) / gamma, REST: torch.zeros_like(h), FAST: 5 * noise}
    return Problem(start, hbnode.HBNODE(func, damping=gamma, learn_damping=False), h, end, momenta[start])


def reference(problem: Problem) -> Tensor:
    """Return the state at the end, computed by nystrom8, or by Radau (sample by sample) if that is cheaper."""
    gamma, func = float(problem.field.damping), problem.field.func
    if gamma <= 1.0:
        return with_hbnode(problem, "nystrom8", 1e-12)[0]

    def slope(_: float, y: np.ndarray) -> np.ndarray:
        h, m = torch.from_numpy(y).view(2, DIM)
        with torch.no_grad():
            return torch.cat([m, func(h) - gamma * m]).numpy()

    def jacobian(_: float, y: np.ndarray) -> np.ndarray:
        by_h = torch.autograd.functional.jacobian(func, torch.from_numpy(y[:DIM])).numpy()
        return np.block([[np.zeros((DIM, DIM)), np.eye(DIM)], [by_h, -gamma * np.eye(DIM)]])

    ends = []
    for start in torch.cat(problem.state, 1).numpy():
        solution = solve_ivp(slope, (0.0, problem.end), start, method="Radau", jac=jacobian, rtol=1e-8, atol=1e-8)
        ends.append(solution.y[:, -1].reshape(2, DIM))
    return torch.from_numpy(np.stack(ends, 1))


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield the sweeps of all methods in all cases, and the evaluations that each needs for an error."""
    cases, samples = (CASES[1:2], 2) if options.quick else (CASES, 8)
    for (gamma, end), start in product(cases, STARTS):
        task = problem(gamma, end, start, samples)
        exact = reference(task)
        runs = {}
        for method in METHODS:
            solve = partial(with_hbnode, task, LANDING.get(method, method), max_steps=MAX_STEPS)
            runs[method] = sweep(solve, TOLERANCES, exact, enough=TARGETS[-1], too_many=math.inf)
        case = {"gamma": gamma, "end": end, "start": start}
        counts = {target: {method: needed(runs[method], target) for method in METHODS} for target in TARGETS}
        rows = [case | {"error": target, "evaluations": found} for target, found in counts.items()]
        rows[-1]["runs"] = runs
        yield "rows", rows


def shown(row: Row) -> Row:
    """Return the columns of a row that tables show."""
    return {name: row[name] for name in ("gamma", "end", "start", "error")} | row["evaluations"]


main = program(__doc__, "strong_damping", measured, shown, quick="γ = 30 alone, on two samples")


if __name__ == "__main__":
    main()
