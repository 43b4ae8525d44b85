"""What a node is told on its own machine: where its data lies and what it may run. No message can change any of it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import did_you_mean, printable
from fnrfl.data.reading import require_file, split_names
from fnrfl.data.sources import NAMED_DATASETS

PATH_KEYS = ("data", "public", "split", "folder")  # of them, words that are paths may be relative to node.toml
NODE_ENGINES = ("loop", "batched", "gpu")


class NodeInWords:
    """What sentences call a node: by its partition or by its name; whoever has these two inherits it."""

    partition: int | None
    name: str

    @property
    def label(self) -> str:
        """The node in a sentence."""
        if self.partition is not None:
            return f"the node with partition = {self.partition}"
        return f"the node {printable(self.name)!r}"

    @property
    def opened(self) -> str:
        """The node at the beginning of a sentence."""
        return self.label[0].upper() + self.label[1:]


@dataclass(frozen=True)
class NodeConfig(NodeInWords):
    """One node: a client on a machine of its own.

    With `partition` it takes a part of a data set that everybody has, as the simulator would draw it; with `name` all
    of `data` is its own.
    """

    data: str = ""  # a data set's name, a file, a folder or module:function
    partition: int | None = None  # the client's number in the split of the recipe
    name: str = ""  # what the site is called
    public: str = ""  # this node's copy of the public data, where that is no part of the data set
    ignore: str = ""  # columns of the site's table that nobody reads or hears of, separated by commas
    split: str = ""  # this node's copy of a saved split, where the recipe's scenario is one
    folder: str = ""  # where the client's memory is kept
    share_memory: bool = False  # whether the server may read what the client remembers
    code: str = ""  # code that a recipe may name here, such as nets:make; several are joined by commas
    engine: str = "loop"  # how it computes: loop, batched or gpu
    max_examples: int = 10_000_000  # that one request may train on, passes times examples
    keep_runs: int = 20  # how many runs keep their memory in the folder; of more, those used last

    @property
    def ignored_columns(self) -> tuple[str, ...]:
        """Columns of the site's table that are as if they were not there."""
        return split_names(self.ignore)

    @property
    def allowed_code(self) -> frozenset[str]:
        """Code of the user's own that a recipe may name here."""
        return frozenset(split_names(self.code))

    @classmethod
    def from_values(cls, values: Mapping[str, object], origin: str = "The node's configuration") -> NodeConfig:
        """From plain values, as Flower hands a node its own; keys may have hyphens. `origin` begins the refusals."""
        types = {field.name: str(field.type) for field in fields(cls)}
        given = {key.replace("-", "_"): value for key, value in values.items()}
        for key, value in given.items():
            if key not in types:
                raise ConfigError(
                    f"{origin} has the key {key!r}, which a node has not.{did_you_mean(key, types)} The keys are "
                    f"{', '.join(types)}."
                )
            if type(value).__name__ != types[key].removesuffix(" | None"):
                raise ConfigError(f"{origin} has {key} = {value!r}; it must be {TYPES[types[key]]}. Correct it.")
        made = cls(**given)  # type: ignore[arg-type]
        for broken, reason in NODE_RULES:
            if broken(made):
                near = did_you_mean(made.engine, NODE_ENGINES)
                raise ConfigError(f"{origin} {reason.format(node=made, near=near)}")
        return made

    @classmethod
    def from_file(cls, path: str | Path) -> NodeConfig:
        """From a node.toml; paths in it are relative to the folder that it lies in."""
        path = Path(path)
        require_file(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{path} does not exist (looked from {Path.cwd()}). Name a node.toml that does."
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as TOML ({error}). Correct the file.") from error
        beside = {key: _beside(path, value) if key in PATH_KEYS else value for key, value in values.items()}
        return cls.from_values(beside, str(path))

    def as_values(self) -> dict[str, object]:
        """The keys that say something, as plain values."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None)}


ONE_OF_TWO = (
    "a node must have one of them. Set name if all of data is this client's own, or partition, a number from 0, if it "
    "is to take a part of a whole data set."
)
# What cannot be right, and what is said of it after the name of the file.
NODE_RULES: tuple[tuple[Callable[[NodeConfig], object], str], ...] = (
    (
        lambda node: not node.data.strip(),
        "has no key data, and a recipe's dataset.name is not followed by a node. Set data to a file, a folder, a data "
        "set's name or module:function.",
    ),
    (
        lambda node: node.partition is None and not node.name.strip(),
        f"has neither of the keys partition and name; {ONE_OF_TWO}",
    ),
    (
        lambda node: node.partition is not None and node.name.strip(),
        f"has both of the keys partition and name; {ONE_OF_TWO}",
    ),
    (
        lambda node: (node.partition or 0) < 0,
        "has partition = {node.partition}; clients are numbered from 0. Correct it.",
    ),
    (
        lambda node: min(node.max_examples, node.keep_runs) < 1,
        "has max_examples = {node.max_examples} and keep_runs = {node.keep_runs}; both must be at least 1. Correct "
        "them.",
    ),
    (
        lambda node: node.ignore and node.partition is not None,
        "has ignore = {node.ignore!r} beside a partition; everybody in an experiment reads the same columns. Leave it "
        "out, and set dataset.ignore in the recipe.",
    ),
    (
        lambda node: node.engine not in NODE_ENGINES,
        f"has engine = {{node.engine!r}}; it must be one of {', '.join(NODE_ENGINES)}.{{near}}",
    ),
)
TYPES = {"int": "a whole number", "int | None": "a whole number", "bool": "true or false", "str": "text"}


def _beside(file: Path, words: object) -> object:
    """A path that is relative to the folder of a file; names of data sets and of code stay as they are."""
    named = words in NAMED_DATASETS or usercode.target("dataset.name", words) is not None
    if named or not words or not isinstance(words, str):
        return words
    return str(file.absolute().parent / os.path.expanduser(words))
