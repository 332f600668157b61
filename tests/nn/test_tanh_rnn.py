"""TanhRNN: its equation as a loop is the reference; it is called as torch.nn.RNN is."""

import copy
import pickle

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import hbnode
from hbnode.nn.recurrent import sparse_


def make(batch_first=True, dtype=torch.float64):
    torch.manual_seed(0)
    return hbnode.nn.TanhRNN(3, 5, batch_first, dtype=dtype)


def loop(rnn, x, h=None):
    """All h (batch, T, n) of x (batch, T, inputs); from h if it is given."""
    found = []
    for x_t in x.unbind(1):
        before = rnn.bias_init if h is None else h @ rnn.weight_hh.T
        h = torch.tanh(x_t @ rnn.weight_ih.T + rnn.bias + before)
        found.append(h)
    return torch.stack(found, 1)


@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("steps", [1, 6])
def test_the_loop_and_its_gradients(steps, continued):
    rnn = make()
    x = torch.randn(4, steps, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True) if continued else None
    leaves = [x, *rnn.parameters()] + ([h0] if continued else [])
    output, last = rnn(x, h0)
    expected = loop(rnn, x, h0[0] if continued else None)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(last, expected[:, -1:].transpose(0, 1))
    gradients = (
        torch.autograd.grad(z.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        for z in (output, expected)
    )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_layouts_and_parts():
    rnn, first = make(), make(batch_first=False)
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    output, _ = rnn(x)
    torch.testing.assert_close(first(x.transpose(0, 1))[0], output.transpose(0, 1))
    one, h = rnn(x[0])
    assert h.shape == (1, 5)
    torch.testing.assert_close(one, output[0])
    torch.testing.assert_close(rnn(x[0, 3:], rnn(x[0, :3])[1])[0], output[0, 3:])
    assert rnn(x[:0])[0].shape == (0, 6, 5)


def test_packed():
    rnn, lengths = make(), torch.tensor([2, 6, 4])
    sequences = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
    packed = pack_padded_sequence(pad_sequence(sequences, True), lengths, batch_first=True, enforce_sorted=False)
    output, last = rnn(packed)
    padded, (again, _) = pad_packed_sequence(output, batch_first=True)[0], rnn(packed, last)
    again, _ = pad_packed_sequence(again, batch_first=True)
    for k, x in enumerate(sequences):
        torch.testing.assert_close(padded[k, : len(x)], rnn(x)[0])
        torch.testing.assert_close(last[:, k], rnn(x)[1])
        torch.testing.assert_close(again[k, : len(x)], rnn(x, last[:, k])[0])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(4, 6, 2),), ValueError, "input_size=3"),
        ((torch.zeros(4, 6, 3), torch.zeros(4, 5)), ValueError, r"h0 must be \(1, 4, 5\), got \(4, 5\)"),
        ((torch.zeros(6, 3), torch.zeros(1, 1, 5)), ValueError, r"h0 must be \(1, 5\)"),
        ((torch.zeros(4, 6, 3), (torch.zeros(1, 4, 5),)), TypeError, "h0 must be a tensor"),
        ((torch.zeros(4, 6, 3).double(),), ValueError, "x must be torch.float32"),
    ],
    ids=["width", "state", "single state", "tuple", "dtype"],
)
def test_wrong_input(arguments, error, message):
    with pytest.raises(error, match=message):
        make(dtype=torch.float32)(*arguments)
    with pytest.raises(TypeError, match=r"batch_first must be True or False, got 2\. Fix: pass it by name"):
        hbnode.nn.TanhRNN(3, 5, 2)


def test_initial_weights():
    torch.manual_seed(0)
    rnn = hbnode.nn.TanhRNN(8, 200)
    assert ((rnn.weight_hh != 0).sum(1) == 15).all()
    assert ((rnn.weight_ih != 0).sum(0) == 15).all()
    assert rnn.weight_hh[rnn.weight_hh != 0].var().item() == pytest.approx(1 / 15, rel=0.1)
    assert rnn.weight_ih[rnn.weight_ih != 0].var().item() == pytest.approx(1, rel=0.3)
    assert rnn.bias.var().item() == pytest.approx(1 / 15, rel=0.3)
    assert (sparse_(torch.empty(4, 7), 15) != 0).all()
    assert not sparse_(torch.empty(4, 7), 3, std=0.0).any()
    for wrong in (lambda: sparse_(torch.empty(3)), lambda: sparse_(torch.empty(3, 3), 0)):
        with pytest.raises(ValueError, match=r"must be .*got .*Fix: |must be an integer >= 1"):
            wrong()
    for std in (-1.0, float("inf"), "1"):
        with pytest.raises(ValueError, match="std must be a number >= 0"):
            sparse_(torch.empty(3, 3), 1, std)


def test_copies_and_precision():
    rnn, x = make(), torch.randn(2, 4, 3, dtype=torch.float64)
    expected, _ = rnn(x)
    for copied in (copy.deepcopy(rnn), pickle.loads(pickle.dumps(rnn))):
        assert torch.equal(copied(x)[0], expected)
    assert repr(rnn) == "TanhRNN(3, 5, batch_first=True)"
    for dtype in (torch.float16, torch.bfloat16):
        found, _ = copy.deepcopy(rnn).to(dtype)(x.to(dtype))
        assert (found.double() - expected).abs().max() < 30 * torch.finfo(dtype).eps
    rnn, x = rnn.float(), x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, last = rnn(x)
        again, _ = rnn(x, last.bfloat16())
    assert found.dtype == again.dtype == torch.float32
    torch.testing.assert_close(found, rnn(x)[0])
