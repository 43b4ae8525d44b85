"""Everything that the author of a method imports: `from fnrfl.method import Algorithm, LocalTask, State`.

The names are defined in `fnrfl.core`; CONTRIBUTING.md has a whole method.
"""

from __future__ import annotations

from fnrfl.core.algorithm import Algorithm, MethodWrapper, Objective, class_indicator, cross_entropy
from fnrfl.core.engine import Decorator, Engine, Probe, Step, run_steps
from fnrfl.core.fold import Fold, fold, nothing
from fnrfl.core.net import Model, Net
from fnrfl.core.options import option
from fnrfl.core.training import Training
from fnrfl.core.trees import Tree, aligned
from fnrfl.core.values import SERVER, Batch, Data, Flat, Folded, LocalTask, Out, Replies, Shapes, State

__all__ = [
    "SERVER", "Algorithm", "Batch", "Data", "Decorator", "Engine", "Flat", "Fold", "Folded", "LocalTask",
    "MethodWrapper", "Model", "Net", "Objective", "Out", "Probe", "Replies", "Shapes", "State", "Step", "Training",
    "Tree", "aligned", "class_indicator", "cross_entropy", "fold", "nothing", "option", "run_steps",
]  # fmt: skip
