"""What the gradients that evaluate a field anew share: finding the tensors that it closes over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hbnode._state import State, parts
from hbnode._torch import sequence_number

Value = TypeVar("Value", bound=State)

_REFUSAL = (
    "func depends on {what}, whose gradient this gradient mode would drop; expected func to depend on the parameters "
    "of its module, on leaf tensors and on its arguments only, and on the same ones in both passes. "
    "Fix: use gradient='direct', compute the tensor inside func, or make it a part of the state."
)


def closed_over_leaves(evaluate: Callable[[], Value], inputs: Iterable[Tensor]) -> tuple[list[Tensor], Value]:
    """Call ``evaluate`` and find the leaf tensors, parameters or not, that its value depends on beside its inputs.

    It returns those that require a gradient, and the value. It refuses a tensor that is no leaf and was computed before
    the call: a backward pass that evaluates the field anew cannot reach what lies behind it.
    """
    inputs = list(inputs)
    seen = set(_ancestors(tensor.grad_fn for tensor in inputs))
    known = {id(tensor) for tensor in inputs} | {id(node.variable) for node in seen if hasattr(node, "variable")}
    marker = sequence_number(torch.zeros((), requires_grad=True).clone().grad_fn)
    value = evaluate()
    leaves = {id(part): part for part in parts(value) if part.is_leaf and part.requires_grad}
    pending = [part.grad_fn for part in parts(value)]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        elif sequence_number(node) < marker:
            raise ValueError(_REFUSAL.format(what=f"a tensor that was computed outside it (by {node.name()})"))
        else:
            pending.extend(parent for parent, _ in node.next_functions)
    return [leaf for key, leaf in leaves.items() if key not in known], value


def own_parameters(field: Callable) -> list[Tensor]:
    """The parameters of the right-hand side, as far as ``field`` can name them."""
    if hasattr(field, "dynamics_parameters"):
        return field.dynamics_parameters()
    return list(field.parameters()) if isinstance(field, nn.Module) else []


def refuse_unknown(leaves: Iterable[Tensor], known: frozenset[int]) -> None:
    """Raise if a leaf is none of those whose gradient is computed, given by their ids."""
    for leaf in leaves:
        if leaf.requires_grad and id(leaf) not in known:
            raise ValueError(
                _REFUSAL.format(what=f"a tensor of shape {tuple(leaf.shape)} that it did not use at first")
            )


def _ancestors(nodes: Iterable[Node | None]) -> set[Node]:
    seen, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending.extend(parent for parent, _ in node.next_functions)
    return seen
