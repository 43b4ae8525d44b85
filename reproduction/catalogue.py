"""What the tables are made of: cells with their keys, tables with rows and columns, printed numbers, and all words."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).parent / "data"


def read_toml(name: str) -> dict[str, Any]:
    """Return a file of data/."""
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


SETTINGS, TEXTS = read_toml("settings.toml"), read_toml("texts.toml")
SEEDS = {"paper": (0,), "honest": (0, 1, 2)}  # of a value by its protocol: the paper has one


class UsageError(Exception):
    """A sentence about something that cannot be done, with the way out."""


def text(section: str, key: str, **values: object) -> str:
    """Return a displayed text, with `values` in the place of {names}."""
    found = str(TEXTS[section][key])
    return found.format(**values) if values else found


def expand(found: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names behind the name of a group, or of several."""
    given = [found] if isinstance(found, str) else found
    return tuple(name for word in given for name in SETTINGS["groups"].get(word, [word]))


def protocol_of(setting: str) -> str:
    """Return the protocol of a setting: `paper` or `honest`."""
    return str(SETTINGS["settings"][setting]["protocol"])


@dataclass(frozen=True)
class Cell:
    """One run, by the names of what it is made of.

    Its id is made of these names alone, not of keys or hashes: a result is found again after a key was renamed.

    >>> cell = Cell.read("resnet18/label/honest/fedavg/seed0@quick")
    >>> " ".join(cell.overrides)[:46]
    'dataset=cifar10 rounds=10 client.epochs=2 mode'
    """

    net: str
    skew: str
    setting: str
    method: str
    seed: int
    scale: str

    @property
    def id(self) -> str:
        return f"{self.net}/{self.skew}/{self.setting}/{self.method}/seed{self.seed}@{self.scale}"

    @classmethod
    def read(cls, name: str) -> Cell:
        """Return the cell that an id names."""
        parts, _, scale = name.partition("@")
        try:
            net, skew, setting, method, seed = parts.split("/")
            cell = cls(net, skew, setting, method, int(seed.removeprefix("seed")), scale)
            assert cell.overrides
        except (ValueError, KeyError):
            raise UsageError(f'"{name}" is not a cell. Write it as NET/SKEW/SETTING/METHOD/seed0@SCALE.') from None
        return cell

    @property
    def leaks(self) -> bool:
        """Whether its run has a leak switched on."""
        return protocol_of(self.setting) == "paper" and not self.method.endswith("+no-leak")

    @property
    def recipe(self) -> str:
        return str(SETTINGS["scales"][self.scale]["recipe"])

    @property
    def overrides(self) -> tuple[str, ...]:
        """What is said to the packaged recipe, as `key=value`."""
        scale, setting = SETTINGS["scales"][self.scale], SETTINGS["settings"][self.setting]
        base, _, around = self.method.partition("+")
        tuned = {(skew, method): keys for skew, method, keys in setting.get("tuned", ())}
        words = [
            scale["keys"],
            f"model={SETTINGS['nets'][self.net]['tiny' if self.scale == 'tiny' else setting['protocol']]}",
            f"scenario={SETTINGS['skews'][self.skew]}",
            setting["keys"],
            setting.get("full", "") if self.scale == "full" else "",
            SETTINGS["methods"][base],
            tuned.get((self.skew, base), ""),
            SETTINGS["released"].get(base, "") if setting["protocol"] == "paper" else "",
            SETTINGS["around"][around] if around else "",
            f"seed={self.seed}",
        ]
        return tuple(" ".join(words).format(refine=scale["refine"]).split())

    @property
    def logged(self) -> list[str]:
        """Keys that log what claims are about; they change no model and no other number."""
        watch = SETTINGS["watch"]
        of_claims = self.net == watch["net"] and self.skew in watch["skews"] and self.method in watch["methods"]
        return ["fnr.watch=true"] if of_claims else []


class TablePart(NamedTuple):
    """Rows and columns of one net under one skew."""

    net: str
    skew: str
    methods: tuple[str, ...]
    settings: tuple[str, ...]
    metrics: tuple[str, ...]
    seeds: tuple[int, ...]  # none: those of each setting's protocol

    def cells(self, setting: str, method: str, scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
        """Return the runs behind a value, of some seeds or of those that it usually has."""
        found = seeds or self.seeds or SEEDS[protocol_of(setting)]
        return [Cell(self.net, self.skew, setting, method, seed, scale) for seed in found]


def _parts(found: Iterable[dict[str, Any]]) -> Iterator[TablePart]:
    for one in found:
        settings, metrics = expand(one.get("settings", "both")), expand(one.get("metrics", "accuracy"))
        seeds, net = tuple(one.get("seeds", ())), one.get("net", "resnet18")
        for skew in expand(one["skews"]):
            yield TablePart(net, skew, expand(one["methods"]), settings, metrics, seeds)


_PARTS = {name: list(_parts(found)) for name, found in read_toml("tables.toml").items()}
TABLES = (*_PARTS, "claims")


def table_parts(name: str) -> list[TablePart]:
    """Return the parts of a table, one for each net and skew."""
    if name not in _PARTS:
        raise UsageError(f'There is no table "{name}". Choose one of {", ".join(TABLES)}, all, page or theory.')
    return _PARTS[name]


class Printed(NamedTuple):
    """A number with the digits that were printed, where it stands, and what must be known about it."""

    text: str
    place: str
    note: str
    verified: bool  # False: from memory or second hand, so it binds nothing

    @property
    def value(self) -> float:
        return float(self.text)


with (DATA / "printed.csv").open(encoding="utf-8", newline="") as file:
    PRINTED = {  # by table, net, skew and method; in the table of costs by method:metric
        (table, net, skew, method): Printed(words, place, note, verified == "yes")
        for table, net, skew, method, words, place, note, verified in list(csv.reader(file))[1:]
    }
CURVES_SOURCE = "the first release of the paper's code"
# Accuracy of each round of the label-skew figure, from the data that its first release drew it from.
CURVES = {
    "fedavg+fnr": (0.1004, 0.8682, 0.9772, 0.9877, 0.9929, 0.9945, 0.9953, 0.9962, 0.9971, 0.9970),
    "fedavg": (0.1003, 0.7609, 0.7921, 0.8150, 0.8433, 0.8594, 0.8849, 0.8792, 0.8976, 0.8850),
}
# The classes that the paper names in its ablation: the client's examples of it, and the gain that its figure shows.
REFINED_CLASSES = {"frog": (471, 0.413), "horse": (485, 0.170), "automobile": (512, 0.109), "ship": (528, 0.168)}


def method_name(method: str) -> str:
    """Return a method for people: "SCAFFOLD + FNR"."""
    names = [text("methods", word) for word in method.split("+")]
    return text("methods", "without" if method.endswith("+no-leak") else "around").join(names)


def part_title(net: str, skew: str, scale: str) -> str:
    """Return what stands above a part of a table; at the smallest scale no net of the paper was trained."""
    name = text("nets", net)
    shown = text("parts", "small", net=name) if scale == "tiny" else name
    return text("parts", "title", net=shown, skew=text("skews", skew))
