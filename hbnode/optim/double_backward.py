"""Double backward passes: layers in the forms that have one, and refusals of models that have none."""

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
_CUSTOM = (
    "Fix: another operation in its place; of a custom autograd function, a backward pass in operations that autograd "
    "knows."
)


@contextmanager
def twice_differentiable(device: torch.device) -> Iterator[None]:
    """Let layers take forms that have second derivatives, and recurrent layers an R-operator.

    Recurrent layers of oneDNN and cuDNN, fused attention and graphs of torch.compile have only first derivatives.
    These are settings of the process, so threads take turns.
    """
    backend, operator = torch.backends.mkldnn, ROperator(device.type)
    with _LOCK, ExitStack() as stack:
        stack.enter_context(_torch.double_backward())
        stack.callback(setattr, backend, "enabled", backend.enabled)  # backend.flags() would warn about TF32
        backend.enabled = False  # type: ignore[assignment]  # a property, which torch does not type
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if _torch.may_have_compiled() and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(setattr, operator, "is_on", False)
        stack.enter_context(operator)
        yield


@contextmanager
def translate_errors() -> Iterator[None]:
    """Say which layer has no second derivative, and what to do."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "tried to allocate" in str(error):
            raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(f"{_REFUSED} ({text}) {_CHECKPOINT if 'Checkpointing' in text else _CUSTOM}") from error


def refuse(reason: str) -> NoReturn:
    """Refuse a model whose backward pass has no graph, or not the right one."""
    raise RuntimeError(f"{_REFUSED}: {reason}. {_CUSTOM}")


@contextmanager
def refuse_constants(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Refuse, by its name, an operation whose gradient has no graph though what it is computed from has one.

    Hooks look at each node of the backward pass within the context.
    """
    names: list[str] = []

    def look_at(name: str, grads: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        if any(z is not None and z.requires_grad for z in given):
            names.extend(name for z in grads if z is not None and _is_constant(z) and bool(z.any()))

    with ExitStack() as stack:
        for node in _nodes(outputs):
            stack.callback(node.register_hook(partial(look_at, node.name())).remove)
        yield
    if names:
        refuse(f"a part of its backward pass has no graph, that of {names[0]}")


def _is_constant(z: Tensor) -> bool:
    """Return whether a gradient has no graph, or that of ``once_differentiable``."""
    return not z.requires_grad or (z.grad_fn is not None and z.grad_fn.name() == "torch::autograd::Error")


def check_checkpoints(outputs: Sequence[Tensor]) -> None:
    """Refuse reentrant checkpoints: they hide parameters, as if the outputs did not depend on them."""
    if any(node.name() == "CheckpointFunctionBackward" for node in _nodes(outputs)):
        raise RuntimeError(f"{_REFUSED}: it has reentrant checkpoints, which hide parameters. {_CHECKPOINT}")


def _nodes(outputs: Sequence[Tensor]) -> Iterator[Node]:
    """Return all operations of the outputs' graph."""
    ahead = [z.grad_fn for z in outputs]
    visited: set[Node] = set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in visited:
            yield node
            visited.add(node)
            ahead += [after for after, _ in node.next_functions]
