"""`protocol = "paper"`: the settings of the released code, its leaks included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from fnrfl.config.keys import Key
from fnrfl.config.schema import LeakOptions
from fnrfl.config.typed import FlatValues

# What protocol = "paper" takes as defaults: the settings of the released code, as its documentation runs it.
PAPER: FlatValues = {
    "rounds": 10,
    "clients": 10,
    "participation": 1.0,
    "dataset.name": "cifar10",
    "dataset.scale": "none",
    "scenario": "niid(label-dirichlet(0.5))",
    "model.name": "resnet18(head=1000)",
    "client.optimizer": "sgd",
    "client.lr": 0.01,
    "client.momentum": 0.9,
    "client.weight_decay": 1e-5,
    "client.batch": 64,
    "client.epochs": 10,
    "client.last_batch": "keep",
    "fnr.share": 0.5,
    "fnr.weight": 0.5,
    "fnr.penalty": "constant",
    "fnr.target": "all",
    "fnr.epochs": 5,
    "fnr.batch": 32,
    "fnr.batchnorm": "updating",
    "public.source": "test",
    "public.ranking": 0.0,
    "validation.size": 0,
    **{f"leaks.{leak.name}": True for leak in fields(LeakOptions)},
}
# A leak that another key also expresses: the two must say the same.
TWINS = (("leaks.public_is_test", "public.source", "test"), ("leaks.constant_penalty", "fnr.penalty", "constant"))


def default_values(given: FlatValues, known: Mapping[str, Key]) -> FlatValues:
    """The value of each key that is not given, as the protocol has it. A leak follows its twin if that is given."""
    values = {name: key.default for name, key in known.items()}
    if given.get("protocol") != "paper":
        return values
    values |= PAPER
    for leak, twin, leaking in TWINS:
        if twin in given:
            values[leak] = given[twin] == leaking
        elif given.get(leak) is False:
            values[twin] = known[twin].default
    return values
