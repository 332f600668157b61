"""What the gradient modes share: finding the tensors that a field closes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value", Tensor, tuple[Tensor, ...])


def closed_over_leaves(evaluate: Callable[[], Value]) -> tuple[list[Tensor], Value]:
    """Call ``evaluate`` and find the leaf tensors, parameters or not, that its value depends on.

    Arguments:
        evaluate: a function of nothing, called once with gradients enabled.

    Returns:
        The leaves that require a gradient, and the value.

    Raises:
        ValueError: if the value depends on a tensor that is not a leaf and was computed before the call. A gradient
            mode that evaluates the field anew in the backward pass cannot reach what lies behind such a tensor.
    """
    marker = torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()
    value = evaluate()
    outputs = (value,) if isinstance(value, Tensor) else value
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    leaves: dict[int, Tensor] = {id(output): output for output in outputs if output.is_leaf and output.requires_grad}
    seen = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        elif node._sequence_nr() < marker:
            raise ValueError(
                f"func depends on a tensor that was computed outside it (by {node.name()}), whose gradient "
                "gradient='adjoint' would drop; expected func to depend on leaf tensors and its arguments only. "
                "Fix: use gradient='direct', compute the tensor inside func, or make it a part of the state."
            )
        else:
            pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return list(leaves.values()), value
