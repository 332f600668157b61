"""ODE-RNN hybrids: a recurrent network whose state follows an ODE between the samples of an irregular series."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from typing_extensions import override

from hbnode._arguments import checked_settings, checked_state, resolved
from hbnode._checks import ArrayLike, as_count, as_tensor
from hbnode._state import parts
from hbnode._tracing import untraced
from hbnode.fields import Field
from hbnode.nfe import NFE
from hbnode.ode_rnn.defaults import CellName, FieldName, make_cell, make_field
from hbnode.ode_rnn.gaps import Gaps
from hbnode.ode_rnn.sequences import Sequences
from hbnode.ode_rnn.state import Filtered, ODERNNState, check_kind
from hbnode.solvers.names import Gradient, Method, StepControl
from hbnode.solvers.registry import METHODS
from hbnode.solvers.settings import Settings


class ODERNN(nn.Module):
    r"""A recurrent network for irregular series, whose state follows an ODE between the samples.

    From one time to the next the state s, h or the pair (h, m), solves the field's equation; there the cell sees the
    sample:

    .. math:: s(t_i^-) = s(t_{i-1}) + \int_{t_{i-1}}^{t_i} \mathrm{field}(t, s)\,dt, \qquad
        s(t_i) = \mathrm{cell}(x_i, s(t_i^-)), \quad\text{or}\quad s(t_i^-) + \mathrm{cell}(x_i, s(t_i^-)).

    The cell is the same for all fields but for the size of s, so models differ in their field alone. The gaps, each
    sample's own, are part of the solve. With ``step_control="sample"`` every sample takes steps of its own: padding and
    batch-mates change no result, but for the rounding of the networks themselves.

    References:
        Rubanova, Chen and Duvenaud, Latent ODEs for Irregularly-Sampled Time Series, arXiv:1907.03907; with momentum:
        Xia et al., arXiv:2110.04840, and sections 3.4.3 and 3.4.4 of Wang et al., How Does Momentum Benefit Deep
        Neural Networks Architecture Design? (2022).

    Arguments:
        input_size: features of a sample.
        hidden_size: size n of h, the zeros of an ANODE included.
        field: ``"node"``, ``"anode"`` (the last half of h starts from zero), ``"sonode"``, ``"hbnode"``, ``"ghbnode"``,
            each around a tanh network with one hidden layer of n units; or a field; or a function n -> field.
        cell: ``"gru"`` or ``"rnn"``, torch.nn's; or a module ``cell(x, s)``, (batch, input_size) and (batch,
            state_size) -> (batch, state_size). s is h, or h and m side by side. The gradient at its output, which a
            forward hook can ask for, is the adjoint state after the sample, with or without ``residual``.
        residual: whether the cell's output is added to the state in place of replacing it.
        initial_state: the state at the first time, before the first sample: ``"learned"``, ``"zeros"``, or a module
            (batch, T, input_size) -> (batch, state_size) that sees all of a first call's samples, those that are
            missing and padding as zeros. It may return h alone, without the zeros of an ANODE: the field makes the
            rest, as it does of a learned h if it has an ``initial_momentum`` or ``initial_velocity``.
        method: solver, as in :func:`hbnode.odeint`; so are the following arguments. torchdiffeq's methods need
            ``step_control="batch"``.
        rtol: relative tolerance.
        atol: absolute tolerance.
        gradient: gradient mode. None is ``"direct"``: the solves between samples are short, so that little would be
            saved by taking steps again.
        options: options of the method; ``{"steps": n}`` is n equal steps in each gap. Limits such as ``max_nfe``
            hold for each gap. Lengths of time among the options of torchdiffeq's methods are fractions of a gap.
        adjoint_options: options of the adjoint's solve.
        step_control: ``"sample"``, or ``"batch"`` for a common step in units of each sample's gap. Series that have
            ended take no part in it, so that f must not close over tensors with a row for each of the batch.
        max_steps: steps after which the solve of a gap is given up.
        compile: compile the steps of native methods.

    Attributes:
        nfe: evaluations of the last call, all gaps together.
        nfe_per_gap: those of each gap, a list; their backward parts are filled in by the backward pass.

    Shape:
        - x: (batch, T, input_size), or a PackedSequence; t: (batch, T) or (T,), large times in float64. An f(t, h) is
          told the time in the dtype of the state: count from a near origin.
        - output: (batch, T, hidden_size), h after each sample; 0 on padding.

    Raises:
        ValueError, TypeError: if an argument is out of its range, or times do not increase.

    Example:
        >>> import torch, hbnode
        >>> rnn = hbnode.ODERNN(3, 8)
        >>> x, t = torch.randn(4, 10, 3), torch.rand(4, 10).cumsum(1)
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
        field: FieldName | nn.Module | Callable[[int], nn.Module] = "hbnode",
        cell: CellName | nn.Module = "gru",
        residual: bool = False,
        initial_state: Literal["learned", "zeros"] | nn.Module = "learned",
        method: Method | None = None,
        rtol: float = 1e-5,
        atol: float = 1e-5,
        gradient: Gradient | None = None,
        options: dict[str, Any] | None = None,
        adjoint_options: dict[str, Any] | None = None,
        step_control: StepControl = "sample",
        max_steps: int = 10_000,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.input_size = as_count(input_size, "input_size")
        self.hidden_size = as_count(hidden_size, "hidden_size")
        self.field: Field = make_field(field, self.hidden_size)
        self.augment = getattr(self.field, "augment", 0)
        if self.augment > self.hidden_size:
            raise ValueError(
                f"the field appends {self.augment} zeros, more than hidden_size={hidden_size}. Fix: a larger one."
            )
        like = next((p for p in self.field.parameters() if p.is_floating_point()), torch.zeros(()))
        with torch.no_grad():
            start = self.field.initial_state(like.new_zeros(1, self.hidden_size - self.augment))
        self.second_order = isinstance(start, tuple)
        self.state_size = self.hidden_size * (2 if self.second_order else 1)
        self.cell = make_cell(cell, self.input_size, self.state_size)
        self.residual = bool(residual)
        self._make_start(initial_state)
        self.settings = checked_settings(
            Settings(
                method=method,
                rtol=rtol,
                atol=atol,
                gradient=gradient or ("adjoint" if adjoint_options is not None else "direct"),
                options=options,
                adjoint_options=adjoint_options,
                step_control=step_control,
                max_steps=max_steps,
                compile=compile,
            )
        )
        self._check_settings()
        self.nfe_per_gap: list[NFE] = []

    def _make_start(self, initial_state: str | nn.Module) -> None:
        """The parameter or the encoder that the state starts from; neither for zeros."""
        self.start: nn.Parameter | None = None
        self.encoder: nn.Module | None = None
        if isinstance(initial_state, nn.Module):
            self.encoder = initial_state
        elif initial_state == "learned":
            makes = [getattr(self.field, name, None) for name in ("initial_momentum", "initial_velocity")]
            size = self.hidden_size if any(net is not None for net in makes) else self.state_size - self.augment
            self.start = nn.Parameter(torch.zeros(size))  # of h alone, if the field makes m out of it
        elif initial_state != "zeros":
            raise ValueError(
                f"initial_state must be 'learned', 'zeros' or a module, got {initial_state!r}. Fix: 'learned'."
            )

    def _check_settings(self) -> None:
        """Refuse what no times of each sample's own can be solved with."""
        settings = resolved(self.settings, self.field)
        if settings.method in METHODS and settings.gradient == "adjoint":
            raise ValueError(
                "gradient='adjoint' of native methods does not know times of each sample's own. Fix: leave gradient "
                "out, or method='dopri5' with step_control='batch'."
            )
        if (settings.options or {}).get("dense"):
            raise ValueError("options has 'dense', but every gap ends on its sample. Fix: leave it out.")

    @property
    def nfe(self) -> NFE:
        """Evaluations of the last call, all gaps together."""
        return sum(self.nfe_per_gap, NFE())

    if TYPE_CHECKING:  # nn.Module's returns Any

        @overload
        def __call__(
            self,
            x: Tensor,
            t: ArrayLike,
            state: ODERNNState | None = None,
            mask: Tensor | None = None,
            lengths: Tensor | Sequence[int] | None = None,
        ) -> tuple[Tensor, ODERNNState]: ...
        @overload
        def __call__(
            self,
            x: PackedSequence,
            t: ArrayLike | PackedSequence,
            state: ODERNNState | None = None,
            mask: Tensor | PackedSequence | None = None,
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
    ) -> tuple[Tensor | PackedSequence, ODERNNState]:
        """The h after each sample, and the state at the end.

        Arguments:
            x: samples (batch, T, input_size), or packed.
            t: times (batch, T), or (T,) for all, also as an array or a list; strictly increasing.
            state: where to go on from, of an earlier call; its time must not lie after the first of ``t``.
            mask: which values are observed, (batch, T) or (batch, T, input_size) of bool. The others may be NaN and
                are fed as zeros; where nothing of a sample is observed, the state goes on as it is. Where x is packed,
                t and mask may be too.
            lengths: length of each sequence, (batch,); what follows is padding.
        """
        if not isinstance(x, PackedSequence):
            filtered = self.filter(x, cast(ArrayLike, t), state, cast("Tensor | None", mask), lengths)
            return filtered.after.h, filtered.state
        if lengths is not None:
            raise ValueError("lengths were given with a PackedSequence, which has its own. Fix: leave them out.")
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        filtered = self.filter(padded, _padded(t), state, None if mask is None else _padded(mask), lengths)
        ordered = x.sorted_indices is None
        output = pack_padded_sequence(filtered.after.h, lengths, batch_first=True, enforce_sorted=ordered)
        return output, filtered.state

    def filter(
        self,
        x: Tensor,
        t: ArrayLike,
        state: ODERNNState | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> Filtered:
        """The states before and after each sample, for the same arguments as :meth:`forward`.

        The state before a sample is a forecast that has not seen it: train on it to predict one sample ahead.
        """
        sequences = Sequences(self.input_size, x, t, mask, lengths)
        self._check_dtype(sequences.x)
        s, start = self._begin(sequences, state)
        return self._filter(sequences, s, start)

    @untraced
    def _filter(self, sequences: Sequences, s: Tensor, start: Tensor | None) -> Filtered:
        """The loop over the samples, from the state s; ``start`` is its time, None if that is the first of them."""
        x, t, seen = sequences.x, sequences.t, sequences.seen
        times = t if start is None else torch.cat([start.to(t.dtype).unsqueeze(1), t], 1)
        gaps, rows = self._gaps(s, times)
        before, after = [], []
        for i in range(x.shape[1]):
            if i or start is not None:
                rows = gaps.advance(i if start is not None else i - 1, rows)
            before.append(rows)
            jumped = self._jump(x[:, i], rows)
            rows = jumped if seen is None else torch.where(seen[:, i, None], jumped, rows)
            after.append(rows)
        self.nfe_per_gap = gaps.nfe
        paths = [sequences.padded(torch.stack(path, 2)) for path in (before, after)]
        ends = [self._state(path, sequences.padded_t) for path in paths]
        return Filtered(ends[0], ends[1], self._state(rows, t[:, -1]))

    def forecast(self, state: ODERNNState, dt: ArrayLike) -> tuple[Tensor, ODERNNState]:
        """The h at times after that of a state, of which nothing is observed.

        Arguments:
            state: of :meth:`forward` or :meth:`filter`; h, m and t may have further dimensions in front, (..., n).
            dt: how much later, (K,) or (..., K), increasing and not negative.

        Returns:
            h (..., K, hidden_size), and the state at the last of the times.
        """
        check_kind(state)
        shape = state.h.shape[:-1]
        self._check_state(state, shape)
        dt = torch.tensor(dt, dtype=torch.float64) if isinstance(dt, numbers.Real) else as_tensor(dt, "dt")
        if dt.dim() == 0 or dt.shape[-1] == 0 or (dt.dim() > 1 and dt.shape[:-1] != shape):
            raise ValueError(
                f"dt must be (K,) or (*batch, K) with batch {tuple(shape)}, got {tuple(dt.shape)}. Fix: [0.5, 1.0]."
            )
        if not bool((dt[..., :1] >= 0).all() & (dt.diff() >= 0).all()):
            raise ValueError("dt must increase and not be negative: it is time after that of the state. Fix: sort it.")
        dt = dt.to(state.h.device).expand(*shape, -1)
        t = state.t.unsqueeze(-1).double()  # float32 would lose a short dt at a late t
        times = torch.cat([t, t + dt], -1)
        return self._forecast(state, times.flatten(0, -2), shape)

    @untraced
    def _forecast(self, state: ODERNNState, times: Tensor, shape: torch.Size) -> tuple[Tensor, ODERNNState]:
        """From a state with any batch dimensions, through rows of times beginning with its own."""
        s = state.h if state.m is None else torch.cat([state.h, state.m], -1)
        gaps, rows = self._gaps(s.flatten(0, -2), times)
        path = []
        for interval in range(times.shape[1] - 1):
            rows = gaps.advance(interval, rows)
            path.append(rows[0])
        self.nfe_per_gap = gaps.nfe
        end = self._state(rows.unflatten(1, shape), times[:, -1].unflatten(0, shape))
        return torch.stack(path, 1).unflatten(0, shape), end

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the submodules."""
        settings = resolved(self.settings, self.field)
        start = "encoded" if self.encoder is not None else "zeros" if self.start is None else "learned"
        return (
            f"{self.input_size}, {self.hidden_size}, residual={self.residual}, initial_state={start}, "
            f"method={settings.method!r}, rtol={settings.rtol:g}, atol={settings.atol:g}, "
            f"gradient={settings.gradient!r}, step_control={settings.step_control!r}"
        )

    # States: s is (batch, state_size), h or h and m side by side, as the cell has them; rows are (1 or 2, batch, n).

    def _gaps(self, s: Tensor, times: Tensor) -> tuple[Gaps, Tensor]:
        """The solves between the times, (batch, T), and the rows to start from."""
        rows = self._rows(s)
        y0 = checked_state(self.field, (rows[0], rows[1]) if self.second_order else rows[0])
        return Gaps(self.field, y0, times, self.settings), torch.stack(parts(y0))

    def _begin(self, sequences: Sequences, state: ODERNNState | None) -> tuple[Tensor, Tensor | None]:
        """The state to start from, and the time it belongs to; None if that is the first of the sequence."""
        x = sequences.x
        batch = x.shape[0]
        if state is not None:
            check_kind(state)
            self._check_state(state, x.shape[:1])
            first = sequences.t[:, 0].detach()
            if bool((state.t.detach().to(first.dtype) > first).any()):
                raise ValueError(
                    "the state's time lies after the first of t; expected the series to go on from it. "
                    "Fix: times of the whole series, not of its part."
                )
            return (state.h if state.m is None else torch.cat([state.h, state.m], 1)), state.t
        if self.encoder is not None:
            s = self.encoder(sequences.window)
        elif self.start is not None:
            s = self.start.expand(batch, -1)
        else:
            s = x.new_zeros(batch, self.hidden_size - self.augment)
        sizes = (self.hidden_size - self.augment, self.state_size)
        if s.shape[:-1] != (batch,) or s.shape[-1] not in sizes:
            raise ValueError(
                f"initial_state returned shape {tuple(s.shape)}; expected (batch, size) = ({batch}, {sizes[0]}) for h"
                + (f", or ({batch}, {sizes[1]}) for h and m side by side." if self.second_order else ".")
                + " Fix: the size of its last layer."
            )
        return (s if s.shape[1] == self.state_size else torch.cat(parts(self.field.initial_state(s)), 1)), None

    def _check_dtype(self, x: Tensor) -> None:
        dtypes = {p.dtype for p in self.parameters() if p.is_floating_point()}
        if dtypes and x.dtype not in dtypes and not torch.is_autocast_enabled(x.device.type):
            kinds = ", ".join(map(str, dtypes))
            raise TypeError(
                f"x is {x.dtype}, the parameters are {kinds}; expected one dtype. "
                f"Fix: x.to({kinds.split(', ')[0]}), or .to({x.dtype}) of the module."
            )

    def _check_state(self, state: ODERNNState, shape: torch.Size) -> None:
        h, m, t = state.h, state.m, state.t
        if (m is not None) != self.second_order or any(
            part.shape != (*shape, self.hidden_size) for part in (h, m) if part is not None
        ):
            wanted = "h and m" if self.second_order else "h, and None for m,"
            raise ValueError(
                f"the state must have {wanted} of shape {(*shape, self.hidden_size)}, got h {tuple(h.shape)} and m "
                f"{None if m is None else tuple(m.shape)}. Fix: a state that this module returned for such a batch."
            )
        if t.shape != shape:
            raise ValueError(f"the state's t must have shape {tuple(shape)}, got {tuple(t.shape)}. Fix: one time each.")

    def _jump(self, x: Tensor, rows: Tensor) -> Tensor:
        """The rows of the state after a sample was seen."""
        s = rows.movedim(0, 1).flatten(1)
        new = self.cell(x, s)
        if not isinstance(new, Tensor) or new.shape != s.shape:
            got = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(f"the cell returned {got}; expected the shape of the state, {tuple(s.shape)}.")
        new = new.to(s.dtype)  # autocast may have made it smaller
        return self._rows(s + new if self.residual else new)

    def _rows(self, s: Tensor) -> Tensor:
        return s.unflatten(1, (-1, self.hidden_size)).movedim(1, 0)

    @staticmethod
    def _state(rows: Tensor, t: Tensor) -> ODERNNState:
        return ODERNNState(rows[0], rows[1] if len(rows) > 1 else None, t)


def _padded(z: Any) -> Any:
    """What is given, padded if it is packed."""
    return pad_packed_sequence(z, batch_first=True)[0] if isinstance(z, PackedSequence) else z
