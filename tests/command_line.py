"""The command line in this process, for tests: what it said, and whether it refused as it should."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from fnrfl import cli


def fnrfl(*words: str, code: int | None = None) -> Result:
    """Run a command; with `code`, it must end so."""
    got = CliRunner().invoke(cli.app, list(words))
    assert code is None or got.exit_code == code, got.output
    return got


def assert_refused(got: Result, *said: str, code: int = 2) -> None:
    """It ended with one sentence on stderr that has these words, and no traceback."""
    assert got.exit_code == code, got.output
    assert got.stderr.startswith("fnrfl: ") and got.stderr.count("\n") == 1, got.stderr
    assert got.stderr.rstrip().endswith((".", "?")) or code == 3, got.stderr
    assert "Unexpected" not in got.stderr and "Traceback" not in got.output
    for words in said:
        assert words in got.stderr, (words, got.stderr)


def tree(folder: Path) -> dict[str, bytes]:
    """Everything below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}
