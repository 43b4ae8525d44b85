"""The tables of the reproduction's page: the paper's, its claims, and what every cell cost.

No column has values of two protocols, and every value of a run with a leak has the mark.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fnrfl.results.report.tables import Column, Table, TableCell, text_cell
from fnrfl.results.reproduce.kept_lines import CellLine, CellResult, KeptLines, bytes_both_ways, why_no_measure
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.settings import TRIAL_SETTINGS
from fnrfl.results.reproduce.shown import COLUMN_NAMES, ShownPart, ShownTable, ShownValue, once_each
from fnrfl.results.reproduce.titles import TITLES
from fnrfl.results.reproduce.verdicts import find_cells
from fnrfl.results.reproduce.wording import Footnotes
from fnrfl.runs.metrics import MIB

PROTOCOL_HELP = {
    "printed": "what was printed",
    "paper": "computed here with the released code's settings and leaks",
    "honest": "computed here; the test set only scores",
}
NUMBER_AND_SPREAD = re.compile(r"(\S+)(?: ([±(].*))?")  # 0.6631 ± 0.0042 (seeds 0, 2 of 3)
AGAIN = "again.jsonl"  # where a command that reruns a cell puts its line


@dataclass(frozen=True)
class PagePart:
    """One table of the page; `ran`: there is a computed value in it."""

    title: str
    table: Table
    ran: bool
    leaks: tuple[str, ...]
    caption: str = ""


@dataclass(frozen=True)
class PageTable:
    """A table of the paper: its parts, and the sentences that its values refer to by number."""

    name: str
    title: str
    command: str
    parts: tuple[PagePart, ...]
    footnotes: Mapping[str, int]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class CellGroup:
    """The cells of one setting: those with a result and what they cost, and those without."""

    title: str
    about: str  # what the setting is, and what its cells cost in sum
    leaks: bool
    ran: Table
    waiting: Table

    @property
    def count(self) -> str:
        """How many of them have run."""
        return f"{len(self.ran.rows)} of {len(self.ran.rows) + len(self.waiting.rows)} cells"


def page_table(shown: ShownTable) -> PageTable:
    """A shown table as the page has it."""
    footnotes = Footnotes()
    row_name = "claim" if shown.name == "claims" else "method"
    parts = tuple(page_part(part, footnotes, row_name) for part in shown.parts)
    command = f"fnrfl reproduce {shown.name} --scale {shown.scale} --rerun"
    return PageTable(shown.name, shown.title, command, parts, footnotes.numbers, shown.notes)


def page_part(part: ShownPart, footnotes: Footnotes, row_name: str) -> PagePart:
    """A column has the values of one protocol; the first has the names of the rows."""
    columns = tuple(
        Column(column.head, PROTOCOL_HELP[column.protocol], number=all(map(_is_number, column.values)))
        for column in part.columns
    )
    rows = tuple(
        (
            text_cell(row),
            *(
                value_cell(values.values[place], footnotes, number=column.number)
                for values, column in zip(part.columns, columns, strict=True)
            ),
        )
        for place, row in enumerate(part.rows)
    )
    found = _page_part(part.title, Table((Column(row_name, number=False), *columns), rows), list(part.values))
    return replace(found, caption=part.caption)


def _is_number(value: ShownValue) -> bool:
    """Whether a value is a number, perhaps with a spread, or the reason why there is none; else it is words."""
    if value.mean is None:
        return value.words in ("", "-", "not run", "failed", "older recipe")
    return NUMBER_AND_SPREAD.fullmatch(value.words) is not None


def value_cell(value: ShownValue, footnotes: Footnotes | None = None, *, number: bool = True) -> TableCell:
    """A number with its spread beside it, its leak, and where it is from; or why there is none. In a column of words,
    the words."""
    found = () if footnotes is None else footnotes.of(value.sources)
    match = NUMBER_AND_SPREAD.fullmatch(value.words) if number and value.mean is not None else None
    text, beside = match.groups(default="") if match else (value.words, "")
    compared = value.mean if number else value.words
    return TableCell(text, compared, beside, leak=bool(value.leaks), footnotes=found)


def headline(accuracy: ShownTable, controls: ShownTable) -> PagePart:
    """FNR, FedAvg and the control without the penalty on the paper's net, under each of its skews."""
    parts = [part for part in accuracy.parts if part.title.partition(", ")[0].endswith("ResNet-18")]
    columns, rows, values = parts[0].columns, [], []
    for part in parts:
        control = next(one for one in controls.parts if one.title == part.title)
        skew = part.title.partition(", ")[2]
        for source, row in ((part, "FedAvg"), (part, "FedAvg + FNR"), (control, "FedAvg + FNR with weight 0")):
            at = {column.protocol: column.values[source.rows.index(row)] for column in source.columns}
            shown = [at.get(column.protocol, ShownValue(column.protocol, "")) for column in columns]
            rows.append((text_cell(skew), text_cell(row), *(value_cell(value) for value in shown)))
            values += shown
    named = (Column("skew", number=False), Column("method", number=False))
    heads = (Column(column.head, PROTOCOL_HELP[column.protocol]) for column in columns)
    return _page_part("FNR against FedAvg, ResNet-18", Table((*named, *heads), tuple(rows)), values)


def _page_part(title: str, table: Table, values: Sequence[ShownValue]) -> PagePart:
    ran = any(value.protocol != "printed" and value.mean is not None for value in values)
    return PagePart(title, table, ran, once_each(value.leaks for value in values))


# -- what every cell cost ----------------------------------------------------------------------------------------------


def cell_groups(lines: KeptLines, scale: str) -> list[CellGroup]:
    """Every cell of a scale, by setting: so no column has two protocols."""
    cells = dict.fromkeys(cell for name in TITLES for cell in find_cells(name, scale))
    settings = dict.fromkeys(cell.setting for cell in cells)
    return [_cell_group(name, {cell: lines.find(cell) for cell in cells if cell.setting == name}) for name in settings]


def _cell_group(setting: str, found: Mapping[PaperCell, CellResult]) -> CellGroup:
    return CellGroup(
        COLUMN_NAMES[setting],
        _about(setting, [one.line for one in found.values() if one.usable]),
        any(cell.leaks for cell in found),
        Table(RAN_COLUMNS, tuple(_ran_row(cell, one) for cell, one in found.items() if one.usable)),
        Table(WAITING_COLUMNS, tuple(_waiting_row(cell, one) for cell, one in found.items() if not one.usable)),
    )


RAN_COLUMNS = (
    Column("cell", "and the command that runs it again", number=False),
    Column("accuracy", "on the test set after the last round"),
    Column(
        "seconds",
        "of training; words after it say why it is no measure: beside 2, two other cells ran at the same time",
    ),
    Column("all seconds", "with evaluation, preparing data and compiling"),
    Column("MiB", "traffic in both directions, all rounds"),
    Column("date", number=False),
    Column("device", number=False),
)
WAITING_COLUMNS = (Column("cell", "and the command that runs it", number=False), Column("result", number=False))


def _ran_row(cell: PaperCell, found: CellResult) -> tuple[TableCell, ...]:
    line, origin = found.line, found.words if found.state == "here" else found.state
    mib = bytes_both_ways(line) / MIB
    leak = bool(line["leaks"])
    note = why_no_measure(line)
    return (
        TableCell(cell.id, cell.id, leak=leak, command=rerun_command(cell, line)),
        TableCell(f"{line['accuracy']:.4f}", line["accuracy"], leak=leak),
        TableCell(f"{line['seconds_train']:,.1f}", line["seconds_train"], note),
        TableCell(f"{line['seconds_wall']:,.1f}", line["seconds_wall"], note),
        TableCell(f"{mib:,.1f}", mib),
        text_cell(line["date"]),
        TableCell(line["device"], line["device"], f"({origin})"),
    )


def _waiting_row(cell: PaperCell, found: CellResult) -> tuple[TableCell, ...]:
    words = f"failed: {found.line['failed']}" if found.state == "failed" else found.words
    named = TableCell(cell.id, cell.id, leak=bool(cell.leaks), command=rerun_command(cell, {}))
    return named, text_cell(words)


def rerun_command(cell: PaperCell, line: CellLine) -> str:
    """What runs a cell once more, on the engine that it had, into a file of its own."""
    engine = line.get("engine", {})
    keys = {"engine" if key == "name" else f"engine.{key}": _as_typed(value) for key, value in engine.items()}
    keys |= dict(word.split("=", 1) for word in line.get("words", ()))
    settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    return shlex.join(["fnrfl", "reproduce", "run", cell.id, *settings, "--out", AGAIN])


def _as_typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _about(setting: str, lines: Sequence[CellLine]) -> str:
    """What a setting is, and what its finished cells cost in sum."""
    meaning = TRIAL_SETTINGS[setting].meaning
    hours = sum(line["seconds_wall"] / line.get("processes", 1) for line in lines) / 3600
    gib = sum(map(bytes_both_ways, lines)) / MIB / 1024
    cost = f" Together {hours:,.2f} hours and {gib:,.1f} GiB of simulated traffic." if lines else ""
    return f"{meaning[0].upper()}{meaning[1:]}.{cost}"
