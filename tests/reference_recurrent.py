"""Slow, plain twins of the momentum recurrent layers: a Python loop over time, layer, direction and sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

GATES = {"rnn": 1, "lstm": 4, "gru": 3, "dtriv": 1}


@dataclass
class Twin:
    """What the equations need besides weights: the cell, the rule's name ("" is none) and its numbers."""

    cell: str
    rule: str = ""
    numbers: dict = field(default_factory=dict)

    def momentum(self, t, g, before):
        """μ_t of each sample, (batch, 1) or a number; t counts from 1, g and ``before`` are g_t and g_{t-1}."""
        if self.rule in ("momentum", "adam"):
            return self.numbers["momentum"]
        if self.rule == "nag":
            return ((t.to(g) - 1) / (t.to(g) + 2))[:, None]
        if self.rule == "restart":
            k = (t % self.numbers["restart"]).to(g)
            return (k / (k + 3))[:, None]
        if self.rule == "adaptive":
            rows = [self._adaptive(*pair) for pair in zip(g, before, strict=True)]
            return torch.stack(rows)[:, None]
        return 0.0

    def _adaptive(self, g, before):
        size = before.norm()
        if size == 0:
            return g.new_zeros(())
        top = 1 - self.numbers["delta"]
        change = (g - before).norm()
        if change == 0:
            return g.new_full((), top)
        wanted = (1 - (change / size).sqrt()) ** 2
        return wanted if wanted < top else g.new_full((), top)  # the clamp has no slope there

    def step(self, weights, x, state):
        """One step of one direction: (batch, I) and a dict of (batch, .) tensors to the next such dict."""
        w_ih, w_hh, b_ih, b_hh, b_modrelu = weights
        g = x @ w_ih.T + (0 if b_ih is None else b_ih)
        t = state["t"] + 1
        v = self.momentum(t, g, state["g"]) * state["v"] + self.numbers.get("step_size", 1.0) * g
        m = state["m"]
        d = v
        if self.rule in ("adam", "rmsprop"):
            beta = self.numbers["beta"]
            m = beta * m + (1 - beta) * g * g
            d = v / (m + self.numbers["eps"]).sqrt()
        h, c = state["h"], state["c"]
        recurrent = h @ w_hh.T + (0 if b_hh is None else b_hh)
        h, c = getattr(self, "_" + self.cell)(recurrent, d, h, c, b_modrelu)
        return {"h": h, "c": c, "v": v, "m": m, "g": g, "t": t}

    def _rnn(self, recurrent, d, h, c, _):
        return (recurrent + d).tanh(), c

    def _lstm(self, recurrent, d, h, c, _):
        i, f, g, o = (recurrent + d).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def _gru(self, recurrent, d, h, c, _):
        (ur, uz, un), (dr, dz, dn) = recurrent.chunk(3, 1), d.chunk(3, 1)
        r, z = (ur + dr).sigmoid(), (uz + dz).sigmoid()
        n = (dn + r * un).tanh()
        return (1 - z) * n + z * h, c

    def _dtriv(self, recurrent, d, h, c, b):
        z = recurrent + d
        return z.sign() * (z.abs() + b).relu(), c

    def start(self, batch, hidden, like):
        """The state of a fresh sequence."""
        wide = GATES[self.cell] * hidden
        zeros = {name: like.new_zeros(batch, hidden if name in "hc" else wide) for name in "hcvmg"}
        return zeros | {"t": torch.zeros(batch, dtype=torch.int64)}

    def direction(self, weights, x, state):
        """All steps of one direction over (T, batch, I): the stacked h and the last state."""
        outputs = []
        for row in x:
            state = self.step(weights, row, state)
            outputs.append(state["h"])
        return torch.stack(outputs), state

    def __call__(self, module, x, state=None, lengths: Sequence[int] | None = None):
        """What ``module(x, state)`` returns, time first: the output and a dict of (layers*directions, batch, .)."""
        if lengths is None:
            return self._whole(module, x, state or {})
        outputs, states = [], []
        for b, length in enumerate(lengths):  # each sequence alone, the output padded with zeros
            own = {k: s[b : b + 1] if k == "t" else s[:, b : b + 1] for k, s in (state or {}).items()}
            output, last = self._whole(module, x[:length, b : b + 1], own)
            outputs.append(torch.cat([output, output.new_zeros(len(x) - length, 1, output.shape[2])]))
            states.append(last)
        joined = {k: torch.cat([s[k] for s in states], dim=0 if k == "t" else 1) for k in states[0]}
        return torch.cat(outputs, dim=1), joined

    def _whole(self, module, x, given):
        directions = ("", "_reverse") if module.bidirectional else ("",)
        finals = []
        for layer in range(module.num_layers):
            outputs = []
            for suffix in directions:
                state = self.start(x.shape[1], module.hidden_size, x)
                state |= {k: s if k == "t" else s[len(finals)] for k, s in given.items()}
                weights = self.weights(module, f"_l{layer}{suffix}")
                output, state = self.direction(weights, x.flip(0) if suffix else x, state)
                outputs.append(output.flip(0) if suffix else output)
                finals.append(state)
            x = torch.cat(outputs, dim=2)
        joined = {k: torch.stack([final[k] for final in finals]) for k in "hcvmg"}
        return x, joined | {"t": finals[0]["t"]}

    def weights(self, module, suffix=""):
        """W_ih, W_hh, b_ih, b_hh and modReLU's b by their documented names."""
        get = lambda name: getattr(module, name + suffix, None)
        return get("weight_ih"), get("weight_hh"), get("bias_ih"), get("bias_hh"), get("bias")
