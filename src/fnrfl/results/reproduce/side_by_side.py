"""Cells in several processes: while one prepares its programs, the others keep the GPU at work."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from fnrfl.core.errors import FnrflError
from fnrfl.results.reproduce.cell_lines import HowToRun, compute_line
from fnrfl.results.reproduce.kept_lines import CellLine
from fnrfl.results.reproduce.paper_cells import PaperCell
from fnrfl.rundir.interrupt import Interrupted

DIED = "A process ended before {cell} was done; perhaps there was not enough memory. Set a smaller --processes."
NO_PROCESS = "The system has no process for another cell ({error}). Set a smaller --processes."
SECONDS_TO_END = 5.0  # for processes to clean up


def compute_beside(cells: Iterator[PaperCell], how: HowToRun) -> Generator[tuple[PaperCell, CellLine]]:
    """Yield each cell with its line as soon as it is done; closing the generator ends the processes.

    A process that dies and an error that concerns all cells end it too.
    """
    processes, idle, busy = list[BaseProcess](), list[Connection](), dict[Connection, PaperCell]()
    try:
        while True:
            while len(busy) < how.processes and (cell := next(cells, None)) is not None:
                pipe = idle.pop() if idle else _start(processes, how)
                busy[pipe] = cell
                with _death_named(cell):
                    pipe.send(cell)
            if not busy:
                return
            ready = wait(list(busy))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                with _death_named(busy[pipe]):
                    answer: CellLine | FnrflError = pipe.recv()
                if isinstance(answer, FnrflError):
                    raise answer
                idle.append(pipe)
                yield busy.pop(pipe), answer
    finally:  # also after Ctrl-C
        _end(processes)


@contextmanager
def _death_named(cell: PaperCell) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise FnrflError(DIED.format(cell=cell.id)) from error


def _start(processes: list[BaseProcess], how: HowToRun) -> Connection:
    """Start a process for one cell after another, and add it to `processes`.

    Ctrl-C waits meanwhile, and the process never has it: it would end with a traceback.
    """
    context = get_context("spawn")
    resource_tracker.ensure_running()  # starting it would unblock Ctrl-C
    mask = getattr(signal, "pthread_sigmask", None)  # Windows has none
    before = mask and mask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=[theirs, how], daemon=True)
        process.start()
        processes.append(process)
    except OSError as error:
        raise FnrflError(NO_PROCESS.format(error=error.strerror or error)) from error
    finally:
        if mask is not None:
            mask(signal.SIG_SETMASK, before)
    theirs.close()  # so that the end of the process closes the pipe
    return mine


def _end(processes: list[BaseProcess]) -> None:
    """Ask all processes to end, and kill those that have not after some seconds."""
    for process in processes:
        process.terminate()
    latest = time.monotonic() + SECONDS_TO_END
    for process in processes:
        process.join(max(0.0, latest - time.monotonic()))
        process.kill()
        process.join()


def _serve(pipe: Connection, how: HowToRun) -> None:
    """Compute cells until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    signal.signal(signal.SIGTERM, _stop_at_once)
    try:
        while True:
            cell = pipe.recv()
            try:
                pipe.send(compute_line(cell, how, lambda event: None))
            except FnrflError as error:
                pipe.send(error)
    except (KeyboardInterrupt, EOFError, OSError):
        return


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: a run alone would go on to the end of its round. A second one kills."""
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted(number)
