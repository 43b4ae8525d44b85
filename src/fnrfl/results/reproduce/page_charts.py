"""What the charts of the reproduction's page are drawn from: curves, the waterfall of leaks, splits, noisy samples."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

from fnrfl.core.errors import ConfigError
from fnrfl.results.report.numbers import chart_number
from fnrfl.results.reproduce.pictured_data import PICTURED_SPLITS, classes_of_scale, noisy_samples, split_of
from fnrfl.results.reproduce.shown import SKEW_NAMES, ShownColumn, ShownPart, ShownTable, ShownValue

ChartData = dict[str, Any]


def curve_charts(table: ShownTable) -> list[ChartData]:
    """Accuracy by round: a chart for each skew and protocol, of which some may have no line yet."""
    return [_curve_chart(number, part) for number, part in enumerate(table.parts)]


def _curve_chart(number: int, part: ShownPart) -> ChartData:
    """A line for each method, with one standard deviation around it."""
    skew, _, title = part.title.partition(": ")
    series = [
        {"label": row, "mark": place, "points": points}
        for place, row in enumerate(part.rows)
        if (points := list(_points([column.values[place] for column in part.columns])))
    ]
    leak = any(value.leaks for value in part.values)
    last = zip(part.rows, part.columns[-1].values, strict=True)
    fewer = [f"{row} has {', '.join(map(str, value.seeds))}" for row, value in last if value.seeds and value.missing]
    return {"number": number, "skew": skew, "title": title, "leak": leak, "series": series, "fewer": "; ".join(fewer)}


def _points(values: Sequence[ShownValue]) -> Iterator[ChartData]:
    for t, value in enumerate(values, 1):
        if value.mean is not None:
            sd = value.sd or 0.0
            at = {"y": value.mean, "low": value.mean - sd, "high": value.mean + sd}
            yield {"x": t, "round": t} | {name: chart_number(number) for name, number in at.items()}


# -- which leak gives what --------------------------------------------------------------------------------------------

# A bar's name, the row that it starts from (none: it is a total) and the row that it ends at.
WATERFALL = (
    ("FedAvg, no leak", "", "FedAvg, no leak"),
    ("BatchNorm leak", "FedAvg, no leak", "FedAvg + BatchNorm leak"),
    ("label leak, added to it", "FedAvg + BatchNorm leak", "FedAvg + both leaks"),
    ("FedAvg with both leaks", "", "FedAvg + both leaks"),
    ("penalty of weight 1 instead of 0", "FedAvg + both leaks, weight 0", "FedAvg + both leaks, weight 1"),
)


def waterfalls(table: ShownTable) -> list[ChartData]:
    """What each leak adds, one chart for each skew and kind of test images."""
    charts = (_waterfall(part, column) for part in table.parts for column in part.columns)
    return [chart for chart in charts if chart is not None]


def _waterfall(part: ShownPart, column: ShownColumn) -> ChartData | None:
    at = dict(zip(part.rows, column.values, strict=True))
    bars = [_bar(name, at[start] if start else None, at[end]) for name, start, end in WATERFALL]
    if all(bar["end"] is None for bar in bars):
        return None
    leak = any(bar["leak"] for bar in bars if bar["end"] is not None)
    return {"title": f"{part.title}: {column.head}", "leak": leak, "bars": bars}


def _bar(name: str, start: ShownValue | None, end: ShownValue) -> ChartData:
    """A total from zero, or a step from one value to another; without both there is no bar."""
    known = end.mean is not None and (start is None or start.mean is not None)
    words = end.words if start is None else f"{start.words} to {end.words}"
    begin = 0.0 if start is None else start.mean
    return {
        "label": name,
        "total": start is None,
        "leak": bool(end.leaks),
        "start": chart_number(begin) if known else None,
        "end": chart_number(end.mean) if known else None,
        "words": words,
    }


# -- the data ----------------------------------------------------------------------------------------------------------


def split_charts(scale: str) -> list[ChartData]:
    """Examples by client and class, of the paper's splits."""
    return [
        {"title": SKEW_NAMES[skew], "classes": classes_of_scale(scale), "counts": split_of(scale, skew)}
        for skew in PICTURED_SPLITS
    ]


def noisy_chart(scale: str) -> tuple[ChartData | None, str]:
    """Test images as clients see them, as bytes, and a sentence: about whose images these are, or why there are none.

    Where the data of the scale is not on this computer, the images are digits, which are part of the package.
    """
    missing = ""
    try:
        found = noisy_samples(scale)
    except ConfigError as error:
        found, missing = noisy_samples("tiny"), f" There is no other data set on this computer: {error}"
    clients, images, height, width, channels = found.pictures.shape
    pixels = (found.pictures * 255).round().byte().numpy().tobytes()
    chart = {
        "levels": [f"{level:.1f}" for level in found.levels],
        "shape": [clients, images, height, width, channels],
        "pixels": base64.b64encode(pixels).decode(),
    }
    return chart, f"Three test images of {found.dataset}.{missing}"
