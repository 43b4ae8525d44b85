"""A user's own code, `module:name`: which source it stands for, found without running any, and loaded as it was found.

Whoever asks what would run must not run it, and what runs must be what was looked at. So packages are searched without
importing them, every module of the user's folder that the named one imports is read along with it, and these contents
are what is executed: not a file that has changed since, nor bytecode that lies beside it. `sys.path` stays as it is,
and other files of the folder are never imported, whatever they are called.
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
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import machinery
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from fnrfl.errors import ConfigError

KEYS = ("model.name", "dataset", "public.source", "algorithm.name")  # the keys of a config that may name code
WITH_OPTIONS = re.compile(r"\s*([^\s()]+)\s*(?:\((.*)\))?\s*", re.DOTALL)  # a model's name: `nets:make(hidden=3)`

# Names that a file in the user's folder cannot take, because others mean another module by them.
RESERVED = sys.stdlib_module_names | set(sys.builtin_module_names) | {"fnrfl"}
LOADERS: tuple[tuple[type, list[str]], ...] = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)


@dataclass(frozen=True)
class Target:
    """What a config means by `module:name`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class File:
    """One module of the user's folder: its file and what is in it, or a folder without `__init__.py`."""

    path: Path
    content: bytes | None  # None: a folder
    package: bool


@dataclass(frozen=True)
class Source:
    """What would run if a module was imported."""

    module: str
    place: str  # in words: the file, or where else it comes from
    sha256: str | None  # None: it was made in this process, so nobody can know it again
    files: Mapping[str, File] = field(default_factory=dict)  # by module; of the user's own folder alone


def target(key: str, words: object) -> Target | None:
    """The code that a value of the config names; None for names, paths and whatever else is not imported.

    >>> target("model.name", "pkg.nets:make(hidden=3)")
    Target(module='pkg.nets', name='make')
    >>> [target("dataset", words) for words in ("digits", "a/b.csv", "C:/data", "./mod:f", 3)]
    [None, None, None, None, None]
    """
    if not isinstance(words, str):
        return None
    if key == "model.name":
        match = WITH_OPTIONS.fullmatch(words)
        words = match[1] if match else ""
    module, _, name = words.partition(":")
    return Target(module, name) if all(part.isidentifier() for part in (*module.split("."), name)) else None


# -- finding -----------------------------------------------------------------------------------------------------------


def find(module: str) -> Source | None:
    """The source of a module, with nothing imported; None where there is no such module.

    A module of the working folder, or of another folder on the path that nobody installed, comes with the modules of
    that folder which it imports. Of an installed module only its own file counts.
    """
    with _lock:  # two threads that do this at once get in each other's way
        importlib.invalidate_caches()  # a file may be younger than what Python has seen of its folder
    top, folder = module.partition(".")[0], working_folder()
    here = _in_folder(top, folder) if folder is not None and top != "__main__" else None
    there = _elsewhere(top) if top != "__main__" else None
    for spec in (here, there):
        root = None if spec is None else _root(spec)
        if spec is not None and (root is None or top in RESERVED or _is_installed(root)):
            return _installed(module, spec)
        files = {} if root is None else _with_imports(top, root)
        if module in files:
            return Source(module, str(files[module].path), _sha256(files), files)
    if here is None and there is None and module in sys.modules:
        return Source(module, f"the module {module}, which was made in this process", None)
    return None


def working_folder() -> Path | None:
    """The folder in which users' modules are looked for; None where it is gone."""
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _in_folder(name: str, folder: Path) -> machinery.ModuleSpec | None:
    """A module of a folder of the user's, unless others mean another one by its name."""
    if name in RESERVED:
        return None
    spec = machinery.FileFinder(str(folder), *LOADERS).find_spec(name)
    if spec is None:
        return None
    other = _elsewhere(name)
    if spec.loader is None:  # a folder without __init__.py; a module of that name anywhere goes before it
        return spec if other is None or other.loader is None else None
    if other is None or other.loader is None or _same_file(spec.origin, other.origin):
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


def _elsewhere(name: str, path: Sequence[str] | None = None) -> machinery.ModuleSpec | None:
    """What Python itself would find; of a module in a package, `path` is where the package is."""
    for finder in sys.meta_path:
        look = getattr(finder, "find_spec", None)
        if look is None or isinstance(finder, _Finder):
            continue
        spec: machinery.ModuleSpec | None = look(name, path)
        if spec is not None:
            return spec
    return None


def _same_file(one: str | None, other: str | None) -> bool:
    try:
        return one is not None and other is not None and os.path.samefile(one, other)
    except OSError:
        return False


def _root(spec: machinery.ModuleSpec) -> Path | None:
    """The folder in which a module or package lies; None where it lies in none."""
    if spec.submodule_search_locations is not None:
        root = next((Path(place).parent for place in spec.submodule_search_locations), None)
    else:
        root = Path(spec.origin).parent if spec.has_location and spec.origin else None
    return root if root is not None and root.is_dir() else None  # inside a .zip there are no folders


@cache
def _places() -> tuple[str, ...]:
    """Where packages are installed."""
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    named += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__)]
    return tuple({os.path.realpath(place) for place in named})


def _is_installed(root: Path) -> bool:
    real = Path(os.path.realpath(root))
    return any(real.is_relative_to(place) for place in _places())


def _installed(module: str, spec: machinery.ModuleSpec) -> Source | None:
    """An installed module, a built-in one, or one in an archive: its own file, without what it imports."""
    name, found = spec.name, spec
    for part in module.split(".")[1:]:
        name = f"{name}.{part}"
        if found.submodule_search_locations is None:
            return None
        inner = _elsewhere(name, list(found.submodule_search_locations))
        if inner is None:
            return None
        found = inner
    if not found.has_location or not found.origin or not hasattr(found.loader, "get_data"):
        words = f"the module {module}, a part of Python {platform.python_version()}"
        return Source(module, words, hashlib.sha256(words.encode()).hexdigest())
    content: bytes = found.loader.get_data(found.origin)  # type: ignore[union-attr]
    return Source(module, found.origin, _sha256({module: File(Path(found.origin), content, False)}))


def _with_imports(top: str, root: Path) -> dict[str, File]:
    """A module or package of a folder, and those of the same folder that it imports, and that these import."""
    files: dict[str, File] = {}
    waiting, seen = [top], {*RESERVED}
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        spec = _in_folder(name, root)
        if spec is None:
            continue
        found = dict(_files(spec, frozenset()))
        files |= found
        for file in found.values():
            if file.path.suffix in machinery.SOURCE_SUFFIXES and file.content is not None:
                waiting += sorted(_imports(file.content))
    return files


def _files(spec: machinery.ModuleSpec, above: frozenset[str]) -> Iterator[tuple[str, File]]:
    """A module; of a package, all its modules too, whether or not anybody imports them. `above`: folders entered."""
    if spec.submodule_search_locations is None:
        yield spec.name, File(Path(str(spec.origin)), _read(str(spec.origin)), False)
        return
    folder = Path(next(iter(spec.submodule_search_locations)))
    real = os.path.realpath(folder)
    if real in above:  # a symlink to a folder around it
        return
    init = File(folder, None, True) if spec.loader is None else File(Path(str(spec.origin)), _read(spec.origin), True)
    yield spec.name, init
    finder = machinery.FileFinder(str(folder), *LOADERS)
    for stem in sorted({name.partition(".")[0] for name in _listed(folder)}):
        inner = finder.find_spec(f"{spec.name}.{stem}") if stem.isidentifier() and stem != "__init__" else None
        if inner is not None and stem != "__pycache__":
            yield from _files(inner, above | {real})


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # Python would find nothing in it either
        return []


def _read(path: str | None) -> bytes:
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
def _imports(content: bytes) -> frozenset[str]:
    """Names of the modules that a source imports anywhere in it, up to their first dot; none if it is no Python."""
    try:
        with _lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
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


def _sha256(files: Mapping[str, File]) -> str:
    """One hash of the names and contents of some modules, wherever their folder is."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = "" if file.content is None else hashlib.sha256(file.content).hexdigest()
        digest.update(f"{name} {''.join(file.path.suffixes)} {file.package} {content}\n".encode())
    return digest.hexdigest()


# -- loading -----------------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_serving: dict[str, File] = {}  # modules of users' folders that may be imported


class _Loader(machinery.SourceFileLoader):
    """Executes the source that was looked at, and neither reads nor writes bytecode."""

    def __init__(self, name: str, file: File) -> None:
        super().__init__(name, str(file.path))
        self.content = file.content or b""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.content, self.path, "exec", dont_inherit=True)


class _Finder:
    """Lets Python import the modules that are served, and of their packages nothing else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        file = _serving.get(name)
        if file is not None:
            return _spec(name, file)
        package = _serving.get(name.rpartition(".")[0])
        if package is None or path is None:
            return None
        ours = package.path if package.content is None else package.path.parent
        found = machinery.PathFinder.find_spec(name, [place for place in path if not _same_file(place, str(ours))])
        if found is None:  # a file that has appeared since the package was looked at
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found


def _spec(name: str, file: File) -> machinery.ModuleSpec:
    """What Python needs for importing a file as it was read; the spec remembers the file."""
    inside = [str(file.path.parent)] if file.package else None
    spec: machinery.ModuleSpec | None
    if file.content is None:
        spec = machinery.ModuleSpec(name, None, is_package=True)
        others = _elsewhere(name) if "." not in name else None  # parts of it that lie in other folders
        places = [] if others is None else others.submodule_search_locations or []
        spec.submodule_search_locations = [str(file.path), *(p for p in places if not _same_file(p, str(file.path)))]
    elif file.path.suffix in machinery.SOURCE_SUFFIXES:
        loader = _Loader(name, file)
        spec = spec_from_file_location(name, file.path, loader=loader, submodule_search_locations=inside)
    else:
        if _read(str(file.path)) != file.content:  # what is compiled can only be loaded from its file
            raise ImportError(f"{file.path} has changed since it was looked at", name=name, path=str(file.path))
        spec = spec_from_file_location(name, file.path, submodule_search_locations=inside)
    assert spec is not None
    spec.loader_state = file
    return spec


def _served(module: ModuleType) -> File | None:
    """The file that a module was served from; None if somebody else has imported it."""
    file = getattr(getattr(module, "__spec__", None), "loader_state", None)
    return file if isinstance(file, File) else None


def serve(source: Source) -> None:
    """Let Python import a module as it was found; what was imported before from other source will be imported anew.

    A module that the program has imported itself stays as it is, as always in Python; if it is another one than was
    found, that is refused.
    """
    with _lock:
        _forget_changed(source.files)
        _serving.update(source.files)
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())


def _forget_changed(files: Mapping[str, File]) -> None:
    """Drop modules that were served from other files or contents than these, and all that may refer to them."""
    changed = False
    for name, file in files.items():
        module = sys.modules.get(name)
        before = None if module is None else _served(module)
        if before is not None:
            changed = changed or before != file
        elif module is not None:
            _check_imported(name, module, file)
    if changed:
        tops = {name.partition(".")[0] for name in files}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in tops and _served(module) is not None:
                del sys.modules[name]


def _check_imported(name: str, module: ModuleType, file: File) -> None:
    """Refuse a module that the program has imported itself and that is not the one in the file."""
    if file.content is None:
        return
    origin = getattr(module, "__file__", None)
    if not _same_file(origin, str(file.path)):
        raise ConfigError(
            f"The module {name} is already imported from {origin or 'elsewhere'}, so that of {file.path} cannot be "
            "used in this process. Start a new process, or rename one of them."
        )
    if type(getattr(module, "__loader__", None)) is machinery.SourceFileLoader and not _is_current(module, file):
        raise ConfigError(
            f"The module {name} was imported before {file.path} was changed, so it is not what the file says now. "
            f"Start a new process, or call importlib.reload({name})."
        )


def _is_current(module: ModuleType, file: File) -> bool:
    """Whether the functions and methods of a module are those that its file has now."""
    now = _compiled(file)
    members = list(vars(module).values())
    members += [m for c in members if isinstance(c, type) and c.__module__ == module.__name__ for m in vars(c).values()]
    functions = (getattr(member, "__func__", member) for member in members)
    codes = (function.__code__ for function in functions if isinstance(function, FunctionType))
    return all(code in now for code in codes if _same_file(code.co_filename, str(file.path)))


@lru_cache(maxsize=256)
def _compiled(file: File) -> frozenset[CodeType]:
    """The code of everything that a source defines; nothing if it is no Python."""
    try:
        with _lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return frozenset(_codes(compile(file.content or b"", str(file.path), "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return frozenset()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def blame(error: BaseException) -> str | None:
    """Where in a user's own code an error came up: "nets.py, line 12, in forward"; None if it came up elsewhere."""
    files = {str(file.path): file.path.name for file in list(_serving.values())}
    trace, place = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in files:
            place = f"{files[code.co_filename]}, line {trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    return place
