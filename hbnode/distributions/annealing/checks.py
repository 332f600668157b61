"""Checks of what annealing is given, and of what the functions that it is given return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from hbnode._checks import as_numbers

_NORMAL = "torch.distributions.Independent(torch.distributions.Normal(torch.zeros(d), torch.ones(d)), 1)"


def checked_dim(prior: object) -> int:
    """The size of the prior's events."""
    if not isinstance(prior, Distribution):
        raise TypeError(f"prior must be a torch.distributions object, got {type(prior).__name__}. Fix: {_NORMAL}.")
    batch, event = tuple(prior.batch_shape), tuple(prior.event_shape)
    if batch or len(event) != 1:
        wraps = len(batch) == 1 and not event
        raise ValueError(
            f"prior must have batch shape () and event shape (d,), got {batch} and {event}. "
            f"Fix: {'torch.distributions.Independent(prior, 1)' if wraps else _NORMAL}."
        )
    support: Any = None
    with suppress(NotImplementedError):
        support = prior.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    if support is not None and not isinstance(support, type(constraints.real)):
        raise ValueError(
            f"prior must be a distribution on all of R^d, as steps may leave the support {support}. Fix: sample "
            f"unbounded coordinates and transform them in log_prob, with {_NORMAL}."
        )
    return event[0]


def check_functions(log_prob: object, force: object) -> None:
    """Refuse what cannot be called."""
    if not callable(log_prob):
        fix = "target.log_prob" if hasattr(log_prob, "log_prob") else "a function of points (n, d)"
        raise TypeError(f"log_prob must be a function, got {type(log_prob).__name__}. Fix: pass {fix}.")
    if force is not None and not callable(force):
        raise TypeError(f"force must be a module or a function, got {type(force).__name__}. Fix: hbnode.nn.MLP.")


def log_of(value: float | Tensor, dim: int, name: str, usual: float) -> Tensor:
    """The logarithm of a positive number, or of one for each dimension."""
    given = as_numbers(value, name, f"{name}={usual}", torch.get_default_dtype(), device=None)
    if given.shape not in (torch.Size([]), torch.Size([dim])):
        raise ValueError(
            f"{name} must be a number or a tensor ({dim},), got shape {tuple(given.shape)}. Fix: {name}={usual}."
        )
    if not bool((given > 0).all()):
        raise ValueError(f"{name} must be positive, got {given.tolist()}. Fix: {name}={usual}.")
    return given.log()


def log_increments(schedule: Tensor | Sequence[float] | None, steps: int, is_learned: bool) -> Tensor:
    """The logarithms of the increments of a schedule, up to a constant."""
    if schedule is None:
        return torch.zeros(steps)
    fix = f"Fix: torch.linspace(0, 1, {steps + 1}), or leave it out."
    given = as_numbers(schedule, "schedule", f"torch.linspace(0, 1, {steps + 1})", device=None)
    if given.shape != (steps + 1,):
        raise ValueError(f"schedule must be ({steps + 1},), steps + 1, got shape {tuple(given.shape)}. {fix}")
    increments = given.diff()
    if given[0] != 0 or given[-1] != 1 or not bool((increments >= 0).all()):
        raise ValueError(f"schedule must increase from 0 to 1, got {given.tolist()}. {fix}")
    if is_learned and bool((increments == 0).any()):
        raise ValueError("a learned schedule must increase in every step. Fix: learn_schedule=False.")
    return increments.log().to(torch.get_default_dtype())


def check_device(x: Tensor, device: torch.device) -> None:
    """Refuse a prior whose device is not that of the parameters."""
    if x.device != device:
        raise ValueError(
            f"the prior draws on {x.device}, but the step size is on {device}. "
            f"Fix: annealing.to({str(x.device)!r}), or a prior whose tensors are on {device}."
        )


def checked_log_prob(log_prob: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The log density (n,) at x (n, d)."""
    try:
        value = log_prob(x)
    except ValueError as error:
        if "within the support" not in str(error):  # torch's words
            raise
        raise ValueError(
            "log_prob is of a distribution on a part of R^d, which paths leave. Fix: unbounded coordinates, with the "
            "log-determinant of their transform in log_prob; or -inf outside of the support."
        ) from error
    if not isinstance(value, Tensor):
        raise TypeError(f"log_prob must return a tensor, got {type(value).__name__}. Fix: write it in torch.")
    if value.shape != x.shape[:1]:
        fix = {(len(x), 1): "log_prob(x).squeeze(-1)", tuple(x.shape): "log_prob(x).sum(-1)"}
        raise ValueError(
            f"log_prob must map ({len(x)}, {x.shape[1]}) to ({len(x)},), got {tuple(value.shape)}. "
            f"Fix: {fix.get(tuple(value.shape), 'sum over the last dimension alone, with .sum(-1)')}."
        )
    if not value.requires_grad:
        raise ValueError(
            "log_prob returns a tensor that does not depend on x for autograd. Fix: no .detach(), torch.no_grad() or "
            "numpy in log_prob; if it is constant, add 0 * x.sum(-1)."
        )
    return value


def check_dtype(force: Callable[..., Tensor], x: Tensor) -> None:
    """Refuse a network whose parameters are all of another dtype."""
    dtypes = {p.dtype for p in force.parameters()} if isinstance(force, nn.Module) else set()
    if dtypes and x.dtype not in dtypes:
        raise TypeError(
            f"the prior draws {x.dtype}, but the force has parameters of {dtypes.pop()}. Fix: annealing.to({x.dtype})."
        )


def check_force(u: object, x: Tensor) -> None:
    """Refuse what is no force at x."""
    if not isinstance(u, Tensor) or u.shape != x.shape:
        got = tuple(u.shape) if isinstance(u, Tensor) else type(u).__name__
        raise ValueError(f"force must return the shape of x, {tuple(x.shape)}, got {got}. Fix: {x.shape[1]} outputs.")
