"""Film reviews as bytes, found in ``HBNODE_DATA``."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tasks.common.train import Samples
from tasks.data.arrays import pad_bytes

FOLDER = "aclImdb"
KINDS = ("neg", "pos")  # by label


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
    root = os.environ.get("HBNODE_DATA")
    texts: list[bytes] = []
    labels: list[int] = []
    for label, kind in enumerate(KINDS):
        folder = Path(root or "") / FOLDER / split / kind
        paths = sorted(folder.glob("*.txt")) if root else []
        if not paths:
            raise FileNotFoundError(
                f"no reviews {FOLDER}/{split}/{kind}/*.txt in HBNODE_DATA={root!r}. Fix: set HBNODE_DATA to a folder "
                "and unpack aclImdb_v1.tar.gz of https://ai.stanford.edu/~amaas/data/sentiment/ in it."
            )
        texts += [path.read_bytes() for path in paths]
        labels += [label] * len(paths)
    return *pad_bytes(texts, max_length), torch.tensor(labels)
