"""The lists of all methods of :func:`hbnode.odeint` and :func:`hbnode.sdeint`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar, get_args

from hbnode.solve.methods import ALL_METHODS, METHODS, NativeMethod, TorchdiffeqMethod
from hbnode.solve.sde import GRADIENTS, NativeSDEMethod, SDEMethodName
from hbnode.solve.settings import Gradient, Method


class MethodInfo(NamedTuple):
    """The description of one ODE solver, an entry of :func:`hbnode.methods`.

    Attributes:
        name: the value of ``method=``.
        order: order of convergence; None if it varies.
        evaluations: function evaluations per step, after the first step; None if they vary.
        steps: ``"adaptive"`` if ``rtol`` and ``atol`` choose the steps, ``"fixed"`` if they have a given size.
        field: the fields that the method can solve.
        gradients: the possible values of ``gradient=``.
        needs: options or packages that the method needs. Methods with fixed steps take one step per output interval
            without ``steps``; only the splitting methods need it.
        library: the library that implements the method.
    """

    name: Method
    order: int | None
    evaluations: int | None
    steps: Literal["adaptive", "fixed"]
    field: str
    gradients: tuple[Gradient, ...]
    needs: str
    library: Literal["hbnode", "torchdiffeq"]


class SDEMethodInfo(NamedTuple):
    """The description of one SDE solver, an entry of :func:`sde_methods`.

    Attributes:
        name: the value of ``method=``.
        order: strong order of convergence for additive noise.
        evaluations: evaluations of f per step, after the first step.
        gradients: the possible values of ``gradient=``.
        library: the library that implements the method.
    """

    name: SDEMethodName
    order: float
    evaluations: int
    gradients: tuple[Gradient, ...]
    library: Literal["hbnode", "torchsde"]


Info = TypeVar("Info", MethodInfo, SDEMethodInfo)


class Methods(tuple[Info, ...]):
    """A tuple of :class:`MethodInfo` or :class:`SDEMethodInfo`; it prints as a table and fits ``pandas.DataFrame``."""

    __slots__ = ()

    def __repr__(self) -> str:
        rows = [self[0]._fields, *([_cell(value) for value in method] for method in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell(value: str | float | tuple[str, ...] | None) -> str:
    return "varies" if value is None else ", ".join(value) if isinstance(value, tuple) else str(value)


_OF_SDES: dict[SDEMethodName, tuple[float, int]] = {  # strong order and evaluations per step of each SDE method
    "ubu": (2, 1), "baoab": (1, 1), "nystrom4": (3, 3), "euler": (1, 1), "milstein": (1, 1), "srk": (1.5, 3),
    "midpoint": (1, 2), "heun": (1, 2), "euler_heun": (1, 1), "log_ode": (1, 2), "reversible_heun": (1, 1),
}  # fmt: skip


def sde_methods() -> Methods[SDEMethodInfo]:
    """Return all methods of :func:`hbnode.sdeint`, with their strong order and evaluations per step.

    The orders hold for additive noise, which is the noise of :class:`hbnode.HeavyBallSDE`.

    Returns:
        A tuple of :class:`SDEMethodInfo` that prints as a table; ``pandas.DataFrame`` accepts it.

    Example:
        >>> import hbnode
        >>> [method.name for method in hbnode.solve.sde_methods() if method.order >= 2]
        ['ubu', 'nystrom4']
    """
    rows = [
        SDEMethodInfo(name, *row, GRADIENTS[name], "hbnode" if name in get_args(NativeSDEMethod) else "torchsde")
        for name, row in _OF_SDES.items()
    ]
    return Methods(rows)


def methods() -> Methods[MethodInfo]:
    """Return all methods of :func:`hbnode.odeint`, with their order, evaluations per step and what they need.

    :func:`sde_methods` returns the methods of :func:`hbnode.sdeint`.

    Returns:
        A tuple of :class:`MethodInfo` that prints as a table; ``pandas.DataFrame`` accepts it.

    Example:
        >>> import hbnode
        >>> [method.name for method in hbnode.methods() if method.order == 8]
        ['nystrom8', 'dopri8']
    """
    return Methods(map(_info, (*get_args(NativeMethod), *get_args(TorchdiffeqMethod))))


def _info(name: Method) -> MethodInfo:
    known: Any = ALL_METHODS[name]
    is_native, is_fixed = name in METHODS, known.needs_fixed_steps
    return MethodInfo(
        name,
        known.order,
        known.evaluations,
        "fixed" if is_fixed else "adaptive",
        known.field,
        known.gradients,
        "steps=n" if is_fixed else "scipy" if name == "scipy_solver" else "",
        "hbnode" if is_native else "torchdiffeq",
    )
