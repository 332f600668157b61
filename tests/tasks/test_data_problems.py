"""Problems of memory that are drawn: what the sequences hold, and what counts as right, against plain loops."""

import math

import pytest
import torch

from tasks import adding, copying, recall, transformer_copy
from tasks.data.pathological import Problem
from tasks.data.recall import IGNORED, SEPARATOR, Bindings, doubled, is_copied
from tasks.readers import right_by_counting


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# Pathological problems


def integers(low, high):
    """Return i[low, high], the integers between two numbers."""
    return set(range(math.ceil(low), math.floor(high) + 1))


@pytest.mark.parametrize("length", [10, 57])
def test_marked_numbers(length):
    x, targets, last = Problem("addition", length).draw(1000, generator())
    places = {}
    for sequence, target, end in zip(x.tolist(), targets[:, 0].tolist(), last.tolist(), strict=True):
        steps = end + 1
        i, j = (t for t, (_, v) in enumerate(sequence, 1) if v == 1)  # two, and J after I
        assert j in integers(steps / 10, steps / 2)
        assert all(row == [0, 0] for row in sequence[steps:])
        a, b = sequence[i - 1][0], sequence[j - 1][0]
        assert target == pytest.approx((a + b) / 2, abs=1e-6)
        places.setdefault(steps, set()).add(i)
    assert set(places) == integers(length, 11 * length / 10)
    assert all(found == integers(1, steps / 10) for steps, found in places.items())
    within = x[..., 0][torch.arange(x.shape[1]) <= last[:, None]]
    assert 0 <= float(within.min()) < float(within.max()) <= 1
    assert within.mean().item() == pytest.approx(0.5, abs=0.02)


def test_temporal_order():
    length, ranges = 57, [(1, 2), (5, 6)]
    x, targets, last = Problem("temporal_order", length).draw(1000, generator())
    assert set(last.tolist()) == {length - 1}
    found = [set() for _ in ranges]
    for sequence, target in zip((x + 1).tolist(), targets.tolist(), strict=True):
        special = [(t, symbol) for t, symbol in enumerate(sequence, 1) if symbol <= 2]
        for places, (t, _) in zip(found, special, strict=True):
            places.add(t)
        assert target == int("".join(str(symbol - 1) for _, symbol in special), 2)
    assert found == [integers(low * length / 10, high * length / 10) for low, high in ranges]
    assert set((x + 1).flatten().tolist()) == {1, 2, 3, 4, 5, 6}
    counts = targets.bincount(minlength=2 ** len(ranges)) / len(targets)
    torch.testing.assert_close(counts, torch.full_like(counts, 1 / len(counts)), rtol=0, atol=0.04)


def test_memorization():
    length, count, symbols = 20, 5, 2
    problem = Problem("memorization_5", length)
    assert len({tuple(row) for row in problem.every()[0].tolist()}) == 32
    x, targets, last = problem.draw(500, generator())
    filler, trigger = symbols + 1, symbols + 2
    assert set(last.tolist()) == {length + 2 * count - 1}
    for sequence, target in zip((x + 1).tolist(), (targets + 1).tolist(), strict=True):
        remembered = sequence[:count]
        rest = [filler] * (length - 1) + [trigger] + [filler] * count  # the trigger is symbol T + count of all
        assert sequence == remembered + rest
        assert target == [filler] * (length + count) + remembered
    assert set((x[:, :count] + 1).flatten().tolist()) == set(range(1, symbols + 1))


def test_what_is_wrong():
    outputs = torch.tensor([[0.5], [0.539], [0.461], [0.541], [0.459], [math.nan], [math.inf]])
    wrong = Problem("addition", 10).is_wrong(outputs, torch.full((7, 1), 0.5))
    assert wrong.tolist() == [False, False, False, True, True, True, True]
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0], [4.0, 3.0, 1.0, 2.0]])
    assert Problem("temporal_order", 10).is_wrong(scores, torch.tensor([1, 1])).tolist() == [False, True]
    problem = Problem("memorization_5", 10)
    targets = problem.every()[1][:3]
    scores = torch.nn.functional.one_hot(targets, 3).float()
    scores[0, -6] = -scores[0, -6]  # the step before the bits
    scores[1, -5] = -scores[1, -5]
    assert problem.is_wrong(scores, targets).tolist() == [False, True, False]


# Copying and adding


def test_copying_as_the_paper_draws_it():
    x, target = copying.sequences(torch.tensor([[3, 1, 0, 2, 2, 5, 7, 4, 6, 1]]), 20)
    blank, start = copying.BLANK, copying.START
    assert x[0].tolist() == [3, 1, 0, 2, 2, 5, 7, 4, 6, 1, *[blank] * 20, start, *[blank] * 9]
    assert target[0].tolist() == [*[blank] * 30, 3, 1, 0, 2, 2, 5, 7, 4, 6, 1]


def test_the_loss_of_copying():
    """It is the trivial one for blanks and then a guess, and 0 for what remembers."""

    def guess(x):
        x = x.argmax(-1)
        late = (x == copying.START).cumsum(1).bool()
        scores = torch.zeros(*x.shape, 9, dtype=torch.float64)
        scores[..., copying.BLANK] = torch.where(late, -1e3, 1e3)
        return scores

    def remember(x):
        x = x.argmax(-1)
        target = torch.cat([torch.full_like(x[:, 10:], copying.BLANK), x[:, :10]], dim=1)
        return 1e3 * torch.nn.functional.one_hot(target, 9).double()

    batch = copying.characters(50, generator())
    trivial = copying.CopyingConfig(length=30).trivial_loss
    assert trivial == pytest.approx(10 * math.log(8) / 50)
    assert copying.cross_entropy(guess, batch, 30)[0].item() == pytest.approx(trivial, rel=1e-12)
    loss, means = copying.cross_entropy(remember, batch, 30)
    assert (loss.item(), means) == (0, {"accuracy": 1.0})


def test_adding_marks_one_number_in_each_half():
    numbers, marked = batch = adding.problems(100_000, 7, generator())
    assert [set(column) for column in marked.T.tolist()] == [{0, 1, 2}, {3, 4, 5, 6}]
    assert 0 <= numbers.min() < numbers.max() < 1
    loss, _ = adding.squared_error(lambda x: torch.ones(len(x), 1), batch)
    assert loss.item() == pytest.approx(adding.TRIVIAL_LOSS, rel=2e-2)
    assert adding.squared_error(lambda x: (x[..., 0] * x[..., 1]).sum(1, keepdim=True), batch)[0].item() < 1e-12


# The copy task of transformers


@pytest.mark.parametrize(("length", "least", "most"), [(8, 2, 2), (128, 32, 62)])
def test_sequences_hold_everything_twice(length, least, most):
    tokens, sizes = doubled(2000, length, 10, generator())
    assert tokens.shape == (2000, length)
    assert (sizes.min(), sizes.max()) == (least, most)
    for row, n, part in zip(tokens[:200].tolist(), sizes.tolist(), is_copied(sizes, length), strict=False):
        word = row[:n]
        assert SEPARATOR not in word
        assert row == [*word, SEPARATOR, *word, *[SEPARATOR] * (length - 2 * n - 1)]
        assert part.nonzero().flatten().tolist() == list(range(n + 1, 2 * n + 1))
    counts = tokens[tokens > 0].bincount(minlength=11)[1:]
    assert counts.min() > 0.9 * counts.float().mean()


def test_loss_and_accuracy_are_those_of_the_second_word():
    tokens, sizes = batch = doubled(50, 20, 10, generator())

    def copier(tokens, certainty=1e3):
        source = (torch.arange(tokens.shape[1]) - sizes[:, None]).clamp(min=0)
        return certainty * torch.nn.functional.one_hot(tokens.gather(1, source), 11).double()

    loss, means = transformer_copy.cross_entropy(copier, batch)
    assert (loss.item(), means) == (0, {"accuracy": 1.0})
    loss, means = transformer_copy.cross_entropy(lambda tokens: copier(tokens, 0.0), batch)
    assert loss.item() == pytest.approx(math.log(11))
    assert means == {"accuracy": 0.0}  # the separator is not in the word
    changed = tokens.masked_fill(~is_copied(sizes, 20) & (torch.arange(20) > sizes[:, None]), 3)
    assert transformer_copy.cross_entropy(copier, (changed, sizes))[0].item() == 0


# Recall

SETTINGS = {
    "once": Bindings(5, 40, 9, 7),
    "again": Bindings(5, 60, 9, 7, times=3, changing=True),
    "noisy": Bindings(5, 60, 9, 7, times=4, noise=0.3),
}


def bindings(row, setting):
    """Return the values that follow each key, in order, and the rest of the sequence."""
    end = 2 * setting.pairs * setting.times
    values = {}
    for key, value in zip(row[:end:2], row[1:end:2], strict=True):
        assert 1 <= key <= setting.keys < value <= setting.keys + setting.values
        values.setdefault(key, []).append(value - 1 - setting.keys)
    return values, row[end:]


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_key_is_bound_and_asked_for_once(kind):
    setting = SETTINGS[kind]
    tokens, targets, first = setting.draw(2000, generator())
    assert tokens.shape == targets.shape == first.shape == (2000, setting.length)
    right = 0
    for row, wanted, stale in zip(tokens.tolist(), targets.tolist(), first.tolist(), strict=True):
        values, asked = bindings(row, setting)
        assert {len(written) for written in values.values()} == {setting.times}
        assert sorted(key for key in asked if key) == sorted(values)
        assert len(values) == setting.pairs
        assert [x != IGNORED for x in wanted] == [False] * (len(row) - len(asked)) + [key > 0 for key in asked]
        for key, answer, old in zip(asked, wanted[-len(asked) :], stale[-len(asked) :], strict=True):
            if key:
                right += values[key].count(answer)
                assert kind == "noisy" or (values[key][-1], values[key][0]) == (answer, old)
                assert kind != "again" or len(set(values[key])) == setting.times
    if kind == "noisy":
        share = right / (2000 * setting.pairs * setting.times)
        assert share == pytest.approx(1 - 0.3 * (1 - 1 / setting.values), abs=0.01)
    asked = (tokens[:, 2 * setting.pairs * setting.times :] > 0).float().mean(0)
    assert asked[0] > 2 * asked[8] > 0  # questions come sooner rather than later


def test_counting_is_right_without_noise_and_guesses_with_nothing_else():
    assert right_by_counting(Bindings(3, 40, 9, 8, times=4)) == 1.0
    assert right_by_counting(Bindings(3, 40, 9, 8, times=4, noise=1.0), 4000) == pytest.approx(1 / 8, abs=0.02)
    once = right_by_counting(Bindings(3, 40, 9, 8, times=1, noise=0.4), 4000)
    assert once == pytest.approx(0.6 + 0.4 / 8, abs=0.02)


@pytest.mark.parametrize("index", [-1, 0])
def test_shares_of_a_model_that_answers_with_the_last_or_the_first_value(index):
    setting = SETTINGS["again"]

    def model(tokens):
        scores = torch.zeros(*tokens.shape, setting.values, dtype=torch.float64)
        for row, scored in zip(tokens.tolist(), scores, strict=True):
            values, _ = bindings(row, setting)
            for place, key in enumerate(row):
                if key in values:
                    scored[place, values[key][index]] = 1e3
        return scores

    loss, shares = recall.cross_entropy(model, setting.draw(20, generator()))
    assert shares == {"accuracy": float(index == -1), "stale": float(index == 0)}
    assert (loss.item() == 0) == (index == -1)
