"""The order conditions of a native method, of its embedded solution and its dense output, from the step it computes.

Trees are nested tuples of subtrees. The weights of a step of size 1 without damping are read off the coefficients that
the method makes from its tableau. A row of weights sums the values of f, or of u for Rosenbrock methods.
"""

import functools
import itertools
import math

import numpy as np

from hbnode.solve.methods import Rosenbrock

EXACT, WRONG = 1e-11, 1e-10  # residuals: rounding errors are below the first, missed orders above the second
THETAS = (0.1, 0.37, 0.8, 1.0)


def partitions(total, smallest, make):
    """All multisets of trees, as tuples, whose sizes (given by ``make``) add up to ``total``."""
    if total == 0:
        yield ()
    for size in range(smallest, total + 1):
        trees = make(size)
        for count in range(1, total // size + 1):
            for chosen in itertools.combinations_with_replacement(trees, count):
                for rest in partitions(total - count * size, size + 1, make):
                    yield (*chosen, *rest)


@functools.cache
def rooted_trees(order):
    """Rooted trees with so many vertices."""
    return list(partitions(order - 1, 1, rooted_trees))


def density(tree):
    vertices = lambda tree: 1 + sum(map(vertices, tree))
    return vertices(tree) * math.prod(map(density, tree))


def values(tree, alpha, beta):
    """Φ of the stages: a vertex with one subtree uses β (α + Γ of Rosenbrock methods), one with several uses α."""
    below = [values(subtree, alpha, beta) for subtree in tree]
    return math.prod(((beta if len(tree) == 1 else alpha) @ x for x in below), start=np.ones(len(alpha)))


@functools.cache
def nystrom_trees(q):
    """Elementary differentials of g(u) of the power s^q along a solution of u'' = g(u): (velocities, subtrees).

    Each velocity u' has the power 1, a subtree of the power q, integrated twice, the power q + 2.
    """
    return [
        (velocities, subtrees)
        for velocities in range(q + 1)
        for subtrees in partitions(q - velocities, 2, lambda size: nystrom_trees(size - 2))
    ]


def nystrom_exact(tree):
    """The coefficient of s^q in g along the solution."""
    power = lambda tree: tree[0] + sum(power(subtree) + 2 for subtree in tree[1])
    return math.prod(nystrom_exact(subtree) / ((power(subtree) + 1) * (power(subtree) + 2)) for subtree in tree[1])


def nystrom_values(tree, a, c):
    """The same coefficient in the stages of the method."""
    return c ** tree[0] * math.prod((a @ nystrom_values(subtree, a, c) for subtree in tree[1]), start=np.ones(len(c)))


class Weights:
    """The stages of a method, and the rows of weights of its new state, its error estimate and its dense output."""

    def __init__(self, method):
        self.rows, zero, one = method.rows, np.array(0.0), np.array(1.0)
        blend = lambda theta: method.dense_weights(np, zero, one, np.array([theta]))[0]
        if isinstance(method, Rosenbrock):
            tableau = method.tableau
            matrix, C = lower(tableau.a), lower(tableau.C)
            gamma = np.linalg.inv(np.eye(len(C)) / tableau.diagonal - C)  # stages k = Γ⁻¹ u
            self.alpha, self.beta = matrix[:-1, :-1] @ gamma, (matrix[:-1, :-1] + np.eye(len(C))) @ gamma
            self.gamma, self.c = gamma, np.array(tableau.c)
            self.solution, self.error = matrix[-1:, :-1] @ gamma, gamma[-1:]
            self.dense = lambda theta: blend(theta)[:, 1:] @ gamma
            return
        matrix, n, s = matrix_of(method, zero, one), method.rows, method.evaluations
        self.alpha = self.beta = np.vstack([np.zeros(s + 1), matrix[:s, n:]])
        self.c = np.array([0.0, *method.nodes])
        self.solution, self.error = matrix[s - 1 : s + n - 1, n:], matrix[s + n - 1 :, n:]
        self.dense = lambda theta: blend(theta)[:, n:]

    def conditions(self, order):
        """Yield the row of each condition of an order, the values Φ of the stages, and their sum in the solution."""
        for tree in rooted_trees(order) if self.rows == 1 else ():
            yield 0, values(tree, self.alpha, self.beta), 1 / density(tree)
        for row, factor in ((0, order * (order - 1)), (1, order)) if self.rows == 2 else ():
            for tree in nystrom_trees(order - 2 + row):
                yield row, nystrom_values(tree, self.alpha, self.c), nystrom_exact(tree) / factor

    def residual(self, weights, order, theta=1.0, of_m=None):
        """The largest residual of all conditions up to ``order``, and ``of_m`` for m (default: the same)."""
        return max(
            abs(weights[row] @ phi - exact * theta**n)
            for n in range(1, order + 1)
            for row, phi, exact in self.conditions(n)
            if row == 0 or of_m is None or n <= of_m
        )


def matrix_of(method, gamma, size):
    """The matrix C of explicit steps (..., rows, columns), from the coefficients that a step gets."""
    rows, columns, indices = method.layout[True]
    packed = method.packed(np, gamma, size, error=True)
    matrix = np.zeros((*packed.shape[1:], rows * columns))
    matrix[..., indices] = np.moveaxis(packed, 0, -1)
    return matrix.reshape(*packed.shape[1:], rows, columns)


def lower(rows):
    """The strictly lower triangular matrix of rows after the first."""
    size = max(map(len, rows)) + 1
    return np.array([[*row, *[0.0] * (size - len(row))] for row in [(), *rows]])


def check_orders(method):
    """The method, its embedded solution and its dense output have the orders of its tableau, and no higher ones."""
    found, tableau = Weights(method), method.tableau
    nodes = found.c**2 / 2 if method.rows == 2 else found.c
    np.testing.assert_allclose(found.alpha.sum(1), nodes, atol=1e-13)
    for name, weights, order in (
        ("method", found.solution, tableau.order),
        ("embedded", found.solution - found.error, tableau.error_order),
    ):
        assert found.residual(weights, order) < EXACT, name
        assert found.residual(weights, order + 1) > WRONG, name
    for theta in THETAS:
        order, dense = tableau.dense_order, found.dense(theta)
        assert found.residual(dense, order, theta, of_m=order - 1) < EXACT, ("dense", theta)
    np.testing.assert_allclose(dense, found.solution, atol=1e-11)  # at the end of the step
    assert max(found.residual(found.dense(theta), order + 1, theta, of_m=order) for theta in THETAS[:-1]) > WRONG
