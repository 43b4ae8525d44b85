"""The claims as a table: printed, by the paper's protocol, honest, and a verdict by a rule on the interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fnrfl.core.words import counted
from fnrfl.results.reproduce.claims import CLAIM_SEEDS, CLAIMS, Claim, ClaimRow, find_claim_cells
from fnrfl.results.reproduce.kept_lines import CellResult, KeptLines, seconds_count
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.paper_tables import find_table
from fnrfl.results.reproduce.printed import CURVES_SOURCE
from fnrfl.results.reproduce.shown import (
    COLUMN_NAMES,
    ShownColumn,
    ShownPart,
    ShownTable,
    ShownValue,
    failures_among,
    leak_note,
    leaks_of,
    once_each,
    show_table,
    some_seeds,
    why_not,
)
from fnrfl.results.reproduce.titles import TITLES, scale_note
from fnrfl.results.reproduce.wording import as_markdown
from fnrfl.results.statistics import LEVEL, Estimate, estimate

Outcome = Literal["holds", "does not hold", "cannot be told", "not run"]
VERDICT_HEAD = "verdict, by the honest protocol"
ON_DIGITS = f"{VERDICT_HEAD}, on digits: not about the paper"
_NO_NUMBER = (
    "these cells have run, but this was not measured: seconds count only of cells that ran alone on one device and one "
    "day, and pairs of clients need fnr.watch"
)


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, and why that is said."""

    outcome: Outcome
    why: str


def judge(found: Estimate | None, bound: float = 0.0, *, smaller: bool = False) -> Verdict:
    """The verdict on a number over seeds that a claim wants above a bound, or below it.

    It holds if the whole interval is beyond the bound, and does not hold if the whole interval is on the other side.

    >>> judge(estimate([0.1, 0.2, 0.3])).outcome, judge(estimate([0.2])).why
    ('cannot be told', 'one seed')
    """
    if found is None:
        return Verdict("not run", "")
    if found.low is None or found.high is None:
        return Verdict("cannot be told", "one seed" if found.n == 1 else "every seed has the same value")
    if found.low <= bound <= found.high:
        return Verdict("cannot be told", "")
    return Verdict("holds" if (found.high < bound) == smaller else "does not hold", "")


def sum_up(verdicts: Sequence[Verdict]) -> Outcome:
    """The verdict on a claim from those on its rows: it must hold in all, and one that fails is enough against it."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if len(outcomes) == 1:
        return verdicts[0].outcome
    return "does not hold" if "does not hold" in outcomes else "cannot be told"


def show_claims(lines: KeptLines, scale: str, seeds: Sequence[int] | None = None) -> ShownTable:
    """Every claim with its verdict, from whatever results there are: all in one part, and then a part for each."""
    looked = _Looked(lines, scale, seeds)
    parts = [_overview(looked), *(_part(looked, claim) for claim in CLAIMS)]
    return ShownTable("claims", TITLES["claims"], scale, tuple(parts), tuple(_notes(parts, scale)))


def show_named(name: str, lines: KeptLines, scale: str, seeds: Sequence[int] | None = None) -> ShownTable:
    """The claims, or a table by its name."""
    return show_claims(lines, scale, seeds) if name == "claims" else show_table(name, lines, scale, seeds)


def find_cells(name: str, scale: str, seeds: Sequence[int] | None = None) -> list[PaperCell]:
    """The runs behind the claims, or behind a table."""
    return find_claim_cells(scale, seeds) if name == "claims" else find_table(name).cells(scale, seeds)


@dataclass(frozen=True)
class _Looked:
    """What numbers are looked up in."""

    lines: KeptLines
    scale: str
    seeds: Sequence[int] | None

    @property
    def verdict_head(self) -> str:
        """What stands above the verdicts."""
        return ON_DIGITS if self.scale == "tiny" else VERDICT_HEAD

    def asked(self, setting: str) -> Sequence[int]:
        """The seeds that a value should have."""
        return CLAIM_SEEDS[setting] if self.seeds is None else self.seeds

    def found(self, row: ClaimRow, setting: str) -> dict[int, list[CellResult]]:
        """The results behind a row, by seed; seeds that nobody asked for count too, under the paper's protocol."""
        seeds = sorted({*self.asked(setting), *(CLAIM_SEEDS["honest"] if self.seeds is None else ())})
        return {seed: list(map(self.lines.find, row.cells(setting, seed, self.scale))) for seed in seeds}

    def numbers(self, row: ClaimRow, setting: str) -> dict[int, float]:
        """The number of every seed that has one: differences are of runs of the same seed."""
        numbers = {}
        for seed, results in self.found(row, setting).items():
            if all(one.usable for one in results):
                number = row.measure(*(one.line for one in results))
                if number is not None:
                    numbers[seed] = number
        return numbers

    def estimate(self, row: ClaimRow, setting: str) -> Estimate | None:
        """The mean of a row's numbers over seeds, with its interval; None without a number."""
        numbers = self.numbers(row, setting)
        return estimate(list(numbers.values())) if numbers else None

    def verdict(self, row: ClaimRow) -> Verdict:
        """Whether a row holds, by the honest protocol alone."""
        found = self.estimate(row, "honest")
        if found is None and self._has_run(row, "honest"):
            return Verdict("cannot be told", "not measured")
        return judge(found, row.bound, smaller=row.smaller)

    def value(self, row: ClaimRow, setting: str) -> ShownValue:
        """The number of a row under a setting, as it is shown."""
        numbers = self.numbers(row, setting)
        asked = sorted({*self.asked(setting), *numbers})
        if not numbers:
            return self._no_value(row, setting)
        result = estimate(list(numbers.values()))
        missing = tuple(seed for seed in asked if seed not in numbers)
        part = some_seeds(list(numbers), len(asked))
        behind = [one for seed, results in self.found(row, setting).items() if seed in numbers for one in results]
        return ShownValue(
            setting, f"{result.spread(row.form)}{part}", result.mean, result.sd, tuple(numbers), missing,
            leaks_of(one.line for one in behind), tuple(dict.fromkeys(one.words for one in behind)),
            self._ids(row, setting, asked), result.low, result.high,
        )  # fmt: skip

    def _no_value(self, row: ClaimRow, setting: str) -> ShownValue:
        """Why there is no number, and which cells it needs."""
        asked, ran = self.asked(setting), self._has_run(row, setting)
        cells = [cell for seed in asked for cell in row.cells(setting, seed, self.scale)]
        known = {cell: self.lines.find(cell) for cell in cells}
        lacking = [cell for cell, one in known.items() if not one.usable]
        untimed = [cell for cell, one in known.items() if one.usable and not seconds_count(one.line)]
        without = _NO_NUMBER + (f"; the seconds of these cells are no measure: {_named(untimed)}" if untimed else "")
        sources = (without,) if ran else (f"needs cells: {_named(lacking)}", *failures_among(known))
        return ShownValue(
            setting, why_not(list(known.values()), ran), missing=tuple(asked), sources=sources,
            cells=self._ids(row, setting, asked),
        )  # fmt: skip

    def _ids(self, row: ClaimRow, setting: str, seeds: Sequence[int]) -> tuple[str, ...]:
        return tuple(cell.id for seed in seeds for cell in row.cells(setting, seed, self.scale))

    def shown_verdict(self, row: ClaimRow) -> ShownValue:
        """The verdict on a row, with its interval."""
        found, verdict = self.estimate(row, "honest"), self.verdict(row)
        words = verdict.outcome + (f": {verdict.why}" if verdict.why else "")
        if found is None or found.low is None or found.high is None:
            return ShownValue("honest", words + (f", {found.mean:{row.form}}" if found and found.n > 1 else ""))
        words += f": {found.low:{row.form}} to {found.high:{row.form}}"
        return ShownValue("honest", words, found.mean, found.sd, low=found.low, high=found.high)

    def _has_run(self, row: ClaimRow, setting: str) -> bool:
        return any(all(one.usable for one in results) for results in self.found(row, setting).values())


def _named(cells: Sequence[PaperCell]) -> str:
    """The ids of cells, in the words that a shell makes them of."""
    runs: dict[tuple[str, ...], list[PaperCell]] = {}
    for cell in cells:
        runs.setdefault((cell.net, cell.skew, cell.setting), []).append(cell)
    named = []
    for place, group in runs.items():
        methods, seeds = (_braced([str(getattr(cell, axis)) for cell in group]) for axis in ("method", "seed"))
        named.append(f"{'/'.join(place)}/{methods}/seed{seeds}@{group[0].scale}")
    return " ".join(named)


def _braced(words: Sequence[str]) -> str:
    """Each word once: a, or {a,b}."""
    once = list(dict.fromkeys(words))
    return once[0] if len(once) == 1 else f"{{{','.join(once)}}}"


def _part(looked: _Looked, claim: Claim) -> ShownPart:
    """One claim with its rows."""
    printed = tuple(_printed(claim, row) for row in claim.rows)
    columns = [ShownColumn("printed", "printed", printed)] if any(value.words for value in printed) else []
    for setting in CLAIM_SEEDS:
        values = tuple(looked.value(row, setting) for row in claim.rows)
        columns.append(ShownColumn(COLUMN_NAMES[setting], setting, values))
    columns.append(ShownColumn(looked.verdict_head, "honest", tuple(map(looked.shown_verdict, claim.rows))))
    title = f"{claim.name}: {claim.sentence} ({claim.place})"
    return ShownPart(title, tuple(row.label for row in claim.rows), tuple(columns), f"Shown: {claim.about}.")


def _printed(claim: Claim, row: ClaimRow) -> ShownValue:
    number = row.printed_number
    if number is None:
        return ShownValue("printed", row.printed)
    of_curves = row.tables == ("convergence",)
    source = f"computed from the curves of {CURVES_SOURCE}" if of_curves else f"the paper, {claim.place}"
    return ShownValue("printed", f"{number:{row.form}}", number, sources=(source,))


def _overview(looked: _Looked) -> ShownPart:
    """All claims, a row each: of several rows, the smallest and the largest value, and how many have which verdict."""
    columns = [
        ShownColumn("place", "printed", tuple(ShownValue("printed", claim.place) for claim in CLAIMS)),
        ShownColumn("printed", "printed", tuple(_range(c, [_printed(c, row) for row in c.rows]) for c in CLAIMS)),
    ]
    for setting in CLAIM_SEEDS:
        values = tuple(_range(claim, [looked.value(row, setting) for row in claim.rows]) for claim in CLAIMS)
        columns.append(ShownColumn(COLUMN_NAMES[setting], setting, values))
    columns.append(ShownColumn(looked.verdict_head, "honest", tuple(_summed(looked, claim) for claim in CLAIMS)))
    rows = tuple(f"{claim.name}: {claim.sentence}" for claim in CLAIMS)
    return ShownPart(
        "All claims", rows, tuple(columns), "For a claim with several rows: the smallest and the largest value."
    )


def _range(claim: Claim, values: Sequence[ShownValue]) -> ShownValue:
    """Several values of one protocol as one, which has every leak that one of them has."""
    known = [value for value in values if value.mean is not None]
    if len(values) == 1 or not known:
        return replace(values[0], sources=())
    ends = [min(value.mean or 0.0 for value in known), max(value.mean or 0.0 for value in known)]
    words = " to ".join(dict.fromkeys(f"{end:{claim.rows[0].form}}" for end in ends))  # one, if they are equal
    words += f" ({len(known)} of {counted(len(values), 'row')})" if len(known) < len(values) else ""
    return ShownValue(values[0].protocol, words, leaks=once_each(value.leaks for value in known))


def _summed(looked: _Looked, claim: Claim) -> ShownValue:
    """The verdict on a claim, and on how many of its rows it is which."""
    if len(claim.rows) == 1:
        return looked.shown_verdict(claim.rows[0])
    verdicts = [looked.verdict(row) for row in claim.rows]
    counts = Counter(verdict.outcome for verdict in verdicts)
    each = ", ".join(f"{outcome} in {counts[outcome]}" for outcome in get_args(Outcome) if counts[outcome])
    return ShownValue("honest", f"{sum_up(verdicts)} ({counted(len(verdicts), 'row')}: {each})")


def _notes(parts: Sequence[ShownPart], scale: str) -> Iterator[str]:
    """What must be known to read the table."""
    if (leaks := leak_note(parts)) is not None:
        yield leaks
    yield scale_note(scale)
    yield (
        f"A claim holds if the whole {LEVEL:.0%} interval over seeds is beyond its bound, which is 0 unless said, and "
        "does not hold if the whole interval is on the other side; with one seed it cannot be told. A claim with "
        "several rows must hold in all of them. Of many rows some are beyond their bound by chance."
    )
    yield "Values are means over seeds ± standard deviation. Every difference and ratio is of runs of the same seed."
    yield "The printed numbers of FNR were made with the leaks of the released code, as far as it shows."
    yield (
        "66.24 % is 0.9976 / 0.6001 - 1, the largest of the six cells of tab:Exp1; 11.40 % is 1 - 6060 / 6840 of the "
        "same skew, where in the released code every other method is scored on ten times as many images. Under label "
        "skew the same table has FNR slower than FedAvg."
    )
    yield (
        "The paper also says that no method was tested under mixed skew before. NIID-Bench's code, which its own is "
        "made from, has both mixed skews."
    )


# -- the page of documentation -----------------------------------------------------------------------------------------

_PAGE = """# The claims of the paper

What the paper says, and whether it holds here. `fnrfl reproduce claims` prints this from the results that there are;
this page is made from the committed ones, by
```
fnrfl reproduce claims --markdown --out none.jsonl > docs/claims.md
```
The verdict is a rule on an interval and not an opinion. It is about the honest protocol; what the paper's protocol
gives stands beside it and says leak. [The paper's tables](reproduction.md) explains cells, scales and protocols, and
[FNR](methods/fnr.md#watching-it) what is logged for the claims about pairs of clients and about classes.

"""


def claims_page(shown: ShownTable) -> str:
    """docs/claims.md."""
    return _PAGE + as_markdown(shown)
