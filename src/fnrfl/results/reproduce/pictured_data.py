"""The data that the paper's figures show: how a split spreads the classes, and what feature noise does to images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fnrfl.results.reproduce.paper_cells import PaperCell

if TYPE_CHECKING:
    from torch import Tensor

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_EXAMPLES = 50_000  # of its training set, as many of each class
PICTURED_SPLITS = ("label", "quantity", "label+quantity")


def classes_of_scale(scale: str) -> tuple[str, ...]:
    """The classes of a scale's data set."""
    return tuple(map(str, range(10))) if scale == "tiny" else CIFAR10_CLASSES


def split_of(scale: str, skew: str) -> list[list[int]]:
    """Examples by client and class, as the paper's protocol spreads all training data with seed 0."""
    from fnrfl.runs.data import count_split
    from fnrfl.runs.setup.build import build

    config = PaperCell("resnet18", skew, "paper", "fedavg", 0, scale).config()
    if scale != "tiny":
        return count_split(config, CIFAR10_EXAMPLES, len(CIFAR10_CLASSES))
    return [[int(count) for count in row] for row in build(config).partition.counts]


@dataclass(frozen=True, eq=False)
class NoisySamples:
    """Some test images as clients see them whose noise goes from none to 0.5."""

    dataset: str
    levels: tuple[float, ...]  # of the clients
    pictures: Tensor  # [clients, images, height, width, channels], from 0 to 1


def noisy_samples(scale: str) -> NoisySamples:
    """Three test images and six clients; the data of the scale must be on this computer."""
    import torch

    from fnrfl.core.rng import generator
    from fnrfl.runs.setup.build import build

    config = PaperCell("simple-cnn", "feature-0.5", "niid-bench", "fedavg", 0, scale).config(
        ["engine=loop"], ["clients=6"]
    )
    built = build(config)
    images = built.splits.test.x[:3]
    images = images.float() / 255 if not images.is_floating_point() else images
    levels = tuple(map(float, built.partition.levels))
    streams = [generator(0, client, "figure", "feature-noise") for client in range(len(levels))]
    noisy = torch.stack([built.noise(client, images, stream) for client, stream in enumerate(streams)]).clamp(0, 1)
    return NoisySamples(config.dataset.name, levels, noisy.movedim(2, -1))
