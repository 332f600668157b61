"""The ground vibration test of an aircraft, or a simulated structure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.common.files import readable
from tasks.data.files import check_record, find, from_benchmarks, read_columns, read_or_simulate

PERIOD = 8192  # number of samples in a period of the force, in the measured and the simulated record
ROWS = 9 * PERIOD
RATE = 400.0  # samples per second
NAME = "F16Data_FullMSine_Level1"
COLUMNS = ("Force", "Voltage", "Acceleration1", "Acceleration2", "Acceleration3")
FIX = f"Fix: get {NAME}.csv anew, from the F-16 benchmark of nonlinearbenchmark.org."
SOURCES = ("auto", "f16", "generated")


def read_plane_vibration(source: str = "auto") -> tuple[Tensor, str]:
    """Return force, voltage and three accelerations of a vibrating aircraft, 400 samples per second, and their source.

    "f16" is the ground vibration test of an F-16 with a full multisine, level 1. Its force (N) and shaker voltage (V)
    repeat every 8192 rows, nine times; the unit of the accelerations is not in the file. It is ``NAME.csv``, or
    ``plane-vibration/NAME.csv``, in ``HBNODE_DATA`` with NAME = F16Data_FullMSine_Level1. Without this file the
    package ``nonlinear_benchmarks`` downloads it. "generated" is :func:`vibrating_structure`. "auto" is "f16" if it is
    there, otherwise "generated", with a warning.

    References:
        J.-P. Noel and M. Schoukens, F-16 aircraft benchmark based on ground vibration test data, 2017,
        doi:10.4121/12954911.

    Returns:
        Rows (73728, 5) in float64, and "f16" or "generated".

    Raises:
        FileNotFoundError: if ``source`` is "f16" and there is no file.
        ValueError: if the file is damaged and ``source`` is not "generated".
    """
    return read_or_simulate(source, "f16", _f16, vibrating_structure)


def _f16() -> Tensor:
    csv = find((f"{NAME}.csv",), ("plane-vibration", ""))
    if csv:
        return read_columns(csv, COLUMNS, ROWS, FIX)
    fix = (
        f"Fix: put {NAME}.csv from F16GVT_Files.zip of nonlinearbenchmark.org into a folder plane-vibration and "
        "set HBNODE_DATA to the folder above it, or pip install nonlinear_benchmarks, which downloads it (148 MB)."
    )

    def read(package: Any) -> Path:
        return next(path for path in map(Path, package.F16(data_file_locations=True)) if path.stem == NAME)

    return _f16_mat(from_benchmarks(read, f"plane-vibration/{NAME}.csv", fix))


def _f16_mat(path: Path) -> Tensor:
    """Return the record from Matlab's arrays: force and voltage (1, N), accelerations (3, N)."""
    from scipy.io import loadmat

    with readable(path, FIX):
        arrays = loadmat(path)
        rows = torch.cat([torch.as_tensor(arrays[name]).double() for name in ("Force", "Voltage", "Acceleration")]).T
    return check_record(rows.contiguous(), (ROWS, 5), str(path), FIX)


def vibrating_structure() -> Tensor:
    """Return the record of a simulated structure, with the columns, rate, period and number of rows of the aircraft's.

    Six damped modes q'' + 2 zeta w q' + w^2 q = phi_s F, w = 2 pi f, are driven by a force F, a full multisine of 2 to
    15 Hz with random phases, which repeats every 8192 rows. An acceleration is the sum of phi_k q'' over the modes. The
    response is the exact periodic response for each frequency. Every column has white noise with 1 % of its standard
    deviation, different in each period. The six frequencies are invented, not measured.

    Returns:
        Force, voltage and three accelerations, (73728, 5) in float64.
    """
    generator = torch.Generator().manual_seed(0)
    f = torch.fft.rfftfreq(PERIOD, 1 / RATE, dtype=torch.float64)
    excited = (f >= 2) & (f <= 15)
    phases = 2 * math.pi * torch.rand(len(f), generator=generator, dtype=torch.float64)
    voltage = torch.where(excited, torch.polar(torch.ones_like(f), phases), 0)
    modes = torch.tensor([3.3, 4.7, 6.1, 7.9, 10.2, 13.1], dtype=torch.float64)
    zeta = torch.tensor([0.02, 0.015, 0.01, 0.012, 0.015, 0.02], dtype=torch.float64)
    shapes = torch.randn(3, len(modes), generator=generator, dtype=torch.float64)  # phi_k times phi_s
    r = f[:, None] / modes
    accelerance = -(r**2) / (1 - r**2 + 2j * zeta * r)  # q'' per unit of force, (frequencies, modes)
    force = voltage / (1 + 1j * f / 10)  # a one-pole amplifier without feedback from the structure
    response = force[:, None] * (accelerance @ shapes.T.to(accelerance.dtype))
    spectra = torch.cat([force[:, None], voltage[:, None], response], dim=1)
    rows = torch.fft.irfft(spectra, n=PERIOD, dim=0).repeat(ROWS // PERIOD, 1)
    rows = rows * torch.tensor([12.0, 0.025, 0.3, 0.3, 0.3], dtype=torch.float64) / rows.std(0)
    return rows + 0.01 * rows.std(0) * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
