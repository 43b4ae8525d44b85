"""Hostile run directories, recipes and data: nothing is executed, nothing outside is touched, every command ends."""

from __future__ import annotations

from pathlib import Path

import pytest

import hostile
from hostile import Case

CASES = {case.name: case for case in hostile.cases()}

PARTS = ("got/checkpoint.json", "got/model.safetensors")
# A case of each kind, with the commands that came to harm or could; all commands on all cases are for `make test-all`.
QUICK = {
    "model calls os.system": ("dry run", "resume", "evaluate", "predict", "scenario", "load"),
    "model calls Popen with a shell": ("run", "evaluate"),
    "algorithm.name is a module in the folder": ("dry run", "resume", "load"),
    "dataset.name is a module in a package": ("run", "compare"),
    "public.source is a module in a folder without init": ("dry run",),
    "model is a helped module": ("predict",),
    "config with a key in quotes": ("run", "resume"),
    "config with deep nesting": ("run",),
    "words: options that call": ("evaluate",),
    "data: objects as x": ("evaluate", "run"),
    "a log that names code": ("evaluate", "predict"),
    "pipe: got/config.toml": ("run", "load"),
    "link: got/plots": ("report",),
    **{
        f"{kind}: {place}": ("resume",)
        for place in (".got.lock", "got/rounds", "got/rounds/zzz", "got/rounds/000002", "got/events.jsonl")
        for kind in hostile.PLACES[place]
        if kind != "pipe"
    },
    **{f"{kind}: {name}.part": ("resume",) for name in PARTS for kind in hostile.PLACES[f"{name}.part"]},
}


@pytest.mark.parametrize("name", QUICK)
def test_a_case_of_each_kind(name: str, tmp_path: Path) -> None:
    for number, command in enumerate(QUICK[name]):
        root = tmp_path / str(number)
        root.mkdir()
        outcome = hostile.play(CASES[name], command, root)
        assert outcome.well, outcome


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_all_cases(case: Case) -> None:
    assert [outcome for outcome in hostile.played(case) if not outcome.well] == []


def test_there_are_a_hundred_and_they_can_fail(tmp_path: Path) -> None:
    """A case that is allowed to run leaves what the others are searched for."""
    assert len(CASES) >= 100
    case = CASES["model calls copy over"]
    typed = {"run": ("run", "got/config.toml", "--trust")}
    outcome = hostile.play(Case(case.name, case.make, typed=typed), "run", tmp_path)
    assert outcome.touched == ("victim/notes.txt",)
    case = CASES["algorithm.name is a module in the folder"]
    (tmp_path / "again").mkdir()
    typed = {"load": (), "resume": ("resume", "got", "--trust")}
    assert hostile.play(Case(case.name, case.make, typed=typed), "resume", tmp_path / "again").executed
