"""Crop, flip and noise on whole batches, from random numbers that are drawn apart so that engines can share them.

Nothing here loops over examples or waits for the device, and leading axes are free: [B, C, H, W] and
[M, B, C, H, W] both work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fnrfl.errors import CompatibilityError, ConfigError

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


def draw_crop_flip(batch: int, generator: torch.Generator, pad: int = PAD) -> dict[str, Tensor]:
    """What `crop_flip` needs for `batch` images: dy and dx in 0..2*pad and flip, each [batch].

    Every image takes one number from the stream, so a whole round may be drawn at once or step by step.
    """
    side = 2 * pad + 1
    code = torch.randint(2 * side * side, (batch,), generator=generator, device=generator.device)
    place = code // 2
    return {"dy": place // side, "dx": place % side, "flip": code % 2 == 1}


def crop_flip(x: Tensor, dy: Tensor, dx: Tensor, flip: Tensor, pad: int = PAD) -> Tensor:
    """Pad images [..., C, H, W] by reflection, crop them back at (dy, dx), and mirror those with `flip`."""
    _check(tuple(x.shape[-3:]), pad)
    source = source_pixels(x.shape[-2], x.shape[-1], dy, dx, flip, pad).flatten(-2).unsqueeze(-2)  # [..., 1, H*W]
    pixels = x.flatten(-2)
    return pixels.gather(-1, source.expand_as(pixels)).reshape(x.shape)


def source_pixels(height: int, width: int, dy: Tensor, dx: Tensor, flip: Tensor, pad: int = PAD) -> Tensor:
    """Where each pixel of the augmented images comes from, as row * width + column: [..., H, W].

    An engine may add this to the example's own offset and read batch and crop from the data set in one gather.
    """
    rows = _reflect(height, dy - pad)
    columns = _reflect(width, dx - pad)
    columns = torch.where(flip.unsqueeze(-1), columns.flip(-1), columns)
    return rows.unsqueeze(-1) * width + columns.unsqueeze(-2)


def add_noise(
    x: Tensor,
    std: float | Tensor,
    mean: float | Tensor = 0.0,
    mask: Tensor | None = None,
    *,
    generator: torch.Generator,
) -> Tensor:
    """Gaussian feature noise, x + (eps * mask) * std + mean; the mean is added outside the mask too, as in the paper.

    Values are not clipped. eps is drawn in float32 whatever x is, so that all precisions see the same numbers.
    """
    eps = torch.randn(x.shape, generator=generator, device=generator.device, dtype=torch.float32).to(x)
    if mask is not None:
        eps = eps * mask
    return x + eps * std + mean


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
