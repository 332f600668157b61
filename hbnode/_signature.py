"""Telling from a function how a field must call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import nn


def takes_time(func: Callable, parts: int) -> bool:
    """Whether ``func`` is to be called ``(t, *parts)`` rather than ``(*parts)``."""
    if not callable(func):
        raise TypeError(f"func must be callable, got {type(func).__name__}. Fix: pass a module or a function.")
    inner = _unwrap(func)
    declared = getattr(inner, "time_dependent", None)
    if isinstance(declared, bool):
        return declared
    names = "h" if parts == 1 else "h, v"
    fix = "Fix: say which with time_dependent=True or time_dependent=False."
    try:
        signature = _signature(inner.forward if isinstance(inner, nn.Module) else inner)
    except (TypeError, ValueError):
        raise TypeError(
            f"cannot read the signature of func={inner!r}; expected ({names}) or (t, {names}). {fix}"
        ) from None
    required, variadic = 0, False
    for parameter in signature.parameters.values():
        variadic |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            required += 1
    if variadic or required not in (parts, parts + 1):
        raise TypeError(
            f"func takes {signature}, from which it cannot be told whether it wants the time; "
            f"expected ({names}) or (t, {names}). {fix}"
        )
    return required == parts + 1


def _signature(function: Callable) -> inspect.Signature:
    """The signature of a function, or of what TorchScript has made of one."""
    if not isinstance(function, torch.jit.ScriptFunction | torch._C.ScriptMethod):
        return inspect.signature(function)
    of_method = isinstance(function, torch._C.ScriptMethod)
    return inspect.Signature(
        [
            inspect.Parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if argument.has_default_value() else inspect.Parameter.empty,
            )
            for argument in function.schema.arguments[of_method:]
        ]
    )


def _unwrap(func: Callable) -> Callable:
    """``func`` without the wrappers of torch.compile, DataParallel and DistributedDataParallel."""
    while True:
        if isinstance(func, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            func = func.module
        elif hasattr(func, "_orig_mod"):
            func = func._orig_mod
        elif hasattr(func, "_torchdynamo_orig_callable"):
            func = func._torchdynamo_orig_callable
        else:
            return func
