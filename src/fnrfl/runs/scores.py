"""How good models are: the score of one model on some data, and the scores of a round for the event log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.algorithm import cross_entropy
from fnrfl.core.feed import forward_batch
from fnrfl.core.ndarrays import Floats, Ints, Ragged, sizes_of
from fnrfl.core.net import Net
from fnrfl.core.types import State
from fnrfl.data.batches import scaled
from fnrfl.data.datasets import Part
from fnrfl.data.noise import mixed_noise, noise_of_scores
from fnrfl.rundir.events import BEFORE, Event
from fnrfl.runs.metrics import OWN
from fnrfl.runs.quality import TEST_METRICS, Answers, CustomMetric, bootstrap_intervals, known_or_none, recall_by_class
from fnrfl.runs.setup.build import Built

CLIENTS_EVERY_ROUND = 1_000  # with more of them, the log has a number for each of them in the last round alone
# Probabilities of all answers, one number for each class: they cost time, so with more of them they are looked at after
# the last round alone; and they cost memory, so with still more of them not at all.
NUMBERS_EVERY_ROUND = 1_000_000
NUMBERS_LAST_ROUND = 2**25
# Numbers by class and the confusion matrix make a log long, so it has them in the last round alone if there are more.
CLASSES_EVERY_ROUND = 20
CLASSES_OF_CONFUSION = 200
Noise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Score:
    """The answers to some examples, and the mean loss; right answers and examples of every class follow."""

    predicted: Tensor  # [n], the largest output; one from `num_classes` on is no class
    labels: Tensor  # [n]
    num_classes: int
    loss: float
    logits: Tensor | None = None  # [n, C], where they were kept

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return float(self.answers.right.sum() / len(self.labels))

    @property
    def balanced(self) -> float:
        """Mean recall of the classes that the data has."""
        known = self.answers.recall[self.answers.count > 0]
        return float(known.sum() / len(known))

    def reweighted(self, shares: Floats) -> Floats:
        """Accuracy on data with these class shares, [..., C]."""
        known = self.answers.count > 0
        weight = shares * known
        with np.errstate(invalid="ignore"):  # nan for classes that the data has not
            found: Floats = (weight * np.where(known, self.answers.recall, 0.0)).sum(-1) / weight.sum(-1)
        return found

    @cached_property
    def answers(self) -> Answers:
        """The answers for metrics; probabilities are of the classes alone, whatever outputs a model has beside them."""
        shares = None
        if self.logits is not None:  # classes in front: a metric reads one class after another
            shares = self.logits.mT.double().contiguous().softmax(0).numpy().T
        return Answers(self.predicted.numpy(), self.labels.numpy(), self.num_classes, shares)


@torch.no_grad()
def score_model(
    net: Net, state: State, x: Tensor, y: Tensor, num_classes: int, noise: Noise | None = None, *, keep: bool = False
) -> Score:
    """Score a model on data, in eval mode; `keep` keeps its outputs, for metrics of probabilities.

    Nothing waits for a GPU before the last batch is on its way.
    """
    state = state.to(net.device)
    predicted, losses, kept = [], [], []
    batch = forward_batch(net.device)
    for xs, ys in zip(x.split(batch), y.split(batch), strict=True):
        xs, ys = scaled(xs.to(net.device), net.input_dtype), ys.to(net.device)
        xs = net.laid_out(xs if noise is None else noise(xs))
        logits = net.eval_forward(state.params, state.buffers, xs).logits
        predicted.append(logits.argmax(1))
        losses.append(cross_entropy(logits, ys).sum())
        if keep:
            kept.append(logits[:, :num_classes].contiguous())  # a copy where there are more, so that they can go
    loss = sum(torch.stack(losses).tolist()) / len(y)
    return Score(torch.cat(predicted).cpu(), y.cpu(), num_classes, loss, torch.cat(kept).cpu() if keep else None)


def pooled(scores: list[Score]) -> Score:
    """Return the score on several data sets taken together."""
    if len(scores) == 1:
        return scores[0]
    total = sum(len(s.labels) for s in scores)
    logits = [s.logits for s in scores if s.logits is not None]
    return Score(
        torch.cat([s.predicted for s in scores]),
        torch.cat([s.labels for s in scores]),
        scores[0].num_classes,
        sum(s.loss * float(len(s.labels)) for s in scores) / float(total),
        torch.cat(logits) if len(logits) == len(scores) else None,
    )


# -- a round -----------------------------------------------------------------------------------------------------------


def score_round(built: Built, state: State, *, last: bool = True) -> Event:
    """Score the models after a round; `last` says whether this is the last one.

    One model is scored on the test set as the clients see it together: with feature noise, one copy under the noise of
    each. Clients with models of their own are scored on the whole test set, in which example j has the noise of client
    j mod N, and on their own distribution, with their own noise.
    """
    config, splits = built.config, built.splits
    personal = built.algorithm.personalised
    noisy = built.partition.noise is not None and not (config.leaks.clean_test_for_fnr and config.fnr is not None)
    keep, drawn = _keeps_outputs(built, last=last), (built.partition, config.seed)

    def by_client(x: Tensor, y: Tensor, keep: bool, name: str | None = None) -> list[Score]:
        """Score each client's model, with its noise over the data if that has a name."""

        def score(net: Net, client: int) -> Score:
            mine = built.algorithm.personal(net, state, client, built.engine.memory.get(client)) if personal else state
            noise = None if name is None else noise_of_scores(*drawn, client, name, net.device)
            return score_model(net, mine, x, y, built.dataset.num_classes, noise, keep=keep)

        return built.engine.each(config.clients, score)

    def clean(part: Part, keep: bool) -> list[Score]:
        return by_client(part.x, part.y, keep) if personal else [_in_batches(built, state, part, keep=keep)]

    def seen(name: str, part: Part, keep: bool = False) -> tuple[list[Score], list[Score]]:
        """Score the models on data as the clients see it together, and as each client sees it."""
        mine = by_client(part.x, part.y, keep, name) if noisy else clean(part, keep)
        if not (noisy and personal):
            return mine, mine
        return by_client(mixed_noise(*drawn, name, scaled(part.x, built.net.input_dtype)), part.y, keep), mine

    test, mine = seen("test", splits.test, keep)
    shares = built.partition.counts / built.partition.counts.sum(1, keepdims=True)
    per_client, whole = _on_own_classes(mine, shares), pooled(test)
    validation, validation_own = None, None
    if len(splits.validation):
        together, each = seen("validation", splits.validation)
        brought = splits.site_validation
        validation = pooled(together).accuracy
        validation_own = _mean(_per_site(each, brought)[0] if len(brought) else _on_own_classes(each, shares))
    return {
        "accuracy": whole.accuracy,
        **({"accuracy_clean": pooled(clean(splits.test, keep=False)).accuracy} if noisy else {}),
        **site_scores(mine, splits.site_tests, config.seed, last=last),
        "balanced_accuracy": whole.balanced,
        "loss": whole.loss,
        "per_class": recall_by_class(whole.answers),
        "accuracy_own": _mean(per_client),
        **_by_client("per_client", "worst_client", per_client, last=last),
        "validation_accuracy": validation,
        "validation_own": validation_own,
        **_metrics(whole, built.metrics, last=last),
    }


def _in_batches(built: Built, state: State, part: Part, *, keep: bool) -> Score:
    """Score one model, its batches side by side."""
    batch = forward_batch(built.net.device)
    batches = list(zip(part.x.split(batch), part.y.split(batch), strict=True))
    score = lambda net, i: score_model(net, state, *batches[i], built.dataset.num_classes, keep=keep)  # noqa: E731
    return pooled(built.engine.each(len(batches), score))


def site_scores(scores: Sequence[Score], site_tests: Sequence[Tensor], seed: int, *, last: bool = True) -> Event:
    """Score each client on the test examples that it brought: `scores` are of its model on the whole test set, or one.

    Empty where nobody brought any, or nobody shows them; null for a client without test examples.
    """
    if not len(site_tests) or site_tests[0].is_meta:
        return {}
    per_site, hits = _per_site(scores, site_tests)
    return _of_sites(per_site, _mean(hits), sizes_of(site_tests), seed, last=last)


def _per_site(scores: Sequence[Score], brought: Sequence[Tensor]) -> tuple[Floats, Floats]:
    """Return the accuracy of each client on what it brought, nan for nothing, and 1 for each right answer, else 0."""
    tests = Ragged.joined(brought, torch.cat)
    if len(scores) == 1:
        right = (scores[0].predicted == scores[0].labels)[tests.flat]
    else:
        right = torch.cat([(one.predicted == one.labels)[own] for one, own in zip(scores, tests, strict=True)])
    owner, hits = np.arange(len(tests)).repeat(tests.sizes), right.double().numpy()
    with np.errstate(invalid="ignore"):
        return np.bincount(owner, hits, minlength=len(tests)) / tests.sizes, hits


def _on_own_classes(scores: Sequence[Score], shares: Floats) -> Floats:
    """Return the accuracy on each client's mixture of classes, [N]: of its own model, or of the one that all have."""
    if len(scores) == 1:
        return scores[0].reweighted(shares)
    return np.array([score.reweighted(share) for score, share in zip(scores, shares, strict=True)])


def scores_from_sites(built: Built, state: State, right: Mapping[int, int], *, last: bool) -> Event:
    """Return what sites say of models on test examples that stay with them; empty where they do not.

    `right` is what they have answered in this round about the model of the round before. After the last round they are
    asked once more. A site that was not asked, or has not answered, has no score in that round.
    """
    if not (tests := built.splits.site_tests_elsewhere):
        return {}

    def told(right: Mapping[int, int], *, last: bool) -> Event:
        sizes, known = sizes_of(tests), sorted(right)
        per_site = np.array([right[one] / n if one in right and n else np.nan for one, n in enumerate(sizes)])
        together = sum(right.values()) / int(sizes[known].sum()) if known else None
        return _of_sites(per_site, together, sizes, built.config.seed, last=last)

    event = {BEFORE: told(right, last=False)} if right else {}
    if last:
        method, memory = built.algorithm, built.engine.memory
        own = lambda client: method.personal(built.net, state, client, memory.get(client))  # noqa: E731
        event |= told(built.engine.score_at_sites(own if method.personalised else lambda _: state), last=True)
    return event


def _of_sites(per_site: Floats, together: float | None, sizes: Ints, seed: int, *, last: bool) -> Event:
    """Return the scores of sites, by name; nan is not known."""
    told = last and len(sizes) <= CLIENTS_EVERY_ROUND  # of more of them the draws take long
    return {
        "accuracy_site": _mean(per_site),
        "accuracy_site_pooled": together,
        **_by_client("per_site", "worst_site", per_site, last=last),
        **({"per_site_interval": bootstrap_intervals(per_site, sizes * ~np.isnan(per_site), seed)} if told else {}),
    }


def _by_client(name: str, lowest: str, values: Floats, *, last: bool) -> Event:
    """Return a number of each client; of many, before the last round, the lowest alone: a log would be very long."""
    if last or len(values) <= CLIENTS_EVERY_ROUND:
        return {name: known_or_none(values)}
    known = values[~np.isnan(values)]
    return {lowest: float(known.min()) if len(known) else None}


def _mean(values: Floats) -> float | None:
    """Return the mean of those that are numbers, summed in their order."""
    known = values[~np.isnan(values)]
    return float(known.cumsum()[-1]) / len(known) if len(known) else None


def _keeps_outputs(built: Built, *, last: bool) -> bool:
    """Decide whether a round's outputs on the test set are kept, for metrics of probabilities."""
    copies = built.config.clients if built.partition.noise is not None or built.algorithm.personalised else 1
    numbers = copies * len(built.splits.test) * built.dataset.num_classes
    return numbers <= (NUMBERS_LAST_ROUND if last else NUMBERS_EVERY_ROUND)


def _metrics(score: Score, custom: Sequence[CustomMetric], *, last: bool) -> Event:
    """Compute the metrics of a round; null where the answers cannot decide one."""
    event: Event = {}
    for name, metric in TEST_METRICS.items():
        if metric.compute is None:
            continue
        most = CLASSES_OF_CONFUSION if metric.shape == "matrix" and last else CLASSES_EVERY_ROUND
        if metric.shape == "number" or score.num_classes <= most or (last and metric.shape == "by class"):
            event[name] = metric.compute(score.answers)
    return event | ({OWN: {metric.name: metric.ask(score.answers) for metric in custom}} if custom else {})
