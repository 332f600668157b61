"""Problems of memory that are drawn: what the sequences hold, and what counts as right, against plain loops."""

import math
import statistics

import pytest
import torch

from tasks import adding, copying, recall, transformer_copy
from tasks.data.listops import SYMBOLS, make_listops
from tasks.data.pathological import Problem
from tasks.data.recall import IGNORED, SEPARATOR, Bindings, doubled, is_copied
from tasks.readers import right_by_counting


def generator():
    return torch.Generator().manual_seed(0)


# Pathological problems


def integers(low, high):
    """Return i[low, high], the integers between two numbers."""
    return set(range(math.ceil(low), math.floor(high) + 1))


def test_marked_numbers():
    x, targets, last = Problem("addition", 57).draw(1000, generator())
    places = {}
    for sequence, target, end in zip(x.tolist(), targets[:, 0].tolist(), last.tolist(), strict=True):
        steps = end + 1
        i, j = (t for t, (_, v) in enumerate(sequence, 1) if v == 1)  # two, and J after I
        assert j in integers(steps / 10, steps / 2)
        assert all(row == [0, 0] for row in sequence[steps:])
        assert target == pytest.approx((sequence[i - 1][0] + sequence[j - 1][0]) / 2, abs=1e-6)
        places.setdefault(steps, set()).add(i)
    assert set(places) == integers(57, 11 * 57 / 10)
    assert all(found == integers(1, steps / 10) for steps, found in places.items())


def test_temporal_order():
    x, targets, last = Problem("temporal_order", 57).draw(1000, generator())
    assert set(last.tolist()) == {56}
    found = [set(), set()]
    for sequence, target in zip((x + 1).tolist(), targets.tolist(), strict=True):
        special = [(t, symbol) for t, symbol in enumerate(sequence, 1) if symbol <= 2]
        for places, (t, _) in zip(found, special, strict=True):
            places.add(t)
        assert target == int("".join(str(symbol - 1) for _, symbol in special), 2)
    assert found == [integers(5.7, 11.4), integers(28.5, 34.2)]


def test_memorization():
    x, targets, _ = Problem("memorization_5", 20).draw(500, generator())
    filler, trigger = 3, 4
    for sequence, target in zip((x + 1).tolist(), (targets + 1).tolist(), strict=True):
        bits = sequence[:5]
        assert sequence == bits + [filler] * 19 + [trigger] + [filler] * 5
        assert target == [filler] * 25 + bits


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


# Copying, adding, and the copy task of transformers


def test_copying_and_its_loss():
    """The loss is 0 for what remembers."""
    word, blank, start = [3, 1, 0, 2, 2, 5, 7, 4, 6, 1], copying.BLANK, copying.START
    x, target = copying.sequences(torch.tensor([word]), 20)
    assert x[0].tolist() == [*word, *[blank] * 20, start, *[blank] * 9]
    assert target[0].tolist() == [*[blank] * 30, *word]

    def remember(x):
        x = x.argmax(-1)
        target = torch.cat([torch.full_like(x[:, 10:], blank), x[:, :10]], dim=1)
        return 1e3 * torch.nn.functional.one_hot(target, 9).double()

    loss, means = copying.cross_entropy(remember, copying.characters(50, generator()), 30)
    assert (loss.item(), means) == (0, {"accuracy": 1.0})


def test_adding_marks_one_number_in_each_half():
    _, marked = batch = adding.problems(100_000, 7, generator())
    assert [set(column) for column in marked.T.tolist()] == [{0, 1, 2}, {3, 4, 5, 6}]
    loss, _ = adding.squared_error(lambda x: torch.ones(len(x), 1), batch)
    assert loss.item() == pytest.approx(adding.TRIVIAL_LOSS, rel=2e-2)
    assert adding.squared_error(lambda x: (x[..., 0] * x[..., 1]).sum(1, keepdim=True), batch)[0].item() < 1e-12


def test_sequences_hold_a_word_twice_and_the_second_one_counts():
    tokens, sizes = batch = doubled(200, 128, 10, generator())
    assert (sizes.min(), sizes.max()) == (32, 62)
    for row, n, part in zip(tokens.tolist(), sizes.tolist(), is_copied(sizes, 128), strict=True):
        word = row[:n]
        assert SEPARATOR not in word
        assert row == [*word, SEPARATOR, *word, *[SEPARATOR] * (128 - 2 * n - 1)]
        assert part.nonzero().flatten().tolist() == list(range(n + 1, 2 * n + 1))

    def copier(tokens):
        source = (torch.arange(tokens.shape[1]) - sizes[:, None]).clamp(min=0)
        return 1e3 * torch.nn.functional.one_hot(tokens.gather(1, source), 11).double()

    loss, means = transformer_copy.cross_entropy(copier, batch)
    assert (loss.item(), means) == (0, {"accuracy": 1.0})


# Recall

SETTINGS = {
    "once": Bindings(5, 40, 9, 7),
    "again": Bindings(5, 60, 9, 7, times=3, changing=True),
    "noisy": Bindings(5, 60, 9, 7, times=4, noise=0.3),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_key_is_bound_and_asked_for_once(kind):
    setting = SETTINGS[kind]
    tokens, targets, first = setting.draw(2000, generator())
    assert tokens.shape == targets.shape == first.shape == (2000, setting.length)
    right, end = 0, 2 * setting.pairs * setting.times
    for row, wanted, stale in zip(tokens.tolist(), targets.tolist(), first.tolist(), strict=True):
        values, asked = {}, row[end:]
        for key, value in zip(row[:end:2], row[1:end:2], strict=True):
            assert 1 <= key <= setting.keys < value <= setting.keys + setting.values
            values.setdefault(key, []).append(value - 1 - setting.keys)
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
    asked = (tokens[:, end:] > 0).float().mean(0)
    assert asked[0] > 2 * asked[8] > 0  # questions come sooner rather than later


def test_counting_is_right_as_often_as_chance_says():
    for times, noise, expected in ((4, 0.0, 1.0), (4, 1.0, 1 / 8), (1, 0.4, 0.6 + 0.4 / 8)):
        setting = Bindings(3, 40, 9, 8, times=times, noise=noise)
        assert right_by_counting(setting, 4000) == pytest.approx(expected, abs=0.02)


def test_shares_of_a_model_that_answers_with_the_last_or_the_first_value():
    batch = SETTINGS["again"].draw(20, generator())
    for answers, is_last in zip(batch[1:], (True, False), strict=True):
        scores = 1e3 * torch.nn.functional.one_hot(answers.clamp(min=0), 7).double()
        loss, shares = recall.cross_entropy(lambda tokens, scores=scores: scores, batch)
        assert shares == {"accuracy": float(is_last), "stale": float(not is_last)}
        assert (loss.item() == 0) == is_last


# ListOps, against a parser

EVALUATE = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def parse(words):
    """Return the value of an expression, its depth and the numbers of arguments of its operators."""
    word = words.pop(0)
    if word not in EVALUATE:
        return int(word), 1, []
    values, depths, arities = [], [], []
    while words[0] != "]":
        value, depth, below = parse(words)
        values.append(value)
        depths.append(depth)
        arities += below
    words.pop(0)
    return EVALUATE[word](values), 1 + max(depths), [len(values), *arities]


def test_values_are_those_of_a_parser():
    tokens, lengths, labels = make_listops(150, seed=1, min_length=10, max_length=300, max_depth=4, max_args=5)
    for row, length, label in zip(tokens.tolist(), lengths.tolist(), labels.tolist(), strict=True):
        words = [SYMBOLS[t] for t in row[:length]]
        assert 10 < length < 300
        value, depth, arities = parse(words)
        assert not words
        assert value == label
        assert 2 <= depth <= 4
        assert all(2 <= arity <= 5 for arity in arities)
    assert torch.equal(tokens == 0, torch.arange(tokens.shape[1]) >= lengths[:, None])
