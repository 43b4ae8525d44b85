"""Values as they were typed, in a file, on a command line or in Python: by dotted key, without shorthands."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fnrfl.core.errors import ConfigError
from fnrfl.core.options import Value

Overrides: TypeAlias = Sequence[str] | Mapping[str, object]
FlatValues: TypeAlias = dict[str, Any]  # dotted key -> value, plus "fnr": whether refinement is on

SHORTHANDS = ("dataset", "model", "algorithm", "engine")  # `model = "mlp"` is short for `model.name = "mlp"`
SWITCH = {"on": True, "yes": True, "true": True, "1": True, "off": False, "no": False, "false": False, "0": False}
DEEPEST = 4  # parts of a key; there are two at most
LONGEST = 100  # characters of a value that are shown


@dataclass(frozen=True)
class Typed:
    """A value that is not text, and how it was written: `1e3` is a number, and as a name it is 1e3."""

    value: object
    text: str


class PassedLabel(str):
    """The text in the place of an object that was passed in Python: what it is, and how its hash begins."""

    __slots__ = ()
    FORM = re.compile(r".* \(given in Python, [0-9a-f]{8}\)", re.DOTALL)
    KEYS = ("dataset.name", "model.name", "model.init", "algorithm.name", "public.source")

    @classmethod
    def of(cls, what: str, sha256: str) -> PassedLabel:
        """Return the label of an object."""
        return cls(f"{what} (given in Python, {sha256[:8]})")

    @classmethod
    def marked(cls, flat: FlatValues) -> FlatValues:
        """Return values whose labels, which are text in a file, have this type."""
        words = {key: word for key in cls.KEYS if isinstance(word := flat.get(key), str) and cls.FORM.fullmatch(word)}
        return flat | {key: cls(word) for key, word in words.items()}

    @property
    def digits(self) -> str:
        """The beginning of the object's hash."""
        return self[-9:-1]


def parse_toml(text: str) -> dict[str, Any]:
    """TOML, with numbers as they were written."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"), parse_float=lambda written: Typed(float(written), written))
    except (ValueError, RecursionError) as error:  # a whole number may have thousands of digits
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise tomllib.TOMLDecodeError(reason) from error


def flatten(tree: Mapping[str, object], text_keys: Collection[str] = (), prefix: str = "") -> FlatValues:
    """Nested values by dotted key. The values of `text_keys` are text, even where they look like numbers."""
    if prefix.count(".") > DEEPEST:
        raise ConfigError(f"{shortened(prefix)} is nested too deeply; keys have two parts at most, as in client.lr.")
    flat: FlatValues = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path == "fnr" or path.startswith("fnr."):
            flat["fnr"] = _switch(value) if path == "fnr" else True
        if isinstance(value, Mapping):
            flat |= flatten(value, text_keys, f"{path}.")
            if not value and path != "fnr":
                flat[path] = {}  # right for a section, wrong for a value: whoever knows the keys decides
        elif path != "fnr":
            path = f"{path}.name" if path in SHORTHANDS else path
            flat[path] = _settled(value, path in text_keys)
    return flat


def read_overrides(overrides: Overrides, text_keys: Collection[str]) -> FlatValues:
    """Overrides as values by dotted key; later ones win."""
    if isinstance(overrides, Mapping):
        return flatten(overrides, text_keys)
    flat: FlatValues = {}
    for text in [overrides] if isinstance(overrides, str) else overrides:
        key, sign, value = (part.strip() for part in text.partition("="))
        if not key or not sign:
            raise ConfigError(f'"{shortened(text)}" is not an override; write key=value, as in client.lr=0.1.')
        flat |= flatten({key: _read_value(value)}, text_keys)
    return flat


def nest(values: FlatValues) -> dict[str, Any]:
    """The inverse of `flatten`, without shorthands."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, word = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[word] = value
    return tree


def shortened(text: str) -> str:
    """Text for a sentence: of something endless, the beginning."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _read_value(text: str) -> object:
    """A TOML value, or where it is none, the word itself: `fnr=on`, `scenario=label-dirichlet(0.1)`."""
    try:
        read = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = read["value"] if len(read) == 1 else text
    return value if isinstance(value, str | Mapping | Typed) else Typed(value, text)


def _settled(value: object, is_text: bool) -> object:
    """What a key gets: text as it was typed if the key is text, else the value; of Python's values the plain ones."""
    if is_text and isinstance(value, Typed):
        return value.text
    plain = _plain(value)
    if not is_text or isinstance(plain, bool):
        return plain
    if isinstance(plain, list | tuple) and all(isinstance(one, int | float) for one in plain):
        return ", ".join(map(str, plain))  # class weights
    return str(plain) if isinstance(plain, int | float) else plain


def _plain(value: object) -> object:
    """Paths as text and numpy's numbers as Python's, for callers from Python; lists without how they were written."""
    if isinstance(value, Typed):
        return _plain(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _switch(value: object) -> bool:
    """Whether `fnr = value` turns refinement on; a section does, even an empty one."""
    if isinstance(value, Mapping):
        return True
    word = value.text if isinstance(value, Typed) else str(value)
    if word.lower() not in SWITCH:
        shown = shortened(word) if isinstance(value, Typed) else show_value(value)
        raise ConfigError(f'fnr = {shown} is not allowed: it must be "on", "off" or a section.')
    return SWITCH[word.lower()]


# -- and back to text --------------------------------------------------------------------------------------------------


def toml(value: Value) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def show_value(value: object) -> str:
    """A value as the user typed it, whatever it is; of an endless one, the beginning."""
    return shortened(toml(value) if isinstance(value, Value) else repr(value))
