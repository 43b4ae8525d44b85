"""A grid of runs in one table: every combination of some values, every seed, and paired differences.

cells = grid("digits", [], ["algorithm=fedavg,scaffold", "fnr=off,on"], [0, 1, 2])
found = compare(cells, "runs/methods")        # again after a kill: finished runs are kept, unfinished ones go on
print(found.to_markdown())
"""

from __future__ import annotations

from fnrfl.results.compare.cells import (
    Cell,
    Group,
    about_seeds,
    axes_in_words,
    grid,
    named_cells,
    overrides_in_words,
    read_duration,
    read_seeds,
    seeds_in_list,
    split_commas,
)
from fnrfl.results.compare.folder import default_out
from fnrfl.results.compare.running import Notice, PlannedRun, compare, compared_metric, plan_grid
from fnrfl.results.compare.tables import METRICS, Comparison, FailedCell, Row, notes, summarise, table, tasks_table

__all__ = [
    "METRICS", "Cell", "Comparison", "FailedCell", "Group", "Notice", "PlannedRun", "Row", "about_seeds",
    "axes_in_words", "compare", "compared_metric", "default_out", "grid", "named_cells", "notes",
    "overrides_in_words", "plan_grid", "read_duration", "read_seeds", "seeds_in_list", "split_commas",
    "summarise", "table", "tasks_table",
]  # fmt: skip
