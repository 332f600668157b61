"""Pairs of papers as bytes, found in ``HBNODE_DATA``."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tasks.common.train import Samples
from tasks.data.arrays import pad_bytes
from tasks.data.download import find

FILE = "new_aan_pairs.{}.tsv"
FOLDERS = ("lra_release/tsv_data", "tsv_data", "")
PARTS = {"train": "train", "validation": "eval", "test": "test"}  # what the files call them


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
    name = FILE.format(PARTS[part])
    path = find((name,), FOLDERS)
    if path is None:
        raise FileNotFoundError(
            f"{name} is not in HBNODE_DATA={os.environ.get('HBNODE_DATA')!r}. Fix: set HBNODE_DATA to a folder and "
            "unpack lra_release.gz of https://github.com/google-research/long-range-arena in it."
        )
    texts: list[bytes] = []
    labels: list[float] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            label, pair = _fields(line.rstrip(b"\r\n").split(b"\t"), path, number)
            labels.append(label)
            texts += [text[:max_length] for text in pair]
    rows, lengths = pad_bytes(texts, max_length)
    return rows.unflatten(0, (-1, 2)), lengths.unflatten(0, (-1, 2)), torch.tensor(labels).long()


def _fields(fields: list[bytes], path: Path, number: int) -> tuple[float, list[bytes]]:
    """Label and texts of a line."""
    label = {b"0": 0.0, b"0.0": 0.0, b"1": 1.0, b"1.0": 1.0}.get(fields[0])
    if len(fields) != 5 or label is None:
        raise ValueError(
            f"{path}, line {number}: expected a label (0.0 or 1.0), two identifiers and two texts with tabs between, "
            f"got {len(fields)} fields, the first {fields[0][:20]!r}. Fix: get it anew."
        )
    return label, fields[3:]
