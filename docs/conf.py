"""Sphinx: pages in Markdown, the API reference from docstrings. `make docs` builds the site, without network."""

from __future__ import annotations

import lightning_pipe

project = "lightning-pipe"
version = release = lightning_pipe.__version__
project_copyright = "the authors of lightning-pipe, Apache 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"lightning-pipe {release}"
autodoc_typehints = "none"
# The list of a page's contents is narrow.
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
default_role = "code"
# Docstrings name Python objects that have no page of their own.
nitpicky = False
