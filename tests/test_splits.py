"""Splits: who may see which examples, exactly, and never two who must not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.rng import numpy_generator
from fnrfl.data.datasets import Dataset, Part, load, object_source
from fnrfl.data.partition.holdout import Carved, carve, share_out
from fnrfl.data.partition.views import Splits, num_shared
from fnrfl.data.sources import available

PARTS = ("public", "ranking", "distill", "validation", "rest")


def toy_labels(n: int = 200, classes: int = 5, seed: int = 0) -> np.ndarray:
    """Classes of unequal size: class c is drawn in proportion to c + 1."""
    share = np.arange(1, classes + 1) / np.arange(1, classes + 1).sum()
    return numpy_generator(seed, "labels").choice(classes, n, p=share)


def toy_carve(labels: np.ndarray, **changes: float) -> Carved:
    chosen: dict[str, float] = {"public": 0.2, "ranking": 0.25, "distill": 0.0, "validation": 0.1, "seed": 0, **changes}
    seed = int(chosen.pop("seed"))
    return carve(labels, seed=seed, num_classes=5, **chosen)


def parts_of(carved: Carved) -> dict[str, np.ndarray]:
    """The positions of every part by name."""
    shared = share_out(carved.public, carved.ranking, carved.distill)
    return dict(zip(PARTS, (*shared, carved.validation, carved.rest), strict=True))


def toy_dataset(n: int = 200, classes: tuple[str, ...] | None = None, seed: int = 0) -> Dataset:
    rng = numpy_generator(seed, "pixels")
    x, y = rng.integers(0, 256, (n + 50, 1, 4, 4), dtype=np.uint8), toy_labels(n + 50)
    made = object_source((x[:n], y[:n], x[n:], y[n:]), "toy").dataset()
    return made if classes is None else replace(made, classes=classes)


def toy_splits(dataset: Dataset, carved: Carved, **options: object) -> Splits:
    positions = np.array_split(np.arange(len(carved.rest)), 4)
    return Splits.build(dataset, carved, positions, **options)  # type: ignore[arg-type]


def rows(part: Part) -> set[bytes]:
    return {row.tobytes() for row in part.x.numpy()}


def labels_by_row(part: Part) -> dict[bytes, int]:
    return {row.tobytes(): int(y) for row, y in zip(part.x.numpy(), part.y, strict=True)}


# -- carving -----------------------------------------------------------------------------------------------------------


@given(
    labels=st.lists(st.integers(0, 4), min_size=30, max_size=120),
    public=st.one_of(st.floats(0, 0.4), st.integers(0, 12)),
    validation=st.one_of(st.floats(0, 0.4), st.integers(0, 12)),
    ranking=st.floats(0, 0.9),
    distill=st.floats(0, 1),
    seed=st.integers(0, 5),
)
def test_every_example_is_in_exactly_one_part_or_the_request_is_refused(
    labels: list[int], public: float, validation: float, ranking: float, distill: float, seed: int
) -> None:
    y = np.array(labels)
    wanted = {"public": public, "validation": validation, "ranking": ranking, "distill": distill}
    try:
        parts = parts_of(toy_carve(y, seed=seed, **wanted))
    except ConfigError as error:
        names = ("public.size", "validation.size") if "training examples" in str(error) else ("ranking", "distill")
        assert any(f"{name} = " in str(error) for name in names)
        return
    own = [held for name, held in parts.items() if ranking or name != "ranking"]
    assert np.array_equal(np.sort(np.concatenate(own)), np.arange(len(y)))
    sizes = {name: round(size * len(y)) if size < 1 else size for name, size in wanted.items()}
    assert len(parts["validation"]) == sizes["validation"]
    taken = [parts["public"], parts["distill"]] + [parts["ranking"]] * bool(ranking)
    assert sum(map(len, taken)) == sizes["public"]
    if sizes["public"]:
        assert (len(parts["distill"]) > 0) == (distill > 0)
        assert len(parts["public"]) > 0 or ranking + distill == 1
    if not ranking:
        assert np.array_equal(parts["ranking"], parts["public"])


def test_parts_are_stratified() -> None:
    y = numpy_generator(0, "shuffle").permutation(np.repeat(np.arange(10), 100))
    carved = carve(y, public=0.1, ranking=0.2, distill=0.3, validation=50, seed=1, num_classes=10)
    counts = {name: np.bincount(y[held], minlength=10).tolist() for name, held in parts_of(carved).items()}
    assert counts == {name: [n] * 10 for name, n in zip(PARTS, (5, 2, 3, 5, 85), strict=True)}
    y = toy_labels(1000)  # uneven classes keep their shares up to rounding
    for held in parts_of(toy_carve(y, public=0.3, ranking=0.4, distill=0.2)).values():
        assert np.abs(np.bincount(y[held], minlength=5) - np.bincount(y) / len(y) * len(held)).max() <= 3


def test_no_part_depends_on_another_and_a_larger_one_contains_a_smaller() -> None:
    y = toy_labels()
    base = parts_of(toy_carve(y))
    for name, changes in {
        "validation": {"public": 0.4, "ranking": 0.5, "distill": 0.3},
        "public": {"validation": 30},
        "ranking": {"distill": 0.5},
    }.items():
        assert np.array_equal(base[name], parts_of(toy_carve(y, **changes))[name])
    assert not np.array_equal(base["public"], parts_of(toy_carve(y, seed=4))["public"])
    small, large = toy_carve(y, public=20, ranking=0, validation=10), toy_carve(y, public=60, ranking=0, validation=40)
    assert set(small.public) < set(large.public) and set(small.validation) < set(large.validation)
    bare = parts_of(toy_carve(y, public=0, validation=0))
    assert np.array_equal(bare.pop("rest"), np.arange(200)) and not any(map(len, bare.values()))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"public": 0.7, "validation": 60}, "public.size = 0.7 and validation.size = 60 take 140 and 60 of 200"),
        ({"public": 200, "validation": 0}, "some must remain for the clients"),
        ({"public": -1}, "public.size = -1 is neither a fraction"),
        ({"public": 1.5}, "public.size = 1.5 is neither a fraction"),
        ({"validation": float("nan")}, "validation.size = nan is neither"),
        ({"validation": float("inf")}, "validation.size = inf is neither"),
        ({"validation": 0.001}, "validation.size = 0.001 of 200 training examples is less than one"),
        ({"ranking": 1.0}, "public.ranking = 1.0 .* ranking below 1"),
        ({"ranking": 0.6, "distill": 0.6}, "together 1 at most"),
        ({"distill": -0.1}, "public.distill = -0.1"),
        ({"public": 1, "ranking": 0.2}, "1 public example cannot be shared out"),
        ({"public": 2, "ranking": 0.2, "distill": 0.2}, "2 public examples cannot be shared out"),
        ({"public": 1, "ranking": 0.5, "distill": 0.5}, "1 public example cannot be shared out"),
    ],
)
def test_sizes_that_cannot_be_met_are_refused(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parts_of(toy_carve(toy_labels(), **changes))


# -- putting together --------------------------------------------------------------------------------------------------


def test_splits_hold_what_was_carved_and_partitioned() -> None:
    dataset, carved = toy_dataset(), toy_carve(toy_labels(250)[:200], distill=0.25)
    splits = toy_splits(dataset, carved)
    assert torch.cat([*splits.clients]).tolist() == carved.rest.tolist()
    positions = {name: torch.from_numpy(held) for name, held in parts_of(carved).items()}
    for name in ("public", "ranking", "validation"):
        part, index = getattr(splits, name), positions[name]
        assert torch.equal(part.x, dataset.train.x[index]) and torch.equal(part.y, dataset.train.y[index])
    assert torch.equal(splits.distill.x, dataset.train.x[positions["distill"]])
    assert splits.distill.y.tolist() == [-1] * 10, "examples to distil from are used without labels"
    assert splits.train is dataset.train and splits.test is dataset.test and splits.num_classes == 5


def test_without_public_data_the_parts_are_empty() -> None:
    dataset = toy_dataset()
    splits = toy_splits(dataset, toy_carve(dataset.train.y.numpy(), public=0, validation=0))
    for part in (splits.public, splits.ranking, splits.distill, splits.validation):
        assert part.x.shape == (0, 1, 4, 4) and part.y.shape == (0,)
    assert sum(map(len, splits.clients)) == 200


def test_the_manifest_follows_every_part() -> None:
    dataset = toy_dataset()
    carved = toy_carve(dataset.train.y.numpy(), distill=0.25)
    splits = toy_splits(dataset, carved)
    manifest = splits.manifest()
    assert json.loads(json.dumps(manifest)) == manifest == toy_splits(dataset, carved).manifest()
    empty = Part(dataset.train.x[:0], dataset.train.y[:0])
    parts = ("train", "public", "ranking", "distill", "validation", "test")
    others = [replace(splits, **{name: empty}) for name in parts]  # type: ignore[arg-type]
    others += [replace(splits, clients=splits.clients[::-1]), replace(splits, num_classes=6)]
    assert len({str(other.manifest()["sha256"]) for other in [splits, *others]}) == 9


# -- overlaps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["public", "ranking", "distill", "validation"])
def test_a_client_that_holds_what_was_set_aside_is_refused(name: str) -> None:
    dataset = toy_dataset()
    carved = toy_carve(dataset.train.y.numpy(), distill=0.25)
    rest = carved.rest.copy()
    rest[0] = parts_of(carved)[name][0]
    with pytest.raises(CompatibilityError, match="and client 0 hold .* 1 example in all"):
        toy_splits(dataset, replace(carved, rest=rest))


def test_a_client_that_shares_with_another_is_refused() -> None:
    dataset = toy_dataset()
    carved = toy_carve(dataset.train.y.numpy())
    with pytest.raises(CompatibilityError, match="Both client 0 and client 1 hold .* 3 examples in all"):
        Splits.build(dataset, carved, [np.arange(10), np.arange(7, 20)])
    with pytest.raises(CompatibilityError, match="Both client 1 and client 1 hold"):
        Splits.build(dataset, carved, [np.arange(10), np.array([12, 12])])


def test_the_same_examples_may_rank_and_refine_when_asked() -> None:
    dataset = toy_dataset()
    splits = toy_splits(dataset, toy_carve(dataset.train.y.numpy(), ranking=0))
    assert len(splits.public) == 40 and torch.equal(splits.public.x, splits.ranking.x)


def test_duplicates_inside_a_data_set_are_no_reason_to_refuse() -> None:
    dataset = toy_dataset()
    dataset.test.x[:20] = dataset.train.x[:20]
    assert toy_splits(dataset, toy_carve(dataset.train.y.numpy())).num_classes == 5


# -- public data from elsewhere ----------------------------------------------------------------------------------------


def outside(n: int = 40, seed: int = 9, classes: tuple[str, ...] | None = None) -> Dataset:
    dataset = toy_dataset(n - 10, seed=seed)
    parts = [Part(dataset.train.x, dataset.train.y), Part(dataset.test.x[:10], dataset.test.y[:10])]
    return replace(dataset, train=parts[0], test=parts[1], classes=classes or dataset.classes)


def bare(dataset: Dataset, **changes: float) -> Carved:
    """The training set without public data carved out of it."""
    return toy_carve(dataset.train.y.numpy(), public=0, **changes)


def test_public_data_from_elsewhere_is_shared_out_whole() -> None:
    dataset, other = toy_dataset(), outside()
    splits = toy_splits(dataset, bare(dataset, ranking=0.25, distill=0.25), public=other)
    assert [len(part) for part in (splits.public, splits.ranking, splits.distill)] == [20, 10, 10]
    assert rows(splits.public) | rows(splits.ranking) | rows(splits.distill) == rows(other.train) | rows(other.test)
    assert labels_by_row(splits.public).items() < (labels_by_row(other.train) | labels_by_row(other.test)).items()
    assert sum(map(len, splits.clients)) == 180


def test_classes_of_public_data_are_matched_by_name() -> None:
    names = ("ant", "bee", "cow", "dog", "elk")
    dataset, other = toy_dataset(classes=names), outside(classes=("elk", "dog", "cow", "bee", "ant"))
    splits = toy_splits(dataset, bare(dataset, ranking=0), public=other)
    numbered = toy_splits(dataset, bare(dataset, ranking=0), public=outside())
    own = labels_by_row(other.train) | labels_by_row(other.test)
    assert labels_by_row(splits.public) == {row: 4 - y for row, y in own.items()}
    assert labels_by_row(numbered.public) == own
    few = replace(outside(), classes=("0", "2", "3", "4"), train=Part(other.train.x, other.train.y % 4))
    few = replace(few, test=Part(other.test.x, other.test.y % 4))
    places = {row: (0, 2, 3, 4)[y % 4] for row, y in own.items()}  # numbers that occur stand for places
    assert labels_by_row(toy_splits(dataset, bare(dataset, ranking=0), public=few).public) == places
    with pytest.raises(CompatibilityError, match="has the class 'fox', which dataset does not"):
        toy_splits(dataset, bare(dataset), public=outside(classes=("ant", "bee", "cow", "dog", "fox")))
    with pytest.raises(CompatibilityError, match="has the class '0', which dataset does not; its classes are 1, 2"):
        toy_splits(toy_dataset(classes=tuple("12345")), bare(dataset), public=outside())


def test_public_data_that_is_already_known_is_refused_and_counted() -> None:
    dataset, other = toy_dataset(), outside()
    other.train.x[:3] = dataset.train.x[50:53]
    other.train.x[3:5] = dataset.test.x[7]
    with pytest.raises(
        CompatibilityError,
        match="3 that are also in the training set and 2 that are also in the test set, among its 40",
    ):
        toy_splits(dataset, bare(dataset), public=other)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (torch.zeros(9, 1, 4, 5, dtype=torch.uint8), r"uint8\[1, 4, 5\] and dataset toy"),
        (torch.zeros(9, 1, 4, 4), r"float32\[1, 4, 4\] and dataset toy of uint8\[1, 4, 4\]"),
    ],
)
def test_public_data_of_another_kind_is_refused(x: torch.Tensor, sentence: str) -> None:
    dataset = toy_dataset()
    with pytest.raises(CompatibilityError, match=sentence):
        toy_splits(dataset, bare(dataset), public=with_inputs(dataset, x))


def with_inputs(dataset: Dataset, x: torch.Tensor) -> Dataset:
    """A data set of these inputs, none of them to test, with the first labels."""
    return replace(dataset, train=Part(x, dataset.train.y[: len(x)]), test=Part(x[:0], dataset.test.y[:0]))


@pytest.mark.parametrize("single", [True, False])
def test_features_are_compared_in_the_coarser_type(single: bool) -> None:
    x, y = numpy_generator(0, "x").normal(size=(60, 3)), np.arange(60) % 2
    x[:, 0] = 0.0
    own = x.astype(np.float32) if single else x
    dataset = object_source((own[:40], y[:40], own[40:], y[40:]), "table").dataset()
    exact, minus_zero = torch.from_numpy(x[:5]), torch.tensor([-1.0, 1.0, 1.0])
    for public in (exact, exact.float(), exact.float() * minus_zero, exact * minus_zero):
        with pytest.raises(CompatibilityError, match="5 that are also in the training set"):
            toy_splits(dataset, bare(dataset), public=with_inputs(dataset, public))
    other = toy_splits(dataset, bare(dataset), public=with_inputs(dataset, exact.float() + 1))
    assert other.public.x.dtype == dataset.train.x.dtype


# -- the leak ----------------------------------------------------------------------------------------------------------


def test_the_test_set_is_public_only_as_a_named_leak() -> None:
    dataset = toy_dataset()
    with pytest.raises(CompatibilityError, match='public.source = "test".*leaks.public_is_test'):
        toy_splits(dataset, bare(dataset), public="test")
    with pytest.raises(CompatibilityError, match="leaks.public_is_test = true makes the test set public"):
        toy_splits(dataset, bare(dataset), public=outside(), leak_public_is_test=True)
    with pytest.raises(CompatibilityError, match="set training examples aside, .* only one can be"):
        toy_splits(dataset, toy_carve(dataset.train.y.numpy(), ranking=0), leak_public_is_test=True)


@pytest.mark.parametrize("source", ["test", None])
@pytest.mark.parametrize(("share", "sizes"), [(0.0, [50, 50]), (0.2, [40, 10])])
def test_under_the_leak_the_whole_test_set_is_public(source: str | None, share: float, sizes: list[int]) -> None:
    dataset = toy_dataset()
    splits = toy_splits(dataset, bare(dataset, ranking=share), public=source, leak_public_is_test=True)
    assert [len(splits.public), len(splits.ranking)] == sizes
    assert rows(splits.public) | rows(splits.ranking) == rows(dataset.test)


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in available() if entry.found])
def test_the_honest_default_is_disjoint_in_content_too(name: str) -> None:
    dataset = load(name)
    y = dataset.train.y.numpy()
    carved = carve(y, public=0.1, ranking=0.2, distill=0, validation=0.05, seed=0, num_classes=10)
    splits = toy_splits(dataset, carved)
    clients = dataset.train.take(torch.cat([*splits.clients]))
    for part in (splits.public, splits.ranking, splits.validation):
        assert num_shared(part.x, clients.x) == num_shared(part.x, dataset.test.x) == 0
