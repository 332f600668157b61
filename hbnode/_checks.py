"""Checks of arguments that several modules make."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import torch
from torch import Tensor


class SupportsArray(Protocol):
    """What numpy can make an array of: one of its arrays, a column of pandas."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """The array."""


ArrayLike: TypeAlias = Tensor | Sequence[Any] | SupportsArray


def as_count(value: SupportsIndex, name: str, least: int = 1) -> int:
    """A whole number that is at least ``least``."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if count < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}. Fix: pass a whole number.")
    return count


def check_bool(value: bool, name: str, fix: str = "") -> bool:
    """Return True or False, or raise an error: a number was meant for another argument."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}. Fix: {fix or f'{name}=True'}.")
    return value


def as_seed(value: SupportsIndex) -> int:
    """A whole number of at most 64 bits, which is what torch's generators take."""
    seed = as_count(value, "seed", least=0)
    if seed >= 2**64:
        raise ValueError(f"seed must be below 2**64, got {seed}. Fix: seed={seed % 2**64}.")
    return seed


def as_numbers(
    value: object, name: str, fix: str, dtype: torch.dtype = torch.float64, device: str | None = "cpu"
) -> Tensor:
    """A number or several as a tensor of its own, on the CPU, or for None where they are."""
    try:
        return torch.as_tensor(value, dtype=dtype, device=device).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number or a tensor, got {value!r}. Fix: {fix}.") from None


def check_input(x: object, name: str) -> None:
    """Refuse what is no tensor, with the call that makes it one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}. Fix: {conversion(x)}.")


def conversion(x: object) -> str:
    """How to make a tensor of ``x``, for messages."""
    if isinstance(x, (list, tuple)) and x and all(isinstance(part, Tensor) for part in x):
        return "torch.stack(x), or torch.cat(x)"
    if hasattr(x, "to_numpy"):
        return f"torch.tensor(x.to_numpy(), dtype={torch.get_default_dtype()})"
    if isinstance(x, (list, tuple, float, int)) or hasattr(x, "__array__"):
        return f"torch.tensor(x, dtype={torch.get_default_dtype()})"
    return "pass a tensor"


def tensor_fix(value: object) -> str:
    """How to make a batch of sequences of what was given in its place."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return "torch.stack(x) if all are of one shape, torch.nn.utils.rnn.pad_sequence(x, batch_first=True) if not"
    return conversion(value)


def as_tensor(value: object, name: str) -> Tensor:
    """A tensor of an array of numpy or pandas, or of a list of numbers in float64."""
    if isinstance(value, Tensor):
        return value
    array: Any = value.to_numpy() if hasattr(value, "to_numpy") else value
    try:
        return torch.tensor(array) if hasattr(array, "__array__") else torch.tensor(list(array), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = getattr(array, "dtype", None)
        got = type(value).__name__ if kind is None else f"{type(value).__name__} of {kind}"
        raise TypeError(
            f"{name} must be a tensor, an array or a list of numbers, got {got}. Fix: one number a sample."
        ) from error
