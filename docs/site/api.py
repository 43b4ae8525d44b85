"""Pages about the Python interface, written from the source: nothing is imported, so torch need not be there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

FENCE = "````"  # longer than those of code inside

PAGES = {
    "fnrfl": (
        "# The package\n\nWhat `import fnrfl` gives, and what a run returns.",
        ["fnrfl"],
    ),
    "own-loop": (
        "# A loop of your own\n\nFNR for a training loop in [plain PyTorch](../docs/plain-pytorch.md).",
        ["fnrfl.runs.functional"],
    ),
    "flower": (
        "# A Flower app of your own\n\nFNR for [an app that exists already](../docs/flower-apps.md).",
        ["fnrfl.flower"],
    ),
    "methods": (
        "# Writing a method\n\nWhat a method's author uses. [Contributing](../CONTRIBUTING.md) has a whole method, and "
        "[Architecture](../ARCHITECTURE.md#core-types) these types side by side.",
        ["fnrfl.core.algorithm", "fnrfl.core.values", "fnrfl.core.engine", "fnrfl.core.training"],
    ),
    "errors": ("# Errors\n\nWhat fnrfl raises.", ["fnrfl.core.errors"]),
}


def pages(source: Path) -> dict[str, str]:
    """The text of every page, by its name; `source` is the folder that holds the package."""
    package = griffe.load("fnrfl", search_paths=[source], allow_inspection=False)
    return {
        name: "\n\n".join([opening, *(part for path in paths for part in _described(package, path))]) + "\n"
        for name, (opening, paths) in PAGES.items()
    }


def _described(package: Any, path: str) -> Iterator[str]:
    inner = path.removeprefix("fnrfl").removeprefix(".")
    found = package[inner] if inner else package
    if not found.is_module:
        yield f"## {found.name}"
        yield from _object(found, path)
        return
    yield f"## `{path}`"
    yield _prose(found).partition("\n\n")[0]
    exports = [str(name) for name in found.exports or []]
    for one in sorted(found.members.values(), key=lambda one: one.is_alias):  # what is defined here comes first
        target = one.final_target if one.is_alias and one.name in exports and _is_ours(one) else one
        public = one.name in exports if exports else not one.name.startswith("_")
        if public and not target.is_alias and (target.is_function or target.is_class) and target.docstring:
            yield from _object(target, f"{path}.{one.name}")


def _is_ours(alias: Any) -> bool:
    return str(alias.target_path).startswith("fnrfl.")


def _object(thing: Any, path: str) -> Iterator[str]:
    """A function, or a class with its fields and methods, as a directive of Sphinx."""
    if thing.is_function:
        yield _directive("py:function", f"{path}{_signature(thing)}", _prose(thing))
        return
    parts = [_prose(thing)]
    for member in thing.all_members.values():
        target = member.final_target if member.is_alias else member
        if member.name.startswith("_") or not str(target.path).startswith("fnrfl."):
            continue
        if target.is_function:
            parts.append(
                _directive("py:method", f"{member.name}{_signature(target)}", _prose(target), fence=FENCE[:-1])
            )
        elif target.is_attribute:
            kind = "py:property" if "property" in target.labels else "py:attribute"
            text = _prose(target) or _comment(target)
            typed = f":type: {target.annotation}" if target.annotation else ""
            parts.append(_directive(kind, member.name, "\n\n".join(filter(None, [typed, text])), fence=FENCE[:-1]))
    yield _directive("py:class", path, "\n\n".join(parts))


def _signature(function: Any) -> str:
    text = function.signature(return_type=True).removeprefix(function.name)
    return re.sub(r"^\((self|cls)(, )?", "(", text)


def _directive(kind: str, signature: str, body: str, *, fence: str = FENCE) -> str:
    return f"{fence}{{{kind}}} {signature}\n{body}\n{fence}"


def _prose(thing: Any) -> str:
    """A docstring as Markdown; lines that a reader would type into Python become a block of code."""
    parts = re.split(r"(?m)(^>>> (?:.*(?:\n|\Z))+?(?=\n|\Z))", thing.docstring.value if thing.docstring else "")
    plain = [re.sub(r"(`[^`]*`)|<", lambda found: found[1] or r"\<", part) for part in parts[::2]]  # <name> is no HTML
    typed = [f"~~~pycon\n{part.rstrip()}\n~~~\n" for part in parts[1::2]] + [""]
    return "".join(one + other for one, other in zip(plain, typed, strict=True))


def _comment(attribute: Any) -> str:
    """What the source says behind a field."""
    line = attribute.lines[-1] if attribute.lines else ""
    return line.partition("  # ")[2] if "  # " in line else ""
