"""The Hessian-free optimizer of Martens (2010) with the structural damping of Martens and Sutskever (2011)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import override

from hbnode._checks import as_count
from hbnode._suggestions import nearest
from hbnode.optim.conjugate_gradients import conjugate_gradients
from hbnode.optim.evaluation import Batch, Evaluation
from hbnode.optim.gauss_newton import GaussNewton
from hbnode.optim.losses import LOSSES
from hbnode.optim.preconditioner import preconditioner
from hbnode.optim.progress import Outcome, Progress, Stop
from hbnode.optim.resume import check_state
from hbnode.optim.search import Trial, backtrack, line_search
from hbnode.optim.twice import plain_paths
from hbnode.optim.vectors import assigned, check_gradient, check_parameters, flat, shaped
from hbnode.recurrent import autocast

WARM_START = 0.95
RAISE, LOWER = 1.5, 2 / 3  # factors of lambda where rho < 1/4 and where rho > 3/4

Hidden: TypeAlias = Tensor | tuple[Tensor, Tensor] | list[Tensor | tuple[Tensor, Tensor]] | None
Closure: TypeAlias = Callable[
    [], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Hidden] | tuple[Tensor, Tensor, Hidden, Tensor]
]


@dataclass
class _Step:
    """The curvature of a step: on which batch, at which parameters, damped how.

    Attributes:
        evaluation: the closure of the curvature batch.
        parameters: what is optimized.
        theta: their values before the step.
        damping: lambda.
        structural: lambda mu.
        matrix: made when it is first needed.
        versions: of the parameters when it was made.
    """

    evaluation: Evaluation
    parameters: list[Tensor]
    theta: Tensor
    damping: float
    structural: float
    matrix: GaussNewton | None = None
    versions: tuple[int, ...] = ()

    def linearize(self, batch: Batch) -> GaussNewton:
        """Make the matrix of a batch that has a graph."""
        linearized = self.evaluation.linearized(batch, self.structural)
        self.matrix = GaussNewton(self.parameters, linearized)
        self.versions = tuple(parameter._version for parameter in self.parameters)
        return self.matrix

    def ready(self) -> GaussNewton:
        """The matrix; the parameters must have the values that they had before the step."""
        versions = tuple(parameter._version for parameter in self.parameters)
        if self.matrix is not None and versions == self.versions:
            return self.matrix
        with torch.enable_grad(), plain_paths(self.theta.device):
            batch = self.evaluation.batch()
        return self.linearize(batch)

    def loss_at(self, vector: Tensor, evaluation: Evaluation | None = None) -> float:
        """The loss at theta plus a vector, on the curvature batch unless told; infinite if it is not a number."""
        with assigned(self.parameters, self.theta + vector):
            loss = (evaluation or self.evaluation).value()
        return loss if math.isfinite(loss) else math.inf

    def take(self, vector: Tensor) -> None:
        """Move from theta for good; autograd refuses graphs that were made before."""
        for parameter, part in zip(self.parameters, shaped(self.theta + vector, self.parameters), strict=True):
            parameter.copy_(part)

    def product(self, vector: Tensor) -> Tensor:
        """The product with the damped matrix."""
        return self.ready()(vector, self.damping)


@dataclass
class _Found:
    """What conjugate gradients and backtracking found.

    Attributes:
        trial: the best iterate.
        last: the last iterate.
        iterations: of conjugate gradients.
        stop: why they ended.
        outcome: "accepted", or "restarted" if they began from zero after a failure.
    """

    trial: Trial
    last: Tensor
    iterations: int
    stop: Stop
    outcome: Outcome


class HessianFree(Optimizer):
    r"""Hessian-free optimization: steps towards the minimum of a damped quadratic model, by conjugate gradients.

    A step solves ``A d = -g``, with g the gradient of the loss and A the damped Gauss-Newton matrix::

        A = J^T H_L J + lambda mu J_h^T diag(w) J_h + lambda I

    J is the Jacobian of the outputs in the parameters, H_L the Hessian of the loss in the outputs, and J_h the Jacobian
    of hidden states with weights w. The second term is structural damping: it penalizes changes of hidden states. All
    terms are sums over time and features, averaged over cases. Products with A cost two passes; A is never formed.

    Conjugate gradients start from 0.95 times the last direction. They stop after iteration i if (phi_i - phi_{i-k}) /
    phi_i < 5e-4 k, k = max(10, i / 10), where phi is the quadratic model. Of the iterates ceil(1.3^j), the step goes
    back from the last while the loss of the curvature batch becomes smaller. It then searches the line for a sufficient
    decrease of the loss of the gradient batch. If no step
    helps, conjugate gradients begin again from zero. The damping follows Levenberg and Marquardt: with rho the change
    of the loss over that of the model, lambda is multiplied by 3/2 where rho < 1/4 and by 2/3 where rho > 3/4, or where
    the model predicts a reduction below the precision of the loss.

    Autocast around a step has no effect; within a closure it has.

    The closures draw no new data: a step evaluates each of them several times, with the same
    random numbers of torch's default generators. Layers
    take forms that can be differentiated twice while the curvature is evaluated. ``torch.nn.RNN``, ``GRU`` and ``LSTM``
    and :class:`hbnode.TanhRNN` then have products written for them, but not on a PackedSequence.

    All parameter groups have the same options. Frozen parameters stay as they are. ``state_dict`` has the damping and
    the last direction, so that a resumed run goes on exactly.

    References: Martens, Deep learning via Hessian-free optimization (ICML 2010). Martens and Sutskever, Learning
    Recurrent Neural Networks with Hessian-Free Optimization (ICML 2011), with its supplement.

    Arguments:
        params: parameters or named parameters of a model, in float32 or float64, on one device.
        loss: "mse", half the squared error, H_L = I; "bce", the cross-entropy of sigmoids from logits, with targets in
            [0, 1], H_L = diag(p (1 - p)); or "cross_entropy", that of a softmax over the last dimension of the outputs,
            from logits, with class indices as targets, H_L = diag(p) - p p^T. The target -100 is ignored.
        damping: the first lambda. Default: ``0.1``.
        structural_damping: mu; the closures then return hidden states. Default: ``0.0``.
        max_cg: the most iterations of conjugate gradients in a step. Default: ``300``.
        min_damping: the least lambda. Where the loss hardly changes, the rule above would reduce lambda, and with it
            the structural damping, without end. Default: ``0.0002``.
        preconditioner_samples: if not 0, conjugate gradients are preconditioned by (mean of g_n^2 + lambda)^0.75, g_n
            the gradient of case n. The mean is estimated from this many sums of g_n with random signs, at the cost of a
            backward pass each. Default: ``0``.
        case_dim: the dimension of the outputs that counts the cases; 1 for outputs that begin with time. Default:
            ``0``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has no meaning, a parameter is in half precision, or a group has options of its own.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(100, 3)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = HessianFree(model.parameters(), loss="mse", damping=1e-3)
        >>> for _ in range(3):
        ...     loss = optimizer.step(lambda: (model(x), x.sum(1, keepdim=True)))
        >>> optimizer.progress.new_loss < 1e-6
        True
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        loss: Literal["mse", "bce", "cross_entropy"],
        damping: float = 0.1,
        structural_damping: float = 0.0,
        max_cg: int = 300,
        min_damping: float = 0.0002,
        preconditioner_samples: int = 0,
        case_dim: int = 0,
    ) -> None:
        if not isinstance(case_dim, int) or isinstance(case_dim, bool):
            raise TypeError(f"case_dim must be a whole number, got {case_dim!r}. Fix: case_dim=0.")
        if not isinstance(loss, str) or loss not in LOSSES:
            near = nearest(loss, list(LOSSES)) or "mse"
            raise ValueError(f"loss must be one of {tuple(LOSSES)}, got {loss!r}. Fix: loss={near!r}.")
        numbers = {"damping": damping, "structural_damping": structural_damping, "min_damping": min_damping}
        for name, number in numbers.items():
            if not isinstance(number, (int, float)) or not 0 <= number < math.inf:
                raise ValueError(f"{name} must be a number >= 0, got {number!r}. Fix: leave it out.")
        if damping < min_damping:
            raise ValueError(
                f"damping must be at least min_damping={min_damping:g}, got {damping!r}. Fix: a smaller min_damping."
            )
        options = {
            "max_cg": as_count(max_cg, "max_cg"),
            "preconditioner_samples": as_count(preconditioner_samples, "preconditioner_samples", 0),
        }
        self._last: _Step | None = None
        self.progress: Progress | None = None
        super().__init__(params, {"loss": loss, "case_dim": case_dim, **numbers, **options})

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        own = set(param_group) - {"params", "param_names"}
        if own:
            raise ValueError(
                f"a parameter group has options of its own, {sorted(own)}, but one quadratic model is made for all "
                "parameters. Fix: leave them out and pass them to HessianFree itself, or freeze parameters by "
                "requires_grad_(False)."
            )
        super().add_param_group(param_group)
        check_parameters([parameter for group in self.param_groups for parameter in group["params"]])

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._last, self.progress = None, None

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` gave.

        Arguments:
            state_dict: of a HessianFree for the same loss and for parameters of the same shapes.

        Raises:
            ValueError: the state is that of another optimizer, loss or model.
        """
        check_state(state_dict, self.param_groups[0], [p for group in self.param_groups for p in group["params"]])
        super().load_state_dict(state_dict)

    @torch.no_grad()
    @override
    def step(self, forward: Closure, curvature: Closure | None = None) -> Tensor:  # type: ignore[override]  # not a loss
        """Take a step.

        Each closure returns ``(outputs, targets)``, ``(outputs, targets, hidden)`` or ``(outputs, targets, hidden,
        weight)``. Hidden is what structural damping acts on: a tensor z, for the squared change of z; a pair
        ``(z, w)``, for the change weighted by w >= 0, a tensor that broadcasts to z; or a list of these.
        :func:`hbnode.optim.tanh_hidden` makes the pair for the states of a tanh RNN. The weight of the losses
        broadcasts to the outputs, for cross-entropy to the targets; 0 leaves a position out.

        Arguments:
            forward: evaluates the model on the batch of the gradient and of the line search.
            curvature: evaluates it on the batch of the curvature, of a tenth of the size for example. Default:
                ``None``, the batch of the gradient.

        Returns:
            The loss before the step. :attr:`progress` has the rest.

        Raises:
            FloatingPointError: the loss before the step, its gradient or the curvature is not finite. The parameters
                are as before.
            RuntimeError: the model cannot be differentiated twice.
            TypeError: a closure returns something else.
            ValueError: shapes or values do not fit, or a closure draws a new batch in each call.
        """
        with autocast.switched(self._parameters()[0], on=False):  # it would round the products
            return self._step(forward, curvature)

    def _step(self, forward: Closure, curvature: Closure | None) -> Tensor:
        options, parameters = self.param_groups[0], self._parameters()
        self._last = None
        first = self._evaluation(forward, "forward")
        second = first if curvature is None else self._evaluation(curvature, "curvature")
        theta, damping = flat([parameter.data for parameter in parameters], parameters), options["damping"]
        step = _Step(second, parameters, theta, damping, damping * options["structural_damping"])
        loss, gradient = self._gradient(first, step)

        found = self._solve(step, first, gradient, loss)
        model, outcome, length, new_loss = found.trial.model, found.outcome, 0.0, loss
        if -model <= torch.finfo(theta.dtype).eps * abs(loss):
            outcome = "stationary"
        else:
            length, new_loss = line_search(found.trial, loss, gradient, partial(step.loss_at, evaluation=first))
            outcome = outcome if length else "rejected"
        if length:
            step.take(length * found.trial.direction)
        for parameter, part in zip(parameters, shaped(found.last, parameters), strict=True):
            self.state[parameter]["direction"] = part.clone()
        ratio = math.nan if outcome == "stationary" else (found.trial.loss - loss) / model
        self.progress = Progress(loss, new_loss, damping, ratio, found.iterations, found.stop, length, outcome)
        for group in self.param_groups:
            group["damping"] = self._next_damping(self.progress)
        step.matrix, self._last = None, step  # without the graph
        return torch.tensor(loss, dtype=theta.dtype)

    @torch.no_grad()
    def product(self, vector: Tensor) -> Tensor:
        """The product of the last step's damped Gauss-Newton matrix A with a vector.

        It belongs to the curvature batch of that step, to the parameters before it and to its damping. The first call
        after a step evaluates the closure again; the graph is then kept until the next step.

        Arguments:
            vector: as long as all parameters that are not frozen, in the order of the groups; see
                ``torch.nn.utils.parameters_to_vector``.

        Returns:
            A v, of the same length.

        Raises:
            RuntimeError: there was no step yet.
            ValueError: the vector has another shape than expected.
        """
        if self._last is None:
            raise RuntimeError("product() belongs to the last step, and there was none. Fix: call step() first.")
        theta = self._last.theta
        if not isinstance(vector, Tensor) or vector.shape != theta.shape or vector.dtype != theta.dtype:
            got = f"{tuple(vector.shape)} of {vector.dtype}" if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(
                f"the vector must be {tuple(theta.shape)} of {theta.dtype}, got {got}. "
                "Fix: torch.nn.utils.parameters_to_vector(vectors)."
            )
        with assigned(self._last.parameters, theta), autocast.switched(theta, on=False):
            return self._last.product(vector)

    def _parameters(self) -> list[Tensor]:
        """All that are not frozen."""
        found = [parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad]
        if not found:
            raise ValueError("all parameters are frozen. Fix: parameter.requires_grad_(True) for some of them.")
        return found

    def _names(self) -> list[str]:
        """Their names if there are any, else their places."""
        names: list[str] = []
        for k, group in enumerate(self.param_groups):
            given = group.get("param_names") or [f"parameter {i} of group {k}" for i in range(len(group["params"]))]
            names += [name for name, z in zip(given, group["params"], strict=True) if z.requires_grad]
        return names

    def _evaluation(self, closure: Closure, name: str) -> Evaluation:
        options = self.param_groups[0]
        return Evaluation(closure, name, LOSSES[options["loss"]], options["case_dim"], self._parameters()[0].device)

    def _gradient(self, first: Evaluation, step: _Step) -> tuple[float, Tensor]:
        """The loss and its gradient; if the curvature has the same batch, it keeps the graph."""
        shared = first is step.evaluation
        with torch.enable_grad(), plain_paths(step.theta.device) if shared else nullcontext():
            batch = first.batch()
            mean = first.mean(batch)
        first.check_graph(batch, shared and step.structural > 0)
        loss = float(mean)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} before the step. Fix: look for values that are not finite in the inputs, targets "
                "and parameters; smaller initial weights."
            )
        parts = torch.autograd.grad(mean, step.parameters, retain_graph=shared, allow_unused=True)
        check_gradient(parts, self._names())
        if shared:
            step.linearize(batch)
        if self.progress is None:
            step.ready().check()
        return loss, flat(parts, step.parameters)

    def _solve(self, step: _Step, first: Evaluation, gradient: Tensor, loss: float) -> _Found:
        """Conjugate gradients from the last direction and, if this finds nothing, from zero."""
        options, start = self.param_groups[0], self._start(step.parameters)
        scale = None
        if options["preconditioner_samples"]:
            scale = preconditioner(step.ready(), options["preconditioner_samples"], step.damping)
        iterations: int = 0
        outcome: Outcome = "accepted"
        while True:
            solution = conjugate_gradients(
                step.product, -gradient, start, limit=options["max_cg"], preconditioner=scale
            )
            trial, iterations = backtrack(solution, step.loss_at), iterations + solution.iterations
            if first is not step.evaluation:
                trial = replace(trial, loss=step.loss_at(trial.direction, first))
            if trial.loss < loss or start is None:
                return _Found(trial, solution.iterates[-1], iterations, solution.stop, outcome)
            start, outcome = None, "restarted"

    def _start(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Where conjugate gradients begin."""
        parts = [self.state[parameter].get("direction") for parameter in parameters]
        return None if all(part is None for part in parts) else WARM_START * flat(parts, parameters)

    def _next_damping(self, progress: Progress) -> float:
        """Levenberg and Marquardt's rule."""
        factor = RAISE
        if progress.outcome == "stationary" or progress.ratio > 0.75:  # a large lambda alone may leave nothing to gain
            factor = LOWER
        elif progress.ratio >= 0.25:
            factor = 1.0
        return max(factor * progress.damping, self.param_groups[0]["min_damping"])
