"""Arguments that the subclasses of a layer share: documented once, and shown in the signature of each subclass."""

import inspect
import re
from typing import Any, TypeVar, get_args, get_type_hints

Layer = TypeVar("Layer", bound=type)


def shares_arguments(kind: Layer, base: type | None = None) -> Layer:
    """Show the arguments that a class hands on to its base in its signature, and their descriptions in its docstring.

    A class that hands them on to another one calls it ``base``.

    ``__init__`` takes ``**options: Unpack[Options]`` with a TypedDict of the names of keyword arguments of the base's
    ``__init__``, or is that of the base. The docstring describes only arguments of its own. The sections Shape and
    Raises are those of the base, unless the docstring has its own.
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
    if kind.__doc__ is not None and base.__doc__ is not None:  # they are None under python -OO
        ours, theirs = _sections(kind.__doc__), _sections(base.__doc__)
        entries = _entries(theirs["Arguments"]) | _entries(ours.get("Arguments", ""))
        found = {name: theirs[name] for name in ("Shape", "Raises") if name in theirs} | ours
        found["Arguments"] = "".join(entries[name] for name in own.parameters if name != "self")
        text = (f"{name}:\n{found[name].rstrip()}\n" for name in _SECTIONS if name in found)
        kind.__doc__ = "\n".join([f"{ours[''].rstrip()}\n", *text])
    return kind


_SECTIONS = ("Arguments", "Shape", "Raises", "Example")


def _sections(doc: str) -> dict[str, str]:
    """Split a docstring into its text, under the name "", and its sections."""
    text, *rest = re.split(rf"^({'|'.join(_SECTIONS)}):\n", inspect.cleandoc(doc), flags=re.MULTILINE)
    return {"": text} | dict(zip(rest[::2], rest[1::2], strict=True))


def _entries(arguments: str) -> dict[str, str]:
    """Return the description of each argument, with its name and its line breaks."""
    entries = re.split(r"^(?=    \w+: )", arguments.rstrip() + "\n", flags=re.MULTILINE)[1:]
    return {entry.partition(":")[0].strip(): entry for entry in entries}
