"""Random orders in which every stretch holds classes and clients in their proportions, and test parts from them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fnrfl.core.ndarrays import Ints
from fnrfl.core.rng import numpy_generator

TEST_SHARE = 0.2  # of data that comes without a test set


def stratified_order(labels: np.ndarray, rng: np.random.Generator, holders: Ints | None = None) -> np.ndarray:
    """A random order of the examples in which every stretch holds the classes in their proportions, up to rounding.

    The r-th of a class's n examples, shuffled, stands at (r + 1/2) / n of the way, and equals are shuffled too.
    So the first k examples are an exact k, stratified, and contain the first j < k. With `holders`, which say who has
    each example, the examples of a class take turns: each holder's are spread over the class in the same way.
    """
    shuffled = rng.permutation(len(labels))
    if holders is not None:
        of_both = _codes(labels) * (holders.max(initial=0) + 1) + holders
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


def _codes(labels: np.ndarray) -> np.ndarray:
    return np.unique(labels, return_inverse=True)[1]


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
