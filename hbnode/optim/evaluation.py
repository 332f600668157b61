"""What the closures of a step return: checked, and evaluated again at other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hbnode._torch import is_tracing, random_state, set_random_state
from hbnode.optim.gauss_newton import Linearized
from hbnode.optim.losses import MatchingLoss

REPEATS = 1e-3  # of two losses at the same parameters, which differ by rounding at most
_RETURNS = "(outputs, targets), (outputs, targets, hidden) or (outputs, targets, hidden, weight)"


@dataclass(frozen=True)
class Batch:
    """A checked batch.

    Attributes:
        outputs: of the model, (cases, ...) or with the cases in another dimension.
        targets: what they should be.
        hidden: what is damped, and its metric or None.
        weight: of the losses, or None.
        cases: their number.
    """

    outputs: Tensor
    targets: Tensor
    hidden: list[tuple[Tensor, Tensor | None]]
    weight: Tensor | None
    cases: int


class Evaluation:
    """A closure, with the loss that it is for. It sees the same random numbers in each call.

    Arguments:
        closure: the user's.
        name: how errors call it.
        loss: of the outputs.
        case_dim: the dimension of the outputs that counts cases.
        device: of the parameters.
    """

    def __init__(
        self, closure: Callable[[], Any], name: str, loss: MatchingLoss, case_dim: int, device: torch.device
    ) -> None:
        if not callable(closure):
            raise TypeError(
                f"{name} must be a function without arguments that returns {_RETURNS}, got "
                f"{type(closure).__name__}. Fix: lambda: (model(x), y)."
            )
        self.closure, self.name, self.loss, self.case_dim, self.device = closure, name, loss, case_dim, device
        self.random_state: tuple[Tensor, ...] | None = None
        self.targets: Tensor | None = None
        self.differentiates = False  # whether the closure itself takes derivatives

    def batch(self) -> Batch:
        """Call the closure."""
        if self.random_state is None:
            self.random_state = random_state(self.device)
            found = self._checked(self.closure())
        else:
            with set_random_state(self.random_state, self.device):
                found = self._checked(self.closure())
        if self.targets is None:
            self.targets = found.targets
        elif not _equal(self.targets, found.targets):
            raise ValueError(
                f"{self.name}() returned other targets than when it was first called in this step, which evaluates one "
                f"batch several times. Fix: draw the batch before the step, x, y = next(batches), and then "
                "optimizer.step(lambda: (model(x), y))."
            )
        return found

    def value(self) -> float:
        """The loss at the present parameters; it may not be finite."""
        with torch.set_grad_enabled(self.differentiates):
            try:
                return float(self.mean(self.batch()).detach())
            except RuntimeError as error:
                if self.differentiates or "does not require grad" not in str(error):
                    raise
        self.differentiates = True
        return self.value()

    def check_repeats(self) -> None:
        """Refuse a closure that is another function in each call."""
        one, other = self.value(), self.value()
        if math.isfinite(one) and not abs(one - other) <= REPEATS * abs(one):
            raise ValueError(
                f"{self.name}() gives the loss {one:g} and then {other:g}, with the same parameters. Fix: draw noise, "
                "and carry states from batch to batch, outside of it; torch's default generators are set back, others "
                "are not."
            )

    def mean(self, batch: Batch) -> Tensor:
        """The loss: the sum over positions and features, averaged over cases, added up in float64."""
        return self._each(batch).sum(dtype=torch.float64) / batch.cases

    def _each(self, batch: Batch) -> Tensor:
        """The losses of positions."""
        each = self.loss.each(batch.outputs, batch.targets)
        return each if batch.weight is None else each * batch.weight

    def linearized(self, batch: Batch, structural: float) -> Linearized:
        """The outputs and their metrics; if lambda mu is not 0, with the hidden states and theirs."""
        damps = structural > 0
        self.check_graph(batch, damps)
        for name, z in (("outputs", batch.outputs), ("targets", batch.targets)):
            if not bool(z.isfinite().all()):
                raise FloatingPointError(
                    f"the {name} of {self.name}() are not finite. Fix: look for such values in the inputs, targets and "
                    "parameters; smaller initial weights."
                )
        scale = 1 / batch.cases
        hessian, weight = self.loss.hessian(batch.outputs, batch.targets), batch.weight
        if weight is not None and self.loss.weight_shape(batch.outputs) != batch.outputs.shape:
            weight = weight.unsqueeze(-1)
        factor = scale if weight is None else scale * weight
        outputs, metrics = [batch.outputs], [lambda z: hessian(z) * factor]
        for hidden, metric in batch.hidden if damps else ():
            outputs.append(hidden)
            metrics.append(_scaled(structural * scale if metric is None else structural * scale * metric))
        return Linearized(outputs, metrics, lambda: self._of_cases(batch))

    @torch.enable_grad()
    def _of_cases(self, batch: Batch) -> Tensor:
        """The loss of each case."""
        return self._each(batch).movedim(self.case_dim, 0).reshape(batch.cases, -1).sum(1)

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
        for name, z in (("outputs", batch.outputs), *(("hidden", z) for z, _ in batch.hidden if damps)):
            if not z.requires_grad:
                raise ValueError(
                    f"the {name} of {self.name}() have no graph to the parameters. Fix: leave out torch.no_grad(), "
                    "torch.inference_mode(), .detach() and .data."
                )

    def _checked(self, returned: object) -> Batch:
        if not isinstance(returned, (tuple, list)) or not 2 <= len(returned) <= 4:
            got = f"{len(returned)} of them" if isinstance(returned, (tuple, list)) else type(returned).__name__
            fix = (
                f"let {self.name} return (model(x), y); the optimizer computes the loss itself, and calls no backward()"
            )
            raise TypeError(f"{self.name}() must return {_RETURNS}, got {got}. Fix: {fix}.")
        outputs, targets, hidden, weight = (*returned, None, None)[:4]
        for what, z in (("outputs", outputs), ("targets", targets)):
            if not isinstance(z, Tensor):
                fix = "output, state = model(x), and return output" if isinstance(z, tuple) else "pass a tensor"
                raise TypeError(f"the {what} of {self.name}() must be a tensor, got {type(z).__name__}. Fix: {fix}.")
        if not outputs.is_floating_point():
            raise TypeError(f"the outputs of {self.name}() must be real numbers, got {outputs.dtype}. Fix: .float().")
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        positions = self.loss.weight_shape(outputs)
        if not -outputs.dim() <= self.case_dim < outputs.dim() or self.case_dim % outputs.dim() >= len(positions):
            raise ValueError(
                f"case_dim={self.case_dim} must be a dimension of the outputs that counts cases, and the outputs are "
                f"{tuple(outputs.shape)}. Fix: case_dim=0, and a first dimension for the cases: outputs[None] of one."
            )
        weighed = self._weight(weight, outputs)
        if weighed is not None and targets.is_floating_point() and targets.shape == outputs.shape:
            targets = targets.where(weighed != 0, 0.0)  # 0 * NaN is NaN
        self.loss.check(outputs, targets)
        cases = outputs.shape[self.case_dim]
        if cases == 0:
            raise ValueError(
                f"the outputs of {self.name}() have no cases: they are {tuple(outputs.shape)}. Fix: leave empty "
                "batches out."
            )
        return Batch(outputs, targets, self._hidden(hidden), weighed, cases)

    def _weight(self, weight: object, outputs: Tensor) -> Tensor | None:
        if weight is None:
            return None
        shape = self.loss.weight_shape(outputs)
        if not isinstance(weight, Tensor):
            raise TypeError(f"the weight must be a tensor, got {type(weight).__name__}. Fix: torch.tensor(weight).")
        if not _broadcasts(weight, shape):
            raise ValueError(
                f"the weight must broadcast to {shape}, got {tuple(weight.shape)}. Fix: mask.unsqueeze(-1) if it lacks "
                "the features."
            )
        weight = weight.detach().to(outputs.dtype)
        _check_not_negative(weight, "the weight")
        return weight

    def _hidden(self, hidden: object) -> list[tuple[Tensor, Tensor | None]]:
        if hidden is None:
            return []
        entries: Sequence[Any] = hidden if isinstance(hidden, list) else [hidden]
        found: list[tuple[Tensor, Tensor | None]] = []
        for entry in entries:
            z, metric = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
            if not isinstance(z, Tensor) or not (metric is None or isinstance(metric, Tensor)):
                raise TypeError(
                    "hidden must be a tensor, a pair (tensor, weight) or a list of these, got "
                    f"{type(entry).__name__}. Fix: hbnode.optim.tanh_hidden(h) for the outputs h of a tanh RNN."
                )
            if metric is not None:
                if metric.requires_grad:
                    raise ValueError(
                        "the second of a pair of hidden is a weight, and has a graph. Fix: a list [h, c] of two "
                        "states, or weight.detach()."
                    )
                _check_not_negative(metric, "the weight of hidden")
                if not _broadcasts(metric, tuple(z.shape)):
                    raise ValueError(
                        f"the weight of hidden must broadcast to {tuple(z.shape)}, got {tuple(metric.shape)}. "
                        "Fix: weight.unsqueeze(-1) if it lacks the features."
                    )
            found.append((z, metric))
        return found


def tanh_hidden(h: Tensor) -> tuple[Tensor, Tensor]:
    """The states of a tanh RNN as structural damping acts on them: on the pre-activations, weighted by 1 - h^2.

    With h = tanh(t), a change of t weighted by 1 - h^2 (Algorithm 1, line 17, of the supplement to Martens and
    Sutskever, ICML 2011) is a change of h weighted by 1 / (1 - h^2), which this returns. Where 1 - h^2 is below the
    precision of the dtype, that precision stands for it.

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
    kept = h.detach()
    if not is_tracing() and bool((kept.abs() > 1).any()):
        raise ValueError(
            f"h must be in [-1, 1], values of tanh, got up to {kept.abs().max().item():g}. Fix: return h itself as "
            "hidden where units are no tanh."
        )
    return h, ((1 + kept) * (1 - kept)).clamp(min=torch.finfo(h.dtype).eps).reciprocal()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether these have the same shape and values, NaN among them."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def _broadcasts(weight: Tensor, shape: tuple[int, ...]) -> bool:
    try:
        return torch.broadcast_shapes(weight.shape, shape) == shape
    except RuntimeError:
        return False


def _scaled(factor: Tensor | float) -> Callable[[Tensor], Tensor]:
    return lambda z: z * factor


def _check_not_negative(weight: Tensor, name: str) -> None:
    if weight.numel() and not bool(((weight >= 0) & weight.isfinite()).all()):
        low, high = weight.min().item(), weight.max().item()
        raise ValueError(
            f"{name} must be finite numbers >= 0, got {low:g} to {high:g}. Fix: weight.clamp(min=0, max=...)."
        )
