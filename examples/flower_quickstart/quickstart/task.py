"""The model, the data and the training; nothing here knows of Flower."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fnrfl.data.datasets import load

PUBLIC = 200  # examples with labels that every node has and no client owns


class Net(nn.Module):
    """Two layers for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x.flatten(1)).relu())


def load_data(partition: int, num_partitions: int) -> tuple[DataLoader, DataLoader]:
    """One client's examples to train on and to test on; sorted by label first, so each client knows few classes."""
    x, y = _shuffled()
    x, y = x[PUBLIC:], y[PUBLIC:]
    mine = y.argsort(stable=True).tensor_split(num_partitions)[partition]
    seeded = torch.Generator().manual_seed(partition)  # so that a run can be repeated
    train, test = mine[torch.randperm(len(mine), generator=seeded)].tensor_split([len(mine) * 4 // 5])
    return (
        DataLoader(TensorDataset(x[train], y[train]), batch_size=32, shuffle=True, generator=seeded),
        DataLoader(TensorDataset(x[test], y[test]), batch_size=256),
    )


def public_loader() -> DataLoader:
    """The public examples."""
    x, y = _shuffled()
    seeded = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(x[:PUBLIC], y[:PUBLIC]), batch_size=32, shuffle=True, generator=seeded)


def test_loader() -> DataLoader:
    """What the server tests on: examples that nobody trains on."""
    test = load("digits").test
    return DataLoader(TensorDataset(test.x, test.y), batch_size=512)


def train(model: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train a model in place; the mean loss of the last epoch."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y)
    return total / len(loader.dataset)


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader) -> float:
    """The share of right answers."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return right / len(loader.dataset)


def _shuffled() -> tuple[Tensor, Tensor]:
    """All training examples, in the same order at every node."""
    data = load("digits").train
    order = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(0))
    return data.x[order], data.y[order]
