"""Data frames that are passed in: their columns have names, and other data is matched by these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import datasets
from torch.utils.data import DataLoader, TensorDataset

import fnrfl
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.data.objects import columns_of, read_object, values_hash

DRAWS = np.random.default_rng(0)
X = pd.DataFrame(DRAWS.normal(size=(300, 4)), columns=list("abcd"))
Y = pd.Series(np.where(X.a - X.b > 0, "yes", "no"), name="answer")
OTHER = [*"dbca"]


def trained(x: Any = X, y: Any = Y, **more: Any) -> fnrfl.Result:
    keys = {"clients": 3, "scenario": "iid", "rounds": 3, "client": {"batch": 16}, "public.size": 0.1}
    return fnrfl.run(dataset=(x, y), out=None, **keys | more)


@pytest.fixture(scope="module")
def run() -> fnrfl.Result:
    return trained()


def test_the_order_of_columns_does_not_matter(run: fnrfl.Result, tmp_path: Path) -> None:
    here, there = fnrfl.predict(run, X), fnrfl.predict(run, X[OTHER])
    assert here.labels == there.labels and not here.notes and not there.notes
    assert fnrfl.evaluate(run, (X, Y)).accuracy == fnrfl.evaluate(run, (X[OTHER], Y)).accuracy > 0.8
    X.assign(answer=Y)[["answer", *OTHER]].to_csv(tmp_path / "other.csv", index=False)
    assert fnrfl.predict(run, tmp_path / "other.csv").labels == here.labels


def test_a_run_on_a_table_takes_a_frame_by_its_names(tmp_path: Path) -> None:
    X.assign(answer=Y).to_csv(tmp_path / "table.csv", index=False)
    run = fnrfl.run(dataset=str(tmp_path / "table.csv"), clients=3, scenario="iid", rounds=2, out=None)
    assert fnrfl.predict(run, X[OTHER]).labels == fnrfl.predict(run, tmp_path / "table.csv").labels


def test_a_frame_that_still_has_its_labels_is_taken_as_a_table_with_labels_is(run: fnrfl.Result) -> None:
    whole = X.assign(answer=Y)[["answer", *OTHER]]
    assert fnrfl.predict(run, whole).labels == fnrfl.predict(run, X).labels
    assert fnrfl.evaluate(run, whole).accuracy == fnrfl.evaluate(run, (X, Y)).accuracy > 0.8
    assert fnrfl.predict(run, whole.assign(answer=None)).labels == fnrfl.predict(run, X).labels
    with pytest.raises(CompatibilityError, match="has 'label', which the training data had not"):
        fnrfl.predict(run, whole.rename(columns={"answer": "label"}))


def test_data_without_a_name_is_called_the_data_inside_a_sentence(run: fnrfl.Result) -> None:
    assert fnrfl.evaluate(run, (X, Y)).where == "the test part of the data"
    assert repr(fnrfl.evaluate(run, (X[:40], Y[:40]))).endswith(" on 40 examples: all examples of the data)")


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (X[["a", "b", "c"]], "lacks 'd'"),
        (X.assign(e=1.0), "has 'e', which the training data had not"),
        (X.rename(columns={"a": "A"}), "lacks 'a' and has 'A'"),
    ],
)
def test_other_columns_are_refused(run: fnrfl.Result, frame: pd.DataFrame, said: str) -> None:
    with pytest.raises(CompatibilityError, match=f"other columns than the training data: it {said}"):
        fnrfl.predict(run, frame)


def test_an_array_is_taken_by_position_and_a_note_says_so(run: fnrfl.Result) -> None:
    found = fnrfl.predict(run, X.to_numpy())
    assert found.labels == fnrfl.predict(run, X).labels
    assert "in the order of the run's: a, b, c, d" in found.notes[0]


def test_a_test_part_has_the_columns_of_the_training_part() -> None:
    keys: dict[str, Any] = {"clients": 2, "scenario": "iid", "rounds": 1, "out": None}
    one, other = (fnrfl.run(dataset=(X[:200], Y[:200], part, Y[200:]), **keys) for part in (X[200:], X[200:][OTHER]))
    assert one.accuracy == other.accuracy and one.model_sha256 == other.model_sha256
    with pytest.raises(CompatibilityError, match="The test part of dataset has other columns than the training part"):
        fnrfl.run(dataset=(X[:200], Y[:200], X[200:].rename(columns={"a": "z"}), Y[200:]), **keys)


def test_public_data_is_matched_by_name() -> None:
    public = pd.DataFrame(DRAWS.normal(size=(40, 4)), columns=list("abcd"))
    labels = np.where(public.a - public.b > 0, "yes", "no")
    one, other = (trained(fnr="on", public=(part, labels)) for part in (public, public[OTHER]))
    assert one.model_sha256 == other.model_sha256


def test_what_has_no_names_is_an_array() -> None:
    numbered, twice = pd.DataFrame(np.ones((3, 2))), pd.DataFrame(np.ones((3, 2)), columns=["a", "a"])
    assert columns_of(numbered) is columns_of(twice) is columns_of(np.ones((3, 2))) is None
    found = columns_of(X, pd.Series([1], name="a"))
    assert found is not None and found.label == "label"  # an input has that name already


def test_names_do_not_change_what_a_run_knows_its_data_by() -> None:
    """Runs of versions that kept no names go on."""
    named, plain = (read_object((x, Y), "dataset") for x in (X, X.to_numpy()))
    assert values_hash(named) == values_hash(plain)


def test_objects_that_people_try_are_told_what_to_give_instead() -> None:
    frame = X.assign(kind=["yes", "no"] * 150)
    with pytest.raises(ConfigError, match=r"is DataFrame; .*\(frame\.drop\(columns=NAME\), frame\[NAME\]\)"):
        fnrfl.run(dataset=frame, rounds=1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4)))
    with pytest.raises(ConfigError, match=r"is DataLoader; .* loader\.dataset"):
        fnrfl.run(dataset=loader, rounds=1)


# -- data of scikit-learn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_frame", [False, True])
def test_a_bunch_is_taken_as_its_data_and_target(as_frame: bool) -> None:
    bunch = datasets.load_breast_cancer(as_frame=as_frame)
    keys: dict[str, Any] = {"model": "mlp(depth=0)", "clients": 2, "scenario": "iid", "rounds": 1, "out": None}
    result = fnrfl.run(dataset=bunch, **keys)
    assert result.model_sha256 == fnrfl.run(dataset=(bunch.data, bunch.target), **keys).model_sha256
    assert fnrfl.predict(result, bunch).classes == ("malignant", "benign")
    assert fnrfl.evaluate(result, bunch).accuracy == result.accuracy > 0.8


def test_names_of_columns_are_no_names_of_classes() -> None:
    """A loader of OpenML has the target's column in target_names, and classes by name in target."""
    bunch = {"data": X, "target": Y, "target_names": ["answer"]}
    assert fnrfl.predict(trained(X, Y, rounds=1), X).classes == ("no", "yes")
    keys: dict[str, Any] = {"clients": 3, "scenario": "iid", "rounds": 1, "out": None}
    assert fnrfl.predict(fnrfl.run(dataset=bunch, **keys), X).classes == ("no", "yes")


# -- amounts are no classes --------------------------------------------------------------------------------------------

AMOUNTS = datasets.load_diabetes(as_frame=True)  # whole numbers, stored as floats


@pytest.mark.parametrize("target", [AMOUNTS.target, AMOUNTS.target / 3], ids=["whole", "fractions"])
def test_a_regression_is_refused_as_one(target: Any, tmp_path: Path) -> None:
    AMOUNTS.data.assign(level=target).to_csv(tmp_path / "amounts.csv", index=False)
    given: list[Any] = [AMOUNTS, (AMOUNTS.data, target), (AMOUNTS.data.to_numpy(), target.to_numpy())]
    for dataset in [*given, str(tmp_path / "amounts.csv")]:
        with pytest.raises(ConfigError, match="classification only"):
            fnrfl.run(dataset=dataset, clients=2, rounds=1, out=None)


def test_classes_that_are_stored_as_floats_are_classes(tmp_path: Path) -> None:
    y = np.arange(300) % 30 * 1.0
    many = X.assign(label=y)
    many.to_csv(tmp_path / "many.csv", index=False)
    for dataset in [
        (X, y),
        str(tmp_path / "many.csv"),
        (X[:40], (np.arange(40) % 20) * 1.0),
        (X, np.arange(300) % 100),
    ]:
        assert fnrfl.run(dataset=dataset, clients=2, scenario="iid", rounds=1, out=None).rounds
