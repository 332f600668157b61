"""``hbnode.methods()``: what it says is measured."""

import contextlib
import math

import pytest
import torch
from torch import nn

import hbnode
from tests.problems import Driven, driven_exact

METHODS = hbnode.methods()
BY_NAME = {method.name: method for method in METHODS}


def solved(method, **solver):
    """The NFE, and the error of (h, m) at 2, of an HBNODE whose force depends on the time."""
    field = hbnode.HBNODE(Driven(0.4), damping=0.4, learn_damping=False)
    start, exact = (torch.tensor(driven_exact(0.4, t), dtype=torch.float64) for t in (0.0, 2.0))
    with hbnode.count_nfe(field) as nfe:
        end = torch.stack(hbnode.odeint(field, tuple(start), [0.0, 2.0], method=method, **solver))[:, -1]
    return nfe, (end - exact).norm().item()


ON_GRIDS = [m for m in METHODS if m.order and (m.library == "hbnode" or m.steps == "fixed")]


@pytest.mark.parametrize("method", ON_GRIDS, ids=lambda method: method.name)
def test_orders_and_evaluations_on_a_grid(method):
    n = 32 if method.name == "rodas5p" else {8: 6, 6: 8, 5: 12}.get(method.order, 24)
    (first, coarse), (second, fine) = (solved(method.name, steps=k) for k in (n, 2 * n))
    assert (second.forward - first.forward) / n == method.evaluations
    assert method.order - 0.4 < math.log2(coarse / fine) < method.order + 1


@pytest.mark.parametrize("name", ["dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun"])
def test_orders_and_evaluations_of_torchdiffeqs_adaptive_methods(name):
    """Equal steps: the controller is kept from changing them."""
    n = {8: 6, 5: 12}.get(BY_NAME[name].order, 24)
    found = []
    for steps in (n, 2 * n):
        options = {"first_step": 2 / steps, "min_step": 2 / steps, "max_step": 2 / steps}
        found.append(solved(name, rtol=1.0, atol=1.0, save="exact", options=options))
    (first, coarse), (second, fine) = found
    assert (second.forward - first.forward) / (second.steps - first.steps) == BY_NAME[name].evaluations
    assert BY_NAME[name].order - 0.4 < math.log2(coarse / fine) < BY_NAME[name].order + 1


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_which_gradients_and_fields(method):
    steps = 3 if "steps" in method.needs else None
    fields = {"HBNODE": hbnode.HBNODE, "GHBNODE": hbnode.GHBNODE, "SONODE": lambda f: hbnode.SONODE(lambda h, v: f(h))}
    for name, make in fields.items():
        for gradient in ("checkpoint", "direct", "reversible", "adjoint"):
            possible = gradient in method.gradients and (method.field == "any" or name in method.field.split(", "))
            solver = {"method": method.name, "gradient": gradient, "steps": steps, "rtol": 1e-2, "atol": 1e-2}
            with contextlib.nullcontext() if possible else pytest.raises(ValueError, match="Fix: "):
                hbnode.ODEBlock(make(lambda h: -h), **solver)(torch.ones(1, 1, requires_grad=True)).sum().backward()


# sdeint's


SDE_METHODS = hbnode.solve.sde_methods()


@pytest.mark.parametrize("method", SDE_METHODS, ids=lambda method: method.name)
def test_evaluations_and_gradients_of_sdes(method):
    sde = hbnode.HeavyBallSDE(nn.Linear(1, 1))
    solve = lambda **given: hbnode.sdeint(sde, (torch.ones(2, 1),) * 2, [0.0, 1.0], method=method.name, **given)
    counts = []
    for steps in (4, 8):
        with hbnode.count_nfe(sde) as nfe:
            solve(dt=1 / steps)
        counts.append(nfe.forward)
    assert (counts[1] - counts[0]) / 4 == method.evaluations
    for gradient in ("direct", "checkpoint", "reversible", "adjoint"):
        if gradient in method.gradients:
            with hbnode.count_nfe(sde) as nfe:
                solve(dt=0.5, gradient=gradient)[0].sum().backward()
            assert (nfe.backward > 0) == (gradient in ("reversible", "adjoint"))
        else:
            with pytest.raises(ValueError, match="Fix: "):
                solve(dt=0.5, gradient=gradient)


def test_a_name_of_the_other_solver_is_pointed_to():
    field = hbnode.HeavyBallSDE(nn.Linear(1, 1))
    state = field.initial_state(torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"Fix: hbnode.sdeint\(sde, y0, t, method='ubu', dt=...\)"):
        hbnode.odeint(field, state, [0.0, 1.0], method="ubu")
    with pytest.raises(ValueError, match=r"or hbnode.odeint, which solves the ODE without noise"):
        hbnode.sdeint(field, state, [0.0, 1.0], method="nystrom8", dt=0.1)
