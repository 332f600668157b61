"""Data sets: found in ``HBNODE_DATA``, or downloaded once with a checksum."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import pickle
import tarfile
import zipfile
import zlib
from pathlib import Path

import torch
from torch import Tensor

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/"
CIFAR10_ARCHIVE = "cifar-10-python.tar.gz"
CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR10_FOLDER = "cifar-10-batches-py"


def digits(split: str) -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits, 8x8, 16 grey levels: 1,437 for training and 360 for testing.

    The split is stratified and fixed. Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI, 1998.

    Returns:
        Images (N, 1, 8, 8) in [0, 1] and labels (N,).
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    x, y = (train_x, train_y) if split == "train" else (test_x, test_y)
    return torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y)


def mnist(split: str) -> tuple[Tensor, Tensor]:
    """MNIST, 28x28: 60,000 images for training and 10,000 for testing. LeCun, Bottou, Bengio and Haffner, 1998.

    Returns:
        Images (N, 1, 28, 28) in [0, 1] and labels (N,).
    """
    prefix = "train" if split == "train" else "t10k"
    images = read_idx(_mnist_file(f"{prefix}-images-idx3-ubyte.gz"))
    labels = read_idx(_mnist_file(f"{prefix}-labels-idx1-ubyte.gz"))
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise ValueError(
            f"the MNIST files disagree: images {tuple(images.shape)}, labels {tuple(labels.shape)}; "
            "expected (N, 28, 28) and (N,). Fix: download the four files anew."
        )
    return images[:, None].float() / 255, labels.long()


def read_idx(path: Path) -> Tensor:
    """Read an idx file of unsigned bytes, gzipped or not: two zeros, type, rank, big-endian sizes, data.

    Raises:
        ValueError: if it is not such a file, or shorter or longer than its header says.
    """
    fix = "Fix: delete the file and download it again."
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or no gzip file ({error}). {fix}") from error
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{path} is no idx file of unsigned bytes: expected it to begin 00 00 08, got {raw[:3]!r}. {fix}"
        )
    rank = raw[3]
    if len(raw) < 4 + 4 * rank:
        raise ValueError(f"{path} is truncated: its header of {4 + 4 * rank} bytes is not whole. {fix}")
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank)]
    data = raw[4 + 4 * rank :]
    if len(data) != math.prod(shape):
        raise ValueError(f"{path} is truncated: expected {math.prod(shape)} bytes for {shape}, got {len(data)}. {fix}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)


def cifar10(split: str) -> tuple[Tensor, Tensor]:
    """CIFAR-10, 32x32 in colour: 50,000 images for training and 10,000 for testing. Krizhevsky, 2009.

    The official python batches (the folder ``cifar-10-batches-py`` or its archive) in ``HBNODE_DATA``; else a subset
    there, ``cifar10-subset/cifar10_subset.npz`` with ``x_train``, ``y_train``, ``x_test``, ``y_test``, images uint8
    (N, 32, 32, 3); else the archive is downloaded.

    Returns:
        Images (N, 3, 32, 32) in [0, 1] and labels (N,).
    """
    root = os.environ.get("HBNODE_DATA")
    subset = Path(root or "") / "cifar10-subset" / "cifar10_subset.npz"
    names = [f"data_batch_{k}" for k in range(1, 6)] if split == "train" else ["test_batch"]
    if root and (Path(root) / CIFAR10_FOLDER).is_dir():
        files = [Path(root) / CIFAR10_FOLDER / name for name in names]
        images, labels = _join([_read_cifar_batch(file.read_bytes(), file) for file in files])
    elif root and not (Path(root) / CIFAR10_ARCHIVE).is_file() and subset.is_file():
        images, labels = _read_cifar_subset(subset, split)
    else:
        images, labels = _join(_read_cifar_archive(_cifar_archive(root), names))
    if images.shape[1:] != (3, 32, 32) or labels.shape != images.shape[:1] or labels.max() > 9:
        raise ValueError(
            f"the CIFAR-10 files disagree: images {tuple(images.shape)}, labels {tuple(labels.shape)}; "
            "expected (N, 3, 32, 32) and (N,) with labels 0 to 9. Fix: get them anew."
        )
    return images.float() / 255, labels.long()


class _CifarUnpickler(pickle.Unpickler):
    """Reads dictionaries of strings, lists and arrays, and runs nothing else that a pickle might hold."""

    def find_class(self, module: str, name: str) -> object:
        """What an array of numpy needs, whichever version wrote it."""
        if (module.replace("._core", ".core"), name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR-10 file does")


def _read_cifar_batch(content: bytes, source: Path) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and labels (N,) of one python batch."""
    try:
        batch = _CifarUnpickler(io.BytesIO(content), encoding="bytes").load()
        images, labels = torch.as_tensor(batch[b"data"].copy()), torch.tensor(batch[b"labels"])
        return images.reshape(-1, 3, 32, 32), labels
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise ValueError(
            f"{source} is no CIFAR-10 batch ({type(error).__name__}: {error}). Fix: delete it and get it anew."
        ) from error


def _read_cifar_archive(path: Path, names: list[str]) -> list[tuple[Tensor, Tensor]]:
    try:
        with tarfile.open(path) as archive:
            members = [archive.extractfile(f"{CIFAR10_FOLDER}/{name}") for name in names]
            contents = [member.read() for member in members]
    except (tarfile.TarError, EOFError, KeyError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error}). Fix: delete it and get it anew.") from error
    return [_read_cifar_batch(content, path) for content in contents]


def _read_cifar_subset(path: Path, split: str) -> tuple[Tensor, Tensor]:
    import numpy as np

    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            images, labels = torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"])
        return images.permute(0, 3, 1, 2), labels
    except (OSError, EOFError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); expected an npz with x_train, y_train, x_test, y_test, images "
            "(N, 32, 32, 3). Fix: get it anew, or the official batches."
        ) from error


def _join(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def _cifar_archive(root: str | None) -> Path:
    """The archive in HBNODE_DATA, or downloaded."""
    if root and (Path(root) / CIFAR10_ARCHIVE).is_file():
        return Path(root) / CIFAR10_ARCHIVE
    return _download(CIFAR10_URL, CIFAR10_ARCHIVE, CIFAR10_MD5, "", "the folder cifar-10-batches-py into it")


def _mnist_file(name: str) -> Path:
    """The file in HBNODE_DATA, gzipped or not, in ``MNIST/raw`` (as torchvision lays it out), ``MNIST`` or itself."""
    root = os.environ.get("HBNODE_DATA")
    if root:
        for folder in (Path(root) / "MNIST" / "raw", Path(root) / "MNIST", Path(root)):
            for candidate in (folder / name, folder / name.removesuffix(".gz")):
                if candidate.is_file():
                    return candidate
    return _download(MNIST_URL, name, MNIST_MD5[name], "MNIST/raw", "the four idx files into a folder MNIST/raw in it")


def _download(url: str, name: str, md5: str, folder: str, fix: str) -> Path:
    """The file, downloaded once, into a folder of HBNODE_DATA if that is set."""
    import pooch

    root = os.environ.get("HBNODE_DATA")
    cache = Path(root or pooch.os_cache("hbnode")) / folder
    try:
        return Path(pooch.retrieve(url + name, f"md5:{md5}", fname=name, path=cache, progressbar=True))
    except (OSError, ValueError) as error:  # no network, or a file that is not the one
        raise FileNotFoundError(
            f"{name} is neither in HBNODE_DATA={root!r} nor could it be downloaded ({error}). "
            f"Fix: set HBNODE_DATA to a folder and put {fix}."
        ) from error


SILVERBOX_ROWS = 131_072
SILVERBOX_FIX = "Fix: get SNLS80mV.csv anew, from SilverboxFiles.zip of nonlinearbenchmark.org."
SILVERBOX_START = 50  # samples of a test set that are given, to find the state there; errors count from the next on
SILVERBOX_SETS = {  # the official split, as in Silverbox() of the package nonlinear_benchmarks 1.0.1
    "train": slice(40_650, 105_712),  # three quarters of the ten multisines, validation included
    "multisine": slice(105_712, 127_400),
    "arrow_no_extrapolation": slice(100, 32_100),  # the arrow while about as high as the multisines
    "arrow_full": slice(100, 40_575),
}


def silverbox() -> Tensor:
    """The Silverbox: input V1 and output V2 of an electronic Duffing oscillator, in volts, 610.35 samples a second.

    ``SNLS80mV.csv``, or ``silverbox/SNLS80mV.csv``, in ``HBNODE_DATA``; else what the package ``nonlinear_benchmarks``
    downloads. T. Wigren and J. Schoukens, Three free data sets for development and benchmarking in nonlinear system
    identification, European Control Conference 2013; nonlinearbenchmark.org.

    Returns:
        (131072, 2) in float64.
    """
    root = os.environ.get("HBNODE_DATA")
    for folder in (Path(root) / "silverbox", Path(root)) if root else ():
        if (folder / "SNLS80mV.csv").is_file():
            return _silverbox_csv(folder / "SNLS80mV.csv")
    fix = (
        "Fix: put SNLS80mV.csv from SilverboxFiles.zip of nonlinearbenchmark.org into a folder silverbox and set "
        "HBNODE_DATA to the folder above it, or pip install nonlinear_benchmarks, which downloads it."
    )
    try:
        import nonlinear_benchmarks
    except ImportError as error:
        raise FileNotFoundError(
            f"silverbox/SNLS80mV.csv is not in HBNODE_DATA={root!r}, and nonlinear_benchmarks is not installed. {fix}"
        ) from error
    try:
        v1, v2 = nonlinear_benchmarks.Silverbox(train_test_split=False)
    except Exception as error:  # no network, or an answer that is not the file, and it raises whatever it likes
        raise FileNotFoundError(
            f"silverbox/SNLS80mV.csv is not in HBNODE_DATA={root!r}, and nonlinear_benchmarks failed ({error}). {fix}"
        ) from error
    return _checked_silverbox(torch.stack([torch.as_tensor(v).double() for v in (v1, v2)], dim=1), "the package's data")


def _silverbox_csv(path: Path) -> Tensor:
    """Two columns under the header ``"V1","V2"``; its lines end in a comma."""
    rows = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = csv.reader(file)
        header = next(lines, [])[:2]
        if header != ["V1", "V2"]:
            raise ValueError(f"{path} is not the Silverbox's: expected the header V1,V2, got {header}. {SILVERBOX_FIX}")
        for line in lines:
            if not line:
                continue
            try:
                rows.append((float(line[0]), float(line[1])))
            except (ValueError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {lines.line_num}: expected two numbers, got {line}. {SILVERBOX_FIX}"
                ) from error
    return _checked_silverbox(torch.tensor(rows, dtype=torch.float64), str(path))


def _checked_silverbox(record: Tensor, name: str) -> Tensor:
    if record.shape != (SILVERBOX_ROWS, 2) or not bool(torch.isfinite(record).all()):
        raise ValueError(
            f"{name}: expected {SILVERBOX_ROWS:,} rows of two finite numbers, got shape {tuple(record.shape)}"
            f"{'' if bool(torch.isfinite(record).all()) else ' with others among them'}. {SILVERBOX_FIX}"
        )
    return record


WALKER_CHANNELS = 17
WALKER_FILE = "rollout_{:03d}.npy"
WALKER_MADE = "generated.json"  # beside rollouts that are not the published ones


def walker2d() -> tuple[list[Tensor], str]:
    """Rollouts of MuJoCo's Walker2d: ``walker/rollout_*.npy`` in ``HBNODE_DATA``, one array (frames, 17) an episode.

    Published are 400, of a trained policy, at 0.008 s a frame. Channels: height of the torso in m, its angle, the
    angles of the right thigh, leg and foot and of the left ones in rad; then the velocities of the torso forwards and
    upwards in m/s and of the seven angles in rad/s, all clipped to 10. M. Lechner and R. Hasani, Learning Long-Term
    Dependencies in Irregularly-Sampled Time Series, 2020, arXiv:2006.04418.

    Returns:
        The rollouts in the order of their names, in float32, and what they are, in words.

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a file holds anything else.
    """
    folder = walker2d_folder()
    files = sorted(folder.glob("rollout_*.npy")) if folder else []
    if not files:
        raise FileNotFoundError(
            f"walker/rollout_*.npy is not in HBNODE_DATA={os.environ.get('HBNODE_DATA')!r}. Fix: put the rollouts of "
            "the folder data/walker of github.com/raminmh/CfC into a folder walker and set HBNODE_DATA to the folder "
            "above it; or make some of a simple gait with python -m tasks.walker2d --generate 100."
        )
    made = (folder / WALKER_MADE).is_file()
    source = f"{len(files)} rollouts " + ("of the scripted gait" if made else "of a trained policy")
    return [_read_rollout(file) for file in files], source


def walker2d_folder() -> Path | None:
    """Where the rollouts are or belong; None without ``HBNODE_DATA``."""
    root = os.environ.get("HBNODE_DATA")
    return Path(root) / "walker" if root else None


def _read_rollout(path: Path) -> Tensor:
    import numpy as np

    fix = "Fix: delete the file and get it anew."
    try:
        rollout = torch.from_numpy(np.load(io.BytesIO(path.read_bytes()), allow_pickle=False).astype(np.float32))
    except (OSError, EOFError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); expected an array of (frames, 17). {fix}") from error
    if rollout.dim() != 2 or rollout.shape[1] != WALKER_CHANNELS or not bool(rollout.isfinite().all()):
        raise ValueError(
            f"{path}: expected (frames, {WALKER_CHANNELS}) finite numbers, got shape {tuple(rollout.shape)}"
            f"{'' if bool(rollout.isfinite().all()) else ' with others among them'}. {fix}"
        )
    return rollout


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
