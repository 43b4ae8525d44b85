"""Break every equation on purpose: a test of its oracle file must fail for each mutant.

    python tests/mutants.py [WORD ...]      # only mutants whose name contains a word

The mutants are in the test files, in tables called `MUTANTS`. A mutant names a function or class of the package, an
expression in it and what takes its place. Both are compared as syntax trees, so the layout of the source, quotes and
everything outside that function do not matter. The tests of the file that has the table run against a changed copy of
the package, then those of tests/test_conformance.py for the method; the first that fails is printed. A mutant that no
test notices survives, and the exit code is 1.
"""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NO_TESTS = 5  # pytest's exit code
LIMIT = 600  # seconds for the tests of a mutant: one that runs for ever is noticed too


@dataclass(frozen=True)
class Mutant:
    """One change, and the tests that should notice it."""

    name: str
    module: str  # below the package
    place: str  # the function's or class's qualified name
    old: str
    new: str
    tests: tuple[str, ...]  # as for pytest, one after another until one fails


def mutants(place: Callable[..., Any], *, also: str = "", **changes: tuple[str, str]) -> list[Mutant]:
    """Mutants of one function or class, each `what_is_wrong=(old, new)`.

    `old` is an expression, a statement or a keyword argument that `place` has once; `...` in it stands for any
    expression, and in `new` for the same one. An empty `new` takes a keyword argument out. `also` names tests, as for
    pytest, that are run if those of the calling file all pass.
    """
    module, where = place.__module__.removeprefix("fnrfl."), place.__qualname__
    return [
        Mutant(f"{module}.{where}: {name.replace('_', ' ')}", module, where, old, new, (also,) if also else ())
        for name, (old, new) in changes.items()
    ]


# -- Changing a syntax tree --------------------------------------------------------------------------------------------


def _readings(text: str) -> Iterator[ast.AST]:
    """What a piece of source can be: an expression, a keyword argument, a statement."""
    try:
        yield ast.parse(text, mode="eval").body
        return
    except SyntaxError:
        pass
    try:
        (keyword,) = ast.parse(f"f({text})", mode="eval").body.keywords  # type: ignore[attr-defined]
        yield keyword
    except SyntaxError:
        pass
    yield from ast.parse(text).body


def _kind(node: ast.AST) -> type:
    return next(kind for kind in (ast.expr, ast.keyword, ast.stmt) if isinstance(node, kind))


def _equal(pattern: Any, node: Any, taken: list[ast.AST]) -> bool:
    """Whether a pattern fits; `taken` gets what its `...` stand for, from left to right."""
    if isinstance(pattern, ast.Constant) and pattern.value is ... and isinstance(node, ast.expr):
        taken.append(node)
        return True
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _equal(value, getattr(node, name, None), taken) for name, value in ast.iter_fields(pattern)
        )
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(_equal(*pair, taken) for pair in zip(pattern, node, strict=True))
    return bool(pattern == node)


class _Fill(ast.NodeTransformer):
    """Puts what was taken where a new piece of source has `...`."""

    def __init__(self, taken: list[ast.AST]) -> None:
        self.taken = iter(taken)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return next(self.taken) if node.value is ... else node


class _Exchange(ast.NodeTransformer):
    """Puts new pieces of source in the place of old ones, and counts them."""

    def __init__(self, old: str, new: str) -> None:
        self.old = list(_readings(old))
        self.new = new
        self.count = 0

    def visit(self, node: ast.AST) -> Any:
        for pattern in self.old:
            taken: list[ast.AST] = []
            if _equal(pattern, node, taken):
                self.count += 1
                fresh = {_kind(reading): reading for reading in _readings(self.new)} if self.new else {}
                return fresh and _Fill(taken).visit(fresh[_kind(pattern)]) or None
        return self.generic_visit(node)


def changed(mutant: Mutant, source: str) -> ast.Module:
    """The mutant's file with the mutant's change; refused if there is not one place for it."""
    tree = ast.parse(source)
    place: Any = tree
    for name in mutant.place.split("."):
        place = next((node for node in place.body if getattr(node, "name", None) == name), None)
        if place is None:
            raise ValueError(f"{mutant.name}: there is no {mutant.place} in {mutant.module}.")
    exchange = _Exchange(mutant.old, mutant.new)
    exchange.visit(place)
    if exchange.count != 1:
        raise ValueError(f"{mutant.name}: {mutant.old!r} is {exchange.count} times in {mutant.place}, not once.")
    return ast.fix_missing_locations(tree)


def source_of(mutant: Mutant, package: Path) -> Path:
    """The file that a mutant changes."""
    path = package / mutant.module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


# -- Running -----------------------------------------------------------------------------------------------------------


def tables() -> list[Mutant]:
    """All mutants of all test files; imports the files, and with them the package."""
    files = sorted(path for path in Path(__file__).parent.glob("test_*.py") if "\nMUTANTS = " in path.read_text())
    return [
        replace(mutant, tests=(f"tests/{path.name}", *mutant.tests))
        for path in files
        for mutant in importlib.import_module(path.stem).MUTANTS
    ]


def _warm() -> None:
    """Import what every run of the tests needs, but not the package: the children inherit it."""
    import _hypothesis_pytestplugin  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    from torch.func import grad, vmap

    torch.set_num_threads(1)  # a child inherits no threads, and would wait for them
    vmap(grad(torch.sum))(torch.zeros(1, 1))


def _tested(tests: str, folder: str, out: Path) -> int:
    """Run some tests against the package in a folder, in a child of this process; its exit code, -1 after LIMIT."""
    import pytest

    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(LIMIT)
            os.chdir(ROOT)
            os.environ["PYTHONPATH"] = folder
            sys.path[:0] = [folder, str(ROOT)]
            with out.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            code = int(pytest.main(["-xqm", "not slow", "-p", "no:cacheprovider", *shlex.split(tests)]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    return -1 if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else os.waitstatus_to_exitcode(status)


def _conformance(file: str) -> str:
    """What every method is held to, asked of the method of an oracle file; no tests for any other file."""
    return f"tests/test_conformance.py -k {Path(file).stem.removeprefix('test_oracles_')}"


def verdict(mutant: Mutant) -> tuple[Mutant, str | None]:
    """The test that noticed, or None."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        package, out = Path(folder) / "fnrfl", Path(folder) / "out"
        shutil.copytree(ROOT / "src" / "fnrfl", package, ignore=shutil.ignore_patterns("__pycache__"))
        target = source_of(mutant, package)
        target.write_text(ast.unparse(changed(mutant, target.read_text())))
        for tests in (*mutant.tests, _conformance(mutant.tests[0])):
            code = _tested(tests, folder, out)
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", out.read_text(), re.MULTILINE)
            if failed:
                return mutant, failed.group(1)
            if code == -1:
                return mutant, f"{tests} (does not end)"
            if code not in (0, NO_TESTS):
                raise ValueError(f"{mutant.name}: pytest could not run.\n{out.read_text()}")
    return mutant, None


def main(words: list[str]) -> int:
    """Try them all, one on each core."""
    fork = multiprocessing.get_context("fork")
    _warm()
    with fork.Pool(1) as pool:  # in a child: this process must not import the package
        chosen = [m for m in pool.apply(tables) if not words or any(word in m.name for word in words)]
    killed = 0
    with fork.Pool() as pool:
        for mutant, test in pool.imap(verdict, chosen):
            killed += test is not None
            print(f"{'killed  ' if test else 'SURVIVED'}  {mutant.name:75}  {test or ''}", flush=True)
    print(f"{killed} of {len(chosen)} mutants killed")
    return killed != len(chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
