"""Feature noise: what a scenario lays over each client's inputs, in training, in probes and in scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fnrfl.core.errors import CompatibilityError
from fnrfl.core.rng import elsewhere, generator
from fnrfl.data.partition.value import Partition


def feature_noise(partition: Partition, client: int, x: Tensor, stream: torch.Generator) -> Tensor:
    """x + (eps * M(x)) * sigma_i + mean."""
    noise = partition.noise
    assert noise is not None
    patch = None
    if noise.kind == "mask":
        patch = torch.from_numpy(mask(client, len(partition.positions), tuple(x.shape[1:]))).to(x)
    return add_noise(x, float(partition.levels[client]), noise.mean, patch, generator=stream)


def noise_of_scores(
    partition: Partition, seed: int, client: int, name: str, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return what lays a client's noise over the batches of the data called `name`, one after another."""
    stream = elsewhere(generator(seed, client, name, "feature-noise"), device)
    return lambda x: feature_noise(partition, client, x, stream)


def mixed_noise(partition: Partition, seed: int, name: str, x: Tensor) -> Tensor:
    """Return numbers in [0, 1], example j under the noise of client j mod N."""
    x, clients = x.clone(), len(partition.positions)
    for client in range(clients):
        x[client::clients] = noise_of_scores(partition, seed, client, name, x.device)(x[client::clients])
    return x


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


def mask(client: int, clients: int, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """M(x) for one client: true in its square patch of an image [..., height, width].

    The clients' patches lie row by row on a grid of g = ceil(sqrt(clients)) by g places spread over the image; their
    side is the shorter image side divided by g, at least one pixel. They do not overlap unless the image is smaller
    than the grid.
    """
    if len(shape) < 2:
        raise CompatibilityError(
            f"feature-noise with kind=mask needs images, and the examples have shape {shape}. Use kind=level."
        )
    height, width = shape[-2:]
    grid = math.isqrt(clients - 1) + 1
    side = max(1, min(height, width) // grid)
    row, column = divmod(client, grid)
    top, left = ((size - side) * place // max(1, grid - 1) for size, place in ((height, row), (width, column)))
    inside = np.zeros(shape, dtype=np.bool_)
    inside[..., top : top + side, left : left + side] = True
    return inside
