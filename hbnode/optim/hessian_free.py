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
from hbnode._torch import no_autocast
from hbnode.optim.conjugate_gradients import conjugate_gradients
from hbnode.optim.evaluation import Evaluation
from hbnode.optim.local_model import LocalModel
from hbnode.optim.losses import LOSSES, check_loss
from hbnode.optim.preconditioner import preconditioner
from hbnode.optim.progress import Outcome, Progress, Stop
from hbnode.optim.resume import check_state
from hbnode.optim.search import Trial, backtrack, line_search
from hbnode.optim.twice import plain_paths
from hbnode.optim.vectors import assigned, check_gradient, check_parameters, flat, shaped

WARM_START = 0.95
LOW, HIGH = 0.25, 0.75  # the ratio rho of a bad step and of a good one
RAISE, LOWER = 1.5, 2 / 3  # factors of lambda after them

Hidden: TypeAlias = Tensor | tuple[Tensor, Tensor] | list[Tensor | tuple[Tensor, Tensor]] | None
Closure: TypeAlias = Callable[
    [], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Hidden] | tuple[Tensor, Tensor, Hidden, Tensor]
]


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
    decrease of the loss of the gradient batch. If no step helps, conjugate gradients begin again from zero.

    The damping follows Levenberg and Marquardt: with rho the change of the loss over that of the model, lambda is
    multiplied by 3/2 where rho < 1/4 and by 2/3 where rho > 3/4. Where both changes are no larger than what the last
    digits of the parameters change in the loss, rho is rounding and lambda stays, unless the model without damping
    predicts more; then lambda falls.

    Autocast around a step has no effect; within a closure it is refused.

    The closures draw no new data: a step evaluates each of them several times, with the same
    random numbers of torch's default generators. Layers
    take forms that can be differentiated twice while the curvature is evaluated. ``torch.nn.RNN``, ``GRU`` and ``LSTM``
    and :class:`hbnode.nn.TanhRNN` then have products written for them, but not on a PackedSequence.

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
        check_loss(loss)
        numbers = {"damping": damping, "structural_damping": structural_damping, "min_damping": min_damping}
        for name, number in numbers.items():
            if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 <= number < math.inf:
                raise ValueError(f"{name} must be a number >= 0, got {number!r}. Fix: leave it out.")
        if damping < min_damping:
            raise ValueError(
                f"damping must be at least min_damping={min_damping:g}, got {damping!r}. Fix: a smaller min_damping."
            )
        options = {
            "max_cg": as_count(max_cg, "max_cg"),
            "preconditioner_samples": as_count(preconditioner_samples, "preconditioner_samples", 0),
        }
        self._last: LocalModel | None = None
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
    def step(  # type: ignore[override]  # its closure returns no loss
        self, forward: Closure | None = None, curvature: Closure | None = None
    ) -> Tensor:
        """Take a step.

        Each closure returns ``(outputs, targets)``, ``(outputs, targets, hidden)`` or ``(outputs, targets, hidden,
        weight)``. Hidden is what structural damping acts on: a tensor z, for the squared change of z; a pair
        ``(z, w)``, for the change weighted by w >= 0, a tensor that broadcasts to z; or a list of these.
        :func:`hbnode.optim.tanh_hidden` makes the pair for the states of a tanh RNN. The weight of the losses
        broadcasts to the outputs, for cross-entropy to the targets; 0 leaves a position out.

        Arguments:
            forward: evaluates the model on the batch of the gradient and of the line search. Default: ``None``, which
                is refused: gradients of an earlier ``backward()`` are not used.
            curvature: evaluates it on the batch of the curvature, of a tenth of the size for example. Default:
                ``None``, the batch of the gradient.

        Returns:
            The loss before the step. :attr:`progress` has the rest.

        Raises:
            FloatingPointError: the loss before the step, its gradient or the curvature is not finite. The parameters
                are as before.
            RuntimeError: the model cannot be differentiated twice, or a closure runs under autocast.
            TypeError: there is no closure, or it returns something else.
            ValueError: shapes or values do not fit, or a closure is another function in each call.
        """
        if forward is None:
            raise TypeError(
                "step() needs a function that returns outputs and targets, from which it computes the loss and its "
                "derivatives; those of an earlier backward() are not used. Fix: optimizer.step(lambda: (model(x), y))."
            )
        with no_autocast(self._parameters()[0]):  # it would round the products
            return self._step(forward, curvature)

    def _step(self, forward: Closure, curvature: Closure | None) -> Tensor:
        options, parameters = self.param_groups[0], self._parameters()
        self._last = None
        first = self._evaluation(forward, "forward")
        second = first if curvature is None else self._evaluation(curvature, "curvature")
        theta, damping = flat([parameter.data for parameter in parameters], parameters), options["damping"]
        structural, checks = damping * options["structural_damping"], self.progress is None
        step = LocalModel(second, parameters, theta, damping, structural, checks)
        for evaluation in (first, second) if checks else ():
            evaluation.check_repeats()
        loss, gradient = self._gradient(first, step)

        found = self._solve(step, first, gradient, loss)
        trial, outcome, length, new_loss = found.trial, found.outcome, 0.0, loss
        may_be_seen = -trial.model > torch.finfo(theta.dtype).eps * abs(loss)
        if may_be_seen:
            length, new_loss = line_search(trial, loss, gradient, partial(step.loss_at, evaluation=first))
        ratio = (trial.loss - loss) / trial.model if may_be_seen else math.nan
        factor = _factor(ratio)
        if not ratio >= LOW:
            precision = step.precision(loss, first)
            if not may_be_seen or max(-trial.model, abs(trial.loss - loss)) <= precision:  # the ratio is noise
                ratio = math.nan
                factor = LOWER if step.undamped_reduction(gradient, trial.direction) > precision else 1.0
        if not length:
            outcome = "stationary" if math.isnan(ratio) else "rejected"
        if length:
            step.take(length * trial.direction)
        for parameter, part in zip(parameters, shaped(found.last, parameters), strict=True):
            self.state[parameter]["direction"] = part.clone()
        self.progress = Progress(loss, new_loss, damping, ratio, found.iterations, found.stop, length, outcome)
        for group in self.param_groups:
            group["damping"] = max(factor * damping, options["min_damping"])
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
            RuntimeError: there was no step yet, or parameters were frozen since.
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
        frozen = sum(not parameter.requires_grad for parameter in self._last.parameters)
        if frozen:
            raise RuntimeError(
                f"product() belongs to the parameters of the last step, and {frozen} of them are frozen since. Fix: "
                "requires_grad_(True) for these, or another step()."
            )
        with assigned(self._last.parameters, theta), no_autocast(theta):
            return self._last.product(vector)

    def _parameters(self) -> list[Tensor]:
        """All that are not frozen."""
        found = [parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad]
        if not found:
            raise ValueError("all parameters are frozen. Fix: parameter.requires_grad_(True) for some of them.")
        check_parameters(found)
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

    def _gradient(self, first: Evaluation, step: LocalModel) -> tuple[float, Tensor]:
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
        elif self.progress is None:
            step.ready()
        return loss, flat(parts, step.parameters)

    def _solve(self, step: LocalModel, first: Evaluation, gradient: Tensor, loss: float) -> _Found:
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
        if all(part is None for part in parts):
            return None
        moved = [None if part is None else part.to(z) for part, z in zip(parts, parameters, strict=True)]
        return WARM_START * flat(moved, parameters)


def _factor(ratio: float) -> float:
    """What Levenberg and Marquardt's rule multiplies lambda by."""
    if ratio > HIGH:
        return LOWER
    return 1.0 if ratio >= LOW else RAISE
