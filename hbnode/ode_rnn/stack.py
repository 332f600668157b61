"""All networks of an ODE-RNN, layer upon layer, in one direction or two."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._checks import as_count
from hbnode._times import as_duration
from hbnode._tracing import untraced
from hbnode.nfe import NFE
from hbnode.ode_rnn import checks, timing
from hbnode.ode_rnn.core import Core, Read, Solver
from hbnode.ode_rnn.inputs import Inputs
from hbnode.ode_rnn.sequences import Sequences
from hbnode.ode_rnn.state import Filtered, ODERNNState, joined
from hbnode.solvers.settings import Settings


class Stack(Core):
    """What an :class:`hbnode.ODERNN` is made of: its first layer, those above, and those that read backwards.

    Arguments:
        inputs: what makes the inputs of the first layer's cell out of the samples.
        hidden_size: size of h.
        core: the arguments that all networks share.
        settings: how to solve, not yet checked.
        num_layers: number of layers.
        bidirectional: whether each has a network that reads backwards.
        dropout: between layers.
        time_unit: what is one unit of time to the field.
    """

    defaults: ClassVar[dict[str, float]] = {"_time_unit": 1.0}

    def __init__(
        self,
        inputs: Inputs,
        hidden_size: int,
        core: dict[str, Any],
        settings: Settings,
        *,
        num_layers: int,
        bidirectional: bool,
        dropout: float,
        time_unit: float,
    ) -> None:
        hidden_size, num_layers = as_count(hidden_size, "hidden_size"), as_count(num_layers, "num_layers")
        super().__init__(inputs.size, hidden_size, static_size=inputs.static_size, **core)
        self.inputs, self.input_size, self.static_size = inputs, inputs.input_size, inputs.static_size
        self.num_layers, self.bidirectional = num_layers, bool(bidirectional)
        self.dropout = checks.check_layers(num_layers, self.bidirectional, dropout, core)
        if isinstance(core["initial_state"], nn.Module):
            core = core | {"initial_state": "learned"}

        def make(layer: int) -> Core:
            below = hidden_size * (1 + self.bidirectional)
            sizes = (below, 0) if layer else (inputs.size, inputs.static_size)
            return Core(sizes[0], hidden_size, static_size=sizes[1], **core)

        self.above = nn.ModuleList(make(layer) for layer in range(1, num_layers))
        self.reverse = nn.ModuleList(make(layer) for layer in range(num_layers) if self.bidirectional)
        self.time_unit = time_unit
        solver = checks.checked_solver(settings, self.field)
        self.settings, self.step_size = solver.settings, solver.step_size
        self.counts: list[list[NFE]] = []
        self.has_warned = False

    @property
    def solver(self) -> Solver:
        """How gaps are solved."""
        return Solver(self.settings, self.step_size)

    @property
    def time_unit(self) -> float:
        """The length of time that is one unit to the field."""
        return self._time_unit

    @time_unit.setter
    def time_unit(self, value: float) -> None:
        self._time_unit = as_duration(value, "time_unit")

    @override
    def constants(self) -> dict[str, str]:
        return {"time_unit": "_time_unit"}

    @property
    def nfe(self) -> NFE:
        """Evaluations of the last call, all gaps together."""
        return sum(self.nfe_per_gap, NFE())

    @property
    def nfe_per_gap(self) -> list[NFE]:
        """Evaluations of each gap of the last call."""
        return [sum(gap, NFE()) for gap in self.counts]

    @untraced
    def _read(self, sequences: Sequences, state: ODERNNState | None, static: Tensor | None) -> Filtered:
        """All layers over a checked batch, from a checked state."""
        states = _from_below(state)
        fed, last, last_t = self.inputs(sequences, static, states[0] if states else None, self.time_unit)
        window, times, solver = sequences.window, self._in_units(sequences.t), self.solver
        start = None if state is None else self._in_units(state.t.to(sequences.t.dtype))
        self.counts, ends = [], []
        for layer, core in enumerate(self._layers()):
            known = None if layer else static
            s = joined(states[layer]) if states else core.begin(window, known)
            with timing.in_user_units(self.time_unit):
                run = core.read(fed, times, sequences.seen, s, start, solver)
                self._count(run.nfe)
                if self.bidirectional:
                    back, order = self._backwards(layer, fed, sequences, known, window)
                    self._count(back.nfe)
                    run = run.beside(back, order)
            ends.append(run.end)
            fed = nn.functional.dropout(run.after[0], self.dropout, self.training)
            window = sequences.at_samples(fed)
        self._warn(times if start is None else torch.cat([start.unsqueeze(1), times], 1))
        before, after = (_state(sequences.padded(path), sequences.padded_t) for path in (run.before, run.after))
        end: ODERNNState | None = None
        for layer, rows in enumerate(ends):
            own = {} if layer else {"last": last, "last_t": last_t}
            end = dataclasses.replace(_state(rows, sequences.t[:, -1]), below=end, **own)
        assert end is not None
        return Filtered(before, after, end)

    def _backwards(
        self, layer: int, fed: Tensor, sequences: Sequences, static: Tensor | None, window: Tensor
    ) -> tuple[Read, Tensor]:
        """What the layer's second network makes of the turned series, and where each sample is in it."""
        core = cast(Core, self.reverse[layer])
        order, t = sequences.backwards()
        x = fed.gather(1, order.unsqueeze(-1).expand_as(fed))
        seen = None if sequences.seen is None else sequences.seen.gather(1, order)
        return core.read(x, self._in_units(t), seen, core.begin(window, static), None, self.solver), order

    @untraced
    def _forecast(self, state: ODERNNState, times: Tensor, shape: torch.Size) -> tuple[Tensor, ODERNNState]:
        """From a state with any batch dimensions, through rows of times beginning with its own."""
        t = self._in_units(times)
        states, layers = _from_below(state), self._layers()[::-1]
        self.counts, end = [], None
        for one, core in zip(states, layers[: len(states)][::-1], strict=True):
            asked = t if one is state else torch.stack([t[:, 0], t[:, -1]], 1)
            with timing.in_user_units(self.time_unit):
                h, rows, nfe = core.flow(joined(one).flatten(0, -2), asked, self.solver)
            self._count(nfe)
            later = _state(rows.unflatten(1, shape), times[:, -1].unflatten(0, shape))
            end = dataclasses.replace(later, last=one.last, last_t=one.last_t, below=end)
        assert end is not None
        return h.unflatten(0, shape), end

    def _layers(self) -> list[Core]:
        """The layers that read forwards, from below."""
        return [self, *(cast(Core, core) for core in self.above)]

    def _in_units(self, t: Tensor) -> Tensor:
        """Times in units of time."""
        return t if self.time_unit == 1 else t.to(torch.float64) / self.time_unit

    def _count(self, nfe: list[list[NFE]]) -> None:
        """Add the counts of a run to those of the other layers."""
        longest = max(len(nfe), len(self.counts))
        padded = [gaps + [[]] * (longest - len(gaps)) for gaps in (self.counts, nfe)]
        self.counts = [[*one, *other] for one, other in zip(*padded, strict=True)]

    def _warn(self, times: Tensor) -> None:
        """Once, if the unit of time is far too short."""
        settings = self.settings
        is_adaptive = settings.steps is None
        if not self.has_warned and is_adaptive and settings.rtol > timing.TIGHT:
            networks = self.num_layers * (1 + self.bidirectional)
            self.has_warned = timing.warn_if_too_short(self.time_unit, times, self.counts, networks)


def _state(rows: Tensor, t: Tensor) -> ODERNNState:
    return ODERNNState(rows[0], rows[1] if len(rows) > 1 else None, t)


def _from_below(state: ODERNNState | None) -> list[ODERNNState]:
    """The states of the layers, from below."""
    return [] if state is None else [*_from_below(state.below), state]
