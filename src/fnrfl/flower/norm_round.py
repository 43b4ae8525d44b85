"""One round of FNR as the server sees it: which replies count, what clients measured, which refined models count."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fnrfl.core.errors import FnrflError
from fnrfl.core.words import printable
from fnrfl.flower.fnr_record import MEASURE, RECORD_NAME, REFINE, FnrRecord, Measured, RefinementTerms, read_measured

flower_log = logging.getLogger("flwr")


class NormRound:
    """The requests and replies of a round; nodes are Flower's ids."""

    def __init__(self, number: int, messages: list[Message]) -> None:
        """Put the question for class norms into the messages that ask clients to train."""
        self.number = number
        self.question = uuid.uuid4().hex  # a reply to another is late, even if it is of a round of the same number
        self.sent = {one.metadata.dst_node_id: (one.metadata, dict(one.content.config_records)) for one in messages}
        self.replies: dict[int, Message] = {}  # those with a model, in the order of clients
        self.ranked: dict[int, Measured] = {}
        self.unranked: dict[int, str] = {}  # node -> why
        self.asked: list[int] = []  # to refine
        self.refined: dict[int, ArrayRecord] = {}
        self.failed: dict[int, str] = {}  # node -> why its refined model cannot be used
        record = self._record(MEASURE)
        for message in messages:  # they may share one RecordDict
            message.content = RecordDict({**message.content, RECORD_NAME: record})

    def _record(self, phase: str, **more: object) -> ConfigRecord:
        record: FnrRecord = {"phase": phase, "round": self.number, "question": self.question, **more}
        return ConfigRecord(record)

    # -- replies to training ------------------------------------------------------------------------------------------
    def receive(self, replies: Iterable[Message]) -> list[Message]:
        """Return the replies to this round, one for each client and then errors, without late and repeated ones.

        They are in the order of clients' numbers, then of nodes, so that the order of arrival changes no result.
        """
        errors: list[Message] = []
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                errors.append(reply)
            elif node not in self.sent or record_of(reply).get("question", self.question) != self.question:
                flower_log.warning("FNR: a late reply of node %d is ignored", node)
            elif node in self.replies:
                flower_log.warning("FNR: a second reply of node %d is ignored", node)
            else:
                self.replies[node] = reply
        self.replies = dict(sorted(self.replies.items(), key=lambda one: _sort_key(*one)))
        return [*self.replies.values(), *sorted(errors, key=lambda reply: reply.metadata.src_node_id)]

    def rank(self) -> None:
        """Read what clients measured; a client with an unsound record is not ranked."""
        for node, reply in self.replies.items():
            record = record_of(reply)
            try:
                if not record:
                    raise FnrflError("its ClientApp has no mods=[FeatureNormMod(...)], which measures class norms")
                measured = read_measured(node, record)
                if record.get("arrays") not in reply.content.array_records:
                    raise FnrflError("its record names no ArrayRecord of its reply")
                self.ranked[node] = measured
            except FnrflError as error:
                self.unranked[node] = one_line(str(error))
        usual = Counter(len(one.norms) for one in self.ranked.values()).most_common(1)
        classes = usual[0][0] if usual else 0
        for node in [node for node, one in self.ranked.items() if len(one.norms) != classes]:
            self.unranked[node] = f"it has norms of {len(self.ranked.pop(node).norms)} classes, others of {classes}"
        for node, why in self.unranked.items():
            flower_log.warning("FNR: node %d is not ranked: %s", node, why)
        if self.replies and not self.ranked:
            node, why = next(iter(self.unranked.items()))
            raise FnrflError(
                f"FNR has nobody to refine in round {self.number}: no client measured its model. Node {node}: {why}."
            )

    # -- refinement ---------------------------------------------------------------------------------------------------
    def message(self, node: int, terms: RefinementTerms, ttl: float | None, **towards: object) -> Message:
        """Ask a client to refine: with the configs, and on the way, of the message that asked it to train."""
        options = {name: value for name, value in vars(terms).items() if name not in ("share", "target")}
        sent, configs = self.sent[node]
        content = RecordDict({**configs, RECORD_NAME: self._record(REFINE, **options, **towards)})
        return Message(content, dst_node_id=node, message_type=sent.message_type, group_id=sent.group_id, ttl=ttl)

    def take(self, reply: Message, messages: list[Message]) -> None:
        """Keep a refined model, or why it cannot be used; ignore what is late or comes twice."""
        node = reply.metadata.src_node_id
        if reply.has_error():  # which may come from the server's side, in the place of a node that is gone
            asked = {one.metadata.message_id: one.metadata.dst_node_id for one in messages}
            node = asked.get(reply.metadata.reply_to_message_id, node)
            self.failed[node] = one_line(reply.error.reason or "its reply is an error without a reason")
        elif node not in self.asked or node in self.refined:
            flower_log.warning("FNR: a refined model of node %d that came twice or unasked is ignored", node)
        elif (record_of(reply).get("question"), record_of(reply).get("phase")) != (self.question, REFINE):
            flower_log.warning("FNR: a late reply of node %d is ignored", node)
        else:
            new = reply.content.array_records.get("arrays")
            why = _unusable(new, self.replies[node].content.array_records[self._name_of_model(node)])
            if new is None or why:
                self.failed[node] = one_line(why)
            else:
                self.refined[node] = new

    def _name_of_model(self, node: int) -> str:
        return str(record_of(self.replies[node])["arrays"])

    def finish(self) -> None:
        """Put refined models into the replies, and take the records out: nothing else of a reply changes."""
        for node, reply in self.replies.items():
            model = {self._name_of_model(node): self.refined[node]} if node in self.refined else {}
            reply.content = RecordDict({k: model.get(k, v) for k, v in reply.content.items() if k != RECORD_NAME})

    def metrics(self) -> dict[str, float | int]:
        """Return FNR's metrics of the round."""
        counts: dict[str, float | int] = {
            "fnr-ranked": len(self.ranked),
            "fnr-unranked": len(self.unranked),
            "fnr-refined": len(self.refined),
            "fnr-fell-back": len(self.asked) - len(self.refined),
        }
        if self.ranked:
            counts["fnr-accuracy"] = float(np.mean([one.accuracy for one in self.ranked.values()]))
        return counts


def record_of(reply: Message) -> FnrRecord:
    """Return FNR's record of a reply; nothing if it has none."""
    return dict(reply.content.config_records.get(RECORD_NAME, {}))


def one_line(text: str) -> str:
    """Return a node's words as a part of a sentence: on one line, without a last full stop."""
    return printable(" ".join(text.split())).rstrip(".")


def _sort_key(node: int, reply: Message) -> tuple[bool, int, int]:
    """Sort key of a reply: the client's number, where it has one, then the node."""
    number = record_of(reply).get("client")
    return (False, number, node) if isinstance(number, int) else (True, 0, node)


def _unusable(refined: ArrayRecord | None, before: ArrayRecord) -> str:
    """Return why a refined model cannot take the place of the one before; empty if it can."""
    if refined is None or list(refined) != list(before):
        return "its refined model has other arrays than the model before"
    for name, array in before.items():
        try:
            new, old = refined[name].numpy(), array.numpy()
        except (ValueError, TypeError, EOFError) as error:  # bytes that are no array
            return f"{name} of its refined model cannot be read: {error}"
        if new.shape != old.shape or new.dtype != old.dtype:
            return f"{name} of its refined model is {new.dtype}{list(new.shape)}, not {old.dtype}{list(old.shape)}"
        if (~np.isfinite(new) & np.isfinite(old)).any():  # a buffer may be infinite from the start, such as a mask
            return f"{name} of its refined model is not finite"
    return ""
