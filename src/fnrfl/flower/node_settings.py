"""A node's own settings: `--node-config` of its SuperNode, and `node.toml` in its folder. Never a message.

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


@dataclass(frozen=True)
class NodeSettings:
    """A node's folder, and the settings that its SuperNode was started with."""

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

    @property
    def file(self) -> Path:
        """The node's file; it need not be there."""
        return self.folder / NODE_FILE

    @property
    def values(self) -> dict[str, object]:
        """The keys of the file, replaced by those that the SuperNode was started with."""
        try:
            values = tomllib.loads(self.file.read_text(encoding="utf-8-sig")) if self.file.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{self.file} cannot be read as TOML ({error}). Correct it.") from None
        return values | dict(self.given)

    @property
    def label(self) -> str:
        """Which client the node is: the number of its partition, or its name."""
        label = self.values.get("partition", self.values.get("name"))
        if label is None:
            raise ConfigError(f"{self.file} has neither a partition nor a name. Write which client this node is.")
        return str(label)

    def read(self) -> NodeConfig:
        """Read and check the node's own configuration, in the worker."""
        from fnrfl.federation.node_config import NodeConfig

        values = NodeConfig.from_file(self.file).as_values() if self.file.is_file() else {}
        return NodeConfig.from_values({"folder": str(self.folder), **values, **self.given})
