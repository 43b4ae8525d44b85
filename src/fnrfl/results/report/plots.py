"""The page's main figures as PNG and SVG, in the page's light colours, for a paper or a talk.

They are drawn from what the page's script draws from, the data of `charts.payload`.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.results.report.numbers import chart_number, percent, share_range
from fnrfl.rundir.directory import FIGURE
from fnrfl.rundir.files import is_plain_file
from fnrfl.rundir.outputs import csv_text, write_output

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ImportError as error:
    raise ConfigError(
        "Figures need the package matplotlib. Install it with `pip install matplotlib`; tables and pages do without."
    ) from error

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#c0267e", "#27278f", "#8f86ea", "#4d3a2a", "#7a0f4a")
Chart = dict[str, Any]  # a part of the data of a page
INK, SOFT, LINE, HEAT = "#1d1d1f", "#5f6368", "#e3e3df", "#0b62a4"
BAND = ("mean", "low", "high")
STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a name may have dollars in it
    "svg.fonttype": "none",
    "svg.hashsalt": "fnrfl",
    "font.size": 10.0,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw_figures(data: Chart, folder: Path) -> list[Path]:
    """Write every figure of every panel; a second panel's have -2 at the end of their names. Older ones are removed."""
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link, and no link is followed in writing. Remove it, or give --no-plots.")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with page_style():
        for name, parts in (
            ("differences", data["forests"]),
            ("grid", data["grids"]),
            *((name, data["panels"]) for name in FIGURES),
        ):
            for number, part in enumerate(parts, 1):
                figure = (FIGURES | OF_THE_PAGE)[name](data, part)
                for suffix, date in (("png", None), ("svg", {"Date": None})):  # the same figure is the same file
                    path = folder / (f"{name}.{suffix}" if number == 1 else f"{name}-{number}.{suffix}")
                    write_output(path, as_image(figure, suffix, date))
                    written.append(path)
    for grid in data["grids"]:
        rows = zip(grid["rows"], grid["values"], strict=True)
        written.append(path := folder / "grid.csv")
        write_output(path, csv_text([["method", *grid["columns"]], *([name, *values] for name, values in rows)]))
    for old in set(folder.iterdir()) - set(written):
        if FIGURE.fullmatch(old.name) and is_plain_file(old):
            old.unlink()
    return written


@contextmanager
def page_style() -> Iterator[None]:
    """Inside, figures are drawn in the page's style."""
    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc in the working folder may ask for another program, such as TeX
        mpl.rcParams.update(STYLE)
        yield


def new_figure(inches: tuple[float, float]) -> Figure:
    """Return an empty figure."""
    return Figure(figsize=inches, layout="constrained")


def as_image(figure: Figure, suffix: str = "png", metadata: Mapping[str, str | None] | None = None) -> bytes:
    """A figure as the content of a file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=suffix, dpi=160, metadata=metadata, bbox_inches="tight", pad_inches=0.2)
    return drawn.getvalue()


def _axes(leaks: Sequence[str], height: float = 4.2) -> tuple[Figure, Axes]:
    figure = new_figure((7.2, height))
    axes = figure.subplots()
    axes.set_axisbelow(True)
    if leaks:
        axes.set_title(f"leak: {', '.join(leaks)}", color="#b3261e", fontsize=9, loc="left")
    return figure, axes


def _curves(data: Chart, panel: Chart, across: str, name: str) -> Figure:
    """The metric over something: the mean over seeds, and a band from the lowest to the highest."""
    figure, axes = _axes(panel["leaks"])
    metric, met, late = data["metrics"][0], list[float](), list[float]()
    for group in panel["groups"]:
        curve = group["curves"].get(metric["name"], {"mean": ()})
        known = [i for i, value in enumerate(curve["mean"]) if value is not None]
        x, y, low, high = ([values[i] for i in known] for values in (group[across], *map(curve.get, BAND)))
        dash, met = data["dashes"][group["mark"] % len(data["dashes"])], met + low + high
        late += low[len(low) // 2 :] + high[len(high) // 2 :]
        style = "-" if dash == "none" else (0, tuple(float(length) / 2 for length in dash.split()))
        axes.plot(x, y, color=_colour(group), linestyle=style, marker="o" if len(x) == 1 else "")
        if low != high:
            axes.fill_between(x, low, high, color=_colour(group), alpha=0.13, linewidth=0)
    if len(panel["groups"]) > 1 and met and np.ptp(late) < 0.4 * np.ptp(met):  # as the page has it
        met = late
        axes.set_ylim(min(late), max(late))
    _name_axis(axes, "y", metric, panel, met)
    axes.set_xlabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=across == "rounds"))
    # Below the axes, where it cannot hide a line; labels by hand, because one that starts with _ would be left out.
    labels = _labels(panel)
    columns = 1 if max(map(len, labels)) > 40 else 2
    figure.legend(axes.get_lines()[: len(labels)], labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _name_axis(
    axes: Axes, which: Literal["x", "y"], metric: Chart, panel: Chart, values: Sequence[float], more: str = ""
) -> None:
    """Call an axis by the metric, no narrower than the test set can measure, with lines for what guesses reach."""
    axes.set(**{f"{which}label": metric["name"] + more})
    axes.grid(axis=which, color=LINE)
    if not metric["share"]:
        return
    guesses = {one["name"]: one[metric["name"]] for one in panel["references"] if metric["name"] in one}
    axes.set_title(", ".join(f"{name} {percent(share)}" for name, share in guesses.items()), loc="right", fontsize=8)
    low, high = share_range(values or [0.0, 1.0], panel["least"]["shares"])
    axes.set(**{f"{which}lim": (low, high)})
    axis, draw = (axes.xaxis, axes.axvline) if which == "x" else (axes.yaxis, axes.axhline)
    axis.set_major_formatter(PercentFormatter(1.0))
    for share in guesses.values():
        if low <= share <= high:
            draw(share, color=SOFT, linewidth=0.8, linestyle=(0, (5, 4)), zorder=0.5)


def _rows(axes: Axes, names: Sequence[str], fontsize: float | None = None) -> None:
    """Give each row a name, the first one at the top."""
    axes.set_yticks(range(len(names)), names, color=INK, fontsize=fontsize)
    axes.set_ylim(len(names) - 0.5, -0.5)


def seeds(data: Chart, panel: Chart) -> Figure:
    """The metric of every seed, and the mean."""
    figure, axes = _axes(panel["leaks"], height=1.0 + 0.5 * len(panel["groups"]))
    for row, group in enumerate(panel["groups"]):
        values = group["final"] or [float("nan")]
        axes.plot(values, [row] * len(values), "o-", color=_colour(group), alpha=0.6, linewidth=1)
        axes.plot([sum(values) / len(values)] * 2, [row - 0.2, row + 0.2], color=INK, linewidth=2)
    _rows(axes, _labels(panel, 28))
    met = [value for group in panel["groups"] for value in group["final"]]
    _name_axis(axes, "x", data["metrics"][0], panel, met, "; a dot is a seed, the bar is the mean")
    return figure


def classes(data: Chart, panel: Chart) -> Figure:
    """Accuracy within each class after the last round."""
    rows, names = [group["classes"] for group in panel["groups"]], panel["classes"]
    figure, axes = _axes(panel["leaks"], height=1.2 + 0.4 * len(rows))
    known = [value for row in rows for value in row if value is not None]
    low, high = share_range(known or [0.0, 1.0], panel["least"]["classes"])
    draw_heat(axes, rows, _labels(panel, 28), lambda v: f"{100 * v:.0f}", high, low)
    if len(names) <= 20:
        axes.set_xticks(range(len(names)), [textwrap.shorten(name, 18) for name in names])
        axes.tick_params(axis="x", rotation=40 if max(map(len, names)) > 3 else 0)
    axes.set_xlabel("class; test accuracy in percent")
    return figure


def split(data: Chart, panel: Chart) -> Figure:
    """How the first run's data is spread over the clients."""
    run = next(one for one in data["inside"] if data["panels"][one["panel"]] is panel)
    counts = data["splits"][run["split"]]
    figure, axes = _axes(panel["leaks"], height=min(12.0, 1.2 + 0.3 * len(counts)))
    names = [client["name"].replace("$", r"\$") for client in run["clients"]]
    draw_heat(axes, counts, names, lambda v: f"{v:.0f}", max(map(max, counts)))
    axes.set_xlabel(f"class; examples of each client, seed {run['seed']}")
    return figure


def draw_grid(data: Chart, grid: Chart) -> Figure:
    """The metric of each method in each setting."""
    figure, axes = _axes([], height=1.4 + 0.4 * len(grid["rows"]))
    metric, known = data["metrics"][0], [value for row in grid["values"] for value in row if value is not None]
    rows = [name.replace("$", r"\$") for name in grid["rows"]]
    show = (lambda v: f"{100 * v:.1f}") if metric["share"] else (lambda v: f"{v:.4f}")
    draw_heat(axes, grid["values"], rows, show, max(known), min(known))
    axes.set_xticks(range(len(grid["columns"])), [textwrap.fill(name, 22) for name in grid["columns"]])
    axes.set_xlabel(metric["name"] + (", %" if metric["share"] else ""))
    return figure


def draw_differences(data: Chart, forest: Chart) -> Figure:
    """Paired differences with their intervals."""
    rows, metric = [row for block in forest["blocks"] for row in block["rows"]], data["metrics"][0]
    figure, axes = _axes(["not what an honest run would reach"] if forest["leak"] else [], 1.2 + 0.32 * len(rows))
    unit = 100 if metric["share"] else 1
    axes.axvline(0, color=INK, linewidth=1)
    for y, row in enumerate(rows):
        if row["low"] is not None:
            axes.plot([unit * row["low"], unit * row["high"]], [y, y], color=_colour(row), linewidth=1.6)
        full = _colour(row) if row["holds"] else "white"
        axes.plot(unit * row["mean"], y, "o", color=_colour(row), markerfacecolor=full)
    names = (f"{row['label']} minus {row['other']} (n = {row['seeds']})" for row in rows)
    _rows(axes, [textwrap.fill(name, 44) for name in names], fontsize=8)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -50 * forest["least"]), max(high, 50 * forest["least"]))
    what = f"points of {metric['name']}" if metric["share"] else metric["help"]
    axes.set_xlabel(f"{what}, 95 % intervals; full: after correction")
    axes.grid(axis="x", color=LINE)
    return figure


def draw_heat(
    axes: Axes,
    rows: Sequence[Sequence[float | None]],
    names: list[str],
    text: Callable[[float], str],
    top: float,
    low: float = 0.0,
) -> None:
    """Numbers as coloured cells, pale at `low` and full at `top`, and as text in them if they are not too many."""
    colours = mpl.colors.LinearSegmentedColormap.from_list("fnrfl", ["#f4f4f1", HEAT])
    known = [[float("nan") if v is None else v for v in row] for row in rows]
    axes.imshow(known, cmap=colours, vmin=low, vmax=top, aspect="auto")
    if len(rows) <= 40:
        axes.set_yticks(range(len(rows)), names, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=20))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if len(rows) * len(rows[0]) > 400:
        return
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if (shown := chart_number(value)) is not None:
                colour = "white" if shown - low > 0.83 * (top - low) else "black"
                axes.text(x, y, text(shown), ha="center", va="center", fontsize=8, color=colour)


def _colour(line: Chart) -> str:
    return PALETTE[line["mark"] % len(PALETTE)]


def _labels(panel: Chart, width: int = 80) -> list[str]:
    return [textwrap.fill(group["label"] + (" (leak)" if panel["leaks"] else ""), width) for group in panel["groups"]]


FIGURES: dict[str, Callable[[Chart, Chart], Figure]] = {
    "convergence": partial(_curves, across="rounds", name="round"),
    "traffic": partial(_curves, across="mib", name="MiB sent, both directions"),
    "time": partial(_curves, across="seconds", name="seconds of training"),
    "seeds": seeds,
    "classes": classes,
    "split": split,
}
OF_THE_PAGE: dict[str, Callable[[Chart, Chart], Figure]] = {"differences": draw_differences, "grid": draw_grid}
