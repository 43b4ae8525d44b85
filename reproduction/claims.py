"""The paper's claims as a table: printed, by the paper's protocol, honest, and a verdict by a rule on the interval.

data/claims.toml says which number of which runs decides a claim. Whether it holds is not written anywhere: `judge` is
the rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from fnrfl import statistics
from reproduction import catalogue, measures, tables
from reproduction.catalogue import SEEDS, Cell, expand, method_name, text
from reproduction.store import Line, Results
from reproduction.tables import Column, Metric, Part, Table, Value, leaks_of, make_table, make_value, printed_value

CLAIMS: dict[str, dict[str, Any]] = catalogue.read_toml("claims.toml")
UNDER_PAPER = {"fedavg+fnr": "fedavg+both-leaks-weight-1", "fedavg+weight-0": "fedavg+both-leaks-weight-0"}
Outcome = Literal["holds", "fails", "open", "not-run"]
OUTCOMES: tuple[Outcome, ...] = ("holds", "fails", "open", "not-run")


class Verdict(NamedTuple):
    """Whether a claim holds, and why that is said, as the key of a text."""

    outcome: Outcome
    why: str = ""

    @property
    def words(self) -> str:
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


@dataclass(frozen=True)
class Row:
    """A number, the runs that it is made from, and the bound that the claim puts on it; claims.toml has the fields."""

    label: str
    runs: tuple[tuple[str, str, str], ...]  # net, skew, method
    measure: str
    form: str = "+.4f"
    bound: float = 0.0
    smaller: bool = False
    tables: Sequence[str] = ()
    printed: str = ""  # what is printed instead of a number that can be computed
    under_paper: bool = False
    less_control: bool = False

    def cells(self, setting: str, seed: int, scale: str) -> list[Cell]:
        others = UNDER_PAPER if self.under_paper and setting == "paper" else {}
        return [Cell(net, skew, setting, others.get(name, name), seed, scale) for net, skew, name in self.runs]

    def number(self, *lines: Line) -> float | None:
        """Return the number that some lines give."""
        measure: Callable[..., float | None] = getattr(measures, self.measure)
        if not self.less_control:
            return measure(*lines)
        fnr, control = map(measure, lines)
        return None if fnr is None or control is None else fnr - control

    @property
    def printed_number(self) -> float | None:
        """The number made from what was printed; None if not all of it was."""
        lines = [line for run in self.runs if (line := tables.printed_line(self.tables, *run))]
        return self.number(*lines) if len(lines) == len(self.runs) else None


def rows_of(claim: str) -> list[Row]:
    """Return the rows of a claim: one for each skew, or one for several skews together."""
    rows = []
    for found in CLAIMS[claim]["rows"]:
        said = {name.replace("-", "_"): value for name, value in found.items()}
        methods, net, label = expand(said.pop("methods")), said.pop("net", "resnet18"), said.pop("label", "{skew}")
        each, together = expand(said.pop("skews", "single")), expand(said.pop("together", ()))
        for skews in [together] if together else [(skew,) for skew in each]:
            named = label.format(skew=text("skews", skews[-1]), method=method_name(methods[-1]))
            rows.append(Row(named, tuple((net, skew, method) for skew in skews for method in methods), **said))
    return rows


def named_cells(name: str, scale: str, seeds: Sequence[int] | None = None) -> list[Cell]:
    """Return every run behind the claims, or behind a table by part, setting, seed and row; each once."""
    if name == "claims":
        rows = [row for claim in CLAIMS for row in rows_of(claim)]
        groups = [row.cells(one, seed, scale) for row in rows for one in SEEDS for seed in seeds or SEEDS[one]]
    else:
        by_method = (
            [part.cells(setting, method, scale, seeds) for method in part.methods]
            for part in catalogue.table_parts(name)
            for setting in part.settings
        )
        groups = [list(of_seed) for cells in by_method for of_seed in zip(*cells, strict=True)]
    return list(dict.fromkeys(cell for group in groups for cell in group))


def named_table(name: str, results: Results, scale: str, seeds: Sequence[int] | None = None) -> Table:
    """Return the claims, or a table by its name, of whatever results there are."""
    if name != "claims":
        return make_table(name, results, scale, seeds)
    maker = _Maker(results, scale, seeds)
    found = [maker.part(claim) for claim in CLAIMS]
    parts = (maker.overview(found), *(part for part, _ in found))
    notes = (*tables.leak_note(parts), tables.scale_note(scale), *catalogue.TEXTS["notes"]["claims"])
    return Table("claims", scale, parts, notes)


@dataclass(frozen=True)
class _Maker:
    """Makes the parts of the table of claims."""

    results: Results
    scale: str
    seeds: Sequence[int] | None

    def part(self, claim: str) -> tuple[Part, list[Outcome]]:
        """Return one claim with its rows, and how they were judged."""
        rows, said = rows_of(claim), CLAIMS[claim]
        values = {setting: tuple(self.value(row, setting) for row in rows) for setting in SEEDS}
        judged = [self.verdict(row, value) for row, value in zip(rows, values["honest"], strict=True)]
        printed = tuple(_printed(claim, row) for row in rows)
        if any(value.words for value in printed):
            values = {"printed": printed} | values
        columns = [Column(one, text("settings", one), one, of_rows) for one, of_rows in values.items()]
        columns.append(self._verdicts(value for _, value in judged))
        title = text("parts", "claim", name=claim, sentence=said["sentence"], place=said["place"])
        named = tuple((str(place), row.label) for place, row in enumerate(rows))
        about = text("parts", "shown", about=said["about"])
        return Part((claim,), title, named, tuple(columns), about), [outcome for outcome, _ in judged]

    def overview(self, found: Sequence[tuple[Part, Sequence[Outcome]]]) -> Part:
        """Return all claims, a row each: of several rows the ends, and how many have which verdict."""
        values = [{column.key: column.values for column in part.columns} for part, _ in found]
        forms = [rows_of(claim)[0].form for claim in CLAIMS]
        places = tuple(Value("printed", words=said["place"]) for said in CLAIMS.values())
        columns = [Column("place", text("verdicts", "place"), "printed", places, numeric=False)]
        for one in ("printed", *SEEDS):
            known = [of_claim.get(one, [Value(one)]) for of_claim in values]
            columns.append(Column(one, text("settings", one), one, tuple(map(_range, known, forms)), numeric=False))
        verdicts = (
            of_claim["verdict"][0] if len(outcomes) == 1 else _summed(outcomes)
            for of_claim, (_, outcomes) in zip(values, found, strict=True)
        )
        named = tuple(
            (claim, text("parts", "row", name=claim, sentence=said["sentence"])) for claim, said in CLAIMS.items()
        )
        columns.append(self._verdicts(verdicts))
        return Part(("overview",), text("parts", "overview"), named, tuple(columns), text("parts", "ends"))

    def _verdicts(self, values: Iterable[Value]) -> Column:
        label = text("verdicts", "digits" if self.scale == "tiny" else "head")
        return Column("verdict", label, "honest", tuple(values), numeric=False)

    def cells(self, row: Row, setting: str) -> dict[int, list[Cell]]:
        """Return the cells behind a row, by seed; more seeds than the usual ones count under the paper's protocol."""
        seeds = sorted({*(self.seeds or SEEDS["honest"])})
        return {seed: row.cells(setting, seed, self.scale) for seed in seeds}

    def have_run(self, row: Row, setting: str) -> bool:
        """Whether all cells of some seed have a result, be it without the number."""
        cells = self.cells(row, setting).values()
        return any(all(self.results.find(cell).usable for cell in each) for each in cells)

    def value(self, row: Row, setting: str) -> Value:
        """Return the number of a row under a setting, or why there is none and which cells it needs."""
        cells, usual = self.cells(row, setting), sorted({*(self.seeds or SEEDS[setting])})
        value = make_value(self.results, setting, cells, Metric(row.number, row.form), usual)
        if value.number:
            return value
        known = {cell: self.results.find(cell) for seed in usual for cell in cells[seed]}
        if self.have_run(row, setting):
            untimed = [cell for cell, line in known.items() if line.usable and line.untimed]
            more = text("verdicts", "untimed", cells=braced(untimed)) if untimed else ""
            sources = [text("verdicts", "no-number") + more]
        else:
            lacking = braced([cell for cell, line in known.items() if not line.usable])
            sources = [text("verdicts", "needs", cells=lacking), *value.sources]
        return replace(value, missing=tuple(usual), sources=tuple(sources))

    def verdict(self, row: Row, honest: Value) -> tuple[Outcome, Value]:
        """Judge a row, by the honest protocol alone; in words with the interval, or the mean, if there is one."""
        found, verdict = honest.number, judge(honest.number, row.bound, smaller=row.smaller)
        if found is None and self.have_run(row, "honest"):
            verdict = Verdict("open", "not-measured")
        words = verdict.words
        if found and found.low is not None and found.high is not None:
            low, high = (f"{end:{row.form}}" for end in (found.low, found.high))
            words = text("verdicts", "interval", verdict=words, low=low, high=high)
            return verdict.outcome, Value("honest", found, words=words)
        if found and found.n > 1:
            words = text("verdicts", "mean", verdict=words, mean=f"{found.mean:{row.form}}")
        return verdict.outcome, Value("honest", words=words)


def _summed(outcomes: Sequence[Outcome]) -> Value:
    """Return the verdict on a claim with several rows, and how many of them it is which."""
    counts, names = Counter(outcomes), {outcome: text("verdicts", outcome) for outcome in OUTCOMES}
    each = [text("verdicts", "each", outcome=names[one], count=counts[one]) for one in OUTCOMES if counts[one]]
    said = {"outcome": names[sum_up(outcomes)], "rows": len(outcomes), "each": ", ".join(each)}
    return Value("honest", words=text("verdicts", "rows", **said))


def _printed(claim: str, row: Row) -> Value:
    number = row.printed_number
    if number is None:
        counts, gains = zip(*catalogue.REFINED_CLASSES.values(), strict=True)
        correlation = f"{statistics.rank_correlation(counts, gains):+.2f}"
        return Value("printed", words=row.printed.format(correlation=correlation))
    about = text("verdicts", "paper", place=CLAIMS[claim]["place"])
    if row.tables == ["convergence"]:
        about = text("verdicts", "curves", source=catalogue.CURVES_SOURCE)
    return printed_value(number, f"{number:{row.form}}", about)


def _range(values: Sequence[Value], form: str) -> Value:
    """Return several values of one protocol as one, which has every leak that one of them has."""
    known = [value for value in values if value.number]
    if len(values) == 1 or not known:
        return replace(values[0], sources=())
    means = [value.number.mean for value in known if value.number]
    low, high = (f"{end:{form}}" for end in (min(means), max(means)))
    words = low if low == high else text("values", "to", low=low, high=high)
    words += text("values", "rows", known=len(known), rows=len(values)) if len(known) < len(values) else ""
    return Value(values[0].protocol, words=words, leaks=leaks_of(known))


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
