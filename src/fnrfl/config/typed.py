"""Values and names as they are typed, in a file, on a command line or in Python: by dotted key, without shorthands."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from fnrfl.core.errors import ConfigError
from fnrfl.core.options import Value, read_call

Overrides: TypeAlias = Sequence[str] | Mapping[str, object]
FlatValues: TypeAlias = dict[str, Any]  # dotted key -> value, plus "fnr": whether refinement is on

SHORTHANDS = ("dataset", "model", "algorithm", "engine")  # `model = "mlp"` is short for `model.name = "mlp"`
SWITCH = {"on": True, "yes": True, "true": True, "1": True, "off": False, "no": False, "false": False, "0": False}
# What others call a key, and what it is called here.
OTHER_NAMES = {
    "learning_rate": "lr", "batch_size": "batch", "local_epochs": "epochs", "optimiser": "optimizer",
    "num_clients": "clients", "num_rounds": "rounds", "fraction": "participation", "data": "dataset",
    "partition": "scenario", "alpha": "scenario", "beta": "scenario", "method": "algorithm", "network": "model",
    "device": "engine", "workers": "threads",
}  # fmt: skip
DEEPEST = 4  # parts of a key; there are two at most
LONGEST = 100  # characters of a value that are shown


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
    """TOML as a tree; whatever cannot be read is a TOMLDecodeError."""
    try:
        return tomllib.loads(text.removeprefix("\ufeff"))
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
            found = {path: _settled(value, path in text_keys)}
            flat |= _method(found[path], tree if prefix else {}) if path == "algorithm.name" else found
    return flat


def _method(words: object, beside: Mapping[str, object]) -> FlatValues:
    """The name and the options of a method that is typed with them, as fedprox(mu=0.1); `beside` has its section."""
    if not isinstance(words, str) or "(" not in words or PassedLabel.FORM.fullmatch(words):
        return {"algorithm.name": words}
    try:
        name, options = read_call(words)
    except ValueError as error:
        raise ConfigError(
            f"algorithm = {show_value(words)} cannot be read. Write the options of a method by name, once each, in "
            "brackets, as in fedprox(mu=0.1)."
        ) from error
    if twice := [option for option in options if option in beside or option == "name"]:
        raise ConfigError(f"algorithm.{twice[0]} is given twice: in {shortened(words)} and beside it. Give one.")
    return {"algorithm.name": name, **{f"algorithm.{option}": value for option, value in options.items()}}


def read_overrides(overrides: Overrides, text_keys: Collection[str]) -> FlatValues:
    """Overrides as values by dotted key; later ones win."""
    if isinstance(overrides, Mapping):
        return flatten(overrides, text_keys)
    flat: FlatValues = {}
    for text in [overrides] if isinstance(overrides, str) else overrides:
        key, sign, value = (part.strip() for part in text.partition("="))
        if not key or not sign:
            raise ConfigError(f'"{shortened(text)}" is not an override; write key=value, as in client.lr=0.1.')
        path = f"{key}.name" if key in SHORTHANDS else key
        flat |= flatten({key: _read_value(value, path in text_keys)}, text_keys)
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


def _read_value(text: str, is_text: bool) -> object:
    """A TOML value, or where it is none, the word itself: `fnr=on`, `scenario=label-dirichlet(0.1)`, `name=1e3`."""
    try:
        read = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = read["value"]
    return value if len(read) == 1 and (isinstance(value, str | Mapping) or not is_text) else text


def _settled(value: object, is_text: bool) -> object:
    """What a key gets: of Python's values the plain ones, and numbers as text if the key is text."""
    plain = os.fspath(value) if isinstance(value, os.PathLike) else value
    plain = plain.tolist() if hasattr(plain, "tolist") else plain  # of numpy
    if isinstance(plain, list):
        plain = [_settled(one, False) for one in plain]
    if not is_text or isinstance(plain, bool):
        return plain
    if isinstance(plain, list | tuple) and all(isinstance(one, int | float) for one in plain):
        return ", ".join(map(str, plain))  # class weights
    return str(plain) if isinstance(plain, int | float) else plain


def _switch(value: object) -> bool:
    """Whether `fnr = value` turns refinement on; a section does, even an empty one."""
    word = "on" if isinstance(value, Mapping) else str(value).lower()
    if word not in SWITCH:
        raise ConfigError(f'fnr = {show_value(value)} is not allowed: it must be "on", "off" or a section.')
    return SWITCH[word]


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


# -- words as people type them -----------------------------------------------------------------------------------------


def as_known(word: str, known: Iterable[str]) -> str:
    """Return the known name that `word` is a spelling of, as FedAvg and fed_avg are of fedavg; else the word itself."""
    names = list(known)
    bare = re.compile(r"[-_ .]")
    alike = [name for name in names if bare.sub("", name.lower()) == bare.sub("", word.lower())]
    return alike[0] if word not in names and len(alike) == 1 else word


def same_key(key: str, known: Iterable[str]) -> list[str]:
    """Return the known keys that `key` may have meant: those of the same section if there are any."""
    section, _, word = key.lower().replace("-", "_").rpartition(".")
    names = list(known)
    found = _ending_in(word, names) or _ending_in(OTHER_NAMES.get(word, word), names)
    here = [name for name in found if name.rpartition(".")[0] == section]
    return here or found


def _ending_in(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if word in (name.rpartition(".")[2], name.removesuffix(".name"))]
