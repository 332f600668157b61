"""Slow plain twins for what the cell of an ODE-RNN is fed."""

import math

import torch


def fed(x, t, mask, *, missing, rate=None, time_unit=1.0, mask_features=False, elapsed_features=False, static=None):
    """The inputs of the cell, value by value: (batch, T, inputs); ``mask`` is (batch, T, n)."""
    batch, length, size = x.shape
    rows = []
    for b in range(batch):
        last, since = [0.0] * size, [float(t[b, 0])] * size
        for i in range(length):
            values, marks, elapsed = [], [], []
            for k in range(size):
                gap = (float(t[b, i]) - since[k]) / time_unit
                if missing == "zero":
                    stand_in = torch.zeros(()).to(x)
                elif missing == "hold":
                    stand_in = torch.as_tensor(last[k]).to(x)
                else:
                    stand_in = last[k] * torch.exp(-torch.log(1 + torch.exp(rate[k])) * gap)
                observed = bool(mask[b, i, k])
                values.append(x[b, i, k] if observed else stand_in)
                marks.append(x.new_tensor(float(observed)))
                elapsed.append(x.new_tensor(gap))
                assert math.isfinite(gap)
            for k in range(size):
                if mask[b, i, k]:
                    last[k], since[k] = x[b, i, k], float(t[b, i])
            parts = [*values, *(marks if mask_features else []), *(elapsed if elapsed_features else [])]
            rows.append(torch.cat([torch.stack(parts), *([] if static is None else [static[b]])]))
    return torch.stack(rows).unflatten(0, (batch, length))
