"""ODE-RNN hybrids: a recurrent network whose state follows an ODE between the samples of an irregular series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from typing_extensions import Self, override

from hbnode._arguments import resolved
from hbnode._checks import ArrayLike
from hbnode.ode_rnn import checks, timing
from hbnode.ode_rnn.core import CellArgument, FieldArgument
from hbnode.ode_rnn.inputs import Inputs, Missing
from hbnode.ode_rnn.sequences import Sequences
from hbnode.ode_rnn.stack import Stack
from hbnode.ode_rnn.state import Filtered, ODERNNState, check_kind
from hbnode.solvers.names import Gradient, Method
from hbnode.solvers.settings import Settings


class ODERNN(Stack):
    r"""A recurrent network for irregular series, whose state follows an ODE between the samples.

    From one time to the next the state s, h or the pair (h, m), solves the field's equation; there the cell sees the
    sample:

    .. math:: s(t_i^-) = s(t_{i-1}) + \int_{t_{i-1}}^{t_i} \mathrm{field}(t, s)\,dt, \qquad
        s(t_i) = \mathrm{cell}(x_i, s(t_i^-)), \quad\text{or}\quad s(t_i^-) + \mathrm{cell}(x_i, s(t_i^-)).

    The cell is the same for all fields but for the size of s, so models differ in their field alone. The gaps, each
    sample's own, are part of the solve. With ``per_sample=True`` every sample takes steps of its own: padding and
    batch-mates change no result, but for the rounding of the networks themselves.

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
        core: dict[str, Any] = {"field": field, "cell": cell, "residual": residual, "initial_state": initial_state}
        gradient = gradient or ("adjoint" if adjoint_options is not None else "direct")
        super().__init__(
            Inputs(input_size, missing, mask_features, elapsed_features, static_size),
            hidden_size,
            core,
            Settings(
                method=method,
                rtol=rtol,
                atol=atol,
                gradient=gradient,
                steps=steps,
                per_sample=per_sample,
                max_steps=max_steps,
                options=options,
                adjoint_options=adjoint_options,
                compile=compile,
            ),
            num_layers=num_layers,
            bidirectional=bidirectional,
            dropout=dropout,
            time_unit=time_unit,
        )

    def fit_time_unit(
        self, t: ArrayLike, mask: Tensor | None = None, lengths: Tensor | Sequence[int] | None = None
    ) -> Self:
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
        self.time_unit = timing.fitted_unit(t, mask, lengths)
        return self

    if TYPE_CHECKING:  # nn.Module's returns Any

        @overload
        def __call__(
            self,
            x: Tensor,
            t: ArrayLike,
            state: ODERNNState | None = None,
            mask: Tensor | None = None,
            lengths: Tensor | Sequence[int] | None = None,
            static: Tensor | None = None,
        ) -> tuple[Tensor, ODERNNState]: ...
        @overload
        def __call__(
            self,
            x: PackedSequence,
            t: ArrayLike | PackedSequence,
            state: ODERNNState | None = None,
            mask: Tensor | PackedSequence | None = None,
            lengths: None = None,
            static: Tensor | None = None,
        ) -> tuple[PackedSequence, ODERNNState]: ...
        @override
        def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor | PackedSequence, ODERNNState]: ...

    def forward(
        self,
        x: Tensor | PackedSequence,
        t: ArrayLike | PackedSequence,
        state: ODERNNState | None = None,
        mask: Tensor | PackedSequence | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        static: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, ODERNNState]:
        """The h after each sample, and the state at the end.

        Arguments:
            x: samples (batch, T, input_size), or packed.
            t: times (batch, T), or (T,) for all, also as an array or a list; strictly increasing. Dates of numpy,
                pandas or polars are seconds since 1970.
            state: where to go on from, of an earlier call; its time must not lie after the first of ``t``.
                Default: ``None``.
            mask: which values are observed, (batch, T) or (batch, T, input_size) of bool. The others may be NaN, and
                ``missing`` says what is fed in their place; where nothing of a sample is observed, the state goes on as
                it is. Where x is packed, t and mask may be too. Default: ``None``.
            lengths: length of each sequence, (batch,); what follows is padding. Default: ``None``.
            static: features that do not change, (batch, static_size). Default: ``None``.
        """
        if not isinstance(x, PackedSequence):
            run = self._checked(x, cast(ArrayLike, t), state, cast("Tensor | None", mask), lengths, static)
            return run.after.h, run.state
        if lengths is not None:
            raise ValueError("lengths were given with a PackedSequence, which has its own. Fix: leave them out.")
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        run = self._checked(padded, _padded(t), state, None if mask is None else _padded(mask), lengths, static)
        ordered = x.sorted_indices is None
        output = pack_padded_sequence(run.after.h, lengths, batch_first=True, enforce_sorted=ordered)
        return output, run.state

    def filter(
        self,
        x: Tensor,
        t: ArrayLike,
        state: ODERNNState | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        static: Tensor | None = None,
    ) -> Filtered:
        """The states before and after each sample, for the same arguments as :meth:`forward`.

        The state before a sample is a forecast that has not seen it: train on it to predict one sample ahead.
        """
        if self.bidirectional:
            raise ValueError(
                "a bidirectional ODERNN sees every sample before it comes. Fix: forward, or one direction."
            )
        return self._checked(x, t, state, mask, lengths, static)

    def _checked(
        self,
        x: Tensor,
        t: ArrayLike,
        state: ODERNNState | None,
        mask: Tensor | None,
        lengths: Tensor | Sequence[int] | None,
        static: Tensor | None,
    ) -> Filtered:
        """All that has been read, for checked arguments."""
        sequences = Sequences(self.input_size, x, t, mask, lengths)
        checks.check_dtype(self, sequences.x)
        static = checks.checked_static(static, self.static_size, sequences.x)
        if state is not None:
            checks.check_layers_of(state, self.num_layers, self.bidirectional)
            checks.check_state(state, sequences.x.shape[:1], self)
            checks.check_time_of(state, sequences.t)
        return self._read(sequences, state, static)

    def forecast(self, state: ODERNNState, dt: ArrayLike) -> tuple[Tensor, ODERNNState]:
        """The h at times after that of a state, of which nothing is observed.

        Arguments:
            state: of :meth:`forward` or :meth:`filter`; h, m and t may have further dimensions in front, (..., n).
            dt: how much later, (K,) or (..., K), increasing and not negative; numbers or durations.

        Returns:
            h (..., K, hidden_size), and the state at the last of the times.
        """
        check_kind(state)
        if self.bidirectional:
            raise ValueError("a bidirectional ODERNN does not forecast. Fix: bidirectional=False.")
        shape = state.h.shape[:-1]
        checks.check_state(state, shape, self)
        dt = checks.checked_dt(dt, shape).to(state.h.device).expand(*shape, -1)
        t = state.t.unsqueeze(-1).double()  # float32 would lose a short dt at a late t
        times = torch.cat([t, t + dt], -1)
        return self._forecast(state, times.flatten(0, -2), shape)

    @override
    def extra_repr(self) -> str:
        settings = resolved(self.settings, self.field)
        start = "encoded" if self.encoder is not None else "zeros" if self.start is None else "learned"
        layers = f", num_layers={self.num_layers}" if self.num_layers > 1 else ""
        both = ", bidirectional=True" if self.bidirectional else ""
        dropout = f", dropout={self.dropout:g}" if self.dropout else ""
        grid = "" if self.step_size is None else f", step_size={self.step_size:g}"
        return (
            f"{self.input_size}, {self.hidden_size}, residual={self.residual}, initial_state={start}, "
            f"time_unit={self.time_unit:g}{layers}{both}{dropout}, method={settings.method!r}, rtol={settings.rtol:g}, "
            f"atol={settings.atol:g}{grid}, gradient={settings.gradient!r}, per_sample={settings.per_sample}"
        )


def _padded(z: Any) -> Any:
    """What is given, padded if it is packed."""
    return pad_packed_sequence(z, batch_first=True)[0] if isinstance(z, PackedSequence) else z
