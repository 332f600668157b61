"""The time loop of a solve: choose the start, attempt steps, accept or reject them, and save the outputs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hbnode import _torch
from hbnode.nfe import open_records
from hbnode.signal import Signal, queries
from hbnode.solve.adaptive import AdaptiveSteps
from hbnode.solve.control import TRIALS
from hbnode.solve.events import EventSteps
from hbnode.solve.grid import to_device
from hbnode.solve.methods import Array, Rows
from hbnode.solve.stepper import Attempt, Setup, Taken

StepFunction = Callable[[Rows, Attempt], Taken]

# f is evaluated at these fractions of the time span to find the query times of its signals
QUERIES_AT = (0.0, TRIALS[0], TRIALS[-1])
UNKNOWN_QUERIES = (
    "func asks a Signal at times that are not one linear function of t for all samples, or one for each sample with "
    "per_sample=True. Steps do not end on its sample times, and may miss its pulses. Fix: "
    "options={'max_step': w} with the width w of the narrowest pulse, or jump_times=[...]."
)


class Begun(NamedTuple):
    """A solve before its first step: the setup, whose grid has the times of jumps of f, and the initial state."""

    setup: Setup
    state: Rows


def start_of(setup: Setup, y0: Any, *, ends_on_signals: bool = True) -> Begun:
    """Prepare a solve from ``y0``: compute the initial state of the method, and find the times at which f jumps.

    If ``ends_on_signals``, the sample times of the signals that the field evaluates are added to the jumps.
    """
    term, settings, grid = setup.stepper.term, setup.settings, setup.grid
    rows, is_fixed = term.flatten(y0), settings.steps is not None
    if not setup.stepper.method.is_fsal:
        return Begun(setup, rows)
    t = setup.stepper.no_times[0]
    recorded: list[tuple[Signal, Tensor]] = []
    if term.wants_time:
        first = grid.points[0]
        if is_fixed and grid.jumps is not None:
            first = first + grid.beside_jump(0.0 * grid.end)
        (t,) = term.stages([first])
    if term.traced:
        return Begun(setup, (*rows, term(t, rows[0])))
    before, queries.recorded = queries.recorded, recorded
    try:
        state = (*rows, term(t, rows[0].clone()))  # a copy, because f may change its input in place
    finally:
        queries.recorded = before
    if (settings.jump_times or recorded) and not is_fixed and ends_on_signals:
        ends_on_knots = torch.is_grad_enabled() and any(signal.u.requires_grad for signal, _ in recorded)
        grid = dataclasses.replace(grid, ends_on_knots=ends_on_knots)
        grid = grid.with_jumps(settings.jump_times, _knots(setup, recorded, t, rows[0]), both_sides=True)
        setup = dataclasses.replace(setup, grid=grid)
    return Begun(setup, state)


def _knots(setup: Setup, recorded: Sequence[tuple[Signal, Tensor]], t: Tensor, x: Tensor) -> list[Array]:
    """Return the times since the start at which f evaluates a signal at one of the signal's sample times.

    The result has one array (K,) or (batch, K) per signal. The time at which f evaluates a signal is its query time.
    ``recorded`` holds the signals that f evaluated at the time t, with their query times. If the query time is t itself
    or a view of it, the knots are the sample times. Otherwise two further evaluations of f determine the query time as
    a linear function of t.
    """
    term, grid = setup.stepper.term, setup.grid
    if not recorded or not term.wants_time:
        return []
    address, *addresses = (_torch.plain(x).untyped_storage()._cdata for x in (t, *(q for _, q in recorded)))
    if all(place == address for place in addresses):
        return [grid.sign[..., None] * (np.array(signal.knots) - grid.begin[..., None]) for signal, _ in recorded]
    queries_at, before = [[q for _, q in recorded]], queries.recorded
    try:
        for fraction in QUERIES_AT[1:]:
            queries.recorded = []
            term.trial(term.stages([grid.time(fraction * grid.end)])[0], x.clone())
            queries_at.append([q for _, q in queries.recorded])
    finally:
        queries.recorded = before
    found = []
    for k, (signal, _) in enumerate(recorded):
        times = [_torch.to_numpy(at_place[k]).reshape(-1) for at_place in queries_at if k < len(at_place)]
        found.append(_knots_of(setup, signal, times))
    return [knots for knots in found if knots is not None]


def _knots_of(setup: Setup, signal: Signal, recorded: list[Array]) -> Array | None:
    """Return the times since the start at which f evaluates ``signal`` at one of its sample times, or None.

    ``recorded`` holds the times at which f queries the signal if f is called at the fractions :data:`QUERIES_AT` of the
    time span.
    """
    grid, lanes = setup.grid, setup.stepper.term.lanes
    slack = 64 * torch.finfo(setup.stepper.like.dtype).eps * max(abs(q).max() for q in recorded)
    if all(q.shape == recorded[0].shape and (abs(q - recorded[0]) <= slack).all() for q in recorded):
        return None  # the query time does not depend on t
    is_known = len(recorded) == len(QUERIES_AT) and recorded[0].size in (1, lanes)
    if is_known:
        q0, q1, q2 = (q.reshape(grid.end.shape) if q.size == grid.end.size else q for q in recorded)
        is_known = bool((abs((q2 - q0) * QUERIES_AT[1] - (q1 - q0) * QUERIES_AT[2]) <= slack).all())
    if not is_known:
        if "max_step" not in (setup.settings.options or {}) and not setup.settings.jump_times:
            warnings.warn(UNKNOWN_QUERIES, stacklevel=2)
        return None
    with np.errstate(all="ignore"):
        knots: Array = (np.array(signal.knots) - q0[..., None]) / ((q1 - q0) / (QUERIES_AT[1] * grid.end))[..., None]
    return knots


class Solution(NamedTuple):
    """The solution of a solve.

    Attributes:
        rows: the tensors of the solution at all times, each (T, elements) or (T, batch, elements).
        events: the stepper that recorded the events; None for a solve without events.
        owned: the objects that the backward pass needs. The graph has only weak references to them.
    """

    rows: Rows
    events: EventSteps | None = None
    owned: tuple[Any, ...] = ()


def integrate(begun: Begun, take: StepFunction | None = None, *, every: int = 1_000_000) -> Solution:
    """Solve from the initial state in ``begun``, and return the solution at the output times.

    ``take`` computes an attempted step; by default it is the stepper's ``take``. With fixed steps, an attempt
    consists of at most ``every`` steps.
    """
    (setup, state), stepper = begun, begun.setup.stepper
    take = stepper.take if take is None else take
    events = EventSteps(setup, state) if setup.events else None
    adaptive = AdaptiveSteps(setup, state) if events is None and setup.settings.steps is None else events
    saved = SavedOutputs(setup, state)
    for attempt in fixed_steps(setup, every) if adaptive is None else iter(adaptive.next, None):
        taken: Taken = take(state, attempt)
        accepted: Any = True
        if adaptive is None:
            stepper.term.counter.add("accepted", len(attempt.times))
            if open_records:
                stepper.term.counter.report(attempt.time, attempt.size, np.asarray(True))
        else:
            control = adaptive.control
            accepted = adaptive.accept(attempt, state, taken)
        moves = adaptive is None or (accepted & (adaptive.control.taken > 0)).any()  # whether any sample moves
        if accepted is True or accepted.all():
            state = taken.state
        elif adaptive is not None and moves:
            if taken.state[0].requires_grad and (adaptive.control.failures[~accepted] > 0).any():
                # otherwise 0 * NaN = NaN reaches the gradients of the parameters
                attempt = adaptive.zero_failed_lanes(attempt, ~accepted, control)
                taken = take(state, attempt)
            moved = to_device(accepted, stepper.like).view(-1, *[1] * (state[0].dim() - 1))
            state = tuple([torch.where(moved, new, old) for new, old in zip(taken.state, state, strict=True)])
        if attempt.outputs is not None and moves:
            saved.add(taken.outputs, attempt.lanes, attempt.outputs, accepted)
        if events is not None:
            state = events.apply_events(state)
            if events.ended is not None:
                lanes, rows = events.ended
                saved.freeze(lanes, rows, events.control.now)
                events.end()
    return Solution(saved.rows(), events)


def fixed_steps(setup: Setup, every: int) -> Iterator[Attempt]:
    """Yield the fixed steps of a solve as attempts, each with at most ``every`` equal steps in one output interval."""
    stepper, grid, number, times = setup.stepper, setup.grid, 0, setup.grid.points  # (T,) or (T, batch)
    term, method, no_times = stepper.term, stepper.method, stepper.no_times
    nodes, every = method.nodes, 1 if open_records else every
    for interval, part, count in grid.pieces(setup.counts):
        for done in range(0, count, every):
            steps = min(every, count - done)
            begin, end = times[interval], times[interval + 1]  # indexed here, so that each attempt has its own graph
            lag = None
            if part is not None:
                begin, end = grid.bound(part[0], interval), grid.bound(part[1], interval)
                lag = grid.lag(begin, part[0], interval)
                if lag is not None and not method.is_fsal and grid.is_on_jump(part[0]).any():
                    raise ValueError(
                        f"the gradient of an output time on a jump is not known with method={stepper.name!r}. "
                        "Fix: t.detach(), or method='nystrom4'."
                    )
                begin = begin if lag is None else begin - lag
            size = (end - begin) / count
            attempt = Attempt(begin + done * size, size, [no_times] * steps, error=False, number=number)
            if term.wants_time:
                if part is not None:
                    short = grid.beside_jump(part[0])
                    begin, end = begin + short, end - grid.beside_jump(part[1])
                    if number and not done and method.is_fsal and short.any():
                        (attempt.restart,), attempt.lag = term.stages([begin]), lag
                fractions = [min((i + node) / count, 1.0) for i in range(done, done + steps) for node in nodes]
                stages, k = term.stages([begin * (1.0 - c) + end * c for c in fractions]), len(nodes)
                attempt.times = [stages[i : i + k] for i in range(0, len(stages), k)]
            if setup.max_nfe is not None:
                evaluations = steps * method.evaluations + (attempt.restart is not None)
                setup.check_nfe(attempt.time, size, evaluations)
            if done + steps == count and (part is None or (part[1] == grid.outputs[..., interval]).all()):
                attempt.outputs = np.array([interval])
            yield attempt
            number += steps


class SavedOutputs:
    """A store for the states at the output times, which are added in the order in which they are computed.

    If samples have different steps, they reach an output time at different steps. Therefore the index of each state in
    the store is kept for each output time and sample.
    """

    def __init__(self, setup: Setup, state: Rows) -> None:
        self.setup, self.grid, rows = setup, setup.grid, state[: setup.stepper.term.rows]
        lanes = setup.stepper.term.lanes
        self.is_ragged = lanes is not None and (setup.settings.steps is None or bool(setup.events))
        self.pieces: tuple[list[Tensor], ...] = ([], [])[: len(rows)]
        self.count, starts = 0, not setup.end_only
        if self.is_ragged:
            at_start = np.concatenate([np.zeros_like(self.grid.end)[:, None], self.grid.outputs], -1).T == 0
            self.place = np.where(at_start, np.arange(lanes or 0), 0)  # later times may equal the first
            starts |= bool(at_start[1:].any())
        if starts:
            for pieces, row in zip(self.pieces, rows, strict=True):
                pieces.append(row if self.is_ragged else row.unsqueeze(0))
            self.count = lanes or 0
        if self.is_ragged and starts and self.grid.t is not None:
            self._add_at_start(state, at_start)

    def _add_at_start(self, state: Rows, at_start: Array) -> None:
        """Add the states at output times t that equal the initial time t_0.

        They are computed as y + (t - t_0) y', so that they have a gradient with respect to t. ``state`` is the initial
        state, and ``at_start`` a mask (T, batch) of the times that equal t_0.
        """
        outputs, lanes = np.nonzero(at_start[1:])
        if not len(lanes):
            return
        t = self.grid.lane_times
        index = to_device(lanes, t)
        moved = (t[index, to_device(outputs + 1, t)] - t[index, 0]).to(state[0])
        for pieces, row, slope in zip(self.pieces, state, self.setup.stepper.slopes(state), strict=False):
            pieces.append(row[index] + moved.view(-1, *[1] * (row.dim() - 1)) * slope[index])
        self.place[outputs + 1, lanes] = self.count + np.arange(len(lanes))
        self.count += len(lanes)

    def add(self, rows: Rows, lanes: Array, outputs: Array, accepted: Any = True) -> None:
        """Add the states ``rows`` at output times; they are used only for samples in the mask ``accepted``.

        ``lanes`` and ``outputs`` hold the sample index and the output time index of each entry of ``rows``.
        """
        for pieces, row in zip(self.pieces, rows, strict=True):
            pieces.append(row)
        if self.is_ragged:
            good = np.ones(len(lanes), bool) if accepted is True else accepted[lanes]
            self.place[outputs[good] + 1, lanes[good]] = self.count + np.nonzero(good)[0]
            self.count += len(good)

    def freeze(self, lanes: Array, rows: Rows, now: Array) -> None:
        """Set the outputs of the samples ``lanes`` after the times ``now`` to ``rows``, their last states.

        ``lanes`` holds sample indices; ``now`` (batch,) holds one time for every sample of the batch.
        """
        for pieces, row in zip(self.pieces, rows, strict=True):
            pieces.append(row)
        which, outputs = np.nonzero(self.grid.outputs[lanes] > now[lanes, None])
        self.place[outputs + 1, lanes[which]] = self.count + which
        self.count += len(lanes)

    def rows(self) -> Rows:
        made: list[Tensor] = []
        for pieces in self.pieces:
            row = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
            if self.is_ragged:
                place = torch.from_numpy(self.place[1:] if self.setup.end_only else self.place)
                row = row[place.to(row.device)]
            made.append(row)
        return tuple(made)
