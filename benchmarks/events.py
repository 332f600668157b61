"""Bouncing balls: events of each sample against closed forms, and against torchdiffeq's events in a loop.

A ball obeys h'' + γh' = -g; at the floor h = 0 its velocity v becomes -e v. Starts, restitutions e and therefore the
bounce times differ from ball to ball. *accuracy*: bounce times and their gradients with respect to starts, e and γ,
against the closed form of the flight. *speed*: forward and backward pass of all balls in one solve, over a loop of
``torchdiffeq.odeint_event`` of few of them, per ball. Processor time of one thread, float64. Writes JSON with the
machine in it, and a figure of ten balls beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torchdiffeq
from torch import Tensor

import hbnode
from benchmarks.harness import Options, Row, interleaved, panels, program, ratio

G = 9.81


class Balls:
    """Starts, restitutions and damping of n balls, as leaves that need gradients."""

    def __init__(self, n: int, damping: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(3, n, generator=generator, dtype=torch.float64)
        self.h, self.v = (1 + uniform[0]).requires_grad_(), (uniform[1] - 0.5).requires_grad_()
        self.e = (0.7 + 0.25 * uniform[2]).requires_grad_()
        self.field = hbnode.HBNODE(lambda h: -G + 0 * h, damping=damping).double()
        self.leaves = [self.h, self.v, self.e, self.field.omega]

    def solve(self, bounces: int, tolerance: float, t: Sequence[float], **settings: Any) -> tuple[Any, Any]:
        """Return the solution and the record of the first ``bounces`` bounces."""
        floor = hbnode.Event(lambda t, y: y[0], lambda t, y: (0 * y[0], -self.e * y[1]), max_count=bounces)
        settings |= {"rtol": tolerance, "atol": tolerance, "events": floor}
        return hbnode.odeint(self.field, (self.h, self.v), t, **settings)

    def exact(self, bounces: int) -> Tensor:
        """Return the bounce times (balls, bounces) of the closed form, with gradients by the implicit function theorem.

        After a time s, a flight from (h, v) is at h + v d + g (d - s)/γ with d = (1 - e^{-γs})/γ.
        """

        def flight(h: Tensor, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            d = -torch.expm1(-gamma * s) / gamma
            return h + v * d + G * (d - s) / gamma, v - (gamma * v + G) * d

        gamma, h, v, t, times = self.field.damping, self.h, self.v, torch.zeros_like(self.h), []
        for _ in range(bounces):
            with torch.no_grad():
                low = torch.log1p(gamma * v.clamp(min=0) / G) / gamma  # the top of the flight
                high = low + 20.0
                for _ in range(200):
                    s = (low + high) / 2
                    flies = flight(h, v, s)[0] > 0
                    low, high = torch.where(flies, s, low), torch.where(flies, high, s)
            s = s - flight(h, v, s)[0] / flight(h, v, s)[1].detach()
            t, h, v = t + s, 0 * h, -self.e * flight(h, v, s)[1]
            times.append(t)
        return torch.stack(times, 1)

    def loop(self, bounces: int, tolerance: float) -> list[Tensor]:
        """Return the last bounce time of each ball, from one solve of torchdiffeq per flight."""
        gamma, ends = self.field.damping, []
        for h, v, e in zip(self.h, self.v, self.e, strict=True):
            t, y = torch.zeros((), dtype=torch.float64), torch.stack([h, v])
            for _ in range(bounces):
                t, states = torchdiffeq.odeint_event(
                    lambda t, y: torch.stack([y[1], -G - gamma * y[1]]), y, t,
                    event_fn=lambda t, y: y[0] + 1e-12 * (y[1] > 0), rtol=tolerance, atol=tolerance,
                )  # fmt: skip
                y = torch.stack([0 * states[-1, 0] + 1e-11, -e * states[-1, 1]])
            ends.append(t)
        return ends


def accuracy(n: int, bounces: int, tolerance: float, method: str | None) -> Row:
    """Return the largest error of the times, and of each gradient relative to its largest element."""
    balls = Balls(n)
    _, record = balls.solve(bounces, tolerance, [0.0, 60.0], method=method)
    exact = balls.exact(bounces)
    weights = torch.rand(exact.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((weights * t).sum(), balls.leaves, allow_unused=True) for t in (record.t, exact)]
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(*gradients, strict=True)]
    time = float((record.t - exact).detach().abs().max())
    return {"method": method or "default", "tolerance": tolerance, "time": time, "gradient": max(errors)}


def speed(n: int, few: int, bounces: int, tolerance: float, repeats: int) -> dict[str, float]:
    """Return the seconds of a forward and backward pass, and how many times as long the loop takes per ball."""
    many, some = Balls(n), Balls(few)
    passes = {
        "ours": lambda: many.solve(bounces, tolerance, [0.0, 60.0])[1].t.sum().backward(),
        "theirs": lambda: torch.stack(some.loop(bounces, tolerance)).sum().backward(),
    }
    ours, theirs = interleaved(passes, repeats, warm=0).values()
    return {"seconds": statistics.median(ours), "loop_ratio": n / few * ratio(theirs, ours)}


def draw(report: dict[str, Any], machine: str) -> Any:
    """Draw the heights of ten balls, their bounces, and the gradient of the bounce times with respect to e."""
    balls, t = Balls(10), torch.linspace(0.0, 4.0, 801, dtype=torch.float64)
    (h, _), record = balls.solve(8, 1e-9, t.tolist())
    figure, (left, right) = panels((11, 3.6), columns=2, width_ratios=(2, 1))
    for i in range(5):
        times = record.t[i, : int(record.count[i])]
        (line,) = left.plot(t, h[:, i].detach(), linewidth=1.2)
        style = {"markersize": 4, "color": line.get_color(), "clip_on": False}
        left.plot(times.detach(), torch.zeros_like(times), "o", **style)
        slopes = [float(torch.autograd.grad(x, balls.e, retain_graph=True)[0][i]) for x in times]
        right.plot(range(1, len(times) + 1), slopes, "o-", **style)
    title = "Five balls of one batch; the solve of each ends at its eighth bounce"
    left.set(xlabel="t", ylabel="h", xlim=(0, 4), ylim=(0, None), title=title)
    right.set(xlabel="bounce", ylabel="dt / de", title="Gradient of the bounce times")
    return figure


def measured(options: Options) -> Iterator[tuple[str, Any]]:
    """Yield the errors for methods and tolerances, and the speed."""
    n, few, bounces, repeats = (5, 1, 2, 1) if options.quick else (10_000, 20, 20, options.repeats)
    pairs = product((None, "nystrom4", "tsit5"), (1e-6, 1e-10))
    yield "accuracy", [accuracy(min(n, 1000), bounces, tolerance, method) for method, tolerance in pairs]
    yield "speed", speed(n, few, bounces, 1e-6, repeats)


main = program(__doc__, "events", measured, draw=draw, repeats=3, quick="small sizes, to see that it runs")


if __name__ == "__main__":
    main()
