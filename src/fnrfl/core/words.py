"""Words for people: how many of a thing, and which known name was meant; and a name that is in files and in code."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

INPUT_SCALE = "input_scale"  # the name of a model's first layer, if its inputs are scaled


def counted(number: int, what: str, several: str = "") -> str:
    """A number of things: 1 round, 2 rounds, 1,797 examples."""
    return f"{number:,} {what if number == 1 else several or what + 's'}"


def printable(text: str) -> str:
    """Text that comes from data, such as a client's name, with control characters as escapes: they move no cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def same_spelling(name: str) -> str:
    """A name as everybody writes it: an accented letter is one character, which some systems store as two (NFC)."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


# -- did you mean ------------------------------------------------------------------------------------------------------


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
