"""Shared by the tests and the doctests."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # reproducible, and the tests run in a process for each core
os.environ.setdefault("MPLBACKEND", "Agg")

# The same examples in every run, however slow the machine, and nothing written to the working folder.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None, max_examples=20)
hypothesis.settings.load_profile("same")

DATA = Path(__file__).parents[1] / "shared" / "data"
if DATA.is_dir():  # real data kept beside the checkout
    os.environ.setdefault("HBNODE_DATA", str(DATA))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests marked sparse, the fast tier runs what differs from the first value of each parameter in one at most."""
    firsts: dict[object, dict[str, object]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sparse"):
            first = firsts.setdefault(item.function, item.callspec.params)
            other = {name for name, value in item.callspec.params.items() if value is not first[name]}
            names = (mark.args[0] for mark in item.iter_markers("parametrize"))
            if sum(not other.isdisjoint([each] if isinstance(each, str) else each) for each in names) > 1:
                item.add_marker("slow")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
