"""The folder of a deployment: where everything is, and how the processes in it are started. All state is in there."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from fnrfl.core.errors import ConfigError
from fnrfl.rundir import files

# No process that `fnrfl deploy` starts asks anything outside, whatever the user's settings are.
FLOWER_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPERGRID_API_URL": "http://127.0.0.1:9",  # nobody listens there: an app can only come from this deployment
    "FLWR_SUPERGRID_ADDRESS": "127.0.0.1:9",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; Flower's own is 1
}
MARK = "FNRFL_DEPLOYMENT"  # in the environment of every process of a deployment


@dataclass(frozen=True)
class Deployment:
    """Paths of a deployment."""

    root: Path

    @staticmethod
    def at(folder: Path) -> Deployment:
        """The deployment in a folder that `fnrfl deploy init` has made."""
        found = Deployment(folder.resolve())
        if not (found.app / "pyproject.toml").is_file():
            raise ConfigError(f"{folder} has no app/pyproject.toml in it. Make it with: fnrfl deploy init DIR RECIPE")
        return found

    @property
    def typed(self) -> str:
        """The folder as it is typed in a shell."""
        return shlex.quote(str(self.root))

    @property
    def app(self) -> Path:
        """The Flower app: what is signed and sent to nodes."""
        return self.root / "app"

    @property
    def certs(self) -> Path:
        """Certificates of the server, and the key that signs the app."""
        return self.root / "certs"

    @property
    def home(self) -> Path:
        """FLWR_HOME of every process."""
        return self.root / "flower"

    @property
    def logs(self) -> Path:
        """What the processes print."""
        return self.root / "logs"

    @property
    def database(self) -> Path:
        """The SuperLink's: runs, nodes and apps."""
        return self.home / "superlink.db"

    def node(self, client: int) -> Path:
        """The folder of the node that has a client."""
        return self.root / "nodes" / str(client)

    @property
    def nodes(self) -> list[Path]:
        """Folders of nodes, in the order of their clients."""
        found = (self.root / "nodes").glob("[0-9]*") if (self.root / "nodes").is_dir() else ()
        return sorted((path for path in found if path.name.isdecimal()), key=lambda path: int(path.name))

    @property
    def mark(self) -> str:
        """What the environment of its processes has: made once, so that no other folder has the same."""
        file = self.home / "mark"
        if not file.is_file():
            self.home.mkdir(parents=True, exist_ok=True)
            files.write(file, secrets.token_hex(16))
        return file.read_text().strip()

    def environment(self) -> dict[str, str]:
        """For every process that is started: quiet, and nothing in the user's home."""
        beside = str(Path(sys.executable).parent)  # Flower starts programs by their names
        path = os.pathsep.join([beside, os.environ.get("PATH", "")])
        return {**os.environ, **FLOWER_QUIET, MARK: self.mark, "FLWR_HOME": str(self.home), "PATH": path}

    def quiet_here(self) -> None:
        """The same for this process; before Flower is imported, which reads its settings then."""
        os.environ.update(FLOWER_QUIET | {"FLWR_HOME": str(self.home)})


@dataclass(frozen=True)
class Address:
    """Where the SuperLink is, and whether with TLS."""

    host: str
    port: int
    secure: bool

    def write(self, deployment: Deployment) -> None:
        """For later commands, and as the connection `deployment` for Flower's own."""
        deployment.home.mkdir(parents=True, exist_ok=True)
        deployment.home.chmod(0o700)  # the SuperLink's database holds tokens
        files.write(deployment.home / "address.json", json.dumps(vars(self)))
        tls = (
            f"root-certificates = {json.dumps(str(deployment.certs / 'ca.crt'))}" if self.secure else "insecure = true"
        )
        text = f'[superlink]\ndefault = "deployment"\n\n[superlink.deployment]\naddress = "{self}"\n{tls}\n'
        files.write(deployment.home / "config.toml", text)

    @staticmethod
    def read(deployment: Deployment) -> Address:
        """Of a deployment that has been started."""
        file = deployment.home / "address.json"
        if not file.is_file():
            raise ConfigError(f"{deployment.root} is not running. Start it with: fnrfl deploy up {deployment.typed}")
        return Address(**json.loads(file.read_text()))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"
