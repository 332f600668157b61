"""The gradient modes of native methods: direct, checkpoint, reversible and adjoint.

Variables named ``rows`` are tuples of the tensors that a method works on, such as (h, m) for an HBNODE.
The adjoint of torchdiffeq's methods, such as dopri5, is in ``solve/torchdiffeq_methods.py``.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from hbnode import _torch
from hbnode._torch import fast_form, new_sequence_number, random_state, saved_tensors, sequence_number
from hbnode._tree import State, apply, parts
from hbnode.errors import RecomputationError, ReversalError
from hbnode.solve.events import as_column
from hbnode.solve.grid import Grid, to_device
from hbnode.solve.loop import Begun, SavedOutputs, Solution, fixed_steps, integrate, start_of
from hbnode.solve.methods import METHODS, Array, Rows
from hbnode.solve.settings import Settings
from hbnode.solve.stepper import Attempt, Setup, Stepper, Taken
from hbnode.solve.term import ODETerm, Snapshot

Kind = TypeVar("Kind")
Value = TypeVar("Value", bound=State)

SHORT = 16  # function evaluations whose graph is always stored
# largest relative distance between a state that reversed steps reconstruct and the stored state
REVERSAL_TOLERANCE = 1e-3
MOST_MISSED = 0.1  # largest such distance for the adjoint ODE; the relative error of the gradient is about as large

CHANGES_BUFFERS = (
    "func changes its buffers (BatchNorm or spectral_norm in training mode?), and gradient={!r} would evaluate it "
    "again in the backward pass. Fix: put that layer in eval mode, use GroupNorm, or gradient='direct'."
)
CHANGED = (
    "a step that the backward pass recomputed ends in another state. A parameter, a hook, a module or an activation of "
    "the field was changed after the forward pass. Fix: call backward() before the change, or use gradient='direct'"
)
_FIRST_ORDER = "gradient={!r} gives first derivatives only, got create_graph=True. Fix: gradient='direct'."
_SPARSE = (
    "func has a layer with sparse=True, whose sparse gradients this gradient mode does not support. "
    "Fix: sparse=False, or leave method out."
)
_REENTRANT = (
    "func calls torch.utils.checkpoint with use_reentrant=True, which this gradient mode cannot differentiate. "
    "Fix: use_reentrant=False."
)
_HOOKS = (
    "a parameter or another leaf that func depends on has a hook of register_hook. With gradient={!r} the hook would "
    "run on each partial gradient and once more on their sum. Fix: register_post_accumulate_grad_hook, or "
    "gradient='direct'."
)


@dataclass(frozen=True)
class Direct:
    """The mode ``gradient="direct"``: backpropagation through the operations of the steps."""

    name = "direct"

    def solve(self, setup: Setup, y0: Any, snapshot: Snapshot) -> Solution:
        setup.stepper.term.counter.nfe.keeps_graph = torch.is_grad_enabled()
        return integrate(start_of(setup, y0))


@dataclass(frozen=True)
class Checkpoint:
    """The mode ``gradient="checkpoint"``: the autograd graph is stored up to a limit, and later steps are recomputed.

    The gradient equals that of ``"direct"``, the exact gradient of the discrete solution. Up to 16 function
    evaluations, the graph is always stored. After that, the size of the graph of a step is measured once, and the
    backward pass recomputes the steps that exceed the limit. It raises :class:`~hbnode.errors.RecomputationError` if a
    recomputed step ends in a different state than in the forward pass.

    References:
        Zhuang et al., arXiv:2006.02493, which recompute accepted steps for the gradient.

    Arguments:
        keep_bytes: largest size of the stored graph in bytes; 0 recomputes every step. Default: 64 MiB.
        every: number of fixed steps that are recomputed together. Default: 4.
    """

    keep_bytes: int = 64 * 2**20
    every: int = 4
    name = "checkpoint"

    def solve(self, setup: Setup, y0: Any, snapshot: Snapshot) -> Solution:
        if not torch.is_grad_enabled():
            return Direct().solve(setup, y0, snapshot)
        begun = start_of(setup, y0)
        if snapshot.changed():
            raise ValueError(CHANGES_BUFFERS.format(self.name))
        setup, stepper, nfe = begun.setup, begun.setup.stepper, begun.setup.stepper.term.counter.nfe
        count = 1 if setup.settings.steps is None else sum(count for *_, count in setup.grid.pieces(setup.counts))
        taken, bytes_per_step, owned_objects = 0, -1.0, list[Any]()
        stores_all = not getattr(stepper.term.inner, "supports_hooks", True)
        nfe.keeps_graph = True

        def take(state: Rows, attempt: Attempt) -> Taken:
            nonlocal taken, bytes_per_step, stores_all
            coefficients, steps = stepper.coefficients(attempt), len(attempt.times)
            taken += steps
            if stores_all or (max(taken, count) * stepper.method.evaluations <= SHORT and self.keep_bytes):
                return stepper.step(state, coefficients, attempt)
            try:
                if bytes_per_step < 0 and self.keep_bytes:
                    first = new_sequence_number()
                    found = stepper.step(state, coefficients, attempt)
                    after = (*found.state, *found.outputs)
                    bytes_per_step = saved_bytes(after, state, snapshot.tensors, first) / steps
                    return found
                if not self.keep_bytes or max(taken, count) * bytes_per_step > self.keep_bytes:
                    nfe.keeps_graph = False
                    owned_objects[:] = [stepper, snapshot]
                    run, args = functools.partial(_step_again, attempt), (state, coefficients)
                    return recomputed(run, owned_objects, args, steps=steps, at=(attempt.time, attempt.size))
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                stores_all = nfe.keeps_graph = True  # torch.func does not work inside a checkpoint
            return stepper.step(state, coefficients, attempt)

        solution = integrate(begun, take, every=self.every)
        if snapshot.changed():
            raise ValueError(CHANGES_BUFFERS.format(self.name))
        return solution._replace(owned=tuple(owned_objects))


def _step_again(attempt: Attempt, stepper: Stepper, state: Rows, coefficients: Any) -> Taken:
    times: Any = [[t.clone() for t in step_times] for step_times in attempt.times]  # f may change them in place
    restart = None if attempt.restart is None else attempt.restart.clone()
    return stepper.step(state, coefficients, replace(attempt, times=times, restart=restart))


def recomputed(
    run: Callable[..., Any], objects: Sequence[Any], args: Sequence[Any], *, steps: int = 1, evaluations: int = 0,
    at: tuple[Any, Any] = (math.nan, math.nan), random: bool = True,
) -> Any:  # fmt: skip
    """Return ``run(stepper, *others, *args)``; the backward pass recomputes it instead of storing its graph.

    Arguments:
        run: a function that returns None, or a tuple whose first entry is the state after the steps. This state must be
            the same in the forward and the backward pass.
        objects: the stepper, the snapshot and ``others``. Only weak references to them are kept; :func:`owning` keeps
            them alive.
        args: arguments that may need gradients.
        steps: number of steps that the backward pass counts.
        evaluations: number of function evaluations that the backward pass counts if ``run`` does not count them.
        at: the time and step size for an error message.
        random: whether f may draw random numbers.
    """
    references, end = tuple(map(weakref.ref[Any], objects)), list[Tensor]()

    def compute(*args: Any) -> Any:
        stepper, snapshot, *others = map(owned, references)
        if not end:
            result = run(stepper, *others, *args)
            end.extend(() if result is None else [x.detach() for x in result[0]])
            return result
        with snapshot:
            result = run(stepper, *others, *args)
            stepper.term.counter.add("evaluation", evaluations)
            stepper.term.counter.add("accepted", steps)
            if snapshot.changed() or result is None or not is_same(result[0], tuple(end)):
                raise stepper.failure(RecomputationError, CHANGED, *at)
        return result

    with set_checkpoint_early_stop(False):
        return checkpoint(compute, *args, use_reentrant=False, preserve_rng_state=random, determinism_check="none")


def is_same(new: Rows, old: Rows) -> bool:
    """Return whether the recomputed state ``new`` equals the state ``old`` of the forward pass up to rounding errors.

    Rounding errors may differ, because torch may add the same numbers in another order.
    """
    one, two = (torch.stack([x.detach() for x in rows]) for rows in (new, old))
    if torch.equal(one, two):
        return True
    slack = torch.finfo(one.dtype).eps ** 0.5
    return bool(torch.allclose(one, two, rtol=slack, atol=slack * float(two.abs().amax()), equal_nan=True))


def saved_bytes(after: Rows, before: Rows, known: Iterable[Tensor], first: int) -> int:
    """Return the number of bytes that a step saves for the backward pass.

    The tensors are found by hooks on the nodes of the step's graph. torch.autograd.graph.saved_tensors_hooks around the
    step would not do, because torch.func raises an error inside it. Tensors that f saves with its own hooks, as
    torch.utils.checkpoint does, are not counted.

    Arguments:
        after: the tensors of the state after the step.
        before: the tensors of the state before the step.
        known: tensors that exist anyway, such as parameters, and do not count.
        first: an autograd sequence number. All nodes of the step have larger sequence numbers.
    """
    saved: list[Tensor] = []

    def pack(x: Tensor) -> tuple[Tensor, int]:
        saved.append(x)
        return x, x._version

    known, found, graph = [*before, *known], [], _nodes([x.grad_fn for x in after], first=first)
    for node in graph:
        if hasattr(node, "variable"):
            known.append(node.variable)
        elif sequence_number(node) > first:
            found += saved_tensors(node)
    with _torch.without_dispatch_modes():  # such modes break hooks on saved numbers
        for one in found:
            with suppress(RuntimeError):  # the saved value is None or has hooks
                one.register_hooks(pack, _unpacked)
    sizes: dict[int, int] = {}
    for x in saved:
        if x.layout == torch.strided and not x._is_zerotensor():  # a tangent may be a tensor without storage
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()  # also of a view x
    for x in known:
        if x.layout == torch.strided:
            sizes.pop(x.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _unpacked(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if x._version != version:  # autograd does not check the version of a saved tensor with hooks
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} that the backward pass needs, such as a parameter, was modified by an "
            f"inplace operation: it is at version {x._version}, expected {version}. Fix: backward() before the change."
        )
    return x


class _Owner(torch.autograd.Function):
    """The identity function, whose autograd node keeps alive the objects that the backward pass of a solve needs.

    All other nodes of the solve have weak references to these objects. Python's garbage collector follows references
    from a tensor to its last node only. Therefore it can free a network that stores an output of its own solve.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, objects: list[Any], is_first_order: bool) -> Tensor:
        ctx.objects, ctx.is_first_order = objects, is_first_order
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            if ctx.is_first_order:
                raise RuntimeError(_FIRST_ORDER.format("adjoint"))
            own = gradient if gradient.requires_grad else gradient.detach().requires_grad_()
            gradient = _Owner.apply(own, ctx.objects, False)  # the gradient's graph needs the objects, too
        return gradient, None, None


def owning(state: Any, objects: Sequence[Any], *, is_first_order: bool = False) -> Any:
    """Return the outputs of a solve (``state``), with references to the ``objects`` that the backward pass needs.

    If ``is_first_order``, the gradients have no graph, and create_graph=True raises RuntimeError.
    """
    return apply(lambda x: _Owner.apply(x, objects, is_first_order) if x.requires_grad else x, state)


def owned(reference: weakref.ref[Kind]) -> Kind:
    value = reference()
    if value is None:
        raise RuntimeError(
            "the outputs of the solve were dropped before the backward pass, which needs them for a tensor that func "
            "kept. Fix: keep the outputs until backward(), make the tensor a part of the state, or gradient='direct'."
        )
    return value


@dataclass(frozen=True)
class _Solve:
    """The data for the backward pass of a solve that stores no autograd graph.

    Attributes:
        gradient: the gradient mode.
        setup: the setup of the solve.
        snapshot: the parameters and buffers at the time of the solve.
        leaves: the leaf tensors of the field that need a gradient.
        known: the ids of all leaf tensors of the field.
        carried: the value of the field at the start if the method reuses it (first same as last, FSAL), else empty.
        rows: the tensors of the solution, if it has been computed already.
    """

    gradient: Any
    setup: Setup
    snapshot: Snapshot
    leaves: list[Tensor]
    known: frozenset[int]
    carried: Rows
    rows: Rows | None = None

    def with_graph(self, rows: Rows) -> Rows:
        """Return the tensors of the solution for the tensors ``rows`` of the initial state.

        They have one common autograd node, whose vector-Jacobian product the gradient mode computes.
        """
        stepper, t = self.setup.stepper, self.setup.grid.t
        t = torch.zeros(()) if t is None else t
        return _rows_without_graph(weakref.ref(self), stepper.constants, t, *rows, *self.leaves)


def _solve_without_graph(gradient: Any, setup: Setup, y0: Any, snapshot: Snapshot) -> Solution:
    """Solve from the initial state ``y0`` without storing an autograd graph of the steps.

    In the backward pass, the mode object ``gradient`` computes the vector-Jacobian product of the solve.
    """
    if not torch.is_grad_enabled():
        return Direct().solve(setup, y0, snapshot)
    rows = _initial_rows(setup, y0)
    solve = _Solve(gradient, *_leaves(gradient, setup, rows, snapshot))
    return Solution(solve.with_graph(rows), owned=(solve,))


def _initial_rows(setup: Setup, y0: Any) -> Rows:
    return tuple([row.clone() if row.is_inference() else row for row in setup.stepper.term.flatten(y0)])


def _refuse_higher(of: weakref.ref[_Solve], *tensors: Tensor) -> Rows:
    raise RuntimeError(_FIRST_ORDER.format(owned(of).gradient.name))


def _vjp_of_solve(
    of: weakref.ref[_Solve], tensors: Rows, residuals: Rows, gradients: Any, needed: Any
) -> tuple[Any, ...]:
    solve = owned(of)
    setup, n = solve.setup, solve.setup.stepper.term.rows
    (constants, t, *start), trajectory = tensors[: n + 2], residuals[:n]
    gradients = [torch.zeros_like(x) if g is None else g for x, g in zip(trajectory, gradients, strict=True)]
    constants, t = (x.detach().requires_grad_(x.requires_grad) for x in (constants, t))
    setup = replace(
        setup,
        stepper=setup.stepper.with_constants(constants),
        grid=replace(setup.grid, t=t if t.requires_grad else None),
    )
    # without the cache, an autocast context inside f casts the weights anew in each evaluation
    no_autocast = torch.autocast(trajectory[0].device.type, enabled=False, cache_enabled=False)
    with solve.snapshot, no_autocast, torch.enable_grad():
        found = solve.gradient.backward(replace(solve, setup=setup), start, trajectory, gradients, constants, t)
    grad_constants, grad_t, adjoint, grad_leaves = found
    if not setup.end_only:
        adjoint = tuple([c + g[0] for c, g in zip(adjoint, gradients, strict=True)])
    return grad_constants, grad_t, *adjoint, *grad_leaves


@fast_form(reference=_refuse_higher, vjp=_vjp_of_solve)
def _rows_without_graph(
    of: weakref.ref[_Solve], _: bool, constants: Tensor, t: Tensor, *tensors: Tensor
) -> tuple[Rows, Rows]:
    solve = owned(of)
    if solve.rows is None:
        rows = integrate(Begun(solve.setup, (*tensors[: solve.setup.stepper.term.rows], *solve.carried))).rows
    else:
        rows = tuple([row.detach() for row in solve.rows])  # without the graph of solve.rows
    # parameters and buffers are saved, so that autograd reports in-place changes
    own = [x for x in solve.snapshot.tensors if not x.is_inference()]
    return rows, (*(row.clone() for row in rows), *own)  # the user may change the outputs in place


def _leaves(
    gradient: Any, setup: Setup, rows: Rows, snapshot: Snapshot
) -> tuple[Setup, Snapshot, list[Tensor], frozenset[int], Rows]:
    """Evaluate the field at the start of a solve, and find the leaf tensors (parameters, ...) on which it depends.

    Arguments:
        gradient: the gradient mode, for error messages.
        setup: the setup of the solve.
        rows: the tensors of the initial state.
        snapshot: the parameters and buffers of the field's modules.

    Returns:
        A tuple of five entries:

        - ``setup``, whose grid now has the times at which the field jumps, if the evaluation found such times;
        - ``snapshot``, unchanged;
        - a list of the leaf tensors that need a gradient;
        - the ids of all leaf tensors;
        - a tuple with the value of the field at the start, which is empty if the method does not reuse the value.
    """
    term, method, name, is_fsal = setup.stepper.term, setup.stepper.method, gradient.name, setup.stepper.method.is_fsal
    start = tuple([row.detach().requires_grad_() for row in rows])
    random, begun = random_state(rows[0].device), [setup]
    with torch.enable_grad():
        x = start[0].clone()
        activation = getattr(method, "activation", None)

        def evaluate() -> Any:
            if is_fsal:
                begun[0], state = start_of(setup, term.unflatten((x, *start[1:])))
                return state[term.rows :]
            (t,) = term.stages([setup.grid.points[0]])
            value = term(t.detach(), x)
            return value if activation is None else (value, activation(start[1].clone()))

        times = [] if setup.grid.t is None else [setup.grid.t]
        found, value = closed_over_leaves(evaluate, (*start, x, *times))
    if snapshot.changed():
        raise ValueError(CHANGES_BUFFERS.format(name))
    if not all(map(torch.equal, random, random_state(rows[0].device))) and not snapshot.masks:
        raise ValueError(
            f"func draws random numbers, which gradient={name!r} cannot reproduce in the backward pass. "
            "Fix: gradient='checkpoint', or hbnode.nn.SolveDropout for dropout."
        )
    known = {id(x): x for x in (*found, *own_parameters(term.inner), *snapshot.tensors)}
    leaves = [x for x in known.values() if x.requires_grad]
    if any(leaf._backward_hooks for leaf in leaves):
        raise ValueError(_HOOKS.format(name))
    return begun[0], snapshot, leaves, frozenset(known), tuple([x.detach() for x in value]) if is_fsal else ()


@dataclass(frozen=True)
class Reversible:
    """The mode ``gradient="reversible"``: the solve stores only the outputs.

    The backward pass computes the states between them by reversing the steps.
    """

    name = "reversible"

    def solve(self, setup: Setup, y0: Any, snapshot: Snapshot) -> Solution:
        return _solve_without_graph(self, setup, y0, snapshot)

    def backward(
        self, solve: _Solve, start: Rows, trajectory: Rows, gradients: Rows, constants: Tensor, t: Tensor
    ) -> tuple[Any, ...]:
        """Reverse all steps and compute the gradients; the reversal restarts from the stored state at each output.

        Each momentum update needs one function evaluation.
        """
        setup, leaves, place = solve.setup, solve.leaves, len(gradients[0])
        n, is_fsal = setup.stepper.term.rows, setup.stepper.method.is_fsal
        sums = _GradientSums([constants, t, *leaves])
        reversal = _Reversal(setup.stepper, sums, solve.known)
        attempts = [*fixed_steps(setup, 1)]
        first = setup.stepper.term.stages([setup.grid.points[0]])
        times = [*first, *(attempt.times[0][-1] for attempt in attempts)]
        adjoint: Rows = tuple([torch.zeros_like(row) for row in (*start, *start[:is_fsal])])
        state = end = tuple(start)
        for i, attempt in reversed([*enumerate(attempts)]):
            if attempt.outputs is not None:
                place -= 1
                output = tuple([x[place] for x in trajectory])
                if i < len(attempts) - 1:
                    _check_missed(setup, state[:n], output, end, REVERSAL_TOLERANCE, _REVERSED)
                elif is_fsal:
                    state = (*state, reversal.evaluate(times[-1], output[0]))
                state, end = (*output, *state[n:]), output
                adjoint = (*(c + g[place] for c, g in zip(adjoint, gradients, strict=False)), *adjoint[n:])
            known = None  # the position where the step begins
            if i == 0:
                known = start[0]
            elif attempts[i - 1].outputs is not None:
                known = trajectory[0][place - 1]
            state, adjoint = reversal.reverse(attempt, times[i], state, adjoint, known)
        if attempts:
            _check_missed(setup, state[:n], start, end, REVERSAL_TOLERANCE, _REVERSED)
            adjoint = reversal.first(adjoint)
        return sums.get(constants), sums.get(t), adjoint[:n], [sums.get(leaf) for leaf in leaves]


class _Reversal:
    """The reversal of steps, and the computation of their gradients.

    Reversing a step evaluates the field. The step is then recomputed for its gradient, which reuses the recorded values
    of the field and their graphs.
    """

    def __init__(self, stepper: Stepper, sums: _GradientSums, known: frozenset[int]) -> None:
        self.stepper, self.sums, self.known = stepper, sums, known
        self.records: list[tuple[Tensor, Tensor, Tensor]] = []

    def evaluate(self, time: Tensor, x: Tensor) -> Tensor:
        """Return the value of the field without a graph, and store the value with its graph for later gradients."""
        time, x = time.detach().requires_grad_(time.requires_grad), x.detach().requires_grad_()
        with torch.enable_grad():
            value = evaluate_known(lambda: self.stepper.term(time, x.clone()), (time, x), self.known)
        self.records.append((time, x, value))
        return value.detach()

    def reverse(self, attempt: Attempt, t: Tensor, state: Rows, adjoint: Rows, h: Tensor | None) -> tuple[Rows, Rows]:
        """Return the state before a step and the gradient with respect to that state.

        Arguments:
            attempt: the step.
            t: the time at which the step begins.
            state: the state after the step.
            adjoint: the gradient with respect to ``state``.
            h: the position at ``t`` if it is stored, else None.
        """
        stepper, method, is_fsal = self.stepper, self.stepper.method, self.stepper.method.is_fsal

        def at(time: Tensor, x: Tensor) -> Tensor:
            return self.evaluate(time, x if h is None or not is_fsal else h)

        def recompute(time: Tensor, x: Tensor) -> Tensor:
            return _known_value((stepper.term, self.records.pop(-2 if is_fsal else -1), self.sums), x, time)[0]

        coefficients, _ = replace(stepper).coefficients(attempt)  # a new stepper, so that each step has its own graph
        if stepper.noise is not None:  # the reversed and the recomputed step need the same noise
            coefficients = (*coefficients, stepper.noise(attempt.number))
        with torch.no_grad():
            before = method.undo(state, coefficients, [t] if is_fsal else attempt.times[0], at)
        start = tuple([x.detach().requires_grad_() for x in before])
        after = method.step(start, coefficients, attempt.times[0], recompute).state
        stepper.term.counter.add("accepted")
        return before, self.sums.vjp(after, adjoint, start)

    def first(self, adjoint: Rows) -> Rows:
        """Return the gradient with respect to the tensors of the initial state.

        ``adjoint`` is the gradient with respect to the initial state of the solver, which for an FSAL method also holds
        the first value of the field.
        """
        if not self.stepper.method.is_fsal:
            return adjoint
        *rows, grad_value = adjoint
        ((_, x, value),) = self.records
        (grad_h,) = self.sums.vjp((value,), (grad_value,), (x,))
        return (rows[0] + grad_h, *rows[1:])


def _vjp_of_value(known: Any, tensors: Rows, residuals: Rows, gradients: Any, needed: Any) -> tuple[Any, ...]:
    _, (time, x, value), sums = known
    grad_x, *grad_time = sums.vjp((value,), gradients, (x, time) if time.requires_grad else (x,))
    return grad_x, *(grad_time or [None])


@fast_form(reference=lambda known, x, time: (known[0](time, x),), vjp=_vjp_of_value)
def _known_value(known: Any, needs_grad: bool, x: Tensor, time: Tensor) -> tuple[Rows, Rows]:
    """Return a tuple with the field's value at (time, x), which was computed earlier, instead of computing it again.

    The vector-Jacobian product uses the autograd graph of the earlier evaluation, which ``known`` holds.
    """
    return (known[1][-1].detach(),), ()


class _GradientSums:
    """The gradients with respect to the leaf tensors of a field, summed over the steps of a solve."""

    def __init__(self, leaves: list[Tensor]) -> None:
        self.leaves = [x for x in leaves if x.requires_grad]
        self.sums: dict[int, Tensor] = {}

    def vjp(self, outputs: Rows, gradients: Rows, inputs: Rows) -> Rows:
        """Return the gradients with respect to ``inputs``, and add those with respect to the leaves to the sums.

        ``gradients`` holds the gradients with respect to ``outputs``. The result is a tuple like ``inputs``.
        """
        wanted = [*inputs, *self.leaves]
        found = vjp(outputs, wanted, gradients)
        for leaf, gradient in zip(self.leaves, found[len(inputs) :], strict=True):
            if gradient is not None:
                known = self.sums.get(id(leaf))
                self.sums[id(leaf)] = gradient if known is None else known + gradient
        return tuple([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=False)])

    def get(self, leaf: Tensor) -> Tensor | None:
        return self.sums.get(id(leaf))


@dataclass(frozen=True)
class Adjoint:
    r"""The mode ``gradient="adjoint"``: the adjoint ODE, solved backwards by ``"tsit5"`` together with the state.

    For a loss L and a first-order equation y' = F(t, y) with parameters θ, the adjoint is a = ∂L/∂y. It obeys
    a' = -a ∂F/∂y, and dL/dθ = ∫ a ∂F/∂θ dt. For an HBNODE this is the heavy-ball adjoint of arXiv:2110.04840. The
    backward solve restarts from the stored state at each output. Between two outputs that are T apart, it amplifies
    errors by e^{γT}, where γ is the damping.

    A solve with events stores the states at outputs and events, and is divided at the events into segments. Each
    segment is solved without a graph, and the jump at its end is repeated with a graph.

    If samples have their own times, steps or events, a backward step is the same fraction of each sample's interval.
    """

    name = "adjoint"

    def solve(self, setup: Setup, y0: Any, snapshot: Snapshot) -> Solution:
        if setup.events and torch.is_grad_enabled():
            return self._solve_with_events(setup, _initial_rows(setup, y0), snapshot)
        return _solve_without_graph(self, setup, y0, snapshot)

    def _solve_with_events(self, setup: Setup, rows: Rows, snapshot: Snapshot) -> Solution:
        t = setup.grid.t  # steps end at constant times; Newton steps from these times to the events have a graph
        setup = replace(setup, grid=replace(setup.grid, t=None))
        setup, _, leaves, ids, carried = _leaves(self, setup, rows, snapshot)
        with torch.no_grad():
            known, events, _ = integrate(Begun(setup, (*rows, *carried)))
        assert events is not None
        grid, like, owned_objects = setup.grid, setup.stepper.like, list[Any]()
        saved, now, moving = SavedOutputs(setup, rows), np.full_like(grid.end, -1.0), np.ones_like(grid.end, bool)
        for hits in events.segments():
            then = np.where(moving, grid.end, now)
            goes, landed = to_device(moving, like), to_device(hits.lanes, like)
            then[hits.lanes] = hits.now
            inside = moving[:, None] & (grid.outputs > now[:, None]) & (grid.outputs <= then[:, None])
            lanes, outputs = inside.nonzero()
            column = inside.cumsum(1)[inside]
            elapsed = np.repeat(then[:, None], column.max(initial=0) + 2, 1)
            elapsed[:, 0], elapsed[lanes, column] = np.maximum(now, 0.0), grid.outputs[lanes, outputs]
            times = to_device(grid.begin[:, None] + grid.sign[:, None] * elapsed, like)
            lane, output, place = (to_device(x, like) for x in (lanes, outputs, column))
            if t is not None:
                lane_times = t.to(times).expand(len(now), -1)
                times = times.index_put((lane, place), lane_times[lane, output + 1])
                times = torch.cat([lane_times[:, :1], times[:, 1:]], 1) if (now < 0).all() else times
            segment = Grid.of(times, like, grid.lanes)
            segment = replace(segment, jumps=None if grid.jumps is None else grid.jumps - elapsed[:, :1])
            path: list[Tensor] = []
            for row, y, after in zip(rows, known, hits.rows, strict=True):
                end = torch.where(as_column(goes, row), y[-1], row.detach()).index_copy(0, landed, after)
                path.append(torch.stack([row.detach(), *[end] * (times.shape[1] - 1)]))
                path[-1][place, lane] = y[output + 1, lane]
            segment_setup = replace(setup, grid=segment, events=(), end_only=False)
            solve = _Solve(self, segment_setup, snapshot, leaves, ids, (), tuple(path))
            values = solve.with_graph(rows)
            owned_objects.append(solve)
            saved.add(tuple([x[place, lane] for x in values]), lanes, outputs)
            now, moving = then, moving & (then < grid.end)
            rows = events.repeat(hits, now, tuple([x[-1] for x in values]))
            if events.ended is not None:
                lanes, last = events.ended
                saved.freeze(lanes, last, now)
                moving[lanes] = False
        return Solution(saved.rows(), events, tuple(owned_objects))

    def backward(
        self, solve: _Solve, start: Rows, trajectory: Rows, gradients: Rows, constants: Tensor, t: Tensor
    ) -> tuple[Any, ...]:
        """Solve the adjoint ODE in each interval between outputs, from the last interval to the first.

        Returns:
            The gradients with respect to the constants, the times, the tensors of the initial state, and the leaves.
        """
        setup, grid, leaves, n = solve.setup, solve.setup.grid, solve.leaves, len(gradients)
        augmented = _Augmented(setup, leaves, solve.known)
        with torch.no_grad():
            times = torch.from_numpy(replace(grid, t=None).points)  # (T,) or (T, batch)
            states = list(zip(*trajectory, strict=True))
            states = [start, *states] if setup.end_only else states
            adjoint: Rows = tuple([torch.zeros_like(row) for row in start])
            sums: Rows = tuple([torch.zeros_like(as_real(leaf.detach()), dtype=start[0].dtype) for leaf in leaves])
            grad_t = torch.zeros_like(times)
            for k in reversed(range(1, len(times))):
                grad_output = [g[k - setup.end_only] for g in gradients]
                if t.requires_grad:
                    grad_t[k] = augmented.rate(times[k], states[k], grad_output)
                adjoint = tuple([a + g for a, g in zip(adjoint, grad_output, strict=True)])
                if times[k].equal(times[k - 1]):
                    continue
                end = augmented.solve(times[k - 1 : k + 1].flip(0), (*states[k], *adjoint, *sums))
                _check_missed(setup, end[:n], states[k - 1], states[k], MOST_MISSED, _SOLVED_BACK)
                adjoint, sums = end[n : 2 * n], end[2 * n :]
            if t.requires_grad:
                grad_t[0] = -augmented.rate(times[0], states[0], adjoint)
        grad_leaves = [
            (torch.view_as_complex(x.clone()) if leaf.is_complex() else x).to(leaf)
            for x, leaf in zip(sums, leaves, strict=True)
        ]
        return None, grad_t.movedim(0, -1).to(t) if t.requires_grad else None, adjoint, grad_leaves


class _Augmented:
    """The right-hand side of the adjoint ODE for the state, the adjoint and the gradients of the leaf tensors.

    If samples have their own times, the adjoint ODE is solved over the longest of their intervals. The rates of the
    other samples are multiplied by their ``pace``, the length of their interval divided by the longest length.
    """

    def __init__(self, setup: Setup, leaves: list[Tensor], known: frozenset[int]) -> None:
        self.setup, self.term, self.leaves, self.known = setup, setup.stepper.term, leaves, known
        self.time_dependent, self.counted_as = self.term.time_dependent, self.term.field
        self.pace: Any = None

    def __call__(self, t: Tensor, state: Rows) -> Rows:
        n, derivative = self.term.rows, self.term.derivative
        rows, adjoint = state[:n], state[n : 2 * n]
        if self.pace is not None:
            t = self.term.stages([self.begin + self.pace * (t.double() - self.begin[self.longest])])[0]
            pace = as_column(self.pace, rows[0])
            # replaces finished samples, because they may be at a singularity of f
            rows = tuple([torch.where(pace > 0, x, x[self.longest]) for x in rows])
            adjoint = tuple([pace * a for a in adjoint])
        y = tuple([x.detach().requires_grad_() for x in rows])
        with torch.enable_grad():
            value = evaluate_known(lambda: derivative(t, y), (t, *y), self.known)
            gradients = vjp(value, [*y, *self.leaves], tuple([-a for a in adjoint]))
        if self.pace is not None:
            value = tuple([pace * v for v in value])
        rest = zip((*y, *self.leaves), gradients, strict=True)
        dense = [torch.zeros_like(x) if g is None else g.to_dense() if g.is_sparse else g for x, g in rest]
        return (*(v.detach() for v in value), *(as_real(g).to(rows[0]) for g in dense))

    def rate(self, t: Tensor, rows: Rows, adjoint: Any) -> Tensor:
        """Return the inner product of ``adjoint`` and the time derivative of the state ``rows`` at ``t``.

        The gradients with respect to times are such products, () or (batch,).
        """
        self.term.counter.add("evaluation")
        per_sample = self.term.lanes is not None
        slope = self.term.derivative(self.term.stages([t])[0], tuple(rows))
        products = [s * a for s, a in zip(slope, adjoint, strict=True)]
        return sum(x.flatten(1).sum(1) if per_sample else x.sum() for x in products).to(t)

    def solve(self, t: Tensor, state: Rows) -> Rows:
        """Solve the adjoint ODE from ``t[0]`` to ``t[1]``, and return the augmented state at ``t[1]``.

        ``state`` is the augmented state at ``t[0]``: the tensors of the state, of the adjoint and of the gradients.
        ``t`` has the shape (2,) or (2, batch).
        """
        s, n = self.setup.settings, self.term.rows
        term = ODETerm(self, state, self.term.counter, second_order=False)
        # the error norm does not include the integrals for the leaves, on which the state and the adjoint do not depend
        term.error_groups = [slice(sum(x.numel() for x in state[: 2 * n]))]
        options = {name: value for name, value in (s.options or {}).items() if name != "first_step"}
        begin, pace, share = t[0], torch.ones(()), 1.0  # share: restricts the error norm to samples with pace > 0
        if t.dim() > 1:
            length = (t[1] - t[0]).to(state[0].device)
            self.longest = length.abs().argmax()
            self.begin, self.pace = begin.to(length), length / length[self.longest]
            pace = self.pace.cpu()
            share, t = float((self.pace > 0).double().mean().sqrt()), t[:, self.longest.cpu()]
        settings = Settings(
            "tsit5", s.rtol * share, s.atol * share, steps=s.steps, jump_times=s.jump_times, max_steps=s.max_steps,
            options=options,
        )  # fmt: skip
        setup = Setup.of(term, METHODS["tsit5"], t, settings, end_only=True)
        near = self.setup.grid.near / pace[pace > 0].min().item()
        jumps = self._jumps(begin.numpy(), pace.numpy(), setup.grid.end, near if s.steps is not None else 0.0)
        setup = replace(setup, grid=replace(setup.grid, near=near, jumps=jumps))
        rows = integrate(start_of(setup, state, ends_on_signals=False)).rows
        return tuple([x[0] for x in parts(term.unflatten(rows, (1,)))])

    def _jumps(self, begin: Array, pace: Array, length: Array, slack: float) -> Any:
        """Return the times of the jumps of f inside the interval, (K,), or None if there are none.

        All samples are solved over the longest of their intervals, so the times are divided by the ``pace`` of the
        samples. They are measured from the start of the backward solve.

        Arguments:
            begin: the time at which the backward solve of each sample starts, () or (batch,).
            pace: the length of each sample's interval divided by the longest length, () or (batch,).
            length: the longest length.
            slack: the distance from the interval up to which a jump counts as inside.
        """
        grid = self.setup.grid
        if grid.jumps is None:
            return None
        with np.errstate(all="ignore"):
            jumps = (abs(begin - grid.begin)[..., None] - grid.jumps) / pace[..., None]
        inside = np.unique(jumps[(jumps > -slack) & (jumps <= length + slack)])
        return inside if inside.size else None


def as_real(x: Tensor) -> Tensor:
    """Convert a complex tensor (...) to a real tensor (..., 2) of real and imaginary parts; keep a real tensor."""
    return torch.view_as_real(x) if x.is_complex() else x


def vjp(outputs: Rows, inputs: list[Tensor], gradients: Rows) -> list[Tensor | None]:
    """Return a list with the gradient with respect to each of ``inputs``, or None where no output depends on the input.

    ``gradients`` holds the gradients with respect to ``outputs``. Outputs and inputs may also require no gradient,
    in contrast to torch.autograd.grad.
    """
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    of = {id(x): g for x, g in zip(wanted, found, strict=True)}
    return [of.get(id(x)) for x in inputs]


_REVERSED = (
    "the reversed steps miss their start by {:.2g} (relative), because rounding errors grew too much. "
    "Fix: gradient='checkpoint', float64, a shorter interval between outputs, or less damping"
)
_SOLVED_BACK = (
    "the backward solve of the adjoint misses its start by {:.2g} (relative), because errors that damping shrinks "
    "forwards grow backwards; the gradient would have a similar error. "
    f"Expected at most {MOST_MISSED:g}. Fix: gradient='checkpoint', which is exact, output times "
    "closer together, or a smaller rtol and atol"
)


def _check_missed(setup: Setup, reached: Any, start: Any, end: Any, most: float, message: str) -> None:
    """Raise ReversalError if a backward solve from the state ``end`` reached a state that is too far from ``start``.

    The distance is divided by the larger of the norms of ``start`` and ``end``, because one of them may be 0. ``most``
    is the largest allowed distance.
    """
    reached, start, end = (torch.stack(list(rows)).detach() for rows in (reached, start, end))
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)  # squares may overflow in float32
    missed = float(norm(reached - start) / (torch.maximum(norm(start), norm(end)) + setup.settings.atol))
    if not missed <= most:
        raise setup.stepper.failure(ReversalError, message.format(missed), setup.grid.begin, float("nan"))


GRADIENTS: dict[str, Any] = {mode.name: mode for mode in (Checkpoint, Direct, Reversible, Adjoint)}


def gradient_mode(gradient: Any) -> Any:
    """Return the mode object for a name such as ``"adjoint"``; return a mode object unchanged.

    Raise ValueError under a torch.func transform or in forward mode, which only ``"direct"`` supports.
    """
    made = GRADIENTS[gradient]() if isinstance(gradient, str) else gradient
    if not isinstance(made, Direct) and _torch.is_transformed():
        raise ValueError(
            f"gradient={made.name!r} does not work under the transforms of torch.func (vmap, grad, jvp, ...) or in "
            "forward mode. Fix: gradient='direct'."
        )
    return made


_REFUSAL = (
    "func depends on {what}, whose gradient this gradient mode would drop; expected func to depend only on its "
    "arguments, the parameters of its module and other leaf tensors, and on the same tensors in both passes. "
    "Fix: use gradient='direct', compute the tensor inside func, or make it a part of the state."
)


def closed_over_leaves(
    evaluate: Callable[[], Value], inputs: Iterable[Tensor], *, is_dense: bool = False
) -> tuple[list[Tensor], Value]:
    """Call ``evaluate``; return the leaf tensors on which its value depends, except ``inputs``, and the value.

    Raises:
        ValueError: if the value depends on a tensor with a graph that was computed before the call, for which
            recomputing the value gives no gradient; if autograd cannot differentiate the value inside a backward pass;
            or if ``is_dense`` and a gradient would be sparse.
    """
    inputs = list(inputs)
    seen = set(_nodes(tensor.grad_fn for tensor in inputs))
    known = {id(tensor) for tensor in inputs} | {id(node.variable) for node in seen if hasattr(node, "variable")}
    marker = new_sequence_number()
    value = evaluate()
    leaves = {id(part): part for part in parts(value) if part.is_leaf and part.requires_grad}
    for node in _nodes((part.grad_fn for part in parts(value)), seen):
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        elif sequence_number(node) < marker:
            raise ValueError(_REFUSAL.format(what=f"a tensor that was computed outside it (by {node.name()})"))
        elif node.name() == "CheckpointFunctionBackward":
            raise ValueError(_REENTRANT)
        elif is_dense and getattr(node, "_saved_sparse", False):
            raise ValueError(_SPARSE)
    return [leaf for key, leaf in leaves.items() if key not in known], value


def own_parameters(field: Callable) -> list[Tensor]:
    """Return a list of the parameters that can change the value of a field.

    For a Field they are its ``dynamics_parameters()``, for another module all parameters. A function has none.
    """
    if hasattr(field, "dynamics_parameters"):
        return field.dynamics_parameters()
    return list(field.parameters()) if isinstance(field, nn.Module) else []


def evaluate_known(evaluate: Callable[[], Value], inputs: Iterable[Tensor], known: frozenset[int]) -> Value:
    """Call ``evaluate`` and return its value; raise ValueError if it depends on a leaf tensor that is not ``known``.

    ``known`` holds ids of leaf tensors. The ``inputs`` are also allowed.
    """
    leaves, value = closed_over_leaves(evaluate, inputs)
    for leaf in leaves:
        if id(leaf) not in known:
            raise ValueError(
                _REFUSAL.format(what=f"a tensor of shape {tuple(leaf.shape)} that it did not use at first")
            )
    return value


def _nodes(roots: Iterable[Node | None], seen: Iterable[Node] = (), first: int = -1) -> Iterator[Node]:
    """Yield the nodes of an autograd graph that can be reached from ``roots``.

    Nodes in ``seen`` are skipped, together with the nodes that are reached only through them. The search also stops at
    nodes whose sequence number is at most ``first``.
    """
    seen, pending = set(seen), list(roots)
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            if sequence_number(node) > first:
                pending.extend(parent for parent, _ in node.next_functions)
