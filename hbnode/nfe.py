"""Counting function evaluations (NFE): one per call of the field, wherever a solver calls it from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hbnode._torch import backward_pass


@dataclass
class NFE:
    """Evaluations of a field and steps of its solver.

    Counts add up, ``nfe + nfe`` or ``sum([...])``. ``int(nfe)``, ``float(nfe)`` and ``f"{nfe:d}"`` are the total.
    ``print(nfe)`` adds "graph kept" where the backward pass evaluates nothing because the forward pass kept its graph.

    Attributes:
        forward: evaluations in the forward pass.
        backward: evaluations in the backward pass (the adjoint's own, or those that replay the forward pass).
            Backpropagation through a solver's operations evaluates nothing anew: ``gradient="direct"`` leaves it at 0.
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

    # whether the forward pass keeps its graph for the backward pass; where a solve that has begun counts from now on;
    # which of a batch are solved, if not all of them
    keeps_graph: bool = field(default=False, init=False, repr=False, compare=False)
    successor: NFE | None = field(default=None, init=False, repr=False, compare=False)
    samples: list[int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def total(self) -> int:
        """Forward and backward evaluations together."""
        return self.forward + self.backward

    def as_dict(self) -> dict[str, int]:
        """Return all counts and the total by their names, for JSON or a table."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.init} | {"total": self.total}

    def __add__(self, other: NFE | int) -> NFE:
        if other == 0:  # where sum() starts
            other = NFE()
        if not isinstance(other, NFE):
            return NotImplemented
        both = NFE(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self) if part.init))
        both.keeps_graph = self.keeps_graph or other.keeps_graph
        return both

    __radd__ = __add__

    def __int__(self) -> int:
        return self.total

    def __float__(self) -> float:
        return float(self.total)

    def __str__(self) -> str:
        kept = " (graph kept)" if self.backward == 0 and (self.keeps_graph or self.backward_steps) else ""
        return f"forward {self.forward}, backward {self.backward}{kept}, steps {self.steps}, rejected {self.rejected}"

    def __format__(self, spec: str) -> str:
        return format(self.total, spec) if spec else str(self)


_FORWARD = {"evaluation": "forward", "accepted": "steps", "rejected": "rejected"}
_BACKWARD = {"evaluation": "backward", "accepted": "backward_steps", "rejected": "backward_rejected"}

open_counters: list[tuple[frozenset[int], NFE]] = []


@dataclass
class StepRecord:
    """The steps of solves in the order in which they were tried; one entry per step in each list.

    Attributes:
        t: where the step starts, in units of time.
        size: its length, in units of time; positive also where a solve runs backwards in time.
        accepted: whether it was accepted. On a fixed grid all steps are.
        sample: the sample that takes the step, where samples have steps of their own; None where all take it together.
        backward: whether it is a step of an adjoint, solved in the backward pass.
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
    """The count of one solve; passes every event on to the open :func:`count_nfe` contexts that watch its field."""

    def __init__(self, field: Callable[..., Any], nfe: NFE) -> None:
        self.identity = identity(field)
        self.started_with = nfe

    @property
    def nfe(self) -> NFE:
        """What is counted into."""
        while self.started_with.successor is not None:
            self.started_with = self.started_with.successor
        return self.started_with

    def add(self, event: str, count: int = 1) -> None:
        """Count an ``"evaluation"``, or an ``"accepted"`` or ``"rejected"`` step, in the pass that is running."""
        is_forward = torch.compiler.is_compiling() or backward_pass() == -1
        name = (_FORWARD if is_forward else _BACKWARD)[event]
        own = self.nfe
        setattr(own, name, getattr(own, name) + count)
        for watched, total in open_counters:
            if self.identity in watched:
                setattr(total, name, getattr(total, name) + count)
                total.keeps_graph |= own.keeps_graph

    def report(self, start: Any, size: Any, accepted: Any) -> None:
        """Pass a step, or one step for each sample (batch,), on to the open :func:`record_steps` contexts."""
        start, size = (x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (start, size))
        samples = [None] if size.ndim == 0 else self.nfe.samples or range(len(size))
        columns = [np.broadcast_to(x, size.shape).reshape(-1).tolist() for x in (start, abs(size), accepted)]
        for watched, record in open_records:
            if self.identity in watched:
                for row in zip(*columns, samples, strict=True):
                    if row[1] > 0:  # a sample that has arrived waits for the others in steps of size 0
                        for name, value in zip(("t", "size", "accepted", "sample"), row, strict=True):
                            getattr(record, name).append(value)
                        record.backward.append(backward_pass() != -1)


def count_nfe(module: nn.Module | Callable[..., Any]) -> AbstractContextManager[NFE]:
    """Sum the evaluations of every field inside ``module`` during a block of code.

    Counts each solve that :func:`hbnode.odeint` or a block runs on a field that is ``module`` itself or one of its
    submodules, forward and backward, nested solves included. What happens in the backward pass counts as backward,
    also the forward part of an inner solve that an outer adjoint replays.

    Arguments:
        module: a block, a model with blocks inside, a field, or any callable that is solved as a field.

    Example:
        >>> import torch, hbnode
        >>> block = hbnode.HeavyBallODEBlock(torch.nn.Linear(2, 2), method="rk4", steps=5)
        >>> with hbnode.count_nfe(block) as nfe:
        ...     y = block(block(torch.zeros(3, 2)))
        >>> nfe.forward, nfe.steps  # two solves, five steps each, four evaluations a step
        (40, 10)
    """
    return _collect(open_counters, module, NFE(), "count_nfe")


def record_steps(module: nn.Module | Callable[..., Any]) -> AbstractContextManager[StepRecord]:
    """Record the steps of every solve inside ``module`` during a block of code, accepted and rejected.

    Records the solves that :func:`count_nfe` counts. A step that a backward pass recomputes is not recorded again, the
    steps of an adjoint are. ``method="scipy_solver"`` reports no steps, and neither does a compiled or exported graph.
    The steps tried before a :class:`hbnode.SolverError` are recorded too. Without an open record nothing is kept.

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
    """Let a record collect what happens inside of ``module``, until the context is left."""
    if not callable(module):
        raise TypeError(
            f"{caller} expected a module or a callable field, got {type(module).__name__}. "
            "Fix: pass the block or the model that contains it."
        )
    members = module.modules() if isinstance(module, nn.Module) else [module]
    entry = (frozenset(map(identity, members)), record)
    entries.append(entry)
    try:
        yield record
    finally:
        entries[:] = [other for other in entries if other is not entry]


def identity(field: Callable[..., Any]) -> int:
    """Return what tells fields apart: the object of a bound method, made anew at each access; what a wrapper wraps."""
    return id(getattr(field, "__self__", getattr(field, "counted_as", field)))
