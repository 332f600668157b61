"""The right-hand side of a solve as a function of flat tensors, and snapshots of a field's modules during a solve."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hbnode._checks import as_real
from hbnode._torch import is_autocast, is_tracing
from hbnode._tree import State, cast, like
from hbnode.fields import GHBNODE, HBNODE
from hbnode.nfe import Tally
from hbnode.signal import queries


class SolveDropout(nn.Module):
    r"""A dropout layer for use inside a field, with one mask per solve.

    An ordinary dropout layer changes the field in each function evaluation. The ODE then has no solution, and an
    adaptive solver rejects steps because of the noise. This layer draws its mask at the first function evaluation of a
    solve and uses the same mask until the end of the backward pass. If a network calls the layer twice, both inputs
    must have the same shape, and both get the same mask.

    In evaluation mode the layer is the identity. Outside a solve it draws a new mask in each call. It supports one
    solve at a time, so each thread needs its own copy.

    Arguments:
        p: probability with which an element is set to 0; the other elements are divided by 1 - p. Default: 0.5.

    Raises:
        ValueError: if p is not in [0, 1).
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = as_real(p, "p", "SolveDropout(0.1)")
        if not 0 <= self.p < 1:
            raise ValueError(f"p must be a probability in [0, 1), got {p}. Fix: SolveDropout(0.1).")
        self.solve: dict[str, Tensor] | None = None  # set by the running solve

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` times the dropout mask of the solve; in evaluation mode, return ``x``."""
        if not self.training or self.p == 0:
            return x
        if self.solve is None:
            return nn.functional.dropout(x, self.p)
        if "mask" not in self.solve:
            self.solve["mask"] = nn.functional.dropout(torch.ones_like(x, requires_grad=False).detach(), self.p)
        mask = self.solve["mask"]
        if mask.shape != x.shape:
            shapes = f"a mask of shape {tuple(mask.shape)} in this solve and now got an input of shape {tuple(x.shape)}"
            raise ValueError(f"SolveDropout drew {shapes}. Fix: use a separate SolveDropout for each layer.")
        return x * mask.to(x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "solve": None}  # the copy has no mask of a running solve

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


_FORWARDS = tuple(kind.forward for kind in (HBNODE, GHBNODE))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ODETerm:
    r"""The right-hand side of a solve as a function of the tensors that solvers work on, which are called rows.

    A first-order term, :math:`y' = \mathrm{field}(t, y)`, has one row, the concatenated tensors of the state. A
    second-order term, :math:`h'' + \gamma h' = F(h, t)` of an HBNODE or GHBNODE, has the two rows h and m. Its value is
    only F, because the solvers integrate the damping γ themselves.

    A row has the shape (elements,) if all elements have the same step size and the same γ. It has the shape (batch,
    elements) if samples have different steps. It has the shape of the state if ``keeps_shape`` is True or γ differs
    between channels. ``lanes`` is the number of samples if their steps differ, else None.

    Attributes:
        like: the initial state, with the structure and shapes of all states.
        template: the first tensor of the initial state, with the dtype, device and batch size of the solve.
        rows: number of row tensors, 1 or 2.
        dims: largest number of dimensions of a tensor of the state.
        dims_of_row: number of dimensions of a row tensor.
        error_groups: slices of a row tensor, each with its own error norm. The largest of these norms is used.
    """

    def __init__(
        self, field: Callable[..., Any], y0: State, counter: Tally, *, second_order: bool, lanes: int | None = None,
        keeps_shape: bool = False,
    ) -> None:  # fmt: skip
        self.field: Any = field
        self.inner: Any = unwrap_compiled(field)
        self.counter, self.like, self.lanes, self.traced = counter, y0, lanes, is_tracing()
        self.second_order, self.rows = second_order, 2 if second_order else 1
        self.template = y0 if isinstance(y0, Tensor) else y0[0]
        self.damping: Tensor | float = 0.0
        self.dims = self.template.dim() if isinstance(y0, Tensor) else max(map(Tensor.dim, y0))
        self.error_groups = [slice(None)]  # slices of a row tensor with separate error norms
        if getattr(self.inner, "has_integral", False):
            begin = -(y0[-1].numel() if lanes is None else 1)
            self.error_groups = [slice(begin), slice(begin, None)]
        if second_order:
            h, m = self.inner._pair(y0)
            if h.shape != m.shape:
                raise ValueError(
                    f"h and m must have one shape, got {tuple(h.shape)} and {tuple(m.shape)}. Fix: make m like h."
                )
            self.damping = self.inner.solver_damping()
        if isinstance(self.damping, Tensor) and self.damping.dim():
            self.damping = self.aligned(self.damping, "damping", "γ")
        self.keeps_shape = keeps_shape or (isinstance(self.damping, Tensor) and self.damping.dim() > 0)
        self.dims_of_row = self.template.dim() if self.keeps_shape else 1 if lanes is None else 2
        self.dims_of_norm = (0, *range(1 if lanes is None else 2, self.dims_of_row + 1))  # not the samples
        device, self.autocast = self.template.device.type, None
        self.in_autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if is_autocast(self.template):
            self.autocast = device, torch.get_autocast_dtype(device)
            self.in_autocast = functools.partial(torch.autocast, *self.autocast, cache_enabled=False)
        # whether the user called torch.compile(field) or field.compile()
        is_compiled = field is not self.inner or getattr(field, "_compiled_call_impl", None) is not None
        self.calls_field = second_order and is_compiled
        self.time_dependent: bool = getattr(self.inner, "time_dependent", True)
        self.wants_time = not second_order or self.time_dependent
        self.address: int | None = None  # memory address of the last value of the field

    def aligned(self, value: Tensor | float, name: str, symbol: str) -> Tensor | float:
        """Return ``value``, such as the damping γ; reshape a tensor of values per channel to as many dimensions as h.

        ``name`` and ``symbol`` name the constant in error messages.
        """
        if not isinstance(value, Tensor) or not value.dim():
            return value
        shape = self.template.shape
        if value.dim() > len(shape) or any(
            a not in (1, b) for a, b in zip(value.shape[::-1], shape[::-1], strict=False)
        ):
            raise ValueError(
                f"the {name} has shape {tuple(value.shape)}, which does not broadcast to that of h, {tuple(shape)}. "
                f"Fix: (d,) for one {symbol} per feature, (d, 1, 1) for one per channel."
            )
        return value.view(*[1] * (len(shape) - value.dim()), *value.shape)

    def flatten(self, state: State) -> tuple[Tensor, ...]:
        rows: list[Tensor] = []
        for part in (state,) if isinstance(state, Tensor) else state:
            if self.keeps_shape:
                rows.append(part)
            elif self.lanes is None:
                rows.append(part.reshape(-1))
            else:
                rows.append(part.reshape(self.lanes, math.prod(part.shape[1:])))
        return tuple(rows) if self.second_order or len(rows) == 1 else (torch.cat(rows, -1),)

    def unflatten(self, rows: tuple[Tensor, ...], times: tuple[int, ...] = ()) -> State:
        """Convert the flat tensors ``rows`` to a state in the structure and shapes of the user's state.

        With ``times=(T,)``, the tensors have a first dimension T and are converted to a trajectory.
        """
        shape = (*times, *self.template.shape)
        if self.second_order:
            return rows[0].reshape(shape), rows[1].reshape(shape)
        if isinstance(self.like, Tensor):
            return rows[0].reshape(shape)
        pieces: list[Tensor] = []
        begin = 0
        for part in self.like:
            size = part.numel() if self.lanes is None else math.prod(part.shape[1:])
            pieces.append(rows[0].narrow(-1, begin, size).reshape((*times, *part.shape)))
            begin += size
        return tuple(pieces)

    def __call__(self, t: Tensor, row: Tensor) -> Tensor:
        """Return F of a second-order term or y' of a first-order term, in the shape and dtype of ``row``.

        The call counts as one function evaluation. Raise ValueError if the field changes ``row`` in place.
        """
        self.counter.add("evaluation")
        version = -1
        if self.traced or row.is_inference():
            row = row.clone()  # traced and inference tensors have no version counter
        else:
            version = row._version
        with self.in_autocast():
            if self.second_order:
                h = row if row.shape == self.template.shape else row.view(self.template.shape)
                f = self.field(t, (h, torch.zeros_like(h)))[1] if self.calls_field else self.inner.force(t, h)
                f = f if f.dtype == h.dtype else cast(f, h)
            else:
                state = self.unflatten((row,))
                (f,) = self.flatten(like(self.field(t, state), state))
        if version >= 0 and row._version != version:
            fix = "leave inplace=True out of its first layer, or let func work on h.clone()"
            raise ValueError(f"func changes its input in place, which is the solver's state. Fix: {fix}.")
        if not self.traced:  # f may write every value to the same tensor, but solvers keep some values
            before = self.address
            try:
                self.address = f.data_ptr()
            except RuntimeError:  # a tensor of torch.func has no address
                self.address = 0
            f = f.clone() if self.address and before in (None, self.address) else f
        return f if f.shape == row.shape else f.reshape(row.shape)

    def stages(self, times: Sequence[Any]) -> Sequence[Tensor]:
        """Convert times to tensors with which the field can be called, in the dtype and on the device of the state.

        Each time is a scalar, or has one entry per sample and is converted to (batch, 1, ...).
        """
        like = self.template
        stages = torch.stack(list(times)) if isinstance(times[0], Tensor) else torch.from_numpy(np.stack(times))
        stages = stages.to(like.device, like.dtype)
        if stages.dim() > 1:
            stages = stages.reshape(*stages.shape, *[1] * (self.dims - 1))
        return stages.unbind(0)

    def trial(self, t: Tensor, row: Tensor) -> Tensor:
        """Return the value of the field, without a graph, at a time that the solve may not reach.

        A :class:`hbnode.Signal` in the field then returns NaN outside its samples instead of raising an error.
        """
        before, queries.is_trial = queries.is_trial, True
        try:
            with torch.no_grad():
                return self(t, row)
        finally:
            queries.is_trial = before

    def derivative(self, t: Tensor, rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the time derivatives of all tensors of the state ``rows``, such as (h', m').

        This call of the field does not count as a function evaluation.
        """
        state = self.unflatten(rows)
        with self.in_autocast():
            return self.flatten(like(self.field(t, state), state))


def materialize(field: Any, y0: State, t: Any) -> bool:
    """Initialize the lazy parameters of a field by evaluating it with ``y0`` at the first of the times ``t``.

    Returns:
        Whether the field had lazy parameters.
    """
    if not isinstance(field, nn.Module) or not any(map(nn.parameter.is_lazy, field.parameters())):
        return False
    first = torch.as_tensor(t[0], dtype=torch.float64).reshape(-1)[0]
    with torch.no_grad():
        field(first.to(y0 if isinstance(y0, Tensor) else y0[0]), y0)
    return True


def snapshot_of(field: Any, y0: State, t: Any) -> Snapshot:
    """Return the snapshot of a field at the start of a solve, after initializing its lazy parameters."""
    try:
        return Snapshot(field, for_backward=torch.is_grad_enabled())
    except ValueError:
        if not materialize(field, y0, t):
            raise
        return Snapshot(field)


class Snapshot:
    """The parameters, buffers, training modes and dropout masks of a field's modules during a solve.

    As a context manager, it restores them while a backward pass evaluates the field. Between the solve and the backward
    pass, the model may change its training mode, and ``torch.func.functional_call`` puts back the original parameters.
    If ``for_backward`` is False, parameters and buffers are not stored.
    """

    def __init__(self, field: Callable[..., Any], *, for_backward: bool = True) -> None:
        self.modes: list[tuple[nn.Module, bool]] = []
        self.slots: list[tuple[dict[str, Any], str, Tensor, int | None, Tensor | None]] = []  # see changed()
        self.needed: list[tuple[Tensor, bool]] = []
        self.dtypes: set[torch.dtype] = set()  # dtypes of the parameters
        self.masks: list[tuple[SolveDropout, dict[str, Tensor] | None]] = []
        self._before: list[Any] = []  # a stack, because contexts of the same snapshot may be nested
        for module in field.modules() if isinstance(field, nn.Module) else ():
            if isinstance(module, SolveDropout):  # an inner solve uses the masks of the outer solve
                self.masks.append((module, {} if module.solve is None else module.solve))
            elif isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                raise ValueError(
                    f"{type(module).__name__} is in training mode and draws a new mask in each evaluation of a solve. "
                    "Fix: hbnode.nn.SolveDropout(p) draws one mask for the whole solve; or move it out of func."
                )
            self.modes.append((module, module.training))
            parameters, buffers = module._parameters, module._buffers
            if isinstance(module, torch.jit.ScriptModule):  # its attribute _parameters is a copy
                parameters = dict(module.named_parameters(recurse=False))
                buffers = dict(module.named_buffers(recurse=False))
            for own in (parameters, buffers):
                for name, tensor in own.items():
                    if tensor is None:
                        continue
                    if own is parameters and tensor.is_floating_point():
                        self.dtypes.add(tensor.dtype)
                    if not for_backward:
                        continue
                    may_count = own is buffers and not isinstance(module, nn.modules.batchnorm._NormBase)
                    version = None if tensor.is_inference() else tensor._version
                    self.slots.append((own, name, tensor, version, _as_counter(tensor) if may_count else None))
                    if tensor.is_leaf:
                        self.needed.append((tensor, tensor.requires_grad))

    def changed(self) -> bool:
        """Return whether a parameter or buffer was replaced or changed in place after the snapshot.

        A buffer that counts calls of the field, as in FFJORD, may change. A buffer is taken for a counter if it holds
        integers, or if it is a scalar that changed by a whole number. It is removed from the snapshot, so that it also
        counts calls in the backward pass.
        """
        kept = []
        for slot in self.slots:
            own, name, tensor, version, before = slot
            now = own.get(name)
            if now is tensor and (version is None or tensor._version == version):
                kept.append(slot)
            elif before is None or now is None or now.shape != before.shape or bool(((now - before) % 1 != 0).any()):
                return True
        self.slots = kept
        return False

    @property
    def tensors(self) -> list[Tensor]:
        """A list of the stored parameters and buffers."""
        return [slot[2] for slot in self.slots]

    def __enter__(self) -> None:
        self._before.append((
            [(module, module.training) for module, _ in self.modes],
            [(own, name, own.get(name)) for own, name, *_ in self.slots],
            [(module, module.solve) for module, _ in self.masks],
            [(tensor, tensor.requires_grad) for tensor, _ in self.needed],
        ))  # fmt: skip
        _restore(self.modes, self.slots, self.masks, self.needed)
        queries.solves += 1

    def __exit__(self, *error: Any) -> None:
        queries.solves -= 1
        _restore(*self._before.pop())


def _as_counter(buffer: Tensor) -> Tensor | None:
    """Return the current value of a buffer if it may count calls of the field, else None."""
    if buffer.is_floating_point():
        return None if buffer.dim() else buffer.clone()
    return None if buffer.is_complex() or buffer.dtype == torch.bool else buffer


def _restore(modes: Sequence[Any], slots: Sequence[Any], masks: Sequence[Any], needed: Sequence[Any]) -> None:
    for module, mode in modes:
        if module.training != mode:
            module.training = mode
    for own, name, tensor, *_ in slots:
        if own.get(name) is not tensor:
            own[name] = tensor
    for module, masks_of_solve in masks:
        module.solve = masks_of_solve
    for tensor, needs_gradient in needed:
        if tensor.requires_grad != needs_gradient:
            tensor.requires_grad_(needs_gradient)


@contextmanager
def solving(snapshot: Snapshot, device_type: str) -> Iterator[None]:
    """Return a context for a solve, which sets the dropout masks of the snapshot and disables autocast.

    The field itself is evaluated under the user's autocast. Inside the context, a :class:`hbnode.Signal` on a GPU
    returns NaN at times outside its samples. The error of the failed solve then names such a time.
    """
    before = [(module, module.solve) for module, _ in snapshot.masks]
    _restore((), (), snapshot.masks, ())
    in_autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    autocast = torch.autocast(device_type, enabled=False) if in_autocast else nullcontext()
    queries.solves += 1
    try:
        with autocast:
            yield
    finally:
        queries.solves -= 1
        if not queries.solves:
            queries.unchecked.clear()
        _restore((), (), before, ())


def unwrap_compiled(field: Any) -> Any:
    while hasattr(field, "_orig_mod"):
        field = field._orig_mod
    return field


def is_heavy_ball(field: Callable[..., Any], *kinds: type) -> bool:
    """Return whether a field is an instance of ``kinds`` and a call of it computes only the equation of its class.

    Return False for a field inside DistributedDataParallel, because only calls of the wrapper synchronise gradients.
    """
    return isinstance(unwrap_compiled(field), kinds) and change_of_call(field) is None


def change_of_call(field: Callable[..., Any]) -> str | None:
    """Return why a call of a heavy-ball field may do more than compute its equation, or None if it does not.

    Second-order methods evaluate ``func`` without calling the field, so hooks or an overridden ``forward`` would not
    run.
    """
    inner = unwrap_compiled(field)
    if type(inner).forward not in _FORWARDS:
        return f"{type(inner).__name__} has a forward of its own"
    if type(inner).friction is not HBNODE.friction:
        return f"{type(inner).__name__} has a friction of its own"
    for name in ("forward", "friction"):
        if name in inner.__dict__:
            return f"its {name} was replaced"
    if type(inner).__call__ is not nn.Module.__call__:
        return f"{type(inner).__name__} has a __call__ of its own"
    for hooks in _HOOKS:
        if getattr(field, hooks) or getattr(inner, hooks):
            return "it has hooks"
    return None
