"""The heavy-ball SDE solved by hbnode, torchsde and diffrax: ``python -m benchmarks.sde``.

Four tables. The strong error against the evaluations of f, all methods on the same Brownian paths, and the evaluations
to an error of 1e-3. The time of a solve to that error, and to 1e-5. The time of a step. The gradient against
backpropagation through the same steps, with the bytes that are kept for it.

diffrax's solvers for underdamped Langevin dynamics, ALIGN, ShOULD and QUICSORT, run under jit if it is installed
(``pip install 'hbnode[bench]'``). They get W, L and K of each step of the same paths for the errors. For the times they
draw all their noise in one call before the steps, into a path class of this file. diffrax's own motion that allows
gradients, ``VirtualBrownianTree``, is measured as "diffrax tree", at an error of 1e-3.

torchsde's ``srk`` has two forms. With noise_type "additive", as HeavyBallSDE declares it, a step calls f three times;
with "diagonal", where the noise on h is 0, ten times.

In the times torchsde is called directly, with the SDE written for it, and with a Brownian motion that is told the step;
without, its steps take longer. Times are medians of processor time of runs that take turns in one process, on one
thread. Writes a JSON file, which includes a description of the machine, and a figure.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torchsde
from torch import Tensor, nn

import hbnode
from benchmarks.contenders import calls_of, jax_arrays, jax_layers, jax_network, rival
from benchmarks.harness import MISSING, Options, Row, interleaved, milliseconds, panels, program, ratio, relative
from hbnode.solve import BrownianIncrements
from hbnode.solve.sde import linear_part
from tasks.studies.exactness import Living

SPAN, DAMPING, TEMPERATURE = 4.0, 1.0, 0.5
VARIANCES = (1.0, 1 / 12, 1 / 720)  # of W, L and K in a step of size 1
WANTED, FINE = 1e-3, 1e-5
AT_REST, RANDOM, NETWORK = "at rest in a well", "h, m ~ N(0, 1)", "network"
STARTS = (AT_REST, RANDOM, NETWORK)
DIFFRAX = {"ALIGN": 1, "ShOULD": 2, "QUICSORT": 2}  # evaluations of f in a step
FIRST_VALUE = ("ALIGN", "ShOULD")  # these evaluate f once more, at the start


def with_diagonal_noise(sde: hbnode.HeavyBallSDE) -> SimpleNamespace:
    """Return the same SDE in torchsde's diagonal form, where the noise on h is 0."""

    def g(t: Tensor, y: Tensor) -> Tensor:
        _, m = y.chunk(2, -1)
        return torch.cat([torch.zeros_like(m), sde.noise_scale(m)], -1)

    return SimpleNamespace(noise_type="diagonal", sde_type="ito", f=sde.f, g=g)


class Plain(nn.Module):
    """The same SDE as one writes it for torchsde, used for timing."""

    noise_type, sde_type = "additive", "ito"

    def __init__(self, sde: hbnode.HeavyBallSDE) -> None:
        super().__init__()
        self.sde = sde

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the drift of h and m as one tensor."""
        h, m = y.chunk(2, -1)
        return torch.cat([m, self.sde.func(h) - self.sde.damping * m], -1)

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        """Return the diffusion matrix. Its upper half, for h, is 0."""
        unit = torch.eye(y.shape[1] // 2, dtype=y.dtype).expand(len(y), -1, -1)
        return torch.cat([torch.zeros_like(unit), self._scale() * unit], 1)

    def g_prod(self, t: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """Return the diffusion matrix times v."""
        return torch.cat([torch.zeros_like(v), self._scale() * v], -1)

    def _scale(self) -> Tensor | float:
        return (2 * self.sde.damping * self.sde.temperature) ** 0.5


def with_torchsde(
    sde: hbnode.HeavyBallSDE, state: tuple[Tensor, Tensor], span: float, steps: int, method: str, gradient: str
) -> Tensor:
    """Return h at the end of the span, by a call of torchsde, whose Brownian motion is told the step."""
    y, dt, t = torch.cat(state, -1), span / steps, torch.tensor([0.0, span], dtype=state[0].dtype)
    area = "space-time" if method == "srk" else "none"
    options = {"size": state[0].shape, "dtype": y.dtype, "dt": dt, "levy_area_approximation": area}
    motion = torchsde.BrownianInterval(t0=0.0, t1=span, **options)
    solve = torchsde.sdeint_adjoint if gradient == "adjoint" else torchsde.sdeint
    return solve(Plain(sde), y, t, bm=motion, method=method, dt=dt)[-1, :, : y.shape[1] // 2]


class PathMotion(torchsde.BaseBrownian):
    """A Brownian motion for torchsde on the steps of a path, from the increments for "nystrom4".

    Arguments:
        noise: the increments.
        silent: columns of 0 in front, for the noise on h of :func:`with_diagonal_noise`.
    """

    def __init__(self, noise: BrownianIncrements, silent: int = 0) -> None:
        w, p = integrals(noise)[:2]
        self.w, self.p = (nn.functional.pad(x, (silent, 0)) for x in (w, p))
        self.size_of_step = float(noise.sizes[0])

    def __call__(self, ta: Tensor, tb: Tensor | None = None, return_U: bool = False, return_A: bool = False) -> Any:
        """Return the increment over a step, and its integral."""
        step = round(float(ta) / self.size_of_step)
        return (self.w[step], self.p[step]) if return_U else self.w[step]

    def __repr__(self) -> str:
        return f"PathMotion({len(self.w)} steps)"

    dtype = property(lambda self: self.w.dtype)
    device = property(lambda self: self.w.device)
    shape = property(lambda self: self.w.shape[1:])
    levy_area_approximation = "space-time"


def integrals(noise: BrownianIncrements) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each step of "nystrom4": W, its integral, and L and K of the Brownian bridge, (steps, ...)."""
    size = noise.sizes.view(-1, *[1] * (noise.normals.dim() - 2))
    w, bridge, skew = (
        x * (size * variance).sqrt() for x, variance in zip(noise.normals.unbind(1), VARIANCES, strict=True)
    )
    return w, size * (bridge + w / 2), bridge, skew


def with_flights(noise: BrownianIncrements, damping: float) -> dict[str, BrownianIncrements]:
    """The increments for "ubu" and "baoab", two steps in one, on the path of fine increments for "nystrom4".

    Between the ends of a step the path is taken for the polynomial that W, L and K determine. What that misses is far
    below the errors measured: the size of a step to the fourth power, times the noise.
    """
    size = noise.sizes.view(-1, *[1] * (noise.normals.dim() - 2))
    w, _, bridge, skew = integrals(noise)
    nodes, weights = np.polynomial.legendre.leggauss(8)
    j = torch.zeros_like(w)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        path = node * w + 6 * node * (1 - node) * bridge + 120 * node * (1 - node) * (0.5 - node) * skew
        j += weight * size * torch.exp(-damping * size * (1 - node)) * path
    _, _, p, q, r = linear_part(torch.tensor(damping, dtype=torch.float64), size)
    first = (w - damping * j) / p
    second = (j - q * first) / r
    pairs = torch.stack([first, second], 1)
    sizes = 2 * noise.sizes[::2]
    ubu = BrownianIncrements("ubu", sizes, pairs.reshape(len(sizes), 4, *pairs.shape[2:]), damping)
    fine = BrownianIncrements("baoab", noise.sizes, first.unsqueeze(1), damping)
    return {"ubu": ubu, "baoab": fine.coarser()}


class DoubleWell(nn.Module):
    """The force of F = h⁴/4 - h²/2, on tensors and on JAX arrays."""

    def forward(self, h: Any) -> Any:
        """Return the force at h."""
        return h - h**3


def strong_network() -> nn.Module:
    """A network of tanh with parameters of twice the usual size, without which it would be almost linear."""
    torch.manual_seed(0)
    net = hbnode.nn.MLP(8, [64, 64], 8, activation=nn.Tanh).double()
    for parameter in net.parameters():
        parameter.data.mul_(2.0)
    return net


def start_of(start: str, paths: int) -> tuple[hbnode.HeavyBallSDE, Tensor, Tensor]:
    """The SDE and h and m of each path at the time 0, (paths, 1), or (paths / 8, 8) for the network."""
    func = strong_network() if start == NETWORK else DoubleWell()
    sde = hbnode.HeavyBallSDE(func, damping=DAMPING, temperature=TEMPERATURE, learn_damping=False)
    state = torch.randn(2, paths, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if start == AT_REST:
        state = torch.stack([torch.ones_like(state[0]), torch.zeros_like(state[1])])
    h, m = state[:, : paths // 8 * 8].view(2, -1, 8) if start == NETWORK else state
    return sde, h, m


def levels(noise: BrownianIncrements, most: int) -> Iterator[BrownianIncrements]:
    """The noise of ever longer steps, from at most ``most`` steps on, down to four."""
    while len(noise.sizes) >= 4:
        if len(noise.sizes) <= most:
            yield noise
        noise = noise.coarser()


@torch.no_grad()
def strong(start: str, paths: int, fine: int) -> list[Row]:
    """Return rows with the root mean square errors of h(T), for all methods on the same paths."""
    sde, h, m = start_of(start, paths)
    t = torch.tensor([0.0, SPAN], dtype=torch.float64)
    path = BrownianIncrements.draw(sde, h, t, method="nystrom4", dt=SPAN / fine, seed=1)
    exact = hbnode.sdeint(sde, (h, m), t, method="nystrom4", dt=SPAN / fine, noise=path)[0][-1]
    rows: list[Row] = []

    def add(name: str, steps: int, evaluations: int, end: Tensor) -> None:
        error = (end - exact).square().mean().sqrt().item()
        rows.append({"start": start, "method": name, "steps": steps, "evaluations": evaluations, "rms": error})

    for name, finest in {"nystrom4": path, **with_flights(path, DAMPING)}.items():
        for noise in levels(finest, fine // 8):
            with calls_of(sde.func) as calls:
                end, _ = hbnode.sdeint(sde, (h, m), t, method=name, dt=float(noise.sizes[0]), noise=noise)
            add(name, len(noise.sizes), len(calls), end[-1])
    forms = {"torchsde euler": sde, "torchsde srk": sde, "torchsde srk, diagonal": with_diagonal_noise(sde)}
    for (name, form), noise in product(forms.items(), list(levels(path, fine // 8))):
        motion = PathMotion(noise, silent=h.shape[1] * (form is not sde))
        options = {"method": name.split()[1].strip(","), "dt": float(noise.sizes[0]), "bm": motion}
        with calls_of(sde.func) as calls:
            end = torchsde.sdeint(form, torch.cat([h, m], -1), t, **options)
        add(name, len(noise.sizes), len(calls), end[-1, :, : h.shape[1]])
    for name in DIFFRAX if has_diffrax() else ():
        solve_theirs, force = langevin(name, fine // 8, "given"), jax_force(sde)
        for noise in levels(path, fine // 8):
            end, steps = solve_theirs(*force, jax_arrays(h, m), len(noise.sizes), given_path(noise, fine // 8))
            evaluations = int(steps) * DIFFRAX[name] + (name in FIRST_VALUE)
            add(f"diffrax {name}", int(steps), evaluations, torch.from_numpy(np.array(end)))
    return rows


# diffrax


def has_diffrax() -> bool:
    """Return whether diffrax and JAX are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("jax", "diffrax"))


@functools.cache
def jax_and_diffrax() -> tuple[Any, Any]:
    """Import JAX and diffrax, in float64 and with one thread."""
    jax, diffrax = rival("jax"), rival("diffrax")
    jax.config.update("jax_enable_x64", True)
    return jax, diffrax


def jax_force(sde: hbnode.HeavyBallSDE) -> tuple[Any, Any]:
    """Return the force as a hashable function of weights and h, and its weights."""
    return (well_of_jax, ()) if isinstance(sde.func, DoubleWell) else (jax_network, jax_layers(sde.func))


def well_of_jax(weights: Any, h: Any) -> Any:
    """Return the force of the double well in JAX."""
    return DoubleWell.forward(None, h)


@functools.cache
def given_path_type() -> Any:
    """A Brownian path for diffrax from W, L and K of equal steps."""
    jax, diffrax = jax_and_diffrax()

    class GivenPath(diffrax.AbstractBrownianPath):
        size: jax.Array
        w: jax.Array
        bridge: jax.Array
        skew: jax.Array
        levy_area = diffrax.SpaceTimeTimeLevyArea
        t0 = property(lambda self: 0.0)
        t1 = property(lambda self: SPAN)

        def evaluate(self, t0: Any, t1: Any = None, left: bool = True, use_levy: bool = False) -> Any:
            """The increments of the step from t0."""
            step = jax.numpy.round(t0 / self.size).astype(int)
            own = (x[step] for x in (self.w, self.bridge, self.skew))
            return diffrax.SpaceTimeTimeLevyArea(t1 - t0, *own)

    return GivenPath


def given_path(noise: BrownianIncrements, most: int) -> Any:
    """The path of increments for "nystrom4", with rows of 0 up to ``most`` steps, so that jit compiles once."""
    w, _, bridge, skew = integrals(noise)
    padded = (nn.functional.pad(x, (0, 0, 0, 0, 0, most - len(w))) for x in (w, bridge, skew))
    return given_path_type()(*jax_arrays(noise.sizes[0], *padded))


@functools.cache
def langevin(name: str, most: int, noise: str, training: bool = False) -> Callable[..., Any]:
    """A compiled solve ``(force, weights, (h, m), steps, path or key)`` by one of diffrax's solvers.

    It returns h(T) and the number of steps. In training it returns the gradients of the mean of h(T)² with respect to
    the weights, h and m. ``noise`` is ``"given"``, or how it is drawn from a key: by diffrax's ``"tree"``
    (VirtualBrownianTree), or ``"ahead"`` of the steps, all increments in one call.
    """
    jax, diffrax = jax_and_diffrax()
    solver = getattr(diffrax, name)(taylor_threshold=0.01)  # diffrax's advice for float64
    area = diffrax.SpaceTimeLevyArea if name == "ALIGN" else diffrax.SpaceTimeTimeLevyArea

    def solve(force: Any, weights: Any, state: Any, steps: Any, path: Any) -> Any:
        size, shape = SPAN / steps, state[0].shape
        if noise == "tree":
            path = diffrax.VirtualBrownianTree(0.0, SPAN, SPAN / most / 2, shape, path, area)
        elif noise == "ahead":
            count = 2 if name == "ALIGN" else 3
            drawn = jax.random.normal(path, (count, most, *shape)) * jax.numpy.sqrt(size)
            scaled = [x * variance**0.5 for x, variance in zip(drawn, VARIANCES, strict=False)]
            path = given_path_type()(size, *scaled[:2], scaled[-1])
        drift = diffrax.UnderdampedLangevinDriftTerm(
            DAMPING, TEMPERATURE, lambda h, _: -force(weights, h) / TEMPERATURE
        )
        terms = diffrax.MultiTerm(drift, diffrax.UnderdampedLangevinDiffusionTerm(DAMPING, TEMPERATURE, path))
        how = diffrax.RecursiveCheckpointAdjoint() if training else diffrax.ForwardMode()
        options = {"adjoint": how, "max_steps": most, "throw": False}
        solution = diffrax.diffeqsolve(terms, solver, 0.0, SPAN, size, state, **options)
        return solution.ys[0][-1], solution.stats["num_steps"]

    if not training:
        return jax.jit(solve, static_argnums=0)

    def loss(weights: Any, state: Any, *others: Any) -> Any:
        force, steps, path = others
        return (solve(force, weights, state, steps, path)[0] ** 2).mean()

    slopes = jax.grad(loss, (0, 1))
    return jax.jit(lambda force, weights, state, *others: slopes(weights, state, force, *others), static_argnums=0)


def to_an_error(rows: list[Row], paths: int, repeats: int) -> Iterator[list[Row]]:
    """Milliseconds of a solve with the steps that an error needs, in evaluation and in training.

    Training is a solve and the gradients of the mean of h(T)² with respect to h(0), m(0) and the weights of f.
    """
    for start, wanted in product((AT_REST, NETWORK), (WANTED, FINE)):
        reached = to_reach([row for row in rows if row["start"] == start], wanted)
        steps = {row["method"]: row["steps"] for row in reached if "steps" in row and "diagonal" not in row["method"]}
        if wanted == WANTED:
            steps |= {name.replace("diffrax", "diffrax tree"): n for name, n in steps.items() if "diffrax" in name}
        sde, *state = start_of(start, paths)
        for training in (False, True):
            for x in state:
                x.requires_grad_(training)
            solves = {name: solver(name, sde, tuple(state), SPAN, n, training) for name, n in steps.items()}
            row = {"start": start, "error": wanted, "pass": PASSES[training]}
            times = interleaved(solves, repeats)
            yield [row | {"method": k, "steps": steps[k], "ms": milliseconds(mine)} for k, mine in times.items()]


def solver(
    name: str, sde: hbnode.HeavyBallSDE, state: tuple[Tensor, Tensor], span: float, steps: int, training: bool
) -> Callable[[], object]:
    """A solve to T with its own noise, and its backward pass in training.

    A method of another library has its name in front, and a gradient that is not the default stands behind.
    """
    if name.startswith("diffrax"):
        return diffrax_solver(name, sde, state, steps, training)
    method, how = [*name.removeprefix("torchsde ").split(), "direct"][:2]

    def run() -> None:
        with torch.set_grad_enabled(training):
            if name.startswith("torchsde"):
                end = with_torchsde(sde, state, span, steps, method, how)
            else:
                end = hbnode.sdeint(sde, state, [0.0, span], dt=span / steps, method=method, gradient=how)[0][-1]
        if training:
            end.square().mean().backward()

    return run


def diffrax_solver(
    name: str, sde: hbnode.HeavyBallSDE, state: tuple[Tensor, Tensor], steps: int, training: bool
) -> Callable[[], object]:
    """The same by a solver of diffrax, with its tree or with increments that are drawn ahead."""
    jax, _ = jax_and_diffrax()
    words, noise = name.split(), "tree" if "tree" in name else "ahead"
    arguments = (*jax_force(sde), jax_arrays(*state), steps, jax.random.key(0))
    end, taken = langevin(words[-1], steps, noise)(*arguments)
    assert int(taken) == steps, f"{name} took {taken} steps instead of {steps}"
    assert bool(jax.numpy.isfinite(end).all()), f"{name} returned values that are not finite"
    compiled = langevin(words[-1], steps, noise, training)
    return lambda: jax.block_until_ready(compiled(*arguments))


def to_reach(rows: list[Row], wanted: float = WANTED) -> list[Row]:
    """Evaluations and steps to the wanted error, interpolated between steps, and the order seen there."""
    found: list[Row] = []
    for start, name in dict.fromkeys((row["start"], row["method"]) for row in rows):
        own = [row for row in rows if (row["start"], row["method"]) == (start, name)]
        row: Row = {"start": start, "method": name}
        for coarse, fine in pairwise(sorted(own, key=lambda row: row["steps"])):
            if coarse["rms"] > wanted >= fine["rms"]:
                gain = math.log(coarse["rms"] / fine["rms"])
                share = math.log(coarse["rms"] / wanted) / gain
                row["evaluations"] = coarse["evaluations"] * (fine["evaluations"] / coarse["evaluations"]) ** share
                row["steps"] = math.ceil(coarse["steps"] * (fine["steps"] / coarse["steps"]) ** share)
                row["order"] = gain / math.log(fine["steps"] / coarse["steps"])
        found.append(row)
    return found


def times(repeats: int, steps: int) -> Iterator[list[Row]]:
    """Yield the milliseconds of a step relative to torchsde's Euler, in evaluation and in training."""
    for (batch, dim, hidden), training in product(((128, 32, 0), (128, 32, 64), (1024, 2, 32)), (False, True)):
        torch.manual_seed(0)
        net = hbnode.nn.MLP(dim, [hidden, hidden], dim, activation=nn.Tanh) if hidden else DoubleWell()
        sde, h = hbnode.HeavyBallSDE(net, damping=0.5, temperature=TEMPERATURE), torch.randn(batch, dim)
        state = h, torch.zeros_like(h)
        names = SOLVERS + (TRAINED if training else ())
        found = interleaved({name: solver(name, sde, state, 1.0, steps, training) for name in names}, repeats)
        row = {"f": "tanh" if hidden else "cubic", "batch": batch, "dim": dim, "pass": PASSES[training]}
        yield [
            row | {"method": name, "ms": milliseconds(mine) / steps, "euler_over_it": ratio(found[EULER], mine)}
            for name, mine in found.items()
        ]


EULER = "torchsde euler"
SOLVERS = (EULER, "torchsde srk", "ubu", "baoab", "nystrom4")
TRAINED = ("ubu checkpoint", "ubu reversible", "torchsde euler adjoint")
PASSES = ("evaluation", "training")
GRADIENTS = {
    "ubu": ("checkpoint", "reversible"),
    "baoab": ("checkpoint", "reversible"),
    "nystrom4": ("checkpoint",),
    "euler": ("adjoint",),
    "reversible_heun": ("adjoint",),
}


def gradients() -> list[Row]:
    """Return the errors of float32 gradients against backpropagation through the same steps and noise, γT = 4."""
    torch.manual_seed(0)
    net = hbnode.nn.MLP(8, [32], 8, activation=nn.Tanh)
    sde = hbnode.HeavyBallSDE(net, damping=1.0, max_damping=2.0, temperature=TEMPERATURE, learn_temperature=True)
    state = tuple(torch.randn(64, 8).requires_grad_() for _ in range(2))
    leaves = [*state, *sde.parameters()]

    def gradient(steps: int, **options: Any) -> tuple[Tensor, int]:
        with Living(leaves) as living:
            h, m = hbnode.sdeint(sde, state, [0.0, SPAN], dt=SPAN / steps, seed=0, **options)
            loss = h[-1].square().mean() + m[-1].square().mean()
            kept = living.size()
        return torch.cat([x.reshape(-1) for x in torch.autograd.grad(loss, leaves)]), kept

    rows = []
    for steps, (method, others) in product((50, 400), GRADIENTS.items()):
        exact, _ = gradient(steps, method=method)
        for other in ("direct", *others):
            found, kept = gradient(steps, method=method, gradient=other)
            row = {"steps": steps, "method": method, "gradient": other, "error": relative(found, exact)}
            rows.append(row | {"MiB": kept / 2**20})
    return rows


COLORS = {EULER: "0.7", "torchsde srk": "0.1", "torchsde srk, diagonal": "0.45"}
GREYS = dict.fromkeys(COLORS, "o--") | {f"diffrax {name}": "^:" for name in DIFFRAX}


def draw(report: dict[str, list[Row]], machine: str) -> Any:
    """Draw the strong error against the number of evaluations."""
    figure, (ax,) = panels((6.4, 4.6))
    rows = [row for row in report["strong error"] if row["start"] == AT_REST]
    for name in dict.fromkeys(row["method"] for row in rows):
        own = sorted((row["evaluations"], row["rms"]) for row in rows if row["method"] == name)
        own = [pair for pair in own if pair[1] < 1]  # a step that is too long diverges
        ax.loglog(*zip(*own, strict=True), GREYS.get(name, "s-"), color=COLORS.get(name), label=name, markersize=4)
    ax.axhline(WANTED, color="0.8", linewidth=0.8, zorder=0)
    ax.set(xlabel="evaluations of f", ylabel="root mean square error of h(T)")
    what = f"Double well from rest, γ = {DAMPING:g}, η = {TEMPERATURE:g}, T = {SPAN:g}, the same paths"
    ax.set_title(f"{what}\n{machine}", fontsize=9)
    ax.legend(fontsize=8)
    return figure


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """The strong errors and what they need, then the sections that are asked for."""
    if not has_diffrax():
        print(MISSING.format(name="diffrax"))
    paths, fine, steps = (50, 256, 4) if options.quick else (1000, 4096, 100)
    errors = [row for start in STARTS for row in strong(start, paths, fine)]
    yield "strong error", errors
    yield "evaluations to 1e-3", to_reach(errors)
    for rows in to_an_error(errors, paths, options.repeats):
        yield "time to an error", rows
    for rows in times(options.repeats, steps):
        yield "time of a step", rows
    yield "gradients", gradients()


main = program(__doc__, "sde", measured, draw=draw, repeats=11, quick="few paths and steps")


if __name__ == "__main__":
    main()
