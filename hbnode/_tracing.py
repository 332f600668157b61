"""What torch.compile, torch.export and torch.jit.trace record, and what they pass over."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from hbnode import _torch_internals

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def is_tracing() -> bool:
    """Whether operations are recorded by torch.compile, torch.export or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def may_look() -> bool:
    """Whether Python may look at the values of tensors: no graph is recorded, and no transform of torch.func runs."""
    return not (is_tracing() or _torch_internals.is_active())


def is_exporting() -> bool:
    """Whether torch.export records a graph that will be run without Python; not known before torch 2.7."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


@contextmanager
def checking_shapes() -> Iterator[None]:
    """Without the warnings of torch.jit.trace that a shape is compared, which hbnode does to refuse wrong ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module="hbnode")
        yield


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """:func:`torch.compiler.disable`, which imports half of torch, imported when torch.compile first needs it."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():
            from hbnode import _untraced

            return _untraced.run(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call
