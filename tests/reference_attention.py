"""Slow, plain twins of linear attention with momentum: equation 72 step by step."""

import torch
from torch.nn.functional import elu


def start(k, v):
    s = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    return s, s, s[..., 0]


def momentum_attention(q, k, v, momentum, step_size=1.0, causal=True, ignored=None, eps=1e-6, state=None):
    """The outputs and the state (s, p, z); momentum and step_size are numbers or (heads,)."""
    q, k = elu(q) + 1, elu(k) + 1
    s, p, z = start(k, v) if state is None else state
    beta, gamma = (x[:, None, None] if isinstance(x, torch.Tensor) and x.dim() else x for x in (momentum, step_size))
    out = []
    for t in range(k.shape[2]):
        k_t, v_t = k[:, :, t], v[:, :, t]
        p_t = beta * p + k_t[..., :, None] * v_t[..., None, :]
        after = s + gamma * p_t, p_t, z + k_t
        if ignored is None:
            s, p, z = after
        else:
            frozen = ignored[:, t, None, None]
            s, p = (torch.where(frozen[..., None], old, new) for old, new in zip((s, p), after, strict=False))
            z = torch.where(frozen, z, after[2])
        if causal:
            out.append(read(q[:, :, t : t + 1], s, z, eps))
    return (torch.cat(out, 2) if causal else read(q, s, z, eps)), (s, p, z)


def read(q, s, z, eps):
    return q @ s / (q @ z[..., None] + eps)
