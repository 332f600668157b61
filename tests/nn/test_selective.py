"""Selective oscillators: the scan and the layer against loops, stability, and errors."""

import copy

import pytest
import torch
from torch.nn import functional

import hbnode
from hbnode.nn._selective_scan import scan, scan_reference

KINDS = {"real": None, "swinging": (0.001, 0.25)}
kinds = pytest.mark.parametrize("frequency", KINDS.values(), ids=KINDS)


def make(*sizes, frequency=None, kind=hbnode.nn.Oscillators, **options):
    torch.manual_seed(0)
    return kind(*(sizes or (3, 4, 5)), selective=True, frequency=frequency, **options).double()


def series(batch=2, length=40, size=3, start=0.0):
    """Samples, and times of which a third repeats the time before."""
    t = start + (torch.rand(batch, length, dtype=torch.float64) * 3 - 1).relu().cumsum(1)
    return torch.randn(batch, length, size, dtype=torch.float64), t


def layer_loop(layer, x, t, mask=None):
    """Outputs of a layer, and real and imaginary parts of its last state, by the equations, sample by sample."""
    size, omega = layer.num_oscillators, torch.zeros(0) if layer.log_omega is None else layer.log_omega.exp()
    swinging = len(omega)
    select_a, select_w, select_f, select_g = layer.weight_select.split([size, swinging, size, size])
    a = w = p = q = x.new_zeros(len(x), size)
    still = x.new_zeros(len(x), size - swinging)
    drives, outputs = layer.weight_in.split(size), []
    for i in range(x.shape[1]):
        gap = (t[:, i] - t[:, max(i - 1, 0)]).unsqueeze(1)
        fall, c, s = (-a * gap).exp(), (w * gap).cos(), (w * gap).sin()
        p, q = fall * (c * p - s * q), fall * (s * p + c * q)
        seen = (torch.ones(len(x), 1, dtype=torch.bool) if mask is None else mask[:, i]).any(-1, keepdim=True)
        u = x[:, i] if mask is None else torch.where(mask[:, i], x[:, i], 0.0)
        keep = 1 / (1 + (layer.bias_forget + u @ select_f.T).exp())  # e^{-softplus}
        gate = torch.sigmoid(layer.bias_gate + u @ select_g.T)
        jump = [gate * (u @ drive.T) for drive in drives]
        p = torch.where(seen, keep * p + jump[0], p)
        q = torch.where(seen, keep * q + (jump[1] if len(jump) > 1 else 0.0), q)
        unit = functional.softplus(torch.tensor(-4.0, dtype=torch.float64))
        a = torch.where(seen, layer.log_decay.exp() * functional.softplus(u @ select_a.T - 4) / unit, a)
        now = torch.cat([2 * omega * torch.sigmoid(u @ select_w.T), still], 1)
        w = torch.where(seen, now, w)
        state = torch.cat([p, q] if len(drives) > 1 else [p], 1)
        outputs.append(state @ layer.weight_out.T + u @ layer.weight_skip.T)
    return torch.stack(outputs, 1), p, q if len(drives) > 1 else q[:, :0]


@pytest.mark.sparse
@pytest.mark.parametrize("kind", [torch.float64, torch.complex128])
@pytest.mark.parametrize("length", [1, 2, 7, 37, 64])
def test_scan_against_the_loop(kind, length):
    rho = -torch.rand(length, 2, 4, dtype=torch.float64) * torch.tensor([1e-4, 1.0, 40.0, 1e3])
    phi = 5 * torch.randn(length, 2, 4, dtype=torch.float64) if kind.is_complex else None
    b, start, weights = (torch.randn(n, 2, 4, dtype=kind) for n in (length, 1, length))
    tensors = [None if z is None else z.requires_grad_() for z in (rho, phi, b, start[0])]
    leaves, found = [z for z in tensors if z is not None], []
    for z in (scan(*tensors), scan_reference(None, *tensors)[0]):
        found.append((z, *torch.autograd.grad((z * weights).real.sum(), leaves)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.sparse
@kinds
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_layer_against_its_equations(frequency, is_masked):
    layer = make(frequency=frequency)
    x, t = series()
    x.requires_grad_()
    t.requires_grad_()
    mask = torch.rand(2, 40, 3) < 0.5 if is_masked else None
    weights = torch.randn(2, 40, 4, dtype=torch.float64)
    leaves = [x, t, *layer.parameters()]
    y, state = layer(x, t, mask=mask)
    found = []
    for z, p, q in ((y, state.v, state.x), layer_loop(layer, x, t, mask)):
        found.append((z, p, q, *torch.autograd.grad((z * weights).sum() + p.sum() + q.sum(), leaves)))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.sparse
@kinds
@pytest.mark.parametrize("strength", [1.0, 5.0])
def test_single_precision(frequency, strength):
    single = make(4, 4, 8, frequency=frequency).float()
    single.weight_select.data.mul_(strength)
    x, t = torch.randn(2, 3000, 4), 1e6 + (2 * torch.rand(2, 3000, dtype=torch.float64)).cumsum(1)
    found = []
    for layer in (single, copy.deepcopy(single).double()):
        y = layer(x.to(layer.weight_in.dtype), t)[0]
        grads = torch.autograd.grad(y.square().mean(), list(layer.parameters()))
        found.append([z.double() for z in (y, *grads)])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 3e-5 * other.abs().max()


def test_what_is_refused():
    (x, t), make_layer = series(), hbnode.nn.Oscillators
    unheld = hbnode.nn.OscillatorState(torch.zeros(2, 5), torch.zeros(2, 0), t[:, 0])
    for message, use in (
        ("needs noise=False, got True. Fix: leave noise out", lambda: make_layer(3, 3, selective=True, noise=True)),
        (r"frequency must be \(low, high\)", lambda: make_layer(3, 3, selective=True, frequency=(0.0, 1.0))),
        ("the state's held must have shape", lambda: make()(x, t, unheld)),
    ):
        with pytest.raises(ValueError, match=message):
            use()
