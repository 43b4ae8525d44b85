"""Atomic checkpoints: a kill at any moment leaves the last one or the one before, never half of one.

`rounds/000012/` holds the server's state after round 12 and the memories of clients that changed since the checkpoint
before; `checkpoint.json` is replaced last. It names every file that counts, with the sha256 of its content, and has the
sha256 of the log up to that round. Files of a checkpoint that it does not name are pruned; other files are left alone.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes

from fnrfl.core.errors import ConfigError
from fnrfl.core.store import ClientMemory
from fnrfl.core.trees import Tree, aligned, prefixed, under
from fnrfl.core.values import State
from fnrfl.rundir import files
from fnrfl.rundir.directory import written
from fnrfl.rundir.record import CHECKPOINT_FORMAT, File, Index, Kept, read_index

COMPILED = re.compile(r"(^|/)(?:_orig_mod\.)+")  # what torch.compile put before names, and older versions left there


def save_checkpoint(
    run_dir: Path, done: int, state: State, store: ClientMemory, *, best: bool | None = None, config: str, log: str
) -> None:
    """Keep the state after `done` rounds; `config` and `log` are the sha256 of the config and of the log so far.

    `best`: this round is the best so far, so its files stay. False: another was, whose files stay. None: none do.
    """
    before = read_index(run_dir)
    clients = {}
    for client, file in before.clients.items() if before else ():
        content = b"" if file.sha256 else files.read_bytes(run_dir / file.file)  # version 0.1.0 has named no hashes
        clients[client] = File(file=file.file, sha256=file.sha256 or hashlib.sha256(content).hexdigest())
    rounds = run_dir / "rounds"
    rounds.mkdir(exist_ok=True)
    _refuse_links(rounds)
    folder = _free(rounds, f"{done:06d}")
    part = _free(rounds, folder.name, ".part")
    part.mkdir()

    def kept(name: str, tensors: Tree) -> File:
        return File(file=f"rounds/{folder.name}/{name}", sha256=write_tensors(part / name, tensors))

    extra = prefixed("buffers", state.buffers, "/") | prefixed("extra", state.extra, "/")
    server = kept("server.safetensors", {"params": state.params} | extra)
    for client in sorted(store.changed):
        clients[client] = kept(f"client-{client}.safetensors", store.get(client))
    files.sync(part)
    part.rename(folder)
    files.sync(rounds)
    stays = Kept(server=server, clients=clients) if best else before.best if before and best is False else None
    new = Index(
        format=CHECKPOINT_FORMAT, round=done, config=config, log=log, server=server, clients=clients, best=stays,
        model=None,
    )  # fmt: skip
    _write_index(run_dir, new)
    store.changed.clear()
    _prune(run_dir, new)


def finish(run_dir: Path, weights: Tree) -> Index:
    """Keep the model that came out. Its file appears last: its presence says that the run is finished."""
    saved = read_index(run_dir)
    assert saved is not None, "the last round ends with a checkpoint"
    part = run_dir / "model.safetensors.part"
    try:
        last = saved.model_copy(update={"model": write_tensors(part, weights)})
        _write_index(run_dir, last)
        part.replace(run_dir / "model.safetensors")
    except OSError:  # a full disk
        part.unlink(missing_ok=True)
        raise
    files.sync(run_dir)
    return last


def load_checkpoint(run_dir: Path, saved: Index, store: ClientMemory) -> State:
    """The server's state, with the clients' memories put into `store`; every file is what its hash says."""
    state = server_state(run_dir, saved)
    for client, file in saved.clients.items():
        store.put(client, _read_file(run_dir, file))
    store.changed.clear()
    _prune(run_dir, saved)  # a kill may have left what the last save was about to remove
    return state


def server_state(run_dir: Path, saved: Index | Kept) -> State:
    """What the server knows in a checkpoint."""
    flat = _read_file(run_dir, saved.server)
    if "params" not in flat:
        raise files.damaged(run_dir / saved.server.file, "it is not a server's state")
    return State(flat["params"], under("buffers", flat, "/"), under("extra", flat, "/"))


def best_models(run_dir: Path, saved: Index) -> tuple[State, dict[int, Tree]] | None:
    """What the server knew, and what clients remembered, after the best round of a run that will keep its model."""
    if saved.best is None:
        return None
    memories = {client: _read_file(run_dir, file) for client, file in saved.best.clients.items()}
    return server_state(run_dir, saved.best), memories


def check_files(run_dir: Path, saved: Index) -> None:
    """Refuse a checkpoint if a file is missing or not what the run wrote; without any, there are numbers alone."""
    if not (run_dir / "rounds").exists():
        return
    for file in (saved.server, *saved.clients.values()):
        _read_file(run_dir, file)


def client_memory(run_dir: Path, saved: Index, client: int) -> Tree | None:
    """What a client remembers in a checkpoint; None if it had written nothing by then."""
    file = saved.clients.get(client)
    return None if file is None else _read_file(run_dir, file)


def model(run_dir: Path, saved: Index) -> Tree:
    """The weights that a finished run left."""
    if saved.model is None and saved.format == CHECKPOINT_FORMAT:
        raise ConfigError(
            f"{run_dir / 'model.safetensors'} is not of this run: checkpoint.json says that it is not finished. Remove "
            "the file and resume the run."
        )
    return read_tensors(run_dir / "model.safetensors", saved.model)


def _write_index(run_dir: Path, new: Index) -> None:
    text = new.model_dump_json(indent=1, exclude=None if new.best else {"best"})
    files.write(run_dir / "checkpoint.json", text + "\n")


def _free(folder: Path, name: str, ending: str = "") -> Path:
    """A name below `folder` that nothing has yet; a kill may have left a folder that no checkpoint names."""
    candidates = (folder / f"{free}{ending}" for free in files.numbered_names(name))
    return next(path for path in candidates if not path.exists() and not path.is_symlink())


def _refuse_links(*paths: Path) -> None:
    for path in paths:
        if path.is_symlink():
            raise files.damaged(path, "it is a link")


def _prune(run_dir: Path, saved: Index) -> None:
    both = (saved, saved.best) if saved.best else (saved,)
    alive = {file.file for one in both for file in (one.server, *one.clients.values())}
    for path in written(run_dir, "rounds"):
        if path.is_dir():
            with suppress(OSError):  # not empty: files of this checkpoint, or somebody else's
                path.rmdir()
        elif path.relative_to(run_dir).as_posix() not in alive:
            path.unlink()


def write_tensors(path: Path, tensors: Tree) -> str:
    """Tensors as a new file, on the disk when this returns; returns the sha256 of its content."""
    content = to_bytes(aligned({k: v.cpu() for k, v in tensors.items()}))
    files.write_new(path, content)
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: Path, sha256: str | None = None) -> Tree:
    """The tensors of a file with this hash, or a sentence about why there are none."""
    try:
        content = files.read_bytes(path)
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise files.damaged(path, "its sha256 is not the one in checkpoint.json")
        return aligned({COMPILED.sub(r"\1", name): tensor for name, tensor in from_bytes(content).items()})
    except (OSError, SafetensorError) as error:
        raise files.damaged(path, f"it cannot be read: {error}") from error


def _read_file(run_dir: Path, file: File) -> Tree:
    path = run_dir / file.file
    _refuse_links(run_dir / "rounds", path.parent, path)
    return read_tensors(path, file.sha256)
