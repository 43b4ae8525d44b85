"""How good the models are after a round: test accuracy in all its forms, validation accuracy, and metrics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.feed import forward_batch
from fnrfl.core.ndarrays import Floats, Ragged
from fnrfl.core.net import Net
from fnrfl.core.quality import known_or_none, recall_by_class
from fnrfl.core.rng import elsewhere, generator
from fnrfl.core.types import State
from fnrfl.data.batches import scaled
from fnrfl.rundir.events import Event
from fnrfl.runs.build import Built
from fnrfl.runs.evaluate import Score, evaluate_model, pooled
from fnrfl.runs.round_metrics import keeps_outputs, logged_metrics

CLIENTS_EVERY_ROUND = 1_000  # with more of them, the log has a number for each of them in the last round alone


def score_models(built: Built, state: State, *, last: bool = True) -> Event:
    """Test accuracy in all its forms, validation accuracy, and metrics; `last` says whether this is the last round.

    With feature noise the test set is what the clients see together: one copy under each client's noise.
    """
    config, partition, classes = built.config, built.partition, built.dataset.num_classes
    clean_only = config.leaks.clean_test_for_fnr and config.fnr is not None
    keep = keeps_outputs(built, last=last)

    def noisy(net: Net, client: int, name: str, x: Tensor, y: Tensor) -> Score:
        stream = elsewhere(generator(config.seed, client, name, "feature-noise"), net.device)
        return evaluate_model(net, state, x, y, classes, lambda xs: built.noise(client, xs, stream), keep=keep)

    def clean(x: Tensor, y: Tensor) -> Score:
        batch = forward_batch(built.net.device)
        parts = list(zip(x.split(batch), y.split(batch), strict=True))
        score = lambda net, i: evaluate_model(net, state, *parts[i], classes, keep=keep)  # noqa: E731
        return pooled(built.engine.each(len(parts), score))

    def copies(name: str, x: Tensor, y: Tensor) -> list[Score]:
        if partition.noise is None or clean_only:
            return [clean(x, y)]
        return built.engine.each(config.clients, lambda net, client: noisy(net, client, name, x, y))

    if built.algorithm.personalised:
        return _personal_scores(built, state, last=last)
    test = copies("test", built.splits.test.x, built.splits.test.y)
    whole = pooled(test)
    shares = partition.counts / partition.counts.sum(1, keepdims=True)
    if len(test) == 1:
        per_client = test[0].reweighted(shares)
    else:
        per_client = np.array([score.reweighted(mine) for score, mine in zip(test, shares, strict=True)])
    validation = built.splits.validation
    judged = pooled(copies("validation", validation.x, validation.y)).accuracy if len(validation) else None
    apart = {"accuracy_clean": clean(built.splits.test.x, built.splits.test.y).accuracy} if len(test) > 1 else {}
    sites = site_scores(test, built.splits.site_tests, last=last)
    own = own_scores(per_client, last=last)
    return _score_event(whole, own, judged, apart | sites) | logged_metrics(whole, built.metrics, last=last)


def _personal_scores(built: Built, state: State, *, last: bool) -> Event:
    """The scores where clients use models of their own: each on the whole test set, and on its own distribution.

    With feature noise the test set has every client's noise in it, example by example; a client's own has its own.
    """
    config, partition, splits = built.config, built.partition, built.splits
    noisy = partition.noise is not None and not (config.leaks.clean_test_for_fnr and config.fnr is not None)
    keep = keeps_outputs(built, last=last)

    def mixed(name: str, x: Tensor) -> Tensor:
        """Example j under the noise of client j mod N."""
        x = scaled(x, built.net.input_dtype)
        if noisy:
            x = x.clone()
            for client in range(config.clients):
                stream = generator(config.seed, client, name, "feature-noise")
                x[client :: config.clients] = built.noise(client, x[client :: config.clients], stream)
        return x

    def score(net: Net, client: int, x: Tensor, y: Tensor, own: bool = False) -> Score:
        model = built.algorithm.personal(net, state, client, built.engine.memory.get(client))
        stream = elsewhere(generator(config.seed, client, "test", "feature-noise"), net.device)
        noise = (lambda xs: built.noise(client, xs, stream)) if own else None
        return evaluate_model(net, model, x, y, built.dataset.num_classes, noise, keep=keep)

    def everybody(x: Tensor, y: Tensor, own: bool = False) -> list[Score]:
        return built.engine.each(config.clients, lambda net, client: score(net, client, x, y, own))

    test = everybody(mixed("test", splits.test.x), splits.test.y)
    mine = everybody(splits.test.x, splits.test.y, own=True) if noisy else test
    shares = partition.counts / partition.counts.sum(1, keepdims=True)
    per_client = np.array([one.reweighted(part) for one, part in zip(mine, shares, strict=True)])
    whole, judged = pooled(test), None
    if len(splits.validation):
        judged = pooled(everybody(mixed("validation", splits.validation.x), splits.validation.y)).accuracy
    apart = {"accuracy_clean": pooled(everybody(splits.test.x, splits.test.y)).accuracy} if noisy else {}
    apart |= site_scores(mine, splits.site_tests, last=last)
    own = own_scores(per_client, last=last)
    return _score_event(whole, own, judged, apart) | logged_metrics(whole, built.metrics, last=last)


def site_scores(scores: Sequence[Score], site_tests: Sequence[Tensor], *, last: bool = True) -> Event:
    """Each client on the test examples that it brought: `scores` are those of its model on the whole test set, or one.

    Empty where nobody brought any; null for a client without test examples.
    """
    if not len(site_tests):
        return {}
    tests = Ragged.joined(site_tests, torch.cat)
    if len(scores) == 1:
        right = (scores[0].predicted == scores[0].labels)[tests.flat]
    else:
        right = torch.cat([(one.predicted == one.labels)[own] for one, own in zip(scores, tests, strict=True)])
    owner, hits = np.arange(len(tests)).repeat(tests.sizes), right.double().numpy()
    with np.errstate(invalid="ignore"):
        per_site = np.bincount(owner, hits, minlength=len(tests)) / tests.sizes
    return {
        "accuracy_site": _mean(per_site),
        "accuracy_site_pooled": _mean(hits),
        **_by_client("per_site", "worst_site", per_site, last=last),
    }


def own_scores(per_client: Floats, *, last: bool) -> Event:
    """Each client on its own mixture of classes."""
    return {"accuracy_own": _mean(per_client), **_by_client("per_client", "worst_client", per_client, last=last)}


def _by_client(name: str, lowest: str, values: Floats, *, last: bool) -> Event:
    """A number of each client; of many clients, before the last round, the lowest alone: a log would be very long."""
    if last or len(values) <= CLIENTS_EVERY_ROUND:
        return {name: known_or_none(values)}
    known = values[~np.isnan(values)]
    return {lowest: float(known.min()) if len(known) else None}


def _score_event(whole: Score, own: Event, judged: float | None, apart: Event) -> Event:
    """Scores as the log has them."""
    return {
        "accuracy": whole.accuracy,
        **apart,
        "balanced_accuracy": whole.balanced,
        "loss": whole.loss,
        "per_class": recall_by_class(whole.answers),
        **own,
        "validation_accuracy": judged,
    }


def _mean(values: Floats) -> float | None:
    """The mean of those that are numbers; summed in their order."""
    known = values[~np.isnan(values)]
    return float(known.cumsum()[-1]) / len(known) if len(known) else None
