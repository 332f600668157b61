"""Blocks of oscillators with gates between them, and heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hbnode._checks import ArrayLike, as_count
from hbnode._torch import may_look
from hbnode._tree import Record, record
from hbnode.nn.oscillators.layer import Oscillators
from hbnode.nn.oscillators.rates import DECAY, FREQUENCY, Range
from hbnode.nn.oscillators.state import OscillatorState
from hbnode.nn.sequences import Sequences


@record
class OscillatorStackState(Record):
    """The state of :class:`OscillatorStack`.

    Attributes:
        v: velocities, (num_layers, batch, num_oscillators).
        x: displacements, of the same shape.
        t: the time of the last sample, (batch,).
        held: what each layer holds, (num_layers, batch, hidden_size), with ``input="hold"``; else None.
    """

    v: Tensor
    x: Tensor
    t: Tensor
    held: Tensor | None = None

    @classmethod
    def joined(cls, states: list[OscillatorState]) -> OscillatorStackState:
        """The states of all layers."""
        held = [state.held for state in states if state.held is not None]
        parts = torch.stack([state.v for state in states]), torch.stack([state.x for state in states])
        return cls(*parts, states[-1].t, torch.stack(held) if held else None)

    def of(self, layer: int) -> OscillatorState:
        """That of a layer."""
        held = None if self.held is None else self.held[layer]
        return OscillatorState(self.v[layer], self.x[layer], self.t, held)


class OscillatorBlock(nn.Module):
    """h + dropout(GLU(W gelu(oscillators(norm(h))))), the block of LinOSS."""

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
        lengths: Tensor | Sequence[int] | None,
    ) -> tuple[Tensor, OscillatorState]:
        y, state = self.oscillators(self.norm(h), t, state, mask, lengths)
        return h + self.dropout(functional.glu(self.gate(functional.gelu(y)), -1)), state


class OscillatorStack(nn.Module):
    r"""A deep model of series: blocks of :class:`Oscillators` with gates between them, and a head.

    A linear map takes samples to h, each block is h ← h + dropout(GLU(W gelu(oscillators(norm(h))))), and the head is
    linear. Times, masks and lengths are those of :class:`Oscillators`; unobserved samples are no input to any layer.

    References:
        Rusch and Rus, Oscillatory State-Space Models, arXiv:2410.03943, whose block this is.

    Arguments:
        input_size: features of a sample.
        hidden_size: features of h.
        num_layers: number of blocks. Default: ``2``
        output_size: features of the output. None is ``hidden_size``. Default: ``None``
        head: ``"regression"``: an output at every sample. ``"classification"``: one output for each series, from the
            mean of h over its observed samples. ``"next"``: at every sample a prediction of the next one; the head sees
            the logarithm of 1 + the gap to it beside h. Default: ``"regression"``
        num_oscillators: oscillators of each layer. None is ``hidden_size``. Default: ``None``
        dropout: probability that a feature of a block's output is dropped in training. Default: ``0.0``
        norm: whether a block has the layer norm. It scales every sample of h to variance 1; without it the blocks see
            amplitudes as they are, which a model of a physical system needs. Default: ``True``
        discretization: ``"exact"`` or ``"imex"``, as in the layer. Default: ``"exact"``
        input: ``"impulse"`` or ``"hold"``, as in the layer. Default: ``"impulse"``
        bidirectional: whether every layer reads the series in both directions; not with ``head="next"``.
            Default: ``False``
        frequency: range of initial frequencies, in cycles per unit of time. Default: ``(0.001, 0.25)``
        decay: range of initial decay rates, in 1 / unit of time. Default: ``(0.001, 0.1)``

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
        head: Literal["regression", "classification", "next"] = "regression",
        num_oscillators: int | None = None,
        dropout: float = 0.0,
        norm: bool = True,
        discretization: Literal["exact", "imex"] = "exact",
        input: Literal["impulse", "hold"] = "impulse",
        bidirectional: bool = False,
        frequency: Range = FREQUENCY,
        decay: Range = DECAY,
    ) -> None:
        super().__init__()
        self.input_size, self.num_layers = as_count(input_size, "input_size"), as_count(num_layers, "num_layers")
        if head not in ("regression", "classification", "next"):
            raise ValueError(
                f"head must be 'regression', 'classification' or 'next', got {head!r}. Fix: head='regression'."
            )
        if head == "next" and bidirectional:
            raise ValueError("head='next' would see the next sample from behind. Fix: bidirectional=False.")
        self.head = head
        self.encoder = nn.Linear(self.input_size, hidden_size)

        def layer() -> Oscillators:
            return Oscillators(
                hidden_size,
                hidden_size,
                num_oscillators,
                discretization=discretization,
                input=input,
                bidirectional=bidirectional,
                frequency=frequency,
                decay=decay,
            )

        self.blocks = nn.ModuleList(
            OscillatorBlock(hidden_size, layer(), dropout, norm) for _ in range(self.num_layers)
        )
        width = hidden_size + (1 if head == "next" else 0)
        self.decoder = nn.Linear(width, hidden_size if output_size is None else as_count(output_size, "output_size"))

    if TYPE_CHECKING:  # nn.Module's returns Any

        def __call__(
            self,
            x: Tensor,
            t: ArrayLike | None = None,
            state: OscillatorStackState | None = None,
            mask: Tensor | None = None,
            lengths: Tensor | Sequence[int] | None = None,
            t_next: Tensor | float | None = None,
        ) -> tuple[Tensor, OscillatorStackState]:
            """As :meth:`forward`."""
            ...

    def forward(
        self,
        x: Tensor,
        t: ArrayLike | None = None,
        state: OscillatorStackState | None = None,
        mask: Tensor | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        t_next: Tensor | float | None = None,
    ) -> tuple[Tensor, OscillatorStackState]:
        """The outputs, and the state after the last sample.

        Arguments:
            x: samples (batch, T, input_size).
            t: times (batch, T), or (T,) for all; None is a unit of time from each sample to the next. Default: ``None``
            state: where to go on from, of an earlier call. A classification is of the samples of this call.
                Default: ``None``
            mask: which values are observed, (batch, T) or (batch, T, input_size) of bool. Others may be NaN, and are
                encoded as zeros where the sample has others that are observed. Default: ``None``
            lengths: length of each sequence, (batch,); what follows is padding. Default: ``None``
            t_next: for ``head="next"``, the time of the sample after the last, (batch,) or a number. None repeats the
                last gap, or is one unit of time after a single sample. Default: ``None``
        """
        counted = torch.arange(x.shape[1] if isinstance(x, Tensor) and x.dim() == 3 else 0, dtype=torch.float64)
        sequences = Sequences(self.input_size, x, counted if t is None else t, mask, lengths)
        if state is not None and not (isinstance(state, OscillatorStackState) and len(state.v) == len(self.blocks)):
            got = f"{len(state.v)} layers" if isinstance(state, OscillatorStackState) else type(state).__name__
            raise ValueError(
                f"state must be an OscillatorStackState of {len(self.blocks)} layers, got {got}. "
                "Fix: what this stack returned beside its outputs, y, state = stack(x)."
            )
        if t_next is not None and self.head != "next":
            raise ValueError(f"t_next is for head='next', got it with head={self.head!r}. Fix: leave it out.")
        h = self.encoder(sequences.window)
        states = []
        for i, block in enumerate(self.blocks):
            seen = sequences.seen
            seen = None if seen is None else functional.pad(seen, (0, h.shape[1] - seen.shape[1]))
            h, after = block(h, t, None if state is None else state.of(i), seen, lengths)
            states.append(after)
        if self.head == "next":
            h = torch.cat([h, self._gap_to_next(sequences, t_next).to(h.dtype).log1p().unsqueeze(-1)], -1)
        if self.head == "classification":
            weights = h.new_ones(h.shape[:2]) if sequences.seen is None else sequences.seen.to(h.dtype)
            weights = functional.pad(weights, (0, h.shape[1] - weights.shape[1]))
            mean = (h * weights.unsqueeze(-1)).sum(1) / weights.sum(1, keepdim=True).clamp(min=1.0)
            return self.decoder(mean), OscillatorStackState.joined(states)
        y = self.decoder(h)
        return sequences.padded(y[:, : sequences.x.shape[1]]), OscillatorStackState.joined(states)

    @staticmethod
    def _gap_to_next(sequences: Sequences, t_next: Tensor | float | None) -> Tensor:
        """The time from each sample to the next, (batch, T)."""
        t = sequences.t
        gaps = t.diff()
        if t_next is not None:
            times = torch.as_tensor(t_next, dtype=t.dtype, device=t.device).expand(len(t))
            last = times.unsqueeze(1) - t[:, -1:]
            if may_look() and not bool((last >= 0).all()):
                raise ValueError(
                    "t_next must not lie before the last time of a series, nor be NaN. Fix: the time of the sample to "
                    "predict, in the unit of t."
                )
        elif gaps.shape[1]:
            ends = torch.full_like(t[:, :1], t.shape[1], dtype=torch.int64)
            ends = ends if sequences.valid is None else sequences.valid.sum(1, keepdim=True)
            last = torch.where(ends > 1, gaps.gather(1, (ends - 2).clamp(min=0)), 1.0)
        else:
            last = torch.ones_like(t)
        gaps = torch.cat([gaps, last], 1)
        if sequences.valid is not None:
            is_last = torch.arange(t.shape[1], device=t.device) == sequences.valid.sum(1, keepdim=True) - 1
            gaps = torch.where(is_last, last, gaps)
        return functional.pad(gaps, (0, sequences.total - gaps.shape[1]))
