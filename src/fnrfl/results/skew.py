"""How uneven a split is, in a few numbers and as a picture. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import Floats, Ints
from fnrfl.core.words import printable
from fnrfl.rundir.outputs import write_output

SHADES = " ░▒▓█"
LONGEST_SHOWN = 24  # letters of a client's or a class's name in a figure
COLUMNS = 60  # of a heat-map; more classes than that share columns


@dataclass(frozen=True)
class Skew:
    """One row per client, [N], and what they come to."""

    sizes: Ints
    distance: Floats  # Jensen-Shannon distance of the client's labels from everybody's, 0 (the same) to 1
    classes: Floats  # effective number of classes: exp of the entropy of the client's labels
    noise: Floats  # standard deviation of the client's feature noise
    gini: float  # of the sizes: 0 when all are equal, near 1 when one client has everything

    def summary(self) -> dict[str, Any]:
        """The scores as plain values."""
        return {
            "label_distance": float(self.distance.mean()),
            "size_gini": self.gini,
            "effective_classes": float(self.classes.mean()),
            "smallest": int(self.sizes.min()),
            "largest": int(self.sizes.max()),
            "noise": self.noise.tolist(),
            "clients": [
                {"size": int(size), "label_distance": float(far), "effective_classes": float(many)}
                for size, far, many in zip(self.sizes, self.distance, self.classes, strict=True)
            ],
        }


def skew(counts: npt.ArrayLike, noise: npt.ArrayLike) -> Skew:
    """The scores of a split; `counts` says how many examples of each class a client holds, [N, C]."""
    counts = np.asarray(counts, dtype=np.int64)
    sizes = counts.sum(1)
    shares = counts / sizes[:, None].clip(1)
    return Skew(
        sizes=sizes,
        distance=js_distance(shares, counts.sum(0) / max(1, counts.sum())),
        classes=np.exp(_entropy(shares)),
        noise=np.asarray(noise, dtype=np.float64),
        gini=gini(sizes),
    )


def js_distance(shares: Floats, pooled: Floats) -> Floats:
    """Square root of the Jensen-Shannon divergence (base 2) of each row from one distribution."""
    middle = (shares + pooled) / 2
    divergence = _entropy(middle) - (_entropy(shares) + _entropy(pooled)) / 2
    return np.asarray(np.sqrt(np.maximum(divergence, 0) / np.log(2)))


def gini(sizes: npt.ArrayLike) -> float:
    """Mean difference of two sizes over twice their mean."""
    ordered = np.sort(np.asarray(sizes, dtype=np.float64))
    n = len(ordered)
    if not n or not ordered.sum():
        return 0.0
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * ordered.sum()))


def _entropy(shares: Floats) -> Floats:
    """The entropy in nats, over the last axis, with 0 log 0 = 0."""
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    return np.asarray(-(shares * logs).sum(-1))


# -- pictures ----------------------------------------------------------------------------------------------------------


def binned(counts: npt.ArrayLike) -> Ints:
    """The counts with neighbouring classes taken together, so that there are no more columns than a heat-map has."""
    held = np.asarray(counts, dtype=np.int64)
    few = min(held.shape[1], COLUMNS)
    return np.add.reduceat(held, np.arange(few) * held.shape[1] // few, axis=1)


def heat_map(counts: npt.ArrayLike) -> list[str]:
    """A line per client, a shade per class: by the root of the count, so that few examples still show."""
    cells = binned(counts)
    levels = np.ceil(np.sqrt(cells / max(1, cells.max())) * (len(SHADES) - 1)).astype(np.int64)
    width = 2 if cells.shape[1] <= COLUMNS // 2 else 1
    return ["".join(SHADES[level] * width for level in row) for row in levels]


def figure(
    counts: npt.ArrayLike,
    classes: Sequence[str],
    scores: Skew,
    title: str,
    path: Path,
    names: Sequence[str] | None = None,
) -> None:
    """Draw an image file: who holds how many of each class, and the sizes beside it; `names` are the clients'."""
    from fnrfl.results.report.plots import as_image, draw_heat, new_figure, page_style

    held = np.asarray(counts, dtype=np.int64)
    clients, num_classes = held.shape
    with page_style():
        drawing = new_figure((8, min(12.0, 1.6 + 0.3 * clients)))
        left, right = drawing.subplots(1, 2, width_ratios=(3, 1), sharey=True)
        shown = [_for_matplotlib(name) for name in names or map(str, range(clients))]
        draw_heat(left, held.tolist(), shown, lambda number: f"{number:.0f}" if number else "", int(held.max()))
        left.set(xlabel="class", ylabel="client", title=title)
        if num_classes <= 20:
            few = max(map(len, classes)) < 3
            left.set_xticks(range(num_classes), map(_for_matplotlib, classes), rotation=0 if few else 45, ha="center")
        right.barh(range(clients), scores.sizes, color="#0b62a4")
        right.set(xlabel="examples", title=f"Gini {scores.gini:.2f}")
        try:
            content = as_image(drawing, path.suffix.lower().removeprefix(".") or "png")
        except ValueError as error:  # an ending that is no image format
            raise ConfigError(f"{path} cannot be drawn: {error}. End its name in .png, .svg or .pdf.") from error
    write_output(path, content)


def _for_matplotlib(name: str) -> str:
    """Return a name from the data as it is: a dollar would begin a formula."""
    return printable(name if len(name) <= LONGEST_SHOWN else name[: LONGEST_SHOWN - 1] + "…").replace("$", r"\$")
