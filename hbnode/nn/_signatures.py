"""A decorator that shows the arguments of a base class in the signature and docstring of its subclasses."""

import inspect
import re
from typing import Any, TypeVar, get_args, get_type_hints

Layer = TypeVar("Layer", bound=type)


def shares_arguments(kind: Layer, base: type | None = None) -> Layer:
    """Complete the signature and the docstring of a class by the arguments that it passes on to its base class.

    The decorated class either inherits ``__init__``, or its ``__init__`` takes ``**options: Unpack[Options]``, where
    the keys of the TypedDict ``Options`` name keyword arguments of the base class. The docstring of the decorated class
    describes only its additional arguments. Its sections Shape and Raises are copied from the base class if missing.

    Arguments:
        kind: the class to decorate.
        base: the class that takes the options. Default: None, the nearest base class with an ``__init__``.
    """
    base = base or next(each for each in kind.__mro__[1:] if "__init__" in vars(each))
    init: Any = vars(kind).get("__init__", vars(base)["__init__"])
    base_parameters, own = inspect.signature(vars(base)["__init__"]).parameters, inspect.signature(init)
    *parameters, last = own.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        (options,) = get_args(get_type_hints(init)[last.name])
        names = options.__required_keys__ | options.__optional_keys__
        shared = [parameter for name, parameter in base_parameters.items() if name in names]
        own = own.replace(parameters=[*parameters, *shared])
        init.__signature__ = own
    if kind.__doc__ is not None and base.__doc__ is not None:  # docstrings are None under python -OO
        ours, theirs = _sections(kind.__doc__), _sections(base.__doc__)
        entries = _entries(theirs["Arguments"]) | _entries(ours.get("Arguments", ""))
        found = {name: theirs[name] for name in ("Shape", "Raises") if name in theirs} | ours
        found["Arguments"] = "".join(entries[name] for name in own.parameters if name != "self")
        text = (f"{name}:\n{found[name].rstrip()}\n" for name in _SECTIONS if name in found)
        kind.__doc__ = "\n".join([f"{ours[''].rstrip()}\n", *text])
    return kind


_SECTIONS = ("Arguments", "Shape", "Raises", "Example")


def _sections(doc: str) -> dict[str, str]:
    """Split a docstring into a dict of its sections by name; the text before the first section has the name ""."""
    text, *rest = re.split(rf"^({'|'.join(_SECTIONS)}):\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {"": text} | dict(zip(rest[::2], rest[1::2], strict=True))


def _entries(arguments: str) -> dict[str, str]:
    """Split the section Arguments into a dict from each argument's name to its lines."""
    entries = re.split(r"^(?=    \w+: )", arguments.rstrip() + "\n", flags=re.MULTILINE)[1:]
    return {entry.partition(":")[0].strip(): entry for entry in entries}
