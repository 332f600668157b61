"""The ground vibration test of an aircraft, found in ``HBNODE_DATA`` or made up."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import torch
from torch import Tensor

PLANE_PERIOD = 8192  # rows after which the force repeats, in the file and in the generated record
PLANE_ROWS = 9 * PLANE_PERIOD
PLANE_RATE = 400.0  # rows a second
PLANE_NAME = "F16Data_FullMSine_Level1"
PLANE_COLUMNS = ["Force", "Voltage", "Acceleration1", "Acceleration2", "Acceleration3"]
PLANE_FIX = f"Fix: get {PLANE_NAME}.csv anew, from the F-16 benchmark of nonlinearbenchmark.org."
PLANE_SOURCES = ("auto", "f16", "generated")


def plane_vibration(source: str = "auto") -> tuple[Tensor, str]:
    """Force, voltage and three accelerations of a vibrating aircraft, 400 rows a second, and where they come from.

    "f16" is the ground vibration test of an F-16 with a full multisine, level 1, whose force (N) and shaker voltage (V)
    repeat every 8192 rows, nine times; the unit of the accelerations is not in the file. It is ``NAME.csv``, or
    ``plane-vibration/NAME.csv``, in ``HBNODE_DATA`` with NAME = F16Data_FullMSine_Level1; else what the package
    ``nonlinear_benchmarks`` downloads. "generated" is :func:`vibrating_structure`, "auto" is the first if it is there.

    References:
        J.-P. Noel and M. Schoukens, F-16 aircraft benchmark based on ground vibration test data, 2017,
        doi:10.4121/12954911.

    Returns:
        Rows (73728, 5) in float64, and "f16" or "generated".

    Raises:
        FileNotFoundError: if "f16" is asked for and is not there.
        ValueError: if the file is damaged, whichever is asked for but "generated".
    """
    if source not in PLANE_SOURCES:
        raise ValueError(f"source must be one of {', '.join(PLANE_SOURCES)}, got {source!r}")
    if source != "generated":
        try:
            return _f16(), "f16"
        except FileNotFoundError:
            if source == "f16":
                raise
    return vibrating_structure(), "generated"


def _f16() -> Tensor:
    root = os.environ.get("HBNODE_DATA")
    for folder in (Path(root) / "plane-vibration", Path(root)) if root else ():
        if (folder / f"{PLANE_NAME}.csv").is_file():
            return _f16_csv(folder / f"{PLANE_NAME}.csv")
    missing = f"plane-vibration/{PLANE_NAME}.csv is not in HBNODE_DATA={root!r}"
    fix = (
        f"Fix: put {PLANE_NAME}.csv from F16GVT_Files.zip of nonlinearbenchmark.org into a folder plane-vibration and "
        "set HBNODE_DATA to the folder above it, or pip install nonlinear_benchmarks, which downloads it (148 MB)."
    )
    try:
        import nonlinear_benchmarks
    except ImportError as error:
        raise FileNotFoundError(f"{missing}, and nonlinear_benchmarks is not installed. {fix}") from error
    try:
        paths = nonlinear_benchmarks.F16(data_file_locations=True)
        path = next(path for path in map(Path, paths) if path.stem == PLANE_NAME)
    except Exception as error:  # no network, or an answer without the file, and it raises whatever it likes
        raise FileNotFoundError(f"{missing}, and nonlinear_benchmarks failed ({error!r}). {fix}") from error
    return _f16_mat(path)


def _f16_csv(path: Path) -> Tensor:
    """Five columns of numbers, the sampling rate in the first row of a sixth, and an empty one."""
    rows = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = csv.reader(file)
        header = next(lines, [])[:5]
        if header != PLANE_COLUMNS:
            raise ValueError(f"{path}: expected the header {','.join(PLANE_COLUMNS)}, got {header}. {PLANE_FIX}")
        for line in lines:
            if not line:
                continue
            try:
                force, voltage, *accelerations = line[:5]
                first, second, third = accelerations
                rows.append([float(x) for x in (force, voltage, first, second, third)])
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {lines.line_num}: expected five numbers, got {line}. {PLANE_FIX}"
                ) from error
    return _checked_plane(torch.tensor(rows, dtype=torch.float64).reshape(-1, 5), str(path))


def _f16_mat(path: Path) -> Tensor:
    """The same record as Matlab's arrays: force and voltage (1, N), accelerations (3, N)."""
    from scipy.io import loadmat

    try:
        arrays = loadmat(path)
        parts = [torch.as_tensor(arrays[name]).double() for name in ("Force", "Voltage", "Acceleration")]
        rows = torch.cat(parts).T
    except Exception as error:  # a damaged file raises whatever it likes
        raise ValueError(f"{path} cannot be read ({error!r}). {PLANE_FIX}") from error
    return _checked_plane(rows.contiguous(), str(path))


def _checked_plane(rows: Tensor, name: str) -> Tensor:
    if rows.shape != (PLANE_ROWS, 5) or not bool(torch.isfinite(rows).all()):
        raise ValueError(
            f"{name}: expected {PLANE_ROWS:,} rows of five finite numbers, got shape {tuple(rows.shape)}"
            f"{'' if bool(torch.isfinite(rows).all()) else ' with others among them'}. {PLANE_FIX}"
        )
    return rows


def vibrating_structure() -> Tensor:
    """A made-up structure in place of the aircraft: the same columns, rate, period and number of rows.

    Six damped modes q'' + 2 zeta w q' + w^2 q = phi_s F, w = 2 pi f, shaken by a force F, a full multisine of 2 to
    15 Hz with random phases, which repeats every 8192 rows; an acceleration is the sum of phi_k q'' over the modes. It
    has run for ever, so the response is the periodic one, exact for each frequency. Every column has white noise of
    1 % of its deviation, new in each period. The six frequencies are nobody's measurement.

    Returns:
        Force, voltage and three accelerations, (73728, 5) in float64.
    """
    generator = torch.Generator().manual_seed(0)
    f = torch.fft.rfftfreq(PLANE_PERIOD, 1 / PLANE_RATE, dtype=torch.float64)
    excited = (f >= 2) & (f <= 15)
    phases = 2 * math.pi * torch.rand(len(f), generator=generator, dtype=torch.float64)
    voltage = torch.where(excited, torch.polar(torch.ones_like(f), phases), 0)
    modes = torch.tensor([3.3, 4.7, 6.1, 7.9, 10.2, 13.1], dtype=torch.float64)
    zeta = torch.tensor([0.02, 0.015, 0.01, 0.012, 0.015, 0.02], dtype=torch.float64)
    shapes = torch.randn(3, len(modes), generator=generator, dtype=torch.float64)  # phi_k times phi_s
    r = f[:, None] / modes
    accelerance = -(r**2) / (1 - r**2 + 2j * zeta * r)  # q'' for a unit of force, (frequencies, modes)
    force = voltage / (1 + 1j * f / 10)  # an amplifier of one pole, and no feedback from the structure
    response = force[:, None] * (accelerance @ shapes.T.to(accelerance.dtype))
    spectra = torch.cat([force[:, None], voltage[:, None], response], dim=1)
    rows = torch.fft.irfft(spectra, n=PLANE_PERIOD, dim=0).repeat(PLANE_ROWS // PLANE_PERIOD, 1)
    rows = rows * torch.tensor([12.0, 0.025, 0.3, 0.3, 0.3], dtype=torch.float64) / rows.std(0)
    return rows + 0.01 * rows.std(0) * torch.randn(rows.shape, generator=generator, dtype=torch.float64)
