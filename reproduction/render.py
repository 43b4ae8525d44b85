"""Tables as text for a terminal, as markdown and as JSON: each value becomes words here, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from reproduction.catalogue import text
from reproduction.tables import Part, Table, Value

TABLE_FORMAT = 2


class Footnotes:
    """Sentences that values refer to, numbered in the order in which they were first met."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, sentences: Sequence[str]) -> list[int]:
        """Return the numbers of some sentences."""
        return [self.numbers.setdefault(sentence, len(self.numbers) + 1) for sentence in sentences]

    def __iter__(self) -> Iterator[str]:
        return (f"[{number}] {sentence}" for sentence, number in self.numbers.items())


def number_and_rest(value: Value) -> tuple[str, str]:
    """Return the number, or the words in its place, and what stands beside it: spread, and seeds if some are missing.

    >>> from fnrfl import statistics
    >>> number_and_rest(Value("honest", statistics.estimate([0.5, 0.7]), seeds=(0, 2), missing=(1,)))
    ('0.6000', '± 0.1414 (seeds 0, 2 of 3)')
    """
    if value.number is None or value.words:
        return value.words, ""
    mean, _, spread = value.number.spread(value.form).partition(" ")
    return mean, (spread + some_seeds(value.seeds, len(value.seeds + value.missing))).strip()


def value_words(value: Value) -> str:
    """Return a value as text."""
    return " ".join(number_and_rest(value)).rstrip()


def some_seeds(known: Sequence[int], asked: int) -> str:
    """Return which seeds a number is of, to follow it; nothing if it is of all that were asked for."""
    if len(known) >= asked:
        return ""
    return text("values", "seed" if len(known) == 1 else "seeds", seeds=", ".join(map(str, known)), asked=asked)


def _cell(value: Value, footnotes: Footnotes) -> str:
    numbers = footnotes.of(value.sources)
    leak = f" {text('values', 'leak')}" if value.leaks else ""
    return value_words(value) + leak + (f" [{', '.join(map(str, numbers))}]" if numbers else "")


def _cells(part: Part, footnotes: Footnotes) -> list[list[str]]:
    """Return head and rows."""
    rows = [["", *(column.label for column in part.columns)]]
    for place, (_, label) in enumerate(part.rows):
        rows.append([label, *(_cell(column.values[place], footnotes) for column in part.columns)])
    return rows


def as_text(table: Table, width: int | None = None) -> str:
    """Render a table for a terminal of a width; None: as wide as it is."""
    footnotes, said = Footnotes(), [text("rendered", "head", title=table.title, scale=table.scale)]
    for part in table.parts:
        rows = _cells(part, footnotes)
        lines = _in_columns(rows)
        fits = width is None or max(map(len, lines)) <= width
        said += ["", part.title, *([part.caption] if part.caption else []), *(lines if fits else _in_blocks(rows))]
    return "\n".join([*said, "", *footnotes, *table.notes]) + "\n"


def _in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _in_blocks(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield each row as lines of its own, a value on each: for tables that are wider than the terminal."""
    (_, *heads), *others = rows
    for name, *values in others:
        yield name
        yield from (f"  {head}: {value}" for head, value in zip(heads, values, strict=True) if value)


def as_markdown(table: Table) -> str:
    """Render a table for a document."""
    footnotes = Footnotes()
    said = [f"## {table.title}", "", text("rendered", "scale", scale=table.scale)]
    for part in table.parts:
        head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in _cells(part, footnotes))
        said += ["", f"### {part.title}", *([part.caption] if part.caption else []), ""]
        said += [f"| {' | '.join(row)} |" for row in (head, *rows)]
        said.insert(len(said) - len(rows), "|---" * len(head) + "|")
    return "\n".join([*said, "", *(f"- {sentence}" for sentence in (*footnotes, *table.notes))]) + "\n"


def as_json(tables: Sequence[Table]) -> str:
    """Render tables for programs, each under its name, with all that is known."""
    trees = {table.name: {"leaks": table.leaks, "title": table.title} | asdict(table) for table in tables}
    return json.dumps({"format": TABLE_FORMAT, "tables": trees}, indent=1, allow_nan=False) + "\n"
