"""Methods with their options beside them, as fedprox(mu=0.1): one config, however said; grids without void keys."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fnrfl
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.cli.commands import wrapped
from fnrfl.config import load, loads, registry
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.options import read_call, written
from fnrfl.results.compare import grid
from fnrfl.runs.setup.method import build_algorithm

TINY = {"rounds": 1, "clients": 2, "client": {"epochs": 1}, "out": None}

# -- the grammar -------------------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
values = st.booleans() | st.integers(-99, 99) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)


@given(names, st.dictionaries(names.filter(lambda name: name not in ("if", "is", "in", "or", "as", "def")), values))
def test_options_are_read_as_they_were_written(name: str, options: dict[str, Any]) -> None:
    try:
        assert read_call(written(name, options)) == (name, options)
    except ValueError:  # a word that Python keeps for itself
        assert any(not key.isidentifier() or __import__("keyword").iskeyword(key) for key in options)


@pytest.mark.parametrize(
    "said",
    [
        ["algorithm=fedprox(mu=0.1)"], ["algorithm=FedProx( mu = 1e-1 )"], ["algorithm.name=fedprox(mu=.1)"],
        ["algorithm=fedprox(mu=3)", "algorithm.mu=0.1"], {"algorithm": "fedprox(mu=0.1)"},
        {"algorithm": {"name": "fedprox(mu=0.1)"}}, ['algorithm="fedprox(mu=0.1)"'],
    ],
)  # fmt: skip
def test_every_way_to_say_it_is_one_config(said: Any) -> None:
    wanted = load("digits", ["algorithm=fedprox", "algorithm.mu=0.1"])
    assert load("digits", said) == wanted and load("digits", said).run_dir == wanted.run_dir
    assert loads('algorithm = "fedprox(mu=0.1)"').sha256 == loads('[algorithm]\nname = "fedprox"\nmu = 0.1').sha256
    assert (
        wanted.algorithm.label == "fedprox(mu=0.1)"
        and load("digits", ["algorithm=fedprox"]).algorithm.label == "fedprox"
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("fedprox(0.1)", "fedprox(0.1)"), ("fedprox(mu=0.1", "fedprox(mu=0.1"), ("fedprox(nu=1)", "algorithm.nu"),
        ("fedprox(mu=-1)", "algorithm.mu = -1"), ("fedprx(mu=1)", "fedprox"), ("fedprox(name=1)", "algorithm.name"),
        ("fedavgm(inner=fedprox(mu=-1))", "mu must be"), ("fedavgm(inner=fedprox(nu=1))", "nu is not an option"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_named(words: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        load("digits", [f"algorithm={words}"])
    with pytest.raises(ConfigError, match=r"algorithm\.mu is given twice"):
        loads('[algorithm]\nname = "fedprox(mu=0.1)"\nmu = 0.2')


def test_inner_methods_have_options_too() -> None:
    config = load("digits", ["algorithm=fedavgm(inner=FedProx(mu=1), beta=0.5)"])
    method: Any = build_algorithm(config)
    assert method.method == FedProx(mu=1.0) and config.algorithm.label == "fedavgm(inner=fedprox(mu=1), beta=0.5)"
    default = load("digits", ["algorithm=fedavgm", "algorithm.inner=fedprox(mu=0.01)"])
    assert default == load("digits", ["algorithm=fedavgm", "algorithm.inner=fedprox"])
    with pytest.raises(FnrflError, match="no option nu"):
        type(method)(inner="fedprox(nu=1)")


def test_in_python_it_is_the_run_of_the_object() -> None:
    assert fnrfl.run("digits", algorithm="fedprox(mu=1)", **TINY).model_sha256 == (
        fnrfl.run("digits", algorithm=FedProx(mu=1.0), **TINY).model_sha256
    )


# -- in a grid ---------------------------------------------------------------------------------------------------------


def labels(*over: str, fixed: tuple[str, ...] = ()) -> list[str]:
    return [cell.group.label for cell in grid("digits", fixed, over, [0], control=False)]


def test_a_grid_names_methods_by_their_options(tmp_path: Path) -> None:
    assert labels("algorithm=fedavg,fedprox(mu=0.1),fedprox(mu=1)") == ["fedavg", "fedprox(mu=0.1)", "fedprox(mu=1)"]
    cells = grid("digits", ["algorithm.mu=0.1"], ["algorithm=fedprox,fedprox(mu=1)"], [0])
    assert [cell.name for cell in cells] == ["fedprox-mu-0.1-seed-0", "fedprox-mu-1-seed-0"]
    # as before, so that folders of comparisons that were begun keep their names
    assert labels("algorithm=fedprox", fixed=("algorithm.mu=0.1",)) == ["fedprox"]
    found = fnrfl.compare(
        "digits", over={"algorithm": ["fedavg", FedProx(mu=1.0)]}, seeds=[0], **TINY | {"out": tmp_path / "grid"}
    )
    assert [row.group for row in found.rows] == ["fedavg", "fedprox(mu=1)"]
    with pytest.raises(ConfigError, match=r"algorithm\.mu is given twice"):
        labels("algorithm=fedavg,fedprox(mu=1)", "algorithm.mu=1,2")


@pytest.mark.parametrize(
    ("over", "kept", "why"),
    [
        (("algorithm=fedavg,fedprox", "algorithm.mu=0.1,1"),
         ["fedavg", "fedprox, algorithm.mu 0.1", "fedprox, algorithm.mu 1"], "algorithm.mu with fedavg. 1 comb"),
        (("algorithm=fedavg,centralised", "fnr=off,on"),
         ["fedavg, fnr off", "fedavg, fnr on", "centralised, fnr off"], "fnr with centralised. 1 comb"),
        (("fnr=off,on", "fnr.weight=0.1,1"),
         ["fnr off", "fnr on, fnr.weight 0.1", "fnr on, fnr.weight 1"], "fnr.weight with fnr = off. 1 comb"),
        (("algorithm=fedavg,scaffold", "fnr=off,on"),
         ["fedavg, fnr off", "fedavg, fnr on", "scaffold, fnr off", "scaffold, fnr on"], ""),
    ],
)  # fmt: skip
def test_what_changes_nothing_is_left_out_with_a_note(
    over: tuple[str, ...], kept: list[str], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="fnrfl"):
        assert labels(*over) == kept
    assert [why in record.getMessage() for record in caplog.records] == ([True] if why else [])


def test_a_key_that_no_method_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Unknown key algorithm\.nu"):
        labels("algorithm=fedavg,fedprox", "algorithm.nu=0.1,1")


def test_fnr_changes_nothing_of_exactly_the_methods_without_clients_that_train() -> None:
    methods = {name: registry.load_method(name) for name in registry.method_names()}
    assert tuple(name for name, method in methods.items() if not method.trains_clients) == registry.UNREFINED
    for name in registry.UNREFINED:
        plain, refined = (fnrfl.run("digits", algorithm=name, fnr=fnr, **TINY) for fnr in (False, True))
        assert plain.model_sha256 == refined.model_sha256
    plain, refined = (fnrfl.run("digits", algorithm="local-only", fnr=fnr, **TINY) for fnr in (False, True))
    assert plain.model_sha256 != refined.model_sha256  # it changes which model a client keeps


# -- around it ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("abc/-.", min_size=1, max_size=30), min_size=1, max_size=20), st.integers(20, 120))
def test_lines_are_broken_at_spaces_alone(words: list[str], width: int) -> None:
    lines = wrapped(" ".join(words), width).split("\n")
    assert " ".join(lines) == " ".join(words)
    assert all(len(line) <= width or " " not in line for line in lines)


@pytest.mark.parametrize(
    ("data", "name"),
    [("wards/", "wards"), ("my wards.csv", "my-wards"), ("code:make", "make"), ("digits", "digits"), ("v1.2", "v1.2")],
)
def test_a_run_on_data_of_ones_own_bears_its_name(data: str, name: str, tmp_cwd: Path) -> None:
    Path("v1.2").mkdir()
    assert load(None, [f"dataset={data}"]).name == name
    assert load("digits", [f"dataset={data}"]).name == "digits"
    assert load(None, [f"dataset={data}", "name=mine"]).name == "mine"


@pytest.mark.slow
def test_a_type_checker_knows_the_keys(tmp_path: Path) -> None:
    right = 'fnrfl.run("digits", client=dict(lr=0.1), fnr=True, stop="patience(5)", public=dict(size=3), engine="loop")'
    wrong = ["algorthm='fedprox'", "cleint=dict(lr=1)", "client=dict(lrr=1)", "client=dict(optimizer='sdg')"]
    calls = [right, *(f"fnrfl.{call}(None, {one})" for one in wrong for call in ("run", "compare"))]
    (tmp_path / "typed.py").write_text("\n".join(["import fnrfl", *calls]))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), "typed.py"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert [f"typed.py:{line}: error" in told for line in range(2, 3 + 2 * len(wrong))] == [False] + 8 * [True], told
