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


def over_steps(step, q, k, v, *gates):
    """Outputs of o_t = S_t^T q_t, where ``step`` gives S_t from S_{t-1}, k_t, v_t and the gates of one head."""
    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            memory = q.new_zeros(q.shape[-1], v.shape[-1])
            rows = []
            for t in range(q.shape[2]):
                memory = step(memory, k[b, h, t], v[b, h, t], *(z[b, h, t] for z in gates))
                rows.append(memory.T @ q[b, h, t])
            out[b, h] = torch.stack(rows)
    return out


def retnet(q, k, v, decays):
    """S_t = γ S_{t-1} + k_t v_t^T with γ of each head (Sun et al., arXiv:2307.08621, equation 6)."""
    gamma = decays[:, None].expand(q.shape[:3])
    return over_steps(lambda s, k_t, v_t, g: g * s + torch.outer(k_t, v_t), q, k, v, gamma)


def gated_delta_net(q, k, v, alpha, beta):
    """S_t = α_t (I − β_t k_t k_t^T) S_{t-1} + β_t k_t v_t^T (arXiv:2412.06464, equation 10, transposed)."""

    def step(s, k_t, v_t, a, b):
        return a * (s - b * torch.outer(k_t, k_t @ s)) + b * torch.outer(k_t, v_t)

    return over_steps(step, q, k, v, alpha, beta)


def momentum_delta_net(q, k, v, alpha, mu, eta, step_size):
    """V_t = μ_t V_{t-1} − η_t ∇_t, S_t = α_t S_{t-1} + s_t V_t; ∇_t is that of ½‖v_t − Sᵀk_t‖² at α_t S_{t-1}."""

    def step(carried, k_t, v_t, a, m, e, s):
        memory, velocity = carried.unbind()
        at = (a * memory).detach().requires_grad_()
        (gradient,) = torch.autograd.grad((v_t - at.T @ k_t).square().sum() / 2, at)
        velocity = m * velocity - e * gradient
        return torch.stack([a * memory + s * velocity, velocity])

    out = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            carried = q.new_zeros(2, q.shape[-1], v.shape[-1])
            for t in range(q.shape[2]):
                carried = step(carried, k[b, h, t], v[b, h, t], *(z[b, h, t] for z in (alpha, mu, eta, step_size)))
                out[b, h, t] = carried[0].T @ q[b, h, t]
    return out
