"""Seconds of a training step on the CPU and on a GPU, by width and batch. Run by ``make gpu``; needs CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import hbnode

REPEATS = 20


def models(width: int, batch: int) -> dict[str, tuple[Callable[[], nn.Module], torch.Tensor]]:
    """Return the models of the table, each with its input."""
    net = hbnode.nn.MLP(width, [width], width)
    rows, sequences = torch.randn(batch, width), torch.randn(batch, 128, width)
    return {
        "block, adaptive": (lambda: hbnode.HeavyBallODEBlock(net, rtol=1e-3, atol=1e-3), rows),
        "block, 8 steps": (lambda: hbnode.HeavyBallODEBlock(net, steps=8), rows),
        "dopri5, adjoint": (
            lambda: hbnode.HeavyBallODEBlock(net, method="dopri5", gradient="adjoint", rtol=1e-3, atol=1e-3), rows,
        ),
        "MomentumLSTM": (lambda: hbnode.nn.MomentumLSTM(width, width, batch_first=True), sequences),
        "OscillatorStack": (lambda: hbnode.nn.OscillatorStack(width, width), sequences),
        "heavy-ball transformer": (
            lambda: hbnode.nn.MomentumTransformer(None, width, 4, 2, 2 * width, attention="heavy_ball"), sequences,
        ),
    }  # fmt: skip


def seconds(model: nn.Module, x: torch.Tensor) -> float:
    """Return the median time of a forward and a backward pass."""
    times = []
    for _ in range(REPEATS + 3):
        begin = time.perf_counter()
        y = model(x)
        (y[0] if isinstance(y, tuple) else y).square().mean().backward()
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times[3:])[REPEATS // 2]


def main() -> None:
    """Print the table."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs CUDA, and torch sees none. Fix: a machine with a GPU.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {torch.get_num_threads()} CPU threads\n")
    print("| model | width | batch | CPU, ms | GPU, ms |\n|---|---|---|---|---|")
    for width, batch in ((64, 64), (256, 256)):
        for name, (make, x) in models(width, batch).items():
            torch.manual_seed(0)
            model = make()
            on_cpu, on_gpu = seconds(model, x), seconds(model.cuda(), x.cuda())
            print(f"| {name} | {width} | {batch} | {1e3 * on_cpu:.1f} | {1e3 * on_gpu:.1f} |", flush=True)


if __name__ == "__main__":
    main()
