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


def readme_the_first_screen() -> None:
    import torch

    import hbnode

    net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    block = hbnode.HeavyBallODEBlock(net, rtol=1e-3, atol=1e-3)  # a layer: h(0) = x -> h(1)
    block(torch.randn(64, 2)).square().mean().backward()
    print(block.nfe)  # function evaluations: forward 7, backward 0 (graph kept), steps 2, rejected 0
    h, m = hbnode.odeint(block.field, (torch.ones(1, 2), torch.zeros(1, 2)), torch.linspace(0, 5, 50))


def readme_a_block_in_a_classifier() -> None:
    import matplotlib.pyplot as plt
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    import hbnode

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    block = hbnode.HeavyBallODEBlock(net, rtol=1e-3, atol=1e-3)
    model = nn.Sequential(block, nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    print(f"accuracy {(model(x).argmax(1) == y).float().mean():.3f}, damping {block.field.damping:.3f}, {block.nfe}")

    hbnode.diagnostics.nfe_vs_tolerance(block, x[:64], [1e-1, 1e-2, 1e-3, 1e-4, 1e-5]).plot()
    plt.savefig("nfe.png")


def readme_an_ode_rnn_on_a_table() -> None:
    import pandas as pd
    import torch

    import hbnode

    rows = [(1, 0.0, "pulse", 88.0), (1, 2.5, "lactate", 1.9), (2, 0.0, "pulse", 71.0), (2, 4.0, "lactate", 0.8)]
    table = pd.DataFrame(rows, columns=["patient", "hours", "what", "value"])
    series = hbnode.data.from_long(table, id="patient", time="hours", variable="what", values="value")
    scale = hbnode.nn.Standardize(len(series.features)).fit(series.x)
    rnn = hbnode.ODERNN(len(series.features), 16, missing="decay", rtol=1e-3, atol=1e-3)
    rnn.fit_time_unit(series.t, series.mask, series.lengths)  # one unit of time is ten median gaps
    output, state = rnn(scale(series.x), series.t, mask=series.mask, lengths=series.lengths)  # output (batch, T, 16)
    risk = torch.nn.Linear(16, 1)(state.h).sigmoid()  # after the last observation of each patient
    ahead, _ = rnn.forecast(state, [1.0, 6.0])  # one and six hours later, (batch, 2, 16)


def readme_a_classifier_of_series() -> None:
    import numpy as np
    from sklearn.model_selection import cross_val_score

    import hbnode.estimators

    random, labels, t = np.random.default_rng(0), np.arange(60) % 2, np.linspace(0, 10, 50)
    x = np.sin((2 + labels[:, None]) * t + random.uniform(0, 6, (60, 1)))  # (series, T), two frequencies
    x[random.random(x.shape) < 0.3] = np.nan  # missing values
    model = hbnode.estimators.SeriesClassifier("features", random_state=0)
    print(cross_val_score(model, x, labels).mean())


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

    half = hbnode.Event(lambda t, y: y[:, 0] - 0.5)
    solution, record = hbnode.odeint(decay, y0, [0.0, 1.0], events=half)
    assert abs(float(record.t[0]) - 0.693) < 1e-3 and solution[-1].shape == y0.shape
    _, (first, _) = hbnode.odeint(decay, y0, [0.0, 1.0], events=[half, half])
    assert torch.allclose(first.t, record.t)


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
    stack = hbnode.nn.OscillatorStack(2, 4, missing="decay", mask_features=True)
    deep, carried_on = stack(x, t, mask=x > 0)
    later, _ = stack.forecast(carried_on.detach(), [0.5])
    assert y.shape == deep.shape == (3, 5, 4) and swung.shape == later.shape == (3, 1, 4)
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
