"""The run directory: which folders are one, how one appears, and how one takes the place of another.

A new run is made whole under a temporary name, `.NAME.fnrfl-new`, and then gets its name. Where it replaces another
run it gets its name only with its first checkpoint: the old run is called `.NAME.fnrfl-old` for a moment, and after a
kill in that moment the next command that is given NAME puts it back. All of this happens under NAME's lock.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.rundir import files
from fnrfl.rundir.lock import InUse, alone

log = logging.getLogger("fnrfl")

# What a run writes, and what `fnrfl report` writes beside it. Whatever else is in the folder is somebody else's.
WRITTEN = ("config.toml", "partition.json", "events.jsonl", "checkpoint.json", "model.safetensors", "report.html")
CHECKPOINT_FOLDER = r"rounds/\d{6,}(-\d+)?(\.part)?"
TENSORBOARD = "tensorboard"  # the folder of the logger
FIGURE_NAMES = ("differences", "convergence", "traffic", "time", "seeds", "classes", "split", "grid")
FIGURE = re.compile(rf"({'|'.join(FIGURE_NAMES)})(-\d+)?\.(png|svg|csv)")  # a second panel's ends with its number
OURS = re.compile(  # files and folders, from the run directory; the lock is of versions before 0.2.0
    rf"({'|'.join(map(re.escape, WRITTEN))})(\.part)?|\.lock"
    rf"|rounds|{CHECKPOINT_FOLDER}(/(server|client-\d+)\.safetensors)?"
    rf"|plots(/{FIGURE.pattern})?|{TENSORBOARD}(/events\.out\.tfevents\.[^/]*\.fnrfl)?"
)


class Taken(ConfigError):
    """A name that another run has, or is about to get."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(
            f"{run_dir} exists already: choose another directory with --out, or replace it with --overwrite."
        )


class RunDir:
    """A run directory that is being written: under its name, or for the time being beside the run that it replaces."""

    def __init__(self, given: Path) -> None:
        self.given = given  # the name as its user writes it
        self.name = self.path = Path(os.path.abspath(given))

    def settle(self) -> None:
        """Take the place of the old run, if there is one: to be called once there is a checkpoint to go on from."""
        if self.path == self.name:
            return
        old = _beside(self.name, "old")
        _discard(old, self.name)
        self.name.rename(old)
        try:
            self.path.rename(self.name)
        except BaseException:
            old.rename(self.name)
            raise
        files.sync(self.name.parent)
        self.path = self.name
        _discard(old, self.name)


@contextmanager
def opened(run_dir: Path) -> Iterator[RunDir]:
    """A run directory to go on in, with nobody else at work in it."""
    place = RunDir(run_dir)
    with alone(place.name):
        for which in ("new", "old"):  # a kill may have left what a replacement was about to remove
            _discard(_beside(place.name, which), place.name)
        yield place


@contextmanager
def created(run_dir: Path, contents: Mapping[str, str | bytes], *, overwrite: bool = False) -> Iterator[RunDir]:
    """A new run directory with these files, whole from the moment it has its name, with nobody else at work in it.

    With `overwrite` a run that has this name keeps it until `settle`. If that never comes, nothing has happened.
    A folder that gets the name while this one is being made keeps it too, and this one is refused.
    """
    made = RunDir(run_dir)
    made.name.parent.mkdir(parents=True, exist_ok=True)
    with alone(made.name):
        recover(run_dir)
        replaces = os.path.lexists(made.name)
        if replaces:
            if not overwrite:
                raise Taken(run_dir)
            check_replaceable(run_dir)
        made.path = _beside(made.name, "new")
        _discard(made.path, made.name)  # a kill may have left one
        try:
            made.path.mkdir(mode=0o755)
            for file, content in contents.items():
                files.write(made.path / file, content)
            if not replaces:
                try:
                    made.path.rename(made.name)
                except OSError as error:
                    if os.path.lexists(made.name):  # something has taken the name in the meantime
                        raise Taken(run_dir) from error
                    raise
                files.sync(made.name.parent)
                made.path = made.name
            yield made
        finally:
            if made.path != made.name:
                _discard(made.path, made.name)


def create_first(
    stack: ExitStack, run_dirs: Iterable[Path], contents: Mapping[str, str | bytes], *, overwrite: bool = False
) -> RunDir:
    """A new run directory until `stack` is left, under the first name that can be had; the last refusal is told."""
    refused: ConfigError | None = None
    for run_dir in run_dirs:
        try:
            return stack.enter_context(created(run_dir, contents, overwrite=overwrite))
        except (Taken, InUse) as error:
            refused = error
    assert refused is not None, "there is a name at least"
    raise refused


def recover(run_dir: Path) -> None:
    """Give a run its name back if a kill came while it was being replaced; to be called before reading any run."""
    name = Path(os.path.abspath(run_dir))
    old = _beside(name, "old")
    if not os.path.lexists(name) and is_run(old):
        with suppress(OSError):
            old.rename(name)


def recover_inside(folder: Path) -> None:
    """Give every run in a folder its name back if a kill came while it was being replaced."""
    for old in sorted(folder.glob(".*.fnrfl-old")):
        recover(old.with_name(old.name.removeprefix(".").removesuffix(".fnrfl-old")))


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory by its content: the files of one, and a log that says that fnrfl wrote it."""
    if not files.is_folder(path) or not all(files.is_plain_file(path / name) for name in WRITTEN[:3]):
        return False
    try:
        with (path / "events.jsonl").open("rb") as file:
            header = json.loads(file.readline(1 << 24))
        return isinstance(header["config_sha256"], str) and isinstance(header["versions"]["fnrfl"], str)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return False


def is_finished(run_dir: Path) -> bool:
    """Whether all rounds of a run are done: the model is the last file that it writes."""
    return (run_dir / "model.safetensors").exists()


def check_is_run(run_dir: Path) -> None:
    """Refuse a folder that is no run, and one in which a run's file is a link, a pipe or a folder."""
    recover(run_dir)
    if not (run_dir / "config.toml").is_file():
        raise ConfigError(
            f"{run_dir} is not a run directory: it has no config.toml. Give a folder that `fnrfl run` has made."
        )
    for path in (run_dir / name for name in WRITTEN):
        if os.path.lexists(path) and not files.is_plain_file(path):
            raise files.damaged(path, "it is not a plain file, and may stand for something elsewhere")


def check_replaceable(run_dir: Path) -> None:
    """Refuse to replace what is not a run directory, by its own content."""
    if run_dir.is_symlink():
        raise ConfigError(f"{run_dir} is a link to {run_dir.resolve()}. Give the run directory itself as --out.")
    if not is_run(run_dir):
        raise ConfigError(f"{run_dir} is not a run, so it is not replaced. Choose another directory with --out.")


def _beside(name: Path, which: str) -> Path:
    return name.with_name(f".{name.name}.fnrfl-{which}")


# -- removing ----------------------------------------------------------------------------------------------------------


def written(run_dir: Path, below: str = ".") -> Iterator[Path]:
    """Yield what a run, a logger and a report have written into a folder, files before their folders; no links."""
    inside = (run_dir / below).rglob("*") if files.is_folder(run_dir / below) else ()
    for path in sorted(inside, reverse=True):
        ours = OURS.fullmatch(path.relative_to(run_dir).as_posix())
        if ours and (files.is_plain_file(path) or files.is_folder(path)):
            yield path


def _discard(folder: Path, name: Path) -> None:
    """Remove a run that has been replaced or was never finished; files that fnrfl did not write stay, and are named."""
    if not files.is_folder(folder):
        return
    for path in (folder / WRITTEN[0], *written(folder)):  # without its config, a run that is half removed is none
        with suppress(OSError):
            path.rmdir() if files.is_folder(path) else path.unlink()
    with suppress(OSError):
        folder.rmdir()
        return
    names = map(name.with_name, files.numbered_names(f"{name.name}.replaced"))
    aside = next(path for path in names if not os.path.lexists(path))
    foreign = ", ".join(sorted(path.name for path in folder.iterdir()))
    folder.rename(aside)
    log.warning(f"{aside} has what was in the old run and is not fnrfl's: {foreign}.")
