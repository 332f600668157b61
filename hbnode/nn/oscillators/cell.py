"""One sample at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hbnode._checks import check_input
from hbnode._torch import may_look, no_autocast
from hbnode.nn.oscillators.rates import DECAY, FREQUENCY, OscillatorBank, Range
from hbnode.nn.oscillators.state import OscillatorState


class OscillatorCell(OscillatorBank):
    """The oscillators of :class:`Oscillators` for one sample at a time, as :class:`torch.nn.GRUCell` is for its layer.

    The parameters have the names of the layer's, so that a cell loads the ``state_dict`` of a layer, and continues its
    state with the same numbers. A layer with noise has more parameters, which a cell does not load; its ``filter``
    takes single samples, too.

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

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_oscillators: int | None = None,
        *,
        discretization: Literal["exact", "imex"] = "exact",
        input: Literal["impulse", "hold"] = "impulse",
        frequency: Range = FREQUENCY,
        decay: Range = DECAY,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = (discretization, input, frequency, decay, device, dtype)
        super().__init__(input_size, hidden_size, num_oscillators, *options)

    if TYPE_CHECKING:  # nn.Module's returns Any

        def __call__(
            self, x: Tensor, state: OscillatorState | None = None, dt: float | Tensor = 1.0
        ) -> tuple[Tensor, OscillatorState]:
            """As :meth:`forward`."""
            ...

    def forward(
        self, x: Tensor, state: OscillatorState | None = None, dt: float | Tensor = 1.0
    ) -> tuple[Tensor, OscillatorState]:
        """The output (batch, hidden_size), and the state after the sample.

        Arguments:
            x: samples (batch, input_size).
            state: of the last call, or of a layer; None for rest at time 0. Default: ``None``
            dt: time since that state, a number or (batch,), not negative; without a state it has no effect.
                Default: ``1.0``
        """
        check_input(x, "x")
        if x.dim() != 2 or x.shape[1] != self.input_size:
            raise ValueError(
                f"x must be (batch, input_size) with input_size={self.input_size}, got {tuple(x.shape)}. "
                "Fix: x.unsqueeze(0) for a single sample, hbnode.nn.Oscillators for a series."
            )
        if may_look() and not bool(torch.isfinite(x).all()):
            raise ValueError(
                "x must be finite, got NaN or inf, which would stay in the state. Fix: leave the sample out, and let "
                "dt of the next one be the time since the last."
            )
        with no_autocast(x):
            return self._moved(x, state, dt)

    def _moved(self, x: Tensor, state: OscillatorState | None, dt: float | Tensor) -> tuple[Tensor, OscillatorState]:
        """The output and the state, of samples that have been checked."""
        batch, dtype = len(x), self._dtype
        gap = torch.as_tensor(dt, dtype=torch.float64, device=x.device)
        if gap.dim() and gap.shape != (batch,):
            raise ValueError(f"dt must be a number or ({batch},), got {tuple(gap.shape)}. Fix: one time each.")
        if state is None:
            v = q = torch.zeros(batch, self.num_oscillators, dtype=dtype, device=x.device)
            time = torch.zeros(batch, dtype=torch.float64, device=x.device)
        else:
            state = self._check_state(state, batch)
            if may_look() and not bool(((gap >= 0) & gap.isfinite()).all()):
                raise ValueError(
                    "dt must be finite and not negative: it is the time since the state. Fix: t - state.t."
                )
            v, q = self._advanced(state, gap.expand(batch).unsqueeze(1))
            time = state.t + gap.to(state.t.dtype)
        samples = x.to(dtype)
        if not self._is_held:
            v = v + samples @ self.weight_in.to(dtype).T
        y = torch.cat([v, q], -1) @ self._readout().T + samples @ self.weight_skip.to(dtype).T
        self._check_finite(v, q, y)
        y = y.to(x.dtype) if x.dtype.itemsize < dtype.itemsize else y
        return y, OscillatorState(v, q, time, x if self._is_held else None)
