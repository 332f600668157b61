"""The unit of time of an ODE-RNN: what it should be, and who says so when it is not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hbnode._checks import ArrayLike, as_tensor
from hbnode._times import as_times
from hbnode.errors import MaxStepsError, SolverError
from hbnode.nfe import NFE

GAPS_PER_UNIT = 10  # a fresh network acts over about one unit: a gap of a tenth of it takes one step of any method
MANY = 50  # evaluations in a gap
TIGHT = 1e-6  # a tolerance from which on many are what was asked for
TOO_LONG = 2.0  # times the gap that a fitted unit would make of the median


def fitted_unit(t: ArrayLike, mask: Tensor | None, lengths: Tensor | Sequence[int] | None) -> float:
    """Ten times the median gap between samples of which something was observed, padding ignored."""
    t = as_times(t, "t").detach().to("cpu", torch.float64)
    t = t.unsqueeze(0) if t.dim() == 1 else t
    if t.dim() != 2:
        raise ValueError(f"t must be (batch, T) or (T,), got {tuple(t.shape)}. Fix: t.squeeze(-1), or t.flatten(0, 1).")
    counts = torch.ones(t.shape, dtype=torch.bool) if mask is None else _seen(mask, t)
    if lengths is not None:
        lengths = torch.as_tensor(lengths).cpu()
        if lengths.shape != t.shape[:1]:
            raise ValueError(f"lengths must be {len(t)} numbers, got {tuple(lengths.shape)}. Fix: one for each row.")
        counts = counts & (torch.arange(t.shape[1]) < lengths.unsqueeze(1))
    if not bool(torch.isfinite(t[counts]).all()):
        raise ValueError("t is not finite where something was observed. Fix: lengths=, if that is padding.")
    rows, times = counts.nonzero()[:, 0], t[counts]
    gaps = times.diff()[rows.diff() == 0]
    if len(gaps) == 0:
        raise ValueError("t has no two samples in any series, so no gap. Fix: ODERNN(..., time_unit=), a typical gap.")
    if not bool((gaps > 0).all()):
        raise ValueError(
            "t must increase along each series where something was observed, and some times do not. Fix: lengths=, if "
            "the rest is padding; else sort the samples and merge those of one time, as hbnode.data.from_long does."
        )
    return GAPS_PER_UNIT * float(gaps.median())


def _seen(mask: Tensor, t: Tensor) -> Tensor:
    mask = as_tensor(mask, "mask").detach().cpu().bool()
    if mask.shape[:2] != t.shape or mask.dim() > 3:
        raise ValueError(
            f"mask must be {tuple(t.shape)}, or with a dimension of features behind, got {tuple(mask.shape)}. "
            "Fix: a mark for each sample, or for each value."
        )
    return mask if mask.dim() == 2 else mask.any(-1)


def warn_if_too_short(time_unit: float, times: Tensor, counts: Sequence[Sequence[NFE]], networks: int) -> bool:
    """Warn that the unit of time is too short, if most gaps take many evaluations; whether it did.

    Arguments:
        time_unit: the unit.
        times: (batch, T), in that unit.
        counts: the evaluations of each gap, of the batch together.
        networks: how many networks these are of.
    """
    spent = sorted(sum(count.forward for count in gap) / networks for gap in counts)
    if not spent or spent[len(spent) // 2] <= MANY:
        return False
    gaps = times.detach().diff()
    unit = GAPS_PER_UNIT * float(gaps[gaps > 0].median())  # one wait for the device, in a call that was slow
    if not unit > TOO_LONG:
        return False
    warnings.warn(
        f"the gaps between samples take {spent[len(spent) // 2]:.0f} evaluations each: they are long in the unit of "
        f"time that the network acts over, time_unit={time_unit:g}. Fix: before training, rnn.fit_time_unit(t) with "
        f"the times of the training data, or ODERNN(..., time_unit={unit * time_unit:.3g}).",
        stacklevel=2,
    )
    return True


@contextmanager
def in_user_units(time_unit: float) -> Iterator[None]:
    """Within it, failures of solves in units of time are told in the user's, and too many steps with what to do."""
    try:
        yield
    except SolverError as error:
        message = error.message
        if isinstance(error, MaxStepsError):
            message += f". In an ODERNN, rescale time: rnn.fit_time_unit(t), or time_unit= (it is {time_unit:g})"
        t, size = error.t * time_unit, error.step_size * time_unit
        raise type(error)(message, t=t, step_size=size, nfe=error.nfe) from error
