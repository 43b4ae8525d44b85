"""What there is, by name, without importing it: the source of `fnrfl list`, of checks on names and of every hint.

Methods are read from their files as text, so that a typo or `--help` does not have to wait for torch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_type_hints

from fnrfl.core import own_code, trust
from fnrfl.core.errors import ConfigError

if TYPE_CHECKING:
    from fnrfl.core.algorithm import Algorithm

Value: TypeAlias = bool | int | float | str

FOLDER = Path(__file__).parent.parent

MODELS = {
    "resnet18": "ResNet-18 with the CIFAR stem; resnet18(head=1000) has the paper's 1000 outputs",
    "vgg11": "VGG-11 without normalisation, for 32x32 images",
    "simple-cnn": "NIID-Bench's small net: two 5x5 convolutions and three linear layers",
    "cnn": "two 3x3 convolutions and one linear layer; cnn(norm=batch) has BatchNorm",
    "mlp": "linear layers with ReLU; mlp(hidden=128, depth=2, norm=batch) chooses width, depth and BatchNorm",
}
DATASETS = {
    "digits": "1,797 handwritten digits of 8x8 pixels, part of the package",
    "fashion-mnist": "70,000 grey images of clothes, 28x28 pixels",
    "cifar10": "60,000 colour images of ten things, 32x32 pixels",
}
DATASET_FORMS = {
    "file.npz": "your arrays: x_train, y_train, x_test, y_test, or x, y",
    "file.csv": "your table with a label column",
    "folder/": "your images, one folder per class",
    "module:function": "your function that returns the data",
}
PENALTIES = {
    "relative": "squared gap between class norm and target, in units of the target",
    "squared": "squared gap",
    "absolute": "absolute gap",
    "huber": "squared near the target, absolute far from it",
    "per-sample": "squared gap of every example's norm",
    "log-ratio": "squared logarithm of norm over target",
    "literal": "the paper's signed sum, read to first order; for study only",
    "constant": "the released code's: a number without gradient (a leak switch)",
}
ENGINES = {
    "auto": "a fixed rule of model, device and cohort",
    "loop": "one client after another: the reference",
    "batched": "clients of a cohort in vectorised steps, sixteen at a time",
    "gpu": "the same on an NVIDIA GPU, with captured steps",
}
INNER = "as its inner method"  # in the place of needs that are a property, of a method that goes around another
LATER_ENGINES = ("ray", "flower")


@dataclass(frozen=True)
class Field:
    """One hyper-parameter of a method: what may be set, within which bounds, and what it means."""

    name: str
    type: Any
    default: Value
    help: str
    bounds: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Entry:
    """What can be known about a method from its file alone."""

    name: str
    idea: str
    module: str
    class_name: str
    fields: tuple[Field, ...]
    needs: tuple[str, ...]
    traffic: str


@dataclass(frozen=True)
class Declared:
    """What the body of a method's class says, and what it inherits."""

    fields: dict[str, Field] = dataclasses.field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    traffic: str = "1 model down, 1 up"


def algorithms() -> dict[str, str]:
    """Names of the methods and the idea of each; FNR is not one of them, since it wraps any of them."""
    return {entry.name: entry.idea for entry in methods()}


def methods() -> tuple[Entry, ...]:
    """The methods, with what each needs and sends."""
    return tuple(_method(name) for name in _names() if name != "fnr")


def scenarios() -> dict[str, str]:
    """What a scenario can be made of, as it is typed, and the meaning of each part."""
    from fnrfl.data.scenarios import describe

    return describe()


def recipes() -> dict[str, str]:
    """Names of the packaged recipes and the comment that each opens with."""
    return {p.stem: _first_line(p).lstrip("# ") for p in sorted((FOLDER / "config" / "recipes").glob("*.toml"))}


def fields(name: str) -> tuple[Field, ...]:
    """The hyper-parameters of a method; those of "fnr" are the [fnr] section."""
    return _fields_of(_import(name)) if ":" in name else _method(name).fields


def load(name: str) -> type[Algorithm]:
    """The class of a method, its own ("scaffold", "fnr") or a user's ("my_pkg.method:MyMethod"); imports it."""
    if ":" in name:
        return _import(name)
    method = _method(name)
    found: type[Algorithm] = getattr(importlib.import_module(method.module), method.class_name)
    return found


def nearest(word: str, among: Iterable[str]) -> str | None:
    """The entry that somebody who typed `word` most likely meant."""
    return next(iter(difflib.get_close_matches(word, list(among), n=1)), None)


def hint(word: str, among: Iterable[str]) -> str:
    """What somebody who typed the unknown name `word` could type instead."""
    known = list(among)
    meant = nearest(word, known)
    return (f"Did you mean {meant}? " if meant else "") + "Choose one of " + ", ".join(known)


def _first_line(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0]


def _names() -> list[str]:
    return sorted(p.stem.replace("_", "-") for p in (FOLDER / "algorithms").glob("*.py") if p.stem[0] != "_")


def _method(name: str) -> Entry:
    if name not in _names():
        among = [known for known in _names() if known != "fnr"]
        raise ConfigError(
            f'algorithm.name = "{name}" is not known. {hint(name, among)}, or "module:Class" of your own.'
        )
    return _read(FOLDER / "algorithms" / f"{name.replace('-', '_')}.py")


@cache
def _read(path: Path) -> Entry:
    """A method as its file declares it; the last class that derives from Algorithm is the method."""
    classes = _classes(path)
    if not classes:
        raise TypeError(f"{path} declares no class that derives from Algorithm")
    name, found = list(classes.items())[-1]
    idea = (ast.get_docstring(_parse(path)) or "").partition("\n")[0]
    fields, needs = tuple(found.fields.values()), tuple(sorted(found.needs))
    return Entry(path.stem.replace("_", "-"), idea, f"fnrfl.algorithms.{path.stem}", name, fields, needs, found.traffic)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def _classes(path: Path) -> dict[str, Declared]:
    """What each class in a file that derives from Algorithm declares, directly or through another method."""
    inherited = {"Algorithm": Declared(), "MethodWrapper": Declared()}
    found: dict[str, Declared] = {}
    aliases: dict[str, ast.expr] = {}
    for node in _parse(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fnrfl.algorithms."):
            other = path.parent / f"{(node.module or '').removeprefix('fnrfl.algorithms.').replace('.', '/')}.py"
            theirs = _classes(other) if other.exists() else {}  # a folder has none
            inherited |= {a.asname or a.name: theirs[a.name] for a in node.names if a.name in theirs}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            aliases[node.targets[0].id] = node.value
        elif isinstance(node, ast.ClassDef):
            bases = [inherited[base] for base in map(ast.unparse, node.bases) if base in inherited]
            if bases:
                found[node.name] = inherited[node.name] = _declared(node, bases[0], inherited, aliases)
    return found


def _declared(
    node: ast.ClassDef, base: Declared, inherited: dict[str, Declared], aliases: dict[str, ast.expr]
) -> Declared:
    """A class's own lines over those of its base."""
    own = {
        line.target.id: _field(line.target.id, _type(line.annotation, aliases), line.value)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and _is_option(line.value)
    }
    said = {ast.unparse(target): value for line in node.body for target, value in _assigned(line)}
    needs = _needs(said["needs"], inherited) if "needs" in said else base.needs
    if any(isinstance(line, ast.FunctionDef) and line.name == "needs" for line in node.body):
        needs = frozenset({INNER})
    return Declared(
        base.fields | own,
        needs,
        ast.literal_eval(said["traffic"]) if "traffic" in said else base.traffic,
    )


def _assigned(line: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """(name, value) of a line that gives a value to one name."""
    if isinstance(line, ast.AnnAssign) and line.value is not None:
        return [(line.target, line.value)]
    return [(line.targets[0], line.value)] if isinstance(line, ast.Assign) else []


def _needs(node: ast.expr, inherited: dict[str, Declared]) -> frozenset[str]:
    """The set that `frozenset({"features"})` and `FedAvg.needs | {"features"}` stand for."""
    match node:
        case ast.Call(func=ast.Name(id="frozenset"), args=[]):
            return frozenset()
        case ast.Call(func=ast.Name(id="frozenset"), args=[given]):
            return frozenset(ast.literal_eval(given))
        case ast.Set():
            return frozenset(ast.literal_eval(node))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _needs(left, inherited) | _needs(right, inherited)
        case ast.Attribute(value=ast.Name(id=name), attr="needs") if name in inherited:
            return inherited[name].needs
    raise TypeError(f"needs = {ast.unparse(node)} cannot be read from the source; write frozenset({{...}})")


def _is_option(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "option"


def _field(name: str, annotation: Any, call: ast.expr | None) -> Field:
    assert isinstance(call, ast.Call)
    given = dict(zip(("default", "help"), map(ast.literal_eval, call.args), strict=False))
    given |= {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return Field(name, annotation, given.pop("default"), given.pop("help"), _bounds(given))


def _bounds(given: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    return tuple((k, given[k]) for k in ("ge", "gt", "le", "lt") if given.get(k) is not None)


def _type(node: ast.expr, aliases: dict[str, ast.expr]) -> Any:
    """The type that an annotation stands for, as far as a config value can have one."""
    match node:
        case ast.Name(id="bool" | "int" | "float" | "str" as name):
            return {"bool": bool, "int": int, "float": float, "str": str}[name]
        case ast.Name(id=name) if name in aliases:
            return _type(aliases[name], aliases)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type(left, aliases) | _type(right, aliases)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            return Literal[ast.literal_eval(choices)]
    raise TypeError(
        f"{ast.unparse(node)} cannot be a config value; use bool, int, float, str, Literal or a union of them"
    )


def _fields_of(cls: type[Algorithm]) -> tuple[Field, ...]:
    """The same from a class that is already imported."""
    with trust.in_words(f"The fields of {cls.__module__}:{cls.__name__} cannot be read", "correct their types."):
        types = get_type_hints(cls)
    return tuple(
        Field(f.name, types[f.name], cast(Value, f.default), f.metadata["help"], _bounds(dict(f.metadata)))
        for f in dataclasses.fields(cls)
        if "help" in f.metadata
    )


def _import(target: str) -> type[Algorithm]:
    """A user's class, found in the working folder or on the path."""
    found = trust.fetch(f'algorithm.name = "{target}"', own_code.target("algorithm.name", target))
    from fnrfl.core.algorithm import Algorithm

    if not (isinstance(found, type) and issubclass(found, Algorithm) and dataclasses.is_dataclass(found)):
        raise ConfigError(f'algorithm.name = "{target}" must be a dataclass that derives from fnrfl\'s Algorithm.')
    return found
