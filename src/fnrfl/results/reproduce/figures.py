"""The paper's figures as PNG: its data, convergence, refinement by class, and which leak gives what.

A figure with a value of a run with a leak has a red banner that says so, and says so in its metadata.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.core.words import counted
from fnrfl.results.report.plots import INK, LINE, PALETTE, as_image, draw_heat, page_style
from fnrfl.results.reproduce.claim_measures import watched
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.paper_tables import BOTH, TABLES, TablePart
from fnrfl.results.reproduce.pictured_data import PICTURED_SPLITS, classes_of_scale, noisy_samples, split_of
from fnrfl.results.reproduce.printed import CURVES
from fnrfl.results.reproduce.shown import COLUMN_NAMES, SKEW_NAMES, leaks_of, method_name, some_seeds
from fnrfl.results.statistics import mean
from fnrfl.rundir.outputs import write_output

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ConfigError("Figures need the package matplotlib. Install it, or look at the tables.") from error

LEAKS_KEY = "fnrfl-leaks"  # of a PNG's metadata
log = logging.getLogger("fnrfl")


@dataclass(frozen=True)
class Drawn:
    """A figure, and the leaks of what it shows."""

    name: str
    figure: Figure
    leaks: tuple[str, ...] = ()


def draw_all(lines: KeptLines, scale: str, folder: Path) -> list[Path]:
    """Write every figure that there are results for; those of the data need no results."""
    folder.mkdir(parents=True, exist_ok=True)
    look = _Lookup(lines, scale)
    written = []
    with page_style():
        for drawn in _figures(look):
            written.append(folder / f"{drawn.name}.png")
            write_output(written[-1], as_png(drawn))
    return written


def as_png(drawn: Drawn) -> bytes:
    """The figure with its banner and its metadata."""
    if drawn.leaks:
        words = f"LEAK: {', '.join(drawn.leaks)}. No honest result."
        drawn.figure.suptitle(
            words, fontsize=10, color="white", fontweight="bold", backgroundcolor="#b3261e", x=0.02, ha="left"
        )
    return as_image(drawn.figure, metadata={LEAKS_KEY: ", ".join(drawn.leaks) or "none"})


@dataclass(frozen=True)
class _Lookup:
    """Where figures find their lines."""

    lines: KeptLines
    scale: str

    def seeds(self, part: TablePart, setting: str, method: str) -> list[CellLine]:
        """The lines of all seeds that have one."""
        seeds = part.seeds_of(setting)
        cells = (PaperCell(part.net, part.skew, setting, method, seed, self.scale) for seed in seeds)
        return [found.line for found in map(self.lines.find, cells) if found.usable]


def _figures(look: _Lookup) -> Iterator[Drawn]:
    for skew in PICTURED_SPLITS:
        yield _split(look.scale, skew)
    try:
        yield _noisy_samples(look.scale)
    except ConfigError as error:  # the data may not be there
        log.warning("Noisy samples are not drawn. %s", error)
    for setting in BOTH:
        for part in TABLES["convergence"].parts:
            yield from _convergence(look, part, setting)
        yield from _refinement(look, setting)
        yield from _one_refined(look, setting)
    yield from _attribution(look)


def _wide_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    return figure, figure.subplots()


# -- the data ----------------------------------------------------------------------------------------------------------


def _split(scale: str, skew: str) -> Drawn:
    counts = split_of(scale, skew)
    figure, axes = _wide_figure()
    names = [f"client {client + 1}" for client in range(len(counts))]
    draw_heat(axes, counts, names, lambda value: f"{value:.0f}", max(map(max, counts)))
    axes.set_xticks(range(10), classes_of_scale(scale), rotation=0 if scale == "tiny" else 30)
    axes.set_title(f"examples by client and class: {SKEW_NAMES[skew]}, seed 0", fontsize=10, loc="left")
    return Drawn(f"split-{skew.replace('+', '-')}", figure)


def _noisy_samples(scale: str) -> Drawn:
    """A test image as six clients see it, whose noise goes from none to 0.5."""
    found = noisy_samples(scale)
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    for level, pictures, column in zip(found.levels, found.pictures, figure.subplots(3, 6).T, strict=True):
        for axes, picture in zip(column, pictures, strict=True):
            axes.imshow(picture.squeeze(-1).numpy(), cmap="gray")  # one channel is grey
            axes.set_axis_off()
        column[0].set_title(f"noise {level:.1f}", fontsize=9)
    return Drawn("noisy-samples", figure)


# -- what came out -----------------------------------------------------------------------------------------------------


def _convergence(look: _Lookup, part: TablePart, setting: str) -> Iterator[Drawn]:
    """Accuracy by round: the mean over seeds and, dotted, what was printed."""
    skew, found = part.skew, {method: look.seeds(part, setting, method) for method in part.methods}
    asked = len(part.seeds_of(setting))
    if not any(found.values()):
        return
    figure, axes = _wide_figure()
    for colour, (method, lines) in zip(PALETTE, found.items(), strict=False):
        curves = [line["accuracies"] for line in lines]
        if curves:
            rounds = range(1, len(curves[0]) + 1)
            at = list(zip(*curves, strict=True))
            label = method_name(method) + _seeds_missing(lines, asked)
            axes.plot(rounds, [mean(values) for values in at], color=colour, label=label)
            axes.fill_between(rounds, list(map(min, at)), list(map(max, at)), color=colour, alpha=0.13, linewidth=0)
        if method in CURVES and (skew, setting, look.scale) == ("label", "paper", "full"):
            axes.plot(range(1, 11), CURVES[method], ":", color=colour, label=f"{method_name(method)}, printed")
    several = any(len(lines) > 1 for lines in found.values())
    axes.set_xlabel("round")
    axes.set_ylabel("test accuracy" + ("; band: lowest to highest seed" if several else ""))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=LINE)
    axes.set_title(f"{COLUMN_NAMES[setting]}: {SKEW_NAMES[skew]}, scale {look.scale}", fontsize=10, loc="left")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    yield Drawn(f"convergence-{skew}-{setting}", figure, leaks_of(line for lines in found.values() for line in lines))


def _refinement(look: _Lookup, setting: str) -> Iterator[Drawn]:
    """Accuracy within each class before and after refinement: the mean over refined clients, in the last round."""
    lines = look.seeds(TablePart("resnet18", "label", ()), setting, "fedavg+fnr")
    if not lines:
        return
    named = {
        f"{when} refinement": [
            mean([line["notes"][f"refined_{when}"][-1][c] or 0.0 for line in lines]) for c in range(10)
        ]
        for when in ("before", "after")
    }
    figure = _bars(classes_of_scale(look.scale), named)
    what = "accuracy of refined clients on ranking data"
    title = (
        f"{COLUMN_NAMES[setting]}: {what}, label skew, last round, {counted(len(lines), 'seed')}, scale {look.scale}"
    )
    figure.axes[0].set_title(title, fontsize=9, loc="left")
    yield Drawn(f"refinement-{setting}", figure, leaks_of(lines))


def _one_refined(look: _Lookup, setting: str) -> Iterator[Drawn]:
    """Accuracy by class of one client, as the paper draws it: the first that the last round refined."""
    lines = look.seeds(TablePart("resnet18", "label", ()), setting, "fedavg+fnr")[:1]
    if not lines or not (logged := watched(lines[0])):
        return
    told = logged[-1]
    named = {
        f"{when} refinement": [value or 0.0 for value in told[f"accuracy_{when}"][0]] for when in ("before", "after")
    }
    classes = zip(classes_of_scale(look.scale), told["counts"][0], strict=True)
    figure = _bars([f"{name}: {count}" for name, count in classes], named)
    whose = f"client {told['refined'][0] + 1}, with its examples of each class"
    seed = PaperCell.read(lines[0]["id"]).seed
    title = f"{COLUMN_NAMES[setting]}: {whose}; label skew, seed {seed}, last round, scale {look.scale}"
    figure.axes[0].set_title(title, fontsize=9, loc="left")
    yield Drawn(f"refinement-of-one-{setting}", figure, leaks_of(lines))


def _attribution(look: _Lookup) -> Iterator[Drawn]:
    """What each leak gives, on clean and on noisy test images."""
    part = TABLES["attribution"].parts[0]
    found = {method: look.seeds(part, "paper", method) for method in part.methods}
    found = {method: lines for method, lines in found.items() if lines}
    if not found:
        return
    named = {
        f"{score} test images": [mean([line[score] for line in lines]) for lines in found.values()]
        for score in ("clean", "noisy")
    }
    asked = len(part.seeds_of("paper"))
    names = [
        method_name(method).removeprefix("FedAvg + ").removeprefix("FedAvg, ") + _seeds_missing(lines, asked, "\n")
        for method, lines in found.items()
    ]
    figure = _bars(names, named)
    figure.axes[0].set_title(f"feature skew, noise 0.5, FedAvg, scale {look.scale}", fontsize=10, loc="left")
    yield Drawn("attribution-feature", figure, leaks_of(line for lines in found.values() for line in lines))


def _seeds_missing(lines: Sequence[CellLine], asked: int, before: str = " ") -> str:
    """Which seeds a mean is of, if that is not all."""
    said = some_seeds([PaperCell.read(line["id"]).seed for line in lines], asked)
    return f"{before}{said.lstrip()}" if said else ""


def _bars(names: Sequence[str], values: dict[str, list[float]]) -> Figure:
    """Groups of bars, one for each name."""
    figure, axes = _wide_figure()
    for number, (label, heights) in enumerate(values.items()):
        places = [place + (number - 0.5) * 0.38 for place in range(len(names))]
        bars = axes.bar(places, heights, width=0.36, color=PALETTE[number], label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, color=INK)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.05)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
