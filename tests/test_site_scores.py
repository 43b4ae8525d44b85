"""Scores of sites on a network: those of the simulator and those by hand, whatever happens to letters and nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fnrfl.config import RunConfig
from fnrfl.core.errors import ClientError
from fnrfl.core.messages import Failure, TrainReply
from fnrfl.core.rng import numpy_generator
from fnrfl.core.types import State
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation import remote_clients
from fnrfl.federation.messages import NodeReply, NodeRequest, ScoreRequest
from fnrfl.federation.node_config import NodeConfig
from fnrfl.results.report.page import report
from fnrfl.runs.predict import evaluate
from fnrfl.runs.result import Result
from fnrfl.runs.run import load, resume, run, verify
from fnrfl.runs.setup.build import build
from node_services import ServiceNetwork, agree
from settings import with_keys
from test_site_nodes import recipe

SITES = ("Aachen", "Gent", "Lille")
KEYS = ("accuracy_site", "accuracy_site_pooled", "per_site", "per_site_interval", "worst_site")
WORDS = ("dataset=sites", "rounds=3", "client.lr=0.3", "client.epochs=2", "dataset.scale=standard")


@pytest.fixture(autouse=True)
def _here(tmp_cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_clients, "PAUSE", 0.0)
    write_all()


def write_all() -> None:
    """Three sites of different sizes and mixtures, public data and a test set."""
    Path("sites").mkdir()
    for number, (name, count) in enumerate({"Aachen": 60, "Gent": 95, "Lille": 35, "public": 40, "test": 50}.items()):
        dice = numpy_generator(number, "rows")
        y = (dice.random(count) < 0.3 + 0.1 * number).astype(int) + (dice.random(count) < 0.2)
        x = dice.normal(size=(count, 4)) + y[:, None] * (0.8 + 0.3 * number)
        np.savez(f"sites/{name}.npz" if name in SITES else f"{name}.npz", x=x.astype("f4"), y=y)


def chosen(*words: str) -> RunConfig:
    return recipe("public.source=public.npz", "model=mlp(hidden=6)", *WORDS, *words)


def site_nodes(**own: Any) -> list[NodeConfig]:
    """Nodes in another order than the clients'."""
    return [
        NodeConfig(data=f"sites/{name}.npz", name=name, public="public.npz", share_memory=True, **own)
        for name in reversed(SITES)
    ]


def over(config: RunConfig, network: ServiceNetwork | None = None, out: str | None = "there", **more: Any) -> Result:
    met = agree(with_keys(config, {"engine.name": "flower"}), network or site_nodes(), "test.npz")
    return run(met.parts.config, out=out, network=met.network, parts=met.parts, **more)


def scores(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [json.loads(json.dumps({key: event[key] for key in KEYS if key in event})) for event in rounds]


METHODS = {
    "fedavg": (), "scaffold": ("fnr=on",), "fedbn": ("model=mlp(hidden=6, norm=batch)", "fnr=on"), "local-only": (),
    "ktpfl": ("public.distill=0.5",), "cfedfn": ("algorithm.warmup=1",), "fedadam": (), "moon": (), "feddyn": (),
    "feddc": (), "fedgen": ("algorithm.steps=2",), "feddf": ("public.distill=0.5", "algorithm.steps=2"),
    "public-share": (), "public-finetune": (), "bn-recalibrate": ("model=mlp(hidden=6, norm=batch)",),
}  # fmt: skip


SLOW = {"feddf", "fedgen", "moon", "feddyn", "feddc", "public-finetune", "bn-recalibrate", "public-share", "fedadam"}


@pytest.mark.parametrize("method", [pytest.param(m, marks=pytest.mark.slow if m in SLOW else ()) for m in METHODS])
def test_sites_score_each_rounds_model_as_the_simulator_does(method: str) -> None:
    config = chosen(f"algorithm={method}", *METHODS[method])
    network, simulated = over(config), run(config, out="here")
    assert scores(network.rounds) == scores(simulated.rounds)
    assert len({str(one) for one in scores(network.rounds)}) > 1  # a test in which nothing changes shows nothing
    headers = [json.loads(Path(name, "events.jsonl").read_text().splitlines()[0]) for name in ("there", "here")]
    assert headers[0]["site_test_counts"] == headers[1]["site_test_counts"]
    assert load("there", trust=True).rounds == json.loads(json.dumps(network.rounds))


def test_scores_are_those_by_hand_of_each_rounds_model_on_the_rows_that_sites_keep() -> None:
    """With one exchange more in all, and no letter about test rows before it."""
    network = ServiceNetwork(site_nodes())
    result = over(chosen(), network)
    splits = build(chosen()).splits
    for t, event in enumerate(result.rounds):
        model = run(chosen(f"rounds={t + 1}"), out=None).model
        for client, rows in enumerate(splits.site_tests):
            with torch.no_grad():
                right = model(splits.test.x[rows]).argmax(1) == splits.test.y[rows]
            assert event["per_site"][client] == right.sum().item() / len(rows)
        assert event["accuracy_site"] == pytest.approx(np.mean(event["per_site"]))
    phases = [one.phase for one in network.seen if isinstance(one, NodeRequest)]
    assert phases == ["measure"] * 3 + ["local"] * 9 + ["score"] * 3


def test_a_site_that_is_not_asked_has_no_score_in_that_round_and_the_last_round_has_all() -> None:
    config = chosen("participation=0.67", "rounds=5", "client.dropout=0.3")
    rounds, simulated = over(config).rounds, run(config, out=None).rounds
    for now, later, there in zip(rounds, [*rounds[1:], None], simulated, strict=True):
        asked = range(3) if later is None else [c for c in later["cohort"] if c not in later.get("dropped", ())]
        assert now["per_site"] == [one if c in asked else None for c, one in enumerate(there["per_site"])]
        assert now["accuracy_site"] == pytest.approx(np.mean([there["per_site"][c] for c in asked]))
    assert any(None in event["per_site"] for event in rounds)


class Changed(ServiceNetwork):
    """A network on which a node's letters come twice, its answers are lost once, or are others than it gave."""

    def __init__(self, change: Callable[[NodeReply], NodeReply] | None = None, phase: str = "local") -> None:
        super().__init__(site_nodes(), forgetful=True)
        self.change, self.phase, self.lost = change, phase, set[bytes]()

    def exchange(self, requests: Mapping[int, bytes], seconds: float | None) -> Iterator[tuple[int, bytes | str]]:
        for node, answer in super().exchange(requests, seconds):
            letter = self.seen[-1]
            if self.change is None and requests[node] not in self.lost and isinstance(letter, NodeRequest):
                self.lost.add(requests[node])
                yield node, "its connection was lost."
                continue
            if self.change and isinstance(letter, NodeRequest) and (letter.client, letter.phase) == (1, self.phase):
                answer = to_bytes(self.change(from_bytes(answer)))
            yield node, answer
            yield node, answer


def test_repeated_letters_lost_answers_and_resumed_runs_give_the_same_scores() -> None:
    def stop(event: dict[str, Any]) -> None:
        if event["round"] == 2:
            raise LookupError

    config = chosen("algorithm=scaffold", "network.on_missing=wait")
    whole = scores(over(config).rounds)
    assert scores(over(config, Changed(), out=None).rounds) == whole
    with pytest.raises(LookupError):
        over(config, out="part", progress=stop)
    assert scores(verify(Path("part"), trust=False).events_so_far[1:]) == [whole[0], {}]  # of round 2 nobody has told
    met = agree(verify(Path("part"), trust=False).config, site_nodes(), "test.npz", forgetful=True)
    assert scores(resume("part", network=met.network, parts=met.parts).rounds) == whole
    assert scores(load("part").rounds) == whole


def with_right(right: Any) -> Callable[[NodeReply], NodeReply]:
    """An answer with another score."""

    def change(answer: NodeReply) -> NodeReply:
        content = answer.content
        return replace(answer, content=replace(content, right=right) if isinstance(content, TrainReply) else right)

    return change


WRONG = [None, torch.tensor([-1]), torch.tensor([20]), torch.tensor([1.5]), torch.tensor(3), torch.ones(2).long(), 3]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
@pytest.mark.parametrize("phase", ["local", "score"])
def test_a_score_that_breaks_the_schema_drops_its_client_by_name(phase: str, wrong: Any) -> None:
    """Gent keeps 19 rows."""
    config = chosen("network.on_missing=proceed", "network.min_share=0.1")
    result = over(config, Changed(with_right(wrong), phase))
    last = result.rounds[-1]
    assert "score" in last["missing"][1] and phase in last["missing"][1]
    assert (last["per_site"][1] is None) == (phase == "score")  # it is asked once more after the last round
    assert (result.rounds[0]["per_site"][1] is None) == (phase == "local")


@pytest.mark.parametrize(("phase", "right"), [("local", torch.tensor([5])), ("score", torch.tensor([20]))])
def test_where_nobody_may_be_missing_it_ends_the_run(phase: str, right: torch.Tensor) -> None:
    """In the first round there is no model of a round before, so nothing is to be said about one."""
    with pytest.raises(ClientError, match="score") as refused:
        over(chosen(), Changed(with_right(right), phase))
    assert (refused.value.client, refused.value.round, refused.value.stage) == (1, 1 if phase == "local" else 3, phase)


def test_scores_can_be_switched_off_at_a_node_and_in_the_recipe() -> None:
    nodes = site_nodes()
    network = ServiceNetwork([replace(nodes[0], share_scores=False), *nodes[1:]])  # Lille
    shy, whole = over(chosen(), network), over(chosen(), out=None)
    for event, other in zip(shy.rounds, whole.rounds, strict=True):
        assert event["per_site"] == [*other["per_site"][:2], None]
    assert json.loads(Path("there/events.jsonl").read_text().splitlines()[0])["site_test_counts"][2] == 0
    letters = [one for one in network.seen if isinstance(one, NodeRequest)]
    assert {one.client for one in letters if one.phase == "score"} == {0, 1}
    asked = replace(letters[-1], client=2, run=letters[-1].run)
    assert isinstance(from_bytes(network.carry(0, to_bytes(asked))).content, Failure)
    nobody = ServiceNetwork(site_nodes())
    assert scores(over(chosen("network.site_scores=false"), nobody, out=None).rounds) == [{}] * 3
    assert not any(getattr(one, "phase", "") == "score" for one in nobody.seen)


def test_a_site_scores_no_model_of_another_shape() -> None:
    network = ServiceNetwork(site_nodes())
    over(chosen(), network)
    letter = network.seen[-1]
    small = State(letter.request.model.params[:-1], letter.request.model.buffers)
    answer = from_bytes(network.carry(0, to_bytes(replace(letter, request=ScoreRequest(small)))))
    assert isinstance(answer.content, Failure)


def test_the_page_of_a_network_has_the_simulators_table_of_sites() -> None:
    over(chosen())
    run(chosen(), out="here")
    pages = [report([Path(name)], Path(f"{name}.html"), plots=False).read_text() for name in ("there", "here")]
    rows = [[part.partition("</tr>")[0] for part in page.split("<tr>") if "Gent" in part] for page in pages]
    assert rows[0] and rows[0] == rows[1]


def test_evaluating_a_sites_own_rows_says_how_many_it_trained_on() -> None:
    over(chosen())
    found = evaluate("there", "sites/Gent.npz")
    assert any("76" in note and "'Gent'" in note for note in found.notes)
    assert not any("trained on" in note for note in evaluate("there", "test.npz").notes)
