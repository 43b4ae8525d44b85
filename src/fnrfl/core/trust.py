"""A user's own code runs only if the user allows it: by typing its name, by passing it in Python, or with --trust.

A config may name built-in things freely. Where a file (a recipe, or the config.toml of a run directory) says
`module:name`, the code is refused until the user allows it. The permission is remembered in the user's state folder,
for these words and this source: the user's own runs do not ask twice, but a run from somebody else does, and so does
code that has changed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from fnrfl.core import own_code, own_import
from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import did_you_mean
from fnrfl.core.own_code import CodeSource, Target

log = logging.getLogger("fnrfl.core.trust")

_allowed: set[tuple[str, str, str | None]] = (
    set()
)  # (key, words, sha256), in this process, even if no file can be written
_importable: set[tuple[Target, str | None]] = set()  # for `fetch_named_code`, with the sha256 that was looked at


def check_allowed(found: Mapping[str, object], given: Mapping[str, object], *, origin: str, trust: bool) -> None:
    """Refuse code that the file `origin` names and nobody has allowed; nothing is imported.

    `found` are values of the file, and `given` those that the user typed or passed in, by key: these are allowed, and
    with `trust` the others are too.
    """
    for key, words, target in own_code.named_code(given):
        _allow(key, words, target, own_code.find_source(target.module))
    refused = []
    for key, words, target in own_code.named_code(found):
        source = own_code.find_source(target.module)
        if trust or _is_allowed(key, words, source):
            _allow(key, words, target, source)
        else:
            refused.append(_would_run(key, words, target, source, origin))
    if refused:
        raise ConfigError(f"{' '.join(refused)} If you trust it, give --trust (trust=True in Python).")


def fetch_named_code(what: str, target: Target | None) -> object:
    """The function or class that a config names, imported from the source that was allowed.

    `what` begins the sentences about it: `model.name = "nets:make"`.
    """
    folder = own_code.working_folder()
    places = f"a module {'of the installed packages' if folder is None else f'in {folder} or an installed package'}"
    if target is None:
        raise ConfigError(f"{what} cannot be imported: it must be module:name, with {places}.")
    source = own_code.find_source(target.module)
    if source is None:
        raise ConfigError(
            f"{what} cannot be imported (ModuleNotFoundError: No module named {target.module!r}); "
            f"{target.module!r} must be {places}."
        )
    if (target, source.sha256) not in _importable:
        known = any(target == other for other, _ in tuple(_importable))
        raise ConfigError(
            f"{what} would run code, {target.name} in {source.place}, "
            + ("which has changed since it was allowed" if known else "which nobody has allowed")
            + ". If you trust it, load the config again, or call fnrfl.core.trust.given(key, words) before."
        )
    own_import.serve(source)
    with user_errors_in_words(f"{what} cannot be imported", f"{target.module!r} must be {places}. Check its code."):
        module = importlib.import_module(target.module)
    return _attribute(what, module, target)


def given(key: str, words: str) -> None:
    """Allow what a user has typed or passed in as the value of a key, if it is code."""
    check_allowed({}, {key: words}, origin="", trust=False)


@contextmanager
def user_errors_in_words(what: str, way_out: str) -> Iterator[None]:
    """Turn whatever goes wrong in a user's code, `sys.exit` included, into a sentence."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        place = own_import.blame(error)
        said = f"SystemExit: {error.code}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} ({said}{f'; {place}' if place else ''}); {way_out}") from error


def _attribute(what: str, module: ModuleType, target: Target) -> object:
    missing = object()
    with user_errors_in_words(f"{what} cannot be imported", "Check its code."):
        found = getattr(module, target.name, missing)
    if found is missing:
        hint = did_you_mean(target.name, vars(module)) or own_code.shadowed(target.module)
        raise ConfigError(f"{what}: module {target.module!r} has no {target.name!r}.{hint} Name something in it.")
    return found


def _would_run(key: str, words: str, target: Target, source: CodeSource | None, origin: str) -> str:
    """What a file asks for, in a sentence or two."""
    named = f"{key} = {json.dumps(words, ensure_ascii=False)} in {origin}"
    if source is None:
        return f"{named} would run code: {target.name} of a module {target.module}, which is not found here."
    own = [file.path for name, file in source.files.items() if file.content is not None and name != target.module]
    others = f" with {_listed([path.name for path in own])}" if own else ""
    changed = " The code has changed since it was allowed." if _was_allowed(key, words) else ""
    return f"{named} would run code: {target.name} in {source.place}{others}.{changed}"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# -- memory ------------------------------------------------------------------------------------------------------------


def _allow(key: str, words: str, target: Target, source: CodeSource | None) -> None:
    if source is None:  # there is nothing that could run; the importer says so
        return
    _importable.add((target, source.sha256))
    _allowed.add((key, words, source.sha256))
    if source.sha256 is not None:
        _remember(key, words, source)


def _is_allowed(key: str, words: str, source: CodeSource | None) -> bool:
    if source is None:
        return False
    if (key, words, source.sha256) in _allowed:
        return True
    folder = _permission_folder()
    return (
        folder is not None
        and source.sha256 is not None
        and _is_permission_file(folder / _permission_name(key, words, source.sha256))
    )


def _was_allowed(key: str, words: str) -> bool:
    """Whether these words were ever allowed, with whatever source."""
    if any((key, words) == known[:2] for known in tuple(_allowed)):
        return True
    folder = _permission_folder()
    try:
        return folder is not None and any(
            file.startswith(_permission_name(key, words, "")) for file in os.listdir(folder)
        )
    except OSError:
        return False


def _permission_name(key: str, words: str, sha256: str) -> str:
    """The name of the file that remembers a permission: the words' hash, and the source's."""
    asked = hashlib.sha256(f"{key}\n{words}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{asked[:32]}-" + (f"{sha256}.json" if sha256 else "")


def _is_permission_file(path: Path) -> bool:
    """Whether a permission is there, as a file and not as a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink()
    except OSError:
        return False


def _permission_folder() -> Path | None:
    """Where permissions are kept; None where the user has no place for such things."""
    state = _state_folder()
    return None if state is None else state / "trusted"


def _state_folder() -> Path | None:
    """The user's state folder: FNRFL_STATE, or what the system calls so."""
    if chosen := os.environ.get("FNRFL_STATE"):
        return Path(os.path.abspath(chosen))
    home = os.path.expanduser("~") if os.environ.get("HOME", "~") else ""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "")
    elif sys.platform == "darwin":
        base = os.path.join(home, "Library", "Application Support")
    else:
        base = os.environ.get("XDG_STATE_HOME", "")
        base = base if os.path.isabs(base) else os.path.join(home, ".local", "state")
    return Path(base) / "fnrfl" if os.path.isabs(base) else None


def _remember(key: str, words: str, source: CodeSource) -> None:
    """Write a permission down, whole or not at all; where that cannot be done, it lasts as long as the process."""
    folder = _permission_folder()
    if folder is None or source.sha256 is None:
        return
    path = folder / _permission_name(key, words, source.sha256)
    if _is_permission_file(path):
        return
    date = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"key": key, "words": words, "file": source.place, "sha256": source.sha256, "date": date}
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_symlink():
            _write(path, json.dumps(entry, indent=1) + "\n")
    except OSError as error:
        log.debug("%s is not remembered: %s", words, error)


def _write(path: Path, text: str) -> None:
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)  # in place of a link, not through it
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
