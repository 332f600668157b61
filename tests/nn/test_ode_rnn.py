"""ODERNN: against a plain twin, for ragged and masked series, in parts, copied, compiled, and with wrong input."""

import copy
import dataclasses
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import hbnode
from tests import reference
from tests.models import every_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SOLVERS = {
    "sample": {},
    "batch": {"per_sample": False},
    "checkpoint": {"gradient": "checkpoint"},
    "dopri5": {"method": "dopri5", "per_sample": False},
    "dopri5-adjoint": {"method": "dopri5", "gradient": "adjoint", "per_sample": False},
}
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
# Every model, and every solver with one that suits it least: with an extra dimension, two rows of state, an activation
MODELS_AND_SOLVERS = [
    *((model, "sample") for model in ("node", "anode", "sonode", "hbnode", "ghbnode")),
    *(("hbnode", "batch"), ("anode", "batch"), ("ghbnode", "checkpoint"), ("anode", "dopri5"), ("sonode", "dopri5")),
    *(("hbnode", "dopri5-adjoint"), ("node", "dopri5-adjoint")),
]
every_model_and_solver = pytest.mark.parametrize(
    ("model", "solver"),
    [pytest.param(model, SOLVERS[name], id=f"{model}-{name}") for model, name in MODELS_AND_SOLVERS],
)
LENGTHS = torch.tensor([5, 3, 1, 4])


def make_rnn(model="hbnode", *, dtype=torch.float64, **options):
    torch.manual_seed(0)
    rnn = hbnode.ODERNN(3, 4, field=model, **options)
    with torch.no_grad():
        for p in rnn.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return rnn.to(dtype)


def make_series(dtype=torch.float64, batch=4):
    generator = torch.Generator().manual_seed(1)
    gaps = torch.tensor([1.0, 2.0, 1.0, 5.0])
    t = torch.cat([torch.zeros(1), gaps]).cumsum(0)
    t = t + torch.linspace(0, 0.9, batch)[:, None] * torch.tensor([0.0, 1.0, 0.3, 2.0, 0.1])
    return torch.randn(batch, 5, 3, generator=generator).to(dtype), t.to(dtype)


def gradients(value, module):
    value.square().sum().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    module.zero_grad()
    return flat


def joined(state):
    return state.h if state.m is None else torch.cat([state.h, state.m], -1)


@every_model_and_solver
def test_matches_the_plain_twin_with_gaps_1_2_1_5(model, solver):
    rnn = make_rnn(model, rtol=1e-9, atol=1e-9, **solver)
    x, t = make_series()
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, 1] = mask[3, 4] = False
    after = joined(rnn.filter(x, t, mask=mask, lengths=LENGTHS).after)
    twin = reference.ode_rnn(rnn, x, t, mask, LENGTHS)
    torch.testing.assert_close(after, twin, rtol=1e-6, atol=1e-7)
    got, expected = gradients(after, rnn), gradients(twin, rnn)
    assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("model", ["anode", "sonode", "hbnode"])
def test_gradients_of_input_times_and_initial_state(model):
    rnn = make_rnn(model, rtol=1e-8, atol=1e-8, initial_state=nn.Sequential(nn.Flatten(), nn.Linear(15, 4)))
    if model == "anode":
        rnn.encoder = nn.Sequential(nn.Flatten(), nn.Linear(15, 2)).double()
    x, t = make_series(batch=2)

    def output(x, t):
        return rnn(x, t)[0][:, -1]

    inputs = x.requires_grad_(), t.requires_grad_()
    assert torch.autograd.gradcheck(output, inputs, eps=1e-5, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_between_samples_the_state_solves_the_ode():
    """Without samples that count, the state of h'' = -h is a rotation: a closed form."""
    field = hbnode.HBNODE(lambda h: -h, damping=0.0, learn_damping=False)
    rnn = hbnode.ODERNN(1, 2, field=field, rtol=1e-10, atol=1e-10).double()
    with torch.no_grad():
        rnn.start.copy_(torch.tensor([1.0, 0.5, 0.0, -1.0]))
    t = torch.tensor([[0.0, 0.7, 3.0], [1.0, 1.1, 9.0]], dtype=torch.float64)
    filtered = rnn.filter(torch.full((2, 3, 1), torch.nan).double(), t, mask=torch.zeros(2, 3, dtype=torch.bool))
    angle = (t - t[:, :1]).unsqueeze(-1)
    h, m = rnn.start[:2], rnn.start[2:]
    torch.testing.assert_close(filtered.after.h, h * angle.cos() + m * angle.sin(), rtol=0, atol=1e-8)
    torch.testing.assert_close(filtered.before.m, m * angle.cos() - h * angle.sin(), rtol=0, atol=1e-8)


# all pairs of their values
COMBINATIONS = [
    (model, residual, cell, dtype)
    for i, model in enumerate(["node", "anode", "sonode", "hbnode", "ghbnode"])
    for residual, cell, dtype in (
        [(False, "gru", torch.float32), (True, "rnn", torch.float64)]
        if i % 2
        else [(True, "gru", torch.float64), (False, "rnn", torch.float32)]
    )
]


@pytest.mark.parametrize(
    ("model", "residual", "cell", "dtype"), [*COMBINATIONS, ("hbnode", True, "gru", torch.float32)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_shapes_and_gradients(model, residual, cell, dtype, device):
    rnn = make_rnn(model, dtype=dtype, residual=residual, cell=cell, rtol=1e-3, atol=1e-3).to(device)
    x, t = (part.to(device) for part in make_series(dtype))
    output, state = rnn(x, t)
    assert output.shape == (4, 5, 4)
    assert (output.dtype, output.device) == (x.dtype, x.device)
    assert state.t.equal(t[:, -1])
    assert state.h.equal(output[:, -1])
    assert (state.m is None) == (model in ("node", "anode"))
    ahead, end = rnn.forecast(state, [0.0, 0.5, 2.0])
    assert ahead.shape == (4, 3, 4)
    assert ahead[:, 0].equal(state.h)
    assert end.h.equal(ahead[:, -1])
    (output.square().sum() + ahead.square().sum()).backward()
    for name, p in rnn.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all()
        assert p.grad.any(), name


@every_model
def test_output_sees_its_own_sample_and_no_later_one(model):
    rnn = make_rnn(model, rtol=1e-3, atol=1e-3)
    x, t = make_series()
    before, after, _ = rnn.filter(x.requires_grad_(), t)
    for i in range(5):
        (seen,) = torch.autograd.grad(after.h[:, i].sum(), x, retain_graph=True)
        assert seen[:, i].any(-1).all()
        assert not seen[:, i + 1 :].any()
        if i:
            (seen,) = torch.autograd.grad(before.h[:, i].sum(), x, retain_graph=True)
            assert seen[:, i - 1].any(-1).all()
            assert not seen[:, i:].any()


@every_model
def test_padding_and_batch_mates_change_nothing(model):
    rnn = make_rnn(model, rtol=1e-6, atol=1e-6)
    x, t = make_series()
    output, state = rnn(x, t, lengths=LENGTHS)
    wild = torch.where(torch.arange(5)[:, None] < LENGTHS[:, None, None], x, torch.nan)
    times = torch.where(torch.arange(5) < LENGTHS[:, None], t, -1.0)
    order = torch.tensor([2, 0, 3, 1])
    longer = nn.functional.pad(wild[order], (0, 0, 0, 2), value=1e9), nn.functional.pad(times[order], (0, 2))
    permuted, end = rnn(*longer, lengths=LENGTHS[order])
    assert permuted.shape == (4, 7, 4)
    torch.testing.assert_close(permuted[:, :5], output[order], rtol=1e-12, atol=1e-13)
    assert not permuted[:, 5:].any()
    assert not output[1, 3:].any()
    torch.testing.assert_close(joined(end), joined(state)[order], rtol=1e-12, atol=1e-13)
    for b, length in enumerate(LENGTHS):
        alone, last = rnn(x[b : b + 1, :length], t[b : b + 1, :length])
        torch.testing.assert_close(alone[0], output[b, :length], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(joined(last)[0], joined(state)[b], rtol=1e-12, atol=1e-13)
        assert state.t[b] == t[b, length - 1]


@every_solver
def test_padding_does_not_count_in_the_common_step(solver):
    rnn = make_rnn("ghbnode", rtol=1e-4, atol=1e-4, **solver)
    x, t = make_series()
    once, _ = rnn(x[:2], t[:2])
    padded = [torch.cat([part[:2], part[:2].repeat(9, *[1] * (part.dim() - 1))]) for part in (x, t)]
    output, _ = rnn(*padded, lengths=torch.tensor([5, 5] + [1] * 18))
    torch.testing.assert_close(output[:2], once, rtol=1e-11, atol=1e-12)


@every_model
def test_packed_sequences(model):
    rnn = make_rnn(model, rtol=1e-4, atol=1e-4)
    x, t = make_series()
    output, state = rnn(x, t, lengths=LENGTHS)
    for times in (t, pack_padded_sequence(t, LENGTHS, batch_first=True, enforce_sorted=False)):
        packed, end = rnn(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False), times)
        unpacked, lengths = pad_packed_sequence(packed, batch_first=True)
        assert lengths.equal(LENGTHS)
        assert unpacked.equal(output)
        assert end.h.equal(state.h)
    with pytest.raises(ValueError, match="has its own"):
        rnn(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False), t, lengths=LENGTHS)


@every_model_and_solver
def test_in_parts_and_sample_by_sample(model, solver):
    rnn = make_rnn(model, rtol=1e-4, atol=1e-4, **solver)
    x, t = make_series()
    whole, end = rnn(x, t)
    for parts in ([slice(0, 2), slice(2, 5)], [slice(i, i + 1) for i in range(5)]):
        state, outputs = None, []
        for part in parts:
            output, state = rnn(x[:, part], t[:, part], state)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(joined(state), joined(end), rtol=1e-13, atol=1e-14)


def test_in_parts_under_checkpoint():
    rnn = make_rnn(rtol=1e-6, atol=1e-6)
    x, t = make_series()
    expected = gradients(rnn(x, t)[0], rnn)
    first, state = checkpoint(rnn, x[:, :3], t[:, :3], use_reentrant=False)
    second, _ = checkpoint(rnn, x[:, 3:], t[:, 3:], state, use_reentrant=False)
    torch.testing.assert_close(gradients(torch.cat([first, second], 1), rnn), expected, rtol=1e-12, atol=1e-13)


def test_reversible_gradient():
    """The gaps of a fixed grid undone one after the other, against the graph of the same steps."""
    undone = make_rnn(gradient="reversible", steps=6)
    kept = make_rnn(method="blanes_moan4", steps=6)
    x, t = make_series()
    (output, _), (expected, _) = undone(x, t, lengths=LENGTHS), kept(x, t, lengths=LENGTHS)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradients(output, undone), gradients(expected, kept), rtol=1e-9, atol=1e-10)


@every_model
def test_missing_values(model):
    rnn = make_rnn(model, rtol=1e-8, atol=1e-8)
    x, t = make_series()
    keep = [0, 1, 3, 4]
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[:, 2] = False
    dropped, _ = rnn(x[:, keep], t[:, keep])
    output, _ = rnn(torch.where(mask[..., None], x, torch.nan), t, mask=mask)
    torch.testing.assert_close(output[:, keep], dropped, rtol=1e-6, atol=1e-7)
    by_value = mask[..., None].repeat(1, 1, 3)
    by_value[0, 1, 2] = by_value[1, 3, :2] = False
    holes = torch.where(by_value, x, torch.nan).requires_grad_()
    output, _ = rnn(holes, t, mask=by_value)
    zeros, _ = rnn(torch.where(by_value, x, 0.0), t, mask=mask)
    assert output.equal(zeros)
    output.sum().backward()
    assert torch.isfinite(holes.grad).all()


def test_forecast():
    """Ahead of every state in one solve, as the rest of the series without samples."""
    rnn = make_rnn(rtol=1e-10, atol=1e-10)
    x, t = make_series()
    _, after, state = rnn.filter(x, t)
    ahead, end = rnn.forecast(after, torch.tensor([0.5, 1.5]))
    assert ahead.shape == (4, 5, 2, 4)
    assert end.t.equal(t + 1.5)
    last, _ = rnn.forecast(state, [0.5, 1.5])
    torch.testing.assert_close(ahead[:, -1], last, rtol=1e-9, atol=1e-10)
    later = torch.stack([t[:, -1] + 0.5, t[:, -1] + 1.5], 1)
    nothing = torch.zeros(4, 2, dtype=torch.bool)
    unseen, _ = rnn(torch.zeros(4, 2, 3).double(), later, state, mask=nothing)
    torch.testing.assert_close(last, unseen, rtol=1e-9, atol=1e-10)
    own, end = rnn.forecast(state, torch.tensor([[0.5], [1.5], [0.0], [3.0]]))
    torch.testing.assert_close(own[:2, 0], torch.stack([last[0, 0], last[1, 1]]), rtol=1e-8, atol=1e-9)
    assert own[2, 0].equal(state.h[2])
    # and the series goes on from where a forecast ended
    rnn(x, t + end.t.max(), end)


def test_initial_states():
    x, t = make_series()
    zeros = hbnode.ODERNN(3, 4, initial_state="zeros").double()
    assert zeros.start is None
    assert not zeros.filter(x, t).before.h[:, 0].any()
    momentum = hbnode.HBNODE(hbnode.nn.MLP(4, [4], 4), initial_momentum=nn.Linear(4, 4))
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(15, 4))
    rnn = hbnode.ODERNN(3, 4, field=momentum, initial_state=encoder).double()
    before = rnn.filter(x, t).before
    torch.testing.assert_close(before.m[:, 0], momentum.initial_momentum(before.h[:, 0]))
    both = hbnode.ODERNN(3, 4, initial_state=nn.Sequential(nn.Flatten(), nn.Linear(15, 8))).double()
    torch.testing.assert_close(joined(both.filter(x, t).before)[:, 0], both.encoder(x))
    anode = hbnode.ODERNN(3, 5, field=lambda n: hbnode.ANODE(nn.Linear(n, n), augment=2)).double()
    assert anode.start.shape == (3,)
    assert not anode.filter(x, t).before.h[:, 0, 3:].any()


@every_model
def test_counts(model):
    rnn = make_rnn(model, rtol=1e-5, atol=1e-5, gradient="checkpoint", options={"max_step": 0.5})
    x, t = make_series()
    with hbnode.count_nfe(rnn) as nfe:
        output, _ = rnn(x, t)
        assert len(rnn.nfe_per_gap) == 4
        assert rnn.nfe.forward == nfe.forward > 0
        assert rnn.nfe_per_gap[3].steps > rnn.nfe_per_gap[0].steps  # a gap of 5 and one of 1
        output.sum().backward()
    assert rnn.nfe == nfe
    assert nfe.backward > 0


@every_model
def test_copies_state_dict_and_repr(model):
    rnn = make_rnn(model, rtol=1e-3, atol=1e-3)
    x, t = make_series()
    output, _ = rnn(x, t)
    fresh = hbnode.ODERNN(3, 4, field=model, rtol=1e-3, atol=1e-3).double()
    fresh.load_state_dict(rnn.state_dict())
    for twin in (copy.deepcopy(rnn), fresh):
        assert twin(x, t)[0].equal(output)
    assert pickle.loads(pickle.dumps(rnn))(x, t)[0].equal(output)
    assert "per_sample=True" in repr(rnn)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch hides it, unless warnings are errors
def test_under_torch_compile_and_autocast():
    rnn = make_rnn(dtype=torch.float32, rtol=1e-3, atol=1e-3)
    x, t = make_series(torch.float32)
    expected, _ = rnn(x, t)
    output, _ = torch.compile(rnn, backend="eager")(x, t)
    torch.testing.assert_close(output, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = rnn(x, t)
    assert state.h.dtype == torch.float32
    torch.testing.assert_close(output, expected, rtol=0.1, atol=0.1)
    output.sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own imports
@pytest.mark.parametrize("per_sample", [True, False])
@pytest.mark.parametrize("model", ["hbnode", "ghbnode"])
def test_compiled_steps(model, per_sample):
    rnn = make_rnn(model, rtol=1e-6, atol=1e-6, per_sample=per_sample)
    compiled = make_rnn(model, rtol=1e-6, atol=1e-6, per_sample=per_sample, compile=True)
    x, t = make_series()
    (expected, _), (output, _) = rnn(x, t), compiled(x, t)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(gradients(output, compiled), gradients(expected, rnn), rtol=1e-8, atol=1e-9)


def test_no_grad_and_frozen_parameters():
    rnn = make_rnn(rtol=1e-4, atol=1e-4)
    x, t = make_series()
    expected, _ = rnn(x, t)
    with torch.no_grad():
        torch.testing.assert_close(rnn(x, t)[0], expected, rtol=1e-13, atol=1e-14)
    with torch.inference_mode():
        torch.testing.assert_close(rnn(x, t)[0], expected, rtol=1e-13, atol=1e-14)
    rnn.requires_grad_(False)
    assert not rnn(x, t)[0].requires_grad


def test_a_hook_on_the_cell_sees_the_adjoint_of_each_state():
    rnn = make_rnn(rtol=1e-10, atol=1e-10, residual=True)
    x, t = make_series()
    states = []
    handle = rnn.cell.register_forward_hook(lambda module, inputs, output: states.append(output))
    output, _ = rnn(x, t)
    handle.remove()
    adjoints = torch.autograd.grad(output[:, -1].square().sum(), states)
    # the same from the plain definition: restart from the state after sample i
    after = rnn.filter(x, t).after
    for i in range(4):
        h, m = after.h[:, i].detach().requires_grad_(), after.m[:, i].detach().requires_grad_()
        rest, _ = rnn(x[:, i + 1 :], t[:, i + 1 :], hbnode.nn.ODERNNState(h, m, t[:, i]))
        expected = torch.cat(torch.autograd.grad(rest[:, -1].square().sum(), (h, m)), 1)
        torch.testing.assert_close(adjoints[i], expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 5, 2)}, "input_size=3"),
        ({"x": torch.zeros(4, 3)}, r"x must be \(batch, T, input_size\)"),
        ({"x": torch.zeros(4, 0, 3)}, "at least one sample"),
        ({"t": torch.zeros(4, 4)}, r"t must be \(batch, T\)"),
        ({"t": torch.zeros(4, 5)}, r"sequence 0 t\[0\]=0 is followed by 0"),
        ({"t": torch.tensor([0.0, 1.0, torch.nan, 3.0, 4.0])}, "t is not finite"),
        ({"x": torch.full((4, 5, 3), torch.nan)}, "mask=torch.isfinite"),
        ({"mask": torch.ones(4, 5)}, "mask must be bool"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, "mask must be bool"),
        ({"lengths": torch.tensor([1, 2, 3])}, "4 whole numbers"),
        ({"lengths": torch.tensor([1, 2, 0, 3])}, "between 1 and T=5"),
    ],
)
def test_wrong_input(change, message):
    x, t = make_series(torch.float32)
    with pytest.raises(ValueError, match=message):
        hbnode.ODERNN(3, 4)(**{"x": x, "t": t} | change)


def test_wrong_states_and_forecasts():
    rnn = hbnode.ODERNN(3, 4)
    x, t = make_series(torch.float32)
    _, state = rnn(x, t)
    with pytest.raises(ValueError, match="lies after the first of t"):
        rnn(x, t, state)
    with pytest.raises(ValueError, match="the state must have h and m"):
        rnn(x, t + 10, dataclasses.replace(state, m=None))
    with pytest.raises(ValueError, match="the state must have h and m"):
        rnn(x[:2], t[:2] + 10, state)
    with pytest.raises(ValueError, match="dt must increase"):
        rnn.forecast(state, [1.0, 0.5])
    with pytest.raises(ValueError, match="dt must increase"):
        rnn.forecast(state, [-1.0])
    with pytest.raises(ValueError, match="dt must be"):
        rnn.forecast(state, torch.zeros(3, 2))
    with pytest.raises(TypeError, match="floating point"):
        rnn(torch.zeros(4, 5, 3, dtype=torch.long), t)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"field": "lstm"}, ValueError, "field must be one of"),
        ({"field": nn.Linear(4, 4)}, TypeError, "function hidden_size -> field"),
        ({"field": lambda n: nn.Linear(n, n)}, TypeError, "function hidden_size -> field"),
        ({"cell": "lstm"}, ValueError, "cell must be one of"),
        ({"initial_state": "ones"}, ValueError, "initial_state must be"),
        ({"method": "dopri5"}, ValueError, "per_sample"),
        ({"rtol": -1.0}, ValueError, "rtol"),
        ({"field": hbnode.ANODE(nn.Linear(9, 9), augment=9)}, ValueError, "more than hidden_size=4"),
    ],
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=message):
        hbnode.ODERNN(3, 4, **options)


def test_wrong_modules():
    x, t = make_series(torch.float32)
    with pytest.raises(ValueError, match="initial_state returned shape"):
        hbnode.ODERNN(3, 4, initial_state=nn.Sequential(nn.Flatten(), nn.Linear(15, 5)))(x, t)
    with pytest.raises(ValueError, match="cell returned"):
        hbnode.ODERNN(3, 4, cell=nn.Bilinear(3, 8, 5))(x, t)


@every_solver
def test_failures_are_named(solver):
    field = hbnode.NODE(lambda h: h.square())
    rnn = hbnode.ODERNN(3, 4, field=field, **solver, rtol=1e-3, atol=1e-3, max_steps=50)
    with torch.no_grad():
        rnn.start.fill_(1.0)
    x, t = make_series(torch.float32)
    with pytest.raises(hbnode.SolverError):
        rnn(x, t, mask=torch.zeros(4, 5, dtype=torch.bool))


def timed_field(n):
    return hbnode.HBNODE(hbnode.nn.MLP(n, [6], n, activation=nn.Tanh, time_dependent=True))


@every_solver
def test_fields_that_take_the_time(solver):
    """Each sample's own time, at every gap; and its gradient."""
    rnn = make_rnn(timed_field, rtol=1e-9, atol=1e-9, **solver)
    x, t = make_series()
    after = joined(rnn.filter(x, t, lengths=LENGTHS).after)
    twin = reference.ode_rnn(rnn, x, t, lengths=LENGTHS)
    torch.testing.assert_close(after, twin, rtol=1e-6, atol=1e-7)
    got, expected = gradients(after, rnn), gradients(twin, rnn)
    assert (got - expected).norm() <= 1e-6 * expected.norm()


def field_with_dampings(n):
    return hbnode.HBNODE(nn.Linear(n, n), damping=torch.linspace(0.1, 0.9, n))


@pytest.mark.parametrize(
    ("field", "per_sample"),
    [
        ("hbnode", True),
        ("ghbnode", False),
        (timed_field, True),
        (timed_field, False),
        (field_with_dampings, True),
    ],
    ids=["hbnode-sample", "ghbnode-batch", "timed-sample", "timed-batch", "dampings-sample"],
)
def test_long_series_with_few_steps_a_gap(field, per_sample):
    """More gaps than have their coefficients made at once, against each solved by itself."""
    options = {"rtol": 1e-2, "atol": 1e-2, "per_sample": per_sample}
    rnn, plain = make_rnn(field, **options), make_rnn(field, gradient="checkpoint", **options)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 140, 3, generator=generator, dtype=torch.float64)
    t = (0.1 + torch.rand(2, 140, generator=generator, dtype=torch.float64)).cumsum(1)
    (output, _), (expected, _) = rnn(x, t), plain(x, t)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(gradients(output, rnn), gradients(expected, plain), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("solver", [SOLVERS[name] for name in ("sample", "batch", "checkpoint")])
def test_gradients_of_times(solver):
    """h' = 1 moves by the gaps, those of length 0 included."""
    rnn = hbnode.ODERNN(3, 4, field=hbnode.NODE(lambda h: torch.ones_like(h)), initial_state="zeros", **solver).double()
    x, t = make_series(batch=2)
    t.requires_grad_()
    before = rnn.filter(x, t, mask=torch.zeros(2, 5, dtype=torch.bool)).before
    (by_t,) = torch.autograd.grad(before.h[:, -1, 0].sum(), t)
    torch.testing.assert_close(by_t, torch.tensor([[-1.0, 0, 0, 0, 1.0]] * 2).double())
    state = hbnode.nn.ODERNNState(torch.zeros(2, 4).double(), None, t[:, -1].detach())
    dt = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    ahead, _ = rnn.forecast(state, dt)
    (by_dt,) = torch.autograd.grad(ahead[..., 0].sum(), dt)
    torch.testing.assert_close(by_dt, torch.ones(2, 1).double())


@pytest.mark.filterwarnings("ignore:the gaps between samples take:UserWarning")
@pytest.mark.parametrize("per_sample", [True, False])
def test_times_since_1970(per_sample):
    """Only gaps count: large times in float64 beside samples in float32."""
    field = hbnode.HBNODE(lambda h: -4e-4 * h * (1 + 20 * h * h), damping=0.001)
    rnn = hbnode.ODERNN(3, 4, field=field, per_sample=per_sample)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 5, 3, generator=generator)
    t = 600.0 * torch.arange(5, dtype=torch.float64)
    near, _ = rnn(x, t)
    far, state = rnn(x, t + 1.7e9)
    torch.testing.assert_close(far, near, rtol=1e-4, atol=1e-5)
    (moved, end), (soon, _) = rnn.forecast(state, [10.0]), rnn.forecast(state, torch.tensor([10.0]))
    assert moved.equal(soon)
    assert not moved[:, 0].equal(state.h)
    assert end.t.equal(state.t + 10)


def test_a_series_goes_on_from_a_forecast_in_float32():
    rnn = hbnode.ODERNN(3, 4)
    x, _ = make_series(torch.float32)
    _, state = rnn(x[:, :1], torch.tensor([0.0]))
    _, later = rnn.forecast(state, [0.7])
    expected, _ = rnn(x[:, 1:2], torch.tensor([0.7]), state)
    output, _ = rnn(x[:, 1:2], torch.tensor([0.7]), later)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_the_encoder_sees_the_window_as_it_was_given():
    rnn = hbnode.ODERNN(3, 4, initial_state=nn.Sequential(nn.Flatten(), nn.Linear(15, 4)), time_unit=10.0).double()
    x, t = make_series()
    lengths = torch.tensor([3, 2, 1, 3])
    together, _ = rnn(x, t, lengths=lengths)
    for b in range(4):
        alone, _ = rnn(x[b : b + 1], t[b : b + 1], lengths=lengths[b : b + 1])
        torch.testing.assert_close(alone[0], together[b])
    with torch.autocast("cpu", dtype=torch.bfloat16):  # whose encoder gives half precision
        output, state = rnn.float()(x.float(), t)
        assert rnn.forecast(state, [1.0])[0].dtype == output.dtype == torch.float32


def test_a_field_that_makes_its_own_momentum_learns_to():
    for field in (
        hbnode.HBNODE(nn.Linear(4, 4), initial_momentum=nn.Linear(4, 4)),
        hbnode.SONODE(hbnode.nn.MLP(8, [4], 4), initial_velocity=nn.Linear(4, 4)),
    ):
        rnn = hbnode.ODERNN(3, 4, field=field.double()).double()
        assert rnn.start.shape == (4,)
        torch.nn.init.ones_(rnn.start)
        rnn(*make_series())[0].sum().backward()
        assert all(p.grad is not None and p.grad.any() for p in rnn.parameters() if p is not rnn.start)


def test_limits_hold_for_each_gap():
    field = hbnode.NODE(lambda h: -h)
    rnn = hbnode.ODERNN(1, 2, field=field, max_steps=5, options={"max_step": 0.1})
    with torch.no_grad():
        rnn.start.fill_(1.0)
    x, t = torch.zeros(1, 80, 1), torch.arange(80.0)
    with pytest.raises(hbnode.errors.MaxStepsError):
        rnn(x, t)
    with pytest.raises(ValueError, match="far below what"):
        hbnode.ODERNN(1, 2, rtol=1e-12)(x, t)


@pytest.mark.parametrize("solver", [{}, {"per_sample": False}, {"method": "tsit5", "steps": 2}, SOLVERS["dopri5"]])
def test_failures_tell_the_time(solver):
    """The cell explodes at the third sample, at 102."""

    class Cell(nn.Module):
        def forward(self, x, s):
            return torch.where(x > 0, torch.inf, s)

    rnn = hbnode.ODERNN(1, 2, cell=Cell(), **solver)
    x = torch.zeros(2, 5, 1)
    x[1, 2] = 1.0
    with pytest.raises(hbnode.errors.NonFiniteError) as failure:
        rnn(x, torch.arange(100.0, 105.0))
    assert 102 <= failure.value.t <= 103


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient": "adjoint"}, "does not know times of each sample's own"),
    ],
)
def test_what_no_gaps_can_have_is_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        hbnode.ODERNN(3, 4, **options)


def test_wrong_kinds():
    rnn = hbnode.ODERNN(3, 4)
    x, t = make_series(torch.float32)
    _, state = rnn(x, t)
    with pytest.raises(TypeError, match="must be an ODERNNState"):
        rnn(x, t + 10, (state.h, state.m))
    with pytest.raises(TypeError, match="must be an ODERNNState"):
        rnn.forecast(state.h, [1.0])
    with pytest.raises(TypeError, match="expected one dtype"):
        rnn(x.double(), t)
    with pytest.raises(TypeError, match=r"expected a padded tensor.*Fix"):
        rnn.filter(pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False), t)
    with pytest.raises(ValueError, match="large times in float64"):
        rnn(x, t + 1e9)
    assert rnn(x, t[0].tolist())[0].equal(rnn(x, t[:1].expand(4, 5))[0])


def test_a_state_is_read_by_name_moved_and_loaded_whole(tmp_path):
    rnn = make_rnn(rtol=1e-3, atol=1e-3)
    x, t = make_series()
    output, state = rnn(x[:, :3], t[:, :3])
    for use in (lambda: state[-1], lambda: tuple(state)):
        with pytest.raises(TypeError, match=r"read by name.*Fix: state\.h"):
            use()
    assert torch.equal(state.h, output[:, -1])
    expected, _ = rnn(x[:, 3:], t[:, 3:], state)
    filtered = rnn.filter(x, t)
    torch.save([state, filtered], tmp_path / "state.pt")
    loaded, both = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(both.after.m, filtered.after.m)
    for copied in (loaded, pickle.loads(pickle.dumps(state.detach())), copy.deepcopy(state.detach()), state.cpu()):
        assert torch.equal(rnn(x[:, 3:], t[:, 3:], copied)[0], expected)
    single = filtered.to(torch.float32)
    assert single.before.h.dtype == single.state.m.dtype == torch.float32
    assert single.state.t.dtype == torch.float64
    assert not any(z.requires_grad for z in filtered.detach().after.as_dict().values())
    assert repr(state) == "ODERNNState(h=(4, 4), m=(4, 4), t=(4,))"


class Frame:
    """As much of a table of pandas as is asked for."""

    def __init__(self, values):
        self.values = values

    def to_numpy(self):
        return self.values


def test_a_mask_may_be_packed_where_x_is():
    rnn = make_rnn(rtol=1e-3, atol=1e-3)
    x, t = make_series()
    mask = torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    expected, state = rnn(x, t, mask=mask, lengths=LENGTHS)
    packed = [pack_padded_sequence(z, LENGTHS, batch_first=True, enforce_sorted=False) for z in (x, t, mask)]
    for given in (packed[2], mask):
        output, end = rnn(packed[0], packed[1], mask=given)
        assert pad_packed_sequence(output, batch_first=True)[0].equal(expected)
        assert end.h.equal(state.h)
    with pytest.raises(ValueError, match=r"t is a PackedSequence and x is not.*Fix: pad_packed_sequence"):
        rnn(x, packed[1])
    with pytest.raises(ValueError, match=r"mask is a PackedSequence and x is not"):
        rnn(x, t, mask=packed[2])


def test_times_and_masks_as_arrays_and_lists():
    rnn = make_rnn(dtype=torch.float32, rtol=1e-3, atol=1e-3)
    x, _ = make_series(torch.float32)
    seen = torch.tensor([True, False, True, True, False])
    expected, _ = rnn(x, torch.arange(5.0, dtype=torch.float64), mask=seen.expand(4, 5))
    whole = numpy.arange(5)
    for times in (whole, whole.astype(float), Frame(whole), range(5), [0, 1, 2, 3, 4], torch.arange(5)):
        assert rnn(x, times, mask=Frame(seen.expand(4, 5).numpy()))[0].equal(expected)
    with pytest.raises(TypeError, match=r"got NoneType\. Fix: one number a sample"):
        rnn(x, None)


def test_samples_that_are_no_tensor_say_how_to_make_one():
    rnn, layer, cell = make_rnn(dtype=torch.float32), hbnode.nn.MomentumLSTM(3, 4), hbnode.nn.MomentumLSTMCell(3, 4)
    values, t = numpy.ones((5, 3)), torch.arange(5.0)
    for x, array in ((values, "x"), (values.tolist(), "x"), (Frame(values), "x.to_numpy()")):
        for call in (layer, cell, lambda x: rnn(x, t)):
            with pytest.raises(TypeError) as error:
                call(x)
            fix = f"Fix: torch.tensor({array}, dtype=torch.float32)"
            assert fix in str(error.value)
        made = eval(fix.removeprefix("Fix: "), {"torch": torch, "x": x})
        layer(made)
        cell(made)
        rnn(made.unsqueeze(0), t)
    pair = [torch.ones(5, 3), torch.ones(5, 3)]
    with pytest.raises(TypeError, match=r"Fix: torch.stack\(x\)"):
        rnn(pair, t)
    with pytest.raises(ValueError, match=r"Fix: x.unsqueeze\(0\) for a single series"):
        rnn(pair[0], t)
    with pytest.raises(ValueError, match=r"Fix: x.unsqueeze\(-1\) for numbers"):
        hbnode.ODERNN(1, 4)(torch.ones(4, 5), t)
    with pytest.raises(ValueError, match="Fix: input_size=2"):
        rnn(torch.ones(4, 5, 2), t)
    with pytest.raises(TypeError, match=r"Fix: x.to\(torch.float32\), or .to\(torch.float64\) of the module"):
        rnn(torch.ones(4, 5, 3).double(), t)
    with pytest.raises(ValueError, match=r"Fix: x.to\(torch.float32\), or layer.to\(torch.float64\)"):
        layer(torch.ones(4, 5, 3).double())


def test_an_adjoint_without_gradients_of_times_says_so():
    solver = SOLVERS["dopri5"]
    rnn = make_rnn(**solver, gradient="adjoint", rtol=1e-3, atol=1e-3)
    x, t = make_series()
    _, state = rnn(x, t)
    with pytest.raises(ValueError, match=r"no gradient with respect to times.*Fix: gradient='direct', or t.detach\(\)"):
        rnn(x, t.requires_grad_())
    with pytest.raises(ValueError, match="no gradient with respect to times"):
        rnn.forecast(state, torch.ones(1, requires_grad=True))
    rnn(x, t.detach())
    with torch.no_grad():
        rnn(x, t)
    (slope,) = torch.autograd.grad(make_rnn(**solver, gradient="direct", rtol=1e-3, atol=1e-3)(x, t)[0].sum(), t)
    assert slope.any()


@pytest.mark.parametrize("per_sample", [True, False])
def test_spans_that_are_huge_against_the_dynamics_are_given_up_early(per_sample):
    field = hbnode.HBNODE(lambda h: -h)
    rnn = hbnode.ODERNN(3, 4, field=field, per_sample=per_sample, max_steps=1000, method="nystrom4")
    x, _ = make_series(torch.float32)
    days = 1.7e9 + 86400.0 * torch.arange(5, dtype=torch.float64)
    with pytest.raises(hbnode.errors.MaxStepsError, match=r"Fix: .*rnn.fit_time_unit\(t\)") as failure:
        rnn(x, days)
    assert failure.value.nfe < 500 * 4
    output, _ = rnn(x, (days - days[0]) / 86400)
    assert torch.isfinite(output).all()


def test_steps_that_grow_are_waited_for():
    """h' = -h/(1 + 100 t): its steps grow with t, from where they would be far too many."""
    field = hbnode.NODE(lambda t, h: -100 * h / (1 + 100 * t))
    t = torch.tensor([0.0, 1e5], dtype=torch.float64)
    y0 = torch.ones(2, 1, dtype=torch.float64)
    y = hbnode.odeint(field, y0, t, method="tsit5", rtol=1e-10, atol=1e-20, max_steps=2000)
    torch.testing.assert_close(y[-1], y0 / (1 + 100 * t[-1]), rtol=1e-6, atol=0)
