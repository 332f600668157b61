"""The package's metadata: pins, the source distribution, the licence and the citation agree with each other."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # Python 3.11
yaml = pytest.importorskip("yaml")  # comes with myst-parser

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def _name(requirement):
    return re.match(r"[\w-]+", requirement)[0]


def test_every_requirement_of_the_tests_and_benchmarks_is_pinned():
    pins = {_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(one for names in extras.values() for one in names)]
    assert {_name(requirement) for requirement in wanted} - {"hbnode"} <= pins


def test_the_source_distribution_names_what_exists():
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [path for path in included if not (ROOT / path.lstrip("/")).exists()] == []


def test_the_oldest_releases_are_the_lower_bounds():
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    oldest = {line.replace("==", ">=").removesuffix(".*").removesuffix(".0") for line in lines if "==" in line}
    assert oldest == {requirement.removesuffix(".0") for requirement in PROJECT["dependencies"]}
    assert PROJECT["requires-python"] == ">=3.10"  # OLDEST of the Makefile


LAZILY = """
import pickle, sys
import hbnode
names = {*hbnode.__all__, "estimators", "features"}
assert names <= set(dir(hbnode))
loaded = [name for name in sys.modules if name.startswith(("hbnode.", "torchdiffeq", "torchsde", "scipy"))]
assert {name.split(".")[1] for name in loaded if "." in name and name.split(".")[1][0] != "_"} == {
    "errors", "fields", "nfe", "signal", "solve"
}, loaded
assert not hasattr(hbnode, "__wrapped__") and "hbnode.nn" not in sys.modules  # what is asked for is not private
assert hbnode.torchdiffeq.odeint.__module__ == "hbnode.torchdiffeq"
from hbnode import ODERNN, HeavyBallODEBlock, data
import hbnode.nn as nn
assert (hbnode.nn, hbnode.ODERNN, hbnode.data) == (nn, nn.ODERNN, data) == (nn, ODERNN, sys.modules["hbnode.data"])
block = HeavyBallODEBlock(nn.MLP(2, [3], 2))
assert type(pickle.loads(pickle.dumps(block))) is type(block) is hbnode.HeavyBallODEBlock
"""


def test_what_solving_does_not_need_is_imported_when_it_is_first_used():
    subprocess.run([sys.executable, "-c", LAZILY], check=True)


def test_one_licence_and_a_citation_of_each_paper():
    assert PROJECT["license"] == CITATION["license"] == "MIT"
    assert PROJECT["authors"] == CITATION["authors"]
    for reference in CITATION["references"]:
        assert {"type", "title", "authors", "year", "url"} <= reference.keys()


def test_python_m_hbnode_says_what_a_bug_report_needs(capsys, monkeypatch):
    import hbnode.__main__ as command

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aeon" else found(name))
    command.main()
    printed = capsys.readouterr().out
    assert f"torch {importlib.metadata.version('torch')}" in printed
    assert "devices: CPU (1 threads)" in printed
    assert "extra rocket: missing. Fix: pip install -e .[rocket], in a checkout" in printed
