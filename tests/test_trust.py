"""Code that a file names does not run before it is allowed; what is allowed is remembered; what runs is what was."""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import machinery
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from typer.testing import CliRunner

import fnrfl
from fnrfl import cli, config, usercode
from fnrfl.config import registry
from fnrfl.core.errors import ConfigError
from fnrfl.usercode import Target

NETS = """
from pathlib import Path
from torch import nn
Path("canary").touch()
def make(input_shape, num_classes, hidden=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
"""
METHOD = """
from dataclasses import dataclass
from fnrfl.algorithms.fedavg import FedAvg
@dataclass(frozen=True)
class Mine(FedAvg):
    def round(self, state, cohort, engine):
        {body}
"""
RECIPE = 'model.name = "nets:make(hidden=3)"\ndataset = "digits"\nrounds = 1\n'


def new_process() -> None:
    """Forget what a process knows: what it allowed, and users' modules."""
    usercode._allowed.clear()
    usercode._imported_files.clear()
    for name, module in list(sys.modules.items()):
        if "pytest-of-" in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with a module in it, and a state folder in which nothing is allowed yet."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "nets.py").write_text(NETS)
    monkeypatch.chdir(work)
    monkeypatch.setenv("FNRFL_STATE", str(tmp_path / "state"))
    path = list(sys.path)
    new_process()
    yield work
    new_process()
    assert sys.path == path


def permissions() -> list[dict[str, str]]:
    return [json.loads(file.read_text()) for file in Path(os.environ["FNRFL_STATE"]).glob("trusted/*.json")]


def refused(load: Callable[[], object]) -> str:
    """What is said of code that nobody has allowed."""
    with pytest.raises(ConfigError, match="would run code") as caught:
        load()
    return str(caught.value)


def command(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


# ---- refused ----

FORMS = {
    "a key": 'model.name = "nets:make"',
    "a section": '[model]\nname = "nets:make"',
    "a short form": 'model = "nets:make"',
    "a key in quotes": '"model.name" = "nets:make"',
    "an inline table": 'model = {name = "nets:make"}',
    "spaces and options": 'model.name = "  nets:make ( hidden = 3 ) "',
    "data": 'dataset = "nets:make"',
    "public data": 'public.source = "nets:make"',
    "public data in a table": 'public = {source = "nets:make"}',
    "a method": 'algorithm = "nets:make"',
    "a method in a section": '[algorithm]\nname = "nets:make"\nmu = 1',
}


@pytest.mark.parametrize("form", FORMS)
def test_code_in_a_file_is_refused_and_what_would_run_is_shown(form: str, folder: Path) -> None:
    Path("my.toml").write_text(FORMS[form])
    for load in (lambda: config.load("my.toml"), lambda: config.loads(FORMS[form], origin="my.toml")):
        said = refused(load)
        assert all(word in said for word in ("nets:make", "my.toml", f"{folder / 'nets.py'}.", "--trust", "trust=True"))
    got = command("deploy", "init", "federation", "my.toml", "clients=2")
    assert got.exit_code == 2 and "--trust" in got.stderr and not Path("federation").exists()
    assert not Path("canary").exists() and not permissions()


def test_a_federation_of_a_recipe_with_code_is_made_with_trust(folder: Path) -> None:
    Path("my.toml").write_text(FORMS["a key"])
    assert command("deploy", "init", "federation", "my.toml", "clients=2", "--trust").exit_code == 0


def test_all_code_of_a_config_is_shown_at_once(folder: Path) -> None:
    (folder / "data.py").touch()
    text = 'model = "nets:make"\ndataset = "data:load"\npublic.source = "os:getcwd"\nalgorithm = "absent:Method"'
    said = refused(lambda: config.loads(text))
    assert all(word in said for word in (f"load in {folder / 'data.py'}.", "getcwd in the module os", "module absent"))
    assert said.count("would run code") == 4 and said.count("--trust") == 1


@pytest.mark.parametrize(
    "words", ["digits", "a/b.csv", "./nets:make", "C:/nets", "C:\\nets", "nets:", ":make", "n:m:k"]
)
def test_names_and_paths_are_not_code(words: str) -> None:
    assert all(usercode.target(key, words) is None for key in usercode.KEYS)
    with pytest.raises(ConfigError, match="must be module:name"):
        usercode.fetch(words, usercode.target("dataset.name", words))


COMMANDS = ("run my.toml -o x", "run my.toml --dry-run", "compare my.toml --seeds 0 -o x", "scenario show my.toml")
COMMANDS += ("scenario save x.json my.toml", "resume got", "evaluate got digits", "predict got digits")


@pytest.mark.parametrize("words", COMMANDS)
def test_no_command_runs_what_a_received_file_names(words: str) -> None:
    Path("got").mkdir()
    for name in ("my.toml", "got/config.toml"):
        Path(name).write_text(RECIPE + 'algorithm.name = "os:system"\n')
    Path("got/model.safetensors").touch()
    got = command(*words.split())
    assert got.exit_code == 2
    if not words.startswith(("evaluate", "predict")):  # these refuse a run directory without a log before
        assert all(word in got.stderr for word in ("nets:make(hidden=3)", "os:system", "--trust"))
    assert not Path("canary").exists() and not Path("x").exists()


def test_what_nobody_allowed_is_not_imported_whoever_asks() -> None:
    with pytest.raises(ConfigError, match="which nobody has allowed"):
        usercode.fetch("This", Target("nets", "make"))
    assert not Path("canary").exists()


# ---- remembered ----


def test_what_was_typed_runs_and_does_not_ask_later_nor_elsewhere(tmp_path: Path, folder: Path) -> None:
    typed = config.load("digits", ["model=nets:make(hidden=3)", "rounds=1"])
    new_process()
    assert config.loads(typed.to_toml()) == typed
    new_process()
    elsewhere = tmp_path / "moved"
    folder.rename(elsewhere)
    os.chdir(elsewhere)
    assert config.loads(typed.to_toml()) == typed
    (entry,) = permissions()
    assert (entry["key"], entry["words"]) == ("model.name", "nets:make(hidden=3)")
    assert entry["file"] == str(folder / "nets.py")


def test_a_run_of_ones_own_is_resumed_loaded_and_used_without_a_word(folder: Path) -> None:
    made = fnrfl.run("digits", model="nets:make", rounds=1, clients=2, client={"epochs": 1}, out="run")
    new_process()
    assert fnrfl.load("run").model is not None
    assert fnrfl.resume("run").model_sha256 == made.model_sha256
    assert command("evaluate", "run", "digits").exit_code == 0
    header = json.loads((folder / "run" / "events.jsonl").read_text().partition("\n")[0])
    assert header["code_sha256"] == {"nets": hashlib.sha256(NETS.encode()).hexdigest()}


OTHER_WORDS = {
    "other options": RECIPE.replace("hidden=3", "hidden=4"),
    "another key": 'dataset = "nets:make"\nrounds = 1\n',
    "another function": RECIPE.replace("nets:make", "nets:Path"),
}


@pytest.mark.parametrize("words", OTHER_WORDS)
def test_other_words_ask(words: str) -> None:
    config.loads(RECIPE, trust=True)
    refused(lambda: config.loads(OTHER_WORDS[words]))


@pytest.mark.parametrize("file", ["nets.py", "pack/__init__.py", "pack/inner/nets.py"])
@pytest.mark.parametrize("later", [new_process, lambda: None], ids=["a new process", "the same process"])
def test_changed_code_asks(later: Callable[[], None], file: str, folder: Path) -> None:
    (folder / "pack" / "inner").mkdir(parents=True)
    (folder / file).write_text(NETS)
    recipe = RECIPE.replace("nets:", file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") + ":")
    config.loads(recipe, trust=True)
    config.loads(recipe)
    with (folder / file).open("a") as code:
        code.write("y = 2\n")
    later()
    refused(lambda: config.loads(recipe))
    assert config.loads(recipe, trust=True) == config.loads(recipe)


def test_the_answer_is_about_the_named_file_by_its_sha256(folder: Path) -> None:
    config.loads(RECIPE, trust=True)
    (entry,) = permissions()
    assert entry["sha256"] == hashlib.sha256(NETS.encode()).hexdigest()


def test_trust_allows_and_is_remembered() -> None:
    Path("my.toml").write_text(RECIPE)
    assert command("run", "my.toml", "--dry-run", "--trust").exit_code == 0
    assert Path("canary").exists() and len(permissions()) == 1
    new_process()
    assert command("run", "my.toml", "--dry-run").exit_code == 0
    assert fnrfl.run("my.toml", trust=True, out=None, clients=2, client={"epochs": 1}).accuracy > 0


def test_an_override_replaces_code_of_a_file_so_it_is_not_asked_for() -> None:
    assert config.loads(RECIPE, ["model=mlp"]).model.name == "mlp"
    assert not Path("canary").exists()


def test_a_config_whose_keys_are_replaced_in_python_may_name_code() -> None:
    assert config.loads(config.load("digits").to_toml(), {"model": "nets:make"}).model.name == "nets:make"
    assert usercode.fetch("This", Target("nets", "make")) is sys.modules["nets"].make


@pytest.mark.parametrize("state", ["file", "read-only", "link", "nowhere"])
def test_without_a_place_to_remember_nothing_fails(
    state: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "state"
    if state == "file":
        place.touch()
    elif state == "read-only":
        monkeypatch.setattr(Path, "mkdir", lambda *words, **more: (_ for _ in ()).throw(OSError(30, "read-only")))
    elif state == "link":
        (tmp_path / "elsewhere").mkdir()
        place.mkdir()
        (place / "trusted").symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.delenv("FNRFL_STATE")
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        monkeypatch.setenv("HOME", "")
    typed = config.load("digits", ["model=nets:make"])
    assert config.loads(typed.to_toml()) == typed  # for as long as the process lasts
    new_process()
    refused(lambda: config.loads(typed.to_toml()))
    assert not list(folder.glob(".local*")) and not list((tmp_path / "elsewhere").glob("*"))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs users")
@pytest.mark.parametrize("mode", [0o720, 0o702], ids=["to the group", "to all"])
@pytest.mark.parametrize("whose", ["the folder is open", "the file is open", "another user's"])
def test_a_permission_that_others_could_have_written_does_not_count(
    whose: str, mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.loads(RECIPE, trust=True)
    (entry,) = (tmp_path / "state" / "trusted").iterdir()
    if whose == "another user's":
        (tmp_path / "state").chmod(0o777)
        monkeypatch.setattr(os, "getuid", lambda: entry.stat().st_uid + 1)
    else:
        (entry if whose == "the file is open" else entry.parent).chmod(mode)
    new_process()
    refused(lambda: config.loads(RECIPE))


def test_permissions_are_the_users_own_and_no_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FNRFL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    config.loads(RECIPE, trust=True)
    place = tmp_path / "xdg" / "fnrfl" / "trusted"
    assert stat.S_IMODE(place.stat().st_mode) == stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    (entry,) = place.iterdir()
    victim = tmp_path / "victim"
    entry.rename(victim)
    before = victim.read_text()
    entry.symlink_to(victim)
    new_process()
    refused(lambda: config.loads(RECIPE))
    config.loads(RECIPE, trust=True)
    assert not entry.is_symlink() and victim.read_text() == before


# ---- found without being run ----


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def found(module: str) -> str | None:
    """The file that would run; nothing may have been imported."""
    before = set(sys.modules)
    source = usercode.find_source(module)
    assert set(sys.modules) == before
    return None if source is None else os.path.relpath(source.place)


def test_a_module_is_found_without_running_what_is_around_it(folder: Path, tmp_path: Path) -> None:
    packages = dict.fromkeys(("pack/__init__.py", "pack/in_/__init__.py", "pack/one.py"), "1/0")
    write(folder, packages | {"a.py": "1/0", "c/x.py": "1/0", "broken.py": "import nets\ndef f(:\n", "../real.py": ""})
    (folder / "binary.py").write_bytes(b"\0\xff")
    for link, target in {"pack/loop": "..", "linked.py": "../real.py", "gone.py": "nowhere.py"}.items():
        (folder / link).symlink_to(target)
    os.mkfifo(folder / "pipe.py")
    files = {
        "pack.in_": "pack/in_/__init__.py",
        "pack.loop.pack": "pack/loop/pack/__init__.py",
        "pack.one": "pack/one.py",
    }
    files |= {"c.x": "c/x.py"}  # c has no __init__.py
    for module, file in (files | {name: f"{name}.py" for name in ("a", "linked", "broken", "binary")}).items():
        assert found(module) == file
    for absent in ("c.y", "nowhere", "pack.absent", "a.b", "c", "gone", "pipe"):
        assert found(absent) is None


def test_compiled_code_is_not_recognised_later(folder: Path) -> None:
    (folder / "quick.py").write_text("x = 1\n")
    py_compile.compile("quick.py", cfile="quick.pyc")
    (folder / "quick.py").unlink()
    (folder / f"native{machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"ELF")
    native = usercode.find_source("native")
    assert native is not None and native.content is native.sha256 is None
    assert fetched("quick", "x") == 1 and not permissions()
    new_process()
    refused(lambda: config.loads('dataset = "quick:x"'))


def test_installed_and_built_in_modules_are_known_by_their_own_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, place in {
        "sys": "the module sys, a part of Python",
        "os": "the module os, a part of Python",
        "subprocess": "subprocess.py",
        "numpy.linalg": "linalg",
        "fnrfl.models.networks": "networks.py",
    }.items():
        source = usercode.find_source(module)
        assert source is not None and place in source.place
        assert (source.sha256 is None) == (module in ("sys", "os"))  # parts of Python have no file
    archive = Path("packed.zip")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("in_archive.py", "x = 1\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(archive.resolve())])
        source = usercode.find_source("in_archive")
        assert source is not None and source.content == b"x = 1\n" and "packed.zip" in source.place
        usercode.allow("dataset.name", "in_archive:x")
        assert usercode.fetch("This", Target("in_archive", "x")) == 1
    del sys.modules["in_archive"]


def test_code_without_a_file_is_allowed_for_this_process_alone() -> None:
    assert found("__main__") and found("os.path")
    usercode.allow("dataset.name", "__main__:x")
    config.loads('dataset = "__main__:x"')
    assert not permissions()
    new_process()
    assert "the module __main__ of this process" in refused(lambda: config.loads('dataset = "__main__:x"'))


# ---- loaded as it was found ----


def fetched(module: str, name: str) -> Any:
    usercode.allow("dataset.name", f"{module}:{name}")
    return usercode.fetch("This", Target(module, name))


def test_the_source_runs_and_not_bytecode_beside_it(folder: Path) -> None:
    prepared(folder / "plain.py")
    assert fetched("plain", "x") == "good"


def prepared(path: Path) -> None:
    """A file with bytecode beside it that does something else, and that Python would take for current."""
    path.write_text("x = 'evil'\n")
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    path.write_text("x = 'good'\n")


def test_other_files_of_the_folder_are_not_imported_whatever_they_are_called(folder: Path) -> None:
    """Neither by our own lazy imports nor by the user's module."""
    evil = "from pathlib import Path\nPath('evil').touch()\nx = 'evil'\n"
    for name in ("zipapp", "jinja2", "PIL", "matplotlib", "sklearn", "unheard_of"):
        (folder / f"{name}.py").write_text(evil)
    (folder / "plain.py").write_text("import zipapp\nname = 'unheard' + '_of'\ndef f():\n    __import__(name)\n")
    path = list(sys.path)
    assert fetched("plain", "zipapp").__file__ != str(folder / "zipapp.py")
    assert sys.path == path
    with pytest.raises(ModuleNotFoundError):
        fetched("plain", "f")()
    code = (
        "from fnrfl.usercode import *; allow('dataset.name', 'plain:f'); fetch('x', Target('plain', 'f')); import PIL"
    )
    env = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path("evil").exists()


@pytest.mark.parametrize("name", ["jinja2", "token"])
def test_a_file_with_the_name_of_another_module_is_refused(name: str, folder: Path) -> None:
    (folder / f"{name}.py").write_text("def data(): ...\n")
    with pytest.raises(ConfigError, match=rf"{name} is a module of yours, .*{name}\.py, and another one is installed"):
        usercode.allow("dataset.name", f"{name}:data")


def test_an_edited_module_is_imported_anew(folder: Path) -> None:
    (folder / "helper.py").write_text("y = 1\n")
    (folder / "plain.py").write_text("from helper import y\nx = y\n")
    assert fetched("plain", "x") == 1
    (folder / "plain.py").write_text("from helper import y\nx = 1 + y\n")
    assert fetched("plain", "x") == 2
    assert fetched("plain", "x") is sys.modules["plain"].x


def test_a_package_that_imports_the_named_file_gets_what_was_read(folder: Path) -> None:
    write(folder, {"pack/__init__.py": "from .named import x\n"})
    prepared(folder / "pack" / "named.py")
    assert fetched("pack.named", "x") == "good" == sys.modules["pack.named"].x


def test_two_folders_may_have_a_module_of_the_same_name(folder: Path, tmp_path: Path) -> None:
    for number, place in enumerate((tmp_path / "one", tmp_path / "two", tmp_path / "three")):
        place.mkdir()
        (place / "plain.py").write_text(f"x = {min(number, 1)}, __file__\n")
        os.chdir(place)
        assert fetched("plain", "x") == (min(number, 1), str(place / "plain.py"))
    os.chdir(folder)


def test_a_module_that_the_program_imported_stays_until_its_file_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plain.py").write_text("def f():\n    return 1\nclass C:\n    def g(self):\n        return 1\n")
    monkeypatch.syspath_prepend(str(folder))
    plain = __import__("plain")
    resume = plain.f.__code__.replace(co_name="torch_dynamo_resume_in_f_at_2")
    plain.__resume_at_2 = FunctionType(resume, vars(plain))  # what torch.compile leaves is no change of the file
    assert fetched("plain", "f") is plain.f
    (folder / "plain.py").write_text("def f():\n    return 1\nclass C:\n    def g(self):\n        return 2\n")
    assert fetched("plain", "C")().g() == 2  # type: ignore[operator]
    (folder / "other").mkdir()
    (folder / "other" / "plain.py").write_text("f = 3\n")
    monkeypatch.setitem(sys.modules, "plain", plain)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(folder)])
    os.chdir("other")
    with pytest.raises(ConfigError, match="plain is imported from"):
        fetched("plain", "f")
    os.chdir(folder)


def test_a_relative_state_folder_remembers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FNRFL_STATE", "state")
    usercode.allow("dataset.name", "nets:make")
    assert list(Path("state/trusted").iterdir())


def test_code_that_changes_after_it_was_allowed_is_not_run(folder: Path) -> None:
    usercode.allow("dataset.name", "nets:make")
    (folder / "nets.py").write_text(NETS + "x = 1\n")
    with pytest.raises(ConfigError, match="which has changed since it was allowed"):
        usercode.fetch("This", Target("nets", "make"))
    assert not Path("canary").exists()


def test_threads_may_load_at_once(folder: Path) -> None:
    (folder / "slow.py").write_text("import time\ntime.sleep(0.05)\nfrom helper import x\n")
    (folder / "helper.py").write_text("x = object()\n")
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda _: fetched("slow", "x"), range(8)))
    assert len(got) == 8 and len(set(map(id, got))) == 1


# ---- what users' code does ----

BAD = {
    "syntax": ("def f(:\n", "SyntaxError"),
    "raises": ("raise RuntimeError('out of coffee')\n", "RuntimeError: out of coffee; bad.py, line 1"),
    "exits": ("import sys\nsys.exit(0)\n", "SystemExit: 0; bad.py, line 2"),
    "odd": ("class Odd(BaseException): ...\nraise Odd('x')\n", "Odd: x"),
    "lacks": ("import fnrfl_no_such_package\n", "No module named 'fnrfl_no_such_package'"),
}


@pytest.mark.parametrize("key", usercode.KEYS)
@pytest.mark.parametrize("how", BAD)
def test_a_module_that_fails_is_a_sentence(how: str, key: str, folder: Path) -> None:
    text, says = BAD[how]
    (folder / "bad.py").write_text(text)
    got = command("run", f"{key}=bad:f", "rounds=1", "-o", "x")
    assert got.exit_code == 2
    assert says in got.stderr and "cannot be imported" in got.stderr and "bad:f" in got.stderr
    assert "report it" not in got.stderr and len(got.stderr.splitlines()) == 1


def test_ctrl_c_in_a_module_is_ctrl_c(folder: Path) -> None:
    (folder / "bad.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        fetched("bad", "f")


@pytest.mark.parametrize("error", ["RuntimeError('out of coffee')", "SystemExit('out of coffee')"])
def test_a_method_that_fails_in_a_round_is_a_sentence(error: str, folder: Path) -> None:
    (folder / "mine.py").write_text(METHOD.format(body=f"raise {error}"))
    got = command("run", "algorithm=mine:Mine", "rounds=1", "clients=2", "-o", "x")
    said = (f"{error.partition('(')[0]}: out of coffee", "mine:Mine", "round 1", "(mine.py, line 7, in round)")
    assert got.exit_code == 3 and all(word in got.stderr for word in said) and "report it" not in got.stderr


def test_fields_that_cannot_be_read_are_a_sentence(folder: Path) -> None:
    (folder / "mine.py").write_text(METHOD.format(body="pass") + "    x: 'Nowhere' = 1\n")
    usercode.allow("algorithm.name", "mine:Mine")
    with pytest.raises(ConfigError, match="mine:Mine cannot be read .NameError"):
        registry.options("mine:Mine")


@pytest.mark.parametrize(
    "words", ["run -o x --json", "run --dry-run --json", "run --dry-run", "compare --seeds 0 --json"]
)
def test_what_users_code_prints_does_not_get_into_the_answer(words: str, folder: Path) -> None:
    body = "print('round'); return super().round(state, cohort, engine)"
    (folder / "mine.py").write_text("print('hello')\n" + METHOD.format(body=body))
    (folder / "nets.py").write_text(NETS.replace("    return", "    print('made')\n    return"))
    keys = ("algorithm=mine:Mine", "model=nets:make", "rounds=1", "clients=2", "client.epochs=1")
    got = command(*words.split(), *keys)
    assert got.exit_code == 0, got.output
    assert {"hello", "made"} <= set(got.stderr.splitlines())
    answer = json.loads(got.stdout) if "--json" in words else config.loads(got.stdout).model.name
    assert answer == "nets:make" or isinstance(answer, dict)


# ---- the promise ----


def test_each_promise_names_tests_that_exist() -> None:
    page = (Path(__file__).parent.parent / "SECURITY.md").read_text(encoding="utf-8")
    promised, _ = page.split("## What is not promised")
    promises = [part for part in promised.split("\n\n") if part.startswith("**")]
    assert len(promises) > 5
    for promise in promises:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", promise)
        assert named, f"no test is named for: {promise[:80]}"
        for file, test in named:
            assert f"\ndef {test}(" in (Path(__file__).parent / file).read_text(encoding="utf-8"), test
