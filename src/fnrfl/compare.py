"""A grid of runs in one table: every combination of some values, every seed, and paired differences.

cells = grid("digits", [], ["algorithm=fedavg,scaffold", "fnr=off,on"], [0, 1, 2])
found = compare(cells, "runs/methods")        # again after a kill: finished runs are kept, unfinished ones go on
print(found.to_markdown())
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fnrfl import files, registry
from fnrfl.config import SHORTHANDS, RunConfig, load
from fnrfl.errors import ConfigError, FnrflError
from fnrfl.events import Event
from fnrfl.metrics.statistics import Difference, Estimate, estimate, paired, reached

if TYPE_CHECKING:
    from rich.table import Table

    from fnrfl.runs import Result

Summary = Mapping[str, Any]
Parts = tuple[tuple[str, str], ...]  # what tells a group from the others: key and words

FORMAT = 1
METRICS = (
    "accuracy", "accuracy_last3", "accuracy_best", "balanced_accuracy", "worst_client", "bytes_up", "bytes_down",
    "seconds_train", "kappa", "rho", "rounds_to_target", "bytes_to_target", "seconds_to_target",
)  # fmt: skip
METHOD = ("algorithm", "fnr", "client", "engine")  # sections about how to train; all others are about the task
DISPENSABLE = (
    "MiB up", "MiB down", "best", "last 3", "rho", "kappa", "p of penalty", "seconds", "worst client", "MiB", "p",
    "penalty",
)  # fmt: skip  # columns that a narrow terminal does without, in this order
WEIGHTED = ("fnr.weight", "fnr.penalty", "fnr.target")  # keys that do not matter once the weight is 0
SELF_EXPLAINING = ("algorithm.name", "dataset", "model.name", "scenario")  # the value says what it is


# -- the grid ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed alone: one row of the table."""

    parts: Parts
    config: RunConfig  # of the first seed
    control: str | None = None  # the group that is the same without the penalty

    @property
    def label(self) -> str:
        """What it is called, such as "scaffold, fnr on"."""
        return ", ".join(words for _, words in self.parts)


@dataclass(frozen=True)
class Cell:
    """One run of the grid; its name is its folder's."""

    name: str
    group: Group
    seed: int
    config: RunConfig


def grid(
    recipe: str | Path | None,
    overrides: Sequence[str],
    over: Sequence[str],
    seeds: Sequence[int],
    *,
    control: bool = True,
) -> list[Cell]:
    """Every combination of the values in `over` ("key=a,b,c") with every seed; all of them are checked.

    With `control`, each group with FNR gets a twin with fnr.weight = 0 unless it is there already. The cells are
    ordered by seed, so that what is finished can always be compared.
    """
    axes = _axes(over)
    _check_seeds(seeds, overrides)
    groups: dict[str, Group] = {}  # by config
    problems: dict[str, list[str]] = {}  # what is wrong, and with which combinations
    for choice in itertools.product(*axes.values()):
        values = dict(zip(axes, choice, strict=True))
        # A key of [fnr] turns FNR on; the switch comes after it, so that `fnr=off` beside `fnr.weight=0.1,1` is off.
        given = sorted((f"{key}={value}" for key, value in values.items()), key=lambda text: text.startswith("fnr="))
        try:
            config = load(recipe, [*overrides, *given, f"seed={seeds[0]}"])
        except ConfigError as error:
            problems.setdefault(str(error), []).append(", ".join(given))
            continue
        group = Group(_parts(values, config), config)
        twin = groups.setdefault(_fingerprint(config), group)
        if twin.parts != group.parts:
            problems.setdefault(f"{', '.join(given)} is the same as {twin.label}; give it once.", [])
    if problems:
        everywhere = len(problems) == 1 and not groups
        told = (f"{'; '.join(where)}: {what}" if where and not everywhere else what for what, where in problems.items())
        raise ConfigError(" ".join(told))
    rows = _with_controls(list(groups.values())) if control else list(groups.values())
    names = _names([group.label for group in rows])
    return [
        Cell(f"{name}-seed-{seed}", group, seed, group.config.replace({"seed": seed}))
        for seed in seeds
        for name, group in zip(names, rows, strict=True)
    ]


def split(text: str) -> list[str]:
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


def default_out(cells: Sequence[Cell]) -> Path:
    """Where a comparison is kept unless somebody says otherwise: the same grid has the same folder."""
    return Path("runs") / f"compare-{cells[0].config.name}-{_hash(_claims(cells))[:6]}"


def _axes(over: Iterable[str]) -> dict[str, list[str]]:
    """Keys and the values that each takes in turn."""
    axes: dict[str, list[str]] = {}
    for text in over:
        key, _, values = (part.strip() for part in text.partition("="))
        key = f"{key}.name" if key in SHORTHANDS else key
        found = split(values)
        if not key or not all(found):
            raise ConfigError(f'"{text}" has no list of values; write key=a,b, as in algorithm=fedavg,scaffold.')
        if key == "seed":
            raise ConfigError(f'"{text}" varies the seed; give the seeds of every combination with --seeds.')
        if key in axes:
            raise ConfigError(f"{key} is varied twice; give all of its values in one list, {key}=a,b,c.")
        axes[key] = found
    return axes


def _check_seeds(seeds: Sequence[int], overrides: Iterable[str]) -> None:
    if not seeds or len(set(seeds)) < len(seeds):
        given = ", ".join(map(str, seeds)) or "none"
        raise ConfigError(f"The seeds are {given}; there must be at least one, and each only once, as in 0,1,2.")
    if any(text.partition("=")[0].strip() == "seed" for text in overrides):
        raise ConfigError("seed cannot be set in a comparison, where each combination has several; use --seeds.")


def _parts(values: Mapping[str, str], config: RunConfig) -> Parts:
    """What varies, in words, and FNR wherever it is on."""
    parts = [
        (key, _words(key, value))
        for key, value in values.items()
        if config.fnr is not None or not key.startswith("fnr.")
    ]
    if not parts:
        parts = [("algorithm.name", config.algorithm.name)]
    if config.fnr is not None and not any(key.split(".")[0] == "fnr" for key, _ in parts):
        parts.append(("fnr", "fnr on"))
    return tuple(parts)


def _words(key: str, value: str) -> str:
    plain = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return plain if key in SELF_EXPLAINING else f"{key.removesuffix('.name')} {plain}"


def _with_controls(groups: list[Group]) -> list[Group]:
    """Each group, followed by its twin without the penalty if it has one and no other group is that twin."""
    known = {_fingerprint(group.config, weightless=True): group.label for group in reversed(groups)}
    rows = []
    for group in groups:
        config = group.config
        if config.fnr is None or not config.fnr["weight"] or config.protocol != "honest":
            rows.append(group)
            continue
        without = config.replace({"fnr": {"weight": 0.0}})
        parts = tuple(part for part in group.parts if part[0] not in ("fnr", *WEIGHTED))
        twin = Group((*parts, ("fnr", "fnr weight 0")), without)
        label = known.setdefault(_fingerprint(without, weightless=True), twin.label)
        rows.append(replace(group, control=label))
        if label not in {row.label for row in (*groups, *rows)}:
            rows.append(twin)
    return rows


def _fingerprint(config: RunConfig, *, weightless: bool = False) -> str:
    """Equal for configs of the same run under different names, or `weightless` with a penalty that has no weight."""
    fnr = config.fnr
    if weightless and fnr is not None and not fnr["weight"]:
        fnr = {key: value for key, value in fnr.items() if f"fnr.{key}" not in WEIGHTED}
    return config.model_copy(update={"name": "", "fnr": fnr}).sha256


def _slug(text: str) -> str:
    """Text as part of a file name that every file system takes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower())[:100].strip("-.") or "run"


def _names(labels: Iterable[str]) -> list[str]:
    """Slugs, made different by a number where they are not."""
    taken: list[str] = []
    for label in labels:
        slug = _slug(label)
        numbered = (f"{slug}-{n}" for n in itertools.count(2))
        taken.append(slug if slug not in taken else next(name for name in numbered if name not in taken))
    return taken


# -- carrying it out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Notice:
    """What a comparison is doing: for whoever shows it."""

    what: Literal["check", "start", "round", "done", "kept", "failed"]
    cell: Cell
    number: int  # of the cell, from 1
    total: int
    event: Event | None = None  # of a round
    error: str = ""  # why it failed


def compare(
    cells: Sequence[Cell],
    out: str | Path,
    *,
    baseline: str | None = None,
    target: float | None = None,
    progress: Callable[[Notice], None] | None = None,
    checkpoint_every: float = 30.0,
) -> Comparison:
    """Run every cell into a folder of its own below `out`, one after another, and write the table beside them.

    One after another, because seconds are among the results. Called again, finished runs are kept and unfinished ones
    go on. A run that fails is recorded and the others go on. `baseline` names a group, or some of the words of one:
    "fedavg" compares each group with the one that has fedavg and is otherwise the same. Nothing is written unless
    every group can be built.
    """
    from fnrfl import runs

    out = Path(out)
    chosen = _baseline([cell.group for cell in cells], baseline)
    _check_folder(out, cells)
    tell = progress or (lambda notice: None)
    _check_groups(cells, out, tell)
    out.mkdir(parents=True, exist_ok=True)
    claims = _claims(cells)
    grid_file = {"format": FORMAT, "sha256": _hash(claims), "cells": claims}
    files.write(out / "grid.json", json.dumps(grid_file, indent=1) + "\n")

    summaries: dict[str, Summary] = {}
    failures: dict[str, str] = {}
    for number, cell in enumerate(cells, 1):
        folder = out / cell.name
        kept = _is_finished(folder)
        notice = Notice("kept" if kept else "start", cell, number, len(cells))
        tell(notice)

        def show(event: Event, at: Notice = notice) -> None:
            tell(replace(at, what="round", event=event))

        try:
            if folder.exists():
                result = runs.resume(folder, progress=show, checkpoint_every=checkpoint_every)
            else:
                result = runs.run(cell.config, out=folder, progress=show, checkpoint_every=checkpoint_every)
        except FnrflError as error:
            failures[cell.name] = str(error)
            tell(replace(notice, what="failed", error=str(error)))
        else:
            summaries[cell.name] = _summary(result, target)
            if not kept:
                tell(replace(notice, what="done"))
        if not kept:
            _write(out, summarise(cells, summaries, failures, chosen))
    found = summarise(cells, summaries, failures, chosen)
    _write(out, found)
    return found


def _is_finished(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


def _summary(result: Result, target: float | None) -> Summary:
    if target is None:
        return result.summary()
    got = reached(result.rounds, target)
    took = {f"{key}_to_target": value for key, value in asdict(got).items()} if got else {}
    return result.summary() | {"target": target} | took


def _claims(cells: Iterable[Cell]) -> dict[str, str]:
    """What makes a grid: the names of its runs and the hashes of their configs."""
    return {cell.name: cell.config.sha256 for cell in cells}


def _hash(claims: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(claims, sort_keys=True).encode()).hexdigest()


def _check_folder(out: Path, cells: Sequence[Cell]) -> None:
    """Refuse a folder with something else in it; a grid that contains the one there is a continuation of it."""
    path, ours = out / "grid.json", _claims(cells)
    if not path.exists():
        if out.exists() and any(found.name != "grid.json.part" for found in out.iterdir()):
            raise ConfigError(f"{out} holds something else than a comparison. Choose another folder with --out.")
        return
    try:
        theirs = json.loads(files.read(path, "a comparison has a grid.json"))["cells"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}). Choose another folder with --out.") from error
    strange = next((name for name, sha256 in theirs if ours.get(name) != sha256), None)
    if strange is not None:
        how = "with another config" if strange in ours else "which this one has not"
        raise ConfigError(
            f"{out} belongs to another comparison: its run {strange} is one {how}. Repeat the command that made it, "
            "add to it, or choose another folder with --out."
        )


def _check_groups(cells: Sequence[Cell], out: Path, tell: Callable[[Notice], None]) -> None:
    """Build the first run of every group that has not begun: what cannot go together is known before the first starts.

    The other seeds differ in their draws alone.
    """
    from fnrfl.build import build

    problems: dict[str, list[str]] = {}
    checked: set[str] = set()
    for number, cell in enumerate(cells, 1):
        label = cell.group.label
        if label in checked or (out / cell.name).exists():
            continue
        checked.add(label)
        tell(Notice("check", cell, number, len(cells)))
        try:
            build(cell.config)
        except FnrflError as error:
            problems.setdefault(str(error), []).append(label)
    if problems:
        raise ConfigError(" ".join(f"{'; '.join(labels)}: {what}" for what, labels in problems.items()))


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A group in numbers."""

    group: str
    config: RunConfig  # of the first seed
    seeds: tuple[int, ...]  # that are finished
    metrics: dict[str, Estimate | None]  # by the names of METRICS, as far as there are any
    baseline: str | None
    difference: Difference | None  # of accuracy, to the baseline
    control: str | None
    penalty: Difference | None  # of accuracy, to the control: what the penalty adds to refinement

    @property
    def leaks(self) -> tuple[str, ...]:
        """The leaks that its runs have."""
        return self.config.leaks_on


@dataclass(frozen=True)
class Failure:
    """A run that stopped with an error."""

    cell: str
    group: str
    seed: int
    error: str


@dataclass(frozen=True)
class Comparison:
    """What came out of a grid."""

    rows: tuple[Row, ...]
    failed: tuple[Failure, ...]
    runs: tuple[Summary, ...]  # the finished ones: the summary of each with its cell and group
    cells: int

    @property
    def exit_code(self) -> int:
        """What a command returns: 3 if a run failed."""
        return 3 if self.failed else 0

    @property
    def leaks(self) -> tuple[str, ...]:
        """Every leak that some row has."""
        return tuple(dict.fromkeys(leak for row in self.rows for leak in row.leaks))

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        tree = {
            "format": FORMAT,
            "cells": self.cells,
            "done": len(self.runs),
            "leaks": self.leaks,
            "rows": [_facts(row) | {"seeds": row.seeds} | row.metrics | _differences(row) for row in self.rows],
            "failed": self.failed,
            "runs": self.runs,
        }
        return json.dumps(tree, indent=1, default=asdict) + "\n"

    def to_csv(self) -> str:
        """One line per row, every number in full."""
        lines = [_flat(row) for row in self.rows]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()

    def to_markdown(self) -> str:
        """The table for a document, with what must be known to read it."""
        columns = _columns(self, digits=4)
        lines = ["| " + " | ".join(columns) + " |", "|---" + "|--:" * (len(columns) - 1) + "|"]
        for cells in zip(*columns.values(), strict=True):
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n\n" + "\n".join(f"- {note}" for note in notes(self)) + "\n"


def summarise(
    cells: Sequence[Cell],
    summaries: Mapping[str, Summary],
    failures: Mapping[str, str],
    baseline: Parts,
) -> Comparison:
    """The table of what is finished; groups without a finished run have a row without numbers."""
    groups = {cell.group.label: cell.group for cell in cells}
    found: dict[str, dict[int, Summary]] = {label: {} for label in groups}
    for cell in cells:
        if cell.name in summaries:
            found[cell.group.label][cell.seed] = summaries[cell.name]

    def accuracy(label: str) -> dict[int, float]:
        return {seed: summary["accuracy"] for seed, summary in found[label].items()}

    rows = []
    for label, group in groups.items():
        base = _counterpart(group, groups.values(), baseline)
        values = accuracy(label)
        rows.append(
            Row(
                label,
                group.config,
                tuple(values),
                {name: _estimate(name, found[label].values()) for name in METRICS},
                base,
                paired(values, accuracy(base)) if base != label else None,
                group.control,
                paired(values, accuracy(group.control)) if group.control else None,
            )
        )
    return Comparison(
        tuple(rows),
        tuple(Failure(c.name, c.group.label, c.seed, failures[c.name]) for c in cells if c.name in failures),
        tuple({"cell": c.name, "group": c.group.label, **summaries[c.name]} for c in cells if c.name in summaries),
        len(cells),
    )


def _estimate(name: str, summaries: Iterable[Summary]) -> Estimate | None:
    """Over the seeds that have this number; of a way to a target, only if every seed has got there."""
    values = [summary.get(name) for summary in summaries]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or (name.endswith("_to_target") and len(known) < len(values)):
        return None
    return estimate(known)


def _baseline(groups: Iterable[Group], text: str | None) -> Parts:
    """The parts that a baseline has. By default how the first group trains, so that each task has a baseline."""
    known = {group.label: group for group in groups}
    if text is None:
        first = next(iter(known.values())).parts
        return tuple(part for part in first if part[0].split(".")[0] in METHOD) or first
    for label, group in known.items():
        if _slug(label) == _slug(text):
            return group.parts
    pieces = {_slug(piece) for piece in split(text)}
    for group in known.values():
        fitting = tuple(
            (key, words)
            for key, words in group.parts
            if pieces & {_slug(words), _slug(f"{key.removesuffix('.name')} {words}")}
        )
        if len(fitting) == len(pieces):
            return fitting
    labels = [f'"{label}"' for label in known]
    raise ConfigError(f'There is no baseline "{text}" in this comparison. {registry.hint(text, labels)}.')


def _counterpart(group: Group, groups: Iterable[Group], baseline: Parts) -> str:
    """The group that this one is compared with: of those with the baseline's parts, the one that is most alike."""
    able = [other for other in groups if set(baseline) <= set(other.parts)]
    return max(able, key=lambda other: len(set(other.parts) & set(group.parts))).label


# -- how it looks ------------------------------------------------------------------------------------------------------


def table(comparison: Comparison, width: int = 120) -> Table:
    """The table for a terminal of some width: as many columns as fit, the most telling ones first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = _columns(comparison, digits=3)
    widths = {name: max(map(len, [*cells, *name.split()])) for name, cells in columns.items()}
    widths["run"] = min(widths["run"], 40)  # longer ones are folded
    for name in DISPENSABLE:
        if sum(widths.values()) + 3 * len(widths) + 1 > width:
            widths.pop(name, None)
    made = Table(box=box.SIMPLE_HEAD)
    for name, cells in widths.items():
        made.add_column(name, justify="left" if name == "run" else "right", width=None if name == "run" else cells)
    for row, texts in zip(comparison.rows, zip(*(columns[name] for name in widths), strict=True), strict=True):
        made.add_row(*(Text(cell, style="red" if row.leaks and not place else "") for place, cell in enumerate(texts)))
    return made


def notes(comparison: Comparison) -> list[str]:
    """What must be known to read the table, one sentence or two each."""
    said = [
        "Accuracy on the test set after the last round: mean ± standard deviation over n seeds.",
        "Differences of accuracy are paired by seed, to the baseline of the same task: mean ± half of the 95 % "
        "interval (Student t), and p of the paired t test, not corrected for the number of rows.",
        "Seconds are of training, without evaluation; they and kappa compare only within one device.",
    ]
    if any(row.control for row in comparison.rows):
        said.insert(2, "Penalty: FNR minus the same refinement with fnr.weight = 0, paired in the same way.")
    if comparison.leaks:
        said.insert(0, f"leak: {', '.join(comparison.leaks)}. Rows marked so are no honest results.")
    if len(comparison.runs) < comparison.cells:
        said.insert(0, f"{len(comparison.runs)} of {comparison.cells} runs are finished.")
    return said + [f"{failure.cell} failed: {failure.error}" for failure in comparison.failed]


def _columns(comparison: Comparison, digits: int) -> dict[str, list[str]]:
    """The table as text, by column."""
    rows = comparison.rows

    def means(name: str, form: str, scale: float = 1.0) -> list[str]:
        found = [row.metrics[name] for row in rows]
        return ["-" if value is None else format(value.mean * scale, form) for value in found]

    def traffic(row: Row) -> str:
        up, down = row.metrics["bytes_up"], row.metrics["bytes_down"]
        return "-" if up is None or down is None else f"{(up.mean + down.mean) / 2**20:.1f}"

    plain = f".{digits}f"
    columns = {
        "run": [row.group + (" (leak)" if row.leaks else "") for row in rows],
        "n": [str(len(row.seeds)) for row in rows],
        "accuracy": [_spread(row.metrics["accuracy"], plain) for row in rows],
        "difference": ["baseline" if row.baseline == row.group else _reach(row.difference, plain) for row in rows],
        "p": [_p(row.difference) for row in rows],
    }
    if any(row.control for row in rows):
        columns["penalty"] = [_reach(row.penalty, plain) for row in rows]
        columns["p of penalty"] = [_p(row.penalty) for row in rows]
    columns |= {
        "last 3": means("accuracy_last3", plain),
        "best": means("accuracy_best", plain),
        "worst client": means("worst_client", plain),
        "MiB up": means("bytes_up", ".2f", 2**-20),
        "MiB down": means("bytes_down", ".2f", 2**-20),
        "MiB": [traffic(row) for row in rows],
        "seconds": means("seconds_train", ".1f"),
        "kappa": means("kappa", ".0f"),
        "rho": means("rho", ".0f"),
    }
    targets = {run["target"] for run in comparison.runs if "target" in run}
    for target in targets:
        columns |= {
            f"rounds to {target:g}": means("rounds_to_target", ".1f"),
            f"MiB to {target:g}": means("bytes_to_target", ".2f", 2**-20),
            f"seconds to {target:g}": means("seconds_to_target", ".1f"),
        }
    return columns


def _spread(value: Estimate | None, form: str) -> str:
    if value is None:
        return "-"
    return format(value.mean, form) + ("" if value.sd is None else f" ± {value.sd:{form}}")


def _reach(value: Difference | None, form: str) -> str:
    """A difference and the half of its interval."""
    if value is None:
        return ""
    return format(value.mean, f"+{form}") + ("" if value.high is None else f" ± {value.high - value.mean:{form}}")


def _p(value: Difference | None) -> str:
    if value is None:
        return ""
    return "-" if value.p is None else "<0.001" if value.p < 0.001 else f"{value.p:.3f}"


def _facts(row: Row) -> dict[str, Any]:
    config = row.config
    return {
        "group": row.group,
        "algorithm": config.algorithm.name,
        "fnr": config.fnr,
        "dataset": config.dataset,
        "scenario": config.scenario,
        "protocol": config.protocol,
        "leaks": row.leaks,
        "n": len(row.seeds),
    }


def _differences(row: Row) -> dict[str, Any]:
    return {
        "baseline": row.baseline,
        "difference": row.difference,
        "control": row.control,
        "penalty": row.penalty,
    }


def _flat(row: Row) -> dict[str, Any]:
    """A row with one number per field."""
    flat = _facts(row) | {
        "fnr": "off" if row.config.fnr is None else "on",
        "leaks": f"leak: {', '.join(row.leaks)}" if row.leaks else "",
    }
    for name, value in row.metrics.items():
        flat |= {name: value and value.mean, f"{name}_sd": value and value.sd}
    accuracy = row.metrics["accuracy"]
    flat |= {"accuracy_low": accuracy and accuracy.low, "accuracy_high": accuracy and accuracy.high}
    for name, other, value in (
        ("difference", row.baseline, row.difference),
        ("penalty", row.control, row.penalty),
    ):
        flat |= {f"{name}_to": other, name: value and value.mean}
        flat |= {f"{name}_{field}": value and getattr(value, field) for field in ("low", "high", "p")}
    return flat


def _write(out: Path, found: Comparison) -> None:
    for suffix, text in (("json", found.to_json()), ("csv", found.to_csv()), ("md", found.to_markdown())):
        files.write(out / f"comparison.{suffix}", text)
