"""Paired differences as one figure: each line minus the one it is compared with, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fnrfl.results.report.groups import LineGroup, Panel
from fnrfl.results.report.numbers import chart_number
from fnrfl.results.report.pairs import HOLDS, LinePair, line_pairs, ranked
from fnrfl.results.report.references import axis_span

OPEN_ROWS = 40  # of a figure that is not folded away at first


def forests(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """One figure of all honest lines that can be paired, and one of those with leaks, as far as there are any."""
    honest = [panel for panel in panels if not panel.leaks]
    leaky = [panel for panel in panels if panel.leaks]
    return [found for mine, leak in ((honest, False), (leaky, True)) if (found := _forest(mine, leak))]


def _forest(panels: Sequence[Panel], leak: bool) -> dict[str, Any] | None:
    blocks = [block for panel in panels for lines in ranked(panel.groups) for block in _blocks(panel, lines)]
    if not blocks:
        return None
    if len({block["where"] for block in blocks}) > 1:
        blocks = [block | {"title": f"{block['where']}: {block['title']}"} for block in blocks]
    rows = [row for block in blocks for row in block["rows"]]
    return {
        "leak": leak,
        "least": min(axis_span(panel) for panel in panels),
        "blocks": blocks,
        "most_seeds": max(row["seeds"] for row in rows),
        "compared": sum(row["tested"] for row in rows),
        "open": len(rows) <= OPEN_ROWS,
    }


def _blocks(panel: Panel, lines: Sequence[LineGroup]) -> list[dict[str, Any]]:
    """The differences of one setting: to the baseline, to the method without FNR, to the control."""
    pairs = [pair for pair in line_pairs(lines) if pair.found is not None]
    titles = {
        "baseline": "",
        "plain": "with FNR minus the same method without it",
        "control": "with FNR minus its control, weight 0",
    }
    found = []
    for why, title in titles.items():
        mine = [pair for pair in pairs if pair.why == why]
        if mine:
            named = title or f"minus {mine[0].other.label}"
            found.append({"where": panel.named(lines[0]), "title": named, "rows": [_row(pair) for pair in mine]})
    return found


def _row(pair: LinePair) -> dict[str, Any]:
    found = pair.found
    assert found is not None
    return {
        "label": pair.one.label,
        "other": pair.other.label,
        "mark": pair.one.colour,
        "mean": chart_number(found.mean),
        "low": chart_number(found.low),
        "high": chart_number(found.high),
        "seeds": found.n,
        "tested": pair.corrected is not None,
        "holds": pair.verdict == HOLDS,
        "verdict": pair.verdict,
    }
