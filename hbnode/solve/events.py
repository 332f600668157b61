r"""Events: times at which a function of a sample's state crosses zero.

A step in which a sample's event function c(t, y) crosses zero is rejected for that sample. The sample's next steps end
at the zero :math:`\tau` of c along the dense output, which is near the event time :math:`t_e`. One Newton step then
gives

.. math::
    t_e = \tau - c / \dot c, \qquad y(t_e) = y(\tau) + (t_e - \tau) \dot y, \qquad
    \dot c = \partial_t c + \partial_y c \, \dot y.

In its autograd graph, :math:`\dot c` and :math:`\dot y` are constants, so that the gradients are those of the implicit
function theorem. A jump returns a state :math:`y^+` at :math:`t_e`. The solve continues at the constant time τ from the
state :math:`y^+ - (t_e - \tau) \dot y^+`, through which later states depend on the event time.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hbnode._checks import as_count, with_hints
from hbnode._torch import is_transformed
from hbnode._tree import State, apply, describe, parts
from hbnode.errors import NonFiniteError, SolverError, ZenoError
from hbnode.solve.adaptive import AdaptiveSteps
from hbnode.solve.control import GOLDEN, Clip
from hbnode.solve.grid import to_device
from hbnode.solve.methods import Array, Rows, combined
from hbnode.solve.stepper import Attempt, Setup, Taken

NODES = np.linspace(0.0, 1.0, 9)  # positions in a step, from 0 to 1, at which the sign of the event function is checked
TO_POLYNOMIAL = np.linalg.inv(np.vander(NODES))  # maps values at the nodes to the coefficients for np.polyval
BISECTIONS, CORRECTIONS = 45, 60  # numbers of iterations of the search for a zero
ROOT_TOLERANCE = 1e-12  # accuracy of the zero, as a fraction of the step
DIFFERENCE = 1e-5  # step of a central difference, as a fraction of the solver's step
AT_ZERO = 1e-6  # after an event, the event function c counts as 0 if |c| < this factor * |dc/dt| * step size
ROUNDINGS = 32  # c counts as 0 if rounding errors of the state, multiplied by this number, can change its sign
CLOSE = 1 / 64  # an event within this fraction of the step after the last event is searched again in a shorter step


NAN_FUNCTION = (
    "the event function returned NaN in a step. Fix: define it also a little beyond the event, as torch.log of "
    "h.clamp(min=1e-9)"
)


@dataclass(frozen=True)
class Event:
    r"""A function of the time and of a sample's state, whose zeros are events of that sample.

    An event occurs when the function changes its sign along the solve. The solve of the sample then continues from
    ``jump(t, state)``, or ends if it was the last of ``max_count`` events. Later outputs then hold the last state. A
    function that is 0 at the start, or just after an event, causes an event only when it returns to 0.

    Each step is divided into eight equal parts. A zero is found if the function has different signs at the ends of a
    part. Two zeros in one part can be missed; ``options={"max_step": ...}`` limits the step size. The field and ``fn``
    must be defined a little beyond the event, because the solver first steps over the event to find it.

    Event times and states have exact first derivatives by the implicit function theorem, with respect to the initial
    state and the parameters of the field, ``fn`` and ``jump``. With ``gradient="adjoint"`` the derivatives have errors
    of the order of the tolerance, and the solve stores only the states at outputs and events.

    Arguments:
        fn: a function or module, ``fn(t, state) -> (batch,)``, with t of shape (batch,). Its value for a sample must
            depend on that sample only, and be differentiable at the event.
        jump: a function or module, ``jump(t, state) -> state``, which returns the state after the event. It is
            called with the whole batch, and only the samples with an event use the result. Default: None, which
            continues with the same state.
        direction: 1 for events at which ``fn`` increases along the solve, -1 for events at which it decreases, 0 for
            both. Default: 0.
        max_count: number of events after which the solve of a sample ends. Default: None, which is 1 without ``jump``,
            and no limit with it.

    Raises:
        TypeError: ``fn`` or ``jump`` is not callable.
        ValueError: ``direction`` or ``max_count`` is out of its range.

    Example:
        Two balls fall from heights of 1 and 2 and bounce twice; h'' = -10.

        >>> import torch, hbnode
        >>> ball = hbnode.HBNODE(lambda h: -10 + 0 * h, damping=0.0, learn_damping=False)
        >>> floor = hbnode.Event(lambda t, y: y[0][:, 0], jump=lambda t, y: (y[0], -0.5 * y[1]), max_count=2)
        >>> h = torch.tensor([[1.0], [2.0]])
        >>> solution, record = hbnode.odeint(ball, (h, 0 * h), [0.0, 3.0], events=floor)
        >>> record.t
        tensor([[0.4472, 0.8944],
                [0.6325, 1.2649]], dtype=torch.float64)
    """

    fn: Callable[[Tensor, Any], Tensor]
    jump: Callable[[Tensor, Any], State] | None = None
    direction: int = 0
    max_count: int | None = None

    def __post_init__(self) -> None:
        for name in ("fn", "jump"):
            value = getattr(self, name)
            if not callable(value) and not (name == "jump" and value is None):
                got = type(value).__name__
                raise TypeError(f"{name} must be callable as {name}(t, state), got {got}. Fix: lambda t, y: y[:, 0].")
        if not isinstance(self.direction, numbers.Real) or self.direction not in (-1, 0, 1):
            raise ValueError(f"direction must be -1, 0 or 1, got {self.direction!r}. Fix: direction=0 for both.")
        if self.max_count is not None:
            as_count(self.max_count, "max_count")

    @property
    def limit(self) -> float:
        """The number of events after which the solve of a sample ends; infinity if events do not end it."""
        return self.max_count or (np.inf if self.jump is not None else 1)


Event.__init__ = with_hints(Event.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True)
class EventRecord:
    """The events of a solve.

    Attributes:
        t: event times in float64, (batch, events). The entries after the last event of a sample are NaN.
        state: states at the event times, before the jump. They have the structure of the initial state and the shapes
            (batch, events, ...). The entries after the last event of a sample are NaN.
        count: number of events of each sample, (batch,).
    """

    t: Tensor
    state: Any
    count: Tensor


class EventHits(NamedTuple):
    """The samples that reach events at the end of a step.

    Attributes:
        lanes: the indices of the samples, (hits,).
        now: the times at which the steps end, since the start of the solve, (hits,).
        width: the sizes of the steps in which the events were found, (hits,).
        masks: whether each event function has an event, (hits, events).
        rows: the tensors of the states before the events, each (hits, ...).
    """

    lanes: Array
    now: Array
    width: Array
    masks: Array
    rows: Rows


class EventSteps(AdaptiveSteps):
    """The steps of a solve with events; each sample has its own steps, which end on its events.

    With fixed steps, every step is accepted, and the step after an event ends at the end of the interrupted step.

    Attributes:
        ended: the samples whose solve ends at the current events, and the tensors of their last states; None if no
            solve ends.
        first: the tensors of the initial state, without a graph. Samples whose solve has ended are reset to this state,
            because f may be singular at their last state.
    """

    def __init__(self, setup: Setup, state: Rows) -> None:
        grid, steps, self.events = setup.grid, setup.settings.steps, setup.events
        super().__init__(setup, state)
        none = np.zeros_like(grid.end)
        if steps is not None:
            ends = [grid.stops] if grid.jumps is None else [grid.stops, np.minimum(grid.jumps, grid.end[:, None])]
            times = np.sort(np.concatenate([none[:, None], *ends], -1), -1)
            gaps = np.diff(times)
            gaps = np.where((gaps < 2.2 * grid.near) & (grid.jumps is not None), 0.0, gaps)  # a single step over a jump
            stops = [times[:, :-1] + gaps * (i / steps) for i in range(steps)]
            self.clip = Clip(grid.end, np.sort(np.concatenate(stops + ends, -1), -1))
        self.next_event = none + np.nan  # the time of the next event of each sample
        self.due = np.zeros((len(self.events), len(none)), bool)  # which event functions have an event at that time
        self.counts = [none for _ in self.events]
        self.found: list[list[tuple[Array, Tensor, Rows]]] = [[] for _ in self.events]
        self.ended: tuple[Array, Rows] | None = None
        self.first = tuple([row.detach() for row in state[: self.stepper.term.rows]])
        eps = torch.finfo(self.stepper.like.dtype).eps
        self.at_zero, self.tolerance = max(AT_ZERO, 64 * eps), max(ROOT_TOLERANCE, 4 * eps)
        self.search_width = none  # size of the step in which the last event of a sample was found
        self.max_next_step = none + np.inf  # limit of the next step if two events are close together
        self.signs = [none for _ in self.events]
        self.quiet = [none - 1 for _ in self.events]  # before these times, c is too close to 0 to know its sign
        t, rows = self._time(none), state[: self.stepper.term.rows]
        nobody, masks = none[:0], np.zeros((0, len(self.events)), bool)
        self.hits = [EventHits(nobody.astype(int), nobody, nobody, masks, tuple([row[:0].detach() for row in rows]))]
        new = [none + np.inf for _ in self.events]
        self._set_signs(t, rows, self._slopes(t, rows), new, none, list(self.due), none == 0)

    # Steps

    def _first_size(self, state: Rows, norm: Array, longest: Array) -> tuple[Array, Array]:
        if self.setup.settings.steps is None:
            return super()._first_size(state, norm, longest)
        return norm[0] + np.inf, longest

    def _plan(self) -> None:
        end, c = np.fmin(self.next_event, self.grid.end), self.control
        c = c if self.setup.settings.steps is None else c._replace(size=self.max_next_step)
        self.then, self.control = self.controller.plan(np, replace(self.clip, end=end), c)

    def _ratio(self, attempt: Attempt, before: Rows, taken: Taken) -> Array:
        if self.setup.settings.steps is None:
            return super()._ratio(attempt, before, taken)
        return np.where(np.isfinite(self.stepper.norms(taken.state)).all(0), 0.0, np.inf)

    # Search

    def _refuse(self, before: Rows, taken: Taken, accepted: Array) -> Array:
        """Return a mask (batch,) of the samples that must repeat the step, because an event happens inside it.

        The attributes are set so that the next steps of these samples end on the events.

        Arguments:
            before: the state before the step.
            taken: the result of the step.
            accepted: mask of the samples whose error is small enough, (batch,).
        """
        n, now, size = self.stepper.term.rows, self.control.now, self.control.taken
        wanted = accepted & (size > 0) & np.isnan(self.next_event)
        self.max_next_step = np.where(accepted, np.inf, self.max_next_step)
        if not wanted.any():
            return wanted
        with torch.no_grad():
            dense = self._interpolant(before, taken)
            at_nodes = [before[:n], *dense(NODES[1:-1, None] + 0 * size), taken.state[:n]]
            found = [self._first_zero(k, dense, at_nodes, wanted) for k in range(len(self.events))]
            zeros, values, sides = (np.stack(x) for x in zip(*found, strict=True))
            first = zeros.min(0)
            is_hit = np.isfinite(first)
            if not is_hit.any():
                self.signs = list(sides[:, -1])
                return is_hit
            first = np.where(is_hit, first, 1.0)
            due = zeros <= first + 2 * self.tolerance
            if len(self.events) > 1:
                scale = tuple([torch.maximum(a.abs(), b.abs()) for a, b in zip(at_nodes[0], at_nodes[-1], strict=True)])
                due |= wanted & self._is_zero_at(first, dense, scale, zeros, values, sides)
            self.due = np.where(is_hit, due, self.due)
        is_close = is_hit & (first < CLOSE) & (self.due & (np.stack(self.quiet) >= now)).any(0)
        is_zeno = is_close & (first * size <= 4 * self.resolution * np.maximum(abs(self.grid.time(now)), self.grid.end))
        if is_zeno.any():
            lane = int(is_zeno.argmax())
            message = (
                f"the events of sample {lane} pile up: their distance is a rounding error of t. Fix: "
                "Event(..., max_count=n), which ends the solve of a sample at its n-th event, or a shorter solve"
            )
            raise self.stepper.failure(ZenoError, message, self.grid.time(now)[lane], size[lane])
        self.next_event = np.where(is_hit & ~is_close, np.clip(now + first * size, now, self.then), self.next_event)
        self.search_width = np.where(is_hit, size, self.search_width)
        self.max_next_step = np.where(is_close, size * np.maximum(4 * first, CLOSE), self.max_next_step)
        self.control = self.control._replace(size=np.minimum(self.control.size, self.max_next_step))
        passed = np.where(is_hit, np.maximum(first * (len(NODES) - 1), 0.0), len(NODES) - 1).astype(int)
        passed = np.where(is_close, 0, passed)  # number of nodes before the first event
        self.signs = [np.take_along_axis(side, passed[None], 0)[0] for side in sides]
        return is_hit

    def _interpolant(self, before: Rows, taken: Taken) -> Callable[[Array], list[Rows]]:
        """Return a function that interpolates the state inside the step from ``before`` to ``taken.state``.

        The function maps positions in the step from 0 to 1, (k, batch), to a list of k states. Methods without dense
        output use cubic Hermite interpolation.
        """
        columns, size, like = taken.columns, self.grid.sign * self.control.taken, self.stepper.like
        if columns is not None:

            def dense(theta: Array) -> list[Rows]:
                formula, lanes = self.stepper.method.dense_weights, np.arange(len(size))
                weights = self.stepper.at_gamma(formula, size, theta, lanes=lanes)
                return [combined(each, columns).unbind(1) for each in weights]

            return dense
        ends = [rows[: self.stepper.term.rows] for rows in (before, taken.state)]
        y0, y1 = (torch.stack(rows).detach() for rows in ends)
        times = (self._time(self.control.now), self._time(self.then))
        length = as_column(to_device(size, like), y0[0])
        d0, d1 = (length * torch.stack(self._slopes(t, rows)) for t, rows in zip(times, ends, strict=True))

        def cubic(a: Tensor) -> Rows:
            b = 1 - a
            return (b * b * ((1 + 2 * a) * y0 + a * d0) + a * a * ((1 + 2 * b) * y1 - b * d1)).unbind(0)

        return lambda theta: [cubic(as_column(to_device(x, like), y0[0])) for x in theta]

    def _first_zero(
        self, k: int, dense: Callable[[Array], list[Rows]], at_nodes: list[Rows], wanted: Array
    ) -> tuple[Array, Array, Array]:
        """Return the first event of event function ``k`` in the step, and the values and signs of c at the nodes.

        Here c is the value of the event function. An event is given by its position in the step from 0 to 1, or inf for
        a sample without an event. Because of errors it may lie a little before the step. Where c is 0, its last known
        sign is returned.
        """
        size, event = self.control.taken, self.events[k]

        def value(theta: Array, rows: Rows) -> Array:
            c = self._values(event, self._time(self.control.now + theta * size), rows)
            if np.isnan(c[wanted]).any():
                raise self.stepper.failure(
                    NonFiniteError, NAN_FUNCTION, self.grid.time(self.control.now)[wanted & np.isnan(c)], size
                )
            return c

        values = np.stack([value(theta, rows) for theta, rows in zip(NODES, at_nodes, strict=True)])
        sides, crosses = [self.signs[k]], []
        for theta, c in zip(NODES[1:], np.sign(values[1:]), strict=True):
            c = np.where(wanted & (self.control.now + theta * size > self.quiet[k]), c, sides[-1])
            crosses.append(self._crosses(event, sides[-1], c))
            sides.append(np.where(c != 0, c, sides[-1]))
        is_hit, i = np.any(crosses, 0), np.argmax(crosses, 0)
        zero = np.full_like(self.control.now, np.inf)
        if is_hit.any():
            side = np.take_along_axis(np.stack(sides), i[None], 0)[0]
            has_passed = (i == 0) & (side * values[0] < 0) & (self.control.now > self.quiet[k])
            low = np.where(has_passed, -NODES[1], NODES[i])
            high = np.where(is_hit, NODES[i + 1], 1.0)
            found = root(lambda x: side * value(x, dense(x[None])[0]), low, high, side * values, self.tolerance)
            zero = np.where(is_hit, found, zero)
        return zero, values, np.stack(sides)

    def _is_zero_at(
        self, theta: Array, dense: Callable[[Array], list[Rows]], scale: Rows, zeros: Array, values: Array, sides: Array
    ) -> Array:
        """Return a mask (events, batch) of the event functions that are 0 at ``theta`` up to rounding errors.

        At the positions ``theta`` (batch,) in the step, another event function has an event. A zero just after the end
        of the step counts as well.
        """
        found, t, rows = [], self._time(self.control.now + theta * self.control.taken), dense(theta[None])[0]
        for k, event in enumerate(self.events):
            rounding, side = self._rounding(event, t, rows, self._values(event, t, rows), scale), sides[k, -1]
            slope = np.polyval(slope_of(TO_POLYNOMIAL @ values[k]), np.minimum(zeros[k], 1.0))
            is_next = (abs(values[k, -1]) <= rounding) & (side * slope < 0) & self._crosses(event, side, -side)
            zero = np.where(is_next & (self.then > self.quiet[k]), 1.0, zeros[k])
            found.append((zero - theta) * abs(slope) <= rounding)
        return np.stack(found)

    def _rounding(self, event: Event, t: Tensor, rows: Rows, c: Array, scale: Rows) -> Array:
        """Return by how much rounding errors of the time and the state can change the event function, (batch,).

        Arguments:
            event: the event.
            t: the times, (batch,).
            rows: the tensors of the state.
            c: the values of the event function at ``t`` and ``rows``, (batch,).
            scale: the magnitudes of the elements of ``rows``, from which their rounding errors follow.
        """
        error, moved = ROUNDINGS * torch.finfo(self.stepper.like.dtype).eps, []
        for row, size in zip(rows, scale, strict=True):
            # different factors for the elements, so that differences such as y_1 - y_2 change, too
            uneven = (1 + GOLDEN * torch.arange(row[:1].numel(), device=row.device) % 1) / 2
            moved.append(row + error * size * uneven.view(row[:1].shape).to(row))
        return np.nan_to_num(abs(self._values(event, t * (1 + error), tuple(moved)) - c))

    @staticmethod
    def _crosses(event: Event, before: Array, after: Array) -> Array:
        """Return a mask of the samples whose event function has an event between two times.

        ``before`` and ``after`` are the signs of the function at these times. A sign ``before`` of 0 means that the
        sign is not known yet, so that there is no event.
        """
        return (before != 0) & (after != before) & ((event.direction == 0) | (before == -event.direction))

    # Events

    def apply_events(self, state: Rows) -> Rows:
        """Record the events that happen at the end of the last step, and return the state of the method after them.

        ``state`` is the state before the events. Without events it is returned unchanged.
        """
        landed, self.ended, term = self.next_event == self.control.now, None, self.stepper.term
        if not landed.any():
            return state
        lanes, masks, ends = landed.nonzero()[0], [], np.zeros_like(landed)
        t, rows = self._time(self.control.now), state[: term.rows]
        slopes = self._slopes(t, rows)
        for k, event in enumerate(self.events):
            masks.append(landed & ~ends & self.due[k])
            ends = ends | (masks[k] & (self.counts[k] + 1 >= event.limit))
        if not torch.is_grad_enabled():  # the adjoint later repeats the events of these hits with a graph
            hit_rows = tuple([row.detach()[to_device(lanes, self.stepper.like)] for row in rows])
            hit_events = np.stack(masks, 1)[lanes]
            self.hits.append(EventHits(lanes, self.control.now[lanes], self.search_width[lanes], hit_events, hit_rows))
        rows = self._pass(t, rows, slopes, masks)
        self.next_event = np.where(landed, np.nan, self.next_event)
        if self.stepper.method.is_fsal:
            f = term(self._stage(t), rows[0])
            rows = (*rows, torch.where(as_column(to_device(landed, self.stepper.like), f), f, state[-1]))
        return rows

    def _pass(self, t: Tensor, rows: Rows, slopes: Rows, masks: Sequence[Array]) -> Rows:
        """Return the tensors of the state after events, record the events, and set ``ended``.

        The events happen close to the times ``t`` (batch,), at which the state is ``rows`` and its time derivatives are
        ``slopes``. ``masks`` has one mask of samples per event function, True where the event happens. If
        several events happen at once, their times are computed from the state before the first jump.
        """
        before, none, like = (rows, slopes), torch.zeros_like(t), self.stepper.like
        landed, ends = np.any(masks, 0), np.zeros_like(masks[0])
        delays = [
            self._delay(event, t, rows, slopes, happens) if happens.any() else none
            for event, happens in zip(self.events, masks, strict=True)
        ]
        lag, final, jumps = none, rows, np.zeros_like(landed)
        for k, (event, happens, delay) in enumerate(zip(self.events, masks, delays, strict=True)):
            if not happens.any():
                continue
            which, mask = to_device(happens.nonzero()[0], like), as_column(to_device(happens, like), rows[0])
            shift = as_column(torch.where(mask.flatten(), delay - lag, 0.0), rows[0])
            lag = torch.where(mask.flatten(), delay, lag)
            rows = tuple([row + shift * slope for row, slope in zip(rows, slopes, strict=True)])
            self.found[k].append((happens.nonzero()[0], (t + lag)[which], tuple([row[which] for row in rows])))
            if event.jump is not None:
                rows, jumps = self._jumped(event.jump, t + lag, rows, mask), jumps | happens
                new = self._slopes(t + lag, rows)
                slopes = tuple([torch.where(mask, x, y) for x, y in zip(new, slopes, strict=True)])
            self.counts[k] = self.counts[k] + happens
            ending = happens & (self.counts[k] >= event.limit)
            if ending.any():
                is_ending = as_column(to_device(ending, like), rows[0])
                ends = ends | ending
                final = tuple([torch.where(is_ending, x, y) for x, y in zip(rows, final, strict=True)])
        if landed.any():
            shift, mask = (as_column(x, rows[0]) for x in (lag, to_device(jumps, like)))
            at_events = tuple([(row + shift * slope).detach() for row, slope in zip(*before, strict=True)])
            c = [self._values(event, t + lag, at_events) for event in self.events]
            lags = self.grid.sign * lag.detach().cpu().numpy()
            self._set_signs(t + lag, rows, slopes, c, lags, masks, landed)
            back = [row - shift * slope for row, slope in zip(rows, slopes, strict=True)]
            rows = tuple([torch.where(mask, x, row) for x, row in zip(back, before[0], strict=True)])
        self.ended = None
        if ends.any():
            which, is_ending = to_device(ends.nonzero()[0], like), as_column(to_device(ends, like), rows[0])
            self.ended = ends.nonzero()[0], tuple([row[which] for row in final])
            rows = tuple([torch.where(is_ending, first, row) for first, row in zip(self.first, rows, strict=True)])
        return rows

    def segments(self) -> Iterator[EventHits]:
        """Yield the recorded hits in another order: the first hit of every sample, then the second hits, and so on.

        The last item has no samples.

        The recorded events are cleared, so that :meth:`repeat` can record them with a graph.
        """
        seen, number = np.zeros(len(self.grid.end), int), []
        self.counts, self.found = [0 * count for count in self.counts], [[] for _ in self.events]
        for hits in self.hits:
            number.append(seen[hits.lanes])
            seen[hits.lanes] += 1
        *arrays, rows = zip(*self.hits, strict=True)
        lanes, now, width, masks = map(np.concatenate, arrays)
        columns = [torch.cat(row) for row in zip(*rows, strict=True)]
        for n in range(seen.max(initial=0) + 1):
            i = (np.concatenate(number) == n).nonzero()[0]
            segment_rows = tuple([column[to_device(i, self.stepper.like)] for column in columns])
            yield EventHits(lanes[i], now[i], width[i], masks[i], segment_rows)

    def repeat(self, hits: EventHits, now: Array, rows: Rows) -> Rows:
        """Repeat the events of ``hits`` with an autograd graph, and return the state after them.

        ``rows`` holds the state of all samples at the times ``now``, before the events.
        """
        self.control, masks = self.control._replace(now=now), np.zeros((len(now), len(self.events)), bool)
        self.search_width = self.search_width.copy()
        self.search_width[hits.lanes], masks[hits.lanes] = hits.width, hits.masks
        t = self._time(now)
        return self._pass(t, rows, self._slopes(t, rows) if masks.any() else (), masks.T)

    def end(self) -> None:
        """End the solves of the samples in ``ended``: set their current times to their final times."""
        if self.ended is not None:
            now = self.control.now.copy()
            now[self.ended[0]] = self.grid.end[self.ended[0]]
            self.control = self.control._replace(now=now)

    def _delay(self, event: Event, t: Tensor, rows: Rows, slopes: Rows, happens: Array) -> Tensor:
        """Return the times from ``t`` to the events of one event function, (batch,), by a Newton step; else 0.

        The gradient is that of the implicit function theorem. ``rows`` are the tensors of the state at ``t``, and
        ``slopes`` their time derivatives. ``happens`` is a mask of the samples that have the event.
        """
        mask = to_device(happens, self.stepper.like)
        rate = self._rate(event, t, rows, slopes)
        c = self._condition(event, t, self._only(mask, rows))
        is_crossing = mask & (rate != 0)
        if c.requires_grad and not torch.equal(is_crossing, mask):
            at = self.grid.time(self.control.now)[happens & (rate == 0).cpu().numpy()]
            message = (
                "the event function touches 0 with dc/dt = 0, so the event time has no derivative. "
                "Fix: solve under torch.no_grad(), or use a function that crosses 0"
            )
            raise self.stepper.failure(SolverError, message, at, self.control.taken)
        delay = torch.where(is_crossing, -c.to(t) / torch.where(is_crossing, rate, 1.0), 0.0)
        delay = torch.where(delay.abs() <= to_device(self.search_width, self.stepper.like).to(t), delay, 0.0 * delay)
        if delay.requires_grad:
            delay.register_hook(_refuse_higher)
        return delay

    def _jumped(self, jump: Callable[[Tensor, Any], State], t: Tensor, rows: Rows, mask: Tensor) -> Rows:
        state = self.stepper.term.unflatten(self._only(mask.flatten(), rows))
        jumped = jump(t.to(self.stepper.like), state)
        same = isinstance(jumped, type(state)) and len(parts(jumped)) == len(parts(state))
        pairs = list(zip(parts(jumped), parts(state), strict=True)) if same else []
        if not same or any(x.shape != y.shape or x.dtype != y.dtype for x, y in pairs):
            kinds = ", ".join(str(x.dtype) for x, _ in pairs)
            raise ValueError(
                f"jump must return a state like its argument, {describe(state)} in {self.stepper.like.dtype}, got "
                f"{describe(jumped)} {kinds}. Fix: jump=lambda t, y: -y, or (y[0], -y[1]) for a tuple."
            )
        jumped = self.stepper.term.flatten(jumped)
        if not all(bool(torch.isfinite(x[mask.flatten()]).all()) for x in jumped):
            message = (
                "a jump returned a state that is not finite. Fix: check it for log, sqrt or a division at this state"
            )
            raise self.stepper.failure(NonFiniteError, message, t[mask.flatten()], self.control.taken)
        return tuple([torch.where(mask, new, old) for new, old in zip(jumped, rows, strict=True)])

    def _set_signs(
        self, t: Tensor, rows: Rows, slopes: Rows, before: Sequence[Array], lag: Array, fired: Sequence[Array],
        lanes: Array,
    ) -> None:  # fmt: skip
        """Set the known signs of the event functions after events, for the samples in the mask ``lanes``.

        A function that had an event or was changed by a jump gets the sign of its value, or, if the value is 0 up to
        errors, the sign of dc/dt. All other functions keep their signs, because they may just have crossed zero.

        Arguments:
            t: the event times, (batch,).
            rows: the tensors of the state after the events.
            slopes: the time derivatives of the state.
            before: the values of the event functions before the events.
            lag: the times from the end of the step to the events.
            fired: for each event function, a mask of the samples in which it had an event.
            lanes: a mask of the samples to change.
        """
        for k, event in enumerate(self.events):
            c = self._values(event, t, rows)
            rate = self._rate(event, t, rows, slopes).double().cpu().numpy() * self.grid.sign
            rounding = self._rounding(event, t, rows, c, tuple([row.abs() for row in rows]))
            band = self.at_zero * self.search_width * abs(rate) + rounding
            is_moved = abs(c - before[k]) > band
            is_far, is_set = is_moved & (abs(c) > band), lanes & (fired[k] | is_moved)
            self.signs[k] = np.where(is_set, np.sign(np.where(is_far, c, rate)), self.signs[k])
            wait = np.maximum(lag, 0.0) + np.minimum(band / np.where(rate != 0, abs(rate), np.inf), self.search_width)
            self.quiet[k] = np.where(is_set & (fired[k] | ~is_far), self.control.now + wait, self.quiet[k])

    def record(self, own: Callable[[State], Any]) -> tuple[EventRecord, ...]:
        """Return a tuple with the :class:`EventRecord` of each event function.

        ``own`` is a function that is applied to the event times and to the states of each record. It adds references to
        the objects that the backward pass needs.
        """
        records, term, like = [], self.stepper.term, self.stepper.like
        for event, counts, found in zip(self.events, self.counts, self.found, strict=True):
            width = int(event.limit if event.limit < np.inf else counts.max(initial=0))
            place = np.full((len(self.grid.end), width), -1)  # the index -1 selects NaN
            lanes = np.concatenate([np.zeros(0, int), *(lanes for lanes, *_ in found)])
            order = lanes.argsort(kind="stable")  # keeps the chronological order of the events of a sample
            place[np.arange(width) < counts[:, None]] = order
            index = to_device(place.T, like)
            times = torch.cat([*(t for _, t, _ in found), to_device(np.full(1, np.nan), like)])
            rows: list[Tensor] = []
            for i, row in enumerate(term.flatten(term.like)):
                rows.append(torch.cat([*(states[i] for *_, states in found), row[:1].detach() * torch.nan])[index])
            state = apply(lambda x: x.movedim(1, 0), term.unflatten(tuple(rows), (width,)))
            records.append(EventRecord(own(times[index].T), own(state), to_device(counts.astype(int), like)))
        return tuple(records)

    # Values

    def _time(self, elapsed: Array) -> Tensor:
        """Return the times t (batch,) for times ``elapsed`` since the start of the solve, as a float64 tensor.

        If the output times need gradients, the result has gradients with respect to them.
        """
        if self.grid.t is not None:
            return self.grid.differentiable(elapsed).double()
        return to_device(self.grid.time(elapsed), self.stepper.like)

    def _stage(self, t: Tensor) -> Tensor:
        return t.to(self.stepper.like).view(-1, *[1] * (self.stepper.term.dims - 1))

    def _only(self, mask: Tensor, rows: Rows) -> Rows:
        """Return the state with all samples outside ``mask`` replaced by constant copies of a sample inside it.

        At the states of the other samples, the event function or the jump may have infinite gradients, which a later
        multiplication by 0 would turn into NaN.
        """
        first = int(mask.to(torch.uint8).argmax())
        return tuple([torch.where(as_column(mask, row), row, row[first].detach()) for row in rows])

    def _slopes(self, t: Tensor, rows: Rows) -> Rows:
        """Return the time derivatives of the state ``rows`` without an autograd graph; this counts as an evaluation."""
        self.stepper.term.counter.add("evaluation")
        with torch.no_grad():
            return self.stepper.term.derivative(self._stage(t.detach()), tuple([row.detach() for row in rows]))

    def _condition(self, event: Event, t: Tensor, rows: Rows) -> Tensor:
        try:
            c = event.fn(t.to(self.stepper.like), self.stepper.term.unflatten(rows))
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise ValueError(
                "an event function is also evaluated without a graph, so it must not call torch.autograd.grad. "
                "Fix: torch.func.grad(lambda y: V(y).sum())(y), for a function V."
            ) from error
        if not isinstance(c, Tensor) or c.shape != (len(self.grid.end),):
            got = f"shape {tuple(c.shape)}" if isinstance(c, Tensor) else type(c).__name__
            raise ValueError(
                f"an event function must return a tensor of shape (batch,) = ({len(self.grid.end)},), got {got}. "
                "Fix: Event(lambda t, y: y[:, 0]), or c.squeeze(-1); y0.unsqueeze(0) for a state without a batch."
            )
        return c

    def _values(self, event: Event, t: Tensor, rows: Rows) -> Array:
        with torch.no_grad():
            return self._condition(event, t.detach(), tuple([row.detach() for row in rows])).double().cpu().numpy()

    def _rate(self, event: Event, t: Tensor, rows: Rows, slopes: Rows) -> Tensor:
        """Return the derivative dc/dt of the event function c along the solution, (batch,), without an autograd graph.

        ``rows`` are the tensors of the state at the times ``t``, and ``slopes`` their time derivatives.
        """
        if torch.is_inference_mode_enabled():  # fn may use tensors that autograd cannot save
            size = np.where(self.control.taken > 0, self.control.taken, self.grid.end)
            step = DIFFERENCE * to_device(size, self.stepper.like)
            shift = as_column(step, rows[0])
            ends = [tuple([row + i * shift * s for row, s in zip(rows, slopes, strict=True)]) for i in (-1, 1)]
            before, after = (self._condition(event, t + i * step, end) for i, end in zip((-1, 1), ends, strict=True))
            return torch.where(step > 0, (after - before) / (2 * step), 0.0)
        with torch.enable_grad():
            inputs = [x.detach().clone().requires_grad_() for x in (t, *rows)]
            c = self._condition(event, inputs[0], tuple(inputs[1:]))
            found = torch.autograd.grad(c.sum(), inputs, allow_unused=True) if c.requires_grad else [None]
            if all(g is None for g in found):
                raise ValueError(
                    "an event function must be differentiable, got a value without a graph. "
                    "Fix: compute it from t and the state by torch operations, without comparisons and detach()."
                )
        rate = torch.zeros_like(t) if found[0] is None else found[0]
        for g, slope in zip(found[1:], slopes, strict=True):
            rate = rate if g is None else rate + (g * slope).unsqueeze(-1).flatten(1).sum(1)
        return rate


def as_column(x: Tensor, row: Tensor) -> Tensor:
    """Reshape ``x`` (batch,) to (batch, 1, ..., 1), so that it broadcasts with ``row`` (batch, ...).

    The result has the dtype of ``row``, except that a bool tensor keeps its dtype.
    """
    x = x if x.dtype == torch.bool else x.to(row.dtype)
    return x.view(-1, *[1] * (row.dim() - 1))


def root(value: Callable[[Array], Array], low: Array, high: Array, at_nodes: Array, tolerance: float) -> Array:
    """Return a zero of ``value`` for every sample, (batch,).

    ``value`` maps positions θ (batch,) to the values of one function per sample. Each function is positive just after
    ``low`` and not positive at ``high``. The first guess is a zero of the polynomial through the values ``at_nodes``
    (nodes, batch). Newton steps with the slope of the polynomial correct it until they are smaller than ``tolerance``.
    A Newton step out of the interval is replaced by a bisection.
    """
    polynomial = TO_POLYNOMIAL @ at_nodes
    slope = slope_of(polynomial)
    left, right = low, high
    for _ in range(BISECTIONS):
        theta = (left + right) / 2
        is_left = np.polyval(polynomial, theta) > 0
        left, right = np.where(is_left, theta, left), np.where(is_left, right, theta)
    for _ in range(CORRECTIONS):
        c = value(theta)
        low, high = np.where(c > 0, theta, low), np.where(c > 0, high, theta)
        with np.errstate(all="ignore"):
            new = theta - c / np.polyval(slope, theta)
        new = np.where((new >= low) & (new <= high), new, (low + high) / 2)
        is_done, theta = (abs(new - theta) < tolerance) | (c == 0), new
        if is_done.all():
            break
    return theta


def slope_of(polynomial: Array) -> Array:
    """Return the coefficients of the derivative of each sample's polynomial, (coefficients - 1, batch).

    ``polynomial`` holds coefficients from the highest power to the lowest, (coefficients, batch).
    """
    return polynomial[:-1] * np.arange(len(polynomial) - 1, 0, -1)[:, None]


def _refuse_higher(gradient: Tensor) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError("events give first derivatives only, got create_graph=True. Fix: leave create_graph out.")


def checked_events(events: Any, settings: Any) -> tuple[Event, ...]:
    """Return ``events`` as a tuple; raise an error if they are no events or if the settings do not allow events."""
    given = (events,) if isinstance(events, Event) else events
    if not isinstance(given, Sequence) or not given or not all(isinstance(event, Event) for event in given):
        raise TypeError(f"events must be an Event or a list of them, got {events!r}. Fix: hbnode.Event(fn).")
    if not settings.is_native:
        fix = "leave method out, or hbnode.torchdiffeq.odeint_event"
        raise ValueError(f"events are for native methods, got method={settings.method!r}. Fix: {fix}.")
    if getattr(settings.gradient, "name", settings.gradient) == "reversible":
        raise ValueError("gradient='reversible' does not support events. Fix: gradient='checkpoint', the default.")
    if is_transformed():
        raise ValueError("events do not work under the transforms of torch.func. Fix: torch.autograd.")
    return tuple(given)
