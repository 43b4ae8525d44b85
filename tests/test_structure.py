"""Imports point one way, names have one meaning, randomness has one home, and a run needs seven packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fnrfl
from mutants import changed, source_of, tables

PACKAGE = Path(fnrfl.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

HOUSE = ("process", "usercode")  # files beside the rooms
# What each room may import from the others: imports point one way.
ALLOWED = {
    "process": set(),
    "usercode": {"core"},
    "kernels": {"kernels"},
    "core": {"core", "kernels", "process"},
    "algorithms": {"algorithms", "core"},
    "engines": {"engines", "core", "kernels", "process"},
    "models": {"models", "core", "usercode", "process"},
    "data": {"data", "core", "usercode", "process"},
    "config": {"config", "data", "core", "usercode", "process"},  # data: how a scenario is written
    "rundir": {"rundir", "config", "core", "process"},
    "runs": {"runs", "rundir", "engines", "algorithms", "models", "data", "config", "core", "kernels", *HOUSE},
    "federation": {"federation", "runs", "rundir", "engines", "algorithms", "data", "config", "core", *HOUSE},
    "flower": {"flower", "federation", "runs", "rundir", "algorithms", "data", "config", "core", *HOUSE},
    "results": {"results", "runs", "rundir", "config", "core", *HOUSE},
    "cli": {"cli", "results", "flower", "federation", "runs", "rundir", "data", "config", "core", *HOUSE},
}

# Names that several modules of one room define, each with its reason. Every other class, function and constant has one
# home in its room.
DEFINED_TWICE = {
    "DATASET": "each file of data/sources/ has its data set",
    "URL": "where each of them comes from",
    "load": "config.load is for users, and a data set has one",
    "run": "the commands `run` and `deploy run`",
    **dict.fromkeys(("convolve", "convolve_back", "weigh"), "kernels for most GPUs, and for Hopper's"),
}
T_VARIABLES = {"T", "log"}  # a type variable, and the logger of the package
MOST_FILES = 25  # in a folder, the methods aside


def name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(path: Path) -> set[str]:
    """Names below fnrfl that a module imports, or imports from, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "fnrfl":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fnrfl."):
            found.add((node.module or "").removeprefix("fnrfl."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("fnrfl.") for alias in node.names if alias.name.startswith("fnrfl.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_point_one_way(path: Path) -> None:
    room = name(path).split(".")[0]
    if room in ALLOWED:  # all but the doors: __init__, __main__ and method
        assert {other.split(".")[0] for other in imported(path)} <= ALLOWED[room] | {"__version__"}


def test_the_package_is_a_few_rooms() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.is_file() or any(path.rglob("*.py"))}
    files = {"__init__.py", "__main__.py", "method.py", "process.py", "usercode.py", "py.typed"}
    assert entries == files | {*ALLOWED} - {*HOUSE}
    assert len(entries - {"py.typed"}) <= 18


def defined(path: Path) -> set[str]:
    """Classes, and public functions, constants and type aliases, that a module defines at its top level."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name.lstrip("_"))
        elif isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            flat = [one for target in targets for one in getattr(target, "elts", [target])]
            names += [one.id for one in flat if isinstance(one, ast.Name)]
    return {one for one in names if not one.startswith("_")}


def test_a_name_has_one_home_in_its_room() -> None:
    homes: dict[tuple[str, str], list[str]] = {}
    for path in MODULES:
        for one in defined(path) - T_VARIABLES:
            homes.setdefault((name(path).split(".")[0], one), []).append(name(path))
    several = {one: modules for (_, one), modules in homes.items() if len(modules) > 1}
    assert {one: modules for one, modules in several.items() if one not in DEFINED_TWICE} == {}


def test_an_objective_has_a_name_of_its_own() -> None:
    """Objectives travel by their class name."""
    found = [one for path in MODULES if name(path).startswith("algorithms") for one in defined(path)]
    classes = [one for one in found if one[:1].isupper() and not one.isupper()]
    assert len(classes) == len(set(classes))


def test_no_folder_has_more_files_than_can_be_seen_at_once() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in MODULES}}
    crowded = {name(folder): count for folder, count in counts.items() if count > MOST_FILES}
    assert {*crowded} <= {"algorithms"}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_randomness_is_made_in_one_place(path: Path) -> None:
    if name(path) in ("core.rng", "data.partition.niid"):
        return
    text = path.read_text()
    for forbidden in ("np.random.seed", "np.random.default_rng", "manual_seed", "import random", "RandomState"):
        assert forbidden not in text, f"{name(path)} makes its own randomness: {forbidden}"


def test_a_run_needs_only_seven_packages() -> None:
    """torch with its filelock, numpy, safetensors, pydantic, typer and rich; what else is installed is hidden here."""
    code = """
import sys
HIDDEN = {"matplotlib", "jinja2", "PIL", "sklearn", "scipy", "pandas", "hypothesis", "pytest", "flwr", "ray"}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import fnrfl
assert fnrfl.run(out=None, rounds=1, fnr="on").accuracy > 0
assert fnrfl.run(out=None, rounds=1).accuracy > 0  # twice: the function is not shadowed by a module
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_fnrfl_does_not_import_torch() -> None:
    code = "import sys, fnrfl; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_mutant_has_its_place() -> None:
    """What the tables of mutants change is in the source, once; to run the mutants takes half an hour."""
    found = tables()
    for mutant in found:
        assert changed(mutant, source_of(mutant, PACKAGE).read_text())
        assert mutant.old != mutant.new, mutant.name
    assert len({m.name for m in found}) == len(found)
    assert {name(source_of(m, PACKAGE)) for m in found} >= {
        name(path)
        for path in MODULES
        if name(path).startswith("algorithms.") and path.stem not in ("__init__", "spilled")
    }


@pytest.mark.xdist_group("alone")
def test_the_tests_of_a_group_are_one_workers(request: pytest.FixtureRequest) -> None:
    """pytest-xdist knows groups by the names of tests: under a pytest that names them otherwise it forgets groups."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@alone")
