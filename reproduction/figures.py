"""The paper's figures as PNG: its data, convergence, what leaks give, refinement by class, and the analysis.

A figure with a value of a run with a leak has a red banner that says so, and says so in its metadata.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fnrfl import statistics
from reproduction.catalogue import DATA, SEEDS, Cell, text
from reproduction.measures import watched
from reproduction.render import some_seeds
from reproduction.store import Results
from reproduction.tables import Part, leaks_of, make_table

if TYPE_CHECKING:
    from reproduction.theory import TheoryCheck

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#c0267e", "#27278f", "#8f86ea")
LEAKS_KEY = "fnrfl-leaks"  # of a PNG's metadata
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# A bar of what leaks give: its text, the row that it starts from (none: it is a total) and the row that it ends at.
WATERFALL = (
    ("no-leak", "", "fedavg+no-leak"),
    ("batchnorm", "fedavg+no-leak", "fedavg+batchnorm-leak"),
    ("label", "fedavg+batchnorm-leak", "fedavg+both-leaks"),
    ("both", "", "fedavg+both-leaks"),
    ("penalty", "fedavg+both-leaks-weight-0", "fedavg+both-leaks-weight-1"),
)


def draw_all(results: Results, scale: str) -> dict[str, bytes]:
    """Draw every figure that there are results for, by name; those of the data need no results."""
    noisy = {"noisy-samples": (DATA / "noisy-samples.png").read_bytes()}
    found = (_splits(scale), _convergence(results, scale), _waterfalls(results, scale), _refinement(results, scale))
    return noisy | dict(itertools.chain(*found))


def as_png(figure: Figure, leaks: Sequence[str] = ()) -> bytes:
    """Return a figure with its banner and its metadata as the content of a file."""
    if leaks:
        banner = text("figures", "leak", leaks=", ".join(leaks))
        figure.suptitle(banner, fontsize=10, color="white", backgroundcolor="#b3261e", x=0.02, ha="left")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, metadata={LEAKS_KEY: ", ".join(leaks) or "none"})
    return drawn.getvalue()


def _axes(title: str) -> tuple[Figure, Axes]:
    mpl.rcdefaults()
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=9.5, loc="left")
    return figure, axes


def _classes(scale: str) -> Sequence[str]:
    return tuple(map(str, range(10))) if scale == "tiny" else CLASSES


def _splits(scale: str) -> Iterator[tuple[str, bytes]]:
    """Draw the examples by client and class, as the paper's protocol spreads all training data with seed 0."""
    found = json.loads((DATA / "splits.json").read_text(encoding="utf-8"))["tiny" if scale == "tiny" else "quick"]
    for skew, counts in found.items():
        figure, axes = _axes(text("figures", "split", skew=text("skews", skew)))
        most = max(map(max, counts))
        axes.imshow(counts, cmap="Blues", vmin=0, vmax=most, aspect="auto")
        for client, row in enumerate(counts):
            for label, count in enumerate(row):
                colour = "white" if count > 0.6 * most else "black"
                axes.text(label, client, str(count), ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(10), _classes(scale), rotation=30)
        axes.set_yticks(range(len(counts)), [text("figures", "client", client=c + 1) for c in range(len(counts))])
        yield f"split-{skew.replace('+', '-')}", as_png(figure)


def _convergence(results: Results, scale: str) -> Iterator[tuple[str, bytes]]:
    """Draw accuracy by round: the mean over seeds, its standard deviation and, dotted, what was printed."""
    parts = {part.key: part for part in make_table("convergence", results, scale).parts}
    for (net, skew, setting), part in parts.items():
        if setting == "printed" or not any(value.number for value in part.values):
            continue
        figure, axes = _axes(part.title)
        _curves(axes, part)
        printed = parts.get((net, skew, "printed"))
        if printed and (setting, scale) == ("paper", "full"):
            _curves(axes, printed, ":")
        axes.set(xlabel=text("figures", "round"), ylabel=text("figures", "accuracy"))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        yield f"convergence-{skew}-{setting}", as_png(figure, part.leaks)


def _curves(axes: Axes, part: Part, style: str = "-") -> None:
    for place, (_, label) in enumerate(part.rows):
        values = [column.values[place] for column in part.columns]
        known = [(t, value.number) for t, value in enumerate(values, 1) if value.number]
        if not known:
            continue
        rounds, colour = [t for t, _ in known], PALETTE[place]
        name = label + some_seeds(values[-1]) if style == "-" else f"{label}, {text('settings', 'printed')}"
        axes.plot(rounds, [number.mean for _, number in known], style, color=colour, label=name)
        low, high = ([number.mean + sign * (number.sd or 0.0) for _, number in known] for sign in (-1, 1))
        axes.fill_between(rounds, low, high, color=colour, alpha=0.13, linewidth=0)


def _waterfalls(results: Results, scale: str) -> Iterator[tuple[str, bytes]]:
    """Draw what each leak adds, on clean and on noisy test images."""
    for part in make_table("attribution", results, scale).parts:
        for column in part.columns:
            ends = {row: value.number for (row, _), value in zip(part.rows, column.values, strict=True)}
            bars = [(name, ends[start] if start else None, start, ends[end]) for name, start, end in WATERFALL]
            if not any(end for _, _, _, end in bars):
                continue
            figure, axes = _axes(text("parts", "metric", title=part.title, metric=column.label))
            for place, (_, before, start, after) in enumerate(bars):
                if after and (before or not start):
                    low = before.mean if before else 0.0
                    bar = axes.barh(place, after.mean - low, left=low, color=PALETTE[1 if start else 0])
                    axes.bar_label(bar, [f"{after.mean - low:+.4f}" if start else f"{after.mean:.4f}"], padding=3)
            axes.set_yticks(range(len(bars)), [text("figures", f"fall-{name}") for name, *_ in bars])
            axes.invert_yaxis()
            axes.set_xlim(0, 1.15)
            yield f"attribution-{part.key[1]}-{column.key}", as_png(figure, part.leaks)


def _refinement(results: Results, scale: str) -> Iterator[tuple[str, bytes]]:
    """Draw accuracy by class before and after refinement, in the last round: of all refined clients and of one."""
    for setting in SEEDS:
        found = [results.find(Cell("resnet18", "label", setting, "fedavg+fnr", seed, scale)) for seed in SEEDS[setting]]
        if not (lines := [line for line in found if line.usable]):
            continue
        titles = {"setting": text("settings", setting), "scale": scale, "seeds": len(lines)}
        bars = {
            when: [statistics.mean([line.notes[f"refined_{when}"][-1][c] or 0.0 for line in lines]) for c in range(10)]
            for when in ("before", "after")
        }
        figure = _bars(text("figures", "refined", **titles), _classes(scale), bars)
        yield f"refinement-{setting}", as_png(figure, leaks_of(lines))
        if logged := watched(lines[0]):
            one = logged[-1]
            names = [f"{name}: {count}" for name, count in zip(_classes(scale), one["counts"][0], strict=True)]
            bars = {when: [share or 0.0 for share in one[f"accuracy_{when}"][0]] for when in ("before", "after")}
            figure = _bars(text("figures", "one", client=one["refined"][0] + 1, **titles), names, bars)
            yield f"refinement-of-one-{setting}", as_png(figure, leaks_of(lines[:1]))


def _bars(title: str, names: Sequence[str], values: Mapping[str, Sequence[float]]) -> Figure:
    figure, axes = _axes(title)
    for number, (when, heights) in enumerate(values.items()):
        places = [place + (number - 0.5) * 0.38 for place in range(len(names))]
        bars = axes.bar(places, heights, width=0.36, color=PALETTE[number], label=text("figures", when))
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axes.set_ylim(0, 1.05)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_theory(found: TheoryCheck) -> bytes:
    """Draw runs under their corrected bounds, and what the printed recursion says."""
    from reproduction.theory import FAR, WORDS

    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for curve, colour in zip(found.curves, PALETTE, strict=False):
        steps = [step + 1 for step in curve.steps]
        left.plot(steps, curve.measured, color=colour, label=text("figures", "measured", name=curve.words))
        left.plot(steps, curve.bound, "--", color=colour, label=text("figures", "corrected"))
    for (name, bound), colour in zip(found.recursions.items(), PALETTE[3:], strict=False):
        right.plot(FAR, bound, "--", color=colour, label=text("figures", "bound", name=WORDS["recursions"][name]))
    steps = [step + 1 for step in found.printed.steps]
    right.plot(steps, found.printed.measured, "k", label=text("figures", "measured", name=found.printed.words))
    right.plot(steps, found.printed.bound, ":", color=PALETTE[3], label=text("figures", "violated"))
    for axes, title in ((left, "runs"), (right, "recursion")):
        axes.set(xscale="log", yscale="log", xlabel=text("figures", "steps"), ylabel=text("figures", "distance"))
        axes.set_title(text("figures", title), fontsize=10.5, loc="left")
        axes.set_ylim(axes.get_ylim()[0] / 30)  # room for the legend
        axes.legend(fontsize=7.5, frameon=False, loc="lower left")
    return as_png(figure)


def write_all(drawn: Mapping[str, bytes], folder: Path) -> None:
    """Write figures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in drawn.items():
        (folder / f"{name}.png").write_bytes(content)
