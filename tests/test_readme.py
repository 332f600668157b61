"""Every Python snippet of the README and of the docs runs as it stands."""

import re
import shutil
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONTINUED = {"deploy", "forecasting", "irregular", "series"}  # pages whose snippets belong together
SLOW = {"attention", "deploy", "forecasting", "hessian_free", "irregular", "series", "solvers", "stiff"}  # take seconds


def snippets(page):
    codes = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return ["\n".join(codes)] if page.stem in CONTINUED else codes


SNIPPETS = [
    pytest.param(code, id=f"{page.stem}-{index}", marks=[pytest.mark.slow] * (page.stem in SLOW))
    for page in PAGES
    for index, code in enumerate(snippets(page))
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet(code, tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    if "onnxruntime" in code:
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
        for kind in (DeprecationWarning, FutureWarning, UserWarning):  # of torch and onnxscript
            warnings.simplefilter("ignore", kind)
    if "aoti" in code and shutil.which("g++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "snippet"}
    exec(compile(code, "snippet", "exec"), names)
    assert {"hbnode", "torchsde"} & set(names)


def test_the_readme_has_snippets():
    assert len(SNIPPETS) >= 3
