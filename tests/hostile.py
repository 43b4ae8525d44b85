"""A hundred hostile run directories, recipes and data files, given to every command.

    python tests/hostile.py [WORDS]

Each case is a folder that somebody might have received, with a victim's files and a home beside it. After each command
nothing may have been executed (whatever the cases run leaves a file), nothing outside the folder may have changed, and
the command must have ended. WORDS choose the cases whose names contain one of them.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import hashlib
import io
import json
import os
import pickle
import py_compile
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import machinery
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

import fnrfl
from fnrfl import cli, usercode
from fnrfl.core.errors import FnrflError

LIMIT = 15  # seconds that a command may take, and three times that for a process of its own
FONTS = str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "matplotlib").expanduser())  # seconds to make anew
TINY = ("digits", "algorithm=scaffold", "rounds=2", "clients=2", "client.epochs=1", "model=mlp(hidden=4)")

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "got/config.toml", "-o", "new"),
    "dry run": ("run", "got/config.toml", "--dry-run"),
    "overwrite": ("run", *TINY, "-o", "got", "--overwrite"),
    "resume": ("resume", "got"),
    "evaluate": ("evaluate", "got", "DATA"),
    "predict": ("predict", "got", "DATA", "-o", "predictions.csv"),
    "report": ("report", "got"),
    "scenario": ("scenario", "show", "got/config.toml"),
    "compare": ("compare", "got/config.toml", "--seeds", "0", "-o", "grid"),
    "load": ("load",),
}


class Box:
    """Where a case happens."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "work"  # the hostile folder, in which the commands are given
        self.got = self.work / "got"  # the run directory that was received
        self.victim = root / "victim"  # somebody's files, which have nothing to do with it
        self.canary = root / "canary"  # the file that executed code makes


@dataclass(frozen=True)
class Case:
    """One attempt: how its folder is made from a run directory, and what is asked of it."""

    name: str
    make: Callable[[Box], None]
    finished: bool = True  # the run directory that it starts from
    data: str = "digits"
    commands: tuple[str, ...] = tuple(COMMANDS)
    typed: dict[str, tuple[str, ...]] = field(default_factory=dict)  # commands that are given in other words
    fresh: bool = False  # in a process of its own, which has not imported the modules that are shadowed


@dataclass(frozen=True)
class Outcome:
    """What a command did with a case."""

    case: str
    command: str
    code: int | str  # the exit code, or what happened instead
    executed: bool
    touched: tuple[str, ...]
    said: str = ""

    @property
    def well(self) -> bool:
        """Whether everything is as it was promised."""
        return not self.executed and not self.touched and self.code in (0, 2, 3)


# -- cases -------------------------------------------------------------------------------------------------------------

EVIL = "open({canary!r}, 'w')\nmake = Make = lambda *a, **k: open({canary!r}, 'w')\n"


def evil(box: Box) -> str:
    return EVIL.format(canary=str(box.canary))


def with_key(key: str, words: str, box: Box) -> None:
    """A config in which a key has another value; CANARY, VICTIM and ROOT stand for paths."""
    section, _, name = key.rpartition(".")
    lines, at = [], ""
    for line in (box.got / "config.toml").read_text().splitlines():
        at = line.strip("[]") if line.startswith("[") else at
        here = (at, line.split(" ")[0]) == (section, name)
        lines.append(f"{name} = {json.dumps(filled(box, words))}" if here else line)
    (box.got / "config.toml").write_text("\n".join(lines) + "\n")


def filled(box: Box, words: str) -> str:
    return words.replace("CANARY", str(box.canary)).replace("VICTIM", str(box.victim)).replace("ROOT", str(box.root))


def with_modules(then: Callable[[Box], None], box: Box) -> None:
    """The same with evil modules in all forms in the working folder and in the run directory."""
    for folder in (box.work, box.got):
        (folder / "evilpack" / "inner").mkdir(parents=True)
        (folder / "spread").mkdir()
        for name in ("evil", "evilpack/__init__", "evilpack/inner/__init__", "evilpack/fine", "spread/evil"):
            (folder / f"{name}.py").write_text(evil(box))
        (folder / "evilpack" / "fine.py").write_text("make = Make = lambda: 1 / 0\n")
        (folder / "compiled.py").write_text(evil(box))
        py_compile.compile(str(folder / "compiled.py"), cfile=str(folder / "compiled.pyc"))
        (folder / "compiled.py").unlink()
        (folder / f"native{machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF nothing")
        (folder / "linked.py").symlink_to("evil.py")
        (folder / "broken.py").write_text(evil(box) + "def f(:\n")
        (folder / "helped.py").write_text("import evil\nmake = Make = evil.make\n")
    then(box)


def with_text(change: Callable[[str], str], box: Box) -> None:
    """A config that is other text."""
    text = change((box.got / "config.toml").read_text())
    (box.got / "config.toml").write_bytes(text.encode("utf-8", "surrogateescape"))


def without(text: str, *keys: str) -> str:
    """A config's text without some top-level keys or sections."""
    kept, at = [], ""
    for line in text.splitlines():
        at = line.strip("[]") if line.startswith("[") else at
        if (at or line.split(" ")[0]) not in keys:
            kept.append(line)
    return "\n".join(kept) + "\n"


def placed(place: str, kind: str, box: Box) -> None:
    """A part of the run directory that is a pipe, or a link to the same thing among the victim's files."""
    path = box.work / place
    target = box.victim / "linked" / path.name
    for folder in (target.parent, path.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if kind in ("dangling link", "pipe"):
        path.unlink(missing_ok=True)
    elif path.exists():
        path.rename(target)
    elif "." in path.name.lstrip("."):
        target.write_text("somebody's own words\n")
    else:
        target.mkdir()
        (target / "thesis.tex").write_text("somebody's own words\n")
    if kind == "pipe":
        os.mkfifo(path)  # that nobody will ever write into
    else:
        (path.hardlink_to if kind == "hard link" else path.symlink_to)(target)


def checkpointed(changes: dict[str, Any], box: Box) -> None:
    """A checkpoint.json that names other files."""
    (box.victim / "server.safetensors").write_bytes(next(box.got.rglob("server.safetensors")).read_bytes())
    path = box.got / "checkpoint.json"
    index = json.loads(path.read_text())
    for key, value in changes.items():
        shown = json.loads(filled(box, json.dumps(value)))
        index[key] = {**index[key], **shown} if isinstance(shown, dict) else shown
    path.write_text(json.dumps(index))


class Pickled:
    """Asks, when it is unpickled, for a file to be made."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.canary), "w")


def data(name: str, make: Callable[[Box, Path], object], box: Box) -> None:
    """A config whose data is in a file or folder that is made so."""
    make(box, box.work / name)
    with_key("dataset.name", name, box)


def arrays(name: str, box: Box, path: Path) -> None:
    """A .npz in which one of the arrays is of objects."""
    good = {"x": np.zeros((20, 1, 8, 8), np.uint8), "y": np.arange(20) % 10}
    np.savez(path, allow_pickle=True, **(good | {name: np.array([Pickled(box.canary)] * 20, dtype=object)}))


def archive(members: dict[str, Callable[[], bytes]], box: Box, path: Path) -> None:
    """A .npz that is any archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(filled(box, name), content())


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def _giant() -> bytes:
    header = io.BytesIO()
    words = {"descr": "<f4", "fortran_order": False, "shape": (10**12, 4)}  # 16 TB of nothing
    np.lib.format.write_array_header_1_0(header, words)
    return header.getvalue()


def _batches(box: Box, folder: Path) -> None:
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps({b"data": Pickled(box.canary), b"labels": []}))


def _images(box: Box, folder: Path) -> None:
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        (folder / label / "a.png").symlink_to(box.victim / "notes.txt")


def _labels() -> bytes:
    return npy(np.arange(20) % 2)


OUTSIDE = dict.fromkeys(("../../victim/notes.txt", "VICTIM/new.npy", "y.npy"), _labels)
OUTSIDE |= {"x.npy": lambda: npy(np.zeros((20, 4), np.float32))}
BOMB = {"x.npy": lambda: npy(np.zeros((1 << 25, 1), np.uint8)), "y.npy": lambda: npy(np.zeros(1 << 25, np.uint8))}
GIANT = {"x.npy": _giant, "y.npy": lambda: npy(np.zeros(1, np.int64))}
DATA: dict[str, tuple[str, Callable[[Box, Path], object]]] = {
    "objects as x": ("data.npz", partial(arrays, "x")),
    "objects as classes": ("data.npz", partial(arrays, "classes")),
    "one pickled array": ("data.npz", lambda box, path: path.write_bytes(npy(np.array([Pickled(box.canary)], "O")))),
    "a pickle": ("data.npz", lambda box, path: path.write_bytes(pickle.dumps(Pickled(box.canary)))),
    "members outside": ("data.npz", partial(archive, OUTSIDE)),
    "a bomb": ("data.npz", partial(archive, BOMB)),  # 32 MiB in 32 KiB
    "a giant header": ("data.npz", partial(archive, GIANT)),
    "batches of pickles": ("batches", _batches),
    "links for images": ("photos/", _images),
    "a pipe": ("table.csv", lambda box, path: os.mkfifo(path)),
}


def _pickled_model(box: Box) -> None:
    for path in (box.got / "model.safetensors", *box.got.rglob("rounds/*/*.safetensors")):
        path.write_bytes(pickle.dumps(Pickled(box.canary)))


def _log_names_code(box: Box) -> None:
    """The event log's header says that the data came from a function."""
    path = box.got / "events.jsonl"
    first, *rest = path.read_text().splitlines()
    header = json.loads(first)
    header["data"]["source"] = header["config"]["dataset"]["name"] = "evil:make"
    header["config"]["model"]["name"] = "evil:make"
    path.write_text("\n".join([json.dumps(header), *rest]) + "\n")


def _a_project(box: Box) -> None:
    """A folder of somebody's that has a config.toml: not a run at all."""
    shutil.rmtree(box.got)
    shutil.copytree(box.victim / "project", box.victim / "linked")
    box.got.symlink_to(box.victim / "linked")


def _own_beside(name: str, box: Box) -> None:
    """A module that has the name of an installed one, beside a module that the user has typed."""
    path = box.work / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(evil(box))
    (box.work / "typed.py").write_text(
        "def net():\n    from torch import nn\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )


SHADOW = {
    "compare": ("compare", "got/config.toml", "model=typed:net", "--seeds", "0", "-o", "grid"),
    "run": ("run", "got/config.toml", "model=typed:net", "-o", "new"),
}
KEYS = ("model.name", "dataset.name", "public.source", "algorithm.name")
CALLS = {
    "os.system": "os:system(command='touch CANARY')",
    "posix.system": "posix:system(command='touch CANARY')",
    "Popen with a shell": "subprocess:Popen(args='touch CANARY', shell=true)",
    "subprocess.run": "subprocess:run(args='touch CANARY', shell=true)",
    "open": "builtins:open(file='CANARY', mode='w')",
    "rmtree": "shutil:rmtree(path='VICTIM')",
    "remove": "os:remove(path='VICTIM/notes.txt')",
    "copy over": "shutil:copyfile(src='got/config.toml', dst='VICTIM/notes.txt')",
    "makedirs": "os:makedirs(name='CANARY')",
    "symlink": "os:symlink(src='nowhere', dst='CANARY')",
    "a log file": "logging:FileHandler(filename='CANARY')",
    "a database": "sqlite3:connect(database='CANARY')",
    "an archive": "zipfile:ZipFile(file='CANARY', mode='w')",
    "a temporary folder": "tempfile:mkdtemp(dir='ROOT')",
    "a path to run": "runpy:run_path(path_name='evil.py')",
    "an import": "importlib:import_module(name='evil')",
    "a method of a class": "pathlib:Path.touch(self='CANARY')",
    "our own writer": "fnrfl.results.report.page:report(run_dirs=1, place='CANARY')",
}
MODULES = {
    "in the folder": "evil:{make}",
    "in a package": "evilpack.fine:{make}",
    "in a folder without init": "spread.evil:{make}",
    "that is compiled": "compiled:{make}",
}
FORMS: dict[str, Callable[[str], str]] = {
    "a dotted key": lambda text: 'model.name = "evil:make"\n' + without(text, "model"),
    "a key in quotes": lambda text: '"model.name" = "evil:make"\n' + without(text, "model"),
    "an inline table": lambda text: 'algorithm = {name = "evil:Make"}\n' + without(text, "algorithm"),
    "a short form": lambda text: 'algorithm = "evil:Make"\n' + without(text, "algorithm"),
    "an array of tables": lambda text: without(text, "model") + '[[model]]\nname = "evil:make"\n',
    "an array": lambda text: 'model = ["evil:make"]\n' + without(text, "model"),
    "a section twice": lambda text: text + '[model]\nname = "evil:make"\n',
    "a key twice": lambda text: 'dataset = "evil:make"\n' + text,
    "both quoted and dotted": lambda text: '"model.name" = "evil:make"\n' + text,
    "escapes": lambda text: 'model = "\\u0065vil:make"\n' + without(text, "model"),
    "a literal over lines": lambda text: "model = '''\n  evil:make\n'''\n" + without(text, "model"),
    "a mark at the start": lambda text: '\ufeffmodel = "evil:make"\n' + without(text, "model"),
    "a name in a section of its own": lambda text: without(text, "model") + '[model.name]\nx = "evil:make"\n',
    "deep nesting": lambda text: text + f"\n[x]\ny = {'[' * 9000}{']' * 9000}\n",
    "a deep key": lambda text: f"{'.'.join('a' * 3000)} = 1\n{text}",
    "code for a penalty": lambda text: without(text, "fnr") + '[fnr]\npenalty = "evil:make"\n',
    "code for an optimiser": lambda text: text.replace('"sgd"', '"evil:make"'),
    "no text": lambda text: "\udcff\udcfe" + text,
}
WORDS = {
    "an engine": ("engine.name", "evil:make"),
    "a scenario": ("scenario", "evil:make"),
    "a scenario that calls": ("scenario", "label-dirichlet(__import__('os').system('touch CANARY'))"),
    "options that call": ("model.name", "mlp(hidden=__import__('os').system('touch CANARY'))"),
    "features": ("model.features", "__class__.__init__.__globals__"),
    "a name that goes up": ("name", "../../victim/run"),
    "an absolute name": ("name", "ROOT/canary"),
    "a name of two lines": ("name", "x\n[model]\nname = 'evil:make'"),
    "a name for a shell": ("name", "$(touch CANARY); touch CANARY"),
    "data above": ("dataset.name", "../victim"),
    "an address": ("dataset.name", "file:evil"),
}
PLACES = {  # what may be there in the place of an ordinary file or folder
    ".got.lock": ("link", "hard link", "dangling link", "pipe"),
    "got/config.toml": ("link", "pipe"),
    "got/events.jsonl": ("link", "hard link", "pipe"),
    "got/partition.json": ("link",),
    "got/checkpoint.json": ("link", "hard link", "pipe"),
    "got/checkpoint.json.part": ("link", "hard link", "dangling link"),
    "got/model.safetensors": ("link", "hard link", "dangling link"),
    "got/model.safetensors.part": ("link", "hard link"),
    "got/report.html": ("link", "hard link"),
    "got/report.html.part": ("dangling link",),
    "got/plots": ("link",),
    **dict.fromkeys(("got/rounds", "got/rounds/zzz", "got/rounds/000002", "got/rounds/000002.part"), ("link",)),
    **dict.fromkeys(("predictions.csv.part", "grid/grid.json.part"), ("dangling link",)),
}
# Places that matter to a finished run; with the others, `resume` has something to write.
FINISHED = {"got/model.safetensors", "got/report.html", "got/report.html.part", "got/plots", "predictions.csv.part"}


@functools.cache
def cases() -> tuple[Case, ...]:
    """All of them."""
    keys = {f"model calls {name}": ("model.name", words) for name, words in CALLS.items()}
    for key in KEYS:
        make = "Make" if key == "algorithm.name" else "make"
        keys |= {f"{key} is a module {name}": (key, words.format(make=make)) for name, words in MODULES.items()}
    for word in ("native", "linked", "broken", "helped"):
        keys[f"model is a {word} module"] = "model.name", f"{word}:make"
    keys |= {f"words: {name}": pair for name, pair in WORDS.items()}
    made = [Case(name, partial(with_modules, partial(with_key, *pair))) for name, pair in keys.items()]
    made += [
        Case(f"config with {name}", partial(with_modules, partial(with_text, change))) for name, change in FORMS.items()
    ]
    made += [Case(f"data: {name}", partial(data, *given), data=given[0]) for name, given in DATA.items()]
    for place, kinds in PLACES.items():
        made += [Case(f"{kind}: {place}", partial(placed, place, kind), finished=place in FINISHED) for kind in kinds]
    # A run directory may be named through a link, and then resumed and reported on in its own place, but not replaced.
    through = tuple(command for command in COMMANDS if command not in ("resume", "report"))
    # A reader that is not written in Python cannot be stopped from within.
    used, model = ("resume", "evaluate", "load", "overwrite"), "got/model.safetensors"
    made += [
        Case("pickles for models", _pickled_model),
        Case("pickles for checkpoints", _pickled_model, finished=False),
        Case("a log that names code", partial(with_modules, _log_names_code)),
        Case("link: got", partial(placed, "got", "link"), commands=through),
        Case(f"pipe: {model}", partial(placed, model, "pipe"), commands=used, fresh=True),
        Case("link: a project instead of a run", _a_project),
    ]
    for name, changes in {
        "a file above": {"server": {"file": "../../victim/server.safetensors"}},
        "a file by its path": {"server": {"file": "VICTIM/server.safetensors"}},
        "a client's file above": {
            "clients": {"0": {"file": "rounds/../../../victim/server.safetensors", "sha256": ""}}
        },
    }.items():
        made.append(Case(f"checkpoint names {name}", partial(checkpointed, changes), finished=False))
    for name in ("PIL", "jinja2", "matplotlib/__init__", "torch", "json", "sitecustomize"):
        chosen = ("run", "evaluate", "report", "compare", "load")  # a process for each
        made.append(Case(f"shadow: {name}", partial(_own_beside, name), commands=chosen, typed=SHADOW, fresh=True))
    return tuple(made)


# -- playing -----------------------------------------------------------------------------------------------------------


@functools.cache
def templates() -> Path:
    """A folder with a finished run directory and one that was stopped after the second round of three, made once."""

    class Stopped(Exception):
        """As if by a kill."""

    def stop(event: dict[str, Any]) -> None:
        if event["round"] == 3:
            raise Stopped

    folder = Path(tempfile.mkdtemp(prefix="fnrfl-hostile-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    keys = {"algorithm": "scaffold", "clients": 2, "client": {"epochs": 1}, "model": "mlp(hidden=4)"}
    fnrfl.run("digits", out=folder / "finished", rounds=2, **keys)
    with suppress(Stopped):
        fnrfl.run("digits", out=folder / "stopped", rounds=4, checkpoint_every=0, progress=stop, **keys)
    return folder


def lay_out(case: Case, root: Path) -> Box:
    """The hostile folder, a victim's files and a home."""
    box = Box(root)
    for name in ("notes.txt", "project/thesis.tex", "project/.git/HEAD", "project/config.toml", "rounds/zzz/keep.txt"):
        path = box.victim / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("somebody's own words\n")
    (root / "home" / ".config").mkdir(parents=True)
    (root / "home" / ".bashrc").write_text("alias ll='ls -l'\n")
    (root / "cache").mkdir()
    box.work.mkdir()
    shutil.copytree(templates() / ("finished" if case.finished else "stopped"), box.got)
    case.make(box)
    return box


def seen(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything outside the hostile folder: kind, size, hash, time. The cache and the state folder may change."""
    found: dict[str, tuple[object, ...]] = {}
    for place in (root, *sorted(root.rglob("*"))):
        name = str(place.relative_to(root))
        if name.partition("/")[0] in ("work", "cache") or name.startswith("home/.local"):
            continue
        kept = place.lstat()
        content = hashlib.sha256(place.read_bytes()).hexdigest() if stat.S_ISREG(kept.st_mode) else ""
        aside = name in (".", "home")  # folders in which others may appear
        found[name] = (kept.st_mode,) if aside else (kept.st_mode, kept.st_size, content, kept.st_mtime_ns)
    return found


@contextmanager
def inside(box: Box) -> Iterator[None]:
    """The working folder and the environment of a case; nothing of its modules is left afterwards."""
    before, path, here = dict(os.environ), list(sys.path), Path.cwd()
    for name in ("FNRFL_STATE", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    os.environ |= {"HOME": str(box.root / "home"), "FNRFL_DATA": str(box.root / "cache")}
    os.environ.setdefault("MPLCONFIGDIR", FONTS)
    os.chdir(box.work)
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(box.root)):
                del sys.modules[name]
        usercode._allowed.clear()  # the next command is another process
        usercode._imported_files.clear()


class Hung(BaseException):
    """A command does not end; not an Exception, so that nobody makes a sentence of it."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Stop whatever does not end."""

    def stop(number: int, frame: object) -> None:
        raise Hung

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # and again, if something goes on all the same
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def given(case: Case, command: str) -> tuple[int | str, str]:
    """Give a command in this process: its exit code, or what happened instead, and what it said."""
    words = [case.data if word == "DATA" else word for word in case.typed.get(command, COMMANDS[command])]
    try:
        with limited(LIMIT):
            if command == "load":  # Python's: an error of ours is a 2, any other a traceback
                assert fnrfl.load("got").model is not None
                return 0, ""
            got = CliRunner().invoke(cli.app, words)
    except Hung:
        return "hangs", ""
    except FnrflError as error:
        return 2, str(error)
    except Exception as error:
        return "traceback", repr(error)
    if "Unexpected " in got.stderr:
        return "unexpected", got.stderr
    traced = got.exception is not None and not isinstance(got.exception, SystemExit)
    return "traceback" if traced else got.exit_code, got.stderr


def play(case: Case, command: str, root: Path) -> Outcome:
    """Lay a case out, give one command, and look at what has changed."""
    box = lay_out(case, root)
    before = seen(root)
    with inside(box):
        code, said = _in_a_process(case, command) if case.fresh else given(case, command)
    after = seen(root)
    changed = tuple(sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)))
    executed = os.path.lexists(box.canary) or "canary" in changed
    return Outcome(case.name, command, code, executed, changed, " ".join(said.split()))


def _in_a_process(case: Case, command: str) -> tuple[int | str, str]:
    """The same in a process that starts as the installed command does, with its own folder on the path."""
    words = [sys.executable, __file__, "--give", case.name, command]
    source = str(Path(__file__).parent.parent / "src")
    env = os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", source)}
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=3 * LIMIT)
    except subprocess.TimeoutExpired:
        return "hangs", ""
    try:
        code, said = json.loads(done.stdout.splitlines()[-1])
        return code, said
    except (ValueError, IndexError):
        return "traceback", done.stderr


def played(case: Case) -> list[Outcome]:
    """All commands, each with a folder of its own."""
    outcomes = []
    for command in case.commands:
        root = Path(tempfile.mkdtemp(prefix="fnrfl-hostile-"))
        try:
            outcomes.append(play(case, command, root))
        finally:
            shutil.rmtree(root, ignore_errors=True)
    return outcomes


def main(words: list[str]) -> int:
    """Print what every command did with every case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="play the cases whose names contain one of these")
    parser.add_argument("--give", nargs=2, metavar=("CASE", "COMMAND"), help="give one command here and now")
    asked = parser.parse_args(words)
    if asked.give:
        (case,) = [case for case in cases() if case.name == asked.give[0]]
        print(json.dumps(given(case, asked.give[1])))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    chosen = [case for case in cases() if not asked.words or any(word in case.name for word in asked.words)]
    print(f"{'case':48}" + "".join(f"{command:>11}" for command in COMMANDS))
    wrong = 0
    for case in chosen:
        found = {outcome.command: outcome for outcome in played(case)}
        cells = ("-" if command not in found else str(found[command].code) for command in COMMANDS)
        print(f"{case.name:48}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
        for outcome in found.values():
            if not outcome.well:
                wrong += 1
                print(f"    {outcome}")
    print(f"{len(chosen)} cases: {wrong} commands executed, touched or did not end in words")
    return int(wrong > 0)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
