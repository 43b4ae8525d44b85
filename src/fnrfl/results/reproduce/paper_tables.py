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
from fnrfl.results.reproduce.settings import TRIAL_SETTINGS

SIX = ("fedavg+fnr", "fedavg", "fedprox", "scaffold", "moon", "fednova")
OTHERS = ("feddyn", "fedftg", "feddf", "feddc", "fedgen")
SINGLE_SKEWS = ("feature-0.5", "label", "quantity")
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
    skews: Sequence[str], methods: Sequence[str], settings: Sequence[str] = BOTH, *, net: str = "resnet18"
) -> tuple[TablePart, ...]:
    return tuple(TablePart(net, skew, tuple(methods), tuple(settings)) for skew in skews)


TABLES = {
    "accuracy": PaperTable(
        "Test accuracy under single skews (the paper's tab:Exp1)",
        _parts_of(SINGLE_SKEWS, SIX + OTHERS) + _parts_of(SINGLE_SKEWS, SIX + OTHERS, net="vgg11"),
    ),
    "convergence": PaperTable(
        "Accuracy by round (the paper's convergence figure)",
        tuple(TablePart("resnet18", skew, SIX, metrics=("accuracies",)) for skew in SINGLE_SKEWS),
    ),
    "cost": PaperTable(
        "Traffic, time, kappa and rho (the paper's tab:cost)",
        tuple(TablePart("resnet18", skew, SIX, metrics=COST_METRICS) for skew in SINGLE_SKEWS),
    ),
    "mixed": PaperTable(
        "Test accuracy under mixed skews (the paper's tab:Exp2)",
        _parts_of(("label+feature-0.1", "label+feature-0.5"), SIX, TWO_CLIENTS)
        + _parts_of(("label+quantity",), SIX),
    ),
    "orthogonality": PaperTable(
        "FNR around other methods (the paper's tab:Exp_or, and the methods that it did not try)",
        _parts_of(SINGLE_SKEWS, [f"{method}+fnr" for method in ("fedavg", *SIX[2:], *OTHERS)]),
    ),
    "noise": PaperTable(
        "Effect of noise (the paper's tab:Exp_noise)",
        _parts_of(("iid", "feature-0.1", "feature-0.5"), SIX)
        + _parts_of(("label",), SIX)
        + _parts_of(("label+feature-0.1", "label+feature-0.5"), SIX, TWO_CLIENTS),
    ),
    "attribution": PaperTable(
        "Which leak gives what: the paper's settings, one leak at a time",
        tuple(
            TablePart(
                "resnet18",
                skew,
                tuple(
                    f"fedavg+{part}"
                    for part in (
                        "no-leak", "batchnorm-leak", "label-leak", "both-leaks", "both-leaks-weight-0",
                        "both-leaks-weight-1",
                    )
                ),
                ("paper",),
                ("clean", "noisy"),
                (0, 1, 2),
            )
            for skew in ("feature-0.5", "label")
        ),
    ),
    "controls": PaperTable(
        "What public data gives without FNR's penalty",
        _parts_of(
            ("label", "feature-0.5", "quantity"),
            ("fedavg", "fedavg+fnr", "fedavg+weight-0", "public-returned", "public-finetune", "public-share",
             "public-only"),
            ("honest",),
        )
        + _parts_of(("label",), ("fedavg", "fedavg+fnr", "fedavg+weight-0"), ("honest",), net="vgg11"),
    ),
    "rate": PaperTable(
        "At the learning rate that the paper prints, 0.1",
        _parts_of(SINGLE_SKEWS, ("fedavg+fnr", "fedavg"), ("paper-rate-0.1",)),
    ),
    "niid-bench": PaperTable(
        "NIID-Bench's published table (simple-cnn, 50 rounds at full scale)",
        _parts_of(
            ("label", "classes-1", "classes-2", "classes-3", "feature-0.1", "quantity", "iid"),
            ("fedavg", "fedprox", "scaffold", "fednova"),
            NIID_BENCH,
            net="simple-cnn",
        ),
    ),
}  # fmt: skip


def find_table(name: str) -> PaperTable:
    """The table of this name; others that it may have been meant for are named."""
    if name not in TABLES:
        raise ConfigError(f'There is no table "{name}". {choices(name, TABLES)}.')
    return TABLES[name]
