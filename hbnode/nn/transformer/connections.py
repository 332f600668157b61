r"""How a sublayer's output joins the stream x that runs through the layers: the residual x + g, and with momentum.

A stream is x and what a connection carries from layer to layer, its :class:`DepthState`. Nothing is carried over time,
so a model with any of these connections streams its tokens as one without.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override


class DepthState(NamedTuple):
    """What connections carry from one layer to the next; entries that a connection does not need are None.

    Attributes:
        previous: the input of the layer before, x_{l-1}.
        update: the attention output of the layer before, g_{l-1}.
        velocity: v, for the connections that have one.
    """

    previous: Tensor | None = None
    update: Tensor | None = None
    velocity: Tensor | None = None


class Connection(nn.Module):
    """The residual connection, x + g, of attention and of the feedforward block; the base of the others.

    References:
        He et al., Deep Residual Learning (arXiv:1512.03385).
    """

    def look_ahead(self, x: Tensor, depth: DepthState) -> Tensor:
        """Where a sublayer reads the stream."""
        return x

    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """The stream after attention, whose output is ``update``."""
        return x + update, depth

    def feedforward(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        """The stream after any other sublayer, whose output is ``update``."""
        return x + update, depth


class MomentumConnection(Connection):
    r"""The paper's momentum connection: x_l + g_l + β (x_l - x_{l-1}), with g_l the output of attention.

    x_l is the input of layer l. The printed equation has T_{l-1}(X) in the place of x_{l-1}; taken as the previous
    layer's output, which is x_l itself, it would make the bracket zero. The first layer has no bracket.

    References:
        Wang et al. (2022), equation 75.

    Arguments:
        momentum: β, in [0, 1). Default: ``0.9``.
    """

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = check_momentum(momentum)

    @override
    def extra_repr(self) -> str:
        return f"momentum={self.momentum:g}"

    @override
    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        after = x + update
        if depth.previous is not None:
            after = after + self.momentum * (x - depth.previous)
        return after, depth._replace(previous=x)


class AdaptiveConnection(Connection):
    r"""The momentum connection with a β that each token computes for itself.

    With g_l the output of attention in layer l::

        β_l = clamp((1 - sqrt(|g_l - g_{l-1}| / |g_{l-1}|))^2, 0, 1 - threshold)

    The norms are over features, so β_l depends on no other token. The square comes before the clamp: the other order
    gives β = 0 almost everywhere. The first layer has no bracket.

    References:
        Wang et al. (2022), equations 75 to 77.

    Arguments:
        threshold: δ; β is at most 1 - δ. Default: ``1e-3``.
    """

    def __init__(self, threshold: float = 1e-3) -> None:
        super().__init__()
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must be in (0, 1], got {threshold!r}. Fix: the paper's 1e-3.")
        self.threshold = float(threshold)

    @override
    def extra_repr(self) -> str:
        return f"threshold={self.threshold:g}"

    @override
    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        after = x + update
        if depth.previous is not None and depth.update is not None:
            after = after + self.momentum(update, depth.update) * (x - depth.previous)
        return after, depth._replace(previous=x, update=update)

    def momentum(self, update: Tensor, previous: Tensor) -> Tensor:
        """β of each token, (..., 1).

        Arguments:
            update: g_l, (..., features).
            previous: g_{l-1}, (..., features).
        """
        wide = torch.promote_types(update.dtype, torch.float32)
        change, size = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide) for x in (update - previous, previous)
        )
        ratio = change / size.clamp(min=torch.finfo(wide).tiny)
        # the gradient of the root at 0 would be infinite, and that at infinity NaN; beyond 4 β is at its most
        root = ratio.clamp(1e-12, 4.0).sqrt()
        return (1 - root).square().clamp(0, 1 - self.threshold).to(update.dtype)


class MomentumStateConnection(Connection):
    r"""Momentum over depth in its state form, as the published code of the paper runs it.

    With v = 0 before the first layer and g_l the output of attention::

        v <- β v + g_l,   x <- x + s v

    It equals :class:`MomentumConnection` only if s = 1 and the layers have no feedforward block and no norm.

    References:
        Wang et al. (2022), section 4.3.2.

    Arguments:
        momentum: β, in [0, 1). Default: ``0.9``.
        step_size: s, positive. Default: ``1.0``.
    """

    def __init__(self, momentum: float = 0.9, step_size: float = 1.0) -> None:
        super().__init__()
        self.momentum, self.step_size = check_momentum(momentum), check_positive(step_size, "step_size")

    @override
    def extra_repr(self) -> str:
        return f"momentum={self.momentum:g}, step_size={self.step_size:g}"

    @override
    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        velocity = update if depth.velocity is None else self.momentum * depth.velocity + update
        return x + self.step_size * velocity, depth._replace(velocity=velocity)


class HeavyBallConnection(Connection):
    r"""A residual stream with a velocity that attention and feedforward blocks push.

    For each sublayer, with learned scalars β in (0, 1) and γ of its own and v = 0 before the first::

        g = block(x),   v <- β v + γ g,   x <- x + v

    β = 0 and γ = 1 is the residual connection.

    References:
        Zimin et al., YuriiFormer (arXiv:2601.23236); Momentum Streams (arXiv:2605.24425).

    Arguments:
        momentum: β at the start, in [0, 1); 0 stays 0, anything else is learned. Default: ``0.5``.
        step_size: γ at the start, positive and learned. Default: ``1.0``.
    """

    def __init__(self, momentum: float = 0.5, step_size: float = 1.0) -> None:
        super().__init__()
        momentum, step_size = check_momentum(momentum), check_positive(step_size, "step_size")
        sublayers = 2  # attention, feedforward
        logit = math.log(momentum / (1 - momentum)) if momentum > 0 else 0.0
        self.momentum_logit = nn.Parameter(torch.full((sublayers,), logit)) if momentum > 0 else None
        self.log_step_size = nn.Parameter(torch.full((sublayers,), math.log(step_size)))

    @property
    def momentum(self) -> Tensor:
        """β of attention and of the feedforward block, (2,)."""
        zero = torch.zeros_like(self.log_step_size)
        return zero if self.momentum_logit is None else torch.sigmoid(self.momentum_logit)

    @property
    def step_size(self) -> Tensor:
        """γ of attention and of the feedforward block, (2,)."""
        return self.log_step_size.exp()

    @override
    def attention(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        return self._move(x, update, depth, 0)

    @override
    def feedforward(self, x: Tensor, update: Tensor, depth: DepthState) -> tuple[Tensor, DepthState]:
        return self._move(x, update, depth, 1)

    def _move(self, x: Tensor, update: Tensor, depth: DepthState, sublayer: int) -> tuple[Tensor, DepthState]:
        velocity = self.step_size[sublayer] * update
        if depth.velocity is not None:
            velocity = velocity + self.momentum[sublayer] * depth.velocity
        return x + velocity, depth._replace(velocity=velocity)


class NesterovConnection(HeavyBallConnection):
    r"""The heavy-ball stream whose sublayers read x + μ v, the point that the velocity leads to.

    For each sublayer::

        g = block(x + μ v),   v <- β v + γ g,   x <- x + v

    μ is a learned scalar for each layer. β = μ = 0 and γ = 1 is the residual connection.

    References:
        Zimin et al., YuriiFormer (arXiv:2601.23236).

    Arguments:
        momentum: β and μ at the start, in [0, 1); a β of 0 stays 0. Default: ``0.5``.
        step_size: γ at the start, positive and learned. Default: ``1.0``.
    """

    def __init__(self, momentum: float = 0.5, step_size: float = 1.0) -> None:
        super().__init__(momentum, step_size)
        self.look_ahead_size = nn.Parameter(torch.tensor(float(momentum)))

    @override
    def look_ahead(self, x: Tensor, depth: DepthState) -> Tensor:
        return x if depth.velocity is None else x + self.look_ahead_size * depth.velocity


def check_momentum(value: float) -> float:
    """A number in [0, 1)."""
    if not 0 <= value < 1:
        raise ValueError(f"momentum must be in [0, 1), got {value!r}. Fix: 0.9, for instance.")
    return float(value)


def check_positive(value: float, name: str) -> float:
    """A positive number."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive, got {value!r}. Fix: 1.0.")
    return float(value)


CONNECTIONS: dict[str, type[Connection]] = {
    "residual": Connection,
    "momentum": MomentumConnection,
    "momentum_state": MomentumStateConnection,
    "adaptive": AdaptiveConnection,
    "heavy_ball": HeavyBallConnection,
    "nesterov": NesterovConnection,
}
