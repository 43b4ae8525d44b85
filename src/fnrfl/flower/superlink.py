"""Talks to the SuperLink of a deployment: registers nodes, starts runs of the signed app, follows them."""

from __future__ import annotations

import hashlib
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import FnrflError
from fnrfl.flower.deployment import Address, Deployment

if TYPE_CHECKING:
    from flwr.proto.node_pb2 import NodeInfo
    from flwr.supercore.control import ControlHttpClient

SIGNER = "fnrfl-deploy"  # the name of the deployment's key in `trusted.yaml`


@dataclass(frozen=True)
class SuperLink:
    """The SuperLink of a deployment that is running."""

    deployment: Deployment
    address: Address

    @cached_property
    def _control(self) -> ControlHttpClient:
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        root = (self.deployment.certs / "ca.crt").read_bytes() if self.address.secure else None
        asking = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        return ControlHttpClient.from_server_address(str(self.address), not self.address.secure, root, asking)

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Inside, a SuperLink that does not answer is an error in words."""
        import httpx

        try:
            yield
        except httpx.HTTPStatusError as error:
            told = error.response.text[:200] or str(error)
            raise FnrflError(f"The SuperLink at {self.address} has refused: {told}") from None
        except httpx.TransportError as error:
            raise FnrflError(
                f"The SuperLink at {self.address} does not answer ({error}). `fnrfl deploy status` shows what runs."
            ) from None

    def nodes(self) -> list[NodeInfo]:
        """Every node that is registered."""
        from flwr.proto.control_pb2 import ListNodesRequest

        return [one for one in self._control.ListNodes(ListNodesRequest()).nodes_info if one.status != "unregistered"]

    def register(self, name: str, key: bytes) -> None:
        """Let a node in by its public key (OpenSSH), unless it is registered already."""
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        public = public_key_to_bytes(load_ssh_public_key(key))
        if public not in {one.public_key for one in self.nodes()}:
            self._control.RegisterNode(RegisterNodeRequest(public_key=public, name=name))

    def start(self, config: Mapping[str, Any]) -> int:
        """Sign the app, and run it; the run's number."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = build_fab_from_disk(self.deployment.app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
        if (self.deployment.certs / "app.key").is_file():
            name = self._store_signed(fab)
            bare = fab_to_proto(Fab(fab.hash_str, b"", {}))
            request = StartRunRequest(fab=bare, app_spec=name, override_config=request.override_config)
        started = self._control.StartRun(request)
        if not started.HasField("run_id"):
            raise FnrflError("The SuperLink has not started the run. Its log is logs/superlink.log in the deployment.")
        return int(started.run_id)

    def _store_signed(self, fab: Any) -> str:
        """Put the app with its signature into the SuperLink's database, from where nodes are sent both; its name.

        Flower itself has signatures made and stored by its hub alone. The format and the nodes' check are Flower's.
        """
        from flwr.cli.config_utils import get_fab_metadata
        from flwr.common.constant import NOOP_FLWR_AID
        from flwr.server.superlink.linkstate import LinkStateFactory
        from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
        from flwr.supercore.fab import Fab
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.superlink.federation import NoOpFederationManager

        database = str(self.deployment.database)
        state = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()
        name = f"@{get_fab_metadata(fab.content)[0]}"
        signed = Fab(fab.hash_str, fab.content, signature(self.deployment, fab.content))
        state.store_app(signed, NOOP_FEDERATION_ID, name, TaskType.SERVER_APP, NOOP_FLWR_AID)
        return name

    def status(self, run: int) -> tuple[str, str, str]:
        """Of a run: starting, running or finished; how it ended; and why."""
        from flwr.proto.control_pb2 import ListRunsRequest

        told = self._control.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
        return told.status, told.sub_status, told.details

    def log(self, run: int) -> Iterator[str]:
        """What the run's ServerApp prints, as it comes, until it ends."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        for piece in self._control.StreamLogs(StreamLogsRequest(run_id=run, after_timestamp=0.0)):
            yield piece.log_output

    def stop(self, run: int) -> None:
        """Stop a run."""
        from flwr.proto.control_pb2 import StopRunRequest

        self._control.StopRun(StopRunRequest(run_id=run))


def signature(deployment: Deployment, content: bytes) -> dict[str, str]:
    """The signature of an app by the deployment's key, as Flower's nodes check it (`--trusted-entities`)."""
    import json

    from flwr.supercore.primitives.asymmetric_ed25519 import create_message_to_sign, load_private_key, sign_message

    now = int(time.time())
    message = create_message_to_sign(hashlib.sha256(content).digest(), now)
    made = sign_message(load_private_key(deployment.certs / "app.key"), message)
    text = urlsafe_b64encode(made).rstrip(b"=").decode()
    return {SIGNER: json.dumps({"signature": text, "signed_at": now}), "valid_license": "Valid"}
