"""The paper's claims: numbers from made lines equal direct computations, and the verdict is the rule's."""

from __future__ import annotations

import functools
import json
import random
import statistics as plain
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fnrfl import cli
from fnrfl.results.reproduce import claim_measures as of
from fnrfl.results.reproduce.carrying import carry_out
from fnrfl.results.reproduce.cell_lines import watch_words
from fnrfl.results.reproduce.claims import CLAIM_SEEDS, CLAIMS, HEADLINE_GAIN, HEADLINE_TIME, ClaimRow, find_claim_cells
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.paper_tables import TABLES
from fnrfl.results.reproduce.shown import ShownTable, ShownValue
from fnrfl.results.reproduce.verdicts import VERDICT_HEAD, Verdict, claims_page, find_cells, judge, show_claims, sum_up
from fnrfl.results.reproduce.wording import as_json, as_text
from fnrfl.results.statistics import Estimate, estimate, rank_correlation

ROOT = Path(__file__).parent.parent
BY_NAME = {claim.name: claim for claim in CLAIMS}
NOTHING = KeptLines([], [])
WATCHING = (
    of.rare_classes, of.rare_classes_by_penalty, of.gap_and_angle, of.closer_updates, of.closer_updates_by_penalty,
    of.smaller_gaps, of.smaller_gaps_by_penalty,
)  # fmt: skip


def made_line(cell: PaperCell, **more: Any) -> CellLine:
    """What a finished cell leaves, with numbers from its id."""
    draw = random.Random(cell.id)
    accuracies = sorted(draw.uniform(0.1, 0.95) for _ in range(10))
    pairs = {f"{what}_{when}": [draw.uniform(0.1, 0.9) for _ in range(45)] for what in ("cosines", "gaps")
             for when in ("before", "after")}  # fmt: skip
    classes = {f"accuracy_{when}": [[draw.random() for _ in range(10)] for _ in range(5)] for when in
               ("before", "after")}  # fmt: skip
    told = pairs | classes | {"counts": [[draw.randrange(600) for _ in range(10)] for _ in range(5)]}
    return {
        "id": cell.id, "recipe": cell.recipe, "overrides": list(cell.overrides), "leaks": list(cell.leaks),
        "date": "2026-11-16", "device": "a device", "engine": {"name": "gpu", "precision": "bf16"},
        "accuracy": accuracies[-1], "accuracies": accuracies, "seconds_train": draw.uniform(10, 20),
        "seconds_of_rounds": [draw.uniform(1, 2) for _ in range(10)], "bytes_up": draw.randrange(10**6, 10**7),
        "bytes_down": 0, "notes": {"watched": [[told]] * 2},
    } | more  # fmt: skip


@functools.cache
def everything() -> KeptLines:
    """A line for every cell that some claim needs."""
    return KeptLines([made_line(cell) for cell in find_claim_cells("quick")], [])


@functools.cache
def whole() -> ShownTable:
    return show_claims(everything(), "quick")


def shown(table: ShownTable, name: str, row: int, head: str) -> ShownValue:
    """A value of a claim's part."""
    part = next(part for part in table.parts if part.title.startswith(f"{name}:"))
    return next(column for column in part.columns if column.head.startswith(head)).values[row]


def accuracy(skew: str, method: str, seed: int, net: str = "resnet18") -> float:
    line = everything().find(PaperCell(net, skew, "honest", method, seed, "quick")).line
    return float(line["accuracy"])


# -- what was printed -------------------------------------------------------------------------------------------------


def test_the_numbers_of_the_abstract_are_those_of_feature_skew() -> None:
    gains = [row.printed_number for row in BY_NAME["accuracy-fedavg"].rows]
    assert len(gains) == 6 and max(gains) == gains[0] == BY_NAME["headline-accuracy"].rows[0].printed_number
    assert round(gains[0], 4) == HEADLINE_GAIN == round(0.9976 / 0.6001 - 1, 4)
    saved = [row.printed_number for row in BY_NAME["time"].rows]
    assert round(saved[0], 4) == HEADLINE_TIME and saved[1] < 0 < saved[0] < saved[2]


def test_printed_numbers_contradict_two_printed_sentences() -> None:
    """A smaller loss by noise everywhere, and a kappa that is best under label skew with the other FedAvg."""
    declines = [row.printed_number for row in BY_NAME["noise"].rows]
    assert [value > 0 for value in declines] == [True, True, False, True]  # MOON loses 0.0155, FNR 0.0215
    label = BY_NAME["kappa-rho"].rows[1].printed_number
    assert 0 < label < 0.001 < 0.8850 / 0.8393 - 1  # 0.8850 is printed for the same run elsewhere


def test_what_is_not_printed_is_not_shown() -> None:
    for name in ("penalty", "hypothesis", "closer-updates"):
        assert all(row.printed_number is None for row in BY_NAME[name].rows)
    assert [row.printed_number is None for row in BY_NAME["plug-and-play"].rows] == [False] * 5


# -- numbers from lines -----------------------------------------------------------------------------------------------


def test_gains_and_margins_are_paired_by_seed() -> None:
    for place, skew in enumerate(("feature-0.5", "label", "quantity")):
        gains = [accuracy(skew, "fedavg+fnr", s) / accuracy(skew, "fedavg", s) - 1 for s in range(3)]
        assert shown(whole(), "accuracy-fedavg", place, "honest").mean == pytest.approx(plain.fmean(gains))
        assert shown(whole(), "accuracy-fedavg", place, "honest").sd == pytest.approx(plain.stdev(gains))
        over = [accuracy(skew, "fedavg+fnr", s) - accuracy(skew, "fedavg+weight-0", s) for s in range(3)]
        assert shown(whole(), "penalty", place, "honest").mean == pytest.approx(plain.fmean(over))


def test_every_interval_is_that_of_the_seeds_numbers() -> None:
    for claim in CLAIMS:
        for place, row in enumerate(claim.rows):
            numbers = []
            for seed in CLAIM_SEEDS["honest"]:
                lines = [everything().find(cell).line for cell in row.cells("honest", seed, "quick")]
                numbers.append(row.measure(*lines))
            expected, value = estimate(numbers), shown(whole(), claim.name, place, "verdict")
            assert (value.mean, value.low, value.high) == (expected.mean, expected.low, expected.high)
            outcome = judge(expected, row.bound, smaller=row.smaller).outcome
            assert value.words.startswith(f"{outcome}: ")


def test_noise_is_a_difference_of_losses_and_plug_and_play_a_mean_of_differences() -> None:
    five = ("fedavg", "fedprox", "scaffold", "moon", "fednova")

    def lost(method: str, seed: int) -> float:
        return accuracy("label", method, seed) - accuracy("label+feature-0.5", method, seed)

    least = [min(lost(method, s) for method in five) - lost("fedavg+fnr", s) for s in range(3)]
    assert shown(whole(), "noise", 3, "honest").mean == pytest.approx(plain.fmean(least))
    around = [
        accuracy(skew, "moon+fnr", s) - accuracy(skew, "moon", s)
        for s in range(3)
        for skew in ("feature-0.5", "label", "quantity")
    ]
    assert shown(whole(), "plug-and-play", 3, "honest").mean == pytest.approx(plain.fmean(around))


def test_kappa_and_rho_are_compared_with_the_best_of_the_others() -> None:
    engine = {"name": "gpu", "precision": "bf16"}
    lines: list[CellLine] = [
        {"accuracy": a, "seconds_train": s, "bytes_up": b, "bytes_down": b, "device": "", "engine": engine}
        for a, s, b in ((0.9, 10.0, 4), (0.8, 5.0, 8), (0.4, 8.0, 1))
    ]  # fmt: skip
    assert of.best_kappa(*lines) == pytest.approx(0.09 / 0.16 - 1)
    assert of.best_rho(*lines) == pytest.approx((0.9 / 8) / (0.4 / 2) - 1)
    assert of.time_saved(*lines[:2]) == pytest.approx(-1)
    lines[1]["device"] = "another"
    assert of.time_saved(*lines[:2]) is None and of.best_rho(*lines) is not None
    assert of.best_kappa(*lines) == 0.0  # ahead of the one that can be compared, which proves nothing
    lines[2]["accuracy"] = 0.8
    assert of.best_kappa(*lines) == pytest.approx(0.09 / 0.1 - 1)  # behind it, so not the best
    lines[2]["date"] = "another day"
    assert of.best_kappa(*lines) is None
    del lines[2]["date"]
    lines[2]["no_measure"] = "a power cut"
    assert of.best_kappa(*lines) is None
    lines[2] |= {"no_measure": "", "accuracy": 0.0}
    assert of.best_kappa(*lines) is None  # nothing to be ahead of


def test_convergence_counts_what_it_takes_to_the_target() -> None:
    cell = PaperCell("resnet18", "label", "honest", "fedavg", 0, "quick")
    fedavg = made_line(cell, accuracies=[0.1, 0.3, 0.6, 0.8], seconds_of_rounds=[1.0] * 4, bytes_up=40)
    fnr = made_line(cell, accuracies=[0.2, 0.73, 0.5, 0.5], seconds_of_rounds=[3.0] * 4, bytes_up=80)
    assert of.rounds_saved(fnr, fedavg) == pytest.approx(1 - 2 / 4)  # the target is 0.72
    assert of.seconds_saved(fnr, fedavg) == pytest.approx(1 - 6 / 4)
    assert of.bytes_saved(fnr, fedavg) == pytest.approx(1 - 40 / 40)
    never = fnr | {"accuracies": [0.2] * 4}
    assert of.rounds_saved(never, fedavg) == pytest.approx(1 - 5 / 4)
    assert of.seconds_saved(never, fedavg) == pytest.approx(1 - 15 / 4)
    assert of.bytes_saved(never, fedavg) == pytest.approx(1 - 100 / 40)
    assert of.seconds_saved(fnr, fedavg | {"seconds_of_rounds": [0.0] * 4}) is None


def test_what_is_watched_is_averaged_over_rounds_and_clients() -> None:
    line = made_line(PaperCell("resnet18", "label", "honest", "fedavg+fnr", 0, "quick"))
    other = made_line(PaperCell("resnet18", "label", "honest", "fedavg+weight-0", 0, "quick"))
    ((told,), _), ((control,), _) = line["notes"]["watched"], other["notes"]["watched"]
    gains = [[b - a for a, b in zip(*rows, strict=True)] for rows in
             zip(told["accuracy_before"], told["accuracy_after"], strict=True)]  # fmt: skip
    each = [rank_correlation(counts, gain) for counts, gain in zip(told["counts"], gains, strict=True)]
    assert of.rare_classes(line) == pytest.approx(plain.fmean(each))
    by_penalty = plain.fmean(each) - (of.rare_classes(other) or 9)
    assert of.rare_classes_by_penalty(line, other) == pytest.approx(by_penalty) and by_penalty
    angles = [1 - cosine for cosine in told["cosines_before"]]
    assert of.gap_and_angle(line) == pytest.approx(rank_correlation(told["gaps_before"], angles))
    closer = plain.fmean(told["cosines_after"]) - plain.fmean(told["cosines_before"])
    assert of.closer_updates(line) == pytest.approx(closer)
    without = plain.fmean(control["cosines_after"]) - plain.fmean(control["cosines_before"])
    assert of.closer_updates_by_penalty(line, other) == pytest.approx(closer - without)
    smaller = 1 - plain.fmean(told["gaps_after"]) / plain.fmean(told["gaps_before"])
    assert of.smaller_gaps(line) == pytest.approx(smaller)
    assert of.smaller_gaps_by_penalty(line, line) == 0


def test_an_update_of_nothing_and_a_class_without_examples_are_left_out() -> None:
    line = made_line(PaperCell("resnet18", "label", "honest", "fedavg+fnr", 0, "quick"))
    ((told,), _) = line["notes"]["watched"]
    full = [of.rare_classes(line), of.gap_and_angle(line), of.closer_updates(line)]
    told["cosines_before"][3] = told["cosines_after"][3] = told["accuracy_before"][0][2] = None
    assert all(a != b for a, b in zip(full, (of.rare_classes(line), of.gap_and_angle(line), of.closer_updates(line)),
                                      strict=True))  # fmt: skip
    bare = line | {"notes": {}}
    assert all(measure(*[bare] * (1 + ("penalty" in measure.__name__))) is None for measure in WATCHING)


def test_rank_correlation_is_that_of_ranks() -> None:
    draw = random.Random(0)
    for _ in range(50):
        a, b = ([draw.randrange(6) for _ in range(9)] for _ in range(2))
        if len({*a}) == 1 or len({*b}) == 1:
            continue
        ranked = [[1 + sum(x < y for x in v) + (v.count(y) - 1) / 2 for y in v] for v in (a, b)]
        assert rank_correlation(a, b) == pytest.approx(plain.correlation(*ranked))
    assert rank_correlation([1, 2, 3], [1, 10, 100]) == 1 and rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is rank_correlation([], []) is None


# -- the verdict ------------------------------------------------------------------------------------------------------


def interval(low: float | None, high: float | None, n: int = 3) -> Estimate:
    return Estimate(n, 0.0, 0.1, low, high)


@pytest.mark.parametrize(
    ("low", "high", "larger", "smaller"),
    [
        (0.6, 0.8, "holds", "does not hold"),
        (0.2, 0.4, "does not hold", "holds"),
        (0.4, 0.6, "cannot be told", "cannot be told"),
        (0.5, 0.6, "cannot be told", "cannot be told"),  # the bound itself is not beyond it
        (0.4, 0.5, "cannot be told", "cannot be told"),
    ],
)
def test_a_verdict_is_about_the_whole_interval(low: float, high: float, larger: str, smaller: str) -> None:
    assert judge(interval(low, high), 0.5).outcome == larger
    assert judge(interval(low, high), 0.5, smaller=True).outcome == smaller


def test_without_an_interval_nothing_is_told() -> None:
    assert judge(None) == Verdict("not run", "")
    assert judge(estimate([5.0])) == Verdict("cannot be told", "one seed")
    assert judge(estimate([5.0, 5.0, 5.0])) == Verdict("cannot be told", "every seed has the same value")


@pytest.mark.parametrize(("scale", "about_the_paper"), [("tiny", False), ("quick", True), ("full", True)])
def test_a_verdict_on_digits_says_that_it_is_not_about_the_paper(scale: str, about_the_paper: bool) -> None:
    heads = {part.columns[-1].head for part in show_claims(KeptLines([], []), scale).parts}
    assert len(heads) == 1 and ("not about the paper" in heads.pop()) != about_the_paper


def test_a_claim_holds_if_all_its_rows_do() -> None:
    holds, fails, open_, none = (
        Verdict(word, "")
        for word in ("holds", "does not hold", "cannot be told", "not run")  # type: ignore[arg-type]
    )
    for verdicts, summed in (
        ([holds, holds], holds), ([holds, open_], open_), ([holds, none], open_), ([holds, fails], fails),
        ([fails, none], fails), ([none, none], none),
    ):  # fmt: skip
        assert sum_up(verdicts) == sum_up(verdicts[::-1]) == summed.outcome


# -- the table --------------------------------------------------------------------------------------------------------


def test_every_claim_has_a_verdict_and_an_interval_when_all_has_run() -> None:
    overview = whole().parts[0]
    assert len(overview.rows) == len(CLAIMS) == len(whole().parts) - 1
    assert all("told" in value.words or "hold" in value.words for value in overview.columns[-1].values)
    for part in whole().parts[1:]:
        for value in part.columns[-1].values:
            assert value.low is not None and value.high is not None and value.low < value.high
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def test_protocols_have_columns_of_their_own_and_every_leak_is_marked() -> None:
    for part in whole().parts:
        by_head = {column.head: column for column in part.columns}
        assert {column.protocol for column in part.columns} <= {"printed", "paper", "honest"}
        for value in by_head["paper's protocol (leak)"].values:
            assert value.leaks and value.words[0] in "+-"
        for head, column in by_head.items():
            assert ("leak" in head) == (column.protocol == "paper")
            assert column.protocol == "paper" or not any(value.leaks for value in column.values)
    text = as_text(whole())
    assert text.count(" leak [") == sum(len(part.rows) for part in whole().parts[1:])
    assert text.partition("headline-accuracy: 66.24 % more accuracy than FedAvg (abstract)")[0].count(" leak ") == len(
        CLAIMS
    )
    tree = json.loads(as_json([whole()]))
    assert tree["tables"]["claims"]["leaks"] == list(whole().leaks) and whole().leaks


def test_the_overview_has_the_smallest_and_the_largest_value() -> None:
    def overview(table: ShownTable, name: str, head: str) -> ShownValue:
        row = [text.startswith(f"{name}:") for text in table.parts[0].rows].index(True)
        return next(column for column in table.parts[0].columns if column.head.startswith(head)).values[row]

    assert overview(whole(), "accuracy-fedavg", "printed").words == "+8.10% to +66.24%"
    assert overview(whole(), "plug-and-play", "printed").words == "+0.1931 to +0.3201"
    assert overview(whole(), "convergence", "printed").words == "+50.0% (1 of 9 rows)"
    means = [shown(whole(), "penalty", row, "honest").mean or 0.0 for row in range(4)]
    assert overview(whole(), "penalty", "honest").words == f"{min(means):+.4f} to {max(means):+.4f}"
    assert overview(show_claims(NOTHING, "quick"), "penalty", "honest").words == "not run"
    one = overview(whole(), "headline-time", "honest")
    assert one.words == shown(whole(), "headline-time", 0, "honest").words


def test_missing_cells_are_named_and_make_no_verdict() -> None:
    for part in show_claims(NOTHING, "quick").parts[1:]:
        assert {value.words for value in part.columns[-1].values} == {"not run"}
    left = [line for line in everything() if "fedprox/seed1@" not in line["id"] and "moon/" not in line["id"]]
    table = show_claims(KeptLines(left, []), "quick")
    assert "seeds 0, 1, 2 of 3" not in as_text(table)
    assert shown(table, "plug-and-play", 1, "honest").words.endswith("(seeds 0, 2 of 3)")
    moon = shown(table, "mixed", 0, "honest")
    assert moon.words == "not run"
    needed = "resnet18/label+feature-0.1/honest/{moon,fedprox}/seed{0,1,2}@quick"
    assert sorted(needed) == sorted(moon.sources[0].removeprefix("needs cells: "))
    assert set(moon.cells) == {
        cell.id for seed in range(3) for cell in BY_NAME["mixed"].rows[0].cells("honest", seed, "quick")
    }


def test_a_run_that_failed_is_named_with_its_reason() -> None:
    cell = PaperCell("resnet18", "label", "honest", "moon", 2, "quick")
    lines = [line | ({"failed": "It diverged."} if line["id"] == cell.id else {}) for line in everything()]
    table = show_claims(KeptLines(lines, []), "quick")
    assert shown(table, "kappa-rho", 1, "honest").words.endswith("(seeds 0, 1 of 3)")
    only = [line for line in lines if "/label/" not in line["id"] or "/seed2@" in line["id"]]
    value = shown(show_claims(KeptLines(only, []), "quick"), "kappa-rho", 1, "honest")
    assert value.words == "failed" and f"{cell.id} failed: It diverged." in value.sources


def test_one_seed_cannot_tell_and_says_so() -> None:
    table = show_claims(everything(), "quick", [1])
    for part in table.parts[1:]:
        assert {value.words for value in part.columns[-1].values} == {"cannot be told: one seed"}
        assert all(value.seeds == (1,) for column in part.columns if column.head.startswith("honest")
                   for value in column.values)  # fmt: skip


def test_seconds_of_two_devices_and_runs_without_watch_are_said_to_lack_the_number() -> None:
    def changed(line: CellLine) -> CellLine:
        return line | {"notes": {}} | ({"device": "b"} if "/fedavg/" in line["id"] else {})

    table = show_claims(KeptLines(map(changed, everything()), []), "quick")
    for name in ("time", "hypothesis", "rare-classes"):
        assert shown(table, name, 0, "honest").words == "-"
        assert shown(table, name, 0, "verdict").words == "cannot be told: not measured"
    assert shown(table, "accuracy-fedavg", 0, "verdict") == shown(whole(), "accuracy-fedavg", 0, "verdict")


# -- runs -------------------------------------------------------------------------------------------------------------


def test_no_claim_is_about_seconds_beside_other_processes() -> None:
    beside = show_claims(KeptLines([line | {"processes": 3} for line in everything().committed.values()], []), "quick")
    lost = set()
    for before, after in zip(whole().parts[1:], beside.parts[1:], strict=True):  # the first is the overview
        for old, new in zip(before.columns, after.columns, strict=True):
            for row, mine, others in zip(before.rows, old.values, new.values, strict=True):
                if mine.words != others.words:
                    is_verdict = old.head == VERDICT_HEAD
                    assert others.words == ("cannot be told: not measured" if is_verdict else "-")
                    assert is_verdict or "the seconds of these cells are no measure: resnet18/" in others.sources[0]
                    lost.add((before.title.partition(":")[0], row.partition(",")[0]))
    assert {name for name, _ in lost} == {"headline-time", "time", "convergence", "kappa-rho"}
    assert {row for name, row in lost if name == "convergence"} == {"seconds"}
    assert {row for name, row in lost if name == "kappa-rho"} == {"kappa"}


def test_cells_of_claims_exist_and_those_that_need_it_are_watched() -> None:
    shown_elsewhere = {cell for table in TABLES.values() for cell in table.cells("tiny")}
    for cell in (cell for cell in find_claim_cells("tiny") if cell not in shown_elsewhere or watch_words(cell)):
        config = cell.config(watch_words(cell))
        assert (config.fnr is not None) >= bool(watch_words(cell)) and config.leaks_on == cell.leaks
    rows: list[ClaimRow] = [row for claim in CLAIMS for row in claim.rows if row.measure in WATCHING]
    assert len(rows) == 21
    for row in rows:
        for setting in CLAIM_SEEDS:
            assert all(watch_words(cell) for cell in row.cells(setting, 0, "quick"))


@pytest.mark.slow
def test_a_watched_cell_has_the_model_of_its_command_and_carries_what_claims_need(tmp_path: Path) -> None:
    from fnrfl.runs.run import run

    cell = PaperCell("resnet18", "label", "honest", "fedavg+fnr", 0, "tiny")
    (line,) = carry_out([cell], tmp_path / "lines.jsonl", lines=NOTHING)
    assert run(cell.config(), out=None).model_sha256 == line["model_sha256"]
    events = run(cell.config(watch_words(cell)), out=None).rounds
    found: dict[Callable[..., float | None], list[float]] = {of.gap_and_angle: [], of.closer_updates: []}
    for event in events:
        (told,) = event["watched"]
        norms = event["norms"]
        gaps = [sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5 for pair in combinations(norms, 2)]
        assert told["gaps_before"] == pytest.approx(gaps, rel=1e-4)
        found[of.gap_and_angle].append(rank_correlation(gaps, [-cosine for cosine in told["cosines_before"]]) or 0)
        found[of.closer_updates].append(plain.fmean(told["cosines_after"]) - plain.fmean(told["cosines_before"]))
    for measure, values in found.items():
        assert measure(line) == pytest.approx(plain.fmean(values), abs=1e-3)
    assert -1 <= (of.rare_classes(line) or 9) <= 1


# -- the command and the page -----------------------------------------------------------------------------------------


def typed(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["reproduce", *words])


def test_the_command_prints_text_markdown_and_json(tmp_path: Path) -> None:
    out = str(tmp_path / "none.jsonl")
    assert "All claims" in typed("claims", "--out", out).stdout
    assert typed("claims", "--markdown", "--out", out).stdout.startswith("# The claims of the paper")
    tree = json.loads(typed("claims", "--json", "--out", out, "--scale", "full").stdout)
    assert tree["tables"]["claims"]["scale"] == "full"
    assert "claims" in typed("list").stdout


def test_claims_are_a_name_for_their_cells() -> None:
    assert find_cells("claims", "quick", [0]) == find_claim_cells("quick", [0])
    refused = typed("run", "claim")
    assert refused.exit_code == 2 and "claims" in refused.output


def test_the_page_is_what_the_command_prints_from_committed_results() -> None:
    page = claims_page(show_claims(KeptLines.read(Path("none.jsonl")), "quick"))
    written = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert written == page, "write it again: fnrfl reproduce claims --markdown --out none.jsonl > docs/claims.md"


def test_a_value_names_the_seeds_that_it_has() -> None:
    """Under the paper's protocol seeds count that nobody asked for."""
    place, (row, *_) = next((c.name, c.rows) for c in CLAIMS if c.name == "penalty")
    cells = [cell for seed in (1, 2) for cell in row.cells("paper", seed, "quick")]
    value = shown(show_claims(KeptLines([made_line(cell) for cell in cells], []), "quick"), place, 0, "paper")
    assert value.seeds == (1, 2) and value.missing == (0,) and value.words.endswith("(seeds 1, 2 of 3)")
    assert {cell.id for cell in cells} < {*value.cells}
