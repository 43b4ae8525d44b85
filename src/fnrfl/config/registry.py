"""What there is, by name, without importing it: the source of `fnrfl list`, of checks on names and of every hint.

Methods are read from their files as text, so that a typo or `--help` does not have to wait for torch.
"""

from __future__ import annotations

import dataclasses
import importlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fnrfl import usercode
from fnrfl.config.declarations import Entry, read_entry
from fnrfl.config.typed import PassedLabel
from fnrfl.core.errors import ConfigError
from fnrfl.core.options import Option, options_of
from fnrfl.core.training import FnrOptions
from fnrfl.core.words import choices

if TYPE_CHECKING:
    from fnrfl.core.algorithm import Algorithm

PACKAGE_FOLDER = Path(__file__).parent.parent
RECIPES = Path(__file__).parent / "recipes"

MODELS = {
    "resnet18": "ResNet-18 with the CIFAR stem; resnet18(head=1000) has the paper's 1000 outputs",
    "resnet50": "ResNet-50 with the CIFAR stem; resnet50(head=1000) is what the paper's released code builds",
    "vgg11": "VGG-11 without normalisation, for 32x32 images",
    "simple-cnn": "NIID-Bench's small net: two 5x5 convolutions and three linear layers",
    "cnn": "two 3x3 convolutions and one linear layer; cnn(norm=batch) has BatchNorm",
    "logistic": "logistic regression, one linear layer",
    "mlp": "linear layers with ReLU; mlp(hidden=128, depth=2, norm=batch)",
}
# Methods that are there to be compared with, and that no page calls best.
CONTROLS = (
    *("bn-recalibrate", "centralised", "local-only", "public-finetune", "public-only", "public-returned"),
    "public-share",
)
# Methods of which FNR changes nothing, because no client trains.
UNREFINED = ("centralised", "public-only")
DATASETS = {
    "digits": "1,797 handwritten digits of 8x8 pixels, part of the package",
    "fashion-mnist": "70,000 grey images of clothes, 28x28 pixels",
    "cifar10": "60,000 colour images of ten things, 32x32 pixels",
}
DATASET_FORMS = {
    "file.npz": "your arrays: x_train, y_train, x_test, y_test, or x, y",
    "file.csv": "your table with a label column; also .tsv, .xlsx, .parquet",
    "file.json": "users and their examples, as LEAF writes them",
    "folder/": "your images, one folder per class; or a file or folder of each client",
    "module:function": "your function that returns the data",
}
PENALTIES = {
    "relative": "squared gap between class norm and target, in units of the target",
    "squared": "squared gap",
    "absolute": "absolute gap",
    "huber": "squared near the target, absolute far from it",
    "per-sample": "squared gap of every example's norm",
    "log-ratio": "squared logarithm of norm over target",
    "literal": "the paper's signed sum, read to first order; for study only",
    "constant": "the released code's: a number without gradient (a leak switch)",
}
ENGINES = {
    "auto": "a fixed rule of model, device and cohort",
    "loop": "one client after another: the reference",
    "batched": "clients of a cohort in vectorised steps, sixteen at a time",
    "gpu": "the same on an NVIDIA GPU, with captured steps",
    "ray": "clients in processes on one or several machines, which Ray starts",
    "flower": "clients on other machines, over Flower: `fnrfl deploy`",
}


def algorithms() -> dict[str, str]:
    """Names of the methods and the idea of each; FNR is not one of them, since it wraps any of them."""
    return {entry.name: entry.idea for entry in methods()}


def methods() -> tuple[Entry, ...]:
    """The methods, with what each needs and sends."""
    return tuple(read_entry(path) for path in _files().values())


def method_names() -> list[str]:
    """Names of the methods; no file is read."""
    return list(_files())


@cache
def display_name(name: str) -> str:
    """What people call a method, as its file begins: FedAvg, KT-pFL; of a user's own, the class."""
    path = _files().get(name)
    return read_entry(path).idea.partition(":")[0] if path else name.rpartition(":")[2]


def scenarios() -> dict[str, str]:
    """What a scenario can be made of, as it is typed, and the meaning of each part."""
    from fnrfl.data.scenarios import describe

    return describe()


def recipes() -> dict[str, str]:
    """Names of the packaged recipes and the comment that each opens with."""
    paths = sorted(RECIPES.glob("*.toml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in paths}


def is_own_model(words: str) -> bool:
    """Whether a model is a user's, whatever it is called, and not one of fnrfl's, perhaps with options."""
    return isinstance(words, PassedLabel) or words.partition("(")[0].strip() not in MODELS


def options(name: str) -> tuple[Option, ...]:
    """The options of a method; those of "fnr" are the [fnr] section, and a method that was passed in has its own."""
    if name == "fnr":
        return options_of(FnrOptions)
    if isinstance(name, PassedLabel):
        return ()
    if ":" not in name:
        return _method(name).options
    cls = _import_own(name)
    where = f"The fields of {cls.__module__}:{cls.__name__} cannot be read"
    with usercode.errors_in_words(where, "correct their types."):
        return options_of(cls)


def load_method(name: str) -> type[Algorithm]:
    """The class of a method, its own ("scaffold", "fnr") or a user's ("my_pkg.method:MyMethod"); imports it."""
    if ":" in name:
        return _import_own(name)
    entry = _method(name)
    method: type[Algorithm] = getattr(importlib.import_module(entry.module), entry.class_name)
    return method


def _files() -> dict[str, Path]:
    """The file of every method, by the method's name."""
    paths = sorted((PACKAGE_FOLDER / "algorithms").glob("*.py"))
    return {path.stem.replace("_", "-"): path for path in paths if path.stem[0] != "_" and path.stem != "fnr"}


def _method(name: str) -> Entry:
    path = PACKAGE_FOLDER / "algorithms/fnr.py" if name == "fnr" else _files().get(name)
    if path is None:
        among = choices(name, _files())
        raise ConfigError(f'algorithm.name = "{name}" is not known. {among}, or "module:Class" of your own.')
    return read_entry(path)


def _import_own(name: str) -> type[Algorithm]:
    """A user's class, found in the working folder or on the path."""
    cls = usercode.fetch(f'algorithm.name = "{name}"', usercode.target("algorithm.name", name))
    from fnrfl.core.algorithm import Algorithm

    if not (isinstance(cls, type) and issubclass(cls, Algorithm) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f'algorithm.name = "{name}" must be a dataclass that derives from fnrfl\'s Algorithm.')
    return cls
