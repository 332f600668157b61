"""Diagnostics: each returns its data, which plots itself and writes itself to a file."""

from hbnode.analysis.tolerance import NFEToleranceCurve, nfe_vs_tolerance

__all__ = ["NFEToleranceCurve", "nfe_vs_tolerance"]
