"""The command `reproduce`: the paper's tables, and the cells behind them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fnrfl.cli.cell_runs import CellSeeds, LinesOut, Markdown, Rerun, Scale, Set, StopAfter, carry, run_cells
from fnrfl.cli.common import (
    Debug,
    Json,
    Quiet,
    command_group,
    console,
    errors_in_words,
    is_terminal,
    print_answer,
    print_table,
)
from fnrfl.cli.display import notices
from fnrfl.cli.tables_page import PREFER_HERE, PageScale, say_where_the_page_is, show_page, write_page_of
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.results.reproduce.titles import HERE, TITLES

if TYPE_CHECKING:
    from rich.console import Console

    from fnrfl.results.reproduce.kept_lines import KeptLines

FiguresPrefer = Annotated[bool, typer.Option("--here", "--rerun", help=PREFER_HERE)]
FiguresLines = Annotated[
    Path,
    typer.Option(
        "--lines", "--out", "-o", metavar="FILE", show_default="runs/reproduction/lines.jsonl",
        help="Results of your own. The figures go into a folder beside this file.",
    ),
]  # fmt: skip

reproduce = command_group("The paper's tables: printed, by its protocol, and honest.")


@reproduce.command("list")
def list_tables(debug: Debug = False) -> None:
    """The tables, and how many cells each has.

    \b
    fnrfl reproduce list
    """
    with errors_in_words(debug):
        from fnrfl.results.reproduce.kept_lines import KeptLines
        from fnrfl.results.reproduce.verdicts import find_cells

        lines = KeptLines.read()
        rows = [("table", "quick", "full", "what it shows")]
        for name, title in TITLES.items():
            counts = []
            for scale in ("quick", "full"):
                cells = find_cells(name, scale)
                counts.append(f"{sum(lines.find(cell).usable for cell in cells)} of {len(cells)}")
            rows.append((name, counts[0], counts[1], title))
        print_table(rows)


def _table_command(name: str, title: str) -> Callable[..., None]:
    """The command that shows a table, or with "all" every one of them."""

    def command(
        scale: Scale = "quick",
        seeds: CellSeeds = None,
        rerun: Rerun = False,
        stop_after: StopAfter = None,
        words: Set = None,
        out: LinesOut = HERE,
        markdown: Markdown = False,
        json: Json = False,
        quiet: Quiet = False,
        debug: Debug = False,
    ) -> None:
        with errors_in_words(debug):
            from fnrfl.results.compare import read_seeds

            if json and markdown:
                raise ConfigError("--json and --markdown are two forms of one answer. Give one of them.")
            asked = _Request(name, scale, None if seeds is None else read_seeds(seeds), rerun, out)
            screen = console(quiet=quiet, stderr=True)
            failed = _run_missing(asked, stop_after, words or (), screen)
            _print_tables(asked, "json" if json else "markdown" if markdown else "text", screen)
            raise typer.Exit(3 if failed else 0)

    command.__doc__ = f"""{title}.

    \b
    fnrfl reproduce {name}
    fnrfl reproduce {name} --scale tiny
    fnrfl reproduce {name} --scale full --rerun --stop-after 2h

    It shows the results that there are. Cells without one are run if the scale is tiny, or with --rerun.
    """
    return command


@dataclass(frozen=True)
class _Request:
    """What somebody wants to see."""

    name: str
    scale: str
    seeds: list[int] | None
    rerun: bool
    place: Path  # of results computed here

    @property
    def tables(self) -> list[str]:
        return [*TITLES] if self.name == "all" else [self.name]


def _run_missing(asked: _Request, stop_after: str | None, words: Sequence[str], screen: Console) -> int:
    """Run the cells that have no result, if that was asked for or takes minutes; how many failed."""
    from fnrfl.results.reproduce.kept_lines import KeptLines
    from fnrfl.results.reproduce.verdicts import find_cells

    if asked.scale != "tiny" and not asked.rerun:
        if stop_after is not None or words:
            raise ConfigError(
                "--stop-after and --set are for cells that are run. Give --rerun too, which runs them here."
            )
        return 0
    lines = KeptLines.read(asked.place)
    cells = [cell for name in asked.tables for cell in find_cells(name, asked.scale, asked.seeds)]
    missing = [cell for cell in dict.fromkeys(cells) if asked.rerun or not lines.find(cell).usable]
    done = carry(missing, asked.place, lines, screen, stop_after=stop_after, words=words)
    return sum("failed" in line for line in done)


def _say_other_scales(asked: _Request, lines: KeptLines, screen: Console) -> None:
    """Where else this table has results: of NIID-Bench's, all are at the full size."""
    from fnrfl.results.reproduce.verdicts import find_cells

    for scale in ("quick", "full"):
        usable = sum(lines.find(cell).usable for cell in find_cells(asked.name, scale, asked.seeds))
        if usable and scale != asked.scale:
            screen.print(f"with --scale {scale}: {counted(usable, 'cell')} of this table with a result")


@reproduce.command("figures")
def figures(
    scale: PageScale = "quick",
    here: FiguresPrefer = False,
    lines: FiguresLines = HERE,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Draw the paper's figures as PNG, from the results that there are.

    \b
    fnrfl reproduce figures
    fnrfl reproduce figures --scale full

    They go into a folder beside the results, runs/reproduction/figures-SCALE. Nothing is run. A figure with a leak has
    a banner that says so.
    """
    with errors_in_words(debug):
        _draw_figures(_Request("figures", scale, None, here, lines), console(quiet=quiet))
        say_where_the_page_is(console(quiet=quiet), lines, scale)


def _draw_figures(asked: _Request, screen: Console) -> None:
    from fnrfl.results.reproduce.figures import draw_all
    from fnrfl.results.reproduce.kept_lines import KeptLines

    folder = asked.place.parent / f"figures-{asked.scale}"
    with notices(screen):
        drawn = draw_all(KeptLines.read(asked.place, prefer_here=asked.rerun), asked.scale, folder)
    screen.print(f"{len(drawn)} figures are in {folder}")


def _print_tables(asked: _Request, form: str, screen: Console) -> None:
    """Print what was asked for; of all tables, also write it beside the results."""
    from fnrfl.results.reproduce.kept_lines import KeptLines
    from fnrfl.results.reproduce.verdicts import claims_page, show_named
    from fnrfl.results.reproduce.wording import as_json, as_markdown, as_text
    from fnrfl.rundir.outputs import write_output

    lines = KeptLines.read(asked.place, prefer_here=asked.rerun)
    shown = [show_named(name, lines, asked.scale, asked.seeds) for name in asked.tables]
    width = shutil.get_terminal_size().columns if is_terminal() else None
    forms = {
        "text": partial(as_text, width=width),
        "markdown": claims_page if asked.name == "claims" else as_markdown,
    }
    print_answer(as_json(shown) if form == "json" else "\n".join(map(forms[form], shown)))
    if asked.name != "all":
        if form == "text":  # markdown and JSON are for documents and programs
            _say_other_scales(asked, lines, screen)
            say_where_the_page_is(screen, asked.place, asked.scale)
    else:
        folder = asked.place.parent
        folder.mkdir(parents=True, exist_ok=True)
        write_output(folder / f"tables-{asked.scale}.md", "\n".join(map(as_markdown, shown)))
        write_output(folder / f"tables-{asked.scale}.json", as_json(shown))
        screen.print(f"tables-{asked.scale}.md and tables-{asked.scale}.json are in {folder}")
        try:
            _draw_figures(asked, screen)
        except ConfigError as error:  # figures are an extra: without matplotlib there are the tables
            screen.print(f"note: no figures were drawn. {error}")
        write_page_of(asked.place, asked.scale, screen, prefer_here=asked.rerun)


@reproduce.command("theory")
def theory(quiet: Quiet = False, debug: Debug = False) -> None:
    """Check the paper's convergence analysis on a problem with known constants: about a minute.

    \b
    fnrfl reproduce theory

    Every statement is tried, the printed and the corrected bounds are followed, and FedAvg and FNR are run. The figure
    goes into runs/reproduction.
    """
    with errors_in_words(debug):
        from fnrfl.results.reproduce.theory import check, theory_text

        screen = console(quiet=quiet, stderr=True)
        with notices(screen):
            found = check()
        print_answer(theory_text(found))
        HERE.parent.mkdir(parents=True, exist_ok=True)
        try:
            from fnrfl.results.reproduce.theory_figure import draw_theory

            screen.print(f"the figure is {draw_theory(found, HERE.parent / 'theory.png')}")
        except ConfigError as error:  # without matplotlib
            screen.print(f"note: no figure was drawn. {error}")


for _name, _title in TITLES.items():
    reproduce.command(_name)(_table_command(_name, _title))
reproduce.command("page")(show_page)
reproduce.command("run")(run_cells)
reproduce.command("all")(_table_command("all", "Every table"))
