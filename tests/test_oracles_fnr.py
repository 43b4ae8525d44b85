"""Card 0b, FNR: the paper's three algorithms against plain loops, the penalties against their printed gradients, and
the rules G1 to G8 of composing refinement with any method."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fnrfl.algorithms.cfedfn import CFedFN
from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fednova import FedNova
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.algorithms.fnr import FNR, Refining, _with_models
from fnrfl.algorithms.moon import Moon
from fnrfl.algorithms.parts.norms import (
    Accuracy,
    ClassNorms,
    Recall,
    feature_norms,
    norm_differences,
    norm_targets,
    num_refined,
    weakest,
)
from fnrfl.algorithms.parts.penalties import (
    PENALTIES,
    Penalised,
    _live,
    absolute,
    constant,
    huber,
    literal,
    log_ratio,
    per_sample,
    relative,
    squared,
)
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.config import load
from fnrfl.core.algorithm import Algorithm, Objective, class_indicator
from fnrfl.core.engine import Probe
from fnrfl.core.errors import ClientError, ConfigError
from fnrfl.core.rng import generator
from fnrfl.core.step import local_step
from fnrfl.core.types import Batch, LocalTask, Out, Replies, Training
from fnrfl.data import batches
from fnrfl.data.batches import Pool, plan
from fnrfl.engines.runner import Probing
from fnrfl.runs.setup.method import build_algorithm
from mutants import mutants
from toys import (
    NUM_CLASSES,
    NUM_FEATURES,
    Mlp,
    Run,
    World,
    assert_near,
    assert_same,
    classification,
    distance,
    named,
)

INNERS: list[Algorithm] = [
    FedAvg(),
    FedProx(mu=0.1),
    Scaffold(),
    Scaffold(variates="I", weights="uniform", server_lr=0.5),
    Moon(mu=2.0),
    FedNova(),
]
EVERY_INNER = pytest.mark.parametrize("inner", INNERS, ids=named)
TARGETS = pytest.mark.parametrize("target", ["others", "all"])


def hidden(module: nn.Module, x: Tensor) -> Tensor:
    """The features of the toy net in eval mode, by hand."""
    assert isinstance(module, Mlp)
    features: Tensor = module.norm(module.hidden(x)).relu()
    return features


def without_class(world: World, missing: int) -> World:
    """The world whose public data lack a class."""
    x, y = world.pool.take("public", torch.arange(55))
    parts = {k: world.pool.take(k, torch.arange(n)) for k, n in (("private", 305), ("ranking", 40))}
    parts["public"] = x[y != missing], y[y != missing]
    return replace(world, pool=Pool(parts, world.pool.shards, world.pool.num_classes, dtype=torch.float64))


# -- Algorithm 1 ------------------------------------------------------------------------------------------------------


def plain_norms(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Algorithm 1, one example after another."""
    found = []
    for k in range(4):
        lengths = []
        for example, label in zip(x, y, strict=True):
            if int(label) == k:
                lengths.append(float(hidden(module, example[None]).detach().norm()))
        found.append(sum(lengths) / len(lengths) if lengths else 0.0)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("missing", [None, 3])
def test_algorithm_1_is_a_loop_over_examples(missing: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In eval mode, summed over ragged batches; 0 for a class that is not there."""
    monkeypatch.setattr(batches, "forward_batch", lambda device: 7)
    world = classification() if missing is None else without_class(classification(), missing)
    played = Run(FedAvg(), world=world)
    cohort = torch.tensor([1, 4])
    held = played.engine.train(cohort, LocalTask(Objective(), "local", played.state, hold_model=True))
    norms = played.engine.measure(cohort, ClassNorms(4))["norms"]
    accuracy = played.engine.measure(cohort, Accuracy(), data="ranking")["accuracy"]
    x, y = (
        torch.cat(parts)
        for parts in zip(*((b.x, b.y) for b in world.pool.probe_batches(0, "public", _none)), strict=True)
    )
    rx, ry = world.pool.take("ranking", torch.arange(40))
    for m in range(2):
        module = played.net.export(held.params[m], {k: v[m] for k, v in held.buffers.items()})
        assert distance(norms[m], plain_norms(module, x, y)) < 1e-10
        right = sum(int(module(rx[i : i + 1]).argmax()) == int(ry[i]) for i in range(40))
        assert float(accuracy[m]) == pytest.approx(right / 40)
    assert (norms[:, 3] == 0).all() == (missing == 3)


def _none(name: str) -> torch.Generator:
    raise AssertionError(f"nothing random is needed, but {name} was asked for")


# -- Selection and Algorithm 2 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accuracy", "share", "rows"),
    [
        ([0.5, 0.1, 0.4, 0.2], 0.5, [1, 3]),
        ([0.5, 0.1, 0.4, 0.2, 0.3], 0.5, [1, 3]),  # floor(2.5)
        ([0.3, 0.2, 0.2, 0.2], 0.5, [1, 2]),  # ties to the lower row
        ([0.3, 0.3, 0.3], 0.99, [0, 1]),
        ([0.3, 0.1], 0.0, []),
        ([0.3, 0.1], 0.49, []),
        ([0.3, 0.1, 0.2], 1.0, [0, 1, 2]),
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0], 0.7, [3, 4, 5, 6, 7, 8, 9]),  # 0.7 * 10 is 6.999...
        ([0.0], 0.5, []),
    ],
)
def test_weakest_are_the_floor_of_the_share(accuracy: list[float], share: float, rows: list[int]) -> None:
    assert weakest(torch.tensor(accuracy), share).tolist() == rows


@TARGETS
def test_algorithm_2_is_a_loop_over_peers(target: str) -> None:
    """Delta_j = sum over the peers m of F_m - F_j: the unrefined in the paper, everybody else in its code."""
    norms = torch.rand(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    refined = [1, 3, 4]
    got = norm_differences(norms, torch.tensor(refined), target)
    means = norm_targets(norms, torch.tensor(refined), target)
    for r, j in enumerate(refined):
        peers = [m for m in range(5) if m not in refined] if target == "others" else [m for m in range(5) if m != j]
        for k in range(3):
            assert float(got[r, k]) == pytest.approx(sum(float(norms[m, k] - norms[j, k]) for m in peers), abs=1e-12)
            assert float(means[r, k]) == pytest.approx(sum(float(norms[m, k]) for m in peers) / len(peers), abs=1e-12)


@TARGETS
def test_targets_are_means_over_the_rows_that_have_a_class(target: str) -> None:
    """A row without examples of a class has norm 0 there, and is left out of that class's mean."""
    draw = torch.Generator().manual_seed(0)
    norms = torch.rand(6, 40, generator=draw, dtype=torch.float64) + 0.5
    norms *= torch.rand(6, 40, generator=draw) < 0.4
    refined = [1, 3, 4]
    for r, got in enumerate(norm_targets(norms, torch.tensor(refined), target)):
        others = [m for m in range(6) if (m not in refined if target == "others" else m != refined[r])]
        for k in range(40):
            there = [float(norms[m, k]) for m in others if norms[m, k] > 0]
            assert float(got[k]) == pytest.approx(sum(there) / len(there) if there else 0.0, abs=1e-12)


@pytest.mark.parametrize("missing", [None, 1])
def test_recall_is_the_mean_over_the_classes_that_the_data_has(missing: int | None) -> None:
    """What the released code ranks by. It divides by ten whatever there is, which does not change the order."""
    y = torch.tensor([0, 0, 0, 0, 0, 0, 2, 2, 3] + [1] * (missing is None))
    said = torch.tensor([0, 0, 0, 0, 0, 1, 3, 2, 0] + [1] * (missing is None))
    logits = class_indicator(said, 4).double()
    total: dict[str, Tensor] = {}
    for rows in torch.arange(len(y)).split(4):  # sums over ragged batches
        part = Recall(4)(Out(logits[rows], logits[rows], logits[rows]), Batch(logits[rows], y[rows], rows))
        total = {k: total[k] + v if k in total else v for k, v in part.items()}
    classes = [k for k in range(4) if k != missing]
    want = sum(float((said[y == k] == k).double().mean()) for k in classes) / len(classes)
    assert float(Recall(4).finish(total)["accuracy"]) == pytest.approx(want, abs=1e-15)
    assert want != pytest.approx(float((said == y).double().mean()), abs=0.01)


def test_recall_and_accuracy_refine_others_where_classes_are_unequal() -> None:
    """Ranking data with one frequent class: who is good at that class alone is weak by recall."""
    world = classification()
    x, y = world.pool.take("ranking", torch.arange(40))
    often = torch.cat([torch.arange(40)] + [torch.where(y == 0)[0]] * 6)
    parts = {k: world.pool.take(k, torch.arange(n)) for k, n in (("private", 305), ("public", 55))}
    pool = Pool(parts | {"ranking": (x[often], y[often])}, world.pool.shards, NUM_CLASSES, dtype=torch.float64)
    world = replace(world, pool=pool)
    differs = 0
    for seed in range(4):
        bare = Run(FedAvg(), world=world, active=6, seed=seed)
        bare.round()
        private = bare.replies()
        refined = {}
        for ranking in ("accuracy", "recall"):
            played = Run(FNR(FedAvg(), ranking=ranking, epochs=1), world=world, active=6, seed=seed)
            played.round()
            refined[ranking] = played.engine.notes["refined"]
            scores = []
            for m in range(6):
                module = bare.net.export(private.params[m], {k: v[m] for k, v in private.buffers.items()})
                right = (module(x[often]).argmax(1) == y[often]).double()
                classes = torch.stack([right[y[often] == k].mean() for k in range(NUM_CLASSES)])
                scores.append(float(right.mean() if ranking == "accuracy" else classes.mean()))
            assert played.engine.notes["ranking"] == pytest.approx(scores, abs=1e-12)
            assert refined[ranking] == sorted(sorted(range(6), key=lambda m: (scores[m], m))[:3])
        differs += refined["accuracy"] != refined["recall"]
    assert differs


@pytest.mark.parametrize(("protocol", "ranking"), [("honest", "accuracy"), ("paper", "recall")])
def test_the_protocol_says_what_clients_are_ranked_by(protocol: str, ranking: str) -> None:
    made = build_algorithm(load("digits", [f"protocol={protocol}", "fnr=on"]))
    assert isinstance(made, FNR)
    assert made.ranking == ranking


# -- The penalties ----------------------------------------------------------------------------------------------------

Y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
Z = torch.randn(12, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * (1 + Y[:, None])
TARGET = torch.tensor([2.0, 4.0, 0.0, 30.0, 5.0], dtype=torch.float64)  # class 2 has no target, class 4 no example
PEERS = 3


def printed(name: str) -> tuple[float, Tensor]:
    """(J, dJ/dz) as printed in the table of penalties, class by class."""
    u = (Z.square().sum(1) + 1e-12).sqrt()
    J, gradient, B = 0.0, torch.zeros_like(Z), len(Y)
    for k in (0, 1, 3):
        mine = k == Y
        F, T, n = float(u[mine].mean()), float(TARGET[k]), int(mine.sum())
        gap = F - T
        value, slope = {
            "relative": ((F / T - 1) ** 2, 2 * (F / T - 1) / T),
            "squared": (gap**2, 2 * gap),
            "absolute": (abs(gap), gap / abs(gap)),
            "huber": (gap**2 / 2 if abs(gap) < 1 else abs(gap) - 0.5, max(-1.0, min(1.0, gap))),
            "log-ratio": (math.log(F / T) ** 2, 2 * math.log(F / T) / F),
            "literal": (PEERS * gap * F, PEERS * gap),
            "constant": (T, 0.0),  # it is handed Delta itself
            "per-sample": (float((u[mine] - T).square().mean()), 0.0),
        }[name]
        J += n / B * value
        outward = Z[mine] / u[mine, None]
        gradient[mine] = outward * slope / B
        if name == "per-sample":
            gradient[mine] = outward * 2 * (u[mine, None] - T) / B
    return J, gradient


def measured(name: str, z: Tensor = Z, y: Tensor = Y, target: Tensor = TARGET) -> tuple[float, Tensor]:
    """(J, dJ/dz) by autograd; a J without a graph has gradient zero."""
    z = z.clone().requires_grad_()
    J = PENALTIES[name](feature_norms(z), class_indicator(y, len(target)).to(z.dtype), target, PEERS)
    return J.item(), torch.autograd.grad(J, z)[0] if J.requires_grad else torch.zeros_like(z)


@pytest.mark.parametrize("name", PENALTIES)
def test_penalty_is_the_printed_formula(name: str) -> None:
    J, gradient = measured(name)
    want, slope = printed(name)
    assert pytest.approx(want, abs=1e-12, rel=1e-12) == J
    assert distance(gradient, slope) < 1e-12
    assert bool(gradient.abs().max() > 1e-3) == (name != "constant")


def test_huber_is_seen_on_both_sides() -> None:
    """Of the data of the test above: one gap within 1, one outside."""
    gaps = [abs(float(feature_norms(Z)[k == Y].mean() - TARGET[k])) for k in (0, 1, 3)]
    assert min(gaps) < 1 < max(gaps)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_class_without_target_or_example_has_no_effect(name: str) -> None:
    """No gradient on its examples, the same penalty wherever they are, and nothing that is not a number."""
    J, gradient = measured(name)
    assert (gradient[Y == 2] == 0).all()
    moved = Z.clone()
    moved[Y == 2] *= 100
    elsewhere = TARGET.clone()
    elsewhere[4] = 77.0
    assert measured(name, moved)[0] == J
    assert measured(name, target=elsewhere)[0] == J
    nothing = measured(name, target=torch.zeros(5, dtype=torch.float64))
    assert nothing[0] == 0
    assert (nothing[1] == 0).all()


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_features_of_zero_length_have_a_finite_gradient(name: str, dtype: torch.dtype) -> None:
    J, gradient = measured(name, torch.zeros(12, 5, dtype=dtype), target=TARGET.to(dtype))
    assert torch.tensor(J).isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", ["relative", "squared", "absolute", "huber", "per-sample", "log-ratio"])
def test_penalty_is_zero_at_agreement_and_positive_elsewhere(name: str) -> None:
    u, hot = torch.tensor([2.0, 2.0, 7.0]).double(), class_indicator(torch.tensor([0, 0, 1]), 2).double()
    assert float(PENALTIES[name](u, hot, torch.tensor([2.0, 7.0]).double(), PEERS)) == pytest.approx(0, abs=1e-20)
    for target in ([1.5, 7.0], [2.0, 9.0]):
        assert float(PENALTIES[name](u, hot, torch.tensor(target).double(), PEERS)) > 1e-3


def test_squared_is_the_pairwise_sum() -> None:
    """sum_m (F - F_m)^2 = |R| (F - mean)^2 + const: the server need send one mean, not all vectors."""
    peers = torch.rand(PEERS, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 9 + 1
    hot = class_indicator(Y, 5).double()
    rho, count = hot.mean(0), hot.sum(0).clamp(min=1)

    def pairwise(z: Tensor) -> Tensor:
        mean = feature_norms(z) @ hot / count
        return (rho * (mean - peers).square()).sum()

    def means(z: Tensor) -> Tensor:
        return PEERS * PENALTIES["squared"](feature_norms(z), hot, peers.mean(0), PEERS)

    z = Z.clone().requires_grad_()
    slopes = [torch.autograd.grad(f(z), z)[0] for f in (pairwise, means)]
    assert distance(*slopes) < 1e-12
    constants = [float(pairwise(s * Z) - means(s * Z)) for s in (1.0, 3.0)]
    assert constants[0] == pytest.approx(constants[1], abs=1e-9)
    assert constants[0] > 0.1


def test_per_sample_is_squared_plus_the_variance_within_classes() -> None:
    every = torch.tensor([2.0, 4.0, 3.0, 30.0, 5.0], dtype=torch.float64)
    u = feature_norms(Z)
    spread = sum(float((k == Y).double().mean() * u[k == Y].var(correction=0)) for k in range(4))
    gap = measured("per-sample", target=every)[0] - measured("squared", target=every)[0]
    assert gap == pytest.approx(spread, abs=1e-10)


# -- Algorithm 3: a whole round against plain torch -------------------------------------------------------------------


@TARGETS
@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_algorithm_3_is_plain_torch(target: str, weight: float) -> None:
    """Rank, take targets, fine-tune with torch.optim in eval mode on CE + lambda J, average by private examples."""
    fnr = FNR(FedAvg(), share=0.5, weight=weight, target=target, epochs=3, batch=16, lr=0.02, batchnorm="frozen")
    played, bare = Run(fnr, active=5), Run(FedAvg(), active=5)
    pool, training = played.world.pool, replace(played.world.training, epochs=3, batch=16)
    bare.round()
    private = bare.replies()
    modules = [played.net.export(private.params[m], {k: v[m] for k, v in private.buffers.items()}) for m in range(5)]
    x, y = pool.take("public", torch.arange(55))
    rx, ry = pool.take("ranking", torch.arange(40))
    norms = [plain_norms(module, x, y) for module in modules]
    accuracy = [float((module(rx).argmax(1) == ry).double().mean()) for module in modules]
    refined = sorted(sorted(range(5), key=lambda m: (accuracy[m], m))[:2])
    for m in refined:
        peers = [j for j in range(5) if j not in refined] if target == "others" else [j for j in range(5) if j != m]
        goal = torch.stack([norms[j] for j in peers]).mean(0)
        client = int(private.clients[m])
        optimiser = torch.optim.SGD(
            modules[m].parameters(), lr=0.02, momentum=training.momentum, weight_decay=training.weight_decay
        )
        for positions in plan(55, training, lambda name, c=client: generator(7, 0, c, "refine", name)).batches:
            loss = nn.functional.cross_entropy(modules[m](x[positions]), y[positions])
            lengths = hidden(modules[m], x[positions]).norm(dim=1)
            for k in y[positions].unique().tolist():
                mine = y[positions] == k
                loss = loss + weight * mine.double().mean() * (lengths[mine].mean() / goal[k] - 1) ** 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    sizes = torch.tensor([float(len(pool.shards[i])) for i in private.clients.tolist()], dtype=torch.float64)
    models = torch.stack([torch.cat([p.detach().flatten() for p in module.parameters()]) for module in modules])
    played.round()
    assert played.engine.notes["refined"] == private.clients[refined].tolist()
    assert (
        distance(played.state.params, (sizes / sizes.sum()) @ models) < 1e-9
    )  # features of length 0: 1e-12 under sqrt
    assert torch.equal(played.state.buffers["norm.running_var"], bare.state.buffers["norm.running_var"])


# -- What refinement changes, and what it does not --------------------------------------------------------------------


def handed_over(fnr: FNR, **options: object) -> tuple[Run, Replies, Replies]:
    """(the run, what private training gave, what the inner method is handed): one row for each client of the cohort."""
    played = Run(fnr, **options)
    task = LocalTask(Objective(), "local", played.state)
    private = played.engine.train(played.cohort(0), task)
    return played, private, Refining(played.metered, fnr, played.cohort(0), None).train(played.cohort(0), task)


@pytest.mark.parametrize("inner", [FedAvg(), FedNova()], ids=named)
@pytest.mark.parametrize("batchnorm", ["frozen", "batch", "updating"])
def test_refinement_changes_models_of_the_refined_alone(inner: Algorithm, batchnorm: str) -> None:
    """Buffers too if BatchNorm is updating; never counts, steps, travel, losses."""
    played, private, after = handed_over(FNR(inner, batchnorm=batchnorm))
    refined = played.engine.notes["refined"]
    assert len(refined) == 2
    for m, client in enumerate(private.clients.tolist()):
        assert torch.equal(private.params[m], after.params[m]) == (client not in refined)
        for k in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            moved = not torch.equal(private.buffers[k][m], after.buffers[k][m])
            assert moved == (client in refined and batchnorm == "updating")
    for name in ("clients", "examples", "steps", "travel", "loss"):
        assert torch.equal(getattr(private, name), getattr(after, name))
    if "uses-trained" in inner.needs:
        assert torch.equal(after.trained, private.trained)


def test_frozen_and_batch_statistics_train_differently() -> None:
    """batch stores no statistics, but steps by those of the batch."""
    frozen, batch = (handed_over(FNR(FedAvg(), batchnorm=b))[2] for b in ("frozen", "batch"))
    assert distance(frozen.params, batch.params) > 1e-4


@pytest.mark.parametrize("inner", [FedAvg(), FedNova()], ids=named)
def test_norm_pass_in_train_mode_overwrites_the_statistics_of_all(inner: Algorithm) -> None:
    """The leak of the paper's code: refined or not, everyone's BatchNorm has seen the public data, in their order."""
    played, private, after = handed_over(FNR(inner, norm_pass_train_mode=True, batchnorm="frozen"))
    x, _ = played.world.pool.take("public", torch.arange(55))
    training = Training(batch=32, epochs=1, shuffle=False)
    for m, client in enumerate(private.clients.tolist()):
        module = played.net.export(private.params[m], {k: v[m] for k, v in private.buffers.items()}).train()
        with torch.no_grad():
            for positions in plan(55, training, _none).batches:
                module(x[positions])
        for name, buffer in module.named_buffers():
            if name.startswith("norm."):
                assert distance(after.buffers[name][m], buffer) < 1e-12
        assert not torch.equal(after.buffers["norm.running_mean"][m], private.buffers["norm.running_mean"][m])
        assert torch.equal(private.params[m], after.params[m]) == (client not in played.engine.notes["refined"])
    if "uses-trained" in inner.needs:
        assert torch.equal(after.trained, private.trained)


@pytest.mark.parametrize("engine", ["loop", "batched", "batched-fast", "gpu", "gpu-fast"])
@pytest.mark.parametrize("dropout", [False, True])
def test_norms_of_the_train_mode_pass_are_those_of_its_batches(engine: str, dropout: bool) -> None:
    """Under the leak BatchNorm is that of each batch of the pass, as in the paper's code; else it is in eval mode."""
    world = classification(module=Mlp if dropout else NormedOnly)
    training = replace(world.training, last_batch="keep", batch=15)  # each example once
    fnr = FNR(FedAvg(), norm_pass_train_mode=True, batch=8)
    played, private, _ = handed_over(fnr, engine=engine, world=world, training=training)
    told = torch.tensor(played.engine.notes["norms"], dtype=torch.float64)
    x, y = played.world.pool.take("public", torch.arange(55))
    for m, client in enumerate(private.clients.tolist()):
        module = played.net.export(private.params[m], {k: v[m] for k, v in private.buffers.items()}).train()
        with torch.no_grad():
            features = torch.cat([hidden(module, part) for part in x.split(fnr.batch)])
            if dropout:
                uniform = torch.rand(55, 16, generator=generator(7, 0, client, "measure", "drop.uniform"))
                features = features * (uniform >= 0.2) / 0.8
            lengths = features.norm(dim=1)
            in_eval = hidden(module.eval(), x).norm(dim=1)
        for k in range(NUM_CLASSES):
            assert float(told[m, k]) == pytest.approx(float(lengths[y == k].mean()), abs=1e-10)
            assert abs(float(in_eval[y == k].mean()) - float(told[m, k])) > 1e-4


class NormedOnly(Mlp):
    """The toy net without dropout."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.hidden(x.flatten(1))).relu())
        return logits


class Deep(nn.Module):
    """BatchNorm in many layers, with ways around them, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU())
        layers = [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32)]
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(layers)) for _ in range(4))
        self.head = nn.Linear(32, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = (x + block(x)).relu()
        logits: Tensor = self.head(x)
        return logits


def test_refinement_at_the_clients_rate_stays_finite_in_a_deep_net_with_batchnorm() -> None:
    """Not so in eval mode, with or without the penalty, where nothing rescales what reaches a layer."""
    world = classification(torch.float32, module=Deep)
    world = replace(world, training=replace(world.training, lr=0.2, momentum=0.9))
    Run(FNR(FedAvg()), "batched", world=world).rounds(4)
    for weight in (0.0, 0.1):
        with pytest.raises(ClientError, match="stage refine"):
            Run(FNR(FedAvg(), weight=weight, batchnorm="frozen"), "batched", world=world).rounds(4)


def shares(inner: Algorithm, played: Run, clients: Tensor) -> Tensor:
    """Weights of the cohort, from private examples alone."""
    n = torch.tensor([float(len(played.world.pool.shards[i])) for i in clients.tolist()], dtype=torch.float64)
    return torch.ones_like(n) / len(n) if getattr(inner, "weights", "") == "uniform" else n / n.sum()


@EVERY_INNER
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_g1_g2_g3_estimates_are_private_and_refinement_is_added_by_private_shares(
    inner: Algorithm, engine: str
) -> None:
    """G1: variates, step counts and previous models are those of the bare run. G2: x+ = bare + sum_i p_i r_i, whatever
    the method does to displacements. G3: p_i counts private examples."""
    refined, bare = Run(FNR(inner), engine), Run(inner, engine)
    refined.round()
    bare.round()
    assert torch.equal(refined.replies().trained, bare.replies().trained)
    for client in range(6):
        one, other = refined.engine.memory.get(client), bare.engine.memory.get(client)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[k], other[k]) for k in one)
    assert refined.state.extra.keys() == bare.state.extra.keys()
    assert all(torch.equal(refined.state.extra[k], v) for k, v in bare.state.extra.items())
    private, after = refined.replies("local"), refined.replies("refine")
    rows = [private.clients.tolist().index(c) for c in after.clients.tolist()]
    added = shares(inner, refined, private.clients)[rows] @ (after.params - private.trained[rows])
    assert added.abs().max() > 1e-3
    assert distance(refined.state.params, bare.state.params + added) < 1e-12


@EVERY_INNER
@pytest.mark.parametrize("nothing", [{"share": 0.0}, {"epochs": 0}], ids=str)
def test_g7_refining_nobody_or_for_no_epoch_is_the_inner_method_bit_for_bit(
    inner: Algorithm, nothing: dict[str, float]
) -> None:
    """State and memories included, over several rounds."""
    wrapped, bare = Run(FNR(inner, **nothing)), Run(inner)
    for _ in range(3):
        assert_same(wrapped.round(), bare.round())
    assert wrapped.state.extra.keys() == bare.state.extra.keys()
    for client in range(6):
        one, other = wrapped.engine.memory.get(client), bare.engine.memory.get(client)
        assert all(torch.equal(one[k], other[k]) for k in other)


@pytest.mark.parametrize("nothing", [{"share": 0.0}, {"epochs": 0}, {"epochs": 0, "upload": "twice"}], ids=str)
def test_g7_holds_batched_and_in_chunks(nothing: dict[str, object]) -> None:
    options = {"engine": "batched", "clients_at_once": 3}
    wrapped, bare = Run(FNR(FedAvg(), **nothing), **options), Run(FedAvg(), **options)
    for _ in range(2):
        assert_same(wrapped.round(), bare.round())


@EVERY_INNER
def test_g7_a_vanishing_learning_rate_is_the_inner_method(inner: Algorithm) -> None:
    """Steps are taken, but nothing that the method counts or scales by may notice them; statistics would."""
    wrapped, bare = Run(FNR(inner, lr=1e-14, batchnorm="batch")), Run(inner)
    for _ in range(2):
        assert_near(wrapped.round(), bare.round(), atol=1e-11)
    assert (wrapped.replies("refine").steps > 0).all()


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("when", ["refine", "local"])
def test_g8_the_penalty_is_felt_unless_constant(penalty: str, when: str) -> None:
    """The paper's own penalty has no gradient: at any weight its models are those of weight 0, bit for bit."""
    played = [Run(FNR(FedAvg(), penalty=penalty, weight=w, when=when)) for w in (0.0, 0.5)]
    control, penalised = (p.rounds(1 if when == "refine" else 2) for p in played)
    if penalty == "constant":
        assert_same(control, penalised)
    else:
        assert distance(control.params, penalised.params) > 1e-7


# -- The round --------------------------------------------------------------------------------------------------------


@TARGETS
def test_targets_stay_fixed_within_a_round(target: str) -> None:
    """Clients refined one after another all aim at norms measured before any refinement."""
    played = Run(FNR(FedAvg(), target=target), active=6, clients_at_once=1)
    together = Run(FNR(FedAvg(), target=target), active=6)
    assert_near(played.round(), together.round())
    notes = played.engine.notes
    norms = torch.tensor(notes["norms"], dtype=torch.float64)
    refined = [played.cohort(0).tolist().index(c) for c in notes["refined"]]
    tasks = played.tasks("refine")
    assert [len(t.own["fnr.target"]) for t in tasks] == [1, 1, 1]
    want = norm_targets(norms, torch.tensor(refined), target)
    assert distance(torch.cat([t.own["fnr.target"] for t in tasks]), want) < 1e-12


@EVERY_INNER
def test_uploading_once_and_twice_give_the_same_model(inner: Algorithm) -> None:
    once, twice = Run(FNR(inner, upload="once")), Run(FNR(inner, upload="twice"))
    for _ in range(2):
        assert_same(once.round(), twice.round())


def test_uploading_twice_costs_the_models_of_the_refined() -> None:
    once, twice = Run(FNR(FedAvg(), upload="once")), Run(FNR(FedAvg(), upload="twice"))
    once.round()
    twice.round()
    model = 4 * (once.net.size + 2 * 16) + 8
    up = [sum(phase["up"] for phase in played.metered.bytes.values()) for played in (once, twice)]
    assert up == [4 * model + 4 * 4 * 5, 6 * model + 4 * 4 * 5]  # norms of four classes and an accuracy each
    assert [p.metered.bytes["refine"]["down"] for p in (once, twice)] == [2 * 4 * 4] * 2


def test_when_local_penalises_private_training_towards_the_last_norms() -> None:
    """The first round has no norms yet and is the inner method's; nobody is ever refined."""
    wrapped, bare = Run(FNR(FedAvg(), when="local", weight=0.5)), Run(FedAvg())
    everyone = torch.arange(6)
    assert_same(wrapped.round(everyone), bare.round(everyone))
    measured = torch.tensor(wrapped.engine.notes["norms"], dtype=torch.float64)
    assert distance(wrapped.state.extra["fnr.target"], measured.mean(0)) < 1e-12
    goal = wrapped.state.extra["fnr.target"]
    wrapped.round(everyone)
    bare.round(everyone)
    (task,) = wrapped.tasks("local")
    assert task.objective == Penalised(Objective(), "relative", 0.5, 1)
    assert torch.equal(task.shared["fnr.target"], goal)
    assert distance(wrapped.state.params, bare.state.params) > 1e-7
    assert not wrapped.tasks("refine")
    assert "refined" not in wrapped.engine.notes


@pytest.mark.parametrize("inner", [Scaffold(), Moon(mu=2.0), FedNova()], ids=named)
def test_when_local_reaches_the_objective_of_any_method(inner: Algorithm) -> None:
    """Corrections and memories of the inner objective go on underneath the penalty."""
    methods = (FNR(inner, when="local", weight=0.5), FNR(inner, when="local", weight=0.0), inner)
    wrapped, control, bare = (Run(method) for method in methods)
    for played in (wrapped, control, bare):
        played.rounds(2)
    assert_same(control.state, bare.state)
    assert distance(wrapped.state.params, bare.state.params) > 1e-7


def test_when_both_refines_and_penalises() -> None:
    both, refine = Run(FNR(FedAvg(), when="both")), Run(FNR(FedAvg()))
    assert_same(both.round(), refine.round())
    both.round()
    refine.round()
    assert isinstance(both.tasks("local")[0].objective, Penalised)
    assert both.tasks("refine")
    assert distance(both.state.params, refine.state.params) > 1e-9


def test_refinement_has_its_own_fresh_optimiser() -> None:
    """Kind and rate as told, else the client's at this round's learning rate."""
    played = Run(FNR(FedAvg()), lr_decay=0.5)
    played.rounds(2)
    training = played.tasks("refine")[0].training
    assert training == replace(played.world.training, lr=0.025, epochs=5, batch=32, batchnorm="updating")
    told = Run(FNR(FedAvg(), optimizer="adam", lr=0.003, epochs=2, batch=8), lr_decay=0.5)
    told.rounds(2)
    training = told.tasks("refine")[0].training
    assert training is not None
    assert (training.optimizer, training.lr, training.epochs, training.batch) == ("adam", 0.003, 2, 8)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_class_missing_from_public_data_does_no_harm(penalty: str) -> None:
    played = Run(FNR(FedAvg(), penalty=penalty, when="both"), world=without_class(classification(), 2))
    played.rounds(2)
    assert played.state.params.isfinite().all()
    assert all(norms[2] == 0 and norms[1] > 0 for norms in played.engine.notes["norms"])


@TARGETS
def test_the_printed_penalty_uses_the_norms_measured_beforehand(target: str) -> None:
    """Algorithm 3: Phi = L + lambda sum_l rho_l Delta_j[l], the same Delta_j in every step of the refinement."""
    weight = 0.7
    with_it, without = (
        Run(FNR(FedAvg(), penalty="constant", weight=w, target=target, epochs=2)) for w in (weight, 0.0)
    )
    assert_same(with_it.round(), without.round())
    norms = torch.tensor(with_it.engine.notes["norms"], dtype=torch.float64)
    cohort = with_it.cohort(0).tolist()
    rows = [cohort.index(c) for c in with_it.engine.notes["refined"]]
    _, y = with_it.world.pool.take("public", torch.arange(55))
    (task,) = with_it.tasks("refine")
    for r, j in enumerate(rows):
        peers = [m for m in range(4) if m not in rows] if target == "others" else [m for m in range(4) if m != j]
        delta = torch.stack([norms[m] - norms[j] for m in peers]).sum(0)
        assert distance(task.own["fnr.target"][r], delta) < 1e-12
        stream = lambda name, c=cohort[j]: generator(7, 0, c, "refine", name)  # noqa: E731
        batches = plan(55, task.training, stream).batches
        J = sum(float(delta[y[b]].mean()) for b in batches) / len(batches)
        more = with_it.replies("refine").loss[r] - without.replies("refine").loss[r]
        assert float(more) == pytest.approx(weight * J, abs=1e-12)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("clients", ["one of one", "a cluster of one"])
def test_without_others_there_is_no_target_and_every_penalty_is_zero(penalty: str, clients: str) -> None:
    """Refined all the same, as with weight 0, and the log says so."""

    def played(weight: float) -> Run:
        inner = FedAvg() if clients == "one of one" else CFedFN(clusters=6)
        run = Run(FNR(inner, share=1.0, target="all", penalty=penalty, weight=weight), active=6)
        run.rounds(1) if clients == "a cluster of one" else None
        run.round(torch.tensor([2]) if clients == "one of one" else torch.tensor([1, 4]))
        return run

    with_it, without = played(0.7), played(0.0)
    if clients == "one of one":
        assert_same(with_it.state, without.state)
        assert torch.equal(with_it.replies("refine").loss, without.replies("refine").loss)
    assert with_it.state.params.isfinite().all()
    assert with_it.engine.notes["refined_without_target"] == with_it.engine.notes["refined"] != []
    assert all((task.own["fnr.target"] == 0).all() for task in with_it.tasks("refine"))
    assert (with_it.replies("refine").steps > 0).all()


def test_everyone_can_be_refined_towards_all() -> None:
    played = Run(FNR(FedAvg(), share=1.0, target="all"))
    played.round()
    assert played.replies("refine").clients.tolist() == played.cohort(0).tolist()
    assert played.state.params.isfinite().all()


def test_a_cohort_in_another_order_is_refined_alike() -> None:
    """Rows and clients are not confused: the same clients are refined, towards the same norms."""
    there, back = Run(FNR(FedNova())), Run(FNR(FedNova()))
    there.round()
    back.round(back.cohort(0).flip(0))
    assert sorted(there.engine.notes["refined"]) == sorted(back.engine.notes["refined"])
    assert_near(there.state, back.state)


def test_the_log_has_one_ranking_for_each_client_of_the_cohort_in_its_order() -> None:
    clustered = Run(FNR(inner=CFedFN(clusters=2)), active=6)
    clustered.rounds(2)
    told, cohort = clustered.engine.notes, clustered.cohort(1).tolist()
    assert len(told["ranking"]) == len(told["norms"]) == len(cohort)
    assert all(told["ranking"][cohort.index(client)] is not None for client in told["refined"])
    lossy = Run(FNR(inner=FedAvg()), active=6, dropout=0.34)
    lossy.round()
    told, cohort = lossy.engine.notes, lossy.cohort(0).tolist()
    lost = [client for client, value in zip(cohort, told["ranking"], strict=True) if value is None]
    assert lost == told["dropped"] and len(lost) == 2


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(Probe.add, last_batch_alone=("total[k] + v if k in total else v", "v")),
    *mutants(
        Probing.shared_batches,
        everybody_has_one_mask=(
            "[draw(1, len(positions)) for draw in draws]",
            "[draws[0](1, len(positions))] * len(draws)",
        ),
    ),
    *mutants(local_step, gradient_for_nothing=("training.frozen >= net.shapes.keys()", "training.frozen")),
    *mutants(
        feature_norms,
        norm_not_squared=("features.square", "features.abs"),
    ),
    *mutants(
        ClassNorms.finish,
        class_sums_not_means=("total['sum'] / total['count'].clamp(min=1)", "total['sum']"),
    ),
    *mutants(
        Recall.finish,
        recall_over_absent_classes=("(count > 0).sum().clamp(min=1)", "len(count)"),
        recall_by_examples=("(right / count.clamp(min=1)).sum() / ...", "right.sum() / count.sum()"),
    ),
    *mutants(
        num_refined,
        refines_one_more=("math.floor(cohort * share + 1e-09)", "math.ceil(cohort * share + 1e-09)"),
    ),
    *mutants(
        weakest,
        refines_the_strongest=("accuracy.argsort", "(-accuracy).argsort"),
    ),
    *mutants(
        Refining.stream,
        early_upload_forgotten=(
            "fnr.upload == 'twice' or 'uses-trained' in fnr.inner.needs or (not refines)",
            "fnr.upload == 'twice' or not refines",
        ),
    ),
    *mutants(
        Refining._measure_norms,
        no_norm_pass=("self.fnr.norm_pass_train_mode", "False"),
    ),
    *mutants(
        Refining._refine_weakest,
        ranks_on_refinement_data=("data='ranking'", "data='public'"),
        constant_of_the_targets=("fnr.penalty == 'constant'", "False"),
    ),
    *mutants(
        norm_targets,
        target_of_the_refined=("~weak", "weak"),
        target_includes_itself=(
            "(norms.sum(0) - norms[refined]) / (has.sum(0) - has[refined]).clamp(min=1)",
            "norms.mean(0).expand(len(refined), -1)",
        ),
        absent_classes_count=("(len(peers) / counts).to(norms)", "1"),
        absent_classes_count_of_all=("(has.sum(0) - has[refined]).clamp(min=1)", "(len(norms) - 1)"),
        targets_swapped=("target == 'others'", "target != 'others'"),
    ),
    *mutants(
        norm_differences,
        difference_sign=(
            "norm_targets(norms, refined, target) - norms[refined]",
            "norms[refined] - norm_targets(norms, refined, target)",
        ),
        difference_peers=(
            "peers * (norm_targets(norms, refined, target) - norms[refined])",
            "norm_targets(norms, refined, target) - norms[refined]",
        ),
    ),
    *mutants(
        _live,
        rho_dropped=("torch.where(known, count, 0.0) / hot.sum()", "known.to(u.dtype)"),
        live_sum_not_mean=("u @ hot / count.clamp(min=1)", "u @ hot"),
        unknown_targets_count=("(target > 0) & (count > 0)", "count > 0"),
    ),
    *mutants(
        relative,
        relative_without_one=("mean / goal - 1", "mean / goal"),
        relative_upside_down=("mean / goal", "goal / mean"),
    ),
    *mutants(
        squared,
        squared_sum=("mean - goal", "mean + goal"),
    ),
    *mutants(
        absolute,
        absolute_signed=("(mean - goal).abs()", "mean - goal"),
    ),
    *mutants(
        huber,
        huber_offset=("gap - 0.5", "gap"),
        huber_half=("gap.square() / 2", "gap.square()"),
    ),
    *mutants(
        per_sample,
        per_sample_sum=("u - goal", "u + goal"),
    ),
    *mutants(
        log_ratio,
        log_ratio_sum=("mean.log() - goal.log()", "mean.log() + goal.log()"),
    ),
    *mutants(
        literal,
        literal_sign=("-(rho * peers * (goal - mean).detach())", "rho * peers * (goal - mean).detach()"),
        literal_gap_moves=("(goal - mean).detach()", "goal - mean"),
        literal_without_peers=("rho * peers", "rho"),
    ),
    *mutants(
        constant,
        constant_with_gradient=(
            "hot.sum(0) / hot.sum() @ target",
            "hot.sum(0) / hot.sum() @ (target - u @ hot + (u @ hot).detach())",
        ),
    ),
    *mutants(
        Penalised.loss,
        penalty_sign=("loss + ...", "loss - ..."),
        penalty_unweighted=("self.weight * ...", "..."),
        penalty_dropped=("loss + ...", "loss"),
        local_penalty_drops_inner_loss=("self.inner.loss", "Objective().loss"),
    ),
    *mutants(
        Penalised.correct,
        local_penalty_drops_correction=("self.inner.correct(grad, params, start, shared, own)", "grad"),
    ),
    *mutants(
        Penalised.finish,
        local_penalty_drops_finish=("self.inner.finish(start, end, travel, examples, shared, own)", "({}, {})"),
    ),
    *mutants(
        Refining._refinement,
        refines_on_private_data=("data='public'", "data='private'"),
    ),
    *mutants(
        _with_models,
        trained_is_the_refined=(
            "replace(chunk, refined=got.params[order], buffers=...)",
            "replace(chunk, refined=got.params[order], trained=got.params[order], buffers=...)",
        ),
        refined_model_not_used=("got.params[order]", "chunk.params"),
        refined_rows_mixed_up=("got.params[order]", "got.params"),
    ),
    *mutants(
        Refining._training,
        statistics_not_frozen=("fnr.batchnorm", "'updating'"),
        refinement_at_local_rate=("lr=fnr.lr", ""),
        refinement_epochs=("epochs=fnr.epochs", "epochs=1"),
    ),
    *mutants(
        FNR.round,
        local_targets_forgotten=("refining.norms.mean(0)", "0 * refining.norms.mean(0)"),
    ),
    *mutants(
        Accuracy.__call__,
        accuracy_inverted=("out.logits.argmax(-1) == batch.y", "out.logits.argmax(-1) != batch.y"),
    ),
]


def test_a_target_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match='it must be "others" or "all"'):
        norm_targets(torch.ones(3, 2), torch.tensor([0]), "other")  # type: ignore[arg-type]
