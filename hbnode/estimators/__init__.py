"""Estimators of irregular series in the conventions of scikit-learn."""

try:
    from hbnode.estimators.forecaster import SeriesForecaster
    from hbnode.estimators.models import SeriesClassifier, SeriesRegressor
    from hbnode.estimators.smoother import OscillatorSmoother, Posterior
except ModuleNotFoundError as error:
    raise ImportError(
        f"hbnode.estimators needs further packages: {error}. Fix: pip install joblib pandas scikit-learn skops tqdm."
    ) from error

__all__ = ["OscillatorSmoother", "Posterior", "SeriesClassifier", "SeriesForecaster", "SeriesRegressor"]
