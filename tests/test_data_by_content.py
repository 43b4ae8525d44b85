"""A run knows its data by content, the columns of tables by name, and predicts every row that it is given."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import fnrfl
from fnrfl import cli
from fnrfl.config import load
from fnrfl.core.errors import CompatibilityError, ConfigError
from fnrfl.data.datasets import load as load_data
from fnrfl.runs import predict as asking
from fnrfl.runs import run as runs
from fnrfl.runs.predict import evaluate, predict
from fnrfl.runs.setup.build import build
from settings import with_keys

NAMES = ["age", "dose", "weight", "pulse"]
KINDS = ["ill", "well", "sound"]


def command(*arguments: str, code: int = 0) -> Result:
    got = CliRunner().invoke(cli.app, list(arguments))
    assert got.exit_code == code, got.output
    return got


pytestmark = pytest.mark.usefixtures("tmp_cwd")


def patients(count: int, seed: int) -> list[dict[str, str]]:
    """Rows of a table; the columns differ in scale, so that no two can be taken for each other."""
    dice = np.random.default_rng(seed)
    label = dice.integers(3, size=count)
    values = (dice.normal(size=(count, 4)) + 3 * np.eye(3, 4)[label]) * [1, -2, 3, 0.5] + [0, 1, -1, 2]
    rows = zip(values.round(4).tolist(), label, strict=True)
    return [dict(zip(NAMES, map(str, row), strict=True)) | {"kind": KINDS[k], "id": f" P{k}-é"} for row, k in rows]


def write(path: str | Path, rows: Sequence[dict[str, str]], columns: Sequence[str]) -> str:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> runs.Result:
    folder = tmp_path_factory.mktemp("clinic")
    path = write(folder / "patients.csv", patients(200, 0), [*NAMES, "kind"])
    config = load(None, [f"dataset={path}", "rounds=3", "scenario=iid", "clients=3", "client.epochs=1"])
    return runs.run(config, out=folder / "run")


def own_rows(result: runs.Result) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(Path(result.config.dataset.name).read_text())))


def said(result: runs.Result, data: str) -> dict[str, object]:
    return dict(json.loads(command("evaluate", str(result.run_dir), data, "--json").stdout))


# -- evaluate ----------------------------------------------------------------------------------------------------------


def test_the_runs_data_is_known_under_any_name_and_from_any_folder(trained: runs.Result) -> None:
    Path("other").mkdir()
    copy = write("other/renamed.csv", own_rows(trained), [*NAMES, "kind"])
    turned = write("other/turned.csv", own_rows(trained), ["kind", *reversed(NAMES)])
    for data in (trained.config.dataset.name, copy, turned):
        got = said(trained, data)
        assert (got["accuracy"], got["examples"], got["part"]) == (trained.accuracy, 40, "the test part"), data
        assert got["notes"] == []
    assert "(the test part of other/renamed.csv)" in command("evaluate", str(trained.run_dir), copy).stdout


def test_other_data_is_judged_by_all_of_it(trained: runs.Result) -> None:
    data = write("new.csv", patients(50, 1), [*NAMES, "kind"])
    got = said(trained, data)
    assert (got["examples"], got["part"], got["notes"]) == (50, "all examples", [])


def test_a_changed_copy_is_judged_by_its_content_and_a_changed_original_is_said(trained: runs.Result) -> None:
    rows, original = own_rows(trained), Path(trained.config.dataset.name)
    for name, changed in {"row": rows[:-1], "cell": [rows[0] | {"age": "9"}, *rows[1:]]}.items():
        Path(name).mkdir()
        data = write(f"{name}/patients.csv", changed, [*NAMES, "kind"])
        got = said(trained, data)
        assert got["part"] == "all examples" and got["examples"] == len(changed)
        assert "have the same inputs as one in the training set" in str(got["notes"])
        assert "note:" in command("evaluate", str(trained.run_dir), data).stderr
    text = original.read_text()
    try:
        write(original, rows[1:], [*NAMES, "kind"])
        assert "has changed since" in str(said(trained, str(original))["notes"])
    finally:
        original.write_text(text)


def test_a_file_of_the_runs_own_folder_is_said_to_be_trained_on() -> None:
    Path("sites").mkdir()
    for site, count in (("A", 50), ("B", 100)):
        write(f"sites/{site}.csv", patients(count, count), [*NAMES, "kind"])
    runs.run(load(None, ["dataset=sites", "rounds=1", "scenario=natural"]), out="run")
    own = load_data("sites", by_client=True)
    for site, count in (("A", 50), ("B", 100)):
        trained_on = (own.train_clients or ()).count(site)
        got = evaluate("run", f"./sites/{site}.csv")
        assert 0 < trained_on < count and got.what == "all examples"
        assert f"of {count} examples, {trained_on} have the same inputs as one in the training set" in str(got.notes)
    assert evaluate("run", "sites").notes == ()
    assert evaluate("run", write("new.csv", patients(50, 3), [*NAMES, "kind"])).notes == ()
    write("sites/B.csv", patients(100, 4), [*NAMES, "kind"])
    assert "has changed since" in " ".join(evaluate("run", "sites/A.csv").notes)


def test_copies_of_training_rows_are_said_wherever_they_lie(trained: runs.Result) -> None:
    own = load_data(trained.config.dataset.name)
    seen, new = own.train.x[:30].numpy(), own.test.x[:20].numpy()
    new_rows = patients(20, 7)
    at = {tuple(np.float32([row[name] for name in NAMES])): row for row in own_rows(trained)}
    copies = [at[tuple(row)] for row in seen]
    data = write("copies.csv", [*copies, *new_rows], ["kind", *reversed(NAMES)])
    wanted = "of 50 examples, 30 have the same inputs as one in the training set"
    got = said(trained, data)
    assert got["examples"] == 50 and wanted in str(got["notes"]) and trained.config.dataset.name in str(got["notes"])
    assert wanted in command("evaluate", str(trained.run_dir), data).stderr
    x = np.concatenate([seen.astype(np.float64), new])
    assert wanted in str(evaluate(trained, (x, np.zeros(50, np.int64))).notes)  # in another floating type
    assert evaluate(trained, (new, np.zeros(20, np.int64))).notes == notes_on_places(trained)


def notes_on_places(trained: runs.Result) -> tuple[str, ...]:
    """What is said of any arrays without names."""
    x = np.float32([[float(row[name]) for name in NAMES] for row in patients(5, 8)])
    return evaluate(trained, (x, np.zeros(5, np.int64))).notes


def test_training_data_where_nobody_may_look_stops_no_score(trained: runs.Result) -> None:
    data = write("new.csv", patients(20, 7), [*NAMES, "kind"])
    for source in ("/" + "a" * 300, "/nowhere/data.csv", "no path"):  # the first cannot be asked about
        elsewhere = replace(trained, data=replace(trained.data, source=source))
        assert evaluate(elsewhere, data).notes == ()
    config = with_keys(trained.config, {"dataset.name": "~nobody-is-called-so/patients.csv"})
    assert evaluate(replace(trained, config=config), data).notes == ()
    assert len(predict(replace(trained, config=config), data)) == 20


def test_training_data_that_is_elsewhere_or_large_is_not_looked_for(
    trained: runs.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write("copies.csv", own_rows(trained)[:50], [*NAMES, "kind"])
    assert "in the training set" in str(said(trained, data)["notes"])
    with monkeypatch.context() as patch:
        patch.setattr(asking, "MAX_BYTES", Path(trained.config.dataset.name).stat().st_size - 1)
        assert said(trained, data)["notes"] == []
    original = Path(trained.config.dataset.name)
    moved = original.rename(original.with_name("moved.csv"))
    try:
        assert said(trained, data)["notes"] == []
        write(original, patients(200, 9), [*NAMES, "kind"])  # other data under the same name
        assert "has changed since" in str(said(trained, data)["notes"])
    finally:
        moved.replace(original)


def test_training_data_is_not_read_for_data_that_cannot_be_scored(
    trained: runs.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write("new.csv", patients(20, 7), NAMES)
    monkeypatch.setattr(asking, "_read_again", lambda *_: pytest.fail("read"))
    with pytest.raises(ConfigError, match="no labels, which would be in the column 'kind'"):
        evaluate(trained, data)


def test_a_test_part_that_a_leak_was_trained_on_is_not_recommended() -> None:
    digits = load_data("digits")
    np.savez("copies.npz", x=digits.train.x[:40].numpy(), y=digits.train.y[:40].numpy())
    unseen = "evaluate digits: the model has not seen its test part"
    for protocol in ("honest", "paper"):
        runs.run(load("digits", ["rounds=1", "client.epochs=1", f"protocol={protocol}", "fnr=on"]), out=protocol)
        notes = str(evaluate(protocol, "copies.npz").notes)
        assert "Leave them out" in notes and (unseen in notes) is (protocol == "honest")


def test_copies_of_a_named_data_set_are_said_and_nothing_is_fetched_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load_data("digits")
    runs.run(load("digits", ["rounds=1", "client.epochs=1"]), out="run")
    np.savez("copies.npz", x=digits.train.x[:40].numpy(), y=digits.train.y[:40].numpy())
    assert "of 40 examples, 40 have the same inputs" in str(evaluate("run", "copies.npz").notes)
    np.savez("new.npz", x=255 - digits.test.x[:40].numpy(), y=digits.test.y[:40].numpy())
    assert evaluate("run", "new.npz").notes == ()
    monkeypatch.setattr(asking, "available", lambda: [])
    assert evaluate("run", "copies.npz").notes == ()


def test_the_runs_public_data_is_known_by_its_content() -> None:
    for name, count in (("mine", 150), ("public", 40), ("other", 30)):
        write(f"{name}.csv", patients(count, count), [*NAMES, "kind"])
    keys = ["dataset=mine.csv", "rounds=1", "scenario=iid", "clients=3", "fnr=on", "public.source=public.csv"]
    runs.run(load(None, keys), out="run")
    Path("renamed.csv").write_bytes(Path("public.csv").read_bytes())
    for data in ("public.csv", "renamed.csv"):
        assert "of 40 examples, 40 have the same inputs as one in the public data" in str(evaluate("run", data).notes)
    assert evaluate("run", "other.csv").notes == evaluate("run", "mine.csv").notes == ()


def test_renamed_classes_are_other_data(trained: runs.Result) -> None:
    """The numbers of the classes are the same, and so is the hash of the arrays."""
    swapped = {"ill": "sound", "sound": "ill", "well": "well"}
    rows = [row | {"kind": swapped[row["kind"]]} for row in own_rows(trained)]
    got = said(trained, write("swapped.csv", rows, [*NAMES, "kind"]))
    assert got["part"] == "all examples" and float(str(got["accuracy"])) < trained.accuracy


def test_other_data_with_a_test_part_is_judged_by_that() -> None:
    digits = load_data("digits")
    np.savez("mine.npz", x=digits.train.x.numpy(), y=digits.train.y.numpy())
    keys = ["dataset=mine.npz", "rounds=1", "client.epochs=1", "scenario=iid"]
    result = runs.run(load(None, keys), out="run")
    got = said(result, "digits")
    assert (got["examples"], got["part"]) == (360, "the test part of other data")
    text = command("evaluate", "run", "digits").stdout
    assert "(the test part of digits, which is not the run's data)" in text
    assert said(result, "mine.npz")["part"] == "the test part"


# -- predict -----------------------------------------------------------------------------------------------------------


def test_every_row_is_predicted_in_order_and_can_be_joined(trained: runs.Result) -> None:
    rows = patients(30, 2)
    Path("new").mkdir()
    data = write("new/patients.csv", rows, ["id", *NAMES])  # under the old file's name
    command("predict", str(trained.run_dir), data, "--id", "id", "-o", "p.csv")
    with open("p.csv", newline="", encoding="utf-8") as file:
        got = list(csv.DictReader(file))
    assert list(got[0]) == ["row", "id", "label", "p_ill", "p_sound", "p_well"]
    assert [row["row"] for row in got] == [str(n) for n in range(30)]
    assert [row["id"] for row in got] == [row["id"] for row in rows]
    assert np.mean([a["label"] == b["kind"] for a, b in zip(got, rows, strict=True)]) > 0.7
    own = predict(trained.run_dir or "", trained.config.dataset.name)
    assert len(own.labels) == 200 and own.parts is None
    config = Path(trained.run_dir or "") / "config.toml"
    before = config.read_text()
    assert "is a file of the run" in command("predict", str(trained.run_dir), data, "-o", str(config), code=2).stderr
    assert config.read_text() == before


def test_data_with_parts_is_predicted_whole(trained: runs.Result) -> None:
    rows = patients(30, 2)
    x = np.array([[float(row[name]) for name in NAMES] for row in rows])
    y = np.array([row["kind"] for row in rows])
    np.savez("parts.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:])
    np.savez("open.npz", x_train=x[:20], x_test=x[20:], y_test=y[20:])
    whole = predict(trained.run_dir or "", write("new.csv", rows, NAMES))
    for data in ("parts.npz", "open.npz"):
        got = predict(trained.run_dir or "", data)
        assert got.labels == whole.labels
        table = list(csv.DictReader(io.StringIO(got.to_csv())))
        assert [row["part"] for row in table] == ["train"] * 20 + ["test"] * 10
        assert [row["row"] for row in table] == [*map(str, range(20)), *map(str, range(10))]


def test_images_are_named_by_their_path() -> None:
    digits = load_data("digits").test
    pixels = (digits.x[:12] / digits.x.max() * 255).round().byte().numpy()
    for n, picture in enumerate(pixels):
        place = Path("pictures") / ("train" if n < 8 else "test") / str(n % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture[0]).save(place / f"{n}.png")
    keys = ["dataset=pictures/", "rounds=1", "clients=2", "scenario=iid", "public.size=0", "validation.size=0"]
    result = runs.run(load(None, keys), out="run")
    table = list(csv.DictReader(io.StringIO(predict("run", "pictures").to_csv())))
    assert [row["row"] for row in table][::4] == ["train/0/0.png", "train/1/1.png", "test/0/10.png"]
    assert len(table) == 12 and said(result, "pictures")["part"] == "the test part"
    Image.fromarray(pixels[0][0]).save("pictures/loose.png")
    with pytest.raises(ConfigError, match="images of its own, such as loose.png, and others in folders"):
        predict("run", "pictures")


def test_an_id_is_carried_and_never_fed_in(trained: runs.Result) -> None:
    rows, run_dir = patients(30, 2), str(trained.run_dir)
    data = write("new.csv", rows, [*NAMES, "id", "kind"])
    assert "--id" in command("predict", run_dir, data, code=2).stderr
    assert "'age' is an input" in command("predict", run_dir, data, "--id", "age", code=2).stderr
    assert "no column 'nobody'" in command("predict", run_dir, data, "--id", "nobody", code=2).stderr
    assert "is no table" in command("predict", run_dir, "digits", "--id", "id", code=2).stderr
    got = predict(run_dir, data, id_column="id")
    assert got.labels == predict(run_dir, write("bare.csv", rows, NAMES)).labels
    two = command("predict", run_dir, data, "--id", "kind", "--id", "id").stdout.splitlines()
    assert [line.split(",")[1:3] for line in two] == [["kind", "id"], *([str(r["kind"]), str(r["id"])] for r in rows)]
    data = write("labelled.csv", [row | {"label": "x"} for row in rows], ["label", *NAMES])
    assert predict(run_dir, data, id_column="label").to_csv().startswith("row,id_label,label,p_ill")


@pytest.mark.parametrize("classes", [("-1", "0", "1"), ("2", "0", "1"), ()], ids=str)
def test_labels_that_are_numbers_are_matched_by_number_or_refused(classes: tuple[str, ...]) -> None:
    """A class called 0 is not the first one because its label is 0."""
    y = np.arange(90) % 3
    x = np.eye(3, dtype=np.float32)[y] + 0.01
    named = {"y": y, "classes": np.array(classes)} if classes else {"y": y + 1}
    np.savez("named.npz", x=x, **named)
    result = fnrfl.run("digits", dataset="named.npz", model="mlp", rounds=3, clients=2, scenario="iid", out="run")
    assert evaluate("run", "named.npz").score.accuracy == result.accuracy
    zeros = x[y == (classes.index("0") if classes else 0)]
    np.savez("bare.npz", x=zeros, y=np.zeros(len(zeros), dtype=np.int64))
    if classes == ("-1", "0", "1"):
        wanted = np.array(predict("run", "bare.npz").labels) == "0"
        assert evaluate("run", "bare.npz").score.accuracy == wanted.mean()
        return
    with pytest.raises(CompatibilityError, match="Add an array" if classes else "the class '0', which the model does"):
        evaluate("run", "bare.npz")
    if not classes:
        assert result.classes == ("1", "2", "3")
        np.savez("new.npz", x=x[y > 0], y=y[y > 0] + 1)
        assert evaluate("run", "new.npz").score.answers.count.tolist() == [0, 30, 30]


# -- columns by name ---------------------------------------------------------------------------------------------------


def test_columns_in_another_order_are_the_same_data(trained: runs.Result) -> None:
    rows, run_dir = patients(60, 3), trained.run_dir or ""
    straight = evaluate(run_dir, write("a.csv", rows, [*NAMES, "kind"]))
    mixed = evaluate(run_dir, write("b.csv", rows, ["pulse", "kind", "age", "weight", "dose"]))
    assert mixed.score.accuracy == straight.score.accuracy > 0.8
    assert mixed.score.loss == straight.score.loss
    header = (Path(run_dir) / "events.jsonl").read_text().splitlines()[0]
    columns = json.loads(header)["data"]["columns"]
    assert columns == {"inputs": [{"name": name, "type": "number"} for name in NAMES], "label": "kind"}


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (["age", "dose", "weight", "height", "kind"], "lacks 'pulse' and has 'height', which the training"),
        (["age", "dose", "weight", "Pulse", "kind"], "'Pulse', 'pulse' differ only in case"),
        (["age", "dose", "weight", "label"], "lacks 'pulse' and has 'label'"),
        ([*NAMES, "label"], "it has 'label'"),
        ([*NAMES, "Kind"], "'Kind', 'kind' differ only in case"),
        ([*NAMES, "age"], "more than one column called 'age'"),
    ],
)
def test_columns_with_other_names_are_refused(columns: list[str], sentence: str, trained: runs.Result) -> None:
    Path("new.csv").write_text("\n".join([",".join(columns), ",".join(["1"] * len(columns))]) + "\n")
    for ask in (evaluate, predict):
        with pytest.raises((ConfigError, CompatibilityError), match=sentence):
            ask(trained.run_dir or "", "new.csv")


def test_a_feature_with_the_name_of_a_label_is_a_feature() -> None:
    """`class` is an input here, because `label` is the label: without labels it must not become one."""
    rows = [row | {"label": row["kind"], "class": row["age"]} for row in patients(120, 0)]
    write("mine.csv", rows, ["class", "dose", "weight", "pulse", "label"])
    runs.run(load(None, ["dataset=mine.csv", "rounds=3", "scenario=iid", "clients=2"]), out="run")
    got = predict("run", write("bare.csv", rows, ["pulse", "weight", "dose", "class"]))
    assert np.mean([label == row["label"] for label, row in zip(got.labels, rows, strict=True)]) > 0.8
    with pytest.raises(ConfigError, match="no labels, which would be in the column 'label'"):
        evaluate("run", "bare.csv")


def test_a_run_without_names_takes_columns_by_position_and_says_so(trained: runs.Result) -> None:
    """As runs of version 0.1.0 are."""
    import shutil

    shutil.copytree(trained.run_dir or "", "old")
    log = Path("old/events.jsonl")
    header, *rest = log.read_text().splitlines()
    event = json.loads(header)
    for key in ("columns", "examples", "tokens"):
        del event["data"][key]
    del event["personalised"]
    log.write_text("\n".join([json.dumps(event), *rest]) + "\n")
    index = json.loads(Path("old/checkpoint.json").read_text())
    kept = {"round": index["round"], "config": index["config"], "server": index["server"]["file"], "clients": {}}
    Path("old/checkpoint.json").write_text(json.dumps({"format": 2} | kept))
    rows = patients(60, 3)
    got = evaluate("old", write("a.csv", rows, [*NAMES, "kind"]))
    assert got.score.accuracy == evaluate(trained.run_dir or "", "a.csv").score.accuracy
    assert "taken by position" in " ".join(got.notes)
    assert evaluate("old", trained.config.dataset.name).what == "the test part"
    assert predict("old", write("b.csv", rows, NAMES)).labels == predict("old", "a.csv").labels
    renamed = [row | {"label": row["pulse"]} for row in rows]
    with pytest.raises(CompatibilityError, match="column called 'label' among as many columns"):
        predict("old", write("c.csv", renamed, ["age", "dose", "weight", "label"]))


def test_a_folder_of_tables_is_matched_by_name_as_one_table_is(trained: runs.Result) -> None:
    rows, run_dir = patients(20, 3), trained.run_dir or ""
    one = predict(run_dir, write("new.csv", rows, [*NAMES, "id"]), id_column="id")
    Path("sites").mkdir()
    for name, own in (("A", rows[:8]), ("B", rows[8:])):
        write(f"sites/{name}.csv", own, ["id", "kind", *reversed(NAMES)])
    got = predict(run_dir, "sites", id_column="id")
    assert (got.labels, got.ids, got.notes) == (one.labels, one.ids, ())
    Path("parts").mkdir()
    for part, own in (("train", rows[:8]), ("test", rows[8:])):
        write(f"parts/{part}.csv", own, ["id", *NAMES])
    assert predict(run_dir, "parts", id_column="id").ids == one.ids
    with pytest.raises(CompatibilityError, match="'id', which"):
        evaluate(run_dir, "sites")
    for name, own in (("A", rows[:8]), ("B", rows[8:])):
        write(f"sites/{name}.csv", own, ["kind", *reversed(NAMES)])
    assert evaluate(run_dir, "sites").notes == ()
    for name in "AB":
        write(f"sites/{name}.csv", rows, NAMES)
    with pytest.raises(ConfigError, match="sites has no labels, which would be in the column 'kind'"):
        evaluate(run_dir, "sites")


@pytest.mark.parametrize("missing", ["mean", "drop"])
def test_rows_of_a_folder_of_tables_are_named_by_client_and_place_in_its_file(missing: str) -> None:
    rows = patients(200, 1)
    Path("sites").mkdir()
    for site in range(2):
        write(f"sites/S{site}.csv", rows[site::2], [*NAMES, "kind"])
    runs.run(load(None, ["dataset=sites", f"dataset.missing={missing}", "rounds=1", "scenario=natural"]), out="run")
    new = {"Bonn": patients(4, 7), "Köln": patients(3, 8)}
    new["Bonn"][1]["age"] = ""
    Path("new").mkdir()
    for site, own in new.items():
        write(f"new/{site}.csv", own, NAMES)
    got = list(csv.DictReader(io.StringIO(predict("run", "new").to_csv())))
    alone = {site: csv.DictReader(io.StringIO(predict("run", f"new/{site}.csv").to_csv())) for site in new}
    assert got == [{**row, "client": site} for site, table in alone.items() for row in table]
    assert list(got[0])[:3] == ["row", "client", "label"] and len(got) == (7 if missing == "mean" else 6)


def test_only_data_that_names_all_clients_has_a_column_of_them(trained: runs.Result) -> None:
    x = np.array([[float(row[name]) for name in NAMES] for row in patients(6, 2)])
    for name, clients in (("all", {"clients_train": list("abab"), "clients_test": ["a", "b"]}), ("some", {})):
        arrays = {"clients_train": list("abab")} | clients
        np.savez(f"{name}.npz", x_train=x[:4], x_test=x[4:], **{key: np.array(ids) for key, ids in arrays.items()})
    assert predict(trained.run_dir or "", "all.npz").holders == list("ababab")
    assert predict(trained.run_dir or "", "some.npz").holders is None


def test_numbers_for_classes_with_names_are_said(trained: runs.Result) -> None:
    rows, run_dir = patients(20, 3), trained.run_dir or ""
    x = np.array([[float(row[name]) for name in NAMES] for row in rows])
    y = np.array([trained.classes.index(row["kind"]) for row in rows])
    np.savez("numbered.npz", x=x, y=y)
    np.savez("named.npz", x=x, y=np.array(trained.classes)[y])
    np.savez("both.npz", x=x, y=y, classes=np.array(trained.classes))
    by_place = predict(run_dir, "numbered.npz")
    assert by_place.labels == predict(run_dir, write("new.csv", rows, NAMES)).labels
    assert "in the order of the run's: age, dose, weight, pulse" in " ".join(by_place.notes)
    numbered, named, both = (evaluate(run_dir, f"{name}.npz") for name in ("numbered", "named", "both"))
    assert numbered.accuracy == named.accuracy == both.accuracy
    assert "0 is taken as 'ill', 1 is taken as 'sound', 2 is taken as 'well'." in " ".join(numbered.notes)
    assert not any("is taken as '" in note for got in (named, both) for note in got.notes)


def test_public_data_is_matched_by_name_too(trained: runs.Result) -> None:
    write("public.csv", patients(40, 5), ["kind", *reversed(NAMES)])
    keys = [f"dataset={trained.config.dataset.name}", "public.source=public.csv", "scenario=iid", "clients=2"]
    built = build(load(None, keys))
    straight = {tuple(float(np.float32(row[name])) for name in NAMES) for row in patients(40, 5)}
    public = [*built.splits.public.x.tolist(), *built.splits.ranking.x.tolist()]
    assert {tuple(row) for row in public} == straight and not built.notices
    (notice,) = build(load(None, [*keys, "public.size=5"])).notices
    assert "public.size = 5 is not used" in notice
    write("public.csv", patients(40, 5), ["kind", "age", "dose", "weight", "id"])
    with pytest.raises(CompatibilityError, match="public.csv .*lacks 'pulse' and has 'id'"):
        build(load(None, keys))
    write("public.csv", patients(40, 5), NAMES)
    with pytest.raises(ConfigError, match="no labels in a column called 'kind'"):
        build(load(None, keys))


def test_numbers_beyond_the_models_are_refused_in_a_sentence() -> None:
    x = np.random.default_rng(0).normal(size=(60, 3))
    x[7, 1] = 1e300
    np.savez("large.npz", x=x, y=np.arange(60) % 2)
    keys = ["dataset=large.npz", "scenario=iid", "clients=2", "rounds=1"]
    with pytest.raises(CompatibilityError, match=r"as large as 1e\+300.*float32.*engine.precision = float64"):
        build(load(None, keys))
    build(load(None, [*keys, "engine.precision=float64", "dataset.scale=none"]))
    np.savez("small.npz", x=np.clip(x, -3, 3), y=np.arange(60) % 2)
    runs.run(load(None, ["dataset=small.npz", *keys[1:]]), out="run")
    with pytest.raises(CompatibilityError, match=r"large.npz holds a number as large as 1e\+300"):
        predict("run", "large.npz")
