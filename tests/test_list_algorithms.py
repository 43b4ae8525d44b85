"""`fnrfl list algorithms`: a method's idea, needs and traffic, read from its file as text."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fnrfl import cli
from fnrfl.config import registry
from fnrfl.config.declarations import INNER, Declared, read_needs

NEEDS = {"features", "head", "batchnorm", "public-labels", "distill", "linear-optimiser", "uses-trained"}
DEFAULT = "1 model down, 1 up"


def listed(*options: str) -> str:
    got = CliRunner().invoke(cli.app, ["list", *options])
    assert got.exit_code == 0, got.output
    return got.stdout


@pytest.mark.parametrize("entry", registry.methods(), ids=lambda entry: entry.name)
def test_what_is_read_is_what_the_class_says(entry: registry.Entry) -> None:
    cls = registry.load_method(entry.name)
    assert (entry.module, entry.class_name) == (cls.__module__, cls.__name__)
    if isinstance(cls.needs, frozenset):
        assert set(entry.needs) == cls.needs <= NEEDS
    else:  # a property, where a method goes around another
        assert entry.needs == (INNER,)
    assert list(entry.needs) == sorted(entry.needs)
    assert entry.traffic == getattr(cls, "traffic", DEFAULT)
    assert entry.idea.endswith(".") and "\n" not in entry.traffic


def test_every_method_is_a_line_with_its_idea_needs_and_traffic() -> None:
    lines = listed("algorithms").splitlines()
    entries = registry.methods()
    assert [line.split()[0] for line in lines] == [entry.name for entry in entries] == list(registry.algorithms())
    for line, entry in zip(lines, entries, strict=True):
        cells = (entry.name, entry.idea, ", ".join(entry.needs) or "-", entry.traffic)
        assert [cell.strip() for cell in line.split("  ") if cell.strip()] == list(cells)


def test_the_json_says_the_same() -> None:
    rows = json.loads(listed("algorithms", "--json"))
    assert rows == [
        {"name": e.name, "idea": e.idea, "needs": list(e.needs), "traffic": e.traffic} for e in registry.methods()
    ]
    known = {row["name"]: row for row in rows}
    assert known["fedavg"]["needs"] == [] and known["fedavg"]["traffic"] == known["fedprox"]["traffic"] == DEFAULT
    assert known["moon"]["needs"] == ["features"]
    assert known["scaffold"]["needs"] == ["linear-optimiser", "uses-trained"]
    assert "P numbers" in known["scaffold"]["traffic"]


@pytest.mark.parametrize("subject", ["models", "datasets", "scenarios", "penalties", "engines", "recipes", "keys"])
def test_every_list_has_its_json(subject: str) -> None:
    lines, rows = listed(subject).splitlines(), json.loads(listed(subject, "--json"))
    assert len(rows) == len(lines)
    assert all(line.startswith(row["name"]) and row["meaning"] in line for line, row in zip(lines, rows, strict=True))


def test_no_list_imports_torch() -> None:
    script = "import sys; from fnrfl.config import registry; registry.methods(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


# -- reading ----------------------------------------------------------------------------------------------------------

HEAD = """\"\"\"An idea.\"\"\"
from fnrfl.algorithms.base import Base as Old
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.py").write_text(
        '"""Base."""\nclass Base(Algorithm):\n    needs = frozenset({"head"})\n    traffic = "2 models"\n'
        '    mu: float = option(0.5, "a number")\n'
    )
    return tmp_path


@pytest.mark.parametrize(
    ("body", "needs", "traffic"),
    [
        ("class New(Algorithm):\n    pass", set(), DEFAULT),
        ("class New(Old):\n    pass", {"head"}, "2 models"),
        ("class New(Old):\n    needs: ClassVar[frozenset[str]] = frozenset()", set(), "2 models"),
        ('class New(Old):\n    needs = Old.needs | {"features"}', {"head", "features"}, "2 models"),
        ('class New(Algorithm):\n    needs = {"head"} | frozenset(["features"])', {"head", "features"}, DEFAULT),
        ('class New(Old):\n    traffic: ClassVar[str] = "none"', {"head"}, "none"),
        ("class New(Old):\n    @property\n    def needs(self): ...", {"as its inner method"}, "2 models"),
    ],
)
def test_needs_and_traffic_are_read_or_inherited(folder: Path, body: str, needs: set[str], traffic: str) -> None:
    path = folder / "new.py"
    path.write_text(HEAD + body)
    found = registry.read_entry(path)
    assert (found.name, found.class_name, found.idea) == ("new", "New", "An idea.")
    assert (set(found.needs), found.traffic) == (needs, traffic)
    assert [f.name for f in found.options] == (["mu"] if "(Old)" in body else [])


def test_needs_that_cannot_be_read_are_refused() -> None:
    node = ast.parse("some_function()", mode="eval").body
    with pytest.raises(TypeError, match=r"needs = some_function\(\) cannot be read from the source; write frozenset"):
        read_needs(node, {"Algorithm": Declared()})
