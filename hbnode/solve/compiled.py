"""Solves with ``compile=True``: the functions that torch.compile compiles, and the loop that calls them.

A program is a compiled function. With a few fixed steps it computes a whole solve, with many fixed steps one step. With
adaptive steps it computes one attempt, that is, a step that is then accepted or rejected by the controller in
:mod:`hbnode.solve.graph`. If many solves in succession needed the same number of attempts, a program computes a whole
solve with this number. Each field stores its programs. NFE are counted outside the compiled graphs.
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

STABLE = 50  # consecutive solves with the same number of attempts, before a whole solve is compiled
AGAIN = 3  # the same number if that whole solve is compiled already
LONGEST = 16  # largest number of attempts in a compiled whole solve
EXACT = 3  # largest number of compiled whole solves for each field, method and mode
MOST_OUTPUTS = 16  # largest number of output times of a compiled solve; each attempt interpolates at all of them
GRAPHS = 64  # largest number of graphs of a program; dynamo's default of 8 is too few for states of various dimensions


Made = TypeVar("Made")


class CompilationWarning(UserWarning):
    """A warning that torch.compile failed and that the solve runs without compilation."""


class Program:
    """A compiled function, with one graph for each kind of arguments.

    A call returns None if its arguments cannot be compiled. If compilation fails, the program warns once, and all later
    calls return None. It also warns once if new arguments need more than ``GRAPHS`` graphs.
    """

    def __init__(self, function: Callable[..., Any], device_type: str) -> None:
        code = function.__code__.replace()  # a copy, because dynamo limits the graphs per code object
        own = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        options: dict[str, Any] = {}
        if device_type == "cpu":
            options["cpp_wrapper"] = True  # compiles the calls of kernels, too, because steps on the CPU are short
            # the default, set because inductor's disk cache would otherwise mix the code for different CPUs
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
                with recompile_limit(GRAPHS):  # only when needed, because changing the limit takes longer than a step
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
    """Return a tuple of the training modes and hooks of a field's modules, for the key of a compiled function.

    torch.compile does not notice changes of them.
    """
    return tuple(
        [
            (mode, *of._forward_hooks, *of._forward_pre_hooks, *of._backward_hooks, *of._backward_pre_hooks)
            for of, mode in snapshot.modes
        ]
    )


def program(term: ODETerm, snapshot: Snapshot, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """Return the compiled programs that the field of ``term`` stores for ``key``.

    If it stores none, or if the training modes or the hooks of its modules have changed since, create them by
    ``make()``. Raise ValueError if the field is not a :class:`hbnode.Field`.
    """
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
    """Return a function, for torch.compile, that computes one step of a method and the norm of error / tolerance.

    The function takes the state, the method's coefficients, the stage times, and a tensor or tuple with the shapes of
    y0. It returns the state after the step, and the norm if ``error`` is True, else None.
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
    """Return a key of everything a compiled solve depends on besides the inputs of its graph.

    The arguments of a solve need no checks if an earlier solve had an equal key. Return None if the solve cannot have a
    key, for example if times need gradients or the field is inside another module.
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
    """Return whether compiled attempts support a solve.

    They support adaptive explicit methods with few output times, if the times need no gradients and there are no
    events.
    """
    settings, grid, gradient = setup.settings, setup.grid, setup.settings.gradient
    if not isinstance(setup.stepper.method, Explicit) or not isinstance(grid, Grid) or grid.t is not None:
        return False
    if settings.steps is not None or settings.jump_times or settings.common_steps or setup.events or open_records:
        return False
    if getattr(gradient, "name", gradient) not in ("direct", "checkpoint"):
        return False
    return 0 < grid.outputs.shape[-1] <= MOST_OUTPUTS and parts(y0)[0].numel() > 0


def solve_again(key: Any, field: Field, y0: State, counter: Tally, snapshot: Snapshot) -> State | None:
    """Solve by the :class:`Plan` of an earlier solve with the same key, which skips the checks of the arguments.

    Returns:
        The final state or the trajectory; None if the field has no plan for the key or if the solve fails.
    """
    plan = field.compiled.get("plans", {}).get(key)
    return None if plan is None else plan.solve(y0, counter, snapshot)


def solve(setup: Setup, y0: State, snapshot: Snapshot, keep_bytes: int | None, key: Any = None) -> State | None:
    """Solve by compiled attempts; return None if compilation or the solve fails.

    The caller then solves in Python, which raises an error with the reason.

    The program of one attempt is called until the solve is done. If the last solves took the same number of attempts,
    the program of a whole solve is called instead, and later solves with the same ``key`` use :func:`solve_again`. If
    ``keep_bytes`` is not None and the autograd graph would be larger, the backward pass recomputes attempts.
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
    """The programs of one attempt and of whole solves, and the numbers of attempts of the last solves.

    Attributes:
        one: the program of one attempt.
        whole: programs of whole solves, by their number of attempts.
        latest: the number of attempts of the last solve.
        equal: the number of consecutive solves that had this number of attempts.
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
        """Add the evaluations and steps of a finished solve to ``counter``, and update ``latest`` and ``equal``.

        If gradients are enabled and an attempt was rejected, ``equal`` is reset to 0: in a compiled whole solve, a
        rejected attempt can turn gradients into 0 * inf = NaN.
        """
        counter.nfe.keeps_graph = keeps_graph
        for event, number in (("evaluation", evaluations), ("accepted", accepted), ("rejected", rejected)):
            counter.add(event, number)
        fits, attempts = not (rejected and torch.is_grad_enabled()), accepted + rejected
        self.equal = 0 if not fits else self.equal + 1 if attempts == self.latest else 1
        self.latest = attempts

    def whole_solve(self) -> Program | None:
        """Return the program that computes a whole solve with the number of attempts of the last solves.

        Return None if too few consecutive solves had this number, or if the number or the programs are too many.
        """
        count = self.latest
        if self.equal < (AGAIN if count in self.whole else STABLE) or count > LONGEST:
            return None
        if count not in self.whole:
            if len(self.whole) == EXACT:
                return None
            self.whole[count] = Program(self.make(count), self.device_type)
        return self.whole[count]


class Plan(NamedTuple):
    """The data for a solve by one call of the program of a whole solve, for initial states of one shape.

    Attributes:
        programs: the programs of the field.
        attempts: the number of attempts of the solve.
        times: the inputs of the program besides the state.
        evaluations: the number of function evaluations in an attempt.
        changes_nothing: whether the field must not change a buffer; a change raises an error.
    """

    programs: _Attempts
    attempts: int
    times: graph.Times
    evaluations: int
    changes_nothing: bool

    def solve(self, y0: State, counter: Tally, snapshot: Snapshot) -> State | None:
        """Return the final state or the trajectory for the initial state ``y0``, and count evaluations in ``counter``.

        Return None if the solve needs another number of attempts, or if it fails.
        """
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
    """An adaptive solve by calls of compiled programs: its inputs, and the functions that call the programs."""

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
        """Return the inputs of the programs that stay constant during the solve, such as output times and tolerances.

        ``longest`` is the largest step size. ``margin`` is the factor by which error ratios are multiplied.
        """
        grid, settings, device = setup.grid, setup.settings, setup.stepper.like.device
        resolution = torch.finfo(setup.stepper.like.dtype if self.term.time_dependent else torch.float64).eps
        shortest, rounding = self.options.get("min_step", 1e-300), np.finfo(float).eps * grid.furthest
        times, steps = (grid.begin, grid.sign, grid.end), (longest, shortest, margin)
        limits = graph.Limits(*times, settings.rtol, settings.atol, *steps, rounding, resolution)
        like, jumps = setup.stepper.like, grid.jumps
        outputs = None if setup.end_only else to_device(grid.outputs, like)
        if jumps is not None:  # padded to powers of 2, because each length needs a separate graph
            more = 2 ** (jumps.shape[-1] - 1).bit_length() - jumps.shape[-1]
            width = [(0, 0)] * (jumps.ndim - 1) + [(0, more)]
            jumps = to_device(np.pad(jumps, width, constant_values=math.inf), like)
        gamma = torch.as_tensor(setup.stepper.gamma, dtype=torch.float64, device=device)
        return graph.Times(graph.stack_numbers(limits, np.shape(grid.end), device), gamma.unsqueeze(0), outputs, jumps)

    def plan(self) -> Plan | None:
        """Return a plan to solve by one call of a program that takes as many attempts as the last solve.

        Return None if there is no such program, or if the solve must begin in Python, for example because the field
        depends on time.
        """
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
            times = times._replace(gamma=None)  # computed inside the graph, which its gradient needs
        return Plan(programs, programs.latest, times, self.method.evaluations, self.keep_bytes is not None)

    def one_by_one(self) -> State | None:
        """Solve by repeated calls of the program of one attempt, after choosing the first step size in Python.

        Returns:
            The final state or the trajectory; None if compilation or the solve fails.
        """
        program = self.programs.one
        if program.failed:
            return None
        setup, rows = start_of(self.setup, self.y0)
        steps, grid, most = AdaptiveSteps(setup, rows), setup.grid, setup.settings.max_steps
        times = self.times(setup, steps.controller.longest, steps.error_factor)
        control = graph.stack_numbers(steps.control, np.shape(grid.end), setup.stepper.like.device)
        # contiguous and no views, as after an attempt; other inputs would need another graph
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
                c = graph.unpack_control(result[1])
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
        """Return whether the autograd graph of ``attempts`` attempts has at most ``keep_bytes`` bytes.

        A larger graph is not stored: the backward pass recomputes the attempts.
        """
        if self.keep_bytes is None or attempts * self.method.evaluations <= SHORT * (self.keep_bytes > 0):
            return True
        bytes_each = self.programs.saved.get(parts(self.y0)[0].shape, math.inf)
        return attempts * bytes_each <= self.keep_bytes

    def take(self, program: Program, attempts: int, *args: Any) -> Any:
        """Return ``program(*args)``; if the autograd graph would be too large, the backward pass recomputes the call.

        ``attempts`` is the number of attempts from the start of the solve to the end of the call.
        """
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
