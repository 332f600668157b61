"""The initial value problems that the benchmarks solve, all heavy-ball equations h'' + γh' = f(h, t)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from hbnode.nn.nets import MLP, ConvNet
from tasks.data.images import read_digits


@dataclass(frozen=True)
class Problem:
    """A field, an initial state, and the time at which the solution is wanted.

    Attributes:
        name: name in tables and figures.
        field: the equation.
        x: h(0), of shape (batch, ...).
        end: the time T; solves go from 0 to T.
        m: m(0); None: zero.
    """

    name: str
    field: hbnode.HBNODE
    x: Tensor
    end: float
    m: Tensor | None = None

    @property
    def state(self) -> tuple[Tensor, Tensor]:
        """Return the state (h, m) at time 0."""
        return self.field.initial_state(self.x) if self.m is None else (self.x, self.m)

    def to(self, dtype: torch.dtype) -> Problem:
        """Return a copy in another precision, with m(0) = 0."""
        return Problem(self.name, copy.deepcopy(self.field).to(dtype), self.x.to(dtype), self.end)


def tanh_network(dim: int, scale: float) -> MLP:
    """Return a random network d -> 64 -> 64 -> d with PyTorch's initial weights multiplied by ``scale``."""
    torch.manual_seed(0)
    return scaled(MLP(dim, [64, 64], dim, activation=nn.Tanh), scale)


def scaled(func: nn.Module, scale: float) -> Any:
    """Multiply the weights of a network, but not its biases, by ``scale``."""
    for weight in func.parameters():
        if weight.dim() > 1:
            weight.data *= scale
    return func


def network(dim: int, scale: float, end: float, gamma: float) -> Problem:
    """Return a problem with a random tanh network and h(0) ~ N(0, 1)."""
    func = tanh_network(dim, scale)
    x = torch.randn(120 if dim == 5 else 128, dim)
    return Problem(
        f"dim {dim}, weights ×{scale:g}, T = {end:g}, γ = {gamma:g}", hbnode.HBNODE(func, damping=gamma), x, end
    )


def pendulum() -> Problem:
    """Return a damped pendulum, h'' + 0.2 h' = -sin h, released at 64 angles."""
    angles = torch.linspace(-3.0, 3.0, 64)[:, None]
    field = hbnode.HBNODE(lambda h: -torch.sin(h), damping=0.2, learn_damping=False)
    return Problem("damped pendulum, T = 10", field, angles, 10.0)


def duffing() -> Problem:
    """Return the driven Duffing oscillator, h'' + 0.3 h' = h - h³ + 0.5 cos(1.2 t), from 64 initial positions."""

    def force(t: Tensor, h: Tensor) -> Tensor:
        return h - h**3 + 0.5 * torch.cos(1.2 * t)

    places = torch.linspace(-1.5, 1.5, 64)[:, None]
    return Problem("driven Duffing, T = 10", hbnode.HBNODE(force, damping=0.3, learn_damping=False), places, 10.0)


def trained(steps: int = 300) -> Problem:
    """Return the field of a digit classifier after ``steps`` steps of Adam, on 128 test images."""
    torch.manual_seed(0)
    images, labels = read_digits("train")
    images = images.flatten(1)
    field = hbnode.HBNODE(MLP(64, [64, 64], 64, activation=nn.Tanh))
    head = nn.Linear(64, 10)
    optimizer = torch.optim.Adam([*field.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (128,))
        h, _ = hbnode.odeint(field, field.initial_state(images[batch]), [0.0, 1.0], rtol=1e-3, atol=1e-3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(h[-1]), labels[batch]).backward()
        optimizer.step()
    return Problem("trained on digits, dim 64, T = 1", field, read_digits("test")[0][:128].flatten(1), 1.0)


def convolutional() -> Problem:
    """Return a problem with a random three-layer convolutional f, on 8 noisy images of 5 channels, 14x14."""
    torch.manual_seed(0)
    func = scaled(ConvNet(5, 32, 5, activation=nn.Tanh, time_dependent=False), 3.0)
    return Problem(
        "convolutional, 5×14×14, weights ×3, T = 1", hbnode.HBNODE(func, damping=0.5), torch.randn(8, 5, 14, 14), 1.0
    )


PROBLEMS: tuple[Callable[[], Problem], ...] = (
    lambda: network(5, 3, 1.0, 0.05),
    lambda: network(5, 5, 1.0, 0.5),
    lambda: network(32, 3, 1.0, 0.5),
    lambda: network(16, 2, 5.0, 0.1),
    lambda: network(32, 3, 10.0, 0.5),
    pendulum,
    duffing,
    trained,
    convolutional,
)
QUICK = (PROBLEMS[0], PROBLEMS[2], pendulum)
