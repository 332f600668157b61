"""Training steps of the paper's plane-vibration models beside torchdiffeq's adjoint: ``python -m benchmarks.ode_rnn``.

The same weights, as they are initialised and after some epochs of training, on the same batch of 64 segments with the
same loss, all at tolerance 1e-5. The baseline is torchdiffeq's dopri5 with odeint_adjoint in its default, full error
norm, which is what the paper ran, and with the seminorm; the gaps are in the field, for which both are right. Beside
them stand hbnode's default for an ODERNN, a step of its own for each sample; a common step; and both compiled. Errors
of the gradient are against hbnode's direct gradient in float64 at 1e-9, which the tests hold against torchdiffeq.

Times are medians of steps that take turns in one process, on one thread. Writes JSON with the machine in it. Without
the data in HBNODE_DATA the record is that of the generated structure.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hbnode
from benchmarks.harness import command, interleaved, milliseconds, ratio, write
from tasks.common.config import MODELS
from tasks.common.train import Samples
from tasks.data import f16
from tasks.plane_vibration import Forecaster, Splits, squared_errors

BATCH = 64
TOLERANCE = 1e-5
REFERENCE = 1e-9
ADJOINT = {"method": "dopri5", "gradient": "adjoint", "per_sample": False}
SOLVERS = {
    "odeint_adjoint": ADJOINT | {"adjoint_options": {}},
    "odeint_adjoint, seminorm": ADJOINT,
    "hbnode, a step per sample": {},
    "hbnode, a common step": {"per_sample": False},
    "hbnode, a step per sample, compiled": {"compile": True},
    "hbnode, a common step, compiled": {"per_sample": False, "compile": True},
}


def trained(name: str, splits: Splits, epochs: int) -> Forecaster:
    """A model after some epochs, trained as the task does."""
    torch.manual_seed(0)
    model = Forecaster(name, rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for parts in zip(*(part.split(BATCH) for part in splits.batches["train"]), strict=True):
            optimizer.zero_grad()
            squared_errors(model, parts)[0].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model


def with_solver(model: Forecaster, tol: float, solver: dict[str, object]) -> Forecaster:
    """The same weights, solved otherwise."""
    model = copy.deepcopy(model)
    settings = {"method": None, "gradient": "direct", "per_sample": True, "rtol": tol, "atol": tol} | solver
    model.rnn.settings = dataclasses.replace(model.rnn.settings, **settings)
    return model


def step(model: Forecaster, batch: Samples) -> Callable[[], None]:
    """A training step without the optimizer's part."""

    def run() -> None:
        model.zero_grad()
        squared_errors(model, batch)[0].backward()

    return run


def gradient(model: Forecaster, batch: Samples) -> tuple[Tensor, hbnode.nfe.NFE]:
    """The gradient of all parameters, and the evaluations that it took."""
    with hbnode.count_nfe(model) as nfe:
        step(model, batch)()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double(), nfe


def compare(name: str, splits: Splits, epochs: int, repeats: int, *, compiled: bool) -> list[dict[str, object]]:
    """A row for each way to solve one model."""
    model = trained(name, splits, epochs)
    batch = tuple(part[:BATCH] for part in splits.batches["train"])
    exact, _ = gradient(with_solver(model, REFERENCE, {}).double(), tuple(part.double() for part in batch))
    models = {
        what: with_solver(model, TOLERANCE, solver)
        for what, solver in SOLVERS.items()
        if compiled or "compile" not in solver
    }
    rows = []
    for what, each in models.items():
        found, nfe = gradient(each, batch)
        error = ((found - exact).norm() / exact.norm()).item()
        row = {"model": name, "epochs": epochs, "solver": what, "gradient_error": error}
        rows.append(row | {"nfe_forward": nfe.forward, "nfe_backward": nfe.backward})
    times = interleaved({what: step(each, batch) for what, each in models.items()}, repeats)
    full, seminorm, *_ = times.values()
    for row, mine in zip(rows, times.values(), strict=True):
        row["ms"] = milliseconds(mine)
        row["faster"] = ratio(full, mine)
        row["than_seminorm"] = ratio(seminorm, mine)
    return rows


COLUMNS = {
    "model": "<7",
    "epochs": "6d",
    "solver": "<35",
    "gradient_error": "14.1e",
    "nfe_forward": "11d",
    "nfe_backward": "12d",
    "ms": "7.0f",
    "faster": "6.1f",
    "than_seminorm": "13.1f",
}


def main() -> None:
    """Time, print a row per model and solver, write JSON."""
    parser = command(__doc__, "ode_rnn")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--training", type=int, nargs="+", default=(0, 5), help="epochs of training before [0 5]")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds [5]")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="compiled steps too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record, source = f16.read_plane_vibration()
    splits = Splits.from_record(record, "paper")
    print(f"data: {source}")
    widths = {name: int(form.lstrip("<").partition(".")[0].rstrip("d")) for name, form in COLUMNS.items()}
    print("  ".join(name.rjust(width) for name, width in widths.items()))
    rows = []
    for name in options.models:
        for epochs in options.training:
            for row in compare(name, splits, epochs, options.repeats, compiled=options.compiled):
                rows.append(row)
                print("  ".join(f"{row[key]:{form}}" for key, form in COLUMNS.items()), flush=True)
    write(options.out, {"rows": rows, "tolerance": TOLERANCE, "source": source})


if __name__ == "__main__":
    main()
