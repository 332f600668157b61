"""Checks of arguments and of the signatures of functions, with error messages that name a fix."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hbnode._torch import is_differentiated, is_script_method


class SupportsArray(Protocol):
    """The type of objects that NumPy can convert to an array, such as a pandas column, for type annotations."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...


ArrayLike: TypeAlias = Tensor | Sequence[Any] | SupportsArray


def as_count(value: SupportsIndex, name: str, least: int = 1, below: float = 2**63) -> int:
    """Return ``value`` as an int; raise ValueError unless it is an integer with ``least <= value < below``."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if not least <= count < below:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}. Fix: {name}={least}.")
    return count


def refuse_gradient(value: object, name: str, fix: str = "") -> None:
    """Raise ValueError if a tensor, or a tensor in a list, requires a gradient: the gradient would be lost.

    ``fix`` is text added to the fix in the error message.
    """
    if any(map(is_differentiated, value if isinstance(value, (list, tuple)) else [value])):
        whole = name if isinstance(value, Tensor) else f"torch.stack({name})"
        raise ValueError(f"{name} requires a gradient, but only its value is kept. Fix: {name}={whole}.detach(){fix}.")


def as_positive(value: object, name: str, fix: str, zero: bool = False) -> float:
    """Return a finite positive number as a float; raise an error for all other values. ``zero=True`` also allows 0."""
    real = as_real(value, name, fix)
    if not 0 < real < math.inf and not (zero and real == 0):
        raise ValueError(f"{name} must be a {'number >= 0' if zero else 'positive number'}, got {real}. Fix: {fix}.")
    return real


def as_real(value: object, name: str, fix: str) -> float:
    """Return a number, possibly infinite or NaN, as a float; raise TypeError for other objects, such as strings."""
    refuse_gradient(value, name)
    if not isinstance(value, numbers.Real) and not (isinstance(value, Tensor) and value.numel() == 1):
        raise TypeError(f"{name} must be a number, got {value!r}. Fix: {fix}.")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # complex, too large, or on the meta device
        raise TypeError(f"{name} must be a number, got {value!r}. Fix: {fix}.") from None


def as_integers(value: object, name: str, fix: str) -> Tensor:
    """Convert a list or an array of integers to a tensor; raise TypeError if torch cannot convert it."""
    try:
        whole = torch.as_tensor(_forward(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} must be whole numbers, got {value!r}. Fix: {fix}.") from None
    refuse_meta(whole, name)
    return whole


def check_callable(value: object, name: str, fix: str) -> None:
    """Raise TypeError if ``value`` is not callable, or if it is a class instead of an object of the class."""
    if isinstance(value, type):
        own = f"{value.__name__}()" if issubclass(value, nn.Module) else fix
        raise TypeError(f"{name} must be an object, got the class {value.__name__}. Fix: {own}, with its arguments.")
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}. Fix: {fix}.")


def is_one_of(value: object, names: Sequence[str]) -> bool:
    """Return whether ``value`` is a string and one of ``names``; False for arrays, lists and other objects."""
    return isinstance(value, str) and value in names


def check_choice(value: object, name: str, choices: Sequence[str]) -> Any:
    """Return ``value``; if it is not one of ``choices``, raise ValueError that suggests the most similar choice."""
    if not is_one_of(value, choices):
        fix = f"{name}={nearest(value, choices) or choices[0]!r}"
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}. Fix: {fix}.")
    return value


def check_bool(value: bool, name: str, fix: str = "") -> bool:
    """Return ``value``; raise TypeError if it is not a bool, for example a number passed in the wrong position."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}. Fix: {fix or f'{name}=True'}.")
    return value


def as_seed(value: SupportsIndex) -> int:
    """Return a seed for torch's generators; raise ValueError if it is not an integer from 0 to 2**64 - 1."""
    seed = as_count(value, "seed", least=0, below=math.inf)
    if seed >= 2**64:
        raise ValueError(f"seed must be below 2**64, got {seed}. Fix: seed={seed % 2**64}.")
    return seed


def to_tensor(
    value: object, name: str, fix: str, dtype: torch.dtype | None, device: torch.device | str | None = "cpu"
) -> Tensor:
    """Convert numbers to a tensor; raise TypeError for complex numbers, sparse tensors and inconvertible objects."""
    is_complex = getattr(getattr(value, "dtype", None), "kind", "") == "c"  # a complex NumPy array
    if not is_complex and (not isinstance(value, Tensor) or (value.layout is torch.strided and not value.is_complex())):
        try:
            return torch.as_tensor(_forward(value), dtype=dtype, device=device)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise TypeError(f"{name} must be a number or a tensor, got {value!r}. Fix: {fix}.")


def as_numbers(
    value: object, name: str, fix: str, dtype: torch.dtype = torch.float64, device: str | None = "cpu"
) -> Tensor:
    """Return a number, or a list, array or tensor, as a new tensor; ``device=None`` keeps the device of a tensor."""
    refuse_gradient(value, name)
    numbers = to_tensor(value, name, fix, dtype, device).detach().clone()
    if not numbers.numel():
        raise TypeError(f"{name} must be a number or a tensor, got {value!r} without entries. Fix: {fix}.")
    return numbers


def check_input(x: object, name: str) -> None:
    """Raise TypeError if ``x`` is not a dense tensor; the message contains the code that converts ``x``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}. Fix: {conversion(x)}.")
    if x.layout is not torch.strided and not x.is_nested:
        raise TypeError(f"{name} must be dense, got a tensor of layout {x.layout}. Fix: {name}.to_dense().")


def refuse_meta(x: Tensor, name: str) -> None:
    """Raise ValueError if a tensor is on the meta device, where tensors have no values."""
    if x.is_meta and type(x) in (Tensor, nn.Parameter):  # a tensor subclass on the meta device may hold values
        raise ValueError(f"{name} is on the device meta, which stores no numbers. Fix: {name} on the device 'cpu'.")


def check_real(x: Tensor, name: str) -> Tensor:
    """Return ``x``; raise an error if it is complex, bool or on the meta device."""
    refuse_meta(x, name)
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must hold real numbers, got {x.dtype}. Fix: {name} in float32 or float64.")
    return x


def conversion(x: object) -> str:
    """Return Python code, for error messages, that converts ``x`` to a tensor."""
    if isinstance(x, nn.utils.rnn.PackedSequence):
        return "torch.nn.utils.rnn.pad_packed_sequence(x)[0]"
    if isinstance(x, (list, tuple)) and x and all(isinstance(part, Tensor) for part in x):
        return "torch.stack(x), or torch.cat(x)"
    if hasattr(x, "to_numpy"):
        return f"torch.tensor(x.to_numpy(), dtype={torch.get_default_dtype()})"
    if isinstance(x, (list, tuple, float, int)) or hasattr(x, "__array__"):
        return f"torch.tensor(x, dtype={torch.get_default_dtype()})"
    return "pass a tensor"


def tensor_fix(value: object) -> str:
    """Return Python code, for error messages, that converts ``value`` to a tensor with a batch of sequences."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return "torch.stack(x) if all are of one shape, torch.nn.utils.rnn.pad_sequence(x, batch_first=True) if not"
    return conversion(value)


def as_tensor(value: object, name: str) -> Tensor:
    """Convert an array, a pandas column or a list of numbers (to float64) to a tensor; return a tensor unchanged."""
    if isinstance(value, Tensor):
        check_input(value, name)
        refuse_meta(value, name)
        return value
    array: Any = value.to_numpy() if hasattr(value, "to_numpy") else value
    try:
        if hasattr(array, "__array__"):
            return torch.as_tensor(_forward(array))
        return torch.tensor(list(array), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = getattr(array, "dtype", None)
        got = type(value).__name__ if kind is None else f"{type(value).__name__} of {kind}"
        raise TypeError(f"{name} must be a tensor, an array or a list of numbers, got {got}. Fix: numbers.") from error


def _forward(value: Any) -> Any:
    """Return a NumPy or pandas array as a copy without negative strides, as of ``df[::-1]``, which torch rejects."""
    is_array = hasattr(value, "__array__") and not isinstance(value, Tensor)
    return np.array(value, order="C") if is_array else value


_TIMES = {"t", "time"}


def takes_time(func: Callable[..., Any], parts: int, second: str = "v", given: bool | None = None) -> bool:
    """Return whether ``func`` takes the time as its first argument, before the tensors of the state.

    Arguments:
        func: a function or module.
        parts: the number of tensors of the state that ``func`` takes, 1 or 2.
        second: the name of the second tensor in error messages.
        given: the argument ``time_dependent`` of the user; None decides by the signature of ``func``.

    Raises:
        TypeError: if the signature does not show whether ``func`` takes the time, if it contradicts ``given``, or if
            the last argument is named "t" or "time".
    """
    check_callable(func, "func", "pass a module or a function")
    inner, signature = _unwrap(func), _signature(func)
    required = [] if signature is None else required_arguments(signature)
    _check_names(required)
    declared = getattr(inner, "time_dependent", given)
    if given is not None:
        check_bool(given, "time_dependent", "leave time_dependent out")
        if signature is not None and not (declared is given and _accepts(signature, parts + given)):
            fix = "leave time_dependent out"
            raise TypeError(f"time_dependent={given} does not fit func, which takes {signature}. Fix: {fix}.")
        return given
    if isinstance(declared, bool):
        return declared
    names = "h" if parts == 1 else f"h, {second}"
    fix = f"say which with time_dependent=True or time_dependent=False, or wrap it, lambda {names}: func({names})"
    if signature is None:
        raise TypeError(f"cannot read the signature of func={inner!r}; expected ({names}) or (t, {names}). Fix: {fix}.")
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    if variadic or len(required) not in (parts, parts + 1):
        fix = f"let it take {names} as well" if not variadic and 0 < len(required) < parts else fix
        raise TypeError(
            f"func has the signature {signature}, which does not show whether its first argument is the time; "
            f"expected ({names}) or (t, {names}). Fix: {fix}."
        )
    return len(required) == parts + 1


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        return bool(signature.bind(*range(count)))
    except TypeError:
        return False


def check_call(field: Callable[..., Any]) -> None:
    """Raise TypeError if the second of a function's two arguments is named "t" or "time": fields are f(t, state).

    Every solve calls this check, so it reads only the code object.
    """
    code = getattr(field, "__code__", None)
    if code is not None and code.co_argcount == 2:
        _check_names(code.co_varnames[:2])


def _check_names(names: Sequence[str]) -> None:
    if len(names) > 1 and names[-1] in _TIMES and not _TIMES & set(names[:-1]):
        right = ", ".join([names[-1], *names[:-1]])
        taken = ", ".join(names)
        fix = f"({right}); or if {names[-1]!r} is not the time, give it another name"
        raise TypeError(f"the function takes ({taken}), but is called with the time first. Fix: let it take {fix}.")


def required_arguments(signature: inspect.Signature) -> list[str]:
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _signature(func: Any) -> inspect.Signature | None:
    """Return the signature of a function, or of a module's ``forward``; None for built-ins without a signature."""
    inner: Any = _unwrap(func)
    function: Any = inner.forward if isinstance(inner, nn.Module) else inner
    of_method = is_script_method(function)
    if not (of_method or isinstance(function, torch.jit.ScriptFunction)):
        try:
            return inspect.signature(function)
        except (TypeError, ValueError):
            return None
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
    """Return ``func`` without the wrappers of torch.compile, DataParallel and DistributedDataParallel."""
    while True:
        if isinstance(func, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            func = func.module
        elif hasattr(func, "_orig_mod"):
            func = func._orig_mod
        elif hasattr(func, "_torchdynamo_orig_callable"):
            func = func._torchdynamo_orig_callable
        else:
            return func


# Argument names of other libraries, with what to write in hbnode instead
_FOREIGN = {
    **dict.fromkeys(("tol", "tolerance"), "rtol=1e-3, atol=1e-3"),
    # torchdiffeq, torchdyn, torchode
    **dict.fromkeys(("func", "f", "terms", "term", "vector_field"), "the field as the first argument"),
    **dict.fromkeys(("adjoint_rtol", "adjoint_atol"), "leave it out, the adjoint is solved at rtol and atol"),
    **dict.fromkeys(("adjoint_method", "solver_adjoint"), "leave it out, the adjoint has the method of the solve"),
    "adjoint_params": "leave it out, all tensors of func that require a gradient are found",
    **dict.fromkeys(("event_fn", "event"), "events=hbnode.Event(fn) of hbnode.odeint"),
    "terminal": "max_count=n, the event at which the solve of a sample ends",
    **dict.fromkeys(("adjoint", "sensitivity"), "gradient='adjoint'"),
    **dict.fromkeys(("step_size", "dt"), "steps=n, the number of equal steps between two times"),
    **dict.fromkeys(("solver", "integrator"), "method='tsit5'"),
    **dict.fromkeys(("ts", "saveat", "t_eval", "times", "s_span"), "t=[0.0, 1.0] of hbnode.odeint, or block(x, t)"),
    "interpolator": "save='interpolate'",
    # diffrax
    "dt0": "options={'first_step': 0.1}",
    "stepsize_controller": "rtol=1e-3, atol=1e-3 for adaptive steps, steps=n for equal ones",
    **dict.fromkeys(("t0", "t1"), "t_span=(0.0, 1.0) of a block, t=[0.0, 1.0] of hbnode.odeint"),
    "args": "a function that closes over them, or functools.partial",
    **dict.fromkeys(("max_num_steps", "max_iter"), "max_steps=1000"),
    **dict.fromkeys(("progress_meter", "throw"), "leave it out"),
    # torch.nn
    "batch_first": "leave it out, x is (batch, T, features); x.transpose(0, 1) if time comes first",
    "nonlinearity": "activation=torch.tanh, or cell='rnn'",
    "proj_size": "a torch.nn.Linear after the layer",
    **dict.fromkeys(("device", "dtype"), "leave it out, and module.to(...) afterwards"),
    **dict.fromkeys(("in_features", "num_features", "in_channels"), "input_size=1, or leave it out"),
    **dict.fromkeys(("dropout", "p"), "hbnode.nn.SolveDropout(0.1) inside the network"),
    "gamma": "damping=0.1",
}  # fmt: skip


def with_hints(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function or an ``__init__`` so that its TypeError for an unknown argument name suggests the right name."""

    @functools.wraps(call)
    def hinted(*args: Any, **given: Any) -> Any:
        try:
            return call(*args, **given)
        except TypeError as error:
            known = [name for name in inspect.signature(call).parameters if name != "self"]
            unknown = next((name for name in given if name not in known), None)
            if unknown is None or f"'{unknown}'" not in str(error):
                raise
            near = difflib.get_close_matches(unknown, known, 1, 0.75)
            fix = _FOREIGN.get(unknown) or (f"{near[0]}= for {unknown}=" if near else f"one of {', '.join(known)}")
            other = fix.partition("=")[0]
            if other.isidentifier() and other not in known:
                fix = f"leave it out; elsewhere it is {fix}"
            raise TypeError(f"{str(error).partition('. Did you')[0]}. Fix: {fix}.") from None

    return hinted


def add_hints(names: Mapping[str, Any]) -> None:
    """Apply :func:`with_hints` to the ``__init__`` of every torch module among the values of ``names``."""
    for kind in names.values():
        if isinstance(kind, type) and issubclass(kind, nn.Module) and not hasattr(kind.__init__, "__wrapped__"):
            kind.__init__ = with_hints(kind.__init__)  # type: ignore[method-assign]


def warn_if_swapped(data: Any) -> None:
    """Warn if an array (batch, channels, T) has fewer time points T than channels: two axes may be swapped."""
    if getattr(data, "ndim", 0) == 3 and data.shape[2] < data.shape[1]:
        warnings.warn(
            f"X must be (batch, channels, T), got {tuple(data.shape)}: {data.shape[1]} channels of {data.shape[2]} "
            "samples. Fix: X.swapaxes(1, 2) for an array (batch, T, channels); list(X), if the order is right.",
            stacklevel=level_of_user(),
        )


def level_of_user() -> int:
    """Return the ``stacklevel`` for warnings.warn that points to the first caller outside hbnode and scikit-learn."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in ("hbnode", "sklearn", "contextlib"):
        frame, level = frame.f_back, level + 1
    return level


def diagnose_call(error: Exception, field: object) -> None:
    """Raise TypeError with a fix if ``error`` occurred because ``field`` cannot be called as ``field(t, state)``."""
    name = getattr(field, "__name__", type(field).__name__)
    if hasattr(field, "t_span"):
        raise TypeError(f"{name} is a block, which solves its field. Fix: block.field, or block(x, t).") from error
    if not isinstance(error, TypeError):
        return
    if isinstance(field, type):
        raise TypeError(f"the field must be an object, got the class {name}. Fix: {name}(net), or {name}().") from error
    signature = _signature(field)
    taken = [] if signature is None else required_arguments(signature)
    if len(taken) == 1:
        fix = "hbnode.NODE(f) for h' = f(h), hbnode.HBNODE(f) for a heavy ball, or lambda t, h: f(h)"
        raise TypeError(f"the field is called (t, state), but {name} takes ({taken[0]}). Fix: {fix}.") from error


_SCIPY = {"lsoda": "LSODA", "radau": "Radau", "bdf": "BDF"}
_SYNONYMS = {  # names used by SciPy, MATLAB, torchdyn, torchode and diffrax, with hbnode's names
    **dict.fromkeys(("rk45", "ode45", "dopri", "dormandprince"), "dopri5"),
    **dict.fromkeys(("dop853", "dormandprince8"), "dopri8"),
    **dict.fromkeys(("rk23", "ode23"), "bosh3"),
    **dict.fromkeys(("tsitouras", "tsitouras45"), "tsit5"),
    **dict.fromkeys(("verlet", "stormerverlet", "alf", "asynchronousleapfrog"), "leapfrog"),
    **{"heun": "heun2", "rkn": "nystrom8", "scipy": "scipy_solver"},
    **dict.fromkeys(_SCIPY, "scipy_solver"),
    # gradients
    **dict.fromkeys(("autograd", "autodiff", "backprop", "backpropagation", "autodiffadjoint"), "direct"),
    **dict.fromkeys(("aca", "recompute", "recursivecheckpointadjoint"), "checkpoint"),
    **dict.fromkeys(("backsolve", "backsolveadjoint", "continuous", "interpolatedadjoint"), "adjoint"),
    **dict.fromkeys(("invertible", "symplectic"), "reversible"),
    # update rules of recurrent layers
    **dict.fromkeys(("nesterov", "nesterovs", "nesterovmomentum"), "nag"),
    **dict.fromkeys(("sr", "srnag", "scheduledrestart"), "restart"),
    **dict.fromkeys(("heavyball", "sgd", "polyak"), "momentum"),
    "adaptivemomentum": "adaptive",
    # values of the argument save
    **dict.fromkeys(("land", "onto", "stepto"), "exact"),
    **dict.fromkeys(("dense", "linear", "spline"), "interpolate"),
}
_OF_SDEINT = ("ubu", "baoab", "srk", "milstein", "euler_heun", "log_ode", "reversible_heun")


def nearest(name: object, names: Sequence[str]) -> str | None:
    """Return the entry of ``names`` that is a synonym of ``name`` or is spelled similarly, or None."""
    plain = "".join(filter(str.isalnum, str(name).lower()))
    if _SYNONYMS.get(plain) in names:
        return _SYNONYMS[plain]
    return next(iter(difflib.get_close_matches(plain, names, 1)), None)


def nearest_method(name: object, methods: Sequence[str]) -> str:
    """Return Python code with the known method most similar to an unknown ``name``, for error messages."""
    if is_one_of(name, _OF_SDEINT):
        return f"hbnode.sdeint(sde, y0, t, method={name!r}, dt=...) for a HeavyBallSDE; else method=None"
    solver = _SCIPY.get(str(name).lower())
    if solver is not None:
        return f"method='scipy_solver' with options={{'solver': {solver!r}}} and gradient='adjoint'"
    near = nearest(name, methods)
    return f"method={near!r}, or method=None for the default" if near else "method=None for the default"
