"""momentum_attention against its recurrence: values, gradients, masks, states, number formats, errors."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import hbnode
from tests import reference_attention as reference

attend, State = hbnode.nn.functional.momentum_attention, hbnode.nn.functional.MomentumAttentionState
causal_or_not = pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])


def make(batch=2, heads=3, length=37, dim=4, value_dim=5, *, state=False, dtype=torch.float64, seed=0):
    """q, k, v, and a state or None; all require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    qkv = draw(batch, heads, length, dim), draw(batch, heads, length, dim), draw(batch, heads, length, value_dim)
    if not state:
        return *qkv, None
    s, p, z = draw(batch, heads, dim, value_dim), draw(batch, heads, dim, value_dim), draw(batch, heads, dim)
    return *qkv, State(s, p, z)


def make_mask(batch=2, length=37):
    """Ignored keys anywhere, the first of one sequence and the last of the other among them."""
    ignored = torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 0.4
    ignored[0, 0] = ignored[-1, -1] = True
    return ignored


def assert_agree(found, expected, leaves):
    """Values agree to 1e-10 and gradients to 1e-9, relative to the largest."""
    torch.manual_seed(2)
    weights = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(x, leaves, weights, allow_unused=True, materialize_grads=True) for x in (found, expected)
    ]
    for pairs, tolerance in ((zip(found, expected, strict=True), 1e-10), (zip(*gradients, strict=True), 1e-9)):
        for x, y in pairs:
            assert (x - y).abs().max() <= tolerance * (1 + y.abs().max())


RATES = {"0": (0.0, 0.7), "0.999": (0.999, 0.7), "heads": ([0.0, 0.6, 0.999], [1.0, 0.5, 0.1]), "one": (0.9, 0.8)}


@pytest.mark.sparse
@causal_or_not
@pytest.mark.parametrize(("masked", "with_state"), [(False, False), (True, True)])
@pytest.mark.parametrize("rates", RATES)
def test_the_recurrence(rates, with_state, masked, causal):
    """Numbers, and learned rates of all heads or each, whose gradients agree too."""
    learned = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in RATES[rates]]
    keep = {"one": (0, 1), "heads": (0, 1)}.get(rates, ())
    beta, gamma = (learned[i] if i in keep else RATES[rates][i] for i in range(2))
    for length, chunk_size in ((1, 8), (3, 8), (12, 4), (37, 1), (37, 16)):
        q, k, v, state = make(length=length, state=with_state)
        ignored = make_mask(length=length) if masked else None
        options = {"key_padding_mask": ignored, "initial_state": state, "return_state": True, "causal": causal}
        out, after = attend(q, k, v, momentum=beta, step_size=gamma, chunk_size=chunk_size, **options)
        expected, expected_state = reference.momentum_attention(q, k, v, beta, gamma, causal, ignored, state=state)
        assert_agree((out, *after), (expected, *expected_state), (q, k, v, *(learned[i] for i in keep), *(state or ())))


@causal_or_not
def test_the_slope_of_the_feature_map_at_zero_is_one(causal):
    """elu and its parts have kinks there; far below it is exp(x), and far above nothing overflows."""
    for value in (0.0, -0.0, -60.0, 800.0):
        q, k, v, _ = make(length=5)
        q, k = (torch.full_like(x, value, requires_grad=True) for x in (q, k))
        out, after = attend(q, k, v, momentum=0.9, causal=causal, return_state=True)
        expected, expected_state = reference.momentum_attention(q, k, v, 0.9, causal=causal)
        assert_agree((out, *after), (expected, *expected_state), (q, k, v))


# Masks and states


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_ignoring_all_keys_leaves_the_state(momentum):
    for length in (1, 37):
        q, k, v, state = make(length=length, state=True)
        ignored = torch.ones(2, length, dtype=torch.bool)
        options = {"momentum": momentum, "key_padding_mask": ignored}
        _, after = attend(q, k, v, initial_state=state, return_state=True, **options)
        assert all(torch.equal(x, y) for x, y in zip(after, state, strict=True))
        assert torch.equal(attend(q, k, v, **options), torch.zeros_like(v))


@causal_or_not
def test_masked_positions_may_hold_nan(causal):
    ignored, results = make_mask(), []
    for filling in (0.5, torch.nan):
        q, k, v = (x.detach().masked_fill(ignored[:, None, :, None], filling).requires_grad_() for x in make()[:3])
        q = q if causal else make()[0]
        out, state = attend(q, k, v, momentum=0.9, causal=causal, key_padding_mask=ignored, return_state=True)
        out = out.transpose(1, 2)[~ignored]
        grads = torch.autograd.grad(out.square().sum() + state.s.sum(), (q, k, v))
        results.append([out, *state, *grads])
    assert_close(*results)


@pytest.mark.sparse
@causal_or_not
@pytest.mark.parametrize("length", [1, 9])
def test_outputs_before_the_first_key_are_zero_without_eps(length, causal):
    """As in the limit of small ε, with finite gradients."""
    q, k, v, _ = make(length=length)
    ignored = torch.zeros(2, length, dtype=torch.bool)
    ignored[0, :3] = ignored[1] = True
    out, limit = (attend(q, k, v, momentum=0.9, causal=causal, key_padding_mask=ignored, eps=x) for x in (0.0, 1e-14))
    assert_close(out, limit)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads)


# Dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype):
    q, k, v, _ = (None if x is None else x.detach().to(dtype).requires_grad_() for x in make(length=500))
    out, state = attend(q, k, v, momentum=0.99, return_state=True)
    assert {x.dtype for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))} == {dtype}
    expected, expected_state = attend(q.double(), k.double(), v.double(), momentum=0.99, return_state=True)
    assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    for x, y in zip(state, expected_state, strict=True):
        assert_close(x, y.float(), rtol=1e-5, atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize("momentum", [0.6, 0.99, 0.999])
def test_float32_is_accurate_near_momentum_one(momentum):
    """With autocast too, which changes nothing."""
    q, k, v, _ = make(1, 2, 3000, 16, 16)
    single, exact = attend(q.float(), k.float(), v.float(), momentum=momentum), attend(q, k, v, momentum=momentum)
    assert (single - exact).norm() <= 2e-6 * exact.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(q.float(), k.float(), v.float(), momentum=momentum), single)


# Derivatives and graphs


@pytest.mark.sparse
@causal_or_not
@pytest.mark.parametrize("ignored", [None, torch.tensor([[False, True, False, False]])], ids=["all", "masked"])
def test_second_derivatives(ignored, causal):
    """Of all arguments, also at a momentum of 0."""
    q, k, v, state = make(1, 2, 4, 1, 2, state=True)
    rates = torch.tensor([[0.0, 0.9], [1.0, 0.5]], dtype=torch.float64).unbind()
    options = {"causal": causal, "return_state": True, "chunk_size": 3, "key_padding_mask": ignored}

    def function(q, k, v, momentum, step_size, *state):
        out, after = attend(q, k, v, momentum=momentum, step_size=step_size, initial_state=State(*state), **options)
        return out, *after

    inputs = (q, k, v, *(rate.requires_grad_() for rate in rates), *state)
    assert gradcheck(function, inputs, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"momentum": 1.0}, "momentum must be a number, 0 <= momentum < 1, got 1.0. Fix"),
        ({"momentum": torch.zeros(5)}, r"momentum must be .* \(3,\), one per head"),
        ({"step_size": torch.ones(3).long()}, r"Fix: step_size.float\(\)"),
        ({"q": torch.zeros(2, 3, 9, 4).double()}, "causal=False"),
        ({"initial_state": State(*[torch.zeros(1, 3, 4, 5)] * 2, torch.zeros(1, 3, 4))}, "initial_state.s must be"),
    ],
)
def test_wrong_arguments_are_refused(changed, message):
    q, k, v, _ = make()
    with pytest.raises((ValueError, TypeError), match=message):
        attend(**{"q": q, "k": k, "v": v, "momentum": 0.9} | changed)
