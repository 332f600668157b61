"""Diagnostics: each returns its data, which plots itself and writes itself to a file."""

from hbnode.analysis.adjoints import AdjointNorms, adjoint_norms
from hbnode.analysis.spectra import Spectrum, spectrum
from hbnode.analysis.tolerance import NFEToleranceCurve, nfe_vs_tolerance

__all__ = ["AdjointNorms", "NFEToleranceCurve", "Spectrum", "adjoint_norms", "nfe_vs_tolerance", "spectrum"]
