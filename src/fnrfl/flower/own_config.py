"""What a node says about itself: `--node-config` of its SuperNode, and `node.toml` in its folder. Never a message.

This is read in the process that Flower starts for every message, so it imports little. `federation/node_config.py`
has the keys and checks them, in the worker.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fnrfl.core.errors import ConfigError

if TYPE_CHECKING:
    from fnrfl.federation.node_config import NodeConfig

NODE_FILE = "node.toml"
FLOWERS = {"partition-id": "partition", "num-partitions": None}  # how Flower's own apps call it


@dataclass(frozen=True)
class OwnConfig:
    """A node's folder, and what its SuperNode was told beside it."""

    folder: Path
    given: Mapping[str, object]

    @staticmethod
    def of(node_config: Mapping[str, object]) -> OwnConfig:
        """From what Flower was given with `--node-config`."""
        values = {FLOWERS.get(key, key): value for key, value in node_config.items()}
        folder = values.pop("folder", None)
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise ConfigError(
                f"The node's folder is {folder!r}; it must be the path of a folder. Start its SuperNode with "
                """--node-config 'folder="/a/folder/of/the/node"'."""
            )
        return OwnConfig(Path(folder).resolve(), {key: value for key, value in values.items() if key is not None})

    @property
    def file(self) -> Path:
        """The node's file; it need not be there."""
        return self.folder / NODE_FILE

    @property
    def values(self) -> dict[str, object]:
        """Return the keys of the file, replaced by those that the SuperNode was started with."""
        try:
            values = tomllib.loads(self.file.read_text(encoding="utf-8-sig")) if self.file.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{self.file} cannot be read as TOML ({error}). Correct it.") from None
        values |= self.given
        return values

    @property
    def label(self) -> str:
        """Which client the node is: the number of its partition, or its name."""
        values = self.values
        label = values.get("partition", values.get("name"))
        if label is None:
            raise ConfigError(f"{self.file} has neither a partition nor a name. Write which client this node is.")
        return str(label)

    def read(self) -> NodeConfig:
        """Read and check the node's own configuration, in the worker."""
        from fnrfl.federation.node_config import NodeConfig

        values = NodeConfig.from_file(self.file).as_values() if self.file.is_file() else {}
        return NodeConfig.from_values({"folder": str(self.folder), **values, **self.given})
