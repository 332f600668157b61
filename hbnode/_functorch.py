"""The little that is needed to run under the transforms of torch.func."""

from __future__ import annotations

import torch
from torch import Tensor


def is_active() -> bool:
    """Whether a transform (vmap, grad, jvp, ...) is running."""
    return torch._C._functorch.maybe_current_level() is not None


def plain(x: Tensor) -> Tensor:
    """The values of a tensor without what the transforms put around it; vmap's dimensions come in front."""
    x = x.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        dim = torch._C._functorch.maybe_get_bdim(x) if torch._C._functorch.is_batchedtensor(x) else -1
        x = torch._C._functorch.get_unwrapped(x)
        x = x.movedim(dim, 0) if dim > 0 else x
    return x
