"""Tables: which column is what, by the keys of `[dataset]`, in training and in use."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fnrfl
from fnrfl.config import load as load_config
from fnrfl.core.errors import ConfigError
from fnrfl.data.datasets import load, read_source
from fnrfl.data.reading import Reading
from fnrfl.runs.predict import evaluate, predict

QUICK: dict[str, Any] = {"clients": 2, "rounds": 2, "scenario": "iid", "model": "mlp"}


def write(path: Path, columns: dict[str, Any]) -> str:
    """A table of these columns, in their order."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return str(path)


def hospitals(rows: int = 60) -> dict[str, Any]:
    """Patients of three hospitals; the ill are older."""
    ill = np.arange(rows) % 2
    return {
        "diagnosis": np.where(ill, "ill", "well"),
        "id": np.arange(rows) + 10_000,
        "age": 40 + 20 * ill + np.arange(rows) % 7,
        "hospital": [f"H{row % 3}" for row in range(rows)],
        "dose, mg": np.arange(rows) / 8,
    }


KEYS = Reading("diagnosis", "hospital", ("id",))


def test_keys_say_what_a_column_is(tmp_path: Path) -> None:
    held = hospitals()
    raw = read_source(write(tmp_path / "t.csv", held), reading=KEYS).raw
    assert raw.columns is not None and raw.columns.inputs == ("age", "dose, mg") and raw.columns.label == "diagnosis"
    (examples,) = raw.parts.values()
    np.testing.assert_array_equal(examples.x, np.stack([held["age"], held["dose, mg"]], 1).astype(np.float32))
    assert examples.clients.tolist() == held["hospital"]
    assert [(raw.classes or ())[label] for label in examples.y] == held["diagnosis"].tolist()


def test_every_example_keeps_its_client_when_a_test_part_is_drawn(tmp_path: Path) -> None:
    held = hospitals()
    data = load(write(tmp_path / "t.csv", held), reading=KEYS)
    numbers = np.stack([held["age"], held["dose, mg"]], 1).tolist()
    holder = {tuple(row): who for row, who in zip(numbers, held["hospital"], strict=True)}
    for part, clients in ((data.train, data.train_clients), (data.test, data.test_clients)):
        assert clients == tuple(holder[tuple(row)] for row in part.x.tolist())
    assert load("digits").train_clients is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("id", ("id",)),
        (" id , day", ("id", "day")),
        ('id,"dose, mg"', ("id", "dose, mg")),
        ("a,,b,", ("a", "b")),
    ],
)
def test_ignored_columns_are_written_as_in_a_table(text: str, names: tuple[str, ...]) -> None:
    assert Reading.from_text(label="", client="", ignore=text).ignore == names


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        (Reading(label="diagnosos"), ["dataset.label", "'diagnosos'", "Did you mean 'diagnosis'?"]),
        (Reading(client="ward"), ["dataset.client", "'ward'", "'hospital'"]),
        (Reading(ignore=("ID",)), ["dataset.ignore", "'ID'"]),
        (Reading(label="id", ignore=("id",)), ["dataset.label and dataset.ignore both name", "'id'"]),
        (Reading(label="id", client="id"), ["dataset.label and dataset.client both name"]),
        (Reading(ignore=("age", "dose, mg", "hospital", "id")), ["leave 1 column", "an input"]),
    ],
)
def test_columns_that_cannot_be_are_refused_in_a_sentence(tmp_path: Path, reading: Reading, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_source(write(tmp_path / "t.csv", hospitals()), reading=reading)
    assert all(word in str(error.value) for word in words), error.value


def test_a_row_that_nobody_holds_and_keys_of_tables_without_one_are_refused(tmp_path: Path) -> None:
    held = hospitals(4) | {"hospital": ["H0", " ", "H1", "H1"]}
    with pytest.raises(ConfigError, match="line 3 of .* has nothing in column 'hospital'"):
        read_source(write(tmp_path / "t.csv", held), reading=KEYS)
    with pytest.raises(ConfigError, match="names a column of a table, and dataset = 'digits' is no table"):
        read_source("digits", reading=Reading(label="y"))


def test_a_run_and_its_use_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = hospitals()
    write(Path("t.csv"), held)
    keys = {"name": "t.csv", "label": "diagnosis", "client": "hospital", "ignore": "id"}
    result = fnrfl.run(None, out="run", dataset=keys, **QUICK)
    assert result.input_shape == (2,) and result.classes == ("ill", "well")
    assert evaluate("run", "t.csv").what == "the test part"
    plain = predict("run", write(Path("new.csv"), {name: held[name] for name in ("age", "dose, mg")}))
    whole = predict("run", write(Path("turned.csv"), dict(reversed(held.items()))))
    np.testing.assert_array_equal(plain.probabilities, whole.probabilities)
    again = load_config("run/config.toml").dataset
    assert (again.label, again.client, again.ignore) == ("diagnosis", "hospital", "id")
