"""A cell: one run that a table of the paper needs, with an id of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import choices
from fnrfl.results.reproduce.settings import (
    AROUND,
    AS_RELEASED,
    METHODS,
    NETS,
    RECIPE,
    REFINE_EPOCHS,
    SCALES,
    SKEWS,
    TRIAL_SETTINGS,
)

if TYPE_CHECKING:
    from fnrfl.config import RunConfig


@dataclass(frozen=True, order=True)
class PaperCell:
    """One run, by the names of what it is made of.

    Its id is made of these names alone, and not of keys or hashes: a result is found again after a key was added or
    renamed. Several tables may show one cell, so the id does not name a table.

    >>> cell = PaperCell("resnet18", "label", "honest", "fedavg", 0, "quick")
    >>> cell.id
    'resnet18/label/honest/fedavg/seed0@quick'
    >>> PaperCell.read(cell.id) == cell, " ".join(cell.overrides)[:46]
    (True, 'dataset=cifar10 rounds=10 client.epochs=2 mode')
    """

    net: str
    skew: str
    setting: str
    method: str
    seed: int
    scale: str

    @property
    def id(self) -> str:
        """What the cell is called, for ever."""
        return f"{self.net}/{self.skew}/{self.setting}/{self.method}/seed{self.seed}@{self.scale}"

    @classmethod
    def read(cls, text: str) -> PaperCell:
        """The cell that an id names; what is wrong with it is said."""
        parts, at, scale = text.partition("@")
        if not at:
            first, *others = (f"@{name}" for name in SCALES)
            raise ConfigError(f'"{text}" is a cell without its scale. Write {text}{first}, or {" or ".join(others)}.')
        try:
            net, skew, setting, method, seed = parts.split("/")
            cell = cls(net, skew, setting, method, int(seed.removeprefix("seed")), scale)
        except ValueError:
            raise ConfigError(f'"{text}" is not a cell. Write it as NET/SKEW/SETTING/METHOD/seed0@SCALE.') from None
        cell.check()
        return cell

    def check(self) -> None:
        """Refuse a name that is not known."""
        base, plus, around = self.method.partition("+")
        tables: tuple[tuple[str, str, Sequence[str]], ...] = (
            ("net", self.net, tuple(NETS)),
            ("skew", self.skew, tuple(SKEWS)),
            ("setting", self.setting, tuple(TRIAL_SETTINGS)),
            ("method", base, tuple(METHODS)),
            ("addition to a method", around if plus else "fnr", tuple(AROUND)),
            ("scale", self.scale, tuple(SCALES)),
        )
        for what, word, known in tables:
            if word not in known:
                raise ConfigError(f'"{word}" is no {what} of a cell. {choices(word, known)}.')

    @property
    def protocol(self) -> str:
        """`paper` or `honest`."""
        return TRIAL_SETTINGS[self.setting].protocol

    @property
    def recipe(self) -> str:
        """The packaged recipe that the overrides change."""
        return RECIPE[self.scale]

    @property
    def overrides(self) -> tuple[str, ...]:
        """What is said to the recipe, as `key=value`."""
        setting, paper = TRIAL_SETTINGS[self.setting], self.protocol == "paper"
        base, _, around = self.method.partition("+")
        honest, as_printed, small = NETS[self.net]
        words = [
            SCALES[self.scale],
            f"model={small if self.scale == 'tiny' else as_printed if paper else honest}",
            f"scenario={SKEWS[self.skew]}",
            setting.keys,
            setting.full if self.scale == "full" else "",
            METHODS[base],
            setting.tuned.get((self.skew, base), ""),
            AS_RELEASED.get(base, "") if paper else "",
            AROUND[around] if around else "",
            f"seed={self.seed}",
        ]
        return tuple(" ".join(words).format(refine=REFINE_EPOCHS[self.scale]).split())

    def config(self, before: Sequence[str] = (), after: Sequence[str] = ()) -> RunConfig:
        """The run; words `before` give way to the cell's own, words `after` win over them."""
        from fnrfl.config import load

        return load(self.recipe, [*before, *self.overrides, *after])

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks of the run, by name."""
        return _leaks(self.recipe, self.overrides)


@cache
def _leaks(recipe: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    from fnrfl.config import load

    return load(recipe, overrides).leaks_on
