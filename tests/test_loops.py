"""FNR in a plain PyTorch loop: the same numbers as the package's own, and nothing of the caller's is disturbed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.parts.penalties import PENALTIES
from fnrfl.core.algorithm import Objective
from fnrfl.core.errors import CompatibilityError, ConfigError, FnrflError
from fnrfl.core.rng import generator, seeded
from fnrfl.core.types import LocalTask, State
from fnrfl.data.batches import plan
from fnrfl.process import one_intra_op_thread
from fnrfl.runs.functional import accuracy_on, class_norms, norm_targets, refine
from toys import NUM_CLASSES, NUM_FEATURES, Mlp, Run, assert_near, classification, distance

PUBLIC = 55
Mode = Literal["frozen", "batch", "updating"]
MODES: tuple[Mode, ...] = ("frozen", "batch", "updating")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Nets this small are fastest on one thread, and far faster on a busy machine."""
    with one_intra_op_thread():
        yield


def made(module: Callable[[], nn.Module] = Mlp) -> nn.Module:
    """A module in float64, the same at every call, whose BatchNorm has seen data; in train mode."""
    with seeded(3, "loops"):
        model = module().double().train()
        model(torch.randn(40, NUM_FEATURES, dtype=torch.float64))
    return model


class Without(nn.Sequential):
    """BatchNorm and no dropout, so that train mode draws nothing."""

    def __init__(self) -> None:
        hidden = nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU()
        super().__init__(*hidden, nn.Linear(16, NUM_CLASSES))


class Free(nn.Module):
    """What the engines refuse: one dropout layer called twice, and a functional one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(NUM_FEATURES, 16), nn.Linear(16, NUM_CLASSES)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(F.dropout(self.drop(self.hidden(x)).relu(), 0.1, self.training)))


def public() -> tuple[Tensor, Tensor]:
    return classification().pool.take("public", torch.arange(PUBLIC))


def batches(size: int = 16) -> list[tuple[Tensor, Tensor]]:
    x, y = public()
    return list(zip(x.split(size), y.split(size), strict=True))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    after = model.state_dict()
    return before.keys() == after.keys() and all(torch.equal(after[k], v) for k, v in before.items())


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


GOAL = torch.tensor([1.0, 3.0, 2.0, 4.0], dtype=torch.float64)


# -- class norms ------------------------------------------------------------------------------------------------------


def test_class_norms_are_a_loop_over_examples() -> None:
    model = made()
    x, y = public()
    assert isinstance(model, Mlp)
    model.eval()
    lengths: dict[int, list[float]] = {}
    for example, label in zip(x, y.tolist(), strict=True):
        features = model.norm(model.hidden(example[None])).relu()
        lengths.setdefault(label, []).append(float(features.detach().norm()))
    by_hand = torch.tensor([sum(lengths[k]) / len(lengths[k]) for k in range(NUM_CLASSES)])
    model.train()
    assert distance(class_norms(model, batches(7)), by_hand) < 1e-6  # of float32, in which by_hand is kept
    assert distance(class_norms(model, batches(7)), class_norms(model, batches(55))) < 1e-12


def test_class_norms_leave_the_model_as_it_was() -> None:
    """Parameters, buffers, the mode of every single layer, hooks, and the global random stream."""
    model = made()
    model.train()
    assert isinstance(model, Mlp)
    model.norm.eval()
    before, modes = snapshot(model), [layer.training for layer in model.modules()]
    x, y = public()
    torch.manual_seed(5)
    stream = torch.get_rng_state()
    norms = class_norms(model, DataLoader(TensorDataset(x, y), 8, shuffle=True))
    assert not norms.requires_grad
    assert unchanged(model, before)
    assert [layer.training for layer in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), stream)
    assert isinstance(model.drop, nn.Dropout)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules())


def test_a_class_without_examples_has_norm_zero() -> None:
    x, y = public()
    norms = class_norms(made(), [(x[y != 2], y[y != 2])], num_classes=6)
    assert norms.shape == (6,)
    assert (norms == 0).tolist() == [False, False, True, False, True, True]


def test_features_may_be_another_layer() -> None:
    model = made()
    assert isinstance(model, Mlp)
    x, y = public()
    found = class_norms(model, batches(), features="hidden")
    by_hand = torch.stack([model.hidden(x)[y == k].norm(dim=1).mean() for k in range(NUM_CLASSES)]).detach()
    assert distance(found, by_hand) < 1e-10
    assert distance(found, class_norms(model, batches())) > 1e-3


def test_any_iterable_will_do() -> None:
    (x, y), model, calls = public(), made(), list[int]()
    listed = class_norms(model, batches())

    def yielded() -> Any:
        calls.append(1)
        yield from batches()

    singly = [(x[i : i + 1], y[i : i + 1]) for i in range(PUBLIC)]
    for loader in (iter(batches(9)), DataLoader(TensorDataset(x, y), 10), singly, yielded):
        assert distance(class_norms(model, loader), listed) < 1e-12
    whole = flat(refine(made(Without), [(x, y)], GOAL))
    assert torch.equal(flat(refine(made(Without), [(x, y.to(torch.uint8))], GOAL)), whole)
    one, other = (refine(made(), loader, GOAL, epochs=3, batchnorm="frozen") for loader in (yielded, batches()))
    assert torch.equal(flat(one), flat(other)) and len(calls) == 4  # called for each pass


def test_accuracy_is_the_share_of_right_answers_and_leaves_the_model_as_it_was() -> None:
    model = made()
    before, (x, y) = snapshot(model), public()
    right = float((copy.deepcopy(model).eval()(x).argmax(1) == y).double().mean())
    assert accuracy_on(model, batches(7)) == pytest.approx(right, abs=1e-12)
    assert model.training
    assert unchanged(model, before)


# -- refinement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batchnorm", MODES)
@pytest.mark.parametrize("penalty", [p for p in PENALTIES if p != "constant"])
def test_refine_is_the_refinement_of_fnr(penalty: str, batchnorm: Mode) -> None:
    """A whole round of FNR on the package's engine; then the models of its refined clients again, by `refine`."""
    weight = 0.05 if penalty == "literal" else 0.7
    fnr = FNR(FedAvg(), penalty=penalty, batchnorm=batchnorm, epochs=3, batch=16, weight=weight)  # type: ignore[arg-type]
    module = Mlp if batchnorm == "frozen" else Without
    played = Run(fnr, world=classification(module=module))
    cohort = played.cohort(0)
    played.round()
    refined, norms = played.engine.notes["refined"], torch.tensor(played.engine.notes["norms"], dtype=torch.float64)
    assert isinstance(refined, list)
    assert len(refined) == 2
    rows = torch.tensor([cohort.tolist().index(client) for client in refined])
    targets = norm_targets(norms, rows, "others")
    handed = played.replies("refine")

    start = State(*played.net.flatten())
    again = Run(FedAvg(), world=classification(module=module))
    trained = again.engine.train(cohort, LocalTask(Objective(), "local", start))
    training = replace(played.engine.training, epochs=3, batch=16)
    pool = played.world.pool
    for m, client in enumerate(refined):
        row = int(rows[m])
        model = played.net.export(trained.params[row], {k: v[row] for k, v in trained.buffers.items()})
        assert distance(class_norms(model, [pool.take("public", torch.arange(PUBLIC))]), norms[row]) < 1e-12
        positions = plan(PUBLIC, training, lambda name, c=client: generator(played.seed, 0, c, "refine", name))  # type: ignore[misc]
        loader = [pool.take("public", p) for p in positions.batches]
        steps: Any = {"epochs": 1, "lr": training.lr, "weight_decay": training.weight_decay, "batchnorm": batchnorm}
        refine(model, loader, targets[m], penalty=penalty, weight=weight, peers=len(cohort) - len(refined), **steps)
        got = State(flat(model), dict(model.named_buffers()))
        theirs = State(handed.params[m], {k: v[m] for k, v in handed.buffers.items()})
        assert_near(got, theirs, 1e-12)
        assert distance(theirs.params, trained.params[row]) > 1e-3


def test_refine_without_penalty_is_torch_sgd() -> None:
    ours, theirs = made(Without), made(Without)
    options = {"weight": 0, "epochs": 3, "momentum": 0.5, "weight_decay": 0.01, "batchnorm": "updating"}
    assert refine(ours, batches(), GOAL, **options) is ours  # type: ignore[arg-type]
    by_hand(theirs, torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.5, weight_decay=0.01), epochs=3)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, atol=1e-12, rtol=0)


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int = 1) -> None:
    for _ in range(epochs):
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def test_the_weight_matters_and_pulls_the_norms() -> None:
    models = {w: refine(made(), batches(), GOAL, weight=w, epochs=20, lr=0.05) for w in (0.0, 1.0)}
    assert distance(flat(models[0.0]), flat(models[1.0])) > 1e-3
    gap = {w: float((class_norms(model, batches()) / GOAL - 1).square().mean()) for w, model in models.items()}
    assert gap[1.0] < 0.5 * gap[0.0]


def test_a_target_of_zero_is_none() -> None:
    without = refine(made(Without), batches(), torch.zeros(NUM_CLASSES, dtype=torch.float64), weight=5.0)
    assert torch.equal(flat(without), flat(refine(made(Without), batches(), GOAL, weight=0.0)))


def test_batchnorm_modes() -> None:
    """frozen and batch store no statistics; updating does; the three differ in what they learn."""
    found = {}
    for mode in MODES:
        model = made(Without)
        before = {k: v.clone() for k, v in model.named_buffers()}
        refine(model, batches(), GOAL, batchnorm=mode)
        same = [torch.equal(v, before[k]) for k, v in model.named_buffers()]
        assert all(same) if mode != "updating" else not any(same)
        found[mode] = flat(model)
    assert distance(found["frozen"], found["batch"]) > 1e-4
    assert torch.equal(found["batch"], found["updating"])  # the same gradients; only what is stored differs


def test_dropout_follows_torchs_stream_unless_frozen() -> None:
    def once(seed: int, mode: Mode, module: Callable[[], nn.Module]) -> Tensor:
        model = made(module)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            refine(model, batches(), GOAL, epochs=2, batchnorm=mode)
            assert torch.equal(before, torch.get_rng_state()) == (mode == "frozen")
        return flat(model)

    for module in (Mlp, Free):
        assert torch.equal(once(1, "frozen", module), once(2, "frozen", module))
        assert torch.equal(once(1, "batch", module), once(1, "batch", module))
        assert not torch.equal(once(1, "batch", module), once(2, "batch", module))


def test_refine_keeps_modes_frozen_parameters_and_layers() -> None:
    model = made()
    assert isinstance(model, Mlp)
    model.drop.eval()
    model.hidden.weight.requires_grad_(False)
    kept, moving = model.hidden.weight.clone(), model.head.weight
    before = moving.clone()
    refine(model, batches(), GOAL)
    assert [layer.training for layer in model.modules()] == [True, True, True, False, True]
    assert torch.equal(model.hidden.weight, kept)
    assert model.head.weight is moving
    assert moving.requires_grad
    assert not torch.equal(moving, before)
    assert isinstance(model.drop, nn.Dropout)


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.Linear(NUM_FEATURES, NUM_FEATURES)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.two(self.one(x).tanh())
            return logits

    ours, theirs = made(Tied), made(Tied)
    refine(ours, batches(), torch.zeros(NUM_FEATURES, dtype=torch.float64), epochs=1)
    assert isinstance(ours, Tied)
    assert ours.two.weight is ours.one.weight
    by_hand(theirs, torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9))
    assert distance(flat(ours), flat(theirs)) < 1e-12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu_is_refined_there() -> None:
    """Batches come from the CPU and are moved; the result is the CPU's, without dropout, whose masks a GPU draws."""
    there = made().cuda()
    refine(there, batches(), GOAL, weight=0.5, batchnorm="frozen")
    assert next(there.parameters()).is_cuda
    here = refine(made(), batches(), GOAL, weight=0.5, batchnorm="frozen")
    assert distance(flat(there).cpu(), flat(here)) < 1e-10
    assert distance(class_norms(there, batches()).cpu(), class_norms(there.cpu(), batches())) < 1e-10


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"penalty": "relativ"}, "relativ"),
        ({"weight": -1.0}, "weight = -1.0"),
        ({"epochs": -1}, "epochs = -1"),
        ({"lr": 0.0}, "lr = 0.0"),
        ({"batchnorm": "thawed"}, "thawed"),
        ({"targets": torch.ones(2, NUM_CLASSES)}, r"\(2, 4\)"),
        ({"targets": torch.ones(2)}, "there are 2 classes"),
        ({"public_loader": []}, "no batch"),
        ({"public_loader": iter(())}, "only once"),
        ({"features": "nothing"}, "nothing"),
        ({"lr": 1e200}, "no longer finite after step [01] of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_refused_and_the_model_is_untouched(options: dict[str, object], said: str) -> None:
    model = made()
    before = snapshot(model)
    with pytest.raises(FnrflError, match=said):
        refine(model, **{"public_loader": batches(), "targets": GOAL} | options)  # type: ignore[arg-type]
    assert unchanged(model, before)
    assert all(layer.training for layer in model.modules())


FLAT = nn.Sequential(nn.Unflatten(1, (1, NUM_FEATURES)), nn.Conv1d(1, 4, NUM_FEATURES), nn.Flatten()).double()
X, Y = public()


@pytest.mark.parametrize(
    ("model", "loader", "options", "error", "says"),
    [
        (Mlp, [], {}, ConfigError, "no batch"),
        (Mlp, [(X, Y)], {"num_classes": 3}, CompatibilityError, "3 classes"),
        (lambda: FLAT, [(X, Y)], {}, CompatibilityError, "features='pool'"),
        (Mlp, [{"image": X, "label": Y}], {}, ConfigError, r"\(x, y\)"),
        (Mlp, [(X, Y, Y)], {}, ConfigError, r"\(x, y\)"),
        (Mlp, [(X,)], {}, ConfigError, r"\(x, y\)"),
        (Mlp, [(X[:, 1:], Y)], {}, RuntimeError, "shapes"),
    ],
)
def test_class_norms_refuse_what_they_cannot_measure(
    model: Any, loader: Any, options: Any, error: Any, says: str
) -> None:
    net = made(model)
    with pytest.raises(error, match=says):
        class_norms(net, loader, **options)
    assert all(layer.training for layer in net.modules())


def test_a_net_without_linear_is_measured_where_it_is_told() -> None:
    assert class_norms(FLAT, batches(), features="1").shape == (4,)
