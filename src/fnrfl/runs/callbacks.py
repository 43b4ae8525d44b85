"""Who is told about a run while it goes on: callbacks, such as loggers, and the log of notices."""

from __future__ import annotations

import copy
import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fnrfl.core.errors import ConfigError, FnrflError
from fnrfl.rundir.events import Event

if TYPE_CHECKING:
    from fnrfl.config import RunConfig
    from fnrfl.runs.result import Result

log = logging.getLogger("fnrfl")
MOMENTS = ("begin", "round", "end", "stop")
_told_in_series: ContextVar[set[str] | None] = ContextVar("told_in_series", default=None)


class Callback:
    """Is told about a run: `begin`, then `round` after each round, then either `end` or `stop`. Define what you need.

    Any object with some of these methods will do. One object can hear of several runs, one after another. What it is
    given are copies. An error in `begin` or `round` ends the run, which is saved and can be resumed; the error names
    the callback. KeyboardInterrupt from `round` stops a run as Ctrl-C does.
    """

    def begin(self, config: RunConfig, facts: Mapping[str, Any]) -> None:
        """Before the first round. `facts` is the first line of the log without the config, and four facts more.

        `facts["run_dir"]` is the run directory (None: nothing is written), `facts["folder"]` where its files are now:
        a run that replaces another gets its name with its first checkpoint. `facts["resumed"]` says whether the run
        goes on, `facts["rounds_done"]` how many rounds it has: they are not told again, and the next is the one after.
        """

    def round(self, event: Event) -> None:
        """After a round, with its line of the log."""

    def end(self, result: Result) -> None:
        """After the last round. The run is finished, so an error here is noted and nothing else."""

    def stop(self, error: BaseException) -> None:
        """Instead of `end`: the run was interrupted or has failed, perhaps in `begin`. An error here is noted."""


class Listeners:
    """All who are told about a run: a function that hears of rounds, and callbacks."""

    def __init__(self, progress: Callable[[Event], None] | None, callbacks: Sequence[Any]) -> None:
        if not isinstance(callbacks, list | tuple):
            raise ConfigError(f"callbacks is {_name(callbacks)}, and must be a list, as in callbacks=[MyCallback()].")
        for place, callback in enumerate(callbacks):
            if isinstance(callback, type):
                raise ConfigError(f"callbacks[{place}] is the class {callback.__name__}; give an object of it.")
            if not any(callable(getattr(callback, moment, None)) for moment in MOMENTS):
                raise ConfigError(
                    f"callbacks[{place}] is {_name(callback)}, and has none of the methods {', '.join(MOMENTS)}. "
                    "Derive it from fnrfl.Callback; a function that hears of rounds is given as progress."
                )
        self.progress, self.callbacks = progress, tuple(callbacks)
        self._run_dir: Path | None = None

    @contextmanager
    def hearing(self, config: RunConfig, facts: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Around all rounds: whoever has heard of the beginning also hears if the run is stopped."""
        told = 0
        try:
            known = dict(facts()) if self.callbacks else {}
            self._run_dir = known.get("run_dir")
            for told, callback in enumerate(self.callbacks, 1):  # noqa: B007
                self._tell(callback, "begin", config, copy.deepcopy(known))
            yield
        except BaseException as error:
            self._stop(self.callbacks[:told], error)
            raise

    def round(self, event: Event) -> None:
        """Everybody hears of a round that has ended."""
        if self.progress is not None:
            self.progress(event | {"seconds": sum(event["seconds"].values())})
        for callback in self.callbacks:
            self._tell(callback, "round", copy.deepcopy(event))

    def end(self, result: Result) -> None:
        """Tell every callback of the end."""
        for place, callback in enumerate(self.callbacks):
            try:
                _call(callback, "end", result)
            except Exception as error:
                log.warning(f"The run is finished, and the callback {_name(callback)} has failed in end: {_why(error)}")
            except BaseException as error:
                self._stop(self.callbacks[place:], error)
                raise

    def _tell(self, callback: Any, moment: str, *what: Any) -> None:
        try:
            _call(callback, moment, *what)
        except FnrflError:
            raise
        except Exception as error:
            when, way = "before the first round", "Correct the callback or leave it out, and run again."
            if moment == "round":
                when = f"in round {what[0]['round']}"
            if moment == "round" and self._run_dir is not None:
                again = f"fnrfl resume {shlex.quote(str(self._run_dir))}"
                way = f"The run is saved: correct the callback or leave it out, and go on with `{again}`."
            raise FnrflError(f"The callback {_name(callback)} has failed {when} ({_why(error)}) {way}") from error

    @staticmethod
    def _stop(callbacks: Sequence[Any], error: BaseException) -> None:
        for callback in callbacks:
            try:
                _call(callback, "stop", error)
            except Exception as another:
                log.warning(f"The callback {_name(callback)} has failed in stop: {_why(another)}")


def _call(callback: Any, moment: str, *what: Any) -> None:
    getattr(callback, moment, lambda *_: None)(*what)


def _name(callback: object) -> str:
    return type(callback).__name__


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(". ") + "."


# -- notices -----------------------------------------------------------------------------------------------------------


@contextmanager
def series_of_runs() -> Iterator[None]:
    """Log no notice of a run inside again that an earlier one had."""
    token = _told_in_series.set(set())
    try:
        yield
    finally:
        _told_in_series.reset(token)


def log_once(notices: Sequence[str], level: int = logging.WARNING) -> None:
    """Log the notices of a run that its series has not had; two that begin with one sentence are one."""
    told = _told_in_series.get()
    for notice in notices:
        first = notice.partition(". ")[0].rstrip(".")
        if told is None or first not in told:
            log.log(level, notice)
        if told is not None:
            told.add(first)
