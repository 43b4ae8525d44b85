"""The workflow, the hooks and the templates agree with what the project says about itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import fnrfl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = (ROOT / ".github/workflows/test.yml").read_text()
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def versions(name: str) -> list[str]:
    """The list of versions of one axis of the workflow's matrix."""
    (line,) = re.findall(rf"^ +{name}: \[(.*?)\]", WORKFLOW, re.MULTILINE)
    return [word.strip().strip('"') for word in line.split(",")]


def test_the_workflow_has_the_pythons_that_are_claimed() -> None:
    said = [c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"] if "Python :: 3." in c]
    assert versions("python") == said
    assert PROJECT["project"]["requires-python"] == f">={said[0]}"
    assert PROJECT["tool"]["mypy"]["python_version"] == said[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + said[0].replace(".", "")


def test_the_workflow_has_the_oldest_torch_and_the_one_that_the_tests_ran_with() -> None:
    (oldest,) = re.findall(r"^torch>=([\d.]+)$", "\n".join(PROJECT["project"]["dependencies"]), re.MULTILINE)
    (newest,) = re.findall(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert versions("torch") == [f"{oldest}.0", newest]


def test_the_workflow_asks_for_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    asked = {word for line in re.findall(r"run: make (.*)", WORKFLOW) for word in line.split()}
    assert asked == {"lint", "types", "quick"}
    assert asked <= targets


def test_hooks_are_the_tools_of_make_and_need_no_network() -> None:
    assert set(re.findall(r"repo: (\S+)", HOOKS)) == {"local"}
    entries = re.findall(r"entry: \.venv/bin/(.*)", HOOKS)
    assert entries == ["ruff check", "ruff format --check", "mypy"]
    assert all(f"$(BIN)/{entry}" in MAKEFILE for entry in entries)


@pytest.mark.parametrize("name", ["bug", "method", "question"])
def test_issues_are_asked_for_what_is_needed_to_answer_them(name: str) -> None:
    page = (ROOT / f".github/ISSUE_TEMPLATE/{name}.md").read_text()
    assert re.match(r"---\nname: .+\nabout: .+\nlabels: \S+\n---\n", page)
    assert "`fnrfl doctor`" in page
    assert "command" in page
    assert ("`config.toml`" in page) == (name != "question")


def test_the_changelog_has_this_version_first_and_dates_for_released_ones() -> None:
    heads = re.findall(r"^## \[(.+?)\] - (.+)$", CHANGELOG, re.MULTILINE)
    assert heads[0] == (fnrfl.__version__, "unreleased") or re.fullmatch(r"\d{4}-\d\d-\d\d", heads[0][1])
    assert heads[0][0] == fnrfl.__version__
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in heads[1:])
    assert heads[-1][0] == "0.1.0"
    assert sorted((tuple(map(int, version.split(".")[:3])) for version, _ in heads), reverse=True) == [
        tuple(map(int, version.split(".")[:3])) for version, _ in heads
    ]
