"""ODERNN in practice: missing values, static features, layers, two directions, grids that follow the gaps."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hbnode
from tests import reference_irregular

TIGHT = {"rtol": 1e-8, "atol": 1e-8, "time_unit": 5.0}
LENGTHS = torch.tensor([7, 4, 1])
FEEDS = [
    {"missing": "hold"},
    {"missing": "decay"},
    {"missing": "zero", "elapsed_features": True},
    {"missing": "decay", "mask_features": True, "elapsed_features": True, "static_size": 2},
]


def make_series(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 7, 2, generator=generator, dtype=dtype)
    t = (0.2 + torch.rand(3, 7, generator=generator, dtype=dtype)).cumsum(1)
    mask = torch.rand(3, 7, 2, generator=generator) < 0.5
    return torch.where(mask, x, torch.nan), t, mask


def static_of(options):
    return torch.tensor([[0.5, -1.0], [0.0, 2.0], [1.0, 1.0]]).double() if "static_size" in options else None


def joined(state):
    return state.h if state.m is None else torch.cat([state.h, state.m], -1)


class Listening(nn.Module):
    """A cell that keeps what it is fed."""

    def __init__(self, inputs, size):
        super().__init__()
        self.cell, self.heard = nn.GRUCell(inputs, size), []

    def forward(self, x, s):
        self.heard.append(x)
        return self.cell(x, s)


@pytest.mark.parametrize("options", FEEDS, ids=["hold", "decay", "elapsed", "all"])
def test_what_the_cell_is_fed(options):
    rnn = hbnode.ODERNN(2, 4, cell=Listening, **options, **TIGHT).double()
    x, t, mask = make_series()
    static = static_of(options)
    if rnn.inputs.rate is not None:
        nn.init.normal_(rnn.inputs.rate)
    output, _ = rnn(x, t, mask=mask, static=static)
    got = torch.stack(rnn.cell.heard, 1)
    plain = {name: value for name, value in options.items() if name != "static_size"}
    expected = reference_irregular.fed(
        x, t, mask, rate=rnn.inputs.rate, time_unit=rnn.time_unit, static=static, **plain
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert rnn.inputs.size == got.shape[-1]
    assert not torch.isnan(output).any()
    if rnn.inputs.rate is not None:
        mine, twin = (
            torch.autograd.grad(one.square().sum(), rnn.inputs.rate, retain_graph=True) for one in (got, expected)
        )
        torch.testing.assert_close(mine, twin)


@pytest.mark.parametrize("options", [*FEEDS, {"num_layers": 2}, {"missing": "hold", "num_layers": 3, "field": "node"}])
def test_in_parts_as_in_one_piece(options):
    rnn = hbnode.ODERNN(2, 4, **options, **TIGHT).double()
    x, t, mask = make_series()
    static = static_of(options)
    whole, end = rnn(x, t, mask=mask, static=static)
    for ends in ([2, 7], [1, 2, 3, 4, 5, 6, 7]):
        begin, state, outputs = 0, None, []
        for stop in ends:
            part = slice(begin, stop)
            output, state = rnn(x[:, part], t[:, part], state, mask=mask[:, part], static=static)
            state = pickle.loads(pickle.dumps(state.detach()))
            outputs.append(output)
            begin = stop
        torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(joined(state), joined(end), rtol=1e-12, atol=1e-13)
        first = state
        while first.below is not None:
            first = first.below
        assert (first.last is None) == (not rnn.inputs.looks_back)
    _, later = rnn.forecast(state, [0.5])
    x, t, mask = x[:, :1], t[:, -1:] + 1, mask[:, :1]
    waited, direct = (rnn(x, t, one, mask=mask, static=static)[0] for one in (later, state))
    torch.testing.assert_close(waited, direct, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [*FEEDS, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2}])
def test_padding_and_batch_mates_change_nothing(options):
    rnn = hbnode.ODERNN(2, 4, **options, **TIGHT).double()
    x, t, mask = make_series()
    static = static_of(options)
    output, state = rnn(x, t, mask=mask, lengths=LENGTHS, static=static)
    packed = [pack_padded_sequence(z, LENGTHS, batch_first=True) for z in (x, t, mask)]
    again, _ = rnn(packed[0], packed[1], mask=packed[2], static=static)
    assert pad_packed_sequence(again, batch_first=True)[0].equal(output)
    for b, length in enumerate(LENGTHS):
        one = slice(b, b + 1)
        mine = None if static is None else static[one]
        alone, end = rnn(x[one, :length], t[one, :length], mask=mask[one, :length], static=mine)
        torch.testing.assert_close(alone[0], output[b, :length], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(joined(end)[0], joined(state)[b], rtol=1e-11, atol=1e-12)
        assert not output[b, length:].any()


def test_two_layers_are_two_networks():
    rnn = hbnode.ODERNN(2, 4, num_layers=2, field="ghbnode", **TIGHT).double()
    lower, upper = (hbnode.ODERNN(size, 4, field="ghbnode", **TIGHT).double() for size in (2, 4))
    for one, core in ((lower, rnn), (upper, rnn.layers[1])):
        one.cell, one.field, one.start = core.cell, core.field, core.start
    x, t, mask = make_series()
    output, state = rnn(x, t, mask=mask, lengths=LENGTHS)
    middle, below = lower(x, t, mask=mask, lengths=LENGTHS)
    expected, above = upper(middle, t, mask=mask.any(-1), lengths=LENGTHS)
    torch.testing.assert_close(output, expected, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(state.below.h, below.h, rtol=1e-13, atol=1e-14)
    ahead, later = rnn.forecast(state, [0.5, 1.0])
    torch.testing.assert_close(ahead, upper.forecast(above, [0.5, 1.0])[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(later.below.h, lower.forecast(below, [1.0])[1].h, rtol=1e-9, atol=1e-10)
    assert rnn.nfe.forward > upper.nfe.forward + lower.nfe.forward - 1
    _, after, _ = rnn.filter(x, t, mask=mask)
    assert rnn.forecast(after, [0.5])[0].shape == (3, 7, 1, 4)
    with pytest.raises(ValueError, match="the state has 1 layers, the module 2"):
        rnn(x, t + 10, above, mask=mask)


def test_two_directions_are_two_networks():
    rnn = hbnode.ODERNN(2, 4, bidirectional=True, **TIGHT).double()
    ahead, back = (hbnode.ODERNN(2, 4, **TIGHT).double() for _ in range(2))
    for one, core in ((ahead, rnn), (back, rnn.reverse[0])):
        one.cell, one.field, one.start = core.cell, core.field, core.start
    x, t, mask = make_series()
    output, state = rnn(x, t, mask=mask)
    expected, end = ahead(x, t, mask=mask)
    turned, start = back(x.flip(1), t[:, -1:] - t.flip(1), mask=mask.flip(1))
    torch.testing.assert_close(output, torch.cat([expected, turned.flip(1)], -1), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(state.h, torch.cat([end.h, start.h], -1), rtol=1e-12, atol=1e-13)
    for use in (lambda: rnn.filter(x, t), lambda: rnn.forecast(state, [1.0]), lambda: rnn(x, t + 10, state, mask)):
        with pytest.raises(ValueError, match="a bidirectional ODERNN"):
            use()


def test_every_parameter_learns_and_copies_agree():
    options = {"missing": "decay", "num_layers": 2, "bidirectional": True, "static_size": 2, "dropout": 0.5}
    rnn = hbnode.ODERNN(2, 4, mask_features=True, elapsed_features=True, **options, time_unit=5.0, rtol=1e-3, atol=1e-3)
    x, t, mask = make_series(torch.float32)
    static = torch.randn(3, 2, requires_grad=True)
    output, _ = rnn(x, t, mask=mask, static=static)
    output.square().sum().backward()
    assert static.grad.any()
    for name, p in rnn.named_parameters():
        assert p.grad is not None, name
        assert p.grad.any(), name
    assert not rnn(x, t, mask=mask, static=static)[0].equal(output)  # another dropout
    rnn.eval()
    output, _ = rnn(x, t, mask=mask, static=static)
    fresh = hbnode.ODERNN(2, 4, mask_features=True, elapsed_features=True, **options, rtol=1e-3, atol=1e-3).eval()
    fresh.load_state_dict(rnn.state_dict())
    for twin in (copy.deepcopy(rnn), fresh, pickle.loads(pickle.dumps(rnn)), torch.compile(rnn, backend="eager")):
        assert twin(x, t, mask=mask, static=static)[0].equal(output)
    assert "num_layers=2, bidirectional=True, dropout=0.5" in repr(rnn)


def test_static_features_move_a_learned_start():
    rnn = hbnode.ODERNN(2, 4, static_size=2, **TIGHT).double()
    x, t, mask = make_series()
    static = static_of({"static_size": 2})
    before = rnn.filter(x, t, mask=mask, static=static).before
    torch.testing.assert_close(joined(before)[:, 0], rnn.start + static @ rnn.static_start.weight.T)
    assert hbnode.ODERNN(2, 4, static_size=2, initial_state="zeros").static_start is None
    for wrong in (None, static[:2], static[:, :1]):
        with pytest.raises(ValueError, match=r"static must be \(batch, static_size\) = \(3, 2\)"):
            rnn(x, t, mask=mask, static=wrong)
    with pytest.raises(ValueError, match=r"Fix: ODERNN\(..., static_size=\)"):
        hbnode.ODERNN(2, 4).double()(x, t, mask=mask, static=static)
    with pytest.raises(ValueError, match="static is not finite"):
        rnn(x, t, mask=mask, static=torch.full_like(static, torch.nan))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing": "mean"}, "missing must be one of"),
        ({"missing": "holds"}, "Fix: 'hold'"),
        ({"dropout": 0.5}, "dropout is applied between layers"),
        ({"dropout": 1.0, "num_layers": 2}, r"dropout must be in \[0, 1\)"),
        ({"num_layers": 0}, "num_layers must be an integer >= 1"),
        ({"static_size": -1}, "static_size must be an integer >= 0"),
        ({"num_layers": 2, "field": hbnode.HBNODE(nn.Linear(4, 4))}, "field is one module.*Fix: field=lambda n:"),
        ({"bidirectional": True, "cell": nn.GRUCell(2, 8)}, "cell is one module, and there are 2 networks"),
        ({"bidirectional": True, "initial_state": nn.Flatten()}, "initial_state is one module"),
        ({"options": {"step_size": 0}}, "step_size must be a positive number"),
        ({"steps": 2, "options": {"step_size": 0.5}}, "were both given. Fix: leave steps out"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        hbnode.ODERNN(2, 4, **options)


GAPS = torch.tensor([[0.0, 0.2, 1.0, 5.0], [0.0, 0.75, 0.9, 1.0], [0.0, 0.1, 3.1, 3.1001]], dtype=torch.float64)


@pytest.mark.parametrize("method", ["leapfrog", "nystrom4", None])
@pytest.mark.parametrize("gradient", ["direct", "checkpoint"])
def test_a_grid_follows_the_gaps(method, gradient):
    """Each gap of each sample in ceil(gap / h) equal steps: against a solve of its own for each."""
    field = hbnode.HBNODE(hbnode.nn.MLP(4, [4], 4, activation=nn.Tanh), damping=0.3)
    options = {"step_size": 0.25, "max_nfe": 1000}
    rnn = hbnode.ODERNN(2, 4, field=field, method=method, gradient=gradient, options=options).double()
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    output, _ = rnn(x, GAPS)
    steps = [[1, 4, 16], [3, 1, 1], [1, 12, 1]]
    s = rnn.start.expand(3, -1)
    expected = []
    for i in range(4):
        if i:
            rows = []
            for b in range(3):
                state = tuple(part[b : b + 1] for part in s.chunk(2, 1))
                ends = hbnode.odeint(
                    field,
                    state,
                    GAPS[b, i - 1 : i + 1],
                    method=method or rnn.settings.method,
                    steps=steps[b][i - 1],
                    gradient="direct",
                )
                rows.append(torch.cat([part[-1] for part in ends], 1))
            s = torch.cat(rows)
        s = rnn.cell(x[:, i], s)
        expected.append(s[:, :4])
    expected = torch.stack(expected, 1)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    mine, twin = (
        torch.autograd.grad(one.square().sum(), field.parameters(), retain_graph=True) for one in (output, expected)
    )
    torch.testing.assert_close(mine, twin, rtol=1e-9, atol=1e-10)
    assert len(rnn.nfe_per_gap) == 3
    assert rnn.nfe_per_gap[2].steps == 16


def test_a_grid_is_exact_enough_on_long_gaps():
    """Where a single step of a gap of 4 is worthless."""
    grid, one, tight = (
        hbnode.ODERNN(2, 16, field="ghbnode", **solver, rtol=1e-9, atol=1e-9).double()
        for solver in ({"options": {"step_size": 0.25}}, {"steps": 1}, {})
    )
    with torch.no_grad():
        for p in tight.field.parameters():
            p.mul_(2)
        tight.start.normal_()
    for other in (grid, one):
        other.load_state_dict(tight.state_dict())
    x, t = torch.randn(4, 2, 2, dtype=torch.float64), torch.tensor([0.0, 4.0])
    exact = tight.filter(x, t).before.h[:, 1].detach()
    errors = [(rnn.filter(x, t).before.h[:, 1].detach() - exact).norm() / exact.norm() for rnn in (grid, one)]
    assert errors[0] < 1e-2 < 0.1 < errors[1]


def test_a_grid_counts_in_units_of_time_and_has_a_limit():
    x, t = torch.randn(3, 4, 2), GAPS.float()
    options = {"options": {"step_size": 0.25}, "method": "leapfrog"}
    rnn, scaled = hbnode.ODERNN(2, 4, **options), hbnode.ODERNN(2, 4, time_unit=100.0, **options)
    scaled.load_state_dict(rnn.state_dict() | {"time_unit": torch.tensor(100.0)})
    torch.testing.assert_close(rnn(x, t)[0], scaled(x, 100 * t)[0], rtol=1e-5, atol=1e-6)
    assert rnn.nfe.steps == scaled.nfe.steps
    rnn.forecast(rnn(x, t)[1], [1.0, 4.0])
    assert rnn.nfe.steps == 4 + 12
    with pytest.raises(
        hbnode.errors.MaxStepsError, match=r"step_size=0.25 makes 400000 steps of a gap.*rnn.fit_time_unit"
    ):
        rnn(x[:, :2], [0.0, 1e5])
    assert "step_size=0.25" in repr(rnn)
    t = GAPS.clone().requires_grad_()
    rnn = hbnode.ODERNN(2, 4, options={"step_size": 0.5}).double()
    assert torch.autograd.gradcheck(lambda t: rnn(x.double(), t)[0][:, -1], t, eps=1e-6, atol=1e-5, fast_mode=True)
