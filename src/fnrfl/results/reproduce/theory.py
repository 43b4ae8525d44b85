"""The paper's convergence analysis, lemma by lemma, on a problem with known constants; docs/theory.md has the words.

`check()` tries every statement on the problem of `convex_problem.py` and says whether it holds, follows the printed
recursion under both readings of Gamma, and compares corrected bounds with runs of the package's own FedAvg and FNR.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fnrfl.core.words import counted
from fnrfl.process import isolated
from fnrfl.results.reproduce.convex_problem import (
    MU,
    REFINED_SHARE,
    Problem,
    Steps,
    batch_of,
    distances,
    rate,
    skewed_problem,
)
from fnrfl.results.reproduce.statements import Statement, batch_noise, statements

LOCAL = Steps(local=4)
REFINED = Steps(local=4, refined=2)
ONE_EPOCH = Steps(local=8, one_epoch=True)
FAR = tuple(dict.fromkeys(round(10 ** (k / 10)) for k in range(51)))  # steps at which the recursions are read off
SHOWN = (100, 1_000, 10_000, 100_000)  # of them, in the text


class Curve(NamedTuple):
    """A measured curve and the bound that should lie above it, after each round."""

    name: str
    steps: list[int]  # that every client has taken, or could have
    measured: list[float]  # |w - w*|^2, mean over the seeds
    highest: list[float]  # the largest over the seeds
    bound: list[float]

    @property
    def is_below(self) -> bool:
        """Whether the bound is above every seed, after every round."""
        return all(high <= bound for high, bound in zip(self.highest, self.bound, strict=True))


@dataclass(frozen=True)
class TheoryCheck:
    """All that was computed, as plain values."""

    constants: dict[str, float]
    statements: tuple[Statement, ...]
    recursions: dict[str, list[float]]  # name -> delta after the steps of FAR
    curves: tuple[Curve, ...]  # runs under the corrected bounds
    printed: Curve  # a run and the printed recursion with Gamma as printed, which it breaks
    seeds: int


@isolated()
def check(rounds: int = 200, seeds: Sequence[int] = (0, 1, 2, 3)) -> TheoryCheck:
    """Try every statement, follow the recursions, and run FedAvg and FNR; the same numbers every time."""
    problem = skewed_problem()
    runs = (
        ("FedAvg", problem, LOCAL),
        ("FNR", problem, REFINED),
        ("FNR, public data = all private data", skewed_problem(public_is_everybodys=True), REFINED),
    )
    epoch = f"FedAvg, {ONE_EPOCH.local} steps in one epoch"
    recursions = _recursions(problem)
    printed = _curve(epoch, problem, ONE_EPOCH, rounds, seeds[:1], printed_recursion(problem, problem.gamma_printed))
    return TheoryCheck(
        constants={
            "mu": MU,
            "L": problem.L,
            "G": problem.G,
            "Gamma as printed": problem.gamma_printed,
            "Gamma as meant": problem.gamma,
            "Gamma of public data": problem.gamma_public,
            "|w_0 - w*|^2": problem.first_distance,
        },
        statements=(*statements(problem, ONE_EPOCH), *_about_lemma_3(problem, printed, recursions)),
        recursions=recursions,
        curves=tuple(_curve(name, p, steps, rounds, seeds, corrected(p, steps)) for name, p, steps in runs),
        printed=printed,
        seeds=len(seeds),
    )


# -- recursions --------------------------------------------------------------------------------------------------------


class Recursion(NamedTuple):
    """delta <- (1 - shrink eta) delta + first eta + second eta^2 + constant, for each step of a round in turn."""

    shrink: tuple[float, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]
    constant: float = 0.0

    def follow(self, problem: Problem, steps: int) -> Iterator[float]:
        """delta after 0, 1, ... steps; eta is that of the round's first step, as in the runs."""
        delta, length = problem.first_distance, len(self.shrink)
        for m in range(steps + 1):
            yield delta
            i, eta = m % length, rate(problem, m - m % length)
            delta = (1 - self.shrink[i] * eta) * delta + self.first[i] * eta + self.second[i] * eta**2 + self.constant


def printed_recursion(problem: Problem, gamma: float, *, noise: float = 0.0) -> Recursion:
    """Lemma 3 as printed: 8 eta^2 (E - 1)^2 G^2 is 0, with E = 1 epoch, and 3 Gamma / (8 L) is without eta."""
    return Recursion((MU,), (0.0,), (noise,), 3 * gamma / (8 * problem.L))


def corrected(problem: Problem, steps: Steps) -> Recursion:
    """The bound that docs/theory.md derives: eta^2 Gamma is kept, steps are counted, and refinement is in it.

    eta is constant within a round, so after s steps clients are at most s eta G apart from where they began.
    """
    drift = [2 * s**2 * problem.G**2 for s in range(steps.total)]
    local = batch_noise(problem) + 6 * problem.L * problem.gamma
    refined = int(REFINED_SHARE * len(problem.clients)) * problem.share  # q, the weight of refined clients
    public = refined * problem.share * problem.public.batch_variance(batch_of(problem.public))
    return Recursion(
        shrink=(MU,) * steps.local + (MU * refined / 2,) * steps.refined,
        first=(0.0,) * steps.local + (2 * refined * problem.gamma_public,) * steps.refined,
        second=tuple(d + (local if s < steps.local else public) for s, d in enumerate(drift)),
    )


def _recursions(problem: Problem) -> dict[str, list[float]]:
    """The printed recursion in both readings and the corrected one, far out; with one local step nobody drifts."""
    noise = batch_noise(problem)
    kinds = {
        "printed, Gamma as printed (0)": printed_recursion(problem, problem.gamma_printed, noise=noise),
        "printed, Gamma as meant": printed_recursion(problem, problem.gamma, noise=noise),
        "corrected": corrected(problem, Steps(local=1)),
        "corrected, FedAvg with 4 local steps": corrected(problem, LOCAL),
        "corrected, FNR with 4 local and 2 public steps": corrected(problem, REFINED),
    }
    followed = {name: list(recursion.follow(problem, FAR[-1])) for name, recursion in kinds.items()}
    return {name: [values[m] for m in FAR] for name, values in followed.items()}


def _curve(name: str, problem: Problem, steps: Steps, rounds: int, seeds: Sequence[int], recursion: Recursion) -> Curve:
    found = distances(problem, steps, rounds, seeds)
    bound = list(recursion.follow(problem, rounds * steps.total))[:: steps.total]
    at = [t * steps.total for t in range(rounds + 1)]
    return Curve(name, at, found.mean(0).tolist(), found.max(0).values.tolist(), bound)


def _about_lemma_3(problem: Problem, curve: Curve, recursions: dict[str, list[float]]) -> Iterator[Statement]:
    """Lemma 3 against a run whose rounds are one epoch of steps on all examples, and what follows from it."""
    over = curve.measured[-1] / curve.bound[-1]
    text = "Lemma 3, Gamma as printed, E in epochs: the recursion bounds |w - w*|^2"
    found = f"after {curve.steps[-1]:,} steps the run is {over:.3g} times as far from w*"
    yield Statement("line 547", text, curve.is_below, found)
    meant = list(printed_recursion(problem, problem.gamma).follow(problem, curve.steps[-1]))
    held = curve._replace(bound=[meant[m] for m in curve.steps])
    text = "Lemma 3, Gamma as meant, E in epochs: the recursion bounds |w - w*|^2"
    found = f"after {curve.steps[-1]:,} steps {curve.measured[-1]:.3g} <= {meant[-1]:.3g}: its constant covers all"
    yield Statement("line 547", text, held.is_below, found)
    far = recursions["printed, Gamma as meant"]
    text = "with Gamma as meant, the recursion makes |w - w*|^2 go to 0"
    found = f"from {problem.first_distance:.3g} to {far[-1]:.3g} in {FAR[-1]:,} steps"
    yield Statement("line 563", text, far[-1] < far[len(far) // 2], found)


# -- text --------------------------------------------------------------------------------------------------------------


def theory_text(found: TheoryCheck) -> str:
    """The whole check as text for a terminal."""
    lines = ["Constants", *(f"  {name:<22}{value:.4g}" for name, value in found.constants.items())]
    lines += ["", "Statements, with their lines in the paper's source"]
    for one in found.statements:
        lines += [f"  {'holds' if one.holds else 'FAILS'}  {one.place:<10} {one.text}", f"{' ' * 20}{one.found}"]
    lines += ["", f"{'Bounds of |w - w*|^2 after m steps; m =':<50}" + "".join(f"{m:>10,}" for m in SHOWN)]
    lines += [
        f"  {name:<48}" + "".join(f"{values[FAR.index(m)]:>10.3g}" for m in SHOWN)
        for name, values in found.recursions.items()
    ]
    title = f"Runs, the mean of {counted(found.seeds, 'seed')}"
    lines += ["", f"{title:<44}{'steps':>8}{'measured':>12}{'bound':>12}  bound is above"]
    for curve, bound in (*((curve, "corrected") for curve in found.curves), (found.printed, "as printed")):
        numbers = f"{curve.steps[-1]:>8,}{curve.measured[-1]:>12.3g}{curve.bound[-1]:>12.3g}"
        lines.append(f"  {curve.name:<42}{numbers}  {'everywhere' if curve.is_below else 'NOT EVERYWHERE'} ({bound})")
    return "\n".join(lines) + "\n"
