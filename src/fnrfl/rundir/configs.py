"""Whether two configs, by dotted key, are the same, and whether one is a relative of the other: decided here alone."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fnrfl.config import RunConfig, introduced
from fnrfl.config.schema import FIRST_NAMES
from fnrfl.core.errors import ConfigError

Config = dict[str, Any]  # by dotted key, as config.toml has them; "fnr" is "on" or "off"

WEIGHTED = ("fnr.weight", "fnr.penalty", "fnr.target")  # keys that do not matter once the weight is 0


def flat(tree: Mapping[str, Any]) -> Config:
    """A config's tree by dotted key."""

    def pairs(part: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in part.items():
            yield from pairs(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]

    return with_present_names(dict(pairs(tree))) | {"fnr": "on" if isinstance(tree["fnr"], dict) else "off"}


def with_present_names(config: Config) -> Config:
    """A config by dotted key, whose keys are called as they are now; older versions had another name for some."""
    now = {first: key for key, first in FIRST_NAMES.items()}
    return {now.get(key, key): value for key, value in config.items()}


def flat_config(config: RunConfig) -> Config:
    """A config by dotted key, as its config.toml has them."""
    return flat(tomllib.loads(config.to_toml()))


def value_in_words(value: object) -> str:
    """A value of a config in a sentence."""
    return "not there" if value is None else json.dumps(value, default=str)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys that have not the same value in both, in the order of the first."""
    return [key for key in {**one, **other} if value_in_words(one.get(key)) != value_in_words(other.get(key))]


def differing_from_plan(planned: Config, written: Config) -> list[str]:
    """Keys in which the config of a run is not the one that was planned; what a run chose for `auto` does not count.

    A config of an older version lacks keys: they have the value that they were introduced with. "fnr" stands for all
    keys of that section if one of the two has none.
    """
    free = {key for key, value in planned.items() if key.startswith(("engine.", "dataset.scale")) and value == "auto"}
    free |= {"clients"} if planned.get("clients") == 0 else set()  # the data has counted them
    keys = [key for key in differing(_complete(planned), _complete(written)) if key not in free]
    return ["fnr"] if "fnr" in keys else keys


def data_keys(config: Config) -> Config:
    """The keys that decide which examples there are, and their values."""
    return {k: v for k, v in _complete(config).items() if k.startswith("dataset.") and k != "dataset.scale"}


def _complete(config: Config) -> Config:
    """A config with every key that its version did not have yet."""
    keys = _introduced(str(config.get("algorithm.name"))) | config
    return keys if config.get("fnr") != "off" else {k: v for k, v in keys.items() if not k.startswith("fnr.")}


@cache
def _introduced(algorithm: str) -> Config:
    try:
        return dict(introduced(algorithm))
    except ConfigError:  # a method that this version does not have
        return {}


def wrong_run(folder: Path, planned: Config, written: Config, plans: Mapping[str, Config], way_out: str) -> str:
    """Why a folder of a comparison does not hold the run of its name; `plans` are the configs of all runs."""
    key = differing_from_plan(planned, written)[0]
    twin = next((other for other, plan in plans.items() if not differing_from_plan(plan, written)), None)
    of = f" That is the config of {twin}: the two folders may have been exchanged." if twin else ""
    return (
        f"{folder} does not hold the run {folder.name} of its comparison: {key} is {value_in_words(written.get(key))} "
        f"in its config.toml and {value_in_words(planned.get(key))} in the grid.{of} {way_out}"
    )


def is_control(other: Config, config: Config, *free: str) -> bool:
    """Whether a config is the control of another: the same refinement with weight 0, which makes the penalty void."""
    if not config.get("fnr.weight") or other.get("fnr.weight") != 0:
        return False
    return without_keys(other, *WEIGHTED, *free) == without_keys(config, *WEIGHTED, *free)


def without_keys(config: Config, *free: str) -> str:
    """Write a config as text, some keys and sections aside: the same text for the same config."""
    compared = {k: v for k, v in config.items() if k not in free and k.partition(".")[0] not in free}
    return json.dumps(compared, sort_keys=True, default=str)
