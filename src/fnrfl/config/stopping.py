"""The rule that ends a run before its last round: never, patience(5), or patience(5, keep=best)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fnrfl.core.errors import ConfigError

PATIENCE = re.compile(r"patience\(([1-9]\d{0,8})(,keep=(last|best))?\)")


@dataclass(frozen=True)
class StopRule:
    """After how many rounds without a better value a run ends, and whether its best model is kept or its last."""

    patience: int | None = None  # None: all rounds are done, whatever comes
    keeps_best: bool = False

    @classmethod
    def read(cls, text: str) -> StopRule:
        """Read a rule as it is typed.

        >>> StopRule.read("patience(5, keep=best)")
        StopRule(patience=5, keeps_best=True)
        """
        words = text.lower().replace(" ", "")
        found = PATIENCE.fullmatch(words)
        if found is None and words != "never":
            raise ConfigError(
                f'stop = "{text[:100]}" is not allowed: it must be never or patience(ROUNDS), and patience(ROUNDS, '
                "keep=best) keeps the model of the best round, as in patience(5)."
            )
        return cls() if found is None else cls(int(found[1]), found[3] == "best")

    def __str__(self) -> str:
        keep = ", keep=best" if self.keeps_best else ""
        return "never" if self.patience is None else f"patience({self.patience}{keep})"

    def ends(self, values: Sequence[float | None]) -> bool:
        """Return whether a run that has had these values, one a round, is at its end."""
        return self.patience is not None and len(values) - best_round(values) >= self.patience


def canonical_stop(text: str) -> str:
    """Return a rule as it is always written, so that equal ones are equal configs."""
    return str(StopRule.read(text))


def best_round(values: Sequence[float | None]) -> int:
    """Return the first round, counted from 1, with the largest value; 0 if there is none."""
    known = [value for value in values if value is not None]
    return values.index(max(known)) + 1 if known else 0
