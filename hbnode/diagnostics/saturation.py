"""A diagnostic that finds layers whose outputs are close to the bounds of tanh or sigmoid, where gradients vanish."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hbnode._torch import in_eager_mode
from hbnode.diagnostics._shared import evaluation_mode
from hbnode.nn.ode_rnn import ODERNN
from hbnode.nn.recurrent import RecurrentCell, RecurrentLayer, TanhRNN

MARGIN = 0.01
SIGMOIDS = (nn.Sigmoid, nn.Hardsigmoid)
RECURRENT = (nn.RNNBase, nn.RNNCellBase, RecurrentLayer, RecurrentCell, TanhRNN, ODERNN)
LAYERS = (*SIGMOIDS, nn.Tanh, nn.Hardtanh, nn.Softsign, *RECURRENT)


def saturation(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Return the share of saturated outputs of each bounded layer in ``module(*args, **kwargs)``, the largest first.

    Bounded layers are torch's modules for tanh, sigmoid, softsign and their piecewise linear forms, and recurrent
    layers and cells of torch and hbnode. The outputs of a recurrent layer are its hidden states h. An output y is
    saturated if it is within 0.01 of a bound: y < -0.99 or y > 0.99, or for a sigmoid y < 0.01 or y > 0.99. Functions
    such as ``torch.tanh`` are not included, because only modules are observed.

    The gradient of a saturated value is small. Inputs that are not standardised saturate layers, and so do learning
    rates that are too large. The module is called once, in evaluation mode and without gradients.

    Returns:
        A dict from the names of layers in ``module.named_modules()`` to shares from 0 to 1. The name of ``module``
        itself is the name of its class.

    Raises:
        TypeError: if ``module`` is not a module.

    Example:
        >>> import torch, hbnode
        >>> t, x = torch.arange(20.0), 80 + 10 * torch.randn(4, 20, 3)
        >>> rnn = hbnode.ODERNN(3, 16, time_unit=10.0)
        >>> scale = hbnode.nn.Standardize(3).fit(x)
        >>> hbnode.diagnostics.saturation(rnn, x, t)["ODERNN"] > 0.2
        True
        >>> hbnode.diagnostics.saturation(rnn, scale(x), t)["ODERNN"] < 0.05
        True
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a module, got {type(module).__name__}. Fix: saturation(rnn, x, t).")
    names = {layer: name or type(module).__name__ for name, layer in module.named_modules()}
    seen: dict[str, list[Tensor]] = {}

    def look(layer: nn.Module, _: object, output: Any) -> None:
        is_bounded = isinstance(layer, LAYERS) and not isinstance(layer, nn.ReLU6)
        if layer in names and is_bounded and getattr(layer, "nonlinearity", "tanh") == "tanh":
            y = output if isinstance(output, Tensor) else output[0]
            y = getattr(y, "data", y).detach()  # a PackedSequence has a tensor data
            low, high = getattr(layer, "min_val", -1), getattr(layer, "max_val", 1)  # Hardtanh has other bounds
            is_far = (y < (0 if isinstance(layer, SIGMOIDS) else low) + MARGIN) | (y > high - MARGIN)
            seen.setdefault(names[layer], []).append(is_far.flatten())

    hook = nn.modules.module.register_module_forward_hook(look)
    with hook, torch.no_grad(), evaluation_mode(module), in_eager_mode():
        module(*args, **kwargs)
    shares = {name: float(torch.cat(parts).double().mean()) for name, parts in seen.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
