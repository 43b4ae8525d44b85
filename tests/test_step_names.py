"""Names of steps: the same in every process, and none for what nobody can know."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fnrfl.algorithms.moon import Contrastive
from fnrfl.core.algorithm import Objective
from fnrfl.core.fingerprint import fingerprint
from fnrfl.core.training import Training
from fnrfl.engines import step_names
from fnrfl.engines.step_names import step_name
from fnrfl.models.resnet import resnet18

LAYERS = (nn.Linear(2, 3), nn.BatchNorm1d(3), nn.TransformerEncoderLayer(4, 2))


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever works on fnrfl may have saved a file while tests run."""
    monkeypatch.setattr(step_names, "_sources_hash", lambda: "sources")


def key() -> Any:
    code = Objective.loss, Contrastive.loss
    training = Training(frozen=frozenset({"a", "b", "c", "d"}))
    return (
        fingerprint(resnet18((3, 8, 8), 10)),
        Objective(),
        code,
        training,
        torch.ones(2, 3).shape,
        torch.device("cpu"),
    )


def test_known_code_has_a_name() -> None:
    assert step_name(key()) == step_name(key()) is not None
    names = {step_name(fingerprint(layer)) for layer in LAYERS}
    assert None not in names and len(names) == len(LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_another_process_finds_the_same_name(seed: str) -> None:
    """Whatever seed it has for the hashes of strings, and wherever its objects lie."""
    code = "import test_step_names as t; t.step_names._sources_hash = lambda: 'sources'; print(t.step_name(t.key()))"
    paths = os.pathsep.join(entry for entry in [os.path.dirname(__file__), *sys.path] if entry)
    there = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
    said = subprocess.run([sys.executable, "-c", code], env=there, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == step_name(key())


class Own(nn.Linear):
    pass


@dataclass(frozen=True)
class OwnObjective(Objective):
    pass


def own_function() -> None:
    pass


def with_hook(hook: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(hook)
    return layer


def with_attribute(value: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.own = value
    return layer


UNKNOWN = {
    "a class": Own,
    "an objective": OwnObjective(),
    "a function": own_function,
    "a function of a function": functools.wraps(Objective.loss)(own_function),
    "a decorated function": torch.no_grad()(own_function),
    "a partial function": functools.partial(Objective.loss),
    "a lambda": lambda: None,
    "a layer": fingerprint(nn.Sequential(nn.Linear(2, 2), Own(2, 2))),
    "a hook": fingerprint(with_hook(own_function)),
    "a tensor of a layer": fingerprint(with_attribute(torch.ones(2))),
    "a layer that is not a part": fingerprint(with_attribute([nn.Linear(2, 2)])),
    "an object": object(),
    "a method of an object": Objective().loss,
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_unknown_code_has_none(what: str) -> None:
    assert step_name((1, [UNKNOWN[what]])) is None


def test_a_method_that_was_put_into_a_known_class_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    known = step_name(nn.ReLU)
    for forward in (functools.wraps(nn.ReLU.forward)(lambda layer, x: -x), torch.no_grad()(lambda layer, x: -x)):
        monkeypatch.setattr(nn.ReLU, "forward", forward)
        assert step_name(nn.ReLU) is None is not known


def test_values_that_look_alike_have_names_of_their_own() -> None:
    values = [
        1,
        1.0,
        True,
        "1",
        b"1",
        None,
        "None",
        (1,),
        [1],
        {1},
        {1: 1},
        ((1,),),
        ("a", "b"),
        ("a, str 'b'",),
        0.1 + 0.2,
    ]
    values += [0.3, torch.float32, "torch.float32", (1, (2, 3)), (1, 2, 3), torch.Size([1]), float("nan"), -0.0, 0.0]
    names = [step_name((value,)) for value in values]
    assert None not in names and len({*names}) == len(values)


def test_sets_are_told_in_order_and_dicts_in_theirs() -> None:
    assert step_name(frozenset("abcdefgh")) == step_name(frozenset("hgfedcba"))
    assert step_name(({"a": 1, "b": 2},)) != step_name(({"b": 2, "a": 1},))  # type: ignore[arg-type]


def test_a_source_that_was_saved_after_the_process_began_leaves_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hashed = step_names._sources_hash.__wrapped__
    monkeypatch.setattr(step_names, "_BEGAN", time.time() + 1)
    assert hashed() == hashed() is not None
    monkeypatch.setattr(step_names, "_BEGAN", 0.0)
    assert hashed() is None
    monkeypatch.setattr(step_names, "_sources_hash", hashed)
    assert step_name(key()) is None


def test_another_source_has_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    before = step_name(key())
    monkeypatch.setattr(step_names, "_sources_hash", lambda: "others")
    assert step_name(key()) != before


def test_a_file_of_a_user_s_with_the_name_of_one_of_python_s_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sched.py").write_text("from torch import nn\n\nclass MyNet(nn.Linear):\n    pass\n")
    spec = importlib.util.spec_from_file_location("sched", tmp_path / "sched.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    step_names._is_known.cache_clear()
    monkeypatch.setitem(sys.modules, "sched", module)
    assert step_name((module.MyNet,)) is None and step_name((OrderedDict, functools.partial)) is not None
    step_names._is_known.cache_clear()
