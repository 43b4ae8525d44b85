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
from fnrfl.core.options import WITH_OPTIONS
from fnrfl.core.words import did_you_mean

KEYS = ("model.name", "dataset.name", "public.source", "algorithm.name", "metrics")  # of a config, that may name code
COMPUTING = ("model.name", "algorithm.name", "metrics")  # those whose code decides what comes out of the same data

ADDED_BY_TORCH = "torch_dynamo_resume_in_"  # torch.compile puts the rest of a function that it broke into its module
_MISSING = object()
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
    folder: str | None = None  # the working folder, if the module lies in it

    @property
    def sha256(self) -> str | None:
        """The sha256 of the file."""
        return None if self.content is None else hashlib.sha256(self.content).hexdigest()


def target(key: str, words: object) -> Target | None:
    """Return the code that a value of the config names; None for names, paths and whatever else is not imported."""
    if not isinstance(words, str):
        return None
    if key == "model.name":
        match = WITH_OPTIONS.fullmatch(words)
        words = match[1] if match else ""
    module, _, name = words.partition(":")
    return Target(module, name) if all(part.isidentifier() for part in (*module.split("."), name)) else None


def each_name(key: str, words: object) -> list[object]:
    """Return the value of a key; of `metrics`, which may name several functions ("mine:brier, mine:cost"), each one."""
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
        places = found and found.submodule_search_locations
        found = machinery.PathFinder.find_spec(part, list(places)) if places else None
    if found is None or found.loader is None:  # there is nothing to run in a folder without __init__.py
        return CodeSource(module, f"the module {module} of this process", None) if module in sys.modules else None
    if not found.has_location or not found.origin:
        return CodeSource(module, f"the module {module}, a part of Python", None)
    content = None
    if found.origin.endswith(tuple(machinery.SOURCE_SUFFIXES)):
        try:
            content = bytes(found.loader.get_data(found.origin))  # type: ignore[attr-defined]
        except OSError as error:
            raise ConfigError(f"The module {found.origin} cannot be read ({error.strerror or error}).") from error
    return CodeSource(module, found.origin, content, folder)


def _find_top(name: str) -> tuple[machinery.ModuleSpec | None, str | None]:
    """Return (a module or package without a dot in its name, the working folder if it lies there)."""
    elsewhere = next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, None)) is not None), None)
    folder = os.getcwd()
    here = machinery.PathFinder.find_spec(name, [folder])
    if here is None or (here.loader is None and elsewhere is not None):  # a folder of that name is no module
        return elsewhere, None
    if elsewhere is None or elsewhere.loader is None or _is_one_file(here.origin, elsewhere.origin):
        return here, folder
    raise ConfigError(
        f"{name} is a module of yours, {here.origin}, and another one is installed, {elsewhere.origin or 'in Python'}; "
        "both cannot be used in one process. Rename yours."
    )


def _is_one_file(*places: str | None) -> bool:
    return None not in places and len({os.path.realpath(str(place)) for place in places}) == 1


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
    refused, remember = [], listed is None
    for key, words, named in named_code(typed):
        _allow(key, words, find_source(named.module), remember)
    for key, words, named in named_code(found):
        if listed is not None and str(named) not in listed:
            raise ShareableError("The recipe names code that the node's configuration does not list. It was refused.")
        source = find_source(named.module)
        if trust or listed is not None or (source and _is_allowed(key, words, source.sha256)):
            _allow(key, words, source, remember)
        else:
            place = f"in {source.place}" if source else f"of a module {named.module}, which is not found here"
            shown = json.dumps(words, ensure_ascii=False)
            refused.append(f"{key} = {shown} in {origin} would run code: {named.name} {place}.")
    if refused:
        raise ConfigError(f"{' '.join(refused)} If you trust it, give --trust (trust=True in Python).")


def allow(key: str, words: str) -> None:
    """Allow what a user has typed or passed in as the value of a key, if it is code."""
    check_allowed({}, {key: words}, origin="", trust=False)


def _allow(key: str, words: str, source: CodeSource | None, remember: bool) -> None:
    if source is None:  # there is nothing that could run; the importer says so
        return
    _allowed.add((key, words, source.sha256))
    path = _permission(key, words, source.sha256)
    if path is None or not remember or _is_the_users(path):
        return
    date = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"key": key, "words": words, "file": source.place, "sha256": source.sha256, "date": date}
    with suppress(OSError):  # then the answer lasts as long as the process
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.parent.is_symlink():
            path.unlink(missing_ok=True)  # a link that stood there is not written through
            path.touch(mode=0o600, exist_ok=False)
            path.write_text(json.dumps(entry, indent=1) + "\n")


def _is_allowed(key: str, words: str, sha256: str | None) -> bool:
    path = _permission(key, words, sha256)
    return (key, words, sha256) in _allowed or (path is not None and _is_the_users(path))


def _permission(key: str, words: str, sha256: str | None) -> Path | None:
    """Return the file that remembers an answer, named by hashes; None without source or a place for such files."""
    home = os.environ.get("HOME", "~") and os.path.expanduser("~/.local/state")
    base = os.environ.get("XDG_STATE_HOME", "")
    chosen = os.environ.get("FNRFL_STATE")
    state = os.path.abspath(chosen) if chosen else os.path.join(base if os.path.isabs(base) else home, "fnrfl")
    asked = hashlib.sha256(f"{key}\n{words}".encode("utf-8", "surrogatepass")).hexdigest()
    return Path(state, "trusted", f"{asked[:32]}-{sha256}.json") if sha256 and os.path.isabs(state) else None


def _is_the_users(path: Path) -> bool:
    """Return whether nobody but the user can have made or changed a file or its folder; links do not count."""
    with suppress(OSError):
        found = [one.lstat() for one in (path, path.parent)]
        mine = not hasattr(os, "getuid") or all(one.st_uid == os.getuid() and not one.st_mode & 0o022 for one in found)
        return mine and not any(stat.S_ISLNK(one.st_mode) for one in found)
    return False


# -- importing ---------------------------------------------------------------------------------------------------------


def fetch(what: str, named: Target | None) -> object:
    """Return the function or class that a config names, imported from the source that was allowed.

    `what` begins the sentences about it: `model.name = "nets:make"`.
    """
    rule = f"must be module:name, with a module in {os.getcwd()} or an installed package"
    source = None if named is None else find_source(named.module)
    if named is None or source is None:
        why = "" if named is None else f" (ModuleNotFoundError: No module named {named.module!r})"
        raise ConfigError(f"{what} cannot be imported{why}; it {rule}.")
    known = {sha256 for key, words, sha256 in tuple(_allowed) if target(key, words) == named}
    if source.sha256 not in known:
        raise ConfigError(
            f"{what} would run code, {named.name} in {source.place}, "
            f"which {'has changed since it was allowed' if known else 'nobody has allowed'}. If you trust it, load the "
            "config again, or call fnrfl.usercode.allow(key, words) before."
        )
    with errors_in_words(f"{what} cannot be imported", f"it {rule}. Check its code."):
        module = _imported(source)
        found = getattr(module, named.name, _MISSING)
    if found is _MISSING:
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


def _imported(source: CodeSource) -> ModuleType:
    """Import a module as it was read; meanwhile its folder is the last in which Python looks for what it imports."""
    _imported_files.add(source.place)
    folder = os.path.join(source.folder or "", "")  # with a slash: nobody else's entry
    with _import_lock:
        if folder:
            sys.path.append(folder)
        try:
            return importlib.import_module(source.module) if source.content is None else _executed(source)
        finally:
            if folder and folder in sys.path:  # the module may have removed it
                sys.path.remove(folder)


def _executed(source: CodeSource) -> ModuleType:
    """Return a module that runs the very source, also where a package has imported it from bytecode.

    What the program itself has imported stays the same object, unless its file has changed since then.
    """
    module = sys.modules.get(source.module)
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    if isinstance(loader, _SourceLoader):
        if module is not None and loader.source == source:
            return module
    elif module is not None and source.folder is not None and _runs_source(module, source):
        return module
    above, _, name = source.module.rpartition(".")
    package = importlib.import_module(above) if above else None
    if source.folder is None and source.module in sys.modules:
        return sys.modules[source.module]
    spec = spec_from_file_location(source.module, source.place, loader=_SourceLoader(source))
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


def _runs_source(module: ModuleType, source: CodeSource) -> bool:
    """Return whether the functions and methods of an imported module are those of the source; refuse another file's."""
    origin = getattr(module, "__file__", None)
    if not _is_one_file(origin, source.place):
        raise ConfigError(
            f"The module {source.module} is imported from {origin or 'elsewhere'} already, not from {source.place}. "
            "Start a new process, or rename one of them."
        )
    codes = _codes_of(source)
    classes = (one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__)
    members = (member for one in (module, *classes) for member in vars(one).values())
    functions = (getattr(member, "__func__", member) for member in members)
    here = [one.__code__ for one in functions if isinstance(one, FunctionType) and one.__module__ == module.__name__]
    return all(code in codes for code in here if not code.co_name.startswith(ADDED_BY_TORCH))


def _codes_of(source: CodeSource) -> list[CodeType]:
    """Return the compiled source, and every function in it."""
    codes = [_SourceLoader(source).get_code(source.module)]
    for code in codes:  # it grows: functions within functions
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return codes


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
