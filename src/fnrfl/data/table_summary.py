"""What a table holds, in names and counts: enough for several tables, here or at several sites, to be read alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated

from pydantic import Field

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.words import counted
from fnrfl.data.column_names import Profile, refuse_other_columns, rename_key, same_as_first
from fnrfl.data.reading import Categories, Columns

MAX_CATEGORIES = 1000  # of a column of text
FEW_CATEGORIES = 20  # that need not repeat


@dataclass(frozen=True)
class ColumnSummary:
    """One input column of a table. Fields are bounded, since summaries of sites come from other machines."""

    name: Annotated[str, Field(max_length=1000)]
    type: Annotated[str, Field(pattern="^(integer|number|category)$")]
    known: Annotated[int, Field(ge=0, le=2**31)]  # cells that are not missing
    categories: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=10_000)] = ()


@dataclass(frozen=True)
class TableSummary:
    """The inputs and the classes of a table; `title` is what sentences call it: a file, or "the node 'A'"."""

    title: str
    columns: tuple[ColumnSummary, ...]
    label: str
    labels: tuple[str, ...]  # each label once, as it is written

    @cached_property
    def by_name(self) -> dict[str, ColumnSummary]:
        """The columns by their names."""
        return {column.name: column for column in self.columns}

    def profiles(self) -> dict[str, Profile]:
        """What is known of the cells of each column."""
        return {one.name: Profile(one.type == "category", frozenset(one.categories)) for one in self.columns}

    @property
    def opened(self) -> str:
        """The title at the beginning of a sentence."""
        return f"The {self.title[4:]}" if self.title.startswith("the ") else self.title


def merge_columns(
    tables: Sequence[TableSummary], chosen: Collection[str] = (), renamed: Sequence[tuple[str, str]] = ()
) -> Columns:
    """Return the columns of tables that are read alike, in the order of the first, with the categories of all.

    `chosen` are the columns that `dataset.categories` names: their categories need not repeat. `renamed` is what
    `dataset.rename` says.
    """
    first, categories, types = tables[0], Categories(), []
    for table in tables[1:]:
        if table.label != first.label:
            raise CompatibilityError(
                f"{first.opened} has its classes in the column {first.label} and {table.title} in the column "
                f"{table.label}; all must have them in one column. Set dataset.label to the column of the classes, or "
                f"{rename_key({**dict(renamed), table.label: first.label})} if the two are one."
            )
        pairs = partial(same_as_first, [one.profiles() for one in tables], renamed)
        refuse_other_columns(table.opened, [*table.by_name], [*first.by_name], first.title, pairs=pairs)
    for name in first.by_name:
        known = [(table.title, table.by_name[name]) for table in tables if table.by_name[name].known]
        types.append(_merged_type(name, known))
        if types[-1] == "category":
            categories[name] = tuple(sorted({category for _, column in known for category in column.categories}))
            count, cells = len(categories[name]), sum(column.known for _, column in known)
            if name not in chosen and is_free_text(count, cells):
                raise ConfigError(
                    f"Column {name!r} of {first.title if len(tables) == 1 else 'all tables together'} holds "
                    f"{counted(count, 'different text')} in {counted(cells, 'row')}; categories must repeat, twice on "
                    f'average, and be {MAX_CATEGORIES:,} at most. Set dataset.ignore = "{name}" if it is an id, a date '
                    f'or a remark, or dataset.categories = "{name}" if it does hold categories.'
                )
    return Columns(tuple(first.by_name), tuple(types), first.label, categories)


def _merged_type(name: str, known: Sequence[tuple[str, ColumnSummary]]) -> str:
    """The type of a column that several tables have; refused if it is text in one and numbers in another."""
    kinds = {column.type == "category": title for title, column in reversed(known)}
    if len(kinds) == 2:
        raise CompatibilityError(
            f"Column {name!r} holds text at {kinds[True]} and numbers at {kinds[False]}; it must hold one kind "
            f'everywhere. Correct the cells, or set dataset.categories = "{name}" if its numbers are names of '
            "categories too."
        )
    types = {column.type for _, column in known}
    return next((kind for kind in ("category", "number") if kind in types), "integer")


def merge_classes(tables: Sequence[TableSummary]) -> tuple[str, ...]:
    """Return the classes of all tables, sorted: as numbers where all labels are numbers, else as text."""
    numeric = all(is_number(label) for table in tables for label in table.labels)
    written: dict[str, tuple[str, str]] = {}
    for table in tables:
        for label in table.labels:
            if numeric and not float(label).is_integer():
                raise ConfigError(
                    f"{table.opened} has the label {label!r} in column {table.label!r}; a label must be a whole number "
                    "or a name, since fnrfl is for classification only. Correct it, or name the column of classes in "
                    "dataset.label."
                )
            title, spelled = written.setdefault(class_name(label, numeric=numeric), (table.title, label))
            if spelled != label:
                raise CompatibilityError(
                    f"The class {spelled!r} of {title} is written {label!r} in {table.title}, which is the same "
                    "number. Write a class in one way, or give the classes names."
                )
    return tuple(sorted(written, key=int if numeric else None))


def class_name(label: str, *, numeric: bool) -> str:
    """Return the name of a label's class: the whole number where all labels are numbers, else the label itself."""
    if not numeric or not is_number(label) or not float(label).is_integer():
        return label
    return str(int(label) if label.lstrip("+-").isdigit() else int(float(label)))  # long codes are no floats


def is_free_text(num_categories: int, num_cells: int) -> bool:
    """Say whether a column is free text: its cells repeat too rarely to be categories."""
    return num_categories > (FEW_CATEGORIES if 2 * num_categories > num_cells else MAX_CATEGORIES)


def is_number(cell: str) -> bool:
    """Say whether a cell reads as a number; one with an underscore, which Python would pass over, is text."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell
