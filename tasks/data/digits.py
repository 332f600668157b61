"""scikit-learn's handwritten digits."""

from __future__ import annotations

import torch
from torch import Tensor


def read_digits(split: str) -> tuple[Tensor, Tensor]:
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
