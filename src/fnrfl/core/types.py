"""All that a method's author imports: the values, the engine's verbs, and the probe.

They are defined in `values.py`, `trees.py`, `training.py`, `fold.py`, `engine.py` and `feed.py`.
"""

from __future__ import annotations

from fnrfl.core.engine import Decorator, Engine, Probe, Step, run_steps
from fnrfl.core.feed import Feed, Plan
from fnrfl.core.fold import Fold, fold, nothing
from fnrfl.core.training import Training
from fnrfl.core.trees import Tree, aligned
from fnrfl.core.values import (
    SERVER,
    Batch,
    Data,
    Flat,
    Folded,
    LocalTask,
    Out,
    RandomStream,
    Replies,
    Shapes,
    State,
    nobody_answered,
)

__all__ = [
    "SERVER", "Batch", "Data", "Decorator", "Engine", "Feed", "Flat", "Fold", "Folded", "LocalTask", "Out", "Plan",
    "Probe", "RandomStream", "Replies", "Shapes", "State", "Step", "Training", "Tree", "aligned", "fold",
    "nobody_answered", "nothing", "run_steps",
]  # fmt: skip
