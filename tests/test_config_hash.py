"""The hash of a config: the same for the same values, whatever keys are added later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnrfl.config import RunConfig, describe_keys, keys, load, loads, registry, schema
from fnrfl.config.schema import MethodOptions
from fnrfl.core.errors import ConfigError
from fnrfl.core.options import Option, option
from fnrfl.core.training import ClientOptions, FnrOptions
from fnrfl.results.compare import grid
from fnrfl.results.compare.folder import check_comparison_folder, write_grid
from settings import with_keys

# By method, the value that each key was introduced with. A new key is a new line; a line that is there never changes.
INTRODUCED = json.loads((Path(__file__).parent / "introduced.json").read_text())

OTHER: dict[str, Any] = {  # a value that is allowed and not the default, where the type does not say one
    "name": "other", "protocol": "paper", "dataset.name": "digits", "dataset.label": "kind", "dataset.client": "site",
    "dataset.ignore": "id", "dataset.categories": "ward", "dataset.image_size": "8", "scenario": "iid",
    "model.name": "mlp",
    "model.features": "0", "client.optimizer": "adam", "client.last_batch": "keep", "client.augment": "none",
    "client.lr_decay": 0.5, "client.nonfinite": "skip", "participation": 0.5, "public.source": "public.npz",
    "public.distill": 0.1, "engine.name": "loop", "engine.precision": "float64", "engine.clients_at_once": 3,
    "engine.threads": 3, "algorithm.inner": "scaffold", "metrics": "mine:brier",
    "client.schedule": "cosine", "stop": "patience(5)",
    "client.class_weights": "balanced", "model.init": "weights (given in Python, 01234567)",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NewClientOptions(ClientOptions):
    clip: float = option(0.5, "a key that there was not")


@dataclass(frozen=True, kw_only=True)
class NewFnrOptions(FnrOptions):
    new: float = option(1.0, "one more")


@dataclass(frozen=True, kw_only=True)
class NewRunConfig(RunConfig):
    note: str = option("none", "another")
    client: NewClientOptions
    fnr: NewFnrOptions | None


@dataclass(frozen=True, kw_only=True)
class FasterClientOptions(ClientOptions):
    lr: float = option(0.5, "learning rate")


@dataclass(frozen=True, kw_only=True)
class FasterRunConfig(RunConfig):
    client: FasterClientOptions


@pytest.fixture
def fresh() -> Iterator[None]:
    """Schemas are built once; a test that changes what they are built from begins and ends without."""
    forget_schemas()
    yield
    forget_schemas()


def forget_schemas() -> None:
    for cached in (schema.section_classes, schema.keys_by_name, schema.text_keys, schema.introduced):
        cached.cache_clear()


def other_value(key: keys.Key) -> Any:
    """A value that the key does not have by default."""
    if key.name in OTHER:
        return OTHER[key.name]
    if isinstance(key.default, bool):
        return not key.default
    choices = [word.strip('"') for word in key.type_name.split(" | ") if word.startswith('"')]
    if choices and not isinstance(key.default, float):
        return next((choice for choice in choices if choice not in (key.default, "constant")), 2)
    if isinstance(key.default, int):
        return key.default + 1
    return key.default / 2 if key.default else 0.5


@pytest.mark.parametrize("method", registry.algorithms())
def test_every_key_that_is_changed_changes_the_hash(method: str) -> None:
    plain = loads("", [f"algorithm={method}", "fnr=on"])
    assert plain.sha256 != loads("", [f"algorithm={method}"]).sha256
    hashes = {plain.sha256}
    for key in describe_keys():
        own = key.method == method
        common = not key.name.startswith(("algorithm.", "leaks.")) and key.name not in ("fnr", "scenario")
        if own or (common and method == "fedavg"):
            changed = with_keys(plain, {key.name: other_value(key)})
            assert changed.sha256 not in hashes, key.name
            hashes.add(changed.sha256)


def test_keys_at_their_defaults_stay_out_of_the_hash() -> None:
    assert loads("").sha256 == loads("rounds = 10\n[client]\nlr = 0.01\n").sha256
    assert loads("", ["algorithm=moon"]).sha256 == loads("", ["algorithm=moon", "algorithm.mu=1"]).sha256
    assert loads("", ["fnr=on"]).sha256 == loads("", ["fnr.share=0.5"]).sha256 != loads("").sha256
    assert load("digits").sha256 != loads("", name="digits").sha256  # a recipe's values are not defaults


@settings(deadline=None, max_examples=30)
@given(st.permutations([("rounds", 3), ("seed", 2), ("client.lr", 0.5), ("fnr.weight", 0.25), ("algorithm", "moon")]))
def test_the_order_of_keys_is_not_in_the_hash(keys: list[tuple[str, Any]]) -> None:
    assert loads("", dict(keys)).sha256 == loads("", dict(sorted(keys))).sha256


def test_whole_numbers_true_and_shares_are_told_apart() -> None:
    hashes = [loads("", {"validation.size": size}).sha256 for size in (0, 1, 0.5)]
    assert len({*hashes, loads("", {"client.augment": True}).sha256}) == 4


def test_a_new_key_changes_no_hash(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    def hashes() -> list[str]:
        given = ([], ["seed=3"], ["fnr=on"], ["algorithm=moon", "fnr.weight=0.2"], ["protocol=paper", "fnr=on"])
        return [loads("", words).sha256 for words in given]

    before = hashes()

    extra = Option("new", float, 1.0, "one more")
    options = registry.options
    monkeypatch.setattr(schema, "RunConfig", NewRunConfig)
    monkeypatch.setattr(registry, "options", lambda name: (*options(name), extra))
    forget_schemas()
    assert hashes() == before
    changed = [["client.clip=1"], ["note=x"], ["algorithm.new=2"], ["fnr.new=2"]]
    assert len({loads("", words).sha256 for words in changed} | set(before)) == len(before) + len(changed)


def test_a_default_that_changes_keeps_every_hash_if_its_first_value_is_written_down(
    monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    before = loads("").sha256, loads("", ["client.lr=0.5"]).sha256

    monkeypatch.setattr(schema, "RunConfig", FasterRunConfig)
    monkeypatch.setattr(schema, "FIRST_DEFAULTS", {"": schema.FIRST_DEFAULTS[""] | {"client.lr": 0.01}})
    forget_schemas()
    assert (loads("", ["client.lr=0.01"]).sha256, loads("").sha256) == before


def test_what_keys_were_introduced_with_never_changes() -> None:
    for method in registry.algorithms():
        written = INTRODUCED[""] | INTRODUCED[method]
        found = schema.introduced(method)
        assert found.keys() == written.keys(), f"{method}: write new keys into tests/introduced.json"
        assert found == written, f"{method}: write the first default into FIRST_DEFAULTS of config/schema.py"


def test_the_data_set_is_in_the_hash_under_the_name_that_its_key_had_first() -> None:
    told = {"dataset": json.dumps("digits"), "seed": "3"}
    expected = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    spellings = ['dataset = "digits"', 'dataset.name = "digits"', '[dataset]\nname = "digits"']
    first = ["seed=3", "engine.precision=float32", "dataset.scale=none"]  # a first default is not in the hash
    assert {loads(text, first).sha256 for text in spellings} == {expected}


def test_every_option_of_a_method_of_ones_own_is_in_the_hash() -> None:
    mine = replace(loads(""), algorithm=MethodOptions(name="not_there:Mine", options={"mu": 1.0}))
    without = replace(mine, algorithm=MethodOptions(name="not_there:Mine"))
    assert mine.sha256 != without.sha256  # and nothing was imported to know it


def test_a_grid_of_the_first_format_is_known_by_its_names(tmp_path: Path) -> None:
    cells = grid("digits", [], ["algorithm=fedavg,scaffold"], [0])
    write_grid(tmp_path, cells)
    path = tmp_path / "grid.json"
    written = json.loads(path.read_text())
    names = list(written["cells"])
    refused = {
        (1, *names, "moon-seed-0"): "its run moon-seed-0", (2, *names): "another config", (3, *names): "format 3"
    }  # fmt: skip
    assert written["format"] == 2
    check_comparison_folder(tmp_path, cells)
    path.write_text(json.dumps({"format": 1, "cells": dict.fromkeys(names, "0" * 64)}))
    check_comparison_folder(tmp_path, cells)
    for (number, *there), said in refused.items():
        path.write_text(json.dumps({"format": number, "cells": dict.fromkeys(there, "0" * 64)}))
        with pytest.raises(ConfigError, match=said):
            check_comparison_folder(tmp_path, cells)
