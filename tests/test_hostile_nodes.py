"""A node that answers with anything: the server goes on as its policy says and names the node."""

from __future__ import annotations

import json
import logging
import math
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch

from fake_network import FakeNetwork, nodes_of
from fnrfl.algorithms.cfedfn import Description
from fnrfl.algorithms.ktpfl import SoftPredictions
from fnrfl.algorithms.parts.generator import LabelCounts
from fnrfl.algorithms.parts.norms import Accuracy, ClassNorms
from fnrfl.algorithms.scaffold import Controlled, Scaffold
from fnrfl.config import RunConfig
from fnrfl.core.algorithm import Objective
from fnrfl.core.engine import Probe
from fnrfl.core.errors import ClientError, CompatibilityError, FnrflError
from fnrfl.core.messages import Failure
from fnrfl.core.options import NetworkOptions
from fnrfl.core.rng import generator
from fnrfl.core.training import Training
from fnrfl.core.types import Engine, LocalTask
from fnrfl.data.batches import plan
from fnrfl.data.reading import Reading
from fnrfl.data.scaling import InputMoments
from fnrfl.data.table_summary import ColumnSummary
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation import messages, remote_clients
from fnrfl.federation.agreement import (
    SiteFacts,
    SiteHolding,
    SiteSchema,
    agree_on_sites,
    as_plain,
    from_plain,
    with_counts,
)
from fnrfl.federation.handshake import HandshakeNetwork
from fnrfl.federation.messages import NodeReply, Version
from fnrfl.federation.node import AgreedRequests
from fnrfl.federation.remote_clients import Network, RemoteClients
from fnrfl.runs.result import Result
from fnrfl.runs.run import run
from fuzzing import ODD, spoilt, with_changes
from node_services import ServiceNetwork, agree
from settings import with_keys
from test_network import PROCEED, config
from test_site_nodes import schema, with_gaps
from toys import Run


@pytest.fixture(autouse=True)
def _here(tmp_cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_clients, "PAUSE", 0.0)


# -- one field at a time, through whole runs ---------------------------------------------------------------------------


def in_reply(**changed: Callable[[Any], Any]) -> Callable[[NodeReply], NodeReply]:
    def change(answer: NodeReply) -> NodeReply:
        replies = answer.content.replies
        changes = {name: made(getattr(replies, name)) for name, made in changed.items()}
        return replace(answer, content=replace(answer.content, replies=replace(replies, **changes)))

    return change


def in_answer(change: Callable[[Any], Any]) -> Callable[[NodeReply], NodeReply]:
    return lambda answer: replace(answer, content={name: change(value) for name, value in answer.content.items()})


def only(name: str, number: float) -> Callable[[NodeReply], NodeReply]:
    """Of what is measured, this alone is changed."""
    changed = lambda content: {k: full(number)(v) if k == name else v for k, v in content.items()}  # noqa: E731
    return lambda answer: replace(answer, content=changed(answer.content))


def not_finite(told: Any, **nobodys: Any) -> Callable[[NodeReply], NodeReply]:
    """A reply that says whose numbers are not finite since which step."""
    replies = lambda content: replace(content.replies, **nobodys)  # noqa: E731
    return lambda answer: replace(
        answer, content=replace(answer.content, not_finite=told, replies=replies(answer.content))
    )


NOBODY = {"clients": torch.arange(0)}


def full(number: float) -> Callable[[Any], Any]:
    return lambda t: torch.full_like(t, number)


REPLIES = {
    "mixed keys": in_reply(extras=lambda t: t | {1: torch.ones(1), "a": torch.ones(1)}),
    "a number as a name": in_reply(extras=lambda t: {1: t["delta_c"]}),
    "version of floats": lambda answer: replace(
        answer,
        memory=replace(answer.memory, round=float(answer.memory.round)),  # type: ignore[union-attr,type-var]
    ),
    "one name more": in_reply(extras=lambda t: t | {"delta_d": torch.ones(1)}),
    "one name less": in_reply(extras=lambda _: {}),
    "large version": lambda answer: replace(answer, memory=Version(10**30, 1, "0" * 64)),
    "another version": lambda answer: replace(answer, memory=Version(70, 1, "0" * 64)),
    "failure without a reason": lambda answer: replace(answer, content=Failure(None)),  # type: ignore[arg-type]
    "complex": in_reply(loss=lambda t: t.to(torch.complex64)),
    "complex extras": in_reply(extras=lambda t: {name: value.to(torch.complex64) for name, value in t.items()}),
    "float64 extras": in_reply(extras=lambda t: {name: value.double() for name, value in t.items()}),
    "travel nan": in_reply(travel=full(math.nan)),
    "travel 0": in_reply(travel=full(0.0)),
    "travel inf": in_reply(travel=full(math.inf)),
    "large model": in_reply(trained=full(3e38)),
    "second model": lambda answer: in_reply(refined=lambda _: answer.content.replies.trained)(answer),
    "large extras": in_reply(extras=lambda t: {name: full(3e38)(value) for name, value in t.items()}),
    "steps -1": in_reply(steps=full(-1)),
    "steps 10**9": in_reply(steps=full(10**9)),
    "loss -3e38": in_reply(loss=full(-3e38)),
    "loss -1": in_reply(loss=full(-1.0)),
    "examples": in_reply(examples=full(2e4)),
    "not finite": not_finite({"a": 1, 2: 3}),
    "not finite, another client": not_finite({2: 1}, **NOBODY),
    "not finite, after very many steps": not_finite({1: 10**9}, **NOBODY),
    "not finite, no mapping": not_finite(False),
    "whether memory is lost": lambda answer: replace(answer, lost_memory="yes"),  # type: ignore[arg-type]
    "no reply": lambda answer: replace(answer, content=[1, 2]),
    "somebody's objective": lambda answer: replace(answer, content=Controlled(True)),
}
NORMS = {
    "-1": in_answer(full(-1.0)),
    "1e30": in_answer(full(1e30)),
    "nan": in_answer(full(math.nan)),
    "accuracy -1": only("accuracy", -1.0),
    "accuracy 1e30": only("accuracy", 1e30),
    "norms -1": only("norms", -1.0),
    "integers": in_answer(lambda t: t.long()),
    "mixed keys": lambda answer: replace(answer, content=answer.content | {1: torch.ones(1), "a": torch.ones(1)}),
    "failure without a reason": REPLIES["failure without a reason"],
}
COUNTED = {"negative": in_answer(lambda t: -t), "twice as many": in_answer(lambda t: 2 * t), "none": in_answer(full(0))}
CASES = [
    ("scaffold", "local", REPLIES),
    ("fnr fedavg", "measure", NORMS),
    ("fedgen", "measure", COUNTED),
    *(("fedftg", "measure", {case: change}) for case, change in COUNTED.items()),  # it asks in the first round alone
    ("ktpfl", "measure", COUNTED),
]
SMALL = {"fedgen": ["algorithm.steps=2"], "fedftg": ["algorithm.iterations=1", "model=cnn"], "ktpfl": ["clients=3"]}


class Spoiling(FakeNetwork):
    """A network with a node that changes its answers of a phase."""

    changes: Sequence[Callable[[NodeReply], NodeReply]]  # one in each round
    phase: str

    def _answers(self, client: int, letter: Any, *rest: Any) -> Any:
        for who, message in super()._answers(client, letter, *rest):
            if client == 1 and letter.phase == self.phase:
                message = to_bytes(self.changes[letter.round](from_bytes(message)))
            yield who, message


def spoiling(config: RunConfig, phase: str, *changes: Callable[[NodeReply], NodeReply]) -> Spoiling:
    network = Spoiling(nodes_of(config, Path("nodes")))
    network.changes, network.phase = changes, phase
    return network


def over(network: Network, config: RunConfig, out: Path | None = None) -> Result:
    return run(with_keys(config, {"engine.name": "flower"}), out=out, network=network)


@pytest.mark.parametrize(("method", "phase", "changes"), CASES)
def test_a_client_that_breaks_a_field_is_missing_and_named(method: str, phase: str, changes: dict[str, Any]) -> None:
    """Another field in each round."""
    chosen = config(method, f"rounds={len(changes)}", "participation=1", "clients=4", *PROCEED, *SMALL.get(method, []))
    result = over(spoiling(chosen, phase, *changes.values()), chosen)
    for event, case in zip(result.rounds, changes, strict=True):
        assert list(event["missing"]) == [1] and math.isfinite(event["loss"]), case
        assert phase in event["missing"][1] and len(event["missing"][1]) < 1000, case
    assert all(tensor.isfinite().all() for tensor in result.weights.values() if tensor.is_floating_point())


def test_a_long_reason_is_cut_and_moves_no_cursor(caplog: pytest.LogCaptureFixture) -> None:
    chosen = config("fedavg", "rounds=1", "participation=1", *PROCEED)
    long = lambda answer: replace(answer, content=Failure("\x1b[2J" + "x" * 10**7))  # noqa: E731
    network = spoiling(chosen, "local", long)
    with caplog.at_level(logging.DEBUG):
        result = over(network, chosen, Path("run"))
    reason = result.rounds[0]["missing"][1]
    assert len(reason) < 700 and "\x1b" not in reason
    assert len(Path("run/events.jsonl").read_text()) < 50_000 and len(caplog.text) < 50_000
    with pytest.raises(ClientError) as told:
        over(network, config("fedavg", "rounds=1", "participation=1"))
    assert len(str(told.value)) < 1000 and "client 1" in str(told.value)


def test_indices_in_a_memory_are_not_those_of_the_server() -> None:
    chosen = config("fedbn", "rounds=1", "clients=3", "participation=1", "model=cnn(norm=batch)")
    moved = lambda tree: tree | {"places": tree["places"] + 10**6}  # noqa: E731
    result = over(spoiling(chosen, "memory", lambda answer: replace(answer, content=moved(answer.content))), chosen)
    assert 0 <= result.accuracy <= 1


@pytest.mark.parametrize("last_batch", ["run-on", "keep", "drop", "even"])
def test_the_number_of_steps_follows_from_the_number_of_examples(last_batch: Any) -> None:
    for n, batch, epochs in [(1, 1, 1), (5, 64, 3), (64, 64, 2), (65, 64, 2), (130, 7, 1), (9, 10, 0)]:
        training = Training(batch=batch, epochs=epochs, last_batch=last_batch)
        assert training.steps(n) == plan(n, training, lambda name: generator(0, name)).steps


@pytest.mark.parametrize(("name", "right"), [("running_var", False), ("running_mean", True)])
def test_a_variance_is_never_negative(name: str, right: bool) -> None:
    fields = messages.fields_like({name: torch.ones(2)})
    assert (messages.refuse_tree({name: torch.tensor([[1.0, -1.0]])}, fields) is None) == right


# -- any field of any message ------------------------------------------------------------------------------------------


class Fuzzing(Network):
    """A network on which nodes 0 and 1 answer as they should, and others with what `spoilt` makes of theirs."""

    def __init__(self, honest: Any, seed: int) -> None:
        self.honest, self.dice, self.kept, self.drawn = honest, Random(seed), dict[tuple[str, int], Any](), 0

    def exchange(self, letters: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        for client, message in letters.items():
            letter = from_bytes(message)
            key = (f"{letter.phase} {type(getattr(letter.request, 'probe', None)).__name__}", client)
            if first := key not in self.kept:
                ((_, answer),) = self.honest.exchange({client: message}, seconds)
                self.kept[key] = from_bytes(answer)
            answer = self.kept[key]
            stamp = lambda v, now=letter: v and Version(now.round, now.number, v.sha256)  # noqa: E731
            answer = replace(answer, id=letter.id, memory=stamp(answer.memory), held=stamp(answer.held))
            yield client, to_bytes(answer) if client < 2 or first else spoilt([answer], self.dice)
            self.drawn += client >= 2 and not first


def fuzz(count: int, seed: int = 0) -> tuple[int, int]:
    """(answers of hostile nodes that were drawn, those that were taken) over tasks and questions of every kind."""
    played = Run(Scaffold(), "network", dtype=torch.float32)
    clients = played.engine.clients
    assert isinstance(clients, RemoteClients)
    clients.options = played.engine.network = NetworkOptions(on_missing="proceed", retries=0, min_share=0.1)
    clients.network = network = Fuzzing(clients.network, seed)
    state, cohort = played.state, torch.arange(6)
    shared = {"c": state.extra["c"]}
    task = LocalTask(Controlled(True), "local", state, shared=shared, hold_model=True, training=Training(epochs=1))
    refine = replace(task, objective=Objective(), purpose="refine", data="public", remember=False)
    probes: list[tuple[Probe, Any]] = [
        (Accuracy(), "ranking"), (ClassNorms(4), "public"), (LabelCounts(4), "private"), (Description(4), "private"),
        (SoftPredictions(len(played.engine.pool("distill")[1]), 2.0), "distill"),
    ]  # fmt: skip
    taken = 0
    every_request = mock.patch.object(AgreedRequests, "__contains__", return_value=True)
    with played.losses(), every_request:  # more than one method asks
        while network.drawn < count:
            clients._round += 1  # every time a new round, and nothing is kept of the last one
            clients.memory.versions.clear()
            for each in (task, refine):
                replies = list(played.engine.stream(cohort, each))
                got = torch.cat([one.clients for one in replies])
                assert got.tolist()[:2] == [0, 1] and all(one.params.abs().sum().isfinite() for one in replies)
                taken += len(got) - 2
            for probe, data in probes:
                who, answers = Engine.ask(played.engine, cohort, probe, data=data)
                assert all(value.isfinite().all() for value in answers.values())
                taken += len(who) - 2
            played.engine.notes.clear()
    return network.drawn, taken


@pytest.mark.parametrize("count", [600, pytest.param(300_000, marks=pytest.mark.slow)])
def test_no_answer_stops_the_server(count: int) -> None:
    drawn, taken = fuzz(count)
    assert drawn >= count and taken < drawn / 2  # some changes change nothing


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_a_message_takes_memory_in_proportion_to_itself() -> None:
    huge = json.dumps({"0": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    text = json.dumps({"tensor": 0}).encode()
    message = b"".join([len(text).to_bytes(8, "big"), text, len(huge).to_bytes(8, "little"), huge])
    long = (2**40).to_bytes(8, "big") + b"{}"
    deep = b"[" * 10**5
    tracemalloc.start()
    for one in (message, long, len(deep).to_bytes(8, "big") + deep + to_bytes({})[10:]):
        with pytest.raises(Exception):  # noqa: B017
            from_bytes(one)
    assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    tracemalloc.stop()
    with pytest.raises(FnrflError, match="bytes"):
        from_bytes((2**24 + 1).to_bytes(8, "big") + b" " * 100)


def test_an_answer_has_no_classes_but_those_of_answers() -> None:
    with pytest.raises(KeyError):
        from_bytes(to_bytes(Controlled(True)), messages.REPLIES)
    assert from_bytes(to_bytes(Version(1, 2)), messages.REPLIES) == Version(1, 2)


# -- before the first round --------------------------------------------------------------------------------------------

ARRAYS = SiteSchema("arrays", ("0", "1"), False, False, input_shape=(2, 3), dtype="float32")
SITES = [as_plain(SiteFacts("A", {"fnrfl": "1", "torch": "2.9+cu128"}, schema=one)) for one in (schema(), ARRAYS)]
WILD: list[Any] = [*ODD, [0] * 20_000, {str(n): 1 for n in range(20_000)}, "1e999", "٣", "-", "float32", [2**20] * 9]


@pytest.mark.parametrize("count", [400, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("honest", SITES, ids=["table", "arrays"])
def test_no_facts_of_a_node_stop_the_server_but_by_a_sentence(honest: dict[str, Any], count: int) -> None:
    dice, other = Random(1), from_plain(SiteFacts, honest | {"name": "B"}, "node 1")
    for _ in range(count):
        told = with_changes(honest, dice)
        if isinstance(told, dict) and dice.random() < 0.5:
            told[dice.choice(list(told) or ["name"])] = dice.choice(WILD)
        try:
            facts = from_plain(SiteFacts, json.loads(json.dumps(told)), "node 0")
            agreement = agree_on_sites([facts, other], Reading())
            holding = with_changes({"counts": [4, 5], "data": "", "public": ""}, dice)
            holdings = [from_plain(SiteHolding, holding, "node 0"), SiteHolding((4, 5), "", "")]
            with_counts(agreement, holdings[: len(agreement.sites)])
        except FnrflError as error:
            assert len(str(error)) < 3000
            assert str(error).isprintable()


WRONG = [{"partition": -1}, {"partition": 10**30}, {"versions": {"fnrfl": "\x1b[2J"}}, {"data": "0"}]
OF_SCHEMA = [{"kind": "os"}, {"dtype": "os"}, {"input_shape": [2**60]}, {"labels": {"a": 1}}]


@pytest.mark.parametrize(
    "wrong", [*WRONG, {"name": "x" * 10**6}, *({"schema": SITES[0]["schema"] | one} for one in OF_SCHEMA)]
)
def test_facts_out_of_range_are_refused_with_the_seat(wrong: dict[str, Any]) -> None:
    with pytest.raises(FnrflError, match="node 7") as refused:
        from_plain(SiteFacts, SITES[0] | wrong, "node 7")
    assert len(str(refused.value)) < 1000 and str(refused.value).isprintable()


TORN = [b"[" * 10**5, b"\xff", b'{"a": ' + b"9" * 5000 + b"}", b" " * (2**24 + 1), b"[]"]
ODD = [b"", b"\xff" * 9, *(len(one).to_bytes(8, "big") + one + to_bytes(None)[12:] for one in TORN), to_bytes([1])]


@pytest.mark.parametrize("told", ODD, ids=range(len(ODD)))
def test_an_answer_before_the_first_round_is_refused_with_its_node(told: bytes) -> None:
    class Odd(Network):
        def exchange(self, requests: Any, seconds: Any) -> Any:
            yield from ((number, told) for number in requests)

    with pytest.raises(FnrflError, match="Node Gent") as refused:
        HandshakeNetwork(Odd(), ["Gent"]).ask("describe", "")
    assert len(str(refused.value)) < 1000


def met_with(counts: list[int], *words: str) -> Any:
    """What the server makes of three sites, of which one claims so many examples of each class."""
    config, nodes = with_gaps("client.epochs=1", *words)

    class Claiming(ServiceNetwork):
        def carry(self, node: int, message: bytes) -> bytes:
            answer = from_bytes(super().carry(node, message))
            if node == 0 and "counts" in answer.content:
                answer = replace(answer, content=answer.content | {"counts": counts})
            return to_bytes(answer)

    return agree(config, Claiming(nodes), "test.csv")


@pytest.mark.parametrize("words", [(), ("algorithm=public-share",)])
def test_a_claimed_count_takes_no_memory(words: tuple[str, ...]) -> None:
    tracemalloc.start()
    met = met_with([2**30 - 100, 2**30 - 100], *words)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**28  # an array of 2**31 labels has 16 GiB; imports are in it
    handed_out = len(met.parts.splits.public) + len(met.parts.splits.ranking) if words else 0
    assert met.parts.pool.examples.tolist()[2] == 2**31 - 200 + handed_out  # H10 comes after H2
    assert len(json.dumps(met.parts.partition.manifest() | {"splits": met.parts.splits.manifest()})) < 10_000


def test_shares_are_shown_and_a_cap_refuses_too_large_ones() -> None:
    met = met_with([10_000, 10_000])
    shares = met.agreement.shares
    assert len(shares) == 3 and any("H10" in line and "20,000" in line and "99." in line for line in shares)
    assert any("H10" in notice and "max_share" in notice for notice in met.parts.notices)
    with pytest.raises(CompatibilityError, match="H10.*max_share"):
        met_with([10_000, 10_000], "network.max_share=0.9")
    fair = met_with([10, 10], "network.max_share=0.9")
    assert not any("max_share" in notice for notice in fair.parts.notices)


def test_columns_of_one_name_are_refused_and_very_many_are_compared_fast() -> None:
    twice = schema(columns=(ColumnSummary("age", "number", 9),) * 2)
    with pytest.raises(CompatibilityError, match="node 'A'"):
        agree_on_sites([SiteFacts("A", {}, schema=twice)], Reading())
    wide = schema(columns=tuple(ColumnSummary(str(n), "number", 9) for n in range(30_000)))
    agreed = agree_on_sites([SiteFacts(name, {}, schema=wide) for name in "ABC"], Reading()).schema
    assert agreed is not None and agreed.input_shape == (30_000,)


def test_moments_that_cannot_be_are_not_accepted() -> None:
    one = {"count": torch.tensor(4)}
    zero = torch.zeros(1).double()
    honest = {"count": torch.tensor([40]), "mean": zero, "rest": zero, "m2": zero + 1}
    assert InputMoments().accepts(honest, one, 10.0)
    for name, value in (("count", 41), ("count", -1), ("m2", -1.0), ("mean", 1e39), ("rest", -1e39)):
        assert not InputMoments().accepts(honest | {name: torch.tensor([value])}, one, 10.0)
