"""Atomic checkpoints: a kill at any moment leaves the last one or the one before, never half of one.

`rounds/000012/` holds the server's state after round 12 and the memories of clients that changed since the checkpoint
before; `checkpoint.json` is replaced last and names every file that counts. What it does not name is pruned.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Strict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fnrfl import files
from fnrfl.core.types import State, Tree, aligned
from fnrfl.engines.store import ClientStore
from fnrfl.errors import ConfigError

FORMAT = 2  # 2: the weights of convolutions are channels-last


def save(run_dir: Path, done: int, state: State, store: ClientStore, config: str) -> None:
    """Keep the state after `done` rounds; `config` is the hash of the config it belongs to."""
    folder = run_dir / "rounds" / f"{done:06d}"
    part = folder.with_name(f"{folder.name}.part")
    for stale in (part, folder):
        shutil.rmtree(stale, ignore_errors=True)
    part.mkdir(parents=True)
    write(part / "server.safetensors", _pack(state))
    path = run_dir / "checkpoint.json"
    clients = _index(path).clients if path.exists() else {}
    for client in sorted(store.changed):
        write(part / f"client-{client}.safetensors", store.get(client))
        clients[client] = f"rounds/{folder.name}/client-{client}.safetensors"
    files.sync(part)
    part.rename(folder)
    files.sync(folder.parent)
    server = f"rounds/{folder.name}/server.safetensors"
    index = Index(format=FORMAT, round=done, config=config, server=server, clients=clients)
    files.write(path, index.model_dump_json(indent=1) + "\n")
    store.changed.clear()
    _prune(run_dir, index)


def load(run_dir: Path, store: ClientStore, config: str) -> tuple[int, State] | None:
    """(rounds done, state), with the clients' memories put into `store`; None where nothing was saved yet."""
    path = run_dir / "checkpoint.json"
    if not path.exists():
        return None
    index = _index(path)
    if index.config != config:
        raise ConfigError(
            f"{path} belongs to another config than the config.toml beside it. Put that file back as it was, or run "
            "again into another directory."
        )
    state = _unpack(run_dir / index.server)
    for client, file in index.clients.items():
        store.put(client, read(run_dir / file))
    store.changed.clear()
    _prune(run_dir, index)  # a kill may have left what the last save was about to remove
    return index.round, state


def models(run_dir: Path, config: str) -> tuple[State, Callable[[int], Tree | None]]:
    """The server's state at the last checkpoint, and a way to read one client's memory: None if it never wrote one."""
    path = run_dir / "checkpoint.json"
    gone = f"{run_dir} keeps the clients' models in its last checkpoint, and"
    way_out = "Put rounds/ and checkpoint.json back as they were, or run again into another directory."
    if not path.exists():
        raise ConfigError(f"{gone} checkpoint.json is missing. {way_out}")
    index = _index(path)
    if index.config != config:
        raise ConfigError(f"{gone} checkpoint.json belongs to another config. {way_out}")

    def found(name: str) -> Path:
        if not (run_dir / name).exists():
            raise ConfigError(f"{gone} {name} is missing. {way_out}")
        return run_dir / name

    files_of = index.clients
    return _unpack(found(index.server)), lambda client: read(found(files_of[client])) if client in files_of else None


class Index(BaseModel):
    """What `checkpoint.json` says."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: int
    round: int
    config: str
    server: str
    clients: dict[Annotated[int, Strict(False)], str]


def _index(path: Path) -> Index:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content["format"]
        if found == FORMAT:
            return Index.model_validate(content)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}). Run again into another directory.") from error
    raise ConfigError(
        f"{path} has format {found}, and this version reads format {FORMAT}. Resume it with the version that wrote "
        "it, or run again."
    )


def _prune(run_dir: Path, index: Index) -> None:
    alive = {index.server, *index.clients.values()}
    for folder in (run_dir / "rounds").iterdir():
        for file in folder.iterdir():
            if str(file.relative_to(run_dir)) not in alive:
                file.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def _pack(state: State) -> Tree:
    buffers = {f"buffers/{k}": v for k, v in state.buffers.items()}
    return {"params": state.params} | buffers | {f"extra/{k}": v for k, v in state.extra.items()}


def _unpack(path: Path) -> State:
    flat = read(path)
    if "params" not in flat:
        raise ConfigError(f"{path} is not a server's state. Run again into another directory.")

    def part(prefix: str) -> Tree:
        return {k.removeprefix(prefix): v for k, v in flat.items() if k.startswith(prefix)}

    return State(flat["params"], part("buffers/"), part("extra/"))


def write(path: Path, tensors: Tree) -> None:
    """Tensors as a file that others may read too, on the disk when this returns."""
    save_file(aligned({k: v.cpu() for k, v in tensors.items()}), path)
    path.chmod(0o644)  # safetensors' own choice is 0600
    files.sync(path)


def read(path: Path) -> Tree:
    """The tensors of a file, or a sentence about why there are none."""
    try:
        return aligned(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Run again into another directory.") from error
