"""How a language model of recurrent layers is kept from overfitting: AWD-LSTM's means, for any layer.

References:
    S. Merity, N. Keskar and R. Socher, Regularizing and Optimizing LSTM Language Models, 2018, arXiv:1708.02182.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout with one mask for all times of x (T, batch, features)."""
    if not training or p == 0:
        return x
    return x * nn.functional.dropout(torch.ones_like(x[:1]), p)


def embed(embedding: nn.Embedding, words: Tensor, p: float, training: bool) -> Tensor:
    """Vectors of words, where a dropped word is zero wherever it stands."""
    if not training or p == 0:
        return embedding(words)
    kept = nn.functional.dropout(torch.ones_like(embedding.weight[:, :1]), p)
    return nn.functional.embedding(words, kept * embedding.weight)


class DropWeights(nn.Module):
    """Dropout of the entries of a weight, with one mask until it is read anew."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with a share p of its entries 0 and the others 1 / (1 - p) times as large."""
        return nn.functional.dropout(weight, self.p, self.training)

    def extra_repr(self) -> str:
        """The share of the entries dropped."""
        return f"p={self.p}"


def drop_recurrent_weights(layer: nn.Module, p: float) -> nn.Module:
    """The layer, with dropout of every weight between h and h; call it within ``parametrize.cached()``."""
    names = [name for name, _ in layer.named_parameters(recurse=False) if name.startswith("weight_hh")]
    for name in names if p > 0 else ():
        parametrize.register_parametrization(layer, name, DropWeights(p))
    return layer


def penalty(dropped: Tensor, raw: Tensor, alpha: float, beta: float) -> Tensor:
    """The mean square of the last layer's output times alpha, and that of its change from time to time times beta.

    Arguments:
        dropped: the output after dropout, (T, batch, features).
        raw: the same before.
        alpha: of the activations (AR).
        beta: of their changes (TAR).
    """
    value = alpha * dropped.square().mean()
    return value + beta * raw.diff(dim=0).square().mean() if len(raw) > 1 else value


@functools.lru_cache(maxsize=1)
def chunk_lengths(total: int, bptt: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Lengths of the pieces of an epoch, of the seed and the epoch alone, so that a resumed run repeats them.

    Each is drawn from a normal distribution of deviation 5 around ``bptt``, or with a chance of 0.05 around half of it,
    and is at least 5; the last is what is left.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    lengths: list[int] = []
    left = total
    while left > 0:
        chance, noise = torch.rand((), generator=generator), torch.randn((), generator=generator)
        mean = bptt if chance < 0.95 else bptt / 2
        lengths.append(min(left, max(5, int(mean + 5 * noise))))
        left -= lengths[-1]
    return tuple(lengths)


class Averaging:
    """NT-ASGD: the mean of the weights, from the epoch on at which the validation loss ceases to fall.

    That is when it is above the best of all epochs but the last ``patience`` before it.

    Arguments:
        parameters: the model's.
        patience: epochs; 0 never averages.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], patience: int) -> None:
        self.parameters = list(parameters)
        self.patience = patience
        self.losses: list[float] = []
        self.means: list[Tensor] | None = None
        self.count = 0

    @property
    def is_on(self) -> bool:
        """Whether the weights are averaged by now."""
        return self.means is not None

    def note(self, loss: float) -> None:
        """An epoch is over, with this validation loss."""
        known = self.losses[: -self.patience] if self.patience else []
        if self.means is None and known and loss > min(known):
            self.means = [p.detach().clone() for p in self.parameters]
        self.losses.append(loss)

    def step(self) -> None:
        """The optimizer has made a step."""
        if self.means is not None:
            self.count += 1
            for mean, p in zip(self.means, self.parameters, strict=True):
                mean.lerp_(p.detach(), 1 / self.count)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within it the model has the means for its weights, if there are any."""
        if self.means is None or self.count == 0:
            yield
            return
        with torch.no_grad():
            trained = [p.clone() for p in self.parameters]
            self._set(self.means)
            try:
                yield
            finally:
                self._set(trained)

    def _set(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self.parameters, values, strict=True):
            p.copy_(value)

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint needs."""
        return {"losses": self.losses, "means": self.means, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        """Go on from :meth:`state_dict`."""
        means = state["means"]
        self.means = means and [mean.to(p) for mean, p in zip(means, self.parameters, strict=True)]
        self.losses, self.count = state["losses"], state["count"]
