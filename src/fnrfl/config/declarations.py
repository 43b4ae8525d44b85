"""What the classes of a method's file declare, read from the source as text: nothing is imported, so nobody waits."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fnrfl.core.options import Option, bounds_in
from fnrfl.process import parser_lock

INNER = "as its inner method"  # in the place of needs that are a property, of a method that goes around another


@dataclass(frozen=True)
class Declared:
    """What the body of a method's class declares, and what the class inherits."""

    options: dict[str, Option] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    traffic: str = "1 model down, 1 up"


def read_idea(path: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(_parse(path)) or "").partition("\n")[0]


@cache
def read_classes(path: Path) -> dict[str, Declared]:
    """What each class in a file that derives from Algorithm declares, directly or through another method."""
    inherited = {"Algorithm": Declared(), "MethodWrapper": Declared()}
    classes: dict[str, Declared] = {}
    aliases: dict[str, ast.expr] = {}
    for node in _parse(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fnrfl.algorithms."):
            inherited |= _imported_classes(node, path.parent)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            aliases[node.targets[0].id] = node.value
        elif isinstance(node, ast.ClassDef):
            bases = [inherited[base] for base in map(ast.unparse, node.bases) if base in inherited]
            if bases:
                classes[node.name] = inherited[node.name] = _read_class(node, bases[0], inherited, aliases)
    return classes


def read_needs(node: ast.expr, inherited: dict[str, Declared]) -> frozenset[str]:
    """The set that `frozenset({"features"})` and `FedAvg.needs | {"features"}` stand for."""
    match node:
        case ast.Call(func=ast.Name(id="frozenset"), args=[]):
            return frozenset()
        case ast.Call(func=ast.Name(id="frozenset"), args=[members]):
            return frozenset(ast.literal_eval(members))
        case ast.Set():
            return frozenset(ast.literal_eval(node))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return read_needs(left, inherited) | read_needs(right, inherited)
        case ast.Attribute(value=ast.Name(id=name), attr="needs") if name in inherited:
            return inherited[name].needs
    raise TypeError(f"needs = {ast.unparse(node)} cannot be read from the source; write frozenset({{...}})")


@cache
def _parse(path: Path) -> ast.Module:
    with parser_lock:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imported_classes(node: ast.ImportFrom, folder: Path) -> dict[str, Declared]:
    """The classes of another method that a line imports, by the names that they get."""
    other = folder / f"{(node.module or '').removeprefix('fnrfl.algorithms.').replace('.', '/')}.py"
    classes = read_classes(other) if other.exists() else {}  # a folder has none
    return {alias.asname or alias.name: classes[alias.name] for alias in node.names if alias.name in classes}


def _read_class(
    node: ast.ClassDef, base: Declared, inherited: dict[str, Declared], aliases: dict[str, ast.expr]
) -> Declared:
    """A class's own lines over those of its base."""
    options = {
        line.target.id: _read_option(line.target.id, _read_type(line.annotation, aliases), line.value)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_option(line.value)
    }
    assigned = {ast.unparse(target): value for line in node.body for target, value in _assignments(line)}
    needs = read_needs(assigned["needs"], inherited) if "needs" in assigned else base.needs
    if any(isinstance(line, ast.FunctionDef) and line.name == "needs" for line in node.body):
        needs = frozenset({INNER})
    traffic = ast.literal_eval(assigned["traffic"]) if "traffic" in assigned else base.traffic
    return Declared(base.options | options, needs, traffic)


def _assignments(line: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """(name, value) of a line that gives a value to one name."""
    if isinstance(line, ast.AnnAssign) and line.value is not None:
        return [(line.target, line.value)]
    return [(line.targets[0], line.value)] if isinstance(line, ast.Assign) else []


def _is_option(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "option"


def _read_option(name: str, annotation: Any, call: ast.expr | None) -> Option:
    assert isinstance(call, ast.Call)
    given = dict(zip(("default", "help"), map(ast.literal_eval, call.args), strict=False))
    given |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return Option(name, annotation, given["default"], given["help"], bounds_in(given))


def _read_type(node: ast.expr, aliases: dict[str, ast.expr]) -> Any:
    """The type that an annotation stands for, as far as a config value can have one."""
    match node:
        case ast.Name(id="bool" | "int" | "float" | "str" as name):
            return {"bool": bool, "int": int, "float": float, "str": str}[name]
        case ast.Name(id=name) if name in aliases:
            return _read_type(aliases[name], aliases)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read_type(left, aliases) | _read_type(right, aliases)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return Literal[ast.literal_eval(choices)]
    raise TypeError(
        f"{ast.unparse(node)} cannot be a config value; use bool, int, float, str, Literal or a union of them"
    )
