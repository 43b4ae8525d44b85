"""Clients behind a network: the same results as in one process, and no fault that goes unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_network import FAULTS, FakeNetwork, ServerKilled, nodes_of
from fnrfl.config import load
from fnrfl.core.errors import ClientError, FnrflError
from fnrfl.core.messages import MeasureRequest, TrainReply
from fnrfl.data.scaling import InputMoments
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation import remote_clients
from fnrfl.federation.messages import NodeRequest, Version
from fnrfl.federation.node import VersionedFolder, answer_bytes
from fnrfl.runs.result import Result
from fnrfl.runs.run import resume, run
from settings import with_keys

BASE = [
    "rounds=3", "clients=5", "participation=0.8", "client.epochs=1", "dataset=digits", "model=mlp",
    "engine.accelerate=false",  # recorded steps round otherwise, and a node records others than the simulator
]  # fmt: skip


def slow(*values: Any) -> list[Any]:
    return [pytest.param(*([v] if isinstance(v, str) else v), marks=pytest.mark.slow) for v in values]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_clients, "PAUSE", 0.0)


def config(method: str = "fedavg", *words: str) -> Any:
    name = method.removeprefix("fnr ")
    refined = ["fnr=on", "fnr.epochs=1"] if method.startswith("fnr ") else []
    return load("digits", [*BASE, f"algorithm={name}", *refined, *words])


def over(
    config: Any, folder: Path, kind: type[FakeNetwork] = FakeNetwork, out: Path | None = None, **faults: Any
) -> tuple[Result, FakeNetwork]:
    """A run over nodes, and their network."""
    network = kind(nodes_of(config, folder), **faults)
    return run(with_keys(config, {"engine.name": "flower"}), out=out, network=network), network


def on_loop(config: Any) -> Result:
    return run(with_keys(config, {"engine": {"name": "loop", "threads": 1}}), out=None)


def same(one: Result, other: Result) -> bool:
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("method", ["scaffold", "fnr fedavg", *slow("fedavg", "moon", "fedgen", "fnr scaffold")])
def test_a_network_changes_no_bit_and_no_byte(method: str, tmp_path: Path) -> None:
    chosen = config(method)
    there, _ = over(chosen, tmp_path)
    here = on_loop(chosen)
    assert same(there, here)
    for mine, theirs in zip(there.rounds, here.rounds, strict=True):
        assert mine["bytes"] == theirs["bytes"] and mine["accuracy"] == theirs["accuracy"]
        assert mine["wire_bytes"]["up"] >= mine["bytes_up"] and mine["wire_bytes"]["down"] > 0


# -- faults, one at a time ---------------------------------------------------------------------------------------------


@cache
def first_letter_of(phase: str, method: str, *words: str) -> int:
    """The number of the first letter of a phase in round 2."""
    seen: list[tuple[int, str]] = []

    class Listening(FakeNetwork):
        def _answers(self, client: int, letter: Any, *rest: Any) -> Any:
            seen.append((letter.round, letter.phase))
            return super()._answers(client, letter, *rest)

    with TemporaryDirectory() as folder:
        over(config(method, *words), Path(folder), Listening)
    return seen.index((1, phase))


PROCEED = ("network.on_missing=proceed", "network.min_share=0.5", "network.retries=0")


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("twice", "forgets")])
def test_a_client_that_does_not_answer_training_is_missing_and_named(fault: str, tmp_path: Path) -> None:
    at = first_letter_of("local", "fedavg")
    chosen = config("fedavg", *PROCEED, "network.train_deadline=5")
    result, network = over(chosen, tmp_path / "nodes", faults={at: fault})
    ((client, *_),) = network.met
    assert list(result.rounds[1]["missing"]) in ([str(client)], [client])
    assert all("missing" not in event for event in (result.rounds[0], result.rounds[2]))
    chosen = config("fedavg", "network.retries=0", "network.train_deadline=5")
    with pytest.raises(ClientError, match=f"client {client}, round 2, stage local: its|it "):
        over(chosen, tmp_path / "b", faults={at: fault})


@pytest.mark.parametrize("fault", ["dies-after", *slow("dies-before", "hangs", "nan", "shape")])
def test_a_refinement_that_does_not_come_leaves_the_model_of_before(fault: str, tmp_path: Path) -> None:
    words = ("network.retries=0", "network.refine_deadline=5")
    results = []
    for upload in ("fnr.upload=once", "fnr.upload=twice"):
        at = first_letter_of("refine", "fnr fedavg", upload)
        result, network = over(config("fnr fedavg", *words, upload), tmp_path / upload, faults={at: fault})
        ((client, *_),) = network.met
        assert result.rounds[1]["not_refined"] == [client] and client not in result.rounds[1]["refined"]
        assert str(result.rounds[1]["missing"][client]).startswith("refine: ")
        results.append(result)
    asked, kept = results
    assert same(asked, kept)  # from the client, which still has it, or from the server


@pytest.mark.parametrize("fault", ["hangs", *slow("dies-before", "shape")])
def test_a_client_that_cannot_be_measured_is_not_refined(fault: str, tmp_path: Path) -> None:
    at = first_letter_of("measure", "fnr fedavg")
    chosen = config("fnr fedavg", *PROCEED, "network.measure_deadline=5")
    result, network = over(chosen, tmp_path / "nodes", faults={at: fault})
    ((client, *_),) = network.met
    assert client not in result.rounds[1]["refined"] and client in result.rounds[1]["missing"]
    assert result.rounds[1]["norms"][result.rounds[1]["cohort"].index(client)] is None


def test_a_node_that_has_lost_its_memory_starts_anew_and_is_reported(tmp_path: Path) -> None:
    at = first_letter_of("local", "scaffold")
    result, network = over(config("scaffold"), tmp_path / "nodes", faults={at: "forgets"})
    ((client, *_),) = network.met
    assert result.rounds[1]["lost_memory"] == [client] and not same(result, on_loop(config("scaffold")))
    assert "lost_memory" not in result.rounds[2]


@pytest.mark.parametrize("hot", [(2,), *slow([(0, 1, 2)])])
def test_clients_that_say_they_are_not_finite_are_skipped_and_nobody_else(hot: tuple[int, ...], tmp_path: Path) -> None:
    class Hot(FakeNetwork):
        def _answers(self, client: int, letter: Any, message: bytes, *rest: Any) -> Any:
            if client in hot and letter.phase == "local":
                start = letter.request.task.start
                wild = replace(letter.request.task, start=replace(start, params=start.params * 1e30))
                message = to_bytes(replace(letter, request=replace(letter.request, task=wild)))
            return super()._answers(client, letter, message, *rest)

    result, _ = over(config("scaffold", "participation=1", "client.nonfinite=skip"), tmp_path, Hot)
    assert all(event["skipped"] == list(hot) and "missing" not in event for event in result.rounds)


@pytest.mark.parametrize("spoilt", [{"trained": torch.zeros(0, 3)}, {"refined": torch.zeros(0, 3)}, {"trained": None}])
def test_nothing_of_a_reply_is_used_that_says_it_is_not_finite(spoilt: dict[str, Any], tmp_path: Path) -> None:
    """Whatever else is in it, the server goes on without this client."""

    class Spoiling(FakeNetwork):
        def _answers(self, client: int, letter: Any, *rest: Any) -> Any:
            for who, message in super()._answers(client, letter, *rest):
                answer = from_bytes(message)
                if client == 1 and letter.phase == "local":
                    replies = replace(answer.content.replies.pick(slice(0, 0)), **spoilt)
                    message = to_bytes(replace(answer, content=TrainReply(replies, {client: 3})))
                yield who, message

    result, _ = over(config("fedavg", "participation=1", "client.nonfinite=skip"), tmp_path, Spoiling)
    assert all(event["skipped"] == [1] and "missing" not in event for event in result.rounds)


def test_a_request_names_what_its_client_remembered_when_the_round_began(tmp_path: Path) -> None:
    """A node keeps that: a server that is started again goes back to it."""
    seen: list[NodeRequest] = []

    class Listening(FakeNetwork):
        def _answers(self, client: int, letter: Any, *rest: Any) -> Any:
            seen.append(letter)
            return super()._answers(client, letter, *rest)

    over(config("scaffold", "participation=1", "rounds=2"), tmp_path, Listening)
    assert [(one.kept is not None, one.kept == one.memory) for one in seen] == [(False, True)] * 5 + [(True, True)] * 5


def test_a_memory_that_was_lost_is_never_scored_as_a_newborn_one(tmp_path: Path) -> None:
    at = first_letter_of("memory", "local-only")
    with pytest.raises(FnrflError, match="it no longer has what it remembered"):
        over(config("local-only"), tmp_path, faults={at: "forgets"})


def test_a_damaged_file_of_a_node_is_not_read(tmp_path: Path) -> None:
    kept = VersionedFolder(tmp_path)
    version = kept.write(Version(0, 1), {"c": torch.zeros(3)})
    assert kept.read(version) is not None
    kept.write(Version(0, 1), {"c": torch.ones(3)})  # a whole file, and not the one that the server knows of
    assert kept.read(version) is None


def test_a_letter_that_cannot_be_read_or_is_not_agreed_on_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = nodes_of(config(), tmp_path)(0, "run")
    letter = NodeRequest("run", "letter-7", 0, 0, 1, "measure", MeasureRequest([0], 0, InputMoments(), "private"))
    answer = from_bytes(answer_bytes(to_bytes(letter), node.answer))
    assert "agreed method" in answer.content.reason and answer.id == letter.id
    answer = from_bytes(answer_bytes(to_bytes(letter).replace(b"Moments", b"Momentz"), node.answer))
    assert "refused" in answer.content.reason and answer.id == letter.id
    assert "InputMomentz" in caplog.text  # in the node's own log


def test_the_server_hears_of_a_full_disk_and_of_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/srv/secret/memory")

    monkeypatch.setattr(VersionedFolder, "write", full)
    with pytest.raises(ClientError, match="file at the node cannot be used: No space left") as told:
        over(config("scaffold"), tmp_path)
    assert "secret" not in str(told.value)


def test_too_few_answers_stop_the_run_with_a_sentence(tmp_path: Path) -> None:
    at = first_letter_of("local", "fedavg")
    faults = {at + k: "dies-before" for k in range(3)}
    with pytest.raises(ClientError, match=r"1 of 4 clients have answered, and network.min_share = 0.5"):
        over(config("fedavg", *PROCEED), tmp_path / "nodes", faults=faults)


KILLED = [(method, at) for method in ("moon", "fedgen", "fnr scaffold") for at in (1, 5, 9, 11)]


@pytest.mark.parametrize(("method", "at"), [("scaffold", 5), *slow(*KILLED)])
def test_a_server_that_is_killed_goes_on_and_nodes_follow(method: str, at: int, tmp_path: Path) -> None:
    chosen = with_keys(config(method), {"engine.name": "flower"})
    network = FakeNetwork(nodes_of(chosen, tmp_path / "nodes"), kills_server_at={at})
    with pytest.raises(ServerKilled):
        run(chosen, out=tmp_path / "run", network=network)
    result = resume(tmp_path / "run", network=network)
    assert same(result, on_loop(chosen))
    rounds = [json.loads(line).get("round") for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert rounds == [None, 1, 2, 3]


# -- faults, many at once ----------------------------------------------------------------------------------------------


@st.composite
def schedules(draw: Any) -> dict[str, Any]:
    faults = draw(st.dictionaries(st.integers(0, 60), st.sampled_from(FAULTS), max_size=12))
    return {"faults": faults, "kills_server_at": draw(st.sets(st.integers(0, 60), max_size=3))}


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    schedule=schedules(),
    method=st.sampled_from(["fedavg", "scaffold", "fnr fedavg"]),
    policy=st.sampled_from(["fail", "wait", "proceed"]),
    retries=st.integers(0, 2),
)
def test_no_schedule_of_faults_hangs_or_gives_a_wrong_result_in_silence(
    schedule: dict[str, Any], method: str, policy: str, retries: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("schedule")
    deadlines = [f"network.{phase}_deadline=5" for phase in ("train", "refine", "measure")]
    chosen = config(method, f"network.on_missing={policy}", *deadlines, f"network.retries={retries}")
    chosen = with_keys(chosen, {"engine.name": "flower"})
    network = FakeNetwork(nodes_of(chosen, folder / "nodes"), **schedule)
    result = None
    go = lambda: run(chosen, out=folder / "run", network=network)  # noqa: E731
    for _ in range(5):  # a server that was killed is started again
        try:
            result = go()
            break
        except ServerKilled:
            begun = (folder / "run" / "config.toml").exists()
            go = (lambda: resume(folder / "run", network=network)) if begun else go
        except (ClientError, FnrflError) as error:
            assert network.met and "client" in str(error)  # named, and there was a fault
            return
    assert result is not None
    lines = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines[1:]] == [1, 2, 3]
    told = any({"missing", "not_refined", "lost_memory"} & line.keys() for line in lines)
    assert told or same(result, on_loop(chosen))
