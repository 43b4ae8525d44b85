"""Baselines: which group each one is compared with."""

from __future__ import annotations

from collections.abc import Iterable

from fnrfl.config import slug
from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import choices
from fnrfl.results.compare.cells import Group, Parts
from fnrfl.results.compare.lists import split_commas

METHOD_SECTIONS = ("algorithm", "fnr", "client", "engine")  # sections about how to train; all others are about the task


def find_baseline(groups: Iterable[Group], text: str | None) -> Parts:
    """The parts that a baseline has. By default how the first group trains, so that each task has a baseline."""
    known = {group.label: group for group in groups}
    if text is None:
        first = next(iter(known.values())).parts
        return tuple(part for part in first if part[0].split(".")[0] in METHOD_SECTIONS) or first
    for label, group in known.items():
        if slug(label) == slug(text):
            return group.parts
    pieces = {slug(piece) for piece in split_commas(text)}
    for group in known.values():
        fitting = tuple(
            (key, words)
            for key, words in group.parts
            if pieces & {slug(words), slug(f"{key.removesuffix('.name')} {words}")}
        )
        if len(fitting) == len(pieces):
            return fitting
    labels = [f'"{label}"' for label in known]
    raise ConfigError(f'There is no baseline "{text}" in this comparison. {choices(text, labels)}.')


def counterpart(group: Group, groups: Iterable[Group], baseline: Parts) -> str:
    """The group that this one is compared with: of those with the baseline's parts, the one that is most alike."""
    able = [other for other in groups if set(baseline) <= set(other.parts)]
    return max(able, key=lambda other: len(set(other.parts) & set(group.parts))).label
