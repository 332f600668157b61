"""Numerical errors of reversible gradients, of the delta-rule memory in float32, and of the oscillators' likelihood.

``reversible.csv`` is measured on an HBNODE whose f is a tanh network of 64 features, with batch size 64, T = 10, fixed
steps and float64. For each gradient method it contains the relative error of the gradient by input and parameters,
compared with "direct" and the same solver. It also contains the memory in MiB that is stored for the backward pass.

``memory.csv`` compares :func:`hbnode.nn.functional.heavy_ball_memory` in float32 with its recurrence in float64, for
several decay factors per step. "divided keys" is the chunkwise form of gated linear attention in section 4 of
arXiv:2312.06635, without delta rule and with the same chunks of 64 steps. It multiplies queries by the cumulative decay
and divides keys by it.

``likelihood.csv`` contains the log-likelihood of one channel at random times under three noisy oscillators in float64.
It is computed by ``hbnode.nn.Oscillators(noise=True)`` and by celerite2 with the same kernel, a sum of three SHOTerms.
The relative error uses celerite2 as the reference; the file is not written if celerite2 is not installed. All
measurements are deterministic and take seconds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import hbnode
from tasks.common.config import Options, option, parse
from tasks.common.run import write_study

STEPS = (32, 128, 512)
GRADIENTS = {
    "leapfrog, reversible": ("leapfrog", "reversible"),
    "blanes_moan4, reversible": ("blanes_moan4", "reversible"),
    "blanes_moan4, checkpoint": ("blanes_moan4", "checkpoint"),
    "blanes_moan4, direct": ("blanes_moan4", "direct"),
}
DECAYS = (1.0, 0.9, 0.5, 0.3, 0.1, 0.01, 0.0)
LENGTH, HEADS, FEATURES, CHUNK = 256, 4, 16, 64
# three oscillators: frequency in rad per unit of time, damping ratio, standard deviation; then the observation noise
OMEGA, ZETA, SIGMA, NOISE = (0.3, 1.1, 4.0), (0.05, 0.7, 3.0), (1.0, 0.5, 0.8), 0.05
SAMPLES = (100, 1000, 10_000)
Row = dict[str, object]


@dataclasses.dataclass(frozen=True)
class ExactnessOptions(Options):
    """Command-line options of the study."""

    seed: int = option(0, "random seed")
    out: str = option("runs/exactness", "folder for the tables")


class Living(TorchDispatchMode):
    """Record the storages that operations create. ``size()`` is the bytes of those still alive, without ``known``."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def size(self) -> int:
        """Return the number of bytes in recorded storages that are still alive."""
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def gradients(method: Any, gradient: Any, steps: int) -> tuple[Tensor, float]:
    """Return the gradient of |h(10)|^2 by input and parameters as a vector, and the MiB stored for backward."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
    block = hbnode.ODEBlock(hbnode.HBNODE(net), method=method, gradient=gradient, steps=steps)
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with Living() as living:
        loss = block(x, [0.0, 10.0])[-1].square().sum()
        stored = living.size()
    found = torch.autograd.grad(loss, (x, *block.parameters()))
    return torch.cat([part.flatten() for part in found]), stored / 2**20


def reversible() -> list[Row]:
    """Return the rows of ``reversible.csv``."""
    rows: list[Row] = []
    for steps in STEPS:
        exact = {method: gradients(method, "direct", steps)[0] for method, _ in GRADIENTS.values()}
        for name, (method, gradient) in GRADIENTS.items():
            found, stored = gradients(method, gradient, steps)
            error = (found - exact[method]).norm() / exact[method].norm()
            rows.append({"model": name, "steps": steps, "gradient_error": error.item(), "stored_mib": stored})
    return rows


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: float, momentum: float, *, delta: bool) -> Tensor:
    """Return the memory's outputs, computed step by step with the equations of ``heavy_ball_memory``."""
    memory = q.new_zeros(*q.shape[:2], FEATURES, FEATURES)
    velocity, outputs = memory, []
    for q_t, k_t, v_t in zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True):
        memory = decay * memory
        error = v_t - (memory * k_t[..., None]).sum(-2) if delta else v_t
        velocity = momentum * velocity + k_t[..., None] * error[..., None, :]
        memory = memory + (1 - momentum) * velocity
        outputs.append((memory * q_t[..., None]).sum(-2))
    return torch.stack(outputs, 2)


def divided_keys(q: Tensor, k: Tensor, v: Tensor, decay: float) -> Tensor:
    """Return chunkwise gated linear attention with queries multiplied, and keys divided, by the cumulative decay."""
    cumulative = q.new_tensor(decay) ** torch.arange(1, CHUNK + 1, dtype=q.dtype)
    memory, outputs = q.new_zeros(*q.shape[:2], FEATURES, FEATURES), []
    for q_c, k_c, v_c in zip(q.split(CHUNK, 2), k.split(CHUNK, 2), v.split(CHUNK, 2), strict=True):
        multiplied, divided = q_c * cumulative[:, None], k_c / cumulative[:, None]
        outputs.append((multiplied @ divided.mT).tril() @ v_c + multiplied @ memory)
        memory = cumulative[-1] * (memory + divided.mT @ v_c)
    return torch.cat(outputs, 2)


def memory(seed: int) -> list[Row]:
    """Return the rows of ``memory.csv``."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
    k = nn.functional.normalize(k, dim=-1)
    single = (q.float(), k.float(), v.float())
    rows: list[Row] = []
    for decay in DECAYS:
        log_decay = math.log(decay) if decay else -math.inf
        for model, momentum, delta in (
            ("gated delta rule", 0.0, True),
            ("heavy-ball memory", 0.5, True),
            ("gated linear attention", 0.0, False),
            ("divided keys", 0.0, False),
        ):
            exact = recurrence(q, k, v, decay, momentum, delta=delta)
            if model == "divided keys":
                found = divided_keys(*single, decay)
            else:
                log_momentum = math.log(momentum) if momentum else None
                found = hbnode.nn.functional.heavy_ball_memory(
                    *single,
                    log_momentum=log_momentum,
                    log_decay=log_decay,
                    delta="decayed" if delta else False,
                    chunk_size=CHUNK,
                )
            error = ((found.double() - exact).norm() / exact.norm()).item()
            rows.append({"model": model, "decay": f"{decay:g}", "relative_error": error})
    return rows


def likelihood(seed: int) -> list[Row]:
    """Return the rows of ``likelihood.csv``, or an empty list if celerite2 is not installed."""
    if importlib.util.find_spec("celerite2") is None:
        return []
    celerite2 = importlib.import_module("celerite2")
    omega, zeta, sigma = torch.tensor([OMEGA, ZETA, SIGMA], dtype=torch.float64)
    layer = hbnode.nn.Oscillators(1, 1, len(OMEGA), noise=True).double()
    layer.load_state_dict(
        layer.state_dict()
        | {
            "log_stiffness": 2 * omega.log(),
            "log_damping": (2 * zeta * omega).log(),
            "log_spread": sigma.log(),
            "log_observation_noise": torch.tensor([NOISE], dtype=torch.float64).log(),
            "weight_out": torch.tensor([[0.0] * len(OMEGA) + [1.0] * len(OMEGA)]),  # adds the displacements
        }
    )
    terms = [celerite2.terms.SHOTerm(sigma=s, w0=w, Q=0.5 / z) for s, w, z in zip(SIGMA, OMEGA, ZETA, strict=True)]
    peer = celerite2.GaussianProcess(celerite2.terms.TermSum(*terms), mean=0.0)
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    for samples in SAMPLES:
        t = (torch.rand(samples, generator=generator, dtype=torch.float64) + 0.01).cumsum(0)
        x = torch.randn(samples, generator=generator, dtype=torch.float64)
        peer.compute(t.numpy(), diag=torch.full_like(t, NOISE**2).numpy())
        exact = float(peer.log_likelihood(x.numpy()))
        with torch.no_grad():
            ours = layer.log_likelihood(x.view(1, -1, 1), t).item()
        for model, found in (("Oscillators(noise=True)", ours), ("celerite2", exact)):
            error = abs(found - exact) / abs(exact)
            rows.append({"model": model, "samples": samples, "log_likelihood": found, "relative_error": error})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run all measurements and write the tables."""
    options = parse(ExactnessOptions, {}, __doc__, argv)
    out, about = Path(options.out), {"task": "exactness", **dataclasses.asdict(options)}
    seed = options.seed
    for name, rows in (("reversible", reversible()), ("memory", memory(seed)), ("likelihood", likelihood(seed))):
        if not rows:
            print("no likelihood: celerite2 is not installed. Fix: pip install celerite2.")
            continue
        write_study(out, name, rows, **about)
        print(*rows, sep="\n")


if __name__ == "__main__":
    main()
