"""A user's script: the code of the README, and the habits of a user of torch.nn and torchdiffeq.

mypy --strict and pyright, which see here what a user's type checker sees, find no error. tests/test_user_script.py
compares the code with the README's, and runs the habits.
"""

# pyright: reportPossiblyUnboundVariable=false
# (what a training loop leaves behind)

import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
import torchdiffeq
from torch import Tensor, nn

import hbnode

# The README, section by section


def readme_a_heavy_ball_block_in_a_classifier() -> None:
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import hbnode

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)

    func = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    block = hbnode.HeavyBallODEBlock(func, rtol=1e-3, atol=1e-3)
    model = nn.Sequential(block, nn.Linear(64, 10))

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(50):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    accuracy = (model(x).argmax(1) == y).float().mean()
    print(f"training accuracy {accuracy:.3f}, damping {block.field.damping:.3f}, {block.nfe}")


def readme_evaluations_against_tolerance() -> None:
    import matplotlib.pyplot as plt
    import torch

    import hbnode

    field = hbnode.HBNODE(hbnode.nn.MLP(2, [32, 32], 2, time_dependent=True))
    block = hbnode.ODEBlock(field, t_span=(0.0, 5.0))  # or method="dopri5", gradient="adjoint"
    curve = hbnode.diagnostics.nfe_vs_tolerance(block, torch.randn(64, 2), [1e-1, 1e-2, 1e-3, 1e-4, 1e-5])

    print(curve.forward, curve.backward, curve.gradient_error)
    curve.to_csv("curve.csv")
    curve.plot()
    plt.savefig("curve.png")


def readme_irregular_times() -> None:
    import torch

    import hbnode

    t = torch.tensor([0.0, 0.1, 0.15, 0.9, 2.0])  # as irregular as you like
    force = hbnode.Signal(torch.linspace(0, 3, 31), torch.linspace(0, 3, 31).sin())
    spring = hbnode.HBNODE(lambda t, h: force(t) - 4 * h, damping=0.2)
    path = hbnode.ODEBlock(spring)(torch.zeros(1, 1), t)  # (5, 1, 1): time first
    h, m = hbnode.HeavyBallODEBlock(torch.nn.Linear(1, 1)).trajectory(torch.zeros(1, 1), t)  # with the momentum
    print(path[:, 0, 0], m[:, 0, 0])

    own = torch.tensor([[0.0, 0.3, 1.0], [0.1, 0.2, 2.0]])  # each sample at times of its own, in one solve
    print(hbnode.ODEBlock(spring, per_sample=True)(torch.zeros(2, 1), own)[:, :, 0])


def readme_integrals_along_the_path() -> None:
    import torch
    from torch import Tensor

    import hbnode

    net = hbnode.nn.MLP(2, [32], 2)
    block = hbnode.ODEBlock(hbnode.NODE(net))
    x = torch.randn(64, 2)

    def log_density(t: Tensor, h: Tensor, dh: Tensor) -> Tensor:
        """d log p / dt = -tr(∂f / ∂h), the continuous normalising flow."""
        jacobians: Tensor = torch.func.vmap(torch.func.jacrev(net))(h)
        return -jacobians.diagonal(dim1=1, dim2=2).sum(1)

    z, change = block.with_integral(x, log_density)
    normal = torch.distributions.Normal(0.0, 1.0)
    loss = -(normal.log_prob(z).sum(1) - change).mean()  # the negative log-likelihood of x

    _, energy = block.with_integral(x, lambda t, h, dh: dh.square().sum(1))  # a penalty for straight paths
    (loss + 0.01 * energy.mean()).backward()
    print(f"negative log-likelihood {loss:.3f}, kinetic energy {energy.mean():.3f}")


def readme_an_ode_rnn_on_irregular_series() -> None:
    import torch
    from torch import nn

    import hbnode

    t = torch.rand(64, 16).cumsum(1)  # each series at times of its own
    x = torch.sin(2 * t + 6.3 * torch.rand(64, 1)).unsqueeze(-1)
    mask = torch.rand(64, 16) < 0.9  # True: observed; lengths= for series of unlike length

    rnn = hbnode.ODERNN(1, 32, field="hbnode", rtol=1e-3, atol=1e-3)  # .fit_time_unit(t) where gaps are long, or dates
    head = nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=0.02)
    for _ in range(30):
        optimizer.zero_grad()
        before, after, state = rnn.filter(x, t, mask=mask)  # before: what it expects, each sample not yet seen
        loss = (head(before.h[:, 4:]) - x[:, 4:]).square().mean()
        loss.backward()
        optimizer.step()

    ahead, _ = rnn.forecast(state, [0.5, 1.0])
    print(f"squared error one sample ahead {loss:.3f} of {x.var():.3f}; forecasts {tuple(head(ahead).shape)}")


def readme_oscillators_on_long_series() -> None:
    import torch

    import hbnode

    t = (0.1 + torch.rand(8, 2000)).cumsum(1)  # irregular; leave t out for regular samples
    x = torch.sin(2 * t + 6.3 * torch.rand(8, 1)).unsqueeze(-1)

    model = hbnode.nn.OscillatorStack(1, 16, num_layers=2, output_size=1, head="next", **hbnode.nn.oscillator_ranges(t))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        y, state = model(x, t)
        loss = (y[:, :-1] - x[:, 1:]).square().mean()
        loss.backward()
        optimizer.step()
    print(f"squared error one sample ahead {loss:.3f} of {x.var():.3f}")


def readme_noise() -> None:
    import torch

    import hbnode

    net = hbnode.nn.MLP(2, [32], 2)
    sde = hbnode.HeavyBallSDE(net, damping=0.5, temperature=0.1, learn_temperature=True)
    state = sde.initial_state(torch.randn(256, 2))  # (h, m), at rest
    h, m = hbnode.sdeint(sde, state, [0.0, 0.5, 1.0], dt=0.05, gradient="reversible")  # (3, 256, 2) each
    loss = (h[-1].square().sum(1) - 1).square().mean()  # end near a circle
    loss.backward()
    print(f"loss {loss:.3f}, damping {sde.damping:.3f}, temperature {sde.temperature:.3f}")


def readme_known_densities() -> None:
    import math

    import torch
    from torch.distributions import Independent, Normal

    import hbnode

    def log_prob(x: torch.Tensor) -> torch.Tensor:  # of a banana, up to a constant
        a, b = x.unbind(-1)
        return -0.5 * (a.square() / 4 + (b - a.square() / 4).square())

    prior = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
    annealing = hbnode.distributions.HeavyBallAnnealing(log_prob, prior, steps=32, step_size=0.3)
    optimizer = torch.optim.Adam(annealing.parameters(), lr=0.05)
    for _ in range(50):
        optimizer.zero_grad()
        (-annealing.bound(128)).backward()
        optimizer.step()
    x, log_weight = annealing.sample(2000)  # (2000, 2), and the logarithms of their weights
    estimate, error = annealing.log_z(2000)
    print(f"log Z {estimate:.3f} ± {error:.3f}, exactly {math.log(4 * math.pi):.3f}")


def readme_recurrent_layers_with_momentum() -> None:
    import torch
    from torch import nn

    import hbnode

    frequency, phase = 1 + torch.rand(64, 1), 6.3 * torch.rand(64, 1)
    x = torch.sin(frequency * torch.linspace(0, 10, 50) + phase).unsqueeze(-1)  # (64, 50, 1)

    rnn = hbnode.nn.MomentumLSTM(1, 32, momentum=0.6, step_size=0.6, batch_first=True)  # or rule="adam", "nag", ...
    head = nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        output, state = rnn(x)
        loss = (head(output[:, 5:-1]) - x[:, 6:]).square().mean()  # the next sample
        loss.backward()
        optimizer.step()

    print(f"squared error of the next sample {loss:.4f}, of the last one repeated {x.diff(dim=1).square().mean():.4f}")
    output, state = rnn(x[:, :1], state)  # a state goes on where its sequence ended
    stock = rnn.to_torch()  # a plain torch.nn.LSTM behind a filter, for deployment


def readme_attention_with_momentum() -> None:
    import torch
    from torch import nn

    import hbnode

    start, stride = torch.randint(11, (64, 1)), torch.randint(1, 4, (64, 1))
    tokens = (start + stride * torch.arange(24)) % 11  # (64, 24): 2 5 8 0 3 6 ...

    model = hbnode.nn.MomentumTransformer(11, d_model=32, nhead=4, num_layers=2, dim_feedforward=64, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(70):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()

    print(f"loss {loss:.3f}", model.generate(torch.tensor([[2, 5]]), 10, temperature=0))
    output, state = model.prefill(tokens)  # the same model token by token, with a state that does not grow
    output, state = model.step(tokens[:, 0], state)


def readme_hessian_free_optimization() -> None:
    import torch
    from torch import Tensor, nn

    import hbnode

    x = 0.3 * torch.randn(200, 40, 1)  # noise, and before it a sign that is to be remembered for 40 steps
    y = torch.randint(2, (200,))
    x[:, 0, 0] = 2.0 * y - 1

    rnn, readout = hbnode.nn.TanhRNN(1, 20, batch_first=True), nn.Linear(20, 2)
    parameters = [*rnn.parameters(), *readout.parameters()]
    optimizer = hbnode.optim.HessianFree(parameters, loss="cross_entropy", structural_damping=1 / 30, max_cg=50)

    def evaluate() -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Outputs, targets, and the hidden states that are damped."""
        h, _ = rnn(x)
        return readout(h[:, -1]), y, hbnode.optim.tanh_hidden(h)

    for _ in range(10):
        loss = optimizer.step(evaluate)
        print(optimizer.progress)


def readme_solvers_and_gradients() -> None:
    import torch

    import hbnode

    func = hbnode.nn.MLP(2, [32, 32], 2)
    x = torch.randn(64, 2)
    hbnode.HeavyBallODEBlock(func, rtol=1e-6, atol=1e-6)(x)  # picks nystrom4 or nystrom8 by the tolerance
    hbnode.HeavyBallODEBlock(func, method="nystrom8", steps=2)(x)  # a fixed grid
    hbnode.HeavyBallODEBlock(func, gradient="reversible", steps=20)(x)  # memory that does not grow with steps
    hbnode.HeavyBallODEBlock(func, per_sample=True)(x)  # a sample's answer does not depend on its batch-mates
    print(hbnode.methods())  # all methods: order, evaluations a step, what they need


# Habits


def decay(t: Tensor, y: Tensor) -> Tensor:
    return -y


def as_torchdiffeq() -> None:
    y0, t = torch.ones(4, 2), torch.linspace(0.0, 1.0, 5)
    last: Tensor = hbnode.odeint(decay, y0, t)[-1]
    same: Tensor = hbnode.odeint(decay, y0, t, method="dopri5", rtol=1e-7, atol=1e-9, options={"first_step": 0.1})[-1]
    theirs = torchdiffeq.odeint(decay, y0, t, rtol=1e-7, atol=1e-9)
    assert isinstance(theirs, Tensor)
    assert torch.allclose(same, theirs[-1]) and torch.allclose(last, theirs[-1], atol=1e-4)
    hbnode.odeint(partial(decay), y0, [0.0, 1.0], gradient="adjoint")
    hbnode.odeint(hbnode.NODE(nn.Identity()), y0, np.linspace(0.0, 1.0, 3))
    hbnode.odeint(lambda t, y: -y, nn.Parameter(y0), [torch.tensor(0.0), torch.tensor(1.0)])

    h, m = hbnode.odeint(lambda t, state: (state[1], -state[0]), (y0, y0), t)
    momentum: Tensor = m[-1]
    field = hbnode.HBNODE(nn.Linear(2, 2))
    state = field.initial_state(y0)
    h, m = hbnode.odeint(field, state, t)
    h, m = torchdiffeq.odeint(field, state, t)
    h, m = torchdiffeq.odeint_adjoint(field, state, t)
    assert momentum.shape == h[-1].shape == m[-1].shape

    when, states = hbnode.odeint(decay, y0, [0.0, 1.0], event_fn=lambda t, y: y[0, 0] - 0.5, method="dopri5")
    assert abs(float(when) - 0.693) < 1e-3 and states[-1].shape == y0.shape


class Classifier(nn.Module):
    def __init__(
        self, solver: hbnode.solve.Method | None = None, gradient: hbnode.solve.Gradient | None = None
    ) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 8)
        func = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.block = hbnode.HeavyBallODEBlock(
            func,
            generalized=True,
            max_damping=2.0,
            xi=0.5,
            learn_xi=False,
            activation=nn.Tanh(),
            method=solver,
            gradient=gradient,
            rtol=1e-3,
            atol=1e-3,
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.inside(x)))
        return logits


def as_torch_nn() -> None:
    model, x, y = Classifier(), torch.randn(6, 2), torch.randint(3, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hbnode.count_nfe(model) as nfe, hbnode.diagnostics.record_steps(model) as steps:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    evaluations: int = nfe.forward + nfe.backward
    assert evaluations == nfe.total == model.block.nfe.total and len(steps.t) == nfe.steps + nfe.rejected
    print(f"damping {model.block.field.damping:.3f}", model.block.field, model.block.nfe)
    model.block.nfe = 0
    copy = Classifier("dopri5", gradient="adjoint")
    copy.load_state_dict(model.state_dict())
    assert torch.allclose(copy.eval()(x), model.eval()(x), atol=1e-2)
    pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model.double()(x.double())


def blocks() -> None:
    net, x = nn.Linear(3, 3), torch.randn(4, 2)
    block = hbnode.HeavyBallODEBlock(net, augment=1, damping=0.1, learn_damping=False, t_span=(0, 2))
    out: Tensor = block(x)
    path: Tensor = block(x, [0.0, 0.5, 2.0])
    h, m = block.trajectory(x, torch.linspace(0, 2, 3))
    z, energy = block.with_integral(x, lambda t, state, derivative: derivative[0].square().sum(1))
    assert out.shape == z.shape and path.shape == h.shape == m.shape and energy.shape == (4,)
    plain = hbnode.ODEBlock(hbnode.NODE(net), (0.0, 1.0), method="rk4", steps=4)
    states = plain.trajectory(torch.randn(4, 3), [0.0, 1.0])
    assert isinstance(states, Tensor)
    start: Callable[[Tensor], tuple[Tensor, Tensor]] = lambda x: (x, torch.zeros_like(x))
    hbnode.ODEBlock(hbnode.SONODE(lambda h, v: -h - v), initial_state=start)(torch.randn(4, 3))
    curve = hbnode.diagnostics.nfe_vs_tolerance(block, x, [1e-2, 1e-3])
    table = pd.DataFrame({"tolerance": curve.tolerance, "forward": curve.forward, "error": curve.error})
    assert len(table) == 2


def choices() -> None:
    table = pd.DataFrame(hbnode.methods())
    fastest = min((m for m in hbnode.methods() if m.order == 8 and m.evaluations), key=lambda m: m.evaluations or 0)
    assert fastest.name == "nystrom8" and "dopri5" in set(table["name"])
    try:
        hbnode.ODEBlock(hbnode.NODE(nn.Linear(2, 2)), rtol=1e-6, atol=1e-6, max_steps=1)(torch.ones(1, 2))
    except hbnode.errors.MaxStepsError as error:
        print(error.t, error.step_size, error.nfe)
    except hbnode.SolverError:
        raise


def sequences() -> None:
    x, t = torch.randn(3, 5, 2), torch.rand(3, 5).cumsum(1)
    rnn = hbnode.ODERNN(2, 4, field="ghbnode", method="tsit5", rtol=1e-2, atol=1e-2)
    output, state = rnn(x, t, lengths=torch.tensor([5, 3, 2]))
    more, state = rnn(x, t + 9, state)
    ahead, state = rnn.forecast(state, [0.5])
    assert output.shape == more.shape == (3, 5, 4) and ahead.shape == (3, 1, 4)
    oscillators = hbnode.nn.Oscillators(2, 4, num_oscillators=6, bidirectional=False)
    y, swinging = oscillators(x, t, lengths=torch.tensor([5, 3, 2]))
    y, swinging = oscillators(x, t + 9, swinging)
    swung, _ = oscillators.forecast(swinging.detach(), [0.5])
    assert y.shape == (3, 5, 4) and swung.shape == (3, 1, 4)
    lstm = hbnode.nn.MomentumLSTM(2, 4, num_layers=2, batch_first=True, dropout=0.1)
    output, (h, c) = lstm(x)
    output, carry = lstm(x)
    packed, carry = lstm(nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True), carry)
    cell = hbnode.nn.MomentumLSTMCell(2, 4)
    step, carried = cell(x[:, 0])
    step, carried = cell(x[:, 1], carried)
    gru = hbnode.nn.MomentumGRU(2, 4, rule="nag")
    output, last = gru(x.transpose(0, 1))
    assert h.shape == c.shape == (2, 3, 4) and step.shape == (3, 4) and last.h.shape == (1, 3, 4)


def attention() -> None:
    x, padding = torch.randn(3, 9, 16), torch.arange(9) >= torch.tensor([[9], [5], [1]])
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    layer.register_module("self_attn", hbnode.nn.MomentumAttention(16, 4, batch_first=True))
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    assert encoder(x, src_key_padding_mask=padding).shape == encoder.eval()(x).shape == x.shape
    attend = hbnode.nn.MomentumAttention(16, 4, momentum=[0.0, 0.5, 0.9, 0.99], batch_first=True)
    output, weights = attend(x, x, x, key_padding_mask=padding, need_weights=False)
    y, carried = attend.prefill(x[:, :8])
    y, carried = attend.step(x[:, 8], carried)
    assert weights is None and torch.allclose(y[0], output[0, 8], atol=1e-5)
    q, k, v = torch.randn(3, 2, 4, 50, 8)
    mixed: Tensor = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9)
    read: Tensor = hbnode.nn.functional.heavy_ball_memory(q, nn.functional.normalize(k, dim=-1), v, log_momentum=-1.0)
    assert mixed.shape == read.shape == nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).shape
    model = hbnode.nn.MomentumTransformer(50, 16, 2, 2, 32, attention="heavy_ball", connection="nesterov")
    tokens = torch.randint(50, (2, 7))
    logits: Tensor = model(tokens)
    scores, stream = model.prefill(tokens)
    scores, stream = model.step(tokens[:, 0], stream)
    assert logits.shape == (2, 7, 50) and scores.shape == (2, 50)
    assert model.generate(tokens, 3, top_k=5, generator=torch.Generator().manual_seed(0)).shape == (2, 10)


def hessian_free() -> None:
    x, y = torch.randn(50, 4), torch.randint(3, (50,))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = hbnode.optim.HessianFree(model.named_parameters(), loss="cross_entropy", damping=1.0)
    losses = [optimizer.step(lambda: (model(x), y), lambda: (model(x[:20]), y[:20])).item() for _ in range(5)]
    assert losses[-1] < losses[0] and optimizer.progress is not None and optimizer.progress.cg_iterations > 0
    resumed = hbnode.optim.HessianFree(model.named_parameters(), loss="cross_entropy", damping=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    lstm = nn.LSTM(4, 5, batch_first=True)
    head = nn.Linear(5, 3)
    both = hbnode.optim.HessianFree([*lstm.parameters(), *head.parameters()], loss="cross_entropy", max_cg=10)
    before = both.step(lambda: (head(lstm(x[:, None].expand(50, 6, 4))[0][:, -1]), y))
    assert before.isfinite()


HABITS = (as_torchdiffeq, as_torch_nn, blocks, choices, sequences, attention, hessian_free)

if __name__ == "__main__":
    for habit in HABITS:
        habit()
