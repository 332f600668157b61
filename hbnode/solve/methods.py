r"""One-step methods: the coefficients of a step and the step itself.

The state of a method is a tuple of tensors of one shape, called *rows*: y for :math:`y' = f(t, y)`, and h and m for
:math:`h'' + \gamma h' = f`. Explicit methods append the value of f at the end of the step, which is the first stage
of the next step (first same as last, FSAL). A step is a pure function
``step(state, coefficients, times, field) -> StepResult``.

The coefficients of a step depend on its size H and on the damping γ. The same formula computes them in NumPy or in
torch, which is its argument ``xp``. NumPy is used if H and γ are numbers; derivatives with respect to γ are then
complex-step derivatives. torch is used in graphs of torch.compile and torch.export, for γ per channel, for gradients
with respect to times, and for higher derivatives.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from hbnode import _torch
from hbnode._torch import is_transformed, may_look
from hbnode._tree import parts
from hbnode.solve import tableaus
from hbnode.solve.jacobian import derivatives

Array = Any  # a NumPy array, or in functions with an argument xp also a tensor
Rows = tuple[Tensor, ...]
Times = Sequence[Tensor]  # the times of the function evaluations of a step
RHS = Callable[[Tensor, Tensor], Tensor]  # (t, x) -> f, for a tensor x of the state

RADIUS = 2.0  # |z| below which the φ functions are computed by their series
CAUTION = 2.0  # factor on the error estimate of Rosenbrock methods, which is too small before fast transitions
TERMS = 32  # number of terms of the series, a power of 2; the next term is below 1e-25
SERIES = 1 / np.array([[math.factorial(j + k) for j in range(TERMS)] for k in range(8)], float)  # series of φ_0 to φ_7


class StepResult(NamedTuple):
    """The result of a step.

    Attributes:
        state: the state after the step.
        error: error estimate, stacked over the tensors of the state, (tensors, ...); None if not requested.
        columns: the tensors of the state at the start of the step and the stage values, stacked, for dense output; None
            if not requested.
    """

    state: tuple[Tensor, ...]
    error: Tensor | None = None
    columns: Tensor | None = None


class Method:
    """The base class of one-step methods.

    Attributes:
        name: the value of ``method=``.
        tableau: the published coefficients of the method.
        order: order of convergence.
        error_order: order of the embedded solution; None for methods that need fixed steps.
        rows: number of tensors of the state: 1 for y, 2 for the position h and the momentum m.
        field: the fields that the method can solve: ``"any"``, or names of classes.
        nodes: times of the function evaluations, as fractions of the step.
        evaluations: number of function evaluations of a step.
        widest_gap: largest gap between neighbouring nodes, with 0 as the first node, as a fraction of the step.
        is_fsal: whether the state ends with the value of the field (first same as last).
        is_reversible: whether :meth:`undo` reverses a step.
        is_stiff: whether the method is for stiff problems: fast decay, such as strong damping, does not limit its step
            size.
        needs_fixed_steps: whether the method has no error estimate and therefore no adaptive steps.
        damping_limit: largest allowed γH for a step of size H.
        gradients: the possible values of ``gradient=``.
        dense_error_factor: largest ratio of the error of dense output to the error estimate of the step.
    """

    name, field = "", "any"
    tableau: Any = None
    order: int
    error_order: int | None = None
    rows: int
    nodes: tuple[float, ...]
    is_fsal = is_reversible = is_stiff = needs_fixed_steps = False
    damping_limit = math.inf
    gradients: tuple[str, ...] = ("checkpoint", "direct", "adjoint")
    dense_error_factor = 1.0

    def __init__(self, nodes: Sequence[float], name: str = "", tableau: tableaus.Tableau | None = None) -> None:
        self.nodes = tuple(map(float, nodes))
        self.evaluations = len(self.nodes)  # not a cached property, whose lock torch.compile cannot trace
        self.widest_gap = max((b - a for a, b in itertools.pairwise(sorted({0.0, *self.nodes}))), default=0.0)
        if tableau is not None:
            self.name, self.tableau, self.order, self.error_order = name, tableau, tableau.order, tableau.error_order
            self.dense_error_factor = tableau.dense_error_factor

    def bind(self, term: Any) -> Self:
        """Return this method, or a copy of it with what it needs of the :class:`~hbnode.solve.term.ODETerm` ``term``.

        A splitting method stores the activation σ of the term, and a Rosenbrock method the shapes of its linear
        systems.
        """
        return self

    def packed(self, xp: Any, gamma: Array, size: Array, error: bool) -> Array:
        """Return the coefficients of a step as one array (coefficients, ...).

        Arguments:
            xp: NumPy or torch.
            gamma: the damping γ, a NumPy array or a float64 tensor.
            size: the signed step size H, of the same type. Its shape is () if all samples share their steps, or
                (batch,) followed by as many dimensions as a γ per channel has. The dimensions ... of the result are
                those to which ``gamma`` and ``size`` broadcast.
            error: whether to include the coefficients of the error estimate.
        """
        raise NotImplementedError

    def unpack(self, packed: Tensor, dims: int, *, error: bool = False) -> Rows:
        """Convert the array of :meth:`packed` to the argument ``coefficients`` of :meth:`step`.

        ``dims`` is the number of dimensions of a tensor of the state. The coefficients are reshaped to broadcast with
        it. For an SDE, the caller appends the normal variables of the step as the last coefficient.
        """
        return broadcasting(packed, dims).unbind(0)

    def step(
        self, state: Rows, coefficients: Rows, times: Times, field: RHS, *, error: bool = False, dense: bool = False
    ) -> StepResult:
        """Take one step, with function evaluations at ``times``.

        ``error`` requests the error estimate, and ``dense`` the columns of :class:`StepResult` for dense output.
        """
        raise NotImplementedError

    def dense_weights(self, xp: Any, gamma: Array, size: Array, theta: Array) -> Array:
        """Return the weights of dense output at k positions θ in steps, from 0 to 1.

        ``theta`` and ``size`` have the shape (k, ...), where ... are dimensions of a damping γ per channel. The weights
        have the shape (k, ..., tensors of the state, columns). Each tensor of the state is the weighted sum of
        ``StepResult.columns``.
        """
        raise NotImplementedError

    def undo(self, state: Rows, coefficients: Rows, times: Times, field: RHS) -> Rows:
        """Return the state before a step, given the state after the step, by reversing it.

        For an FSAL method, ``times`` holds only the time at which the step starts.
        """
        raise NotImplementedError


class Explicit(Method):
    r"""A method whose stages are linear in the tensors of the state and in the values of the field.

    The columns K are the tensors of the state, of which the last is the value of the field, followed by the values
    :math:`F_i = f(t_i, x_i)` of the s stages. Stage i is evaluated at :math:`x_i = \sum_k C_{ik} K_k` with a matrix C
    of coefficients. The last stage is the new position or state. Further matrix rows of C give the new momentum m and
    the error estimate.

    Attributes:
        layout: for steps without (key False) and with an error estimate (key True), the numbers of rows and columns of
            C, and the flat indices in C of the elements of :meth:`packed`.
    """

    is_fsal = True

    def __init__(self, nodes: Sequence[float], name: str, tableau: tableaus.Tableau) -> None:
        super().__init__(nodes, name, tableau)
        self._order = {error: self._order_of_use(error) for error in (False, True)}
        n, s = self.rows, self.evaluations
        self.layout = {e: (s + n - 1 + n * e, n + 1 + s, order) for e, (_, order, _) in self._order.items()}

    def _order_of_use(self, error: bool) -> tuple[np.ndarray, Tensor, list[int]]:
        """Return the flat indices of the elements of C in the order in which a step uses them, and the group sizes.

        The first group of elements multiplies the tensors of the state. Each later group multiplies one value of the
        field.
        """
        n, s = self.rows, self.evaluations
        count, width = s + n - 1 + n * error, n + 1 + s
        first = [r * width + k for r in range(count) for k in range(n + 1)]
        later = [[r * width + n + 1 + i for r in range(i + 1, count)] for i in range(s)]
        order = np.array([*first, *(place for places in later for place in places)])
        return order, torch.from_numpy(order), [len(first), *map(len, later)]

    def matrix(self, xp: Any, gamma: Array, size: Array) -> Array:
        """Return the matrix C for step sizes of shape (...), with the matrix rows of the error estimate."""
        raise NotImplementedError

    def packed(self, xp: Any, gamma: Array, size: Array, error: bool) -> Array:
        matrix = self.matrix(xp, gamma, size)
        order = self._order[error]
        flat = matrix.reshape(*matrix.shape[:-2], math.prod(matrix.shape[-2:]))
        return moveaxis(flat[..., order[0] if xp is np else order[1].to(flat.device)], -1, 0)

    def unpack(self, packed: Tensor, dims: int, *, error: bool = False) -> Rows:
        first, *later = broadcasting(packed, dims).split_with_sizes(self._order[error][2])
        return (first.reshape(len(first) // (self.rows + 1), self.rows + 1, *first.shape[1:]), *later)

    def step(
        self, state: Rows, coefficients: Rows, times: Times, field: RHS, *, error: bool = False, dense: bool = False
    ) -> StepResult:
        n, shape, (first, *later) = self.rows, state[0].shape, coefficients
        uniform = first.dim() == 2  # all elements of the state have the same step size and damping
        push: Any
        in_place = not torch.is_grad_enabled() and may_look()
        point = torch.stack(state)
        if uniform and point.is_cpu:
            rows = first @ point.view(n + 1, -1)
            push = torch.Tensor.addr_ if in_place else torch.addr
        else:  # no matrix product, because a GPU may round it to TF32
            flat = point.view(n + 1, -1) if uniform else point
            rows = torch.outer(first[:, 0], flat[0]) if uniform else first[:, 0] * flat[0]
            push = torch.addr if uniform else torch.addcmul
            if in_place and (uniform or rows.shape[1:] == shape):
                push = torch.Tensor.addr_ if uniform else torch.Tensor.addcmul_
            for k in range(1, n + 1):
                rows = push(rows, first[:, k], flat[k])
        columns = [point]
        for t, column in zip(times, later, strict=True):
            x, rows = rows.split_with_sizes((1, len(rows) - 1))
            x = x.view(shape)
            f = field(t, x)
            rows = push(rows, column, f.reshape(-1) if uniform else f)
            if dense:
                columns.append(f.unsqueeze(0))
        others, errors = rows.split_with_sizes((n - 1, n if error else 0))
        after = (x, *others.view(n - 1, *shape).unbind(0), f)
        return StepResult(after, errors.view(n, *shape) if error else None, torch.cat(columns) if dense else None)


class RungeKutta(Explicit):
    """An explicit Runge-Kutta method for y' = f(t, y), with an embedded error estimate."""

    rows = 1

    def __init__(self, name: str, tableau: tableaus.RungeKuttaTableau) -> None:
        super().__init__(tableau.c[1:], name, tableau)
        weights = np.vstack([strictly_lower(tableau.a)[1:], tableau.error])
        weights_y = np.hstack([np.ones((len(weights), 1)), 0 * weights])
        weights_y[-1] = 0.0  # the matrix row of the error estimate
        weights_f = np.hstack([np.zeros((len(weights), 1)), weights])
        self.constants = constant_arrays(weights_y, weights_f, np.array(tableau.dense).T)

    def matrix(self, xp: Any, gamma: Array, size: Array) -> Array:
        weights_y, weights_f, _ = constants(self.constants, xp, size)
        return weights_y + size[..., None, None] * weights_f

    def dense_weights(self, xp: Any, gamma: Array, size: Array, theta: Array) -> Array:
        _, _, dense = constants(self.constants, xp, size)
        weights = size[..., None] * (moveaxis(powers(xp, theta, len(dense) + 1)[1:], 0, -1) @ dense)
        return xp.concatenate([xp.ones_like(weights[..., :1]), weights], -1)[..., None, :]


class Nystrom(Explicit):
    r"""A Runge-Kutta-Nystrom pair for :math:`h'' + \gamma h' = f(h, t)`, which integrates the damping exactly.

    Within a step from :math:`t_n`, the substitution :math:`u(s) = e^{\gamma s/2} h(t_n + s)` removes the velocity:

    .. math::
        u'' = (\gamma^2/4) u + e^{\gamma s/2} f =: g, \quad u(0) = h_n, \quad u'(0) = m_n + (\gamma/2) h_n.

    Let H be the step size, c the nodes, A the nilpotent matrix of the tableau, z = γH and E = diag(e^{zc/2}). The
    values of g at the stages are

    .. math:: g = (I - z^2 A/4)^{-1} [(\gamma^2/4) ((1 + cz/2) h_n + c H m_n) + E f].

    At the position θ in the step, let w be the weights of u and v the weights of u'. Then
    u = h_n + θH (m_n + γh_n/2) + H² w·g and u' = m_n + γh_n/2 + H v·g. From these,
    h(θ) = e^{-zθ/2} u and m(θ) = e^{-zθ/2} (u' - γu/2).

    Because A is nilpotent, H²g is a sum of h, H m and H²Ef, each multiplied by polynomials in z. Therefore each
    coefficient of a step is a polynomial in z, multiplied by e^{rz} with a rate r, and by 1, H, H² or γ. For dense
    output it is a polynomial in z and θ.
    """

    rows, field = 2, "HBNODE"
    damping_limit = 16.0  # beyond 32 the decay makes the error estimate vanish

    def __init__(self, name: str, tableau: tableaus.NystromTableau) -> None:
        super().__init__(tableau.c[1:], name, tableau)
        a, c = strictly_lower(tableau.a), np.array(tableau.c, float)
        s = len(c)
        g, power = np.zeros((2 * s + 4, s, s + 2)), np.eye(s)  # H²g = Σ_k z^k g[k] (h, H m, H²Ef)
        for k in range(0, 2 * s, 2):  # power is (A/4)^{k/2}
            g[k, :, 2:] += power
            g[k + 2, :, 0] += power.sum(1) / 4
            g[k + 2, :, 1] += power @ c / 4
            g[k + 3, :, 0] += power @ c / 8
            power = power @ a / 4

        def q_h(one: Array, theta: Array, w: np.ndarray) -> np.ndarray:
            """Return the polynomials for the matrix rows of C that give the position h at ``theta``.

            With one = theta = 0, return those of the error estimate of h.
            """
            q = w @ g
            q[0, :, 0] += one
            q[1, :, 0] += theta / 2
            q[0, :, 1] += theta
            return q

        def q_m(one: Array, theta: Array, w: np.ndarray, v: np.ndarray) -> np.ndarray:
            q = v @ g
            q[1:] -= (w @ g)[:-1] / 2
            q[2, :, 0] -= theta / 4
            q[0, :, 1] += one
            q[1, :, 1] -= theta / 2
            q[:-1, :, 0] = q[1:, :, 0]  # z Q(z) / H is γ Q(z)
            return q

        b, *errors = (np.array([x]) for x in (tableau.b_velocity, tableau.error, tableau.error_velocity))
        rows = [q_h(1.0, c[1:], a[1:]), q_m(1.0, 1.0, a[-1:], b), q_h(0.0, 0.0, errors[0]), q_m(0.0, 0.0, *errors)]
        at, units = np.array([0, 0, *c]), np.array([[0, 1, *[2] * s], [3, 0, *[1] * s]])
        rates = (at - np.array([*c[1:], 1, 1, 1])[:, None]) / 2
        step, self.polynomials = [np.concatenate(rows, 1), rates, units[[0] * (s - 1) + [1, 0, 1]]], dict[bool, Any]()
        for error, (order, *_) in self._order.items():
            q, rates, factors = (x.reshape(*x.shape[:-2], -1)[..., order] for x in step)
            different, which = np.unique(rates, return_inverse=True)
            self.polynomials[error] = constant_arrays(q.T, different, which, factors)
        inner = _interpolant(tableau, a)
        n, one, theta = np.arange(1, len(inner) + 1)[:, None], *np.eye(2, len(inner) + 2)  # powers of θ
        w, v = (np.pad(x, [(below, 2 - below), (0, 0)]) for below, x in ((2, inner / (n * (n + 1))), (1, inner / n)))
        dense = np.concatenate([q_h(one, theta, w), q_m(one, theta, w, v)], 2)
        self.degrees, self.dense = dense.shape[:2], constant_arrays(dense.reshape(-1, units.size).T, at, units)

    def packed(self, xp: Any, gamma: Array, size: Array, error: bool) -> Array:
        in_numpy, in_torch = self.polynomials[error]
        q, rates, which, units = in_numpy if xp is np else (x.to(size.device) for x in in_torch)
        z = gamma * size
        none, stack, ones, count = 0 * z, np.array if xp is np else torch.stack, [1] * z.ndim, q.shape[1]
        powers_of_z = z ** np.arange(count).reshape(-1, *ones) if xp is np else powers(xp, z, count)
        values = (q @ powers_of_z.reshape(count, math.prod(z.shape))).reshape(len(q), *z.shape)
        scales = stack([1 + none, size + none, size * size + none, gamma + none])[units]
        return values * xp.exp(rates.reshape(-1, *ones) * z)[which] * scales

    def dense_weights(self, xp: Any, gamma: Array, size: Array, theta: Array) -> Array:
        q, at, units = constants(self.dense, xp, size)
        z = gamma * (size + 0 * theta)
        none, stack = 0 * z, np.array if xp is np else torch.stack
        theta, scales = theta + none, stack([1 + none, size + none, size * size + none, gamma + none])[units]
        both = powers(xp, z, self.degrees[0])[:, None] * powers(xp, theta, self.degrees[1])
        values = (q @ both.reshape(math.prod(self.degrees), math.prod(z.shape))).reshape(*units.shape, *z.shape)
        decays = xp.exp((at.reshape(-1, *[1] * z.ndim) - theta) * z / 2)
        return moveaxis(values * decays * scales, (0, 1), (-2, -1))


def _interpolant(tableau: tableaus.NystromTableau, a: np.ndarray) -> np.ndarray:
    r"""Return polynomials :math:`\ell_i` with :math:`g(\theta) \approx \sum_i \ell_i(\theta) g_i`.

    The result has the coefficients of the powers of θ, (powers, stages). The polynomials interpolate g = u'' of
    :class:`Nystrom` at the nodes where ``b_velocity`` is not 0. Their integral from 0 to θ gives u', and their double
    integral gives u with weights :math:`b_i(\theta)`.

    RKN8 has two stages at the end of the step, and only the first one has a weight. This weight is divided between both
    stages such that the order condition :math:`\sum_i b_i(\theta) \sum_j a_{ij} c_j^3 = \theta^7 / 840` holds, which
    otherwise has the largest residual. The residuals of the other conditions of order 7 are at most 1e-8.
    """
    c = np.array(tableau.c, float)
    nodes = [i for i, weight in enumerate(tableau.b_velocity) if weight]
    inner = np.zeros((len(nodes), len(c)))
    for i in nodes:
        others = c[[j for j in nodes if j != i]]
        inner[:, i] = np.poly(others)[::-1] / np.prod(c[i] - others)
    if tableau.b_velocity[-1] == 0:
        defect = a @ c**3 - c**5 / 20
        share = inner @ defect / (defect[-2] - defect[-1])
        inner[:, -2:] += np.stack([-share, share], -1)
    return inner


class Exponential(Explicit):
    r"""An exponential pair for :math:`h'' + \gamma h' = f(h, t)`, which integrates the damping exactly.

    Let a step of size H start at (h_n, m_n). If f at the time τ after the start is a polynomial Σ_k p_k θ^k in
    θ = τ / H, then

        h(τ) = h_n + τ φ_1(z) m_n + τ² Σ_k k! φ_{k+2}(z) θ^k p_k,
        m(τ) = φ_0(z) m_n + τ Σ_k k! φ_{k+1}(z) θ^k p_k,                            z = -γτ,

    with φ_0(z) = e^z and φ_{k+1}(z) = (φ_k(z) - 1/k!) / z, whose value at 0 is 1/(k+1)!. Stage i at the node c_i uses
    the polynomial P_i through the earlier values of f. Let h(c; P) be the position at the node c for P. Then

        h_i = h(c_i; P_i) + Σ_{1<j<i} κ_ij (h(c_j; P_i) - h_j),

    where the sum with the weights κ corrects earlier stages. The step uses the polynomial through all values.

    The weights κ are chosen such that Σ w_i d_i = 0 for the defects d_i of the stages and the quadrature weights w_i on
    [0, 1]. For any γ, a step integrates the quantity h + m/γ with the weights w_i. Therefore the defects cancel for
    every γ, and also for a γ per channel.

    Without damping this is a Nystrom method. With strong damping it is a Runge-Kutta method for :math:`h' = f/\gamma`,
    because τ² k! φ_{k+2}(z) tends to τ / ((k + 1) γ).

    References:
        Hochbruck and Ostermann, "Exponential integrators", Acta Numerica 19 (2010) 209-286.
    """

    rows, field, is_stiff = 2, "HBNODE", True

    def __init__(self, name: str, tableau: tableaus.ExponentialTableau) -> None:
        self.c = np.array(tableau.c, float)
        ends = self.c[1:]  # upper limits of the integrals of polynomials
        super().__init__((*ends, 1.0), name, tableau)  # the last evaluation is at the new state
        self.powers = len(self.c)

        def row(kind: int, end: int, polynomial: np.ndarray) -> np.ndarray:
            """Return the factors by which the weights are multiplied in the row of C for h (kind 0) or m (kind 1)."""
            found = np.zeros((2, len(ends), self.powers + 2, self.powers + 3))
            found[kind, end, [0, 1], [0, 1]], found[kind, end, 2:, 2:] = 1.0, polynomial
            return found

        rows: list[np.ndarray] = []
        for i, corrections in enumerate(tableau.corrections):
            known = self._interpolation(list(range(i + 1)))
            corrected = [w * (row(0, j, known) - rows[j]) for j, w in enumerate(corrections)]
            rows.append(row(0, i, known) + sum(corrected))
        whole = self._interpolation(list(range(self.powers)))
        values = [*range(self.powers - 1), self.powers]  # the value at the new state replaces that of the last stage
        embedded = [i for i in values if i != tableau.left_out]
        error = self._interpolation(values) - self._interpolation(embedded)
        rows += [row(kind, -1, whole) for kind in (0, 1)]
        rows += [row(kind, -1, error) - row(kind, -1, 0 * error) for kind in (0, 1)]
        self.constants = constant_arrays(ends, np.stack(rows, -2), row(0, 0, self._interpolant(whole))[0, 0])

    def _interpolation(self, values: list[int]) -> np.ndarray:
        """Return the coefficients of the polynomial in θ through some of the values F_i of f, (powers, columns).

        ``values`` holds the indices i. The coefficient of θ^k is the sum of F_i times the entry [k, i].
        """
        polynomial = np.zeros((self.powers, self.powers + 1))
        nodes = np.append(self.c, self.c[-1])[values]
        polynomial[: len(values), values] = np.linalg.inv(nodes[:, None] ** np.arange(len(values)))
        return polynomial

    def _interpolant(self, whole: np.ndarray) -> np.ndarray:
        """Return the coefficients (powers, columns) of the cubic that approximates f for dense output.

        The cubic has the values of f at both ends of the step, and the moments Σ w_i F_i and Σ w_i c_i F_i of the
        method. The defects of the stages cancel in these moments, but not in the values F_i at the inner nodes.
        """
        weights = (1 / np.arange(1, self.powers + 1)) @ whole
        first, second = np.eye(self.powers + 1)[[0, -1]]
        moment = weights - (first + second) / 2  # minus the moment of the straight line between the ends
        other = weights * np.append(self.c, self.c[-1]) - first / 6 - second / 3
        bump, skew = 36 * moment - 60 * other, 120 * other - 60 * moment  # coefficients of θ(1 - θ) and θ²(1 - θ)
        return np.stack([first, second - first + bump, skew - bump, -skew])

    def matrix(self, xp: Any, gamma: Array, size: Array) -> Array:
        ends, rows, _ = constants(self.constants, xp, size)
        weights = moveaxis(self._weights(xp, gamma, size, ends), 0, -3)
        shape, count = weights.shape[:-3], math.prod(rows.shape[:3])
        return (weights.reshape(*shape, count) @ rows.reshape(count, -1)).reshape(*shape, *rows.shape[3:])

    def dense_weights(self, xp: Any, gamma: Array, size: Array, theta: Array) -> Array:
        *_, dense = constants(self.constants, xp, size)
        return (moveaxis(self._weights(xp, gamma, size, theta[..., None]), 0, -3) @ dense)[..., 0, :]

    def _weights(self, xp: Any, gamma: Array, size: Array, at: Array) -> Array:
        """Return the weights of h_n, m_n and p_0, p_1, ... in the formulas for the position h(τ) and the momentum m(τ).

        ``at`` holds positions τ / H, (..., positions). The result has the shape (2, ..., positions, 2 + powers); its
        first entry is for h(τ), the second for m(τ).
        """
        time = at * size[..., None]
        phi = phi_functions(xp, -gamma[..., None] * time, self.powers + 2)
        time = time + 0 * phi[0]
        scales = [math.factorial(k) * at**k * time for k in range(self.powers)]
        row_h = [xp.ones_like(time), time * phi[1], *(scale * time * phi[k + 2] for k, scale in enumerate(scales))]
        row_m = [xp.zeros_like(time), phi[0], *(scale * phi[k + 1] for k, scale in enumerate(scales))]
        return xp.stack([xp.stack(row_h, -1), xp.stack(row_m, -1)])


def phi_functions(xp: Any, z: Array, count: int) -> list[Array]:
    r"""Return the functions φ_0(z), …, φ_{count - 1}(z) of :class:`Exponential`, to about 14 digits in float64.

    For :math:`|z| < 2`, where the recursion cancels, φ_k is the series :math:`\sum_j z^j / (j + k)!`.
    """
    is_near = abs(z) < RADIUS
    near, far = xp.where(is_near, z, 0.0 * z), xp.where(is_near, RADIUS + 0.0 * z, z)  # no overflow
    series = SERIES[:count] if xp is np else torch.from_numpy(SERIES[:count]).to(z)
    near_phi = (series @ powers(xp, near, TERMS).reshape(TERMS, math.prod(z.shape))).reshape(count, *z.shape)
    far_phi = xp.exp(far)
    phi = [xp.where(is_near, near_phi[0], far_phi)]
    for k in range(1, count):
        far_phi = (far_phi - 1 / math.factorial(k - 1)) / far
        phi.append(xp.where(is_near, near_phi[k], far_phi))
    return phi


def powers(xp: Any, z: Array, count: int) -> Array:
    """Return the powers 1, z, z², ... (count, ...), as products, because torch.pow has no second derivative at 0."""
    found, factor = xp.ones_like(z)[None], z
    while len(found) < count:
        found, factor = xp.concatenate([found, found * factor]), factor * factor
    return found[:count]


class Splitting(Method):
    r"""A reversible splitting method for :math:`h' = \sigma(m),\; m' = -\gamma m + F(h, t)`, F = f or f - ξh.

    A step alternates drifts, which update the position h, and kicks, which update the momentum m, over times τ. The
    damping is γ. It begins and ends with a drift:

        drift (τ):  h ← h + τ σ(m);    kick (τ):  m ← e^{-γτ} m + (1 - e^{-γτ})/γ F(h, t).

    Reversing a kick divides by e^{-γτ}, so rounding errors grow by e^{γT} over a time T.

    The ``drifts`` and ``kicks`` of the tableau are the times τ as fractions of the step.
    """

    rows, field, needs_fixed_steps, is_reversible = 2, "HBNODE, GHBNODE", True, True
    gradients = ("checkpoint", "direct", "reversible", "adjoint")

    def __init__(self, name: str, tableau: tableaus.SplittingTableau) -> None:
        self.constants = constant_arrays(np.array(tableau.drifts, float), np.array(tableau.kicks, float))
        super().__init__(np.cumsum(tableau.drifts)[:-1].tolist(), name, tableau)
        self.activation: Callable[[Tensor], Tensor] | None = None

    def bind(self, term: Any) -> Self:
        """Return this method, or for a GHBNODE a copy of it with the field's activation σ.

        A drift of the copy updates h by h' = σ(m) instead of h' = m.
        """
        activation, shape = getattr(term.inner, "activation", None), term.template.shape
        if activation is None:
            return self
        method = copy.copy(self)  # the state may be flattened, and σ need not be elementwise
        method.activation = lambda m: activation(m.view(shape)).reshape(m.shape)
        return method

    def packed(self, xp: Any, gamma: Array, size: Array, error: bool) -> Array:
        """Return one array: the durations of drifts, then e^{-γτ} and (1 - e^{-γτ})/γ for kicks of duration τ."""
        drifts, kicks = constants(self.constants, xp, size)
        lengths = size[..., None] * kicks
        z = (gamma * xp.ones_like(size))[..., None] * lengths
        small = abs(z) < 1e-4  # use the series of (1 - e^{-z})/z
        safe = xp.where(small, xp.ones_like(z), z)
        phi = xp.where(small, 1 - z / 2 + z * z / 6 - z**3 / 24, -xp.expm1(-safe) / safe)
        drifts = size[..., None] * drifts + 0 * z[..., :1]
        return moveaxis(xp.concatenate([drifts, xp.exp(-z), lengths * phi], -1), -1, 0)

    def unpack(self, packed: Tensor, dims: int, *, error: bool = False) -> Rows:
        return broadcasting(packed, dims).split_with_sizes([self.evaluations + 1, self.evaluations, self.evaluations])

    def step(self, state: Rows, coefficients: Rows, times: Times, field: RHS, **_: Any) -> StepResult:
        (h, m), (drifts, decays, weights) = state, coefficients
        h = self._drift(h, m, drifts[0])
        for t, decay, weight, drift in zip(times, decays, weights, drifts[1:], strict=True):
            m = decay * m + weight * field(t, h)
            h = self._drift(h, m, drift)
        return StepResult((h, m))

    def undo(self, state: Rows, coefficients: Rows, times: Times, field: RHS) -> Rows:
        (h, m), (drifts, decays, weights) = state, coefficients
        for i in reversed(range(len(times))):
            h = self._drift(h, m, -drifts[i + 1])
            m = (m - weights[i] * field(times[i], h)) / decays[i]
        return self._drift(h, m, -drifts[0]), m

    def _drift(self, h: Tensor, m: Tensor, length: Tensor) -> Tensor:
        return h + length * (m if self.activation is None else self.activation(m))


class Rosenbrock(Method):
    r"""An L-stable Rosenbrock pair for stiff equations y' = f(t, y) or :math:`h'' + \gamma h' = f(h, t)`.

    A step solves one linear system for each stage, with the matrix I - cJ. Here J is the Jacobian of f at the start of
    the step, c = Hg, and g the ``diagonal`` of the tableau. The matrix is factorized once per step. For h'' + γh' = f
    with the damping γ and the momentum m, let J = ∂f/∂h, let (u_h, u_m) be the unknowns of a stage, and (r_h, r_m) its
    right-hand side. The equations u_h - c u_m = r_h and (1 + cγ) u_m - c J u_h = r_m are equivalent to

        ((1 + cγ) I - c² J) u_h = (1 + cγ) r_h + c r_m,    u_m = (u_h - r_h) / c,

    so that the linear systems have the size of h.

    Samples do not interact, so J is block diagonal, and each sample has its own system. The first dimension of the
    state is the batch if all its tensors have the same first dimension and at least one more dimension. Otherwise, if
    samples do not have their own steps, the whole state is one system for a vector y of shape (n,). The derivatives
    ∂f/∂y and ∂f/∂t are computed by :func:`~hbnode.solve.jacobian.derivatives`.

    A step counts one function evaluation for the whole Jacobian and one for each stage. The last stage estimates the
    error at the end of a step. In very stiff problems this estimate misses the error of dense output. Therefore a step
    with outputs inside has one further evaluation in its middle, for the defect d = Hp' - Hf(p) of the dense output p.
    The solution e of (I - cJ) e = gd is the error of stiff components, and is small for other components. If samples
    have their own steps, the argument ``dense`` of :meth:`step` is a mask (samples,) of the samples with outputs inside
    the step.
    """

    rows = 1
    is_fsal = is_stiff = True
    gradients = ("checkpoint", "direct")  # no adjoint, because fast decay becomes fast growth backwards in time
    shape: tuple[int, int]  # (samples, unknowns); bind sets this attribute and the following ones
    places: Tensor | None  # the index in the flat state of each element of (samples, unknowns); None if in order
    inverse: Tensor
    weights: Tensor
    middle: Tensor

    def __init__(self, name: str, tableau: tableaus.RosenbrockTableau) -> None:
        nodes = (0.0, *tableau.c[1:], 1.0)  # Jacobian, later stages, and first stage of the next step
        super().__init__(nodes, name, tableau)
        self.diagonal, self.d = tableau.diagonal, tableau.d
        a, C = strictly_lower(tableau.a)[1:, :-1], strictly_lower(tableau.C)
        dense = np.array(tableau.dense).T
        k = np.arange(len(dense))
        middle = np.stack([a[-1] / 2 + 0.5**k @ dense / 4, a[-1] + k * 0.5**k @ dense / 2])  # values, slopes
        self.constants = constant_arrays(np.stack([a.T, C.T], 1), a[-1], dense, middle)

    def bind(self, term: Any) -> Self:
        """Return a copy of this method that solves one linear system per sample, with the state's shape of the term."""
        method = copy.copy(self)
        tensors = parts(term.like)[: 1 if term.second_order else None]
        is_batch = all(x.dim() > 1 and x.shape[0] == tensors[0].shape[0] for x in tensors)  # torch.export fixes len(x)
        is_batch |= term.lanes is not None
        samples = tensors[0].shape[0] if is_batch else 1
        method.rows, method.places = term.rows, None
        method.shape = samples, sum(math.prod(x.shape[is_batch:]) for x in tensors)
        if term.lanes is None and len(tensors) > 1 and is_batch:  # a flat state is the concatenation of its tensors
            sizes = [x.numel() for x in tensors]
            indices = torch.arange(sum(sizes), device=term.template.device).split(sizes)
            method.places = torch.cat([x.reshape(samples, -1) for x in indices], 1)
            method.inverse = method.places.flatten().argsort()
        weights, _, _, middle = (x.to(term.template) for x in constants(self.constants, torch, term.template))
        method.weights, method.middle = weights[..., None, None, None], middle[..., None, None, None]
        return method

    def packed(self, xp: Any, gamma: Array, size: Array, error: bool) -> Array:
        return xp.stack([size + 0 * gamma, gamma + 0 * size])

    def dense_weights(self, xp: Any, gamma: Array, size: Array, theta: Array) -> Array:
        _, b, dense, _ = constants(self.constants, xp, size)
        theta = (theta + 0 * (size + gamma))[..., None]
        weights = theta * b + theta * (1 - theta) * (moveaxis(powers(xp, theta[..., 0], len(dense)), 0, -1) @ dense)
        weights = xp.concatenate([xp.ones_like(theta), weights], -1)
        zeros = [0 * weights] * (self.rows - 1)
        return xp.stack([xp.concatenate([*zeros[:r], weights, *zeros[r:]], -1) for r in range(self.rows)], -2)

    def matrix(self, row: Tensor) -> Tensor:
        """Reshape a tensor of the state, such as y, to (samples, elements per sample)."""
        return row.reshape(self.shape) if self.places is None else row[self.places]

    def row(self, matrix: Tensor, shape: Any) -> Tensor:
        """Reshape ``matrix`` (samples, elements per sample) to ``shape``, the inverse of :meth:`matrix`."""
        return matrix.reshape(shape) if self.places is None else matrix.flatten()[self.inverse]

    def step(
        self, state: Rows, coefficients: Rows, times: Times, field: RHS, *, error: bool = False,
        dense: bool | Tensor = False,
    ) -> StepResult:  # fmt: skip
        *rows, value = state
        n, shape = self.rows, value.shape
        size, gamma = (self.matrix(x.expand(shape)) for x in coefficients)
        c = self.diagonal * size
        scale, y = 1 + c * gamma, torch.stack([self.matrix(x) for x in rows])
        create_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (*state, size, times[0]))
        jac_y, jac_t = derivatives(
            lambda t, x: self.matrix(field(t, self.row(x, shape))), times[0], y[0], create_graph=create_graph
        )
        lu, pivots, _ = torch.linalg.lu_factor_ex(torch.diag_embed(scale) - (c if n == 1 else c * c)[..., None] * jac_y)

        # lu_solve, and derivatives of linalg.solve, are wrong if lu is expanded along a batch dimension, as by vmap
        swap, lower, upper = torch.lu_unpack(lu, pivots) if is_transformed() else (None, lu, lu)

        def solve(right: Tensor) -> Tensor:
            x = (right[0] if n == 1 else scale * right[0] + c * right[1]).unsqueeze(-1)
            if swap is None:
                u = torch.linalg.lu_solve(lu, pivots, x).squeeze(-1)
            else:
                x = torch.linalg.solve_triangular(lower, swap.mT @ x, upper=False, unitriangular=True)
                u = torch.linalg.solve_triangular(upper, x, upper=True).squeeze(-1)
            return u[None] if n == 1 else torch.stack([u, (u - right[0]) / torch.where(c == 0, 1.0, c)])

        def slope(x: Tensor, f: Tensor) -> Tensor:
            return f[None] if n == 1 else torch.stack([x[1], f - gamma * x[1]])

        stages: list[Tensor] = []
        sums = torch.stack([y, torch.zeros_like(y)])[:, None].expand(2, len(self.d), *y.shape)
        x = y
        for k, t in enumerate(times[1:]):
            moved = size * slope(x, self.matrix(value) + self.d[k] * size * jac_t)
            stages.append(solve(self.diagonal * (moved + sums[1, k])))
            sums = torch.addcmul(sums, self.weights[k], stages[-1])
            x = sums[0, k]
            value = field(t, self.row(x[0], shape))
        after = (*(self.row(part, shape) for part in x), value)
        is_dense = dense is not False
        columns = [self.row(column[r], shape) for r in range(n) for column in (y, *stages)] if is_dense else []
        errors: Any = None
        if error:
            with torch.no_grad():
                errors = CAUTION * stages[-1].abs()
                if is_dense:
                    x, moved = ((weights * torch.stack(stages)).sum(0) for weights in self.middle)
                    f = field((times[0] + times[-1]) / 2, self.row(y[0] + x[0], shape))
                    defect = moved - size * slope(y + x, self.matrix(f))
                    dense_error = torch.maximum(errors, solve(self.diagonal * defect).abs())
                    errors = torch.where(torch.as_tensor(dense, device=errors.device).view(-1, 1), dense_error, errors)
                errors = torch.stack([self.row(part, shape) for part in errors])
        return StepResult(after, errors, torch.stack(columns) if is_dense else None)


class FixedStepRungeKutta(Method):
    """An explicit Runge-Kutta method with fixed steps, for torchdiffeq's methods in compiled or exported graphs.

    ``a`` is the Runge-Kutta matrix without its first matrix row, and ``b`` holds the weights.
    """

    rows, needs_fixed_steps = 1, True

    def __init__(self, a: Sequence[Sequence[float]], b: Sequence[float]) -> None:
        self.a, self.b = ((), *a), b
        super().__init__([sum(row) for row in self.a])

    def packed(self, xp: Any, gamma: Array, size: Array, error: bool) -> Array:
        return size[None]

    def step(self, state: Rows, coefficients: Rows, times: Times, field: RHS, **_: Any) -> StepResult:
        (y,), (size,) = state, coefficients
        slopes: list[Tensor] = []
        for t, row in zip(times, self.a, strict=True):
            x = y + size * sum(w * k for w, k in zip(row, slopes, strict=True) if w) if any(row) else y.clone()
            slopes.append(field(t, x))
        return StepResult((y + size * sum(w * k for w, k in zip(self.b, slopes, strict=True) if w),))


def broadcasting(packed: Tensor, dims: int) -> Tensor:
    """Append dimensions of length 1 to ``packed`` (coefficients, ...).

    Each coefficient then broadcasts with a tensor of the state, which has ``dims`` dimensions.
    """
    return packed.reshape(*packed.shape, *[1] * (dims + 1 - packed.dim())) if packed.dim() > 1 else packed


def combined(weights: Tensor, columns: Tensor) -> Tensor:
    """Return the states at output times inside steps, (outputs, tensors of the state, ...).

    They are sums of ``columns``, (columns, outputs or 1, ...), with the ``weights`` of :meth:`Method.dense_weights`.
    """
    if columns.is_cpu:
        if columns.shape[1] == 1 and weights.dim() == 3:
            rows = weights.flatten(0, 1) @ columns.flatten(1)
            return rows.view(*weights.shape[:2], *columns.shape[2:])
        return torch.einsum("p...nc,cp...->pn...", weights, columns.expand(-1, len(weights), *columns.shape[2:]))
    weights = weights.movedim((-1, -2), (0, 2))  # no matrix product, because a GPU may round it to TF32
    weights, columns = weights.reshape(*weights.shape, *[1] * (columns.dim() + 1 - weights.dim())), columns.unsqueeze(2)
    rows = weights[0] * columns[0]
    for weight, column in zip(weights[1:], columns[1:], strict=True):
        rows = torch.addcmul(rows, weight, column)
    return rows


class HostFormula(torch.autograd.Function):
    """An autograd function that evaluates ``formula(xp, γ, *args)`` on the CPU for the damping γ; xp is NumPy or torch.

    γ is a scalar. With NumPy, its derivative is a complex-step derivative; torch computes higher derivatives. Steps of
    equal size share one node of the graph. Therefore γ is stored as an attribute and not as a saved tensor, which the
    first backward pass would free.
    """

    @staticmethod
    def forward(
        ctx: Any, gamma: Tensor, number: float, formula: Callable[..., Any], args: tuple[Any, ...], xp: Any,
        like: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.formula, ctx.number, ctx.args, ctx.xp, ctx.slope = formula, number, args, xp, None
        ctx.gamma = gamma
        return on_host(formula, number, args, xp, like)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gamma, create_graph = ctx.gamma, torch.is_grad_enabled()
        if create_graph or ctx.xp is torch:
            with torch.enable_grad():
                number = gamma if create_graph else torch.tensor(ctx.number, dtype=torch.float64, requires_grad=True)
                value = ctx.formula(torch, number.cpu().double(), *map(torch.as_tensor, ctx.args))
                (found,) = torch.autograd.grad(value, number, gradient.to(value), create_graph=create_graph)
        else:
            gradient = gradient.to(_torch.widest(gradient.device))
            if ctx.slope is None:
                step = ctx.formula(np, np.asarray(ctx.number + 1e-30j), *ctx.args)
                ctx.slope = torch.from_numpy(step.imag / 1e-30).to(gradient)
            found = (gradient * ctx.slope).sum()
        return found.to(gamma), None, None, None, None, None


def on_host(formula: Callable[..., Any], number: float, args: tuple[Any, ...], xp: Any, like: Tensor) -> Tensor:
    """Return ``formula(xp, number, *args)``, computed on the CPU, as a tensor of the dtype and device of ``like``."""
    if xp is np:
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.ascontiguousarray(formula(np, np.asarray(number), *args))).to(like)
    with torch.no_grad():
        gamma = torch.tensor(number, dtype=torch.float64)
        return formula(torch, gamma, *map(torch.as_tensor, args)).to(like)


def moveaxis(x: Array, source: Any, destination: Any) -> Array:
    """Call ``np.moveaxis`` for an array and ``movedim`` for a tensor, because vmap does not support torch.moveaxis."""
    return np.moveaxis(x, source, destination) if isinstance(x, np.ndarray) else x.movedim(source, destination)


def strictly_lower(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the square, strictly lower triangular matrix whose rows, from the second one on, begin with ``rows``."""
    a = np.zeros((len(rows) + 1, len(rows) + 1))
    for i, row in enumerate(rows):
        a[i + 1, : len(row)] = row
    return a


def constant_arrays(*arrays: np.ndarray) -> tuple[tuple[np.ndarray, ...], tuple[Tensor, ...]]:
    """Return a pair: a tuple of the arrays, and a tuple of tensors with the same values.

    The tensors are not inference tensors, even if hbnode is imported in inference mode, because autograd saves them.
    """
    with torch.inference_mode(False):
        return arrays, tuple(torch.from_numpy(np.ascontiguousarray(x)) for x in arrays)


def constants(arrays: tuple[Any, Any], xp: Any, size: Array) -> tuple[Array, ...]:
    """Return the constants of a method as NumPy arrays if ``xp`` is NumPy, else as tensors on the device of ``size``.

    ``arrays`` is a result of :func:`constant_arrays`.
    """
    in_numpy, in_torch = arrays
    return in_numpy if xp is np else tuple([x.to(size.device) for x in in_torch])


@dataclass(frozen=True)
class ForeignMethod:
    """A method that torchdiffeq implements. It shares some attributes with :class:`Method`.

    Attributes:
        order: order of convergence; None if it varies.
        evaluations: function evaluations per step; None if they vary.
        kind: ``"adaptive"``, ``"fixed"`` for fixed steps, ``"adams"`` for fixed steps of Adams methods, or ``"scipy"``.
        grid: the Runge-Kutta matrix without its first row, and the weights, for compiled and exported graphs; or None.
    """

    order: int | None = None
    evaluations: int | None = None
    kind: Literal["adaptive", "fixed", "adams", "scipy"] = "adaptive"
    grid: tuple[tuple[tuple[float, ...], ...], tuple[float, ...]] | None = None
    gradients: tuple[str, ...] = ("direct", "adjoint")
    field: ClassVar = "any"

    @property
    def needs_fixed_steps(self) -> bool:
        return self.kind in ("fixed", "adams")


# A new method needs coefficients in tableaus.py. In this module it needs its name in NativeMethod, a line in _NATIVE,
# and a class if no existing class fits.
NativeMethod = Literal[
    "nystrom4", "nystrom6", "nystrom8", "exponential", "leapfrog", "blanes_moan4", "tsit5", "rodas5p"
]
_NATIVE: tuple[Method, ...] = (
    Nystrom("nystrom4", tableaus.RKN4),
    Nystrom("nystrom6", tableaus.RKN6),
    Nystrom("nystrom8", tableaus.RKN8),
    Exponential("exponential", tableaus.EXPONENTIAL),
    Splitting("leapfrog", tableaus.STRANG),
    Splitting("blanes_moan4", tableaus.BLANES_MOAN4),
    RungeKutta("tsit5", tableaus.TSIT5),
    Rosenbrock("rodas5p", tableaus.RODAS5P),
)
METHODS = {method.name: method for method in _NATIVE}

TorchdiffeqMethod = Literal[
    "dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun", "euler", "midpoint", "heun2", "heun3", "rk4",
    "explicit_adams", "implicit_adams", "fixed_adams", "scipy_solver",
]  # fmt: skip
TORCHDIFFEQ_METHODS = {
    "dopri5": ForeignMethod(5, 6), "dopri8": ForeignMethod(8, 13), "bosh3": ForeignMethod(3, 3),
    "fehlberg2": ForeignMethod(2, 2), "adaptive_heun": ForeignMethod(2, 1),
    "euler": ForeignMethod(1, 1, "fixed", ((), (1.0,))),
    "midpoint": ForeignMethod(2, 2, "fixed", (((0.5,),), (0.0, 1.0))),
    "heun2": ForeignMethod(2, 2, "fixed", (((1.0,),), (0.5, 0.5))),
    "heun3": ForeignMethod(3, 3, "fixed", (((1 / 3,), (0.0, 2 / 3)), (0.25, 0.0, 0.75))),
    "rk4": ForeignMethod(4, 4, "fixed", (((1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)), (1 / 8, 3 / 8, 3 / 8, 1 / 8))),
    **dict.fromkeys(("explicit_adams", "implicit_adams", "fixed_adams"), ForeignMethod(kind="adams")),
    "scipy_solver": ForeignMethod(kind="scipy", gradients=("adjoint",)),
}  # fmt: skip
ALL_METHODS: dict[str, Method | ForeignMethod] = {**METHODS, **TORCHDIFFEQ_METHODS}
TRACEABLE: dict[str, Method] = METHODS | {  # methods whose fixed steps torch.compile and torch.export can record
    name: FixedStepRungeKutta(*method.grid) for name, method in TORCHDIFFEQ_METHODS.items() if method.grid
}
