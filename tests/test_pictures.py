"""Folders of pictures: resized by a key, grey among colour, in training and in use alike."""

from __future__ import annotations

import io
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

import fnrfl
from fnrfl.config import load as load_config
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.rng import numpy_generator
from fnrfl.data.datasets import load, read_source
from fnrfl.data.files import read_image
from fnrfl.data.reading import Reading, parse_image_size
from fnrfl.runs.predict import evaluate, predict

QUICK: dict[str, Any] = {"clients": 2, "rounds": 1, "scenario": "iid", "model": "mlp"}


def picture(path: Path, seed: int, size: tuple[int, int] = (9, 7), mode: str = "RGB") -> Path:
    """A picture of noise, of this height and width."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = numpy_generator(seed, "picture").integers(0, 256, (*size, 3)).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def pets(folder: Path, **sizes: tuple[int, int]) -> Path:
    """Cats and dogs, of one size or of several."""
    for number in range(20):
        kind = "cat" if number % 2 else "dog"
        picture(folder / kind / f"{number:02}.png", number, sizes.get(kind, (9, 7)))
    return folder


@pytest.mark.parametrize(("text", "size"), [("", None), ("8", (8, 8)), ("6x4", (6, 4)), (" 6 X 4 ", (6, 4))])
def test_a_size_is_a_number_or_a_height_and_a_width(text: str, size: tuple[int, int] | None) -> None:
    assert parse_image_size(text) == size
    assert load_config(None, {"dataset.image_size": text}).dataset.image_size == text


@pytest.mark.parametrize("text", ["0", "-3", "8x", "x8", "8x8x8", "4.5", "big", "8x0", "99999", "٣"])
def test_other_sizes_are_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match="resizes the images of a folder, and dataset = 'digits' is none"):
        read_source("digits", reading=Reading(image_size=(4, 4)))
    with pytest.raises(ConfigError, match="dataset.image_size = .* it must be a number of pixels, as 64, or a height"):
        load_config(None, {"dataset.image_size": text})


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 7 9\n%%EndComments\nshowpage\n%%EOF\n"


def test_a_picture_runs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow has PostScript drawn by Ghostscript, whatever the file is called."""
    marker, program = tmp_path / "marker", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # pillow remembers where it is
    folder = pets(tmp_path / "pets")
    (folder / "cat" / "evil.png").write_bytes(EPS)
    with pytest.raises(ConfigError, match=r"evil\.png"):
        load(str(folder))
    assert not marker.exists()
    with suppress(OSError, subprocess.SubprocessError), Image.open(folder / "cat" / "evil.png") as image:
        image.load()
    assert marker.exists()  # so the file would have run it


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM"])
def test_usual_kinds_of_pictures_are_read(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (7, 9), "white").save(file, kind)
    file.seek(0)
    assert read_image(file).shape == (9, 7, 3)


def test_pictures_are_resized_by_pillows_bilinear_filter(tmp_path: Path) -> None:
    folder = pets(tmp_path / "pets", cat=(12, 5))
    with pytest.raises(ConfigError, match='must have one size. Set dataset.image_size = "12x5"'):
        load(str(folder))
    raw = read_source(str(folder), reading=Reading(image_size=(6, 4))).raw
    (examples,) = raw.parts.values()
    assert examples.x.shape == (20, 3, 6, 4) and examples.x.dtype == np.uint8
    for name, x in zip(examples.names or [], examples.x, strict=True):
        with Image.open(folder / name) as image:
            np.testing.assert_array_equal(x.transpose(1, 2, 0), image.resize((4, 6), Image.Resampling.BILINEAR))
    same = read_source(str(pets(tmp_path / "same")), reading=Reading(image_size=(9, 7))).raw.parts[""]
    np.testing.assert_array_equal(same.x, read_source(str(tmp_path / "same")).raw.parts[""].x)


@pytest.mark.parametrize("size", [None, (6, 4)])
def test_pictures_stand_as_their_camera_held_them(tmp_path: Path, size: tuple[int, int] | None) -> None:
    upright = picture(tmp_path / "upright.png", 0, (9, 7))
    with Image.open(upright) as image:
        exif = image.getexif()
        exif[0x0112] = 6  # the camera was turned: the top row is on the right
        image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(read_image(tmp_path / "turned.png", size), read_image(upright, size))


def test_grey_among_colour_is_converted_with_a_notice(tmp_path: Path) -> None:
    folder = pets(tmp_path / "pets")
    grey = picture(folder / "cat" / "grey.png", 99, mode="L")
    raw = read_source(str(folder)).raw
    assert raw.notices == ("Of 21 images, 1 grey is taken as colour.",)
    examples = raw.parts[""]
    x = examples.x[list(examples.names or []).index("cat/grey.png")]
    with Image.open(grey) as image:
        np.testing.assert_array_equal(x, np.stack([np.asarray(image)] * 3))


def test_a_run_and_its_use_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pets(Path("pets"), cat=(12, 5))
    fnrfl.run(None, out="run", dataset={"name": "pets", "image_size": "6x4"}, **QUICK)
    assert evaluate("run", "pets").what == "the test part"
    for number in range(4):
        picture(Path(f"grey/{number}.png"), number, (10, 10), mode="L")
        picture(Path(f"colour/{number}.png"), number, (10, 10), mode="L")
        with Image.open(f"colour/{number}.png") as image:
            image.convert("RGB").save(f"colour/{number}.png")
    grey, colour = predict("run", "grey"), predict("run", "colour")
    np.testing.assert_array_equal(grey.probabilities, colour.probabilities)
    assert "Of 4 images, 4 grey are taken as colour." in grey.notes and not colour.notes


@pytest.mark.parametrize("layout", ["", "train", "Bonn"])  # folders of classes, those of a part, and those of a client
def test_hidden_files_are_no_pictures(tmp_path: Path, layout: str) -> None:
    """macOS writes ._1.png beside 1.png on disks of other systems."""
    folder = pets(tmp_path / layout).parent if layout else pets(tmp_path)
    if layout == "train":
        pets(tmp_path / "test")
    plain = read_source(str(folder)).raw
    for place in [at for at in folder.rglob("*") if at.is_dir()] + [folder]:
        (place / "._00.png").write_bytes(b"\0\5\26\7")
    hidden = read_source(str(folder)).raw
    assert hidden.notices == plain.notices == ()
    for part, examples in plain.parts.items():
        assert hidden.parts[part].names == examples.names
        np.testing.assert_array_equal(hidden.parts[part].x, examples.x)


def test_a_model_of_grey_pictures_does_not_take_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(20):
        picture(Path(f"pets/{'cat' if number % 2 else 'dog'}/{number}.png"), number, mode="L")
    fnrfl.run(None, out="run", dataset="pets", **QUICK)
    picture(Path("new/a.png"), 1)
    with pytest.raises(CompatibilityError, match="must be alike"):
        predict("run", "new")


def test_one_picture_is_refused_with_the_way_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fnrfl.run(None, out="run", dataset=f"{pets(Path('pets'))}", **QUICK)
    picture(Path("new/1.PNG"), 1)
    with pytest.raises(ConfigError, match=r"'new/1\.PNG' is one picture.* Give its folder, 'new'") as told:
        predict("run", "new/1.PNG")
    assert "exists" not in str(told.value)
    assert predict("run", "new").rows == ["1.PNG"]
    Path("table.docx").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"'table\.docx' is a file that is not read.* Convert it to \.csv or \.npz"):
        predict("run", "table.docx")
    with pytest.raises(ConfigError, match="nor a file or folder that exists"):
        predict("run", "new/2.png")


def test_a_site_with_grey_pictures_goes_with_one_that_has_colour(tmp_path: Path) -> None:
    for number in range(8):
        kind = "cat" if number % 2 else "dog"
        picture(tmp_path / "clients" / "H0" / kind / f"{number}.png", number, mode="L")
        picture(tmp_path / "clients" / "H1" / kind / f"{number}.png", number)
    raw = read_source(str(tmp_path / "clients")).raw
    (examples,) = raw.parts.values()
    assert examples.x.shape == (16, 3, 9, 7) and "Of 8 images, 8 grey are taken as colour." in raw.notices
    small = read_source(str(tmp_path / "clients"), reading=Reading(image_size=(4, 4))).raw
    assert {part.x.shape for part in small.parts.values()} == {(16, 3, 4, 4)}
