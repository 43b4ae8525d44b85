"""Agglomerative clustering with average linkage: deterministic, and blind to the order of what it is given."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def agglomerate(points: Tensor, clusters: int, *, gap: bool = False) -> Tensor:
    """The cluster of each point, [N], numbered by lowest member: the nearest two merge, ties to the lowest numbers.

    `clusters` is how many are left, or with `gap` the most: then the cut is where the next merge would bridge the
    largest step in distance.

    >>> agglomerate(torch.tensor([[0.0], [9.0], [1.0]]), 2)
    tensor([0, 1, 0])
    """
    N = len(points)
    far = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # exactly 0 between equal points
    far.fill_diagonal_(math.inf)
    sizes, label = [1] * N, torch.arange(N)
    found, heights = {N: label.clone()}, [0.0] * (N + 2)  # by the number of clusters: labels, distance of next merge
    for left in range(N, 1, -1):
        i, j = divmod(int(far.argmin()), N)  # the first of equal ones, so i < j
        heights[left] = float(far[i, j])
        far[i] = far[:, i] = (sizes[i] * far[i] + sizes[j] * far[j]) / (sizes[i] + sizes[j])
        far[j] = far[:, j] = math.inf
        sizes[i] += sizes[j]
        label[label == j] = i
        found[left - 1] = label.clone()
    most = min(clusters, N)
    if gap and most > 1:
        most = max(range(2, most + 1), key=lambda left: heights[left] - heights[left + 1])  # ties to fewer
    numbered: Tensor = found[most].unique(return_inverse=True)[1]
    return numbered
