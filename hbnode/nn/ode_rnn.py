"""ODE-RNN hybrids: a recurrent network whose state follows an ODE between the samples of an irregular series."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import Self, override

from hbnode import _torch
from hbnode._checks import ArrayLike, as_count, check_input, nearest
from hbnode._times import as_duration
from hbnode._torch import ModuleWithConstants
from hbnode._tree import State, apply, parts
from hbnode.errors import MaxStepsError, SolverError
from hbnode.fields import ANODE, GHBNODE, HBNODE, NODE, SONODE, Field
from hbnode.nfe import NFE
from hbnode.nn import sequences as seq
from hbnode.nn._fused_ode_rnn import FallbackError, Solver, fuse, steps_needed
from hbnode.nn.nets import MLP
from hbnode.nn.sequences import Filtered, Inputs, Lengths, Missing, ODERNNState, Sequences, Series
from hbnode.solve.adjoints import Checkpoint, own_parameters
from hbnode.solve.odeint import resolve, solve
from hbnode.solve.settings import Gradient, Method, Settings

__all__ = ["ODERNN", "ODERNNState", "Filtered"]

FieldName = Literal["node", "anode", "sonode", "hbnode", "ghbnode"]
CellName = Literal["gru", "rnn"]
FieldArgument = FieldName | nn.Module | Callable[[int], nn.Module]
CellArgument = CellName | nn.Module | Callable[[int, int], nn.Module]

FIELDS: dict[str, Callable[[int], Field]] = {
    "node": lambda n: NODE(_net(n, n)),
    "anode": lambda n: ANODE(_net(n, n), augment=n // 2),
    "sonode": lambda n: SONODE(_net(2 * n, n)),
    "hbnode": lambda n: HBNODE(_net(n, n)),
    "ghbnode": lambda n: GHBNODE(_net(n, n)),
}
CELLS: dict[str, Callable[[int, int], nn.Module]] = {"gru": nn.GRUCell, "rnn": nn.RNNCell}
OF_FIRST_LAYER = (
    "field", "cell", "residual", "start", "static_start", "encoder", "augment", "second_order", "state_size"
)  # fmt: skip


def _net(inputs: int, n: int) -> nn.Module:
    return MLP(inputs, [n], n, activation=nn.Tanh)


class ODERNN(ModuleWithConstants):
    r"""A recurrent network for irregular series, whose state follows an ODE between the samples.

    From one time to the next the state s, h or the pair (h, m), solves the field's equation; there the cell updates it
    with the sample:

    .. math:: s(t_i^-) = s(t_{i-1}) + \int_{t_{i-1}}^{t_i} \mathrm{field}(t, s)\,dt, \qquad
        s(t_i) = \mathrm{cell}(x_i, s(t_i^-)), \quad\text{or}\quad s(t_i^-) + \mathrm{cell}(x_i, s(t_i^-)).

    The cell is the same for all fields except for the size of s, so models differ in their field only. Every sample has
    gaps of its own. With ``per_sample=True`` it also has its own step sizes: results then do not depend on padding or
    on other samples of the batch, except for the rounding of the networks themselves.

    A fresh network acts over about one unit of time. Set the unit with :meth:`fit_time_unit` before training: gaps that
    are long in it cost many evaluations, and train worse.

    References:
        Rubanova, Chen and Duvenaud, Latent ODEs for Irregularly-Sampled Time Series, arXiv:1907.03907; with momentum:
        Xia et al., arXiv:2110.04840, and sections 3.4.3 and 3.4.4 of Wang et al., How Does Momentum Benefit Deep
        Neural Networks Architecture Design? (2022). Missing values: Che et al., Recurrent Neural Networks for
        Multivariate Time Series with Missing Values, arXiv:1606.01865.

    Arguments:
        input_size: features of a sample.
        hidden_size: size n of h, the zeros of an ANODE included.
        field: ``"node"``, ``"anode"`` (the last half of h starts from zero), ``"sonode"``, ``"hbnode"``, ``"ghbnode"``,
            each around a tanh network with one hidden layer of n units; or a field; or a function n -> field.
            Default: ``"hbnode"``.
        cell: ``"gru"`` or ``"rnn"``, torch.nn's; a module ``cell(x, s)``, (batch, inputs) and (batch, state_size) ->
            (batch, state_size); or a function (inputs, state_size) -> such a module, with as many inputs as
            ``rnn.inputs.size``. s is h, or h and m side by side. The gradient at its output, which a forward hook can
            ask for, is the adjoint state after the sample, with or without ``residual``. Default: ``"gru"``.
        residual: whether the cell's output is added to the state in place of replacing it. Default: ``False``.
        initial_state: the state at the first time, before the first sample: ``"learned"``, ``"zeros"``, or a module
            (batch, T, input_size) -> (batch, state_size) that sees all of a first call's samples, those that are
            missing and padding as zeros. It may return h alone, without the zeros of an ANODE: the field makes the
            rest, as it does of a learned h if it has an ``initial_momentum`` or ``initial_velocity``. Layers above the
            first learn theirs, if it is a module. Default: ``"learned"``.
        time_unit: length of time, a number or a duration, that is one unit to the field: f is told t / time_unit, and
            the derivatives are with respect to that. It is in the ``state_dict``, and may be set later.
            Default: ``1.0``.
        missing: what the cell is fed for a missing value: ``"zero"``; ``"hold"``, the last one observed; ``"decay"``,
            that one decaying to 0, the mean of standardised features, at a rate learned for each feature. 0 before the
            first one. Default: ``"zero"``.
        mask_features: whether the cell is fed the mask too. Default: ``False``.
        elapsed_features: whether it is fed the time since each feature was observed before, in units of
            ``time_unit``, too. Default: ``False``.
        static_size: number of features that do not change; a linear map of them is added to a learned initial state,
            and the cell of the first layer is fed them. Default: ``0``.
        num_layers: layers; each reads the h of the one below after each sample. Default: ``1``.
        dropout: probability of dropping an output between layers. Default: ``0.0``.
        bidirectional: whether a second network reads each series from its end to its beginning, its time counted from
            the end. The output is both h, (batch, T, 2 hidden_size). For classification: it sees the future.
            Default: ``False``.
        method: solver, as in :func:`hbnode.odeint`; so are the following arguments. torchdiffeq's methods need
            ``per_sample=False``. Default: ``None``.
        rtol: relative tolerance. Default: ``1e-5``.
        atol: absolute tolerance. Default: ``1e-5``.
        gradient: gradient mode. None is ``"direct"``. With ``"checkpoint"`` the backward pass takes the steps again, a
            gap at a time, or about the root of T gaps where f is a network of known layers. Default: ``None``.
        steps: a fixed grid: the number of equal steps in each gap. Default: ``None``, steps are adaptive.
        per_sample: whether each sample has steps of its own. ``False`` takes a common step in units of each sample's
            gap. Series that have ended take no part in it, so that f must not close over tensors with a row for each of
            the batch. Default: ``True``.
        max_steps: steps after which the solve of a gap is given up. Default: ``10000``.
        options: further options of the method; ``{"step_size": h}`` is equal steps no longer than h, as many as the gap
            needs. Lengths of time are in units of ``time_unit``. Limits such as ``max_nfe`` hold for each gap. Lengths
            of time among the options of torchdiffeq's methods are fractions of a gap. Default: ``None``.
        adjoint_options: options of the adjoint's solve. Default: ``None``.
        compile: compile the steps of native methods. Has no effect on the CPU where f is a network of known layers,
            whose gaps are solved without autograd. Default: ``False``.

    Attributes:
        counts: evaluations of the last call, for each gap one count for each of its solves.
        nfe: evaluations of the last call, all gaps together.
        nfe_per_gap: those of each gap, a list, of all layers together; their backward parts are filled in by the
            backward pass.

    Shape:
        - x: (batch, T, input_size), or a PackedSequence; t: (batch, T) or (T,), large times in float64, or dates, which
          are seconds since 1970. An f(t, h) is told the time in the dtype of the state: count from a near origin.
        - output: (batch, T, hidden_size), h after each sample; 0 on padding.

    Raises:
        ValueError, TypeError: if an argument is out of its range, or times do not increase.

    Example:
        >>> import torch, hbnode
        >>> x, t = torch.randn(4, 10, 3), torch.rand(4, 10).cumsum(1)
        >>> rnn = hbnode.ODERNN(3, 8).fit_time_unit(t)
        >>> output, state = rnn(x, t)
        >>> ahead, state = rnn.forecast(state, [0.5, 1.0])
        >>> output.shape, ahead.shape
        (torch.Size([4, 10, 8]), torch.Size([4, 2, 8]))
    """

    defaults: ClassVar[dict[str, float]] = {"_time_unit": 1.0}
    field: Field
    cell: nn.Module
    start: nn.Parameter | None
    static_start: nn.Linear | None
    encoder: nn.Module | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        field: FieldArgument = "hbnode",
        cell: CellArgument = "gru",
        residual: bool = False,
        initial_state: Literal["learned", "zeros"] | nn.Module = "learned",
        time_unit: float = 1.0,
        missing: Missing = "zero",
        mask_features: bool = False,
        elapsed_features: bool = False,
        static_size: int = 0,
        num_layers: int = 1,
        dropout: float = 0.0,
        bidirectional: bool = False,
        method: Method | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-5,
        gradient: Gradient | None = None,
        steps: int | None = None,
        per_sample: bool = True,
        max_steps: int = 10_000,
        options: dict[str, Any] | None = None,
        adjoint_options: dict[str, Any] | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        hidden_size, num_layers = as_count(hidden_size, "hidden_size"), as_count(num_layers, "num_layers")
        self.inputs = Inputs(input_size, missing, mask_features, elapsed_features, static_size)
        self.input_size, self.static_size = self.inputs.input_size, self.inputs.static_size
        self.hidden_size, self.num_layers, self.bidirectional = hidden_size, num_layers, bool(bidirectional)
        self.dropout = seq.checked_dropout(dropout, num_layers)
        _check_layers(num_layers, self.bidirectional, field, cell, initial_state)
        output_size = hidden_size * (1 + self.bidirectional)

        def make(layer: int) -> ODERNNLayer:
            size, static = (output_size, 0) if layer else (self.inputs.size, self.static_size)
            start = "learned" if layer and isinstance(initial_state, nn.Module) else initial_state
            return ODERNNLayer(size, hidden_size, static, field, cell, start, residual=residual)

        self.layers = nn.ModuleList(make(layer) for layer in range(num_layers))
        self.reverse = nn.ModuleList(make(layer) for layer in range(num_layers) if self.bidirectional)
        self.sizes = [output_size] * (1 + self.second_order)  # of h, and of m, in an output
        self.time_unit = time_unit
        gradient = gradient or ("adjoint" if adjoint_options is not None else "direct")
        settings = Settings(
            method=method, rtol=rtol, atol=atol, gradient=gradient, steps=steps, per_sample=per_sample,
            max_steps=max_steps, options=options, adjoint_options=adjoint_options, compile=compile,
        )  # fmt: skip
        self.settings, self.step_size = _checked_solver(settings, self.field)
        self.counts: list[list[NFE]] = []
        self.has_warned = False

    def __getattr__(self, name: str) -> Any:
        """Return what the module itself lacks from its first layer."""
        own = self.__dict__.get("_modules", {})
        if name in OF_FIRST_LAYER and "layers" in own:
            return getattr(own["layers"][0], name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OF_FIRST_LAYER:
            setattr(self.layers[0], name, value)
        else:
            super().__setattr__(name, value)

    @property
    def time_unit(self) -> float:
        """Length of time that is one unit to the field."""
        return self._time_unit

    @time_unit.setter
    def time_unit(self, value: float) -> None:
        self._time_unit = as_duration(value, "time_unit")

    @override
    def constants(self) -> dict[str, str]:
        return {"time_unit": "_time_unit"}

    @property
    def nfe_per_gap(self) -> list[NFE]:
        """Evaluations of each gap of the last call."""
        return [sum(gap, NFE()) for gap in self.counts]

    @property
    def nfe(self) -> NFE:
        """Evaluations of the last call, all gaps together."""
        return sum(self.nfe_per_gap, NFE())

    def fit_time_unit(self, t: ArrayLike, mask: Tensor | None = None, lengths: Lengths | None = None) -> Self:
        """Set ``time_unit`` to ten times the median gap of training data, so that a gap is a tenth of a unit.

        Models that are fitted to t and to 1000 t give the same answers.

        Arguments:
            t: times (batch, T) or (T,), as for :meth:`forward`.
            mask: what was observed, (batch, T) or (batch, T, features); gaps are between samples of which anything was.
                Default: ``None``.
            lengths: length of each series, (batch,). Default: ``None``.

        Returns:
            The module itself.
        """
        self.time_unit = seq.fitted_unit(t, mask, lengths)
        return self

    def forward(
        self, x: Series, t: ArrayLike | PackedSequence, state: ODERNNState | None = None,
        mask: Tensor | PackedSequence | None = None, lengths: Lengths | None = None, static: Tensor | None = None,
    ) -> tuple[Series, ODERNNState]:  # fmt: skip
        """Return h after each sample, and the state at the end.

        Arguments:
            x: samples (batch, T, input_size), or packed.
            t: times (batch, T), or (T,) for all, also as an array or a list; strictly increasing. Dates of numpy,
                pandas or polars are seconds since 1970.
            state: from an earlier call, to continue from; its time must not lie after the first of ``t``.
                Default: ``None``.
            mask: which values are observed, (batch, T) or (batch, T, input_size) of bool. The others may be NaN, and
                ``missing`` says what replaces them. A sample with no observed feature does not update the state. If x
                is packed, t and mask may be too. Default: ``None``.
            lengths: length of each sequence, (batch,); what follows is padding. Default: ``None``.
            static: features that do not change, (batch, static_size). Default: ``None``.
        """
        lengths, padded, t, mask = seq.unpack(x, lengths, t, mask)
        _, after, end = self._read(padded, t, state, mask, lengths, static)
        return seq.pack_as(x, after.h, lengths) if isinstance(x, PackedSequence) else after.h, end

    if TYPE_CHECKING:  # nn.Module's returns Any
        __call__ = forward

    def filter(
        self, x: Tensor, t: ArrayLike, state: ODERNNState | None = None, mask: Tensor | None = None,
        lengths: Lengths | None = None, static: Tensor | None = None,
    ) -> Filtered:  # fmt: skip
        """Return the states before and after each sample, for the same arguments as :meth:`forward`.

        The state before a sample is a forecast that has not seen it: train on it to predict one sample ahead.
        """
        seq.refuse_both_directions(self, "does not filter")
        return self._read(x, t, state, mask, lengths, static)

    @_torch.untraced
    def _read(
        self, x: Tensor, t: Any, state: ODERNNState | None, mask: Any, lengths: Lengths | None, static: Tensor | None
    ) -> Filtered:
        """Run all layers over a batch, from a state."""
        series = Sequences(self.input_size, x, t, mask, lengths)
        seq.check_dtype(series.x, map(attrgetter("dtype"), self.parameters()))
        if static is not None or self.static_size:
            static = _checked_static(static, self.static_size, series.x)
        states: list[ODERNNState] = []
        start, times, solver = None, self._in_units(series.t), Solver(self.settings, self.step_size)
        if state is not None:
            seq.refuse_both_directions(self, "takes no state")
            self._check_state(state, series.x.shape[:1])
            seq.check_start(state.t, series.t)
            states, start = state.layers, self._in_units(state.t.to(series.t.dtype))
            if len(states) != self.num_layers:
                raise ValueError(
                    f"the state has {len(states)} layers, the module {self.num_layers}. Fix: the state that forward "
                    "returned, which has the layers below; those before and after each sample do not."
                )
        x, last, last_t = self.inputs(series, static, states[0] if states else None, self._time_unit)
        window, ends, self.counts = series.x if self.encoder is None else series.window, [], []
        for i, layer in enumerate(cast(list[ODERNNLayer], self.layers)):
            known = None if i else static
            s = states[i].joined if states else layer.begin(window, known)
            with seq.in_user_units(self._time_unit):
                output = layer(x, times, series.seen, s, start, solver)
                self._count(output.nfe)
                if self.bidirectional:
                    output = self._concat_directions(i, output, x, series, known, solver)
            ends.append(output.end)
            if i + 1 < self.num_layers:
                x = nn.functional.dropout(output.after[..., : self.sizes[0]], self.dropout, self.training)
                window = series.at_samples(x)
        if not self.has_warned and self.settings.steps is None:
            networks = self.num_layers * (1 + self.bidirectional)
            times = times if start is None else torch.cat([start.unsqueeze(1), times], 1)
            self.has_warned = seq.warn_if_too_short(self._time_unit, times, self.counts, networks, self.settings.rtol)
        before = seq.state_of(series.padded(output.before), series.padded_t, self.sizes)
        after = seq.state_of(series.padded(output.after), series.padded_t, self.sizes)
        end = seq.state_of(ends[0].clone(), series.t[:, -1], self.sizes, last, last_t)
        for s in ends[1:]:
            end = seq.state_of(s.clone(), series.t[:, -1], self.sizes, below=end)
        return Filtered(before, after, end)

    @_torch.untraced
    def forecast(self, state: ODERNNState, dt: ArrayLike) -> tuple[Tensor, ODERNNState]:
        """Return h at times after that of a state, without samples there.

        Arguments:
            state: of :meth:`forward` or :meth:`filter`; h, m and t may have further dimensions in front, (..., n).
            dt: how much later, (K,) or (..., K), increasing and not negative; numbers or durations.

        Returns:
            h (..., K, hidden_size), and the state at the last of the times.
        """
        seq.refuse_both_directions(self, "makes no forecast")
        shape = state.h.shape[:-1] if isinstance(state, ODERNNState) else torch.Size()
        self._check_state(state, shape)
        dt = seq.checked_dt(dt, shape).to(state.h.device)
        t = state.t.unsqueeze(-1).double()  # float32 would lose a short dt at a late t
        times = torch.cat([t, t + dt], -1).flatten(0, -2)
        states, end, self.counts = state.layers, None, []
        layers = cast(list[ODERNNLayer], self.layers[self.num_layers - len(states) :])
        for one, layer in zip(states, layers, strict=True):
            asked = self._in_units(times if one is state else torch.stack([times[:, 0], times[:, -1]], 1))
            with seq.in_user_units(self._time_unit):
                output = layer.flow(one.joined.flatten(0, -2), asked, Solver(self.settings, self.step_size))
            self._count(output.nfe)
            s, t = output.end.clone().unflatten(0, shape), times[:, -1].unflatten(0, shape)
            end = seq.state_of(s, t, self.sizes, one.last, one.last_t, end)
        assert end is not None
        return output.after[..., : self.hidden_size].contiguous().unflatten(0, shape), end

    def _concat_directions(
        self, i: int, output: LayerOutput, x: Tensor, series: Sequences, static: Tensor | None, solver: Solver
    ) -> LayerOutput:
        """Return a layer's output beside that of its second network, which reads the reversed series."""
        order, reversed_series = series.backwards()
        layer = cast(ODERNNLayer, self.reverse[i])
        s = layer.begin(series.at_samples(x) if i else series.window, static)
        t, mask = self._in_units(reversed_series.t), reversed_series.seen
        back = layer(seq.reorder(x, order), t, mask, s, None, solver)
        self._count(back.nfe)
        before, after = seq.reorder(back.before, order), seq.reorder(back.after, order)

        def concat(ahead: Tensor, back: Tensor) -> Tensor:  # h beside h, and m beside m
            return torch.cat([s.unflatten(-1, (-1, self.hidden_size)) for s in (ahead, back)], -1).flatten(-2)

        ends = concat(output.end, back.end)
        return LayerOutput(concat(output.before, before), concat(output.after, after), ends, output.nfe)

    def _check_state(self, state: object, batch: torch.Size) -> None:
        h = (*batch, self.hidden_size)
        shapes = {"h": h, "m": h if self.second_order else None, "t": tuple(batch)}
        fix = "hbnode.nn.ODERNNState(h, m, t), or the state that an earlier call returned"
        seq.check_state(state, ODERNNState, shapes, fix)

    def _in_units(self, t: Tensor) -> Tensor:
        return t if self._time_unit == 1 else t.to(torch.float64) / self._time_unit

    def _count(self, nfe: list[NFE]) -> None:
        for gap, one in enumerate(nfe):
            if gap == len(self.counts):
                self.counts.append([])
            self.counts[gap].append(one)

    @override
    def extra_repr(self) -> str:
        settings = resolve(self.settings, self.field)
        start = "encoded" if self.encoder is not None else "zeros" if self.start is None else "learned"
        text = f"{self.input_size}, {self.hidden_size}, residual={self.residual}, initial_state={start}"
        text += f", time_unit={self.time_unit:g}"
        text += f", num_layers={self.num_layers}" if self.num_layers > 1 else ""
        text += ", bidirectional=True" if self.bidirectional else ""
        text += f", dropout={self.dropout:g}" if self.dropout else ""
        text += f", method={settings.method!r}, rtol={settings.rtol:g}, atol={settings.atol:g}"
        text += "" if self.step_size is None else f", step_size={self.step_size:g}"
        return f"{text}, gradient={settings.gradient!r}, per_sample={settings.per_sample}"


# A layer, and the solver between its samples


class LayerOutput(NamedTuple):
    """States before and after each sample, (batch, T, S), the last of these, and the evaluations of each gap."""

    before: Tensor
    after: Tensor
    end: Tensor
    nfe: list[NFE]


class ODERNNLayer(nn.Module):
    """One direction of one layer: a state that follows an ODE from sample to sample, where a cell changes it.

    A state s is (batch, S), h or h and m side by side, as the cell has them. Times are in units of time.
    """

    def __init__(
        self, input_size: int, hidden_size: int, static_size: int, field: FieldArgument, cell: CellArgument,
        initial_state: Literal["learned", "zeros"] | nn.Module, *, residual: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size, self.residual = hidden_size, bool(residual)
        self.field = _make_field(field, hidden_size)
        self.augment = getattr(self.field, "augment", 0)
        if self.augment > hidden_size:
            raise ValueError(
                f"the field appends {self.augment} zeros, more than hidden_size={hidden_size}. Fix: a larger one."
            )
        like = next((p for p in self.field.parameters() if p.is_floating_point()), torch.zeros(()))
        with torch.no_grad():
            start = self.field.initial_state(like.new_zeros(1, hidden_size - self.augment))
        self.second_order = isinstance(start, tuple)
        self.state_size = hidden_size * (2 if self.second_order else 1)
        self.cell = _make_cell(cell, input_size, self.state_size)
        self.start: nn.Parameter | None = None
        self.static_start: nn.Linear | None = None
        self.encoder = initial_state if isinstance(initial_state, nn.Module) else None
        if initial_state == "learned":
            makes = [getattr(self.field, name, None) for name in ("initial_momentum", "initial_velocity")]
            size = hidden_size if any(net is not None for net in makes) else self.state_size - self.augment
            self.start = nn.Parameter(torch.zeros(size))  # of h alone, if the field makes m out of it
            if static_size:
                self.static_start = nn.Linear(static_size, size, bias=False)
        elif initial_state != "zeros" and self.encoder is None:
            raise ValueError(
                f"initial_state must be 'learned', 'zeros' or a module, got {initial_state!r}. Fix: 'learned'."
            )

    def begin(self, window: Tensor, static: Tensor | None) -> Tensor:
        """Return the state from which a series starts, given its samples (batch, T, ...)."""
        batch, size = window.shape[0], self.hidden_size - self.augment
        if self.encoder is not None:
            s = self.encoder(window)
        elif self.start is not None:
            s = self.start.expand(batch, -1)
            if self.static_start is not None and static is not None:
                s = s + self.static_start(static)
        else:
            s = window.new_zeros(batch, size)
        if s.shape[:-1] != (batch,) or s.shape[-1] not in (size, self.state_size):
            raise ValueError(
                f"initial_state returned shape {tuple(s.shape)}; expected (batch, size) = ({batch}, {size}) for h"
                + (f", or ({batch}, {self.state_size}) for h and m side by side." if self.second_order else ".")
                + " Fix: the size of its last layer."
            )
        return s if s.shape[1] == self.state_size else torch.cat(parts(self.field.initial_state(s)), 1)

    def gaps(self, times: Tensor, solver: Solver) -> IntervalSolver:
        """Return what solves the gaps between times (batch, T) in the reference form."""
        return IntervalSolver(self.field, times, solver, second_order=self.second_order)

    def forward(
        self, x: Tensor, t: Tensor, mask: Tensor | None, s: Tensor, start: Tensor | None, solver: Solver
    ) -> LayerOutput:
        """Return the states before and after each sample, from a state s at ``start`` or at the first of the times.

        The inputs of the cell are x (batch, T, input_size), and the mask (batch, T) says which update the state.
        """
        times = t if start is None else torch.cat([start.unsqueeze(1), t], 1)
        first = times.shape[1] - t.shape[1] - 1  # the gap before the first sample; -1 if there is none
        fused = fuse(self, s, times, solver)
        if fused is not None and fused.cell is not None:
            try:
                states = fused.run(s, range(first, first + x.shape[1]), x, mask)
                return LayerOutput(*states, states[1][:, -1], fused.nfe)
            except FallbackError:
                fused = None
        solve = fused or self.gaps(times, solver)
        before, after = [], []
        for i, x_i in enumerate(x.unbind(1)):
            s = solve(first + i, s) if first + i >= 0 else s
            before.append(s)
            new = self.update(x_i, s)
            s = new if mask is None else torch.where(mask[:, i, None], new, s)
            after.append(s)
        return LayerOutput(torch.stack(before, 1), torch.stack(after, 1), s, solve.nfe)

    def update(self, x: Tensor, s: Tensor) -> Tensor:
        new = self.cell(x, s.clone())  # the cell may change what it is given
        if not isinstance(new, Tensor) or new.shape != s.shape:
            got = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(f"the cell returned {got}; expected the shape of the state, {tuple(s.shape)}.")
        new = new.to(s.dtype)  # autocast may have made it smaller
        return s + new if self.residual else new

    def flow(self, s: Tensor, times: Tensor, solver: Solver) -> LayerOutput:
        """Return the states at each of the times (batch, K) except the first, without samples."""
        solve = fuse(self, s, times, solver) or self.gaps(times, solver)
        path = []
        for gap in range(times.shape[1] - 1):
            s = solve(gap, s)
            path.append(s)
        states = torch.stack(path, 1)
        return LayerOutput(states, states, s, solve.nfe)


class IntervalSolver:
    """Solver of a field from each of the times (batch, T) to the next; a sample rests while its times repeat.

    A state of a field of second order is h and m side by side.
    """

    def __init__(self, field: Field, t: Tensor, solver: Solver, *, second_order: bool) -> None:
        self.field, self.second_order = field, second_order
        settings, self.step_size = resolve(solver.settings, field), solver.step_size
        if settings.gradient == "adjoint" and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "gradient='adjoint' gives no gradient with respect to times of each sample's own, and these require "
                "one. Fix: gradient='direct', or t.detach()."
            )
        if settings.is_native:
            gradient = Checkpoint(keep_bytes=0) if settings.gradient == "checkpoint" else settings.gradient
            settings = dataclasses.replace(settings, gradient=gradient, common_steps=not settings.per_sample)
        self.settings, self.t = settings, t.to("cpu", torch.float64)
        self.moves = self.t.detach().diff() != 0
        # a gap of length 0 may have a gradient
        self.is_zero = _torch.numbers(~self.moves.any(0) & (not t.requires_grad))
        self.nfe = [NFE() for _ in self.is_zero]

    def __call__(self, gap: int, s: Tensor) -> Tensor:
        """Return the state at the end of a gap from that at its beginning."""
        if self.is_zero[gap]:
            return s
        t, nfe = self.t[:, gap : gap + 2], self.nfe[gap]
        if not self.settings.is_native:
            return self._solve_in_fractions(s, t, self.moves[:, gap], nfe)
        return self._solve(self.field, s, t if self.step_size is None else self._grid(t, self.step_size), nfe)

    def _solve(self, field: nn.Module, s: Tensor, t: Any, nfe: NFE) -> Tensor:
        state: State = tuple(s.chunk(2, 1)) if self.second_order else s
        return torch.cat(parts(solve(field, state, t, self.settings, nfe, end=True)), 1)

    def _grid(self, t: Tensor, step_size: float) -> Tensor:
        """Return the times (batch, K) of steps no longer than a size; samples that need fewer rest in the last."""
        needed = steps_needed(t, step_size)
        most = float(needed.max())
        if not most <= self.settings.max_steps:
            raise MaxStepsError(
                f"step_size={step_size:g} makes {most:.0f} steps of a gap, more than "
                f"max_steps={self.settings.max_steps}. Fix: a longer step_size, or divide t by a typical gap",
                t=float(t[0, 0]), step_size=step_size, nfe=0,
            )  # fmt: skip
        fraction = (torch.arange(int(most) + 1) / needed).clamp(max=1.0)
        return torch.where(fraction < 1, torch.lerp(t[:, :1], t[:, 1:], fraction), t[:, 1:])

    def _solve_in_fractions(self, s: Tensor, t: Tensor, moves: Tensor, nfe: NFE) -> Tensor:
        """Solve by one of torchdiffeq's methods, from 0 to 1 of each gap; the error is that of samples that move."""
        index, moving = None, s
        if not (t.requires_grad or bool(moves.all())):
            index = moves.nonzero()[:, 0]
            nfe.samples = index.tolist()
            t, index = t[index], index.to(s.device)
            moving = s[index]
        try:
            end = self._solve(TimeRescaledField(self.field, t, moving), moving, [0.0, 1.0], nfe)
        except SolverError as error:
            first, last = t[0].tolist()
            message = f"{error.message}; the time is that of the first sample, in its gap from {first:g} to {last:g}"
            time, size = first + (last - first) * error.t, (last - first) * error.step_size
            raise type(error)(message, t=time, step_size=size, nfe=error.nfe) from error
        return end if index is None else s.to(end.dtype).index_copy(0, index, end)


class TimeRescaledField(nn.Module):
    """A field over gaps of unlike lengths, in each of which c goes from 0 to 1: dy/dc = (t1 - t0) dy/dt."""

    def __init__(self, field: Field, t: Tensor, like: Tensor) -> None:
        super().__init__()
        self.field = self.counted_as = field
        self.begin, self.length = (z.to(like).view(-1, 1) for z in (t[:, 0], t.diff()[:, 0]))

    def dynamics_parameters(self) -> list[Tensor]:
        return own_parameters(self.field)

    def _in_time(self, c: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Return the start and length of a step in c, for each sample in its own time, (batch,)."""
        return (self.begin + c * self.length).flatten(), (length * self.length).flatten()

    def forward(self, c: Tensor, state: State) -> State:
        return apply(lambda part: self.length * part, self.field(self.begin + c * self.length, state))


# Arguments


def _checked_solver(settings: Settings, field: Field) -> Solver:
    """Return how to solve; refuse what does not go with times of each sample's own."""
    options, step_size = dict(settings.options or {}), None
    if "step_size" in options and settings.is_native:
        step_size = options.pop("step_size")
        if not isinstance(step_size, numbers.Real) or not 0 < float(step_size) < math.inf:
            raise ValueError(f"step_size must be a positive number, got {step_size!r}. Fix: a tenth of a time_unit.")
        if settings.steps is not None:
            raise ValueError("steps and options={'step_size': h} were both given. Fix: leave steps out.")
        settings, step_size = dataclasses.replace(settings, options=options, steps=1), float(step_size)
    settings = settings.checked()
    if settings.is_native and resolve(settings, field).gradient == "adjoint":
        raise ValueError(
            "gradient='adjoint' of native methods does not know times of each sample's own. Fix: leave gradient "
            "out, or method='dopri5' with per_sample=False."
        )
    return Solver(settings, step_size)


def _make_field(field: FieldArgument, n: int) -> Field:
    if isinstance(field, str):
        if field not in FIELDS:
            near = nearest(field, tuple(FIELDS)) or "hbnode"
            raise ValueError(f"field must be one of {tuple(FIELDS)}, got {field!r}. Fix: {near!r}, or give a field.")
        return FIELDS[field](n)
    made = field if isinstance(field, nn.Module) else field(n) if callable(field) else None
    if not (isinstance(made, nn.Module) and hasattr(made, "initial_state") and hasattr(made, "readout")):
        raise TypeError(
            f"field must be a name, a field, or a function hidden_size -> field, got {type(field).__name__} that gave "
            f"{type(made).__name__}. Fix: field=lambda n: hbnode.HBNODE(net(n))."
        )
    return cast(Field, made)  # or what has its methods


def _make_cell(cell: CellArgument, input_size: int, size: int) -> nn.Module:
    if isinstance(cell, str) and cell in CELLS:
        return CELLS[cell](input_size, size)
    made = cell(input_size, size) if callable(cell) and not isinstance(cell, nn.Module) else cell
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"cell must be one of {tuple(CELLS)}, a module cell(x, s), or a function (input_size, state_size) -> "
            f"module, got {cell!r}. Fix: 'gru'."
        )
    return made


def _check_layers(num_layers: int, bidirectional: bool, field: object, cell: object, initial_state: object) -> None:
    """Refuse modules that several networks would share."""
    fixes = (
        ("field", field, "field=lambda n: hbnode.HBNODE(net(n))"),
        ("cell", cell, "cell=lambda inputs, size: Cell(inputs, size)"),
    )
    for name, given, fix in fixes:
        if isinstance(given, nn.Module) and (num_layers > 1 or bidirectional):
            raise ValueError(
                f"{name} is one module, and there are {num_layers * (1 + bidirectional)} networks; expected a function "
                f"that makes one for each. Fix: {fix}."
            )
    if bidirectional and isinstance(initial_state, nn.Module):
        raise ValueError(
            "initial_state is one module, and there are two directions; expected 'learned' or 'zeros'. Fix: 'learned'."
        )


def _checked_static(static: Tensor | None, size: int, x: Tensor) -> Tensor:
    if static is not None:
        check_input(static, "static")
    shape = None if static is None else tuple(static.shape)
    if static is None or shape != (len(x), size):
        raise ValueError(
            f"static must be (batch, static_size) = ({len(x)}, {size}), got {shape}. "
            + ("Fix: ODERNN(..., static_size=)." if size == 0 else "Fix: a row of features for each series.")
        )
    if not bool(torch.isfinite(static).all()):
        raise ValueError("static is not finite. Fix: standardise, then static.nan_to_num(): missing ones are the mean.")
    return static.to(x)
