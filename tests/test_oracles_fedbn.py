"""Card 13, FedBN: what must come out, known without running a federation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fedbn import FedBN, OwnNorms
from fnrfl.algorithms.fnr import FNR
from fnrfl.core.net import Net
from fnrfl.core.rng import generator
from fnrfl.core.types import State, Training
from fnrfl.data.batches import Pool
from fnrfl.models.catalogue import build_model
from mutants import mutants
from toys import NUM_CLASSES, NUM_FEATURES, Plain, Run, World, assert_near, assert_same, classification, distance

ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])
STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


class Still(nn.Module):
    """BatchNorm without Dropout: clients that have the same examples do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(NUM_FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.hidden(x.flatten(1))).relu())
        return logits


class First(nn.Module):
    """BatchNorm before anything else: its statistics are those of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x.flatten(1)))
        return logits


class Unnamed(nn.Module):
    """BatchNorm layers whose names do not say so, as in the shortcuts of a ResNet, and a LayerNorm called bn."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16, affine=False))
        self.bn = nn.LayerNorm(16)
        self.more = nn.ModuleList([nn.BatchNorm1d(16)])
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.more[0](self.bn(self.shortcut(x.flatten(1)))).relu())
        return logits


def full_batches(world: World) -> Training:
    return replace(world.training, batch=1000, last_batch="keep")


def personal(run: Run, client: int) -> State:
    return run.algorithm.personal(run.net, run.state, client, run.engine.memory.get(client))


def same_data() -> World:
    """Six clients with the same fifty examples."""
    world = classification(module=Still)
    x, y = world.pool.take("private", torch.arange(50))
    pool = Pool({"private": (x, y)}, [torch.arange(50)] * 6, NUM_CLASSES, dtype=torch.float64)
    return replace(world, pool=pool, training=full_batches(world), active=6)


@ENGINES
def test_card13_without_batchnorm_it_is_fedavg_bit_for_bit(engine: str) -> None:
    world = classification(module=Plain)
    assert_same(Run(FedBN(), engine, world=world).rounds(4), Run(FedAvg(), engine, world=world).rounds(4))


@ENGINES
def test_card13_all_but_batchnorm_is_shared(engine: str) -> None:
    """After a round, models differ between clients in BatchNorm alone, and there they do."""
    played = Run(FedBN(), engine, active=6)
    played.rounds(2)
    mine = played.net.mask(played.net.batchnorm)
    first, second = personal(played, 0), personal(played, 5)
    assert torch.equal(first.params[~mine], second.params[~mine])
    assert torch.equal(first.params[~mine], played.state.params[~mine])
    assert distance(first.params[mine], second.params[mine]) > 1e-4
    assert distance(first.buffers["norm.running_mean"], second.buffers["norm.running_mean"]) > 1e-3


@ENGINES
def test_card13_alike_clients_are_fedavg(engine: str) -> None:
    """The same examples everywhere, full batches: everybody's layers are the average, which never travels."""
    personalised, bare = (Run(m, engine, world=same_data()) for m in (FedBN(), FedAvg()))
    for _ in range(4):
        assert_near(personalised.round(), bare.round())
        assert_near(personal(personalised, 3), State(bare.state.params, bare.state.buffers))


def test_card13_one_client_is_fedavg() -> None:
    """Dropout, ragged batches and all: its own layers are what the server would have sent."""
    alone, bare = Run(FedBN()), Run(FedAvg())
    for _ in range(4):
        assert_near(alone.round(torch.tensor([3])), bare.round(torch.tensor([3])))


def test_card13_every_round_begins_with_the_clients_own_layers() -> None:
    """By hand: x from the server, BatchNorm from the client's last participation, then ordinary training."""
    world = classification(module=Still)
    played = Run(FedBN(), world=replace(world, training=replace(full_batches(world), epochs=1, momentum=0.0)))
    own: dict[int, State] = {i: State(*played.net.flatten()) for i in range(6)}
    mine = played.net.mask(played.net.batchnorm)
    for t in range(4):
        x, cohort = played.state.params, played.cohort(t)
        played.round()
        replies = played.replies()
        for row, client in enumerate(cohort.tolist()):
            start = torch.where(mine, own[client].params, x)
            module = played.net.export(start, own[client].buffers).train()
            data, labels = world.pool.take("private", world.pool.shards[client])
            nn.functional.cross_entropy(module(data), labels).backward()  # type: ignore[no-untyped-call]
            gradient = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
            end = start - 0.05 * (gradient + 1e-3 * start)
            assert distance(replies.params[row], end) < 1e-12
            own[client] = State(end, {k: v.clone() for k, v in module.named_buffers()})
            assert_near(
                personal(played, client), State(torch.where(mine, end, played.state.params), own[client].buffers)
            )


def test_card13_layers_persist_while_a_client_is_away() -> None:
    played = Run(FedBN())
    played.round(torch.tensor([0, 1, 2]))
    kept = played.engine.memory.get(1)
    newcomer = personal(played, 5)
    played.round(torch.tensor([0, 2, 4]))
    now = played.engine.memory.get(1)
    assert all(torch.equal(kept[k], now[k]) for k in kept)
    assert played.engine.memory.get(0)["buffer.norm.num_batches_tracked"] > kept["buffer.norm.num_batches_tracked"]
    assert torch.equal(newcomer.buffers["norm.running_mean"], torch.zeros(16).double())  # it has seen nothing yet


def test_card13_nobody_starts_from_the_servers_batchnorm() -> None:
    """Whatever stands there, the round is the same: those entries are an average to look at."""
    sound, spoiled = Run(FedBN()), Run(FedBN())
    sound.round()
    spoiled.round()
    mine = spoiled.net.mask(spoiled.net.batchnorm)
    x = spoiled.state
    buffers = {k: torch.full_like(v, 7) for k, v in x.buffers.items()}
    spoiled.state = State(torch.where(mine, 7.0, x.params), buffers, x.extra)
    sound.round()
    spoiled.round()
    assert torch.equal(sound.state.params[~mine], spoiled.state.params[~mine])
    for client in range(6):
        assert_same(personal(sound, client), personal(spoiled, client))


@ENGINES
def test_card13_the_servers_batchnorm_is_the_cohorts_average(engine: str) -> None:
    played = Run(FedBN(), engine)
    played.rounds(3)
    cohort = played.cohort(2)
    p = played.engine.examples[cohort] / played.engine.examples[cohort].sum()
    mine = played.net.mask(played.net.batchnorm)
    models = [personal(played, client) for client in cohort.tolist()]
    assert distance(played.state.params[mine], p @ torch.stack([m.params[mine] for m in models])) < 1e-12
    for name in STATISTICS[:2]:
        assert distance(played.state.buffers[name], p @ torch.stack([m.buffers[name] for m in models])) < 1e-12


def test_card13_uniform_weights_are_the_authors() -> None:
    played = Run(FedBN(weights="uniform"))
    played.round()
    by_examples = Run(FedBN())
    by_examples.round()
    assert distance(played.state.params, played.replies().params.mean(0)) < 1e-12
    assert distance(played.state.params, by_examples.state.params) > 1e-4


@pytest.mark.parametrize("under_fnr", [False, True], ids=["bare", "fnr"])
def test_card13_what_crosses_is_the_model_less_its_batchnorm_layers(under_fnr: bool) -> None:
    """Counted by type: names would miss the shortcut's, and take the LayerNorm for one."""
    played = Run(FNR(FedBN(), share=0.5) if under_fnr else FedBN(), world=classification(module=Unnamed))
    bare = Run(FNR(FedAvg(), share=0.5) if under_fnr else FedAvg(), world=classification(module=Unnamed))
    played.round()
    bare.round()
    layers = [m for m in played.net.module.modules() if isinstance(m, nn.BatchNorm1d)]
    assert len(layers) == 2
    tensors = [t for m in layers for t in (*m.parameters(), *m.buffers())]
    own = sum(t.numel() * (4 if t.is_floating_point() else 8) for t in tensors)
    assert own == 4 * (2 * 16 + 2 * 2 * 16) + 8 * 2
    for way in ("down", "up"):
        mine, whole = (sum(count[way] for count in run.metered.bytes.values()) for run in (played, bare))
        assert whole - mine == 4 * own  # four clients


def test_card13_share_of_a_resnet() -> None:
    """19,220 of 11,183,582 numbers of ResNet-18 stay, those in the shortcuts included."""
    module = build_model("resnet18", (3, 32, 32), 10)
    net = Net(module, torch.zeros(2, 3, 8, 8))
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    assert sum(t.numel() for t in tensors.values()) == 11_183_582
    assert sum(tensors[name].numel() for name in net.batchnorm) == 19_220


def test_card13_clients_whose_inputs_differ_by_an_affine_map_keep_their_own_means() -> None:
    """BatchNorm first: after t steps on full batches a running mean is (1 - 0.9^t) times the client's own mean."""
    draw = generator(0, "affine")
    x = torch.randn(40, NUM_FEATURES, generator=draw, dtype=torch.float64)
    y = torch.randint(0, NUM_CLASSES, (40,), generator=draw)
    pool = Pool(
        {"private": (torch.cat([x, 3 * x + 5]), torch.cat([y, y]))}, torch.arange(80).split(40), NUM_CLASSES,
        dtype=torch.float64,
    )  # fmt: skip
    world = replace(classification(module=First), pool=pool, active=2)
    played = Run(FedBN(), world=world, training=replace(full_batches(world), epochs=2))
    played.rounds(3)
    for client, mean in enumerate((x.mean(0), 3 * x.mean(0) + 5)):
        held = personal(played, client).buffers["norm.running_mean"]
        assert distance(held, (1 - 0.9**6) * mean) < 1e-12
    assert (
        distance(personal(played, 0).buffers["norm.running_mean"], personal(played, 1).buffers["norm.running_mean"]) > 2
    )
    # Normalised, both see the same inputs: so their outputs agree where FedAvg's one set of statistics cannot.
    answers = [
        played.net.apply(m.params, m.buffers, inputs, mode="batch")[0].logits
        for m, inputs in ((personal(played, 0), x), (personal(played, 1), 3 * x + 5))
    ]
    assert distance(*answers) < 1e-3


# -- under FNR --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batchnorm", ["frozen", "batch", "updating"])
def test_card13_refinement_does_not_touch_the_layers(batchnorm: str) -> None:
    """Neither what clients remember nor the scales and shifts of a refined model, whatever `fnr.batchnorm` says."""
    bare, fnr = Run(FedBN()), Run(FNR(FedBN(), batchnorm=batchnorm))  # type: ignore[arg-type]
    bare.round()
    fnr.round()
    for client in range(6):
        mine, theirs = fnr.engine.memory.get(client), bare.engine.memory.get(client)
        assert all(torch.equal(mine[k], theirs[k]) for k in theirs)
    norms = fnr.net.mask(fnr.net.batchnorm)
    before, after = fnr.replies("local"), fnr.replies("refine")
    rows = [before.clients.tolist().index(client) for client in after.clients.tolist()]
    assert torch.equal(before.params[rows][:, norms], after.params[:, norms])
    assert distance(before.params[rows][:, ~norms], after.params[:, ~norms]) > 1e-3


def test_card13_a_client_uses_its_layers_with_the_refined_average() -> None:
    played = Run(FNR(FedBN()))
    played.rounds(2)
    assert played.algorithm.personalised
    own = played.engine.memory.get(0)
    assert torch.equal(personal(played, 0).params[own["places"]], own["norms"])


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [partial(nn.GroupNorm, 4), nn.LayerNorm])
def test_card13_other_normalisations_are_not_batchnorm(norm: type[nn.Module]) -> None:
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 16), norm(16), nn.Linear(16, NUM_CLASSES))
    assert not Net(module, torch.zeros(2, NUM_FEATURES)).batchnorm


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        OwnNorms.begin,
        layers_not_put_in=("start.params.index_copy(0, own['places'], own['norms'])", "start.params"),
        statistics_not_put_in=("start.buffers | trees.under('buffer', own)", "start.buffers"),
    ),
    *mutants(
        OwnNorms.finish,
        layers_not_remembered=("{'norms': end.params[own['places']]} | buffers", "buffers"),
        statistics_not_remembered=(
            "{'norms': end.params[own['places']]} | buffers",
            "{'norms': end.params[own['places']]}",
        ),
        layers_of_the_start_remembered=("end.params[own['places']]", "start.params[own['places']]"),
    ),
    *mutants(
        FedBN.round,
        layers_travel=("engine.net.batchnorm", "frozenset()"),
        sign=("state.params + got.mean['moved']", "state.params - got.mean['moved']"),
        refinement_forgotten=("r.params - state.params", "r.trained - state.params"),
        always_uniform=("self.weights == 'uniform'", "True"),
        never_uniform=("self.weights == 'uniform'", "False"),
    ),
    *mutants(
        FedBN.personal,
        everybody_uses_the_average=("OwnNorms().begin(state, memory)", "state"),
    ),
]
