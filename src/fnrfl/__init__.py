"""Federated learning for skewed data: FNR-FL and the methods it compares, honest and fast.

import fnrfl
result = fnrfl.run("digits", algorithm="scaffold", fnr=dict(weight=0.1), seed=3)
result.accuracy, result.rounds, result.bytes_up, result.model
fnrfl.load(result.run_dir)         # the same object from disk: runs/digits-scaffold-fnr-3
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from typing import Unpack

    from fnrfl.config.keywords import Keys
    from fnrfl.results import statistics
    from fnrfl.results.compare import Comparison, Notice
    from fnrfl.runs import loggers
    from fnrfl.runs.callbacks import Callback
    from fnrfl.runs.functional import class_norms, norm_targets, refine, weakest
    from fnrfl.runs.predict import evaluate, predict
    from fnrfl.runs.result import Result

__version__ = "0.2.0.dev0"
__all__ = [
    "Callback", "Result", "__version__", "class_norms", "compare", "evaluate", "load", "loggers", "norm_targets",
    "predict", "refine", "report", "resume", "run", "statistics", "weakest",
]  # fmt: skip
_HOMES = dict.fromkeys(("class_norms", "norm_targets", "refine", "weakest"), "functional")
_MODULES = {"loggers": "fnrfl.runs.loggers", "statistics": "fnrfl.results.statistics"}
_HOMES |= {"Callback": "callbacks", "Result": "result", "evaluate": "predict", "predict": "predict"}


def run(
    recipe: str | Path | None = None,
    *,
    dataset: Any = None,
    model: Any = None,
    algorithm: Any = None,
    init: Mapping[str, Any] | None = None,
    out: str | Path | None | Literal[True] = True,
    overwrite: bool = False,
    trust: bool = False,
    progress: Callable[[dict[str, Any]], None] | None = None,
    callbacks: Sequence[Any] = (),
    checkpoint_every: float = 30.0,
    **keys: Unpack[Keys],
) -> Result:
    """Run a recipe (a packaged name or a TOML file; without one, the embedded example) with some keys changed.

    The keys are those of `fnrfl list keys`, sections as dicts: `algorithm="moon"`, `client=dict(lr=0.05)`. In the place
    of a name, `dataset` may be arrays `(x, y)`, `(x, y, clients)` or `(x_train, y_train, x_test, y_test)`, a torch
    Dataset or a pair of them; `model` an nn.Module, which is copied and starts from its weights, or a function that
    returns one; `algorithm` a method. `init` are first weights, a state_dict. What was given, `resume` asks for again.

    `out` is the run directory, by default the first free one of runs/<name>-<method>-<seed>, the same with -2, with -3
    and so on (a run with FNR has <method>-fnr); with `overwrite` it is the first, free or not. None writes nothing.
    `trust` allows code that a recipe names. `progress` is called after every round; `callbacks` are objects such as
    `fnrfl.loggers.TensorBoard()`.

    >>> result = run("digits", algorithm="scaffold", fnr=dict(weight=0.1), rounds=2, seed=3, out=None)
    >>> len(result.rounds), 0 < result.accuracy < 1
    (2, True)
    >>> result.config.fnr.weight, sorted(result.rounds[-1]["bytes"])
    (0.1, ['local', 'measure', 'refine'])
    """
    from fnrfl.config import load as config
    from fnrfl.runs.passed import split_arguments
    from fnrfl.runs.run import run as start

    words, passed = split_arguments(keys | _given(dataset=dataset, model=model, algorithm=algorithm), init)
    return start(
        config(recipe, words, trust=trust),
        passed=passed,
        out=out,
        overwrite=overwrite,
        checkpoint_every=checkpoint_every,
        progress=progress,
        callbacks=callbacks,
    )


def resume(
    run_dir: str | Path,
    *,
    dataset: Any = None,
    model: Any = None,
    algorithm: Any = None,
    init: Mapping[str, Any] | None = None,
    public: Any = None,
    trust: bool = False,
    progress: Callable[[dict[str, Any]], None] | None = None,
    callbacks: Sequence[Any] = (),
    checkpoint_every: float = 30.0,
) -> Result:
    """Go on with a run that was stopped; the result is the uninterrupted run's, bit for bit.

    Objects that the run was given must be given again, and are compared by their hash. `trust` allows code that its
    config.toml names and that was never allowed before.
    """
    from fnrfl.runs.passed import objects_for_run
    from fnrfl.runs.run import resume as go_on

    passed = objects_for_run(dataset=dataset, model=model, algorithm=algorithm, init=init, public=public)
    how: dict[str, Any] = {"progress": progress, "callbacks": callbacks, "checkpoint_every": checkpoint_every}
    return go_on(run_dir, passed=passed, trust=trust, **how)


def load(
    run_dir: str | Path,
    *,
    model: Any = None,
    algorithm: Any = None,
    init: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Result:
    """Load a finished run from disk; `trust` allows code that its config.toml names and that was never allowed before.

    A run that was given its model needs it again for `Result.model`, and so do a method that was given, and first
    weights where not all of them are trained. The numbers are there without them.
    """
    from fnrfl.runs.passed import objects_for_run
    from fnrfl.runs.run import load as read

    return read(run_dir, trust=trust, passed=objects_for_run(model=model, algorithm=algorithm, init=init))


def compare(
    recipe: str | Path | None = None,
    *,
    over: Mapping[str, Iterable[Any]] | None = None,
    seeds: Iterable[int] = (0, 1, 2),
    cells: Mapping[str, Sequence[str]] | None = None,
    dataset: Any = None,
    model: Any = None,
    algorithm: Any = None,
    init: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    baseline: str | None = None,
    metric: str | None = None,
    target: float | None = None,
    control: bool = True,
    trust: bool = False,
    progress: Callable[[Notice], None] | None = None,
    callbacks: Sequence[Any] = (),
    checkpoint_every: float = 30.0,
    on: Literal["here", "processes", "ray"] = "here",
    workers: int = 2,
    stop_after: float | None = None,
    **keys: Unpack[Keys],
) -> Comparison:
    """Run every combination of the values in `over` with every seed, as `fnrfl compare` does.

    `over` has lists of values by key: `{"algorithm": ["fedavg", "scaffold"], "client.lr": [0.01, 0.1]}`; methods and
    data may be objects there too, and models functions. In its place `cells` names runs one by one, each with its keys:
    `{"first": ["algorithm=moon", "seed=3"]}`. The runs are kept in `out`, by default runs/compare-<name>-<hash>. Called
    again, finished runs are kept, and unfinished ones go on. They run one after another, or side by side `on` a Ray
    cluster or in `workers` processes. No run begins that would not end before `stop_after` seconds.
    Groups are compared by `metric`, by default accuracy, or accuracy_own if all methods are personalised; one of your
    own is also named in the key `metrics`.
    """
    from fnrfl.core.errors import ConfigError
    from fnrfl.results import compare as comparing
    from fnrfl.runs.passed import split_arguments, split_axes

    words, passed = split_arguments(keys | _given(dataset=dataset, model=model, algorithm=algorithm), init)
    overrides = comparing.overrides_in_words(words)
    if (over is None) == (cells is None):
        raise ConfigError("Give `over`, keys with their values, or `cells`, runs with their keys.")
    if cells is not None:
        grid = comparing.named_cells(recipe, {name: [*overrides, *own] for name, own in cells.items()}, trust=trust)
    else:
        axes, passed = split_axes(over or {}, passed)
        lists, listed = comparing.axes_in_words(axes), comparing.seeds_in_list(seeds)
        grid = comparing.grid(recipe, overrides, lists, listed, control=control, trust=trust)
    return comparing.compare(
        grid, out or comparing.default_out(grid), baseline=baseline, metric=metric, target=target, progress=progress,
        callbacks=callbacks, checkpoint_every=checkpoint_every, passed=passed, on=on, workers=workers,
        stop_after=stop_after,
    )  # fmt: skip


def report(
    *runs: str | Path | Result | Comparison | Sequence[str | Path | Result],
    out: str | Path | None = None,
    title: str | None = None,
    metric: str | None = None,
    plots: bool = False,
) -> Path:
    """Write one HTML page about runs, or folders with runs in them, as `fnrfl report` does; the path of the page.

    A list of runs is as good as its runs one after another. Lines are ranked by `metric`, by default that of their
    comparison.
    """
    from fnrfl.core.errors import ConfigError
    from fnrfl.results.report.page import report as write

    listed = [one for run in runs for one in (run if isinstance(run, list | tuple) else [run])]
    places: list[Any] = [run.folder if hasattr(run, "folder") else getattr(run, "run_dir", run) for run in listed]
    folders = [Path(place) for place in places if place is not None]
    if len(folders) < max(1, len(listed)):
        raise ConfigError("There is no run directory to report on. Give runs that have one: with out=None they do not.")
    return write(folders, None if out is None else Path(out), title=title, metric=metric, plots=plots)


def _given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def __getattr__(name: str) -> Any:
    """Names that need torch are imported when they are first asked for."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fnrfl.runs.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return __all__
