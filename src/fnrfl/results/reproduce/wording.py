"""A shown table as text for a terminal, as markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fnrfl.results.reproduce.shown import ShownPart, ShownTable, ShownValue, once_each

TABLE_FORMAT = 1


class Footnotes:
    """Sentences that values refer to, numbered in the order in which they were first met."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, sentences: Sequence[str]) -> tuple[int, ...]:
        """The numbers of some sentences."""
        return tuple(self.numbers.setdefault(sentence, len(self.numbers) + 1) for sentence in sentences)

    def marks(self, sentences: Sequence[str]) -> str:
        """The numbers of some sentences as text, such as [1, 3]."""
        found = self.of(sentences)
        return f" [{', '.join(map(str, found))}]" if found else ""

    def __iter__(self) -> Iterator[str]:
        return (f"[{number}] {sentence}" for sentence, number in self.numbers.items())


def _text(value: ShownValue, footnotes: Footnotes) -> str:
    leak = " leak" if value.leaks else ""
    return f"{value.words}{leak}{footnotes.marks(value.sources)}"


def _cells(part: ShownPart, footnotes: Footnotes) -> list[list[str]]:
    """Head and rows."""
    rows = [["", *(column.head for column in part.columns)]]
    for place, row in enumerate(part.rows):
        rows.append([row, *(_text(column.values[place], footnotes) for column in part.columns)])
    return rows


def as_text(table: ShownTable, width: int | None = None) -> str:
    """A table as text for a terminal of a width; None: as wide as it is."""
    footnotes, said = Footnotes(), [f"{table.title}; scale {table.scale}"]
    for part in table.parts:
        rows = _cells(part, footnotes)
        lines = _in_columns(rows)
        fits = width is None or max(map(len, lines)) <= width
        said += ["", part.title, *([part.caption] if part.caption else []), *(lines if fits else _in_blocks(rows))]
    return "\n".join([*said, "", *footnotes, *table.notes]) + "\n"


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _in_blocks(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each row as lines of its own, a value on each: for tables that are wider than the terminal."""
    (_, *heads), *others = rows
    for name, *values in others:
        yield name
        yield from (f"  {head}: {value}" for head, value in zip(heads, values, strict=True) if value)


def as_markdown(table: ShownTable) -> str:
    """A table as markdown for a document."""
    footnotes, said = Footnotes(), [f"## {table.title}", "", f"Scale {table.scale}."]
    for part in table.parts:
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in _cells(part, footnotes))
        said += [
            "",
            f"### {part.title}",
            *([part.caption] if part.caption else []),
            "",
            _row(head),
            "|---" * len(head) + "|",
            *map(_row, rows),
        ]
    return "\n".join([*said, "", *(f"- {sentence}" for sentence in (*footnotes, *table.notes))]) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table_tree(table: ShownTable) -> dict[str, Any]:
    """A table as plain values, with all that is known, for programs."""
    return {"format": TABLE_FORMAT, "leaks": table.leaks} | asdict(table)


def as_json(tables: Sequence[ShownTable]) -> str:
    """One object, with each table under its name."""
    leaks = once_each(table.leaks for table in tables)
    tree = {"format": TABLE_FORMAT, "leaks": leaks, "tables": {table.name: table_tree(table) for table in tables}}
    return json.dumps(tree, indent=1, allow_nan=False) + "\n"
