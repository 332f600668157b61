"""``compile=True``: steps of a native method, and their gradients, compiled whole by torch.compile.

What is compiled closes over the field alone and is kept with it, so that it is made once. Evaluations are counted
outside. A fixed grid is compiled as one piece for each output interval, as long as that is not too long a program.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hbnode.fields import Field
from hbnode.solvers.dynamics import Dynamics
from hbnode.solvers.explicit import ExplicitMethod, Stepped
from hbnode.solvers.splitting import Splitting

LONGEST_GRID = 64  # evaluations of the field in one program


class CompilationWarning(UserWarning):
    """torch.compile could not compile a step, which is taken without it."""


class CompiledSteps:
    """The compiled steps of a method for a field."""

    def __init__(self, dynamics: Dynamics, method: ExplicitMethod | Splitting) -> None:
        self.method = method
        self.evaluation = _Evaluation(dynamics)
        self.activation = dynamics.activation
        self.failed = False
        self.programs: dict[tuple, Callable] = {}

    @staticmethod
    def of(dynamics: Dynamics, name: str, method: ExplicitMethod | Splitting) -> CompiledSteps | None:
        """The field's own compiled steps, made at the first call; None if there can be none."""
        if not isinstance(dynamics.inner, Field):
            raise ValueError(
                f"compile=True needs an hbnode field, got {type(dynamics.inner).__name__}. Fix: hbnode.NODE(func)."
            )
        if dynamics.strung:
            return None
        kind = dynamics.template.device.type
        autocast = torch.get_autocast_dtype(kind) if dynamics.autocast is not nullcontext else None
        key = (name, dynamics.stacked, kind, autocast)
        kept = dynamics.inner.compiled
        if key not in kept:
            kept[key] = CompiledSteps(dynamics, method)
        return None if kept[key].failed else kept[key]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The field's parameters that need a gradient, by the names that the gradient's program knows them by."""
        return {name: p for name, p in self.evaluation.named_parameters() if p.requires_grad}

    def run(self, kind: str, flags: tuple, *args: Any) -> Any:
        """Run a program; None if it cannot be compiled."""
        key = (kind, flags)
        try:
            if key not in self.programs:
                self.programs[key] = _compile(getattr(self, f"_{kind}")(*flags))
            return self.programs[key](*args)
        except Exception as error:  # whatever it is, the step can be taken without
            self.failed = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            warnings.warn(
                f"compile=True has no effect: {type(error).__name__}: {reason}. Fix: mend what torch.compile cannot "
                "trace in func, or leave compile out.",
                CompilationWarning,
                stacklevel=2,
            )
            return None

    def _step(self, error: bool) -> Callable:
        method, evaluation, activation = self.method, self.evaluation, self.activation

        def step(point: Tensor, tensors: list[Tensor], times: Sequence[Tensor]) -> Stepped:
            return method.step(
                point, method.from_tensors(tensors), times, evaluation, error=error, activation=activation
            )

        return step

    def _grid(self, steps: int) -> Callable:
        step = self._step(False)

        def grid(point: Tensor, tensors: list[Tensor], times: Sequence[Sequence[Tensor]]) -> list[Tensor]:
            points = [point]
            for i in range(steps):
                points.append(step(points[-1], tensors, times[i]).point)
            return points

        return grid

    def _pull(self, by_tensors: bool, by_times: bool) -> Callable:
        method, evaluation, activation = self.method, self.evaluation, self.activation

        def pull(
            point: Tensor,
            tensors: list[Tensor],
            times: Sequence[Tensor],
            parameters: dict[str, Tensor],
            cotangent: Tensor,
        ) -> tuple[Tensor, list[Tensor], Sequence[Tensor], dict[str, Tensor]]:
            times = list(times)

            def step(point: Tensor, tensors: list, times: list, parameters: dict) -> Tensor:
                def evaluate(t: Tensor, x: Tensor) -> Tensor:
                    return torch.func.functional_call(evaluation, parameters, (t, x))

                coefficients = method.from_tensors(tensors)
                return method.step(point, coefficients, times, evaluate, error=False, activation=activation).point

            if by_times:
                return torch.func.vjp(step, point, tensors, times, parameters)[1](cotangent)
            if by_tensors:
                _, back = torch.func.vjp(lambda a, b, c: step(a, b, times, c), point, tensors, parameters)
                by_point, by_tensor, by_parameter = back(cotangent)
                return by_point, by_tensor, [], by_parameter
            _, back = torch.func.vjp(lambda a, c: step(a, tensors, times, c), point, parameters)
            by_point, by_parameter = back(cotangent)
            return by_point, [], [], by_parameter

        return pull

    def _pull_grid(self, by_tensors: bool, by_times: bool, steps: int) -> Callable:
        pull = self._pull(by_tensors, by_times)

        def pull_grid(
            points: list[Tensor],
            tensors: list[Tensor],
            times: Sequence[Sequence[Tensor]],
            parameters: dict[str, Tensor],
            cotangent: Tensor,
        ) -> tuple[Tensor, list[Tensor], list[Sequence[Tensor]], dict[str, Tensor]]:
            totals: tuple[list, dict] | None = None
            by_time = []
            for i in reversed(range(steps)):
                cotangent, by_tensor, by_times_of_step, by_parameter = pull(
                    points[i], tensors, times[i], parameters, cotangent
                )
                by_time.append(by_times_of_step)
                if totals is not None:
                    by_tensor = [a + b for a, b in zip(totals[0], by_tensor)]  # noqa: B905, dynamo knows no strict
                    by_parameter = {name: totals[1][name] + g for name, g in by_parameter.items()}
                totals = by_tensor, by_parameter
            return cotangent, totals[0], by_time[::-1], totals[1]

        return pull_grid


class _Evaluation(nn.Module):
    """The field as the compiled programs call it, without anything that belongs to one solve."""

    def __init__(self, dynamics: Dynamics) -> None:
        super().__init__()
        self.field = dynamics.inner
        self.second_order = dynamics.second_order
        self.stacked = dynamics.stacked
        self.autocast = None
        if dynamics.autocast is not nullcontext:
            kind = dynamics.template.device.type
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


def _compile(function: Callable) -> Callable:
    """Compiled in one graph; with code of its own, because dynamo limits the variants that one code may have."""
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    return torch.compile(own, fullgraph=True)
