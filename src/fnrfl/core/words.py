"""Words for people, how many of a thing; and a name that is in files and in code."""

from __future__ import annotations

import unicodedata

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
