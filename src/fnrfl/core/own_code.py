"""A user's own code, `module:name`: this file finds its source without running any code, and imports it.

The question "what would run?" must not run anything, so packages are searched without importing them. The named file is
compiled from the very bytes that were hashed, not from bytecode beside it. Python finds what it imports, in the working
folder too; nothing else of that folder is ever imported.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import machinery
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from fnrfl.core.errors import ConfigError
from fnrfl.core.forks import process_lock

KEYS = ("model.name", "dataset.name", "public.source", "algorithm.name", "metrics")  # of a config, that may name code
COMPUTING = ("model.name", "algorithm.name", "metrics")  # those whose code decides what comes out of the same data
WITH_OPTIONS = re.compile(r"\s*([^\s()]+)\s*(?:\((.*)\))?\s*", re.DOTALL)  # a model's name: `nets:make(hidden=3)`
ADDED_BY_TORCH = "torch_dynamo_resume_in_"  # torch.compile puts the rest of a function that it broke into its module

import_lock = process_lock()  # all threads share Python's cache of folders
_imported_files: set[str] = set()  # the sources that were imported here


@dataclass(frozen=True)
class Target:
    """What a config means by `module:name`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class CodeSource:
    """The file that would run if a module was imported."""

    module: str
    place: str  # in words: the file, or where else it comes from
    content: bytes | None  # None: there is no source, so it cannot be recognised later
    package: bool = False
    folder: str | None = None  # the working folder, if the module lies in it

    @property
    def sha256(self) -> str | None:
        """The sha256 of the file."""
        return None if self.content is None else hashlib.sha256(self.content).hexdigest()


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
    """The sha256 of the files that compute what a run comes to, by module. Loaders of data are known by their data."""
    modules = {named.module for key, _, named in named_code(values) if key in COMPUTING}
    found = {module: find_source(module) for module in sorted(modules)}
    return {module: source.sha256 for module, source in found.items() if source is not None and source.sha256}


# -- finding -----------------------------------------------------------------------------------------------------------


def find_source(module: str) -> CodeSource | None:
    """The source of a module, with nothing imported; None where there is no such module."""
    with import_lock:  # two threads cannot do this at the same time
        importlib.invalidate_caches()  # a file may be newer than Python's cache of its folder
    top, *inner = module.split(".")
    found, folder = (None, None) if top == "__main__" else _find_top(top)
    for part in inner:
        places = None if found is None else found.submodule_search_locations
        found = None if places is None else machinery.PathFinder.find_spec(part, list(places))
    if found is None or found.loader is None:  # there is nothing to run in a folder without __init__.py
        made_here = f"the module {module}, which was made in this process"
        return CodeSource(module, made_here, None) if module in sys.modules else None
    if not found.has_location or not found.origin:
        return CodeSource(module, f"the module {module}, a part of Python {platform.python_version()}", None)
    content = _read_source(found) if found.origin.endswith(tuple(machinery.SOURCE_SUFFIXES)) else None
    return CodeSource(module, found.origin, content, found.submodule_search_locations is not None, folder)


def working_folder() -> Path | None:
    """The folder in which users' modules are looked for; None where it is gone."""
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _find_top(name: str) -> tuple[machinery.ModuleSpec | None, str | None]:
    """A module or package without a dot in its name, and the working folder, if it lies there."""
    elsewhere, folder = _python_finds(name), working_folder()
    here = None if folder is None else machinery.PathFinder.find_spec(name, [str(folder)])
    if here is None or (here.loader is None and elsewhere is not None):  # a folder of that name is no module
        return elsewhere, None
    if elsewhere is None or elsewhere.loader is None or _same_file(here.origin, elsewhere.origin):
        return here, str(folder)
    raise ConfigError(
        f"{name} is a module of yours, {here.origin}, and another one is installed, {elsewhere.origin or 'in Python'}; "
        "both cannot be used in one process. Rename yours."
    )


def _python_finds(name: str) -> machinery.ModuleSpec | None:
    """The module or package of this name that Python would import."""
    for finder in sys.meta_path:
        if not isinstance(finder, _NamedFileFinder) and (look := getattr(finder, "find_spec", None)) is not None:
            spec: machinery.ModuleSpec | None = look(name, None)
            if spec is not None:
                return spec
    return None


def _same_file(one: str | None, other: str | None) -> bool:
    try:
        return one is not None and other is not None and os.path.samefile(one, other)
    except OSError:
        return False


def _read_source(spec: machinery.ModuleSpec) -> bytes:
    """The content of a plain file (a pipe would keep its reader waiting), or of a file in an archive."""
    path = str(spec.origin)
    try:
        if not os.path.lexists(path) and hasattr(spec.loader, "get_data"):
            return bytes(spec.loader.get_data(path))  # type: ignore[union-attr]
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError("it is not an ordinary file")
            return file.read()
    except OSError as error:
        raise ConfigError(f"The module {path} cannot be read ({error.strerror or error}).") from error


# -- importing ---------------------------------------------------------------------------------------------------------


class _NamedFileLoader(machinery.SourceFileLoader):
    """Executes the source that was read, and neither reads nor writes bytecode."""

    def __init__(self, source: CodeSource) -> None:
        super().__init__(source.module, source.place)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source.content or b"", self.path, "exec", dont_inherit=True)


class _NamedFileFinder:
    """Lets Python import one module as it was read."""

    def __init__(self, source: CodeSource) -> None:
        self.source = source

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        if name != self.source.module or self.source.content is None:
            return None
        inside = [str(Path(self.source.place).parent)] if self.source.package else None
        return spec_from_file_location(
            name, self.source.place, loader=_NamedFileLoader(self.source), submodule_search_locations=inside
        )


def import_source(source: CodeSource) -> ModuleType:
    """Import a module as it was read; one that was imported from other source is imported anew.

    A module that the program has imported itself stays as it is, as always in Python; if it is another one than was
    read, that is refused.
    """
    _imported_files.add(source.place)
    if source.content is not None:
        _forget_other(source)
    with _findable(source):
        return importlib.import_module(source.module)


@contextmanager
def _findable(source: CodeSource) -> Iterator[None]:
    """Inside, Python finds a module as it was read, and looks last in its folder for what it imports."""
    finder, place = _NamedFileFinder(source), os.path.join(source.folder or "", "")  # with a slash: nobody else's entry
    sys.meta_path.insert(0, finder)
    if place:
        sys.path.append(place)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if place:
            with suppress(ValueError):  # the module has removed it
                sys.path.remove(place)


def _forget_other(source: CodeSource) -> None:
    """Drop a module that was imported here from other source; refuse one that the program has imported from other."""
    module = sys.modules.get(source.module)
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if isinstance(loader, _NamedFileLoader):
        if loader.source != source:
            sys.modules.pop(source.module, None)
    elif module is not None and source.folder is not None:
        origin = getattr(module, "__file__", None)
        if not _same_file(origin, source.place):
            why = f"is already imported from {origin or 'elsewhere'}, and not from {source.place}"
        elif type(loader) is machinery.SourceFileLoader and not _is_current(module, source):
            why = f"was imported before {source.place} was changed"
        else:
            return
        raise ConfigError(
            f"The module {source.module} {why}. Start a new process, rename one of them, or call "
            f"importlib.reload({source.module})."
        )


def _is_current(module: ModuleType, source: CodeSource) -> bool:
    """Whether the functions and methods of a module are those that its file has now."""
    try:
        now = set(_codes(_NamedFileLoader(source).get_code(source.module)))
    except (SyntaxError, ValueError):
        return False
    members = list(vars(module).values())
    members += [m for c in members if isinstance(c, type) and c.__module__ == module.__name__ for m in vars(c).values()]
    functions = (getattr(member, "__func__", member) for member in members)
    codes = (function.__code__ for function in functions if isinstance(function, FunctionType))
    here = (code for code in codes if _same_file(code.co_filename, source.place))
    return all(code in now for code in here if not code.co_name.startswith(ADDED_BY_TORCH))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def blame(error: BaseException) -> str | None:
    """Where in a named file an error came up: "nets.py, line 12, in forward"; None if it came up in other code."""
    trace, place = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in _imported_files:
            place = f"{Path(code.co_filename).name}, line {trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    return place
