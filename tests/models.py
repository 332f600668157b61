"""The five models as the parametrised tests need them, on vectors and on images."""

import importlib
import weakref

import pytest
import torch
from torch import nn

import hbnode
from hbnode.solve.adjoints import Checkpoint

MODELS = ("node", "anode", "sonode", "hbnode", "ghbnode")
LATER = ("nesterovnode", "adamnode")  # for tests that every field must pass
SHAPES = {"vector": (3, 4), "image": (2, 2, 3, 3)}


def make_field(model, shape="vector", *, time_dependent=True, smooth=True):
    """A field with learned initial momentum for inputs of SHAPES[shape]."""
    channels = SHAPES[shape][1]
    extra = 1 if model == "anode" else 0
    d = channels + extra
    inputs = 2 * d if model == "sonode" else d
    activation = nn.Tanh if smooth else nn.ReLU
    if shape == "vector":
        func = hbnode.nn.MLP(inputs, [6], d, activation=activation, time_dependent=time_dependent)
        start = nn.Linear(channels, channels)
    else:
        func = hbnode.nn.ConvNet(inputs, 4, d, activation=activation, time_dependent=time_dependent)
        start = nn.Conv2d(channels, channels, 1)
    return {
        "node": lambda: hbnode.NODE(func),
        "anode": lambda: hbnode.ANODE(func, augment=extra),
        "sonode": lambda: hbnode.SONODE(func, initial_velocity=start),
        "hbnode": lambda: hbnode.HBNODE(func, initial_momentum=start),
        "ghbnode": lambda: hbnode.GHBNODE(func, initial_momentum=start),
        "nesterovnode": lambda: hbnode.NesterovNODE(func, initial_momentum=start),
        "adamnode": lambda: hbnode.AdamNODE(func, initial_momentum=start),
    }[model]()


def make_input(shape="vector", dtype=torch.float64):
    return torch.randn(*SHAPES[shape], dtype=dtype)


def gradients(field, x, t, **settings):
    """Of a scalar of h and m at all times, with respect to x, t, and every parameter; and the field's evaluations."""
    x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
    with hbnode.count_nfe(field) as nfe:
        states = hbnode.odeint(field, field.initial_state(x), t, **settings)
        states = states if isinstance(states, tuple) else (states,)
        value = sum((part.sin() * (i + 1)).sum() for i, part in enumerate(states))
        found = torch.autograd.grad(value, [x, t, *field.parameters()])
    return torch.cat([g.reshape(-1) for g in found]), nfe


AGAIN = Checkpoint(keep_bytes=0)  # computes every step again, where the default keeps the graph of a short solve


def pretend_tracing(patch):
    """The operations that are traced, without tracing them, until the patch is undone."""
    for module in ("odeint", "term"):
        patch.setattr(importlib.import_module(f"hbnode.solve.{module}"), "is_tracing", lambda: True)


def compile_without_back_end(patch):
    """Let torch.compile trace and run what it traced: that all is one graph, and counted right, shows without more."""
    compile = torch.compile
    patch.setattr(
        torch, "compile", lambda function, fullgraph, **_: compile(function, fullgraph=fullgraph, backend="eager")
    )


def slow(*values):
    """Values of a parameter, or tuples of several, that are tried in the slow tier only."""
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in values]


every_model = pytest.mark.parametrize("model", MODELS)
every_field = pytest.mark.parametrize("model", [*MODELS, *LATER])


class Watched(nn.Module):
    """A func that counts which of its activations are alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = weakref.WeakSet(), 0

    def forward(self, h):
        hidden = h.tanh()
        if hidden.requires_grad:
            self.alive.add(hidden)
            self.most = max(self.most, len(self.alive))
        return hidden * 1.5
