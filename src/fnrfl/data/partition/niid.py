"""NIID-Bench's own splits (Li et al., ICDE 2022), index for index.

This is the one file that draws from numpy's legacy generator and Python's `random`, both seeded with the run's seed:
the published splits, and the figures of the paper, come from these two streams in exactly this order of calls. Each
function returns the positions of every client's examples, in the order in which NIID-Bench leaves them.

NIID-Bench repeats a draw, without limit, until every client has ten examples. Here the repetitions end after
`MAX_NUMBERS` random numbers, and the split is refused. Up to that limit the split is the same, index for index,
wherever the original ends and gives every client examples. A split of the original that leaves a client without
examples is refused. With some seeds the original of `mixed` never ends; there `mixed` trades a class.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from fnrfl.core.errors import ConfigError

Positions = list[npt.NDArray[np.int64]]

MIN_EXAMPLES = 10  # NIID-Bench's fixed minimum for every client
MAX_NUMBERS = 40_000_000  # random numbers that the repetitions of one split may draw: two or three seconds
CLASS_OVERHEAD = 2000  # the cost of cutting up one class, counted in random numbers
MAX_NUMBERS_AT_ONCE = 500_000  # 4 MB


def iid(examples: int, clients: int, seed: int) -> Positions:
    """`homo`: a random order cut into equal runs."""
    return np.array_split(_numpy(seed).permutation(examples), clients)


def label_dirichlet(
    labels: npt.NDArray[np.int64], num_classes: int, clients: int, alpha: float, seed: int
) -> Positions:
    """`noniid-labeldir`: per class a Dirichlet over the clients that do not yet hold their even share of examples."""
    stream = _numpy(seed)
    members = [np.flatnonzero(labels == k) for k in range(num_classes)]
    even = len(labels) / clients
    max_draws = max(100, MAX_NUMBERS // (len(labels) + num_classes * (clients + CLASS_OVERHEAD)))
    for _ in range(max_draws):
        held = np.zeros(clients, dtype=np.int64)
        orders, cuts = [], []
        for members_of_class in members:
            order = members_of_class.copy()
            stream.shuffle(order)
            shares = stream.dirichlet(np.repeat(alpha, clients)) * (held < even)
            orders.append(order)
            cuts.append(_cuts(shares, len(order)))
            held += np.diff(cuts[-1], prepend=0, append=len(order))
        if held.min() >= MIN_EXAMPLES:
            break
    else:
        raise _refused(f"label-dirichlet({alpha:g})", max_draws, len(labels), clients)
    pieces = [np.split(order, cut) for order, cut in zip(orders, cuts, strict=True)]
    result = [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]
    for positions in result:
        stream.shuffle(positions)
    return result


def label_classes(labels: npt.NDArray[np.int64], num_classes: int, clients: int, k: int, seed: int) -> Positions:
    """`noniid-#labelK`: client i owns class i mod C and k - 1 random others; owners share a class evenly."""
    stream = _numpy(seed)
    if k == num_classes:
        owned = [set(range(num_classes))] * clients
    else:
        owned = []
        other = random.Random(seed)
        for client in range(clients):
            mine = {client % num_classes}
            while len(mine) < k:
                mine.add(other.randint(0, num_classes - 1))
            owned.append(mine)
    pieces: list[Positions] = [[] for _ in range(clients)]
    for c in range(num_classes):
        order = np.flatnonzero(labels == c)
        owners = [client for client in range(clients) if c in owned[client]]
        if len(order) and not owners:
            raise ConfigError(
                f"niid(label-classes({k})): class {c} has no owner among {clients} clients with seed {seed}, where "
                f"NIID-Bench stops too. Use more clients, a larger k or another seed, or label-classes({k}) alone."
            )
        stream.shuffle(order)
        for client, piece in zip(owners, np.array_split(order, max(1, len(owners))), strict=False):
            pieces[client].append(piece)
    return [np.concatenate(mine) for mine in pieces]


def quantity_dirichlet(examples: int, clients: int, alpha: float, seed: int) -> Positions:
    """`iid-diff-quantity`: a random order cut by one Dirichlet over the clients."""
    stream = _numpy(seed)
    order = stream.permutation(examples)
    shares = _shares_with_room(stream, alpha, examples, clients, f"quantity-dirichlet({alpha:g})")
    return np.split(order, _cuts(shares, examples, normalise=False))


def mixed(labels: npt.NDArray[np.int64], alpha: float, seed: int) -> Positions:
    """`mixed`: ten clients, ten classes; every class is cut in two by a Dirichlet, between two owners.

    Client i owns class i and one class that still has a single owner. The last client can be left with its own class
    alone (about 7 % of seeds): the original then loops for ever, here it trades with a client drawn at random.
    """
    size = 10
    stream = _numpy(seed)
    second = _second_owners(size, random.Random(seed))
    # NIID-Bench never uses these shares, but drawing them advances the stream.
    _shares_with_room(stream, alpha, len(labels), size, f"niid-mixed({alpha:g})")
    pieces: list[Positions] = [[] for _ in range(size)]
    for c in range(size):
        order = np.flatnonzero(labels == c)
        stream.shuffle(order)
        cut = _cuts(stream.dirichlet(np.repeat(alpha, 2)), len(order), normalise=False)
        for client, piece in zip(sorted((c, second[c])), np.split(order, cut), strict=True):
            pieces[client].append(piece)
    return [np.concatenate(mine) for mine in pieces]


def _second_owners(size: int, stream: random.Random) -> dict[int, int]:
    """For each class the client that owns it besides client = class: a random derangement, drawn the original's way."""
    owner: dict[int, int] = {}
    for client in range(size - 1):
        c = client
        while c == client or c in owner:
            c = stream.randint(0, size - 1)
        owner[c] = client
    last = size - 1
    (left,) = set(range(size)) - owner.keys()
    if left == last:
        partner = stream.randint(0, last - 1)
        left = next(c for c, client in owner.items() if client == partner)
        owner[last] = partner
    owner[left] = last
    return owner


def _shares_with_room(
    stream: np.random.RandomState, alpha: float, examples: int, clients: int, scenario: str
) -> npt.NDArray[np.float64]:
    """The first vector of Dirichlet(alpha) shares that the original accepts; `stream` stands right behind it.

    Vectors are drawn many at a time, which gives the same numbers as one at a time. Most are rejected at a glance; the
    others are held against the original's rule in its own arithmetic. That rule accepts NaN, which a tiny alpha gives.
    """
    concentration = np.repeat(alpha, clients)
    max_draws, drawn, chunk = max(100, MAX_NUMBERS // clients), 0, 1
    while drawn < max_draws:
        before = stream.get_state()
        vectors = stream.dirichlet(concentration, size=chunk)
        for row in np.flatnonzero(~(vectors.min(axis=1) * examples < MIN_EXAMPLES - 1e-3)):
            shares: npt.NDArray[np.float64] = vectors[row] / vectors[row].sum()
            if not np.min(shares * examples) < MIN_EXAMPLES:
                stream.set_state(before)
                stream.dirichlet(concentration, size=row + 1)
                return shares
        drawn += chunk
        chunk = min(2 * chunk, max(1, MAX_NUMBERS_AT_ONCE // clients), max(1, max_draws - drawn))
    raise _refused(scenario, max_draws, examples, clients)


def _cuts(shares: npt.NDArray[np.float64], count: int, normalise: bool = True) -> npt.NDArray[np.int64]:
    """Where to cut `count` examples. Shares lost to underflow give everything to the last, as in the original."""
    with np.errstate(invalid="ignore"):
        shares = shares / shares.sum() if normalise else shares
        ends = np.cumsum(shares) * count
    cuts: npt.NDArray[np.int64] = np.nan_to_num(ends, nan=0.0, posinf=0.0).astype(np.int64)[:-1]
    return cuts


def _numpy(seed: int) -> np.random.RandomState:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"The seed is {seed}; NIID-Bench's splits need one between 0 and {2**32 - 1}.")
    return np.random.RandomState(seed)


def _refused(scenario: str, draws: int, examples: int, clients: int) -> ConfigError:
    return ConfigError(
        f"{scenario} as in NIID-Bench: none of {draws:,} draws gave each of {clients} clients {MIN_EXAMPLES} of the "
        f"{examples:,} examples. Use fewer clients or a larger alpha, or the scenarios without niid, which take a "
        "smaller min."
    )
