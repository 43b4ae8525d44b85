"""A run that is ready to start: its parts, and the engine that they are put into."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnrfl.config import RunConfig
from fnrfl.core.words import counted
from fnrfl.data import scenarios
from fnrfl.data.datasets import Facts
from fnrfl.data.noise import feature_noise
from fnrfl.data.scaling import Scaling
from fnrfl.data.scenarios import SavedSplit
from fnrfl.engines.federation import Federation
from fnrfl.runs.custom_metrics import CustomMetric, load_custom_metrics, try_out
from fnrfl.runs.data import learns_from_public
from fnrfl.runs.passed import NOTHING_PASSED, PassedObjects
from fnrfl.runs.ray_run import ray_actors
from fnrfl.runs.setup.checks import notes
from fnrfl.runs.setup.engine import RunNetwork, ask_for_scaling, build_engine, refuse_without_network
from fnrfl.runs.setup.inputs import RunParts, gather_parts
from fnrfl.runs.setup.method import method_title


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
            f" {method_title(config)} learns from no {' or '.join(spare)} data; it is set aside so that all methods "
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

    `runs_alike` is how many runs of this process are about like this one. `scaling` is what clients have answered
    before, if the run goes on; else they are asked. `passed` are the objects that the config has labels of.
    `connection` leads to clients on other machines, and `parts` is what they and the server have agreed on.
    """
    refuse_without_network(config, connection)
    metrics = load_custom_metrics(config.metrics)
    parts = parts or gather_parts(config, passed)
    try_out(metrics, parts.splits.test.y, parts.dataset.num_classes)
    if parts.config.dataset.asks_for_means:
        scaling = scaling or ask_for_scaling(parts, connection)
        parts = parts.scaled_by(scaling)
    actors = ray_actors(parts, scaling, passed) if parts.config.engine.name == "ray" else None
    engine = build_engine(parts, scratch, runs_alike, connection or actors, scaling)
    parts = replace(parts, notices=(*parts.notices, *notes(parts)))
    values = {field.name: getattr(parts, field.name) for field in fields(parts)}
    return Built(**values, engine=engine, scaling=scaling, metrics=metrics, passed=passed, connection=connection)
