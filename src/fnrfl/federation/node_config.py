"""What a node is told on its own machine: where its data lies and what it may run. No message can change any of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from fnrfl import usercode
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import did_you_mean
from fnrfl.data.reading import split_names
from fnrfl.data.sources import NAMED_DATASETS

PATH_KEYS = ("data", "public", "split", "folder")  # of them, words that are paths may be relative to node.toml
NODE_ENGINES = ("loop", "batched", "gpu")
TYPES = {"int": "a whole number", "int | None": "a whole number", "bool": "true or false", "str": "text"}
ONE_OF_TWO = (
    "a node must have one of them. Set name if all of data is this client's own, or partition, a number from 0, if it "
    "is to take a part of a whole data set."
)


class NodeInWords:
    """What sentences call a node: by its partition or by its name; whoever has these two inherits it."""

    partition: int | None
    name: str

    @property
    def label(self) -> str:
        """The node in a sentence."""
        return f"the node {self.name!r}" if self.partition is None else f"the node with partition = {self.partition}"

    @property
    def opened(self) -> str:
        """The node at the beginning of a sentence."""
        return f"T{self.label[1:]}"


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
    share_scores: bool = True  # whether a site tells how many of its test examples each model answers right
    code: str = ""  # code that a recipe may name here, such as nets:make; several are joined by commas
    engine: str = "loop"  # how it computes: loop, batched or gpu
    max_examples: int = 10_000_000  # that one request may train on, passes times examples
    keep_runs: int = 20  # how many runs keep their memory in the folder; of more, those used last

    @property
    def ignored_columns(self) -> tuple[str, ...]:
        """Columns of the site's table that are as if they were not there."""
        return split_names(self.ignore)

    @classmethod
    def from_values(cls, values: Mapping[str, object], origin: str = "The node's configuration") -> NodeConfig:
        """From plain values, as Flower hands a node its own; keys may have hyphens. `origin` begins the refusals."""
        types = {field.name: str(field.type) for field in fields(cls)}
        given = {key.replace("-", "_"): value for key, value in values.items()}
        for key, value in given.items():
            if key not in types:
                near = did_you_mean(key, types)
                raise ConfigError(
                    f"{origin} has the key {key!r}, which a node has not.{near} The keys are {', '.join(types)}."
                )
            if type(value).__name__ != types[key].removesuffix(" | None"):
                raise ConfigError(f"{origin} has {key} = {value!r}; it must be {TYPES[types[key]]}. Correct it.")
        made = cls(**given)  # type: ignore[arg-type]
        for broken, reason in made._rules():
            if broken:
                raise ConfigError(f"{origin} {reason}")
        return made

    def _rules(self) -> list[tuple[object, str]]:
        """What cannot be right, and what is said of it after the name of the file."""
        part, name, examples, runs = self.partition, self.name.strip(), self.max_examples, self.keep_runs
        near = did_you_mean(self.engine, NODE_ENGINES)
        no_data = "a recipe's dataset.name is not followed by a node. Set data to a file, a folder, a data set's name"
        alike = "everybody in an experiment reads the same columns. Leave it out, and set dataset.ignore in the recipe"
        least = f"max_examples = {examples} and keep_runs = {runs}; both must be at least 1. Correct them"
        engine = f"engine = {self.engine!r}; it must be one of {', '.join(NODE_ENGINES)}.{near}"
        return [
            (not self.data.strip(), f"has no key data, and {no_data} or module:function."),
            (part is None and not name, f"has neither of the keys partition and name; {ONE_OF_TWO}"),
            (part is not None and name, f"has both of the keys partition and name; {ONE_OF_TWO}"),
            ((part or 0) < 0, f"has partition = {part}; clients are numbered from 0. Correct it."),
            (min(examples, runs) < 1, f"has {least}."),
            (self.ignore and part is not None, f"has ignore = {self.ignore!r} beside a partition; {alike}."),
            (self.engine not in NODE_ENGINES, f"has {engine}"),
        ]


def paths_beside(folder: Path, values: Mapping[str, object]) -> dict[str, object]:
    """Make paths of a node.toml relative to its folder; names of data sets and of code stay as they are."""

    def is_path(key: str, words: object) -> bool:
        named = words in NAMED_DATASETS or usercode.target("dataset.name", words) is not None
        return key in PATH_KEYS and isinstance(words, str) and words != "" and not named

    whole = folder.absolute()
    return {k: str(whole / os.path.expanduser(str(v))) if is_path(k, v) else v for k, v in values.items()}
