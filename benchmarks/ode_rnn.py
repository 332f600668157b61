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

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import hbnode
from benchmarks import harness
from benchmarks.harness import Options, Row, interleaved, milliseconds, program, ratio, training_step
from tasks.common.config import MODELS
from tasks.data import f16
from tasks.plane_vibration import Forecaster, Splits, squared_errors

BATCH = 64
TOLERANCE = 1e-5
EPOCHS = (0, 5)  # of training before
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
    """Return a model after some epochs of the task's training."""
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
    """Return a model with the same weights and another solver."""
    model = copy.deepcopy(model)
    settings = {"method": None, "gradient": "direct", "per_sample": True, "rtol": tol, "atol": tol} | solver
    model.rnn.settings = dataclasses.replace(model.rnn.settings, **settings)
    return model


def compare(name: str, splits: Splits, epochs: int, repeats: int) -> list[Row]:
    """Yield a row for each way to solve one model."""
    model = trained(name, splits, epochs)
    batch = tuple(part[:BATCH] for part in splits.batches["train"])
    models = {what: with_solver(model, TOLERANCE, solver) for what, solver in SOLVERS.items()}
    steps = {
        what: training_step(each, lambda each=each: squared_errors(each, batch)[0]) for what, each in models.items()
    }
    exact, wide = with_solver(model, REFERENCE, {}).double(), tuple(part.double() for part in batch)
    wanted = harness.gradient(training_step(exact, lambda: squared_errors(exact, wide)[0]), exact.parameters())
    rows = []
    for what, each in models.items():
        with hbnode.count_nfe(each) as nfe:
            error = harness.relative(harness.gradient(steps[what], each.parameters()), wanted)
        row = {"model": name, "epochs": epochs, "solver": what, "gradient_error": error}
        rows.append(row | {"nfe_forward": nfe.forward, "nfe_backward": nfe.backward})
    times = interleaved(steps, repeats)
    full, seminorm, *_ = times.values()
    for row, mine in zip(rows, times.values(), strict=True):
        row |= {"ms": milliseconds(mine), "faster": ratio(full, mine), "than_seminorm": ratio(seminorm, mine)}
    return rows


def measured(options: Options) -> Iterator[tuple[str, Any]]:
    """Yield the rows for each model, untrained and trained."""
    record, source = f16.read_plane_vibration()
    splits = Splits.from_record(record, "paper")
    yield "tolerance", TOLERANCE
    yield "source", source
    for name in MODELS:
        for epochs in EPOCHS:
            yield "rows", compare(name, splits, epochs, options.repeats)


main = program(__doc__, "ode_rnn", measured, repeats=5)


if __name__ == "__main__":
    main()
