"""Slow, plain twins of fast code."""

import itertools
import math

import torch
import torchdiffeq


def ode_rnn(rnn, x, t, mask=None, lengths=None, tolerance=1e-11):
    """What ``rnn.filter(x, t, ...).after`` holds, h and m side by side: one sequence and one gap after the other."""
    outputs = []
    for b in range(len(x)):
        length = x.shape[1] if lengths is None else int(lengths[b])
        s = rnn.start[None] if rnn.start is not None else x.new_zeros(1, rnn.state_size - rnn.augment)
        s = torch.cat([s, s.new_zeros(1, rnn.augment)], 1)
        states = []
        for i in range(length):
            if i and t[b, i] > t[b, i - 1]:
                s = _solve(rnn, s, t[b, i - 1 : i + 1], tolerance)
            observed = torch.ones(x.shape[-1], dtype=torch.bool) if mask is None else mask[b, i].expand(x.shape[-1])
            if observed.any():
                new = rnn.cell(torch.where(observed, x[b, i], 0.0)[None], s)
                s = s + new if rnn.residual else new
            states.append(s[0])
        states += [torch.zeros_like(s[0])] * (x.shape[1] - length)
        outputs.append(torch.stack(states))
    return torch.stack(outputs)


def _solve(rnn, s, t, tolerance):
    n = rnn.hidden_size
    y0 = (s[:, :n], s[:, n:]) if rnn.second_order else s
    end = torchdiffeq.odeint(rnn.field, y0, t, rtol=tolerance, atol=tolerance, method="dopri8")
    return torch.cat([part[-1] for part in end], 1) if rnn.second_order else end[-1]


def exponential_grid(force, h, m, gamma, times):
    """(h, m) after steps of ``method="exponential"`` between the times; ``force(t, h)``, one γ for all channels.

    The equation h'' + γh' = P(s) for a polynomial P is linear in (h, h', P, P', P'', ...), so
    its solution is a matrix exponential.
    """
    nodes, weights = (0.0, 1 / 5, 2 / 3, 1.0), (14 / 336, 125 / 336, 162 / 336, 35 / 336)
    for start, end in itertools.pairwise(times):
        step = end - start
        values = [force(start, h)]

        def along(fraction, h=h, m=m, step=step, values=values):
            """h and m at a fraction of the step, for the polynomial through the values so far."""
            n = len(values)
            powers = torch.stack([h.new_tensor([(c * step) ** k for k in range(n)]) for c in nodes[:n]])
            polynomial = torch.linalg.solve(powers, torch.stack(values).reshape(n, -1))
            derivatives = [math.factorial(k) * p.view_as(h) for k, p in enumerate(polynomial)]
            matrix = torch.diag(h.new_ones(n + 1), 1)
            damped = h.new_zeros(n + 2, n + 2)
            damped[1, 1] = -1.0
            exponential = torch.linalg.matrix_exp((matrix + gamma * damped) * fraction * step)
            state = torch.stack([h, m, *derivatives])
            return torch.einsum("ij,j...->i...", exponential[:2], state)

        second = along(nodes[1])[0]
        values.append(force(start + nodes[1] * step, second))
        ratio = weights[1] * (1 - nodes[1]) / (weights[2] * (1 - nodes[2]))
        third = along(nodes[2])[0] + ratio * (along(nodes[1])[0] - second)
        values.append(force(start + nodes[2] * step, third))
        missed = weights[1] * (along(nodes[1])[0] - second) + weights[2] * (along(nodes[2])[0] - third)
        fourth = along(1.0)[0] + missed / weights[3]
        values.append(force(end, fourth))
        h, m = along(1.0)
    return h, m
