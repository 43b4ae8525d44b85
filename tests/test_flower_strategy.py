"""FNR around Flower's strategies, with Flower's own apps and messages, in this process."""

from __future__ import annotations

import copy
import functools
import logging
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fnrfl.algorithms.fedavg import FedAvg as PackageFedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.penalties import PENALTIES
from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.rng import generator
from fnrfl.core.types import LocalTask, State
from fnrfl.data.batches import plan
from fnrfl.process import one_intra_op_thread
from toys import NUM_FEATURES, Mlp, Plain, Run, classification

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("flower")]

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.client import mod as older  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import (  # noqa: E402
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.common.serde import recorddict_to_proto  # noqa: E402
from flwr.server.workflow import SecAggPlusWorkflow  # noqa: E402
from flwr.serverapp import strategy as flower  # noqa: E402

from flower_grid import DirectGrid  # noqa: E402
from fnrfl.flower import FeatureNormMod, FeatureNormStrategy  # noqa: E402
from fnrfl.flower.fnr_record import RECORD_NAME as FNR_RECORD  # noqa: E402

NODES = (41, 7, 23, 88, 15)  # Flower's node ids are in no order
PUBLIC = 55


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with one_intra_op_thread():
        yield


class Without(nn.Sequential):
    """BatchNorm and no dropout, so that train mode draws nothing."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def made(module: type[nn.Module] = Without) -> nn.Module:
    return module().double()


def public(size: int = 16) -> list[tuple[Tensor, Tensor]]:
    x, y = classification().pool.take("public", torch.arange(PUBLIC))
    return list(zip(x.split(size), y.split(size), strict=True))


def start(module: type[nn.Module] = Without) -> ArrayRecord:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return ArrayRecord(made(module).state_dict())


def answer(message: Message, **records: Any) -> Message:
    return Message(RecordDict(records), reply_to=message)


def same(message: Message, context: Context) -> Message:
    """A client that trains nothing."""
    return answer(message, arrays=copy.deepcopy(message.content["arrays"]), m=MetricRecord({"num-examples": 1}))


def train(message: Message, context: Context, module: type[nn.Module] = Without) -> Message:
    """A client's own training: a few steps of torch's SGD on its shard; it draws from torch's global stream."""
    model = made(module)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    pool = classification().pool
    x, y = pool.take("private", pool.shards[int(context.node_config["partition-id"])])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x + 0.01 * torch.randn_like(x)), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(y), "train_loss": float(loss), "draw": float(torch.rand(()))})
    extra = ConfigRecord({"note": f"partition {context.node_config['partition-id']}"})
    return answer(message, arrays=ArrayRecord(model.state_dict()), metrics=metrics, extra=extra)


def evaluate(message: Message, context: Context) -> Message:
    model = made(Plain if "hidden.weight" in message.content["arrays"] else Without)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = classification().pool.take("validation", torch.arange(32))
    right = float((model.eval()(x).argmax(1) == y).double().mean())
    return answer(message, m=MetricRecord({"num-examples": 32, "right": right}))


def client_app(*mods: Any, function: Callable[[Message, Context], Message] = train) -> ClientApp:
    app = ClientApp(mods=list(mods))
    app.train()(function)
    app.evaluate()(evaluate)
    return app


def with_norms(*before: Any, function: Callable[[Message, Context], Message] = train) -> ClientApp:
    return client_app(*before, FeatureNormMod(made, public), function=function)


def grid_of(app: ClientApp | None = None, **options: Any) -> DirectGrid:
    return DirectGrid(dict.fromkeys(NODES, app or with_norms()), **options)


def played(strategy: Any, grid: DirectGrid, rounds: int = 2, module: type[nn.Module] = Without) -> Any:
    random.seed(3)  # by which Flower samples nodes
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return strategy.start(grid, start(module), num_rounds=rounds, timeout=9.0)


PLAIN = ("FedAvg", "FedAdam", "FedAdagrad", "FedYogi", "FedMedian", "FedTrimmedAvg")
INNER: dict[str, dict[str, Any]] = dict.fromkeys(PLAIN, {}) | {
    "FedProx": {"proximal_mu": 0.1},
    "FedAvgM": {"server_momentum": 0.5},
    "Krum": {"num_malicious_nodes": 1},
    "MultiKrum": {"num_malicious_nodes": 1, "num_nodes_to_select": 3},
    "Bulyan": {"num_malicious_nodes": 0},
    "QFedAvg": {"client_learning_rate": 0.1},
}


def apps(name: str) -> tuple[ClientApp, ClientApp, type[nn.Module]]:
    """Without FNR, with it, and the model; QFedAvg cannot average the integers of a BatchNorm."""
    module: type[nn.Module] = Plain if name == "QFedAvg" else Without
    function = functools.partial(train, module=module)
    mod = FeatureNormMod(lambda: made(module), public)
    return client_app(function=function), client_app(mod, function=function), module


def orders(grid: DirectGrid) -> list[Message]:
    """The messages that asked a client to refine."""
    return [one for one in grid.sent if is_order(one)]


def is_order(message: Message) -> bool:
    return message.content.config_records.get(FNR_RECORD, {}).get("phase") == "refine"


def weights(arrays: ArrayRecord) -> Tensor:
    return torch.cat([torch.as_tensor(array.numpy()).double().flatten() for array in arrays.values()])


def fnr(inner: Any = None, **options: Any) -> FeatureNormStrategy:
    return FeatureNormStrategy(inner or flower.FedAvg(), **{"share": 0.4} | options)


def metrics(result: Any, *names: str, round: int = 1) -> list[float]:
    return [result.train_metrics_clientapp[round][f"fnr-{name}"] for name in names]


class Spy(flower.FedAvg):
    """FedAvg that keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Message]] = []

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.seen.append(copy.deepcopy(list(replies)))
        return super().aggregate_train(server_round, replies)


def pairs(spy: Spy) -> list[tuple[Message, Message]]:
    """Each reply that a strategy saw under FNR, and that of the same node without."""
    bare = Spy()
    played(bare, grid_of(client_app()), rounds=1)
    by_node = {one.metadata.src_node_id: one for one in bare.seen[0]}
    return [(one, by_node[one.metadata.src_node_id]) for one in spy.seen[0]]


# -- equal to the package ---------------------------------------------------------------------------------------------


def flower_round(fnr: FNR, module: type[nn.Module], dtype: torch.dtype) -> tuple[Run, Tensor, Any, DirectGrid]:
    """A round of FNR(FedAvg) of the package, and the same by Flower from the models that it trained."""
    world = classification(dtype, module=module)
    package = Run(fnr, world=world)
    cohort = package.cohort(0)
    package.round()
    again = Run(PackageFedAvg(), world=world)
    trained = again.engine.train(cohort, LocalTask(Objective(), "local", State(*again.net.flatten())))
    training = replace(package.engine.training, epochs=fnr.epochs, batch=fnr.batch)
    pool = world.pool

    def app_of(row: int, client: int) -> ClientApp:
        model = again.net.export(trained.params[row], {k: v[row] for k, v in trained.buffers.items()})

        def trains(message: Message, context: Context) -> Message:
            metrics = MetricRecord({"num-examples": int(trained.examples[row])})
            return answer(message, arrays=ArrayRecord(model.state_dict()), metrics=metrics)

        every_example = [pool.take("public", torch.arange(PUBLIC))]
        positions = plan(PUBLIC, training, lambda name: generator(package.seed, 0, client, "refine", name))
        loaders = iter([every_example, [pool.take("public", p) for p in positions.batches]])  # to measure, to refine
        mod = FeatureNormMod(world.module, lambda: next(loaders), lambda: [pool.all("ranking")])
        return client_app(mod, function=trains)

    grid = DirectGrid({NODES[row]: app_of(row, int(client)) for row, client in enumerate(cohort)})
    strategy = FeatureNormStrategy(
        flower.FedAvg(min_available_nodes=4, min_train_nodes=4, fraction_evaluate=0.0), share=fnr.share,
        weight=fnr.weight, penalty=fnr.penalty, target=fnr.target, epochs=1, lr=training.lr,
        weight_decay=training.weight_decay, batchnorm=fnr.batchnorm,
    )  # fmt: skip
    result = strategy.start(grid, ArrayRecord(world.module().state_dict()), num_rounds=1)
    return package, cohort, result, grid


EXACTLY = {"rtol": 0.0, "atol": 1e-12}
ROUNDS = [
    (dict(penalty=penalty, batchnorm=mode, target=target, weight=0.05), torch.float64, EXACTLY)
    for penalty in PENALTIES
    for mode in ("frozen", "batch", "updating")
    for target in ("others", "all")
] + [(dict(weight=0.5), torch.float32, {"rtol": 1e-5, "atol": 1e-6})]


@pytest.mark.parametrize(("options", "dtype", "tolerance"), ROUNDS, ids=str)
def test_a_round_is_the_packages_fnr_around_fedavg(options: Any, dtype: torch.dtype, tolerance: Any) -> None:
    module = Mlp if options.get("batchnorm") == "frozen" else Without
    method = FNR(PackageFedAvg(), epochs=3, batch=16, **options)
    package, cohort, result, grid = flower_round(method, module, dtype)
    refined = [int(cohort[NODES.index(message.metadata.dst_node_id)]) for message in orders(grid)]
    assert refined == package.engine.notes["refined"] and metrics(result, "refined") == [len(refined)] == [2]
    (targets,) = [task.own["fnr.target"] for task in package.tasks("refine")]
    sent = torch.tensor([list(message.content[FNR_RECORD]["targets"]) for message in orders(grid)], dtype=dtype)
    torch.testing.assert_close(sent, targets, **tolerance)
    got = result.arrays.to_torch_state_dict()
    for name, value in package.net.named(package.state.params, package.state.buffers).items():
        if value.is_floating_point():
            torch.testing.assert_close(got[name], value, **tolerance)  # of the same dtype


# -- around Flower's strategies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INNER)
def test_it_goes_around_every_strategy_and_refining_nobody_is_the_strategy_inside_bit_for_bit(name: str) -> None:
    without, with_mod, module = apps(name)
    grids = [grid_of(without), *(grid_of(with_mod) for _ in range(2))]
    one, two, three = (getattr(flower, name)(**INNER[name]) for _ in range(3))
    strategies = [one, fnr(two, share=0.0), fnr(three, lr=0.05)]
    bare, idle, refined = (played(one, grid, module=module) for one, grid in zip(strategies, grids, strict=True))
    assert [len(orders(grid)) for grid in grids] == [0, 0, 4]  # two of five in each of two rounds
    assert {k: v.data for k, v in bare.arrays.items()} == {k: v.data for k, v in idle.arrays.items()}
    assert bare.train_metrics_clientapp == idle.train_metrics_clientapp
    assert bare.evaluate_metrics_clientapp == idle.evaluate_metrics_clientapp
    for round in (1, 2):
        assert metrics(refined, "ranked", "refined", "fell-back", "unranked", round=round) == [5, 2, 0, 0]
        assert 0 <= metrics(refined, "accuracy")[0] <= 1 and "train_loss" in refined.train_metrics_clientapp[round]
    assert set(refined.evaluate_metrics_clientapp) == {1, 2}
    assert torch.isfinite(weights(refined.arrays)).all()
    assert not torch.equal(weights(refined.arrays), weights(bare.arrays))


def test_the_strategy_inside_sees_the_replies_with_refined_models_and_nothing_else_changed() -> None:
    spy, grid = Spy(), grid_of()
    played(fnr(spy), grid, rounds=1)
    refined = {message.metadata.dst_node_id for message in orders(grid)}
    for reply, before in pairs(spy):
        alike = torch.equal(weights(reply.content["arrays"]), weights(before.content["arrays"]))
        assert alike == (reply.metadata.src_node_id not in refined)
        assert list(reply.content) == list(before.content) == ["arrays", "metrics", "extra"]
        assert reply.content["metrics"] == before.content["metrics"]  # the app's random numbers too
        assert reply.content["extra"] == before.content["extra"]
        now, then = ([(k, a.shape, a.dtype) for k, a in one.content["arrays"].items()] for one in (reply, before))
        assert now == then


def test_the_app_sees_the_messages_that_it_saw_without_fnr() -> None:
    seen: list[list[str]] = []

    def watching(message: Message, context: Context) -> Message:
        seen.append(list(message.content))
        return train(message, context)

    played(fnr(), grid_of(with_norms(function=watching)), rounds=1)
    assert seen == [["arrays", "config"]] * 5


def without_noise(message: Message, context: Context) -> Message:
    with torch.random.fork_rng():
        torch.manual_seed(int(context.node_config["partition-id"]))
        return train(message, context)


def test_neither_the_order_of_arrival_nor_a_second_start_changes_anything() -> None:
    results, strategy = [], fnr()
    for arrival in (list, lambda replies: replies[::-1], lambda replies: replies[2:] + replies[:2]):
        grid = grid_of(with_norms(function=without_noise))
        grid.arrival = arrival
        results.append(played(strategy, grid).arrays)
    assert len({tuple(array.data for array in arrays.values()) for arrays in results}) == 1


def test_a_cohort_of_which_nobody_can_be_refined_is_not_asked() -> None:
    grid = DirectGrid(dict.fromkeys(NODES[:2], with_norms()))
    played(fnr(), grid, rounds=1)  # floor(0.4 * 2) is 0
    assert all(FNR_RECORD not in message.content for message in grid.sent)


def test_ties_go_to_the_lower_partition_and_nobody_needs_one() -> None:
    for numbered, refined in ((True, [41, 7]), (False, [7, 15])):  # partitions 0 and 1, or the lowest node ids
        grid = grid_of(with_norms(function=same))
        for context in grid.contexts.values():
            context.node_config = context.node_config if numbered else {}
        played(fnr(), grid, rounds=1)
        assert [message.metadata.dst_node_id for message in orders(grid)] == refined


def test_models_without_names_are_loaded_in_order() -> None:
    def numbered(message: Message, context: Context) -> Message:
        reply = without_noise(message, context)
        reply.content["arrays"] = ArrayRecord(reply.content["arrays"].to_numpy_ndarrays())
        return reply

    one, other = (
        played(fnr(), grid_of(with_norms(function=function)), rounds=1).arrays for function in (without_noise, numbered)
    )
    assert list(other) == [str(place) for place in range(len(one))]
    assert torch.equal(weights(one), weights(other))


def test_the_model_is_the_record_that_is_named_as_the_servers() -> None:
    def two(message: Message, context: Context) -> Message:
        reply = train(message, context)
        reply.content["variates"] = ArrayRecord([np.zeros(3)])
        return reply

    class Two(flower.FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            for reply in (replies := list(replies)):
                assert len(reply.content.pop("variates")) == 1
            return super().aggregate_train(server_round, replies)

    assert metrics(played(fnr(Two()), grid_of(with_norms(function=two)), rounds=1), "refined") == [2]


def test_letters_are_as_small_as_the_page_says() -> None:
    letters: dict[tuple[str, str], int] = {}

    def tamper(message: Message, reply: Message) -> list[Message]:
        for way, one in (("down", message), ("up", reply)):
            if (letter := one.content.config_records.get(FNR_RECORD)) is not None:
                numbers, counts = letter.get("norms", letter.get("targets", [])), letter.get("counts", [])
                whole = recorddict_to_proto(RecordDict({FNR_RECORD: letter})).ByteSize()
                key = (way, letter["phase"])
                letters[key] = max(whole - 8 * len(numbers) - 2 * len(counts), letters.get(key, 0))
        return [reply]

    played(fnr(), grid_of(tamper=tamper))
    said = {("down", "measure"): 100, ("up", "measure"): 190, ("down", "refine"): 280, ("up", "refine"): 100}
    assert letters.keys() == said.keys()
    assert all(0.9 * said[one] <= size <= said[one] for one, size in letters.items()), letters


def test_a_server_without_fnr_does_not_notice_the_mod() -> None:
    bare, idle = (played(flower.FedAvg(), grid_of(app)).arrays for app in (client_app(), with_norms()))
    assert all(bare[key].data == idle[key].data for key in bare)
    assert len(played(flower.FedAvg(), grid_of(with_norms(LocalDpMod(1.0, 1.0, 1.0, 1e-5))), rounds=1).arrays)


def test_features_can_be_named_and_models_without_any_are_not_ranked() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.Identity()
            self.head = nn.Parameter(torch.zeros(NUM_FEATURES, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.pool(x) @ self.head  # type: ignore[no-any-return]

    def result(features: str | None) -> Any:
        mod = FeatureNormMod(lambda: Flat().double(), public, features=features)
        inner = flower.FedAvg(fraction_evaluate=0.0)
        return played(fnr(inner), grid_of(client_app(mod, function=same)), rounds=1, module=Flat)

    assert metrics(result("pool"), "refined") == [2]
    with pytest.raises(FnrflError, match="nobody to refine.*calls no Linear layer"):
        result(None)


def test_a_strategy_with_a_loop_of_its_own_keeps_it() -> None:
    class Own(flower.FedAvg):
        """Its `start` does more than Flower's, and reads and writes what is its own."""

        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def start(self, grid: Any, initial_arrays: Any, note: str = "begun", **options: Any) -> Any:
            self.calls.append(note)
            result = super().start(grid, initial_arrays, **options)
            self.calls.append(len(result.train_metrics_clientapp))
            return result

    own, grid, other = Own(), grid_of(), grid_of()
    result, same = played(fnr(own), grid), played(fnr(), other)
    assert own.calls == ["begun", 2]
    assert not {"configure_train", "aggregate_train"} & set(vars(own))  # as it was
    assert torch.equal(weights(result.arrays), weights(same.arrays))
    assert len(orders(grid)) == len(orders(other)) == 4


def test_an_app_with_named_actions_is_asked_the_way_it_was_asked() -> None:
    class Named(flower.FedAvg):
        def configure_train(self, *args: Any) -> Any:
            messages = super().configure_train(*args)
            return [Message(one.content, one.metadata.dst_node_id, "train.warm_up", group_id="a") for one in messages]

    app = ClientApp(mods=[FeatureNormMod(made, public)])
    app.train("warm_up")(train)
    app.evaluate()(evaluate)
    grid = grid_of(app)
    assert metrics(played(fnr(Named()), grid, rounds=1), "refined") == [2]
    assert {(one.metadata.message_type, one.metadata.group_id) for one in orders(grid)} == {("train.warm_up", "a")}


@pytest.mark.parametrize(("options", "seconds"), [({}, 9.0), ({"timeout": 4.0}, 4.0)])
def test_refined_models_are_waited_for_as_long_as_start_says_or_as_told(options: Any, seconds: float) -> None:
    grid = grid_of()
    played(fnr(**options), grid, rounds=1)
    assert grid.waited[:2] == [9.0, seconds]
    assert {message.metadata.ttl for message in orders(grid)} == {seconds}


def test_infinite_numbers_that_were_there_before_are_no_fault() -> None:
    class Masked(Without):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    mod = FeatureNormMod(lambda: made(Masked), public)
    app = client_app(mod, function=functools.partial(train, module=Masked))
    result = played(fnr(flower.FedAvg(fraction_evaluate=0.0)), grid_of(app), rounds=1, module=Masked)
    assert metrics(result, "refined") == [2]


def test_refining_everybody_has_no_targets_and_goes_on() -> None:
    assert metrics(played(fnr(share=1.0), grid_of(), rounds=1), "refined") == [5]


def said(caplog: pytest.LogCaptureFixture, strategy: Any, grid: DirectGrid, **more: Any) -> tuple[Any, list[str]]:
    """The result, and the warnings of a run."""
    caplog.clear()
    logging.getLogger("flwr").addHandler(caplog.handler)
    try:
        result = played(strategy, grid, **more)
    finally:
        logging.getLogger("flwr").removeHandler(caplog.handler)
    warnings = {id(one): one for one in caplog.records if one.levelno >= logging.WARNING}  # which may propagate
    return result, [record.getMessage() for record in warnings.values()]


# -- faults -----------------------------------------------------------------------------------------------------------


def changed(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message], Message]:
    """Replies with their first array changed."""

    def made(reply: Message) -> Message:
        arrays = reply.content["arrays"]
        first = next(iter(arrays))
        arrays[first] = Array(change(arrays[first].numpy().copy()))
        return reply

    return made


def nan(array: np.ndarray) -> np.ndarray:
    array.flat[0] = np.nan
    return array


def renamed(reply: Message) -> Message:
    arrays = reply.content["arrays"]
    reply.content["arrays"] = ArrayRecord({f"other.{key}": array for key, array in arrays.items()})
    return reply


def unreadable(reply: Message) -> Message:
    arrays = reply.content["arrays"]
    first = next(iter(arrays))
    arrays[first] = Array(arrays[first].dtype, arrays[first].shape, "numpy.ndarray", b"no array")
    return reply


def without_model(reply: Message) -> Message:
    del reply.content["arrays"]
    return reply


def failing(reason: str, node: int | None = None) -> Callable[[Message, Message], list[Message]]:
    """An error in the place of each refined model; Flower's own grid sends one itself for a node that is gone."""

    def tamper(message: Message, reply: Message) -> list[Message]:
        error = Message(Error(0, reason), reply_to=message)
        error.metadata.__dict__["_src_node_id"] = node or error.metadata.src_node_id
        return [error] if is_order(message) else [reply]

    return tamper


def spoilt(change: Callable[[Message], Message]) -> Callable[[Message, Message], list[Message]]:
    return lambda message, reply: [change(reply) if is_order(message) else reply]


FAULTS: dict[str, tuple[Callable[[Message, Message], list[Message]], str]] = {
    "missing": (lambda message, reply: [] if is_order(message) else [reply], "no reply in 4 seconds"),
    "error": (failing("no \x1b[31mmemory"), r"no \\x1b\[31mmemory"),
    "error of the server": (failing("objects are unavailable", node=1), "objects are unavailable"),
    "nan": (spoilt(changed(nan)), "not finite"),
    "shape": (spoilt(changed(lambda a: a[:-1])), r"is float64\[15, 12\], not float64\[16, 12\]"),
    "type": (spoilt(changed(lambda a: a.astype(np.float32))), r"float32\[16, 12\], not float64"),
    "names": (spoilt(renamed), "other arrays"),
    "bytes": (spoilt(unreadable), "cannot be read"),
    "empty": (spoilt(without_model), "other arrays"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_refined_model_that_cannot_be_used_falls_back_to_the_one_before(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    tamper, why = FAULTS[fault]
    spy, grid = Spy(), grid_of(tamper=tamper)
    result, warnings = said(caplog, fnr(spy, timeout=4.0), grid, rounds=1)
    assert metrics(result, "refined", "fell-back") == [0, 2] and grid.waited[1] == 4.0
    for reply, before in pairs(spy):
        assert torch.equal(weights(reply.content["arrays"]), weights(before.content["arrays"]))
    for message in orders(grid):
        node = message.metadata.dst_node_id
        assert any(re.search(f"node {node} counts .* before refinement: .*{why}", line) for line in warnings), warnings


def test_late_and_repeated_replies_are_ignored() -> None:
    kept: list[Message] = []

    def tamper(message: Message, reply: Message) -> list[Message]:
        """Every reply twice, and a reply of the same kind of an earlier round before it, with another model."""
        if message.metadata.message_type != "train":
            return [reply]
        late = [one for one in kept if one.metadata.src_node_id == reply.metadata.src_node_id]
        late = [one for one in late if is_order(message) == ("metrics" not in one.content)]
        kept.append(copy.deepcopy(reply))
        return [*late, reply, changed(lambda a: a + 1.0)(copy.deepcopy(reply))]

    plain, disturbed = (played(fnr(), grid, rounds=3) for grid in (grid_of(), grid_of(tamper=tamper)))
    assert torch.equal(weights(plain.arrays), weights(disturbed.arrays))
    assert plain.train_metrics_clientapp == disturbed.train_metrics_clientapp


def no_data(*_: Any) -> Any:
    raise FileNotFoundError("public.npz")


def test_a_client_that_fails_to_train_is_left_to_the_strategy_inside() -> None:
    apps, spy = dict.fromkeys(NODES, with_norms()), Spy()
    apps[41] = with_norms(function=no_data)
    grid = DirectGrid(apps)
    result = played(fnr(spy, share=0.5), grid, rounds=1)
    assert [reply.has_error() for reply in spy.seen[0]] == [False] * 4 + [True]
    assert metrics(result, "refined") == [2]  # of the four who answered
    assert 41 not in {message.metadata.dst_node_id for message in orders(grid)}
    result = played(fnr(), grid_of(with_norms(function=no_data)), rounds=1)
    assert len(result.arrays) == 0 and metrics(result, "ranked") == [0]


def test_a_client_without_the_mod_or_without_public_data_counts_unranked() -> None:
    def seven_classes(message: Message, reply: Message) -> list[Message]:
        if reply.metadata.src_node_id == 15 and "metrics" in reply.content:
            reply.content[FNR_RECORD]["norms"] = reply.content[FNR_RECORD]["counts"] = [1.0] * 7
        return [reply]

    apps, spy = dict.fromkeys(NODES, with_norms()), Spy()
    apps[7], apps[88] = client_app(), client_app(FeatureNormMod(made, no_data))
    result = played(fnr(spy, share=0.5), DirectGrid(apps), rounds=1)
    assert metrics(result, "ranked", "unranked", "refined") == [3, 2, 1] and len(spy.seen[0]) == 5
    assert all(list(reply.content) == ["arrays", "metrics", "extra"] for reply in spy.seen[0])
    assert metrics(played(fnr(), grid_of(tamper=seven_classes), rounds=1), "unranked") == [1]


ONCE = iter(public())


@pytest.mark.parametrize(
    ("app", "why"),
    [
        (lambda: client_app(), r"no mods=\[FeatureNormMod"),
        (lambda: client_app(FeatureNormMod(made, lambda: [])), "gave no batch"),
        (lambda: client_app(FeatureNormMod(Plain, public)), "Error.* in loading state_dict"),
        (lambda: client_app(FeatureNormMod(made, lambda: [{"image": 1, "label": 2}])), r"a batch must be \(x, y\)"),
        (lambda: client_app(FeatureNormMod(made, lambda: ONCE)), "read only once"),
    ],
)
def test_a_federation_in_which_nobody_measures_is_stopped(app: Callable[[], ClientApp], why: str) -> None:
    with pytest.raises(FnrflError, match=f"nobody to refine in round 1.*{why}") as stopped:
        played(fnr(), grid_of(app()))
    assert "\n" not in str(stopped.value) and "\\" not in str(stopped.value) and not str(stopped.value).endswith("..")


@pytest.mark.parametrize("target", ["others", "all"])
def test_a_class_that_a_node_lacks_is_left_out_of_its_target_and_the_node_is_named_once(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fewer() -> Any:
        return [(x[y < 2], y[y < 2]) for x, y in public()]

    measured: dict[int, list[float]] = {}

    def tamper(message: Message, reply: Message) -> list[Message]:
        if "norms" in reply.content.config_records.get(FNR_RECORD, {}):
            measured[reply.metadata.src_node_id] = list(reply.content[FNR_RECORD]["norms"])
        return [reply]

    apps = dict.fromkeys(NODES, with_norms()) | {23: client_app(FeatureNormMod(made, fewer, lambda: public()[:1]))}
    grid, strategy = DirectGrid(apps, tamper=tamper), fnr(target=target)
    said(caplog, strategy, grid, rounds=1)
    refined = [message.metadata.dst_node_id for message in orders(grid)]
    for message in orders(grid):
        left_out = refined if target == "others" else [message.metadata.dst_node_id]
        for place, got in enumerate(message.content[FNR_RECORD]["targets"]):
            there = [norms[place] for node, norms in measured.items() if node not in left_out and norms[place] > 0]
            assert got == pytest.approx(sum(there) / len(there), rel=1e-12)
    for _ in range(2):  # once in each run, however many rounds it has
        _, warnings = said(caplog, strategy, grid, rounds=3)
        assert [re.findall(r"\bnode (\d+)", line) for line in warnings if "same public data" in line] == [["23"]]
    assert not said(caplog, strategy, grid_of())[1]


def test_mods_outside_find_the_configs_of_the_app_in_every_message() -> None:
    seen: list[tuple[int, float, bool]] = []

    def logging_mod(message: Message, context: Context, call_next: Any) -> Message:
        config = message.content["config"]
        if message.metadata.message_type == "train":
            seen.append((config["server-round"], config["lr"], is_order(message)))
        reply: Message = call_next(message, context)
        return reply

    grid = grid_of(with_norms(message_size_mod, logging_mod, arrays_size_mod))
    fnr().start(grid, start(), num_rounds=2, train_config=ConfigRecord({"lr": 0.5}))
    assert sorted(seen) == sorted((t, 0.5, order) for t in (1, 2) for order in [False] * 5 + [True] * 2)


def test_a_generator_function_is_public_data_like_a_list() -> None:
    calls: list[int] = []

    def yielded() -> Any:
        calls.append(1)
        yield from public()

    one, other = (played(fnr(epochs=3), grid_of(client_app(FeatureNormMod(made, data)))) for data in (public, yielded))
    assert torch.equal(weights(one.arrays), weights(other.arrays))
    assert one.train_metrics_clientapp == other.train_metrics_clientapp
    assert len(calls) >= 2 * (5 * 2 + 2 * 3)  # norms and accuracy of five nodes, three passes of two, in two rounds


def test_a_run_in_which_nobody_can_refine_is_stopped() -> None:
    broken = failing("no memory.\n\tTry again.")
    with pytest.raises(FnrflError, match="refined nobody.*no memory") as stopped:
        played(fnr(), grid_of(tamper=broken), rounds=5)
    assert ".." not in str(stopped.value) and "\\" not in str(stopped.value)

    def once(message: Message, reply: Message) -> list[Message]:
        works = is_order(message) and message.content["config"]["server-round"] == 2
        return [reply] if works else broken(message, reply)

    result = played(fnr(), grid_of(tamper=once), rounds=5)
    assert [metrics(result, "refined", round=t)[0] for t in range(1, 6)] == [0, 2, 0, 0, 0]


def test_a_client_refines_no_model_of_another_question_and_none_after_a_restart() -> None:
    grid, strategy = grid_of(), fnr()
    played(strategy, grid, rounds=1)
    old = orders(grid)[0]
    node = old.metadata.dst_node_id
    messages = list(strategy._ask(2, start(), ConfigRecord(), grid))
    (trained,) = grid.send_and_receive([one for one in messages if one.metadata.dst_node_id == node])
    (late,) = grid.send_and_receive([old])
    assert "holds no model of round 1" in late.error.reason
    old.content[FNR_RECORD]["question"] = trained.content[FNR_RECORD]["question"]
    (refined,) = grid.send_and_receive([old])
    assert "arrays" in refined.content  # the model of round 2 is still held
    (again,) = grid.send_and_receive([old])
    assert "holds no model" in again.error.reason  # and then no more

    def restarts(message: Message, reply: Message) -> list[Message]:
        grid.contexts[message.metadata.dst_node_id].state.clear()
        return [reply]

    grid.tamper = restarts
    assert metrics(played(strategy, grid, rounds=1), "fell-back") == [2]


def test_a_node_that_left_is_not_waited_for() -> None:
    grid, strategy = grid_of(), fnr(share=1.0)
    replies = list(grid.send_and_receive(strategy._ask(1, start(), ConfigRecord(), grid)))
    del grid.apps[88]
    _, counted = strategy._refine_and_aggregate(1, replies)
    assert counted is not None and (counted["fnr-refined"], counted["fnr-fell-back"]) == (4, 1)
    assert 88 not in {message.metadata.dst_node_id for message in orders(grid)}


# -- what is refused --------------------------------------------------------------------------------------------------

PRIVATE: dict[str, dict[str, Any]] = {
    f"DifferentialPrivacy{side}Side{kind}Clipping": {"noise_multiplier": 1.0, "num_sampled_clients": 50} | options
    for side in ("Server", "Client")
    for kind, options in {"Fixed": {"clipping_norm": 1.0}, "Adaptive": {}}.items()
}


class Logged(flower.FedAvg):
    """Somebody's own strategy that has another inside."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner


@pytest.mark.parametrize("name", PRIVATE)
def test_differential_privacy_is_refused_inside_and_outside_before_a_message_is_sent(name: str) -> None:
    private, grid = (lambda strategy: getattr(flower, name)(strategy, **PRIVATE[name])), grid_of()
    for inner in (private(flower.FedAvg()), Logged(Logged(private(flower.FedAvg())))):
        with pytest.raises(CompatibilityError, match=f"FNR cannot go together with {name}: .* would not hold"):
            FeatureNormStrategy(inner)
    with pytest.raises(CompatibilityError, match="a strategy around it: .*outermost"):
        played(private(fnr()), grid)
    assert grid.sent == []


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod, older.secagg_mod, older.secaggplus_mod])
def test_no_app_with_a_mod_outside_that_a_servers_strategy_must_know_is_refined(mod: Any) -> None:
    grid = grid_of(client_app(mod, FeatureNormMod(made, public)))
    assert len(played(fnr(), grid, rounds=1).arrays) == 0  # the mod refused the messages
    assert not orders(grid)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "twice": (lambda: FeatureNormStrategy(fnr()), CompatibilityError, "already"),
    "secure": (lambda: FeatureNormStrategy(SecAggPlusWorkflow(3, 2)), CompatibilityError, "with SecAggPlusWorkflow"),  # type: ignore[arg-type]
    "trees": (lambda: fnr(flower.FedXgbBagging()), CompatibilityError, "trees have no features"),
    "class": (lambda: fnr(flower.FedAvg), ConfigError, r"such as FedAvg\(\)"),
    "none": (lambda: FeatureNormStrategy(None), ConfigError, r"such as FedAvg\(\)"),  # type: ignore[arg-type]
    "share": (lambda: fnr(share=2), ConfigError, "share = 2"),
    "model": (lambda: FeatureNormMod(made(), public), ConfigError, "without calling it"),  # type: ignore[arg-type]
    "loader": (lambda: FeatureNormMod(made, public()), ConfigError, "must be a function"),  # type: ignore[arg-type]
    **{
        f"timeout {seconds}": (lambda seconds=seconds: fnr(timeout=seconds), ConfigError, "timeout")  # type: ignore[misc]
        for seconds in (0.0, -1.0, float("nan"), float("inf"))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_wrapped_is_refused_in_a_sentence(case: str) -> None:
    make, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        make()
