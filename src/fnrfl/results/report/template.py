"""A page from its template: style, scripts and data inside, nothing fetched, no markup from the outside."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from importlib.resources import files as resources
from typing import Any

from fnrfl.core.errors import ConfigError

SHARED = "fnrfl.results.report"  # the package of the style, the drawing and the frame of every page


def fill(template: str, package: str, data: object, values: Mapping[str, Any]) -> str:
    """The page `template`.html of a package, with the script `template`.js and, for that script, `data`.

    The page's own policy lets the browser run these scripts and this style and nothing else, and load nothing.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError("A page needs the package jinja2. Install it with `pip install jinja2`.") from error

    part = partial(_part, package)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(part)
    )
    style = part("page.css")
    script = "".join(part(name) for name in ("drawing.js", f"{template}.js", "exports.js"))
    ours = {
        "style": Markup(style),
        "script": Markup(script),
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "data": Markup(_json(data)),
    }
    return environment.get_template(f"{template}.html").render({**values, **ours}).lstrip()


def _part(package: str, name: str) -> str:
    here = resources(package).joinpath(name)
    return (here if here.is_file() else resources(SHARED).joinpath(name)).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What the page's own policy calls this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: object) -> str:
    """JSON that can stand in a script element: no character of markup is left in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
