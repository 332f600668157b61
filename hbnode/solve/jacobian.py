"""Jacobians of fields whose samples do not interact, by one JVP or VJP of the whole batch for each unknown."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Field = Callable[[Tensor, Tensor], Tensor]  # (t, x) -> f, with x and f of shape (samples, unknowns)
Derivatives = tuple[Tensor, Tensor]  # ∂f/∂x, (samples, unknowns, unknowns), and ∂f/∂t, (samples, unknowns)


def by_jvps(field: Field, t: Tensor, x: Tensor) -> Derivatives:
    """Return ∂f/∂x and ∂f/∂t by JVPs (forward mode) in one call of the field under ``torch.func.vmap``.

    The result has a graph, also inside torch.utils.checkpoint, and under other transforms of torch.func.
    """
    n = x.shape[1]
    directions = torch.eye(n + 1, n, dtype=x.dtype, device=x.device)[:, None].expand(n + 1, *x.shape)
    in_time = torch.zeros(n + 1, dtype=t.dtype, device=t.device).index_fill(0, torch.tensor(n, device=t.device), 1.0)

    def derivative(direction: Tensor, rate: Tensor) -> Tensor:
        return torch.func.jvp(field, (t, x), (rate.expand(t.shape), direction))[1]

    found = torch.func.vmap(derivative)(directions, in_time)
    return found[:n].permute(1, 2, 0), found[n]


def by_vjps(field: Field, t: Tensor, x: Tensor) -> Derivatives:
    """Return ∂f/∂x and ∂f/∂t by VJPs (reverse mode), for fields that torch.func cannot transform.

    Samples do not interact, so one VJP of a sum over the batch gives a row of every sample's Jacobian. ∂f/∂t is the
    derivative of a VJP. Raise RuntimeError inside torch.utils.checkpoint, which would recompute f for each VJP.
    """
    create_graph = torch.is_grad_enabled()
    refused = torch.autograd.graph.disable_saved_tensors_hooks("VJPs in a step do not support saved tensor hooks.")
    with torch.inference_mode(False), torch.enable_grad(), refused:
        t, x = (z.view_as(z) if z.requires_grad and create_graph else z.detach().clone() for z in (t, x))
        t, x = (z if z.requires_grad else z.requires_grad_() for z in (t, x))
        f = field(t, x) + 0.0 * (x + t.reshape(-1, 1))  # f may be constant

        def vjp(y: Tensor, z: Tensor, cotangent: Tensor, graph: bool) -> Tensor:
            return torch.autograd.grad(y, z, cotangent, create_graph=graph, retain_graph=True)[0]

        basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        rows = [vjp(f, x, row.expand_as(x), create_graph) for row in basis]
        cotangent = torch.zeros_like(f).requires_grad_()
        of_t = vjp(vjp(f, t, cotangent, True), cotangent, torch.ones_like(t), create_graph)
    return torch.stack(rows, 1), of_t
