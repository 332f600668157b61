"""Attention, memory and transformers on a pretended device: nothing mixes devices, and the host waits for nothing."""

import pytest
import torch

import hbnode
from tests.nn.test_attention import KINDS, make
from tests.pretend_device import pretended_device


@pytest.fixture
def device():
    with pretended_device() as device:
        yield device


def ignored_of(device, length=11):
    ignored = torch.zeros(3, length, dtype=torch.bool)
    ignored[0, 8:] = True
    ignored[2, 1] = True
    return device.move(ignored)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_modules(device, kind, masked):
    module = device.move(make(kind, dtype=torch.float32))
    x = device.move(torch.randn(3, 11, 16)).requires_grad_()
    ignored = ignored_of(device) if masked else None
    before = device.synchronisations
    output, _ = module(x, x, x, ignored)
    output.square().sum().backward()
    with torch.no_grad():
        y, state = module.prefill(x[:, :6], None, None if ignored is None else ignored[:, :6])
        y, state = module.step(x[:, 6], state)
        module.prefill(x[:, 7:], state, None if ignored is None else ignored[:, 7:])
    assert device.synchronisations == before
    for tensor in (output, y, x.grad, *(p.grad for p in module.parameters())):
        assert tensor.is_cuda


@pytest.mark.parametrize("connection", ["adaptive", "nesterov"])
@pytest.mark.parametrize("attention", ["momentum", "heavy_ball", "softmax"])
def test_transformers(device, attention, connection):
    model = device.move(
        hbnode.nn.MomentumTransformer(7, 16, 4, 2, 24, attention=attention, connection=connection, dropout=0.0)
    )
    tokens = device.move(torch.randint(7, (3, 11)))
    before = device.synchronisations
    output = model(tokens, ignored_of(device))
    output.square().sum().backward()
    generated = model.generate(tokens, 3, temperature=0)
    assert device.synchronisations == before
    assert output.is_cuda
    assert generated.is_cuda
    assert all(p.grad.is_cuda for p in model.parameters() if p.grad is not None)
