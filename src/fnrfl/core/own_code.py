"""A user's own code, `module:name`: this file finds its source without running any code.

The question "what would run?" must not run anything. So packages are searched without importing them, and every module
of the user's folder that the named module imports is read too. `own_import.py` lets Python run what was read here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import platform
import re
import site
import stat
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import machinery
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.core.forks import filters_lock, process_lock
from fnrfl.core.parsing import parsed

KEYS = ("model.name", "dataset.name", "public.source", "algorithm.name", "metrics")  # of a config, that may name code
COMPUTING = ("model.name", "algorithm.name", "metrics")  # those whose code decides what comes out of the same data
WITH_OPTIONS = re.compile(r"\s*([^\s()]+)\s*(?:\((.*)\))?\s*", re.DOTALL)  # a model's name: `nets:make(hidden=3)`

# Module names that a file in the user's folder cannot have: they belong to Python and to fnrfl.
RESERVED = sys.stdlib_module_names | set(sys.builtin_module_names) | {"fnrfl"}
LOADERS: tuple[tuple[type, list[str]], ...] = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)

import_lock = process_lock()  # all threads share Python's cache of folders


@dataclass(frozen=True)
class Target:
    """What a config means by `module:name`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class ModuleFile:
    """One module of the user's folder: its file and what is in it, or a folder without `__init__.py`."""

    path: Path
    content: bytes | None  # None: a folder
    package: bool


@dataclass(frozen=True)
class CodeSource:
    """What would run if a module was imported."""

    module: str
    place: str  # in words: the file, or where else it comes from
    sha256: str | None  # None: the module was made in this process, so it cannot be recognised later
    files: Mapping[str, ModuleFile] = field(default_factory=dict)  # by module; of the user's own folder alone


def target(key: str, words: object) -> Target | None:
    """The code that a value of the config names; None for names, paths and whatever else is not imported.

    >>> target("model.name", "pkg.nets:make(hidden=3)")
    Target(module='pkg.nets', name='make')
    >>> [target("dataset.name", words) for words in ("digits", "a/b.csv", "C:/data", "./mod:f", 3)]
    [None, None, None, None, None]
    """
    if not isinstance(words, str):
        return None
    if key == "model.name":
        match = WITH_OPTIONS.fullmatch(words)
        words = match[1] if match else ""
    module, _, name = words.partition(":")
    return Target(module, name) if all(part.isidentifier() for part in (*module.split("."), name)) else None


def each_name(key: str, words: object) -> list[object]:
    """The value of a key; of `metrics`, which may name several functions, each one.

    >>> each_name("metrics", "mine:brier, mine:cost")
    ['mine:brier', 'mine:cost']
    """
    return [part.strip() for part in words.split(",")] if key == "metrics" and isinstance(words, str) else [words]


def named_code(values: Mapping[str, object]) -> Iterator[tuple[str, str, Target]]:
    """The code that values of a config name, by key: (key, its words, what they mean)."""
    for key in KEYS:
        for words in each_name(key, values.get(key)):
            named = target(key, words)
            if named is not None:
                yield key, str(words), named


def source_hashes(values: Mapping[str, object]) -> dict[str, str]:
    """The sha256 of the modules that compute what a run comes to, by name. Loaders of data are known by their data."""
    modules = {named.module for key, _, named in named_code(values) if key in COMPUTING}
    found = {module: find_source(module) for module in sorted(modules)}
    return {module: source.sha256 for module, source in found.items() if source is not None and source.sha256}


# -- finding -----------------------------------------------------------------------------------------------------------


def find_source(module: str) -> CodeSource | None:
    """The source of a module, with nothing imported; None where there is no such module.

    A module of the working folder, or of another folder on the path that nobody installed, comes with the modules of
    that folder which it imports. Of an installed module only its own file counts.
    """
    with import_lock:  # two threads cannot do this at the same time
        importlib.invalidate_caches()  # a file may be newer than Python's cache of its folder
    top, folder = module.partition(".")[0], working_folder()
    here = _spec_in_folder(top, folder) if folder is not None and top != "__main__" else None
    found_elsewhere = python_finds(top) if top != "__main__" else None
    for spec in filter(None, (here, found_elsewhere)):
        root = _folder_of(spec)
        if root is None or top in RESERVED or _is_installed(root):
            source = _installed_source(module, spec)
        else:
            files = _files_with_imports(top, root)
            source = CodeSource(module, str(files[module].path), _sha256(files), files) if module in files else None
        if source is not None:
            return source
    if module in sys.modules:
        return CodeSource(module, f"the module {module}, which was made in this process", None)
    return None


def working_folder() -> Path | None:
    """The folder in which users' modules are looked for; None where it is gone."""
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _spec_in_folder(name: str, folder: Path) -> machinery.ModuleSpec | None:
    """The module called `name` in a folder of the user's, unless Python or another folder on the path has that name."""
    if name in RESERVED:
        return None
    spec = machinery.FileFinder(str(folder), *LOADERS).find_spec(name)
    if spec is None:
        return None
    other = python_finds(name)
    if spec.loader is None:  # a folder without __init__.py; a module of that name anywhere goes before it
        return spec if other is None or other.loader is None else None
    if other is None or other.loader is None or same_file(spec.origin, other.origin):
        return spec
    raise ConfigError(
        f"{name} is a module of yours, {spec.origin}, and another one is installed, {other.origin or 'in Python'}; "
        "both cannot be used in one process. Rename yours."
    )


def shadowed(module: str) -> str:
    """A sentence about a file of the user's that is not used, because its name is taken; empty if there is none."""
    top, folder = module.partition(".")[0], working_folder()
    file = Path(f"{top}.py") if folder is None else folder / f"{top}.py"
    return (
        f" {file} is not used, as Python has a module of that name; rename it."
        if top in RESERVED and file.is_file()
        else ""
    )


def python_finds(name: str, path: Sequence[str] | None = None) -> machinery.ModuleSpec | None:
    """What Python's own finders find for a module; `path` is where the package is, for a module in a package."""
    for finder in sys.meta_path:
        look = getattr(finder, "find_spec", None)
        if look is None or getattr(finder, "serves_own_code", False):
            continue
        spec: machinery.ModuleSpec | None = look(name, path)
        if spec is not None:
            return spec
    return None


def same_file(one: str | None, other: str | None) -> bool:
    """Whether two paths lead to one file."""
    try:
        return one is not None and other is not None and os.path.samefile(one, other)
    except OSError:
        return False


def _folder_of(spec: machinery.ModuleSpec) -> Path | None:
    """The folder in which a module or package lies; None where it lies in none."""
    if spec.submodule_search_locations is not None:
        root = next((Path(place).parent for place in spec.submodule_search_locations), None)
    else:
        root = Path(spec.origin).parent if spec.has_location and spec.origin else None
    return root if root is not None and root.is_dir() else None  # inside a .zip there are no folders


@cache
def _install_folders() -> tuple[str, ...]:
    """Where packages are installed."""
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    named += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__)]
    return tuple({os.path.realpath(place) for place in named})


def _is_installed(root: Path) -> bool:
    real = Path(os.path.realpath(root))
    return any(real.is_relative_to(place) for place in _install_folders())


def _installed_source(module: str, spec: machinery.ModuleSpec) -> CodeSource | None:
    """An installed module, a built-in one, or one in an archive: its own file, without what it imports."""
    name, found = spec.name, spec
    for part in module.split(".")[1:]:
        name = f"{name}.{part}"
        if found.submodule_search_locations is None:
            return None
        inner = python_finds(name, list(found.submodule_search_locations))
        if inner is None:
            return None
        found = inner
    if not found.has_location or not found.origin or not hasattr(found.loader, "get_data"):
        words = f"the module {module}, a part of Python {platform.python_version()}"
        return CodeSource(module, words, hashlib.sha256(words.encode()).hexdigest())
    content: bytes = found.loader.get_data(found.origin)  # type: ignore[union-attr]
    return CodeSource(module, found.origin, _sha256({module: ModuleFile(Path(found.origin), content, False)}))


def _files_with_imports(top: str, root: Path) -> dict[str, ModuleFile]:
    """A module or package of a folder, and those of the same folder that it imports, and that these import."""
    files: dict[str, ModuleFile] = {}
    waiting, seen = [top], {*RESERVED}
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        spec = _spec_in_folder(name, root)
        if spec is None:
            continue
        found = dict(_files(spec, frozenset()))
        files |= found
        for file in found.values():
            if file.path.suffix in machinery.SOURCE_SUFFIXES and file.content is not None:
                waiting += sorted(_imported_names(file.content))
    return files


def _files(spec: machinery.ModuleSpec, above: frozenset[str]) -> Iterator[tuple[str, ModuleFile]]:
    """A module; of a package, all its modules too, whether or not anybody imports them. `above`: folders entered."""
    if spec.submodule_search_locations is None:
        yield spec.name, ModuleFile(Path(str(spec.origin)), read_file(str(spec.origin)), False)
        return
    folder = Path(next(iter(spec.submodule_search_locations)))
    real = os.path.realpath(folder)
    if real in above:  # a symlink to a folder around it
        return
    if spec.loader is None:
        yield spec.name, ModuleFile(folder, None, True)
    else:
        yield spec.name, ModuleFile(Path(str(spec.origin)), read_file(spec.origin), True)
    finder = machinery.FileFinder(str(folder), *LOADERS)
    for stem in sorted({name.partition(".")[0] for name in _names_in(folder)}):
        inner = finder.find_spec(f"{spec.name}.{stem}") if stem.isidentifier() and stem != "__init__" else None
        if inner is not None and stem != "__pycache__":
            yield from _files(inner, above | {real})


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # Python would find nothing in it either
        return []


def read_file(path: str | None) -> bytes:
    """What is in a file, if it is one: a pipe would keep its reader waiting."""
    try:
        handle = os.open(str(path), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError("it is not an ordinary file")
            return file.read()
    except OSError as error:
        raise ConfigError(f"The module {path} cannot be read ({error.strerror or error}).") from error


@lru_cache(maxsize=256)
def _imported_names(content: bytes) -> frozenset[str]:
    """Names of the modules that a source imports anywhere in it, up to their first dot; none if it is no Python."""
    try:
        with filters_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = parsed(lambda: ast.parse(content))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # nothing of it can run either
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names.update(alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                names.add(name)
    return frozenset(name.partition(".")[0] for name in names)


def _sha256(files: Mapping[str, ModuleFile]) -> str:
    """One hash of the names and contents of some modules, wherever their folder is."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = "" if file.content is None else hashlib.sha256(file.content).hexdigest()
        digest.update(f"{name} {''.join(file.path.suffixes)} {file.package} {content}\n".encode())
    return digest.hexdigest()
