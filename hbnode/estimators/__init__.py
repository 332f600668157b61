"""Estimators of irregular series in the conventions of scikit-learn; they need ``pip install hbnode[series]``."""

from hbnode.estimators.forecaster import SeriesForecaster
from hbnode.estimators.models import SeriesClassifier, SeriesRegressor
from hbnode.estimators.smoother import OscillatorSmoother

__all__ = ["OscillatorSmoother", "SeriesClassifier", "SeriesForecaster", "SeriesRegressor"]
