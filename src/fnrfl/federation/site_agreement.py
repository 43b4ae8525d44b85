"""What sites with data of their own agree on: the columns, categories and classes that the simulator would give them.

Each function takes the facts of all sites in the order of their client numbers, and refuses by the name of a site.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from fnrfl.core.errors import CompatibilityError
from fnrfl.core.words import counted, printable
from fnrfl.data.partition.by_client import in_natural_order
from fnrfl.data.reading import Reading
from fnrfl.data.table_summary import TableSummary, listed_columns, merge_classes, merge_columns
from fnrfl.federation.agreement import (
    MOST_INPUTS,
    Agreement,
    Schema,
    SiteFacts,
    SiteHolding,
    SiteSchema,
    versions_alike,
)

MOST_HELD = 2**31  # examples of one site
Described = tuple[SiteFacts, SiteSchema]


def agree_on_sites(facts: Sequence[SiteFacts], reading: Reading) -> Agreement:
    """The clients in the natural order of their names, and what their data is like together."""
    notices = versions_alike(facts)
    by_name: dict[str, Described] = {}
    for one in facts:
        if one.schema is None:
            raise CompatibilityError(
                f"{one.opened} takes a part of a whole data set, and others bring data of their own. Give every node a "
                "name, or every node a partition."
            )
        if not (name := one.name.strip()):
            raise CompatibilityError("A node has no name. Set name in its configuration.")
        _refuse_contradictions(one, one.schema)
        if name in by_name:
            raise CompatibilityError(
                f"Two nodes are called {printable(name)!r}; names must differ. Rename one in its configuration."
            )
        by_name[name] = (one, one.schema)
    names = in_natural_order(by_name)
    sites = [by_name[name] for name in names]
    return Agreement(tuple(names), schema=_schema(sites, reading), notices=notices)


def _refuse_contradictions(one: SiteFacts, mine: SiteSchema) -> None:
    """Refuse facts of one site that cannot all be true."""
    names = [column.name for column in mine.columns]
    whole = len(set(names)) == len(names) > 0 if mine.kind == "table" else bool(mine.input_shape and mine.dtype)
    if not whole:
        raise CompatibilityError(
            f"{one.opened} describes its data in a way that cannot be: a table has columns of different names, and "
            "other data a shape and a type. Install the same version of fnrfl."
        )


def with_counts(agreement: Agreement, holdings: Sequence[SiteHolding], max_share: float = 1.0) -> Agreement:
    """The agreement with what each client holds; `holdings` are in the order of the clients.

    A site that claims more than `max_share` of all examples, by which models are weighted, is refused.
    """
    schema = agreement.schema
    for name, one in zip(agreement.sites, holdings, strict=True):
        wrong = schema is None or len(one.counts) != len(schema.classes) or min(one.counts) < 0
        if wrong or not 1 <= sum(one.counts) <= MOST_HELD:
            raise CompatibilityError(
                f"The node {printable(name)!r} says that it trains on {sum(one.counts):,} examples of "
                f"{counted(len(one.counts), 'class', 'classes')}; there must be one at least, and a number for each "
                "class. Give that site examples, or leave it out."
            )
    hashes = tuple(one.data for one in holdings)
    sizes = tuple(sum(one.counts) for one in holdings)
    share, largest = max(zip((size / sum(sizes) for size in sizes), agreement.sites, strict=True))
    told = f"The node {printable(largest)!r} says that it trains on {share:.1%} of all examples"
    if share > max_share:
        raise CompatibilityError(
            f"{told}, and network.max_share = {max_share:g}. Leave that site out, or set network.max_share higher."
        )
    if share > 0.5 and len(sizes) > 2:
        notice = f"{told}, so it has most of the weight. network.max_share refuses sites that claim too much."
        agreement = replace(agreement, notices=(*agreement.notices, notice))
    if schema is not None and len(schema.classes) > sum(sizes):
        raise CompatibilityError(
            f"The sites have {counted(len(schema.classes), 'class', 'classes')} for "
            f"{counted(sum(sizes), 'training example')}; there must be at least as many examples as classes. Check "
            "that the labels are classes."
        )
    whole = hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    return replace(agreement, data=whole, split=holdings[0].public, sizes=sizes, hashes=hashes)


def refuse_other_public(agreement: Agreement, holdings: Sequence[SiteHolding], own: str) -> None:
    """Refuse a node whose public data is not the server's, of which `own` is the sha256."""
    for name, one in zip(agreement.sites, holdings, strict=True):
        if one.public != own:
            raise CompatibilityError(
                f"The node {printable(name)!r} has other public data than the server: its sha256 begins with "
                f"{one.public[:8]}, the server's with {own[:8]}. Copy the server's public data there, and set public "
                "in the node's configuration."
            )


def _schema(sites: Sequence[Described], reading: Reading) -> Schema:
    _all_the_same(sites, "kind", "brings", "all must bring the same kind", "Convert one of them")
    kind, tested = sites[0][1].kind, any(mine.tested for _, mine in sites)
    if kind == "table":
        tables = [TableSummary(one.label, mine.columns, mine.label, mine.labels) for one, mine in sites]
        columns = merge_columns(tables, reading.categories)
        if len(columns.encoded) > MOST_INPUTS:
            raise CompatibilityError(
                f"The sites' tables have {len(columns.encoded):,} inputs, with one for each category; {MOST_INPUTS:,} "
                "are the most. Leave columns out with dataset.ignore."
            )
        return Schema(kind, merge_classes(tables), (len(columns.encoded),), "float32", tested, columns)
    return Schema(kind, _classes(sites), *_shape_and_type(sites), tested)


def _all_the_same(sites: Sequence[Described], fact: str, verb: str, rule: str, way_out: str) -> None:
    """Refuse the first site that differs from the first of all in a fact."""
    for one, mine in sites[1:]:
        if (ours := getattr(sites[0][1], fact)) != (theirs := getattr(mine, fact)):
            raise CompatibilityError(
                f"{sites[0][0].opened} {verb} {_told(ours)} and {one.label} {verb} {_told(theirs)}; {rule}. {way_out}."
            )


def _told(value: object) -> str:
    """A fact in a sentence."""
    if isinstance(value, tuple):
        return f"the classes {listed_columns(value)}"
    return "no list of classes" if value is None else printable(str(value))


# -- arrays and pictures -----------------------------------------------------------------------------------------------


def _classes(sites: Sequence[Described]) -> tuple[str, ...]:
    """The classes that an array names, or those that occur at some site, sorted."""
    for (first, ours), (one, theirs) in pairwise(sites):
        if ours.named != theirs.named:
            kinds = ["names" if mine.named else "numbers" for mine in (ours, theirs)]
            raise CompatibilityError(
                f"{first.opened} has {kinds[0]} as labels and {one.label} has {kinds[1]}; all must have one kind. "
                "Write all as names, or all as numbers."
            )
    for one, mine in sites:
        if not mine.named and not all(re.fullmatch("-?[0-9]{1,18}", label) for label in mine.labels):
            raise CompatibilityError(f"{one.opened} has labels that are neither names nor whole numbers. Correct them.")
    way_out = "Name all classes in one order at every site"
    _all_the_same(sites, "classes", "has", "the number of a class must mean the same everywhere", way_out)
    if (listed := sites[0][1].classes) is not None:
        _refuse_unlisted(sites, listed)
        return listed
    labels: Iterable[str] = {label for _, mine in sites for label in mine.labels}
    return tuple(sorted(labels, key=None if sites[0][1].named else int))


def _refuse_unlisted(sites: Sequence[Described], listed: Sequence[str]) -> None:
    """Refuse a label that is not among the classes that all sites list."""
    numbers = {str(number) for number in range(len(listed))}
    for one, mine in sites:
        if unknown := sorted(set(mine.labels) - (set(listed) if mine.named else numbers)):
            raise CompatibilityError(
                f"{one.opened} has the label {unknown[0]!r}, which is not among its classes {listed_columns(listed)}. "
                "Add it to the classes of every site, or correct the label."
            )


def _shape_and_type(sites: Sequence[Described]) -> tuple[tuple[int, ...], str]:
    """The shape and the type of every example, once whole numbers and grey pictures are as those of the others."""
    floating = any(mine.dtype.startswith("float") for _, mine in sites)
    coloured = any(mine.dtype == "uint8" and mine.input_shape[0] == 3 for _, mine in sites)
    alike = []
    for _, mine in sites:
        grey = mine.dtype == "uint8" and mine.input_shape[0] == 1
        shape = (3, *mine.input_shape[1:]) if coloured and grey else mine.input_shape
        alike.append((shape, "float32" if floating and mine.dtype == "int64" else mine.dtype))
    for (one, mine), (shape, dtype) in zip(sites, alike, strict=True):
        if (shape, dtype) != alike[0]:
            size = ' Set dataset.image_size in the recipe, such as "64".' if mine.kind == "pictures" else ""
            raise CompatibilityError(
                f"{sites[0][0].opened} has examples of {alike[0][1]}{list(alike[0][0])} and {one.label} of "
                f"{dtype}{list(shape)}; those of all sites must be alike.{size or ' Prepare them in one way.'}"
            )
    return alike[0]
