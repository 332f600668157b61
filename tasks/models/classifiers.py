"""Classifiers of irregular series: ``model(x, t, mask, lengths, static)`` -> logits.

All networks standardise the values. Their inputs are the values, the mask, the time since the last observation of each
feature, and the static features. The networks differ in how the state changes between samples.

- "node", "anode", "sonode", "hbnode", "ghbnode": ODE-RNNs. The last observed value replaces a missing one and decays.
- "gru", "momentum_lstm", "cfc", "oscillators", "selective": missing values are zero. The time since the last sample is
  a further input; for "cfc" and oscillators it is the time over which the state evolves.
- "gru-d": missing values are replaced as in ODE-RNNs, and the hidden state decays too (Che et al., arXiv:1606.01865).
- "ncde": a neural controlled differential equation, dz = f(z) dX (Kidger et al., arXiv:2005.08926). The path X is
  linear between the samples. Its components are the time, the last observed values, and the number of observations of
  each feature. rk4 takes one step between two samples.

Five models are not neural networks:

- "boosting", "logistic": gradient boosting and logistic regression on the count, the first, last, mean, smallest and
  largest value, the standard deviation and the slope of each feature, and on the static features.
- "minirocket": logistic regression on MiniRocket's features (Dempster et al., arXiv:2012.08791) of the linearly
  interpolated series, and on the static features.
- "last": logistic regression on the last observed value of each feature, and on the static features.
- "constant": predicts the class frequencies of the training series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hbnode
from hbnode.data import Series
from hbnode.nn.sequences import Inputs, Sequences
from tasks.common.config import MODELS
from tasks.common.train import Samples
from tasks.models.baselines import BASELINES, KINDS

SHALLOW = ("boosting", "logistic", "minirocket", "last", "constant")
NETWORKS = (*MODELS, *(name for name in BASELINES if name != "lstm"), "momentum_lstm", "ncde")
CLASSIFIERS = (*NETWORKS, *SHALLOW)


class Reader(nn.Module):
    """Base class of sequence encoders, which return features (batch, T, hidden_size) after each sample.

    Arguments:
        features: number of features of a sample.
        static: number of static features.
        unit: the time unit. Time gaps are given to the network in tenths of it, so that they are about 1.
        missing: see :class:`hbnode.ODERNN`.
        dropout: dropout probability of the inputs.
    """

    def __init__(self, features: int, static: int, unit: float, missing: Any, dropout: float) -> None:
        super().__init__()
        self.inputs = Inputs(features, missing, True, True, static)
        self.unit, self.dropout = unit, nn.Dropout(dropout)

    def fed(self, x: Tensor, t: Tensor, mask: Tensor, lengths: Tensor, static: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the inputs (batch, T, n) of the network, and the time gap before each sample (batch, T)."""
        sequences = Sequences(x.shape[2], x, t, mask, lengths, self.unit)
        gaps = sequences.t.diff(dim=1, prepend=sequences.t[:, :1]) / (0.1 * self.unit)
        gaps = gaps if sequences.valid is None else torch.where(sequences.valid, gaps, 1.0)  # times go on in padding
        return self.dropout(self.inputs(sequences, static, None, self.unit)[0]), gaps.to(x.dtype)


class ODEReader(nn.Module):
    """A sequence encoder that returns the h of an ODE-RNN after each sample."""

    def __init__(
        self, name: str, features: int, static: int, unit: float, size: int, options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        inputs = {"missing": "decay", "mask_features": True, "elapsed_features": True}
        given: dict[str, Any] = {**inputs, **options, "static_size": static, "time_unit": unit, "field": name}
        self.rnn = hbnode.ODERNN(features, size, **given)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor, lengths: Tensor, static: Tensor | None) -> Tensor:
        """Return features (batch, T, size)."""
        return self.rnn(x, t, mask=mask, lengths=lengths, static=static)[0]


class RecurrentReader(Reader):
    """A sequence encoder that returns the outputs of a recurrent network."""

    def __init__(self, name: str, features: int, static: int, unit: float, size: int, dropout: float) -> None:
        super().__init__(features, static, unit, "decay" if name == "gru-d" else "zero", dropout)
        self.takes_gaps = name != "momentum_lstm"
        count = self.inputs.size
        if self.takes_gaps:
            self.net: nn.Module = KINDS[name](count, size)
        else:
            self.net = hbnode.nn.MomentumLSTM(count + 1, size, batch_first=True)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor, lengths: Tensor, static: Tensor | None) -> Tensor:
        """Return features (batch, T, size)."""
        fed, gaps = self.fed(x, t, mask, lengths, static)
        return self.net(fed, gaps)[0] if self.takes_gaps else self.net(torch.cat([fed, gaps.unsqueeze(-1)], -1))[0]


class Controlled(nn.Module):
    """The right-hand side f(z) dX, (batch, size), of a neural CDE. dX is the change of the path per unit of time."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size * channels), nn.Tanh())
        self.change = torch.zeros(())

    def forward(self, z: Tensor) -> Tensor:
        """Return the derivative of z."""
        return (self.net(z).unflatten(1, (z.shape[1], -1)) @ self.change.unsqueeze(-1))[..., 0]


class CDEReader(Reader):
    """A sequence encoder that returns the state of a neural controlled differential equation at each sample."""

    def __init__(self, features: int, static: int, unit: float, size: int, dropout: float) -> None:
        super().__init__(features, 0, unit, "hold", dropout)
        channels = 1 + 2 * features
        self.start = nn.Linear(channels + static, size)
        self.control = Controlled(channels, size)
        self.field = hbnode.NODE(self.control)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor, lengths: Tensor, static: Tensor | None) -> Tensor:
        """Return features (batch, T, size)."""
        fed, gaps = self.fed(x, t, mask, lengths, None)
        held, seen = fed.split([x.shape[2], fed.shape[2] - x.shape[2]], -1)
        often = seen[..., : x.shape[2]].cumsum(1)
        path = torch.cat([gaps.cumsum(1).unsqueeze(-1), held, often], -1) / 10  # scaled to about 1
        valid = torch.arange(path.shape[1], device=path.device) < lengths.to(path.device).unsqueeze(1)
        changes = torch.where(valid[:, 1:, None], path.diff(dim=1), 0.0)  # constant after the end of a series
        first = path[:, 0] if static is None else torch.cat([path[:, 0], static], -1)
        states = [self.start(first)]
        for change in changes.unbind(1):
            self.control.change = change
            states.append(hbnode.odeint(self.field, states[-1], [0.0, 1.0], method="rk4", steps=1)[-1])
        self.control.change = torch.zeros(())  # to free the graph
        return torch.stack(states, 1)


class Classifier(nn.Module):
    """A classifier that standardises series, encodes them by a network, and applies a linear head.

    Arguments:
        reader: the sequence encoder.
        size: number of features that the encoder returns.
        scale: standardises the values.
        scale_static: standardises the static features; None if there are none.
        classes: the number of classes.
        pool: input of the head, ``"last"`` or ``"last and mean"`` of the features over the samples.
        dropout: dropout probability of the head's inputs.
    """

    def __init__(
        self,
        reader: nn.Module,
        size: int,
        scale: hbnode.nn.Standardize,
        scale_static: hbnode.nn.Standardize | None,
        classes: int,
        pool: str,
        dropout: float,
    ) -> None:
        super().__init__()
        self.reader, self.scale, self.scale_static = reader, scale, scale_static
        self.takes_mean, self.dropout = pool == "last and mean", nn.Dropout(dropout)
        self.head = nn.Linear(2 * size if self.takes_mean else size, classes)

    def forward(self, x: Tensor, t: Tensor, mask: Tensor, lengths: Tensor, static: Tensor) -> Tensor:
        """Return logits (batch, classes)."""
        fixed = None if self.scale_static is None else self.scale_static(static).nan_to_num()
        path = self.reader(self.scale(x), t, mask, lengths, fixed)
        lengths = lengths.to(path.device)
        features = path[torch.arange(len(path), device=path.device), lengths - 1]
        if self.takes_mean:
            valid = torch.arange(path.shape[1], device=path.device) < lengths.unsqueeze(1)
            mean = torch.where(valid.unsqueeze(-1), path, 0.0).sum(1) / lengths.unsqueeze(1)
            features = torch.cat([features, mean], 1)
        return self.head(self.dropout(features))


def make_classifier(
    name: str, train: Samples, classes: int, unit: float, parameters: int, options: Mapping[str, Any],
    pool: str = "last", dropout: float = 0.0,
) -> Classifier:  # fmt: skip
    """Return a classifier network with approximately the given number of parameters.

    Arguments:
        name: one of :data:`NETWORKS`.
        train: x, t, mask, lengths and static features of the training data.
        classes: the number of classes.
        unit: the time unit.
        parameters: the wanted number of parameters.
        options: solver options of an ODE-RNN.
        pool: see :class:`Classifier`.
        dropout: dropout probability of the encoder's and the head's inputs, but not of an ODE-RNN's inputs.
    """
    x, _, mask, _, static = train
    features, fixed = x.shape[2], static.shape[1]

    def reader(size: int) -> nn.Module:
        if name in MODELS:
            return ODEReader(name, features, fixed, unit, size, options)
        if name == "ncde":
            return CDEReader(features, fixed, unit, size, dropout)
        return RecurrentReader(name, features, fixed, unit, size, dropout)

    def make(size: int) -> Classifier:
        scales = hbnode.nn.Standardize(features), hbnode.nn.Standardize(fixed) if fixed else None
        return Classifier(reader(size), size, *scales, classes, pool, dropout)

    model = hbnode.nn.match_parameters(make, parameters)
    model.scale.fit(x, mask)
    if model.scale_static is not None:
        model.scale_static.fit(static)
    return model


def summaries(x: Tensor, t: Tensor, mask: Tensor, lengths: Tensor, static: Tensor) -> np.ndarray:
    """Return summary statistics of each series, (batch, 8 features + static), NaN for features without observations."""
    value, time = x.double(), t.double().unsqueeze(-1).expand(x.shape)
    count = mask.sum(1).double()
    zero = torch.where(mask, value, 0.0)
    mean = zero.sum(1) / count
    spread = torch.where(mask, value - mean.unsqueeze(1), 0.0)
    at = torch.where(mask, time, 0.0).sum(1) / count
    lag = torch.where(mask, time - at.unsqueeze(1), 0.0)
    slope = (lag * spread).sum(1) / lag.square().sum(1)
    slope = torch.where(count > 1, slope, math.nan)
    least, most = torch.where(mask, value, math.inf).amin(1), torch.where(mask, value, -math.inf).amax(1)
    places = torch.arange(x.shape[1]).unsqueeze(-1)
    begin = torch.where(mask, places, x.shape[1] - 1).amin(1, keepdim=True)
    end = torch.where(mask, places, 0).amax(1, keepdim=True)
    first, last = (value.gather(1, index)[:, 0] for index in (begin, end))
    columns = [count, first, last, mean, least, most, (spread.square().sum(1) / count).sqrt(), slope]
    never = count == 0
    columns = [count, *(torch.where(never, math.nan, column) for column in columns[1:])]
    return torch.cat([*columns, static.double()], 1).numpy()


def last_values(x: Tensor, t: Tensor, mask: Tensor, lengths: Tensor, static: Tensor) -> np.ndarray:
    """Return the last observed value of each feature (NaN if there is none), and the static features."""
    features = x.shape[2]
    found = summaries(x, t, mask, lengths, static)
    return np.concatenate([found[:, 2 * features : 3 * features], found[:, 8 * features :]], 1)


def rocket(train: Samples, seed: int) -> Callable[..., np.ndarray]:
    """Return a function that computes MiniRocket's features of series and appends the static features."""
    from hbnode.features import RocketFeatures

    def series(x: Tensor, t: Tensor, mask: Tensor, lengths: Tensor) -> Series:
        return Series(x, t, mask, lengths, None, list(range(len(x))), [f"x{i}" for i in range(x.shape[2])])

    kernels = RocketFeatures(random_state=seed).fit(series(*train[:4]))
    return lambda *inputs: np.concatenate([kernels.transform(series(*inputs[:4])), inputs[4].double().numpy()], 1)


def fit_shallow(name: str, train: Samples, validation: Samples, seed: int) -> Callable[[Samples], np.ndarray]:
    """Fit a model without a network with a few settings, and choose the setting with the smallest validation loss.

    Arguments:
        name: one of :data:`SHALLOW`.
        train: x, t, mask, lengths, static features and class of the training series.
        validation: the same tensors for the validation series.
        seed: random seed of boosting and of MiniRocket.

    Returns:
        A function that takes such tensors and returns the class probabilities (series, classes).
    """
    from sklearn.dummy import DummyClassifier
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def logistic(*penalties: float) -> list[Any]:
        regressions = [LogisticRegression(C=c, max_iter=2000) for c in penalties]
        return [make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler(), one) for one in regressions]

    features = rocket(train, seed) if name == "minirocket" else last_values if name == "last" else summaries
    if name == "boosting":
        models = [
            HistGradientBoostingClassifier(max_leaf_nodes=leaves, learning_rate=rate, max_iter=100, random_state=seed)
            for leaves in (4, 15)
            for rate in (0.03, 0.1)
        ]
    elif name == "constant":
        models = [DummyClassifier(strategy="prior")]
    elif name == "minirocket":
        models = logistic(1e-5, 1e-4, 1e-3, 1e-2)  # smaller values of C, because there are thousands of features
    else:
        models = logistic(0.003, 0.03, 0.3, 3.0)
    (x, y), (held, labels) = ((features(*part[:-1]), part[-1].numpy()) for part in (train, validation))
    for model in models:
        model.fit(x, y)
    best = min(models, key=lambda one: log_loss(labels, one.predict_proba(held), labels=one.classes_))
    return lambda samples: best.predict_proba(features(*samples[:-1]))
