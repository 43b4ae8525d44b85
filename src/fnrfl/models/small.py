"""The small networks: NIID-Bench's simple-cnn, a two-convolution cnn, and a multi-layer perceptron.

Max-pools stand before the ReLU: the same values and gradients for a quarter of its work.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt
from torch import nn

from fnrfl.models import image_shape


def simple_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """NIID-Bench's simple-cnn: 5x5 convolutions of 6 and 16 channels, each max-pooled, then 120, 84, classes."""
    channels, height, width = image_shape("simple-cnn", input_shape, at_least=16)
    # Each 5x5 convolution without padding takes 4 pixels from a side, each max-pool halves it.
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def cnn(input_shape: tuple[int, ...], num_classes: int, norm: Literal["none", "batch"] = "none") -> nn.Sequential:
    """Two 3x3 convolutions of 16 and 32 channels, each max-pooled, then one Linear; `norm=batch` adds BatchNorm."""
    channels, height, width = image_shape("cnn", input_shape, at_least=4)
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((channels, 16), (16, 32)):
        layers.append(nn.Conv2d(channels_in, channels_out, 3, padding=1))
        if norm == "batch":
            layers.append(nn.BatchNorm2d(channels_out))
        layers += [nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), num_classes))


def mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden: PositiveInt = 64,
    depth: NonNegativeInt = 1,
    norm: Literal["none", "batch"] = "none",
) -> nn.Sequential:
    """A perceptron: `depth` hidden layers of `hidden` units, 0 for logistic regression; `norm=batch` adds BatchNorm."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(input_shape)
    for _ in range(depth):
        layers.append(nn.Linear(width, hidden))
        if norm == "batch":
            layers.append(nn.BatchNorm1d(hidden))
        layers.append(nn.ReLU())
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
