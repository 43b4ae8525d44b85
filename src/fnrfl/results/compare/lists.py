"""Lists as they are typed: values between commas, seeds, and keys with their values."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsIndex

from fnrfl.config.typed import SHORTHANDS, flatten, toml
from fnrfl.core.errors import ConfigError
from fnrfl.core.options import Value


def split_commas(text: str) -> list[str]:
    """Values between commas; commas inside brackets and quotes do not count."""
    pieces, piece, closing = [], "", ""
    for character in text:
        if character == "," and not closing:
            pieces.append(piece)
            piece = ""
            continue
        piece += character
        if closing and character == closing[-1]:
            closing = closing[:-1]
        elif closing[-1:] not in ("'", '"'):
            closing += {"(": ")", "[": "]", "{": "}"}.get(character, character if character in "'\"" else "")
    if closing:
        raise ConfigError(f"{text} lacks a closing {closing[-1]}; add it.")
    return [found.strip() for found in (*pieces, piece)]


def read_seeds(text: str) -> list[int]:
    """Seeds such as "0,1,2" or "0-4"."""
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", piece, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < first + 1000:
            raise ConfigError(f'"{text}" is not a list of seeds; write whole numbers, as in 0,1,2 or 0-4.')
        found += range(first, last + 1)
    return found


def read_duration(text: str | None) -> float | None:
    """Return the seconds of a time such as 90s, 9m or 1.5h.

    >>> read_duration("9m"), read_duration("90")
    (540.0, 90.0)
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d+)?)\s*([smh]?)\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(f'"{text}" is not a time; write it as 90s, 9m or 2h.')
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def about_seeds(text: str) -> str | None:
    """What to tell somebody who may have meant a number of seeds, and gave one seed."""
    number = int(text) if re.fullmatch(r"\s*\d{1,9}\s*", text, re.ASCII) else 0
    return f"--seeds {number} is the one seed {number}; {number} seeds are 0-{number - 1}." if number > 1 else None


def seeds_in_list(seeds: object) -> list[int]:
    """Seeds that were passed in."""
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        found = list(seeds)
        if all(isinstance(seed, SupportsIndex) for seed in found):
            return [operator.index(seed) for seed in found]
    raise ConfigError(f"seeds is {seeds!r}; it must be a list of whole numbers, as in [0, 1, 2] or range(3).")


def overrides_in_words(values: Mapping[str, object]) -> list[str]:
    """Keys that were passed in as values, as they would be typed."""
    return [f"{key}={_typed(value)}" for key, value in flatten(values).items() if value != {}]


def axes_in_words(over: Mapping[str, Sequence[object]]) -> list[str]:
    """Keys and the lists of values that each takes in turn, as they would be typed."""
    return [f"{key}={','.join(map(_typed, values))}" for key, values in over.items()]


def _typed(value: object) -> str:
    """A value as it would be typed; text has quotes where it has to."""
    if isinstance(value, str) and "," not in value and not value.startswith(("'", '"')):
        return value
    return toml(value) if isinstance(value, Value) else str(value)


def read_axes(over: Iterable[str]) -> dict[str, list[str]]:
    """Keys and the values that each takes in turn."""
    axes: dict[str, list[str]] = {}
    for text in over:
        key, _, values = (part.strip() for part in text.partition("="))
        key = f"{key}.name" if key in SHORTHANDS else key
        found = split_commas(values)
        if not key or not all(found):
            raise ConfigError(f'"{text}" has no list of values; write key=a,b, as in algorithm=fedavg,scaffold.')
        if key == "seed":
            raise ConfigError(f'"{text}" varies the seed; give the seeds of every combination with --seeds.')
        if key in axes:
            raise ConfigError(f"{key} is varied twice; give all of its values in one list, {key}=a,b,c.")
        if repeated := next((value for value in found if found.count(value) > 1), None):
            raise ConfigError(f'"{text}" has the value {repeated} twice; give it once.')
        axes[key] = found
    return axes
