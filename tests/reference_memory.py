"""Slow, plain references of the memories: loops over the steps, each as its paper writes it."""

import math

import torch


def gate(value, q, default):
    """A gate as (batch, heads, length), from a number, one for each head, or one for each step."""
    shape = q.shape[:3]
    if value is None:
        return torch.full(shape, default, dtype=q.dtype)
    value = torch.as_tensor(value, dtype=q.dtype)
    return (value[:, None] if value.dim() == 1 else value).expand(shape)


def heavy_ball_memory(
    q,
    k,
    v,
    *,
    log_momentum,
    log_decay=None,
    step=None,
    write=None,
    delta="decayed",
    key_padding_mask=None,
    initial_state=None,
):
    """The recurrence of the design: outputs, S and P. An ignored step changes neither S nor P."""
    mu = gate(-math.inf if log_momentum is None else log_momentum, q, 0.0).exp()
    alpha, eta = gate(log_decay, q, 0.0).exp(), gate(write, q, 1.0)
    s_all = 1 - mu if step is None else gate(step, q, 1.0)
    zero = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    memory, velocity = (zero, zero) if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[2]):
        k_t, v_t = k[:, :, t, :, None], v[:, :, t, :, None]
        mu_t, alpha_t, eta_t, s_t = (x[:, :, t, None, None] for x in (mu, alpha, eta, s_all))
        read = alpha_t * k_t if delta == "decayed" else k_t
        error = v_t - memory.mT @ read if delta else v_t
        after_p = mu_t * velocity + eta_t * k_t @ error.mT
        after_s = alpha_t * memory + s_t * after_p
        if key_padding_mask is not None:
            ignored = key_padding_mask[:, t, None, None, None]
            after_s, after_p = torch.where(ignored, memory, after_s), torch.where(ignored, velocity, after_p)
        memory, velocity = after_s, after_p
        outputs.append((q[:, :, t, None] @ memory).squeeze(2))
    return torch.stack(outputs, 2), memory, velocity
