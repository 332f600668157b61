"""Whether layers are asked for a form that can be differentiated twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WANTED = ContextVar("second_derivatives", default=False)


def are_wanted() -> bool:
    """Whether scans, solves and attention take their plain form; their own backward passes are not functions."""
    return _WANTED.get()


@contextmanager
def wanted() -> Iterator[None]:
    """Ask for it, for all that is evaluated inside."""
    token = _WANTED.set(True)
    try:
        yield
    finally:
        _WANTED.reset(token)
