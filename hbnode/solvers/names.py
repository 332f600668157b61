"""Names of methods and modes as types, so that an editor completes them and a type checker catches a misspelt one."""

from __future__ import annotations

from typing import Literal

NativeMethod = Literal["nystrom4", "nystrom6", "nystrom8", "exponential", "leapfrog", "blanes_moan4", "tsit5"]
TorchdiffeqMethod = Literal[
    "dopri5",
    "dopri8",
    "bosh3",
    "fehlberg2",
    "adaptive_heun",
    "euler",
    "midpoint",
    "heun2",
    "heun3",
    "rk4",
    "explicit_adams",
    "implicit_adams",
    "fixed_adams",
    "scipy_solver",
]
Method = Literal[NativeMethod, TorchdiffeqMethod]
Gradient = Literal["checkpoint", "direct", "reversible", "adjoint"]
Save = Literal["interpolate", "exact"]
