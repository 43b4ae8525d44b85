"""Words as people type them: taken where there is no doubt, and explained where there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import fnrfl
from fnrfl.config import load, loads
from fnrfl.config.typed import same_key
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.results.compare import grid


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loads("", words)
    return str(caught.value)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["3", "1e3", "007", "1_000", "0x10", "2024-01-01", "true", "inf", "1.50"])
def test_a_name_is_what_was_typed(text: str) -> None:
    assert loads("", [f"name={text}"]).name == text
    assert loads(loads("", [f"name={text}"]).to_toml()).name == text


@pytest.mark.parametrize(("toml", "name"), [("3", "3"), ("1.5", "1.5"), ('"1e3"', "1e3"), ('"x"', "x")])
def test_a_name_in_a_file_is_what_was_written(toml: str, name: str) -> None:
    assert loads(f"name = {toml}\n").name == name


@pytest.mark.parametrize(("value", "name"), [(3, "3"), (1.5, "1.5"), (Path("x"), "x")])
def test_a_name_from_python_may_be_a_number(value: Any, name: str) -> None:
    assert loads("", {"name": value}).name == name


def test_numbers_stay_numbers_where_numbers_belong() -> None:
    assert loads("rounds = 5\n[client]\nlr = 1e-3\n", ["fnr.weight=1e-1"]).client.lr == 1e-3


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


def test_a_folder_of_ones_own_is_not_renamed(tmp_cwd: Path) -> None:
    (tmp_cwd / "CIFAR10").mkdir()
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
        ("client.momentun", "client.momentum"), ("fraction", "participation"), ("beta", "scenario"),
        ("alpha", "scenario"),
    ],
)  # fmt: skip
def test_other_names_of_keys_are_explained(typed: str, meant: str) -> None:
    assert refusal(f"{typed}=1") == f"Unknown key {typed}: did you mean {meant}?"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --rounds 5", "no option --rounds. Keys of the config are typed without dashes: rounds=5"),
        ("run --lr=0.1", "client.lr=0.1"), ("run digits --num-clients 3 -q", "clients=3"),
        ("run --algorithm scaffold", "algorithm=scaffold"), ("compare digits --fnr on", "fnr=on"),
        ("run --rounds --quiet", "rounds=VALUE"), ("scenario show iid --clients 3", "clients=3"),
        ("run --overwrit", "--overwrite"), ("run --lr", "client.lr=VALUE"),
    ],
)  # fmt: skip
def test_a_key_typed_as_an_option_is_explained(words: str, said: str) -> None:
    found = fnrfl(*words.split(), code=2)
    assert said in " ".join(found.stderr.replace("│", " ").split())


def test_one_number_of_seeds_is_one_seed(tmp_cwd: Path) -> None:
    small = ["compare", "rounds=1", "clients=3", "client.epochs=1", "--no-report"]
    assert "note: --seeds 5 is the one seed 5; 5 seeds are 0-4." in fnrfl(*small, "--seeds", "5").stdout
    assert "1 run, kept in" in (found := fnrfl(*small, "--seeds", "0")).stdout and "note: --seeds" not in found.stdout


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_one_thing_is_not_several(tmp_cwd: Path) -> None:
    assert counted(1, "round") == "1 round" and counted(0, "round") == "0 rounds"
    assert counted(1797, "example") == "1,797 examples" and counted(2, "class", "classes") == "2 classes"
    found = fnrfl("run", "rounds=1", "clients=1", "client.epochs=1", "scenario=iid")
    assert "1 client, 1 round, seed 0" in found.stdout and "after 1 round, kept" in found.stdout
    found = fnrfl("scenario", "show", "iid", "clients=1")
    assert "digits, 1 client, seed 0" in found.stdout
    assert "over 10 clients" not in found.stdout
    assert fnrfl("report", "runs", "--no-plots").exit_code == 0
    page = (tmp_cwd / "runs/report.html").read_text()
    assert "1 run on digits: iid over 1 client, 1 round, model mlp, seed 0." in page


# -- edges -----------------------------------------------------------------------------------------------------------


def test_empty_sections_say_nothing_and_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    assert loads("[client]\n[engine]\n[model]\n", {"public": {}}) == loads("")
    (tmp_path / "marked.toml").write_text("\ufeffrounds = 3\n", encoding="utf-8")
    assert load(tmp_path / "marked.toml").rounds == 3


def test_long_words_on_the_command_line_are_refused_in_words(tmp_cwd: Path) -> None:
    for word in ("name=" + "x" * 300, "x" * 300, "scenario=" + "x" * 5000, "x" * 300 + ".toml", "\udcff"):
        found = fnrfl("run", word, "--dry-run")
        assert found.exit_code == 2 and "Unexpected" not in found.stderr, found.stderr


def test_a_folder_does_not_change_what_a_method_is_called(tmp_cwd: Path) -> None:
    for name in ("FedAvg", "Loop"):
        Path(name).mkdir()
    config = load(None, ["algorithm=FedAvg", "engine=Loop"])
    assert (config.algorithm.name, config.engine.name) == ("fedavg", "loop")


def test_an_option_of_the_method_comes_before_a_word_of_other_systems() -> None:
    assert same_key("beta", ["algorithm.beta", "scenario"]) == ["algorithm.beta"]
