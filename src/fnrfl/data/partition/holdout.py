"""What is set aside of the training set before it is partitioned: public data in its shares, and validation data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import Ints
from fnrfl.core.rng import numpy_generator
from fnrfl.core.words import counted
from fnrfl.data.partition.stratify import stratified_order


@dataclass(frozen=True, eq=False)
class Carved:
    """Positions in the training set, each array sorted: what is set aside, and the rest, which the clients get.

    `public` refines. With a ranking share of 0 the same examples rank, and `ranking` is equal to `public`. Shares and
    seed are kept for public data from another source, which is shared out in the same way.
    """

    public: np.ndarray
    ranking: np.ndarray
    distill: np.ndarray
    validation: np.ndarray
    rest: np.ndarray
    ranking_share: float
    distill_share: float
    seed: int
    public_order: np.ndarray  # all that is public, in the order in which it is shared out


def carve(
    labels: np.ndarray,
    *,
    public: float | int,
    ranking: float,
    distill: float,
    validation: float | int,
    seed: int,
    num_classes: int,
    holders: Ints | None = None,
) -> Carved:
    """Set public and validation data aside from the training set, stratified by class, before it is partitioned.

    Sizes are fractions below 1 or counts; `ranking` and `distill` are shares of the public data. One stratified random
    order serves all: public data is taken from its start and validation from its end, so that neither depends on the
    size of the other, and a larger set contains a smaller one. `holders` says who has each example, if somebody has it
    already: they give in proportion to what they have of a class, and everybody keeps one example at least.
    """
    assert labels.ndim == 1 and (not len(labels) or 0 <= labels.min() <= labels.max() < num_classes)
    num_public = count_of("public.size", public, len(labels))
    num_validation = count_of("validation.size", validation, len(labels))
    if num_public + num_validation >= len(labels):
        raise ConfigError(
            f"public.size = {public} and validation.size = {validation} take {num_public} and {num_validation} of "
            f"{counted(len(labels), 'training example')}; some must remain for the clients. Make them smaller."
        )
    order = stratified_order(labels, numpy_generator(seed, "split", "train"), holders)
    kept = order[:0] if holders is None else _one_for_each(order, holders)
    order = order[~np.isin(order, kept)]
    if num_public + num_validation > len(order):
        raise ConfigError(
            f"public.size = {public} and validation.size = {validation} take {num_public} and {num_validation} of "
            f"{counted(len(labels), 'training example')}, and each of {counted(len(kept), 'client')} must keep one. "
            "Make them smaller."
        )
    end = len(order) - num_validation
    shared = share_out(order[:num_public], ranking, distill)
    rest, held_out = np.sort(np.concatenate([kept, order[num_public:end]])), np.sort(order[end:])
    return Carved(*shared, held_out, rest, ranking, distill, seed, order[:num_public])


def _one_for_each(order: np.ndarray, holders: Ints) -> np.ndarray:
    """One example of each holder: the one farthest from both ends of the order, where examples are taken."""
    by_distance = order[np.argsort(np.abs(np.arange(len(order)) - (len(order) - 1) / 2), kind="stable")]
    _, first = np.unique(holders[by_distance], return_index=True)
    return by_distance[first]


def count_of(key: str, size: float | int, available: int) -> int:
    """How many examples a size stands for."""
    if not (size >= 0 and (size < 1 or float(size).is_integer())):
        raise ConfigError(
            f"{key} = {size} is neither a fraction of the training set nor a count. "
            "Give a number from 0 to below 1, or a whole number of examples."
        )
    count = round(size * available) if size < 1 else int(size)
    if size > 0 and count == 0:
        raise ConfigError(
            f"{key} = {size} of {counted(available, 'training example')} is less than one. Make it larger, or 0 for "
            "none."
        )
    return count


def share_out(order: np.ndarray, ranking: float, distill: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stretches of a stratified order of public data, sorted: to refine, to rank, to distil.

    Ranking comes first and distillation last, so that distillation takes from refinement and leaves ranking alone.
    """
    if not (0 <= ranking < 1 and 0 <= distill <= 1 and ranking + distill <= 1):
        raise ConfigError(
            f"public.ranking = {ranking} and public.distill = {distill} are shares of the public data: they must be "
            "0 or more, ranking below 1, and together 1 at most. Make them smaller."
        )
    size = len(order)
    if not size:
        return order, order, order
    first = max(1, round(ranking * size)) if ranking else 0
    last = size - max(1, round(distill * size)) if distill else size
    if ranking + distill == 1:
        last = first
    if first > last or (first == last and ranking + distill < 1) or (distill and last == size):
        raise ConfigError(
            f"{counted(size, 'public example')} cannot be shared out with public.ranking = {ranking} and "
            f"public.distill = {distill} so that some serve each purpose. Give more public data or make the shares "
            "smaller."
        )
    refine = np.sort(order[first:last])
    return refine, np.sort(order[:first]) if ranking else refine, np.sort(order[last:])
