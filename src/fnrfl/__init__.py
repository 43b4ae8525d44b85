"""Federated learning for skewed data: FNR-FL and the methods it compares, honest and fast.

import fnrfl
result = fnrfl.run("digits", algorithm="scaffold", fnr=dict(weight=0.1), seed=3)
result.accuracy, result.rounds, result.bytes_up, result.model
fnrfl.load(result.run_dir)         # the same object from disk: runs/digits-scaffold-fnr-3
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fnrfl.runs.own_loop import class_norms, norm_targets, refine, weakest
    from fnrfl.runs.result import Result

__version__ = "0.2.0.dev0"
__all__ = ["__version__", "class_norms", "load", "norm_targets", "refine", "resume", "run", "weakest"]
_IN_OWN_LOOP = ("class_norms", "norm_targets", "refine", "weakest")  # for a training loop of your own


def run(
    recipe: str | Path | None = None,
    *,
    out: str | Path | None | Literal[True] = True,
    overwrite: bool = False,
    trust: bool = False,
    progress: Callable[[dict[str, Any]], None] | None = None,
    checkpoint_every: float = 30.0,
    **keys: object,
) -> Result:
    """Run a recipe (a packaged name or a TOML file; without one, the embedded example) with some keys changed.

    The keys are those of `fnrfl list keys`, sections as dicts: `algorithm="moon"`, `client=dict(lr=0.05)`. `out` is
    the run directory, by default the first free one of runs/<name>-<method>-<seed>, the same with -2, with -3 and so
    on (a run with FNR has <method>-fnr); with `overwrite` it is the first, free or not. None writes nothing. `trust`
    allows code that a recipe names.

    >>> result = run("digits", algorithm="scaffold", fnr=dict(weight=0.1), rounds=2, seed=3, out=None)
    >>> len(result.rounds), 0 < result.accuracy < 1
    (2, True)
    >>> result.config.fnr.weight, sorted(result.rounds[-1]["bytes"])
    (0.1, ['local', 'measure', 'refine'])
    """
    from fnrfl.config import load as config
    from fnrfl.runs.run import run as start

    return start(
        config(recipe, keys, trust=trust),
        out=out,
        overwrite=overwrite,
        progress=progress,
        checkpoint_every=checkpoint_every,
    )


def resume(
    run_dir: str | Path,
    *,
    trust: bool = False,
    progress: Callable[[dict[str, Any]], None] | None = None,
    checkpoint_every: float = 30.0,
) -> Result:
    """Go on with a run that was stopped; the result is the uninterrupted run's, bit for bit.

    `trust` allows code that its config.toml names and that was never allowed before.
    """
    from fnrfl.runs.run import resume as go_on

    return go_on(run_dir, trust=trust, progress=progress, checkpoint_every=checkpoint_every)


def load(run_dir: str | Path, *, trust: bool = False) -> Result:
    """A finished run from disk; `trust` allows code that its config.toml names and that was never allowed before."""
    from fnrfl.runs.run import load as read

    return read(run_dir, trust=trust)


def __getattr__(name: str) -> Any:
    """Functions that need torch are imported when they are first asked for."""
    if name not in _IN_OWN_LOOP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fnrfl.runs import own_loop

    return getattr(own_loop, name)
