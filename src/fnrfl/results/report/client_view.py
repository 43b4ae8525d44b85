"""A run from inside, client by client: who was refined when, class norms, and what refinement changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fnrfl.results.report.groups import LineGroup
from fnrfl.results.report.load import Run
from fnrfl.results.report.numbers import POINTS, chart_number, known_mean, shown_mean, thinned
from fnrfl.rundir.events import Event

CLIENTS = 100  # of a run that are shown, so that a page stays light


def inside(group: LineGroup, numbers: int) -> dict[str, Any]:
    """One line's first run, client by client."""
    run = group.runs[0]
    shown = range(min(CLIENTS, len(run.counts)))
    return {
        "label": group.label,
        "seed": run.seed,
        "leaks": group.leaks,
        "split": run.about["partition"],
        "all": len(run.counts),
        "clients": [_client(run, client) for client in shown],
        "refined": _refined(run, shown, numbers // 2),
        "change": _change(run),
        "norms": _norms(run, numbers // 2),
        "gap": _gap(run),
    }


def _client(run: Run, client: int) -> dict[str, Any]:
    """What the server knows about a client in the end."""
    active = [event for event in run.rounds if client in event["cohort"]]
    ranking, norms = (_last_of_client(active, what, client) for what in ("ranking", "norms"))
    known = [value for value in norms or () if value]  # 0: public data has none of this class
    return {
        "client": client,
        "name": run.client_names[client],
        "examples": sum(run.counts[client]),
        "active": len(active),
        "ranking": chart_number(ranking),
        "norm": shown_mean(known),
        "norm_low": chart_number(min(known, default=None)),
        "norm_high": chart_number(max(known, default=None)),
        "refined": sum(client in event["refined"] for event in active if "refined" in event) if run.refines else None,
    }


def _of_client(event: Event, what: str, client: int) -> Any:
    """What a round's line says of a client; None if nothing."""
    return event[what][event["cohort"].index(client)] if what in event and client in event["cohort"] else None


def _last_of_client(events: Sequence[Event], what: str, client: int) -> Any:
    """What the last round that says anything of a client says; None if none does."""
    found = (_of_client(event, what, client) for event in reversed(events))
    return next((value for value in found if value is not None), None)


def _refined(run: Run, shown: range, numbers: int) -> dict[str, Any] | None:
    """Who was refined when: 0 not active, 1 active, 2 refined."""
    if not any("refined" in event for event in run.rounds):
        return None
    kept = thinned(run.rounds, numbers // (2 * len(shown)))

    def state(event: Event, client: int) -> int:
        return 0 if client not in event["cohort"] else 2 if client in event.get("refined", ()) else 1

    def ranking(event: Event, client: int) -> float | None:
        return chart_number(_of_client(event, "ranking", client))

    return {
        "rounds": [event["round"] for event in kept],
        "grid": [[state(event, client) for event in kept] for client in shown],
        "ranking": [[ranking(event, client) for event in kept] for client in shown],
    }


def _change(run: Run) -> dict[str, Any] | None:
    """Accuracy of refined clients before and after, class by class, mean over the rounds."""
    told = [event for event in run.rounds if event.get("refined_before") and event.get("refined_after")]
    if not told:
        return None
    before, after = ([event[key] for event in told] for key in ("refined_before", "refined_after"))
    return {
        "before": [shown_mean(values) for values in zip(*before, strict=True)],
        "after": [shown_mean(values) for values in zip(*after, strict=True)],
    }


def _norms(run: Run, numbers: int) -> dict[str, Any] | None:
    """Class norms of the clients in each round."""
    told = [event for event in run.rounds if "norms" in event]
    if not told:
        return None
    kept = thinned(told, numbers // max(1, *map(_num_norms, told)))
    classes = max(len(row or ()) for event in kept for row in event["norms"])
    values, names = [_norm_rows(event, classes) for event in kept], run.client_names
    return {
        "rounds": [event["round"] for event in kept],
        "cohorts": [[names[client] for client in event["cohort"][:CLIENTS]] for event in kept],
        "values": values,
        "range": _range(v for rows in values for row in rows for v in row if v is not None),
    }


def _range(values: Iterable[float]) -> tuple[float, float] | None:
    """The lowest and the highest value, which the colours of all rounds are scaled to."""
    known = list(values)
    return (min(known), max(known)) if known else None


def _num_norms(event: Event) -> int:
    """How many norms of a round would be shown."""
    return sum(len(row or ()) for row in event["norms"][:CLIENTS])


def _norm_rows(event: Event, classes: int) -> list[list[float | None]]:
    """A round's class norms, one row for each client; None where there is none."""
    return [[chart_number(v) or None for v in row or [None] * classes] for row in event["norms"][:CLIENTS]]


def _gap(run: Run) -> list[dict[str, Any]] | None:
    """Mean class norm of refined clients, before their refinement, and of the others, by round."""
    told = thinned([event for event in run.rounds if "norms" in event and "refined" in event], POINTS)
    if not told:
        return None

    def points(refined: bool) -> list[dict[str, Any]]:
        found = []
        for event in told:
            rows = [
                row
                for client, row in zip(event["cohort"], event["norms"], strict=True)
                if row is not None and (client in event["refined"]) == refined
            ]
            means = [mean for row in rows if (mean := known_mean([v for v in row if v])) is not None]
            if means:
                found.append(
                    {
                        "x": event["round"],
                        "y": shown_mean(means),
                        "low": chart_number(min(means)),
                        "high": chart_number(max(means)),
                    }
                )
        return found

    return [
        {"label": "the others", "points": points(refined=False)},
        {"label": "refined in this round, before it", "points": points(refined=True)},
    ]
