"""What a step of the optimizer reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Stop: TypeAlias = Literal["progress", "limit", "solved", "negative curvature"]
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
