"""Running the cells behind the paper's tables."""

from __future__ import annotations

import re
import time as clock
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fnrfl.cli.common import Debug, Quiet, console, errors_in_words, how_to_go_on
from fnrfl.cli.display import notices
from fnrfl.cli.tables_page import say_where_the_page_is
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.results.reproduce.titles import HERE

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.results.reproduce.carrying import CellNotice
    from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines
    from fnrfl.results.reproduce.paper_cells import PaperCell

Scale = Annotated[
    Literal["tiny", "quick", "full"],
    typer.Option("--scale", help="tiny: digits, on any computer; quick: CIFAR-10, fewer epochs; full: the paper's."),
]
AnyScale = Annotated[
    Literal["tiny", "quick", "full"] | None,
    typer.Option("--scale", show_default="quick", help="The scale of tables; a cell has it in its id."),
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
StopAfter = Annotated[
    str | None,
    typer.Option(
        "--stop-after", metavar="TIME", help="Begin no cell later, and none known to take longer: 90s, 9m or 2h."
    ),
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
    list[str],
    typer.Argument(metavar="TABLE|CELL...", help="Tables, or cells by their id."),
]
GO_ON = "To go on, give the same command again: finished cells are kept."
SECONDS_OF_SILENCE = 60.0  # after which the next round of a cell is told


def run_cells(
    names: Names,
    scale: AnyScale = None,
    seeds: CellSeeds = None,
    stop_after: StopAfter = None,
    out: LinesOut = HERE,
    words: Set = None,
    rerun: Committed = False,
    again: Again = False,
    processes: ProcessCount = 1,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run the cells of some tables that have no result, or single cells.

    \b
    fnrfl reproduce run accuracy controls --scale tiny --seeds 0
    fnrfl reproduce run accuracy --stop-after 9m
    fnrfl reproduce run claims --processes 3 --stop-after 2h
    fnrfl reproduce run resnet18/label/honest/fedavg/seed0@quick --set engine=gpu

    Each result is a line of JSON, written when its cell is finished. On a GPU cells run in bf16 and not
    deterministically, unless --set engine=... says how. With --processes, one cell prepares its programs while others
    train; no table shows the seconds of such cells. With --stop-after, a cell begins if the slowest run of it with any
    seed, on this device, took no longer than the time left, or if it has never run here.
    """
    with errors_in_words(debug):
        from fnrfl.results.reproduce.kept_lines import KeptLines

        screen, lines = console(quiet=quiet), KeptLines.read(out)
        cells = _named_cells(names, scale, seeds, KeptLines([], []) if rerun else lines)
        done = carry(
            cells, out, lines, screen, stop_after=stop_after, words=words or (), again=again, processes=processes
        )
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
    stop_after: str | None,
    words: Sequence[str],
    again: bool = False,
    processes: int = 1,
) -> list[CellLine]:
    """Run cells, and show each as it begins and ends."""
    from fnrfl.results.reproduce.carrying import carry_out, without_line

    seconds = None if stop_after is None else read_duration(stop_after)
    said = clock.monotonic()

    def tell(notice: CellNotice) -> None:
        nonlocal said
        if notice.what != "round" or clock.monotonic() - said >= SECONDS_OF_SILENCE:
            said = clock.monotonic()
            _show_cell(screen, notice)

    with notices(screen), how_to_go_on(lambda: GO_ON):
        done = carry_out(
            cells, place, lines=lines, seconds=seconds, words=words, again=again, processes=processes, tell=tell
        )
    if stop_after is not None:
        begun = {line["id"] for line in done}
        left = sum(cell.id not in begun for cell in without_line(cells, place, again=again))
        if left:
            screen.print(
                f"{counted(left, 'cell')} did not fit into {stop_after}. {GO_ON if done else 'Give more time.'}"
            )
    return done


def read_duration(text: str) -> float:
    """Seconds of a time such as 90s, 9m or 1.5h.

    >>> read_duration("9m"), read_duration("90")
    (540.0, 90.0)
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([smh]?)\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(f'"{text}" is not a time; write it as 90s, 9m or 2h.')
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _named_cells(names: Sequence[str], scale: str | None, seeds: str | None, lines: KeptLines) -> list[PaperCell]:
    """Return cells named by their id, and those of tables that have no result among `lines`."""
    from fnrfl.results.compare import read_seeds
    from fnrfl.results.reproduce.verdicts import find_cells

    chosen = None if seeds is None else read_seeds(seeds)
    found: list[PaperCell] = []
    for name in names:
        if "@" in name or "/" in name:
            found.append(_read_cell(name, alone=scale is None and chosen is None))
        else:
            found += [cell for cell in find_cells(name, scale or "quick", chosen) if not lines.find(cell).usable]
    for cell in found:
        cell.config()  # refuses names that cannot go together
    return list(dict.fromkeys(found))


def _read_cell(name: str, *, alone: bool) -> PaperCell:
    """The cell of a name; `alone`: nothing else says its seed or its scale."""
    from fnrfl.results.reproduce.paper_cells import PaperCell

    cell = PaperCell.read(name)
    if not alone:
        raise ConfigError(f"{name} has its seed and its scale in its name. Leave --scale and --seeds out.")
    return cell


def _show_cell(screen: Console, notice: CellNotice) -> None:
    """Print a line for a cell that begins, has ended a round, is done or has failed."""
    about, leak = notice.about, "  leak" if notice.cell.leaks else ""
    match notice.what:
        case "start":
            said = "begins"
        case "round":
            said = f"round {about['round']} of {about['rounds']}, accuracy {about['accuracy']:.4f}"
        case "done":
            preparing = about["seconds_preparing"]
            said = f"accuracy {about['accuracy']:.4f}  {about['seconds_wall']:.1f} s"
            said += f", {preparing:.1f} s of them preparing" if preparing >= 1 else ""
        case "failed":
            said = f"failed: {about['failed']}"
    screen.print(f"{notice.number}/{notice.total}  {notice.cell.id}  {said}{leak}")
