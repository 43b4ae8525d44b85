"""The figures of docs/performance.md: of a CPU's rounds from the lines that `cpu.py` wrote, of a GPU's steps.

python benchmarks/picture.py results/cpu/cpu-2026-11-15.jsonl docs/images/cpu.png
python benchmarks/picture.py results/gpu/where-2026-11-15.jsonl docs/images/gpu.png
python benchmarks/picture.py results/gpu/h200-2026-11-17-{second,third}.jsonl docs/images/memory.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

WORKS = ("W1", "W1-ragged", "W2", "W2-ragged", "W3", "W3-ragged", "W4", "W5")
PARTS = {
    "steps": "#31688e",
    "gathering batches": "#35b779",
    "orders, start": "#90d743",
    "evaluation": "#e7a23b",
    "averaging, the rest": "#bbbbbb",
}
KERNELS = {
    "convolutions": "#31688e",
    "slices and transforms": "#7fb3d5",
    "BatchNorm and elementwise": "#35b779",
    "optimiser": "#e7a23b",
    "other": "#bbbbbb",
}


def every(path: Path) -> list[dict[str, Any]]:
    """All lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def latest(path: Path) -> list[dict[str, Any]]:
    """The last line of every measurement: a work may have been measured again."""
    lines = every(path)
    return list({(line["benchmark"], line.get("threads")): line for line in lines}.values())


def ratios(axes: Any, lines: list[dict[str, Any]]) -> None:
    """Times faster than the tight loop, by work and threads."""
    for shift, color, label, chosen in (
        (-0.2, "#7fb3d5", "one thread", lambda line: line["threads"] == 1),
        (0.2, "#31688e", "both cores", lambda line: line["threads"] != 1),
    ):
        found = {line["benchmark"]: line for line in lines if line["benchmark"] in WORKS and chosen(line)}
        here = [i for i, work in enumerate(WORKS) if work in found]
        bars = [found[WORKS[i]] for i in here]
        axes.barh([i + shift for i in here], [b["ratio"] for b in bars], 0.36, color=color, label=label)
        axes.errorbar(
            [b["ratio"] for b in bars],
            [i + shift for i in here],
            xerr=[[b["ratio"] - b["lowest"] for b in bars], [b["highest"] - b["ratio"] for b in bars]],
            fmt="none",
            ecolor="#222222",
            elinewidth=1,
            capsize=2,
        )
        for i, bar in zip(here, bars, strict=True):
            axes.text(bar["highest"] + 0.07, i + shift, f"{bar['ratio']:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="#aa3333", linewidth=1)
    axes.set_yticks(range(len(WORKS)), WORKS)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the tight loop on one thread")
    axes.set_title("Rounds, median and range of 15 turns", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def where(axes: Any, lines: list[dict[str, Any]]) -> None:
    """What a round's time is spent on."""
    found = [line for line in lines if line["benchmark"].endswith("-where")]
    for i, line in enumerate(found):
        left, whole = 0.0, sum(line["ms"].values())
        for part, color in PARTS.items():
            width = 100 * line["ms"].get(part, 0.0) / whole
            axes.barh(i, width, 0.55, left=left, color=color, label=part if i == 0 else None)
            if width > 7:
                axes.text(left + width / 2, i, f"{width:.0f}", ha="center", va="center", fontsize=8)
            left += width
    names = [f"{line['benchmark'].removesuffix('-where')}\n{sum(line['ms'].values()):,.1f} ms" for line in found]
    axes.set_yticks(range(len(found)), names)
    axes.invert_yaxis()
    axes.set_xlabel("per cent of a round, one thread")
    axes.set_title("Where the time of a round goes", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.45, -0.16))


def kernels(axes: Any, lines: list[dict[str, Any]]) -> None:
    """What a GPU is busy with in a step, and below it how long the step takes."""
    for i, line in enumerate(lines):
        left = 0.0
        for part, color in KERNELS.items():
            width = line["ms"][part]
            axes.barh(i, width, 0.5, left=left, color=color, label=part if i == 0 else None)
            if width > 0.7:
                axes.text(left + width / 2, i, f"{width:.1f}", ha="center", va="center", fontsize=8)
            left += width
        took = line["ms_step"]
        axes.plot([0, took], [i + 0.34, i + 0.34], color="#aa3333", linewidth=2.5, solid_capstyle="butt")
        axes.text(took + 0.15, i + 0.34, f"the step takes {took:.1f} ms", color="#aa3333", va="center", fontsize=8)
    about = "{how}\n{kernel_search} search\n{kernels:,} kernels"
    names = [about.format(how=line["technique"].partition(",")[0], **line) for line in lines]
    axes.set_yticks(range(len(lines)), names, fontsize=9)
    axes.set_ylim(len(lines) - 0.5, -0.4)
    axes.set_xlabel("ms that kernels are busy in a step; some run side by side")
    axes.set_title("Where the time of a step of ten clients goes, ResNet-18, bf16, one H200", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.42, -0.2))


def memory(axes: Any, lines: list[dict[str, Any]], where: str, place: str) -> None:
    """What processes hold after each of their cells."""
    for process in dict.fromkeys(line["memory"]["process"] for line in lines):
        own = [line for line in lines if line["memory"]["process"] == process]
        held = [line["memory"][where] / 1e3 for line in own]
        axes.plot(range(1, len(held) + 1), held, marker="o", markersize=3, linewidth=1.2, label=own[0]["benchmark"])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("cells that the process has computed")
    axes.set_ylabel(f"GB {place}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8, title="benchmark", title_fontsize=8)


def main(sources: list[Path], target: Path) -> None:
    """Draw."""
    lines, source = [line for source in sources for line in every(source)], sources[-1]
    remembered = [line for line in lines if "memory" in line]
    if remembered:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
        memory(left, remembered, "gpu_mb", "on the GPU")
        memory(right, remembered, "host_mb", "on the host")
        figure.suptitle("What a process holds after each of its cells; a line for each process", fontsize=10)
    elif all("kernels" in line for line in lines):
        figure, axes = plt.subplots(figsize=(9.5, 3.6))
        kernels(axes, latest(source))
    else:
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=[1.1, 1])
        ratios(left, latest(source))
        where(right, latest(source))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    *sources, target = map(Path, sys.argv[1:])
    main(sources, target)
