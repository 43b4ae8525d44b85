"""The run directory: what is replaced, what is kept, and that nothing outside it is written or removed."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fnrfl
from faults import Crash, crashing, snapshot
from fnrfl import cli
from fnrfl.config import RunConfig, load
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.rundir import directory, events, files, record
from fnrfl.rundir.lock import alone, lock_file
from fnrfl.rundir.places import choose_run_dir, is_of
from fnrfl.runs import run as runs
from fnrfl.runs.result import Result
from fnrfl.runs.run import resume, run

SMALL: dict[str, Any] = {
    "model": "mlp(hidden=8)",
    "rounds": 2,
    "clients": 3,
    "algorithm": "scaffold",
    "client": {"epochs": 1},
    "engine": {"name": "loop", "threads": 1},
}


def configured(**changes: Any) -> RunConfig:
    return load("digits", SMALL | changes)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return configured()


@pytest.fixture(scope="module")
def other() -> RunConfig:
    """A run that differs from the one that it replaces."""
    return configured(seed=7)


@pytest.fixture(scope="module")
def wanted(other: RunConfig) -> Result:
    return run(other, out=None)


@pytest.fixture(scope="module")
def original(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A finished run; not to be touched."""
    return run(config, out=tmp_path_factory.mktemp("original") / "run")


@pytest.fixture
def run_dir(original: Result, tmp_path: Path) -> Path:
    """A finished run, to do anything to."""
    assert original.run_dir is not None
    (tmp_path / "runs").mkdir()
    return Path(shutil.copytree(original.run_dir, tmp_path / "runs" / "run"))


@pytest.fixture(scope="module")
def halfway(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first round, with a checkpoint; not to be touched."""
    folder = tmp_path_factory.mktemp("halfway") / "run"

    def stop(event: events.Event) -> None:
        raise Crash

    with pytest.raises(Crash):
        run(config, out=folder, progress=stop, checkpoint_every=0)
    return folder


@pytest.fixture
def stopped(halfway: Path, tmp_path: Path) -> Path:
    """A run that was stopped, to do anything to."""
    return Path(shutil.copytree(halfway, tmp_path / "stopped"))


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody else's, which is the same afterwards."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("thesis.tex", "server.safetensors", "client-0.safetensors", "config.toml"):
        (folder / name).write_text("three years of work")
    before = snapshot(folder)
    yield folder
    assert snapshot(folder) == before


# -- replacing a run ---------------------------------------------------------------------------------------------------


def assert_refused(call: Callable[[], object], folder: Path, *words: str) -> None:
    """All of these words are in the error, and nothing below the folder has changed."""
    before = snapshot(folder)
    with pytest.raises(ConfigError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value
    assert snapshot(folder) == before


def test_a_project_with_a_config_of_its_own_is_not_replaced(config: RunConfig, tmp_path: Path) -> None:
    for name in ("config.toml", "thesis.tex", "events.jsonl", "partition.json"):
        (tmp_path / name).write_text('{"round": 1}\n')
    assert_refused(lambda: run(config, out=tmp_path, overwrite=True), tmp_path, "not a run")


def test_the_old_run_keeps_its_name_until_the_first_checkpoint(
    other: RunConfig, wanted: Result, run_dir: Path, original: Result
) -> None:
    hashes = []

    def look(event: events.Event) -> None:
        hashes.append(json.loads((run_dir / "events.jsonl").open().readline())["config_sha256"])

    got = run(other, out=run_dir, overwrite=True, progress=look, checkpoint_every=1e9)
    assert hashes == [original.config.sha256, got.config.sha256]  # the last round ends with a checkpoint
    assert runs.load(run_dir).model_sha256 == got.model_sha256 == wanted.model_sha256
    assert [p.name for p in run_dir.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("failure", [FnrflError("no"), KeyboardInterrupt(), OSError(28, "full")], ids=repr)
def test_a_new_run_that_fails_in_its_first_round_leaves_the_old_one(
    other: RunConfig, run_dir: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def failing(*_: object) -> None:
        raise failure

    monkeypatch.setattr(runs, "_train_round", failing)
    before = snapshot(run_dir.parent)
    with pytest.raises(type(failure)):
        run(other, out=run_dir, overwrite=True)
    assert snapshot(run_dir.parent) == before


def test_files_that_are_not_the_runs_are_kept_and_named(
    other: RunConfig, wanted: Result, run_dir: Path, outside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / "notes.txt").write_text("of the old run")
    (run_dir / "report.html").write_text("by fnrfl report")
    (run_dir / "plots").mkdir()
    for name in ("convergence.png", "split-2.svg", "mine.png"):
        (run_dir / "plots" / name).write_text("a figure")
    shutil.copytree(run_dir, run_dir / "nested")
    (run_dir / "rounds" / ".DS_Store").write_text("")
    (run_dir / "rounds" / "elsewhere").symlink_to(outside)
    (run_dir / "data").symlink_to(outside)
    nested = snapshot(run_dir / "nested")

    assert run(other, out=run_dir, overwrite=True).model_sha256 == wanted.model_sha256
    aside = run_dir.with_name("run.replaced")
    assert sorted(p.name for p in run_dir.parent.iterdir()) == ["run", "run.replaced"]
    assert sorted(p.name for p in run_dir.iterdir()) == sorted([*directory.WRITTEN[:5], "rounds"])
    assert sorted(p.name for p in aside.iterdir()) == ["data", "nested", "notes.txt", "plots", "rounds"]
    assert [p.name for p in (aside / "plots").iterdir()] == ["mine.png"]
    assert sorted(p.name for p in (aside / "rounds").iterdir()) == [".DS_Store", "elsewhere"]
    assert snapshot(aside / "nested") == nested
    assert "run.replaced" in caplog.text and "notes.txt" in caplog.text

    (run_dir / "again.txt").write_text("a second time")
    run(other, out=run_dir, overwrite=True)
    assert (run_dir.with_name("run.replaced-2") / "again.txt").exists()


def test_the_figures_of_a_report_are_known() -> None:
    from fnrfl.results.report.plots import FIGURES, OF_THE_PAGE

    assert set(directory.FIGURE_NAMES) == {*FIGURES, *OF_THE_PAGE}


def test_a_link_to_a_run_is_not_replaced(other: RunConfig, run_dir: Path, tmp_path: Path) -> None:
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to(run_dir)
    dangling.symlink_to(tmp_path / "nowhere")
    assert_refused(lambda: run(other, out=link, overwrite=True), tmp_path, "is a link to", "runs/run.", "--out")
    for overwrite in (False, True):
        assert_refused(lambda: run(other, out=dangling, overwrite=overwrite), tmp_path, "dangling")  # noqa: B023
    assert link.is_symlink() and not (tmp_path / "nowhere").exists()


def test_what_cannot_replace_a_run_leaves_it_alone(config: RunConfig, other: RunConfig, run_dir: Path) -> None:
    with alone(run_dir):
        assert_refused(lambda: run(other, out=run_dir, overwrite=True), run_dir, "in use by process", str(os.getpid()))
    assert_refused(lambda: run(config, out=run_dir), run_dir.parent, "exists already", "--overwrite")
    too_many = configured(clients=800)  # cannot be built
    assert_refused(lambda: run(too_many, out=run_dir, overwrite=True), run_dir.parent, "800")
    assert [p.name for p in run_dir.parent.iterdir()] == ["run"]


def test_runs_that_start_at_once_get_names_of_their_own(
    config: RunConfig, original: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: run(config), range(4)))
    assert {str(one.run_dir) for one in got} == {
        "runs/digits-scaffold-0", "runs/digits-scaffold-0-2", "runs/digits-scaffold-0-3", "runs/digits-scaffold-0-4",
    }  # fmt: skip
    assert {one.model_sha256 for one in got} == {original.model_sha256}
    assert sorted(p.name for p in Path("runs").iterdir()) == sorted(one.run_dir.name for one in got if one.run_dir)


def test_a_crowd_that_makes_runs_at_once_shares_no_folder_and_leaves_none_behind(tmp_path: Path) -> None:
    def make(maker: int) -> str:
        with ExitStack() as stack:
            names = (turn / f"run-{number}" for number in itertools.count())
            made = directory.create_first(stack, names, CONTENTS | {"config.toml": str(maker)})
            made.settle()
            assert (made.name / "config.toml").read_text() == str(maker)
        return made.name.name

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for turn in (tmp_path / str(number) for number in range(60)):
            with ThreadPoolExecutor(8) as pool:
                got = sorted(pool.map(make, range(8)))
            assert got == [f"run-{number}" for number in range(8)] == sorted(path.name for path in turn.iterdir())
    finally:
        sys.setswitchinterval(switch)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_took_the_name_in_the_meantime_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    run_dir, write = tmp_path / "run", files.write

    def write_last(path: Path, content: str | bytes) -> None:
        write(path, content)
        if path.name == "events.jsonl":
            pretend_run(run_dir, "the other")

    monkeypatch.setattr(files, "write", write_last)
    with pytest.raises(directory.Taken), directory.created(run_dir, CONTENTS, overwrite=overwrite) as made:
        made.settle()
    assert (run_dir / "config.toml").read_text() == "the other"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# -- a kill while a run is replaced ------------------------------------------------------------------------------------

CONTENTS = {"config.toml": "new", "partition.json": "{}", "events.jsonl": "{}\n"}
HEADER = json.dumps({"config_sha256": "0", "versions": {"fnrfl": "0"}}) + "\n"


def pretend_run(folder: Path, text: str) -> Path:
    """A folder that passes for a run directory, made without training."""
    folder.mkdir(parents=True)
    for name, content in (("config.toml", text), ("partition.json", "{}"), ("events.jsonl", HEADER)):
        (folder / name).write_text(content)
    (folder / "rounds" / "000001").mkdir(parents=True)
    (folder / "rounds" / "000001" / "server.safetensors").write_text(text)
    return folder


def replace_by_new(run_dir: Path) -> None:
    with directory.created(run_dir, CONTENTS | {"events.jsonl": HEADER}, overwrite=True) as made:
        (made.path / "checkpoint.json").write_text("{}")
        made.settle()


@pytest.mark.parametrize("foreign", [False, True], ids=["clean", "foreign"])
def test_a_crash_in_any_operation_leaves_the_old_or_the_new_run(tmp_path: Path, foreign: bool) -> None:
    seen = set()
    for operations in itertools.count():
        run_dir = pretend_run(tmp_path / f"{operations}" / "run", "old")
        if foreign:
            (run_dir / "notes.txt").write_text("mine")
        try:
            with crashing(operations):
                replace_by_new(run_dir)
            break
        except Crash:
            pass
        directory.recover(run_dir)
        assert directory.is_run(run_dir)
        now = (run_dir / "config.toml").read_text()
        seen.add(now)
        if now == "old":
            assert (run_dir / "rounds" / "000001" / "server.safetensors").read_text() == "old"
        else:
            assert (run_dir / "checkpoint.json").exists()
        replace_by_new(run_dir)  # the next command tidies up
        left = sorted(p.name for p in run_dir.parent.iterdir())
        assert left == (["run", "run.replaced"] if foreign else ["run"])
    assert seen == {"old", "new"} and operations > 12


failures = pytest.mark.parametrize("failure", [OSError("no space left"), KeyboardInterrupt()], ids=["disk", "ctrl-c"])


@failures
@pytest.mark.parametrize("where", ["config.toml", "partition.json", "events.jsonl"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_a_directory_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, failure: BaseException, overwrite: bool
) -> None:
    """And a run that was to be replaced is still there if its replacement could not be made."""
    if overwrite:
        pretend_run(tmp_path / "run", "old")
    before = snapshot(tmp_path)

    def write(path: Path, content: Any, original: Callable[..., None] = files.write) -> None:
        if path.name == where:
            raise failure
        original(path, content)

    monkeypatch.setattr(files, "write", write)
    with pytest.raises(type(failure)), directory.created(tmp_path / "run", CONTENTS, overwrite=overwrite):
        pass
    assert snapshot(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["run"] if overwrite else [])


@failures
def test_the_old_run_is_there_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    run_dir = pretend_run(tmp_path / "run", "old")
    before, raised = snapshot(tmp_path), [failure]

    def rename(path: Path, target: Path, original: Callable[[Path, Path], Path] = Path.rename) -> Path:
        if Path(target) == run_dir and raised:
            raise raised.pop()
        return original(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(type(failure)):
        replace_by_new(run_dir)
    assert snapshot(tmp_path) == before


def lose_the_name(run_dir: Path) -> Path:
    """What a kill leaves between two renames, where the system cannot swap two names."""
    return run_dir.rename(run_dir.with_name(f".{run_dir.name}.fnrfl-old"))


def test_every_command_gives_a_run_its_name_back(
    config: RunConfig, run_dir: Path, original: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (("resume", str(run_dir)), ("report", str(run_dir), "--no-plots"), ("report", str(run_dir.parent))):
        lose_the_name(run_dir)
        got = CliRunner().invoke(cli.app, [*words, "-q"])
        assert got.exit_code == 0, got.output
        assert directory.is_run(run_dir)
    monkeypatch.chdir(run_dir.parent.parent)
    run_dir.rename(config.run_dir)
    lose_the_name(config.run_dir)
    assert run(config).run_dir == config.run_dir.with_name("digits-scaffold-0-2")
    run(configured(seed=7), out=config.run_dir.with_name("digits-scaffold-0-2"), overwrite=True)
    assert runs.load(config.run_dir).model_sha256 == original.model_sha256


def test_a_run_that_is_half_removed_is_no_run(tmp_path: Path) -> None:
    """A kill while the old run is removed must not bring half of it back."""
    whole = len(list(directory.written(pretend_run(tmp_path / "run", "old"))))
    for operations in range(2, whole + 1):
        run_dir = pretend_run(tmp_path / f"{operations}" / "run", "old")
        with pytest.raises(Crash), crashing(operations):
            directory._discard(run_dir, run_dir)
        assert not directory.is_run(run_dir)


# -- strange files in a run; for links see hostile.py ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.toml", "events.jsonl", "partition.json", "checkpoint.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_file_of_a_run_that_is_no_plain_file_is_refused(stopped: Path, name: str, kind: str) -> None:
    (stopped / name).rename(stopped / "aside")
    make = {"link": lambda path: path.symlink_to("aside"), "pipe": os.mkfifo, "folder": Path.mkdir}[kind]
    make(stopped / name)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        resume(stopped)


def test_files_that_a_file_manager_leaves_are_in_nobodys_way(stopped: Path, original: Result) -> None:
    for folder in (stopped, stopped / "rounds", stopped / "rounds" / "000001"):
        (folder / ".DS_Store").write_text("")
    (stopped / "rounds" / "000002").mkdir()  # the name that the next checkpoint would have
    (stopped / "rounds" / "000002" / "Thumbs.db").write_text("")
    assert resume(stopped, checkpoint_every=0).model_sha256 == original.model_sha256
    assert (stopped / "rounds" / "000002" / "Thumbs.db").exists()


def test_a_log_that_is_removed_during_a_run_is_said(config: RunConfig, tmp_path: Path) -> None:
    def remove(event: events.Event) -> None:
        (tmp_path / "run" / "events.jsonl").unlink(missing_ok=True)

    with pytest.raises(FnrflError, match=r"events\.jsonl has been removed"):
        run(config, out=tmp_path / "run", progress=remove)


# -- contents ----------------------------------------------------------------------------------------------------------


def flip_a_bit(*parts: str) -> Callable[[Path], None]:
    def flip(run_dir: Path) -> None:
        content = bytearray(run_dir.joinpath(*parts).read_bytes())
        content[-3] ^= 1
        run_dir.joinpath(*parts).write_bytes(content)

    return flip


def edit_index(changes: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def edit(run_dir: Path) -> None:
        index = json.loads((run_dir / "checkpoint.json").read_text())
        (run_dir / "checkpoint.json").write_text(json.dumps(index | changes(index)))

    return edit


def swap_clients(run_dir: Path) -> None:
    one, two = (run_dir / "rounds" / "000001" / f"client-{client}.safetensors" for client in (0, 1))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def edit_log(run_dir: Path) -> None:
    header, *lines = events.read_events(run_dir / "events.jsonl")
    lines[0]["accuracy"] = 0.9976
    (run_dir / "events.jsonl").write_bytes(b"".join(map(events.line, [header, *lines])))


def link_server(run_dir: Path) -> None:
    path = run_dir / "rounds" / "000001" / "server.safetensors"
    path.rename(run_dir / "aside")
    path.symlink_to(run_dir / "aside")


def edit_config(run_dir: Path) -> None:
    path = run_dir / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.05", "lr = 0.5", 1))


def without_end(name: str) -> Callable[[Path], object]:
    return lambda run_dir: (run_dir / name).write_text("[" * 100_000 + "\n")


Damages = dict[str, tuple[Callable[[Path], object], tuple[str, ...]]]
STOPPED: Damages = {
    **{
        f"a bit of {name}": (flip_a_bit("rounds", "000001", f"{name}.safetensors"), (f"{name}.safetensors", "sha256"))
        for name in ("server", "client-0", "client-2")
    },
    "swapped clients": (swap_clients, ("client-", "sha256")),
    "clients exchanged in the index": (
        edit_index(lambda index: {"clients": {"0": index["clients"]["1"], "1": index["clients"]["0"]}}),
        ("checkpoint.json", "client-1.safetensors"),
    ),
    "an index without the log's hash": (edit_index(lambda _: {"log": None}), ("checkpoint.json", "damaged")),
    "an index before the first round": (edit_index(lambda _: {"round": -1}), ("checkpoint.json", "round")),
    "a link to the server's state": (link_server, ("server.safetensors", "is a link")),
    "an edited log": (edit_log, ("events.jsonl", "sha256")),
    "a log without end": (without_end("events.jsonl"), ("events.jsonl", "damaged")),
    "an index without end": (without_end("checkpoint.json"), ("checkpoint.json", "damaged")),
}
ENDED: Damages = {
    "an edited log": (edit_log, ("events.jsonl", "sha256")),
    "an edited model": (flip_a_bit("model.safetensors"), ("model.safetensors", "sha256")),
    "an edited config": (edit_config, ("config.toml", "client.lr")),
}


@pytest.mark.parametrize("damage", STOPPED)
def test_a_stopped_run_that_is_not_as_it_was_written_is_refused(stopped: Path, damage: str) -> None:
    change, words = STOPPED[damage]
    change(stopped)
    assert_refused(lambda: resume(stopped), stopped, *words)


@pytest.mark.parametrize("damage", ENDED)
def test_a_finished_run_that_is_not_as_it_was_written_is_refused(run_dir: Path, damage: str) -> None:
    change, words = ENDED[damage]
    change(run_dir)
    assert_refused(lambda: resume(run_dir), run_dir, *words)


def test_a_report_does_not_show_an_edited_log(run_dir: Path) -> None:
    from fnrfl.results.report.load import load_runs as read_report

    edit_log(run_dir)
    assert_refused(lambda: read_report([run_dir]), run_dir, "sha256")


def test_a_config_whose_text_is_arranged_in_another_way_is_the_same(stopped: Path, original: Result) -> None:
    path = stopped / "config.toml"
    path.write_text("# a comment\n" + path.read_text().replace(" = ", "="))
    assert resume(stopped).model_sha256 == original.model_sha256


def test_going_on_with_other_versions_is_noted(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = runs.versions()
    monkeypatch.setattr(runs, "versions", lambda: now | {"torch": "99.0", "fnrfl": "98.0"})
    resume(stopped)
    assert f"torch {torch.__version__}" in caplog.text and "goes on with fnrfl 98.0, torch 99.0" in caplog.text


def test_another_split_is_refused(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of numpy may draw another one from the same seed."""
    from fnrfl.data.partition.value import Partition

    monkeypatch.setattr(Partition, "sha256", "1" * 64)
    assert_refused(lambda: resume(stopped), stopped, "split")


def test_what_a_run_writes_has_the_keys_of_the_schema(run_dir: Path) -> None:
    header, *rounds = events.read_events(run_dir / "events.jsonl")
    assert header.keys() <= record.RunHeader.__annotations__.keys()
    assert list(record.checked_rounds(run_dir, rounds, json.loads((run_dir / "partition.json").read_text()))) == rounds


# -- names -------------------------------------------------------------------------------------------------------------

QUICK = ["rounds=1", "client.epochs=1", "clients=4"]
STEADY = """
from dataclasses import dataclass
from fnrfl.algorithms.fedavg import FedAvg

@dataclass(frozen=True)
class Steady(FedAvg):
    pass
"""


def command(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["run", *QUICK, *words])


def folders() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


def test_a_folder_is_named_by_method_fnr_and_seed(tmp_cwd: Path) -> None:
    assert load().run_dir == Path("runs/digits-fedavg-0")
    assert load(None, ["fnr=on", "seed=3", "name=Mine", "algorithm=moon"]).run_dir == Path("runs/Mine-moon-fnr-3")
    (tmp_cwd / "steady_method.py").write_text(STEADY)
    assert load(None, ["algorithm=steady_method:Steady"]).run_dir == Path("runs/digits-steady-method-steady-0")


def test_python_picks_a_free_name(tmp_cwd: Path) -> None:
    keys: dict[str, Any] = {"rounds": 1, "clients": 4, "client": {"epochs": 1}}
    first, second = (fnrfl.run("digits", **keys) for _ in range(2))
    assert (first.run_dir, second.run_dir) == (Path("runs/digits-fedavg-0"), Path("runs/digits-fedavg-0-2"))
    assert fnrfl.run("digits", seed=1, fnr="on", **keys).run_dir == Path("runs/digits-fedavg-fnr-1")
    replaced = fnrfl.run("digits", overwrite=True, **keys)
    assert replaced.run_dir == Path("runs/digits-fedavg-0")
    assert folders() == ["digits-fedavg-0", "digits-fedavg-0-2", "digits-fedavg-fnr-1"]


def test_a_name_is_taken_by_whatever_is_there(tmp_cwd: Path) -> None:
    config = load()
    (tmp_cwd / "runs").mkdir()
    (tmp_cwd / "runs/digits-fedavg-0").touch()
    os.symlink("nowhere", "runs/digits-fedavg-0-2")
    assert choose_run_dir(config, None, overwrite=False) == Path("runs/digits-fedavg-0-3")


def test_the_command_picks_a_free_name_unless_the_same_run_is_unfinished(tmp_cwd: Path) -> None:
    assert command().exit_code == 0
    again = command()  # finished: another one
    assert again.exit_code == 0 and "runs/digits-fedavg-0-2" in again.stdout
    (tmp_cwd / "runs/digits-fedavg-0-2/model.safetensors").unlink()
    refused = command()
    assert refused.exit_code == 2
    assert all(word in refused.stderr for word in ("not finished", "`fnrfl resume runs/digits-fedavg-0-2`", "--out"))
    other = command("client.lr=0.2")  # another config: nothing to resume
    assert other.exit_code == 0 and "runs/digits-fedavg-0-3" in other.stdout
    assert command("--overwrite").exit_code == 0
    assert folders() == ["digits-fedavg-0", "digits-fedavg-0-2", "digits-fedavg-0-3"]


def test_a_given_folder_that_is_taken_is_refused_with_advice_that_fits(tmp_cwd: Path) -> None:
    (tmp_cwd / "thesis").mkdir()
    assert "thesis exists already and is not a run" in command("-o", "thesis").stderr
    assert command("-o", "run").exit_code == 0
    finished, other = command("-o", "run"), command("-o", "run", "seed=1")
    assert finished.exit_code == other.exit_code == 2
    assert "run exists already: this run is finished there" in finished.stderr
    assert "with a run of another config" in other.stderr and "resume" not in finished.stderr + other.stderr
    (tmp_cwd / "run/model.safetensors").unlink()
    assert "Go on with `fnrfl resume run`" in command("-o", "run").stderr


def test_a_run_of_an_older_version_without_some_keys_is_the_same_run(tmp_cwd: Path) -> None:
    config = load(None, QUICK)
    runs.run(config, out="run")
    written = tmp_cwd / "run/config.toml"
    assert is_of(config, tmp_cwd / "run")
    written.write_text(written.read_text().replace('nonfinite = "fail"\n', ""))
    assert is_of(config, tmp_cwd / "run") and not is_of(load(), tmp_cwd / "run")
    written.write_text("[")
    assert not is_of(config, tmp_cwd / "run")


@pytest.mark.parametrize("words", [(), ("-o", "runs/digits-fedavg-0")], ids=["by default", "--out"])
def test_a_run_that_another_process_is_at_work_on_is_called_so(words: tuple[str, ...], tmp_cwd: Path) -> None:
    assert command().exit_code == 0
    begun = tmp_cwd / "runs/digits-fedavg-0"
    (begun / "model.safetensors").unlink()
    with alone(begun):
        told = command(*words).output
        assert f"digits-fedavg-0 is in use by process {os.getpid()}." in told and "fnrfl resume" not in told
    lock_file(begun).write_text("1\n")  # as a run leaves it that was killed
    assert "Go on with `fnrfl resume runs/digits-fedavg-0`" in command(*words).output.replace("\n", " ")
