"""``compile=True``: an attempted step with the norm of its error, or a whole grid, as one graph of torch.compile.

What is compiled belongs to the field, which keeps it. Evaluations are counted outside of the graphs.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hbnode.fields import Field
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
        """The value; None if it cannot be compiled."""
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
    """Say that a solve runs without compilation."""
    warnings.warn(
        f"compile=True has no effect: {reason}. Fix: mend what torch.compile cannot trace in func, or leave compile "
        "out.",
        CompilationWarning,
        stacklevel=2,
    )


def program(term: ODETerm, key: tuple[Any, ...], make: Callable[[], Callable[..., Any]]) -> Program:
    """The program of a field under a key, made when it is first asked for."""
    field = term.inner
    if not isinstance(field, Field):
        raise ValueError(f"compile=True needs an hbnode field, got {type(field).__name__}. Fix: hbnode.NODE(func).")
    modes = tuple([module.training for module in field.modules()])
    key = (*key, modes, term.template.device.type, term.autocast, torch.is_grad_enabled())
    if key not in field.compiled:
        field.compiled[key] = Program(make(), term.template.device.type)
    return field.compiled[key]


def attempt(term: ODETerm, method: Method, rtol: float, atol: float, *, error: bool) -> Callable[..., Any]:
    """A function that takes a step: (state, coefficients, times, y0) to the state after it and the norm of its error.

    Of y0 only the shapes count. Without ``error`` there is no norm.
    """
    evaluate, n, lanes = bare(term), term.rows, term.lanes is not None

    def step(
        state: tuple[Tensor, ...], packed: tuple[Tensor, ...], times: list[Tensor], y0: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        result = method.step(state, packed, times, lambda t, row: evaluate(t, row, y0), error=error)
        if result.error is None:
            return result.state, None
        scale = torch.maximum(torch.stack(state[:n]).abs(), torch.stack(result.state[:n]).abs()).detach()
        ratio = result.error.detach() / (scale * rtol + atol)
        if lanes:
            return result.state, ratio.movedim(1, 0).flatten(1).double().square().mean(1).sqrt()
        return result.state, ratio.square().mean().sqrt()

    return step


def bare(term: ODETerm) -> Callable[[Tensor, Tensor, Any], Tensor]:
    """The value of a term at a row, given a state of its shapes, without anything that belongs to one solve."""
    field, second_order, autocast, lanes = term.inner, term.second_order, term.autocast, term.lanes

    def value(t: Tensor, row: Tensor, y0: Any) -> Tensor:
        if second_order:
            f = field.force(t, row.view(y0[0].shape))
        elif isinstance(y0, Tensor):
            f = field(t, row.view(y0.shape))
        else:
            state: list[Tensor] = []
            begin = 0
            for part in y0:
                size = part.numel() if lanes is None else math.prod(part.shape[1:])
                state.append(row.narrow(-1, begin, size).reshape(part.shape))
                begin += size
            found = field(t, tuple(state))
            f = torch.cat([x.reshape(-1) if lanes is None else x.unsqueeze(-1).flatten(1) for x in found], -1)
        return f.to(row.dtype).reshape(row.shape)

    if autocast is None:
        return value

    def in_autocast(t: Tensor, row: Tensor, y0: Any) -> Tensor:
        with torch.autocast(autocast[0], dtype=autocast[1], cache_enabled=False):
            return value(t, row, y0)

    return in_autocast
