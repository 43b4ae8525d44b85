"""The documents tell the truth: names exist, signatures are real, examples run, commands are accepted."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fnrfl
from fnrfl import cli, config
from fnrfl.config import PAPER, describe_keys, registry
from fnrfl.core import algorithm, types
from fnrfl.data import scenarios

ROOT = Path(__file__).parent.parent
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "reproduction/PAPER-TO-CODE.md")
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in map(ROOT.joinpath, TOP)}
PAGES |= {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
}

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(page, info.split(), body) for page, text in PAGES.items() for info, body in FENCE.findall(text)]
PROSE = {page: FENCE.sub("", text) for page, text in PAGES.items()}
EXAMPLES: list[tuple[str, list[str], str]] = [
    (page, info[2:], body) for page, info, body in BLOCKS if info[:2] == ["python", "runnable"]
]
COMMANDS = [
    (page, line) for page, info, body in BLOCKS if not info for line in body.splitlines() if line.startswith("fnrfl ")
]


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Every table of a text: its head and its rows; cells as they are written."""
    found = re.findall(r"^(\|.*\n)\|-.*\n((?:\|.*(?:\n|\Z))*)", text, re.MULTILINE)
    cells = lambda line: [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]  # noqa: E731
    return [(cells(head), [cells(row) for row in rows.splitlines()]) for head, rows in found]


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, without its head."""
    _, found, section = PAGES[page].partition(f"## {heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    return tables(section.partition("\n## ")[0])[0][1]


def numbers(rows: list[list[str]]) -> list[int]:
    """The numbers in the first column, ranges such as 19-22 written out."""
    found: list[int] = []
    for cell, *_ in rows:
        first, _, last = cell.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


# -- paper to code ----------------------------------------------------------------------------------------------------

MAP = "reproduction/PAPER-TO-CODE.md"
ALGORITHMS = {
    "Algorithm 1: Calculate Class Average Feature Norms": 16,
    "Algorithm 2: Calculate Feature Norms Differences": 9,
    "Algorithm 3: FNR-FL": 43,
}


def resolve(name: str) -> object:
    """What `module:Name` or `module:Class.method` stands for."""
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(
    "name", sorted({name for text in PROSE.values() for name in re.findall(r"`(fnrfl[\w.]*:[\w.]+)`", text)})
)
def test_every_name_exists(name: str) -> None:
    assert callable(resolve(name)) or isinstance(resolve(name), property)


@pytest.mark.parametrize(("heading", "lines"), ALGORITHMS.items())
def test_every_line_of_an_algorithm_is_there_in_order(heading: str, lines: int) -> None:
    rows = table(MAP, heading)
    assert numbers(rows) == list(range(1, lines + 1))
    assert all("`fnrfl." in code or said == "end" for _, said, code, _ in rows)


def test_every_equation_is_there_in_order() -> None:
    method = table(MAP, "Equations of the method")
    assert numbers(method + table(MAP, "Equations of the convergence analysis")) == list(range(1, 62))
    assert all("`fnrfl." in code for _, _, code, _ in method)


def test_every_penalty_is_there() -> None:
    penalties = importlib.import_module("fnrfl.algorithms.parts.penalties")
    listed = dict(re.findall(r"^\| `([\w-]+)` \|.*\| `([\w.]+:\w+)` \|$", PAGES[MAP], re.MULTILINE))
    assert {name: resolve(code) for name, code in listed.items()} == penalties.PENALTIES


# -- names, keys and links --------------------------------------------------------------------------------------------


def test_every_key_exists() -> None:
    known = {key.name for key in describe_keys()}
    sections = {name.partition(".")[0] for name in known if "." in name}
    used = {
        key
        for text in PROSE.values()
        for code in re.findall(r"`([^`\n]+)`", text)
        for key in re.findall(r"(?<![\w./])([a-z_]+\.[a-z_]+)(?![\w.(])", code)
        if key.partition(".")[0] in sections and not key.endswith((".py", ".toml", ".safetensors", ".json"))
    }
    toys = {"algorithm.clip", "algorithm.beta"}  # of the method in CONTRIBUTING.md
    assert len(used) > 20
    assert used - known <= toys


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


LINKING = [
    *(ROOT / page for page in (*PROSE, "SECURITY.md", "docs/tutorial.ipynb")),
    *sorted((ROOT / "results").glob("*/README.md")),
    *sorted((ROOT / "reproduction").rglob("*.md")),
    ROOT / "src/fnrfl/data/files/README.md",
]  # every page of the site


def test_links_lead_somewhere() -> None:
    for path in LINKING:
        page, text = path.relative_to(ROOT).as_posix(), FENCE.sub("", path.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            if not target.startswith("http"):
                there = (ROOT / page).parent / target if target else ROOT / page
                assert there.exists(), f"{page} links to {target}"
                assert not anchor or anchor in headings(there), f"{page} links to {target}#{anchor}"


def test_the_site_has_every_page_and_no_other() -> None:
    """Of what `make docs` builds: a page that is not in the contents would stop it."""
    site = runpy.run_path(str(ROOT / "docs/site/build.py"))
    pages = {path.relative_to(ROOT).with_suffix("").as_posix() for path in LINKING}
    listed = [page for pages in site["CONTENTS"].values() for page in pages]
    methods = {page for page in pages if page.startswith("docs/methods/")}
    assert sorted({*listed, "README"} | methods) == sorted(pages | {page for page in listed if page.startswith("api/")})
    assert len(set(listed)) == len(listed)
    laid_out = {path for pattern in site["PAGES"] for path in ROOT.glob(pattern)}
    assert laid_out == set(LINKING) - {ROOT / "docs/tutorial.ipynb"}


def test_pages_of_the_site_link_to_its_other_names() -> None:
    site = runpy.run_path(str(ROOT / "docs/site/build.py"))
    text = "[a](../../README.md#two-commands) [b](README.md) [c](../tutorial.ipynb) ```"
    assert site["as_page"](text, "docs/methods/fnr.md") == (
        "[a](../../index.md#two-commands) [b](README.md) [c](../../docs/tutorial.md) ```"
    )


def test_every_file_spoken_of_exists() -> None:
    found = {
        path
        for text in PROSE.values()
        for path in re.findall(r"`((?:\w+/)+\w*(?:\.py|\.toml)?)`", text)
        if path.split("/")[0] not in ("runs", "rounds", "folder")  # of a run's folder, or the reader's own
    }
    assert "tests/test_conformance.py" in found
    assert not [path for path in found if not (ROOT / path).exists() and not (ROOT / "src/fnrfl" / path).exists()]


def test_every_test_spoken_of_exists() -> None:
    """By its name, or by what several names begin with."""
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py")]
    there = [name for text in files for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)]
    named = {name for text in PROSE.values() for name in re.findall(r"`(test_\w+)`", text)}
    assert "test_card5_travel_is_the_closed_form" in named
    assert not [name for name in named if not any(function.startswith(name) for function in there)]


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    text = "\n".join(PAGES.values())
    used = {
        word
        for words in re.findall(r"(?:^|`)make ((?:[\w-]+ ?)+?)(?:`|  )", text, re.MULTILINE)
        for word in words.split()
    }
    assert {"demo", "test", "setup"} <= used
    assert used <= targets


def test_signatures_are_those_of_the_code() -> None:
    """Classes in a block marked `signatures` have these fields, and methods with these parameters, in this order."""
    (body,) = [body for _, info, body in BLOCKS if info == ["python", "signatures"]]
    declared = [node for node in ast.parse(body).body if isinstance(node, ast.ClassDef)]
    assert {"Objective", "Algorithm", "LocalTask", "Replies", "Engine"} <= {node.name for node in declared}
    for node in declared:
        cls: Any = getattr(types, node.name, None) or getattr(algorithm, node.name)
        written = [ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign)]
        if dataclasses.is_dataclass(cls) and cls is not algorithm.Algorithm:
            assert written == [field.name for field in dataclasses.fields(cls)], node.name
        else:
            assert set(written) <= set(inspect.get_annotations(cls)), node.name
        for method in (line for line in node.body if isinstance(line, ast.FunctionDef)):
            real = list(inspect.signature(getattr(cls, method.name)).parameters)
            given = method.args
            stars = [arg.arg for arg in (given.vararg, given.kwarg) if arg is not None]
            assert [arg.arg for arg in given.args + given.kwonlyargs] + stars == real, f"{node.name}.{method.name}"


def test_architecture_can_be_read_in_one_sitting() -> None:
    assert len(PAGES["ARCHITECTURE.md"].splitlines()) <= 200


# -- methods ----------------------------------------------------------------------------------------------------------

OVERVIEW = "docs/methods/README.md"


def about(name: str) -> str:
    """The page of a method, or its section of the page of controls."""
    if f"docs/methods/{name}.md" in PAGES:
        return PAGES[f"docs/methods/{name}.md"]
    section = re.search(
        rf"^(##+) `?{name}`?(?![\w-])[^\n]*\n.*?(?=^\1 |\Z)",
        PAGES.get("docs/methods/controls.md", ""),
        re.MULTILINE | re.DOTALL | re.IGNORECASE,
    )
    assert section is not None, f"there is neither docs/methods/{name}.md nor a section {name} in controls.md"
    return section[0]


def defaults(text: str) -> dict[str, str]:
    """Keys and values of every table whose second column is called default; a row may have several, with commas."""
    rows = [row for head, rows in tables(text) if head[1:] and head[1].startswith("default") for row in rows]
    found: dict[str, str] = {}
    for cell, value, *_ in rows:
        keys = re.findall(r"`([\w.]+)`", cell)
        values = value.split(",") if len(keys) > 1 else [value]
        found |= dict(zip(keys, (one.strip(' `"') for one in values), strict=True))
    return found


def same(written: str, value: object) -> bool:
    """Whether a cell says a value: true and false, a number however it is written, or the word itself."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return written == (str(value).lower() if isinstance(value, bool) else value)
    return re.fullmatch(r"[-+.\de]+", written) is not None and float(written) == value


@pytest.mark.parametrize("name", [*registry.algorithms(), "fnr"])
def test_a_page_has_all_options_of_its_method_and_their_defaults(name: str) -> None:
    section = "fnr" if name == "fnr" else "algorithm"
    options = {f"{section}.{field.name}": field.default for field in registry.options(name)}
    known = {key.name: key.default for key in describe_keys() if not key.name.startswith("algorithm.")} | options
    written = {key if key in known else f"{section}.{key}": value for key, value in defaults(about(name)).items()}
    assert options.keys() <= written.keys(), "options that the page leaves out"
    assert written.keys() <= known.keys(), "options that do not exist"
    assert {key: value for key, value in written.items() if not same(value, known[key])} == {}, "other defaults"


def test_a_wrong_default_would_be_noticed() -> None:
    right = [("1e-05", 1e-5), ("0", 0.0), ("false", False), ("client", "client")]
    wrong = [("0.1", 1.0), ("", 0), ("0", False), ("local", "client")]
    assert all(same(written, value) for written, value in right)
    assert not any(same(written, value) for written, value in wrong)
    text = "| option | default | |\n|---|---|---|\n| `algorithm.mu` | 2.0 | pull |\n| `a`, `b` | 1, x | |\n"
    assert defaults(text) == {"algorithm.mu": "2.0", "a": "1", "b": "x"}


def test_the_overview_has_every_method_with_its_needs() -> None:
    rows = table(OVERVIEW, "All methods") + table(OVERVIEW, "Controls")
    listed = {re.sub(r"\[([\w-]+)\]\([\w-]+\.md(?:#[\w-]+)?\)", r"\1", link): needs for link, _, needs, *_ in rows}
    assert listed.keys() == registry.algorithms().keys()
    written = {name: set(re.findall(r"`([\w-]+)`", needs)) for name, needs in listed.items()}
    assert written == {name: set(registry.load_method(name)().needs) for name in listed}
    explained = {need.strip("`") for need, _ in table(OVERVIEW, "Needs")}
    assert set().union(*written.values()) <= explained


# -- protocols and scenarios ------------------------------------------------------------------------------------------


def test_the_papers_settings_are_those_of_the_code() -> None:
    written = {key.strip("`"): value for key, value in table("docs/protocols.md", "`paper`")}
    assert written == {key: str(value).lower() if value is True else str(value) for key, value in PAPER.items()}


def test_the_reference_of_keys_is_generated_from_the_code() -> None:
    made = runpy.run_path(str(ROOT / "docs/site/keys.py"))
    assert PAGES["docs/keys.md"] == made["page"]()
    assert made["KEYWORDS"].read_text(encoding="utf-8") == made["keywords"]()


def test_every_leak_is_explained() -> None:
    explained = [key.strip("`") for key, *_ in table("docs/protocols.md", "The leaks")]
    assert explained == [key.name for key in describe_keys() if key.name.startswith("leaks.")]


def test_scenarios_of_the_table_are_read_and_none_is_missing() -> None:
    rows = table("docs/scenarios.md", "What there is")
    texts = [text.strip("`") for text, *_ in rows]
    assert [str(scenarios.parse(text)) for text in texts] == texts
    described = {name.partition("(")[0] for name in scenarios.describe()} - {"SCENARIO + SCENARIO"}
    assert described == {part.partition("(")[0] for text in texts for part in text.split(" + ")}


# -- examples run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder; modules imported from it are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in {"mine", "steady", "series", "text"} & (set(sys.modules) - before):
        del sys.modules[name]


def example(page: str) -> str:
    (body,) = [body for found, _, body in EXAMPLES if found == page]
    return body


@pytest.mark.parametrize("page", sorted({page for page, file, _ in EXAMPLES if not file}))
def test_examples_run(page: str, folder: Path) -> None:
    for number, (found, file, body) in enumerate(EXAMPLES):
        if found == page and not file:
            script = folder / f"example_{number}.py"
            script.write_text(body, encoding="utf-8")
            runpy.run_path(str(script))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_programs_run(path: Path, folder: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


def test_every_python_block_is_run_or_compared() -> None:
    marked = {"runnable", "signatures"}
    assert all(info[1:2] and info[1] in marked for _, info, _ in BLOCKS if info[:1] == ["python"])


def test_own_model_and_data_beat_three_times_chance(folder: Path) -> None:
    body = example("docs/own-model-and-data.md")
    assert len(body.splitlines()) <= 15
    assert "BatchNorm" in body
    assert "Dropout" in body
    (folder / "mine.py").write_text(body, encoding="utf-8")
    result = runpy.run_path("mine.py", run_name="__main__")["result"]
    assert result.config.fnr is not None
    assert result.rounds[-1]["refined"]
    assert result.accuracy > 3 / len(result.per_class)
    assert fnrfl.load("runs/mine-fedavg-fnr-0").model_sha256 == result.model_sha256


@pytest.mark.parametrize("file", ["series.py", pytest.param("text.py", marks=pytest.mark.slow)])
def test_sequences_beat_twice_chance(file: str, folder: Path) -> None:
    (body,) = [body for page, files, body in EXAMPLES if files == [file]]
    (folder / file).write_text(body, encoding="utf-8")
    result = runpy.run_path(file, run_name="__main__")["result"]
    assert result.rounds[-1]["refined"]
    assert result.accuracy > 2 / len(result.per_class)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_are_accepted(page: str, command: str, folder: Path) -> None:
    """The keys of a run or comparison make a config, a list is printed, and any other command exists.

    Files that the page has the reader write are in the working folder.
    """
    for _, (name,), body in (found for found in EXAMPLES if found[0] == page and found[1]):
        (folder / name).write_text(body, encoding="utf-8")
    _, verb, *rest = shlex.split(command)
    if verb in ("run", "compare"):
        overrides = [word for word in rest if re.match(r"[a-z_.]+=", word)]
        valued = ("-o", "--out", "--seeds", "--over", "--baseline", "--metric")
        options = {i + 1 for i, word in enumerate(rest) if word in valued}
        words = [w for i, w in enumerate(rest) if i not in options and not w.startswith("-") and w not in overrides]
        known = [word for word in words if not word.endswith(".toml")]  # a file of the reader's
        config.load(known[0] if known else None, [o for i, o in enumerate(rest) if i not in options and o in overrides])
        return
    arguments = [verb, *rest] if verb in ("list", "doctor") else [verb, "--help"]
    got = CliRunner().invoke(cli.app, arguments)
    assert got.exit_code == 0, got.output


def test_every_command_is_in_the_readme() -> None:
    listed = {row[0].strip("`").split()[1] for row in table("README.md", "What you can type")}
    registered = {info.name or (info.callback and info.callback.__name__) for info in cli.app.registered_commands}
    assert listed == registered | {group.name for group in cli.app.registered_groups}


def test_the_readme_can_be_read_aloud_in_two_minutes() -> None:
    """Without its tables, code, headings and pictures: 200 words a minute."""
    lines = [line for line in PROSE["README.md"].splitlines() if not line.startswith(("|", "#", "!"))]
    assert len(re.sub(r"\]\([^)]*\)", "]", "\n".join(lines)).split()) <= 400


def test_the_changelog_and_citation_name_this_version() -> None:
    assert f"fnrfl-{fnrfl.__version__}-py3-none-any.whl" in PAGES["README.md"]
    assert f"## [{fnrfl.__version__}]" in PAGES["CHANGELOG.md"]
    assert f"version: {fnrfl.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "module",
    ["fnrfl", *(f"fnrfl.{name}" for name in ("algorithms.parts.norms", "config.resolving", "core.words", "core.rng")),
     "fnrfl.runs.quality", "fnrfl.data.scenarios", "fnrfl.results.statistics"],
)  # fmt: skip
def test_examples_in_docstrings(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted > 0
    assert found.failed == 0


def test_reading_the_report_goes_through_the_whole_page() -> None:
    """Every section, column, button and phase of the page is on the page about it."""
    from importlib.resources import files

    from fnrfl.results.report import charts, page, tables
    from fnrfl.runs.quality import TEST_METRICS

    told = PAGES["docs/reading-the-report.md"]
    templates = files("fnrfl.results.report").joinpath("sections")
    assert {path.name for path in templates.iterdir()} == {
        f"{name}.html" for name in ("banners", "summary", *page.PAGE_SECTIONS)
    }
    html = "".join(path.read_text(encoding="utf-8") for path in templates.iterdir())
    sections = ["In short", *page.PAGE_SECTIONS.values()]
    assert [line.removeprefix("## ") for line in told.splitlines() if line.removeprefix("## ") in sections] == sections
    words = {metric.name for metric in (*tables.SHARES, *charts.charted(TEST_METRICS["accuracy"]))}
    words |= {column.name for column, _, _ in tables.COSTS} | {label.lower() for label, _ in charts.PHASES.values()}
    words |= set(re.findall(r"<b>([a-z ]+)</b>(?:: |, left)", html))
    plain = " ".join(told.lower().split())
    assert {word for word in words if word.lower() not in plain} == set()
