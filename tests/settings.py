"""A config with other keys, for tests."""

from __future__ import annotations

from fnrfl.config import RunConfig, loads
from fnrfl.config.typed import Overrides


def with_keys(config: RunConfig, overrides: Overrides) -> RunConfig:
    """Return a config with some keys changed, as if they had been typed."""
    return loads(config.to_toml(), overrides, trust=True)
