"""The Hessian-free optimizer of Martens (2010) with the structural damping of Martens and Sutskever (2011)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from typing_extensions import override

from hbnode._checks import as_count
from hbnode._torch import no_autocast
from hbnode.optim.conjugate_gradients import Solution, Stop, backtrack, conjugate_gradients, line_search
from hbnode.optim.curvature import Objective, QuadraticModel, assign, flatten, unflatten
from hbnode.optim.double_backward import twice_differentiable
from hbnode.optim.losses import check_loss

WARM_START = 0.95
LOW, HIGH = 0.25, 0.75  # lambda changes if the ratio rho is below LOW or above HIGH
RAISE, LOWER = 1.5, 2 / 3  # the factors of lambda in these two cases

Hidden: TypeAlias = Tensor | tuple[Tensor, Tensor] | list[Tensor | tuple[Tensor, Tensor]] | None
Closure: TypeAlias = Callable[
    [], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Hidden] | tuple[Tensor, Tensor, Hidden, Tensor]
]
Outcome: TypeAlias = Literal["accepted", "restarted", "rejected", "stationary"]


@dataclass(frozen=True)
class Progress:
    """A summary of one step of :class:`~hbnode.optim.HessianFree`. ``str(progress)`` fits a progress bar.

    Attributes:
        loss: the loss before the step, on the gradient batch.
        new_loss: the loss after the step, on the gradient batch.
        damping: the damping lambda of the step.
        ratio: rho, the change of the loss by the full step d divided by the change that the quadratic model predicts.
            It is negative if the loss grew, and minus infinity if the loss at the full step is not finite. It is NaN if
            both changes are below the precision of the loss.
        cg_iterations: the number of conjugate gradient iterations, including those before a restart.
        cg_stop: the reason why the last conjugate gradient solve stopped: "progress" (Martens' rule), "limit"
            (``max_cg`` iterations), "solved" (the residual is zero within rounding) or "negative curvature" (p^T A p <=
            0 for a search direction p). For lambda > 0 only rounding can cause negative curvature.
        step_length: alpha of the line search. It is 0 if the parameters did not change.
        outcome: "accepted"; "restarted": accepted after a restart of conjugate gradients from zero; "rejected": no
            step reduced the loss; or "stationary": rejected, and the predicted and true changes of the loss are below
            its precision.
    """

    loss: float
    new_loss: float
    damping: float
    ratio: float
    cg_iterations: int
    cg_stop: Stop
    step_length: float
    outcome: Outcome

    @property
    def reduction(self) -> float:
        """The reduction of the loss, ``loss - new_loss``."""
        return self.loss - self.new_loss

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4g}, reduction {self.reduction:.3g}, lambda {self.damping:.3g}, rho {self.ratio:.3g}, "
            f"CG {self.cg_iterations} ({self.cg_stop}), step {self.step_length:.3g}, {self.outcome}"
        )


class HessianFree(Optimizer):
    r"""A Hessian-free optimizer, which minimises a damped quadratic model of the loss by conjugate gradients.

    A step solves ``A d = -g``, with the gradient g of the loss and the damped Gauss-Newton matrix::

        A = J^T H_L J + lambda mu J_h^T diag(w) J_h + lambda I

    J is the Jacobian of the outputs with respect to the parameters. H_L is the Hessian of the loss with respect to the
    outputs. J_h is the Jacobian of hidden states, which have weights w. The term with mu is structural damping: it
    penalises changes of hidden states. All terms are sums over time and features, averaged over cases. A is never
    computed as a matrix. Its product with a vector costs one product with the Jacobians and one with their transposes.

    :meth:`step` takes a closure that evaluates the model on the gradient batch, from which g is computed. An optional
    second closure evaluates it on the curvature batch, from which A is computed. Without it both batches are the same.

    Conjugate gradients start from 0.95 times the last direction. With the quadratic model phi and k = max(10, i // 10),
    they stop after iteration i if (phi_i - phi_{i-k}) / phi_i < 5e-4 k. The step saves the iterates i = ceil(1.3^j) and
    goes back from the last one as long as the loss on the curvature batch decreases. A line search then finds a
    sufficient decrease of the loss on the gradient batch. If the direction does not reduce the loss, conjugate
    gradients restart from zero.

    The damping lambda follows the rule of Levenberg and Marquardt. The ratio rho is the change of the loss divided by
    the predicted change. If rho < 1/4, lambda is multiplied by 3/2; if rho > 3/4, by 2/3. If both changes are within
    the rounding error of the loss, rho is not used. Lambda is then multiplied by 2/3 if the change predicted without
    damping exceeds this error, and otherwise not changed. The rounding error is the change of the loss if each
    parameter changes by its last digit.

    A step calls each closure several times, with the same random numbers of torch's default generators. A closure must
    use the same data in all calls of a step. Autocast around a step has no effect; within a closure it raises an error.

    The curvature needs second derivatives, so layers run in implementations that have them. ``torch.nn.RNN``, ``GRU``
    and ``LSTM`` and :class:`hbnode.nn.TanhRNN` use an R-operator, except on a PackedSequence.

    All parameter groups have the same options. Frozen parameters do not change. ``state_dict`` contains the damping
    and the last direction, so a resumed run continues exactly.

    References: Martens, Deep learning via Hessian-free optimization (ICML 2010). Martens and Sutskever, Learning
    Recurrent Neural Networks with Hessian-Free Optimization (ICML 2011), with its supplement.

    Arguments:
        params: parameters or named parameters of a model, in float32 or float64, on one device.
        loss: "mse", "bce" or "cross_entropy". "mse" is half the squared error, with H_L = I. "bce" is the binary
            cross-entropy of logits with targets in [0, 1]; H_L = diag(p (1 - p)), p = sigmoid(logits). "cross_entropy"
            is the cross-entropy of logits in the last dimension of the outputs, with class indices as targets;
            H_L = diag(p) - p p^T, p = softmax(logits). It ignores the target -100.
        damping: the initial lambda. Default: ``0.1``.
        structural_damping: the strength mu of structural damping. If it is positive, the curvature closure must return
            hidden states. Default: ``0.0``.
        max_cg: the maximum number of iterations of a conjugate gradient solve; a restart is a second solve. Default:
            ``300``.
        min_damping: the lower bound of lambda. Without this bound, lambda and the structural damping would tend to 0
            if the loss hardly changes. Default: ``0.0002``.
        preconditioner_samples: if positive, conjugate gradients use the diagonal preconditioner
            (mean of g_n^2 + lambda)^0.75, with the gradient g_n of case n. The mean is estimated by this
            number of samples. A sample is the square of the sum of all g_n with random signs, divided by the number of
            cases; it costs one backward pass. Default: ``0``.
        case_dim: the dimension of the outputs that contains the cases; 1 for outputs (T, cases, ...). Default: ``0``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of its range, a parameter is neither float32 nor float64, or a parameter group
            has its own options.

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
        self._model: QuadraticModel | None = None
        self.progress: Progress | None = None
        super().__init__(params, {"loss": loss, "case_dim": case_dim, **numbers, **options})

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        own = set(param_group) - {"params", "param_names"}
        if own:
            raise ValueError(
                f"a parameter group must not have options of its own, got {sorted(own)}: one quadratic model covers "
                "all parameters. Fix: pass them to HessianFree itself, or freeze parameters by requires_grad_(False)."
            )
        super().add_param_group(param_group)
        _check_parameters([parameter for group in self.param_groups for parameter in group["params"]])

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._model, self.progress = None, None

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the damping and the last direction from a result of ``state_dict``.

        Arguments:
            state_dict: the state of a HessianFree with the same loss and with parameters of the same shapes.

        Raises:
            ValueError: the state belongs to another optimizer, loss or model.
        """
        if not isinstance(state_dict, Mapping) or not {"param_groups", "state"} <= state_dict.keys():
            raise ValueError(
                "the state_dict of an optimizer must have 'param_groups' and 'state'. Fix: pass the result of "
                "HessianFree.state_dict()."
            )
        options = self.param_groups[0]
        for group in state_dict["param_groups"]:
            missing = sorted(options.keys() - group.keys() - {"param_names"})
            if missing:
                raise ValueError(
                    f"the state_dict belongs to another optimizer: it has no {missing[0]!r}. Fix: pass the result of "
                    "HessianFree.state_dict()."
                )
            for name in ("loss", "case_dim"):
                if group[name] != options[name]:
                    raise ValueError(
                        f"the state_dict has {name}={group[name]!r}, the optimizer has {options[name]!r}. "
                        f"Fix: HessianFree(..., {name}={group[name]!r})."
                    )
            if not 0 <= group["damping"] < math.inf:
                raise ValueError(
                    f"the damping of the state_dict is {group['damping']}. Fix: load an earlier state_dict."
                )
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=False):  # torch checks that both have the same length
            direction = state_dict["state"].get(key, {}).get("direction")
            if direction is not None and direction.shape != parameter.shape:
                raise ValueError(
                    f"the state_dict has a direction of shape {tuple(direction.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}. Fix: load the state of an optimizer of the same model."
                )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    @override
    def step(  # type: ignore[override]  # unlike torch's, the closure returns no loss
        self, forward: Closure | None = None, curvature: Closure | None = None
    ) -> Tensor:
        """Update the parameters by one step.

        Each closure returns ``(outputs, targets)``, ``(outputs, targets, hidden)`` or
        ``(outputs, targets, hidden, weight)``. ``hidden`` holds the states under structural damping: a tensor z, a
        pair ``(z, w)``, or a list of tensors and pairs. For a tensor z the squared change of z is penalised. In a pair,
        w >= 0 is the weight of this penalty, a tensor that broadcasts to z. :func:`hbnode.optim.tanh_hidden` returns
        the pair for a tanh RNN. ``weight`` multiplies the losses. It broadcasts to the outputs, or for cross-entropy to
        the targets; a weight of 0 masks a position.

        Arguments:
            forward: the closure that evaluates the model on the gradient batch, also in the line search. Default:
                ``None``, which raises TypeError, because gradients of an earlier ``backward()`` are not used.
            curvature: the closure that evaluates the model on the curvature batch, for example a tenth of the gradient
                batch. Default: ``None``, the gradient batch.

        Returns:
            The loss before the step. ``optimizer.progress`` has the other results.

        Raises:
            FloatingPointError: the loss before the step, its gradient or the curvature is not finite. The parameters
                do not change.
            RuntimeError: the model cannot be differentiated twice, or a closure runs under autocast.
            TypeError: a closure is missing or returns values of other types.
            ValueError: shapes or values do not fit, or a closure is not deterministic.
        """
        if forward is None:
            raise TypeError(
                "step() needs a function that returns outputs and targets; gradients of an earlier backward() are not "
                "used. Fix: optimizer.step(lambda: (model(x), y))."
            )
        parameters = self._parameters()
        with no_autocast(parameters[0]):  # autocast would compute products in half precision
            return self._step(parameters, forward, curvature)

    def _step(self, parameters: list[Tensor], forward: Closure, curvature: Closure | None) -> Tensor:
        self._model = None
        options, is_first = self.param_groups[0], self.progress is None
        damping, theta = options["damping"], flatten(parameters, parameters)
        given = options["loss"], options["case_dim"], parameters, theta
        objective = Objective(forward, "forward", *given)
        sample = objective if curvature is None else Objective(curvature, "curvature", *given)
        model = QuadraticModel(sample, damping, damping * options["structural_damping"], checks=is_first)
        if is_first:
            objective.check_repeats()
            sample.check_repeats()
        loss, gradient = self._gradient(objective, model)

        solution, iterations, outcome, trial = self._direction(objective, model, loss, gradient)
        direction, predicted, full_loss = trial

        # Find the step length by a line search, and the next lambda by the rule of Levenberg and Marquardt.
        length, new_loss, ratio = 0.0, loss, math.nan
        eps = torch.finfo(theta.dtype).eps
        is_visible = -predicted > eps * abs(loss)
        if is_visible:
            length, new_loss = line_search(direction, full_loss, loss, gradient, objective.loss_at)
            ratio = (full_loss - loss) / predicted
        factor = LOWER if ratio > HIGH else 1.0 if ratio >= LOW else RAISE
        if not ratio >= LOW:
            rounding = _rounding_error(objective, theta, loss)
            if not is_visible or max(-predicted, abs(full_loss - loss)) <= rounding:
                ratio = math.nan
                slope, bend = float(torch.dot(gradient, direction)), model.undamped_curvature(direction)
                undamped = 0.0 if slope == 0 else slope**2 / (2 * bend) if bend > 0 else math.inf
                factor = LOWER if undamped > rounding else 1.0

        if length:
            for parameter, part in zip(parameters, unflatten(theta + length * direction, parameters), strict=True):
                parameter.copy_(part)  # raises the version counters, so that autograd rejects earlier graphs
        else:
            outcome = "stationary" if math.isnan(ratio) else "rejected"
        for parameter, part in zip(parameters, unflatten(solution.iterates[-1][0], parameters), strict=True):
            self.state[parameter]["direction"] = part.clone()
        self.progress = Progress(loss, new_loss, damping, ratio, iterations, solution.stop, length, outcome)
        for group in self.param_groups:
            group["damping"] = max(factor * damping, options["min_damping"])
        model.release()
        self._model = model
        return torch.tensor(loss, dtype=theta.dtype)

    def _direction(
        self, objective: Objective, model: QuadraticModel, loss: float, gradient: Tensor
    ) -> tuple[Solution, int, Outcome, tuple[Tensor, float, float]]:
        """Find a direction by conjugate gradients, started from the last direction. If this fails, restart from zero.

        Return the solution, the number of iterations of both attempts, the outcome, and a triple: the direction, the
        predicted change of the loss, and the loss after a full step.
        """
        options, sample, parameters = self.param_groups[0], model.objective, model.parameters
        outcome: Outcome = "accepted"
        iterations = 0
        directions = [self.state[parameter].get("direction") for parameter in parameters]
        start = WARM_START * flatten(directions, parameters) if any(map(torch.is_tensor, directions)) else None
        samples = options["preconditioner_samples"]
        preconditioner = model.preconditioner(samples) if samples else None
        while True:
            solution = conjugate_gradients(
                model.product, -gradient, start, limit=options["max_cg"], preconditioner=preconditioner
            )
            iterations += solution.iterations
            direction, predicted, full_loss = backtrack(solution.iterates, sample.loss_at)
            full_loss = full_loss if sample is objective else objective.loss_at(direction)
            if full_loss < loss or start is None:
                return solution, iterations, outcome, (direction, predicted, full_loss)
            start, outcome = None, "restarted"

    def _parameters(self) -> list[Tensor]:
        parameters = [z for group in self.param_groups for z in group["params"] if z.requires_grad]
        if not parameters:
            raise ValueError("all parameters are frozen. Fix: parameter.requires_grad_(True) for some of them.")
        _check_parameters(parameters)
        return parameters

    def _gradient(self, objective: Objective, model: QuadraticModel) -> tuple[float, Tensor]:
        """Return the loss and its gradient, and linearize ``model``.

        If both use the same batch, one graph serves the gradient and the model.
        """
        is_shared = objective is model.objective
        with torch.enable_grad(), twice_differentiable(model.theta.device) if is_shared else nullcontext():
            batch = objective.batch()
            mean = objective.loss(batch)
        objective.check_graph(batch, is_shared and model.structural > 0)
        loss = float(mean)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} before the step. Fix: remove values that are not finite from inputs and targets, "
                "or use smaller initial weights."
            )
        grads = torch.autograd.grad(mean, model.parameters, retain_graph=is_shared, allow_unused=True)
        for k, grad in enumerate(grads):
            if grad is not None and grad.layout != torch.strided:
                fix = "torch.nn.Embedding(..., sparse=False)"
                raise ValueError(f"the gradient of {self._names()[k]} is sparse. Fix: {fix}.")
            if grad is not None and not bool(torch.isfinite(grad).all()):
                raise FloatingPointError(
                    f"the gradient of {self._names()[k]} is not finite, but the loss is. Fix: smaller initial weights, "
                    "or float64; torch.autograd.detect_anomaly() finds the operation."
                )
        model.linearize(batch if is_shared else None)
        return loss, flatten(grads, model.parameters)

    def _names(self) -> list[str]:
        """Return the names of the parameters that require gradients, or their indices if they have no names."""
        names: list[str] = []
        for k, group in enumerate(self.param_groups):
            given = group.get("param_names") or [f"parameter {i} of group {k}" for i in range(len(group["params"]))]
            names += [name for name, z in zip(given, group["params"], strict=True) if z.requires_grad]
        return names

    @torch.no_grad()
    def product(self, vector: Tensor) -> Tensor:
        """Return the product of the damped Gauss-Newton matrix A of the last step with a vector.

        A is computed on the curvature batch of the last step, at the parameters before the step, with the damping of
        the step. The first call after a step evaluates the closure; later calls reuse the graph until the next step.

        Arguments:
            vector: a vector v with one entry per element of all parameters that require gradients, in the order of
                ``torch.nn.utils.parameters_to_vector``.

        Returns:
            The product A v, of the same shape.

        Raises:
            RuntimeError: no step was taken, or parameters were frozen after the last step.
            ValueError: the vector has the wrong shape or dtype.
        """
        if self._model is None:
            raise RuntimeError(
                "product() needs the matrix of a step, got a call before step(). Fix: call step() first."
            )
        theta = self._model.theta
        if not isinstance(vector, Tensor) or vector.shape != theta.shape or vector.dtype != theta.dtype:
            got = f"{tuple(vector.shape)} of {vector.dtype}" if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(
                f"the vector must be {tuple(theta.shape)} of {theta.dtype}, got {got}. "
                "Fix: torch.nn.utils.parameters_to_vector(vectors)."
            )
        frozen = sum(not parameter.requires_grad for parameter in self._model.parameters)
        if frozen:
            raise RuntimeError(
                f"product() needs the parameters of the last step, but {frozen} of them were frozen after it. Fix: "
                "requires_grad_(True) for these, or another step()."
            )
        with assign(self._model.parameters, theta), no_autocast(theta):
            return self._model.product(vector)


def _check_parameters(parameters: list[Tensor]) -> None:
    if len(set(parameters)) < len(parameters):
        raise ValueError("a parameter is given twice. Fix: list(dict.fromkeys(parameters)) for tied weights.")
    first = parameters[0]
    for parameter in parameters:
        if parameter.is_complex():
            raise ValueError(
                f"the parameters must be real, got {parameter.dtype}. Fix: store real and imaginary parts, and use "
                "torch.view_as_complex in the model."
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the parameters must be float32 or float64, got {parameter.dtype}, which cannot resolve small changes "
                "of the loss. Fix: model.float()."
            )
        if parameter.dtype != first.dtype or parameter.device != first.device:
            raise ValueError(
                "the parameters must have one dtype and one device, got "
                f"{first.dtype} on {first.device} and {parameter.dtype} on {parameter.device}. Fix: model.to(...)."
            )


def _rounding_error(objective: Objective, theta: Tensor, loss: float) -> float:
    """Estimate the rounding error of the loss at the parameters theta.

    It is the change of the loss if each parameter is changed by its last digit, up or down.
    """
    eps = torch.finfo(theta.dtype).eps
    signs = 2 * torch.randint(2, theta.shape, generator=torch.Generator().manual_seed(0)) - 1
    last_digits = eps * theta * signs.to(theta)
    changes = abs(objective.loss_at(last_digits) - loss), abs(objective.loss_at(-last_digits) - loss)
    return max([eps * abs(loss), *filter(math.isfinite, changes)])
