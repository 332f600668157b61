"""Training steps of the paper's HBNODE on MNIST with hbnode and with torchdiffeq: ``python -m benchmarks.images``.

The same weights, after some training, on the same batch. The baseline is what the paper ran, dopri5 and its adjoint
under the full error norm, at the tolerance of the MNIST experiment (1e-4) and at that of figure 6 (1e-5). Beside it
stand hbnode's defaults, at the loosest tolerance of a grid at which the gradient, which is what training sees, is no
less exact than the baseline's, and at the loosest at which the logits are not either; for HBNODE also nystrom4 at all
tolerances, because f has kinks, at which a high order pays less than the defaults expect. Errors are against float64
and a tight tolerance, on a part of the batch.

Times are medians of steps that take turns in one process, on one thread. Writes JSON with the machine in it. MNIST
comes from HBNODE_DATA; without it the images are noise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import hbnode
from benchmarks.harness import Row, command, interleaved, milliseconds, ratio, run, training_step
from tasks.data.images import read_mnist
from tasks.image_classification import Classifier

BATCH = 64
PART = 8  # of the batch, for the errors: the reference keeps the graph of some hundred evaluations in float64
REFERENCE = 1e-6  # f is full of kinks, at which a tight solver takes ever smaller steps
BASELINES = (1e-4, 1e-5)
TOLERANCES = [digit * 10.0**-exponent for exponent in range(1, 6) for digit in (1, 0.3)]
TRAINING = 20  # steps before
METHODS: dict[str, Row] = {"hbnode": {}, "nystrom4": {"method": "nystrom4"}}
PAPER = {"method": "dopri5", "gradient": "adjoint", "adjoint_options": {}}


def images(count: int) -> tuple[Tensor, Tensor]:
    """MNIST's first test images, or noise."""
    try:
        x, y = read_mnist("test")
    except FileNotFoundError:
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(count, 1, 28, 28, generator=generator)
        y = torch.randint(10, (count,), generator=generator)
        print("no MNIST: the images are noise")
    return x[:count], y[:count]


def loss(model: Classifier, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy."""
    return nn.functional.cross_entropy(model(x), y)


def trained(steps: int) -> Classifier:
    """HBNODE after some steps of training, at the paper's learning rate."""
    torch.manual_seed(0)
    model = Classifier("hbnode", "mnist", rtol=1e-2, atol=1e-2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = images(BATCH * (steps + 1))
    for index in range(1, steps + 1):
        batch = slice(BATCH * index, BATCH * (index + 1))
        training_step(model, partial(loss, model, x[batch], y[batch]))()
        optimizer.step()
    return model


def with_solver(model: Classifier, tol: float, solver: dict[str, object]) -> Classifier:
    """The same weights, solved otherwise."""
    model = copy.deepcopy(model)
    settings = {"method": None, "gradient": None, "adjoint_options": None} | solver
    for name, value in (settings | {"rtol": tol, "atol": tol}).items():
        setattr(model.block, name, value)
    return model


def errors(model: Classifier, solver: Row, tolerances: Sequence[float]) -> list[tuple[float, float]]:
    """Errors of logits and gradient at each tolerance."""
    x, y = images(PART)
    criterion = partial(nn.functional.cross_entropy, target=y)
    curve = hbnode.diagnostics.nfe_vs_tolerance(
        with_solver(model, 1.0, solver), x, tolerances, loss=criterion, reference_tolerance=REFERENCE
    )
    return list(zip(curve.error, curve.gradient_error, strict=True))


def measured(repeats: int) -> Iterator[tuple[str, list[Row]]]:
    """Rows for each baseline: itself, hbnode with as good a gradient, hbnode with as good logits too."""
    model = trained(TRAINING)
    x, y = images(BATCH)
    found = {name: errors(model, solver, TOLERANCES) for name, solver in METHODS.items()}
    for tol, (logits, gradient) in zip(BASELINES, errors(model, PAPER, BASELINES), strict=True):
        chosen = {"dopri5, adjoint": (with_solver(model, tol, PAPER), tol, (logits, gradient))}
        for method, solver in METHODS.items():
            good = [i for i, error in enumerate(found[method]) if error[1] <= gradient]
            better = [i for i in good if found[method][i][0] <= logits]
            for what, indices in (("gradient", good), ("gradient, logits", better)):
                if indices:
                    at, error = TOLERANCES[indices[0]], found[method][indices[0]]
                    chosen[f"{method}, equal {what}"] = with_solver(model, at, solver), at, error
        steps = {what: training_step(each, partial(loss, each, x, y)) for what, (each, _, _) in chosen.items()}
        times = interleaved(steps, repeats, warm=1)
        rows = []
        for what, (each, at, error) in chosen.items():
            row = {"model": "hbnode", "baseline": tol, "solver": what, "tolerance": at}
            row |= {"logits_error": error[0], "gradient_error": error[1]}
            row |= {"nfe_forward": each.block.nfe.forward, "nfe_backward": each.block.nfe.backward}
            rows.append(row | {"ms": milliseconds(times[what]), "faster": ratio(times["dopri5, adjoint"], times[what])})
        yield "rows", rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Time, print a row per baseline and solver, write JSON."""
    options = command(__doc__, "images", repeats=5).parse_args(arguments)
    run(options, measured(options.repeats))


if __name__ == "__main__":
    main()
