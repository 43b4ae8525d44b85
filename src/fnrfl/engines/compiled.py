"""Recorded steps compiled side by side: each by a process of its own, and kept on disk for all that come later.

Compiling a large step takes most of a minute of one core. While a worker compiles one, the caller records the next;
what was compiled before, by any process of this user, is only loaded.

    python -m fnrfl.engines.compiled REQUEST OUT      the worker; REQUEST is a folder that `start` wrote
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

from fnrfl.engines.recorder import FlatStep, Recording

log = logging.getLogger("fnrfl")
THREADS = "4"  # of one worker: several are at work at the same time
KEPT = 256  # compiled steps on disk; the oldest go first


def cache_folder() -> Path:
    """Where compiled steps are kept: FNRFL_CACHE, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get("FNRFL_CACHE") or os.path.join(base, "fnrfl")) / "programs"


@dataclass
class Compiling:
    """A step that is compiled, or will be when its worker has ended."""

    folder: Path
    device: torch.device
    worker: subprocess.Popen[str] | None = None  # None: it was compiled before

    def result(self) -> FlatStep:
        """The compiled step; waits for it. Raises RuntimeError with the worker's last words if there is none."""
        if self.worker is not None:
            _, said = self.worker.communicate()
            if self.worker.returncode:
                log.debug("a worker could not compile a step:\n%s", said)
                raise RuntimeError(said.strip().rpartition("\n")[2] or f"exit status {self.worker.returncode}")
        return _load(self.folder, self.device)


def start(recording: Recording) -> Compiling:
    """Have a step compiled by another process, unless that was done before."""
    device = recording.constants[0].device
    request = {
        "arguments": [_like(t) for t in [*recording.constants, *recording.turn]],
        "settings": _precision_flags(),
        "made_with": [torch.__version__, str(torch.version.cuda), torch.cuda.get_device_name(device), sys.version],
    }
    text = json.dumps(request, sort_keys=True)
    folder = cache_folder() / _digest(text, recording.graph)
    if (folder / "step.bin").exists():
        os.utime(folder)
        return Compiling(folder, device)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _keep_few(folder.parent)
    asked = Path(tempfile.mkdtemp(prefix="asked-", dir=folder.parent))
    (asked / "request.json").write_text(text)
    (asked / "graph.pickle").write_bytes(pickle.dumps(recording.graph))
    command = [sys.executable, "-m", "fnrfl.engines.compiled", str(asked), str(folder)]
    worker = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_COMPILE_THREADS": THREADS},
    )  # fmt: skip
    compiling = Compiling(folder, device, worker)
    weakref.finalize(compiling, _end, worker, asked)
    return compiling


def _digest(request: str, graph: fx.GraphModule) -> str:
    found = hashlib.sha256(request.encode() + graph.code.encode())
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            held = getattr(graph, node.target).detach().cpu().contiguous()
            found.update(held.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


def _like(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype).removeprefix("torch."), str(tensor.device)]


def _precision_flags() -> dict[str, bool]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {"deterministic": cudnn.deterministic, "cudnn": cudnn.allow_tf32, "matmul": matmul.allow_tf32}


def _keep_few(folder: Path) -> None:
    oldest_last = sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime)
    for path in oldest_last[KEPT:]:
        shutil.rmtree(path, ignore_errors=True)


def _end(worker: subprocess.Popen[str], asked: Path) -> None:
    """Nobody wants the result any more, or it is there."""
    if worker.poll() is None:
        worker.kill()
        worker.wait()
    if worker.stderr is not None:
        worker.stderr.close()
    shutil.rmtree(asked, ignore_errors=True)


def _load(folder: Path, device: torch.device) -> FlatStep:
    artefacts = torch._inductor.CompiledArtifact  # type: ignore[attr-defined]
    artefact = artefacts.load(path=str(folder / "step.bin"), format="binary")
    lifted = load_file(folder / "constants.safetensors", device=str(device))
    constants = [lifted[str(i)] for i in range(len(lifted))]

    def step(*arguments: Tensor) -> Tensor:
        loss: Any = artefact(*arguments, *constants)
        return loss[0] if isinstance(loss, list | tuple) else loss  # type: ignore[no-any-return]

    return step


# -- the worker --------------------------------------------------------------------------------------------------------


def compile_request(asked: Path, folder: Path) -> None:
    """Compile a step that `start` asked for into a folder, which appears whole or not at all."""
    import torch._dynamo  # the compiler takes for granted that somebody has imported it

    request = json.loads((asked / "request.json").read_text())
    graph: fx.GraphModule = pickle.loads((asked / "graph.pickle").read_bytes())  # noqa: S301  # this user's own
    settings, cudnn = request["settings"], torch.backends.cudnn
    cudnn.deterministic, cudnn.allow_tf32 = settings["deterministic"], settings["cudnn"]
    torch.backends.cuda.matmul.allow_tf32 = settings["matmul"]
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=True)
    constants = _lifted_constants(graph)
    arguments = [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        for shape, stride, dtype, device in request["arguments"]
    ]
    with torch.no_grad():
        artefact = torch._inductor.standalone_compile(
            graph, [*arguments, *constants], dynamic_shapes="from_example_inputs"
        )
    made = asked / "made"
    made.mkdir()
    artefact.save(path=str(made / "step.bin"), format="binary")
    save_file({str(i): t.contiguous() for i, t in enumerate(constants)}, made / "constants.safetensors")
    os.replace(made, folder)


def _lifted_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Make arguments of the tensors that a graph holds: a saved artefact has no place for them."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    held: dict[str, Tensor] = {}
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"constant_{len(held)}")
        held[f"{len(held)} {node.target}"] = getattr(graph, node.target).detach()
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    for name in {name.partition(" ")[2] for name in held}:
        delattr(graph, name)
    graph.recompile()
    return list(held.values())


if __name__ == "__main__":
    compile_request(Path(sys.argv[1]), Path(sys.argv[2]))
