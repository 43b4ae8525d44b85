"""Did you mean: the known name that somebody most likely had in mind."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `word`; None if no name is like it."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def did_you_mean(word: str, known: Iterable[str], quote: str = "'") -> str:
    """The question whether the nearest name was meant, to follow another sentence; "" if no name is near.

    >>> did_you_mean("scafold", ["fedavg", "scaffold"])
    " Did you mean 'scaffold'?"
    """
    meant = nearest(word, known)
    return "" if meant is None else f" Did you mean {quote}{meant}{quote}?"


def choices(word: str, known: Iterable[str]) -> str:
    """What somebody who typed the unknown name `word` can type instead; the caller ends the sentence."""
    names = list(known)
    return f"{did_you_mean(word, names, quote='')} Choose one of {', '.join(names)}".lstrip()
