"""Whatever is typed, the answer is a result or a sentence: no traceback, no hang, nothing left behind."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.testing import CliRunner

from fnrfl import cli
from fnrfl.config import RunConfig, describe_keys, load, registry
from fnrfl.core.errors import ConfigError
from fnrfl.data.sources import fashion_mnist, fetching
from fnrfl.runs import run as runs
from fnrfl.runs.setup.build import build

SECONDS = 20.0  # for one command; all of them take a fraction of one on a machine that is not busy

KEYS = {key.name: key for key in describe_keys()}
NUMBERS = ("0", "1", "2", "3", "5", "50", "0.1", "0.3", "0.5", "0.9", "1.5", "1e-3", "1e-9", "1e9")
SIGNS = """
    == = ' " \\ # [ ] [] [[]] {} () , + - -- / nan inf -inf -1 0 1 1.0 1e999 1e-999 0x10 1_000 1979-05-27 true on off
    none null auto ü☃ <b> ~ .. . * $(x) %s {0} \x7f \x1b[31m a:b os:getcwd x.npz x.csv x.toml x/ https://example.org/x.npz
"""
JUNK = ("", " ", "\n", "\t", "a b", "9" * 40, *SIGNS.split())
SCENARIOS = (
    *("iid", "label-dirichlet(0.5)", "label-classes(2)", "quantity-dirichlet(1)", "feature-noise(0.1)", "niid-mixed"),
    *("label-dirichlet(0.5) + feature-noise(0.1)", "niid(label-dirichlet(0.5))", "label-dirichlet(0.1, min=1000)"),
    *(
        "label-dirichlet(1e-9)",
        "label-classes(11)",
        "iid + iid",
        "niid(niid-mixed)",
        "label-dirichlet(alpha=1, alpha=1)",
    ),
)
MODELS = ("mlp", "cnn", "simple-cnn", "vgg11", "mlp(hidden=3)", "mlp(hidden=0)", "cnn(norm=batch)", "mlp(hidden=4)")
WORDS = {"scenario": SCENARIOS, "model": MODELS, "model.name": MODELS, "algorithm": tuple(registry.algorithms())}
OPTIONS = (
    "--quiet",
    "-q",
    "--json",
    "--overwrite",
    "--debugg",
    "--frobnicate",
    "-z",
    "--checkpoint-every=-1",
    "--seeds=",
)


class TooLong(BaseException):
    """Not an Exception, which the command line would turn into a sentence."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    def alarm(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- what people could type --------------------------------------------------------------------------------------------


def misspelt(word: str, dice: random.Random) -> str:
    at = dice.randrange(len(word) + 1)
    before, letter, after = word[:at], word[at : at + 1], word[at + 1 :]
    other = dice.choice("abcxyz._-= 0☃")
    turned = before + after[:1] + letter + after[1:]
    return dice.choice(
        [before + after, before + other + word[at:], turned, word.upper(), word.replace(".", "-"), word * 2]
    )


def plausible(key: str, dice: random.Random) -> str:
    """Something of the right type, at least."""
    if key in WORDS:
        return dice.choice(WORDS[key])
    if key not in KEYS:
        return "on"
    member = dice.choice(KEYS[key].type_name.split(" | "))
    pools = {"int": NUMBERS, "float": NUMBERS, "bool": ("true", "false"), "str": (str(KEYS[key].default),)}
    return dice.choice(pools.get(member, (member.strip('"'),)))


def value(key: str, dice: random.Random) -> str:
    word = plausible(key, dice) if dice.random() < 0.6 else dice.choice(JUNK)
    return misspelt(word, dice) if dice.random() < 0.1 else word


def override(dice: random.Random) -> str:
    key = dice.choice([*KEYS, "fnr", "model", "algorithm", "scenario"])
    if dice.random() < 0.15:
        key = misspelt(key, dice)
    sign = "=" if dice.random() < 0.97 else dice.choice(["", ":", " = ", "==", "+="])
    return f"{key}{sign}{value(key, dice)}"


def command_line(dice: random.Random) -> list[str]:
    words = [override(dice) for _ in range(dice.randrange(4))]
    words += dice.sample(OPTIONS, dice.choice([0, 0, 0, 1, 2]))
    recipe = dice.choice([[], [], ["digits"], [dice.choice(list(registry.recipes()))], [dice.choice(JUNK)]])
    kind = dice.random()
    if kind < 0.7:
        line = ["run", *recipe, *words]
    elif kind < 0.8:
        line = ["scenario", dice.choice(["show", "save"]), dice.choice([*SCENARIOS, *JUNK]), *words]
    elif kind < 0.9:
        axis = f"{override(dice)},{dice.choice(JUNK)}"
        line = ["compare", *recipe, *words, "--over", axis, "--seeds", dice.choice(["0", "0,1", "3-1", "", "x", "0,0"])]
    else:
        verbs = ["resume", "report", "evaluate", "predict", "list", "data", "doctorr", misspelt("run", dice)]
        line = [dice.choice(verbs), *(dice.choice(JUNK) for _ in range(dice.randrange(3))), *words]
    tail = line[1:]
    if dice.random() < 0.3:
        dice.shuffle(tail)
    return [line[0], *tail]


def recipe_text(dice: random.Random) -> str:
    """A valid recipe with a few characters or lines changed."""
    config = load(dice.choice(["digits", "digits", "mixed"]), ["dataset=digits", "model=mlp", "fnr=on"])
    text = config.to_toml()
    for _ in range(dice.randrange(1, 4)):
        lines = text.split("\n")
        at = dice.randrange(len(lines))
        what = dice.random()
        if what < 0.3:
            lines[at] = misspelt(lines[at], dice)
        elif what < 0.5:
            lines.insert(at, override(dice))
        elif what < 0.6:
            lines[at] = ""
        elif what < 0.7:
            lines.append(lines[at])
        else:
            lines[at] = f"{lines[at].partition('=')[0]}= {dice.choice([*JUNK, repr(dice.choice(JUNK))])}"
        text = "\n".join(lines)
    return text


# -- what must not happen ----------------------------------------------------------------------------------------------


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder; runs are only built, and nothing can be fetched."""

    def built(config: RunConfig, **_: Any) -> None:
        build(config)
        raise ConfigError("It could be built.")

    def fetched(what: str, *_: object, **__: object) -> Path:
        raise ConfigError(f"{what} cannot be fetched here.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FNRFL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "nothing")
    monkeypatch.setattr(fetching, "download", fetched)
    monkeypatch.setattr(fetching, "npm_pack", fetched)
    monkeypatch.setattr(runs, "run", built)
    return tmp_path


def left_behind(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"data"}


def wrong(folder: Path, line: list[str], codes: list[int]) -> str | None:
    """Run a command and say what must not be."""
    before = left_behind(folder)
    try:
        with limited(SECONDS):
            got = CliRunner().invoke(cli.app, line)
    except TooLong:
        return f"takes longer than {SECONDS} s"
    codes.append(got.exit_code)
    if got.exception is not None and not isinstance(got.exception, SystemExit):
        return repr(got.exception)
    if got.exit_code not in (0, 2, 3) or "Traceback" in got.output or "Unexpected" in got.stderr:
        return f"exit code {got.exit_code}: {got.stderr}"
    last = got.stderr.rstrip("\n").rpartition("\n")[2]
    if got.exit_code and not last.startswith(("fnrfl: ", "Error: ")) and not got.stderr.startswith("Usage: "):
        return f"not a sentence: {got.stderr}"
    for name in left_behind(folder) - before:
        (folder / name).unlink()
        if got.exit_code or line[:2] != ["scenario", "save"]:  # a split into a file that was named
            return f"left {name}"
    return None


def fuzz(folder: Path, count: int, seed: int) -> None:
    codes: list[int] = []
    problems = []
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        if dice.random() < 0.6:
            line = command_line(dice)
        else:
            (folder / "mine.toml").write_text(recipe_text(dice), encoding="utf-8")
            line = ["run", "mine.toml", *([override(dice)] if dice.random() < 0.3 else [])]
        if (problem := wrong(folder, line, codes)) is not None:
            problems.append(f"{number}: {line}: {problem}")
    assert not problems, "\n".join(problems)
    assert codes.count(2) > count / 2, "most of what was typed is wrong, or only built"


def test_two_hundred_mistakes(nothing: Path) -> None:
    fuzz(nothing, 200, seed=1)


@pytest.mark.slow
def test_two_thousand_mistakes(nothing: Path) -> None:
    fuzz(nothing, 2000, seed=2)


@pytest.mark.slow
def test_whatever_can_be_built_runs(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with real runs of one round: they end well or with a sentence, and in the directory they were given."""
    monkeypatch.undo()
    monkeypatch.chdir(nothing)
    began = time.monotonic()
    ended_well = 0
    for number in range(3000):
        dice = random.Random(f"run {number}")
        keys = [override(dice) for _ in range(2)]
        names = [key.partition("=")[0].strip() for key in keys]
        elsewhere = ("dataset", "dataset.name", "public.source", "protocol", "name")
        if any(name in elsewhere or "algorithm" in name for name in names):
            continue  # methods have so many options that hardly a line would be right: they are drawn whole
        method = f"algorithm={dice.choice(sorted(registry.algorithms()))}"
        line = ["run", "digits", "client.epochs=1", "clients=4", method, *keys, "rounds=1", "-o", "run", "-q"]
        with limited(60.0):
            got = CliRunner().invoke(cli.app, line)
        assert got.exit_code in (0, 2, 3), f"{line}: {got.output}"
        assert got.exception is None or isinstance(got.exception, SystemExit), f"{line}: {got.exception!r}"
        assert "Unexpected" not in got.stderr, f"{line}: {got.stderr}"
        ended_well += got.exit_code == 0
        if got.exit_code == 2:
            assert not (nothing / "run").exists(), line
        assert left_behind(nothing) <= {"run"}, line
        shutil.rmtree(nothing / "run", ignore_errors=True)
        if time.monotonic() - began > 120:
            break
    assert ended_well > 20
