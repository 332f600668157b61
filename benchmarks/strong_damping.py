"""Strong damping: evaluations of f to reach an error, h'' + γh' = f(h) with a network f of 8 dimensions.

γ is 1 with T = 5, 30 and 300 with T = 2γ. The start is m = f/γ, where a strongly damped ball moves already, m = 0, or a
fast m of standard deviation 5. Tolerances are swept, in float64, and evaluations are interpolated along the sweep. The
reference is an implicit method of scipy's (Radau) where γ > 1, else nystrom8. A method that takes more than 5,000 steps
gives up. Prints a table and writes JSON with the machine in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import hbnode
from benchmarks.harness import command, write
from benchmarks.solvers import needed, rms, show
from hbnode.nn.nets import MLP

DIM = 8
METHODS = ("exponential", "nystrom4", "nystrom8", "tsit5", "dopri5")
TOLERANCES = tuple(10.0 ** (-k / 2) for k in range(4, 17))
TARGETS = (1e-3, 1e-4, 1e-5)
MAX_STEPS = 5_000
CASES = ((1.0, 5.0), (30.0, 60.0), (300.0, 600.0))
STARTS = SLOW, REST, FAST = ("m = f/γ", "m = 0", "m = 5 N(0, 1)")


def problem(gamma: float, start: str, samples: int) -> tuple[hbnode.HBNODE, tuple[Tensor, Tensor]]:
    """A random tanh network 8 -> 64 -> 64 -> 8 whose weights are three times PyTorch's, on h(0) ~ N(0, 1)."""
    torch.manual_seed(0)
    func = MLP(DIM, [64, 64], DIM, activation=nn.Tanh).double()
    with torch.no_grad():
        for weight in func.parameters():
            if weight.dim() == 2:
                weight *= 3.0
    h, noise = torch.randn(2, samples, DIM, dtype=torch.float64)
    with torch.no_grad():
        momenta = {SLOW: func(h) / gamma, REST: torch.zeros_like(h), FAST: 5 * noise}
    return hbnode.HBNODE(func, damping=gamma, learn_damping=False), (h, momenta[start])


def solve(
    field: hbnode.HBNODE, state: tuple[Tensor, Tensor], end: float, method: str, tol: float
) -> tuple[Tensor, float]:
    """The state at the end, stacked, and the evaluations of f that it took."""
    save: hbnode.solve.Save = "exact" if method == "dopri5" else "interpolate"
    with hbnode.count_nfe(field) as nfe, torch.no_grad():
        states = hbnode.odeint(
            field, state, [0.0, end], method=method, rtol=tol, atol=tol, save=save, max_steps=MAX_STEPS
        )
    return torch.stack([part[-1] for part in states]), nfe.forward


def sweep(
    field: hbnode.HBNODE, state: tuple[Tensor, Tensor], end: float, method: str, exact: Tensor
) -> list[dict[str, Any]]:
    """Runs at falling tolerances, until one is exact enough or gives up, as those with tighter ones would."""
    runs: list[dict[str, Any]] = []
    for tol in TOLERANCES:
        try:
            found, evaluations = solve(field, state, end, method, tol)
        except hbnode.errors.MaxStepsError:
            break
        runs.append({"setting": tol, "evaluations": evaluations, "error": rms(found - exact)})
        if runs[-1]["error"] < TARGETS[-1]:
            break
    return runs


def reference(field: hbnode.HBNODE, state: tuple[Tensor, Tensor], end: float) -> Tensor:
    """The state at the end, by nystrom8, or where that is expensive by Radau, sample by sample."""
    if float(field.damping) <= 1.0:
        return solve(field, state, end, "nystrom8", 1e-12)[0]
    gamma, func = float(field.damping), field.func

    def slope(_: float, y: np.ndarray) -> np.ndarray:
        h, m = torch.from_numpy(y).view(2, DIM)
        with torch.no_grad():
            return torch.cat([m, func(h) - gamma * m]).numpy()

    def jacobian(_: float, y: np.ndarray) -> np.ndarray:
        by_h = torch.autograd.functional.jacobian(func, torch.from_numpy(y[:DIM])).numpy()
        return np.block([[np.zeros((DIM, DIM)), np.eye(DIM)], [by_h, -gamma * np.eye(DIM)]])

    ends = []
    for sample in zip(*state, strict=True):
        start = torch.cat(sample).numpy()
        solution = solve_ivp(slope, (0.0, end), start, method="Radau", jac=jacobian, rtol=1e-8, atol=1e-8)
        ends.append(solution.y[:, -1].reshape(2, DIM))
    return torch.from_numpy(np.stack(ends, 1))


def rows(cases: Sequence[tuple[float, float]], samples: int) -> list[dict[str, Any]]:
    """The sweeps of all methods in all cases, and what each needs for an error."""
    found = []
    for gamma, end in cases:
        for start in STARTS:
            field, state = problem(gamma, start, samples)
            exact = reference(field, state, end)
            runs = {method: sweep(field, state, end, method, exact) for method in METHODS}
            for target in TARGETS:
                counts = {method: needed(runs[method], target) for method in METHODS}
                found.append({"gamma": gamma, "end": end, "start": start, "error": target, "evaluations": counts})
            found[-1]["runs"] = runs
            print(table(found[-len(TARGETS) :]), flush=True)
    return found


def table(chosen: list[dict[str, Any]]) -> str:
    """Evaluations of one case."""
    first = chosen[0]
    lines = [f"\nγ = {first['gamma']:g}, T = {first['end']:g}, {first['start']}"]
    lines.append("  error" + "".join(f"{name:>13}" for name in METHODS))
    for row in chosen:
        lines.append(f"  {row['error']:.0e}" + "".join(f"{show(row['evaluations'][name]):>13}" for name in METHODS))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve, print a table for each case, write JSON."""
    parser = command(__doc__, "strong_damping")
    parser.add_argument("--quick", action="store_true", help="γ = 30 alone, on two samples")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = rows(CASES[1:2] if options.quick else CASES, 2 if options.quick else 8)
    write(options.out, {"rows": found})


if __name__ == "__main__":
    main()
