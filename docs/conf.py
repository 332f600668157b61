import os
import sys
from pathlib import Path

import hbnode

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]  # tasks is not installed

import code_links  # noqa: E402

from tasks.result_tables import (  # noqa: E402
    read_results,
    substitute,
    write_results,
)

project = "hbnode"
author = "The hbnode developers"
copyright = "2026, The hbnode developers"
release = version = hbnode.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "code_links",
    "dead_links",
    "gallery",
    "mathml",
]
exclude_patterns = ["_build", "_ext", "_results", "_templates"]

html_theme = "furo"
html_title = f"hbnode {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

# A notebook runs again only if its code has changed; `make notebooks` runs all.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the kernels
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "jupyter_cache")
nb_execution_timeout = 120  # seconds for a cell
nb_execution_raise_on_error = True
nb_merge_streams = True

napoleon_custom_sections = [("Shape", "notes_style")]
napoleon_google_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True

templates_path = ["_templates"]
autosummary_ignore_module_all = False
autosummary_context = {"pages": code_links.reference_pages()}
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
maximum_signature_line_length = 80

# Inventories of the names that these pages use, so that the build needs no network.
intersphinx_mapping = {
    "python": (
        "https://docs.python.org/3",
        str(HERE / "_inventories/python.inv"),
    ),
    "torch": (
        "https://docs.pytorch.org/docs/stable",
        str(HERE / "_inventories/torch.inv"),
    ),
    "numpy": (
        "https://numpy.org/doc/stable",
        str(HERE / "_inventories/numpy.inv"),
    ),
    "pandas": (
        "https://pandas.pydata.org/docs",
        str(HERE / "_inventories/pandas.inv"),
    ),
    "sklearn": (
        "https://scikit-learn.org/stable",
        str(HERE / "_inventories/sklearn.inv"),
    ),
}
nitpicky = True
code_links_foreign = [  # names of diffrax, torchdyn and curvlinops
    "BacksolveAdjoint",
    "DataControl",
    "DirectAdjoint",
    "GGNLinearOperator",
    "NeuralODE",
    "PIDController",
    "RecursiveCheckpointAdjoint",
    "SaveAt",
    "UnsafeBrownianPath",
    "VirtualBrownianTree",
]


def skip(app, what, name, obj, skip, options):
    """Leave out other packages' members, helpers and the fields of tuples."""
    module = getattr(obj, "__module__", None) or "hbnode"
    helper = module == "hbnode._torch" or not module.startswith("hbnode")
    text = getattr(obj, "__doc__", None) or ""
    return True if helper or text.startswith("Alias for field") else None


def draw_results(app):
    """Draw the tables and figures of Results from docs/results/*.csv."""
    write_results(HERE / "results", HERE / "_results")


def fill_in(app, name, source):
    """Put numbers in the place of references in the pages of Results."""
    if name.startswith("results/"):
        source[0] = substitute(source[0], read_results(HERE / "results"))


def setup(app):
    app.connect("autodoc-skip-member", skip)
    app.connect("builder-inited", draw_results)
    app.connect("source-read", fill_in)
