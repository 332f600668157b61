"""The forms of layers that can be differentiated twice, and the names of those that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hbnode._torch_internals import may_have_compiled
from hbnode.optim.recurrence import ROperator


@contextmanager
def plain_paths(device: torch.device) -> Iterator[None]:
    """Let layers take forms that have second derivatives, and recurrent layers an R-operator.

    Recurrent layers of oneDNN and cuDNN and fused attention have first derivatives alone; the graphs of torch.compile
    too.
    """
    with ExitStack() as stack:
        stack.enter_context(_without_onednn())
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if may_have_compiled() and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(ROperator())
        yield


@contextmanager
def _without_onednn() -> Iterator[None]:
    """``torch.backends.mkldnn.flags`` without its warning about TF32."""
    was = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property, which torch does not type
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = was


@contextmanager
def differentiating_twice() -> Iterator[None]:
    """Say which layer has no second derivative, and what to do."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise RuntimeError(
            f"the model cannot be differentiated twice, which Gauss-Newton products need: {text} {_fix(text)}"
        ) from error


def _fix(text: str) -> str:
    if "Checkpointing is not compatible" in text:
        return "Fix: torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
    if "Fix:" in text:
        return ""
    return "Fix: leave out custom autograd functions, or write their backward pass in differentiable operations."
