"""Cost of a Gauss-Newton product relative to a gradient of the same batch: ``python -m benchmarks.hessian_free``.

For tanh networks, a GRU and an LSTM with a readout at every sample, float32, squared error: the product of
``HessianFree``, with lambda and with structural damping; the same by a double backward pass through torch's own
layers, kept between products; and that of curvlinops' ``GGNLinearOperator``, which evaluates the model again each time
and knows no structural damping. The gradient is forward, loss and backward as a user has it: an LSTM's runs in oneDNN
on the CPU.

Times are medians of runs that take turns in one process, of the processor on one thread; ratios are medians over the
rounds. Writes JSON with the machine in it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from benchmarks.harness import MISSING, Options, Row, interleaved, milliseconds, program, ratio
from benchmarks.recurrent import Setting
from hbnode.optim import tanh_hidden

TINY = Setting(6, 4, 5, 3)
SETTINGS = (Setting(30, 500, 100, 10), Setting(50, 1000, 100, 2))
OUTPUTS = 3
DAMPING, STRUCTURAL = 0.1, 1 / 30
CELLS: dict[str, Callable[[int, int], nn.Module]] = {
    "TanhRNN": hbnode.nn.TanhRNN,
    "nn.GRU": nn.GRU,
    "nn.LSTM": nn.LSTM,
}


class Net(nn.Module):
    """A recurrent layer, time first, and a linear output layer at every step."""

    def __init__(self, cell: str, setting: Setting) -> None:
        super().__init__()
        self.layer = CELLS[cell](setting.inputs, setting.hidden)
        self.readout = nn.Linear(setting.hidden, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (T, batch, outputs)."""
        return self.readout(self.layer(x)[0])


@contextmanager
def without_onednn() -> Iterator[None]:
    """Within a context, disable oneDNN, so that torch's recurrent layers have second derivatives."""
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True


class Contender:
    """A network with inputs x, targets y, and the vector to multiply by the curvature matrices."""

    def __init__(self, cell: str, setting: Setting) -> None:
        torch.manual_seed(0)
        self.net = Net(cell, setting)
        self.x = torch.randn(setting.time, setting.batch, setting.inputs)
        self.y = torch.randn(setting.time, setting.batch, OUTPUTS)
        self.parameters = list(self.net.parameters())
        self.vector = torch.randn(sum(parameter.numel() for parameter in self.parameters))

    def gradient(self) -> Tensor:
        """Return the gradient of the loss."""
        loss = (self.net(self.x) - self.y).square().sum() / 2 / self.x.shape[1]
        return torch.cat([z.flatten() for z in torch.autograd.grad(loss, self.parameters)])

    def hessian_free(self, structural: float) -> Callable[[], Tensor]:
        """Products of the optimizer after a step of one iteration; the parameters are as before."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        options = {"damping": DAMPING, "structural_damping": structural, "max_cg": 1, "case_dim": 1}
        optimizer = hbnode.optim.HessianFree(self.parameters, loss="mse", **options)

        def evaluate() -> tuple[Tensor, Tensor, Any]:
            h = self.net.layer(self.x)[0]
            is_tanh = isinstance(self.net.layer, hbnode.nn.TanhRNN)
            return self.net.readout(h), self.y, tanh_hidden(h) if is_tanh else h

        optimizer.step(evaluate)
        for parameter, value in zip(self.parameters, before, strict=True):
            parameter.data.copy_(value)
        return lambda: optimizer.product(self.vector)

    def double_backward(self) -> Callable[[], Tensor]:
        """Return a function that computes products through torch's layers, without structural damping."""
        with without_onednn():
            outputs = self.net(self.x)
        u = torch.zeros_like(outputs, requires_grad=True)
        grads = torch.autograd.grad(outputs, self.parameters, u, create_graph=True)
        transposed = torch.cat([g.flatten() for g in grads])  # J^T u, whose derivative in u is J^T

        def product() -> Tensor:
            jvp = torch.autograd.grad(transposed, u, self.vector, retain_graph=True)[0]
            parts = torch.autograd.grad(outputs, self.parameters, jvp / self.x.shape[1], retain_graph=True)
            return torch.cat([z.flatten() for z in parts]) + DAMPING * self.vector

        return product

    def curvlinops(self) -> Callable[[], Tensor]:
        """Products of curvlinops' operator, scaled from means over all numbers to means over cases of halves."""
        from curvlinops import GGNLinearOperator

        flat = nn.Sequential(self.net, nn.Flatten(0, 1))  # all samples are a batch
        data = [(self.x, self.y.flatten(0, 1))]
        operator = GGNLinearOperator(flat, nn.MSELoss(), self.parameters, data, check_deterministic=False)
        scale = len(self.x) * OUTPUTS / 2

        def product() -> Tensor:
            with without_onednn():
                return scale * (operator @ self.vector) + DAMPING * self.vector

        return product


def products(cell: str, setting: Setting) -> dict[str, Callable[[], Tensor]]:
    """Return functions by name: first the gradient, then the products."""
    contender = Contender(cell, setting)
    ways = {
        "gradient": contender.gradient,
        "HessianFree": contender.hessian_free(0.0),
        "HessianFree, structural": contender.hessian_free(STRUCTURAL),
        "double backward": contender.double_backward(),
    }
    return ways | ({"curvlinops": contender.curvlinops()} if importlib.util.find_spec("curvlinops") else {})


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield a row for each cell and product at each setting."""
    if not importlib.util.find_spec("curvlinops"):
        print(MISSING.format(name="curvlinops"))
    for setting in (TINY,) if options.quick else SETTINGS:
        for cell in CELLS:
            times = interleaved(products(cell, setting), options.repeats)
            row, base = {"setting": str(setting), "cell": cell}, times["gradient"]
            rows = [{"product": way, "ms": milliseconds(x), "ratio": ratio(x, base)} for way, x in times.items()]
            yield "products", [row | found for found in rows]


main = program(__doc__, "hessian_free", measured, repeats=9, quick="tiny sizes, to see that it runs")


if __name__ == "__main__":
    main()
