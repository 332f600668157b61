"""Training steps on a heavy-ball equation with hbnode and with other libraries, all with the same inputs and weights.

A step solves from h(0) = x and m(0) = 0 to T. The loss is the mean of h(T)², and gradients are computed with respect to
h(0) and all parameters, including the damping. Calling a step object runs a step. Its method ``gradient()`` runs a step
and returns the gradient as one float64 vector, in the same order for all libraries. ``evaluations()`` returns how often
f is evaluated in the forward and in the backward pass (None if this is unknown).
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
    """Yield a list that grows by one entry with each call of a module."""
    calls: list[None] = []
    hook = module.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield calls
    finally:
        hook.remove()


class Stacked(nn.Module):
    """An HBNODE with the stacked state [h, m], as one would write it for torchdiffeq."""

    def __init__(self, field: hbnode.HBNODE) -> None:
        super().__init__()
        self.field = field

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        """Return the derivative of the stacked state."""
        return torch.stack(self.field(t, (z[0], z[1])))


class TorchStep:
    """A training step with a solver for PyTorch."""

    def __init__(self, problem: Problem, solve: Solve, tol: float) -> None:
        self.field, self.end, self.solve, self.tol = problem.field, problem.end, solve, tol
        self.x = problem.x.clone().requires_grad_()
        self.leaves = [*self.field.func.parameters(), self.field.omega, self.x]

    def forward(self) -> Tensor:
        """Return the loss."""
        return self.solve(self.field, self.x, self.end, self.tol).square().mean()

    def __call__(self) -> None:
        """Run the step."""
        for leaf in self.leaves:
            leaf.grad = None
        self.forward().backward()

    def gradient(self) -> Tensor:
        """Run the step and return its gradient."""
        return harness.gradient(self, self.leaves).double()

    def evaluations(self) -> tuple[int, int]:
        """Return the numbers of calls of f in the forward and in the backward pass."""
        with calls_of(self.field.func) as calls:
            loss = self.forward()
            forward = len(calls)
            loss.backward()
        return forward, len(calls) - forward


class JaxStep:
    """A training step with JAX under jit.

    All steps share a compiled function that takes the tolerance as an argument.
    """

    def __init__(self, compiled: Callable, count: Callable, arguments: Any, tol: float) -> None:
        self.compiled, self.count, self.arguments, self.tol = compiled, count, arguments, tol

    def __call__(self) -> None:
        """Run the step and wait until it has finished."""
        rival("jax").block_until_ready(self.compiled(self.arguments, self.tol))

    def gradient(self) -> Tensor:
        """Run the step and return its gradient."""
        _, gradients = self.compiled(self.arguments, self.tol)
        leaves = rival("jax").tree.leaves(gradients)
        return torch.cat([torch.from_numpy(np.array(leaf, dtype=np.float64)).flatten() for leaf in leaves])

    def evaluations(self) -> tuple[int, None]:
        """Return the evaluations in the forward pass. Those of the backward pass cannot be counted in compiled code."""
        return int(self.count(self.arguments, self.tol)), None


Step = TorchStep | JaxStep
Maker = Callable[[Problem], Callable[[float], Step]]


def of(solve: Solve) -> Maker:
    """Return a function that makes training steps with a PyTorch solver."""
    return lambda problem: lambda tol: TorchStep(problem, solve, tol)


def native(method: str, gradient: Any, **options: Any) -> Solve:
    """Return a solve function that uses one of hbnode's methods."""
    options = {"method": method, "gradient": gradient, "max_steps": MAX_STEPS} | options

    def solve(field: hbnode.HBNODE, x: Tensor, end: float, tol: float) -> Tensor:
        return hbnode.odeint(field, field.initial_state(x), [0.0, end], rtol=tol, atol=tol, **options)[0][-1]

    return solve


def with_torchdiffeq(norm: str | None, method: str = "dopri5", options: dict[str, Any] | None = None) -> Solve:
    """Return a solve with torchdiffeq: backpropagation (None), or adjoint in the ``"full"`` or ``"seminorm"`` norm."""
    options = {"max_num_steps": MAX_STEPS} if options is None else options
    backward = {"adjoint_options": options | ({"norm": "seminorm"} if norm == "seminorm" else {})}
    integrate, backward = (torchdiffeq.odeint_adjoint, backward) if norm else (torchdiffeq.odeint, {})

    def solve(field: hbnode.HBNODE, x: Tensor, end: float, tol: float) -> Tensor:
        stacked, y0, t = Stacked(field), torch.stack([x, torch.zeros_like(x)]), torch.tensor([0.0, end])
        return integrate(stacked, y0, t, rtol=tol, atol=tol, method=method, options=options, **backward)[-1, 0]

    return solve


def with_torchode(method: str) -> Solve:
    """Return a solve function that uses torchode's AutoDiffAdjoint, with a step size for each sample."""
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
    """Return a function that makes compiled training steps with diffrax, with one step size for the whole batch."""
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
        # the start needs one evaluation and each step six; the last of these is reused by the next step
        count = jax.jit(lambda arguments, tol: 1 + 6 * solve(arguments, tol).stats["num_steps"])
        compiled = jax.jit(loss)
        return lambda tol: JaxStep(compiled, count, arguments, tol)

    return make


def jax_arrays(*tensors: Tensor) -> tuple[Any, ...]:
    """Return the tensors as JAX arrays."""
    return tuple(rival("jax").numpy.asarray(x.detach().numpy()) for x in tensors)


def jax_layers(net: nn.Module) -> tuple[Any, ...]:
    """Return weight and bias of each linear layer of a network as JAX arrays."""
    return tuple(jax_arrays(layer.weight, layer.bias) for layer in net.layers if isinstance(layer, nn.Linear))


def jax_network(layers: Any, h: Any) -> Any:
    """Evaluate a network with tanh activations in JAX."""
    *hidden, (weight, bias) = layers
    for of_layer, shift in hidden:
        h = rival("jax").numpy.tanh(h @ of_layer.T + shift)
    return h @ weight.T + bias


def rival(name: str) -> ModuleType:
    """Import a library to compare with. JAX is set to use one thread, like PyTorch."""
    os.environ.setdefault("NPROC", "1")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(harness.MISSING.format(name=name)) from error
