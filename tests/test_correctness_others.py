"""Correctness: sizes of models and NIID-Bench's splits by hand, and the table of docs/correctness.md."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from fnrfl.config import registry
from fnrfl.data.partition import niid
from fnrfl.models.catalogue import build_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "correctness.md"
SEEDS = range(12)

# -- models -----------------------------------------------------------------------------------------------------------


def convolution(into: int, out: int, side: int, *, bias: bool) -> int:
    return into * out * side * side + (out if bias else 0)


def test_resnet18_has_the_parameters_of_its_layers() -> None:
    """He et al., for images of 32 pixels: a 3x3 stem, four stages of two blocks, 1x1 where widths change."""
    for head, count in ((10, 11_173_962), (1000, 11_681_832)):
        total, width = convolution(3, 64, 3, bias=False) + 2 * 64, 64
        for stage in (64, 128, 256, 512):
            for _ in range(2):
                total += convolution(width, stage, 3, bias=False) + convolution(stage, stage, 3, bias=False) + 4 * stage
                total += convolution(width, stage, 1, bias=False) + 2 * stage if width != stage else 0
                width = stage
        total += 512 * head + head
        model = build_model("resnet18" if head == 10 else "resnet18(head=1000)", (3, 32, 32), 10)
        assert sum(p.numel() for p in model.parameters()) == total == count


def test_vgg11_has_the_parameters_of_its_layers() -> None:
    """Simonyan and Zisserman's configuration A with a head of two layers of 512."""
    total, width = 0, 3
    for out in (64, 128, 256, 256, 512, 512, 512, 512):
        total += convolution(width, out, 3, bias=True)
        width = out
    total += 2 * (512 * 512 + 512) + 512 * 10 + 10
    model = build_model("vgg11", (3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == total == 9_750_922


# -- NIID-Bench's splits ----------------------------------------------------------------------------------------------


def labels(seed: int, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, 700)


def same(found: niid.Positions, wanted: list[list[int]]) -> bool:
    return [mine.tolist() for mine in found] == wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_niid_label_dirichlet_index_by_index(seed: int) -> None:
    """Class after class a draw of shares, nothing for who has an even share already; again until all have ten."""
    y, clients, alpha, stream = labels(seed), 5, 0.5, np.random.RandomState(seed)
    fewest, held = 0, []
    while fewest < 10:
        held = [[] for _ in range(clients)]
        for k in range(10):
            members = np.array([i for i in range(len(y)) if y[i] == k])
            stream.shuffle(members)
            shares = list(stream.dirichlet([alpha] * clients))
            shares = [0.0 if len(mine) >= len(y) / clients else p for p, mine in zip(shares, held, strict=True)]
            total, upto, first = np.sum(shares), 0.0, 0
            for client in range(clients):
                upto += shares[client] / total
                last = int(upto * len(members)) if client < clients - 1 else len(members)
                held[client] += members[first:last].tolist()
                first = last
        fewest = min(len(mine) for mine in held)
    for mine in held:
        stream.shuffle(mine)
    assert same(niid.label_dirichlet(y, 10, clients, alpha, seed), held)


@pytest.mark.parametrize("seed", SEEDS)
def test_niid_label_classes_index_by_index(seed: int) -> None:
    """Client i owns class i and others at random, and who owns a class shares it evenly."""
    y, clients, k, stream, other = labels(seed), 10, 3, np.random.RandomState(seed), random.Random(seed)
    owned: list[list[int]] = []
    for client in range(clients):
        mine = [client % 10]
        while len(mine) < k:
            drawn = other.randint(0, 9)
            if drawn not in mine:
                mine.append(drawn)
        owned.append(mine)
    held: list[list[int]] = [[] for _ in range(clients)]
    for c in range(10):
        members = np.array([i for i in range(len(y)) if y[i] == c])
        stream.shuffle(members)
        owners = [client for client in range(clients) if c in owned[client]]
        for client, piece in zip(owners, np.array_split(members, len(owners)), strict=True):
            held[client] += piece.tolist()
    assert same(niid.label_classes(y, 10, clients, k, seed), held)


@pytest.mark.parametrize("seed", SEEDS)
def test_niid_quantity_dirichlet_and_iid_index_by_index(seed: int) -> None:
    """One random order, cut by one draw of shares, again until all have ten; or into even runs."""
    n, clients, alpha, stream = 700, 5, 0.5, np.random.RandomState(seed)
    order, shares = stream.permutation(n), np.zeros(clients)
    while min(shares * n) < 10:
        shares = stream.dirichlet([alpha] * clients)
    ends = [0, *(int(sum(shares[: i + 1]) * n) for i in range(clients - 1)), n]
    held = [order[a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]
    assert same(niid.quantity_dirichlet(n, clients, alpha, seed), held)
    even = np.random.RandomState(seed).permutation(n)
    assert same(niid.iid(n, clients, seed), [even[i * 140 : (i + 1) * 140].tolist() for i in range(5)])


@pytest.mark.parametrize("seed", SEEDS)
def test_niid_mixed_index_by_index(seed: int) -> None:
    """Every class has two owners, who share it by a draw of two; where the original never ends, it is left out."""
    y, alpha, stream, other = labels(seed), 0.5, np.random.RandomState(seed), random.Random(seed)
    owners: dict[int, list[int]] = {c: [c] for c in range(10)}
    for client in range(10):
        if all(len(owners[c]) == 2 for c in range(10) if c != client):
            pytest.skip("the original never ends with this seed")
        drawn = client
        while drawn == client or len(owners[drawn]) == 2:
            drawn = other.randint(0, 9)
        owners[drawn].append(client)
    shares = np.zeros(10)
    while min(shares * len(y)) < 10:
        shares = stream.dirichlet([alpha] * 10)  # drawn and never used
    held: list[list[int]] = [[] for _ in range(10)]
    for c in range(10):
        members = np.array([i for i in range(len(y)) if y[i] == c])
        stream.shuffle(members)
        cut = int(stream.dirichlet([alpha] * 2)[0] * len(members))
        first, second = sorted(owners[c])
        held[first] += members[:cut].tolist()
        held[second] += members[cut:].tolist()
    assert same(niid.mixed(y, alpha, seed), held)


# -- the table --------------------------------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    """Rows of the second table: what the suite computes."""
    (body,) = re.findall(r"^## What the suite computes\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for line in body.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_row_of_the_table_names_tests_that_exist() -> None:
    assert len(rows()) > 15
    for what, _, named, *_ in rows():
        found = re.findall(r"`(tests/\w+\.py)::(\w+)`", named)
        assert found, f"{what} names no test"
        for path, test in found:
            assert f"\ndef {test}(" in (ROOT / path).read_text(), f"{what}: {path} has no {test}"


def test_every_method_but_the_controls_is_in_the_table_and_found_by_its_name() -> None:
    """`pytest -k "correctness and fednova"` finds the reference of a method."""
    controls = {"bn-recalibrate", "centralised", "local-only"}
    methods = {name for name in registry.algorithms() if not name.startswith("public-")} - controls
    text = " ".join(what for what, *_ in rows()).lower().replace("kt-pfl", "ktpfl")
    suite = "".join(path.read_text() for path in sorted((ROOT / "tests").glob("test_correctness_*.py")))
    tests = " ".join(re.findall(r"^def (test_\w+)\(", suite, re.MULTILINE))
    for name in {*methods, "fnr"}:
        assert name in text, f"docs/correctness.md has no row for {name}"
        assert name in tests, f"no test of the suite is called by {name}"
