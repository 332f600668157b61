"""ODE-RNN hybrids: recurrent networks for irregular series whose state follows an ODE between observations."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from hbnode import _torch
from hbnode._checks import ArrayLike, as_count, check_bool, nearest
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
SOLVER_SETTINGS = (
    "method", "rtol", "atol", "gradient", "steps", "per_sample", "max_steps", "options", "adjoint_options", "compile"
)  # fmt: skip
FIRST_LAYER_ATTRIBUTES = (
    "field", "cell", "residual", "start", "static_start", "encoder", "augment", "second_order", "state_size"
)  # fmt: skip


def _net(inputs: int, n: int) -> nn.Module:
    return MLP(inputs, [n], n, activation=nn.Tanh)


class ODERNN(seq.TimedModule):
    r"""A recurrent network for irregular series whose hidden state follows an ODE between observations.

    The state s is h for a first-order field. For a second-order field it is the pair (h, m) with the momentum or
    velocity m. In the gap between two observation times :math:`t_{i-1}` and :math:`t_i`, s follows the field's ODE. At
    each :math:`t_i` the cell updates s with the observation :math:`x_i`:

    .. math:: s(t_i^-) = s(t_{i-1}) + \int_{t_{i-1}}^{t_i} \mathrm{field}(t, s)\,dt, \qquad
        s(t_i) = \mathrm{cell}(x_i, s(t_i^-)), \quad\text{or}\quad s(t_i^-) + \mathrm{cell}(x_i, s(t_i^-)).

    Each series of the batch has its own times. With ``per_sample=True`` it also has its own step sizes. Results then do
    not depend on padding or on other series of the batch, except for rounding inside the networks.

    A new network changes its state over about one unit of time. Set the unit with :meth:`fit_time_unit` before
    training: gaps of many units need many function evaluations and train worse.

    References:
        Rubanova, Chen and Duvenaud, Latent ODEs for Irregularly-Sampled Time Series, arXiv:1907.03907. With momentum:
        Xia et al., arXiv:2110.04840, and sections 3.4.3 and 3.4.4 of Wang et al., How Does Momentum Benefit Deep
        Neural Networks Architecture Design? (2022). Missing values: Che et al., Recurrent Neural Networks for
        Multivariate Time Series with Missing Values, arXiv:1606.01865.

    Arguments:
        input_size: number of input features.
        hidden_size: size n of h, including the zeros that an ANODE appends.
        field: ``"node"``, ``"anode"`` (the last half of h starts from zero), ``"sonode"``, ``"hbnode"`` or
            ``"ghbnode"``. Each has a tanh network with one hidden layer of n units. Alternatively a field, or a
            function n -> field. Default: ``"hbnode"``.
        cell: ``"gru"`` or ``"rnn"`` for torch.nn's cell, a module, or a function (inputs, state_size) -> module. A
            module ``cell(x, s)`` maps (batch, inputs) and (batch, state_size) to (batch, state_size). s is h, or h and
            m concatenated; inputs is ``rnn.inputs.size``. The gradient at the cell's output is the adjoint state just
            after the observation, with or without ``residual``; a forward hook can read it. Default: ``"gru"``.
        residual: whether the cell's output is added to the state. Otherwise it replaces the state. Default: ``False``.
        initial_state: the state at the first time, before the first observation: ``"learned"``, ``"zeros"``, or an
            encoder module (batch, T, input_size) -> (batch, state_size). The encoder gets all samples of the first
            call, with zeros for missing values and padding. It may return only h, without an ANODE's zeros; the field
            then computes the rest of the state. ``"learned"`` also means only h if the field has an
            ``initial_momentum`` or ``initial_velocity``. With an encoder, layers above the first use ``"learned"``.
            Default: ``"learned"``.
        time_unit: length of one unit of the field's time, a number in the unit of t. f is called with t / time_unit,
            and derivatives are with respect to t / time_unit. It is saved in the ``state_dict`` and may be set later.
            None is 1.0, with a warning if gaps are much longer than a unit. Default: ``None``.
        missing: replacement for a missing value in the cell's input. ``"zero"``; ``"hold"``: the last observed value;
            ``"decay"``: the last observed value, decaying to 0 (the mean of standardised features) at a learned rate
            per feature. Before the first observation of a feature all three are 0. Default: ``"zero"``.
        mask_features: whether the mask is part of the cell's input. Default: ``False``.
        elapsed_features: whether the cell's input includes the time since each feature was last observed, in units of
            ``time_unit``. Default: ``False``.
        static_size: number of time-independent features. A linear map of them is added to a learned initial state, and
            the cell of the first layer takes them as input. Default: ``0``.
        num_layers: number of layers; the input of each is the h of the layer below after each sample.
            Default: ``1``.
        dropout: probability of dropping an output between layers. Default: ``0.0``.
        bidirectional: whether a second network reads each series from its end, with its time counted from the end. The
            output concatenates both h, (batch, T, 2 hidden_size). It is not causal: use it for classification, not for
            forecasting. Default: ``False``.
        method: solver. This and the next arguments are those of :func:`hbnode.odeint`. torchdiffeq's methods need
            ``per_sample=False``. Default: ``None``.
        rtol: relative tolerance. Default: ``0.001``.
        atol: absolute tolerance. Default: ``0.001``.
        gradient: gradient mode. With ``"checkpoint"`` the backward pass recomputes the steps of one gap at a time, or
            of about :math:`\sqrt T` gaps if f is a network of known layers. ``"adjoint"`` solves the adjoint ODE of
            each gap backwards, in memory that does not grow with the number of steps. Default: ``None``, which is
            ``"direct"``, or ``"adjoint"`` if ``adjoint_options`` is given.
        steps: number of equal steps in each gap. Default: ``None``, adaptive steps.
        per_sample: whether each sample has its own step sizes. If ``False``, all samples of the batch step over the
            same fraction of their gaps. Series that have ended are then left out of the batch, so f must not use other
            tensors with a batch dimension. Default: ``True``.
        max_steps: number of steps in a gap after which the solve raises an error. Default: ``10000``.
        options: further options of the method. ``{"step_size": h}`` divides a gap into the least number of equal steps
            no longer than h. Lengths of time are in units of ``time_unit``, or fractions of a gap for torchdiffeq's
            methods.
            Limits such as ``max_nfe`` apply to each gap. Default: ``None``.
        adjoint_options: options of the adjoint solve. Default: ``None``.
        compile: whether to compile the steps of native methods with torch.compile. On a CPU it has no effect if f is a
            network of known layers, because a fused implementation then solves the gaps, about as fast as compiled
            steps. Default: ``False``.

    The arguments from ``method`` on are also attributes: ``rnn.rtol = 1e-6`` is checked at once and used from the next
    call on.

    Attributes:
        counts: function evaluations of the last call, one list per gap with one count per layer and direction.
        nfe: function evaluations of the last call, summed over gaps and layers.
        nfe_per_gap: function evaluations of the last call, a list with one sum over layers per gap. The backward pass
            adds its evaluations.

    Shape:
        - x: (batch, T, input_size), or a PackedSequence.
        - t: (batch, T) or (T,), numbers in one unit; :class:`hbnode.data.Series` converts dates. Pass large times in
          float64: an error is raised if float32 rounds times by more than a hundredth of the median gap. f(t, h) gets t
          in the dtype of the state, so choose an origin of time near the data.
        - output: (batch, T, hidden_size), h after each sample; 0 on padding.

    Raises:
        ValueError, TypeError: if an argument is out of its range, or times decrease.

    Example:
        >>> import torch, hbnode
        >>> x, t = torch.randn(4, 10, 3), torch.rand(4, 10).cumsum(1)
        >>> rnn = hbnode.ODERNN(3, 8).fit_time_unit(t)
        >>> output, state = rnn(x, t)
        >>> ahead, state = rnn.forecast(state, [0.5, 1.0])
        >>> output.shape, ahead.shape
        (torch.Size([4, 10, 8]), torch.Size([4, 2, 8]))
    """

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
        time_unit: float | None = None,
        missing: Missing = "zero",
        mask_features: bool = False,
        elapsed_features: bool = False,
        static_size: int = 0,
        num_layers: int = 1,
        dropout: float = 0.0,
        bidirectional: bool = False,
        method: Method | None = None,
        rtol: float = 1e-3,
        atol: float = 1e-3,
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
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.bidirectional = check_bool(bidirectional, "bidirectional")
        check_bool(residual, "residual")
        self.dropout = seq.checked_dropout(dropout, num_layers)
        _check_layers(num_layers, self.bidirectional, field, cell, initial_state)
        output_size = hidden_size * (1 + self.bidirectional)

        def make(layer: int) -> ODERNNLayer:
            size, static = (output_size, 0) if layer else (self.inputs.size, self.static_size)
            start = "learned" if layer and isinstance(initial_state, nn.Module) else initial_state
            return ODERNNLayer(size, hidden_size, static, field, cell, start, residual=residual)

        self.layers = nn.ModuleList(make(layer) for layer in range(num_layers))
        self.reverse = nn.ModuleList(make(layer) for layer in range(num_layers) if self.bidirectional)
        self.sizes = [output_size] * (1 + self.second_order)  # number of features of h, and of m, in an output
        self.time_unit = 1.0 if time_unit is None else time_unit
        self.has_unit = time_unit is not None
        self.given = Settings(
            method=method, rtol=rtol, atol=atol, gradient=gradient, steps=steps, per_sample=per_sample,
            max_steps=max_steps, options=options, adjoint_options=adjoint_options, compile=compile,
        )  # fmt: skip
        self.settings, self.step_size = _checked_solver(self.given, self.field)
        self.counts: list[list[NFE]] = []
        self.has_warned = False

    def __getattr__(self, name: str) -> Any:
        """Return a solver setting or an attribute of the first layer.

        Python calls this method if the module itself has no attribute with this name.
        """
        own = self.__dict__.get("_modules", {})
        if name in FIRST_LAYER_ATTRIBUTES and "layers" in own:
            return getattr(own["layers"][0], name)
        if name in SOLVER_SETTINGS and "given" in self.__dict__:
            return getattr(self.given, name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIRST_LAYER_ATTRIBUTES:
            setattr(self.layers[0], name, value)
        elif name in SOLVER_SETTINGS:  # the next call uses it
            given = dataclasses.replace(self.given, **{name: value})
            self.settings, self.step_size = _checked_solver(given, self.field)
            self.given = given
        else:
            super().__setattr__(name, value)

    @property
    def nfe_per_gap(self) -> list[NFE]:
        """Return the function evaluations of each gap in the last call, summed over layers and directions."""
        return [sum(gap, NFE()) for gap in self.counts]

    @property
    def nfe(self) -> NFE:
        """Return the function evaluations of the last call, summed over gaps, layers and directions."""
        return sum(self.nfe_per_gap, NFE())

    def forward(
        self, x: Series, t: ArrayLike | PackedSequence, state: ODERNNState | None = None,
        mask: Tensor | PackedSequence | None = None, lengths: Lengths | None = None, static: Tensor | None = None,
    ) -> tuple[Series, ODERNNState]:  # fmt: skip
        """Return h after each sample, and the state at the end of each series.

        Arguments:
            x: samples (batch, T, input_size), or packed.
            t: times, (batch, T), or (T,) if all series share them; also as an array or a list of numbers. Times must
                not decrease. Between samples of equal time the state does not change, and the cell processes the
                samples in their order.
            state: state of an earlier call, to continue from. ``t`` must start at or after the state's time.
                Default: ``None``.
            mask: which values are observed, bool (batch, T) or (batch, T, input_size). The other values may be NaN and
                are replaced as ``missing`` specifies. A sample with no observed feature does not update the state. If x
                is packed, t and mask may be too. Default: ``None``.
            lengths: length of each sequence, (batch,); the samples after it are padding. Default: ``None``.
            static: time-independent features, (batch, static_size). Default: ``None``.

        Returns:
            h after each sample, (batch, T, hidden_size) or packed like x, and the state at the end of each series.
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
        """Return the states before and after each sample, as :class:`Filtered`.

        The arguments are those of :meth:`forward`. The state before a sample is a forecast from earlier samples only.
        Use it in the loss to learn one-step forecasts.
        """
        seq.refuse_both_directions(self, "does not filter")
        return self._read(x, t, state, mask, lengths, static)

    @_torch.untraced
    def _read(
        self, x: Tensor, t: Any, state: ODERNNState | None, mask: Any, lengths: Lengths | None, static: Tensor | None
    ) -> Filtered:
        series = Sequences(self.input_size, x, t, mask, lengths, self.time_unit)
        seq.check_parameters(series.x, self.parameters())
        static = seq.checked_static(static, self.static_size, series.x, "ODERNN")
        states: list[ODERNNState] = []
        start, times, solver = None, self._in_units(series.t), Solver(self.settings, self.step_size)
        if state is not None:
            seq.refuse_both_directions(self, "takes no state")
            state = self._check_state(state, series.x.shape[:1])
            seq.check_start(state.t, series.t)
            states, start = state.layers, self._in_units(state.t.to(series.t.dtype))
            if len(states) != self.num_layers:
                raise ValueError(
                    f"the state has {len(states)} layers, the module {self.num_layers}. Fix: the state that forward "
                    "returned; the states before and after each sample hold only the last layer."
                )
        x, last, last_t = self.inputs(series, static, states[0] if states else None, self.time_unit)
        window, ends, self.counts = series.x if self.encoder is None else series.window, [], []
        for i, layer in enumerate(cast(list[ODERNNLayer], self.layers)):
            own_static = None if i else static
            s = states[i].joined if states else layer.begin(window, own_static)
            with seq.in_user_units(self.time_unit):
                output = layer(x, times, series.any_observed, s, start, solver)
                self._count(output.nfe)
                if self.bidirectional:
                    output = self._concat_directions(i, output, x, series, own_static, solver)
            ends.append(output.end)
            if i + 1 < self.num_layers:
                x = nn.functional.dropout(output.after[..., : self.sizes[0]], self.dropout, self.training)
                window = series.at_samples(x)
        if not self.has_warned and self.settings.steps is None:
            networks = self.num_layers * (1 + self.bidirectional)
            times = times if start is None else torch.cat([start.unsqueeze(1), times], 1)
            rtol, most = self.settings.rtol, seq.MANY_NFE_THRESHOLD if self.has_unit else seq.SEVERAL_NFE_THRESHOLD
            self.has_warned = seq.warn_if_too_short(self.time_unit, times, self.counts, networks, rtol, most)
        before = seq.make_state(series.padded(output.before), series.padded_t, self.sizes)
        after = seq.make_state(series.padded(output.after), series.padded_t, self.sizes)
        end = seq.make_state(ends[0].clone(), series.t[:, -1], self.sizes, last, last_t)
        for s in ends[1:]:
            end = seq.make_state(s.clone(), series.t[:, -1], self.sizes, below=end)
        return Filtered(before, after, end)

    @_torch.untraced
    def forecast(self, state: ODERNNState, dt: ArrayLike) -> tuple[Tensor, ODERNNState]:
        """Return h at times after the time of a state, without further observations.

        Arguments:
            state: state returned by :meth:`forward` or :meth:`filter`. Its h (..., hidden_size), m and t (...) may have
                any number of leading dimensions.
            dt: times since the time of the state, (K,) or (..., K), not negative and not decreasing. They are numbers
                in the unit of t: use ``series.durations(["1h"])`` for durations of a :class:`hbnode.data.Series`.

        Returns:
            h (..., K, hidden_size), and the state at the last of the times.
        """
        seq.refuse_both_directions(self, "makes no forecast")
        shape = state.h.shape[:-1] if isinstance(state, ODERNNState) else torch.Size()
        state = self._check_state(state, shape)
        device = state.h.device
        at = device if _torch.widest(device) == torch.float64 else torch.device("cpu")
        dt = seq.checked_dt(dt, shape).to(at)
        t = state.t.unsqueeze(-1).to(at, torch.float64)  # in float32, a small dt added to a large t could round to t
        times = torch.cat([t, t + dt], -1).flatten(0, -2)
        states, end, self.counts = state.layers, None, []
        layers = cast(list[ODERNNLayer], self.layers[self.num_layers - len(states) :])
        for one, layer in zip(states, layers, strict=True):
            asked = self._in_units(times if one is state else torch.stack([times[:, 0], times[:, -1]], 1))
            with seq.in_user_units(self.time_unit):
                output = layer.flow(one.joined.flatten(0, -2), asked, Solver(self.settings, self.step_size))
            self._count(output.nfe)
            s, t = (x.unflatten(0, shape) for x in (output.end.clone(), _torch.to_device(times[:, -1], device)))
            end = seq.make_state(s, t, self.sizes, one.last, one.last_t, end)
        assert end is not None
        return output.after[..., : self.hidden_size].contiguous().unflatten(0, shape), end

    def _concat_directions(
        self, i: int, output: LayerOutput, x: Tensor, series: Sequences, static: Tensor | None, solver: Solver
    ) -> LayerOutput:
        order, reversed_series = series.backwards()
        layer = cast(ODERNNLayer, self.reverse[i])
        s = layer.begin(series.at_samples(x) if i else series.window, static)
        t, mask = self._in_units(reversed_series.t), reversed_series.any_observed
        back = layer(seq.reorder(x, order), t, mask, s, None, solver)
        self._count(back.nfe)
        before, after = seq.reorder(back.before, order), seq.reorder(back.after, order)

        def concat(forward: Tensor, backward: Tensor) -> Tensor:  # both h next to each other, then both m
            return torch.cat([s.unflatten(-1, (-1, self.hidden_size)) for s in (forward, backward)], -1).flatten(-2)

        ends = concat(output.end, back.end)
        return LayerOutput(concat(output.before, before), concat(output.after, after), ends, output.nfe)

    def _check_state(self, state: object, batch: torch.Size) -> ODERNNState:
        h = (*batch, self.hidden_size)
        shapes = {"h": h, "m": h if self.second_order else None, "t": tuple(batch)}
        fix = "hbnode.nn.ODERNNState(h, m, t), or the state that an earlier call returned"
        return seq.check_state(state, ODERNNState, shapes, fix)

    def _in_units(self, t: Tensor) -> Tensor:
        return t if self.time_unit == 1 else t.to(_torch.widest(t.device)) / self.time_unit

    def _count(self, nfe: list[NFE]) -> None:
        for gap, one in enumerate(nfe):
            if gap == len(self.counts):
                self.counts.append([])
            self.counts[gap].append(one)

    @override
    def extra_repr(self) -> str:
        settings = resolve(self.settings, self.field)
        own = seq.shown(self, ("residual", "time_unit", "num_layers", "bidirectional", "dropout", "step_size"))
        solver = seq.shown(settings, ("method", "rtol", "atol", "gradient", "per_sample"))
        return f"{self.input_size}, {self.hidden_size}, {own}, {solver}"


# One layer, and the solver of its gaps


class LayerOutput(NamedTuple):
    """The result of a layer: states before and after each sample, (batch, T, S), the last state, and NFE per gap."""

    before: Tensor
    after: Tensor
    end: Tensor
    nfe: list[NFE]


class ODERNNLayer(nn.Module):
    """One layer in one direction: it solves an ODE between observations, and a cell updates the state at each one.

    A state s (batch, S) is h, or h and m concatenated. Times are in units of ``time_unit``.
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
            got = f"{self.augment} zeros, more than hidden_size={hidden_size}"
            raise ValueError(f"the field appends {got}. Fix: increase it.")
        like = next((p for p in self.field.parameters() if p.is_floating_point()), torch.zeros(()))
        with torch.no_grad():
            start = self.field.initial_state(like.new_zeros(1, hidden_size - self.augment))
        if isinstance(start, tuple) and len(start) != 2:
            got = f"{type(self.field).__name__} has {len(start)} tensors"
            raise ValueError(f"the state of ODERNN is h or (h, m), but {got}. Fix: field='hbnode'.")
        self.second_order = isinstance(start, tuple)
        self.state_size = hidden_size * (2 if self.second_order else 1)
        self.cell = _make_cell(cell, input_size, self.state_size)
        self.start: nn.Parameter | None = None
        self.static_start: nn.Linear | None = None
        self.encoder = initial_state if isinstance(initial_state, nn.Module) else None
        if initial_state == "learned":
            makes = [getattr(self.field, name, None) for name in ("initial_momentum", "initial_velocity")]
            size = hidden_size if any(net is not None for net in makes) else self.state_size - self.augment
            self.start = nn.Parameter(torch.zeros(size))  # only for h if the field computes m from h
            if static_size:
                self.static_start = nn.Linear(static_size, size, bias=False)
        elif self.encoder is None:
            seq.check_choice(initial_state, "initial_state", ("learned", "zeros"))

    def begin(self, window: Tensor, static: Tensor | None) -> Tensor:
        """Return the initial states (batch, S) for series with the samples ``window`` (batch, T, features)."""
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
                f"initial_state returned shape {tuple(s.shape)}; expected ({batch}, {size}) for h, or ({batch}, "
                f"{self.state_size}) for the whole state. Fix: {size} outputs in its last layer."
            )
        return s if s.shape[1] == self.state_size else torch.cat(parts(self.field.initial_state(s)), 1)

    def gaps(self, times: Tensor, solver: Solver) -> IntervalSolver:
        """Return an object that solves the ODE over each gap between times (batch, T), with an autograd graph."""
        return IntervalSolver(self.field, times, solver, second_order=self.second_order)

    def forward(
        self, x: Tensor, t: Tensor, mask: Tensor | None, s: Tensor, start: Tensor | None, solver: Solver
    ) -> LayerOutput:
        """Solve the gaps of the series, and update the state at each sample.

        s is the state at the time ``start``, or at the first sample if ``start`` is None. x (batch, T, input_size) is
        the cell's input. The mask (batch, T) selects the samples that update the state.
        """
        if _torch.is_transformed():  # under vmap torch's cells need a state with the batch dimensions of x
            s = s + x.new_zeros(len(s), 1)
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
        new = self.cell(x, s.clone())  # the cell may modify its argument in place
        if not isinstance(new, Tensor) or new.shape != s.shape:
            got = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(f"the cell returned {got}, not a tensor like s, {tuple(s.shape)}. Fix: return a new s.")
        new = new.to(s.dtype)  # autocast may have returned a smaller dtype
        return s + new if self.residual else new

    def flow(self, s: Tensor, times: Tensor, solver: Solver) -> LayerOutput:
        """Solve the ODE without observations, from the state s at the first of the times (batch, K).

        The result holds the states at the other K - 1 times.
        """
        solve = fuse(self, s, times, solver) or self.gaps(times, solver)
        path = []
        for gap in range(times.shape[1] - 1):
            s = solve(gap, s)
            path.append(s)
        states = torch.stack(path, 1)
        return LayerOutput(states, states, s, solve.nfe)


class IntervalSolver:
    """A solver of an ODE over each gap between times (batch, T).

    States are (batch, S): h, or h and m concatenated for second-order fields. Over a gap of length 0 the state does not
    change.
    """

    def __init__(self, field: Field, t: Tensor, solver: Solver, *, second_order: bool) -> None:
        self.field, self.second_order = field, second_order
        settings, self.step_size = resolve(solver.settings, field), solver.step_size
        if settings.gradient == "adjoint" and not settings.is_native and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "gradient='adjoint' of torchdiffeq's methods gives no gradient with respect to times per sample, got t "
                "that requires grad. Fix: gradient='direct', a native method, or t.detach()."
            )
        if settings.is_native:
            gradient = Checkpoint(keep_bytes=0) if settings.gradient == "checkpoint" else settings.gradient
            settings = dataclasses.replace(settings, gradient=gradient, common_steps=not settings.per_sample)
        self.settings, self.t = settings, t.to("cpu", torch.float64)
        self.moves = self.t.detach().diff() != 0
        if _torch.is_vmapped(t):
            raise ValueError("t is mapped by torch.vmap. Fix: a batch, rnn(x, t) with t of shape (batch, T).")
        self.nfe = [NFE() for _ in range(t.shape[1] - 1)]
        # a gap of length 0 is solved only if times need gradients, or while torch.compile, torch.export or
        # torch.jit.trace records the program
        is_solved = t.requires_grad or _torch.is_tracing()
        self.is_zero = [False] * len(self.nfe) if is_solved else _torch.numbers(~self.moves.any(0))

    def __call__(self, gap: int, s: Tensor) -> Tensor:
        if self.is_zero[gap]:
            return s
        t, nfe = self.t[:, gap : gap + 2], self.nfe[gap]
        if not self.settings.is_native:
            return self._solve_in_fractions(s, t, self.moves[:, gap], nfe)
        return self._solve(self.field, s, t if self.step_size is None else self._step_times(t, self.step_size), nfe)

    def _solve(self, field: nn.Module, s: Tensor, t: Any, nfe: NFE) -> Tensor:
        state: State = tuple(s.chunk(2, 1)) if self.second_order else s
        return torch.cat(parts(solve(field, state, t, self.settings, nfe, end=True)), 1)

    def _step_times(self, t: Tensor, step_size: float) -> Tensor:
        """Divide each sample's gap, from ``t[:, 0]`` to ``t[:, 1]``, into equal steps no longer than ``step_size``.

        Return the start and the ends of the steps, (batch, K + 1). Samples with fewer than K steps repeat the end of
        their gap.
        """
        _torch.refuse_export("options={'step_size': h}, whose number of steps depends on t", "steps=n")
        needed = steps_needed(t, step_size)
        most = float(needed.max())
        if not most <= self.settings.max_steps:
            raise MaxStepsError(
                f"step_size={step_size:g} takes {most:.0f} steps in a gap, more than "
                f"max_steps={self.settings.max_steps}. Fix: a longer step_size, or divide t by a typical gap",
                t=float(t[0, 0]), step_size=step_size, nfe=0,
            )  # fmt: skip
        fraction = (torch.arange(int(most) + 1) / needed).clamp(max=1.0)
        return torch.where(fraction < 1, torch.lerp(t[:, :1], t[:, 1:], fraction), t[:, 1:])

    def _solve_in_fractions(self, s: Tensor, t: Tensor, moves: Tensor, nfe: NFE) -> Tensor:
        """Solve the ODE over one gap with torchdiffeq, in a time that runs from 0 to 1 over the gap of each sample.

        Samples whose gap has length 0 keep their state without a solve. They are solved too if t requires gradients, or
        while torch.compile, torch.export or torch.jit.trace records the program.
        """
        index, moving = None, s
        if not (t.requires_grad or _torch.is_tracing() or bool(moves.all())):
            index = moves.nonzero()[:, 0]
            nfe.samples = index.tolist()
            t, index = t[index], index.to(s.device)
            moving = s[index]
        try:
            end = self._solve(TimeRescaledField(self.field, t, moving), moving, [0.0, 1.0], nfe)
        except SolverError as error:
            first, last = t[0].tolist()
            message = f"{error.message}; t is a time of the first sample, in its gap from {first:g} to {last:g}"
            time, size = first + (last - first) * error.t, (last - first) * error.step_size
            raise type(error)(message, t=time, step_size=size, nfe=error.nfe) from error
        return end if index is None else s.to(end.dtype).index_copy(0, index, end)


class TimeRescaledField(nn.Module):
    """A field in the time c = (t - t0) / (t1 - t0) in [0, 1], which gaps of different lengths share.

    Its derivative is dy/dc = (t1 - t0) dy/dt, where the gap of each sample is from t0 to t1.
    """

    def __init__(self, field: Field, t: Tensor, like: Tensor) -> None:
        super().__init__()
        self.field = self.counted_as = field
        self.begin, self.length = (z.to(like).view(-1, 1) for z in (t[:, 0], t.diff()[:, 0]))

    def dynamics_parameters(self) -> list[Tensor]:
        return own_parameters(self.field)

    def _in_time(self, c: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a step in the rescaled time, which starts at c and has this length, to the time t of each sample.

        Return the start and the length of the step in units of t, (batch,) each.
        """
        return (self.begin + c * self.length).flatten(), (length * self.length).flatten()

    def forward(self, c: Tensor, state: State) -> State:
        return apply(lambda part: self.length * part, self.field(self.begin + c * self.length, state))


# Arguments


def _checked_solver(settings: Settings, field: Field) -> Solver:
    """Check the solver settings and return them as a :class:`Solver`.

    Raise ValueError if ``per_sample`` is True and other settings do not support it.
    """
    if settings.gradient is None:
        default = "direct" if settings.adjoint_options is None else "adjoint"
        settings = dataclasses.replace(settings, gradient=default)
    options, step_size = dict(settings.options or {}), None
    if "step_size" in options and settings.is_native:
        step_size = options.pop("step_size")
        if not isinstance(step_size, numbers.Real) or not 0 < float(step_size) < math.inf:
            raise ValueError(f"step_size must be a positive number, got {step_size!r}. Fix: a tenth of a time_unit.")
        if settings.steps is not None:
            raise ValueError("steps and options={'step_size': h} were both given. Fix: leave steps out.")
        settings, step_size = dataclasses.replace(settings, options=options, steps=1), float(step_size)
    return Solver(settings.checked(), step_size)


def _make_field(field: FieldArgument, n: int) -> Field:
    if isinstance(field, str):
        if field not in FIELDS:
            near = nearest(field, tuple(FIELDS)) or "hbnode"
            raise ValueError(f"field must be one of {tuple(FIELDS)}, got {field!r}. Fix: {near!r}, or give a field.")
        return FIELDS[field](n)
    made = field if isinstance(field, nn.Module) else field(n) if callable(field) else None
    if not (isinstance(made, nn.Module) and hasattr(made, "initial_state") and hasattr(made, "readout")):
        raise TypeError(
            f"field must be a name, a field, or a function hidden_size -> field, got {type(field).__name__} that "
            f"gave {type(made).__name__}. Fix: field=lambda n: hbnode.HBNODE(net(n))."
        )
    return cast(Field, made)  # or another module with the methods of a Field


def _make_cell(cell: CellArgument, input_size: int, size: int) -> nn.Module:
    if isinstance(cell, str) and cell in CELLS:
        return CELLS[cell](input_size, size)
    made = cell(input_size, size) if callable(cell) and not isinstance(cell, nn.Module) else cell
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"cell must be one of {tuple(CELLS)}, a module cell(x, s), or a function (input_size, state_size) -> "
            f"module, got {cell!r}. Fix: 'gru'."
        )
    if isinstance(made, (nn.LSTMCell, nn.RNNBase)):
        kind = type(made).__name__
        raise TypeError(f"cell must map (x, s) to s, one tensor (batch, {size}), got {kind}. Fix: cell='gru'.")
    if isinstance(made, nn.RNNCellBase) and (made.input_size, made.hidden_size) != (input_size, size):
        fix = f"cell=torch.nn.{type(made).__name__}({input_size}, {size})"
        raise ValueError(f"cell must take {input_size} inputs and a state of {size}, got {made}. Fix: {fix}.")
    return made


def _check_layers(num_layers: int, bidirectional: bool, field: object, cell: object, initial_state: object) -> None:
    """Raise ValueError if the user passed a module that several layers or directions would share."""
    fixes = (
        ("field", field, "field=lambda n: hbnode.HBNODE(net(n))"),
        ("cell", cell, "cell=lambda inputs, size: Cell(inputs, size)"),
        ("initial_state", initial_state if bidirectional else None, "initial_state='learned'"),
    )
    for name, given, fix in fixes:
        if isinstance(given, nn.Module) and (num_layers > 1 or bidirectional):
            raise ValueError(
                f"{name} is one module, but there are {num_layers * (1 + bidirectional)} networks; expected a function "
                f"that makes one per network. Fix: {fix}."
            )
