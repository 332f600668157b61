"""The start of a solve: the first evaluation of the field, and the jumps of f that it tells of."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hbnode import _torch
from hbnode.signal import Signal, queries
from hbnode.solve.grid import Array
from hbnode.solve.stepper import Rows, Setup

GOLDEN = (5**0.5 - 1) / 2
TRIALS = tuple(sorted(k * GOLDEN % 1 for k in range(1, 5)))  # fractions of the span; no harmonic is 0 at all four
UNKNOWN_QUERIES = (
    "func asks a Signal at times that are not one linear function of t for all samples, or one for each sample with "
    "per_sample=True. Steps do not end on its sample times, and may miss its pulses. Fix: "
    "options={'max_step': w} with the width w of the narrowest pulse, or jump_times=[...]."
)


class Begun(NamedTuple):
    """The initial state of a method, and the setup with the jumps of f."""

    setup: Setup
    state: Rows


def start_of(setup: Setup, y0: Any, *, asks_signals: bool = True) -> Begun:
    """Return the method's initial state, and the setup with the jumps of the signals that the field evaluates."""
    term, settings, grid = setup.stepper.term, setup.settings, setup.grid
    rows, is_fixed = term.flatten(y0), settings.steps is not None
    if not setup.stepper.method.is_fsal:
        return Begun(setup, rows)
    t, asked = setup.stepper.no_times[0], list[tuple[Signal, Tensor]]()
    if term.wants_time:
        first = grid.points[0]
        if is_fixed and grid.jumps is not None:
            first = first + grid.beside_jump(0.0 * grid.end)
        (t,) = term.stages([first])
    if term.traced:
        return Begun(setup, (*rows, term(t, rows[0])))
    before, queries.asked = queries.asked, asked
    try:
        state = (*rows, term(t, rows[0].clone()))  # a copy, because f may change its input in place
    finally:
        queries.asked = before
    if (settings.jump_times or asked) and not is_fixed and asks_signals:
        ends_on_knots = torch.is_grad_enabled() and any(signal.u.requires_grad for signal, _ in asked)
        grid = dataclasses.replace(grid, ends_on_knots=ends_on_knots)
        grid = grid.with_jumps(settings.jump_times, _knots(setup, asked, t, rows[0]), both_sides=True)
        setup = dataclasses.replace(setup, grid=grid)
    return Begun(setup, state)


def _knots(setup: Setup, asked: Sequence[tuple[Signal, Tensor]], t: Tensor, x: Tensor) -> list[Array]:
    """Return the times since the start at which signals are asked for their samples, (K,) or (lanes, K).

    A signal asked at t itself, or a view of it, has them at its sample times. For others, two further evaluations
    of the field find the query time as a linear function of t.
    """
    term, grid = setup.stepper.term, setup.grid
    if not asked or not term.wants_time:
        return []
    address, *asked_at = (_torch.plain(x).untyped_storage()._cdata for x in (t, *(q for _, q in asked)))
    if all(place == address for place in asked_at):
        return [grid.sign[..., None] * (np.array(signal.knots) - grid.begin[..., None]) for signal, _ in asked]
    queries_at, before, places = [[q for _, q in asked]], queries.asked, (0.0, TRIALS[0], TRIALS[-1])
    try:
        for place in places[1:]:
            queries.asked = []
            term.trial(term.stages([grid.time(place * grid.end)])[0], x.clone())
            queries_at.append([q for _, q in queries.asked])
    finally:
        queries.asked = before
    found: list[Array] = []
    for k, (signal, _) in enumerate(asked):
        q = [_torch.to_numpy(of_time[k]).reshape(-1) for of_time in queries_at if k < len(of_time)]
        slack = 64 * torch.finfo(term.template.dtype).eps * max(abs(x).max() for x in q)
        if all(x.shape == q[0].shape and (abs(x - q[0]) <= slack).all() for x in q):  # it does not depend on t
            continue
        is_known = len(q) == 3 and q[0].size in (1, term.lanes)
        q0, q1, q2 = (x.reshape(grid.end.shape) if is_known and x.size == grid.end.size else x for x in q)
        if not is_known or (abs((q2 - q0) * places[1] - (q1 - q0) * places[2]) > slack).any():
            if setup.option("max_step") is None and not setup.settings.jump_times:
                warnings.warn(UNKNOWN_QUERIES, stacklevel=2)
            continue
        with np.errstate(all="ignore"):
            found.append((np.array(signal.knots) - q0[..., None]) / ((q1 - q0) / (places[1] * grid.end))[..., None])
    return found
