"""ODERNN: the loop in plain torch, inputs of the cell, layers, directions, grids, failures."""

import pytest
import torch
from torch import nn

import hbnode
from tests import reference, reference_irregular
from tests.models import slow

SOLVERS = {
    "sample": {},
    "batch": {"per_sample": False},
    "checkpoint": {"gradient": "checkpoint"},
    "adjoint": {"gradient": "adjoint"},
    "dopri5": {"method": "dopri5", "per_sample": False},
    "dopri5-adjoint": {"method": "dopri5", "gradient": "adjoint", "per_sample": False},
}
INPUTS = {
    "hold": {"missing": "hold"},
    "elapsed": {"missing": "zero", "elapsed_features": True},
    "all": {"missing": "decay", "mask_features": True, "elapsed_features": True, "static_size": 2},
}
LENGTHS = torch.tensor([5, 3, 1, 4])
STATIC = torch.tensor([[0.5, -1.0], [0.0, 2.0], [1.0, 1.0], [-0.5, 0.0]], dtype=torch.float64)
close = torch.testing.assert_close
pytestmark = pytest.mark.filterwarnings("ignore:the gaps between samples take")  # of about a unit of time


def timed_field(n):
    return hbnode.HBNODE(hbnode.nn.MLP(n, [6], n, activation=nn.Tanh, time_dependent=True))


def make_rnn(field="hbnode", *, dtype=torch.float64, **options):
    torch.manual_seed(0)
    rnn = hbnode.ODERNN(3, 4, field=field, **options)
    with torch.no_grad():
        for p in rnn.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    return rnn.to(dtype)


def make_series(dtype=torch.float64, batch=4):
    generator = torch.Generator().manual_seed(1)
    t = torch.tensor([0.0, 1.0, 3.0, 4.0, 9.0])
    t = t + torch.linspace(0, 0.9, batch)[:, None] * torch.tensor([0.0, 1.0, 0.3, 2.0, 0.1])
    return torch.randn(batch, 5, 3, generator=generator).to(dtype), t.to(dtype)


def make_series_with_ties():
    """Two equal times in all series, and two more in the first."""
    x, t = make_series()
    t[:, 3], t[0, 1] = t[:, 2], t[0, 0]
    return x, t


def make_mask():
    return torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(3)) < 0.5


def joined(state):
    return state.h if state.m is None else torch.cat([state.h, state.m], -1)


# The equation


@pytest.mark.parametrize(
    ("field", "solver"),
    [
        *((timed_field, "sample"), ("anode", "batch"), ("ghbnode", "checkpoint"), ("sonode", "dopri5")),
        *slow(*((timed_field, name) for name in [*SOLVERS][1:])),
    ],
)
def test_it_is_the_loop_of_solves_and_cells(field, solver):
    rnn = make_rnn(field, rtol=1e-9, atol=1e-9, **SOLVERS[solver])
    x, t = make_series_with_ties()
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, 1] = mask[3, 4] = False
    after = joined(rnn.filter(x, t, mask=mask, lengths=LENGTHS).after)
    expected = reference.ode_rnn(rnn, x, t, mask, LENGTHS)
    close(after, expected, rtol=1e-6, atol=1e-7)
    parts = (
        torch.autograd.grad(y.square().sum(), list(rnn.parameters()), allow_unused=True) for y in (after, expected)
    )
    got, expected = (torch.cat([g.flatten() for g in each if g is not None]) for each in parts)
    assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(
    "options", [{}, {"per_sample": False}, {"gradient": "adjoint"}, {"options": {"step_size": 0.5}}], ids=str
)
def test_gradients_of_equal_times_are_those_of_moving_them_apart(options):
    rnn = make_rnn(rtol=1e-9, atol=1e-9, bidirectional=True, missing="decay", elapsed_features=True, **options)
    (x, t), apart = make_series_with_ties(), 1e-5

    def loss(t):
        return rnn(x, t, mask=make_mask())[0].square().sum()

    (at_t,) = torch.autograd.grad(loss(t.requires_grad_()), t)
    with torch.no_grad():
        for i, sign in ((2, -1), (3, 1)):  # one-sided differences of second order
            move = sign * apart * torch.eye(5, dtype=torch.float64)[i]
            slope = (4 * loss(t + move) - 3 * loss(t) - loss(t + 2 * move)) / (2 * sign * apart)
            close(slope, at_t[:, i].sum(), rtol=1e-6, atol=1e-6)


# Padding, parts, missing values


def test_dropout_between_layers_and_directions():
    rnn, series = make_rnn(num_layers=2, bidirectional=True, dropout=0.5), make_series()
    assert not rnn(*series)[0].equal(rnn(*series)[0])
    assert rnn.eval()(*series)[0].equal(rnn(*series)[0])


@pytest.mark.parametrize("solver", SOLVERS)
def test_padding_does_not_count_in_a_common_step(solver):
    rnn = make_rnn("ghbnode", rtol=1e-4, atol=1e-4, **SOLVERS[solver])
    x, t = make_series()
    once, _ = rnn(x[:2], t[:2])
    padded = [torch.cat([part[:2], part[:2].repeat(9, *[1] * (part.dim() - 1))]) for part in (x, t)]
    output, _ = rnn(*padded, lengths=torch.tensor([5, 5] + [1] * 18))
    close(output[:2], once, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", INPUTS.values(), ids=INPUTS)
def test_inputs_of_the_cell(options):
    rnn, got = make_rnn(**options, time_unit=5.0), []
    rnn.cell.register_forward_hook(lambda module, arguments, output: got.append(arguments[0]))
    (x, t), mask = make_series_with_ties(), make_mask()
    static, rate = STATIC if rnn.static_size else None, rnn.inputs.rate
    output, _ = rnn(torch.where(mask, x, torch.nan), t, mask=mask, static=static)
    got = torch.stack(got, 1)
    options = {name: value for name, value in options.items() if name != "static_size"}
    expected = reference_irregular.fed(x, t, mask, rate=rate, time_unit=5.0, static=static, **options)
    close(got, expected, rtol=1e-12, atol=1e-12)
    assert rnn.inputs.size == got.shape[-1]
    assert not torch.isnan(output).any()
    if rate is not None:
        close(*(torch.autograd.grad(one.square().sum(), rate, retain_graph=True) for one in (got, expected)))


# Forecasts and initial states


def test_a_forecast_from_each_sample():
    rnn, (x, t) = make_rnn(rtol=1e-10, atol=1e-10), make_series()
    _, after, state = rnn.filter(x, t)
    ahead, end = rnn.forecast(after, torch.tensor([0.5, 1.5]))
    assert end.t.equal(t + 1.5)
    close(ahead[:, -1], rnn.forecast(state, [0.5, 1.5])[0], rtol=1e-9, atol=1e-10)
    assert rnn.forecast(state, [0.0])[0][:, 0].equal(state.h)


def test_initial_states():
    x, t = make_series()
    before = lambda **options: make_rnn(**options).filter(x, t).before
    zeros = make_rnn(initial_state="zeros", static_size=2)
    assert zeros.start is zeros.static_start is None
    assert not zeros.filter(x, t, static=STATIC).before.h[:, 0].any()
    momentum = hbnode.HBNODE(hbnode.nn.MLP(4, [4], 4), initial_momentum=nn.Linear(4, 4))
    found = before(field=momentum, initial_state=nn.Sequential(nn.Flatten(), nn.Linear(15, 4)))
    close(found.m[:, 0], momentum.initial_momentum(found.h[:, 0]))
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(15, 8))
    close(joined(before(initial_state=encoder))[:, 0], encoder(x))
    static = make_rnn(static_size=2)
    found = joined(static.filter(x, t, static=STATIC).before)
    close(found[:, 0], static.start + STATIC @ static.static_start.weight.T)


# Layers and directions


def test_two_layers_are_two_networks():
    options = {"field": "ghbnode", "time_unit": 5.0}
    rnn = make_rnn(num_layers=2, **options)
    lower, upper = (hbnode.ODERNN(size, 4, **options).double() for size in (3, 4))
    for one, layer in ((lower, rnn), (upper, rnn.layers[1])):
        one.cell, one.field, one.start = layer.cell, layer.field, layer.start
    (x, t), mask = make_series(), make_mask()
    output, state = rnn(x, t, mask=mask, lengths=LENGTHS)
    middle, below = lower(x, t, mask=mask, lengths=LENGTHS)
    expected, _ = upper(middle, t, mask=mask.any(-1), lengths=LENGTHS)
    close(output, expected, rtol=1e-13, atol=1e-14)
    close(state.below.h, below.h, rtol=1e-13, atol=1e-14)
    assert rnn.nfe.forward == upper.nfe.forward + lower.nfe.forward


def test_two_directions_are_two_networks():
    rnn = make_rnn(bidirectional=True, time_unit=5.0)
    ahead, back = (hbnode.ODERNN(3, 4, time_unit=5.0).double() for _ in range(2))
    for one, layer in ((ahead, rnn), (back, rnn.reverse[0])):
        one.cell, one.field, one.start = layer.cell, layer.field, layer.start
    (x, t), mask = make_series_with_ties(), make_mask()
    output, state = rnn(x, t, mask=mask)
    expected, end = ahead(x, t, mask=mask)
    reverse, start = back(x.flip(1), t[:, -1:] - t.flip(1), mask=mask.flip(1))
    close(output, torch.cat([expected, reverse.flip(1)], -1), rtol=1e-12, atol=1e-13)
    close(state.h, torch.cat([end.h, start.h], -1), rtol=1e-12, atol=1e-13)


# Counts, grids, precision, programs


GAPS = torch.tensor([[0.0, 0.2, 1.0, 5.0], [0.0, 0.75, 0.9, 1.0], [0.0, 0.1, 3.1, 3.1001]], dtype=torch.float64)


@pytest.mark.parametrize("method", ["leapfrog", "nystrom4"])
def test_a_grid_follows_the_gaps(method):
    """Each gap of each sample in ceil(gap / h) equal steps: against a solve of its own for each."""
    field = hbnode.HBNODE(hbnode.nn.MLP(4, [4], 4, activation=nn.Tanh), damping=0.3)
    rnn = hbnode.ODERNN(2, 4, field=field, method=method, options={"step_size": 0.25}).double()
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    output, _ = rnn(x, GAPS)
    s = rnn.cell(x[:, 0], rnn.start.expand(3, -1))
    for i, steps in enumerate([(1, 3, 1), (4, 1, 12), (16, 1, 1)]):
        rows = []
        for b in range(3):
            state, times = tuple(part[b : b + 1] for part in s.chunk(2, 1)), GAPS[b, i : i + 2]
            ends = hbnode.odeint(field, state, times, method=method, steps=steps[b], gradient="direct")
            rows.append(torch.cat([part[-1] for part in ends], 1))
        s = rnn.cell(x[:, i + 1], torch.cat(rows))
        close(output[:, i + 1], s[:, :4], rtol=1e-11, atol=1e-12)
    assert [nfe.steps for nfe in rnn.nfe_per_gap] == [3, 12, 16]


def test_a_grid_counts_in_units_of_time_and_has_a_limit():
    x, t = torch.randn(3, 4, 2), GAPS.float()
    options = {"options": {"step_size": 0.25}, "method": "leapfrog"}
    rnn, scaled = hbnode.ODERNN(2, 4, **options), hbnode.ODERNN(2, 4, time_unit=100.0, **options)
    scaled.load_state_dict(rnn.state_dict() | {"time_unit": torch.tensor(100.0)})
    close(rnn(x, t)[0], scaled(x, 100 * t)[0], rtol=1e-5, atol=1e-6)
    assert rnn.nfe.steps == scaled.nfe.steps
    rnn.forecast(rnn(x, t)[1], [1.0, 4.0])
    assert rnn.nfe.steps == 4 + 12
    with pytest.raises(hbnode.errors.MaxStepsError, match=r"step_size=0.25 takes 400000 steps.*rnn.fit_time_unit"):
        rnn(x[:, :2], [0.0, 1e5])


def test_states_that_are_saved(tmp_path):
    filtered = make_rnn(dtype=torch.float32, rtol=1e-3, atol=1e-3).filter(*make_series(torch.float32))
    torch.save(filtered, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded.after.m, filtered.after.m)
    half = loaded.to(torch.float16)
    assert half.before.h.dtype == half.state.m.dtype == torch.float16
    assert half.state.t.dtype == loaded.state.t.dtype


# Failures


@pytest.mark.parametrize("solver", [{}, {"per_sample": False}, {"method": "tsit5", "steps": 2}, SOLVERS["dopri5"]])
def test_failures_tell_the_time(solver):
    """The cell explodes at the third sample, at 102."""

    class Cell(nn.Module):
        def forward(self, x, s):
            return torch.where(x > 0, torch.inf, s)

    x = torch.zeros(2, 5, 1)
    x[1, 2] = 1.0
    with pytest.raises(hbnode.errors.NonFiniteError) as failure:
        hbnode.ODERNN(1, 2, cell=Cell(), **solver)(x, torch.arange(100.0, 105.0))
    assert 102 <= failure.value.t <= 103


@pytest.mark.parametrize("per_sample", [True, False])
def test_spans_that_are_huge_against_the_dynamics_fail_early(per_sample):
    rnn = hbnode.ODERNN(3, 4, field=hbnode.HBNODE(lambda h: -h), per_sample=per_sample, max_steps=1000)
    days = 1.7e9 + 86400.0 * torch.arange(5, dtype=torch.float64)
    with pytest.raises(hbnode.errors.MaxStepsError, match=r"Fix: .*rnn.fit_time_unit\(t\)") as failure:
        rnn(make_series(torch.float32)[0], days)
    assert failure.value.nfe < 500 * 8


def test_steps_that_grow_are_waited_for():
    """h' = -100 h / (1 + 100 t): its steps grow with t, from where they would be far too many."""
    field, t = hbnode.NODE(lambda t, h: -100 * h / (1 + 100 * t)), torch.tensor([0.0, 1e5], dtype=torch.float64)
    y0 = torch.ones(2, 1, dtype=torch.float64)
    y = hbnode.odeint(field, y0, t, method="tsit5", rtol=1e-10, atol=1e-20, max_steps=2000)
    close(y[-1], y0 / (1 + 100 * t[-1]), rtol=1e-6, atol=0)


def test_what_is_refused():
    rnn, static, (x, t) = hbnode.ODERNN(3, 4), hbnode.ODERNN(3, 4, static_size=2), make_series(torch.float32)
    both = hbnode.ODERNN(3, 4, bidirectional=True)
    adjoint = make_rnn(**SOLVERS["dopri5-adjoint"], dtype=torch.float32)
    make, field, (_, state) = hbnode.ODERNN, hbnode.HBNODE(nn.Linear(4, 4)), rnn(x, t)
    for message, use in (
        ("per_sample", lambda: make(3, 4, method="dopri5")),
        ("field is one module", lambda: make(3, 4, num_layers=2, field=field)),
        ("cell returned", lambda: make(3, 4, cell=nn.Bilinear(3, 8, 5))(x, t)),
        (r"no gradient with respect to times.*Fix: gradient='direct'", lambda: adjoint(x, t.clone().requires_grad_())),
        ("a bidirectional ODERNN", lambda: both.filter(x, t)),
        ("lies after the first of t", lambda: rnn(x, t, state)),
        (r"read by name.*Fix: state\.h", lambda: state[-1]),
        (r"Fix: ODERNN\(..., static_size=2\)", lambda: rnn(x, t, static=STATIC)),
        (r"static must be \(batch, static_size\) = \(4, 2\)", lambda: static(x, t)),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            use()
