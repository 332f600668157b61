"""momentum_attention in derivatives of derivatives, under torch.func, in programs, and called as users call."""

import copy
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import hbnode
from hbnode.nn.attention.momentum_loop import attend_in_order
from tests.nn.test_momentum_attention import holes, make
from tests.pretend_device import pretended_device

causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])


def attend(q, k, v, **options):
    return hbnode.nn.functional.momentum_attention(q, k, v, **{"momentum": 0.9, "chunk_size": 8} | options)


# Derivatives


@causal_or_not
@pytest.mark.parametrize("masked", [False, True], ids=["all", "holes"])
def test_second_derivatives(masked, causal):
    """In all arguments, at a momentum of 0 too."""
    q, k, v, state = make(1, 2, 4, 1, 2, state=True)
    momentum = torch.tensor([0.0, 0.9], dtype=torch.float64, requires_grad=True)
    step_size = torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True)
    ignored = torch.tensor([[False, True, False, False]]) if masked else None

    def function(q, k, v, momentum, step_size, *state):
        given = {"momentum": momentum, "step_size": step_size, "initial_state": state, "chunk_size": 3}
        out, after = attend(q, k, v, causal=causal, key_padding_mask=ignored, return_state=True, **given)
        return out, *after

    inputs = (q, k, v, momentum, step_size, *state)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_tensor_as_queries_keys_and_values(momentum):
    x = make(1, 1, 4, 2)[0]

    def function(x):
        return attend(x, x, x, momentum=momentum, chunk_size=3)

    assert gradcheck(function, (x,), check_forward_ad=True)
    assert gradgradcheck(function, (x,))


def test_frozen_inputs():
    q, k, v, state = make(state=True)
    whole = torch.autograd.grad(attend(q, k, v, initial_state=state).sum(), (q, k, v, *state), allow_unused=True)
    for i, wanted in enumerate((q, k, v, *state)):
        given = [x if x is wanted else x.detach() for x in (q, k, v, *state)]
        out = attend(*given[:3], initial_state=given[3:])
        assert_close(torch.autograd.grad(out.sum(), wanted)[0], whole[i])
        (first,) = torch.autograd.grad(attend(*given[:3], initial_state=given[3:]).sum(), wanted, create_graph=True)
        assert_close(first, whole[i])


def test_the_state_alone_has_a_gradient():
    q, k, v, _ = make()
    _, state = attend(q, k, v, return_state=True)
    found = torch.autograd.grad(sum(x.sum() for x in state), (q, k, v), allow_unused=True)
    assert found[0] is None or not found[0].any()
    assert found[1].any()
    assert found[2].any()


def test_transforms():
    q, k, v, _ = (None if x is None else x.detach() for x in make(length=11))

    def loss(q, k, v):
        return attend(q, k, v).square().sum()

    expected = torch.autograd.functional.jacobian(loss, (q, k, v))
    assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), expected)
    each = torch.func.vmap(torch.func.grad(lambda *qkv: loss(*(x[None] for x in qkv)), argnums=(0, 1, 2)))
    assert_close(each(q, k, v), expected)
    _, forward = torch.func.jvp(loss, (q, k, v), (q, k, v))
    assert_close(forward, sum((g * x).sum() for g, x in zip(expected, (q, k, v), strict=True)))


# Programs


def test_a_compiled_graph():
    q, k, v, _ = (None if x is None else x.detach().requires_grad_() for x in make(length=20))
    program = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for ignored in (None, holes(2, 20)):
        found, expected = (f(q, k, v, key_padding_mask=ignored, return_state=True) for f in (program, attend))
        assert_close(found, expected)
        gradients = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out, _ in (found, expected))
        assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # inductor's own warnings are not ours
def test_compiled_code():
    q, k, v, _ = (None if x is None else x.detach().float().requires_grad_() for x in make(2, 4, 200, 16, 16))
    program = torch.compile(attend, fullgraph=True)
    out, expected = program(q, k, v), attend(q, k, v)
    assert_close(out, expected)
    assert_close(*(torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (out, expected)))


class Module(torch.nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v, return_state=True)


def test_export_with_an_open_length():
    q, k, v, _ = (None if x is None else x.detach() for x in make(length=20))
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(Module(), (q, k, v), dynamic_shapes=[{2: length}] * 3).module()
    for n in (2, 15, 20):
        assert_close(
            program(*(x[:, :, :n] for x in (q, k, v))), attend(*(x[:, :, :n] for x in (q, k, v)), return_state=True)
        )
    fixed = torch.export.export(Module(), (q, k, v)).module()
    assert_close(fixed(q, k, v), attend(q, k, v, return_state=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_traced_program():
    q, k, v, _ = (None if x is None else x.detach() for x in make(length=20))
    with hbnode._torch.checking_shapes():
        program = torch.jit.trace(lambda q, k, v: attend(q, k, v), (q, k, v))
    assert_close(program(q, k, v), attend(q, k, v))


# Habits


@causal_or_not
def test_strides(causal):
    """As modules have them: heads are a part of the features."""
    x = torch.randn(2, 37, 3 * 3 * 4, dtype=torch.float64, requires_grad=True)
    q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in x.chunk(3, -1))
    found, expected = attend(q, k, v, causal=causal), attend(*(z.contiguous() for z in (q, k, v)), causal=causal)
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in (found, expected)))
    one = torch.randn(1, 1, 37, 4, dtype=torch.float64, requires_grad=True)
    shared, repeated = one.expand(2, 3, 37, 4), one.repeat(2, 3, 1, 1)
    assert_close(*(torch.autograd.grad(attend(q, z, z, causal=causal).sum(), one) for z in (shared, repeated)))


def test_autocast():
    q, k, v, _ = (None if x is None else x.detach().float().requires_grad_() for x in make())
    with torch.autocast("cpu", torch.bfloat16):
        out, state = attend(q, k, v, return_state=True)
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert out.dtype == torch.float32
        assert_close(out, attend(q, k, v))
        half = attend(*(x.bfloat16() for x in (q, k, v)), initial_state=state)
        assert half.dtype == torch.bfloat16
    assert {x.dtype for x in state} == {torch.float32}
    assert_close(gradient, torch.autograd.grad(attend(q, k, v).sum(), q)[0])


def test_inference_mode():
    q, k, v, _ = make()
    with torch.inference_mode():
        out = attend(q, k, v)
    assert_close(out, attend(q, k, v).detach())


def test_copies_of_a_state():
    q, k, v, _ = (None if x is None else x.detach() for x in make())
    out, state = attend(q, k, v, return_state=True)
    expected = attend(q, k, v, initial_state=state)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), tuple(state), list(state)):
        assert_close(attend(q, k, v, initial_state=copied), expected)
    assert repr(state).startswith("MomentumAttentionState(s=")
    assert out.shape == (*state.s.shape[:2], 37, 5)


@causal_or_not
@pytest.mark.parametrize("momentum", [0.0, 0.9, "tensor"])
def test_a_device(momentum, causal):
    with pretended_device() as device:
        q, k, v, state = (x if x is None else device.move(x.detach()).requires_grad_() for x in (*make()[:3], None))
        state = [device.move(x.detach()) for x in make(state=True)[3]]
        momentum = device.move(torch.full((3,), 0.9)).requires_grad_() if momentum == "tensor" else momentum
        before = device.synchronisations
        out, after = attend(
            q,
            k,
            v,
            momentum=momentum,
            causal=causal,
            key_padding_mask=device.move(holes()),
            initial_state=state,
            return_state=True,
        )
        out.sum().backward()
        single = [x[:, :, :1].detach() for x in (q, k, v)]
        _, after = attend(*single, momentum=momentum, initial_state=after, return_state=True)
        assert device.synchronisations == before
        for x in (out, *after, q.grad, k.grad, v.grad):
            assert x.is_cuda


def test_the_loop_on_a_device_keeps_no_scores():
    """There it recomputes the plain form in the backward pass."""
    with pretended_device() as device:
        q, k, v = (device.move(x.detach()).requires_grad_() for x in make()[:3])
        state = hbnode.nn.functional.MomentumAttentionState(*(device.move(x.detach()) for x in make(state=True)[3]))
        out, _ = attend_in_order(q, k, v, (0.9, 1.0), state, None, eps=1e-6, chunk_size=8)
        assert out.grad_fn.next_functions
        out.sum().backward()
        assert q.grad.is_cuda


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_of_many_outputs_at_once(momentum):
    qkv = torch.randn(3, 1, 2, 5, 3, dtype=torch.float64).unbind()

    def function(*x):
        return hbnode.nn.functional.momentum_attention(*x, momentum=momentum, chunk_size=2)

    expected = torch.autograd.functional.jacobian(function, qkv)
    assert_close(torch.autograd.functional.jacobian(function, qkv, vectorize=True), expected)
