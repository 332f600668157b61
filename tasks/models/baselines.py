"""Recurrent networks for irregular series, which are baselines for ODE-RNNs.

``make_baseline("gru", input_size, parameters)`` makes a network with approximately this number of parameters. The
networks differ in how they use the time gaps between samples:

- "lstm", "gru": torch's layers, with the time gap as a further input.
- "gru-d": a GRU whose hidden state decays over the gap.
- "cfc": closed-form continuous-time units, of the package ncps.
- "oscillators": two blocks of :class:`hbnode.nn.OscillatorStack`, exact over any gap.
- "selective": one layer :class:`hbnode.nn.Oscillators` with ``selective=True`` and real states, exact over any gap.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Callable

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import MODELS, ODEConfig, option, trial_field

NetworkState = typing.Any  # the state of any network


class Recurrent(nn.Module, abc.ABC):
    """Base class of recurrent networks whose inputs are samples and the time gaps between them.

    Arguments:
        input_size: number of features of a sample.
        hidden_size: number of features of the output.
        predicts_ahead: whether the time until the predicted sample is a further input.
    """

    def __init__(self, input_size: int, hidden_size: int, *, predicts_ahead: bool = False) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.features = input_size + predicts_ahead

    def forward(
        self, x: Tensor, gap_before: Tensor, state: NetworkState | None = None, gap_after: Tensor | None = None
    ) -> tuple[Tensor, NetworkState]:
        """Return features (B, T, hidden_size) after each sample, and the state after the last sample.

        Arguments:
            x: samples (B, T, input_size).
            gap_before: time since the previous sample, (B, T), in a unit in which gaps are about 1. It is 0 for the
                first sample, or with a state the time since the last sample of the earlier call.
            state: the state that an earlier call returned; None for a new series.
            gap_after: time until the predicted sample, (B, T), if ``predicts_ahead``.
        """
        x = x if gap_after is None else torch.cat([x, gap_after[..., None]], dim=-1)
        return self._read(x, gap_before[..., None], state)

    @abc.abstractmethod
    def _read(self, x: Tensor, gap: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        """Compute ``forward`` for samples (B, T, features) and gaps (B, T, 1)."""

    def _unroll(
        self, step: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, gap: Tensor, h: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return all h and the last h; ``step`` computes h from a sample, its gap (B, ...) and the previous h."""
        h = x.new_zeros(len(x), self.hidden_size) if h is None else h
        output = []
        for sample, elapsed in zip(x.unbind(1), gap.unbind(1), strict=True):
            h = step(sample, elapsed, h)
            output.append(h)
        return torch.stack(output, dim=1), h


class Gated(Recurrent):
    """torch's LSTM or GRU, whose input is the sample and the gap."""

    def __init__(self, kind: Callable[..., nn.RNNBase], input_size: int, hidden_size: int, **options: bool) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.net = kind(self.features + 1, hidden_size, batch_first=True)

    def _read(self, x: Tensor, gap: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        return self.net(torch.cat([x, gap], dim=-1), state)


class Decaying(Recurrent):
    """GRU-D: h <- exp(-max(0, w gap + b)) * h over the gap, then h <- GRU(x, h).

    Z. Che et al., Recurrent Neural Networks for Multivariate Time Series with Missing Values, 2018, arXiv:1606.01865.
    Here only whole samples are missing, not single values. So one gap applies to all of h, and the mask and the
    imputation of the paper are not needed.
    """

    def __init__(self, input_size: int, hidden_size: int, **options: bool) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.decay = nn.Linear(1, hidden_size)
        self.cell = nn.GRUCell(self.features, hidden_size)

    def _read(self, x: Tensor, gap: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        decay = torch.exp(-self.decay(gap).relu())
        return self._unroll(lambda sample, factor, h: self.cell(sample, factor * h), x, decay, state)


class ClosedForm(Recurrent):
    """CfC: h <- (1 - s) * g(x, h) + s * f(x, h), with s = sigmoid(a(x, h) gap + b(x, h)), g and f ending in tanh.

    R. Hasani et al., Closed-form Continuous-time Neural Models, 2022, arXiv:2106.13898. The cell is from the package
    ncps. Its four heads share a layer with as many units as h.
    """

    def __init__(self, input_size: int, hidden_size: int, **options: bool) -> None:
        super().__init__(input_size, hidden_size, **options)
        try:
            from ncps.torch import CfCCell
        except ImportError as error:
            raise ImportError(
                f"cfc needs the package ncps ({error}). Fix: pip install -e '.[peers]', or choose another model."
            ) from error
        # the class CfC of ncps is not used, because it mixes up the batch and unit dimensions of the gaps
        self.cell = CfCCell(self.features, hidden_size, backbone_units=hidden_size)

    def _read(self, x: Tensor, gap: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        return self._unroll(lambda sample, elapsed, h: self.cell(sample, h, elapsed)[0], x, gap, state)


class Swinging(Recurrent):
    """Damped oscillators. The slowest have a period of 200 gaps."""

    def __init__(self, input_size: int, hidden_size: int, **options: bool) -> None:
        super().__init__(input_size, hidden_size, **options)
        self.net: typing.Any = self._make()

    def _make(self) -> nn.Module:
        return hbnode.nn.OscillatorStack(self.features, self.hidden_size, frequency=(0.005, 0.25), decay=(0.005, 0.1))

    def _read(self, x: Tensor, gap: Tensor, state: NetworkState | None) -> tuple[Tensor, NetworkState]:
        t = gap.squeeze(-1).double().cumsum(1)
        return self.net(x, t if state is None else t + state.t.unsqueeze(1), state)


class Selective(Swinging):
    """Selective oscillators with as many real states as features. Initially the selection is weak."""

    def _make(self) -> nn.Module:
        layer = hbnode.nn.Oscillators(
            self.features, self.hidden_size, selective=True, frequency=None, decay=(0.005, 0.1)
        )
        with torch.no_grad():
            layer.get_parameter("weight_select").div_(3)
        return layer


KINDS: dict[str, Callable[..., Recurrent]] = {
    "lstm": functools.partial(Gated, nn.LSTM),
    "gru": functools.partial(Gated, nn.GRU),
    "gru-d": Decaying,
    "cfc": ClosedForm,
    "oscillators": Swinging,
    "selective": Selective,
}
BASELINES = tuple(KINDS)


def make_baseline(
    name: str, input_size: int, parameters: int, *, output_size: int = 0, predicts_ahead: bool = False
) -> Recurrent:
    """Return a baseline whose number of parameters is closest to a given number.

    Arguments:
        name: one of :data:`BASELINES`.
        input_size: features of a sample.
        parameters: the wanted number of parameters.
        output_size: features of a linear head whose parameters are counted too; 0: no head.
        predicts_ahead: see :class:`Recurrent`.

    Raises:
        ValueError: if the number is too small.
        ImportError: if ``name`` is "cfc" and ncps is not installed.
    """

    def make(hidden_size: int) -> Recurrent:
        return KINDS[name](input_size, hidden_size, predicts_ahead=predicts_ahead)

    def with_head(hidden_size: int) -> nn.ModuleList:
        head = [nn.Linear(hidden_size, output_size)] if output_size else []
        return nn.ModuleList([make(hidden_size), *head])

    with torch.device("meta"):  # uses no random numbers
        matched = hbnode.nn.match_parameters(with_head, parameters)[0]
    return make(typing.cast(Recurrent, matched).hidden_size)


@dataclasses.dataclass(frozen=True)
class IrregularSeriesConfig(ODEConfig):
    """Options of tasks that compare ODE-RNNs with baselines."""

    models = (*MODELS, *BASELINES)

    time_unit: float = option(1.0, "time unit of an ODE-RNN, in units of the data's times; 0: ten median gaps")

    def rnn_options(self) -> dict[str, typing.Any]:
        """Return the keyword arguments of an ODERNN, with separate step sizes for each sample if possible."""
        return self.ode_options() | {"per_sample": self.solver == "native", "time_unit": self.time_unit or 1.0}

    def try_out(self, model: str) -> None:
        """Solve a small ODE-RNN with these options, or make a baseline to check that its package is installed."""
        if model in BASELINES:
            make_baseline(model, input_size=1, parameters=1000)
        if model not in MODELS:
            return
        x = torch.ones(1, 2, 2, requires_grad=True)
        rnn = hbnode.ODERNN(2, 2, field=trial_field(model), **self.rnn_options())
        rnn(x, torch.tensor([0.0, 1.0]))[0].sum().backward()
