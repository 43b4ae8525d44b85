"""How good answers are: every metric by name, with its meaning and direction, and functions of the user's own.

`docs/metrics.md` has the formulas. A metric that the answers cannot decide, such as the AUC of one class, is None.
Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from typing import Any, Literal

import numpy as np

from fnrfl import usercode
from fnrfl.config.typed import show_value
from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import Floats, Ints
from fnrfl.core.rng import numpy_generator
from fnrfl.core.words import choices
from fnrfl.rundir.record import RoundRecord
from fnrfl.runs.metrics import RunMetrics

NUM_BINS = 15  # of the calibration error: equal ones from 0 to 1, each with its upper edge
EDGES = np.linspace(0.0, 1.0, NUM_BINS + 1)[1:-1]  # between them
DRAWS = 1_000  # of an interval by bootstrap
SPECIFICITY = 0.95  # at least, where the sensitivity is read off
SMALLEST = float(np.finfo(np.float64).eps)  # a probability below it counts as this much in the log-loss


@dataclass(frozen=True, eq=False)
class Answers:
    """What models said about labelled examples, and what was right."""

    predicted: Ints  # [n]; an output beyond the classes is no class, and always wrong
    labels: Ints  # [n]
    num_classes: int
    probabilities: Floats | None = None  # [n, C]; None: they were not kept

    @classmethod
    def of_probabilities(cls, probabilities: Floats, labels: Ints) -> Answers:
        """The likeliest class is the answer; of equal ones, the first."""
        return cls(probabilities.argmax(1), labels, probabilities.shape[1], probabilities)

    @cached_property
    def confusion(self) -> Ints:
        """How often examples of a class got which answer, [C, C + 1]: a row is a class, the last column no class."""
        columns = self.num_classes + 1
        at = self.labels * columns + np.minimum(self.predicted, self.num_classes)
        return np.bincount(at, minlength=self.num_classes * columns).reshape(self.num_classes, columns)

    @cached_property
    def right(self) -> Ints:
        """Right answers of every class, [C]."""
        return self.confusion.diagonal()

    @cached_property
    def count(self) -> Ints:
        """Examples of every class, [C]."""
        found: Ints = self.confusion.sum(1)
        return found

    @cached_property
    def said(self) -> Ints:
        """How often every class was the answer, [C]."""
        found: Ints = self.confusion[:, :-1].sum(0)
        return found

    @cached_property
    def recall(self) -> Floats:
        """Share of right answers of every class, [C]; nan for one without examples."""
        return _ratio(self.right, self.count)

    @cached_property
    def f1(self) -> Floats:
        """F1 of every class, [C]; nan for one that neither the labels nor the answers have."""
        return _ratio(2 * self.right, self.count + self.said)

    @cached_property
    def shares(self) -> Floats | None:
        """The probabilities; None where there are none, or some is no number."""
        found = self.probabilities
        return None if found is None or not len(found) or not np.isfinite(found).all() else found

    @cached_property
    def ranking(self) -> Ranking | None:
        """How examples stand by the probability of each class that has both sides; None where no class has."""
        if (shares := self.shares) is None:
            return None
        classes = np.flatnonzero((self.count > 0) & (self.count < len(shares)))
        if not len(classes):
            return None
        return Ranking.of(shares.T[classes], self.labels, classes, self.count[classes], self.num_classes == 2)


@dataclass(frozen=True, eq=False)
class Ranking:
    """Where every example stands among all by its score for its own class, one class against the rest.

    Scores may be equal: each number counts examples below a score, or below and at it.
    """

    row: Ints  # [n], whose class it is: its place among K classes
    below: Ints  # [n], examples with a lower score
    up_to: Ints  # [n], examples with this score or a lower one
    own_below: Ints  # [n], examples of the class with a lower score
    positives: Ints  # [K], examples of the class
    examples: int
    two: bool  # whether there are two classes: then the second one is looked for, as in no and yes

    @classmethod
    def of(cls, scores: Floats, labels: Ints, classes: Ints, positives: Ints, two: bool) -> Ranking:
        """Rank examples by their scores for classes, [K, n], of which there are so many examples, [K]."""
        examples, order = scores.shape[1], scores.argsort(1)
        begins = np.arange(0, scores.size, examples)  # of rows, end to end
        ranked = scores.take(order + begins[:, None])
        row = np.arange(len(classes)).repeat(positives)
        below = np.flatnonzero(labels.take(order) == classes[:, None]) - begins[row]
        place, up_to = below.copy(), below + 1
        own_below = np.arange(len(row)) - (positives.cumsum() - positives)[row]
        for tied in np.flatnonzero((ranked[:, 1:] == ranked[:, :-1]).any(1)):  # places say nothing about equal scores
            mine = row == tied
            own = ranked[tied, place[mine]]
            below[mine], up_to[mine] = (np.searchsorted(ranked[tied], own, side) for side in ("left", "right"))
            own_below[mine] = np.searchsorted(own, own)
        return cls(row, below, up_to, own_below, positives, examples, two)

    @cached_property
    def own_reached(self) -> Ints:
        """Examples of the class with this score or a higher one, [n]."""
        found: Ints = self.positives[self.row] - self.own_below
        return found

    @cached_property
    def reached(self) -> Ints:
        """Examples with this score or a higher one, [n]."""
        return self.examples - self.below

    def sums(self, values: np.ndarray) -> Floats:
        """Add up a number of each example over its class, [K]."""
        return np.bincount(self.row, values, minlength=len(self.positives)).astype(np.float64, copy=False)

    def mean(self, values: np.ndarray) -> float:
        """Return the mean of a number over each class, and then over the classes; of two, that of the second."""
        by_class = self.sums(values) / self.positives
        return float(by_class[-1] if self.two else by_class.mean())


@dataclass(frozen=True)
class Metric:
    """One metric: its name in logs, tables and commands, what it means, and how it is computed."""

    name: str
    meaning: str
    higher_is_better: bool | None = True  # None: neither, as of a matrix
    compute: Callable[[Answers], Any] | None = None  # None: whoever scores a model has it already
    shape: Literal["number", "by class", "matrix"] = "number"  # of its value
    in_runs_only: bool = False  # it is about clients or validation data, which other data has not
    share: bool = False  # of examples: in percent on a page, and differences are points

    @property
    def better(self) -> str:
        """Say which values are better."""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"

    def gain(self, difference: float) -> float:
        """Return a difference such that more is better: where lower is better, its sign changes."""
        return -difference if self.higher_is_better is False else difference


def confusion_counts(answers: Answers) -> list[list[int]]:
    """The confusion matrix [C][C]; an answer that is no class is in no column.

    >>> confusion_counts(Answers(np.array([0, 1, 1, 700]), np.array([0, 0, 1, 1]), 2))
    [[1, 1], [0, 1]]
    """
    rows: list[list[int]] = answers.confusion[:, :-1].tolist()
    return rows


def precision_by_class(answers: Answers) -> list[float | None]:
    """Of the examples that got this answer, the share for which it is right; None for an answer never given."""
    return known_or_none(_ratio(answers.right, answers.said))


def recall_by_class(answers: Answers) -> list[float | None]:
    """Of the examples of this class, the share that was answered right; None for a class without examples."""
    return known_or_none(answers.recall)


def f1_macro(answers: Answers) -> float | None:
    """Mean F1 of the classes that the labels or the answers have."""
    known = answers.f1[~np.isnan(answers.f1)]
    return float(known.sum() / len(known)) if len(known) else None


def f1_weighted(answers: Answers) -> float | None:
    """Mean F1 of the classes, each counted as often as it has examples."""
    count = answers.count
    return float(np.where(count > 0, answers.f1, 0.0) @ count / count.sum()) if count.sum() else None


def auc(answers: Answers) -> float | None:
    """Mean over classes of the area under the ROC curve, one class against the rest, where a class has both sides."""
    if (found := answers.ranking) is None:
        return None
    positives, rest = found.positives, found.examples - found.positives
    # An equal score counts one half, also of two positives, which are taken out again.
    areas = (found.sums(found.below + found.up_to) - positives**2) / (2.0 * positives * rest)
    return float(areas.mean())


def pr_auc(answers: Answers) -> float | None:
    """Area under the curve of precision and recall, as average precision: of the second of two classes, else mean."""
    return None if (found := answers.ranking) is None else found.mean(found.own_reached / found.reached)


def sensitivity(answers: Answers) -> float | None:
    """Largest share of a class that a threshold finds at a specificity of 0.95: of the second of two, else mean."""
    if (found := answers.ranking) is None:
        return None
    rest = found.examples - found.positives
    return found.mean(found.reached - found.own_reached <= ((1 - SPECIFICITY) * rest)[found.row])


def brier_score(answers: Answers) -> float | None:
    """Mean squared distance of probabilities from the truth, 0 or 1: of the second of two classes, else of all."""
    if (shares := answers.shares) is None:
        return None
    off = shares.copy(order="K")
    off[np.arange(len(off)), answers.labels] -= 1
    return float(np.square(off, out=off).sum() / (len(off) * (2 if answers.num_classes == 2 else 1)))


def log_loss(answers: Answers) -> float | None:
    """Mean of -log(probability of the right class)."""
    if (shares := answers.shares) is None:
        return None
    right = shares[np.arange(len(shares)), answers.labels]
    return float(-np.log(right.clip(SMALLEST, 1.0)).mean())


def calibration_error(answers: Answers) -> float | None:
    """Expected calibration error: how far the probability of the likeliest class is from how often it is right."""
    if (shares := answers.shares) is None:
        return None
    sure, right = shares.max(1), shares.argmax(1) == answers.labels
    bins = np.searchsorted(EDGES, sure)  # a value on an edge is in the bin below it
    gaps = np.bincount(bins, weights=right - sure, minlength=NUM_BINS)  # by bin: right answers minus expected ones
    return float(np.abs(gaps).sum() / len(sure))


def _ratio(above: Ints, below: Ints) -> Floats:
    """Above / below, nan where there is nothing below."""
    found: Floats = np.divide(above, below, out=np.full(len(below), np.nan), where=below > 0)
    return found


def bootstrap_intervals(shares: Floats, counts: Ints, seed: int) -> list[tuple[float, float] | None]:
    """Return the 95 % percentile interval of each share of right answers, of so many examples; None for no example.

    Right answers among examples that are drawn again, with replacement, are a binomial number.

    >>> bootstrap_intervals(np.array([1.0, np.nan]), np.array([12, 0]), seed=0)
    [(1.0, 1.0), None]
    """
    known = counts > 0
    drawn = numpy_generator(seed, "sites", "bootstrap").binomial(counts[known], shares[known], (DRAWS, known.sum()))
    ends = np.full((2, len(counts)), np.nan)
    ends[:, known] = np.quantile(drawn / counts[known], (0.025, 0.975), axis=0)
    return [None if math.isnan(low) else (low, high) for low, high in ends.T.tolist()]


def known_or_none(values: Floats) -> list[float | None]:
    """The same numbers as JSON has them, which knows no nan."""
    return [None if value != value else value for value in values.tolist()]


_of_a_run = partial(Metric, in_runs_only=True, share=True)
TEST_METRICS = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "share of right answers on the test set", share=True),
        Metric("balanced_accuracy", "mean over the classes of the accuracy in each", share=True),
        Metric("loss", "mean cross-entropy on the test set, as in training", False),
        Metric("f1_macro", "mean F1 of the classes", True, f1_macro),
        Metric("f1_weighted", "mean F1 of the classes, weighted by their examples", True, f1_weighted),
        Metric("auc", "area under the ROC curve, one class against the rest, mean over the classes", True, auc),
        Metric("pr_auc", "average precision (of two classes, the second's)", True, pr_auc),
        Metric("sensitivity_at_95", "sensitivity at a specificity of 0.95 (of two, the second's)", True, sensitivity),
        Metric("brier_score", "mean squared distance of probabilities from 0 and 1", False, brier_score),
        Metric("log_loss", "mean of -log(probability of the right class)", False, log_loss),
        Metric("calibration_error", "gap of confidence and accuracy (ECE, 15 equal bins)", False, calibration_error),
        Metric("precision", "of the answers with this class, the right ones", True, precision_by_class, "by class"),
        Metric("recall", "of the examples of this class, the right ones", True, recall_by_class, "by class"),
        Metric("confusion", "examples by true class (row) and answer (column)", None, confusion_counts, "matrix"),
        _of_a_run("accuracy_own", "mean over clients, each on its own test distribution"),
        _of_a_run("accuracy_clean", "accuracy on the test set without feature noise"),
        _of_a_run("worst_client", "the lowest accuracy on a client's own mixture of classes"),
        _of_a_run("accuracy_site", "mean over clients, each on the test examples that it brought"),
        _of_a_run("accuracy_site_pooled", "accuracy on the test examples that clients brought, all together"),
        _of_a_run("worst_site", "the lowest accuracy of a client on the test examples that it brought"),
        _of_a_run("validation_accuracy", "share of right answers on validation data"),
        _of_a_run("validation_own", "mean over clients, each on its own validation data"),
    )
}  # fmt: skip
NUMBER_METRICS = tuple(name for name, metric in TEST_METRICS.items() if metric.shape == "number")


def leading_metric(personalised: Iterable[bool]) -> Metric:
    """Choose the metric of a run or comparison that names none: accuracy_own if all methods are personalised."""
    return TEST_METRICS["accuracy_own" if all(personalised) else "accuracy"]


# -- functions of the user's own ---------------------------------------------------------------------------------------

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


def _taken(name: str, names: Sequence[str]) -> str:
    """Say why a function that `metrics` names cannot have this name, after its value; "" if it can."""
    if name in TEST_METRICS:
        return f": {name} is the name of a metric of fnrfl's. Rename the function"
    if name in NAMES_OF_RESULTS:
        return f": {name} is something else in the results of a run. Rename the function"
    return "" if names.count(name) == 1 else f" has two functions {name}, and a metric is called as one. Rename one"


def load_custom_metrics(words: str) -> tuple[CustomMetric, ...]:
    """Import the functions that `metrics` names; refuse what is none, and a name that is taken."""
    if words == "none":
        return ()
    each = [str(one) for one in usercode.each_name("metrics", words)]
    targets = {one: usercode.target("metrics", one) for one in each}
    said, names, problems = f"metrics = {show_value(words)}", [one.rpartition(":")[2] for one in each], list[str]()
    if others := [f'"{one}"' for one, target in targets.items() if target is None]:
        problems.append(
            f'{said} must name functions of yours, "module:function", joined by commas; not {", ".join(others)}. '
            "The metrics of `fnrfl list metrics` are in the log of every run and are not named here: --metric NAME of "
            "`fnrfl compare` and `fnrfl evaluate` shows one."
        )
    for name in dict.fromkeys(names):
        if why := _taken(name, names):
            problems.append(f"{said}{why}.")
    if problems:
        raise ConfigError(" ".join(problems))
    found = []
    for one, target in targets.items():
        function = usercode.fetch(f'metrics = "{one}"', target)
        if target is None or not callable(function):
            kind = type(function).__name__
            raise ConfigError(f'metrics = "{one}" is a {kind}; it must be a function(probabilities, labels).')
        found.append(CustomMetric(one, target.name, function))
    return tuple(found)


def typed_metrics(recorded: str, names: Sequence[str]) -> tuple[CustomMetric, ...]:
    """Import the functions that a run's config names, and those among the `names` that a user has typed."""
    given = [name for name in names if ":" in name]
    usercode.allow("metrics", ", ".join(given))
    words = [*([] if recorded == "none" else map(str, usercode.each_name("metrics", recorded))), *given]
    return load_custom_metrics(", ".join(dict.fromkeys(words)) or "none")


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


def try_metrics(metrics: Sequence[CustomMetric], labels: Ints, num_classes: int) -> None:
    """Try each function on made-up probabilities, so that one that fails is refused before anything is trained."""
    known = labels[:TRIED_EXAMPLES]
    shares = 0.5 * np.eye(num_classes)[known] + 0.5 / num_classes
    for metric in metrics:
        metric.ask(Answers.of_probabilities(shares, known))
