"""How to solve: data alone. :mod:`hbnode.solve` and :mod:`hbnode.solvers.registry` check it and fill it in."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`hbnode.odeint` that say how to solve; None for a choice that depends on the field."""

    method: str | None
    rtol: float
    atol: float
    gradient: str | None
    steps: int | None = None
    per_sample: bool = False
    save: str = "interpolate"
    jump_times: tuple[float, ...] | None = None
    max_steps: int = 10_000
    options: dict[str, Any] | None = None
    adjoint_options: dict[str, Any] | None = None
    compile: bool = False

    @functools.cached_property
    def key(self) -> tuple:
        """All of it, to find something by: values with their types, a dict of options by its items.

        Raises:
            TypeError: if it holds something that may change, cannot be compared, or would be kept alive.
        """
        values = [getattr(self, field.name) for field in fields(self)]
        key = tuple([(type(value), _items(value)) for value in values])
        hash(key)
        return key


@dataclass(frozen=True)
class ResolvedSettings(Settings):
    """Settings whose method and gradient are filled in."""

    method: str
    gradient: str


def _items(value: Any) -> Any:
    """A dict by its items."""
    if not isinstance(value, dict):
        return value
    if not all(item is None or isinstance(item, (bool, int, float, str)) for item in value.values()):
        raise TypeError("only numbers and names are compared")
    return tuple((name, type(item), item) for name, item in value.items())


@dataclass(frozen=True)
class Options:
    """What ``options=`` of a native method may hold."""

    first_step: float | None = None
    max_step: float = math.inf
    min_step: float = 0.0
    max_nfe: float = math.inf
