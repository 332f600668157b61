"""Shared by the tests and the doctests."""

import os

# Two processes of two threads each on two cores fight; one thread a process is also reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
