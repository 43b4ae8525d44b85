"""The claims: their numbers are those of their runs, and verdicts follow from intervals alone."""

from __future__ import annotations

import functools
import statistics as plain
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fnrfl.results.statistics import Estimate, estimate, rank_correlation
from paper_lines import NOTHING, line_of
from reproduction import measures as of
from reproduction.catalogue import SEEDS, Cell
from reproduction.claims import CLAIMS, Verdict, judge, named_cells, named_table, rows_of, sum_up
from reproduction.render import as_text, value_words
from reproduction.store import Line, Results, read_lines
from reproduction.tables import Table, Value

WATCHING = {"rare_classes", "gap_and_angle", "closer_updates", "smaller_gaps"}
SINGLE = ("feature-0.5", "label", "quantity")
FNR = Cell("resnet18", "label", "honest", "fedavg+fnr", 0, "quick")


@functools.cache
def everything() -> Results:
    """A line for every cell that some claim needs."""
    return Results([line_of(cell) for cell in named_cells("claims", "quick")])


def claims(results: Results, seeds: list[int] | None = None) -> Table:
    return named_table("claims", results, "quick", seeds)


@functools.cache
def whole() -> Table:
    return claims(everything())


def shown(table: Table, claim: str, row: int | str, column: str) -> Value:
    """A value of a claim's part."""
    part = next(part for part in table.parts if part.key == (claim,))
    value = part.value(str(row), column)
    assert value is not None
    return value


def mean(claim: str, row: int) -> float:
    number = shown(whole(), claim, row, "honest").number
    assert number is not None
    return number.mean


def accuracy(skew: str, method: str, seed: int) -> float:
    return everything().find(Cell("resnet18", skew, "honest", method, seed, "quick")).accuracy


def printed(claim: str) -> list[float]:
    return [row.printed_number or 0 for row in rows_of(claim)]


def test_the_numbers_of_the_abstract_are_those_of_feature_skew() -> None:
    gains, saved = printed("accuracy-fedavg"), printed("time")
    (headline,), (time,) = rows_of("headline-accuracy"), rows_of("headline-time")
    assert len(gains) == 6 and max(gains) == gains[0] == headline.printed_number
    assert round(gains[0], 4) == headline.bound == round(0.9976 / 0.6001 - 1, 4)
    assert round(saved[0], 4) == time.bound and saved[1] < 0 < saved[0] < saved[2]


def test_printed_numbers_contradict_two_printed_sentences() -> None:
    """A smaller loss by noise everywhere, and a kappa that is best under label skew with the other FedAvg."""
    assert [value > 0 for value in printed("noise")] == [True, True, False, True]  # MOON loses 0.0155, FNR 0.0215
    assert 0 < printed("kappa-rho")[1] < 0.001 < 0.8850 / 0.8393 - 1  # 0.8850 is printed for the same run elsewhere
    assert not any(printed("penalty") + printed("hypothesis") + printed("closer-updates"))
    assert all(printed("plug-and-play"))


def test_differences_are_paired_by_seed() -> None:
    def lost(method: str, seed: int) -> float:
        return accuracy("label", method, seed) - accuracy("label+feature-0.5", method, seed)

    for place, skew in enumerate(SINGLE):
        gains = [accuracy(skew, "fedavg+fnr", s) / accuracy(skew, "fedavg", s) - 1 for s in range(3)]
        assert mean("accuracy-fedavg", place) == pytest.approx(plain.fmean(gains))
        over = [accuracy(skew, "fedavg+fnr", s) - accuracy(skew, "fedavg+weight-0", s) for s in range(3)]
        assert mean("penalty", place) == pytest.approx(plain.fmean(over))
    five = ("fedavg", "fedprox", "scaffold", "moon", "fednova")
    least = [min(lost(method, s) for method in five) - lost("fedavg+fnr", s) for s in range(3)]
    assert mean("noise", 3) == pytest.approx(plain.fmean(least))
    around = [accuracy(skew, "moon+fnr", s) - accuracy(skew, "moon", s) for s in range(3) for skew in SINGLE]
    assert mean("plug-and-play", 3) == pytest.approx(plain.fmean(around))


def test_every_interval_is_that_of_the_seeds_numbers() -> None:
    for claim in CLAIMS:
        for place, row in enumerate(rows_of(claim)):
            cells = [row.cells("honest", seed, "quick") for seed in SEEDS["honest"]]
            numbers = [row.number(*map(everything().find, each)) for each in cells]
            expected = estimate([number for number in numbers if number is not None])
            assert shown(whole(), claim, place, "verdict").number == expected and expected.n == 3


def test_kappa_and_rho_are_compared_with_the_best_of_the_others() -> None:
    a, b, c = (
        Line(accuracy=accuracy, seconds_train=seconds, bytes_up=sent, bytes_down=sent, date="1")
        for accuracy, seconds, sent in ((0.9, 10.0, 4), (0.8, 5.0, 8), (0.4, 8.0, 1))
    )
    assert of.best_kappa(a, b, c) == pytest.approx(0.09 / 0.16 - 1)
    assert of.best_rho(a, b, c) == pytest.approx((0.9 / 8) / (0.4 / 2) - 1)
    assert of.best_kappa(a, replace(b, processes=2), c) == 0.0  # ahead of the rest proves nothing
    assert of.best_kappa(a, b, replace(c, processes=2)) == pytest.approx(0.09 / 0.16 - 1)  # behind it, so not the best
    changes: list[dict[str, Any]] = [
        {"processes": 2}, {"date": "2"}, {"device": "another"}, {"no_measure": "a power cut"}, {"kept_rounds": 1},
    ]  # fmt: skip
    for change in changes:
        assert of.best_kappa(a, replace(b, **change), replace(c, **change)) is None
        assert of.time_saved(a, replace(b, **change)) is None


def test_convergence_counts_what_it_takes_to_the_target() -> None:
    fedavg = line_of(FNR, accuracies=[0.1, 0.3, 0.6, 0.8], seconds_of_rounds=[1.0] * 4, bytes_up=40)
    fnr = line_of(FNR, accuracies=[0.2, 0.73, 0.5, 0.5], seconds_of_rounds=[3.0] * 4, bytes_up=80)
    never = replace(fnr, accuracies=[0.2] * 4)  # the target is 0.72
    for line, rounds, seconds, sent in ((fnr, 2, 6, 40), (never, 5, 15, 100)):
        assert of.rounds_saved(line, fedavg) == pytest.approx(1 - rounds / 4)
        assert of.seconds_saved(line, fedavg) == pytest.approx(1 - seconds / 4)
        assert of.bytes_saved(line, fedavg) == pytest.approx(1 - sent / 40)
    assert of.seconds_saved(fnr, replace(fedavg, seconds_of_rounds=[0.0] * 4)) is None


def test_what_is_watched_is_averaged_over_rounds_and_clients() -> None:
    line, other = line_of(FNR), line_of(replace(FNR, method="fedavg+weight-0"))
    ((seen,), _), ((control,), _) = line.notes["watched"], other.notes["watched"]
    rows = zip(seen["accuracy_before"], seen["accuracy_after"], strict=True)
    gains = [[b - a for a, b in zip(*row, strict=True)] for row in rows]
    each = [rank_correlation(counts, gain) or 0 for counts, gain in zip(seen["counts"], gains, strict=True)]
    assert of.rare_classes(line) == pytest.approx(plain.fmean(each))
    (by_penalty,) = {row.number(line, other) for row in rows_of("rare-by-penalty")}
    assert by_penalty == pytest.approx(plain.fmean(each) - (of.rare_classes(other) or 9))
    angles = [1 - cosine for cosine in seen["cosines_before"]]
    assert of.gap_and_angle(line) == pytest.approx(rank_correlation(seen["gaps_before"], angles))
    closer, without = (plain.fmean(s["cosines_after"]) - plain.fmean(s["cosines_before"]) for s in (seen, control))
    assert of.closer_updates(line) == pytest.approx(closer)
    assert rows_of("closer-by-penalty")[0].number(line, other) == pytest.approx(closer - without)
    smaller = 1 - plain.fmean(seen["gaps_after"]) / plain.fmean(seen["gaps_before"])
    assert of.smaller_gaps(line) == pytest.approx(smaller)


def test_an_update_of_nothing_and_a_class_without_examples_are_left_out() -> None:
    def numbers(line: Line) -> list[float | None]:
        return [getattr(of, name)(line) for name in sorted(WATCHING - {"smaller_gaps"})]

    line = line_of(FNR)
    full, ((seen,), _) = numbers(line), line.notes["watched"]
    seen["cosines_before"][3] = seen["cosines_after"][3] = seen["accuracy_before"][0][2] = None
    assert all(a != b for a, b in zip(full, numbers(line), strict=True)) and None not in numbers(line)
    assert set(numbers(replace(line, notes={}))) == {None}


@pytest.mark.slow
def test_a_watched_cell_carries_what_claims_need(tmp_path: Path) -> None:
    from reproduction.running import run_cells

    assert run_cells([replace(FNR, scale="tiny")], tmp_path / "lines.jsonl", say=lambda line: None) == 0
    (line,) = read_lines(tmp_path / "lines.jsonl")
    assert all(-1 <= (getattr(of, name)(line) or 9) <= 1 for name in WATCHING)


@pytest.mark.parametrize(
    ("low", "high", "larger", "smaller"),
    [
        (0.6, 0.8, "holds", "fails"),
        (0.2, 0.4, "fails", "holds"),
        (0.4, 0.6, "open", "open"),
        (0.5, 0.6, "open", "open"),  # the bound itself is not beyond it
        (0.4, 0.5, "open", "open"),
    ],
)
def test_a_verdict_is_about_the_whole_interval(low: float, high: float, larger: str, smaller: str) -> None:
    found = Estimate(3, 0.0, 0.1, low, high)
    assert judge(found, 0.5).outcome == larger and judge(found, 0.5, smaller=True).outcome == smaller


def test_without_an_interval_nothing_is_told_and_a_claim_holds_if_all_its_rows_do() -> None:
    assert judge(None) == Verdict("not-run")
    assert judge(estimate([5.0])) == Verdict("open", "one-seed")
    assert judge(estimate([5.0, 5.0, 5.0])) == Verdict("open", "equal")
    for outcomes, summed in (
        ("holds holds", "holds"), ("holds open", "open"), ("holds not-run", "open"), ("holds fails", "fails"),
        ("fails not-run", "fails"), ("not-run not-run", "not-run"),
    ):  # fmt: skip
        found = outcomes.split()
        assert sum_up(found) == sum_up(found[::-1]) == summed  # type: ignore[arg-type]


def test_the_overview_has_the_smallest_and_the_largest_value() -> None:
    def overview(table: Table, claim: str, column: str) -> str:
        return value_words(shown(table, "overview", claim, column))

    assert overview(whole(), "accuracy-fedavg", "printed") == "+8.10% to +66.24%"
    assert overview(whole(), "convergence", "printed") == "+50.0% (1 of 9 rows)"
    means = [mean("penalty", row) for row in range(4)]
    assert overview(whole(), "penalty", "honest") == f"{min(means):+.4f} to {max(means):+.4f}"
    assert overview(claims(NOTHING), "penalty", "honest") == "not run"
    assert overview(whole(), "headline-time", "honest") == value_words(shown(whole(), "headline-time", 0, "honest"))
    assert "not about the paper" in named_table("claims", NOTHING, "tiny").parts[0].columns[-1].label


def test_missing_cells_are_named_and_make_no_verdict() -> None:
    for part in claims(NOTHING).parts[1:]:
        assert {value.words for value in part.columns[-1].values} == {"not run"}
    lines = everything().committed.values()
    table = claims(Results(line for line in lines if "fedprox/seed1@" not in line.id and "moon/" not in line.id))
    assert value_words(shown(table, "plug-and-play", 1, "honest")).endswith("(seeds 0, 2 of 3)")
    moon = shown(table, "mixed", 0, "honest")
    needed = "resnet18/label+feature-0.1/honest/{moon,fedprox}/seed{0,1,2}@quick"
    assert moon.words == "not run" and sorted(needed) == sorted(moon.sources[0].removeprefix("needs cells: "))
    assert set(moon.cells) == {cell.id for s in range(3) for cell in rows_of("mixed")[0].cells("honest", s, "quick")}


def test_a_run_that_failed_is_named_and_one_seed_cannot_tell() -> None:
    cell = replace(FNR, method="moon", seed=2)
    lines = [
        replace(line, failed="It diverged." if line.id == cell.id else "") for line in everything().committed.values()
    ]
    assert value_words(shown(claims(Results(lines)), "kappa-rho", 1, "honest")).endswith("(seeds 0, 1 of 3)")
    only = [line for line in lines if "/label/" not in line.id or "/seed2@" in line.id]
    value = shown(claims(Results(only)), "kappa-rho", 1, "honest")
    assert value.words == "failed" and f"{cell.id} failed: It diverged." in value.sources
    for part in claims(everything(), [1]).parts[1:]:
        assert {value.words for value in part.columns[-1].values} == {"cannot be told: one seed"}


def test_no_claim_is_about_seconds_beside_other_processes_or_runs_without_watch() -> None:
    lines = [replace(line, processes=3, notes={}) for line in everything().committed.values()]
    beside, lost = claims(Results(lines)), set()
    for before, after in zip(whole().parts[1:], beside.parts[1:], strict=True):
        for old, new in zip(before.columns, after.columns, strict=True):
            for (_, label), mine, others in zip(before.rows, old.values, new.values, strict=True):
                if value_words(mine) != value_words(others):
                    assert others.words == ("cannot be told: not measured" if old.key == "verdict" else "-")
                    timed = before.key[0] in ("headline-time", "time") or label.startswith(("seconds", "kappa"))
                    lost.add((before.key[0], timed))
    rows = {claim: [row for row in rows_of(claim) if row.measure in WATCHING] for claim in CLAIMS}
    timed_claims = ("headline-time", "time", "convergence", "kappa-rho")
    assert lost == {(claim, False) for claim in CLAIMS if rows[claim]} | {(claim, True) for claim in timed_claims}
    assert "the seconds of these cells are no measure: resnet18/" in as_text(beside)
    watched = [row for found in rows.values() for row in found]
    assert len(watched) == 21
    assert all(cell.logged for row in watched for setting in SEEDS for cell in row.cells(setting, 0, "quick"))


def test_seeds_that_nobody_asked_for_count_under_the_papers_protocol() -> None:
    (row, *_) = rows_of("penalty")
    cells = [cell for seed in (1, 2) for cell in row.cells("paper", seed, "quick")]
    value = shown(claims(Results(map(line_of, cells))), "penalty", 0, "paper")
    assert (value.seeds, value.missing) == ((1, 2), (0,)) and value_words(value).endswith("(seeds 1, 2 of 3)")
