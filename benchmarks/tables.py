"""The tables of results/cpu/README.md, from the lines that `cpu.py` wrote.

python benchmarks/tables.py results/cpu/cpu-2026-11-15.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

from picture import latest

ORDER = ("W1", "W1-ragged", "W1-keep", "W2", "W2-ragged", "W3", "W3-ragged", "W4", "W5")


def main(path: Path) -> None:
    """Print them."""
    lines = latest(path)
    by = {(line["benchmark"], line.get("threads")): line for line in lines}
    print("| work | | engine | one thread | both cores | ms a round: fnrfl, loop |\n|---|---|---|---|---|---|")
    for name in ORDER:
        one, both = (by.get((name, threads)) for threads in (1, 2))
        cell = lambda line: (  # noqa: E731
            f"**{line['ratio']:.2f}** ({line['lowest']:.2f} to {line['highest']:.2f})" if line else "-"
        )
        shown = both or one
        assert shown is not None
        times = f"{shown['ms_fnrfl']:,.1f}, {shown['ms_tight']:,.1f}"
        print(f"| {name} | {shown['says']} | {shown['engine']} | {cell(one)} | {cell(both)} | {times} |")
    print("\n| method | W1 | share of FedAvg's | W3 | share of FedAvg's |\n|---|---|---|---|---|")
    for method, label in (("scaffold", "SCAFFOLD"), ("moon", "MOON"), ("fnr", "FedAvg under FNR")):
        cells = []
        for work in ("W1", "W3"):
            line, plain = by[f"{work}-{method}", 2], by[work, 2]
            cells += [
                f"{line['ratio']:.2f} ({line['lowest']:.2f} to {line['highest']:.2f})",
                f"{100 * line['ratio'] / plain['ratio']:.0f} %",
            ]
        print(f"| {label} | {' | '.join(cells)} |")
    print("\n| work | import | first round after | a round | peak memory |\n|---|---|---|---|---|")
    for name in ("W1", "W2", "W3"):
        line = next(found for found in lines if found["benchmark"] == f"{name}-process")
        print(
            f"| {name} | {line['import_s']:.2f} s | {line['first_round_s']:.1f} s | {1e3 * line['round_s']:.0f} ms | "
            f"{line['peak_mb']} MB |"
        )
    for line in lines:
        if line["benchmark"] in ("resnet18-step", "1000-clients"):
            print("\n", line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
