"""Counters of function evaluations (NFE), the calls of a field by a solver, and records of solver steps."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hbnode._torch import backward_pass


def _on_total(operation: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    """Return a method of :class:`NFE`, such as ``__gt__``, that applies ``operation`` to its total and the operands.

    With ``reflected`` the order of the operands is reversed, as in ``2 - nfe``.
    """

    def apply(self: NFE, *others: Any) -> Any:
        operands = [self.total, *(other.total if isinstance(other, NFE) else other for other in others)]
        return operation(*(operands[::-1] if reflected else operands))

    return apply


@dataclass
class NFE:
    """The numbers of function evaluations (NFE) and of solver steps.

    The sum of two NFE, ``nfe + nfe`` or ``sum([...])``, adds all counts. In other operations, such as ``nfe > 100``,
    ``nfe / 2``, ``np.mean([nfe])`` and ``f"{nfe:d}"``, an NFE acts as its total; ``json.dumps`` needs ``int(nfe)``. Two
    NFE are equal if all their counts are equal. ``print(nfe)`` adds "graph kept" if the backward pass needs no
    evaluations because the autograd graph is stored.

    Attributes:
        forward: evaluations in the forward pass.
        backward: evaluations in the backward pass, to solve the adjoint ODE or to recompute steps. With
            ``gradient="direct"`` the count is 0, because backpropagation does not evaluate the field.
        steps: accepted steps of the forward pass.
        rejected: rejected steps of the forward pass.
        backward_steps: accepted steps of the backward pass.
        backward_rejected: rejected steps of the backward pass.
    """

    forward: int = 0
    backward: int = 0
    steps: int = 0
    rejected: int = 0
    backward_steps: int = 0
    backward_rejected: int = 0

    # keeps_graph: whether the graph of the forward pass is stored
    keeps_graph: bool = field(default=False, init=False, repr=False, compare=False)
    # successor: after a reset, the new NFE to which running solves add their counts
    successor: NFE | None = field(default=None, init=False, repr=False, compare=False)
    # samples: indices of the samples that this solve integrates; None for the whole batch
    samples: list[int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def total(self) -> int:
        """The sum of the forward and backward evaluations."""
        return self.forward + self.backward

    def as_dict(self) -> dict[str, int]:
        """Return a dict of all counts and the total, for JSON or a table."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.init} | {"total": self.total}

    def __add__(self, other: Any) -> Any:
        if isinstance(other, int) and other == 0:  # sum() starts from 0
            other = NFE()
        if not isinstance(other, NFE):
            return self.total + other
        both = NFE(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self) if part.init))
        both.keeps_graph = self.keeps_graph or other.keeps_graph
        return both

    __radd__ = __add__
    __sub__, __rsub__ = _on_total(operator.sub), _on_total(operator.sub, reflected=True)
    __mul__, __rmul__ = _on_total(operator.mul), _on_total(operator.mul, reflected=True)
    __truediv__, __rtruediv__ = _on_total(operator.truediv), _on_total(operator.truediv, reflected=True)
    __floordiv__, __rfloordiv__ = _on_total(operator.floordiv), _on_total(operator.floordiv, reflected=True)
    __mod__, __rmod__ = _on_total(operator.mod), _on_total(operator.mod, reflected=True)
    __divmod__, __rdivmod__ = _on_total(divmod), _on_total(divmod, reflected=True)
    __pow__, __rpow__ = _on_total(pow), _on_total(pow, reflected=True)
    __lt__, __le__, __gt__, __ge__ = map(_on_total, (operator.lt, operator.le, operator.gt, operator.ge))
    __neg__, __pos__ = _on_total(operator.neg), _on_total(operator.pos)
    __abs__, __round__, __bool__ = _on_total(abs), _on_total(round), _on_total(bool)

    def __eq__(self, other: object) -> Any:
        return self.as_dict() == other.as_dict() if isinstance(other, NFE) else self.total == other

    def __index__(self) -> int:  # also for int() and float()
        return self.total

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.total, dtype)

    def __str__(self) -> str:
        kept = " (graph kept)" if self.backward == 0 and (self.keeps_graph or self.backward_steps) else ""
        return f"forward {self.forward}, backward {self.backward}{kept}, steps {self.steps}, rejected {self.rejected}"

    def __format__(self, spec: str) -> str:
        return format(self.total, spec) if spec else str(self)


numbers.Number.register(NFE)  # conversion for NumPy and TensorBoard

_FORWARD = {"evaluation": "forward", "accepted": "steps", "rejected": "rejected"}
_BACKWARD = {"evaluation": "backward", "accepted": "backward_steps", "rejected": "backward_rejected"}

open_counters: list[tuple[frozenset[int], NFE]] = []


@dataclass
class StepRecord:
    """A record of attempted solver steps in chronological order, with one entry per step in each list.

    Attributes:
        t: start times of the steps.
        size: step sizes, in units of time. They are positive, also if the solve runs backwards in time.
        accepted: whether each step was accepted. Fixed steps are always accepted.
        sample: indices of the samples if samples have their own steps; None for a step of the whole batch.
        backward: whether each step belongs to the solve of an adjoint ODE in the backward pass.
    """

    t: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    sample: list[int | None] = field(default_factory=list)
    backward: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.t)


open_records: list[tuple[frozenset[int], StepRecord]] = []


class Tally:
    """A counter of the evaluations and steps of one solve; active :func:`count_nfe` contexts are updated, too."""

    def __init__(self, field: Callable[..., Any], nfe: NFE) -> None:
        self.identity = identity(field)
        self.started_with = nfe

    @property
    def nfe(self) -> NFE:
        """The :class:`NFE` to which the solve adds its counts.

        If the NFE of the block was replaced during the solve, this is the new one.
        """
        while self.started_with.successor is not None:
            self.started_with = self.started_with.successor
        return self.started_with

    def add(self, event: str, count: int = 1) -> None:
        """Add ``count`` events of a kind: ``"evaluation"``, or a step that was ``"accepted"`` or ``"rejected"``.

        They count as forward or backward events, depending on the pass that is running.
        """
        is_forward = torch.compiler.is_compiling() or backward_pass() == -1
        name = (_FORWARD if is_forward else _BACKWARD)[event]
        own = self.nfe
        setattr(own, name, getattr(own, name) + count)
        for watched, total in open_counters:
            if self.identity in watched:
                setattr(total, name, getattr(total, name) + count)
                total.keeps_graph |= own.keeps_graph

    def report(self, start: Any, size: Any, accepted: Any) -> None:
        """Add a step to the active :func:`record_steps` contexts of the field.

        Each argument is a scalar, or has one entry per sample (batch,) if samples have their own steps.
        """
        start, size = (x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (start, size))
        samples = [None] if size.ndim == 0 else self.nfe.samples or range(len(size))
        columns = [np.broadcast_to(x, size.shape).reshape(-1).tolist() for x in (start, abs(size), accepted)]
        for watched, record in open_records:
            if self.identity in watched:
                for row in zip(*columns, samples, strict=True):
                    if row[1] > 0:  # a finished sample takes steps of size 0
                        for name, value in zip(("t", "size", "accepted", "sample"), row, strict=True):
                            getattr(record, name).append(value)
                        record.backward.append(backward_pass() != -1)


def count_nfe(module: nn.Module | Callable[..., Any]) -> AbstractContextManager[NFE]:
    """Count the function evaluations of all fields in ``module`` during a ``with`` statement.

    The count includes every solve, also nested, of ``module`` or a submodule by :func:`hbnode.odeint` or a block. All
    evaluations during a backward pass count as backward, also those of an inner solve that the backward pass repeats.

    Arguments:
        module: a block, a model with blocks inside, a field, or any callable that is solved as a field.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(2, 2), method="rk4", steps=5)
        >>> with hbnode.count_nfe(block) as nfe:
        ...     y = block(block(torch.zeros(3, 2)))
        >>> nfe.forward, nfe.steps  # two solves, five steps per solve, four evaluations per step
        (40, 10)
    """
    return _collect(open_counters, module, NFE(), "count_nfe")


def record_steps(module: nn.Module | Callable[..., Any]) -> AbstractContextManager[StepRecord]:
    """Record the accepted and rejected steps of all solves in ``module`` during a ``with`` statement.

    The solves are those that :func:`count_nfe` counts. Steps of an adjoint ODE are recorded, but not steps that a
    backward pass recomputes. If a solve raises :class:`hbnode.SolverError`, its earlier steps are recorded.
    ``method="scipy_solver"`` and compiled or exported graphs report no steps.

    Arguments:
        module: a block, a model with blocks inside, a field, or any callable that is solved as a field.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(2, 2), method="rk4", steps=4)
        >>> with hbnode.diagnostics.record_steps(block) as steps:
        ...     h = block(torch.zeros(3, 2))
        >>> steps.t, steps.size[0], all(steps.accepted)
        ([0.0, 0.25, 0.5, 0.75], 0.25, True)
    """
    return _collect(open_records, module, StepRecord(), "record_steps")


Record = TypeVar("Record", NFE, StepRecord)


@contextmanager
def _collect(
    entries: list[tuple[frozenset[int], Record]], module: Callable[..., Any], record: Record, caller: str
) -> Iterator[Record]:
    """Add ``record`` to the list ``entries`` of active contexts, and remove it when this context ends.

    The entry is a pair: the identities of ``module`` and its submodules, and ``record``.
    """
    if not callable(module):
        got = type(module).__name__
        raise TypeError(f"{caller} expected a module or a callable field, got {got}. Fix: pass the block or its model.")
    members = module.modules() if isinstance(module, nn.Module) else [module]
    entry = (frozenset(map(identity, members)), record)
    entries.append(entry)
    try:
        yield record
    finally:
        entries[:] = [other for other in entries if other is not entry]


def identity(field: Callable[..., Any]) -> int:
    """Return the id by which the counters identify a field.

    For a bound method it is the id of the object. For a wrapper it is the id of the wrapped field, its attribute
    ``counted_as``.
    """
    return id(getattr(field, "__self__", getattr(field, "counted_as", field)))
