"""Drop-in replacement for torchdiffeq: only the import changes, to ``import hbnode.torchdiffeq as torchdiffeq``.

The functions have torchdiffeq's signatures and defaults. For torchdiffeq's methods they call the installed torchdiffeq,
so that values, warnings and exceptions are the same. In addition, ``method`` may name a native method of hbnode that
the installed torchdiffeq does not have, and :func:`hbnode.count_nfe` counts the evaluations of all methods.

All other names of this module, such as ``__version__`` and ``_impl``, are taken from torchdiffeq. Evaluations by these
other functions are not counted.

To use this module in a program that cannot be edited, run ``sys.modules["torchdiffeq"] = hbnode.torchdiffeq`` before
its imports, or set ``torchdiffeq.odeint = hbnode.torchdiffeq.odeint``.

Reference:
    Chen, torchdiffeq, github.com/rtqichen/torchdiffeq.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hbnode._checks import check_callable
from hbnode._tree import State
from hbnode.nfe import NFE, Tally, open_counters, open_records
from hbnode.solve.methods import METHODS
from hbnode.solve.odeint import odeint as solve_natively
from hbnode.solve.torchdiffeq_methods import CALLBACKS, count_step, original, solver_of, step_events

__all__ = ["odeint", "odeint_adjoint", "odeint_event", "odeint_dense"]

Function = Callable[..., Any]
Tolerance = float | Tensor | Sequence[float | Tensor]

ARGUMENTS = ("steps", "per_sample", "save", "jump_times", "max_steps", "compile", "gradient")  # of hbnode.odeint
RENAMED = {"jump_t": "jump_times", "max_num_steps": "max_steps"}  # torchdiffeq's options, and arguments of odeint
ORIGINAL = original()


def odeint(
    func: Function, y0: State, t: Tensor, *, rtol: Tolerance = 1e-7, atol: Tolerance = 1e-9, method: str | None = None,
    options: dict[str, Any] | None = None, event_fn: Function | None = None,
) -> Any:  # fmt: skip
    r"""Solve :math:`y' = \mathrm{func}(t, y),\; y(t_0) = y_0` as ``torchdiffeq.odeint`` does.

    :func:`hbnode.count_nfe` counts the evaluations. Gradients are computed by backpropagation through the solver, also
    with a native method (``gradient="direct"`` of :func:`hbnode.odeint`).

    Arguments:
        func: the right-hand side, called as ``func(t, y)``. Methods that support callbacks call its attributes
            ``callback_step``, ``callback_accept_step`` and ``callback_reject_step``.
        y0: state at ``t[0]``: a tensor, also complex or without dimensions, or a tuple of tensors.
        t: times (T,), strictly increasing or strictly decreasing. With ``event_fn``, the start and a second time, which
            only gives the direction of time.
        rtol: relative tolerance: a number, a tensor for the elements of ``y0``, or one entry for each tensor of a tuple
            ``y0``. Native methods take one number. Default: 1e-7.
        atol: absolute tolerance in the units of the state, given like ``rtol``. Default: 1e-9.
        method: the name of a method of torchdiffeq, or of a native method of :func:`hbnode.methods`. A name may belong
            to both, such as ``"tsit5"`` in torchdiffeq releases after 0.2.5. This function then uses torchdiffeq's
            method, and :func:`hbnode.odeint` uses the native method. Default: None, which is ``"dopri5"``.
        options: torchdiffeq's options of the method. A native method takes the options of :func:`hbnode.odeint` and its
            arguments ``steps``, ``per_sample``, ``save``, ``jump_times``, ``max_steps``, ``compile`` and ``gradient``.
            It also takes torchdiffeq's ``jump_t``, ``max_num_steps``, ``step_size`` and ``dtype``. With ``step_size``,
            each output interval is divided into equal steps of at most this size. ``dtype`` has no effect, because
            native methods always keep the time in float64. Default: None.
        event_fn: event function: the solve ends when ``event_fn(t, y)`` changes its sign. Only torchdiffeq's methods
            support it. Default: None.

    Returns:
        The states at the times ``t``, stacked along a new first dimension, in the structure of ``y0``. With
        ``event_fn``, the event's time, which has no gradient, and the states at the start and at the event.

    Raises:
        ValueError: the method is unknown, or a native method does not support an argument.
        Exception: torchdiffeq's methods raise torchdiffeq's exceptions, and native methods those of
            :func:`hbnode.odeint`.

    Example:
        >>> import torch
        >>> import hbnode.torchdiffeq as torchdiffeq
        >>> one, t = torch.ones(1, dtype=torch.float64), torch.tensor([0.0, 1.0])
        >>> [round(torchdiffeq.odeint(lambda t, y: -y, one, t, method=m)[-1].item(), 6) for m in ("dopri5", "tsit5")]
        [0.367879, 0.367879]
    """
    if solver_of("dopri5" if method is None else method) is None:
        return solve_native(func, y0, t, rtol, atol, method, options, "direct", event_fn)
    counted = count(func, t, method or "dopri5", keeps_graph=torch.is_grad_enabled())
    given = {"rtol": rtol, "atol": atol, "method": method, "options": options, "event_fn": event_fn}
    return ORIGINAL.odeint(counted, y0, t, **given)


def odeint_adjoint(
    func: Function, y0: State, t: Tensor, *, rtol: Tolerance = 1e-7, atol: Tolerance = 1e-9, method: str | None = None,
    options: dict[str, Any] | None = None, event_fn: Function | None = None, adjoint_rtol: Tolerance | None = None,
    adjoint_atol: Tolerance | None = None, adjoint_method: str | None = None,
    adjoint_options: dict[str, Any] | None = None, adjoint_params: Iterable[Tensor] | None = None,
) -> Any:  # fmt: skip
    """Solve an ODE as :func:`odeint` does, with gradients by the adjoint ODE as ``torchdiffeq.odeint_adjoint`` does.

    The memory does not grow with the number of steps. Evaluations of the backward solve are counted as backward.

    Arguments:
        func: the right-hand side as for :func:`odeint`. It must be a module unless ``adjoint_params`` is given or the
            method is native. The backward solve calls the callbacks with the suffix ``_adjoint``, such as
            ``callback_step_adjoint``.
        y0: state at ``t[0]``, as for :func:`odeint`.
        t: times (T,), as for :func:`odeint`.
        rtol: relative tolerance of the forward solve. Default: 1e-7.
        atol: absolute tolerance of the forward solve. Default: 1e-9.
        method: name of the method, as for :func:`odeint`. With a native method, hbnode solves the adjoint ODE with
            ``"tsit5"`` at the tolerances of the forward solve. Default: None, which is ``"dopri5"``.
        options: options of the method, as for :func:`odeint`. Default: None.
        event_fn: event function, as for :func:`odeint`. Default: None.
        adjoint_rtol: relative tolerance of the backward solve; with a native method it must be ``rtol``. Default: None,
            which is ``rtol``.
        adjoint_atol: absolute tolerance of the backward solve; with a native method it must be ``atol``. Default: None,
            which is ``atol``.
        adjoint_method: method of torchdiffeq for the backward solve. If ``method`` is native, it must be ``method`` or
            ``"tsit5"``. Default: None, which is ``method``.
        adjoint_options: options of the backward solve; ``{"norm": "seminorm"}`` excludes the parameters from the error
            norm, as native methods always do. With a native method, the other options must equal those in ``options``.
            Default: None, which uses ``options`` without the norm.
        adjoint_params: tensors that get gradients. With a native method, this argument has no effect: all parameters
            and leaf tensors that ``func`` uses get gradients. Default: None, the parameters of ``func``.

    Returns:
        The result of :func:`odeint`.

    Raises:
        ValueError: ``func`` is not a module and ``adjoint_params`` is None; ``method`` is ``"rodas5p"``, which has no
            adjoint; or for the same reasons as in :func:`odeint`.

    Example:
        >>> import torch, hbnode
        >>> func = hbnode.NODE(torch.nn.Linear(2, 2))
        >>> with hbnode.count_nfe(func) as nfe:
        ...     y = hbnode.torchdiffeq.odeint_adjoint(func, torch.ones(1, 2), torch.tensor([0.0, 1.0]), method="rk4")
        ...     y.sum().backward()
        >>> nfe.forward, nfe.backward
        (4, 4)
    """
    own = {"adjoint_rtol": adjoint_rtol, "adjoint_atol": adjoint_atol, "adjoint_method": adjoint_method}
    if solver_of("dopri5" if method is None else method) is None:
        if method in METHODS and "adjoint" not in METHODS[method].gradients:
            fix = f"odeint(func, y0, t, method={method!r}), whose gradients are exact"
            raise ValueError(f"method={method!r} has no adjoint: what decays forwards grows backwards. Fix: {fix}.")
        usual = ((None, rtol), (None, atol), (None, method, "tsit5"))
        given = [name for (name, value), same in zip(own.items(), usual, strict=True) if not is_any_of(value, same)]
        implied = {"norm": "seminorm", **(options or {})}
        given += [name for name, value in (adjoint_options or {}).items() if not is_any_of(value, [implied.get(name)])]
        if given:
            fault = f"{', '.join(given)} cannot be chosen for method={method!r}"
            raise ValueError(f"{fault}, whose adjoint has the settings of the forward solve. Fix: leave them out.")
        return solve_native(func, y0, t, rtol, atol, method, options, "adjoint", event_fn)
    if adjoint_params is not None or isinstance(func, nn.Module):  # torchdiffeq raises an error for other functions
        adjoint_params = ORIGINAL._impl.adjoint.find_parameters(func) if adjoint_params is None else adjoint_params
        methods = (method or "dopri5", adjoint_method or method or "dopri5")
        func = count(func, t, *methods, in_backward=torch.is_grad_enabled())
    return ORIGINAL.odeint_adjoint(
        func, y0, t, rtol=rtol, atol=atol, method=method, options=options, event_fn=event_fn, **own,
        adjoint_options=adjoint_options, adjoint_params=adjoint_params,
    )  # fmt: skip


def odeint_dense(
    func: Function, y0: Tensor, t0: Tensor, t1: Tensor, *, rtol: Tolerance = 1e-7, atol: Tolerance = 1e-9,
    method: str | None = None, options: dict[str, Any] | None = None,
) -> Callable[[Tensor], Tensor]:  # fmt: skip
    """Return the solution from ``t0`` to ``t1`` as a function of time, as ``torchdiffeq.odeint_dense`` does.

    Arguments:
        func: the right-hand side, called as ``func(t, y)``.
        y0: state at ``t0``, a tensor.
        t0: start, a scalar tensor.
        t1: end, a scalar tensor.
        rtol: relative tolerance. Default: 1e-7.
        atol: absolute tolerance. Default: 1e-9.
        method: ``"dopri5"``, the only method that this function supports. Default: None, which is ``"dopri5"``.
        options: options of ``"dopri5"``. Default: None.

    Returns:
        A function that maps a scalar tensor, a time in [t0, t1), to the state at this time.

    Example:
        >>> import torch, hbnode
        >>> one, start, end = torch.ones(1, dtype=torch.float64), torch.tensor(0.0), torch.tensor(1.0)
        >>> y = hbnode.torchdiffeq.odeint_dense(lambda t, y: -y, one, start, end)
        >>> round(y(torch.tensor(0.5)).item(), 6)
        0.606531
    """
    counted = count(func, method="dopri5", keeps_graph=torch.is_grad_enabled())
    return ORIGINAL.odeint_dense(counted, y0, t0, t1, rtol=rtol, atol=atol, method=method, options=options)


def odeint_event(
    func: Function, y0: State, t0: Tensor, *, event_fn: Function, reverse_time: bool = False,
    odeint_interface: Callable[..., Any] = odeint, **kwargs: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    r"""Solve until an event with a differentiable event time, as ``torchdiffeq.odeint_event`` does.

    The gradient of the event's time τ follows from :math:`\mathrm{event}(τ, y(τ)) = 0` (implicit function theorem).
    Parameters of ``event_fn`` get a gradient only if they are part of the state.

    Arguments:
        func: the right-hand side, called as ``func(t, y)``.
        y0: state at ``t0``, a tensor or a tuple of tensors.
        t0: start, a scalar tensor.
        event_fn: event function: the solve ends when ``event_fn(t, y)`` changes its sign.
        reverse_time: whether the time decreases. Default: False.
        odeint_interface: function that solves until the event: :func:`odeint`, :func:`odeint_adjoint` or another of
            their signature. Default: odeint.
        kwargs: arguments of ``odeint_interface``, such as ``rtol``, ``atol`` and ``method``.

    Returns:
        The event's time, and the states at the start and at the event.

    Example:
        A ball falls from the height 5 with the acceleration 10, and lands after 1. The derivative of this time with
        respect to the height is 1/10.

        >>> import torch
        >>> import hbnode.torchdiffeq as torchdiffeq
        >>> fall = lambda t, y: (y[1], torch.full_like(y[1], -10.0))
        >>> height, speed = torch.tensor([5.0], dtype=torch.float64, requires_grad=True), torch.zeros(1).double()
        >>> land, _ = torchdiffeq.odeint_event(fall, (height, speed), torch.tensor(0.0), event_fn=lambda t, y: y[0])
        >>> round(land.item(), 6), round(torch.autograd.grad(land, height)[0].item(), 6)
        (1.0, 0.1)
    """

    def interface(_: object, *args: Any, **kwargs: Any) -> Any:  # odeint_interface counts its evaluations itself
        return odeint_interface(func, *args, **kwargs)

    counted = count(func, in_backward=torch.is_grad_enabled())  # the gradient of the event's time evaluates func
    given = {"event_fn": event_fn, "reverse_time": reverse_time, "odeint_interface": interface}
    return ORIGINAL.odeint_event(counted, y0, t0, **given, **kwargs)


def __getattr__(name: str) -> Any:
    if (name.startswith("__") and name != "__version__") or not hasattr(ORIGINAL, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(ORIGINAL, name)


def solve_native(
    func: Function, y0: State, t: Tensor, rtol: Any, atol: Any, method: Any, options: dict[str, Any] | None,
    gradient: str, event_fn: Function | None,
) -> State:  # fmt: skip
    """Solve with a native method by :func:`hbnode.odeint`.

    Entries of torchdiffeq's ``options`` that are arguments of this function, such as ``steps``, are passed as
    arguments.
    """
    if event_fn is not None:
        fix = "method='dopri5', or hbnode.odeint(..., events=hbnode.Event(fn))"
        raise ValueError(f"event_fn is for torchdiffeq's methods, got method={method!r}. Fix: {fix}.")
    arguments: dict[str, Any] = {"gradient": gradient, "rtol": rtol, "atol": atol}
    for name in ("rtol", "atol"):
        if isinstance(value := arguments[name], Tensor) and value.numel() == 1:
            arguments[name] = value.item()
        elif isinstance(value, (Tensor, Sequence)):
            raise ValueError(f"{name} must be one number for method={method!r}, got {value!r}. Fix: {name}=1e-7.")
    given = {name: x for name, x in (options or {}).items() if x is not None and name != "dtype"}  # dtype of the times
    others: Any = {name: x.item() if isinstance(x, Tensor) and not x.dim() else x for name, x in given.items()}
    if (size := others.pop("step_size", None)) is not None:
        if not isinstance(size, numbers.Real) or not float(size) > 0:
            raise ValueError(f"step_size must be a positive number, got {size!r}. Fix: options={{'step_size': 0.1}}.")
        gaps = torch.as_tensor(t).detach().diff().abs().flatten().tolist()
        needed = max(gaps, default=0.0) / float(size) * (1 - 1e-6)  # tolerate rounding errors
        arguments["steps"] = max(1, math.ceil(needed))
    for name in [*others]:
        if (renamed := RENAMED.get(name, name)) in ARGUMENTS:
            arguments[renamed] = others.pop(name)
    needs_steps = method in METHODS and METHODS[method].needs_fixed_steps
    if "grid_constructor" in others or (needs_steps and "steps" not in arguments):
        fix = "options={'step_size': 0.1}, or options={'steps': 8} for the number of steps per interval of t"
        raise ValueError(f"method={method!r} has equal steps, whose size must be given. Fix: {fix}.")
    return solve_natively(func, y0, t, method=method, options=others or None, **arguments)


def is_any_of(value: Any, others: Sequence[Any]) -> bool:
    """Return whether ``value``, which may be a tensor, equals one of the entries of ``others``."""
    return any(value is other or np.array_equal(value, other) for other in others)


def count(func: Function, *args: Any, in_backward: bool = False, **kwargs: Any) -> Function:
    """Return ``func`` wrapped in a :class:`CountedFunction`, or ``func`` itself if nothing counts its evaluations.

    With ``in_backward`` the backward pass evaluates ``func`` too. Then ``func`` is wrapped even if nothing counts yet,
    because counting may start before the backward pass. Other arguments are those of :class:`CountedFunction`.
    """
    check_callable(func, "func", "a module or a function, called as func(t, y)")
    if not open_counters and (torch.compiler.is_dynamo_compiling() or not (open_records or in_backward)):
        return func
    return CountedFunction(func, *args, **kwargs)


class CountedFunction:
    """A callable (t, y) that calls ``func`` and counts the evaluations and the steps of one solve by torchdiffeq.

    Steps are counted in torchdiffeq's callbacks. These also call the callbacks of ``func``, if it has any.
    """

    def __init__(
        self, func: Function, t: Tensor | None = None, method: str | None = None, adjoint_method: str | None = None,
        keeps_graph: bool = False,
    ) -> None:  # fmt: skip
        nfe = NFE()
        nfe.keeps_graph = keeps_graph
        self.func, self.counter = func, Tally(func, nfe)
        for name, suffix, times in ((method, "", None), (adjoint_method, "_adjoint", t)):
            events = step_events(name)
            for callback in CALLBACKS:
                own = getattr(func, callback + suffix, None)
                if callback in events:
                    own = functools.partial(call_back, self.counter, events[callback], own, times)
                if own is not None:
                    setattr(self, callback + suffix, own)

    def __call__(self, t: Tensor, y: State) -> Tensor:
        if open_counters:
            self.counter.add("evaluation")
        return self.func(t, y)


def call_back(
    counter: Tally, event: str, own: Function | None, times: Tensor | None, t0: Tensor, y0: State, dt: Tensor
) -> None:
    """Count a step of size ``dt`` from the time ``t0``, then call ``own``, the user's callback, if it is not None.

    ``event`` is ``"accepted"`` or ``"rejected"``.
    """
    if open_counters or open_records:
        # torchdiffeq's adjoint negates decreasing times
        is_mirrored = open_records and times is not None and bool(times[0] > times[-1])
        count_step(counter, event, -t0 if is_mirrored else t0, dt)
    if own is not None:
        own(t0, y0, dt)
