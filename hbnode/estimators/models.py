"""Classification and regression of irregular series in the conventions of scikit-learn."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn import config_context
from sklearn.base import ClassifierMixin, RegressorMixin, clone
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import RidgeClassifierCV, RidgeCV
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import assert_all_finite, check_array, check_random_state, column_or_1d
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from typing_extensions import Self, override

from hbnode._checks import as_real, check_choice, level_of_user, warn_if_swapped
from hbnode.data import Series
from hbnode.estimators.base import SeriesEstimator, targets_of
from hbnode.estimators.forecast_models import bound, check_level
from hbnode.estimators.networks import SeriesNetwork, batched, common_start, config_of, kept_random_state
from hbnode.estimators.smoother import OscillatorSmoother
from hbnode.features import OscillatorFeatures, RocketFeatures, Summaries, check_range, grid_of, usual

if TYPE_CHECKING:
    from numpy.typing import NDArray

Model = Literal["auto", "features", "rocket", "oscillators", "odernn", "gru"]
Clock = Literal["relative", "absolute"]
NETWORKS = ("oscillators", "odernn", "gru")
ALPHAS = np.logspace(-2.75, 6.25, 19)  # penalties of the ridge regression; thousands of weak features need large ones
FOLDS = 4
BOOSTING_FROM = 1000  # number of series from which boosting is tried
TREES = {"learning_rate": 0.05, "max_leaf_nodes": 15, "max_features": 0.3, "l2_regularization": 1.0}
MEMBERS = 3  # maximum number of models whose outputs are averaged
LONGEST = 40.0  # candidates after the first are left out if their predicted time in seconds is longer
PARTS = 5  # number of folds for networks: one validates a network, the others train it
# The smoother is tried with at most SPARSE_SAMPLES samples in a series, or at least SPARSE_POINTS points per sample.
SPARSE_SAMPLES, SPARSE_POINTS = 16, 3
GOOD_LOSS = 0.15  # "auto" does not try the smoother, which is slow, if another cross-validated loss is smaller


class _Targets(NamedTuple):
    """The targets, weights and groups of all series.

    Attributes:
        values: codes of classes, (batch,), or standardised numbers, (batch, targets).
        weights: weights with the mean 1, (batch,).
        groups: codes of groups, (batch,). All series of a group are in the same fold. None without groups.
    """

    values: NDArray[Any]
    weights: NDArray[Any]
    groups: NDArray[Any] | None

    def fitted(self, head: Any, features: NDArray[Any], rows: Any = slice(None)) -> Any:
        """Return a clone of the estimator ``head``, fitted to the series with the indices ``rows``.

        ``features`` (batch, features) are those of all series. The targets and weights are those of this object.
        """
        name = f"{head.steps[-1][0]}__sample_weight" if isinstance(head, Pipeline) else "sample_weight"
        weights = None if (self.weights == 1).all() else self.weights[rows]  # faster for some estimators
        known = np.where(np.isnan(features[rows]).all(0), 0.0, features[rows])  # trees refuse a column without a value
        with config_context(enable_metadata_routing=False):  # weights are passed by name to the last step
            return clone(head).fit(known, self.values[rows], **{name: weights})


class _Scaler(StandardScaler):
    """A scaler that standardises features and gives larger weights to static features, the last columns.

    With weight 1, a ridge regression would hardly use a few static columns among thousands of features. With the same
    total weight as all other columns, static columns would hardly be regularised. The weight is the geometric mean of
    these two.

    Standardised features are clipped to ±√n, where n is the number of training series. No training feature exceeds this
    bound. A new feature that was nearly constant in training could exceed it and dominate all others.

    Arguments:
        static: number of static features.
    """

    def __init__(self, static: int = 0) -> None:
        super().__init__()
        self.static = static

    def transform(self, X: Any, copy: bool | None = None) -> Any:
        """Standardise the features X (batch, features), clip them, and multiply static features by their weight."""
        most = np.sqrt(np.max(self.n_samples_seen_))
        found = np.asarray(super().transform(X, copy)).clip(-most, most)
        if self.static:
            found[:, -self.static :] *= (found.shape[1] / self.static) ** 0.25
        return found


@contextmanager
def _without_time_warnings() -> Iterator[None]:
    """A context in which feature transformers do not warn of wrong times, because the estimators warn of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"times must be those of fit|\d+ of \d+ series last much longer")
        yield


class _SeriesModel(SeriesEstimator):
    """The base class of :class:`SeriesClassifier` and :class:`SeriesRegressor`, which selects and fits a model."""

    _outputs: int
    prior_: NDArray[Any]
    _splitters: tuple[Any, Any]  # classes of scikit-learn that split series without and with groups
    _heads: Callable[..., tuple[Any, Any]]  # returns a linear estimator (ridge) and boosted trees, which take features
    _output: Callable[..., NDArray[Any]]  # returns the outputs (batch, outputs) of a fitted estimator for features
    _set_targets: Callable[..., _Targets]  # converts y, weights and groups
    _loss: Callable[..., Tensor]  # returns the loss of each series, (batch,)
    _keep: Callable[..., None]  # processes outputs of held-out series, (batch, outputs), NaN for other series

    def __init__(
        self, model: Model = "auto", *, id: str | None = None, time: str | None = None,
        values: str | Sequence[str] | None = None, static: str | Sequence[str] | None = None,
        clock: Clock | None = None, reconstruction: Any = "auto", hidden_size: int = 32, dropout: float = 0.1,
        weight_decay: float = 0.01, learning_rate: float = 5e-3, max_epochs: int = 100, patience: int = 10,
        n_members: int = 3, time_budget: float | None = None, n_jobs: int | None = None,
        device: torch.device | str | None = None, random_state: Any = None, progress: bool | None = None,
    ) -> None:  # fmt: skip
        self.model: Any = model
        self.id, self.time, self.values, self.static = id, time, values, static
        self.clock, self.reconstruction = clock, reconstruction
        self.hidden_size, self.dropout, self.weight_decay = hidden_size, dropout, weight_decay
        self.learning_rate, self.max_epochs, self.patience = learning_rate, max_epochs, patience
        self.n_members, self.time_budget, self.n_jobs = n_members, time_budget, n_jobs
        self.device, self.random_state, self.progress = device, random_state, progress

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> Self:
        """Fit the model.

        Pandas objects with targets, weights or groups are matched to the series by id if their index holds the ids.

        Arguments:
            X: the series.
            y: a label or a number for each series, (batch,); for the regressor also (batch, targets).
            sample_weight: weight of each series in all losses, (batch,). Default: ``None``
            groups: group of each series, (batch,), such as the patient. Series of a group are held out together.
                Default: ``None``

        Raises:
            ValueError: if an index has other ids than the series, or X, y, weights and groups have different lengths.
        """
        warn_if_swapped(X)
        self._keep(*self._fit(X, y, sample_weight, groups))
        return self

    @kept_random_state()
    def _fit(self, data: Any, y: Any, sample_weight: Any, groups: Any) -> tuple[NDArray[Any], _Targets]:
        """Fit the model. Return the outputs for held-out series, (batch, outputs), and the targets.

        Outputs are NaN for series that were never held out.
        """
        check_choice(self.model, "model", get_args(Model))
        if self.clock is not None:
            check_choice(self.clock, "clock", get_args(Clock))
        series = self._to_series(data, reset=True)
        y = targets_of(y, series, data)
        weights = np.ones(len(series))
        if groups is not None:
            groups = np.unique(column_or_1d(targets_of(groups, series, data, "groups")), return_inverse=True)[1]
        if sample_weight is not None:
            weights = targets_of(sample_weight, series, data, "sample_weight")
            weights = _check_sample_weight(weights, weights, ensure_non_negative=True)
            rows = weights.nonzero()[0]  # series with a weight of 0 are removed
            series, y, weights = series.select(rows), y[rows], weights[rows]
            groups = None if groups is None else groups[rows]
        if groups is not None and len(np.unique(groups)) < 2:
            raise ValueError("groups must have at least 2 different entries, got one. Fix: groups=None.")
        if len(series) < 2:
            raise ValueError("X must have at least 2 series, got one sample. Fix: a list of all series, [(t, x), ...].")
        self._check_columns(series, y)
        targets = self._set_targets(y, weights, groups)
        kept = usual(series)
        is_together = series.origin is None and common_start(kept) is not None
        self.is_absolute_ = is_together if self.clock is None else self.clock == "absolute"
        series, kept, random = self._on_axis(series), self._on_axis(kept), check_random_state(self.random_state)
        times = kept.t[kept.mask.any(-1)]
        self.seen_ = (float(times.min()), float(times.max())) if len(times) else (0.0, 0.0)
        if self.model in NETWORKS:
            self.model_ = self.model
            return self._fit_networks(series, targets, random), targets
        return self._fit_features(series, targets, random), targets

    def _on_axis(self, series: Series) -> Series:
        """Return the series with the times that the model uses: absolute, or since the first sample of each series."""
        return series if self.is_absolute_ else dataclasses.replace(series, t=series.t - series.t[:, :1], origin=None)

    # Features

    @_without_time_warnings()
    def _fit_features(self, series: Series, targets: _Targets, random: np.random.RandomState) -> NDArray[Any]:
        """Fit all candidates. Store the best one, and those whose outputs are averaged with it.

        Return the cross-validated outputs of the stored candidates, (batch, outputs).
        """
        budget = np.inf if self.time_budget is None else as_real(self.time_budget, "time_budget", "time_budget=60")
        start = monotonic()
        found: list[tuple[str, NDArray[Any], tuple[Any, Any, float]]] = []
        self.cv_loss_: dict[str, float] = {}
        self.left_out_: dict[str, str] = {}
        for name, transformer, head, seconds in self._candidates(series, int(random.randint(2**31 - 1))):
            if found and monotonic() - start >= budget:
                self.left_out_[name] = "time_budget"
            elif found and seconds > LONGEST:
                self.left_out_[name] = f"about {seconds:.0f} s"
            elif self.model == "auto" and name == "rocket, oscillators" and min(self.cv_loss_.values()) < GOOD_LOSS:
                self.left_out_[name] = f"another loss is below {GOOD_LOSS}"
            else:
                features = transformer.fit_transform(series)
                outputs, scale = self._held_out(head, features, targets)
                self.cv_loss_[name] = self._cv_loss(outputs, targets)
                found.append((name, outputs, (transformer, targets.fitted(head, features), scale)))
        late = [name for name, why in self.left_out_.items() if why == "time_budget"]
        if late:
            warnings.warn(
                f"time_budget={self.time_budget} left out the models {late}. Fix: time_budget=None.",
                stacklevel=level_of_user(),
            )
        found.sort(key=lambda each: self.cv_loss_[each[0]])
        self.model_, outputs, member = found[0]
        self.members_, least = [member], outputs
        for name, other, member in found[1:MEMBERS]:
            mean = outputs + (other - outputs) / (len(self.members_) + 1)
            loss = self._cv_loss(mean, targets)
            if loss < self.cv_loss_[self.model_] or self._is_as_good(other, least, targets):
                self.model_, outputs = f"{self.model_} + {name}", mean
                self.cv_loss_[self.model_] = loss
                self.members_.append(member)
        return outputs

    def _is_as_good(self, outputs: NDArray[Any], least: NDArray[Any], targets: _Targets) -> bool:
        """Return whether a model with the given ``outputs`` is about as good as the best model, with outputs ``least``.

        This is the case if its mean loss exceeds that of the best model by at most two standard errors of the
        difference. The outputs are (batch, outputs) each.
        """
        known = ~np.isnan(least).any(1)
        excess = ((self._losses(outputs, targets) - self._losses(least, targets)) * targets.weights)[known]
        return known.any() and bool(excess.mean() <= 2 * excess.std() / np.sqrt(len(excess)))

    def _pairs(self, data: Any, y: Any, sample_weight: Any) -> tuple[Series, NDArray[Any], NDArray[Any] | None]:
        """Convert data to series. Return the series, and targets and weights in the order of the series."""
        check_is_fitted(self)
        series = self._to_series(data, reset=False)
        weights = None if sample_weight is None else targets_of(sample_weight, series, data, "sample_weight")
        return series, targets_of(y, series, data), weights

    def _answers(self, data: Any) -> NDArray[Any]:
        """Convert data to series, and return the outputs of the model for them, (batch, outputs).

        For series without an observed value the output is ``prior_``, and there is a warning.
        """
        check_is_fitted(self)
        series = self._to_series(data, reset=False)
        is_empty = ~series.mask.any(-1).any(-1).numpy()
        if is_empty.any():
            first = int(is_empty.argmax())
            warnings.warn(
                f"{is_empty.sum()} of {len(series)} series have no observed value, first series {first}: they get the "
                "class shares or the mean of y of fit. Fix: leave them out, for a Series "
                "X.select(X.mask.any(-1).any(-1)).",
                stacklevel=level_of_user(),
            )
        series = self._on_axis(series)
        fix = "clock='relative', for times since the first sample of each series"
        check_range(series, *self.seen_, fix if self.is_absolute_ else "fit to series that last as long")
        return np.where(is_empty[:, None], self.prior_, self._outputs_of(series))

    @kept_random_state()
    @_without_time_warnings()
    def _outputs_of(self, series: Series) -> NDArray[Any]:
        """Return the outputs for the series, (batch, outputs), averaged over the fitted models or networks."""
        if self.model_ in NETWORKS:
            scaled, device = self._scaled(series), self.device or "cpu"
            found = [batched(each.to(device), scaled).double().numpy() for each in self.networks_]
        else:
            found = [self._output(head, of.transform(series)) / scale for of, head, scale in self.members_]
        return np.mean(found, 0)

    def _candidates(self, series: Series, seed: int) -> list[tuple[str, Any, Any, float]]:
        """Return the models to compare.

        Each is a tuple of a name, a transformer that computes features, an estimator that takes the features, and the
        predicted time of the fit in seconds. The predicted time depends only on the size of the data, so that the same
        data give the same candidates. Its factors were measured on a slow CPU core.
        """
        found: list[tuple[str, Any, Any, float]] = []
        ridge, boosting = self._heads(seed, 0 if series.static is None else series.static.shape[1])
        count, size, channels = series.x.shape
        if self.model in ("auto", "features"):
            features = OscillatorFeatures(random_state=seed, n_jobs=self.n_jobs)
            found.append(("features", features, ridge, 0.0))
            if series.static is not None or count >= BOOSTING_FROM:
                found.append(("features, boosting", Summaries(), boosting, 1e-4 * count * channels * self._outputs))
        if self.model == "rocket" or (self.model == "auto" and importlib.util.find_spec("aeon") is not None):
            kinds, points = [self.reconstruction], len(grid_of(None, usual(series))[0])
            if self.reconstruction == "auto":
                kinds = ["linear"] if _is_regular(series) else ["linear", "last"]
                samples = float(series.mask.any(-1).sum(1).double().median())
                is_sparse = samples <= SPARSE_SAMPLES or points >= SPARSE_POINTS * samples
                # The smoother needs two values or more of each channel.
                if len(kinds) > 1 and is_sparse and bool((series.mask.sum((0, 1)) > 1).all()):
                    kinds.append("oscillators")
            width, spent = RocketFeatures().num_features, 0.0
            for kind in kinds:
                of = OscillatorSmoother(2, max_iter=15, random_state=seed) if kind == "oscillators" else kind
                rocket = RocketFeatures(reconstruction=of, random_state=seed, n_jobs=self.n_jobs)
                spent += 1.2e-6 * count * channels * points + 5e-10 * count * width * min(count, width)
                spent += 7e-6 * count * channels * (size + points) if kind == "oscillators" else 0.0
                found.append((f"rocket, {kind}" if len(kinds) > 1 else "rocket", rocket, ridge, spent))
        return found

    def _held_out(self, head: Any, features: NDArray[Any], targets: _Targets) -> tuple[NDArray[Any], float]:
        """Return the cross-validated outputs (batch, outputs) of an estimator of features.

        Outputs are NaN for series that are never held out. The second result is the number by which the outputs were
        divided: the temperature of a classifier, 1 for a regressor.
        """
        outputs = np.full((len(features), self._outputs), np.nan)
        for train, held in self._folds(targets, FOLDS, 0):
            outputs[held] = self._output(targets.fitted(head, features, train), features[held])
        return outputs, 1.0

    def _folds(self, targets: _Targets, count: int, seed: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Divide the series into at most ``count`` folds.

        Return a list with a pair for each fold: the indices of the training series, and those of the held-out series.
        """
        values, _, groups = targets
        count = min(count, len(values) if groups is None else len(np.unique(groups)))
        folds = self._splitters[groups is not None](count, shuffle=True, random_state=seed)
        return list(folds.split(values, values, groups))

    def _cv_loss(self, outputs: NDArray[Any], targets: _Targets) -> float:
        """Return the weighted mean loss of the cross-validated ``outputs``, without series whose outputs are NaN.

        If all outputs are NaN, the result is infinite.
        """
        known = ~np.isnan(outputs).any(1)
        losses = self._losses(outputs, targets)[known]
        return float(np.average(losses, weights=targets.weights[known])) if known.any() else np.inf

    def _losses(self, outputs: NDArray[Any], targets: _Targets) -> NDArray[Any]:
        losses: NDArray[Any] = self._loss(torch.as_tensor(outputs), torch.as_tensor(targets.values)).numpy()
        return losses

    # Networks

    @_without_time_warnings()
    def _fit_networks(self, series: Series, targets: _Targets, random: np.random.RandomState) -> NDArray[Any]:
        device, outputs = self.device or "cpu", torch.full((self.n_members, len(series), self._outputs), torch.nan)
        self._fit_scale(series, np.inf)  # constant channels become 0, so they have no weights to train
        scaled, weights = self._scaled(series), torch.as_tensor(targets.weights).float().to(device)
        goals = torch.as_tensor(targets.values, dtype=torch.float32 if targets.values.ndim > 1 else None).to(device)
        self.networks_ = []
        for member in range(self.n_members):
            seed = int(random.randint(2**31 - 1))
            folds = self._folds(targets, PARTS, seed) or [(np.arange(len(series)),) * 2]
            train, held = (torch.as_tensor(rows) for rows in folds[0])

            def mean_loss(outputs: Tensor, rows: Tensor) -> Tensor:
                return (weights[rows] * self._loss(outputs, goals[rows])).mean()

            def loss(network: SeriesNetwork, rows: Tensor, train: Tensor = train) -> Tensor:
                return mean_loss(network(scaled.select(train[rows])), train[rows])

            def validation(network: SeriesNetwork, held: Tensor = held) -> float:
                return float(mean_loss(batched(network, scaled.select(held)).to(device), held))

            torch.manual_seed(seed)
            config = config_of(usual(scaled), self.model, self._outputs, self.hidden_size, self.dropout)
            if self.is_absolute_ and config["start"] is None:  # the start times differ widely
                config |= {"start": self.seen_[0], "span": self.seen_[1] - self.seen_[0] or 1.0}
            name, network = f"{self.model} {member + 1}/{self.n_members}", SeriesNetwork(**config)
            network = self._trained(network, loss, scaled.lengths[train], validation, seed, name)
            self.networks_.append(network)
            outputs[member, held] = batched(network, scaled.select(held))
        return outputs.nanmean(0).double().numpy()

    def _scaled(self, series: Series) -> Series:
        scaled = super()._scaled(series)
        mask = series.mask & ~scaled.x.isnan()  # a channel without training values is NaN
        scaled = dataclasses.replace(scaled, x=torch.nan_to_num(scaled.x), mask=mask)
        return scaled.to(self.device or "cpu", torch.float32)


class SeriesClassifier(ClassifierMixin, _SeriesModel):
    """A classifier of irregular series with missing values.

    Data may be a :class:`hbnode.data.Series`, a list of pairs (t, x), an array (batch, channels, T), or a table in long
    form. The arguments ``id``, ``time``, ``values`` and ``static`` name the columns of a table, as in
    :func:`hbnode.data.as_series`. NaN is a missing value.

    Arguments:
        model: one of

            - ``"features"``: a ridge classifier on :class:`hbnode.features.OscillatorFeatures`. With static features or
              at least 1,000 series, boosted trees on summaries of each channel are a further candidate;
            - ``"rocket"``: a ridge classifier on :class:`hbnode.features.RocketFeatures` (MiniRocket of aeon);
            - ``"auto"``: all candidates of ``"features"`` and ``"rocket"``;
            - ``"oscillators"`` (:class:`hbnode.nn.OscillatorStack`), ``"odernn"`` (:class:`hbnode.ODERNN`) or
              ``"gru"``: a recurrent network.

            The candidate with the smallest cross-validated log loss is selected. Its outputs are averaged with up to
            two further candidates, in the order of their losses: a candidate is added if its loss is within two
            standard errors of the smallest loss, or if it reduces the loss of the average. Default: ``"auto"``
        id: for a table in long form, the column that identifies the series. Default: ``None``
        time: for a table, the column of times: numbers, or dates. Default: ``None``
        values: for a table, the columns of values. None takes all columns that no other argument names. It raises an
            error for a column that reveals y, and warns of a column that is constant in each series.
            Default: ``None``
        static: for a table, columns that are constant within each series. They may be categories; new data may have
            categories that were not in the training data. Default: ``None``
        class_weight: weights of the classes in all losses, {label: weight}, which multiply ``sample_weight``.
            ``"balanced"`` is the inverse of the share of each class. Default: ``None``
        clock: ``"relative"``: times are counted from the first sample of each series, even if it has no values.
            ``"absolute"``: times are used as they are, so that the time of an event can matter. New series must then
            lie within the training times, and their dates must have a time zone if and only if the training dates have
            one. None: dates are relative. Numbers and durations are absolute if the start times of the training series
            differ by at most the duration of the longest series, otherwise relative. In all cases there is a warning if
            a series is partly outside the training times. Default: ``None``
        reconstruction: for ``"rocket"``, how to interpolate series on a regular grid: ``"linear"``, ``"last"`` (the
            last value), ``"oscillators"`` (:class:`OscillatorSmoother` with two oscillators and 15 iterations), or
            ``"auto"``, which compares them. ``"auto"`` includes oscillators only if series have at most 16 samples or
            the grid has at least three points per sample; with ``model="auto"``, also only if no other loss is below
            0.15. Default: ``"auto"``
        hidden_size: size of a network's state. Default: ``32``
        dropout: probability that a feature of a network's inputs or state is set to 0 in training. Default: ``0.1``
        weight_decay: weight decay of a network. Default: ``0.01``
        learning_rate: learning rate of a network. Default: ``0.005``
        max_epochs: maximum number of epochs of a network. Default: ``100``
        patience: number of epochs without a smaller validation loss after which training stops. Default: ``10``
        n_members: number of networks whose outputs are averaged; each uses other validation series. Default: ``3``
        time_budget: time in seconds after which no further candidate is fitted. A warning names the candidates left
            out. At least one candidate is fitted, and a fit in progress is finished. Networks are not limited. The
            selected model then depends on the speed of the machine. None leaves out only candidates whose time,
            predicted from the size of the data, exceeds 40 seconds. Default: ``None``
        n_jobs: number of parallel jobs of joblib for features. Default: ``None``
        device: device of the networks. Default: ``None``
        random_state: seed. Default: ``None``
        progress: whether to show a progress bar; None shows it on a terminal. Default: ``None``

    Attributes:
        features_: the names of the channels.
        static_features_: the names of the static features.
        classes_: the labels.
        model_: the names of the models whose outputs are averaged, joined by " + ".
        cv_loss_: cross-validated log loss of each candidate and of averages. Classes with only one series (or group)
            are excluded; the loss is infinite if no class remains.
        left_out_: candidates that were not fitted, with the reason: a predicted time over 40 seconds, ``time_budget``,
            or a small loss of another candidate.

    Example:
        >>> import numpy as np, hbnode.estimators
        >>> random = np.random.default_rng(0)
        >>> times = [np.sort(random.uniform(0, 10, 30)) for _ in range(40)]
        >>> labels = np.arange(40) % 2
        >>> series = [(t, np.sin((1 + y) * t)) for t, y in zip(times, labels)]
        >>> model = hbnode.estimators.SeriesClassifier("features", random_state=0).fit(series[:30], labels[:30])
        >>> float(model.score(series[30:], labels[30:]))
        1.0
    """

    _splitters = StratifiedKFold, StratifiedGroupKFold

    def __init__(
        self, model: Model = "auto", *, id: str | None = None, time: str | None = None,
        values: str | Sequence[str] | None = None, static: str | Sequence[str] | None = None,
        class_weight: Literal["balanced"] | dict[Any, float] | None = None, clock: Clock | None = None,
        reconstruction: Any = "auto", hidden_size: int = 32, dropout: float = 0.1, weight_decay: float = 0.01,
        learning_rate: float = 5e-3, max_epochs: int = 100, patience: int = 10, n_members: int = 3,
        time_budget: float | None = None, n_jobs: int | None = None, device: torch.device | str | None = None,
        random_state: Any = None, progress: bool | None = None,
    ) -> None:  # fmt: skip
        shared = {name: value for name, value in locals().items() if name not in ("self", "__class__", "class_weight")}
        super().__init__(**shared)
        self.class_weight = class_weight

    def _keep(self, outputs: NDArray[Any], targets: _Targets) -> None:
        lost = np.setdiff1d(targets.values, targets.values[~np.isnan(outputs).any(1)])
        if self.model_ not in NETWORKS and len(lost):
            warnings.warn(
                f"the classes {self.classes_[lost].tolist()} have one series each, or one group: it stays in training, "
                "and the losses that choose the model leave it out. Fix: more series of these classes, or none.",
                stacklevel=level_of_user(),
            )

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return the probabilities of the classes, (batch, classes), in the order of ``classes_``.

        For a series without an observed value these are the shares of the classes in the training data, and there is a
        warning. Its static features are not used.
        """
        return softmax(self._answers(X), 1)

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable label of each series, (batch,); without observed values, the most frequent label."""
        codes = self._answers(X).argmax(1)
        return self.classes_[codes]

    @override
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy of :meth:`predict`. Labels and weights are matched to the series as in :meth:`fit`."""
        return super().score(*self._pairs(X, y, sample_weight))

    def _set_targets(self, y: NDArray[Any], weights: NDArray[Any], groups: NDArray[Any] | None) -> _Targets:
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        shares = np.bincount(codes, weights) / weights.sum()
        self._outputs, self.prior_ = len(self.classes_), np.log(np.maximum(shares, 1e-300))
        if len(self.classes_) < 2:
            one = self.classes_.tolist()[0]
            raise ValueError(f"y must have at least 2 classes, got one class, {one!r}. Fix: SeriesRegressor.")
        weights = weights * compute_sample_weight(self.class_weight, y)
        return _Targets(codes, weights / weights.mean(), groups)

    def _heads(self, seed: int, static: int) -> tuple[Any, Any]:
        return (
            make_pipeline(_Scaler(static), RidgeClassifierCV(ALPHAS)),
            HistGradientBoostingClassifier(**TREES, random_state=seed),
        )

    def _held_out(self, head: Any, features: NDArray[Any], targets: _Targets) -> tuple[NDArray[Any], float]:
        logits, _ = super()._held_out(head, features, targets)
        if np.isnan(logits).all():
            return logits, 1.0
        known = ~np.isnan(logits).any(1)
        share = self._outputs / (self._outputs + known.sum())

        def loss(log_temperature: float) -> float:
            """Return the cross-validated loss of the logits divided by the temperature.

            The loss includes virtual series, one per class, whose targets are uniform over the classes. So few series
            cannot give extreme probabilities.
            """
            scaled = logits / np.exp(log_temperature)
            return (1 - share) * self._cv_loss(scaled, targets) - share * float(log_softmax(scaled[known], 1).mean())

        temperature = float(np.exp(minimize_scalar(loss, bounds=(-3, 3), method="bounded").x))
        return logits / temperature, temperature

    def _folds(self, targets: _Targets, count: int, seed: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Return folds in which each class has nearly the same share.

        If all series of a class would be held out in one fold, they stay in its training series.
        """
        codes, found = targets.values, []
        most = int(np.bincount(codes).max())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The least populated class")
            folds = super()._folds(targets, min(count, most), seed) if most > 1 else []
        for train, held in folds:
            is_known = np.isin(codes[held], codes[train])
            if is_known.any():
                found.append((np.concatenate([train, held[~is_known]]), held[is_known]))
        return found

    def _output(self, head: Any, features: NDArray[Any]) -> NDArray[Any]:
        logits = head.decision_function(features)  # (batch,) for two classes
        return logits if logits.ndim == 2 else np.stack([-logits, logits], 1) / 2

    @staticmethod
    def _loss(outputs: Tensor, values: Tensor) -> Tensor:
        return cross_entropy(outputs, values, reduction="none")


class SeriesRegressor(RegressorMixin, _SeriesModel):
    """A regressor that predicts one or several numbers for each irregular series; values may be missing.

    Data may be a :class:`hbnode.data.Series`, a list of pairs (t, x), an array (batch, channels, T), or a table in long
    form. NaN is a missing value. The arguments are those of :class:`SeriesClassifier`, without ``class_weight``.
    Candidates are compared by the cross-validated mean squared error, divided by the variance of y.

    Attributes:
        model_: the names of the models whose outputs are averaged, joined by " + ".
        cv_loss_: cross-validated mean squared error of each candidate and of averages, divided by the variance of y.
        left_out_: candidates that were not fitted, with the reason: a predicted time over 40 seconds, ``time_budget``,
            or a small loss of another candidate.

    Example:
        >>> import numpy as np, hbnode.estimators
        >>> random = np.random.default_rng(0)
        >>> x = random.normal(size=(60, 1, 40)).cumsum(-1)
        >>> model = hbnode.estimators.SeriesRegressor("features", random_state=0).fit(x[:50], x[:50, 0].mean(1))
        >>> model.score(x[50:], x[50:, 0].mean(1)) > 0.9
        True
    """

    _splitters = KFold, GroupKFold

    def _keep(self, outputs: NDArray[Any], targets: _Targets) -> None:
        units = np.arange(len(outputs)) if targets.groups is None else targets.groups
        known = ~np.isnan(outputs).any(1)
        errors = abs(outputs - targets.values)[known]
        self.errors_ = (errors, units[known]), (abs(targets.values), units)  # errors of the model, and of the mean of y

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the predicted numbers in the shape of y.

        For a series without an observed value this is the mean of y in the training data, and there is a warning. Its
        static features are not used.
        """
        return self._numbers(self._answers(X))

    def predict_interval(self, X: Any, level: float = 90) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the lower and the upper bounds of bands around the predicted numbers, each in the shape of y.

        The half width of a band of the level L in percent is the ⌈(n + 1) L / 100⌉-th smallest of n absolute errors.
        These are the cross-validated errors of the training series. A band contains at least L % of the numbers of new
        series if the errors of the final model are distributed as the cross-validated errors. The final model was
        trained on more series, so its errors are usually no larger. The share L is an average over all series and
        training sets. It need not hold for each kind of series. It holds for each target separately.

        A band is infinite if n is too small for its level: 90, 95 and 99 % need 9, 19 and 99 series (or groups). The
        band of a series without an observed value is the mean of y with a half width from the deviations of y.

        Arguments:
            X: the series.
            level: L. Default: ``90``

        Raises:
            ValueError: if the level is not in (1, 100).
        """
        check_level(level)
        check_is_fitted(self)
        series = self._to_series(X, reset=False)
        outputs, is_empty = self._answers(series), ~series.mask.any(-1).any(-1).numpy()
        known, none = ([bound(each, units, level) for each in errors.T] for errors, units in self.errors_)
        width = np.where(is_empty[:, None], none, known)
        return self._numbers(outputs - width), self._numbers(outputs + width)

    def _numbers(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """Convert standardised outputs (batch, outputs) to numbers with the unit and the shape of the targets y."""
        found = outputs * self.target_std_ + self.target_mean_
        return found if self.is_wide_ else found[:, 0]

    @override
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return R² of :meth:`predict`. Numbers and weights are matched to the series as in :meth:`fit`."""
        return super().score(*self._pairs(X, y, sample_weight))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _set_targets(self, y: NDArray[Any], weights: NDArray[Any], groups: NDArray[Any] | None) -> _Targets:
        values = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        self.is_wide_ = values.ndim == 2
        values = values.reshape(len(values), -1)
        self._outputs, self.target_mean_ = values.shape[1], np.average(values, 0, weights)
        spread = np.sqrt(np.average((values - self.target_mean_) ** 2, 0, weights))
        self.target_std_, self.prior_ = np.where(spread > 0, spread, 1.0), np.zeros(self._outputs)
        return _Targets((values - self.target_mean_) / self.target_std_, weights / weights.mean(), groups)

    def _heads(self, seed: int, static: int) -> tuple[Any, Any]:
        return (
            make_pipeline(_Scaler(static), RidgeCV(ALPHAS)),
            MultiOutputRegressor(HistGradientBoostingRegressor(**TREES, random_state=seed)),
        )

    def _output(self, head: Any, features: NDArray[Any]) -> NDArray[Any]:
        return head.predict(features).reshape(len(features), -1)

    @staticmethod
    def _loss(outputs: Tensor, values: Tensor) -> Tensor:
        return mse_loss(outputs, values, reduction="none").mean(1)


def _is_regular(series: Series) -> bool:
    """Return whether all samples of all series are equally spaced, and no values are missing."""
    is_sample = torch.arange(series.t.shape[1]) < series.lengths.unsqueeze(1)
    gaps = series.t.diff()[is_sample[:, 1:]]
    is_equal = not len(gaps) or bool((gaps.max() - gaps.min()) <= 1e-6 * gaps.max())
    return is_equal and bool(series.mask[is_sample].all())
