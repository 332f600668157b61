"""The lists of all methods that :func:`hbnode.odeint` and :func:`hbnode.sdeint` know."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeVar, get_args

from hbnode.solve.methods import METHODS, SECOND_ORDER, SPLITTING
from hbnode.solve.sde import GRADIENTS, NativeSDEMethod, SDEMethodName
from hbnode.solve.settings import FIXED, SCIPY, Gradient, Method, NativeMethod, TorchdiffeqMethod
from hbnode.solve.torchsde import TorchsdeMethod


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
        rows = [self[0]._fields, *([_shown(value) for value in method] for method in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _shown(value: str | float | tuple[str, ...] | None) -> str:
    return "varies" if value is None else ", ".join(value) if isinstance(value, tuple) else str(value)


_ORDERS: dict[NativeMethod, int] = {
    "nystrom4": 4,
    "nystrom6": 6,
    "nystrom8": 8,
    "exponential": 5,
    "leapfrog": 2,
    "blanes_moan4": 4,
    "tsit5": 5,
}
_OF_TORCHDIFFEQ: dict[TorchdiffeqMethod, tuple[int, int]] = {  # order and evaluations, where they do not vary
    "dopri5": (5, 6),
    "dopri8": (8, 13),
    "bosh3": (3, 3),
    "fehlberg2": (2, 2),
    "adaptive_heun": (2, 1),
    "euler": (1, 1),
    "midpoint": (2, 2),
    "heun2": (2, 2),
    "heun3": (3, 3),
    "rk4": (4, 4),
}
_GRID = "steps=n"
_OF_SDES: dict[SDEMethodName, tuple[float, int]] = {  # order and evaluations
    "ubu": (2, 1),
    "baoab": (1, 1),
    "nystrom4": (3, 3),
    "euler": (1, 1),
    "milstein": (1, 1),
    "srk": (1.5, 3),
    "midpoint": (1, 2),
    "heun": (1, 2),
    "euler_heun": (1, 1),
    "log_ode": (1, 2),
    "reversible_heun": (1, 1),
}


def sde_methods() -> Methods[SDEMethodInfo]:
    """All methods of :func:`hbnode.sdeint`, with their strong order and evaluations a step.

    The orders are those for additive noise, which that of :class:`hbnode.HeavyBallSDE` is.

    Returns:
        A tuple of :class:`SDEMethodInfo`, which prints as a table and which ``pandas.DataFrame`` takes as it is.

    Example:
        >>> import hbnode
        >>> [method.name for method in hbnode.solve.sde_methods() if method.order >= 2]
        ['ubu', 'nystrom4']
    """
    libraries: dict[Literal["hbnode", "torchsde"], tuple[SDEMethodName, ...]] = {
        "hbnode": get_args(NativeSDEMethod), "torchsde": get_args(TorchsdeMethod)
    }  # fmt: skip
    rows = [
        SDEMethodInfo(name, *_OF_SDES[name], GRADIENTS[name], library)
        for library, names in libraries.items()
        for name in names
    ]
    return Methods(rows)


def methods() -> Methods[MethodInfo]:
    """All methods of :func:`hbnode.odeint`, with their order, evaluations a step and what they need.

    Those of :func:`hbnode.sdeint` are :func:`sde_methods`.

    Returns:
        A tuple of :class:`MethodInfo`, which prints as a table and which ``pandas.DataFrame`` takes as it is.

    Example:
        >>> import hbnode
        >>> [method.name for method in hbnode.methods() if method.order == 8]
        ['nystrom8', 'dopri8']
    """
    return Methods((*map(_native, get_args(NativeMethod)), *map(_torchdiffeq, get_args(TorchdiffeqMethod))))


def _native(name: NativeMethod) -> MethodInfo:
    gradients: tuple[Gradient, ...] = ("checkpoint", "direct", "adjoint")
    field, needs = "any", ""
    if name in SPLITTING:
        field, needs, gradients = "HBNODE, GHBNODE", _GRID, ("checkpoint", "direct", "reversible", "adjoint")
    elif name in SECOND_ORDER:
        field = "HBNODE"
    steps: Literal["adaptive", "fixed"] = "fixed" if name in SPLITTING else "adaptive"
    return MethodInfo(name, _ORDERS[name], METHODS[name].evaluations, steps, field, gradients, needs, "hbnode")


def _torchdiffeq(name: TorchdiffeqMethod) -> MethodInfo:
    gradients: tuple[Gradient, ...] = ("adjoint",) if name in SCIPY else ("direct", "adjoint")
    steps: Literal["adaptive", "fixed"] = "fixed" if name in FIXED else "adaptive"
    needs = _GRID if name in FIXED else "scipy" if name in SCIPY else ""
    order, evaluations = _OF_TORCHDIFFEQ.get(name, (None, None))
    return MethodInfo(name, order, evaluations, steps, "any", gradients, needs, "torchdiffeq")
