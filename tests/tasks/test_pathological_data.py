"""The pathological problems: what is drawn, and what counts as wrong, against plain twins."""

import math

import pytest
import torch

pytest.importorskip("tqdm")

from tasks.data.pathological import PROBLEMS, Problem, between

LENGTHS = (10, 50, 57)


def drawn(name, length, count=1000):
    return Problem(name, length).draw(count, torch.Generator().manual_seed(0))


def integers(low, high):
    """i[low, high]: the integers between two numbers, each a pair (numerator, denominator)."""
    return set(range(math.ceil(low), math.floor(high) + 1))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("length", LENGTHS)
def test_shapes_and_encodings(name, length):
    problem = Problem(name, length)
    x, targets, last = problem.draw(4, torch.Generator().manual_seed(0))
    features = problem.encode(x)
    assert features.shape == (4, problem.longest, problem.input_size)
    assert features.dtype == torch.float32
    assert last.shape == (4,)
    assert int(last.max()) < problem.longest
    outputs = (
        torch.randn(4, problem.output_size)
        if problem.reads_end
        else torch.randn(4, problem.longest, problem.output_size)
    )
    assert problem.is_wrong(outputs, targets).shape == (4,)
    if problem.loss == "cross_entropy":
        assert 0 <= int(targets.min()) <= int(targets.max()) < problem.output_size
        assert targets.shape == outputs.shape[:-1]
        assert features.sum(2).eq(1).all()
    else:
        assert targets.shape == outputs.shape
        assert targets.dtype == torch.float32


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_generator_draws_the_same_sequences_and_none_is_an_empty_batch(name):
    problem = Problem(name, 20)
    first, again = (problem.draw(5, torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert [len(x) for x in problem.draw(0, torch.Generator())] == [0, 0, 0]


@pytest.mark.parametrize("name", ["addition", "multiplication", "xor"])
@pytest.mark.parametrize("length", LENGTHS)
def test_marked_numbers_by_a_plain_twin(name, length):
    x, targets, last = drawn(name, length)
    lengths, places = set(), set()
    for sequence, target, end in zip(x.tolist(), targets[:, 0].tolist(), last.tolist(), strict=True):
        steps = end + 1
        i, j = (t for t, (_, v) in enumerate(sequence, 1) if v == 1)  # two, and J after I
        assert i in integers(1, steps / 10)
        assert j in integers(steps / 10, steps / 2)
        assert all(v in (0, 1) for _, v in sequence)
        assert all(row == [0, 0] for row in sequence[steps:])
        a, b = sequence[i - 1][0], sequence[j - 1][0]
        wanted = {"addition": (a + b) / 2, "multiplication": a * b, "xor": float(a != b)}[name]
        assert target == pytest.approx(wanted, abs=1e-6)
        lengths.add(steps)
        places |= {("I", steps, i), ("J", steps, j)}
    assert lengths == integers(length, 11 * length / 10)
    for steps in lengths:  # every place there is
        of_it = {(which, place) for which, found, place in places if found == steps}
        assert {place for which, place in of_it if which == "I"} == integers(1, steps / 10)
        assert {place for which, place in of_it if which == "J"} <= integers(steps / 10, steps / 2)
    assert float(x[..., 0].min()) >= 0
    assert float(x[..., 0].max()) <= 1
    if name == "xor":
        assert set(x[..., 0].flatten().tolist()) == {0.0, 1.0}
        assert targets.mean().item() == pytest.approx(0.5, abs=0.05)
    else:
        within = torch.arange(x.shape[1]) <= last[:, None]
        assert x[..., 0][within].mean().item() == pytest.approx(0.5, abs=0.01)


def test_both_places_are_equally_likely_in_their_ranges_but_never_the_same():
    """T' = 10: I is 1, J one of 2 to 5, as i[1, 5] without I."""
    x, _, last = drawn("addition", 10, 20_000)
    shortest = x[last == 9, :, 1]
    assert torch.equal(shortest[:, 0], torch.ones(len(shortest)))
    torch.testing.assert_close(shortest.mean(0)[1:5], torch.full((4,), 0.25), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("name", "ranges"),
    [("temporal_order", [(1, 2), (5, 6)]), ("temporal_order_3", [(1, 2), (3, 4), (6, 7)])],
)
@pytest.mark.parametrize("length", LENGTHS)
def test_temporal_order_by_a_plain_twin(name, ranges, length):
    x, targets, last = drawn(name, length)
    assert set(last.tolist()) == {length - 1}
    found = [set() for _ in ranges]
    for sequence, target in zip((x + 1).tolist(), targets.tolist(), strict=True):
        special = [(t, symbol) for t, symbol in enumerate(sequence, 1) if symbol <= 2]
        assert len(special) == len(ranges)
        for places, (t, _) in zip(found, special, strict=True):
            places.add(t)
        assert target == int("".join(str(symbol - 1) for _, symbol in special), 2)
    assert found == [integers(low * length / 10, high * length / 10) for low, high in ranges]
    assert set((x + 1).flatten().tolist()) == {1, 2, 3, 4, 5, 6}
    counts = targets.bincount(minlength=2 ** len(ranges)) / len(targets)
    torch.testing.assert_close(counts, torch.full_like(counts, 1 / len(counts)), rtol=0, atol=0.04)


def test_the_random_permutation_by_a_plain_twin():
    x, targets, last = drawn("permutation", 12, 3000)
    assert set(last.tolist()) == {10}
    sequences = torch.cat([x, targets[:, -1:]], dim=1) + 1
    assert sequences.shape == (3000, 12)
    assert torch.equal(targets + 1, sequences[:, 1:])
    assert torch.equal(sequences[:, 0], sequences[:, -1])
    assert set(sequences[:, 0].tolist()) == {1, 2}
    assert set(sequences[:, 1:-1].flatten().tolist()) == set(range(3, 101))


@pytest.mark.parametrize(("name", "count", "symbols"), [("memorization_5", 5, 2), ("memorization_10", 10, 5)])
def test_memorization_by_a_plain_twin(name, count, symbols):
    length = 20
    x, targets, last = drawn(name, length, 500)
    filler, trigger = symbols + 1, symbols + 2
    assert set(last.tolist()) == {length + 2 * count - 1}
    for sequence, target in zip((x + 1).tolist(), (targets + 1).tolist(), strict=True):
        remembered = sequence[:count]
        assert all(1 <= symbol <= symbols for symbol in remembered)
        rest = [filler] * (length - 1) + [trigger] + [filler] * count  # the trigger is symbol T + count of all
        assert sequence == remembered + rest
        assert target == [filler] * (length + count) + remembered
    assert set((x[:, :count] + 1).flatten().tolist()) == set(range(1, symbols + 1))


def test_all_sequences_of_five_bits():
    x, targets, last = Problem("memorization_5", 15).every()
    assert len({tuple(row) for row in x.tolist()}) == 32
    assert torch.equal(x[:, :5], targets[:, -5:])
    assert set(last.tolist()) == {24}
    assert all(Problem(name, 15).every() is None for name in PROBLEMS if name != "memorization_5")


def test_numbers_are_wrong_beyond_the_tolerance():
    problem = Problem("addition", 10)
    outputs = torch.tensor([[0.5], [0.539], [0.461], [0.541], [0.459], [math.nan], [math.inf]])
    wrong = problem.is_wrong(outputs, torch.full((7, 1), 0.5))
    assert wrong.tolist() == [False, False, False, True, True, True, True]


def test_bits_are_wrong_by_their_sign():
    outputs, targets = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]]), torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    assert Problem("xor", 10).is_wrong(outputs, targets).tolist() == [False, False, True, True]


def test_a_symbol_is_wrong_by_its_score():
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 3.0, 1.0, 2.0]])
    assert Problem("temporal_order", 10).is_wrong(scores, torch.tensor([1, 1])).tolist() == [False, True]


@pytest.mark.parametrize(("name", "asked"), [("permutation", 1), ("memorization_5", 5), ("memorization_10", 10)])
def test_only_what_is_recalled_counts_and_all_of_it(name, asked):
    problem = Problem(name, 10)
    _, targets, _ = problem.draw(3, torch.Generator().manual_seed(0))
    scores = torch.nn.functional.one_hot(targets, problem.output_size).float()
    scores[0, -asked - 1] = -scores[0, -asked - 1]  # wrong where nothing is recalled
    scores[1, -asked] = -scores[1, -asked]
    assert problem.is_wrong(scores, targets).tolist() == [False, True, False]


def test_between_reaches_both_ends():
    low, high = torch.tensor([1, 5, 7]), torch.tensor([1, 6, 9])
    found = torch.stack([between(low, high, 3, torch.Generator().manual_seed(seed)) for seed in range(60)])
    assert [set(column) for column in found.T.tolist()] == [{1}, {5, 6}, {7, 8, 9}]


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("adding", 50, "unknown problem 'adding'; expected one of addition"),
        ("xor", 9, "length must be 10 or more, got 9"),
    ],
)
def test_what_is_no_problem(name, length, message):
    with pytest.raises(ValueError, match=message):
        Problem(name, length)
