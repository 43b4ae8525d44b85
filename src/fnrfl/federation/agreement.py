"""What nodes and server tell each other before the first round, as plain values, and what they agree on.

A node tells facts about its data; the server compares them, refuses what cannot go together, and tells every node what
was agreed. No example crosses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.words import counted, printable
from fnrfl.data.partition.views import Splits
from fnrfl.data.reading import Columns
from fnrfl.data.sources.entry import checksum
from fnrfl.data.table_summary import ColumnSummary
from fnrfl.federation.node_config import NodeInWords
from fnrfl.runs.setup.inputs import RunParts

T = TypeVar("T")

# What a node may tell: texts, counts and lists are bounded, since they come from other machines.
MOST_CLASSES = 10_000
MOST_SITES = 10_000
MOST_INPUTS = 2**18  # of a table, once its categories are columns
Count = Annotated[int, Field(ge=0, le=2**31)]  # of one site's examples
ShortText = Annotated[str, Field(max_length=1000)]
Sha256 = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
Word = Annotated[str, Field(pattern=r"^[\w.+!-]{0,100}$")]
Numbers = Annotated[tuple[float, ...], Field(max_length=MOST_INPUTS)]
Axis = Annotated[int, Field(ge=1, le=2**24)]


@dataclass(frozen=True)
class SiteSchema:
    """What a site's own data is like: no example, but the names of columns, categories and classes, and counts."""

    kind: Annotated[str, Field(pattern="^(table|pictures|arrays)$")]
    labels: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=MOST_CLASSES)]  # each as it is written
    named: bool  # labels are names, and not numbers
    tested: bool  # it comes with a test part
    # those that an array `classes` names, in its order
    classes: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=MOST_CLASSES)] | None = None
    input_shape: Annotated[tuple[Axis, ...], Field(max_length=8)] = ()  # of arrays and pictures
    dtype: Annotated[str, Field(pattern="^(uint8|int64|float(16|32|64))?$")] = ""
    columns: Annotated[tuple[ColumnSummary, ...], Field(max_length=100_000)] = ()  # of a table
    label: ShortText = ""  # of a table: the column of the classes


@dataclass(frozen=True)
class SiteFacts(NodeInWords):
    """What a node tells the server about itself and its data."""

    name: ShortText  # of the site; of an experiment, the number of its partition
    versions: Annotated[dict[Word, Word], Field(max_length=20)]
    partition: Count | None = None  # of an experiment
    data: Sha256 = ""  # of an experiment: the sha256 of the whole data set
    split: Sha256 = ""  # of an experiment: the sha256 of the split, with all parts that it sets aside
    schema: SiteSchema | None = None  # of a site

    @property
    def client(self) -> str:
        """How its client is called."""
        return self.name.strip() if self.partition is None else str(self.partition)


@dataclass(frozen=True)
class SiteHolding:
    """What a node of a site tells the server once columns and classes are agreed on."""

    name: ShortText
    # of each class, how many examples it trains on
    counts: Annotated[tuple[Count, ...], Field(max_length=MOST_CLASSES)]
    data: Sha256  # the sha256 of its examples
    public: Sha256  # the sha256 of its copy of the public data


@dataclass(frozen=True)
class Schema:
    """What the data of all sites is like."""

    kind: str
    classes: Annotated[tuple[str, ...], Field(max_length=MOST_CLASSES)]
    input_shape: tuple[int, ...]
    dtype: str
    tested: bool  # some site comes with a test part: then nobody draws one
    columns: Columns | None = None  # of tables

    @property
    def colour(self) -> bool:
        """Whether the examples are pictures in colour."""
        return self.dtype == "uint8" and len(self.input_shape) == 3 and self.input_shape[0] == 3


@dataclass(frozen=True)
class Agreement:
    """What all nodes and the server go by."""

    sites: Annotated[tuple[str, ...], Field(max_length=MOST_SITES)]  # the name of every client, by its number
    data: str = ""  # the sha256 of the data
    split: str = ""  # the sha256 of the split; of sites, of the public data
    schema: Schema | None = None  # of sites
    sizes: Annotated[tuple[int, ...], Field(max_length=MOST_SITES)] = ()  # of sites: how many examples each trains on
    hashes: tuple[str, ...] = ()  # of sites: the sha256 of the examples of each
    notices: tuple[str, ...] = field(default=(), compare=False)
    scale: tuple[Numbers, Numbers] | None = field(default=None, compare=False)  # means and spreads; None: not known yet

    @property
    def shares(self) -> list[str]:
        """A line for each site: its examples, and its share of the weight."""
        named = zip(self.sites, self.sizes, strict=True) if self.sizes else ()
        return [f"{printable(name)}: {counted(n, 'example')}, {n / sum(self.sizes):.1%} of all" for name, n in named]


def split_hash(parts: RunParts) -> str:
    """Return the sha256 of who holds what, and of all parts that are set aside."""
    both = f"{parts.partition.sha256} {parts.splits.manifest()['sha256']}"
    return hashlib.sha256(both.encode()).hexdigest()


def public_hash(splits: Splits) -> str:
    """Return the sha256 of all public data, in the shares that it is used in."""
    shares = [(part.x.numpy(), part.y.numpy()) for part in (splits.public, splits.ranking, splits.distill)]
    return checksum(*(array for share in shares for array in share))


def as_plain(value: SiteFacts | SiteHolding | Agreement) -> dict[str, Any]:
    """A message as plain values that JSON has."""
    plain: dict[str, Any] = TypeAdapter(type(value)).dump_python(value, mode="json")
    return plain


def from_plain(cls: type[T], values: Any, whose: str) -> T:
    """The inverse of `as_plain`; values of another shape are refused, and `whose` says who sent them."""
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = printable(".".join(map(str, first["loc"]))[:100]) or "it"
        raise ConfigError(
            f"The first message of {whose} is not as it must be ({where}: {first['msg']}). Install the same version of "
            "fnrfl on both sides."
        ) from error


def agree_on_experiment(facts: Sequence[SiteFacts], clients: int, data: str, split: str) -> Agreement:
    """Nodes that each take a part of one data set; `data` and `split` are the server's own hashes."""
    notices = versions_alike(facts)
    holder: dict[int, SiteFacts] = {}
    for one in facts:
        if one.partition is None:
            raise CompatibilityError(
                f"{one.opened} brings data of its own, and the recipe's scenario draws clients from one data set. Set "
                'scenario = "natural" and name every node, or give each node a partition.'
            )
        if one.partition >= clients:
            raise CompatibilityError(
                f"A node has partition = {one.partition}, and the recipe has {counted(clients, 'client')}, numbered "
                "from 0. Correct the node's partition, or the recipe's clients."
            )
        if one.partition in holder:
            raise CompatibilityError(
                f"Two nodes have partition = {one.partition}; each must have one of its own. Correct one of them."
            )
        holder[one.partition] = one
        _same_data_and_split(one, data, split)
    if missing := [client for client in range(clients) if client not in holder]:
        raise CompatibilityError(
            f"No node has partition = {missing[0]}, and the recipe has {counted(clients, 'client')}, of which "
            f"{len(missing)} are missing. Start a node for each, or set clients in the recipe."
        )
    return Agreement(tuple(str(client) for client in range(clients)), data, split, notices=notices)


def _same_data_and_split(one: SiteFacts, data: str, split: str) -> None:
    if one.data != data:
        raise CompatibilityError(
            f"{one.opened} has another data set than the server: its sha256 begins with {one.data[:8]}, the server's "
            f"with {data[:8]}. Copy the server's data there, or correct data in the node's configuration."
        )
    if one.split != split:
        raise CompatibilityError(
            f"{one.opened} divides the data in another way than the server: the sha256 of its split begins with "
            f"{one.split[:8]}, the server's with {split[:8]}. Use the same versions and the same public data, and copy "
            "a saved split there if the scenario is one."
        )


def versions_alike(facts: Sequence[SiteFacts]) -> tuple[str, ...]:
    """Refuse another version of fnrfl than the first node's; sentences about other packages that differ."""
    notices = []
    for one in facts[1:]:
        for package, version in facts[0].versions.items():
            other = one.versions.get(package, "none")
            if other == version:
                continue
            told = f"{facts[0].opened} has {package} {version} and {one.label} has {other}"
            if package == "fnrfl":
                raise CompatibilityError(f"{told}; all must have the same. Install one version everywhere.")
            notices.append(f"{told}: numbers may differ by rounding from those of a simulation.")
    return tuple(notices)
