"""The figure of the convergence analysis: runs under their corrected bounds, and what the printed recursion says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fnrfl.core.words import counted
from fnrfl.results.report.plots import INK, PALETTE, as_image, page_style
from fnrfl.results.reproduce.theory import FAR, TheoryCheck
from fnrfl.rundir.outputs import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_theory(found: TheoryCheck, path: Path) -> Path:
    """Write the figure as a PNG."""
    from matplotlib.figure import Figure  # `plots` has said so in a sentence if it is not there

    with page_style(**{"text.parse_math": True}):  # for the powers of ten
        figure = Figure(figsize=(11.0, 4.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        _measured(left, found)
        _printed(right, found)
        write_output(path, as_image(figure))
    return path


def _measured(axes: Axes, found: TheoryCheck) -> None:
    """Runs, and the corrected bound of each."""
    for curve, colour in zip(found.curves, PALETTE, strict=False):
        steps = [step + 1 for step in curve.steps]
        axes.plot(steps, curve.measured, color=colour, linewidth=1.8, label=f"{curve.name}: measured")
        axes.plot(steps, curve.bound, color=colour, linewidth=1.2, linestyle="--", label="its corrected bound")
    _finish(axes, "Runs and their corrected bounds", f"mean of {counted(found.seeds, 'seed')}")


def _printed(axes: Axes, found: TheoryCheck) -> None:
    """The printed recursion in both readings."""
    for (name, bound), colour in zip(found.recursions.items(), (PALETTE[3], PALETTE[1], PALETTE[0]), strict=False):
        axes.plot(FAR, bound, color=colour, linewidth=1.4, linestyle="--", label=f"bound: {name}")
    steps = [step + 1 for step in found.printed.steps]
    axes.plot(steps, found.printed.measured, color=INK, linewidth=1.8, label=f"{found.printed.name}: measured")
    axes.plot(
        steps,
        found.printed.bound,
        color=PALETTE[3],
        linewidth=1.4,
        linestyle=":",
        label="bound of that run: printed, Gamma as printed (0)",
    )
    _finish(axes, "What the printed recursion says", "one local step, unless said")


def _finish(axes: Axes, title: str, note: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(title, fontsize=10.5, loc="left", color=INK)
    axes.set_xlabel(f"steps + 1 ({note})")
    axes.set_ylabel("squared distance to the optimum")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 30, high)  # room for the legend
    axes.legend(fontsize=7.5, frameon=False, loc="lower left")
