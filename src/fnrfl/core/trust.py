"""A user's own code runs only if the user allows it: by typing its name, by passing it in Python, or with --trust.

A config may name built-in things freely. Where a file (a recipe, or the config.toml of a run directory) says
`module:name`, the code is refused until the user allows it. The permission is remembered in the user's state folder,
for these words and the sha256 of the named file: the user's own runs do not ask twice, but a run from somebody else
does, and so does a file that has changed. At a node its configuration alone decides, and nothing is remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from fnrfl.core import own_code
from fnrfl.core.errors import ConfigError, ShareableError
from fnrfl.core.nearest import did_you_mean
from fnrfl.core.own_code import CodeSource, Target

_allowed: set[tuple[str, str, str | None]] = set()  # (key, words, sha256), in this process


def check_allowed(
    found: Mapping[str, object],
    given: Mapping[str, object],
    *,
    origin: str,
    trust: bool,
    listed: Collection[str] | None = None,
) -> None:
    """Refuse code that the file `origin` names and nobody has allowed; nothing is imported.

    `found` are values of the file, and `given` those that the user typed or passed in, by key: these are allowed, and
    with `trust` the others are too. At a node, code that its configuration has `listed` is allowed and no other,
    whatever its user has allowed elsewhere.
    """
    for key, words, target in own_code.named_code(given):
        _allow(key, words, own_code.find_source(target.module), remember=listed is None)
    refused = []
    for key, words, target in own_code.named_code(found):
        if listed is not None and str(target) not in listed:
            raise ShareableError("The recipe names code that the node's configuration does not list. It was refused.")
        source = own_code.find_source(target.module)
        if trust or listed is not None or _is_allowed(key, words, source):
            _allow(key, words, source, remember=listed is None)
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
    known = {sha256 for key, words, sha256 in tuple(_allowed) if own_code.target(key, words) == target}
    if source.sha256 not in known:
        raise ConfigError(
            f"{what} would run code, {target.name} in {source.place}, "
            + ("which has changed since it was allowed" if known else "which nobody has allowed")
            + ". If you trust it, load the config again, or call fnrfl.core.trust.given(key, words) before."
        )
    with user_errors_in_words(f"{what} cannot be imported", f"{target.module!r} must be {places}. Check its code."):
        module = own_code.import_source(source)
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
        place = own_code.blame(error)
        said = f"SystemExit: {error.code}" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} ({said}{f'; {place}' if place else ''}); {way_out}") from error


def _attribute(what: str, module: ModuleType, target: Target) -> object:
    missing = object()
    with user_errors_in_words(f"{what} cannot be imported", "Check its code."):
        found = getattr(module, target.name, missing)
    if found is missing:
        hint = did_you_mean(target.name, vars(module))
        raise ConfigError(f"{what}: module {target.module!r} has no {target.name!r}.{hint} Name something in it.")
    return found


def _would_run(key: str, words: str, target: Target, source: CodeSource | None, origin: str) -> str:
    """What a file asks for, in a sentence or two."""
    named = f"{key} = {json.dumps(words, ensure_ascii=False)} in {origin}"
    if source is None:
        return f"{named} would run code: {target.name} of a module {target.module}, which is not found here."
    changed = " The code has changed since it was allowed." if _was_allowed(key, words) else ""
    return f"{named} would run code: {target.name} in {source.place}.{changed}"


# -- memory ------------------------------------------------------------------------------------------------------------


def _allow(key: str, words: str, source: CodeSource | None, *, remember: bool) -> None:
    if source is None:  # there is nothing that could run; the importer says so
        return
    _allowed.add((key, words, source.sha256))
    if remember:
        with suppress(OSError):  # then it lasts as long as the process
            _remember(key, words, source)


def _is_allowed(key: str, words: str, source: CodeSource | None) -> bool:
    if source is None:
        return False
    path = _permission(key, words, source.sha256)
    return (key, words, source.sha256) in _allowed or (path is not None and _is_the_users(path, path.parent))


def _was_allowed(key: str, words: str) -> bool:
    """Whether these words were ever allowed, with whatever source."""
    path = _permission(key, words, "*")
    return any((key, words) == known[:2] for known in tuple(_allowed)) or (
        path is not None and any(path.parent.glob(path.name))
    )


def _permission(key: str, words: str, sha256: str | None) -> Path | None:
    """The file that remembers a permission, named by hashes; None without source or a place for such files."""
    chosen, base = os.environ.get("FNRFL_STATE"), os.environ.get("XDG_STATE_HOME", "")
    home = os.path.expanduser("~") if os.environ.get("HOME", "~") else ""
    base = base if os.path.isabs(base) else os.path.join(home, ".local", "state")
    state = os.path.abspath(chosen) if chosen else os.path.join(base, "fnrfl")
    asked = hashlib.sha256(f"{key}\n{words}".encode("utf-8", "surrogatepass")).hexdigest()
    return Path(state, "trusted", f"{asked[:32]}-{sha256}.json") if sha256 and os.path.isabs(state) else None


def _is_the_users(*paths: Path) -> bool:
    """Whether files or folders are there, are no links, and nobody but the user can have made or changed them."""
    with suppress(OSError):
        found = [path.lstat() for path in paths]
        mine = not hasattr(os, "getuid") or all(one.st_uid == os.getuid() and not one.st_mode & 0o022 for one in found)
        return mine and not any(stat.S_ISLNK(one.st_mode) for one in found)
    return False


def _remember(key: str, words: str, source: CodeSource) -> None:
    """Write a permission down, for the user to read."""
    path = _permission(key, words, source.sha256)
    if path is None or _is_the_users(path, path.parent):
        return
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if path.parent.is_symlink():
        return
    date = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"key": key, "words": words, "file": source.place, "sha256": source.sha256, "date": date}
    path.unlink(missing_ok=True)  # a link that stood there is not written through
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(entry, indent=1) + "\n")
