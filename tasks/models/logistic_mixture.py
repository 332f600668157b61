r"""A discretized mixture of logistic distributions for the value of a pixel, an integer level.

A network's output for a pixel is (K logits, K means, K log scales). The levels x = 0, ..., L - 1 are mapped to :math:`y
= 2 x / (L - 1) - 1`, With half a step :math:`\delta = 1 / (L - 1)`, the sigmoid :math:`\sigma` and the scales
:math:`s_k = \exp(\text{log scale}_k)`,

.. math:: P(x) = \sum_k \pi_k \left[\sigma\left(\frac{y + \delta - \mu_k}{s_k}\right)
    - \sigma\left(\frac{y - \delta - \mu_k}{s_k}\right)\right],

where the first level also includes the probability of everything below it, and the last level that of everything above.

References:
    T. Salimans et al., PixelCNN++, 2017, arXiv:1701.05517, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LOG_SCALE_LIMIT = 7.0  # largest absolute log scale; neighbouring levels of 256 differ by exp(-4.8)


def split(parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split parameters (..., 3 K) into logits of the weights, means and log scales, (..., K) each."""
    logits, means, log_scales = parameters.chunk(3, dim=-1)
    return logits, means, log_scales.clamp(-LOG_SCALE_LIMIT, LOG_SCALE_LIMIT).exp()


def log_probability(parameters: Tensor, x: Tensor, levels: int) -> Tensor:
    """Return log P(x). It avoids the difference of sigmoids, which could be 0.

    For a > b, sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)).

    Arguments:
        parameters: (..., 3 K).
        x: levels (...) from 0 to ``levels - 1``.
        levels: the number of levels, at least 2.
    """
    logits, means, scales = split(parameters)
    half = 1 / (levels - 1)
    distance = (2 * half * x.to(means.dtype) - 1).unsqueeze(-1) - means
    above, below = (distance + half) / scales, (distance - half) / scales
    x = x.unsqueeze(-1)
    upper = functional.logsigmoid(above).masked_fill(x == levels - 1, 0.0)
    lower = functional.logsigmoid(-below).masked_fill(x == 0, 0.0)
    is_edge = (x == 0) | (x == levels - 1)
    width = torch.log(-torch.expm1(-2 * half / scales)).masked_fill(is_edge, 0.0)
    return torch.logsumexp(logits.log_softmax(-1) + upper + lower + width, dim=-1)


def sample(parameters: Tensor, levels: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw levels (...) from P.

    Arguments:
        parameters: (..., 3 K).
        levels: the number of levels, at least 2.
        generator: random generator.
    """
    logits, means, scales = split(parameters.detach())
    uniform = torch.rand((2, *logits.shape), generator=generator, dtype=logits.dtype, device=logits.device)
    tiny = torch.finfo(logits.dtype).tiny
    chosen = (logits - (-uniform[0].clamp(min=tiny).log()).log()).argmax(-1, keepdim=True)  # Gumbel-max trick
    y = means + scales * uniform[1].clamp(min=tiny).logit()
    level = (y.gather(-1, chosen).squeeze(-1) + 1) / 2 * (levels - 1)
    return level.round().clamp(0, levels - 1).long()
