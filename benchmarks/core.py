"""Cost of a training step relative to bare evaluations of its network, compared with earlier ratios in ``ratios.json``.

Each case is a training step (forward and backward) of a block, an ODERNN or ``sdeint``. The bare step is a chain of as
many evaluations of the same network on the same batch, with their backward pass; for the ODERNN it is a training step
of ``nn.GRU``. Both are timed alternately, as processor time of one thread. The median of the ratios is printed together
with the stored ratio. Ratios are more comparable between machines than milliseconds. Writes a JSON file, which includes
a description of the machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from benchmarks.harness import Options, Row, interleaved, program, ratio, training_step
from hbnode.nn.nets import MLP

Step = Callable[[], Any]


def chained(net: nn.Module, x: Tensor, count: int) -> Step:
    """Return a training step of a network that is applied ``count`` times in sequence."""

    def loss() -> Tensor:
        h = x
        for _ in range(count):
            h = h + 0.01 * net(h)
        return h.square().mean()

    return training_step(net, loss)


def of_block(
    dim: int = 32,
    hidden: Sequence[int] = (64, 64),
    batch: int = 128,
    end: float = 1.0,
    t: Tensor | None = None,
    **solver: Any,
) -> tuple[Step, Step]:
    """Return the training step of a HeavyBallODEBlock, with outputs at its end or at times t, and the bare step."""
    torch.manual_seed(0)
    net = MLP(dim, list(hidden), dim, activation=nn.Tanh)
    block, x = hbnode.HeavyBallODEBlock(net, t_span=(0.0, end), **solver), torch.randn(batch, dim)
    step = training_step(block, lambda: (block(x) if t is None else block(x, t)).square().mean())
    step()
    return step, chained(net, x, block.nfe.forward)


def of_ode_rnn() -> tuple[Step, Step]:
    """Return the training step of a default ODERNN with masks and irregular times, and that of an nn.GRU."""
    torch.manual_seed(0)
    x, t, mask = torch.randn(50, 50, 12), (0.1 + torch.rand(50, 50)).cumsum(1), torch.rand(50, 50, 12) > 0.3
    rnn, gru = hbnode.ODERNN(12, 32, rtol=1e-3, atol=1e-3), nn.GRU(12, 32, batch_first=True)
    step = training_step(rnn, lambda: rnn(x, t, mask=mask)[0].square().mean())
    return step, training_step(gru, lambda: gru(x)[0].square().mean())


def of_sde() -> tuple[Step, Step]:
    """Return the training step of sdeint with 20 UBU steps, and the bare step."""
    torch.manual_seed(0)
    net = MLP(32, [64, 64], 32, activation=nn.Tanh)
    sde, x = hbnode.HeavyBallSDE(net, damping=0.5, temperature=0.1), torch.randn(128, 32)
    state, t = sde.initial_state(x), [0.0, 1.0]
    step = training_step(sde, lambda: hbnode.sdeint(sde, state, t, dt=0.05, seed=0)[0][-1].square().mean())
    return step, chained(net, x, 20)


CASES: dict[str, Callable[[], tuple[Step, Step]]] = {
    "block, T = 1, 1e-3": lambda: of_block(rtol=1e-3, atol=1e-3),
    "block, T = 1, defaults": of_block,
    "block, four steps of nystrom4": lambda: of_block(method="nystrom4", steps=4),
    "block, T = 10, nystrom4, 1e-4": lambda: of_block(end=10.0, method="nystrom4", rtol=1e-4, atol=1e-4),
    "block, 16 steps, hidden 256": lambda: of_block(64, (256, 256), 256, method="nystrom4", steps=16),
    "block, T = 5, hidden 256, 1e-4": lambda: of_block(64, (256, 256), 256, 5.0, rtol=1e-4, atol=1e-4),
    "per sample, 128 x 32": lambda: of_block(end=10.0, rtol=1e-4, atol=1e-4, per_sample=True),
    "per sample, 1000 x 4": lambda: of_block(4, (32, 32), 1000, 5.0, rtol=1e-4, atol=1e-4, per_sample=True),
    "100 output times, 1000 x 4": lambda: of_block(4, (32, 32), 1000, 5.0, torch.linspace(0.0, 5.0, 100)),
    "reversible, 64 steps of leapfrog": lambda: of_block(method="leapfrog", steps=64, gradient="reversible"),
    "block, one step, Linear(2, 2)": lambda: of_block(2, (), 4, method="nystrom4", steps=1),
    "ODERNN over nn.GRU": of_ode_rnn,
    "sdeint, 20 steps of ubu": of_sde,
}


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield a table row for each case."""
    rows: list[Row] = []
    kept = json.loads(Path(__file__).with_name("ratios.json").read_text())
    for name, make in CASES.items():
        step, bare = interleaved(dict(enumerate(make())), options.repeats, at_least=0.05).values()
        now, before = ratio(step, bare), kept.get(name)
        row = {"over bare evaluations": name, "now": now, "kept": before}
        rows.append(row | {"now / kept": now / before if before else None})
    yield "rows", rows


main = program(__doc__, "core", measured, repeats=9)


if __name__ == "__main__":
    main()
