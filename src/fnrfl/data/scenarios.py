"""Who holds what: scenarios as text, and the splits drawn from them.

    iid
    label-dirichlet(0.5)                       label-classes(2)
    quantity-dirichlet(0.5, min=20)            label-dirichlet(0.1) + quantity-dirichlet(1)
    feature-noise(0.1)                         label-classes(3) + feature-noise(0.5, kind=mask)
    niid(label-dirichlet(0.5))                 niid-mixed

Every split is exact, each example at exactly one client and no client without examples, or it is refused with a
sentence. Smaller alpha means more skew.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from fnrfl.data import niid
from fnrfl.errors import CompatibilityError, ConfigError
from fnrfl.rng import numpy_generator

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# ---- the parts of a scenario ----

_ALPHA_RULE = "between 1e-06 and 1000000, where smaller means more skew"
_NIID_RULE = "NIID-Bench takes alpha or k alone; it always balances label skew and asks for 10 examples per client."


@dataclass(frozen=True)
class Part:
    """A term of a scenario; its fields are its arguments and its text is what one would type, defaults left out."""

    name: ClassVar[str]

    def __str__(self) -> str:
        arguments = []
        for place, f in enumerate(fields(self)):
            value = getattr(self, f.name)
            if f.default is MISSING or value != f.default:
                arguments.append(_text(value) if place == 0 else f"{f.name}={_text(value)}")
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name

    def _require(self, holds: bool, key: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{self.name}: {key} is {_text(getattr(self, key))}; it must be {rule}.")


@dataclass(frozen=True)
class Iid(Part):
    """A random, even split."""

    name: ClassVar[str] = "iid"


@dataclass(frozen=True)
class LabelDirichlet(Part):
    """Each class is shared out by its own Dirichlet(alpha) over the clients.

    With `balance`, a client that already holds its even share of examples gets nothing of the classes that follow.
    """

    name: ClassVar[str] = "label-dirichlet"
    alpha: float
    balance: bool = False
    min: int = 10

    def __post_init__(self) -> None:
        self._require(1e-6 <= self.alpha <= 1e6, "alpha", _ALPHA_RULE)
        self._require(self.min >= 1, "min", "at least 1")


@dataclass(frozen=True)
class LabelClasses(Part):
    """Each client holds k classes, and each class is shared out evenly among the clients that hold it."""

    name: ClassVar[str] = "label-classes"
    k: int

    def __post_init__(self) -> None:
        self._require(self.k >= 1, "k", "at least 1")


@dataclass(frozen=True)
class QuantityDirichlet(Part):
    """The sizes of the clients are shares drawn from one Dirichlet(alpha)."""

    name: ClassVar[str] = "quantity-dirichlet"
    alpha: float
    min: int = 10

    def __post_init__(self) -> None:
        self._require(1e-6 <= self.alpha <= 1e6, "alpha", _ALPHA_RULE)
        self._require(self.min >= 1, "min", "at least 1")


@dataclass(frozen=True)
class NiidMixed(Part):
    """The paper code's label and quantity skew: ten clients, ten classes, two owners a class."""

    name: ClassVar[str] = "niid-mixed"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        self._require(1e-6 <= self.alpha <= 1e6, "alpha", _ALPHA_RULE)


@dataclass(frozen=True)
class FeatureNoise(Part):
    """Gaussian noise on the inputs, x' = x + (eps * M(x)) * sigma + mean, laid over any split.

    level: M is one everywhere and client i of n has the standard deviation sigma * i / (n - 1); an only client, like
    client 0, has none. mask: every client has sigma, inside a square patch of its own (`mask`). The mean is added
    everywhere, outside the mask and to client 0 as well, as the paper's equation has it. With `redraw`, eps is new
    each time an example is used; without, an example keeps its noise.
    """

    name: ClassVar[str] = "feature-noise"
    sigma: float
    kind: Literal["level", "mask"] = "level"
    mean: float = 0.0
    redraw: bool = True

    def __post_init__(self) -> None:
        self._require(self.sigma >= 0, "sigma", "a standard deviation, 0 or more")

    def levels(self, clients: int) -> Floats:
        """The standard deviation of each client's noise, [clients]."""
        if self.kind == "mask":
            return np.full(clients, self.sigma)
        return self.sigma * np.arange(clients) / max(1, clients - 1)


@dataclass(frozen=True)
class Joint:
    """Label and quantity skew together: client i's share of class k is proportional to p_k,i * q_i."""

    label: LabelDirichlet | LabelClasses
    quantity: QuantityDirichlet

    def __post_init__(self) -> None:
        if isinstance(self.label, LabelDirichlet) and self.label.balance:
            raise ConfigError(
                "balance=true evens the clients' sizes out and quantity-dirichlet skews them. Leave one of them out."
            )

    def __str__(self) -> str:
        return f"{self.label} + {self.quantity}"


@dataclass(frozen=True)
class Niid:
    """NIID-Bench's draw of a simple split, which always balances label skew and asks for ten examples per client."""

    of: Iid | LabelDirichlet | LabelClasses | QuantityDirichlet

    def __post_init__(self) -> None:
        if any(f.default is not MISSING and getattr(self.of, f.name) != f.default for f in fields(self.of)):
            raise ConfigError(f"niid({self.of}): {_NIID_RULE}")

    def __str__(self) -> str:
        return f"niid({self.of})"


Split = Iid | LabelDirichlet | LabelClasses | QuantityDirichlet | Joint | Niid | NiidMixed


@dataclass(frozen=True)
class Scenario:
    """How the training data are split, and the noise laid over them. `str` gives the canonical text."""

    split: Split = Iid()
    noise: FeatureNoise | None = None

    def __str__(self) -> str:
        if self.noise is None:
            return str(self.split)
        return str(self.noise) if self.split == Iid() else f"{self.split} + {self.noise}"


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


# ---- text to scenario ----

_PARTS: dict[str, type[Part]] = {
    part.name: part for part in (Iid, LabelDirichlet, LabelClasses, QuantityDirichlet, FeatureNoise, NiidMixed)
}
_TOKEN = re.compile(r"\s*([A-Za-z][\w-]*|-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[()+,=])")


def parse(text: str) -> Scenario:
    """Read a scenario such as "label-dirichlet(0.5) + feature-noise(0.1)"."""
    return _Reader(text).scenario()


def describe() -> dict[str, str]:
    """What can be typed, and what it means: each scenario's signature with its first sentence."""
    rows = {}
    for part in _PARTS.values():
        hints = get_type_hints(part)
        arguments = []
        for f in fields(part):
            if get_origin(hints[f.name]) is Literal:
                arguments.append(f"{f.name}={'|'.join(get_args(hints[f.name]))}")
            else:
                arguments.append(f.name if f.default is MISSING else f"{f.name}={_text(f.default)}")
        rows[f"{part.name}({', '.join(arguments)})" if arguments else part.name] = _first_sentence(part)
    rows["niid(SCENARIO)"] = _first_sentence(Niid)
    rows["SCENARIO + SCENARIO"] = _first_sentence(Joint)
    return rows


def _first_sentence(part: type) -> str:
    return (part.__doc__ or "").split("\n", 1)[0]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


class _Reader:
    """Reads  scenario := term ("+" term)*,  term := "niid(" scenario ")" | name ["(" argument ("," argument)* ")"]."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens(text))
        self.at = 0

    def scenario(self) -> Scenario:
        terms = self._terms(inside_niid=False)
        if self.tokens[self.at]:
            raise self._error(f"{self.tokens[self.at]!r} was not expected; scenarios are joined by +.")
        noise = self._one([term for term in terms if isinstance(term, FeatureNoise)], "feature noises")
        return Scenario(self._split([term for term in terms if not isinstance(term, FeatureNoise)]), noise)

    def _tokens(self, text: str) -> Iterator[str]:
        text = text.rstrip()
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(f"{text[at:].strip()[0]!r} cannot be read.")
            yield match[1]
            at = match.end()
        yield ""  # the end

    def _error(self, sentence: str) -> ConfigError:
        return ConfigError(f"Scenario {self.text!r}: {sentence}")

    def _next_is(self, token: str) -> bool:
        """Step over the next token if it is this one."""
        found = self.tokens[self.at] == token
        self.at += found
        return found

    def _expect(self, token: str) -> None:
        if not self._next_is(token):
            raise self._error(f"{token!r} was expected {self._here()}.")

    def _here(self) -> str:
        return f"where {self.tokens[self.at]!r} stands" if self.tokens[self.at] else "at the end"

    def _word(self, what: str) -> str:
        word = self.tokens[self.at]
        if not word or word in "()+,=":
            raise self._error(f"{what} was expected {self._here()}.")
        self.at += 1
        return word

    def _terms(self, inside_niid: bool) -> list[Part | Niid]:
        terms = [self._term(inside_niid)]
        while self._next_is("+"):
            terms.append(self._term(inside_niid))
        return terms

    def _term(self, inside_niid: bool) -> Part | Niid:
        name = self._word("the name of a scenario")
        if name == "niid":
            return self._niid()
        if name not in _PARTS:
            raise self._error(f"there is no scenario {name!r}. {_nearest(name, [*_PARTS, 'niid'])}")
        return self._part(_PARTS[name], inside_niid)

    def _niid(self) -> Niid:
        self._expect("(")
        terms = self._terms(inside_niid=True)
        self._expect(")")
        if any(isinstance(term, FeatureNoise) for term in terms):
            raise self._error("niid is about the split alone; write niid(...) + feature-noise(...).")
        if len(terms) > 1:
            raise self._error("NIID-Bench joins no skews; its own label and quantity skew is niid-mixed.")
        (split,) = terms
        if not isinstance(split, Iid | LabelDirichlet | LabelClasses | QuantityDirichlet):
            raise self._error(f"{split} inside niid(...) says the same thing twice; write {split}.")
        return Niid(split)

    def _part(self, part: type[Part], inside_niid: bool) -> Part:
        values: dict[str, object] = {}
        if self._next_is("(") and not self._next_is(")"):
            self._argument(part, values)
            while self._next_is(","):
                self._argument(part, values)
            self._expect(")")
        for f in fields(part):
            if f.default is MISSING and f.name not in values:
                raise self._error(f"{part.name} needs {f.name}, as in {part.name}({_EXAMPLES[f.name]}).")
        if inside_niid and len(values) > 1 and part is not FeatureNoise:
            raise self._error(_NIID_RULE)
        return part(**values)

    def _argument(self, part: type[Part], values: dict[str, object]) -> None:
        """Read one argument into `values`: key=value, or the value of the next key in line."""
        keys = [f.name for f in fields(part)]
        word = self._word(f"an argument of {part.name}")
        if self._next_is("="):
            key = word
            if key not in keys:
                raise self._error(f"{part.name} has no argument {key!r}. {_nearest(key, keys)}")
            word = self._word(f"a value for {key}")
        elif len(values) < len(keys):
            key = keys[len(values)]
        else:
            takes = ", ".join(keys) or "no arguments"
            raise self._error(f"{word!r} is too much, {part.name} takes {takes}.")
        if key in values:
            raise self._error(f"{key} of {part.name} is given twice.")
        values[key] = self._value(part, key, word)

    def _value(self, part: type[Part], key: str, word: str) -> object:
        kind = get_type_hints(part)[key]
        if kind is bool:
            choices: dict[str, object] = {"true": True, "false": False}
        elif get_origin(kind) is Literal:
            choices = {choice: choice for choice in get_args(kind)}
        else:
            what = "a whole number" if kind is int else "a number"
            try:
                number: int | float = kind(word)
            except ValueError:
                raise self._error(f"{key} of {part.name} is {word}; it must be {what}.") from None
            if number in (math.inf, -math.inf):
                raise self._error(f"{key} of {part.name} is {word}, which is too large.")
            return number
        if word not in choices:
            raise self._error(f"{key} of {part.name} is {word}; it must be {' or '.join(choices)}.")
        return choices[word]

    def _split(self, terms: list[Part | Niid]) -> Split:
        label = self._one([t for t in terms if isinstance(t, LabelDirichlet | LabelClasses)], "label skews")
        quantity = self._one([t for t in terms if isinstance(t, QuantityDirichlet)], "quantity skews")
        whole = self._one([t for t in terms if isinstance(t, Iid | Niid | NiidMixed)], "splits")
        skew = Joint(label, quantity) if label and quantity else label or quantity
        if whole and skew:
            raise self._error(f"{whole} is a whole split and cannot be joined with {skew}; keep one of them.")
        return whole or skew or Iid()

    def _one(self, terms: list[_Term], what: str) -> _Term | None:
        if len(terms) > 1:
            raise self._error(f"{terms[0]} and {terms[1]} are two {what}; keep one of them.")
        return terms[0] if terms else None


_Term = TypeVar("_Term")
_EXAMPLES = {"alpha": "0.5", "k": "2", "sigma": "0.1"}


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"It can be {', '.join(known) or 'none'}."


# ---- scenario to split ----


@dataclass(frozen=True, eq=False)
class Partition:
    """Which examples, by position, went to which client, and where that came from. Equal when the hashes are."""

    positions: tuple[Ints, ...]  # one array per client
    counts: Ints  # [clients, classes]
    scenario: Scenario
    seed: int

    @property
    def num_classes(self) -> int:
        return int(self.counts.shape[1])

    @property
    def sizes(self) -> Ints:
        """How many examples each client holds, [clients]."""
        return np.array([len(mine) for mine in self.positions], dtype=np.int64)

    @property
    def noise(self) -> FeatureNoise | None:
        return self.scenario.noise

    @property
    def levels(self) -> Floats:
        """The standard deviation of each client's noise, [clients]; zeros without noise."""
        clients = len(self.positions)
        return np.zeros(clients) if self.noise is None else self.noise.levels(clients)

    @cached_property
    def sha256(self) -> str:
        return _sha256(self._content())

    def manifest(self) -> dict[str, object]:
        """The partition as plain JSON values, with its hash."""
        return {**self._content(), "sha256": self.sha256}

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, object]) -> Partition:
        """The partition that `manifest` describes; refused if anything in it was changed."""
        content = {key: value for key, value in manifest.items() if key != "sha256"}
        if content.get("format") != _FORMAT:
            raise ConfigError(
                f"The partition has format {content.get('format')!r} and this version reads format {_FORMAT}. "
                f"Draw it again from its scenario and seed."
            )
        if _sha256(content) != manifest.get("sha256"):
            raise ConfigError(
                "The partition does not match its sha256: it was changed after it was drawn. Draw it again from its "
                "scenario and seed."
            )
        positions: list[list[int]] = content["positions"]  # type: ignore[assignment]  # what the hash vouches for
        return cls(
            positions=_frozen(positions),
            counts=np.array(content["counts"], dtype=np.int64),
            scenario=parse(str(content["scenario"])),
            seed=int(str(content["seed"])),
        )

    def _content(self) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "scenario": str(self.scenario),
            "seed": self.seed,
            "counts": self.counts.tolist(),
            "positions": [mine.tolist() for mine in self.positions],
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


_FORMAT = 1


def draw(
    scenario: Scenario, labels: npt.NDArray[np.integer], clients: int, seed: int, *, num_classes: int
) -> Partition:
    """Split the examples with these labels among the clients, reproducibly; the noise does not change the split."""
    labels = _check(labels, clients, num_classes)
    if isinstance(scenario.split, Niid | NiidMixed):
        positions = _draw_niid(scenario.split, labels, clients, seed, num_classes)
    else:
        positions = _draw(scenario.split, labels, clients, seed)
    frozen = _frozen(positions)
    counts = np.stack([np.bincount(labels[mine], minlength=num_classes) for mine in frozen]).astype(np.int64)
    return Partition(frozen, counts, scenario, seed)


def _draw(split: Split, labels: Ints, clients: int, seed: int) -> list[Ints]:
    """Counts first, since they decide whether a draw is kept; positions once."""
    if isinstance(split, Iid | QuantityDirichlet):
        labels = np.zeros_like(labels)  # to them all examples are of one class
    _, labels, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    least = _least(split)
    _check_possible(split, sizes, clients, least)
    shares = numpy_generator(seed, "partition", "shares")
    # A second or so at most, if the overhead per class and per client is worth a hundred numbers.
    tries = min(1000, max(50, 10_000_000 // (len(sizes) * clients + 100 * (len(sizes) + clients))))
    for _ in range(tries):
        counts = _draw_counts(split, sizes, clients, shares)
        if counts.sum(axis=0).min() >= least:
            return _deal(labels, counts, numpy_generator(seed, "partition", "order"))
    raise ConfigError(
        f"{split}: none of {tries} draws gave each of {clients} clients at least {least} of the {len(labels)} "
        f"examples. Use fewer clients, a smaller min or a larger alpha."
    )


def _draw_niid(split: Niid | NiidMixed, labels: Ints, clients: int, seed: int, num_classes: int) -> list[Ints]:
    if isinstance(split, NiidMixed) and (clients, num_classes) != (10, 10):
        raise ConfigError(
            f"niid-mixed is defined for 10 clients and 10 classes, here are {clients} and {num_classes}. Use "
            f"label-dirichlet(...) + quantity-dirichlet(...)."
        )
    of = split if isinstance(split, NiidMixed) else split.of
    if not isinstance(of, Iid | LabelClasses):
        _check_room(split, len(labels), clients, niid.LEAST)
    match of:
        case Iid():
            positions = niid.iid(len(labels), clients, seed)
        case LabelDirichlet():
            positions = niid.label_dirichlet(labels, num_classes, clients, of.alpha, seed)
        case LabelClasses():
            _check_classes(of, num_classes)
            positions = niid.label_classes(labels, num_classes, clients, of.k, seed)
        case QuantityDirichlet():
            positions = niid.quantity_dirichlet(len(labels), clients, of.alpha, seed)
        case NiidMixed():
            positions = niid.mixed(labels, of.alpha, seed)
    empty = [client for client, mine in enumerate(positions) if not len(mine)]
    if empty:
        way = "a larger alpha" if isinstance(split, NiidMixed) else "fewer clients"
        raise ConfigError(f"{split}: seed {seed} leaves client {empty[0]} without examples. Use another seed or {way}.")
    return positions


def _check(labels: npt.NDArray[np.integer], clients: int, num_classes: int) -> Ints:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError(f"Labels must be whole numbers in one row; these are {labels.dtype} of shape {labels.shape}.")
    if clients < 1:
        raise ConfigError(f"clients is {clients}; it must be at least 1.")
    if clients > len(labels):
        raise ConfigError(
            f"There are {clients} clients and {len(labels)} examples, and each client needs one. Use fewer clients."
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ConfigError(
            f"Labels run from {labels.min()} to {labels.max()}; with {num_classes} classes they must lie between 0 and "
            f"{num_classes - 1}."
        )
    return labels.astype(np.int64)


def _check_possible(split: Split, sizes: Ints, clients: int, least: int) -> None:
    """Refuse at once what no draw can satisfy."""
    _check_room(split, int(sizes.sum()), clients, least)
    part = split.label if isinstance(split, Joint) else split
    if not isinstance(part, LabelClasses):
        return
    _check_classes(part, len(sizes))
    slots = clients * part.k
    if slots < len(sizes):
        raise ConfigError(
            f"{part}: {clients} clients with {part.k} of {len(sizes)} classes each would leave classes without an "
            f"owner. Use k of at least {-(-len(sizes) // clients)}, or more clients."
        )
    if slots > np.minimum(sizes, clients).sum():
        raise ConfigError(
            f"{part}: the classes have too few examples for {clients} clients to hold {part.k} of them each. Use "
            f"fewer clients or a smaller k."
        )


def _check_room(split: Split, examples: int, clients: int, least: int) -> None:
    if clients * least > examples:
        way = f"at most {examples // least} clients" if examples >= least else "more examples"
        way += "" if isinstance(split, Niid | NiidMixed) else " or a smaller min"
        raise ConfigError(f"{split}: {clients} clients with at least {least} of {examples} examples each. Use {way}.")


def _check_classes(part: LabelClasses, classes: int) -> None:
    if part.k > classes:
        raise ConfigError(f"{part}: a client cannot hold {part.k} classes, there are {classes}. Use a smaller k.")


def _least(split: Split) -> int:
    match split:
        case LabelDirichlet() | QuantityDirichlet():
            return split.min
        case Joint():
            return max(_least(split.label), _least(split.quantity))
    return 1


def _draw_counts(split: Split, sizes: Ints, clients: int, rng: np.random.Generator) -> Ints:
    """How many examples of each class each client gets, [classes, clients]."""
    shares = _log_shares(split, sizes, clients, rng)
    offsets = rng.random(len(sizes))
    if not (isinstance(split, LabelDirichlet) and split.balance):
        return _apportion(shares, sizes, offsets)
    even = sizes.sum() / clients
    held = np.zeros(clients, dtype=np.int64)
    rows = []
    for k in range(len(sizes)):  # while examples are left, somebody holds less than an even share
        open_shares = np.where(held < even, shares[k], -np.inf)
        rows.append(_apportion(open_shares[None], sizes[k : k + 1], offsets[k : k + 1])[0])
        held += rows[-1]
    return np.stack(rows)


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
    filled = np.minimum(limits[:, None], np.arange(clients + 1)).sum(axis=0)  # slots taken at each level of water
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


def _deal(labels: Ints, counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """Give out examples at random so that each client gets its `counts`; positions in ascending order."""
    classes, clients = counts.shape
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(_small(labels[order]), kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(clients), classes), counts.ravel())
    return np.split(np.argsort(_small(owner), kind="stable"), np.cumsum(counts.sum(axis=0))[:-1])


def _small(values: Ints) -> npt.NDArray[np.integer]:
    """The same numbers in 16 bits where they fit, which numpy sorts in linear time."""
    return values.astype(np.uint16) if values.max() < 2**16 else values


def _frozen(positions: list[Ints] | list[list[int]]) -> tuple[Ints, ...]:
    arrays = tuple(np.array(mine, dtype=np.int64) for mine in positions)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _sha256(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
