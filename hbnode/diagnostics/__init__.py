"""Diagnostics of models and solves. :mod:`.plot` draws figures.

The results :class:`AdjointNorms`, :class:`NFEToleranceCurve` and :class:`Spectrum` have methods ``plot()`` and
``to_csv(path)``.
"""

from hbnode.diagnostics import plot
from hbnode.diagnostics.gradients import AdjointNorms, adjoint_norms
from hbnode.diagnostics.saturation import saturation
from hbnode.diagnostics.spectra import Spectrum, spectrum
from hbnode.diagnostics.tolerance import NFEToleranceCurve, Reference, nfe_vs_tolerance
from hbnode.nfe import StepRecord, record_steps

__all__ = [
    "AdjointNorms",
    "NFEToleranceCurve",
    "Reference",
    "Spectrum",
    "StepRecord",
    "adjoint_norms",
    "nfe_vs_tolerance",
    "plot",
    "record_steps",
    "saturation",
    "spectrum",
]
