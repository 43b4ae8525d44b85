"""Use the model that came out of a run: score it on data, or ask it about examples without labels."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fnrfl import events, runs
from fnrfl import trust as trusted
from fnrfl.config import RunConfig
from fnrfl.core.net import Net
from fnrfl.core.types import State
from fnrfl.data import readers
from fnrfl.data.batches import WHOLE, scaled
from fnrfl.data.datasets import Dataset, _features, _labels, _tensor, load
from fnrfl.data.sources import CIFAR_BATCHES, NAMED, UNREADABLE
from fnrfl.errors import CompatibilityError, ConfigError
from fnrfl.evaluate import Score
from fnrfl.evaluate import evaluate as score

TEST, ALL = "the test part", "all examples"


@dataclass(frozen=True, eq=False)
class Trained:
    """A model from a run directory, and what it can be asked."""

    run_dir: Path
    config: RunConfig
    net: Net
    state: State
    classes: tuple[str, ...]
    input_shape: tuple[int, ...]
    pixels: bool  # bytes from 0 to 255, not numbers of any size


@dataclass(frozen=True, eq=False)
class Asked:
    """Examples in the form that a model takes them; y is None where nobody knows."""

    x: Tensor
    y: Tensor | None
    names: Sequence[str]
    what: str  # which examples of the data these are


@dataclass(frozen=True, eq=False)
class Evaluation:
    """How good a model is on some data."""

    trained: Trained
    data: str
    what: str
    score: Score

    def summary(self) -> dict[str, Any]:
        """The scores as one JSON object."""
        return {
            "run_dir": str(self.trained.run_dir),
            "data": self.data,
            "part": self.what,
            "examples": int(self.score.count.sum()),
            "accuracy": self.score.accuracy,
            "balanced_accuracy": self.score.balanced,
            "loss": self.score.loss,
            "classes": list(self.trained.classes),
            "per_class": [None if share != share else share for share in self.score.per_class.tolist()],
            "examples_per_class": [int(count) for count in self.score.count],
            "leaks": list(self.trained.config.leaks_on),
        }


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says about each example."""

    trained: Trained
    names: Sequence[str]
    labels: list[str]
    probabilities: Tensor  # [n, C]

    def to_csv(self) -> str:
        """A line per example: its name, the most likely class, and the probability of each."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["example", "label", *(f"p_{name}" for name in self.trained.classes)])
        for name, label, shares in zip(self.names, self.labels, self.probabilities.tolist(), strict=True):
            writer.writerow([name, label, *(f"{share:.6g}" for share in shares)])
        return text.getvalue()


def evaluate(run_dir: str | Path, data: str, *, trust: bool = False) -> Evaluation:
    """Score the model of a finished run on a data set, a file, a folder of images or what a function returns.

    Data with a test part is judged by that part, and other data by all of it. No feature noise is laid over it.
    """
    trained = open_run(run_dir, trust=trust)
    trusted.given("dataset", data)
    asked = examples(trained, data)
    if asked.y is None:
        raise ConfigError(f"{data} has no labels, so nothing can be scored. Use `fnrfl predict`, or add the labels.")
    found = score(trained.net, trained.state, asked.x, asked.y, len(trained.classes))
    return Evaluation(trained, data, asked.what, found)


def predict(run_dir: str | Path, data: str, *, trust: bool = False) -> Prediction:
    """What the model of a finished run says about each example; the data may have no labels."""
    trained = open_run(run_dir, trust=trust)
    trusted.given("dataset", data)
    asked = examples(trained, data)
    shares = []
    with torch.no_grad():
        for x in asked.x.split(WHOLE):
            x = scaled(x, trained.net.dtype)
            logits = trained.net.look(trained.state.params, trained.state.buffers, x).logits
            shares.append(logits[:, : len(trained.classes)].softmax(1))  # outputs beyond the classes mean nothing
    probabilities = torch.cat(shares)
    labels = [trained.classes[index] for index in probabilities.argmax(1).tolist()]
    return Prediction(trained, asked.names, labels, probabilities)


def open_run(run_dir: str | Path, *, trust: bool = False) -> Trained:
    """The model of a finished run; `trust` allows code that its config.toml names and that was never allowed before."""
    result = runs.load(run_dir, trust=trust)
    shape = result.input_shape
    dtype = next(result.model.parameters()).dtype
    named = None if result.config.model.features == "auto" else result.config.model.features
    net = Net(result.model, torch.zeros(2, *shape, dtype=dtype), features=named)
    pixels = bool(events.read(Path(run_dir) / "events.jsonl")[0]["data"]["pixels"])
    return Trained(Path(run_dir), result.config, net, State(*net.flatten()), result.classes, shape, pixels)


# -- reading -----------------------------------------------------------------------------------------------------------


def examples(trained: Trained, data: str) -> Asked:
    """The examples that `data` names, checked against what the model was trained on."""
    x, y, classes, what = _read(trained, data)
    x = _alike(_tensor(_features(x, f"x of {data}")), trained, data)
    if not len(x):
        raise ConfigError(f"{data} has no examples; at least one is needed.")
    if y is not None:
        y = _numbered(_labels(y, f"y of {data}"), classes, trained, data)
        if len(y) != len(x):
            raise ConfigError(f"{data} has {len(x)} examples and {len(y)} labels; there must be one for each.")
    return Asked(x, y, _file_names(Path(data)) or [str(index) for index in range(len(x))], what)


def _read(trained: Trained, data: str) -> tuple[Any, Any, Sequence[str] | None, str]:
    """(x, y or None, names of the classes if they are known, which part of the data this is)."""
    path = Path(data).expanduser()
    own = data == trained.config.dataset or path.resolve() == Path(trained.config.dataset).resolve()
    if own or data in NAMED or (path / CIFAR_BATCHES[0]).is_file():
        dataset = load(data)
        return dataset.test.x, dataset.test.y, dataset.classes, TEST
    alone = _unlabelled(path, trained.input_shape)
    if alone is not None:
        return alone, None, None, ALL
    arrays: tuple[Any, ...]
    classes: Sequence[str] | None = None
    if path.suffix.lower() in readers.FILES:
        arrays, classes = readers.FILES[path.suffix.lower()](path)
    elif path.is_dir():
        arrays, classes = readers.read_images(path)
    elif ":" in data:
        made = readers.call(data)
        if isinstance(made, Dataset):
            return made.test.x, made.test.y, made.classes, TEST
        if not isinstance(made, tuple) or len(made) not in (2, 4):
            raise ConfigError(
                f"{data} returned {type(made).__name__}; it must return a fnrfl Dataset, a tuple x_train, y_train, "
                "x_test, y_test, or a tuple x, y. Change what the function returns."
            )
        arrays = made
    else:
        raise ConfigError(
            f"{data} is neither a known data set nor a file or folder that exists; give {', '.join(NAMED)}, a .npz or "
            ".csv file, a folder of images, or module:function."
        )
    return *arrays[-2:], classes, TEST if len(arrays) == 4 else ALL


def _unlabelled(path: Path, shape: tuple[int, ...]) -> Any:
    """The examples of a file without labels, or None where there are labels (or nothing that could be read)."""
    if path.suffix.lower() == ".npz" and path.is_file():
        try:
            with np.load(path, allow_pickle=False) as file:
                found = set(file.files)
                alone = next((x for x, y in (("x_test", "y_test"), ("x", "y")) if x in found and y not in found), None)
                return None if alone is None else file[alone]
        except (*UNREADABLE, AttributeError):
            return None  # the reader of labelled data says what is wrong
    if path.suffix.lower() == ".csv" and path.is_file():
        header, lines = readers._table(path)
        if len(header) != int(np.prod(shape)):
            return None
        try:
            return np.array([cells for _, cells in lines], dtype=np.float64).astype(np.float32)
        except ValueError as error:
            raise ConfigError(
                f"{path} has as many columns as the model has inputs, so none of them is the label, and not all hold "
                f"numbers ({error}). Correct them, or add the label column."
            ) from error
    if path.is_dir() and (images := readers._images(path)):
        return readers._stack(images)
    return None


def _file_names(path: Path) -> list[str] | None:
    path = path.expanduser()
    return [image.name for image in readers._images(path)] if path.is_dir() else None


def _alike(x: Tensor, trained: Trained, data: str) -> Tensor:
    """Examples of the kind that the model was trained on; a table's columns are put into its shape."""
    pixels = x.dtype == torch.uint8
    if not pixels and x.ndim == 2 and not trained.pixels and x.shape[1] == int(np.prod(trained.input_shape)):
        x = x.reshape(-1, *trained.input_shape)
    if tuple(x.shape[1:]) != trained.input_shape or pixels != trained.pixels:
        kinds = ["pixels" if bytes_ else "numbers" for bytes_ in (pixels, trained.pixels)]
        raise CompatibilityError(
            f"{data} has examples of {kinds[0]} {list(x.shape[1:])}, and the model was trained on {kinds[1]} "
            f"{list(trained.input_shape)}; they must be alike. Prepare the data in the same way."
        )
    return x


def _numbered(y: np.ndarray, classes: Sequence[str] | None, trained: Trained, data: str) -> Tensor:
    """Labels as numbers of the model's classes, matched by name where there are names."""
    if y.dtype.kind == "U":
        names = [str(label) for label in y]
    elif classes is not None and tuple(classes) != trained.classes:
        names = [str(classes[label]) for label in y if label < len(classes)]
    else:
        names = []
    if names:
        number = {name: index for index, name in enumerate(trained.classes)}
        unknown = next((name for name in names if name not in number), None)
        if unknown is not None:
            raise CompatibilityError(
                f"{data} has the class {unknown!r}, which the model does not know; its classes are "
                f"{', '.join(trained.classes)}. Rename the class or leave those examples out."
            )
        y = np.array([number[name] for name in names], dtype=np.int64)
    if len(y) and int(y.max()) >= len(trained.classes):
        raise CompatibilityError(
            f"{data} has the label {int(y.max())}, and the model knows {len(trained.classes)} classes, numbered from 0."
            " Correct the labels."
        )
    return _tensor(y)
