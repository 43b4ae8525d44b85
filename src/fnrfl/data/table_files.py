"""Files of tables, read with pandas as cells of text: their encoding, delimiter, header and decimal signs are found."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.data.reading import require_file, unreadable
from fnrfl.data.table_summary import is_number

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
BEGINNING = 5_000_000  # characters of a file, of which the first lines are looked at
LOOKED_AT = 200  # lines, to find the delimiter
ENOUGH_CELLS = 1000  # different ones of a column, to tell numbers from text
MOST_TITLES = 5  # lines above the header
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
ENCODINGS = {"utf-16-le": "UTF-16", "utf-16-be": "UTF-16", "cp1252": "Windows-1252 (Latin-1)"}  # in words
NEEDED = {".xlsx": "openpyxl", ".parquet": "pyarrow"}  # beside pandas
OTHER_TABLE = 'Write it again, such as with pandas.read_csv(PATH, sep=r"\\s+").to_csv("NEW.csv", index=False).'

BROKEN_LINE = (
    "a cell with a delimiter in it must stand in quotes, and a quotation mark must be closed. Correct that line."
)

THOUSANDS = " '\u2019\u00a0\u202f"  # what may stand between thousands, beside a point or a comma
WITH_COMMA = re.compile(rf"(?=[+-]?,?\d)[+-]?(\d*|[1-9]\d?\d?([.{THOUSANDS}]\d{{3}})+)(,\d+)?([eE][+-]?\d+)?")
WITH_POINT = re.compile(rf"(?=[+-]?\.?\d)[+-]?(\d*|[1-9]\d?\d?([,{THOUSANDS}]\d{{3}})+)(\.\d*)?([eE][+-]?\d+)?")


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a file as text, a list for each column, and how they were found."""

    header: list[str]
    columns: list[list[str]]
    line: Callable[[int], int]  # in which line of the file a row ends
    delimiter: str = ","
    found: tuple[str, ...] = ()  # what is not plain about the file, in words


def read_cells(path: Path) -> Cells:
    """Read the cells of a table; lines without a cell, and a title above the header, are passed over."""
    require_file(path)
    kind = path.suffix.lower()
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            f'{path} is a table, and tables need pandas, which is not installed. Run `pip install "fnrfl[tables]"`.'
        ) from error
    try:
        read = {".xlsx": _workbook, ".parquet": _parquet}.get(kind, _delimited)
        return _with_header(path, read(path, pandas))
    except ImportError as error:
        needs = NEEDED.get(kind, "pandas")
        raise ConfigError(f"{path} needs {needs}, which is not installed. Run `pip install {needs}`.") from error
    except ConfigError:
        raise
    except Exception as error:  # readers of workbooks and of parquet raise errors of many kinds
        raise unreadable(path, "a table", error) from error


def _with_header(path: Path, cells: Cells) -> Cells:
    """The same cells with the header taken from them, which may stand below a title or in two lines."""
    columns, lines, height = cells.columns, cells.line, max(map(len, cells.columns), default=0)
    rows = [at for at in range(height) if any(column[at].strip() for column in columns)]
    if len(rows) < height:
        columns = [[column[row] for row in rows] for column in columns]
    top = [[cell.strip() for cell in row] for row in islice(zip(*columns, strict=True), MOST_TITLES + 2)]
    if len(rows) < 2 or len(columns) < 2:
        *marks, last = DELIMITERS.values()
        raise ConfigError(
            f"{path} has {counted(len(rows), 'line')} and {counted(len(columns), 'column')}; it must have a header, "
            f"examples, and two columns at least, separated by {', '.join(marks)} or {last}. {OTHER_TABLE}"
        )
    header, titles, joined = _header(top)
    first = titles + joined + 1
    found = [f"without {counted(titles, 'line')} above the header"] if titles else []
    found += [f"with the names of line {lines(rows[titles + 1])} as its header"] if joined else []
    return replace(
        cells,
        header=header,
        columns=[column[first:] for column in columns],
        line=lambda row: lines(rows[row + first]),
        found=(*cells.found, *found),
    )


def _header(top: Sequence[list[str]]) -> tuple[list[str], int, bool]:
    """(the names of the columns, how many lines of a title are above, whether a line names groups of columns)."""
    titles = 0
    while len(top[0]) > 2 and titles < len(top) - 2 and len([*filter(None, top[titles])]) < 2:
        titles += 1
    header, below = top[titles], top[titles + 1]
    if all(header) or not all(below) or any(map(is_number, below)):
        return header, titles, False
    groups: Iterator[str] = accumulate(header, lambda last, cell: cell or last)
    named = [f"{group} {name}".strip() for group, name in zip(groups, below, strict=True)]
    return below if len({*below}) == len(below) else named, titles, True


# -- files of each kind ------------------------------------------------------------------------------------------------


def _delimited(path: Path, pandas: Any) -> Cells:
    """The cells of a text file."""
    text, encoding = _decoded(path.read_bytes())
    declared = re.match(r'"?sep=(.)"?\r?\n', text)  # as Excel writes and reads it
    start = declared.end() if declared else 0
    delimiter = declared[1] if declared else _delimiter(text)
    rows = _rows(text[start:], delimiter)
    width = _usual_width(rows)[1]
    shifted = _lacks_a_name(rows, width)  # R writes no name above the numbers of rows
    names = None if not rows or len(rows[0]) >= width else range(width)
    try:
        frame = pandas.read_csv(
            io.StringIO(text[start:]), sep=delimiter, header=None, names=names, dtype=str, na_filter=False
        )
        columns = [column.tolist() for _, column in frame.items()]
    except pandas.errors.EmptyDataError:
        columns = []
    except pandas.errors.ParserError as error:
        raise unreadable(path, "a table", error, BROKEN_LINE) from error
    if shifted:
        first = ["", *(column[0] for column in columns[:-1])]
        columns = [[name, *column[1:]] for name, column in zip(first, columns, strict=True)]
    plain = "\t" if path.suffix.lower() == ".tsv" else ","
    found = [f"in {ENCODINGS[encoding]}"] if encoding in ENCODINGS else []
    found += [f"with {DELIMITERS.get(delimiter, repr(delimiter))} between cells"] if delimiter != plain else []
    return Cells([], columns, partial(_line, path, delimiter, bool(declared)), delimiter, tuple(found))


def _decoded(data: bytes) -> tuple[str, str]:
    """(the text of a file, its encoding): the mark at its beginning says it, or UTF-8 fits, or else Windows-1252."""
    for mark, encoding in MARKS.items():
        if data.startswith(mark):
            return data[len(mark) :].decode(encoding), encoding
    if data[:200].count(0) * 3 > len(data[:200]):  # every second byte of Latin letters in UTF-16
        encoding = "utf-16-be" if data[0] == 0 else "utf-16-le"
        return data.decode(encoding), encoding
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        if b"\0" in data:
            raise
        return data.decode("cp1252"), "cp1252"


def _rows(text: str, delimiter: str) -> list[list[str]]:
    """The first lines with a cell, as cells."""
    lines = islice(io.StringIO(text[:BEGINNING], newline=None), LOOKED_AT)
    return [row for row in csv.reader(lines, delimiter=delimiter) if "".join(row).strip()]


def _delimiter(text: str) -> str:
    """The character that parts most lines into equally many cells, the first line too, and into as many as can be."""

    def likely(delimiter: str) -> tuple[float, bool, int]:
        rows = _rows(text, delimiter)
        share, width = _usual_width(rows)
        return round(share, 1), share > 0 and len(rows[0]) > 1, width

    return max(DELIMITERS, key=likely)


def _usual_width(rows: Sequence[Sequence[str]]) -> tuple[float, int]:
    """(the share of lines that have it, how many cells most lines have); no share if it is one cell."""
    width, times = max(Counter(map(len, rows)).items(), key=lambda one: one[::-1], default=(0, 0))
    return (times / len(rows), width) if width > 1 else (0.0, width)


def _lacks_a_name(rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether the first line has a cell less than all others, whose last cells are not empty."""
    return len(rows) > 1 and len(rows[0]) == width - 1 > 1 and any(row[-1] for row in rows[1:] if len(row) == width)


def _line(path: Path, delimiter: str, declared: bool, row: int) -> int:
    """In which line of a text file a row ends; pandas passes over empty lines."""
    reader = csv.reader(io.StringIO(_decoded(path.read_bytes())[0], newline=None), delimiter=delimiter)
    lines = [reader.line_num for cells in reader if len(cells) > 1 or "".join(cells).strip()]
    return lines[row + declared]


def _workbook(path: Path, pandas: Any) -> Cells:
    """The cells of the first sheet."""
    with pandas.ExcelFile(path.resolve(), engine="openpyxl") as book:
        sheets = [str(name) for name in book.sheet_names]
        frame = pandas.read_excel(book, header=None, dtype=str, na_filter=False)
    found = (f"from its first sheet, {sheets[0]!r}, of {len(sheets)}",) if len(sheets) > 1 else ()
    return Cells([], [column.tolist() for _, column in frame.items()], lambda row: row + 1, found=found)


def _parquet(path: Path, pandas: Any) -> Cells:
    """The cells of a parquet file; its header is as good as a line."""
    frame = pandas.read_parquet(path.resolve())
    columns = [
        [str(name), *("" if gap else str(cell) for cell, gap in zip(column.tolist(), column.isna(), strict=True))]
        for name, column in frame.items()
    ]
    return Cells([], columns, lambda row: row + 1)


# -- decimal signs -----------------------------------------------------------------------------------------------------


def decimal_signs(columns: Sequence[Sequence[str]], plain: Sequence[bool], delimiter: str) -> list[str]:
    """The decimal sign of each column: what its cells say, or else those of other columns, or else the delimiter.

    `columns` are the different cells of each, and `plain` says where Python reads all as numbers. The sign is "" where
    it changes nothing, as in a column of text.
    """
    numeric = [_looks_like_numbers(cells) for cells in columns]
    if all(easy or not yes for yes, easy in zip(numeric, plain, strict=True)):
        return [""] * len(columns)
    said = [_sign(cells) if yes else "" for cells, yes in zip(columns, numeric, strict=True)]
    told = {*said} - {""}
    usual = told.pop() if len(told) == 1 else "," if delimiter != "," else "."
    signs = [sign or usual if yes else "" for sign, yes in zip(said, numeric, strict=True)]
    return [
        sign if any(plain_number(cell, sign) != cell for cell in cells) else ""
        for sign, cells in zip(signs, columns, strict=True)
    ]


def _looks_like_numbers(cells: Sequence[str]) -> bool:
    """Whether most cells are numbers in some way of writing."""
    cells = cells[:ENOUGH_CELLS]
    ways = (is_number, WITH_COMMA.fullmatch, WITH_POINT.fullmatch)
    return 2 * sum(any(way(cell) for way in ways) for cell in cells) > len(cells)


def _sign(cells: Sequence[str]) -> str:
    """The decimal sign that some cell leaves no doubt about; "" if there is none, or two."""
    told = set()
    for cell in cells:
        comma, point = WITH_COMMA.fullmatch(cell), WITH_POINT.fullmatch(cell)
        if bool(comma) != bool(point):
            told.add("," if comma else ".")
    return told.pop() if len(told) == 1 else ""


def plain_number(cell: str, sign: str) -> str:
    """A cell as Python writes numbers: 1.234,5 is 1234.5; text as it is."""
    pattern = {",": WITH_COMMA, ".": WITH_POINT}.get(sign)
    if pattern is None or cell.isdecimal() or not pattern.fullmatch(cell):
        return cell
    grouped = str.maketrans("", "", THOUSANDS + ("." if sign == "," else ","))
    return cell.translate(grouped).replace(",", ".")
