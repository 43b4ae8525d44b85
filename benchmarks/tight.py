"""The measure: tight hand-written federated loops.

Tensors in memory, one model reused, `autograd.grad` and one fused update, no DataLoader, no optimiser object: faster
than what most people write. `fedavg` is the reference; the others do the extra work of a method on top of it and
nothing else. Each yields the test accuracy of every round.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Examples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Work:
    """Everything a loop needs, in memory."""

    net: nn.Sequential
    data: list[Examples]
    test: Examples
    cohorts: list[list[int]]
    lr: float
    batch: int
    epochs: int
    public: Examples
    ranking: Examples
    public_batch: int
    public_epochs: int


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor, batch: int = 1000) -> float:
    """Share of right answers."""
    net.eval()
    hit = 0
    for i in range(0, len(y), batch):
        hit += (net(x[i : i + batch]).argmax(1) == y[i : i + batch]).sum().item()
    return hit / len(y)


def fedavg(work: Work) -> Iterator[float]:
    """Means of models."""
    net, data, lr, B = work.net, work.data, -work.lr, work.batch
    ps = list(net.parameters())
    glob = [p.detach().clone() for p in ps]
    for chosen in work.cohorts:
        tot = sum(len(data[c][1]) for c in chosen)
        acc_w = [torch.zeros_like(g) for g in glob]
        net.train()
        for c in chosen:
            x, y = data[c]
            n = len(y)
            with torch.no_grad():
                torch._foreach_copy_(ps, glob)
            for _ in range(work.epochs):
                perm = torch.randperm(n)
                xs, ys = x[perm], y[perm]
                for i in range(0, n, B):
                    g = torch.autograd.grad(F.cross_entropy(net(xs[i : i + B]), ys[i : i + B]), ps)
                    with torch.no_grad():
                        torch._foreach_add_(ps, g, alpha=lr)
            with torch.no_grad():
                torch._foreach_add_(acc_w, ps, alpha=n / tot)
        glob = acc_w
        with torch.no_grad():
            torch._foreach_copy_(ps, glob)
        yield accuracy(net, *work.test)


def scaffold(work: Work) -> Iterator[float]:
    """FedAvg with control variates, option II."""
    net, data, B = work.net, work.data, work.batch
    ps = list(net.parameters())
    glob = [p.detach().clone() for p in ps]
    c = [torch.zeros_like(g) for g in glob]
    own = [[torch.zeros_like(g) for g in glob] for _ in data]
    everybody = sum(len(y) for _, y in data)
    for chosen in work.cohorts:
        tot = sum(len(data[k][1]) for k in chosen)
        acc_w = [torch.zeros_like(g) for g in glob]
        acc_c = [torch.zeros_like(g) for g in glob]
        net.train()
        for k in chosen:
            x, y = data[k]
            n, steps = len(y), 0
            with torch.no_grad():
                torch._foreach_copy_(ps, glob)
                shift = torch._foreach_sub(c, own[k])
            for _ in range(work.epochs):
                perm = torch.randperm(n)
                xs, ys = x[perm], y[perm]
                for i in range(0, n, B):
                    g = torch.autograd.grad(F.cross_entropy(net(xs[i : i + B]), ys[i : i + B]), ps)
                    with torch.no_grad():
                        torch._foreach_add_(ps, torch._foreach_add(g, shift), alpha=-work.lr)
                    steps += 1
            with torch.no_grad():
                drift = torch._foreach_div(torch._foreach_sub(glob, ps), steps * work.lr)
                change = torch._foreach_sub(drift, c)
                torch._foreach_add_(own[k], change)
                torch._foreach_add_(acc_c, change, alpha=n / everybody)
                torch._foreach_add_(acc_w, ps, alpha=n / tot)
        glob = acc_w
        with torch.no_grad():
            torch._foreach_add_(c, acc_c)
            torch._foreach_copy_(ps, glob)
        yield accuracy(net, *work.test)


def moon(work: Work, mu: float = 1.0, tau: float = 0.5) -> Iterator[float]:
    """FedAvg with a contrast to the received and the previous model's features."""
    net, data, B = work.net, work.data, work.batch
    body, head, ps = net[:-1], net[-1], list(net.parameters())
    glob = [p.detach().clone() for p in ps]
    previous: dict[int, list[Tensor]] = {}
    received, before = copy.deepcopy(body), copy.deepcopy(body)
    references = [list(model.parameters()) for model in (received, before)]
    for chosen in work.cohorts:
        tot = sum(len(data[k][1]) for k in chosen)
        acc_w = [torch.zeros_like(g) for g in glob]
        net.train()
        for k in chosen:
            x, y = data[k]
            n = len(y)
            with torch.no_grad():
                torch._foreach_copy_(ps, glob)
                torch._foreach_copy_(references[0], glob[: len(references[0])])
                if k in previous:
                    torch._foreach_copy_(references[1], previous[k][: len(references[1])])
            for _ in range(work.epochs):
                perm = torch.randperm(n)
                xs, ys = x[perm], y[perm]
                for i in range(0, n, B):
                    z = body(xs[i : i + B])
                    loss = F.cross_entropy(head(z), ys[i : i + B])
                    if k in previous:
                        with torch.no_grad():
                            near, far = received(xs[i : i + B]), before(xs[i : i + B])
                        near, far = F.cosine_similarity(z, near), F.cosine_similarity(z, far)
                        loss = loss - mu * torch.stack([near, far], 1).div(tau).log_softmax(1)[:, 0].mean()
                    g = torch.autograd.grad(loss, ps)
                    with torch.no_grad():
                        torch._foreach_add_(ps, g, alpha=-work.lr)
            with torch.no_grad():
                torch._foreach_add_(acc_w, ps, alpha=n / tot)
                previous[k] = [p.detach().clone() for p in ps]
        glob = acc_w
        with torch.no_grad():
            torch._foreach_copy_(ps, glob)
        yield accuracy(net, *work.test)


def fnr(work: Work, share: float = 0.5, weight: float = 0.1) -> Iterator[float]:
    """FedAvg whose weakest half is refined on public data, with the relative penalty."""
    net, data, B = work.net, work.data, work.batch
    body, head, ps = net[:-1], net[-1], list(net.parameters())
    glob = [p.detach().clone() for p in ps]
    px, py = work.public
    classes = int(work.test[1].max()) + 1
    count = torch.bincount(py, minlength=classes).clamp(min=1)

    @torch.no_grad()
    def class_norms() -> Tensor:
        return torch.zeros(classes).index_add_(0, py, body(px).norm(dim=1)) / count

    for chosen in work.cohorts:
        tot = sum(len(data[k][1]) for k in chosen)
        net.train()
        models, norms, ranks = {}, {}, {}
        for k in chosen:
            x, y = data[k]
            n = len(y)
            with torch.no_grad():
                torch._foreach_copy_(ps, glob)
            for _ in range(work.epochs):
                perm = torch.randperm(n)
                xs, ys = x[perm], y[perm]
                for i in range(0, n, B):
                    g = torch.autograd.grad(F.cross_entropy(net(xs[i : i + B]), ys[i : i + B]), ps)
                    with torch.no_grad():
                        torch._foreach_add_(ps, g, alpha=-work.lr)
            models[k] = [p.detach().clone() for p in ps]
            norms[k], ranks[k] = class_norms(), accuracy(net, *work.ranking)
        weak = sorted(chosen, key=lambda k: ranks[k])[: int(share * len(chosen))]
        target = torch.stack([norms[k] for k in chosen if k not in weak]).mean(0)
        for k in weak:
            with torch.no_grad():
                torch._foreach_copy_(ps, models[k])
            for _ in range(work.public_epochs):
                perm = torch.randperm(len(py))
                xs, ys = px[perm], py[perm]
                for i in range(0, len(py), work.public_batch):
                    z, labels = body(xs[i : i + work.public_batch]), ys[i : i + work.public_batch]
                    hot = F.one_hot(labels, classes).float()
                    seen = hot.sum(0)
                    live = (seen > 0) & (target > 0)
                    mean = torch.where(live, (z.norm(dim=1) @ hot) / seen.clamp(min=1), 1.0)
                    gap = (mean / torch.where(live, target, 1.0) - 1).square()
                    penalty = (torch.where(live, seen, 0.0) / len(labels)) @ gap
                    g = torch.autograd.grad(F.cross_entropy(head(z), labels) + weight * penalty, ps)
                    with torch.no_grad():
                        torch._foreach_add_(ps, g, alpha=-work.lr)
            models[k] = [p.detach().clone() for p in ps]
        acc_w = [torch.zeros_like(g) for g in glob]
        with torch.no_grad():
            for k in chosen:
                torch._foreach_add_(acc_w, models[k], alpha=len(data[k][1]) / tot)
        glob = acc_w
        with torch.no_grad():
            torch._foreach_copy_(ps, glob)
        yield accuracy(net, *work.test)


LOOPS = {"fedavg": fedavg, "scaffold": scaffold, "moon": moon, "fnr": fnr}
