"""An ODE-RNN as one function with its own VJP: ``python -m benchmarks.irregular``, rows "hbnode", 2.7 × the plain form.

It is for fields around a network of known layers, and for torch.nn's cells; the plain form is that of
:class:`hbnode.nn.ode_rnn.layer.ODERNNLayer`. What is faster: no graph is recorded; the gradient of a weight is one
product for many uses of it; the coefficients of many steps are made at once; and a gap that is one step for all
samples, as most are, needs none of the controller's arithmetic.

It has a loop of its own, which takes the steps of :mod:`hbnode.solve` and no others. By the common one, which knows
outputs, jumps and fields that depend on time, a training step took 1.3 times as long where gaps are long or the weights
are large, and 2.7 times with a common step, where no gap was solved without a graph.
"""

from __future__ import annotations

import itertools
import math
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
from hbnode.nn.ode_rnn.gaps import Gaps, Solver, steps_needed
from hbnode.solve.control import (
    FIRST_LOOK,
    LONGEST_DECAY,
    NON_FINITE_ATTEMPTS,
    TOO_MANY,
    Array,
    PIController,
    first_size,
)
from hbnode.solve.methods import METHODS, NYSTROM, SECOND_ORDER, Explicit, Method, Splitting

Weights = Sequence[Any]  # weight and bias of each linear layer: the cell's, which sees the state, and those of f

MANY = 1024  # rows of a batch, of so many or more uses a gradient is summed in one product
TOGETHER = 4096  # sizes of steps whose coefficients, or their gradients, are made at once
FEW_SIZES = 256  # for which NumPy is faster than torch
FEW = 0.75  # of the samples still on their way, from which the others are left out
aten = torch.ops.aten


class UnsolvedError(Exception):
    """A gap that the plain form should look at: it is not finite, or takes very many steps."""


# What is known

ACTIVATIONS: dict[type, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.Tanh: (torch.tanh, aten.tanh_backward.default),  # the VJPs are given the output
    nn.Sigmoid: (torch.sigmoid, aten.sigmoid_backward.default),
    nn.ReLU: (torch.relu, lambda g, y: aten.threshold_backward.default(g, y, 0)),
    nn.ELU: (nn.functional.elu, lambda g, y: aten.elu_backward.default(g, 1.0, 1.0, 1.0, True, y)),
}
FIELDS = NODE, ANODE, SONODE, HBNODE, GHBNODE
_KNOWN: tuple[Any, ...] = (*ACTIVATIONS, *FIELDS, nn.Linear, nn.Sequential, MLP, nn.GRUCell, nn.RNNCell)
_FORWARD = {kind: kind.forward for kind in _KNOWN}
_CALLS = {"forward", "evaluate", "force", "friction"}


def is_stock(module: Any) -> bool:
    """Whether a call of a module does what its class, which is known, says, and nothing else."""
    kind: Any = type(module)
    if kind not in _FORWARD or kind.forward is not _FORWARD[kind] or module._compiled_call_impl is not None:
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return _CALLS.isdisjoint(vars(module))


def layers_of(net: Any) -> list[nn.Module] | None:
    """The layers of a network, those of networks inside in their places; None if one is not known."""
    if not is_stock(net) or (isinstance(net, MLP) and net.time_dependent):
        return None
    if isinstance(net, MLP):
        return layers_of(net.layers)
    if not isinstance(net, nn.Sequential):
        is_known = type(net) in ACTIVATIONS or isinstance(net, nn.Linear)
        return [net] if is_known and getattr(net, "alpha", 1.0) == 1.0 else None  # that of ELU
    layers: list[nn.Module] = []
    for child in net:
        found = layers_of(child)
        if found is None:
            return None
        layers += found
    return layers


# The network, the equation and the cell, with their VJPs


class Parameters(NamedTuple):
    """What a run depends on.

    Attributes:
        s: the state at its beginning, (batch, S): h, or h and m side by side.
        gates: what the inputs give to the cell, (T, batch, gates); None without a cell.
        damping: γ of the method, in float64.
        xi: ξ of the equation; None if it has none.
        friction: γ of the equation; None if it has none.
        weights: of the linear layers, those of the cell None without one.
    """

    s: Tensor
    gates: Tensor | None
    damping: Tensor
    xi: Tensor | None
    friction: Tensor | None
    weights: Weights

    @staticmethod
    def from_inputs(inputs: Sequence[Any]) -> Parameters:
        """Those of the inputs of a function, the weights last."""
        s, gates, damping, xi, friction, *weights = inputs
        return Parameters(s, gates, damping, xi, friction, weights)


class Gradients:
    """What a backward pass adds up: the gradients of weights, of ξ and γ in the equation, of γ in the method.

    Autograd sums the gradient of a weight at every use. Here the inputs of a layer and the gradients at its outputs are
    kept, and the weight's gradient is one product for many uses.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.found: dict[Any, Tensor] = {}  # of numbers by name, of weights by their index
        self.uses: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.steps: list[tuple[Array, Sequence[Tensor], Sequence[Tensor]]] = []

    def add(self, key: str | int, gradient: Tensor) -> None:
        """Add to the gradient of a number or a weight."""
        self.found[key] = self.found[key].add_(gradient) if key in self.found else gradient

    def add_use(self, layer: int, x: Tensor, gradient: Tensor) -> None:
        """A use of a linear layer: its input and the gradient at its output."""
        uses = self.uses[layer]
        uses.append((x, gradient))
        if len(uses) * len(x) >= MANY:
            self.settle(layer)

    def settle(self, layer: int) -> None:
        """Add up the gradient of a layer."""
        inputs, gradients = zip(*self.uses.pop(layer), strict=True)
        g = torch.cat(gradients)
        self.add(2 * layer, g.T @ torch.cat(inputs))
        if self.weights[2 * layer + 1] is not None:
            self.add(2 * layer + 1, g.sum(0))

    def subtract(self, name: str, number: Tensor, gradient: Tensor, factor: Tensor) -> None:
        """Where the product of a number and a factor is subtracted: add what that gives to the number's gradient."""
        if number.requires_grad:
            self.add(name, -(gradient * factor).sum())


class Network:
    """Linear layers with activations between them; the first is number 1 of those with weights, after the cell's."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.linear: list[nn.Linear] = []
        self.weights: list[Tensor | None] = []
        self.activations: list[Any] = []  # None for a linear layer
        for layer in layers:
            self.activations.append(ACTIVATIONS.get(type(layer)))
            if isinstance(layer, nn.Linear):
                self.linear.append(layer)
                self.weights += layer.weight, layer.bias

    def __call__(self, x: Tensor, weights: Weights, residuals: list[Tensor]) -> Tensor:
        """The output for (batch, n). Inputs of linear layers and outputs of activations are residuals."""
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

    def vjp(self, gradient: Tensor, weights: Weights, residuals: list[Tensor], sums: Gradients) -> Tensor:
        """The gradient at the input from that at the output."""
        layer = len(self.linear)
        for activation, value in zip(reversed(self.activations), reversed(residuals), strict=True):
            if activation is None:
                sums.add_use(layer, value, gradient)
                gradient = gradient @ weights[2 * layer]
                layer -= 1
            else:
                gradient = activation[1](gradient, value)
        return gradient


class Evaluation(NamedTuple):
    """The equation at x, with the residuals of its network."""

    x: Tensor
    value: Tensor
    residuals: list[Tensor]


@dataclass
class Equation:
    r"""What the stages of a step evaluate: the force F(h) = f(h) - ξh of a method for h and m, or the derivative of s.

    That of s = [h, m] is [m, F(h) - γm], or [tanh m, F(h) - γm], or for s = [h, v] it is [v, f(h, v)].
    """

    network: Network
    is_pair: bool  # whether x is [h, m]
    sees_both: bool
    is_bounded: bool

    def __call__(self, x: Tensor, p: Parameters) -> Evaluation:
        """The value at x, of the shape of x."""
        residuals: list[Tensor] = []
        h, m = x.chunk(2, 1) if self.is_pair else (x, x)
        value = self.network(x if self.sees_both else h, p.weights, residuals)
        if p.xi is not None:
            value = value - p.xi * h
        if self.is_pair:
            value = value if p.friction is None else value - p.friction * m
            value = torch.cat((torch.tanh(m) if self.is_bounded else m, value), 1)
        return Evaluation(x, value, residuals)

    def vjp(self, made: Evaluation, gradient: Tensor, p: Parameters, sums: Gradients) -> Tensor:
        """The gradient at x from the one at the value."""
        h, m = made.x.chunk(2, 1) if self.is_pair else (made.x, made.x)
        by_m, g = gradient.chunk(2, 1) if self.is_pair else (gradient, gradient)
        back = self.network.vjp(g, p.weights, made.residuals, sums)
        if p.xi is not None:
            sums.subtract("xi", p.xi, g, h)
            back = back - p.xi * g
        if not self.is_pair:
            return back
        if self.is_bounded:
            by_m = aten.tanh_backward.default(by_m, made.value[:, : by_m.shape[1]])
        if p.friction is not None:
            sums.subtract("friction", p.friction, g, m)
            by_m = by_m - p.friction * g
        if self.sees_both:
            back[:, by_m.shape[1] :] += by_m
            return back
        return torch.cat((back, by_m), 1)


@dataclass
class Cell:
    """torch.nn.GRUCell or a tanh RNNCell; the *gates* are what its input gives, for all samples at once."""

    module: Any
    is_gru: bool

    def __call__(self, gates: Tensor, s: Tensor, weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The new state, and the residuals."""
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
        self, gradient: Tensor, residuals: tuple[Tensor, ...], weights: Weights, sums: Gradients, of_gates: Tensor
    ) -> Tensor:
        """The gradient at s; that at the gates is written into ``of_gates``."""
        weight = weights[0]
        if not self.is_gru:
            s, new = residuals
            of_own = of_gates.copy_(aten.tanh_backward.default(gradient, new))
            sums.add_use(0, s, of_own)
            return of_own @ weight
        s, rz, own, new = residuals
        r, z = rz.chunk(2, 1)
        of_s = gradient * z
        of_new = aten.tanh_backward.default(gradient - of_s, new)
        of_rz = aten.sigmoid_backward.default(torch.cat((of_new * own, gradient * (s - new)), 1), rz)
        torch.cat((of_rz, of_new), 1, out=of_gates)
        of_own = torch.cat((of_rz, of_new * r), 1)
        sums.add_use(0, s, of_own)
        return of_s.addmm_(of_own, weight)


# Steps and gaps


def coefficient_matrix(method: Method, packed: Tensor, *, error: bool) -> Tensor:
    """What a step is made with, of packed coefficients (k, N): C by its rows, (rows, columns, N, 1).

    Of a splitting method these are the lengths of its drifts, decays and weights, (k, N, 1).
    """
    packed = packed.unsqueeze(-1)
    if not isinstance(method, Explicit):
        return packed
    n, stages = method.rows, len(method.nodes)
    rows, columns = stages + n - 1 + n * error, n + 1 + stages
    c = packed.new_zeros(rows * columns, *packed.shape[1:])
    return c.index_copy(0, method.places(error).to(c.device), packed).view(rows, columns, *packed.shape[1:])


class Step(NamedTuple):
    """A step, and what its VJP needs.

    Attributes:
        sizes: of each sample's step, (samples,).
        place: which of the known steps it is, if it is one.
        samples: which take it, all others have arrived; None for all.
        accepted: which of them moved, (samples, 1); None for all.
        y: the state of the method before it, (samples, width).
        c: its coefficients.
        stages: its evaluations.
    """

    sizes: Array
    place: int | None = None
    samples: Tensor | None = None
    accepted: Tensor | None = None
    y: Any = None
    c: Any = None
    stages: Sequence[Evaluation] = ()

    @property
    def bare(self) -> Step:
        """Without what its VJP needs."""
        return Step(*self[:4])

    def moved(self, y: Tensor, after: Tensor) -> Tensor:
        """The state of all samples, given that of those that took it."""
        if self.accepted is not None:
            after = torch.where(self.accepted, after, self.y)
        return after if self.samples is None else y.index_copy(0, self.samples, after)


class Gap(NamedTuple):
    """How a gap was solved: the evaluation at its start, if it is carried, and the steps that were accepted."""

    start: Evaluation | None
    steps: Sequence[Step]


class Fused:
    """Solves gaps between times (batch, T), and updates states by samples between them, without a graph.

    The state y of a method is (batch, width): its rows h and m, or s, and the value F that is carried, side by side.

    Attributes:
        cell: what sees the samples; None if it is not known.
        nfe: the evaluations of each gap.
    """

    def __init__(
        self, layer: Any, equation: Equation, cell: Cell | None, name: str, damping: Any, s: Tensor, times: Tensor,
        solver: Solver,
    ) -> None:  # fmt: skip
        self.layer, self.equation, self.cell, self.solver = layer, equation, cell, solver
        self.settings, self.method, self.times = solver.settings, METHODS[name], times
        self.q, self.by_error = self.method.error_order or 0, self.settings.steps is None
        self.evaluations, self.size, self.row = len(self.method.nodes), s.shape[1], s.shape[1] // self.method.rows
        t = times.detach().to("cpu", torch.float64).numpy()
        self.lengths: Array = np.ascontiguousarray(np.diff(t).T)
        self.rests = (self.lengths == 0).all(1)
        self.nfe = list(map(NFE, [0] * len(self.lengths)))
        self.sizes, self.grid = (self.lengths, []) if self.by_error else self.make_grid()
        self.damping = torch.as_tensor(damping if name in SECOND_ORDER else 0.0, dtype=torch.float64, device=s.device)
        self.friction = torch.as_tensor(damping, dtype=s.dtype) if equation.is_pair and not equation.sees_both else None
        self.xi = torch.as_tensor(layer.field.xi, dtype=s.dtype) if equation.is_bounded else None
        self.gamma = self.damping.detach().cpu()
        self.number = float(self.gamma)
        self.longest = LONGEST_DECAY / abs(self.number) if name in NYSTROM and self.number else math.inf
        self.shortest = 4 * np.finfo(float).eps * abs(t).max(initial=0.0)
        self.group: tuple[int, Sequence[Tensor]] = (-1, ())  # coefficients of known steps

    def make_grid(self) -> tuple[Array, list[list[Step]]]:
        """The sizes of equal steps, and the steps of each gap."""
        count = np.full(self.lengths.shape, self.settings.steps)
        if self.solver.step_size is not None:
            count = steps_needed(self.times.detach().cpu().double(), self.solver.step_size).T.numpy().astype(int)
        most = count.max(1).tolist() if count.size else [1] * len(count)
        sizes = [self.lengths[:0]]
        for length, n, k in zip(self.lengths, count, most, strict=True):
            sizes.append(np.where(np.arange(k)[:, None] < n, length / n, 0.0))
        table = np.concatenate(sizes)
        steps = map(Step, table, range(len(table)))
        return table, [list(itertools.islice(steps, k)) for k in most]

    def __call__(self, gap: int, s: Tensor) -> Tensor:
        """The state at the end of a gap from that at its beginning."""
        try:
            return self.run(s, range(gap, gap + 1))[0][:, 0]
        except UnsolvedError:
            times = self.times[:, gap : gap + 2]
            return Gaps(self.layer.field, times, self.solver, second_order=self.layer.second_order)(0, s)

    def run(self, s: Tensor, gaps: range, x: Tensor | None = None, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The states at the ends of gaps, and after a sample was seen there, (batch, T, S).

        Arguments:
            s: the state at the beginning.
            gaps: their numbers; -1 where there is none before the first sample.
            x: what the cell is fed, (batch, T, inputs); None without samples.
            seen: which samples it sees, (batch, T); None for all.

        Raises:
            UnsolvedError: if the plain form should solve them.
        """
        _torch.keep_freed_memory(s.device)
        cell, masks, gates, of_cell = None, None, None, (None, None)
        if x is not None and self.cell is not None:
            cell, module = self.cell, self.cell.module
            gates = linear(x.transpose(0, 1).contiguous(), module.weight_ih, module.bias_ih)
            of_cell = module.weight_hh, module.bias_hh
        if seen is not None and not (seen.is_cpu and bool(seen.all())):
            masks = seen.T.unsqueeze(-1).unbind(0)
        inputs = [s, gates, self.damping, self.xi, self.friction, *of_cell, *self.equation.network.weights]
        for i, z in enumerate(inputs):
            if z is not None and z.is_leaf:
                inputs[i] = z.view_as(z)  # a parameter whose p.data is replaced takes its saved self with it
        run = Run(self, cell, gaps, masks, self.settings.gradient == "direct" and torch.is_grad_enabled())
        for gap in gaps:
            if gap >= 0:
                self.nfe[gap].keeps_graph = run.keeps
        before, after = _Function.apply(run, *inputs)
        after = before if after is None else after
        if not self.by_error and not bool(torch.isfinite(after.detach()).all()):
            raise UnsolvedError
        return before.transpose(0, 1).contiguous(), after.transpose(0, 1).contiguous()

    # Forwards

    def solve(self, gap: int, s: Tensor, p: Parameters, known: Sequence[Step], *, keep: bool) -> tuple[Tensor, Gap]:
        """The state at the end of a gap, and how it was reached: by known steps, a grid, or the error."""
        if self.rests[gap]:
            return s, Gap(None, ())
        start, y, tally = None, s, Tally(self.layer.field, self.nfe[gap])
        if self.method.is_fsal:
            start = self.equation(s[:, : self.row], p)
            y = torch.cat((s, start.value), 1)
        steps: list[Step] = []
        if self.by_error and not known:
            y, attempts = self.adaptive(gap, y, p, steps, keep=keep)
        else:
            for step in known or self.grid[gap]:
                c = self.coefficients(step, p)
                after, _, step = (self.explicit if self.method.is_fsal else self.splitting)(step, c, y, p)
                y = step.moved(y, after)
                steps.append(step if keep else step.bare)
            attempts = len(steps)
        tally.add("evaluation", self.method.is_fsal + attempts * self.evaluations)
        if not known:
            tally.add("accepted", len(steps))
            tally.add("rejected", attempts - len(steps))
        return y[:, : self.size], Gap(start if keep else None, steps)

    def adaptive(self, gap: int, y: Tensor, p: Parameters, steps: list[Step], *, keep: bool) -> tuple[Tensor, int]:
        """The state at the end of a gap, and the number of attempts; the accepted ones are added to ``steps``.

        The rules are those of :class:`hbnode.solve.control.AdaptiveSteps` for a field that does not depend on time.
        """
        length, most, per_sample = self.lengths[gap], self.settings.max_steps, self.settings.per_sample
        parts = y.chunk(self.method.rows + 1, 1)
        h, f = rms(parts[0]), rms(parts[-1])
        if not math.isfinite(self.number):
            raise NonFiniteError(
                f"the damping of the field is {self.number}. Fix: look at the gradients of its parameter",
                t=float(self.times[0, gap]), step_size=math.nan, nfe=0,
            )  # fmt: skip
        if not np.isfinite(h + f).all():
            raise UnsolvedError
        if not per_sample:
            h, f = in_common(h, length), in_common(f, length)
        size = first_size(h, f, self.settings.rtol, self.settings.atol, self.method.rows, self.q)
        size = np.minimum(size, self.longest)
        longest: Array | float = self.longest
        if not per_sample:
            size, longest = fraction(size, length), fraction(longest, length)
        now = taken = left = np.zeros_like(h)
        control = None
        for attempt in range(1, most + 1):
            number = np.maximum(np.ceil((length - now) / size - 0.05), 1.0)
            taken = np.where(number == left - 1.0, taken, (length - now) / number)  # equal steps stay as they are
            left, moves = number, taken > 0
            if attempt == 1 and (number == 1.0).all():
                step = Step(length, gap)
            elif moves.sum() > FEW * len(moves):
                step = Step(taken)
            else:
                step = Step(taken[moves], samples=torch.from_numpy(np.flatnonzero(moves)))
            after, error, step = self.explicit(step, self.coefficients(step, p), y, p)
            ratio = self.ratio(step.y, after, error)
            if step.samples is not None:
                own, ratio = ratio, 0.0 * h
                ratio[moves] = own
            if not per_sample:
                ratio = in_common(ratio, length)
            accepted = ratio <= 1.0  # not those that are not finite
            is_whole = accepted.all()
            if is_whole and step.place is not None:
                steps.append(step if keep else step.bare)
                return after, attempt
            if not is_whole:
                mask = torch.from_numpy(accepted).unsqueeze(1)
                step = step._replace(accepted=mask if step.samples is None else mask[step.samples])
            if (accepted & moves).any():
                y = step.moved(y, after)
                steps.append(step if keep else step.bare)
            now = np.where(accepted, np.where(number == 1.0, length, now + taken), now)
            if (now == length).all():
                return y, attempt
            control = control or PIController(self.q, h)
            new = taken * control.factor(ratio, accepted)
            is_cut = accepted & (taken < 0.5 * size)  # by the end, which says little of the steps after it
            new = np.where(is_cut, np.maximum(new, size), new)
            size = np.where(moves, np.minimum(new, longest), size)
            is_stuck = ~accepted & ((size < self.shortest) | (control.failures >= NON_FINITE_ATTEMPTS))
            if is_stuck.any() or (attempt % FIRST_LOOK == 0 and ((length - now) / size).max() > TOO_MANY * most):
                break
        raise UnsolvedError

    def ratio(self, y: Tensor, after: Tensor, error: Tensor) -> Array:
        """Norm of (error / tolerance) of each sample."""
        scale = torch.maximum(y[:, : self.size].abs(), after[:, : self.size].abs())
        scale = scale.mul_(self.settings.rtol).add_(self.settings.atol).view(len(y), -1, self.row)
        return rms(torch.div(error.transpose(0, 1), scale, out=scale))

    def explicit(self, step: Step, c: Tensor, y: Tensor, p: Parameters) -> tuple[Tensor, Tensor, Step]:
        """The state of those that take a step after it, its error, and the step with what its VJP needs.

        Rows = C [h, m, F, F(row 1), F(row 2), ...]: the stages, the last of which is the new h; the new m; the errors.
        """
        n, count, columns = self.method.rows, self.evaluations, c.unbind(1)
        y = y if step.samples is None else y[step.samples]
        push: Any = torch.addcmul if torch.is_grad_enabled() else Tensor.addcmul_
        first, *others = y.chunk(n + 1, 1)
        rows, stages = columns[0] * first, []
        for column, known in zip(columns[1:], others, strict=False):
            rows = push(rows, column, known)
        for i, column in enumerate(columns[n + 1 :]):
            made = self.equation(rows[i], p)
            rows = push(rows, column, made.value)
            stages.append(made)
        after = torch.cat((*rows[count - 1 : count - 1 + n].unbind(0), made.value), 1)
        return after, rows[count - 1 + n :], Step(*step[:4], y, c, stages)

    def splitting(self, step: Step, c: Tensor, y: Tensor, p: Parameters) -> tuple[Tensor, None, Step]:
        """The same of a drift, and kicks each with a drift after it; there is no error."""
        k, (h, m), stages = self.evaluations, y.chunk(2, 1), []
        drifts, decays, weights = c[: k + 1], c[k + 1 : 2 * k + 1], c[2 * k + 1 :]
        h = torch.addcmul(h, drifts[0], self.speed(m))
        for drift, decay, weight in zip(drifts[1:], decays, weights, strict=True):
            made = self.equation(h, p)
            m = torch.addcmul(decay * m, weight, made.value)
            h = torch.addcmul(h, drift, self.speed(m))
            stages.append(made)
        return torch.cat((h, m), 1), None, Step(*step[:4], y, c, stages)

    def speed(self, m: Tensor) -> Tensor:
        """How h drifts."""
        return torch.tanh(m) if self.equation.is_bounded else m

    def coefficients(self, step: Step, p: Parameters) -> Tensor:
        """Those of a step; of known steps they are made for many at once."""
        if torch.is_grad_enabled():  # differentiable in γ
            packed = self.method.packed(torch, p.damping.cpu(), torch.from_numpy(step.sizes), error=self.by_error)
            return coefficient_matrix(self.method, packed, error=self.by_error).to(p.s)
        sizes, place, lanes = step.sizes, step.place, self.sizes.shape[1]
        if place is not None:
            together = max(1, TOGETHER // lanes)
            group, place = divmod(place, together)
            if self.group[0] == group:
                return self.group[1][place]
            sizes = self.sizes[group * together : (group + 1) * together].ravel()
        if len(sizes) > FEW_SIZES:
            packed = self.method.packed(torch, self.gamma, torch.from_numpy(sizes), error=self.by_error)
        else:
            packed = torch.from_numpy(self.method.packed(np, self.number, sizes, error=self.by_error))
        c = coefficient_matrix(self.method, packed.to(p.s), error=self.by_error)
        if place is None:
            return c
        self.group = group, c.split(lanes, -2)
        return self.group[1][place]

    # Backwards

    def vjp(self, gap: Gap, g: Tensor, p: Parameters, sums: Gradients) -> Tensor:
        """The gradient at the beginning of a gap from that at its end."""
        for step in reversed(gap.steps):
            g = self.step_vjp(step, g, p, sums)
        if gap.start is None:
            return g
        g, by_f = g[:, : self.size], self.equation.vjp(gap.start, g[:, self.size :], p, sums)
        g[:, : self.row].add_(by_f)  # in place: the VJP of the first step has made it
        return g

    def step_vjp(self, step: Step, g: Tensor, p: Parameters, sums: Gradients) -> Tensor:
        """The gradient at the state of the method before a step from that after it, which may lack that at F."""
        vjp = self.explicit_vjp if self.method.is_fsal else self.splitting_vjp
        if step.samples is None and step.accepted is None:
            return vjp(step, g, p, sums)
        if g.shape[1] == self.size:
            g = pad(g, (0, self.row))
        own = g if step.samples is None else g[step.samples]
        if step.accepted is None:
            own = vjp(step, own, p, sums)
        else:  # the others stay
            own = torch.where(step.accepted, 0.0, own) + vjp(step, torch.where(step.accepted, own, 0.0), p, sums)
        return own if step.samples is None else g.index_copy(0, step.samples, own)

    def explicit_vjp(self, step: Step, g: Tensor, p: Parameters, sums: Gradients) -> Tensor:
        """From the last row of C to the first: a row's gradient goes to its columns, and a column's to the row."""
        n, count, by_row, of_rows = self.method.rows, self.evaluations, step.c.unbind(0), []
        parts: Sequence[Any] = g.chunk(g.shape[1] // self.row, 1)
        of_x, of_f = parts[0], parts[n] if len(parts) > n else None
        of_columns: Any = None
        if n == 2:
            of_rows.append(parts[1])
            of_columns = by_row[count] * parts[1]
        for i in reversed(range(count)):
            of_value = total(of_f, None if of_columns is None else of_columns[n + 1 + i])
            if of_value is not None:
                of_x = total(of_x, self.equation.vjp(step.stages[i], of_value, p, sums))
            of_columns = by_row[i] * of_x if of_columns is None else of_columns.addcmul_(by_row[i], of_x)
            of_rows.append(of_x)
            of_x, of_f = None, None
        if n == 2 and p.damping.requires_grad:
            _, values, _ = zip(*step.stages, strict=True)
            sums.steps.append((step.sizes, of_rows[::-1], [*step.y.chunk(n + 1, 1), *values]))
        return torch.cat(of_columns[: n + 1].unbind(0), 1)

    def splitting_vjp(self, step: Step, g: Tensor, p: Parameters, sums: Gradients) -> Tensor:
        """From the last drift and kick to the first."""
        k, c, kicked, momenta = self.evaluations, step.c, [], [step.y[:, self.row :]]
        _, forces, _ = zip(*step.stages, strict=True)
        drifts, decays, weights = c[: k + 1], c[k + 1 : 2 * k + 1], c[2 * k + 1 :]
        for decay, weight, force in zip(decays, weights, forces, strict=True):
            momenta.append(torch.addcmul(decay * momenta[-1], weight, force))
        of_h, of_m = g.chunk(2, 1)
        for i in reversed(range(k)):
            of_m = torch.addcmul(of_m, drifts[i + 1], self.speed_vjp(of_h, momenta[i + 1]))
            kicked.append(of_m)
            of_h = of_h + self.equation.vjp(step.stages[i], weights[i] * of_m, p, sums)
            of_m = decays[i] * of_m
        if p.damping.requires_grad:
            sums.steps.append((step.sizes, kicked[::-1], [*momenta[:k], *forces]))
        return torch.cat((of_h, torch.addcmul(of_m, drifts[0], self.speed_vjp(of_h, momenta[0]))), 1)

    def speed_vjp(self, of_h: Tensor, m: Tensor) -> Tensor:
        """The gradient at m of a drift."""
        return aten.tanh_backward.default(of_h, torch.tanh(m)) if self.equation.is_bounded else of_h

    def add_damping(self, sums: Gradients) -> None:
        """Add up the gradient of γ in the method, from those of the rows of its steps and their columns."""
        sizes, of_rows, columns = zip(*sums.steps, strict=True)
        sums.steps = []
        g = torch.stack(list(map(torch.cat, zip(*of_rows, strict=True))))
        k = torch.stack(list(map(torch.cat, zip(*columns, strict=True))))
        with torch.enable_grad():
            gamma = self.gamma.detach().requires_grad_()
            made = self.method.packed(torch, gamma, torch.from_numpy(np.concatenate(sizes)), error=False)
            if isinstance(self.method, Explicit):
                products = torch.einsum("rnw,cnw->rcn", g, k).flatten(0, 1)[self.method.places(False).to(g.device)]
            else:  # decays and weights of the kicks
                made, products = made[len(g) + 1 :], (g.repeat(2, 1, 1) * k).sum(-1)
            (found,) = torch.autograd.grad(made, gamma, products.to(made))
        sums.add("damping", found.to(g.device))


def rms(x: Tensor) -> Array:
    """Root mean square of each sample, on the host."""
    x = x.flatten(1)
    return torch.linalg.vector_norm(x, dim=1).double().numpy() / math.sqrt(x.shape[1])


def in_common(x: Array, length: Array) -> Array:
    """The root mean square over the samples that move, for all."""
    return np.full_like(x, np.sqrt((x[length > 0] ** 2).mean()))


def fraction(size: Array | float, length: Array) -> Array:
    """Sizes that are the same fraction of all lengths, the least one of those that are not 0."""
    moves, size = length > 0, np.broadcast_to(size, length.shape)
    return np.where(moves, length * (size[moves] / length[moves]).min(), size)


def total(a: Any, b: Any) -> Any:
    """The sum of gradients of which one or both may be none."""
    return b if a is None else a if b is None else a + b


# The whole as one function


@dataclass
class Run:
    """Gaps one after the other, and a sample after each if there is a cell.

    Attributes:
        fused: solves them.
        cell: what sees the samples.
        gaps: their numbers; -1 where there is none before the first sample.
        masks: which samples the cell sees, for each a (batch, 1); None for all.
        keeps: whether the backward pass finds all that it needs. Else it takes the steps again, of about the root of T
            gaps at a time.
        found: of each sample the gap before it and the residuals of the cell.
    """

    fused: Fused
    cell: Cell | None
    gaps: range
    masks: Sequence[Tensor] | None
    keeps: bool
    found: Sequence[tuple[Gap, tuple[Tensor, ...]]] = ()

    @np.errstate(all="ignore")  # what is not finite is no accepted step
    def forward(self, s: Tensor, p: Parameters, samples: range, *, keep: bool) -> tuple[Any, ...]:
        """For each sample the state before it, that after, and what was found; by the steps that were found before."""
        made: list[tuple[Any, ...]] = []
        residuals: tuple[Tensor, ...] = ()
        for i in samples:
            gap = self.found[i][0] if self.found else Gap(None, ())
            if self.gaps[i] >= 0:
                s, gap = self.fused.solve(self.gaps[i], s, p, gap.steps, keep=keep)
            before = s
            if self.cell is not None and p.gates is not None:
                new, residuals = self.cell(p.gates[i], s, p.weights)
                new = s + new if self.fused.layer.residual else new
                s = new if self.masks is None else torch.where(self.masks[i], new, s)
            made.append((before, s, (gap, residuals if keep else ())))
        return tuple(zip(*made, strict=True))

    def backward(
        self, p: Parameters, starts: Sequence[Tensor], grads: Sequence[Tensor | None], segment: int
    ) -> list[Any]:
        """The gradients of the inputs, from the last sample to the first."""
        fused, sums, g, count = self.fused, Gradients(p.weights), torch.zeros_like(p.s), len(self.gaps)
        of_gates = None if p.gates is None else torch.empty_like(p.gates)
        for first, start in reversed(list(zip(range(0, count, segment), starts, strict=True))):
            samples = range(first, min(first + segment, count))
            found = self.found if self.keeps else self.forward(start, p, samples, keep=True)[2]
            for i, (gap, residuals) in zip(reversed(samples), reversed(found), strict=True):
                if self.cell is not None and of_gates is not None:
                    g = g if grads[1] is None else g + grads[1][i]
                    seen = g if self.masks is None else torch.where(self.masks[i], g, 0.0)
                    by_cell = self.cell.vjp(seen, residuals, p.weights, sums, of_gates[i])
                    if fused.layer.residual:
                        by_cell = by_cell + g
                    elif self.masks is not None:
                        by_cell = by_cell + torch.where(self.masks[i], 0.0, g)
                    g = by_cell
                g = fused.vjp(gap, g if grads[0] is None else g + grads[0][i], p, sums)
                if len(sums.steps) * len(g) >= TOGETHER:
                    fused.add_damping(sums)
        if sums.steps:
            fused.add_damping(sums)
        for layer in list(sums.uses):
            sums.settle(layer)
        return [g, of_gates, *map(sums.found.get, ("damping", "xi", "friction", *range(len(p.weights))))]

    def reference(
        self, inputs: Sequence[Any], grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients by autograd, from the same steps; they can be differentiated again."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            views: list[Any] = [z if z is None else z.view_as(z) for z in inputs]
            p = Parameters.from_inputs(views)
            before, after, _ = self.forward(p.s, p, range(len(self.gaps)), keep=False)
            made = [(torch.stack(y), dy) for y, dy in zip((before, after), grads, strict=True) if dy is not None]
        leaves = [z for z, is_wanted in zip(views, wanted, strict=True) if is_wanted]
        outputs, gradients = zip(*made, strict=True)
        found = iter(torch.autograd.grad(outputs, leaves, gradients, create_graph=again, allow_unused=True))
        return [next(found) if is_wanted else None for is_wanted in wanted]


class _Function(torch.autograd.Function):
    """The states before and after each sample of a run, (T, batch, S)."""

    @staticmethod
    def forward(ctx: Any, run: Run, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        p, run.keeps = Parameters.from_inputs(inputs), run.keeps and any(ctx.needs_input_grad)
        segment = len(run.gaps) if run.keeps else math.isqrt(max(len(run.gaps) - 1, 0)) + 1
        before, after, run.found = run.forward(p.s, p, range(len(run.gaps)), keep=run.keeps)
        ctx.set_materialize_grads(False)
        ctx.run, ctx.count, ctx.segment = run, len(inputs), segment
        ctx.save_for_backward(*inputs, *after[segment - 1 : -1 : segment])
        return torch.stack(before), None if run.cell is None else torch.stack(after)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved, run = ctx.saved_tensors, ctx.run
        inputs, starts = saved[: ctx.count], saved[ctx.count :]
        p = Parameters.from_inputs(inputs)
        with torch.autocast(p.s.device.type, enabled=False):  # as in the forward pass
            if torch.is_grad_enabled() or _torch.is_batched(grads[0] if grads[1] is None else grads[1]):
                return None, *run.reference(inputs, grads, ctx.needs_input_grad[1:])
            found = run.backward(p, (p.s, *starts), grads, ctx.segment)
        if not _torch.keeps_graph():  # or torch cannot say: another pass would take the steps again
            run.found, run.keeps = (), False
        return None, *found


def fuse(layer: Any, s: Tensor, times: Tensor, solver: Solver) -> Fused | None:
    """What solves the gaps of a layer; None where the plain form does.

    The plain form does where the network is not known, the method is not native or has options, or something watches
    or changes what is computed: transforms, hooks, autocast, records of steps, gradients of times.
    """
    settings, field, kind, n, is_cpu = solver.settings, layer.field, type(layer.field), layer.hidden_size, s.is_cpu
    if kind not in FIELDS or not is_stock(field) or field.time_dependent or is_watched(s, times):
        return None
    name = settings.method  # None for the best, the same as in hbnode.solve
    if name is None:
        name = "tsit5" if kind is not HBNODE else "nystrom4" if settings.rtol >= 1e-3 else "nystrom8"
    if name not in METHODS or settings.options or settings.gradient not in ("direct", "checkpoint"):
        return None
    if settings.compile and not is_cpu:
        return None
    if settings.steps is None:  # the host chooses them, by what the dtype carries
        is_possible = is_cpu and settings.rtol >= torch.finfo(s.dtype).eps
    else:
        is_possible = solver.step_size is None or most_steps(times, solver.step_size) <= settings.max_steps
    is_force, damping = name in SECOND_ORDER, field.damping if kind in (HBNODE, GHBNODE) else 0.0
    if is_force:
        is_possible &= kind is HBNODE or (kind is GHBNODE and isinstance(METHODS[name], Splitting))
    is_scalar = not isinstance(damping, Tensor) or damping.dim() == 0
    layers = layers_of(field.func)
    if layers is None or not (is_possible and is_scalar) or getattr(field, "activation", torch.tanh) is not torch.tanh:
        return None
    network, cell = Network(layers), layer.cell
    ends = (network.linear[0].in_features, network.linear[-1].out_features) if network.linear else None
    if ends != (n * (1 + (kind is SONODE)), n) or s.dtype not in (torch.float32, torch.float64):
        return None
    for weight in (*network.weights, *cell.parameters()):
        if weight is not None and (weight.dtype != s.dtype or weight.device != s.device):
            return None
    is_known = is_stock(cell) and isinstance(cell, nn.RNNCellBase) and getattr(cell, "nonlinearity", "tanh") == "tanh"
    is_pair = not is_force and kind in (SONODE, HBNODE, GHBNODE)
    equation = Equation(network, is_pair, sees_both=kind is SONODE, is_bounded=kind is GHBNODE)
    return Fused(
        layer, equation, Cell(cell, isinstance(cell, nn.GRUCell)) if is_known else None, name, damping, s, times, solver
    )


def most_steps(times: Tensor, step_size: float) -> float:
    """The most steps of a size that a gap takes."""
    needed = steps_needed(times.detach().double(), step_size)
    return float(needed.max()) if needed.numel() else 1.0


def is_watched(s: Tensor, times: Tensor) -> bool:
    """Whether something watches or changes what is computed."""
    if _torch.is_transformed() or _torch.double_backward_enabled():
        return True
    if _torch.is_tracing() or open_records or torch.is_autocast_enabled(s.device.type):
        return True
    return _torch.has_global_hooks() or (times.requires_grad and torch.is_grad_enabled())
