"""The ClientApp of a node: it forwards requests to the node's worker, and imports neither torch nor the data.

    from fnrfl.flower.client_app import client_app

    app = client_app()

Flower starts a process for every message. The worker (`worker.py`) stays, with torch, the data and the client's memory.
Nothing that a message or the app's configuration says chooses a file: paths come from the node's own configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import FnrflError
from fnrfl.flower.deployment import NodeSettings
from fnrfl.flower.worker import WorkerLink

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp

RECORD = "fnrfl"  # of the record and of the array in it
WHO, ASK = "query.fnrfl_who", "train.fnrfl"  # message types: which client are you; a request


def client_app() -> ClientApp:
    """Return an app that answers requests with the node's own client."""
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query(WHO.partition(".")[2])
    def who(message: Message, context: Context) -> Message:
        label = NodeSettings.of(context.node_config).label
        return Message(RecordDict({RECORD: ConfigRecord({"label": label})}), reply_to=message)

    @app.train(ASK.partition(".")[2])
    def ask(message: Message, context: Context) -> Message:
        link = WorkerLink(NodeSettings.of(context.node_config))
        return Message(packed(link.ask(unpacked(message))), reply_to=message)

    return app


def packed(request: bytes) -> RecordDict:
    """Return bytes as Flower carries them: an array, which it sends in pieces without copying it to text."""
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({RECORD: ArrayRecord({RECORD: Array("uint8", (len(request),), "bytes", request)})})


def unpacked(message: Message) -> bytes:
    """Return the bytes in a message."""
    record = message.content.array_records.get(RECORD)
    if record is None or list(record) != [RECORD] or len(message.content) != 1:
        raise FnrflError(
            f"A message of the kind {message.metadata.message_type!r} has no request of fnrfl's in it, or more. "
            "The app that runs on the server is not the one that `fnrfl deploy init` writes, or another version."
        )
    return record[RECORD].data


def weight(part: Any) -> int:
    """Return the bytes that Flower sends for a message, or for a part of one: every object in it, with its headers."""
    return len(part.deflate()) + sum(map(weight, (part.children or {}).values()))
