"""A layer of damped oscillators with exact gaps, run in parallel over time."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from typing_extensions import override

from hbnode._checks import ArrayLike
from hbnode._times import as_times
from hbnode._torch import may_look, no_autocast
from hbnode.nn.oscillators.coefficients import entries_of
from hbnode.nn.oscillators.kalman import Gaussian, KalmanBank, OscillatorBelief
from hbnode.nn.oscillators.plain import ScanInput
from hbnode.nn.oscillators.rates import DECAY, FREQUENCY, Range
from hbnode.nn.oscillators.scan import scan
from hbnode.nn.oscillators.state import OscillatorState
from hbnode.nn.sequences import Sequences


class Oscillators(KalmanBank):
    r"""A layer of damped oscillators that samples of a series drive, at regular or irregular times.

    Each of P oscillators follows x'' + γ x' + κ x = u(t), exactly, over any gap between samples. With the state (v, x),
    v = x', and the transition Φ(Δ) of :func:`hbnode.nn.functional.oscillator_step`,

    .. math:: h(t_i^-) = \Phi(t_i - t_{i-1})\,h(t_{i-1}), \qquad v(t_i) = v(t_i^-) + B x_i, \qquad
        y_i = C\,[v; \sqrt\kappa\,x](t_i) + D x_i.

    That is ``input="impulse"``: a sample kicks the velocities, and the output at a time has seen the sample there.
    With ``input="hold"`` a sample is a force B x_i until the next sample, and y_i sees it through D alone. The layer is
    linear in its input. A scan runs over all samples at once, in time and memory linear in their number; times that are
    equally spaced, and ``t=None``, cost less.

    With ``noise=True`` the layer is also a probabilistic model: dv = (-γv - κx) dt + s dW, from its stationary
    distribution, whose v and √κ x have the variance σ² = s²/(2γ), and samples are C [v; √κ x] + ε with independent ε ~
    N(0, r²). Its Kalman filter is exact for any gaps, because the noise over a gap has the covariance P - ΦPΦᵀ with the
    stationary P. Observations couple the oscillators, so that the filter keeps a covariance of 2P x 2P for each
    series and takes one step after another: time in proportion to T (2P)² input_size. B and D have no part in it.

    γ > 0 and κ > 0 are learned for each oscillator as their logarithms, so that every layer is stable.

    References:
        Rusch and Rus, Oscillatory State-Space Models, arXiv:2410.03943 (LinOSS); Boyer, Rusch and Rus, Learning to
        Dissipate Energy in Oscillatory State-Space Models, arXiv:2505.12171 (D-LinOSS).

    Arguments:
        input_size: features of a sample.
        hidden_size: features of the output, in each direction.
        num_oscillators: P. None is ``hidden_size``. Default: ``None``
        discretization: ``"exact"``, or ``"imex"``, D-LinOSS's step: implicit damping, explicit stiffness. Its
            error is of the order of the gap, and gaps longer than about 2/√κ make it unstable. Default: ``"exact"``
        input: ``"impulse"`` or ``"hold"``. Default: ``"impulse"``
        bidirectional: whether a second layer with parameters of its own reads the series backwards in time; its outputs
            stand beside those of the first. Such a layer reads whole series: it takes no state and makes no forecast.
            Default: ``False``
        noise: whether :meth:`log_likelihood` and :meth:`filter` read samples as outputs of noisy oscillators;
            hidden_size must then be input_size. Default: ``False``
        frequency: range of initial frequencies, in cycles per unit of ``t``, drawn log-uniformly.
            :func:`hbnode.nn.oscillator_ranges` reads it off the times. Default: ``(0.001, 0.25)``
        decay: range of initial decay rates a = γ/2, in 1 / unit of ``t``, likewise, up to 1.5 ω; a free oscillation
            decays as e^{-at}. Default: ``(0.001, 0.1)``
        device: device of the parameters. Default: ``None``
        dtype: dtype of the parameters. States are float64 in a layer in float64, else float32. Default: ``None``

    Shape:
        - x: (batch, T, input_size), or a PackedSequence; t: (batch, T) or (T,), in any units, or None for 0, 1, 2, ....
        - y: (batch, T, hidden_size), twice that if bidirectional; 0 on padding; in the dtype of x.

    Raises:
        ValueError, TypeError: if an argument is out of its range, or times do not increase.
        FloatingPointError: if the state becomes NaN or infinite; the message says by which parameter.

    Example:
        >>> import torch, hbnode
        >>> layer = hbnode.nn.Oscillators(3, 8, num_oscillators=16)
        >>> y, state = layer(torch.randn(4, 100, 3))
        >>> t = (0.1 + torch.rand(4, 100)).cumsum(1)
        >>> y, state = layer(torch.randn(4, 100, 3), t)
        >>> ahead, _ = layer.forecast(state, [0.5, 1.0])
        >>> y.shape, ahead.shape
        (torch.Size([4, 100, 8]), torch.Size([4, 2, 8]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_oscillators: int | None = None,
        *,
        discretization: Literal["exact", "imex"] = "exact",
        input: Literal["impulse", "hold"] = "impulse",
        bidirectional: bool = False,
        noise: bool = False,
        frequency: Range = FREQUENCY,
        decay: Range = DECAY,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = (discretization, input, frequency, decay, device, dtype)
        super().__init__(input_size, hidden_size, num_oscillators, *options)
        self._add_noise(noise)
        self.bidirectional = bool(bidirectional)
        if self.bidirectional and self.noise:
            raise ValueError("noise=True filters forwards in time alone. Fix: bidirectional=False.")
        self.reverse: Oscillators | None = None
        if self.bidirectional:
            self.reverse = Oscillators(
                input_size,
                hidden_size,
                num_oscillators,
                discretization=discretization,
                input=input,
                frequency=frequency,
                decay=decay,
                device=device,
                dtype=dtype,
            )

    if TYPE_CHECKING:  # nn.Module's returns Any

        @overload
        def __call__(
            self,
            x: Tensor,
            t: ArrayLike | None = None,
            state: OscillatorState | None = None,
            mask: Tensor | None = None,
            lengths: Tensor | Sequence[int] | None = None,
        ) -> tuple[Tensor, OscillatorState]: ...
        @overload
        def __call__(
            self,
            x: PackedSequence,
            t: ArrayLike | PackedSequence | None = None,
            state: OscillatorState | None = None,
            mask: Tensor | PackedSequence | None = None,
        ) -> tuple[PackedSequence, OscillatorState]: ...
        @override
        def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor | PackedSequence, OscillatorState]: ...

    def forward(
        self,
        x: Tensor | PackedSequence,
        t: ArrayLike | PackedSequence | None = None,
        state: OscillatorState | None = None,
        mask: Tensor | PackedSequence | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor | PackedSequence, OscillatorState]:
        """The outputs, and the state after the last sample.

        Arguments:
            x: samples (batch, T, input_size), or packed.
            t: times (batch, T), or (T,) for all, also as an array or a list; strictly increasing. None is a unit of
                time from each sample to the next. Default: ``None``
            state: where to go on from, of an earlier call; its time must not lie after the first of ``t``. None is
                rest, at the first of the times. Default: ``None``
            mask: which values are observed, (batch, T) or (batch, T, input_size) of bool. The others may be NaN. They
                add nothing to an impulse; a held input keeps the last that was observed. Default: ``None``
            lengths: length of each sequence, (batch,); what follows is padding. Default: ``None``
        """
        if not isinstance(x, PackedSequence):
            return self._run(x, cast("ArrayLike | None", t), state, cast("Tensor | None", mask), lengths)
        if lengths is not None:
            raise ValueError("lengths were given with a PackedSequence, which has its own. Fix: leave them out.")
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        y, state = self._run(padded, None if t is None else _padded(t), state, _padded(mask), lengths)
        ordered = x.sorted_indices is None
        return pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=ordered), state

    def _run(
        self,
        x: Tensor,
        t: ArrayLike | None,
        state: OscillatorState | None,
        mask: Tensor | None,
        lengths: Tensor | Sequence[int] | None,
    ) -> tuple[Tensor, OscillatorState]:
        if isinstance(t, OscillatorState):
            raise TypeError("t is an OscillatorState; times come before it. Fix: layer(x, None, state).")
        if state is not None:
            self._refuse_both_directions("takes no state")
            state = self._check_state(state, x.shape[0] if isinstance(x, Tensor) else 0)
        times: ArrayLike = _counted(x, state) if t is None else t
        sequences = Sequences(self.input_size, x, times, mask, lengths)
        self._check_dtype(x)
        is_shared = state is None and (t is None or as_times(t, "t").dim() == 1)
        gaps = _gaps(sequences, state, is_counted=t is None, is_shared=is_shared)
        with no_autocast(x):
            y, state = self._scanned(sequences, state, gaps)
            if self.reverse is not None:
                turned, order = _turned(sequences)
                gaps = _gaps(turned, None, is_counted=t is None, is_shared=is_shared and lengths is None)
                other, _ = self.reverse._scanned(turned, None, gaps)
                y = torch.cat([y, _ordered(other, order)], -1)
        return sequences.padded(y), state

    def _scanned(
        self, sequences: Sequences, state: OscillatorState | None, gaps: _Gaps
    ) -> tuple[Tensor, OscillatorState]:
        """The outputs, without padding, and the state at the end of each sequence."""
        x, dtype = sequences.x, self._dtype
        w, skip = self.weight_in.to(dtype), self.weight_skip.to(dtype)
        zeros = torch.zeros(x.shape[0], self.num_oscillators, dtype=dtype, device=x.device)
        v0, x0 = (zeros, zeros) if state is None else (state.v.to(dtype), state.x.to(dtype))
        held = None
        driving = x
        if self._is_held:
            before = torch.zeros_like(x[:, 0]) if state is None or state.held is None else state.held.to(x.dtype)
            filled = torch.cat([before.unsqueeze(1), x], 1)
            if sequences.observed is not None:
                filled = _filled(filled, sequences.observed)
            driving, x, held = filled[:, :-1], filled[:, 1:], filled[:, -1]
        rests = gaps.are_rows and gaps.common is None  # padding moves nothing
        ends = None if sequences.valid is None or rests else sequences.valid.sum(1) - 1
        kind, rates, between = self.discretization, self._rates(), gaps.between
        if gaps.common is not None:
            entries = entries_of(kind, self._is_held, rates[0], rates[1], rates.new_tensor(gaps.common))
            kind, between = "fixed", None
            rates = torch.stack([entry.expand(self.num_oscillators) for entry in entries if entry is not None])
        inputs = ScanInput(driving, v0, x0, w, self._readout(), None if self._is_held else skip, rates, between, ends)
        y, v, q = scan(kind, self._is_held, inputs)
        if self._is_held:
            y = y + (x.to(dtype) @ skip.T).to(y.dtype)
        self._check_finite(v, q, y[:, -1])
        return y, OscillatorState(v, q, sequences.t[:, -1], held)

    @overload
    def forecast(self, state: OscillatorState, dt: ArrayLike) -> tuple[Tensor, OscillatorState]: ...
    @overload
    def forecast(self, state: OscillatorBelief, dt: ArrayLike) -> tuple[Gaussian, OscillatorBelief]: ...
    def forecast(
        self, state: OscillatorState | OscillatorBelief, dt: ArrayLike
    ) -> tuple[Tensor | Gaussian, OscillatorState | OscillatorBelief]:
        """The outputs at times after that of a state, with no sample in between.

        Arguments:
            state: of a call of this layer; or of :meth:`filter`, for means and standard deviations of observations.
            dt: how much later, (K,) or (batch, K), increasing and not negative. With ``discretization="imex"`` the
                layer takes a step from each to the next.

        Returns:
            y (batch, K, hidden_size), in the dtype of the states, and the state at the last of the times. A held input
            stays; there is no sample for D of an impulse to see.
        """
        self._refuse_both_directions("makes no forecast")
        batch = len(state.t) if isinstance(state, (OscillatorState, OscillatorBelief)) else 0
        if not isinstance(state, OscillatorBelief):
            state = self._check_state(state, batch)
        dt = as_times(dt, "dt")
        if dt.dim() not in (1, 2) or dt.shape[-1] == 0 or (dt.dim() == 2 and len(dt) != batch):
            raise ValueError(
                f"dt must be (K,) or (batch, K) with batch {batch}, got {tuple(dt.shape)}. Fix: [0.5, 1.0]."
            )
        if may_look() and not bool((dt[..., :1] >= 0).all() & (dt.diff() >= 0).all() & dt.isfinite().all()):
            raise ValueError(
                "dt must be finite, increase and not be negative: it is time after that of the state. Fix: sort it."
            )
        dt = dt.to(state.t.device).expand(batch, -1)
        with no_autocast(state.v):
            return self._forecast_belief(state, dt) if isinstance(state, OscillatorBelief) else self._ahead(state, dt)

    def _ahead(self, state: OscillatorState, dt: Tensor) -> tuple[Tensor, OscillatorState]:
        """The outputs after times dt (batch, K), and the state at the last of them."""
        if self.discretization == "exact":
            paths = [self._advanced(state, dt[:, i : i + 1]) for i in range(dt.shape[1])]
        else:
            paths = []
            for gap in dt.diff(prepend=torch.zeros_like(dt[:, :1])).unbind(1):
                before = OscillatorState(*paths[-1], state.t, state.held) if paths else state
                paths.append(self._advanced(before, gap.unsqueeze(1)))
        y = torch.stack([torch.cat(path, -1) for path in paths], 1) @ self._readout().T
        self._check_finite(*paths[-1], y[:, -1])
        if state.held is not None:
            y = y + (state.held.to(y.dtype) @ self.weight_skip.to(y.dtype).T).unsqueeze(1)
        time = state.t + dt[:, -1].to(state.t.dtype)
        return y, OscillatorState(*paths[-1], time, state.held)

    def _check_dtype(self, x: Tensor) -> None:
        dtype = self.weight_in.dtype
        is_half = x.dtype.itemsize == 2
        if x.dtype != dtype and not is_half and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"x is {x.dtype}, the parameters are {dtype}; expected one dtype, or samples in half precision. "
                f"Fix: x.to({dtype}), or .to({x.dtype}) of the module."
            )

    def _refuse_both_directions(self, what: str) -> None:
        if self.bidirectional:
            raise ValueError(f"a bidirectional layer {what}: it reads whole series. Fix: bidirectional=False.")

    @override
    def extra_repr(self) -> str:
        return (
            super().extra_repr()
            + (", bidirectional=True" if self.bidirectional else "")
            + (", noise=True" if self.noise else "")
        )


class _Gaps(NamedTuple):
    """The times between samples.

    Attributes:
        common: the one gap of all, if there is one.
        between: time before each sample (batch or 1, T).
        are_rows: whether padding has gaps of 0.
    """

    common: float | None
    between: Tensor | None
    are_rows: bool


def _counted(x: Tensor, state: OscillatorState | None) -> Tensor:
    """Times of samples that are counted, after that of the state."""
    shape = x.shape[:2] if isinstance(x, Tensor) and x.dim() == 3 else (0, 0)
    t = torch.arange(shape[1], dtype=torch.float64, device=x.device if isinstance(x, Tensor) else None)
    return t.expand(shape) if state is None else state.t.detach().double().unsqueeze(1) + 1 + t


def _gaps(sequences: Sequences, state: OscillatorState | None, *, is_counted: bool, is_shared: bool) -> _Gaps:
    """Those before each sample, from the time of the state on."""
    if is_counted:
        return _Gaps(1.0, None, are_rows=False)
    is_shared = is_shared and (sequences.valid is None or may_look())  # else padding, which may have any time, is there
    t = sequences.raw_t[:1] if is_shared else sequences.t
    gaps = t.diff()
    if state is None:
        first = gaps[:, :1].detach() if gaps.shape[1] else torch.ones_like(t)  # from rest, any gap will do
    else:
        first = t[:, :1] - state.t.to(t.dtype).unsqueeze(1)
        if may_look() and bool((first < 0).any()):
            raise ValueError(
                "the state's time lies after the first of t; expected the series to go on from it. "
                "Fix: times of the whole series, not of its part."
            )
    gaps = torch.cat([first, gaps], 1)
    if gaps.requires_grad or not may_look():
        return _Gaps(None, gaps, are_rows=not is_shared)
    return _Gaps(_common(gaps, t, sequences.valid), gaps, are_rows=not is_shared)


def _common(gaps: Tensor, t: Tensor, valid: Tensor | None) -> float | None:
    """The gap that all are, if each time is where they put it but for its rounding."""
    if valid is not None and len(gaps) > 1:
        gaps = torch.where(valid, gaps, gaps[:, :1])
    gaps = gaps.detach().double()
    off = (gaps - gaps.mean()).cumsum(1).abs().max()
    most, mean, largest = torch.stack([off, gaps.mean(), t.detach().abs().max()]).tolist()
    rounding = 2 * torch.finfo(t.dtype).eps * largest
    return mean if most <= rounding <= 0.01 * mean else None


def _filled(x: Tensor, observed: Tensor) -> Tensor:
    """The last observed values (batch, 1 + T, n); the first are observed."""
    steps = torch.arange(1, x.shape[1], device=x.device).view(1, -1, 1)
    last = torch.where(observed, steps, 0).cummax(1).values
    last = torch.nn.functional.pad(last, (0, 0, 1, 0)).expand(-1, -1, x.shape[2])
    return x.gather(1, last)


def _turned(sequences: Sequences) -> tuple[Sequences, Tensor]:
    """The same series from their ends to their beginnings, each in its own length, and the order (batch, T)."""
    turned = copy.copy(sequences)
    order, since = sequences.backwards()
    turned.x = _ordered(sequences.x, order)
    turned.t = turned.raw_t = since
    turned.observed = None if sequences.observed is None else _ordered(sequences.observed, order)
    return turned, order


def _ordered(z: Tensor, order: Tensor) -> Tensor:
    """The samples (batch, T, n) in another order."""
    return z.gather(1, order.unsqueeze(-1).expand(-1, -1, z.shape[-1]))


def _padded(z: Any) -> Any:
    """What is given, padded if it is packed."""
    return pad_packed_sequence(z, batch_first=True)[0] if isinstance(z, PackedSequence) else z
