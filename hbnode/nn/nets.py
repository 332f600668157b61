"""Small networks for use inside a field, feature standardisation, and a search for models of equal parameter count."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from hbnode._checks import as_count, as_integers, check_bool, check_input, refuse_meta
from hbnode._torch import may_look
from hbnode.nn.kalman import Gaussian

Module = TypeVar("Module", bound=nn.Module)
Values = TypeVar("Values", Tensor, Gaussian)


class MLP(nn.Module):
    """A fully connected network over the last dimension.

    It is called with the arguments that a field passes to f, ``(h)`` or ``(h, v)``, and concatenates them. With
    ``time_dependent=True`` the first argument is the time, which is appended as the last feature.

    Arguments:
        in_features: total size of the inputs, without the time.
        hidden: sizes of the hidden layers.
        out_features: size of the output.
        activation: class of the modules between the layers. Default: ``torch.nn.modules.activation.ELU``.
        time_dependent: whether the network is called with the time. Default: False.

    Raises:
        TypeError: if ``hidden`` is a number, or ``activation`` is a module or a function of tensors.

    Shape:
        - ``mlp(h)`` and ``mlp(t, h, v)``: (..., in_features) -> (..., out_features).
    """

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        *,
        activation: Callable[[], nn.Module] = nn.ELU,
        time_dependent: bool = False,
    ) -> None:
        super().__init__()
        self.time_dependent = check_bool(time_dependent, "time_dependent")
        if not isinstance(hidden, Sequence) or isinstance(hidden, (str, bytes)):
            fix = f"[{hidden}]" if isinstance(hidden, int) else "[32, 32]"
            raise TypeError(f"hidden must be the sizes of the hidden layers, got {hidden!r}. Fix: {fix}.")
        sizes = [as_count(in_features, "in_features", least=0) + time_dependent]
        sizes += [as_count(size, "a size of hidden") for size in hidden] + [as_count(out_features, "out_features")]
        layers: list[nn.Module] = []
        for size, following in itertools.pairwise(sizes):
            layers += [nn.Linear(size, following), _make_activation(activation)]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenate the inputs along the last dimension and apply the layers."""
        if self.time_dependent:
            t, parts = inputs[0], list(inputs[1:])
            parts.append(t.to(parts[0].dtype).expand(*parts[0].shape[:-1], 1))
        else:
            parts = list(inputs)
        return self.layers(torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0])


class ConvNet(nn.Module):
    """The convolutional network f of the papers' image models: three layers, 1x1, 3x3 and 1x1, with ReLU in between.

    If ``time_dependent``, the time is appended as a constant channel before each convolution.

    References:
        Dupont et al., Augmented Neural ODEs, arXiv:1904.01681, appendix; used by Xia et al., arXiv:2110.04840.

    Arguments:
        in_channels: total number of channels of the inputs, without the time.
        hidden: number of channels of the two hidden layers.
        out_channels: number of channels of the output.
        activation: class of the modules between the layers. Default: ``torch.nn.modules.activation.ReLU``.
        time_dependent: whether the first argument is the time. Default: True.

    Shape:
        - ``net(t, h)``: scalar and (batch, in_channels, height, width) -> (batch, out_channels, height, width);
          ``net(t, h, v)`` concatenates h and v over channels.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        time_dependent: bool = True,
    ) -> None:
        super().__init__()
        self.time_dependent = check_bool(time_dependent, "time_dependent")
        extra = int(time_dependent)
        in_channels, hidden = as_count(in_channels, "in_channels"), as_count(hidden, "hidden")
        out_channels = as_count(out_channels, "out_channels")
        self.conv1 = nn.Conv2d(in_channels + extra, hidden, 1)
        self.conv2 = nn.Conv2d(hidden + extra, hidden, 3, padding=1)
        self.conv3 = nn.Conv2d(hidden + extra, out_channels, 1)
        self.activation = _make_activation(activation)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenate the inputs over channels and apply the three convolutions."""
        if self.time_dependent:
            t, *parts = inputs
            clock = t.to(parts[0].dtype).expand(parts[0].shape[0], 1, *parts[0].shape[2:])
        else:
            parts, clock = list(inputs), None

        def with_time(*x: Tensor) -> Tensor:
            channels = x if clock is None else (*x, clock)
            return torch.cat(channels, dim=1) if len(channels) > 1 else channels[0]

        x = self.activation(self.conv1(with_time(*parts)))
        x = self.activation(self.conv2(with_time(x)))
        return self.conv3(with_time(x))


def _make_activation(activation: Callable[[], nn.Module]) -> nn.Module:
    try:
        module = activation()
    except TypeError:  # activation() fails if activation is a module or a function of tensors
        module = None
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"activation must be a class of modules, got {activation!r}. Fix: activation=nn.ReLU, or "
            "lambda: nn.LeakyReLU(0.1)."
        )
    return module


class Standardize(nn.Module):
    r"""A layer that scales features to mean 0 and standard deviation 1 over training data: :math:`(x - \mu) / \sigma`.

    :math:`\mu` and :math:`\sigma` are buffers: they are saved with the model and move with it. NaN is a missing value;
    it is ignored by :meth:`fit` and stays NaN. A feature that is constant or never observed is only shifted. Before
    :meth:`fit`, or ``load_state_dict`` of a fitted layer, both buffers are NaN and a call raises an error.

    Arguments:
        num_features: size of the last dimension.

    Shape:
        - (..., num_features) -> (..., num_features).

    Raises:
        ValueError: if it is called before :meth:`fit`, or x has another number of features.

    Example:
        >>> import torch, hbnode
        >>> x = torch.tensor([[1.0, 10.0], [3.0, torch.nan], [5.0, 30.0]])
        >>> scale = hbnode.nn.Standardize(2).fit(x)
        >>> scale.mean, scale(x)[0, 1], scale.inverse(scale(x))[0, 1]
        (tensor([ 3., 20.]), tensor(-1.), tensor(10.))
        >>> scale.inverse(hbnode.nn.Gaussian(scale(x)[:1], torch.tensor([[0.5, 0.5]]))).std
        tensor([[0.8165, 5.0000]])
    """

    mean: Tensor
    std: Tensor
    is_fitted = False  # if True, a call need not check the buffers

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = as_count(num_features, "num_features")
        self.register_buffer("mean", torch.full((self.num_features,), torch.nan))
        self.register_buffer("std", torch.full((self.num_features,), torch.nan))
        self.register_load_state_dict_post_hook(_note_loaded)

    @torch.no_grad()
    def fit(self, x: Tensor, mask: Tensor | None = None, lengths: Tensor | Sequence[int] | None = None) -> Self:
        """Set the mean and the population standard deviation from training data.

        Arguments:
            x: data (..., num_features).
            mask: which values to use, (...) or (..., num_features) of bool, or of 0 and 1. NaN is never used.
                Default: ``None``.
            lengths: lengths (batch,) of the series in x (batch, T, num_features). Default: ``None``.

        Returns:
            The module itself.

        Raises:
            ValueError: if x, the mask or the lengths have a wrong shape, or a value to use is infinite. Also if the
                dtype of the buffers cannot represent a mean or standard deviation.
        """
        self._check(x)
        refuse_meta(x, "x")
        counts = ~torch.isnan(x)
        if mask is not None:
            mask = as_integers(mask, "mask", "mask=torch.isfinite(x)").to(x.device).bool()
            if mask.shape not in (x.shape, x.shape[:-1]):
                wanted = f"{tuple(x.shape[:-1])} or {tuple(x.shape)}, the shape of x"
                raise ValueError(f"mask must be {wanted}, got {tuple(mask.shape)}. Fix: mask.expand(x.shape).")
            counts = counts & (mask if mask.dim() == x.dim() else mask.unsqueeze(-1))
        if lengths is not None:
            if x.dim() != 3:
                raise ValueError(f"lengths need x of shape (batch, T, features), got x {tuple(x.shape)}. Fix: mask=.")
            ends = as_integers(lengths, "lengths", "one length per series").to(x.device)
            if ends.shape != x.shape[:1]:
                raise ValueError(f"lengths must be ({len(x)},), got {tuple(ends.shape)}. Fix: one length per series.")
            counts = counts & (torch.arange(x.shape[1], device=x.device) < ends.unsqueeze(1)).unsqueeze(-1)
        counts = counts.flatten(0, -2)
        values = torch.where(counts, x.double().flatten(0, -2), 0.0)
        if not bool(torch.isfinite(values).all()):
            feature = int((~torch.isfinite(values)).nonzero()[0, 1])
            raise ValueError(f"x is infinite in feature {feature}. Fix: set it to NaN, a missing value.")
        total = counts.sum(0).clamp(min=1)
        mean = values.sum(0) / total
        spread = torch.where(counts, values - mean, 0.0).square().sum(0) / total
        self._store(mean, torch.where(_varies(values, counts), spread.sqrt(), 1.0))
        return self

    def _store(self, mean: Tensor, std: Tensor) -> None:
        """Copy mean and std to the buffers; raise ValueError if the dtype of the buffers cannot represent them."""
        rounded = mean.to(self.mean.dtype).double(), std.to(self.std.dtype).double()
        held = ((rounded[0] - mean).abs() <= 0.1 * std) & (rounded[1] > 0) & torch.isfinite(rounded[1])
        if not bool(held.all()):
            feature = int((~held).nonzero()[0, 0])
            raise ValueError(
                f"feature {feature} has mean {float(mean[feature]):g} and standard deviation {float(std[feature]):g}; "
                f"{self.mean.dtype} cannot represent them. Fix: Standardize({self.num_features}).double(), "
                "or x in other units."
            )
        self.mean.copy_(mean)
        self.std.copy_(std)
        self.is_fitted = True

    def forward(self, x: Tensor) -> Tensor:
        """Return (x - mean) / std, in which mean and std are the fitted buffers."""
        self._check(x)
        self._check_fitted()
        return (x - self.mean) / self.std

    def inverse(self, x: Values) -> Values:
        """Return x in the original units, as the inverse of :meth:`forward`.

        In the original units, a standard deviation s becomes s σ. Pass a mean and its standard deviation together, as
        ``scale.inverse(hbnode.nn.Gaussian(mean, std))``.

        Arguments:
            x: values (..., num_features), or a :class:`hbnode.nn.Gaussian` with a mean and a std of this shape.
        """
        if isinstance(x, Gaussian):
            return dataclasses.replace(x, mean=self.inverse(x.mean), std=x.std * self.std)
        self._check(x)
        self._check_fitted()
        return x * self.std + self.mean

    def _check_fitted(self) -> None:
        if not (self.is_fitted or (may_look() and not bool(self.std.isnan().any()))):  # the user may have filled them
            raise ValueError("Standardize is not fitted. Fix: scale.fit(x) with training data, or load_state_dict.")

    def _check(self, x: Tensor) -> None:
        check_input(x, "x")
        if x.dim() < 2 or x.shape[-1] != self.num_features:
            raise ValueError(
                f"x must be (..., {self.num_features}) with at least two dimensions, got {tuple(x.shape)}. "
                f"Fix: Standardize({x.shape[-1] if x.dim() > 1 else 1})."
            )

    def extra_repr(self) -> str:
        return f"{self.num_features}"


def _note_loaded(scale: Standardize, _: object) -> None:
    """Set ``is_fitted`` of a Standardize layer; called by torch after ``load_state_dict``.

    It becomes True if the loaded buffers are those of a fitted layer.
    """
    scale.is_fitted = not scale.std.is_meta and not bool(scale.std.isnan().any())


def _varies(values: Tensor, counts: Tensor) -> Tensor:
    """Return, for each column of ``values``, whether its values differ; only those with True in ``counts`` count."""
    most, least = (nn.functional.pad(torch.where(counts, values, end), (0, 0, 0, 1), value=end) for end in (-inf, inf))
    return most.amax(0) > least.amin(0)


def match_parameters(make: Callable[[int], Module], parameters: int) -> Module:
    """Return the model from ``make`` whose number of trainable parameters is closest to ``parameters``.

    Compare models at equal parameter counts, because models of equal hidden size have different counts. For example,
    the state of an HBNODE is (h, m), so the GRU cell of its ODE-RNN is twice as wide as with a NODE.

    Arguments:
        make: function size -> model, whose number of parameters increases with the size.
        parameters: target number of parameters.

    Raises:
        ValueError: if the smallest model already has more parameters.

    Example:
        >>> import hbnode
        >>> ball = hbnode.nn.match_parameters(lambda n: hbnode.ODERNN(8, n), 10_000)
        >>> node = hbnode.nn.match_parameters(lambda n: hbnode.ODERNN(8, n, field="node"), 10_000)
        >>> ball.hidden_size, node.hidden_size
        (25, 42)
    """

    def count(size: int) -> int:
        with torch.device("meta"):  # takes no memory and no random numbers
            model = make(size)
        if not isinstance(model, nn.Module):
            raise TypeError(f"make must return a module, got {model!r}. Fix: make=lambda n: hbnode.ODERNN(8, n).")
        return sum(p.numel() for p in model.parameters() if p.requires_grad)

    parameters = as_count(parameters, "parameters")
    if count(1) > parameters:
        raise ValueError(
            f"the model of size 1 has {count(1)} parameters, more than parameters={parameters}. Fix: a larger target."
        )
    low, high = 1, 2
    while count(high) < parameters:
        if high > parameters:
            raise ValueError("the number of parameters does not increase with the size. Fix: use the size in make.")
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= parameters else (low, middle)
    return make(min((low, high), key=lambda size: abs(count(size) - parameters)))
