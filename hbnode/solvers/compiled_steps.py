"""``compile=True``: steps of a native method, and their gradients, compiled whole by torch.compile.

What is compiled closes over the field alone and is kept with it, so that it is made once. Evaluations are counted
outside. A fixed grid is compiled as one piece for each output interval, as long as that is not too long a program.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hbnode._structure import structure_of
from hbnode.fields import Field
from hbnode.solvers.ode_term import ODETerm
from hbnode.solvers.step_method import StepMethod, StepResult

LONGEST_GRID = 64  # evaluations of the field in one program


class CompilationWarning(UserWarning):
    """torch.compile could not compile a step, which is taken without it."""


class CompiledSteps:
    """The compiled steps of a method for a field."""

    def __init__(self, term: ODETerm, method: StepMethod) -> None:
        self.method = method
        self.evaluation = _Evaluation(term)
        self.activation = term.activation
        self.failed = False
        self.device_type = term.template.device.type
        self.programs: dict[tuple, Callable] = {}

    @staticmethod
    def of(term: ODETerm, name: str, method: StepMethod) -> Programs | None:
        """The programs of a solve, from the field's own compiled steps; None if there can be none."""
        if not isinstance(term.inner, Field):
            raise ValueError(
                f"compile=True needs an hbnode field, got {type(term.inner).__name__}. Fix: hbnode.NODE(func)."
            )
        if term.strung:
            message = "compile=True has no effect: the parts of the state differ in shape. Fix: make them of one shape."
            warnings.warn(message, CompilationWarning, stacklevel=2)
            return None
        kind = term.template.device.type
        autocast = torch.get_autocast_dtype(kind) if term.autocast is not nullcontext else None
        key = (name, term.stacked, kind, autocast)
        kept = term.inner.compiled
        if key not in kept or kept[key].activation is not term.activation:
            kept[key] = CompiledSteps(term, method)
        return None if kept[key].failed else Programs(kept[key])

    def _step(self, error: bool) -> Callable:
        method, evaluation, activation = self.method, self.evaluation, self.activation

        def step(point: Tensor, matrix: Tensor, times: Tensor) -> StepResult:
            coefficients = method.pack(matrix, error=error)
            stepped = method.step(point, coefficients, times.unbind(0), evaluation, error=error, activation=activation)
            return StepResult(stepped.point, stepped.error, stepped.columns)

        return step

    def _grid(self, steps: int) -> Callable:
        step = self._step(False)

        def grid(point: Tensor, matrix: Tensor, times: list[Tensor]) -> list[Tensor]:
            points = [point]
            for i in range(steps):
                points.append(step(points[-1], matrix, times[i]).point)
            return points

        return grid

    def _end(self, steps: int) -> Callable:
        grid = self._grid(steps)

        def end(point: Tensor, matrix: Tensor, times: list[Tensor]) -> Tensor:
            return grid(point, matrix, times)[-1]

        return end

    def _solve(self, steps: int) -> Callable:
        method, evaluation, activation = self.method, self.evaluation, self.activation

        def solve(state: list[Tensor], start: Tensor, matrix: Tensor, times: list[Tensor]) -> list[Tensor]:
            point = torch.stack([*state, evaluation(start, state[0])] if method.carries else state)
            coefficients, rows = method.pack(matrix, error=False), tuple(state)
            for i in range(steps):
                stepped = method.step(
                    point, coefficients, times[i].unbind(0), evaluation, error=False, activation=activation
                )
                point, rows = stepped.point, stepped.state(method.state_rows)
            return [row.clone() for row in rows]  # not views, which would be made anew outside

        return solve

    def _pull(self, by_matrix: bool, by_times: bool) -> Callable:
        method, evaluation, activation = self.method, self.evaluation, self.activation

        def pull(
            point: Tensor, matrix: Tensor, times: Tensor, parameters: dict[str, Tensor], cotangent: Tensor
        ) -> tuple[Tensor, Tensor | None, Tensor | None, dict[str, Tensor]]:
            def step(point: Tensor, matrix: Tensor, times: Tensor, parameters: dict) -> Tensor:
                def evaluate(t: Tensor, x: Tensor) -> Tensor:
                    return torch.func.functional_call(evaluation, parameters, (t, x))

                coefficients = method.pack(matrix, error=False)
                return method.step(
                    point, coefficients, times.unbind(0), evaluate, error=False, activation=activation
                ).point

            vjp: Callable[..., Any] = torch.func.vjp
            if by_times:
                return vjp(step, point, matrix, times, parameters)[1](cotangent)
            if by_matrix:
                _, back = vjp(lambda a, b, c: step(a, b, times, c), point, matrix, parameters)
                by_point, by_matrix_, by_parameter = back(cotangent)
                return by_point, by_matrix_, None, by_parameter
            _, back = vjp(lambda a, c: step(a, matrix, times, c), point, parameters)
            by_point, by_parameter = back(cotangent)
            return by_point, None, None, by_parameter

        return pull

    def _pull_grid(self, by_matrix: bool, by_times: bool, steps: int) -> Callable:
        pull = self._pull(by_matrix, by_times)

        def pull_grid(
            points: list[Tensor], matrix: Tensor, times: list[Tensor], parameters: dict[str, Tensor], cotangent: Tensor
        ) -> tuple[Tensor, Tensor | None, list[Tensor | None], dict[str, Tensor]]:
            cotangent, total, last, by_parameter = pull(points[-1], matrix, times[-1], parameters, cotangent)
            by_time = [last]
            for i in reversed(range(steps - 1)):
                cotangent, more, of_step, by_parameter_too = pull(points[i], matrix, times[i], parameters, cotangent)
                by_time.append(of_step)
                total = None if total is None else total + more
                by_parameter = {name: g + by_parameter_too[name] for name, g in by_parameter.items()}
            return cotangent, total, by_time[::-1], by_parameter

        return pull_grid


class Programs:
    """Compiled steps as one solve uses them, in its backward pass too: with the parameters and modes of its start."""

    def __init__(self, steps: CompiledSteps) -> None:
        self.steps = steps
        field = steps.evaluation.field
        structure = structure_of(field)
        self.parameters = {f"field.{name}": p for name, p in field.named_parameters() if p.requires_grad}
        self.modes = tuple([module.training for module in structure.modules])

    def run(self, kind: str, flags: tuple, *args: Any) -> Any:
        """Run a program; None if it cannot be compiled."""
        steps, key = self.steps, (kind, flags, self.modes, tuple(self.parameters))
        try:
            if key not in steps.programs:
                steps.programs[key] = _compile(getattr(steps, f"_{kind}")(*flags), steps.device_type)
            if not torch.is_grad_enabled():
                return steps.programs[key](*args)
            with warnings.catch_warnings():  # dynamo looks at the .grad of every input, which autograd warns of
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                return steps.programs[key](*args)
        except Exception as error:  # whatever it is, the step can be taken without
            steps.failed = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            warnings.warn(
                f"compile=True has no effect: {type(error).__name__}: {reason}. Fix: mend what torch.compile cannot "
                "trace in func, or leave compile out.",
                CompilationWarning,
                stacklevel=2,
            )
            return None


class _Evaluation(nn.Module):
    """The field as the compiled programs call it, without anything that belongs to one solve."""

    def __init__(self, term: ODETerm) -> None:
        super().__init__()
        self.field: Any = term.inner
        self.second_order = term.second_order
        self.stacked = term.stacked
        self.autocast = None
        if term.autocast is not nullcontext:
            kind = term.template.device.type
            self.autocast = (kind, torch.get_autocast_dtype(kind))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        """The force on h, or the derivative of a row."""
        if self.autocast is None:
            return self.bare(t, x)
        with torch.autocast(self.autocast[0], dtype=self.autocast[1], cache_enabled=False):
            return self.bare(t, x)

    def bare(self, t: Tensor, x: Tensor) -> Tensor:
        """:meth:`forward` under the autocast in force."""
        if self.second_order:
            return self.field.force(t, x).to(x.dtype)
        if self.stacked:
            return torch.stack([part.to(x.dtype) for part in self.field(t, x.unbind(0))])
        return self.field(t, x).to(x.dtype)


def _compile(function: Callable, device_type: str) -> Callable:
    """Compiled in one graph; with code of its own, because dynamo limits the variants that one code may have.

    On the CPU, where a step is short, the calls inside of the program are compiled as well.
    """
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    return torch.compile(own, fullgraph=True, options={"cpp_wrapper": True} if device_type == "cpu" else None)
