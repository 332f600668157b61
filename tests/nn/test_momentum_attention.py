"""momentum_attention beside its plain twins, and what it refuses."""

import pytest
import torch
from torch.testing import assert_close

import hbnode
from hbnode.nn.attention.momentum_loop import attend_in_order
from hbnode.nn.attention.momentum_plain import attend
from tests import reference_attention as reference


def make(batch=2, heads=3, length=37, dim=4, value_dim=5, *, state=False, dtype=torch.float64, seed=0):
    """q, k, v, and a state or None; all want gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    qkv = draw(batch, heads, length, dim), draw(batch, heads, length, dim), draw(batch, heads, length, value_dim)
    if not state:
        return *qkv, None
    s, p, z = draw(batch, heads, dim, value_dim), draw(batch, heads, dim, value_dim), draw(batch, heads, dim)
    return *qkv, (s, p, z)


def holes(batch=2, length=37):
    """Holes anywhere, the first key of one sequence ignored, the last of the other."""
    ignored = torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 0.4
    ignored[0, 0] = ignored[-1, -1] = True
    return ignored


def agree(found, expected, leaves):
    """Values to 1e-10 and gradients to 1e-9, relative to the largest; no gradient is one of zero."""
    torch.manual_seed(2)
    weights = [torch.randn_like(x) for x in expected]
    gradients = [torch.autograd.grad(x, leaves, weights, allow_unused=True) for x in (found, expected)]
    for x, y in zip(found, expected, strict=True):
        assert (x - y).abs().max() <= 1e-10 * (1 + y.abs().max())
    for x, y in zip(*gradients, strict=True):
        x = torch.zeros_like(y) if x is None else x
        assert (x - y).abs().max() <= 1e-9 * (1 + y.abs().max())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "holes"])
@pytest.mark.parametrize("carried", [False, True], ids=["start", "carried"])
@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.99, 0.999])
def test_the_recurrence(momentum, carried, masked, causal):
    for chunk_size in (1, 16, 64):
        q, k, v, state = make(state=carried)
        ignored = holes() if masked else None
        given = {"key_padding_mask": ignored, "initial_state": state, "return_state": True, "causal": causal}
        out, after = hbnode.nn.functional.momentum_attention(
            q, k, v, momentum=momentum, step_size=0.7, chunk_size=chunk_size, **given
        )
        expected, expected_state = reference.momentum_attention(q, k, v, momentum, 0.7, causal, ignored, state=state)
        agree((out, *after), (expected, *expected_state), (q, k, v, *(state or ())))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "holes"])
def test_rates_of_each_head_learn(masked, causal):
    q, k, v, state = make(state=True)
    momentum = torch.tensor([0.0, 0.6, 0.999], dtype=torch.float64, requires_grad=True)
    step_size = torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    shared = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    ignored = holes() if masked else None
    given = {"causal": causal, "key_padding_mask": ignored, "initial_state": state, "return_state": True}
    for beta, gamma in ((momentum, step_size), (momentum, 0.7), (0.9, step_size), (0.0, step_size), (shared, shared)):
        out, after = hbnode.nn.functional.momentum_attention(
            q, k, v, momentum=beta, step_size=gamma, chunk_size=8, **given
        )
        expected, expected_state = reference.momentum_attention(q, k, v, beta, gamma, causal, ignored, state=state)
        learned = {x for x in (beta, gamma) if isinstance(x, torch.Tensor)}
        agree((out, *after), (expected, *expected_state), (q, k, v, *learned, *state))


@pytest.mark.parametrize("form", [attend, attend_in_order], ids=["plain", "loop"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "holes"])
@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.999, "learned"])
def test_both_forms(momentum, masked, form):
    """Many sequences, so that the loop takes them in several parts; and lengths with and without a rest."""
    rates = (momentum, 0.7)
    if momentum == "learned":
        rates = tuple(
            torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([0.0, 0.6, 0.99], [1.0, 0.5, 2])
        )
    for length, chunk_size in ((11, 4), (12, 4), (3, 8)):
        q, k, v, state = make(23, 3, length, state=True)
        ignored = holes(23, length) if masked else None
        options = {"eps": 1e-6, "chunk_size": chunk_size}
        out, after = form(q, k, v, rates, hbnode.nn.functional.MomentumAttentionState(*state), ignored, **options)
        expected, expected_state = reference.momentum_attention(q, k, v, *rates, True, ignored, state=state)
        leaves = (q, k, v, *(rates if momentum == "learned" else ()), *state)
        agree((out, *after), (expected, *expected_state), leaves)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.9, 0.999])
def test_the_closed_forms(momentum, causal):
    q, k, v, _ = make(1, 1)
    out = hbnode.nn.functional.momentum_attention(q, k, v, momentum=momentum, causal=causal)
    assert_close(out[0, 0], reference.closed_form(q[0, 0], k[0, 0], v[0, 0], momentum, causal=causal))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
def test_padding_is_as_a_shorter_sequence(causal):
    q, k, v, _ = make()
    lengths = torch.tensor([37, 21])
    ignored = torch.arange(37) >= lengths[:, None]
    with torch.no_grad():
        k[1, :, 21:], v[1, :, 21:] = torch.nan, torch.nan
        out, state = hbnode.nn.functional.momentum_attention(
            q, k, v, momentum=0.9, causal=causal, key_padding_mask=ignored, return_state=True
        )
        for i, length in enumerate(lengths):
            alone, after = hbnode.nn.functional.momentum_attention(
                *(x[i : i + 1, :, :length] for x in (q, k, v)), momentum=0.9, causal=causal, return_state=True
            )
            assert_close(out[i : i + 1, :, :length], alone)
            for x, y in zip(state, after, strict=True):
                assert_close(x[i : i + 1], y)


def test_a_mask_that_ignores_everything_leaves_the_state():
    q, k, v, state = make(state=True)
    ignored = torch.ones(2, 37, dtype=torch.bool)
    _, after = hbnode.nn.functional.momentum_attention(
        q, k, v, momentum=0.9, key_padding_mask=ignored, initial_state=state, return_state=True
    )
    for x, y in zip(after, state, strict=True):
        assert_close(x, y, rtol=0, atol=0)
    out = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9, key_padding_mask=ignored)
    assert torch.equal(out, torch.zeros_like(out))


def test_queries_of_another_length_read_the_whole():
    q, k, v, _ = make()
    out = hbnode.nn.functional.momentum_attention(q[:, :, :9], k, v, momentum=0.9, causal=False)
    assert_close(out, hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9, causal=False)[:, :, :9])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
@pytest.mark.parametrize("size", [(0, 37), (2, 0)], ids=["batch", "length"])
def test_empty(size, causal):
    q, k, v, state = make(*size[:1], 3, size[1], state=True)
    out, after = hbnode.nn.functional.momentum_attention(
        q, k, v, momentum=0.9, causal=causal, initial_state=state, return_state=True
    )
    assert out.shape == (*q.shape[:3], 5)
    (out.sum() + sum(x.sum() for x in after)).backward()
    if size[1] == 0:
        assert all(torch.equal(x, y) for x, y in zip(after, state, strict=True))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
def test_the_slope_of_the_feature_map_at_zero(causal):
    """It is 1 there, where elu and its parts have kinks, and exp(x) far below; far above nothing overflows."""
    for value in (0.0, -0.0, -60.0, 800.0):
        q, k, v, _ = make(length=5)
        q, k = (torch.full_like(x, value, requires_grad=True) for x in (q, k))
        out, after = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9, causal=causal, return_state=True)
        expected, expected_state = reference.momentum_attention(q, k, v, 0.9, causal=causal)
        agree((out, *after), (expected, *expected_state), (q, k, v))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_parts_continue_the_sequence(momentum):
    """Steps of one token, a single token first, and several tokens after the first part: none drops the state."""
    q, k, v, _ = make()
    ignored = holes()
    given = {"momentum": momentum, "return_state": True, "chunk_size": 8}
    whole, expected = hbnode.nn.functional.momentum_attention(q, k, v, key_padding_mask=ignored, **given)
    for sizes in ([1] * 37, [1, 36], [20, 17], [30, 1, 1, 5]):
        state, outputs = None, []
        for q_i, k_i, v_i, mask in zip(*(x.split(sizes, 2) for x in (q, k, v)), ignored.split(sizes, 1), strict=True):
            before = None if state is None else [x.clone() for x in state]
            out, after = hbnode.nn.functional.momentum_attention(
                q_i, k_i, v_i, key_padding_mask=mask, initial_state=state, **given
            )
            outputs.append(out)
            assert before is None or all(torch.equal(*pair) for pair in zip(before, state, strict=True))
            state = after
        assert_close(torch.cat(outputs, 2), whole)
        assert_close(tuple(state), tuple(expected))


def test_a_mask_on_a_batch_of_one():
    q, k, v, _ = make(1)
    ignored = holes(1)
    out = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9, key_padding_mask=ignored)
    expected, _ = reference.momentum_attention(q, k, v, 0.9, ignored=ignored)
    assert_close(out, expected)


def test_momentum_zero_is_linear_attention():
    q, k, v, _ = make()
    phi_q, phi_k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    weights = (phi_q @ phi_k.mT).tril()
    expected = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
    assert_close(hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.0), expected)
    assert_close(hbnode.nn.functional.momentum_attention(q, k, v, momentum=torch.zeros(3)), expected)
    assert_close(hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.0, step_size=10.0), 10 * expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32(dtype):
    q, k, v, _ = (None if x is None else x.detach().to(dtype).requires_grad_() for x in make(length=500))
    out, state = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.99, return_state=True)
    assert {x.dtype for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))} == {dtype}
    assert {x.dtype for x in state} == {torch.float32}
    wide = [x.detach().double() for x in (q, k, v)]
    expected, expected_state = hbnode.nn.functional.momentum_attention(*wide, momentum=0.99, return_state=True)
    assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    for x, y in zip(state, expected_state, strict=True):
        assert_close(x.double(), y, rtol=1e-5, atol=1e-5 * y.abs().max().item())
    _, after = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.99, initial_state=state, return_state=True)
    assert {x.dtype for x in after} == {torch.float32}


@pytest.mark.parametrize("momentum", [0.6, 0.99, 0.999])
def test_float32_is_exact_near_momentum_one(momentum):
    q, k, v, _ = make(1, 2, 3000, 16, 16)
    exact = hbnode.nn.functional.momentum_attention(q, k, v, momentum=momentum)
    found = hbnode.nn.functional.momentum_attention(q.float(), k.float(), v.float(), momentum=momentum)
    assert (found - exact).norm() <= 2e-6 * exact.norm()


def test_a_constant_momentum_is_not_rounded():
    """The number 0.9 in float32 is off by 2e-8."""
    q, k, v, _ = make()
    expected, _ = reference.momentum_attention(q, k, v, 0.9)
    assert_close(hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9), expected, rtol=1e-13, atol=1e-13)
    momentum = torch.full((3,), 0.9, dtype=torch.float64)
    assert_close(hbnode.nn.functional.momentum_attention(q, k, v, momentum=momentum), expected, rtol=1e-13, atol=1e-13)


def test_what_is_kept_between_the_passes():
    """Beside the inputs the output, a denominator for each query, and the state before the first key."""
    q, k, v, _ = make(2, 3, 200, 8, 8)
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9)
    for x in (q, k, v):
        kept.pop(x.untyped_storage().data_ptr())
    state = 2 * 3 * 8 * (8 + 1 + 8)
    assert sum(kept.values()) <= 8 * (out.numel() + out.numel() // 8 + state)


BAD = {
    "momentum of one": ({"momentum": 1.0}, "momentum must be a number, 0 <= momentum < 1, got 1.0. Fix"),
    "momentum nan": ({"momentum": float("nan")}, "momentum must be a number"),
    "momentum of five heads": ({"momentum": torch.zeros(5)}, r"momentum must be .* \(3,\) with one for each head"),
    "negative step": ({"step_size": -1.0}, "step_size must be a number, 0 <= step_size"),
    "negative eps": ({"eps": -1.0}, "eps must be a number"),
    "chunk of zero": ({"chunk_size": 0}, "chunk_size must be an integer >= 1"),
    "square mask": ({"key_padding_mask": torch.ones(37, 37).bool()}, r"key_padding_mask must be bool \(2, 37\)"),
    "float mask": ({"key_padding_mask": torch.zeros(2, 37)}, r"key_padding_mask must be bool"),
    "state of another batch": (
        {"initial_state": (torch.zeros(1, 3, 4, 5), torch.zeros(1, 3, 4, 5), torch.zeros(1, 3, 4))},
        r"initial_state.s must be \(2, 3, 4, 5\), got \(1, 3, 4, 5\). Fix",
    ),
    "three axes": ({"q": torch.zeros(3, 37, 4)}, r"q must be \(batch, heads, length, dim\)"),
    "integers": ({"v": torch.zeros(2, 3, 37, 5).long()}, "v must be floating point"),
    "two dtypes": ({"q": torch.zeros(2, 3, 37, 4)}, "must have one dtype"),
    "fewer queries": ({"q": torch.zeros(2, 3, 9, 4).double()}, "Fix: causal=False"),
    "fewer heads of keys": ({"k": torch.zeros(2, 1, 37, 4).double()}, "Fix: repeat_interleave"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_refused(case):
    changed, message = BAD[case]
    q, k, v, _ = make()
    given = {"q": q, "k": k, "v": v, "momentum": 0.9} | changed
    with pytest.raises(ValueError, match=message):
        hbnode.nn.functional.momentum_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_a_state_that_is_none():
    q, k, v, _ = make()
    with pytest.raises(TypeError, match="initial_state must be a MomentumAttentionState"):
        hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9, initial_state=q)


def test_nan_under_the_mask_reaches_nothing():
    ignored = torch.zeros(2, 50, dtype=torch.bool)
    ignored[1, 20:40] = True
    results = []
    for filling in (0.5, torch.nan):
        torch.manual_seed(1)
        vectors = [torch.randn(2, 2, 50, 4, dtype=torch.float64) for _ in range(3)]
        x = [part.masked_fill(ignored[:, None, :, None], filling).requires_grad_() for part in vectors]
        out, state = hbnode.nn.functional.momentum_attention(
            *x, momentum=0.9, key_padding_mask=ignored, return_state=True
        )
        seen = out.transpose(1, 2)[~ignored]
        (seen.square().sum() + state.s.sum()).backward()
        results.append([seen, *state, *(each.grad for each in x)])
    for a, b in zip(*results, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b)


def test_second_derivatives_of_queries_alone():
    """The returned state does not depend on them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 3, dtype=torch.float64) for _ in range(3))
    q.requires_grad_()
    out, state = hbnode.nn.functional.momentum_attention(q, k, v, momentum=0.9, return_state=True)
    (first,) = torch.autograd.grad(out.sin().sum() + state.s.sin().sum(), q, create_graph=True)
    first.sum().backward()
    assert q.grad.abs().max() > 0


def test_another_default_device():
    q, k, v = torch.randn(3, 1, 2, 9, 3).unbind()
    for rate in (0.77, torch.tensor(0.77)):
        expected = hbnode.nn.functional.momentum_attention(q, k, v, momentum=torch.tensor(0.77))
        with torch.device("meta"):
            out = hbnode.nn.functional.momentum_attention(q, k, v, momentum=rate)
        assert_close(out, expected)
