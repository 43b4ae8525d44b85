"""What a node's worker answers with: messages of the meeting, and letters of the runs that were agreed on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fnrfl.core.errors import ShareableError
from fnrfl.core.isolation import isolated
from fnrfl.core.words import printable
from fnrfl.engines.wire import plain_fields, to_bytes
from fnrfl.federation.agreement import Agreement, as_plain, from_plain
from fnrfl.federation.handshake import answer_question, read_question
from fnrfl.federation.messages import NodeReply, check_run_id
from fnrfl.federation.node import Node, failure_at_node
from fnrfl.federation.node_config import NodeConfig
from fnrfl.federation.node_data import build_node, recipe_at_node
from fnrfl.rundir import files


@dataclass
class NodeService:
    """The runs of a node. A run that was agreed on before this process began is read from the node's folder.

    The node's own configuration is read before every handshake.
    """

    read_config: Callable[[], NodeConfig]
    folder: Path
    config: NodeConfig = field(init=False)
    _open: dict[str, Node] = field(default_factory=dict)  # the last run

    def __post_init__(self) -> None:
        self.config = self.read_config()

    def answer(self, told: bytes) -> bytes:
        """The answer to a message; what goes wrong is told, never raised."""
        with isolated():
            return self._meet(told) if told[:1] == b"{" else self._letter(told)

    def _meet(self, told: bytes) -> bytes:
        """The answer to a question before the first letter."""
        try:
            question = read_question(told)
            if "run" not in question:
                self._read_again()
                return json.dumps(answer_question(question, self.config)).encode()
            agreement = from_plain(Agreement, question.get("agreement"), "the server")
            self._keep(check_run_id(question["run"]), str(question.get("recipe")), agreement)
            return b"{}"
        except Exception as error:
            return json.dumps({"error": failure_at_node(error).reason}).encode()

    def _read_again(self) -> None:
        """Read the node's own configuration: if it was changed, open runs are opened again with what it says now."""
        config = self.read_config()
        if config != self.config:
            self.config = config
            self._open.clear()

    def _keep(self, run: str, recipe: str, agreement: Agreement) -> None:
        """Write what was agreed on, once for a run."""
        file = self.folder / run / "agreed.json"
        text = json.dumps({"recipe": recipe, "agreement": as_plain(agreement)})
        if file.is_file():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if (kept["recipe"], _hash(kept)) != (recipe, agreement.sha256):
                raise ShareableError(f"Run {run} was agreed on with another recipe or other data. Begin a new run.")
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, text)
        self._prune(file)

    def _prune(self, new: Path) -> None:
        """Remove the folders of runs that were used longest ago; those of the new run and of the open one stay."""
        agreed = [file for file in self.folder.glob("*/agreed.json") if not file.parent.is_symlink()]
        old = sorted(agreed, key=lambda file: (file == new or file.parent.name in self._open, file.stat().st_mtime))
        for file in old[: -self.config.keep_runs]:
            if file != new and file.parent.name not in self._open:
                file.unlink()  # a folder that is half gone is no run
                shutil.rmtree(file.parent, ignore_errors=True)

    def _letter(self, told: bytes) -> bytes:
        """The answer to a letter; the run is opened first, which imports the classes that the letter names."""
        head: dict[str, object] = {}
        try:
            head = plain_fields(told)
            node = self._node(check_run_id(head.get("run")))
            print(
                f"round {int(str(head['round'])) + 1}  {printable(str(head['phase'])[:40])}", flush=True
            )  # worker.log
        except Exception as error:
            client = head.get("client")
            who = client if isinstance(client, int) else -1
            return to_bytes(NodeReply(str(head.get("id", "")), who, failure_at_node(error)))
        return node.answer(told)

    def _node(self, run: str) -> Node:
        """The node of a run, with its data read; that of another run is forgotten."""
        if run not in self._open:
            file = self.folder / run / "agreed.json"
            if not file.is_file():
                raise ShareableError(f"Run {run} was not agreed on with this node, or its folder was removed.")
            kept = json.loads(files.read(file, "what was agreed on must be there"))
            file.touch()  # the run was used now
            agreement = from_plain(Agreement, kept["agreement"], "the server")
            built = build_node(recipe_at_node(kept["recipe"], self.config), self.config, agreement)
            self._open = {run: Node(built.participant, self.folder, run)}
        return self._open[run]


def _hash(kept: dict[str, object]) -> str:
    return from_plain(Agreement, kept["agreement"], "the server").sha256
