"""Crop and flip on whole batches, from random numbers that are drawn apart so that engines can share them.

Nothing here loops over examples or waits for the device, and leading axes are free: [B, C, H, W] and
[M, B, C, H, W] both work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fnrfl.core.errors import CompatibilityError, ConfigError

PAD = 4


def resolve(augment: str | bool, input_shape: tuple[int, ...], pad: int = PAD) -> bool:
    """Whether crop and flip are on: "auto" means for colour images of at least 16x16 pixels."""
    if augment == "auto":
        return len(input_shape) == 3 and input_shape[0] == 3 and min(input_shape[1:]) >= 16
    if augment == "none" or augment is False:
        return False
    if augment == "crop-flip" or augment is True:
        _check(input_shape, pad)
        return True
    raise ConfigError(f'augment is {augment!r}; it must be "auto", "crop-flip" (or true) or "none" (or false).')


def draw_crop_flip(images: int, generator: torch.Generator, pad: int = PAD) -> Tensor:
    """What `crop_flip` needs for some images, [images]: a number for each of the ways to place and mirror it.

    Every image takes one number from the stream, so a whole task may be drawn at once or step by step.
    """
    return torch.randint(2 * (2 * pad + 1) ** 2, (images,), generator=generator, device=generator.device)


def crop_flip(x: Tensor, crops: Tensor, pad: int = PAD) -> Tensor:
    """Pad images [..., C, H, W] by reflection, crop them back to their size, and mirror them, as `crops` [...] says."""
    _check(tuple(x.shape[-3:]), pad)
    (height, width), side, place = x.shape[-2:], 2 * pad + 1, crops // 2
    rows, columns = _reflect(height, place // side - pad), _reflect(width, place % side - pad)
    columns = torch.where(crops.unsqueeze(-1) % 2 == 1, columns.flip(-1), columns)
    source = rows.unsqueeze(-1) * width + columns.unsqueeze(-2)  # where each pixel comes from, [..., H, W]
    pixels = x.flatten(-2)
    return pixels.gather(-1, source.flatten(-2).unsqueeze(-2).expand_as(pixels)).reshape(x.shape)


def _reflect(size: int, shift: Tensor) -> Tensor:
    """Positions 0..size-1 moved by `shift` and mirrored back at both ends without repeating the edge: [..., size]."""
    last = size - 1
    position = torch.arange(size, device=shift.device) + shift.unsqueeze(-1)
    return last - (last - position.abs()).abs()


def _check(shape: tuple[int, ...], pad: int) -> None:
    if len(shape) != 3 or min(shape[1:]) <= pad:
        raise CompatibilityError(
            f"Crop and flip reflect {pad} pixels at every edge, so they need images [channels, height, width] of at "
            f'least {pad + 1}x{pad + 1} pixels, but the data has shape {list(shape)}. Set augment = "none".'
        )
