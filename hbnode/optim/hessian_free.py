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
from hbnode.optim.conjugate_gradients import Stop, backtrack, conjugate_gradients, line_search
from hbnode.optim.curvature import Objective, QuadraticModel, assign, flatten, unflatten
from hbnode.optim.double_backward import twice_differentiable
from hbnode.optim.losses import check_loss

WARM_START = 0.95
LOW, HIGH = 0.25, 0.75  # the ratio rho of a bad step and of a good one
RAISE, LOWER = 1.5, 2 / 3  # factors of lambda after them

Hidden: TypeAlias = Tensor | tuple[Tensor, Tensor] | list[Tensor | tuple[Tensor, Tensor]] | None
Closure: TypeAlias = Callable[
    [], tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Hidden] | tuple[Tensor, Tensor, Hidden, Tensor]
]
Outcome: TypeAlias = Literal["accepted", "restarted", "rejected", "stationary"]


@dataclass(frozen=True)
class Progress:
    """What a step of :class:`~hbnode.optim.HessianFree` did; ``str`` of it is a line for a progress bar.

    Attributes:
        loss: the loss before the step, on the gradient batch.
        new_loss: the loss after the step, on the gradient batch.
        damping: lambda of the step.
        ratio: rho, the change of the loss by the whole step d over the change that the quadratic model predicted. It is
            negative if the loss grew, minus infinity if the loss was not finite there, and NaN if both changes are
            below the precision of the loss.
        cg_iterations: iterations of conjugate gradients, those before a restart included.
        cg_stop: why the last of them ended: "progress" (Martens' rule), "limit", "solved" (no residual is left) or
            "negative curvature" (d^T A d <= 0, which only rounding can cause).
        step_length: alpha of the line search. It is 0 if the parameters were left as they were.
        outcome: "accepted"; "restarted", accepted after conjugate gradients began again from zero; "rejected", no step
            reduced the loss; or "stationary", none did, and the changes of the loss are below its precision, predicted
            ones and true ones.
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
        """How much the step reduced the loss."""
        return self.loss - self.new_loss

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4g}, reduction {self.reduction:.3g}, lambda {self.damping:.3g}, rho {self.ratio:.3g}, "
            f"CG {self.cg_iterations} ({self.cg_stop}), step {self.step_length:.3g}, {self.outcome}"
        )


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
        self._model: QuadraticModel | None = None
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
        _check_parameters([parameter for group in self.param_groups for parameter in group["params"]])

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._model, self.progress = None, None

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state that :meth:`state_dict` returned.

        Arguments:
            state_dict: of a HessianFree for the same loss and for parameters of the same shapes.

        Raises:
            ValueError: the state is that of another optimizer, loss or model.
        """
        if not isinstance(state_dict, Mapping) or not {"param_groups", "state"} <= state_dict.keys():
            raise ValueError(
                "the state_dict is no state of an optimizer: it has no 'param_groups' and 'state'. Fix: the one that "
                "HessianFree.state_dict() gave."
            )
        options = self.param_groups[0]
        for group in state_dict["param_groups"]:
            missing = sorted(options.keys() - group.keys() - {"param_names"})
            if missing:
                raise ValueError(
                    f"the state_dict is of another optimizer: it has no {missing[0]!r}. Fix: the one that "
                    "HessianFree.state_dict() gave."
                )
            for name in ("loss", "case_dim"):
                if group[name] != options[name]:
                    raise ValueError(
                        f"the state_dict is of {name}={group[name]!r}, the optimizer has {options[name]!r}. "
                        f"Fix: HessianFree(..., {name}={group[name]!r}) if that is meant."
                    )
            if not 0 <= group["damping"] < math.inf:
                raise ValueError(f"the damping of the state_dict is {group['damping']}. Fix: a state from before.")
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=False):  # torch's own errors name unequal numbers
            direction = state_dict["state"].get(place, {}).get("direction")
            if direction is not None and direction.shape != parameter.shape:
                raise ValueError(
                    f"the state_dict has a direction of shape {tuple(direction.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}. Fix: the state of an optimizer of the same model."
                )
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
        parameters = self._parameters()
        with no_autocast(parameters[0]):  # it would round the products
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

        # The direction: conjugate gradients from the last one and, if that finds nothing, from zero.
        iterations: int = 0
        outcome: Outcome = "accepted"
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
                break
            start, outcome = None, "restarted"

        # Its length, by a line search, and lambda, by Levenberg and Marquardt's rule.
        length, new_loss, ratio = 0.0, loss, math.nan
        eps = torch.finfo(theta.dtype).eps
        is_visible = -predicted > eps * abs(loss)
        if is_visible:
            length, new_loss = line_search(direction, full_loss, loss, gradient, objective.loss_at)
            ratio = (full_loss - loss) / predicted
        factor = LOWER if ratio > HIGH else 1.0 if ratio >= LOW else RAISE
        if not ratio >= LOW:
            # Rounding is what the last digits of all parameters change in the loss.
            signs = 2 * torch.randint(2, theta.shape, generator=torch.Generator().manual_seed(0)) - 1
            last_digits = eps * theta * signs.to(theta)
            changes = abs(objective.loss_at(last_digits) - loss), abs(objective.loss_at(-last_digits) - loss)
            rounding = max([eps * abs(loss), *filter(math.isfinite, changes)])
            if not is_visible or max(-predicted, abs(full_loss - loss)) <= rounding:
                ratio = math.nan
                slope, bend = float(torch.dot(gradient, direction)), model.undamped_curvature(direction)
                undamped = 0.0 if slope == 0 else slope**2 / (2 * bend) if bend > 0 else math.inf
                factor = LOWER if undamped > rounding else 1.0

        if length:
            for parameter, part in zip(parameters, unflatten(theta + length * direction, parameters), strict=True):
                parameter.copy_(part)  # autograd refuses graphs that were made before
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

    def _parameters(self) -> list[Tensor]:
        """Return those that are not frozen."""
        parameters = [z for group in self.param_groups for z in group["params"] if z.requires_grad]
        if not parameters:
            raise ValueError("all parameters are frozen. Fix: parameter.requires_grad_(True) for some of them.")
        _check_parameters(parameters)
        return parameters

    def _gradient(self, objective: Objective, model: QuadraticModel) -> tuple[float, Tensor]:
        """Return the loss and its gradient; the model has the same graph if it has the same batch."""
        is_shared = objective is model.objective
        with torch.enable_grad(), twice_differentiable(model.theta.device) if is_shared else nullcontext():
            batch = objective.batch()
            mean = objective.loss(batch)
        objective.check_graph(batch, is_shared and model.structural > 0)
        loss = float(mean)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} before the step. Fix: look for values that are not finite in the inputs, targets "
                "and parameters; smaller initial weights."
            )
        grads = torch.autograd.grad(mean, model.parameters, retain_graph=is_shared, allow_unused=True)
        for k, grad in enumerate(grads):
            if grad is not None and grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {self._names()[k]} is sparse. Fix: torch.nn.Embedding(..., sparse=False)."
                )
            if grad is not None and not bool(torch.isfinite(grad).all()):
                raise FloatingPointError(
                    f"the gradient of {self._names()[k]} is not finite, though the loss is. Fix: smaller initial "
                    "weights, or float64; torch.autograd.detect_anomaly() tells which operation it is."
                )
        model.linearize(batch if is_shared else None)
        return loss, flatten(grads, model.parameters)

    def _names(self) -> list[str]:
        """Return the names of parameters that are not frozen, or else their places."""
        names: list[str] = []
        for k, group in enumerate(self.param_groups):
            given = group.get("param_names") or [f"parameter {i} of group {k}" for i in range(len(group["params"]))]
            names += [name for name, z in zip(given, group["params"], strict=True) if z.requires_grad]
        return names

    @torch.no_grad()
    def product(self, vector: Tensor) -> Tensor:
        """Return the product of the last step's damped Gauss-Newton matrix A with a vector.

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
        if self._model is None:
            raise RuntimeError("product() belongs to the last step, and there was none. Fix: call step() first.")
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
                f"product() belongs to the parameters of the last step, and {frozen} of them are frozen since. Fix: "
                "requires_grad_(True) for these, or another step()."
            )
        with assign(self._model.parameters, theta), no_autocast(theta):
            return self._model.product(vector)


def _check_parameters(parameters: list[Tensor]) -> None:
    """Refuse what cannot be one vector of float32 or float64."""
    if len(set(parameters)) < len(parameters):
        raise ValueError("a parameter is given twice. Fix: list(dict.fromkeys(parameters)), where weights are tied.")
    first = parameters[0]
    for parameter in parameters:
        if parameter.is_complex():
            raise ValueError(
                f"the parameters must be real, got {parameter.dtype}. Fix: parameters of their real and imaginary "
                "parts, and torch.view_as_complex in the model."
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"the parameters must be float32 or float64, got {parameter.dtype}: a step weighs small changes of the "
                "loss. Fix: model.float()."
            )
        if parameter.dtype != first.dtype or parameter.device != first.device:
            raise ValueError(
                "the parameters must have one dtype and one device, got "
                f"{first.dtype} on {first.device} and {parameter.dtype} on {parameter.device}. Fix: model.to(...)."
            )
