"""Names of the methods as a type, so that an editor completes them and a type checker catches a misspelt one."""

from __future__ import annotations

from typing import Literal

NativeSDEMethod = Literal["ubu", "baoab", "nystrom4"]
TorchsdeMethod = Literal["euler", "milstein", "srk", "midpoint", "heun", "euler_heun", "log_ode", "reversible_heun"]
SDEMethodName = Literal[NativeSDEMethod, TorchsdeMethod]
