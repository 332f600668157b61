"""A device that does not exist: its tensors say that they are elsewhere, and compute on the CPU.

It shows device errors without a GPU. As on a GPU, an operation refuses to mix its tensors with those of the CPU, a
number on the CPU may enter pointwise operations only, and whatever the host must know of the values of a tensor is a
synchronisation, which is counted.

    with pretended_device() as device:
        block, x = device.move(block), device.move(x)
        block(x)
    assert device.synchronisations == 3
"""

import contextlib
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hbnode import _torch

KIND = "meta"  # autograd in a build for the CPU knows no other device without a driver
aten = torch.ops.aten
VALUES_TO_HOST = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
SIZES_TO_HOST = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive}
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}  # an index may be on the CPU
LENGTHS_ON_CPU = {aten._pack_padded_sequence, aten._pad_packed_sequence}
COPIES = {aten._to_copy, aten.copy_}


class Elsewhere(torch.Tensor):
    """A tensor on the pretended device."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=KIND
        )

    has_float64 = True

    def __init__(self, values):
        if not self.has_float64 and values.dtype in (torch.float64, torch.complex128):
            raise TypeError("the pretended device has no float64")
        self.values_on_cpu = values

    def __tensor_flatten__(self):  # lets nn.Module.double() swap parameters
        return ["values_on_cpu"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Elsewhere(inner["values_on_cpu"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.detach:  # of autograd, for hooks on what it saves
            return Elsewhere(args[0].values_on_cpu.detach())
        raise RuntimeError(f"{func} outside of pretended_device()")

    is_cuda = True

    def new_tensor(self, data, *, dtype=None, device=None):
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def numpy(self, **options):
        raise TypeError("can't convert a tensor of the pretended device to numpy")


def on_cpu(x):
    """The values of a tensor, wherever it is."""
    return x.values_on_cpu if isinstance(x, Elsewhere) else x


def _each(function, x):
    """The function of a tensor, or of all in a tuple or list; torch's own for any tree takes five times as long."""
    if isinstance(x, (tuple, list)):
        return type(x)(_each(function, part) for part in x)
    return function(x) if isinstance(x, torch.Tensor) else x


def _is(device, kind):
    return device is not None and torch.device(device).type == kind


class PretendedDevice(TorchDispatchMode):
    """Runs every operation; :func:`pretended_device` makes one.

    Attributes:
        synchronisations: how often the host waited for a value.
    """

    def __init__(self):
        super().__init__()
        self.synchronisations = 0

    def move(self, x):
        """A tensor, or a module with all its parameters and buffers, on the device; a module is changed itself."""
        if isinstance(x, torch.Tensor):
            return Elsewhere(x.detach()).requires_grad_(x.requires_grad)
        moved = {}
        for module in x.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                moved.setdefault(id(p), nn.Parameter(Elsewhere(p.detach()), requires_grad=p.requires_grad))
                setattr(module, name, moved[id(p)])
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, Elsewhere(buffer.detach()))
        return x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name, tensors = kwargs or {}, func.overloadpacket, []
        _each(tensors.append, (*args, *kwargs.values()))
        there = any(isinstance(x, Elsewhere) for x in tensors)
        if there:
            self._check(func, args, tensors)
        to_host = name in VALUES_TO_HOST or _is(kwargs.get("device"), "cpu")
        if there and (to_host or self._waits(name, args)):
            self.synchronisations += 1
        if _is(kwargs.get("device"), KIND):
            there, kwargs = True, kwargs | {"device": torch.device("cpu")}
        out = _compute(func, _each(on_cpu, args), {key: _each(on_cpu, value) for key, value in kwargs.items()})
        if to_host or not there:
            return out
        if func._schema.is_mutable and isinstance(out, torch.Tensor):
            return kwargs["out"] if "out" in kwargs else args[0]
        if name in LENGTHS_ON_CPU:
            return Elsewhere(out[0]), out[1]
        return _each(Elsewhere, out)

    @staticmethod
    def _check(func, args, tensors):
        """Refuse what a GPU would refuse."""
        name = func.overloadpacket
        if name in COPIES or name in INDEXED or name in LENGTHS_ON_CPU:
            return
        for x in tensors:
            if not isinstance(x, Elsewhere) and (x.dim() > 0 or torch.Tag.pointwise not in func.tags):
                raise RuntimeError(
                    f"{func}: expected all tensors on one device, but one of shape {tuple(x.shape)} is on the CPU"
                )

    @staticmethod
    def _waits(name, args):
        """Whether the host must know how many elements there are, or takes them to the CPU."""
        if name is aten.copy_:
            return not isinstance(args[0], Elsewhere)
        by_mask = name in INDEXED and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return name in SIZES_TO_HOST or by_mask


def _compute(func, args, kwargs):
    if func.overloadpacket is not aten._thnn_fused_lstm_cell:
        return func(*args, **kwargs)
    # the kernel that nn.LSTMCell takes on a GPU, which the CPU has not
    from_input, from_hidden, c, *biases = args
    gates = from_input + from_hidden + sum(b for b in biases if b is not None)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], 1)


def _host_reads(device, name):
    """A method of a tensor that reads its values."""

    def read(x):
        device.synchronisations += 1
        return getattr(x.values_on_cpu, name)()

    return read


def _maker(make):
    """torch.tensor and its like, which do not pass the dispatcher."""

    def made(data, *arguments, device=None, **options):
        if not _is(device, KIND) and not isinstance(data, Elsewhere):
            return make(data, *arguments, device=device, **options)
        if isinstance(data, Elsewhere):
            return data.to(device=device or data.device, **options)
        if isinstance(data, torch.Tensor):
            return data.to(device=KIND, **options)
        wants = options.pop("requires_grad", False)
        return Elsewhere(make(data, *arguments, **options)).requires_grad_(wants)

    return made


@contextlib.contextmanager
def pretended_device(float64=True):
    """A context in which there is such a device, :class:`PretendedDevice`, with float64 or, as Apple's, without."""
    import torch._dynamo.variables.torch  # whose tables are to hold torch's own functions

    device, enabled, autocast = PretendedDevice(), torch.is_autocast_enabled, torch.autocast

    class Autocast(autocast):
        def __init__(self, device_type, *arguments, **options):
            super().__init__("cpu" if device_type == KIND else device_type, *arguments, **options)

    with contextlib.ExitStack() as stack:

        def patch(owner, name, new):
            stack.enter_context(mock.patch.object(owner, name, new, create=True))

        for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__index__"):
            patch(Elsewhere, name, _host_reads(device, name))
        if not float64:
            widest = _torch.widest
            patch(_torch, "widest", lambda device: torch.float32 if device.type == KIND else widest(device))
        patch(Elsewhere, "has_float64", float64)
        patch(torch, "tensor", _maker(torch.tensor))
        patch(torch, "as_tensor", _maker(torch.as_tensor))
        patch(torch, "is_autocast_enabled", lambda kind="cpu": enabled("cpu" if kind == KIND else kind))
        patch(torch, "autocast", Autocast)
        stack.enter_context(device)
        yield device
