"""The ClientApp of a node: it forwards letters to the node's worker, and imports neither torch nor the data.

    from fnrfl.flower.client_app import client_app

    app = client_app()

Flower starts a process for every message. The worker (`worker.py`) stays, with torch, the data and the client's memory.
Nothing that a message or the app's configuration says chooses a file: paths come from the node's own configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fnrfl.flower.envelopes import ASK, RECORD, WHO, packed, unpacked
from fnrfl.flower.own_config import OwnConfig
from fnrfl.flower.worker import WorkerLink

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp


def client_app() -> ClientApp:
    """An app that answers letters with the node's own client."""
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.query(WHO.partition(".")[2])
    def who(message: Message, context: Context) -> Message:
        label = OwnConfig.of(context.node_config).label
        return Message(RecordDict({RECORD: ConfigRecord({"label": label})}), reply_to=message)

    @app.train(ASK.partition(".")[2])
    def ask(message: Message, context: Context) -> Message:
        config = OwnConfig.of(context.node_config)
        return Message(packed(WorkerLink(config).ask(unpacked(message))), reply_to=message)

    return app
