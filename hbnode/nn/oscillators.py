"""Damped oscillators with exact transitions over irregular gaps: a layer, a cell and a deep model.

A gap is the time between two successive samples of a series.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict, overload

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from hbnode._checks import (
    ArrayLike,
    as_count,
    as_real,
    check_bool,
    check_input,
    refuse_gradient,
    refuse_meta,
    to_tensor,
)
from hbnode._times import as_times, refuse_dates
from hbnode._torch import may_look, no_autocast
from hbnode._tree import Kind, Record, record
from hbnode.nn import sequences as seq
from hbnode.nn._oscillator_step import (
    OscillatorStep,
    ScanInput,
    accumulation_dtype,
    held_response,
    oscillator_step,
    scan,
    transition,
)
from hbnode.nn.kalman import Gaussian, KalmanFilter, OscillatorBelief, OscillatorFiltered, safe_sqrt
from hbnode.nn.sequences import Inputs, Lengths, Missing, Sequences, Series

__all__ = [
    "Gaussian",
    "OscillatorBelief",
    "OscillatorCell",
    "OscillatorFiltered",
    "OscillatorStack",
    "OscillatorStackState",
    "OscillatorState",
    "OscillatorStep",
    "Oscillators",
    "held_response",
    "oscillator_ranges",
    "oscillator_step",
]

Range = tuple[float, float]

FREQUENCY = (0.001, 0.25)
DECAY = (0.001, 0.1)
SPANS_PER_LONGEST_PERIOD = 30  # longest period that oscillator_ranges returns, divided by the longest duration


class Ranges(TypedDict):
    """The ranges of initial frequencies and decay rates, as keyword arguments of :class:`Oscillators`."""

    frequency: Range
    decay: Range


@record
class OscillatorState(Record):
    """The state of :class:`Oscillators`, from which a later call continues the series.

    Attributes:
        v: velocities, (batch, num_oscillators), after the last sample.
        x: displacements, (batch, num_oscillators).
        t: time of the last sample, (batch,).
        held: the last input, (batch, inputs), with ``input="hold"`` or ``selective=True``; else None. If the layer has
            neither ``missing`` nor further input features, this is the last observed value of each feature. With
            ``selective=True`` it is the last sample with an observed value.
        last: last observed value of each feature, (batch, input_size); None if the layer does not use it.
        last_t: time of the value in ``last``, (batch, input_size); the start of the series if nothing was observed.
    """

    v: Tensor
    x: Tensor
    t: Tensor
    held: Tensor | None = None
    last: Tensor | None = None
    last_t: Tensor | None = None

    @override
    @staticmethod
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        is_time, is_sample = name in ("t", "last_t"), name in ("held", "last", "static")
        return old if is_time else new if is_sample or new.itemsize >= 4 else torch.float32


class _OscillatorModule(nn.Module):
    """The base class of :class:`Oscillators` and :class:`OscillatorCell`, with the parameters that both share."""

    log_damping: nn.Parameter
    log_stiffness: nn.Parameter
    weight_in: nn.Parameter
    weight_out: nn.Parameter
    weight_skip: nn.Parameter

    selective = False
    _shown: ClassVar[tuple[str, ...]] = ("num_oscillators", "discretization", "input")

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_oscillators: int | None = None,
        *,
        discretization: Literal["exact", "imex"] = "exact",
        input: Literal["impulse", "hold"] = "impulse",
        frequency: Range | None = FREQUENCY,
        decay: Range = DECAY,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.num_oscillators = as_count(hidden_size if num_oscillators is None else num_oscillators, "num_oscillators")
        seq.check_choice(discretization, "discretization", ("exact", "imex"))
        seq.check_choice(input, "input", ("impulse", "hold"))
        self.discretization, self.input = discretization, input
        has_none = self.selective and frequency is None
        self.frequency_range = (0.0, 0.0) if has_none else _checked_range(frequency, "frequency")
        self.decay_range = _checked_range(decay, "decay")
        for name, shape in self._shapes(self.input_size).items():
            empty = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, empty)
        self.reset_parameters()

    def _shapes(self, inputs: int) -> dict[str, tuple[int, ...] | None]:
        size = self.num_oscillators
        return {
            "log_damping": (size,),
            "log_stiffness": (size,),
            "weight_in": (size, inputs),
            "weight_out": (self.hidden_size, 2 * size),
            "weight_skip": (self.hidden_size, inputs),
        }

    def reset_parameters(self) -> None:
        """Draw new frequencies and decay rates log-uniformly, and normally distributed weights.

        The weights are scaled so that white noise, sampled four times per shortest period, gives states of variance 1.
        """
        with torch.no_grad():
            low, high = (math.log(bound) for bound in self.decay_range)
            rate = torch.empty_like(self.log_damping, dtype=torch.float32).uniform_(low, high).exp()
            low, high = (math.log(2 * math.pi * bound) for bound in self.frequency_range)
            omega = torch.empty_like(rate).uniform_(low, high).exp()
            rate = torch.minimum(rate, 1.5 * omega)  # every oscillator is then underdamped
            self.log_damping.copy_((2 * rate).log())
            self.log_stiffness.copy_((omega.square() + rate.square()).log())
            gap = 0.25 / self.frequency_range[1]
            scale = (1 - (-2 * gap * rate).exp()).mul(2 / self.weight_in.shape[1]).sqrt()
            scale = scale / gap if self.input == "hold" else scale
            self.weight_in.normal_().mul_(scale.unsqueeze(1))
            self.weight_out.normal_(std=(2 * self.num_oscillators) ** -0.5)
            self.weight_skip.normal_(std=self.weight_in.shape[1] ** -0.5)

    @property
    def damping(self) -> Tensor:
        """The damping coefficient γ of each oscillator, (num_oscillators,), in 1 / time."""
        return self.log_damping.exp()

    @property
    def stiffness(self) -> Tensor:
        """The stiffness κ of each oscillator, (num_oscillators,), in 1 / time²."""
        return self.log_stiffness.exp()

    @property
    def frequency(self) -> Tensor:
        """The undamped frequency √κ / 2π of each oscillator with stiffness κ, (num_oscillators,), in cycles / time."""
        return (self.log_stiffness / 2).exp() / (2 * math.pi)

    @property
    def _is_held(self) -> bool:
        return self.input == "hold"

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of states: float64 if the parameters are float64, else float32."""
        return torch.promote_types(self.weight_in.dtype, torch.float32)

    def _rates(self) -> Tensor:
        """Return damping γ and stiffness κ, (2, num_oscillators), in float64 if the device supports it."""
        logs = torch.stack([self.log_damping, self.log_stiffness])
        return logs.to(accumulation_dtype(self._dtype, logs.device)).exp()

    def _readout(self) -> Tensor:
        """Return the matrix (outputs, 2 P) that maps the state (v, x) of P oscillators to the output.

        ``weight_out`` maps (v, √stiffness · x) to the output, so its columns for x are multiplied by √stiffness.
        """
        root = (self.log_stiffness.to(self._dtype) / 2).exp()
        return self.weight_out.to(self._dtype) * torch.cat([torch.ones_like(root), root])

    def _advance(self, state: OscillatorState, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Return the velocities and displacements at a time ``dt``, (batch, 1), after the time of ``state``."""
        rates, dtype = self._rates(), self._dtype
        entries = transition(self.discretization, self._is_held, rates, dt.to(rates))
        vv, vx, xv, xx, *f = (entry.to(dtype) for entry in entries)
        v, x = vv * state.v + vx * state.x, xv * state.v + xx * state.x
        if not f or state.held is None:
            return v, x
        u = state.held.to(dtype) @ self.weight_in.to(dtype).T
        return v + f[0] * u, x + f[1] * u

    def _check_finite(self, v: Tensor, x: Tensor, y: Tensor) -> None:
        if not may_look() or bool(torch.cat([v.detach(), x.detach(), y.detach().to(v)], -1).isfinite().all()):
            return
        self._check_parameters()
        raise FloatingPointError(
            "the oscillators' state or output became NaN or infinite: "
            + (
                "a gap is longer than about 2/√κ, where IMEX steps are unstable. Fix: discretization='exact'."
                if self.discretization == "imex"
                else f"samples are too large for {y.dtype}. Fix: standardise x, as hbnode.nn.Standardize does."
            )
        )

    def _check_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            limit = math.log(torch.finfo(torch.float32).max) if name.startswith("log_") else math.inf
            refuse_meta(parameter, "the module")
            values = parameter.detach()
            if not bool((values.isfinite() & (values < limit)).all()):
                raise FloatingPointError(
                    f"{name} is NaN, infinite or beyond float32, so the oscillators' state or output is not finite. "
                    "Fix: load parameters of an earlier step, and clip gradients or lower the learning rate."
                )

    def _check_state(self, state: object, batch: int, kind: type[Kind]) -> Kind:
        """Return the state; raise an error unless it has the type ``kind`` and fits this module and the batch size."""
        size, is_belief = self.num_oscillators, kind is OscillatorBelief
        shapes: dict[str, tuple[int, ...] | None] = {"v": (batch, size), "x": (batch, size), "t": (batch,)}
        if is_belief:
            shapes["covariance"] = (batch, 2 * size, 2 * size)
        elif self._is_held:
            shapes["held"] = (batch, self.weight_in.shape[1])
        fix = "the state that filter returned" if is_belief else "OscillatorState(v, x, t), or the state of a call"
        return seq.check_state(state, kind, shapes, fix)

    @override
    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, {seq.shown(self, self._shown)}"


class TimedInputs(Inputs):
    """A module that builds the inputs of oscillators from samples, masks, elapsed times and static features.

    If the inputs include elapsed times, the unit of these times is stored in the ``state_dict``.
    """

    time_unit: float = 1.0

    @override
    def constants(self) -> dict[str, str]:
        return {"time_unit": "time_unit"} if self.elapsed_features or self.rate is not None else {}


class Oscillators(_OscillatorModule):
    r"""A layer of damped oscillators that are driven by the samples of a series at regular or irregular times.

    Each of P oscillators follows q'' + γ q' + κ q = u(t) exactly over any gap between samples. Its state is h = (v, q)
    with the velocity v = q'; ``state.x`` is q. The transition over a time Δ is Φ(Δ) of
    :func:`hbnode.nn.functional.oscillator_step`. A sample x_i at the time t_i gives the output y_i:

    .. math:: h(t_i^-) = \Phi(t_i - t_{i-1})\,h(t_{i-1}), \qquad v(t_i) = v(t_i^-) + B x_i, \qquad
        y_i = C\,[v; \sqrt\kappa\,q](t_i) + D x_i.

    Here B, C and D are ``weight_in``, ``weight_out`` and ``weight_skip``. These equations are for ``input="impulse"``,
    with which a sample changes the velocities at once. With ``input="hold"`` a sample is the constant force u = B x_i
    until the next sample, and y_i depends on x_i only through D. The layer is linear in its input. A scan computes all
    outputs in time and memory linear in T. Equally spaced times and ``t=None`` take less time.

    γ > 0 and κ > 0 are learned for each oscillator as logarithms, so that the layer is always stable.

    With ``noise=True`` the layer is also a probabilistic model, dv = (-γv - κq) dt + s dW with a Wiener process W. It
    starts from the stationary distribution, in which v and √κ q have the variance σ² = s²/(2γ). Samples are observed
    as C [v; √κ q] + ε with independent ε ~ N(0, r²). The model does not use B and D, which have
    ``requires_grad=False``. Its Kalman filter is exact for any gaps: the noise over a gap has the covariance S - ΦSΦᵀ,
    where S is the stationary covariance. Observations correlate the oscillators, so the filter has a 2P x 2P
    covariance matrix per series. Its time is linear in T.

    With ``selective=True`` the rates depend on the samples, so that the layer chooses what it remembers. Its P complex
    states z decay at rates a and rotate at frequencies ω, which a sample sets for the gap after it. At the sample x_i
    they are multiplied by f_i and receive an input through a gate g_i. With the sigmoid function σ,

    .. math:: z_i = f_i\, e^{(-a_{i-1} + i\omega_{i-1})(t_i - t_{i-1})} z_{i-1} + g_i \circ B x_i, \qquad
        y_i = C\,[\operatorname{Re} z_i; \operatorname{Im} z_i] + D x_i,

    .. math:: a_i = a_0\, \frac{\mathrm{softplus}(W_a x_i - 4)}{\mathrm{softplus}(-4)}, \quad
        \omega_i = 2\omega_0\, \sigma(W_\omega x_i), \quad f_i = \sigma(-f_0 - W_f x_i), \quad
        g_i = \sigma(g_0 + W_g x_i).

    The modulus of z never grows without input. Half of the states do not oscillate (ω = 0). With ``frequency=None`` no
    state oscillates, and all states are real. A sample without observed values has no effect, and gaps may be 0.
    ``state.v`` and ``state.x`` are Re z and Im z, and ``state.held`` is the last observed input.

    References:
        Rusch and Rus, Oscillatory State-Space Models, arXiv:2410.03943 (LinOSS); Boyer, Rusch and Rus, Learning to
        Dissipate Energy in Oscillatory State-Space Models, arXiv:2505.12171 (D-LinOSS); Gu and Dao, Mamba,
        arXiv:2312.00752 (selection by the sample, with learned steps in place of gaps).

    Arguments:
        input_size: features of a sample.
        hidden_size: features of the output, in each direction.
        num_oscillators: number of oscillators P. None is ``hidden_size``. Default: ``None``
        discretization: ``"exact"``, or ``"imex"``, the step of D-LinOSS with implicit damping and explicit stiffness.
            Its error is proportional to the gap, and it is unstable for gaps longer than about 2/√κ.
            Default: ``"exact"``
        input: ``"impulse"`` or ``"hold"``. Default: ``"impulse"``
        bidirectional: whether a second layer with its own parameters processes the series backwards in time. Its
            outputs are concatenated to those of the first. Such a layer processes only whole series: it accepts no
            initial state and makes no forecasts. Default: ``False``
        noise: whether the layer is a probabilistic model, for :meth:`log_likelihood`, :meth:`filter` and
            :meth:`smooth`. ``hidden_size`` must then be ``input_size``. Default: ``False``
        selective: whether decay, frequency, forgetting and input depend on the samples. Such a layer takes
            ``discretization="exact"`` and ``input="impulse"``, and no noise. Default: ``False``
        frequency: range of the initial damped frequencies ω/2π, in cycles per unit of ``t``, drawn log-uniformly.
            :func:`hbnode.nn.oscillator_ranges` computes a range from times; pass it ``selective=True`` for a selective
            layer. A selective layer also accepts None, for real states. Default: ``(0.001, 0.25)``
        decay: range of the initial decay rates a = γ/2, in 1 / unit of ``t``, drawn log-uniformly and limited to 1.5 ω.
            A free oscillation decays as e^{-at}. With ``selective=True`` the rates have no limit, and a state
            decays at a sample as much as in a time 0.1 / ``decay[1]``. Default: ``(0.001, 0.1)``
        missing: replacement for a missing value in a sample of which another value is observed: ``"zero"``, ``"hold"``
            or ``"decay"``, as in :class:`hbnode.ODERNN`. A sample without observed values gives no input. None is
            ``"zero"`` with ``input="impulse"`` and ``"hold"`` with ``input="hold"``. Default: ``None``
        mask_features: whether the mask is part of the input x. Default: ``False``
        elapsed_features: whether the input includes the time since each feature was last observed. This time, and that
            of ``missing="decay"``, is in units of 1 / ``decay[1]``: ten median gaps with ``oscillator_ranges``.
            Default: ``False``
        static_size: number of time-independent features, which are part of every input. Default: ``0``
        device: device of the parameters. Default: ``None``
        dtype: dtype of the parameters. States are float64 if it is float64, else float32. Default: ``None``

    Shape:
        - x: (batch, T, input_size), or a PackedSequence; t: (batch, T) or (T,), in any units, or None for 0, 1, 2, ....
        - y: (batch, T, hidden_size), or (batch, T, 2 hidden_size) if bidirectional; 0 on padding; in the dtype of x.

    Raises:
        ValueError, TypeError: if an argument is out of its range, or times decrease.
        FloatingPointError: if the state becomes NaN or infinite; the message gives the cause.

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

    log_spread: nn.Parameter | None
    log_observation_noise: nn.Parameter | None
    _shown: ClassVar[tuple[str, ...]] = ("num_oscillators", "discretization", "input", "bidirectional", "noise")
    __signature__: ClassVar[inspect.Signature]
    _selective_class: ClassVar[type[Oscillators]]  # set by hbnode.nn.selective, which imports this module

    def __new__(cls, *_: object, selective: bool = False, **__: object) -> Oscillators:
        """Create an object of the class :class:`hbnode.nn.selective.SelectiveOscillators` if ``selective``."""
        return super().__new__(cls._selective_class if selective is True and cls is Oscillators else cls)

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
        selective: bool = False,
        frequency: Range | None = FREQUENCY,
        decay: Range = DECAY,
        missing: Missing | None = None,
        mask_features: bool = False,
        elapsed_features: bool = False,
        static_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_bool(bidirectional, "bidirectional"), check_bool(noise, "noise"), check_bool(selective, "selective")
        if selective and not self.selective:
            raise TypeError(
                f"selective=True needs Oscillators itself, got its subclass {type(self).__name__}. "
                "Fix: a module with a layer Oscillators(..., selective=True)."
            )
        options: Any = {"discretization": discretization, "input": input}
        if selective:
            _check_only("selective=True", options | {"noise": noise})
        options |= {"frequency": frequency, "decay": decay}
        natural: Missing = "hold" if input == "hold" else "zero"
        missing = natural if missing is None else missing
        inputs = TimedInputs(input_size, missing, mask_features, elapsed_features, static_size)
        super().__init__(inputs.size, hidden_size, num_oscillators, **options, device=device, dtype=dtype)
        self.input_size, self.static_size = inputs.input_size, inputs.static_size
        inputs.time_unit = 1 / self.decay_range[1]
        self.takes_samples = inputs.size == self.input_size and inputs.missing == natural  # samples are used unchanged
        self.noise = noise
        if self.noise and self.hidden_size != self.input_size:
            raise ValueError(
                f"noise=True needs hidden_size = input_size, got {self.hidden_size} and {self.input_size}. "
                f"Fix: hidden_size={self.input_size}, num_oscillators={self.num_oscillators}."
            )
        if self.noise:  # the Kalman filter takes unchanged samples in their order
            names = "missing", "mask_features", "elapsed_features", "static_size"
            given = {name: getattr(inputs, name) for name in names} | {"bidirectional": bidirectional}
            _check_only("noise=True", given | {"discretization": discretization}, missing=natural)
        spread = torch.zeros(self.num_oscillators, device=device, dtype=dtype)
        observation_noise = torch.full((self.input_size,), math.log(0.3), device=device, dtype=dtype)
        self.register_parameter("log_spread", nn.Parameter(spread) if noise else None)
        self.register_parameter("log_observation_noise", nn.Parameter(observation_noise) if noise else None)
        if noise:  # DistributedDataParallel raises an error for parameters without gradients
            self.weight_in.requires_grad_(False), self.weight_skip.requires_grad_(False)
        self.bidirectional = False
        self.reverse: Oscillators | None = None
        if bidirectional:
            reverse = copy.deepcopy(self)
            reverse.reset_parameters()
            self.reverse, self.bidirectional = reverse, True
        self.inputs = inputs.to(device, dtype)

    @property
    def process_noise(self) -> Tensor | None:
        """The diffusion coefficient of each velocity, (num_oscillators,). None without noise.

        It is √(2 damping) times the stationary standard deviation of the velocity.
        """
        return None if self.log_spread is None else self.log_spread.exp() * (2 * self.damping).sqrt()

    @property
    def observation_noise(self) -> Tensor | None:
        """The standard deviation of the observation noise of each feature, (input_size,). None without noise."""
        return None if self.log_observation_noise is None else self.log_observation_noise.exp()

    def forward(
        self,
        x: Series,
        t: ArrayLike | PackedSequence | None = None,
        state: OscillatorState | None = None,
        mask: Tensor | PackedSequence | None = None,
        lengths: Lengths | None = None,
        static: Tensor | None = None,
    ) -> tuple[Series, OscillatorState]:
        """Return the outputs, and the state after the last sample.

        Arguments:
            x: samples (batch, T, input_size), or a PackedSequence.
            t: times (batch, T), or (T,) for the whole batch, also as an array or a list. Times must not decrease. The
                impulses of samples of equal time add up; with ``input="hold"`` the last of them is held. None is one
                unit of time between samples. Default: ``None``
            state: the state of an earlier call, to continue its series. Its time must not be later than the first
                time in ``t``. None is a zero state at the first time. Default: ``None``
            mask: which values are observed, bool, (batch, T) or (batch, T, input_size). Other values may be NaN. If the
                layer has no ``missing``, a missing value gives no impulse; with ``input="hold"`` the last observed
                value is held.
                Default: ``None``
            lengths: length of each sequence, (batch,); later samples are padding. Default: ``None``
            static: time-independent features, (batch, static_size). Default: ``None``

        Raises:
            TypeError: if ``t`` is a state, or the dtype of x is not that of the parameters.
            ValueError: if a shape does not fit, times decrease, or an observed value is not finite.
        """
        lengths, series, times, observed = seq.unpack(x, lengths, t, mask)
        if isinstance(times, OscillatorState):
            raise TypeError("t must be times, got an OscillatorState. Fix: layer(x, None, state).")
        if self.noise:
            _refuse_static(static)
        if state is not None:
            seq.refuse_both_directions(self, "takes no state")
            batch = series.shape[0] if isinstance(series, Tensor) else 0
            state = self._check_state(state, batch, OscillatorState)
        sequences = _sequences(self, series, times, state, observed, lengths)
        refuse_meta(self.weight_in, "the module")
        if series.dtype.itemsize != 2:  # a float32 layer accepts half-precision samples
            seq.check_dtype(series, [self.weight_in.dtype])
        is_shared = state is None and (times is None or as_times(times, "t").dim() == 1)
        with no_autocast(series):
            is_plain = static is None and self.takes_samples
            memory = {} if is_plain else self._replace_samples(sequences, static, state)
            y, after = self._scan(sequences, state, 1.0 if t is None else _gaps(sequences, state, is_shared))
            after = dataclasses.replace(after, **memory) if memory else after
            if self.reverse is not None:
                order, reverse = sequences.backwards()
                gaps = 1.0 if t is None else _gaps(reverse, None, is_shared and lengths is None)
                y = torch.cat([y, seq.reorder(self.reverse._scan(reverse, None, gaps)[0], order)], -1)
        y = sequences.padded(y)
        return seq.pack_as(x, y, lengths) if isinstance(x, PackedSequence) else y, after

    if TYPE_CHECKING:  # nn.Module's returns Any
        __call__ = forward

    def _replace_samples(
        self, sequences: Sequences, static: Tensor | None, state: OscillatorState | None
    ) -> dict[str, Any]:
        """Replace the samples in ``sequences`` by the inputs of the oscillators, which are computed from the samples.

        Return a dict with the attributes ``last`` and ``last_t`` of the state after the last sample.
        """
        static = seq.checked_static(static, self.static_size, sequences.x, "Oscillators")
        x, last, last_t = self.inputs(sequences, static, state, self.inputs.time_unit)
        if sequences.any_observed is not None:
            sequences.observed = sequences.any_observed.unsqueeze(-1)
            x = torch.where(sequences.observed, x, 0.0)  # a sample without observed values gives no input
        sequences.x = x.to(sequences.x.dtype)
        return {"last": last, "last_t": last_t}

    def _scan(
        self, sequences: Sequences, state: OscillatorState | None, gaps: float | Tensor
    ) -> tuple[Tensor, OscillatorState]:
        """Run the oscillators over the sequences.

        Return the outputs (batch, T, hidden_size), and the state at the end of each sequence. The outputs on padding
        are arbitrary. ``gaps`` holds the time before each sample, (batch or 1, T), or is one number if all gaps are
        equal.
        """
        x, dtype = sequences.x, self._dtype
        zeros = torch.zeros(x.shape[0], self.num_oscillators, dtype=dtype, device=x.device)
        v0, x0 = (zeros, zeros) if state is None else (state.v.to(dtype), state.x.to(dtype))
        held, u = None, x
        if self._is_held:
            before = torch.zeros_like(x[:, 0]) if state is None or state.held is None else state.held.to(x.dtype)
            x = torch.cat([before.unsqueeze(1), x], 1)
            if sequences.observed is not None:
                x = _fill_forward(x, sequences.observed)
            u, x, held = x[:, :-1], x[:, 1:], x[:, -1]
        rates, between = self._rates(), None
        if isinstance(gaps, Tensor):
            between = gaps
        else:
            entries = transition(self.discretization, self._is_held, rates, rates.new_tensor(gaps))
            rates = torch.stack([entry.expand(self.num_oscillators) for entry in entries])
        ends = None if sequences.valid is None else sequences.valid.sum(1) - 1
        w, skip = self.weight_in.to(dtype), self.weight_skip.to(dtype)
        d = None if self._is_held else skip
        tensors = ScanInput(u, v0, x0, w, self._readout(), d, rates, between, ends)
        y, v, q = scan(self.discretization, self._is_held, tensors)
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
        """Return the outputs at times after the time of a state, without further samples.

        Arguments:
            state: the state of a call of this layer. With a state of :meth:`filter` the outputs are distributions of
                observations.
            dt: times since the time of the state, (K,) or (batch, K), not negative and not decreasing, numbers in the
                unit of t. With ``discretization="imex"`` each time is reached from the previous time in one step.

        Returns:
            The outputs (batch, K, hidden_size), in the dtype of the state, or a :class:`Gaussian` of that shape, and
            the state at the last time. A held input remains held. With ``input="impulse"`` there is no input.
        """
        seq.refuse_both_directions(self, "makes no forecast")
        batch = len(state.t) if isinstance(state, (OscillatorState, OscillatorBelief)) else 0
        if isinstance(state, OscillatorBelief):
            state = self._check_state(state, batch, OscillatorBelief)
        else:
            state = self._check_state(state, batch, OscillatorState)
        dt = seq.checked_dt(dt, state.t.shape).to(state.t.device)
        with no_autocast(state.v):
            if isinstance(state, OscillatorBelief):
                return self._kalman_filter().forecast(state, dt)
            paths: list[tuple[Tensor, Tensor]] = []
            start, gaps = state, dt
            for i in range(dt.shape[1]):
                if self.discretization == "imex" and paths:
                    start = dataclasses.replace(state, v=paths[-1][0], x=paths[-1][1])
                    gaps = dt.diff(prepend=dt[:, :1])
                paths.append(self._advance(start, gaps[:, i : i + 1]))
            y = torch.stack([torch.cat(path, -1) for path in paths], 1) @ self._readout().T
            self._check_finite(*paths[-1], y[:, -1])
            if self._is_held and state.held is not None:
                y = y + (state.held.to(y.dtype) @ self.weight_skip.to(y.dtype).T).unsqueeze(1)
            time = state.t + dt[:, -1].to(state.t.dtype)
            return y, dataclasses.replace(state, v=paths[-1][0], x=paths[-1][1], t=time)

    def log_likelihood(
        self, x: Tensor, t: ArrayLike | None = None, mask: Tensor | None = None, lengths: Lengths | None = None,
        static: None = None,
    ) -> Tensor:  # fmt: skip
        """Return the log density of the observed values of each series, (batch,), in float64; needs ``noise=True``.

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) for the whole batch; None is one unit of time between samples.
                Default: ``None``
            mask: which values are observed, bool, (batch, T) or (batch, T, input_size); the others may be NaN.
                Default: ``None``
            lengths: length of each sequence, (batch,); later samples are padding. Default: ``None``
            static: must be None, because the model has no static features. The argument exists for
                ``**series.inputs()``.
                Default: ``None``
        """
        kalman = self._kalman_filter(static)
        return kalman.log_likelihood(_sequences(self, x, t, None, mask, lengths))

    def filter(
        self,
        x: Tensor,
        t: ArrayLike | None = None,
        state: OscillatorBelief | None = None,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        static: None = None,
    ) -> OscillatorFiltered:
        """Compute the distributions of samples and states by a Kalman filter, in float64; needs ``noise=True``.

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) for the whole batch; None is one unit of time between samples.
                Default: ``None``
            state: the state of an earlier call, to continue its series. None is the stationary distribution.
                Default: ``None``
            mask: which values are observed, bool, (batch, T) or (batch, T, input_size); the others may be NaN.
                Default: ``None``
            lengths: length of each sequence, (batch,); later samples are padding. Default: ``None``
            static: must be None, because the model has no static features. The argument exists for
                ``**series.inputs()``.
                Default: ``None``
        """
        kalman = self._kalman_filter(static)
        sequences = _sequences(self, x, t, state, mask, lengths)
        if state is not None:
            state = self._check_state(state, len(x), OscillatorBelief)
            seq.check_start(state.t, sequences.t)
        return kalman.filter(sequences, state)

    def smooth(
        self,
        x: Tensor,
        t: ArrayLike | None = None,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        at: ArrayLike | None = None,
        noise: bool = False,
        static: None = None,
    ) -> Gaussian:
        """Return the distributions of the signal given all samples of a series, in float64; needs ``noise=True``.

        The distributions are those of single values. Use :meth:`sample_paths` to draw values at several times jointly.

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) for the whole batch; None is one unit of time between samples.
                Default: ``None``
            mask: which values are observed, bool, (batch, T) or (batch, T, input_size); the others may be NaN.
                Default: ``None``
            lengths: length of each sequence, (batch,); later samples are padding. Default: ``None``
            at: times (K,) or (batch, K) of the results, in any order, also before the first or after the last sample.
                None is the times of the samples. Default: ``None``
            noise: whether the distributions are those of observations, which add the observation noise.
                Default: ``False``
            static: must be None, because the model has no static features. The argument exists for
                ``**series.inputs()``.
                Default: ``None``

        Returns:
            Means and standard deviations (batch, K, input_size), or (batch, T, input_size) with 0 on padding.

        Example:
            >>> import torch, hbnode
            >>> layer = hbnode.nn.Oscillators(1, 1, 2, noise=True)
            >>> band = layer.smooth(torch.randn(4, 20, 1), at=[0.5, 3.2, 40.0])
            >>> band.mean.shape, band.std.shape
            (torch.Size([4, 3, 1]), torch.Size([4, 3, 1]))
        """
        kalman, sequences, times = self._with_queries(x, t, mask, lengths, at, static)
        mean, variance = kalman.smooth(sequences, times)
        std = safe_sqrt(variance + kalman.noise if noise else variance)
        return Gaussian(mean, std) if at is not None else Gaussian(sequences.padded(mean), sequences.padded(std))

    def sample_paths(
        self,
        x: Tensor,
        t: ArrayLike | None = None,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        at: ArrayLike | None = None,
        paths: int = 1,
        generator: torch.Generator | None = None,
        static: None = None,
    ) -> Tensor:
        """Draw paths of the signal given all samples, (paths, batch, K, input_size), in float64; needs ``noise=True``.

        The values of a path are a joint draw for all times and features (Durbin and Koopman, Biometrika 89, 2002).

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) for the whole batch; None is one unit of time between samples.
                Default: ``None``
            mask: which values are observed, bool, (batch, T) or (batch, T, input_size); the others may be NaN.
                Default: ``None``
            lengths: length of each sequence, (batch,); later samples are padding. Default: ``None``
            at: times (K,) or (batch, K), as in :meth:`smooth`; None is the times of the samples. Default: ``None``
            paths: number of paths. Default: ``1``
            generator: source of the random numbers. Default: ``None``
            static: must be None, because the model has no static features. The argument exists for
                ``**series.inputs()``.
                Default: ``None``
        """
        kalman, sequences, times = self._with_queries(x, t, mask, lengths, at, static)
        found = kalman.sample_paths(sequences, times, as_count(paths, "paths"), generator).movedim(-1, 0)
        return found if at is not None else sequences.padded(found)

    def _with_queries(
        self, x: Tensor, t: ArrayLike | None, mask: Tensor | None, lengths: Lengths | None, at: ArrayLike | None,
        static: None,
    ) -> tuple[KalmanFilter, Sequences, Tensor | None]:  # fmt: skip
        kalman = self._kalman_filter(static)
        sequences = _sequences(self, x, t, None, mask, lengths)
        if at is None:
            return kalman, sequences, None
        return kalman, sequences, seq.checked_at(at, sequences.t, 1 / self.decay_range[1])

    def _kalman_filter(self, static: None = None) -> KalmanFilter:
        if self.log_spread is None or self.log_observation_noise is None:
            size = self.input_size
            raise ValueError(f"the layer has no noise. Fix: a layer Oscillators({size}, {size}, noise=True).")
        _refuse_static(static)
        if may_look():
            self._check_parameters()
        return KalmanFilter(self._rates(), self.weight_out, self.log_spread, self.log_observation_noise)


_signature = inspect.signature(Oscillators.__init__)  # without it, tools show the signature of __new__
Oscillators.__signature__ = _signature.replace(parameters=list(_signature.parameters.values())[1:])


def _check_only(what: str, given: dict[str, object], **others: object) -> None:
    """Raise ValueError unless every option in ``given`` has the only value that is supported.

    ``what`` names the feature that restricts the options, in the error message. The only value is that in ``others``,
    or the default of the option.
    """
    for name, value in given.items():
        only = {"discretization": "exact", "input": "impulse", **others}.get(name, False)
        if value != only:
            raise ValueError(f"{what} needs {name}={only!r}, got {value!r}. Fix: leave {name} out.")


def _refuse_static(static: object) -> None:
    """Raise ValueError if ``static`` is not None, because a layer with noise=True has no static features."""
    if static is not None:
        raise ValueError(
            "static must be None, because noise=True has no inputs besides the samples. Fix: dataclasses.replace("
            "series, static=None).inputs()."
        )


def _sequences(
    module: Oscillators | OscillatorStack, x: Any, t: ArrayLike | None,
    state: OscillatorState | OscillatorBelief | None, mask: Tensor | None,
    lengths: Lengths | None,
) -> Sequences:  # fmt: skip
    """Check the arguments of a call of ``module``, and return them as :class:`Sequences`, a batch of series.

    Without ``t`` the times are 0, 1, 2, ..., or, given a state, the time of the state plus 1, 2, 3, ....
    """
    if t is None:
        length, device = (x.shape[1], x.device) if isinstance(x, Tensor) and x.dim() == 3 else (0, None)
        t = torch.arange(length, dtype=torch.float64, device=device)
        if isinstance(state, (OscillatorState, OscillatorBelief)):  # other types raise an error later
            t = state.t.detach().double().unsqueeze(1) + 1 + t
    return Sequences(module.input_size, x, t, mask, lengths, 1 / module.decay_range[1])


def _gaps(sequences: Sequences, state: OscillatorState | None, is_shared: bool) -> float | Tensor:
    """Return the time between each sample and the previous one, (batch or 1, T), or one number if these gaps are equal.

    Gaps count as equal if they differ only by rounding. The first gap is the time between the state and the first
    sample; without a state it is arbitrary. ``is_shared`` is whether all series have the same times.
    """
    is_shared = is_shared and (sequences.valid is None or may_look())  # otherwise t may have any times on padding
    t = sequences.raw_t[:1, : sequences.t.shape[1]] if is_shared else sequences.t
    gaps = t - t.roll(1, 1)  # t.diff() has the length T - 1, which would limit T in an exported graph
    if state is None:  # a zero state stays zero over any gap
        first = gaps.roll(-1, 1)[:, :1].detach() if t.shape[1] > 1 else torch.ones_like(t)
    else:
        seq.check_start(state.t, t)
        first = t[:, :1] - state.t.to(t.dtype).unsqueeze(1)
    gaps = torch.where(torch.arange(t.shape[1], device=t.device) == 0, first, gaps)
    if gaps.requires_grad or not may_look():
        return gaps
    each = gaps.detach().double()
    if sequences.valid is not None and len(each) > 1:
        each = torch.where(sequences.valid, each, each[:, :1])
    off = (each - each.mean()).cumsum(1).abs().max()
    most, mean, largest = torch.stack([off, each.mean(), t.detach().abs().max()]).tolist()
    rounding = 2 * torch.finfo(t.dtype).eps * largest
    return mean if most <= rounding <= 0.01 * mean else gaps


def _fill_forward(x: Tensor, observed: Tensor) -> Tensor:
    """Replace missing values of x (batch, 1 + T, features) by the last observed value of the feature.

    ``observed`` (batch, T, features) is the mask of ``x[:, 1:]``; ``x[:, 0]`` counts as observed.
    """
    steps = torch.arange(1, x.shape[1], device=x.device).view(1, -1, 1)
    last = torch.where(observed, steps, 0).cummax(1).values
    return x.gather(1, functional.pad(last, (0, 0, 1, 0)).expand(-1, -1, x.shape[2]))


class OscillatorCell(_OscillatorModule):
    """A cell that processes one sample with the oscillators of :class:`Oscillators`, like :class:`torch.nn.GRUCell`.

    A cell can load the ``state_dict`` of a layer that is not bidirectional and continue the layer's state, with equal
    outputs. It cannot load a layer with noise, which has more parameters. Use the layer's :meth:`~Oscillators.filter`
    for single samples instead. A selective layer, and one with ``missing`` or further features, takes single samples
    itself, as series of length 1.

    Arguments:
        input_size: features of a sample.
        hidden_size: features of the output.
        num_oscillators: number of oscillators. None is ``hidden_size``. Default: ``None``
        discretization: ``"exact"`` or ``"imex"``, as in the layer. Default: ``"exact"``
        input: ``"impulse"`` or ``"hold"``, as in the layer. Default: ``"impulse"``
        frequency: range of initial frequencies, in cycles per unit of time. Default: ``(0.001, 0.25)``
        decay: range of initial decay rates, in 1 / unit of time. Default: ``(0.001, 0.1)``
        device: device of the parameters. Default: ``None``
        dtype: dtype of the parameters. Default: ``None``

    Example:
        >>> import torch, hbnode
        >>> layer, cell = hbnode.nn.Oscillators(3, 8), hbnode.nn.OscillatorCell(3, 8)
        >>> _ = cell.load_state_dict(layer.state_dict())
        >>> y, state = layer(torch.randn(4, 100, 3))
        >>> y, state = cell(torch.randn(4, 3), state, dt=0.5)
        >>> y.shape
        torch.Size([4, 8])
    """

    def forward(
        self, x: Tensor, state: OscillatorState | None = None, dt: float | Tensor = 1.0
    ) -> tuple[Tensor, OscillatorState]:
        """Return the output (batch, hidden_size), and the state after the sample.

        Arguments:
            x: samples (batch, input_size).
            state: the state of the last call, or of a layer. None is a zero state at time 0. Default: ``None``
            dt: time between the state and the sample, a number or (batch,), >= 0; without a state it has no effect.
                Default: ``1.0``

        Raises:
            ValueError: if a shape does not fit, x is not finite, or dt is negative or not finite.
        """
        check_input(x, "x")
        refuse_meta(x, "x")
        refuse_meta(self.weight_in, "the module")
        if x.dim() != 2 or x.shape[1] != self.input_size:
            raise ValueError(
                f"x must be (batch, input_size) with input_size={self.input_size}, got {tuple(x.shape)}. "
                "Fix: x.unsqueeze(0) for a single sample, hbnode.nn.Oscillators for a series."
            )
        if may_look() and not bool(torch.isfinite(x).all()):
            raise ValueError(
                "x must be finite, got NaN or inf, which would remain in the state. Fix: skip the sample, and add its "
                "dt to that of the next sample."
            )
        if x.dtype.itemsize != 2:  # a float32 cell accepts half-precision samples
            seq.check_dtype(x, [self.weight_in.dtype])
        batch, dtype = x.shape[0], self._dtype  # len(x) would make the batch size constant in a graph
        refuse_dates(dt, "dt")
        gap = to_tensor(as_times(dt, "dt") if isinstance(dt, Tensor) else dt, "dt", "dt=0.5", torch.float64, x.device)
        if gap.dim() and gap.shape != (batch,):
            raise ValueError(
                f"dt must be a number or ({batch},), got {tuple(gap.shape)}. Fix: one time per sample, or one number."
            )
        with no_autocast(x):
            if state is None:
                v = q = torch.zeros(batch, self.num_oscillators, dtype=dtype, device=x.device)
                time = torch.zeros(batch, dtype=torch.float64, device=x.device)
            else:
                state = self._check_state(state, batch, OscillatorState)
                if may_look() and not bool(((gap >= 0) & gap.isfinite()).all()):
                    raise ValueError("dt, the time since state.t, must be finite and not negative. Fix: t - state.t.")
                v, q = self._advance(state, gap.expand(batch).unsqueeze(1))
                time = state.t + gap.to(state.t.dtype)
            samples = x.to(dtype)
            if not self._is_held:
                v = v + samples @ self.weight_in.to(dtype).T
            y = torch.cat([v, q], -1) @ self._readout().T + samples @ self.weight_skip.to(dtype).T
            self._check_finite(v, q, y)
        y = y.to(x.dtype) if x.dtype.itemsize < dtype.itemsize else y
        return y, OscillatorState(v, q, time, x if self._is_held else None)

    if TYPE_CHECKING:  # nn.Module's returns Any
        __call__ = forward


@record
class OscillatorStackState(OscillatorState):
    """The state of :class:`OscillatorStack`.

    Attributes:
        v: velocities, (num_layers, batch, num_oscillators).
        x: displacements, (num_layers, batch, num_oscillators).
        t: time of the last sample, (batch,).
        held: the last input of each layer, (num_layers, batch, hidden_size), with ``input="hold"`` or
            ``selective=True``; else None.
        last: last observed value of each feature, (batch, input_size); None if the stack does not use it.
        last_t: time of the value in ``last``, (batch, input_size); the start of the series if nothing was observed.
        static: time-independent features, (batch, static_size), for forecasts; None if there are none.
    """

    static: Tensor | None = None


class OscillatorBlock(nn.Module):
    """A residual block of LinOSS, h + dropout(GLU(W gelu(oscillators(norm(h))))) with a linear map W."""

    def __init__(self, hidden_size: int, layer: Oscillators, dropout: float, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size) if norm else nn.Identity()
        self.oscillators = layer
        width = hidden_size * (2 if layer.bidirectional else 1)
        self.gate = nn.Linear(width, 2 * hidden_size)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(
        self,
        h: Tensor,
        t: ArrayLike | None,
        state: OscillatorState | None,
        mask: Tensor | None,
        lengths: Lengths | None,
    ) -> tuple[Tensor, OscillatorState]:
        y, state = self.oscillators(self.norm(h), t, state, mask, lengths)
        return h + self.dropout(functional.glu(self.gate(functional.gelu(y)), -1)), state


class OscillatorStack(nn.Module):
    """A deep sequence model of gated residual blocks of :class:`Oscillators`, with a linear encoder and a linear head.

    The encoder maps inputs to features h. An input is a sample, with the mask, elapsed times and static features
    appended if the arguments say so. With a linear map W, each block is
    h ← h + dropout(GLU(W gelu(oscillators(norm(h))))). Times, masks and lengths are as in :class:`Oscillators`. A
    sample without observed values is masked in every layer.

    References:
        Rusch and Rus, Oscillatory State-Space Models, arXiv:2410.03943 (source of the block).

    Arguments:
        input_size: features of a sample.
        hidden_size: features of h.
        num_layers: number of blocks. Default: ``2``
        output_size: features of the output. None is ``hidden_size``. Default: ``None``
        head: ``"regression"``: an output at every sample. ``"classification"``: one output for each series, from the
            mean of h over its observed samples. Default: ``"regression"``
        num_oscillators: oscillators of each layer. None is ``hidden_size``. Default: ``None``
        dropout: probability that a feature of a block's output is dropped in training. Default: ``0.0``
        norm: whether blocks have a LayerNorm. It normalises h at every sample, which removes amplitudes. A model of a
            physical system needs amplitudes, hence ``norm=False``. Default: ``True``
        discretization: ``"exact"`` or ``"imex"``, as in the layer. Default: ``"exact"``
        input: ``"impulse"`` or ``"hold"``, as in the layer. Default: ``"impulse"``
        bidirectional: whether every layer processes the series in both directions. Default: ``False``
        selective: whether decay, frequency, forgetting and input depend on the samples, as in the layer.
            Default: ``False``
        frequency: range of initial frequencies, in cycles per unit of time. With ``selective=True`` it may
            be None, for real states. Default: ``(0.001, 0.25)``
        decay: range of initial decay rates, in 1 / unit of time. Default: ``(0.001, 0.1)``
        missing: replacement for a missing value in the input: ``"zero"``, ``"hold"`` or ``"decay"``, as in
            :class:`hbnode.ODERNN`. Default: ``"zero"``
        mask_features: whether the mask is part of the input. Default: ``False``
        elapsed_features: whether the input includes the time since each feature was last observed. This time, and that
            of ``missing="decay"``, is in units of 1 / ``decay[1]``: ten median gaps with ``oscillator_ranges``.
            Default: ``False``
        static_size: number of time-independent features, which are part of every input. Default: ``0``

    Shape:
        - x: (batch, T, input_size); t: (batch, T), (T,) or None.
        - y: (batch, T, output_size), 0 on padding; (batch, output_size) with ``head="classification"``.

    Raises:
        ValueError: if an argument is out of its range.

    Example:
        >>> import torch, hbnode
        >>> model = hbnode.nn.OscillatorStack(3, 16, num_layers=2, output_size=5, head="classification")
        >>> logits, state = model(torch.randn(4, 100, 3), torch.rand(4, 100).cumsum(1))
        >>> logits.shape
        torch.Size([4, 5])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 2,
        *,
        output_size: int | None = None,
        head: Literal["regression", "classification"] = "regression",
        num_oscillators: int | None = None,
        dropout: float = 0.0,
        norm: bool = True,
        discretization: Literal["exact", "imex"] = "exact",
        input: Literal["impulse", "hold"] = "impulse",
        bidirectional: bool = False,
        selective: bool = False,
        frequency: Range | None = FREQUENCY,
        decay: Range = DECAY,
        missing: Missing = "zero",
        mask_features: bool = False,
        elapsed_features: bool = False,
        static_size: int = 0,
    ) -> None:
        super().__init__()
        self.inputs = TimedInputs(input_size, missing, mask_features, elapsed_features, static_size)
        self.input_size, self.static_size = self.inputs.input_size, self.inputs.static_size
        self.num_layers = as_count(num_layers, "num_layers")
        self.bidirectional = check_bool(bidirectional, "bidirectional")
        check_bool(norm, "norm"), check_bool(selective, "selective")
        dropout = as_real(dropout, "dropout", "dropout=0.1")
        self.head = seq.check_choice(head, "head", ("regression", "classification"))
        self.encoder = nn.Linear(self.inputs.size, as_count(hidden_size, "hidden_size"))

        options: Any = {"discretization": discretization, "input": input, "frequency": frequency, "decay": decay}
        options["selective"] = selective
        self.blocks = nn.ModuleList()
        for _ in range(self.num_layers):
            layer = Oscillators(hidden_size, hidden_size, num_oscillators, bidirectional=bidirectional, **options)
            self.blocks.append(OscillatorBlock(hidden_size, layer, dropout, norm))
        self.decay_range = layer.decay_range
        self.inputs.time_unit = 1 / self.decay_range[1]
        outputs = hidden_size if output_size is None else as_count(output_size, "output_size")
        self.decoder = nn.Linear(hidden_size, outputs)

    def forward(
        self,
        x: Tensor,
        t: ArrayLike | None = None,
        state: OscillatorStackState | None = None,
        mask: Tensor | None = None,
        lengths: Lengths | None = None,
        static: Tensor | None = None,
    ) -> tuple[Tensor, OscillatorStackState]:
        """Return the outputs, and the state after the last sample.

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) for the whole batch; None is one unit of time between samples.
                Default: ``None``
            state: the state of an earlier call, to continue its series. ``head="classification"`` averages over the
                samples of this call only. Default: ``None``
            mask: which values are observed, bool, (batch, T) or (batch, T, input_size). The others may be NaN and are
                replaced as ``missing`` specifies. A sample without observed values does not change the state; its
                output is a prediction from earlier samples. Default: ``None``
            lengths: length of each sequence, (batch,); later samples are padding. Default: ``None``
            static: time-independent features, (batch, static_size). Default: ``None``

        Raises:
            TypeError: if the dtype of x is not that of the parameters.
            ValueError: if a shape does not fit, times decrease, or an observed value is not finite.
        """
        if state is not None:
            state = self._check_state(state)
        sequences = _sequences(self, x, t, state, mask, lengths)
        seq.check_parameters(sequences.x, [self.encoder.weight])
        static = seq.checked_static(static, self.static_size, sequences.x, "OscillatorStack")
        inputs, last, last_t = self.inputs(sequences, static, state, self.inputs.time_unit)
        h = self.encoder(functional.pad(inputs, (0, 0, 0, sequences.total - inputs.shape[1])))
        mask, states = sequences.any_observed, []
        mask = None if mask is None else functional.pad(mask, (0, h.shape[1] - mask.shape[1]))
        for i, block in enumerate(self.blocks):
            held = None if state is None or state.held is None else state.held[i]
            before = None if state is None else OscillatorState(state.v[i], state.x[i], state.t, held)
            h, end = block(h, t, before, mask, lengths)
            states.append(end)
        after = OscillatorStackState(
            torch.stack([each.v for each in states]), torch.stack([each.x for each in states]), states[-1].t,
            None if states[-1].held is None else torch.stack([each.held for each in states]), last, last_t, static,
        )  # fmt: skip
        if self.head == "classification":
            weights = h.new_ones(h.shape[:2]) if mask is None else mask.to(h.dtype)
            mean = (h * weights.unsqueeze(-1)).sum(1) / weights.sum(1, keepdim=True).clamp(min=1.0)
            return self.decoder(mean), after
        y = self.decoder(h)
        return sequences.padded(y[:, : sequences.x.shape[1]]), after

    if TYPE_CHECKING:  # nn.Module's returns Any
        __call__ = forward

    def forecast(self, state: OscillatorStackState, dt: ArrayLike) -> tuple[Tensor, OscillatorStackState]:
        """Return the outputs at times after the time of a state, without further samples; for ``head="regression"``.

        The outputs are those of a call with samples at these times that have no observed values. The oscillators of
        every layer continue without input. The encoder's inputs are replacements of missing values, elapsed times and
        static features.

        Arguments:
            state: the state of a call of this stack.
            dt: times since the time of the state, (K,) or (batch, K), not negative and not decreasing, numbers in the
                unit of t.

        Returns:
            The outputs (batch, K, output_size), and the state at the last time.

        Raises:
            ValueError: if ``head`` is not ``"regression"``, or ``dt`` is negative or decreases.
        """
        seq.refuse_both_directions(self, "makes no forecast")
        if self.head != "regression":
            raise ValueError(f"forecast is for head='regression', got head={self.head!r}. Fix: head='regression'.")
        state = self._check_state(state)
        dt = seq.checked_dt(dt, state.t.shape).to(state.t.device)
        dtype = accumulation_dtype(torch.float32, state.t.device)  # in float32, t + dt could round to t
        t = state.t.to(dtype).unsqueeze(1) + dt.to(dtype)
        weight = self.encoder.weight
        x = torch.zeros(*t.shape, self.input_size, dtype=weight.dtype, device=weight.device)
        nothing = torch.zeros(t.shape, dtype=torch.bool, device=weight.device)
        return self(x, t, state, nothing, static=state.static)

    def _check_state(self, state: object) -> OscillatorStackState:
        if not (isinstance(state, OscillatorStackState) and len(state.v) == len(self.blocks)):
            got = f"{len(state.v)} layers" if isinstance(state, OscillatorStackState) else type(state).__name__
            raise ValueError(
                f"state must be an OscillatorStackState of {len(self.blocks)} layers, got {got}. "
                "Fix: the state that this stack returned, y, state = stack(x)."
            )
        return seq.real_state(state)


def oscillator_ranges(
    t: ArrayLike, mask: Tensor | None = None, lengths: Lengths | None = None, selective: bool = False
) -> Ranges:
    """Compute ranges of initial frequencies and decay rates from times, for ``Oscillators(..., **ranges)``.

    The lowest frequency and the lowest decay rate are 1 / (30 span), where span is the duration of the longest series.
    The slowest oscillators thus average over the series and store its beginning. The highest frequency is 1 / (4 gap),
    where gap is the median gap; this is half of the Nyquist frequency. The highest decay rate is 1 / (10 gap).

    Arguments:
        t: times (batch, T) or (T,), not decreasing. Gaps of length 0 do not count.
        mask: which values are observed, (batch, T) or (batch, T, features), as for :class:`Oscillators`. Gaps are
            between samples with an observed value. Default: ``None``
        lengths: lengths of the series, (batch,); later samples are padding. Default: ``None``
        selective: whether the ranges are for layers with ``selective=True``. Their lowest frequency is 2 / span,
            because half of their states have no frequency and store the beginning of a series. Default: ``False``

    Returns:
        A dict with ``frequency`` and ``decay``, each (low, high), in 1 / unit of ``t``.

    Raises:
        ValueError: if no series has two observed samples at different times, or times decrease.

    Example:
        >>> import hbnode
        >>> hbnode.nn.oscillator_ranges([0.0, 0.5, 1.0, 1.5, 2.0])
        {'frequency': (0.0166..., 0.5), 'decay': (0.0166..., 0.2)}
    """
    check_bool(selective, "selective")
    times, seen, gaps = seq.observed_gaps(t, mask, lengths)
    gaps = gaps[gaps > 0]
    if not len(gaps):
        raise ValueError("t has no two observed samples of a series at different times. Fix: frequency= and decay=.")
    ends, starts = (torch.where(seen, times, end).T for end in (-math.inf, math.inf))
    gap, span = float(gaps.median()), float((ends.amax(0) - starts.amin(0)).max())
    low, high = 1 / (SPANS_PER_LONGEST_PERIOD * span), 0.25 / gap
    lowest = 2 / span if selective else low
    return {"frequency": (min(lowest, high), high), "decay": (min(low, 0.4 * high), 0.4 * high)}


def _checked_range(value: Range | None, name: str) -> Range:
    refuse_gradient(value, name)
    try:
        low, high = (float(bound) for bound in value)  # type: ignore[union-attr]  # None raises TypeError
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 < low <= high < math.inf:
        raise ValueError(
            f"{name} must be (low, high) with 0 < low <= high, got {value!r}. Fix: {name}=(0.01, 0.1), in 1 / time."
        )
    return low, high
