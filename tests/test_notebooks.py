"""The notebooks of the site: a title, short cells that fit a page, fixed seeds, and a plot with a description."""

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs/notebooks"
NOTEBOOKS = sorted({*FOLDER.glob("*.md")} - {FOLDER / "index.md"})


def cells(notebook):
    """Return the headers and the codes of the cells."""
    found = re.findall(
        r"^```\{code-cell\} ipython3\n(---\n.*?^---\n)?(.*?)^```$", notebook.read_text("utf-8"), re.M | re.S
    )
    return [header for header, _ in found], [code for _, code in found]


def test_the_index_lists_all():
    listed = re.findall(r"^(\w+)$", (FOLDER / "index.md").read_text("utf-8").split("toctree")[1], re.M)
    assert sorted(listed) == [notebook.stem for notebook in NOTEBOOKS]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[notebook.stem for notebook in NOTEBOOKS])
def test_notebook(notebook):
    text = notebook.read_text("utf-8")
    headers, codes = cells(notebook)
    assert len(re.findall(r"^# \S.*$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)) == 1
    assert text.count("{code-cell}") == len(codes) > 3
    assert [code for code in codes if code.count("\n") > 20] == []
    assert [line for code in codes for line in code.splitlines() if len(line) > 80] == []
    plots = [header for header, code in zip(headers, codes, strict=True) if "plt.show()" in code]
    assert plots
    assert all("alt: " in header for header in plots)
    program = ast.parse("\n".join(codes))
    imported = {
        (node.module or "").split(".")[0] if isinstance(node, ast.ImportFrom) else name.name.split(".")[0]
        for node in ast.walk(program)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
    }
    assert imported <= {"hbnode", "math", "matplotlib", "numpy", "pandas", "sklearn", "textwrap", "time", "torch"}
    assert "seed" in "".join(codes) or "random_state" in "".join(codes)
