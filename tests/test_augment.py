"""Batched crop, flip and noise equal the plain per-image procedure, on every layout and leading axis."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.rng import generator
from fnrfl.core.training import Training
from fnrfl.data.augment import crop_flip, draw_crop_flip, resolve
from fnrfl.data.batches import Pool
from fnrfl.data.noise import add_noise


def one_by_one(x: Tensor, crops: Tensor, pad: int) -> Tensor:
    """The textbook: pad, slice and mirror each image of [B, C, H, W] by itself."""
    height, width = x.shape[-2:]
    images = []
    for padded, crop in zip(F.pad(x, (pad,) * 4, mode="reflect"), crops.tolist(), strict=True):
        (top, left), mirror = divmod(crop // 2, 2 * pad + 1), crop % 2
        image = padded[:, top : top + height, left : left + width]
        images.append(image.flip(-1) if mirror else image)
    return torch.stack(images)


@pytest.mark.parametrize(
    ("shape", "pad"),
    [((162, 3, 6, 7), 4), ((40, 1, 5, 9), 4), ((40, 3, 9, 5), 4), ((17, 2, 8, 8), 0), ((9, 3, 7, 6), 2)],
)
def test_crop_flip_equals_one_by_one(shape: tuple[int, int, int, int], pad: int) -> None:
    stream = generator(0, "augment", shape)
    x = torch.rand(shape, generator=stream)
    drawn = torch.arange(162) if len(x) == 162 else draw_crop_flip(shape[0], stream, pad)  # every offset once
    assert torch.equal(crop_flip(x, drawn, pad=pad), one_by_one(x, drawn, pad=pad))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_crop_flip_keeps_the_type_and_reads_channels_last(dtype: torch.dtype) -> None:
    x = torch.randint(256, (8, 3, 16, 16), generator=generator(0)).to(dtype)
    drawn = draw_crop_flip(8, generator(1))
    plain = crop_flip(x, drawn, pad=4)
    assert plain.dtype == dtype
    assert torch.equal(crop_flip(x.contiguous(memory_format=torch.channels_last), drawn, pad=4), plain)


def test_leading_axes_equal_separate_batches() -> None:
    x = torch.rand(3, 8, 3, 16, 16, generator=generator(0))
    drawn = [draw_crop_flip(8, generator(0, client)) for client in range(3)]
    stacked = torch.stack(drawn)
    separate = torch.stack([crop_flip(x[m], drawn[m], pad=4) for m in range(3)])
    assert torch.equal(crop_flip(x, stacked, pad=4), separate)
    assert torch.equal(torch.vmap(crop_flip)(x, stacked), separate)


def test_draws_are_even_and_the_same_at_once_and_step_by_step() -> None:
    drawn = draw_crop_flip(16_200, generator(0, "augment"))
    counts = torch.bincount(drawn, minlength=162)
    # 100 expected of each of the 162 combinations: chi-square has mean 161 and standard deviation 18.
    assert len(counts) == 162 and ((counts - 100.0) ** 2 / 100).sum() < 161 + 5 * 18
    stream = generator(0, "augment")
    assert torch.equal(drawn[:320], torch.cat([draw_crop_flip(64, stream) for _ in range(5)]))


def test_noise_follows_the_equation() -> None:
    x = torch.rand(6, 3, 8, 8, generator=generator(0))
    eps = torch.randn(x.shape, generator=generator(1))
    mask = (torch.rand(6, 1, 8, 8, generator=generator(2)) < 0.5).float()
    assert torch.equal(add_noise(x, 0.3, generator=generator(1)), x + eps * 0.3)
    masked = add_noise(x, 0.3, 0.1, mask, generator=generator(1))
    torch.testing.assert_close(masked, x + (eps * mask) * 0.3 + 0.1)
    torch.testing.assert_close(masked[mask.expand_as(x) == 0], x[mask.expand_as(x) == 0] + 0.1)


def test_noise_is_the_same_in_every_precision_and_not_clipped() -> None:
    x = torch.ones(64, 1, 8, 8)
    single, double = (add_noise(one, 1.0, generator=generator(0)) for one in (x, x.double()))
    assert double.dtype == torch.float64 and torch.equal(double.float(), single)
    assert single.max() > 1.5 and single.min() < -0.5
    assert abs(double.mean() - 1) < 0.1 and double.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("augment", "shape", "on"),
    [
        ("auto", (3, 32, 32), True),
        ("auto", (3, 16, 16), True),
        ("auto", (3, 15, 32), False),
        ("auto", (1, 28, 28), False),
        ("auto", (64,), False),
        ("none", (3, 32, 32), False),
        (False, (3, 32, 32), False),
        ("crop-flip", (1, 28, 28), True),
        (True, (1, 8, 8), True),
        ("crop-flip", (64,), 'Set augment = "none"'),
        ("crop-flip", (3, 4, 4), "at least 5x5 pixels"),
        ("mixup", (3, 32, 32), "augment is 'mixup'"),
    ],
)
def test_where_images_are_cropped(augment: str | bool, shape: tuple[int, ...], on: bool | str) -> None:
    if isinstance(on, bool):
        assert resolve(augment, shape) is on
        return
    with pytest.raises((CompatibilityError, ConfigError), match=on):
        resolve(augment, shape)


@pytest.mark.parametrize(("augment", "on"), [("auto", True), ("crop-flip", True), ("none", False), (False, False)])
def test_batches_are_cropped_as_the_training_says(
    augment: Literal["auto", "crop-flip", "none"] | bool, on: bool
) -> None:
    pool = Pool({"private": (torch.zeros(4, 3, 16, 16), torch.zeros(4).long())}, [torch.arange(4)], 1)
    plan = pool.plan(0, "private", Training(augment=augment, batch=2), lambda purpose: generator(0, purpose))
    assert (plan.crops is not None) is on
