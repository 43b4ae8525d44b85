"""What a run must have is asked for before it starts, in a sentence with the value, the rule and the way out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fnrfl
from fnrfl import cli
from fnrfl.config import load, registry
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.runs.setup.build import build
from fnrfl.runs.setup.checks import NOTES, RULES, Rule

NETS = '''
from torch import nn


def whole(num_classes):
    """A net with everything that a method may need: BatchNorm, and a Linear that reads the features."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, num_classes))


def without_linear(num_classes):
    layers = [nn.Conv2d(1, num_classes, 3), nn.BatchNorm2d(num_classes), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def softmax(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes), nn.Softmax(1))


def tokens(num_classes):
    return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.LazyLinear(num_classes))
'''
BASE = ("rounds=1", "model=nets:whole", "client.epochs=1")
TOKENS = ("dataset=tokens.npz", "model=nets:tokens", "clients=2", "scenario=iid")
TABLE = ("dataset=table.csv", "model=mlp", "clients=2", "scenario=iid")
ONE_BY_ONE = ("dataset=table.csv", "model=mlp", "scenario=natural", "dataset.client=who", "public.size=0",
              "validation.size=0")  # fmt: skip

# For each row of the tables, in their order: keys of a run that breaks it.
BREAKING: tuple[tuple[str, ...], ...] = (
    ("model=nets:without_linear", "algorithm=moon"),
    ('model.features="3"', "algorithm=fedgen"),
    ("model=mlp", "algorithm=fedbn"),
    ("public.distill=0.0", "algorithm=feddf"),
    ("public.size=0", "algorithm=public-only"),
    ("stop=patience(3)", "validation.size=0"),
    (),  # only a deployment has clients on other machines
    ("client.optimizer=adam", "algorithm=scaffold"),
    (*TOKENS, "dataset.missing=mean"),
    (*TOKENS, "dataset.scale=standard"),
    ("client.class_weights=1,2",),
    (*TOKENS, "scenario=feature-noise(0.1)"),
    ("algorithm=public-share", "scenario=feature-noise(0.1, redraw=false)"),
    ("fnr=on", "fnr.share=1.0", "fnr.target=all", "clients=2", "client.dropout=0.5"),
    ("engine.threads=100000",),
    ("client.epochs=1000000000000",),
    ("client.batch=2000000000",),
    ("model=mlp(norm=batch)", "client.batch=1"),
    (),  # no scenario leaves a client empty; a file that somebody has written may
    ("client.last_batch=drop", "client.batch=1000"),
)
NOTED: tuple[tuple[str, ...], ...] = (
    ("model=nets:softmax",),
    ("public.source=public.npz", "public.size=0.3"),
    ("fnr=on", "fnr.share=0.01"),
    ("fnr=on", "algorithm=public-share"),
    (*TABLE, "dataset=one-class.npz"),
    (*TABLE, "dataset=days.npz"),
    (*TABLE, "dataset=unseen.npz", "public.size=0", "validation.size=0"),
    (*TABLE, "dataset=mine.npz", "public.source=few.npz", "fnr=on"),
    (*ONE_BY_ONE, "dataset.scale=standard"),
    (*TABLE, "dataset.scale=none"),
)


@pytest.fixture(autouse=True)
def folder(tmp_cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [str(tmp_cwd), *sys.path])
    Path("nets.py").write_text(NETS)
    dice, y = np.random.default_rng(0), np.arange(120) % 3
    np.savez("tokens.npz", x=dice.integers(9, size=(120, 5)), y=y)
    np.savez("public.npz", x=dice.random((40, 1, 8, 8), np.float32), y=np.arange(40) % 10)
    x = dice.random((120, 3), np.float32)
    np.savez("mine.npz", x=x, y=y)
    np.savez("few.npz", x=dice.random((40, 3), np.float32), y=np.arange(40) % 2, classes=np.array(["0", "1", "2"]))
    np.savez("one-class.npz", x_train=x, y_train=0 * y, x_test=x + 1, y_test=y)
    np.savez("unseen.npz", x_train=x, y_train=y % 2, x_test=x + 1, y_test=y)
    np.savez("days.npz", x=x, y=dice.geometric(0.2, 120).clip(1, 16))
    who = [0, *range(60), *range(59)]
    rows = [f"{1000 * a},{b},{kind},{one}" for (a, b, _), kind, one in zip(x, y, who, strict=True)]
    Path("table.csv").write_text("\n".join(["salary,age,kind,who", *rows]) + "\n")
    sys.modules.pop("nets", None)
    yield tmp_cwd
    sys.modules.pop("nets", None)


def pattern(rule: Rule) -> str:
    """What a rule's sentence looks like, with any values."""
    return ".*".join(re.escape(part) for part in re.split(r"\{[^}]*\}", rule.sentence))


BROKEN = [one for one in zip(RULES, BREAKING, strict=True) if one[1]]
NOTED_BY = list(zip(NOTES, NOTED, strict=True))


@pytest.mark.parametrize(("rule", "keys"), [*BROKEN, *NOTED_BY], ids=lambda one: getattr(one, "key", ""))
def test_a_run_that_breaks_a_rule_is_refused_or_noted_by_that_one(rule: Rule, keys: tuple[str, ...]) -> None:
    config = load("digits", [*BASE, *keys])
    if rule in NOTES:
        said = build(config).notices
    else:
        with pytest.raises(CompatibilityError) as refusal:
            build(config)
        said = (str(refusal.value),)
    assert any(re.fullmatch(pattern(rule), one, re.DOTALL) for one in said), said


LABELS: dict[str, tuple[Any, bool]] = {  # of 600 examples, and whether classification can be meant
    "amounts": (np.random.default_rng(0).normal(size=600), False),
    "whole amounts as floats": (np.arange(600) % 300 * 1.0, False),
    "several labels": (np.eye(4)[np.arange(600) % 4], False),
    "days": (np.random.default_rng(0).geometric(0.25, 600).clip(1, 16), False),
    "days as floats": (np.random.default_rng(0).poisson(5, 600) * 1.0, False),
    "prices": (np.arange(600) % 150 + 50, False),
    "numbered classes": (np.arange(600) % 26, True),
    "ten classes, some rare": (np.minimum(np.random.default_rng(0).geometric(0.25, 600), 10), True),
    "rare names": ([f"kind {n}" for n in np.random.default_rng(0).geometric(0.25, 600).clip(1, 16)], True),
}


@pytest.mark.parametrize("name", LABELS)
def test_whoever_brings_amounts_reads_first_what_fnrfl_is_for(name: str, caplog: pytest.LogCaptureFixture) -> None:
    y, classes = LABELS[name]
    keys: dict[str, Any] = {"dataset": (np.random.default_rng(1).random((600, 3)), y), "model": "mlp", "clients": 2}
    try:
        fnrfl.run(**keys, scenario="iid", rounds=1, out=None)
        said = caplog.messages
    except ConfigError as error:
        said = [str(error)]
    firsts = [re.split(r"(?<=\.) (?=[A-Z])", sentence)[0] for sentence in said]
    assert any("fnrfl is for classification only" in first for first in firsts) is not classes, said


def test_a_client_without_examples_is_named() -> None:
    run: Any = SimpleNamespace(config=load("digits"), partition=SimpleNamespace(sizes=np.array([3, 0])))
    assert "client 1 has no examples" in str(RULES[len(BREAKING) - 2].broken(run))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_a_sentence_has_a_value_a_rule_and_a_way_out(rule: Rule) -> None:
    """The way out is the last sentence, an order."""
    assert "{" in rule.sentence and rule.sentence.endswith(".")
    *_, way_out = re.split(r"(?<=\.) (?=[A-Z])", rule.sentence)
    assert way_out.split()[0] in ("Choose", "Give", "Leave", "Name", "Set", "Use"), way_out
    assert rule.key.rpartition(".")[2] in rule.sentence or "{found.section}" in rule.sentence


# What is missing, how that comes about, and the needs that it leaves unmet.
LACKS = {
    "public data": (["public.size=0"], {"public-labels", "distill"}),
    "data to distil on": (["public.distill=0.0"], {"distill"}),
    "a Linear": (["model=nets:without_linear"], {"features", "head"}),
    "a head": (['model.features="3"'], {"head"}),
    "BatchNorm": (["model=mlp"], {"batchnorm"}),
    "linear steps": (["client.optimizer=adam"], {"linear-optimiser"}),
}


@pytest.mark.parametrize("name", registry.algorithms())
def test_an_unmet_need_is_refused_and_no_other(name: str) -> None:
    """Whoever does not need what is missing is built, and with everything there all are, bare and under FNR."""
    needs = registry.load_method(name)().needs
    for fnr in ("off", "on"):
        build(load("digits", [*BASE, f"algorithm={name}", f"fnr={fnr}"]))
    for keys, unmet in LACKS.values():
        config = load("digits", [*BASE, f"algorithm={name}", *keys])
        if not needs & unmet:
            build(config)
            continue
        with pytest.raises(CompatibilityError, match=f"^{name} "):
            build(config)


def test_methods_that_divide_by_travel_need_linear_steps() -> None:
    assert all("linear-optimiser" in registry.load_method(name)().needs for name in ("fednova", "scaffold"))


@pytest.mark.parametrize("keys", [("public.size=0",), ("model=nets:without_linear",)])
@pytest.mark.parametrize("how", [("-o", "here"), ("--dry-run",)])
def test_a_refusal_is_one_line_and_leaves_nothing(keys: tuple[str, ...], how: tuple[str, ...], folder: Path) -> None:
    """FNR adds its own needs."""
    before = sorted(path.name for path in folder.iterdir())
    got = CliRunner().invoke(cli.app, ["run", "digits", *BASE, "fnr=on", *keys, *how])
    assert got.exit_code == 2 and "Traceback" not in got.output, got.output
    assert len(got.stderr.splitlines()) == 1 and re.match("fnrfl: (fnr|FNR) ", got.stderr)
    assert sorted(path.name for path in folder.iterdir() if path.name not in ("__pycache__", "state")) == before
