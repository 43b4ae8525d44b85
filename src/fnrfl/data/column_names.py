"""Tables whose columns have other names than those of others: the refusal, with the pairs that may be the same."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fnrfl.core.errors import CompatibilityError

MAX_LISTED = 12  # names that a sentence lists
LIKE_NAMES, LIKE_VALUES = 0.6, 0.4  # from which on two columns are proposed as one


@dataclass(frozen=True)
class Profile:
    """What is known of the cells of a column."""

    text: bool
    categories: frozenset[str] = frozenset()
    spread: tuple[float, float] | None = None  # where nine of ten numbers are; None: nobody knows

    def likeness(self, other: Profile) -> float:
        """From 0 to 1: how much of what both hold is in both; -1 of text and numbers."""
        if self.text != other.text:
            return -1.0
        if self.text:
            return len(self.categories & other.categories) / max(len(self.categories | other.categories), 1)
        if self.spread is None or other.spread is None:
            return 0.0
        (low, high), (its_low, its_high) = self.spread, other.spread
        whole = max(high, its_high) - min(low, its_low)
        return max(min(high, its_high) - max(low, its_low), 0.0) / whole if whole else 1.0


Profiles = Mapping[str, Profile]


def same_as_first(tables: Iterable[Profiles], renamed: Sequence[tuple[str, str]]) -> dict[str, str]:
    """What dataset.rename would say for the columns of all tables to be those of the first."""
    first, *others = tables
    pairs = dict(renamed)
    for table in others:
        unexpected = {name: table[name] for name in _without([*table], first)}
        pairs = {**_same_columns(unexpected, {name: first[name] for name in _without([*first], table)}), **pairs}
    return pairs


def _same_columns(unexpected: Profiles, missing: Profiles) -> dict[str, str]:
    """Pairs (unexpected name, missing name) that may be one column: by their names, then by their cells."""
    likely = []
    for old, mine in unexpected.items():
        for new, its in missing.items():
            names, cells = _like_names(old.lower(), new.lower()), mine.likeness(its)
            if cells >= 0 and (names >= LIKE_NAMES or cells >= LIKE_VALUES):
                likely.append((names >= LIKE_NAMES, names + cells, old, new))
    pairs = dict[str, str]()
    for *_, old, new in sorted(likely, key=lambda one: one[:2], reverse=True):
        if old not in pairs and new not in pairs.values():
            pairs[old] = new
    left = [name for name in unexpected if name not in pairs], [name for name in missing if name not in pairs.values()]
    if list(map(len, left)) == [1, 1] and unexpected[left[0][0]].likeness(missing[left[1][0]]) >= 0:
        pairs[left[0][0]] = left[1][0]
    return pairs


def _like_names(old: str, new: str) -> float:
    begins = min(len(old), len(new)) > 2 and (old.startswith(new) or new.startswith(old))
    return 0.9 if begins else difflib.SequenceMatcher(None, old, new).ratio()


def refuse_other_columns(
    title: str,
    found: Sequence[str],
    wanted: Sequence[str],
    whose: str,
    way_out: str = "",
    label: str = "",
    pairs: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Refuse data whose input columns are not those of `whose`, in any order; `title` opens the sentence.

    `pairs` has columns that may be the same. Without a `way_out`, keys of the recipe are one.
    """
    missing, unexpected = _without(wanted, {*found}), _without(found, {*wanted})
    if not missing and not unexpected:
        return
    differ = [f"lacks {listed_columns(missing)}"] if missing else []
    differ += [f"has {listed_columns(unexpected)}, which {whose} had not"] if unexpected else []
    same = {name.lower(): name for name in (*missing, label)}
    in_case = [name for one in unexpected if one.lower() in same for name in (one, same[one.lower()])][:6]
    case = f" {listed_columns(in_case)} differ only in case." if in_case else ""
    is_label = f", and {label!r} is the label" if label else ""
    raise CompatibilityError(
        f"{title} has other columns than {whose}: it {' and '.join(differ)}.{case} The inputs are "
        f"{listed_columns(wanted)}{is_label}. Add, rename or leave out columns until they are the same; "
        + (way_out or _keys(pairs(), missing, unexpected, len(wanted)))
        + "."
    )


def _keys(pairs: Mapping[str, str], missing: Sequence[str], unexpected: Sequence[str], num_wanted: int) -> str:
    """What to do: rename what may be the same, and leave out what only some tables have."""
    rest = [name for name in (*missing, *unexpected) if name not in pairs and name not in pairs.values()]
    leave_out = f"dataset.ignore = {_listed(rest or [*missing, *unexpected])} leaves out what not all tables have"
    if not pairs:
        return leave_out
    renamed = f"{rename_key(pairs)} takes columns that look alike for the same, of which you should check each pair"
    if rest:
        return f"{renamed}; with it, {leave_out}"
    if 2 * len(missing) > num_wanted:  # without them hardly an input would be left
        return renamed
    return f"{renamed}; if they are not, {leave_out}"


def rename_key(pairs: Mapping[str, str]) -> str:
    """The line of a recipe that renames columns."""
    return f"dataset.rename = {_listed([f'{old}={new}' for old, new in pairs.items()])}"


def _listed(names: Sequence[str]) -> str:
    """Names as a key lists them; one with a comma in it stands in quotes."""
    return repr(",".join(f'"{name}"' if "," in name else name for name in names))


def _without(names: Sequence[str], others: Collection[str]) -> list[str]:
    return [name for name in names if name not in others]


def listed_columns(names: Sequence[str]) -> str:
    """Names for a sentence; of very many, the first."""
    more = len(names) - MAX_LISTED
    return ", ".join(repr(name) for name in names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
