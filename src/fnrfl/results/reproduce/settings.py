"""What a cell is made of: nets, skews, settings, methods and scales, each a name and the `key=value` that it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SCALES = {
    "tiny": "dataset=digits rounds=3 client.epochs=1 client.last_batch=run-on",
    "quick": "dataset=cifar10 rounds=10 client.epochs=2",
    "full": "dataset=cifar10 rounds=10 client.epochs=10",
}
RECIPE = {"tiny": "digits", "quick": "label-skew", "full": "label-skew"}
REFINE_EPOCHS = {"tiny": 1, "quick": 1, "full": 5}  # of FNR, and of a control that trains on public data

# A net as the honest protocol, the paper's protocol and the digits have it.
NETS = {
    "resnet18": ("resnet18", "resnet18(head=1000)", "mlp(norm=batch)"),
    "resnet50": ("resnet50", "resnet50(head=1000)", "mlp(norm=batch)"),
    "vgg11": ("vgg11", "vgg11", "mlp"),
    "simple-cnn": ("simple-cnn", "simple-cnn", "mlp"),
}

# The draws are those of NIID-Bench, which the paper's code uses, under every protocol: so the data is the same.
SKEWS = {
    "iid": "niid(iid)",
    "feature-0.1": "niid(iid)+feature-noise(0.1)",
    "feature-0.5": "niid(iid)+feature-noise(0.5)",
    "label": "niid(label-dirichlet(0.5))",
    "quantity": "niid(quantity-dirichlet(0.5))",
    "label+feature-0.1": "niid(label-dirichlet(0.5))+feature-noise(0.1)",
    "label+feature-0.5": "niid(label-dirichlet(0.5))+feature-noise(0.5)",
    "label+quantity": "niid-mixed(0.5)",
    "classes-1": "niid(label-classes(1))",
    "classes-2": "niid(label-classes(2))",
    "classes-3": "niid(label-classes(3))",
}


@dataclass(frozen=True)
class TrialSetting:
    """How everybody in a column trains and is judged: a protocol, and the keys that differ from its defaults."""

    protocol: str
    meaning: str
    keys: str = ""
    full: str = ""  # keys at full scale alone
    tuned: Mapping[tuple[str, str], str] = field(default_factory=dict)  # (skew, method) -> keys chosen for it


_NIID_BENCH = "client.last_batch=keep public.size=0 validation.size=0"
_NIID_TUNED = {("label", "fedprox"): "algorithm.mu=0.001"}  # NIID-Bench's choice; 0.01 elsewhere
_NIID_SCAFFOLD = "algorithm.correction=after-momentum algorithm.weights=niid-bench"
TRIAL_SETTINGS = {
    "honest": TrialSetting("honest", "public data is apart from the test set, which only scores"),
    "paper": TrialSetting("paper", "the released code's settings and leaks", "protocol=paper"),
    "paper-rate-0.1": TrialSetting("paper", "the same at the printed learning rate", "protocol=paper client.lr=0.1"),
    "paper-2-clients": TrialSetting("paper", "the same with two clients", "protocol=paper clients=2"),
    "niid-bench": TrialSetting(
        "honest", "NIID-Bench's settings, pixels from 0 to 1", _NIID_BENCH, "rounds=50", _NIID_TUNED
    ),
    "niid-bench-standard": TrialSetting(
        "honest", "the same with standardised pixels", f"{_NIID_BENCH} dataset.scale=standard", "rounds=50", _NIID_TUNED
    ),
}

SIX = ("fedavg+fnr", "fedavg", "fedprox", "scaffold", "moon", "fednova")  # methods that most tables of the paper have
OTHERS = ("feddyn", "fedftg", "feddf", "feddc", "fedgen")
SINGLE_SKEWS = ("feature-0.5", "label", "quantity")

# A method's name is one of these, perhaps with one of AROUND after a plus: "scaffold+fnr". {refine}: REFINE_EPOCHS.
METHODS = {
    "fedavg": "algorithm=fedavg",
    "fedprox": "algorithm=fedprox algorithm.mu=0.01",
    "scaffold": "algorithm=scaffold",
    "scaffold-niid-bench": f"algorithm=scaffold {_NIID_SCAFFOLD}",
    "moon": "algorithm=moon",
    "fednova": "algorithm=fednova",
    "feddyn": "algorithm=feddyn",
    "fedftg": "algorithm=fedftg",
    "feddf": "algorithm=feddf algorithm.batchnorm=updating",  # named, since it was not always the default
    "feddc": "algorithm=feddc",
    "fedgen": "algorithm=fedgen",
    "public-returned": "algorithm=public-returned",
    "public-finetune": "algorithm=public-finetune algorithm.epochs={refine}",
    "public-share": "algorithm=public-share",
    "public-only": "algorithm=public-only algorithm.epochs={refine}",
}
AS_RELEASED = {  # what the released code does in another way, and its protocol here too
    "scaffold": _NIID_SCAFFOLD,
    "moon": "algorithm.mu=0.01",
}
_EQUAL_TESTS = "leaks.clean_test_for_fnr=false"
_NO_LEAK = "leaks.public_is_test=false leaks.norm_pass_train_mode=false leaks.constant_penalty=false"
AROUND = {
    "fnr": "fnr=on fnr.epochs={refine}",
    "weight-0": "fnr.weight=0 fnr.epochs={refine}",
    "no-leak": f"public.size=0 {_NO_LEAK} {_EQUAL_TESTS}",
    "batchnorm-leak": f"fnr.epochs=0 {_EQUAL_TESTS}",  # the norm pass in train mode, and no step on the test set
    "label-leak": f"fnr.epochs={{refine}} leaks.norm_pass_train_mode=false {_EQUAL_TESTS}",
    "both-leaks": f"fnr.epochs={{refine}} {_EQUAL_TESTS}",
    "both-leaks-weight-0": f"fnr.epochs={{refine}} fnr.weight=0 engine.deterministic=true {_EQUAL_TESTS}",
    "both-leaks-weight-1": f"fnr.epochs={{refine}} fnr.weight=1 engine.deterministic=true {_EQUAL_TESTS}",
}
