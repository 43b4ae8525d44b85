"""One page about the paper's tables: printed, by its protocol and honest, from whatever results there are."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reproduction.catalogue import DATA, TABLES, TEXTS, Cell, text
from reproduction.claims import named_cells, named_table
from reproduction.render import footnotes_of, number_and_rest, value_words
from reproduction.store import Line, Results
from reproduction.tables import MIB, Column, Part, Table, Value, leaks_of, scale_note


class CellGroup(NamedTuple):
    """The cells of one setting: those with a result and what they cost, and those without."""

    setting: str
    about: str
    leaks: bool
    ran: list[tuple[Cell, Line]]
    waiting: list[tuple[Cell, Line]]


def render_page(results: Results, scale: str, figures: Mapping[str, bytes]) -> str:
    """Render the page: style and PNG figures inside, nothing fetched, and no script."""
    tables = {name: named_table(name, results, scale) for name in TABLES}
    groups = cell_groups(results, scale)
    top = headline(tables["accuracy"], tables["controls"])
    style = (DATA / "page.css").read_text(encoding="utf-8")
    loader = FileSystemLoader(DATA)
    environment = Environment(autoescape=True, undefined=StrictUndefined, loader=loader, trim_blocks=True)
    ran, waiting = (sum(len(getattr(group, kind)) for group in groups) for kind in ("ran", "waiting"))
    return environment.get_template("page.html").render(
        style=Markup(style),
        style_hash="sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        what=text("page", "what", about=scale_note(scale), ran=ran, cells=ran + waiting),
        leaks=leaks_of(tables.values()),
        lead=lead(top, scale),
        figures={name: base64.b64encode(image).decode() for name, image in figures.items()},
        text=text,
        texts=TEXTS,
        **{"scale": scale, "tables": tables, "headline": top, "groups": groups, "MIB": MIB},
        **{"footnotes_of": footnotes_of, "shown": number_and_rest, "command": run_command},
    )


def headline(accuracy: Table, controls: Table) -> Part:
    """Return FNR, FedAvg and the control without the penalty on the paper's net, under each of its skews."""
    parts = [part for part in accuracy.parts if part.key[0] == "resnet18"]
    rows, values = [], list[list[Value]]()
    for part in parts:
        control = next(one for one in controls.parts if one.key == part.key)
        labels = dict(part.rows) | dict(control.rows)
        for source, method in ((part, "fedavg"), (part, "fedavg+fnr"), (control, "fedavg+weight-0")):
            rows.append((f"{part.key[1]}/{method}", f"{text('skews', part.key[1])}, {labels[method]}"))
            values.append([source.value(method, one.key) or Value(one.protocol) for one in parts[0].columns])
    columns = (
        Column(one.key, one.label, one.protocol, of_rows)
        for one, of_rows in zip(parts[0].columns, zip(*values, strict=True), strict=True)
    )
    return Part(("headline",), text("parts", "headline"), tuple(rows), tuple(columns))


def lead(top: Part, scale: str) -> str:
    """Return the result that matters most, as far as it is there."""
    if scale == "tiny":
        return text("page", "digits")
    said = {}
    for column in ("printed", "honest"):
        fedavg, fnr = (top.value(f"label/{method}", column) for method in ("fedavg", "fedavg+fnr"))
        if not (fedavg and fnr and fedavg.number and fnr.number):
            return text("page", "missing")
        said[column] = text("page", "pair", fnr=value_words(fnr), fedavg=value_words(fedavg))
    value = top.value("label/fedavg+weight-0", "honest")
    control = text("page", "control", value=value_words(value)) if value and value.number else ""
    return text("page", "lead", work=text("page", scale), control=control, **said)


def cell_groups(results: Results, scale: str) -> list[CellGroup]:
    """Return every cell of a scale, by setting: so no column has two protocols."""
    by_setting: dict[str, dict[Cell, Line]] = {}
    for cell in (cell for name in TABLES for cell in named_cells(name, scale)):
        by_setting.setdefault(cell.setting, {})[cell] = results.find(cell)
    groups = []
    for setting, found in by_setting.items():
        ran, waiting = ([(cell, line) for cell, line in found.items() if line.usable == has] for has in (True, False))
        hours = sum(line.seconds_wall / line.processes for _, line in ran) / 3600
        gib = sum(line.bytes for _, line in ran) / MIB / 1024
        cost = text("page", "cost", hours=f"{hours:,.2f}", gib=f"{gib:,.1f}") if ran else ""
        about, leaks = text("meanings", setting) + cost, any(cell.leaks for cell in found)
        groups.append(CellGroup(setting, about, leaks, ran, waiting))
    return groups


def run_command(cell: Cell, line: Line) -> str:
    """Return what runs a cell with the package alone, on the engine that it had."""
    names = {"engine" if key == "name" else f"engine.{key}": value for key, value in line.engine.items()}
    keys = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in names.items()]
    return shlex.join(["fnrfl", "run", cell.recipe, *keys, *cell.overrides])
