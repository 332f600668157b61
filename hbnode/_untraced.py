"""Calls of functions that torch.compile must not trace.

This module is imported only while torch.compile traces, because torch.compiler.disable imports torch._dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from hbnode.errors import ONLY_FIXED_GRIDS

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _run(function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    return function(*args, **kwargs)


run = torch.compiler.disable(_run, reason=ONLY_FIXED_GRIDS)
