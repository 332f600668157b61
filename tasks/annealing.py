"""Annealing: normalising constants of known densities by heavy-ball and by overdamped Langevin dynamics.

Paths lead from a standard normal prior to a target in 16, 64 or 256 evaluations of the gradient of its log density. The
mean of their log weights is a lower bound of log Z. The heavy ball is ``hbnode.distributions.HeavyBallAnnealing``; with
infinite damping it is annealed overdamped (unadjusted) Langevin dynamics, the baseline. Both are tuned alike: the best
bound over a grid of step sizes, for the heavy ball times dampings, on a seed of its own. Then both are trained alike
from there: step size of each dimension, damping, schedule and a small force network, by Adam on the bound. Those
parameters are kept that have the best bound on another seed. Results are of a third seed.

Targets: the funnel in 10 dimensions of Neal, Slice sampling, Annals of Statistics 31 (2003), section 8, with log Z = 0;
many-well in 50 dimensions, 25 of the double wells of Midgley et al., Flow Annealed Importance Sampling Bootstrap,
arXiv:2208.01893, with log Z from one-dimensional quadrature; and Bayesian logistic regression on the breast cancer data
of scikit-learn, standardised, with an intercept and weights of prior N(0, 1). Its log Z is not known. In
its place is the estimate of least standard error among all that are in the table.

What is finished is skipped, so that the command can be ended and given again. It prints the table and writes
``annealing.md``, ``annealing.csv`` and ``annealing.png``.

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
from tasks.common.config import Options, option, parse
from tasks.common.figures import line_style, panels
from tasks.common.files import markdown, read_json, write_json, write_table, write_whole
from tasks.common.run import environment

logger = logging.getLogger("tasks.annealing")
STEP_SIZES = tuple(0.01 * 2 ** (index / 2) for index in range(14))  # 0.01 to 0.9
DAMPINGS = {"heavy ball": (0.25, 0.5, 1.0, 2.0, 4.0), "overdamped": (math.inf,)}
TUNING, CHOOSING, TESTING = 1, 2, 3  # seeds, to which --seed adds thousands
KEPT = ("seed", "paths", "iterations", "batch_size", "lr", "train_up_to")  # options that change the numbers
TITLES = {"funnel": "funnel, d = 10", "many_well": "many-well, d = 50", "cancer": "logistic regression, d = 31"}


class Target(NamedTuple):
    """A log density up to a constant, its dimension, and its log Z where that is known."""

    log_prob: Callable[[Tensor], Tensor]
    dim: int
    log_z: float | None


# The targets


def funnel() -> Target:
    """x_0 ~ N(0, 9), and nine x_i ~ N(0, exp(x_0))."""

    def log_prob(x: Tensor) -> Tensor:
        v, rest = x[:, 0], x[:, 1:]
        of_rest = -0.5 * (rest.square().sum(1) * (-v).exp() + rest.shape[1] * (v + math.log(2 * math.pi)))
        return of_rest - 0.5 * (v.square() / 9 + math.log(2 * math.pi * 9))

    return Target(log_prob, 10, 0.0)


def many_well() -> Target:
    """25 pairs with log density -a⁴ + 6a² + a/2 - b²/2."""

    def well(a: Tensor) -> Tensor:
        square = a.square()
        return -square.square() + 6 * square + a / 2

    def log_prob(x: Tensor) -> Tensor:
        return (well(x[:, ::2]) - x[:, 1::2].square() / 2).sum(1)

    grid = torch.linspace(-6, 6, 100_001, dtype=torch.float64)
    of_pair = torch.trapezoid(well(grid).exp(), grid).log().item() + 0.5 * math.log(2 * math.pi)
    return Target(log_prob, 50, 25 * of_pair)


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
    train_up_to: int = option(64, "evaluations beyond which nothing is trained")
    batch_size: int = option(64, "paths in an iteration")
    lr: float = option(0.02, "Adam's learning rate")
    paths: int = option(2000, "paths of a result; an eighth of it to choose by", least=16)
    seed: int = option(0, "to which the seeds of tuning, choosing and testing are added")
    out: str = option("runs/annealing", "folder for the tables and the figure")

    def chosen_targets(self) -> list[str]:
        """Return the targets' names."""
        return list(TARGETS) if self.targets == "all" else self.targets.split(",")

    def counts(self) -> list[int]:
        """Return the numbers of evaluations, growing."""
        return sorted({int(count) for count in self.evaluations.split(",")})

    def check(self) -> None:
        """Refuse options that no run can have."""
        super().check()
        unknown = [name for name in self.chosen_targets() if name not in TARGETS]
        if unknown:
            raise ValueError(f"argument --targets: {unknown[0]!r} is not one of {', '.join(TARGETS)}")
        if not all(count.isdecimal() and int(count) for count in self.evaluations.split(",")):
            raise ValueError(f"--evaluations must be positive, with commas between, got {self.evaluations}")


# Tuning and training


class Force(nn.Module):
    """A small network for each coordinate, and one of all of them: zero before they are trained."""

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
        of_each = (x[..., None] * self.slope + self.shift + t * self.drift).tanh()
        return (of_each * self.weight).sum(-1) + self.net(t, x)


def annealing(target: Target, evaluations: int, step_size: float, damping: float) -> HeavyBallAnnealing:
    """Untrained paths from a standard normal prior."""
    prior = Independent(Normal(torch.zeros(target.dim), torch.ones(target.dim), validate_args=False), 1)
    return HeavyBallAnnealing(
        target.log_prob, prior, evaluations, step_size=torch.full((target.dim,), step_size), damping=damping
    )


def bound(model: HeavyBallAnnealing, paths: int, seed: int) -> float:
    """Return the bound without a graph; minus infinity if a path is not finite."""
    try:
        with torch.no_grad():
            return model.bound(paths, seed=seed).item()
    except hbnode.errors.NonFiniteError:
        return -math.inf


def tune(target: Target, sampler: str, evaluations: int, options: AnnealingOptions) -> HeavyBallAnnealing:
    """Return the best of the grid."""
    seed = 1000 * options.seed + TUNING
    grid = itertools.product(STEP_SIZES, DAMPINGS[sampler])
    models = [annealing(target, evaluations, step_size, damping) for step_size, damping in grid]
    bounds = [bound(model, options.paths // 8, seed) for model in models]
    best = max(range(len(models)), key=bounds.__getitem__)
    if bounds[best] == -math.inf:
        raise SystemExit(f"{sampler} with {evaluations} evaluations: no step size of the grid has finite paths")
    return models[best]


def train(model: HeavyBallAnnealing, options: AnnealingOptions) -> HeavyBallAnnealing:
    """Return the same with a force, trained on the bound; what has the best bound on a seed of its own is kept."""
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
    best, kept = bound(model, options.paths // 8, seed), copy.deepcopy(model.state_dict())
    for iteration in range(1, options.iterations + 1):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (1 + math.cos(math.pi * (iteration - 1) / options.iterations)) / 2
        optimizer.zero_grad()
        try:
            (-model.bound(options.batch_size)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0, error_if_nonfinite=True)
        except RuntimeError as error:  # paths or gradients that are not finite
            logger.info("iteration %d: %s", iteration, error)
            model.load_state_dict(kept)
            continue
        optimizer.step()
        if iteration % 10 == 0 and (now := bound(model, options.paths // 8, seed)) > best:
            best, kept = now, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return model


def result(model: HeavyBallAnnealing, options: AnnealingOptions) -> dict[str, float | None]:
    """Bound, estimate of log Z and their errors, on a seed that nothing was chosen by."""
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
    """Return the rows of one sampler with one number of evaluations, from disk if they are there."""
    path = Path(options.out) / f"{name}-{sampler.replace(' ', '-')}-{evaluations}.json"
    wanted = {key: getattr(options, key) for key in KEPT}
    if path.exists():
        found = read_json(path)
        if found["options"] != wanted:
            raise SystemExit(f"{path} has other options: {found['options']}. Fix: --out another-folder, or delete it.")
        rows: list[dict[str, Any]] = found["rows"]
        return rows
    start = time.process_time()
    target = TARGETS[name]()
    about = {"target": name, "sampler": sampler, "evaluations": evaluations}
    model = tune(target, sampler, evaluations, options)
    rows = [{**about, "trained": False, **result(model, options), "seconds": time.process_time() - start}]
    if options.iterations and evaluations <= options.train_up_to:
        model = train(model, options)
        rows.append({**about, "trained": True, **result(model, options), "seconds": time.process_time() - start})
    write_json(path, {"options": wanted, "rows": rows, **environment(torch.device("cpu"))})
    for row in rows:
        print(f"{TITLES[name]}, {sampler}, {evaluations}, {stage(row)}: bound {row['bound']:.2f}", flush=True)
    return rows


def reference(name: str, rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the log Z of a target and its standard error: exact, or the estimate that has the least error."""
    exact = TARGETS[name]().log_z
    if exact is not None:
        return exact, 0.0
    best = min(rows, key=lambda row: row["log_z_error"])
    return best["log_z_estimate"], best["log_z_error"]


# The table and the figure


def stage(row: Mapping[str, Any]) -> str:
    """Return whether a row is of a trained sampler, in words."""
    return "trained" if row["trained"] else "untrained"


def table_row(row: Mapping[str, Any]) -> dict[str, object]:
    """Return a row of the printed table: bound minus log Z, and the error of the estimate of log Z."""
    return {
        "target": TITLES[row["target"]],
        "sampler": row["sampler"],
        "": stage(row),
        "evaluations": row["evaluations"],
        "step size": f"{row['step_size']:.3g}",
        "damping": "∞" if row["damping"] is None else f"{row['damping']:.3g}",
        "bound − log Z": f"{row['gap']:.2f} ± {row['bound_error']:.2f}",
        "estimate − log Z": f"{row['estimate_gap']:.2f} ± {row['log_z_error']:.2f}",
        "CPU s": f"{row['seconds']:.0f}",
    }


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The gap of the bound, log Z minus it, against evaluations, a panel for each target."""
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
    """Measure what is not measured yet; print and write the table, and draw it."""
    options = parse(AnnealingOptions, {}, __doc__, argv)
    out = Path(options.out)
    rows: list[dict[str, Any]] = []
    for name in options.chosen_targets():
        pairs = itertools.product(options.counts(), DAMPINGS)
        measured = [row for count, sampler in pairs for row in measure(name, sampler, count, options)]
        log_z, error = reference(name, measured)
        print(f"{TITLES[name]}: log Z = {log_z:.3f}" + (f" ± {error:.3f}, estimated" if error else ""))
        for row in measured:
            gaps = {"gap": row["bound"] - log_z, "estimate_gap": row["log_z_estimate"] - log_z}
            rows.append({**row, "log_z": log_z, "log_z_reference_error": error, **gaps})
    text = markdown([table_row(row) for row in rows])
    print(text)
    write_whole(out / "annealing.md", (text + "\n").encode())
    write_table(out / "annealing.csv", rows)
    draw(rows, out / "annealing.png")
    print("written: " + ", ".join(str(out / f"annealing.{end}") for end in ("md", "csv", "png")))


if __name__ == "__main__":
    main()
