"""`fnrfl list`: short lines that fit, everything on demand, the values of a recipe; methods are read as text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from command_line import fnrfl
from fnrfl.cli.listing import SUBJECTS, KeyList, cut, key_details, method_details, short_key_lines, short_method_lines
from fnrfl.config import describe_keys, load, registry
from fnrfl.config.declarations import INNER, Entry, read_entry
from fnrfl.core.options import options_of
from fnrfl.rundir.configs import flat_config

WIDTHS = (40, 60, 80, 120)
NEEDS = {"features", "head", "batchnorm", "public-labels", "distill", "linear-optimiser", "uses-trained"}
DEFAULT = "1 model down, 1 up"
METHODS = registry.methods()


def plain(lines: Iterator[str], width: int) -> str:
    """Lines that fit, as one."""
    found = list(lines)
    assert max(map(len, found)) <= width
    return " ".join(" ".join(found).split())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("recipe", [None, "paper-label-skew"])
def test_a_key_is_one_line_that_fits_below_its_section(recipe: str | None, width: int) -> None:
    lines = list(short_key_lines(KeyList.read(recipe), width))
    assert max(map(len, lines)) <= width
    section, found = "", []
    for line in lines:
        section = line.strip("[]").replace("of every run", "") if line[:1] not in ("", " ", "*") else section
        if line.startswith(("  ", "* ")) and "has another value" not in line:
            found.append((section, line[2:].split()[0]))
    expected = [key.name for key in describe_keys() if not key.method]
    assert [name for _, name in found][: len(expected)] == expected
    assert all(section == ("fnr" if name == "fnr" else name.rpartition(".")[0]) for section, name in found)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_details_fit_and_leave_nothing_out(width: int) -> None:
    told = plain(key_details(KeyList.read(None), width), width)
    for key in describe_keys():
        assert f"{key.name} = " in told and " ".join(key.help.split()) in told and key.rule in told
    told = plain(method_details(registry.method_names(), width), width)
    for entry in METHODS:
        assert entry.idea in told and entry.traffic in told
        assert all(f"algorithm.{option.name} = " in told and option.help in told for option in entry.options)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_method_has_its_idea_in_lines_that_fit(width: int) -> None:
    lines = list(short_method_lines(registry.method_names(), width))
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line[:1].strip(" `")][: len(METHODS)] == list(registry.algorithms())


@pytest.mark.parametrize("recipe", registry.recipes())
def test_a_recipe_shows_its_values(recipe: str) -> None:
    rows = json.loads(fnrfl("list", "keys", "--recipe", recipe, "--json").stdout)
    values, method = flat_config(load(recipe)), load(recipe).algorithm.name
    common = {key.name for key in describe_keys() if key.method in ("", method)} & values.keys() - {"name"}
    assert {row["name"]: row["value"] for row in rows if row["name"] in common} == {
        name: values[name] for name in common
    }


def test_a_recipe_of_ones_own_shows_the_options_of_its_method(tmp_cwd: Path) -> None:
    (tmp_cwd / "listed_method.py").write_text(
        "from dataclasses import dataclass\nfrom fnrfl.algorithms.fedavg import FedAvg\n"
        "from fnrfl.core.algorithm import option\n\n@dataclass(frozen=True)\nclass Mine(FedAvg):\n"
        '    zeta: float = option(0.5, "a number of mine")\n'
    )
    (tmp_cwd / "mine.toml").write_text('algorithm = "listed_method:Mine"\nrounds = 3\n')
    assert "--trust" in fnrfl("list", "keys", "--recipe", "mine.toml", code=2).stderr
    told = fnrfl("list", "keys", "--recipe", "mine.toml", "--trust", "--long", code=0).stdout
    for words in ("options of listed_method:Mine", "algorithm.zeta = 0.5", "rounds = 3", "(default 10)"):
        assert words in told


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("client.lr", ["client.lr"]),
        ("clients", ["clients"]),
        ("engine.", [key.name for key in describe_keys() if key.name.startswith("engine.")]),
        ("fnr", [key.name for key in describe_keys() if key.name.startswith("fnr")]),
        ("ro", ["rounds"]),
    ],
)
def test_a_prefix_is_a_key_a_section_or_a_beginning(prefix: str, names: list[str]) -> None:
    assert [row["name"] for row in json.loads(fnrfl("list", "keys", prefix, "--json").stdout)] == names
    assert [line.split()[0] for line in fnrfl("list", "keys", prefix).stdout.splitlines()] == names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("modles", "Did you mean models?"), ("method", "Did you mean algorithms?"),
        ("methods", "Did you mean algorithms?"), ("keys clinet", "Did you mean client?"),
        ("keys learning_rate", "Did you mean client.lr or"), ("keys zzz", "`fnrfl list keys` prints all"),
        ("algorithms scafold", "Did you mean scaffold?"), ("recipes digit5", "Did you mean digits?"),
        ("models --recipe digits", "fnrfl list keys --recipe NAME"), ("keys --recipe digit", "Did you mean digits?"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_answered_with_the_nearest(words: str, said: str) -> None:
    got = fnrfl("list", *words.split(), code=2)
    assert said in got.stderr and got.stdout == ""


def test_other_spellings_of_a_method_are_known() -> None:
    assert fnrfl("list", "algorithms", "FedAvg").stdout == fnrfl("list", "algorithms", "fedavg").stdout
    assert "algorithm.server_lr = " in fnrfl("list", "algorithms", "scaffold", "--long").stdout


@example("aaaaaaa bbbb", 9)
@given(st.text(st.characters(categories=("L", "Zs", "Po")), max_size=60), st.integers(8, 80))
def test_a_cut_line_fits_and_is_the_beginning(text: str, width: int) -> None:
    line = cut(text, width)
    assert len(line) <= width
    assert text.startswith(line.removesuffix(" ..")) or line == text.rstrip()


def test_text_of_a_recipe_cannot_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text('name = "a\\u001b[31mb"\n')
    listed = KeyList.read(str(tmp_path / "odd.toml"))
    assert not any("\x1b" in line for line in [*short_key_lines(listed, 80), *key_details(listed, 80)])


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_list_is_a_row_per_line_and_has_its_json(subject: str) -> None:
    lines, rows = (
        fnrfl("list", subject, code=0).stdout.splitlines(),
        json.loads(fnrfl("list", subject, "--json").stdout),
    )
    assert len(rows) == len(lines)
    for line, row in zip(lines, rows, strict=True):
        words = [word for key, word in row.items() if key in ("meaning", "idea", "traffic", "shape", "better")]
        assert line.startswith(row["name"]) and all(word in line for word in words)


def test_lists_say_what_there_is() -> None:
    def names(subject: str) -> list[str]:
        return [line.split()[0] for line in fnrfl("list", subject).stdout.splitlines()]

    assert names("algorithms") == list(registry.algorithms())
    assert "fnr" not in registry.algorithms()  # which wraps any of them
    assert names("engines") == ["auto", "loop", "batched", "gpu", "ray", "flower"]
    assert {"digits", "label-skew", "quantity-skew", "mixed", "paper-label-skew"} <= {*names("recipes")}
    assert {"seed", "client.lr", "algorithm.mu", "fnr.weight"} <= {*names("keys")}
    rows = {row["name"]: row for row in json.loads(fnrfl("list", "algorithms", "--json").stdout)}
    assert rows["scaffold"]["needs"] == ["linear-optimiser", "uses-trained"] and not rows["fedavg"]["needs"]


# -- reading a method's file ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.name)
def test_what_is_read_is_what_the_class_says(entry: Entry) -> None:
    cls = registry.load_method(entry.name)
    assert (entry.module, entry.class_name) == (cls.__module__, cls.__name__)
    needs = cls.needs if isinstance(cls.needs, frozenset) else {INNER}  # a property, of one around another
    assert list(entry.needs) == sorted(needs) and needs <= NEEDS | {INNER}
    assert entry.traffic == getattr(cls, "traffic", DEFAULT) and entry.options == options_of(cls)
    assert entry.idea.endswith(".") and "\n" not in entry.traffic


def test_reading_methods_does_not_import_torch() -> None:
    script = "import sys; from fnrfl.config import registry; registry.methods(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


HEAD = '"""An idea."""\nfrom fnrfl.algorithms.base import Base as Old\n'
BASE = """
class Base(Algorithm):
    needs = frozenset({"head"})
    traffic = "2 models"
    mu: float = option(0.5, "a number")
"""


@pytest.fixture
def new_method(tmp_path: Path) -> Path:
    (tmp_path / "base.py").write_text(BASE)
    return tmp_path / "new.py"


@pytest.mark.parametrize(
    ("body", "needs", "traffic"),
    [
        ("class New(Algorithm):\n    pass", set(), DEFAULT),
        ("class New(Old):\n    pass", {"head"}, "2 models"),
        ("class New(Old):\n    needs: ClassVar[frozenset[str]] = frozenset()", set(), "2 models"),
        ('class New(Old):\n    needs = Old.needs | {"features"}', {"head", "features"}, "2 models"),
        ('class New(Algorithm):\n    needs = {"head"} | frozenset(["features"])', {"head", "features"}, DEFAULT),
        ('class New(Old):\n    traffic: ClassVar[str] = "none"', {"head"}, "none"),
        ("class New(Old):\n    @property\n    def needs(self): ...", {INNER}, "2 models"),
    ],
)
def test_needs_and_traffic_are_read_or_inherited(new_method: Path, body: str, needs: set[str], traffic: str) -> None:
    new_method.write_text(HEAD + body)
    found = read_entry(new_method)
    assert (found.name, found.class_name, found.idea) == ("new", "New", "An idea.")
    assert (set(found.needs), found.traffic) == (needs, traffic)
    assert [f.name for f in found.options] == (["mu"] if "(Old)" in body else [])


@pytest.mark.parametrize("line", ["needs = some_function()", 'x: list[int] = option(1, "x")'])
def test_what_cannot_be_read_is_refused(new_method: Path, line: str) -> None:
    new_method.write_text(f"{HEAD}class New(Old):\n    {line}")
    with pytest.raises(TypeError, match="cannot be read from the source"):
        read_entry(new_method)
