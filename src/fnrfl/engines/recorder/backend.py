"""What makes programs of recorded steps: `torchscript.py` does on a CPU, `cuda_graphs.py` on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fnrfl.engines.recorder.programs import Coming, FlatProgram, Recording


class Backend(Protocol):
    """What makes programs of recorded steps."""

    max_programs: int
    waits: bool  # for what is coming, also where another run of the process did not
    compute: torch.dtype | None  # the least precise type that a step computes in; None: that of its tensors

    def settings(self, expected_steps: int) -> Hashable:
        """What a program depends on beside the step and its arguments."""
        ...

    def candidates(self, recording: Recording) -> tuple[Iterator[FlatProgram], Coming | None]:
        """Programs that may do what the step does, the fastest first; what takes long begins with this call.

        And what is made while the first of them is used, and then takes its place; None: nothing.
        """
        ...

    def recording(self) -> AbstractContextManager[object]:
        """Is around all of recording."""
        ...

    def forget(self) -> None:
        """All programs are gone."""
        ...

    def memory_is_short(self, device: torch.device) -> bool:
        """Whether there is little room for another program, even after `free_memory`."""
        ...

    def free_memory(self) -> None:
        """Give memory back that nobody uses: other processes may need it."""
        ...

    def cannot_record(self) -> None:
        """A step stays as it is."""
        ...
