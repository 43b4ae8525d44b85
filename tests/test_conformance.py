"""What every method must satisfy, on every engine, bare and under FNR; a new method gets all of it for free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.penalties import PENALTIES
from fnrfl.config import registry
from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.errors import ClientError
from fnrfl.core.types import Decorator, LocalTask, Replies, State
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.rundir import checkpoint
from toys import NUM_CLASSES, NUM_FEATURES, Run, assert_near, assert_same, classification, distance

METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in registry.algorithms()},
    "fedprox-strong": {"mu": 1.0},
    "scaffold-I": {"variates": "I"},
    "scaffold-after": {"correction": "after-momentum"},
    "scaffold-uniform": {"weights": "uniform", "server_lr": 0.7},
    "moon-head": {"head": 8, "mu": 0.5},
    "feddyn-uniform": {"weights": "uniform", "alpha": 0.1},
    "fedavgm-scaffold": {"inner": "scaffold"},
    "fedadam-corrected": {"v0": "zero", "correction": True, "inner": "fednova"},
    "fedbn-uniform": {"weights": "uniform"},
    "feddf-probs": {"teachers": "probs", "weights": "uniform", "batchnorm": "updating", "steps": 20},
    "fedgen-latent": {"a": 2.0, "b": 1.0},
    "fedftg-l1": {"disagreement": "l1", "batchnorm": "updating"},
    "cfedfn-features": {"descriptor": "features", "cut": "gap", "clusters": 3},
    "ktpfl-released": {"coefficients": "mse", "batchnorm": "updating"},
    "ktpfl-weights": {"exchange": "weights", "lam": 0.5, "rho": 0.01},
}
NEUTRAL: dict[str, dict[str, Any]] = {  # settings at which a method must be FedAvg, bit for bit
    "fedprox": {"mu": 0.0},
    "moon": {"mu": 0.0},
    "fedavgm": {"beta": 0.0, "server_lr": 1.0, "refinement": "inside"},
    "fedgen": {"a": 0.0, "b": 0.0},
    "fedftg": {"iterations": 0},
    "feddf": {"steps": 0},
    "cfedfn": {"clusters": 1},
    "public-finetune": {"epochs": 0},
    "public-share": {},
    "public-returned": {},
}
ENGINES = ("loop", "batched", "loop-fast", "batched-fast")  # fast: with every accelerator


def method(label: str, **changes: Any) -> Algorithm:
    name = max((known for known in registry.algorithms() if f"{label}-".startswith(f"{known}-")), key=len)
    return registry.load(name)(**{**METHODS[label], **changes})


def algorithm(label: str, refined: bool) -> Algorithm:
    return FNR(method(label)) if refined else method(label)


@cache
def played(label: str, engine: str = "loop", rounds: int = 5, fnr: tuple[tuple[str, Any], ...] | None = None) -> Run:
    """A run that several checks look at."""
    inner = method(label)
    run = Run(inner if fnr is None else FNR(inner, **dict(fnr)), engine)
    run.rounds(rounds)
    return run


def refined(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(options.items()))


def models(run: Run) -> list[State]:
    """What the method is about: the server's model, or every client's own."""
    if not run.algorithm.personalised:
        return [run.state]
    mine = enumerate(memories(run))
    return [run.algorithm.personal(run.net, run.state, client, memory) for client, memory in mine]


def weights(run: Run) -> Tensor:
    return torch.stack([model.params for model in models(run)])


def memories(run: Run) -> list[dict[str, Tensor]]:
    return [run.engine.memory.get(client) for client in range(len(run.world.pool.shards))]


# Variants of a method, and what differs from FedAvg in data alone, are checked by `make test-all`.
OFTEN = {*registry.algorithms()} - {"public-share", "public-returned", "fedyogi", "fedadagrad"}
WITHOUT_CLIENTS = {label for label in METHODS if not method(label).trains_clients}  # controls: there is nobody to ask


def labels(*left_out: str) -> list[Any]:
    return [
        label if label in OFTEN else pytest.param(label, marks=pytest.mark.slow)
        for label in METHODS
        if label not in left_out
    ]


each_method = pytest.mark.parametrize("label", labels())
each_federated = pytest.mark.parametrize("label", labels(*WITHOUT_CLIENTS))
slowly = lambda *engines: [pytest.param(engine, marks=pytest.mark.slow) for engine in engines]  # noqa: E731
CHILDREN = "children"  # clients in child processes, with nothing shared but messages: as on a network
each_engine = pytest.mark.parametrize("engine", ["loop", "batched", *slowly("loop-fast", "batched-fast", CHILDREN)])
in_this_process = pytest.mark.parametrize("engine", ["loop", "batched", *slowly("loop-fast", "batched-fast")])
each_other = pytest.mark.parametrize("engine", ["batched", "batched-fast", CHILDREN, *slowly("loop-fast")])
as_a_run_does = pytest.mark.parametrize("engine", ["loop", "batched-fast", *slowly("batched", "loop-fast", CHILDREN)])
bare_and_refined = pytest.mark.parametrize("fnr", [None, refined()], ids=["bare", "fnr"])


# -- engines agree ----------------------------------------------------------------------------------------------------


@each_method
@each_other
@bare_and_refined
def test_engines_equal_loop(label: str, engine: str, fnr: Any) -> None:
    """Float64, BatchNorm, Dropout, ragged clients, four of six active, five rounds; client memory included."""
    loop, other = played(label, "loop", fnr=fnr), played(label, engine, fnr=fnr)
    assert_near(loop.state, other.state, atol=1e-9)
    for mine, theirs in zip(memories(loop), memories(other), strict=True):
        assert all(distance(mine[k], theirs[k]) <= 1e-9 for k in mine)


class Pictures(nn.Module):
    """The toy examples as pictures of 3 by 4 pixels, for a convolution with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.conv(x.view(-1, 1, 3, 4))).relu().flatten(1))
        return logits


@each_method
@pytest.mark.parametrize("engine", ["batched", "loop-fast"])
@pytest.mark.parametrize("under_fnr", [False, True], ids=["bare", "fnr"])
def test_engines_equal_loop_on_convolutions(label: str, engine: str, under_fnr: bool) -> None:
    """As a run would use them: the convolutions of fast engines are channels-last and not recorded."""
    world = classification(module=Pictures)
    plain = Run(algorithm(label, under_fnr), world=world)
    other = Run(algorithm(label, under_fnr), engine, world=world, record=False)
    plain.rounds(5)
    other.rounds(5)
    assert plain.state.buffers.keys() == other.state.buffers.keys()
    for run in (plain, other):
        run.named = run.net.unflatten(run.state.params) | run.state.buffers
    assert all(distance(plain.named[k], other.named[k]) <= 1e-9 for k in plain.named)


@each_federated
@pytest.mark.parametrize("under_fnr", [False, True], ids=["bare", "fnr"])
def test_engines_equal_loop_in_single_precision_after_four_steps(label: str, under_fnr: bool) -> None:
    world = classification(torch.float32)
    four = replace(world.training, epochs=4, batch=97, last_batch="keep")
    runs = [Run(algorithm(label, under_fnr), engine, world=world, training=four) for engine in ENGINES[:2]]
    for run in runs:
        run.round()
    one, other = (run.replies() for run in runs)
    assert set(one.steps.tolist()) == {4}
    assert one.trained.dtype == torch.float32
    assert distance(one.trained, other.trained) <= 1e-4


@each_method
@each_engine
@pytest.mark.parametrize("policy", ["keep", *slowly("drop", "run-on")])
def test_engines_agree_on_every_last_batch(label: str, engine: str, policy: Any) -> None:
    """Batches of unequal size, without padding: BatchNorm would notice."""
    training = replace(classification().training, last_batch=policy, batch=15)  # 16 would leave one example alone
    one = Run(algorithm(label, True), engine, training=training).rounds(2)
    assert_near(Run(algorithm(label, True), "loop", training=training).rounds(2), one, atol=1e-9)


@each_method
@bare_and_refined
def test_chunks_and_threads_change_nothing(label: str, fnr: Any, tmp_path: Path) -> None:
    whole = played(label, fnr=fnr)
    parts = Run(whole.algorithm, clients_at_once=3, threads=2, folder=tmp_path)
    assert_near(whole.state, parts.rounds(5), atol=1e-12)


@each_method
@bare_and_refined
def test_the_order_of_clients_does_not_matter(label: str, fnr: Any) -> None:
    one, other = (Run(played(label, fnr=fnr).algorithm) for _ in range(2))
    for _ in range(3):
        cohort = one.cohort(one.t)
        one.round(cohort)
        other.round(cohort.flip(0))
    assert_near(one.state, other.state, atol=1e-10)  # sums in another order, and a server's Adam after them


@each_method
@each_engine
@bare_and_refined
def test_a_rerun_is_bit_identical(label: str, engine: str, fnr: Any) -> None:
    assert_same(played(label, engine, fnr=fnr).state, Run(played(label, fnr=fnr).algorithm, engine).rounds(5))


# -- FNR composes -----------------------------------------------------------------------------------------------------


@each_method
@each_engine
def test_refining_nobody_is_the_inner_method(label: str, engine: str) -> None:
    bare, nobody = played(label, engine), played(label, engine, fnr=refined(share=0.0))
    assert_same(bare.state, nobody.state)
    assert bare.metered.bytes == nobody.metered.bytes


@each_method
def test_refining_without_epochs_is_the_inner_method(label: str) -> None:
    assert_near(played(label).state, played(label, fnr=refined(epochs=0)).state)


@each_federated
def test_refinement_changes_the_model(label: str) -> None:
    assert distance(weights(played(label)), weights(played(label, fnr=refined()))) > 1e-4


@pytest.mark.parametrize(
    ("label", "penalty"),
    [("fedavg", penalty) for penalty in PENALTIES]
    + [(label, p) for label in sorted(OFTEN - WITHOUT_CLIENTS - {"fedavg"}) for p in ("relative", "constant")],
)
def test_the_penalty_has_a_gradient_unless_it_is_the_papers(label: str, penalty: str) -> None:
    with_it = played(label, rounds=2, fnr=refined(penalty=penalty, weight=0.1))
    without = played(label, rounds=2, fnr=refined(penalty=penalty, weight=0.0))
    if penalty == "constant":
        assert_same(with_it.state, without.state)
    else:
        assert distance(weights(with_it), weights(without)) > 1e-6


class Poisoned(Decorator):
    """Loses what a server does not receive: the model before refinement, for methods that did not ask for it."""

    def stream(self, cohort: Tensor, task: LocalTask) -> Iterator[Replies]:
        for replies in self.engine.stream(cohort, task):
            keep = task.send_model or not task.is_private_training
            gone = torch.full_like(replies.params, torch.nan)
            yield replies if keep else replace(replies, trained=gone, params=gone)


@each_method
def test_the_server_uses_only_what_was_uploaded(label: str) -> None:
    sound, poisoned = played(label, fnr=refined()), Run(FNR(method(label)))
    poisoned.metered.engine = Poisoned(poisoned.recorder)
    assert_same(sound.state, poisoned.rounds(5))


@each_method
def test_refinement_leaves_private_estimates_alone(label: str) -> None:
    """After one round, what clients remember and what the server estimates are those of the bare method."""
    bare, fnr = Run(method(label)), Run(FNR(method(label)))
    bare.rounds(1)
    fnr.rounds(1)
    for mine, theirs in zip(memories(bare), memories(fnr), strict=True):
        assert all(torch.equal(mine[k], theirs[k]) for k in mine if not k.startswith("model"))  # a model of its own
    taught = ("generator", "adam", "coefficients", "said")  # what the server learns from the models after refinement
    kept = [k for k in bare.state.extra if not k.startswith(taught)]
    assert all(torch.equal(bare.state.extra[k], fnr.state.extra[k]) for k in kept)


# -- good manners -----------------------------------------------------------------------------------------------------


@each_method
@bare_and_refined
def test_a_round_does_not_change_the_state_it_was_given(label: str, fnr: Any) -> None:
    run = Run(played(label, fnr=fnr).algorithm)
    run.rounds(2)
    before = run.state
    copies = State(
        before.params.clone(),
        {k: v.clone() for k, v in before.buffers.items()},
        {k: v.clone() for k, v in before.extra.items()},
    )
    here = weights(run)
    run.round()
    assert_same(before, copies)
    assert distance(here, weights(run)) > 0


@each_federated
@bare_and_refined
def test_objectives_travel_by_name_and_fields(label: str, fnr: Any) -> None:
    tasks = [passed.task for passed in played(label, fnr=fnr).recorder.passed]
    assert tasks
    assert all(from_bytes(to_bytes(task.objective)) == task.objective for task in tasks)


@each_method
@each_engine
@bare_and_refined
def test_a_cohort_of_one_works(label: str, engine: str, fnr: Any) -> None:
    run = Run(played(label, fnr=fnr).algorithm, engine, active=1)
    before = weights(run)
    run.rounds(2)
    assert weights(run).isfinite().all()
    assert distance(before, weights(run)) > 0


@each_method
@bare_and_refined
def test_it_learns(label: str, fnr: Any) -> None:
    run = played(label, fnr=fnr)
    x, y = run.world.pool.take("ranking", torch.arange(40))
    outs = [run.net.apply(model.params, model.buffers, x, mode="frozen")[0] for model in models(run)]
    right = torch.stack([(out.logits.argmax(1) == y).double().mean() for out in outs])
    slow = run.algorithm.personalised or label.startswith("fedftg")  # on images that are made up
    assert right.mean() > (2.0 if slow else 2.5) / NUM_CLASSES


@each_method
@as_a_run_does
def test_it_resumes(label: str, engine: str, tmp_path: Path) -> None:
    """Server state and client memory, saved after three rounds, are all that the next two need."""
    whole = played(label, engine, fnr=refined())
    first = Run(whole.algorithm, engine)
    first.rounds(3)
    checkpoint.save(tmp_path, 3, first.state, first.engine.memory, checkpoint.Stamp("config", "log"))
    second = Run(whole.algorithm, engine)
    found = checkpoint.index(tmp_path)
    assert found is not None
    second.t, second.state = found.round, checkpoint.load(tmp_path, found, second.engine.memory)
    assert_same(whole.state, second.rounds(2))


@each_federated
@in_this_process
def test_a_client_without_finite_numbers_is_named(label: str, engine: str) -> None:
    world = classification()
    x, y = world.pool._parts["private"]
    spoiled = x.clone()
    spoiled[world.pool.shards[2]] = torch.nan
    world.pool._parts["private"] = spoiled, y
    with pytest.raises(ClientError, match="client 2, round 1, stage (local|gradient), step 0") as caught:
        Run(method(label), engine, world=world, active=6).rounds(1)
    assert caught.value.client == 2


@pytest.mark.parametrize("label", NEUTRAL)
@each_engine
def test_its_neutral_setting_is_fedavg(label: str, engine: str) -> None:
    neutral = Run(method(label, **NEUTRAL[label]), engine).rounds(5)
    assert_same(played("fedavg", engine).state, neutral)
    under = Run(FNR(method(label, **NEUTRAL[label])), engine).rounds(5)
    assert_same(played("fedavg", engine, fnr=refined()).state, under)


def test_every_objective_is_registered_once() -> None:
    assert all(name == cls.__name__ for name, cls in Objective.registry.items())
