"""The functions that torch.compile compiles for solves with ``compile=True``.

A program is one compiled function. It computes a whole solve if there are few fixed steps, otherwise one step, with
its error norm if steps are adaptive. Each field stores its programs. NFE are counted outside the compiled graphs.
"""

from __future__ import annotations

import math
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hbnode._torch import is_recompile_limit, new_sequence_number, recompile_limit
from hbnode._tree import State, apply, parts
from hbnode.errors import RecomputationError
from hbnode.fields import Field
from hbnode.nfe import open_records
from hbnode.solve.adaptive import AdaptiveSteps
from hbnode.solve.adjoints import CHANGED, CHANGES_BUFFERS, SHORT, is_same, owned, saved_bytes
from hbnode.solve.graph import Attempts, Limits, Report, Times, Uncounted, attempts, joined, split
from hbnode.solve.grid import Array, Grid, to_device
from hbnode.solve.loop import Solution, start_of
from hbnode.solve.methods import Explicit, Method
from hbnode.solve.stepper import Rows, Setup
from hbnode.solve.term import ODETerm, Snapshot

STABLE = 3  # solves in a row with the same number of attempts, before a graph of that many is made
LONGEST = 16  # attempts in one graph
MOST_OUTPUTS = 16  # output times of a solve in graphs, whose attempts interpolate all of them
GRAPHS = 64  # of one program; dynamo's own limit of 8 is met by states of other dimensions and frozen parameters


class CompilationWarning(UserWarning):
    """A warning that torch.compile failed and that the solve runs without compilation."""


class Program:
    """A function compiled to one graph for each kind of arguments; it returns None for those that were not compiled.

    It warns once if compilation fails, and then always returns None, or if there are ``GRAPHS`` graphs.
    """

    def __init__(self, function: Callable[..., Any], device_type: str) -> None:
        code = function.__code__.replace()  # a copy, because dynamo limits the graphs per code object
        own = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        options: dict[str, Any] = {"guard_filter_fn": _needed_guards}
        if device_type == "cpu":
            options["cpp_wrapper"] = True  # steps on the CPU are short, so the calls of kernels are compiled, too
        self.run = torch.compile(own, fullgraph=True, options=options)
        self.failed = self.is_full = False

    def __call__(self, *args: Any) -> Any:
        if self.failed:
            return None
        try:
            with warnings.catch_warnings():
                # dynamo reads .grad of every input
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                try:
                    return self.run(*args)
                except Exception as error:
                    if not is_recompile_limit(error):
                        raise
                with recompile_limit(GRAPHS):  # only now, because a change of the limit takes longer than a step
                    return self.run(*args)
        except Exception as error:  # the solve runs without compilation
            if not is_recompile_limit(error):
                self.failed = True
                warn(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            elif not self.is_full:
                self.is_full = True
                warn(
                    f"{GRAPHS} graphs of this field exist, and other arguments run without compilation",
                    "as few numbers of dimensions, frozen parameters and Python values in func as possible",
                )
            return None


def _needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Return which guards of a graph are checked in each call: not those of hbnode's and torch's own constants."""
    ours = ("method", "G['__builtins", "G['__import_hbnode", "G['__import_torch")
    return [not g.name.startswith(ours) and not (g.is_global and "G['__import" not in g.name) for g in guards]


def warn(reason: str, fix: str = "compile=False, or replace in func what torch.compile cannot trace") -> None:
    warnings.warn(f"compile=True has no effect: {reason}. Fix: {fix}.", CompilationWarning, stacklevel=2)


def program(term: ODETerm, key: tuple[Any, ...], make: Callable[[], Callable[..., Any]]) -> Program:
    """Return the compiled program of a field for a key, and create it with ``make`` at the first call."""
    programs = store(term)
    modes = tuple([module.training for module in term.inner.modules()])
    key = (*key, modes, term.template.device.type, term.autocast, torch.is_grad_enabled())
    if key not in programs:
        programs[key] = Program(make(), term.template.device.type)
    return programs[key]


def store(term: ODETerm) -> dict[Any, Any]:
    """Return the programs of a field, and what is known of them."""
    if not isinstance(term.inner, Field):
        kind = type(term.inner).__name__
        raise ValueError(f"compile=True needs an hbnode field, got {kind}. Fix: hbnode.NODE(func).")
    return term.inner.compiled


def attempt(term: ODETerm, method: Method, rtol: float, atol: float, *, error: bool) -> Callable[..., Any]:
    """Return a function that computes one step of a method and its error norm.

    The function takes the state, the method's coefficients, the stage times, and y0, of which only the shapes matter.
    It returns the state after the step, and the norm if ``error`` is true, else None.
    """
    field, second_order, n, own_steps = term.inner, term.second_order, term.rows, term.lanes is not None
    in_autocast = term.in_autocast

    def step(
        state: tuple[Tensor, ...], packed: tuple[Tensor, ...], times: list[Tensor], y0: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        lanes = len(y0 if isinstance(y0, Tensor) else y0[0]) if own_steps else None
        evaluate = ODETerm(field, y0, Uncounted(), second_order=second_order, lanes=lanes)
        evaluate.in_autocast = in_autocast  # autocast is disabled outside the field
        result = method.step(state, packed, times, evaluate, error=error)
        if result.error is None:
            return result.state, None
        scale = torch.maximum(torch.stack(state[:n]).abs(), torch.stack(result.state[:n]).abs()).detach()
        ratio = result.error.detach() / (scale * rtol + atol)
        if own_steps:
            return result.state, ratio.movedim(1, 0).flatten(1).double().square().mean(1).sqrt()
        return result.state, ratio.double().square().mean().sqrt()

    return step


# Adaptive solves


def is_possible(setup: Setup, y0: State) -> bool:
    """Return whether graphs can solve: adaptive explicit methods, at few times without gradients, without events."""
    settings, grid, gradient = setup.settings, setup.grid, setup.settings.gradient
    if not isinstance(setup.stepper.method, Explicit) or not isinstance(grid, Grid) or grid.t is not None:
        return False
    if settings.steps is not None or settings.jump_times or settings.common_steps or setup.events or open_records:
        return False
    if getattr(gradient, "name", gradient) not in ("direct", "checkpoint"):
        return False
    return 0 < grid.outputs.shape[-1] <= MOST_OUTPUTS and parts(y0)[0].numel() > 0


def solve(setup: Setup, y0: State, snapshot: Snapshot, keep_bytes: int | None) -> Solution | None:
    """Solve by compiled attempts; return None if they cannot be compiled or fail, for a solve in Python that says why.

    A graph of one attempt is called until the solve is done. If the last solves took the same number of attempts, one
    graph has all of them. With gradients, more than ``keep_bytes`` of their graph are recomputed, if it is not None.
    """
    run = _Run(setup, y0, snapshot, keep_bytes)
    counter = setup.stepper.term.counter
    before = counter.nfe.forward
    found = run.whole() or run.one_by_one()
    if run.keep_bytes is not None and snapshot.changed():
        raise ValueError(CHANGES_BUFFERS.format("checkpoint"))
    if found is None:
        counter.add("evaluation", before - counter.nfe.forward)
    return found


class _Run:
    """A solve by compiled attempts."""

    def __init__(self, setup: Setup, y0: State, snapshot: Snapshot, keep_bytes: int | None) -> None:
        self.setup, self.y0, self.snapshot, self.needs_gradient = setup, y0, snapshot, torch.is_grad_enabled()
        self.options = setup.settings.options or {}
        self.keep_bytes = keep_bytes if self.needs_gradient else None
        term, self.method, self.is_exact = setup.stepper.term, setup.stepper.method, setup.settings.save == "exact"
        self.term, self.is_exact = term, self.is_exact and not setup.end_only
        self.key = (setup.settings.method, self.is_exact, term.lanes is None, setup.end_only)
        self.like, self.owned, self.bytes = apply(torch.empty_like, y0), (), -1.0
        self.history: list[int] = store(term).setdefault((*self.key, self.needs_gradient), [])

    def times(self, setup: Setup, longest: Array, margin: Array) -> Times:
        """Return what the graphs need to know of a setup."""
        grid, settings, device = setup.grid, setup.settings, setup.stepper.like.device
        resolution = torch.finfo(setup.stepper.like.dtype if self.term.time_dependent else torch.float64).eps
        shortest, rounding = self.options.get("min_step", 1e-300), np.finfo(float).eps * grid.furthest
        tolerances = settings.rtol, settings.atol
        limits = Limits(grid.begin, grid.sign, grid.end, *tolerances, longest, shortest, margin, rounding, resolution)
        outputs, jumps = None if setup.end_only else to_device(grid.outputs, setup.stepper.like), grid.jumps
        if jumps is not None:  # padded to few lengths, each of which has a graph
            more = 2 ** (jumps.shape[-1] - 1).bit_length() - jumps.shape[-1]
            jumps = to_device(
                np.pad(jumps, [(0, 0)] * (jumps.ndim - 1) + [(0, more)], constant_values=math.inf), outputs
            )
        gamma = torch.as_tensor(setup.stepper.gamma, dtype=torch.float64, device=device)
        return Times(joined(limits, np.shape(grid.end), device), gamma, outputs, jumps)

    def program(self, count: int, *, starts: bool) -> Program:
        make = lambda: attempts(self.term, self.method, count, starts=starts, is_exact=self.is_exact)  # noqa: E731
        return program(self.term, (*self.key, count, starts), make)

    def solution(self, rows: Rows, saved: Rows | None) -> Solution:
        """Return the rows at all times, or at the end."""
        if saved is None:
            return Solution(tuple([row.unsqueeze(0) for row in rows[: self.term.rows]]), None, self.owned)
        if self.term.lanes is not None:
            saved = tuple([row.movedim(1, 0) for row in saved])
        first = self.term.flatten(self.y0)
        return Solution(
            tuple([torch.cat([a.unsqueeze(0), b]) for a, b in zip(first, saved, strict=True)]), None, self.owned
        )

    def count(self, evaluations: int, accepted: int, rejected: int) -> None:
        counter = self.term.counter
        counter.nfe.keeps_graph = self.needs_gradient and not self.owned
        for event, number in (("evaluation", evaluations), ("accepted", accepted), ("rejected", rejected)):
            counter.add(event, number)
        self.history[:] = [*self.history, accepted + rejected][-STABLE:]

    def whole(self) -> Solution | None:
        """Solve by one graph that has the start and as many attempts as the last solves; None if they differed."""
        attempts, setup = self.history[-1] if self.history else 0, self.setup
        if len(self.history) < STABLE or len({*self.history}) > 1 or attempts > LONGEST:
            return None
        if self.term.time_dependent or "first_step" in self.options or not self.stores(attempts):
            return None
        strongest, longest = setup.stepper.strongest, self.options.get("max_step", math.inf)
        longest = min(longest, self.method.damping_limit / strongest) if strongest else longest
        times = self.times(setup, longest, 1.0)
        result = self.program(attempts, starts=True)(self.y0, times, None, None, None, None)
        if result is None:
            return None
        report = Report(*result[3].tolist())
        if not report.done or report.failed or (report.excluded and self.needs_gradient):
            self.history.clear()
            return None
        self.count(1 + attempts * self.method.evaluations, report.accepted, report.rejected)
        return self.solution(result[0], result[2])

    def one_by_one(self) -> Solution | None:
        """Solve by a graph of one attempt, with the start in Python."""
        program = self.program(1, starts=False)
        if program.failed:
            return None
        setup, rows = start_of(self.setup, self.y0)
        steps, grid, most = AdaptiveSteps(setup, rows), setup.grid, setup.settings.max_steps
        times = self.times(setup, steps.controller.longest, steps.error_factor)
        control = joined(steps.control, np.shape(grid.end), setup.stepper.like.device)
        rows = tuple([row.clone() for row in rows])  # as after an attempt, no views; else they had a graph of their own
        if self.needs_gradient:
            rows = tuple([row if row.requires_grad else row.requires_grad_() for row in rows])
        saved = Attempts(self.term, self.method, times).saved(rows)
        most += grid.outputs.shape[-1] - 1 if self.is_exact else 0
        left = (setup.max_nfe or math.inf) - self.term.counter.nfe.forward
        evaluations = accepted = rejected = 0
        report = Report(0, 0, 0, 0, int((grid.end <= 0).all()))
        while not report.done:
            evaluations += self.method.evaluations
            if report.failed or accepted + rejected >= most or evaluations > left:
                return None
            given, done = (self.like, times, rows, control, saved), accepted + rejected + 1
            result = self.take(program, done, *given, None)
            if result is None:
                return None
            report = Report(*result[3].tolist())
            if report.excluded and report.accepted and self.needs_gradient:
                c = split(result[1])
                result = self.take(program, done, *given, c.rejected & (c.failures > 0))
                evaluations += self.method.evaluations
            control = result[1]
            if report.accepted:
                rows, _, saved, _ = result
            accepted, rejected = accepted + report.accepted, rejected + report.rejected
        self.count(evaluations, accepted, rejected)
        return self.solution(rows, saved)

    # Gradients

    def stores(self, attempts: int) -> bool:
        """Return whether the graph of that many attempts is stored."""
        if self.keep_bytes is None or attempts * self.method.evaluations <= SHORT * (self.keep_bytes > 0):
            return True
        self.bytes = store(self.term).get((*self.key, "bytes", parts(self.y0)[0].shape), -1.0)
        return 0 <= attempts * self.bytes <= self.keep_bytes

    def take(self, program: Program, attempts: int, *args: Any) -> Any:
        """Call the program, and store its graph, or recompute it in the backward pass if it becomes too large."""
        if self.stores(attempts):
            return program(*args)
        if self.bytes < 0 and self.keep_bytes:
            first, own = new_sequence_number(), [tensor for _, _, tensor in self.snapshot.slots]
            result = program(*args)
            if result is not None:
                saved = saved_bytes((*result[0], *(result[2] or ())), (*args[2], *(args[4] or ())), own, first)
                store(self.term)[(*self.key, "bytes", parts(self.y0)[0].shape)] = saved
            return result
        self.owned = (self.setup.stepper, self.snapshot, program)
        with set_checkpoint_early_stop(False):
            again = _recomputed(*self.owned)
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


def _recomputed(stepper: Any, snapshot: Snapshot, program: Program) -> Callable[..., Any]:
    """Return a call of the program that must end in the same state in both passes."""
    references, end = [weakref.ref(x) for x in (stepper, snapshot, program)], []

    def run(*args: Any) -> Any:
        stepper, snapshot, program = map(owned, references)
        if not end:
            result = program(*args)
            end.extend(() if result is None else [x.detach() for x in result[0]])
            return result
        with snapshot:
            result = program(*args)
            stepper.term.counter.add("evaluation", stepper.method.evaluations)
            stepper.term.counter.add("accepted")
            if snapshot.changed() or result is None or not is_same(result[0], tuple(end)):
                raise stepper.failure(RecomputationError, CHANGED, math.nan, math.nan)
        return result

    return run
