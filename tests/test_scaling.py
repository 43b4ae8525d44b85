"""`dataset.scale = "standard"`: the same as scaling the data by hand, from sums that clients send."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fnrfl
from fnrfl.algorithms.bn_recalibrate import BnRecalibrate
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.feddf import FedDF
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.moon import Moon
from fnrfl.config import load as load_config
from fnrfl.config import loads, registry
from fnrfl.core.algorithm import Algorithm
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.modules import InputScale
from fnrfl.core.net import Net
from fnrfl.core.rng import numpy_generator
from fnrfl.core.types import Batch, Out, Tree
from fnrfl.data.datasets import load as load_data
from fnrfl.data.scaling import InputMoments, Scaling, looks_unscaled, merged
from fnrfl.results.report.groups import panels_of
from fnrfl.results.report.load import read_run
from fnrfl.results.report.privacy_table import learned
from fnrfl.runs.forecast import forecast
from fnrfl.runs.predict import evaluate, predict
from fnrfl.runs.result import Result
from fnrfl.runs.run import run as run_config
from fnrfl.runs.setup import engine as setup_engine
from fnrfl.runs.setup.build import build
from settings import with_keys
from toys import Run, assert_near, assert_same, classification, named

STANDARD = {"scale": "standard"}
SMALL: dict[str, Any] = {"clients": 4, "rounds": 2, "scenario": "label-dirichlet(0.5)", "model": "mlp"}
BAG = "from torch import nn\n\ndef bag():\n    return nn.Sequential(nn.EmbeddingBag(300, 4), nn.Linear(4, 3))\n"
EXACT = SMALL | {"engine": {"name": "loop", "precision": "float64", "accelerate": False}}


def moments(x: Tensor, sizes: list[int], *, gaps: bool = False) -> Tree:
    """The moments of some clients' examples, each asked about in batches of three, merged."""
    probe, answers = InputMoments(gaps), []
    for mine in x.split(sizes):
        total: Tree = {}
        for part in mine.split(3):
            batch = Batch(part, torch.zeros(len(part), dtype=torch.int64), torch.arange(len(part)))
            total = probe.add(total, probe(Out.empty(batch), batch))
        answers.append(probe.finish(total))
    return reduce(merged, answers)


def table(path: Path, *, rows: int = 240, seed: int = 0, **arrays: np.ndarray) -> Path:
    """Five columns of very different sizes, one of them constant, and three classes that can be told apart."""
    dice = numpy_generator(seed, "table")
    y = np.arange(rows) % 3
    x = dice.normal(size=(rows, 5)) + y[:, None]
    x = x * [1.0, 1e-3, 400.0, 30.0, 0.0] + [0.0, 5.0, -900.0, 1e4, 7.3]
    np.savez(path, **({"x": x, "y": y} | arrays))
    return path


def by_hand(path: Path, dataset: str, scale: dict[str, Any]) -> Path:
    """A data set whose examples somebody has scaled, in float64."""
    data = load_data(dataset)
    mean, std = (np.array(scale[name]) for name in ("mean", "std"))
    std = np.where(std > 1e-12, std, 1.0)
    shape = (1, -1, *[1] * (data.train.x.ndim - 2))
    pixels = data.train.x.dtype == torch.uint8
    arrays = {}
    for name, part in (("train", data.train), ("test", data.test)):
        x = part.x.double().numpy() / (255 if pixels else 1)
        arrays |= {f"x_{name}": (x - mean.reshape(shape)) / std.reshape(shape), f"y_{name}": part.y.numpy()}
    np.savez(path, **arrays)
    return path


def header(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "events.jsonl").read_text().splitlines()[0])  # type: ignore[no-any-return]


def module_of(result: Result) -> nn.Module:
    """The module inside of an exported model."""
    return result.model.get_submodule("model")


# -- the sums ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    offset=st.sampled_from([0.0, 1.0, -1e6, 1e6, 1e-6]),
    spread=st.sampled_from([1.0, 1e-2, 1e3]),
    shape=st.sampled_from([(3,), (2, 2, 3), (2, 5), ()]),
    seed=st.integers(0, 1000),
)
def test_merged_sums_are_those_of_all_the_data(
    sizes: list[int], offset: float, spread: float, shape: tuple[int, ...], seed: int
) -> None:
    dice = numpy_generator(seed, "moments")
    clients = np.repeat(np.arange(len(sizes)), sizes)
    x = offset + spread * (dice.normal(size=(sum(sizes), *shape)) + clients.reshape(-1, *[1] * len(shape)))
    got = moments(torch.from_numpy(x), sizes)
    exact = np.moveaxis(x.reshape(len(x), *(shape or (1,))), 1, 0).reshape((shape or (1,))[0], -1).astype(np.longdouble)
    assert got["count"] == exact.shape[1]
    np.testing.assert_allclose(got["mean"], exact.mean(1).astype(float), rtol=1e-12, atol=1e-12 * spread)
    std = np.sqrt((got["m2"] / got["count"]).numpy())
    np.testing.assert_allclose(std, exact.std(1).astype(float), rtol=1e-12, atol=1e-15 * spread)


def test_a_constant_column_has_no_spread_and_is_not_stretched() -> None:
    x = torch.full((30, 3), 0.1, dtype=torch.float64) * torch.tensor([1.0, 3.7, -1e6], dtype=torch.float64)
    got = moments(x, [1, 7, 22])
    assert torch.equal(got["m2"], torch.zeros(3, dtype=torch.float64)) and torch.equal(got["mean"], x[0])
    scaling = Scaling((1e6, 1e6, 0.0, 0.0), (0.01, 1.0, 1e-60, 0.0), {})
    assert scaling.layer((4,), torch.float32).std.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert scaling.layer((4,), torch.float64).std.tolist() == [0.01, 1.0, 1e-60, 1.0]
    assert scaling.layer((4, 8, 8), torch.float32).mean.shape == (4, 1, 1)


def test_clients_alone_are_asked_and_the_log_has_what_they_said(tmp_path: Path) -> None:
    far = {"x_test": np.full((30, 5), 1e5), "y_test": np.arange(30) % 3}
    held = np.load(table(tmp_path / "t.npz"))
    data = table(tmp_path / "far.npz", x_train=held["x"], y_train=held["y"], **far)
    config = load_config(None, SMALL | {"dataset": {"name": str(data), **STANDARD}})
    built = build(config)
    private = torch.cat([built.splits.private.x[mine] for mine in built.splits.clients]).double().numpy()
    assert len(private) < len(built.splits.train) < len(held["x"]) + len(far["x_test"])
    run_config(config, out=tmp_path / "run")
    scale = header(tmp_path / "run")["scale"]
    np.testing.assert_allclose(scale["mean"], private.mean(0), rtol=1e-12)
    np.testing.assert_allclose(scale["std"], private.std(0), rtol=1e-12, atol=1e-12)  # one column is constant


def test_every_byte_is_counted_in_the_first_round_and_forecast(tmp_path: Path) -> None:
    keys = SMALL | {"dataset": {"name": str(table(tmp_path / "t.npz")), **STANDARD}}
    result = fnrfl.run(None, out=None, **keys)
    plain = fnrfl.run(None, out=None, **keys | {"dataset": keys["dataset"] | {"scale": "none"}})
    clients, columns = 4, 5
    sent = {"down": clients * 2 * columns * 4, "up": clients * 3 * columns * 8, "headers": clients * 8}
    assert result.rounds[0]["bytes"] == {"scale": sent} | plain.rounds[0]["bytes"]
    assert result.rounds[1]["bytes"] == plain.rounds[1]["bytes"]
    assert result.bytes_up - plain.bytes_up == sent["up"] and result.bytes_down - plain.bytes_down == sent["down"]
    told = forecast(result.config)
    assert (told.bytes_in_all("up"), told.bytes_in_all("down")) == (result.bytes_up, result.bytes_down)


# -- the same as by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "keys"),
    [
        ("table", {}),
        ("table", {"fnr": {"epochs": 1}}),
        ("digits", {"fnr": {"epochs": 1}}),
        ("digits", {"client": {"augment": "crop-flip", "epochs": 1}}),
        ("digits", {"algorithm": "local-only"}),
        ("table", {"algorithm": "public-share", "fnr": "on"}),
    ],
    ids=["table", "table and FNR", "pixels and FNR", "cropped pixels", "models of their own", "public data handed out"],
)
def test_a_run_is_that_on_data_scaled_by_hand_to_the_bit(dataset: str, keys: dict[str, Any], tmp_path: Path) -> None:
    name = str(table(tmp_path / "t.npz")) if dataset == "table" else dataset
    scaled = fnrfl.run(None, out=tmp_path / "run", **EXACT | keys | {"dataset": {"name": name, **STANDARD}})
    hand = by_hand(tmp_path / "hand.npz", name, header(tmp_path / "run")["scale"])
    plain = fnrfl.run(None, out=None, **EXACT | keys | {"dataset": {"name": str(hand), "scale": "none"}})
    assert all(torch.equal(plain.weights[name], scaled.weights[name]) for name in plain.weights)
    assert scaled.weights.keys() - plain.weights.keys() == {"input_scale.mean", "input_scale.std"}
    scores = ("accuracy", "loss", "per_client", "validation_accuracy", "norms", "ranking")
    assert [[e.get(k) for k in scores] for e in scaled.rounds] == [[e.get(k) for k in scores] for e in plain.rounds]


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(registry.algorithms()) - {"fedftg"}))  # it makes examples of its own
def test_no_method_notices(method: str, tmp_path: Path) -> None:
    keys = EXACT | {"algorithm": method, "model": "cnn(norm=batch)", "client": {"epochs": 1}, "rounds": 1}
    trains = registry.load_method(method).trains_clients
    keys |= {"fnr": {"epochs": 1}} if trains else {}
    scaled = run_config(load_config(None, keys | {"dataset": {"name": "digits", **STANDARD}}), out=tmp_path / "run")
    hand = by_hand(tmp_path / "hand.npz", "digits", header(tmp_path / "run")["scale"])
    plain = run_config(load_config(None, keys | {"dataset": {"name": str(hand), "scale": "none"}}), out=None)
    assert all(torch.equal(plain.weights[name], scaled.weights[name]) for name in plain.weights)


def test_noise_is_laid_over_inputs_before_they_are_scaled(tmp_path: Path) -> None:
    keys = EXACT | {"fnr": {"epochs": 1}, "algorithm": "fedprox", "scenario": "iid + feature-noise(0.2)"}
    scaled = fnrfl.run(None, out=tmp_path / "run", **keys | {"dataset": {"name": "digits", **STANDARD}})
    scale = header(tmp_path / "run")["scale"]
    hand = by_hand(tmp_path / "hand.npz", "digits", scale)
    noise = f"iid + feature-noise({0.2 / scale['std'][0]!r})"  # one channel: all noise is scaled alike
    plain = fnrfl.run(None, out=None, **keys | {"dataset": {"name": str(hand), "scale": "none"}, "scenario": noise})
    for name in plain.weights:
        torch.testing.assert_close(scaled.weights[name], plain.weights[name], rtol=0, atol=1e-9)
    clean = load_data("digits").train.x.double() / 255
    assert scale["std"][0] > float(clean.std()) * 1.05  # of what the clients see, noise included


@pytest.mark.parametrize("engine", ["children", "batched", "loop-fast", "batched-fast", "gpu"])
def test_every_engine_scales_alike(engine: str) -> None:
    scale = [0.3 * column for column in range(12)], [0.5 + column for column in range(12)]
    method = FNR(inner=FedAvg(), epochs=1)
    loop, other = (Run(method, name, scale=scale) for name in ("loop", engine))
    loop.rounds(2)
    other.rounds(2)
    assert_near(loop.state, other.state, atol=1e-9)
    if engine == "children":
        assert_same(loop.state, other.state)
    unscaled = Run(method)
    assert (unscaled.rounds(2).params - loop.state.params).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["loop-fast", "batched-fast"])
@pytest.mark.parametrize("method", [FNR(inner=FedAvg(), epochs=1), Moon(), FedDF(), BnRecalibrate()], ids=named)
def test_recorded_steps_are_shared_by_nets_that_scale_otherwise(method: Algorithm, engine: str) -> None:
    for spread in (1.0, 3.0):
        scale = [0.3] * 12, [spread] * 12
        recorded, plain = (Run(method, name, scale=scale) for name in (engine, "loop"))
        assert_near(recorded.rounds(2), plain.rounds(2), atol=1e-9)
        recorder = recorded.engine.server.runner.recorder
        assert recorder is not None
        if spread > 1 and isinstance(method, FNR | Moon):
            assert recorder.num_recorded == 0  # all are there from the first net


def test_nets_that_do_not_scale_share_no_step_with_those_that_do() -> None:
    world = classification()
    net = Net(world.module(), world.example)
    one, other = (
        net.with_input_scale(InputScale(world.example.new_zeros(12), torch.full((12,), s))) for s in (1.0, 2.0)
    )
    assert net.fingerprint() != one.fingerprint() == other.fingerprint() == one.copy().fingerprint()


# -- what comes out ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("scaled")
    keys = SMALL | {"dataset": {"name": str(table(folder / "t.npz")), **STANDARD}}
    return fnrfl.run(None, out=folder / "run", fnr={"epochs": 1}, **keys)


def test_an_exported_model_takes_raw_inputs_and_is_complete(finished: Result) -> None:
    data = load_data(finished.config.dataset.name)
    x = torch.cat([data.train.x, data.test.x]).float()
    again = fnrfl.load(finished.run_dir or "")
    with torch.no_grad():
        logits = finished.model(x)
        assert torch.equal(again.model(x), logits)
        weights = safetensors.torch.load_file((finished.run_dir or Path()) / "model.safetensors")
        mean, std = weights.pop("input_scale.mean"), weights.pop("input_scale.std")
        module = module_of(again)
        module.load_state_dict(weights)
        assert torch.equal(module((x - mean) / std), logits)
        other = fnrfl.load(finished.run_dir or "").model
        other.load_state_dict(finished.model.state_dict())
        assert torch.equal(other(x), logits)
    assert finished.model_sha256 == again.model_sha256


def test_evaluate_and_predict_scale_as_training_did(finished: Result, tmp_path: Path) -> None:
    run_dir, name = finished.run_dir or "", finished.config.dataset.name
    assert evaluate(run_dir, name).score.accuracy == finished.accuracy
    assert finished.accuracy > 0.6  # without scaling the net learns nothing here
    x = load_data(name).test.x
    np.savez(tmp_path / "new.npz", x=x.numpy())
    told = predict(run_dir, str(tmp_path / "new.npz")).probabilities
    with torch.no_grad():
        torch.testing.assert_close(told, finished.model(x.float()).softmax(1))


def test_a_run_that_goes_on_is_the_same_to_the_bit_and_asks_nobody_again(
    finished: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        raise Stop

    with pytest.raises(Stop):
        run_config(finished.config, out=tmp_path / "run", progress=stop)
    monkeypatch.setattr(setup_engine, "ask_clients", None)
    assert fnrfl.resume(tmp_path / "run").model_sha256 == finished.model_sha256
    assert header(tmp_path / "run")["scale"] == header(finished.run_dir or Path())["scale"]


def test_the_page_says_what_the_server_learned(finished: Result, tmp_path: Path) -> None:
    plain = run_config(with_keys(finished.config, {"dataset.scale": "none"}), out=tmp_path / "plain")
    runs = [read_run(result.run_dir or Path()) for result in (finished, plain)]
    rows = {row[0].text: [cell.text for cell in row] for row in learned(panels_of(runs)[0].groups).rows}
    assert rows["sums of inputs"][1:3] == ["16", "fedavg"]  # a count, and three numbers for each of five columns
    assert rows["the model"][2] == "all methods" and "fedavg's own" not in rows
    alone = {row[0].text for row in learned(panels_of(runs[1:])[0].groups).rows}
    assert "sums of inputs" not in alone and "scale" not in header(tmp_path / "plain")


# -- odd data ----------------------------------------------------------------------------------------------------------


def test_a_client_with_one_row_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = table(tmp_path / "t.npz", rows=30)
    keys = {"clients": 20, "rounds": 1, "scenario": "iid", "public": {"size": 0}, "validation": {"size": 0}}
    with caplog.at_level(logging.WARNING, "fnrfl"):
        result = fnrfl.run(None, out=None, dataset={"name": str(data), **STANDARD}, **keys)
    assert "of each client that holds one example (" in caplog.text and "every column" in caplog.text
    assert all(np.isfinite(event["loss"]) for event in result.rounds)
    caplog.clear()
    fnrfl.run(None, out=None, dataset={"name": str(data), "scale": "none"}, **keys)
    assert "one example" not in caplog.text


def test_whole_numbers_are_scaled_as_numbers_and_tokens_are_refused(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(BAG)
    dice = numpy_generator(0, "whole")
    data = table(tmp_path / "t.npz", x=dice.integers(0, 300, size=(240, 5)))
    keys = SMALL | {"dataset": {"name": str(data), **STANDARD}}
    result = fnrfl.run(None, out=None, **keys)
    assert float(result.weights["input_scale.std"].min()) > 50
    with pytest.MonkeyPatch.context() as here:
        here.chdir(tmp_path)
        with pytest.raises(CompatibilityError, match='whole numbers as they are .tokens.. Set dataset.scale = "none"'):
            fnrfl.run(None, out=None, **keys | {"model": "nets:bag"})


def test_numbers_too_large_to_be_squared_are_refused(tmp_path: Path) -> None:
    x = np.ones((240, 5))
    x[:, 2] = np.arange(240) * 1e200
    keys = EXACT | {"dataset": {"name": str(table(tmp_path / "t.npz", x=x)), **STANDARD}}
    with pytest.raises(CompatibilityError, match="too large to be scaled, in column or channel 2"):
        fnrfl.run(None, out=None, **keys)


def test_a_layer_of_the_users_that_has_the_name_is_refused() -> None:
    world = classification()
    module = nn.Sequential()
    module.add_module("input_scale", nn.Linear(12, 4, dtype=torch.float64))
    with pytest.raises(CompatibilityError, match="has a layer called input_scale"):
        Net(module, world.example).with_input_scale(InputScale(torch.zeros(12), torch.ones(12)))


def test_weights_or_a_log_without_the_scale_are_refused(finished: Result) -> None:
    weights = {name: tensor for name, tensor in finished.weights.items() if "input_scale" not in name}
    with pytest.raises(CompatibilityError, match="no input_scale.mean"):
        _ = replace(finished, weights=weights).net
    for damaged in ({"mean": [1.0]}, {"mean": ["x"], "std": [1.0], "bytes": {}}, 3):
        with pytest.raises(ConfigError, match="does not say how inputs are scaled"):
            Scaling.from_json(damaged)


# -- auto, and inputs that look unscaled -------------------------------------------------------------------------------


def resolved(dataset: str, **keys: Any) -> str:
    """What the scale of a run is, once nothing is left to choose."""
    return build(load_config(None, SMALL | {"dataset": dataset, "scenario": "iid"} | keys)).config.dataset.scale


def test_auto_scales_data_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(BAG)
    dice = numpy_generator(0, "auto")
    assert load_config(None).dataset.scale == "auto" and resolved("digits") == "none"
    assert resolved(str(table(tmp_path / "t.npz"))) == "standard"
    whole = str(table(tmp_path / "whole.npz", x=dice.integers(0, 300, size=(240, 5))))
    assert resolved(whole) == "standard" and resolved(whole, model="nets:bag") == "none"
    series = str(table(tmp_path / "series.npz", x=dice.normal(size=(240, 2, 9))))
    pixels = str(table(tmp_path / "pixels.npz", x=dice.integers(0, 255, size=(240, 6, 6)).astype(np.uint8)))
    assert resolved(series) == resolved(pixels) == "standard"


def test_what_auto_chose_is_the_config_of_the_run(tmp_path: Path) -> None:
    keys = SMALL | {"dataset": str(table(tmp_path / "t.npz"))}
    chosen = fnrfl.run(None, out=tmp_path / "auto", **keys)
    said = fnrfl.run(None, out=tmp_path / "said", **keys | {"dataset": {"name": keys["dataset"], **STANDARD}})
    assert chosen.config.sha256 == said.config.sha256 != load_config(None, keys).sha256
    assert chosen.model_sha256 == said.model_sha256
    assert load_config(tmp_path / "auto" / "config.toml").dataset.scale == "standard"
    text = 'dataset = "mine.csv"\n'  # of a run of a version without the key
    assert loads(text, of_run=True).dataset.scale == "none" and loads(text).dataset.scale == "auto"


@pytest.mark.parametrize(
    ("factor", "offset", "words"),
    [
        ([1.0, 1.0, 0.0], [0.0, 3.0, 1e9], None),
        ([1.0, 99.0, 0.0], [0.0, 0.0, 0.0], None),
        ([1.0, 5e3, 0.0], [0.0, 0.0, 0.0], "column or channel 1 spreads 5,000 times as far as column or channel 0"),
        ([1.0, 1.0, 1.0], [0.0, 2e4, 0.0], "column or channel 1 has the mean 2e+04 and the spread 1"),
    ],
)
def test_inputs_that_look_unscaled_are_told(factor: list[float], offset: list[float], words: str | None) -> None:
    x = torch.tensor([[-1.0], [1.0]] * 50).double() * torch.tensor(factor).double() + torch.tensor(offset).double()
    said = looks_unscaled(torch.cat([x, torch.full((1, 3), torch.nan)]), None)
    assert said is None if words is None else words in (said or "")


def test_a_run_warns_of_unscaled_inputs_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = SMALL | {"rounds": 1}
    data = str(table(tmp_path / "t.npz"))
    for scale, count in (("none", 1), ("auto", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fnrfl"):
            fnrfl.run(None, out=None, dataset={"name": data, "scale": scale}, **keys)
        assert caplog.text.count("Inputs look unscaled") == count
