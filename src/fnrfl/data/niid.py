"""NIID-Bench's own splits (Li et al., ICDE 2022), index for index.

The one file that draws from numpy's legacy generator and Python's `random`, both seeded with the run's seed: the
published splits, and the figures of the paper, come from these two streams in exactly this order of calls. Each
function returns, for every client in turn, the positions of its examples in the order NIID-Bench leaves them.

Departures, where the original would never end or would lose data: tries are bounded, and what it cannot split is
refused. Wherever the original ends with a usable split, the split is the same.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from fnrfl.core.errors import ConfigError

Positions = list[npt.NDArray[np.int64]]

LEAST = 10  # NIID-Bench's fixed minimum of examples per client
TRIES = 10_000  # draws of one vector of shares, which cost microseconds
WORK = 20_000_000  # numbers drawn in all tries of a whole split, about a second
OVERHEAD = 1000  # what handling a class costs besides, in numbers drawn


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
    tries = min(1000, max(100, WORK // (len(labels) + num_classes * (clients + OVERHEAD))))
    for _ in range(tries):
        held = np.zeros(clients, dtype=np.int64)
        orders, cuts = [], []
        for members_of_class in members:
            order = members_of_class.copy()
            stream.shuffle(order)
            shares = stream.dirichlet(np.repeat(alpha, clients)) * (held < even)
            orders.append(order)
            cuts.append(_cuts(shares, len(order)))
            held += np.diff(cuts[-1], prepend=0, append=len(order))
        if held.min() >= LEAST:
            break
    else:
        raise _hopeless(f"label-dirichlet({alpha:g})", tries, len(labels), clients)
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
    for _ in range(TRIES):
        shares = stream.dirichlet(np.repeat(alpha, clients))
        shares = shares / shares.sum()
        # A tiny alpha can give NaN; the original takes it and leaves all clients but the last empty.
        if np.min(shares * examples) >= LEAST:
            return np.split(order, _cuts(shares, examples, normalise=False))
    raise _hopeless(f"quantity-dirichlet({alpha:g})", TRIES, examples, clients)


def mixed(labels: npt.NDArray[np.int64], alpha: float, seed: int) -> Positions:
    """`mixed`: ten clients, ten classes; every class is cut in two by a Dirichlet, between two owners.

    Client i owns class i and one class that still has a single owner. The last client can be left with its own class
    alone (about 7 % of seeds): the original then loops for ever, here it trades with a client drawn at random.
    """
    size = 10
    stream = _numpy(seed)
    second = _second_owners(size, random.Random(seed))
    for _ in range(TRIES):
        # Never used, but it advances the stream. As in the original, NaN passes.
        shares = stream.dirichlet(np.repeat(alpha, size))
        if not np.min(shares / shares.sum() * len(labels)) < LEAST:
            break
    else:
        raise _hopeless(f"niid-mixed({alpha:g})", TRIES, len(labels), size)
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


def _hopeless(what: str, tries: int, examples: int, clients: int) -> ConfigError:
    return ConfigError(
        f"{what} as in NIID-Bench: none of {tries} draws gave each of {clients} clients {LEAST} of the {examples} "
        f"examples. Use fewer clients or a larger alpha, or the scenarios without niid, which take a smaller min."
    )
