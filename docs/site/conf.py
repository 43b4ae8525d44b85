"""Settings of the site, which `make docs` builds with Sphinx. Its sources are laid out by build.py."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

project = "fnrfl"
copyright = "the authors of fnrfl, Apache-2.0"
release = re.findall(
    r'^__version__ = "(.*)"$', (ROOT / "src/fnrfl/__init__.py").read_text(encoding="utf-8"), re.MULTILINE
)[0]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # the anchors that a forge gives to headings
myst_links_external_new_tab = False
suppress_warnings = [
    "misc.highlighting_failure",  # a block of code may be a sketch
    "ref.python",  # a type may be on two pages
]
highlight_language = "text"  # of a block that names none
pygments_style, pygments_dark_style = "tango", "monokai"
add_module_names = False

html_theme = "furo"  # system fonts, no script of others: a page loads nothing from the network
html_title = f"fnrfl {release}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
