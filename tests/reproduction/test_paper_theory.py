"""The paper's convergence analysis on a problem with known constants: these are right, and so are the verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fnrfl.core.rng import generator
from reproduction.convex_problem import (
    MU,
    NUM_CLASSES,
    NUM_INPUTS,
    Problem,
    SoftmaxLoss,
    Steps,
    batch_of,
    distances,
    rate,
    skewed_problem,
)
from reproduction.figures import draw_theory
from reproduction.theory import (
    FAR,
    LOCAL,
    ONE_EPOCH,
    REFINED,
    SHOWN,
    WORDS,
    TheoryCheck,
    batch_noise,
    check,
    corrected,
    printed_recursion,
    statements,
    theory_text,
)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return skewed_problem()


def models(count: int, most: float = 1.0) -> Iterator[Tensor]:
    """Random models of all lengths up to some."""
    draw = generator(0, "test", "theory")
    for i in range(count):
        w = torch.randn(NUM_CLASSES, NUM_INPUTS, generator=draw, dtype=torch.float64)
        yield w / w.norm() * most * (i + 1) / count


def losses(problem: Problem) -> tuple[SoftmaxLoss, ...]:
    return (*problem.clients, problem.public, problem.whole)


# -- the constants -----------------------------------------------------------------------------------------------------


def test_derivatives_are_those_of_autograd(problem: Problem) -> None:
    loss = problem.clients[0]
    for w in models(3, 4.0):
        torch.testing.assert_close(loss.gradient(w), torch.autograd.functional.jacobian(loss, w))
        hessian = torch.autograd.functional.hessian(loss, w).reshape(w.numel(), -1)
        torch.testing.assert_close(loss.hessian(w), hessian)


def test_every_loss_is_as_convex_and_as_smooth_as_is_said(problem: Problem) -> None:
    for loss in losses(problem):
        assert float(loss.gradient(loss.minimiser).norm()) < 1e-14
        for w in models(20, 6.0):
            curvature = torch.linalg.eigvalsh(loss.hessian(w))
            assert float(curvature[0]) >= MU - 1e-12 and float(curvature[-1]) <= problem.L
    assert float(problem.whole(problem.optimum)) == problem.whole.least


def test_no_gradient_is_longer_and_no_batch_varies_more_than_is_said(problem: Problem) -> None:
    draw = generator(0, "test", "batches")
    for loss in losses(problem):
        for w in models(10, 2**0.5 / MU):
            each = loss.gradients(w)
            assert float(each.flatten(1).norm(dim=1).max()) <= problem.G
            order = torch.rand(2000, len(each), generator=draw, dtype=torch.float64).argsort(1)[:, : batch_of(loss)]
            varies = float((each[order].mean(1) - each.mean(0)).square().sum((1, 2)).mean())
            assert varies <= loss.batch_variance(batch_of(loss))


def test_gamma_is_zero_as_printed_and_positive_as_meant(problem: Problem) -> None:
    assert abs(problem.gamma_printed) < 1e-14 < 0.1 < problem.gamma
    assert problem.gamma_public > 1e-4
    assert abs(skewed_problem(public_is_everybodys=True).gamma_public) < 1e-14


# -- the runs ----------------------------------------------------------------------------------------------------------


def test_the_packages_fedavg_takes_the_steps_of_the_analysis(problem: Problem) -> None:
    mean, expected = torch.zeros_like(problem.optimum), []
    for t in range(4):
        expected.append(float((mean - problem.optimum).square().sum()))
        ends, eta = [], rate(problem, t * ONE_EPOCH.total)
        for loss in problem.clients:
            w = mean
            for _ in range(ONE_EPOCH.local):
                w = w - eta * loss.gradient(w)
            ends.append(w)
        mean = torch.stack(ends).mean(0)
    assert distances(problem, ONE_EPOCH, 3, [0])[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_random_batches_are_one_step_an_epoch_and_unbiased(problem: Problem) -> None:
    """After one local step from w = 0, the mean over seeds is the step on all examples."""
    once = Steps(local=1)
    found = distances(problem, once, 1, range(40))[:, 1]
    step = -rate(problem, 0) * problem.whole.gradient(torch.zeros_like(problem.optimum))
    noise = rate(problem, 0) ** 2 * batch_noise(problem)
    exact = float((step - problem.optimum).square().sum())
    assert found.std() > 0 and exact <= float(found.mean()) + 4 * float(found.std()) / 40**0.5
    assert float(found.mean()) <= exact + noise + 4 * float(found.std()) / 40**0.5


def test_the_penalty_of_fnr_has_no_gradient_here(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = distances(problem, REFINED, 3, [0])
    without = replace(REFINED.method(problem), weight=0.0)
    monkeypatch.setattr(Steps, "method", lambda steps, problem: without)
    assert torch.equal(distances(problem, REFINED, 3, [0]), usual)


# -- statements and recursions -----------------------------------------------------------------------------------------


def test_which_statements_hold(problem: Problem) -> None:
    told = list(statements(problem, ONE_EPOCH))
    assert [(one.place, one.holds) for one in told] == [
        ("line 975", False), ("line 846", False), ("line 848", False), ("line 870", False), ("corrected", True),
        ("line 908", False), ("line 1019", False), ("line 509", True), ("line 509", True), ("corrected", True),
        ("line 524", True), ("line 524", False), ("line 1062", False), ("line 1142", False),
    ]  # fmt: skip


def test_clients_that_are_alike_break_nothing_about_gamma() -> None:
    """What fails because clients differ must hold where they do not."""
    one = skewed_problem().public
    alike = Problem((one,) * 6, one)
    told = {s.key: s for s in statements(alike, ONE_EPOCH) if s.place in ("line 975", "line 846", "line 848")}
    assert all(s.holds for s in told.values()) and len(told) == 3


def test_the_printed_recursion_diverges_with_gamma_as_meant_and_the_corrected_one_goes_as_one_over_m(
    problem: Problem,
) -> None:
    def far(recursion: object) -> list[float]:
        values = list(recursion.follow(problem, 100_000))  # type: ignore[attr-defined]
        return [values[m] for m in (1_000, 10_000, 100_000)]

    meant = far(printed_recursion(problem, problem.gamma))
    assert [b / a for a, b in zip(meant, meant[1:], strict=False)] == pytest.approx([10, 10], rel=0.05)
    fedavg = far(corrected(problem, LOCAL))
    assert [b / a for a, b in zip(fedavg, fedavg[1:], strict=False)] == pytest.approx([0.1, 0.1], rel=0.05)
    zero = far(printed_recursion(problem, problem.gamma_printed))
    assert zero[-1] < 1e-12  # with neither noise nor drift in it


def test_the_bound_of_fnr_ends_where_its_floor_is(problem: Problem) -> None:
    """2 q R Gamma_public / (mu (E + q R / 2)), for q the share of refined clients, E local and R public steps."""
    q, local, public = 0.5, REFINED.local, REFINED.refined
    floor = 2 * q * public * problem.gamma_public / (MU * (local + q * public / 2))
    whole = corrected(problem, REFINED)
    without = whole._replace(first=(0.0,) * REFINED.total)
    *_, last = whole.follow(problem, 30_000)
    *_, rest = without.follow(problem, 30_000)
    assert last - rest == pytest.approx(floor, rel=0.02)
    same = skewed_problem(public_is_everybodys=True)
    assert max(corrected(same, REFINED).first) < 1e-14


# -- all of it ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> TheoryCheck:
    return check(rounds=25, seeds=(0,))


def test_text_and_figure_say_what_was_found(found: TheoryCheck) -> None:
    text = theory_text(found)
    assert text.count("FAILS") == sum(not one.holds for one in found.statements) == 11
    assert text.count("holds") == sum(one.holds for one in found.statements) == 6
    assert all(one.text in text and one.found in text for one in found.statements)
    assert text.count(" everywhere (corrected)") == 3
    broken = found.curves[0]._replace(bound=[0.0] * len(found.curves[0].steps))
    told = theory_text(found._replace(curves=(broken,)))
    assert "NOT EVERYWHERE (corrected)" in told
    assert all(len(values) == len(FAR) for values in found.recursions.values())
    assert draw_theory(found).startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def whole() -> TheoryCheck:
    return check()


@pytest.mark.slow
def test_the_page_has_these_verdicts_and_numbers(whole: TheoryCheck) -> None:
    page = (Path(__file__).parents[2] / "reproduction" / "THEORY.md").read_text()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in page.splitlines() if line.startswith("| ")]
    told = [(row[0].removeprefix("| "), row[2]) for row in rows if row[2:3] and row[2] in ("holds", "fails")]
    verdict = {True: "holds", False: "fails"}
    assert told == [(one.place.removeprefix("line "), verdict[one.holds]) for one in whole.statements]
    for key, values in whole.recursions.items():
        name = WORDS["recursions"][key]
        numbers = " | ".join(f"{values[FAR.index(m)]:.3g}" for m in SHOWN)
        assert f"| {name} | {numbers} |" in page
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
