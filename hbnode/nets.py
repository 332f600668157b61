"""Small networks to put inside a field."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Fully connected network over the last dimension.

    Called with the parts that a field hands over, ``(h)`` or ``(h, v)``, which it concatenates; with the time in front
    if ``time_dependent``, which it appends as a last feature.

    Arguments:
        in_features: size of its inputs together, the time not counted.
        hidden: sizes of the hidden layers.
        out_features: size of the output.
        activation: module class between the layers.
        time_dependent: whether it is called with the time.

    Shape:
        - ``mlp(h)``: (..., in_features) -> (..., out_features); ``mlp(t, h, v)`` likewise.
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
        self.time_dependent = time_dependent
        sizes = [in_features + time_dependent, *hidden, out_features]
        layers: list[nn.Module] = []
        for size, following in itertools.pairwise(sizes):
            layers += [nn.Linear(size, following), activation()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, *inputs: Tensor) -> Tensor:
        """Concatenate the inputs along the last dimension and apply the layers."""
        if self.time_dependent:
            t, *parts = inputs
            parts.append(t.to(parts[0].dtype).expand(*parts[0].shape[:-1], 1))
        else:
            parts = list(inputs)
        return self.layers(torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0])


class ConvNet(nn.Module):
    """The three-layer convolutional f of the papers' image models: 1x1, 3x3 and 1x1, with ReLU between.

    If ``time_dependent``, the time is appended as a constant channel before each convolution.

    References:
        Dupont et al., Augmented Neural ODEs, arXiv:1904.01681, appendix; used by Xia et al., arXiv:2110.04840.

    Arguments:
        in_channels: channels of its inputs together, the time not counted.
        hidden: channels of the two hidden layers.
        out_channels: channels of the output.
        activation: module class between the layers.
        time_dependent: whether it is called with the time in front.

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
        self.time_dependent = time_dependent
        extra = int(time_dependent)
        self.conv1 = nn.Conv2d(in_channels + extra, hidden, 1)
        self.conv2 = nn.Conv2d(hidden + extra, hidden, 3, padding=1)
        self.conv3 = nn.Conv2d(hidden + extra, out_channels, 1)
        self.activation = activation()

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
