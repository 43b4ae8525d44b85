"""What the classes of a method's file declare, read from the source as text: nothing is imported, so nobody waits."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from fnrfl.core.options import Option, option, options_of
from fnrfl.process import parser_lock

INNER = "as its inner method"  # in the place of needs that are a property, of a method that goes around another
METHODS = "fnrfl.algorithms."
KNOWN = {word.__name__: word for word in (bool, int, float, str, frozenset, option)}  # that a declaration may use


@dataclass(frozen=True)
class Entry:
    """What can be known about a method from its file alone."""

    name: str
    idea: str  # the first line of the file
    module: str
    class_name: str
    options: tuple[Option, ...]
    needs: tuple[str, ...]
    traffic: str


@dataclass
class _Algorithm:
    """Stands in for the base of all methods."""

    needs: ClassVar[frozenset[str]] = frozenset()
    traffic: ClassVar[str] = "1 model down, 1 up"


@cache
def read_entry(path: Path) -> Entry:
    """Read a method as its file declares it; the last class that derives from Algorithm is the method."""
    classes = _read_classes(path)
    if not classes:
        raise TypeError(f"{path} declares no class that derives from Algorithm")
    class_name, found = list(classes.items())[-1]
    idea = (ast.get_docstring(_parse(path)) or "").partition("\n")[0]
    name, needs = path.stem.replace("_", "-"), tuple(sorted(found.needs))
    return Entry(name, idea, METHODS + path.stem, class_name, options_of(found), needs, found.traffic)


@cache
def _parse(path: Path) -> ast.Module:
    with parser_lock:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def _read_classes(path: Path) -> dict[str, type[_Algorithm]]:
    """Return a stand-in for each class of a file that derives from Algorithm, directly or through another method."""
    classes: dict[str, type[_Algorithm]] = {}
    methods: dict[str, type[_Algorithm]] = {"Algorithm": _Algorithm, "MethodWrapper": _Algorithm}
    types: dict[str, Any] = dict(KNOWN)
    for node in _parse(path).body:
        match node:
            case ast.ImportFrom(module=str(module)) if module.startswith(METHODS):
                other = path.parent / f"{module.removeprefix(METHODS).replace('.', '/')}.py"
                there = _read_classes(other) if other.exists() else {}  # a folder has none
                methods |= {one.asname or one.name: there[one.name] for one in node.names if one.name in there}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript(value=ast.Name(id="Literal"))):
                types[name] = _evaluate(node.value, types)
            case ast.ClassDef(name=name):
                bases = [methods[base] for base in map(ast.unparse, node.bases) if base in methods]
                if bases:
                    classes[name] = methods[name] = _stand_in(node, bases[0], types | methods)
    return classes


def _stand_in(node: ast.ClassDef, base: type[_Algorithm], names: Mapping[str, Any]) -> type[_Algorithm]:
    """Build a class with the options, needs and traffic that the body of a method's class declares."""
    options: list[tuple[str, Any, Any]] = []
    declared: dict[str, Any] = {}
    for line in node.body:
        match line:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=ast.Name(id="option")) as call):
                options.append((name, _evaluate(line.annotation, names), _evaluate(call, names)))
            case (
                ast.Assign(targets=[ast.Name(id="needs" | "traffic" as name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id="needs" | "traffic" as name), value=ast.expr() as value)
            ):
                declared[name] = _evaluate(value, names)
            case ast.FunctionDef(name="needs"):
                declared["needs"] = frozenset({INNER})
    return make_dataclass(node.name, options, bases=(base,), namespace=declared)


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return what an expression of a declaration stands for: literals, known names, `|`, calls and Literal[...]."""
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Attribute(value=ast.Name(id=name), attr="needs") if name in names:
            return names[name].needs
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _evaluate(left, names) | _evaluate(right, names)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return Literal[ast.literal_eval(choices)]
        case ast.Call(func=ast.Name(id="option" | "frozenset" as name), args=arguments, keywords=keywords):
            named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
            return names[name](*map(ast.literal_eval, arguments), **named)
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        known = "literals, Literal, bool, int, float, str, frozenset({...}) and unions of them"
        raise TypeError(f"{ast.unparse(node)} cannot be read from the source; use {known}") from error
