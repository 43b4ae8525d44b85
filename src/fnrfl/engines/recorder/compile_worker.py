"""The worker: a process that compiles one recorded step, and keeps it on disk.

python -m fnrfl.engines.recorder.compile_worker REQUEST OUT      REQUEST is a folder that `compiled.start` wrote
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from filelock import FileLock
from torch import fx

from fnrfl.engines.recorder.compiled import PATIENCE, load_constants


def compile_request(asked: Path, folder: Path) -> None:
    """Compile a step that `start` asked for, unless another worker is at it: then wait for that one."""
    with FileLock(folder.with_suffix(".lock")):  # free again if its process is killed
        if not (folder / "step.bin").exists():
            _compile(asked, folder)


def _compile(asked: Path, folder: Path) -> None:
    """Compile a step into a folder, which appears whole or not at all. The process ends if that takes too long."""
    if hasattr(signal, "alarm"):
        signal.alarm(int(PATIENCE))  # a compiler that hangs must not keep others from their turn
    import torch._dynamo  # the compiler takes for granted that somebody has imported it

    import fnrfl.kernels.convolution  # noqa: F401, our own operators, which a step may hold

    request = json.loads((asked / "request.json").read_text())
    settings, cudnn = request["settings"], torch.backends.cudnn
    cudnn.deterministic, cudnn.allow_tf32 = settings["deterministic"], settings["cudnn"]
    torch.backends.cuda.matmul.allow_tf32 = settings["matmul"]
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=True)
    arguments = [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        for shape, stride, dtype, device in request["arguments"]
    ]
    constants = load_constants(asked / "constants.safetensors", arguments[0].device)
    graph = _graph_of((asked / "step.py").read_text(), request["constants"], len(arguments) + len(constants))
    with torch.no_grad():
        artefact = torch._inductor.standalone_compile(
            graph, [*arguments, *constants], dynamic_shapes="from_example_inputs"
        )
    made = asked / "made"
    made.mkdir()
    artefact.save(path=str(made / "step.bin"), format="binary")
    shutil.copy(asked / "constants.safetensors", made)
    try:
        os.replace(made, folder)
    except OSError:
        if not (folder / "step.bin").exists():  # another process was faster
            raise


def _graph_of(code: str, names: list[str], count: int) -> fx.GraphModule:
    """A recorded step of `count` tensors from its text; those that it holds, by `names`, come last among them.

    A saved artefact cannot hold tensors. Nothing is computed here.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    arguments = [fx.Proxy(graph.placeholder(f"argument_{i}"), tracer) for i in range(count)]
    first = count - len(names)
    held = SimpleNamespace(**dict(zip(names, arguments[first:], strict=True)))
    known = SimpleNamespace(**vars(torch) | {"ops": _Operators(torch.ops, tracer)})
    space: dict[str, Any] = {"torch": known, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(code, space)  # what this user's process has recorded
    graph.output(space["forward"](held, *arguments[:first]).node)
    return fx.GraphModule({}, graph)


class _Operators:
    """Operators by their names; to call one writes it into a graph, also where no tensor is given to it."""

    def __init__(self, found: Any, tracer: fx.proxy.TracerBase) -> None:
        self._found, self._tracer = found, tracer

    def __getattr__(self, name: str) -> _Operators:
        return _Operators(getattr(self._found, name), self._tracer)

    def __call__(self, *given: Any, **named: Any) -> fx.Proxy:
        return self._tracer.create_proxy("call_function", self._found, given, named)


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)  # whoever trains meanwhile comes first
    compile_request(Path(sys.argv[1]), Path(sys.argv[2]))
