"""Measures of the source: lines of files and functions, branches, and lines that stand in two places.

    python tests/measures.py               # every file, the worst ones last

`tests/test_measures.py` holds the limits.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import fnrfl

PACKAGE = Path(fnrfl.__file__).parent
SAME_LINES = 6  # that make a duplicate
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


@dataclass(frozen=True)
class Function:
    """One function: where it begins, how long it is, and how many ways lead through it."""

    name: str
    line: int
    lines: int
    complexity: int


@dataclass(frozen=True)
class Duplicate:
    """The same lines in two places."""

    first: str  # file:line
    second: str
    lines: int


def files(package: Path = PACKAGE) -> dict[str, str]:
    """The text of every file by its path."""
    return {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}


def functions(text: str) -> list[Function]:
    """All functions of a file; what is nested in one counts for it, too."""
    return [
        Function(node.name, node.lineno, (node.end_lineno or 0) - node.lineno + 1, complexity(node))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, FUNCTIONS)
    ]


def complexity(function: ast.AST) -> int:
    """Branches + 1: statements as McCabe and ruff count them, and also choices within expressions.

    Those are conditional expressions, `and` and `or`, and the loops and conditions of comprehensions.
    """
    nodes = list(ast.walk(function))
    statements = sum(isinstance(node, BRANCHES) for node in nodes)
    words = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    loops = sum(1 + len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return 1 + statements + words + loops


def code_lines(text: str) -> list[tuple[int, str]]:
    """(number, text) of the lines that say something: no imports, signatures, docstrings, comments, lone brackets."""
    tree = ast.parse(text)
    silent: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            silent |= _span(node)
        elif isinstance(node, FUNCTIONS | ast.ClassDef):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            silent |= set(range(begin, node.body[0].lineno))
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node) is not None:
            silent |= _span(node.body[0])
    numbered = [(number, line.partition("  # ")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    empty = lambda line: not line.strip("()[]{}, ") or line.startswith("#") or line == "..."  # noqa: E731
    said = [(number, line) for number, line in numbered if not empty(line)]
    return [(number, line) for number, line in said if number not in silent]


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def duplicates(texts: dict[str, str], least: int = SAME_LINES) -> list[Duplicate]:
    """Runs of at least so many equal lines, each pair of places once and as long as it is."""
    lines = [(file, *line) for file, text in texts.items() for line in code_lines(text)]
    places: dict[tuple[str, ...], list[int]] = {}
    for place in range(len(lines) - least + 1):
        window = lines[place : place + least]
        if window[0][0] == window[-1][0]:
            places.setdefault(tuple(text for _, _, text in window), []).append(place)
    pairs = {pair for found in places.values() for pair in _pairs(found, least)}
    begins = sorted(pair for pair in pairs if (pair[0] - 1, pair[1] - 1) not in pairs)
    return [_duplicate(lines, pairs, first, second, least) for first, second in begins]


def _pairs(places: list[int], least: int) -> Iterator[tuple[int, int]]:
    return ((a, b) for i, a in enumerate(places) for b in places[i + 1 :] if b - a >= least)


def _duplicate(
    lines: list[tuple[str, int, str]], pairs: Iterable[tuple[int, int]], first: int, second: int, least: int
) -> Duplicate:
    length = least
    while (first + length - least + 1, second + length - least + 1) in pairs:
        length += 1
    where = [f"{lines[place][0]}:{lines[place][1]}" for place in (first, second)]
    return Duplicate(where[0], where[1], length)


def main() -> None:
    """Print a line for every file, sorted by its lines, and then the duplicates."""
    texts = files()
    for file, text in sorted(texts.items(), key=lambda item: len(item[1].splitlines())):
        found = functions(text)
        longest = max(found, key=lambda one: one.lines, default=Function("-", 0, 0, 0))
        worst = max(found, key=lambda one: one.complexity, default=longest)
        told = f"{longest.name} {longest.lines} lines, {worst.name} complexity {worst.complexity}"
        print(f"{len(text.splitlines()):4} {file}: {told}")
    for duplicate in duplicates(texts):
        print(f"{duplicate.first} and {duplicate.second} have the same {duplicate.lines} lines")


if __name__ == "__main__":
    main()
