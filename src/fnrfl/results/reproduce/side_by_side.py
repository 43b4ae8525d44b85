"""Cells in several processes: while one prepares its programs, the others keep the GPU at work."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import FrameType

from fnrfl.core.errors import FnrflError
from fnrfl.results.reproduce.cell_lines import HowToRun, compute_line, failed_line
from fnrfl.results.reproduce.cell_queue import CellNotice, CellQueue, CellTurn, Tell, work_through
from fnrfl.results.reproduce.kept_lines import CellLine
from fnrfl.rundir.interrupt import Interrupted

DIED = "The process ended before the cell was done; perhaps there was not enough memory."
NO_PROCESS = "The system has no process for another cell ({error}). Set a smaller --processes."
NOT_STARTED = "A process for cells ended before it could begin; what it said stands above. Leave out --processes."
LATE_AFTER = 600.0  # seconds, at least, after which a cell that has not ended is late
LATE_TIMES = 3.0  # and so many times the seconds that are expected of it
SHOW = getattr(signal, "SIGUSR1", None)  # has a process print where it is; Windows has no such signal
SECONDS_TO_END = 5.0  # for a process to end by itself
READY = "ready"  # what a process says before its first cell


def work_side_by_side(waiting: CellQueue, how: HowToRun, tell: Tell) -> None:
    """Run cells of a queue in several processes; the first error that concerns all of them ends them."""
    workers = [CellProcess(how) for _ in range(how.processes)]
    ended: SimpleQueue[BaseException | None] = SimpleQueue()  # why each thread has: None, or what went wrong
    speaking = threading.Lock()

    def say(notice: CellNotice) -> None:
        with speaking:
            tell(notice)

    def work(worker: CellProcess) -> None:
        def compute(turn: CellTurn) -> CellLine:
            late_after = max(LATE_AFTER, LATE_TIMES * turn.expected_seconds)
            try:
                return worker.compute(turn, late_after, lambda: say(replace(turn.notice, what="late")))
            except EOFError:
                if waiting.stopped:  # it was ended on purpose
                    raise
                worker.end(time.monotonic() + SECONDS_TO_END)
                return failed_line(turn.cell, how, DIED)

        try:
            _leave_ctrl_c_to_others()
            work_through(waiting, compute, say)
        except BaseException as error:  # also that nobody reads the output any more
            ended.put(error)
        else:
            worker.tell_to_end()  # now: others have use for its memory
            ended.put(None)

    try:
        for worker in workers:
            threading.Thread(target=work, args=[worker], daemon=True).start()
        for _ in workers:
            if (error := ended.get()) is not None:
                raise error
    finally:  # also after Ctrl-C
        waiting.stopped = True
        for worker in workers:  # all are told before one is waited for
            worker.tell_to_end()
        latest = time.monotonic() + SECONDS_TO_END
        for worker in workers:
            worker.end(latest)


class CellProcess:
    """A process that computes one cell after another; it is started with its first one, and again after its end."""

    def __init__(self, how: HowToRun) -> None:
        self._how = how
        self._running: tuple[BaseProcess, Connection] | None = None
        self._starting, self._told_to_end = threading.Lock(), False

    def compute(self, turn: CellTurn, late_after: float, tell_late: Callable[[], None]) -> CellLine:
        """The line of a cell. Raises what concerns all cells, and EOFError if the process died.

        A process that has not ended the cell after so many seconds is told of, and prints where it is, if it can.
        """
        pipe = self._start() if self._running is None else self._running[1]
        with _end_is_noticed():
            pipe.send((turn.cell, turn.alike, turn.kept))
            is_late = not pipe.poll(late_after)
        if is_late:
            tell_late()  # who may find that nobody reads the output any more: no fault of the process
            self._show_where_it_is()
        with _end_is_noticed():
            answer: CellLine | FnrflError = pipe.recv()
        if isinstance(answer, FnrflError):
            raise answer
        return answer

    def _start(self) -> Connection:
        context = get_context("spawn")
        with self._starting:
            if self._told_to_end:
                raise EOFError
            try:
                mine, theirs = context.Pipe()
                process = context.Process(target=_serve, args=[theirs, self._how], daemon=True)
                process.start()
            except OSError as error:  # no cell is at fault
                raise FnrflError(NO_PROCESS.format(error=error.strerror or error)) from error
            self._running = process, mine
        theirs.close()  # so that its end is noticed here
        try:
            with _end_is_noticed():
                mine.recv()
        except EOFError:
            raise FnrflError(NOT_STARTED) from None
        return mine

    def _show_where_it_is(self) -> None:
        """Have the process print the lines that its threads are at, to standard error; it goes on."""
        with self._starting:
            process = None if self._running is None else self._running[0]
            if SHOW is not None and process is not None and process.pid is not None and process.is_alive():
                with suppress(ProcessLookupError):  # it has ended since
                    os.kill(process.pid, SHOW)

    def tell_to_end(self) -> None:
        """Ask the process to end, whatever it is doing; one that is being started is started first.

        Else this program could end in the middle, and the other would complain that it was told half of what to do.
        """
        with self._starting:
            self._told_to_end = True
            if self._running is not None:
                self._running[0].terminate()

    def end(self, latest: float) -> None:
        """Wait until the process has ended; at the latest time it is killed."""
        if self._running is not None:
            process, _ = self._running
            process.join(max(0.0, latest - time.monotonic()))
            process.kill()
            process.join()
            self._running = None


@contextmanager
def _end_is_noticed() -> Iterator[None]:
    """A pipe whose other side has died says so in two ways; inside, in one."""
    try:
        yield
    except OSError as error:
        raise EOFError from error


def _serve(pipe: Connection, how: HowToRun) -> None:
    """Compute cells as they are asked for, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    signal.signal(signal.SIGTERM, _stop_at_once)
    if SHOW is not None:
        faulthandler.register(SHOW, file=2, all_threads=True)  # standard error
    try:
        pipe.send(READY)
        while True:
            cell, alike, kept = pipe.recv()
            try:
                pipe.send(compute_line(cell, how, alike, lambda event: None, kept))
            except FnrflError as error:
                pipe.send(error)
    except (KeyboardInterrupt, EOFError, OSError):  # it was told to end, or whoever asked has gone
        return


def _stop_at_once(number: int, frame: FrameType | None) -> None:
    """The handler of SIGTERM here; a run alone would go on to the end of its round. A second one kills."""
    signal.signal(number, signal.SIG_DFL)
    raise Interrupted(number)


def _leave_ctrl_c_to_others() -> None:
    """Ignore Ctrl-C in this thread, and in the processes that it starts until they handle it themselves.

    Else each of them would end with a traceback.
    """
    if hasattr(signal, "pthread_sigmask"):  # Windows has none
        resource_tracker.ensure_running()  # first: a thread that starts it has Ctrl-C again afterwards
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
