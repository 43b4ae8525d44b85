"""What commands write for people: not over a run, whole or not at all, and without a home folder too."""

from __future__ import annotations

import csv
import errno
import io
import os
import pwd
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from fnrfl.cli import app
from fnrfl.config import load
from fnrfl.core.errors import ConfigError
from fnrfl.data.datasets import load as load_data
from fnrfl.data.sources.entry import cache_dir
from fnrfl.results.compare import compare, grid
from fnrfl.results.report import report
from fnrfl.results.statistics import Difference
from fnrfl.rundir import files
from fnrfl.rundir.outputs import check_output, write_output
from fnrfl.runs import run as runs
from fnrfl.runs.predict import predict

QUICK = ["rounds=1", "client.epochs=1", "clients=3"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    runs.run(load(None, QUICK), out=folder / "run")
    compare(grid(None, QUICK, [], [0]), folder / "grid")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "file",
    [
        "run/config.toml",
        "run/model.safetensors",
        "link/events.jsonl",
        "run/rounds/000001/server.safetensors",
        "run/partition.json",
        "run/checkpoint.json",
        "run/rounds",
        "grid/comparison.csv",
        "grid/grid.json",
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        "predict run digits -o FILE",
        "scenario save FILE iid",
        "scenario show iid --png FILE",
        "report run -o FILE",
    ],
)
def test_a_file_of_a_run_is_not_written_over(words: str, file: str, here: Path) -> None:
    os.symlink("run", "link")
    before = contents(here)
    got = command(*words.replace("FILE", file).split())
    assert got.exit_code == 2 and file.rpartition("/")[2] in got.stderr
    assert "is a file" in got.stderr and "Choose another" in got.stderr
    assert contents(here) == before


@pytest.mark.parametrize(
    ("data", "out", "said"),
    [
        ("new.npz", "new.npz", "is the data that is read"),
        ("new.npz", "sites/../new.npz", "is the data that is read"),
        ("link.npz", "new.npz", "is the data that is read"),
        ("sites", "sites/A.npz", "would lie in sites"),
        ("sites/", "elsewhere/guesses.csv", "would lie in sites/"),
    ],
)
def test_data_that_is_read_is_not_written_over_nor_added_to(data: str, out: str, said: str, here: Path) -> None:
    digits = load_data("digits").test
    os.mkdir("sites")
    for name in ("new.npz", "sites/A.npz", "sites/B.npz"):
        np.savez(name, x=digits.x[:5].numpy(), y=digits.y[:5].numpy())
    os.symlink("new.npz", "link.npz")
    os.symlink("sites", "elsewhere")
    before = contents(here)
    got = command("predict", "run", data, "-o", out)
    assert got.exit_code == 2 and said in got.stderr and "Choose another" in got.stderr
    assert contents(here) == before


def test_other_files_may_be_written_into_a_run(here: Path) -> None:
    for words in (
        ("predict", "run", "digits", "-o", "run/guesses.csv"),
        ("predict", "run", "digits", "-o", "run/guesses.csv", "--overwrite"),
        ("scenario", "save", "run/split.json", "iid"),
        ("report", "run", "--no-plots"),
    ):
        assert command(*words).exit_code == 0
    assert check_output(Path("config.toml")) == Path("config.toml")  # no run is here


def test_predictions_replace_a_file_only_if_that_is_asked_for(here: Path) -> None:
    Path("notes.txt").write_text("mine")
    os.symlink("notes.txt", "to-notes")
    os.symlink("nowhere", "dangling")
    for name in ("notes.txt", "to-notes", "dangling"):
        got = command("predict", "run", "digits", "-o", name)
        assert got.exit_code == 2 and name in got.stderr and "--overwrite" in got.stderr
    assert command("predict", "run", "digits", "-o", "to-notes", "--overwrite").exit_code == 2  # a link stays one
    assert Path("notes.txt").read_text() == "mine" and Path("to-notes").is_symlink()
    assert command("predict", "run", "digits", "-o", "notes.txt", "--overwrite").exit_code == 0
    assert Path("notes.txt").read_text().count("\n") > 100


def test_predictions_go_into_a_device(here: Path) -> None:
    try:
        os.mknod("null", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        with open("null", "wb"):
            pass
    except (OSError, AttributeError) as error:
        pytest.skip(f"no device can be made here ({error})")
    for more in ((), ("--overwrite",)):
        assert command("predict", "run", "digits", "-o", "null", *more).exit_code == 0
        assert stat.S_ISCHR(os.lstat("null").st_mode)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_predictions_go_into_a_pipe(link: bool, more: tuple[str, ...], here: Path) -> None:
    os.mkfifo("pipe")
    if link:
        os.symlink("pipe", "to-pipe")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(Path("pipe").read_bytes)
        asked = command("predict", "run", "digits", "-o", "to-pipe" if link else "pipe", *more)
        if asked.exit_code:  # let the reader go
            os.close(os.open("pipe", os.O_WRONLY))
    assert asked.exit_code == 0, asked.stderr
    assert stat.S_ISFIFO(os.stat("pipe").st_mode) and os.path.islink("to-pipe") == link
    assert got.result().count(b"\n") > 100


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("elsewhere", path)], ids=["pipe", "link"])
def test_what_nobody_has_named_is_not_written_into_nor_replaced(make: Callable[[str], None], here: Path) -> None:
    Path("run/report.html").unlink(missing_ok=True)
    make("run/report.html")
    before = os.lstat("run/report.html")
    got = command("report", "run", "--no-plots")
    assert got.exit_code == 2 and "report.html" in got.stderr
    assert os.path.samestat(os.lstat("run/report.html"), before) and not Path("run/elsewhere").exists()


def test_a_full_disk_leaves_no_part_of_a_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(contents(here))

    def full(path: Path, content: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "write_new", full)
    for words in (
        ("report", "run"),
        ("report", "run", "--no-plots"),
        ("scenario", "save", "split.json", "iid"),
        ("scenario", "show", "iid", "--png", "split.png"),
        ("predict", "run", "digits", "-o", "guesses.csv"),
    ):
        got = command(*words)
        assert got.exit_code == 3 and "No space left" in got.stderr, words
    with pytest.raises(OSError, match="No space"):
        compare(grid(None, QUICK, [], [0]), "grid")
    assert set(contents(here)) == before


def test_a_file_keeps_its_old_text_if_the_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    write_output(path, "old \udcff")
    assert path.read_text() == "old \\udcff"

    def refuse(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(KeyboardInterrupt):
        write_output(path, b"new")
    assert [found.name for found in tmp_path.iterdir()] == ["page.html"] and path.read_text() == "old \\udcff"


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*page\.html'"):
        write_output(tmp_path / "page.html", "new")
    if Path("/dev/full").exists():
        with pytest.raises(ConfigError, match="/dev/full is a file"):
            check_output(Path("/dev/full/page.html"))


def test_names_that_are_no_utf8_are_reported_as_they_are(here: Path) -> None:
    odd = Path(os.fsdecode(b"odd-\xff"))
    (here / "run").rename(odd)
    report([odd], odd / "report.html", plots=False)
    assert "odd-\\udcff" in (odd / "report.html").read_text()
    assert "is not valid UTF-8" in command("run", os.fsdecode(b"name=\xff"), "--dry-run").stderr


@pytest.mark.skipif(os.name == "nt", reason="there is no list of users to be missing from")
def test_without_a_home_folder_everything_still_works(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "FNRFL_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert cache_dir() == Path("data")
    for words in (("doctor",), ("data", "list"), ("run", "--dry-run"), ("run", *QUICK)):
        got = command(*words)
        assert got.exit_code == 0, got.output
    assert "data get" in command("run", "label-skew", "--dry-run").output
    with pytest.raises(ConfigError):
        check_output(Path("run/config.toml"))
    got = command("run", "dataset=~nobody-of-this-name/x.csv")
    assert got.exit_code == 2 and "Unexpected" not in got.stderr


FORMULAS = ("=1+1", "+cmd|x", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "\uff1d1", "a\r=1")


def test_a_spreadsheet_runs_no_cell_that_others_have_named(tmp_path: Path) -> None:
    """Names of classes, of clients, of a column and its cells are text; numbers stay numbers, below 0 too."""
    classes = [*FORMULAS, "-1", "healthy"]
    x, y = np.random.default_rng(0).random((80, 3)), np.arange(80) % len(classes)
    np.savez(tmp_path / "it.npz", x=x, y=y, classes=np.array(classes))
    result = runs.run(load(None, [*QUICK, f"dataset={tmp_path / 'it.npz'}", "model=mlp", "scenario=iid"]), out=None)
    asked = predict(result, x)
    shown = replace(
        asked, labels=classes, rows=classes, ids={"=id": classes}, probabilities=asked.probabilities[: len(classes)]
    )
    header, *lines = csv.reader(io.StringIO(shown.to_csv(), newline=""))
    assert header[1] == "'=id"
    assert [line[header.index("label")] for line in lines] == [*(f"'{name}" for name in FORMULAS[:-1]), *classes[-3:]]
    numbers = [float(cell) for line in lines for cell in line[3:]]
    assert len(numbers) == len(classes) ** 2
    assert not any(cell.startswith(("=", "@", "\t", "\r", "+c", "-2+")) for line in (header, *lines) for cell in line)


def test_a_table_of_a_comparison_has_no_formula_and_numbers_as_they_are(made: Path) -> None:
    found = compare(grid(None, QUICK, [], [0]), made / "grid")
    (row,) = found.rows
    named = replace(
        found, rows=(replace(row, group="=HYPERLINK(1)", difference=Difference(1, -0.5, None, None, None, None)),)
    )
    (line,) = csv.DictReader(io.StringIO(named.to_csv()))
    assert (line["group"], line["difference"]) == ("'=HYPERLINK(1)", "-0.5")
