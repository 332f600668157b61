"""The quadratic model of a loss: products with the damped Gauss-Newton matrix by double backpropagation.

J is the Jacobian of the model's outputs with respect to its parameters. The vector-Jacobian product J^T u is linear in
u. Therefore the gradient of (J^T u)^T v with respect to u is the Jacobian-vector product J v. One autograd graph of
J^T u serves all these products.
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
    detect_detached_gradients,
    refuse,
    translate_errors,
    twice_differentiable,
)
from hbnode.optim.losses import LOSSES

REPEATS = 1e-3  # maximum relative difference of two losses at the same parameters, which may differ by rounding
PRECISION = 0.01  # maximum relative error in the test that J^T is the transpose of J; rounding is far smaller
EXPONENT = 0.75  # exponent of the preconditioner
_RETURNS = "(outputs, targets), (outputs, targets, hidden) or (outputs, targets, hidden, weight)"


def flatten(parts: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """Flatten and concatenate tensors to one vector. They are those of the parameters ``like``, such as gradients.

    Each tensor is converted to the dtype of its parameter. A tensor that is None stands for zeros.
    """
    pairs = zip(parts, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if z is None else z.to(p)).reshape(-1) for z, p in pairs])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return list(map(Tensor.view_as, vector.split(list(map(torch.numel, like))), like))


@contextmanager
def assign(parameters: Sequence[Tensor], vector: Tensor) -> Iterator[None]:
    """In the context, set the parameters to the entries of a vector, and restore their old values afterwards.

    Autograd graphs that were made before stay valid.
    """
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
    """The checked return value of a closure.

    Attributes:
        outputs: the outputs of the model; one dimension contains the cases.
        targets: the targets of the loss.
        hidden: for each hidden state under structural damping, the pair of the state and its weight, or None.
        weight: the weight of the losses, or None.
        cases: the number of cases.
    """

    outputs: Tensor
    targets: Tensor
    hidden: list[tuple[Tensor, Tensor | None]]
    weight: Tensor | None
    cases: int


class Objective:
    """The loss of a user's closure as a function of the parameters. Each call uses the same random numbers.

    Arguments:
        closure: the user's function, which returns outputs and targets.
        name: the name of the closure in error messages.
        loss: "mse", "bce" or "cross_entropy".
        case_dim: the dimension of the outputs that contains the cases.
        parameters: the parameters of the model.
        theta: the values of the parameters before the step, as one vector.
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
        self.differentiates = False  # whether the closure itself computes derivatives

    def batch(self) -> Batch:
        state = self.random_state
        self.random_state = random_state(self.theta.device) if state is None else state
        with set_random_state(state, self.theta.device):
            batch = self._as_batch(self.closure())
        targets = self.targets = batch.targets if self.targets is None else self.targets
        if targets.shape != batch.targets.shape or not (
            torch.equal(targets, batch.targets) or torch.equal(targets.nan_to_num(), batch.targets.nan_to_num())
        ):
            raise ValueError(
                f"{self.name}() must return the same targets in each call of a step, got different ones. Fix: draw the "
                "batch before the step, x, y = next(batches), then optimizer.step(lambda: (model(x), y))."
            )
        return batch

    def losses(self, batch: Batch) -> Tensor:
        """Return the weighted loss of each position of the outputs.

        The result has the shape of the outputs, without the class dimension if they have one.
        """
        losses = self.kind.losses(batch.outputs, batch.targets)
        return losses if batch.weight is None else losses * batch.weight

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss, summed in float64 over positions and features and averaged over cases."""
        return self.losses(batch).sum(dtype=torch.float64) / batch.cases

    def loss_at(self, vector: Tensor) -> float:
        """Return the loss at the parameters theta + ``vector``, or infinity if this loss is not finite."""
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
        """Raise ValueError if two calls of the closure give different losses."""
        zero = torch.zeros_like(self.theta)
        one, other = self.loss_at(zero), self.loss_at(zero)
        if math.isfinite(one) and not abs(one - other) <= REPEATS * abs(one):
            raise ValueError(
                f"{self.name}() must be deterministic within a step, got the loss {one:g} and then {other:g} for the "
                "same parameters. Fix: draw noise and update hidden states outside of it. Draws from torch's default "
                "generators are repeated, those from others are not."
            )

    def check_graph(self, batch: Batch, damps: bool) -> None:
        """Raise ValueError if outputs or damped hidden states have no autograd graph, or if targets have one."""
        if damps and not batch.hidden:
            raise ValueError(
                f"structural_damping > 0 needs hidden states, got none from {self.name}(). Fix: return outputs, "
                "targets, hbnode.optim.tanh_hidden(h) with the states h of a tanh RNN, or structural_damping=0.0."
            )
        if batch.targets.requires_grad:
            raise ValueError(
                f"the targets of {self.name}() must not require a gradient. Fix: "
                f"{'targets.detach()' if batch.outputs.requires_grad else 'return (outputs, targets), in this order'}."
            )
        if not batch.outputs.requires_grad or (damps and not all(z.requires_grad for z, _ in batch.hidden)):
            raise ValueError(
                f"the {'hidden states' if batch.outputs.requires_grad else 'outputs'} of {self.name}() do not depend "
                "on the parameters. Fix: remove torch.no_grad(), torch.inference_mode(), .detach() and .data."
            )

    def _as_batch(self, returned: object) -> Batch:
        if not isinstance(returned, (tuple, list)) or not 2 <= len(returned) <= 4:
            got = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
            raise TypeError(
                f"{self.name}() must return {_RETURNS}, got {got}. Fix: return (model(x), y), without a call of "
                "backward(); the optimizer computes the loss."
            )
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
                f"case_dim={self.case_dim} must be a dimension of the outputs that contains cases, got outputs of "
                f"shape {tuple(outputs.shape)}. Fix: case_dim=0; for a single case return outputs[None]."
            )
        if weight is not None:
            weight = _as_weight(weight, positions, "the weight").to(outputs.dtype)
            if targets.is_floating_point() and targets.shape == outputs.shape:
                targets = targets.where(weight != 0, 0.0)  # 0 * NaN is NaN
        self.kind.check(outputs, targets)
        cases = outputs.shape[self.case_dim]
        if cases == 0:
            raise ValueError(
                f"the outputs of {self.name}() have no cases, got shape {tuple(outputs.shape)}. Fix: skip empty "
                "batches."
            )
        return Batch(outputs, targets, _as_hidden(hidden), weight, cases)


def _as_weight(weight: object, shape: Sequence[int], name: str) -> Tensor:
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
    """Return the hidden states of a closure as pairs of a state and its weight or None."""
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
                "the weight w of a pair (z, w) in hidden must not require a gradient. Fix: w.detach(), or a list "
                "[h, c] for two states."
            )
        pairs.append((z, None if metric is None else _as_weight(metric, z.shape, "the weight of hidden")))
    return pairs


class QuadraticModel:
    """The damped Gauss-Newton matrix A = J^T H_L J + lambda mu J_h^T diag(w) J_h + lambda I at fixed parameters.

    J and J_h are the Jacobians of outputs and hidden states with respect to the parameters. H_L is the Hessian of the
    loss with respect to the outputs, and w are the weights of the hidden states. The first two terms are averages over
    cases.

    Arguments:
        objective: the loss on the curvature batch.
        damping: the damping lambda.
        structural: the product lambda mu, where mu is the strength of structural damping.
        checks: whether to raise an error if autograd's products with J and J^T are inconsistent.
    """

    batch: Batch | None
    versions: list[int]  # version counters of the parameters when the graph was created
    outputs: list[Tensor]
    u: list[Tensor]
    gradient: Tensor  # J^T u

    def __init__(self, objective: Objective, damping: float, structural: float, checks: bool) -> None:
        self.objective, self.parameters, self.theta = objective, objective.parameters, objective.theta
        self.damping, self.structural, self.checks = damping, structural, checks
        self.release()

    def linearize(self, batch: Batch | None = None) -> Batch:
        """Create the autograd graph of J^T u, which all products use, unless a valid one exists.

        Return the batch at which the model is linearized.
        """
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
                    f"the {name} of {self.objective.name}() are not finite. Fix: remove such values from inputs and "
                    "targets, or use smaller initial weights."
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
        self.u = list(map(torch.zeros_like, self.outputs))  # J^T u is linear in u, so any u gives the same derivative
        for z in self.u:
            (z.copy_(torch.randn(z.shape, generator=generator)) if self.checks else z).requires_grad_()
        refused = detect_detached_gradients(self.outputs) if self.checks else nullcontext()
        with torch.enable_grad(), translate_errors(), refused:
            grads = torch.autograd.grad(self.outputs, self.parameters, self.u, create_graph=True, allow_unused=True)
            self.gradient = flatten(grads, self.parameters)
        if not all(map(torch.is_tensor, grads)):
            check_checkpoints(self.outputs)
        if self.checks:
            self._check_transpose(grads)
        return batch

    def _check_transpose(self, grads: Sequence[Tensor | None]) -> None:
        """Raise RuntimeError if autograd's J^T is not the transpose of its J, because of a wrong custom backward pass.

        With a random w and v = J^T w, the squared norm of v must equal w^T J v.
        """
        w = [z.detach() for z in self.u]
        v = self.vjp(w)
        squared = float(torch.dot(v, v))
        if not math.isfinite(squared):
            raise FloatingPointError(
                "a product with the Jacobian of the model is not finite. Fix: remove such values from the curvature "
                "batch, or use smaller initial weights or float64."
            )
        for grad, part in zip(grads, unflatten(v, self.parameters), strict=True):
            if grad is not None and not grad.requires_grad and bool(part.any()):
                refuse("a hook of a parameter detaches its gradient")
        product = sum(float((a * b).sum()) for a, b in zip(w, self.jvp(v), strict=True))
        if not abs(product - squared) <= PRECISION * squared:
            refuse("the derivative of its backward pass is wrong")

    def jvp(self, vector: Tensor) -> list[Tensor]:
        """Return the Jacobian-vector products J v for a vector v of all parameters, as a list.

        The list holds the product for the outputs, then those for the hidden states.
        """
        with translate_errors():
            return list(torch.autograd.grad(self.gradient, self.u, vector, retain_graph=True, materialize_grads=True))

    def vjp(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the vector-Jacobian product J^T w as one vector of all parameters.

        J is the Jacobian of outputs and hidden states, and ``grads`` is w, with a tensor for each of these.
        """
        parts = torch.autograd.grad(self.outputs, self.parameters, grads, retain_graph=True, allow_unused=True)
        return flatten(parts, self.parameters)

    def product(self, vector: Tensor) -> Tensor:
        self.linearize()
        z, *hidden = self.jvp(vector)
        weighted = [self.hessian(z) * self.factor, *map(torch.mul, hidden, self.metrics)]
        return self.vjp(weighted).add_(vector, alpha=self.damping)

    def undamped_curvature(self, vector: Tensor) -> float:
        """Return v^T J^T H_L J v, the curvature along a vector v without the two damping terms of A."""
        self.linearize()
        z = self.jvp(vector)[0]
        return float((z * self.hessian(z) * self.factor).sum())

    def release(self) -> None:
        """Free the graph. The next product creates a new one."""
        self.batch, self.versions = None, []
        self.outputs, self.u, self.gradient = [], [], self.theta

    def preconditioner(self, samples: int) -> Tensor:
        """Estimate the diagonal preconditioner (mean of g_n^2 + lambda)^0.75 of Martens (2010), section 4.7.

        g_n is the gradient of case n. With random signs s_n, the square of sum_n s_n g_n has the expectation
        sum_n g_n^2. Every step uses the same signs, which makes runs reproducible.

        Arguments:
            samples: the number of such random sums, over which the squares are averaged.
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
    """Return the states of a tanh RNN with their weights for structural damping.

    Martens and Sutskever penalise changes of the pre-activations t, weighted by 1 - h^2 with h = tanh(t). This equals
    a penalty on changes of h, weighted by 1 / (1 - h^2). The machine epsilon of the dtype bounds 1 - h^2 from below.

    References: Algorithm 1, line 17, of the supplement to Martens and Sutskever (ICML 2011).

    Arguments:
        h: the states, of any shape, as ``torch.nn.RNN`` or :class:`hbnode.nn.TanhRNN` returns them.

    Returns:
        The pair (h, 1 / (1 - h^2)). The second tensor has no graph.

    Raises:
        ValueError: h has values outside of [-1, 1].

    Example:
        >>> h, weight = tanh_hidden(torch.tensor([0.0, 0.5]))
        >>> weight
        tensor([1.0000, 1.3333])
    """
    values = h.detach()
    if may_look() and bool((values.abs() > 1).any()):
        raise ValueError(
            f"h must be in [-1, 1], values of tanh, got up to {values.abs().max().item():g}. Fix: return h itself as "
            "hidden if the units do not use tanh."
        )
    return h, ((1 + values) * (1 - values)).clamp(min=torch.finfo(h.dtype).eps).reciprocal()
