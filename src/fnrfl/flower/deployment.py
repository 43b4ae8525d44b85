"""The folder of a deployment, where all its state is, and the settings of its processes and nodes.

A node's own settings are read in the process that Flower starts for every message, so this imports little.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fnrfl.core.errors import ConfigError
from fnrfl.rundir import files

if TYPE_CHECKING:
    from fnrfl.federation.node_config import NodeConfig

NODE_FILE = "node.toml"
# No process that `fnrfl deploy` starts asks anything outside, whatever the user's settings are.
FLOWER_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPERGRID_API_URL": "http://127.0.0.1:9",  # nobody listens there: an app can only come from this deployment
    "FLWR_SUPERGRID_ADDRESS": "127.0.0.1:9",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; Flower's default is 1
}


class Deployment:
    """Paths of a deployment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.app = root / "app"  # the Flower app: what is signed and sent to nodes
        self.certs = root / "certs"  # certificates of the server, and the key that signs the app
        self.home = root / "flower"  # FLWR_HOME of every process
        self.logs = root / "logs"  # what the processes print
        self.database = self.home / "superlink.db"  # of the SuperLink: runs, nodes and apps

    @staticmethod
    def at(folder: Path) -> Deployment:
        """Return the deployment in a folder that `fnrfl deploy init` has made."""
        found = Deployment(folder.resolve())
        if not (found.app / "pyproject.toml").is_file():
            raise ConfigError(f"{folder} has no app/pyproject.toml in it. Make it with: fnrfl deploy init DIR RECIPE")
        return found

    @property
    def typed(self) -> str:
        """The folder as it is typed in a shell."""
        return shlex.quote(str(self.root))

    def node(self, client: int) -> Path:
        """Return the folder of the node that has a client."""
        return self.root / "nodes" / str(client)

    @property
    def nodes(self) -> list[Path]:
        """Folders of nodes, in the order of their clients."""
        found = (self.root / "nodes").glob("[0-9]*") if (self.root / "nodes").is_dir() else ()
        return sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))

    def environment(self) -> dict[str, str]:
        """Return the environment of every process: quiet, and with nothing in the user's home."""
        beside = str(Path(sys.executable).parent)  # Flower starts programs by their names
        path = os.pathsep.join([beside, os.environ.get("PATH", "")])
        return {**os.environ, **FLOWER_QUIET, "FLWR_HOME": str(self.home), "PATH": path}


@dataclass(frozen=True)
class Address:
    """Where the SuperLink is, and whether with TLS."""

    host: str
    port: int
    secure: bool

    def write(self, deployment: Deployment) -> None:
        """Write Flower's configuration, in which the SuperLink is the connection `deployment`."""
        deployment.home.mkdir(parents=True, exist_ok=True)
        deployment.home.chmod(0o700)  # the SuperLink's database holds tokens
        root = json.dumps(str(deployment.certs / "ca.crt"), ensure_ascii=False)
        tls = f"root-certificates = {root}" if self.secure else "insecure = true"
        text = f'[superlink]\ndefault = "deployment"\n\n[superlink.deployment]\naddress = "{self}"\n{tls}\n'
        files.write(deployment.home / "config.toml", text)

    @staticmethod
    def read(deployment: Deployment) -> Address:
        """Read the address of a deployment that has been started."""
        file = deployment.home / "config.toml"
        if not file.is_file():
            raise ConfigError(f"{deployment.root} is not running. Start it with: fnrfl deploy up {deployment.typed}")
        found = tomllib.loads(file.read_text(encoding="utf-8"))["superlink"]["deployment"]
        host, _, port = found["address"].rpartition(":")
        return Address(host, int(port), not found.get("insecure", False))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class NodeSettings:
    """A node's folder, and the settings that its SuperNode was started with; no message changes any."""

    folder: Path
    given: Mapping[str, object]

    @staticmethod
    def of(node_config: Mapping[str, object]) -> NodeSettings:
        """Read what Flower was given with `--node-config`, such as `partition-id=0 num-partitions=2`."""
        given = {"partition" if key == "partition-id" else key: value for key, value in node_config.items()}
        given.pop("num-partitions", None)
        folder = given.pop("folder", None)
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise ConfigError(
                f"The node's folder is {folder!r}; it must be the path of a folder. Start its SuperNode with "
                """--node-config 'folder="/a/folder/of/the/node"'."""
            )
        return NodeSettings(Path(folder).resolve(), given)

    def in_file(self) -> dict[str, object]:
        """Read the keys of the node's file, which need not be there."""
        file = self.folder / NODE_FILE
        try:
            return tomllib.loads(file.read_text(encoding="utf-8-sig")) if file.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{file} cannot be read as TOML ({error}). Correct it.") from None

    @property
    def label(self) -> str:
        """Which client the node is: the number of its partition, or its name."""
        values = self.in_file() | dict(self.given)
        if (label := values.get("partition", values.get("name"))) is None:
            raise ConfigError(
                f"{self.folder / NODE_FILE} has neither a partition nor a name. Write which client this node is."
            )
        return str(label)

    def read(self) -> NodeConfig:
        """Read and check the node's own configuration, in the worker; what the SuperNode was given goes first."""
        from fnrfl.federation.node_config import NodeConfig, paths_beside

        values = {"folder": str(self.folder), **paths_beside(self.folder, self.in_file()), **self.given}
        return NodeConfig.from_values(values, str(self.folder / NODE_FILE))
