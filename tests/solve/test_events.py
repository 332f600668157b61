"""Events: where they are, what happens there, their gradients, and what is refused."""

import math

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hbnode
from hbnode import Event
from hbnode.errors import NonFiniteError, ZenoError

FALL = hbnode.HBNODE(lambda h: -10 + 0 * h, damping=0.0, learn_damping=False)
METHODS = {
    "nystrom4": {}, "nystrom8": {}, "tsit5": {}, "exponential": {}, "leapfrog": {"steps": 20},
    "blanes_moan4": {"steps": 20},
}  # fmt: skip


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


T = float64(0.0, 3.0).requires_grad_()


def height(t, state):
    return state[0][:, 0]


def bounce(t, state):
    return state[0], -0.5 * state[1]


def fall(heights, t, event, **settings):
    h = heights.unsqueeze(-1)
    return hbnode.odeint(FALL, (h, 0 * h), t, events=event, **settings)


@pytest.mark.sparse
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "adjoint"])
def test_bounces_and_gradients_are_those_of_the_closed_form(method, gradient):
    """Every sample has its own bounces; t_n = √(h/5) (1 + 2 Σ_{k<n} e^k), and between them the ball is a parabola."""
    h = float64([1.0], [2.0], [0.3]).requires_grad_()
    e = float64([0.5], [0.8], [0.6]).requires_grad_()
    floor = Event(height, lambda t, y: (0 * y[0], -e * y[1]), max_count=3)
    settings = {"method": method, "gradient": gradient, "rtol": 1e-10, "atol": 1e-10, **METHODS[method]}
    (x, _), record = hbnode.odeint(FALL, (h, 0 * h), [0.0, 0.2, 0.5, 0.9], events=floor, **settings)
    k = torch.arange(3)
    exact = (h / 5).sqrt() * (1 + 2 * torch.cat([0 * e, e, e + e**2], 1))
    since = 0.9 - exact
    flight = torch.where(k == 2, 0, since * (h * 20).sqrt() * e ** (k + 1) - 5 * since**2)
    last = flight[torch.arange(3), (since > 0).sum(1) - 1]
    assert record.count.tolist() == (exact < 0.9).sum(1).tolist()
    seen = ~record.t.isnan()
    torch.testing.assert_close(record.t[seen], exact[seen], rtol=0, atol=1e-9)
    torch.testing.assert_close(x[3, :, 0], last, rtol=0, atol=1e-9)
    for value, wanted in ((record.t[seen].sum(), exact[seen].sum()), (x[3].sum(), last.sum())):
        found = torch.autograd.grad(value, (h, e), retain_graph=True)
        torch.testing.assert_close(found, torch.autograd.grad(wanted, (h, e), retain_graph=True), rtol=0, atol=1e-7)


def test_gradients_reach_the_field_the_event_the_jump_and_the_times():
    """Those of y'' + 0.3 y' = -k y - 1 as a field of first order."""
    weights = torch.rand(2, 4, 2, dtype=torch.float64)

    def loss(y0, k, level, damp, t):
        field = lambda t, y: torch.stack([y[:, 1], -k * y[:, 0] - 0.3 * y[:, 1] - 1], 1)
        jump = lambda t, y: torch.stack([y[:, 0], damp * y[:, 1].abs() + 0.1 * t.cos()], 1)
        event = Event(lambda t, y: y[:, 0] + level * torch.sin(t), jump, direction=-1, max_count=2)
        y, record = hbnode.odeint(field, y0, t, events=event, gradient="direct", steps=20)
        return (y[1:] * weights).sum() + record.t.nan_to_num().sum() + record.state.nan_to_num().sum()

    at = [torch.randn(4, 2, dtype=torch.float64) + 1, *float64(2.0, 0.2, 0.8), float64(0.0, 1.3, 4.0)]
    leaves = [x.clone().requires_grad_() for x in at]
    for i, gradient in enumerate(torch.autograd.grad(loss(*leaves), leaves)):
        direction = torch.randn(at[i].shape, dtype=torch.float64)
        ends = [loss(*[x + side * 1e-5 * direction if j == i else x for j, x in enumerate(at)]) for side in (-1, 1)]
        difference = float(ends[1] - ends[0]) / 2e-5
        assert float((gradient * direction).sum()) == pytest.approx(difference, rel=2e-6, abs=1e-7)


def test_without_a_jump_a_sample_ends_at_its_event_and_holds_its_state():
    (h, m), record = fall(float64(1.0, 2.0), [0.0, 0.5, 0.6, 3.0], Event(height))
    assert h[:, 0, 0].tolist() == pytest.approx([1, 0, 0, 0], abs=1e-12)
    assert h[:, 1, 0].tolist() == pytest.approx([2, 0.75, 0.2, 0], abs=1e-12)
    assert m[3, :, 0].tolist() == pytest.approx([-math.sqrt(20), -math.sqrt(40)])
    torch.testing.assert_close(record.state[1][:, 0], m[3])


def test_a_start_at_zero_is_no_event_and_directions_are_along_the_solve():
    for speed, times in ((2.0, [[pytest.approx(0.4)]]), (0.0, [[]])):
        _, record = hbnode.odeint(FALL, (float64([0.0]), float64([speed])), [0.0, 3.0], events=Event(height))
        assert [t[: record.count] for t in record.t.tolist()] == times
    spin = (lambda t, y: (y[1], -y[0])), (float64(1.0), float64(0.0))
    for direction, sign, quarters in ((0, 1, [1, 3, 5]), (-1, 1, [1, 5]), (1, 1, [3, 7]), (-1, -1, [1, 5])):
        event = Event(lambda t, y: y[0], direction=direction, max_count=len(quarters))
        _, record = hbnode.odeint(*spin, [0.0, sign * 15.0], events=event, rtol=1e-7, atol=1e-7)
        assert record.t[0].tolist() == pytest.approx([sign * q * math.pi / 2 for q in quarters], abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"steps": 3}, {"rtol": 1e-3}])
def test_walls_that_are_hit_at_the_same_time_both_reflect(settings):
    """A free particle in the unit square, started towards corners and elsewhere, against the unfolded path."""
    torch.manual_seed(0)
    y0 = torch.cat([torch.rand(30, 2), torch.randn(30, 2)], 1).double()
    y0[::3, 1::2] = y0[::3, ::2]
    y0[1::3, 1], y0[1::3, 3] = 1 - y0[1::3, 0], -y0[1::3, 2]
    y0.requires_grad_()
    free = hbnode.NODE(lambda y: torch.cat([y[:, 2:], 0 * y[:, 2:]], 1))

    def wall(k):
        signs = torch.ones(4).index_fill(0, torch.tensor(2 + k), -1.0)
        return Event(lambda t, y: y[:, k] * (1 - y[:, k]), lambda t, y: y * signs)

    y, records = hbnode.odeint(free, y0, [0.0, 7.3], events=[wall(0), wall(1)], **settings)
    unfolded = torch.remainder(y0[:, :2] + 7.3 * y0[:, 2:], 2)
    exact = torch.where(unfolded > 1, 2 - unfolded, unfolded)
    torch.testing.assert_close(y[1, :, :2], exact, rtol=0, atol=1e-12)
    hits = (y0[:, :2] + 7.3 * y0[:, 2:]).detach().floor().abs()
    torch.testing.assert_close(torch.stack([r.count for r in records], 1).double(), hits)
    found, wanted = (torch.autograd.grad(x.sum(), y0, retain_graph=True)[0] for x in (y[1, :, :2], exact))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def level(value, jump=None, direction=0):
    return Event(lambda t, y: y[:, 0] - value, jump, direction)


def test_only_what_crosses_fires_when_another_event_jumps_or_repeats_the_step():
    y0, rise = torch.zeros(1, 1, dtype=torch.float64), lambda t, y: 0 * y + 1
    down, same, fallen = level(1, lambda t, y: y - 3), level(1, lambda t, y: y), level(1.2, lambda t, y: y - 5, -1)
    for events, end, exact in (([down, level(-1)], 1.5, -1.5), ([fallen, same], 3.0, 3.0)):
        for order in (events, events[::-1]):
            y, records = hbnode.odeint(rise, y0, [0.0, end], events=order)
            assert y[1].item() == pytest.approx(exact)
            assert sum(record.count.item() for record in records) == 1


@pytest.mark.parametrize("method", METHODS)
def test_one_long_step_finds_all_events_in_their_order(method):
    """A ball from 5 stops at 0.9 and falls again; thrown from 0.1, it returns after a step's middle."""
    settings = {"method": method, "steps": 1}
    elastic = Event(height, lambda t, y: (y[0], -y[1]))
    stop = Event(lambda t, y: t - 0.9, lambda t, y: (y[0], 0 * y[1]))
    h = float64([5.0])
    _, (bounces, stops) = hbnode.odeint(FALL, (h, 0 * h), [0.0, 1.5], events=[elastic, stop], **settings)
    assert stops.t.tolist() == [[pytest.approx(0.9)]]
    assert bounces.t.tolist() == [[pytest.approx(0.9 + math.sqrt((5 - 5 * 0.81) / 5), abs=1e-9)]]
    _, landing = hbnode.odeint(FALL, (0 * h + 0.1, h), [0.0, 2.0], events=Event(height), **settings)
    assert landing.t.item() == pytest.approx((5 + math.sqrt(27)) / 10)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "adjoint"])
def test_simultaneous_jumps_are_applied_in_the_order_of_the_list(gradient):
    """y' = c from y0 to the level L at t = (L - y0) / c, where y becomes L + a, then b (L + a)."""
    level, c, a, b = (float64(*x).requires_grad_() for x in ([0.5, 0.7], [1.0, 2.0], [1.0, 1.5], [2.0, 3.0]))
    y0 = float64([0.0], [0.1]).requires_grad_()
    events = [
        Event(lambda t, y: y[:, 0] - level, lambda t, y: y + a[:, None]),
        Event(lambda t, y: y[:, 0] ** 3 - level**3, lambda t, y: b[:, None] * y),
        Event(lambda t, y: y[:, 0] - level, max_count=9),
    ]
    field = lambda t, y: c[:, None] + 0 * y
    y, records = hbnode.odeint(field, y0, [0.0, 2.0], events=events, gradient=gradient, rtol=1e-8, atol=1e-8)
    t = (level - y0[:, 0]) / c
    states = [level, level + a, b * (level + a)]
    exact = [states[2] + c * (2 - t), t, t, t, *states]
    found = [y[1, :, 0], *(r.t[:, 0] for r in records), *(r.state[:, 0, 0] for r in records)]
    assert [r.count.tolist() for r in records] == [[1, 1]] * 3
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)
    leaves, unused = (y0, level, c, a, b), {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    for value, wanted in zip(found, exact, strict=True):
        pair = [torch.autograd.grad(x.sum(), leaves, **unused) for x in (value, wanted)]
        torch.testing.assert_close(*pair, rtol=0, atol=1e-8)


LINES = ((0.0, 1.0), (0.5, -0.7))  # a + b s
ZEROS = (lambda x, level: x - level, lambda x, level: 3 * (level - x), lambda x, level: x**3 - level**3)
JUMPS = (lambda x: x, lambda x: x + 1, lambda x: 2 * x, lambda x: -x)


@given(st.data(), st.sampled_from([*METHODS, "nystrom6", "rodas5p"]), st.sampled_from([1, -1]), st.booleans())
@hypothesis.settings(max_examples=20)
def test_events_have_the_order_of_their_times(data, method, sign, is_output):
    """Those of equal times, also on two lines, have that of the list. Jumps change a value that no event sees."""
    later = data.draw(st.lists(st.sampled_from([0.0, 1e-10, -1e-7, 1e-5, 1e-3]), min_size=2, max_size=4))
    each = lambda values: [data.draw(st.sampled_from(values)) for _ in later]
    lines, zeros, jumps, limits = each([0, 1]), each(ZEROS), each(JUMPS), each([9, 9, 1])

    def event(key, i, zero, jump, limit):
        a, b = LINES[i]
        after = lambda t, y: (torch.cat([y[0][:, :2], jump(y[0][:, 2:])], 1), y[1])
        return Event(lambda t, y: zero(y[0][:, i], a + b * (0.5 + key)), after, max_count=limit)

    events = [*map(event, later, lines, zeros, jumps, limits)]
    value, times = 1.0, [[] for _ in events]
    for k in sorted(range(len(events)), key=later.__getitem__):
        value = jumps[k](value)
        times[k].append(sign * (0.5 + later[k]))
        if limits[k] == 1:
            break
    h, m = float64([[*(a for a, _ in LINES), 1.0]] * 2, [[*(sign * b for _, b in LINES), 0.0]] * 2)
    t = [0.0, sign * 0.5, sign * 2.0] if is_output else [0.0, sign * 2.0]
    free = hbnode.HBNODE(lambda h: 0 * h, damping=0.0, learn_damping=False)
    (x, _), records = hbnode.odeint(free, (h, m), t, events=events, method=method, **METHODS.get(method, {}))
    assert x[-1, :, 2].tolist() == [value] * 2
    found = [r.t[0, : r.count[0]].tolist() for r in records]
    assert found == [pytest.approx(exact, abs=1e-11) for exact in times]


def test_event_times_keep_their_digits_beside_float32_states():
    h = torch.ones(1, 1)
    _, record = hbnode.odeint(FALL, (h, 0 * h), [1e4, 1e4 + 3], events=Event(height))
    assert (record.t - 1e4).item() == pytest.approx(math.sqrt(0.2), abs=1e-5)


@pytest.mark.parametrize("gradient", ["direct", "checkpoint", "adjoint"])
def test_a_sample_that_ended_where_the_field_is_singular_does_not_spoil_gradients(gradient):
    """Tanks drain by y' = -k √y down to the level c; √y has no derivative at 0, where the first two then stay."""
    y0, k, c = float64([1.0], [2.0], [30.0]).requires_grad_(), float64(1.0).requires_grad_(), 1e-3
    empty = Event(lambda t, y: y[:, 0] - c, lambda t, y: 0 * y, max_count=1)
    settings = {"events": [empty, level(20, lambda t, y: y)], "rtol": 1e-8, "atol": 1e-8, "gradient": gradient}
    _, (empty, _) = hbnode.odeint(lambda t, y: -k * y.clamp(min=0).sqrt(), y0, [0.0, 4.0], **settings)
    exact = 2 * (y0[:2, 0].sqrt() - c**0.5) / k
    torch.testing.assert_close(empty.t[:2, 0], exact, rtol=0, atol=1e-6)
    found, wanted = (torch.autograd.grad(t.sum(), (y0, k)) for t in (empty.t[:2], exact))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.sparse
@pytest.mark.parametrize("times", [[1.0, 0.4, -2.0], [[0.0, 0.5, 2.0], [0.0, 0.0, 1.0], [0.3, 0.3, 0.3]]])
@pytest.mark.parametrize("settings", [{}, {"steps": 20}, {"jump_times": [0.7]}])
def test_the_adjoint_agrees_with_backpropagation(times, settings):
    """A damped ball hits a moving floor and a wall, and ends at the second event without a jump; t has a gradient."""
    h, k = float64([1.0, 0.3], [0.4, 1.0], [2.0, 2.0]).requires_grad_(), float64(4.0).requires_grad_()
    t = torch.tensor(times, dtype=torch.float64, requires_grad=True)
    force = (lambda t: (t > 0.7).double()) if "jump_times" in settings else torch.sin
    field = hbnode.HBNODE(lambda t, h: -k * h - force(t) - 1, damping=0.2).double()
    events = [
        Event(lambda t, y: y[0][:, 0] - 0.1 * t, lambda t, y: (y[0], -0.9 * y[1] * k / 4)),
        Event(lambda t, y: y[0][:, 1], max_count=2),
    ]
    found, settings = [], {"events": events, "rtol": 1e-7, "atol": 1e-7} | settings
    for gradient in ("checkpoint", "adjoint"):
        y, records = hbnode.odeint(field, (h, 0 * h), t, gradient=gradient, **settings)
        values = [*y, *(x.nan_to_num() for record in records for x in (record.t, record.state[1]))]
        loss = sum((torch.linspace(1, 2, value.numel()) * value.flatten()).sum() for value in values)
        found.append((values, torch.autograd.grad(loss, (h, k, t, *field.parameters()))))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-5, atol=1e-5)


def test_samples_do_not_depend_on_each_other_and_may_have_their_own_times():
    heights, t = float64(1.0, 2.0, 0.1), float64([0.0, 0.3, 2.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0])
    event = Event(height, bounce, max_count=6)
    (together, _), record = fall(heights, t, event)
    for i in range(3):
        (alone, _), own = fall(heights[i : i + 1], t[i : i + 1], event)
        torch.testing.assert_close(together[:, i], alone[:, 0], rtol=0, atol=1e-12)
        torch.testing.assert_close(record.t[i], own.t[0], rtol=0, atol=1e-12, equal_nan=True)


def test_infinitely_many_bounces_are_an_error_that_names_the_sample():
    with pytest.raises(ZenoError, match=r"sample 1 pile up.*max_count=n") as caught:
        fall(float64(1.0, 0.01), [0.0, 1.0], Event(height, bounce))
    assert caught.value.t == pytest.approx(3 * math.sqrt(0.01 / 5), abs=1e-9)
    _, record = fall(float64(1.0), [0.0, 10.0], Event(height, bounce, max_count=25))
    gaps = record.t[0].diff()
    torch.testing.assert_close(gaps[1:] / gaps[:-1], torch.full((23,), 0.5).double(), rtol=1e-7, atol=0)


@pytest.mark.sparse
@pytest.mark.parametrize("settings", [{"method": "nystrom4"}, {"steps": 5}, {"method": "leapfrog", "steps": 20}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_event_at_an_output_time_happens_at_most_once(dtype, settings):
    """The ball from 5 t² reaches the floor at t, up to rounding; the solve ends there, or goes on for a little."""
    for start, end in ((0.0, 0.3), (-3.0, 1.0)):
        h = torch.tensor([5 * end**2], dtype=dtype)
        for times in ([0.0, end], [0.0, 0.3 * end, 0.6 * end, end], [0.0, end, 1.2 * end]):
            (x, _), record = fall(h, [start + t for t in times], Event(height, bounce), **settings)
            goes_on = times[-1] > end
            assert record.count.item() == 1 if goes_on else record.count.item() <= 1
            assert x[-1].item() == pytest.approx(0.8 * end**2 if goes_on else 0, abs=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_events_need_no_gradient(mode):
    with mode():
        h, e = float64([1.0], [2.0]), float64([0.5], [0.5])
        event = Event(lambda t, y: (e * y[0])[:, 0], lambda t, y: (y[0], -e * y[1]), max_count=2)
        _, record = hbnode.odeint(FALL, (h, 0 * h), [0.0, 3.0], events=event)
    assert record.t.flatten().tolist() == pytest.approx([math.sqrt(x) for x in (0.2, 0.8, 0.4, 1.6)], abs=1e-12)


def test_values_behind_no_event_do_not_spoil_gradients():
    """The jump divides by the speed, which is 0 for a ball that rests in the air."""
    h = float64([1.0], [2.0]).requires_grad_()
    field = hbnode.HBNODE(lambda h: float64([-10.0], [0.0]) + 0 * h, damping=0.0, learn_damping=False)
    event = Event(height, lambda t, y: (y[0], y[1].square() / y[1].abs()), max_count=1)
    (x, _), record = hbnode.odeint(field, (h, 0 * h), [0.0, 1.0], events=event)
    (gradient,) = torch.autograd.grad(record.t[0].sum() + x[1, 1].sum(), h)
    torch.testing.assert_close(gradient, float64([0.1 / math.sqrt(0.2)], [1.0]))


def test_an_empty_batch_has_an_empty_record():
    (h, _), record = fall(float64(), [0.0, 1.0], Event(height))
    assert [*map(len, h), len(record.t), len(record.state[0])] == [0] * 4


@pytest.mark.parametrize("gradient", ["checkpoint", "adjoint"])
def test_evaluations_of_events_are_counted(gradient):
    calls = []
    field = hbnode.HBNODE(lambda h: calls.append(1) or -10 + 0 * h, damping=0.1)
    with hbnode.count_nfe(field) as nfe:
        start = torch.ones(2, 1), torch.zeros(2, 1)
        (h, _), _ = hbnode.odeint(field, start, [0.0, 1.0], events=Event(height, bounce), gradient=gradient)
        assert nfe.forward == len(calls)
        h.sum().backward()
    assert nfe.total == len(calls)
    assert (nfe.backward > 0) == (gradient == "adjoint")


@pytest.mark.parametrize(
    ("event", "settings", "error", "message"),
    [
        (Event(lambda t, y: y[0]), {}, ValueError, r"shape \(batch,\) = \(2,\), got shape \(2, 1\)"),
        (Event(lambda t, y: (height(t, y) > 0).double()), {}, ValueError, "must be differentiable"),
        (Event(height, lambda t, y: y[0]), {}, ValueError, "jump must return a state like its argument"),
        (Event(height, lambda t, y: (y[0].float(), y[1].float())), {}, ValueError, r"in torch\.float64, got .*float32"),
        (Event(height, lambda t, y: (y[0] / 0, y[1])), {}, NonFiniteError, "a jump returned"),
        (Event(lambda t, y: height(t, y).log()), {}, NonFiniteError, "event function returned NaN"),
        (Event(height), {"method": "dopri5"}, ValueError, "native methods.*odeint_event"),
        (Event(height), {"gradient": "reversible", "steps": 4}, ValueError, "does not support events"),
        (Event(height), {"method": "leapfrog", "steps": 4, "t": T}, ValueError, "has no gradient of t"),
        (height, {}, TypeError, "events must be an Event"),
    ],
)
def test_what_cannot_be_an_event_is_refused(event, settings, error, message):
    with pytest.raises(error, match=message):
        fall(float64(1.0, 2.0), **{"t": [0.0, 3.0], "event": event, **settings})
    with pytest.raises(ValueError, match=r"direction.*Fix"):
        Event(height, direction=2)


def test_second_derivatives_and_transforms_are_refused():
    h = float64([1.0]).requires_grad_()
    _, record = hbnode.odeint(FALL, (h, 0 * h), [0.0, 3.0], events=Event(lambda t, y: y[0][:, 0]), gradient="direct")
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(record.t.sum(), h, create_graph=True)
    with pytest.raises(ValueError, match=r"transforms of torch\.func"):
        torch.func.grad(lambda h: hbnode.odeint(FALL, (h, 0 * h), [0.0, 3.0], events=Event(height))[1].t.sum())(h)
