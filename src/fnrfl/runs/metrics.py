"""The numbers of a run, computed from the rounds of its log; for results in memory and for reports, without torch."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import accumulate

from fnrfl.rundir.events import Event

MIB = 2**20
OWN = "own_metrics"  # a round's values of metrics of the user's own, by name
LOWEST = {"worst_client": "per_client", "worst_site": "per_site"}  # of which list of shares a metric is the lowest
# Metrics about clients, each on its own data: validation judges them likewise.
OF_CLIENTS = ("accuracy_own", "worst_client", "accuracy_site", "accuracy_site_pooled", "worst_site")
LOOKING = ("evaluate", "observe")  # phases of looking at models, which are no part of training


class RunMetrics:
    """What the rounds of a run say together; whoever has `rounds` inherits it."""

    rounds: list[Event]

    def series(self, metric: str) -> list[float | None]:
        """Return a number of every round, None where there is none; a user's own metric has its function's name."""
        return [of_round(event, metric) for event in self.rounds]

    def last(self, metric: str) -> float | None:
        """Return a number after the last round; None if there is none."""
        return of_round(self.rounds[-1], metric)

    def curve(self) -> dict[str, list[float | None]]:
        """Return every number that rounds have, as columns of equal length for pandas.DataFrame; None: not known."""
        names = [name for name, value in self.rounds[-1].items() if isinstance(value, int | float) and name != "rounds"]
        return {name: self.series(name) for name in [*names, "worst_client"]} | {"seconds": list(self.seconds)}

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round."""
        return float(self.rounds[-1]["accuracy"])

    def last3(self, metric: str) -> float | None:
        """Mean of a number over the last three rounds; None if one of them has none."""
        tail = self.series(metric)[-3:]
        return None if None in tail else sum(value for value in tail if value is not None) / len(tail)

    def best(self, metric: str) -> float | None:
        """Return a number after the round that was best on validation data; None without such data."""
        judge = validation_metric(metric)
        if None in self.series(judge):  # an older version made some of the rounds
            judge = "validation_accuracy"
        judged = [event for event in self.rounds if event[judge] is not None]
        return of_round(max(judged, key=lambda event: float(event[judge])), metric) if judged else None

    @property
    def accuracy_last3(self) -> float:
        """Mean test accuracy of the last three rounds."""
        return float(self.last3("accuracy") or 0.0)

    @property
    def accuracy_best(self) -> float | None:
        """Test accuracy of the round that was best on validation data; None without such data."""
        return self.best("accuracy")

    @property
    def per_class(self) -> list[float]:
        """Recall of every class after the last round."""
        return list(self.rounds[-1]["per_class"])

    @property
    def own_metrics(self) -> dict[str, float | None]:
        """Metrics of the user's own after the last round, by name."""
        return dict(self.rounds[-1].get(OWN, {}))

    @property
    def bytes_up(self) -> int:
        """Bytes from clients to the server, over all rounds."""
        return sum(int(event["bytes_up"]) for event in self.rounds)

    @property
    def bytes_down(self) -> int:
        """Bytes from the server to clients, over all rounds."""
        return sum(int(event["bytes_down"]) for event in self.rounds)

    @cached_property
    def mib(self) -> list[float]:
        """Traffic in MiB, both directions, up to and including each round."""
        return list(accumulate((event["bytes_up"] + event["bytes_down"]) / MIB for event in self.rounds))

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of training, norm pass, refinement and server, up to and including each round."""
        return list(accumulate(map(training_seconds, self.rounds)))

    @property
    def seconds_train(self) -> float:
        """Seconds of training, norm pass, refinement and server, without evaluation."""
        return self.seconds[-1]

    @property
    def kappa(self) -> float:
        """Accuracy * 1e4 per second; comparable only within one device, engine and table."""
        return self.accuracy * 1e4 / self.seconds_train

    @property
    def rho(self) -> float | None:
        """Accuracy * 1e4 per MiB of traffic; None where nothing was sent."""
        return self.accuracy * 1e4 / self.mib[-1] if self.mib[-1] else None


def validation_metric(metric: str) -> str:
    """Name the number of a round that decides on validation data where the test set is judged by this metric."""
    return "validation_own" if metric in OF_CLIENTS else "validation_accuracy"


def of_round(event: Event, metric: str) -> float | None:
    """Return a number of a round by its name; None if the round has none."""
    if metric in LOWEST:
        known = [one for one in event.get(LOWEST[metric], ()) if one is not None]
        return _finite(min(known, default=event.get(metric)))  # of many clients the log has the lowest alone
    return _finite(event.get(metric, event.get(OWN, {}).get(metric)))


def training_seconds(event: Event) -> float:
    """Seconds of a round that went into training, and not into looking at models."""
    return float(sum(spent for phase, spent in event["seconds"].items() if phase not in LOOKING))


def _finite(value: object) -> float | None:
    """Return a number, or None for what JSON and a chart cannot show."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
