"""The paper's convergence analysis on a problem with known constants: these are right, and so are the verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fnrfl.core.rng import generator
from reproduction import theory
from reproduction.convex_problem import MU, NUM_CLASSES, NUM_INPUTS, Problem, Steps, distances, skewed_problem
from reproduction.figures import draw_theory
from reproduction.theory import FAR, LOCAL, ONE_EPOCH, REFINED, WORDS, Recursion, TheoryCheck, corrected


@pytest.fixture(scope="module")
def problem() -> Problem:
    return skewed_problem()


def models(count: int, most: float) -> Iterator[Tensor]:
    """Random models of all lengths up to some."""
    draw = generator(0, "test", "theory")
    for i in range(count):
        w = torch.randn(NUM_CLASSES, NUM_INPUTS, generator=draw, dtype=torch.float64)
        yield w / w.norm() * most * (i + 1) / count


def test_every_loss_is_as_convex_and_as_smooth_as_is_said(problem: Problem) -> None:
    loss = problem.clients[0]
    for w in models(3, 4.0):
        torch.testing.assert_close(loss.gradient(w), torch.autograd.functional.jacobian(loss, w))
        hessian = torch.autograd.functional.hessian(loss, w).reshape(w.numel(), -1)
        torch.testing.assert_close(loss.hessian(w), hessian)
    for loss in (*problem.clients, problem.public, problem.whole):
        assert float(loss.gradient(loss.minimiser).norm()) < 1e-14
        for w in models(20, 6.0):
            curvature = torch.linalg.eigvalsh(loss.hessian(w))
            assert float(curvature[0]) >= MU - 1e-12 and float(curvature[-1]) <= problem.L
    assert float(problem.whole(problem.optimum)) == problem.whole.least


def test_no_gradient_is_longer_and_no_batch_varies_more_than_is_said(problem: Problem) -> None:
    draw = generator(0, "test", "batches")
    for loss in (*problem.clients, problem.public, problem.whole):
        for w in models(10, 2**0.5 / MU):
            each = loss.gradients(w)
            assert float(each.flatten(1).norm(dim=1).max()) <= problem.G
            order = torch.rand(2000, len(each), generator=draw, dtype=torch.float64).argsort(1)[:, : loss.batch]
            varies = float((each[order].mean(1) - each.mean(0)).square().sum((1, 2)).mean())
            assert varies <= loss.batch_variance


def test_gamma_is_zero_as_printed_and_positive_as_meant(problem: Problem) -> None:
    assert abs(problem.gamma_printed) < 1e-14 < 0.1 < problem.gamma
    assert problem.gamma_public > 1e-4
    assert abs(skewed_problem(public_is_everybodys=True).gamma_public) < 1e-14


def test_the_packages_fedavg_takes_the_steps_of_the_analysis(problem: Problem) -> None:
    mean, expected = torch.zeros_like(problem.optimum), []
    for t in range(4):
        expected.append(float((mean - problem.optimum).square().sum()))
        ends, eta = [], problem.rate(t * ONE_EPOCH.total)
        for loss in problem.clients:
            w = mean
            for _ in range(ONE_EPOCH.local):
                w = w - eta * loss.gradient(w)
            ends.append(w)
        mean = torch.stack(ends).mean(0)
    assert distances(problem, ONE_EPOCH, 3, [0])[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_random_batches_are_one_step_an_epoch_and_unbiased(problem: Problem) -> None:
    """After one local step from w = 0, the mean over seeds is the step on all examples."""
    found = distances(problem, Steps(local=1), 1, range(40))[:, 1]
    step = -problem.rate(0) * problem.whole.gradient(torch.zeros_like(problem.optimum))
    exact, noise = float((step - problem.optimum).square().sum()), problem.rate(0) ** 2 * problem.noise
    mean, reach = float(found.mean()), 4 * float(found.std()) / 40**0.5
    assert found.std() > 0 and mean - reach <= exact + noise and exact <= mean + reach


def test_the_penalty_of_fnr_has_no_gradient_here(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = distances(problem, REFINED, 3, [0])
    without = replace(REFINED.method(problem), weight=0.0)
    monkeypatch.setattr(Steps, "method", lambda steps, problem: without)
    assert torch.equal(distances(problem, REFINED, 3, [0]), usual)


def places_and_verdicts(problem: Problem) -> list[tuple[str, bool]]:
    return [(WORDS["statements"][one.key][0], one.holds) for one in theory.statements(problem, ONE_EPOCH)]


def test_which_statements_hold_and_what_fails_because_clients_differ(problem: Problem) -> None:
    assert places_and_verdicts(problem) == [
        ("line 975", False), ("line 846", False), ("line 848", False), ("line 870", False), ("corrected", True),
        ("line 908", False), ("line 1019", False), ("line 509", True), ("line 509", True), ("corrected", True),
        ("line 524", True), ("line 524", False), ("line 1062", False), ("line 1142", False),
    ]  # fmt: skip
    alike = places_and_verdicts(Problem((problem.public,) * 6, problem.public))
    assert alike[:3] == [("line 975", True), ("line 846", True), ("line 848", True)]


def test_the_printed_recursion_diverges_with_gamma_as_meant_and_the_corrected_one_goes_as_one_over_m(
    problem: Problem,
) -> None:
    def far(recursion: Recursion) -> list[float]:
        values = list(recursion.follow(problem, 100_000))
        return [values[m] for m in (1_000, 10_000, 100_000)]

    meant, fedavg = far(theory.printed_recursion(problem, problem.gamma)), far(corrected(problem, LOCAL))
    assert [b / a for a, b in zip(meant, meant[1:], strict=False)] == pytest.approx([10, 10], rel=0.05)
    assert [b / a for a, b in zip(fedavg, fedavg[1:], strict=False)] == pytest.approx([0.1, 0.1], rel=0.05)
    assert (
        far(theory.printed_recursion(problem, problem.gamma_printed))[-1] < 1e-12
    )  # with neither noise nor drift in it


def test_the_bound_of_fnr_ends_where_its_floor_is(problem: Problem) -> None:
    """2 q R Gamma_public / (mu (E + q R / 2)), for q the share of refined clients, E local and R public steps."""
    q, local, public = 0.5, REFINED.local, REFINED.refined
    floor = 2 * q * public * problem.gamma_public / (MU * (local + q * public / 2))
    whole = corrected(problem, REFINED)
    *_, last = whole.follow(problem, 30_000)
    *_, rest = whole._replace(first=(0.0,) * REFINED.total).follow(problem, 30_000)
    assert last - rest == pytest.approx(floor, rel=0.02)
    assert max(corrected(skewed_problem(public_is_everybodys=True), REFINED).first) < 1e-14


def test_text_and_figure_say_what_was_found() -> None:
    found = theory.check(rounds=25, seeds=(0,))
    text = theory.theory_text(found)
    assert text.count("FAILS") == sum(not one.holds for one in found.statements) == 11
    assert text.count("holds") == sum(one.holds for one in found.statements) == 6
    assert all(WORDS["statements"][one.key][1] in text and one.found in text for one in found.statements)
    assert text.count(" everywhere (corrected)") == 3
    broken = found.curves[0]._replace(bound=[0.0] * len(found.curves[0].steps))
    assert "NOT EVERYWHERE (corrected)" in theory.theory_text(found._replace(curves=(broken,)))
    assert all(len(values) == len(FAR) for values in found.recursions.values())
    assert draw_theory(found).startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def whole() -> TheoryCheck:
    return theory.check()


@pytest.mark.slow
def test_the_page_has_these_verdicts_and_numbers(whole: TheoryCheck) -> None:
    page = (Path(theory.__file__).parent / "THEORY.md").read_text()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page.splitlines() if line.startswith("| ")]
    told = [(row[0].removeprefix("| "), row[2]) for row in rows if row[2:3] and row[2] in ("holds", "fails")]
    places = [WORDS["statements"][one.key][0].removeprefix("line ") for one in whole.statements]
    assert told == [(at, "holds" if s.holds else "fails") for at, s in zip(places, whole.statements, strict=True)]
    for key, values in whole.recursions.items():
        numbers = " | ".join(f"{values[FAR.index(m)]:.3g}" for m in theory.SHOWN)
        assert f"| {WORDS['recursions'][key]} | {numbers} |" in page
    for curve in whole.curves:
        numbers = f"{curve.steps[-1]:,} | {curve.measured[-1]:.3g} | {curve.bound[-1]:.3g}"
        assert f"| {curve.words} | {numbers} | everywhere |" in page
    assert all(f"{whole.constants[name]:.4g} |" in page for name in ("mu", "L", "G", "Gamma as meant"))


@pytest.mark.slow
def test_corrected_bounds_are_above_every_run_and_the_printed_one_is_not(whole: TheoryCheck) -> None:
    assert [curve.name for curve in whole.curves if not curve.is_below] == []
    assert all(min(curve.bound) > 0 and len(curve.steps) == 201 for curve in whole.curves)
    assert not whole.printed.is_below
    assert whole.printed.measured[-1] > 50 * whole.printed.bound[-1]
    assert [one.holds for one in whole.statements[-3:]] == [False, True, False]  # Lemma 3, and what follows from it
    fedavg, fnr, same = (curve.measured[-1] for curve in whole.curves)
    assert fnr > 10 * max(fedavg, same)  # FNR stops short of w*, unless public data has the optimum of all data
