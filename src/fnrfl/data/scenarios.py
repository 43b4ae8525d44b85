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
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from fnrfl.core.errors import ConfigError
from fnrfl.core.ndarrays import Floats
from fnrfl.core.words import did_you_mean

_ALPHA_RULE = "between 1e-06 and 1000000, where smaller means more skew"
NIID_RULE = "NIID-Bench takes alpha or k alone; it always balances label skew and asks for 10 examples per client."


@dataclass(frozen=True)
class Term:
    """A term of a scenario; its fields are its arguments and its text is what one would type, defaults left out."""

    name: ClassVar[str]

    def __str__(self) -> str:
        arguments = []
        for index, field in enumerate(fields(self)):
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                arguments.append(as_typed(value) if index == 0 else f"{field.name}={as_typed(value)}")
        return f"{self.name}({', '.join(arguments)})" if arguments else self.name

    def _require(self, holds: bool, key: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{self.name}: {key} is {as_typed(getattr(self, key))}; it must be {rule}.")


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

    def __post_init__(self) -> None:
        self._require(1e-6 <= self.alpha <= 1e6, "alpha", _ALPHA_RULE)
        self._require(self.min >= 1, "min", "at least 1")


@dataclass(frozen=True)
class LabelClasses(Term):
    """Each client holds k classes, and each class is shared out evenly among the clients that hold it."""

    name: ClassVar[str] = "label-classes"
    k: int

    def __post_init__(self) -> None:
        self._require(self.k >= 1, "k", "at least 1")


@dataclass(frozen=True)
class QuantityDirichlet(Term):
    """The sizes of the clients are shares drawn from one Dirichlet(alpha)."""

    name: ClassVar[str] = "quantity-dirichlet"
    alpha: float
    min: int = 10

    def __post_init__(self) -> None:
        self._require(1e-6 <= self.alpha <= 1e6, "alpha", _ALPHA_RULE)
        self._require(self.min >= 1, "min", "at least 1")


@dataclass(frozen=True)
class Natural(Term):
    """The clients that the data names, each with the examples that are its own."""

    name: ClassVar[str] = "natural"


@dataclass(frozen=True)
class NiidMixed(Term):
    """The paper code's label and quantity skew: ten clients, ten classes, two owners a class."""

    name: ClassVar[str] = "niid-mixed"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        self._require(1e-6 <= self.alpha <= 1e6, "alpha", _ALPHA_RULE)


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
_TOKEN = re.compile(r"\s*([A-Za-z][\w-]*|-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[()+,=])")


def parse(text: str) -> Scenario:
    """Read a scenario such as "label-dirichlet(0.5) + feature-noise(0.1)".

    >>> str(parse("label-dirichlet( 0.50,min = 5 )+feature-noise(0.1)"))
    'label-dirichlet(0.5, min=5) + feature-noise(0.1)'
    """
    if text.strip().lower().endswith(SAVED):
        return Scenario(SavedSplit(text.strip()))
    return _Parser(text).scenario()


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


class _Parser:
    """Reads  scenario := term ("+" term)*,  term := "niid(" scenario ")" | name ["(" argument ("," argument)* ")"]."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens(text))
        self.at = 0

    def scenario(self) -> Scenario:
        terms = self._terms(inside_niid=False)
        if self.tokens[self.at]:
            raise self._error(f"{self.tokens[self.at]!r} was not expected; scenarios are joined by +.")
        noise = self._at_most_one([term for term in terms if isinstance(term, FeatureNoise)], "feature noises")
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
        matches = self.tokens[self.at] == token
        self.at += matches
        return matches

    def _expect(self, token: str) -> None:
        if not self._next_is(token):
            raise self._error(f"{token!r} was expected {self._here()}.")

    def _here(self) -> str:
        return f"where {self.tokens[self.at]!r} stands" if self.tokens[self.at] else "at the end"

    def _word(self, expected: str) -> str:
        word = self.tokens[self.at]
        if not word or word in "()+,=":
            raise self._error(f"{expected} was expected {self._here()}.")
        self.at += 1
        return word

    def _terms(self, inside_niid: bool) -> list[Term | Niid]:
        terms = [self._term(inside_niid)]
        while self._next_is("+"):
            terms.append(self._term(inside_niid))
        return terms

    def _term(self, inside_niid: bool) -> Term | Niid:
        name = self._word("the name of a scenario")
        if name == "niid":
            return self._niid()
        if name in NIID_BENCH_NAMES:
            raise self._error(f"{name!r} is NIID-Bench's name; here it is {NIID_BENCH_NAMES[name]}.")
        if name not in TERMS:
            raise self._error(f"there is no scenario {name!r}.{_nearest(name, [*TERMS, 'niid'])}")
        return self._call(TERMS[name], inside_niid)

    def _niid(self) -> Niid:
        self._expect("(")
        terms = self._terms(inside_niid=True)
        self._expect(")")
        if any(isinstance(term, FeatureNoise) for term in terms):
            raise self._error("niid is about the split alone; write niid(...) + feature-noise(...).")
        if len(terms) > 1:
            raise self._error("NIID-Bench joins no skews; its own label and quantity skew is niid-mixed.")
        (split,) = terms
        if isinstance(split, Natural):
            raise self._error("natural takes the clients of the data and niid draws others; keep one of them.")
        if not isinstance(split, Iid | LabelDirichlet | LabelClasses | QuantityDirichlet):
            raise self._error(f"{split} inside niid(...) says the same thing twice; write {split}.")
        return Niid(split)

    def _call(self, term: type[Term], inside_niid: bool) -> Term:
        values: dict[str, object] = {}
        if self._next_is("(") and not self._next_is(")"):
            self._argument(term, values)
            while self._next_is(","):
                self._argument(term, values)
            self._expect(")")
        for field in fields(term):
            if field.default is MISSING and field.name not in values:
                raise self._error(f"{term.name} needs {field.name}, as in {term.name}({_EXAMPLES[field.name]}).")
        if inside_niid and len(values) > 1 and term is not FeatureNoise:
            raise self._error(NIID_RULE)
        return term(**values)

    def _argument(self, term: type[Term], values: dict[str, object]) -> None:
        """Read one argument into `values`: key=value, or the value of the next key in line."""
        keys = [field.name for field in fields(term)]
        word = self._word(f"an argument of {term.name}")
        if self._next_is("="):
            key = word
            if key not in keys:
                raise self._error(f"{term.name} has no argument {key!r}.{_nearest(key, keys)}")
            word = self._word(f"a value for {key}")
        elif len(values) < len(keys):
            key = keys[len(values)]
        else:
            takes = ", ".join(keys) or "no arguments"
            raise self._error(f"{word!r} is too much, {term.name} takes {takes}.")
        if key in values:
            raise self._error(f"{key} of {term.name} is given twice.")
        values[key] = self._value(term, key, word)

    def _value(self, term: type[Term], key: str, word: str) -> object:
        kind = get_type_hints(term)[key]
        if kind is bool:
            choices: dict[str, object] = {"true": True, "false": False}
        elif get_origin(kind) is Literal:
            choices = {choice: choice for choice in get_args(kind)}
        else:
            rule = "a whole number" if kind is int else "a number"
            try:
                number: int | float = kind(word)
            except ValueError:
                number = math.nan
            if isinstance(number, float) and math.isnan(number):
                raise self._error(f"{key} of {term.name} is {word}; it must be {rule}.")
            if number in (math.inf, -math.inf):
                raise self._error(f"{key} of {term.name} is {word}, which is too large.")
            return number
        if word not in choices:
            raise self._error(f"{key} of {term.name} is {word}; it must be {' or '.join(choices)}.")
        return choices[word]

    def _split(self, terms: list[Term | Niid]) -> Split:
        label = self._at_most_one([t for t in terms if isinstance(t, LabelDirichlet | LabelClasses)], "label skews")
        quantity = self._at_most_one([t for t in terms if isinstance(t, QuantityDirichlet)], "quantity skews")
        complete = self._at_most_one([t for t in terms if isinstance(t, Iid | Niid | NiidMixed | Natural)], "splits")
        skew = Joint(label, quantity) if label and quantity else label or quantity
        if complete and skew:
            raise self._error(f"{complete} is a whole split and cannot be joined with {skew}; keep one of them.")
        return complete or skew or Iid()

    def _at_most_one(self, terms: list[AnyTerm], kind: str) -> AnyTerm | None:
        if len(terms) > 1:
            raise self._error(f"{terms[0]} and {terms[1]} are two {kind}; keep one of them.")
        return terms[0] if terms else None


AnyTerm = TypeVar("AnyTerm")
_EXAMPLES = {"alpha": "0.5", "k": "2", "sigma": "0.1"}


def _nearest(word: str, known: list[str]) -> str:
    return did_you_mean(word.lower(), known) or f" It can be {', '.join(known) or 'none'}."
