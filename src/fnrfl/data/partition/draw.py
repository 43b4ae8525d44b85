"""Who holds what: splits drawn from scenarios.

Every split is exact, each example at exactly one client and no client without examples, or it is refused with a
sentence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import Floats, Ints, Ragged
from fnrfl.core.rng import numpy_generator
from fnrfl.core.words import counted
from fnrfl.data.partition import niid
from fnrfl.data.partition.value import Partition, partition_of
from fnrfl.data.scenarios import (
    Iid,
    Joint,
    LabelClasses,
    LabelDirichlet,
    Niid,
    NiidMixed,
    QuantityDirichlet,
    Scenario,
    Split,
)


def draw(
    scenario: Scenario, labels: npt.NDArray[np.integer], clients: int, seed: int, *, num_classes: int
) -> Partition:
    """Split the examples with these labels among the clients, reproducibly; the noise does not change the split."""
    labels = _checked_labels(labels, clients, num_classes)
    if scenario.counts_clients:
        raise ConfigError(f"{scenario} is not drawn: the data says who holds what. Give the clients of the examples.")
    positions: Sequence[Ints]
    if isinstance(scenario.split, Niid | NiidMixed):
        positions = _draw_niid(scenario.split, labels, clients, seed, num_classes)
    else:
        positions = _draw(scenario.split, labels, clients, seed)
    return partition_of(positions, labels, scenario, seed, num_classes)


def _draw(split: Split, labels: Ints, clients: int, seed: int) -> Sequence[Ints]:
    """Draw counts until every client has enough examples, then give out the examples once."""
    if isinstance(split, Iid | QuantityDirichlet):
        labels = np.zeros_like(labels)  # to them all examples are of one class
    _, labels, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    min_examples = _min_examples(split)
    _check_possible(split, sizes, clients, min_examples)
    shares = numpy_generator(seed, "partition", "shares")
    # A second or so at most, if the overhead per class and per client is worth a hundred numbers.
    tries = min(1000, max(50, 10_000_000 // (len(sizes) * clients + 100 * (len(sizes) + clients))))
    for _ in range(tries):
        counts = _draw_counts(split, sizes, clients, shares)
        if counts.sum(axis=0).min() >= min_examples:
            return _deal(labels, counts, numpy_generator(seed, "partition", "order"))
    raise ConfigError(
        f"{split}: none of {tries} draws gave each of {clients} clients at least {min_examples} of the "
        f"{counted(len(labels), 'example')}. Use fewer clients, a smaller min or a larger alpha. If the data "
        "names its clients, as a folder of sites does, scenario=natural takes those."
    )


def _draw_niid(split: Niid | NiidMixed, labels: Ints, clients: int, seed: int, num_classes: int) -> list[Ints]:
    if isinstance(split, NiidMixed) and (clients, num_classes) != (10, 10):
        raise ConfigError(
            f"niid-mixed is defined for 10 clients and 10 classes, here are {clients} and {num_classes}. Use "
            f"label-dirichlet(...) + quantity-dirichlet(...)."
        )
    scheme = split if isinstance(split, NiidMixed) else split.of
    if not isinstance(scheme, Iid | LabelClasses):
        _check_room(split, len(labels), clients, niid.MIN_EXAMPLES)
    match scheme:
        case Iid():
            positions = niid.iid(len(labels), clients, seed)
        case LabelDirichlet():
            positions = niid.label_dirichlet(labels, num_classes, clients, scheme.alpha, seed)
        case LabelClasses():
            _check_classes(scheme, num_classes)
            positions = niid.label_classes(labels, num_classes, clients, scheme.k, seed)
        case QuantityDirichlet():
            positions = niid.quantity_dirichlet(len(labels), clients, scheme.alpha, seed)
        case NiidMixed():
            positions = niid.mixed(labels, scheme.alpha, seed)
    empty = [client for client, mine in enumerate(positions) if not len(mine)]
    if empty:
        way = "fewer clients" if isinstance(scheme, LabelClasses) else "a larger alpha"
        raise ConfigError(f"{split}: seed {seed} leaves client {empty[0]} without examples. Use another seed or {way}.")
    return positions


def _checked_labels(labels: npt.NDArray[np.integer], clients: int, num_classes: int) -> Ints:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError(f"Labels must be whole numbers in one row; these are {labels.dtype} of shape {labels.shape}.")
    if clients < 1:
        raise ConfigError(f"clients is {clients}; it must be at least 1.")
    if clients > len(labels):
        raise ConfigError(
            f"clients is {clients} and the data has {counted(len(labels), 'example')}; each client needs one. "
            "Use fewer clients."
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ConfigError(
            f"Labels run from {labels.min()} to {labels.max()}; with {num_classes} classes they must lie between 0 and "
            f"{num_classes - 1}."
        )
    return labels.astype(np.int64)


def _check_possible(split: Split, sizes: Ints, clients: int, min_examples: int) -> None:
    """Refuse at once what no draw can satisfy."""
    _check_room(split, int(sizes.sum()), clients, min_examples)
    term = split.label if isinstance(split, Joint) else split
    if not isinstance(term, LabelClasses):
        return
    _check_classes(term, len(sizes))
    slots = clients * term.k
    if slots < len(sizes):
        raise ConfigError(
            f"{term}: {clients} clients with {term.k} of {len(sizes)} classes each would leave classes without an "
            f"owner. Use k of at least {-(-len(sizes) // clients)}, or more clients."
        )
    if slots > np.minimum(sizes, clients).sum():
        raise ConfigError(
            f"{term}: the classes have too few examples for {clients} clients to hold {term.k} of them each. Use "
            f"fewer clients or a smaller k."
        )


def _check_room(split: Split, examples: int, clients: int, min_examples: int) -> None:
    if clients * min_examples > examples:
        way = f"at most {examples // min_examples} clients" if examples >= min_examples else "more examples"
        way += "" if isinstance(split, Niid | NiidMixed) else " or a smaller min"
        raise ConfigError(
            f"{split}: clients is {clients}, and each client needs at least {min_examples} of "
            f"{counted(examples, 'example')}. Use {way}."
        )


def _check_classes(term: LabelClasses, classes: int) -> None:
    if term.k > classes:
        raise ConfigError(f"{term}: a client cannot hold {term.k} classes, there are {classes}. Use a smaller k.")


def _min_examples(split: Split) -> int:
    match split:
        case LabelDirichlet() | QuantityDirichlet():
            return split.min
        case Joint():
            return max(_min_examples(split.label), _min_examples(split.quantity))
    return 1


def _draw_counts(split: Split, sizes: Ints, clients: int, rng: np.random.Generator) -> Ints:
    """How many examples of each class each client gets, [classes, clients]."""
    shares = _log_shares(split, sizes, clients, rng)
    offsets = rng.random(len(sizes))
    if not (isinstance(split, LabelDirichlet) and split.balance):
        return _apportion(shares, sizes, offsets)
    even = sizes.sum() / clients
    held = np.zeros(clients, dtype=np.int64)
    counts_by_class: list[Ints] = []
    for k in range(len(sizes)):  # while examples are left, somebody holds less than an even share
        open_shares = np.where(held < even, shares[k], -np.inf)
        counts_by_class.append(_apportion(open_shares[None], sizes[k : k + 1], offsets[k : k + 1])[0])
        held += counts_by_class[-1]
    return np.stack(counts_by_class)


def _log_shares(split: Split, sizes: Ints, clients: int, rng: np.random.Generator) -> Floats:
    """Logarithms of the clients' shares of each class up to a constant a class, [classes, clients]."""
    match split:
        case LabelDirichlet() | QuantityDirichlet():
            return _log_gamma(split.alpha, (len(sizes), clients), rng)
        case LabelClasses():
            return np.where(_owners(split.k, sizes, clients, rng), 0.0, -np.inf)
        case Joint():
            label = _log_shares(split.label, sizes, clients, rng)
            return label + _log_gamma(split.quantity.alpha, (1, clients), rng)
    return np.zeros((len(sizes), clients))


def _log_gamma(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> Floats:
    """Logarithms of Gamma(alpha) numbers, which normalised are Dirichlet(alpha).

    Gamma(alpha) is Gamma(alpha + 1) * U^(1/alpha); without logarithms a small alpha underflows to 0/0.
    """
    draws: Floats = np.log(rng.standard_gamma(alpha + 1.0, shape)) + np.log1p(-rng.random(shape)) / alpha
    return draws


def _owners(k: int, sizes: Ints, clients: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Who holds which class, [classes, clients]: k a client, evenly over the classes, no class without an owner.

    A class has no more owners than examples, so that every owner gets some.
    """
    limits = np.minimum(sizes, clients)
    # Slots that are taken if no class has more owners than 0, 1, ...
    filled = np.minimum(limits[:, None], np.arange(clients + 1)).sum(axis=0)
    level = int(np.searchsorted(filled, clients * k, side="right")) - 1
    slots = np.minimum(limits, level)
    extra = rng.choice(np.flatnonzero(limits > level), clients * k - slots.sum(), replace=False)
    slots[extra] += 1
    owners = np.zeros((len(sizes), clients), dtype=np.bool_)
    for client in rng.permutation(clients):
        # Taking the classes with most free slots cannot end in a dead end (Gale and Ryser); ties fall at random.
        chosen = np.argsort(-slots - rng.random(len(slots)))[:k]
        owners[chosen, client] = True
        slots[chosen] -= 1
    return owners


def _apportion(log_shares: Floats, sizes: Ints, offsets: Floats) -> Ints:
    """Whole numbers that sum to each class's size and lie within one of its shares, [classes, clients].

    Cumulative shares are rounded from a random offset in [0, 1), which favours no client: the mean is the exact share.
    """
    ends = np.cumsum(np.exp(log_shares - log_shares.max(axis=1, keepdims=True)), axis=1)
    ends /= ends[:, -1:]  # exactly 1 from the last positive share on
    cuts = np.floor(ends * sizes[:, None] + offsets[:, None]).astype(np.int64)
    return np.diff(np.minimum(cuts, sizes[:, None]), axis=1, prepend=0)


def _deal(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ragged[Ints]:
    """Give out examples at random so that each client gets its `counts`; positions in ascending order."""
    classes, clients = counts.shape
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(_small(labels[order]), kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(clients), classes), counts.ravel())
    return Ragged(np.argsort(_small(owner), kind="stable"), counts.sum(axis=0))


def _small(values: Ints) -> npt.NDArray[np.integer]:
    """The same numbers in 16 bits where they fit, which numpy sorts in linear time."""
    return values.astype(np.uint16) if values.max() < 2**16 else values
