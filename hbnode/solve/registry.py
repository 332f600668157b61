"""The lists of all methods that :func:`hbnode.odeint` and :func:`hbnode.sdeint` know."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar, get_args

from hbnode.solve.methods import METHODS, SECOND_ORDER, SPLITTING
from hbnode.solve.sde import GRADIENTS, NativeSDEMethod, SDEMethodName
from hbnode.solve.settings import FIXED, SCIPY, Gradient, Method, NativeMethod, TorchdiffeqMethod


class MethodInfo(NamedTuple):
    """One method.

    Attributes:
        name: what ``method=`` takes.
        order: of convergence; None where it varies.
        evaluations: of the field in one step, after the first one; None where they vary.
        steps: ``"adaptive"``, chosen by ``rtol`` and ``atol``, or ``"fixed"``, a grid.
        field: the fields that it solves.
        gradients: what ``gradient=`` may be.
        needs: the options that it must be given, or that matter most.
        library: whose solver it is.
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
    """One method of :func:`hbnode.sdeint`.

    Attributes:
        name: what ``method=`` takes.
        order: strong, of convergence to the path of the equation for the same noise.
        evaluations: of f in one step, after the first one.
        gradients: what ``gradient=`` may be.
        library: whose solver it is.
    """

    name: SDEMethodName
    order: float
    evaluations: int
    gradients: tuple[Gradient, ...]
    library: Literal["hbnode", "torchsde"]


Info = TypeVar("Info", MethodInfo, SDEMethodInfo)


class Methods(tuple[Info, ...]):
    """Methods, printed as a table; ``pandas.DataFrame(hbnode.methods())`` makes a frame of them."""

    __slots__ = ()

    def __repr__(self) -> str:
        rows = [self[0]._fields, *([_cell(value) for value in method] for method in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _cell(value: str | float | tuple[str, ...] | None) -> str:
    return "varies" if value is None else ", ".join(value) if isinstance(value, tuple) else str(value)


_ORDERS: dict[str, int] = {
    "nystrom4": 4, "nystrom6": 6, "nystrom8": 8, "exponential": 5, "leapfrog": 2, "blanes_moan4": 4, "tsit5": 5,
    "dopri5": 5, "dopri8": 8, "bosh3": 3, "fehlberg2": 2, "adaptive_heun": 2,
    "euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4,
}  # fmt: skip
_EVALUATIONS: dict[str, int] = {
    "dopri5": 6, "dopri8": 13, "bosh3": 3, "fehlberg2": 2, "adaptive_heun": 1,
    "euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4,
    **{name: method.evaluations for name, method in METHODS.items()},
}  # fmt: skip
_OF_SDES: dict[SDEMethodName, tuple[float, int]] = {  # order and evaluations
    "ubu": (2, 1), "baoab": (1, 1), "nystrom4": (3, 3), "euler": (1, 1), "milstein": (1, 1), "srk": (1.5, 3),
    "midpoint": (1, 2), "heun": (1, 2), "euler_heun": (1, 1), "log_ode": (1, 2), "reversible_heun": (1, 1),
}  # fmt: skip


def sde_methods() -> Methods[SDEMethodInfo]:
    """Return all methods of :func:`hbnode.sdeint`, with their strong order and evaluations a step.

    The orders are those for additive noise, which that of :class:`hbnode.HeavyBallSDE` is.

    Returns:
        A tuple of :class:`SDEMethodInfo`, which prints as a table and which ``pandas.DataFrame`` takes as it is.

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
    """Return all methods of :func:`hbnode.odeint`, with their order, evaluations a step and what they need.

    Those of :func:`hbnode.sdeint` are :func:`sde_methods`.

    Returns:
        A tuple of :class:`MethodInfo`, which prints as a table and which ``pandas.DataFrame`` takes as it is.

    Example:
        >>> import hbnode
        >>> [method.name for method in hbnode.methods() if method.order == 8]
        ['nystrom8', 'dopri8']
    """
    return Methods(map(_info, (*get_args(NativeMethod), *get_args(TorchdiffeqMethod))))


def _info(name: Method) -> MethodInfo:
    is_native, is_fixed = name in METHODS, name in (*SPLITTING, *FIXED)
    gradients: tuple[Gradient, ...] = ("direct", "adjoint")
    if is_native:
        gradients = ("checkpoint", "direct", *(("reversible",) if name in SPLITTING else ()), "adjoint")
    elif name in SCIPY:
        gradients = ("adjoint",)
    return MethodInfo(
        name,
        _ORDERS.get(name),
        _EVALUATIONS.get(name),
        "fixed" if is_fixed else "adaptive",
        "HBNODE, GHBNODE" if name in SPLITTING else "HBNODE" if name in SECOND_ORDER else "any",
        gradients,
        "steps=n" if is_fixed else "scipy" if name in SCIPY else "",
        "hbnode" if is_native else "torchdiffeq",
    )
