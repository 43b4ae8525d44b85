"""What every method must satisfy, on every engine, bare and under FNR; a new method gets all of it for free."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fnrfl.algorithms.fedbn import FedBN
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.penalties import PENALTIES
from fnrfl.config import registry
from fnrfl.core.algorithm import Algorithm, Objective
from fnrfl.core.errors import ClientError
from fnrfl.core.types import Decorator, LocalTask, Replies, State
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.rundir import checkpoint, record
from toys import NUM_CLASSES, NUM_FEATURES, Run, assert_near, assert_same, classification, distance

METHODS: dict[str, dict[str, Any]] = {
    **{name: {} for name in registry.algorithms()},
    "feddf": {"steps": 40, "every": 10, "patience": 20},  # servers that do less than by default
    "fedgen": {"steps": 10},
    "fedftg": {"iterations": 3},
    "fedprox-strong": {"mu": 1.0},
    "scaffold-I": {"variates": "I"},
    "scaffold-niid-bench": {"correction": "after-momentum", "weights": "niid-bench"},
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
IN_PROCESS = ("loop", "batched", "loop-fast", "batched-fast")  # fast: with every accelerator
# children: clients in child processes, nothing shared but messages; network: letters to nodes that keep versions;
# ray: clients trained in two Ray actors
ENGINES = (*IN_PROCESS, "children", "network", "ray")


def method(label: str, **changes: Any) -> Algorithm:
    name = max((known for known in registry.algorithms() if f"{label}-".startswith(f"{known}-")), key=len)
    return registry.load_method(name)(**{**METHODS[label], **changes})


def algorithm(label: str, refined: bool) -> Algorithm:
    return FNR(method(label)) if refined else method(label)


class Played(Run):
    """A run of some rounds, with the states that it went through and the bytes of every round."""

    def __init__(self, algorithm: Algorithm, engine: str, rounds: int) -> None:
        super().__init__(algorithm, engine)
        self.states: list[State] = []
        self.bytes: list[Any] = []
        for _ in range(rounds):
            self.states.append(self.round())
            self.bytes.append(dict(self.metered.bytes))


@lru_cache(maxsize=32)  # those of a method or two: tests are ordered by method
def played(label: str, engine: str = "loop", rounds: int = 3, fnr: tuple[tuple[str, Any], ...] | None = None) -> Played:
    """A run that several checks look at."""
    inner = method(label)
    return Played(inner if fnr is None else FNR(inner, **dict(fnr)), engine, rounds)


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


FEW_METHODS = {"fedavg", "scaffold", "fedgen"}  # plain; with client memory; with a server that learns
LIKE_FEDAVG = {"bn-recalibrate", "fedavgm", "fedadam", "fednova", "centralised", "public-only"}  # in their steps
BARE_AND_REFINED = (None, refined())
WORDS = {None: "bare", False: "bare", True: "fnr", refined(): "fnr"}  # in the names of cases


def labels() -> list[Any]:
    return [label if label in OFTEN else pytest.param(label, marks=pytest.mark.slow) for label in METHODS]


def each(
    quick: Callable[..., bool] = lambda *_: True,
    *,
    left_out: Set[str] = frozenset(),
    often: Set[str] = OFTEN,
    **axes: Sequence[Any],
) -> Any:
    """Every method with every value of some axes; slow, unless it is a method of `often` and `quick(label, *values)`.

    The cases of a method are run by one worker, one after another, and share its runs.
    """
    cases = []
    for label in METHODS:
        for values in itertools.product(*axes.values()):
            marks = [pytest.mark.xdist_group(label)]
            if label not in often or not quick(label, *values):
                marks.append(pytest.mark.slow)
            words = [WORDS.get(value, value) for value in values]
            if label not in left_out:
                cases.append(pytest.param(label, *values, marks=marks, id="-".join([*words, label])))
    return pytest.mark.parametrize(("label", *axes), cases, scope="module")


def plain_engines(label: str, engine: str, *_: Any) -> bool:
    return engine in ("loop", "batched")


def under_fnr(label: str, fnr: Any) -> bool:
    """What holds under FNR holds of the method inside: its round is the same, with refinement in between."""
    return fnr is not None


# -- engines agree ----------------------------------------------------------------------------------------------------


def recorded_for_few_under_fnr(label: str, engine: str, fnr: Any) -> bool:
    """Recording takes seconds and memory: what FNR adds is the same for every method, and some take FedAvg's steps."""
    few = label in FEW_METHODS
    recorded = label not in LIKE_FEDAVG if fnr is None else few
    return engine == "batched" or (engine == "batched-fast" and recorded) or (engine in ("children", "network") and few)


def sent_part(run: Run, state: State) -> State:
    """A server's state without what clients never send: FedBN's simulated server averages it, a real one has none."""
    if not isinstance(getattr(run.algorithm, "inner", run.algorithm), FedBN):
        return state
    own, net = run.net.batchnorm, run.net
    buffers = {name: value for name, value in state.buffers.items() if name not in own}
    return replace(state, params=state.params[~net.mask(own)], buffers=buffers)


@each(recorded_for_few_under_fnr, engine=ENGINES[1:], fnr=BARE_AND_REFINED)
def test_engines_equal_loop(label: str, engine: str, fnr: Any) -> None:
    """Float64, BatchNorm, Dropout, ragged clients, four of six active, three rounds; client memory included."""
    loop, other = played(label, "loop", fnr=fnr), played(label, engine, fnr=fnr)
    assert_near(sent_part(loop, loop.state), sent_part(other, other.state), atol=1e-9)
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


@lru_cache(maxsize=2)
def pictured(label: str, fnr: Any, engine: str = "loop") -> Run:
    run = Run(algorithm(label, fnr is not None), engine, world=classification(module=Pictures), record=False)
    run.rounds(3)
    return run


@each(
    lambda label, engine, fnr: (engine, fnr) in [("batched", None), ("loop-fast", refined())],
    engine=("batched", "loop-fast"), fnr=BARE_AND_REFINED,
)  # fmt: skip
def test_engines_equal_loop_on_convolutions(label: str, engine: str, fnr: Any) -> None:
    """As a run would use them: the convolutions of fast engines are channels-last and not recorded."""
    plain, other = pictured(label, fnr), pictured(label, fnr, engine)
    assert plain.state.buffers.keys() == other.state.buffers.keys()
    for run in (plain, other):
        run.named = run.net.unflatten(run.state.params) | run.state.buffers
    assert all(distance(plain.named[k], other.named[k]) <= 1e-9 for k in plain.named)


@each(left_out=WITHOUT_CLIENTS, fnr=BARE_AND_REFINED)
def test_engines_equal_loop_in_single_precision_after_four_steps(label: str, fnr: Any) -> None:
    world = classification(torch.float32)
    four = replace(world.training, epochs=4, batch=97, last_batch="keep")
    runs = [Run(algorithm(label, fnr is not None), engine, world=world, training=four) for engine in ENGINES[:2]]
    for run in runs:
        run.round()
    one, other = (run.replies() for run in runs)
    assert set(one.steps.tolist()) == {4}
    assert one.trained.dtype == torch.float32
    assert distance(one.trained, other.trained) <= 1e-4


@each(
    lambda label, engine, policy: engine == "batched" and policy == "keep",
    engine=ENGINES[1:], policy=("keep", "drop", "run-on"),
)  # fmt: skip
def test_engines_agree_on_every_last_batch(label: str, engine: str, policy: Any) -> None:
    """Batches of unequal size, without padding: BatchNorm would notice."""
    training = replace(classification().training, last_batch=policy, batch=15)  # 16 would leave one example alone
    one = Run(algorithm(label, True), engine, training=training)
    loop = Run(algorithm(label, True), "loop", training=training)
    assert_near(sent_part(loop, loop.rounds(2)), sent_part(one, one.rounds(2)), atol=1e-9)


@each(under_fnr, fnr=BARE_AND_REFINED)
def test_chunks_and_threads_change_nothing(label: str, fnr: Any, tmp_path: Path) -> None:
    whole = played(label, fnr=fnr)
    parts = Run(whole.algorithm, clients_at_once=3, threads=2, folder=tmp_path)
    assert_near(whole.states[1], parts.rounds(2), atol=1e-12)


@each(under_fnr, fnr=BARE_AND_REFINED)
def test_the_order_of_clients_does_not_matter(label: str, fnr: Any) -> None:
    one = played(label, fnr=fnr)
    other = Run(one.algorithm)
    for t in range(2):
        other.round(other.cohort(t).flip(0))
    assert_near(one.states[1], other.state, atol=1e-10)  # sums in another order, and a server's Adam after them


@each(
    lambda label, engine, fnr: engine in ("loop", "batched") and fnr is not None,  # refining nobody is a rerun too
    engine=ENGINES, fnr=BARE_AND_REFINED,
)  # fmt: skip
def test_a_rerun_is_bit_identical(label: str, engine: str, fnr: Any) -> None:
    once = played(label, engine, fnr=fnr)
    assert_same(once.states[1], Run(once.algorithm, engine).rounds(2))


# -- FNR composes -----------------------------------------------------------------------------------------------------


@each(plain_engines, engine=ENGINES)
def test_refining_nobody_is_the_inner_method(label: str, engine: str) -> None:
    bare, nobody = played(label, engine), played(label, engine, rounds=2, fnr=refined(share=0.0))
    assert_same(bare.states[1], nobody.state)
    assert bare.bytes[:2] == nobody.bytes


@each()
def test_refining_without_epochs_is_the_inner_method(label: str) -> None:
    assert_near(played(label).states[1], played(label, rounds=2, fnr=refined(epochs=0)).state)


@each(left_out=WITHOUT_CLIENTS)
def test_refinement_changes_the_model(label: str) -> None:
    assert distance(weights(played(label)), weights(played(label, fnr=refined()))) > 1e-4


@pytest.mark.parametrize(
    ("label", "penalty"),
    [
        pytest.param(label, penalty, marks=pytest.mark.xdist_group(label))
        for label in sorted(OFTEN - WITHOUT_CLIENTS)
        for penalty in (PENALTIES if label == "fedavg" else ("relative", "constant"))
    ],
    scope="module",
)
def test_the_penalty_has_a_gradient_unless_it_is_the_papers(label: str, penalty: str) -> None:
    with_it = played(label, rounds=2, fnr=refined(penalty=penalty, weight=0.1))
    without = played(label, rounds=2, fnr=refined(penalty="relative", weight=0.0))
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
            yield replies if keep else replace(replies, trained=gone, refined=None)


@each()
def test_the_server_uses_only_what_was_uploaded(label: str) -> None:
    sound, poisoned = played(label, fnr=refined()), Run(FNR(method(label)))
    poisoned.metered.engine = Poisoned(poisoned.recorder)
    assert_same(sound.states[1], poisoned.rounds(2))


@each()
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


@each(under_fnr, fnr=BARE_AND_REFINED)
def test_a_round_does_not_change_the_state_it_was_given(label: str, fnr: Any) -> None:
    run = Run(played(label, fnr=fnr).algorithm)
    run.round()
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


@each(left_out=WITHOUT_CLIENTS, fnr=BARE_AND_REFINED)
def test_objectives_travel_by_name_and_fields(label: str, fnr: Any) -> None:
    tasks = [passed.task for passed in played(label, fnr=fnr).recorder.passed]
    assert tasks
    assert all(from_bytes(to_bytes(task.objective)) == task.objective for task in tasks)


@each(
    lambda label, engine, fnr: (engine, fnr) in [("batched", None), ("loop", refined())],
    engine=ENGINES, fnr=BARE_AND_REFINED,
)  # fmt: skip
def test_a_cohort_of_one_works(label: str, engine: str, fnr: Any) -> None:
    run = Run(played(label, fnr=fnr).algorithm, engine, active=1)
    before = weights(run)
    run.rounds(2)
    assert weights(run).isfinite().all()
    assert distance(before, weights(run)) > 0


@each(fnr=BARE_AND_REFINED)
def test_it_learns(label: str, fnr: Any) -> None:
    run = played(label, rounds=5, fnr=fnr)
    x, y = run.world.pool.take("ranking", torch.arange(40))
    outs = [run.net.apply(model.params, model.buffers, x, mode="frozen")[0] for model in models(run)]
    right = torch.stack([(out.logits.argmax(1) == y).double().mean() for out in outs])
    slow = run.algorithm.personalised or label.startswith("fedftg")  # on images that are made up
    assert right.mean() > (2.0 if slow else 2.5) / NUM_CLASSES


@each(lambda label, engine: engine == "loop" or (label, engine) == ("scaffold", "batched-fast"), engine=ENGINES)
def test_it_resumes(label: str, engine: str, tmp_path: Path) -> None:
    """Server state and client memory, saved after a round, are all that the next two need."""
    whole = played(label, engine, fnr=refined())
    first = Run(whole.algorithm, engine)
    first.round()
    checkpoint.save_checkpoint(tmp_path, 1, first.state, first.engine.memory, config="config", log="log")
    second = Run(whole.algorithm, engine)
    second.folder = first.folder  # what nodes keep is theirs
    found = record.read_index(tmp_path)
    assert found is not None
    second.t, second.state = found.round, checkpoint.load_checkpoint(tmp_path, found, second.engine.memory)
    assert_same(whole.state, second.rounds(2))


@each(plain_engines, left_out=WITHOUT_CLIENTS, engine=IN_PROCESS)
def test_a_client_without_finite_numbers_is_named(label: str, engine: str) -> None:
    world = classification()
    x, y = world.pool._parts["private"]
    spoiled = x.clone()
    spoiled[world.pool.shards[2]] = torch.nan
    world.pool._parts["private"] = spoiled, y
    with pytest.raises(ClientError, match="client 2, round 1, stage (local|gradient), step 0") as caught:
        Run(method(label), engine, world=world, active=6).rounds(1)
    assert caught.value.client == 2


@each(plain_engines, left_out=METHODS.keys() - NEUTRAL, often=NEUTRAL.keys(), engine=ENGINES)
def test_its_neutral_setting_is_fedavg(label: str, engine: str) -> None:
    for fnr in BARE_AND_REFINED:
        inner = method(label, **NEUTRAL[label])
        neutral = Run(inner if fnr is None else FNR(inner), engine).rounds(2)
        assert_same(played("fedavg", engine, fnr=fnr).states[1], neutral)


def test_every_objective_is_registered_once() -> None:
    assert all(name == cls.__name__ for name, cls in Objective.registry.items())
