"""Metrics of the user's own: `module:function(probabilities, labels)`, a number for the log."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from fnrfl import usercode
from fnrfl.config.typed import show_value
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import choices
from fnrfl.rundir.record import RoundRecord
from fnrfl.runs.metrics import RunMetrics
from fnrfl.runs.quality import TEST_METRICS, Answers

OF_COMPARISONS = (
    "algorithm bytes_to_target control dataset difference fnr group metric model_sha256 n p penalty protocol run "
    "run_dir rounds_to_target scenario seconds_eval seconds_to_target seed seeds target"
)
# What a run, and a comparison of runs, has under a name: no function of a user's can have that name.
NAMES_OF_RESULTS = {*RoundRecord.__annotations__, *vars(RunMetrics), "personalised", "leaks", *OF_COMPARISONS.split()}

TRIED_EXAMPLES = 1000  # on which a function is tried out before anything is trained


@dataclass(frozen=True)
class CustomMetric:
    """A function of the user's; the metric has its name."""

    words: str  # module:function
    name: str
    function: Callable[[Any, Any], object]

    @property
    def higher_is_better(self) -> bool:
        """True unless the function has an attribute of this name that is not."""
        return bool(getattr(self.function, "higher_is_better", True))

    def as_json(self) -> dict[str, Any]:
        """Return what the log's first line says about it."""
        return {"function": self.words, "higher_is_better": self.higher_is_better}

    def ask(self, answers: Answers) -> float | None:
        """Return the value of the metric; None if the probabilities were not kept, or the value is not finite."""
        if answers.probabilities is None:
            return None
        said = f'metrics = "{self.words}"'
        with usercode.errors_in_words(
            f"{said} has failed", "correct it; it is called as function(probabilities, labels)."
        ):
            found = self.function(answers.probabilities.copy(), answers.labels.copy())  # which it may change
        if not isinstance(found, Real) or isinstance(found, bool):
            raise ConfigError(f"{said} has returned a {type(found).__name__}; it must return a number, as float(...).")
        return float(found) if math.isfinite(found) else None


def load_custom_metrics(words: str) -> tuple[CustomMetric, ...]:
    """Import the functions that `metrics` names; a name that is taken is refused."""
    if words == "none":
        return ()
    each = [str(one) for one in usercode.each_name("metrics", words)]
    if problems := list(_wrong_names(words, each)):
        raise ConfigError(" ".join(problems))
    return tuple(map(_load, each))


def _wrong_names(words: str, each: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with metrics: they are no functions of the user's, or their names are taken."""
    said, targets = f"metrics = {show_value(words)}", {one: usercode.target("metrics", one) for one in each}
    if others := [f'"{one}"' for one, target in targets.items() if target is None]:
        yield (
            f'{said} must name functions of yours, "module:function", joined by commas; not {", ".join(others)}. '
            "The metrics of `fnrfl list metrics` are in the log of every run and are not named here: --metric NAME of "
            "`fnrfl compare` and `fnrfl evaluate` shows one."
        )
    names = [one.rpartition(":")[2] for one in each]
    for name in dict.fromkeys(names):
        if name in TEST_METRICS:
            yield f"{said}: {name} is the name of a metric of fnrfl's. Rename the function."
        elif name in NAMES_OF_RESULTS:
            yield f"{said}: {name} is something else in the results of a run. Rename the function."
        elif names.count(name) > 1:
            yield f"{said} has two functions {name}, and a metric has its function's name. Rename one."


def typed_metrics(recorded: str, names: Sequence[str]) -> tuple[CustomMetric, ...]:
    """Import the functions that a run's config names, and those among the `names` that a user has typed."""
    given = [name for name in names if ":" in name]
    words = dict.fromkeys([*([] if recorded == "none" else usercode.each_name("metrics", recorded)), *given])
    together = ", ".join(map(str, words)) or "none"
    usercode.allow("metrics", ", ".join(given))
    return load_custom_metrics(together)


def select_metrics(names: Sequence[str], own: Sequence[CustomMetric], known: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the metrics to show, "all" for all of them; refuse one that there is not."""
    found: dict[str, None] = {}
    every = [*known, *(metric.name for metric in own)]
    for name in names:
        short = name.rpartition(":")[2]
        if name != "all" and short not in every:
            raise ConfigError(f'There is no metric "{name}" here. {choices(name, every)}, or give module:function.')
        found |= dict.fromkeys(every if name == "all" else [short])
    return tuple(found)


def _load(words: str) -> CustomMetric:
    said, target = f'metrics = "{words}"', usercode.target("metrics", words)
    function = usercode.fetch(said, target)
    if target is None or not callable(function):
        raise ConfigError(f"{said} is a {type(function).__name__}; it must be a function(probabilities, labels).")
    return CustomMetric(words, target.name, function)


def try_metrics(metrics: Sequence[CustomMetric], labels: Tensor, num_classes: int) -> None:
    """Try each function on made-up probabilities, so that one that fails is refused before anything is trained."""
    if metrics:
        known = labels[:TRIED_EXAMPLES].cpu().numpy()
        shares = 0.5 * np.eye(num_classes)[known] + 0.5 / num_classes
        for metric in metrics:
            metric.ask(Answers.of_probabilities(shares, known))
