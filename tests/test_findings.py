"""Numbers in the documents about the paper are those of committed results, or printed ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from fnrfl.results.reproduce.kept_lines import KeptLines, committed_lines
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.printed import CURVES, PRINTED
from fnrfl.results.reproduce.settings import METHODS
from fnrfl.results.statistics import mean
from test_docs import PAGES, PROSE, ROOT, tables

LINES = KeptLines.read(Path("no-lines-of-ones-own.jsonl"))
FINDINGS = PAGES["docs/reproduction.md"]
SCORES = ("accuracy", "clean", "noisy")
NO_ACCURACY = {  # numbers of four digits that are something else, with what they are
    "0.0153": "the largest difference between two runs of a cell",
    "0.0005": "a client's weight",
    "0.0070": "what the paper adds to FedAvg's number, here and below",
    "0.0450": "",
    "0.0100": "",
    "0.0400": "",
    "0.0020": "",
    "0.0095": "how far a split is from no skew",
}


def four_digits(value: float) -> set[str]:
    """A number as people round it and as Python does, which differ where the fifth digit is a 5."""
    return {f"{value:.4f}", str(Decimal(repr(value)).quantize(Decimal("0.0001"), ROUND_HALF_UP))}


def scores_in(value: Any) -> Iterator[float]:
    """Every accuracy in a line of a benchmark, however deep."""
    if isinstance(value, dict):
        yield from (value[name] for name in SCORES if isinstance(value.get(name), float))
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from scores_in(one)


def committed_accuracies() -> set[str]:
    """The last accuracies of all cells, and their means over the first two seeds and over all."""
    by_seed: dict[tuple[str, str], list[float]] = {}
    for name, line in sorted(LINES.committed.items()):
        for score in SCORES:
            if line.get(score) is not None:
                by_seed.setdefault((re.sub("seed.@", "", name), score), []).append(line[score])
    known = [mean(values[:count]) for values in by_seed.values() for count in range(1, len(values) + 1)]
    for line in committed_lines():  # also of cells that were run again
        known += [line[score] for score in SCORES if line.get(score) is not None]
    for path in (ROOT / "results" / "gpu").glob("*.jsonl"):
        known += scores_in([json.loads(text) for text in path.read_text("utf-8").splitlines()])
    for name, line in LINES.committed.items():  # NIID-Bench's figures are read off after ten rounds
        known += [line["accuracies"][9]] if "/niid-bench" in name and "failed" not in line else []
    known += [printed.value for printed in PRINTED.values()] + [value for curve in CURVES.values() for value in curve]
    return set().union(*map(four_digits, known))


@pytest.mark.parametrize("page", ["README.md", "docs/reproduction.md", "docs/faq.md"])
def test_every_accuracy_of_four_digits_is_a_committed_or_a_printed_one(page: str) -> None:
    known = committed_accuracies() | NO_ACCURACY.keys()
    written = re.findall(r"(?<![\d.+-])[01]\.\d{4}(?!\d)", PROSE[page])
    assert written and [number for number in written if number not in known] == []


# -- NIID-Bench's table -----------------------------------------------------------------------------------------------

SPLITS = {
    "one class per client": "classes-1",
    "two classes per client": "classes-2",
    "three classes per client": "classes-3",
    "noise 0.1": "feature-0.1",
    "quantity skew": "quantity",
    "no skew": "iid",
    "label skew": "label",
}


def published(split: str, method: str) -> str:
    """A published number as the page has it."""
    number = PRINTED["niid-bench", "simple-cnn", split, method]
    return f"{number.value:.3f}" + ("" if number.verified else "?")


def here(split: str, method: str, setting: str = "niid-bench") -> str:
    """Accuracies of a cell as the page has them: seeds 0 to 2, as far as they have run."""
    cells = [PaperCell("simple-cnn", split, setting, method, seed, "full") for seed in range(3)]
    found = [LINES.find(cell) for cell in cells]
    if found[0].state == "failed":
        return re.sub(r".*, (round \d+),.*", r"not finite in \1", found[0].line["failed"])
    shown = [f"{result.line['accuracy']:.4f}" if result.usable else "-" for result in found]
    while shown[-1:] == ["-"]:
        shown.pop()
    return ", ".join(shown) or "not run"


def niid_tables() -> tuple[list[list[str]], list[list[str]]]:
    """The rows for FedAvg, and those for the other methods."""
    indented = re.sub(r"^ +\|", "|", FINDINGS, flags=re.MULTILINE)
    fedavg, others = [rows for head, rows in tables(indented) if head[0] == "split"]
    return fedavg, others


def test_the_page_has_fedavg_as_niid_bench_published_it_and_as_it_is_here() -> None:
    rows = {name: cells for name, *cells in niid_tables()[0]}
    assert rows == {
        name: [published(split, "fedavg"), here(split, "fedavg"), here(split, "fedavg", "niid-bench-standard")]
        for name, split in SPLITS.items()
    }


def test_the_page_has_the_other_methods_as_niid_bench_published_them_and_as_they_are_here() -> None:
    methods = ("fedprox", "scaffold", "scaffold-niid-bench", "fednova")
    assert set(methods) <= METHODS.keys()
    rows = {name: cells for name, *cells in niid_tables()[1]}
    assert rows == {
        name: [f"{here(split, method)} ({published(split, method)})" for method in methods]
        for name, split in SPLITS.items()
    }
