"""Tables: which column is what, by the keys of `[dataset]`, in training and in use."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fnrfl
from fnrfl.config import load as load_config
from fnrfl.core.errors import ConfigError
from fnrfl.data.datasets import load, read_source
from fnrfl.data.reading import Columns, Examples, Reading, split_names
from fnrfl.data.tables import read_tables
from fnrfl.runs.data import reading_of
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
    assert examples.y.tolist() == held["diagnosis"].tolist() and raw.classes == ["ill", "well"]


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
        ('\n  id,\n  day\r\n"dose, mg"\rward\n', ("id", "day", "dose, mg", "ward")),
    ],
)
def test_ignored_columns_are_written_as_in_a_table(text: str, names: tuple[str, ...]) -> None:
    config = load_config(None, {"dataset.ignore": text, "dataset.categories": text})
    assert reading_of(config).ignore == reading_of(config).categories == names


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
    with pytest.raises(ConfigError, match="line 3 of .* has '' in column 'hospital'"):
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


def test_columns_without_a_name_are_nobodys_and_no_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = {"age": hospitals()["age"], "dose": hospitals()["dose, mg"], "diagnosis": hospitals()["diagnosis"]}
    rows = [",".join(map(str, row)) for row in zip(*held.values(), strict=True)]
    names = ",".join(held)
    Path("plain.csv").write_text("\n".join([names, *rows]))
    Path("commas.csv").write_text("\n".join(f"{line},," for line in [names, *rows]))
    Path("frame.csv").write_text("\n".join([f",{names}", *(f"{7 * at},{row}" for at, row in enumerate(rows))]))
    plain, commas, frame = (read_source(f"{name}.csv").raw for name in ("plain", "commas", "frame"))
    for raw in (commas, frame):
        assert raw.columns == plain.columns and raw.parts[""].clients is None
        np.testing.assert_array_equal(raw.parts[""].x, plain.parts[""].x)
        np.testing.assert_array_equal(raw.parts[""].y, plain.parts[""].y)
    assert plain.notices == commas.notices == ()
    assert frame.notices == ("A column without a name (number 1) of frame.csv is left out: it numbers rows.",)
    with pytest.raises(ConfigError, match="frame.csv .*client"):
        load("frame.csv", by_client=True)
    for one in ("plain.csv", "frame.csv"):
        result = fnrfl.run(None, out=f"run-{one}", dataset=one, **QUICK)
        for other in ("plain.csv", "commas.csv", "frame.csv"):
            assert evaluate(f"run-{one}", other).accuracy == result.accuracy
            assert predict(f"run-{one}", other).labels == predict(f"run-{one}", one).labels
    assert predict("run-plain.csv", "frame.csv").notes[0] == frame.notices[0]
    more = [f"{at},{at}.25,{at},{('ill', 'well')[at % 2]}" for at in range(12)]
    Path("more.csv").write_text("\n".join([f",{names}", *more]))
    fnrfl.run(None, out=None, dataset="plain.csv", public={"source": "more.csv"}, **QUICK)


def test_a_list_of_columns_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="The list 'aaaa.* cannot be read .*it must be names that commas separate"):
        split_names("a" * 200_000)


@pytest.mark.parametrize("cells", [("a", "b"), ("0", "0"), ("0", ""), ("0.5", "1.5"), ("0,0", "1,1")])
def test_a_column_without_a_name_that_does_not_number_rows_is_refused(tmp_path: Path, cells: tuple[str, str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"a,{',' * (1 + cells[0].count(','))}label\n1,{cells[0]},x\n2,{cells[1]},y\n")
    with pytest.raises(ConfigError, match=r"has a column without a name \(number 2\), such as .* Name it in the first"):
        load(str(path))


# -- categories and missing values -------------------------------------------------------------------------------------

MISSING = ["", "NA", "n/a", "NaN", "null", "?", "  "]
numbers = st.integers(-99, 99).map(lambda n: str(n / 4))
words = st.sampled_from(["a", "b", "Ä b", "x,y", 'say "z"', "1 a", "-"])


@st.composite
def tables(draw: st.DrawFn, rows: int = 12, gaps: bool = True) -> dict[str, list[str]]:
    """Some columns, of numbers or of text, each with a known cell in its first row, and classes."""
    cells = {"number": numbers, "text": words}
    columns = {}
    for place, kind in enumerate(draw(st.lists(st.sampled_from(["number", "text"]), min_size=1, max_size=4))):
        cell = st.one_of(cells[kind], st.sampled_from(MISSING)) if gaps else cells[kind]
        columns[f"c{place}"] = [draw(cells[kind]), *draw(st.lists(cell, min_size=rows - 1, max_size=rows - 1))]
    return columns | {"label": ["yes" if row % 3 else "no" for row in range(rows)]}


def is_gap(cell: str) -> bool:
    return cell.strip().lower() in ("", "na", "n/a", "nan", "null", "?")


def plainly(columns: dict[str, list[str]]) -> list[list[float]]:
    """The inputs of a table, as one would write it at first: row by row, column by column."""
    rows = []
    for row in range(len(columns["label"])):
        inputs: list[float] = []
        for name in [name for name in columns if name != "label"]:
            known = [cell.strip() for cell in columns[name] if not is_gap(cell)]
            cell = columns[name][row].strip()
            try:
                [float(one) for one in known]
                inputs.append(float("nan") if is_gap(cell) else float(cell))
            except ValueError:
                inputs += [float("nan") if is_gap(cell) else float(cell == one) for one in sorted(set(known))]
        rows.append(inputs)
    return rows


def examples_of(path: str, **keys: Any) -> Examples:
    (examples,) = read_source(path, reading=Reading(**keys)).raw.parts.values()
    return examples


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(columns=tables(gaps=False), data=st.data())
def test_inputs_are_what_one_would_compute_at_first(tmp_path: Path, columns: Any, data: st.DataObject) -> None:
    x = examples_of(write(tmp_path / "t.csv", columns)).x
    np.testing.assert_array_equal(x, np.array(plainly(columns), dtype=np.float32))
    order = data.draw(st.permutations(range(12)))
    turned = {name: [cells[row] for row in order] for name, cells in columns.items()}
    np.testing.assert_array_equal(examples_of(write(tmp_path / "u.csv", turned)).x, x[order])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(columns=tables())
def test_dropped_rows_are_those_with_a_gap_and_no_others(tmp_path: Path, columns: Any) -> None:
    whole = np.array(plainly(columns), dtype=np.float32)
    known = [row for row in range(12) if not np.isnan(whole[row]).any()]
    examples = examples_of(write(tmp_path / "t.csv", columns), missing="drop")
    np.testing.assert_array_equal(examples.x, whole[known])
    assert examples.y.tolist() == ["yes" if row % 3 else "no" for row in known]
    assert len(known) == 12 or list(examples.names or []) == [str(row) for row in known]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(columns=tables(), cut=st.integers(1, 11), data=st.data())
def test_tables_read_alike_are_one_table_in_pieces(tmp_path: Path, columns: Any, cut: int, data: st.DataObject) -> None:
    reading = Reading(missing="drop")  # the reader leaves gaps as they are
    order = data.draw(st.permutations(list(columns)))
    pieces = [
        Path(write(tmp_path / "a.csv", {name: cells[:cut] for name, cells in columns.items()})),
        Path(write(tmp_path / "b.csv", {name: columns[name][cut:] for name in order})),
    ]
    (whole,) = read_tables([Path(write(tmp_path / "t.csv", columns))], None, reading)
    parts = read_tables(pieces, None, reading)
    assert all((one.columns, one.classes) == (whole.columns, whole.classes) for one in parts)
    assert parts[0].notices == whole.notices
    np.testing.assert_array_equal(np.concatenate([one.parts[""].x for one in parts]), whole.parts[""].x)
    np.testing.assert_array_equal(np.concatenate([one.parts[""].y for one in parts]), whole.parts[""].y)


@pytest.mark.parametrize(
    ("cells", "keys", "words"),
    [
        (["1", "2", "3", "1O"], {}, ["line 5", "'1O' in column 'c'", "line 2", "'1'", 'dataset.categories = "c"']),
        (["a", "b", "?", "a"], {}, ["line 4 of", "'?' in column 'c'", "1 missing cell", '"mean" or "drop"']),
        (["1", "", "NA", "4"], {}, ["line 3 of", "'' in column 'c'", "2 missing cells"]),
        (["", "", "", ""], {"missing": "drop"}, ["no example without a missing value"]),
        (["1", "2", "3", "4"], {"categories": ("d",)}, ["dataset.categories names the column 'd'", "'c'"]),
    ],
)
def test_cells_that_cannot_be_are_refused_in_a_sentence(
    tmp_path: Path, cells: list[str], keys: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        examples_of(write(tmp_path / "t.csv", {"c": cells, "label": [0, 1, 0, 1]}), **keys)
    assert all(word in str(error.value) for word in words), error.value


def test_text_that_does_not_repeat_is_no_category_unless_a_key_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", {"c": [f"patient {n}" for n in range(40)], "label": [n % 2 for n in range(40)]})
    with pytest.raises(ConfigError, match='40 different texts in 40 rows.*dataset.ignore = "c"'):
        examples_of(path)
    np.testing.assert_array_equal(examples_of(path, categories=("c",)).x.sum(1), np.ones(40))


def test_without_pandas_a_table_is_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.csv", hospitals())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r'pip install "fnrfl\[tables\]"'):
        load(path)


def test_a_cell_with_an_underscore_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    label = ["1_0", "10"] * 30
    codes = write(Path("codes.csv"), {"code": ["2_1", "21", "3_0"] * 20, "age": range(60), "label": label})
    with pytest.raises(ConfigError, match="line 2 of codes.csv has '2_1' in column 'code', and line 3"):
        load(codes)
    raw = read_source(codes, reading=Reading(categories=("code",))).raw
    assert raw.columns is not None and raw.columns.categories == {"code": ("21", "2_1", "3_0")}
    assert list(raw.classes or ()) == ["10", "1_0"]
    alone = read_source(write(Path("alone.csv"), {"code": ["2_1", "2_2"] * 30, "label": label})).raw
    assert alone.columns is not None and alone.columns.categories == {"code": ("2_1", "2_2")}
    plain = write(Path("plain.csv"), {"age": range(60), "dose": range(60), "label": label})
    fnrfl.run(None, out="run", dataset=plain, **QUICK)
    with pytest.raises(ConfigError, match="line 3 of new.csv has '2_1' in column 'age', which is a column of numbers"):
        predict("run", write(Path("new.csv"), {"age": ["1e1", "2_1"], "dose": [1, 2]}))


def test_numbers_are_categories_if_a_key_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", {"ward": [3, 1, 10, 3], "label": [0, 1, 0, 1]})
    raw = read_source(path, reading=Reading(categories=("ward",))).raw
    assert raw.columns is not None and raw.columns.encoded == ("ward=1", "ward=10", "ward=3")
    assert raw.parts[""].x.tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert Columns.from_json(json.loads(json.dumps(raw.columns.as_json()))) == raw.columns


def test_arrays_have_missing_values_too(tmp_path: Path) -> None:
    x = np.arange(40.0).reshape(20, 2)
    x[3, 1] = np.nan
    np.savez(tmp_path / "t.npz", x=x, y=np.arange(20) % 2)
    raw = read_source(str(tmp_path / "t.npz"), reading=Reading(missing="drop")).raw
    np.testing.assert_array_equal(raw.parts[""].x, np.delete(x, 3, axis=0))
    assert "of 20 examples, 1 with missing values is left out" in raw.notices[0]
