"""The server's line: a strategy around any other whose clients refine before their models are put together."""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Strategy

from fnrfl.algorithms.parts.norms import num_refined
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.refinement import FnrOptions
from fnrfl.core.training import BatchNormMode, Training
from fnrfl.core.words import printable
from fnrfl.flower.guarantees import REFUSAL, refuse_callers, refuse_strategy
from fnrfl.flower.norm_letters import (
    LETTER,
    MEASURE,
    REFINE,
    Measured,
    NormLetter,
    RefinementOrder,
    RefinementTerms,
    num_classes_of,
    read_measured,
    refinement_orders,
)

log = logging.getLogger("flwr")


@dataclass
class _Question:
    """What the clients of one round were asked, and what came of it."""

    name: str  # of this round in this run: a reply to another is late
    grid: Grid
    messages: dict[int, Message]  # what each node was sent
    ranked: dict[int, Measured] = field(default_factory=dict)
    unranked: dict[int, str] = field(default_factory=dict)  # node -> why
    asked: list[int] = field(default_factory=list)  # to refine
    refined: dict[int, ArrayRecord] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # node -> why its refined model cannot be used


class FeatureNormStrategy(Strategy):
    """FNR around a strategy of Flower's: the weakest clients refine before `aggregate_train` sees their models.

    Replies to training arrive with class norms and an accuracy on public data, measured by the mod `FeatureNormMod` on
    the clients. The floor(share * n) clients with the lowest accuracy are sent the others' class norms and refine on
    public data; their models take the place of those that they sent before. All else in a reply stays. A client that
    does not answer in `timeout` seconds, or answers nonsense, counts with the model that it sent first; the log says
    so, and the metrics count it.

    The options are those of `[fnr]` in a config and of `fnrfl.refine`, which clients call. `share=0` is the strategy
    alone.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        share: float = FnrOptions.share,
        weight: float = FnrOptions.weight,
        penalty: str = FnrOptions.penalty,
        target: Literal["others", "all"] = FnrOptions.target,
        epochs: int = FnrOptions.epochs,
        lr: float = Training.lr,
        momentum: float = Training.momentum,
        weight_decay: float = 0.0,
        batchnorm: BatchNormMode = FnrOptions.batchnorm,
        timeout: float = 3600.0,
    ) -> None:
        _check_strategy(strategy)
        if not 0 < timeout < math.inf:
            raise ConfigError(f"timeout = {timeout!r} is not allowed: it must be a number of seconds above 0.")
        self.strategy, self.timeout = strategy, timeout
        self.terms = RefinementTerms(
            share=share, weight=weight, penalty=penalty, target=target, epochs=epochs, lr=lr, momentum=momentum,
            weight_decay=weight_decay, batchnorm=batchnorm,
        )  # fmt: skip
        self._question: _Question | None = None

    def summary(self) -> None:
        """Log what FNR does, and then what the strategy inside does."""
        log.info("\t├──> FNR around %s: %s", type(self.strategy).__name__, self.terms)
        self.strategy.summary()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy inside does."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy inside does."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of the strategy inside, with the question for class norms, if somebody is to be refined."""
        refuse_callers()
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._question = None
        if num_refined(len(messages), self.terms.share) == 0:
            return messages
        self._question = _Question(uuid.uuid4().hex, grid, {one.metadata.dst_node_id: one for one in messages})
        letter = ConfigRecord({"phase": MEASURE, "round": server_round, "question": self._question.name})
        for message in messages:  # they may share one RecordDict
            message.content = RecordDict({**message.content, LETTER: letter})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refine the weakest, and have the strategy inside put the models together."""
        question, self._question = self._question, None
        if question is None:
            return self.strategy.aggregate_train(server_round, replies)
        arrived = _sorted(_current(question, replies))
        models = {reply.metadata.src_node_id: reply for reply in arrived if reply.has_content()}
        places = _read_letters(question, models)
        if models and not question.ranked:
            raise FnrflError(
                f"FNR has nobody to refine in round {server_round}: no client measured its model. Node "
                f"{next(iter(question.unranked))}: {next(iter(question.unranked.values()))}."
            )
        self._refine(server_round, question, models, places)
        for node, reply in models.items():
            model = {places[node]: question.refined[node]} if node in question.refined else {}
            reply.content = RecordDict({k: model.get(k, v) for k, v in reply.content.items() if k != LETTER})
        new, metrics = self.strategy.aggregate_train(server_round, arrived)
        return new, MetricRecord({**(metrics or {}), **_counts(question)})

    def _refine(
        self, server_round: int, question: _Question, models: dict[int, Message], places: dict[int, str]
    ) -> None:
        """Have the weakest clients refine; what comes back and can be used is in the question afterwards."""
        orders = refinement_orders(list(question.ranked.values()), self.terms) if question.ranked else []
        question.asked = [order.node for order in orders]
        connected = set(question.grid.get_node_ids()) if orders else set()
        question.failed = {node: "it is not connected any more" for node in question.asked if node not in connected}
        messages = [self._order(server_round, question, order) for order in orders if order.node in connected]
        replies = question.grid.send_and_receive(messages, timeout=self.timeout) if messages else []
        for reply in replies:
            _take_refined(question, reply, models, places)
        for node in question.asked:
            if node not in question.refined:
                why = question.failed.setdefault(node, f"there was no reply in {self.timeout:g} seconds")
                log.warning("FNR: node %d counts with its model before refinement: %s", node, why)
        log.info("FNR: %d of %d clients refined", len(question.refined), len(models))

    def _order(self, server_round: int, question: _Question, order: RefinementOrder) -> Message:
        """The message that asks a client to refine; it goes the way of the message that asked it to train."""
        terms = {name: value for name, value in vars(self.terms).items() if name not in ("share", "target")}
        letter: NormLetter = {"phase": REFINE, "round": server_round, "question": question.name, **terms}
        letter |= {"targets": list(order.targets), "peers": order.peers}
        sent = question.messages[order.node].metadata
        return Message(
            RecordDict({LETTER: ConfigRecord(letter)}),
            dst_node_id=order.node,
            message_type=sent.message_type,
            group_id=sent.group_id,
            ttl=self.timeout,
        )


def _check_strategy(strategy: object) -> None:
    refuse_strategy(strategy)
    if isinstance(strategy, FeatureNormStrategy):
        raise CompatibilityError("FeatureNormStrategy is around this strategy already. Use it once.")
    if isinstance(strategy, FedXgbBagging | FedXgbCyclic):
        raise CompatibilityError(
            f"FNR cannot refine what {type(strategy).__name__} trains: trees have no features. Use it without FNR."
        )
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"FeatureNormStrategy goes around a strategy object of flwr.serverapp.strategy, such as FedAvg(), and was "
            f"given a {type(strategy).__module__}.{type(strategy).__name__}."
        )


def _current(question: _Question, replies: Iterable[Message]) -> list[Message]:
    """The replies to this round's question, one for each node; late and repeated ones are left out."""
    current: dict[int, Message] = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            if REFUSAL in (reply.error.reason or ""):
                raise CompatibilityError(f"Node {node} refused: {printable(reply.error.reason or '')}")
            current.setdefault(node, reply)
        elif _letter(reply).get("question", question.name) != question.name:
            log.warning("FNR: a late reply of node %d is ignored", node)
        elif node in current and current[node].has_content():
            log.warning("FNR: a second reply of node %d is ignored", node)
        else:
            current[node] = reply
    return list(current.values())


def _sorted(replies: list[Message]) -> list[Message]:
    """Replies in the order of clients' numbers, then of nodes, so that the order of arrival changes no result."""

    def place(reply: Message) -> tuple[bool, int, int]:
        number = _letter(reply).get("client") if reply.has_content() else None
        known = isinstance(number, int)
        return not known, number if known else 0, reply.metadata.src_node_id  # type: ignore[return-value]

    return sorted(replies, key=place)


def _letter(reply: Message) -> NormLetter:
    return dict(reply.content.config_records.get(LETTER, {}))


def _read_letters(question: _Question, models: dict[int, Message]) -> dict[int, str]:
    """Who measured what goes into the question; given is where in its reply each ranked client has its model."""
    for node, reply in models.items():
        letter = _letter(reply)
        try:
            if not letter:
                raise FnrflError("its ClientApp has no mods=[FeatureNormMod(...)], which measures class norms")
            measured = read_measured(node, letter)
            if letter.get("arrays") not in reply.content.array_records:
                raise FnrflError("its letter names no ArrayRecord of its reply")
            question.ranked[node] = measured
        except FnrflError as error:
            question.unranked[node] = printable(str(error))
    classes = num_classes_of(list(question.ranked.values())) if question.ranked else 0
    for node in [node for node, one in question.ranked.items() if len(one.norms) != classes]:
        question.unranked[node] = f"it has norms of {len(question.ranked.pop(node).norms)} classes, others of {classes}"
    for node, why in question.unranked.items():
        log.warning("FNR: node %d is not ranked: %s", node, why)
    return {node: str(_letter(models[node])["arrays"]) for node in question.ranked}


def _take_refined(question: _Question, reply: Message, models: dict[int, Message], places: dict[int, str]) -> None:
    """Put a refined model into the question, or why it cannot be used; ignore what is late or comes twice."""
    node = reply.metadata.src_node_id
    if node not in question.asked or node in question.refined:
        log.warning("FNR: a second refined model, or one that nobody asked for, of node %d is ignored", node)
    elif reply.has_error():
        question.failed[node] = printable(reply.error.reason or "its reply is an error without a reason")
    elif (_letter(reply).get("question"), _letter(reply).get("phase")) != (question.name, REFINE):
        log.warning("FNR: a late reply of node %d is ignored", node)
    else:
        before = models[node].content.array_records[places[node]]
        why = _unusable(reply.content.array_records.get("arrays"), before)
        if why:
            question.failed[node] = printable(why)
        else:
            question.refined[node] = reply.content.array_records["arrays"]


def _unusable(refined: ArrayRecord | None, before: ArrayRecord) -> str:
    """Why a refined model cannot take the place of the one before; nothing if it can."""
    if refined is None or list(refined) != list(before):
        return "its refined model has other arrays than the model before"
    for name, array in before.items():
        try:
            new = refined[name].numpy()
        except (ValueError, TypeError, EOFError) as error:  # bytes that are no array
            return f"{name} of its refined model cannot be read: {error}"
        if new.shape != tuple(array.shape) or str(new.dtype) != array.dtype:
            return f"{name} of its refined model is {new.dtype}{list(new.shape)}, not {array.dtype}{list(array.shape)}"
        if not np.isfinite(new).all():
            return f"{name} of its refined model is not finite"
    return ""


def _counts(question: _Question) -> dict[str, float | int]:
    """What the metrics of a round say about FNR."""
    counts: dict[str, float | int] = {
        "fnr-ranked": len(question.ranked),
        "fnr-unranked": len(question.unranked),
        "fnr-refined": len(question.refined),
        "fnr-fell-back": len(question.asked) - len(question.refined),
    }
    if question.ranked:
        counts["fnr-accuracy"] = float(np.mean([one.accuracy for one in question.ranked.values()]))
    return counts
