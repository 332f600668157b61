"""ListOps: nested expressions of digits and the operators MIN, MAX, MED and SM. The label is the value."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import torch
from torch import Tensor

from tasks.common.train import Samples

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = ("", *map(str, range(10)), *OPERATORS, "]")  # the symbol of each token; token 0 is padding
DIGIT, OPERATOR, END = 1, 11, 15  # the tokens of 0, of MIN and of the bracket that closes a list
VALUES = 10
OPERATOR_PROBABILITY = 0.25
ROOTS = 2000  # number of trees that are drawn together


def make_listops(
    samples: int, seed: int, *, min_length: int = 500, max_length: int = 2000, max_depth: int = 10, max_args: int = 10
) -> Samples:
    """Return random expressions and their values, by the rules of the Long Range Arena.

    A node above the last level is an operator with probability 0.25, with 2 to ``max_args`` arguments, otherwise a
    digit; nodes of the last level are digits. The operators are the minimum, the maximum, the median rounded down, and
    the sum modulo 10, all equally likely. Trees are drawn until there are enough different ones of the right length. A
    token is a digit, an operator with its opening bracket, or a closing bracket.

    Arguments:
        samples: the number of expressions.
        seed: random seed. The same seed gives the same expressions.
        min_length: expressions have more tokens than this; at least 3, so that none is a single digit.
        max_length: expressions have fewer tokens than this.
        max_depth: largest number of levels of a tree, including the root.
        max_args: largest number of arguments of an operator.

    Returns:
        Tokens (samples, longest) as uint8, padded with 0 at the end; lengths and values (samples,).

    References:
        N. Nangia and S. R. Bowman, ListOps, 2018, arXiv:1804.06028. Y. Tay et al., Long Range Arena, 2021,
        arXiv:2011.04006.

    Raises:
        ValueError: if there are not enough different trees of these lengths.
    """
    largest = _largest(max_depth, max_args)
    if not 3 <= min_length < min(max_length - 1, largest):
        raise ValueError(
            f"expected 3 <= min_length, min_length + 1 < max_length, and min_length below {largest}, the tokens of the "
            f"largest tree, got min_length {min_length}, max_length {max_length}. Fix: a wider range, or deeper trees."
        )
    rng = np.random.default_rng(seed)
    found: dict[bytes, int] = {}  # expression -> value
    in_vain = 0
    while len(found) < samples:
        before = len(found)
        for row, label in _trees(rng, max_depth, max_args, min_length, max_length):
            found.setdefault(row.tobytes(), label)
        in_vain = 0 if len(found) > before else in_vain + 1
        if in_vain == 100:
            raise ValueError(
                f"found only {len(found)} of {samples} different expressions with more than {min_length} and fewer "
                f"than {max_length} tokens. Fix: fewer samples, or a wider range of lengths."
            )
    rows = [torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in found][:samples]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens, torch.tensor([len(row) for row in rows]), torch.tensor(list(found.values())[:samples])


def _largest(max_depth: int, max_args: int) -> int:
    """Return the number of tokens of the largest tree."""
    size = 1
    for _ in range(max_depth - 1):
        size = 2 + max_args * size
    return size


@dataclasses.dataclass
class _Level:
    """The nodes of all trees at one depth, from left to right.

    Attributes:
        arity: number of arguments of each node; 0 for a digit.
        token: token of each node, a digit or an operator with its bracket.
        size: number of tokens in each node's subtree.
        value: value of each node's subtree.
    """

    arity: np.ndarray
    token: np.ndarray
    size: np.ndarray
    value: np.ndarray


def _trees(
    rng: np.random.Generator, max_depth: int, max_args: int, min_length: int, max_length: int
) -> list[tuple[np.ndarray, int]]:
    """Draw trees whose roots are operators, and return the tokens and the value of those with the right length."""
    levels = [_level(rng, np.ones(ROOTS, bool), max_args)]
    for depth in range(2, max_depth + 1):
        count = levels[-1].arity.sum()
        is_operator = rng.random(count) < OPERATOR_PROBABILITY if depth < max_depth else np.zeros(count, bool)
        levels.append(_level(rng, is_operator, max_args))
    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        _evaluate(level, below, max_args)
    roots = levels[0]
    starts = roots.size.cumsum() - roots.size
    tokens = np.zeros(roots.size.sum(), np.uint8)
    position = starts
    for level, below in itertools.pairwise(levels):
        tokens[position] = level.token
        tokens[(position + level.size - 1)[level.arity > 0]] = END
        first = level.arity.cumsum() - level.arity  # index of each node's first argument in the level below
        before = below.size.cumsum() - below.size  # number of tokens of the nodes to the left
        parents = np.repeat(np.arange(len(level.arity)), level.arity)
        position = position[parents] + 1 + before - before[first[parents]]
    tokens[position] = levels[-1].token
    chosen = np.flatnonzero((roots.size > min_length) & (roots.size < max_length))
    return [(tokens[starts[k] : starts[k] + roots.size[k]], int(roots.value[k])) for k in chosen]


def _level(rng: np.random.Generator, is_operator: np.ndarray, max_args: int) -> _Level:
    """Return random nodes. Their sizes and values are set as for digits."""
    count = len(is_operator)
    digits = rng.integers(VALUES, size=count)
    arity = np.where(is_operator, rng.integers(2, max_args + 1, size=count), 0)
    operators = rng.integers(len(OPERATORS), size=count)
    token = np.where(is_operator, OPERATOR + operators, DIGIT + digits).astype(np.uint8)
    return _Level(arity, token, np.ones(count, np.int64), digits)


def _evaluate(level: _Level, below: _Level, max_args: int) -> None:
    """Compute the sizes and values of operators from those of their arguments."""
    operators = np.flatnonzero(level.arity)
    if not len(operators):
        return
    arity = level.arity[operators]
    is_argument = np.arange(max_args) < arity[:, None]
    sizes = np.zeros(is_argument.shape, np.int64)
    sizes[is_argument] = below.size
    level.size[operators] = 2 + sizes.sum(1)
    arguments = np.full(is_argument.shape, VALUES)  # larger than any value, so that sorting puts them last
    arguments[is_argument] = below.value
    total = np.where(is_argument, arguments, 0).sum(1)
    arguments.sort(1)
    row = np.arange(len(operators))
    middle = arguments[row, (arity - 1) // 2] + arguments[row, arity // 2]
    values = np.stack([arguments[:, 0], arguments[row, arity - 1], middle // 2, total % VALUES])
    level.value[operators] = values[level.token[operators] - OPERATOR, row]


def trivial_accuracies(train: Samples, test: Samples) -> dict[str, float]:
    """Return the accuracies of two trivial baselines, which do not evaluate the expression.

    Arguments:
        train: tokens, lengths and values, from which the baselines are computed.
        test: the test data.

    Returns:
        "majority_accuracy" for predicting the most frequent value, and "root_accuracy" for predicting the most frequent
        value for the first operator.
    """
    counts = torch.zeros(len(OPERATORS), VALUES)
    counts.index_put_((_root(train), train[2]), torch.ones(len(train[2])), accumulate=True)
    always, by_root = counts.sum(0).argmax(), counts.argmax(1)
    return {
        "majority_accuracy": (test[2] == always).float().mean().item(),
        "root_accuracy": (test[2] == by_root[_root(test)]).float().mean().item(),
    }


def _root(samples: Samples) -> Tensor:
    """Return the index of each expression's first operator, (N,)."""
    return samples[0][:, 0].long() - OPERATOR
