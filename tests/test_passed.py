"""Data, models, methods and weights that are passed in as Python objects: the same run as by name, or a sentence."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from typer.testing import CliRunner

import fnrfl
from fnrfl.algorithms.fednova import FedNova
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.algorithms.fnr import FNR
from fnrfl.cli import app
from fnrfl.core.algorithm import Algorithm, Objective, option
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.object_hash import module_hash, object_hash
from fnrfl.core.types import Engine, LocalTask, State
from fnrfl.data.datasets import object_source
from fnrfl.data.objects import read_object, values_hash

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(160, 5)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 0.8)
KEYS: dict[str, Any] = {
    **{"rounds": 1, "clients": 3, "scenario": "iid", "validation": {"size": 0}, "public": {"size": 0.1}},
    "client": {"epochs": 1, "batch": 16},
}


class Net(nn.Module):
    """A small net with state of every kind."""

    def __init__(self, num_classes: int = 3, hidden: int = 8) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, hidden), nn.BatchNorm1d(hidden)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))  # type: ignore[no-any-return]


class Items(Dataset[Any]):
    """A map-style data set like torchvision's."""

    def __init__(self, x: Any = X, y: Any = Y, item: Callable[[Any, Any], Any] = lambda x, y: (x, y)) -> None:
        self.x, self.y, self.item = x, y, item

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, place: int) -> Any:
        return self.item(self.x[place], self.y[place])


class Columns:
    """A data set like Hugging Face's: no torch Dataset, items as dicts, and features that name the classes."""

    column_names = ("idx", "x", "label")

    def __init__(self, names: list[str] | None = None) -> None:
        self.features = {"label": type("ClassLabel", (), {"names": names})()} if names else {}

    def __len__(self) -> int:
        return len(Y)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"idx": place, "x": X[place].tolist(), "label": int(Y[place])}


@dataclass(frozen=True)
class Halving(Algorithm):
    """FedAvg whose server goes a part of the way."""

    part: float = option(0.5, "how far the server goes", gt=0, le=1)

    def round(self, state: State, cohort: Tensor, engine: Engine) -> State:
        got = engine.fold(cohort, LocalTask(Objective(), "local", state), mean=lambda r: {"x": r.params})
        return state.step(got, state.params + self.part * (got.mean["x"] - state.params))


def run(**given: Any) -> fnrfl.Result:
    return fnrfl.run(**{"dataset": (X, Y), "model": "mlp(hidden=8)", "out": None, **KEYS, **given})


pytestmark = pytest.mark.usefixtures("tmp_cwd")


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "mine.npz"
    np.savez(path, x=X, y=Y)
    return run(dataset=str(path)).model_sha256


# -- data --------------------------------------------------------------------------------------------------------------

SAME_DATA: dict[str, Any] = {
    "arrays": (X, Y),
    "tensors": (torch.tensor(X), torch.tensor(Y)),
    "lists": (X.tolist(), Y.tolist()),
    "four arrays": "",  # see below
    "a function": lambda: (X, Y),
    "a tensor data set": TensorDataset(torch.tensor(X), torch.tensor(Y)),
    "pairs": Items(),
    "named values": Items(item=lambda x, y: {"image": x, "label": y}),
    "a transform": Items(2 * X, item=lambda x, y: (torch.tensor(x) / 2, int(y))),
    "columns": Columns(),
    "a section": {"name": (X, Y), "scale": "standard"},
    "a part by name": {"train": Items()},
}


@pytest.mark.parametrize("form", SAME_DATA)
def test_data_in_memory_is_data_in_a_file(form: str, by_name: str) -> None:
    given = SAME_DATA[form]
    if form == "four arrays":
        made = object_source((X, Y), "dataset").dataset()
        given = (made.train.x, made.train.y, made.test.x, made.test.y)
    assert run(dataset=given).model_sha256 == by_name


def test_train_and_test_as_a_pair() -> None:
    one, other = Items(X[:100], Y[:100]), Items(X[100:], Y[100:])
    arrays = run(dataset=(X[:100], Y[:100], X[100:], Y[100:]))
    pair, named = run(dataset=(one, other)), run(dataset={"train": one, "test": other})
    assert arrays.data.examples == (100, 60)
    assert arrays.model_sha256 == pair.model_sha256 == named.model_sha256
    assert arrays.data.sha256 == pair.data.sha256


def test_arrays_with_clients_and_gaps() -> None:
    who = np.array(["north", "south", "a<b>", "east"])[np.arange(len(Y)) % 4]
    gaps = np.where(X > 1.5, np.nan, X)
    np.savez("mine.npz", x=gaps, y=Y, client=who)
    keys: dict[str, Any] = {"scenario": "natural", "out": None, "rounds": 1, "client": KEYS["client"]}
    named = fnrfl.run(dataset={"name": "mine.npz", "missing": "mean"}, **keys)
    given = fnrfl.run(dataset={"name": (gaps, Y, who.tolist()), "missing": "mean"}, **keys)
    assert given.model_sha256 == named.model_sha256
    assert given.data.clients == named.data.clients and set(given.data.clients or ()) == set(who.tolist())


def test_public_data() -> None:
    more = np.random.default_rng(5).normal(size=(40, 5)).astype(np.float32)
    np.savez("public.npz", x=more, y=Y[:40])
    fnr: dict[str, Any] = {"fnr": {"epochs": 1}, "rounds": 1}
    named = run(public={"source": "public.npz", "ranking": 0.5}, **fnr)
    given = run(public={"source": (more, Y[:40]), "ranking": 0.5}, **fnr, out="given")
    assert given.model_sha256 == named.model_sha256
    assert run(public=(more, Y[:40]), **fnr).config.public.source == given.config.public.source
    Path("given/model.safetensors").unlink()
    with pytest.raises(ConfigError, match="the run was given its public data in Python"):
        fnrfl.resume("given", dataset=(X, Y))
    assert fnrfl.resume("given", dataset=(X, Y), public=(more, Y[:40])).model_sha256 == given.model_sha256


def test_one_content_one_hash() -> None:
    tensors = torch.tensor(X), torch.tensor(Y)
    forms: list[Any] = [(X, Y), tensors, Items(), TensorDataset(*tensors), lambda: (X, Y)]
    hashes = {values_hash(read_object(form, "dataset")) for form in forms}
    assert len(hashes) == 1
    others = [(X + 1, Y), (X, Y + 1), (X, Y, X, Y), (X.astype(float), Y), (X, np.array(["a", "b", "c"], object)[Y])]
    assert len(hashes | {values_hash(read_object(form, "dataset")) for form in others}) == 6


def test_names_of_classes() -> None:
    assert run(dataset=Columns(["low", "middle", "high"])).classes == ("low", "middle", "high")
    assert run(dataset=with_classes(X, Y, ["a", "b", "c"])).classes == ("a", "b", "c")
    assert run(dataset=(X, np.array(["no", "maybe", "yes"])[Y])).classes == ("maybe", "no", "yes")


def with_classes(x: Any, y: Any, classes: list[str]) -> Items:
    items = Items(x, y)
    items.classes = classes  # type: ignore[attr-defined]
    return items


def test_labels_are_matched_by_name() -> None:
    known = Y[100:] > 0  # the test part lacks the first class, so that its own numbers are one lower
    one = with_classes(X[:100], Y[:100], ["a", "b", "c"])
    other = with_classes(X[100:][known], Y[100:][known] - 1, ["b", "c"])
    right = run(dataset=(X[:100], Y[:100], X[100:][known], Y[100:][known]), out="right")
    pair = run(dataset=(one, other))
    assert pair.classes == ("a", "b", "c") and pair.accuracy == right.accuracy
    reversed_names = with_classes(X[:100], 2 - Y[:100], ["c", "b", "a"])
    for data in ((one, other), other, (reversed_names, other)):
        assert fnrfl.evaluate(pair, data).accuracy == right.accuracy
    for names, said in ((["a", "b", "d"], "class 'd'"), (["a", "b"], "label 2 and names 2")):
        with pytest.raises(ConfigError, match=rf"dataset \(test\) has the {said}"):
            run(dataset=(one, with_classes(X[100:], Y[100:], names)))


def test_transforms_draw_the_same_each_time_and_leave_the_callers_stream() -> None:
    noisy = Items(item=lambda x, y: (torch.tensor(x) + torch.rand(5), y))
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = run(dataset=noisy)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert run(dataset=noisy).data.sha256 == first.data.sha256


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_deep_pictures_are_refused(mode: str) -> None:
    image = pytest.importorskip("PIL.Image")
    deep = [image.new(mode, (4, 4), 1000 + at) for at in range(4)]
    with pytest.raises(ConfigError, match=f"Item 0 of dataset .*mode {mode}, not 8 bits"):
        read_object(Items(deep, [0, 1, 0, 1]), "dataset")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def failing(x: Any, y: Any) -> Any:
    raise OSError("no such picture")


class Noise(nn.Module):
    """A layer that draws for itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) if self.training else x


def with_bias(bias: Tensor) -> dict[str, Tensor]:
    return Net().state_dict() | {"last.bias": bias}


# What is passed in and cannot be used, and what the refusal has of it: value, rule or way out.
WRONG_DATA: list[tuple[Any, str]] = [
    ((X, Y[:-1]), "160 examples and 159 labels"),
    ((X, Y, [0] * 159), "clients"),
    ({"name": (X, Y), "label": "b"}, "dataset.label names a column of a table"),
    (Endless(), "iterable data set (Endless), which has no length"),
    (Items([np.zeros(3), np.zeros(4)], [0, 1]), "Item 1 of dataset is float64[4], and item 0 is float64[3]"),
    (Items([], []), "dataset has no items"),
    (Items(item=lambda x, y: x), "are a ndarray; they must be pairs (x, y)"),
    (Items(item=lambda x, y: (x, y, 0)), "are a tuple of 3; they must be pairs"),
    (Items(item=lambda x, y: {"a": x, "b": x, "label": y}), "are named a, b, label; they must be pairs"),
    (Items(item=failing), "Item 0 of dataset could not be read (OSError: no such picture)"),
    (Items(item=lambda x, y: (x, [0, 1])), "shape [160, 2]"),
    ({"train": Items(), "validation": Items()}, "train, validation"),
    ((X, Y, X, Y, X), "tuple of 5"),
    ([X, Y], "dataset is list"),
    (lambda: 1 / 0, "dataset failed (ZeroDivisionError"),
    ((X * np.nan, Y), "not finite"),
    ((torch.tensor(X).to_sparse(), Y), "is a sparse tensor; it must be dense"),
    (([[1.0], [1.0, 2.0]], [0, 1]), "all its rows must have the same shape"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({"dataset": given}, words) for given, words in WRONG_DATA),
    ({"model": Net(2)}, "has 2 outputs"),
    ({"model": nn.Linear(4, 3)}, "examples of shape [5]"),
    ({"model": object()}, "model is a object; it must be a name, a torch.nn.Module"),
    ({"model": lambda: 3}, "type int; it must return a torch.nn.Module"),
    ({"model": lambda width: Net()}, "could not be built (TypeError"),
    ({"model": nn.Sequential(nn.Linear(5, 3), Noise())}, "Noise"),
    ({"model": {"name": "mlp", "init": "best.pt"}}, 'model.init = "best.pt"'),
    ({"model": Net, "init": {}}, "no first.weight, which the model has with shape [8, 5]"),
    ({"model": Net, "init": Net().state_dict() | {"b": X}}, "init has b, which the model has not"),
    ({"model": Net, "init": with_bias(torch.zeros(1))}, "last.bias with shape [1], and the model has it with [3]"),
    ({"model": Net, "init": Net()}, "init is a Net; it must be a state_dict"),
    ({"model": Net, "init": {"a": "b"}}, "init holds something that is no tensor"),
    ({"algorithm": {"name": FedProx(mu=0.5), "mu": 0.4}}, "algorithm.mu is given twice"),
    ({"algorithm": FNR(FedProx())}, "algorithm is FNR, which wraps any method"),
    ({"algorithm": object()}, "algorithm is a object; it must be a name, or a method"),
    ({"algorithm": {"name": Halving(), "part": 0.1}}, "algorithm.part"),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_cannot_be_used_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(FnrflError) as refused:
        run(**given, out=True)
    assert words in str(refused.value)
    assert not Path("runs").exists()


def test_data_is_no_recipe() -> None:
    with pytest.raises(ConfigError, match="The recipe is a tuple; it must be a name or a TOML file"):
        fnrfl.run((X, Y))  # type: ignore[arg-type]


# -- models and weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_module_is_its_function_and_its_weights(engine: str, threads: int) -> None:
    """A module starts from its own weights; a factory, given or named, is called under the run's seed."""
    keys = {"engine": {"name": engine, "threads": threads}}
    source = "import sys\nfrom test_passed import Net\ndef make(num_classes):\n    return Net(num_classes)\n"
    Path("own_nets.py").write_text(source)
    named, factory = run(model="own_nets:make", **keys), run(model=Net, **keys)
    assert named.model_sha256 == factory.model_sha256
    torch.manual_seed(5)
    module = Net()
    given = run(model=module, **keys)
    assert given.model_sha256 == run(model=Net, init=module.state_dict(), **keys).model_sha256
    assert given.model_sha256 == run(model="own_nets:make", init=module.state_dict(), **keys).model_sha256
    assert given.model_sha256 != factory.model_sha256
    assert given.model_sha256 != run(model=Net(), **keys).model_sha256


def test_the_callers_module_and_settings_stay() -> None:
    module = Net().eval()
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(3)
    stream = torch.random.get_rng_state()
    with torch.no_grad():
        result = run(model=module)
        assert not torch.is_grad_enabled()
    assert torch.equal(stream, torch.random.get_rng_state())
    assert not module.training and type(module.drop) is nn.Dropout
    assert all(torch.equal(before[name], now) for name, now in module.state_dict().items())
    with torch.no_grad():
        module.first.weight.zero_()  # nor does the run notice what happens to the module later
    assert result.model.get_submodule("model").state_dict().keys() == before.keys()
    assert run(model=result.model).model_sha256 == run(model=result.model).model_sha256


def test_runs_at_once_share_a_module() -> None:
    module = Net()
    with ThreadPoolExecutor(3) as threads:
        found = [*threads.map(lambda _: run(model=module).model_sha256, range(3))]
    assert found == [run(model=module).model_sha256] * 3


def test_a_lazy_module_is_drawn_under_the_seed() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3))

    assert run(model=make()).model_sha256 == run(model=make).model_sha256


def test_first_weights_of_another_run() -> None:
    first = run(rounds=1)
    start = {name: tensor.clone() for name, tensor in first.weights.items()}
    again = run(rounds=1, init=start, client={"epochs": 1, "lr": 1e-12})
    assert all(torch.allclose(start[name], again.weights[name], atol=1e-6) for name in start)
    exported = run(rounds=1, init=first.model.state_dict(), client={"epochs": 1, "lr": 1e-12})
    assert exported.model_sha256 == again.model_sha256


# -- methods -----------------------------------------------------------------------------------------------------------


def test_a_packaged_method_is_its_name() -> None:
    named = run(algorithm={"name": "fedprox", "mu": 0.5}, out="named")
    given = run(algorithm=FedProx(mu=0.5), out="given")
    assert (named.model_sha256, named.config.sha256) == (given.model_sha256, given.config.sha256)
    assert run(algorithm=FedNova).config.algorithm.name == "fednova"
    assert fnrfl.resume("given", dataset=(X, Y), algorithm=FedProx(mu=0.5)).config == given.config
    with pytest.raises(ConfigError, match="begun with another algorithm"):
        fnrfl.resume("given", dataset=(X, Y), algorithm=FedProx(mu=0.4))


def test_a_method_of_ones_own() -> None:
    lines = Path(__file__).read_text().partition("@dataclass(frozen=True)\nclass Halving")[2].partition("\n\n\n")[0]
    head = "from dataclasses import dataclass\nfrom fnrfl.core.algorithm import Algorithm, Objective, option\n"
    head += "from fnrfl.core.types import Engine, LocalTask, State\nfrom torch import Tensor\n\n"
    Path("own_method.py").write_text(f"{head}@dataclass(frozen=True)\nclass Halving{lines}\n")
    for fnr in ("off", "on"):
        named = run(algorithm={"name": "own_method:Halving", "part": 0.25}, fnr=fnr)
        assert named.model_sha256 == run(algorithm=Halving(part=0.25), fnr=fnr).model_sha256


# -- run directories ---------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_same_objects_alone() -> None:
    torch.manual_seed(0)
    module, method = Net(), Halving(0.75)
    given: dict[str, Any] = {"dataset": (X, Y), "model": module, "algorithm": method}
    whole = run(**given, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run(out="stopped", progress=Mock(side_effect=KeyboardInterrupt), **given, rounds=3)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.last.bias += 1
    wrong: dict[str, Any] = {"dataset": (X + 1, Y), "model": Net(hidden=9), "algorithm": Halving(0.5)}
    for argument, value in wrong.items():
        with pytest.raises(ConfigError, match=f"^{argument} is not what the run was begun with"):
            fnrfl.resume("stopped", **given | {argument: value})
        with pytest.raises(ConfigError, match=f"the run was given its .* in Python, .* with {argument}="):
            fnrfl.resume("stopped", **{key: value for key, value in given.items() if key != argument})
    with pytest.raises(ConfigError, match="^init is not what the run was begun with"):
        fnrfl.resume("stopped", **given | {"model": other})
    assert fnrfl.resume("stopped", **given).model_sha256 == whole.model_sha256


def test_a_run_of_names_takes_no_objects() -> None:
    run(dataset="digits", out="named", rounds=1)
    with pytest.raises(ConfigError, match="named was begun with another dataset, which its config.toml names"):
        fnrfl.resume("named", dataset=(X, Y))
    assert fnrfl.resume("named", dataset="digits").rounds


def test_the_directory_says_what_was_given() -> None:
    result = run(model=Net, algorithm=Halving(0.75), out="given")
    config, log = (Path("given", name).read_text() for name in ("config.toml", "events.jsonl"))
    header = json.loads(log.partition("\n")[0])
    assert config.startswith("# Part of it was given in Python, so this file alone cannot run.")
    assert "dataset=..., model=..., algorithm=..." in config.partition("\n")[0]
    assert header["given"]["dataset"] == {"what": "arrays", "sha256": values_hash(read_object((X, Y), "dataset"))}
    assert header["data"]["sha256"] == result.data.sha256
    assert header["given"]["algorithm"]["fields"] == {"part": "0.75"}
    assert all(header["given"][key]["sha256"][:8] in config for key in ("dataset", "model", "algorithm"))
    assert fnrfl.report("given").exists()
    Path("given/model.safetensors").unlink()
    for words in (["run", "given/config.toml"], ["resume", "given"], ["run", "given/config.toml", "--dry-run"]):
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 2 and "was given its data in Python" in said.stderr and "fnrfl.run" in said.stderr


def test_a_finished_run_is_read_without_objects_and_its_model_with_the_model() -> None:
    module = Net()
    result = run(model=module, out="done")
    found = fnrfl.load("done")
    assert (found.accuracy, found.rounds, found.model_sha256) == (result.accuracy, result.rounds, result.model_sha256)
    for ask in (lambda: found.model, lambda: fnrfl.predict("done", X)):
        with pytest.raises(ConfigError, match="the run was given its model in Python"):
            ask()
    x = torch.tensor(X[:3])
    assert torch.equal(fnrfl.load("done", model=Net()).model(x), result.model(x))
    assert fnrfl.predict("done", X, model=Net()).to_csv() == fnrfl.predict(result, X).to_csv()
    with pytest.raises(ConfigError, match="model is not what the run was begun with"):
        fnrfl.load("done", model=Net(hidden=7))


def test_frozen_weights_come_from_the_first_ones() -> None:
    module = Net()
    module.first.weight.requires_grad_(False)
    result = run(model=module, out="frozen")
    x = torch.tensor(X[:3])
    assert torch.equal(result.model.get_submodule("model").state_dict()["first.weight"], module.first.weight)
    assert torch.equal(fnrfl.load("frozen", model=module).model(x), result.model(x))
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.first.weight += 1
    with pytest.raises(ConfigError, match="init is not what the run was begun with"):
        fnrfl.load("frozen", model=other).model  # noqa: B018


# -- hashes ------------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_passed import Net, Halving, hooked, make
from fnrfl.core.object_hash import module_hash, object_hash
print(module_hash(Net()), object_hash(Halving(0.3)), object_hash(make(4)), object_hash(Net), module_hash(hooked()))
"""


def make(width: int) -> Callable[[int], nn.Module]:
    return lambda num_classes: Net(num_classes, width)


def hooked() -> nn.Module:
    net = nn.Sequential(nn.LazyLinear(4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    net.register_forward_hook(lambda module, inputs, out: out)
    return net


def test_hashes_of_another_process() -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    ours = [module_hash(Net()), object_hash(Halving(0.3)), object_hash(make(4)), object_hash(Net)]
    assert found == [*ours, module_hash(hooked())]


def test_hashes_tell_apart_what_computes_something_else() -> None:
    class Other(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    nets = (Net(), Net(hidden=9), Other(), nn.Sequential(nn.Linear(5, 3)), nn.Sequential(nn.Linear(5, 3), nn.ReLU()))
    assert len({module_hash(net) for net in nets}) == len(nets)
    assert module_hash(Net()) == module_hash(Net())
    functions = (make(3), make(4), lambda: Net(), lambda: Net(3), lambda a=1: Net(), lambda a=2: Net())
    assert len({object_hash(function) for function in functions}) == len(functions)
    one, two = (object_hash(made) for made in (lambda: Net(4), lambda: Net(4)))
    assert one == two


class Slotted:
    __slots__ = ("__private", "size")

    def __init__(self, size: int) -> None:
        self.size, self.__private = size, 0


@dataclass(slots=True)
class SlottedRecord:
    rate: float


HELD_ELSEWHERE: dict[str, Callable[[int], Any]] = {
    "numpy": np.float32,
    "whole": np.int64,
    "path": lambda n: Path(f"data/{n}"),
    "decimal": lambda n: Decimal(n) / 8,
    "date": lambda n: date(2020, 1, n),
    "member": Enum("Level", "LOW HIGH"),
    "slots": Slotted,
    "record": SlottedRecord,
    "namespace": lambda n: SimpleNamespace(width=n),
    "getter": itemgetter,
    "cached": lambda n: functools.lru_cache(make(n)),
}


@pytest.mark.parametrize("case", HELD_ELSEWHERE)
def test_hashes_follow_what_is_no_attribute(case: str) -> None:
    hashes = [object_hash({"setting": HELD_ELSEWHERE[case](n)}) for n in (1, 2, 1)]
    assert hashes[0] == hashes[2] != hashes[1]


def test_what_cannot_be_copied_is_equal_to_nothing_else() -> None:
    lock = threading.Lock()
    assert object_hash(lock) != object_hash(lock)


# -- what the commands do ----------------------------------------------------------------------------------------------


UNLABELLED: list[Callable[[Any, Any], object]] = [
    lambda x, y: x,
    lambda x, y: torch.as_tensor(x),
    lambda x, y: (x,),
    lambda x, y: {"features": x},
    lambda x, y: {"idx": 3, "x": x},
]


def test_items_without_a_label_are_predicted_and_not_scored() -> None:
    result = run()
    wanted = fnrfl.predict(result, X).to_csv()
    for item in (*UNLABELLED, lambda x, y: (x, None), lambda x, y: (x, float("nan"))):
        assert fnrfl.predict(result, Items(item=item)).to_csv() == wanted
    for item in UNLABELLED:
        with pytest.raises(ConfigError, match="no labels, so nothing can be scored"):
            fnrfl.evaluate(result, Items(item=item))
        with pytest.raises(ConfigError, match="must be pairs"):
            run(dataset=Items(item=item))


def test_evaluate_and_predict_are_the_commands() -> None:
    np.savez("mine.npz", x=X, y=Y)
    result = run(dataset="mine.npz", out="done")
    for data in ("mine.npz", Path("mine.npz"), (X, Y), Items()):
        for one in (result, "done"):
            scored = fnrfl.evaluate(one, data)
            assert scored.accuracy == pytest.approx(result.accuracy)
            assert scored.what == "the test part"
    said = CliRunner().invoke(app, ["evaluate", "done", "mine.npz", "--json"])
    assert json.loads(said.stdout)["accuracy"] == scored.accuracy
    printed = CliRunner().invoke(app, ["predict", "done", "mine.npz"])
    for data in (X, (X, Y), "mine.npz", X.tolist()):
        found = fnrfl.predict("done", data)
        assert found.to_csv() == printed.stdout
        assert np.asarray(found.probabilities).shape == (len(found), 3) == (160, 3)
        assert found.labels == [found.classes[at] for at in np.asarray(found.probabilities).argmax(1)]
    with pytest.raises(ConfigError, match="The data has no labels, so nothing can be scored"):
        fnrfl.evaluate("done", X)
    with pytest.raises(ConfigError, match="The data is no table, so it has no column 'a'"):
        fnrfl.predict("done", X, id_column="a")


def test_compare_takes_objects_and_goes_on() -> None:
    def compare(**given: Any) -> Any:
        over = {"algorithm": [FedProx(), Halving(), FedProx(mu=0.9)], "client.batch": [8, 16]}
        keys = {"over": over, "seeds": [0], "dataset": (X, Y), "model": lambda: nn.Linear(5, 3), "out": "grid"}
        return fnrfl.compare(**keys | {"rounds": 1, "clients": 2, "scenario": "iid", **given})

    def stop_after_one(notice: Any) -> None:
        if notice.what == "done":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(progress=stop_after_one)
    found = compare()
    assert [len(column) for column in found.table().values()] == [6] * len(found.table())
    assert not found.failed
    assert found.table()["algorithm"][:2] == ["fedprox", "fedprox"]
    assert {row.group.partition(", client")[0].partition(" (")[0] for row in found.rows} == {
        "fedprox", "Halving", "fedprox(mu=0.9)",
    }  # fmt: skip
    assert {row.config.client.batch for row in found.rows} == {8, 16}
    assert "6 of 6 runs, kept in grid" in repr(found) and "Halving" in str(found)
    assert Path("grid/report.html") == fnrfl.report(found)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"over": {"model": [Net()]}}, "over varies model and holds a module"),
        ({"over": {"client.lr": 0.1}}, "over has 0.1 for client.lr; it must be a list"),
        ({"seeds": 3}, "seeds is 3; it must be a list"),
    ]
    for keys, said in wrong:
        with pytest.raises(ConfigError, match=said):
            compare(**keys)


def test_compare_is_the_command() -> None:
    keys = {"rounds": 1, "clients": 2, "client": {"epochs": 1}, "fnr": {"epochs": 1}}
    found = fnrfl.compare("digits", over={"scenario": ["iid", "label-classes(5)"]}, seeds=[0, 1], **keys)
    words = ["rounds=1", "clients=2", "client.epochs=1", "fnr.epochs=1", "--over", "scenario=iid,label-classes(5)"]
    said = CliRunner().invoke(app, ["compare", "digits", *words, "--seeds", "0,1", "--json", "--no-report"])
    assert said.exit_code == 0
    assert str(found.folder) in said.stderr
    assert said.stdout == found.to_json()


@pytest.mark.parametrize("what", [(), (None,)], ids=["nothing", "no directory"])
def test_report_needs_a_run_directory(what: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="There is no run directory to report on"):
        fnrfl.report(*(run(rounds=1) for _ in what))


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_result_as_a_line_and_as_a_table() -> None:
    result = run(name="<b>", out="a<b>")
    assert repr(result).startswith("Result(fedavg on arrays (given in Python, ")
    assert len(repr(result).splitlines()) == 1
    html = result._repr_html_()
    assert "a&lt;b&gt;" in html and "a<b>" not in html
    assert fnrfl.load("a<b>")._repr_html_() == html


def test_curves_are_columns_of_equal_length() -> None:
    result = run(rounds=3)
    curve = result.curve()
    assert {len(column) for column in curve.values()} == {3}
    assert curve["round"] == [1, 2, 3]
    assert curve["accuracy"] == [event["accuracy"] for event in result.rounds]
    assert curve["seconds"] == sorted(curve["seconds"])  # type: ignore[type-var]
    assert all(value is None or isinstance(value, float | int) for column in curve.values() for value in column)


def test_the_confusion_matrix_counts_the_test_set() -> None:
    test = object_source((X, Y), "dataset").dataset().test
    for models, keys in ((1, {}), (3, {"model": "mlp(norm=batch)", "algorithm": "fedbn"})):
        result = run(**keys)
        counts = np.array(result.confusion)
        assert counts.sum(1).tolist() == (models * np.bincount(test.y, minlength=3)).tolist()
        assert np.trace(counts) / counts.sum() == pytest.approx(result.accuracy)


def test_plots_are_drawn_with_matplotlib() -> None:
    import matplotlib as mpl

    mpl.use("agg")
    result = run(rounds=3)
    axes = result.plot()
    assert axes.lines[0].get_ydata().tolist() == result.curve()["accuracy"]
    assert result.plot("bytes_up", ax=axes) is axes
    with pytest.raises(ConfigError, match='There is no curve "acuracy".*accuracy'):
        result.plot("acuracy")


def test_the_public_names_are_what_dir_shows() -> None:
    assert dir(fnrfl) == sorted(fnrfl.__all__)
    assert all(getattr(fnrfl, name) is not None for name in dir(fnrfl))
    script = "import sys, fnrfl; dir(fnrfl); assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_lacking_classes_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    draw = np.random.default_rng(0)
    x = lambda n: draw.normal(size=(n, 5)).astype(np.float32)  # noqa: E731
    known, strange = np.array(["apple", "pear"] * 40), np.array(["apple", "plum"] * 10)
    keys = KEYS | {"out": None, "fnr": "on"}
    fnrfl.run(dataset=(x(80), known, x(20), strange), **keys | {"public": (x(12), np.array(["pear"] * 12))})
    said = " ".join(caplog.messages)
    assert "(plum) without a training example" in said
    assert "Public data has no example of 1 class (apple)" in said
    caplog.clear()
    fnrfl.run(dataset=(x(80), known), **keys)
    assert not [message for message in caplog.messages if "class" in message]
    fnrfl.run(dataset=(x(80), np.array(["apple"] * 80)), **KEYS | {"out": None})
    assert "All training examples are of one class, 'apple'" in " ".join(caplog.messages)
