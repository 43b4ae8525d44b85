"""The command `list`: what there is, by name. On a terminal keys and methods are one line each, and more on demand."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fnrfl.cli.common import Debug, Json, Trust, console, errors_in_words, paragraph, print_table
from fnrfl.config.spelling import as_known, same_key
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import choices, nearest

if TYPE_CHECKING:
    from fnrfl.config.keys import Key
    from fnrfl.config.registry import Entry

SUBJECTS = ("algorithms", "models", "datasets", "scenarios", "penalties", "engines", "recipes", "metrics", "keys")
MEANT_LISTS = {"method": "algorithms", "methods": "algorithms"}  # by words that are not like the name
ABOUT_KEYS = "`fnrfl list keys client` or --long says more; --recipe NAME shows a recipe's values."
ABOUT_METHODS = "`fnrfl list algorithms scaffold` or --long says more: options, needs, traffic."

Subject = Annotated[str, typer.Argument(metavar="SUBJECT", show_default=False, help=", ".join(SUBJECTS))]
Prefix = Annotated[
    str | None, typer.Argument(metavar="PREFIX", show_default=False, help="Only what begins so, in detail.")
]
OfRecipe = Annotated[
    str | None, typer.Option("--recipe", metavar="RECIPE", help="Of keys: the values of a recipe or a TOML file.")
]
Long = Annotated[bool, typer.Option("--long", "-l", help="Of keys and algorithms: everything about each.")]


def list_(
    subject: Subject = "",
    prefix: Prefix = None,
    recipe: OfRecipe = None,
    long: Long = False,
    trust: Trust = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what there is, by name.

    \b
    fnrfl list recipes
    fnrfl list algorithms               one line each
    fnrfl list algorithms scaffold      its idea, needs, traffic and options
    fnrfl list keys                     one line each, by section, with the defaults
    fnrfl list keys client              the section [client] in detail
    fnrfl list keys --recipe label-skew

    In a pipe a row is a line, and nothing is cut: fnrfl list keys | grep lr
    """
    with errors_in_words(debug):
        if not subject:
            raise ConfigError(f"Say what to list: {', '.join(SUBJECTS)}.")
        if subject == "keys":
            _list_keys(KeyList.read(recipe, trust=trust), prefix, long=long, json=json)
            return
        if recipe is not None:
            raise ConfigError("--recipe shows the values of keys. Type `fnrfl list keys --recipe NAME`.")
        if subject == "algorithms":
            _list_methods(prefix, long=long, json=json)
            return
        columns, rows = _table(subject)
        found = beginning_with([row[0] for row in rows], prefix, subject)
        _print_rows(columns, [row for row in rows if row[0] in found], json=json)


def _table(subject: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(names of the columns, rows) of the lists that are always shown whole."""
    from fnrfl.config import registry

    tables: dict[str, Callable[[], Mapping[str, str]]] = {
        "models": lambda: registry.MODELS,
        "datasets": lambda: registry.DATASETS | registry.DATASET_FORMS,
        "scenarios": registry.scenarios,
        "penalties": lambda: registry.PENALTIES,
        "engines": lambda: registry.ENGINES,
        "recipes": registry.recipes,
    }
    if subject == "metrics":
        from fnrfl.runs.quality import TEST_METRICS

        better = {True: "higher", False: "lower", None: ""}
        rows: list[tuple[str, ...]] = [
            (m.name, better[m.higher_is_better], m.shape, m.meaning) for m in TEST_METRICS.values()
        ]
        return ("name", "better", "shape", "meaning"), rows
    if subject not in tables:
        raise ConfigError(f'There is no list of "{subject}". {choices(MEANT_LISTS.get(subject, subject), SUBJECTS)}.')
    return ("name", "meaning"), list(tables[subject]().items())


def _print_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, json: bool) -> None:
    if json:
        typer.echo(json_format.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
    else:
        print_table([[(", ".join(c) or "-") if isinstance(c, tuple) else str(c) for c in row] for row in rows])


def beginning_with(names: Iterable[str], prefix: str | None, subject: str) -> set[str]:
    """The names that a prefix stands for: a name or a section if it is one, else all that begin so."""
    known = list(dict.fromkeys(names))
    if prefix is None:
        return set(known)
    sections = list(dict.fromkeys(name.rpartition(".")[0] for name in known if "." in name))
    word = as_known(prefix.removesuffix("."), [*known, *sections])
    exact = {name for name in known if name == word or name.startswith(f"{word}.")}
    found = exact or {name for name in known if name.startswith(word)}
    if not found:
        meant = " or ".join(same_key(word, known)) if subject == "keys" else ""
        meant = meant or nearest(word, [*known, *sections]) or ""
        ask = f"Did you mean {meant}?" if meant else f"`fnrfl list {subject}` prints all of them."
        raise ConfigError(f'Nothing in the list of {subject} begins with "{prefix}". {ask}')
    return found


# -- keys --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyList:
    """All keys, and the value that each has: its default, or that of a recipe."""

    keys: tuple[Key, ...]
    values: Mapping[str, object]
    method: str  # whose options are part of the short list
    recipe: str | None

    @classmethod
    def read(cls, recipe: str | None, *, trust: bool = False) -> KeyList:
        """The keys with their defaults, or with the values of a recipe."""
        from fnrfl.config import describe_keys, load, registry
        from fnrfl.config.keys import keys_of_method
        from fnrfl.rundir.configs import flat_config

        keys = describe_keys()
        if recipe is None:
            return cls(keys, {}, "fedavg", None)
        config = load(recipe, trust=trust)
        method = config.algorithm.name
        if ":" in method:  # a user's own: its options are in no list
            own = keys_of_method(registry.options(method))
            keys += tuple(replace(key, method=method) for key in own.values())
        return cls(keys, flat_config(config), method, recipe)

    def value(self, key: Key) -> object:
        """What a run of the recipe has; the options of other methods have their defaults."""
        return self.values.get(key.name, key.default) if key.method in ("", self.method) else key.default

    def differs(self, key: Key) -> bool:
        """Whether the recipe has another value than the default."""
        return key.name != "name" and self.value(key) != key.default

    def shown(self, key: Key) -> str:
        """The value as it is typed after key=."""
        value = self.value(key)
        return value if isinstance(value, str) and value.isprintable() else _shown(value)


def _list_keys(listed: KeyList, prefix: str | None, *, long: bool, json: bool) -> None:
    found = beginning_with([key.name for key in listed.keys], prefix, "keys")
    listed = replace(listed, keys=tuple(key for key in listed.keys if key.name in found))
    screen = console()
    if json:
        columns = ("name", "type", "default", "range", "meaning", *(("value",) if listed.recipe else ()))
        rows = [(k.name, k.type, k.default, k.range, k.meaning, listed.value(k)) for k in listed.keys]
        _print_rows(columns, [row[: len(columns)] for row in rows], json=True)
    elif long or (prefix is not None and screen.is_terminal):
        _print_lines(key_details(listed, screen.width))
    elif screen.is_terminal:
        _print_lines(short_key_lines(listed, screen.width))
    else:
        print_table([(k.name, listed.shown(k), k.meaning, k.rule) for k in listed.keys])


def short_key_lines(listed: KeyList, width: int) -> Iterator[str]:
    """A line for each key of every run and of the method, by section; what is too long for a line is cut."""
    keys = [key for key in listed.keys if key.method in ("", listed.method)]
    changed = any(listed.differs(key) for key in keys)
    sections = dict.fromkeys(_section(key) for key in keys)
    for section in sections:
        inside = [key for key in keys if _section(key) == section]
        names = max(len(key.name) for key in inside)
        values = min(22, max(len(listed.shown(key)) for key in inside))
        yield f"[{section}]" if section else "of every run"
        for key in inside:
            mark = "*" if listed.differs(key) else " "
            value = cut(listed.shown(key), values)
            yield cut(f"{mark} {key.name:{names}}  {value:{values}}  {_meaning(key)}", width)
        yield ""
    if changed:
        yield from paragraph(f"* {listed.recipe} has another value than the default.", width)
    if listed.recipe is None:
        yield from paragraph("The values are the defaults; options of a method: `fnrfl list algorithms NAME`.", width)
    yield from paragraph(ABOUT_KEYS, width)


def key_details(listed: KeyList, width: int) -> Iterator[str]:
    """Everything about each key, in paragraphs."""
    title = None
    for key in listed.keys:
        heading = f"options of {key.method}" if key.method else ""
        if heading != title and heading:
            yield from (heading, "")
        title = heading
        yield from paragraph(f"{key.name} = {_shown(listed.value(key))}", width, "", "    ")
        yield from paragraph(_meaning(key), width, "    ")
        default = f" (default {_shown(key.default)})" if listed.differs(key) else ""
        yield from paragraph(f"{key.rule}{default}", width, "    ")
        yield ""


def _section(key: Key) -> str:
    """The section of a key; the switch `fnr` is with the keys that it turns on."""
    return "fnr" if key.name == "fnr" else key.name.rpartition(".")[0]


def _meaning(key: Key) -> str:
    return key.meaning.removeprefix(f"{key.method}: ")


def _shown(value: object) -> str:
    from fnrfl.config.typed import show_value

    return show_value(value)


# -- methods -----------------------------------------------------------------------------------------------------------


def _list_methods(prefix: str | None, *, long: bool, json: bool) -> None:
    from fnrfl.config import registry

    found = beginning_with([method.name for method in registry.methods()], prefix, "algorithms")
    methods = [method for method in registry.methods() if method.name in found]
    screen = console()
    if not json and (long or (prefix is not None and screen.is_terminal)):
        _print_lines(method_details(methods, screen.width))
    elif not json and screen.is_terminal:
        _print_lines(short_method_lines(methods, screen.width))
    else:
        rows = [(method.name, method.idea, method.needs, method.traffic) for method in methods]
        _print_rows(("name", "idea", "needs", "traffic"), rows, json=json)


def short_method_lines(methods: Sequence[Entry], width: int) -> Iterator[str]:
    """The name of each method and its idea, without authors."""
    names = max(len(method.name) for method in methods)
    for method in methods:
        idea = method.idea.partition(": ")[2] or method.idea
        plain = idea.partition(" (")[0].rstrip(".")
        yield from paragraph(plain, width, f"{method.name:{names}}  ", " " * (names + 2))
    yield ""
    yield from paragraph(ABOUT_METHODS, width)


def method_details(methods: Sequence[Entry], width: int) -> Iterator[str]:
    """Everything about each method: idea, needs, traffic, and its options with their defaults."""
    from fnrfl.config.keys import keys_of_method

    for method in methods:
        yield method.name
        yield from paragraph(method.idea, width, "  ")
        yield from paragraph(f"needs    {', '.join(method.needs) or 'nothing'}", width, "  ", " " * 11)
        yield from paragraph(f"traffic  {method.traffic}", width, "  ", " " * 11)
        for key in keys_of_method(method.options).values():
            yield from paragraph(f"{key.name} = {_shown(key.default)}", width, "  ", " " * 6)
            yield from paragraph(f"{key.meaning}; {key.rule}", width, " " * 6)
        yield ""


# -- lines -------------------------------------------------------------------------------------------------------------


def cut(text: str, width: int) -> str:
    """A line that fits: of a longer one the words at its beginning, and two dots."""
    text = text.rstrip()
    if len(text) <= width:
        return text
    whole = text[: width - 2].rpartition(" ")[0].rstrip(" ,;:")
    return f"{whole or text[: width - 3]} .."


def _print_lines(lines: Iterable[str]) -> None:
    typer.echo("\n".join(lines).rstrip("\n"))
