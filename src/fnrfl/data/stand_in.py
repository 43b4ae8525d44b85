"""What a server has in the place of the sites' data: how many examples there are of each class, and no example.

The inputs are tensors without values (torch's "meta" device): they have a shape and a type, and take no memory. Whoever
tries to read one fails, so that nothing on a server can use them by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fnrfl.core.errors import CompatibilityError
from fnrfl.core.ndarrays import Ints
from fnrfl.data.agreement import Agreement, Schema
from fnrfl.data.datasets import Dataset, DataSource, Part, read_source
from fnrfl.data.holdings import Partition
from fnrfl.data.reading import Expected, Reading
from fnrfl.data.splits import both_parts
from fnrfl.data.terms import Scenario


def stand_in(agreement: Agreement, counts: Sequence[Sequence[int]], test: Part) -> Dataset:
    """The sites' data as the server knows it; `counts` has the examples of each class, by client."""
    schema = agreed_schema(agreement)
    held = [np.repeat(np.arange(len(mine)), mine) for mine in counts]
    labels = torch.from_numpy(np.concatenate(held).astype(np.int64))
    blank = torch.empty(len(labels), *schema.input_shape, dtype=getattr(torch, schema.dtype), device="meta")
    return Dataset(
        "the sites' data",
        Part(blank, labels),
        test,
        schema.classes,
        "each site's own machine",
        agreement.data,
        columns=schema.columns,
        train_clients=tuple(np.repeat(np.array(agreement.sites, dtype=object), [len(mine) for mine in held])),
    )


def agreed_schema(agreement: Agreement) -> Schema:
    """What the data of all sites is like; an experiment has nothing to agree on."""
    assert agreement.schema is not None
    return agreement.schema


def load_test_set(path: str, agreement: Agreement, reading: Reading) -> Part:
    """The server's own test set, with the columns and class numbers that the sites have agreed on."""
    schema = agreed_schema(agreement)
    expected = Expected(schema.columns, colour=schema.colour, whose="the sites")
    what, dtype = f"The server's test set {path}", getattr(torch, schema.dtype)
    part = both_parts(_undivided(read_source(path, expected, reading)), schema.classes, what)
    pixels = [one == torch.uint8 for one in (part.x.dtype, dtype)]
    if tuple(part.x.shape[1:]) != schema.input_shape or pixels[0] != pixels[1]:
        raise CompatibilityError(
            f"{what} has examples of {str(part.x.dtype).removeprefix('torch.')}{list(part.x.shape[1:])}, and the sites "
            f"have {schema.dtype}{list(schema.input_shape)}; they must be alike. Prepare it in the same way."
        )
    floating = part.x.is_floating_point() and not dtype.is_floating_point  # fractions stay what they are
    return part if floating else Part(part.x.to(dtype), part.y)


def _undivided(source: DataSource) -> Dataset:
    """All examples of a source, of which none are set aside."""
    parts = list(source.raw.parts.values())
    if len(parts) == 2:
        return source.dataset()
    twice = replace(source, raw=replace(source.raw, parts={"train": parts[0], "test": parts[0]})).dataset()
    return replace(twice, test=twice.test.take(torch.arange(0)))


def stand_in_partition(agreement: Agreement, client: int, own: Ints, scenario: Scenario, seed: int) -> Partition:
    """Who holds how many examples, as one site knows it: of the classes, its `own` counts alone."""
    positions = tuple(np.broadcast_to(np.int64(0), size) for size in agreement.sizes)  # a number each, in no memory
    counts = np.zeros((len(positions), len(own)), dtype=np.int64)
    counts[client] = own
    return Partition(positions, counts, scenario, seed, agreement.sites)
