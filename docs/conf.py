import sys
from pathlib import Path
from typing import Any

import hbnode

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # for tasks, which is not installed

from tasks.results_pages import read_results, substitute, write_results  # noqa: E402

project = "hbnode"
author = "The hbnode developers"
release = version = hbnode.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "hbnode"
exclude_patterns = ["_build", "_results"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
napoleon_custom_sections = [("Shape", "notes_style")]
napoleon_google_docstring = True
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False


def draw_results(app: Any) -> None:
    """Draw the tables and figures of the pages of Results from docs/results/*.csv."""
    write_results(DOCS / "results", DOCS / "_results")


def fill_in(app: Any, name: str, source: list[str]) -> None:
    """Put numbers in the place of references in the pages of Results."""
    if name.startswith("results/"):
        source[0] = substitute(source[0], read_results(DOCS / "results"))


def setup(app: Any) -> None:
    """Connect both to the build."""
    app.connect("builder-inited", draw_results)
    app.connect("source-read", fill_in)
