"""The quadratic model of a loss: products with the damped Gauss-Newton matrix, by a stored double backward pass.

J^T u is linear in u. So its graph, made once, gives J v as its derivative with respect to u in the direction v: a pass
through the graph of the backward pass. One more pass, through the graph of the outputs, gives J^T w.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hbnode._torch import may_look, random_state, set_random_state
from hbnode.optim.double_backward import (
    check_checkpoints,
    refuse,
    refuse_constants,
    translate_errors,
    twice_differentiable,
)
from hbnode.optim.losses import LOSSES

REPEATS = 1e-3  # of two losses at the same parameters, which differ by rounding at most
PRECISION = 0.01  # of J^T and J being transposes, which rounding to float32 stays well below
EXPONENT = 0.75  # of the preconditioner
_RETURNS = "(outputs, targets), (outputs, targets, hidden) or (outputs, targets, hidden, weight)"


def flatten(parts: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Return one vector of tensors shaped like the parameters, in their dtype; None is zeros."""
    pairs = zip(parts, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if z is None else z.to(p)).reshape(-1) for z, p in pairs])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector in the shapes of the parameters."""
    return list(map(Tensor.view_as, vector.split(list(map(torch.numel, like))), like))


@contextmanager
def assign(parameters: Sequence[Tensor], vector: Tensor) -> Iterator[None]:
    """Set the parameters within the context. Graphs made before keep their versions, and are valid again after it."""
    before = list(map(torch.clone, parameters))
    try:
        for parameter, part in zip(parameters, unflatten(vector, parameters), strict=True):
            parameter.data.copy_(part)
        yield
    finally:
        for parameter, part in zip(parameters, before, strict=True):
            parameter.data.copy_(part)


@dataclass(frozen=True)
class Batch:
    """What a closure returned, checked.

    Attributes:
        outputs: of the model, (cases, ...) or with the cases in another dimension.
        targets: what they should be.
        hidden: what structural damping acts on, each with its metric or None.
        weight: of the losses, or None.
        cases: their number.
    """

    outputs: Tensor
    targets: Tensor
    hidden: list[tuple[Tensor, Tensor | None]]
    weight: Tensor | None
    cases: int


class Objective:
    """The loss that a closure evaluates, with the same random numbers in each call.

    Arguments:
        closure: the user's.
        name: how errors call it.
        loss: "mse", "bce" or "cross_entropy".
        case_dim: the dimension of the outputs that counts cases.
        parameters: of the model.
        theta: their values before the step.
    """

    def __init__(
        self, closure: Callable[[], Any], name: str, loss: str, case_dim: int, parameters: list[Tensor], theta: Tensor
    ) -> None:
        if not callable(closure):
            raise TypeError(
                f"{name} must be a function without arguments that returns {_RETURNS}, got "
                f"{type(closure).__name__}. Fix: lambda: (model(x), y)."
            )
        self.closure, self.name, self.kind, self.case_dim = closure, name, LOSSES[loss], case_dim
        self.parameters, self.theta = parameters, theta
        self.random_state: tuple[Tensor, ...] | None = None
        self.targets: Tensor | None = None
        self.differentiates = False  # whether the closure itself takes derivatives

    def batch(self) -> Batch:
        """Call the closure, and check what it returns."""
        state = self.random_state
        self.random_state = random_state(self.theta.device) if state is None else state
        with set_random_state(state, self.theta.device):
            batch = self._as_batch(self.closure())
        targets = self.targets = batch.targets if self.targets is None else self.targets
        if targets.shape != batch.targets.shape or not (
            torch.equal(targets, batch.targets) or torch.equal(targets.nan_to_num(), batch.targets.nan_to_num())
        ):
            raise ValueError(
                f"{self.name}() returned other targets than when it was first called in this step, which evaluates one "
                f"batch several times. Fix: draw the batch before the step, x, y = next(batches), and then "
                "optimizer.step(lambda: (model(x), y))."
            )
        return batch

    def losses(self, batch: Batch) -> Tensor:
        """Return the losses of positions."""
        losses = self.kind.losses(batch.outputs, batch.targets)
        return losses if batch.weight is None else losses * batch.weight

    def loss(self, batch: Batch) -> Tensor:
        """Return the sum over positions and features, averaged over cases, added up in float64."""
        return self.losses(batch).sum(dtype=torch.float64) / batch.cases

    def loss_at(self, vector: Tensor) -> float:
        """Return the loss at theta plus a vector; infinity if it is not finite."""
        with assign(self.parameters, self.theta + vector), torch.set_grad_enabled(self.differentiates):
            try:
                loss = float(self.loss(self.batch()).detach())
            except RuntimeError as error:
                if self.differentiates or "does not require grad" not in str(error):
                    raise
                self.differentiates = True
                return self.loss_at(vector)
        return loss if math.isfinite(loss) else math.inf

    def check_repeats(self) -> None:
        """Refuse a closure that is another function in each call."""
        zero = torch.zeros_like(self.theta)
        one, other = self.loss_at(zero), self.loss_at(zero)
        if math.isfinite(one) and not abs(one - other) <= REPEATS * abs(one):
            raise ValueError(
                f"{self.name}() gives the loss {one:g} and then {other:g}, with the same parameters. Fix: draw noise, "
                "and carry states from batch to batch, outside of it; torch's default generators are set back, others "
                "are not."
            )

    def check_graph(self, batch: Batch, damps: bool) -> None:
        """Refuse outputs and hidden states that do not depend on the parameters."""
        if damps and not batch.hidden:
            raise ValueError(
                f"structural_damping > 0 needs hidden states, and {self.name}() returned none. Fix: return outputs, "
                "targets, hbnode.optim.tanh_hidden(h) with the states h of a tanh RNN, or structural_damping=0.0."
            )
        if batch.targets.requires_grad:
            fix = "targets.detach(); those of the model itself are made before the step"
            raise ValueError(
                f"the targets of {self.name}() have a graph. Fix: "
                f"{fix if batch.outputs.requires_grad else 'outputs first, then targets'}."
            )
        if not batch.outputs.requires_grad or (damps and not all(z.requires_grad for z, _ in batch.hidden)):
            raise ValueError(
                f"the {'hidden' if batch.outputs.requires_grad else 'outputs'} of {self.name}() have no graph to the "
                "parameters. Fix: leave out torch.no_grad(), torch.inference_mode(), .detach() and .data."
            )

    def _as_batch(self, returned: object) -> Batch:
        if not isinstance(returned, (tuple, list)) or not 2 <= len(returned) <= 4:
            got = f"{len(returned)} of them" if isinstance(returned, (tuple, list)) else type(returned).__name__
            fix = (
                f"let {self.name} return (model(x), y); the optimizer computes the loss itself, and calls no backward()"
            )
            raise TypeError(f"{self.name}() must return {_RETURNS}, got {got}. Fix: {fix}.")
        outputs, targets, hidden, weight = (*returned, None, None)[:4]
        for name, z in (("outputs", outputs), ("targets", targets)):
            if not isinstance(z, Tensor):
                fix = "output, state = model(x), and return output" if isinstance(z, tuple) else "pass a tensor"
                raise TypeError(f"the {name} of {self.name}() must be a tensor, got {type(z).__name__}. Fix: {fix}.")
        if not outputs.is_floating_point():
            raise TypeError(f"the outputs of {self.name}() must be real numbers, got {outputs.dtype}. Fix: .float().")
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        positions = outputs.shape[: outputs.dim() - self.kind.class_dims]
        if not -outputs.dim() <= self.case_dim < outputs.dim() or self.case_dim % outputs.dim() >= len(positions):
            raise ValueError(
                f"case_dim={self.case_dim} must be a dimension of the outputs that counts cases, and the outputs are "
                f"{tuple(outputs.shape)}. Fix: case_dim=0, and a first dimension for the cases: outputs[None] of one."
            )
        if weight is not None:
            weight = _as_weight(weight, positions, "the weight").to(outputs.dtype)
            if targets.is_floating_point() and targets.shape == outputs.shape:
                targets = targets.where(weight != 0, 0.0)  # 0 * NaN is NaN
        self.kind.check(outputs, targets)
        cases = outputs.shape[self.case_dim]
        if cases == 0:
            raise ValueError(
                f"the outputs of {self.name}() have no cases: they are {tuple(outputs.shape)}. Fix: leave empty "
                "batches out."
            )
        return Batch(outputs, targets, _as_hidden(hidden), weight, cases)


def _as_weight(weight: object, shape: Sequence[int], name: str) -> Tensor:
    """Return a weight, finite and >= 0, that broadcasts to a shape."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(weight).__name__}. Fix: torch.tensor(weight).")
    try:
        is_broadcast = torch.broadcast_shapes(weight.shape, shape) == tuple(shape)
    except RuntimeError:
        is_broadcast = False
    if not is_broadcast:
        raise ValueError(
            f"{name} must broadcast to {tuple(shape)}, got {tuple(weight.shape)}. Fix: weight.unsqueeze(-1) if it "
            "lacks the features."
        )
    weight = weight.detach()
    if weight.numel() and not bool(((weight >= 0) & weight.isfinite()).all()):
        low, high = weight.min().item(), weight.max().item()
        raise ValueError(
            f"{name} must be finite numbers >= 0, got {low:g} to {high:g}. Fix: weight.clamp(min=0, max=...)."
        )
    return weight


def _as_hidden(hidden: object) -> list[tuple[Tensor, Tensor | None]]:
    """Return pairs of what structural damping acts on and its metric."""
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for entry in hidden if isinstance(hidden, list) else [] if hidden is None else [hidden]:
        z, metric = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
        if not isinstance(z, Tensor) or not (metric is None or isinstance(metric, Tensor)):
            raise TypeError(
                "hidden must be a tensor, a pair (tensor, weight) or a list of these, got "
                f"{type(entry).__name__}. Fix: hbnode.optim.tanh_hidden(h) for the outputs h of a tanh RNN."
            )
        if metric is not None and metric.requires_grad:
            raise ValueError(
                "the second of a pair of hidden is a weight, and has a graph. Fix: a list [h, c] of two "
                "states, or weight.detach()."
            )
        pairs.append((z, None if metric is None else _as_weight(metric, z.shape, "the weight of hidden")))
    return pairs


class QuadraticModel:
    """phi(d) = g^T d + d^T A d / 2, A = J^T H_L J + lambda mu J_h^T diag(w) J_h + lambda I, for fixed parameters.

    Arguments:
        objective: of the curvature batch.
        damping: lambda.
        structural: lambda mu.
        checks: whether to refuse a model some of whose gradients have no graph: J and J^T would not fit together.
    """

    batch: Batch | None
    versions: list[int]  # of the parameters when the graph was made
    outputs: list[Tensor]
    u: list[Tensor]
    gradient: Tensor  # J^T u

    def __init__(self, objective: Objective, damping: float, structural: float, checks: bool) -> None:
        self.objective, self.parameters, self.theta = objective, objective.parameters, objective.theta
        self.damping, self.structural, self.checks = damping, structural, checks
        self.release()

    def linearize(self, batch: Batch | None = None) -> Batch:
        """Make the graph of J^T u, of a batch that has a graph or of a new one, unless there is one."""
        versions = [parameter._version for parameter in self.parameters]
        if batch is None:
            if self.batch is not None and versions == self.versions:
                return self.batch
            with torch.enable_grad(), twice_differentiable(self.theta.device):
                batch = self.objective.batch()
        kind, damps = self.objective.kind, self.structural > 0
        self.objective.check_graph(batch, damps)
        for name, z in (("outputs", batch.outputs), ("targets", batch.targets)):
            if not bool(z.isfinite().all()):
                raise FloatingPointError(
                    f"the {name} of {self.objective.name}() are not finite. Fix: look for such values in the inputs, "
                    "targets and parameters; smaller initial weights."
                )
        weight: Tensor | float = 1.0
        if batch.weight is not None:
            weight = batch.weight.unsqueeze(-1) if kind.class_dims else batch.weight
        self.hessian, self.factor = kind.hessian(batch.outputs, batch.targets), weight / batch.cases
        self.batch, self.versions, self.outputs, self.metrics = batch, versions, [batch.outputs], []
        for z, metric in batch.hidden if damps else ():
            self.outputs.append(z)
            self.metrics.append(self.structural / batch.cases * (1.0 if metric is None else metric))
        generator = torch.Generator().manual_seed(0)
        self.u = list(map(torch.zeros_like, self.outputs))  # J^T u has the same derivative at any u
        for z in self.u:
            (z.copy_(torch.randn(z.shape, generator=generator)) if self.checks else z).requires_grad_()
        refused = refuse_constants(self.outputs) if self.checks else nullcontext()
        with torch.enable_grad(), translate_errors(), refused:
            grads = torch.autograd.grad(self.outputs, self.parameters, self.u, create_graph=True, allow_unused=True)
            self.gradient = flatten(grads, self.parameters)
        if not all(map(torch.is_tensor, grads)):
            check_checkpoints(self.outputs)
        if self.checks:
            self._check_transpose(grads)
        return batch

    def _check_transpose(self, grads: Sequence[Tensor | None]) -> None:
        """Refuse J and J^T that do not fit: with v = J^T w, the squared norm of v is the product of w and J v."""
        w = [z.detach() for z in self.u]
        v = self.vjp(w)
        squared = float(torch.dot(v, v))
        if not math.isfinite(squared):
            raise FloatingPointError(
                "the Gauss-Newton matrix overflows, or a derivative of the model is not finite. Fix: look for values "
                "that are not finite in the inputs of the curvature batch; smaller initial weights; float64."
            )
        for grad, part in zip(grads, unflatten(v, self.parameters), strict=True):
            if grad is not None and not grad.requires_grad and bool(part.any()):
                refuse("a hook of a parameter takes the graph from its gradient")
        product = sum(float((a * b).sum()) for a, b in zip(w, self.jvp(v), strict=True))
        if not abs(product - squared) <= PRECISION * squared:
            refuse("the derivative of its backward pass is wrong")

    def jvp(self, vector: Tensor) -> list[Tensor]:
        """Return J v for each output."""
        with translate_errors():
            return list(torch.autograd.grad(self.gradient, self.u, vector, retain_graph=True, materialize_grads=True))

    def vjp(self, grads: Sequence[Tensor]) -> Tensor:
        """Return J^T w of all outputs together, flat."""
        parts = torch.autograd.grad(self.outputs, self.parameters, grads, retain_graph=True, allow_unused=True)
        return flatten(parts, self.parameters)

    def product(self, vector: Tensor) -> Tensor:
        """Return A v."""
        self.linearize()
        z, *hidden = self.jvp(vector)
        weighted = [self.hessian(z) * self.factor, *map(torch.mul, hidden, self.metrics)]
        return self.vjp(weighted).add_(vector, alpha=self.damping)

    def undamped_curvature(self, vector: Tensor) -> float:
        """Return v^T J^T H_L J v."""
        self.linearize()
        z = self.jvp(vector)[0]
        return float((z * self.hessian(z) * self.factor).sum())

    def release(self) -> None:
        """Free the graph; it is made again when it is needed."""
        self.batch, self.versions = None, []
        self.outputs, self.u, self.gradient = [], [], self.theta

    def preconditioner(self, samples: int) -> Tensor:
        """Return (mean of g_n^2 + lambda)^0.75, of Martens (2010), section 4.7, g_n the gradient of case n.

        The square of sum_n s_n g_n, with random signs s_n, has the sum of g_n^2 as its mean. The signs are the same in
        every step, so that runs repeat.

        Arguments:
            samples: how many sums are drawn.
        """
        batch = self.linearize()
        with torch.enable_grad():
            losses = self.objective.losses(batch).movedim(self.objective.case_dim, 0)
            losses = losses.reshape(len(losses), -1).sum(1)
        generator = torch.Generator().manual_seed(0)
        squares = torch.zeros_like(self.theta)
        for _ in range(samples):
            signs = (2 * torch.randint(2, losses.shape, generator=generator) - 1).to(losses)
            parts = torch.autograd.grad(losses, self.parameters, signs, retain_graph=True, allow_unused=True)
            squares += flatten(parts, self.parameters).square()
        diagonal = (squares / (samples * len(losses)) + self.damping).pow(EXPONENT)
        return diagonal.clamp(min=torch.finfo(diagonal.dtype).eps * diagonal.max())  # 0 for unused parameters


def tanh_hidden(h: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states of a tanh RNN as structural damping acts on them: on the pre-activations, weighted by 1 - h^2.

    With h = tanh(t), a change of t weighted by 1 - h^2 (Algorithm 1, line 17, of the supplement to Martens and
    Sutskever, ICML 2011) is a change of h weighted by 1 / (1 - h^2), which this returns. If 1 - h^2 is below the
    precision of the dtype, that precision replaces it.

    Arguments:
        h: the states, of any shape, as ``torch.nn.RNN`` or :class:`hbnode.nn.TanhRNN` returns them.

    Returns:
        The pair (h, 1 / (1 - h^2)), without graph in its second part.

    Raises:
        ValueError: h has values beyond -1 and 1, so it is no tanh.

    Example:
        >>> h, weight = tanh_hidden(torch.tensor([0.0, 0.5]))
        >>> weight
        tensor([1.0000, 1.3333])
    """
    values = h.detach()
    if may_look() and bool((values.abs() > 1).any()):
        raise ValueError(
            f"h must be in [-1, 1], values of tanh, got up to {values.abs().max().item():g}. Fix: return h itself as "
            "hidden where units are no tanh."
        )
    return h, ((1 + values) * (1 - values)).clamp(min=torch.finfo(h.dtype).eps).reciprocal()
