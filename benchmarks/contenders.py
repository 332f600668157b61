"""Training steps on a heavy-ball equation with hbnode and with other libraries, all with the same numbers in them.

A step is: solve from h(0) = x, m(0) = 0 to T, take the mean of h(T)² as loss, and its gradient with respect to every
parameter, the damping included, and to h(0). Calling a step makes one; ``gradient()`` makes one and returns the
gradient as one vector, in the same order for all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
import torchdiffeq
from torch import Tensor, nn

import hbnode
from benchmarks.overhead import Stacked
from benchmarks.problems import Problem

MAX_STEPS = 1_000
MISSING = "{name} is not installed, and the benchmark compares with it. Fix: pip install 'hbnode[bench]'."
Solve = Callable[[hbnode.HBNODE, Tensor, float, float], Tensor]  # (field, x, T, tolerance) -> h(T)


class Step(Protocol):
    """A training step at one tolerance."""

    def __call__(self) -> None:
        """Make the step."""

    def gradient(self) -> Tensor:
        """Make the step and return its gradient, float64."""

    def evaluations(self) -> tuple[int | None, int | None]:
        """Of f, in the forward and in the backward pass, as far as they can be known."""


Maker = Callable[[Problem], Callable[[float], Step]]


class TorchStep:
    """A training step whose solver is one of PyTorch's."""

    def __init__(self, problem: Problem, solve: Solve, tol: float) -> None:
        self.field, self.end, self.solve, self.tol = problem.field, problem.end, solve, tol
        self.x = problem.x.clone().requires_grad_()
        self.leaves = [*self.field.func.parameters(), self.field.omega, self.x]

    def forward(self) -> Tensor:
        """The loss."""
        return self.solve(self.field, self.x, self.end, self.tol).square().mean()

    def __call__(self) -> None:
        """Make the step."""
        for leaf in self.leaves:
            leaf.grad = None
        self.forward().backward()

    def gradient(self) -> Tensor:
        """Make the step and return its gradient."""
        self()
        return torch.cat([leaf.grad.flatten() for leaf in self.leaves]).double()

    def evaluations(self) -> tuple[int | None, int | None]:
        """Calls of f in the forward and in the backward pass."""
        calls: list[None] = []
        hook = self.field.func.register_forward_pre_hook(lambda *_: calls.append(None))
        loss = self.forward()
        forward = len(calls)
        loss.backward()
        hook.remove()
        return forward, len(calls) - forward


def of(solve: Solve) -> Maker:
    """What makes training steps with a solver of PyTorch's."""
    return lambda problem: lambda tol: TorchStep(problem, solve, tol)


def native(method: str, gradient: Any, **options: Any) -> Solve:
    """With one of hbnode's own methods."""

    def solve(field: hbnode.HBNODE, x: Tensor, end: float, tol: float) -> Tensor:
        h, _ = hbnode.odeint(
            field,
            field.initial_state(x),
            [0.0, end],
            method=method,
            rtol=tol,
            atol=tol,
            gradient=gradient,
            max_steps=MAX_STEPS,
            **options,
        )
        return h[-1]

    return solve


def with_torchdiffeq(norm: str | None, method: str = "dopri5", options: dict[str, Any] | None = None) -> Solve:
    """With torchdiffeq alone: backpropagated (None), or its adjoint in the ``"full"`` norm or the ``"seminorm"``."""
    options = {"max_num_steps": MAX_STEPS} if options is None else options
    backward = {**options, "norm": "seminorm"} if norm == "seminorm" else options

    def solve(field: hbnode.HBNODE, x: Tensor, end: float, tol: float) -> Tensor:
        stacked, y0 = Stacked(field), torch.stack([x, torch.zeros_like(x)])
        arguments = {"rtol": tol, "atol": tol, "method": method, "options": options}
        t = torch.tensor([0.0, end])
        if norm is None:
            return torchdiffeq.odeint(stacked, y0, t, **arguments)[-1, 0]
        return torchdiffeq.odeint_adjoint(stacked, y0, t, **arguments, adjoint_options=backward)[-1, 0]

    return solve


def with_torchode(method: str) -> Solve:
    """With torchode's AutoDiffAdjoint, which has a step size for each sample."""
    torchode = _import("torchode")
    kind = {"dopri5": torchode.Dopri5, "tsit5": torchode.Tsit5}[method]

    def solve(field: hbnode.HBNODE, x: Tensor, end: float, tol: float) -> Tensor:
        def derivative(t: Tensor, y: Tensor) -> Tensor:
            h, m = y.chunk(2, dim=1)
            return torch.cat(field(t, (h, m)), dim=1)

        term = torchode.ODETerm(derivative, with_stats=False)
        solver = torchode.AutoDiffAdjoint(
            kind(term=term),
            torchode.IntegralController(atol=tol, rtol=tol, term=term),
            max_steps=MAX_STEPS,
            backprop_through_step_size_control=False,
        )
        start = x.new_zeros(len(x))
        problem = torchode.InitialValueProblem(torch.cat([x, torch.zeros_like(x)], dim=1), start, start + end)
        return solver.solve(problem, term).ys[:, -1, : x.shape[1]]

    return solve


class JaxStep:
    """A training step under jit; the tolerance is an argument of the compiled function, which all steps share."""

    def __init__(self, compiled: Callable, count: Callable, arguments: Any, tol: float) -> None:
        self.compiled, self.count, self.arguments, self.tol = compiled, count, arguments, tol

    def __call__(self) -> None:
        """Make the step and wait for its end."""
        _import("jax").block_until_ready(self.compiled(self.arguments, self.tol))

    def gradient(self) -> Tensor:
        """Make the step and return its gradient."""
        import numpy as np

        _, gradients = self.compiled(self.arguments, self.tol)
        weights, omega, x = gradients
        leaves = [leaf for weight, bias in weights for leaf in (weight, bias)] + [omega, x]
        return torch.cat([torch.from_numpy(np.array(leaf, dtype=np.float64)).flatten() for leaf in leaves])

    def evaluations(self) -> tuple[int | None, int | None]:
        """Evaluations of the forward pass; those of the backward pass are hidden in the compiled code."""
        return int(self.count(self.arguments, self.tol)), None


def with_diffrax(method: str, adjoint: str) -> Maker:
    """What makes training steps with diffrax, compiled, with one step size for the whole batch."""
    jax, diffrax = _import("jax"), _import("diffrax")
    jnp = jax.numpy
    solver, how = getattr(diffrax, method)(), getattr(diffrax, adjoint)()

    def derivative(t: Any, y: Any, parameters: Any) -> Any:
        weights, omega = parameters
        h, m = y
        f = h
        for weight, bias in weights[:-1]:
            f = jnp.tanh(f @ weight.T + bias)
        weight, bias = weights[-1]
        return jnp.stack([m, -jax.nn.sigmoid(omega) * m + f @ weight.T + bias])

    def make(problem: Problem) -> Callable[[float], Step]:
        layers = [layer for layer in problem.field.func.layers if isinstance(layer, nn.Linear)]
        weights = [(_array(layer.weight), _array(layer.bias)) for layer in layers]
        arguments = (weights, _array(problem.field.omega), _array(problem.x))

        def solve(arguments: Any, tol: float) -> Any:
            weights, omega, x = arguments
            y0 = jnp.stack([x, jnp.zeros_like(x)])
            return diffrax.diffeqsolve(
                diffrax.ODETerm(derivative),
                solver,
                0.0,
                problem.end,
                None,
                y0,
                (weights, omega),
                stepsize_controller=diffrax.PIDController(rtol=tol, atol=tol),
                adjoint=how,
                max_steps=MAX_STEPS,
                throw=False,
            )

        loss = jax.value_and_grad(lambda arguments, tol: jnp.mean(solve(arguments, tol).ys[-1, 0] ** 2))
        # one evaluation starts either method, and six more make a step, the last of which begins the next step
        count = jax.jit(lambda arguments, tol: 1 + 6 * solve(arguments, tol).stats["num_steps"])
        compiled = jax.jit(loss)
        return lambda tol: JaxStep(compiled, count, arguments, tol)

    return make


def _array(tensor: Tensor) -> Any:
    return _import("jax").numpy.asarray(tensor.detach().numpy())


def _import(name: str) -> ModuleType:
    """A library to compare with; JAX is told to use one thread, like PyTorch."""
    import importlib

    os.environ.setdefault("NPROC", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(MISSING.format(name=name)) from error
