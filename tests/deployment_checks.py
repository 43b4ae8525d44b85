"""`make test-deploy`: a SuperLink and three SuperNodes on loopback, with TLS, node keys and a signed app.

Parity with the simulator, faults of nodes and server, and everybody who must be refused. Not part of `make test-all`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest

pytest.importorskip("flwr")

from deployed import (
    HERE,
    Run,
    events,
    federation,
    fnrfl,
    free_ports,
    kill,
    kill_node,
    letters,
    loop,
    restart_node,
    restart_superlink,
    same_run,
    server_process,
    wait_until,
)
from fnrfl.flower.certificates import write_certificates
from fnrfl.flower.deployment import Address, Deployment
from fnrfl.flower.supervisor import alive

METHODS = ("fedavg", "scaffold", "moon", "fedgen", "fedavg fnr=on", "scaffold fnr=on")
SLOWLY = ("algorithm=scaffold", "fnr=on", "rounds=3", "client.epochs=60", "fnr.epochs=120", "network.on_missing=wait")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with federation(tmp_path_factory.mktemp("deploy") / "fed", "rounds=3") as deployment:
        yield deployment


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that faults must not change."""
    return loop(tmp_path_factory.mktemp("loop") / "slowly", *SLOWLY)


# -- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_the_simulator_to_the_bit(made: Deployment, tmp_path: Path, method: str) -> None:
    words = (*f"algorithm={method}".split(), "rounds=3")
    begun = time.monotonic()
    fnrfl("deploy", "run", made.root, *words, "-o", tmp_path / "there")
    seconds = time.monotonic() - begun
    same_run(tmp_path / "there", loop(tmp_path / "here", *words))
    rounds = events(tmp_path / "there")
    assert all(event["cohort"] == [0, 1, 2] for event in rounds)
    metered = sum(event["bytes_up"] + event["bytes_down"] for event in rounds)
    carried = json.loads((tmp_path / "there" / "flower.json").read_text())
    real = carried["flower_down"] + carried["flower_up"]
    assert real > metered
    more = f"+{100 * (real / metered - 1):.1f} % of the metered, +{carried['overhead_percent']} % of the letters"
    print(f"\n{method}: metered {metered} bytes, Flower {real} ({more}), {seconds:.0f} s")


# -- faults ------------------------------------------------------------------------------------------------------------


def test_nodes_killed_in_both_phases_change_nothing(made: Deployment, tmp_path: Path, simulated: Path) -> None:
    run = Run(made, tmp_path / "run", *SLOWLY)
    already = {client: len(letters(made, client)) for client in range(3)}

    def reached(client: int, words: str) -> bool:
        return words in letters(made, client)[already[client] :]

    wait_until(lambda: reached(0, "round 1  local"))
    kill_node(made, 0)
    restart_node(made, 0)
    wait_until(lambda: any(reached(client, "round 2  refine") for client in range(3)))
    (weak,) = [client for client in range(3) if reached(client, "round 2  refine")][:1]
    kill_node(made, weak)
    restart_node(made, weak)
    same_run(run.wait(), simulated)


def test_a_killed_server_and_restarted_nodes_change_nothing(made: Deployment, tmp_path: Path, simulated: Path) -> None:
    run = Run(made, tmp_path / "run", *SLOWLY)
    wait_until(lambda: (tmp_path / "run" / "events.jsonl").is_file() and len(events(tmp_path / "run")) == 1)
    server_process(made).kill()  # within the second round
    run.wait(fails=True)
    for client in range(3):
        kill_node(made, client)
        restart_node(made, client)
    same_run(Run(made, tmp_path / "run", resume=True).wait(), simulated)
    assert [event["round"] for event in events(tmp_path / "run")] == [1, 2, 3]


def test_a_superlink_that_is_started_again_ends_the_run_and_resume_goes_on(
    made: Deployment, tmp_path: Path, simulated: Path
) -> None:
    run, before = Run(made, tmp_path / "run", *SLOWLY), len(letters(made, 0))
    wait_until(lambda: "round 2  local" in letters(made, 0)[before:])
    restart_superlink(made)
    run.wait(fails=True)
    assert len(events(tmp_path / "run")) == 1
    same_run(Run(made, tmp_path / "run", resume=True).wait(), simulated)


# -- who is refused ----------------------------------------------------------------------------------------------------


def supernode(made: Deployment, folder: Path, root: Path, key: Path | None, *words: str) -> tuple[int | None, str]:
    """A SuperNode that wants to take part: how it ended within some seconds, and what it said."""
    folder.mkdir(exist_ok=True)
    (folder / "node.toml").write_text('partition = 0\ndata = "digits"\n')
    command = [str(Path(sys.executable).with_name("flower-supernode")), "--superlink", str(Address.read(made))]
    command += ["--root-certificates", str(root)] if not words else [*words]
    command += ["--auth-supernode-private-key", str(key)] if key else []
    command += ["--host", "127.0.0.1", "--port", "22990", "--node-config", f'folder="{folder}"', "--max-retries", "1"]
    log = folder / "log"
    with log.open("wb") as told:
        process = subprocess.Popen(command, env=made.environment() | HERE, stdout=told, stderr=told)
    try:
        code: int | None = process.wait(40)
    except subprocess.TimeoutExpired:
        kill([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])
        code = None
    return code, log.read_text()


def test_a_node_with_another_key_or_none_is_refused(made: Deployment, tmp_path: Path) -> None:
    other = Deployment(tmp_path / "other")
    write_certificates(other, 1)
    for name, key in (("key", other.node(0) / "node.key"), ("none", None)):
        code, told = supernode(made, tmp_path / name, made.certs / "ca.crt", key)
        assert code not in (None, 0), told
    assert "nodes online: 3 of 3" in fnrfl("deploy", "status", made.root)


def test_a_node_that_trusts_another_ca_does_not_talk_to_the_server(made: Deployment, tmp_path: Path) -> None:
    other = Deployment(tmp_path / "other")
    write_certificates(other, 1)
    code, told = supernode(made, tmp_path / "ca", other.certs / "ca.crt", made.node(0) / "node.key")
    assert code != 0 and ("certificate" in told.lower() or "SSL" in told), told
    address, refused = Address.read(made), pytest.raises(ssl.SSLCertVerificationError)
    with socket.create_connection((address.host, address.port)) as plain, refused:
        ssl.create_default_context(cafile=other.certs / "ca.crt").wrap_socket(plain, server_hostname="localhost")


def test_a_connection_without_tls_is_refused(made: Deployment, tmp_path: Path) -> None:
    address = Address.read(made)
    with socket.create_connection((address.host, address.port), timeout=10) as plain:
        plain.sendall(b"POST /v1/fleet/register-node HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        with suppress(ConnectionResetError):
            assert b"HTTP/1.1 200" not in plain.recv(1000)
    code, told = supernode(made, tmp_path / "plain", made.certs / "ca.crt", None, "--insecure")
    assert code != 0, told


def test_nodes_run_no_app_but_the_signed_one(made: Deployment, tmp_path: Path) -> None:
    """Flower's own command sends no signature with an app; a foreign app is signed by a key that nodes do not know."""
    before = {client: len(letters(made, client)) for client in range(3)}
    spoiled = tmp_path / "app"
    shutil.copytree(made.app, spoiled)
    package = next(path for path in spoiled.iterdir() if path.is_dir())
    trace = tmp_path / "it ran"
    with (package / "client_app.py").open("a") as file:
        file.write(f"\nopen({str(trace)!r}, 'w').close()\n")
    flwr = [str(Path(sys.executable).with_name("flwr")), "run", str(spoiled), "deployment", "--stream"]
    refused = "The FAB could not be verified"
    with open(tmp_path / "unsigned.log", "wb") as told:
        unsigned = subprocess.Popen(flwr, env=made.environment() | HERE, stdout=told, stderr=told)
    try:
        wait_until(lambda: refused in (tmp_path / "unsigned.log").read_text())
    finally:
        unsigned.kill()
        unsigned.wait()
        server_process(made).kill()
    foreign = Deployment(tmp_path / "foreign")
    foreign.root.mkdir()
    write_certificates(foreign, 1)
    ours = (made.certs / "app.key").read_bytes()
    app = made.app.rename(made.root / "own app")
    try:
        shutil.copytree(spoiled, made.app)
        (made.certs / "app.key").write_bytes((foreign.certs / "app.key").read_bytes())
        run = Run(made, tmp_path / "run")
        wait_until(lambda: refused in run.log.read_text())
        server_process(made).kill()
        run.wait(fails=True)
    finally:
        (made.certs / "app.key").write_bytes(ours)
        shutil.rmtree(made.app)
        app.rename(made.app)
    assert not trace.exists() and before == {client: len(letters(made, client)) for client in range(3)}


def test_a_path_that_the_server_names_is_refused(made: Deployment) -> None:
    told = fnrfl("deploy", "run", made.root, f"public.source={Path(__file__).parent}", fails=True)
    assert "paths in a recipe are not followed" in told


def test_flowers_own_command_runs_the_app_and_down_leaves_nothing_after_a_crash(tmp_path: Path) -> None:
    with federation(tmp_path / "fed", nodes=1, secure=False) as made:
        flwr = [str(Path(sys.executable).with_name("flwr")), "run", str(made.app), "deployment", "--stream"]
        flwr += ["--run-config", 'overrides="rounds=1"']
        done = subprocess.run(flwr, env=made.environment() | HERE, capture_output=True, text=True, timeout=120)
        assert "after 1 round" in done.stdout, done.stdout + done.stderr
        (link,) = [one for one in alive(made) if one.name == "superlink"]
        os.kill(link.pid, 9)
        wait_until(lambda: link.handle is None)
        assert "has ended" in fnrfl("deploy", "status", made.root, fails=True)


# -- nothing leaves the machine ----------------------------------------------------------------------------------------


def loopback_only(*command: str) -> subprocess.CompletedProcess[str]:
    script = str(Path(__file__).with_name("loopback_only.py"))
    inside = ["unshare", "-rn", sys.executable, script, *command]
    return subprocess.run(inside, env=os.environ | HERE, capture_output=True, text=True, timeout=400)


def test_a_federation_needs_loopback_alone_and_asks_for_nothing_else() -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rn", "true"]).returncode:
        pytest.skip("this machine makes no network namespaces")
    leaves = "import socket; s = socket.socket(); s.connect_ex(('192.0.2.1', 80)); s.close()"
    assert loopback_only(sys.executable, "-c", leaves).returncode == 99  # it would be noticed
    small = str(Path(__file__).with_name("test_deploy.py"))
    done = loopback_only(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "without_tls", small)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


# -- nodes with data of their own --------------------------------------------------------------------------------------

SITES = """name = "sites"
dataset = { name = "sites/", label = "ill", missing = "mean", scale = "standard" }
scenario = "natural"
clients = 0
model = "mlp"
rounds = 2
public = { source = "public.csv" }
validation = { size = 0 }
fnr = { share = 0.5 }
"""


def write_patients(path: Path, seed: int) -> None:
    dice = Random(seed)
    path.parent.mkdir(exist_ok=True)
    drawn = [(dice.gauss(60, 9), dice.choice(["north", "söuth"]), dice.choice(["no", "yes"])) for _ in range(40)]
    rows = [f"{age:.6f},{ward},{ill}" for age, ward, ill in drawn]
    path.write_text("\n".join(["age,ward,ill", *rows]) + "\n", encoding="utf-8")


def test_sites_with_data_of_their_own_train_a_model_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites.toml").write_text(SITES)
    for seed, name in enumerate(("sites/Aachen", "sites/Évora", "public", "test")):
        write_patients(tmp_path / f"{name}.csv", seed)
    fnrfl("deploy", "init", "fed", "sites.toml", "--nodes", 2)
    for client, site in enumerate(("Évora", "Aachen")):
        words = {"name": site, "data": f"{tmp_path}/sites/{site}.csv", "public": f"{tmp_path}/public.csv"}
        text = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in words.items())
        (tmp_path / f"fed/nodes/{client}/node.toml").write_text(text, encoding="utf-8")
    fnrfl("deploy", "certs", "fed")
    try:
        fnrfl("deploy", "up", "fed", "--port", free_ports(3))
        assert "no test set" in fnrfl("deploy", "run", "fed", fails=True)
        told = fnrfl("deploy", "run", "fed", "--test", "test.csv", "-o", "run")
    finally:
        fnrfl("deploy", "down", "fed")
    assert "after 2 rounds" in told and (tmp_path / "run" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "run" / "partition.json").read_text())["ids"] == ["Aachen", "Évora"]
