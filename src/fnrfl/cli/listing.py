"""The command `list`: what there is, by name. On a terminal keys and methods are one line each, and more on demand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fnrfl.cli.common import Json, Trust, console, paragraph, print_json, print_table
from fnrfl.core.errors import ConfigError
from fnrfl.core.words import choices, nearest

if TYPE_CHECKING:
    from fnrfl.config.keys import Key

SUBJECTS = {
    "algorithms": "methods, with what each needs and sends",
    "models": "networks, with their options",
    "datasets": "data sets, and the forms that data of your own may have",
    "scenarios": "how data is spread over clients",
    "penalties": "how FNR compares class norms with their targets",
    "engines": "what carries a run out",
    "recipes": "configs that are part of the package",
    "metrics": "what models are judged by",
    "keys": "everything that can be set, with its default",
}
MEANT_LISTS = {"method": "algorithms", "methods": "algorithms"}  # by words that are not like the name
BETTER = {True: "higher", False: "lower", None: ""}
ABOUT_KEYS = "`fnrfl list keys client` or --long says more; --recipe NAME shows a recipe's values."
ABOUT_METHODS = "`fnrfl list algorithms scaffold` or --long says more: options, needs, traffic."

Subject = Annotated[str, Argument(metavar="SUBJECT", show_default=False, help=", ".join(SUBJECTS))]
Prefix = Annotated[str | None, Argument(metavar="PREFIX", show_default=False, help="Only what begins so, in detail.")]
OfRecipe = Annotated[
    str | None, Option("--recipe", metavar="RECIPE", help="Of keys: the values of a recipe or a TOML file.")
]
Long = Annotated[bool, Option("--long", "-l", help="Of keys and algorithms: everything about each.")]


def list_(
    subject: Subject = "",
    prefix: Prefix = None,
    recipe: OfRecipe = None,
    long: Long = False,
    trust: Trust = False,
    json: Json = False,
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
    if subject and subject not in SUBJECTS:
        raise ConfigError(f'There is no list of "{subject}". {choices(MEANT_LISTS.get(subject, subject), SUBJECTS)}.')
    if recipe is not None and subject != "keys":
        raise ConfigError("--recipe shows the values of keys. Type `fnrfl list keys --recipe NAME`.")
    width, terminal = console().width, console().is_terminal
    detailed = long or (prefix is not None and terminal)
    if subject == "keys":
        listed = KeyList.read(recipe, trust=trust).beginning_with(prefix)
        lines, rows = (key_details if detailed else short_key_lines)(listed, width), listed.rows(json=json)
    else:
        found, rows = _rows(subject, prefix)
        lines = (method_details if detailed else short_method_lines)(found, width)
    if json:
        print_json(rows)
    elif (detailed or terminal) and subject in ("keys", "algorithms"):
        typer.echo("\n".join(lines).rstrip("\n"))
    else:
        print_table([list(map(_cell, row.values())) for row in rows])


def _cell(value: object) -> str:
    return (", ".join(value) or "-") if isinstance(value, tuple) else str(value)


def _rows(subject: str, prefix: str | None) -> tuple[set[str], list[dict[str, Any]]]:
    """Return the names of a subject, and its rows for `--json`; keys have a function of their own."""
    from fnrfl.config import registry

    rows: list[dict[str, Any]]
    if subject == "algorithms":
        rows = [{"name": m.name, "idea": m.idea, "needs": m.needs, "traffic": m.traffic} for m in registry.methods()]
    elif subject == "metrics":
        from fnrfl.runs.quality import TEST_METRICS

        found = ((BETTER[m.higher_is_better], m) for m in TEST_METRICS.values())
        rows = [{"name": m.name, "better": word, "shape": m.shape, "meaning": m.meaning} for word, m in found]
    else:
        tables = {
            "": SUBJECTS,
            "models": registry.MODELS,
            "datasets": registry.DATASETS | registry.DATASET_FORMS,
            "scenarios": registry.scenarios(),
            "penalties": registry.PENALTIES,
            "engines": registry.ENGINES,
            "recipes": registry.recipes(),
        }
        rows = [{"name": name, "meaning": meaning} for name, meaning in tables[subject].items()]
    names = beginning_with([row["name"] for row in rows], prefix, subject)
    return names, [row for row in rows if row["name"] in names]


def beginning_with(names: Iterable[str], prefix: str | None, subject: str) -> set[str]:
    """The names that a prefix stands for: a name or a section if it is one, else all that begin so."""
    from fnrfl.config.typed import as_known, same_key

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
        from fnrfl.config.schema import keys_of_method
        from fnrfl.rundir.configs import flat_config

        if recipe is None:
            return cls(describe_keys(), {}, "fedavg", None)
        config = load(recipe, trust=trust)
        method = config.algorithm.name
        own = keys_of_method(method, registry.options(method)) if ":" in method else ()  # which are in no list
        return cls((*describe_keys(), *own), flat_config(config), method, recipe)

    def beginning_with(self, prefix: str | None) -> KeyList:
        """The keys that a prefix stands for."""
        found = beginning_with([key.name for key in self.keys], prefix, "keys")
        return replace(self, keys=tuple(key for key in self.keys if key.name in found))

    def value(self, key: Key) -> Any:
        """What a run of the recipe has; the options of other methods have their defaults."""
        return self.values.get(key.name, key.default) if key.method in ("", self.method) else key.default

    def differs(self, key: Key) -> bool:
        """Whether the recipe has another value than the default."""
        return key.name != "name" and self.value(key) != key.default

    def shown(self, key: Key) -> str:
        """The value as it is typed after key=."""
        value = self.value(key)
        return value if isinstance(value, str) and value.isprintable() else _shown(value)

    def rows(self, *, json: bool) -> list[dict[str, Any]]:
        """A row for each key, for programs or for a pipe."""
        if not json:
            return [{"name": k.name, "value": self.shown(k), "meaning": k.meaning, "rule": k.rule} for k in self.keys]
        return [
            {"name": k.name, "type": k.type_name, "default": k.default, "range": k.range, "meaning": k.meaning}
            | ({"value": self.value(k)} if self.recipe else {})
            for k in self.keys
        ]


def short_key_lines(listed: KeyList, width: int) -> Iterator[str]:
    """A line for each key of every run and of the method, by section; what is too long for a line is cut."""
    sections: dict[str, list[Key]] = {}
    for key in listed.keys:
        if key.method in ("", listed.method):  # the switch `fnr` is with the keys that it turns on
            sections.setdefault("fnr" if key.name == "fnr" else key.name.rpartition(".")[0], []).append(key)
    for section, inside in sections.items():
        names = max(len(key.name) for key in inside)
        values = min(22, max(len(listed.shown(key)) for key in inside))
        yield f"[{section}]" if section else "of every run"
        for key in inside:
            mark = "*" if listed.differs(key) else " "
            yield cut(f"{mark} {key.name:{names}}  {cut(listed.shown(key), values):{values}}  {key.help}", width)
        yield ""
    if any(listed.differs(key) for inside in sections.values() for key in inside):
        yield from paragraph(f"* {listed.recipe} has another value than the default.", width)
    if listed.recipe is None:
        yield from paragraph("The values are the defaults; options of a method: `fnrfl list algorithms NAME`.", width)
    yield from paragraph(ABOUT_KEYS, width)


def key_details(listed: KeyList, width: int) -> Iterator[str]:
    """Everything about each key, in paragraphs."""
    method = ""
    for key in listed.keys:
        if key.method and key.method != method:
            yield from (f"options of {key.method}", "")
        method = key.method
        default = f" (default {_shown(key.default)})" if listed.differs(key) else ""
        yield from paragraph(f"{key.name} = {_shown(listed.value(key))}", width, "", "    ")
        yield from paragraph(key.help, width, "    ")
        yield from paragraph(f"{key.rule}{default}", width, "    ")
        yield ""


def _shown(value: object) -> str:
    from fnrfl.config.typed import show_value

    return show_value(value)


# -- methods -----------------------------------------------------------------------------------------------------------


def short_method_lines(found: Collection[str], width: int) -> Iterator[str]:
    """The name of each method and its idea, without authors."""
    from fnrfl.config import registry

    methods = [method for method in registry.methods() if method.name in found]
    names = max(len(method.name) for method in methods)
    for method in methods:
        idea = (method.idea.partition(": ")[2] or method.idea).partition(" (")[0].rstrip(".")
        yield from paragraph(idea, width, f"{method.name:{names}}  ", " " * (names + 2))
    yield ""
    yield from paragraph(ABOUT_METHODS, width)


def method_details(found: Collection[str], width: int) -> Iterator[str]:
    """Everything about each method: idea, needs, traffic, and its options with their defaults."""
    from fnrfl.config import registry
    from fnrfl.config.schema import keys_of_method

    for method in (method for method in registry.methods() if method.name in found):
        yield method.name
        yield from paragraph(method.idea, width, "  ")
        yield from paragraph(f"needs    {', '.join(method.needs) or 'nothing'}", width, "  ", " " * 11)
        yield from paragraph(f"traffic  {method.traffic}", width, "  ", " " * 11)
        for key in keys_of_method(method.name, method.options):
            yield from paragraph(f"{key.name} = {_shown(key.default)}", width, "  ", " " * 6)
            yield from paragraph(f"{key.help}; {key.rule}", width, " " * 6)
        yield ""


def cut(text: str, width: int) -> str:
    """A line that fits: of a longer one the words at its beginning, and two dots."""
    text = text.rstrip()
    if len(text) <= width:
        return text
    whole = text[: width - 2].rpartition(" ")[0].rstrip(" ,;:")
    return f"{whole or text[: width - 3]} .."
