"""Diagnostics of models and solves. Results have methods ``plot()`` and ``to_csv(path)``; :mod:`.plot` has figures."""

from hbnode.diagnostics import plot
from hbnode.diagnostics.gradients import AdjointNorms, adjoint_norms
from hbnode.diagnostics.spectra import Spectrum, spectrum
from hbnode.diagnostics.tolerance import NFEToleranceCurve, nfe_vs_tolerance
from hbnode.nfe import StepRecord, record_steps

__all__ = [
    "AdjointNorms",
    "NFEToleranceCurve",
    "Spectrum",
    "StepRecord",
    "adjoint_norms",
    "nfe_vs_tolerance",
    "plot",
    "record_steps",
    "spectrum",
]
