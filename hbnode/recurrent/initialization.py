"""Shapes and initial values of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hbnode._torch import is_tracing
from hbnode.recurrent.cell_steps import CellStep

ANGLES = {"cayley": (0.0, math.pi / 2), "henaff": (-math.pi, math.pi)}  # by the names in the authors' code


def parameter_shapes(step: CellStep, input_size: int, hidden_size: int, bias: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a cell, by their names."""
    n = step.gates * hidden_size
    shapes: dict[str, tuple[int, ...]] = {"weight_ih": (n, input_size), "weight_hh": (n, hidden_size)}
    return shapes | ({"bias_ih": (n,), "bias_hh": (n,)} if bias else {})


@torch.no_grad()
def init_gates_(module: nn.Module, names: Iterable[str], n: int, forget_bias: float = 0.0) -> None:
    """Initialise as in appendices A and F: W_ih orthogonal, W_hh with ones on its diagonal, biases 0.

    Arguments:
        module: a layer or cell.
        names: of its parameters, parametrized or not.
        n: hidden_size.
        forget_bias: the forget gate's part of each bias of an LSTM.
    """
    for name in names:
        old = getattr(module, name)
        new = torch.zeros_like(old, dtype=torch.promote_types(old.dtype, torch.float32))
        if name.startswith("weight_ih"):
            nn.init.orthogonal_(new)
        elif name.startswith("weight_hh"):
            nn.init.eye_(new)
        elif len(new) == 4 * n:
            new[n : 2 * n] = forget_bias
        if name in module._parameters:
            old.copy_(new)
        else:
            setattr(module, name, new.to(old.dtype))


def orthogonal_by_angles(like: Tensor, init: str) -> Tensor:
    """Return an orthogonal matrix that rotates planes, block by block, by random angles.

    Arguments:
        like: a square matrix of the size, dtype and device; half precision becomes float32.
        init: "cayley" or "henaff", the range of the angles.
    """
    if init not in ANGLES:
        raise ValueError(f"init must be one of {tuple(ANGLES)}, got {init!r}. Fix: 'cayley'.")
    dtype = torch.promote_types(like.dtype, torch.float32)
    angles = torch.empty(len(like) // 2, dtype=dtype, device=like.device).uniform_(*ANGLES[init])
    blocks = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=-1).view(-1, 2, 2)
    rest = [angles.new_ones(1, 1)] * (len(like) % 2)
    return torch.block_diag(*blocks, *rest)


def check_weight_norm(module: nn.Module) -> None:
    """Refuse the NaN that weight_norm makes of rows of zeros; initially W_hh has such rows."""
    for name, made in getattr(module, "parametrizations", {}).items():
        if type(made[0]).__name__ != "_WeightNorm" or is_tracing():
            continue
        if getattr(module, name).isnan().any() and made.original0.isfinite().all() and made.original1.isfinite().all():
            raise ValueError(
                f"weight_norm makes NaN of {name}: it divides by norms that are 0, and at first most rows of W_hh are "
                f"zero. Fix: torch.nn.init.orthogonal_(layer.{name}) before weight_norm(layer, {name!r})."
            )
