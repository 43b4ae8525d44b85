"""Three sites in one process, behind a network that carries only bytes, and the same recipe in the simulator."""

import random
from functools import partial
from pathlib import Path

import torch

from fnrfl.config import load
from fnrfl.federation.handshake import handshake
from fnrfl.federation.node_config import NodeConfig
from fnrfl.federation.node_service import NodeService
from fnrfl.federation.remote_clients import Network
from fnrfl.runs.run import run


def write_table(path, rng, rows, columns):
    """A table of patients; the columns may stand in any order."""
    patients = [(rng.gauss(60, 9), rng.choice(["north", "south"])) for _ in range(rows)]
    cells = [{"age": f"{age:.4f}", "ward": ward, "ill": "yes" if age > 60 else "no"} for age, ward in patients]
    lines = [",".join(columns), *(",".join(row[name] for name in columns) for row in cells)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


rng = random.Random(0)
write_table(Path("sites/Aachen.csv"), rng, 60, ("age", "ward", "ill"))
write_table(Path("sites/Bergen.csv"), rng, 80, ("ward", "ill", "age"))
write_table(Path("sites/Delft.csv"), rng, 50, ("ill", "age", "ward"))
write_table(Path("public.csv"), rng, 40, ("age", "ward", "ill"))
write_table(Path("test.csv"), rng, 40, ("age", "ward", "ill"))

recipe = [
    "dataset=sites",
    "dataset.label=ill",
    "scenario=natural",
    "model=mlp",
    "public.source=public.csv",
    "fnr=on",
    "validation.size=0",
    "rounds=2",
    "client.epochs=1",
    "engine.threads=1",
    "engine.accelerate=false",
]
config = load(None, [*recipe, "engine=flower"])  # the engine whose clients are on a network
names = ["Delft", "Aachen", "Bergen"]


def node_config(name):
    """What a node knows on its own machine: no message of the server can change it."""
    return NodeConfig(data=f"sites/{name}.csv", name=name, public="public.csv")


nodes = [NodeService(partial(node_config, name), Path("nodes") / name) for name in names]


class Carrier(Network):
    """A network: it brings each node its message, and the server the reply."""

    def exchange(self, messages, seconds):
        for number, message in messages.items():
            yield number, nodes[number].answer(message)


# Before the first round the server asks about the data, and all agree.
agreed = handshake(config, Carrier(), names, test="test.csv")
print(agreed.agreement.sites, agreed.agreement.sizes, agreed.agreement.schema.columns.encoded)
there = run(config, out=None, network=agreed.network, parts=agreed.parts)
here = run(load(None, [*recipe, "engine=loop"]), out=None)
assert all(torch.equal(here.weights[name], there.weights[name]) for name in here.weights)
print(f"on the server's own test set: {there.accuracy:.2f}")
