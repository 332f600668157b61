"""How to solve: data alone. :mod:`hbnode.solve` and :mod:`hbnode.solvers.registry` check it and fill it in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`hbnode.odeint` that say how to solve; None for a choice that depends on the field."""

    method: str | None
    rtol: float
    atol: float
    gradient: str | None
    options: dict[str, Any] | None
    adjoint_options: dict[str, Any] | None
    step_control: str
    max_steps: int
    compile: bool


@dataclass(frozen=True)
class ResolvedSettings(Settings):
    """Settings whose method and gradient are filled in."""

    method: str
    gradient: str


@dataclass(frozen=True)
class Options:
    """What ``options=`` of a native method may hold."""

    steps: int | None = None
    first_step: float | None = None
    max_step: float = math.inf
    min_step: float = 0.0
    max_nfe: float = math.inf
    dense: bool | None = None
