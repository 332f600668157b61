"""Slow, plain twins of fast code."""

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
            if i:
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
