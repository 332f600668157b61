"""What a solve costs beside the network in it: over bare evaluations, over torchdiffeq alone; and the import.

- Over bare evaluations: training steps of a block beside as many evaluations of its network, chained, and the time of
  a solve of ``Linear(2, 2)``, of which almost all is the solver's; also the number of Python calls.
- Over torchdiffeq: training steps that solve the same HBNODE on the same batch with dopri5, beside the same call of
  torchdiffeq with the pair (h, m), and one with the two stacked, which torchdiffeq need not string together.
- Of the drop-in over torchdiffeq: training steps of one step each, as in loops over the gaps of a series.
- Imports take place in fresh processes.

What is compared is timed in turn, as processor time, and the median of the ratios is printed. Writes JSON with the
machine in it.
"""

from __future__ import annotations

import cProfile
import functools
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torchdiffeq
from torch import Tensor, nn

import hbnode
from benchmarks.harness import command, ratio, seconds, write

AT_ONCE = 5  # calls that are timed together


class Stacked(nn.Module):
    """An HBNODE on the stacked state [h, m], as one would write it for torchdiffeq alone."""

    def __init__(self, field: hbnode.HBNODE) -> None:
        super().__init__()
        self.field = field

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        """The field on the two halves."""
        return torch.stack(self.field(t, (z[0], z[1])))


def steps(gradient: str, dim: int, batch: int, tol: float) -> dict[str, Callable[[], None]]:
    """A training step with torchdiffeq alone, with hbnode, and with torchdiffeq alone on a stacked state."""
    torch.manual_seed(0)
    field = hbnode.HBNODE(hbnode.nn.MLP(dim, [64, 64], dim, activation=nn.Tanh))
    h, m = torch.randn(2, batch, dim)
    t = torch.tensor([0.0, 1.0])
    stacked, state = Stacked(field), torch.stack([h, m])

    def ours() -> None:
        field.zero_grad()
        y, _ = hbnode.odeint(field, (h, m), t, rtol=tol, atol=tol, method="dopri5", gradient=gradient)
        y[-1].pow(2).mean().backward()

    solve = torchdiffeq.odeint_adjoint if gradient == "adjoint" else torchdiffeq.odeint
    settings: dict[str, Any] = {"rtol": tol, "atol": tol, "method": "dopri5"}
    if gradient == "adjoint":
        settings["adjoint_options"] = {"norm": "seminorm"}

    def same() -> None:
        field.zero_grad()
        y, _ = solve(field, (h, m), t, options={"norm": of_all}, **settings)
        y[-1].pow(2).mean().backward()

    def as_one() -> None:
        field.zero_grad()
        z = solve(stacked, state, t, **settings)
        z[-1, 0].pow(2).mean().backward()

    return {"torchdiffeq": same, "hbnode": ours, "torchdiffeq, stacked": as_one}


def of_all(state: tuple[Tensor, Tensor]) -> Tensor:
    """The root mean square over both parts of the state, which is the norm of hbnode and of a stacked state."""
    return torch.cat([part.reshape(-1) for part in state]).square().mean().sqrt()


def single_steps(solver: str, method: str) -> dict[str, Callable[[], None]]:
    """A training step of one solver step with torchdiffeq, and with hbnode in its place."""
    torch.manual_seed(0)
    func = hbnode.NODE(hbnode.nn.MLP(20, [50], 20, activation=nn.Tanh))
    y0, t = torch.randn(50, 20), torch.tensor([0.0, 0.1])

    def step(solve: Callable[..., Tensor]) -> None:
        func.zero_grad()
        solve(func, y0, t, method=method)[-1].square().mean().backward()

    modules = {"torchdiffeq": torchdiffeq, "drop-in": hbnode.torchdiffeq}
    return {name: functools.partial(step, getattr(module, solver)) for name, module in modules.items()}


def importing(module: str) -> Callable[[], None]:
    """A fresh process that imports a module, from bytecode after the first time."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment)


def wall_seconds(function: Callable[[], None]) -> float:
    """Wall-clock time of one call that starts a process."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bare(net: nn.Module, x: Tensor, evaluations: int, *, grad: bool = True) -> Callable[[], None]:
    """Evaluations of a network, chained, and their gradient."""

    def call() -> None:
        with torch.set_grad_enabled(grad):
            y = x
            for _ in range(evaluations):
                y = net(y)
            if grad:
                y.sum().backward()

    return call


def solving(net: nn.Module, x: Tensor, *, grad: bool = True, **settings: Any) -> Callable[[], None]:
    """A solve of a block around a network, and its gradient."""
    block = hbnode.HeavyBallODEBlock(net, **settings).to(x.dtype)

    def call() -> None:
        with torch.set_grad_enabled(grad):
            y = block(x)
            if grad:
                y.sum().backward()

    return call


def calls(function: Callable[[], None]) -> float:
    """Python calls of one call."""
    function()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(20):
        function()
    profile.disable()
    return pstats.Stats(profile).total_calls / 20


def repeated(function: Callable[[], None]) -> Callable[[], None]:
    """A function called several times."""

    def call() -> None:
        for _ in range(AT_ONCE):
            function()

    return call


def in_turn(functions: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """The median time of each in seconds, and of its ratio to the first."""
    for function in functions.values():
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(repeated(function)) / AT_ONCE)
    first, *_ = times.values()
    medians = {name: statistics.median(own) for name, own in times.items()}
    ratios = {f"{name} / {next(iter(times))}": ratio(own, first) for name, own in [*times.items()][1:]}
    return medians | ratios


def over_bare(repeats: int, *, compile: bool) -> list[dict[str, Any]]:
    """Solves beside as many bare evaluations."""
    torch.manual_seed(0)
    small, x = nn.Linear(2, 2), torch.randn(4, 2)
    net = hbnode.nn.MLP(32, [64, 64], 32, activation=nn.Tanh)
    batch = torch.randn(128, 32)
    rows = []
    for name, f, h, counts in (
        ("Linear(2, 2), batch 4", small, x, (1, 5)),
        ("dim 32, batch 128", net, batch, (2, 4, 32)),
    ):
        for steps in counts:
            settings: dict[str, Any] = {"method": "nystrom4", "steps": steps}
            contenders = {"bare": bare(f, h, 3 * steps + 1)}
            contenders |= {g: solving(f, h, gradient=g, **settings) for g in ("direct", "checkpoint")}
            if compile and f is net and steps < 32:
                contenders["compiled"] = solving(f, h, compile=True, **settings)
            rows.append({"what": f"{name}, nystrom4, steps {steps}", **in_turn(contenders, repeats)})
    contenders = {"bare": bare(small, x, 17, grad=False), "default": solving(small, x, grad=False)}
    rows.append({"what": "Linear(2, 2), default block, no gradient", **in_turn(contenders, repeats)})
    for dtype in (torch.float32, torch.float64):
        f, h = hbnode.nn.MLP(32, [64, 64], 32, activation=nn.Tanh).to(dtype), batch.to(dtype)
        settings = {"method": "nystrom4", "steps": 16}
        contenders = {"bare": bare(f, h, 49, grad=False), "solve": solving(f, h, grad=False, **settings)}
        rows.append({"what": f"dim 32, batch 128, no gradient, steps 16, {dtype}", **in_turn(contenders, repeats)})
    rows.append({"what": "Python calls, training step of the default block", "calls": calls(solving(small, x))})
    return rows


def main() -> None:
    """Time, print a row per setting, write JSON."""
    parser = command(__doc__, "overhead")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--compile", action="store_true", help="compiled blocks too, which takes minutes")
    parser.add_argument("--imports", type=int, default=11, help="how many pairs of processes import the libraries")
    options = parser.parse_args()
    if min(options.repeats, options.imports) < 1:
        parser.error("--repeats and --imports must be at least 1")
    torch.set_num_threads(1)
    of_solves = over_bare(options.repeats, compile=options.compile)
    for row in of_solves:
        figures = [f"{name} {1e6 * value:.0f} us" for name, value in row.items() if name != "what" and "/" not in name]
        if "calls" in row:
            figures = [f"{row['calls']:.0f}"]
        ratios = [f"{name.split(' / ')[0]} {value:.2f}" for name, value in row.items() if "/" in name]
        print(f"{row['what']}: {', '.join(figures)}" + (f"; over bare: {', '.join(ratios)}" if ratios else ""))
    rows = []
    print("gradient  dim  batch  hbnode ms  torchdiffeq ms  ratio  torchdiffeq, stacked")
    for gradient in ("direct", "adjoint"):
        for dim, batch in ((5, 120), (32, 128)):
            times = {"gradient": gradient, "dim": dim, "batch": batch}
            times |= in_turn(steps(gradient, dim, batch, 1e-5), options.repeats)
            rows.append(times)
            ours, theirs = 1e3 * times["hbnode"], 1e3 * times["torchdiffeq"]
            ratio, as_one = times["hbnode / torchdiffeq"], times["torchdiffeq, stacked / torchdiffeq"]
            print(f"{gradient:<8}  {dim:>3}  {batch:>5}  {ours:9.2f}  {theirs:14.2f}  {ratio:5.2f}  {as_one:5.2f}")
    for solver, method in product(("odeint", "odeint_adjoint"), ("euler", "midpoint", "rk4", "dopri5")):
        times = {"solver": solver, "method": method, **in_turn(single_steps(solver, method), options.repeats)}
        rows.append(times)
        print(f"{solver}, {method}: drop-in / torchdiffeq {times['drop-in / torchdiffeq']:.2f}")
    pairs = [(wall_seconds(importing("hbnode")), wall_seconds(importing("torch"))) for _ in range(options.imports + 1)][
        1:
    ]
    ours, torchs = (statistics.median(times) for times in zip(*pairs, strict=True))
    imports = {"seconds": ours, "torch_seconds": torchs, "ratio": statistics.median(x / y for x, y in pairs)}
    print(f"import hbnode {ours:.2f} s, import torch {torchs:.2f} s, ratio {imports['ratio']:.2f}")
    write(options.out, {"solves": of_solves, "rows": rows, "imports": imports})


if __name__ == "__main__":
    main()
