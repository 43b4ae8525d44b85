"""Words for people: how many of a thing."""

from __future__ import annotations


def counted(number: int, what: str, several: str = "") -> str:
    """A number of things: 1 round, 2 rounds, 1,797 examples."""
    return f"{number:,} {what if number == 1 else several or what + 's'}"
