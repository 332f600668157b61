"""Shared by the tests and the doctests."""

import os
from pathlib import Path

# Two processes of two threads each on two cores fight; one thread a process is also reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
data = Path(__file__).parents[1] / "shared" / "data"
if data.is_dir():  # real data kept beside the checkout
    os.environ.setdefault("HBNODE_DATA", str(data))

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
