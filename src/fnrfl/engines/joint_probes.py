"""Probes that the models of several clients answer in one pass; many passes may be one recorded program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice

import torch
from torch import Tensor
from torch.func import vmap

from fnrfl.core import trees
from fnrfl.core.engine import Probe, Step, run_steps
from fnrfl.core.trees import Tree
from fnrfl.core.values import Batch, State
from fnrfl.engines.place import Place, Station
from fnrfl.engines.programs import Program
from fnrfl.engines.recorder import Recorder, Wanted
from fnrfl.engines.runner import Probing

PassPrograms = dict[tuple[torch.device, int, int], Program]  # (device, number of models, batch size) -> recorded passes
MANY = 100  # batches of one size in the probes of a run: fewer are not worth a program
AT_ONCE = 128  # batches that a program is handed


def ask_together(probing: Probing, place: Place, group_size: int, recorder: Recorder | None, rounds: int) -> list[Tree]:
    """The answers of all clients, who look at the same batches; `rounds` says how often they will be asked about."""
    count = len(probing.request.clients)
    groups = [range(first, min(first + group_size, count)) for first in range(0, count, group_size)]
    programs = {} if recorder is None else _programs(probing, place, groups, recorder, rounds)

    def ask(station: Station, g: int) -> list[Tree]:
        models, probe = _models(probing, station, groups[g]), probing.request.probe
        step, total = _pass(probing, station), dict[str, Tensor]()
        for batches in _of_one_size(probing, station, groups[g][0]):
            if not total:
                total = trees.aligned(_answers(probing, station, models, trees.rows(batches, 0)))
                batches = trees.rows(batches, slice(1, None))
            program = programs.get((station.net.device, len(groups[g]), batches.y.shape[1]))
            if type(probe).add is not Probe.add:
                for i in range(len(batches.y)):
                    total = probe.add(total, _answers(probing, station, models, trees.rows(batches, i)))
            elif len(batches.y):
                (program or (lambda *work: run_steps(step, *work)))(total, models, batches)
        return [probe.finish({k: v[i] for k, v in total.items()}) for i in range(len(groups[g]))]

    return [answer for group in place.each(len(groups), ask) for answer in group]


def _models(probing: Probing, station: Station, group: Sequence[int]) -> State:
    return trees.moved(trees.stacked([probing.model(m) for m in group]), station.net.device)


def _answers(probing: Probing, station: Station, models: State, batch: Batch) -> Tree:
    """Sums over one batch, of every model."""
    batch = replace(batch, x=station.net.laid_out(batch.x))
    answer = lambda p, b: probing.request.probe(probing.forward(station.net, p, b, batch), batch)  # noqa: E731
    answers: Tree = vmap(answer)(models.params, models.buffers)
    return answers


def _pass(probing: Probing, station: Station) -> Step:
    """A batch more, as a function of everything that it reads and writes."""

    def step(total: Tree, models: State, batch: Batch) -> Tensor:
        for name, part in _answers(probing, station, models, batch).items():
            total[name].add_(part)
        return models.params.new_zeros(())

    return step


def _of_one_size(probing: Probing, station: Station, m: int) -> Iterator[Batch]:
    """The batches of a probe, [steps, size, ...]: some at a time, all of one size."""
    batches = probing.batches(station, probing.request.clients[m])
    for _, alike in groupby(batches, lambda batch: len(batch.y)):
        while some := list(islice(alike, AT_ONCE)):
            yield trees.stacked(some)


def _programs(
    probing: Probing, place: Place, groups: Sequence[Sequence[int]], recorder: Recorder, rounds: int
) -> PassPrograms:
    """Passes over batches of the most frequent size, recorded for every device and number of models.

    Only of probes in train mode: others look at large batches, and Python is no part of their time.
    """
    request, training = probing.request, probing.request.probe.training
    if training is None or type(request.probe).add is not Probe.add:
        return {}
    sizes = place.feed.plan(request.clients[0], request.data, training, probing.stream(request.clients[0])).sizes
    if sizes.count(sizes[0]) * rounds < MANY:
        return {}
    steps = sizes.count(sizes[0]) * rounds
    asked = [(station, width) for width in {len(group) for group in groups} for station in place.devices()]
    wanted = [_wanted(probing, station, range(width), steps * width) for station, width in asked]
    found = zip(asked, recorder.programs_of(wanted), strict=True)
    return {(station.net.device, width, sizes[0]): program for (station, width), program in found if program}


def _wanted(probing: Probing, station: Station, group: Sequence[int], expected_steps: int) -> Wanted:
    probe = probing.request.probe

    def example() -> tuple[Step, Tree, State, Batch]:
        models = _models(probing, station, group)
        batch = next(probing.batches(station, probing.request.clients[group[0]]))
        return _pass(probing, station), trees.aligned(_answers(probing, station, models, batch)), models, batch

    key = "probe", len(group), probe, type(probe).__call__, station.net.device
    return Wanted(key, example, expected_steps)
