"""Autocast around the layers: torch's layer runs under it where it can; all else keeps the dtype of the parameters."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor


def is_on(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor; the meta device has none."""
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def switched(x: Tensor, on: bool) -> contextlib.AbstractContextManager[object]:
    """A context with autocast on or off for the device of a tensor."""
    kind = x.device.type
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=on)


def runs(stock: str, x: Tensor) -> bool:
    """Whether torch's layer runs under the autocast in force: not every CPU has an LSTM in half precision."""
    return x.device.type != "cpu" or _runs_on_cpu(stock, torch.get_autocast_dtype("cpu"))


@functools.lru_cache(maxsize=16)
def _runs_on_cpu(stock: str, dtype: torch.dtype) -> bool:
    with (
        torch.random.fork_rng(devices=[]),  # the layer draws its weights
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", dtype=dtype, cache_enabled=False),
    ):
        kind = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(stock, torch.nn.RNN)
        layer = kind(1, 1, device="cpu", dtype=torch.float32)  # float64, the default of some, would not be cast
        try:
            layer(torch.zeros(1, 1, 1, device="cpu", dtype=torch.float32))[0].sum().backward()
        except RuntimeError:
            return False
    return True
