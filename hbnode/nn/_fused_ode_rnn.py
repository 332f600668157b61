"""A fused ODE-RNN: one autograd function with its own VJP, 2.7 times as fast as the reference implementation.

An ODE-RNN solves an ODE over each *gap*, the interval between two observations. A cell updates the state at each
observation. The reference implementation is the loop of :class:`hbnode.nn.ode_rnn.ODERNNLayer`. The rows "hbnode" of
``python -m benchmarks.irregular`` measure the speed. The fused implementation supports the cells of torch.nn, and
fields whose network f has only layers that this module knows. Four things make it faster:

* It records no autograd graph.
* It computes the gradient of a weight as one matrix product for many uses of the weight.
* It computes the coefficients of the solver's method for many step sizes at once.
* Most gaps take one step for all samples. For these it skips the step size controller.

The steps are those of :mod:`hbnode.solve`, but the loop over the steps is a separate one. The loop of hbnode.solve also
supports output times, jumps and time-dependent fields, and records a graph per gap if all samples share a step. With
that loop a training step took 1.3 times as long for long gaps or large weights, and 2.7 times with shared steps.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from hbnode import _torch
from hbnode.errors import NonFiniteError
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE
from hbnode.nfe import NFE, Tally, open_records
from hbnode.nn.nets import MLP
from hbnode.solve.adaptive import FIRST_LOOK, NON_FINITE_ATTEMPTS, TOO_MANY, common_fraction, common_norm
from hbnode.solve.control import Clip, PIController, first_size
from hbnode.solve.methods import METHODS, Explicit, Splitting
from hbnode.solve.odeint import resolve
from hbnode.solve.settings import Settings

Weights = Sequence[Any]  # weight and bias of each linear layer: first the cell's layer for h, then the layers of f

ROWS_PER_PRODUCT = 1024  # with this many collected inputs of a layer, the gradient of its weight is computed
SIZES_AT_ONCE = 4096  # number of step sizes for which coefficients, or their gradients, are computed together
NUMPY_SIZES = 256  # number of step sizes up to which NumPy is faster than torch
SUBSET_FRACTION = 0.75  # if at most this fraction of the samples is not at the end of its gap, only these take a step
ROUNDING = 1e-9  # relative tolerance, so that rounding adds no step to a gap that is a whole number of steps
aten = torch.ops.aten


class FallbackError(Exception):
    """The error of a fused solve that failed.

    The caller catches it and repeats the solve with the reference, which raises an error with advice for the user.
    """


class Solver(NamedTuple):
    """The settings of a solve, and the largest allowed step size h if the user passed ``options={"step_size": h}``."""

    settings: Settings
    step_size: float | None = None


def steps_needed(t: Tensor, step_size: float) -> Tensor:
    """Divide each gap between times t (batch, T) into equal steps no longer than ``step_size``.

    Return the least possible number of steps for each gap, (batch, T - 1).
    """
    return (t.detach().diff() / step_size * (1 - ROUNDING)).ceil().clamp(min=1)


# Supported layers

ACTIVATIONS: dict[type, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.Tanh: (torch.tanh, aten.tanh_backward.default),  # the VJPs take the output, not the input
    nn.Sigmoid: (torch.sigmoid, aten.sigmoid_backward.default),
    nn.ReLU: (torch.relu, lambda g, y: aten.threshold_backward.default(g, y, 0)),
    nn.ELU: (nn.functional.elu, lambda g, y: aten.elu_backward.default(g, 1.0, 1.0, 1.0, True, y)),
}
FIELDS = NODE, ANODE, SONODE, HBNODE, GHBNODE
_KNOWN: tuple[Any, ...] = (*ACTIVATIONS, *FIELDS, nn.Linear, nn.Sequential, MLP, nn.GRUCell, nn.RNNCell)
_FORWARD = {kind: kind.forward for kind in _KNOWN}
_CALLS = {"forward", "evaluate", "force", "friction"}


def is_unmodified(module: Any) -> bool:
    """Return whether a call of ``module`` runs only the forward method of a known class, without hooks or overrides."""
    kind: Any = type(module)
    if kind not in _FORWARD or kind.forward is not _FORWARD[kind] or module._compiled_call_impl is not None:
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return _CALLS.isdisjoint(vars(module))


def known_layers(net: Any) -> list[nn.Module] | None:
    """Return a flat list of the layers of a network, including the layers of nested networks.

    Return None if the network has a layer that the fused implementation does not support.
    """
    if not is_unmodified(net) or (isinstance(net, MLP) and net.time_dependent):
        return None
    if isinstance(net, MLP):
        return known_layers(net.layers)
    if not isinstance(net, nn.Sequential):
        is_known = type(net) in ACTIVATIONS or isinstance(net, nn.Linear)
        return [net] if is_known and getattr(net, "alpha", 1.0) == 1.0 else None  # nn.ELU has an alpha
    layers: list[nn.Module] = []
    for child in net:
        found = known_layers(child)
        if found is None:
            return None
        layers += found
    return layers


# The network, the equation and the cell, with their VJPs


class Parameters(NamedTuple):
    """The tensors that the solution depends on, and with respect to which the backward pass computes gradients.

    The equation is h' = m, m' = f(h) - ξ h - γ m with the momentum m, the damping γ and the skip weight ξ, or an
    equation with fewer terms; see :class:`Equation`.

    Attributes:
        s: initial state, (batch, S): h, or h and m concatenated.
        gates: W_ih x + b_ih of the cell at all times, (T, batch, features); None without a cell.
        damping: γ in the method's coefficients, in float64; 0 if they do not depend on γ.
        xi: ξ; None if the equation has no such term.
        friction: γ, if the equation that the stages evaluate has the term γ m; otherwise None.
        weights: weights and biases of the linear layers. The first pair is the cell's W_hh and b_hh, or None without a
            cell; the others are those of f.
    """

    s: Tensor
    gates: Tensor | None
    damping: Tensor
    xi: Tensor | None
    friction: Tensor | None
    weights: Weights


class GradAccumulator:
    """The gradients of all :class:`Parameters` except ``s`` and ``gates``, summed over the steps of a backward pass.

    Autograd adds to the gradient of a weight at every use of its layer. This class collects the inputs of the layer and
    the gradients of its outputs, and computes the gradient of the weight as one matrix product for many uses.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.found: dict[Any, Tensor] = {}  # sums of gradients; keys are names of scalars and indices of weights
        self.uses: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.steps: list[tuple[np.ndarray, Sequence[Tensor], Sequence[Tensor]]] = []

    def add(self, key: str | int, gradient: Tensor) -> None:
        self.found[key] = self.found[key].add_(gradient) if key in self.found else gradient

    def add_use(self, layer: int, x: Tensor, gradient: Tensor) -> None:
        uses = self.uses[layer]
        uses.append((x, gradient))
        if len(uses) * len(x) >= ROWS_PER_PRODUCT:
            self.sum_uses(layer)

    def sum_uses(self, layer: int) -> None:
        inputs, gradients = zip(*self.uses.pop(layer), strict=True)
        g = torch.cat(gradients)
        self.add(2 * layer, g.T @ torch.cat(inputs))
        if self.weights[2 * layer + 1] is not None:
            self.add(2 * layer + 1, g.sum(0))


class Network:
    """The network f: linear layers, which have the indices 1, 2, ... in ``weights``, and activations."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.weights: list[Any] = []  # weight and bias of each linear layer
        self.activations: list[Any] = []  # None for a linear layer
        for layer in layers:
            self.activations.append(ACTIVATIONS.get(type(layer)))
            if isinstance(layer, nn.Linear):
                self.weights += layer.weight, layer.bias
        # number of features of the input, and of the output
        self.sizes = (self.weights[0].shape[1], self.weights[-2].shape[0]) if self.weights else None

    def __call__(self, x: Tensor, weights: Weights, residuals: list[Tensor]) -> Tensor:
        """Return the output of the network for the input x (batch, n).

        The inputs of linear layers and the outputs of activations are appended to ``residuals`` for the VJP.
        """
        index = 2
        for activation in self.activations:
            if activation is None:
                residuals.append(x)
                x = linear(x, weights[index], weights[index + 1])
                index += 2
            else:
                x = activation[0](x)
                residuals.append(x)
        return x

    def vjp(self, gradient: Tensor, weights: Weights, residuals: list[Tensor], sums: GradAccumulator) -> Tensor:
        layer = len(self.weights) // 2
        for activation, value in zip(reversed(self.activations), reversed(residuals), strict=True):
            if activation is None:
                sums.add_use(layer, value, gradient)
                gradient = gradient @ weights[2 * layer]
                layer -= 1
            else:
                gradient = activation[1](gradient, value)
        return gradient


class Stage(NamedTuple):
    """One evaluation of the function F of :class:`Equation`: its argument, its value, and residuals for the VJP."""

    x: Tensor
    value: Tensor
    residuals: list[Tensor]


class Equation(NamedTuple):
    """The function F that a solver step evaluates in its stages, for a network f.

    The state has the hidden state h and, for second-order equations, a momentum m or a velocity v. γ is the damping and
    ξ a skip weight. For Nyström and splitting methods F is the force f(h) - ξh. For other methods F is the
    derivative of the state s: f(h) for s = h, [v, f(h, v)] for s = [h, v], and [m, f(h) - ξh - γm] for s = [h, m]. If
    ``is_bounded``, h' is tanh m instead of m. The term with ξ or γ is absent if the field has no such parameter.

    Attributes:
        network: f.
        is_pair: whether the argument x of F is [h, m] or [h, v].
        takes_both: whether f takes both halves of x, h and v.
        is_bounded: whether h' is tanh m.
    """

    network: Network
    is_pair: bool
    takes_both: bool
    is_bounded: bool

    def __call__(self, x: Tensor, p: Parameters) -> Stage:
        residuals: list[Tensor] = []
        h, m = x.chunk(2, 1) if self.is_pair else (x, x)
        value = self.network(x if self.takes_both else h, p.weights, residuals)
        if p.xi is not None:
            value = value - p.xi * h
        if self.is_pair:
            value = value if p.friction is None else value - p.friction * m
            value = torch.cat((torch.tanh(m) if self.is_bounded else m, value), 1)
        return Stage(x, value, residuals)

    def vjp(self, stage: Stage, gradient: Tensor, p: Parameters, sums: GradAccumulator) -> Tensor:
        h, m = stage.x.chunk(2, 1) if self.is_pair else (stage.x, stage.x)
        at_m, g = gradient.chunk(2, 1) if self.is_pair else (gradient, gradient)
        back = self.network.vjp(g, p.weights, stage.residuals, sums)
        if p.xi is not None:
            sums.add("xi", -(g * h).sum())
            back = back - p.xi * g
        if not self.is_pair:
            return back
        if self.is_bounded:
            at_m = aten.tanh_backward.default(at_m, stage.value[:, : at_m.shape[1]])
        if p.friction is not None:
            sums.add("friction", -(g * m).sum())
            at_m = at_m - p.friction * g
        if self.takes_both:
            back[:, at_m.shape[1] :] += at_m
            return back
        return torch.cat((back, at_m), 1)


class FusedCell(NamedTuple):
    """A torch.nn.GRUCell or tanh RNNCell whose products W_ih x + b_ih are computed for all times at once."""

    input_weights: tuple[Any, Any]  # weight and bias
    hidden_weights: tuple[Any, Any]
    is_gru: bool

    def __call__(self, gates: Tensor, s: Tensor, weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
        own = linear(s, weights[0], weights[1])
        if not self.is_gru:
            new = torch.tanh(own + gates)
            return new, (s, new)
        n = s.shape[1]
        own_rz, own_n = torch.split_with_sizes(own, (2 * n, n), 1)
        gates_rz, gates_n = torch.split_with_sizes(gates, (2 * n, n), 1)
        rz = torch.sigmoid(own_rz + gates_rz)
        r, z = rz.chunk(2, 1)
        new = torch.tanh(torch.addcmul(gates_n, r, own_n))
        return torch.lerp(new, s, z), (s, rz, own_n, new)

    def vjp(
        self, gradient: Tensor, residuals: tuple[Tensor, ...], weights: Weights, sums: GradAccumulator, at_gates: Tensor
    ) -> Tensor:
        """Compute the VJP of a cell's update: from the gradient of the new state, return that of the old state s.

        The gradient of W_ih x + b_ih is written to ``at_gates``. Those of the other parameters are added to ``sums``.
        """
        if not self.is_gru:
            s, new = residuals
            at_own = at_gates.copy_(aten.tanh_backward.default(gradient, new))
            sums.add_use(0, s, at_own)
            return at_own @ weights[0]
        s, rz, own, new = residuals
        r, z = rz.chunk(2, 1)
        at_s = gradient * z
        at_new = aten.tanh_backward.default(gradient - at_s, new)
        at_rz = aten.sigmoid_backward.default(torch.cat((at_new * own, gradient * (s - new)), 1), rz)
        torch.cat((at_rz, at_new), 1, out=at_gates)
        at_own = torch.cat((at_rz, at_new * r), 1)
        sums.add_use(0, s, at_own)
        return at_s.addmm_(at_own, weights[0])


# Steps and gaps


class FusedStep(NamedTuple):
    """A step of the solver, with the values that its VJP needs.

    Attributes:
        sizes: step size of each sample, (samples,).
        table_row: index of the row with ``sizes`` in the table of precomputed step sizes; None if there is no such row.
        samples: indices of the samples that take the step; None if all do. The others have reached the end of the gap.
        accepted: mask of these samples, True if the step is accepted, (samples, 1); None if it is for all of them.
        y: the method's state before the step, (samples, width); see :class:`FusedODERNN`.
        c: the coefficients of the method for these step sizes.
        stages: the evaluations of F.
    """

    sizes: np.ndarray
    table_row: int | None = None
    samples: Tensor | None = None
    accepted: Tensor | None = None
    y: Any = None
    c: Any = None
    stages: Sequence[Stage] = ()

    def end(self, y: Tensor, after: Tensor) -> Tensor:
        """Return the states of all samples after the step, (batch, width).

        y holds the states of all samples before it. ``after`` holds the result of the step for the samples that took
        it. A sample keeps its row of y unless its step was accepted.
        """
        if self.accepted is not None:
            after = torch.where(self.accepted, after, self.y)
        return after if self.samples is None else y.index_copy(0, self.samples, after)


class Gap(NamedTuple):
    """The record of a solved gap: its accepted steps and, for an FSAL method, the evaluation of F at its start."""

    start: Stage | None = None
    steps: Sequence[FusedStep] = ()


class FusedODERNN:
    """A solver of the ODE over the gaps between times (batch, T) without an autograd graph.

    A cell updates the state s (batch, S) after each gap. A method has its own state y (batch, width). It is s, followed
    by the last value of F (see :class:`Equation`) for an FSAL method, which uses this value in its next step.

    Attributes:
        cell: the cell that updates the states; None if its class is not known.
        nfe: function evaluations of each gap.
    """

    def __init__(
        self, layer: Any, equation: Equation, cell: FusedCell | None, name: str, damping: Any, s: Tensor, times: Tensor,
        solver: Solver,
    ) -> None:  # fmt: skip
        # weak reference, because the autograd graph owns this object, and the layer may own an output with its graph
        self.layer, self.residual = weakref.proxy(layer), layer.residual
        self.equation, self.cell, self.solver = equation, cell, solver
        self.settings, self.method, self.times = solver.settings, METHODS[name], times
        self.q, self.is_adaptive = self.method.error_order or 0, self.settings.steps is None
        self.evaluations, self.size, self.row = len(self.method.nodes), s.shape[1], s.shape[1] // self.method.rows
        t = times.detach().to("cpu", torch.float64).numpy()
        self.lengths: np.ndarray = np.ascontiguousarray(np.diff(t).T)
        self.is_zero = (self.lengths == 0).all(1)
        self.nfe = list(map(NFE, [0] * len(self.lengths)))
        self.counters = list(map(Tally, [layer.field] * len(self.nfe), self.nfe))
        self.sizes, self.fixed_steps = (self.lengths, []) if self.is_adaptive else self.make_fixed_steps()
        self.damping = torch.as_tensor(damping if self.method.rows == 2 else 0.0, dtype=torch.float64, device=s.device)
        has_friction = equation.is_pair and not equation.takes_both
        self.friction = torch.as_tensor(damping, dtype=s.dtype) if has_friction else None
        self.xi = torch.as_tensor(layer.field.xi, dtype=s.dtype) if equation.is_bounded else None
        self.gamma = self.damping.detach().cpu()
        self.number = float(self.gamma)
        self.longest = self.method.damping_limit / abs(self.number) if self.number else math.inf
        self.shortest = 4 * np.finfo(float).eps * abs(t).max(initial=0.0)
        self.group: tuple[int, Sequence[Tensor]] = (-1, ())  # last group of table rows: its number and coefficients

    def make_fixed_steps(self) -> tuple[np.ndarray, list[list[FusedStep]]]:
        """Divide each gap into equal steps; return a table of all step sizes, and the steps of each gap.

        The table is an array (steps, batch) with the steps of all gaps in order. The second result has, for each gap, a
        list of its :class:`FusedStep` objects.
        """
        count = np.full(self.lengths.shape, self.settings.steps)
        if self.solver.step_size is not None:
            count = steps_needed(self.times.detach().cpu().double(), self.solver.step_size).T.numpy().astype(int)
        most = count.max(1).tolist() if count.size else [1] * len(count)
        sizes = [self.lengths[:0]]
        for length, n, k in zip(self.lengths, count, most, strict=True):
            sizes.append(np.where(np.arange(k)[:, None] < n, length / n, 0.0))
        table = np.concatenate(sizes)
        steps = map(FusedStep, table, range(len(table)))
        return table, [list(itertools.islice(steps, k)) for k in most]

    def __call__(self, gap: int, s: Tensor) -> Tensor:
        try:
            return self.run(s, range(gap, gap + 1))[0][:, 0]
        except FallbackError:
            return self.layer.gaps(self.times[:, gap : gap + 2], self.solver)(0, s)

    def run(self, s: Tensor, gaps: range, x: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the states at the ends of the gaps, before and after the cell's update, both (batch, T, S).

        s (batch, S) is the initial state. ``gaps`` holds indices of gaps; -1 means that no gap precedes the first
        sample. x (batch, T, inputs) is the cell's input. If x is None, there are no updates by the cell. The mask
        (batch, T) selects the samples that update the state.

        Raises:
            FallbackError: if the reference must solve the gaps.
        """
        _torch.keep_freed_memory(s.device)
        cell, masks, gates, cell_weights = None, None, None, (None, None)
        if x is not None and self.cell is not None:
            cell, cell_weights = self.cell, self.cell.hidden_weights
            gates = linear(x.transpose(0, 1).contiguous(), *cell.input_weights)
        if mask is not None and not (mask.is_cpu and bool(mask.all())):
            masks = mask.T.unsqueeze(-1).unbind(0)
        inputs = [s, gates, self.damping, self.xi, self.friction, *cell_weights, *self.equation.network.weights]
        for i, z in enumerate(inputs):
            if z is not None and z.is_leaf:
                inputs[i] = z.view_as(z)  # a saved leaf would change if the user replaced its p.data
        run = Run(self, cell, gaps, masks, self.settings.gradient == "direct" and torch.is_grad_enabled())
        for gap in gaps:
            if gap >= 0:
                self.nfe[gap].keeps_graph = run.saves_residuals
        before, after = _FusedGaps.apply(run, *inputs)
        after = before if after is None else after
        if not self.is_adaptive and not bool(torch.isfinite(after.detach()).all()):
            raise FallbackError
        return before.transpose(0, 1).contiguous(), after.transpose(0, 1).contiguous()

    # Forward pass

    def solve(self, gap: int, s: Tensor, p: Parameters, known: Sequence[FusedStep], save: bool) -> tuple[Tensor, Gap]:
        """Solve the ODE over a gap from the state s; return the state at the end of the gap, and the gap's record.

        If ``known`` is not empty, its steps are repeated. Otherwise the steps are fixed or adaptive. ``save`` is
        whether the record holds the residuals for the VJP.
        """
        if self.is_zero[gap]:
            return s, Gap()
        start, y, counter = None, s, self.counters[gap]
        if self.method.is_fsal:
            start = self.equation(s[:, : self.row], p)
            y = torch.cat((s, start.value), 1)
        steps: list[FusedStep] = []
        if self.is_adaptive and not known:
            y, attempts = self.adaptive(gap, y, p, steps)
        else:
            for step in known or self.fixed_steps[gap]:
                after, _, step = self.attempt(step, self.coefficients(step, p), y, p)
                y = step.end(y, after)
                steps.append(step)
            attempts = len(steps)
        counter.add("evaluation", self.method.is_fsal + attempts * self.evaluations)
        if not known:
            counter.add("accepted", len(steps))
            counter.add("rejected", attempts - len(steps))
        return y[:, : self.size], Gap(start, steps) if save else Gap(None, [FusedStep(*step[:4]) for step in steps])

    def adaptive(self, gap: int, y: Tensor, p: Parameters, steps: list[FusedStep]) -> tuple[Tensor, int]:
        """Solve the ODE over a gap with adaptive steps, starting from the method's state y.

        Append the accepted steps to ``steps``. Return the state at the end of the gap, and the number of accepted and
        rejected steps. The step sizes are those that
        :class:`hbnode.solve.adaptive.AdaptiveSteps` chooses for a field that does not depend on time. ``fuse`` ensures
        that the field does not.
        """
        length, most, common = self.lengths[gap], self.settings.max_steps, not self.settings.per_sample
        parts = y.chunk(self.method.rows + 1, 1)
        h, f = rms(parts[0]), rms(parts[-1])
        if not math.isfinite(self.number):
            raise NonFiniteError(
                f"the damping of the field must be finite, got {self.number}. Fix: a smaller learning rate",
                t=float(self.times[0, gap]), step_size=math.nan, nfe=0,
            )  # fmt: skip
        if not np.isfinite(h + f).all():
            raise FallbackError
        if common:
            h, f = common_norm(h, length), common_norm(f, length)
        size = first_size(h, f, self.settings.rtol, self.settings.atol, self.method.rows, self.q)
        size, longest = np.minimum(size, self.longest), np.full_like(h, self.longest)
        if common:
            size, longest = common_fraction(size, length), common_fraction(longest, length)
        controller, clip = PIController(self.q, longest), Clip(length)
        c = controller.start(np, size, h < 0, 0 * h)
        for attempt in range(1, most + 1):
            then, c = controller.plan(np, clip, c)
            taken, moves = c.taken, c.taken > 0
            if attempt == 1 and (c.left == 1.0).all():
                step = FusedStep(length, gap)
            elif moves.sum() > SUBSET_FRACTION * len(moves):
                step = FusedStep(taken)
            else:
                step = FusedStep(taken[moves], samples=torch.from_numpy(np.flatnonzero(moves)))
            after, error, step = self.attempt(step, self.coefficients(step, p), y, p)
            ratio = self.ratio(step.y, after, error)
            if step.samples is not None:
                own, ratio = ratio, 0.0 * h
                ratio[moves] = own
            if common:
                ratio = common_norm(ratio, length)
            accepted = ratio <= 1.0  # False if not finite
            if accepted.all() and step.table_row is not None:
                steps.append(step)
                return after, attempt
            if not accepted.all():
                mask = torch.from_numpy(accepted).unsqueeze(1)
                step = step._replace(accepted=mask if step.samples is None else mask[step.samples])
            if (accepted & moves).any():
                y = step.end(y, after)
                steps.append(step)
            _, c = controller.judge(np, c, then, ratio)
            if (c.now == length).all():
                return y, attempt
            is_stuck = ~accepted & ((c.size < self.shortest) | (c.failures >= NON_FINITE_ATTEMPTS))
            if is_stuck.any() or (attempt % FIRST_LOOK == 0 and ((length - c.now) / c.size).max() > TOO_MANY * most):
                break
        raise FallbackError

    def ratio(self, y: Tensor, after: Tensor, error: Any) -> np.ndarray:
        """Return the error norm of a step for each sample, as a NumPy array.

        The norm is the root mean square of error / tolerance over the features. The tolerances are computed from y and
        ``after``, the states before and after the step.
        """
        scale = torch.maximum(y[:, : self.size].abs(), after[:, : self.size].abs())
        scale = scale.mul_(self.settings.rtol).add_(self.settings.atol).view(len(y), -1, self.row)
        return rms(torch.div(error.transpose(0, 1), scale, out=scale))

    def attempt(self, step: FusedStep, c: Tensor, y: Tensor, p: Parameters) -> tuple[Tensor, Tensor | None, FusedStep]:
        """Attempt a step from the state y with the method's coefficients c.

        Return the state after the step, the error estimate, and the step with the residuals for its VJP.

        An explicit method computes rows = C [h, m, F, F(row 1), F(row 2), ...] with the matrix C of coefficients. The
        first rows are the arguments of F in the stages; the last of these is the new h. They are followed by the new m
        and the error estimates. A splitting method updates h (a drift), and then alternates between m (a kick) and h.
        """
        n, count, stages = self.method.rows, self.evaluations, []
        y = y if step.samples is None else y[step.samples]
        if not self.method.is_fsal:
            h, m = y.chunk(2, 1)
            drifts, decays, weights = c[: count + 1], c[count + 1 : 2 * count + 1], c[2 * count + 1 :]
            h = torch.addcmul(h, drifts[0], self.velocity(m))
            for drift, decay, weight in zip(drifts[1:], decays, weights, strict=True):
                stages.append(self.equation(h, p))
                m = torch.addcmul(decay * m, weight, stages[-1].value)
                h = torch.addcmul(h, drift, self.velocity(m))
            return torch.cat((h, m), 1), None, FusedStep(*step[:4], y, c, stages)
        columns = c.unbind(1)
        addcmul: Any = torch.addcmul if torch.is_grad_enabled() else Tensor.addcmul_
        first, *others = y.chunk(n + 1, 1)
        rows = columns[0] * first
        for column, value in zip(columns[1:], others, strict=False):
            rows = addcmul(rows, column, value)
        for i, column in enumerate(columns[n + 1 :]):
            stages.append(self.equation(rows[i], p))
            rows = addcmul(rows, column, stages[i].value)
        after = torch.cat((*rows[count - 1 : count - 1 + n].unbind(0), stages[-1].value), 1)
        return after, rows[count - 1 + n :], FusedStep(*step[:4], y, c, stages)

    def velocity(self, m: Tensor) -> Tensor:
        return torch.tanh(m) if self.equation.is_bounded else m

    def coefficients(self, step: FusedStep, p: Parameters) -> Tensor:
        """Return the method's coefficients for the step sizes ``step.sizes``, one size per sample.

        They are differentiable in γ if gradients are enabled. Otherwise, if the sizes are in the table of step sizes,
        the coefficients of many rows of the table are computed together and stored for the next steps.
        """
        if torch.is_grad_enabled():  # differentiable with respect to γ
            packed = self.method.packed(torch, p.damping.cpu(), torch.from_numpy(step.sizes), error=self.is_adaptive)
            return self.matrix(packed).to(p.s)
        sizes, index, lanes = step.sizes, step.table_row, self.sizes.shape[1]
        if index is not None:
            together = max(1, SIZES_AT_ONCE // lanes)
            group, index = divmod(index, together)
            if self.group[0] == group:
                return self.group[1][index]
            sizes = self.sizes[group * together : (group + 1) * together].ravel()
        if len(sizes) > NUMPY_SIZES:
            packed = self.method.packed(torch, self.gamma, torch.from_numpy(sizes), error=self.is_adaptive)
        else:
            packed = torch.from_numpy(self.method.packed(np, np.array(self.number), sizes, error=self.is_adaptive))
        c = self.matrix(packed.to(p.s))
        if index is None:
            return c
        self.group = group, c.split(lanes, -2)
        return self.group[1][index]

    def matrix(self, packed: Tensor) -> Tensor:
        """Arrange the k coefficients for N step sizes, given as ``packed`` (k, N), in the shape that a step uses.

        For an explicit method the result is the matrix C of :meth:`attempt`, (rows, columns, N, 1). For a splitting
        method it is (k, N, 1): first the drift lengths, then the momentum decays, then the weights of the force.
        """
        if not isinstance(self.method, Explicit):
            return packed.unsqueeze(-1)
        rows, columns, indices = self.method.layout[self.is_adaptive]
        c = packed.new_zeros(rows * columns, packed.shape[1])
        return c.index_copy(0, indices.to(c.device), packed).view(rows, columns, -1, 1)

    # Backward pass

    def vjp(self, gap: Gap, g: Tensor, p: Parameters, sums: GradAccumulator) -> Tensor:
        """Compute the VJP of a gap: from the gradient g of the state at its end, return the gradient at its start.

        The gradients of the parameters are added to ``sums``.
        """
        for step in reversed(gap.steps):
            g = self.step_vjp(step, g, p, sums)
        if gap.start is None:
            return g
        g, at_f = g[:, : self.size], self.equation.vjp(gap.start, g[:, self.size :], p, sums)
        g[:, : self.row].add_(at_f)  # in place: the VJP of the first step allocated g
        return g

    def step_vjp(self, step: FusedStep, g: Tensor, p: Parameters, sums: GradAccumulator) -> Tensor:
        """Compute the VJP of a step: from the gradient g of the method's state after it, return the gradient before it.

        The gradients of the parameters are added to ``sums``. For an FSAL method, g may lack the columns of F.
        """
        vjp = self.explicit_vjp if self.method.is_fsal else self.splitting_vjp
        if step.samples is None and step.accepted is None:
            return vjp(step, g, p, sums)
        if g.shape[1] == self.size:
            g = pad(g, (0, self.row))
        own = g if step.samples is None else g[step.samples]
        if step.accepted is None:
            own = vjp(step, own, p, sums)
        else:  # samples that rejected the step kept their state
            own = torch.where(step.accepted, 0.0, own) + vjp(step, torch.where(step.accepted, own, 0.0), p, sums)
        return own if step.samples is None else g.index_copy(0, step.samples, own)

    def explicit_vjp(self, step: FusedStep, g: Tensor, p: Parameters, sums: GradAccumulator) -> Tensor:
        """Compute :meth:`step_vjp` for an explicit method, which computes rows = C columns as in :meth:`attempt`.

        Go from the last row to the first. The gradient of a row contributes to the gradients of all columns. The
        gradient of the column F(row i) contributes, by the VJP of F, to the gradient of row i.
        """
        n, count, by_row, at_rows = self.method.rows, self.evaluations, step.c.unbind(0), []
        parts: Sequence[Any] = g.chunk(g.shape[1] // self.row, 1)
        at_x, at_f = parts[0], parts[n] if len(parts) > n else None
        at_columns: Any = None
        if n == 2:
            at_rows.append(parts[1])
            at_columns = by_row[count] * parts[1]
        for i in reversed(range(count)):
            at_value = total(at_f, None if at_columns is None else at_columns[n + 1 + i])
            if at_value is not None:
                at_x = total(at_x, self.equation.vjp(step.stages[i], at_value, p, sums))
            at_columns = by_row[i] * at_x if at_columns is None else at_columns.addcmul_(by_row[i], at_x)
            at_rows.append(at_x)
            at_x, at_f = None, None
        if n == 2 and p.damping.requires_grad:
            _, values, _ = zip(*step.stages, strict=True)
            sums.steps.append((step.sizes, at_rows[::-1], [*step.y.chunk(n + 1, 1), *values]))
        return torch.cat(at_columns[: n + 1].unbind(0), 1)

    def splitting_vjp(self, step: FusedStep, g: Tensor, p: Parameters, sums: GradAccumulator) -> Tensor:
        k, c, at_kicks, momenta = self.evaluations, step.c, [], [step.y[:, self.row :]]
        forces = [stage.value for stage in step.stages]
        drifts, decays, weights = c[: k + 1], c[k + 1 : 2 * k + 1], c[2 * k + 1 :]
        for decay, weight, force in zip(decays, weights, forces, strict=True):
            momenta.append(torch.addcmul(decay * momenta[-1], weight, force))
        at_h, at_m = g.chunk(2, 1)
        for i in reversed(range(k)):
            at_m = torch.addcmul(at_m, drifts[i + 1], self.velocity_vjp(at_h, momenta[i + 1]))
            at_kicks.append(at_m)
            at_h = at_h + self.equation.vjp(step.stages[i], weights[i] * at_m, p, sums)
            at_m = decays[i] * at_m
        if p.damping.requires_grad:
            sums.steps.append((step.sizes, at_kicks[::-1], [*momenta[:k], *forces]))
        return torch.cat((at_h, torch.addcmul(at_m, drifts[0], self.velocity_vjp(at_h, momenta[0]))), 1)

    def velocity_vjp(self, at_h: Tensor, m: Tensor) -> Tensor:
        return aten.tanh_backward.default(at_h, torch.tanh(m)) if self.equation.is_bounded else at_h

    def add_damping(self, sums: GradAccumulator) -> None:
        """Add the gradient of γ through the method's coefficients C, computed from the steps collected in ``sums``."""
        sizes, at_rows, columns = zip(*sums.steps, strict=True)
        sums.steps = []
        g = torch.stack(list(map(torch.cat, zip(*at_rows, strict=True))))
        k = torch.stack(list(map(torch.cat, zip(*columns, strict=True))))
        with torch.enable_grad():
            gamma = self.gamma.detach().requires_grad_()
            packed = self.method.packed(torch, gamma, torch.from_numpy(np.concatenate(sizes)), error=False)
            if isinstance(self.method, Explicit):
                products = torch.einsum("rnw,cnw->rcn", g, k).flatten(0, 1)[self.method.layout[False][2].to(g.device)]
            else:  # momentum decays and force weights
                packed, products = packed[len(g) + 1 :], (g.repeat(2, 1, 1) * k).sum(-1)
            (found,) = torch.autograd.grad(packed, gamma, products.to(packed))
        sums.add("damping", found.to(g.device))


def rms(x: Tensor) -> np.ndarray:
    """Return the root mean square of the elements of each sample of x (batch, ...), as a NumPy array (batch,)."""
    x = x.flatten(1)
    return torch.linalg.vector_norm(x, dim=1).double().numpy() / math.sqrt(x.shape[1])


def total(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


# All gaps as one autograd function


@dataclass
class Run:
    """The forward and the backward pass over a sequence of gaps, with an update by the cell after each gap.

    Attributes:
        fused: solver of the gaps.
        cell: cell that updates the states; None for no updates.
        gaps: indices of the gaps; the first is -1 if no gap precedes the first sample.
        masks: which samples update the state, a tensor (batch, 1) for each time step; None if all do.
        saves_residuals: whether the forward pass saves all residuals; otherwise the backward pass recomputes them.
        records: for each time step, the record of the gap before it and the cell's residuals; freed after backward.
        segment: number of time steps whose residuals are in memory at once: all T, or about the square root of T.
    """

    fused: FusedODERNN
    cell: FusedCell | None
    gaps: range
    masks: Sequence[Tensor] | None
    saves_residuals: bool
    records: Sequence[tuple[Gap, tuple[Tensor, ...]]] = ()
    segment: int = 1

    @np.errstate(all="ignore")  # steps that are not finite are rejected
    def forward(self, s: Tensor, p: Parameters, samples: range, *, save: bool) -> tuple[Any, ...]:
        """Solve the gaps and apply the cell at the time steps ``samples``, starting from the state s.

        Return three tuples with an entry for each time step: the state before the cell's update, the state after it,
        and the record of the step. If the solve was recorded before, the recorded step sizes are used again. ``save``
        is whether the records hold the residuals for the backward pass.
        """
        found: list[tuple[Any, ...]] = []
        residuals: tuple[Tensor, ...] = ()
        for i in samples:
            gap = self.records[i][0] if self.records else Gap()
            if self.gaps[i] >= 0:
                s, gap = self.fused.solve(self.gaps[i], s, p, gap.steps, save)
            before = s
            if self.cell is not None and p.gates is not None:
                new, residuals = self.cell(p.gates[i], s, p.weights)
                new = s + new if self.fused.residual else new
                s = new if self.masks is None else torch.where(self.masks[i], new, s)
            found.append((before, s, (gap, residuals if save else ())))
        return tuple(zip(*found, strict=True))

    def backward(self, p: Parameters, starts: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Any]:
        """Compute the VJP of :func:`reference`, from the last time step to the first.

        Return a list of the gradients of its inputs. ``starts`` are the states at the starts of all segments but the
        first. ``grads`` are the gradients of its two results; None stands for zeros.
        """
        fused, sums, g, count = self.fused, GradAccumulator(p.weights), torch.zeros_like(p.s), len(self.gaps)
        at_gates = None if p.gates is None else torch.empty_like(p.gates)
        segments = list(zip(range(0, count, self.segment), (p.s, *starts), strict=True))
        for first, start in reversed(segments):
            samples = range(first, min(first + self.segment, count))
            records = self.records if self.saves_residuals else self.forward(start, p, samples, save=True)[2]
            for i, (gap, residuals) in zip(reversed(samples), reversed(records), strict=True):
                if self.cell is not None and at_gates is not None:
                    g = g if grads[1] is None else g + grads[1][i]
                    updated = g if self.masks is None else torch.where(self.masks[i], g, 0.0)
                    back = self.cell.vjp(updated, residuals, p.weights, sums, at_gates[i])
                    if fused.residual:
                        back = back + g
                    elif self.masks is not None:
                        back = back + torch.where(self.masks[i], 0.0, g)
                    g = back
                g = fused.vjp(gap, g if grads[0] is None else g + grads[0][i], p, sums)
                if len(sums.steps) * len(g) >= SIZES_AT_ONCE:
                    fused.add_damping(sums)
        if sums.steps:
            fused.add_damping(sums)
        for layer in list(sums.uses):
            sums.sum_uses(layer)
        return [g, at_gates, *map(sums.found.get, ("damping", "xi", "friction", *range(len(p.weights))))]


def reference(run: Run, *inputs: Any) -> tuple[Tensor, Tensor | None]:
    """Repeat the recorded steps with autograd; return the states before and after each update, (T, batch, S) each.

    The second result is None without a cell.
    """
    p = Parameters._make((*inputs[:5], inputs[5:]))
    before, after, _ = run.forward(p.s, p, range(len(run.gaps)), save=False)
    return torch.stack(before), None if run.cell is None else torch.stack(after)


class _FusedGaps(torch.autograd.Function):
    """An autograd function that computes the same as :func:`reference`, with its own VJP.

    The state at the start of each segment is saved for backward. :func:`hbnode._torch.fast_form` is not used, because
    it would add three Python frames to each call.
    """

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        p, count = Parameters._make((*inputs[:5], inputs[5:])), len(run.gaps)
        run.saves_residuals = run.saves_residuals and any(ctx.needs_input_grad)
        run.segment = count if run.saves_residuals else math.isqrt(max(count - 1, 0)) + 1
        before, after, run.records = run.forward(p.s, p, range(count), save=run.saves_residuals)
        ctx.set_materialize_grads(False)
        ctx.run, ctx.count = run, len(inputs)
        ctx.save_for_backward(*inputs, *after[run.segment - 1 : -1 : run.segment])
        return torch.stack(before), None if run.cell is None else torch.stack(after)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved, run = ctx.saved_tensors, ctx.run
        inputs, starts = saved[: ctx.count], saved[ctx.count :]
        with _torch.no_autocast(inputs[0]):  # the forward pass also ran without autocast
            if torch.is_grad_enabled() or _torch.is_batched(grads[0] if grads[1] is None else grads[1]):
                return None, *_torch.reference_vjp(reference, run, inputs, grads, ctx.needs_input_grad[1:])
            found = run.backward(Parameters._make((*inputs[:5], inputs[5:])), starts, grads)
        if not _torch.keeps_graph():  # also False in old versions of torch, where a second backward pass recomputes
            run.records, run.saves_residuals = (), False
        return None, *found


def fuse(layer: Any, s: Tensor, times: Tensor, solver: Solver) -> FusedODERNN | None:
    """Return the fused implementation of a layer, or None if the reference must be used.

    The reference is :class:`hbnode.nn.ode_rnn.IntervalSolver`. It is needed for unknown networks, for torchdiffeq's
    methods, for methods with options, and if :func:`must_record` is True.
    """
    settings, field, kind = solver.settings, layer.field, type(layer.field)
    if kind not in FIELDS or not is_unmodified(field) or field.time_dependent or must_record(s, times):
        return None
    name = resolve(settings, field).method
    damping, layers = field.damping if kind in (HBNODE, GHBNODE) else 0.0, known_layers(field.func)
    if layers is None or (isinstance(damping, Tensor) and damping.dim() > 0):
        return None
    network, cell = Network(layers), layer.cell
    if network.sizes != (layer.hidden_size * (1 + (kind is SONODE)), layer.hidden_size):
        return None
    weights = [weight for weight in (*network.weights, *cell.parameters()) if weight is not None]
    if any(weight.dtype != s.dtype or weight.device != s.device for weight in weights):
        return None
    if not has_fused_steps(name, field, s, times, solver):
        return None
    is_pair = METHODS[name].rows == 1 and kind in (SONODE, HBNODE, GHBNODE)
    equation = Equation(network, is_pair, takes_both=kind is SONODE, is_bounded=kind is GHBNODE)
    return FusedODERNN(layer, equation, fused_cell(cell), name, damping, s, times, solver)


def must_record(s: Tensor, times: Tensor) -> bool:
    """Return whether a solve must call torch's operations one by one, so that it cannot be fused.

    This holds while torch.compile, torch.export or torch.jit.trace records the program, under transforms of torch.func,
    autocast and global module hooks, inside ``record_steps``, and if gradients with respect to the times are needed.
    """
    if _torch.needs_reference() or open_records or _torch.has_global_hooks():
        return True
    return torch.is_autocast_enabled(s.device.type) or (times.requires_grad and torch.is_grad_enabled())


def has_fused_steps(name: str, field: Any, s: Tensor, times: Tensor, solver: Solver) -> bool:
    """Return whether this module implements the steps of the method ``name`` for this field and these settings."""
    settings, method, kind = solver.settings, METHODS.get(name), type(field)
    if s.dtype not in (torch.float32, torch.float64) or getattr(field, "activation", torch.tanh) is not torch.tanh:
        return False
    if not isinstance(method, (Explicit, Splitting)) or settings.options:
        return False
    if settings.gradient not in ("direct", "checkpoint") or (settings.compile and not s.is_cpu):
        return False
    if method.rows == 2 and kind is not HBNODE and not (kind is GHBNODE and isinstance(method, Splitting)):
        return False
    if settings.steps is None:  # step sizes are chosen on the CPU, with a tolerance that the dtype can represent
        return s.is_cpu and settings.rtol >= torch.finfo(s.dtype).eps
    if solver.step_size is None:
        return True
    return bool((steps_needed(times.to("cpu", torch.float64), solver.step_size) <= settings.max_steps).all())


def fused_cell(cell: Any) -> FusedCell | None:
    """Return a :class:`FusedCell` with the weights of a torch.nn.GRUCell or tanh RNNCell; None for any other cell."""
    if not isinstance(cell, nn.RNNCellBase) or getattr(cell, "nonlinearity", "tanh") != "tanh":
        return None
    if not is_unmodified(cell):
        return None
    input_weights, hidden_weights = (cell.weight_ih, cell.bias_ih), (cell.weight_hh, cell.bias_hh)
    return FusedCell(input_weights, hidden_weights, isinstance(cell, nn.GRUCell))
