"""Training steps of the paper's MNIST models: hbnode's solvers beside torchdiffeq's: ``python -m benchmarks.images``.

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
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hbnode
from benchmarks.harness import command, interleaved, milliseconds, ratio, write
from tasks.common.config import MODELS
from tasks.data.images import read_mnist
from tasks.image_classification import Classifier

BATCH = 64
PART = 8  # of the batch, for the errors: the reference keeps the graph of some hundred evaluations in float64
REFERENCE = 1e-6  # f is full of kinks, at which a tight solver takes ever smaller steps
BASELINES = (1e-4, 1e-5)
TOLERANCES = [digit * 10.0**-exponent for exponent in range(1, 6) for digit in (1, 0.3)]
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


def trained(name: str, steps: int) -> Classifier:
    """A model after some steps of training, at the paper's learning rate."""
    torch.manual_seed(0)
    model = Classifier(name, "mnist", rtol=1e-2, atol=1e-2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = images(BATCH * (steps + 1))
    for index in range(1, steps + 1):
        batch = slice(BATCH * index, BATCH * (index + 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model


def with_solver(model: Classifier, tol: float, solver: dict[str, object]) -> Classifier:
    """The same weights, solved otherwise."""
    model = copy.deepcopy(model)
    settings = {"method": None, "gradient": None, "adjoint_options": None} | solver
    for name, value in (settings | {"rtol": tol, "atol": tol}).items():
        setattr(model.block, name, value)
    return model


def step(model: Classifier, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A training step without the optimizer's part."""

    def run() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    return run


def errors(model: Classifier, x: Tensor, y: Tensor, tolerances: list[float]) -> list[tuple[float, float]]:
    """Errors of logits and gradient at each tolerance."""
    curve = hbnode.diagnostics.nfe_vs_tolerance(
        model,
        x,
        tolerances,
        loss=lambda logits: nn.functional.cross_entropy(logits, y),
        reference_tolerance=REFERENCE,
    )
    return list(zip(curve.error, curve.gradient_error, strict=True))


def compare(name: str, training: int, repeats: int) -> list[dict[str, object]]:
    """Rows for each baseline: itself, hbnode with as good a gradient, hbnode with as good logits too."""
    model = trained(name, training)
    x, y = images(BATCH)
    theirs = errors(with_solver(model, 1.0, PAPER), x[:PART], y[:PART], list(BASELINES))
    methods = {"hbnode": {}, "nystrom4": {"method": "nystrom4"}} if name == "hbnode" else {"hbnode": {}}
    found = {
        k: errors(with_solver(model, 1.0, solver), x[:PART], y[:PART], TOLERANCES) for k, solver in methods.items()
    }
    rows = []
    for tol, (logits, gradient) in zip(BASELINES, theirs, strict=True):
        chosen = {"dopri5, adjoint": (with_solver(model, tol, PAPER), tol, (logits, gradient))}
        for method, solver in methods.items():
            good = [i for i, error in enumerate(found[method]) if error[1] <= gradient]
            better = [i for i in good if found[method][i][0] <= logits]
            for what, indices in (("gradient", good), ("gradient, logits", better)):
                if indices:
                    at, error = TOLERANCES[indices[0]], found[method][indices[0]]
                    chosen[f"{method}, equal {what}"] = with_solver(model, at, solver), at, error
        times = interleaved({what: step(each, x, y) for what, (each, _, _) in chosen.items()}, repeats, warm=1)
        for what, (each, at, error) in chosen.items():
            row = {"model": name, "baseline": tol, "solver": what, "tolerance": at}
            row |= {"logits_error": error[0], "gradient_error": error[1], "ms": milliseconds(times[what])}
            row |= {"nfe_forward": each.block.nfe.forward, "nfe_backward": each.block.nfe.backward}
            rows.append(row | {"faster": ratio(times["dopri5, adjoint"], times[what])})
    return rows


COLUMNS = {
    "model": "<8",
    "solver": "<32",
    "tolerance": "9.0e",
    "logits_error": "12.1e",
    "gradient_error": "14.1e",
    "nfe_forward": "11d",
    "nfe_backward": "12d",
    "ms": "7.0f",
    "faster": "6.2f",
}


def main() -> None:
    """Time, print a row per model and baseline, write JSON."""
    parser = command(__doc__, "images")
    parser.add_argument("--models", nargs="+", default=("hbnode",), choices=MODELS)
    parser.add_argument("--training", type=int, default=20, help="steps of training before [20]")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds [5]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    widths = {name: int(form.lstrip("<").partition(".")[0].rstrip("d")) for name, form in COLUMNS.items()}
    print("  ".join(name.rjust(width) for name, width in widths.items()))
    for name in options.models:
        for row in compare(name, options.training, options.repeats):
            rows.append(row)
            print("  ".join(format(row[column], form) for column, form in COLUMNS.items()), flush=True)
    write(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
