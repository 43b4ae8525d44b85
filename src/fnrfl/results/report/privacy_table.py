"""What the server learned about each client: which messages went up, by what a run has logged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fnrfl.config import registry
from fnrfl.results.report.groups import LineGroup
from fnrfl.results.report.load import Run
from fnrfl.results.report.tables import Column, Table, TableCell
from fnrfl.rundir.events import Event

# What some methods' own messages say about a client.
SAYS = {
    "cfedfn": "How long the features of each class are under its model, and how many examples of each class it has.",
    "feddc": "The drift of its model from the server's: the direction in which its own data pulls.",
    "fedftg": "How many examples of each class it has.",
    "fedgen": "How many examples of each class it has.",
    "ktpfl": "What its model answers on public examples, class by class.",
    "scaffold": "The change of its control variate: the mean direction in which its own data pulls.",
}
LEARNED_COLUMNS = (
    Column("what", number=False),
    Column("numbers", "for each client and round, at most"),
    Column("sent by", number=False),
    Column("what it says about a client", number=False),
)


@dataclass(frozen=True)
class Message:
    """A kind of message: which runs have sent it, how many numbers it has, and what it says about a client."""

    what: str
    says: str
    sent: Callable[[Run], bool]
    numbers: Callable[[Run], int] = lambda run: 1
    by: str = ""  # after the names of methods


def _numbers_of_inputs(run: Run) -> int:
    """Count the numbers that a client has sent about its inputs; where some are missing, each column has a count."""
    columns = len(run.about["scale"]["mean"])
    return columns * 4 if run.config.get("dataset.missing") == "mean" else 1 + columns * 3


def _up(event: Event, phase: str) -> int:
    return int(event["bytes"].get(phase, {}).get("up", 0))


MESSAGES = (
    Message(
        "the model",
        "What its data made of the parameters. This is by far the most that leaves a client: single examples have "
        "been rebuilt from models and updates, and nothing here hides them.",
        # answers to questions are no models
        lambda run: any(_up(e, phase) for e in run.rounds for phase in e["bytes"] if phase not in ("measure", "scale")),
        lambda run: int(run.about["parameters"]),
    ),
    Message(
        "example count",
        "How many examples it holds, to weight the average; with it the number of steps and the training loss.",
        lambda run: any(event["bytes"] for event in run.rounds),
    ),
    Message(
        "sums of inputs",
        'Once, before the first round, for dataset.scale = "standard" or dataset.missing = "mean": the count, the '
        "mean and the spread of each column or channel of its examples. Of a client with one row of a table, that "
        "is the row.",
        lambda run: bool(run.rounds and _up(run.rounds[0], "scale")),
        _numbers_of_inputs,
    ),
    Message(
        "class norms",
        "How long the features of each class are under its model, measured on public examples: a hint at the classes "
        "that it has seen, and no example.",
        lambda run: run.refines,
        lambda run: len(run.counts[0]),
        " + FNR",
    ),
    Message(
        "ranking accuracy",
        "How well its model does on the public examples that rank: how far its data is from everybody's.",
        lambda run: run.refines,
        by=" + FNR",
    ),
)


def learned(groups: Sequence[LineGroup]) -> Table:
    """Return what crossed from a client to the server, kind by kind, and what it says about the client."""
    rows = [*_rows(MESSAGES[:3], groups), *_own_messages(groups), *_rows(MESSAGES[3:], groups)]
    return Table(LEARNED_COLUMNS, tuple(tuple(map(TableCell, row)) for row in rows), sorts=False)


def _rows(messages: Iterable[Message], groups: Sequence[LineGroup]) -> Iterator[tuple[str, ...]]:
    for one in messages:
        if senders := [group for group in groups if any(map(one.sent, group.runs))]:
            numbers = sorted({one.numbers(group.first) for group in senders})
            names = dict.fromkeys(f"{group.config['algorithm.name']}{one.by}" for group in senders)
            who = "all methods" if len(senders) == len(groups) and not one.by else ", ".join(names)
            yield one.what, " or ".join(f"{number:,}" for number in numbers), who, one.says


def _own_messages(groups: Sequence[LineGroup]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each method that declares messages beside the model; how many numbers, its traffic says."""
    declared = {entry.name: entry.traffic for entry in registry.methods()}
    for name in dict.fromkeys(str(group.config["algorithm.name"]) for group in groups):
        if name not in declared:
            yield f"{name}'s own", "", name, "See the method's file."
        elif name in SAYS:
            yield f"{name}'s own", "", name, f"{SAYS[name]} Sent: {declared[name]}."
