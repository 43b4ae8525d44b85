"""The server's line: a strategy around any other whose clients refine before their models are put together."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Result, Strategy

from fnrfl.algorithms.parts.norms import num_refined
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.training import BatchNormMode, FnrOptions, Training
from fnrfl.flower.fnr_record import RefinementTerms, other_public_data, refinement_targets
from fnrfl.flower.norm_round import NormRound, flower_log

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
        """Log what the strategy inside does."""
        self.strategy.summary()

    def _not_outermost(self, *_: object) -> NoReturn:
        """Refuse to be called by another strategy's `start`, which would send FNR's messages past what it promises."""
        raise CompatibilityError(
            "FNR cannot go together with a strategy around it: refinement sends class norms, an accuracy and a second "
            "model past it, so what it promises about privacy would not hold. Make FeatureNormStrategy the outermost "
            "strategy, and call its start()."
        )

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
        current.finish()
        arrays, metrics = self._aggregate_train(server_round, arrived)
        return arrays, MetricRecord({**(metrics or {}), **current.metrics()})

    def _refine(self, current: NormRound, grid: Grid) -> None:
        """Have the weakest clients refine; who does not, counts with the model that it has sent."""
        targets, peers = refinement_targets(list(current.ranked.values()), self.terms)
        current.asked = [*targets]
        connected = set(grid.get_node_ids())
        current.failed = {node: "it is not connected any more" for node in targets if node not in connected}
        if targets and self.terms.weight and not peers:
            flower_log.info("FNR: nobody else is there whose class norms could be targets: no penalty")
        messages = [
            current.message(node, self.terms, self._seconds, targets=norms, peers=peers)
            for node, norms in targets.items()
            if node in connected
        ]
        for reply in grid.send_and_receive(messages, timeout=self._seconds) if messages else ():
            current.take(reply, messages)
        self._check_refined(current)

    def _check_refined(self, current: NormRound) -> None:
        """Log who has not refined; stop where nobody ever does, since that is no FNR."""
        late = f"there was no reply in {self._seconds or math.inf:g} seconds"
        missing = {node: current.failed.get(node, late) for node in current.asked if node not in current.refined}
        for node, why in missing.items():
            flower_log.warning("FNR: node %d counts with its model before refinement: %s", node, why)
        flower_log.info("FNR: %d of %d clients refined", len(current.refined), len(current.replies))
        self._fruitless = -math.inf if current.refined else self._fruitless + bool(missing)
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
        raise CompatibilityError(
            f"FNR cannot go together with {private[0]}: refinement sends class norms, an accuracy and a second model "
            "past it, so what it promises about privacy would not hold. Use one of the two."
        )
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
