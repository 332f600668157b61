"""Checked batches of irregular series for recurrent layers, the inputs built from them, and the state of an ODE-RNN.

A gap is the time between two successive observations of a series.
"""

from __future__ import annotations

import copy
import numbers
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Literal, NoReturn, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from typing_extensions import Self, override

from hbnode import _torch
from hbnode._checks import (
    ArrayLike,
    as_count,
    as_integers,
    as_real,
    as_tensor,
    check_bool,
    check_choice,
    check_input,
    check_real,
    refuse_meta,
    tensor_fix,
)
from hbnode._times import as_times, as_unit, check_digits, has_lost_digits, lost_digits
from hbnode._torch import ModuleWithConstants, is_autocast, may_look
from hbnode._tree import Kind, Record, record
from hbnode.errors import MaxStepsError, SolverError
from hbnode.nfe import NFE

Missing = Literal["zero", "hold", "decay"]
Lengths = Tensor | Sequence[int]
Series = TypeVar("Series", Tensor, PackedSequence)
GAPS_PER_UNIT = 10  # fitted time_unit, divided by the median gap; an untrained network then needs one step per gap
MANY_NFE_THRESHOLD = 50  # with more function evaluations per gap than this, warn_if_too_short warns
SEVERAL_NFE_THRESHOLD = 12  # with more function evaluations per gap than this, a default method took several steps
TIGHT_RTOL = 1e-6  # with an rtol up to this value, many function evaluations are normal
UNIT_RATIO_THRESHOLD = 2.0  # time_unit is too short if the fitted unit, divided by it, is larger than this
UNSET_UNIT_RATIO_THRESHOLD = 7.5  # the same threshold for a time_unit that was never set


# States


@record
class ODERNNState(Record):
    """The state of an :class:`ODERNN`, from which a later call continues a series.

    It has no dimension for layers: use ``state.h`` instead of the ``h[-1]`` of torch.nn.GRU.

    Attributes:
        h: hidden state of the last layer, (batch, hidden_size). For a bidirectional module it concatenates the final
            states of the two directions, (batch, 2 hidden_size).
        m: momentum or velocity, of the shape of h; None for first-order fields.
        t: time of the state, (batch,).
        last: last observed value of each feature, (batch, input_size); None if the module does not use it.
        last_t: time of the value in ``last``, (batch, input_size); the start of the series if nothing was observed.
        below: state of the layer below; None for the first layer.
    """

    h: Tensor
    m: Tensor | None
    t: Tensor
    last: Tensor | None = None
    last_t: Tensor | None = None
    below: ODERNNState | None = None

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self[0])

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "the parts of an ODERNNState are read by name. Fix: state.h, (batch, hidden_size), instead of the h[-1] "
            "of torch.nn.GRU; state.m and state.t for momentum and time."
        )

    @property
    def joined(self) -> Tensor:
        """Return h, or h and m concatenated, which is the state argument of a cell."""
        return self.h if self.m is None else torch.cat([self.h, self.m], -1)

    @property
    def layers(self) -> list[ODERNNState]:
        """Return the states of all layers, the first layer first."""
        return [self] if self.below is None else [*self.below.layers, self]

    @staticmethod
    @override
    def _dtype(name: str, old: torch.dtype, new: torch.dtype) -> torch.dtype:
        return old if name in ("t", "last_t") else new


@record
class Filtered(Record):
    """The output of :meth:`ODERNN.filter`, which unpacks into its three attributes.

    Attributes:
        before: states of the last layer just before each sample, with h and m (batch, T, hidden_size) and t (batch, T).
        after: states just after each sample, of the same shapes.
        state: the state at the end of each series.
    """

    before: ODERNNState
    after: ODERNNState
    state: ODERNNState


def make_state(
    s: Tensor, t: Tensor, sizes: list[int], last: Tensor | None = None, last_t: Tensor | None = None,
    below: ODERNNState | None = None,
) -> ODERNNState:  # fmt: skip
    """Split the joint state s (..., S) of a layer into h and m, and return an ODERNNState that holds them.

    ``sizes`` are the numbers of features of h and m, or of h only, for a first-order field.
    """
    h, *m = s.split(sizes, -1)
    return ODERNNState(h.contiguous(), m[0].contiguous() if m else None, t, last, last_t, below)


def check_state(state: object, kind: type[Kind], shapes: dict[str, tuple[int, ...] | None], fix: str) -> Kind:
    """Raise an error unless a state has the type ``kind`` and these shapes.

    Return the state as :func:`real_state` does. ``shapes`` maps names of attributes to shapes; None means that the
    attribute must be None. ``fix`` is the advice in the error message.
    """
    if not isinstance(state, kind):
        raise TypeError(f"state must be an {kind.__name__}, got {type(state).__name__}. Fix: {fix}.")
    for name, shape in shapes.items():
        part = getattr(state, name)
        got = None if part is None else tuple(part.shape)
        if got != shape:
            raise ValueError(
                f"the state's {name} must have shape {shape}, got {got}. "
                "Fix: a state that this module returned for such a batch."
            )
    return real_state(state)


def real_state(state: Kind) -> Kind:
    """Raise an error if one of the state's tensors is not real; return the state.

    Tensors created in inference mode are copied, because autograd cannot save them.
    """
    return state.map(lambda z: check_real(z, "the state")).outside_inference_mode() if may_look() else state


def check_start(start: Tensor, t: Tensor) -> None:
    """Raise ValueError if the first of the times t (batch, T) is before the state's time ``start`` (batch,)."""
    if may_look() and bool((t[:, 0].detach() < start.detach().to(t)).any()):
        raise ValueError(
            "the state's time lies after the first of t; expected t[:, 0] >= state.t. "
            "Fix: times on one clock for the whole series, not restarted in each part."
        )


# Series


class Sequences:
    """A checked batch of series.

    Attributes:
        x: samples (batch, T, input_size), 0 for missing values; T is the greatest length.
        t: times (batch, T); padding has the time of the last sample.
        raw_t: the user's times (batch, total), padding included.
        observed: which values are observed, (batch, T, 1) or (batch, T, input_size); None if all are.
        any_observed: which samples have an observed value, (batch, T); None if all have one.
        valid: which samples are not padding, (batch, T); None if there is no padding.
        total: number of time steps in the user's tensors; only the first T are used.
    """

    def __init__(
        self, input_size: int, x: Tensor, t: ArrayLike, mask: Tensor | None, lengths: Lengths | None,
        time_unit: float = 1.0,
    ) -> None:  # fmt: skip
        if isinstance(x, PackedSequence):
            raise TypeError(
                "x is a PackedSequence; expected a padded tensor. Fix: x, lengths = pad_packed_sequence(x, "
                "batch_first=True), and lengths=lengths."
            )
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor (batch, T, input_size), got {type(x).__name__}. Fix: {_series_fix(x)}."
            )
        if x.dim() != 3 or x.shape[-1] != input_size or 0 in x.shape[:2]:
            raise ValueError(
                f"x must be (batch, T, input_size) with input_size={input_size} and at least one sample, got "
                f"{tuple(x.shape)}. Fix: {_shape_fix(x, input_size)}."
            )
        if not x.is_floating_point():
            raise TypeError(f"x must be floating point, got {x.dtype}. Fix: x.float().")
        refuse_meta(x, "x")
        self.total = x.shape[1]
        t = _checked_times(t, x)
        self.raw_t, self.valid = t, None
        self.observed = None if mask is None else _checked_mask(mask, x)
        if lengths is not None:
            valid, longest = _checked_lengths(lengths, x)
            x, t, self.valid = x[:, :longest], t[:, :longest], valid[:, :longest]
            valid_values = self.valid.unsqueeze(-1)
            self.observed = valid_values if self.observed is None else self.observed[:, :longest] & valid_values
            t = torch.where(self.valid, t, t.gather(1, self.valid.sum(1, keepdim=True) - 1))
        self.t = t
        self.x = x if self.observed is None else torch.where(self.observed, x, 0.0)
        self.any_observed = None if self.observed is None else self.observed.any(-1)
        if may_look():
            self._check_values(time_unit)

    @property
    def window(self) -> Tensor:
        """The samples (batch, T, input_size), padded with zeros to (batch, total, input_size)."""
        return pad(self.x, (0, 0, 0, self.total - self.x.shape[1]))

    def at_samples(self, x: Tensor) -> Tensor:
        """Pad x (batch, T, n) with zeros to (batch, total, n).

        x is also set to 0 at the padding of each series, and at samples without observed values.
        """
        x = x if self.any_observed is None else torch.where(self.any_observed.unsqueeze(-1), x, 0.0)
        return pad(x, (0, 0, 0, self.total - x.shape[1]))

    def backwards(self) -> tuple[Tensor, Sequences]:
        """Reverse every series in time; padding stays at the end, with the time of the last sample.

        Return the indices (batch, T) that reverse the samples, and the reversed batch. Its times are measured from the
        end of each series.
        """
        positions = torch.arange(self.t.shape[1], device=self.t.device).expand(self.t.shape)
        order = positions.flip(1)
        if self.valid is not None:
            order = torch.where(self.valid, self.valid.sum(1, keepdim=True) - 1 - positions, positions)
        since = self.t[:, -1:] - self.t.gather(1, order)  # padding of t repeats the last time
        if self.valid is not None:
            since = torch.where(self.valid, since, self.t[:, -1:] - self.t[:, :1])
        back = copy.copy(self)
        back.x, back.t, back.raw_t = reorder(self.x, order), since, since
        if self.observed is not None and self.any_observed is not None:
            back.observed, back.any_observed = reorder(self.observed, order), self.any_observed.gather(1, order)
        return order, back

    @property
    def padded_t(self) -> Tensor:
        missing = self.total - self.t.shape[1]
        return torch.cat([self.t, self.t[:, -1:].expand(-1, missing)], 1) if missing else self.t

    def padded(self, states: Tensor) -> Tensor:
        """Pad states (..., batch, T, n) to (..., batch, total, n), with 0 after the end of each series."""
        if self.valid is None:
            return states
        states = torch.where(self.valid.unsqueeze(-1), states, 0.0)
        return pad(states, (0, 0, 0, self.total - states.shape[-2]))

    def _check_values(self, time_unit: float) -> None:
        """Raise ValueError if times or samples are not valid, such as times that decrease.

        All checks are made with one transfer from the GPU, because each transfer waits for it.
        """
        t = self.t.detach()
        gaps = t.diff()
        is_lost, is_observed = has_lost_digits(t, gaps, time_unit), torch.isfinite(self.x.detach()).all()
        finite, falls, lost, observed = torch.stack(
            [torch.isfinite(t).all(), (gaps < 0).any(), is_lost, is_observed]
        ).tolist()
        if not finite:
            raise ValueError("t is not finite before the padding. Fix: a time for every sample, observed or not.")
        if falls:
            row, i = (int(index) for index in (gaps < 0).nonzero()[0])
            raise ValueError(
                f"t must not decrease, but in sequence {row} t[{i}]={float(t[row, i]):.9g} is followed by "
                f"{float(t[row, i + 1]):.9g}. Fix: lengths=, if the rest is padding; to sort, for t of shape (batch, "
                "T), order = t.argsort(stable=True); "
                "t, x = t.take_along_dim(order, 1), x.take_along_dim(order.unsqueeze(-1), 1)."
            )
        if lost:
            raise lost_digits(t, gaps, "t", time_unit)
        if not observed:
            raise ValueError("x is not finite where it is observed. Fix: mask=torch.isfinite(x) if values are missing.")


def reorder(z: Tensor, order: Tensor) -> Tensor:
    """Reorder samples z (batch, T, n) along time by the indices ``order`` (batch, T)."""
    return z.gather(1, order.unsqueeze(-1).expand(-1, -1, z.shape[-1]))


def unpack(x: Any, lengths: Lengths | None, *others: Any) -> list[Any]:
    """Convert packed sequences among x and ``others`` to padded tensors; leave tensors unchanged.

    Return a list of the lengths, x, and the other tensors. The lengths are those of the packed x, or ``lengths``.
    """
    if not isinstance(x, PackedSequence):
        return [lengths, x, *others]
    if lengths is not None:
        raise ValueError("lengths were given with a PackedSequence, which has its own. Fix: leave them out.")
    padded = [pad_packed_sequence(z, True)[0] if isinstance(z, PackedSequence) else z for z in (x, *others)]
    return [pad_packed_sequence(x)[1], *padded]


def pack_as(x: PackedSequence, y: Tensor, lengths: Any) -> PackedSequence:
    return pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=x.sorted_indices is None)


def check_parameters(x: Tensor, parameters: Iterable[Tensor]) -> None:
    """Raise an error if a parameter is on the meta device, or if no parameter has the dtype of x."""
    parameters = list(parameters)
    for parameter in parameters:
        refuse_meta(parameter, "the module")
    check_dtype(x, map(attrgetter("dtype"), parameters))


def check_dtype(x: Tensor, dtypes: Iterable[torch.dtype], name: str = "x") -> None:
    """Raise TypeError if the dtype of x is not in ``dtypes``; under autocast, dtypes up to 32 bits are allowed."""
    kinds = list(dict.fromkeys(dtypes))
    if not kinds or x.dtype in kinds:
        return
    if not (is_autocast(x) and {torch.float16, torch.bfloat16, torch.float32} >= {x.dtype, *kinds}):
        raise TypeError(
            f"{name} is {x.dtype}, the parameters are {', '.join(map(str, kinds))}; expected one dtype. "
            f"Fix: {name}.to({kinds[0]}){f', or .to({x.dtype}) of the module' if x.is_floating_point() else ''}."
        )


def checked_dropout(dropout: float, num_layers: int) -> float:
    if not 0 <= as_real(dropout, "dropout", "dropout=0.1") < 1:
        raise ValueError(f"dropout must be in [0, 1), got {dropout!r}. Fix: dropout=0.1.")
    if dropout and num_layers == 1:
        raise ValueError("dropout needs num_layers >= 2, got 1. Fix: num_layers=2, or nn.Dropout.")
    return float(dropout)


def refuse_both_directions(module: nn.Module, what: str) -> None:
    if module.bidirectional:
        raise ValueError(
            f"a bidirectional {type(module).__name__} layer {what}: it needs whole series. Fix: bidirectional=False."
        )


def checked_dt(dt: ArrayLike, shape: torch.Size) -> Tensor:
    """Check ``dt``, the times of a forecast measured from the time of a state.

    Return them as a tensor (*shape, K), where ``shape`` is the batch shape of the state.
    """
    times = torch.tensor(dt) if isinstance(dt, numbers.Real) else as_times(dt, "dt")
    if times.dim() == 0 or times.shape[-1] == 0 or (times.dim() > 1 and times.shape[:-1] != shape):
        raise ValueError(
            f"dt must be (K,) or (*batch, K) with batch {tuple(shape)}, got {tuple(times.shape)}. Fix: [0.5, 1.0]."
        )
    if may_look() and not bool((times[..., :1] >= 0).all() & (times.diff() >= 0).all() & times.isfinite().all()):
        raise ValueError(
            "dt must be finite, >= 0 and not decrease: it is the time since that of the state. Fix: sort it."
        )
    return times.expand(*shape, -1)


def checked_at(at: ArrayLike, t: Tensor, time_unit: float) -> Tensor:
    """Check ``at``, the times of predictions, which have the origin and unit of the samples' times t (batch, T).

    Return them as a tensor (batch, K) on the device of t.
    """
    times = as_times(at, "at")
    if times.dim() not in (1, 2) or times.shape[-1] == 0 or (times.dim() == 2 and len(times) != len(t)):
        raise ValueError(
            f"at must be (K,) or (batch, K) with batch={len(t)} and K >= 1, got {tuple(times.shape)}. "
            "Fix: at=[0.0, 0.5, 1.0] for the same times in all series."
        )
    if may_look() and not bool(torch.isfinite(times).all()):
        raise ValueError("at must be finite, got NaN or inf. Fix: at[torch.isfinite(at)].")
    check_digits(times, times.new_zeros(0), "at", time_unit)
    return times.to(t.device).expand(len(t), -1)


def shown(module: object, names: Iterable[str]) -> str:
    """Return the string "name=value, ..." for the attributes ``names`` of a module, for its ``extra_repr``."""
    values = ((name, getattr(module, name)) for name in names)
    lists = ((name, x.tolist() if isinstance(x, Tensor) and not x.is_meta else x) for name, x in values)
    return ", ".join(f"{name.removeprefix('has_')}={x!r}" for name, x in lists)


def _tensor(value: object, name: str, conversion: Callable[[object, str], Tensor]) -> Tensor:
    if isinstance(value, PackedSequence):
        raise ValueError(
            f"{name} is a PackedSequence and x is not; expected both packed or both padded. "
            f"Fix: pad_packed_sequence({name}, batch_first=True)[0], with lengths=."
        )
    return conversion(value, name)


def _checked_times(t: ArrayLike, x: Tensor) -> Tensor:
    shape = x.shape[:2]
    t = _tensor(t, "t", as_times)
    # shapes of equal length are compared: comparing (T,) with (batch, T) in a graph would add the condition batch != T
    if t.shape != shape[2 - max(t.dim(), 1) :]:
        time_first = t.shape in (shape[::-1], shape[:1])
        fix = "x.transpose(0, 1), if time comes first in x" if time_first else "one time per sample"
        raise ValueError(
            f"t must be (batch, T) = {tuple(shape)} or (T,) = {tuple(shape[1:])}, got {tuple(t.shape)}. "
            f"Fix: {fix}; t.squeeze(-1) for t of shape (batch, T, 1)."
        )
    t = t if t.is_floating_point() else t.to("cpu", torch.float64)
    return _torch.to_device(t, x.device).expand(shape)


def checked_static(static: Tensor | None, size: int, x: Tensor, kind: str) -> Tensor | None:
    """Check static features; return them in the dtype of x, (batch, size), or return None if ``size`` is 0.

    ``kind`` is the name of the module in error messages.
    """
    if static is None and size == 0:
        return None
    if static is not None:
        check_input(static, "static")
    shape = None if static is None else tuple(static.shape)
    if static is None or shape != (len(x), size):
        raise ValueError(
            f"static must be (batch, static_size) = ({len(x)}, {size}), got {shape}. Fix: "
            + (f"{kind}(..., static_size={shape[-1]})." if shape and size == 0 else "one row of features per series.")
        )
    refuse_meta(static, "static")
    if static.is_complex():
        raise TypeError(f"static must hold real numbers, got {static.dtype}. Fix: static.real.")
    if may_look() and not bool(torch.isfinite(static).all()):
        raise ValueError("static is not finite. Fix: standardise, then static.nan_to_num(), so that NaN is the mean.")
    return static.to(x)


def _checked_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Check a boolean mask (True = observed), and return it on the device of x.

    A mask (batch, T) is returned as (batch, T, 1).
    """
    mask = _tensor(mask, "mask", as_tensor)
    if mask.dtype != torch.bool or mask.shape not in (x.shape, x.shape[:2]):
        fix = "mask.squeeze(-1)" if mask.shape == (*x.shape[:2], 1) else "mask.bool() of 0 and 1"
        raise ValueError(
            f"mask must be bool of shape {tuple(x.shape[:2])} or {tuple(x.shape)}, True where observed, got "
            f"{mask.dtype} of shape {tuple(mask.shape)}. Fix: mask=torch.isfinite(x), or {fix}."
        )
    mask = mask.to(x.device)
    return mask if mask.dim() == 3 else mask.unsqueeze(-1)


def _checked_lengths(lengths: Lengths, x: Tensor) -> tuple[Tensor, int]:
    """Return the mask (batch, T) of samples that are not padding, and the length of the longest series.

    While torch.compile, torch.export or torch.jit.trace records the program, T stands for that length.
    """
    lengths = as_integers(lengths, "lengths", "one length per sequence of the batch")
    batch, total = x.shape[:2]
    is_whole = not (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool)
    if lengths.shape != (batch,) or not is_whole:
        raise ValueError(
            f"lengths must be {batch} whole numbers, got {lengths.dtype} of shape {tuple(lengths.shape)}. "
            "Fix: one length per sequence of the batch."
        )
    longest = total
    if may_look():
        lengths = lengths.cpu()
        if not bool(((lengths >= 1) & (lengths <= total)).all()):
            raise ValueError(
                f"lengths must lie between 1 and T={total}, got {lengths.tolist()}. "
                "Fix: series = series.select(series.lengths > 0), without its empty series."
            )
        longest = int(lengths.max())
    valid = torch.arange(total, device=lengths.device) < lengths.unsqueeze(1)
    return valid.to(x.device), longest


def _series_fix(x: object) -> str:
    shapes = [getattr(each, "shape", None) for each in x] if isinstance(x, (list, tuple)) else []
    if any(shapes) and (len(set(shapes)) > 1 or not isinstance(x[0], Tensor)):  # type: ignore[index]  # x is a list
        dtype = torch.get_default_dtype()
        return f"series = hbnode.data.as_series(list(zip(t, x)), dtype={dtype}), and rnn(**series.inputs())"
    return f"{tensor_fix(x)}, and .unsqueeze(0) after it for a single series (T, input_size)"


def _shape_fix(x: Tensor, input_size: int) -> str:
    if x.dim() == 2:
        return "x.unsqueeze(0) for a single series" if x.shape[1] == input_size else "x.unsqueeze(-1) for one feature"
    if x.dim() == 3 and 0 not in x.shape[:2]:
        return f"input_size={x.shape[-1]}"
    return "leave out series without samples"


class Inputs(ModuleWithConstants):
    r"""A module that builds a cell's input from samples, masks, elapsed times and static features.

    Arguments:
        input_size: number of features of a sample.
        missing: replacement of a missing value. ``"zero"`` gives 0 and ``"hold"`` the last observed value. ``"decay"``
            multiplies the last observed value by :math:`e^{-\lambda\delta}`, where δ is the time since its
            observation, in units of ``time_unit``. Each feature has a rate
            :math:`\lambda = \mathrm{softplus}(\omega)` with a parameter ω, initially 0.
        mask_features: whether the input includes the mask.
        elapsed_features: whether the input includes δ.
        static_size: number of static features.
    """

    def __init__(
        self, input_size: int, missing: Missing = "zero", mask_features: bool = False, elapsed_features: bool = False,
        static_size: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        input_size = as_count(input_size, "input_size")
        static_size = as_count(static_size, "static_size", least=0)
        self.input_size, self.static_size = input_size, static_size
        self.missing: Missing = check_choice(missing, "missing", get_args(Missing))
        self.mask_features = check_bool(mask_features, "mask_features")
        self.elapsed_features = check_bool(elapsed_features, "elapsed_features")
        self.size = input_size * (1 + self.mask_features + self.elapsed_features) + static_size  # of the input
        self.looks_back = missing != "zero" or self.elapsed_features
        self.rate = nn.Parameter(torch.zeros(input_size)) if missing == "decay" else None

    def forward(
        self, sequences: Sequences, static: Tensor | None, state: Any, time_unit: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Build the inputs of a cell from samples, masks, elapsed times and static features.

        Return the inputs (batch, T, size), and the attributes ``last`` and ``last_t`` of the state after all samples.
        """
        x, observed = sequences.x, sequences.observed
        if observed is None:
            observed = x.new_ones((), dtype=torch.bool)
        observed, last, last_t = observed.expand(x.shape), None, None
        columns = [x]
        if self.mask_features:
            columns.append(observed.to(x.dtype))
        if self.looks_back:
            held, since, last, last_t = _look_back(sequences, observed, state)
            since = (since / time_unit).to(x.dtype)
            if self.rate is not None:
                held = held * torch.exp(-softplus(self.rate) * since)
            if self.missing != "zero":
                columns[0] = torch.where(observed, x, held)
            if self.elapsed_features:
                columns.append(since)
        if static is not None:
            columns.append(static.unsqueeze(1).expand(-1, x.shape[1], -1))
        return torch.cat(columns, -1) if len(columns) > 1 else columns[0], last, last_t

    @override
    def extra_repr(self) -> str:
        return f"{self.input_size}, missing={self.missing!r}, size={self.size}"


def _look_back(sequences: Sequences, observed: Tensor, state: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find, for each sample and feature, the last observed value and its age, the time since its observation.

    Return the values, the ages, and the attributes ``last`` and ``last_t`` of the state after the last sample. Values
    and ages are (batch, T, n). Before the first observation of a feature, the value is 0, and the age is the
    time since the start of the series.
    """
    x, t = sequences.x, sequences.t.to(_torch.widest(sequences.t.device))
    shape = (x.shape[0], x.shape[2])
    last, last_t = (None, None) if state is None else (state.last, state.last_t)
    if last is None or last_t is None:
        begin = t[:, 0] if state is None else state.t.to(t)
        last, last_t = x.new_zeros(shape), begin.unsqueeze(1).expand(shape)
    positions = torch.arange(x.shape[1], device=x.device).view(1, -1, 1)
    latest = torch.where(observed, positions, -1).cummax(1).values + 1  # 0 stands for the state before the first sample
    values = torch.cat([last.to(x.dtype).unsqueeze(1), x], 1)
    times = torch.cat([last_t.to(t).unsqueeze(1), t.unsqueeze(-1).expand(x.shape)], 1)
    before = pad(latest[:, :-1], (0, 0, 1, 0))
    since = t.unsqueeze(-1) - times.gather(1, before)
    end = latest[:, -1:]
    return values.gather(1, before), since, values.gather(1, end)[:, 0], times.gather(1, end)[:, 0]


def observed_gaps(t: ArrayLike, mask: Tensor | None, lengths: Lengths | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the times of samples, the mask of samples with an observed value, and the gaps between these samples.

    Times and mask are (batch, T), and the gaps are (K,). Raise ValueError if times of these samples are not finite or
    decrease.
    """
    t = as_times(t, "t").detach()
    dtype, t = t.dtype, t.to("cpu", torch.float64)
    mask = None if mask is None else as_tensor(mask, "mask").detach().cpu().bool()
    lengths = None if lengths is None else as_integers(lengths, "lengths", "one per row of t").cpu()
    if t.dim() == 1:
        t = t.expand(next((len(z) for z in (mask, lengths) if z is not None and z.dim()), 1), -1)
    if t.dim() != 2:
        raise ValueError(f"t must be (batch, T) or (T,), got {tuple(t.shape)}. Fix: t.squeeze(-1), or t.flatten(0, 1).")
    counts = torch.ones(t.shape, dtype=torch.bool)
    if mask is not None:
        if mask.shape[:2] != t.shape or mask.dim() > 3:
            wanted = f"{tuple(t.shape)} or {(*t.shape, 'features')}"
            raise ValueError(f"mask must be {wanted}, got {tuple(mask.shape)}. Fix: one bool per sample, or per value.")
        counts = mask if mask.dim() == 2 else mask.any(-1)
    if lengths is not None:
        if lengths.shape != t.shape[:1]:
            raise ValueError(f"lengths must be {len(t)} numbers, got {tuple(lengths.shape)}. Fix: one per row of t.")
        counts = counts & (torch.arange(t.shape[1]) < lengths.unsqueeze(1))
    if not bool(torch.isfinite(t[counts]).all()):
        raise ValueError("t is not finite at observed samples. Fix: lengths=, or a mask that is False there.")
    rows = counts.nonzero()[:, 0]
    gaps = t[counts].diff()[rows.diff() == 0]
    if bool((gaps < 0).any()):
        raise ValueError(
            "t must not decrease over the observed samples of each series. Fix: lengths=, if the rest is padding; else "
            "t = t.sort(-1).values."
        )
    check_digits(t[counts].to(dtype), gaps, "t", 1.0)
    return t, counts, gaps


def fitted_unit(t: ArrayLike, mask: Tensor | None, lengths: Lengths | None) -> float:
    """Return the fitted time_unit: ten times the median gap between samples with observed values.

    Gaps of length 0 and padding do not count.
    """
    _, _, gaps = observed_gaps(t, mask, lengths)
    gaps = gaps[gaps > 0]
    if len(gaps) == 0:
        raise ValueError(
            "t has no two samples at different times in any series, so no gap. "
            "Fix: ODERNN(..., time_unit=ten typical gaps)."
        )
    return GAPS_PER_UNIT * float(gaps.median())


class TimedModule(ModuleWithConstants):
    """A module that divides times by ``time_unit``, a constant in its ``state_dict`` that can be fitted to data."""

    @property
    def time_unit(self) -> float:
        """The length of the module's unit of time, in the unit of the user's times."""
        return float(self.get_constant("_time_unit"))

    @time_unit.setter
    def time_unit(self, value: float) -> None:
        self.set_constant("_time_unit", as_unit(value, "time_unit"))
        self.has_unit = True

    @override
    def constants(self) -> dict[str, str]:
        return {"time_unit": "_time_unit"}

    def fit_time_unit(self, t: ArrayLike, mask: Tensor | None = None, lengths: Lengths | None = None) -> Self:
        """Set ``time_unit`` to ten times the median gap of training data, so that a typical gap is a tenth of a unit.

        Gaps of length 0 do not count. Models fitted to t and to 1000 t then give the same outputs.

        Arguments:
            t: times (batch, T) or (T,), as for a call.
            mask: which values are observed, (batch, T) or (batch, T, features). A gap is the time between two samples
                with an observed feature. Default: ``None``.
            lengths: length of each series, (batch,). Default: ``None``.

        Returns:
            The module itself.
        """
        self.time_unit = fitted_unit(t, mask, lengths)
        return self


def warn_if_too_short(
    time_unit: float, times: Tensor, counts: Sequence[Sequence[NFE]], networks: int, rtol: float, most: int
) -> bool:
    """Warn if the median gap needs many function evaluations because ``time_unit`` is too short; return whether it did.

    ``times`` are in units of ``time_unit``. ``counts`` holds the number of function evaluations (NFE) of each gap and
    each network. Up to ``most`` per gap and network are normal. There is no warning if ``rtol`` is tight, because many
    evaluations are then needed with any unit.
    """
    each = sorted(sum(map(attrgetter("forward"), gap)) / networks for gap in counts)
    spent = each[len(each) // 2] if each else 0.0
    if spent <= most or rtol <= TIGHT_RTOL:
        return False
    gaps = times.detach().diff()
    unit = GAPS_PER_UNIT * float(gaps[gaps > 0].median())  # waits for the GPU, but only after a slow call
    if not unit > (UNIT_RATIO_THRESHOLD if spent > MANY_NFE_THRESHOLD else UNSET_UNIT_RATIO_THRESHOLD):
        return False
    warnings.warn(
        f"the gaps between samples take {spent:.0f} function evaluations in the median: they are too "
        f"long for time_unit={time_unit:g}. Fix: before training, rnn.fit_time_unit(t) with "
        f"the times of the training data, or ODERNN(..., time_unit={unit * time_unit:.3g}).",
        stacklevel=2,
    )
    return True


@contextmanager
def in_user_units(time_unit: float) -> Iterator[None]:
    """Convert the times in a SolverError to the user's units; if there were too many steps, suggest a ``time_unit``."""
    try:
        yield
    except SolverError as error:
        message = error.message
        if isinstance(error, MaxStepsError):
            message += f". In an ODERNN, rescale time: rnn.fit_time_unit(t), or time_unit= (it is {time_unit:g})"
        t, size = error.t * time_unit, error.step_size * time_unit
        raise type(error)(message, t=t, step_size=size, nfe=error.nfe) from error
