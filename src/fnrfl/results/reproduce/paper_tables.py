"""The tables: which methods are their rows, under which settings they are run, and what is shown of each run.

A table is a few parts, one for each net and skew. The columns of a part are what was printed and then one group of
columns per setting, so that no column has numbers of two protocols.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fnrfl.core.errors import ConfigError
from fnrfl.core.nearest import choices
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.printed import COST_METRICS
from fnrfl.results.reproduce.settings import OTHERS, SINGLE_SKEWS, SIX, TRIAL_SETTINGS
from fnrfl.results.reproduce.titles import TITLES

BOTH = ("paper", "honest")
TWO_CLIENTS = ("paper", "paper-2-clients", "honest")  # for rows that the paper seems to have run so
NIID_BENCH = tuple(name for name in TRIAL_SETTINGS if name.startswith("niid-bench"))


@dataclass(frozen=True)
class TablePart:
    """Rows and columns of one net under one skew."""

    net: str
    skew: str
    methods: tuple[str, ...]
    settings: tuple[str, ...] = BOTH
    metrics: tuple[str, ...] = ("accuracy",)
    seeds: tuple[int, ...] | None = None  # None: those of each setting

    def seeds_of(self, setting: str) -> tuple[int, ...]:
        """The seeds that a column shows: the paper's one under its protocol, else three."""
        if self.seeds is not None:
            return self.seeds
        return (0,) if TRIAL_SETTINGS[setting].protocol == "paper" else (0, 1, 2)

    def cells(self, scale: str, seeds: Sequence[int] | None = None) -> Iterator[PaperCell]:
        """All its runs, by setting, seed and row."""
        for setting in self.settings:
            for seed in self.seeds_of(setting) if seeds is None else seeds:
                for method in self.methods:
                    yield PaperCell(self.net, self.skew, setting, method, seed, scale)


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, or one that it should have had."""

    title: str
    parts: tuple[TablePart, ...]

    def cells(self, scale: str, seeds: Sequence[int] | None = None) -> list[PaperCell]:
        """Every run that it shows, once."""
        return list(dict.fromkeys(cell for part in self.parts for cell in part.cells(scale, seeds)))


def _parts_of(
    skews: Sequence[str],
    methods: Sequence[str],
    settings: Sequence[str] = BOTH,
    *,
    net: str = "resnet18",
    metrics: Sequence[str] = ("accuracy",),
    seeds: tuple[int, ...] | None = None,
) -> tuple[TablePart, ...]:
    return tuple(TablePart(net, skew, tuple(methods), tuple(settings), tuple(metrics), seeds) for skew in skews)


_ALL = SIX + OTHERS
_WITH_FNR = [f"{method}+fnr" for method in _ALL if "+" not in method]
_LEAKS = [
    f"fedavg+{leak}"
    for leak in (
        "no-leak", "batchnorm-leak", "label-leak", "both-leaks", "both-leaks-weight-0", "both-leaks-weight-1",
    )
]  # fmt: skip
_FNR_AND_CONTROL = ("fedavg", "fedavg+fnr", "fedavg+weight-0")
_CONTROLS = (*_FNR_AND_CONTROL, "public-returned", "public-finetune", "public-share", "public-only")
_NOISY_LABEL = ("label+feature-0.1", "label+feature-0.5")
_BENCH_METHODS = ("fedavg", "fedprox", "scaffold", "scaffold-niid-bench", "fednova")
_BENCH_SKEWS = ("label", "classes-1", "classes-2", "classes-3", "feature-0.1", "quantity", "iid")
_PARTS = {
    "accuracy": _parts_of(SINGLE_SKEWS, _ALL) + _parts_of(SINGLE_SKEWS, _ALL, net="vgg11"),
    "convergence": _parts_of(SINGLE_SKEWS, SIX, metrics=["accuracies"]),
    "cost": _parts_of(SINGLE_SKEWS, SIX, metrics=COST_METRICS),
    "mixed": _parts_of(_NOISY_LABEL, SIX, TWO_CLIENTS) + _parts_of(["label+quantity"], SIX),
    "orthogonality": _parts_of(SINGLE_SKEWS, _WITH_FNR),
    "noise": _parts_of(["iid", "feature-0.1", "feature-0.5", "label"], SIX) + _parts_of(_NOISY_LABEL, SIX, TWO_CLIENTS),
    "attribution": _parts_of(["feature-0.5", "label"], _LEAKS, ["paper"], metrics=["clean", "noisy"], seeds=(0, 1, 2)),
    "controls": _parts_of(["label", "feature-0.5", "quantity"], _CONTROLS, ["honest"])
    + _parts_of(["label"], _FNR_AND_CONTROL, ["honest"], net="vgg11"),
    "rate": _parts_of(SINGLE_SKEWS, ["fedavg+fnr", "fedavg"], ["paper-rate-0.1"]),
    "released-net": _parts_of(["label"], ["fedavg+fnr", "fedavg"], ["paper"], net="resnet50"),
    "niid-bench": _parts_of(_BENCH_SKEWS, _BENCH_METHODS, NIID_BENCH, net="simple-cnn"),
}
TABLES = {name: PaperTable(TITLES[name], parts) for name, parts in _PARTS.items()}


def find_table(name: str) -> PaperTable:
    """The table of this name; others that it may have been meant for are named."""
    if name not in TABLES:
        raise ConfigError(f'There is no table "{name}". {choices(name, TITLES)}.')
    return TABLES[name]
