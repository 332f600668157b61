"""What a Gauss-Newton product costs, in gradients of the same batch: ``python -m benchmarks.hessian_free``.

For tanh networks, a GRU and an LSTM with a readout at every sample, float32, squared error: the product of
``HessianFree``, with lambda and with structural damping; the same by a double backward pass through torch's own
layers, kept between products; and that of curvlinops' ``GGNLinearOperator``, which evaluates the model again each time
and knows no structural damping. The gradient is forward, loss and backward as a user has it: an LSTM's runs in oneDNN
on the CPU.

Times are medians of runs that take turns in one process, of the processor on one thread unless told; ratios are
medians over the rounds. Writes JSON with the machine in it.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from benchmarks.contenders import MISSING
from benchmarks.harness import command, interleaved, milliseconds, ratio, write
from benchmarks.recurrent import Setting, table
from hbnode.optim import tanh_hidden

TINY = Setting(6, 4, 5, 3)
SETTINGS = (Setting(30, 500, 100, 10), Setting(50, 1000, 100, 2))
OUTPUTS = 3
DAMPING, STRUCTURAL = 0.1, 1 / 30
CELLS: dict[str, Callable[[int, int], nn.Module]] = {
    "TanhRNN": hbnode.nn.TanhRNN,
    "nn.RNN": nn.RNN,
    "nn.GRU": nn.GRU,
    "nn.LSTM": nn.LSTM,
}
Row = dict[str, Any]


class Net(nn.Module):
    """A recurrent layer, time first, and a readout at every sample."""

    def __init__(self, cell: str, setting: Setting) -> None:
        super().__init__()
        self.layer = CELLS[cell](setting.inputs, setting.hidden)
        self.readout = nn.Linear(setting.hidden, OUTPUTS)

    def states(self, x: Tensor) -> Tensor:
        """All h."""
        return self.layer(x)[0]

    def forward(self, x: Tensor) -> Tensor:
        """The outputs (T, batch, outputs)."""
        return self.readout(self.states(x))


@contextmanager
def without_onednn() -> Iterator[None]:
    """Layers of torch that have a second derivative."""
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True


@dataclass
class Contender:
    """A network with a batch.

    Attributes:
        net: the network.
        x: inputs.
        y: targets.
        vector: what the matrices multiply.
    """

    net: Net
    x: Tensor
    y: Tensor
    vector: Tensor

    @classmethod
    def of(cls, cell: str, setting: Setting) -> Contender:
        """By the name of its cell."""
        torch.manual_seed(0)
        net = Net(cell, setting)
        x = torch.randn(setting.time, setting.batch, setting.inputs)
        y = torch.randn(setting.time, setting.batch, OUTPUTS)
        return cls(net, x, y, torch.randn(sum(parameter.numel() for parameter in net.parameters())))

    def gradient(self) -> Tensor:
        """The gradient of the loss."""
        loss = (self.net(self.x) - self.y).square().sum() / 2 / self.x.shape[1]
        return torch.cat([z.flatten() for z in torch.autograd.grad(loss, list(self.net.parameters()))])

    def optimizer(self, structural: float) -> hbnode.optim.HessianFree:
        """After a step of one iteration; the parameters are as before."""
        before = [parameter.detach().clone() for parameter in self.net.parameters()]
        options = {"damping": DAMPING, "structural_damping": structural, "max_cg": 1, "case_dim": 1}
        optimizer = hbnode.optim.HessianFree(self.net.parameters(), loss="mse", **options)

        def evaluate() -> tuple[Tensor, Tensor, Any]:
            h = self.net.states(self.x)
            is_tanh = isinstance(self.net.layer, (nn.RNN, hbnode.nn.TanhRNN))
            return self.net.readout(h), self.y, tanh_hidden(h) if is_tanh else h

        optimizer.step(evaluate)
        with torch.no_grad():
            for parameter, value in zip(self.net.parameters(), before, strict=True):
                parameter.data.copy_(value)
        return optimizer

    def double_backward(self) -> Callable[[], Tensor]:
        """Products through torch's own layers, without structural damping."""
        parameters = list(self.net.parameters())
        with without_onednn():
            outputs = self.net(self.x)
        u = torch.zeros_like(outputs, requires_grad=True)
        grads = torch.autograd.grad(outputs, parameters, u, create_graph=True)  # J^T u, whose derivative in u is J^T

        def product() -> Tensor:
            jvp = torch.autograd.grad(torch.cat([g.flatten() for g in grads]), u, self.vector, retain_graph=True)[0]
            parts = torch.autograd.grad(outputs, parameters, jvp / self.x.shape[1], retain_graph=True)
            return torch.cat([z.flatten() for z in parts]) + DAMPING * self.vector

        return product

    def curvlinops(self) -> Callable[[], Tensor]:
        """Products of curvlinops' operator, scaled from means over all numbers to means over cases of halves."""
        from curvlinops import GGNLinearOperator

        flat = Flat(self.net)
        data = [(self.x, self.y.flatten(0, 1))]
        operator = GGNLinearOperator(flat, nn.MSELoss(), list(flat.parameters()), data, check_deterministic=False)
        scale = len(self.x) * OUTPUTS / 2

        def product() -> Tensor:
            with without_onednn():
                return scale * (operator @ self.vector) + DAMPING * self.vector

        return product


class Flat(nn.Module):
    """The outputs of all samples as a batch."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """(T * batch, outputs)."""
        return self.net(x).flatten(0, 1)


def products(cell: str, setting: Setting) -> dict[str, Callable[[], Tensor]]:
    """The gradient first, then the products."""
    contender = Contender.of(cell, setting)
    plain, structural = (contender.optimizer(mu) for mu in (0.0, STRUCTURAL))
    ways = {
        "gradient": contender.gradient,
        "HessianFree": lambda: plain.product(contender.vector),
        "HessianFree, structural": lambda: structural.product(contender.vector),
        "double backward": contender.double_backward(),
    }
    return ways | ({"curvlinops": contender.curvlinops()} if has_curvlinops() else {})


def has_curvlinops() -> bool:
    """Whether curvlinops is installed."""
    return importlib.util.find_spec("curvlinops") is not None


def measured(options: argparse.Namespace) -> list[Row]:
    """A row for each cell and way at each setting."""
    rows = []
    for setting in (TINY,) if options.quick else SETTINGS:
        for cell in CELLS:
            ways = products(cell, setting)
            times = interleaved(ways, options.repeats)
            for way, mine in times.items():
                row = {"setting": str(setting), "cell": cell, "product": way, "ms": milliseconds(mine)}
                rows.append(row | {"ratio": ratio(mine, times["gradient"])})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = command(__doc__, "hessian_free")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch [1]")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds [9]")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if not has_curvlinops():
        print(MISSING.format(name="curvlinops"))
    rows = measured(options)
    print(table(rows), flush=True)
    write(options.out, {"products": rows})


if __name__ == "__main__":
    main()
