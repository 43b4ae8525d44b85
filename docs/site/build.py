"""Build the documents as a site: `make docs`, or `python docs/site/build.py` where the extra `docs` is installed.

The pages are copied to build/site-source as they lie in the repository, with the notebook and the Python interface as
pages beside them. Sphinx makes build/site of them, and stops at a link or an anchor that leads nowhere.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
PAGES = (
    "*.md", "docs/**/*.md", "results/*/README.md", "reproduction/*.md", "reproduction/results/*.md",
    "src/fnrfl/data/files/README.md",
)  # fmt: skip
FILES = (
    "docs/images/*", "docs/tutorial.ipynb", "LICENSE", "CITATION.cff", "examples/*.py",
    "src/fnrfl/algorithms/fedavg.py",
)  # fmt: skip
MOVED = {"README.md": "index.md", "docs/tutorial.ipynb": "docs/tutorial.md"}  # pages with another name in the site

CONTENTS = {
    "Tutorials": ["docs/getting-started", "docs/own-data", "docs/tutorial"],
    "How to": [
        "docs/own-model-and-data", "docs/python", "docs/time-series-and-text", "docs/plain-pytorch", "docs/flower-apps",
        "docs/deploy", "docs/scale", "docs/loggers", "CONTRIBUTING",
    ],
    "Reference": [
        "docs/commands", "docs/keys", "docs/methods/README", "docs/scenarios", "docs/metrics",
        "docs/reading-the-report", "docs/nodes-data", "api/fnrfl", "api/own-loop", "api/flower", "api/methods",
        "api/errors",
    ],
    "Explanation": [
        "docs/concepts", "docs/protocols", "docs/correctness", "docs/performance", "docs/compared-with-others",
        "docs/faq", "docs/not-included", "ARCHITECTURE", "SECURITY",
    ],
    "The paper": [
        "docs/reproduction", "reproduction/README", "reproduction/PAPER-TO-CODE", "reproduction/THEORY",
        "reproduction/results/claims", "reproduction/FINDINGS",
    ],
    "Results and notes": [
        "results/methods/README", "reproduction/results/README", "results/cpu/README", "results/gpu/README",
        "src/fnrfl/data/files/README", "CHANGELOG",
    ],
}  # fmt: skip
METHODS = "docs/methods/README.md"  # its own pages are listed under it


def lay_out() -> None:
    """Everything that the site is made of, in build/site-source."""
    import api

    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in sorted(path for pattern in FILES for path in ROOT.glob(pattern)):
        _write(path.relative_to(ROOT).as_posix(), path.read_bytes())
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        _write(MOVED.get(name, name), as_page(path.read_text(encoding="utf-8"), name) + contents(name))
    notebook = json.loads((ROOT / "docs/tutorial.ipynb").read_text(encoding="utf-8"))
    text, pictures = from_notebook(notebook)
    _write("docs/tutorial.md", text)
    for name, picture in pictures.items():
        _write(f"docs/images/{name}", picture)
    for name, text in api.pages(ROOT / "src").items():
        _write(f"api/{name}.md", text)


def _write(name: str, content: str | bytes) -> None:
    path = SOURCE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def as_page(text: str, name: str) -> str:
    """A page of the repository: links to pages that are called otherwise here, and the name of a file over its code."""
    text = re.sub(r"^```(\w+) runnable (\S+)$", r"```{code-block} \1\n:caption: \2\n", text, flags=re.MULTILINE)
    here = (ROOT / name).parent

    def link(found: re.Match[str]) -> str:
        target = (here / found[1]).resolve()
        old = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
        if old not in MOVED:
            return found[0]
        return f"]({'../' * name.count('/')}{MOVED[old]}{found[2]})"

    return re.sub(r"\]\(([^)#:\s]+)((?:#[^)]*)?)\)", link, text)


def contents(name: str) -> str:
    """The tables of contents that a page carries: the whole site's on the first page, the methods' on theirs."""
    if name == "README.md":
        return "".join(_tree(pages, caption) for caption, pages in CONTENTS.items())
    if name == METHODS:
        pages = sorted(path.stem for path in (ROOT / "docs/methods").glob("*.md") if path.stem != "README")
        return _tree(["fnr", *(page for page in pages if page != "fnr")])
    return ""


def _tree(pages: list[str], caption: str = "") -> str:
    options = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{options}\n" + "\n".join(pages) + "\n```\n"


def from_notebook(notebook: dict[str, Any]) -> tuple[str, dict[str, bytes]]:
    """A notebook with its stored outputs as a page, and its pictures by name."""
    parts, pictures = list[str](), dict[str, bytes]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                name = f"tutorial-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![{''.join(output['data']['text/plain'])}](images/{name})")
    parts.insert(1, "This page is a notebook: {download}`tutorial.ipynb <tutorial.ipynb>`.")
    return "\n\n".join(parts) + "\n", pictures


def main() -> int:
    """Lay the sources out and build the site from them."""
    from sphinx.cmd.build import main as sphinx

    lay_out()
    shutil.rmtree(SITE, ignore_errors=True)
    places = ["-c", HERE, "-d", ROOT / "build/site-cache", SOURCE, SITE]
    status = sphinx(["-b", "html", "-q", "-W", "--keep-going", *map(str, places)])
    if status == 0:
        print(f"The site is at {SITE / 'index.html'}.")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
