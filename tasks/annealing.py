"""Annealing: normalising constants of known densities by heavy-ball and by overdamped Langevin dynamics.

Paths lead from a standard normal prior to a target in 16, 64 or 256 evaluations of the gradient of its log density. The
mean of their log weights is a lower bound of log Z. The heavy ball is ``hbnode.distributions.HeavyBallAnnealing``. With
infinite damping it is annealed overdamped (unadjusted) Langevin dynamics, the baseline. Both are tuned by the best
bound over a grid of step sizes, and for the heavy ball also of dampings, with a seed of its own. Then Adam maximises
the bound over the step size of each dimension, the damping, the schedule and a small force network. The parameters with
the best bound for a second seed are tested with a third one.

Targets: the funnel in 10 dimensions of Neal, Slice sampling, Annals of Statistics 31 (2003), section 8, with log Z = 0;
many-well in 50 dimensions, 25 of the double wells of Midgley et al., Flow Annealed Importance Sampling Bootstrap,
arXiv:2208.01893, with log Z from one-dimensional quadrature; and Bayesian logistic regression on the breast cancer data
of scikit-learn, standardised, with an intercept and weights of prior N(0, 1). Its log Z is not known; the estimate with
the least standard error of the table replaces it.

The command writes ``annealing.csv``, ``annealing.json`` and ``annealing.png``.

    python -m tasks.annealing --evaluations 16,64 --out runs/annealing
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import hbnode
from hbnode.diagnostics._shared import ticks_of_short_axis
from hbnode.distributions import HeavyBallAnnealing
from tasks.common.config import Options, names_in, option, parse
from tasks.common.figures import line_style, panels
from tasks.common.run import write_study

logger = logging.getLogger("tasks.annealing")
STEP_SIZES = tuple(0.01 * 2 ** (index / 2) for index in range(14))  # 0.01 to 0.9
DAMPINGS = {"heavy ball": (0.25, 0.5, 1.0, 2.0, 4.0), "overdamped": (math.inf,)}
TUNING, CHOOSING, TESTING = 1, 2, 3  # seeds, to which 1000 times --seed is added
TITLES = {"funnel": "funnel, d = 10", "many_well": "many-well, d = 50", "cancer": "logistic regression, d = 31"}


class Target(NamedTuple):
    """A log density up to a constant, its dimension, and its log Z; None if it is not known."""

    log_prob: Callable[[Tensor], Tensor]
    dim: int
    log_z: float | None


# The targets


def funnel() -> Target:
    """x_0 ~ N(0, 9), and nine x_i ~ N(0, exp(x_0))."""

    def log_prob(x: Tensor) -> Tensor:
        v, rest = x[:, 0], x[:, 1:]
        log_rest = -0.5 * (rest.square().sum(1) * (-v).exp() + rest.shape[1] * (v + math.log(2 * math.pi)))
        return log_rest - 0.5 * (v.square() / 9 + math.log(2 * math.pi * 9))

    return Target(log_prob, 10, 0.0)


def many_well() -> Target:
    """25 pairs with log density -a⁴ + 6a² + a/2 - b²/2."""

    def well(a: Tensor) -> Tensor:
        square = a.square()
        return -square.square() + 6 * square + a / 2

    def log_prob(x: Tensor) -> Tensor:
        return (well(x[:, ::2]) - x[:, 1::2].square() / 2).sum(1)

    grid = torch.linspace(-6, 6, 100_001, dtype=torch.float64)
    log_pair = torch.trapezoid(well(grid).exp(), grid).log().item() + 0.5 * math.log(2 * math.pi)
    return Target(log_prob, 50, 25 * log_pair)


def cancer() -> Target:
    """Bayesian logistic regression on 569 tumours with 30 features."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    x = torch.tensor(features)
    x = (x - x.mean(0)) / x.std(0, correction=0)
    x = torch.cat([torch.ones(len(x), 1), x], 1).float()
    signed = x * (2 * torch.tensor(labels) - 1).float()[:, None]

    def log_prob(w: Tensor) -> Tensor:
        likelihood = nn.functional.logsigmoid(w @ signed.T).sum(1)
        return likelihood - 0.5 * (w.square().sum(1) + w.shape[1] * math.log(2 * math.pi))

    return Target(log_prob, x.shape[1], None)


TARGETS: dict[str, Callable[[], Target]] = {"funnel": funnel, "many_well": many_well, "cancer": cancer}


@dataclasses.dataclass(frozen=True)
class AnnealingOptions(Options):
    """Options of annealing."""

    positive = "batch_size lr"

    targets: str = option("all", f"{', '.join(TARGETS)}, with commas between, or all")
    evaluations: str = option("16,64,256", "several with commas between")
    iterations: int = option(200, "of training; 0 trains nothing")
    train_up_to: int = option(64, "largest number of evaluations with training")
    batch_size: int = option(64, "paths in an iteration")
    lr: float = option(0.02, "Adam's learning rate")
    paths: int = option(2000, "paths of a result; tuning uses an eighth of them", least=16)
    seed: int = option(0, "added to the seeds of tuning, choosing and testing")
    out: str = option("runs/annealing", "folder for the tables and the figure")

    def counts(self) -> list[int]:
        """Return the numbers of evaluations in ascending order."""
        return sorted({int(count) for count in self.evaluations.split(",")})

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        super().check()
        names_in(self.targets, tuple(TARGETS), "--targets")
        if not all(count.isdecimal() and int(count) for count in self.evaluations.split(",")):
            raise ValueError(f"--evaluations must be positive, with commas between, got {self.evaluations}")


# Tuning and training


class Force(nn.Module):
    """A small network for each coordinate, and one of all coordinates; the initial force is zero."""

    def __init__(self, dim: int, hidden: int = 8, joint: int = 32) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(-2, 2, hidden).repeat(dim, 1))
        self.shift = nn.Parameter(torch.randn(dim, hidden))
        self.drift = nn.Parameter(torch.randn(dim, hidden))
        self.weight = nn.Parameter(torch.zeros(dim, hidden))
        self.net = hbnode.nn.MLP(dim, [joint], dim, activation=nn.Tanh, time_dependent=True)
        for parameter in self.net.layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        """Return the force (n, d) at x (n, d)."""
        units = (x[..., None] * self.slope + self.shift + t * self.drift).tanh()
        return (units * self.weight).sum(-1) + self.net(t, x)


def annealing(target: Target, evaluations: int, step_size: float, damping: float) -> HeavyBallAnnealing:
    """Return the untrained sampler, with a standard normal prior."""
    prior = Independent(Normal(torch.zeros(target.dim), torch.ones(target.dim), validate_args=False), 1)
    return HeavyBallAnnealing(
        target.log_prob, prior, evaluations, step_size=torch.full((target.dim,), step_size), damping=damping
    )


def bound(model: HeavyBallAnnealing, paths: int, seed: int) -> float:
    """Return the bound; minus infinity if a path is not finite."""
    try:
        with torch.no_grad():
            return model.bound(paths, seed=seed).item()
    except hbnode.errors.NonFiniteError:
        return -math.inf


def tune(target: Target, sampler: str, evaluations: int, options: AnnealingOptions) -> HeavyBallAnnealing:
    """Return the best sampler of the grid."""
    seed = 1000 * options.seed + TUNING
    grid = itertools.product(STEP_SIZES, DAMPINGS[sampler])
    models = [annealing(target, evaluations, step_size, damping) for step_size, damping in grid]
    bounds = [bound(model, options.paths // 8, seed) for model in models]
    best = max(range(len(models)), key=bounds.__getitem__)
    if bounds[best] == -math.inf:
        raise SystemExit(f"{sampler} with {evaluations} evaluations: no step size of the grid has finite paths")
    return models[best]


def train(model: HeavyBallAnnealing, options: AnnealingOptions) -> HeavyBallAnnealing:
    """Return the sampler with a force, trained on the bound, with the parameters of the best bound for another seed."""
    seed = 1000 * options.seed + CHOOSING
    torch.manual_seed(seed)
    model = HeavyBallAnnealing(
        model.log_prob,
        model.prior,
        model.steps,
        step_size=model.step_size.detach(),
        damping=model.damping.item(),
        force=Force(model.dim),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    best, best_state = bound(model, options.paths // 8, seed), copy.deepcopy(model.state_dict())
    for iteration in range(1, options.iterations + 1):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (1 + math.cos(math.pi * (iteration - 1) / options.iterations)) / 2
        optimizer.zero_grad()
        try:
            (-model.bound(options.batch_size)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0, error_if_nonfinite=True)
        except RuntimeError as error:  # paths or gradients are not finite
            logger.info("iteration %d: %s", iteration, error)
            model.load_state_dict(best_state)
            continue
        optimizer.step()
        if iteration % 10 == 0 and (now := bound(model, options.paths // 8, seed)) > best:
            best, best_state = now, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)
    return model


def result(model: HeavyBallAnnealing, options: AnnealingOptions) -> dict[str, float | None]:
    """Return the bound, the estimate of log Z and their errors for the seed of tests."""
    seed = 1000 * options.seed + TESTING
    _, log_weight = model.sample(options.paths, seed=seed)
    estimate, error = model.log_z(options.paths, seed=seed)
    return {
        "bound": log_weight.mean().item(),
        "bound_error": log_weight.std().item() / math.sqrt(options.paths),
        "log_z_estimate": estimate.item(),
        "log_z_error": error.item(),
        "step_size": model.step_size.mean().item(),
        "damping": model.damping.item() if model.damping.isfinite() else None,
    }


def measure(name: str, sampler: str, evaluations: int, options: AnnealingOptions) -> list[dict[str, Any]]:
    """Return the rows of one sampler with one number of evaluations."""
    start = time.process_time()
    target = TARGETS[name]()
    about = {"target": name, "sampler": sampler, "evaluations": evaluations}
    model = tune(target, sampler, evaluations, options)
    rows = [{**about, "trained": False, **result(model, options), "seconds": time.process_time() - start}]
    if options.iterations and evaluations <= options.train_up_to:
        model = train(model, options)
        rows.append({**about, "trained": True, **result(model, options), "seconds": time.process_time() - start})
    return rows


def reference(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the log Z of a target and its standard error: exact, or the estimate with the least error."""
    exact = TARGETS[name]().log_z
    if exact is not None:
        return exact, 0.0
    best = min(rows, key=lambda row: row["log_z_error"])
    return best["log_z_estimate"], best["log_z_error"]


# The figure


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw log Z minus the bound against evaluations, a panel for each target."""
    names = list(dict.fromkeys(row["target"] for row in rows))
    kinds = list(itertools.product(DAMPINGS, (False, True)))
    with panels(path, 1, len(names), size=(2 + 3.6 * len(names), 3.6)) as (_, axes):
        for ax, name in zip(axes[0], names, strict=True):
            for index, (sampler, is_trained) in enumerate(kinds):
                kind = name, sampler, is_trained
                found = [row for row in rows if (row["target"], row["sampler"], row["trained"]) == kind]
                x, y = [row["evaluations"] for row in found], [-row["gap"] for row in found]
                style = line_style(index, len(kinds), len(x)) | {"color": f"C{list(DAMPINGS).index(sampler)}"}
                label, line = f"{sampler}, {'trained' if is_trained else 'untrained'}", "-" if is_trained else "--"
                ax.errorbar(x, y, [row["bound_error"] for row in found], ls=line, label=label, **style)
            ticks = sorted({row["evaluations"] for row in rows})
            ax.set(xscale="log", yscale="log", title=TITLES[name], xlabel="evaluations of the gradient")
            ax.set_xticks(ticks, [str(tick) for tick in ticks])
            ax.minorticks_off()
            ticks_of_short_axis(ax.yaxis)
        axes[0, 0].set_ylabel("log Z − bound")


# The command


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every sampler, print and write the results, and draw them."""
    options = parse(AnnealingOptions, {}, __doc__, argv)
    out = Path(options.out)
    rows: list[dict[str, Any]] = []
    for name in names_in(options.targets, tuple(TARGETS), "--targets"):
        pairs = itertools.product(options.counts(), DAMPINGS)
        measured = [row for count, sampler in pairs for row in measure(name, sampler, count, options)]
        log_z, error = reference(name, measured)
        print(f"{TITLES[name]}: log Z = {log_z:.3f}" + (f" ± {error:.3f}, estimated" if error else ""))
        for row in measured:
            gaps = {"gap": row["bound"] - log_z, "estimate_gap": row["log_z_estimate"] - log_z}
            rows.append({**row, "log_z": log_z, "log_z_reference_error": error, **gaps})
            kind = f"{row['sampler']}, {row['evaluations']} evaluations, {'trained' if row['trained'] else 'untrained'}"
            print(f"  {kind}: bound − log Z {rows[-1]['gap']:.2f} ± {row['bound_error']:.2f}")
    write_study(out, "annealing", rows, task="annealing")
    draw(rows, out / "annealing.png")
    print(f"written: {out / 'annealing.csv'}, {out / 'annealing.png'}")


if __name__ == "__main__":
    main()
