"""Python's parser, and what calls it, in threads beside each other.

Before Python 3.11.8 and 3.12.2 there is one count of depth for the parsers of all threads, and a thread that parses
while another one does may get a SystemError although its text is good (python/cpython, gh-106905).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fnrfl.core.forks import process_lock

T = TypeVar("T")
ATTEMPTS = 1000  # one in ten succeeds where two threads do nothing but parse

parser_lock = process_lock()


def parsed(parse: Callable[[], T]) -> T:
    """What `parse` returns. It calls Python's parser, alone among fnrfl's threads, and again if another one met it."""
    for _ in range(ATTEMPTS - 1):
        try:
            with parser_lock:
                return parse()
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    with parser_lock:
        return parse()
