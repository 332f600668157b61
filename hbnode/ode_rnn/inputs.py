"""What the cell of an ODE-RNN is fed: values that stand in for missing ones, and what tells that they do."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from hbnode._checks import as_count
from hbnode._suggestions import nearest
from hbnode.ode_rnn.sequences import Sequences
from hbnode.ode_rnn.state import ODERNNState

Missing = Literal["zero", "hold", "decay"]
KINDS: tuple[str, ...] = get_args(Missing)


class Inputs(nn.Module):
    r"""Samples without holes, and by choice their mask, the time since each feature was last observed, static features.

    Arguments:
        input_size: features of a sample.
        missing: what a missing value is: 0; the last one observed; or that one times :math:`e^{-\lambda\delta}`, with
            the time δ since then in units of time and a rate :math:`\lambda = \mathrm{softplus}(\omega)` for each
            feature, ω at first 0.
        mask_features: whether the mask is fed too.
        elapsed_features: whether δ is fed too.
        static_size: static features.
    """

    def __init__(
        self,
        input_size: int,
        missing: Missing = "zero",
        mask_features: bool = False,
        elapsed_features: bool = False,
        static_size: int = 0,
    ) -> None:
        super().__init__()
        input_size = as_count(input_size, "input_size")
        static_size = as_count(static_size, "static_size", least=0)
        if missing not in KINDS:
            near = nearest(missing, KINDS) or "zero"
            raise ValueError(f"missing must be one of {KINDS}, got {missing!r}. Fix: {near!r}.")
        self.input_size, self.missing, self.static_size = input_size, missing, static_size
        self.mask_features, self.elapsed_features = bool(mask_features), bool(elapsed_features)
        self.rate = nn.Parameter(torch.zeros(input_size)) if missing == "decay" else None

    @property
    def size(self) -> int:
        """Numbers that the cell is fed."""
        return self.input_size * (1 + self.mask_features + self.elapsed_features) + self.static_size

    @property
    def looks_back(self) -> bool:
        """Whether earlier samples count."""
        return self.missing != "zero" or self.elapsed_features

    def forward(
        self, sequences: Sequences, static: Tensor | None, state: ODERNNState | None, time_unit: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the cell is fed, (batch, T, size); then ``last`` and ``last_t`` of the state after the series."""
        x, observed = sequences.x, sequences.observed
        observed = x.new_ones((), dtype=torch.bool) if observed is None else observed
        observed = observed.expand(x.shape)
        fed, last, last_t = x, None, None
        elapsed: list[Tensor] = []
        if self.looks_back:
            held, since, last, last_t = _look_back(sequences, observed, state)
            since = (since / time_unit).to(x.dtype)
            if self.rate is not None:
                held = held * torch.exp(-nn.functional.softplus(self.rate) * since)
            fed = x if self.missing == "zero" else torch.where(observed, x, held)
            elapsed = [since] if self.elapsed_features else []
        mask = [observed.to(x.dtype)] if self.mask_features else []
        constant = [] if static is None else [static.unsqueeze(1).expand(-1, x.shape[1], -1)]
        columns = [fed, *mask, *elapsed, *constant]
        return torch.cat(columns, -1) if len(columns) > 1 else fed, last, last_t

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"{self.input_size}, missing={self.missing!r}, size={self.size}"


def _look_back(
    sequences: Sequences, observed: Tensor, state: ODERNNState | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last value before each sample, and the time since (batch, T, n); the last of all, and when it was (batch, n).

    Before a feature was first observed its value is 0, and the time runs from the beginning of the series.
    """
    x, t = sequences.x, sequences.t.to(torch.float64)
    shape = (x.shape[0], x.shape[2])
    last, last_t = (None, None) if state is None else (state.last, state.last_t)
    if last is None or last_t is None:
        begin = t[:, 0] if state is None else state.t.to(t)
        last, last_t = x.new_zeros(shape), begin.unsqueeze(1).expand(shape)
    places = torch.arange(x.shape[1], device=x.device).view(1, -1, 1)
    latest = torch.where(observed, places, -1).cummax(1).values + 1  # 0: before the first sample
    values = torch.cat([last.to(x.dtype).unsqueeze(1), x], 1)
    times = torch.cat([last_t.to(t).unsqueeze(1), t.unsqueeze(-1).expand(x.shape)], 1)
    before = nn.functional.pad(latest[:, :-1], (0, 0, 1, 0))
    since = t.unsqueeze(-1) - times.gather(1, before)
    end = latest[:, -1:]
    return values.gather(1, before), since, values.gather(1, end)[:, 0], times.gather(1, end)[:, 0]
