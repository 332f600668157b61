"""The functions that torch.compile compiles for solves with ``compile=True``.

A program is one compiled function. It computes a whole solve if there are few fixed steps, otherwise one step, with
its error norm if steps are adaptive. Each field stores its programs. NFE are counted outside the compiled graphs.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hbnode._torch import is_recompile_limit, recompile_limit
from hbnode.fields import Field
from hbnode.nfe import NFE, Tally
from hbnode.solve.methods import Method
from hbnode.solve.term import ODETerm

GRAPHS = 64  # of one program; dynamo's own limit of 8 is met by states of other dimensions and frozen parameters


class CompilationWarning(UserWarning):
    """A warning that torch.compile failed and that the solve runs without compilation."""


class Program:
    """A function compiled to one graph for each kind of arguments; it returns None for those that were not compiled.

    It warns once if compilation fails, and then always returns None, or if there are ``GRAPHS`` graphs.
    """

    def __init__(self, function: Callable[..., Any], device_type: str) -> None:
        code = function.__code__.replace()  # a copy, because dynamo limits the graphs per code object
        own = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        options: dict[str, Any] = {"guard_filter_fn": _needed_guards}
        if device_type == "cpu":
            options["cpp_wrapper"] = True  # steps on the CPU are short, so the calls of kernels are compiled, too
        self.run = torch.compile(own, fullgraph=True, options=options)
        self.failed = self.is_full = False

    def __call__(self, *args: Any) -> Any:
        if self.failed:
            return None
        try:
            with warnings.catch_warnings():
                # dynamo reads .grad of every input
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                try:
                    return self.run(*args)
                except Exception as error:
                    if not is_recompile_limit(error):
                        raise
                with recompile_limit(GRAPHS):  # only now, because a change of the limit takes longer than a step
                    return self.run(*args)
        except Exception as error:  # the solve runs without compilation
            if not is_recompile_limit(error):
                self.failed = True
                warn(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            elif not self.is_full:
                self.is_full = True
                warn(
                    f"{GRAPHS} graphs of this field exist, and other arguments run without compilation",
                    "as few numbers of dimensions, frozen parameters and Python values in func as possible",
                )
            return None


def _needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Return which guards of a graph are checked in each call: not those of hbnode's and torch's own constants."""
    ours = ("method", "G['__builtins", "G['__import_hbnode", "G['__import_torch")
    return [not g.name.startswith(ours) and not (g.is_global and "G['__import" not in g.name) for g in guards]


def warn(reason: str, fix: str = "compile=False, or replace in func what torch.compile cannot trace") -> None:
    warnings.warn(f"compile=True has no effect: {reason}. Fix: {fix}.", CompilationWarning, stacklevel=2)


def program(term: ODETerm, key: tuple[Any, ...], make: Callable[[], Callable[..., Any]]) -> Program:
    """Return the compiled program of a field for a key, and create it with ``make`` at the first call."""
    programs = store(term)
    modes = tuple([module.training for module in term.inner.modules()])
    key = (*key, modes, term.template.device.type, term.autocast, torch.is_grad_enabled())
    if key not in programs:
        programs[key] = Program(make(), term.template.device.type)
    return programs[key]


def store(term: ODETerm) -> dict[Any, Any]:
    """Return the programs of a field, and what is known of them."""
    if not isinstance(term.inner, Field):
        kind = type(term.inner).__name__
        raise ValueError(f"compile=True needs an hbnode field, got {kind}. Fix: hbnode.NODE(func).")
    return term.inner.compiled


def attempt(term: ODETerm, method: Method, rtol: float, atol: float, *, error: bool) -> Callable[..., Any]:
    """Return a function that computes one step of a method and its error norm.

    The function takes the state, the method's coefficients, the stage times, and y0, of which only the shapes matter.
    It returns the state after the step, and the norm if ``error`` is true, else None.
    """
    field, second_order, n, own_steps = term.inner, term.second_order, term.rows, term.lanes is not None
    in_autocast = term.in_autocast

    def step(
        state: tuple[Tensor, ...], packed: tuple[Tensor, ...], times: list[Tensor], y0: Any
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        lanes = len(y0 if isinstance(y0, Tensor) else y0[0]) if own_steps else None
        evaluate = ODETerm(field, y0, Tally(uncounted, NFE()), second_order=second_order, lanes=lanes)
        evaluate.in_autocast = in_autocast  # autocast is disabled outside the field
        result = method.step(state, packed, times, evaluate, error=error)
        if result.error is None:
            return result.state, None
        scale = torch.maximum(torch.stack(state[:n]).abs(), torch.stack(result.state[:n]).abs()).detach()
        ratio = result.error.detach() / (scale * rtol + atol)
        if own_steps:
            return result.state, ratio.movedim(1, 0).flatten(1).double().square().mean(1).sqrt()
        return result.state, ratio.double().square().mean().sqrt()

    return step


def uncounted() -> None:
    """Serve as the field of a Tally inside a program, whose evaluations are counted outside its graph."""
