"""What hbnode's counting and checking cost on top of torchdiffeq, and its import on top of torch's, as ratios of times.

Training steps solve the same HBNODE on the same batch with dopri5. Imports take place in fresh processes. The two are
timed in turn, and the median of the ratios is printed. Writes JSON with the machine in it.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchdiffeq
from torch import Tensor, nn

import hbnode
from tasks.common.files import write_json
from tasks.common.run import environment


class Stacked(nn.Module):
    """An HBNODE on the stacked state [h, m], as one would write it for torchdiffeq alone."""

    def __init__(self, field: hbnode.HBNODE) -> None:
        super().__init__()
        self.field = field

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        """The field on the two halves."""
        return torch.stack(self.field(t, (z[0], z[1])))


def steps(gradient: str, dim: int, batch: int, tol: float) -> tuple[Callable[[], None], Callable[[], None]]:
    """A training step with hbnode, and the same with torchdiffeq alone."""
    torch.manual_seed(0)
    field = hbnode.HBNODE(hbnode.nets.MLP(dim, [64, 64], dim, activation=nn.Tanh))
    h, m = torch.randn(2, batch, dim)
    t = torch.tensor([0.0, 1.0])
    stacked, state = Stacked(field), torch.stack([h, m])

    def ours() -> None:
        field.zero_grad()
        y, _ = hbnode.odeint(field, (h, m), t, rtol=tol, atol=tol, method="dopri5", gradient=gradient)
        y[-1].pow(2).mean().backward()

    def theirs() -> None:
        field.zero_grad()
        if gradient == "adjoint":
            norm = {"norm": "seminorm"}
            z = torchdiffeq.odeint_adjoint(stacked, state, t, rtol=tol, atol=tol, method="dopri5", adjoint_options=norm)
        else:
            z = torchdiffeq.odeint(stacked, state, t, rtol=tol, atol=tol, method="dopri5")
        z[-1, 0].pow(2).mean().backward()

    return ours, theirs


def seconds(function: Callable[[], None]) -> float:
    """Wall-clock time of one call, without Python's garbage collector, as ``timeit`` does."""
    gc.collect(0)
    gc.disable()
    try:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    finally:
        gc.enable()


def importing(module: str) -> Callable[[], None]:
    """A fresh process that imports a module, from bytecode after the first time."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment)


def main() -> None:
    """Time, print a row per setting, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--imports", type=int, default=11, help="how many pairs of processes import the libraries")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/overhead.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("gradient  dim  batch  hbnode ms  torchdiffeq ms  ratio")
    for gradient in ("direct", "adjoint"):
        for dim, batch in ((5, 120), (32, 128)):
            ours, theirs = steps(gradient, dim, batch, 1e-5)
            pairs = [(seconds(ours), seconds(theirs)) for _ in range(options.repeats + 3)][3:]
            a, b = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(x / y for x, y in pairs)
            rows.append(
                {"gradient": gradient, "dim": dim, "batch": batch, "ms": a, "torchdiffeq_ms": b, "ratio": ratio}
            )
            print(f"{gradient:<8}  {dim:>3}  {batch:>5}  {a:9.2f}  {b:14.2f}  {ratio:5.2f}")
    pairs = [(seconds(importing("hbnode")), seconds(importing("torch"))) for _ in range(options.imports + 1)][1:]
    ours, torchs = (statistics.median(times) for times in zip(*pairs, strict=True))
    imports = {"seconds": ours, "torch_seconds": torchs, "ratio": statistics.median(x / y for x, y in pairs)}
    print(f"import hbnode {ours:.2f} s, import torch {torchs:.2f} s, ratio {imports['ratio']:.2f}")
    report = {"machine": environment(torch.device("cpu")), "rows": rows, "imports": imports}
    write_json(options.out, report)


if __name__ == "__main__":
    main()
