"""The parameters of a layer of oscillators, and ranges of frequencies and decays for their initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import override

from hbnode._checks import ArrayLike, as_count, as_tensor
from hbnode._torch import may_look
from hbnode.nn.oscillators.coefficients import Entries, entries_of, wide
from hbnode.nn.oscillators.state import OscillatorState, check_state

Range = tuple[float, float]


class Ranges(TypedDict):
    """Ranges of initial values, as keyword arguments of a layer."""

    frequency: Range
    decay: Range


FREQUENCY = (0.001, 0.25)
DECAY = (0.001, 0.1)


class OscillatorBank(nn.Module):
    """The parameters of P oscillators with their input and output maps: the base of the layer and the cell.

    Arguments:
        input_size: features of a sample.
        hidden_size: features of the output.
        num_oscillators: P; None for ``hidden_size``.
        discretization: "exact" or "imex".
        input: "impulse" or "hold".
        frequency: range of initial frequencies.
        decay: range of initial decay rates.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_oscillators: int | None,
        discretization: str,
        input: str,
        frequency: Range,
        decay: Range,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.num_oscillators = as_count(hidden_size if num_oscillators is None else num_oscillators, "num_oscillators")
        _check_choice(discretization, "discretization", ("exact", "imex"))
        _check_choice(input, "input", ("impulse", "hold"))
        self.discretization, self.input = discretization, input
        self.frequency_range = _checked_range(frequency, "frequency")
        self.decay_range = _checked_range(decay, "decay")
        size = self.num_oscillators
        shapes = {
            "log_damping": (size,),
            "log_stiffness": (size,),
            "weight_in": (size, self.input_size),
            "weight_out": (self.hidden_size, 2 * size),
            "weight_skip": (self.hidden_size, self.input_size),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    log_damping: nn.Parameter
    log_stiffness: nn.Parameter
    weight_in: nn.Parameter
    weight_out: nn.Parameter
    weight_skip: nn.Parameter

    def reset_parameters(self) -> None:
        """Draw frequencies and decays log-uniformly, and maps by which white samples make states of variance 1."""
        with torch.no_grad():
            low, high = (math.log(bound) for bound in self.decay_range)
            rate = torch.empty_like(self.log_damping, dtype=torch.float32).uniform_(low, high).exp()
            low, high = (math.log(2 * math.pi * bound) for bound in self.frequency_range)
            omega = torch.empty_like(rate).uniform_(low, high).exp()
            rate = torch.minimum(rate, 1.5 * omega)  # every oscillator swings
            self.log_damping.copy_((2 * rate).log())
            self.log_stiffness.copy_((omega.square() + rate.square()).log())
            gap = 0.25 / self.frequency_range[1]
            scale = (1 - (-2 * gap * rate).exp()).mul(2 / self.input_size).sqrt()
            scale = scale / gap if self.input == "hold" else scale
            self.weight_in.normal_().mul_(scale.unsqueeze(1))
            self.weight_out.normal_(std=(2 * self.num_oscillators) ** -0.5)
            self.weight_skip.normal_(std=self.input_size**-0.5)

    @property
    def damping(self) -> Tensor:
        """The current γ of each oscillator, (num_oscillators,), in 1 / time."""
        return self.log_damping.exp()

    @property
    def stiffness(self) -> Tensor:
        """The current κ of each oscillator, (num_oscillators,), in 1 / time²."""
        return self.log_stiffness.exp()

    @property
    def frequency(self) -> Tensor:
        """The current undamped frequency √κ / 2π of each oscillator, (num_oscillators,), in cycles per time."""
        return (self.log_stiffness / 2).exp() / (2 * math.pi)

    @property
    def _is_held(self) -> bool:
        return self.input == "hold"

    @property
    def _dtype(self) -> torch.dtype:
        """That of states: float64 of parameters in float64, else float32."""
        return torch.promote_types(self.weight_in.dtype, torch.float32)

    def _rates(self) -> Tensor:
        """γ and κ, (2, P), in float64 where the device has it."""
        logs = torch.stack([self.log_damping, self.log_stiffness])
        return logs.to(wide(self._dtype, logs.device)).exp()

    def _readout(self) -> Tensor:
        """C for the state (v, x): the part of ``weight_out`` for x is for √κ x, a velocity as v is."""
        root = (self.log_stiffness.to(self._dtype) / 2).exp()
        return self.weight_out.to(self._dtype) * torch.cat([torch.ones_like(root), root])

    def _entries(self, dt: Tensor) -> Entries:
        """M and f over times (..., 1), (..., P), in the dtype of the scan."""
        rates = self._rates()
        found = entries_of(self.discretization, self._is_held, rates[0], rates[1], dt.to(rates))
        lower: Any = (None if entry is None else entry.to(self._dtype) for entry in found)
        return Entries(*lower)

    def _advanced(self, state: OscillatorState, dt: Tensor) -> tuple[Tensor, Tensor]:
        """The v and x of a state a time (batch, 1) later, (batch, P)."""
        v, x = state.v, state.x
        vv, vx, xv, xx, fv, fx = self._entries(dt)
        v, x = vv * v + vx * x, xv * v + xx * x
        if fv is None or fx is None or state.held is None:
            return v, x
        u = state.held.to(self._dtype) @ self.weight_in.to(self._dtype).T
        return v + fv * u, x + fx * u

    def _check_finite(self, v: Tensor, x: Tensor, y: Tensor) -> None:
        """Name what made a state, or the outputs there, NaN or infinite."""
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
        """Name one that is not finite."""
        for name, parameter in self.named_parameters(recurse=False):
            limit = math.log(torch.finfo(torch.float32).max) if name.startswith("log_") else math.inf
            values = parameter.detach()
            if not bool((values.isfinite() & (values < limit)).all()):
                raise FloatingPointError(
                    f"{name} is NaN, infinite or beyond float32, and the oscillators' state or output with it. Fix: "
                    "load the parameters of an earlier step, clip gradients, take a lower learning rate."
                )

    def _check_state(self, state: object, batch: int) -> OscillatorState:
        return check_state(state, batch, self.num_oscillators, self.input_size, is_held=self._is_held)

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, num_oscillators={self.num_oscillators}, "
            f"discretization={self.discretization!r}, input={self.input!r}"
        )


def oscillator_ranges(
    t: ArrayLike, mask: Tensor | None = None, lengths: Tensor | Sequence[int] | None = None
) -> Ranges:
    """Ranges of initial frequencies and decays for series at these times: ``Oscillators(..., **oscillator_ranges(t))``.

    The lowest frequency and decay rate are 1 / span, of the longest series. The highest frequency is
    1 / (4 gap) for the median gap, half that of Nyquist, and the highest decay rate 1 / (10 gap).

    Arguments:
        t: times (batch, T) or (T,), increasing.
        mask: which samples are observed, (batch, T) or (batch, T, features), as for :class:`Oscillators`; gaps are
            counted from one observed sample to the next. Default: ``None``
        lengths: lengths of the series; what follows is padding. Default: ``None``

    Returns:
        A dict with ``frequency`` and ``decay``, each (low, high), in the units of 1 / ``t``.

    Raises:
        ValueError: if there are not two observed samples at different times in any of the series.

    Example:
        >>> import hbnode
        >>> hbnode.nn.oscillator_ranges([0.0, 0.5, 1.0, 10.0])
        {'frequency': (0.1, 0.5), 'decay': (0.1, 0.2)}
    """
    times = as_tensor(t, "t").double()
    times = times.unsqueeze(0) if times.dim() == 1 else times
    seen = torch.ones_like(times, dtype=torch.bool)
    if mask is not None:
        mask = as_tensor(mask, "mask").to(times.device)
        times, seen = torch.broadcast_tensors(times, mask.any(-1) if mask.dim() == 3 else mask)
    if lengths is not None:
        ends = torch.as_tensor(lengths, device=times.device).unsqueeze(1)
        times, valid = torch.broadcast_tensors(times, torch.arange(times.shape[1], device=times.device) < ends)
        seen = seen & valid
    rows = [row[here] for row, here in zip(times, seen, strict=True)]
    gaps = torch.cat([row.diff() for row in rows])
    gaps = gaps[~(gaps <= 0)]
    if not len(gaps):
        raise ValueError("t has no two observed samples of a series at different times. Fix: frequency= and decay=.")
    if not bool(torch.isfinite(gaps).all()):
        raise ValueError("t is not finite where samples are observed. Fix: lengths=, or a mask that leaves them out.")
    gap, span = float(gaps.median()), max(float(row[-1] - row[0]) for row in rows if len(row))
    low, high = 1 / span, 0.25 / gap
    return {"frequency": (min(low, high), high), "decay": (min(low, 0.4 * high), 0.4 * high)}


def _check_choice(value: object, name: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}. Fix: {name}={choices[0]!r}."
        )


def _checked_range(value: Range, name: str) -> Range:
    try:
        low, high = (float(bound) for bound in value)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not 0 < low <= high < math.inf:
        raise ValueError(
            f"{name} must be (low, high) with 0 < low <= high, got {value!r}. Fix: {name}=(0.01, 0.1), in 1 / time."
        )
    return low, high
