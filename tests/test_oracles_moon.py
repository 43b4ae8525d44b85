"""Card 4, MOON: what must come out, known without running a federation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fnrfl.algorithms.fedavg import FedAvg
from fnrfl.algorithms.fnr import FNR
from fnrfl.algorithms.moon import Contrastive, Moon
from fnrfl.core.types import Batch, Out, State, Training
from mutants import mutants
from toys import Mlp, Run, World, assert_same, classification, distance, run

HEADS = pytest.mark.parametrize("head", [0, 8])
ENGINES = pytest.mark.parametrize("engine", ["loop", "batched"])


def with_head(head: int, module: type[nn.Module] = Mlp) -> World:
    """The world whose model has MOON's projection head already: for FedAvg with the same architecture."""
    world = classification(module=module)
    return replace(world, module=lambda: Moon(head=head).adapt(world.module(), world.example))


@HEADS
@ENGINES
def test_card4_mu_zero_is_fedavg_bit_for_bit(head: int, engine: str) -> None:
    """With the same architecture, references and all."""
    assert_same(run(Moon(mu=0.0, head=head), engine, rounds=3)[0], run(FedAvg(), engine, 3, world=with_head(head))[0])


@HEADS
@ENGINES
def test_card4_first_round_is_fedavg_for_any_mu(head: int, engine: str) -> None:
    """Nobody has a previous model yet, so there is nothing to contrast with. The second round is another matter."""
    contrastive, bare = Run(Moon(mu=7.0, head=head), engine), Run(FedAvg(), engine, world=with_head(head))
    everyone = torch.arange(6)
    assert_same(contrastive.round(everyone), bare.round(everyone))
    assert distance(contrastive.round(everyone).params, bare.round(everyone).params) > 1e-6


def test_card4_a_late_joiner_has_no_previous_model() -> None:
    """Its first round is FedAvg's, whenever that is: the untrained model is not something to be pushed away from."""
    contrastive, bare = Run(Moon(mu=7.0)), Run(FedAvg())
    contrastive.round(torch.tensor([0, 1]))
    contrastive.round(torch.tensor([0, 1]))
    bare.state, bare.t = contrastive.state, contrastive.t
    assert_same(contrastive.round(torch.tensor([2])), bare.round(torch.tensor([2])))


@dataclass(frozen=True)
class References:
    """A model whose two references answer their own parameters: the projections are chosen by the test."""

    start: State

    def frozen(self, other: State, x: Tensor) -> Out:
        return Out(other.params, other.params, other.params)


def contrast(local: Tensor, received: Tensor, previous: Tensor, *, tau: float = 0.5, mu: float = 1.0) -> float:
    """The contrastive part of the loss of one batch with these projections, [B, D] each."""
    y = torch.zeros(len(local), dtype=torch.int64)
    batch, out, model = Batch(local, y, y), Out(local, local, local), References(State(received, {}))
    own = {"previous": previous, "seen": torch.ones(())}
    losses = [Contrastive(w, tau).loss(out, model, local, batch, {}, own) for w in (mu, 0.0)]
    return float(losses[0] - losses[1])


def test_card4_value_between_opposites() -> None:
    """s_g = 1, s_p = -1, tau = 0.5: log(1 + e^-4)."""
    u = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    assert contrast(u, 2 * u, -u) == pytest.approx(math.log1p(math.exp(-4)), abs=1e-14)
    assert contrast(u, 2 * u, -u) == pytest.approx(0.018150, abs=1e-6)
    assert contrast(u, u, u, mu=3.0) == pytest.approx(3 * math.log(2), abs=1e-14)


def test_card4_a_small_temperature_does_not_overflow() -> None:
    u = torch.tensor([[1.0, 0.0]])
    assert contrast(u, -u, u, tau=1e-3) == pytest.approx(2000.0, rel=1e-6)


def test_card4_swapping_the_references_changes_the_loss_by_the_similarities() -> None:
    """l(swapped) - l = mean of (s_g - s_p), the similarities over tau."""
    draw = torch.Generator().manual_seed(0)
    z, g, p = torch.randn(3, 5, 8, generator=draw, dtype=torch.float64)
    want = (cosine_similarity(z, g) - cosine_similarity(z, p)).mean() / 0.3
    assert contrast(z, p, g, tau=0.3) - contrast(z, g, p, tau=0.3) == pytest.approx(float(want), abs=1e-13)


class NoDropout(nn.Module):
    """Its features can be asked for, so that the loss can be computed with plain modules."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.norm(self.hidden(x)).relu()
        return features

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


@HEADS
@ENGINES
def test_card4_references_answer_in_eval_mode_with_their_own_statistics(head: int, engine: str) -> None:
    """The loss of a second participation's only step, against three ordinary modules."""
    world, mu, tau = classification(module=NoDropout), 5.0, 0.4
    training = Training(epochs=1, batch=1000, lr=0.5, last_batch="keep", weight_decay=0.0)
    played = Run(Moon(mu=mu, tau=tau, head=head), engine, world=world, training=training)
    everyone = torch.arange(6)
    played.round(everyone)
    memory = played.engine.memory.get(3)
    received = played.net.export(played.state.params, played.state.buffers)
    before = played.net.export(
        memory["previous"], {k.removeprefix("previous."): v for k, v in memory.items() if "." in k}
    )
    local = played.net.export(played.state.params, played.state.buffers).train()
    x, y = world.pool.take("private", world.pool.shards[3])
    played.round(everyone)

    def projection(module: nn.Module) -> Tensor:
        features = module.features(x)
        return module.head.project(features) if head else features

    with torch.no_grad():
        near = cosine_similarity(projection(local), projection(received)) / tau
        far = cosine_similarity(projection(local), projection(before)) / tau
        want = cross_entropy(local(x), y) + mu * (near.exp() + far.exp()).log().sub(near).mean()
    assert float(played.replies().loss[3]) == pytest.approx(float(want), abs=1e-12)
    assert distance(near, far) > 1e-3


@ENGINES
def test_card4_references_are_unchanged_after_a_round(engine: str) -> None:
    """Neither the received model nor the previous ones are trained, nor do their statistics move."""
    played = Run(Moon(mu=5.0, head=8), engine)
    played.round(torch.arange(6))
    frozen = [played.state.params, *played.state.buffers.values()]
    frozen += [t for i in range(6) for t in played.engine.memory.get(i).values()]
    copies = [t.clone() for t in frozen]
    played.round(torch.arange(6))
    assert all(torch.equal(a, b) for a, b in zip(frozen, copies, strict=True))


def test_card4_previous_is_the_model_of_the_last_participation() -> None:
    """Not refreshed from the server, kept while inactive, with its buffers."""
    played = Run(Moon())
    last: dict[int, tuple[Tensor, Tensor]] = {}
    for cohort in ([0, 1, 2], [2, 3], [0, 3], [3, 5]):
        played.round(torch.tensor(cohort))
        replies = played.replies()
        for m, client in enumerate(cohort):
            last[client] = replies.trained[m], replies.buffers["norm.running_var"][m]
        for client, (params, variance) in last.items():
            memory = played.engine.memory.get(client)
            assert torch.equal(memory["previous"], params)
            assert torch.equal(memory["previous.norm.running_var"], variance)
            assert memory["seen"] == 1
    assert 4 not in played.engine.memory
    assert played.engine.memory.get(4)["seen"] == 0


@pytest.mark.parametrize("batchnorm", ["frozen", "updating"])
def test_card4_previous_is_the_model_before_refinement(batchnorm: str) -> None:
    """Under FNR the negative stays the private solution; the refined model would push away from the correction."""
    played = Run(FNR(Moon(), batchnorm=batchnorm, norm_pass_train_mode=batchnorm == "updating"))
    for _ in range(2):
        played.round()
        private, refined = played.replies("local"), played.replies("refine")
        for m, client in enumerate(private.clients.tolist()):
            memory = played.engine.memory.get(client)
            assert torch.equal(memory["previous"], private.trained[m])
            assert torch.equal(memory["previous.norm.running_mean"], private.buffers["norm.running_mean"][m])
        for m, client in enumerate(refined.clients.tolist()):
            assert distance(played.engine.memory.get(client)["previous"], refined.params[m]) > 1e-6


def test_card4_features_for_refinement_are_the_backbone_not_the_projection() -> None:
    net = Run(Moon(head=8)).net
    assert (net.num_features, net.projection_head) == (16, "head")
    out, _ = net.apply(*net.flatten(), torch.zeros(2, 12, dtype=torch.float64), mode="frozen")
    assert out.features.shape == (2, 16)
    assert out.projection.shape == (2, 8)


# -- Mutants: changes of the equations that a test of this file must notice ------------------------------------------

MUTANTS = [
    *mutants(
        Contrastive.loss,
        near_and_far_swapped=("[near, far]", "[far, near]"),
        contrast_sign=(
            "-torch.stack([near, far], -1).div(self.tau).log_softmax(-1)[..., 0]",
            "torch.stack([near, far], -1).div(self.tau).log_softmax(-1)[..., 0]",
        ),
        temperature_multiplies=("torch.stack([near, far], -1).div", "torch.stack([near, far], -1).mul"),
        weight_dropped=("self.mu * own['seen']", "own['seen']"),
        contrast_before_first_part=("self.mu * own['seen']", "self.mu"),
        previous_in_foreign_buffers=(
            "model.frozen(previous, batch.x)",
            "model.frozen(State(previous.params, model.start.buffers), batch.x)",
        ),
        near_is_the_previous=("model.frozen(model.start, batch.x)", "model.frozen(previous, batch.x)"),
        contrast_of_logits=(
            "cosine_similarity(out.projection, model.frozen(model.start, ...).projection)",
            "cosine_similarity(out.logits, model.frozen(model.start, ...).logits)",
        ),
    ),
    *mutants(
        Contrastive.finish,
        previous_is_the_received=(
            "end.packed('previous', '.')",
            "State(start.params, end.buffers).packed('previous', '.')",
        ),
    ),
]
