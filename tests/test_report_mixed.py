"""A page never mixes what does not belong together, and one damaged run does not hide the others."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fnrfl.cli import app
from fnrfl.core.errors import ConfigError
from fnrfl.results.report import groups, load, report, sentences, tables
from test_report import Elements, compared, fake_run, page_of, payload

__all__ = ["compared"]  # a fixture

OTHER = "f"  # the hash of other data is made of this


def text_of(*paths: Path) -> str:
    return " ".join(Elements(page_of(*paths)).text.split())


def panels(*paths: Path) -> list[load.Panel]:
    return groups.panels_of([load.read_run(path) for path in paths])


# -- data and splits --------------------------------------------------------------------------------------------------


def test_runs_of_different_data_are_no_seeds_of_one_line(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a", seed=0), fake_run(tmp_path / "b", seed=1, data=OTHER)
    assert [panel.title for panel in panels(a, b)] == ["digits, data 000000000000", "digits, data ffffffffffff"]
    assert [group.seeds for panel in panels(a, b) for group in panel.groups] == [(0,), (1,)]
    text = text_of(a, b)
    assert (
        f'dataset = "digits" stands for different data in these runs: sha256 000000000000 in {a}, sha256 '
        f"ffffffffffff in {b}. They are shown apart, and never averaged or compared with each other." in text
    )
    assert "There are 2 settings here, and each is ranked by itself." in text


def test_runs_of_different_data_are_not_paired(tmp_path: Path) -> None:
    """Two methods over the same seeds, before and after the data was changed."""
    made = [
        fake_run(tmp_path / f"{method}-{seed}", seed=seed, algorithm=method, data=data, accuracy=0.5 + gain)
        for method, data, gain in (("fedavg", "0", 0.0), ("fedprox", OTHER, 0.2))
        for seed in range(3)
    ]
    assert [tables.differences(panel).rows for panel in panels(*made)] == [(), ()]
    assert "came out best" not in sentences.summary(panels(*made))[0]
    assert len(payload(page_of(*made))["panels"]) == 2


def test_runs_of_the_same_data_share_a_panel_without_a_hash(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a"), fake_run(tmp_path / "b", algorithm="moon")
    assert [panel.title for panel in panels(a, b)] == ["digits"]
    assert "not compared" not in text_of(a, b)


def test_runs_with_different_splits_are_not_paired(tmp_path: Path) -> None:
    made = [
        fake_run(tmp_path / f"{method}-{seed}", seed=seed, algorithm=method, split=split, accuracy=0.5 + gain)
        for method, gain in (("fedavg", 0.0), ("fedprox", 0.2))
        for seed, split in ((0, ""), (1, ""), (2, method))
    ]
    (panel,) = panels(*made)
    (row,) = tables.differences(panel).rows
    assert row[6].text == "2"
    text = text_of(*made)
    assert f"{made[2]} and {made[5]} have the same data, scenario, clients and seed, and different splits" in text


def test_lines_without_a_split_in_common_are_called_so(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "a"), fake_run(tmp_path / "b", algorithm="moon", split="other", accuracy=0.9)
    (row,) = tables.differences(panels(a, b)[0]).rows
    assert (row[6].text, row[7].text) == ("0", "no seed and split in common")
    assert "behind: no seed and split in common" in text_of(a, b)


# -- folders of comparisons -------------------------------------------------------------------------------------------


def test_a_comparison_with_exchanged_folders_is_refused(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "grid")
    one, other = (tmp_path / "grid" / name for name in ("fnr-off-seed-0", "fnr-on-seed-0"))
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    with pytest.raises(ConfigError) as caught:
        report([tmp_path / "grid"], tmp_path / "page.html", plots=False)
    told = str(caught.value)
    assert 'does not hold the run fnr-off-seed-0 of its comparison: fnr is "on" in its config.toml and "off"' in told
    assert "That is the config of fnr-on-seed-0: the two folders may have been exchanged." in told
    assert not (tmp_path / "page.html").exists()


def test_a_grid_of_a_version_that_called_the_data_set_by_another_key_is_read(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "grid")
    path = tmp_path / "grid" / "grid.json"
    text = path.read_text()
    assert '"dataset.name": "digits"' in text
    path.write_text(text.replace('"dataset.name"', '"dataset"'))
    assert len(load.load_runs([tmp_path / "grid"]).runs) == 4
    path.write_text(text.replace('"dataset.name": "digits"', '"dataset": "cifar10"'))
    with pytest.raises(ConfigError, match='dataset.name is "digits" in its config.toml and "cifar10" in the grid'):
        load.load_runs([tmp_path / "grid"])


def test_a_comparison_of_different_data_is_refused(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "grid")
    log = tmp_path / "grid" / "fnr-on-seed-1" / "events.jsonl"
    header, _, rest = log.read_text().partition("\n")
    changed = json.loads(header)
    changed["data"]["sha256"] = "f" * 64
    log.write_text(json.dumps(changed) + "\n" + rest)
    index = log.with_name("checkpoint.json")
    stamped = {"log": hashlib.sha256(log.read_bytes()).hexdigest()}
    index.write_text(json.dumps(json.loads(index.read_text()) | stamped))
    with pytest.raises(ConfigError, match="fnr-off-seed-0 and .*fnr-on-seed-1 are of different data"):
        report([tmp_path / "grid"], tmp_path / "page.html", plots=False)


def test_a_run_that_the_grid_has_not_is_left_out_and_named(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "grid")
    for place in ("foreign", "deeper/foreign"):
        fake_run(tmp_path / "grid" / place, algorithm="moon", accuracy=0.99)
    found = load.load_runs([tmp_path / "grid"])
    assert len(found.runs) == 4 and not any("foreign" in run.path.parts for run in found.runs)
    text = text_of(tmp_path / "grid")
    assert f"not as its grid: {tmp_path / 'grid/foreign'} is not a run of the comparison around it" in text
    assert "moon" not in text
    asked_for = load.load_runs([tmp_path / "grid", tmp_path / "grid/foreign"])
    assert len(asked_for.runs) == 5 and len(asked_for.astray) == 1
    assert len(load.load_runs([tmp_path]).runs) == 4


def test_runs_of_a_grid_that_are_gone_are_named(
    compared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(compared, tmp_path / "grid")
    assert load.load_runs([tmp_path / "grid"]).astray == []
    shutil.rmtree(tmp_path / "grid/fnr-on-seed-1")
    text = text_of(tmp_path / "grid")
    told = f"{tmp_path / 'grid'} lacks 1 run of its grid: fnr-on-seed-1."
    assert f"not as its grid: {told}" in text and told in caplog.text
    assert load.load_runs(sorted((tmp_path / "grid").glob("fnr-*"))).astray == []  # nobody asked for all


def test_a_run_that_failed_before_it_had_a_folder_is_told_once(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "grid")
    shutil.rmtree(tmp_path / "grid/fnr-on-seed-1")
    path = tmp_path / "grid/comparison.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failed": [{"cell": "fnr-on-seed-1", "error": "no"}]}))
    found = load.load_runs([tmp_path / "grid"])
    assert (found.failed, found.astray) == (["fnr-on-seed-1: no"], [])


def test_a_comparison_without_any_run_of_its_grid_gets_no_page(compared: Path, tmp_path: Path) -> None:
    fake_run(tmp_path / "grid/foreign")
    shutil.copy(compared / "grid.json", tmp_path / "grid/grid.json")
    with pytest.raises(ConfigError, match="There is no run to report on. .*foreign is not a run of the comparison"):
        report([tmp_path / "grid"], tmp_path / "page.html", plots=False)


# -- damage -----------------------------------------------------------------------------------------------------------


def change_line(number: int, **values: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        lines = (path / "events.jsonl").read_text().splitlines()
        lines[number] = json.dumps(json.loads(lines[number]) | values)
        (path / "events.jsonl").write_text("\n".join(lines) + "\n")

    return change


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda path: (path / name).write_text(text)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a line of the log": (lambda path: write("events.jsonl", "{\n")(path), "damaged"),
    "a log without an object": (lambda path: write("events.jsonl", "[]\n")(path), "damaged"),
    "a nested line": (lambda path: write("events.jsonl", "[" * 100_000 + "\n")(path), "damaged"),
    "a number that is text": (change_line(2, accuracy="high"), "events.jsonl, line 3: accuracy: "),
    "a missing number": (change_line(1, seconds=None), "events.jsonl, line 2: seconds: "),
    "lists of other lengths": (change_line(1, per_class=[0.5]), "line 2: lists for the same classes or clients"),
    "a cohort of words": (change_line(1, cohort=["a"]), "events.jsonl, line 2: cohort.0: "),
    "no config": (lambda path: (path / "config.toml").unlink(), "config.toml cannot be read"),
    "a config of something else": (write("config.toml", "[tool]\nx = 1\n"), "damaged"),
    "an edited config": (
        lambda path: write("config.toml", (path / "config.toml").read_text().replace("rounds = 3", "rounds = 4"))(path),
        "is not the config that the run was begun with: rounds is 4 there and 3",
    ),
    "an edited split": (
        lambda path: write("partition.json", (path / "partition.json").read_text().replace("7", "8", 1))(path),
        "is not the split that the run was begun with",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_named_and_the_others_are_reported(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = fake_run(tmp_path / "runs" / "whole"), fake_run(tmp_path / "runs" / "broken", seed=1)
    change, said = DAMAGE[damage]
    change(broken)
    with pytest.raises(ConfigError, match="broken") as caught:
        report([broken], tmp_path / "page.html", plots=False)
    assert said in str(caught.value)
    report([tmp_path / "runs"], tmp_path / "page.html", plots=False)
    text = " ".join(Elements((tmp_path / "page.html").read_text()).text.split())
    assert str(broken) in text and said in text and "It is left out." in text
    assert "1 run on digits" in text and str(whole) in text
    assert str(broken) in caplog.text


def test_the_command_says_what_it_left_out_on_stderr(tmp_path: Path) -> None:
    fake_run(tmp_path / "whole")
    (fake_run(tmp_path / "broken") / "partition.json").unlink()
    found = CliRunner().invoke(app, ["report", str(tmp_path), "--no-plots"])
    assert found.exit_code == 0 and "report.html" in found.stdout
    assert f"note: {tmp_path}/broken/partition.json cannot be read" in found.stderr


def test_a_client_without_a_score_is_left_out_of_the_worst(tmp_path: Path) -> None:
    path = fake_run(tmp_path / "run")
    change_line(3, per_client=[0.5, None, 0.25])(path)
    assert load.read_run(path).last("worst_client") == 0.25
    change_line(3, per_client=[None, None])(path)
    assert load.read_run(path).last("worst_client") is None
    page_of(path)
