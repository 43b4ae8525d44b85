"""The statements of the paper's convergence analysis that need no run, each tried on a problem with known constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fnrfl.core.rng import generator
from fnrfl.results.reproduce.convex_problem import MU, Problem, SoftmaxLoss, Steps, batch_of, rate

TRIED_MODELS = 400  # random models at which a statement is tried
DRAWS = 4_000  # of random batches
ZERO = 1e-12  # what is less is rounding


class Statement(NamedTuple):
    """One statement of the analysis, and whether it holds here."""

    place: str  # in the paper's source, or "corrected"
    text: str
    holds: bool
    found: str  # the numbers


def statements(problem: Problem, epoch: Steps) -> Iterator[Statement]:
    """All statements, in the order of the paper's appendix; `epoch` are the steps of a round that is one epoch."""
    yield from _about_gamma(problem)
    yield from _about_gradients(problem)
    yield from _about_lemma_1(problem)
    yield from _about_lemma_2(problem)
    yield _about_drift(problem, epoch.local)


def batch_noise(problem: Problem) -> float:
    """sum p_i^2 (Delta G_i)^2."""
    return sum(problem.share**2 * one.batch_variance(batch_of(one)) for one in problem.clients)


def _about_gamma(problem: Problem) -> Iterator[Statement]:
    yield Statement(
        "line 975",
        "Phi* - sum p_i Phi_i* = Phi(w*) - sum p_i Phi_i(w*)",
        abs(problem.gamma - problem.gamma_printed) < ZERO,
        f"{problem.gamma:.4f} on the left; the right is 0 in every problem",
    )
    longest = max(float(one.gradient(problem.optimum).norm()) for one in problem.clients)
    text = "every client's gradient is 0 at w*"
    yield Statement("line 846", text, longest < ZERO, f"the longest is {longest:.4f}")


def _about_gradients(problem: Problem) -> Iterator[Statement]:
    """Bounds at models along a client's gradient from w*, where they are hardest to meet."""
    rises, printed, corrected = [], [], []
    for one in problem.clients:
        away = one.gradient(problem.optimum)
        for t in torch.linspace(-2, 2, 81, dtype=torch.float64).tolist():
            w = problem.optimum + t * away
            rise, squared = float(one(w) - one(problem.optimum)), float(one.gradient(w).square().sum())
            rises.append(rise - problem.L / 2 * float((w - problem.optimum).square().sum()))
            printed.append(squared - 2 * problem.L * rise)
            corrected.append(squared - 2 * problem.L * (float(one(w)) - one.least))
    yield _inequality("line 848", "Phi_i(w) - Phi_i(w*) <= L/2 |w - w*|^2", rises)
    yield _inequality("line 870", "|grad Phi_i(w)|^2 <= 2L (Phi_i(w) - Phi_i(w*))", printed)
    yield _inequality("corrected", "|grad Phi_i(w)|^2 <= 2L (Phi_i(w) - Phi_i*)", corrected)


def _inequality(place: str, text: str, differences: list[float], remark: str = "") -> Statement:
    """left <= right, tried several times; `differences` are left - right."""
    worst = max(differences)
    broken = sum(difference > ZERO for difference in differences)
    found = f"broken at {broken} of {len(differences)} models" if broken else f"at {len(differences)} models"
    return Statement(place, text, not broken, f"{found}, largest left - right {worst:.2g}{remark}")


def _about_lemma_1(problem: Problem) -> Iterator[Statement]:
    """Lemma 1, and two steps of its proof, at random models and step sizes."""
    inner, outside, zero, constant, square = [], 0, [], [], []
    for models, eta in _random_models(problem):
        mean, w = models.mean(0), problem.optimum
        g = torch.stack([one.gradient(mine) for one, mine in zip(problem.clients, models, strict=True)]).mean(0)
        away, drift = mean - models[0], float((models - mean).square().sum((1, 2)).mean())
        inner.append(float(away.norm() * g.norm() - (away * g).sum()))
        outside += not 1 <= 1 - 2 * problem.L * eta <= 0.5
        left = float((mean - w - eta * g).square().sum())
        zero.append(left - (1 - MU * eta) * float((mean - w).square().sum()) - 2 * drift)
        constant.append(zero[-1] - 3 * problem.gamma / (8 * problem.L))
        square.append(zero[-1] - 6 * problem.L * eta**2 * problem.gamma)
    yield _inequality("line 908", "|a| |b| <= <a, b>, for Cauchy-Schwarz", inner)
    text = "1 <= 1 - 2 L eta <= 1/2 for eta <= 1/(4L)"
    yield Statement("line 1019", text, not outside, f"broken at {outside} of {TRIED_MODELS} step sizes; it is 1/2 to 1")
    lemma = "|w - w* - eta g|^2 <= (1 - mu eta) |w - w*|^2 + 2 sum p_i |w - w_i|^2"
    unproved = "; its printed proof has another Gamma"
    yield _inequality("line 509", f"Lemma 1, Gamma as printed (0): {lemma}", zero, unproved)
    yield _inequality("line 509", "Lemma 1, Gamma as meant: the same + 3 Gamma/(8L)", constant)
    yield _inequality("corrected", "Lemma 1: the same + 6 L eta^2 Gamma", square)


def _random_models(problem: Problem) -> Iterator[tuple[Tensor, float]]:
    """(the clients' models [n, C, d], a step size): near w* and far from it, near each other and far apart."""
    draw = generator(0, "theory", "models")
    shape = (len(problem.clients), *problem.optimum.shape)
    for i in range(TRIED_MODELS):
        far, apart, eta = 10.0 ** -(i % 5), 10.0 ** -(i // 5 % 5), 1 / (4 * problem.L * (1 + i % 7))
        models = apart * torch.randn(shape, generator=draw, dtype=torch.float64)
        centre = problem.optimum + far * torch.randn(shape[1:], generator=draw, dtype=torch.float64)
        yield models - models.mean(0) + centre, eta


def _about_lemma_2(problem: Problem) -> Iterator[Statement]:
    """E |sum p_i noise_i|^2 <= sum p_i^2 (Delta G_i)^2, over random batches at w*."""
    p, draw = problem.share, generator(0, "theory", "batches")
    noise = torch.stack([_noises(one, problem.optimum, draw) for one in problem.clients])  # [n, draws, C, d]
    together, allowed = float(noise.mean(0).square().sum((1, 2)).mean()), batch_noise(problem)
    text = "Lemma 2, clients that draw their batches independently"
    yield Statement("line 524", text, together <= allowed, f"{together:.5f} <= {allowed:.5f}")
    same = float(noise[0].square().sum((1, 2)).mean())
    text = "Lemma 2, clients that have the same data and draw the same batches"
    found = f"{same:.5f} <= {p * same:.5f} is false: independence is needed, and is not among the assumptions"
    yield Statement("line 524", text, same <= p * same, found)
    lengths = float((p * noise.flatten(2).norm(dim=2).sum(0)).square().mean())
    alone = float(p**2 * noise.square().sum((2, 3)).mean(1).sum())
    text = "the proof of Lemma 2: E (sum p_i |noise_i|)^2 = sum p_i^2 E |noise_i|^2"
    yield Statement("line 1062", text, abs(lengths / alone - 1) < 0.05, f"{lengths:.5f} and {alone:.5f}")


def _noises(loss: SoftmaxLoss, w: Tensor, draw: torch.Generator) -> Tensor:
    """The gradient of random batches less that of all examples, [draws, C, d]."""
    each = loss.gradients(w)
    order = torch.rand(DRAWS, len(each), generator=draw, dtype=torch.float64).argsort(1)[:, : batch_of(loss)]
    return each[order].mean(1) - each.mean(0)


def _about_drift(problem: Problem, steps: int) -> Statement:
    """The term N, within one epoch: how far the clients' models are from their mean before they are averaged."""
    eta, models = rate(problem, 0), [torch.zeros_like(problem.optimum)] * len(problem.clients)
    for _ in range(steps - 1):
        models = [w - eta * one.gradient(w) for one, w in zip(problem.clients, models, strict=True)]
    stacked = torch.stack(models)
    apart = float((stacked - stacked.mean(0)).square().sum((1, 2)).mean())
    in_steps = 4 * eta**2 * (steps - 1) ** 2 * problem.G**2
    return Statement(
        "line 1142",
        "sum p_i |w - w_i|^2 <= 4 eta^2 (E - 1)^2 G^2, E in epochs",
        apart <= ZERO,
        f"{apart:.4f} after {steps - 1} of the {steps} steps of one epoch, and 0 is allowed; {in_steps:.4g} with steps",
    )
