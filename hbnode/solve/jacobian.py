"""Jacobians of fields whose samples do not interact, by one VJP or JVP of the whole batch for each state variable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from hbnode import _torch

RHS = Callable[[Tensor, Tensor], Tensor]  # (t, x) -> f(t, x), with x and f of shape (batch, d)
_FORWARD_MODE = threading.RLock()  # forward-mode differentiation has one level, which all threads share
Derivatives = tuple[Tensor, Tensor]  # ∂f/∂x of shape (batch, d, d), and ∂f/∂t of shape (batch, d)


def derivatives(field: RHS, t: Tensor, x: Tensor, *, create_graph: bool) -> Derivatives:
    """Return ∂f/∂x and ∂f/∂t at a time t that is a scalar or has one value per sample.

    They are computed by VJPs, which every differentiable field supports. Under transforms of torch.func, in forward
    mode and in traced graphs, the VJPs are those of torch.func, otherwise those of autograd. If this fails, as in steps
    that gradient="checkpoint" recomputes and for fields with inference tensors, JVPs of torch.func are used.
    """
    _torch.refuse_export("the Jacobians of method='rodas5p'", "torch.compile, or another method with steps=n")
    try:
        if _torch.is_transformed() or _torch.is_tracing():
            return by_vjps_of_func(field, t, x)
        return by_vjps(field, t, x, create_graph=create_graph)
    except RuntimeError as failure:
        try:
            return by_jvps(field, t, x)
        except RuntimeError:
            raise failure from None


def by_vjps(field: RHS, t: Tensor, x: Tensor, *, create_graph: bool) -> Derivatives:
    """Return ∂f/∂x and ∂f/∂t by VJPs of autograd.

    Samples do not interact, so one VJP of the whole batch gives one matrix row of every sample's Jacobian. ∂f/∂t is the
    derivative of a VJP with respect to its cotangent. Raise RuntimeError inside torch.utils.checkpoint, which would
    recompute f for each VJP.
    """
    with torch.autograd.graph.disable_saved_tensors_hooks("VJPs of a step do not support saved tensor hooks"):
        pass  # raises inside torch.utils.checkpoint, which sets hooks
    with torch.inference_mode(False), torch.enable_grad(), _torch.in_eager_mode() if create_graph else nullcontext():
        # all inputs are pieces of one tensor, so that autograd does not search the graph of earlier steps
        whole = torch.cat([z.flatten() for z in (t, x, torch.zeros_like(x))])
        whole = whole if whole.requires_grad and create_graph else whole.detach().requires_grad_()
        pieces = whole.split([t.numel(), x.numel(), x.numel()])
        t, x, cotangent = (piece.view_as(z) for piece, z in zip(pieces, (t, x, x), strict=True))
        f = field(t, x) + 0.0 * (x + t.reshape(-1, 1))  # f may not depend on x or t

        def vjp(y: Tensor, z: Tensor, cotangent: Tensor, graph: bool) -> Tensor:
            return torch.autograd.grad(y, z, cotangent, create_graph=graph, retain_graph=True)[0]

        basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        rows = [vjp(f, x, row.expand_as(x), create_graph) for row in basis]
        jac_t = vjp(vjp(f, t, cotangent, True), cotangent, torch.ones_like(t), create_graph)
    return torch.stack(rows, 1), jac_t


def by_vjps_of_func(field: RHS, t: Tensor, x: Tensor) -> Derivatives:
    """Return ∂f/∂x and ∂f/∂t, computed by vector-Jacobian products of ``torch.func`` with three calls of the field."""
    basis = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[:, None].expand(-1, *x.shape)

    def pullback_to_t(cotangent: Tensor) -> Tensor:
        return torch.func.vjp(lambda t: field(t, x), t)[1](cotangent)[0]

    with _torch.outside_inference_mode():
        rows = torch.func.vmap(torch.func.vjp(lambda x: field(t, x), x)[1])(basis)[0]
        jac_t = torch.func.vjp(pullback_to_t, torch.zeros_like(x))[1](torch.ones_like(t))[0]
    return rows.movedim(0, 1), jac_t


def by_jvps(field: RHS, t: Tensor, x: Tensor) -> Derivatives:
    """Return ∂f/∂x and ∂f/∂t, computed by JVPs of ``torch.func``: one call of the field under ``torch.func.vmap``."""
    n = x.shape[1]
    directions = torch.eye(n + 1, n, dtype=x.dtype, device=x.device)[:, None].expand(n + 1, *x.shape)
    rates = torch.eye(n + 1, dtype=t.dtype, device=t.device)[n]

    def derivative(direction: Tensor, rate: Tensor) -> Tensor:
        return torch.func.jvp(field, (t, x), (rate.expand(t.shape), direction))[1]

    with _FORWARD_MODE, _torch.outside_inference_mode():
        found = torch.func.vmap(derivative)(directions, rates)
    return found[:n].permute(1, 2, 0), found[n]
