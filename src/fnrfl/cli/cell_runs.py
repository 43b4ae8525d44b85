"""The cells behind the paper's tables: the queue of those without a result, and running them."""

from __future__ import annotations

import json as json_format
import re
import time as clock
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fnrfl.cli.common import Debug, Json, Quiet, console, errors_in_words, how_to_go_on, print_answer, print_table
from fnrfl.cli.notices import notices
from fnrfl.cli.tables_page import say_where_the_page_is
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.results.reproduce.titles import HERE

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.results.reproduce.cell_queue import CellNotice
    from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines
    from fnrfl.results.reproduce.paper_cells import PaperCell
    from fnrfl.results.reproduce.waiting import Waiting

Scale = Annotated[
    Literal["tiny", "quick", "full"],
    typer.Option("--scale", help="tiny: digits, on any computer; quick: CIFAR-10, fewer epochs; full: the paper's."),
]
AnyScale = Annotated[
    Literal["tiny", "quick", "full"] | None,
    typer.Option("--scale", show_default="all", help="Cells of one scale."),
]
CellSeeds = Annotated[
    str | None,
    typer.Option("--seeds", metavar="0,1,2 or 0-4", show_default="0,1,2; the paper's protocol: 0", help="Seeds."),
]
LinesOut = Annotated[
    Path,
    typer.Option(
        "--out", "-o", metavar="FILE", show_default="runs/reproduction/lines.jsonl",
        help="Results of your own: those in this file are shown, and new ones are added.",
    ),
]  # fmt: skip
For = Annotated[
    str | None, typer.Option("--for", metavar="TIME", help="Begin no cell that will not fit: 90s, 9m or 2h.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A key of [engine] for every cell."),
]
Rerun = Annotated[
    bool, typer.Option("--rerun", help="Run every cell of it here, and show those results before committed ones.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print markdown, for a document.")]
Committed = Annotated[bool, typer.Option("--rerun", help="Of a table, also cells that have a committed result.")]
Again = Annotated[bool, typer.Option("--again", help="Try cells that failed once more.")]
ProcessCount = Annotated[
    int,
    typer.Option(
        "--processes", min=1, max=64, metavar="N", help="Run N cells beside each other; their seconds are no measure."
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[TABLE|CELL]...", show_default="the queue", help="Tables, or cells by their id."),
]
GO_ON = "To go on, give the same command again: finished cells are kept, and the rounds of long ones."
SECONDS_OF_SILENCE = 60.0  # after which the next round of a cell is told


def show_plan(scale: AnyScale = None, out: LinesOut = HERE, json: Json = False, debug: Debug = False) -> None:
    """The queue: cells without a result, in the order of what they add, with about how long each takes.

    Cells for `seconds` have run. They run once more, alone, since their seconds, or those of a method that they are
    compared with, are no measure.

    \b
    fnrfl reproduce plan
    fnrfl reproduce plan --scale quick --json
    """
    with errors_in_words(debug, answers=json):
        from fnrfl.results.reproduce.kept_lines import KeptLines
        from fnrfl.results.reproduce.waiting import by_purpose, queue

        lines = KeptLines.read(out)
        waiting = queue(lines, scale)
        parts = by_purpose(waiting)
        if json:
            cells = [
                {
                    "id": one.cell.id, "for": one.purpose, "seconds": round(one.seconds, 1),
                    "leaks": one.cell.leaks, "command": one.cell.command,
                }
                for one in waiting
            ]  # fmt: skip
            purposes = [{"for": left.purpose, "cells": left.cells, "seconds": round(left.seconds, 1)} for left in parts]
            total = round(sum(one.seconds for one in waiting), 1)
            print_answer(json_format.dumps({"cells": cells, "purposes": purposes, "seconds": total}, indent=1))
            return
        _print_queue(waiting, scale)
        of_scale = [line for line in lines if scale in (None, line["id"].rpartition("@")[2])]
        failed = [line["id"] for line in of_scale if "failed" in line]
        if failed:
            typer.echo(f"failed, and tried again only with --again: {', '.join(failed)}")


def _print_queue(waiting: Sequence[Waiting], scale: str | None) -> None:
    """The cells of the queue, and how much is left for each purpose and in all."""
    from fnrfl.results.reproduce.waiting import by_purpose

    if scale == "tiny":
        typer.echo(
            "The queue has no cells of the scale tiny: a table runs its own, such as `fnrfl reproduce accuracy --scale "
            "tiny`."
        )
        return
    rows, spent = [("", "cell", "for", "seconds", "sum")], 0.0
    for number, one in enumerate(waiting, 1):
        spent += one.seconds
        leak = " leak" if one.cell.leaks else ""
        rows.append((str(number), one.cell.id + leak, one.purpose, f"{one.seconds:.0f}", _duration(spent)))
    print_table(rows)
    for left in by_purpose(waiting):
        typer.echo(f"{left.purpose}: {counted(left.cells, 'cell')}, about {_duration(left.seconds)}")
    typer.echo(f"{counted(len(waiting), 'cell')}, about {_duration(spent)} on an H200, without compiling steps")


def run_cells(
    names: Names = None,
    scale: AnyScale = None,
    seeds: CellSeeds = None,
    time: For = None,
    out: LinesOut = HERE,
    words: Set = None,
    rerun: Committed = False,
    again: Again = False,
    processes: ProcessCount = 1,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run cells: the next ones of the queue, those of some tables, or single ones.

    \b
    fnrfl reproduce run --scale quick --for 9m
    fnrfl reproduce run --scale quick --for 2h --processes 3
    fnrfl reproduce run accuracy controls --scale tiny --seeds 0
    fnrfl reproduce run seconds
    fnrfl reproduce run resnet18/label/honest/fedavg/seed0@quick --set engine=gpu

    Each result is a line of JSON, written when its cell is finished. On a GPU cells run in bf16 and not
    deterministically, unless --set engine=... says how. With --processes, one cell prepares its programs while others
    train; no table shows the seconds of such cells. `seconds` names the cells that `plan` lists for that purpose.
    """
    with errors_in_words(debug):
        from fnrfl.results.reproduce.kept_lines import KeptLines

        screen, lines = console(quiet=quiet), KeptLines.read(out)
        known = KeptLines([], []) if rerun else lines
        cells = _named_cells(names, scale, seeds, known, beside_others=processes > 1)
        done = carry(cells, out, lines, screen, time=time, words=words or (), again=again, processes=processes)
        failed = sum("failed" in line for line in done)
        screen.print(f"{counted(len(done) - failed, 'cell')} done, {failed} failed; lines in {out}")
        before = 0 if again else sum(lines.find(cell).state == "failed" for cell in cells)
        _say_what_was_not_run(cells, lines, out, before, screen)
        say_where_the_page_is(screen, out, cells[0].scale if cells else scale or "quick")
        raise typer.Exit(3 if failed or before else 0)


def _say_what_was_not_run(
    cells: Sequence[PaperCell], lines: KeptLines, place: Path, failed: int, screen: Console
) -> None:
    """Which of the cells that were asked for were not run, and how to have them run."""
    kept = sum(lines.find(cell, prefer_here=True).state == "here" for cell in cells)
    if kept:
        has, them = ("has", "it") if kept == 1 else ("have", "them")
        screen.print(
            f"{counted(kept, 'cell')} {has} a result in {place} already. To run {them} again, choose another file "
            "with --out."
        )
    if not cells:
        screen.print("Nothing was left to run. Of a table, --rerun also takes cells that have a result.")
    if failed:
        screen.print(f"{counted(failed, 'cell')} failed before; --again tries them once more.")


def carry(
    cells: Sequence[PaperCell],
    place: Path,
    lines: KeptLines,
    screen: Console,
    *,
    time: str | None,
    words: Sequence[str],
    again: bool = False,
    processes: int = 1,
) -> list[CellLine]:
    """Run cells, and show each as it begins and ends."""
    from fnrfl.results.reproduce.carrying import carry_out

    seconds, elsewhere = None if time is None else read_duration(time), set[str]()
    said = clock.monotonic()

    def tell(notice: CellNotice) -> None:
        nonlocal said
        if notice.what == "round" and clock.monotonic() - said < SECONDS_OF_SILENCE:
            return
        said = clock.monotonic()
        _show_cell(screen, notice)
        if notice.what == "elsewhere":
            elsewhere.add(notice.cell.id)

    with notices(screen), how_to_go_on(lambda: GO_ON):
        done = carry_out(
            cells, place, lines=lines, seconds=seconds, words=words, again=again, processes=processes, tell=tell
        )
    if time is not None:
        begun = {line["id"] for line in done} | elsewhere
        left = _left_over([cell for cell in cells if cell.id not in begun], place, again=again)
        if left and done:
            screen.print(f"{counted(left, 'cell')} did not fit into {time}. {GO_ON}")
        elif left:
            screen.print(
                f"No cell was begun: of {counted(left, 'cell')} left, none is expected to be finished within {time} on "
                "this machine."
            )
    return done


def _left_over(cells: Sequence[PaperCell], place: Path, *, again: bool) -> int:
    """How many of some cells have no result in a file, to which other calls may have written."""
    from fnrfl.results.reproduce.kept_lines import KeptLines, read_lines

    now = KeptLines([], read_lines(place) if place.exists() else [])
    settled = ("here",) if again else ("here", "failed")
    return sum(now.find(cell).state not in settled for cell in cells)


def read_duration(text: str) -> float:
    """Seconds of a time such as 90s, 9m or 1.5h.

    >>> read_duration("9m"), read_duration("90")
    (540.0, 90.0)
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([smh]?)\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(f'"{text}" is not a time; write it as 90s, 9m or 2h.')
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _named_cells(
    names: Sequence[str] | None, scale: str | None, seeds: str | None, lines: KeptLines, *, beside_others: bool
) -> list[PaperCell]:
    """The cells that were asked for; without a name, the queue, less those that must run alone if others run too."""
    from fnrfl.results.compare import read_seeds
    from fnrfl.results.reproduce.waiting import SECONDS, queue

    chosen = None if seeds is None else read_seeds(seeds)
    if names and SECONDS in names and beside_others:
        raise ConfigError("Seconds are a measure only of cells that run alone. Leave out --processes.")
    if names:
        found = [cell for name in names for cell in _cells_of(name, scale, chosen, lines)]
        for cell in found:
            cell.config()  # refuses names that cannot go together
        return list(dict.fromkeys(found))
    waiting = [one.cell for one in queue(lines, scale) if one.purpose != SECONDS or not beside_others]
    return _of_seeds(waiting, chosen)


def _cells_of(name: str, scale: str | None, chosen: Sequence[int] | None, lines: KeptLines) -> list[PaperCell]:
    """A cell by its id, those of a table that have no result among `lines`, or those that wait for their seconds."""
    from fnrfl.results.reproduce.verdicts import find_cells
    from fnrfl.results.reproduce.waiting import SECONDS, queue

    if "@" in name or "/" in name:
        return [_read_cell(name, alone=scale is None and chosen is None)]
    if name == SECONDS:
        return _of_seeds([one.cell for one in queue(lines, scale) if one.purpose == SECONDS], chosen)
    return [cell for cell in find_cells(name, scale or "quick", chosen) if not lines.find(cell).usable]


def _of_seeds(cells: Sequence[PaperCell], chosen: Sequence[int] | None) -> list[PaperCell]:
    return [cell for cell in cells if chosen is None or cell.seed in chosen]


def _read_cell(name: str, *, alone: bool) -> PaperCell:
    """The cell of a name; `alone`: nothing else says its seed or its scale."""
    from fnrfl.results.reproduce.paper_cells import PaperCell

    cell = PaperCell.read(name)
    if not alone:
        raise ConfigError(f"{name} has its seed and its scale in its name. Leave --scale and --seeds out.")
    return cell


def _show_cell(screen: Console, notice: CellNotice) -> None:
    """A line for a cell that begins, has ended a round, is late, is done, has failed or is left to another call."""
    where = f"{notice.number}/{notice.total}  {notice.cell.id}"
    leak = "  leak" if notice.cell.leaks else ""
    line = notice.line or {}
    match notice.what:
        case "start":
            screen.print(f"{where}  about {_duration(notice.seconds_left)} left{leak}")
        case "round":
            event = notice.event or {}
            accuracy = f"accuracy {event['accuracy']:.4f}"
            screen.print(f"{where}  round {event['round']} of {event['rounds']}, {accuracy}{leak}")
        case "late":
            from fnrfl.results.reproduce.side_by_side import SHOW

            what = "goes on" if SHOW is None else "prints where it is, and goes on"
            screen.print(f"{where}  takes much longer than expected; its process {what}{leak}")
        case "done":
            preparing = line["seconds_preparing"]
            screen.print(
                f"{where}  accuracy {line['accuracy']:.4f}  {line['seconds_wall']:.1f} s"
                + (f", {preparing:.1f} s of them preparing" if preparing >= 1 else "") + leak
            )  # fmt: skip
        case "failed":
            screen.print(f"{where}  failed: {line['failed']}{leak}")
        case "elsewhere":
            screen.print(f"{notice.cell.id} is left to another call, which is at it and writes to the same file.")


def _duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
