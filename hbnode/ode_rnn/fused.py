"""An ODE-RNN as one function with its own VJP: ``python -m benchmarks.irregular``, rows "hbnode", 2.7 × the plain form.

It is for fields around a network of known layers, and for torch.nn's cells; the plain form is that of
:class:`hbnode.ode_rnn.layer.ODERNNLayer`. Steps, their coefficients and the control of their sizes are those of
:mod:`hbnode.solve`. What is faster: no graph is recorded; the gradient of a weight is one product for many uses of it;
the coefficients of many steps are made at once; and a gap that is one step for all samples, as most are, needs none of
the controller's arithmetic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hbnode import _torch
from hbnode._torch import is_tracing, keep_freed_memory
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE
from hbnode.nets import MLP
from hbnode.nfe import NFE, Tally, open_records
from hbnode.ode_rnn.gaps import Gaps, Solver, steps_needed
from hbnode.solve.control import AdaptiveSteps, Array, first_size
from hbnode.solve.loop import Problem
from hbnode.solve.methods import METHODS, SECOND_ORDER, Explicit, Method
from hbnode.solve.odeint import check_precision, checked_state, resolve
from hbnode.solve.term import ODETerm, Snapshot, change_of_call, is_compiled

Rows = tuple[Tensor, ...]
Number = Tensor | float | None
Weights = Sequence[Tensor | None]  # the weight and the bias of each linear layer

MANY = 1024  # rows of a batch, of so many or more uses a gradient is summed in one product
TOGETHER = 4096  # sizes of steps whose coefficients, or their gradients, are made at once
FEW_SIZES = 256  # for which NumPy is faster than torch
FEW = 0.75  # of the samples still on their way, from which the others are left out
aten = torch.ops.aten


# What is known


def tanh_vjp(gradient: Tensor, y: Tensor) -> Tensor:
    """The gradient at the input of tanh from that at its output y."""
    return aten.tanh_backward.default(gradient, y)


ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.Tanh: (torch.tanh, tanh_vjp),
    nn.Sigmoid: (torch.sigmoid, aten.sigmoid_backward.default),
    nn.ReLU: (torch.relu, lambda g, y: aten.threshold_backward.default(g, y, 0)),
    nn.ELU: (nn.functional.elu, lambda g, y: aten.elu_backward.default(g, 1.0, 1.0, 1.0, True, y)),
}
FIELDS = NODE, ANODE, SONODE, HBNODE, GHBNODE
_CALLS = ("forward", "evaluate", "force", "friction")
_KNOWN = {
    kind: [getattr(kind, name, None) for name in _CALLS]
    for kind in (*ACTIVATIONS, *FIELDS, nn.Linear, nn.Sequential, MLP, nn.GRUCell, nn.RNNCell)
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_stock(module: Any) -> bool:
    """Whether a call of a module does what its class, which is known, says, and nothing else."""
    kind, own = type(module), getattr(module, "__dict__", {})
    if kind not in _KNOWN or _KNOWN[kind] != [getattr(kind, name, None) for name in _CALLS]:
        return False
    if any(own[hooks] for hooks in _HOOKS) or any(name in own for name in _CALLS):
        return False
    return kind in FIELDS or not any(isinstance(value, Tensor) for value in own.values())  # a weight that is none


def layers_of(func: Any) -> list[nn.Module] | None:
    """The layers of a network, those of networks inside in their places; None if one is not known."""
    if not is_stock(func) or (isinstance(func, MLP) and func.time_dependent):
        return None
    if isinstance(func, (nn.Sequential, MLP)):
        children = func if isinstance(func, nn.Sequential) else func.children()  # one may be there twice
        found = [layers_of(child) for child in children]
        return None if None in found else [layer for layers in found for layer in layers or ()]
    if isinstance(func, nn.ELU) and func.alpha != 1.0:
        return None
    return [func] if type(func) is nn.Linear or type(func) in ACTIVATIONS else None


# The network, the equation and the cell, with their VJPs


class WeightGradients:
    """The gradients of the weights of linear layers, from many uses of each.

    Autograd sums the gradient of a weight at every use. Here the inputs of a layer and the gradients at its outputs are
    kept, and the weight's gradient is one product for many uses.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.totals: list[Tensor | None] = [None] * len(weights)
        self.uses: list[list[tuple[Tensor, Tensor]]] = [[] for _ in weights[::2]]

    def add(self, layer: int, x: Tensor, gradient: Tensor) -> None:
        """A use of a layer: its input and the gradient at its output."""
        self.uses[layer].append((x, gradient))
        if len(self.uses[layer]) * len(x) >= MANY:
            self._settle(layer)

    def found(self) -> list[Tensor | None]:
        """The gradients of all weights; None for one that was not used."""
        for layer in range(len(self.uses)):
            self._settle(layer)
        return self.totals

    def _settle(self, layer: int) -> None:
        if not self.uses[layer]:
            return
        x, g = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*self.uses[layer], strict=True))
        self.uses[layer] = []
        self._add(2 * layer, g.T @ x)
        if self.weights[2 * layer + 1] is not None:
            self._add(2 * layer + 1, g.sum(0))

    def _add(self, index: int, gradient: Tensor) -> None:
        total = self.totals[index]
        self.totals[index] = gradient if total is None else total.add_(gradient)


class Network:
    """Linear layers with activations between them."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        self.activations = [ACTIVATIONS.get(type(layer)) for layer in layers]  # None for a linear layer

    def maps(self, inputs: int, outputs: int) -> bool:
        """Whether it has so many inputs and outputs."""
        sizes = [size for layer in self.linear for size in (layer.in_features, layer.out_features)]
        return [inputs, *sizes[1:-1:2]] == sizes[::2] and sizes[-1] == outputs

    def weights(self) -> list[Tensor | None]:
        """The weight and the bias of each linear layer."""
        return [tensor for layer in self.linear for tensor in (layer.weight, layer.bias)]

    def __call__(self, x: Tensor, weights: Weights, residuals: list[Tensor] | None) -> Tensor:
        """The output for (batch, n). Inputs of linear layers and outputs of activations are residuals."""
        layer = 0
        for activation in self.activations:
            if activation is not None:
                x = activation[0](x)
            if residuals is not None:
                residuals.append(x)
            if activation is None:
                x = linear(x, weights[layer], weights[layer + 1])  # type: ignore[arg-type]  # a weight is a tensor
                layer += 2
        return x

    def vjp(self, gradient: Tensor, weights: Weights, residuals: list[Tensor], sums: WeightGradients) -> Tensor:
        """The gradient at the input from that at the output."""
        layer = len(self.linear)
        for activation, value in zip(reversed(self.activations), reversed(residuals), strict=True):
            if activation is not None:
                gradient = activation[1](gradient, value)
                continue
            layer -= 1
            sums.add(layer, value, gradient)
            gradient = gradient @ weights[2 * layer]  # type: ignore[operator]  # a weight is a tensor
        return gradient


class Evaluation(NamedTuple):
    """The equation at x, with the residuals of its network."""

    x: Tensor
    value: Tensor
    residuals: list[Tensor]


class Parameters(NamedTuple):
    """What a run depends on.

    Attributes:
        s: the state at its beginning, (batch, S).
        gates: what the inputs give to the cell, (T, batch, gates); None without a cell.
        damping: γ of the method, in float64.
        xi: ξ of the equation.
        friction: γ of the equation.
        cell: the weight and bias that see the state; none without a cell.
        network: those of f.
    """

    s: Tensor
    gates: Tensor | None
    damping: Tensor
    xi: Number
    friction: Number
    cell: Weights
    network: Weights


class Equation:
    r"""What the stages of a solve evaluate: the force F(h) = f(h) - ξh, or the derivative of s.

    That of s = [h, m] is [m, F(h) - γm], or [tanh m, F(h) - γm], or for s = [h, v] it is [v, f(h, v)].
    """

    def __init__(self, field: Any, network: Network, *, second_order: bool) -> None:
        kind = type(field)
        self.network, self.sees_both = network, kind is SONODE
        self.is_pair = not second_order and kind in (SONODE, HBNODE, GHBNODE)
        self.is_bounded = kind is GHBNODE
        self.xi: Number = field.xi if kind is GHBNODE else None
        self.friction: Number = field.damping if self.is_pair and kind is not SONODE else None

    @staticmethod
    def of(field: Any, *, second_order: bool) -> Equation | None:
        """That of a field; None if it is not known."""
        if type(field) not in FIELDS or field.time_dependent or is_compiled(field) or not is_stock(field):
            return None
        if isinstance(field, (HBNODE, GHBNODE)):
            damping = field.damping
            if change_of_call(field) is not None or (isinstance(damping, Tensor) and damping.dim()):
                return None
            if isinstance(field, GHBNODE) and field.activation is not torch.tanh:
                return None
        layers = layers_of(field.func)
        if layers is None or not any(isinstance(layer, nn.Linear) for layer in layers):
            return None
        return Equation(field, Network(layers), second_order=second_order)

    def __call__(self, x: Tensor, p: Parameters, *, keep: bool) -> Evaluation:
        """The value at x, of the shape of x."""
        residuals: list[Tensor] = []
        h, m = x.chunk(2, 1) if self.is_pair else (x, x)
        value = self.network(x if self.sees_both else h, p.network, residuals if keep else None)
        if p.xi is not None:
            value = value - p.xi * h
        if self.is_pair:
            value = value if p.friction is None else value - p.friction * m
            value = torch.cat((torch.tanh(m) if self.is_bounded else m, value), 1)
        return Evaluation(x, value, residuals)

    def vjp(self, made: Evaluation, gradient: Tensor, p: Parameters, sums: Gradients) -> Tensor:
        """The gradient at x from the one at the value."""
        (h, m), (of_h, g) = (z.chunk(2, 1) if self.is_pair else (z, z) for z in (made.x, gradient))
        back = self.network.vjp(g, p.network, made.residuals, sums.network)
        if p.xi is not None:
            sums.subtract("xi", p.xi, g, h)
            back = back - p.xi * g
        if not self.is_pair:
            return back
        by_m = tanh_vjp(of_h, made.value.chunk(2, 1)[0]) if self.is_bounded else of_h
        if p.friction is not None:
            sums.subtract("friction", p.friction, g, m)
            by_m = by_m - p.friction * g
        if self.sees_both:
            back[:, back.shape[1] // 2 :] += by_m
            return back
        return torch.cat((back, by_m), 1)


class Cell:
    """torch.nn.GRUCell or a tanh RNNCell; the *gates* are what its input gives, for all samples at once."""

    def __init__(self, module: nn.RNNCellBase) -> None:
        self.module, self.is_gru = module, isinstance(module, nn.GRUCell)

    @staticmethod
    def of(module: nn.Module) -> Cell | None:
        """That of a module; None if it is not known."""
        if not isinstance(module, nn.RNNCellBase) or not is_stock(module):
            return None
        return Cell(module) if isinstance(module, nn.GRUCell) or module.nonlinearity == "tanh" else None

    def weights(self) -> list[Tensor | None]:
        """Of the linear layer that sees the state: the weight and the bias."""
        return [self.module.weight_hh, self.module.bias_hh]

    def __call__(self, gates: Tensor, s: Tensor, weights: Weights) -> tuple[Tensor, Rows]:
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
        self, gradient: Tensor, residuals: Rows, weights: Weights, sums: WeightGradients, of_gates: Tensor
    ) -> Tensor:
        """The gradient at s; that at the gates is written into ``of_gates``."""
        weight: Any = weights[0]
        if not self.is_gru:
            s, new = residuals
            of_own = of_gates.copy_(tanh_vjp(gradient, new))
            sums.add(0, s, of_own)
            return of_own @ weight
        s, rz, own, new = residuals
        r, z = rz.chunk(2, 1)
        of_s = gradient * z
        of_new = tanh_vjp(gradient - of_s, new)
        of_rz = aten.sigmoid_backward.default(torch.cat((of_new * own, gradient * (s - new)), 1), rz)
        torch.cat((of_rz, of_new), 1, out=of_gates)
        of_own = torch.cat((of_rz, of_new * r), 1)
        sums.add(0, s, of_own)
        return of_s.addmm_(of_own, weight)


# Steps and gaps


def matrix(method: Method, packed: Tensor, *, error: bool) -> Tensor:
    """What the VJP of steps is made with: C by its rows, (rows, columns, N, 1), of packed coefficients (k, N, 1)."""
    if not isinstance(method, Explicit):
        return packed
    n, s = method.rows, method.evaluations
    rows, columns = s + n - 1 + n * error, n + 1 + s
    c = packed.new_zeros(rows * columns, *packed.shape[1:])
    return c.index_copy_(0, method.places(error).to(c.device), packed).view(rows, columns, *packed.shape[1:])


@dataclass
class Step:
    """A step as it was taken.

    Attributes:
        sizes: of each sample's step, (batch,).
        place: which of the known steps it is, if it is one.
        index: which samples take it, all others have arrived; None for all.
        accepted: which of them moved, (samples, 1); None for all.
        start: the state of the method before it.
        stages: its evaluations; none if they are not kept.
        coefficients: what it was taken with.
    """

    sizes: Array
    place: int | None = None
    index: Tensor | None = None
    accepted: Tensor | None = None
    start: Rows = ()
    stages: list[Evaluation] = field(default_factory=list)
    coefficients: Any = None

    def own(self, state: Rows) -> Rows:
        """The rows of the samples that take it."""
        return state if self.index is None else tuple([x[self.index] for x in state])

    def moved(self, state: Rows, after: Rows) -> Rows:
        """The state of all samples, given that of those that took it."""
        if self.accepted is not None:
            after = tuple([torch.where(self.accepted, y, x) for x, y in zip(self.own(state), after, strict=True)])
        if self.index is None:
            return after
        return tuple([x.index_copy(0, self.index, y) for x, y in zip(state, after, strict=True)])


@dataclass
class Gap:
    """The accepted steps of a gap, and the evaluation at its start."""

    steps: list[Step]
    start: Evaluation | None = None


class Gradients:
    """What a backward pass adds up: gradients of weights, of ξ and γ in the equation, of γ in the method."""

    def __init__(self, fused: Fused, p: Parameters) -> None:
        self.fused, self.by_damping = fused, p.damping.requires_grad
        self.cell, self.network = WeightGradients(p.cell), WeightGradients(p.network)
        self.numbers: dict[str, Tensor] = {}
        self.steps: list[tuple[Array, Rows, Rows]] = []
        self.count = 0

    def subtract(self, name: str, number: Number, gradient: Tensor, factor: Tensor) -> None:
        """Where the product of a number and a factor is subtracted: what that adds to the number's gradient."""
        if isinstance(number, Tensor):
            part = -(gradient * factor).sum()
            self.numbers[name] = self.numbers[name] + part if name in self.numbers else part

    def add_step(self, step: Step, of_rows: Rows, columns: Rows) -> None:
        """The gradients of what the coefficients of a step make, and the columns that they multiply."""
        if self.by_damping:
            self.steps.append((step.sizes, of_rows, columns))
            self.count += len(step.sizes)
            if self.count >= TOGETHER:
                self.settle()

    def settle(self) -> None:
        """Add up the gradient of γ in the method."""
        if not self.steps:
            return
        sizes, of_rows, columns = zip(*self.steps, strict=True)
        self.steps, self.count, method = [], 0, self.fused.method
        g, c = (torch.stack([torch.cat(x) for x in zip(*each, strict=True)]) for each in (of_rows, columns))
        with torch.enable_grad():
            gamma = self.fused.gamma.detach().requires_grad_()
            made = method.packed(torch, gamma, torch.from_numpy(np.concatenate(sizes)), error=False)
            if isinstance(method, Explicit):
                products = torch.einsum("rnw,cnw->rcn", g, c).flatten(0, 1)[method.places(False).to(g.device)]
            else:  # decays and weights of the kicks
                made, products = made[len(g) + 1 :], (g.repeat(2, 1, 1) * c).sum(-1)
            (total,) = torch.autograd.grad(made, gamma, products.to(made))
        total = total.to(g.device)
        self.numbers["damping"] = self.numbers["damping"] + total if "damping" in self.numbers else total


class Fused:
    """Solves gaps between times (batch, T), and updates states by samples between them, without a graph.

    Attributes:
        cell: what sees the samples; None if it is not known.
        nfe: the evaluations of each gap.
    """

    def __init__(self, layer: Any, s: Tensor, equation: Equation, times: Tensor, solver: Solver) -> None:
        self.equation, self.cell, self.residual = equation, Cell.of(layer.cell), layer.residual
        self.layer, self.solver = layer, solver
        self.settings = settings = resolve(solver.settings, layer.field)
        assert settings.method is not None
        self.t = times.detach().to("cpu", torch.float64)
        self.lengths: Array = np.ascontiguousarray(self.t.diff().T.numpy())  # (gaps, batch)
        self.nfe = [NFE() for _ in self.lengths]
        self.rests = (self.lengths == 0).all(1)
        self.sizes: Array = self.lengths
        self.grid: list[range] | None = None
        if settings.steps is not None:
            count = np.full(self.lengths.shape, settings.steps)
            if solver.step_size is not None:
                count = steps_needed(self.t, solver.step_size).T.numpy().astype(int)
            most = count.max(1).tolist() if count.size else [1] * len(count)
            sizes = [
                np.where(np.arange(k)[:, None] < n, length / n, 0.0)
                for length, n, k in zip(self.lengths, count, most, strict=True)
            ]
            self.sizes = np.concatenate([self.lengths[:0], *sizes])
            self.grid = [range(*ends) for ends in itertools.pairwise([0, *itertools.accumulate(most)])]
        state = tuple(s.detach().chunk(2, 1)) if layer.second_order else s.detach()
        second_order = settings.method in SECOND_ORDER
        self.term = ODETerm(layer.field, state, Tally(layer.field, NFE()), second_order=second_order, lanes=len(s))
        self.damping = torch.as_tensor(self.term.damping, dtype=torch.float64, device=s.device)
        self.problem = self._problem(0)
        self.method, self.longest = self.problem.method, self.problem.longest_step
        self.number, self.error = self.problem.number or 0.0, self.grid is None
        self.gamma = torch.tensor(self.number, dtype=torch.float64)
        self.carries, self.no_times = self.method.carries, [s] * self.method.evaluations
        self.is_bounded = getattr(self.method, "activation", None) is not None
        self._group: tuple[int, list[tuple[Tensor, Tensor]]] = (-1, [])

    @staticmethod
    def of(layer: Any, s: Tensor, times: Tensor, solver: Solver) -> Fused | None:
        """What solves the gaps of a layer; None where the plain form does.

        The plain form does where the network is not known, the method is not native or has options, or something
        watches or changes what is computed: transforms, hooks, autocast, records of steps, gradients of times.
        """
        settings = resolve(solver.settings, layer.field)
        if settings.method not in METHODS or settings.options or settings.gradient not in ("direct", "checkpoint"):
            return None
        if settings.steps is None and not (settings.per_sample and s.is_cpu):  # whose steps the host chooses
            return None
        if _is_watched(s, times) or (settings.compile and not s.is_cpu):
            return None
        second_order = settings.method in SECOND_ORDER
        equation = Equation.of(layer.field, second_order=second_order)
        if equation is None:
            return None
        n = layer.hidden_size
        weights = [z for z in (*equation.network.weights(), *layer.cell.parameters()) if z is not None]
        alike = all(z.dtype == s.dtype and z.device == s.device for z in weights)
        if not (alike and s.dtype in (torch.float32, torch.float64)):
            return None
        if not equation.network.maps(n * (1 + equation.sees_both), n):
            return None
        if solver.step_size is not None and not float(_most(times, solver.step_size)) <= settings.max_steps:
            return None
        checked_state(layer.field, tuple(s.chunk(2, 1)) if layer.second_order else s, Snapshot(layer.field))
        check_precision(settings, s.dtype)
        return Fused(layer, s, equation, times, solver)

    def read(self, x: Tensor, seen: Tensor | None, s: Tensor, first: int) -> tuple[Tensor, Tensor] | None:
        """The states before and after each sample, (batch, T, S); None where a grid's are not finite.

        Arguments:
            x: what the cell is fed, (batch, T, inputs).
            seen: which samples it sees, (batch, T); None for all.
            s: the state at the beginning.
            first: gaps before the first sample, 0 or 1.
        """
        assert self.cell is not None
        gates = linear(x.transpose(0, 1).contiguous(), self.cell.module.weight_ih, self.cell.module.bias_ih)
        masks = None
        if seen is not None and not (seen.is_cpu and bool(seen.all())):
            masks = list(seen.T.unsqueeze(-1).unbind(0))
        before, after = self._run(s, gates, range(first - 1, x.shape[1] + first - 1), masks)
        if self.grid is not None and not bool(torch.isfinite(after.detach()).all()):
            return None
        return before.transpose(0, 1).contiguous(), after.transpose(0, 1).contiguous()

    def __call__(self, gap: int, s: Tensor) -> Tensor:
        """The state at the end of a gap from that at its beginning."""
        end = self._run(s, None, range(gap, gap + 1), None)[0][0]
        if self.grid is not None and not bool(torch.isfinite(end.detach()).all()):
            plain = Gaps(
                self.layer.field, s, self.t[:, gap : gap + 2], self.solver, second_order=self.layer.second_order
            )
            return plain(0, s)  # which says where
        return end

    def _run(self, s: Tensor, gates: Tensor | None, gaps: range, masks: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        keep_freed_memory(s.device)
        equation, of_cell = self.equation, [] if gates is None or self.cell is None else self.cell.weights()
        inputs = (s, gates, self.damping, equation.xi, equation.friction, *of_cell, *equation.network.weights())
        # a parameter whose p.data is replaced afterwards takes its saved self with it, a view stays as it was
        given = [z.view_as(z) if isinstance(z, Tensor) and z.is_leaf else z for z in inputs]
        run = Run(self, gaps, len(of_cell), masks, torch.is_grad_enabled(), self.settings.gradient == "checkpoint")
        for gap in gaps:
            if gap >= 0:
                self.nfe[gap].keeps_graph = run.needs_gradient and not run.recomputes
        before, after = _Function.apply(run, *given)
        return before, before if after is None else after

    def _problem(self, gap: int) -> Problem:
        assert self.settings.method is not None
        return Problem(self.term, METHODS[self.settings.method], self.t[:, gap : gap + 2], self.settings, end_only=True)

    # Forwards

    def solve(self, gap: int, s: Tensor, p: Parameters, known: list[Step] | None, *, keep: bool) -> tuple[Tensor, Gap]:
        """The state at the end of a gap, and how it was reached: by known steps, a grid, or the error."""
        if self.rests[gap]:
            return s, Gap([])
        found, state = Gap([]), self.rows(s)
        self.term.tally = Tally(self.term.field, self.nfe[gap])
        if self.carries:
            made = self.equation(state[0], p, keep=keep)
            found.start, state = made if keep else None, (*state, made.value)
            self.term.tally.add("evaluation")
        if known is None and self.grid is None:
            return torch.cat(self._adaptive(gap, state, p, found.steps, keep=keep)[: self.method.rows], 1), found
        for step in known or [Step(self.sizes[place], place) for place in (self.grid or [])[gap]]:
            after, _, step = self._take(replace(step), step.own(state), p, keep=keep)
            state = step.moved(state, after)
            found.steps.append(step)
        self.term.tally.add("evaluation", len(found.steps) * self.method.evaluations)
        if known is None:
            self.term.tally.add("accepted", len(found.steps))
        return torch.cat(state[: self.method.rows], 1), found

    def _adaptive(self, gap: int, state: Rows, p: Parameters, steps: list[Step], *, keep: bool) -> Rows:
        """The state of the method at the end of a gap; the accepted steps are appended to ``steps``."""
        settings, length, tally, first = self.settings, self.lengths[gap], self.term.tally, None
        h, f = self.problem.norms((state[0], state[-1]))
        with np.errstate(all="ignore"):
            size = first_size(h, f, settings.rtol, settings.atol, self.method.rows, self.method.error_order or 0)
            is_whole = (length <= 1.05 * np.minimum(size, self.longest)).all()
        if is_whole:
            first = self._take(Step(length, gap), state, p, keep=keep)
            if (self.problem.ratio(state, first[0], first[1]) <= 1.0).all():
                tally.add("evaluation", self.method.evaluations)
                tally.add("accepted")
                steps.append(first[2])
                return first[0]
        control = AdaptiveSteps(self._problem(gap), state)
        while (attempt := control.next()) is not None:
            if first is None or not np.array_equal(attempt.size, length):
                first = self._attempt(attempt.size, state, p, keep=keep)
            (after, error, step), first = first, None
            tally.add("evaluation", self.method.evaluations)
            full, errors = after, error
            if step.index is not None:
                full = tuple([x.index_copy(0, step.index, y) for x, y in zip(state, after, strict=True)])
                errors = error.new_zeros(len(error), *state[0].shape).index_copy_(1, step.index, error)
            accepted = control.judge(attempt, state, full, errors)
            if accepted.any():
                if not accepted.all():
                    mask = torch.from_numpy(accepted).unsqueeze(1)
                    full = tuple([torch.where(mask, y, x) for x, y in zip(state, full, strict=True)])
                    step.accepted = mask if step.index is None else mask[step.index]
                state = full
                steps.append(step)
        return state

    def _attempt(self, sizes: Array, state: Rows, p: Parameters, *, keep: bool) -> tuple[Rows, Any, Step]:
        """A step of those samples that have not arrived, if they are few."""
        moving, index = sizes > 0, None
        if moving.sum() <= FEW * len(sizes):
            index, sizes = torch.from_numpy(np.flatnonzero(moving)), sizes[moving]
        step = Step(sizes, index=index)
        return self._take(step, step.own(state), p, keep=keep)

    def _take(self, step: Step, state: Rows, p: Parameters, *, keep: bool) -> tuple[Rows, Any, Step]:
        """The state after a step, its error, and the step with what its VJP needs."""
        packed, c = self._coefficients(step, p)
        stages: list[Evaluation] = []

        def evaluate(_: Tensor, x: Tensor) -> Tensor:
            made = self.equation(x, p, keep=keep)
            stages.append(made)
            return made.value

        given = self.method.unpack(packed, 2, error=self.error)
        found = self.method.step(state, given, self.no_times, evaluate, error=self.error)
        if keep:
            step.start, step.stages, step.coefficients = state, stages, c
        return found.state, found.error, step

    def _coefficients(self, step: Step, p: Parameters) -> tuple[Tensor, Tensor]:
        """Those of a step, packed and as a matrix; of known steps they are made for many at once."""
        if torch.is_grad_enabled():  # differentiable in γ
            packed = self.method.packed(torch, p.damping.cpu(), torch.from_numpy(step.sizes), error=self.error)
            return packed.to(p.s), packed
        if step.place is None:
            return self._made(step.sizes, p.s)
        together = max(1, TOGETHER // max(1, self.sizes.shape[1]))
        group, index = divmod(step.place, together)
        if self._group[0] != group:
            sizes = self.sizes[group * together : (group + 1) * together]
            packed, c = self._made(sizes.ravel(), p.s)
            lanes = sizes.shape[1]
            self._group = (group, list(zip(packed.split(lanes, -1), c.split(lanes, -2), strict=True)))
        return self._group[1][index]

    def _made(self, sizes: Array, like: Tensor) -> tuple[Tensor, Tensor]:
        if len(sizes) > FEW_SIZES:
            packed = self.method.packed(torch, self.gamma, torch.from_numpy(sizes), error=self.error).to(like)
        else:
            with np.errstate(all="ignore"):
                packed = torch.from_numpy(self.method.packed(np, self.number, sizes, error=self.error)).to(like)
        return packed, matrix(self.method, packed.unsqueeze(-1), error=self.error)

    # Backwards

    def rows(self, s: Tensor) -> Rows:
        """Those of the method, (batch, w)."""
        return tuple(s.chunk(2, 1)) if self.method.rows == 2 else (s,)

    def vjp(self, gap: Gap, of_s: Tensor, p: Parameters, sums: Gradients) -> Tensor:
        """The gradient at the beginning of a gap from that at its end."""
        g, of_f = self.rows(of_s), None
        for step in reversed(gap.steps):
            g, of_f = self._step_vjp(step, g, of_f, p, sums)
        if gap.start is not None and of_f is not None:
            g = (g[0] + self.equation.vjp(gap.start, of_f, p, sums), *g[1:])
        return torch.cat(g, 1) if len(g) > 1 else g[0]

    def _step_vjp(
        self, step: Step, g: Rows, of_f: Tensor | None, p: Parameters, sums: Gradients
    ) -> tuple[Rows, Tensor | None]:
        """The gradients at the rows and at the value that is carried, before a step from those after it."""
        moves, index, after = step.accepted, step.index, step.own(g)
        after_f = of_f if of_f is None or index is None else of_f[index]
        moved, moved_f = after, after_f
        if moves is not None:
            moved = tuple([torch.where(moves, x, 0.0) for x in after])
            moved_f = None if after_f is None else torch.where(moves, after_f, 0.0)
        vjp = self._explicit_vjp if isinstance(self.method, Explicit) else self._splitting_vjp
        before, before_f = vjp(step, moved, moved_f, p, sums)
        if moves is not None:
            before = tuple([x + torch.where(moves, 0.0, y) for x, y in zip(before, after, strict=True)])
            if before_f is not None and after_f is not None:
                before_f = before_f + torch.where(moves, 0.0, after_f)
        if index is not None and before_f is not None:
            before = tuple([x.index_copy(0, index, y) for x, y in zip(g, before, strict=True)])
            before_f = (torch.zeros_like(g[0]) if of_f is None else of_f).index_copy(0, index, before_f)
        return before, before_f

    def _explicit_vjp(
        self, step: Step, g: Rows, of_f: Tensor | None, p: Parameters, sums: Gradients
    ) -> tuple[Rows, Tensor | None]:
        """From the last row of C to the first, each of which is a sum of columns."""
        n, s, by_row = self.method.rows, self.method.evaluations, step.coefficients.unbind(0)
        of_rows = [g[1]] if n == 2 else []
        columns = by_row[s] * g[1] if n == 2 else None
        for i in reversed(range(s)):
            is_last = i == s - 1
            of_x = g[0] if is_last else None
            of_value = None if columns is None else columns[n + 1 + i]
            if is_last and of_f is not None:
                of_value = of_f if of_value is None else of_value + of_f
            if of_value is not None:
                back = self.equation.vjp(step.stages[i], of_value, p, sums)
                of_x = back if of_x is None else of_x + back
            assert of_x is not None  # a later stage or the carried value gives it one
            of_rows.append(of_x)
            columns = by_row[i] * of_x if columns is None else columns.addcmul_(by_row[i], of_x)
        if n == 2:
            sums.add_step(step, tuple(of_rows[::-1]), (*step.start, *(made.value for made in step.stages)))
        assert columns is not None
        return columns[:n].unbind(0), columns[n]

    def _splitting_vjp(
        self, step: Step, g: Rows, of_f: Tensor | None, p: Parameters, sums: Gradients
    ) -> tuple[Rows, Tensor | None]:
        """From the last drift and kick to the first."""
        k, c = self.method.evaluations, step.coefficients.unbind(0)
        drifts, decays, weights = c[: k + 1], c[k + 1 : 2 * k + 1], c[2 * k + 1 :]
        forces, momenta = [made.value for made in step.stages], [step.start[1]]
        for decay, weight, force in zip(decays, weights, forces, strict=True):
            momenta.append(torch.addcmul(decay * momenta[-1], weight, force))
        (of_h, of_m), kicked = g, []
        for i in reversed(range(k)):
            of_m = torch.addcmul(of_m, drifts[i + 1], self._speed_vjp(of_h, momenta[i + 1]))
            kicked.append(of_m)
            of_h = of_h + self.equation.vjp(step.stages[i], weights[i] * of_m, p, sums)
            of_m = decays[i] * of_m
        sums.add_step(step, tuple(kicked[::-1]), (*momenta[:k], *forces))
        return (of_h, torch.addcmul(of_m, drifts[0], self._speed_vjp(of_h, momenta[0]))), None

    def _speed_vjp(self, of_h: Tensor, m: Tensor) -> Tensor:
        return tanh_vjp(of_h, torch.tanh(m)) if self.is_bounded else of_h


def _most(times: Tensor, step_size: float) -> Tensor:
    needed = steps_needed(times.detach().double(), step_size)
    return needed.max() if needed.numel() else torch.ones(())


def _is_watched(s: Tensor, times: Tensor) -> bool:
    """Whether something watches or changes what is computed."""
    if _torch.is_transformed() or _torch.double_backward_enabled():
        return True
    if is_tracing() or open_records or torch.is_autocast_enabled(s.device.type):
        return True
    return _torch.has_global_hooks() or (times.requires_grad and torch.is_grad_enabled())


# The whole as one function


@dataclass
class Run:
    """Gaps one after the other, and a sample after each if there is a cell.

    Attributes:
        fused: solves them.
        gaps: their numbers; -1 where there is none before the first sample.
        of_cell: how many of the weights are the cell's.
        masks: which samples the cell sees, for each a (batch, 1); None for all.
        needs_gradient: whether there may be a backward pass.
        recomputes: whether that takes the steps again, about the root of T gaps at a time.
        steps: those that were taken, without what their VJP needs.
    """

    fused: Fused
    gaps: range
    of_cell: int
    masks: list[Tensor] | None
    needs_gradient: bool
    recomputes: bool
    steps: list[list[Step]] = field(default_factory=list)

    def parameters(self, given: Sequence[Any]) -> Parameters:
        """The tensors of a function, by name."""
        s, gates, damping, xi, friction = given[:5]
        return Parameters(s, gates, damping, xi, friction, given[5 : 5 + self.of_cell], given[5 + self.of_cell :])

    def segments(self) -> list[range]:
        """Samples of which the backward pass takes the steps again at a time."""
        count = len(self.gaps)
        size = max(1, math.isqrt(max(count - 1, 0)) + 1) if self.recomputes else count
        return [range(first, min(first + size, count)) for first in range(0, count, size)]

    def forward(self, s: Tensor, p: Parameters, samples: range, *, keep: bool, again: bool = False) -> list[Any]:
        """For each sample the state before it, that after, and residuals."""
        found = []
        for i in samples:
            known, gap = self.steps[i] if again else None, Gap([])
            if self.gaps[i] >= 0 and not (again and not known):
                s, gap = self.fused.solve(self.gaps[i], s, p, known, keep=keep)
            if not again:
                bare = [Step(step.sizes, step.place, step.index, step.accepted) for step in gap.steps]
                self.steps.append(bare)
            before = s
            residuals: Rows = ()
            if p.gates is not None and self.fused.cell is not None:
                new, residuals = self.fused.cell(p.gates[i], s, p.cell)
                new = s + new if self.fused.residual else new
                s = new if self.masks is None else torch.where(self.masks[i], new, s)
            found.append((before, s, (gap, residuals) if keep else None))
        return found

    def backward(
        self, p: Parameters, starts: Rows, grads: Sequence[Tensor | None], kept: list[Any] | None
    ) -> list[Any]:
        """The gradients of the tensors, from the last sample to the first."""
        fused, sums, of_s = self.fused, Gradients(self.fused, p), torch.zeros_like(p.s)
        of_gates = None if p.gates is None else torch.empty_like(p.gates)
        for samples, start in reversed(list(zip(self.segments(), starts, strict=True))):
            found = kept or [z[2] for z in self.forward(start, p, samples, keep=True, again=True)]
            for i, (gap, residuals) in zip(reversed(samples), reversed(found), strict=True):
                if of_gates is not None and fused.cell is not None:
                    of_s = of_s if grads[1] is None else of_s + grads[1][i]
                    mask = None if self.masks is None else self.masks[i]
                    of_new = of_s if mask is None else torch.where(mask, of_s, 0.0)
                    by_cell = fused.cell.vjp(of_new, residuals, p.cell, sums.cell, of_gates[i])
                    if fused.residual:
                        by_cell = by_cell + of_s
                    elif mask is not None:
                        by_cell = by_cell + torch.where(mask, 0.0, of_s)
                    of_s = by_cell
                of_s = of_s if grads[0] is None else of_s + grads[0][i]
                of_s = fused.vjp(gap, of_s, p, sums)
        sums.settle()
        numbers = [sums.numbers.get(name) for name in ("damping", "xi", "friction")]
        return [of_s, of_gates, *numbers, *sums.cell.found(), *sums.network.found()]

    def reference(
        self, given: Sequence[Any], grads: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients by autograd, from the same steps; they can be differentiated again."""
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            views = [z.view_as(z) if isinstance(z, Tensor) else z for z in given]
            p = self.parameters(views)
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
        p, samples = run.parameters(given), range(len(run.gaps))
        keep = (
            run.needs_gradient and not run.recomputes and any(isinstance(z, Tensor) and z.requires_grad for z in given)
        )
        before, after, residuals = zip(*run.forward(p.s, p, samples, keep=keep), strict=True)
        ctx.run, ctx.kept = run, list(residuals) if keep else None
        ctx.numbers = [None if isinstance(z, Tensor) else z for z in given]
        ctx.set_materialize_grads(False)
        starts = [after[part.start - 1] for part in run.segments()[1:]]
        ctx.count = len(given)
        ctx.save_for_backward(*[z if isinstance(z, Tensor) else None for z in given], *starts)
        return torch.stack(before), None if p.gates is None else torch.stack(after)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, starts = saved[: ctx.count], saved[ctx.count :]
        given = [z if number is None else number for z, number in zip(tensors, ctx.numbers, strict=True)]
        p = ctx.run.parameters(given)
        with torch.autocast(p.s.device.type, enabled=False):  # as in the forward pass
            many = any(grad is not None and _torch.is_batched(grad) for grad in grads)
            if torch.is_grad_enabled() or many:
                return None, *ctx.run.reference(given, grads, ctx.needs_input_grad[1:])
            kept = ctx.kept
            if not _torch.keeps_graph():
                ctx.kept = None
            return None, *ctx.run.backward(p, (p.s, *starts), grads, kept)
