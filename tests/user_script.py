"""The habits of a user of torch.nn and torchdiffeq.

mypy --strict and pyright, which see here what a user's type checker sees, find no error. tests/test_user_script.py
runs the habits.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
import torchdiffeq
from torch import Tensor, nn

import hbnode


def decay(t: Tensor, y: Tensor) -> Tensor:
    return -y


def as_torchdiffeq() -> None:
    y0, t = torch.ones(4, 2), torch.linspace(0.0, 1.0, 5)
    last: Tensor = hbnode.odeint(decay, y0, t, method="dopri5", rtol=1e-7, atol=1e-9, options={"first_step": 0.1})[-1]
    theirs = torchdiffeq.odeint(decay, y0, t, rtol=1e-7, atol=1e-9)
    assert isinstance(theirs, Tensor) and torch.allclose(last, theirs[-1])
    hbnode.odeint(partial(decay), y0, [0.0, 1.0], gradient="adjoint")
    hbnode.odeint(lambda t, y: -y, nn.Parameter(y0), np.linspace(0.0, 1.0, 3))
    field = hbnode.HBNODE(nn.Linear(2, 2))
    h, m = hbnode.odeint(field, field.initial_state(y0), t)
    momentum: Tensor = m[-1]
    h, m = torchdiffeq.odeint(field, field.initial_state(y0), t)
    assert momentum.shape == h[-1].shape == m[-1].shape
    half = hbnode.Event(lambda t, y: y[:, 0] - 0.5)
    solution, record = hbnode.odeint(decay, y0, [0.0, 1.0], events=half)
    _, (first, _) = hbnode.odeint(decay, y0, [0.0, 1.0], events=[half, half])
    assert abs(float(record.t[0]) - 0.693) < 1e-3 and torch.allclose(first.t, record.t)


class Classifier(nn.Module):
    def __init__(
        self, solver: hbnode.solve.Method | None = None, gradient: hbnode.solve.Gradient | None = None
    ) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 8)
        func = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.block = hbnode.HeavyBallODEBlock(
            func, generalized=True, activation=nn.Tanh(), method=solver, gradient=gradient, max_damping=2.0, rtol=1e-3
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
    print(f"damping {model.block.field.damping:.3f}", model.block.nfe)
    model.block.nfe = 0
    copy = Classifier("dopri5", gradient="adjoint")
    copy.load_state_dict(model.state_dict())
    assert torch.allclose(copy.eval()(x), model.eval()(x), atol=1e-2)


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


def sequences() -> None:
    x, t = torch.randn(3, 5, 2), torch.rand(3, 5).cumsum(1)
    rnn = hbnode.ODERNN(2, 4, field="ghbnode", method="tsit5", rtol=1e-2, atol=1e-2)
    output, state = rnn(x, t, lengths=torch.tensor([5, 3, 2]))
    ahead, state = rnn.forecast(state, [0.5])
    assert output.shape == (3, 5, 4) and ahead.shape == (3, 1, 4)
    oscillators = hbnode.nn.Oscillators(2, 4, num_oscillators=6, bidirectional=False)
    y, swinging = oscillators(x, t, lengths=torch.tensor([5, 3, 2]))
    swung, _ = oscillators.forecast(swinging.detach(), [0.5])
    stack = hbnode.nn.OscillatorStack(2, 4, missing="decay", mask_features=True)
    deep, _ = stack(x, t, mask=x > 0)
    assert y.shape == deep.shape == (3, 5, 4) and swung.shape == (3, 1, 4)
    lstm = hbnode.nn.MomentumLSTM(2, 4, num_layers=2, batch_first=True, dropout=0.1)
    output, (h, c) = lstm(x)
    packed, carry = lstm(nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True))
    cell = hbnode.nn.MomentumLSTMCell(2, 4)
    step, carried = cell(x[:, 1], cell(x[:, 0])[1])
    assert h.shape == c.shape == (2, 3, 4) and step.shape == (3, 4)


def attention() -> None:
    x, padding = torch.randn(3, 9, 16), torch.arange(9) >= torch.tensor([[9], [5], [1]])
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    layer.register_module("self_attn", hbnode.nn.MomentumAttention(16, 4, batch_first=True))
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    assert encoder(x, src_key_padding_mask=padding).shape == encoder.eval()(x).shape == x.shape
    attend = hbnode.nn.MomentumAttention(16, 4, momentum=[0.0, 0.5, 0.9, 0.99], batch_first=True)
    output, weights = attend(x, x, x, key_padding_mask=padding, need_weights=False)
    y, carried = attend.step(x[:, 8], attend.prefill(x[:, :8])[1])
    assert weights is None and torch.allclose(y[0], output[0, 8], atol=1e-5)
    q, k, v = torch.randn(3, 2, 4, 50, 8)
    mixed: Tensor = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9)
    assert mixed.shape == q.shape
    model = hbnode.nn.MomentumTransformer(50, 16, 2, 2, 32, attention="heavy_ball", connection="nesterov")
    tokens = torch.randint(50, (2, 7))
    logits: Tensor = model(tokens)
    assert logits.shape == (2, 7, 50)
    assert model.generate(tokens, 3, top_k=5, generator=torch.Generator().manual_seed(0)).shape == (2, 10)


def hessian_free() -> None:
    x, y = torch.randn(50, 4), torch.randint(3, (50,))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = hbnode.optim.HessianFree(model.named_parameters(), loss="cross_entropy", damping=1.0)
    losses = [optimizer.step(lambda: (model(x), y), lambda: (model(x[:20]), y[:20])).item() for _ in range(5)]
    assert losses[-1] < losses[0] and optimizer.progress is not None and optimizer.progress.cg_iterations > 0


HABITS = (as_torchdiffeq, as_torch_nn, blocks, choices, sequences, attention, hessian_free)

if __name__ == "__main__":
    for habit in HABITS:
        habit()
