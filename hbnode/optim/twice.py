"""The forms of layers that can be differentiated twice, and the names of those that cannot."""

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
from hbnode._torch import may_have_compiled
from hbnode.optim.recurrence import ROperator

_TURNS = threading.RLock()
_REFUSED = "the model cannot be differentiated twice, which Gauss-Newton products need"
_CHECKPOINT = "Fix: torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
_CUSTOM = (
    "Fix: another operation in its place; of a custom autograd function, a backward pass in operations that autograd "
    "knows."
)


@contextmanager
def plain_paths(device: torch.device) -> Iterator[None]:
    """Let layers take forms that have second derivatives, and recurrent layers an R-operator.

    Recurrent layers of oneDNN and cuDNN and fused attention have first derivatives alone; the graphs of torch.compile
    too. These are settings of the process, so threads take turns.
    """
    with _TURNS, ExitStack() as stack:
        stack.enter_context(_torch.double_backward())
        stack.enter_context(_without_onednn())
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if may_have_compiled() and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(ROperator(device.type))
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
        if isinstance(error, torch.OutOfMemoryError) or "tried to allocate" in str(error):
            raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(f"{_REFUSED} ({text}) {_CHECKPOINT if 'Checkpointing' in text else _CUSTOM}") from error


def refuse(why: str) -> NoReturn:
    """Refuse a model whose backward pass has no graph of its own, or not the right one."""
    raise RuntimeError(f"{_REFUSED}: {why}. {_CUSTOM}")


@contextmanager
def refusing_ends(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Refuse, by its name, an operation whose gradient is without graph though what it is computed from has one.

    The backward pass within the context is looked at, node by node.
    """
    ends: list[str] = []

    def look_at(name: str, to: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        if any(z is not None and z.requires_grad for z in given):
            ends.extend(name for z in to if z is not None and _is_end(z) and bool(z.any()))

    with ExitStack() as stack:
        for node in _nodes(outputs):
            stack.callback(node.register_hook(partial(look_at, node.name())).remove)
        yield
    if ends:
        refuse(f"a part of its backward pass has no graph, that of {ends[0]}")


def _is_end(z: Tensor) -> bool:
    """Whether a gradient has no graph, or that of ``once_differentiable``."""
    return not z.requires_grad or (z.grad_fn is not None and z.grad_fn.name() == "torch::autograd::Error")


def check_checkpoints(outputs: Sequence[Tensor]) -> None:
    """Refuse reentrant checkpoints, which hide parameters: they look as if the outputs did not depend on them."""
    if any(node.name() == "CheckpointFunctionBackward" for node in _nodes(outputs)):
        raise RuntimeError(f"{_REFUSED}: it has reentrant checkpoints, which hide parameters. {_CHECKPOINT}")


def _nodes(outputs: Sequence[Tensor]) -> Iterator[Node]:
    """All operations of the outputs' graph."""
    ahead = [z.grad_fn for z in outputs]
    seen: set[Node] = set()
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            ahead += [after for after, _ in node.next_functions]
