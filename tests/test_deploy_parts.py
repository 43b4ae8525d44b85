"""The parts of `fnrfl deploy` that need no Flower: keys, processes, a node's own configuration, its worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from deployed import wait_until
from fnrfl.config import load
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.engines.wire import from_bytes, to_bytes
from fnrfl.federation.agreement import Agreement
from fnrfl.federation.messages import NodeReply, NodeRequest
from fnrfl.federation.node_service import NodeService
from fnrfl.flower import supervisor, worker
from fnrfl.flower.app_files import check_before_run, write_app
from fnrfl.flower.deployment import FLOWER_QUIET, Address, Deployment, NodeSettings
from fnrfl.flower.worker import SOCKET, WorkerLink
from fnrfl.process import isolated, until_left
from node_services import begin, content, describe

# -- files -------------------------------------------------------------------------------------------------------------


def test_an_app_is_written_into_a_new_folder_alone(tmp_path: Path) -> None:
    made = write_app(tmp_path / "ein Ordner é", load("digits", ["clients=2", "name=Größe 1"]))
    assert [folder.name for folder in made.nodes] == ["0", "1"]
    assert NodeSettings.of({"folder": str(made.node(1))}).read().partition == 1
    assert load(made.app / "recipe.toml") == load("digits", ["clients=2", "name=Größe 1"])
    assert made.node(0).stat().st_mode & 0o077 == made.root.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="not empty"):
        write_app(made.root, load("digits"))
    with pytest.raises(ConfigError, match="not running"):
        Address.read(made)
    made.home.mkdir(mode=0o755)
    for address in (Address("127.0.0.1", 9092, secure=False), Address("10.0.0.5", 8000, secure=True)):
        address.write(made)
        assert Address.read(made) == address
    assert made.home.stat().st_mode & 0o077 == 0  # before the database is there


NATURAL = ["scenario=natural", "dataset=sites/", "model=mlp"]


@pytest.mark.parametrize("scenario", ["natural", "natural + feature-noise(0.1)"])
def test_a_recipe_that_sites_cannot_follow_is_refused_before_anything_is_written(tmp_path: Path, scenario: str) -> None:
    folder, words = tmp_path / "new", [*NATURAL, f"scenario={scenario}"]
    with pytest.raises(CompatibilityError, match="public.source.*validation.size"):
        write_app(folder, load(None, words), 2)
    assert not folder.exists()
    made = write_app(folder, load(None, [*words, "public.size=0", "validation.size=0"]), 2)
    assert 'name = "site 1"' in (made.node(1) / "node.toml").read_text()


def test_before_a_run_begins_everything_that_sites_cannot_follow_is_refused(tmp_path: Path) -> None:
    made = write_app(tmp_path / "fed", load(None, [*NATURAL, "public.size=0", "validation.size=0"]), 2)
    (test := tmp_path / "test.csv").write_text("age,ill\n")
    check_before_run(made, [], None, test)
    for error, words, given, said in (
        (CompatibilityError, ["validation.size=0.1"], None, "validation.size.*--test"),
        (ConfigError, [], tmp_path / "gone.csv", "gone.csv"),
        (ConfigError, ["client.rl=1"], test, "client.lr"),
    ):
        with pytest.raises(error, match=said):
            check_before_run(made, words, None, given)
    for node in made.nodes:  # an experiment after all, where the server has the data
        (node / "node.toml").write_text(f'data = "sites"\npartition = {node.name}\n')
    check_before_run(made, ["validation.size=0.1"], None, None)


def test_before_a_run_begins_code_that_has_changed_needs_trust(tmp_cwd: Path) -> None:
    tmp_path = tmp_cwd
    (tmp_path / "federated_net.py").write_text("def make(input_shape, num_classes): ...\n")
    made = write_app(tmp_path / "fed", load("digits", ["model=federated_net:make"]), 2)
    check_before_run(made, [], None, None)
    (tmp_path / "federated_net.py").write_text("def make(input_shape, num_classes): return None\n")
    with pytest.raises(ConfigError, match="--trust"):
        check_before_run(made, [], None, None)
    check_before_run(made, [], None, None, trust=True)


def test_keys_are_for_their_owner_and_are_never_replaced(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.x509.verification import PolicyBuilder, Store

    from fnrfl.flower.certificates import write_certificates

    made = Deployment(tmp_path)
    written = write_certificates(made, 2, ["example.org"])
    secret = [path for path in written if path.suffix == ".key"]
    assert len(secret) == 5 and all(path.stat().st_mode & 0o077 == 0 for path in secret)
    ca = x509.load_pem_x509_certificate((made.certs / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((made.certs / "server.crt").read_bytes())
    policy = PolicyBuilder().store(Store([ca]))
    assert policy.build_server_verifier(x509.DNSName("example.org")).verify(server, [])
    assert policy.build_server_verifier(x509.DNSName("localhost")).verify(server, [])
    with pytest.raises(ConfigError, match="no host"):
        write_certificates(Deployment(tmp_path / "other"), 1, ["bad host!"])
    with pytest.raises(x509.verification.VerificationError):
        policy.build_server_verifier(x509.DNSName("elsewhere.org")).verify(server, [])
    before = {path: path.read_bytes() for path in written}
    with pytest.raises(ConfigError, match="there already"):
        write_certificates(made, 2)
    assert before == {path: path.read_bytes() for path in written}


def test_every_process_starts_quietly_and_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    there = Deployment(tmp_path).environment()
    assert there | FLOWER_QUIET == there and there["FLWR_HOME"] == str(tmp_path / "flower")


# -- processes ---------------------------------------------------------------------------------------------------------

SLEEPS = "import time; time.sleep(60)"
CHILD = f"subprocess.Popen([sys.executable, '-c', {SLEEPS!r}])"
PARENT = f"import subprocess, sys, time; print({CHILD}.pid, flush=True); time.sleep(60)"


@contextmanager
def sleeping(*names: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, and is gone afterwards."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPS, *names], cwd=cwd)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_process_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    there = Deployment(tmp_path)
    one = supervisor.start(there, "one", ["python", "-c", PARENT], tmp_path)
    wait_until(lambda: (there.logs / "one.log").read_text() != "", 10)
    child = psutil.Process(int((there.logs / "one.log").read_text()))
    assert supervisor.alive(there) == [one] and child.is_running()
    assert supervisor.stop(there) == 0
    assert supervisor.recorded(there) == [] and one.handle is None and not child.is_running()


def test_a_program_that_a_killed_process_left_behind_is_ended_and_nothing_else(tmp_path: Path) -> None:
    (folder := tmp_path / "fed" / "nodes" / "0").mkdir(parents=True)
    name = "fnrfl.flower.worker"
    with (
        sleeping(name, cwd=folder) as left,
        sleeping("editor", cwd=folder) as other,
        sleeping(name, cwd=tmp_path) as far,
    ):
        supervisor.stop(Deployment(tmp_path / "fed"))
        assert not psutil.pid_exists(left.pid) and other.poll() is None and far.poll() is None


def test_what_a_process_writes_is_for_its_user_alone(tmp_path: Path) -> None:
    """The SuperLink's database holds a token, and logs may."""
    writing = "import os; print('said'); open('superlink.db', 'w').close(); os.mkdir('apps')"
    supervisor.start(Deployment(tmp_path), "one", ["python", "-c", writing], tmp_path)
    wait_until((tmp_path / "apps").exists, 10)
    for name in ("superlink.db", "apps", "logs/one.log"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_a_number_that_another_process_has_now_is_left_alone(tmp_path: Path) -> None:
    there = Deployment(tmp_path)
    with sleeping() as bystander:
        there.home.mkdir()
        record = {"name": "superlink", "pid": bystander.pid, "started": "4711"}  # text, as version 0.1.0 wrote it
        (there.home / "processes.json").write_text(json.dumps([record]))
        assert supervisor.alive(there) == [] and len(supervisor.recorded(there)) == 1
        supervisor.stop(there)
        assert bystander.poll() is None and supervisor.recorded(there) == []


def test_an_app_that_was_changed_or_signed_with_another_key_is_not_the_signed_one(tmp_path: Path) -> None:
    """Nodes check with Flower's own function what `store_signed_app` puts into the database."""
    pytest.importorskip("flwr")
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager
    from flwr.supernode.start_client_internal import _verify_fab

    from fnrfl.flower.certificates import write_certificates
    from fnrfl.flower.supervisor import SIGNER, store_signed_app

    made = write_app(tmp_path / "fed", load("digits", ["clients=1"]))
    write_certificates(made, 1)
    made.home.mkdir()
    name = store_signed_app(made)
    assert name == "@fnrfl/fnrfl-digits"
    database = str(made.database)
    state = LinkStateFactory(database, NoOpFederationManager(), ObjectStoreFactory(database)).state()
    fab, _ = state.get_hub_app(NOOP_FEDERATION_ID, name)
    trusted = {SIGNER: (made.certs / "app.pub").read_text()}
    assert _verify_fab(fab, trusted)
    write_certificates(Deployment(tmp_path / "other"), 1)
    assert not _verify_fab(fab, {SIGNER: (tmp_path / "other/certs/app.pub").read_text()})
    assert not _verify_fab(replace(fab, content=fab.content + b" "), trusted)


# -- a node's own configuration ----------------------------------------------------------------------------------------


def test_a_node_says_who_it_is_from_its_own_configuration(tmp_path: Path) -> None:
    given = {"folder": str(tmp_path)}
    with pytest.raises(ConfigError, match="neither a partition nor a name"):
        _ = NodeSettings.of(given).label
    (tmp_path / "node.toml").write_text('name = "Évora"\n', encoding="utf-8")
    assert NodeSettings.of(given).label == "Évora"
    assert NodeSettings.of(given | {"partition-id": 2, "num-partitions": 3}).label == "2"
    (tmp_path / "node.toml").write_text("name = ")
    with pytest.raises(ConfigError, match="TOML"):
        _ = NodeSettings.of(given).label
    with pytest.raises(ConfigError, match="folder"):
        NodeSettings.of({"folder": str(tmp_path / "missing")})


def service(folder: Path) -> NodeService:
    (folder / "node.toml").write_text('partition = 0\ndata = "digits"\n')
    return NodeService(NodeSettings.of({"folder": str(folder)}).read, folder / "runs")


def test_a_changed_configuration_counts_from_the_next_meeting_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there, question = service(tmp_path), describe(load("digits", ["clients=2"]).to_toml())
    there._open["run"] = there  # type: ignore[assignment]
    assert content(there.answer(question))["partition"] == 0 and "run" in there._open
    (tmp_path / "node.toml").write_text('partition = 1\ndata = "digits"\nshare_memory = true\n')
    assert content(there.answer(question))["partition"] == 1 and there.config.share_memory
    assert not there._open  # runs are opened again
    (tmp_path / "node.toml").write_text('partition = 1\ndta = "digits"\n')
    assert "dta" not in content(there.answer(question)).reason  # what stands in it is the node's own business
    assert "'dta'" in caplog.text


def test_settings_of_a_run_last_from_one_letter_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def settings() -> Iterator[None]:
        told.append("set")
        yield
        told.append("put back")

    def two_letters(folder: Path, answer: Any) -> None:
        with isolated():
            until_left(settings())
        told.append("second letter")

    (tmp_path / "node.toml").write_text('partition = 0\ndata = "digits"\n')
    monkeypatch.setattr(worker, "answer_letters", two_letters)
    worker.work(str(os.getpid()), json.dumps({"folder": str(tmp_path)}))
    assert told == ["set", "second letter", "put back"]


@pytest.mark.parametrize("run", ["../../elsewhere", "/etc", "", "a" * 65, ".."])
def test_a_run_cannot_name_a_folder_outside(tmp_path: Path, run: str) -> None:
    there = service(tmp_path)
    assert "refused" in content(there.answer(begin(run, load("digits").to_toml(), Agreement(("0",))))).reason
    letter = NodeRequest(run, "1", 0, 0, 0, "local", None)
    answer = from_bytes(there.answer(to_bytes(letter)))
    assert isinstance(answer, NodeReply) and "refused" in answer.content.reason
    assert [path.name for path in tmp_path.iterdir()] == ["node.toml"]


@pytest.mark.parametrize(
    "message", [b"", b"{", b"[]", b"{}", b"\x00\x00", b"\xff" * 40, b'{"run": 3}', to_bytes({"run": 3}), to_bytes([])]
)
def test_what_is_no_message_is_answered_with_a_refusal(tmp_path: Path, message: bytes) -> None:
    assert content(service(tmp_path).answer(message)).reason


def test_the_process_of_a_message_imports_neither_torch_nor_flower_nor_data() -> None:
    heavy = {"torch", "numpy", "flwr", "pydantic"}
    code = f"import sys, fnrfl.flower.client_app; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- the worker --------------------------------------------------------------------------------------------------------


def test_letters_reach_a_worker_however_long_its_path_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long " * 20) / ("é" * 60)
    folder.mkdir(parents=True)
    there = WorkerLink(NodeSettings(folder, {}))

    def answer(letter: bytes) -> bytes:
        if len(letter) > 3:  # the last one
            monkeypatch.setattr(worker, "IDLE", 0.1)
        return letter[::-1]

    serving = Thread(target=worker.answer_letters, args=(folder, answer), daemon=True)
    serving.start()
    wait_until((folder / SOCKET).exists, 10)
    assert there.ask(b"abc") == b"cba" and there.ask(b"") == b""
    big = os.urandom(3_000_000)
    assert there.ask(big) == big[::-1]
    serving.join(30)
    assert not (folder / SOCKET).exists()  # it was idle, and went


DIES_ONCE = """
import os, sys
from pathlib import Path
from fnrfl.flower import supervisor, worker
folder = Path(sys.argv[1])
def answer(letter):
    if not (folder / "died").exists() or letter == b"always":
        (folder / "died").touch()
        os._exit(1)
    return letter
worker.IDLE = 2.0
worker.answer_letters(folder, answer)
"""


def test_a_worker_that_dies_is_started_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, started = WorkerLink(NodeSettings(tmp_path, {})), []

    def start(self: WorkerLink) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", DIES_ONCE, str(tmp_path)]))
        return started[-1]

    monkeypatch.setattr(WorkerLink, "_start", start)
    assert there.ask(b"abc") == b"abc" and len(started) == 2
    with pytest.raises(FnrflError, match="ended twice"):
        there.ask(b"always")
    for process in started:
        process.wait(10)


def test_a_worker_ends_with_the_process_that_started_apps(tmp_path: Path) -> None:
    with sleeping() as parent:
        code = f"from fnrfl.flower.worker import end_with; end_with({parent.pid})"
        child = subprocess.Popen([sys.executable, "-c", code])
        time.sleep(0.5)
        assert child.poll() is None
    assert child.wait(10) == 0
