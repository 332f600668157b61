import hbnode

project = "hbnode"
author = "The hbnode developers"
release = version = hbnode.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "hbnode"
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
napoleon_custom_sections = [("Shape", "notes_style")]
napoleon_google_docstring = True
napoleon_use_rtype = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False
