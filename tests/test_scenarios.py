"""Scenarios: the grammar, exact splits, and NIID-Bench's draws."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.data.noise import mask
from fnrfl.data.partition import niid
from fnrfl.data.partition.draw import draw
from fnrfl.data.partition.value import Partition
from fnrfl.data.scenarios import (
    FeatureNoise,
    Iid,
    Joint,
    LabelClasses,
    LabelDirichlet,
    Niid,
    NiidMixed,
    QuantityDirichlet,
    Scenario,
    describe,
    parse,
)

CIFAR = np.arange(50_000) % 10  # ten classes of 5,000 examples, as CIFAR-10 has


def split(text: str, labels: np.ndarray, clients: int, seed: int = 0, num_classes: int = 10) -> Partition:
    return draw(parse(text), labels, clients, seed, num_classes=num_classes)


def is_exact(partition: Partition, labels: np.ndarray) -> bool:
    """Every example at exactly one client, nobody empty, counts and sizes true."""
    times = np.bincount(np.concatenate(partition.positions), minlength=len(labels))
    counts = np.array([np.bincount(labels[mine], minlength=partition.num_classes) for mine in partition.positions])
    return bool(
        len(times) == len(labels)
        and (times == 1).all()
        and (partition.sizes >= 1).all()
        and (partition.counts == counts).all()
        and (partition.sizes == counts.sum(axis=1)).all()
    )


# ---- grammar ----

alphas = st.floats(1e-6, 1e6)
minima = st.integers(1, 1000)
labels_ = st.one_of(
    st.builds(LabelDirichlet, alphas, st.booleans(), minima), st.builds(LabelClasses, st.integers(1, 1000))
)
quantities = st.builds(QuantityDirichlet, alphas, minima)
plain = st.one_of(
    st.just(Iid()),
    st.builds(LabelDirichlet, alphas),
    st.builds(LabelClasses, st.integers(1, 99)),
    st.builds(QuantityDirichlet, alphas),
)
joints = st.builds(
    Joint, labels_.filter(lambda part: not (isinstance(part, LabelDirichlet) and part.balance)), quantities
)
noises = st.builds(
    FeatureNoise,
    st.floats(0, 1e300),
    st.sampled_from(["level", "mask"]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
scenarios = st.builds(
    Scenario,
    st.one_of(st.just(Iid()), labels_, quantities, joints, st.builds(Niid, plain), st.builds(NiidMixed, alphas)),
    st.none() | noises,
)


@given(scenarios)
def test_text_round_trips(scenario: Scenario) -> None:
    assert parse(str(scenario)) == scenario
    assert str(parse(str(scenario))) == str(scenario)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("iid", "iid"),
        (" iid ( ) ", "iid"),
        ("label-dirichlet(alpha=.5,min = 10, balance=false)", "label-dirichlet(0.5)"),
        ("label-dirichlet(1.0, true, 3)", "label-dirichlet(1, balance=true, min=3)"),
        ("quantity-dirichlet(1e-1)+label-classes(k=2)", "label-classes(2) + quantity-dirichlet(0.1)"),
        ("iid + feature-noise(0.1)", "feature-noise(0.1)"),
        ("feature-noise(0.1, mask, -2, redraw=false)", "feature-noise(0.1, kind=mask, mean=-2, redraw=false)"),
        ("feature-noise(0.5)+niid( label-dirichlet( 0.5 ) )", "niid(label-dirichlet(0.5)) + feature-noise(0.5)"),
        ("niid-mixed(0.5)", "niid-mixed"),
        ("natural+feature-noise(0.10)", "natural + feature-noise(0.1)"),
        ("niid-mixed(alpha=2)", "niid-mixed(2)"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name of a scenario was expected at the end"),
        ("lable-dirichlet(0.5)", "Did you mean 'label-dirichlet'?"),
        ("IID", "Did you mean 'iid'?"),
        ("xyzzy", "It can be iid, label-dirichlet"),
        ("label-dirichlet", "needs alpha, as in label-dirichlet(0.5)"),
        ("label-dirichlet(0.5, mim=3)", "no argument 'mim'. Did you mean 'min'?"),
        ("label-dirichlet(0.5, false, 3, 4)", "'4' is too much, label-dirichlet takes alpha, balance, min"),
        ("iid(3)", "iid takes no arguments"),
        ("label-dirichlet(0.5, alpha=1)", "alpha of label-dirichlet is given twice"),
        ("label-dirichlet(half)", "alpha of label-dirichlet is half; it must be a number"),
        ("label-dirichlet(1e999)", "too large"),
        ("feature-noise(nan)", "sigma of feature-noise is nan; it must be a number"),
        ("label-dirichlet(0)", "alpha is 0; it must be between"),
        ("label-dirichlet(-1)", "alpha is -1; it must be between"),
        ("niid-mixed(2000000)", "alpha is 2000000; it must be between"),
        ("label-dirichlet(0.5, min=0)", "min is 0; it must be at least 1"),
        ("label-dirichlet(0.5, balance=yes)", "it must be true or false"),
        ("label-classes(2.5)", "it must be a whole number"),
        ("label-classes(0)", "k is 0; it must be at least 1"),
        ("feature-noise(-0.1)", "sigma is -0.1; it must be a standard deviation"),
        ("feature-noise(0.1, kind=patch)", "it must be level or mask"),
        ("label-dirichlet(0.5", "brackets are closed"),
        ("label-dirichlet(0.5))", "')' was not expected"),
        ("label-dirichlet(0.5) feature-noise(0.1)", "scenarios are joined by +"),
        ("label-dirichlet(,)", "alpha of label-dirichlet is empty"),
        ("label-dirichlet(min=)", "min of label-dirichlet is empty"),
        ("iid +", "expected at the end"),
        ("iid; iid", "'; iid' was not expected"),
        ("label-dirichlet(1) + label-classes(2)", "label-dirichlet(1) and label-classes(2) are two label skews"),
        ("feature-noise(0.1) + feature-noise(0.2)", "are two feature noises"),
        ("iid + niid-mixed", "are two splits"),
        ("natural + iid", "are two splits"),
        ("natural + quantity-dirichlet(1)", "keep one of them"),
        ("niid(natural)", "keep one of them"),
        ("iid + label-classes(2)", "iid is a whole split"),
        ("label-dirichlet(1, balance=true) + quantity-dirichlet(1)", "Leave one of them out"),
        ("niid", "name of a scenario was expected at the end"),
        ("niid(label-dirichlet(0.5, false))", "NIID-Bench takes alpha or k alone"),
        ("niid(label-classes(2) + quantity-dirichlet(1))", "its own label and quantity skew is niid-mixed"),
        ("niid(iid + feature-noise(0.1, kind=mask))", "write niid(...) + feature-noise(...)"),
        ("niid(niid-mixed(0.3))", "says the same thing twice; write niid-mixed(0.3)"),
        ("niid(niid(iid))", "write niid(iid)"),
    ],
)
def test_bad_text_is_refused_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert str(caught.value)[-1] in ".?"


@given(st.text("label-dirichlet(0.5)+feature-noise(,=niid mixed1e", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        scenario = parse(text)
    except ConfigError:
        return
    assert parse(str(scenario)) == scenario


def test_what_only_python_or_a_draw_can_refuse() -> None:
    with pytest.raises(ConfigError):
        parse(f"label-classes({'9' * 5000})")
    with pytest.raises(ConfigError, match="Use a smaller k"):
        split(f"label-classes({'9' * 400})", CIFAR, 10)
    with pytest.raises(ConfigError, match="alpha or k alone"):
        Niid(LabelDirichlet(0.5, min=3))


def test_describe_lists_every_part() -> None:
    rows = describe()
    assert "label-dirichlet(alpha, balance=false, min=10)" in rows
    assert "feature-noise(sigma, kind=level|mask, mean=0, redraw=true)" in rows
    assert all(meaning.endswith(".") for meaning in rows.values())


def test_no_torch_needed() -> None:
    code = "import sys, fnrfl.data.scenarios; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- splits ----


@settings(deadline=None)
@given(
    scenarios=st.sampled_from(
        [
            "iid",
            "label-dirichlet(0.3, min=1)",
            "label-dirichlet(0.3, balance=true, min=1)",
            "label-classes(2)",
            "quantity-dirichlet(0.5, min=1)",
            "label-dirichlet(1, min=1) + quantity-dirichlet(1, min=1)",
            "label-classes(3) + quantity-dirichlet(2, min=1)",
            "niid(iid)",
            "niid(label-classes(2))",
        ]
    ),
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=300).map(np.array),
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_example_goes_to_exactly_one_client(scenarios: str, labels: np.ndarray, clients: int, seed: int) -> None:
    try:
        partition = split(scenarios, labels, clients, seed, num_classes=6)
    except ConfigError:
        return
    assert is_exact(partition, labels)


def test_iid_is_even_and_random() -> None:
    partition = split("iid", CIFAR, 7)
    assert set(partition.sizes) == {50_000 // 7, 50_000 // 7 + 1}
    assert abs(partition.counts - 50_000 / 70).max() < 150  # six standard deviations
    assert partition != split("iid", CIFAR, 7, seed=1)


@pytest.mark.parametrize("seed", range(5))
def test_label_classes_gives_each_client_k_classes_split_evenly(seed: int) -> None:
    partition = split("label-classes(3)", CIFAR, 25, seed)
    holds = partition.counts > 0
    assert (holds.sum(axis=1) == 3).all()
    owners = holds.sum(axis=0)
    assert set(owners) <= {7, 8}  # 75 slots over 10 classes
    for k in range(10):
        held = partition.counts[holds[:, k], k]
        assert held.max() - held.min() <= 1


def test_label_classes_gives_small_classes_no_more_owners_than_examples() -> None:
    labels = np.array([0, 1, 2, 3, 3, 3])  # every client must hold class 3 and one of the others
    for seed in range(20):
        partition = split("label-classes(2)", labels, 3, seed, num_classes=4)
        assert (partition.counts[:, 3] == 1).all()
        assert (partition.counts[:, :3].sum(axis=1) == 1).all()


def test_label_dirichlet_shares_have_the_dirichlet_variance() -> None:
    for alpha in (0.1, 0.5, 5.0):
        shares = np.stack([split(f"label-dirichlet({alpha}, min=1)", CIFAR, 10, seed).counts for seed in range(60)])
        expected = 0.1 * 0.9 / (10 * alpha + 1)
        assert np.var(shares / 5000) == pytest.approx(expected, rel=0.1)


def test_tiny_alpha_gives_whole_classes_and_huge_alpha_is_even() -> None:
    partition = split("label-dirichlet(0.0001, min=1)", np.arange(10_000) % 100, 4, num_classes=100)
    assert np.isin(partition.counts, [0, 100]).mean() > 0.99
    assert abs(split("label-dirichlet(1000000)", CIFAR, 10).counts - 500).max() <= 5


def test_balance_gives_nothing_to_whoever_holds_an_even_share() -> None:
    partition = split("label-dirichlet(0.1, balance=true)", CIFAR, 10, seed=1)
    before = np.cumsum(partition.counts, axis=1) - partition.counts
    assert (before >= 5000).any()
    assert (partition.counts[before >= 5000] == 0).all()
    assert np.ptp(partition.sizes) < np.ptp(split("label-dirichlet(0.1)", CIFAR, 10, seed=1).sizes)


def test_minimum_is_kept() -> None:
    for text in ("label-dirichlet(0.1, min=300)", "label-dirichlet(0.5, min=5) + quantity-dirichlet(1, min=300)"):
        assert split(text, CIFAR, 10).sizes.min() >= 300


def test_quantity_skews_sizes_and_not_labels() -> None:
    partition = split("quantity-dirichlet(0.5)", CIFAR, 10)
    assert np.ptp(partition.sizes) > 10_000
    large = partition.counts[partition.sizes > 2000] / partition.sizes[partition.sizes > 2000, None]
    assert abs(large - 0.1).max() < 0.04


def test_label_and_quantity_multiply() -> None:
    """With even labels, the joint split has the sizes' shares in every class; a class is split by its owners' sizes."""
    partition = split("label-dirichlet(1000000) + quantity-dirichlet(0.5)", CIFAR, 10)
    shares = partition.sizes / 50_000
    assert shares.max() > 3 * np.median(shares)
    assert abs(partition.counts / 5000 - shares[:, None]).max() < 0.005
    partition = split("label-classes(10) + quantity-dirichlet(1)", CIFAR, 5)
    assert abs(partition.counts - partition.counts.mean(axis=1, keepdims=True)).max() <= 1
    assert np.ptp(partition.sizes) > 1000


def test_rounding_favours_no_client() -> None:
    """Classes smaller than the cohort: rounding from a fixed point would starve the same clients in every class."""
    labels = np.arange(1000) % 100
    sizes = [split("label-dirichlet(1000000, min=1)", labels, 50, seed, num_classes=100).sizes for seed in range(50)]
    mean = np.mean(sizes, axis=0)
    assert abs(mean - 20).max() < 5 * 4 / np.sqrt(50)  # a size has a standard deviation of at most 4


def test_clients_have_as_many_classes_as_their_shares_say() -> None:
    """A share s of a class of 500 is an example or more with probability min(1, 500 s), for every client alike."""
    labels = np.repeat(np.arange(10), 500)
    drawn = [split("label-dirichlet(0.1, min=1)", labels, 10, seed).counts for seed in range(200)]
    held = np.array([(counts > 0).sum(axis=1) for counts in drawn])  # [draws, clients]
    expected = 10 * np.minimum(1, 500 * np.random.default_rng(0).beta(0.1, 0.9, 1_000_000)).mean()
    assert abs(held.mean(axis=0) - expected).max() < 4 * held.std() / np.sqrt(len(held))
    assert abs(held.mean() - expected) < 3 * held.mean(axis=1).std() / np.sqrt(len(held))


def test_absent_classes_are_left_out() -> None:
    labels = np.arange(1000) % 3 * 2  # classes 0, 2, 4 of 6
    partition = split("label-classes(2)", labels, 6, num_classes=6)
    assert (partition.counts[:, [1, 3, 5]] == 0).all()
    assert ((partition.counts > 0).sum(axis=1) == 2).all()


@pytest.mark.parametrize(
    ("text", "labels", "clients", "words"),
    [
        ("iid", CIFAR[:5], 6, "clients is 6 and the data has 5 examples"),
        ("iid", CIFAR, 0, "clients is 0"),
        ("iid", np.array([0, 11]), 1, "between 0 and 9"),
        ("iid", np.array([0.0, 1.0]), 1, "whole numbers"),
        ("label-dirichlet(0.5)", CIFAR[:95], 10, "Use at most 9 clients or a smaller min"),
        ("quantity-dirichlet(0.5, min=6000)", CIFAR, 10, "Use at most 8 clients or a smaller min"),
        ("label-dirichlet(0.01)", CIFAR, 200, "Use fewer clients, a smaller min or a larger alpha"),
        ("quantity-dirichlet(0.01)", CIFAR, 200, "Use fewer clients, a smaller min or a larger alpha"),
        ("label-classes(11)", CIFAR, 10, "Use a smaller k"),
        ("label-classes(2)", CIFAR, 4, "Use k of at least 3"),
        ("label-classes(2) + quantity-dirichlet(1)", CIFAR, 4, "Use k of at least 3"),
        ("label-classes(10)", CIFAR[:95], 10, "too few examples"),
        ("niid(quantity-dirichlet(0.5))", CIFAR[:95], 10, "Use at most 9 clients."),
        ("niid(quantity-dirichlet(0.01))", CIFAR, 100, "Use fewer clients or a larger alpha"),
        ("niid(label-dirichlet(0.01))", CIFAR[:5000], 100, "Use fewer clients or a larger alpha"),
        ("niid(label-classes(11))", CIFAR, 10, "Use a smaller k"),
        ("niid(label-classes(1))", CIFAR, 9, "class 9 has no owner"),
        ("niid(label-classes(9))", CIFAR[:10], 9, "without examples"),
        ("niid-mixed", CIFAR, 9, "niid-mixed is defined for 10 clients"),
    ],
)
def test_the_impossible_is_refused_with_a_way_out(
    text: str, labels: np.ndarray, clients: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(niid, "MAX_NUMBERS", 2_000_000)
    with pytest.raises(ConfigError) as caught:
        split(text, labels, clients)
    assert words in str(caught.value)


def test_large_splits_are_quick() -> None:
    """500 clients, 100 classes, 100,000 examples: tens of milliseconds; seconds would mean a loop crept in."""
    labels = np.arange(100_000) % 100
    start = time.process_time()  # what others do meanwhile does not count
    assert is_exact(split("label-dirichlet(0.5)", labels, 500, num_classes=100), labels)
    assert time.process_time() - start < 5


# ---- noise ----


def test_noise_does_not_change_the_split() -> None:
    for text in ("iid", "label-dirichlet(0.5)", "label-classes(2)", "niid-mixed"):
        bare, noisy = split(text, CIFAR, 10), split(f"{text} + feature-noise(0.5)", CIFAR, 10)
        assert all(np.array_equal(a, b) for a, b in zip(bare.positions, noisy.positions, strict=True))
        assert bare.noise is None and (bare.levels == 0).all()
        assert noisy.noise == FeatureNoise(0.5)
        assert bare.sha256 != noisy.sha256


def test_levels_grow_from_nothing_to_sigma() -> None:
    assert FeatureNoise(0.5).levels(3).tolist() == [0.0, 0.25, 0.5]
    assert FeatureNoise(0.5).levels(1).tolist() == [0.0]
    assert FeatureNoise(0.5, kind="mask").levels(3).tolist() == [0.5, 0.5, 0.5]
    assert split("feature-noise(0.9)", CIFAR, 10).levels == pytest.approx(np.arange(10) / 10)


@pytest.mark.parametrize(("clients", "shape"), [(10, (3, 32, 32)), (9, (28, 28)), (2, (1, 8, 8)), (5, (3, 20, 50))])
def test_masks_are_squares_that_do_not_overlap(clients: int, shape: tuple[int, ...]) -> None:
    masks = np.stack([mask(client, clients, shape) for client in range(clients)])
    assert masks.shape == (clients, *shape)
    assert masks.sum(axis=0).max() == 1
    side = min(shape[-2:]) // int(np.ceil(np.sqrt(clients)))
    for one in masks.reshape(clients, -1, *shape[-2:]):
        assert (one == one[0]).all()
        assert one[0].any(axis=0).sum() == one[0].any(axis=1).sum() == side
        assert one[0].sum() == side * side


def test_masks_at_their_limits() -> None:
    assert sum(mask(client, 16, (32, 32)).astype(int) for client in range(16)).min() == 1  # tiles
    assert mask(0, 1, (8, 8)).all()
    assert {int(mask(client, 500, (8, 8)).sum()) for client in range(500)} == {1}
    with pytest.raises(CompatibilityError, match="kind=level"):
        mask(0, 10, (64,))


# ---- the value ----


def test_a_partition_survives_json_unless_it_was_changed() -> None:
    partition = split("niid(label-dirichlet(0.5)) + feature-noise(0.1)", CIFAR[:2000], 10)
    manifest = json.loads(json.dumps(partition.manifest()))
    back = Partition.from_manifest(manifest)
    assert back == partition and hash(back) == hash(partition)
    assert all(np.array_equal(a, b) for a, b in zip(back.positions, partition.positions, strict=True))
    assert (back.counts == partition.counts).all()
    assert (back.scenario, back.seed) == (partition.scenario, partition.seed)
    with pytest.raises(ValueError, match="read-only"):
        partition.positions[0][0] = 7
    for change, words in (({"seed": 1}, "does not match its sha256"), ({"format": 2}, "format 2")):
        with pytest.raises(ConfigError, match=words):
            Partition.from_manifest(manifest | change)


def test_the_same_draw_has_the_same_hash_and_another_seed_another() -> None:
    hashes = [split("label-dirichlet(0.5)", CIFAR, 10, seed).sha256 for seed in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]


# ---- NIID-Bench ----


@pytest.mark.parametrize("labels", [CIFAR, np.sort(CIFAR), CIFAR[::-1]], ids=["mixed", "sorted", "reversed"])
def test_niid_sizes_of_the_papers_figures(labels: np.ndarray) -> None:
    """Seed 0, alpha 0.5, ten clients: the numbers behind the paper's figures, whatever the order of the labels."""
    quantity = split("niid(quantity-dirichlet(0.5))", labels, 10)
    assert quantity.sizes.tolist() == [3901, 25, 174, 3079, 2770, 9374, 6256, 5140, 1741, 17540]
    label = split("niid(label-dirichlet(0.5))", labels, 10)
    assert label.sizes.tolist() == [5307, 3688, 4435, 5047, 5189, 3803, 5202, 4325, 8078, 4926]
    assert label.counts[4].tolist() == [504, 2917, 570, 721, 121, 356, 0, 0, 0, 0]
    mixed = split("niid-mixed", labels, 10)
    assert mixed.sizes.tolist() == [7750, 4972, 7975, 8771, 103, 6810, 2751, 6922, 756, 3190]


@pytest.mark.parametrize(
    ("text", "clients", "seed", "sha256"),
    # Made by a line-for-line transcription of NIID-Bench's partition_data, on the labels of CIFAR.
    [
        ("niid(iid)", 10, 0, "790c150683bf564f"),
        ("niid(label-dirichlet(0.5))", 10, 0, "a2f42aa0627bbdf6"),
        ("niid(label-dirichlet(0.1))", 10, 3, "efb232f9db1a3a00"),
        ("niid(label-classes(2))", 10, 0, "d321fe473b4f1449"),
        ("niid(label-classes(10))", 7, 1, "61c76f6919c400e1"),
        ("niid(quantity-dirichlet(0.5))", 10, 0, "20ba0012730c5585"),
        ("niid-mixed", 10, 0, "c70b954cf8753763"),
        ("niid-mixed(2)", 10, 1, "c266850e9af0ef4f"),
    ],
)
def test_niid_equals_niid_bench_index_for_index(text: str, clients: int, seed: int, sha256: str) -> None:
    positions = [mine.tolist() for mine in split(text, CIFAR, clients, seed).positions]
    assert hashlib.sha256(json.dumps(positions).encode()).hexdigest().startswith(sha256)


@pytest.mark.parametrize("seed", [4, 15, 17])
def test_niid_mixed_ends_where_the_original_hangs(seed: int) -> None:
    partition = split("niid-mixed", CIFAR, 10, seed)
    assert is_exact(partition, CIFAR)
    assert ((partition.counts > 0).sum(axis=0) == 2).all()
    assert (partition.counts.diagonal() > 0).all()


def test_niid_refuses_seeds_the_legacy_generator_has_not() -> None:
    with pytest.raises(ConfigError, match="between 0 and 4294967295"):
        split("niid(iid)", CIFAR, 10, seed=-1)


# ---- stress ----


def _random_scenario(rng: np.random.Generator) -> tuple[str, np.ndarray, int, int]:
    """A scenario of any kind with 1 to 500 clients, 10 to 100,000 examples and 2 to 100 classes."""

    def between(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    alpha, beta = between(0.01, 100), between(0.01, 100)
    least = int(rng.choice([1, 2, 10, 50]))
    classes, clients, k = int(between(2, 101)), int(between(1, 501)), int(between(1, 20))
    texts = [
        "iid",
        f"label-dirichlet({alpha}, min={least})",
        f"label-dirichlet({alpha}, balance=true, min={least})",
        f"label-classes({k})",
        f"quantity-dirichlet({alpha}, min={least})",
        f"label-dirichlet({alpha}, min={least}) + quantity-dirichlet({beta}, min={least})",
        f"label-classes({k}) + quantity-dirichlet({alpha}, min={least})",
        "niid(iid)",
        f"niid(label-dirichlet({alpha}))",
        f"niid(label-classes({k}))",
        f"niid(quantity-dirichlet({alpha}))",
        f"niid-mixed({alpha})",
    ]
    text = str(rng.choice(texts))
    if text.startswith("niid-mixed") and rng.random() < 0.8:
        classes = clients = 10
    if rng.random() < 0.3:
        text += f" + feature-noise({between(0.01, 1)})"
    weights = rng.dirichlet(np.full(classes, rng.choice([1.0, 1000.0])))  # uneven or even classes
    return text, rng.choice(classes, size=int(between(10, 100_001)), p=weights), classes, clients


def _stress(number: int) -> Counter[str]:
    rng = np.random.default_rng(0)
    outcomes: Counter[str] = Counter()
    for seed in range(number):
        text, labels, classes, clients = _random_scenario(rng)
        start = time.process_time()
        try:
            partition = draw(parse(text), labels, clients, seed, num_classes=classes)
        except ConfigError as refusal:
            assert "Use " in str(refusal), f"no way out in: {refusal}"
            outcomes["refused"] += 1
        else:
            assert is_exact(partition, labels), (text, seed)
            outcomes["exact"] += 1
        assert time.process_time() - start < 60, f"{text} with {clients} clients hangs"
    return outcomes


@pytest.mark.parametrize("number", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_scenarios_are_exact_or_refused(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(niid, "MAX_NUMBERS", 2_000_000)
    outcomes = _stress(number)
    assert outcomes.total() == number and min(outcomes["exact"], outcomes["refused"]) > number // 5
