"""Helpers for torch.

All private functions of torch that hbnode needs are called in this module, and tests/test_torch.py checks that they
exist. The helpers query tracing, torch.func transforms and backward passes. They also manage random number generators,
autocast, fused recurrent layers, the CPU allocator and the constants of modules.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_DOUBLE_BACKWARD = ContextVar("double_backward", default=False)
_LARGEST_BLOCK = 31 * 2**20  # bytes; glibc adapts its thresholds to freed blocks of up to 32 MiB
_keeps_memory = False


def is_tracing() -> bool:
    """Return whether torch.compile, torch.export or torch.jit.trace records the program."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def may_look() -> bool:
    """Return whether Python code may read the values of tensors.

    It may not while torch.compile, torch.export or torch.jit.trace records the program, or under torch.func transforms.
    """
    return not is_tracing() and torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Return a context that replaces inference mode by ``torch.no_grad()``, in which torch.func works.

    In inference mode torch.func returns zeros, at least until torch 2.8. Outside inference mode nothing changes.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def refuse_export(what: str, fix: str) -> None:
    """Raise ValueError while torch.export or torch.jit.trace records the program, which cannot contain ``what``.

    ``what`` names an operation, and ``fix`` another way, for the error message.
    """
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        raise ValueError(f"torch.export and torch.jit.trace cannot record {what}. Fix: {fix}.")


def exports_any(length: int) -> bool:
    """Return whether torch.export records the program with a dynamic dimension of this ``length``.

    The exported program must then work for other lengths, too.
    """
    if not torch.compiler.is_exporting():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imported only here, because it imports sympy

    return not has_static_value(length)


def while_loop(goes_on: Callable[..., Tensor], body: Callable[..., Any], carried: tuple[Tensor, ...]) -> Any:
    """Record a loop in an exported program, and return the tensors after the loop.

    The loop starts with the tensors ``carried``. While ``goes_on(*carried)`` is True, it replaces them by
    ``body(*carried)``.
    """
    from torch._higher_order_ops.while_loop import while_loop  # imported only here, because only export needs it

    return while_loop(goes_on, body, carried)


_EAGER_LOCK, _EAGER = threading.Lock(), ExitStack()  # the stance of torch.compile, which all threads share
_EAGER_COUNT = 0


@contextmanager
def in_eager_mode() -> Iterator[None]:
    """Run compiled functions eagerly, so that their gradients have a complete autograd graph.

    Contexts may overlap, also between threads: the first one sets torch's stance, and the last one restores it.
    """
    global _EAGER_COUNT
    with _EAGER_LOCK:
        if not _EAGER_COUNT and may_have_compiled():
            _EAGER.enter_context(torch.compiler.set_stance("force_eager"))
        _EAGER_COUNT += 1
    try:
        yield
    finally:
        with _EAGER_LOCK:
            _EAGER_COUNT -= 1
            if not _EAGER_COUNT:
                _EAGER.close()


@contextmanager
def checking_shapes() -> Iterator[None]:
    """Return a context without the warnings of torch.jit.trace about hbnode's checks of shapes.

    torch warns that the traced program does not repeat these checks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning, module="hbnode")
        yield


def untraced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``function`` as a function that torch.compile runs without compiling it.

    torch.compiler.disable does the same, but its import is slow; here it is imported only if torch.compile is used.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():
            from hbnode import _untraced

            return _untraced.run(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def double_backward_enabled() -> bool:
    """Return whether the code runs inside a :func:`double_backward` context.

    Fused implementations, which have no second derivatives, must not be used there.
    """
    return _DOUBLE_BACKWARD.get()


@contextmanager
def double_backward() -> Iterator[None]:
    """Return a context in which all operations have second derivatives, because no fused implementation is used."""
    token = _DOUBLE_BACKWARD.set(True)
    try:
        yield
    finally:
        _DOUBLE_BACKWARD.reset(token)


def is_transformed() -> bool:
    """Return whether a torch.func transform or forward-mode differentiation without torch.func is running.

    Transforms of other threads do not count.
    """
    if torch._C._functorch.get_dynamic_layer_stack_depth() > 0:
        return True
    is_forward = torch.autograd.forward_ad._current_level >= 0  # a state that all threads share
    return is_forward and not torch._functorch.eager_transforms.JVP_NESTING


def has_tangent(x: Tensor) -> bool:
    return (
        torch.autograd.forward_ad._current_level >= 0 and torch.autograd.forward_ad.unpack_dual(x).tangent is not None
    )


def is_differentiated(x: object) -> bool:
    """Return whether ``x`` is a tensor that requires a gradient or has a forward-mode tangent."""
    return isinstance(x, Tensor) and (x.requires_grad or has_tangent(x))


def is_vmapped(x: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(x)


def is_batched(x: Tensor) -> bool:
    """Return whether the gradient ``x`` is a batch of gradients (torch.autograd.grad with is_grads_batched=True)."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def backward_pass() -> int:
    """Return the id of the backward pass that runs in this thread, or -1 if none runs."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Return whether the running backward pass has ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def sequence_number(node: Node | None) -> int:
    """Return the sequence number of an autograd node; later nodes of a thread have larger numbers."""
    assert node is not None
    return node._sequence_nr()


def new_sequence_number() -> int:
    """Return a sequence number larger than those of all existing autograd nodes of this thread."""
    return sequence_number(torch.zeros((), requires_grad=True).clone().grad_fn)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which every TorchDispatchMode, such as a FLOP counter, is disabled."""
    return torch.utils._python_dispatch._disable_current_modes()


def recompile_limit(most: int) -> AbstractContextManager[None]:
    """Return a context in which torch.compile compiles at most ``most`` graphs per function."""
    return torch._dynamo.config.patch(recompile_limit=most)


def is_recompile_limit(error: Exception) -> bool:
    """Return whether ``error`` was raised because a compiled function needs more graphs than the recompile limit."""
    return isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit)


def saved_tensors(node: Node) -> list[Any]:
    """Return the tensors that an autograd node stores for backward, as ``SavedTensor`` objects, which accept hooks."""
    values = [getattr(node, name) for name in _saved_names(type(node))]
    return [one for value in values for one in (value if isinstance(value, (list, tuple)) else (value,))]


@functools.lru_cache(maxsize=1024)
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def has_global_hooks() -> bool:
    """Return whether a forward hook or forward pre-hook is registered for all modules."""
    module = torch.nn.modules.module
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def is_script_method(function: object) -> bool:
    return isinstance(function, torch._C.ScriptMethod)


def may_have_compiled() -> bool:
    """Return whether torch.compile may have been used, judged by whether torch._dynamo has been imported."""
    return "torch._dynamo" in sys.modules


def make_parametrized(module: torch.nn.Module) -> None:
    """Give an unpickled module the class that torch creates for modules with torch.nn.utils.parametrize.

    The class has a property for each parametrized tensor. It cannot be pickled.
    """
    parametrize = torch.nn.utils.parametrize
    parametrize._inject_new_class(module)
    for name in module.get_submodule("parametrizations")._modules:
        parametrize._inject_property(module, name)


def plain(x: Tensor) -> Tensor:
    """Return the detached tensor inside the wrappers that torch.func puts around ``x``.

    Dimensions that torch.func.vmap maps, and hides, become the first dimensions.
    """
    x = x.detach()
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        dim = torch._C._functorch.maybe_get_bdim(x) if torch._C._functorch.is_batchedtensor(x) else -1
        x = torch._C._functorch.get_unwrapped(x)
        x = x.movedim(dim, 0) if dim > 0 else x
    return x


def to_numpy(x: Tensor) -> np.ndarray:
    """Return the values of a tensor as a float64 array on the CPU, without the wrappers of torch.func."""
    if x.is_meta and type(x) is Tensor:
        raise ValueError("numbers are needed here, and the device meta stores none. Fix: device='cpu'.")
    x = plain(x)
    with torch._C._DisableFuncTorch():
        return x.to("cpu", torch.float64).numpy()


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype of a device: float64, or float32 on Apple's MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on a device; convert float64 to float32 if the device has no float64."""
    return x.to(device, widest(device) if x.dtype == torch.float64 else x.dtype)


def root_mean_square(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the root mean square over the dimensions ``dims``, computed so that no square overflows.

    Squares are summed in float64. On a device without float64 they are summed in float32, after division of x by its
    largest magnitude.
    """
    dtype = widest(x.device)
    norm = torch.linalg.vector_norm(x, dim=dims, dtype=dtype)
    count = max(x.numel() // max(norm.numel(), 1), 1)
    if dtype == torch.float64 or not x.numel():
        return norm / math.sqrt(count)
    x = x.to(dtype)
    largest = x.abs().amax(tuple(dims), keepdim=True)
    largest = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return torch.linalg.vector_norm(x / largest, dim=dims) / math.sqrt(count) * largest.squeeze(tuple(dims))


def numbers(x: Tensor) -> list[Any]:
    """Return the values of a tensor (n,) as a list of Python numbers, also under torch.func, where ``tolist`` fails."""
    return [value.item() for value in x.unbind()]


@contextmanager
def refusing(what: str, fix: str) -> Iterator[None]:
    """Return a context that replaces errors of torch.func by a ValueError that names the operation and the ``fix``."""
    try:
        yield
    except RuntimeError as error:
        if is_transformed() and any(word in str(error) for word in ("vmap", "functorch", "data pointer")):
            raise ValueError(f"{what} does not work under this transform of torch.func. Fix: {fix}.") from error
        raise


def needs_reference() -> bool:
    """Return whether ordinary torch operations must replace a fused implementation.

    They must while torch.compile, torch.export or torch.jit.trace records the program, under a torch.func transform,
    in forward-mode differentiation, and inside :func:`double_backward`.
    """
    return not may_look() or is_transformed() or double_backward_enabled()


def fast_form(reference: Callable[..., Any], vjp: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for a fused implementation with a hand-written VJP (vector-Jacobian product).

    The decorated function is called like ``reference``. It runs the reference if :func:`needs_reference` is true. With
    ``create_graph=True`` or a batch of gradients, the backward pass differentiates the reference.

    Arguments:
        reference: ``reference(options, *tensors)`` returns a tuple of outputs. ``options`` holds the arguments that are
            not tensors. Tensors and outputs may be None.
        vjp: ``vjp(options, tensors, residuals, grads, needed)`` returns the gradients of the tensors, or None for a
            tensor whose entry in ``needed`` is False. An entry of ``grads`` is None if the output has no gradient.

    Returns:
        A decorator for a function ``forward(options, needs_grad, *tensors)``. This function returns a tuple of outputs
        and a tuple of residuals, tensors that are saved for the VJP. If ``needs_grad`` is False, no backward pass
        follows.
    """

    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        form = _Form(reference, forward, vjp)

        @functools.wraps(forward)
        def call(options: Any, *tensors: Tensor | None) -> Any:
            if needs_reference():
                return reference(options, *tensors)
            needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
            return _FastForm.apply(form, options, *tensors) if needs_grad else forward(options, False, *tensors)[0]

        return call

    return decorate


class _Form(NamedTuple):
    reference: Callable[..., Any]
    forward: Callable[..., Any]
    vjp: Callable[..., Any]


class _FastForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: _Form, options: Any, *tensors: Tensor | None) -> Any:
        outputs, residuals = form.forward(options, True, *tensors)
        ctx.form, ctx.options, ctx.count = form, options, len(tensors)
        ctx.save_for_backward(*tensors, *residuals)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # torch.utils.checkpoint allows only one access to saved tensors
        tensors, residuals = saved[: ctx.count], saved[ctx.count :]
        needed = ctx.needs_input_grad[2:]
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None,) * (2 + ctx.count)
        with no_autocast(given[0]):  # the forward pass also runs without autocast
            if torch.is_grad_enabled() or any(is_batched(grad) for grad in given):
                found = reference_vjp(ctx.form.reference, ctx.options, tensors, grads, needed)
            else:
                found = ctx.form.vjp(ctx.options, tensors, residuals, grads, needed)
        return None, None, *found


def operator_form(
    name: str, options: str, tensors: str, counts: tuple[int, int], forward: Any, fake: Any, vjp: Any,
    reference: Any = None,
) -> Callable[..., Any]:  # fmt: skip
    """Register a function and its VJP as a custom operator, which torch.compile and torch.export do not trace.

    Tracing the function would unroll its loop over time, and the graph would be valid for one length only.

    Arguments:
        name: name of the operator in the namespace ``hbnode``.
        options: the declarations of the options in the operator's schema, each followed by a comma.
        tensors: the declarations of the tensors in the schema, separated by commas.
        counts: the number of outputs and the number of residuals, each at least 1.
        forward: ``forward(options, keep, *tensors)`` returns the outputs and the residuals, which share no memory. If
            ``keep`` is False, the residuals may be empty tensors.
        fake: a function like ``forward`` that works on fake tensors, which have no values.
        vjp: as in :func:`fast_form`. It must compute the residuals itself if they are empty.
        reference: as in :func:`fast_form`. With None, ``create_graph=True`` raises an error.

    Returns:
        A function that is called as ``call(options, *tensors)`` and returns the outputs.
    """
    fixed, outputs, results = options.count(","), counts[0], ", ".join(["Tensor"] * sum(counts))

    def run(function: Any, *given: Any) -> tuple[Tensor, ...]:
        with no_autocast(given[fixed + 1]):
            found, residuals = function(given[:fixed], *given[fixed:])
        return *found, *residuals

    def run_vjp(*given: Any) -> list[Tensor]:
        *rest, residuals, grads, needed = given
        with no_autocast(rest[fixed]):
            found = vjp(tuple(rest[:fixed]), rest[fixed:], residuals, grads, needed)
        pairs = zip(found, needed, strict=True)
        return [grad.contiguous() for grad, is_needed in pairs if is_needed and grad is not None]

    def fake_vjp(*given: Any) -> list[Tensor]:
        return [x.new_empty(x.shape) for x, is_needed in zip(given[fixed:-3], given[-1], strict=True) if is_needed]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options = inputs[:fixed]
        ctx.save_for_backward(*inputs[fixed + 1 :], *output[outputs:])

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved, needed = ctx.saved_tensors, list(ctx.needs_input_grad[fixed + 1 :])
        given, residuals = saved[: len(needed)], list(saved[len(needed) :])
        if reference is not None and torch.is_grad_enabled():  # the backward pass has create_graph=True
            found = iter(reference_vjp(reference, ctx.options, given, grads[:outputs], needed))
            return *(None,) * (fixed + 1), *found
        found = iter(operator_vjp(*ctx.options, *given, residuals, list(grads[:outputs]), needed))
        return *(None,) * (fixed + 1), *(next(found) if is_needed else None for is_needed in needed)

    custom_op: Any = functools.partial(torch.library.custom_op, mutates_args=())
    schema = f"({options}bool keep, {tensors}) -> ({results})"
    operator = custom_op(f"hbnode::{name}", functools.partial(run, forward), schema=schema)
    schema = f"({options}{tensors}, Tensor[] residuals, Tensor[] grads, bool[] needed) -> Tensor[]"
    operator_vjp = custom_op(f"hbnode::{name}_backward", run_vjp, schema=schema)
    operator.register_fake(functools.partial(run, fake))
    operator_vjp.register_fake(fake_vjp)
    operator.register_autograd(backward, setup_context=setup)

    def call(options: Any, *given: Tensor | None) -> Any:
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        # symbolic shapes of the residuals would constrain an exported program
        found = operator(*options, needs_grad and not torch.compiler.is_exporting(), *given)
        return found[:outputs]

    return call


def reference_vjp(
    reference: Callable[..., Any],
    options: Any,
    tensors: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``reference(options, *tensors)`` with respect to ``tensors``, computed by autograd.

    ``grads`` are the gradients with respect to its outputs, and ``needed`` tells which of the gradients are computed.
    The result has an autograd graph if gradients are enabled.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():  # views, because the same tensor may be passed as several arguments
        views = [None if x is None else x.view_as(x) for x in tensors]
        outputs = reference(options, *views)
    pairs = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if y is not None and dy is not None]
    pairs = [(y, dy.to(y.dtype)) for y, dy in pairs if y.requires_grad]
    leaves = [x for x, is_needed in zip(views, needed, strict=True) if x is not None and is_needed]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], leaves, [dy for _, dy in pairs], create_graph=create_graph, allow_unused=True
        )
    )
    return tuple(next(found) if is_needed else None for is_needed in needed)


def is_autocast(x: Tensor) -> bool:
    """Return whether autocast is enabled for the device of a tensor; the meta device has no autocast."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


@functools.lru_cache(maxsize=16)
def cpu_has_layer(name: str, dtype: torch.dtype) -> bool:
    """Return whether torch's recurrent layer ``name`` works on this CPU under autocast to ``dtype``, with gradients."""
    with (
        torch.random.fork_rng(devices=[]),  # the layer has random weights
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", dtype=dtype, cache_enabled=False),
    ):
        kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(name, torch.nn.RNN)
        layer = kind(1, 1, device="cpu", dtype=torch.float32)  # autocast ignores float64
        try:
            layer(torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32))[0].sum().backward()
        except RuntimeError:
            return False
    return True


def fused_layer(
    name: str, x: Tensor, state: Tensor | tuple[Tensor, Tensor], weights: list[Tensor], sizes: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Run torch's implementation of a unidirectional recurrent layer, such as torch.nn.LSTM, with given weights.

    cuDNN's warning about weights that do not lie in one block of memory is silenced.

    Arguments:
        name: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        x: (T, batch, n), or the data of a PackedSequence.
        state: the initial hidden state h, or the tuple (h, c) of an LSTM, each (1, batch, hidden_size).
        weights: W_ih, W_hh, and optionally b_ih and b_hh, as in torch.nn.LSTM.
        sizes: ``batch_sizes`` of a PackedSequence, if ``x`` is its data.

    Returns:
        The output, the final h and, for an LSTM, the final c.
    """
    rest = (weights, len(weights) == 4, 1, 0.0, torch.is_grad_enabled(), False)
    layer, warns = getattr(torch._VF, name), x.is_cuda and may_look()
    with warnings.catch_warnings() if warns else nullcontext():
        if warns:
            warnings.filterwarnings("ignore", message=".*single contiguous chunk.*")
        return layer(x, state, *rest, False) if sizes is None else layer(x, sizes, state, *rest)


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """Return a tuple with the states of the random number generators of the CPU and, if it has one, of ``device``."""
    states = (torch.get_rng_state(),)
    own = None if device.type == "cpu" else getattr(torch, device.type, None)
    return (*states, own.get_rng_state(device)) if own is not None and hasattr(own, "get_rng_state") else states


@contextmanager
def set_random_state(states: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Set the random number generators to ``states`` inside the context; None leaves them unchanged.

    ``states`` comes from :func:`random_state`. The previous states are restored when the context ends.
    """
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
    """Make glibc reuse freed memory instead of returning it to the system, if ``device`` is a CPU.

    glibc returns freed memory to the system if it exceeds the thresholds M_MMAP_THRESHOLD and M_TRIM_THRESHOLD, see
    mallopt(3). A pass with large temporary tensors can then spend half of its time in page faults. When glibc frees a
    block, it raises M_MMAP_THRESHOLD to the size of the block and M_TRIM_THRESHOLD to twice the size. Therefore this
    function frees a block of 31 MiB, once per process. It has no effect on other allocators, or if environment
    variables set the thresholds.
    """
    global _keeps_memory
    if device.type == "cpu" and not _keeps_memory:
        _keeps_memory = True
        torch.UntypedStorage(_LARGEST_BLOCK)  # not a tensor, which deterministic mode would fill


class ModuleWithConstants(nn.Module):
    """A module that stores constants, Python floats or float64 tensors, in its ``state_dict``.

    Constants are not buffers, because ``.half()`` or ``.float()`` would round buffers. The attribute of a constant
    holds a float or a tensor on the CPU. For a tensor, the module also has a float64 copy on its device.

    A constant tensor that requires a gradient belongs to another module. It is stored unchanged, and is not part of the
    ``state_dict``. The key of a constant in the ``state_dict`` is the name of its attribute without the leading
    underscore. ``torch.func.functional_call`` replaces constants by these keys.
    """

    def constants(self) -> dict[str, str]:
        """Return a dict that maps the key of each constant in the ``state_dict`` to the name of its attribute."""
        return {}

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_buffers", {}).get(name, 0) is None and getattr(self, name) is not None:
            object.__setattr__(self, name, value)  # torch expects a buffer of this name, but it is a constant
        else:
            super().__setattr__(name, value)

    def set_constant(self, attribute: str, value: float | Tensor, device: torch.device | None = None) -> None:
        """Set the constant ``attribute`` to ``value``.

        A tensor is also copied to ``device``, by default to the device of the previous copy.
        """
        self.__dict__[attribute] = value  # setattr would register another module's parameter
        self._buffers.setdefault(attribute.lstrip("_"), None)  # functional_call stores its replacement there
        if isinstance(value, Tensor) and not is_differentiated(value):
            before = self._buffers.get(attribute + "_on_device")
            device = device or (value.device if before is None else before.device)
            copy = to_device(value.clone(), device)
            self.register_buffer(attribute + "_on_device", copy, persistent=False)
            self.__dict__[attribute + "_copy"] = copy

    def own_constants(self) -> dict[str, str]:
        """Return a dict like :meth:`constants`, without the constants that require a gradient."""
        constants = self.constants().items()
        return {name: attribute for name, attribute in constants if not is_differentiated(getattr(self, attribute))}

    def get_constant(self, attribute: str) -> float | Tensor:
        """Return the constant ``attribute`` as a float or as a tensor on the module's device.

        If torch.func.functional_call replaces the constant, return the replacement.
        """
        if (given := self._buffers.get(attribute.lstrip("_"))) is not None:
            return given
        on_device = self._buffers.get(attribute + "_on_device")  # functional_call may have replaced it
        return getattr(self, attribute) if on_device is None else on_device

    def host_constant(self, attribute: str, value: float | Tensor) -> float | Tensor:
        """Return the CPU tensor of the constant ``attribute`` if ``value`` is its copy on the device, else ``value``.

        Reading the CPU tensor does not synchronise a GPU.
        """
        return getattr(self, attribute) if value is self.__dict__.get(attribute + "_copy") else value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleWithConstants:
        attributes = self.own_constants().values()
        copies = [self._buffers.pop(attribute + "_on_device", None) for attribute in attributes]
        super()._apply(fn, recurse)
        # fn may change the dtype or the values, or not support float64, so only the device of its result is used
        for attribute, copy in zip(attributes, copies, strict=True):
            device = None if copy is None else fn(copy.new_empty(0, dtype=torch.float32)).device
            self.set_constant(attribute, getattr(self, attribute), device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, attribute in self.own_constants().items():
            destination[prefix + name] = _tensor(getattr(self, attribute)).clone()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing_keys, _, error_msgs = rest
        constants = {prefix + name: attribute for name, attribute in self.own_constants().items()}
        others = {key: value for key, value in state_dict.items() if key not in constants}
        super()._load_from_state_dict(others, prefix, *rest)
        for key, attribute in constants.items():
            if key in state_dict:
                self._load_constant(key, attribute, state_dict[key], error_msgs)
            else:
                missing_keys.append(key)

    def _load_constant(self, key: str, attribute: str, value: Tensor, error_msgs: list[str]) -> None:
        value, own = torch.as_tensor(value).detach(), _tensor(getattr(self, attribute))
        if value.shape != own.shape:
            error_msgs.append(
                f"the constant {key!r} has shape {tuple(value.shape)} in the state_dict and {tuple(own.shape)} here. "
                "Fix: create the module with constants of the checkpoint's shape."
            )
        elif not value.is_meta and not torch.equal(value.cpu(), own.to(value.dtype)):  # no rounded copies
            value = value.to("cpu", torch.float64)
            self.set_constant(attribute, value.clone() if value.dim() else value.item())


def _tensor(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device="cpu")
