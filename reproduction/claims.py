"""The paper's claims as a table: printed, by the paper's protocol, honest, and a verdict by a rule on the interval.

data/claims.toml says which number of which runs decides a claim. Whether it holds is not written anywhere: `judge` is
the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fnrfl import statistics
from reproduction import measures
from reproduction.catalogue import (
    CURVES,
    CURVES_SOURCE,
    PRINTED,
    REFINED_CLASSES,
    TEXTS,
    Cell,
    expand,
    method_name,
    read_toml,
    table_cells,
    text,
)
from reproduction.store import CellResult, Line, Results
from reproduction.tables import (
    MIB,
    Column,
    Part,
    Table,
    Value,
    failures,
    leak_note,
    make_table,
    once_each,
    scale_note,
    value_of,
    why_none,
)

CLAIMS: dict[str, dict[str, Any]] = read_toml("claims.toml")
SEEDS = {"paper": (0,), "honest": (0, 1, 2)}  # under the paper's protocol others count if they have run
UNDER_PAPER = {"fedavg+fnr": "fedavg+both-leaks-weight-1", "fedavg+weight-0": "fedavg+both-leaks-weight-0"}
Outcome = Literal["holds", "fails", "open", "not-run"]
OUTCOMES: tuple[Outcome, ...] = ("holds", "fails", "open", "not-run")


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and why that is said, as the key of a text."""

    outcome: Outcome
    why: str = ""

    @property
    def words(self) -> str:
        """The verdict for people."""
        outcome = text("verdicts", self.outcome)
        return text("verdicts", "because", outcome=outcome, why=text("verdicts", self.why)) if self.why else outcome


def judge(found: statistics.Estimate | None, bound: float = 0.0, *, smaller: bool = False) -> Verdict:
    """Judge a number over seeds that a claim wants above a bound, or below it.

    It holds if the whole interval is beyond the bound, and fails if the whole interval is on the other side.

    >>> judge(statistics.estimate([0.1, 0.2, 0.3])).outcome, judge(statistics.estimate([0.2])).why
    ('open', 'one-seed')
    """
    if found is None:
        return Verdict("not-run")
    if found.low is None or found.high is None:
        return Verdict("open", "one-seed" if found.n == 1 else "equal")
    if found.low <= bound <= found.high:
        return Verdict("open")
    return Verdict("holds" if (found.high < bound) == smaller else "fails")


def sum_up(outcomes: Sequence[Outcome]) -> Outcome:
    """Judge a claim by its rows: it must hold in all, and one that fails is enough against it."""
    if len(set(outcomes)) == 1:
        return outcomes[0]
    return "fails" if "fails" in outcomes else "open"


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A number, the runs that it is made from, and the bound that the claim puts on it."""

    label: str
    runs: tuple[tuple[str, str, str], ...]  # net, skew, method
    measure: str
    form: str = "+.4f"
    bound: float = 0.0
    smaller: bool = False
    tables: tuple[str, ...] = ()
    printed: str = ""  # what is printed instead of a number that can be computed
    others: dict[str, str] = field(default_factory=dict)  # methods that the paper's protocol has others for
    less_control: bool = False  # the number of the first run minus that of the second

    def cells(self, setting: str, seed: int, scale: str) -> list[Cell]:
        """Return the runs under a setting."""
        others = self.others if setting == "paper" else {}
        return [Cell(net, skew, setting, others.get(name, name), seed, scale) for net, skew, name in self.runs]

    def number(self, lines: Sequence[Line]) -> float | None:
        """Return the number that some lines give."""
        measure: Callable[..., float | None] = getattr(measures, self.measure)
        if not self.less_control:
            return measure(*lines)
        fnr, control = map(measure, lines)
        return None if fnr is None or control is None else fnr - control

    @property
    def printed_number(self) -> float | None:
        """The number made from what was printed; None if not all of it was."""
        lines = [printed_line(self.tables, *run) for run in self.runs]
        known = [line for line in lines if line is not None]
        return self.number(known) if len(known) == len(lines) else None


def rows_of(claim: str) -> list[Row]:
    """Return the rows of a claim: one for each skew, or one for several skews together."""
    rows = []
    for found in CLAIMS[claim]["rows"]:
        methods, net = expand(found["methods"]), found.get("net", "resnet18")
        together = expand(found["together"]) if "together" in found else ()
        for skews in [together] if together else [(skew,) for skew in expand(found.get("skews", "single"))]:
            names = {"skew": text("skews", skews[-1]), "method": method_name(methods[-1])}
            counts, gains = zip(*REFINED_CLASSES.values(), strict=True)
            printed = found.get("printed", "").format(correlation=f"{statistics.rank_correlation(counts, gains):+.2f}")
            more = {name: found[name] for name in ("form", "bound", "smaller") if name in found}
            more |= {"less_control": found.get("less-control", False)}
            label = found.get("label", "{skew}").format(**names)
            runs = tuple((net, skew, method) for skew in skews for method in methods)
            others = UNDER_PAPER if found.get("under-paper") else {}
            tables = tuple(found.get("tables", ()))
            rows.append(Row(label, runs, found["measure"], tables=tables, printed=printed, others=others, **more))
    return rows


def printed_line(tables: Sequence[str], net: str, skew: str, method: str) -> Line | None:
    """Return what the paper printed of a run, as a line: from the first of some tables that has it."""
    for table in tables:
        if table == "convergence" and skew == "label" and method in CURVES:
            return Line(accuracies=list(CURVES[method]))
        if (table, net, skew, f"{method}:seconds") in PRINTED:
            accuracy, seconds, mib = (
                PRINTED[table, net, skew, f"{method}:{metric}"].value for metric in ("accuracy", "seconds", "mib")
            )
            return Line(accuracy=accuracy, seconds_train=seconds, bytes_up=mib * MIB)
        if (table, net, skew, method) in PRINTED:
            return Line(accuracy=PRINTED[table, net, skew, method].value)
    return None


def claims_cells(scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """Return every run that some claim needs, once."""
    found = (
        cell
        for claim in CLAIMS
        for row in rows_of(claim)
        for setting, usual in SEEDS.items()
        for seed in (usual if seeds is None else seeds)
        for cell in row.cells(setting, seed, scale)
    )
    return list(dict.fromkeys(found))


def named_cells(name: str, scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """Return the runs behind the claims, or behind a table."""
    return claims_cells(scale, seeds) if name == "claims" else table_cells(name, scale, seeds)


def named_table(name: str, results: Results, scale: str, seeds: Sequence[int] | None = None) -> Table:
    """Return the claims, or a table by its name."""
    return claims_table(results, scale, seeds) if name == "claims" else make_table(name, results, scale, seeds)


# -- the table ---------------------------------------------------------------------------------------------------------


def claims_table(results: Results, scale: str, seeds: Sequence[int] | None = None) -> Table:
    """Make the table of claims of whatever results there are: all in one part, and then a part for each."""
    maker = _Maker(results, scale, seeds)
    parts = (_overview(maker), *(_part(maker, claim) for claim in CLAIMS))
    return Table("claims", scale, parts, (*leak_note(parts), scale_note(scale), *TEXTS["notes"]["claims"]))


@dataclass(frozen=True)
class _Maker:
    """Makes numbers and verdicts of results."""

    results: Results
    scale: str
    seeds: Sequence[int] | None

    def usual(self, setting: str) -> Sequence[int]:
        """Return the seeds that a value should have."""
        return SEEDS[setting] if self.seeds is None else self.seeds

    def found(self, row: Row, setting: str) -> dict[int, list[CellResult]]:
        """Return the results behind a row, by seed; more seeds than the usual ones count under the paper's protocol."""
        seeds = sorted({*self.usual(setting), *(SEEDS["honest"] if self.seeds is None else ())})
        found = {seed: list(map(self.results.find, row.cells(setting, seed, self.scale))) for seed in seeds}
        return {seed: results for seed, results in found.items() if all(one.usable for one in results)}

    def numbers(self, row: Row, setting: str) -> dict[int, float]:
        """Return the number of every seed that has one: differences are of runs of the same seed."""
        found = self.found(row, setting)
        numbers = {seed: row.number([one.line for one in results]) for seed, results in found.items()}
        return {seed: number for seed, number in numbers.items() if number is not None}

    def verdict(self, row: Row) -> tuple[Verdict, statistics.Estimate | None]:
        """Judge a row, by the honest protocol alone."""
        numbers = self.numbers(row, "honest")
        if not numbers and self.found(row, "honest"):
            return Verdict("open", "not-measured"), None
        found = statistics.estimate(list(numbers.values())) if numbers else None
        return judge(found, row.bound, smaller=row.smaller), found

    def value(self, row: Row, setting: str) -> Value:
        """Return the number of a row under a setting, or why there is none and which cells it needs."""
        numbers, found = self.numbers(row, setting), self.found(row, setting)
        seeds = sorted({*self.usual(setting), *numbers})
        cells = [cell for seed in seeds for cell in row.cells(setting, seed, self.scale)]
        if numbers:
            return value_of(setting, numbers, row.form, [one for seed in numbers for one in found[seed]], cells)
        known = {cell: self.results.find(cell) for cell in cells}
        if found:
            untimed = [cell for cell, one in known.items() if one.usable and one.line.untimed]
            more = text("verdicts", "untimed", cells=braced(untimed)) if untimed else ""
            words, sources = text("values", "none"), [text("verdicts", "no-number") + more]
        else:
            lacking = braced([cell for cell, one in known.items() if not one.usable])
            words = why_none(one for one in known.values() if not one.usable)
            sources = [text("verdicts", "needs", cells=lacking), *failures(known)]
        ids = tuple(cell.id for cell in cells)
        return Value(setting, words=words, missing=tuple(seeds), sources=tuple(sources), cells=ids)

    def shown_verdict(self, row: Row) -> Value:
        """Return the verdict on a row, with its interval."""
        verdict, found = self.verdict(row)
        if found is None or found.low is None or found.high is None:
            several = found is not None and found.n > 1
            mean = f"{found.mean:{row.form}}" if found else ""
            words = text("verdicts", "mean", verdict=verdict.words, mean=mean) if several else verdict.words
            return Value("honest", words=words)
        low, high = (f"{end:{row.form}}" for end in (found.low, found.high))
        return Value("honest", found, words=text("verdicts", "interval", verdict=verdict.words, low=low, high=high))

    def summed_verdict(self, rows: Sequence[Row]) -> Value:
        """Return the verdict on a claim, and on how many of its rows it is which."""
        if len(rows) == 1:
            return self.shown_verdict(rows[0])
        outcomes = [self.verdict(row)[0].outcome for row in rows]
        counts = Counter(outcomes)
        names = {outcome: text("verdicts", outcome) for outcome in OUTCOMES}
        each = ", ".join(
            text("verdicts", "each", outcome=names[one], count=counts[one]) for one in names if counts[one]
        )
        outcome = names[sum_up(outcomes)]
        return Value("honest", words=text("verdicts", "rows", outcome=outcome, rows=len(rows), each=each))


def braced(cells: Sequence[Cell]) -> str:
    """Return the ids of cells, in the words that a shell makes them of."""
    runs: dict[str, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(f"{cell.net}/{cell.skew}/{cell.setting}", []).append(cell)

    def axis(words: Iterable[object]) -> str:
        once = list(dict.fromkeys(map(str, words)))
        return once[0] if len(once) == 1 else f"{{{','.join(once)}}}"

    return " ".join(
        f"{place}/{axis(cell.method for cell in group)}/seed{axis(cell.seed for cell in group)}@{group[0].scale}"
        for place, group in runs.items()
    )


def _verdict_label(scale: str) -> str:
    return text("verdicts", "digits" if scale == "tiny" else "head")


def _part(maker: _Maker, claim: str) -> Part:
    """Return one claim with its rows."""
    rows, said = rows_of(claim), CLAIMS[claim]
    printed = tuple(_printed(claim, row) for row in rows)
    columns = []
    if any(value.words for value in printed):
        columns.append(Column("printed", text("settings", "printed"), "printed", printed))
    for setting in SEEDS:
        values = tuple(maker.value(row, setting) for row in rows)
        columns.append(Column(setting, text("settings", setting), setting, values))
    verdicts = tuple(map(maker.shown_verdict, rows))
    columns.append(Column("verdict", _verdict_label(maker.scale), "honest", verdicts, numeric=False))
    title = text("parts", "claim", name=claim, sentence=said["sentence"], place=said["place"])
    named = tuple((str(place), row.label) for place, row in enumerate(rows))
    return Part((claim,), title, named, tuple(columns), text("parts", "shown", about=said["about"]))


def _printed(claim: str, row: Row) -> Value:
    number = row.printed_number
    if number is None:
        return Value("printed", words=row.printed)
    of_curves = row.tables == ("convergence",)
    source = text("verdicts", "curves", source=CURVES_SOURCE) if of_curves else ""
    about = source or text("verdicts", "paper", place=CLAIMS[claim]["place"])
    return Value("printed", statistics.estimate([number]), words=f"{number:{row.form}}", sources=(about,))


def _overview(maker: _Maker) -> Part:
    """Return all claims, a row each: of several rows the ends, and how many have which verdict."""
    rows = {claim: rows_of(claim) for claim in CLAIMS}
    places = tuple(Value("printed", words=said["place"]) for said in CLAIMS.values())
    printed = tuple(_range([_printed(claim, row) for row in found], found[0].form) for claim, found in rows.items())
    columns = [
        Column("place", text("verdicts", "place"), "printed", places, numeric=False),
        Column("printed", text("settings", "printed"), "printed", printed, numeric=False),
    ]
    for setting in SEEDS:
        values = tuple(_range([maker.value(row, setting) for row in found], found[0].form) for found in rows.values())
        columns.append(Column(setting, text("settings", setting), setting, values, numeric=False))
    verdicts = tuple(map(maker.summed_verdict, rows.values()))
    columns.append(Column("verdict", _verdict_label(maker.scale), "honest", verdicts, numeric=False))
    named = tuple(
        (claim, text("parts", "row", name=claim, sentence=said["sentence"])) for claim, said in CLAIMS.items()
    )
    return Part(("overview",), text("parts", "overview"), named, tuple(columns), text("parts", "ends"))


def _range(values: Sequence[Value], form: str) -> Value:
    """Return several values of one protocol as one, which has every leak that one of them has."""
    known = [value for value in values if value.number is not None]
    if len(values) == 1 or not known:
        return replace(values[0], sources=())
    means = [value.number.mean for value in known if value.number]
    low, high = (f"{end:{form}}" for end in (min(means), max(means)))
    words = low if low == high else text("values", "to", low=low, high=high)
    words += text("values", "rows", known=len(known), rows=len(values)) if len(known) < len(values) else ""
    return Value(values[0].protocol, words=words, leaks=once_each(value.leaks for value in known))
