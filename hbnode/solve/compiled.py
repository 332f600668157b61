"""The functions that torch.compile compiles for solves with ``compile=True``.

A program is one compiled function. With fixed steps it is a whole solve if they are few, otherwise one step. With
adaptive steps it is one attempt with the controller of :mod:`hbnode.solve.graph`, or a whole solve of as many attempts
as the last solves had. Each field stores its programs. NFE are counted outside the compiled graphs.
"""

from __future__ import annotations

import functools
import math
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hbnode._torch import is_recompile_limit, needs_reference, new_sequence_number, recompile_limit
from hbnode._tree import State, apply, parts
from hbnode.fields import GHBNODE, HBNODE, Field
from hbnode.nfe import Tally, open_records
from hbnode.solve import graph
from hbnode.solve.adaptive import AdaptiveSteps
from hbnode.solve.adjoints import CHANGES_BUFFERS, SHORT, owning, recomputed, saved_bytes
from hbnode.solve.grid import Grid, to_device
from hbnode.solve.loop import start_of
from hbnode.solve.methods import Array, Explicit, Method, Rows
from hbnode.solve.settings import Settings
from hbnode.solve.stepper import Setup, Stepper
from hbnode.solve.term import ODETerm, Snapshot, change_of_call, solving

STABLE = 50  # solves in a row with the same number of attempts, before a graph of that many is made
AGAIN = 3  # the same if that graph exists
LONGEST = 16  # attempts in one graph
EXACT = 3  # graphs of that kind for each field, method and mode
MOST_OUTPUTS = 16  # output times of a solve in graphs, whose attempts interpolate all of them
GRAPHS = 64  # of one program; dynamo's own limit of 8 is met by states of other dimensions and frozen parameters


Made = TypeVar("Made")


class CompilationWarning(UserWarning):
    """A warning that torch.compile failed and that the solve runs without compilation."""


class Program:
    """A function compiled to one graph for each kind of arguments; it returns None for those that were not compiled.

    It warns once if compilation fails, and then always returns None, or if there are ``GRAPHS`` graphs.
    """

    def __init__(self, function: Callable[..., Any], device_type: str) -> None:
        code = function.__code__.replace()  # a copy, because dynamo limits the graphs per code object
        own = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        options: dict[str, Any] = {}
        if device_type == "cpu":
            options["cpp_wrapper"] = True  # steps on the CPU are short, so the calls of kernels are compiled, too
            # the default, but as a key of inductor's cache on disk, which else mixes the code of two kinds of CPUs
            options["cpp.simdlen"] = {"AVX2": 256, "AVX512": 512}.get(torch.backends.cpu.get_cpu_capability())
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


def warn(reason: str, fix: str = "compile=False, or replace in func what torch.compile cannot trace") -> None:
    warnings.warn(f"compile=True has no effect: {reason}. Fix: {fix}.", CompilationWarning, stacklevel=2)


def modes(snapshot: Snapshot) -> tuple[Any, ...]:
    """Return the modes of a field's modules, and their hooks, which the guards of a graph do not check."""
    return tuple(
        [
            (mode, *of._forward_hooks, *of._forward_pre_hooks, *of._backward_hooks, *of._backward_pre_hooks)
            for of, mode in snapshot.modes
        ]
    )


def program(term: ODETerm, snapshot: Snapshot, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """Return what was compiled of a field for a key and its modes and hooks, and ``make`` it at the first call."""
    if not isinstance(term.inner, Field):
        kind = type(term.inner).__name__
        raise ValueError(f"compile=True needs an hbnode field, got {kind}. Fix: hbnode.NODE(func).")
    programs = term.inner.compiled
    key = (*key, modes(snapshot), term.template.device.type, term.autocast, torch.is_grad_enabled())
    if key not in programs:
        programs[key] = make()
    made: Made = programs[key]
    return made


def attempt(term: ODETerm, method: Method, rtol: float, atol: float, *, error: bool) -> Callable[..., Any]:
    """Return a function that computes one step of a method and its error norm.

    The function takes the state, the method's coefficients, the stage times, and y0, of which only the shapes matter.
    It returns the state after the step, and the norm if ``error`` is true, else None.
    """
    inside, n = graph.inside_of(term), term.rows

    def step(state: Rows, packed: Rows, times: list[Tensor], y0: Any) -> tuple[Rows, Tensor | None]:
        evaluate = inside(y0)
        result = method.step(state, packed, times, evaluate, error=error)
        if result.error is None:
            return result.state, None
        with torch.no_grad():
            return result.state, graph.error_ratio(evaluate, state[:n], result.state[:n], result.error, rtol, atol)

    return step


# Adaptive solves


def key_of(
    field: Any, y0: State, t: Any, settings: Settings, snapshot: Snapshot, *, end: bool
) -> tuple[Any, ...] | None:
    """Return what a solve depends on besides the inputs of its graph: a solve with an equal key needs no checks again.

    Return None if this is not known, as for times with gradients or fields inside other modules.
    """
    if snapshot.masks or open_records or needs_reference() or not isinstance(field, Field):
        return None
    if isinstance(t, (Tensor, np.ndarray)) and not getattr(t, "requires_grad", False) and t.ndim == 1:
        t = t.tolist()
    tensors = (y0,) if isinstance(y0, Tensor) else y0
    if not isinstance(t, (list, tuple)) or type(tensors) is not tuple or not tensors:
        return None
    if any(type(x) not in (float, int) for x in t) or any(type(x) is not Tensor for x in tensors):
        return None
    kinds = tuple([(x.shape, x.dtype, x.device) for x in tensors])
    gamma = field.solver_damping() if isinstance(field, HBNODE | GHBNODE) and field.omega is None else 0.0
    values = vars(settings) | {"options": tuple((settings.options or {}).items())}
    in_autocast = torch.is_autocast_enabled(tensors[0].device.type)
    if in_autocast or isinstance(gamma, Tensor) or not isinstance(settings.gradient, str | None):
        return None
    field_key = change_of_call(field), frozenset(snapshot.dtypes), modes(snapshot), gamma
    return tuple(t), end, isinstance(y0, Tensor), kinds, torch.is_grad_enabled(), *field_key, *values.values()


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


def solve_again(key: Any, field: Field, y0: State, counter: Tally, snapshot: Snapshot) -> State | None:
    """Solve by the plan of an earlier solve with the same key; return None if there is none, or if it fails."""
    plan = field.compiled.get("plans", {}).get(key)
    return None if plan is None else plan.solve(y0, counter, snapshot)


def solve(setup: Setup, y0: State, snapshot: Snapshot, keep_bytes: int | None, key: Any = None) -> State | None:
    """Solve by compiled attempts; return None if they cannot be compiled or fail, for a solve in Python that says why.

    A graph of one attempt is called until the solve is done. If the last solves took the same number of attempts, one
    graph has all of them, and further solves with the same ``key`` go on by :func:`solve_again`. With gradients, more
    than ``keep_bytes`` of their graph are recomputed, if it is not None.
    """
    run = _Run(setup, y0, snapshot, keep_bytes)
    counter, plan = setup.stepper.term.counter, run.plan()
    before = counter.nfe.forward
    if plan is not None and (solution := plan.solve(y0, counter, snapshot)) is not None:
        plans = setup.stepper.term.inner.compiled.setdefault("plans", {})
        if len(plans) >= GRAPHS:
            plans.clear()
        if key is not None:
            plans[key] = plan
        return solution
    with solving(snapshot, setup.stepper.like.device.type):
        found = run.one_by_one()
    if run.keep_bytes is not None and snapshot.changed():
        raise ValueError(CHANGES_BUFFERS.format("checkpoint"))
    if found is None:
        counter.add("evaluation", before - counter.nfe.forward)
    return owning(found, run.owned) if found is not None and run.owned else found


class _Attempts:
    """The graph of one attempt, those of whole solves, and what is known of the solves.

    Attributes:
        one: the program of one attempt.
        whole: programs of whole solves, by their number of attempts.
        latest, equal: the number of attempts of the last solve, and how many solves in a row had that many.
        saved: bytes of the autograd graph of an attempt, by the shape of the state.
    """

    def __init__(self, term: ODETerm, method: Method, *, is_exact: bool) -> None:
        inside, self.device_type = graph.inside_of(term), term.template.device.type
        self.one = Program(graph.one_attempt(inside, method, is_exact=is_exact), self.device_type)
        self.make = functools.partial(graph.whole_solve, inside, method, is_exact=is_exact)
        self.whole: dict[int, Program] = {}
        self.saved: dict[torch.Size, float] = {}
        self.latest = self.equal = 0

    @property
    def failed(self) -> bool:
        return self.one.failed

    def count(self, counter: Tally, evaluations: int, accepted: int, rejected: int, *, keeps_graph: bool) -> None:
        """Count a solve, and note whether one graph of its attempts would do.

        With gradients no attempt may be rejected: the loop drops its graph, but in a graph 0 * inf = NaN could reach
        them.
        """
        counter.nfe.keeps_graph = keeps_graph
        for event, number in (("evaluation", evaluations), ("accepted", accepted), ("rejected", rejected)):
            counter.add(event, number)
        fits, attempts = not (rejected and torch.is_grad_enabled()), accepted + rejected
        self.equal = 0 if not fits else self.equal + 1 if attempts == self.latest else 1
        self.latest = attempts

    def whole_solve(self) -> Program | None:
        """Return the program of a whole solve, if the last solves had the same number of attempts."""
        count = self.latest
        if self.equal < (AGAIN if count in self.whole else STABLE) or count > LONGEST:
            return None
        if count not in self.whole:
            if len(self.whole) == EXACT:
                return None
            self.whole[count] = Program(self.make(count), self.device_type)
        return self.whole[count]


class Plan(NamedTuple):
    """A solve in one graph, for all states of one shape.

    Attributes:
        programs: the graphs.
        attempts: the number of attempts, which was that of the last solves.
        times: the inputs of the graph besides the state.
        evaluations: evaluations of the field in an attempt.
        changes_nothing: whether a field that changes a buffer is an error.
    """

    programs: _Attempts
    attempts: int
    times: graph.Times
    evaluations: int
    changes_nothing: bool

    def solve(self, y0: State, counter: Tally, snapshot: Snapshot) -> State | None:
        """Return the solution; None if it needs another number of attempts, or cannot be solved."""
        programs, needs_gradient = self.programs, torch.is_grad_enabled()
        program = programs.whole_solve() if programs.latest == self.attempts else None
        result = None if program is None else program(y0, self.times)
        if result is None:
            return None
        report = graph.Report(*result[1].tolist())
        if not report.done or report.failed or (needs_gradient and (report.excluded or report.rejected)):
            programs.equal = 0
            return None
        if self.changes_nothing and snapshot.changed():
            raise ValueError(CHANGES_BUFFERS.format("checkpoint"))
        evaluations = 1 + (report.accepted + report.rejected) * self.evaluations
        programs.count(counter, evaluations, report.accepted, report.rejected, keeps_graph=needs_gradient)
        solution: State = result[0]
        return solution


class _Run:
    """A solve by compiled attempts."""

    def __init__(self, setup: Setup, y0: State, snapshot: Snapshot, keep_bytes: int | None) -> None:
        self.setup, self.y0, self.snapshot, self.needs_gradient = setup, y0, snapshot, torch.is_grad_enabled()
        self.options = setup.settings.options or {}
        self.keep_bytes = keep_bytes if self.needs_gradient else None
        self.term, self.method = setup.stepper.term, setup.stepper.method
        self.is_exact, self.owned = setup.settings.save == "exact" and not setup.end_only, tuple[Any, ...]()
        key = (setup.settings.method, self.is_exact, self.term.lanes is None, setup.end_only)
        make = functools.partial(_Attempts, self.term, self.method, is_exact=self.is_exact)
        self.programs = program(self.term, snapshot, key, make)

    def times(self, setup: Setup, longest: Array, margin: Array = 1.0) -> graph.Times:
        """Return what the graphs need to know of a setup."""
        grid, settings, device = setup.grid, setup.settings, setup.stepper.like.device
        resolution = torch.finfo(setup.stepper.like.dtype if self.term.time_dependent else torch.float64).eps
        shortest, rounding = self.options.get("min_step", 1e-300), np.finfo(float).eps * grid.furthest
        times, steps = (grid.begin, grid.sign, grid.end), (longest, shortest, margin)
        limits = graph.Limits(*times, settings.rtol, settings.atol, *steps, rounding, resolution)
        like, jumps = setup.stepper.like, grid.jumps
        outputs = None if setup.end_only else to_device(grid.outputs, like)
        if jumps is not None:  # padded to few lengths, each of which has a graph
            more = 2 ** (jumps.shape[-1] - 1).bit_length() - jumps.shape[-1]
            width = [(0, 0)] * (jumps.ndim - 1) + [(0, more)]
            jumps = to_device(np.pad(jumps, width, constant_values=math.inf), like)
        gamma = torch.as_tensor(setup.stepper.gamma, dtype=torch.float64, device=device)
        return graph.Times(graph.joined(limits, np.shape(grid.end), device), gamma.unsqueeze(0), outputs, jumps)

    def plan(self) -> Plan | None:
        """Return how to solve by one graph, with as many attempts as the last solves; None if they differed."""
        programs, term, setup = self.programs, self.term, self.setup
        if term.time_dependent or "first_step" in self.options or not self.stores(programs.latest):
            return None
        evaluations = term.counter.nfe.forward + 1 + programs.latest * self.method.evaluations
        if programs.latest > setup.settings.max_steps or evaluations > (setup.max_nfe or math.inf):
            return None
        if programs.whole_solve() is None:
            return None
        times = self.times(setup, self.options.get("max_step", math.inf))
        if term.second_order and term.inner.omega is not None:
            times = times._replace(gamma=None)  # else its gradient would leave the graph
        return Plan(programs, programs.latest, times, self.method.evaluations, self.keep_bytes is not None)

    def one_by_one(self) -> State | None:
        """Solve by a graph of one attempt, with the start in Python."""
        program = self.programs.one
        if program.failed:
            return None
        setup, rows = start_of(self.setup, self.y0)
        steps, grid, most = AdaptiveSteps(setup, rows), setup.grid, setup.settings.max_steps
        times = self.times(setup, steps.controller.longest, steps.error_factor)
        control = graph.joined(steps.control, np.shape(grid.end), setup.stepper.like.device)
        # as after an attempt, no views and contiguous; else they had a graph of their own
        rows = tuple([row.clone(memory_format=torch.contiguous_format) for row in rows])
        if self.needs_gradient and any(x.requires_grad for x in (*rows, setup.stepper.constants)):
            rows = tuple([row if row.requires_grad else row.requires_grad_() for row in rows])
        saved = graph.Attempts(self.term, self.method, times).saved(rows)
        most += grid.outputs.shape[-1] - 1 if self.is_exact else 0
        left = (setup.max_nfe or math.inf) - self.term.counter.nfe.forward
        like = apply(lambda x: x.new_empty(x.shape), self.y0)  # only its shapes matter
        evaluations = accepted = rejected = 0
        report = graph.Report(0, 0, 0, 0, int((grid.end <= 0).all()))
        while not report.done:
            evaluations += self.method.evaluations
            if report.failed or accepted + rejected >= most or evaluations > left:
                return None
            given, done = (like, times, rows, control, saved), accepted + rejected + 1
            result = self.take(program, done, *given, None)
            if result is None:
                return None
            report = graph.Report(*result[3].tolist())
            if report.excluded and report.accepted and result[0][0].requires_grad:
                c = graph.split(result[1])
                result = self.take(program, done, *given, c.rejected & (c.failures > 0))
                evaluations += self.method.evaluations
            control = result[1]
            if report.accepted:
                rows, _, saved, _ = result
            accepted, rejected = accepted + report.accepted, rejected + report.rejected
        keeps_graph = self.needs_gradient and not self.owned
        self.programs.count(self.term.counter, evaluations, accepted, rejected, keeps_graph=keeps_graph)
        return graph.trajectory(self.term, self.y0, rows, saved)

    # Gradients

    def stores(self, attempts: int) -> bool:
        """Return whether the graph of that many attempts is stored."""
        if self.keep_bytes is None or attempts * self.method.evaluations <= SHORT * (self.keep_bytes > 0):
            return True
        bytes_each = self.programs.saved.get(parts(self.y0)[0].shape, math.inf)
        return attempts * bytes_each <= self.keep_bytes

    def take(self, program: Program, attempts: int, *args: Any) -> Any:
        """Call the program, and store its graph, or recompute it in the backward pass if it becomes too large."""
        shape, saved = parts(self.y0)[0].shape, self.programs.saved
        if self.stores(attempts):
            return program(*args)
        if shape not in saved and self.keep_bytes:
            first, own = new_sequence_number(), self.snapshot.tensors
            result = program(*args)
            if result is not None:
                saved[shape] = saved_bytes((*result[0], *(result[2] or ())), (*args[2], *(args[4] or ())), own, first)
            return result
        self.owned = self.setup.stepper, self.snapshot, program
        return recomputed(_call, self.owned, args, evaluations=self.method.evaluations, random=False)


def _call(_: Stepper, program: Program, *args: Any) -> Any:
    return program(*args)
