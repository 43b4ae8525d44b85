"""From a config to the things a run is made of; whatever cannot go together is refused here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnrfl.algorithms.parts.norms import num_refined
from fnrfl.config import RunConfig
from fnrfl.config.schema import PublicOptions
from fnrfl.core.words import counted
from fnrfl.data import scenarios
from fnrfl.data.datasets import Facts
from fnrfl.data.partition.by_client import some_of
from fnrfl.data.partition.views import Splits
from fnrfl.data.reading import Columns
from fnrfl.data.scaling import Scaling, looks_unscaled
from fnrfl.data.scenarios import SavedSplit
from fnrfl.engines.federation import Federation
from fnrfl.runs.build_engine import RunNetwork, ask_for_scaling, build_engine, refuse_without_network
from fnrfl.runs.cohorts import cohort_size, num_answers
from fnrfl.runs.custom_metrics import CustomMetric, load_custom_metrics, try_out
from fnrfl.runs.data import feature_noise, learns_from_public
from fnrfl.runs.needs import method_in_words
from fnrfl.runs.parts import RunParts, gather_parts
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.ray_run import ray_actors


@dataclass(frozen=True)
class Built(RunParts):
    """Everything a run needs, and the config with nothing left to choose."""

    engine: Federation
    scaling: Scaling | None
    metrics: tuple[CustomMetric, ...]  # of the user
    passed: PassedObjects = NOTHING_PASSED
    connection: RunNetwork | None = None

    @property
    def facts(self) -> Facts:
        """What a run remembers of its data."""
        facts = self.dataset.facts(tokens=not self.net.input_dtype.is_floating_point)
        return replace(facts, clients=self.partition.ids)

    @property
    def on_split(self) -> tuple[str, ...]:
        """Which column is the label and how much is set aside, for whom; empty if there is nothing to say."""
        columns, config, total = self.dataset.columns, self.config, len(self.splits.train)
        label = f" with classes from the column {columns.label!r}" if columns else ""
        aside = {name: len(held) for name, held in self.splits.set_aside.items() if len(held)}
        examples = f"{counted(total, 'training example')}{label}"
        if not aside:
            return (f"The clients share all {examples}.",) if label else ()
        listed = " and ".join(f"{count:,} as {name} data" for name, count in aside.items())
        learnt = {"public": learns_from_public(self.algorithm), "validation": "distill" in self.algorithm.needs}
        spare = [name for name in aside if not learnt[name]]
        words = " ".join(f"{name}.size=0" for name in spare)
        why = (
            f" {method_in_words(config)} learns from no {' or '.join(spare)} data; it is set aside so that all methods "
            f"train on the same examples. To train on it, unless another method needs it: {words}."
        )
        fixed = isinstance(scenarios.parse(config.scenario).split, SavedSplit)  # by a file
        rest = f"{total - sum(aside.values()):,}.{'' if fixed or not spare else why}"
        return (f"Of {examples}, {listed} are set aside; the clients share the other {rest}",)

    def noise(self, client: int, x: Tensor, stream: torch.Generator) -> Tensor:
        """A client's feature noise over a batch."""
        return feature_noise(self.partition, client, x, stream)

    def manifest(self) -> dict[str, Any]:
        """Which example goes to whom, and what is set aside, with hashes: the content of partition.json."""
        return self.partition.manifest() | {"splits": self.splits.manifest()}


def build(
    config: RunConfig,
    scratch: Path | None = None,
    runs_alike: int | None = None,
    scaling: Scaling | None = None,
    passed: PassedObjects = NOTHING_PASSED,
    connection: RunNetwork | None = None,
    parts: RunParts | None = None,
) -> Built:
    """Load, draw, split, wrap and check; `scratch` is a folder for what does not fit in memory.

    `runs_alike` is how many runs of this process are about like this one.
    `scaling` is what clients have answered before, if the run goes on; else they are asked. `given` are the objects
    that the config has words for. `connection` leads to clients on other machines, and `parts` is what they and the
    server have agreed on.
    """
    refuse_without_network(config, connection)
    metrics = load_custom_metrics(config.metrics)
    parts = parts or gather_parts(config, passed)
    try_out(metrics, parts.splits.test.y, parts.dataset.num_classes)
    if parts.config.dataset.asks_for_means:
        columns = parts.dataset.columns
        scaling = scaling or ask_for_scaling(parts.config, parts.net, parts.pool, columns, connection)
        parts = parts.scaled_by(scaling)
    made = (parts.config, parts.algorithm, parts.net, parts.pool)
    actors = ray_actors(parts, scaling, passed) if parts.config.engine.name == "ray" else None
    engine = build_engine(*made, scratch, runs_alike, connection or actors, scaling)
    notices = (*parts.notices, *_notices(parts))
    told = vars(parts) | {"notices": notices}
    return Built(**told, engine=engine, scaling=scaling, metrics=metrics, passed=passed, connection=connection)


def _notices(parts: RunParts) -> tuple[str, ...]:
    """What a user should know once, before the first round."""
    config, splits, dataset, said = parts.config, parts.splits, parts.dataset, []
    size = config.public.size
    if config.public.source != "train" and size != PublicOptions.size:
        said.append(
            f'public.size = {size} is not used: all of public.source = "{config.public.source}" is public. '
            'It says how much is set aside with public.source = "train".'
        )
    cohort = num_answers(config)
    if config.fnr is not None and not num_refined(cohort, config.fnr.share):
        whom = "a cohort of" if cohort == cohort_size(config) else "those that answer,"
        said.append(f"fnr.share = {config.fnr.share} of {whom} {cohort} is nobody: no client will be refined.")
    if config.fnr is not None and splits.public_to != "nobody":
        said.append(f"with {config.algorithm.name}, FNR ranks and refines on examples that clients have trained on.")
    more = (*_rows_that_sums_tell(config, splits), *_unscaled_inputs(config, splits, dataset.columns))
    return (*said, *_missing_classes(parts), *more)


def _missing_classes(parts: RunParts) -> Iterator[str]:
    """Notices on classes that one part of the data has and another has not: one may be spelt in two ways."""
    config, splits, names = parts.config, parts.splits, parts.dataset.classes
    held = torch.from_numpy(parts.partition.counts.any(0)).nonzero() if splits.train.y.is_meta else splits.train.y
    train, test, public = (set(y.unique().tolist()) for y in (held, splits.test.y, splits.public.y))
    if len(train) == 1:
        yield f"All training examples are of one class, {names[min(train)]!r}: there is nothing to learn."
    if strange := [names[label] for label in sorted(test - train)]:
        yield (
            f"The test part has {counted(len(strange), 'class', 'classes')} without a training example "
            f"({some_of(strange)}): no model can know them."
        )
    if config.fnr is not None and public and (unseen := [names[label] for label in sorted(train - public)]):
        yield (
            f"Public data has no example of {counted(len(unseen), 'class', 'classes')} ({some_of(unseen)}): FNR "
            "neither measures nor refines them."
        )


def _unscaled_inputs(config: RunConfig, splits: Splits, columns: Columns | None) -> tuple[str, ...]:
    """A notice if columns of numbers are not scaled and look as if they should be."""
    x = splits.train.x
    shown = config.dataset.scale == "none" and x.ndim == 2 and not x.is_meta  # examples of sites are not here
    found = looks_unscaled(x, columns) if shown else None
    tokens = x.dtype == torch.int64  # perhaps
    return (f'{found} Training is easier with dataset.scale = "standard".',) if found and not tokens else ()


def _rows_that_sums_tell(config: RunConfig, splits: Splits) -> tuple[str, ...]:
    """A notice if clients hold one row of a table, and are asked for the sums of its columns."""
    single = [str(client) for client in np.flatnonzero(splits.sizes == 1)]
    if not config.dataset.asks_for_means or not single or splits.train.x.ndim > 2:
        return ()
    standard = config.dataset.scale == "standard"
    return (
        f"of each client that holds one example ({some_of(single)}) the server learns that example: "
        f'{"dataset.scale = " if standard else "dataset.missing = "}"{"standard" if standard else "mean"}" asks for '
        "the mean of every column.",
    )
