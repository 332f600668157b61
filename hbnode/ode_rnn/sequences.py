"""A batch of irregular series as a recurrent module wants it: checked, without padding, without NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hbnode._checks import ArrayLike, as_tensor, tensor_fix
from hbnode._times import as_times
from hbnode._tracing import may_look


class Sequences:
    """A checked batch of series.

    Attributes:
        x: samples (batch, T, input_size), zero where nothing was observed; T is the greatest length.
        t: times (batch, T), on padding that of the last sample.
        raw_t: times (batch, T), on padding as given.
        observed: which values were observed, (batch, T, 1) or (batch, T, input_size); None for all.
        seen: of which samples something was observed, (batch, T); None for all.
    """

    def __init__(
        self,
        input_size: int,
        x: Tensor,
        t: ArrayLike,
        mask: Tensor | None,
        lengths: Tensor | Sequence[int] | None,
    ) -> None:
        if isinstance(x, PackedSequence):
            raise TypeError(
                "x is a PackedSequence; expected a padded tensor. Fix: x, lengths = pad_packed_sequence(x, "
                "batch_first=True), and lengths=lengths."
            )
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor (batch, T, input_size), got {type(x).__name__}. Fix: {tensor_fix(x)}, and "
                ".unsqueeze(0) after it for a single series (T, input_size)."
            )
        if x.dim() != 3 or x.shape[-1] != input_size or 0 in x.shape[:2]:
            raise ValueError(
                f"x must be (batch, T, input_size) with input_size={input_size} and at least one sample, got "
                f"{tuple(x.shape)}. Fix: {_shape_fix(x, input_size)}."
            )
        if not x.is_floating_point():
            raise TypeError(f"x must be floating point, got {x.dtype}. Fix: x.float().")
        self.total = x.shape[1]
        t = self._times(t, x)
        raw_t, valid, observed = t, None, None
        if lengths is not None:
            valid, longest = self._valid(lengths, x)
        if mask is not None:
            observed = _observed(mask, x)
        if valid is not None:
            x, t, valid = x[:, :longest], t[:, :longest], valid[:, :longest]
            observed = valid.unsqueeze(-1) if observed is None else observed[:, :longest] & valid.unsqueeze(-1)
            last = t.gather(1, valid.sum(1, keepdim=True) - 1)
            raw_t, t = t, torch.where(valid, t, last)
        self.valid, self.t, self.raw_t = valid, t, raw_t
        self.x = x if observed is None else torch.where(observed, x, 0.0)
        self.observed = observed
        self.seen = None if observed is None else observed.any(-1)
        if may_look():
            self._check_values()

    @property
    def window(self) -> Tensor:
        """Samples as many as were given, zero on padding."""
        return torch.nn.functional.pad(self.x, (0, 0, 0, self.total - self.x.shape[1]))

    def at_samples(self, x: Tensor) -> Tensor:
        """Values (batch, T, n) as long as x was given, zero where nothing was observed."""
        x = x if self.seen is None else torch.where(self.seen.unsqueeze(-1), x, 0.0)
        return torch.nn.functional.pad(x, (0, 0, 0, self.total - x.shape[1]))

    def backwards(self) -> tuple[Tensor, Tensor]:
        """Where each sample is when every series is turned within its own length, (batch, T), and times since the end.

        Padding stays where it is, at the time of the sample before it.
        """
        places = torch.arange(self.t.shape[1], device=self.t.device).expand(self.t.shape)
        if self.valid is None:
            order = places.flip(1)
        else:
            order = torch.where(self.valid, self.valid.sum(1, keepdim=True) - 1 - places, places)
        since = self.t[:, -1:] - self.t.gather(1, order)  # on padding the last of t is that of the last sample
        if self.valid is not None:
            since = torch.where(self.valid, since, (self.t[:, -1:] - self.t[:, :1]).expand_as(since))
        return order, since

    @property
    def padded_t(self) -> Tensor:
        """Times as many as x was given with."""
        missing = self.total - self.t.shape[1]
        return torch.cat([self.t, self.t[:, -1:].expand(-1, missing)], 1) if missing else self.t

    def padded(self, states: Tensor) -> Tensor:
        """States (..., batch, T, n) with zeros on padding, as long as x was given."""
        if self.valid is None:
            return states
        states = torch.where(self.valid.unsqueeze(-1), states, 0.0)
        return torch.nn.functional.pad(states, (0, 0, 0, self.total - states.shape[-2]))

    @staticmethod
    def _times(t: ArrayLike, x: Tensor) -> Tensor:
        shape = x.shape[:2]
        _refuse_packed(t, "t")
        t = as_times(t, "t")
        if t.shape not in (shape, shape[1:]):
            raise ValueError(
                f"t must be (batch, T) = {tuple(shape)} or (T,) = {tuple(shape[1:])}, got {tuple(t.shape)}. "
                "Fix: a time for each sample; t.squeeze(-1) if there is one already."
            )
        t = t if t.is_floating_point() else t.to(torch.float64)
        return t.to(x.device).expand(shape)

    @staticmethod
    def _valid(lengths: Tensor | Sequence[int], x: Tensor) -> tuple[Tensor, int]:
        """Which samples are none of the padding, and the greatest length; T where values cannot be looked at."""
        lengths = torch.as_tensor(lengths)
        batch, total = x.shape[:2]
        if lengths.shape != (batch,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise ValueError(
                f"lengths must be {batch} whole numbers, got {lengths.dtype} of shape {tuple(lengths.shape)}. "
                "Fix: one length for each sequence of the batch."
            )
        longest = total
        if may_look():
            lengths = lengths.cpu()
            if not bool(((lengths >= 1) & (lengths <= total)).all()):
                raise ValueError(
                    f"lengths must lie between 1 and T={total}, got {lengths.tolist()}. Fix: drop empty ones."
                )
            longest = int(lengths.max())
        valid = torch.arange(total, device=lengths.device) < lengths.unsqueeze(1)
        return valid.to(x.device), longest

    def _check_values(self) -> None:
        """Of times and samples, with one synchronisation."""
        t = self.t.detach()
        rising = t.diff() > 0
        rising = rising if self.valid is None else rising | ~self.valid[:, 1:]
        checks = (torch.isfinite(t), rising, torch.isfinite(self.x.detach()))
        finite, increasing, observed = torch.stack([check.all() for check in checks]).tolist()
        if not finite:
            raise ValueError("t is not finite before the padding. Fix: every sample needs a time, observed or not.")
        if not increasing:
            row, i = (int(index) for index in (~rising).nonzero()[0])
            raise ValueError(
                f"t must increase strictly, but in sequence {row} t[{i}]={float(t[row, i]):.9g} is followed by "
                f"{float(t[row, i + 1]):.9g}. Fix: sort the samples and merge those of one time, pass lengths= if the "
                f"rest is padding, or give large times in float64 (these are {self.t.dtype})."
            )
        if not observed:
            raise ValueError("x is not finite where it is observed. Fix: mask=torch.isfinite(x) if values are missing.")


def _observed(mask: Tensor, x: Tensor) -> Tensor:
    """The mask as (batch, T, 1) or (batch, T, input_size)."""
    _refuse_packed(mask, "mask")
    mask = as_tensor(mask, "mask")
    if mask.dtype != torch.bool or mask.shape not in (x.shape, x.shape[:2]):
        raise ValueError(
            f"mask must be bool of shape {tuple(x.shape[:2])} or {tuple(x.shape)}, True where observed, got "
            f"{mask.dtype} of shape {tuple(mask.shape)}. Fix: mask=torch.isfinite(x), or mask.bool() of zeros and ones."
        )
    mask = mask.to(x.device)
    return mask if mask.dim() == 3 else mask.unsqueeze(-1)


def _refuse_packed(value: object, name: str) -> None:
    if isinstance(value, PackedSequence):
        raise ValueError(
            f"{name} is a PackedSequence and x is not; expected both of one kind. "
            f"Fix: pad_packed_sequence({name}, batch_first=True)[0], with lengths=."
        )


def _shape_fix(x: Tensor, input_size: int) -> str:
    """What is wrong with the shape of samples."""
    if x.dim() == 2:
        return "x.unsqueeze(0) for a single series" if x.shape[1] == input_size else "x.unsqueeze(-1) for numbers"
    if x.dim() == 3 and 0 not in x.shape[:2]:
        return f"input_size={x.shape[-1]}"
    return "leave out series without samples"
