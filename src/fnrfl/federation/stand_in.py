"""What a server has in the place of the sites' data: how many examples there are of each class, and no example.

Inputs and labels are tensors without values (torch's "meta" device): they have a shape and a type, and take no memory,
however many examples a site claims. Reading one fails, so that nothing on a server can use them by mistake.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fnrfl.core.errors import CompatibilityError
from fnrfl.core.ndarrays import Ints
from fnrfl.data.datasets import Dataset, DataSource, Part, read_source
from fnrfl.data.partition.value import Partition
from fnrfl.data.partition.views import both_parts
from fnrfl.data.reading import Expected, Reading
from fnrfl.data.scenarios import Scenario
from fnrfl.federation.agreement import Agreement, Schema


def stand_in(agreement: Agreement, test: Part) -> Dataset:
    """The sites' data as the server knows it."""
    schema, count = agreed_schema(agreement), sum(agreement.sizes)
    blank = torch.empty(count, *schema.input_shape, dtype=getattr(torch, schema.dtype), device="meta")
    return Dataset(
        "the sites' data",
        Part(blank, torch.empty(count, dtype=torch.int64, device="meta")),
        test,
        schema.classes,
        "each site's own machine",
        agreement.data,
        columns=schema.columns,
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
    """Who holds how many examples, as one site knows it: all that others hold counts as of the first class."""
    counts = np.zeros((len(agreement.sizes), len(own)), dtype=np.int64)
    counts[:, 0], counts[client] = agreement.sizes, own
    return partition_elsewhere(agreement, counts, scenario, seed)


def partition_elsewhere(agreement: Agreement, counts: Ints, scenario: Scenario, seed: int) -> Partition:
    """Who holds how many examples of each class, [clients, classes], and no position of any."""
    return Partition((np.arange(0),) * len(counts), counts, scenario, seed, agreement.sites)
