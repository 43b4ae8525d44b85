"""What a method cannot do without is asked for at the start, in a sentence with the way out; nothing is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fnrfl import cli
from fnrfl.config import load, registry
from fnrfl.core.errors import CompatibilityError
from fnrfl.runs.setup.build import build

NETS = '''
from torch import nn


def whole(num_classes):
    """A net with everything that a method may need: BatchNorm, and a Linear that reads the features."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, num_classes))


def without_linear(num_classes):
    layers = [nn.Conv2d(1, num_classes, 3), nn.BatchNorm2d(num_classes), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)
'''

# What is missing, how that comes about, and the needs that it leaves unmet.
LACKS = {
    "public data": (["public.size=0"], {"public-labels", "distill"}),
    "data to distil on": (["public.distill=0.0"], {"distill"}),
    "a Linear": (["model=nets:without_linear"], {"features", "head"}),
    "a head": (['model.features="3"'], {"head"}),
    "BatchNorm": (["model=mlp"], {"batchnorm"}),
    "linear steps": (["client.optimizer=adam"], {"linear-optimiser"}),
}
SENTENCES = {
    "public-labels": ("needs labelled public data and there is none", "Set public.size = 0.1, give public.source"),
    "distill": ("needs public data to distil on and there is none", "Set public.size = 0.1 and leave public.distill"),
    "features": ("needs features", "with model.features"),
    "head": ("needs a last Linear that reads the features", "Choose another model"),
    "batchnorm": ("BatchNorm layers", "Choose a model with BatchNorm"),
    "linear-optimiser": ("needs local steps that are linear", 'Set client.optimizer = "sgd"'),
}
BASE = ("rounds=1", "model=nets:whole", "client.epochs=1")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "nets.py").write_text(NETS)
    sys.modules.pop("nets", None)
    yield tmp_path
    sys.modules.pop("nets", None)


def needs(name: str) -> frozenset[str]:
    return registry.load_method(name)().needs


each_lack = pytest.mark.parametrize("lack", LACKS)
each_method = pytest.mark.parametrize("name", registry.algorithms())


@each_method
@each_lack
def test_a_need_that_is_not_met_is_refused_and_no_other(name: str, lack: str) -> None:
    """Whoever does not need what is missing is built."""
    keys, unmet = LACKS[lack]
    config = load("digits", [*BASE, f"algorithm={name}", *keys])
    missing = sorted(needs(name) & unmet)
    if not missing:
        build(config)
        return
    with pytest.raises(CompatibilityError) as refusal:
        build(config)
    said = str(refusal.value)
    assert any(all(part in said for part in SENTENCES[need]) for need in missing), said
    assert said.startswith(name) and said.endswith(".")


@each_method
def test_with_everything_there_every_method_is_built_bare_and_under_fnr(name: str) -> None:
    for fnr in ("off", "on"):
        build(load("digits", [*BASE, f"algorithm={name}", f"fnr={fnr}"]))


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (["public.size=0"], ("FNR needs labelled public data; public.size is 0", "or set fnr = off")),
        (["model=nets:without_linear"], ("fnr around", "needs features", "model.features")),
    ],
)
def test_fnr_adds_its_own_needs(name: str, keys: list[str], parts: tuple[str, ...], folder: Path) -> None:
    got = CliRunner().invoke(cli.app, ["run", "digits", *BASE, f"algorithm={name}", "fnr=on", *keys, "-o", "here"])
    assert got.exit_code == 2
    assert all(part in got.stderr for part in parts)
    assert not (folder / "here").exists()


REFUSED = [
    (next(name for name in registry.algorithms() if need in needs(name)), keys)
    for need in SENTENCES
    for keys, unmet in LACKS.values()
    if need in unmet and any(need in needs(name) for name in registry.algorithms())
]


@pytest.mark.parametrize(("name", "keys"), REFUSED)
@pytest.mark.parametrize("how", [("-o", "here"), ("--dry-run",)])
def test_a_refusal_is_one_line_exit_code_2_and_leaves_nothing_behind(
    name: str, keys: list[str], how: tuple[str, ...], folder: Path
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    got = CliRunner().invoke(cli.app, ["run", "digits", *BASE, f"algorithm={name}", *keys, *how])
    assert got.exit_code == 2, got.output
    assert len(got.stderr.splitlines()) == 1 and got.stderr.startswith(f"fnrfl: {name} ")
    assert "Traceback" not in got.output
    left = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    assert left == before


@pytest.mark.parametrize("name", [name for name in registry.algorithms() if "linear-optimiser" in needs(name)])
def test_adam_is_refused_by_methods_that_divide_by_travel(name: str) -> None:
    with pytest.raises(CompatibilityError, match='client.optimizer = "adam" is not. Set client.optimizer = "sgd"'):
        build(load("digits", [*BASE, f"algorithm={name}", "client.optimizer=adam"]))


def test_those_are_at_least_the_two_of_the_first_version() -> None:
    assert {"fednova", "scaffold"} <= {name for name in registry.algorithms() if "linear-optimiser" in needs(name)}
