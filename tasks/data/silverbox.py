"""The Silverbox, an electronic oscillator."""

from __future__ import annotations

import torch
from torch import Tensor

from tasks.data.files import check_record, find, from_benchmarks, read_columns

ROWS = 131_072
FIX = "Fix: get SNLS80mV.csv anew, from SilverboxFiles.zip of nonlinearbenchmark.org."
COLUMNS = ("V1", "V2")
START = 50  # number of first samples of a test set from which the state is estimated; errors exclude them
SETS = {  # the official split, as in Silverbox() of the package nonlinear_benchmarks 1.0.1
    "train": slice(40_650, 105_712),  # three quarters of the ten multisines, including validation
    "multisine": slice(105_712, 127_400),
    "arrow_no_extrapolation": slice(100, 32_100),  # the part of the arrow with amplitudes within the training range
    "arrow_full": slice(100, 40_575),
}


def read_silverbox() -> Tensor:
    """Return input V1 and output V2 of an electronic Duffing oscillator, in volts, at 610.35 samples per second.

    The file is ``SNLS80mV.csv``, or ``silverbox/SNLS80mV.csv``, in ``HBNODE_DATA``. Without it the package
    ``nonlinear_benchmarks`` downloads the data. T. Wigren and J. Schoukens, Three free data sets for development and
    benchmarking in nonlinear system identification, European Control Conference 2013; nonlinearbenchmark.org.

    Returns:
        Samples (131072, 2) in float64.
    """
    path = find(("SNLS80mV.csv",), ("silverbox", ""))
    if path:
        return read_columns(path, COLUMNS, ROWS, FIX)
    fix = (
        "Fix: put SNLS80mV.csv from SilverboxFiles.zip of nonlinearbenchmark.org into a folder silverbox and set "
        "HBNODE_DATA to the folder above it, or pip install nonlinear_benchmarks, which downloads it."
    )
    v1, v2 = from_benchmarks(lambda package: package.Silverbox(train_test_split=False), "silverbox/SNLS80mV.csv", fix)
    record = torch.stack([torch.as_tensor(v).double() for v in (v1, v2)], dim=1)
    return check_record(record, (ROWS, 2), "the package's data", FIX)
