"""The little that is needed to run under the transforms of torch.func."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def refusing(what: str, fix: str) -> Iterator[None]:
    """Say what does not work under a transform, in place of the transform's own error about its tensors."""
    try:
        yield
    except RuntimeError as error:
        if is_active() and any(word in str(error) for word in ("vmap", "functorch", "data pointer")):
            raise ValueError(f"{what} does not work under this transform of torch.func. Fix: {fix}.") from error
        raise
