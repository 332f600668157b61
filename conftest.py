"""Shared by the tests and the doctests."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # reproducible, and the tests run several processes on few cores
os.environ.setdefault("MPLBACKEND", "Agg")

DATA = Path(__file__).parents[1] / "shared" / "data"
if DATA.is_dir():  # real data kept beside the checkout
    os.environ.setdefault("HBNODE_DATA", str(DATA))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
