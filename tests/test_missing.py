"""`dataset.missing = "mean"`: the same as filling in the mean of the clients' known values by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fnrfl
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.rng import numpy_generator
from fnrfl.data.datasets import read_source
from fnrfl.data.reading import Columns, Reading
from fnrfl.runs.forecast import forecast
from fnrfl.runs.predict import evaluate, predict
from fnrfl.runs.result import Result
from fnrfl.runs.run import run as run_config
from fnrfl.runs.setup.build import build
from settings import with_keys
from test_scaling import EXACT, moments
from test_tables import write

SMALL: dict[str, Any] = {"clients": 3, "rounds": 2, "scenario": "label-dirichlet(0.5)", "model": "mlp"}


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=10),
    offset=st.sampled_from([0.0, -1e6, 1e6]),
    share=st.sampled_from([0.0, 0.3, 0.8]),
    seed=st.integers(0, 1000),
)
def test_sums_of_known_values_are_those_of_all_of_them(
    sizes: list[int], offset: float, share: float, seed: int
) -> None:
    dice = numpy_generator(seed, "gaps")
    x = offset + dice.normal(size=(sum(sizes), 3)) + np.repeat(np.arange(len(sizes)), sizes)[:, None]
    x[dice.random(x.shape) < share] = np.nan
    x[: sizes[0], 0] = np.nan  # the first client knows nothing of the first column
    got = moments(torch.from_numpy(x), sizes, gaps=True)
    for column in range(3):
        known = x[~np.isnan(x[:, column]), column].astype(np.longdouble)
        assert int(got["count"][column]) == len(known)
        if len(known):
            assert float(got["mean"][column]) == pytest.approx(float(known.mean()), rel=1e-12, abs=1e-12)
            spread = float(torch.sqrt(got["m2"][column] / len(known)))
            assert spread == pytest.approx(float(known.std()), rel=1e-12, abs=1e-14)


# -- runs --------------------------------------------------------------------------------------------------------------


def patients(rows: int = 90, *, seed: int = 0, gaps: bool = True) -> dict[str, Any]:
    """Patients with a ward, an age and a dose, of which some are not known; the ill are older."""
    dice = numpy_generator(seed, "patients")
    ill = dice.integers(0, 2, rows)
    columns: dict[str, Any] = {
        "ward": dice.choice(["north", "south", "Ärzte"], rows).tolist(),
        "age": (50 + 15 * ill + dice.integers(-9, 9, rows)).astype(str).tolist(),
        "dose": np.round(dice.normal(size=rows), 3).astype(str).tolist(),
    }
    for place, (name, word) in enumerate({"ward": "?", "age": "NA", "dose": ""}.items()):
        columns[name] = [word if gaps and row % 7 == place else cell for row, cell in enumerate(columns[name])]
    return columns | {"kind": np.where(ill, "ill", "well").tolist()}


@pytest.fixture(scope="module", params=["none", "standard"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("missing")
    keys = {"name": write(folder / "p.csv", patients()), "scale": request.param, "missing": "mean"}
    return fnrfl.run(None, out=folder / "run", dataset=keys, fnr={"epochs": 1}, **EXACT | SMALL)


def test_a_run_is_the_run_on_data_that_somebody_filled_in(finished: Result, tmp_path: Path) -> None:
    built = build(finished.config)
    held = built.dataset
    private = torch.cat([built.splits.private.x[mine] for mine in built.splits.clients]).double()
    mean = torch.tensor(np.nanmean(private.numpy(), axis=0))
    arrays = {
        f"{kind}_{name}": values.numpy()
        for name, part in (("train", held.train), ("test", held.test))
        for kind, values in (("x", torch.where(part.x.isnan(), mean, part.x.double())), ("y", part.y))
    }
    np.savez(tmp_path / "filled.npz", classes=np.array(held.classes), **arrays)
    assert held.train.x.isnan().any() and held.test.x.isnan().any() and private.isnan().any()
    scale = finished.config.dataset.scale
    torch.testing.assert_close(finished.weights["input_scale.fill"], mean, rtol=1e-12, atol=0)
    if scale == "standard":  # scaled by what is known, so that what was filled in does not count
        std = torch.tensor(np.nanstd(private.numpy(), axis=0))
        torch.testing.assert_close(finished.weights["input_scale.std"], std, rtol=1e-12, atol=0)
        return
    keys = {"name": str(tmp_path / "filled.npz"), "scale": scale}
    by_hand = fnrfl.run(None, out=None, dataset=keys, fnr={"epochs": 1}, **EXACT | SMALL)
    for name, tensor in by_hand.weights.items():
        torch.testing.assert_close(finished.weights[name], tensor, rtol=1e-9, atol=1e-11)


def test_the_exported_model_takes_nan_and_is_plain_pytorch(finished: Result) -> None:
    x = build(finished.config).dataset.test.x.double()
    weights = safetensors.torch.load_file((finished.run_dir or Path()) / "model.safetensors")
    mean, std, fill = (weights.pop(f"input_scale.{name}") for name in ("mean", "std", "fill"))
    module = fnrfl.load(finished.run_dir or "").model.get_submodule("model")
    module.load_state_dict(weights)
    with torch.no_grad():
        logits = finished.model(x)
        assert torch.equal(module((torch.where(x.isnan(), fill, x) - mean) / std), logits)
        assert x.isnan().any() and not logits.isnan().any()
    assert finished.data.columns is not None
    assert finished.data.columns.encoded == ("ward=north", "ward=south", "ward=Ärzte", "age", "dose")
    assert x.shape[1] == 5


def test_use_of_a_model_fills_in_what_training_did(finished: Result, tmp_path: Path) -> None:
    run_dir = finished.run_dir or Path()
    assert evaluate(run_dir, finished.config.dataset.name).score.accuracy == finished.accuracy
    new = patients(30, seed=1)
    new["ward"][:4] = ["?", "west", "west", "west wing"]
    order = ["dose", "kind", "ward", "age"]
    got = predict(run_dir, write(tmp_path / "new.csv", {name: new[name] for name in order}))
    columns, rows = finished.data.columns or Columns((), (), ""), []
    for ward, age, dose in zip(new["ward"], new["age"], new["dose"], strict=True):
        known = [float("nan")] * 3 if ward == "?" else [float(ward == one) for one in columns.categories["ward"]]
        rows.append([*known, float("nan" if age == "NA" else age), float(dose or "nan")])
    with torch.no_grad():
        logits = finished.model(torch.tensor(rows, dtype=torch.float32).double())
    torch.testing.assert_close(got.probabilities, logits.softmax(1))
    (unknown,) = [note for note in got.notes if "that the training data had not" in note]
    assert "3 cells with categories" in unknown and "'west' in 'ward', 'west wing' in 'ward'" in unknown
    assert any("missing inputs in 'ward=north'" in note for note in got.notes)


def test_what_crosses_is_counted(finished: Result) -> None:
    clients, inputs = 3, 5
    assert finished.rounds[0]["bytes"]["scale"] == {
        "down": clients * 2 * inputs * 4,
        "up": clients * 3 * inputs * 8,
        "headers": clients * inputs * 8,
    }
    told = forecast(finished.config)
    assert (told.bytes_in_all("up"), told.bytes_in_all("down")) == (finished.bytes_up, finished.bytes_down)


def test_a_run_that_goes_on_and_another_engine_agree(finished: Result, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(event: dict[str, Any]) -> None:
        raise Stop

    with pytest.raises(Stop):
        run_config(finished.config, out=tmp_path / "run", progress=stop)
    assert fnrfl.resume(tmp_path / "run").model_sha256 == finished.model_sha256
    batched = run_config(with_keys(finished.config, {"engine.name": "batched", "engine.accelerate": True}), out=None)
    for name, tensor in batched.weights.items():
        torch.testing.assert_close(finished.weights[name], tensor, rtol=1e-8, atol=1e-9)


def test_a_table_without_gaps_trains_a_model_that_takes_some(tmp_path: Path) -> None:
    keys = {"name": write(tmp_path / "p.csv", patients(gaps=False)), "missing": "mean", "scale": "standard"}
    fnrfl.run(None, out=tmp_path / "run", dataset=keys, **SMALL)
    assert predict(tmp_path / "run", write(tmp_path / "new.csv", patients(20, seed=2))).probabilities.isfinite().all()
    refusing = keys | {"missing": "refuse"}
    fnrfl.run(None, out=tmp_path / "strict", dataset=refusing, **SMALL)
    with pytest.raises(ConfigError, match="line 2 of .* has '\\?' in column 'ward'.*The run has dataset.missing"):
        predict(tmp_path / "strict", str(tmp_path / "new.csv"))


def test_rows_that_are_left_out_are_left_out_of_answers(tmp_path: Path) -> None:
    keys = {"name": write(tmp_path / "p.csv", patients()), "missing": "drop", "scale": "standard"}
    result = fnrfl.run(None, out=tmp_path / "run", dataset=keys, **SMALL)
    assert evaluate(tmp_path / "run", keys["name"]).score.accuracy == result.accuracy
    got = predict(tmp_path / "run", write(tmp_path / "new.csv", patients(20, seed=2)))
    assert list(got.rows) == [str(row) for row in range(20) if row % 7 > 2]
    assert any("of 20 examples, 9 with missing values are left out" in note for note in got.notes)


def test_a_client_that_would_have_nothing_left_is_refused(tmp_path: Path) -> None:
    table: dict[str, Any] = {"age": list(range(30)), "who": [f"H{row % 3}" for row in range(30)], "label": [0, 1] * 15}
    table["age"] = ["" if who == "H1" else age for age, who in zip(table["age"], table["who"], strict=True)]
    table["dose"] = range(30)
    reading = Reading(client="who", missing="drop", label="label")
    source = read_source(write(tmp_path / "p.csv", table), reading=reading)
    with pytest.raises(ConfigError, match="p.csv: every example of H1 has a missing value, .*dataset.missing"):
        source.dataset(by_client=True)
    assert source.dataset().notices == source.raw.notices  # where clients are drawn, nobody is gone


# -- odd data ----------------------------------------------------------------------------------------------------------


def test_data_without_known_or_missing_values_is_refused(tmp_path: Path) -> None:
    columns = {"age": [""] * 40, "dose": list(range(40)), "label": [row % 2 for row in range(40)]}
    few = SMALL | {"scenario": "iid"}
    with pytest.raises(CompatibilityError, match="no known value in column 'age'.*dataset.ignore"):
        fnrfl.run(None, out=None, dataset={"name": write(tmp_path / "p.csv", columns), "missing": "mean"}, **few)
    for kind in (np.uint8, np.int64):
        np.savez(tmp_path / "p.npz", x=np.ones((60, 1, 4, 4), kind), y=np.arange(60) % 2)
        with pytest.raises(CompatibilityError, match="holds pixels or whole numbers"):
            fnrfl.run(None, out=None, dataset={"name": str(tmp_path / "p.npz"), "missing": "mean"}, **few)


def test_a_client_with_one_row_is_named_here_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"name": write(tmp_path / "p.csv", patients(24)), "missing": "mean", "scale": "none"}
    alone = {"clients": 19, "rounds": 1, "scenario": "iid", "public": {"size": 0}, "validation": {"size": 0}}
    with caplog.at_level(logging.WARNING, "fnrfl"):
        fnrfl.run(None, out=None, dataset=keys, model="mlp", **alone)
    assert 'dataset.missing = "mean" asks for the mean' in caplog.text
