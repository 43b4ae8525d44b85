"""One page about the paper's tables: printed, by its protocol and honest, from whatever results there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fnrfl.results.report.charts import DASHES
from fnrfl.results.report.sentences import LEAKS
from fnrfl.results.report.template import fill
from fnrfl.results.reproduce.kept_lines import KeptLines
from fnrfl.results.reproduce.page_charts import curve_charts, noisy_chart, split_charts, waterfalls
from fnrfl.results.reproduce.page_tables import CellGroup, PagePart, cell_groups, headline, page_table
from fnrfl.results.reproduce.shown import COLUMN_NAMES, ShownTable, once_each
from fnrfl.results.reproduce.titles import TITLES
from fnrfl.results.reproduce.verdicts import show_named
from fnrfl.rundir.outputs import check_output, write_output


def page_place(place: Path, scale: str) -> Path:
    """The file of a page: the place itself if it is called like a page, else a file in that folder."""
    named = place.suffix in (".html", ".htm") and not place.is_dir()
    return place if named else place / f"page-{scale}.html"


def write_page(lines: KeptLines, scale: str, out: Path) -> Path:
    """Write the page to `out`, which is replaced in one go."""
    page = render_page(lines, scale)
    check_output(out).parent.mkdir(parents=True, exist_ok=True)
    write_output(out, page)
    return out


def render_page(lines: KeptLines, scale: str) -> str:
    """The page as text."""
    shown = {name: show_named(name, lines, scale) for name in TITLES}
    pages = {name: page_table(table) for name, table in shown.items()}
    groups = cell_groups(lines, scale)
    noisy, noisy_words = noisy_chart(scale)
    curves = curve_charts(shown["convergence"])
    falls = waterfalls(shown["attribution"])
    splits = split_charts(scale)
    top = headline(shown["accuracy"], shown["controls"])
    leaks = once_each(table.leaks for table in shown.values())
    values = {
        "title": "Feature Norm Regularized Federated Learning: printed and recomputed",
        "what": _what(groups, shown["accuracy"]),
        "dashes": DASHES,
        "scale": scale,
        "leaks": {leak: LEAKS.get(leak, leak) for leak in leaks},
        "lead": _lead(top, scale),
        "headline": top,
        "tables": [page for name, page in pages.items() if name not in ("convergence", "attribution", "claims")],
        "convergence": pages["convergence"],
        "curves": curves,
        "methods": shown["convergence"].parts[0].rows,
        "attribution": pages["attribution"],
        "waterfalls": falls,
        "claims": pages["claims"],
        "splits": splits,
        "noisy": noisy_words,
        "groups": groups,
    }
    data = {"dashes": DASHES, "curves": curves, "waterfalls": falls, "splits": splits, "noisy": noisy}
    return fill("reproduction", "fnrfl.results.reproduce", data, values)


def _what(groups: Sequence[CellGroup], table: ShownTable) -> str:
    """What the page is made from."""
    ran = sum(len(group.ran.rows) for group in groups)
    cells = ran + sum(len(group.waiting.rows) for group in groups)
    about = next(note for note in table.notes if note.startswith("Scale"))
    return f"{about} {ran} of {cells} cells have run; a cell is one run of a method, a net, a skew and a seed."


WORK = {"quick": "with a fifth of the paper's local epochs", "full": "with as many epochs as the paper has"}


def _lead(top: PagePart, scale: str) -> str:
    """The result that matters most, as far as it is there."""
    if scale not in WORK:
        return "Digits and small nets: this page shows that the recipes run. It says nothing about the paper."
    columns = [column.name for column in top.table.columns]
    rows = {row[1].text: row for row in top.table.rows if row[0].text == "label skew"}
    said = []
    for name in ("printed", COLUMN_NAMES["honest"]):
        fedavg, fnr = (rows[method][columns.index(name)] for method in ("FedAvg", "FedAvg + FNR"))
        if fedavg.value is None or fnr.value is None:
            return "FNR and FedAvg under label skew have not both run by the honest protocol at this scale."
        said.append(f"{fnr.text} {fnr.beside}".strip() + f" for FNR and {fedavg.text} {fedavg.beside}".rstrip())
    control = rows["FedAvg + FNR with weight 0"][columns.index(COLUMN_NAMES["honest"])]
    without = (
        ""
        if control.value is None
        else f", and {control.text} {control.beside}".rstrip() + " for FNR without its penalty"
    )
    return (
        f"Under label skew the paper printed {said[0]} for FedAvg. The honest protocol, {WORK[scale]}, gives "
        f"{said[1]} for FedAvg{without}."
    )
