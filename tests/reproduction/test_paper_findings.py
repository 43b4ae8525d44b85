"""Numbers in the documents about the paper are those of committed results, or printed ones."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest

from fnrfl.results.statistics import mean
from reproduction.__main__ import missing_lines
from reproduction.catalogue import CURVES, PRINTED, SETTINGS, Cell
from reproduction.claims import named_table
from reproduction.render import as_markdown
from reproduction.store import Results, committed_lines
from test_docs import FENCE, PROSE, ROOT, table, tables

RESULTS = Results.read(Path("no-lines-of-ones-own.jsonl"))
FINDINGS = (ROOT / "reproduction" / "FINDINGS.md").read_text(encoding="utf-8")
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


def as_share(cell: str) -> str:
    """A percentage of two digits as a share of four; anything else as it is."""
    return f"{float(cell[:-2]) / 100:.4f}" if re.fullmatch(r"\d+\.\d\d %", cell) else cell


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
    for name, line in sorted(RESULTS.committed.items()):
        for score in () if line.failed else SCORES:
            if getattr(line, score) is not None:
                by_seed.setdefault((re.sub("seed.@", "", name), score), []).append(getattr(line, score))
    known = [mean(values[:count]) for values in by_seed.values() for count in range(1, len(values) + 1)]
    for line in committed_lines():  # also of cells that were run again
        known += [getattr(line, score) for score in SCORES if getattr(line, score) is not None]
    for path in (ROOT / "results" / "gpu").glob("*.jsonl"):
        known += scores_in([json.loads(text) for text in path.read_text("utf-8").splitlines()])
    for name, line in RESULTS.committed.items():  # NIID-Bench's figures are read off after ten rounds
        known += [line.accuracies[9]] if "/niid-bench" in name and not line.failed else []
    known += [printed.value for printed in PRINTED.values()] + [value for curve in CURVES.values() for value in curve]
    return set().union(*map(four_digits, known))


@pytest.mark.parametrize("page", ["README.md", "docs/reproduction.md", "docs/faq.md", "FINDINGS"])
def test_every_accuracy_of_four_digits_is_a_committed_or_a_printed_one(page: str) -> None:
    known = committed_accuracies() | NO_ACCURACY.keys()
    prose = FENCE.sub("", FINDINGS) if page == "FINDINGS" else PROSE[page]
    if page == "README.md":
        prose = re.sub(r"\d+\.\d\d %", lambda found: as_share(found[0]), prose)
    written = re.findall(r"(?<![\d.+-])[01]\.\d{4}(?!\d)", prose)
    assert written and [number for number in written if number not in known] == []


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
    cells = [Cell("simple-cnn", split, setting, method, seed, "full") for seed in range(3)]
    found = [RESULTS.find(cell) for cell in cells]
    if found[0].state == "failed":
        return re.sub(r".*, (round \d+),.*", r"not finite in \1", found[0].failed)
    shown = [f"{line.accuracy:.4f}" if line.usable else "-" for line in found]
    while shown[-1:] == ["-"]:
        shown.pop()
    return ", ".join(shown) or "not run"


def test_the_page_has_niid_benchs_table_as_it_was_published_and_as_it_is_here() -> None:
    indented = re.sub(r"^ +\|", "|", FINDINGS, flags=re.MULTILINE)
    fedavg, others = [{name: cells for name, *cells in rows} for head, rows in tables(indented) if head[0] == "split"]
    assert fedavg == {
        name: [published(split, "fedavg"), here(split, "fedavg"), here(split, "fedavg", "niid-bench-standard")]
        for name, split in SPLITS.items()
    }
    assert others == {
        name: [f"{here(split, method)} ({published(split, method)})" for method in SETTINGS["groups"]["bench"][1:]]
        for name, split in SPLITS.items()
    }


def test_the_readme_gives_the_papers_numbers_as_printed_and_its_own_as_committed() -> None:
    rows = {row[0]: [as_share(cell) for cell in row[1:]] for row in table("README.md", "About the paper")}
    committed = {name: f"{line.accuracy:.4f}" for name, line in RESULTS.committed.items() if not line.failed}
    skews = {"label skew": "label", "feature skew": "feature-0.5", "quantity skew": "quantity"}
    methods = {"FedAvg": "fedavg", "FedAvg + FNR": "fedavg+fnr"}
    control = f"{next(iter(skews))}: FNR with weight 0"
    assert rows.keys() == {f"{skew}: {method}" for skew in skews for method in methods} | {control}
    assert rows[control] == ["", "", committed["resnet18/label/honest/fedavg+weight-0/seed0@full"]]
    for (skew_name, skew), (method_name, method) in itertools.product(skews.items(), methods.items()):
        cells = [f"resnet18/{skew}/{protocol}/{method}/seed0@full" for protocol in ("paper", "honest")]
        printed = f"{PRINTED['accuracy', 'resnet18', skew, method].value:.4f}"
        assert rows[f"{skew_name}: {method_name}"] == [printed, *(committed.get(cell, "not run") for cell in cells)]


def test_generated_pages_are_what_the_committed_results_give() -> None:
    claims = (ROOT / "reproduction" / "results" / "claims.md").read_text(encoding="utf-8")
    assert claims.endswith(as_markdown(named_table("claims", RESULTS, "quick"))), "write results/claims.md again"
    missing = (ROOT / "reproduction" / "README.md").read_text(encoding="utf-8").partition("```text\n")[2]
    assert missing == "\n".join(missing_lines(RESULTS)) + "\n```\n", "write the list in reproduction/README.md again"


def test_what_we_found_has_the_numbers_of_the_tables() -> None:
    skews = {"label": "label", "feature noise 0.5": "feature-0.5", "quantity": "quantity"}
    methods = {"FedAvg": "fedavg", "FNR": "fedavg+fnr", "FNR, weight 0": "fedavg+weight-0"}
    ((_, rows),) = tables(PROSE["docs/reproduction.md"])
    shown = {name: named_table(name, RESULTS, "quick") for name in ("accuracy", "controls")}
    assert len(rows) == 7
    for skew, method, *numbers in rows:
        name = "controls" if "weight" in method else "accuracy"
        part = next(part for part in shown[name].parts if part.key == ("resnet18", skews[skew], "accuracy"))
        values = [part.value(methods[method], column) for column in ("printed", "paper", "honest")]
        assert numbers == [f"{one.number.mean:.4f}" if one and one.number else "" for one in values]


@pytest.mark.parametrize("number", range(3))
def test_programs_in_the_findings_run(number: int, tmp_path: Path) -> None:
    programs = [body for info, body in FENCE.findall(FINDINGS) if info == "python runnable"]
    assert len(programs) == 3
    (tmp_path / "program.py").write_text(programs[number], encoding="utf-8")
    runpy.run_path(str(tmp_path / "program.py"))
