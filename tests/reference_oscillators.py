"""References of the oscillators: exact entries with many digits, D-LinOSS, a loop over samples."""

import mpmath
import torch

from hbnode.nn.functional import oscillator_step
from hbnode.nn.oscillators import held_response

DIGITS = 50


def exact_entries(gamma, kappa, dt):
    """The entries vv, vx, xv, xx of Φ, and F_v and F_x, with 50 digits."""
    with mpmath.workdps(DIGITS):
        gamma, kappa, dt = map(mpmath.mpf, (gamma, kappa, dt))
        a = gamma / 2
        square = kappa - a * a
        root = mpmath.sqrt(abs(square))
        cosine, sine = (mpmath.cos, mpmath.sin) if square > 0 else (mpmath.cosh, mpmath.sinh)
        decay = mpmath.exp(-a * dt)
        c, s = decay * cosine(root * dt), decay * (sine(root * dt) / root if root else dt)
        xx = c + a * s
        if kappa:
            held = (1 - xx) / kappa
        else:
            held = (dt - (1 - mpmath.exp(-gamma * dt)) / gamma) / gamma if gamma else dt * dt / 2
        return c - a * s, -kappa * s, s, xx, s, held


def imex_entries(gamma, kappa, dt):
    """D-LinOSS: z' = z + Δ(-κx - γz' + u), x' = x + Δz', solved for z' and x'."""
    s = 1 / (1 + gamma * dt)
    return s, -s * dt * kappa, s * dt, 1 - s * dt * dt * kappa, s * dt, s * dt * dt


def layer_loop(layer, x, gaps, v, q, mask=None, held=None):
    """The outputs of a layer, v and x at the end: sample by sample, from gaps (batch, T) before each of them."""
    gamma, kappa = layer.damping, layer.stiffness
    c_v, c_x = layer.weight_out.chunk(2, 1)
    held = torch.zeros_like(x[:, 0]) if held is None else held
    outputs = []
    for i in range(x.shape[1]):
        dt, sample = gaps[:, i : i + 1], x[:, i]
        seen = torch.ones_like(sample, dtype=torch.bool) if mask is None else mask[:, i].expand_as(sample)
        if layer.discretization == "imex":
            vv, vx, xv, xx, fv, fx = imex_entries(gamma, kappa, dt)
        else:
            (vv, vx, xv, xx), (fv, fx) = oscillator_step(gamma, kappa, dt), held_response(gamma, kappa, dt)
        v, q = vv * v + vx * q, xv * v + xx * q
        if layer.input == "hold":
            u = held @ layer.weight_in.T
            v, q = v + fv * u, q + fx * u
            sample = held = torch.where(seen, sample, held)
        else:
            sample = torch.where(seen, sample, 0.0)
            v = v + sample @ layer.weight_in.T
        outputs.append(v @ c_v.T + (kappa.sqrt() * q) @ c_x.T + sample @ layer.weight_skip.T)
    return torch.stack(outputs, 1), v, q
