"""The facts that nodes tell about their data before the first round, and the agreement that the server makes of them.

What cannot go together is refused, by the name of a node. No example crosses. Columns, categories and classes of sites
are those that the simulator gives a folder of these sites.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.words import counted, printable
from fnrfl.data.partition.by_client import in_natural_order
from fnrfl.data.partition.views import Splits
from fnrfl.data.reading import Columns, Reading
from fnrfl.data.sources.entry import checksum
from fnrfl.data.table_summary import ColumnSummary, TableSummary, listed_columns, merge_classes, merge_columns
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

    counts: Annotated[tuple[Count, ...], Field(max_length=MOST_CLASSES)]  # of each class, that it trains on
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


def refuse(rules: Iterable[tuple[object, str]]) -> None:
    """Refuse by the sentence of the first rule that is broken."""
    for broken, reason in rules:
        if broken:
            raise CompatibilityError(reason)


def check_versions(facts: Sequence[SiteFacts]) -> tuple[str, ...]:
    """Refuse another version of fnrfl than the first node's; return sentences about other packages that differ."""
    notices = []
    for one in facts[1:]:
        for package, version in facts[0].versions.items():
            if (other := one.versions.get(package, "none")) != version:
                told = f"{facts[0].opened} has {package} {version} and {one.label} has {other}"
                refuse([(package == "fnrfl", f"{told}; all must have the same. Install one version everywhere.")])
                notices.append(f"{told}: numbers may differ by rounding from those of a simulation.")
    return tuple(notices)


def _check_names(facts: Sequence[SiteFacts]) -> dict[str, SiteFacts]:
    """Return the nodes by the names of their clients; refuse two of one name."""
    by_name: dict[str, SiteFacts] = {}
    for one in facts:
        twice = by_name.setdefault(one.client, one) is not one
        rule = "each must have a partition or a name of its own. Correct the configuration of one of them."
        refuse([(twice, f"Two nodes say that they are {by_name[one.client].label}; {rule}")])
    return by_name


# -- nodes that each take a part of one data set -----------------------------------------------------------------------


def agree_on_experiment(facts: Sequence[SiteFacts], clients: int, data: str, split: str) -> Agreement:
    """Agree with nodes that each take a part of one data set; `data` and `split` are the server's own hashes."""
    notices, recipe = check_versions(facts), f"the recipe has {counted(clients, 'client')}"
    for one in facts:
        refuse(
            [
                (
                    one.partition is None,
                    f"{one.opened} brings data of its own, and the recipe's scenario draws clients from one data set. "
                    'Set scenario = "natural" and name every node, or give each node a partition.',
                ),
                (
                    one.client not in map(str, range(clients)),
                    f"A node has partition = {one.partition}, and {recipe}, numbered from 0. Correct the node's "
                    "partition, or the recipe's clients.",
                ),
                (
                    one.data != data,
                    f"{one.opened} has another data set than the server: its sha256 begins with {one.data[:8]}, the "
                    f"server's with {data[:8]}. Copy the server's data there, or correct data in the node's "
                    "configuration.",
                ),
                (
                    one.split != split,
                    f"{one.opened} divides the data in another way than the server: the sha256 of its split begins "
                    f"with {one.split[:8]}, the server's with {split[:8]}. Use the same versions and the same public "
                    "data, and copy a saved split there if the scenario is one.",
                ),
            ]
        )
    sites, there = tuple(map(str, range(clients))), _check_names(facts)
    if missing := [client for client in sites if client not in there]:
        raise CompatibilityError(
            f"No node has partition = {missing[0]}, and {recipe}, of which {len(missing)} are missing. Start a node "
            "for each, or set clients in the recipe."
        )
    return Agreement(sites, data, split, notices=notices)


# -- sites with data of their own --------------------------------------------------------------------------------------

Described = tuple[SiteFacts, SiteSchema]


def agree_on_sites(facts: Sequence[SiteFacts], reading: Reading) -> Agreement:
    """Agree with sites: the clients in the natural order of their names, and what their data is like together."""
    notices, sites = check_versions(facts), dict[str, Described]()
    for name, one in _check_names(facts).items():
        refuse(
            [
                (
                    one.schema is None,
                    f"{one.opened} takes a part of a whole data set, and others bring data of their own. Give every "
                    "node a name, or every node a partition.",
                ),
                (not name, "A node has no name. Set name in its configuration."),
                (
                    one.schema is not None and not _is_whole(one.schema),
                    f"{one.opened} describes its data in a way that cannot be: a table has columns of different names, "
                    "and other data a shape and a type. Install the same version of fnrfl.",
                ),
            ]
        )
        assert one.schema is not None
        sites[name] = (one, one.schema)
    names = in_natural_order(sites)
    return Agreement(tuple(names), schema=_schema([sites[name] for name in names], reading), notices=notices)


def _is_whole(schema: SiteSchema) -> bool:
    """Whether facts of one site can all be true."""
    names = [column.name for column in schema.columns]
    if schema.kind == "table":
        return len(set(names)) == len(names) > 0
    return bool(schema.input_shape and schema.dtype)


def _schema(sites: Sequence[Described], reading: Reading) -> Schema:
    _refuse_unlike(sites, lambda one: one.kind, "brings {}", "all must bring the same kind. Convert one of them")
    kind, tested = sites[0][1].kind, any(mine.tested for _, mine in sites)
    if kind == "table":
        tables = [TableSummary(one.label, mine.columns, mine.label, mine.labels) for one, mine in sites]
        columns = merge_columns(tables, reading.categories)
        inputs = len(columns.encoded)
        too_many = (
            f"The sites' tables have {inputs:,} inputs, with one for each category; {MOST_INPUTS:,} are the most."
        )
        refuse([(inputs > MOST_INPUTS, f"{too_many} Leave columns out with dataset.ignore.")])
        return Schema(kind, merge_classes(tables), (inputs,), "float32", tested, columns)
    return Schema(kind, _classes(sites), *_shape_and_type(sites), tested)


def _refuse_unlike(sites: Sequence[Described], fact: Callable[[SiteSchema], object], verb: str, rule: str) -> None:
    """Refuse the first site that differs from the first of all in a fact."""
    (first, one), *others = sites
    for other, mine in others:
        ours, theirs = verb.format(fact(one)), verb.format(fact(mine))
        refuse([(ours != theirs, printable(f"{first.opened} {ours} and {other.label} {theirs}; {rule}."))])


def _classes(sites: Sequence[Described]) -> tuple[str, ...]:
    """Return the classes that an array names, or those that occur at some site, sorted."""
    kinds = {True: "names", False: "numbers"}
    rule = "all must have one kind. Write all as names, or all as numbers"
    _refuse_unlike(sites, lambda one: kinds[one.named], "has {} as labels", rule)
    listed = lambda one: "no list of classes" if one.classes is None else f"the classes {listed_columns(one.classes)}"  # noqa: E731
    rule = "the number of a class must mean the same everywhere. Name all classes in one order at every site"
    _refuse_unlike(sites, listed, "has {}", rule)
    named, classes = sites[0][1].named, sites[0][1].classes
    known = None if classes is None else set(classes if named else map(str, range(len(classes))))
    for one, mine in sites:
        numbers = named or all(re.fullmatch("-?[0-9]{1,18}", label) for label in mine.labels)
        refuse([(not numbers, f"{one.opened} has labels that are neither names nor whole numbers. Correct them.")])
        if unknown := sorted(set(mine.labels) - known) if known is not None else []:
            raise CompatibilityError(
                f"{one.opened} has the label {unknown[0]!r}, which is not among its classes "
                f"{listed_columns(classes or ())}. Add it to the classes of every site, or correct the label."
            )
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

    way_out = 'Set dataset.image_size in the recipe, such as "64"' if sites[0][1].kind == "pictures" else ""
    rule = f"those of all sites must be alike. {way_out or 'Prepare them in one way'}"
    _refuse_unlike(sites, lambda one: f"{agreed(one)[1]}{[*agreed(one)[0]]}", "has examples of {}", rule)
    return agreed(sites[0][1])


def with_counts(agreement: Agreement, holdings: Sequence[SiteHolding], max_share: float = 1.0) -> Agreement:
    """Return the agreement with what each client holds; `holdings` are in the order of the clients.

    A site that claims more than `max_share` of all examples, by which models are weighted, is refused.
    """
    classes = () if agreement.schema is None else agreement.schema.classes
    for name, one in zip(agreement.sites, holdings, strict=True):
        right = len(one.counts) == len(classes) > 0 and min(one.counts) >= 0 and 1 <= sum(one.counts) <= MOST_HELD
        told = f"{sum(one.counts):,} examples of {counted(len(one.counts), 'class', 'classes')}"
        rule = "there must be one at least, and a number for each class. Give that site examples, or leave it out."
        refuse([(not right, f"The node {printable(name)!r} says that it trains on {told}; {rule}")])
    sizes, hashes = tuple(sum(one.counts) for one in holdings), tuple(one.data for one in holdings)
    share, largest = max(zip((size / sum(sizes) for size in sizes), agreement.sites, strict=True))
    told = f"The node {printable(largest)!r} says that it trains on {share:.1%} of all examples"
    refuse(
        [
            (
                share > max_share,
                f"{told}, and network.max_share = {max_share:g}. Leave that site out, or set network.max_share higher.",
            ),
            (
                len(classes) > sum(sizes),
                f"The sites have {counted(len(classes), 'class', 'classes')} for "
                f"{counted(sum(sizes), 'training example')}; there must be at least as many examples as classes. Check "
                "that the labels are classes.",
            ),
        ]
    )
    notices = agreement.notices
    if share > 0.5 and len(sizes) > 2:
        most = f"{told}, so it has most of the weight. network.max_share refuses sites that claim too much."
        notices = (*notices, most)
    whole = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    return replace(agreement, data=whole, split=holdings[0].public, sizes=sizes, hashes=hashes, notices=notices)


def refuse_other_public(agreement: Agreement, holdings: Sequence[SiteHolding], own: str) -> None:
    """Refuse a node whose public data is not the server's, of which `own` is the sha256."""
    for name, one in zip(agreement.sites, holdings, strict=True):
        told = f"The node {printable(name)!r} has other public data than the server: its sha256 begins with"
        way_out = "Copy the server's public data there, and set public in the node's configuration."
        refuse([(one.public != own, f"{told} {one.public[:8]}, the server's with {own[:8]}. {way_out}")])
