"""Recurrent networks for irregular series: one output vector for each series, or forecasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode.data import Series, bucketed_batches
from hbnode.nn.ode_rnn import ODERNN
from hbnode.nn.oscillators import OscillatorStack, oscillator_ranges
from hbnode.nn.sequences import Inputs, Sequences, fitted_unit

Core = Literal["gru", "odernn", "oscillators"]
BATCH = 64  # maximum number of series in a batch


class SeriesNetwork(nn.Module):
    """A recurrent network with one output vector for each series.

    A linear layer maps the last and the mean state of a recurrent core to the output. The inputs of the core are the
    values, the mask, the ages of the last observed values, the time and the static features. Time counts from
    ``start``, or from the first sample of each series if ``start`` is None; it is divided by ``span``. A missing value
    is replaced by the last observed value, which decays to the training mean.

    Arguments:
        kind: the core: ``"gru"`` (torch.nn.GRU), ``"odernn"`` (:class:`hbnode.ODERNN`) or ``"oscillators"``
            (:class:`hbnode.nn.OscillatorStack`).
        channels: number of channels.
        static_size: number of static features.
        outputs: size of the output.
        hidden_size: size of the state.
        dropout: probability that a feature of the inputs or of the state is set to 0 in training.
        start: common start time of all series; None if they do not start together.
        span: the longest duration of a series.
        time_unit: unit of time of the core, ten median gaps.
        frequency, decay: ranges of the oscillators' frequencies and decay rates, per unit of t.
    """

    def __init__(
        self, kind: Core, channels: int, static_size: int, outputs: int, hidden_size: int, dropout: float,
        start: float | None, span: float, time_unit: float, frequency: tuple[float, float], decay: tuple[float, float],
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.kind, self.start, self.span, self.time_unit = kind, start, span, time_unit
        self.inputs = Inputs(channels, "decay", True, True, static_size)
        self.dropout, size = nn.Dropout(dropout), self.inputs.size + 1
        self.core: nn.Module
        if kind == "gru":
            self.core = nn.GRU(size, hidden_size, batch_first=True)
        elif kind == "odernn":
            self.core = ODERNN(size, hidden_size, rtol=1e-3, atol=1e-3)
        else:
            ranges: Any = {"frequency": [time_unit * x for x in frequency], "decay": [time_unit * x for x in decay]}
            self.core = OscillatorStack(size, hidden_size, 2, dropout=dropout, **ranges)
        self.head: nn.Module = nn.Linear(2 * hidden_size, outputs)

    def encode(self, series: Series) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Run the recurrent core over the series.

        Returns:
            The hidden states (batch, T, hidden_size), the state object of the core after the last sample, and the last
            observed value of each channel and its time, (batch, channels) each.
        """
        since = series.t - (series.t[:, :1] if self.start is None else self.start)
        static = None if series.static is None else torch.nan_to_num(series.static)
        sequences = Sequences(series.x.shape[2], series.x, since / self.time_unit, series.mask, series.lengths)
        x, last, last_t = self.inputs(sequences, static, None, 1.0)
        share = (since / self.span).to(x.dtype)[:, : x.shape[1]].unsqueeze(-1)
        x = self.dropout(torch.cat([x, share], -1))
        options = {} if self.kind == "gru" else {"t": sequences.t, "lengths": series.lengths}
        core: Any = self.core
        h, state = core(x, **options)
        return h, state, cast("Tensor", last), cast("Tensor", last_t)  # not None, because ages are inputs

    @override
    def forward(self, series: Series) -> Tensor:
        """Return the outputs (batch, outputs) for standardised series. Missing static features are replaced by 0."""
        h, _, _, _ = self.encode(series)
        lengths = series.lengths.to(h.device)
        is_sample = (torch.arange(h.shape[1], device=h.device) < lengths.unsqueeze(1)).unsqueeze(-1)
        mean = torch.where(is_sample, h, 0.0).sum(1) / lengths.unsqueeze(1)
        return self.head(self.dropout(torch.cat([_last(h, lengths), mean], -1)))


class ForecastNetwork(SeriesNetwork):
    """A recurrent network that forecasts the mean and the standard deviation of later values.

    A network with one hidden layer maps the state and the horizon to the outputs. The state of an ODE-RNN is
    integrated to the horizon; other cores take the state at the last sample. The mean is the last observed value of the
    channel plus an output of the network.
    """

    def __init__(self, **config: Any) -> None:
        channels, hidden = config["channels"], config["hidden_size"]
        super().__init__(**{**config, "outputs": 1})
        self.config = config
        self.head = nn.Sequential(
            nn.Linear(hidden + 2 + 2 * channels, 2 * hidden), nn.Tanh(), nn.Linear(2 * hidden, 2 * channels)
        )

    @override
    def forward(self, series: Series, dt: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # also takes dt
        """Forecast at K times, ``dt`` (batch, K) after the last sample.

        Return the mean and the standard deviation, (batch, K, channels) each.
        """
        h, state, last, last_t = self.encode(series)
        lengths, count = series.lengths.to(h.device), dt.shape[1]
        ahead = dt / self.time_unit
        if self.kind == "odernn":
            order = ahead.argsort(1)
            core: Any = self.core
            h = core.forecast(state, ahead.gather(1, order))[0]
            h = h.gather(1, order.argsort(1).unsqueeze(-1).expand(-1, -1, h.shape[2]))
        else:
            h = _last(h, lengths).unsqueeze(1).expand(-1, count, -1)
        times = series.t.amax(1, keepdim=True) - (series.t[:, :1] if self.start is None else self.start)
        age = (times / self.time_unit - last_t).to(h.dtype).log1p()
        known = torch.cat([last, age], -1).unsqueeze(1).expand(-1, count, -1)
        ahead = ahead.to(h.dtype).unsqueeze(-1)
        shift, log_std = self.head(torch.cat([self.dropout(h), ahead.log1p(), ahead.tanh(), known], -1)).chunk(2, -1)
        return last.unsqueeze(1) + shift, log_std.clamp(-6.0, 4.0).exp()


def _last(h: Tensor, lengths: Tensor) -> Tensor:
    return h[torch.arange(len(h), device=h.device), lengths - 1]


def config_of(series: Series, kind: Core, outputs: int, hidden_size: int, dropout: float) -> dict[str, Any]:
    """Return a dict of arguments for :class:`SeriesNetwork`.

    The numbers of channels and the scales of time are computed from the training series.
    """
    static = 0 if series.static is None else series.static.shape[1]
    try:
        unit = fitted_unit(series.t, series.mask, series.lengths)
        ranges: Any = oscillator_ranges(series.t, series.mask, series.lengths)
    except ValueError:  # no series has two samples at different times
        unit, ranges = 1.0, {"frequency": (0.01, 0.25), "decay": (0.01, 0.1)}
    start, span = common_start(series), _span(series)
    sizes = {"channels": series.x.shape[2], "static_size": static, "outputs": outputs, "hidden_size": hidden_size}
    times = {"start": start, "span": span, "time_unit": unit, **ranges}
    return {"kind": kind, **sizes, "dropout": dropout, **times}


def common_start(series: Series) -> float | None:
    """Return the earliest time of all series; None if the start times differ too much.

    They differ too much if their range exceeds the longest duration of a series.
    """
    starts = series.t[series.mask.any(-1).any(-1), :1]  # times of a series without values may be meaningless
    is_common = bool(len(starts)) and float(starts.max() - starts.min()) <= _span(series)
    return float(starts.min()) if is_common else None


def _span(series: Series) -> float:
    return float((series.t.amax(1) - series.t[:, 0]).max()) or 1.0  # padding repeats the last time


@contextmanager
def kept_random_state() -> Iterator[None]:
    """A context that restores torch's random state on all devices at exit, and enables gradients inside."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)), torch.inference_mode(False), torch.enable_grad():
        yield


@torch.no_grad()
def batched(function: Callable[[Series], Tensor], series: Series) -> Tensor:
    """Return ``function(series)`` on the CPU, computed without gradients in batches of series of similar length."""
    found = torch.empty(0)
    for rows in bucketed_batches(series.lengths, BATCH, shuffle=False):
        part = function(series.select(rows)).cpu()
        found = part.new_empty(len(series), *part.shape[1:]) if not len(found) else found
        found[rows] = part
    return found
