"""Telling from a function how a field must call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hbnode._torch import is_script_method

_TIMES = {"t", "time"}


def takes_time(func: Callable[..., Any], parts: int, second: str = "v") -> bool:
    """Whether ``func`` is to be called ``(t, *parts)`` rather than ``(*parts)``; messages call the second part so."""
    if not callable(func):
        raise TypeError(f"func must be callable, got {type(func).__name__}. Fix: pass a module or a function.")
    inner = _unwrap(func)
    declared = getattr(inner, "time_dependent", None)
    if isinstance(declared, bool):
        return declared
    names = "h" if parts == 1 else f"h, {second}"
    fix = "Fix: say which with time_dependent=True or time_dependent=False."
    try:
        signature = _signature(inner.forward if isinstance(inner, nn.Module) else inner)
    except (TypeError, ValueError):
        raise TypeError(
            f"cannot read the signature of func={inner!r}; expected ({names}) or (t, {names}). {fix}"
        ) from None
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    required = required_arguments(signature)
    if variadic or len(required) not in (parts, parts + 1):
        if not variadic and 0 < len(required) < parts:
            fix = f"Fix: let it take {names} as well."
        raise TypeError(
            f"func takes {signature}, from which it cannot be told whether it wants the time; "
            f"expected ({names}) or (t, {names}). {fix}"
        )
    return len(required) == parts + 1


def check_order(func: Callable[..., Any]) -> None:
    """Refuse a function whose arguments by their names end with the time: everything here calls the time first."""
    if not callable(func):
        return
    inner = _unwrap(func)
    try:
        signature = inspect.signature(inner.forward if isinstance(inner, nn.Module) else inner)
    except (TypeError, ValueError):
        return
    _check_names(required_arguments(signature))


def check_call(field: Callable[..., Any]) -> None:
    """:func:`check_order` of a plain function that is solved as a field: quick, as it is done in each solve."""
    code = getattr(field, "__code__", None)
    if code is not None and code.co_argcount == 2:
        _check_names(code.co_varnames[:2])


def _check_names(names: Sequence[str]) -> None:
    if len(names) > 1 and names[-1] in _TIMES and not _TIMES & set(names[:-1]):
        right = ", ".join([names[-1], *names[:-1]])
        raise TypeError(
            f"the function takes ({', '.join(names)}), but is called with the time first. Fix: let it take "
            f"({right}); or if {names[-1]!r} is not the time, give it another name."
        )


def required_arguments(signature: inspect.Signature) -> list[str]:
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _signature(function: Any) -> inspect.Signature:
    of_method = is_script_method(function)
    if not (of_method or isinstance(function, torch.jit.ScriptFunction)):
        return inspect.signature(function)
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


def _unwrap(func: Callable[..., Any]) -> Callable[..., Any]:
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
