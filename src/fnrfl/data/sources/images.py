"""Image files, read by pillow if it is installed."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np

from fnrfl.core.errors import ConfigError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM")  # for others, as PostScript, pillow may run a program


class DeepPixelsError(ValueError):
    """A picture has more than 8 bits for each value."""


def read_image(file: Path | io.BytesIO, size: tuple[int, int] | None = None) -> np.ndarray:
    """The 8-bit pixels of an image file: [H, W] where it is grey, [H, W, 3] otherwise; resized to a height and width.

    It is turned as its EXIF data says, as cameras write it. The filter is Pillow's bilinear one: a pixel is an average
    over all that it stands for.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ConfigError("image files need pillow, which is not installed. Run `pip install pillow`.") from error
    try:
        with Image.open(file, formats=FORMATS) as image:
            refuse_deep_pixels(image.mode)
            upright = ImageOps.exif_transpose(image)
            plain = upright.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            return np.asarray(plain if size is None else plain.resize(size[::-1], Image.Resampling.BILINEAR))
    except (SyntaxError, struct.error, Image.DecompressionBombError) as error:  # what pillow makes of broken files
        raise ValueError(str(error)) from error


def refuse_deep_pixels(mode: str) -> None:
    """Refuse pixels of 16 bits or more, which pillow would cut off at white in making 8 bits of them."""
    if mode[0] in "IF":
        raise DeepPixelsError(f"its pixels are of mode {mode}, not 8 bits deep")
