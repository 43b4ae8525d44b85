"""Text is never data: every label, title and sentence of the page can be changed, and nothing else changes with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fnrfl.results.report import charts, page, pairs, privacy_table, report, sentences, tables
from fnrfl.runs.quality import TEST_METRICS
from test_report import fake_run, leaky

MARK = "§"
TABLES = (sentences.TEXTS, sentences.LEAKS, pairs.VERDICTS, privacy_table.SAYS, page.PAGE_SECTIONS)


def mark_all(patch: pytest.MonkeyPatch) -> None:
    """Append a mark to every text that the page shows, in tables, columns, templates and phases."""
    for table in TABLES:
        for key, text in table.items():
            patch.setitem(table, key, text + MARK)
    for phase, (label, tone) in charts.PHASES.items():
        patch.setitem(charts.PHASES, phase, (label + MARK, tone))
    for metric in TEST_METRICS.values():
        patch.setitem(vars(metric), "meaning", metric.meaning + MARK)
    for message in privacy_table.MESSAGES:
        for name in ("what", "says"):
            patch.setitem(vars(message), name, getattr(message, name) + MARK)
    known = [tables.METHOD_COLUMN, *privacy_table.LEARNED_COLUMNS, *(column for column, _, _ in tables.COSTS)]
    for column in known:
        patch.setitem(vars(column), "name", column.name + MARK)
    made, part = tables.Column.__init__, page._part

    def marked(self: tables.Column, name: str, *more: Any, **named: Any) -> None:
        made(self, name + MARK, *more, **named)

    def marked_part(name: str) -> str:
        text = part(name)
        words = re.compile(r"(?<=[>}])([^<>{}]*[a-z][^<>{}]*)(?=<)")
        return words.sub(rf"\1{MARK}", text) if name.endswith(".html") else text

    patch.setattr(tables.Column, "__init__", marked)
    patch.setattr(page, "_part", marked_part)


@pytest.mark.parametrize("leak", [False, True])
def test_a_mark_on_every_text_changes_nothing_else(tmp_path: Path, leak: bool) -> None:
    make = leaky if leak else fake_run
    for algorithm in ("fedavg", "scaffold"):
        for fnr in ("off", "on"):
            for seed in range(2):
                make(tmp_path / "runs" / f"{algorithm}-{fnr}-{seed}", algorithm=algorithm, fnr=fnr, seed=seed)
    plain = report([tmp_path / "runs"], tmp_path / "page.html", plots=False).read_text()
    with pytest.MonkeyPatch.context() as patch:
        mark_all(patch)
        marked = report([tmp_path / "runs"], tmp_path / "page.html", plots=False).read_text()
    assert marked.count(MARK) > 150 and MARK not in plain.replace("\\u00a7", MARK)
    assert marked.replace("\\u00a7", "").replace(MARK, "") == plain
