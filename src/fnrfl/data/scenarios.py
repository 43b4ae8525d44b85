"""Scenarios as text: how the data is spread over the clients.

    iid
    label-dirichlet(0.5)                       label-classes(2)
    quantity-dirichlet(0.5, min=20)            label-dirichlet(0.1) + quantity-dirichlet(1)
    feature-noise(0.1)                         label-classes(3) + feature-noise(0.5, kind=mask)
    niid(label-dirichlet(0.5))                 niid-mixed
    natural                                    natural + feature-noise(0.1)
    split.json

Smaller alpha means more skew. `partition.draw` draws the splits.
"""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import Floats
from fnrfl.core.words import did_you_mean

LIMITS = {  # of arguments: the least, the most, and both in words
    "alpha": (1e-6, 1e6, "between 1e-06 and 1000000, where smaller means more skew"),
    "k": (1, math.inf, "at least 1"),
    "min": (1, math.inf, "at least 1"),
    "sigma": (0, math.inf, "a standard deviation, 0 or more"),
}
NIID_RULE = "NIID-Bench takes alpha or k alone; it always balances label skew and asks for 10 examples per client."


@dataclass(frozen=True)
class Term:
    """A term of a scenario; its fields are its arguments and its text is what one would type, defaults left out."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for key in (field.name for field in fields(self) if field.name in LIMITS):
            (least, most, rule), value = LIMITS[key], getattr(self, key)
            if not least <= value <= most:
                raise ConfigError(f"{self.name}: {key} is {as_typed(value)}; it must be {rule}.")

    def __str__(self) -> str:
        arguments = []
        for at, field in enumerate(fields(self)):
            if (value := getattr(self, field.name)) != field.default:
                arguments.append(f"{field.name}={as_typed(value)}" if at else as_typed(value))
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name


@dataclass(frozen=True)
class Iid(Term):
    """A random, even split."""

    name: ClassVar[str] = "iid"


@dataclass(frozen=True)
class LabelDirichlet(Term):
    """Each class is shared out by its own Dirichlet(alpha) over the clients.

    With `balance`, a client that already holds its even share of examples gets nothing of the classes that follow.
    """

    name: ClassVar[str] = "label-dirichlet"
    alpha: float
    balance: bool = False
    min: int = 10


@dataclass(frozen=True)
class LabelClasses(Term):
    """Each client holds k classes, and each class is shared out evenly among the clients that hold it."""

    name: ClassVar[str] = "label-classes"
    k: int


@dataclass(frozen=True)
class QuantityDirichlet(Term):
    """The sizes of the clients are shares drawn from one Dirichlet(alpha)."""

    name: ClassVar[str] = "quantity-dirichlet"
    alpha: float
    min: int = 10


@dataclass(frozen=True)
class Natural(Term):
    """The clients that the data names, each with the examples that are its own."""

    name: ClassVar[str] = "natural"


@dataclass(frozen=True)
class NiidMixed(Term):
    """The paper code's label and quantity skew: ten clients, ten classes, two owners a class."""

    name: ClassVar[str] = "niid-mixed"
    alpha: float = 0.5


@dataclass(frozen=True)
class FeatureNoise(Term):
    """Gaussian noise on the inputs, x' = x + (eps * M(x)) * sigma + mean, laid over any split.

    level: M is one everywhere and client i of n has the standard deviation sigma * i / (n - 1); an only client, like
    client 0, has none. mask: every client has sigma, inside a square patch of its own (`noise.mask`). The mean is added
    everywhere, outside the mask and to client 0 as well, as the paper's equation has it. With `redraw`, eps is new
    each time an example is used; without, an example keeps its noise.
    """

    name: ClassVar[str] = "feature-noise"
    sigma: float
    kind: Literal["level", "mask"] = "level"
    mean: float = 0.0
    redraw: bool = True

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
        optional = [field for field in fields(self.of) if field.default is not MISSING]
        if any(getattr(self.of, field.name) != field.default for field in optional):
            raise ConfigError(f"niid({self.of}): {NIID_RULE}")

    def __str__(self) -> str:
        return f"niid({self.of})"


@dataclass(frozen=True)
class SavedSplit:
    """A split that `fnrfl scenario save` wrote, or a run's partition.json, with the noise that was laid over it."""

    path: str

    def __str__(self) -> str:
        return self.path


Split = Iid | LabelDirichlet | LabelClasses | QuantityDirichlet | Joint | Niid | NiidMixed | Natural | SavedSplit


@dataclass(frozen=True)
class Scenario:
    """How the training data are split, and the noise laid over them. `str` gives the canonical text."""

    split: Split = Iid()
    noise: FeatureNoise | None = None

    @property
    def counts_clients(self) -> bool:
        """Whether the split says how many clients there are, and not the key `clients`."""
        return isinstance(self.split, Natural | SavedSplit)

    def __str__(self) -> str:
        if self.noise is None:
            return str(self.split)
        return str(self.noise) if self.split == Iid() else f"{self.split} + {self.noise}"


def as_typed(value: object) -> str:
    """A value as one types it in a scenario: true, 0.5, 3."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


# -- from text --------------------------------------------------------------------------------------------------------

TERMS: dict[str, type[Term]] = {
    term.name: term for term in (Iid, LabelDirichlet, LabelClasses, QuantityDirichlet, FeatureNoise, NiidMixed, Natural)
}
NIID_BENCH_NAMES = {
    "homo": "niid(iid)", "noniid-labeldir": "niid(label-dirichlet(BETA))",
    "iid-diff-quantity": "niid(quantity-dirichlet(BETA))",
}  # fmt: skip  # what its --partition can be
SAVED = ".json"  # how the name of a file with a split ends
_TERM = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\(((?:[^()]|\([^()]*\))*)\)\s*)?")


def parse(text: str) -> Scenario:
    """Read a scenario such as "label-dirichlet(0.5) + feature-noise(0.1)".

    >>> str(parse("label-dirichlet( 0.50,min = 5 )+feature-noise(0.1)"))
    'label-dirichlet(0.5, min=5) + feature-noise(0.1)'
    """
    if text.strip().lower().endswith(SAVED):
        return Scenario(SavedSplit(text.strip()))
    try:
        return _joined(_terms(text))
    except ConfigError as error:
        raise ConfigError(f"Scenario {text!r}: {error}") from None


def describe() -> dict[str, str]:
    """What can be typed, and what it means: each scenario's signature with its first sentence."""
    meanings = {}
    for term in TERMS.values():
        hints = get_type_hints(term)
        arguments = []
        for field in fields(term):
            if get_origin(hints[field.name]) is Literal:
                arguments.append(f"{field.name}={'|'.join(get_args(hints[field.name]))}")
            else:
                arguments.append(field.name if field.default is MISSING else f"{field.name}={as_typed(field.default)}")
        meanings[f"{term.name}({', '.join(arguments)})" if arguments else term.name] = _first_sentence(term)
    meanings["niid(SCENARIO)"] = _first_sentence(Niid)
    meanings["SCENARIO + SCENARIO"] = _first_sentence(Joint)
    meanings[f"file{SAVED}"] = _first_sentence(SavedSplit)
    return meanings


def _first_sentence(term: type) -> str:
    return (term.__doc__ or "").split("\n", 1)[0]


def _terms(text: str) -> list[Term | Niid]:
    """Read terms that are joined by +."""
    found, at = list[Term | Niid](), 0
    while True:
        here = f"where {text[at:].strip()!r} stands" if text[at:].strip() else "at the end"
        if (match := _TERM.match(text, at)) is None:
            raise ConfigError(f"the name of a scenario was expected {here}.")
        name, inside, at = match[1], match[2] or "", match.end()
        if text[at : at + 1] not in ("", "+"):
            raise ConfigError(f"{text[at:]!r} was not expected; scenarios are joined by +, and brackets are closed.")
        found.append(_niid(inside) if name == "niid" else _term(name, inside))
        if at == len(text):
            return found
        at += 1


def _joined(terms: list[Term | Niid]) -> Scenario:
    """Join a split with noise; at most one of each."""
    noise = _at_most_one([one for one in terms if isinstance(one, FeatureNoise)], "feature noises")
    whole = _at_most_one([one for one in terms if isinstance(one, Iid | Niid | NiidMixed | Natural)], "splits")
    skew = _skew(terms)
    if whole and skew:
        raise ConfigError(f"{whole} is a whole split and cannot be joined with {skew}; keep one of them.")
    return Scenario(whole or skew or Iid(), noise)


def _skew(terms: list[Term | Niid]) -> LabelDirichlet | LabelClasses | QuantityDirichlet | Joint | None:
    label = _at_most_one([one for one in terms if isinstance(one, LabelDirichlet | LabelClasses)], "label skews")
    quantity = _at_most_one([one for one in terms if isinstance(one, QuantityDirichlet)], "quantity skews")
    return Joint(label, quantity) if label and quantity else label or quantity


def _at_most_one(found: list[AnyTerm], what: str) -> AnyTerm | None:
    if len(found) > 1:
        raise ConfigError(f"{found[0]} and {found[1]} are two {what}; keep one of them.")
    return found[0] if found else None


def _niid(inside: str) -> Niid:
    split, *more = _terms(inside)
    if any(isinstance(one, FeatureNoise) for one in (split, *more)):
        raise ConfigError("niid is about the split alone; write niid(...) + feature-noise(...).")
    if more:
        raise ConfigError("NIID-Bench joins no skews; its own label and quantity skew is niid-mixed.")
    if isinstance(split, Natural):
        raise ConfigError("natural takes the clients of the data and niid draws others; keep one of them.")
    if not isinstance(split, Iid | LabelDirichlet | LabelClasses | QuantityDirichlet):
        raise ConfigError(f"{split} inside niid(...) says the same thing twice; write {split}.")
    if "," in inside:
        raise ConfigError(NIID_RULE)
    return Niid(split)


def _term(name: str, inside: str) -> Term:
    """Read a term with its arguments."""
    if name in NIID_BENCH_NAMES:
        raise ConfigError(f"{name!r} is NIID-Bench's name; here it is {NIID_BENCH_NAMES[name]}.")
    if name not in TERMS:
        raise ConfigError(f"there is no scenario {name!r}.{_nearest(name, [*TERMS, 'niid'])}")
    values = _arguments(TERMS[name], inside.split(",") if inside.strip() else [])
    for field in fields(TERMS[name]):
        if field.default is MISSING and field.name not in values:
            raise ConfigError(f"{name} needs {field.name}, as in {name}({_EXAMPLES[field.name]}).")
    return TERMS[name](**values)


def _arguments(term: type[Term], texts: list[str]) -> dict[str, object]:
    """Read the arguments of a term: key=value, or the value of the next key in line."""
    types, values = get_type_hints(term), dict[str, object]()
    keys = [field.name for field in fields(term)]
    for text in texts:
        named, equals, word = (part.strip() for part in text.rpartition("="))
        if not equals and len(values) == len(keys):
            raise ConfigError(f"{word!r} is too much, {term.name} takes {', '.join(keys) or 'no arguments'}.")
        key = named if equals else keys[len(values)]
        if key not in keys:
            raise ConfigError(f"{term.name} has no argument {key!r}.{_nearest(key, keys)}")
        if key in values:
            raise ConfigError(f"{key} of {term.name} is given twice.")
        values[key] = _value(types[key], word, f"{key} of {term.name} is {word or 'empty'}")
    return values


def _value(kind: object, word: str, told: str) -> object:
    """Read a value of a type; `told` begins the sentence that refuses it."""
    if kind is int or kind is float:
        try:
            number = int(word) if kind is int else float(word)
        except ValueError:
            number = math.nan
        if number in (math.inf, -math.inf):
            raise ConfigError(f"{told}, which is too large.")
        if number != number:
            raise ConfigError(f"{told}; it must be {'a whole number' if kind is int else 'a number'}.")
        return number
    known: dict[str, object] = {"true": True, "false": False} if kind is bool else {one: one for one in get_args(kind)}
    if word not in known:
        raise ConfigError(f"{told}; it must be {' or '.join(known)}.")
    return known[word]


AnyTerm = TypeVar("AnyTerm")
_EXAMPLES = {"alpha": "0.5", "k": "2", "sigma": "0.1"}


def _nearest(word: str, known: list[str]) -> str:
    return did_you_mean(word.lower(), known) or f" It can be {', '.join(known) or 'none'}."
