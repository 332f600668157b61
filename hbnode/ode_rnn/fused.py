"""An ODE-RNN as one function with its own VJP: ``python -m benchmarks.irregular``, rows "hbnode", 2.7 × the plain form.

It is for fields around a network of known layers, and for torch.nn's cells; the plain form is that of
:class:`hbnode.ode_rnn.layer.ODERNNLayer`. What is faster: no graph is recorded; the gradient of a weight is one product
for many uses of it; the coefficients of many steps are made at once; and a gap that is one step for all samples, as
most are, needs none of the controller's arithmetic.

It has a loop of its own, which takes the steps of :mod:`hbnode.solve` and no others. By the common one, which knows
outputs, jumps and fields that depend on time, training steps took 1.4 times as long where gaps are long.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hbnode import _torch
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE
from hbnode.nets import MLP
from hbnode.nfe import NFE, Tally, is_recording
from hbnode.ode_rnn.gaps import Gaps, Solver, steps_needed
from hbnode.solve.control import FIRST_LOOK, NON_FINITE_ATTEMPTS, TOO_MANY, Array, PIController, first_size
from hbnode.solve.methods import METHODS, NYSTROM, SECOND_ORDER, Explicit, Method, Splitting

Number = Tensor | float | None
Weights = Sequence[Tensor | None]  # the weight and the bias of each linear layer: of the cell, then those of f

MANY = 1024  # rows of a batch, of so many or more uses a gradient is summed in one product
TOGETHER = 4096  # sizes of steps whose coefficients, or their gradients, are made at once
FEW_SIZES = 256  # for which NumPy is faster than torch
FEW = 0.75  # of the samples still on their way, from which the others are left out
LONGEST_DECAY = 16.0  # γH of a step of a Nystrom method, as in hbnode.solve
aten = torch.ops.aten


class UnsolvedError(Exception):
    """A gap that the plain form should look at: it is not finite, or takes very many steps."""


# What is known

ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.Tanh: (torch.tanh, aten.tanh_backward.default),  # the VJPs are given the output
    nn.Sigmoid: (torch.sigmoid, aten.sigmoid_backward.default),
    nn.ReLU: (torch.relu, lambda g, y: aten.threshold_backward.default(g, y, 0)),
    nn.ELU: (nn.functional.elu, lambda g, y: aten.elu_backward.default(g, 1.0, 1.0, 1.0, True, y)),
}
FIELDS = NODE, ANODE, SONODE, HBNODE, GHBNODE
_FORWARD = {
    kind: kind.forward for kind in (*ACTIVATIONS, *FIELDS, nn.Linear, nn.Sequential, MLP, nn.GRUCell, nn.RNNCell)
}
_CALLS = {"forward", "evaluate", "force", "friction"}


def is_stock(module: Any) -> bool:
    """Whether a call of a module does what its class, which is known, says, and nothing else."""
    kind = type(module)
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
        xi: ξ of the equation.
        friction: γ of the equation.
        weights: of the linear layers: that of the cell that sees the state, None without a cell, and those of f.
    """

    s: Tensor
    gates: Tensor | None
    damping: Tensor
    xi: Number
    friction: Number
    weights: Weights


class Gradients:
    """What a backward pass adds up: the gradients of weights, of ξ and γ in the equation, of γ in the method.

    Autograd sums the gradient of a weight at every use. Here the inputs of a layer and the gradients at its outputs are
    kept, and the weight's gradient is one product for many uses.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.of_weights: list[Tensor | None] = [None] * len(weights)
        self.numbers: dict[str, Tensor] = {}
        self.uses: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.steps: list[tuple[Array, Sequence[Tensor], Sequence[Tensor]]] = []

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
        self.add_weight(2 * layer, g.T @ torch.cat(inputs))
        if self.weights[2 * layer + 1] is not None:
            self.add_weight(2 * layer + 1, g.sum(0))

    def add_weight(self, index: int, gradient: Tensor) -> None:
        """Add to the gradient of a weight or a bias."""
        total = self.of_weights[index]
        self.of_weights[index] = gradient if total is None else total.add_(gradient)

    def add_number(self, name: str, gradient: Tensor) -> None:
        """Add to the gradient of ``"xi"``, of the ``"friction"`` or of the ``"damping"`` of the method."""
        self.numbers[name] = self.numbers[name] + gradient if name in self.numbers else gradient


class Network:
    """Linear layers with activations between them; the first is number 1 of those with weights, after the cell's."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.weights: list[Tensor | None] = []
        self.activations: list[Any] = []  # None for a linear layer
        for layer in layers:
            self.activations.append(ACTIVATIONS.get(type(layer)))
            if isinstance(layer, nn.Linear):
                self.weights += layer.weight, layer.bias

    def maps(self, inputs: int, outputs: int) -> bool:
        """Whether it has so many inputs and outputs."""
        size = inputs
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                if layer.in_features != size:
                    return False
                size = layer.out_features
        return size == outputs and len(self.weights) > 0

    def __call__(self, x: Tensor, weights: Weights, residuals: list[Tensor] | None) -> Tensor:
        """The output for (batch, n). Inputs of linear layers and outputs of activations are residuals."""
        index = 2
        for activation in self.activations:
            if activation is not None:
                x = activation[0](x)
            if residuals is not None:
                residuals.append(x)
            if activation is None:
                x = linear(x, weights[index], weights[index + 1])  # type: ignore[arg-type]  # a weight is a tensor
                index += 2
        return x

    def vjp(self, gradient: Tensor, weights: Weights, residuals: list[Tensor], sums: Gradients) -> Tensor:
        """The gradient at the input from that at the output."""
        layer = len(self.weights) // 2
        for activation, value in zip(reversed(self.activations), reversed(residuals), strict=True):
            if activation is not None:
                gradient = activation[1](gradient, value)
                continue
            sums.add_use(layer, value, gradient)
            gradient = gradient @ weights[2 * layer]  # type: ignore[operator]  # a weight is a tensor
            layer -= 1
        return gradient


class Evaluation(NamedTuple):
    """The equation at x, with the residuals of its network."""

    x: Tensor
    value: Tensor
    residuals: list[Tensor]


class Equation:
    r"""What the stages of a step evaluate: the force F(h) = f(h) - ξh of a method for h and m, or the derivative of s.

    That of s = [h, m] is [m, F(h) - γm], or [tanh m, F(h) - γm], or for s = [h, v] it is [v, f(h, v)].
    """

    def __init__(self, kind: type, network: Network, *, is_force: bool) -> None:
        self.network, self.sees_both, self.is_bounded = network, kind is SONODE, kind is GHBNODE
        self.is_pair = not is_force and kind in (SONODE, HBNODE, GHBNODE)

    def __call__(self, x: Tensor, p: Parameters, *, keep: bool) -> Evaluation:
        """The value at x, of the shape of x."""
        residuals: list[Tensor] = []
        h, m = x.chunk(2, 1) if self.is_pair else (x, x)
        value = self.network(x if self.sees_both else h, p.weights, residuals if keep else None)
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
            back = back - p.xi * g
            if isinstance(p.xi, Tensor):
                sums.add_number("xi", -(g * h).sum())
        if not self.is_pair:
            return back
        if self.is_bounded:
            by_m = aten.tanh_backward.default(by_m, made.value[:, : by_m.shape[1]])
        if p.friction is not None:
            by_m = by_m - p.friction * g
            if isinstance(p.friction, Tensor):
                sums.add_number("friction", -(g * m).sum())
        if self.sees_both:
            back[:, by_m.shape[1] :] += by_m
            return back
        return torch.cat((back, by_m), 1)


class Cell:
    """torch.nn.GRUCell or a tanh RNNCell; the *gates* are what its input gives, for all samples at once."""

    def __init__(self, module: nn.RNNCellBase) -> None:
        self.module, self.is_gru = module, isinstance(module, nn.GRUCell)

    def gates(self, x: Tensor) -> Tensor:
        """Those of samples (batch, T, inputs), (T, batch, gates)."""
        return linear(x.transpose(0, 1).contiguous(), self.module.weight_ih, self.module.bias_ih)

    def __call__(self, gates: Tensor, s: Tensor, weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The new state, and the residuals."""
        own = linear(s, weights[0], weights[1])  # type: ignore[arg-type]  # a weight is a tensor
        if not self.is_gru:
            new = torch.tanh(own + gates)
            return new, (s, new)
        n = s.shape[1]
        rz = torch.sigmoid(own[:, : 2 * n] + gates[:, : 2 * n])
        r, z = rz.chunk(2, 1)
        new = torch.tanh(torch.addcmul(gates[:, 2 * n :], r, own[:, 2 * n :]))
        return torch.lerp(new, s, z), (s, rz, own[:, 2 * n :], new)

    def vjp(
        self, gradient: Tensor, residuals: tuple[Tensor, ...], weights: Weights, sums: Gradients, of_gates: Tensor
    ) -> Tensor:
        """The gradient at s; that at the gates is written into ``of_gates``."""
        weight: Any = weights[0]
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
    n, stages = method.rows, method.evaluations
    rows, columns = stages + n - 1 + n * error, n + 1 + stages
    c = packed.new_zeros(rows * columns, *packed.shape[1:])
    return c.index_copy(0, method.places(error).to(c.device), packed).view(rows, columns, *packed.shape[1:])


class Step(NamedTuple):
    """A step, and what its VJP needs.

    Attributes:
        sizes: of each sample's step, (samples,).
        place: which of the known steps it is, if it is one.
        index: which samples take it, all others have arrived; None for all.
        accepted: which of them moved, (samples, 1); None for all.
        s: the state before it, of those that take it.
        c: its coefficients.
        stages: its evaluations; none if they are not kept.
    """

    sizes: Array
    place: int | None = None
    index: Tensor | None = None
    accepted: Tensor | None = None
    s: Tensor | None = None
    f: Tensor | None = None
    c: Any = None
    stages: Sequence[Evaluation] = ()

    def moved(self, before: Any, after: Any) -> Any:
        """What all samples have after it, given what those have that took it."""
        if after is None:
            return None
        if self.accepted is not None:
            after = torch.where(self.accepted, after, before if self.index is None else before[self.index])
        return after if self.index is None else before.index_copy(0, self.index, after)


class Gap(NamedTuple):
    """The evaluation at the start of a gap, if it is carried, and the steps that were accepted."""

    start: Evaluation | None
    steps: list[Step]


class Fused:
    """Solves gaps between times (batch, T), and updates states by samples between them, without a graph.

    Attributes:
        cell: what sees the samples; None if it is not known.
        nfe: the evaluations of each gap.
    """

    def __init__(
        self, layer: Any, equation: Equation, cell: Cell | None, name: str, s: Tensor, times: Tensor, solver: Solver
    ) -> None:
        self.layer, self.equation, self.cell, self.solver = layer, equation, cell, solver
        self.settings, self.method, self.common = solver.settings, METHODS[name], not solver.settings.per_sample
        self.t = times.detach().to("cpu", torch.float64)
        self.lengths: Array = np.ascontiguousarray(self.t.diff().T.numpy())  # (gaps, batch)
        self.rests = (self.lengths == 0).all(1)
        self.nfe: list[NFE] = []
        for _ in self.lengths:
            self.nfe.append(NFE())
        self.sizes, self.grid = (self.lengths, None) if self.settings.steps is None else self.make_grid()
        field = layer.field
        damping = field.damping if isinstance(field, (HBNODE, GHBNODE)) else None
        self.xi = field.xi if isinstance(field, GHBNODE) else None
        self.friction = damping if equation.is_pair else None
        self.is_bounded = isinstance(field, GHBNODE)
        gamma = damping if name in SECOND_ORDER else 0.0
        self.damping = torch.as_tensor(gamma, dtype=torch.float64, device=s.device)
        self.gamma = self.damping.detach().cpu()
        self.number = float(self.gamma)
        self.longest = LONGEST_DECAY / abs(self.number) if name in NYSTROM and self.number else math.inf
        self.shortest = 4 * np.finfo(float).eps * float(self.t.abs().max())
        self.evaluations, self.by_error = self.method.evaluations, self.grid is None
        self.width = s.shape[1] // self.method.rows
        self.group: tuple[int, Sequence[Tensor]] = (-1, ())  # coefficients of known steps

    def make_grid(self) -> tuple[Array, list[range]]:
        """The sizes of equal steps; which of them each gap takes."""
        count = np.full(self.lengths.shape, self.settings.steps)
        if self.solver.step_size is not None:
            count = steps_needed(self.t, self.solver.step_size).T.numpy().astype(int)
        most = count.max(1).tolist() if count.size else [1] * len(count)
        sizes = [
            np.where(np.arange(k)[:, None] < n, length / n, 0.0)
            for length, n, k in zip(self.lengths, count, most, strict=True)
        ]
        return np.concatenate([self.lengths[:0], *sizes]), [
            range(*ends) for ends in itertools.pairwise([0, *itertools.accumulate(most)])
        ]

    def read(self, x: Tensor, seen: Tensor | None, s: Tensor, first: int) -> tuple[Tensor, Tensor] | None:
        """The states before and after each sample, (batch, T, S); None where the plain form should look at them.

        Arguments:
            x: what the cell is fed, (batch, T, inputs).
            seen: which samples it sees, (batch, T); None for all.
            s: the state at the beginning.
            first: gaps before the first sample, 0 or 1.
        """
        assert self.cell is not None
        masks = None
        if seen is not None and not (seen.is_cpu and bool(seen.all())):
            masks = list(seen.T.unsqueeze(-1).unbind(0))
        try:
            before, after = self.run(s, self.cell.gates(x), range(first - 1, x.shape[1] + first - 1), masks)
        except UnsolvedError:
            return None
        return before.transpose(0, 1).contiguous(), after.transpose(0, 1).contiguous()

    def __call__(self, gap: int, s: Tensor) -> Tensor:
        """The state at the end of a gap from that at its beginning."""
        try:
            return self.run(s, None, range(gap, gap + 1), None)[0][0]
        except UnsolvedError:
            times = self.t[:, gap : gap + 2]
            return Gaps(self.layer.field, s, times, self.solver, second_order=self.layer.second_order)(0, s)

    def run(self, s: Tensor, gates: Tensor | None, gaps: range, masks: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        """The states at the ends of gaps, and after a sample was seen there, (T, batch, S)."""
        _torch.keep_freed_memory(s.device)
        of_cell = [None, None]
        if gates is not None and self.cell is not None:
            of_cell = [self.cell.module.weight_hh, self.cell.module.bias_hh]
        given = [s, gates, self.damping, self.xi, self.friction, *of_cell, *self.equation.network.weights]
        for i, z in enumerate(given):
            if isinstance(z, Tensor) and z.is_leaf:
                given[i] = z.view_as(z)  # a parameter whose p.data is replaced takes its saved self with it
        keeps = torch.is_grad_enabled()
        run = Run(self, gaps, masks, keeps, self.settings.gradient == "checkpoint")
        for gap in gaps:
            if gap >= 0:
                self.nfe[gap].keeps_graph = keeps and not run.recomputes
        before, after = _Function.apply(run, *given)
        if self.grid is not None and not bool(torch.isfinite((before if after is None else after).detach()).all()):
            raise UnsolvedError
        return before, before if after is None else after

    # Forwards

    def solve(self, gap: int, s: Tensor, p: Parameters, known: Sequence[Step], *, keep: bool) -> tuple[Tensor, Gap]:
        """The state at the end of a gap, and how it was reached: by known steps, a grid, or the error."""
        if self.rests[gap]:
            return s, Gap(None, [])
        tally, steps, start, f = Tally(self.layer.field, self.nfe[gap]), [], None, None
        if self.method.carries:
            start = self.equation(s[:, : self.width].contiguous(), p, keep=keep)
            f = start.value
        if self.grid is None and not known:
            s, steps, attempts = self.adaptive(gap, s, f, p, keep=keep)
        else:
            for step in known or [Step(self.sizes[place], place) for place in self.grid[gap]]:
                after, after_f, _, step = self.take(step, s, f, p, keep=keep)
                s, f = step.moved(s, after), step.moved(f, after_f)
                steps.append(step)
            attempts = len(steps)
        tally.add("evaluation", self.method.carries + attempts * self.evaluations)
        if not known:
            tally.add("accepted", len(steps))
            tally.add("rejected", attempts - len(steps))
        return s, Gap(start if keep else None, steps)

    @np.errstate(all="ignore")
    def adaptive(self, gap: int, s: Tensor, f: Any, p: Parameters, *, keep: bool) -> tuple[Tensor, list[Step], int]:
        """The state at the end of a gap, the accepted steps, and the number of attempts.

        The rules are those of :class:`hbnode.solve.control.AdaptiveSteps` for a field that does not depend on time.
        """
        length, most, q = self.lengths[gap], self.settings.max_steps, self.method.error_order or 0
        h, slope = self.in_common(rms(s[:, : self.width]), length), self.in_common(rms(f), length)
        if not (np.isfinite(h + slope).all() and math.isfinite(self.number)):
            raise UnsolvedError
        size = first_size(h, slope, self.settings.rtol, self.settings.atol, self.method.rows, q)
        size, longest = np.minimum(size, self.longest), np.full_like(h, self.longest)
        if self.common:
            moving = length > 0
            size, longest = (np.where(moving, length * (x[moving] / length[moving]).min(), x) for x in (size, longest))
        now, taken, left = np.zeros_like(h), np.zeros_like(h), np.zeros_like(h)
        control, steps = PIController(q, h), []
        for attempt in range(1, most + 1):
            number = np.maximum(np.ceil((length - now) / size - 0.05), 1.0)
            taken = np.where(number == left - 1.0, taken, (length - now) / number)  # equal steps stay as they are
            left, moving = number, taken > 0
            step = Step(taken, gap if attempt == 1 and (number == 1.0).all() else None)
            if step.place is None and moving.sum() <= FEW * len(moving):
                step = Step(taken[moving], index=torch.from_numpy(np.flatnonzero(moving)))
            after, after_f, error, step = self.take(step, s, f, p, keep=keep)
            ratio = self.ratio(step.s, after, error)
            if step.index is not None:
                own, ratio = ratio, np.zeros_like(h)
                ratio[moving] = own
            ratio = self.in_common(ratio, length)
            accepted = ratio <= 1.0  # not those that are not finite
            if not accepted.all():
                mask = torch.from_numpy(accepted).unsqueeze(1)
                step = step._replace(accepted=mask if step.index is None else mask[step.index])
            if (accepted & moving).any():
                s, f = step.moved(s, after), step.moved(f, after_f)
                steps.append(step)
            now = np.where(accepted, np.where(number == 1.0, length, now + taken), now)
            if (now == length).all():
                return s, steps, attempt
            new = taken * control.factor(ratio, accepted)
            is_cut = accepted & (taken < 0.5 * size)  # by the end, which says little of the steps after it
            new = np.where(is_cut, np.maximum(new, size), new)
            size = np.where(moving, np.minimum(new, longest), size)
            is_stuck = ~accepted & ((size < self.shortest) | (control.failures >= NON_FINITE_ATTEMPTS))
            if is_stuck.any() or (attempt % FIRST_LOOK == 0 and ((length - now) / size).max() > TOO_MANY * most):
                break
        raise UnsolvedError

    def in_common(self, x: Array, length: Array) -> Array:
        """The root mean square over the samples that move, where they take a common step."""
        return np.full_like(x, np.sqrt((x[length > 0] ** 2).mean())) if self.common else x

    def ratio(self, before: Tensor, after: Tensor, error: Tensor) -> Array:
        """Norm of (error / tolerance) of each sample."""
        scale = torch.maximum(before.abs(), after.abs()).mul_(self.settings.rtol).add_(self.settings.atol)
        scaled = error.transpose(0, 1) / scale.view(len(scale), -1, self.width)
        return rms(scaled.flatten(1))

    def take(self, step: Step, s: Tensor, f: Any, p: Parameters, *, keep: bool) -> tuple[Tensor, Any, Any, Step]:
        """The state of those that take a step, the value there, the error, and the step with what its VJP needs."""
        if step.index is not None:
            s, f = s[step.index], f[step.index]
        c, is_explicit = self.coefficients(step, p), isinstance(self.method, Explicit)
        after, value, error, stages = (self.explicit if is_explicit else self.splitting)(s, f, c, p, keep=keep)
        return after, value, error, step._replace(s=s, f=f, c=c, stages=stages if keep else ())

    def explicit(self, s: Tensor, f: Tensor, c: Tensor, p: Parameters, *, keep: bool) -> tuple[Any, ...]:
        """Rows = C [h, m, f, F(row 1), F(row 2), ...]: the stages, the last of which is the new h; m; the errors."""
        n, count, columns = self.method.rows, self.evaluations, c.unbind(1)
        push = torch.addcmul if torch.is_grad_enabled() else Tensor.addcmul_
        rows = columns[0] * s[:, : self.width]
        if n == 2:
            rows = push(rows, columns[1], s[:, self.width :])
        rows, stages = push(rows, columns[n], f), []
        for column in columns[n + 1 :]:
            made = self.equation(rows[len(stages)], p, keep=keep)
            rows = push(rows, column, made.value)
            stages.append(made)
        after = rows[count - 1] if n == 1 else torch.cat((rows[count - 1], rows[count]), 1)
        return after, made.value, rows[count + n - 1 :], stages

    def splitting(self, s: Tensor, f: None, c: Tensor, p: Parameters, *, keep: bool) -> tuple[Any, ...]:
        """A drift, and kicks each with a drift after it."""
        k, (h, m), stages = self.evaluations, s.chunk(2, 1), []
        drifts, decays, weights = c[: k + 1], c[k + 1 : 2 * k + 1], c[2 * k + 1 :]
        h = torch.addcmul(h, drifts[0], self.speed(m))
        for drift, decay, weight in zip(drifts[1:], decays, weights, strict=True):
            made = self.equation(h, p, keep=keep)
            m = torch.addcmul(decay * m, weight, made.value)
            h = torch.addcmul(h, drift, self.speed(m))
            stages.append(made)
        return torch.cat((h, m), 1), None, None, stages

    def speed(self, m: Tensor) -> Tensor:
        """How h drifts."""
        return torch.tanh(m) if self.is_bounded else m

    def coefficients(self, step: Step, p: Parameters) -> Tensor:
        """Those of a step; of known steps they are made for many at once."""
        if torch.is_grad_enabled():  # differentiable in γ
            packed = self.method.packed(torch, p.damping.cpu(), torch.from_numpy(step.sizes), error=self.by_error)
            return coefficient_matrix(self.method, packed, error=self.by_error).to(p.s)
        if step.place is None:
            return self.made(step.sizes, p.s)
        lanes = self.sizes.shape[1]
        together = max(1, TOGETHER // max(1, lanes))
        group, index = divmod(step.place, together)
        if self.group[0] != group:
            sizes = self.sizes[group * together : (group + 1) * together]
            self.group = group, self.made(sizes.ravel(), p.s).split(lanes, -2)
        return self.group[1][index]

    def made(self, sizes: Array, like: Tensor) -> Tensor:
        """The coefficients of steps of some sizes."""
        if len(sizes) > FEW_SIZES:
            packed = self.method.packed(torch, self.gamma, torch.from_numpy(sizes), error=self.by_error)
        else:
            packed = torch.from_numpy(self.method.packed(np, self.number, sizes, error=self.by_error))
        return coefficient_matrix(self.method, packed.to(like), error=self.by_error)

    # Backwards

    def vjp(self, gap: Gap, g: Tensor, p: Parameters, sums: Gradients) -> Tensor:
        """The gradient at the beginning of a gap from that at its end."""
        g_f = None
        for step in reversed(gap.steps):
            g, g_f = self.step_vjp(step, g, g_f, p, sums)
        if gap.start is not None and g_f is not None:
            by_f = self.equation.vjp(gap.start, g_f, p, sums)
            g = g + by_f if self.method.rows == 1 else torch.cat((g[:, : self.width] + by_f, g[:, self.width :]), 1)
        return g

    def step_vjp(
        self, step: Step, g: Tensor, g_f: Tensor | None, p: Parameters, sums: Gradients
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients at the state and at the value that is carried, before a step from those after it."""
        vjp, index, moves = self.explicit_vjp if self.method.carries else self.splitting_vjp, step.index, step.accepted
        after, after_f = (g, g_f) if index is None else (g[index], None if g_f is None else g_f[index])
        if moves is None:
            before, before_f = vjp(step, after, after_f, p, sums)
        else:  # the others stay
            after_f = torch.zeros_like(step.f) if after_f is None else after_f
            before, before_f = vjp(step, torch.where(moves, after, 0.0), torch.where(moves, after_f, 0.0), p, sums)
            before = before + torch.where(moves, 0.0, after)
            before_f = before_f + torch.where(moves, 0.0, after_f)
        if index is not None:
            before = g.index_copy(0, index, before)
            before_f = (g.new_zeros(len(g), self.width) if g_f is None else g_f).index_copy(0, index, before_f)
        return before, before_f

    def explicit_vjp(
        self, step: Step, g: Tensor, g_f: Tensor | None, p: Parameters, sums: Gradients
    ) -> tuple[Tensor, Tensor]:
        """From the last row of C to the first: a row's gradient goes to its columns, and a column's to the row."""
        n, count, by_row, w = self.method.rows, self.evaluations, step.c.unbind(0), self.width
        of_rows, of_columns = [], None
        if n == 2:
            of_rows.append(g[:, w:])
            of_columns = by_row[count] * g[:, w:]
        for i in reversed(range(count)):
            of_x, of_value = None, None if of_columns is None else of_columns[n + 1 + i]
            if i == count - 1:
                of_x = g[:, :w]
                of_value = of_value if g_f is None else g_f if of_value is None else of_value + g_f
            if of_value is not None:
                back = self.equation.vjp(step.stages[i], of_value, p, sums)
                of_x = back if of_x is None else of_x + back
            of_rows.append(of_x)
            of_columns = by_row[i] * of_x if of_columns is None else of_columns.addcmul_(by_row[i], of_x)
        if n == 2 and p.damping.requires_grad:
            columns = [step.s[:, :w], step.s[:, w:], step.f]
            for made in step.stages:
                columns.append(made.value)
            sums.steps.append((step.sizes, of_rows[::-1], columns))
        return of_columns[0] if n == 1 else torch.cat((of_columns[0], of_columns[1]), 1), of_columns[n]

    def splitting_vjp(self, step: Step, g: Tensor, g_f: None, p: Parameters, sums: Gradients) -> tuple[Tensor, None]:
        """From the last drift and kick to the first."""
        k, c = self.evaluations, step.c
        drifts, decays, weights = c[: k + 1], c[k + 1 : 2 * k + 1], c[2 * k + 1 :]
        forces, momenta, kicked = [made.value for made in step.stages], [step.s[:, self.width :]], []
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
        return torch.cat((of_h, torch.addcmul(of_m, drifts[0], self.speed_vjp(of_h, momenta[0]))), 1), None

    def speed_vjp(self, of_h: Tensor, m: Tensor) -> Tensor:
        """The gradient at m of a drift."""
        return aten.tanh_backward.default(of_h, torch.tanh(m)) if self.is_bounded else of_h

    def add_damping(self, sums: Gradients) -> None:
        """Add up the gradient of γ in the method, from those of the rows of its steps and their columns."""
        sizes, of_rows, of_columns = zip(*sums.steps, strict=True)
        sums.steps = []
        g = torch.stack(list(map(torch.cat, zip(*of_rows, strict=True))))
        c = torch.stack(list(map(torch.cat, zip(*of_columns, strict=True))))
        with torch.enable_grad():
            gamma = self.gamma.detach().requires_grad_()
            made = self.method.packed(torch, gamma, torch.from_numpy(np.concatenate(sizes)), error=False)
            if isinstance(self.method, Explicit):
                products = torch.einsum("rnw,cnw->rcn", g, c).flatten(0, 1)[self.method.places(False).to(g.device)]
            else:  # decays and weights of the kicks
                made, products = made[len(g) + 1 :], (g.repeat(2, 1, 1) * c).sum(-1)
            (total,) = torch.autograd.grad(made, gamma, products.to(made))
        sums.add_number("damping", total.to(g.device))


def rms(x: Tensor) -> Array:
    """Root mean square of each row, on the host."""
    return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64).numpy() / math.sqrt(x.shape[1])


# The whole as one function


@dataclass
class Run:
    """Gaps one after the other, and a sample after each if there is a cell.

    Attributes:
        fused: solves them.
        gaps: their numbers; -1 where there is none before the first sample.
        masks: which samples the cell sees, for each a (batch, 1); None for all.
        needs_gradient: whether there may be a backward pass.
        recomputes: whether that takes the steps again, about the root of T gaps at a time.
        steps: those that were taken, without what their VJP needs.
    """

    fused: Fused
    gaps: range
    masks: list[Tensor] | None
    needs_gradient: bool
    recomputes: bool
    steps: list[list[Step]] = field(default_factory=list)

    @property
    def segments(self) -> list[range]:
        """Samples of which the backward pass takes the steps again at a time."""
        count = len(self.gaps)
        if not self.recomputes:
            return [range(count)]
        size = math.isqrt(max(count - 1, 0)) + 1
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def forward(self, s: Tensor, p: Parameters, samples: range, *, keep: bool, again: bool = False) -> list[Any]:
        """For each sample the state before it, that after, and residuals."""
        found, fused = [], self.fused
        for i in samples:
            gap, residuals = Gap(None, []), ()
            if self.gaps[i] >= 0:
                s, gap = fused.solve(self.gaps[i], s, p, self.steps[i] if again else (), keep=keep)
            if not again:
                self.steps.append([])
                for step in gap.steps:
                    self.steps[-1].append(Step(*step[:4]))
            before = s
            if p.gates is not None:
                new, residuals = fused.cell(p.gates[i], s, p.weights)
                new = s + new if fused.layer.residual else new
                s = new if self.masks is None else torch.where(self.masks[i], new, s)
            found.append((before, s, (gap, residuals) if keep else None))
        return found

    def backward(
        self, p: Parameters, starts: Sequence[Tensor], grads: Sequence[Tensor | None], kept: Sequence[Any] | None
    ) -> list[Any]:
        """The gradients of the tensors, from the last sample to the first."""
        fused, sums, of_s = self.fused, Gradients(p.weights), torch.zeros_like(p.s)
        of_gates = None if p.gates is None else torch.empty_like(p.gates)
        for samples, start in reversed(list(zip(self.segments, starts, strict=True))):
            found = kept or [z[2] for z in self.forward(start, p, samples, keep=True, again=True)]
            for i, (gap, residuals) in zip(reversed(samples), reversed(found), strict=True):
                if of_gates is not None:
                    of_s = of_s if grads[1] is None else of_s + grads[1][i]
                    mask = None if self.masks is None else self.masks[i]
                    of_new = of_s if mask is None else torch.where(mask, of_s, 0.0)
                    by_cell = fused.cell.vjp(of_new, residuals, p.weights, sums, of_gates[i])
                    if fused.layer.residual:
                        by_cell = by_cell + of_s
                    elif mask is not None:
                        by_cell = by_cell + torch.where(mask, 0.0, of_s)
                    of_s = by_cell
                of_s = of_s if grads[0] is None else of_s + grads[0][i]
                of_s = fused.vjp(gap, of_s, p, sums)
                if len(sums.steps) * len(of_s) >= TOGETHER:
                    fused.add_damping(sums)
        for layer in list(sums.uses):
            sums.settle(layer)
        if sums.steps:
            fused.add_damping(sums)
        numbers = sums.numbers.get("damping"), sums.numbers.get("xi"), sums.numbers.get("friction")
        return [of_s, of_gates, *numbers, *sums.of_weights]

    def reference(
        self, given: Sequence[Any], grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients by autograd, from the same steps; they can be differentiated again."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            views = [z.view_as(z) if isinstance(z, Tensor) else z for z in given]
            p = Parameters(*views[:5], views[5:])
            before, after, _ = zip(*self.forward(p.s, p, range(len(self.gaps)), keep=False, again=True), strict=True)
            made = [(torch.stack(y), dy) for y, dy in zip((before, after), grads, strict=True) if dy is not None]
        leaves = [z for z, is_wanted in zip(views, wanted, strict=True) if is_wanted]
        outputs, gradients = zip(*made, strict=True)
        found = iter(torch.autograd.grad(outputs, leaves, gradients, create_graph=again, allow_unused=True))
        return [next(found) if is_wanted else None for is_wanted in wanted]


class _Function(torch.autograd.Function):
    """The states before and after each sample of a run, (T, batch, S)."""

    @staticmethod
    def forward(ctx: Any, run: Run, *given: Any) -> tuple[Tensor, Tensor | None]:
        p = Parameters(*given[:5], given[5:])
        keep = run.needs_gradient and not run.recomputes and any(ctx.needs_input_grad)
        before, after, residuals = zip(*run.forward(p.s, p, range(len(run.gaps)), keep=keep), strict=True)
        ctx.run, ctx.kept = run, residuals if keep else None
        ctx.set_materialize_grads(False)
        tensors, ctx.numbers = [], []
        for z in given:
            tensors.append(z if isinstance(z, Tensor) else None)
            ctx.numbers.append(None if isinstance(z, Tensor) else z)
        starts = [after[part.start - 1] for part in run.segments[1:]]
        ctx.save_for_backward(*tensors, *starts)
        return torch.stack(before), None if p.gates is None else torch.stack(after)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, len(ctx.numbers)
        given = []
        for tensor, number in zip(saved[:count], ctx.numbers, strict=True):
            given.append(tensor if number is None else number)
        p = Parameters(*given[:5], given[5:])
        with torch.autocast(p.s.device.type, enabled=False):  # as in the forward pass
            is_batched = _torch.is_batched(next(grad for grad in grads if grad is not None))
            if torch.is_grad_enabled() or is_batched:
                return None, *ctx.run.reference(given, grads, ctx.needs_input_grad[1:])
            kept = ctx.kept
            if not _torch.keeps_graph():
                ctx.kept = None
            return None, *ctx.run.backward(p, (p.s, *saved[count:]), grads, kept)


def fuse(layer: Any, s: Tensor, times: Tensor, solver: Solver) -> Fused | None:
    """What solves the gaps of a layer; None where the plain form does.

    The plain form does where the network is not known, the method is not native or has options, or something watches
    or changes what is computed: transforms, hooks, autocast, records of steps, gradients of times.
    """
    settings, field, kind = solver.settings, layer.field, type(layer.field)
    if kind not in FIELDS or field.time_dependent or not is_stock(field) or is_watched(s, times):
        return None
    name = settings.method or best_method(kind, settings.rtol)
    if name not in METHODS or settings.options or settings.gradient not in ("direct", "checkpoint"):
        return None
    if settings.steps is None:  # whose steps the host chooses, by what the dtype carries
        if not s.is_cpu or settings.rtol < torch.finfo(s.dtype).eps:
            return None
    elif solver.step_size is not None and not most_steps(times, solver.step_size) <= settings.max_steps:
        return None
    if settings.compile and not s.is_cpu:
        return None
    is_force = name in SECOND_ORDER
    if is_force and not (kind is HBNODE or (kind is GHBNODE and isinstance(METHODS[name], Splitting))):
        return None
    if isinstance(field, GHBNODE) and field.activation is not torch.tanh:
        return None
    if isinstance(field, (HBNODE, GHBNODE)) and isinstance(field.damping, Tensor) and field.damping.dim():
        return None
    layers, n = layers_of(field.func), layer.hidden_size
    if layers is None:
        return None
    network = Network(layers)
    if not network.maps(n * (1 + (kind is SONODE)), n):
        return None
    for weight in (*network.weights, *layer.cell.parameters()):
        if weight is not None and (weight.dtype != s.dtype or weight.device != s.device):
            return None
    if s.dtype not in (torch.float32, torch.float64):
        return None
    cell, is_known = layer.cell, isinstance(layer.cell, nn.RNNCellBase) and is_stock(layer.cell)
    is_known = is_known and getattr(cell, "nonlinearity", "tanh") == "tanh"
    equation = Equation(kind, network, is_force=is_force)
    return Fused(layer, equation, Cell(cell) if is_known else None, name, s, times, solver)


def best_method(kind: type, rtol: float) -> str:
    """What ``method=None`` is for a stock field, the same as in :class:`hbnode.solve.settings.Settings`."""
    return "tsit5" if kind is not HBNODE else "nystrom4" if rtol >= 1e-3 else "nystrom8"


def most_steps(times: Tensor, step_size: float) -> float:
    """The most steps of a size that a gap takes."""
    needed = steps_needed(times.detach().double(), step_size)
    return float(needed.max()) if needed.numel() else 1.0


def is_watched(s: Tensor, times: Tensor) -> bool:
    """Whether something watches or changes what is computed."""
    if _torch.is_active() or _torch.in_forward_mode() or _torch.double_backward_enabled():
        return True
    if _torch.is_tracing() or is_recording() or torch.is_autocast_enabled(s.device.type):
        return True
    return _torch.has_global_hooks() or (times.requires_grad and torch.is_grad_enabled())
