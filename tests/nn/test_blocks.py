"""Blocks: one suite over all five fields in every gradient mode, trajectories, arguments and settings."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

import hbnode
from tests.models import AGAIN, SHAPES, Watched, every_model, make_field, make_input
from tests.problems import damped_oscillator

SOLVERS = [
    *({}, {"gradient": "direct"}, {"gradient": "adjoint"}, {"per_sample": True}, {"steps": 3}),
    *({"method": "dopri5"}, {"method": "dopri5", "gradient": "adjoint"}),
]
FURTHER = [{"gradient": AGAIN}, {"gradient": AGAIN, "steps": 20}, {"gradient": "reversible", "steps": 3}]
TIMES = [0.0, 0.4, 1.5]
close, HeavyBall = torch.testing.assert_close, hbnode.HeavyBallODEBlock


def test_autocast_with_weights_that_were_used_before():
    """Autocast's cache must not make them look like tensors computed outside; the adjoint's solve uses it as well."""
    x, func, slopes, dtypes = make_input(dtype=torch.float32), nn.Linear(4, 4), [], set()
    func.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    for gradient in ("direct", "adjoint"):
        block = HeavyBall(func, gradient=gradient, rtol=1e-2, atol=1e-2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block(block(x))
        slopes.append(torch.autograd.grad(y.sum(), list(func.parameters())))
    assert dtypes == {torch.bfloat16}
    close(*slopes, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("method", ["dopri5", "dopri8", "rk4"])
def test_the_adjoint_keeps_nothing_alive(method):
    """Neither between evaluations of the backward pass nor after it, without the garbage collector's help."""
    func, x = Watched(), make_input().requires_grad_()
    block = HeavyBall(func, gradient="adjoint", method=method).double()
    gc.disable()
    try:
        for _ in range(3):
            block(x).sum().backward()
        assert len(func.alive) == 0
        assert 0 < func.most <= 2
    finally:
        gc.enable()


# Blocks


@pytest.mark.parametrize("shape", [(3, 4), (2, 4, 3, 3)])
def test_augmentation(shape):
    x, ones = torch.randn(*shape), lambda x: torch.ones_like(x)
    out = HeavyBall(nn.Identity(), augment=2)(x)
    assert out.shape == (shape[0], 6, *shape[2:])
    assert not out[:, 4:].any()  # h'' = h leaves the zeros where they are
    assert HeavyBall(nn.Identity(), augment=2, initial_momentum=ones)(x)[:, 4:].all()


def test_an_initial_state_module_replaces_that_of_the_field():
    class Start(nn.Linear):
        def forward(self, x):
            return super().forward(x).chunk(2, dim=-1)

    block, x = hbnode.ODEBlock(hbnode.HBNODE(nn.Linear(3, 3)), initial_state=Start(2, 6)), torch.randn(5, 2)
    close(tuple(part[0] for part in block.trajectory(x)), block.initial_state(x), rtol=0, atol=0)
    block(x).sum().backward()
    assert block.initial_state.weight.grad.any()


# Trajectories


@pytest.mark.parametrize("solver", [{}, {"method": "tsit5"}, {"method": "dopri5"}, {"per_sample": True}], ids=str)
def test_a_trajectory_has_position_and_momentum(solver):
    constants = {"damping": 0.3, "learn_damping": False, "initial_momentum": nn.Tanh()}
    block = HeavyBall(lambda h: -4 * h, **constants, rtol=1e-9, atol=1e-9, **solver)
    x = torch.tensor([[0.5], [-1.0]], dtype=torch.float64)
    path = block.trajectory(x, TIMES)
    exact = [damped_oscillator(2.0, 0.3, x.numpy(), x.tanh().numpy(), t) for t in TIMES]
    close(path, tuple(torch.as_tensor(np.stack(part)) for part in zip(*exact, strict=True)), rtol=1e-7, atol=1e-7)
    if solver.get("method") != "dopri5":
        own = block.trajectory(x, torch.tensor([[0.0, 0.4], [0.0, 1.5]], dtype=torch.float64))  # times of each sample
        for part, expected in zip(own, path, strict=True):
            close(part[1], torch.stack([expected[1, 0], expected[2, 1]]), rtol=1e-6, atol=1e-6)


@every_model
@pytest.mark.parametrize("shape", SHAPES)
def test_a_trajectory_is_what_odeint_returns_and_counts_what_a_call_does(model, shape):
    field = make_field(model, shape).double()
    block, x = hbnode.ODEBlock(field, t_span=(0.5, 2.0)), make_input(shape)
    call, nfe = block(x, TIMES), block.nfe
    states = block.trajectory(x, TIMES)
    assert block.nfe == nfe
    close(states, hbnode.odeint(field, field.initial_state(x), TIMES), rtol=0, atol=0)
    close(field.readout(states), call, rtol=0, atol=0)
    close(field.readout(block.trajectory(x)), block(x, [0.5, 2.0]), rtol=0, atol=0)  # of t_span


@pytest.mark.sparse
@every_model
@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
@pytest.mark.parametrize("steps", [2, None], ids=["grid", "adaptive"])
def test_a_block_gives_the_end_of_its_trajectory(model, steps, gradient):
    """Which it solves without a trajectory: the gradient of h does not pass through the last value of f."""
    block = hbnode.ODEBlock(make_field(model), gradient=gradient, steps=steps).double()
    x, found = make_input().requires_grad_(), []
    for end in (lambda: block(x), lambda: block.field.readout(block.trajectory(x))[-1]):
        h = end()
        loss, leaves = h.sin().sum(), [x, *block.parameters()]
        grads = [torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True) for _ in range(2)]
        found.append((torch.tensor([block.nfe.forward, block.nfe.steps]), h, *grads))
    close(*found, rtol=1e-12, atol=1e-14)


# In a user's hands


@pytest.mark.sparse
@pytest.mark.parametrize("solver", [*SOLVERS, *FURTHER], ids=str)
@pytest.mark.parametrize("generalized", [False, True])
def test_an_output_may_be_changed_in_place(solver, generalized):
    """As ``nn.ReLU(inplace=True)`` behind the block does; no backward pass needs what the caller has."""
    block = HeavyBall(nn.Linear(2, 2), generalized=generalized, **solver).double()
    x = torch.randn(3, 2, dtype=torch.float64)
    for times in (None, [0.0, 0.5, 1.0]):
        losses = [change(block(x, times)).square().sum() for change in (torch.relu_, torch.relu)]
        close(*(torch.autograd.grad(loss, list(block.parameters())) for loss in losses), rtol=0, atol=0)


def test_what_is_refused():
    make, x = lambda **options: HeavyBall(nn.Linear(2, 2), **options), torch.ones(2, 2)
    for message, call in (
        ("expected a field, got Linear. Fix: wrap the network", lambda: hbnode.ODEBlock(nn.Linear(2, 2))),
        ("learned times go to block", lambda: make(t_span=(0.0, torch.tensor(1.0)))),
        ("xi, activation belongs to", lambda: make(xi=0.3, activation=torch.sin)),
        ("Fix: max_damping=3, for instance", lambda: make(damping=1.5)),
        ("func returned shape", lambda: HeavyBall(nn.Linear(2, 4))(x)),
        ("x.float", lambda: make()(x.long())),
        (r"is called with the time first. Fix: let it take \(t, ", lambda: HeavyBall(lambda h, t: h)),
        ("Fix: a native method", lambda: torch.func.vmap(make(method="dopri5"))(x.view(1, 2, 2))),
        ("Fix: per_sample=False", lambda: make(per_sample=True, method="dopri5")(x)),
        ("leave it out, or method='dopri5'", lambda: make(options={"norm": max})(x)),
        ("Fix: method='rk4'", lambda: make(method="dopri5", steps=9)(x)),
        ("gradient='checkpoint', or method='leapfrog'", lambda: make(method="tsit5", gradient="reversible")(x)),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_settings_that_are_changed_count_in_the_next_call():
    block, x = HeavyBall(nn.Linear(2, 2), options={"max_step": 1.0}), torch.randn(3, 2)
    block(x)
    assert block.nfe.steps < 20
    block.options["max_step"] = 0.05  # in place
    block(x)
    assert block.nfe.steps >= 20
    block.options, block.method, block.steps = None, "nystrom4", 3
    block(x)
    assert block.nfe.steps == 3


@pytest.mark.parametrize("t", [[2.0], np.array([2.0]), torch.full((3, 1), 2.0)], ids=["list", "array", "each"])
def test_a_single_time_is_that_of_x_and_warned_of(t):
    block, x = HeavyBall(lambda h: -4 * h), torch.randn(3, 2)
    for call in (block, block.trajectory):
        with pytest.warns(UserWarning, match=r"single time, at which the block returns x.*Fix: start with the time t0"):
            call(x, t)


@pytest.mark.parametrize("solver", [{}, {"method": "dopri5", "gradient": "adjoint"}, {"method": "rodas5p"}], ids=str)
def test_lazy_layers_get_their_shapes_in_the_first_solve(solver):
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3))
    block, x = HeavyBall(net, augment=1, **solver), torch.randn(2, 2)
    h = block(x)
    h.sum().backward()
    assert all(p.grad.any() for p in block.parameters())
    close(block(x), h)  # as a solve whose shapes are known


def test_a_field_of_a_user_starts_from_x():
    class Decay(hbnode.Field):
        def forward(self, t, h):
            return self.evaluate(t, h)

    block = hbnode.ODEBlock(Decay(lambda h: -h, parts=1, time_dependent=None), rtol=1e-8, atol=1e-8)
    x = torch.ones(1, 1, dtype=torch.float64)
    torch.testing.assert_close(block(x), x * np.exp(-1), rtol=1e-7, atol=0)
