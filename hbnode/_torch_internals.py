"""All private functions of torch that hbnode calls; tests/test_torch_internals.py checks that they exist.

They tell whether a transform of torch.func, forward mode or a backward pass is running, and the order of graph nodes;
and they are torch's fused recurrent layers.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node


def is_active() -> bool:
    """Whether a transform (vmap, grad, jvp, ...) is running; in what torch.compile traces too."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0  # which torch.compile knows the value of


def is_batched(x: Tensor) -> bool:
    """Whether a tensor stands for many, as a gradient does under ``grad(..., is_grads_batched=True)`` of autograd."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return torch.autograd.forward_ad._current_level >= 0


def backward_pass() -> int:
    """The number of the backward pass that the autograd engine runs in this thread, or -1 outside of any."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Whether the backward pass that runs in this thread was asked to keep the graph; False where torch cannot say."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # not yet in torch 2.4
    return asked is not None and asked()


def has_hooks(tensor: Tensor) -> bool:
    """Whether a hook of ``register_hook`` changes or looks at the gradient of a tensor."""
    return bool(tensor._backward_hooks)


def sequence_number(node: Node | None) -> int:
    """The number of a node of the graph: later nodes of a thread have larger ones."""
    assert node is not None
    return node._sequence_nr()


def has_global_hooks() -> bool:
    """Whether a hook is registered for the calls of all modules."""
    module = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def is_script_method(function: object) -> bool:
    """Whether a function is a method that TorchScript has compiled."""
    return isinstance(function, torch._C.ScriptMethod)


def may_have_compiled() -> bool:
    """Whether anything can have been compiled: the compiler, slow to import, has been imported."""
    return "torch._dynamo" in sys.modules


def torch_schema(function: Any) -> Any:
    """The schema of a function or method that TorchScript has compiled."""
    return function.schema


def make_parametrized(module: torch.nn.Module) -> None:
    """Give a module that was pickled the class that torch makes for a parametrized one, with its properties."""
    parametrize = torch.nn.utils.parametrize
    parametrize._inject_new_class(module)
    for name in module.get_submodule("parametrizations")._modules:
        parametrize._inject_property(module, name)


def plain(x: Tensor) -> Tensor:
    """The values of a tensor without what the transforms put around it; vmap's dimensions come in front."""
    x = x.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        dim = torch._C._functorch.maybe_get_bdim(x) if torch._C._functorch.is_batchedtensor(x) else -1
        x = torch._C._functorch.get_unwrapped(x)
        x = x.movedim(dim, 0) if dim > 0 else x
    return x


def to_numpy(x: Tensor) -> np.ndarray:
    """The values of a tensor in float64 on the host, as :func:`plain` gives them."""
    x = plain(x)
    with torch._C._DisableFuncTorch():
        return x.double().cpu().numpy()


def numbers(x: Tensor) -> list[Any]:
    """The values of a tensor (n,) as Python numbers; not every version of torch has ``tolist`` under the transforms."""
    return [value.item() for value in x.unbind()] if is_active() else x.tolist()


@contextmanager
def refusing(what: str, fix: str) -> Iterator[None]:
    """Say what does not work under a transform, in place of the transform's own error about its tensors."""
    try:
        yield
    except RuntimeError as error:
        if is_active() and any(word in str(error) for word in ("vmap", "functorch", "data pointer")):
            raise ValueError(f"{what} does not work under this transform of torch.func. Fix: {fix}.") from error
        raise


def fused_layer(
    name: str, x: Tensor, state: Tensor | tuple[Tensor, Tensor], weights: list[Tensor], sizes: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Run torch's recurrent layer on given weights: one layer in one direction, as torch.nn.LSTM calls it.

    The weights may lie anywhere; cuDNN's warning that they are not in one chunk of memory is silenced.

    Arguments:
        name: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        x: (T, batch, n), or the data of a PackedSequence.
        state: h, or h and c of an LSTM, each (1, batch, hidden_size).
        weights: W_ih, W_hh, and b_ih and b_hh if there are any.
        sizes: batch sizes of a PackedSequence.

    Returns:
        The output, and the last h, or the last h and c.
    """
    rest = (weights, len(weights) == 4, 1, 0.0, torch.is_grad_enabled(), False)
    layer, warns = getattr(torch._VF, name), x.is_cuda and not torch.compiler.is_compiling()
    with warnings.catch_warnings() if warns else nullcontext():
        if warns:
            warnings.filterwarnings("ignore", message=".*single contiguous chunk.*")
        return layer(x, state, *rest, False) if sizes is None else layer(x, sizes, state, *rest)
