"""What is set aside: public data in its shares and validation data of the training set, and test parts.

Random orders are such that every stretch of them holds classes and clients in their proportions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import Ints
from fnrfl.core.rng import numpy_generator
from fnrfl.core.words import counted

TEST_SHARE = 0.2  # of data that comes without a test set


@dataclass(frozen=True, eq=False)
class Carved:
    """Positions in the training set: what is set aside, and the rest, which the clients get.

    The shares and the seed are for public data from another source as well, which is shared out in the same way.
    """

    public: np.ndarray  # in the order in which it is shared out
    validation: np.ndarray  # sorted, as is the rest
    rest: np.ndarray
    ranking: float
    distill: float
    seed: int


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
    rest = np.sort(np.concatenate([kept, order[num_public:end]]))
    return Carved(order[:num_public], np.sort(order[end:]), rest, ranking, distill, seed)


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
    With a ranking share of 0 the examples that refine also rank.
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


# -- orders in proportion ----------------------------------------------------------------------------------------------


def stratified_order(labels: np.ndarray, rng: np.random.Generator, holders: Ints | None = None) -> np.ndarray:
    """A random order of the examples in which every stretch holds the classes in their proportions, up to rounding.

    The r-th of a class's n examples, shuffled, stands at (r + 1/2) / n of the way, and equals are shuffled too.
    So the first k examples are an exact k, stratified, and contain the first j < k. With `holders`, which say who has
    each example, the examples of a class take turns: each holder's are spread over the class in the same way.
    """
    shuffled = rng.permutation(len(labels))
    if holders is not None:
        of_both = np.unique(labels, return_inverse=True)[1] * (holders.max(initial=0) + 1) + holders
        shuffled = shuffled[np.lexsort((rng.random(len(labels)), _places(of_both[shuffled])))]
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    places = _places(labels[by_class])
    return by_class[np.lexsort((rng.random(len(labels)), places))]


def _places(kinds: np.ndarray) -> np.ndarray:
    """Where each element stands among those of its kind, in the order given: the r-th of n at (r + 1/2) / n."""
    by_kind = np.argsort(kinds, kind="stable")
    _, first, size = np.unique(kinds[by_kind], return_index=True, return_counts=True)
    rank = np.arange(len(kinds)) - np.repeat(first, size)
    places = np.empty(len(kinds))
    places[by_kind] = (rank + 0.5) / np.repeat(size, size)
    return places


def num_test(num_examples: int) -> int:
    """How many of some examples become the test part: a fifth, and one at least."""
    return max(1, round(TEST_SHARE * num_examples))


def draw_test_part(labels: np.ndarray, seed: int) -> np.ndarray:
    """A stratified fifth of the examples, by position, ascending."""
    order = stratified_order(labels, numpy_generator(seed, "split", "test"))
    return np.sort(order[: num_test(len(order))])


def draw_test_part_by_client(labels: np.ndarray, held: Mapping[str, Ints], seed: int) -> np.ndarray:
    """A stratified fifth of what each client holds, by position, ascending; a client with one example keeps it.

    A client's draw depends on its own examples and its name alone: a site can draw it without the others.
    """
    drawn = [np.array([], dtype=np.int64)]
    for client, mine in held.items():
        if len(mine) > 1:
            order = stratified_order(labels[mine], numpy_generator(seed, "split", "test", client))
            drawn.append(mine[order[: num_test(len(mine))]])
    return np.sort(np.concatenate(drawn))
