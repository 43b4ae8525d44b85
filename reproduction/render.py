"""Tables as text for a terminal, as markdown and as JSON: each value becomes words here, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from reproduction.catalogue import text
from reproduction.tables import Part, Table, Value

TABLE_FORMAT = 2


def footnotes_of(value: Value, notes: dict[str, int]) -> str:
    """Return the numbers of a value's sources; `notes` numbers all sentences in the order in which they are met."""
    return ", ".join(str(notes.setdefault(sentence, len(notes) + 1)) for sentence in value.sources)


def number_and_rest(value: Value) -> tuple[str, str]:
    """Return the number, or the words in its place, and what stands beside it: spread, and seeds if some are missing.

    >>> from fnrfl import statistics
    >>> number_and_rest(Value("honest", statistics.estimate([0.5, 0.7]), seeds=(0, 2), missing=(1,)))
    ('0.6000', '± 0.1414 (seeds 0, 2 of 3)')
    """
    if value.number is None or value.words:
        return value.words, ""
    mean, _, spread = value.number.spread(value.form).partition(" ")
    return mean, (spread + some_seeds(value)).strip()


def value_words(value: Value) -> str:
    """Return a value as text."""
    return " ".join(number_and_rest(value)).rstrip()


def some_seeds(value: Value) -> str:
    """Return which seeds a number is of, to follow it; nothing if none is missing."""
    if not value.missing:
        return ""
    known, asked = ", ".join(map(str, value.seeds)), len(value.seeds + value.missing)
    return text("values", "seed" if len(value.seeds) == 1 else "seeds", seeds=known, asked=asked)


def _cells(part: Part, notes: dict[str, int]) -> list[list[str]]:
    """Return head and rows."""
    rows = [["", *(column.label for column in part.columns)]]
    for place, (_, label) in enumerate(part.rows):
        rows.append([label])
        for value in (column.values[place] for column in part.columns):
            leak = f" {text('values', 'leak')}" if value.leaks else ""
            rows[-1].append(value_words(value) + leak + (f" [{footnotes_of(value, notes)}]" if value.sources else ""))
    return rows


def _below(table: Table, notes: dict[str, int]) -> list[str]:
    return [*(f"[{number}] {sentence}" for sentence, number in notes.items()), *table.notes]


def as_text(table: Table, width: int | None = None) -> str:
    """Render a table for a terminal of a width; None: as wide as it is.

    A part that is wider has a line for each value.
    """
    said, notes = [text("rendered", "head", title=table.title, scale=table.scale)], dict[str, int]()
    for part in table.parts:
        rows = _cells(part, notes)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if width is not None and max(map(len, lines)) > width:
            lines = []
            for name, *values in rows[1:]:
                pairs = zip(rows[0][1:], values, strict=True)
                lines += [name, *(f"  {head}: {value}" for head, value in pairs if value)]
        said += ["", part.title, *filter(None, [part.caption]), *lines]
    return "\n".join([*said, "", *_below(table, notes)]) + "\n"


def as_markdown(table: Table) -> str:
    """Render a table for a document."""
    said, notes = [f"## {table.title}", "", text("rendered", "scale", scale=table.scale)], dict[str, int]()
    for part in table.parts:
        cells = ([cell.replace("|", "\\|") for cell in row] for row in _cells(part, notes))
        head, *rows = (f"| {' | '.join(row)} |" for row in cells)
        rule = "|---" * (len(part.columns) + 1) + "|"
        said += ["", f"### {part.title}", *filter(None, [part.caption]), "", head, rule, *rows]
    return "\n".join([*said, "", *(f"- {sentence}" for sentence in _below(table, notes))]) + "\n"


def as_json(tables: Sequence[Table]) -> str:
    """Render tables for programs, each under its name, with all that is known."""
    trees = {table.name: {"leaks": table.leaks, "title": table.title} | asdict(table) for table in tables}
    return json.dumps({"format": TABLE_FORMAT, "tables": trees}, indent=1, allow_nan=False) + "\n"
