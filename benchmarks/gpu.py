"""Seconds of a training step on the CPU and on a GPU, by width and batch. Run by ``make gpu``; needs CUDA."""

from __future__ import annotations

import statistics
import timeit
from typing import Any

import torch
from torch import Tensor, nn

import hbnode

REPEATS = 20
SOLVER = {"rtol": 1e-3, "atol": 1e-3}


def models(width: int, batch: int) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return the models of the table, each with an input."""

    def block(**options: Any) -> nn.Module:
        return hbnode.HeavyBallODEBlock(hbnode.nn.MLP(width, [width], width), **options)

    rows, sequences = torch.randn(batch, width), torch.randn(batch, 128, width)
    transformer = hbnode.nn.MomentumTransformer(None, width, 4, 2, 2 * width, attention="heavy_ball")
    return {
        "block, adaptive": (block(**SOLVER), rows),
        "block, 8 steps": (block(steps=8), rows),
        "dopri5, adjoint": (block(method="dopri5", gradient="adjoint", **SOLVER), rows),
        "MomentumLSTM": (hbnode.nn.MomentumLSTM(width, width, batch_first=True), sequences),
        "OscillatorStack": (hbnode.nn.OscillatorStack(width, width), sequences),
        "heavy-ball transformer": (transformer, sequences),
    }


def milliseconds(model: nn.Module, x: Tensor) -> float:
    """Return the median time of a forward and a backward pass in milliseconds."""

    def step() -> None:
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().mean().backward()
        if x.is_cuda:
            torch.cuda.synchronize()

    return 1e3 * statistics.median(timeit.repeat(step, repeat=REPEATS + 3, number=1)[3:])


def main() -> None:
    """Measure and print the table."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs CUDA, and torch sees none. Fix: a machine with a GPU.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads\n")
    print("| model | width | batch | CPU, ms | GPU, ms |\n|---|---|---|---|---|")
    for size in ((64, 64), (256, 256)):
        torch.manual_seed(0)
        for name, (model, x) in models(*size).items():
            on_cpu, on_gpu = milliseconds(model, x), milliseconds(model.cuda(), x.cuda())
            print(f"| {name} | {size[0]} | {size[1]} | {on_cpu:.1f} | {on_gpu:.1f} |", flush=True)


if __name__ == "__main__":
    main()
