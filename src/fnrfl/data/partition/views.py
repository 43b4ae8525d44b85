"""Who may see which examples: clients, public, ranking, distillation, validation and test data.

Under the honest protocol these are disjoint, and this is where an overlap is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fnrfl.core.algorithm import PublicTo
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.ndarrays import Ints, Ragged, sizes_of
from fnrfl.core.rng import numpy_generator
from fnrfl.core.words import counted
from fnrfl.data.datasets import Dataset, Part
from fnrfl.data.partition.holdout import Carved, share_out, stratified_order
from fnrfl.data.sources.entry import checksum


@dataclass(frozen=True, eq=False)
class Splits:
    """All the examples of a run, by who sees them; those to distil from have the label -1, to be used without."""

    train: Part  # the data set's whole training part
    private: Part  # the same, and behind it public data from another source if the clients hold that as well
    clients: Sequence[Tensor]  # what each client holds, as positions in `private`
    public: Part
    ranking: Part
    distill: Part
    validation: Part
    test: Part
    num_classes: int
    public_to: PublicTo = "nobody"
    set_aside: Mapping[str, np.ndarray] = field(default_factory=dict)  # of `train`, by position: public, validation
    site_tests: Sequence[Tensor] = ()  # of `test`, what each client brought, by position; empty if nobody says it
    site_validation: Sequence[Tensor] = ()  # of `validation`, likewise

    @classmethod
    def build(
        cls,
        dataset: Dataset,
        carved: Carved,
        positions: Sequence[np.ndarray],
        *,
        public: Dataset | Literal["test"] | None = None,
        leak_public_is_test: bool = False,
        public_to: PublicTo = "nobody",
        site_tests: Sequence[np.ndarray] = (),
        site_validation: Sequence[np.ndarray] = (),
    ) -> Splits:
        """Put a carved and partitioned data set together; `positions` says which of `carved.rest` each client holds.

        Public data is the carved one, or all of another source: a data set of the user's (both its parts), or
        the test set, if that leak is on. With `public_to` the clients hold all of it too, whatever the server uses it
        for; everything else, and how the rest was partitioned, stays as it is.
        """
        clients = Ragged.joined(positions, np.concatenate).mapped(lambda chosen: carved.rest[chosen])
        pool, order = dataset.train, carved.public
        if public is not None or leak_public_is_test:
            if len(order):
                raise CompatibilityError(
                    'public.source = "train" set training examples aside, and other data is to be public as well; only '
                    'one can be. Set public.source = "test" if leaks.public_is_test is meant, or turn that leak off.'
                )
            pool = _public_from_other_source(dataset, public, leak_public_is_test)
            order = stratified_order(pool.y.numpy(), numpy_generator(carved.seed, "split", "public"))
        shared = share_out(order, carved.ranking, carved.distill)
        set_aside = dict(zip(("refinement", "ranking", "distillation"), shared, strict=True))
        if not carved.ranking:
            del set_aside["ranking"]  # the same examples
        _refuse_twice((set_aside if pool is dataset.train else {}) | {"validation": carved.validation}, clients)
        refine, ranking, unlabelled = (pool.take(torch.from_numpy(index)) for index in shared)
        private, held = _handed_out(dataset, pool, shared, clients, public_to, carved.seed)
        return cls(
            train=dataset.train,
            private=private,
            clients=Ragged.joined(held, np.concatenate).mapped(torch.from_numpy),
            public=refine,
            ranking=ranking,
            distill=Part(unlabelled.x, torch.full_like(unlabelled.y, -1)),
            validation=dataset.train.take(torch.from_numpy(carved.validation)),
            test=dataset.test,
            num_classes=dataset.num_classes,
            public_to=public_to,
            set_aside={"public": carved.public, "validation": carved.validation},
            site_tests=_as_tensors(site_tests),
            site_validation=_as_tensors(site_validation),
        )

    @property
    def site_tests_elsewhere(self) -> Sequence[Tensor]:
        """What each client keeps for its scores on a machine of its own: tensors without values; empty: nobody does."""
        return self.site_tests if len(self.site_tests) and self.site_tests[0].is_meta else ()

    @property
    def sizes(self) -> Ints:
        """How many examples each client holds, [clients]: with public ones, if they have been handed out."""
        return sizes_of(self.clients)

    def manifest(self) -> dict[str, object]:
        """Sizes and sha256 of every part's contents and every client's positions, and one sha256 over all that.

        What is set aside of the training set is there by position, so that the split can be taken up again.
        """
        parts = ("train", "public", "ranking", "distill", "validation", "test")
        listed: dict[str, object] = {"num_classes": self.num_classes, "public_to": self.public_to}
        for name in parts:
            part: Part = getattr(self, name)
            known = "" if part.x.is_meta else checksum(part.x.numpy(), part.y.numpy())  # of examples that are here
            listed[name] = {"examples": len(part), "sha256": known}
        listed["clients"] = [
            {"examples": len(held), "sha256": "" if held.is_meta else checksum(held.numpy())} for held in self.clients
        ]
        listed |= {f"{name}_positions": positions.tolist() for name, positions in self.set_aside.items()}
        return {**listed, "sha256": splits_hash(listed)}


def _as_tensors(positions: Sequence[np.ndarray]) -> Sequence[Tensor]:
    return Ragged.joined(positions, np.concatenate).mapped(torch.from_numpy) if len(positions) else ()


def splits_hash(listed: Mapping[str, object]) -> str:
    """The sha256 over all that a manifest lists."""
    content = {key: value for key, value in listed.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _refuse_twice(set_aside: Mapping[str, np.ndarray], clients: Ragged[np.ndarray]) -> None:
    """Refuse training examples that two of the carved sets and the clients hold."""
    found, times = np.unique(np.concatenate([*set_aside.values(), clients.flat]), return_counts=True)
    if not len(twice := found[times > 1]):
        return
    everybody = [(f"the {name} data", held) for name, held in set_aside.items()]
    everybody += [(f"client {client}", held) for client, held in enumerate(clients)]
    names = [name for name, held in everybody for position in held if position == twice[0]]
    raise CompatibilityError(
        f"Both {names[0]} and {names[1]} hold the training example at position {twice[0]}, and so it is with "
        f"{counted(len(twice), 'example')} in all; all parts must be disjoint. Partition only what is left after "
        "carving."
    )


def _handed_out(
    dataset: Dataset,
    pool: Part,
    shared: Sequence[np.ndarray],
    clients: Sequence[np.ndarray],
    public_to: PublicTo,
    seed: int,
) -> tuple[Part, Sequence[np.ndarray]]:
    """(what clients' positions point into, the clients' positions with the public data that they are given)."""
    private, public = dataset.train, np.unique(np.concatenate(shared))  # ranking may be the same examples
    if public_to == "nobody" or not len(public):
        return private, clients
    if public_to == "everybody":
        if pool is not dataset.train:
            private = Part(
                torch.cat([private.x, pool.x.to(private.x.device)]), torch.cat([private.y, pool.y.to(private.y.device)])
            )
            public = public + len(dataset.train)
        given = [public] * len(clients)
    else:
        if pool is not dataset.train:
            raise CompatibilityError(
                "public-returned gives public data back to the clients, and this public data never was theirs. Set "
                'public.source = "train", or algorithm = public-share, which adds it to every client.'
            )
        owner = _owners(dataset.train.y.numpy(), public, clients, seed, dataset.num_classes)
        given = [public[owner == client] for client in range(len(clients))]
    return private, [np.sort(np.concatenate(both)) for both in zip(clients, given, strict=True)]


def _owners(
    labels: np.ndarray, public: np.ndarray, clients: Sequence[np.ndarray], seed: int, num_classes: int
) -> np.ndarray:
    """The client that each public example goes to, drawn in proportion to how many of its class a client has.

    A class that nobody has goes in proportion to the clients' sizes.
    """
    counts = np.stack([np.bincount(labels[mine], minlength=num_classes) for mine in clients])  # [clients, classes]
    ends = np.where(counts.any(0), counts, counts.sum(1, keepdims=True)).cumsum(0)[:, labels[public]]
    drawn = numpy_generator(seed, "split", "returned").integers(0, ends[-1])
    owner: np.ndarray = (drawn >= ends).sum(0)
    return owner


def num_shared(x: Tensor, others: Tensor) -> int:
    """How many examples are also among others, by the bytes of their inputs; none of examples that are elsewhere.

    Numbers that were equal before they were stored are equal again in the coarser floating type.
    """
    floating = [dtype for dtype in (x.dtype, others.dtype) if dtype.is_floating_point]
    dtype = min(floating, key=lambda one: one.itemsize) if floating else others.dtype
    known = set(_fingerprints(others, dtype))
    return sum(one in known for one in _fingerprints(x, dtype))


def _fingerprints(x: Tensor, dtype: torch.dtype) -> list[bytes]:
    if x.is_meta or not len(x):
        return []
    values = x.to(dtype) + 0.0 if dtype.is_floating_point else x.to(dtype)  # with one zero: -0.0 is 0.0
    rows = np.ascontiguousarray(values.numpy()).reshape(len(x), -1)
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def _public_from_other_source(
    dataset: Dataset, public: Dataset | Literal["test"] | None, leak_public_is_test: bool
) -> Part:
    """Public data that is not carved out of the training set, in the shape and with the class numbers of `dataset`."""
    if public is None or public == "test":
        if not leak_public_is_test:
            raise CompatibilityError(
                'public.source = "test" would train on the labels of the test set, which protocol = "honest" refuses. '
                'Set public.source = "train" or name data of your own; or set protocol = "paper", which turns on '
                "leaks.public_is_test and marks every result as a leak."
            )
        return dataset.test
    if leak_public_is_test:
        raise CompatibilityError(
            "leaks.public_is_test = true makes the test set public, but public.source names other data; one of them "
            'can be public. Set public.source = "test" or turn the leak off.'
        )
    pool = both_parts(public, dataset.classes)
    like = dataset.train.x
    pixels = [x.dtype == torch.uint8 for x in (pool.x, like)]
    if pool.x.shape[1:] != like.shape[1:] or pixels[0] != pixels[1]:
        raise CompatibilityError(
            f"public.source has examples of {_type_and_shape(pool.x)} and dataset {dataset.name} of "
            f"{_type_and_shape(like)}; they must be alike. Prepare the public data in the same way."
        )
    # Within a data set, the few pictures that its authors put into both parts belong to the benchmark.
    parts = {"the training set": dataset.train, "the test set": dataset.test}
    if common := {name: count for name, part in parts.items() if (count := num_shared(pool.x, part.x))}:
        listed = " and ".join(f"{count} that are also in {name}" for name, count in common.items())
        raise CompatibilityError(
            f"public.source has {listed}, among its {counted(len(pool), 'example')}; public data must be disjoint "
            "from both training and test data. Leave those examples out of it."
        )
    if pool.x.is_floating_point() and not like.is_floating_point():  # fractions beside whole numbers stay what they are
        return pool
    return Part(pool.x.to(like.dtype), pool.y)


def _type_and_shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape[1:])}"


def both_parts(other: Dataset, classes: tuple[str, ...], what: str = "public.source") -> Part:
    """All examples of another data set, its classes matched by name; `what` begins the sentence that refuses it.

    Where it only numbers its classes and `classes` are words, the numbers are taken for positions in `classes`.
    """
    x, y = torch.cat([other.train.x, other.test.x]), torch.cat([other.train.y, other.test.y])
    unknown = [name for name in other.classes if name not in classes]
    if not unknown:
        return Part(x, torch.tensor([classes.index(name) for name in other.classes])[y])
    numbers = [int(name) for name in other.classes if name.isdecimal()]
    numbered = len(numbers) == len(other.classes) and max(numbers) < len(classes)
    if numbered and not any(name.isdecimal() for name in classes):
        return Part(x, torch.tensor(numbers)[y])
    raise CompatibilityError(
        f"{what} has the class {unknown[0]!r}, which dataset does not; its classes are {', '.join(classes)}. "
        "Rename the classes of that data or leave the others out."
    )
