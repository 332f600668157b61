"""Speed of oscillators compared with LSTM, GRU, ODE-RNNs and celerite2: ``python -m benchmarks.oscillators``.

The first table times forward and backward passes of one layer, without the optimizer step. The batch has 8 series with
64 features, and the layer has 64 outputs. The layer of 128 oscillators has about as many parameters as the LSTM. "even"
means regular samples, "shared" irregular times that are the same for all series, and "own" different times for each
series. The loop computes "own" step by step with autograd. "selective" oscillators have 32 complex states, "real" ones
64 real states. ODE-RNNs, at tolerance 1e-3, are compared with oscillators that have as many parameters.

The Kalman filter and smoother of three noisy oscillators with one channel in float64 are compared with two baselines.
One is a filter that processes one sample at a time with autograd. The other is celerite2, which processes one series at
a time without gradients. The times of celerite2 include building its kernel.

Times are medians of processor time on one thread; the steps run alternately in one process. Ratios are medians of the
ratios in each round. "kept" is the memory that autograd stores for the backward pass. Writes a JSON file, which
includes a description of the machine, and a figure.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from benchmarks.harness import Options, Row, interleaved, milliseconds, panels, program, ratio, training_step

BATCH, FEATURES, HIDDEN, OSCILLATORS, SELECTIVE = 8, 64, 64, 128, 32
SIZES = (1024, 4096, 16384), (64, 512), ((64, 64), (1, 1000), (100, 1000))  # T, T beside ODE-RNNs, batch and T
TINY = (16, 32), (8,), ((2, 9),)
LOOP_MOST = 1024  # largest number of samples for the loop


def step(module: nn.Module, *inputs: Tensor) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass."""
    return training_step(module, lambda: module(*inputs)[0].square().mean())


class Loop(nn.Module):
    """The oscillators of a layer, computed sample by sample."""

    def __init__(self, layer: hbnode.nn.Oscillators) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor]:
        """Return the outputs, without a state."""
        layer, u = self.layer, x @ self.layer.weight_in.T
        gamma, kappa = layer.damping, layer.stiffness
        every = hbnode.nn.functional.oscillator_step(gamma, kappa, t.diff(dim=1, prepend=t[:, :1]).unsqueeze(-1))
        v = q = torch.zeros_like(u[:, 0])
        states = []
        for i in range(x.shape[1]):
            vv, vx, xv, xx = (entry[:, i] for entry in every)
            v, q = vv * v + vx * q + u[:, i], xv * v + xx * q
            states.append(torch.cat([v, kappa.sqrt() * q], -1))
        return (torch.stack(states, 1) @ layer.weight_out.T + x @ layer.weight_skip.T,)


def kept(function: Callable[[], None]) -> float:
    """Return the MiB that autograd stores for the backward pass, including parameters and inputs.

    Each tensor counts once.
    """
    found: dict[tuple[int, int], int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.data_ptr(), tensor.numel()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(found.values()) / 2**20


def layers(lengths: Sequence[int], rounds: int) -> Iterator[list[Row]]:
    """Yield a table row for each layer and length."""
    make = partial(hbnode.nn.Oscillators, FEATURES, HIDDEN)
    layer, held, chooses = make(OSCILLATORS), make(OSCILLATORS, input="hold"), make(SELECTIVE, selective=True)
    is_real = make(2 * SELECTIVE, selective=True, frequency=None)
    lstm, gru = (kind(FEATURES, HIDDEN, batch_first=True) for kind in (nn.LSTM, nn.GRU))
    for length in lengths:
        x = torch.randn(BATCH, length, FEATURES)
        t = (0.5 + torch.rand(BATCH, length)).cumsum(1)
        steps = {
            "nn.LSTM": step(lstm, x),
            "nn.GRU": step(gru, x),
            "oscillators, even": step(layer, x),
            "oscillators, shared": step(layer, x, t[0]),
            "oscillators, own": step(layer, x, t),
            "oscillators, own, held": step(held, x, t),
            "selective, own": step(chooses, x, t),
            "selective, own, real": step(is_real, x, t),
        }
        if length <= LOOP_MOST:
            steps["loop"] = step(Loop(layer), x, t)
        times = interleaved(steps, rounds, warm=1)
        rows = []
        for name, mine in times.items():
            row = {"layer": name, "length": length, "ms": milliseconds(mine)}
            for over, rival in (("of_lstm", "nn.LSTM"), ("of_gru", "nn.GRU"), ("of_loop", "loop")):
                row[over] = ratio(mine, times[rival]) if rival in times else None
            rows.append(row | {"kept_MiB": kept(steps[name])})
        yield rows


def ode_rnns(lengths: Sequence[int], rounds: int) -> Iterator[list[Row]]:
    """Yield table rows of an ODE-RNN and of oscillators with as many parameters."""
    features, batch = 8, 16
    rnn = hbnode.ODERNN(features, 32, rtol=1e-3, atol=1e-3)
    wanted = sum(p.numel() for p in rnn.parameters())
    size = round((wanted - 32 * features) / (2 + features + 2 * 32))
    modules = {"ODERNN": rnn, "oscillators": hbnode.nn.Oscillators(features, 32, size)}
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
    for length in lengths:
        x, t = torch.randn(batch, length, features), (0.5 + torch.rand(batch, length)).cumsum(1)
        times = interleaved({name: step(module, x, t) for name, module in modules.items()}, rounds, warm=1)
        rows = []
        for name, mine in times.items():
            row = {"layer": name, "length": length, "ms": milliseconds(mine)}
            rows.append(row | {"of_ode_rnn": ratio(mine, times["ODERNN"]), "parameters": sizes[name]})
        yield rows


def one_by_one(layer: hbnode.nn.Oscillators, x: Tensor, t: Tensor) -> Tensor:
    """Return the log-likelihood of series x (batch, T), by a filter that processes one sample at a time."""
    c, spread, noise = layer.weight_out[0], (2 * layer.log_spread).exp().repeat(2), layer.observation_noise.square()
    gamma, kappa, root = layer.damping, layer.stiffness, layer.stiffness.sqrt()
    mean, covariance, total = x.new_zeros(len(x), len(spread)), spread.diag().expand(len(x), -1, -1), torch.tensor(0.0)
    for gap, sample in zip(t.diff(dim=1, prepend=t[:, :1]).T, x.T, strict=True):
        step = hbnode.nn.functional.oscillator_step(gamma, kappa, gap.unsqueeze(1))
        rows = torch.cat([step.vv.diag_embed(), (step.vx / root).diag_embed()], -1)
        phi = torch.cat([rows, torch.cat([(step.xv * root).diag_embed(), step.xx.diag_embed()], -1)], 1)
        mean = (phi @ mean.unsqueeze(-1)).squeeze(-1)
        covariance = phi @ (covariance - spread.diag()) @ phi.mT + spread.diag()
        gain = covariance @ c
        variance, error = gain @ c + noise, sample - mean @ c
        mean = mean + gain * (error / variance).unsqueeze(1)
        covariance = covariance - gain.unsqueeze(2) * (gain / variance.unsqueeze(1)).unsqueeze(1)
        total = total - 0.5 * (error.square() / variance + variance.log() + math.log(2 * math.pi)).sum()
    return total


class Celerite:
    """The model of a layer in celerite2. The layer's output must be the sum of the displacements."""

    def __init__(self, layer: hbnode.nn.Oscillators) -> None:
        zeta, omega = layer.damping / (2 * layer.stiffness.sqrt()), layer.stiffness.sqrt()
        numbers = torch.stack([layer.log_spread.exp(), omega, 0.5 / zeta], 1).detach()
        self.terms, self.noise = numbers.tolist(), float(layer.observation_noise.detach())

    def log_likelihood(self, x: Tensor, t: Tensor) -> float:
        return sum(self._process(times).log_likelihood(row.numpy()) for row, times in zip(x, t, strict=True))

    def smooth(self, x: Tensor, t: Tensor) -> list[Any]:
        """Return the posterior means and variances at the samples."""
        rows = zip(x, t, strict=True)
        return [self._process(times).predict(row.numpy(), return_var=True) for row, times in rows]

    def _process(self, t: Tensor) -> Any:
        import celerite2
        from celerite2.terms import SHOTerm, TermSum

        process = celerite2.GaussianProcess(TermSum(*(SHOTerm(sigma=s, w0=w, Q=q) for s, w, q in self.terms)), mean=0.0)
        process.compute(t.numpy(), diag=torch.full_like(t, self.noise**2).numpy())
        return process


def filters(sizes: Sequence[tuple[int, int]], rounds: int) -> Iterator[list[Row]]:
    """Yield table rows of the filter and the smoother, for batches of series (batch, T)."""
    layer = hbnode.nn.Oscillators(1, 1, 3, noise=True, frequency=(0.05, 0.2)).double()
    layer.weight_out.data.copy_(torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]]))
    peer, has_peer = Celerite(layer), importlib.util.find_spec("celerite2") is not None
    for batch, length in sizes:
        t = (0.5 + torch.rand(batch, length, dtype=torch.float64)).cumsum(1)
        x = torch.randn(batch, length, dtype=torch.float64)
        samples = x.unsqueeze(-1)
        likelihood, loop = partial(layer.log_likelihood, samples, t), partial(one_by_one, layer, x, t)
        functions: dict[str, Callable[[], object]] = {
            "likelihood": torch.no_grad()(likelihood),
            "likelihood, gradient": training_step(layer, lambda likelihood=likelihood: likelihood().sum()),
            "posterior": torch.no_grad()(partial(layer.smooth, samples, t)),
        }
        if batch * length <= LOOP_MOST * 8:
            functions["likelihood, one by one"] = torch.no_grad()(loop)
            functions["likelihood, gradient, one by one"] = training_step(layer, loop)
        if has_peer:
            functions["likelihood, celerite2"] = partial(peer.log_likelihood, x, t)
        if has_peer and batch * length <= LOOP_MOST:
            functions["posterior, celerite2"] = partial(peer.smooth, x, t)
        times = interleaved(functions, rounds, warm=1)
        rows = []
        for name in ("likelihood", "likelihood, gradient", "posterior"):
            row: Row = {"what": name, "batch": batch, "length": length, "ms": milliseconds(times[name])}
            for other in ("one by one", "celerite2"):
                rival = times.get(f"{name}, {other}")
                row["of_" + other.replace(" ", "_")] = ratio(times[name], rival) if rival else None
            rows.append(row)
        yield rows


def draw(report: dict[str, Any], machine: str) -> Any:
    """Draw milliseconds against the length."""
    figure, (axes,) = panels((6, 4))
    for name in dict.fromkeys(row["layer"] for row in report["layers"]):
        points = [(row["length"], row["ms"]) for row in report["layers"] if row["layer"] == name]
        axes.loglog(*zip(*points, strict=True), marker="o", label=name, base=2)
    axes.set(xlabel="samples", ylabel="forward and backward, ms", yscale="log")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return figure


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield all tables."""
    torch.manual_seed(0)
    sizes = TINY if options.quick else SIZES
    for measure, cases in zip((layers, ode_rnns, filters), sizes, strict=True):
        for rows in measure(cases, options.repeats):
            yield measure.__name__, rows


main = program(__doc__, "oscillators", measured, draw=draw, repeats=3, quick="tiny sizes, to see that it runs")


if __name__ == "__main__":
    main()
