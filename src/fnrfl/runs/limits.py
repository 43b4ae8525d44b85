"""Sizes that nobody can mean, and batches that a model cannot be trained on: refused before they are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fnrfl.config import RunConfig
from fnrfl.core.errors import CompatibilityError
from fnrfl.core.net import Net
from fnrfl.core.words import counted
from fnrfl.data.partition.views import Splits

MOST_THREADS = 1024  # whatever the machine: a run may go on elsewhere
MOST_FILLED = 2**16  # examples of a batch that may be filled by repeating fewer: of a small data set, any usual batch
MOST_SEEN = 2**31  # examples that a client sees in a round: more cannot be planned at once


@dataclass(frozen=True)
class Passes:
    """Passes over some data in batches, as a section of the config has them."""

    section: str  # "client" or "fnr"
    whose: str
    examples: int
    most: int  # examples that there are for all
    epochs: int
    batch: int
    train_mode: bool

    def smallest(self, last_batch: str) -> int:
        """The size of the smallest batch."""
        rest = self.examples % self.batch
        return rest if last_batch == "keep" and rest else self.batch


def check_sizes(config: RunConfig, net: Net, splits: Splits) -> None:
    """Refuse what would never end, and a batch of one where a layer needs more."""
    if config.engine.threads != "auto" and config.engine.threads > MOST_THREADS:
        raise CompatibilityError(
            f"engine.threads = {config.engine.threads} are more than any machine has use for; {MOST_THREADS} are the "
            "most. Set engine.threads = auto, a thread for each core."
        )
    for passes in _passes(config, splits):
        _check_amount(config, passes)
        if passes.epochs and passes.train_mode and passes.smallest(config.client.last_batch) == 1:
            _check_single(config, net, passes)


def _passes(config: RunConfig, splits: Splits) -> Iterator[Passes]:
    client, held = config.client, splits.sizes
    most = int(held.sum())
    for number in np.sort(np.unique(held, return_index=True)[1]):  # the first client of every size
        yield Passes("client", f"client {number}", int(held[number]), most, client.epochs, client.batch, True)
    if config.fnr is not None and config.fnr.when != "local":
        epochs, batch, public = config.fnr.epochs, config.fnr.batch, len(splits.public)
        yield Passes("fnr", "a refined client", public, public, epochs, batch, config.fnr.batchnorm != "frozen")


def _check_amount(config: RunConfig, passes: Passes) -> None:
    if passes.epochs * passes.examples > MOST_SEEN:
        raise CompatibilityError(
            f"{passes.section}.epochs = {passes.epochs} passes over the {passes.examples} examples of {passes.whose} "
            f"are more than can be planned for a round. Set it to at most {MOST_SEEN // passes.examples}, and more "
            "rounds."
        )
    if config.client.last_batch == "run-on" and passes.batch > max(MOST_FILLED, passes.epochs * passes.most):
        raise CompatibilityError(
            f"{passes.section}.batch = {passes.batch} is more than {passes.epochs} passes over all {passes.most} "
            'examples, and client.last_batch = "run-on" would fill a batch by repeating them. Set a smaller batch, or '
            'client.last_batch = "keep".'
        )


def _check_single(config: RunConfig, net: Net, passes: Passes) -> None:
    """Whether the model can be trained on one example, which BatchNorm over single numbers cannot."""
    params, buffers = net.flatten()
    one = torch.zeros(1, *net.input_shape, dtype=net.input_dtype)  # of whole numbers: tokens
    masks = {name: torch.ones(1, *shape) for name, shape in net.drop_shapes.items()}
    try:
        with torch.no_grad():
            net.apply(params, buffers, one, mode="batch", masks=masks)
    except (ValueError, RuntimeError) as error:
        keeps = config.client.last_batch != "run-on" and passes.batch > 1
        run_on = ', or client.last_batch = "run-on", which makes no small ones' if keeps else ""
        raise CompatibilityError(
            f'model = "{config.model.name}" cannot be trained on a batch of one example ({error}), and {passes.whose} '
            f"has such a batch: {counted(passes.examples, 'example')} by {passes.section}.batch = {passes.batch}. Set "
            f"a larger batch{run_on}."
        ) from error
