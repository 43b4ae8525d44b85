"""Tables as people have them: each is read to the same arrays, or refused in a sentence whose remedy works."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import fnrfl
from fnrfl.config import load as load_config
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.data.datasets import read_source
from fnrfl.data.reading import RawData, Reading, split_pairs
from fnrfl.data.table_files import decimal_signs, plain_number
from fnrfl.data.table_summary import TableSummary, merge_classes, merge_columns
from fnrfl.federation import site_data
from fnrfl.federation.agreement import Schema
from fnrfl.federation.node_config import NodeConfig
from fnrfl.runs.data import reading_of
from fnrfl.runs.predict import predict

ROWS = 40
HAS_OPENPYXL = importlib.util.find_spec("openpyxl") is not None
HAS_PARQUET = importlib.util.find_spec("pyarrow") is not None


def frame(rows: int = ROWS, seed: int = 0) -> pandas.DataFrame:
    """Patients; the ill are older."""
    rng = np.random.default_rng(seed)
    ill = np.arange(rows) % 2
    return pandas.DataFrame(
        {
            "age": np.round(50 + 20 * ill + rng.normal(0, 5, rows), 1),
            "cells": rng.integers(100, 4000, rows) * 5,
            "ward": np.array(["süd", "nord", "öst"])[rng.integers(0, 3, rows)],
            "outcome": np.where(ill, "sick", "well"),
        }
    )


def german(name: str = "t.csv", encoding: str = "utf-8", **more: Any) -> str:
    """A table as German Excel and R's write.csv2 write it."""
    frame().to_csv(name, index=False, sep=";", decimal=",", encoding=encoding, **more)
    return name


def text(change: Callable[[str], str], encoding: str = "utf-8", **how: Any) -> str:
    """A table as pandas writes it, changed by hand."""
    Path("t.csv").write_bytes(change(frame().to_csv(index=False, **how)).encode(encoding))
    return "t.csv"


def below(*lines: str) -> Callable[[str], str]:
    return lambda table: "\n".join(lines) + "\n" + table


def each(change: Callable[[int, str], str]) -> Callable[[str], str]:
    """Change every line; the header is line 0."""
    return lambda table: "".join(change(at, line) + "\n" for at, line in enumerate(table.splitlines()))


def grouped(sign: str) -> str:
    """Numbers with a sign between thousands, quoted."""
    whole = frame()
    whole["cells"] = [f"{count:,}".replace(",", sign) for count in whole["cells"]]
    whole.to_csv("t.csv", index=False, sep="," if sign == "," else ";", decimal="." if sign == "," else ",")
    return "t.csv"


def with_column(name: str, cells: list[Any]) -> str:
    frame().assign(**{name: cells})[["age", "cells", name, "ward", "outcome"]].to_csv("t.csv", index=False)
    return "t.csv"


def workbook(title: bool = False) -> str:
    if HAS_OPENPYXL:
        with pandas.ExcelWriter("t.xlsx") as book:
            frame().to_excel(book, index=False, startrow=2 * title, sheet_name="patients")
            if title:
                book.sheets["patients"]["A1"] = "Patients of 2024"
                frame(3).to_excel(book, sheet_name="other")
    else:
        Path("t.xlsx").write_bytes(b"PK")
    return "t.xlsx"


def parquet() -> str:
    if HAS_PARQUET:
        frame().to_parquet("t.parquet")
    else:
        Path("t.parquet").write_bytes(b"PAR1")
    return "t.parquet"


def r_table(table: str) -> str:
    """The output of R's write.table: quoted text, numbers of rows, and no name above them."""
    quoted = re.sub(r"[^\W\d_]+", lambda word: f'"{word[0]}"', table)
    return each(lambda at, line: f'"{at}"\t{line}' if at else line)(quoted)


DATES = [str(day.date()) for day in pandas.date_range("2024-01-01", periods=ROWS)]
GERMAN_DATES = [f"{1 + at % 28}.{1 + at % 12}.2024 08:30" for at in range(ROWS)]
SAME = ""
KEY = r"dataset\.(\w+) = [\"']([^\"']+)[\"']"
LINE = r"(pandas\.read_csv\(PATH.*?index=False\))"

# what -> (the table, what a note must say or SAME if there is none) or, refused, (the table, sentence, how to read on)
TABLES: dict[str, tuple[Callable[[], str], str]] = {
    "pandas": (lambda: text(str), SAME),
    "UTF-8 with a byte order mark": (lambda: text(str, "utf-8-sig"), SAME),
    "Windows-1252": (lambda: text(str, "cp1252"), "Windows-1252"),
    "UTF-16 with a mark": (lambda: text(str, "utf-16"), "UTF-16"),
    "UTF-16 without one": (lambda: text(str, "utf-16-le"), "UTF-16"),
    "ends of lines of Windows": (lambda: text(lambda table: table.replace("\n", "\r\n")), SAME),
    "ends of lines of an old Mac": (lambda: text(lambda table: table.replace("\n", "\r")), SAME),
    "German Excel": (lambda: german(encoding="cp1252"), "semicolons.* as "),
    "German, and a mark": (lambda: german(encoding="utf-8-sig", lineterminator="\r\n"), "semicolons"),
    "sep=; in the first line": (lambda: text(below("sep=;"), sep=";", decimal=","), "semicolons"),
    "tabs": (lambda: text(str, sep="\t"), "tabs"),
    "a .tsv": (lambda: Path(text(str, sep="\t")).rename("t.tsv").name, SAME),
    "vertical bars": (lambda: text(str, sep="|"), "vertical bars"),
    "R, write.table": (lambda: text(r_table, sep="\t"), "tabs"),
    "R, write.csv": (lambda: text(each(lambda at, line: f'"{at or ""}",{line}')), "numbers rows"),
    "all quoted": (lambda: text(str, quoting=1), SAME),
    "commas as decimals, quoted": (lambda: text(str, decimal=","), "as "),
    "thousands with commas": (lambda: grouped(","), "as "),
    "thousands with points": (lambda: grouped("."), "semicolons"),
    "thousands with narrow spaces": (lambda: grouped("\u202f"), "semicolons"),
    "empty lines": (lambda: text(lambda table: "\n" + table.replace("\n", "\n\n")), SAME),
    "empty rows of Excel": (lambda: text(each(lambda at, line: line + "\n;;;" * (at % 9 == 0)), sep=";"), "semicolons"),
    "a delimiter at every end": (lambda: text(each(lambda at, line: line + ";"), sep=";"), "semicolons"),
    "a delimiter at the ends of rows": (lambda: text(each(lambda at, line: line + "," * bool(at))), SAME),
    "a title above": (lambda: text(below("Patients of 2024", "")), "without 1 line above the header"),
    "a title above, padded": (lambda: text(below("Patients of 2024;;;"), sep=";"), "without 1 line above the header"),
    "a merged header": (lambda: text(below("Patient;;Stay;"), sep=";"), "names of line 2"),
    "space around cells": (lambda: text(lambda table: table.replace(",", ", ")), SAME),
    "a workbook": (workbook, SAME if HAS_OPENPYXL else "pip install openpyxl"),
    "a workbook with a title": (lambda: workbook(True), "first sheet" if HAS_OPENPYXL else "pip install openpyxl"),
    "a parquet file": (parquet, SAME if HAS_PARQUET else "pip install pyarrow"),
    "a column of dates": (lambda: with_column("seen", DATES), KEY),
    "German dates and times": (lambda: with_column("seen", GERMAN_DATES), KEY),
    "one cell in words": (lambda: with_column("dose", ["<5", *range(ROWS - 1)]), r"1 of its 40 cells.*?dataset.ignore"),
    "remarks": (lambda: with_column("remark", [f"remark {at}" for at in range(ROWS)]), KEY),
    "space between cells": (lambda: text(str, sep=" "), LINE),
}


def examples(path: str, **keys: str) -> RawData:
    config = load_config(None, {"dataset": path, **{f"dataset.{key}": value for key, value in keys.items()}})
    return read_source(path, reading=reading_of(config)).raw


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("what", TABLES)
def test_a_table_is_read_right_or_refused_with_a_remedy_that_works(what: str) -> None:
    make, said = TABLES[what]
    path, whole = make(), frame()
    try:
        raw = examples(path)
        notes = " ".join(raw.notices)
        assert re.search(said, notes) if said else "read " not in notes, notes
    except FnrflError as error:
        found = re.search(said, str(error)) if said else None
        assert found is not None, error
        if "pip install" in found[0]:
            return
        if said == LINE:
            exec(found[0], {"pandas": pandas, "PATH": path})
            raw = examples("NEW.csv")
        else:
            key, value = [*re.findall(KEY, str(error))][-1] if said != KEY else found.groups()
            raw = examples(path, **{key: value})
    assert raw.columns is not None and raw.columns.inputs == ("age", "cells", "ward")
    (part,) = raw.parts.values()
    wards = [whole["ward"] == ward for ward in raw.columns.categories["ward"]]
    assert len(wards) == 3
    np.testing.assert_array_equal(part.x, np.stack([whole["age"], whole["cells"], *wards], 1).astype(np.float32))
    assert part.y.tolist() == whole["outcome"].tolist()


# -- decimal signs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "delimiter", "signs"),
    [
        ([["79,0", "1"], ["1.234", "17"]], ";", [",", ","]),  # another column says what a point is
        ([["79.5", "1"], ["1,234", "17"]], ",", ["", "."]),
        ([["1,234", "2,500"]], ";", [","]),  # nothing says it: the delimiter does
        ([["1,234", "2,500"]], ",", ["."]),
        ([["1.234", "2.5"]], ";", [""]),
        ([["north, east", "1,5"]], ";", [""]),  # text stays as it is
        ([["0,5", "-1.000,5", "2,5e3"]], ",", [","]),
        ([["1.2.3", "-"]], ";", [""]),
    ],
)
def test_the_decimal_sign_of_a_column(columns: list[list[str]], delimiter: str, signs: list[str]) -> None:
    assert decimal_signs(columns, [False] * len(columns), delimiter) == signs


@pytest.mark.parametrize(
    ("cell", "comma", "point"),
    [("1.234,5", "1234.5", "1.234,5"), ("1,234.5", "1,234.5", "1234.5"), ("-7", "-7", "-7"), ("x,y", "x,y", "x,y")]
    + [("1'234", "1234", "1234"), (",5", ".5", ",5"), ("0,123", "0.123", "0,123"), ("12.34", "12.34", "12.34")],
)
def test_a_number_as_python_writes_it(cell: str, comma: str, point: str) -> None:
    assert (plain_number(cell, ","), plain_number(cell, "."), plain_number(cell, "")) == (comma, point, cell)


def test_a_broken_line_and_an_open_quote_are_named() -> None:
    for broken in (lambda at, line: line + ",x" * (at == 7), lambda at, line: line.replace("ward", '"ward')):
        text(each(broken))
        with pytest.raises(ConfigError, match="must stand in quotes, and a quotation mark must be closed"):
            examples("t.csv")


def test_numbers_in_words_are_named_in_a_note() -> None:
    raw = examples(with_column("dose", ["12 mg", "< 5", "7,5 mg", "10 mg"] * (ROWS // 4)))
    assert any("'dose' looks like numbers in words, such as '12 mg'" in note for note in raw.notices)
    raw = examples(with_column("group", ["18-25", "26-40", "over 40", "child"] * (ROWS // 4)))
    assert not any("in words" in note for note in raw.notices)


# -- several tables ----------------------------------------------------------------------------------------------------

NAMES = {"age": "alter", "cells": "Zellen", "ward": "station", "outcome": "ergebnis"}


def sites() -> list[Path]:
    """Three sites, each with a table in its own way; one calls its columns otherwise."""
    Path("sites").mkdir()
    frame(seed=1).to_csv("sites/A.csv", index=False)
    frame(seed=2).to_csv("sites/B.tsv", index=False, sep="\t", encoding="utf-16")
    frame(seed=3).rename(columns=NAMES).to_csv("sites/C.csv", index=False, sep=";", decimal=",", encoding="cp1252")
    return sorted(Path("sites").iterdir())


def test_the_pairs_that_a_refusal_proposes_work_when_typed() -> None:
    sites()
    with pytest.raises(CompatibilityError, match="dataset.rename") as told:
        examples("sites", label="outcome")
    key, value = re.findall(KEY, str(told.value))[0]
    assert key == "rename" and dict(split_pairs(value)) == {old: new for new, old in NAMES.items()}
    raw = examples("sites", label="outcome", rename=value)
    whole = pandas.concat([frame(seed=seed) for seed in (1, 2, 3)])
    (part,) = raw.parts.values()
    np.testing.assert_array_equal(part.x[:, :2], whole[["age", "cells"]].to_numpy(np.float32))
    assert any(note.startswith("Columns are renamed") for note in raw.notices)


def test_a_later_table_is_read_by_the_same_rules(tmp_path: Path) -> None:
    sites()
    renamed = ",".join(f"{old}={new}" for new, old in NAMES.items())
    keys = {"name": "sites", "label": "outcome", "rename": renamed}
    fnrfl.run(None, out="run", dataset=keys, scenario="natural", model="logistic", rounds=2)
    frame(seed=4).to_csv("plain.csv", index=False)
    frame(seed=4).rename(columns=NAMES).to_csv("later.csv", index=False, sep=";", decimal=",")
    plain, later = predict("run", "plain.csv"), predict("run", "later.csv")
    np.testing.assert_array_equal(plain.probabilities, later.probabilities)
    assert any("semicolons" in note for note in later.notes)
    assert fnrfl.evaluate("run", "later.csv").accuracy == fnrfl.evaluate("run", "plain.csv").accuracy


def test_nodes_read_their_tables_each_in_its_own_way() -> None:
    files = sites()
    reading = Reading("outcome", rename=tuple((old, new) for new, old in NAMES.items()))
    told = [site_data.describe_site(NodeConfig(data=str(at), name=at.stem), reading) for at in files]
    assert all((one.label, [c.name for c in one.columns]) == ("outcome", ["age", "cells", "ward"]) for one in told)
    assert [[c.type for c in one.columns] for one in told] == [["number", "integer", "category"]] * 3
    tables = [TableSummary(at.stem, one.columns, one.label, one.labels) for at, one in zip(files, told, strict=True)]
    schema = Schema(merge_classes(tables), (5,), "float32", False, merge_columns(tables))
    for seed, at in enumerate(files, 1):
        read = site_data.read_agreed(NodeConfig(data=str(at), name=at.stem), reading, schema)
        ages = sorted([*read.train.x[:, 0].tolist(), *read.test.x[:, 0].tolist()])
        assert ages == sorted(frame(seed=seed)["age"].astype(np.float32).tolist())
    bare = [site_data.describe_site(NodeConfig(data=str(at), name=at.stem), Reading()) for at in files]
    tables = [TableSummary(at.stem, one.columns, one.label, one.labels) for at, one in zip(files, bare, strict=True)]
    with pytest.raises(CompatibilityError, match="dataset.rename = 'ergebnis=outcome'"):
        merge_columns(tables)
    with pytest.raises(CompatibilityError, match=r"dataset.rename = '.*station=ward.*ergebnis=outcome'"):
        merge_columns([tables[0], replace(tables[2], label="outcome")], renamed=[("ergebnis", "outcome")])


@pytest.mark.parametrize("value", ["a", "a=", "a=b=c", "a=b,a=c"])
def test_pairs_that_cannot_be_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="dataset.rename"):
        split_pairs(value)


def test_an_old_name_that_no_table_has_and_a_name_that_is_taken_are_refused() -> None:
    text(str)
    with pytest.raises(ConfigError, match="dataset.rename names the column 'agee'.* Did you mean 'age'"):
        examples("t.csv", rename="agee=years")
    with pytest.raises(ConfigError, match="more than one column called 'cells'.*dataset.rename"):
        examples("t.csv", rename="age=cells")
