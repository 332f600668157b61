"""heavy_ball_memory against its recurrence: values, gradients, masks, gates, stability."""

import math
import sys
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

import hbnode
from hbnode.nn import _delta_rule as layout
from hbnode.nn._delta_rule import reference as chunkwise
from tests import reference_memory as reference

memory, State = hbnode.nn.functional.heavy_ball_memory, hbnode.nn.functional.HeavyBallMemoryState
F64 = torch.float64
every_delta = pytest.mark.parametrize("delta", ["decayed", "plain", False])


def make(batch=2, heads=3, length=23, dim=4, width=5, *, holes=False, state=False, delta="decayed"):
    """Inputs of heavy_ball_memory, all of which need a gradient."""
    torch.manual_seed(0)
    shape, names = (batch, heads, length), ("log_momentum", "log_decay", "step", "write")
    made = {"q": torch.randn(*shape, dim), "k": torch.randn(*shape, dim), "v": torch.randn(*shape, width)}
    made = {name: z.double() for name, z in made.items()} | {name: torch.rand(shape, dtype=F64) for name in names}
    made["k"], made["log_decay"] = normalize(made["k"], dim=-1), -made["log_decay"]
    made["log_momentum"] = -made["log_momentum"]
    made["step"] = (1 - made["log_momentum"].exp()) * made["step"]
    made = {name: z.requires_grad_() for name, z in made.items()} | {"delta": delta}
    if holes:
        made["key_padding_mask"] = torch.rand(batch, length) < 0.3
    if state:
        s, p = torch.randn(2, batch, heads, dim, width, dtype=F64)
        made["initial_state"] = State(s.requires_grad_(), p.requires_grad_())
    return made


def cast(made, dtype):
    """The inputs in another dtype, as leaves."""
    return {
        name: z.detach().to(dtype).requires_grad_() if isinstance(z, torch.Tensor) else z for name, z in made.items()
    }


def leaves(made):
    found = []
    for z in made.values():
        parts = z if isinstance(z, State) else [z]
        found += [x for x in parts if isinstance(x, torch.Tensor) and x.requires_grad]
    return found


def run(made, **options):
    out, state = memory(**made, return_state=True, **options)
    return out, *(z for z in state if z is not None)


def gradients(outputs, inputs, **options):
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, dtype=F64, generator=generator).to(y.dtype) for y in outputs]
    return torch.autograd.grad(outputs, inputs, weights, materialize_grads=True, **options)


def assert_near(got, wanted, tolerance):
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= tolerance * max(1.0, y.abs().max()) if y.numel() else True


def assert_matches(made, **options):
    """Values and all gradients are the recurrence's."""
    got, wanted = run(made, **options), reference.heavy_ball_memory(**made)
    assert_near(got, wanted[: len(got)], 1e-10)
    assert_near(gradients(got, leaves(made)), gradients(wanted[: len(got)], leaves(made)), 1e-9)


@pytest.fixture(params=["fast", "reference"])
def _each_form(request, monkeypatch):
    """The reference is what runs inside transforms and graphs, and for second derivatives."""
    if request.param == "reference":
        monkeypatch.setattr(sys.modules["hbnode.nn.heavy_ball_memory"], "chunkwise", chunkwise)


@pytest.mark.usefixtures("_each_form")
@every_delta
def test_the_recurrence(delta):
    """For any length and size of chunks."""
    for length, chunk in ((37, 1), (23, 5), (23, 64), (1, 8), (7, 8), (8, 8), (33, 8)):
        assert_matches(make(length=length, delta=delta, holes=True, state=True), chunk_size=chunk)


@pytest.mark.sparse
@every_delta
@pytest.mark.parametrize("at_once", [1, 4])
def test_any_number_of_chunks_and_sequences_at_once(monkeypatch, delta, at_once):
    monkeypatch.setattr(layout, "CHUNKS_AT_ONCE", at_once)
    assert_matches(make(3, 2, 27, delta=delta, holes=True, state=True), chunk_size=8)


@pytest.mark.sparse
@pytest.mark.usefixtures("_each_form")
@every_delta
@pytest.mark.parametrize("missing", [["log_decay"], ["step"], ["log_decay", "step", "write"], []])
@pytest.mark.parametrize("momentum", [True, False])
def test_gates_left_out(delta, missing, momentum):
    made = make(delta=delta, holes=True, length=13, heads=2)
    made |= dict.fromkeys(missing)
    made |= {} if momentum else {"log_momentum": None}
    assert_matches(made, chunk_size=4)


# Gates


def test_a_gate_for_each_head_or_for_all():
    made = make()
    for name in ("log_momentum", "log_decay", "step", "write"):
        per_head = made[name].detach()[0, :, 0].clone().requires_grad_()
        assert_matches({**made, name: per_head}, chunk_size=8)
        number = made[name][0, 0, 0].item()
        assert_near(run({**made, name: number}), reference.heavy_ball_memory(**{**made, name: number}), 1e-10)


@pytest.mark.sparse
@pytest.mark.usefixtures("_each_form")
@every_delta
@pytest.mark.parametrize("name", ["log_momentum", "log_decay"])
def test_gates_of_zero_have_finite_gradients(delta, name):
    made = make(delta=delta, holes=True, state=True)
    zero = torch.rand(2, 3, 23, generator=torch.Generator().manual_seed(3)) < 0.4
    made[name] = made[name].detach().masked_fill(zero, -math.inf).requires_grad_()
    for step in (made["step"], None):
        made["step"] = step
        assert_matches(made, chunk_size=8)
        assert all(z.isfinite().all() for z in gradients(run(made), leaves(made)))


@pytest.mark.sparse
@pytest.mark.usefixtures("_each_form")
@every_delta
@pytest.mark.parametrize(("momentum", "decay"), [(-0.05, -0.05), (-0.05, -0.5), (-4.0, -4.0)])
def test_float32_keeps_its_digits(delta, momentum, decay):
    """A difference of cumulative sums in their place loses them all: 8e-6, .03 and NaN in fla-core 0.6.0."""
    made = make(1, 2, 256, 16, 16, delta=delta)
    log_momentum, log_decay = (2 * mean * torch.rand(1, 2, 256, dtype=F64) for mean in (momentum, decay))
    made |= {"log_momentum": log_momentum.clamp(-4), "log_decay": log_decay.clamp(-4)}
    made["step"] = -torch.expm1(made["log_momentum"])
    single = cast(made, torch.float32)
    wanted = reference.heavy_ball_memory(**cast(single, F64))
    for got, truth in zip(run(single), wanted, strict=True):
        assert (got.double() - truth).norm() <= 1e-6 * truth.norm()


# States and masks


LENGTHS = (3, 0, 17, 40, 1, 19, 2, 25)
ENDS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]


@pytest.mark.sparse
@pytest.mark.usefixtures("_each_form")
@every_delta
@pytest.mark.parametrize("momentum", [True, False])
def test_packed_sequences(delta, momentum):
    """As a call for each of the sequences, with holes and states."""
    made = make(1, length=ENDS[-1], holes=True, delta=delta)
    tensors = {name: z for name, z in made.items() if isinstance(z, torch.Tensor)}
    s, p = torch.randn(2, len(LENGTHS), 3, 4, 5, dtype=F64)
    states = State(s.requires_grad_(), p.requires_grad_())
    rest, each = {"delta": delta} | ({} if momentum else {"log_momentum": None}), []
    for i, (start, end) in enumerate(pairwise(ENDS)):
        cut = {name: z[..., start:end] if z.dim() < 4 else z[:, :, start:end] for name, z in tensors.items()}
        each.append(run(cut | rest | {"initial_state": states.map(lambda z, i=i: z[i : i + 1])}, chunk_size=16))
    wanted = [torch.cat(parts, 0 if i else 2) for i, parts in enumerate(zip(*each, strict=True))]
    made |= rest | {"initial_state": states}
    got = run(made, cu_seqlens=torch.tensor(ENDS, dtype=torch.int32), chunk_size=16)
    assert_near(got, wanted, 1e-12)
    assert_near(gradients(got, leaves(made)), gradients(wanted, leaves(made)), 1e-12)


# Dtypes, layouts, transforms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32_and_autocast_changes_nothing(dtype):
    half = cast(make(1, 2, 200, 16, 16), dtype)
    wanted, *wanted_state = run(cast(half, torch.float32))
    out, *state = run(half)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same, *_ = run(cast(half, torch.float32))
    assert torch.equal(out, wanted.to(dtype))
    assert torch.equal(same, wanted)
    assert all(z.dtype == torch.float32 and torch.equal(z, y) for z, y in zip(state, wanted_state, strict=True))


@pytest.mark.parametrize("momentum", [-0.3, None])
def test_inputs_that_need_no_gradient(momentum):
    """Each on its own: the others are constants, and a constant gate is a number."""
    made = make(holes=True) | {"log_momentum": momentum, "log_decay": -0.2, "step": 0.1, "write": 0.5}
    wanted = gradients(run(made), leaves(made))
    for name, expected in zip(("q", "k", "v"), wanted, strict=True):
        frozen = {other: z.detach() if other in "qkv" and other != name else z for other, z in made.items()}
        assert_near(gradients(run(frozen), [made[name]]), [expected], 1e-12)
    with torch.no_grad():
        assert_near(run(made), [y.detach() for y in run(made)], 0.0)


def test_gradients_of_one_output():
    """Of the outputs, S or P alone, a second time, and with autocast on in the backward pass."""
    made = make(length=20, holes=True, state=True)
    for got, wanted in zip(run(made, chunk_size=8), reference.heavy_ball_memory(**made), strict=True):
        expected = gradients([wanted], leaves(made), retain_graph=True)
        assert_near(gradients([got], leaves(made), retain_graph=True), expected, 1e-9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_near(gradients([got], leaves(made), retain_graph=True), expected, 1e-9)


def as_function(made, **options):
    """The memory as a function of its tensors, and these."""
    names = [name for name in made if name not in ("delta", "initial_state")]

    def function(*tensors):
        given = dict(zip(names, tensors, strict=False)) | {"initial_state": State(*tensors[len(names) :])}
        return run(made | given, **options)

    return function, tuple(leaves(made))


@every_delta
def test_twice_differentiable(delta):
    """The first derivatives by the fast form's VJP, the second by the reference."""
    given = as_function(make(1, 1, 4, 2, 1, delta=delta, state=True), chunk_size=3)
    assert torch.autograd.gradcheck(*given, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(*given, fast_mode=True)


def test_gradients_of_many_outputs_at_once():
    function, inputs = as_function(make(1, 2, 5, 3, 2, state=True))
    found, wanted = (
        torch.autograd.functional.jacobian(lambda *x: function(*x)[0], inputs, vectorize=x) for x in (True, False)
    )
    assert_near(found, wanted, 1e-12)


# Graphs


def test_the_operator_is_described_to_graphs_as_it_is():
    """Shapes, strides, aliases and gradients, by the checks of torch.library."""
    operator = torch.ops.hbnode.heavy_ball_memory.default
    made = make(2, 2, 13, state=True)
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in leaves(made)]
    tensors = [x.detach().requires_grad_() for x in tensors]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, ("decayed", 8, True, *tensors, None), test_utils=tests)
    q, k, v, s, _ = make(1, 2, 13)["q"], *tensors[1:3], *tensors[-2:]
    packed = [x[:1].detach().requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, 5, 13])
    torch.library.opcheck(operator, ("", 8, False, *packed, *[None] * 4, s, None, ends), test_utils=tests)


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 3, 22, 4)}, "a key and a value for each query"),
        ({"v": torch.zeros(2, 3, 23, 5).long()}, "v must be floating point"),
        ({"log_momentum": torch.zeros(2, 23, 3)}, r"Fix: log_momentum.transpose\(1, 2\)"),
        ({"log_decay": torch.zeros(2, 3, 23, 1)}, r"Fix: log_decay.squeeze\(-1\)"),
        ({"step": torch.zeros(2, 3, 23).long()}, r"step must be floating point.*Fix: step.to\("),
        ({"key_padding_mask": torch.zeros(2, 23)}, "key_padding_mask must be bool"),
        ({"log_momentum": 0.9}, r"at most 0, got 0.9. Fix: math.log\(0.9\)"),
        ({"key_padding_mask": torch.zeros(3, 23).bool()}, "key_padding_mask must be"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        memory(**(make() | change))
