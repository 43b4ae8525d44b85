"""The command line: what it hands on, what it prints where, and how it ends."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from rich.console import Console

from command_line import fnrfl
from fnrfl import __version__, cli
from fnrfl.cli import display
from fnrfl.cli.display import note_on_one_answer
from fnrfl.config import RunConfig, load
from fnrfl.core.errors import ClientError

SUMMARY = {"algorithm": "fedavg", "accuracy": 0.75, "rounds": 2, "leaks": []}


class Outcome:
    """Stands in for what a run returns."""

    run_dir = Path("runs/fake")
    per_site = None
    headline = "accuracy 0.7500 after 2 rounds"
    rounds: ClassVar[list[dict[str, Any]]] = [{}]

    def summary(self) -> dict[str, Any]:
        return SUMMARY


class Runs(ModuleType):
    """Stands in for the module that runs things: two rounds, or whatever `ending` raises after the first."""

    def __init__(self) -> None:
        super().__init__("fnrfl.runs.run")
        self.calls: list[dict[str, Any]] = []
        self.ending: BaseException | None = None

    def run(self, of: RunConfig | Path, *, progress: Callable[[dict[str, Any]], None], **given: Any) -> Outcome:
        self.calls.append({"of": of, **given, "phase": None})
        for t in (1, 2):
            progress({"round": t, "rounds": 2, "accuracy": t / 4, "loss": 1 / t, "seconds": 0.5})
            if self.ending is not None:
                raise self.ending
        return Outcome()

    resume = run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setitem(sys.modules, "fnrfl.runs.run", fake)
    return fake


# ---- run ----


@pytest.mark.parametrize(
    ("words", "config", "given"),
    [
        ("", load(), ("runs/digits-fedavg-0", False, 30.0)),
        ("label-skew seed=3 -o there fnr=on --overwrite --checkpoint-every 5", load("label-skew", ["seed=3", "fnr=on"]),
         ("there", True, 5.0)),
    ],
)  # fmt: skip
def test_run_hands_everything_on(runs: Runs, words: str, config: RunConfig, given: tuple[str, bool, float]) -> None:
    fnrfl("run", *words.split(), code=0)
    out, overwrite, every = given
    how = {"out": Path(out), "overwrite": overwrite, "checkpoint_every": every, "callbacks": [], "phase": None}
    assert runs.calls == [{"of": config, **how}]


@pytest.mark.parametrize(
    "words",
    [("label-skew", "seed=3", "rounds=1"), ("seed=3", "label-skew", "rounds=1"), ("seed=3", "rounds=1", "label-skew")],
)
def test_the_recipe_may_stand_anywhere(runs: Runs, words: tuple[str, ...]) -> None:
    assert fnrfl("run", *words).exit_code == 0
    assert runs.calls[0]["of"] == load("label-skew", ["seed=3", "rounds=1"])


def test_without_a_recipe_all_words_are_overrides(runs: Runs) -> None:
    assert fnrfl("run", "seed=3", "scenario=label-dirichlet(0.5, min=5)").exit_code == 0
    assert runs.calls[0]["of"] == load(None, ["seed=3", "scenario=label-dirichlet(0.5, min=5)"])


def test_a_recipe_may_have_an_equals_sign_in_its_name(runs: Runs, tmp_path: Path) -> None:
    path = tmp_path / "lr=1.toml"
    path.write_text("seed = 4\n")
    assert fnrfl("run", str(path)).exit_code == 0
    assert runs.calls[0]["of"].seed == 4


def test_in_a_pipe_every_round_is_a_plain_line(runs: Runs) -> None:
    got = fnrfl("run", "rounds=2")
    assert got.stdout.splitlines() == [
        "digits: fedavg, digits, mlp, label-dirichlet(0.1), 10 clients, 2 rounds, seed 0",
        "round 1/2  accuracy 0.2500  loss 1.0000  0.5 s",
        "round 2/2  accuracy 0.5000  loss 0.5000  0.5 s",
        f"accuracy 0.7500 after 2 rounds, kept in {Outcome.run_dir}",
    ]
    assert got.stderr == ""


def test_json_leaves_stdout_to_one_object(runs: Runs) -> None:
    got = fnrfl("run", "--json")
    assert json.loads(got.stdout) == SUMMARY
    assert "round 2/2" in got.stderr


def test_quiet_says_nothing(runs: Runs) -> None:
    assert fnrfl("run", "--quiet").output == ""
    assert fnrfl("run", "paper-label-skew", "--quiet").output == ""
    assert json.loads(fnrfl("run", "--quiet", "--json").output) == SUMMARY


def test_a_leak_is_named_at_the_start_and_the_end_and_marked_in_between(runs: Runs) -> None:
    lines = fnrfl("run", "paper-label-skew").stdout.splitlines()
    label = "leak: public_is_test, norm_pass_train_mode, constant_penalty, clean_test_for_fnr"
    assert lines[1] == lines[-1] == label
    assert all(line.endswith("leak") for line in lines if line.startswith("round"))
    assert "leak" not in fnrfl("run", "label-skew").output


def test_notices_of_a_run_go_where_its_rounds_go(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def noticing(config: RunConfig, *, progress: Callable[[dict[str, Any]], None], **given: Any) -> Outcome:
        logging.getLogger("fnrfl").warning("nobody will be refined")
        return Outcome()

    monkeypatch.setattr(runs, "run", noticing)
    assert "note: nobody will be refined" in fnrfl("run").stdout
    assert "note: nobody will be refined" in fnrfl("run", "--json").stderr
    assert fnrfl("run", "--quiet").output == ""


def terminal() -> tuple[io.StringIO, Console]:
    screen = io.StringIO()
    return screen, Console(file=screen, force_terminal=True, width=100, _environ={})


def test_on_a_terminal_there_is_a_bar_that_a_resumed_run_enters_in_the_middle() -> None:
    screen, console = terminal()
    with display.display(console, "leak", load("digits")) as shown:
        shown.round({"round": 7, "rounds": 9, "accuracy": 0.5, "loss": 1.0, "seconds": 1.0})
        shown.round({"round": 8, "rounds": 9, "accuracy": 0.625, "loss": 1.0, "seconds": 1.0})
        shown.phase("refine")
    last = screen.getvalue().rpartition("accuracy")[2]
    assert "0.6250  leak" in last
    assert "8/9" in last
    assert "refine" in last


def test_colours_are_off_in_a_pipe_and_on_in_a_terminal(runs: Runs) -> None:
    assert "\x1b" not in fnrfl("run").output
    screen, console = terminal()
    with display.display(console, "", load("digits")) as shown:
        shown.round({"round": 1, "rounds": 2, "accuracy": 0.5, "loss": 1.0, "seconds": 1.0})
    assert "\x1b[" in screen.getvalue()


# ---- ending badly ----


def test_bad_input_is_one_line_and_exit_code_2(runs: Runs) -> None:
    got = fnrfl("run", "client.lrr=1")
    assert (got.exit_code, got.stdout) == (2, "")
    assert got.stderr == "fnrfl: Unknown key client.lrr: did you mean client.lr?\n"
    assert runs.calls == []


def test_a_failed_run_is_one_line_and_exit_code_3(runs: Runs) -> None:
    runs.ending = ClientError("the loss is nan", client=3, round=1, stage="local")
    got = fnrfl("run", "--quiet")
    assert (got.exit_code, got.stderr) == (3, "fnrfl: client 3, round 1, stage local: the loss is nan\n")


def test_debug_lets_the_error_through(runs: Runs) -> None:
    runs.ending = ClientError("the loss is nan", client=3, round=1, stage="local")
    assert fnrfl("run", "--debug").exception is runs.ending


def test_ctrl_c_says_how_to_go_on(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def begin(config: RunConfig, *, out: Path, **given: Any) -> None:
        if out.name != "not-begun":
            out.mkdir(parents=True)
            (out / "config.toml").write_text(config.to_toml())
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "run", begin)
    got = fnrfl("run", "-o", "my runs/a")
    assert got.exit_code == 130
    assert got.stderr == "fnrfl: stopped. To go on: fnrfl resume 'my runs/a'\n"
    assert fnrfl("run", "label-skew", "seed=3").stderr.endswith("fnrfl resume runs/label-skew-fedavg-3\n")
    assert fnrfl("run", "-o", "not-begun").stderr == "fnrfl: stopped. Nothing was written.\n"


# ---- resume ----


def test_resume_hands_the_folder_on(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(load("paper-label-skew").to_toml())
    got = fnrfl("resume", str(tmp_path))
    assert got.exit_code == 0, got.output
    how = {"trust": False, "callbacks": [], "checkpoint_every": 30.0, "phase": None}
    assert runs.calls == [{"of": tmp_path, **how}]
    assert got.stdout.splitlines()[-1].startswith("leak: public_is_test")


def test_resume_of_something_else_is_refused(runs: Runs, tmp_path: Path) -> None:
    got = fnrfl("resume", str(tmp_path))
    assert got.exit_code == 2
    assert "is not a run directory: it has no config.toml" in got.stderr


# ---- notes ----


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_run_whose_answers_are_all_alike_says_so(form: list[str], tmp_path: Path) -> None:
    small = ["rounds=1", "clients=10", "-o", str(tmp_path / "run"), *form]
    got = fnrfl("run", "digits", "participation=0.1", "scenario=label-classes(1)", *small)  # who trains has one class
    said = got.stderr if form else got.stdout
    assert "note: every test example is answered with class 5: nothing is learned yet. Try more rounds than 1" in said
    assert not form or json.loads(got.stdout)["accuracy"] == pytest.approx(37 / 360)
    again = fnrfl("run", "digits", *small, "--overwrite", "scenario=iid")
    assert again.exit_code == 0 and "every test example" not in again.output


@pytest.mark.parametrize(
    ("confusion", "told"),
    [
        ([[0, 0, 2], [0, 0, 3], [0, 0, 0]], True),  # a class that no test example has
        ([[0, 2, 0], [0, 3, 0], [0, 0, 0]], True),
        ([[0, 2, 0], [0, 3, 0], [1, 0, 0]], False),
        ([[0, 0, 0], [0, 3, 0], [0, 0, 0]], False),  # all examples have this class
        (None, False),
    ],
)
def test_answers_are_alike_if_the_classes_of_the_examples_differ(confusion: Any, told: bool) -> None:
    result: Any = SimpleNamespace(rounds=[{"confusion": confusion}], classes=tuple("abc"), config=load("digits"))
    assert (note_on_one_answer(result) is not None) == told


# ---- help and typos ----


def test_reproduce_says_where_the_papers_tables_are() -> None:
    got = fnrfl("reproduce", "accuracy", "--scale", "tiny", code=2)
    assert "python -m reproduction" in got.stderr and got.stdout == ""


def commands() -> list[tuple[str, ...]]:
    """Every command there is, those of groups included."""
    found = [(info.name or (info.callback and info.callback.__name__) or "",) for info in cli.app.registered_commands]
    for group in cli.app.registered_groups:
        assert group.typer_instance is not None
        assert group.name is not None
        found += [(group.name, str(info.name)) for info in group.typer_instance.registered_commands]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help_with_examples(words: tuple[str, ...], flag: str) -> None:
    got = fnrfl(*words, flag)
    assert got.exit_code == 0
    assert f"\n  fnrfl {' '.join(words)}" in got.stdout and r"\[" not in got.stdout


def test_the_commands_in_the_help_have_whole_sentences() -> None:
    listed = fnrfl("--help").stdout.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) == len(cli.app.registered_commands) + len(cli.app.registered_groups)
    assert all(line.endswith(".") and "..." not in line for line in listed)


@pytest.mark.parametrize(
    ("words", "meant"),
    [("rnu", "run"), ("comprae", "compare"), ("scenario shwo", "show"), ("data lits", "list"), ("data gett", "get")],
)
def test_a_command_that_is_not_there_is_answered_once_with_the_nearest(words: str, meant: str) -> None:
    said = fnrfl(*words.split(), code=2).stderr
    assert f"'{meant}'" in said and said.count("Did you mean") == said.count(words.split()[-1]) == 1


# ---- the process ----


def test_help_lists_and_typos_import_no_more_than_they_need() -> None:
    script = """
import sys
from typer.testing import CliRunner
from fnrfl.cli import app
from fnrfl.cli.listing import SUBJECTS
CliRunner().invoke(app, ["--help"], catch_exceptions=False)
assert not {"pydantic", "numpy", "rich.console"} & {*sys.modules}
lines = [["--help"], ["--version"], ["run", "--help"], ["run", "client.lrr=1"], ["rnu"], ["data", "list"]]
for line in lines + [["list", subject] for subject in SUBJECTS]:
    CliRunner().invoke(app, line, catch_exceptions=False)
    assert "torch" not in sys.modules, line
"""
    subprocess.run([sys.executable, "-c", script], check=True)


MAIN = [sys.executable, "-c", "from fnrfl.cli import main; main()"]


def test_the_command_ends_with_its_exit_code_and_no_traceback() -> None:
    got = subprocess.run([*MAIN, "run", "rounds=0"], capture_output=True, text=True)
    assert (got.returncode, got.stdout) == (2, "")
    assert got.stderr.startswith("fnrfl: rounds = 0 is not allowed") and got.stderr.count("\n") == 1


def test_a_name_that_the_terminal_cannot_show_is_no_error() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    got = subprocess.run([*MAIN, "list", "h\u00e9\u2603"], capture_output=True, env=environment)
    assert got.returncode == 2 and b'"h\xe9\\u2603"' in got.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    process = subprocess.Popen([*MAIN, "list", "keys"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_example_fits_into_little_memory() -> None:
    # The peak of this program alone: that of `resource` begins with the memory of whoever started it.
    script = """
import fnrfl, pathlib
fnrfl.run(fnr="on", out=None)
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
print(1024 * int(status["VmHWM"].split()[0]))
"""
    got = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert int(got.stdout) < 500e6


def test_the_version_is_the_packages() -> None:
    assert fnrfl("--version").stdout == f"fnrfl {__version__}\n"
