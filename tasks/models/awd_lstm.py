"""The regularisation methods of the AWD-LSTM language model, for any recurrent layer.

References:
    S. Merity, N. Keskar and R. Socher, Regularizing and Optimizing LSTM Language Models, 2018, arXiv:1708.02182.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Apply dropout to x (T, batch, features), with the same mask at all times."""
    return x * nn.functional.dropout(torch.ones_like(x[:1]), p, training)


def embed(embedding: nn.Embedding, words: Tensor, p: float, training: bool) -> Tensor:
    """Return the embeddings of words. A dropped word is zero wherever it occurs."""
    kept = nn.functional.dropout(torch.ones_like(embedding.weight[:, :1]), p, training)
    return nn.functional.embedding(words, kept * embedding.weight)


def drop_recurrent_weights(layer: nn.Module, p: float) -> nn.Module:
    """Add dropout to the recurrent weights of a layer. Call the layer within ``parametrize.cached()``.

    Without the cache, each access to a weight would draw another mask.
    """
    names = [name for name, _ in layer.named_parameters(recurse=False) if name.startswith("weight_hh")]
    for name in names if p > 0 else ():
        parametrize.register_parametrization(layer, name, nn.Dropout(p))
    return layer


def penalty(dropped: Tensor, raw: Tensor, alpha: float, beta: float) -> Tensor:
    """Return alpha times the mean square of the last layer's output, plus beta times the mean square of its changes
    over time.

    Arguments:
        dropped: output after dropout, (T, batch, features), which the first term uses.
        raw: output before dropout, which the second term uses.
        alpha: factor of activation regularisation (AR).
        beta: factor of temporal activation regularisation (TAR).
    """
    value = alpha * dropped.square().mean()
    return value + beta * raw.diff(dim=0).square().mean() if len(raw) > 1 else value


@functools.lru_cache(maxsize=1)
def chunk_lengths(total: int, bptt: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the lengths of the text chunks in an epoch. They depend only on the seed and the epoch.

    A length is normally distributed with standard deviation 5. Its mean is ``bptt``, or ``bptt / 2`` with probability
    0.05. It is at least 5. The last chunk is the remainder of the text.
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
    """NT-ASGD: average the weights from the epoch on in which the validation loss stops falling.

    Averaging starts when the loss is above the best loss of all epochs except the last ``patience`` ones.

    Arguments:
        parameters: the parameters of the model.
        patience: number of epochs; 0 disables averaging.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], patience: int) -> None:
        self.parameters = list(parameters)
        self.patience = patience
        self.losses: list[float] = []
        self.means: list[Tensor] | None = None
        self.count = 0

    @property
    def is_on(self) -> bool:
        """Whether averaging has started."""
        return self.means is not None

    def note(self, loss: float) -> None:
        """Record the validation loss of an epoch."""
        known = self.losses[: -self.patience] if self.patience else []
        if self.means is None and known and loss > min(known):
            self.means = [p.detach().clone() for p in self.parameters]
        self.losses.append(loss)

    def step(self) -> None:
        """Update the average after an optimizer step."""
        if self.means is not None:
            self.count += 1
            for mean, p in zip(self.means, self.parameters, strict=True):
                mean.lerp_(p.detach(), 1 / self.count)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within a context, replace the weights by their averages if averaging has started."""
        if self.means is None or self.count == 0:
            yield
            return
        trained = [p.detach().clone() for p in self.parameters]
        vector_to_parameters(parameters_to_vector(self.means), self.parameters)
        try:
            yield
        finally:
            vector_to_parameters(parameters_to_vector(trained), self.parameters)

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint."""
        return {"losses": self.losses, "means": self.means, "count": self.count}

    def load_state_dict(self, state: dict) -> None:
        """Load a state that :meth:`state_dict` returned."""
        means = state["means"]
        self.means = means and [mean.to(p) for mean, p in zip(means, self.parameters, strict=True)]
        self.losses, self.count = state["losses"], state["count"]
