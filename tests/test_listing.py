"""`fnrfl list keys` and `list algorithms`: short lines that fit, everything on demand, the values of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from fnrfl import cli
from fnrfl.cli import listing
from fnrfl.cli.listing import KeyList, cut, key_details, method_details, short_key_lines, short_method_lines
from fnrfl.config import describe_keys, load, registry
from fnrfl.rundir.configs import flat_config

WIDTHS = (40, 60, 80, 120)


def fnrfl(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("recipe", [None, "paper-label-skew"])
def test_a_key_is_one_line_that_fits_below_its_section(recipe: str | None, width: int) -> None:
    lines = list(short_key_lines(KeyList.read(recipe), width))
    assert max(map(len, lines)) <= width
    keys = [key for key in describe_keys() if not key.method]
    named = [line[2:].split()[0] for line in lines if line.startswith(("  ", "* "))]
    assert named[: len(keys)] == [key.name for key in keys]
    section = ""
    for line in lines[: lines.index("[fnr]")]:
        section = line.strip("[]") if line and not line.startswith((" ", "*")) else section
        if line.startswith(("  ", "* ")):
            assert line[2:].split()[0].rpartition(".")[0] == ("" if section == "of every run" else section)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_details_fit_and_leave_nothing_out(width: int) -> None:
    lines = list(key_details(KeyList.read(None), width))
    assert max(map(len, lines)) <= width
    told = " ".join(" ".join(lines).split())
    for key in describe_keys():
        meaning = key.meaning.removeprefix(f"{key.method}: ")
        assert f"{key.name} = " in told and " ".join(meaning.split()) in told and key.rule in told
    methods = list(method_details(registry.methods(), width))
    assert max(map(len, methods)) <= width
    told = " ".join(" ".join(methods).split())
    for entry in registry.methods():
        assert entry.idea in told and entry.traffic in told
        assert all(f"algorithm.{option.name} = " in told and option.help in told for option in entry.options)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_method_has_its_idea_in_lines_that_fit(width: int) -> None:
    lines = list(short_method_lines(registry.methods(), width))
    assert max(map(len, lines)) <= width
    assert [line.split()[0] for line in lines if line[:1].strip(" `")][: len(registry.methods())] == list(
        registry.algorithms()
    )


@pytest.mark.parametrize("recipe", registry.recipes())
def test_a_recipe_shows_its_values(recipe: str) -> None:
    rows = json.loads(fnrfl("list", "keys", "--recipe", recipe, "--json").stdout)
    values = flat_config(load(recipe))
    own = {row["name"]: row["value"] for row in rows if row["name"] in values and row["name"] != "name"}
    method = load(recipe).algorithm.name
    common = {key.name for key in describe_keys() if key.method in ("", method)}
    assert {name: values[name] for name in common & own.keys()} == {name: own[name] for name in common & own.keys()}


def test_a_recipe_of_ones_own_shows_the_options_of_its_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "listed_method.py").write_text(
        "from dataclasses import dataclass\nfrom fnrfl.algorithms.fedavg import FedAvg\n"
        "from fnrfl.core.algorithm import option\n\n@dataclass(frozen=True)\nclass Mine(FedAvg):\n"
        '    zeta: float = option(0.5, "a number of mine")\n'
    )
    (tmp_path / "mine.toml").write_text('algorithm = "listed_method:Mine"\nrounds = 3\n')
    refused = fnrfl("list", "keys", "--recipe", "mine.toml")
    assert refused.exit_code == 2 and "--trust" in refused.stderr
    got = fnrfl("list", "keys", "--recipe", "mine.toml", "--trust", "--long")
    assert got.exit_code == 0, got.output
    assert "options of listed_method:Mine" in got.stdout and "algorithm.zeta = 0.5" in got.stdout
    assert "rounds = 3" in got.stdout and "(default 10)" in got.stdout


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("client.lr", ["client.lr"]),
        ("clients", ["clients"]),
        ("engine.", [key.name for key in describe_keys() if key.name.startswith("engine.")]),
        ("fnr", [key.name for key in describe_keys() if key.name.startswith("fnr")]),
        ("ro", ["rounds"]),
    ],
)
def test_a_prefix_is_a_key_a_section_or_a_beginning(prefix: str, names: list[str]) -> None:
    assert [row["name"] for row in json.loads(fnrfl("list", "keys", prefix, "--json").stdout)] == names
    assert [line.split()[0] for line in fnrfl("list", "keys", prefix).stdout.splitlines()] == names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("keys", "clinet"), "Did you mean client?"),
        (("keys", "learning_rate"), "Did you mean client.lr or"),
        (("keys", "zzz"), "`fnrfl list keys` prints all of them."),
        (("algorithms", "scafold"), "Did you mean scaffold?"),
        (("recipes", "digit5"), "Did you mean digits?"),
        (("models", "--recipe", "digits"), "fnrfl list keys --recipe NAME"),
        (("keys", "--recipe", "digit"), 'There is no recipe "digit". Did you mean digits?'),
    ],
)
def test_what_is_not_there_is_answered_with_the_nearest(words: tuple[str, ...], said: str) -> None:
    got = fnrfl("list", *words)
    assert got.exit_code == 2
    assert said in got.stderr and got.stdout == ""


def test_other_spellings_of_a_method_are_known() -> None:
    assert fnrfl("list", "algorithms", "FedAvg").stdout == fnrfl("list", "algorithms", "fedavg").stdout
    assert "algorithm.server_lr = " in fnrfl("list", "algorithms", "scaffold", "--long").stdout


@given(st.text(st.characters(categories=("L", "Zs", "Po")), max_size=60), st.integers(8, 80))
def test_a_cut_line_fits_and_is_the_beginning(text: str, width: int) -> None:
    line = cut(text, width)
    assert len(line) <= width
    assert text.startswith(line.removesuffix(" ..")) or line == text.rstrip()


def test_text_of_a_recipe_cannot_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text('name = "a\\u001b[31mb"\n')
    listed = listing.KeyList.read(str(tmp_path / "odd.toml"))
    assert not any("\x1b" in line for line in [*short_key_lines(listed, 80), *key_details(listed, 80)])
