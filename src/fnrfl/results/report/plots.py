"""The page's main figures as PNG and SVG, in the page's light colours, for a paper or a talk."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fnrfl.core.errors import ConfigError
from fnrfl.results.report.charts import DASHES
from fnrfl.results.report.groups import LineGroup, Panel
from fnrfl.results.report.numbers import chart_number, known_mean, percent
from fnrfl.results.report.pairs import HOLDS, LinePair, line_pairs, ranked
from fnrfl.results.report.references import axis_span, least_span, references, share_range
from fnrfl.results.statistics import mean
from fnrfl.rundir.directory import figure_files
from fnrfl.rundir.outputs import write_output

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
    """Write every figure of every panel; a second panel's have -2 at the end of their names. Older ones are removed."""
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link, and no link is followed in writing. Remove it, or give --no-plots.")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with page_style():
        for number, panel in enumerate(panels, 1):
            for name, figure in FIGURES.items():
                stem = name if number == 1 else f"{name}-{number}"
                made = figure(panel)
                if made is None:
                    continue
                for suffix in ("png", "svg"):
                    path = folder / f"{stem}.{suffix}"
                    date = {"Date": None} if suffix == "svg" else None  # the same figure is the same file
                    write_output(path, as_image(made, suffix, date))
                    written.append(path)
    for old in set(figure_files(folder)) - set(written):
        old.unlink()
    return written


@contextmanager
def page_style(**more: object) -> Iterator[None]:
    """Inside, figures are drawn in the page's style, with `more` of matplotlib's settings."""
    with mpl.rc_context():
        mpl.rcdefaults()  # a matplotlibrc in the working folder may ask for another program, such as TeX
        mpl.rcParams.update(STYLE | more)
        yield


def as_image(figure: Figure, suffix: str = "png", metadata: Mapping[str, str | None] | None = None) -> bytes:
    """A figure as the content of a file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=suffix, dpi=160, metadata=metadata, bbox_inches="tight", pad_inches=0.2)
    return drawn.getvalue()


def _figure(panel: Panel, height: float = 4.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.subplots()
    axes.set_axisbelow(True)
    if panel.leaks:
        axes.set_title(f"leak: {', '.join(panel.leaks)}", color="#b3261e", fontsize=9, loc="left")
    return figure, axes


def _curves(panel: Panel, across: Callable[[LineGroup, int], float], name: str) -> Figure:
    """The metric over something: the mean over seeds, and a band from the lowest to the highest."""
    figure, axes = _figure(panel)
    for group in panel.groups:
        at = _known_values(group)
        x, colour = [across(group, t) for t in at], _colour(group)
        dash = DASHES[group.colour % len(DASHES)]
        style = "-" if dash == "none" else (0, tuple(float(length) / 2 for length in dash.split()))
        axes.plot(x, [mean(v) for v in at.values()], color=colour, linestyle=style, marker="o" if len(x) == 1 else "")
        if len(group.runs) > 1:
            low, high = ([end(v) for v in at.values()] for end in (min, max))
            axes.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
    met = [value for group in panel.groups for values in _known_values(group).values() for value in values]
    _name_axis(axes, "y", panel, met)
    axes.set_xlabel(name)
    axes.grid(axis="y", color=LINE)
    # Below the axes, where it cannot hide a line; labels by hand, because one that starts with _ would be left out.
    labels = _labels(panel)
    columns = 1 if max(map(len, labels)) > 40 else 2
    figure.legend(axes.get_lines()[: len(labels)], labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _known_values(group: LineGroup) -> dict[int, list[float]]:
    """The metric of every seed, round by round, without rounds of which it is not known."""
    columns = zip(*(run.series(group.metric.name)[: group.num_rounds] for run in group.runs), strict=True)
    known = ([value for value in column if value is not None] for column in columns)
    return {t: values for t, values in enumerate(known) if values}


def _name_axis(axes: Axes, which: str, panel: Panel, values: Sequence[float], more: str = "") -> None:
    """Call an axis by the metric, no narrower than the test set can measure, with lines for what guesses reach."""
    metric = panel.metric
    axes.set(**{f"{which}label": metric.name + more})
    if not metric.share:
        return
    guesses = {one.name: one.shares[metric.name] for one in references(panel) if metric.name in one.shares}
    axes.set_title(", ".join(f"{name} {percent(share)}" for name, share in guesses.items()), loc="right", fontsize=8)
    low, high = share_range(values or [0.0, 1.0], axis_span(panel))
    axes.set(**{f"{which}lim": (low, high)})
    axis, draw = (axes.xaxis, axes.axvline) if which == "x" else (axes.yaxis, axes.axhline)
    axis.set_major_formatter(PercentFormatter(1.0))
    for share in guesses.values():
        if low <= share <= high:
            draw(share, color=SOFT, linewidth=0.8, linestyle=(0, (5, 4)), zorder=0.5)


def convergence(panel: Panel) -> Figure:
    """The metric by round."""
    figure = _curves(panel, lambda group, t: int(group.runs[0].rounds[t]["round"]), "round")
    figure.axes[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def traffic(panel: Panel) -> Figure:
    """The metric by MiB sent."""
    figure = _curves(panel, lambda group, t: mean([run.mib[t] for run in group.runs]), "MiB sent, both directions")
    figure.axes[0].set_xlim(left=0)
    return figure


def time(panel: Panel) -> Figure:
    """The metric by seconds of training."""
    figure = _curves(panel, lambda group, t: mean([run.seconds[t] for run in group.runs]), "seconds of training")
    figure.axes[0].set_xlim(left=0)
    return figure


def seeds(panel: Panel) -> Figure:
    """The metric of every seed, and the mean."""
    figure, axes = _figure(panel, height=1.0 + 0.5 * len(panel.groups))
    for row, group in enumerate(panel.groups):
        values, colour = list(group.values.values()) or [math.nan], _colour(group)
        axes.plot(values, [row] * len(values), "o-", color=colour, alpha=0.6, linewidth=1)
        axes.plot([mean(values)] * 2, [row - 0.2, row + 0.2], color=INK, linewidth=2)
    axes.set_yticks(range(len(panel.groups)), _labels(panel, 28), color=INK)
    axes.set_ylim(len(panel.groups) - 0.5, -0.5)
    met = [value for group in panel.groups for value in group.values.values()]
    _name_axis(axes, "x", panel, met, "; a dot is a seed, the bar is the mean")
    axes.grid(axis="x", color=LINE)
    return figure


def classes(panel: Panel) -> Figure:
    """Accuracy within each class after the last round."""
    rows = [
        [known_mean(values) for values in zip(*(run.rounds[-1]["per_class"] for run in group.runs), strict=True)]
        for group in panel.groups
    ]
    figure, axes = _figure(panel, height=1.2 + 0.4 * len(rows))
    known = [value for row in rows for value in row if value is not None]
    run = panel.groups[0].runs[0]
    low, high = share_range(known or [0.0, 1.0], least_span(run.examples["test"] / len(run.classes)), 0.0)
    draw_heat(axes, rows, _labels(panel, 28), lambda v: f"{100 * v:.0f}", high, low)
    if len(run.classes) <= 20:
        axes.set_xticks(range(len(run.classes)), [textwrap.shorten(name, 18) for name in run.classes])
        axes.tick_params(axis="x", rotation=40 if max(map(len, run.classes)) > 3 else 0)
    axes.set_xlabel("class; test accuracy in percent")
    return figure


def split(panel: Panel) -> Figure:
    """How the first run's data is spread over the clients."""
    run = panel.groups[0].runs[0]
    figure, axes = _figure(panel, height=min(12.0, 1.2 + 0.3 * len(run.counts)))
    names = [name.replace("$", r"\$") for name in run.client_names]
    draw_heat(axes, run.counts, names, lambda v: f"{v:.0f}", max(map(max, run.counts)))
    axes.set_xlabel(f"class; examples under {run.config['scenario']}, seed {run.seed}")
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


def paired_differences(panel: Panel) -> Figure | None:
    """Paired differences with their intervals; None where there is nothing to pair."""
    pairs = [pair for lines in ranked(panel.groups) for pair in line_pairs(lines) if pair.found is not None]
    if not pairs:
        return None
    figure, axes = _figure(panel, height=1.2 + 0.32 * len(pairs))
    unit, metric = (100 if panel.metric.share else 1), panel.metric
    axes.axvline(0, color=INK, linewidth=1)
    for row, pair in enumerate(pairs):
        found, colour = pair.found, _colour(pair.one)
        assert found is not None
        if found.low is not None and found.high is not None:
            axes.plot([unit * found.low, unit * found.high], [row, row], color=colour, linewidth=1.6)
        full = colour if pair.verdict == HOLDS else "white"
        axes.plot(unit * found.mean, row, "o", color=colour, markerfacecolor=full)
    names = [f"{pair.one.label} minus {pair.other.label} (n = {_seeds(pair)})" for pair in pairs]
    axes.set_yticks(range(len(pairs)), [textwrap.fill(name, 44) for name in names], color=INK, fontsize=8)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    low, high = axes.get_xlim()
    reach = 50 * axis_span(panel)
    axes.set_xlim(min(low, -reach), max(high, reach))
    what = f"points of {metric.name}" if metric.share else f"{metric.name}, {metric.better}"
    axes.set_xlabel(f"{what}, 95 % intervals; full: {HOLDS.removeprefix('yes, ')}")
    axes.grid(axis="x", color=LINE)
    return figure


def _seeds(pair: LinePair) -> int:
    return 0 if pair.found is None else pair.found.n


def _colour(group: LineGroup) -> str:
    return PALETTE[group.colour % len(PALETTE)]


def _labels(panel: Panel, width: int = 80) -> list[str]:
    labels = [f"{group.label} (leak)" if group.leaks else group.label for group in panel.groups]
    return [textwrap.fill(label, width) for label in labels]


FIGURES: dict[str, Callable[[Panel], Figure | None]] = {
    "differences": paired_differences,
    "convergence": convergence,
    "traffic": traffic,
    "time": time,
    "seeds": seeds,
    "classes": classes,
    "split": split,
}
