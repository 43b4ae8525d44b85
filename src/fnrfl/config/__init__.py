"""The typed config: TOML and overrides go in, one frozen RunConfig comes out, and every mistake is a sentence.

What is exported is imported when it is first asked for: `fnrfl --help` needs the words alone, not pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fnrfl.config.resolving import load, loads
    from fnrfl.config.schema import PAPER, RunConfig, describe_keys, introduced, slug

__all__ = ["PAPER", "RunConfig", "describe_keys", "introduced", "load", "loads", "slug"]
_HOMES = {"load": "resolving", "loads": "resolving"}  # all others: schema


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fnrfl.config.{_HOMES.get(name, 'schema')}"), name)
