"""Step size control as pure functions: the published formula in plain numbers, for NumPy and for torch."""

import math

import numpy as np
import pytest
import torch

from hbnode.solve.control import UNEVEN, Clip, OfTorch, PIController

both = pytest.mark.parametrize("xp", [np, OfTorch], ids=["numpy", "torch"])
FACTOR = 0.9 * 0.5**-0.25 * 0.2**0.05  # error ratios of 0.5 now and 0.2 before, with an embedded solution of order 3


def arrays(xp, *values):
    return [np.asarray(x) if xp is np else torch.tensor(np.asarray(x)) for x in values]


def control(xp, size, **changes):
    size, *values = arrays(xp, [size], *([x] for x in changes.values()))
    (none,) = arrays(xp, [0])
    start = PIController(3).start(xp, size, none > 0, none)
    return start._replace(**dict(zip(changes, values, strict=True)))


def judge(xp, c, ratio, longest=math.inf, **lanes):
    then, ratio, *rest = arrays(xp, [1.0], [ratio], *([x] for x in lanes.values()))
    accepted, after = PIController(3, longest).judge(xp, c, then, ratio, *rest)
    return bool(accepted[0]), type(after)(*[float(x[0]) for x in after])


@both
@pytest.mark.parametrize(
    ("ratio", "was_rejected", "factor"),
    [
        (0.5, False, FACTOR),
        (0.5, True, FACTOR),
        (0.01, False, FACTOR * 50**0.25),
        (0.01, True, 1.0),  # not enlarged after a rejection
        (1e-9, False, 8.0),
        (16.0, False, 0.45),  # without the earlier ratio
        (1e9, False, 0.1),
        (math.inf, False, 0.1),
    ],
)
def test_the_next_size_is_that_of_the_formula(xp, ratio, was_rejected, factor):
    c = control(xp, 2.0, taken=2.0, previous=0.2, rejected=was_rejected, failures=1.0)
    accepted, after = judge(xp, c, ratio)
    assert accepted == (ratio <= 1)
    assert after.size == pytest.approx(2.0 * factor, rel=1e-14)
    assert after.now == (1.0 if accepted else 0.0)
    assert after.previous == (max(ratio, 1e-4) if accepted else 0.2)
    assert after.rejected == (not accepted)
    assert after.failures == (2.0 if ratio == math.inf else 0.0)
    assert judge(xp, c, ratio, longest=0.15)[1].size == 0.15


@both
def test_a_step_that_its_target_cut_does_not_shorten_the_next_one(xp):
    assert judge(xp, control(xp, 2.0, taken=0.3, previous=0.2), 0.5)[1].size == 2.0
    assert judge(xp, control(xp, 2.0, taken=1.5, previous=0.2), 0.5)[1].size == pytest.approx(1.5 * FACTOR, rel=1e-14)
    assert judge(xp, control(xp, 2.0, taken=0.3), 16.0)[1].size == pytest.approx(0.3 * 0.45, rel=1e-14)


@both
def test_a_step_that_is_taken_again_changes_neither_time_nor_size(xp):
    accepted, after = judge(xp, control(xp, 2.0, taken=2.0, previous=0.2), 0.5, repeats=True)
    assert not accepted
    assert (after.now, after.size) == (0.0, 2.0)


@both
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize(("size", "count"), [(3.0, 1), (0.96, 1), (0.6, 2), (0.49, 2), (0.3, 4)])
def test_steps_to_a_target_are_equal(xp, uneven, size, count):
    """The first of several may be shorter, and a step may be longer than the size by a twentieth."""
    (end,) = arrays(xp, [1.0])
    c, steps, times = control(xp, size, uneven=uneven), PIController(3), []
    while not times or times[-1] < 1:
        then, c = steps.plan(xp, Clip(end), c)
        _, c = steps.judge(xp, c, then, 0.5 + 0 * end)
        (again,) = arrays(xp, [size])
        c, times = c._replace(size=again), [*times, float(then[0])]
    first = UNEVEN / count if uneven and count > 1 else 1 / count
    rest = [first + k * (1 - first) / (len(times) - 1) for k in range(1, len(times))]
    np.testing.assert_allclose(times, [first, *rest], rtol=1e-14)
    assert times[-1] == 1.0
    assert len(times) == count if not uneven else times[0] == pytest.approx(first, rel=1e-14)
    assert np.diff(times).max(initial=times[0]) <= 1.06 * size


@both
@pytest.mark.parametrize(
    ("size", "most", "target", "passed"),
    [
        (0.2, 9, 0.3, 0),
        (0.29, 9, 0.3, 0),
        (0.49, 9, 0.5, 1),
        (0.6, 9, 0.5, 1),
        (0.6, 0, 0.3, 0),
        (0.9, 9, 0.9, 2),
        (0.9, 1, 0.5, 1),
        (9.0, 9, 0.9, 2),
    ],
)
def test_a_step_contains_as_many_jumps_as_it_may(xp, size, most, target, passed):
    """After a rejection one less, which is at least none."""
    end, jumps = arrays(xp, [1.0], [[0.3, 0.5, 0.9, math.inf]])
    clip, c = Clip(end, jumps=jumps), control(xp, size, most=most)
    found, number = clip.target(xp, c)
    assert (float(found[0]), int(number[0])) == (target, passed)
    _, c = PIController(3).plan(xp, clip, c)
    assert judge(xp, c, 0.5)[1].most == most
    assert judge(xp, c, 9.0)[1].most == max(passed - 1, 0)


@both
def test_a_step_ends_on_the_next_stop(xp):
    end, stops, jumps = arrays(xp, [1.0], [[0.2, 0.4, 1.0]], [[0.3, 0.5]])
    for now, with_stops, with_jumps in (
        (0.0, 0.2, 0.2),
        (0.2, 0.4, 0.3),
        (0.3, 0.4, 0.4),
        (0.4, 1.0, 0.5),
        (0.5, 1.0, 1.0),
    ):
        c = control(xp, 0.1, now=now)
        assert float(Clip(end, stops).target(xp, c)[0][0]) == with_stops
        assert float(Clip(end, stops, jumps).target(xp, c)[0][0]) == with_jumps
