"""The facts that nodes tell about their data before the first round, and the agreement that the server makes of them.

What cannot go together is refused, by the name of a node. No example crosses. Columns, categories and classes of sites
are those that the simulator gives a folder of these sites.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.words import counted, printable
from fnrfl.data.column_names import listed_columns
from fnrfl.data.partition.by_client import in_natural_order
from fnrfl.data.partition.views import Splits
from fnrfl.data.reading import Columns, Reading
from fnrfl.data.sources.entry import checksum
from fnrfl.data.table_summary import ColumnSummary, TableSummary, merge_classes, merge_columns
from fnrfl.federation.node_config import NodeInWords
from fnrfl.runs.setup.build import RunParts

T = TypeVar("T")

# What a node may tell: texts, counts and lists are bounded, since they come from other machines.
MOST_CLASSES = 10_000
MOST_SITES = 10_000
MOST_HELD = 2**31  # examples of one site
MOST_INPUTS = 2**18  # of a table, once its categories are columns
Count = Annotated[int, Field(ge=0, le=2**31)]  # of one site's examples
ShortText = Annotated[str, Field(max_length=1000)]
Sha256 = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
Word = Annotated[str, Field(pattern=r"^[\w.+!-]{0,100}$")]
Numbers = Annotated[tuple[float, ...], Field(max_length=MOST_INPUTS)]
Axis = Annotated[int, Field(ge=1, le=2**24)]
Names = Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=MOST_CLASSES)]


@dataclass(frozen=True)
class SiteSchema:
    """What a site's own data is like: no example, but the names of columns, categories and classes, and counts."""

    kind: Annotated[str, Field(pattern="^(table|pictures|arrays)$")]
    labels: Names  # each as it is written
    named: bool  # labels are names, and not numbers
    tested: bool  # it comes with a test part
    classes: Names | None = None  # those that an array `classes` names, in its order
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

    counts: Annotated[tuple[Count, ...], Field(max_length=MOST_CLASSES)]  # of each class, that it trains on
    data: Sha256  # the sha256 of its examples
    public: Sha256  # the sha256 of its copy of the public data
    tests: Count = 0  # on how many examples of its own it scores models; 0: on none


@dataclass(frozen=True)
class Schema:
    """What the data of all sites is like."""

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
    return hashlib.sha256(f"{parts.partition.sha256} {parts.splits.manifest()['sha256']}".encode()).hexdigest()


def public_hash(splits: Splits) -> str:
    """Return the sha256 of all public data, in the shares that it is used in."""
    parts = (splits.public, splits.ranking, splits.distill)
    return checksum(*(array.numpy() for part in parts for array in (part.x, part.y)))


def as_plain(value: SiteFacts | SiteHolding | Agreement) -> dict[str, Any]:
    """Return a message as plain values that JSON has."""
    plain: dict[str, Any] = TypeAdapter(type(value)).dump_python(value, mode="json")
    return plain


def from_plain(cls: type[T], values: Any, whose: str) -> T:
    """Invert `as_plain`; refuse values of another shape, and say who sent them."""
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = printable(".".join(map(str, first["loc"]))[:100]) or "it"
        raise ConfigError(
            f"The first message of {whose} is not as it must be ({where}: {first['msg']}). Install the same version of "
            "fnrfl on both sides."
        ) from error


def _refuse(broken: object, reason: str) -> None:
    if broken:
        raise CompatibilityError(printable(reason))


def _refuse_other(who: str, has: str, theirs: str, ours: str, way_out: str) -> None:
    told = f"{who} {has} than the server: its sha256 begins with {theirs[:8]}, the server's with {ours[:8]}. {way_out}"
    _refuse(theirs != ours, told)


def _check_versions(facts: Sequence[SiteFacts]) -> tuple[str, ...]:
    """Refuse another version of fnrfl than the first node's; return sentences about other packages that differ."""
    notices = []
    for one in facts[1:]:
        for package, version in facts[0].versions.items():
            if (other := one.versions.get(package, "none")) != version:
                told = f"{facts[0].opened} has {package} {version} and {one.label} has {other}"
                _refuse(package == "fnrfl", f"{told}; all must have the same. Install one version everywhere.")
                notices.append(f"{told}: numbers may differ by rounding from those of a simulation.")
    return tuple(notices)


def _by_name(facts: Sequence[SiteFacts]) -> dict[str, SiteFacts]:
    """Return the nodes by the names of their clients; refuse two of one name."""
    found: dict[str, SiteFacts] = {}
    for one in facts:
        first = found.setdefault(one.client, one)
        rule = "each must have a partition or a name of its own. Correct the configuration of one of them."
        _refuse(first is not one, f"Two nodes say that they are {first.label}; {rule}")
    return found


# -- nodes that each take a part of one data set -----------------------------------------------------------------------


def agree_on_experiment(facts: Sequence[SiteFacts], clients: int, data: str, split: str) -> Agreement:
    """Agree with nodes that each take a part of one data set; `data` and `split` are the server's own hashes."""
    notices, recipe = _check_versions(facts), f"the recipe has {counted(clients, 'client')}"
    sites = tuple(map(str, range(clients)))
    for one in facts:
        _refuse(
            one.partition is None,
            f"{one.opened} brings data of its own, and the recipe's scenario draws clients from one data set. "
            'Set scenario = "natural" and name every node, or give each node a partition.',
        )
        _refuse(
            one.client not in sites,
            f"A node has partition = {one.partition}, and {recipe}, numbered from 0. Correct the node's partition, or "
            "the recipe's clients.",
        )
        way_out = "Copy the server's data there, or correct data in the node's configuration."
        _refuse_other(one.opened, "has another data set", one.data, data, way_out)
        way_out = "Use the same versions and public data, and copy a saved split there if the scenario is one."
        _refuse_other(one.opened, "divides the data in another way", one.split, split, way_out)
    missing = [client for client in sites if client not in _by_name(facts)]
    _refuse(
        missing,
        f"No node has partition = {next(iter(missing), '')}, and {recipe}, of which {len(missing)} are missing. "
        "Start a node for each, or set clients in the recipe.",
    )
    return Agreement(sites, data, split, notices=notices)


# -- sites with data of their own --------------------------------------------------------------------------------------

Described = tuple[SiteFacts, SiteSchema]


def agree_on_sites(facts: Sequence[SiteFacts], reading: Reading) -> Agreement:
    """Agree with sites: the clients in the natural order of their names, and what their data is like together."""
    notices, sites = _check_versions(facts), dict[str, Described]()
    for name, one in _by_name(facts).items():
        _refuse(not name, "A node has no name. Set name in its configuration.")
        if one.schema is None:
            raise CompatibilityError(
                f"{one.opened} takes a part of a whole data set, and others bring data of their own. Give every node a "
                "name, or every node a partition."
            )
        columns = [column.name for column in one.schema.columns]
        whole = len(set(columns)) == len(columns) > 0 if one.schema.kind == "table" else one.schema.input_shape
        _refuse(
            not whole or (one.schema.kind != "table" and not one.schema.dtype),
            f"{one.opened} describes its data in a way that cannot be: a table has columns of different names, and "
            "other data a shape and a type. Install the same version of fnrfl.",
        )
        sites[name] = (one, one.schema)
    names = in_natural_order(sites)
    return Agreement(tuple(names), schema=_schema([sites[name] for name in names], reading), notices=notices)


def _schema(sites: Sequence[Described], reading: Reading) -> Schema:
    """Return what the data of all is like, in the order of the clients."""
    _refuse_unlike(sites, lambda one: one.kind, "brings {}", "all must bring the same kind. Convert one of them")
    tested = any(mine.tested for _, mine in sites)
    if sites[0][1].kind != "table":
        return Schema(_classes(sites), *_shape_and_type(sites), tested)
    tables = [TableSummary(one.label, mine.columns, mine.label, mine.labels) for one, mine in sites]
    columns = merge_columns(tables, reading.categories, reading.rename)
    inputs, most = len(columns.encoded), f"with one for each category; {MOST_INPUTS:,} are the most"
    told = f"The sites' tables have {inputs:,} inputs, {most}. Leave columns out with dataset.ignore."
    _refuse(inputs > MOST_INPUTS, told)
    return Schema(merge_classes(tables), (inputs,), "float32", tested, columns)


def _refuse_unlike(sites: Sequence[Described], fact: Callable[[SiteSchema], object], verb: str, rule: str) -> None:
    """Refuse the first site that differs from the first of all in a fact."""
    (first, one), *others = sites
    for other, mine in others:
        ours, theirs = verb.format(fact(one)), verb.format(fact(mine))
        _refuse(ours != theirs, f"{first.opened} {ours} and {other.label} {theirs}; {rule}.")


def _classes(sites: Sequence[Described]) -> tuple[str, ...]:
    """Return the classes that an array names, or those that occur at some site, sorted."""
    rule = "all must have one kind. Write all as names, or all as numbers"
    _refuse_unlike(sites, lambda one: "names" if one.named else "numbers", "has {} as labels", rule)
    listed = lambda one: "no list of classes" if one.classes is None else f"the classes {listed_columns(one.classes)}"  # noqa: E731
    rule = "the number of a class must mean the same everywhere. Name all classes in one order at every site"
    _refuse_unlike(sites, listed, "has {}", rule)
    named, classes = sites[0][1].named, sites[0][1].classes
    for one, mine in sites:
        numbers = named or all(re.fullmatch("-?[0-9]{1,18}", label) for label in mine.labels)
        _refuse(not numbers, f"{one.opened} has labels that are neither names nor whole numbers. Correct them.")
        if classes is not None:
            unknown = set(mine.labels) - set(classes if named else map(str, range(len(classes))))
            told = f"{one.opened} has the label {min(unknown, default='')!r}, which is not among its classes"
            way_out = "Add it to the classes of every site, or correct the label."
            _refuse(unknown, f"{told} {listed_columns(classes)}. {way_out}")
    labels = {label for _, mine in sites for label in mine.labels}
    return classes if classes is not None else tuple(sorted(labels, key=None if named else int))


def _shape_and_type(sites: Sequence[Described]) -> tuple[tuple[int, ...], str]:
    """Return the shape and the type of every example, once whole numbers and grey pictures are as the others'."""
    floating = any(mine.dtype.startswith("float") for _, mine in sites)
    coloured = any(mine.dtype == "uint8" and mine.input_shape[0] == 3 for _, mine in sites)

    def agreed(mine: SiteSchema) -> tuple[tuple[int, ...], str]:
        grey = mine.dtype == "uint8" and mine.input_shape[0] == 1
        shape = (3, *mine.input_shape[1:]) if coloured and grey else mine.input_shape
        return shape, "float32" if floating and mine.dtype == "int64" else mine.dtype

    pictures = sites[0][1].kind == "pictures"
    way_out = 'Set dataset.image_size in the recipe, such as "64"' if pictures else "Prepare them in one way"
    like = lambda one: f"{agreed(one)[1]}{[*agreed(one)[0]]}"  # noqa: E731
    _refuse_unlike(sites, like, "has examples of {}", f"those of all sites must be alike. {way_out}")
    return agreed(sites[0][1])


def with_counts(agreement: Agreement, holdings: Sequence[SiteHolding], max_share: float = 1.0) -> Agreement:
    """Return the agreement with what each client holds; `holdings` are in the order of the clients.

    A site that claims more than `max_share` of all examples, by which models are weighted, is refused.
    """
    classes = () if agreement.schema is None else agreement.schema.classes
    sizes, most, notices = tuple(sum(one.counts) for one in holdings), counted(len(classes), "class", "classes"), []
    for name, one, size in zip(agreement.sites, holdings, sizes, strict=True):
        right = len(one.counts) == len(classes) > 0 and min(one.counts) >= 0 and 1 <= size <= MOST_HELD
        told = f"trains on {size:,} examples of {counted(len(one.counts), 'class', 'classes')}"
        rule = "there must be one at least, and a number for each class. Give that site examples, or leave it out."
        _refuse(not right, f"The node {name!r} says that it {told}; {rule}")
    share, largest = max(zip((size / sum(sizes) for size in sizes), agreement.sites, strict=True))
    told = printable(f"The node {largest!r} says that it trains on {share:.1%} of all examples")
    way_out = "Leave that site out, or set network.max_share higher."
    _refuse(share > max_share, f"{told}, and network.max_share = {max_share:g}. {way_out}")
    told_all = f"The sites have {most} for {counted(sum(sizes), 'training example')}"
    rule = "there must be at least as many examples as classes. Check that the labels are classes."
    _refuse(len(classes) > sum(sizes), f"{told_all}; {rule}")
    if share > 0.5 and len(sizes) > 2:
        notices = [f"{told}, so it has most of the weight. network.max_share refuses sites that claim too much."]
    hashes = tuple(one.data for one in holdings)
    whole = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    agreed = replace(agreement, data=whole, split=holdings[0].public, sizes=sizes, hashes=hashes)
    return replace(agreed, notices=(*agreement.notices, *notices))


def refuse_other_public(agreement: Agreement, holdings: Sequence[SiteHolding], own: str) -> None:
    """Refuse a node whose public data is not the server's, of which `own` is the sha256."""
    way_out = "Copy the server's public data there, and set public in the node's configuration."
    for name, one in zip(agreement.sites, holdings, strict=True):
        _refuse_other(f"The node {name!r}", "has other public data", one.public, own, way_out)
