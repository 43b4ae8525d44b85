"""The terms of a scenario as values; `scenarios` reads them from text, and `partitions` draws their splits."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.core.ndarrays import Floats

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


def as_typed(value: object) -> str:
    """A value as one types it in a scenario: true, 0.5, 3."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
