"""Recorded steps: all runs of a process share them, and nothing that differs; rewritten, they compute the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import grad_and_value, vmap

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fedprox import FedProx
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.scaffold import Scaffold
from fnrfl.config import load
from fnrfl.core.algorithm import Objective, cross_entropy
from fnrfl.core.engine import Step
from fnrfl.core.fingerprint import fingerprint
from fnrfl.core.net import Net
from fnrfl.engines.recorder import torchscript
from fnrfl.engines.recorder.programs import ProgramStore, StepArguments
from fnrfl.engines.recorder.recorder import NewStep, Recorder, recorded
from fnrfl.engines.recorder.rewriting import (
    _is_in_parts,
    _is_only_read,
    _is_plain_descent,
    _update_each,
    leave_out_copies,
    put_classes_first,
    rewrite,
    update_by_parts,
)
from fnrfl.engines.recorder.torchscript import TorchScript
from fnrfl.runs.setup import engine as setup_engine
from fnrfl.runs.setup.build import build
from mutants import mutants
from toys import NUM_CLASSES, NUM_FEATURES, Run, assert_near, assert_same, classification

pytestmark = pytest.mark.usefixtures("no_programs")
FAST = pytest.mark.parametrize("engine", ["loop-fast", "batched-fast"])


def num_recorded(run: Run) -> int:
    recorder = run.engine.server.runner.recorder
    assert recorder is not None
    return recorder.num_recorded


def played(algorithm: Any = None, engine: str = "loop-fast", rounds: int = 1, **options: Any) -> Run:
    run = Run(algorithm or FedAvg(), engine, active=6, **options)
    run.rounds(rounds)
    return run


@FAST
def test_runs_share_what_they_have_recorded(engine: str) -> None:
    """Another seed, another round, and with FNR the steps of private training."""
    for algorithm, options, records in (
        (FedAvg(), {}, True), (FedAvg(), {"seed": 8}, False), (FedAvg(), {"rounds": 2}, False),
        (FNR(FedAvg()), {}, True), (FNR(FedAvg()), {"seed": 9}, False), (FedAvg(), {"seed": 10}, False),
    ):  # fmt: skip
        assert bool(num_recorded(played(algorithm, engine, **options))) is records  # type: ignore[arg-type]
    first, again = (played(FNR(Scaffold()), engine) for _ in range(2))
    assert num_recorded(first) > 0 and num_recorded(again) == 0
    assert_same(first.state, again.state)


def test_what_a_step_depends_on_is_not_shared() -> None:
    """Another method, another constant of it, another type, another training, and a changed method of an objective."""
    played(FedProx(mu=0.1))
    assert num_recorded(played(FedAvg())) > 0
    assert num_recorded(played(FedProx(mu=0.2))) > 0
    assert num_recorded(played(FedProx(mu=0.1), dtype=torch.float32)) > 0
    assert num_recorded(played(FedProx(mu=0.1))) == 0


def test_a_changed_loss_is_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before, loss = played(), Objective.loss
    monkeypatch.setattr(Objective, "loss", lambda *arguments: 2 * loss(*arguments))
    after = played()
    assert num_recorded(after) > 0
    assert_near(after.state, Run(FedAvg(), "loop", active=6).rounds(1), atol=1e-9)
    assert not torch.equal(after.state.params, before.state.params)


class Sloped(nn.Module):
    """Has a number, a tensor, a function and a parameter that is not trained: none is an argument of a step."""

    def __init__(self, slope: float = 1.0, offset: float = 0.0, fixed: float = 1.0, act: Any = torch.tanh) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(NUM_FEATURES, 8), nn.Linear(8, NUM_CLASSES)
        self.slope, self.act = slope, act
        self.offset = torch.full((8,), offset, dtype=torch.float64)
        self.fixed = nn.Parameter(torch.full((8,), fixed), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.act(self.slope * self.hidden(x.flatten(1)) + self.offset) * self.fixed)


@pytest.mark.parametrize(
    "other", [{"slope": 0.5}, {"offset": 0.3}, {"fixed": 0.5}, {"act": torch.sigmoid}], ids=lambda d: next(iter(d))
)
def test_modules_that_compute_something_else_share_nothing(other: dict[str, Any]) -> None:
    played(world=classification(module=Sloped))
    world = classification(module=lambda: Sloped(**other))
    run = played(world=world)
    assert num_recorded(run) > 0
    assert_near(run.state, Run(FedAvg(), "loop", world=world, active=6).rounds(1), atol=1e-9)


class Hooked(nn.Module):
    def __init__(self, hook: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
        if hook:
            self.layers[0].register_forward_hook(hook)


def test_a_fingerprint_is_of_what_a_module_computes() -> None:
    plain = fingerprint(Hooked())
    assert plain == fingerprint(Hooked()) and hash(plain) == hash(fingerprint(Hooked()))  # whatever its weights
    assert fingerprint(Hooked().eval()) != fingerprint(nn.Sequential(Hooked().eval()))
    hook = lambda layer, args, out: -out  # noqa: E731
    assert fingerprint(Hooked(hook)) != plain
    other = Hooked()
    other.layers[1].p = 0.25
    assert fingerprint(other) != plain
    frozen = Hooked()
    frozen.layers[0].weight.requires_grad_(False)
    assert fingerprint(frozen) != plain


def test_modules_that_share_other_weights_differ() -> None:
    def tied(one: int, other: int) -> nn.Module:
        module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        module[one].weight = module[other].weight
        return module

    assert fingerprint(tied(0, 1)) == fingerprint(tied(0, 1)) != fingerprint(tied(2, 3))


def left(store: ProgramStore) -> list[int]:
    return [i for i in range(9) if store.get(i)]


def test_the_store_is_bounded_and_keeps_what_is_used() -> None:
    store = ProgramStore()
    kept = [store.keep(i, None, 3) for i in range(3)]
    store.use(kept[0])
    store.keep(3, None, 3)
    assert left(store) == [0, 2, 3]


def test_half_of_what_is_not_kept_goes_and_what_was_used_last_stays() -> None:
    store = ProgramStore()
    programs = [store.keep(i, None, 9) for i in range(6)]
    for i in (1, 3, 0, 5, 2, 4):
        store.use(programs[i])
    for there in ([1, 2, 4], [1, 4], [1], [1]):  # of 3, 0, 5, 2 and 4 three go
        store.let_half_go([programs[1]])
        assert left(store) == there


@pytest.mark.parametrize("short", [False, True])
def test_where_memory_is_short_programs_of_earlier_runs_go_and_those_of_this_run_stay(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = list[bool]()
    monkeypatch.setattr(TorchScript, "memory_is_short", lambda *_: short)
    monkeypatch.setattr(TorchScript, "free_memory", lambda _: freed.append(True))

    def recorded(batch: int) -> int:
        run = Run(FNR(FedAvg()), "batched-fast", active=6, training=replace(classification().training, batch=batch))
        run.round()
        before = num_recorded(run)
        run.rounds(2)
        assert num_recorded(run) == before  # what the run uses itself has stayed
        return before

    first, second = recorded(batch=2), recorded(batch=3)
    assert first and second
    assert bool(recorded(batch=2)) == short
    assert bool(freed) == short


def add(total: Tensor, fixed: Tensor, turn: Tensor) -> Tensor:
    return total.add_(fixed * turn).sum()


def adding() -> tuple[Step, Tensor, Tensor, Tensor]:
    return add, torch.zeros(2), torch.ones(2), torch.ones(2)


def test_programs_of_earlier_runs_go_where_memory_is_short_for_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store, asked, left = ProgramStore(), list[torch.device](), list[Any]()
    monkeypatch.setattr(TorchScript, "memory_is_short", lambda _, device: asked.append(device) or True)
    monkeypatch.setattr(TorchScript, "free_memory", lambda _: left.append(store.get("of an earlier run")))
    store.keep("of an earlier run", None, 9)
    recorder = Recorder(TorchScript(), store=store)
    recorder.program("sum", adding)
    assert asked == [torch.device("cpu")] and left == [None]  # memory is given back after programs have gone
    store.keep("of an earlier run", None, 9)
    recorder.program("sum", adding)
    Recorder(TorchScript(), store=store).program("sum", adding)  # in another run
    assert store.get("of an earlier run") is not None and len(asked) == 1


def test_a_run_whose_program_was_let_go_records_it_again() -> None:
    store, total = ProgramStore(), torch.zeros(2)
    recorder = Recorder(TorchScript(), store=store)
    for expected in (1, 1, 2):
        program = recorder.program("sum", adding)
        assert program is not None and recorder.num_recorded == expected
        program(total, torch.ones(2), torch.ones(3, 2))
        if total[0] == 6:
            del program
            store.clear()
    assert total.tolist() == [9.0, 9.0]


def test_runs_at_the_same_time_share_programs() -> None:
    alone = [played(engine="batched-fast", seed=seed).state for seed in range(4)]
    runs = [Run(FedAvg(), "batched-fast", active=6, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda run: run.rounds(1), runs))
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)
    assert sum(map(num_recorded, runs)) == 0


@pytest.mark.parametrize(
    ("engine", "deterministic", "rounds"), [("gpu", False, 60), ("gpu", True, 6), ("loop", False, 6)]
)
def test_what_pays_in_a_grid_is_prepared_unless_a_run_must_decide_alone(
    engine: str, deterministic: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(load("digits", ["rounds=6"]))
    options = replace(built.config.engine, name=engine, deterministic=deterministic)
    asked: list[int] = []
    monkeypatch.setattr(setup_engine, "assemble", lambda *_, **given: asked.append(given["rounds"]))
    monkeypatch.setattr(setup_engine, "_gpus", lambda config: ())
    config = replace(built.config, engine=options)
    setup_engine.build_engine(replace(built, config=config), None, runs_alike=10)
    assert asked == [rounds]


def test_a_step_is_recorded_before_it_is_taken() -> None:
    """Whoever compiles it need not wait for that; and what it is compared with is the step itself."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        w.sub_(0.1 * x)
        return w.sum()

    recorder, w, x = Recorder(TorchScript()), torch.ones(3), torch.arange(3.0)
    new = NewStep("sum", step, StepArguments([w], [x], 1, 0))
    recorder.begin(new)
    assert new.candidates is not None and new.stepped == ()
    recorder.take_step(new)
    torch.testing.assert_close(new.stepped[0], torch.ones(3) - 0.1 * x)
    program = recorder.finish(new).program
    assert program is not None and torch.equal(w, torch.ones(3))
    program(w, None, torch.stack([x, x]))
    torch.testing.assert_close(w, torch.ones(3) - 0.2 * x)


@pytest.mark.parametrize("wrong", ["a step that is not taken", "another loss", "no loss", "nothing"])
def test_a_small_step_must_be_repeated_as_exactly_as_a_large_one(wrong: str) -> None:
    """Of parameters about 1, a step of 1e-5, and a program that does something else."""

    def step(w: Tensor, x: Tensor) -> Tensor:
        w.sub_(1e-5 * x)
        return w.sum()

    def program(constants: Sequence[Tensor], turns: Sequence[Tensor]) -> Tensor:
        (w,), (x,) = constants, turns[0]
        loss = w.sum() if wrong == "a step that is not taken" else step(w, x)
        return {"another loss": 1.1 * loss, "no loss": loss * torch.nan}.get(wrong, loss)[None]

    recorder = Recorder(TorchScript())
    new = NewStep("small", step, StepArguments([torch.ones(30)], [torch.arange(30.0)], 1, 0))
    recorder.begin(new)
    recorder.take_step(new)
    assert recorder.matches(program, new.arguments, new.stepped) is (wrong == "nothing")


def test_an_operator_whose_result_cannot_be_foretold_is_recorded_with_its_numbers() -> None:
    library = torch.library.Library("fnrfl_test", "DEF")
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CPU")  # nothing says what shape comes of it
    w, x = torch.ones(3), torch.arange(3.0)

    def step(w: Tensor, fixed: None, x: Tensor) -> Tensor:
        w.add_(torch.ops.fnrfl_test.doubled(x))
        return w.sum()

    program = Recorder(TorchScript()).program("doubled", lambda: (step, w, None, x))
    assert program is not None
    program(w, None, x[None])
    assert torch.equal(w, torch.ones(3) + 2 * x)


# -- rewriting: fewer operators, the same numbers up to rounding, and nothing read too late ---------------------------


aten = torch.ops.aten
LR = torch.tensor(0.3, dtype=torch.float64)


def operators(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def twice(step: Callable[..., Tensor], *arguments: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The record of a step, two times."""
    given = StepArguments(list(arguments), [], 0, 0)
    return recorded(step, given).graph, recorded(step, given).graph


def assert_do_the_same(one: fx.GraphModule, other: fx.GraphModule, *arguments: Tensor) -> None:
    """Three steps in a row: what is changed in place is an argument of the next."""
    ends = []
    for graph in (one, other):
        mine = [t.clone() for t in arguments]
        graph.recompile()
        ends.append([*(graph(*mine) for _ in range(3)), *mine])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)


def net_of(*widths: int) -> Net:
    torch.manual_seed(0)
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    return Net(nn.Sequential(*layers[:-1]).double(), torch.zeros(2, widths[0], dtype=torch.float64))


def descent(net: Net) -> Callable[..., Tensor]:
    """A step of one client."""

    def step(params: Tensor, lr: Tensor, x: Tensor, y: Tensor) -> Tensor:
        def loss(p: Tensor) -> Tensor:
            return cross_entropy(net.apply(p, {}, x, mode="batch")[0].logits, y).mean()

        grad, value = grad_and_value(loss)(params)
        params.sub_(grad * lr)
        return value

    return step


def arguments(net: Net, *clients: int) -> list[Tensor]:
    """Parameters, a learning rate and a batch, of one client or of several."""
    x = torch.randn(*clients, 8, next(iter(net.shapes.values()))[1], dtype=torch.float64)
    return [net.flatten()[0].expand(*clients, -1).clone(), LR, x, torch.randint(4, (*clients, 8))]


def test_weights_of_large_layers_go_down_by_the_product_that_their_gradient_is() -> None:
    net = net_of(200, 200, 180, 4)
    given = arguments(net)
    whole, by_layer = twice(descent(net), *given)
    update_by_parts(by_layer.graph)
    assert operators(whole).count(aten.cat.default) == 1
    assert operators(by_layer).count(aten.addmm_.default) == 2  # the large layers
    assert operators(by_layer).count(aten.addcmul_.default) == 2  # and what is after each of them
    assert operators(by_layer).count(aten.mm.default) == operators(whole).count(aten.mm.default) - 2
    assert_do_the_same(whole, by_layer, *given)


@pytest.mark.parametrize("widths", [(6, 5, 4), (200, 200, 4)])
@pytest.mark.parametrize("clients", [(), (3,)])
def test_a_step_is_the_same_and_shorter(widths: tuple[int, ...], clients: tuple[int, ...]) -> None:
    net = net_of(*widths)
    given, step = arguments(net, *clients), descent(net)
    plain, rewritten = twice(vmap(step, in_dims=(0, None, 0, 0)) if clients else step, *given)
    rewrite(rewritten.graph)
    left = operators(rewritten)
    assert aten.mul.Scalar not in left and aten.select_backward.default not in left and aten.sub_.Tensor not in left
    assert_do_the_same(plain, rewritten, *given)


def test_logits_are_computed_in_the_order_in_which_the_softmax_reads_them() -> None:
    net = net_of(6, 5, 4)
    given = arguments(net, 3)
    plain, turned = twice(vmap(descent(net), in_dims=(0, None, 0, 0)), *given)
    put_classes_first(turned.graph)

    def reads_as_it_lies(graph: fx.GraphModule) -> bool:
        (softmax,) = graph.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
        return softmax.args[0].target is aten.add.Tensor

    assert reads_as_it_lies(turned) and not reads_as_it_lies(plain)
    assert_do_the_same(plain, turned, *given)


HALF, SMALL = 1 << 16, net_of(6, 5, 4)


def read_twice(params: Tensor, x: Tensor) -> Tensor:
    """Logits are read in two orders."""
    logits = SMALL.apply(params, {}, x, mode="batch")[0].logits
    return logits.sum() + logits.mT.log_softmax(-2).sum()


def read_late(w: Tensor, x: Tensor) -> Tensor:
    """A copy is read after its source has changed."""
    seen = aten.mul.Scalar(w, 1).view(3, 1)
    w.add_(x)
    return (seen * x).sum()


@pytest.mark.parametrize(
    ("step", "given", "rule"),
    [
        (read_twice, (SMALL.flatten()[0], torch.randn(8, 6).double()), put_classes_first),
        (read_late, (torch.arange(3.0), torch.ones(3)), leave_out_copies),
        (  # a row of several
            lambda w, x: w.add_(aten.select_backward(x, [2, 3], 0, 1) * 2).sum(),
            (torch.zeros(2, 3), torch.ones(3)),
            leave_out_copies,
        ),
        (  # a learning rate of every parameter
            lambda p, lr, x: p.sub_(torch.cat([x * 2, x * 3]) * lr).sum(),
            (torch.randn(2 * HALF), torch.rand(2 * HALF), torch.randn(HALF)),
            rewrite,
        ),
    ],
    ids=["read twice", "read late", "a row of several", "a vector of rates"],
)
def test_what_a_rule_does_not_fit_stays_as_it_was(step: Any, given: tuple[Tensor, ...], rule: Any) -> None:
    plain, rewritten = twice(step, *given)
    rule(rewritten.graph)
    assert operators(rewritten) == operators(plain)
    assert_do_the_same(plain, rewritten, *given)


@pytest.mark.parametrize(
    "gradient",
    [
        lambda p, x: torch.cat([p[HALF:], p[:HALF]]),  # each part goes by what the other was
        lambda p, x: torch.cat([p[HALF:] * 2, (x[:, None] @ p[None, :256]).flatten()]),
        lambda p, x: torch.cat([(x[:, None] @ x[None].cos()).t().flatten(), p[:HALF] * 2]),
        lambda p, x: p.flip(0),
    ],
    ids=["views", "a product with parameters", "a turned product", "no parts"],
)
def test_every_part_goes_by_the_parameters_of_before(gradient: Callable[[Tensor, Tensor], Tensor]) -> None:
    step = lambda p, lr, x: p.sub_(gradient(p, x) * lr).sum()  # noqa: E731
    given = [torch.randn(2 * HALF, dtype=torch.float64), LR, torch.randn(256, dtype=torch.float64)]
    plain, rewritten = twice(step, *given)
    rewrite(rewritten.graph)
    assert_do_the_same(plain, rewritten, *given)


def test_a_gradient_that_memory_is_added_to_goes_down_in_one_pass() -> None:
    def step(p: Tensor, velocity: Tensor, lr: Tensor, x: Tensor) -> Tensor:
        p.sub_(velocity.mul_(0.9).add_(torch.cat([x, x])) * lr)
        return p.sum()

    given = [torch.randn(2 * HALF), torch.randn(2 * HALF), LR.float(), torch.randn(HALF)]
    plain, rewritten = twice(step, *given)
    rewrite(rewritten.graph)
    assert aten.addcmul_.default in operators(rewritten)
    rewritten.recompile()
    torch.testing.assert_close(*(graph(*[t.clone() for t in given]) for graph in (plain, rewritten)), rtol=1e-4, atol=0)


def test_a_record_that_a_rule_spoils_is_used_as_it_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.mul.Tensor:
                node.target, node.args = torch.ops.aten.view.default, (node.args[0], [7])

    monkeypatch.setattr(torchscript, "rewrite", spoil)
    step = lambda w, fixed, x: w.add_(w * x).sum()  # noqa: E731
    program = Recorder(TorchScript()).program("spoiled", lambda: (step, torch.ones(3), None, torch.ones(3)))
    assert program is not None
    program(carry := torch.ones(3), None, torch.ones(2, 3))
    assert torch.equal(carry, torch.full((3,), 4.0))


MUTANTS = [
    *mutants(_is_only_read, views_are_not_followed=("_is_only_read(user, unwritten)", "True")),
    *mutants(leave_out_copies, any_row_is_the_only_one=("node.args[1][node.args[2]] == 1", "True")),
    *mutants(_update_each, products_with_parameters=("_is_view_of(params, *product.args)", "False")),
    *mutants(_is_in_parts, parts_of_the_parameters=("not _is_view_of(params, *parts)", "True")),
    *mutants(_is_plain_descent, every_learning_rate=("_shape(lr) == ()", "True")),
]
