"""What a run must have before it may start, and what its user should know: two tables of rules, looked at in order.

A row has the key to change, a predicate that finds what breaks the rule, and a sentence with the value, the rule and
the way out, in which `found` is what the predicate returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.norms import num_peers, num_refined
from fnrfl.config import RunConfig, registry
from fnrfl.config.schema import PublicOptions
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.net import Net
from fnrfl.core.training import BALANCED, NONE, read_class_weights
from fnrfl.core.words import counted
from fnrfl.data.datasets import Dataset
from fnrfl.data.noise import mask
from fnrfl.data.partition.by_client import some_of
from fnrfl.data.partition.value import Partition
from fnrfl.data.partition.views import Splits
from fnrfl.data.scaling import looks_unscaled
from fnrfl.runs.setup.method import cohort_size, method_title, num_answers

MAX_THREADS = 1024  # whatever the machine: a run may go on elsewhere
MAX_FILLED = 2**16  # examples of a batch that may be filled by repeating fewer: of a small data set, any usual batch
USUAL_NUMBERED, FEW = 10, 10  # classes that are numbers, and examples of one: more, of fewer, may be amounts
MAX_SEEN = 2**31  # examples that a client sees in a round: more cannot be planned at once


@dataclass(frozen=True)
class Passes:
    """Passes over some data in batches, as a section of the config has them."""

    section: str  # "client" or "fnr"
    whose: str
    examples: int
    total: int  # examples that there are for all
    epochs: int
    batch: int
    train_mode: bool

    def smallest(self, last_batch: str) -> int:
        """Return the size of the smallest batch."""
        rest = self.examples % self.batch
        return rest if last_batch == "keep" and rest else self.batch


@dataclass(frozen=True)
class Candidate:
    """The parts of a run that rules are about, before it may start."""

    config: RunConfig
    dataset: Dataset
    partition: Partition
    splits: Splits
    algorithm: Algorithm
    net: Net

    @property
    def needs(self) -> frozenset[str]:
        return self.algorithm.needs

    @property
    def method(self) -> str:
        return method_title(self.config)

    @property
    def tokens(self) -> bool:
        """Whether the model takes whole numbers as they are."""
        return not self.net.input_dtype.is_floating_point

    @cached_property
    def passes(self) -> tuple[Passes, ...]:
        """Local training of the first client of every size, and refinement."""
        config, client, held, train = self.config, self.config.client, self.splits.sizes, "client"
        total = int(held.sum())
        found = [
            Passes(train, f"client {number}", int(held[number]), total, client.epochs, client.batch, True)
            for number in np.sort(np.unique(held, return_index=True)[1])
        ]
        if (fnr := config.fnr) is not None and fnr.when != "local":
            public, whose, trains = len(self.splits.public), "a refined client", fnr.batchnorm != "frozen"
            found.append(Passes("fnr", whose, public, public, fnr.epochs, fnr.batch, trains))
        return tuple(found)

    @cached_property
    def labels(self) -> tuple[set[int], set[int], set[int]]:
        """Classes of the training, test and public examples."""
        train, splits = self.splits.train.y, self.splits
        held = torch.from_numpy(self.partition.counts.any(0)).nonzero() if train.is_meta else train
        sets = [set(y.unique().tolist()) for y in (held, splits.test.y, splits.public.y)]
        return sets[0], sets[1], sets[2]

    def listed(self, labels: set[int]) -> str:
        """Return how many classes there are among labels, and their names; "" if there are none."""
        names = [self.dataset.classes[label] for label in sorted(labels)]
        return f"{counted(len(names), 'class', 'classes')} ({some_of(names)})" if names else ""


@dataclass(frozen=True)
class Rule:
    """A row of a table."""

    key: str  # of the config: what to change
    found: Callable[[Candidate], Any]  # what breaks the rule; nothing, zero or False if it is kept
    sentence: str  # with the value, the rule and the way out

    def broken(self, run: Candidate) -> str | None:
        """Return the sentence for a run that breaks the rule, else None."""
        found = self.found(run)
        return self.sentence.format(run=run, config=run.config, found=found) if found else None


def check_rules(run: Candidate) -> None:
    """Raise the sentence of the first rule that a run breaks."""
    for sentence in filter(None, (rule.broken(run) for rule in RULES)):
        raise CompatibilityError(sentence)
    if run.partition.noise is not None and run.partition.noise.kind == "mask":
        mask(0, run.config.clients, tuple(run.splits.train.x.shape[1:]))  # refuses examples that are no images


def notes(run: Candidate) -> tuple[str, ...]:
    """Return what a user should know, once, before the first round."""
    return tuple(filter(None, (rule.broken(run) for rule in NOTES)))


# -- predicates that are longer than a line ----------------------------------------------------------------------------


def _lacks_public_labels(run: Candidate) -> str:
    """Return how to do without labelled public data if they are needed and lacking."""
    if "public-labels" not in run.needs or len(run.splits.public):
        return ""
    only_fnr = isinstance(run.algorithm, FNR) and "public-labels" not in run.algorithm.inner.needs
    return "fnr = off" if only_fnr else "algorithm = fedavg"


def _wrong_weights(run: Candidate) -> dict[str, Any] | None:
    text, classes = run.config.client.class_weights, run.partition.counts.shape[1]
    count = 0 if text in (NONE, BALANCED) else len(read_class_weights(text))
    return {"numbers": counted(count, "number"), "classes": classes} if count not in (0, classes) else None


def _nobody_to_learn_from(run: Candidate) -> dict[str, Any] | None:
    """A refined client needs another one to take targets from; in some rounds it may have none, but not in all."""
    fnr, answer = run.config.fnr, num_answers(run.config)
    if fnr is None or fnr.when == "local" or not fnr.weight:
        return None
    refined = num_refined(answer, fnr.share)
    if not refined or num_peers(answer, refined, fnr.target):
        return None
    others = fnr.target == "others"
    return {
        "refined": refined,
        "answer": answer,
        "who": "the clients that are not refined" if others else "all other clients",
        "way": "fnr.target = all" if others and answer > 1 else "more clients",
    }


def _filled_by_repeating(run: Candidate) -> Passes | None:
    passes = run.passes if run.config.client.last_batch == "run-on" else ()
    return next((one for one in passes if one.batch > max(MAX_FILLED, one.epochs * one.total)), None)


def _cannot_train_on_one(run: Candidate) -> dict[str, Any] | None:
    """Try the model on a batch of one example if there will be one: BatchNorm over single numbers cannot."""
    last_batch, net = run.config.client.last_batch, run.net
    single = (one for one in run.passes if one.epochs and one.train_mode and one.smallest(last_batch) == 1)
    if (passes := next(single, None)) is None:
        return None
    one = torch.zeros(1, *net.input_shape, dtype=net.input_dtype)  # of whole numbers: tokens
    masks = {name: torch.ones(1, *shape) for name, shape in net.drop_shapes.items()}
    try:
        with torch.no_grad():
            net.apply(*net.flatten(), one, mode="batch", masks=masks)
    except (ValueError, RuntimeError) as error:
        keeps = last_batch != "run-on" and passes.batch > 1
        run_on = ', or client.last_batch = "run-on", which makes no small ones' if keeps else ""
        return {"error": error, "of": passes, "examples": counted(passes.examples, "example"), "run_on": run_on}
    return None


def _smaller_than_a_batch(run: Candidate) -> dict[str, Any] | None:
    client = int(run.splits.sizes.argmin())
    held = int(run.splits.sizes[client])
    if run.config.client.last_batch != "drop" or held >= run.config.client.batch:
        return None
    return {"client": client, "examples": counted(held, "example")}


RULES = (
    Rule("model.features", lambda run: "features" in run.needs and not run.net.has_features,
         '{run.method} needs features and model = "{config.model.name}" calls no Linear layer to take them from. Name '
         "the layer whose output they are with model.features."),
    Rule("model", lambda run: "head" in run.needs and not run.net.has_head,
         '{run.method} needs a last Linear that reads the features, and model = "{config.model.name}" has none. Choose '
         "another model, or set model.features = auto."),
    Rule("model", lambda run: "batchnorm" in run.needs and not run.net.batchnorm,
         '{run.method} works on BatchNorm layers, and model = "{config.model.name}" has none. Choose a model with '
         'BatchNorm, such as "cnn(norm=batch)", or algorithm = fedavg.'),
    Rule("public.size", lambda run: "distill" in run.needs and not len(run.splits.distill),
         "{run.method} needs public data to distil on and there is none. Set public.size = 0.1 and leave "
         "public.distill at auto, or give public.source."),
    Rule("public.size", _lacks_public_labels,
         "{run.method} needs labelled public data and there is none. Set public.size = 0.1, give public.source, or set "
         "{found}."),
    Rule("stop", lambda run: run.config.stop_rule.patience and not len(run.splits.validation),
         'stop = "{config.stop}" waits for a better value on validation data, and there is none. Set validation.size = '
         "0.1, or stop = never."),
    Rule("stop",
         lambda run: run.config.engine.name == "flower" and run.algorithm.personalised
         and run.config.stop_rule.keeps_best,
         'stop = "{config.stop}" keeps the best model, and with {run.method} the models are those of clients on other '
         'machines, which keep their last ones. Set stop = "patience({config.stop_rule.patience})".'),
    Rule("client.optimizer", lambda run: "linear-optimiser" in run.needs and run.config.client.optimizer != "sgd",
         "{run.method} needs local steps that are linear in the gradients, and client.optimizer = "
         '"{config.client.optimizer}" is not. Set client.optimizer = "sgd".'),
    Rule("dataset.missing",
         lambda run: run.config.dataset.missing == "mean" and not run.splits.train.x.is_floating_point(),
         'dataset.missing = "mean" is about numbers of which some are not known, and dataset = "{config.dataset.name}" '
         'holds pixels or whole numbers, of which none is missing. Set dataset.missing = "refuse".'),
    Rule("dataset.scale", lambda run: run.config.dataset.scale != "none" and run.tokens,
         'dataset.scale = "{config.dataset.scale}" changes the numbers of the examples, and model = '
         '"{config.model.name}" takes whole numbers as they are (tokens). Set dataset.scale = "none".'),
    Rule("client.class_weights", _wrong_weights,
         'client.class_weights has {found[numbers]} and dataset = "{config.dataset.name}" has {found[classes]} classes;'
         " there must be one for each class. Give as many, in the order of the classes."),
    Rule("scenario", lambda run: run.partition.noise is not None and run.tokens,
         'scenario = "{config.scenario}" adds noise to features, and model = "{config.model.name}" takes whole numbers '
         "as they are (tokens), which noise would turn into others. Choose a scenario without feature noise."),
    Rule("scenario",
         lambda run: run.splits.public_to == "everybody" and (noise := run.partition.noise) and not noise.redraw,
         '{run.method} gives the same public examples to every client, and under scenario = "{config.scenario}" an '
         "example keeps the noise of one. Leave out redraw=false."),
    Rule("fnr.share", _nobody_to_learn_from,
         "fnr.share = {config.fnr.share} refines {found[refined]} of the {found[answer]} that answer in a round, and "
         "fnr.target = {config.fnr.target} takes targets from {found[who]}: there are none. Set a smaller fnr.share, "
         "{found[way]}, or fnr.weight = 0, which refines without targets."),
    Rule("engine.threads",
         lambda run: run.config.engine.threads != "auto" and run.config.engine.threads > MAX_THREADS,
         "engine.threads = {config.engine.threads} are more than any machine has use for; "
         f"{MAX_THREADS} are the most. Set engine.threads = auto, a thread for each core."),
    Rule("client.epochs",
         lambda run: next((one for one in run.passes if one.epochs * one.examples > MAX_SEEN), None),
         "{found.section}.epochs = {found.epochs} passes over the {found.examples} examples of {found.whose} are more "
         f"than can be planned for a round; {MAX_SEEN} examples are the most. Set fewer, and more rounds."),
    Rule("client.batch", _filled_by_repeating,
         "{found.section}.batch = {found.batch} is more than {found.epochs} passes over all {found.total} examples, "
         'and client.last_batch = "run-on" would fill a batch by repeating them. Set a smaller batch, or '
         'client.last_batch = "keep".'),
    Rule("client.batch", _cannot_train_on_one,
         'model = "{config.model.name}" cannot be trained on a batch of one example ({found[error]}), and '
         "{found[of].whose} has such a batch: {found[examples]} by {found[of].section}.batch = {found[of].batch}. Set "
         "a larger batch{found[run_on]}."),
    Rule("scenario", lambda run: [str(client) for client in np.flatnonzero(run.partition.sizes == 0)],
         'Under scenario = "{config.scenario}" client {found[0]} has no examples. Set a minimum, another seed or '
         "fewer clients."),
    Rule("client.last_batch", _smaller_than_a_batch,
         "Client {found[client]} has {found[examples]}, less than one batch of {config.client.batch}, so with "
         'client.last_batch = "drop" it would never train. Use "run-on", or a smaller client.batch.'),
)  # fmt: skip


def _refines_nobody(run: Candidate) -> str:
    """Return of whom the share is nobody."""
    config, cohort = run.config, num_answers(run.config)
    if config.fnr is None or num_refined(cohort, config.fnr.share):
        return ""
    return f"{'a cohort of' if cohort == cohort_size(config) else 'those that answer,'} {cohort}"


def _never_refined(run: Candidate) -> str:
    train, _, public = run.labels
    return run.listed(train - public) if run.config.fnr is not None and public else ""


def _told_by_sums(run: Candidate) -> dict[str, str] | None:
    """Clients that hold one row of a table, of which the sums of columns are asked."""
    single = [str(client) for client in np.flatnonzero(run.splits.sizes == 1)]
    options = run.config.dataset
    if not options.asks_for_means or not single or run.splits.train.x.ndim > 2:
        return None
    return {"who": some_of(single), "asks": 'scale = "standard"' if options.scale == "standard" else 'missing = "mean"'}


def _unscaled(run: Candidate) -> str | None:
    """Columns of numbers that are not scaled and look as if they should be."""
    x = run.splits.train.x
    looked_at = run.config.dataset.scale == "none" and x.ndim == 2 and not x.is_meta  # examples of sites are not here
    return looks_unscaled(x, run.dataset.columns) if looked_at and x.dtype != torch.int64 else None  # tokens, perhaps


def _look_like_amounts(run: Candidate) -> str:
    """Return labels that are many whole numbers, of which a quarter are rare, as days in hospital; "" for others."""
    names, counts = run.dataset.classes, np.sort(run.partition.counts.sum(0))
    if len(names) <= USUAL_NUMBERED or not all(name.removeprefix("-").isdecimal() for name in names):
        return ""
    rare = counts[(len(names) - 1) // 4] < max(FEW, counts[-1] / 20)
    return f"{len(names)} whole numbers from {min(names, key=int)} to {max(names, key=int)}" if rare else ""


@torch.no_grad()
def _answers_probabilities(run: Candidate) -> bool:
    """Whether a user's model answers probabilities, where the loss takes logits."""
    if not registry.is_own_model(run.config.model.name):
        return False
    x = torch.zeros(2, *run.net.input_shape, dtype=run.net.input_dtype, device=run.net.device)
    if not run.tokens:  # of zeros alone a last layer may answer its biases, which can be anything
        x[1] = 1
    logits = run.net.eval_forward(*run.net.flatten(), x).logits
    return bool((logits >= 0).all() and (logits.sum(1) - 1).abs().max() < 1e-4)


NOTES = (
    Rule("model", _answers_probabilities,
         "the model's answers are probabilities: it seems to end in a Softmax. The loss has one already, and with both "
         "a model learns slowly. Remove the layer."),
    Rule("public.size",
         lambda run: run.config.public.source != "train" and run.config.public.size != PublicOptions.size,
         'public.size = {config.public.size} is not used: all of public.source = "{config.public.source}" is public. '
         'It says how much is set aside with public.source = "train".'),
    Rule("fnr.share", _refines_nobody,
         "fnr.share = {config.fnr.share} of {found} is nobody: no client will be refined."),
    Rule("fnr", lambda run: run.config.fnr is not None and run.splits.public_to != "nobody",
         "with {config.algorithm.name}, FNR ranks and refines on examples that clients have trained on."),
    Rule("dataset", lambda run: [run.dataset.classes[one] for one in run.labels[0]] if len(run.labels[0]) == 1 else "",
         "All training examples are of one class, {found[0]!r}: there is nothing to learn."),
    Rule("dataset", _look_like_amounts,
         "fnrfl is for classification only, and the labels look like amounts: {found}, many of them rare. Each is one "
         "class, without order. If they are amounts, make a few classes of them, such as with numpy.digitize."),
    Rule("dataset", lambda run: run.listed(run.labels[1] - run.labels[0]),
         "The test part has {found} without a training example: no model can know them."),
    Rule("public.size", _never_refined,
         "Public data has no example of {found}: FNR neither measures nor refines them."),
    Rule("dataset.scale", _told_by_sums,
         "of each client that holds one example ({found[who]}) the server learns that example: dataset.{found[asks]} "
         "asks for the mean of every column."),
    Rule("dataset.scale", _unscaled, '{found} Training is easier with dataset.scale = "standard".'),
)  # fmt: skip
