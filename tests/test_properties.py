"""What holds for any method, model and settings; Hypothesis draws which."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

import hbnode
from tests.models import MODELS, make_field

NATIVE = {method.name: method for method in hbnode.methods() if method.library == "hbnode"}
METHODS, ADAPTIVE = [*NATIVE], [name for name, method in NATIVE.items() if method.steps == "adaptive"]
SPLITTING = [name for name, method in NATIVE.items() if "reversible" in method.gradients]
RUNGE_KUTTA = [name for name, method in NATIVE.items() if method.field == "any"]
seeds = st.integers(0, 2**16)
increasing = st.lists(st.sampled_from([0.1, 0.3, 0.5, 1.0]), min_size=1, max_size=3)  # gaps between times


def times_from(start, gaps):
    return [*itertools.accumulate(gaps, initial=start)]


def suits(method, model):
    """Whether a method can solve a model."""
    return method in RUNGE_KUTTA or model == "hbnode" or (model == "ghbnode" and method in SPLITTING)


pairs = st.sampled_from([(method, model) for method in METHODS for model in MODELS if suits(method, model)])
adaptive_pairs = st.sampled_from([(a, b) for a in ADAPTIVE for b in MODELS if suits(a, b)])


def field_and_state(model, seed, rows=3):
    torch.manual_seed(seed)
    field = make_field(model).double()
    with torch.no_grad():
        return field, field.initial_state(torch.randn(rows, 4, dtype=torch.float64))


def each(function, state):
    return tuple(map(function, state)) if isinstance(state, tuple) else function(state)


def assert_close(found, expected, tolerance):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def there_and_back(field, state, times, **solver):
    with torch.no_grad():
        end = each(lambda part: part[-1], hbnode.odeint(field, state, times, **solver))
        return each(lambda part: part[-1], hbnode.odeint(field, end, times[::-1], **solver))


# Solves


@given(adaptive_pairs, st.sampled_from([False, True]), increasing, seeds)
def test_there_and_back_is_the_identity(pair, per_sample, gaps, seed):
    method, model = pair
    field, state = field_and_state(model, seed)
    solver = {"method": method, "per_sample": per_sample, "rtol": 1e-7, "atol": 1e-7}
    start = there_and_back(field, state, times_from(0.2, gaps), **solver)
    assert_close(start, state, 1e-4)  # 1000 tolerances


@given(st.sampled_from(SPLITTING), st.sampled_from(["hbnode", "ghbnode"]), increasing, st.integers(1, 9), seeds)
def test_a_symmetric_grid_is_undone_to_rounding(method, model, gaps, steps, seed):
    field, state = field_and_state(model, seed)
    start = there_and_back(field, state, times_from(0.2, gaps), method=method, steps=steps)
    assert_close(start, state, 1e-10)


@given(pairs, increasing, st.integers(1, 5), seeds)
def test_parts_of_a_grid_are_the_whole(pair, gaps, steps, seed):
    method, model = pair
    field, state = field_and_state(model, seed)
    times = times_from(-0.3, gaps)
    options = {"method": method, "steps": steps}
    with torch.no_grad():
        whole = hbnode.odeint(field, state, times, **options)
        for i, (begin, end) in enumerate(itertools.pairwise(times)):
            there = hbnode.odeint(field, each(lambda part, i=i: part[i], whole), [begin, end], **options)
            assert_close(each(lambda part: part[1], there), each(lambda part, i=i: part[i + 1], whole), 1e-12)


@given(adaptive_pairs, increasing, st.integers(1, 4), seeds)
def test_batch_mates_do_not_matter(pair, gaps, rows, seed):
    """With steps and times of each sample's own; but for the rounding of the network."""
    method, model = pair
    field, state = field_and_state(model, seed, rows)
    times = torch.tensor(times_from(0.0, gaps), dtype=torch.float64) + torch.rand(rows, 1, dtype=torch.float64)
    solver = {"method": method, "per_sample": True, "rtol": 1e-5, "atol": 1e-5}
    with torch.no_grad():
        together = hbnode.odeint(field, state, times, **solver)
        for row in range(rows):
            of_one = slice(row, row + 1)
            alone = hbnode.odeint(field, each(lambda part, of=of_one: part[of], state), times[of_one], **solver)
            assert_close(alone, each(lambda part, of=of_one: part[:, of], together), 1e-9)
