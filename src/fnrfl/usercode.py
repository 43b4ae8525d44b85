"""A user's own code, `module:name`, that a config names: what would run, whether it may, and importing it.

What a person types or passes in Python runs. What a *file* names (a recipe, or the config.toml of a run directory) is
refused until its user allows it. The answer is remembered in the user's state folder, for these words and the sha256 of
the named file; at a node its configuration alone decides. The question "what would run?" imports nothing. The named
file is compiled from the very bytes that were hashed; what it imports is Python's business.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import machinery
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from fnrfl.core.errors import ConfigError, ShareableError
from fnrfl.core.words import did_you_mean

KEYS = ("model.name", "dataset.name", "public.source", "algorithm.name", "metrics")  # of a config, that may name code
COMPUTING = ("model.name", "algorithm.name", "metrics")  # those whose code decides what comes out of the same data
WITH_OPTIONS = re.compile(r"\s*([^\s()]+)\s*(?:\((.*)\))?\s*", re.DOTALL)  # a model's name: `nets:make(hidden=3)`
ADDED_BY_TORCH = "torch_dynamo_resume_in_"  # torch.compile puts the rest of a function that it broke into its module

_import_lock = threading.RLock()
_allowed: set[tuple[str, str, str | None]] = set()  # (key, words, sha256), in this process
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
    place: str  # the file, or in words where else it comes from
    content: bytes | None  # None: there is no source, so it cannot be recognised later
    package: bool = False
    folder: str | None = None  # the working folder, if the module lies in it

    @property
    def sha256(self) -> str | None:
        """The sha256 of the file."""
        return None if self.content is None else hashlib.sha256(self.content).hexdigest()


def target(key: str, words: object) -> Target | None:
    """Return the code that a value of the config names; None for names, paths and whatever else is not imported.

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
    """Return the value of a key; of `metrics`, which may name several functions, each one.

    >>> each_name("metrics", "mine:brier, mine:cost")
    ['mine:brier', 'mine:cost']
    """
    return [part.strip() for part in words.split(",")] if key == "metrics" and isinstance(words, str) else [words]


def named_code(values: Mapping[str, object]) -> Iterator[tuple[str, str, Target]]:
    """Yield the code that values of a config name, by key: (key, its words, what they mean)."""
    for key in KEYS:
        for words in each_name(key, values.get(key)):
            if (named := target(key, words)) is not None:
                yield key, str(words), named


def source_hashes(values: Mapping[str, object]) -> dict[str, str]:
    """Return the sha256 of files that compute, by module. Loaders of data are known by their data."""
    modules = {named.module for key, _, named in named_code(values) if key in COMPUTING}
    found = {module: find_source(module) for module in sorted(modules)}
    return {module: source.sha256 for module, source in found.items() if source is not None and source.sha256}


# -- finding, with nothing imported ------------------------------------------------------------------------------------


def find_source(module: str) -> CodeSource | None:
    """Return the source of a module; None where there is no such module."""
    with _import_lock:
        importlib.invalidate_caches()  # a file may be newer than Python's cache of its folder
    top, *inner = module.split(".")
    found, folder = (None, None) if top == "__main__" else _find_top(top)
    for part in inner:
        places = None if found is None else found.submodule_search_locations
        found = None if places is None else machinery.PathFinder.find_spec(part, list(places))
    if found is None or found.loader is None:  # there is nothing to run in a folder without __init__.py
        return CodeSource(module, f"the module {module} of this process", None) if module in sys.modules else None
    if not found.has_location or not found.origin:
        return CodeSource(module, f"the module {module}, a part of Python", None)
    content = _read_source(found) if found.origin.endswith(tuple(machinery.SOURCE_SUFFIXES)) else None
    return CodeSource(module, found.origin, content, found.submodule_search_locations is not None, folder)


def _working_folder() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _find_top(name: str) -> tuple[machinery.ModuleSpec | None, str | None]:
    """Return (a module or package without a dot in its name, the working folder if it lies there)."""
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    elsewhere = next((spec for finder in finders if (spec := finder.find_spec(name, None)) is not None), None)
    folder = _working_folder()
    here = None if folder is None else machinery.PathFinder.find_spec(name, [str(folder)])
    if here is None or (here.loader is None and elsewhere is not None):  # a folder of that name is no module
        return elsewhere, None
    if elsewhere is None or elsewhere.loader is None or _same_file(here.origin, elsewhere.origin):
        return here, str(folder)
    raise ConfigError(
        f"{name} is a module of yours, {here.origin}, and another one is installed, {elsewhere.origin or 'in Python'}; "
        "both cannot be used in one process. Rename yours."
    )


def _same_file(one: str | None, other: str | None) -> bool:
    try:
        return one is not None and other is not None and os.path.samefile(one, other)
    except OSError:
        return False


def _read_source(spec: machinery.ModuleSpec) -> bytes:
    """Return the content of a plain file (a pipe would keep its reader waiting), or of a file in an archive."""
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


# -- allowing ----------------------------------------------------------------------------------------------------------


def check_allowed(
    found: Mapping[str, object],
    typed: Mapping[str, object],
    *,
    origin: str,
    trust: bool,
    listed: Collection[str] | None = None,
) -> None:
    """Raise if the file `origin` names code that nobody has allowed.

    `found` are values of the file, and `typed` those that the user typed or passed in, by key: these are allowed, and
    with `trust` the others are too. At a node, code that its configuration has `listed` is allowed and no other,
    whatever its user has allowed elsewhere.
    """
    for key, words, named in named_code(typed):
        _allow(key, words, find_source(named.module), remember=listed is None)
    refused = []
    for key, words, named in named_code(found):
        if listed is not None and str(named) not in listed:
            raise ShareableError("The recipe names code that the node's configuration does not list. It was refused.")
        source = find_source(named.module)
        if trust or listed is not None or (source is not None and _is_allowed(key, words, source)):
            _allow(key, words, source, remember=listed is None)
        else:
            place = f"in {source.place}" if source else f"of a module {named.module}, which is not found here"
            shown = json.dumps(words, ensure_ascii=False)
            refused.append(f"{key} = {shown} in {origin} would run code: {named.name} {place}.")
    if refused:
        raise ConfigError(f"{' '.join(refused)} If you trust it, give --trust (trust=True in Python).")


def allow(key: str, words: str) -> None:
    """Allow what a user has typed or passed in as the value of a key, if it is code."""
    check_allowed({}, {key: words}, origin="", trust=False)


def _allow(key: str, words: str, source: CodeSource | None, *, remember: bool) -> None:
    if source is None:  # there is nothing that could run; the importer says so
        return
    _allowed.add((key, words, source.sha256))
    path = _permission(key, words, source.sha256)
    if path is None or not remember or _is_the_users(path, path.parent):
        return
    date = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"key": key, "words": words, "file": source.place, "sha256": source.sha256, "date": date}
    with suppress(OSError):  # then the answer lasts as long as the process
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.is_symlink():
            return
        path.unlink(missing_ok=True)  # a link that stood there is not written through
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(entry, indent=1) + "\n")


def _is_allowed(key: str, words: str, source: CodeSource) -> bool:
    path = _permission(key, words, source.sha256)
    return (key, words, source.sha256) in _allowed or (path is not None and _is_the_users(path, path.parent))


def _permission(key: str, words: str, sha256: str | None) -> Path | None:
    """Return the file that remembers an answer, named by hashes; None without source or a place for such files."""
    chosen, base = os.environ.get("FNRFL_STATE"), os.environ.get("XDG_STATE_HOME", "")
    home = os.path.expanduser("~") if os.environ.get("HOME", "~") else ""
    base = base if os.path.isabs(base) else os.path.join(home, ".local", "state")
    state = os.path.abspath(chosen) if chosen else os.path.join(base, "fnrfl")
    asked = hashlib.sha256(f"{key}\n{words}".encode("utf-8", "surrogatepass")).hexdigest()
    return Path(state, "trusted", f"{asked[:32]}-{sha256}.json") if sha256 and os.path.isabs(state) else None


def _is_the_users(*paths: Path) -> bool:
    """Return whether nobody but the user can have made or changed files or folders; links do not count."""
    with suppress(OSError):
        found = [path.lstat() for path in paths]
        mine = not hasattr(os, "getuid") or all(one.st_uid == os.getuid() and not one.st_mode & 0o022 for one in found)
        return mine and not any(stat.S_ISLNK(one.st_mode) for one in found)
    return False


# -- importing ---------------------------------------------------------------------------------------------------------


def fetch(what: str, named: Target | None) -> object:
    """Return the function or class that a config names, imported from the source that was allowed.

    `what` begins the sentences about it: `model.name = "nets:make"`.
    """
    folder = _working_folder()
    places = f"a module {'of the installed packages' if folder is None else f'in {folder} or an installed package'}"
    if named is None:
        raise ConfigError(f"{what} cannot be imported: it must be module:name, with {places}.")
    source = find_source(named.module)
    if source is None:
        raise ConfigError(
            f"{what} cannot be imported (ModuleNotFoundError: No module named {named.module!r}); "
            f"{named.module!r} must be {places}."
        )
    known = {sha256 for key, words, sha256 in tuple(_allowed) if target(key, words) == named}
    if source.sha256 not in known:
        raise ConfigError(
            f"{what} would run code, {named.name} in {source.place}, "
            + ("which has changed since it was allowed" if known else "which nobody has allowed")
            + ". If you trust it, load the config again, or call fnrfl.usercode.allow(key, words) before."
        )
    with errors_in_words(f"{what} cannot be imported", f"{named.module!r} must be {places}. Check its code."):
        module = import_source(source)
    missing = object()
    with errors_in_words(f"{what} cannot be imported", "Check its code."):
        found = getattr(module, named.name, missing)
    if found is missing:
        hint = did_you_mean(named.name, vars(module))
        raise ConfigError(f"{what}: module {named.module!r} has no {named.name!r}.{hint} Name something in it.")
    return found


class _SourceLoader(machinery.SourceFileLoader):
    """Compile the source that was read, and neither read nor write bytecode."""

    def __init__(self, source: CodeSource) -> None:
        super().__init__(source.module, source.place)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source.content or b"", self.path, "exec", dont_inherit=True)


def import_source(source: CodeSource) -> ModuleType:
    """Import a module as it was read; one that was imported from other source is imported anew.

    A module that the program itself has imported stays as it is; if it is another one than was read, that is refused.
    One that only the package around it has imported, perhaps from bytecode, is executed from its source. Meanwhile its
    folder is the last place in which Python looks for what it imports.
    """
    _imported_files.add(source.place)
    folder = os.path.join(source.folder or "", "")  # with a slash: nobody else's entry
    with _import_lock:
        if folder:
            sys.path.append(folder)
        try:
            if source.content is None:
                return importlib.import_module(source.module)
            return _import_content(source)
        finally:
            if folder:
                with suppress(ValueError):  # the module has removed it
                    sys.path.remove(folder)


def _import_content(source: CodeSource) -> ModuleType:
    module = sys.modules.get(source.module)
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if module is not None and not (isinstance(loader, _SourceLoader) and loader.source != source):
        if not isinstance(loader, _SourceLoader) and source.folder is not None:
            _check_current(module, source)
        return module
    above, _, name = source.module.rpartition(".")
    package = importlib.import_module(above) if above else None
    if source.folder is None and source.module in sys.modules:  # an installed package has imported it
        return sys.modules[source.module]
    inside = [str(Path(source.place).parent)] if source.package else None
    spec = spec_from_file_location(
        source.module, source.place, loader=_SourceLoader(source), submodule_search_locations=inside
    )
    assert spec is not None and spec.loader is not None
    sys.modules[source.module] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(source.module, None)
        raise
    if package is not None:
        setattr(package, name, module)
    return sys.modules[source.module]


def _check_current(module: ModuleType, source: CodeSource) -> None:
    """Raise if a module that others have imported is not the one that was read."""
    origin = getattr(module, "__file__", None)
    if not _same_file(origin, source.place):
        why = f"is already imported from {origin or 'elsewhere'}, and not from {source.place}"
    elif not _is_current(module, source):
        why = f"was imported before {source.place} was changed"
    else:
        return
    raise ConfigError(
        f"The module {source.module} {why}. Start a new process, rename one of them, or call "
        f"importlib.reload({source.module})."
    )


def _is_current(module: ModuleType, source: CodeSource) -> bool:
    """Return whether the functions and methods of a module are those that its file has now."""
    try:
        now = set(_codes(_SourceLoader(source).get_code(source.module)))
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


# -- errors ------------------------------------------------------------------------------------------------------------


@contextmanager
def errors_in_words(what: str, way_out: str) -> Iterator[None]:
    """Turn whatever goes wrong in a user's code, `sys.exit` included, into a sentence."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        place = where(error)
        said = f"SystemExit: {error.code}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} ({said}{f'; {place}' if place else ''}); {way_out}") from error


def where(error: BaseException) -> str | None:
    """Return where in a named file an error came up: "nets.py, line 12, in forward"; None if it did elsewhere."""
    trace, place = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in _imported_files:
            place = f"{Path(code.co_filename).name}, line {trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    return place
