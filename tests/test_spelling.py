"""Words as people type them: taken where there is no doubt, and explained where there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fnrfl.cli import app
from fnrfl.config import load, loads
from fnrfl.config.spelling import same_key
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.results.compare import grid


def command(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loads("", words)
    return str(caught.value)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["3", "1e3", "007", "1_000", "0x10", "2024-01-01", "true", "inf", "1.50"])
def test_a_name_is_what_was_typed(text: str) -> None:
    assert loads("", [f"name={text}"]).name == text
    assert loads(loads("", [f"name={text}"]).to_toml()).name == text


@pytest.mark.parametrize(("toml", "name"), [("3", "3"), ("1e3", "1e3"), ("1.50", "1.50"), ('"x"', "x")])
def test_a_name_in_a_file_is_what_was_written(toml: str, name: str) -> None:
    assert loads(f"name = {toml}\n").name == name


@pytest.mark.parametrize(("value", "name"), [(3, "3"), (1.5, "1.5"), (Path("x"), "x")])
def test_a_name_from_python_may_be_a_number(value: Any, name: str) -> None:
    assert loads("", {"name": value}).name == name


def test_numbers_stay_numbers_where_numbers_belong() -> None:
    assert loads("rounds = 5\n[client]\nlr = 1e-3\n", ["fnr.weight=1e-1"]).client.lr == 1e-3
    assert "client.lr = [1.5] is not allowed: it must be a number > 0" in refusal("client.lr=[1.5]")
    assert "name = true is not allowed: it must be text" in str(pytest.raises(ConfigError, loads, "name = true").value)


def test_a_time_in_a_file_does_not_become_the_name_of_code() -> None:
    with pytest.raises(ConfigError, match="must be text"):
        loads("[model]\nname = 07:32:00\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("algorithm=FedAvg", "algorithm=fedavg"), ("algorithm=FEDPROX", "algorithm=fedprox"),
        ("algorithm=fed_avg", "algorithm=fedavg"), ("algorithm=KT-pFL", "algorithm=ktpfl"),
        ("algorithm=Local_Only", "algorithm=local-only"), ("model=ResNet18", "model=resnet18"),
        ("model=ResNet-18(head=1000)", "model=resnet18(head=1000)"), ("model=SimpleCNN", "model=simple-cnn"),
        ("dataset=CIFAR10", "dataset=cifar10"), ("dataset=cifar-10", "dataset=cifar10"),
        ("dataset=FashionMNIST", "dataset=fashion-mnist"), ("engine=GPU", "engine=gpu"),
        ("engine.name=Batched", "engine=batched"), ("client.optimizer=SGD", "client.optimizer=sgd"),
        ("client.optimizer=Adam", "client.optimizer=adam"), ("fnr.penalty=Log_Ratio", "fnr.penalty=log-ratio"),
        ("fnr=yes", "fnr=on"), ("fnr=True", "fnr=on"), ("fnr=1", "fnr=on"), ("fnr=ON", "fnr=on"),
        ("fnr=no", "fnr=off"), ("fnr=false", "fnr=off"), ("fnr=0", "fnr=off"),
    ],
)  # fmt: skip
def test_other_spellings_are_taken(typed: str, meant: str) -> None:
    assert loads("", [typed]) == loads("", [meant])


def test_switches_in_files_and_in_python() -> None:
    assert loads("fnr = true").fnr == loads('fnr = "Yes"').fnr == loads("fnr = 1").fnr is not None
    assert loads("", {"fnr": False}).fnr is loads("", {"fnr": "no"}).fnr is None
    assert "fnr = 2 is not allowed" in refusal("fnr=2") and 'fnr = "maybe" is not allowed' in refusal("fnr=maybe")


def test_a_folder_of_ones_own_is_not_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CIFAR10").mkdir()
    assert loads("", ["dataset=CIFAR10"]).dataset.name == "CIFAR10"


def test_a_grid_is_the_same_in_every_spelling() -> None:
    plain = grid("digits", [], ["algorithm=fedavg,scaffold", "fnr=off,on"], [0])
    fancy = grid("digits", [], ["algorithm=FedAvg,SCAFFOLD", "fnr=no,yes"], [0])
    assert [(cell.name, cell.config.sha256) for cell in plain] == [(cell.name, cell.config.sha256) for cell in fancy]


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("client.learning_rate", "client.lr"), ("client.batch_size", "client.batch"),
        ("client.local_epochs", "client.epochs"), ("num_clients", "clients"), ("num_rounds", "rounds"),
        ("lr", "client.lr or fnr.lr"), ("epochs", "client.epochs or fnr.epochs"), ("fnr.learning-rate", "fnr.lr"),
        ("batch_size", "client.batch or fnr.batch"), ("optimiser", "client.optimizer or fnr.optimizer"),
        ("train.weight_decay", "client.weight_decay"), ("method", "algorithm.name"), ("data", "dataset.name"),
        ("client.momentun", "client.momentum"),
    ],
)  # fmt: skip
def test_other_names_of_keys_are_explained(typed: str, meant: str) -> None:
    assert refusal(f"{typed}=1") == f"Unknown key {typed}: did you mean {meant}?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run", "--rounds", "5"],
            "There is no option --rounds. Keys of the config are typed without dashes: rounds=5",
        ),
        (["run", "--lr=0.1"], "There is no option --lr. Keys of the config are typed without dashes: client.lr=0.1"),
        (["run", "digits", "--num-clients", "3", "-q"], "clients=3"),
        (["run", "--algorithm", "scaffold"], "algorithm=scaffold"),
        (["compare", "digits", "--fnr", "on"], "fnr=on"),
        (["run", "--rounds", "--quiet"], "rounds=VALUE"),
        (["scenario", "show", "iid", "--clients", "3"], "clients=3"),
        (["run", "--overwrit"], "--overwrite"),
    ],
)
def test_a_key_typed_as_an_option_is_explained(words: list[str], said: str) -> None:
    found = command(*words)
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.replace("│", " ").split())


def test_one_number_of_seeds_is_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["compare", "rounds=1", "clients=3", "client.epochs=1", "--no-report"]
    assert "note: --seeds 5 is the one seed 5; 5 seeds are 0-4." in command(*small, "--seeds", "5").stdout
    assert "1 run, kept in" in (found := command(*small, "--seeds", "0")).stdout and "note: --seeds" not in found.stdout


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_one_thing_is_not_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert counted(1, "round") == "1 round" and counted(0, "round") == "0 rounds"
    assert counted(1797, "example") == "1,797 examples" and counted(2, "class", "classes") == "2 classes"
    found = command("run", "rounds=1", "clients=1", "client.epochs=1", "scenario=iid")
    assert "1 client, 1 round, seed 0" in found.stdout and "after 1 round, kept" in found.stdout
    found = command("scenario", "show", "iid", "clients=1")
    assert "digits, 1 client, seed 0" in found.stdout
    assert "over 10 clients" not in found.stdout
    assert command("report", "runs", "--no-plots").exit_code == 0
    page = (tmp_path / "runs/report.html").read_text()
    assert "1 run on digits: iid over 1 client, 1 round, model mlp, seed 0." in page


# -- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["client.lr={}"], "client.lr = {} is not allowed: it must be a number > 0 (default 0.01)."),
        (["client={lr={}}"], "client.lr = {} is not allowed"),
        (["name={}"], "name = {} is not allowed: it must be text"),
        (["dataset="], 'dataset.name = "" is not allowed: it must not be empty (default "cifar10").'),
        (["model= "], 'model.name = "" is not allowed: it must not be empty'),
        (["scenario="], 'scenario = "" is not allowed'),
        (["public.source="], 'public.source = "" is not allowed'),
        (["engine="], 'engine.name = "" is not allowed'),
        (["name=" + "x" * 300], "is too long: it names a folder and must have at most 150 bytes."),
        (["name=\udcff"], "is not valid UTF-8 text"),
        (["dataset=a/\udcff.csv"], "is not valid UTF-8 text"),
        (["dataset=" + "x" * 5000], "is not known"),
        (["client.lr=" + "[" * 5000], "is not allowed: it must be a number > 0"),
        (["seed=" + "9" * 5000], "seed = "),
        (["x" * 5000 + "=1"], "Unknown key xxx"),
        (["client." * 3000 + "lr=1"], "Unknown key client.client"),
        (["a" * 5000], "is not an override"),
    ],
    ids=lambda value: str(value)[:30].encode("ascii", "backslashreplace").decode(),
)
def test_edges_of_the_config_are_sentences(words: list[str], said: str) -> None:
    told = refusal(*words)
    assert said in told and len(told) < 1000


@pytest.mark.parametrize(
    "text",
    ["a" + ".a" * 5000 + " = 1", "[" + "a." * 5000 + "a]\nb = 1", "x = " + "[" * 100_000, "seed = " + "9" * 5000],
    ids=["keys", "sections", "lists", "digits"],
)
def test_a_file_that_is_too_deep_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, origin="deep.toml")
    assert len(str(caught.value)) < 1000


def test_empty_sections_say_nothing_and_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    assert loads("[client]\n[engine]\n[model]\n", {"public": {}}) == loads("")
    (tmp_path / "marked.toml").write_text("\ufeffrounds = 3\n", encoding="utf-8")
    assert load(tmp_path / "marked.toml").rounds == 3


def test_long_words_on_the_command_line_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("name=" + "x" * 300, "x" * 300, "scenario=" + "x" * 5000, "x" * 300 + ".toml", "\udcff"):
        found = command("run", word, "--dry-run")
        assert found.exit_code == 2 and "Unexpected" not in found.stderr, found.stderr


def test_a_folder_does_not_change_what_a_method_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FedAvg", "Loop"):
        Path(name).mkdir()
    config = load(None, ["algorithm=FedAvg", "engine=Loop"])
    assert (config.algorithm.name, config.engine.name) == ("fedavg", "loop")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fraction=0.1", "participation"), ("beta=0.5", "scenario"), ("alpha=0.5", "scenario"),
    ],
)  # fmt: skip
def test_words_of_other_systems_lead_to_the_key(typed: str, meant: str) -> None:
    assert f"did you mean {meant}" in refusal(typed)


def test_an_option_of_the_method_comes_before_a_word_of_other_systems() -> None:
    assert same_key("beta", ["algorithm.beta", "scenario"]) == ["algorithm.beta"]


@pytest.mark.parametrize(("name", "here"), [("noniid-labeldir", "niid(label-dirichlet"), ("homo", "niid(iid)")])
def test_a_partition_of_niid_bench_is_told_what_it_is_here(name: str, here: str) -> None:
    assert f"NIID-Bench's name; here it is {here}" in refusal(f"scenario={name}")
