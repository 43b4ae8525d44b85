"""The page's main figures as PNG and SVG, in the page's light colours, for a paper or a talk."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fnrfl.core.errors import ConfigError
from fnrfl.results.report.charts import DASHES
from fnrfl.results.report.lines import LineGroup, Panel
from fnrfl.results.report.numbers import chart_number, known_mean
from fnrfl.results.statistics import mean
from fnrfl.rundir.outputs import write_output

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter
except ImportError as error:
    raise ConfigError("Figures need the package matplotlib. Install it, or make the page without figures.") from error

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#c0267e", "#27278f", "#8f86ea", "#4d3a2a", "#7a0f4a")
INK, SOFT, LINE, HEAT = "#1d1d1f", "#5f6368", "#e3e3df", "#0b62a4"
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


def draw_figures(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """Write every figure of every panel; a second panel's have -2 at the end of their names."""
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link, and no link is followed in writing. Remove it, or give --no-plots.")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc in the working folder may ask for another program, such as TeX
        mpl.rcParams.update(STYLE)
        for number, panel in enumerate(panels, 1):
            for name, figure in FIGURES.items():
                stem = name if number == 1 else f"{name}-{number}"
                made = figure(panel)
                for suffix in ("png", "svg"):
                    path = folder / f"{stem}.{suffix}"
                    date = {"Date": None} if suffix == "svg" else None  # the same figure is the same file
                    drawn = io.BytesIO()
                    made.savefig(drawn, format=suffix, dpi=160, metadata=date, bbox_inches="tight", pad_inches=0.2)
                    write_output(path, drawn.getvalue())
                    written.append(path)
    return written


def _figure(panel: Panel, height: float = 4.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.subplots()
    axes.set_axisbelow(True)
    if panel.leaks:
        axes.set_title(f"leak: {', '.join(panel.leaks)}", color="#b3261e", fontsize=9, loc="left")
    return figure, axes


def _curves(panel: Panel, across: Callable[[LineGroup, int], float], name: str) -> Figure:
    """Accuracy over something: the mean over seeds, and a band from the lowest to the highest."""
    figure, axes = _figure(panel)
    for group in panel.groups:
        rounds = range(group.num_rounds)
        at = [[run.rounds[t]["accuracy"] for run in group.runs] for t in rounds]
        x, colour = [across(group, t) for t in rounds], PALETTE[group.colour % len(PALETTE)]
        dash = DASHES[group.colour % len(DASHES)]
        style = "-" if dash == "none" else (0, tuple(float(length) / 2 for length in dash.split()))
        axes.plot(x, [mean(v) for v in at], color=colour, linestyle=style, marker="o" if len(x) == 1 else "")
        if len(group.runs) > 1:
            axes.fill_between(x, [min(v) for v in at], [max(v) for v in at], color=colour, alpha=0.13, linewidth=0)
    axes.set_xlabel(name)
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color=LINE)
    # Below the axes, where it cannot hide a line; labels by hand, because one that starts with _ would be left out.
    labels = _labels(panel)
    columns = 1 if max(map(len, labels)) > 40 else 2
    figure.legend(axes.get_lines(), labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def convergence(panel: Panel) -> Figure:
    """Accuracy by round."""
    figure = _curves(panel, lambda group, t: int(group.runs[0].rounds[t]["round"]), "round")
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def traffic(panel: Panel) -> Figure:
    """Accuracy by MiB sent."""
    figure = _curves(panel, lambda group, t: mean([run.mib[t] for run in group.runs]), "MiB sent, both directions")
    figure.axes[0].set_xlim(left=0)
    return figure


def time(panel: Panel) -> Figure:
    """Accuracy by seconds of training."""
    figure = _curves(panel, lambda group, t: mean([run.seconds[t] for run in group.runs]), "seconds of training")
    figure.axes[0].set_xlim(left=0)
    return figure


def seeds(panel: Panel) -> Figure:
    """The accuracy of every seed, and the mean."""
    figure, axes = _figure(panel, height=1.0 + 0.5 * len(panel.groups))
    for row, group in enumerate(panel.groups):
        values = list(group.accuracy.values())
        colour = PALETTE[group.colour % len(PALETTE)]
        axes.plot(values, [row] * len(values), "o-", color=colour, alpha=0.6, linewidth=1)
        axes.plot([mean(values)] * 2, [row - 0.2, row + 0.2], color=INK, linewidth=2)
    axes.set_yticks(range(len(panel.groups)), _labels(panel, 28), color=INK)
    axes.set_ylim(len(panel.groups) - 0.5, -0.5)
    axes.set_xlabel("test accuracy; a dot is a seed, the bar is the mean")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="x", color=LINE)
    return figure


def classes(panel: Panel) -> Figure:
    """Accuracy within each class after the last round."""
    rows = [
        [known_mean(values) for values in zip(*(run.rounds[-1]["per_class"] for run in group.runs), strict=True)]
        for group in panel.groups
    ]
    figure, axes = _figure(panel, height=1.2 + 0.4 * len(rows))
    draw_heat(axes, rows, _labels(panel, 28), lambda v: f"{100 * v:.0f}", 1.0)
    axes.set_xlabel("class; test accuracy in percent")
    return figure


def split(panel: Panel) -> Figure:
    """How the first run's data is spread over the clients."""
    counts = panel.groups[0].runs[0].counts
    figure, axes = _figure(panel, height=min(12.0, 1.2 + 0.3 * len(counts)))
    names = panel.groups[0].runs[0].client_names
    draw_heat(axes, counts, [name.replace("$", r"\$") for name in names], lambda v: f"{v:.0f}", max(map(max, counts)))
    run = panel.groups[0].runs[0]
    axes.set_xlabel(f"class; examples under {run.config['scenario']}, seed {run.seed}")
    return figure


def draw_heat(
    axes: Axes, rows: Sequence[Sequence[float | None]], names: list[str], text: Callable[[float], str], top: float
) -> None:
    """A table of numbers as coloured cells, with the numbers in them if they are not too many."""
    colours = mpl.colors.LinearSegmentedColormap.from_list("fnrfl", ["#f4f4f1", HEAT])
    axes.imshow(
        [[float("nan") if v is None else v for v in row] for row in rows], cmap=colours, vmin=0, vmax=top, aspect="auto"
    )
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
                colour = "white" if shown > top / 2 else INK
                axes.text(x, y, text(shown), ha="center", va="center", fontsize=8, color=colour)


def _labels(panel: Panel, width: int = 80) -> list[str]:
    labels = [f"{group.label} (leak)" if group.leaks else group.label for group in panel.groups]
    return [textwrap.fill(label, width) for label in labels]


FIGURES: dict[str, Callable[[Panel], Figure]] = {
    "convergence": convergence,
    "traffic": traffic,
    "time": time,
    "seeds": seeds,
    "classes": classes,
    "split": split,
}
