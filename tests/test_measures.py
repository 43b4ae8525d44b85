"""No file, function or chain of branches grows beyond what can be read at once, and nothing is written twice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from measures import code_lines, complexity, duplicates, files, functions

MOST_LINES = 500  # of a file
LONGEST = 60  # lines of a function
MOST_COMPLEX = 15  # branches + 1

TEXTS = files()

ROOT = Path(__file__).parent.parent
LINES = {  # at most so many in all; a number only falls, or its change says why it must rise
    "src/fnrfl/**/*.py": 34_560,
    "reproduction/*.py": 2_200,
    "tests/**/*.py": 42_720,
    "documents": 5_020,
}
MOST_MODULES = 225  # of the package
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/**/*.md")
GENERATED = {"docs/keys.md"}


@pytest.mark.parametrize("what", LINES)
def test_the_whole_keeps_its_budget(what: str) -> None:
    patterns = DOCUMENTS if what == "documents" else (what,)
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    counted = [path for path in paths if path.relative_to(ROOT).as_posix() not in GENERATED]
    assert 0 < sum(len(path.read_text(encoding="utf-8").splitlines()) for path in counted) <= LINES[what]


def test_the_package_has_few_modules() -> None:
    assert 0 < len(TEXTS) <= MOST_MODULES


def beyond(file: str) -> list[str]:
    """Every limit that a file breaks, in words."""
    lines = len(TEXTS[file].splitlines())
    found = [f"{file} has {lines} lines; {MOST_LINES} are the most"] if lines > MOST_LINES else []
    for one in functions(TEXTS[file]):
        where = f"{file}:{one.line} {one.name}"
        if one.lines > LONGEST:
            found.append(f"{where} has {one.lines} lines; {LONGEST} are the most")
        if one.complexity > MOST_COMPLEX:
            found.append(f"{where} has complexity {one.complexity}; {MOST_COMPLEX} is the most")
    return found


@pytest.mark.parametrize("file", sorted(TEXTS))
def test_a_file_keeps_the_limits(file: str) -> None:
    assert beyond(file) == []


def test_nothing_is_written_twice() -> None:
    assert duplicates(TEXTS) == []


# -- the measures themselves ------------------------------------------------------------------------------------------

TEXT = '''
"""A docstring."""

import os


@decorated
def first(
    a: int,
) -> int:
    """Says what it does."""
    # a comment
    if a and os:  # another
        return [x for x in range(a) if x] or 1
    try:
        a = 1
    except ValueError:
        pass
    return a if a else 2
'''


def test_branches_are_counted_in_statements_and_in_expressions() -> None:
    assert [(one.name, one.lines, one.complexity) for one in functions(TEXT)] == [("first", 12, 8)]
    assert complexity(ast.parse("match a:\n    case 1: pass\n    case _: pass")) == 3
    assert complexity(ast.parse("def f():\n    def g():\n        while a: pass\n    for b in c: pass")) == 3


def test_lines_that_say_nothing_are_no_duplicates() -> None:
    assert [number for number, _ in code_lines(TEXT)] == [13, 14, 15, 16, 17, 18, 19]
    assert code_lines(TEXT)[0][1] == "if a and os:"


def test_equal_lines_are_found_within_a_file_and_between_files() -> None:
    six = "".join(f"a = {number}\n" for number in range(6))
    longer, other = six + "a = 6\na = 7\n", six.replace("a = 3", "a = -3")
    assert duplicates({"one.py": six + "c = 1\n" + six}) == [("one.py:1", "one.py:8")]
    assert duplicates({"one.py": longer, "other.py": "b = 1\n" + longer}) == [("one.py:1", "other.py:2")]
    assert duplicates({"one.py": six, "other.py": other}) == []
    assert duplicates({"one.py": six[:18], "other.py": six[18:] + six}) == []  # no window spans two files
