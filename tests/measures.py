"""Measures of the source: lines of files and functions, branches, and lines that stand in two places."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import fnrfl

PACKAGE = Path(fnrfl.__file__).parent
SAME_LINES = 6  # that make a duplicate
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


class Function(NamedTuple):
    """One function: where it begins, how long it is, and how many ways lead through it."""

    name: str
    line: int
    lines: int
    complexity: int


def files(package: Path = PACKAGE) -> dict[str, str]:
    """The text of every file by its path."""
    return {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}


def functions(text: str) -> Iterator[Function]:
    """All functions of a file; what is nested in one counts for it, too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS):
            yield Function(node.name, node.lineno, len(_span(node)), complexity(node))


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
    silent: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            silent |= _span(node)
        elif isinstance(node, FUNCTIONS | ast.ClassDef):
            begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            silent |= set(range(begin, node.body[0].lineno))
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node) is not None:
            silent |= _span(node.body[0])
    lines = [(number, line.partition("  # ")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    empty = lambda line: not line.strip("()[]{}, ") or line.startswith("#") or line == "..."  # noqa: E731
    return [(number, line) for number, line in lines if number not in silent and not empty(line)]


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def duplicates(texts: dict[str, str]) -> list[tuple[str, str]]:
    """The two places, as file:line, where each run of equal lines begins that is long enough."""
    lines = [(file, *line) for file, text in texts.items() for line in code_lines(text)]
    places: dict[tuple[str, ...], list[int]] = {}
    for place in range(len(lines) - SAME_LINES + 1):
        window = lines[place : place + SAME_LINES]
        if window[0][0] == window[-1][0]:
            places.setdefault(tuple(text for _, _, text in window), []).append(place)
    pairs = {(a, b) for found in places.values() for a, b in combinations(found, 2) if b - a >= SAME_LINES}
    begins = sorted((a, b) for a, b in pairs if (a - 1, b - 1) not in pairs)
    where = lambda place: f"{lines[place][0]}:{lines[place][1]}"  # noqa: E731
    return [(where(first), where(second)) for first, second in begins]
