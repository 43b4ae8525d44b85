"""The config: what may be said, what it resolves to, and the sentences for what may not."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnrfl import config, usercode
from fnrfl.config import RunConfig, describe_keys, load, loads, registry
from fnrfl.config.refusals import RULES, Rule
from fnrfl.config.schema import LeakOptions
from fnrfl.core.errors import ConfigError
from fnrfl.core.options import Option, values_of
from fnrfl.core.training import Training
from settings import with_keys

PAGE = """
    name seed rounds clients participation protocol scenario metrics fnr
    dataset.name dataset.scale dataset.label dataset.client dataset.ignore dataset.categories dataset.missing
    dataset.image_size dataset.rename
    model.name model.features
    client.optimizer client.lr client.lr_decay client.momentum client.weight_decay client.batch client.epochs
    client.last_batch client.augment client.stragglers client.dropout client.nonfinite
    algorithm.name
    fnr.share fnr.weight fnr.penalty fnr.target fnr.when fnr.epochs fnr.batch fnr.lr fnr.optimizer fnr.batchnorm
    fnr.upload fnr.augment fnr.watch
    model.init client.class_weights
    public.source public.size public.ranking public.distill validation.size
    engine.name engine.precision engine.deterministic engine.clients_at_once engine.threads engine.accelerate
    client.clip_update client.schedule
    stop network.site_scores network.on_missing network.min_share network.max_share network.train_deadline
    network.refine_deadline    network.measure_deadline network.retries network.address network.cpus network.gpus
    leaks.public_is_test leaks.norm_pass_train_mode leaks.constant_penalty leaks.clean_test_for_fnr
"""


def plain(*overrides: str) -> RunConfig:
    """A config that says nothing but the overrides."""
    return loads("", overrides)


def refusal(*overrides: str) -> str:
    """The sentence with which overrides are refused."""
    with pytest.raises(ConfigError) as refused:
        loads("", overrides)
    return str(refused.value)


# ---- keys and recipes ----


def test_the_keys_are_those_of_the_config_page() -> None:
    methods = {f"algorithm.{f.name}" for name in registry.algorithms() for f in registry.options(name)}
    assert {key.name for key in describe_keys()} == set(PAGE.split()) | methods


def test_every_key_has_a_meaning_and_a_default_that_obeys_its_own_rule() -> None:
    assert all(key.meaning and key.type_name and key.rule for key in describe_keys())
    everything = plain("fnr=on")
    assert loads("", {"fnr": everything.as_dict()["fnr"]}) == everything


def test_keys_are_described_in_words() -> None:
    keys = {key.name: key for key in describe_keys()}
    lr, distill, optimizer = keys["client.lr"], keys["public.distill"], keys["client.optimizer"]
    assert (lr.type_name, lr.default, lr.range, lr.rule) == ("float", 0.01, "> 0", "a number > 0")
    assert (distill.type_name, distill.range) == ('float | "auto"', ">= 0 and < 1")
    assert (optimizer.type_name, optimizer.rule) == ('"sgd" | "adam" | "adamw"', '"sgd", "adam" or "adamw"')


def test_the_client_section_is_the_training_that_steps_take() -> None:
    chosen = load("digits", ["client.lr=0.5", "client.lr_decay=0.5", "client.last_batch=keep", "client.momentum=0"])
    engine = importlib.import_module("fnrfl.runs.setup.build").build(chosen).engine
    for t in (0, 2):
        engine.begin(t)
        steps = {f.name: getattr(chosen.client, f.name) for f in dataclasses.fields(Training)}
        assert engine.training == Training(**steps | {"lr": 0.5 * 0.5**t, "lr_decay": 1.0, "schedule_rounds": 0})


def test_the_fnr_section_is_what_fnr_takes() -> None:
    chosen = plain("fnr.share=0.25", "fnr.lr=0.5", "fnr.batchnorm=frozen").fnr
    assert chosen is not None
    fnr = importlib.import_module("fnrfl.algorithms.fnr").FNR(None, **values_of(chosen))
    assert values_of(fnr) == values_of(chosen)


@pytest.mark.parametrize("recipe", [None, *registry.recipes()])
def test_recipes_load_and_their_resolved_text_loads_to_the_same(recipe: str | None) -> None:
    resolved = load(recipe)
    assert resolved.name == (recipe or "digits")
    again = loads(resolved.to_toml())
    assert again == resolved and again.sha256 == resolved.sha256


@pytest.mark.parametrize("recipe", registry.recipes())
def test_recipes_say_only_what_differs_from_the_defaults(recipe: str) -> None:
    text = (registry.RECIPES / f"{recipe}.toml").read_text()
    for line in text.splitlines(keepends=True):
        if "=" in line and not line.startswith("#") and not line.startswith("scenario"):  # the point of most recipes
            assert loads(text.replace(line, ""), name=recipe) != load(recipe), line


def test_a_recipe_may_be_a_file_named_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('seed = 3\nmodel = "mlp"\n[fnr]\nweight = 0.2\n')
    mine = load(file)
    assert load(str(file)) == mine
    assert (mine.name, mine.seed, mine.model.name) == ("mine", 3, "mlp")
    assert mine.fnr is not None and mine.fnr.weight == 0.2
    file.write_text('name = "other"')
    assert load(file).name == "other"
    assert load(file, ["name=third"]).name == "third"


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**70),
    "rounds": st.integers(1, 10**6),
    "participation": st.floats(0, 1, exclude_min=True),
    "protocol": st.sampled_from(["honest", "paper"]),
    "dataset.name": st.text().map(lambda text: f"a{text}/"),
    "model": st.text().map(lambda text: f"mlp({text})"),
    "scenario": st.sampled_from(["iid", "label-dirichlet( 0.50 )+feature-noise(0.1)", "niid-mixed"]),
    "client.lr": st.floats(0, exclude_min=True, allow_infinity=False),
    "client.lr_decay": st.just(1) | st.floats(0.1, 1),
    "client.augment": st.sampled_from(["auto", "crop-flip", "none", True, False]),
    "algorithm": st.sampled_from([{"name": "fedavg"}, {"name": "moon", "mu": 5}, {"name": "fedprox", "mu": 0.1}]),
    "fnr": st.sampled_from(["on", "off", True, False]) | st.fixed_dictionaries({"lr": st.just("client") | st.just(1)}),
    "public.size": st.integers(1, 10**6) | st.floats(0, 1, exclude_min=True, exclude_max=True),
    "engine.threads": st.just("auto") | st.integers(1, 64),
    "leaks.norm_pass_train_mode": st.just(False),
}


@settings(deadline=None, max_examples=150)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_resolved_text_loads_to_the_same_config(overrides: dict[str, Any]) -> None:
    resolved = loads("", overrides)
    again = loads(resolved.to_toml())
    assert again == resolved
    assert again.to_toml() == resolved.to_toml()
    assert with_keys(resolved, {}) == resolved


def test_every_control_character_survives_the_round_trip() -> None:
    awkward = "".join(map(chr, range(0x20))) + "\x7f\x85\u2028\"\\'#=[]\U0001f600/"
    resolved = loads("", {"dataset": awkward})
    assert resolved.dataset.name == awkward
    assert loads(resolved.to_toml()) == resolved


def test_a_config_cannot_be_changed_only_replaced() -> None:
    before = plain()
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.client.lr = 1.0  # type: ignore[misc]
    after = with_keys(before, ["client.lr=1"])
    assert (before.client.lr, after.client.lr) == (0.01, 1.0)


# ---- overrides ----


def test_overrides_as_text_and_as_values_agree() -> None:
    text = ["algorithm=scaffold", "fnr.weight=0.1", "seed=3", "scenario=label-dirichlet(0.1)", "client.epochs=2"]
    values = {
        "algorithm": "scaffold",
        "fnr": {"weight": 0.1},
        "seed": np.int64(3),
        "scenario": "label-dirichlet(0.1)",
        "client.epochs": 2,
    }
    assert load("label-skew", text) == load("label-skew", values)
    assert load("label-skew", "seed=3") == load("label-skew", ["seed = 3"]) == load("label-skew", {"seed": 3})


def test_a_path_object_is_a_value() -> None:
    assert loads("", {"dataset": Path("data/mine.npz")}).dataset.name == str(Path("data/mine.npz"))


@pytest.mark.parametrize(
    ("override", "value"),
    [("name=plain-word", "plain-word"), ('name="quoted"', "quoted"), ("name=a=b", "a=b"), ("name = spaced ", "spaced")],
)
def test_values_are_toml_and_bare_words_are_text(override: str, value: str) -> None:
    assert plain(override).name == value


def test_inline_tables_and_later_overrides_win() -> None:
    assert plain("client={lr=0.5, batch=8}", "client.lr=0.25").client.lr == 0.25
    assert plain("seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    ("overrides", "weight"),
    [
        ([], None),
        (["fnr=on"], 0.1),
        (["fnr=true"], 0.1),
        (["fnr={}"], 0.1),
        (["fnr.weight=0.2"], 0.2),
        (["fnr=off", "fnr.weight=0.2"], 0.2),
        (["fnr.weight=0.2", "fnr=off"], None),
        (["fnr.weight=0.2", "fnr=off", "fnr=on"], 0.2),
    ],
)
def test_any_fnr_key_turns_refinement_on_and_the_last_word_counts(overrides: list[str], weight: float | None) -> None:
    fnr = plain(*overrides).fnr
    assert (None if fnr is None else fnr.weight) == weight


def test_a_recipe_keeps_its_fnr_settings_for_when_it_is_switched_on_again() -> None:
    recipe = "[fnr]\nepochs = 1\n"
    off, on = loads(recipe, ["fnr=off"]), loads(recipe, ["fnr=on"])
    assert off.fnr is None
    assert on.fnr is not None and on.fnr.epochs == 1


def test_another_method_does_not_inherit_the_recipes_fields() -> None:
    recipe = '[algorithm]\nname = "fedprox"\nmu = 0.5\n'
    assert loads(recipe).algorithm.options["mu"] == 0.5
    assert loads(recipe, ["algorithm=fedprox"]).algorithm.options["mu"] == 0.5
    assert loads(recipe, ["algorithm=fedavg"]).algorithm.options == {}
    moon = {f.name: f.default for f in registry.options("moon")}
    assert loads(recipe, ["algorithm=moon"]).algorithm.options == moon
    assert loads(recipe, ["algorithm=moon", "algorithm.mu=2"]).algorithm.options == moon | {"mu": 2.0}


def test_a_whole_number_given_for_a_number_becomes_one() -> None:
    lr = plain("client.lr=1").client.lr
    assert isinstance(lr, float)
    assert plain("client.lr=1") == plain("client.lr=1.0")


def test_sizes_are_fractions_or_counts() -> None:
    assert plain("public.size=0.25").public.size == 0.25
    assert plain("public.size=500").public.size == 500


def test_equal_scenarios_are_equal_configs() -> None:
    assert plain("scenario= label-dirichlet(alpha = 0.5) ") == plain("scenario=label-dirichlet(0.5)")


def test_a_scenario_that_counts_clients_forgets_a_number_that_was_typed_for_another() -> None:
    assert loads("clients = 5", ["scenario=natural"]).clients == plain("scenario=natural").clients == 0
    assert loads('clients = 5\nscenario = "natural"').clients == plain("scenario=natural", "clients=5").clients == 5


# ---- protocols ----


def test_the_paper_protocol_is_the_released_codes() -> None:
    paper = plain("protocol=paper", "fnr=on")
    assert (paper.dataset.name, paper.model.name, paper.clients, paper.participation, paper.rounds) == (
        "cifar10", "resnet18(head=1000)", 10, 1.0, 10,
    )  # fmt: skip
    assert paper.scenario == "niid(label-dirichlet(0.5))"
    client = paper.client
    assert (client.epochs, client.batch, client.lr, client.momentum, client.weight_decay, client.last_batch) == (
        10, 64, 0.01, 0.9, 1e-5, "keep",
    )  # fmt: skip
    settled = dict(share=0.5, weight=0.5, epochs=5, batch=32, batchnorm="updating", target="all", penalty="constant")
    assert paper.fnr is not None and settled.items() <= vars(paper.fnr).items()
    assert (paper.public.source, paper.public.ranking, paper.validation.size) == ("test", 0, 0)
    assert paper.leaks_on == ("public_is_test", "norm_pass_train_mode", "constant_penalty", "clean_test_for_fnr")


def test_the_paper_protocol_changes_defaults_and_no_more() -> None:
    assert set(config.PAPER) <= {key.name for key in describe_keys()}
    mine = load("digits", ["protocol=paper", "fnr.weight=2", "leaks.clean_test_for_fnr=false"])
    assert (mine.dataset.name, mine.client.lr, mine.rounds) == ("digits", 0.05, 20)
    assert mine.fnr is not None and mine.fnr.weight == 2
    assert "clean_test_for_fnr" not in mine.leaks_on


def test_a_leak_and_its_twin_key_follow_each_other() -> None:
    by_leak = plain("protocol=paper", "leaks.public_is_test=false", "leaks.constant_penalty=false", "fnr=on")
    by_twin = plain("protocol=paper", "public.source=train", "fnr.penalty=relative")
    assert by_leak == by_twin
    assert by_leak.leaks_on == ("norm_pass_train_mode", "clean_test_for_fnr")
    assert by_leak.public.source == "train" and by_leak.fnr is not None and by_leak.fnr.penalty == "relative"


def test_the_honest_protocol_has_no_leak() -> None:
    assert plain("fnr=on").leaks_on == ()


@pytest.mark.parametrize("leak", [leak.name for leak in dataclasses.fields(LeakOptions)])
def test_the_honest_protocol_refuses_every_leak(leak: str) -> None:
    said = refusal(f"leaks.{leak}=true")
    assert f"leaks.{leak} = true is a leak" in said and 'protocol = "paper"' in said


# ---- refusals ----

# What is typed, and pieces of the sentence: the value, the rule, the way out.
REFUSED: dict[str, tuple[str, ...]] = {
    "client.lrr=1": ("client.lrr", "client.lr?"), "cleint.lr=1": ("cleint.lr", "client.lr"),
    "lr=1": ("client.lr or fnr.lr?",), "rouns=1": ("mean rounds?",), "fnr.wieght=1": ("mean fnr.weight?",),
    "client-lr=3": ("client-lr", "client.lr"), "zzz=1": ("Unknown key zzz", "`fnrfl list keys`"),
    "client.lr.x=1": ("client.lr is not a section", "a number > 0"), "client=3": ("is a section", "client.optimizer"),
    "algorithm.mu=1": ("algorithm.mu", "with fedavg", "algorithm.name"),
    "algorithm=fedprx": ('"fedprx"', "mean fedprox?"), "algorithm=fnr": ('Set fnr = "on"',),
    "algorithm=3": ('algorithm.name = "3"',), "algorithm=json:loads": ("must be a dataclass", "Algorithm"),
    "algorithm=no_such_module:Method": ('"no_such_module:Method" cannot be imported',),
    "rounds=0": ("rounds = 0", "a whole number >= 1", "(default 10)"), "rounds=2.5": ("rounds = 2.5", "a whole number"),
    "rounds=many": ('rounds = "many"', "a whole number"), "rounds='3'": ('rounds = "3"', "a whole number"),
    "rounds=[1, 2]": ("rounds = [1, 2]",), "seed=true": ("seed = true", ">= 0"), "seed=-1": ("seed = -1",),
    "participation=0": ("participation = 0", "a number > 0 and <= 1", "1.0"), "participation=1.5": ("= 1.5",),
    "client.lr=nan": ("client.lr = nan", "> 0"), "client.lr=inf": ("client.lr = inf",), "client.momentum=1": ("= 1 ",),
    "client.lr=[1.5]": ("client.lr = [1.5]", "a number > 0"), "client.lr={}": ("client.lr = {}", "(default 0.01)"),
    "client={lr={}}": ("client.lr = {}",), "name={}": ("name = {}", "text"),
    "client.optimizer=sdg": ('"sdg"', '"sgd", "adam" or "adamw"', '(default "sgd")'),
    "client.nonfinite=ignore": ('"ignore"', '"fail" or "skip"'), "engine.deterministic=1": ("= 1 ", "true or false"),
    "engine.threads=0": ("engine.threads = 0", 'a whole number >= 1 or "auto"'),
    "public.size=1.0": ("public.size = 1.0", "a number >= 0 and < 1 or a whole number >= 0"),
    "fnr=maybe": ('fnr = "maybe"', '"on", "off" or a section'), "fnr=2": ("fnr = 2",),
    "fnr.lr=0": ("fnr.lr = 0", 'a number > 0 or "client"'),
    "public.source=test": ("a leak", 'protocol = "paper"', "public.source ="),
    "scenario=label-dirichle(0.1)": ("'label-dirichlet'?",), "scenario=label-dirichlet(": ("label-dirichlet(",),
    "scenario=label-dirichlet(-1)": ("alpha", "-1"), "scenario=noniid-labeldir": ("NIID-Bench", "niid(label-dirichlet"),
    "scenario=homo": ("NIID-Bench", "niid(iid)"), "dataset=": ('dataset.name = ""', "empty", '"cifar10"'),
    "model= ": ("model.name", "empty"), "scenario=": ("scenario",), "public.source=": ("public.source",),
    "engine=": ("engine.name",), "name=": ('name = ""', "one folder"), "rounds": ('"rounds"', "key=value"),
    "=3": ('"=3"', "key=value"), "name=\udcff": ("UTF-8",), "dataset=a/\udcff.csv": ("UTF-8",),
    "dataset=" + "x" * 5000: ("is not known",), "client.lr=" + "[" * 5000: ("a number > 0",),
    "seed=" + "9" * 5000: ("seed = ",), "x" * 5000 + "=1": ("Unknown key xxx",), "a" * 5000: ("key=value",),
    "client." * 3000 + "lr=1": ("Unknown key client.client",),
}  # fmt: skip


@pytest.mark.parametrize("typed", REFUSED, ids=lambda typed: ascii(typed[:30]))
def test_mistakes_are_refused_with_a_sentence(typed: str) -> None:
    said = refusal(typed)
    assert all(piece in said for piece in REFUSED[typed]), said
    assert said.endswith((".", "?")) and "\n" not in said and len(said) < 1000


# What breaks each rule of the table, in its order.
BREAKING = (
    ["name=../up"], ["name=" + "x" * 151], ["dataset=cifar1"], ["public.source=trian"], ["model=resnet1"],
    ["model.init=best.pt"], ["engine=lop"], ["clients=0", "scenario=iid"],
    ["public.ranking=0.5", "public.distill=0.5"], ["fnr=on", "public.size=0"], ["fnr.share=1"],
)  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "overrides"), zip(RULES, BREAKING, strict=True), ids=lambda one: getattr(one, "key", "")
)
def test_a_broken_rule_is_a_sentence_with_the_value_and_the_way_out(rule: Rule, overrides: list[str]) -> None:
    said = refusal(*overrides)
    key, value = overrides[-1].split("=")
    assert key in said and value[:50] in said
    assert rule.key.removesuffix(".name") in said
    assert any(word in said for word in ("Set ", "Choose one of", "must be", "must have", "give "))


@pytest.mark.parametrize(
    "overrides",
    [["fnr=on", "public.size=0", "public.source=mine.npz"], ["public.size=0"], ["fnr.share=1", "fnr.target=all"]],
)
def test_rules_hold_where_they_say(overrides: list[str]) -> None:
    assert plain(*overrides)


def test_a_leak_that_its_twin_denies_is_refused() -> None:
    said = refusal("protocol=paper", "public.source=train", "leaks.public_is_test=true")
    assert "leaks.public_is_test = true" in said and 'public.source = "train"' in said


def test_all_mistakes_are_reported_together() -> None:
    said = refusal("roundz=3", "client.lr=-1", "clients=x")
    assert all(part in said for part in ("rounds?", "client.lr = -1", 'clients = "x"'))


@pytest.mark.parametrize(
    ("recipe", "content", "said"),
    [
        ("label-skw", None, ('"label-skw"', "mean label-skew?", "Choose one of")),
        ("missing.toml", None, ("missing.toml", "No such file")),
        (".", None, ("directory",)),
        ("mine.toml", b"seed = = 3", ("not valid TOML", "line 1")),
        ("mine.toml", b"\xff\xfe\x00", ("UTF-8",)),
        ("mine.toml", b"[client]\nlr = [1]\n", ("client.lr",)),
        ("mine.toml", b"[[client]]\nlr = 1\n", ("client",)),
        ("mine.toml", b"rounds = 1979-05-27\n", ("rounds",)),
        ("mine.toml", b"[model]\nname = 07:32:00\n", ("must be text",)),
        ("mine.toml", b"name = true", ("name = true", "must be text")),
        ("mine.toml", b"a" + b".a" * 5000 + b" = 1", ("a.a.a",)),
        ("mine.toml", b"[" + b"a." * 5000 + b"a]\nb = 1", ("a.a.a",)),
        ("mine.toml", b"x = " + b"[" * 100_000, ("too deeply",)),
        ("mine.toml", b"seed = " + b"9" * 5000, ("mine.toml",)),
    ],
)
def test_unreadable_recipes_are_refused(
    recipe: str, content: bytes | None, said: tuple[str, ...], tmp_cwd: Path
) -> None:
    if content is not None:
        Path(recipe).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load(Path(recipe) if recipe == "." else recipe)
    assert all(words in str(refused.value) for words in said) and len(str(refused.value)) < 1000


# ---- the registry ----


@pytest.mark.parametrize("name", registry.algorithms())
def test_a_method_can_be_built_from_its_resolved_options(name: str) -> None:
    options = plain(f"algorithm={name}").algorithm.options
    method = registry.load_method(name)(**options)
    assert {f.name: getattr(method, f.name) for f in dataclasses.fields(method) if f.name in options} == options


def test_tables_are_in_step_with_the_code() -> None:
    assert set(registry.MODELS) == set(importlib.import_module("fnrfl.models.catalogue").MODELS)
    assert set(registry.PENALTIES) == set(importlib.import_module("fnrfl.algorithms.parts.penalties").PENALTIES)
    known = get_args(importlib.import_module("fnrfl.engines.assemble").EngineName)
    assert set(registry.ENGINES) == {"auto", "flower", *known}  # flower: clients that are elsewhere


METHOD = '''
"""A method for a test.

More about it.
"""
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args
from fnrfl.core.algorithm import Algorithm, option

Kind = Literal["a", "b"]

@dataclass(frozen=True)
class Base(Algorithm):
    needs: ClassVar[frozenset[str]] = frozenset({"features"})
    mu: float = option(0.5, "strength", ge=0.0)
    inner: str = "not a key"

class Unrelated:
    x: int = 3

@dataclass(frozen=True)
class Mine(Base):
    kind: Kind = option("a", "which "
                             "form")
    lr: float | Literal["client"] = option(default="client", help="rate", gt=0.0, le=1.0)
    mu: float = option(-1.0, "redefined")
'''


def test_a_file_is_read_as_python_would_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "mine.py").write_text(METHOD.lstrip())
    (tmp_path / "algorithms" / "_shared.py").write_text("syntax error")
    child = '"""Built on another file."""\nfrom fnrfl.algorithms.mine import Mine as Parent\nclass Child(Parent): ...\n'
    (tmp_path / "algorithms" / "child.py").write_text(child)
    (tmp_path / "mine_imported.py").write_text(METHOD.lstrip())
    expected = (
        Option("mu", float, -1.0, "redefined"),
        Option("kind", Literal["a", "b"], "a", "which form"),
        Option("lr", float | Literal["client"], "client", "rate", (("gt", 0.0), ("le", 1.0))),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    usercode.allow("algorithm.name", "mine_imported:Mine")
    assert registry.options("mine_imported:Mine") == expected
    monkeypatch.setattr(registry, "PACKAGE_FOLDER", tmp_path)
    assert registry.algorithms() == {"child": "Built on another file.", "mine": "A method for a test."}
    assert registry.options("mine") == registry.options("child") == expected


def test_a_users_method_is_configured_by_its_own_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_method.py").write_text(METHOD.lstrip())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    theirs = plain("algorithm=their_method:Mine", "algorithm.lr=0.5")
    assert theirs.algorithm.options == {"mu": -1.0, "kind": "a", "lr": 0.5}
    assert registry.load_method(theirs.algorithm.name)(**theirs.algorithm.options) is not None
    assert loads(theirs.to_toml()) == theirs
    assert 'a number > 0 and <= 1 or "client"' in refusal("algorithm=their_method:Mine", "algorithm.lr=2")


def test_a_file_without_a_method_is_our_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "algorithms").mkdir()
    (tmp_path / "algorithms" / "empty.py").write_text("x = 3\n")
    monkeypatch.setattr(registry, "PACKAGE_FOLDER", tmp_path)
    with pytest.raises(TypeError, match="declares no class"):
        registry.options("empty")
