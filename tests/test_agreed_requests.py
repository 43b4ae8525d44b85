"""A node obeys the agreed method and its own configuration alone, whatever a hostile server sends."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.ktpfl import SoftPredictions
from fnrfl.algorithms.local_only import GoingOn
from fnrfl.algorithms.parts.norms import Accuracy
from fnrfl.config import load, registry
from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import ClientError, ConfigError
from fnrfl.core.messages import Failure, MeasureRequest, MemoryRequest, TrainReply, TrainRequest
from fnrfl.core.rng import numpy_generator
from fnrfl.core.trees import leaves
from fnrfl.core.types import Batch, LocalTask, Out, Probe, State, Tree
from fnrfl.data.batches import Pool
from fnrfl.engines.rehearsal import Rehearsal
from fnrfl.engines.wire import from_bytes, to_bytes, to_parts
from fnrfl.federation import node
from fnrfl.federation.agreement import Agreement, as_plain, from_plain
from fnrfl.federation.handshake import Handshake
from fnrfl.federation.messages import HandshakeRequest, NodeRequest
from fnrfl.federation.node import AgreedRequests
from fnrfl.federation.node_config import NodeConfig
from fnrfl.federation.node_service import NodeService
from fnrfl.runs.run import run
from fnrfl.runs.setup.build import Built, build, gather_parts
from fnrfl.runs.setup.engine import RunNetwork
from fuzzing import from_text, spoilt
from node_services import ServiceNetwork, agree, begin, content, describe
from settings import with_keys
from test_network import config as network_config
from test_network import on_loop, same
from test_nodes import digits, four

PLANTED = 0.7310577154159546  # in every row of a training part, as a float32 has it
PLANTED_TEST = -0.2689414322376251  # in every row of a test part
WORDS = (
    "scenario=natural", "dataset=sites", "public.source=public.npz", "validation.size=0", "model=mlp(hidden=4)",
    "client.augment=none", "client.batch=4", "client.epochs=2", "rounds=2", "dataset.scale=none",
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("tmp_cwd")


def write_sites(folder: Path, test_seed: int = 0) -> None:
    """Two sites with test parts of their own, which `test_seed` changes, and public data."""
    folder.mkdir(exist_ok=True)
    for number, site in enumerate(("a", "b")):
        dice, tests = numpy_generator(number, "site"), numpy_generator(number, test_seed, "test")
        x, x_test = dice.normal(size=(12, 3)).astype("f4"), tests.normal(size=(8, 3)).astype("f4")
        x[:, 1], x_test[:, 1] = PLANTED, PLANTED_TEST
        np.savez(
            folder / f"{site}.npz", x_train=x, y_train=np.arange(12) % 2, x_test=x_test, y_test=tests.permutation(8) % 2
        )
    dice = numpy_generator(9, "public")
    for name in ("public", "test"):
        np.savez(f"{name}.npz", x=dice.normal(size=(20, 3)).astype("f4"), y=np.arange(20) % 2)


def sites(*words: str, folder: str = "sites", **own: Any) -> Handshake:
    """What was agreed on with two sites."""
    if not Path(folder).exists():
        write_sites(Path(folder), test_seed=int(folder == "other"))
    nodes = [NodeConfig(data=f"{folder}/{name}.npz", name=name, public="public.npz", **own) for name in ("a", "b")]
    network = Carrier(nodes, Path(mkdtemp(dir=".")))
    return agree(load(None, [*WORDS, *words, "engine=flower"]), network, "test.npz")


class Carrier(ServiceNetwork):
    """A network of nodes, which keeps what it has carried to node 0."""

    def __init__(self, nodes: Sequence[NodeConfig], folder: Path) -> None:
        super().__init__(nodes, folder)
        self.letters, self.answers = list[bytes](), list[bytes]()

    def carry(self, node: int, message: bytes) -> bytes:
        answer = super().carry(node, message)
        if node == 0 and isinstance(from_bytes(message), NodeRequest):
            self.letters.append(message)
            self.answers.append(answer)
        return answer

    def send(self, letter: bytes, node: int = 0) -> bytes:
        return self.services[node].answer(letter)

    def ask(self, request: Any) -> Any:
        """What client 0 answers to a request that somebody has made up."""
        letter = NodeRequest("agreed", "1", 0, getattr(request, "round", 0), 9, "local", request)
        return content(self.send(to_bytes(letter)))

    def letter(self, phase: str = "local") -> Any:
        """The last letter of a phase to client 0."""
        return [one for one in map(from_bytes, self.letters) if one.phase == phase][-1]

    def last(self, phase: str = "local", **changed: Any) -> Any:
        """What client 0 answers to that letter, changed."""
        letter = self.letter(phase)
        return content(self.send(to_bytes(replace(letter, request=replace(letter.request, **changed)))))


def carried(*words: str, folder: str = "sites", **own: Any) -> tuple[Carrier, Built]:
    """A network after a whole run, and the server's side of it."""
    met = sites(*words, folder=folder, **own)
    built = build(met.parts.config, connection=RunNetwork(met.network, "agreed"), parts=met.parts)
    with built.engine as engine:
        state = built.algorithm.init(built.net)
        for t in range(2):
            engine.begin(t)
            state = built.algorithm.round(state, torch.arange(2), engine)
        if built.splits.site_tests:
            engine.score_at_sites(lambda _: state)
    return met.network.network, built


# -- what was possible -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows(Probe):
    """A question for the examples themselves, by way of the model's answers to them."""

    size: int

    def __call__(self, out: Out, batch: Batch) -> Tree:
        return {"rows": batch.x.new_zeros(self.size, 3).index_add(0, batch.index, batch.x)}


@pytest.mark.parametrize("data", ["test", "validation", "private"])
def test_no_task_and_no_question_reaches_data_that_the_method_does_not_ask_about(data: Any) -> None:
    network, built = carried("algorithm=ktpfl", "public.distill=0.5")
    start, training = State(*built.net.flatten()), built.engine.training
    for probe in (SoftPredictions(12, 1.0), Rows(12), Accuracy()):
        assert isinstance(network.ask(MeasureRequest([0], 0, probe, data, start)), Failure)
    if data != "private":  # which is trained on, as agreed
        task = LocalTask(GoingOn(), "local", data=data, send_model=False, hold_model=True)
        assert isinstance(network.ask(TrainRequest([0], 0, task, training, [training.epochs])), Failure)


def test_a_model_that_stays_with_its_client_is_not_sent_because_a_server_asks_for_it() -> None:
    network, built = carried("algorithm=local-only")
    task = network.letter("keep").request.task
    assert network.last("keep").replies.params.numel() == 0
    for changed in (replace(task, send_model=True), replace(task, objective=Objective(), start=None, send_model=True)):
        assert isinstance(network.last("keep", task=changed), Failure)
    assert isinstance(network.ask(MemoryRequest(0)), Failure)


def test_layers_of_the_clients_own_are_not_sent_because_a_server_leaves_their_names_out() -> None:
    network, _ = carried("algorithm=fedbn", "model=mlp(hidden=4, norm=batch)")
    task = network.letter().request.task
    assert task.never_sent and isinstance(network.last(task=replace(task, never_sent=frozenset())), Failure)


@pytest.mark.parametrize(("method", "shown"), [("scaffold", False), ("local-only", True)])
def test_a_node_shows_no_memory_that_the_method_does_not_need_to_score(method: str, shown: bool) -> None:
    network, _ = carried(f"algorithm={method}", share_memory=True)
    assert isinstance(network.ask(MemoryRequest(0)), Failure) != shown


@pytest.mark.parametrize("change", [{"lr": -1.0}, {"lr": 3.0}, {"batch": -1}, {"batch": 10**9}, {"epochs": 10**6}])
def test_a_task_is_no_longer_and_no_other_than_agreed(change: dict[str, Any]) -> None:
    network, _ = carried()
    training = replace(network.letter().request.training, **change)
    longer = {"training": training, "epochs": [training.epochs]}
    began = time.process_time()
    for changed in (longer, {"epochs": [change.get("epochs", 3)]}, longer | {"max_steps": 1}):
        assert isinstance(network.last(**changed), Failure)
    assert time.process_time() - began < 5 and not isinstance(network.last(), Failure)


def test_a_recipe_that_asks_for_more_work_than_a_node_accepts_is_refused() -> None:
    with pytest.raises(ClientError, match="max_examples"):
        carried("client.epochs=4", max_examples=51)  # 4 passes over 12 examples, and the last batch
    carried("client.epochs=4", max_examples=52)
    with pytest.raises(ClientError, match="max_examples"):
        carried("client.epochs=5000000")


# -- a hostile server --------------------------------------------------------------------------------------------------

METHODS = {
    "fedavg": ("fnr=on", "client.stragglers=0.5"),
    "local-only": (),
    "fedbn": ("fnr=on", "model=mlp(hidden=4, norm=batch)"),
    "scaffold": (),
    "ktpfl": ("public.distill=0.5",),
    "fedgen": ("algorithm.steps=2",),
    "fedftg": ("algorithm.iterations=1",),
    "feddf": ("fnr=on", "public.distill=0.5", "algorithm.steps=2"),
    "cfedfn": ("fnr=on",),
    "moon": ("fnr=on", "dataset.scale=standard"),
}


def numbers(answer: bytes) -> Any:
    """All that an answer says, but for the letter that it answers, and how many test rows were answered right."""
    read = from_bytes(answer)
    content = read.content.replies if isinstance(read.content, TrainReply) else read.content
    content = {"right": content * 0} if isinstance(content, torch.Tensor) else content
    said = content.reason if isinstance(content, Failure) else [t.numpy().tobytes() for t in leaves(content)]
    return said, read.memory, read.held, read.lost_memory


def form(answer: bytes) -> Any:
    """All that an answer has, but for the numbers in its tensors."""
    content = from_bytes(answer).content
    right = content if isinstance(content, torch.Tensor) else getattr(content, "right", None)
    if right is not None:
        assert right.shape == (1,) and right.dtype == torch.int64 and 0 <= right <= 8  # the agreed score
    if isinstance(content, torch.Tensor):
        return ("right",)
    if isinstance(content, TrainReply):
        assert not content.missing and not content.notes and content.replies.refined is None
        trees = {name: value for name, value in vars(content.replies).items() if not content.not_finite}
        content = {"reply": torch.zeros(0)} | {k: v for k, v in trees.items() if isinstance(v, torch.Tensor)}
        content |= {f"{k} {name}": v for k, t in trees.items() if isinstance(t, dict) for name, v in t.items()}
    return tuple((name, tuple(value.shape), value.dtype) for name, value in sorted(content.items()))


@pytest.mark.parametrize("examples", [80, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_whatever_a_server_sends_nothing_leaves_but_what_the_method_sends(
    method: str, examples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes whose test rows differ answer alike to every letter, and in no other form than in an honest run."""
    words = (f"algorithm={method}", *METHODS[method])
    (network, _), (twin, _) = carried(*words), carried(*words, folder="other")
    assert list(map(numbers, network.answers)) == list(map(numbers, twin.answers))
    honest = {form(answer) for answer in network.answers} | {(("reply", (0,), torch.float32),)}
    planted = [np.array(value, kind).tobytes() for value in (PLANTED, PLANTED_TEST) for kind in ("f4", "f8")]
    planted += [str(value)[:7].encode() for value in (PLANTED, PLANTED_TEST)]
    letters, answered = list(map(from_bytes, network.letters)), 0

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.integers(0, 2**40))
    def check(seed: int) -> None:
        nonlocal answered
        dice = random.Random(seed)
        letter = spoilt(letters, dice) if dice.random() < 0.95 else dice.randbytes(dice.randrange(300))
        answer = network.send(letter)
        assert numbers(answer) == numbers(twin.send(letter)) and not any(value in answer for value in planted)
        if not isinstance(from_bytes(answer).content, Failure):
            assert form(answer) in honest
            answered += 1
        capsys.readouterr()

    check()
    assert answered  # what is agreed on is still answered
    questions = [one for one in network.seen if isinstance(one, HandshakeRequest)]
    for seed in range(examples // 4):
        content(network.services[0].answer(spoilt(questions, random.Random(seed))))  # nothing is raised


# -- how much work a message makes -------------------------------------------------------------------------------------


def test_the_search_for_a_request_that_nobody_makes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 600 clients under FNR, one for each number of those that answer, would take half a minute."""
    monkeypatch.setattr(node, "MOST_REHEARSALS", 3)
    parts = gather_parts(digits())
    crowd = SimpleNamespace(num_classes=10, examples=torch.full((600,), 50), all=parts.pool.all)
    played = Rehearsal(FNR(FedAvg()), parts.net, crowd, parts.config.client, simulated=False)  # type: ignore[arg-type]
    agreed, begun = AgreedRequests(played, 1, cohort=600, rounds=9), list[int]()
    monkeypatch.setattr(played, "begin", lambda t, begin=played.begin: begin(begun.append(t) or t))
    assert MeasureRequest([1], 5, Accuracy(), "test") not in agreed
    assert begun == [0, 5, 5, 5]
    assert MeasureRequest([1], 5, Accuracy(), "ranking") in agreed and len(begun) == 4
    assert MeasureRequest([1], 5, Accuracy(), "test") not in agreed and len(begun) == 7  # it has gone on from there


def test_a_letter_with_very_many_tensors_for_an_id_is_refused_at_once() -> None:
    network, _ = carried()
    text, tensors = to_parts(from_bytes(network.letters[-1]))
    plain = json.loads(text)
    (place,) = [one for one in plain["fields"] if one[0] == "id"]
    place[1] = [{"tensor": len(tensors) + n} for n in range(20_000)]
    began = time.process_time()
    answer = network.send(from_text(json.dumps(plain).encode(), [*tensors, *torch.zeros(20_000, 1)]))
    assert time.process_time() - began < 2 and isinstance(from_bytes(answer).content, Failure)


def test_a_recipe_that_takes_long_to_read_is_not_read() -> None:
    began, said = time.process_time(), refusal(service(), "a." * 50_000 + "a = 1")
    assert time.process_time() - began < 1 and "32,768 are the most" in said


def test_an_agreement_with_very_many_sites_or_classes_is_refused() -> None:
    met = sites()
    plain = as_plain(met.agreement)
    classes = plain["schema"] | {"classes": ["0"] * 20_000}
    for more in ({"sizes": [1] * 20_000}, {"sites": [*"ab"] * 10_000}, {"schema": classes}):
        with pytest.raises(ConfigError, match="at most 10000"):
            from_plain(Agreement, plain | more, "the server")


# -- honest runs -------------------------------------------------------------------------------------------------------


def test_every_request_of_a_whole_run_is_expected_without_a_look_at_private_data(monkeypatch: Any) -> None:
    """Of each method, bare and under FNR."""
    parts = gather_parts(digits("public.distill=0.2", "model=cnn", "client.stragglers=0.5", "client.epochs=2"))
    real = Pool.take

    def take(pool: Pool, data: str, *rest: Any) -> Any:
        assert data not in ("private", "test")
        return real(pool, data, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Pool, "take", take)
    monkeypatch.setattr(Pool, "plan", None)
    for name in registry.algorithms():
        for refined in (False, True):
            inner = registry.load_method(name)()
            method = FNR(inner) if refined else inner
            if "batchnorm" in method.needs:
                continue
            rehearsal = Rehearsal(method, parts.net, parts.pool, parts.config.client, simulated=False)
            agreed = AgreedRequests(rehearsal, 1, cohort=4, rounds=9)
            nobodys = MeasureRequest([1], 5, Rows(3), "test")
            assert nobodys not in agreed
            kinds = {type(one) for one in agreed._known}
            assert kinds or not method.trains_clients


CHANGES = [
    ("fnr fedavg", "fnr.when=local"), ("fnr fedavg", "fnr.when=both"), ("fnr scaffold", "fnr.upload=twice"),
    ("fnr fedavg", "fnr.penalty=literal", "client.dropout=0.4", "participation=1"),
    ("fnr cfedfn", "participation=1", "fnr.share=0.5"), ("fedftg", "client.dropout=0.4", "algorithm.iterations=1"),
    ("fnr fedavg", "client.stragglers=0.5", "client.epochs=3", "client.lr_decay=0.9"),
    ("ktpfl", "public.distill=0.2"), ("fnr ktpfl", "public.distill=0.2", "algorithm.exchange=weights"),
    ("feddf", "algorithm.steps=5"), ("fnr fedbn", "model=mlp(norm=batch)"), ("fnr local-only",),
    ("scaffold", "algorithm.variates=I"), ("fedavg", "dataset.scale=standard"),
]  # fmt: skip


@pytest.mark.parametrize("case", CHANGES, ids=" ".join)
def test_nodes_follow_each_method_and_option_to_the_simulators_bits(case: tuple[str, ...], tmp_path: Path) -> None:
    chosen = network_config(*case)
    nodes = [NodeConfig(data="digits", partition=k, share_memory=True) for k in range(5)]
    there = with_keys(chosen, {"engine.name": "flower"})
    met = agree(there, nodes, folder=tmp_path / "nodes")
    result, simulated = run(there, out=None, network=met.network, parts=met.parts), on_loop(chosen)
    assert [one["accuracy"] for one in result.rounds] == [one["accuracy"] for one in simulated.rounds]
    assert "fedbn" in case[0] or same(result, simulated)  # a server does not have its clients' BatchNorm layers


# -- code, and what is said of errors ----------------------------------------------------------------------------------


def named(model: str) -> str:
    return digits().to_toml().replace('"mlp(hidden=8)"', f'"{model}"')


def service(**values: Any) -> NodeService:
    given = {k: v for k, v in ({"data": "digits", "partition": 0} | values).items() if v is not None}
    return NodeService(lambda: NodeConfig.from_values(given), Path("runs").absolute())


def refusal(node: NodeService, recipe: str) -> str:
    return str(content(node.answer(describe(recipe))).reason)


def test_a_server_does_not_learn_which_modules_a_node_has() -> None:
    Path("here.py").write_text("raise RuntimeError('ran')\n")
    said = {
        refusal(service(), named(name))
        for name in ("here:make", "nowhere:make", "json:loads", "this:d", "os.path:join", "here:make(hidden=3)")
    }
    assert len(said) == 1 and str(Path.cwd()) not in said.pop()


@pytest.mark.parametrize(
    "raised", ["ValueError('Meyer')", "OSError(2, 'Meyer', '/srv/Meyer')", "OSError('Meyer')", "RuntimeError(open)"]
)
def test_no_error_at_a_node_quotes_its_data_code_or_paths(raised: str) -> None:
    Path("mine.py").write_text(f"def rows():\n    raise {raised}\n")
    whole, named = {"data": "mine:rows"}, {"data": "mine:rows", "name": "a", "partition": None}
    for values in (whole, {"data": "/srv/Meyer.csv"}, named):
        said = refusal(service(**values), digits().to_toml())
        assert "Meyer" not in said and str(Path.cwd()) not in said and "mine" not in said


def test_a_server_writes_nothing_but_plain_text_into_a_nodes_log(caplog: pytest.LogCaptureFixture) -> None:
    network, _ = carried()
    head = [["run", "agreed"], ["round", 0], ["phase", "local"], ["request", None]]
    text = json.dumps({"class": "\x1b[2J\nround 1", "fields": head}).encode()
    with caplog.at_level(logging.DEBUG):
        network.send(from_text(text, []))
    assert "round 1" in caplog.text and "\x1b" not in caplog.text and len(caplog.text.splitlines()) == 1


def test_an_error_in_training_stays_at_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = carried()

    def broken(*_: Any) -> Any:
        raise IndexError("row 3 holds 61.5")

    monkeypatch.setattr(Objective, "loss", broken)
    said = network.last()
    assert isinstance(said, Failure) and "61.5" not in said.reason and "IndexError" not in said.reason


@pytest.mark.parametrize(("keep", "kept"), [(3, ["run-1", "run-4", "run-5"]), (1, ["run-1", "run-5"])])
def test_of_many_runs_the_folders_of_those_used_last_are_kept(keep: int, kept: list[str]) -> None:
    """That of the new run and of the open one always."""
    node, recipe = service(keep_runs=keep), digits()
    agreement = agree(recipe, four()).agreement
    for number in range(6):
        assert content(node.answer(begin(f"run-{number}", recipe.to_toml(), agreement))) == {}
        os.utime(f"runs/run-{number}/agreed.json", (number, number))
        if number == 1:
            node._open["run-1"] = None  # type: ignore[assignment]
    Path("runs/mine").mkdir()
    assert sorted(path.name for path in Path("runs").iterdir()) == ["mine", *kept]
