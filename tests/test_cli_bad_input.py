"""Bad input is one sentence that names the value, the rule and the way out; nothing is written."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import assert_refused, fnrfl, tree
from fnrfl.config import load
from fnrfl.core.errors import ConfigError
from fnrfl.data.sources import EMBEDDED_FILE, fashion_mnist, fetching
from fnrfl.rundir import outputs
from fnrfl.runs.run import run


@pytest.fixture(autouse=True)
def folder(tmp_cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, without data or a network."""
    monkeypatch.setenv("FNRFL_DATA", str(tmp_cwd / "data"))
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_cwd / "nothing")
    monkeypatch.setattr(fetching, "download", refused)
    monkeypatch.setattr(fetching, "npm_pack", refused)
    return tmp_cwd


def refused(what: str, *_: object, **__: object) -> Path:
    raise ConfigError(f"{what} could not be downloaded; check the network and try again.")


# -- config ------------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["client.lrr=1"], ["client.lrr", "client.lr?"]),
    "two mistakes": (["rounds=0", "seed=-1"], ["rounds = 0", "seed = -1"]),
    "two recipes": (["digits", "label-skew"], ['"digits"', '"label-skew"', "key=value"]),
    "missing recipe file": (["nowhere.toml"], ["nowhere.toml", "cannot be read"]),
    "unknown option of a model": (["model=mlp(hiden=3)"], ["hiden", "hidden"]),
    "all data set aside": (["public.size=0.6", "validation.size=0.5"], ["public.size = 0.6", "smaller"]),
    "variates of adam": (["algorithm=scaffold", "client.optimizer=adam"], ["scaffold", "sgd"]),
    "a gpu that is absent": (["engine=gpu"], ['"gpu"', "auto"]),
    "precision of a gpu": (["engine.precision=bf16"], ['"bf16"', "float32"]),
    "more clients than examples": (["clients=5000"], ["5000"]),
    "far more clients than examples": (["clients=5000000000"], ["5000000000"]),
    "more classes than there are": (["scenario=label-classes(11)"], ["11"]),
    "a minimum that no draw meets": (["scenario=label-dirichlet(0.01, min=100)"], ["min"]),
    "a batch that no client has": (["client.last_batch=drop", "client.batch=1000"], ["1000", "run-on"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(case: str, folder: Path) -> None:
    words, said = CONFIGS[case]
    assert_refused(fnrfl("run", *words), *said)
    assert not tree(folder)


# -- data --------------------------------------------------------------------------------------------------------------


def csv(folder: Path, name: str = "mine.csv", rows: int = 400) -> Path:
    path = folder / name
    dice = np.random.default_rng(0)
    lines = (",".join([*(f"{v:.4f}" for v in dice.random(4)), str(i % 4)]) for i in range(rows))
    path.write_text("a,b,c,d,label\n" + "\n".join(lines) + "\n")
    return path


def corrupt(data: Path) -> None:
    data.mkdir()
    shutil.copy(EMBEDDED_FILE, data / "cifar10.npz")


DATA: dict[str, tuple[Callable[[Path], object], list[str], list[str]]] = {
    "missing file": (lambda f: None, ["dataset=nowhere.csv"], ["nowhere.csv", "does not exist"]),
    "missing folder": (lambda f: None, ["dataset=nowhere/"], ["nowhere"]),
    "truncated": (
        lambda f: (f / "mine.npz").write_bytes(EMBEDDED_FILE.read_bytes()[:1000]),
        ["dataset=mine.npz"],
        ["mine.npz", "truncated"],
    ),
    "wrong checksum": (lambda f: corrupt(f / "data"), ["dataset=cifar10"], ["cifar10"]),
    "not fetched": (lambda f: None, ["dataset=cifar10"], ["cifar10", "check the network"]),
    "no labels": (lambda f: (f / "m.npz").touch(), ["dataset=m.npz"], ["m.npz"]),
    "a word among numbers": (
        lambda f: (f / "m.csv").write_text("a,b,label\n1,2,0\n1,x,0\n"),
        ["dataset=m.csv"],
        ["'x'", "must hold numbers alone or text alone"],
    ),
    "overlapping splits": (
        csv,
        ["dataset=mine.csv", "public.source=mine.csv", "fnr=on"],
        ["public.source", "disjoint"],
    ),
    "public data of another kind": (csv, ["public.source=mine.csv", "fnr=on"], ["public.source", "alike"]),
    "a function that is not there": (lambda f: None, ["dataset=nowhere:load"], ["nowhere:load", "imported"]),
}


@pytest.mark.parametrize("case", DATA)
def test_data(case: str, folder: Path) -> None:
    prepare, words, said = DATA[case]
    prepare(folder)
    before = tree(folder)
    assert_refused(fnrfl("run", "rounds=1", *words), *said)
    assert {name for name in tree(folder).keys() ^ before.keys() if not name.startswith("data")} == set()


# -- run directories ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that lost its end: everything is saved but the finished model."""
    path = tmp_path_factory.mktemp("runs") / "stopped"
    run(load(None, ["rounds=2"]), out=path)
    (path / "model.safetensors").unlink()
    return path


@pytest.fixture
def run_dir(stopped: Path, folder: Path) -> Path:
    return Path(shutil.copytree(stopped, folder / "run"))


def changed(run_dir: Path, name: str, old: str, new: str) -> None:
    path = next(run_dir.rglob(name))
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def cut(run_dir: Path, name: str) -> None:
    path = next(run_dir.rglob(name))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "checkpoint cut": (lambda d: cut(d, "checkpoint.json"), ["checkpoint.json", "damaged"]),
    "weights cut": (lambda d: cut(d, "server.safetensors"), ["server.safetensors", "sha256"]),
    "another format": (lambda d: changed(d, "checkpoint.json", '"format": 3', '"format": 9'), ["format 9", "2 and 3"]),
    "another config": (lambda d: changed(d, "config.toml", "lr = 0.05", "lr = 0.06"), ["not the config that the run"]),
    "log cut": (lambda d: cut(d, "events.jsonl"), ["events.jsonl"]),
    "config cut": (lambda d: (d / "config.toml").write_text("rounds = "), ["config.toml", "TOML"]),
    "no config": (lambda d: (d / "config.toml").unlink(), ["not a run", "config.toml"]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_resume(case: str, run_dir: Path) -> None:
    damage, said = DAMAGE[case]
    damage(run_dir)
    before = tree(run_dir)
    assert_refused(fnrfl("resume", "run"), *said)
    assert tree(run_dir) == before


def test_an_undamaged_run_is_resumed(run_dir: Path) -> None:
    assert fnrfl("resume", "run").exit_code == 0


def test_a_directory_that_exists(run_dir: Path) -> None:
    before = tree(run_dir)
    got = fnrfl("run", "rounds=1", "-o", "run")
    assert_refused(got, "run exists already, with a run of another config", "--out", "--overwrite")
    assert "resume" not in got.stderr
    assert tree(run_dir) == before


def test_overwrite_takes_no_folder_that_is_not_a_run(folder: Path) -> None:
    (folder / "thesis").mkdir()
    (folder / "thesis" / "text.tex").write_text("three years")
    assert_refused(fnrfl("run", "rounds=1", "-o", "thesis", "--overwrite"), "thesis is not a run")
    assert (folder / "thesis" / "text.tex").exists()


def test_a_file_where_the_directory_should_be(folder: Path) -> None:
    (folder / "file").write_text("mine")
    got = fnrfl("run", "rounds=1", "-o", "file/run")
    assert_refused(got, "file", code=3)
    assert (folder / "file").read_text() == "mine"


# -- a client that diverges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_loss_that_is_not_finite_names_client_round_and_step(engine: str) -> None:
    got = fnrfl("run", "rounds=2", "client.lr=1e30", f"engine={engine}", "--quiet")
    assert_refused(got, "client 0, round 1, stage local, step", "Lower the learning rate", "skip", code=3)


def test_the_policy_may_be_to_skip() -> None:
    got = fnrfl("run", "rounds=2", "client.lr=1e30", "client.nonfinite=skip", "--quiet")
    assert_refused(got, "o client of the cohort ended with finite numbers", code=3)


# -- the other commands ------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[list[str], list[str]]] = {
    "resume nothing": (["resume", "nowhere"], ["nowhere is not a run"]),
    "list": (["list", "modles"], ['"modles"', "models"]),
    "data": (["data", "get", "cifar"], ["'cifar'", "'cifar10'"]),
    "data without network": (["data", "get", "cifar10"], ["cifar10", "check the network"]),
    "evaluate nothing": (["evaluate", "nowhere", "digits"], ["nowhere is not a run"]),
    "evaluate the unfinished": (["evaluate", "run", "digits"], ["run is not finished", "fnrfl resume run"]),
    "predict nothing": (["predict", "nowhere", "digits"], ["nowhere is not a run"]),
    "report nothing": (["report", "nowhere"], ["nowhere"]),
    "grid without values": (["compare", "--over", "algorithm="], ['"algorithm="', "key=a,b"]),
    "grid of unknown methods": (["compare", "--over", "algorithm=fedavg,scafold"], ['"scafold"', "scaffold"]),
    "seeds": (["compare", "--seeds", "zero"], ['"zero"', "0,1,2"]),
    "grid that cannot be built": (["compare", "--over", "clients=5,5000", "--seeds", "0"], ["clients 5000", "5000"]),
    "baseline": (["compare", "--over", "fnr=off,on", "--seeds", "0", "--baseline", "x"], ['"x"', "fnr off"]),
    "scenario": (["scenario", "show", "lable-dirichlet(1)"], ["'label-dirichlet'"]),
    "scenario that cannot be met": (["scenario", "show", "iid", "clients=5000"], ["5000"]),
    "scenario into no json": (["scenario", "save", "iid", "split.txt"], [".json"]),
    "figure of no kind": (["scenario", "show", "iid", "--png", "split.xyz"], ["split.xyz", ".png"]),
    "a key of a scenario": (["scenario", "show", "iid", "clinets=3"], ["clinets", "clients"]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_commands(case: str, folder: Path, request: pytest.FixtureRequest) -> None:
    words, said = OTHERS[case]
    if "run" in words:
        request.getfixturevalue("run_dir")
    before = tree(folder)
    assert_refused(fnrfl(*words), *said)
    assert {name for name in tree(folder) if not name.startswith("data")} == set(before)


# -- names that could be trouble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["my runs/one", "größe/läuft ☃", "-dash", "<b>bold", "a'b\"c", "$(x)", "run\twith tab"]
)
def test_odd_paths_are_handled(folder: Path, name: str) -> None:
    got = fnrfl("run", "rounds=1", "client.epochs=1", f"--out={name}")
    assert got.exit_code == 0, got.output
    assert (folder / name / "model.safetensors").is_file()
    assert fnrfl("resume", "--quiet", "--", name).exit_code == 0


def test_a_name_with_html_is_text(folder: Path) -> None:
    got = fnrfl("run", "rounds=1", "client.epochs=1", "name=<b>x & y")
    assert got.exit_code == 0, got.output
    assert "<b>x & y: fedavg" in got.stdout
    assert fnrfl("report", "runs/<b>x & y-fedavg-0", "--no-plots").exit_code == 0
    page = (folder / "runs" / "<b>x & y-fedavg-0" / "report.html").read_text()
    assert "<b>x" not in page
    assert "&lt;b&gt;x" in page


def test_a_json_result_is_one_object_whatever_the_name(folder: Path) -> None:
    got = fnrfl("run", "rounds=1", "client.epochs=1", 'name="quote"', "--json", "-o", 'x"y\\z')
    assert json.loads(got.stdout)["run_dir"] == 'x"y\\z'


def test_writes_are_whole_or_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str) -> None:
        path.with_name(path.name + ".part").write_text(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "write_output", half)
    assert_refused(fnrfl("scenario", "save", "split.json", "iid"), "No space left on device", "Make room", code=3)
    assert not (folder / "split.json").exists()


@pytest.mark.parametrize(
    ("command", "words", "asked"),
    [
        *(("compare", [word], word) for word in ("algorithm=fedavg,fedprox", "scenario=iid,label-dirichlet(0.1)")),
        ("compare", ["client.lr=0.1,0.01"], "client.lr=0.1,0.01"), ("run", ["client.lr=0.1,0.01"], None),
        ("compare", ["seed=0,1"], None), ("compare", ["client.lr=fast", "model=mlp(hidden=64,depth=2)"], None),
        ("run", ["metrics=f1,auroc"], None), ("compare", ["metrics=f1,auroc"], None),
    ],
)  # fmt: skip
def test_several_values_of_a_key_are_answered_with_the_option_for_them(
    command: str, words: list[str], asked: str | None
) -> None:
    got = fnrfl(command, "digits", *words, code=2)
    assert ("--over" in got.stderr) == (asked is not None)
    assert asked is None or f"To compare several values, write --over {shlex.quote(asked)}" in got.stderr
    if "metrics=" in words[0]:  # answered once, with the option for those of fnrfl
        assert 'not "f1", "auroc"' in got.stderr and got.stderr.count("--metric NAME") == 1
