"""A field as a native method sees it: rows of tensors, and one function to evaluate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hbnode._checks import CHANGES_INPUT
from hbnode._recompute import autocast_of
from hbnode._state import State, cast, like, parts
from hbnode.fields import GHBNODE, HBNODE

_FORWARDS = tuple(kind.forward for kind in (HBNODE, GHBNODE))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ODETerm:
    """The equation that a method solves.

    Nystrom and splitting methods work on the rows h and m, and evaluate the force on h. Runge-Kutta methods work on one
    row: the state itself if it is a tensor, else its parts stacked, or strung together if their shapes differ.

    Attributes:
        template: the first part of the state.
        activation: σ of a splitting method, None for the identity.
    """

    def __init__(self, field: Callable, y0: State, *, second_order: bool, strung: bool = False) -> None:
        self.field: Any = field
        self.inner: Any = unwrapped(field)  # any callable; a field of hbnode in a second-order solve
        self.second_order = second_order
        self.structure = y0 if isinstance(y0, Tensor) else tuple(y0)
        tensors = parts(y0)
        self.template = tensors[0]
        alike = all(part.shape == self.template.shape for part in tensors)
        self.stacked = not isinstance(y0, Tensor) and not (second_order or strung) and alike
        self.strung = not second_order and (strung or not alike)
        self.activation = None
        if second_order:
            self.inner._pair(y0)
            if not alike:
                shapes = " and ".join(str(tuple(part.shape)) for part in tensors)
                raise ValueError(f"h and m must have one shape, got {shapes}. Fix: make m like h.")
            self.activation = self.inner.activation if isinstance(self.inner, GHBNODE) else None
        self.autocast = autocast_of(self.template.device.type)
        self.is_bare = self.autocast is nullcontext
        self.apart: int = 0 if second_order else getattr(self.inner, "apart", 0)  # elements at the end of a row
        self.calls_field = second_order and is_compiled(field)  # with m = 0, for the force alone
        self.wants_time = not (isinstance(self.inner, (HBNODE, GHBNODE)) and second_order) or self.inner.time_dependent

    def of(self, field: Callable | None) -> ODETerm:
        """The same for a field of the same kind; for None, what a solve of it needs, kept until the next."""
        other = copy.copy(self)
        other.field, other.inner = field, unwrapped(field)
        return other

    @property
    def damping(self) -> Tensor:
        """γ now: a tensor that broadcasts with a row (its dimensions filled up), or of no dimension; 0 without one."""
        damping = self.inner.solver_damping() if self.second_order else 0.0
        if not isinstance(damping, Tensor):
            return torch.tensor(damping, dtype=torch.float64)
        if damping.dim():
            if damping.dim() > self.template.dim() or any(
                a not in (1, b) for a, b in zip(damping.shape[::-1], self.template.shape[::-1], strict=False)
            ):
                raise ValueError(
                    f"the damping has shape {tuple(damping.shape)}, which does not broadcast to that of h, "
                    f"{tuple(self.template.shape)}. Fix: (d,) for one γ a feature, (d, 1, 1) for one a channel."
                )
            damping = damping.view(*[1] * (self.template.dim() - damping.dim()), *damping.shape)
        return damping

    def rows(self, state: State) -> tuple[Tensor, ...]:
        """The rows of a state."""
        if self.second_order:
            return parts(state)
        if self.strung:
            return (torch.cat([part.reshape(-1) for part in state]),)
        return (torch.stack(parts(state)),) if self.stacked else parts(state)

    def state(self, rows: Tensor) -> State:
        """The state of rows (state rows, ...); or of a trajectory, if the times come first: (T, state rows, ...)."""
        shape = self.template.shape
        if self.second_order:
            return _unstacked(rows, -len(shape) - 1)
        if not self.stacked and not self.strung:
            return rows.squeeze(-len(shape) - 1)
        row = rows.squeeze(-2 if self.strung else -len(shape) - 2)
        if self.stacked:
            return _unstacked(row, -len(shape) - 1)
        pieces = row.split([part.numel() for part in self.structure], dim=-1)
        return tuple(
            piece.reshape((*piece.shape[:-1], *part.shape)) for piece, part in zip(pieces, self.structure, strict=True)
        )

    def state_of(self, rows: tuple[Tensor, ...]) -> State:
        """:meth:`state` of rows that are each by themselves."""
        return rows if self.second_order else self.state(rows[0].unsqueeze(0))

    def error_parts(self, error: Tensor) -> tuple[Tensor, ...]:
        """The error of a step in pieces with norms of their own: an integral's is not averaged with the state's."""
        return error.split((error.shape[-1] - self.apart, self.apart), dim=-1)

    def evaluate(self, t: Tensor, x: Tensor) -> Tensor:
        """The force on h, or the derivative of a row; of the shape and dtype of ``x``, which must stay as it is."""
        if x.is_inference():
            return self.value(t, x.clone())  # it has no version by which a change would be seen
        version = x._version
        value = self.bare(t, x) if self.is_bare else self.value(t, x)
        if x._version != version:
            raise ValueError(CHANGES_INPUT)
        return value

    def value(self, t: Tensor, x: Tensor) -> Tensor:
        """:meth:`evaluate` without the check."""
        if self.autocast is nullcontext:
            return self.bare(t, x)
        with self.autocast():
            return self.bare(t, x)

    def bare(self, t: Tensor, x: Tensor) -> Tensor:
        """:meth:`value` under the autocast in force."""
        if self.second_order:
            f = self.field(t, (x, torch.zeros_like(x)))[1] if self.calls_field else self.inner.force(t, x)
            return f if f.dtype == x.dtype else cast(f, x)
        if self.stacked:
            return torch.stack(parts(like(self._of_stacked(t, x), self.structure)))
        if self.strung:
            value = like(self.field(t, self.state(x.unsqueeze(0))), self.structure)
            return torch.cat([part.reshape(-1) for part in value])
        return parts(like(self.field(t, x), x))[0]

    def _of_stacked(self, t: Tensor, x: Tensor) -> State:
        """The field's value; views from ``unbind`` may not be changed in place, which torch says in its own words."""
        try:
            return self.field(t, x.unbind(0))
        except RuntimeError as error:
            if "view and is being modified" in str(error):
                copy = x.detach().clone()
                version = copy._version
                with torch.no_grad():
                    self.field(t, _unstacked(copy, 0))
                if copy._version != version:
                    raise ValueError(CHANGES_INPUT) from error
            raise


def _unstacked(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Each part by itself, so that it may be changed in place; the views of ``unbind`` may not."""
    return tuple(x.select(dim, i) for i in range(x.shape[dim]))


def unwrapped(field: Any) -> Any:
    """The field inside of what torch.compile puts around it."""
    while hasattr(field, "_orig_mod"):
        field = field._orig_mod
    return field


def is_compiled(field: Callable) -> bool:
    """Whether torch.compile is around a field, or in it after ``field.compile()``."""
    return hasattr(field, "_orig_mod") or getattr(field, "_compiled_call_impl", None) is not None


def is_heavy_ball(field: Callable, *kinds: type) -> bool:
    """Whether a field is one of these kinds and obeys its equation.

    One inside of DistributedDataParallel is not taken for one, because only the wrapper's own call reduces gradients.
    """
    return isinstance(unwrapped(field), kinds) and change_of_call(field) is None


def change_of_call(field: Callable) -> str | None:
    """What the call of a heavy-ball field does beside its equation, which methods that call func would miss."""
    inner = unwrapped(field)
    if type(inner).forward not in _FORWARDS:
        return f"{type(inner).__name__} has a forward of its own"
    if type(inner).friction is not HBNODE.friction:
        return f"{type(inner).__name__} has a friction of its own"
    for name in ("forward", "friction"):
        if name in inner.__dict__:
            return f"its {name} was replaced"
    if type(inner).__call__ is not nn.Module.__call__:
        return f"{type(inner).__name__} has a __call__ of its own"
    if any(getattr(module, hooks) for module in (field, inner) for hooks in _HOOKS):
        return "it has hooks"
    return None
