"""The command `python -m reproduction`: show tables of the paper, and compute what is missing."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from reproduction.catalogue import TABLES, Cell, UsageError, text
from reproduction.claims import braced, named_cells, named_table
from reproduction.render import as_json, as_markdown, as_text
from reproduction.running import missing_cells, run_cells
from reproduction.store import HERE, Results

OTHERS = ("all", "list", "missing", "page", "figures", "theory")


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m reproduction", description=__doc__)
    parser.add_argument("what", metavar="TABLE", help=f"one of {', '.join((*TABLES, *OTHERS))}, or a cell by its id")
    parser.add_argument("--scale", choices=("tiny", "quick", "full"), default="quick")
    parser.add_argument("--seeds", type=_seeds, help="0,1,2 or 0-4; else 0 to 2, and 0 under the paper's protocol")
    parser.add_argument("--show", action="store_true", help="compute nothing")
    parser.add_argument("--stop-after", type=_seconds, metavar="9m", help="begin no cell that would not end by then")
    parser.add_argument("--on", choices=("here", "processes"), default="here", help="where cells run")
    parser.add_argument("--workers", type=int, default=2, help="cells side by side, with --on processes")
    parser.add_argument("-o", "--out", type=Path, default=HERE, metavar="FILE", help="lines of results of your own")
    form = parser.add_mutually_exclusive_group()
    for name in ("markdown", "json"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="text")
    return parser.parse_args(words)


def _seeds(words: str) -> list[int]:
    ends = [piece.partition("-") for piece in words.split(",")]
    return [seed for first, _, last in ends for seed in range(int(first), int(last or first) + 1)]


def _seconds(words: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", words)
    if match is None:
        raise argparse.ArgumentTypeError(f'"{words}" is not a time; write it as 90s, 9m or 2h')
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 3 if a cell failed."""
    given = _arguments(words)
    if given.what == "theory":
        _theory(given.out.parent)
        return 0
    results = Results.read(given.out)
    if given.what == "list":
        for name in TABLES:
            counts = ((scale, named_cells(name, scale)) for scale in ("quick", "full"))
            ran = (f"{one} {sum(results.find(cell).usable for cell in cells)} of {len(cells)}" for one, cells in counts)
            print(f"{name:<14}{''.join(f'{count:<22}' for count in ran)}{text('titles', name)}")
    elif given.what == "missing":
        print("\n".join(missing_lines(results)))
    elif given.what in ("page", "figures"):
        _draw(given.what, results, given.scale, given.out.parent)
    else:
        return _tables(given, results)
    return 0


def _tables(given: argparse.Namespace, results: Results) -> int:
    """Compute what tables lack, and print them; of all, also write the page."""
    if "@" in given.what:
        tables, cells = [], [Cell.read(given.what)]
    else:
        tables = list(TABLES) if given.what == "all" else [given.what]
        cells = [cell for name in tables for cell in named_cells(name, given.scale, given.seeds)]
    failed, todo = 0, [] if given.show else missing_cells(cells, results)
    if todo:
        _say(f"{len(todo)} cells have no result and are computed here; --show computes nothing.")
        options = {"stop_after": given.stop_after, "on": given.on, "workers": given.workers}
        failed = run_cells(todo, given.out, say=_say, **options)
        results = Results.read(given.out)
    shown = [named_table(name, results, given.scale, given.seeds) for name in tables]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if given.form == "json":
        print(as_json(shown), end="")
    else:
        print("\n".join(as_markdown(one) if given.form == "markdown" else as_text(one, width) for one in shown), end="")
    if given.what == "all":
        _draw("page", results, given.scale, given.out.parent)
    return 3 if failed else 0


def missing_lines(results: Results) -> list[str]:
    """Return the cells of scales quick and full without a result, those alike in one line."""
    every = [cell for scale in ("quick", "full") for name in TABLES for cell in named_cells(name, scale)]
    seeds: dict[Cell, list[int]] = {}
    for cell in missing_cells(every, results):
        seeds.setdefault(replace(cell, seed=0), []).append(cell.seed)
    alike: dict[tuple[Cell, tuple[int, ...]], list[Cell]] = {}
    for cell, found in seeds.items():
        group = alike.setdefault((replace(cell, method=""), tuple(sorted(found))), [])
        group += [replace(cell, seed=seed) for seed in sorted(found)]
    return list(map(braced, alike.values()))


def _draw(what: str, results: Results, scale: str, folder: Path) -> None:
    try:
        from reproduction.figures import draw_all, write_all
        from reproduction.page import render_page
    except ImportError as error:
        raise UsageError(f"The page and the figures need fnrfl[report]: {error}. The tables do not.") from error
    drawn = draw_all(results, scale)
    if what == "page":
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"page-{scale}.html"
        path.write_text(render_page(results, scale, drawn), encoding="utf-8")
        _say(f"the page is {path}")
    else:
        write_all(drawn, folder / f"figures-{scale}")
        _say(f"{len(drawn)} figures are in {folder / f'figures-{scale}'}")


def _theory(folder: Path) -> None:
    from reproduction.figures import draw_theory, write_all
    from reproduction.theory import check, theory_text

    found = check()
    print(theory_text(found), end="")
    write_all({"theory": draw_theory(found)}, folder)
    _say(f"the figure is {folder / 'theory.png'}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"reproduction: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped. To go on, give the same command again: finished cells are kept.")
