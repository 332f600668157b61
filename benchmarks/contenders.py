"""Training steps on a heavy-ball equation with hbnode and with other libraries, all with the same numbers in them.

A step is: solve from h(0) = x, m(0) = 0 to T, take the mean of h(T)² as loss, and its gradient with respect to every
parameter, the damping included, and to h(0). Calling a step makes one; ``gradient()`` makes one and returns the
gradient as one float64 vector, in the same order for all. ``evaluations()`` are those of f in the forward and in the
backward pass, as far as they can be known.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torchdiffeq
from torch import Tensor, nn

import hbnode
from benchmarks import harness
from benchmarks.problems import Problem

MAX_STEPS = 1_000
Solve = Callable[[hbnode.HBNODE, Tensor, float, float], Tensor]  # (field, x, T, tolerance) -> h(T)


@contextmanager
def calls_of(module: nn.Module) -> Iterator[list[None]]:
    """A list that grows by an entry with each call of a module."""
    calls: list[None] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


class Stacked(nn.Module):
    """An HBNODE on the stacked state [h, m], as one would write it for torchdiffeq alone."""

    def __init__(self, field: hbnode.HBNODE) -> None:
        super().__init__()
        self.field = field

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        """The field on the two halves."""
        return torch.stack(self.field(t, (z[0], z[1])))


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
        return harness.gradient(self, self.leaves).double()

    def evaluations(self) -> tuple[int, int]:
        """Calls of f in the forward and in the backward pass."""
        with calls_of(self.field.func) as calls:
            loss = self.forward()
            forward = len(calls)
            loss.backward()
        return forward, len(calls) - forward


class JaxStep:
    """A training step under jit; the tolerance is an argument of the compiled function, which all steps share."""

    def __init__(self, compiled: Callable, count: Callable, arguments: Any, tol: float) -> None:
        self.compiled, self.count, self.arguments, self.tol = compiled, count, arguments, tol

    def __call__(self) -> None:
        """Make the step and wait for its end."""
        rival("jax").block_until_ready(self.compiled(self.arguments, self.tol))

    def gradient(self) -> Tensor:
        """Make the step and return its gradient."""
        _, gradients = self.compiled(self.arguments, self.tol)
        leaves = rival("jax").tree.leaves(gradients)
        return torch.cat([torch.from_numpy(np.array(leaf, dtype=np.float64)).flatten() for leaf in leaves])

    def evaluations(self) -> tuple[int, None]:
        """Evaluations of the forward pass; those of the backward pass are hidden in the compiled code."""
        return int(self.count(self.arguments, self.tol)), None


Step = TorchStep | JaxStep
Maker = Callable[[Problem], Callable[[float], Step]]


def of(solve: Solve) -> Maker:
    """What makes training steps with a solver of PyTorch's."""
    return lambda problem: lambda tol: TorchStep(problem, solve, tol)


def native(method: str, gradient: Any, **options: Any) -> Solve:
    """With one of hbnode's own methods."""
    options = {"method": method, "gradient": gradient, "max_steps": MAX_STEPS} | options

    def solve(field: hbnode.HBNODE, x: Tensor, end: float, tol: float) -> Tensor:
        return hbnode.odeint(field, field.initial_state(x), [0.0, end], rtol=tol, atol=tol, **options)[0][-1]

    return solve


def with_torchdiffeq(norm: str | None, method: str = "dopri5", options: dict[str, Any] | None = None) -> Solve:
    """With torchdiffeq alone: backpropagated (None), or its adjoint in the ``"full"`` norm or the ``"seminorm"``."""
    options = {"max_num_steps": MAX_STEPS} if options is None else options
    backward = {"adjoint_options": options | ({"norm": "seminorm"} if norm == "seminorm" else {})}
    integrate, backward = (torchdiffeq.odeint_adjoint, backward) if norm else (torchdiffeq.odeint, {})

    def solve(field: hbnode.HBNODE, x: Tensor, end: float, tol: float) -> Tensor:
        stacked, y0, t = Stacked(field), torch.stack([x, torch.zeros_like(x)]), torch.tensor([0.0, end])
        return integrate(stacked, y0, t, rtol=tol, atol=tol, method=method, options=options, **backward)[-1, 0]

    return solve


def with_torchode(method: str) -> Solve:
    """With torchode's AutoDiffAdjoint, which has a step size for each sample."""
    torchode = rival("torchode")
    kind = getattr(torchode, method.capitalize())

    def solve(field: hbnode.HBNODE, x: Tensor, end: float, tol: float) -> Tensor:
        def derivative(t: Tensor, y: Tensor) -> Tensor:
            return torch.cat(field(t, y.chunk(2, dim=1)), dim=1)

        term = torchode.ODETerm(derivative, with_stats=False)
        control = torchode.IntegralController(atol=tol, rtol=tol, term=term)
        options = {"max_steps": MAX_STEPS, "backprop_through_step_size_control": False}
        start = x.new_zeros(len(x))
        problem = torchode.InitialValueProblem(torch.cat([x, torch.zeros_like(x)], dim=1), start, start + end)
        solution = torchode.AutoDiffAdjoint(kind(term=term), control, **options).solve(problem, term)
        return solution.ys[:, -1, : x.shape[1]]

    return solve


def with_diffrax(method: str, adjoint: str) -> Maker:
    """What makes training steps with diffrax, compiled, with one step size for the whole batch."""
    jax, diffrax = rival("jax"), rival("diffrax")
    solver, how = getattr(diffrax, method.capitalize())(), getattr(diffrax, adjoint)()

    def derivative(t: Any, y: Any, parameters: Any) -> Any:
        layers, omega = parameters
        h, m = y
        return jax.numpy.stack([m, -jax.nn.sigmoid(omega) * m + jax_network(layers, h)])

    def make(problem: Problem) -> Callable[[float], Step]:
        arguments = (jax_layers(problem.field.func), *jax_arrays(problem.field.omega, problem.x))

        def solve(arguments: Any, tol: float) -> Any:
            *parameters, x = arguments
            y0, term = jax.numpy.stack([x, jax.numpy.zeros_like(x)]), diffrax.ODETerm(derivative)
            control = diffrax.PIDController(rtol=tol, atol=tol)
            options = {"stepsize_controller": control, "adjoint": how, "max_steps": MAX_STEPS, "throw": False}
            return diffrax.diffeqsolve(term, solver, 0.0, problem.end, None, y0, parameters, **options)

        loss = jax.value_and_grad(lambda arguments, tol: (solve(arguments, tol).ys[-1, 0] ** 2).mean())
        # one evaluation starts either method, and six more make a step, the last of which begins the next step
        count = jax.jit(lambda arguments, tol: 1 + 6 * solve(arguments, tol).stats["num_steps"])
        compiled = jax.jit(loss)
        return lambda tol: JaxStep(compiled, count, arguments, tol)

    return make


def jax_arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """The same numbers as JAX arrays."""
    return tuple(rival("jax").numpy.asarray(x.detach().numpy()) for x in tensors)


def jax_layers(net: nn.Module) -> tuple[Any, ...]:
    """Weight and bias of each linear layer of a network."""
    return tuple(jax_arrays(layer.weight, layer.bias) for layer in net.layers if isinstance(layer, nn.Linear))


def jax_network(layers: Any, h: Any) -> Any:
    """A network of tanh."""
    *hidden, (weight, bias) = layers
    for of_layer, shift in hidden:
        h = rival("jax").numpy.tanh(h @ of_layer.T + shift)
    return h @ weight.T + bias


def rival(name: str) -> ModuleType:
    """A library to compare with; JAX is told to use one thread, like PyTorch."""
    os.environ.setdefault("NPROC", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(harness.MISSING.format(name=name)) from error
