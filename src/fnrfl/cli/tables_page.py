"""The page of the paper's tables: writing it, and saying where it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fnrfl.cli.common import Debug, Quiet, console, errors_in_words, quoted
from fnrfl.cli.display import notices
from fnrfl.core.errors import ConfigError
from fnrfl.results.reproduce.titles import HERE

if TYPE_CHECKING:
    from rich.console import Console

PageScale = Annotated[Literal["tiny", "quick", "full"], typer.Option("--scale", help="Results of which scale.")]
PageOut = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FILE", show_default="runs/reproduction/page-SCALE.html", help="The page."),
]
OwnLines = Annotated[
    Path | None,
    typer.Option("--lines", metavar="FILE", show_default="runs/reproduction/lines.jsonl", help="Results of your own."),
]
PREFER_HERE = "Results computed here count before committed ones."
PreferHere = Annotated[bool, typer.Option("--here", help=PREFER_HERE)]


def show_page(
    scale: PageScale = "quick",
    out: PageOut = None,
    lines: OwnLines = None,
    here: PreferHere = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page with every table and figure, from the results that there are; nothing is run.

    \b
    fnrfl reproduce page
    fnrfl reproduce page --scale full -o full.html
    fnrfl reproduce page --scale tiny --lines more.jsonl

    It has what was printed, the paper's protocol and the honest one side by side, curves, what each leak gives, the
    data, what each cell cost, and the command that runs it again. What leaked says so; what has not run says so too.
    """
    with errors_in_words(debug):
        from fnrfl.results.reproduce.kept_lines import read_lines

        if lines is not None and not lines.exists():
            raise ConfigError(f"{lines} does not exist. Name a file that `fnrfl reproduce run --out FILE` has written.")
        screen = console(quiet=quiet)
        write_page_of(lines or HERE, scale, screen, prefer_here=here, out=out)
        if lines is not None and not read_lines(lines):
            screen.print(
                f"note: no line of {quoted(lines)} is the result of a cell; the page has committed results alone."
            )


def write_page_of(place: Path, scale: str, screen: Console, *, prefer_here: bool, out: Path | None = None) -> None:
    """Write the page of a file of results and the committed ones: to `out`, a file or a folder, or beside the file."""
    from fnrfl.results.reproduce.kept_lines import KeptLines
    from fnrfl.results.reproduce.reproduction_page import page_place, write_page

    target = page_place(place.parent if out is None else out, scale)
    with notices(screen):
        write_page(KeptLines.read(place, prefer_here=prefer_here), scale, target)
    screen.print(f"the page is {quoted(target)}")


def say_where_the_page_is(screen: Console, place: Path, scale: str) -> None:
    """One line about the page, which `fnrfl reproduce page` writes."""
    from fnrfl.results.reproduce.reproduction_page import page_place

    own = place != HERE and place.exists()
    command = f"fnrfl reproduce page --scale {scale}" + (f" --lines {quoted(place)}" if own else "")
    folder = (place if own else HERE).parent
    screen.print(f"all tables on one page: {command} writes {quoted(page_place(folder, scale))}")
