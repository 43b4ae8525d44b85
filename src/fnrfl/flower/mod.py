"""The client's line: a mod that measures what the app has trained, and refines it when the server asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from fnrfl.algorithms.parts.norms import ClassNorms
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.rng import stream_kept
from fnrfl.flower.fnr_record import MEASURE, RECORD_NAME, REFINE, REFINE_OPTIONS, FnrRecord
from fnrfl.runs.functional import Batches, Loader, accuracy_on, measured, refine

HELD = "fnrfl.held"  # the trained model, in the context's state until the next round
HELD_FOR = "fnrfl.record"  # for which question it is held


class FeatureNormMod:
    """A mod for `ClientApp(mods=[...])` that answers a `FeatureNormStrategy`; other servers do not notice it.

    `model()` makes the app's model, whatever its weights; where it puts the model is where FNR computes.
    `public_loader()` gives or yields batches (x, y) of public data, to measure class norms on and to refine on.
    `ranking_loader()` gives other public batches, by which clients are ranked; without it the same ones rank. Features
    are the input of the Linear that is called last, or the output of the layer that `features` names.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        public_loader: Callable[[], Batches],
        ranking_loader: Callable[[], Batches] | None = None,
        *,
        features: str | None = None,
    ) -> None:
        self.model, self.public_loader, self.features = model, public_loader, features
        self.ranking_loader = ranking_loader or public_loader
        for name in ("model", "public_loader", "ranking_loader"):
            given = getattr(self, name)
            if isinstance(given, nn.Module) or not callable(given):
                raise ConfigError(
                    f"{name} must be a function without arguments, and is a {type(given).__name__}. Give the class or "
                    "the function that makes it, without calling it."
                )

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer a message of FNR's; hand every other to the app."""
        if not message.has_content() or RECORD_NAME not in message.content.config_records:
            return call_next(message, context)
        record: FnrRecord = dict(message.content.config_records[RECORD_NAME])
        if record.get("phase") == REFINE:
            return self._refined(message, context, record)
        message.content = RecordDict({name: record for name, record in message.content.items() if name != RECORD_NAME})
        asked_with = list(message.content.array_records)
        return self._measured(call_next(message, context), context, record, asked_with)

    def _measured(self, reply: Message, context: Context, record: FnrRecord, asked_with: list[str]) -> Message:
        """Put class norms and accuracy of the app's model into a record beside its reply to training.

        What goes wrong here is written into the record: the app's training is not lost for it.
        """
        context.state.pop(HELD, None)
        if reply.has_error():
            return reply
        answer: FnrRecord = {"phase": MEASURE, "round": record["round"], "question": record["question"]}
        if isinstance(number := context.node_config.get("partition-id"), int):
            answer["client"] = number
        try:
            name = _model_record(list(reply.content.array_records), asked_with)
            arrays = reply.content.array_records[name]
            with stream_kept():  # the app's own random numbers are what they would have been
                model = self._loaded(arrays)
                got = measured(model, _readable(self.public_loader), ClassNorms, None, self.features)
                answer["accuracy"] = accuracy_on(model, _readable(self.ranking_loader), features=self.features)
            context.state[HELD], context.state[HELD_FOR] = arrays, ConfigRecord(answer)
            answer |= {"arrays": name, "norms": got["norms"].tolist(), "counts": got["count"].long().tolist()}
        except Exception as error:
            answer["problem"] = f"{type(error).__name__}: {error}"
        reply.content = RecordDict({**reply.content, RECORD_NAME: ConfigRecord(answer)})
        return reply

    def _refined(self, message: Message, context: Context, record: FnrRecord) -> Message:
        """Refine the model that this client holds; an error goes back as an error does in any Flower app."""
        held_for: Mapping[str, object] = context.state.config_records.get(HELD_FOR, {})
        if HELD not in context.state or held_for.get("question") != record["question"]:
            raise FnrflError(
                f"This node holds no model of round {record['round']} to refine: it was restarted, or has trained "
                "another since. The server goes on with the model that it was sent."
            )
        arrays = context.state.array_records.pop(HELD)
        with stream_kept():
            model = self._loaded(arrays)
            targets = torch.tensor(record["targets"], dtype=torch.float64)
            options = {name: record[name] for name in REFINE_OPTIONS}
            refine(model, _readable(self.public_loader), targets, features=self.features, **options)
        answer: FnrRecord = {"phase": REFINE, "round": record["round"], "question": record["question"]}
        content = RecordDict({"arrays": _as_arrays(model, arrays), RECORD_NAME: ConfigRecord(answer)})
        return Message(content, reply_to=message)

    def _loaded(self, arrays: ArrayRecord) -> nn.Module:
        """Load the app's model with these weights, which have the names of its state_dict or are in its order."""
        model = self.model()
        tensors = [torch.from_numpy(array.numpy().copy()) for array in arrays.values()]
        model.load_state_dict(dict(zip(_names(model, arrays), tensors, strict=True)))
        return model


def _readable(load: Callable[[], Batches]) -> Loader:
    """Return the batches that a function gives, or the function if it yields them: it is called for each pass."""
    loader = load()
    if isinstance(loader, Iterator) and load() is loader:
        raise ConfigError(
            f"The public data is one {type(loader).__name__} whenever it is asked for, which can be read only once. "
            "Return a list of batches or a DataLoader, or yield the batches."
        )
    return load if isinstance(loader, Iterator) else loader


def _model_record(replied: list[str], asked_with: list[str]) -> str:
    """Return which of the reply's ArrayRecords is the model: the only one, or that with the server's name."""
    candidates = replied if len(replied) == 1 else [name for name in replied if name in asked_with]
    if len(candidates) == 1:
        return candidates[0]
    raise CompatibilityError(
        f"The reply to training has the ArrayRecords {replied}, and FNR cannot tell which is the model. Name it as the "
        "server's message does, or send it alone."
    )


def _names(model: nn.Module, arrays: ArrayRecord) -> list[str]:
    """Return the names of arrays, or those of the model where they are numbered."""
    listed = [str(place) for place in range(len(arrays))] == list(arrays)
    own = list(model.state_dict())
    return own if listed and len(own) == len(arrays) else list(arrays)


def _as_arrays(model: nn.Module, like: ArrayRecord) -> ArrayRecord:
    """Return the model's weights under the names, in the order and of the types of what was trained."""
    state = model.state_dict()
    values = [state[name].detach().cpu().numpy() for name in _names(model, like)]
    pairs = zip(like.items(), values, strict=True)
    return ArrayRecord({name: Array(np.asarray(value, dtype=array.dtype)) for (name, array), value in pairs})
