"""Every Python snippet of the README and of the docs runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONTINUED = {"forecasting", "irregular", "series"}  # pages whose snippets belong together
SLOW = {"attention", "forecasting", "hessian_free", "irregular", "series", "solvers", "stiff"}  # take seconds


def snippets(page):
    codes = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return ["\n".join(codes)] if page.stem in CONTINUED else codes


SNIPPETS = [
    pytest.param(code, id=f"{page.stem}-{index}", marks=[pytest.mark.slow] * (page.stem in SLOW))
    for page in PAGES
    for index, code in enumerate(snippets(page))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet(code, tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "snippet"}
    exec(compile(code, "snippet", "exec"), names)
    assert {"hbnode", "torchsde"} & set(names)


def test_the_readme_has_snippets():
    assert len(SNIPPETS) >= 3
