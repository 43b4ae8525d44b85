"""Run docs/tutorial.ipynb and store what its cells print and draw: `.venv/bin/python docs/site/notebook.py`, a minute.

Without Jupyter: the cells are plain Python. `make test-all` does the same and compares what is printed.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "tutorial.ipynb"


def run(notebook: dict[str, Any], module: ModuleType) -> None:
    """Run every cell in a module, and put its outputs in place of the old ones."""
    for number, cell in enumerate(cell for cell in notebook["cells"] if cell["cell_type"] == "code"):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, code cell {number}", "exec"), module.__dict__)
        text = printed.getvalue()
        words = [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}] if text else []
        cell["execution_count"], cell["outputs"] = number + 1, words + drawn()


def drawn() -> list[dict[str, Any]]:
    """The figures that are open, as outputs of a cell; then they are closed."""
    from matplotlib import pyplot

    outputs = []
    for number in pyplot.get_fignums():
        figure, file = pyplot.figure(number), io.BytesIO()
        titles = [text for axes in figure.axes for text in (axes.get_title(), axes.get_ylabel()) if text]
        figure.savefig(file, format="png", dpi=80, metadata={"Software": None})
        data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": [f"Figure: {', '.join(titles)}"]}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    pyplot.close("all")
    return outputs


def main() -> None:
    """Run the notebook in an empty folder and write it back."""
    import matplotlib

    from fnrfl.process import one_intra_op_thread

    matplotlib.use("Agg")
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    module = ModuleType("tutorial_notebook")
    sys.modules[module.__name__] = module
    with tempfile.TemporaryDirectory() as folder, one_intra_op_thread():
        os.chdir(folder)
        module.__dict__["__name__"] = module.__name__
        run(notebook, module)
        os.chdir(NOTEBOOK.parent)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    NOTEBOOK.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
