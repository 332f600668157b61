"""``compile=True``: an attempted step with the norm of its error, or a whole grid, as one graph of torch.compile.

What is compiled belongs to the field, which keeps it. Evaluations are counted outside of the graphs.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hbnode.fields import Field
from hbnode.nfe import NFE, Tally
from hbnode.solve.methods import Method
from hbnode.solve.term import ODETerm


class CompilationWarning(UserWarning):
    """torch.compile could not compile a step, which is taken without it."""


class Program:
    """A function that is compiled in one graph; once that has failed, it warns and is not tried again."""

    def __init__(self, function: Callable[..., Any], device_type: str) -> None:
        code = function.__code__.replace()  # of its own, because dynamo limits the variants that one code may have
        own = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        # on the CPU, where a step is short, the calls inside of the program are compiled as well
        self.run = torch.compile(own, fullgraph=True, options={"cpp_wrapper": True} if device_type == "cpu" else None)
        self.failed = False

    def __call__(self, *args: Any) -> Any:
        """Return the value; None if it cannot be compiled."""
        if self.failed:
            return None
        try:
            with warnings.catch_warnings():  # dynamo looks at the .grad of every input, which autograd warns of
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                return self.run(*args)
        except Exception as error:  # whatever it is, the step can be taken without
            self.failed = True
            warn(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            return None


def warn(reason: str) -> None:
    warnings.warn(
        f"compile=True has no effect: {reason}. Fix: mend what torch.compile cannot trace in func, or leave compile "
        "out.",
        CompilationWarning,
        stacklevel=2,
    )


def program(term: ODETerm, key: tuple[Any, ...], make: Callable[[], Callable[..., Any]]) -> Program:
    """Return the program of a field under a key, made when it is first asked for."""
    field = term.inner
    if not isinstance(field, Field):
        raise ValueError(f"compile=True needs an hbnode field, got {type(field).__name__}. Fix: hbnode.NODE(func).")
    modes = tuple([module.training for module in field.modules()])
    key = (*key, modes, term.template.device.type, term.autocast, torch.is_grad_enabled())
    if key not in field.compiled:
        field.compiled[key] = Program(make(), term.template.device.type)
    return field.compiled[key]


def attempt(term: ODETerm, method: Method, rtol: float, atol: float, *, error: bool) -> Callable[..., Any]:
    """Return a function that takes a step: (state, coefficients, times, y0) to the state after it and the norm of its
    error.

    Of y0 only the shapes count. Without ``error`` there is no norm.
    """
    field, second_order, n, own_steps = term.inner, term.second_order, term.rows, term.lanes is not None
    in_autocast = term.in_autocast

    def step(
        state: tuple[Tensor, ...], packed: tuple[Tensor, ...], times: list[Tensor], y0: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        lanes = len(y0 if isinstance(y0, Tensor) else y0[0]) if own_steps else None
        evaluate = ODETerm(field, y0, Tally(nobody, NFE()), second_order=second_order, lanes=lanes)
        evaluate.in_autocast = in_autocast  # a solve itself runs without
        result = method.step(state, packed, times, evaluate, error=error)
        if result.error is None:
            return result.state, None
        scale = torch.maximum(torch.stack(state[:n]).abs(), torch.stack(result.state[:n]).abs()).detach()
        ratio = result.error.detach() / (scale * rtol + atol)
        if own_steps:
            return result.state, ratio.movedim(1, 0).flatten(1).double().square().mean(1).sqrt()
        return result.state, ratio.square().mean().sqrt()

    return step


def nobody() -> None:
    """A field that nobody counts: the evaluations of a program are counted outside of its graph."""
