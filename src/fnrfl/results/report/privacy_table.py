"""What the server learned about each client: which messages went up, judged by the bytes that a run has logged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from fnrfl.config import registry
from fnrfl.core.words import INPUT_SCALE
from fnrfl.results.report.groups import LineGroup
from fnrfl.results.report.load import Run
from fnrfl.results.report.tables import Column, Table, TableCell
from fnrfl.rundir.events import Event
from fnrfl.rundir.files import is_plain_file

NUMBER = 4  # bytes: floating numbers travel as float32
WHOLE_NUMBERS = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}  # bytes: these travel as they are
MOST_HEADER = 1 << 24  # bytes of a model file's header that are read
# What some methods' own messages say about a client. Whether a run has sent any is read from its log.
SAYS = {
    "cfedfn": "How long the features of each class are under its model, and how many examples of each class it has.",
    "feddc": "The drift of its model from the server's: the direction in which its own data pulls.",
    "fedftg": "How many examples of each class it has.",
    "fedgen": "How many examples of each class it has.",
    "ktpfl": "What its model answers on public examples, class by class.",
    "scaffold": "The change of its control variate: the mean direction in which its own data pulls.",
}


def learned(groups: Sequence[LineGroup]) -> Table:
    """What crossed from a client to the server, kind by kind, and what it says about the client."""
    columns = (
        Column("what", number=False),
        Column("numbers", "for each client and round, at most"),
        Column("sent by", number=False),
        Column("what it says about a client", number=False),
    )
    rows = [*_models(groups), *_sums_of_inputs(groups), *_own_messages(groups), *_fnr(groups)]
    return Table(columns, tuple(tuple(map(TableCell, row)) for row in rows), sorts=False)


def _models(groups: Sequence[LineGroup]) -> Iterable[tuple[str, ...]]:
    """Models, and the counts that go with every reply."""
    senders = [group for group in groups if any(_model_up(e) for run in group.runs for e in run.rounds)]
    if senders:
        yield (
            "the model",
            _listed({int(group.runs[0].about["parameters"]) for group in senders}),
            _who(senders, groups),
            "What its data made of the parameters. This is by far the most that leaves a client: single examples have "
            "been rebuilt from models and updates, and nothing here hides them.",
        )
    replying = [group for group in groups if any(e["bytes"] for run in group.runs for e in run.rounds)]
    if replying:
        yield (
            "example count",
            "1",
            _who(replying, groups),
            "How many examples it holds, to weight the average; with it the number of steps and the training loss.",
        )


def _sums_of_inputs(groups: Sequence[LineGroup]) -> Iterable[tuple[str, ...]]:
    """What clients have sent once so that inputs could be scaled."""
    asked = [group for group in groups if any(_up(run.rounds[0], "scale") for run in group.runs if run.rounds)]
    if asked:
        numbers = {_numbers_of_inputs(group) for group in asked}
        yield (
            "sums of inputs",
            _listed(numbers),
            _who(asked, groups),
            'Once, before the first round, for dataset.scale = "standard" or dataset.missing = "mean": the count, the '
            "mean and the spread of each column or channel of its examples. Of a client with one row of a table, that "
            "is the row.",
        )


def _numbers_of_inputs(group: LineGroup) -> int:
    """How many numbers a client has sent about its inputs; where some are missing, every column has a count."""
    columns = len(group.runs[0].about["scale"]["mean"])
    return columns * 4 if group.config.get("dataset.missing") == "mean" else 1 + columns * 3


def _own_messages(groups: Sequence[LineGroup]) -> Iterable[tuple[str, ...]]:
    """What a method has sent beside the model, for each method that has."""
    sent: dict[str, set[int]] = {}
    for group in groups:
        sent.setdefault(str(group.config["algorithm.name"]), set()).update(map(numbers_beside, group.runs))
    declared = {entry.name: entry.traffic for entry in registry.methods()}
    for name, numbers in sent.items():
        if numbers != {0}:
            words = f"What the method itself sends: {declared[name]}." if name in declared else "See the method's file."
            yield f"{name}'s own", _listed(numbers - {0}), name, SAYS.get(name, words)


def _fnr(groups: Sequence[LineGroup]) -> Iterable[tuple[str, ...]]:
    """What refinement asks clients."""
    refining = [group for group in groups if group.runs[0].refines]
    if not refining:
        return
    who = ", ".join(dict.fromkeys(f"{group.config['algorithm.name']} + FNR" for group in refining))
    yield (
        "class norms",
        _listed({len(group.runs[0].counts[0]) for group in refining}),
        who,
        "How long the features of each class are under its model, measured on public examples: a hint at the classes "
        "that it has seen, and no example.",
    )
    yield (
        "ranking accuracy",
        "1",
        who,
        "How well its model does on the public examples that rank: how far its data is from everybody's.",
    )


def _who(senders: Sequence[LineGroup], groups: Sequence[LineGroup]) -> str:
    named = list(dict.fromkeys(str(group.config["algorithm.name"]) for group in senders))
    return "all methods" if len(senders) == len(groups) else ", ".join(named)


def _listed(numbers: Iterable[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted(numbers))


# -- bytes -------------------------------------------------------------------------------------------------------------


def numbers_beside(run: Run) -> int:
    """How many numbers a client of this run has sent beside the model and FNR's answers, in the round with the most."""
    saved = _saved_model_bytes(run.path / "model.safetensors")
    most = max(_bytes_beside(event, int(run.about["parameters"]), saved) for event in run.rounds)
    return math.floor(most / NUMBER + 1e-6)


def _missing_from_training(event: Event) -> int:
    """How many clients have not answered a task, refinement and questions aside."""
    return sum(not why.startswith(("refine:", "measure:")) for why in event.get("missing", {}).values())


def _bytes_beside(event: Event, parameters: int, saved: int | None) -> float:
    """Bytes that a client has sent in a round beside its model and what FNR has asked for; `saved` is the model's."""
    senders = max(1, len(event["cohort"]) - len(event.get("dropped", ())) - _missing_from_training(event))
    replies: float = _model_up(event)
    answers = max(0, _up(event, "measure") - _fnr_bytes(event)) / senders
    if event.get("refined") and (refined := _up(event, "refine")):  # such a client sends its model and nothing else
        model = refined / len(event["refined"])
        if _up(event, "local") and not _up(event, "deliver"):  # the refined ones have sent it twice
            replies -= refined
    elif saved is not None:
        model = saved
    else:  # buffers cannot be told from small messages, so only whole vectors of parameters count
        return answers + max(0.0, replies / senders // (NUMBER * parameters) - 1) * NUMBER * parameters
    return answers + max(0.0, replies / senders - model)


def _fnr_bytes(event: Event) -> int:
    """Bytes of class norms and ranking accuracies."""
    norms = sum(len(row) for row in event.get("norms", ()) if row is not None)
    return NUMBER * (norms + sum(value is not None for value in event.get("ranking", ())))


def _model_up(event: Event) -> int:
    """Bytes of replies, which models are part of; answers to questions are none."""
    return sum(_up(event, phase) for phase in event["bytes"] if phase not in ("measure", "scale"))


def _up(event: Event, phase: str) -> int:
    return int(event["bytes"].get(phase, {}).get("up", 0))


def _saved_model_bytes(path: Path) -> int | None:
    """Bytes of a model with its buffers on the wire, from the header of its file; None if there is no such file."""
    if not is_plain_file(path):  # a pipe would wait for whoever writes to it
        return None
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(min(MOST_HEADER, int.from_bytes(file.read(8), "little"))))
        never_sent_again = ("__metadata__", f"{INPUT_SCALE}.mean", f"{INPUT_SCALE}.std")
        tensors = [value for name, value in header.items() if name not in never_sent_again]
        return sum(int(math.prod(one["shape"]) * WHOLE_NUMBERS.get(one["dtype"], NUMBER)) for one in tensors)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
