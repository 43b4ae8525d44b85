"""The queue: which cells come next, in the order of what they add, and about how long each will take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from fnrfl.core.errors import ConfigError
from fnrfl.results.reproduce.kept_lines import CellLine, KeptLines, seconds_count, timed_together
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.paper_tables import TABLES
from fnrfl.results.reproduce.printed import PRINTED
from fnrfl.results.reproduce.settings import OTHERS, REFINE_EPOCHS, SIX
from fnrfl.results.reproduce.verdicts import find_cells
from fnrfl.results.statistics import mean

MISSED_BY = 0.02  # of a published accuracy


def has_no_result(cell: PaperCell, lines: KeptLines) -> bool:
    """Whether nobody has run a cell with today's overrides; one that failed does not wait."""
    return lines.find(cell).state in ("not run", "older recipe")


def has_no_seconds(cell: PaperCell, lines: KeptLines) -> bool:
    """Whether a cell has a result, and the seconds of the six methods cannot be compared: all of them run again.

    Neither those that tables show, nor those computed here.
    """

    def compared(prefer_here: bool) -> bool:
        found = [lines.find(replace(cell, method=method), prefer_here=prefer_here) for method in (cell.method, *SIX)]
        return not found[0].usable or timed_together(*(one.line for one in found if one.usable))

    return not compared(prefer_here=False) and not compared(prefer_here=True)


def may_miss_by_chance(cell: PaperCell, lines: KeptLines) -> bool:
    """Whether a cell has no result, and that of seed 0 is far from the number that was published for it."""
    first, published = lines.find(replace(cell, seed=0)), PRINTED.get(("niid-bench", cell.net, cell.skew, cell.method))
    if not has_no_result(cell, lines) or not first.usable or published is None or not published.verified:
        return False
    return abs(float(first.line["accuracy"]) - published.value) > MISSED_BY


@dataclass(frozen=True)
class WantedCells:
    """Some cells of a table, and what they are wanted for."""

    purpose: str
    table: str
    scale: str
    seeds: tuple[int, ...] = (0,)
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)  # names that count, by axis
    waits: Callable[[PaperCell, KeptLines], bool] = has_no_result

    def cells(self) -> Iterator[PaperCell]:
        """Its cells, in the table's order."""
        for cell in find_cells(self.table, self.scale, self.seeds):
            if all(getattr(cell, axis) in names for axis, names in self.only.items()):
                yield cell


_RESNET, _HONEST, _PAPER = {"net": ["resnet18"]}, {"setting": ["honest"]}, {"setting": ["paper"]}
_OTHER_SEEDS = (1, 2)
SECONDS = "seconds"  # a purpose: such cells must run alone
ORDER = (
    WantedCells("headline", "accuracy", "quick", only=_RESNET | _HONEST | {"method": ["fedavg", "fedavg+fnr"]}),
    WantedCells("headline", "controls", "quick", only=_RESNET | {"method": ["fedavg+weight-0"]}),
    WantedCells("headline", "accuracy", "quick", only=_RESNET | _PAPER | {"method": ["fedavg", "fedavg+fnr"]}),
    WantedCells("full", "accuracy", "full", only=_RESNET | _PAPER | {"skew": ["label"], "method": SIX[:2]}),
    WantedCells("full", "accuracy", "full", only=_RESNET | _HONEST | {"skew": ["label"], "method": SIX[:2]}),
    WantedCells("full", "accuracy", "full", only=_RESNET | _PAPER | {"method": SIX[:2]}),
    WantedCells(
        "full", "controls", "full",
        only=_RESNET | {"skew": ["label"], "method": ["fedavg+weight-0", "public-returned", "public-finetune"]},
    ),
    WantedCells("full", "accuracy", "full", only=_RESNET | _HONEST | {"skew": ["label"], "method": SIX}),
    WantedCells("attribution", "attribution", "quick", only={"skew": ["feature-0.5"]}),
    WantedCells("vgg11", "accuracy", "quick", only={"net": ["vgg11"], "skew": ["label"], "method": SIX[:2]}),
    WantedCells("vgg11", "controls", "quick", only={"net": ["vgg11"]}),
    WantedCells("niid-bench", "niid-bench", "full", only={"method": ["fedavg"]}),
    WantedCells("accuracy", "accuracy", "quick", only=_RESNET | _HONEST),
    WantedCells("accuracy", "accuracy", "quick", only=_RESNET | _PAPER),
    WantedCells("accuracy", "controls", "quick", only=_RESNET | {"skew": ["label"]}),
    WantedCells("other seeds", "accuracy", "quick", _OTHER_SEEDS, _RESNET | _HONEST),
    WantedCells("other seeds", "controls", "quick", _OTHER_SEEDS, _RESNET | {"method": ["fedavg+weight-0"]}),
    WantedCells("mixed", "mixed", "quick", only={"setting": ["honest", "paper"]}),
    WantedCells(
        "orthogonality", "orthogonality", "quick", only={"method": [f"{name}+fnr" for name in ("fedavg", *SIX[2:])]}
    ),
    WantedCells("noise", "noise", "quick", only={"setting": ["honest", "paper"]}),
    WantedCells("orthogonality", "orthogonality", "quick", only={"method": [f"{name}+fnr" for name in OTHERS]}),
    WantedCells("niid-bench", "niid-bench", "full", only={"setting": ["niid-bench"]}),
    WantedCells("attribution", "attribution", "quick", _OTHER_SEEDS, {"skew": ["feature-0.5"]}),
    WantedCells("niid-bench", "niid-bench", "full", _OTHER_SEEDS, {"setting": ["niid-bench"]}, may_miss_by_chance),
    WantedCells("claims", "claims", "quick", (0, 1), _HONEST),  # two make an interval, and so a verdict
    WantedCells(SECONDS, "cost", "quick", (0, 1), _HONEST, has_no_seconds),
    WantedCells("claims", "claims", "quick"),
    WantedCells("claims", "claims", "quick", (2,), _HONEST),
    WantedCells(SECONDS, "cost", "quick", only=_PAPER, waits=has_no_seconds),
    WantedCells("full", "accuracy", "full", only=_RESNET | _HONEST | {"method": SIX[:2]}),
    WantedCells("own settings", "mixed", "quick", only={"setting": ["paper-2-clients"]}),
    WantedCells("own settings", "rate", "quick"),
    WantedCells("own settings", "rate", "full", only={"skew": ["label"]}),
    WantedCells("own settings", "released-net", "quick"),
    WantedCells("controls", "controls", "quick", (0, 1, 2)),
    WantedCells("attribution", "attribution", "quick", (0, 1, 2)),
    WantedCells("niid-bench", "niid-bench", "full", (0, 1, 2)),
    WantedCells("vgg11", "accuracy", "quick"),
    *(WantedCells("rest", table, "full") for table in TABLES),
)  # fmt: skip


@dataclass(frozen=True)
class Waiting:
    """A cell of the queue."""

    cell: PaperCell
    purpose: str
    seconds: float  # without preparing programs


def queue(lines: KeptLines, scale: str | None = None) -> list[Waiting]:
    """The cells that have no result, or none with seconds, in order; those whose run has failed are left out."""
    expected = ExpectedSeconds(lines)
    first: dict[PaperCell, str] = {}
    for wanted in ORDER:
        if scale in (None, wanted.scale):
            for cell in wanted.cells():
                if cell not in first and wanted.waits(cell, lines):
                    first[cell] = wanted.purpose
    return [Waiting(cell, purpose, expected.seconds(cell)) for cell, purpose in first.items()]


@dataclass(frozen=True)
class PurposeLeft:
    """How much of the queue is for one purpose."""

    purpose: str
    cells: int
    seconds: float


def by_purpose(waiting: Sequence[Waiting]) -> list[PurposeLeft]:
    """What is left for each purpose, in the order of the queue."""
    found: dict[str, list[float]] = {}
    for one in waiting:
        found.setdefault(one.purpose, []).append(one.seconds)
    return [PurposeLeft(purpose, len(seconds), sum(seconds)) for purpose, seconds in found.items()]


# -- how long a cell takes ---------------------------------------------------------------------------------------------

RATES = {  # images/s of training, H200, bf16, ten equal clients; those of resnet50 and vgg11 are guesses
    "resnet18": 72_000, "resnet50": 25_000, "vgg11": 80_000, "simple-cnn": 1_100_000,
}  # fmt: skip
SLOWER = {"moon": 2.2, "feddc": 1.15, "feddyn": 1.1}  # a step against FedAvg's
MORE = {"feddf": 0.9, "fedftg": 1.0, "fedgen": 0.1, "public-only": 0.4, "public-finetune": 0.4}  # seconds in a round
RAGGED = {"quantity": 1.5, "label+quantity": 1.4, "label": 1.2, "label+feature-0.1": 1.2, "label+feature-0.5": 1.2}
ON_A_CPU = {"resnet18": 2000, "resnet50": 2000, "vgg11": 600, "simple-cnn": 150}  # times as long on two cores; rough
PREPARING = 60.0  # seconds for a program that the process has not met, on a GPU


class ExpectedSeconds:
    """About how long cells take alone, without preparing: as long as like cells took, else by their images.

    On a CPU, those that ran beside others count too, by their share of the time: a guess by images is worse.
    """

    def __init__(self, known: Iterable[CellLine], on_a_cpu: bool = False) -> None:
        self._like: dict[tuple[str, ...], list[float]] = {}
        self._on_a_cpu = on_a_cpu
        for line in known:
            if line.get("device", "").startswith("CPU") == on_a_cpu and (on_a_cpu or seconds_count(line)):
                self.learn(line)

    def learn(self, line: CellLine) -> None:
        """Take note of how long a cell took; of one that failed, or has a name of an older version, nothing."""
        if "failed" in line:
            return
        with suppress(ConfigError):
            for alike in _alike(PaperCell.read(line["id"])):
                took = line["seconds_wall"] - line["seconds_preparing"]
                self._like.setdefault(alike, []).append(took / line.get("processes", 1))

    def seconds(self, cell: PaperCell) -> float:
        """About how long one cell takes."""
        for alike in _alike(cell):
            if alike in self._like:
                return mean(self._like[alike])
        slower = ON_A_CPU[cell.net] if self._on_a_cpu and cell.scale != "tiny" else 1
        return _by_images(cell) * slower


def _alike(cell: PaperCell) -> list[tuple[str, ...]]:
    """What cells that take about as long have in common, the closest first."""
    common = (cell.scale, cell.net, cell.setting, cell.method)
    return [(*common, cell.skew), common, (cell.scale, cell.net, cell.protocol, cell.method)]


def _by_images(cell: PaperCell) -> float:
    if cell.scale == "tiny":
        return 1.0
    base, _, around = cell.method.partition("+")
    bench = cell.setting.startswith("niid-bench")
    rounds = 50 if bench and cell.scale == "full" else 10
    epochs = 2 if cell.scale == "quick" else 10
    paper = cell.protocol == "paper"
    private = 50_000 if paper or bench else 42_500
    images = private * epochs * SLOWER.get(base, 1.0) * RAGGED.get(cell.skew, 1.0)  # uneven clients slow a round
    seconds = MORE.get(base, 0.0) + 0.1 + (1.0 if "feature" in cell.skew else 0.0)
    if around and around != "no-leak":
        public = 10_000 if paper else 4_000
        images += 1.5 * 5 * REFINE_EPOCHS[cell.scale] * public + (25 if paper else 10) * public  # refining and looking
    return 3.0 + rounds * (seconds + images / RATES[cell.net])


def programs(cell: PaperCell) -> frozenset[str]:
    """What is compiled for a cell, and shared with others of the same process.

    Where some clients have more examples than others, their last steps are without the others, and steps of fewer
    clients are other programs.
    """
    base, _, around = cell.method.partition("+")
    step = "fedavg" if base.startswith("public-") or base in ("fednova", "feddf", "fedftg") else base
    sizes = "uneven" if "label" in cell.skew or "quantity" in cell.skew else "even"
    exact = "deterministic" if "-weight-" in around else "fast"
    how = f"{cell.net} {exact}{' digits' if cell.scale == 'tiny' else ''}"
    refining = {f"{how} refine {cell.setting}"} if around not in ("", "no-leak") else set()
    return frozenset({f"{how} {sizes} {step}"} | refining)
