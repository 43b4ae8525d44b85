"""Importing a user's own code exactly as it was found.

What runs must be what was looked at: not a file that has changed since, nor bytecode that lies beside it. So the
modules that `own_code.find` has read are served to Python from memory. `sys.path` stays as it is, and other files of
the user's folder are never imported, whatever they are called.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import machinery
from importlib.util import spec_from_file_location
from types import CodeType, FunctionType, ModuleType

from fnrfl.core.errors import ConfigError
from fnrfl.core.forks import filters_lock
from fnrfl.core.own_code import CodeSource, ModuleFile, import_lock, python_finds, read_file, same_file

_served_files: dict[str, ModuleFile] = {}  # modules of users' folders that may be imported


class _OwnCodeLoader(machinery.SourceFileLoader):
    """Executes the source that was looked at, and neither reads nor writes bytecode."""

    def __init__(self, name: str, file: ModuleFile) -> None:
        super().__init__(name, str(file.path))
        self.content = file.content or b""

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.content, self.path, "exec", dont_inherit=True)


class _Finder:
    """Lets Python import the modules that are served, and of their packages nothing else."""

    serves_own_code = True  # so that `own_code.python_finds` does not ask it

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        file = _served_files.get(name)
        if file is not None:
            return _spec(name, file)
        package = _served_files.get(name.rpartition(".")[0])
        if package is None or path is None:
            return None
        ours = package.path if package.content is None else package.path.parent
        found = machinery.PathFinder.find_spec(name, [place for place in path if not same_file(place, str(ours))])
        if found is None:  # a file that has appeared since the package was looked at
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found


def _spec(name: str, file: ModuleFile) -> machinery.ModuleSpec:
    """What Python needs for importing a file as it was read; the spec remembers the file."""
    inside = [str(file.path.parent)] if file.package else None
    spec: machinery.ModuleSpec | None
    if file.content is None:
        spec = machinery.ModuleSpec(name, None, is_package=True)
        others = python_finds(name) if "." not in name else None  # parts of it that lie in other folders
        places = [] if others is None else others.submodule_search_locations or []
        spec.submodule_search_locations = [str(file.path), *(p for p in places if not same_file(p, str(file.path)))]
    elif file.path.suffix in machinery.SOURCE_SUFFIXES:
        loader = _OwnCodeLoader(name, file)
        spec = spec_from_file_location(name, file.path, loader=loader, submodule_search_locations=inside)
    else:
        if read_file(str(file.path)) != file.content:  # what is compiled can only be loaded from its file
            raise ImportError(f"{file.path} has changed since it was looked at", name=name, path=str(file.path))
        spec = spec_from_file_location(name, file.path, submodule_search_locations=inside)
    assert spec is not None
    spec.loader_state = file
    return spec


def _file_of(module: ModuleType) -> ModuleFile | None:
    """The file that a module was served from; None if somebody else has imported it."""
    file = getattr(getattr(module, "__spec__", None), "loader_state", None)
    return file if isinstance(file, ModuleFile) else None


def serve(source: CodeSource) -> None:
    """Let Python import a module as it was found; what was imported before from other source will be imported anew.

    A module that the program has imported itself stays as it is, as always in Python; if it is another one than was
    found, that is refused.
    """
    with import_lock:
        _forget_changed(source.files)
        _served_files.update(source.files)
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())


def _forget_changed(files: Mapping[str, ModuleFile]) -> None:
    """Drop modules that were served from other files or contents than these, and all that may refer to them."""
    changed = False
    for name, file in files.items():
        module = sys.modules.get(name)
        before = None if module is None else _file_of(module)
        if before is not None:
            changed = changed or before != file
        elif module is not None:
            _check_imported(name, module, file)
    if changed:
        tops = {name.partition(".")[0] for name in files}
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in tops and _file_of(module) is not None:
                del sys.modules[name]


def _check_imported(name: str, module: ModuleType, file: ModuleFile) -> None:
    """Refuse a module that the program has imported itself and that is not the one in the file."""
    if file.content is None:
        return
    origin = getattr(module, "__file__", None)
    if not same_file(origin, str(file.path)):
        raise ConfigError(
            f"The module {name} is already imported from {origin or 'elsewhere'}, so that of {file.path} cannot be "
            "used in this process. Start a new process, or rename one of them."
        )
    if type(getattr(module, "__loader__", None)) is machinery.SourceFileLoader and not _is_current(module, file):
        raise ConfigError(
            f"The module {name} was imported before {file.path} was changed, so it is not what the file says now. "
            f"Start a new process, or call importlib.reload({name})."
        )


def _is_current(module: ModuleType, file: ModuleFile) -> bool:
    """Whether the functions and methods of a module are those that its file has now."""
    now = _compiled(file)
    members = list(vars(module).values())
    members += [m for c in members if isinstance(c, type) and c.__module__ == module.__name__ for m in vars(c).values()]
    functions = (getattr(member, "__func__", member) for member in members)
    codes = (function.__code__ for function in functions if isinstance(function, FunctionType))
    here = (code for code in codes if same_file(code.co_filename, str(file.path)))
    return all(code in now for code in here if not code.co_name.startswith(ADDED_BY_TORCH))


ADDED_BY_TORCH = "torch_dynamo_resume_in_"  # torch.compile puts the rest of a function that it broke into its module


@lru_cache(maxsize=256)
def _compiled(file: ModuleFile) -> frozenset[CodeType]:
    """The code of everything that a source defines; nothing if it is no Python."""
    try:
        with filters_lock, warnings.catch_warnings():
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
    """Where in a user's own code an error came up: "nets.py, line 12, in forward"; None if it came up in other code."""
    files = {str(file.path): file.path.name for file in list(_served_files.values())}
    trace, place = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in files:
            place = f"{files[code.co_filename]}, line {trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    return place
