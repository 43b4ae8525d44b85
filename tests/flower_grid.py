"""A Flower grid in this process: ClientApps answer messages that have passed through Flower's own serialisation.

    grid = DirectGrid({11: app, 12: app})                 # node -> ClientApp, partitions in this order
    strategy.start(grid, arrays, num_rounds=2)
    grid.sent                                              # every message, as it was sent

`grid.tamper(message, reply)` may change what comes back: it gives the replies that the server gets, in their place.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Tamper = Callable[[Message, Message], list[Message]]


def over_the_wire(message: Message) -> Message:
    return message_from_proto(message_to_proto(message))


class DirectGrid(Grid):
    def __init__(self, apps: Mapping[int, ClientApp], tamper: Tamper | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.apps, self.tamper = dict(apps), tamper or (lambda message, reply: [reply])
        self.contexts = {
            node: Context(1, node, {"partition-id": place, "num-partitions": len(apps)}, RecordDict(), {})
            for place, node in enumerate(apps)
        }
        self.sent: list[Message] = []
        self.waited: list[float | None] = []
        self.arrival: Callable[[list[Message]], list[Message]] = list
        self._replies: dict[str, list[Message]] = {}

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            self.sent.append(over_the_wire(message))
            replies = self.tamper(message, self._answer(over_the_wire(message)))
            self._replies[message.metadata.message_id] = [over_the_wire(reply) for reply in replies]
            yield message.metadata.message_id

    def _answer(self, message: Message) -> Message:
        """As a SuperNode does: an exception is a reply too."""
        node = message.metadata.dst_node_id
        try:
            return self.apps[node](message, self.contexts[node])
        except Exception as error:
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [reply for one in message_ids for reply in self._replies.pop(one, [])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        self.waited.append(timeout)
        return self.arrival(list(self.pull_messages(list(self.push_messages(messages)))))
