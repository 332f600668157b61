"""Second derivatives of models: contexts in which layers have them, and errors for models that do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from hbnode import _torch
from hbnode.optim.r_operator import ROperator

_LOCK = threading.RLock()
_REFUSED = "the model cannot be differentiated twice, which Gauss-Newton products need"
_CHECKPOINT = "Fix: torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
_CUSTOM = "Fix: replace this operation, or write a custom backward in differentiable torch operations."


@contextmanager
def twice_differentiable(device: torch.device) -> Iterator[None]:
    """In the context, run layers in implementations that have second derivatives.

    It disables oneDNN, cuDNN, fused attention and torch.compile, whose operations have only first derivatives.
    Recurrent layers of torch.nn run under :class:`ROperator`. The settings are global, so only one thread at a time
    can be in the context.
    """
    backend, operator = torch.backends.mkldnn, ROperator(device.type)
    with _LOCK, ExitStack() as stack:
        stack.enter_context(_torch.double_backward())
        stack.callback(setattr, backend, "enabled", backend.enabled)  # because backend.flags() warns about TF32
        backend.enabled = False  # type: ignore[assignment]  # a property, which torch does not type
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_torch.in_eager_mode())
        stack.callback(setattr, operator, "is_on", False)
        stack.enter_context(operator)
        yield


@contextmanager
def translate_errors() -> Iterator[None]:
    """In the context, replace errors of autograd by one that says that the model cannot be differentiated twice.

    The error suggests a fix. Out-of-memory errors are not replaced.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "tried to allocate" in str(error):
            raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(f"{_REFUSED} ({text}) {_CHECKPOINT if 'Checkpointing' in text else _CUSTOM}") from error


def refuse(reason: str) -> NoReturn:
    """Raise RuntimeError with the reason why a model cannot be differentiated twice."""
    raise RuntimeError(f"{_REFUSED}: {reason}. {_CUSTOM}")


@contextmanager
def detect_detached_gradients(outputs: Sequence[Tensor]) -> Iterator[None]:
    """In the context, raise RuntimeError if the backward pass of an operation returns gradients without a graph.

    Such gradients cannot be differentiated again. Hooks on the graph of ``outputs`` check the gradients of all
    operations.
    """
    names: list[str] = []

    def check(name: str, grads: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> None:
        if any(z is not None and z.requires_grad for z in inputs):
            names.extend(name for z in grads if z is not None and _is_detached(z) and bool(z.any()))

    with ExitStack() as stack:
        for node in _nodes(outputs):
            stack.callback(node.register_hook(partial(check, node.name())).remove)
        yield
    if names:
        refuse(f"the backward pass of {names[0]} has no graph")


def _is_detached(z: Tensor) -> bool:
    """Return whether the gradient z has no graph, or only the error node that ``once_differentiable`` creates."""
    return not z.requires_grad or (z.grad_fn is not None and z.grad_fn.name() == "torch::autograd::Error")


def check_checkpoints(outputs: Sequence[Tensor]) -> None:
    """Raise RuntimeError if the graph has reentrant checkpoints, because autograd.grad cannot find their parameters."""
    if any(node.name() == "CheckpointFunctionBackward" for node in _nodes(outputs)):
        raise RuntimeError(f"{_REFUSED}: it has reentrant checkpoints, which hide parameters. {_CHECKPOINT}")


def _nodes(outputs: Sequence[Tensor]) -> Iterator[Node]:
    stack = [z.grad_fn for z in outputs]
    visited: set[Node] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in visited:
            yield node
            visited.add(node)
            stack += [after for after, _ in node.next_functions]
