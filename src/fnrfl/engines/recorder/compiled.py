"""Recorded steps compiled side by side: each by a process of its own, and kept on disk for all that come later.

Compiling a large step takes most of a minute of one core. While a worker compiles one, the caller records the next;
what was compiled before, by any process of this user, is only loaded. `compile_worker.py` is what a worker does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

from fnrfl.core.errors import out_of_memory
from fnrfl.engines.recorder.programs import FlatStep, Recording, timed

log = logging.getLogger("fnrfl")
WORKER_SETTINGS = {
    "TORCHINDUCTOR_COMPILE_THREADS": str(max(4, (os.cpu_count() or 4) // 2)),  # twice as many were not faster
    "TRITON_STORE_BINARY_ONLY": "1",  # else a step is kept with every intermediate text of each of its kernels
}
KEPT_BYTES = 4 << 30  # of compiled steps on disk, some 50 MB each; those not used for the longest time go first
PATIENCE = 900.0  # seconds for one step
SECONDS_AFTER_KILL = 5.0  # for a worker that was killed
REQUEST_PREFIX = "asked-"  # how the names of workers' own folders begin
ABANDONED = 24 * 3600.0  # seconds after which nobody is at work in such a folder: its process was killed


def cache_folder() -> Path:
    """Where compiled steps are kept: FNRFL_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("FNRFL_CACHE") or os.path.join(base, "fnrfl")) / "programs"


class NotCompiled(Exception):
    """A worker could not compile a step, for the reason that it gives. A GPU that was full for it may not be for us."""


@dataclass
class Compiling:
    """A step that is compiled, or will be when its worker has ended."""

    folder: Path
    device: torch.device
    worker: subprocess.Popen[bytes] | None = None  # None: it was compiled before
    asked: Path = Path()  # the worker's own folder

    def result(self) -> FlatStep:
        """The compiled step; waits for it. Raises NotCompiled if there is none."""
        if self.worker is not None:
            with timed("importing the loader"), suppress(ImportError):
                _import_loader()
            with timed("waiting for the compiler"):
                self.worker.wait(PATIENCE)
            if self.worker.returncode:
                said = (self.asked / "said.txt").read_text(errors="replace")
                log.debug("a worker could not compile a step:\n%s", said)
                raise NotCompiled(_last_error(said) or f"exit status {self.worker.returncode}")
        try:
            with timed("loading"):
                return _load(self.folder, self.device)
        except Exception as error:
            if not out_of_memory(error):  # it is damaged: the next run has it compiled again
                shutil.rmtree(self.folder, ignore_errors=True)
            raise


def _last_error(said: str) -> str:
    """The line of a traceback that names the error: others may follow it, as they do with errors of CUDA.

    >>> _last_error("Traceback\\n  File ...\\ntorch.AcceleratorError: CUDA error: out of memory\\nFor debugging ...\\n")
    'torch.AcceleratorError: CUDA error: out of memory'
    """
    lines = said.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)]
    return (named or lines or [""])[-1]


def _made_with(device: torch.device) -> list[str]:
    return [torch.__version__, str(torch.version.cuda), torch.cuda.get_device_name(device), sys.version]


def start(recording: Recording) -> Compiling:
    """Have a step compiled by another process, unless that was done before."""
    arguments = recording.arguments
    device = arguments.constants[0].device
    request = {
        "constants": list(_held_constants(recording.graph)),
        "arguments": [_like(t) for t in [*arguments.constants, *arguments.turn]],
        "settings": _precision_flags(),
        "made_with": _made_with(device),
    }
    text, constants = json.dumps(request, sort_keys=True), _held_constants(recording.graph)
    folder = cache_folder() / _digest(text, recording.graph.code, constants)
    if (folder / "step.bin").exists():
        _mark_used(folder)
        return Compiling(folder, device)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _keep_few(folder.parent)
    asked = Path(tempfile.mkdtemp(prefix=REQUEST_PREFIX, dir=folder.parent))
    (asked / "request.json").write_text(text)
    (asked / "step.py").write_text(recording.graph.code)
    _save_constants(asked / "constants.safetensors", constants)
    # -P: a file json.py in the working folder must not run.
    command = [sys.executable, "-P", "-m", "fnrfl.engines.recorder.compile_worker", str(asked), str(folder)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with (asked / "said.txt").open("wb") as said:  # not a pipe, which somebody would have to read all the time
        worker = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path} | WORKER_SETTINGS,
        )  # fmt: skip
    compiling = Compiling(folder, device, worker, asked)
    weakref.finalize(compiling, _end, worker, asked, os.getpid())
    return compiling


def _mark_used(folder: Path) -> None:
    """Note that a step is used; a folder that cannot be written to can still be read."""
    with suppress(OSError):
        os.utime(folder)


def _held_constants(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Tensors that a recorded step holds, by name."""
    names = [node.target for node in graph.graph.nodes if node.op == "get_attr"]
    return {name: getattr(graph, name).detach() for name in names}


def _digest(request: str, code: str, constants: dict[str, Tensor]) -> str:
    found = hashlib.sha256(request.encode() + code.encode())
    for held in constants.values():
        found.update(held.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


def _like(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype).removeprefix("torch."), str(tensor.device)]


def _precision_flags() -> dict[str, bool]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {"deterministic": cudnn.deterministic, "cudnn": cudnn.allow_tf32, "matmul": matmul.allow_tf32}


def _keep_few(folder: Path) -> None:
    """Remove what killed runs left, and what was not used for the longest time until the folder is small enough."""
    total, now = 0, time.time()
    for used, path, size in sorted([_used(path, now) for path in folder.iterdir() if path.is_dir()], reverse=True):
        total += size
        if total > KEPT_BYTES or (path.name.startswith(REQUEST_PREFIX) and now - used > ABANDONED):
            shutil.rmtree(path, ignore_errors=True)


def _used(path: Path, now: float) -> tuple[float, Path, int]:
    """(when a folder was used, the folder, its bytes); one that others are just removing or writing is used now."""
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return path.stat().st_mtime, path, size
    except FileNotFoundError:
        return now, path, 0


def _end(worker: subprocess.Popen[bytes], asked: Path, process: int) -> None:
    """Nobody wants the result any more, or it is there. A fork of the process that asked ends nothing."""
    if os.getpid() != process:
        return
    if worker.poll() is None:
        worker.kill()
        with suppress(subprocess.TimeoutExpired):  # one that a driver holds ends later, and nobody waits for it
            worker.wait(SECONDS_AFTER_KILL)
    shutil.rmtree(asked, ignore_errors=True)


def _import_loader() -> None:
    """Import what loads compiled steps, which takes seconds, while a worker is still at work."""
    import torch._inductor.async_compile
    import torch._inductor.compile_fx
    import torch._inductor.runtime.triton_heuristics  # noqa: F401


def _load(folder: Path, device: torch.device) -> FlatStep:
    artefacts = torch._inductor.CompiledArtifact  # type: ignore[attr-defined]
    artefact = artefacts.load(path=str(folder / "step.bin"), format="binary")
    constants = load_constants(folder / "constants.safetensors", device)

    def step(*arguments: Tensor) -> Tensor:
        loss: Any = artefact(*arguments, *constants)
        return loss[0] if isinstance(loss, list | tuple) else loss  # type: ignore[no-any-return]

    return step


def _save_constants(path: Path, constants: dict[str, Tensor]) -> None:
    """Each under its number and the kind of its device: a number on the host must stay there."""
    numbered = enumerate(constants.values())
    save_file({f"{i} {t.device.type}": t.cpu().contiguous().clone() for i, t in numbered}, path)


def load_constants(path: Path, device: torch.device) -> list[Tensor]:
    """Tensors that a recorded step holds, on a device."""
    named = sorted(load_file(path).items(), key=lambda item: int(item[0].partition(" ")[0]))
    return [tensor if name.endswith(" cpu") else tensor.to(device) for name, tensor in named]
