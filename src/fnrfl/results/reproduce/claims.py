"""The claims of the paper: what it says and where, what it printed, and which number of which runs decides.

A claim has one row or several, such as one for each skew. The number of a row is made from runs of one seed, the same
way for what was printed and for what was run. Whether a claim holds is not written here: `verdicts.py` has the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fnrfl.results.reproduce import claim_measures as of
from fnrfl.results.reproduce.kept_lines import CellLine
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.results.reproduce.printed import CURVES, PRINTED, REFINED_CLASSES
from fnrfl.results.reproduce.settings import OTHERS, SINGLE_SKEWS, SIX
from fnrfl.results.reproduce.shown import SKEW_NAMES, method_name
from fnrfl.results.statistics import rank_correlation
from fnrfl.runs.metrics import MIB

WITH_FNR, FEDAVG, CONTROL = "fedavg+fnr", "fedavg", "fedavg+weight-0"
FIVE, TEN = SIX[1:], SIX[1:] + OTHERS
HEADLINE_GAIN, HEADLINE_TIME = 0.6624, 0.1140
# The seeds that a claim asks for; under the paper's protocol others count if they have run.
CLAIM_SEEDS = {"paper": (0,), "honest": (0, 1, 2)}


class ClaimRun(NamedTuple):
    """A run without its setting, seed and scale."""

    net: str
    skew: str
    method: str


@dataclass(frozen=True)
class ClaimRow:
    """A number, the runs that it is made from, and the bound that the claim puts on it."""

    label: str
    runs: tuple[ClaimRun, ...]
    measure: of.Measure
    form: str = "+.4f"
    bound: float = 0.0
    smaller: bool = False  # the claim is that the number is below the bound, not above
    tables: tuple[str, ...] = ()  # of the paper, where the same runs are printed
    printed: str = ""  # what is printed instead, in words
    under_paper: Mapping[str, str] = field(default_factory=dict)  # methods that the paper's protocol has others for

    def cells(self, setting: str, seed: int, scale: str) -> tuple[PaperCell, ...]:
        """The runs under a setting."""
        other = self.under_paper if setting == "paper" else {}
        return tuple(
            PaperCell(run.net, run.skew, setting, other.get(run.method, run.method), seed, scale) for run in self.runs
        )

    @property
    def printed_number(self) -> float | None:
        """The number made from what was printed; None if not all of it was."""
        lines = [printed_line(self.tables, run) for run in self.runs]
        return None if None in lines else self.measure(*lines)


@dataclass(frozen=True)
class Claim:
    """Something that the paper says."""

    name: str
    sentence: str
    place: str
    about: str  # the number of a row, in words
    rows: tuple[ClaimRow, ...]


def printed_line(tables: Sequence[str], run: ClaimRun) -> CellLine | None:
    """What the paper printed of a run, as a line: from the first of some tables that has it."""
    line: CellLine = {"device": "printed", "engine": {"name": "", "precision": ""}}
    for table in tables:
        if table == "convergence" and run.skew == "label" and run.method in CURVES:
            return line | {"accuracies": list(CURVES[run.method]), "bytes_up": 0, "bytes_down": 0}
        if table == "cost" and (table, *run[:2], f"{run.method}:seconds") in PRINTED:
            accuracy, seconds, mib = (
                PRINTED[table, run.net, run.skew, f"{run.method}:{metric}"].value
                for metric in ("accuracy", "seconds", "mib")
            )
            return line | {"accuracy": accuracy, "seconds_train": seconds, "bytes_up": mib * MIB, "bytes_down": 0}
        if (table, *run) in PRINTED:
            return line | {"accuracy": PRINTED[table, run.net, run.skew, run.method].value}
    return None


def find_claim_cells(scale: str, seeds: Sequence[int] | None = None) -> list[PaperCell]:
    """Every run that some claim needs, once."""
    found = (
        cell
        for claim in CLAIMS
        for row in claim.rows
        for setting, asked in CLAIM_SEEDS.items()
        for seed in (asked if seeds is None else seeds)
        for cell in row.cells(setting, seed, scale)
    )
    return list(dict.fromkeys(found))


# -- the claims --------------------------------------------------------------------------------------------------------

_MIXED = ("label+feature-0.1", "label+feature-0.5", "label+quantity")
_WITHOUT_NOISE = {
    "feature-0.1": "iid", "feature-0.5": "iid", "label+feature-0.1": "label", "label+feature-0.5": "label",
}  # fmt: skip
_WEIGHTS = {WITH_FNR: "fedavg+both-leaks-weight-1", CONTROL: "fedavg+both-leaks-weight-0"}  # equal to the last bit


def _runs(skew: str, methods: Iterable[str], net: str = "resnet18") -> tuple[ClaimRun, ...]:
    return tuple(ClaimRun(net, skew, method) for method in methods)


def _by_skew(
    methods: Sequence[str], measure: of.Measure, form: str, *, label: str = "", skews: Sequence[str] = SINGLE_SKEWS,
    tables: tuple[str, ...] = (), under_paper: Mapping[str, str] | None = None, smaller: bool = False,
) -> tuple[ClaimRow, ...]:  # fmt: skip
    """A row for each skew."""
    return tuple(
        ClaimRow(
            label + SKEW_NAMES[skew], _runs(skew, methods), measure, form, tables=tables, under_paper=under_paper or {},
            smaller=smaller,
        )
        for skew in skews
    )  # fmt: skip


def _headline(measure: of.Measure, bound: float, table: str) -> ClaimRow:
    """FNR against FedAvg under feature skew, where both numbers of the abstract are from."""
    runs = _runs("feature-0.5", (WITH_FNR, FEDAVG))
    return ClaimRow(SKEW_NAMES["feature-0.5"], runs, measure, "+.2%", bound, tables=(table,))


def _vgg11(methods: Sequence[str], measure: of.Measure, form: str, skews: Iterable[str]) -> tuple[ClaimRow, ...]:
    tables = ("accuracy",)
    return tuple(
        ClaimRow(f"VGG-11, {SKEW_NAMES[skew]}", _runs(skew, methods, "vgg11"), measure, form, tables=tables)
        for skew in skews
    )


def _around(method: str) -> ClaimRow:
    """FNR around a method, on all three skews."""
    runs = [run for skew in SINGLE_SKEWS for run in _runs(skew, (f"{method}+fnr", method))]
    tables = ("orthogonality", "accuracy")
    return ClaimRow(f"around {method_name(method)}", tuple(runs), of.mean_margin, tables=tables)


def _rare_classes() -> tuple[ClaimRow, ...]:
    counts, gains = zip(*REFINED_CLASSES.values(), strict=True)
    printed = f"{rank_correlation(counts, gains):+.2f}, of the four classes whose counts are given"
    first, *others = _by_skew((WITH_FNR,), of.rare_classes, "+.2f", smaller=True)
    return replace(first, printed=printed), *others


CLAIMS = (
    Claim(
        "headline-accuracy", "66.24 % more accuracy than FedAvg", "abstract",
        "accuracy / FedAvg's - 1, in the cell of tab:Exp1 where it is largest; the bound is 66.24 %",
        (_headline(of.relative_gain, HEADLINE_GAIN, "accuracy"),),
    ),
    Claim(
        "headline-time", "11.40 % less training time than FedAvg", "abstract",
        "1 - seconds / FedAvg's, in the first block of tab:cost; the bound is 11.40 %",
        (_headline(of.time_saved, HEADLINE_TIME, "cost"),),
    ),
    Claim(
        "accuracy-fedavg", "more accurate than FedAvg under every skew", "tab:Exp1", "accuracy / FedAvg's - 1",
        _by_skew((WITH_FNR, FEDAVG), of.relative_gain, "+.2%", tables=("accuracy",))
        + _vgg11((WITH_FNR, FEDAVG), of.relative_gain, "+.2%", SINGLE_SKEWS),
    ),
    Claim(
        "accuracy-others", "more accurate than every other method", "tab:Exp1",
        "accuracy minus that of the best of ten others",
        _by_skew((WITH_FNR, *TEN), of.margin, "+.4f", tables=("accuracy",)),
    ),
    Claim(
        "penalty", "the gain comes from the regularisation term", "Motivation, Implication 3",
        "accuracy minus that of the control, the same refinement with weight 0",
        _by_skew((WITH_FNR, CONTROL), of.margin, "+.4f", under_paper=_WEIGHTS)
        + _vgg11((WITH_FNR, CONTROL), of.margin, "+.4f", ("label",)),
    ),
    Claim(
        "time", "less training time than FedAvg under every skew", "tab:cost", "1 - seconds / FedAvg's",
        _by_skew((WITH_FNR, FEDAVG), of.time_saved, "+.2%", tables=("cost",)),
    ),
    Claim(
        "convergence", "faster convergence", "abstract and introduction; the section Convergence says as fast",
        f"1 - what it takes / what FedAvg takes to {of.TARGET_SHARE:.0%} of FedAvg's last accuracy",
        _by_skew((WITH_FNR, FEDAVG), of.rounds_saved, "+z.1%", label="rounds, ", tables=("convergence",))
        + _by_skew((WITH_FNR, FEDAVG), of.seconds_saved, "+z.1%", label="seconds, ")
        + _by_skew((WITH_FNR, FEDAVG), of.bytes_saved, "+z.1%", label="bytes, "),
    ),
    Claim(
        "kappa-rho", "the best kappa and the best rho", "tab:cost",
        "kappa or rho / the best of five others - 1. If the seconds of some others are no measure, kappa is compared "
        "with the rest, and an FNR that is ahead of the rest counts as 0",
        _by_skew(SIX, of.best_kappa, "+.2%", label="kappa, ", tables=("cost",))
        + _by_skew(SIX, of.best_rho, "+.2%", label="rho, ", tables=("cost",)),
    ),
    Claim(
        "mixed", "the most accurate under mixed skews", "tab:Exp2", "accuracy minus that of the best of five others",
        _by_skew(SIX, of.margin, "+.4f", skews=_MIXED, tables=("mixed",)),
    ),
    Claim(
        "plug-and-play", "FNR improves every method that it goes around", "tab:Exp_or",
        "accuracy minus that of the method alone, a mean over the three skews, for the five methods that are printed",
        tuple(map(_around, FIVE)),  # those that the paper printed; the table orthogonality has the others too
    ),
    Claim(
        "noise", "loses less by noise than the others", "tab:Exp_noise",
        "the least that one of five others loses, minus what FNR loses",
        tuple(
            ClaimRow(SKEW_NAMES[noisy], _runs(calm, SIX) + _runs(noisy, SIX), of.smaller_decline, tables=("noise",))
            for noisy, calm in _WITHOUT_NOISE.items()
        ),
    ),
    Claim(
        "rare-classes", "classes of which a client has little gain more", "Effect of feature norm regularization",
        "rank correlation of a class's gain with the client's examples of it, over the classes of refined clients; "
        "the claim is that it is below 0",
        _rare_classes(),
    ),
    Claim(
        "rare-by-penalty", "the regularisation term makes rare classes gain more",
        "Effect of feature norm regularization",
        "that correlation, minus the same of the control with weight 0; the claim is that it is below 0",
        _by_skew((WITH_FNR, CONTROL), of.rare_classes_by_penalty, "+.2f", under_paper=_WEIGHTS, smaller=True),
    ),
    Claim(
        "hypothesis", "the gap between class norms shows how far apart updates point", "Motivation, Implication 2",
        "rank correlation of the gap with the angle between two clients' updates, over pairs, a mean over rounds",
        _by_skew((WITH_FNR,), of.gap_and_angle, "+.2f"),
    ),
    Claim(
        "closer-updates", "refinement turns updates towards each other", "Motivation, Implication 3",
        "the mean cosine between two clients' updates after refinement, minus that before",
        _by_skew((WITH_FNR,), of.closer_updates, "+.4f"),
    ),
    Claim(
        "closer-by-penalty", "the regularisation term turns updates towards each other", "Motivation, Implication 3",
        "that difference, minus the same of the control with weight 0",
        _by_skew((WITH_FNR, CONTROL), of.closer_updates_by_penalty, "+.4f", under_paper=_WEIGHTS),
    ),
    Claim(
        "smaller-gaps", "refinement brings class norms together", "Algorithms 2 and 3",
        "by which share the mean gap between two clients is smaller after refinement",
        _by_skew((WITH_FNR,), of.smaller_gaps, "+z.1%"),
    ),
    Claim(
        "gaps-by-penalty", "the regularisation term brings class norms together", "Algorithms 2 and 3",
        "that share, minus the same of the control with weight 0",
        _by_skew((WITH_FNR, CONTROL), of.smaller_gaps_by_penalty, "+z.1%", under_paper=_WEIGHTS),
    ),
)  # fmt: skip
