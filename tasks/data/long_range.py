"""Long sequences to classify: pairs of papers, film reviews and Pathfinder's images, found in ``HBNODE_DATA``."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from tasks.common.train import Samples
from tasks.data.files import data_folder, find, missing, pad_bytes, readable

AAN_FILE = "new_aan_pairs.{}.tsv"
AAN_FOLDERS = ("lra_release/tsv_data", "tsv_data", "")
AAN_PARTS = {"train": "train", "validation": "eval", "test": "test"}  # what the files call them
PATHFINDER_FOLDERS = ("lra_release/pathfinder32", "pathfinder32")
LEVEL = "curv_contour_length_14"  # the hardest of Pathfinder, which the benchmark uses
SIDE = 32
FIX = (
    "Fix: set HBNODE_DATA to a folder and unpack lra_release.gz of https://github.com/google-research/long-range-arena "
    "in it."
)
logger = logging.getLogger(__name__)


def read_aan(part: str, max_length: int = 4000) -> Samples:
    """Pairs of papers of the ACL Anthology Network, and whether one cites the other.

    The file ``new_aan_pairs.train.tsv`` of the benchmark's release, or ``eval`` or ``test``, in ``HBNODE_DATA``, in its
    folder ``lra_release/tsv_data`` or ``tsv_data``. A line is a label (0.0 or 1.0), two identifiers and two texts, with
    tabs between.

    Arguments:
        part: "train", "validation" or "test".
        max_length: bytes that a text is cut to.

    Returns:
        Bytes (N, 2, longest) as uint8, padded with 0; lengths (N, 2) and labels (N,).

    References:
        D. R. Radev et al., The ACL Anthology Network Corpus, 2013. Y. Tay et al., Long Range Arena, 2021,
        arXiv:2011.04006.

    Raises:
        FileNotFoundError: if the file is not there.
        ValueError: if a line is another.
    """
    name = AAN_FILE.format(AAN_PARTS[part])
    path = find((name,), AAN_FOLDERS)
    if path is None:
        raise missing(name, FIX)
    texts: list[bytes] = []
    labels: list[float] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) != 5 or fields[0] not in (b"0", b"0.0", b"1", b"1.0"):
                raise ValueError(
                    f"{path}, line {number}: expected a label (0.0 or 1.0), two identifiers and two texts with tabs "
                    f"between, got {len(fields)} fields, the first {fields[0][:20]!r}. Fix: get it anew."
                )
            labels.append(float(fields[0]))
            texts += fields[3:]
    rows, lengths = pad_bytes(texts, max_length)
    return rows.unflatten(0, (-1, 2)), lengths.unflatten(0, (-1, 2)), torch.tensor(labels).long()


def read_imdb(split: str, max_length: int = 4000) -> Samples:
    """Reviews of films and whether they are good: 25,000 for training and 25,000 for testing.

    The folder ``aclImdb`` of the published archive in ``HBNODE_DATA``, with ``train/pos/*.txt`` and so on. The reviews
    of one kind follow those of the other.

    Arguments:
        split: "train" or "test".
        max_length: bytes that a review is cut to.

    Returns:
        Bytes (N, longest) as uint8, padded with 0; lengths and labels (N,), 0 bad, 1 good.

    References:
        A. L. Maas et al., Learning Word Vectors for Sentiment Analysis, 2011.

    Raises:
        FileNotFoundError: if the folder is not there, or has no reviews of a kind.
    """
    root = data_folder()
    texts: list[bytes] = []
    labels: list[int] = []
    for label, kind in enumerate(("neg", "pos")):
        folder = f"aclImdb/{split}/{kind}"
        paths = sorted((root / folder).glob("*.txt")) if root else []
        if not paths:
            where = "https://ai.stanford.edu/~amaas/data/sentiment/"
            raise missing(
                f"{folder}/*.txt", f"Fix: set HBNODE_DATA to a folder and unpack aclImdb_v1.tar.gz of {where}."
            )
        texts += [path.read_bytes() for path in paths]
        labels += [label] * len(paths)
    return *pad_bytes(texts, max_length), torch.tensor(labels)


def read_pathfinder() -> tuple[Tensor, Tensor]:
    """Pathfinder with 32 x 32 pixels and contours of 14 dashes: 200,000 images and whether their dots are connected.

    The folder ``pathfinder32`` of the benchmark's release in ``HBNODE_DATA``, or in ``lra_release`` there. Of it
    ``curv_contour_length_14`` is read: a line of ``metadata/*.npy``, which are text, begins with folder and file of
    an image, a number and the label. Empty images, which the release has, are left out.

    Returns:
        Pixels (N, 1024) as uint8, row by row; labels (N,).

    References:
        D. Linsley et al., Learning long-range spatial dependencies with horizontal gated-recurrent units, 2018,
        arXiv:1805.08315. Y. Tay et al., Long Range Arena, 2021, arXiv:2011.04006.

    Raises:
        FileNotFoundError: if the folder is not there, or holds no images.
        ValueError: if a line or an image is another.
    """
    root = data_folder()
    folders = [root / folder / LEVEL for folder in PATHFINDER_FOLDERS] if root else []
    folder = next((folder for folder in folders if (folder / "metadata").is_dir()), None)
    rows = [row for path in sorted((folder / "metadata").glob("*.npy")) for row in _listed(path)] if folder else []
    if folder is None or not rows:
        raise missing(f"{PATHFINDER_FOLDERS[-1]}/{LEVEL}/metadata/*.npy", FIX)
    images = [(_pixels(folder / name), label) for name, label in rows if (folder / name).stat().st_size]
    if len(images) < len(rows):
        logger.warning("%d empty images of %d are left out", len(rows) - len(images), len(rows))
    return torch.stack([pixels for pixels, _ in images]), torch.tensor([label for _, label in images])


def _listed(path: Path) -> list[tuple[str, int]]:
    """File and label of the images that a list names."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split(" ")
        if len(words) < 4 or words[3] not in ("0", "1"):
            raise ValueError(
                f"{path}, line {number}: expected folder, file, a number and a label 0 or 1, got {line[:60]!r}. Fix: "
                "get it anew."
            )
        found.append((f"{words[0]}/{words[1]}", int(words[3])))
    return found


def _pixels(path: Path) -> Tensor:
    """The grey values of an image, (1024,)."""
    from PIL import Image

    with readable(path, "Fix: get it anew."), Image.open(path) as image:
        if image.size != (SIDE, SIDE):
            raise ValueError(f"expected {SIDE} x {SIDE} pixels, got {image.size}")
        return torch.frombuffer(bytearray(image.convert("L").tobytes()), dtype=torch.uint8)
