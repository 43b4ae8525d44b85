"""What the paper printed, number by number, with its place; and what NIID-Bench published.

A number is text, with the digits that were printed. Places are the labels of the paper's tables in its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fnrfl.results.reproduce.settings import SINGLE_SKEWS, SIX


@dataclass(frozen=True)
class Printed:
    """A printed number, where it stands, and what must be known about it."""

    text: str
    place: str
    note: str = ""
    verified: bool = True  # False: from memory or second hand, so it binds nothing

    @property
    def value(self) -> float:
        """The number."""
        return float(self.text)


PrintedKey = tuple[str, str, str, str]  # table, net, skew and method; in the cost table method:metric
_OFFSETS = {"feddyn": "0.0070", "fedftg": "0.0450", "feddf": "0.0100", "feddc": "0.0400", "fedgen": "0.0020"}
_NOISE_UNKNOWN = "the paper does not say how much noise; its README says 0.5"
_OTHER_NOISE = f"{_NOISE_UNKNOWN}, and the noise table has another number at 0.5"
_TWO_CLIENTS = "the digits fit 20,000 test images, so two clients"
_OTHER_FEDAVG = "0.8850 in the noise table and at the end of the curve"

_ACCURACY = """
fedavg+fnr  0.9976 0.9931  0.9970 0.9992  0.9982 0.9939
fedavg      0.6001 0.7485  0.8393 0.8311  0.9107 0.9194
fedprox     0.5956 0.7285  0.8773 0.8050  0.8874 0.8916
scaffold    0.7425 0.7733  0.9077 0.8657  0.7017 0.9064
moon        0.5530 0.7193  0.6515 0.8432  0.7336 0.8424
fednova     0.6223 0.7475  0.9043 0.8522  0.7293 0.7622
feddyn      0.6071 0.7555  0.8463 0.8381  0.9177 0.9264
fedftg      0.6451 0.7935  0.8843 0.8761  0.9557 0.9644
feddf       0.6101 0.7585  0.8493 0.8411  0.9207 0.9294
feddc       0.6401 0.7885  0.8793 0.8711  0.9507 0.9594
fedgen      0.6021 0.7505  0.8413 0.8331  0.9127 0.9214
"""
# Each block: traffic in MB, seconds, accuracy, kappa, rho.
_COST = {
    "feature-0.5": """
8920   8920   8920   13380  8920   8920
6060   6840   8160   6840   10692  6525
0.9976 0.6001 0.5956 0.7425 0.5530 0.6223
1.6462 0.8774 0.7299 1.0855 0.5172 0.9536
1.1184 0.6728 0.6677 0.5549 0.6199 0.6976""",
    "label": """
8920   8920   8920   13380  8920   8920
7133   6006   11310  7176   8814   7098
0.9970 0.8393 0.8773 0.9077 0.6515 0.9043
1.3977 1.3974 0.7757 1.2649 0.7392 1.2740
1.1177 0.9409 0.9835 0.6784 0.7304 1.0138""",
    "quantity": """
8920   8920   8920   13380  8920   8920
5400   6786   9360   7332   11544  6006
0.9982 0.9107 0.8874 0.7017 0.7336 0.7293
1.8485 1.3420 0.9481 0.9570 0.6355 1.2143
1.1191 1.0210 0.9948 0.5244 0.8224 0.8176""",
}
_MIXED = """
label+feature-0.1  0.9755 0.80665  0.78365  0.83705  0.636   0.8029
label+feature-0.5  0.9111 0.4504   0.4587   0.5763   0.37275 0.3942
label+quantity     0.8826 0.309439 0.304785 0.311153 0.2993  0.309439
"""
_ORTHOGONALITY = """
fedavg+fnr    0.9976 0.9970 0.9982
fedprox+fnr   0.9784 0.9838 0.9999
scaffold+fnr  0.9783 0.9892 0.9637
moon+fnr      0.9678 0.9774 0.9532
fednova+fnr   0.9664 0.9766 0.9427
"""
_NOISE = """
iid                0.9995 0.9238 0.9039 0.9290 0.7371 0.9257
feature-0.1        0.9984 0.8549 0.8219 0.8581 0.5677 0.8469
feature-0.5        0.9505 0.4303 0.4517 0.5925 0.4030 0.4723
label              0.9970 0.8850 0.8773 0.9077 0.6515 0.9043
label+feature-0.1  0.9755 0.8067 0.7837 0.8371 0.6360 0.8029
label+feature-0.5  0.9111 0.4504 0.4587 0.5763 0.3728 0.3942
"""
# NIID-Bench's README: simple-cnn, 50 rounds, percent. FedProx at the mu that was best there.
_NIID_BENCH = """
label        68.2 67.9 69.8 66.8
classes-2    49.8 50.7 49.1 46.5
feature-0.1  68.9 69.3 70.1 68.5
quantity     72.0 71.2 62.4 10.0
classes-1    10.0 12.3 10.0 10.0
classes-3    58.3 57.1 57.8 54.4
iid          70.4 70.2 71.5 69.5
"""
_UNVERIFIED = ("classes-1", "classes-3", "iid")

CURVES_SOURCE = "the first release of the paper's code"
# Accuracy of each round of the label-skew figure, from the data that its first release drew it from.
CURVES = {
    "fedavg+fnr": (0.1004, 0.8682, 0.9772, 0.9877, 0.9929, 0.9945, 0.9953, 0.9962, 0.9971, 0.9970),
    "fedavg": (0.1003, 0.7609, 0.7921, 0.8150, 0.8433, 0.8594, 0.8849, 0.8792, 0.8976, 0.8850),
}

# The classes that the paper names in its ablation: the client's examples of it, and the gain that its figure shows.
REFINED_CLASSES = {"frog": (471, 0.413), "horse": (485, 0.170), "automobile": (512, 0.109), "ship": (528, 0.168)}


def _rows(text: str) -> dict[str, list[str]]:
    """The numbers of each line, by its first word."""
    return {name: numbers for name, *numbers in (line.split() for line in text.strip().splitlines())}


def _accuracy() -> dict[PrintedKey, Printed]:
    found: dict[PrintedKey, Printed] = {}
    for method, numbers in _rows(_ACCURACY).items():
        places = [(net, skew) for skew in SINGLE_SKEWS for net in ("resnet18", "vgg11")]
        for (net, skew), text in zip(places, numbers, strict=True):
            note = ""
            if skew.startswith("feature"):
                note = _OTHER_NOISE if net == "resnet18" else _NOISE_UNKNOWN
            if method in _OFFSETS:
                note = f"the printed FedAvg + {_OFFSETS[method]}, as in every column of this row"
            elif (net, skew, method) == ("resnet18", "label", "fedavg"):
                note = _OTHER_FEDAVG
            found["accuracy", net, skew, method] = Printed(text, "the paper, tab:Exp1", note)
    return found


def _cost() -> dict[PrintedKey, Printed]:
    found: dict[PrintedKey, Printed] = {}
    for skew, block in _COST.items():
        lines = [line.split() for line in block.strip().splitlines()]
        for metric, numbers in zip(COST_METRICS, lines, strict=True):
            for method, text in zip(SIX, numbers, strict=True):
                timed = metric == "seconds" and method != "fedavg+fnr" and int(text) % 78 == 0
                note = "a multiple of 78 s, like all ten of these times" if timed and skew != "feature-0.5" else ""
                found["cost", "resnet18", skew, f"{method}:{metric}"] = Printed(text, "the paper, tab:cost", note)
    return found


def _by_skew(table: str, text: str, place: str) -> dict[PrintedKey, Printed]:
    found: dict[PrintedKey, Printed] = {}
    for skew, numbers in _rows(text).items():
        for method, number in zip(SIX, numbers, strict=True):
            note = _TWO_CLIENTS if skew.startswith("label+feature") and method != "fedavg+fnr" else ""
            found[table, "resnet18", skew, method] = Printed(number, place, note)
    return found


def _orthogonality() -> dict[PrintedKey, Printed]:
    return {
        ("orthogonality", "resnet18", skew, method): Printed(number, "the paper, tab:Exp_or")
        for method, numbers in _rows(_ORTHOGONALITY).items()
        for skew, number in zip(SINGLE_SKEWS, numbers, strict=True)
    }


def _niid_bench() -> dict[PrintedKey, Printed]:
    found: dict[PrintedKey, Printed] = {}
    for skew, (fedavg, fedprox, scaffold, fednova) in _rows(_NIID_BENCH).items():
        sure = skew not in _UNVERIFIED
        source, note = ("NIID-Bench README", "") if sure else ("NIID-Bench, its article", "not verified")
        numbers = {
            "fedavg": fedavg, "fedprox": fedprox, "scaffold": scaffold, "scaffold-niid-bench": scaffold,
            "fednova": fednova,
        }  # fmt: skip
        for method, number in numbers.items():
            text = f"{float(number) / 100:.3f}"
            found["niid-bench", "simple-cnn", skew, method] = Printed(text, source, note, sure)
    return found


COST_METRICS = ("mib", "seconds", "accuracy", "kappa", "rho")
PRINTED: Mapping[PrintedKey, Printed] = (
    _accuracy()
    | _cost()
    | _by_skew("mixed", _MIXED, "the paper, tab:Exp2")
    | _orthogonality()
    | _by_skew("noise", _NOISE, "the paper, tab:Exp_noise")
    | _niid_bench()
)
