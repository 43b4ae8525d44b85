"""The paper's convergence analysis, lemma by lemma, on a problem with known constants; THEORY.md has the words.

`check()` tries every statement on the problem of `convex_problem.py` and says whether it holds, follows the printed
recursion under both readings of Gamma, and compares corrected bounds with runs of the package's own FedAvg and FNR.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fnrfl.core.rng import generator
from fnrfl.process import isolated
from reproduction.catalogue import read_toml
from reproduction.convex_problem import MU, REFINED_SHARE, Problem, Steps, distances, skewed_problem

WORDS = read_toml("theory.toml")
LOCAL, REFINED, ONE_EPOCH = Steps(local=4), Steps(local=4, refined=2), Steps(local=8, one_epoch=True)
FAR = tuple(dict.fromkeys(round(10 ** (k / 10)) for k in range(51)))  # steps at which the recursions are read off
SHOWN = (100, 1_000, 10_000, 100_000)  # of them, in the text
TRIED_MODELS = 400  # random models at which a statement is tried
DRAWS = 4_000  # of random batches
ZERO = 1e-12  # what is less is rounding


class Statement(NamedTuple):
    """One statement of the analysis, by its key in data/theory.toml, and whether it holds here."""

    key: str
    holds: bool
    found: str  # the numbers


class Curve(NamedTuple):
    """A measured curve and the bound that should lie above it, after each round."""

    name: str
    steps: Sequence[int]  # that every client has taken, or could have
    measured: list[float]  # |w - w*|^2, mean over the seeds
    highest: list[float]  # the largest over the seeds
    bound: list[float]

    @property
    def words(self) -> str:
        return str(WORDS["runs"][self.name])

    @property
    def is_below(self) -> bool:
        """Whether the bound is above every seed, after every round."""
        return all(high <= bound for high, bound in zip(self.highest, self.bound, strict=True))


class TheoryCheck(NamedTuple):
    """All that was computed, as plain values."""

    constants: dict[str, float]
    statements: tuple[Statement, ...]
    recursions: dict[str, list[float]]  # key -> delta after the steps of FAR
    curves: tuple[Curve, ...]  # runs under the corrected bounds
    printed: Curve  # a run and the printed recursion with Gamma as printed, which it breaks
    seeds: int


@isolated()
def check(rounds: int = 200, seeds: Sequence[int] = (0, 1, 2, 3)) -> TheoryCheck:
    """Try every statement, follow the recursions, and run FedAvg and FNR; the same numbers every time."""
    problem, same = skewed_problem(), skewed_problem(public_is_everybodys=True)
    runs = (("fedavg", problem, LOCAL), ("fnr", problem, REFINED), ("same", same, REFINED))
    kinds = {  # with one local step nobody drifts
        "printed": printed_recursion(problem, problem.gamma_printed, noise=problem.noise),
        "meant": printed_recursion(problem, problem.gamma, noise=problem.noise),
        "corrected": corrected(problem, Steps(local=1)),
        "fedavg": corrected(problem, LOCAL),
        "fnr": corrected(problem, REFINED),
    }
    followed = {name: list(recursion.follow(problem, FAR[-1])) for name, recursion in kinds.items()}
    recursions = {name: [values[m] for m in FAR] for name, values in followed.items()}
    printed = _curve("epoch", problem, ONE_EPOCH, rounds, seeds[:1], printed_recursion(problem, problem.gamma_printed))
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
        statements=(*statements(problem, ONE_EPOCH), *_about_lemma_3(problem, printed, recursions["meant"])),
        recursions=recursions,
        curves=tuple(_curve(name, p, steps, rounds, seeds, corrected(p, steps)) for name, p, steps in runs),
        printed=printed,
        seeds=len(seeds),
    )


def statements(problem: Problem, epoch: Steps) -> Iterator[Statement]:
    """All statements, in the order of the paper's appendix; `epoch` are the steps of a round that is one epoch."""
    printed = f"{problem.gamma:.4f} on the left; the right is 0 in every problem"
    yield Statement("gamma", abs(problem.gamma - problem.gamma_printed) < ZERO, printed)
    yield from _about_gradients(problem)
    yield from _about_lemma_1(problem)
    yield from _about_lemma_2(problem)
    yield _about_drift(problem, epoch.local)


def _about_gradients(problem: Problem) -> Iterator[Statement]:
    """Gradients at w*, and bounds at models along each from there, where they are hardest to meet."""
    longest = max(float(one.gradient(problem.optimum).norm()) for one in problem.clients)
    yield Statement("gradients", longest < ZERO, f"the longest is {longest:.4f}")
    smooth, printed, corrected = [], [], []
    for one in problem.clients:
        away = one.gradient(problem.optimum)
        for t in torch.linspace(-2, 2, 81, dtype=torch.float64).tolist():
            w = problem.optimum + t * away
            rise, squared = float(one(w) - one(problem.optimum)), float(one.gradient(w).square().sum())
            smooth.append(rise - problem.L / 2 * float((w - problem.optimum).square().sum()))
            printed.append(squared - 2 * problem.L * rise)
            corrected.append(squared - 2 * problem.L * (float(one(w)) - one.least))
    yield _inequality("smooth", smooth)
    yield _inequality("squared", printed)
    yield _inequality("squared-corrected", corrected)


def _inequality(key: str, differences: list[float], remark: str = "") -> Statement:
    """left <= right, tried several times; `differences` are left - right."""
    broken = sum(difference > ZERO for difference in differences)
    found = f"broken at {broken} of {len(differences)} models" if broken else f"at {len(differences)} models"
    return Statement(key, not broken, f"{found}, largest left - right {max(differences):.2g}{remark}")


def _about_lemma_1(problem: Problem) -> Iterator[Statement]:
    """Lemma 1, and two steps of its proof, at random models and step sizes."""
    inner, outside, zero, constant, square = [], 0, [], [], []
    for models, eta in _random_models(problem):
        mean, w = models.mean(0), problem.optimum
        g = torch.stack([one.gradient(mine) for one, mine in zip(problem.clients, models, strict=True)]).mean(0)
        away = mean - models[0]
        inner.append(float(away.norm() * g.norm() - (away * g).sum()))
        outside += not 1 <= 1 - 2 * problem.L * eta <= 0.5
        left = float((mean - w - eta * g).square().sum())
        zero.append(left - (1 - MU * eta) * float((mean - w).square().sum()) - 2 * _drift(models))
        constant.append(zero[-1] - 3 * problem.gamma / (8 * problem.L))
        square.append(zero[-1] - 6 * problem.L * eta**2 * problem.gamma)
    yield _inequality("cauchy", inner)
    yield Statement("steps", not outside, f"broken at {outside} of {TRIED_MODELS} step sizes; it is 1/2 to 1")
    yield _inequality("lemma-1-printed", zero, "; its printed proof has another Gamma")
    yield _inequality("lemma-1-meant", constant)
    yield _inequality("lemma-1-corrected", square)


def _random_models(problem: Problem) -> Iterator[tuple[Tensor, float]]:
    """(the clients' models [n, C, d], a step size): near w* and far from it, near each other and far apart."""
    draw = generator(0, "theory", "models")
    shape = (len(problem.clients), *problem.optimum.shape)
    for i in range(TRIED_MODELS):
        far, apart, eta = 10.0 ** -(i % 5), 10.0 ** -(i // 5 % 5), 1 / (4 * problem.L * (1 + i % 7))
        models = apart * torch.randn(shape, generator=draw, dtype=torch.float64)
        centre = problem.optimum + far * torch.randn(shape[1:], generator=draw, dtype=torch.float64)
        yield models - models.mean(0) + centre, eta


def _drift(models: Tensor) -> float:
    """sum p_i |w - w_i|^2, how far the clients' models [n, C, d] are from their mean."""
    return float((models - models.mean(0)).square().sum((1, 2)).mean())


def _about_lemma_2(problem: Problem) -> Iterator[Statement]:
    """E |sum p_i noise_i|^2 <= sum p_i^2 (Delta G_i)^2, over random batches at w*."""
    p, draw = problem.share, generator(0, "theory", "batches")
    found = []
    for one in problem.clients:  # gradients of random batches less that of all examples
        each, drawn = one.gradients(problem.optimum), torch.rand(DRAWS, len(one.x), generator=draw, dtype=torch.float64)
        found.append(each[drawn.argsort(1)[:, : one.batch]].mean(1) - each.mean(0))
    noise = torch.stack(found)  # [n, draws, C, d]
    together, allowed = float(noise.mean(0).square().sum((1, 2)).mean()), problem.noise
    yield Statement("lemma-2", together <= allowed, f"{together:.5f} <= {allowed:.5f}")
    same = float(noise[0].square().sum((1, 2)).mean())
    false = f"{same:.5f} <= {p * same:.5f} is false: independence is needed, and is not among the assumptions"
    yield Statement("lemma-2-alike", same <= p * same, false)
    lengths = float((p * noise.flatten(2).norm(dim=2).sum(0)).square().mean())
    alone = float(p**2 * noise.square().sum((2, 3)).mean(1).sum())
    yield Statement("lemma-2-proof", abs(lengths / alone - 1) < 0.05, f"{lengths:.5f} and {alone:.5f}")


def _about_drift(problem: Problem, steps: int) -> Statement:
    """The term N, within one epoch: how far the clients' models are from their mean before they are averaged."""
    eta, models = problem.rate(0), [torch.zeros_like(problem.optimum)] * len(problem.clients)
    for _ in range(steps - 1):
        models = [w - eta * one.gradient(w) for one, w in zip(problem.clients, models, strict=True)]
    apart, in_steps = _drift(torch.stack(models)), 4 * eta**2 * (steps - 1) ** 2 * problem.G**2
    found = f"{apart:.4f} after {steps - 1} of the {steps} steps of one epoch"
    return Statement("drift", apart <= ZERO, f"{found}, and 0 is allowed; {in_steps:.4g} with steps")


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
            i, eta = m % length, problem.rate(m - m % length)
            delta = (1 - self.shrink[i] * eta) * delta + self.first[i] * eta + self.second[i] * eta**2 + self.constant


def printed_recursion(problem: Problem, gamma: float, *, noise: float = 0.0) -> Recursion:
    """Lemma 3 as printed: 8 eta^2 (E - 1)^2 G^2 is 0, with E = 1 epoch, and 3 Gamma / (8 L) is without eta."""
    return Recursion((MU,), (0.0,), (noise,), 3 * gamma / (8 * problem.L))


def corrected(problem: Problem, steps: Steps) -> Recursion:
    """The bound that reproduction/THEORY.md derives: eta^2 Gamma is kept, steps are counted, and refinement is in it.

    eta is constant within a round, so after s steps clients are at most s eta G apart from where they began.
    """
    drift = [2 * s**2 * problem.G**2 for s in range(steps.total)]
    local = problem.noise + 6 * problem.L * problem.gamma
    refined = int(REFINED_SHARE * len(problem.clients)) * problem.share  # q, the weight of refined clients
    public = refined * problem.share * problem.public.batch_variance
    return Recursion(
        shrink=(MU,) * steps.local + (MU * refined / 2,) * steps.refined,
        first=(0.0,) * steps.local + (2 * refined * problem.gamma_public,) * steps.refined,
        second=tuple(d + (local if s < steps.local else public) for s, d in enumerate(drift)),
    )


def _curve(name: str, problem: Problem, steps: Steps, rounds: int, seeds: Sequence[int], recursion: Recursion) -> Curve:
    found, at = distances(problem, steps, rounds, seeds), range(0, rounds * steps.total + 1, steps.total)
    bound = list(recursion.follow(problem, at[-1]))[:: steps.total]
    return Curve(name, at, found.mean(0).tolist(), found.max(0).values.tolist(), bound)


def _about_lemma_3(problem: Problem, curve: Curve, far: Sequence[float]) -> Iterator[Statement]:
    """Lemma 3 against a run whose rounds are one epoch of steps on all examples, and what follows from it."""
    over = curve.measured[-1] / curve.bound[-1]
    after = f"after {curve.steps[-1]:,} steps"
    yield Statement("lemma-3-printed", curve.is_below, f"{after} the run is {over:.3g} times as far from w*")
    meant = list(printed_recursion(problem, problem.gamma).follow(problem, curve.steps[-1]))
    held = curve._replace(bound=[meant[m] for m in curve.steps])
    found = f"{after} {curve.measured[-1]:.3g} <= {meant[-1]:.3g}: its constant covers all"
    yield Statement("lemma-3-meant", held.is_below, found)
    found = f"from {problem.first_distance:.3g} to {far[-1]:.3g} in {FAR[-1]:,} steps"
    yield Statement("limit", far[-1] < far[len(far) // 2], found)


def theory_text(found: TheoryCheck) -> str:
    """The whole check as text for a terminal."""
    lines = ["Constants", *(f"  {name:<22}{value:.4g}" for name, value in found.constants.items())]
    lines += ["", "Statements, with their lines in the paper's source"]
    for one in found.statements:
        place, words = WORDS["statements"][one.key]  # in the paper's source, or "corrected"
        lines += [f"  {'holds' if one.holds else 'FAILS'}  {place:<10} {words}", f"{' ' * 20}{one.found}"]
    lines += ["", f"{'Bounds of |w - w*|^2 after m steps; m =':<50}" + "".join(f"{m:>10,}" for m in SHOWN)]
    for name, values in found.recursions.items():
        shown = "".join(f"{values[FAR.index(m)]:>10.3g}" for m in SHOWN)
        lines.append(f"  {WORDS['recursions'][name]:<48}{shown}")
    title = f"Runs, the mean of {found.seeds} seeds"
    lines += ["", f"{title:<44}{'steps':>8}{'measured':>12}{'bound':>12}  bound is above"]
    for curve, bound in (*((curve, "corrected") for curve in found.curves), (found.printed, "as printed")):
        numbers = f"{curve.steps[-1]:>8,}{curve.measured[-1]:>12.3g}{curve.bound[-1]:>12.3g}"
        lines.append(f"  {curve.words:<42}{numbers}  {'everywhere' if curve.is_below else 'NOT EVERYWHERE'} ({bound})")
    return "\n".join(lines) + "\n"
