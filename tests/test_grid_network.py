"""Letters over Flower's Grid: who is where, nodes that are started again, errors, and what Flower adds in bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict

from flower_grid import DirectGrid
from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.flower import grid_network
from fnrfl.flower.client_app import WHO, client_app, packed, unpacked, weight
from fnrfl.flower.grid_network import GridNetwork
from fnrfl.flower.worker import WorkerLink

pytestmark = pytest.mark.slow  # they need Flower


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectGrid:
    """Three nodes whose workers turn letters around; node 11 is client 0, and so on."""
    monkeypatch.setattr(WorkerLink, "ask", lambda self, letter: letter[::-1])
    monkeypatch.setattr(grid_network, "ASK_AGAIN", 0.2)
    made = DirectGrid({11: client_app(), 12: client_app(), 13: client_app()})
    for client, node in enumerate(made.apps):
        (tmp_path / str(client)).mkdir()
        given = {"folder": str(tmp_path / str(client)), "partition-id": client}
        made.contexts[node] = Context(1, node, given, RecordDict(), {})  # type: ignore[arg-type]
    return made


def network(grid: DirectGrid) -> GridNetwork:
    made = GridNetwork(grid)
    made.labels = made.wait_for(3)
    return made


LETTERS = {0: b"abc", 1: b"", 2: os.urandom(100_000)}
ANSWERS = {client: letter[::-1] for client, letter in LETTERS.items()}


def test_letters_reach_the_client_that_they_are_for(grid: DirectGrid) -> None:
    there = network(grid)
    assert there.nodes == {"0": 11, "1": 12, "2": 13}
    assert dict(there.exchange(LETTERS, None)) == ANSWERS
    assert len(grid.sent) == 6  # nobody was asked twice
    assert there.carried["letters_down"] == there.carried["letters_up"] == sum(map(len, LETTERS.values()))
    assert 0 < there.carried["flower_down"] - there.carried["letters_down"] < 3 * 800


def test_flower_adds_a_few_hundred_bytes_however_long_a_letter_is() -> None:
    sizes = [weight(Message(packed(os.urandom(n)), 1, "train")) - n for n in (100, 100_000, 3_000_000)]
    assert max(sizes) < 800 and max(sizes) - min(sizes) < 100


def test_a_client_is_found_at_another_node(grid: DirectGrid) -> None:
    there = network(grid)
    grid.apps[99], grid.contexts[99] = grid.apps.pop(12), grid.contexts.pop(12)
    grid.tamper = lambda message, reply: [] if message.metadata.dst_node_id == 12 else [reply]
    real = grid._answer
    grid._answer = lambda m: real(m) if m.metadata.dst_node_id in grid.apps else m  # type: ignore[method-assign]
    assert dict(there.exchange(LETTERS, 30)) == ANSWERS
    assert there.nodes["1"] == 99


def test_who_does_not_answer_is_left_out_when_the_time_is_over(grid: DirectGrid) -> None:
    there = network(grid)
    grid.tamper = lambda message, reply: [] if message.metadata.dst_node_id == 13 else [reply]
    assert dict(there.exchange(LETTERS, 1.0)) == {0: b"cba", 1: b""}


def test_a_node_cannot_pass_for_another_client(grid: DirectGrid, caplog: pytest.LogCaptureFixture) -> None:
    """Nodes that were registered under a name must be that client."""
    names = {11: "0", 12: "1", 13: "0"}

    class Registered(DirectGrid):
        def get_nodes(self) -> Iterable[Any]:
            return [SimpleNamespace(node_id=node, name=name) for node, name in names.items()]

    grid.__class__ = Registered
    assert dict(GridNetwork(grid, labels=["0", "1", "2"]).exchange(LETTERS, 1.0)) == {0: b"cba", 1: b""}
    assert "registered as 0 says that it is 2" in caplog.text


def test_a_node_that_does_not_say_who_it_is_stops_nobody(grid: DirectGrid, caplog: pytest.LogCaptureFixture) -> None:
    silent = lambda one: one.metadata.message_type == WHO and one.metadata.dst_node_id == 13  # noqa: E731
    grid.tamper = lambda message, reply: [Message(RecordDict(), reply_to=message) if silent(message) else reply]
    assert dict(GridNetwork(grid, labels=["0", "1", "2"]).exchange(LETTERS, 1.0)) == {0: b"cba", 1: b""}
    assert "Node 13 does not say" in caplog.text


class SlowGrid(DirectGrid):
    """Nodes take one message after the other, and `seconds` for a letter."""

    seconds = 0.5

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self.free: dict[int, float] = getattr(self, "free", {})  # when a node will have done what it has
        self.due: dict[str, float] = getattr(self, "due", {})
        sent = list(messages)
        ids = list(super().push_messages(sent))
        for message, one in zip(sent, ids, strict=True):
            node = message.metadata.dst_node_id
            takes = self.seconds if message.metadata.message_type.startswith("train") else 0.0
            self.due[one] = self.free[node] = max(self.free.get(node, 0.0), time.monotonic()) + takes
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return super().pull_messages([one for one in message_ids if self.due[one] <= time.monotonic()])


def letters_of(grid: DirectGrid) -> list[int]:
    """The nodes to which letters went."""
    return [one.metadata.dst_node_id for one in grid.sent if one.metadata.message_type.startswith("train")]


def test_a_client_that_is_slower_than_its_deadline_gets_a_letter_once_and_its_reply_counts(grid: DirectGrid) -> None:
    grid.__class__ = SlowGrid
    there = network(grid)
    assert list(there.exchange({0: b"abc"}, 0.2)) == []
    tries = (list(there.exchange({0: b"abc"}, 0.2)) for _ in range(20))
    assert next(filter(None, tries)) == [(0, b"cba")]
    assert letters_of(grid) == [11]
    assert there._under_way == {}


def test_a_late_reply_is_none_to_a_newer_letter(grid: DirectGrid) -> None:
    grid.__class__ = SlowGrid
    there = network(grid)
    assert list(there.exchange({0: b"old", 1: b"old"}, 0.1)) == []
    assert sorted(there.exchange({0: b"new", 1: b"old"}, 30)) == [(0, b"wen"), (1, b"dlo")]
    assert letters_of(grid) == [11, 12, 11]
    assert there._under_way == {}


def test_a_letter_that_a_node_has_lost_is_sent_again_in_a_later_exchange(grid: DirectGrid) -> None:
    """A node that answers a question asked after the letter went was started again meanwhile."""
    there = network(grid)
    grid.tamper = lambda message, reply: []
    assert list(there.exchange({1: b"abc"}, 0.1)) == []
    grid.tamper = lambda message, reply: [reply]
    assert list(there.exchange({1: b"abc"}, 30)) == [(1, b"cba")]
    assert letters_of(grid) == [12, 12]
    assert there._under_way == {}  # also the one that was lost


def test_a_letter_that_failed_is_sent_again_at_once(grid: DirectGrid) -> None:
    there = network(grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerLink, "ask", lambda self, letter: 1 / 0)
        ((client, why),) = there.exchange({0: b"abc"}, 30)  # the reason for which there is no answer
        assert client == 0 and "division" in str(why)
    assert list(there.exchange({0: b"abc"}, 30)) == [(0, b"cba")]


# -- who takes part ---------------------------------------------------------------------------------------------------


def say(grid: DirectGrid, *labels: str | int) -> GridNetwork:
    """A network whose nodes say that they are these: numbers of partitions, or names."""
    for context, label in zip(grid.contexts.values(), labels, strict=True):
        del context.node_config["partition-id"]
        context.node_config["partition-id" if isinstance(label, int) else "name"] = label
    return GridNetwork(grid)


@pytest.mark.parametrize("labels", [(0, 1, 1), ("here", "there", "there")])
@pytest.mark.parametrize("count", [2, 3])
def test_two_nodes_that_say_they_are_the_same_client_are_refused(
    grid: DirectGrid, labels: tuple[Any, ...], count: int
) -> None:
    with pytest.raises(ConfigError, match=rf"Two nodes say that they are {labels[2]}\. .* node\.toml"):
        say(grid, *labels).wait_for(count)


def test_a_node_that_is_started_again_under_another_number_is_no_second_one(grid: DirectGrid) -> None:
    """Flower still counts the stopped one as online."""
    there = say(grid, 0, 1, 1)
    grid.tamper = lambda message, reply: [reply] if message.metadata.dst_node_id != 12 or not there.nodes else []
    assert there.wait_for(2) == ["0", "1"]
    assert there.nodes["1"] == 13


def test_nodes_of_a_larger_experiment_are_left_out(grid: DirectGrid) -> None:
    assert say(grid, 2, 0, 1).wait_for(2) == ["0", "1"]


def test_more_sites_than_the_run_has_are_refused(grid: DirectGrid) -> None:
    with pytest.raises(ConfigError, match=r"3 nodes are there \(Linz, Wien, York\), and the run has 2\. Set clients"):
        say(grid, "Wien", "York", "Linz").wait_for(2)


def test_a_message_of_another_app_has_no_letter_in_it() -> None:
    with pytest.raises(FnrflError, match="no request"):
        unpacked(Message(RecordDict(), 1, "train"))
