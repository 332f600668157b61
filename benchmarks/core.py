"""What a training step costs over bare evaluations of its network, beside the ratios that are kept in ``ratios.json``.

Each case is a training step (forward and backward) of a block, an ODERNN or ``sdeint``. Bare is as many evaluations of
the same network on the same batch, chained, with their backward pass; for the ODERNN it is ``nn.GRU``. Both are timed
in turn, as processor time of one thread, and the median of the ratios is printed, with the kept one beside it. Ratios
compare across machines far better than milliseconds. ``--keep`` writes the ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from hbnode.nn.nets import MLP

KEPT = Path(__file__).with_name("ratios.json")
Pair = tuple[Callable[[], Any], Callable[[], Any]]  # the training step, and the bare one


def chained(net: nn.Module, x: Tensor, count: int) -> Callable[[], None]:
    """A training step of a network that is evaluated so many times, one after the other."""

    def step() -> None:
        h = x
        for _ in range(count):
            h = h + 0.01 * net(h)
        net.zero_grad()
        h.square().mean().backward()

    return step


def of_block(
    dim: int = 32, hidden: int = 64, batch: int = 128, end: float = 1.0, t: Tensor | None = None, **solver: Any
) -> Pair:
    """The training step of a HeavyBallODEBlock, with h at its end, or at the times t."""
    torch.manual_seed(0)
    net = MLP(dim, [hidden, hidden], dim, activation=nn.Tanh)
    block, x = hbnode.HeavyBallODEBlock(net, t_span=(0.0, end), **solver), torch.randn(batch, dim)

    def step() -> None:
        block.zero_grad()
        (block(x) if t is None else block(x, t)).square().mean().backward()

    step()
    return step, chained(net, x, block.nfe.forward)


def of_ode_rnn() -> Pair:
    """The training step of a default ODERNN with masks and irregular times, and of an nn.GRU."""
    torch.manual_seed(0)
    x, t, mask = torch.randn(50, 50, 12), (0.1 + torch.rand(50, 50)).cumsum(1), torch.rand(50, 50, 12) > 0.3
    rnn, gru = hbnode.ODERNN(12, 32, rtol=1e-3, atol=1e-3), nn.GRU(12, 32, batch_first=True)

    def step() -> None:
        rnn.zero_grad()
        rnn(x, t, mask=mask)[0].square().mean().backward()

    def bare() -> None:
        gru.zero_grad()
        gru(x)[0].square().mean().backward()

    return step, bare


def of_sde() -> Pair:
    """The training step of sdeint by UBU, 20 steps."""
    torch.manual_seed(0)
    net = MLP(32, [64, 64], 32, activation=nn.Tanh)
    sde = hbnode.HeavyBallSDE(net, damping=0.5, temperature=0.1)
    x = torch.randn(128, 32)

    def step() -> None:
        sde.zero_grad()
        h, _ = hbnode.sdeint(sde, sde.initial_state(x), [0.0, 1.0], dt=0.05, seed=0)
        h[-1].square().mean().backward()

    return step, chained(net, x, 20)


CASES: dict[str, Callable[[], Pair]] = {
    "block, T = 1, 1e-3": lambda: of_block(rtol=1e-3, atol=1e-3),
    "block, T = 1, defaults": of_block,
    "block, four steps of nystrom4": lambda: of_block(method="nystrom4", steps=4),
    "block, T = 10, nystrom4, 1e-4": lambda: of_block(end=10.0, method="nystrom4", rtol=1e-4, atol=1e-4),
    "block, 16 steps, hidden 256": lambda: of_block(64, 256, 256, method="nystrom4", steps=16),
    "block, T = 5, hidden 256, 1e-4": lambda: of_block(64, 256, 256, 5.0, rtol=1e-4, atol=1e-4),
    "per sample, 128 x 32": lambda: of_block(end=10.0, rtol=1e-4, atol=1e-4, per_sample=True),
    "per sample, 1000 x 4": lambda: of_block(4, 32, 1000, 5.0, rtol=1e-4, atol=1e-4, per_sample=True),
    "100 output times, 1000 x 4": lambda: of_block(4, 32, 1000, 5.0, torch.linspace(0.0, 5.0, 100)),
    "reversible, 64 steps of leapfrog": lambda: of_block(method="leapfrog", steps=64, gradient="reversible"),
    "ODERNN over nn.GRU": of_ode_rnn,
    "sdeint, 20 steps of ubu": of_sde,
}


def processor_time(step: Callable[[], Any], calls: int) -> float:
    """Of a call, in seconds."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    for _ in range(calls):
        step()
    seconds = time.process_time() - start
    gc.enable()
    return seconds / calls


def ratio(pair: Pair, rounds: int) -> float:
    """The median of the ratios of the two, timed in turn."""
    for step in pair:
        step()
    calls = [max(1, round(0.05 / processor_time(step, 2))) for step in pair]
    times = [[processor_time(step, n) for step, n in zip(pair, calls, strict=True)] for _ in range(rounds)]
    return statistics.median(own / bare for own, bare in times)


def main() -> None:
    """Print the ratios beside those that are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keep", action="store_true", help="write the ratios as those to compare with")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    found = {}
    print(f"{'over bare evaluations':36s} {'now':>7s} {'kept':>7s} {'now / kept':>11s}")
    for name, make in CASES.items():
        found[name] = round(ratio(make(), args.rounds), 2)
        before = kept.get(name)
        beside = f"{before:7.2f} {found[name] / before:11.2f}" if before else ""
        print(f"{name:36s} {found[name]:7.2f} {beside}", flush=True)
    if args.keep:
        KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
