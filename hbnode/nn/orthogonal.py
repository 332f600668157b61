"""The orthogonal recurrent weights of DTRIV: B = base exp(A), where the base can be reset during training."""

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization, type_before_parametrizations
from torch.utils.hooks import RemovableHandle

from hbnode._checks import as_count
from hbnode._torch import make_parametrized, no_autocast

ANGLES = {"cayley": (0.0, math.pi / 2), "henaff": (-math.pi, math.pi)}  # named as in the authors' code


class Trivialization(nn.Module):
    """A parametrization B = base exp(A) of an orthogonal matrix B by a matrix X, with A = tril(X) - tril(X)^T.

    ``base`` is an orthogonal matrix, stored as a buffer. The parametrization has the names and values of torch's
    ``orthogonal(..., orthogonal_map="matrix_exp")``, and the state_dicts are interchangeable. B is computed in float32
    or float64. The base keeps this dtype if the module is cast to half precision, because a rounded base is not
    orthogonal, and the exponential has no gradient at 0 in half precision.

    Arguments:
        weight: the initial B (n, n).
    """

    base: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("base", torch.zeros_like(weight, dtype=_wide(weight)))

    def _product(self, x: Tensor) -> Tensor:
        with no_autocast(x):
            below = x.to(_wide(x)).tril(-1)
            return self.base @ torch.matrix_exp(below - below.mT)

    def forward(self, x: Tensor) -> Tensor:
        """Return the orthogonal matrix B (n, n) for X = x (n, n), in the dtype of x."""
        return self._product(x).to(x.dtype)

    @torch.no_grad()
    def right_inverse(self, b: Tensor) -> Tensor:
        """Set the base to b, or to Q of its QR decomposition if b is not orthogonal; return X = 0."""
        wide = b.to(self.base.dtype)
        if not b.is_meta:
            n = len(b)
            off = (wide.mT @ wide - torch.eye(n, dtype=wide.dtype, device=wide.device)).abs().max()
            if not off < 10 * n * torch.finfo(wide.dtype).eps:
                q, r = torch.linalg.qr(wide)
                wide = torch.where(r.diagonal() < 0, -q, q)
        self.base.copy_(wide)
        return torch.zeros_like(b)

    @torch.no_grad()
    def rebase(self, x: Tensor) -> None:
        """Set the base to the current B, and X to zero, which leaves B unchanged.

        X is changed in place, because optimizers and DistributedDataParallel refer to it.
        """
        self.right_inverse(self._product(x))
        x.zero_()

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def keep_wide(z: Tensor) -> Tensor:
            moved = function(z)
            return moved if moved.dtype == _wide(moved) else z.to(moved.device, _wide(moved))

        return super()._apply(keep_wide, recurse)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def orthogonal_by_angles(like: Tensor, init: str) -> Tensor:
    """Return an orthogonal matrix whose diagonal blocks are random 2 × 2 rotations.

    Arguments:
        like: a square matrix that defines size, dtype and device; half precision becomes float32.
        init: "cayley", for angles from U(0, π/2), or "henaff", for angles from U(-π, π).
    """
    angles = torch.empty(len(like) // 2, dtype=_wide(like), device=like.device).uniform_(*ANGLES[init])
    blocks = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=-1).view(-1, 2, 2)
    rest = [angles.new_ones(1, 1)] * (len(like) % 2)
    return torch.block_diag(*blocks, *rest)


class OrthogonalWeights(nn.Module):
    """The base class of the layers and cells whose recurrent weights ``weight_hh*`` are orthogonal."""

    names: ClassVar[tuple[str, ...]] = ("weight_ih", "weight_hh", "bias_ih", "bias")
    init: str
    hidden_size: int

    def _shapes(self, input_size: int) -> dict[str, tuple[int, ...]]:
        n = self.hidden_size
        return {"weight_ih": (n, input_size), "weight_hh": (n, n), "bias": (n,)}

    def _make_orthogonal(self) -> None:
        for name in [name for name, _ in self.named_parameters() if name.startswith("weight_hh")]:
            weight = getattr(self, name)
            register_parametrization(self, name, Trivialization(weight), unsafe=True)

    def _trivializations(self) -> Iterator[tuple[Trivialization, Tensor]]:
        """Yield the pair of the :class:`Trivialization` and the unconstrained parameter X of each orthogonal weight."""
        for made in getattr(self, "parametrizations", {}).values():
            if isinstance(made[0], Trivialization):
                yield made[0], made.original

    def orthogonal_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters X of the orthogonal weights; ``Trivialization`` maps them to the weights."""
        for _, original in self._trivializations():
            yield original

    def rebase(self) -> None:
        """Set the base of each orthogonal weight B = base exp(A) to the current B, and A to 0.

        The weights and outputs do not change.
        """
        for trivialization, original in self._trivializations():
            trivialization.rebase(original)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new parameters: W_ih by He's initialization for relu, biases from U(-0.01, 0.01), B by ``init``."""
        for name in (*self._parameters, *getattr(self, "parametrizations", {})):
            value = getattr(self, name)
            if name.startswith("weight_ih"):
                nn.init.kaiming_normal_(value, nonlinearity="relu")
            elif name.startswith("bias"):
                nn.init.uniform_(value, -0.01, 0.01)
            elif name.startswith("weight_hh") and name in self._parameters:
                value.copy_(orthogonal_by_angles(value, self.init))
            else:
                continue
            if name not in self._parameters:
                setattr(self, name, value)
        for trivialization, original in self._trivializations():
            trivialization.right_inverse(orthogonal_by_angles(original, self.init))
            original.zero_()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Return what pickle needs to rebuild the module; torch refuses to pickle parametrized modules."""
        state = {name: value for name, value in self.__dict__.items() if name != "_compiled_call_impl"}
        return _empty, (type_before_parametrizations(self),), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if is_parametrized(self):
            make_parametrized(self)


def _empty(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def rebase_every(optimizer: torch.optim.Optimizer, module: nn.Module, steps: int) -> RemovableHandle:
    """Rebase all orthogonal weights in a module after every ``steps`` steps of an optimizer.

    Rebasing sets the base of each weight B = base exp(A) to B.

    Arguments:
        optimizer: the optimizer of the weights' parameters. Rebasing does not change its running averages.
        module: the module that contains the orthogonal layers.
        steps: number of optimizer steps between two rebasings, called K in DTRIV. Without this function, weights are
            never rebased (K = ∞).

    Returns:
        A handle whose ``remove()`` ends the rebasing.

    Raises:
        ValueError: there is no orthogonal layer in the module, or steps is not a positive whole number.
    """
    steps, layers = as_count(steps, "steps"), _layers(module)
    taken = 0

    def after_step(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken % steps == 0:
            for layer in layers:
                layer.rebase()

    return optimizer.register_step_post_hook(after_step)


def parameter_groups(module: nn.Module, lr: float, orthogonal_lr: float) -> list[dict[str, object]]:
    """Return two parameter groups for an optimizer, the second with the parameters of the orthogonal weights.

    Arguments:
        module: the module that contains the orthogonal layers.
        lr: learning rate of all other parameters.
        orthogonal_lr: learning rate of the parameters of the orthogonal weights.

    Raises:
        ValueError: there is no orthogonal layer in the module.
    """
    inner = [parameter for layer in _layers(module) for parameter in layer.orthogonal_parameters()]
    known = {id(parameter) for parameter in inner}
    outer = [parameter for parameter in module.parameters() if id(parameter) not in known]
    return [{"params": outer, "lr": lr}, {"params": inner, "lr": orthogonal_lr}]


def _layers(module: nn.Module) -> list[OrthogonalWeights]:
    layers = [layer for layer in module.modules() if isinstance(layer, OrthogonalWeights)]
    if not layers:
        raise ValueError(f"{type(module).__name__} holds no orthogonal layer. Fix: a DTRIV or a DTRIVCell in it.")
    return layers
