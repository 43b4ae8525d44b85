"""The server's line: a strategy around any other whose clients refine before their models are put together."""

from __future__ import annotations

import inspect
import logging
import math
import uuid
from collections.abc import Iterable, Iterator
from statistics import mode
from typing import Any, Literal, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Result, Strategy

from fnrfl.algorithms.parts.norms import num_refined
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.training import BatchNormMode, FnrOptions, Training
from fnrfl.core.words import printable
from fnrfl.flower.fnr_record import (
    MEASURE,
    RECORD_NAME,
    REFINE,
    FnrRecord,
    Measured,
    RefinementTerms,
    other_public_data,
    read_measured,
    refinement_targets,
)

flower_log = logging.getLogger("flwr")
PAST_IT = (
    "refinement sends class norms, an accuracy and a second model past it, so what it promises about privacy would not "
    "hold."
)
FRUITLESS_ROUNDS = 2  # in which everybody who was asked has failed to refine, before anybody has: the run stops


class FeatureNormStrategy(Strategy):
    """FNR around a strategy of Flower's: the weakest clients refine before `aggregate_train` sees their models.

    Replies to training arrive with class norms and an accuracy on public data, measured by `FeatureNormMod` on the
    clients. The floor(share * n) clients with the lowest accuracy are sent the others' class norms and refine on
    public data; their models take the place of those that they sent before. All else in a reply stays. A client that
    does not answer in `timeout` seconds (None: those of `start`), or answers nonsense, counts with the model that it
    sent first; the log says so, and the metrics count it.

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
        timeout: float | None = None,
    ) -> None:
        _check_strategy(strategy)
        if timeout is not None and not 0 < timeout < math.inf:
            raise ConfigError(f"timeout = {timeout!r} is not allowed: it must be a number of seconds above 0.")
        self.strategy, self.timeout = strategy, timeout
        self.terms = RefinementTerms(
            share=share, weight=weight, penalty=penalty, target=target, epochs=epochs, lr=lr, momentum=momentum,
            weight_decay=weight_decay, batchnorm=batchnorm,
        )  # fmt: skip
        self._configure_train, self._aggregate_train = strategy.configure_train, strategy.aggregate_train
        self._seconds, self._fruitless, self._warned = timeout, 0.0, False
        self._grid: Grid | None = None
        self._round: NormRound | None = None

    def start(self, *args: Any, **options: Any) -> Result:
        """Run all rounds: `start` of the strategy inside, with its arguments, and with FNR in its training."""
        given = inspect.signature(self.strategy.start).bind(*args, **options)
        given.apply_defaults()
        self._seconds = given.arguments.get("timeout") if self.timeout is None else self.timeout
        self._fruitless, self._warned = 0.0, False
        flower_log.info("FNR around %s: %s", type(self.strategy).__name__, self.terms)
        attributes = vars(self.strategy)
        before = dict(attributes)
        attributes.update(configure_train=self._ask, aggregate_train=self._refine_and_aggregate)
        try:
            return self.strategy.start(*args, **options)
        finally:
            for name in ("configure_train", "aggregate_train"):
                del attributes[name]
                attributes.update({name: before[name]} if name in before else {})

    def summary(self) -> None:
        self.strategy.summary()

    def _not_outermost(self, *_: object) -> NoReturn:
        """Refuse to be called by another strategy's `start`, which would send FNR's messages past what it promises."""
        way_out = "Make FeatureNormStrategy the outermost strategy, and call its start()."
        raise CompatibilityError(f"FNR cannot go together with a strategy around it: {PAST_IT} {way_out}")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _not_outermost

    def _ask(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Return the messages of the strategy inside, asking for class norms if somebody is to be refined."""
        messages = list(self._configure_train(server_round, arrays, config, grid))
        refines = num_refined(len(messages), self.terms.share) > 0
        self._grid, self._round = grid, NormRound(server_round, messages) if refines else None
        return messages

    def _refine_and_aggregate(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refine the weakest, and have the strategy inside put the models together."""
        current, self._round = self._round, None
        if current is None or self._grid is None:
            return self._aggregate_train(server_round, replies)
        arrived = current.receive(replies)
        current.rank()
        if (others := other_public_data(list(current.ranked.values()))) and not self._warned:
            self._warned = True
            flower_log.warning(
                "FNR: public data of node %s has other numbers of labels than that of most nodes, so norms and "
                "accuracies do not compare. Give every node the same public data.",
                ", ".join(map(str, others)),
            )
        if current.ranked:
            self._refine(current, self._grid)
        fnr_metrics = current.finish()
        arrays, metrics = self._aggregate_train(server_round, arrived)
        return arrays, MetricRecord({**(metrics or {}), **fnr_metrics})

    def _refine(self, current: NormRound, grid: Grid) -> None:
        """Have the weakest clients refine; who does not, counts with the model that it has sent."""
        targets, peers = refinement_targets(list(current.ranked.values()), self.terms)
        current.asked = [*targets]
        connected = set(grid.get_node_ids())
        current.failed = dict.fromkeys(targets.keys() - connected, "it is not connected any more")
        if targets and self.terms.weight and not peers:
            flower_log.info("FNR: nobody else is there whose class norms could be targets: no penalty")
        messages = [
            current.message(node, self.terms, self._seconds, targets=norms, peers=peers)
            for node, norms in targets.items()
            if node in connected
        ]
        for reply in grid.send_and_receive(messages, timeout=self._seconds) if messages else ():
            current.take(reply, messages)
        late = f"there was no reply in {self._seconds or math.inf:g} seconds"
        missing = {node: current.failed.get(node, late) for node in current.asked if node not in current.refined}
        for node, why in missing.items():
            flower_log.warning("FNR: node %d counts with its model before refinement: %s", node, why)
        flower_log.info("FNR: %d of %d clients refined", len(current.refined), len(current.replies))
        self._fruitless = -math.inf if current.refined else self._fruitless + bool(missing)  # that would be no FNR
        if self._fruitless >= FRUITLESS_ROUNDS:
            node, why = next(iter(missing.items()))
            raise FnrflError(
                f"FNR has refined nobody in the first {FRUITLESS_ROUNDS} rounds in which it tried. Node {node}: {why}. "
                "Correct that, or use the strategy inside alone."
            )


def _check_strategy(strategy: object) -> None:
    """Refuse what FNR cannot go around, such as promises about every number that leaves a client."""
    classes = [cls.__name__ for one in _strategies(strategy, set()) for cls in type(one).__mro__]
    if private := [name for name in classes if name.startswith(("DifferentialPrivacy", "SecAgg"))]:
        raise CompatibilityError(f"FNR cannot go together with {private[0]}: {PAST_IT} Use one of the two.")
    if isinstance(strategy, FeatureNormStrategy):
        raise CompatibilityError("FeatureNormStrategy is around this strategy already. Use it once.")
    if isinstance(strategy, FedXgbBagging | FedXgbCyclic):
        raise CompatibilityError(
            f"FNR cannot refine what {type(strategy).__name__} trains: trees have no features. Use it without FNR."
        )
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            "FeatureNormStrategy goes around a strategy object of flwr.serverapp.strategy, such as FedAvg(), and was "
            f"given a {type(strategy).__module__}.{type(strategy).__name__}."
        )


def _strategies(outer: object, seen: set[int]) -> Iterator[object]:
    """Yield a strategy and those that it has as attributes, at any depth."""
    if id(outer) not in seen:
        seen.add(id(outer))
        yield outer
        for part in vars(outer).values() if isinstance(outer, Strategy) else ():
            yield from _strategies(part, seen)


# -- a round -----------------------------------------------------------------------------------------------------------


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
        for message in messages:  # they may share one RecordDict
            message.content = RecordDict({**message.content, RECORD_NAME: self._record(MEASURE)})

    def _record(self, phase: str, **more: object) -> ConfigRecord:
        record: FnrRecord = {"phase": phase, "round": self.number, "question": self.question, **more}
        return ConfigRecord(record)

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
        number = {node: record_of(reply).get("client") for node, reply in self.replies.items()}
        clients = {node: one if isinstance(one, int) else math.inf for node, one in number.items()}
        self.replies = dict(sorted(self.replies.items(), key=lambda one: (clients[one[0]], one[0])))
        return [*self.replies.values(), *sorted(errors, key=lambda reply: reply.metadata.src_node_id)]

    def rank(self) -> None:
        """Read what clients measured; a client with an unsound record is not ranked."""
        for node, reply in self.replies.items():
            record = record_of(reply)
            try:
                if not record:
                    raise FnrflError("its ClientApp has no mods=[FeatureNormMod(...)], which measures class norms")
                self.ranked[node] = read_measured(node, record)
                if record.get("arrays") not in reply.content.array_records:
                    raise FnrflError("its record names no ArrayRecord of its reply")
            except FnrflError as error:
                self.ranked.pop(node, None)
                self.unranked[node] = one_line(str(error))
        classes = mode([len(one.norms) for one in self.ranked.values()] or [0])
        for node in [node for node, one in self.ranked.items() if len(one.norms) != classes]:
            self.unranked[node] = f"it has norms of {len(self.ranked.pop(node).norms)} classes, others of {classes}"
        for node, why in self.unranked.items():
            flower_log.warning("FNR: node %d is not ranked: %s", node, why)
        if self.replies and not self.ranked:
            node, why = next(iter(self.unranked.items()))
            raise FnrflError(
                f"FNR has nobody to refine in round {self.number}: no client measured its model. Node {node}: {why}."
            )

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
            trained, new = self.replies[node], reply.content.array_records.get("arrays")
            try:
                self.refined[node] = _checked(new, trained.content.array_records[record_of(trained)["arrays"]])
            except FnrflError as error:
                self.failed[node] = one_line(str(error))

    def finish(self) -> dict[str, float | int]:
        """Put refined models into the replies, and take the records out; nothing else changes. Return FNR's metrics."""
        for node, reply in self.replies.items():
            model = {record_of(reply)["arrays"]: self.refined[node]} if node in self.refined else {}
            reply.content = RecordDict({k: model.get(k, v) for k, v in reply.content.items() if k != RECORD_NAME})
        accuracy = [one.accuracy for one in self.ranked.values()]
        counts = {"ranked": len(self.ranked), "unranked": len(self.unranked), "refined": len(self.refined)}
        counts["fell-back"] = len(self.asked) - len(self.refined)
        mean = {"fnr-accuracy": float(np.mean(accuracy))} if accuracy else {}
        return {f"fnr-{name}": count for name, count in counts.items()} | mean


def record_of(reply: Message) -> FnrRecord:
    """Return FNR's record of a reply; nothing if it has none."""
    return dict(reply.content.config_records.get(RECORD_NAME, {}))


def one_line(text: str) -> str:
    """Return a node's words as a part of a sentence: on one line, without a last full stop."""
    return printable(" ".join(text.split())).rstrip(".")


def _checked(refined: ArrayRecord | None, before: ArrayRecord) -> ArrayRecord:
    """Return a refined model that can take the place of the one before; raise why it cannot."""
    if refined is None or list(refined) != list(before):
        raise FnrflError("its refined model has other arrays than the model before")
    for name, array in before.items():
        what = f"{name} of its refined model"
        try:
            new, old = refined[name].numpy(), array.numpy()
        except (ValueError, TypeError, EOFError) as error:  # bytes that are no array
            raise FnrflError(f"{what} cannot be read: {error}") from None
        if new.shape != old.shape or new.dtype != old.dtype:
            raise FnrflError(f"{what} is {new.dtype}{list(new.shape)}, not {old.dtype}{list(old.shape)}")
        if (~np.isfinite(new) & np.isfinite(old)).any():  # a buffer may be infinite from the start, such as a mask
            raise FnrflError(f"{what} is not finite")
    return refined
