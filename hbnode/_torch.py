"""What hbnode asks of torch beside its public functions; tests/test_torch.py checks that the private ones exist.

Whether a graph is recorded, a transform of torch.func, forward mode or a backward pass is running; the state of random
number generators; autocast; torch's fused recurrent layers; the allocator; constants of a module that are not cast.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_DOUBLE_BACKWARD = ContextVar("double_backward", default=False)
_LARGEST_BLOCK = 31 * 2**20  # bytes; glibc follows freed blocks of up to 32 MiB
_keeps_memory = False


def is_tracing() -> bool:
    """Return whether operations are recorded by torch.compile, torch.export or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def may_look() -> bool:
    """Return whether Python may look at the values of tensors: no graph is recorded, and no transform of torch.func
    runs.
    """
    return not is_tracing() and torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def is_exporting() -> bool:
    """Return whether torch.export records a graph that will be run without Python; not known before torch 2.7."""
    return hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting()


@contextmanager
def checking_shapes() -> Iterator[None]:
    """Without the warnings of torch.jit.trace that a shape is compared, which hbnode does to refuse wrong ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module="hbnode")
        yield


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """:func:`torch.compiler.disable`, which imports half of torch, imported when torch.compile first needs it."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():
            from hbnode import _untraced

            return _untraced.run(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def double_backward_enabled() -> bool:
    """Return whether scans, solves and attention take their plain form; their own backward passes are not functions."""
    return _DOUBLE_BACKWARD.get()


@contextmanager
def double_backward() -> Iterator[None]:
    """Ask for it, for all that is evaluated inside."""
    token = _DOUBLE_BACKWARD.set(True)
    try:
        yield
    finally:
        _DOUBLE_BACKWARD.reset(token)


def is_transformed() -> bool:
    """Return whether a transform or forward-mode differentiation is running, which need a gradient by the graph."""
    return torch._C._functorch.get_dynamic_layer_stack_depth() > 0 or torch.autograd.forward_ad._current_level >= 0


def has_tangent(x: Tensor) -> bool:
    """Return whether a derivative with respect to a tensor is taken in forward mode."""
    return (
        torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(x).tangent is not None
    )


def is_vmapped(x: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(x)


def is_batched(x: Tensor) -> bool:
    """Return whether a tensor stands for many, as a gradient does under ``grad(..., is_grads_batched=True)`` of
    autograd.
    """
    return torch._C._functorch.is_legacy_batchedtensor(x)


def backward_pass() -> int:
    """Return the number of the backward pass that the autograd engine runs in this thread, or -1 outside of any."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Return whether the backward pass that runs in this thread was asked to keep the graph; False where torch cannot
    say.
    """
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # not yet in torch 2.4
    return asked is not None and asked()


def sequence_number(node: Node | None) -> int:
    """Return the number of a node of the graph: later nodes of a thread have larger ones."""
    assert node is not None
    return node._sequence_nr()


def has_global_hooks() -> bool:
    """Return whether a hook is registered for the calls of all modules."""
    module = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def is_script_method(function: object) -> bool:
    return isinstance(function, torch._C.ScriptMethod)


def may_have_compiled() -> bool:
    """Return whether anything can have been compiled: the compiler, slow to import, has been imported."""
    return "torch._dynamo" in sys.modules


def make_parametrized(module: torch.nn.Module) -> None:
    """Give a module that was pickled the class that torch makes for a parametrized one, with its properties."""
    parametrize = torch.nn.utils.parametrize
    parametrize._inject_new_class(module)
    for name in module.get_submodule("parametrizations")._modules:
        parametrize._inject_property(module, name)


def plain(x: Tensor) -> Tensor:
    """Return the values of a tensor without what the transforms put around it; vmap's dimensions come in front."""
    x = x.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        dim = torch._C._functorch.maybe_get_bdim(x) if torch._C._functorch.is_batchedtensor(x) else -1
        x = torch._C._functorch.get_unwrapped(x)
        x = x.movedim(dim, 0) if dim > 0 else x
    return x


def to_numpy(x: Tensor) -> np.ndarray:
    """Return the values of a tensor in float64 on the host, as :func:`plain` gives them."""
    x = plain(x)
    with torch._C._DisableFuncTorch():
        return x.double().cpu().numpy()


def numbers(x: Tensor) -> list[Any]:
    """Return the values of a tensor (n,) as Python numbers; not every version of torch has ``tolist`` under the
    transforms.
    """
    return [value.item() for value in x.unbind()]


@contextmanager
def refusing(what: str, fix: str) -> Iterator[None]:
    """Say what does not work under a transform, in place of the transform's own error about its tensors."""
    try:
        yield
    except RuntimeError as error:
        if is_transformed() and any(word in str(error) for word in ("vmap", "functorch", "data pointer")):
            raise ValueError(f"{what} does not work under this transform of torch.func. Fix: {fix}.") from error
        raise


def needs_reference() -> bool:
    """Return whether only operations that autograd knows will do: a graph is recorded, torch.func or forward mode
    transforms what is computed, or its second derivatives are wanted.
    """
    return not may_look() or is_transformed() or double_backward_enabled()


def fast_form(reference: Callable[..., Any], vjp: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorate the fast form of a computation, which comes with its own VJP; it is called as its reference is.

    The reference runs in its place where :func:`needs_reference`. A backward pass that is to be differentiated again,
    with ``create_graph=True``, or that takes a batch of gradients, differentiates the reference.

    Arguments:
        reference: ``reference(options, *tensors)`` gives a tuple of outputs. ``options`` is what is no tensor; tensors
            and outputs may be None.
        vjp: ``vjp(options, tensors, residuals, grads, needed)`` gives the gradients of the tensors, None for those that
            are not ``needed``. A gradient of an output is None where there is none.

    Returns:
        A decorator of ``forward(options, keep, *tensors)``, which gives the outputs and, as a tuple of tensors, the
        residuals: what its VJP needs beside the tensors. Without ``keep`` there is no backward pass.
    """

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        form = _Form(reference, forward, vjp)

        @functools.wraps(forward)
        def call(options: Any, *tensors: Tensor | None) -> Any:
            if needs_reference():
                return reference(options, *tensors)
            keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
            return _FastForm.apply(form, options, keep, *tensors) if keep else forward(options, keep, *tensors)[0]

        return call

    return decorate


class _Form(NamedTuple):
    reference: Callable[..., Any]
    forward: Callable[..., Any]
    vjp: Callable[..., Any]


class _FastForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, options: Any, keep: bool, *tensors: Tensor | None) -> Any:
        outputs, residuals = form.forward(options, keep, *tensors)
        ctx.form, ctx.options, ctx.count = form, options, len(tensors)
        ctx.save_for_backward(*tensors, *residuals)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint allows no second look
        tensors, residuals = saved[: ctx.count], saved[ctx.count :]
        needed = ctx.needs_input_grad[3:]
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None,) * (3 + ctx.count)
        with no_autocast(given[0]):  # as the forward pass runs
            if torch.is_grad_enabled() or any(is_batched(grad) for grad in given):
                found = reference_vjp(ctx.form.reference, ctx.options, tensors, grads, needed)
            else:
                found = ctx.form.vjp(ctx.options, tensors, residuals, grads, needed)
        return None, None, None, *found


def reference_vjp(
    reference: Callable[..., Any],
    options: Any,
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients by autograd through the reference, which can be differentiated again where that is asked for."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():  # a tensor that is given twice gets a gradient for each
        views = [None if x is None else x.view_as(x) for x in tensors]
        outputs = reference(options, *views)
    pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if y is not None and dy is not None]
    pairs = [(y, dy.to(y.dtype)) for y, dy in pairs if y.requires_grad]
    leaves = [x for x, is_needed in zip(views, needed, strict=True) if x is not None and is_needed]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], leaves, [dy for _, dy in pairs], create_graph=again, allow_unused=True
        )
    )
    return tuple(next(found) if is_needed else None for is_needed in needed)


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is on for the device of a tensor; the meta device has none."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


@functools.lru_cache(maxsize=16)
def cpu_has_layer(name: str, dtype: torch.dtype) -> bool:
    """Return whether torch's recurrent layer runs on this CPU under autocast, which not every CPU supports."""
    with (
        torch.random.fork_rng(devices=[]),  # the layer draws its weights
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", dtype=dtype, cache_enabled=False),
    ):
        kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(name, torch.nn.RNN)
        layer = kind(1, 1, device="cpu", dtype=torch.float32)  # float64, the default of some, would not be cast
        try:
            layer(torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32))[0].sum().backward()
        except RuntimeError:
            return False
    return True


def fused_layer(
    name: str, x: Tensor, state: Tensor | tuple[Tensor, Tensor], weights: list[Tensor], sizes: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Run torch's recurrent layer on given weights: one layer in one direction, as torch.nn.LSTM calls it.

    The weights may lie anywhere; cuDNN's warning that they are not in one chunk of memory is silenced.

    Arguments:
        name: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        x: (T, batch, n), or the data of a PackedSequence.
        state: h, or h and c of an LSTM, each (1, batch, hidden_size).
        weights: W_ih, W_hh, and b_ih and b_hh if there are any.
        sizes: batch sizes of a PackedSequence.

    Returns:
        The output, and the last h, or the last h and c.
    """
    rest = (weights, len(weights) == 4, 1, 0.0, torch.is_grad_enabled(), False)
    layer, warns = getattr(torch._VF, name), x.is_cuda and may_look()
    with warnings.catch_warnings() if warns else nullcontext():
        if warns:
            warnings.filterwarnings("ignore", message=".*single contiguous chunk.*")
        return layer(x, state, *rest, False) if sizes is None else layer(x, sizes, state, *rest)


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Return the state of the generators that an evaluation on the device may draw from."""
    states = (torch.get_rng_state(),)
    own = None if device.type == "cpu" else getattr(torch, device.type, None)
    return (*states, own.get_rng_state(device)) if own is not None and hasattr(own, "get_rng_state") else states


@contextmanager
def set_random_state(states: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Draw from the given state, and put the generators back where they were; None leaves them alone."""
    if states is None:
        yield
        return
    now = random_state(device)
    try:
        _put_random_state(states, device)
        yield
    finally:
        _put_random_state(now, device)


def _put_random_state(states: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        getattr(torch, device.type).set_rng_state(states[1], device)


def keep_freed_memory(device: torch.device) -> None:
    """Let glibc keep memory that is freed, once for the process, for work on the CPU.

    It gives memory back to the system block by block, until a large block has been freed: then it raises the sizes from
    which it does, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), to that of the block and twice that. Before, a
    pass whose intermediate values come and go by megabytes can spend half of its time in page faults. Here a block of
    31 MiB is taken and freed, untouched. It changes nothing for other allocators, nor for thresholds that the
    environment sets.
    """
    global _keeps_memory
    if device.type == "cpu" and not _keeps_memory:
        _keeps_memory = True
        torch.UntypedStorage(_LARGEST_BLOCK)  # which deterministic mode does not fill, as it does tensors


class KeepsConstants(nn.Module):
    """Keeps Python floats and float64 tensors as constants: in the ``state_dict``, but neither cast nor learned.

    A constant is not a buffer, because ``.half()`` or ``.float()`` would round it. Its attribute holds a float, or a
    tensor on the CPU; of a tensor there is a copy on the module's device, always float64. Version 1 of a ``state_dict``
    lacks the constants: it is loaded with a warning, and the module keeps its own.
    """

    _version = 2
    defaults: ClassVar[dict[str, float]] = {}  # what version 1 stood for, where that goes without saying
    renamed: ClassVar[dict[str, str]] = {}  # keys of version 1

    def constants(self) -> dict[str, str]:
        """Return the attribute of each constant, by its key in the ``state_dict``."""
        return {}

    def keep(self, attribute: str, value: float | Tensor) -> None:
        """Set a constant, and the copy of a tensor."""
        setattr(self, attribute, value)
        if isinstance(value, Tensor):
            before = self._buffers.get(attribute + "_there")
            copy = value.to(value.device if before is None else before.device, copy=True)
            self.register_buffer(attribute + "_there", copy, persistent=False)
            self.__dict__[attribute + "_copy"] = copy

    def kept(self, attribute: str) -> float | Tensor:
        """Return a constant, on the module's device."""
        there = self._buffers.get(attribute + "_there")  # which functional_call may have lent
        return getattr(self, attribute) if there is None else there

    def on_host(self, attribute: str, value: float | Tensor) -> float | Tensor:
        """Return the constant on the host, which waits for no device, if ``value`` is its copy; else ``value``."""
        return getattr(self, attribute) if value is self.__dict__.get(attribute + "_copy") else value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsConstants:
        super()._apply(fn, recurse)
        for attribute in self.constants().values():
            self.keep(attribute, getattr(self, attribute))  # a cast must not round it, nor to_empty lose it
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, attribute in self.constants().items():
            destination[prefix + name] = _tensor(getattr(self, attribute)).clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        constants = {prefix + name: attribute for name, attribute in self.constants().items()}
        for before, name in self.renamed.items():
            if prefix + before in state_dict and prefix + name in constants:
                state_dict = {**state_dict, prefix + name: state_dict[prefix + before]}
                del state_dict[prefix + before]
        others = {key: value for key, value in state_dict.items() if key not in constants}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        for key, attribute in constants.items():
            if key in state_dict:
                self._load_constant(key, attribute, state_dict[key], error_msgs)
            elif (local_metadata.get("version") or 1) >= 2:
                missing_keys.append(key)
            elif self.defaults.get(attribute) != getattr(self, attribute):
                warnings.warn(
                    f"the state_dict does not hold the constant {key!r}: it was saved by an earlier version, or by "
                    "another module. "
                    f"{type(self).__name__} keeps its own, {_tensor(getattr(self, attribute)).tolist()}. "
                    "Fix: make sure that it is the one of the training, and save the state_dict again.",
                    stacklevel=2,
                )

    def _load_constant(self, key: str, attribute: str, value: Tensor, error_msgs: list[str]) -> None:
        value, own = torch.as_tensor(value).detach(), _tensor(getattr(self, attribute))
        if value.shape != own.shape:
            error_msgs.append(
                f"the constant {key!r} has shape {tuple(value.shape)} in the state_dict and {tuple(own.shape)} here. "
                "Fix: make the module with constants of the shape of the checkpoint's."
            )
        elif not value.is_meta and not torch.equal(value.cpu(), own.to(value.dtype)):  # equal if rounded: keep our own
            value = value.to("cpu", torch.float64)
            self.keep(attribute, value.clone() if value.dim() else value.item())


def _tensor(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")
