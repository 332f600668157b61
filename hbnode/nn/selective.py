"""Oscillators whose decay, frequency, forgetting and input depend on the samples."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hbnode._tree import Kind
from hbnode.nn import sequences as seq
from hbnode.nn._selective_scan import scan
from hbnode.nn.oscillators import Oscillators, OscillatorState, _fill_forward
from hbnode.nn.sequences import Sequences

SELECTOR_STD = 3.0  # initial standard deviation of W x, where W is one of the selecting weights and x has variance 1
SAMPLES_PASSED = 50  # number of samples of a series that initially pass through an input gate
DECAY_BIAS = -4.0  # constant added to W_a x in the softplus of the decay rate


class SelectiveOscillators(Oscillators):
    """A layer of oscillators whose decay rates and frequencies depend on the input.

    ``Oscillators(..., selective=True)`` returns such a layer. See :class:`Oscillators`.
    """

    log_decay: nn.Parameter
    log_omega: nn.Parameter | None
    bias_forget: nn.Parameter
    bias_gate: nn.Parameter
    weight_select: nn.Parameter

    selective = True
    _shown = ("num_oscillators", "selective", "frequency_range", "bidirectional")

    @property
    def _is_real(self) -> bool:
        return self.frequency_range[1] == 0

    @property
    def _reals_per_state(self) -> int:
        """The number of real numbers per state: 1, or 2 if states are complex."""
        return 1 if self._is_real else 2

    @property
    def _num_swinging(self) -> int:
        """The number of oscillating states. They precede the states without a frequency."""
        return 0 if self._is_real else (self.num_oscillators + 1) // 2

    @override
    def _shapes(self, inputs: int) -> dict[str, tuple[int, ...] | None]:
        size, swinging = self.num_oscillators, self._num_swinging
        return {
            "log_decay": (size,),
            "log_omega": (swinging,) if swinging else None,
            "bias_forget": (size,),
            "bias_gate": (size,),
            "weight_select": (3 * size + swinging, inputs),
            "weight_in": (self._reals_per_state * size, inputs),
            "weight_out": (self.hidden_size, self._reals_per_state * size),
            "weight_skip": (self.hidden_size, inputs),
        }

    @override
    def reset_parameters(self) -> None:
        """Draw new decay rates and frequencies log-uniformly, and normally distributed weights.

        Initially a state decays at a sample as much as over a median gap, which is assumed to be 0.1 / ``decay[1]``.
        """
        with torch.no_grad():
            slowest, fastest = self.decay_range
            rate, size = _log_uniform(self.log_decay, slowest, fastest), self.num_oscillators
            # oscillating and other states get alternate rates, so that both kinds have slow and fast rates
            rate = rate[torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])]
            self.log_decay.copy_(rate.log())
            if self.log_omega is not None:
                low, high = (2 * math.pi * bound for bound in self.frequency_range)
                self.log_omega.copy_(_log_uniform(self.log_omega, low, high)[torch.randperm(self._num_swinging)].log())
            lost = rate * (0.1 / fastest)
            self.bias_forget.copy_(lost.expm1().log())  # inverse softplus
            samples = fastest / (3 * slowest)  # samples per series, if the ranges are from oscillator_ranges
            # With these gates, an input of white noise gives all states the same variance. The gates are scaled instead
            # of the weights, because a training step multiplies a gate by a factor but adds a number to a weight.
            self.bias_gate.copy_((min(0.5, SAMPLES_PASSED / samples) * (-(-4 * lost).expm1()).sqrt()).logit())
            inputs = self.weight_in.shape[1]
            self.weight_select.normal_(std=SELECTOR_STD / inputs**0.5)
            self.weight_in.normal_(std=inputs**-0.5)
            self.weight_out.normal_(std=self.weight_out.shape[1] ** -0.5)
            self.weight_skip.normal_(std=inputs**-0.5)

    @property
    @override
    def damping(self) -> Tensor:
        """The damping coefficient 2a of each state if the input is zero, (num_oscillators,), in 1 / time."""
        return 2 * self.log_decay.exp()

    @property
    @override
    def frequency(self) -> Tensor:
        """The frequency ω/2π of each state if the input is zero, (num_oscillators,), in cycles / time."""
        omega = self.log_decay.new_zeros(0) if self.log_omega is None else self.log_omega.exp()
        return functional.pad(omega, (0, self.num_oscillators - len(omega))) / (2 * math.pi)

    @property
    @override
    def stiffness(self) -> Tensor:
        """The stiffness a² + ω² of each state if the input is zero, (num_oscillators,), in 1 / time²."""
        return self.log_decay.exp().square() + (2 * math.pi * self.frequency).square()

    def _flow(self, decay: Tensor, turn: Tensor, dt: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the log modulus and the phase of the transition e^{(-a + iω)Δ} over the times Δ, given as ``dt``.

        ``decay`` is W_a x and ``turn`` is W_ω x, from which the rates a and ω are computed. If no state oscillates, the
        phase is None.
        """
        least = math.log1p(math.exp(DECAY_BIAS))  # softplus(DECAY_BIAS)
        a = self.log_decay.to(decay.dtype).exp() * functional.softplus(decay + DECAY_BIAS) / least
        if self.log_omega is None:
            return -a * dt, None
        omega = 2 * self.log_omega.to(turn.dtype).exp() * turn.sigmoid()
        return -a * dt, functional.pad(omega * dt, (0, self.num_oscillators - self._num_swinging))

    def _rows(self) -> list[int]:
        """Return a list with the number of rows of each of the weights W_a, W_ω, W_f, W_g and B.

        The docstring of :class:`Oscillators` defines these weights. B has one entry in the list if states are real, and
        two, for its real and imaginary parts, if they are complex.
        """
        return [self.num_oscillators, self._num_swinging] + [self.num_oscillators] * (2 + self._reals_per_state)

    @override
    def _readout(self) -> Tensor:
        return self.weight_out.to(self._dtype)

    @override
    def _advance(self, state: OscillatorState, dt: Tensor) -> tuple[Tensor, Tensor]:
        assert state.held is not None
        dtype, (size, swinging, *_) = self._dtype, self._rows()
        rows = self.weight_select[: size + swinging].to(dtype)
        decay, turn = (state.held.to(dtype) @ rows.T).split([size, swinging], -1)
        rho, phi = self._flow(decay, turn, dt.to(dtype))
        p, q = state.v.to(dtype) * rho.exp(), state.x.to(dtype)
        if phi is None:
            return p, q
        q, c, s = q * rho.exp(), phi.cos(), phi.sin()
        return c * p - s * q, s * p + c * q

    @override
    def _scan(
        self, sequences: Sequences, state: OscillatorState | None, gaps: float | Tensor
    ) -> tuple[Tensor, OscillatorState]:
        dtype, is_real = self._dtype, self._is_real
        x, seen = sequences.x, sequences.any_observed
        gaps = x.new_full(x.shape[:2], gaps, dtype=dtype) if isinstance(gaps, float) else gaps.to(dtype)
        gaps = gaps if sequences.valid is None else torch.where(sequences.valid, gaps, 0.0)
        # The last observed input before each sample determines a and ω for the gap before the sample. The last entry of
        # held determines a and ω for the gap after the last sample.
        first = torch.zeros_like(x[:, 0]) if state is None or state.held is None else state.held.to(x.dtype)
        held = torch.cat([first.unsqueeze(1), x], 1)
        held = held if seen is None else _fill_forward(held, seen.unsqueeze(-1))
        rows = held.transpose(0, 1).to(dtype) @ torch.cat([self.weight_select, self.weight_in]).to(dtype).T
        decay, turn, forget, gate, *b = rows.split(self._rows(), -1)
        rho, phi = self._flow(decay[:-1], turn[:-1], gaps.T.unsqueeze(-1))
        forgotten = functional.softplus(forget[1:] + self.bias_forget.to(dtype))
        passing = (gate[1:] + self.bias_gate.to(dtype)).sigmoid()
        if seen is not None:
            observed = seen.T.unsqueeze(-1).to(dtype)
            forgotten, passing = forgotten * observed, passing * observed
        b = [part[1:] * passing for part in b]
        start = None if state is None else (state.v.to(dtype), state.x.to(dtype))
        z0 = torch.zeros_like(b[0][0]) if start is None else start[0]
        if not is_real:
            z0 = torch.complex(z0, torch.zeros_like(z0) if start is None else start[1])
        z = scan(rho - forgotten, phi, b[0] if is_real else torch.complex(b[0], b[1]), z0)
        path = z if is_real else torch.view_as_real(z).flatten(-2)
        readout = self._readout()
        if not is_real:  # arrange real and imaginary parts as p₁, q₁, p₂, q₂, ...
            readout = readout.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
        y = (path @ readout.T).transpose(0, 1) + x.to(dtype) @ self.weight_skip.to(dtype).T
        v, q = (z[-1], z[-1, :, :0]) if is_real else (z[-1].real.contiguous(), z[-1].imag.contiguous())
        self._check_finite(v, q, y[:, -1])
        y = y.to(x.dtype) if x.dtype.itemsize < dtype.itemsize else y
        return y, OscillatorState(v, q, sequences.t[:, -1], held[:, -1])

    @override
    def _check_state(self, state: object, batch: int, kind: type[Kind]) -> Kind:
        size = self.num_oscillators
        shapes: dict[str, tuple[int, ...] | None] = {
            "v": (batch, size),
            "x": (batch, 0 if self._is_real else size),
            "t": (batch,),
            "held": (batch, self.weight_in.shape[1]),
        }
        return seq.check_state(state, cast("type[Kind]", OscillatorState), shapes, "the state of a call")


def _log_uniform(like: Tensor, low: float, high: float) -> Tensor:
    """Draw n increasing numbers between ``low`` and ``high``, log-uniformly, one from each of n intervals.

    The intervals have equal lengths on a logarithmic scale. ``like`` is a tensor of the shape (n,).
    """
    size = len(like)
    places = (torch.arange(size) + torch.rand(size)) / size
    return torch.lerp(torch.tensor(math.log(low)), torch.tensor(math.log(high)), places).exp().to(like.device)


Oscillators._selective_class = SelectiveOscillators
